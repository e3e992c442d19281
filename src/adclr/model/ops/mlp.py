"""The MLP of a block, y -> fc2(gelu(fc1(y))), as one operation that knows its gradient.

Of what is in between it keeps h = fc1(y) alone. The products are cuBLAS's; the kernels of `mlp_kernels.py` do GELU,
and in backward GELU again with its gradient, where the gradient of fc1's bias is added up on the way. The plain version
says what is meant and works everywhere. For `torch.compile` it is one operation.

M tokens, D their width, H the width in between. Parameters lie as `nn.Linear` has them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adclr.system import triton_available

DTYPES = (torch.bfloat16, torch.float16)


def mlp(y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """...×D -> ...×D, in y's type or autocast's. Parameters may be of another, float32, and so are their gradients."""
    if torch.is_autocast_enabled(y.device.type):
        y = y.to(torch.get_autocast_dtype(y.device.type))
    if fits(y):
        return fused(y, w1, b1, w2, b2)
    return plain(y, w1, b1, w2, b2)


def fits(y: Tensor) -> bool:
    """Whether the kernels are for this device and type. Float32 is PyTorch's: its products take so long that the rest
    does not matter."""
    return triton_available.possible and y.device.type == "cuda" and y.dtype in DTYPES


def plain(y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """As PyTorch does it."""
    hidden = F.linear(y, w1.to(y.dtype), b1.to(y.dtype))
    return F.linear(F.gelu(hidden), w2.to(y.dtype), b2.to(y.dtype))


def fused(y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """By the kernels, whatever `fits` says."""
    keep = torch.is_grad_enabled() and any(given.requires_grad for given in (y, w1, b1, w2, b2))
    out: Tensor = _mlp(y.reshape(-1, y.shape[-1]), w1, b1, w2, b2, keep)[0]
    return out.view(*y.shape[:-1], out.shape[-1])


# -- the operation --


@torch.library.custom_op("adclr::mlp", mutates_args=())
def _mlp(y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """(the output, h for backward or nothing)"""
    with torch.cuda.device_of(y):  # type: ignore[no-untyped-call]
        return forward(y.contiguous(), w1, b1, w2, b2, keep)


@_mlp.register_fake
def _(y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, keep: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return y.new_empty(y.shape[0], w2.shape[0]), y.new_empty(y.shape[0] if keep else 0, w1.shape[0])


@torch.library.custom_op("adclr::mlp_backward", mutates_args=())
def _mlp_backward(
    grad: Tensor, y: Tensor, hidden: Tensor, w1: Tensor, w2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of y, w1, b1, w2 and b2; of the biases in float32."""
    with torch.cuda.device_of(y):  # type: ignore[no-untyped-call]
        return backward(grad.contiguous(), y.contiguous(), hidden.contiguous(), w1, w2)


@_mlp_backward.register_fake
def _(
    grad: Tensor,  # noqa: ARG001
    y: Tensor,
    hidden: Tensor,  # noqa: ARG001
    w1: Tensor,
    w2: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    b1, b2 = (y.new_empty(weight.shape[0], dtype=torch.float32) for weight in (w1, w2))
    return y.new_empty(y.shape), w1.new_empty(w1.shape), b1, w2.new_empty(w2.shape), b2


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, w1, b1, w2, b2, ctx.kept = inputs
    ctx.save_for_backward(y, output[1], w1, w2)  # weights as they were given, most often float32: no copy is kept
    ctx.of_biases = b1.dtype, b2.dtype
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    if not ctx.kept:
        raise RuntimeError("the MLP was computed without keeping what its gradient needs")
    dy, dw1, db1, dw2, db2 = _mlp_backward(grad, *ctx.saved_tensors)
    return dy, dw1, db1.to(ctx.of_biases[0]), dw2, db2.to(ctx.of_biases[1]), None


_mlp.register_autograd(_differentiate, setup_context=_remember)


# -- how the kernels are cut up, and their launches --


class Line(NamedTuple):
    numbers: int  # of a program; 8 of a thread are 16 bytes
    warps: int


class Tiles(NamedTuple):
    rows: int
    columns: int
    span: int  # rows of a program, one tile of them after the other; their sum is one row of a table of float32
    warps: int


# To be tuned by assigning to them: nothing is tuned while running, since then results would depend on luck.
FORWARD = Line(2048, 4)
BACKWARD = Tiles(4, 256, 128, 4)


def forward(y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """(the output M×D, h: M×H, or 0×H where nothing is kept and GELU takes its place)."""
    hidden = torch.addmm(b1.to(y.dtype), y, w1.to(y.dtype).t())
    out = torch.empty_like(hidden) if keep else hidden
    gelu(hidden, out)
    result = torch.addmm(b2.to(y.dtype), out, w2.to(y.dtype).t())
    return result, hidden if keep else hidden.new_empty(0, hidden.shape[1])


def backward(
    grad: Tensor, y: Tensor, hidden: Tensor, w1: Tensor, w2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of y, w1, b1, w2 and b2."""
    out = torch.empty_like(hidden)
    back = torch.mm(grad, w2.to(y.dtype))
    sums = gelu_backward(hidden, back, out)
    of_w2 = _product(grad.t(), out, w2.dtype)
    del out  # as large as h
    of_y, of_w1 = torch.mm(back, w1.to(y.dtype)), _product(back.t(), y, w1.dtype)
    return of_y, of_w1, sums.sum(0), of_w2, grad.sum(0, dtype=torch.float32)


# Kernels are imported where they are launched: not everywhere is there Triton.


def gelu(hidden: Tensor, out: Tensor) -> None:
    from adclr.model.ops import mlp_kernels as kernels

    numbers, warps = FORWARD
    programs = -(-hidden.numel() // numbers)
    kernels._forward[(programs,)](hidden, out, hidden.numel(), NUMBERS=numbers, num_warps=warps)


def gelu_backward(hidden: Tensor, back: Tensor, out: Tensor) -> Tensor:
    """GELU to `out`; `back`, its gradient, becomes that of `hidden`. Returns the sums of that over some rows each."""
    from adclr.model.ops import mlp_kernels as kernels

    rows, width = hidden.shape
    tile, columns, span, warps = BACKWARD
    spans = -(-rows // span)
    sums = torch.empty(spans, width, dtype=torch.float32, device=hidden.device)
    kernels._backward[(spans * -(-width // columns),)](
        hidden, back, out, sums, rows, WIDTH=width, ROWS=tile, COLUMNS=columns, SPAN=span, num_warps=warps
    )
    return sums


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a·b in `dtype`. Float32 comes as cuBLAS has added it up, and is not rounded to half of that before."""
    if a.is_cuda and a.dtype != dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))
