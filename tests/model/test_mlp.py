"""The MLP against its formula in float64; on a machine without a GPU the kernels run in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from adclr.model.ops import dispatch, mlp, mlp_kernels
from adclr.model.ops.mlp import BackwardConfig, ForwardConfig
from adclr.system import triton_available

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALVES = (torch.bfloat16, torch.float16)
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu"
    and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    and tuple(map(int, np.__version__.split(".")[:2])) >= (2, 5),
    reason="the interpreter of this Triton takes arrays of one number for numbers, which this NumPy no longer allows",
)
SIZES = {  # rows, width, width in between
    "a tile": (16, 8, 32),
    "several programs": (70, 24, 96),
    "no multiple of anything": (37, 9, 45),
    "one row": (1, 8, 32),
    "no row": (0, 8, 32),
}
EPSILON = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs each, and several tiles in each of them."""
    monkeypatch.setattr(mlp, "FORWARD", ForwardConfig(512, 4))
    monkeypatch.setattr(mlp, "BACKWARD", BackwardConfig(8, 32, 32, 4))


def given(
    size: str = "several programs", dtype: torch.dtype = torch.float32, parameters: torch.dtype | None = None
) -> list[Tensor]:
    """y, w1, b1, w2, b2; all that takes part in a product is a number of every type."""
    rows, dim, wide = SIZES[size]
    numbers = torch.Generator().manual_seed(0)
    shapes = [(rows, dim), (wide, dim), (wide,), (dim, wide), (dim,)]
    scales = [1.0, dim**-0.5, 0.5, wide**-0.5, 0.5]
    made = [scale * torch.randn(shape, generator=numbers) for shape, scale in zip(shapes, scales, strict=True)]
    types = [dtype] + 4 * [parameters or dtype]
    return [x.bfloat16().to(DEVICE, kind) for x, kind in zip(made, types, strict=True)]


