"""Uses of a frozen backbone: reading images, embeddings, pictures and the explorer."""
