"""Operations of the model with Triton kernels, each beside its reference in plain PyTorch."""
