"""The arguments that decide which function a ViT computes, and of which weights; which of them exclude each other."""

from __future__ import annotations

# of `VisionTransformer`
SHAPE = (
    *("dim", "depth", "num_heads", "patch_size", "input_size", "num_registers", "layer_scale", "query_keys"),
    *("position_resampling", "num_channels", "norm_eps", "query_read_only_blocks", "class_attention"),
    *("position_embedding", "mlp"),
)


def check_shape(
    dim: int,
    depth: int,
    num_heads: int,
    num_registers: int,
    query_keys: str,
    query_read_only_blocks: int,
    class_attention: int,
    rotary: bool,
) -> None:
    """Raise a ValueError for arguments of which no ViT can be built."""
    if dim % num_heads:
        raise ValueError(f"{num_heads} heads do not divide the width {dim}")
    if rotary and dim // num_heads % 4:
        raise ValueError(f"rotary positions need heads whose width is divisible by 4, not {dim // num_heads}")
    if not 0 <= query_read_only_blocks <= depth:
        raise ValueError(f"query_read_only_blocks is {query_read_only_blocks} where there are {depth} blocks")
    if query_read_only_blocks and query_keys in ("image_and_self", "all"):
        raise ValueError(f"query_read_only_blocks needs queries that do not attend to queries, not {query_keys=}")
    if class_attention and num_registers:
        raise ValueError(f"class attention has no registers, and num_registers is {num_registers}")
    if class_attention and rotary:
        raise ValueError("class attention needs learned positions, and position_embedding is rotary")
