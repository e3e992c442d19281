"""The MLP of a block, y -> fc2(gelu(fc1(y))), as one operation that stores only h = fc1(y) for backward.

The products are cuBLAS's; the kernels of `mlp_kernels.py` compute GELU, and in backward GELU again, its gradient and
the gradient of fc1's bias. `dispatch.mlp_plain` is the reference in PyTorch.

M tokens, D width, H hidden width. Parameters have the shapes of `nn.Linear`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from adclr.system import triton_available

DTYPES = (torch.bfloat16, torch.float16)


def fits(y: Tensor) -> bool:
    """Return whether the kernels support this tensor. In float32 they gain nothing: its products take too long."""
    return triton_available.possible and y.device.type == "cuda" and y.dtype in DTYPES


def fused(y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Run the kernels, without a check of `fits`."""
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (y, w1, b1, w2, b2))
    out: Tensor = _mlp(y.reshape(-1, y.shape[-1]), w1, b1, w2, b2, keep)[0]
    return out.view(*y.shape[:-1], out.shape[-1])


# -- the operation --


@torch.library.custom_op("adclr::mlp", mutates_args=())
def _mlp(y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """Return (the output, h for backward, empty without `keep`)."""
    with torch.cuda.device_of(y):  # type: ignore[no-untyped-call]
        return forward(y.contiguous(), w1, b1, w2, b2, keep)


@_mlp.register_fake
def _(y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, keep: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return y.new_empty(y.shape[0], w2.shape[0]), y.new_empty(y.shape[0] if keep else 0, w1.shape[0])


@torch.library.custom_op("adclr::mlp_backward", mutates_args=())
def _mlp_backward(
    grad: Tensor, y: Tensor, hidden: Tensor, w1: Tensor, w2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of y, w1, b1, w2 and b2; those of the biases in float32."""
    with torch.cuda.device_of(y):  # type: ignore[no-untyped-call]
        return backward(grad.contiguous(), y.contiguous(), hidden.contiguous(), w1, w2)


@_mlp_backward.register_fake
def _(_: Tensor, y: Tensor, __: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    b1, b2 = (y.new_empty(weight.shape[0], dtype=torch.float32) for weight in (w1, w2))
    return y.new_empty(y.shape), w1.new_empty(w1.shape), b1, w2.new_empty(w2.shape), b2


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, w1, b1, w2, b2, ctx.keep = inputs
    ctx.save_for_backward(y, output[1], w1, w2)  # weights in their own type, mostly float32: no copy is stored
    ctx.bias_dtypes = b1.dtype, b2.dtype
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    if not ctx.keep:
        raise RuntimeError("the MLP was computed without keeping what its gradient needs")
    dy, dw1, db1, dw2, db2 = _mlp_backward(grad, *ctx.saved_tensors)
    return dy, dw1, db1.to(ctx.bias_dtypes[0]), dw2, db2.to(ctx.bias_dtypes[1]), None


_mlp.register_autograd(_autograd_backward, setup_context=_setup_context)


# -- tile sizes and launches --


class ForwardConfig(NamedTuple):
    """Sizes of the kernel of forward."""

    numbers: int  # of a program; 8 of a thread are 16 bytes
    warps: int


class BackwardConfig(NamedTuple):
    """Sizes of the kernel of backward."""

    rows: int  # of a tile
    columns: int
    span: int  # rows of a program, one tile after the other; their sum is one row of float32
    warps: int


# Tuned with `benchmarks/mlp.py`. There is no tuning at run time: results would depend on its outcome.
FORWARD = ForwardConfig(2048, 4)
BACKWARD = BackwardConfig(4, 256, 128, 4)


def forward(y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """Return (the output M×D, h: M×H, or 0×H without `keep`, where GELU overwrites h)."""
    hidden = torch.addmm(b1.to(y.dtype), y, w1.to(y.dtype).t())
    out = torch.empty_like(hidden) if keep else hidden
    gelu(hidden, out)
    result = torch.addmm(b2.to(y.dtype), out, w2.to(y.dtype).t())
    return result, hidden if keep else hidden.new_empty(0, hidden.shape[1])


def backward(
    grad: Tensor, y: Tensor, hidden: Tensor, w1: Tensor, w2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of y, w1, b1, w2 and b2."""
    out = torch.empty_like(hidden)
    dhidden = torch.mm(grad, w2.to(y.dtype))
    sums = gelu_backward(hidden, dhidden, out)
    dw2 = _product(grad.t(), out, w2.dtype)
    del out  # as large as h
    dy, dw1 = torch.mm(dhidden, w1.to(y.dtype)), _product(dhidden.t(), y, w1.dtype)
    return dy, dw1, sums.sum(0), dw2, grad.sum(0, dtype=torch.float32)


# Kernels are imported where they are launched, since Triton may be missing.


def gelu(hidden: Tensor, out: Tensor) -> None:
    """Write GELU of `hidden` to `out`, which may be `hidden`."""
    from adclr.model.ops import mlp_kernels as kernels

    numbers, warps = FORWARD
    programs = -(-hidden.numel() // numbers)
    kernels._forward[(programs,)](hidden, out, hidden.numel(), NUMBERS=numbers, num_warps=warps)


def gelu_backward(hidden: Tensor, grad: Tensor, out: Tensor) -> Tensor:
    """Write GELU to `out`, replace `grad`, its gradient, by that of `hidden`, and return sums of that over spans."""
    from adclr.model.ops import mlp_kernels as kernels

    rows, width = hidden.shape
    tile, columns, span, warps = BACKWARD
    spans = -(-rows // span)
    sums = torch.empty(spans, width, dtype=torch.float32, device=hidden.device)
    kernels._backward[(spans * -(-width // columns),)](
        hidden, grad, out, sums, rows, WIDTH=width, ROWS=tile, COLUMNS=columns, SPAN=span, num_warps=warps
    )
    return sums


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a·b in `dtype`. A float32 result is not rounded to half precision first."""
    if a.is_cuda and a.dtype != dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))
