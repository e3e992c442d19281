"""A residual sum and the LayerNorm of it, in one: the sum is not written, read, and written and read again.

The plain version says what is meant and works everywhere; on NVIDIA GPUs the kernels of `norm_kernels.py` do the same.
For `torch.compile` they are one operation, which keeps the sum and two numbers of each row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adclr.system import triton_available

DTYPES = (torch.bfloat16, torch.float16)
WIDEST = 4096


def add_norm(
    x: Tensor, branch: Tensor | None, factor: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(x + branch · factor, its LayerNorm), M×D and of the type of x. `factor`, M or M×1, has no gradient; without it
    the branch is added as it is, and without a branch x stays x."""
    how = fused if fits(x) else plain
    return how(x, branch, factor, weight, bias, eps)


def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return add_norm(x, None, None, weight, bias, eps)[1]


def fits(x: Tensor) -> bool:
    """Whether the kernels can do it, on this device."""
    return (
        triton_available.possible
        and x.device.type == "cuda"
        and x.dtype in DTYPES
        and len(x.shape) == 2
        and x.shape[1] <= WIDEST
        and x.shape[1] % 16 == 0
    )


def plain(
    x: Tensor, branch: Tensor | None, factor: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As PyTorch does it: in float32, though the sum is rounded to the type of x before it is looked at."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if branch is not None:
        more = branch.to(wide) if factor is None else branch.to(wide) * factor.detach().reshape(-1, 1)
        x = (x.to(wide) + more).to(x.dtype)
    return x, F.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps).to(x.dtype)


def fused(
    x: Tensor, branch: Tensor | None, factor: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """By the kernels, whatever `fits` says."""
    rows, dim = x.shape
    if dim % 16 or dim > WIDEST or weight.shape != (dim,) or bias.shape != (dim,):
        raise ValueError(f"no kernel for the norm of {tuple(x.shape)} with weights of {tuple(weight.shape)}")
    if (branch is not None and branch.shape != x.shape) or (factor is not None and factor.numel() != rows):
        raise ValueError(f"what is added is not for {tuple(x.shape)}")
    given = [tensor for tensor in (x, branch, weight, bias) if tensor is not None]
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)  # a teacher keeps nothing
    scale = None if branch is None or factor is None else factor.detach().reshape(-1)
    total, y, _, _ = _add_norm(x, branch, scale, weight, bias, eps, keep)
    return (x if branch is None else total), y


# -- the operation --


