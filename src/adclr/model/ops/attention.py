"""Attention of short sequences of several lengths, all in one tensor: every token attends to the image tokens.

On NVIDIA GPUs `fused` runs the kernels of `attention_kernels.py` directly on the output of the qkv layer, as one
operation for `torch.compile`. `dispatch.attend_plain` is the reference in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adclr.system import triton_available

DTYPES = (torch.bfloat16, torch.float16)  # tensor cores have no full float32: `dispatch.attend_plain` takes it
HEAD_WIDTHS = (16, 32, 64, 128)
MAX_KEYS = 272  # image tokens; flash attention is faster for more
MAX_HIDDEN = 15  # the first tile of keys, at least 16, must hold one that queries attend to
MIN_SHARED_MEMORY = 200_000  # bytes, for the tiles: H100, H200 and B200 have 228 kB, consumer GPUs 100 kB


class Group(NamedTuple):
    """Sequences of one length, each the image tokens and then the query tokens. Only image tokens are keys."""

    sequences: int
    tokens: int  # of a sequence
    image: int  # image tokens of a sequence
    hidden: int = 0  # image tokens, the first, that query tokens do not attend to


def fits(qkv: Tensor, groups: Sequence[Group], num_heads: int) -> bool:
    """Return whether the kernels support these inputs on this device."""
    return (
        triton_available.possible
        and qkv.device.type == "cuda"
        and qkv.dtype in DTYPES
        and qkv.shape[1] // 3 // num_heads in HEAD_WIDTHS
        and all(group.image <= MAX_KEYS and group.hidden <= MAX_HIDDEN for group in groups)
        and _has_shared_memory(qkv.device.index)
    )


def _has_shared_memory(index: int) -> bool:
    """A function of its own, because the compiler takes the properties of a device for constants."""
    return torch.cuda.get_device_properties(index).shared_memory_per_multiprocessor >= MIN_SHARED_MEMORY


def fused(qkv: Tensor, groups: Sequence[Group], num_heads: int) -> Tensor:
    """Run the kernels, without a check of `fits`."""
    rows = sum(group.sequences * group.tokens for group in groups)
    if qkv.shape[0] != rows or any(not group.hidden < group.image <= group.tokens for group in groups):
        raise ValueError(f"{qkv.shape[0]} tokens are not {[tuple(group) for group in groups]}")
    flat = [number for group in groups for number in group]
    keep = torch.is_grad_enabled() and qkv.requires_grad  # not for the teacher
    out: Tensor = _attend(qkv, flat, num_heads, keep)[0]
    return out


# -- the operation --


def _groups(flat: Sequence[int]) -> list[Group]:
    """Return groups from the flat list of numbers that an operation takes."""
    size = len(Group._fields)
    return [Group(*flat[i : i + size]) for i in range(0, len(flat), size)]


@torch.library.custom_op("adclr::attend", mutates_args=())
def _attend(qkv: Tensor, flat: list[int], num_heads: int, keep: bool) -> tuple[Tensor, Tensor]:
    """Return (the output, `lse` for backward)."""
    with torch.cuda.device_of(qkv):  # type: ignore[no-untyped-call]
        return forward(qkv.contiguous(), _groups(flat), num_heads, keep)


@_attend.register_fake
def _(qkv: Tensor, flat: list[int], num_heads: int, keep: bool) -> tuple[Tensor, Tensor]:
    return _outputs(qkv, _plan_launches(_groups(flat), num_heads, qkv), keep)


@torch.library.custom_op("adclr::attend_backward", mutates_args=())
def _attend_backward(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, flat: list[int], num_heads: int) -> Tensor:
    with torch.cuda.device_of(qkv):  # type: ignore[no-untyped-call]
        return backward(grad.contiguous(), qkv.contiguous(), out, lse, _groups(flat), num_heads)


@_attend_backward.register_fake
def _(_: Tensor, qkv: Tensor, *__: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, ctx.flat, ctx.num_heads, ctx.keep = inputs
    ctx.save_for_backward(qkv, *output)
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, None, None, None]:
    if grad is None:
        return None, None, None, None
    if not ctx.keep:
        raise RuntimeError("attention was computed without keeping what its gradient needs")
    qkv, out, lse = ctx.saved_tensors
    return _attend_backward(grad, qkv, out, lse, ctx.flat, ctx.num_heads), None, None, None


_attend.register_autograd(_autograd_backward, setup_context=_setup_context)


# -- tile sizes and launches --


class Config(NamedTuple):
    """Sizes of a kernel; `attention_kernels.py` says what `rows` and `keys` mean for each variant."""

    variant: str
    rows: int
    keys: int
    warps: int
    stages: int = 2
    heads: int = 1  # that a program of `forward` or `whole` handles one after the other
    registers: int | None = None  # at most, of a thread: with fewer, more programs run at once


# Tuned with `benchmarks/attention.py`. There is no tuning at run time: results would depend on its outcome.
SHORT_SEQUENCE = 64  # tokens of a sequence that is one tile
FORWARD = {
    "short": Config("forward", 64, 64, 4),
    "long": Config("forward", 128, 64, 8, 3),
    "large": Config("forward", 128, 64, 8),
    "exact": Config("forward", 32, 32, 4, 1),
}
BACKWARD = {
    "short": Config("whole", 64, 64, 4),
    "long": Config("rows", 32, 256, 8),
    "large": Config("two", 64, 32, 4),
    "exact": Config("two", 32, 16, 4, 1),
}


def size_class(tokens: int, image: int, width: int, dtype: torch.dtype) -> str:
    """Return the key of FORWARD and BACKWARD.

    `exact` is float32, which is multiplied without tensor cores and needs small tiles; only tests use it (see `fits`).
    """
    if dtype == torch.float32:
        return "exact"
    if tokens <= SHORT_SEQUENCE:
        return "short"
    return "long" if image * width <= 256 * 64 else "large"  # dk and dv of all keys fit into registers


class KernelLaunch(NamedTuple):
    """A group with its size class, its rows and its part of `lse`."""

    sequences: int
    tokens: int
    image: int
    hidden: int
    size: str
    rows: slice
    lse: slice


def _plan_launches(groups: Sequence[Group], heads: int, qkv: Tensor) -> list[KernelLaunch]:
    """Return one launch for each group that has sequences."""
    row = lse = 0
    launches = []
    for sequences, tokens, image, hidden in groups:
        size = size_class(tokens, image, qkv.shape[1] // 3 // heads, qkv.dtype)
        rows = slice(row, row + sequences * tokens)
        lse_end = lse if BACKWARD[size].variant == "whole" else lse + sequences * tokens * heads
        hidden = hidden if tokens > image else 0
        launches.append(KernelLaunch(sequences, tokens, image, hidden, size, rows, slice(lse, lse_end)))
        row, lse = rows.stop, lse_end
    return [launch for launch in launches if launch.sequences]


def _outputs(qkv: Tensor, launches: Sequence[KernelLaunch], keep: bool) -> tuple[Tensor, Tensor]:
    size = launches[-1].lse.stop if keep and launches else 0
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3), qkv.new_empty(size, dtype=torch.float32)


def _tile_size(count: int, most: int = 2**16) -> int:
    """Return the smallest power of two that is at least `count`, between 16, which `tl.dot` needs, and `most`."""
    return max(16, min(most, 1 << (count - 1).bit_length()))


def _constants(launch: KernelLaunch, heads: int, width: int, config: Config) -> dict[str, Any]:
    scale = width**-0.5 * math.log2(math.e)
    sizes = {"TOKENS": launch.tokens, "IMAGE": launch.image, "HIDDEN": launch.hidden}
    sizes |= {"HEADS": heads, "WIDTH": width, "SCALE": scale}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return sizes | options | ({"maxnreg": config.registers} if config.registers else {})


def _chunks(image: int, keys: int) -> dict[str, int]:
    """Return the sizes of the tiles of keys: all of `keys`, but the last only as large as necessary."""
    keys = _tile_size(image, keys)
    full = (image - 1) // keys * keys
    return {"KEYS": keys, "FULL": full, "LAST": _tile_size(image - full)}


# Kernels are imported where they are launched, since Triton may be missing.


def forward(qkv: Tensor, groups: Sequence[Group], heads: int, keep: bool) -> tuple[Tensor, Tensor]:
    """Return (the output M×D, `lse` of the groups whose backward needs it)."""
    from adclr.model.ops import attention_kernels as kernels

    launches = _plan_launches(groups, heads, qkv)
    out, lse = _outputs(qkv, launches, keep)
    for launch in launches:
        config = FORWARD[launch.size]
        block, heads_each = _tile_size(launch.tokens, config.rows), math.gcd(heads, config.heads)
        blocks = -(-launch.tokens // block)
        kernels._forward[(launch.sequences * (heads // heads_each) * blocks,)](
            qkv[launch.rows],
            out[launch.rows],
            lse[launch.lse],
            ROWS=block,
            BLOCKS=blocks,
            HEADS_EACH=heads_each,
            KEEP=keep and launch.lse.start < launch.lse.stop,
            **_chunks(launch.image, config.keys),
            **_constants(launch, heads, out.shape[1] // heads, config),
        )
    return out, lse


def backward(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, groups: Sequence[Group], heads: int) -> Tensor:
    """Return the gradient of qkv, M×3D."""
    from adclr.model.ops import attention_kernels as kernels

    dqkv = torch.empty_like(qkv)
    width = out.shape[1] // heads
    for launch in _plan_launches(groups, heads, qkv):
        config, units = BACKWARD[launch.size], launch.sequences * heads
        constants = _constants(launch, heads, width, config) | {"SLOPE": width**-0.5}
        block = _tile_size(launch.tokens, config.rows)
        blocks = -(-launch.tokens // block)
        grad_rows, qkv_rows, dqkv_rows = grad[launch.rows], qkv[launch.rows], dqkv[launch.rows]
        tensors = (grad_rows, qkv_rows, out[launch.rows], lse[launch.lse], dqkv_rows)
        if config.variant == "whole":
            heads_each = math.gcd(heads, config.heads)
            kernels._whole[(units // heads_each,)](
                grad_rows, qkv_rows, dqkv_rows, TILE=_tile_size(launch.tokens), HEADS_EACH=heads_each, **constants
            )
        elif config.variant == "rows":
            kernels._rows[(units,)](*tensors, ROWS=block, KEYS=_tile_size(launch.image), **constants)
        else:
            key_blocks, other_tile = -(-launch.image // block), _tile_size(launch.tokens, config.keys)
            blocks += key_blocks  # programs for keys, then programs for rows
            kernels._two[(units * blocks,)](
                *tensors, TILE=block, OTHER_TILE=other_tile, KEY_BLOCKS=key_blocks, BLOCKS=blocks, **constants
            )
    return dqkv
