"""Loading anybody's weights into the ViT, writing snapshots of tensors, and exporting to other formats."""