@torch.library.custom_op("adclr::add_norm", mutates_args=())
def _add_norm(
    x: Tensor, branch: Tensor | None, factor: Tensor | None, weight: Tensor, bias: Tensor, eps: float, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(the sum, its norm, mean and 1/deviation of each row); empty: the sum of one, and what is not kept."""
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        return forward(x, branch, factor, weight, bias, eps, keep)


@_add_norm.register_fake
def _(
    x: Tensor,
    branch: Tensor | None,
    factor: Tensor | None,  # noqa: ARG001
    weight: Tensor,  # noqa: ARG001
    bias: Tensor,  # noqa: ARG001
    eps: float,  # noqa: ARG001
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _outputs(x, branch is not None, keep)


@torch.library.custom_op("adclr::add_norm_backward", mutates_args=())
def _add_norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    factor: Tensor | None,
    apart: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the branch (of type `apart`; empty where it is that of x) and of weight and bias, 2×D."""
    with torch.cuda.device_of(dy):  # type: ignore[no-untyped-call]
        return backward(dy, dtotal, total, mean, rstd, weight, factor, apart)


@_add_norm_backward.register_fake
def _(
    dy: Tensor,  # noqa: ARG001
    dtotal: Tensor | None,  # noqa: ARG001
    total: Tensor,
    mean: Tensor,  # noqa: ARG001
    rstd: Tensor,  # noqa: ARG001
    weight: Tensor,  # noqa: ARG001
    factor: Tensor | None,  # noqa: ARG001
    apart: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return *_gradients(total, apart), total.new_empty(2, total.shape[1], dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, branch, factor, weight, bias, _, ctx.kept = inputs
    total, _, mean, rstd = output
    ctx.branch = None if branch is None else branch.dtype  # of which no more is needed
    ctx.types = weight.dtype, bias.dtype
    ctx.save_for_backward(x if branch is None else total, mean, rstd, weight, factor)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dtotal: Tensor | None, dy: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None, Tensor | None, Tensor | None, None, None]:
    if ctx.branch is None:
        dtotal = None  # that of nothing
    if dy is None and dtotal is None:
        return None, None, None, None, None, None, None
    if not ctx.kept:
        raise RuntimeError("the norm was computed without keeping what its gradient needs")
    total, mean, rstd, weight, factor = ctx.saved_tensors
    if dy is None:
        assert dtotal is not None
        dbranch = dtotal if factor is None else dtotal * factor[:, None]
        return dtotal, dbranch.to(ctx.branch), None, None, None, None, None
    # one tensor is the gradient of both, where it is the same
    apart = None if factor is None and ctx.branch in (None, total.dtype) else ctx.branch
    dx, dbranch, sums = _add_norm_backward(dy, dtotal, total, mean, rstd, weight, factor, apart)
    dweight, dbias = (part.to(dtype) for part, dtype in zip(sums.unbind(), ctx.types, strict=True))
    return dx, None if ctx.branch is None else dx if apart is None else dbranch, None, dweight, dbias, None, None


_add_norm.register_autograd(_differentiate, setup_context=_remember)


# -- how the kernels are cut up, and their launches --


class Config(NamedTuple):
    rows: int  # of a tile
    warps: int
    programs: int = 2**16  # at most; they share the tiles
    stages: int = 1  # tiles that are on their way to a program at once
    registers: int | None = None  # at most, of a thread: fewer let more programs run beside each other


# By the largest D a line is for. To be tuned by assigning to them: nothing is tuned while running, and the number of
# programs, which decides in which order gradients of weights are added, is not that of the GPU. The numbers of programs
# of backward are as many as an H200 runs at once: 132 times what the registers allow.
FORWARD = {512: Config(8, 4), 1024: Config(4, 4), WIDEST: Config(2, 8)}
BACKWARD = {
    512: Config(4, 4, programs=792),
    768: Config(4, 4, programs=396),
    1024: Config(4, 4, programs=264),
    WIDEST: Config(2, 16, programs=132),
}
PIECES = 4  # at most


def pieces_of(dim: int) -> tuple[int, int]:
    """(number, width) of the pieces of a row, powers of two wide: as few columns too many, then as many pieces, as
    can be. 384 is 3×128 and 1024 is 4×256."""

    def width(count: int) -> int:
        return max(16, 1 << (-(-dim // count) - 1).bit_length())

    return min(((count, width(count)) for count in range(1, PIECES + 1)), key=lambda cut: (cut[0] * cut[1], -cut[0]))


def _constants(table: dict[int, Config], rows: int, dim: int) -> tuple[int, dict[str, Any]]:
    """(number of programs, what a kernel is compiled with)"""
    config = table[min(size for size in table if size >= dim)]
    count, width = pieces_of(dim)
    sizes = {"D": dim, "PIECES": count, "WIDTH": width, "ROWS": config.rows, "STAGES": config.stages}
    options = {"num_warps": config.warps} | ({"maxnreg": config.registers} if config.registers else {})
    return min(config.programs, -(-rows // config.rows)), sizes | options


def _outputs(x: Tensor, added: bool, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x.new_empty(x.shape if added else (0,))
    mean, rstd = (x.new_empty(x.shape[0] if keep else 0, dtype=torch.float32) for _ in range(2))
    return total, x.new_empty(x.shape), mean, rstd


def _gradients(total: Tensor, apart: torch.dtype | None) -> tuple[Tensor, Tensor]:
    dx = total.new_empty(total.shape)
    return dx, total.new_empty(0) if apart is None else total.new_empty(total.shape, dtype=apart)


# Kernels are imported where they are launched: not everywhere is there Triton.


def forward(
    x: Tensor, branch: Tensor | None, factor: Tensor | None, weight: Tensor, bias: Tensor, eps: float, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from adclr.model.ops import norm_kernels as kernels

    added = branch is not None
    total, y, mean, rstd = _outputs(x, added, keep)
    programs, constants = _constants(FORWARD, *x.shape)
    if programs:
        kernels._forward[(programs,)](
            x.contiguous(),
            branch.contiguous() if branch is not None else None,
            factor.contiguous() if factor is not None else None,
            weight.contiguous(),
            bias.contiguous(),
            total if added else None,
            y,
            mean if keep else None,
            rstd if keep else None,
            x.shape[0],
            EPS=eps,
            **constants,
        )
    return total, y, mean, rstd


def backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    factor: Tensor | None,
    apart: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    from adclr.model.ops import norm_kernels as kernels

    dx, dbranch = _gradients(total, apart)
    programs, constants = _constants(BACKWARD, *total.shape)
    sums = total.new_empty(2, programs, total.shape[1], dtype=torch.float32)
    if programs:
        kernels._backward[(programs,)](
            dy.contiguous(),
            dtotal.contiguous() if dtotal is not None else None,
            total.contiguous(),
            mean,
            rstd,
            weight.contiguous(),
            factor.contiguous() if factor is not None and apart is not None else None,
            dx,
            dbranch if apart is not None else None,
            sums,
            total.shape[0],
            **constants,
        )
    return dx, dbranch, sums.sum(1)
