"""The attention of short sequences that lie one behind the other in one tensor: all tokens ask, the first answer.

The plain version says what is meant and works everywhere; on NVIDIA GPUs the kernels of `attention_kernels.py` do the
same straight from the rows of the qkv layer. For `torch.compile` they are one operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adclr.system import triton_available

DTYPES = (torch.bfloat16, torch.float16)  # float32, which has no tensor cores of full precision, is PyTorch's
WIDTHS = (16, 32, 64, 128)  # of a head
MOST = 272  # tokens that answer; where there are more, flash attention is at home
MOST_HIDDEN = 15  # the first tile of keys, 16 at least, must hold one that answers
ROOM = 200_000  # bytes on chip, for the tiles: H100, H200 and B200 have 228 kB, GPUs for consumers 100 kB


class Group(NamedTuple):
    sequences: int
    tokens: int  # of each sequence, all of which ask
    image: int  # how many of them, the first, answer
    hidden: int = 0  # how many of these, the first, do not answer the tokens behind the image's


def attend(qkv: Tensor, groups: Sequence[Group], num_heads: int) -> Tensor:
    """M×3D -> M×D, with M the tokens of all groups and D the heads side by side, as timm's qkv layer has them."""
    if fits(qkv, groups, num_heads):
        return fused(qkv, groups, num_heads)
    return plain(qkv, groups, num_heads)


def fits(qkv: Tensor, groups: Sequence[Group], num_heads: int) -> bool:
    """Whether the kernels can do it, on this device."""
    return (
        triton_available.possible
        and qkv.device.type == "cuda"
        and qkv.dtype in DTYPES
        and qkv.shape[1] // 3 // num_heads in WIDTHS
        and all(group.image <= MOST and group.hidden <= MOST_HIDDEN for group in groups)
        and _has_room(qkv.device.index)
    )


def _has_room(index: int) -> bool:
    """The compiler takes the properties of a device for constants."""
    return torch.cuda.get_device_properties(index).shared_memory_per_multiprocessor >= ROOM


