"""A residual sum and its LayerNorm in one operation, so that the sum is written once and not read again.

On NVIDIA GPUs `fused` runs the kernels of `norm_kernels.py`, as one operation for `torch.compile`. Backward needs the
sum and two numbers of each row. `dispatch.add_norm_plain` is the reference in PyTorch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from adclr.system import triton_available

DTYPES = (torch.bfloat16, torch.float16)
MAX_WIDTH = 4096


def fits(x: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether the kernels support this tensor on this device, with a norm of `dtype`; None: that of x."""
    return (
        triton_available.possible
        and x.device.type == "cuda"
        and (x.dtype if dtype is None else dtype) in DTYPES
        and x.dtype in (*DTYPES, torch.float32)
        and len(x.shape) == 2
        and x.shape[1] <= MAX_WIDTH
        and x.shape[1] % 16 == 0
    )


def fused(
    x: Tensor,
    branch: Tensor | None,
    factor: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the kernels, without a check of `fits`."""
    rows, dim = x.shape
    if dim % 16 or dim > MAX_WIDTH or weight.shape != (dim,) or bias.shape != (dim,):
        raise ValueError(f"no kernel for the norm of {tuple(x.shape)} with weights of {tuple(weight.shape)}")
    if (branch is not None and branch.shape != x.shape) or (factor is not None and factor.numel() != rows):
        raise ValueError(f"what is added is not for {tuple(x.shape)}")
    tensors = [tensor for tensor in (x, branch, weight, bias) if tensor is not None]
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)  # not for the teacher
    scale = None if branch is None or factor is None else factor.detach().reshape(-1)
    total, y, _, _ = _add_norm(x, branch, scale, weight, bias, eps, keep, x.dtype if dtype is None else dtype)
    return (x if branch is None else total), y


# -- the operation --


@torch.library.custom_op("adclr::add_norm", mutates_args=())
def _add_norm(
    x: Tensor,
    branch: Tensor | None,
    factor: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    keep: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (the sum, of the type of x, its norm, of `dtype`, mean and 1/deviation of each row).

    The sum is empty without a branch; mean and deviation are empty without `keep`.
    """
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        return forward(x, branch, factor, weight, bias, eps, keep, dtype)


@_add_norm.register_fake
def _(x: Tensor, branch: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _outputs(x, branch is not None, *others[-2:])


@torch.library.custom_op("adclr::add_norm_backward", mutates_args=())
def _add_norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    factor: Tensor | None,
    branch_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the branch, and of weight and bias, 2×D.

    That of the branch is empty without `branch_dtype`: then it is that of x.
    """
    with torch.cuda.device_of(dy):  # type: ignore[no-untyped-call]
        return backward(dy, dtotal, total, mean, rstd, weight, factor, branch_dtype)


@_add_norm_backward.register_fake
def _(_: Tensor, __: Tensor | None, total: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return *_gradients(total, others[-1]), total.new_empty(2, total.shape[1], dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, branch, factor, weight, bias, _, ctx.keep, _ = inputs
    total, _, mean, rstd = output
    ctx.branch = None if branch is None else branch.dtype
    ctx.types = weight.dtype, bias.dtype
    ctx.save_for_backward(x if branch is None else total, mean, rstd, weight, factor)
    ctx.set_materialize_grads(False)


def _autograd_backward(
    ctx: Any, dtotal: Tensor | None, dy: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None, Tensor | None, Tensor | None, None, None, None]:
    if ctx.branch is None:
        dtotal = None  # the sum is empty
    if dy is None and dtotal is None:
        return None, None, None, None, None, None, None, None
    if not ctx.keep:
        raise RuntimeError("the norm was computed without keeping what its gradient needs")
    total, mean, rstd, weight, factor = ctx.saved_tensors
    if dy is None:
        assert dtotal is not None
        dbranch = dtotal if factor is None else dtotal * factor[:, None]
        return dtotal, dbranch.to(ctx.branch), None, None, None, None, None, None
    # x and the branch have the same gradient without factor, and share it if they have the same type
    branch_dtype = None if factor is None and ctx.branch in (None, total.dtype) else ctx.branch
    dx, dbranch, sums = _add_norm_backward(dy, dtotal, total, mean, rstd, weight, factor, branch_dtype)
    dweight, dbias = (part.to(dtype) for part, dtype in zip(sums.unbind(), ctx.types, strict=True))
    if ctx.branch is not None and branch_dtype is None:
        dbranch = dx
    return dx, None if ctx.branch is None else dbranch, None, dweight, dbias, None, None, None


_add_norm.register_autograd(_autograd_backward, setup_context=_setup_context)


# -- tile sizes and launches --


class Config(NamedTuple):
    """Sizes of a kernel."""

    rows: int  # of a tile
    warps: int
    programs: int = 2**16  # at most; they share the tiles
    stages: int = 1  # tiles of a program that are loaded at once
    registers: int | None = None  # at most, of a thread: with fewer, more programs run at once


# By the largest D that an entry is for, tuned with `benchmarks/norm.py`. There is no tuning at run time, and the number
# of programs does not depend on the GPU, since it determines the order in which gradients of weights are summed.
# Backward has as many programs as an H200 runs at once: 132 multiprocessors, each as many as its registers allow.
FORWARD = {512: Config(8, 4), 1024: Config(4, 4), MAX_WIDTH: Config(2, 8)}
BACKWARD = {
    512: Config(4, 4, programs=792),
    768: Config(4, 4, programs=396),
    1024: Config(4, 4, programs=264),
    MAX_WIDTH: Config(2, 16, programs=132),
}
MAX_PIECES = 4


def split_columns(dim: int) -> tuple[int, int]:
    """Return (number, width) of the pieces of a row; widths are powers of two.

    The padding is as small as possible, then the number as large as possible: 384 is 3×128 and 1024 is 4×256.
    """

    def width(count: int) -> int:
        return max(16, 1 << (-(-dim // count) - 1).bit_length())

    return min(
        ((count, width(count)) for count in range(1, MAX_PIECES + 1)), key=lambda cut: (cut[0] * cut[1], -cut[0])
    )


def _constants(table: dict[int, Config], rows: int, dim: int) -> tuple[int, dict[str, Any]]:
    """Return (number of programs, constants of the kernel)."""
    config = table[min(size for size in table if size >= dim)]
    count, width = split_columns(dim)
    sizes = {"D": dim, "PIECES": count, "WIDTH": width, "ROWS": config.rows, "STAGES": config.stages}
    options = {"num_warps": config.warps} | ({"maxnreg": config.registers} if config.registers else {})
    return min(config.programs, -(-rows // config.rows)), sizes | options


def _outputs(x: Tensor, added: bool, keep: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x.new_empty(x.shape if added else (0,))
    mean, rstd = (x.new_empty(x.shape[0] if keep else 0, dtype=torch.float32) for _ in range(2))
    return total, x.new_empty(x.shape, dtype=dtype), mean, rstd


def _gradients(total: Tensor, branch_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    dx = total.new_empty(total.shape)
    return dx, total.new_empty(0) if branch_dtype is None else total.new_empty(total.shape, dtype=branch_dtype)


# Kernels are imported where they are launched, since Triton may be missing.


def forward(
    x: Tensor,
    branch: Tensor | None,
    factor: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    keep: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel of forward, see `_add_norm`."""
    from adclr.model.ops import norm_kernels as kernels

    added = branch is not None
    total, y, mean, rstd = _outputs(x, added, keep, dtype)
    programs, constants = _constants(FORWARD, *x.shape)
    if programs:
        kernels._forward[(programs,)](
            x.contiguous(),
            _contiguous(branch),
            _contiguous(factor),
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
    branch_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel of backward, see `_add_norm_backward`."""
    from adclr.model.ops import norm_kernels as kernels

    dx, dbranch = _gradients(total, branch_dtype)
    programs, constants = _constants(BACKWARD, *total.shape)
    sums = total.new_empty(2, programs, total.shape[1], dtype=torch.float32)
    if programs:
        kernels._backward[(programs,)](
            dy.contiguous(),
            _contiguous(dtotal),
            total.contiguous(),
            mean,
            rstd,
            weight.contiguous(),
            _contiguous(factor) if branch_dtype is not None else None,
            dx,
            dbranch if branch_dtype is not None else None,
            sums,
            total.shape[0],
            **constants,
        )
    return dx, dbranch, sums.sum(1)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
