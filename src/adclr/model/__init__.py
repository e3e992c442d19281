"""The Vision Transformer, the projection head, the losses and the method that adds them up: tensors only."""