def plain(qkv: Tensor, groups: Sequence[Group], num_heads: int) -> Tensor:
    """Each group on its own, as PyTorch does it."""
    dim = qkv.shape[1] // 3
    outs, row = [], 0
    for sequences, tokens, image, hidden in groups:
        part = qkv[row : row + sequences * tokens].view(sequences, tokens, 3, num_heads, dim // num_heads)
        q, k, v = part.permute(2, 0, 3, 1, 4)
        if hidden and tokens > image:
            of_image = F.scaled_dot_product_attention(q[:, :, :image], k[:, :, :image], v[:, :, :image])
            keys, values = k[:, :, hidden:image], v[:, :, hidden:image]
            read = torch.cat([of_image, F.scaled_dot_product_attention(q[:, :, image:], keys, values)], dim=2)
        else:
            read = F.scaled_dot_product_attention(q, k[:, :, :image], v[:, :, :image])
        outs.append(read.transpose(1, 2).reshape(sequences * tokens, dim))
        row += sequences * tokens
    return torch.cat(outs)


def fused(qkv: Tensor, groups: Sequence[Group], num_heads: int) -> Tensor:
    """By the kernels, whatever `fits` says."""
    rows = sum(group.sequences * group.tokens for group in groups)
    if qkv.shape[0] != rows or any(not group.hidden < group.image <= group.tokens for group in groups):
        raise ValueError(f"{qkv.shape[0]} tokens are not {[tuple(group) for group in groups]}")
    flat = [number for group in groups for number in group]
    keep = torch.is_grad_enabled() and qkv.requires_grad  # a teacher keeps nothing
    out: Tensor = _attend(qkv, flat, num_heads, keep)[0]
    return out


# -- the operation --


def _groups(flat: Sequence[int]) -> list[Group]:
    """An operation takes lists of numbers, not of groups."""
    size = len(Group._fields)
    return [Group(*flat[i : i + size]) for i in range(0, len(flat), size)]


@torch.library.custom_op("adclr::attend", mutates_args=())
def _attend(qkv: Tensor, flat: list[int], num_heads: int, keep: bool) -> tuple[Tensor, Tensor]:
    """(the output, what backward wants beside it)"""
    with torch.cuda.device_of(qkv):  # type: ignore[no-untyped-call]
        return forward(qkv.contiguous(), _groups(flat), num_heads, keep)


@_attend.register_fake
def _(qkv: Tensor, flat: list[int], num_heads: int, keep: bool) -> tuple[Tensor, Tensor]:
    return _outputs(qkv, plan(_groups(flat), num_heads, qkv), keep)


@torch.library.custom_op("adclr::attend_backward", mutates_args=())
def _attend_backward(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, flat: list[int], num_heads: int) -> Tensor:
    with torch.cuda.device_of(qkv):  # type: ignore[no-untyped-call]
        return backward(grad.contiguous(), qkv.contiguous(), out, lse, _groups(flat), num_heads)


@_attend_backward.register_fake
def _(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, flat: list[int], num_heads: int) -> Tensor:  # noqa: ARG001
    return qkv.new_empty(qkv.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, ctx.flat, ctx.num_heads, ctx.kept = inputs
    ctx.save_for_backward(qkv, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, None, None, None]:
    if grad is None:
        return None, None, None, None
    if not ctx.kept:
        raise RuntimeError("attention was computed without keeping what its gradient needs")
    qkv, out, lse = ctx.saved_tensors
    return _attend_backward(grad, qkv, out, lse, ctx.flat, ctx.num_heads), None, None, None


_attend.register_autograd(_differentiate, setup_context=_remember)


# -- how the kernels are cut up, and their launches --


class Config(NamedTuple):
    """What `rows` and `keys` of a tile mean is said with the variants, in `attention_kernels.py`."""

    variant: str
    rows: int
    keys: int
    warps: int
    stages: int = 2
    heads: int = 1  # that a program of `forward` or `whole` does one after the other
    registers: int | None = None  # at most, of a thread: fewer let more programs run beside each other


# To be tuned by assigning to them: nothing is tuned while running, since then results would depend on luck.
SHORT = 64  # tokens of a sequence that is one tile
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
    """Which line of the tables. `exact` is float32, multiplied without tensor cores, which wants small tiles: in it
    tests hold the kernels against the formula; training does not use it (`fits`)."""
    if dtype == torch.float32:
        return "exact"
    if tokens <= SHORT:
        return "short"
    return "long" if image * width <= 256 * 64 else "large"  # whether dk and dv of all keys fit into the registers


class Work(NamedTuple):
    """A group, its line of the tables, and where its rows and its part of `lse` are."""

    sequences: int
    tokens: int
    image: int
    hidden: int
    size: str
    rows: slice
    kept: slice


def plan(groups: Sequence[Group], heads: int, qkv: Tensor) -> list[Work]:
    row = kept = 0
    work = []
    for sequences, tokens, image, hidden in groups:
        size = size_class(tokens, image, qkv.shape[1] // 3 // heads, qkv.dtype)
        end = row + sequences * tokens
        keep = 0 if BACKWARD[size].variant == "whole" else sequences * tokens * heads
        hidden = hidden if tokens > image else 0
        work.append(Work(sequences, tokens, image, hidden, size, slice(row, end), slice(kept, kept + keep)))
        row, kept = end, kept + keep
    return [part for part in work if part.sequences]


def _outputs(qkv: Tensor, work: Sequence[Work], keep: bool) -> tuple[Tensor, Tensor]:
    size = work[-1].kept.stop if keep and work else 0
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3), qkv.new_empty(size, dtype=torch.float32)


def tile_of(count: int, most: int = 2**16) -> int:
    """The smallest tile that holds so many, though of at most `most`; a product wants 16."""
    return max(16, min(most, 1 << (count - 1).bit_length()))


def _constants(part: Work, heads: int, width: int, config: Config) -> dict[str, Any]:
    scale = width**-0.5 * math.log2(math.e)
    sizes = {"TOKENS": part.tokens, "IMAGE": part.image, "HIDDEN": part.hidden}
    sizes |= {"HEADS": heads, "WIDTH": width, "SCALE": scale}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return sizes | options | ({"maxnreg": config.registers} if config.registers else {})


def _chunks(image: int, keys: int) -> dict[str, int]:
    """Tiles of `keys`, but the last only as wide as it must be."""
    keys = tile_of(image, keys)
    full = (image - 1) // keys * keys
    return {"KEYS": keys, "FULL": full, "LAST": tile_of(image - full)}


# Kernels are imported where they are launched: not everywhere is there Triton.


def forward(qkv: Tensor, groups: Sequence[Group], heads: int, keep: bool) -> tuple[Tensor, Tensor]:
    """(the output M×D, `lse` of the groups whose backward wants it)."""
    from adclr.model.ops import attention_kernels as kernels

    work = plan(groups, heads, qkv)
    out, lse = _outputs(qkv, work, keep)
    for part in work:
        config = FORWARD[part.size]
        block, per = tile_of(part.tokens, config.rows), math.gcd(heads, config.heads)
        blocks = -(-part.tokens // block)
        kernels._forward[(part.sequences * (heads // per) * blocks,)](
            qkv[part.rows],
            out[part.rows],
            lse[part.kept],
            ROWS=block,
            BLOCKS=blocks,
            PER=per,
            KEEP=keep and part.kept.start < part.kept.stop,
            **_chunks(part.image, config.keys),
            **_constants(part, heads, out.shape[1] // heads, config),
        )
    return out, lse


def backward(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, groups: Sequence[Group], heads: int) -> Tensor:
    """The gradient of qkv, M×3D."""
    from adclr.model.ops import attention_kernels as kernels

    dqkv = torch.empty_like(qkv)
    width = out.shape[1] // heads
    for part in plan(groups, heads, qkv):
        config, units = BACKWARD[part.size], part.sequences * heads
        constants = _constants(part, heads, width, config) | {"SLOPE": width**-0.5}
        block = tile_of(part.tokens, config.rows)
        blocks = -(-part.tokens // block)
        given, asked, back = grad[part.rows], qkv[part.rows], dqkv[part.rows]
        tensors = (given, asked, out[part.rows], lse[part.kept], back)
        if config.variant == "whole":
            per = math.gcd(heads, config.heads)
            kernels._whole[(units // per,)](given, asked, back, TILE=tile_of(part.tokens), PER=per, **constants)
        elif config.variant == "rows":
            kernels._rows[(units,)](*tensors, ROWS=block, KEYS=tile_of(part.image), **constants)
        else:
            first, others = -(-part.image // block), tile_of(part.tokens, config.keys)
            blocks += first  # keys, then rows
            kernels._two[(units * blocks,)](*tensors, OWN=block, OTHERS=others, ASKED=first, BLOCKS=blocks, **constants)
    return dqkv