def formula(y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = y @ w1.T + b1
    return (h * 0.5 * (1 + torch.special.erf(h / math.sqrt(2)))) @ w2.T + b2


def gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of all inputs, for a gradient of the output that is the same for all."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    numbers = torch.Generator().manual_seed(9)
    out.backward(torch.randn(out.shape, generator=numbers).bfloat16().to(out))
    actual = [leaf.grad for leaf in leaves]
    assert all(grad is not None for grad in actual)
    return [out.detach(), *(grad for grad in actual if grad is not None)]


def check(inputs: list[Tensor], tolerance: float) -> None:
    actual = gradients(mlp.fused, inputs)
    expected = gradients(formula, [x.double() for x in inputs])
    for mine, true, like in zip(actual, expected, [inputs[0], *inputs], strict=True):
        assert mine.dtype == like.dtype
        scale = max(1.0, float(true.abs().max())) if true.numel() else 1.0  # sums over rows are large
        torch.testing.assert_close(mine.double(), true, rtol=tolerance, atol=tolerance * scale)


# -- GELU --


@triton.jit
def _tails(x, out, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, NUMBERS)
    tl.store(out + place, mlp_kernels._tail(tl.load(x + place)))


@triton.jit
def _slopes(x, out, slope, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, NUMBERS)
    g, d = mlp_kernels._gelu_and_derivative(tl.load(x + place))
    tl.store(out + place, g)
    tl.store(slope + place, d)


def test_erf() -> None:
    x = torch.linspace(-8, 8, 2**14, device=DEVICE) * math.sqrt(2)
    tail = torch.full_like(x, float("nan"))
    _tails[(1,)](x, tail, NUMBERS=x.numel())
    z = x.double() / math.sqrt(2)
    erf = z.sign() * (1 - 2 * tail.double())
    assert (erf - torch.special.erf(z)).abs().max() < 1e-6
    near = x.abs() < 6.5  # small numbers too
    torch.testing.assert_close(tail.double()[near], 0.5 * torch.special.erfc(z.abs())[near], rtol=2e-3, atol=0)
    assert (tail.double()[~near] <= 5e-11).all()
    assert (tail >= 0).all()


def test_gelu_and_its_derivative() -> None:
    x = torch.linspace(-12, 12, 2**14, device=DEVICE)
    out, again, slope = (torch.full_like(x, float("nan")) for _ in range(3))
    mlp_kernels._forward[(8,)](x, out, x.numel(), NUMBERS=2048)
    _slopes[(1,)](x, again, slope, NUMBERS=x.numel())
    exact = x.double().requires_grad_()
    for leaf in (x.detach().requires_grad_(), exact):
        gelu = torch.nn.functional.gelu(leaf)
        (derivative,) = torch.autograd.grad(gelu.sum(), leaf)
        for mine, true in ((out, gelu), (again, gelu), (slope, derivative)):
            torch.testing.assert_close(mine.double(), true.detach().double(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_extreme_values(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    some = [0.0, 1e-7, 0.1, 3.0, 6.5, 9.0, 60.0, 1000.0, 6e4, top]
    x = (
        torch.tensor([*some, *(-number for number in some), float("nan")], device=DEVICE)
        .to(dtype)[:, None]
        .contiguous()
    )
    out, again, slope = torch.empty_like(x), torch.empty_like(x), torch.ones_like(x)
    sums = torch.empty(1, 1, device=DEVICE)
    mlp_kernels._forward[(1,)](x, out, x.numel(), NUMBERS=32)
    mlp_kernels._backward[(1,)](x, slope, again, sums, x.shape[0], WIDTH=1, ROWS=8, COLUMNS=16, SPAN=32)
    leaf = x.double().requires_grad_()
    gelu = torch.nn.functional.gelu(leaf)
    gelu.sum().backward()
    assert leaf.grad is not None
    for mine, true in ((out, gelu), (again, gelu), (slope, leaf.grad)):
        assert mine[:-1].isfinite().all()
        assert mine[-1].isnan()  # a loss that is no number must show
        # bfloat16 of the interpreter is cut off, not rounded
        torch.testing.assert_close(mine[:-1].double(), true.detach()[:-1], rtol=2 * torch.finfo(dtype).eps, atol=2e-6)


# -- the whole --


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_formula(size: str) -> None:
    check(given(size), EPSILON[torch.float32])


@pytest.mark.parametrize(
    "tiles", [BackwardConfig(4, 256, 128, 4), BackwardConfig(16, 16, 16, 4), BackwardConfig(1, 128, 1, 4)]
)
def test_tiles_of_any_size(tiles: BackwardConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "BACKWARD", tiles)
    monkeypatch.setattr(mlp, "FORWARD", ForwardConfig(2048, 4))
    check(given("no multiple of anything"), EPSILON[torch.float32])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("parameters", [None, torch.float32])
def test_half_precision(dtype: torch.dtype, parameters: torch.dtype | None) -> None:
    check(given("several programs", dtype, parameters), EPSILON[dtype])


def test_plain_is_the_formula() -> None:
    inputs = [x.double() for x in given()]
    for mine, true in zip(*(gradients(how, inputs) for how in (dispatch.mlp, formula)), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-10)


def test_all_of_every_result_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, make=make, **named: make(*args, **named).fill_(float("nan")))
    for size in ("several programs", "no multiple of anything"):
        inputs = given(size)
        for result in (*mlp.forward(*inputs, keep=True), *mlp.forward(*inputs, keep=False)):
            assert result.isfinite().all()
        out, hidden = mlp.forward(*inputs, keep=True)
        for result in mlp.backward(torch.ones_like(out), inputs[0], hidden, inputs[1], inputs[3]):
            assert result.isfinite().all()


def test_the_same_bits_every_time() -> None:
    for one, other in zip(*(gradients(mlp.fused, given()) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


def test_what_is_given_stays_as_it_is() -> None:
    inputs = given()
    before = [x.clone() for x in inputs]
    out, hidden = mlp.forward(*inputs, keep=True)
    grad, kept = torch.ones_like(out), hidden.clone()
    mlp.backward(grad, inputs[0], hidden, inputs[1], inputs[3])
    for one, other in zip([*inputs, hidden, grad], [*before, kept, torch.ones_like(out)], strict=True):
        assert torch.equal(one, other)


def test_leading_dimensions_and_gradients_of_one_number() -> None:
    inputs = given()
    y = inputs[0].view(7, 10, -1).transpose(0, 1)  # not one block of memory
    leaves, exact = (
        [x.detach().to(kind).requires_grad_() for x in (y, *inputs[1:])] for kind in (y.dtype, torch.double)
    )
    out, true = mlp.fused(*leaves), formula(*exact)
    assert out.shape == y.shape
    out.sum().backward()
    true.sum().backward()
    for mine, other in zip(leaves, exact, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-5, atol=1e-4)


def test_what_is_kept() -> None:
    rows, dim, wide = SIZES["several programs"]
    inputs = [x.requires_grad_() for x in given(dtype=torch.float16, parameters=torch.float32)]
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        mlp.fused(*inputs)
        assert [tuple(x.shape) for x in kept] == [(rows, dim), (rows, wide), (wide, dim), (dim, wide)]
        # what is kept of the weights is the weights themselves
        assert [x.data_ptr() for x in kept[2:]] == [inputs[1].data_ptr(), inputs[3].data_ptr()]
        kept.clear()
        with torch.no_grad():
            mlp.fused(*inputs)
        mlp.fused(*(x.detach() for x in inputs))
        assert not kept


def test_a_teacher_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    forward = mlp.forward

    def spy(*args: Any) -> tuple[Tensor, Tensor]:
        out, hidden = forward(*args)
        kept.append(hidden.shape[0])
        return out, hidden

    monkeypatch.setattr(mlp, "forward", spy)
    inputs = given()
    with torch.no_grad():
        taught = mlp.fused(*(x.requires_grad_() for x in inputs))
    mlp.fused(*(x.detach() for x in inputs))
    learned = mlp.fused(inputs[0].detach(), *inputs[1:])
    assert kept == [0, 0, inputs[0].shape[0]]
    assert torch.equal(taught, learned)
    out, _ = mlp._mlp(*inputs, False)
    with pytest.raises(RuntimeError, match="without keeping"):
        out.sum().backward()


@pytest.mark.parametrize(("dtype", "parameters"), [(torch.float32, None), (torch.float16, torch.float32)])
def test_the_operation_is_well_behaved(dtype: torch.dtype, parameters: torch.dtype | None) -> None:
    inputs = given("a tile", dtype, parameters)
    for keep in (False, True):
        torch.library.opcheck(mlp._mlp, (*(x.detach().requires_grad_(keep) for x in inputs), keep))
    out, hidden = mlp.forward(*inputs, keep=True)
    torch.library.opcheck(mlp._mlp_backward, (torch.ones_like(out), inputs[0], hidden, inputs[1], inputs[3]))


# -- compiled --


class Layers(nn.Module):
    """As a block has it: a norm, which autocast leaves in float32, the MLP, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + dispatch.mlp(self.norm(x), self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)


def _policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    ours = operation == torch.ops.adclr.mlp.default
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


class Lean(Layers):
    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        actual: Tensor = checkpoint(
            super().forward, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )
        return actual


class Again(Layers):
    def forward(self, x: Tensor) -> Tensor:
        actual: Tensor = checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)
        return actual


@pytest.mark.parametrize("how", ["plainly", "autocast"])
@pytest.mark.parametrize("kind", [Layers, Lean, Again])
def test_compiled_whole(kind: type[Layers], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    plain_mlp = dispatch.mlp_plain
    monkeypatch.setattr(mlp, "fits", lambda y: True)
    monkeypatch.setattr(dispatch, "mlp_plain", mlp.fused)  # on a CPU too
    calls: list[bool] = []
    forward = mlp.forward

    def spy(*args: Any) -> tuple[Tensor, Tensor]:
        calls.append(args[-1])
        return forward(*args)

    monkeypatch.setattr(mlp, "forward", spy)
    half = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    torch.manual_seed(0)
    layers = kind().to(DEVICE)
    x = torch.randn(40, 16, device=DEVICE)
    results = []
    for model in (layers, torch.compile(layers, fullgraph=True, backend="aot_eager_decomp_partition")):
        layers.zero_grad()
        leaf = x.clone().requires_grad_()
        with torch.autocast(DEVICE.type, half, enabled=how == "autocast"):
            with torch.no_grad():
                taught = model(leaf)
            calls.clear()
            out = model(leaf)
        out.float().square().sum().backward()
        # `run_selectively_checkpointed` must not compute it again
        assert calls == ([True, True] if kind is Again else [True])
        grads = [parameter.grad for parameter in layers.parameters()]
        assert all(grad is not None and grad.dtype == torch.float32 for grad in grads)
        assert torch.equal(out, taught)
        results.append((out.detach(), leaf.grad, *grads))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)
    plain = Layers().to(DEVICE)
    plain.load_state_dict(layers.state_dict())
    monkeypatch.setattr(mlp, "fits", lambda y: False)
    monkeypatch.setattr(dispatch, "mlp_plain", plain_mlp)
    leaf = x.clone().requires_grad_()
    with torch.autocast(DEVICE.type, half, enabled=how == "autocast"):
        out = plain(leaf)
    out.float().square().sum().backward()
    tolerance = EPSILON[half] if how == "autocast" else 1e-5
    expected = (out.detach(), leaf.grad, *(parameter.grad for parameter in plain.parameters()))
    for mine, other in zip(results[0], expected, strict=True):
        assert mine is not None
        assert other is not None
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance * scale)


# -- where --


def test_the_kernels_are_used_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(dtype: torch.dtype = torch.bfloat16, device: str = "cuda:0") -> bool:
        return mlp.fits(SimpleNamespace(device=torch.device(device), dtype=dtype))  # type: ignore[arg-type]

    assert fits()
    assert fits(torch.float16)
    assert not fits(torch.float32)
    assert not fits(torch.float64)
    assert not fits(device="cpu")
    monkeypatch.setattr(triton_available, "possible", False)
    assert not fits()


def test_plain_where_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "fused", None)
    inputs = given()
    torch.testing.assert_close(
        dispatch.mlp(*inputs).double(), formula(*(x.double() for x in inputs)), rtol=1e-4, atol=1e-4
    )
    y = inputs[0].bfloat16()
    assert dispatch.mlp_plain(y, *inputs[1:]).dtype == torch.bfloat16
