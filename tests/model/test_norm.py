"""The norm of a sum against its formula in float64; on a machine without a GPU the kernels run in the interpreter."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from adclr.model.ops import dispatch, norm
from adclr.model.ops.norm import Config
from adclr.system import triton_available

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu"
    and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    and tuple(map(int, np.__version__.split(".")[:2])) >= (2, 5),
    reason="the interpreter of this Triton takes arrays of one number for numbers, which this NumPy no longer allows",
)
EPS = 1e-6
FORMS = ["alone", "added", "scaled"]
WAYS = ["total", "y", "both"]  # whose gradient is given
Given = tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 rows, of which the programs have one to three."""
    monkeypatch.setattr(norm, "FORWARD", {norm.MAX_WIDTH: Config(8, 4, programs=2)})
    monkeypatch.setattr(norm, "BACKWARD", {norm.MAX_WIDTH: Config(8, 4, programs=3)})


def given(form: str, rows: int = 53, dim: int = 48, dtype: torch.dtype = torch.float32) -> Given:
    """x, branch, factor, weight, bias"""
    numbers = torch.Generator().manual_seed(rows + dim)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers).to(DEVICE)

    x, branch = (2 * draw(rows, dim) + draw(rows, 1)).to(dtype), draw(rows, dim).to(dtype)
    factor = (draw(rows, 1) > 0).float() * 1.25
    weight, bias = 1 + 0.5 * draw(dim), draw(dim)
    return x, branch if form != "alone" else None, factor if form == "scaled" else None, weight, bias


def formula(
    x: Tensor, branch: Tensor | None, factor: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x if branch is None else x + branch * (1 if factor is None else factor)
    away = total - total.mean(1, keepdim=True)
    return total, away / (away.square().mean(1, keepdim=True) + eps).sqrt() * weight + bias


def gradients(function: Any, inputs: Given, way: str = "both") -> list[Tensor | None]:
    """[sum, norm, gradients of x, branch, weight and bias], for gradients that are the same for all."""
    x, branch, factor, weight, bias = inputs
    leaves = [None if leaf is None else leaf.detach().clone().requires_grad_() for leaf in (x, branch, weight, bias)]
    total, y = function(leaves[0], leaves[1], factor, leaves[2], leaves[3], EPS)
    numbers = torch.Generator().manual_seed(9)
    dtotal, dy = (torch.randn(x.shape, generator=numbers).bfloat16().to(x) for _ in range(2))  # numbers of every type
    chosen = {"total": [(total, dtotal)], "y": [(y, dy)], "both": [(total, dtotal), (y, dy)]}[way]
    torch.autograd.backward([out for out, _ in chosen], [grad for _, grad in chosen])
    return [total.detach(), y.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)]


def double(inputs: Given) -> Given:
    x, branch, factor, weight, bias = (None if tensor is None else tensor.double() for tensor in inputs)
    assert x is not None
    assert weight is not None
    assert bias is not None
    return x, branch, factor, weight, bias


def check(inputs: Given, tolerance: float, way: str = "both") -> None:
    actual, expected = gradients(norm.fused, inputs, way), gradients(formula, double(inputs), way)
    types = [inputs[0].dtype] * 2 + [leaf.dtype for leaf in (inputs[0], inputs[1], *inputs[3:]) if leaf is not None]
    assert [one is None for one in actual] == [one is None for one in expected]
    for mine, true, dtype in zip((f for f in actual if f is not None), (e for e in expected if e is not None), types):  # noqa: B905
        assert mine.dtype == dtype
        scale = max(1.0, float(true.abs().max()))  # the gradients of weights are sums over rows
        torch.testing.assert_close(mine.double() / scale, true / scale, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_formula(form: str, way: str) -> None:
    if (form, way) != ("alone", "total"):  # which no kernel has a part in
        check(given(form), 1e-5, way)


@pytest.mark.parametrize(("rows", "dim"), [(1, 16), (8, 64), (33, 80), (21, 384), (5, 1040)])
def test_any_size(rows: int, dim: int) -> None:
    check(given("scaled", rows, dim), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_half_precision(form: str, dtype: torch.dtype) -> None:
    check(given(form, dtype=dtype), 2e-2 if dtype == torch.bfloat16 else 3e-3)


def test_the_norm_is_of_the_rounded_sum() -> None:
    x, branch, factor, weight, bias = given("scaled", dtype=torch.float16)
    total, y = norm.fused(x, branch, factor, weight, bias, EPS)
    assert branch is not None
    assert factor is not None
    assert torch.equal(total, (x.float() + branch.float() * factor).half())
    assert torch.equal(y, norm.fused(total, None, None, weight, bias, EPS)[1])


def test_a_branch_of_another_type_has_a_gradient_of_it() -> None:
    for form in ("added", "scaled"):
        x, branch, factor, weight, bias = given(form)
        assert branch is not None
        check((x.half(), branch, factor, weight, bias), 3e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("run", [norm.fused, dispatch.add_norm_plain], ids=["kernels", "plain"])
def test_a_sum_in_float32_and_its_norm_in_half_precision(run: Any, form: str) -> None:
    """`train.residual_precision=float32`: the sum is exact to float32, and so is the gradient passing through it."""
    x, branch, factor, weight, bias = given(form)
    half = None if branch is None else branch.bfloat16()
    leaves = [None if leaf is None else leaf.requires_grad_() for leaf in (x, half, weight, bias)]
    total, y = run(x, half, factor, weight, bias, EPS, torch.bfloat16)
    assert (total.dtype, y.dtype) == (torch.float32, torch.bfloat16)
    exact = double((x.detach(), half, factor, weight.detach(), bias.detach()))
    ones = [None if leaf is None else leaf.detach().requires_grad_() for leaf in (exact[0], exact[1], *exact[3:])]
    true_total, true_y = formula(ones[0], ones[1], exact[2], ones[2], ones[3], EPS)  # type: ignore[arg-type]
    torch.testing.assert_close(total.double(), true_total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(y.double(), true_y, rtol=1e-2, atol=1e-2)
    dtotal = 1 + torch.arange(total.numel(), device=DEVICE).view(total.shape) * 2**-12  # bfloat16 would round it
    torch.autograd.backward([total, y], [dtotal, torch.ones_like(y)])
    torch.autograd.backward([true_total, true_y], [dtotal.double(), torch.ones_like(true_y)])
    for leaf, one in zip(leaves, ones, strict=True):
        if leaf is not None and one is not None:
            assert leaf.grad is not None
            assert one.grad is not None
            assert leaf.grad.dtype == leaf.dtype
            tolerance = 1e-2 if leaf.dtype == torch.bfloat16 else 1e-5
            scale = float(one.grad.abs().max())
            torch.testing.assert_close(leaf.grad.double() / scale, one.grad / scale, rtol=tolerance, atol=tolerance)


def test_tables_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for dim in (384, 768, 1024, 1280, 4096):
        check(given("scaled", 11, dim, torch.float16), 4e-3)
    for table in (norm.FORWARD, norm.BACKWARD):
        assert max(table) == norm.MAX_WIDTH


def test_pieces() -> None:
    cuts = {dim: norm.split_columns(dim) for dim in (16, 48, 64, 80, 384, 640, 768, 1024, 1280, 4096)}
    assert cuts[16] == (1, 16)
    assert cuts[48] == (3, 16)
    assert cuts[384] == (3, 128)
    assert cuts[768] == (3, 256)
    assert cuts[1024] == (4, 256)
    assert cuts[4096] == (4, 1024)
    for dim in range(16, norm.MAX_WIDTH + 1, 16):
        count, width = norm.split_columns(dim)
        assert dim <= count * width <= 1 << (dim - 1).bit_length()
        assert width & (width - 1) == 0


@pytest.mark.parametrize("form", FORMS)
def test_all_of_every_result_is_written(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *size, **how: new_empty(self, *size, **how).fill_(np.nan))
    for rows in (2, 53):  # fewer tiles than programs, and more
        x, branch, factor, weight, bias = given(form, rows)
        scale = None if factor is None else factor.flatten()
        total, y, mean, rstd = norm.forward(x, branch, scale, weight, bias, EPS, keep=True, dtype=x.dtype)
        assert mean.shape == rstd.shape == (rows,)
        apart = x.dtype if form == "scaled" else None
        seen = x if branch is None else total
        back = norm.backward(torch.ones_like(y), y, seen, mean, rstd, weight, scale, apart)
        assert (back[1].numel() > 0) == (form == "scaled")
        for result in (total, y, mean, rstd, *back):
            assert result.isfinite().all()


def test_nothing_beyond_the_edges_is_read() -> None:
    """Rows and columns of NaN around, of which tiles could reach over to."""
    rows, dim = 13, 80  # 3×32, 16 of which are not there
    x, branch, factor, weight, bias = given("scaled", rows + 8, dim)
    assert branch is not None
    assert factor is not None
    for tensor in (x, branch, factor):
        tensor[rows:] = torch.nan
    inputs = x[:rows], branch[:rows], factor[:rows], weight, bias
    for actual, expected in zip(gradients(norm.fused, inputs), gradients(formula, double(inputs)), strict=True):
        assert actual is not None
        assert expected is not None
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


def test_the_same_bits_every_time() -> None:
    for one, other in zip(*(gradients(norm.fused, given("scaled")) for _ in range(2)), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_rows_that_are_nearly_one_number() -> None:
    x, branch, factor, weight, bias = given("scaled")
    check((100 + 0.01 * x, 0.01 * branch, factor, weight, bias), 1e-3)  # type: ignore[operator]


def test_tensors_that_do_not_lie_in_one_piece() -> None:
    x, branch, factor, weight, bias = given("scaled", 21, 32)
    x = x.T.contiguous().T.requires_grad_()
    assert not x.is_contiguous()
    norm.fused(x, branch, factor, weight, bias, EPS)[1].sum().backward()  # whose gradient is one number, over and over
    y = x.detach().double().requires_grad_()
    _, exact_branch, exact_factor, exact_weight, exact_bias = double((x, branch, factor, weight, bias))
    formula(y, exact_branch, exact_factor, exact_weight, exact_bias, EPS)[1].sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-5, atol=1e-5)


def test_no_rows() -> None:
    actual = gradients(norm.fused, given("scaled", rows=0))
    assert all(result is not None and not result.any() for result in actual)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_plain_is_the_formula(form: str, way: str) -> None:
    inputs = double(given(form))
    for mine, true in zip(*(gradients(how, inputs, way) for how in (dispatch.add_norm, formula)), strict=True):
        assert (mine is None) == (true is None)
        if mine is not None:
            torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-10)


def test_plain_and_fused_round_alike() -> None:
    inputs = given("scaled", dtype=torch.float16)
    (plain_total, plain_y), (total, y) = (how(*inputs, EPS) for how in (dispatch.add_norm_plain, norm.fused))
    assert torch.equal(plain_total, total)
    assert plain_y.dtype == torch.float16
    torch.testing.assert_close(plain_y, y, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(dispatch.norm(total, *inputs[3:], EPS), plain_y)


@pytest.mark.parametrize("form", FORMS)
def test_the_operations_are_well_behaved(form: str) -> None:
    for dtype in (torch.float32, torch.float16):
        x, branch, factor, weight, bias = given(form, 11, 16, dtype)
        scale = None if factor is None else factor.flatten()
        torch.library.opcheck(norm._add_norm, (x, branch, scale, weight, bias, EPS, False, x.dtype))
        leaves = [None if leaf is None else leaf.requires_grad_() for leaf in (x, branch, weight, bias)]
        torch.library.opcheck(norm._add_norm, (leaves[0], leaves[1], scale, *leaves[2:], EPS, True, x.dtype))
        total, y, mean, rstd = norm.forward(x.detach(), branch, scale, weight, bias, EPS, keep=True, dtype=x.dtype)
        seen = x.detach() if branch is None else total
        for dtotal in (None, torch.ones_like(y)):
            apart = dtype if form == "scaled" else None
            arguments = (torch.ones_like(y), dtotal, seen.detach(), mean, rstd, weight.detach(), scale, apart)
            torch.library.opcheck(norm._add_norm_backward, arguments)


class Layers(nn.Module):
    """As in a block: norm, layer, sum and norm, layer, and the sum again."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.how = how

    def body(self, x: Tensor, factor: Tensor | None) -> Tensor:
        (one, two), (first, second) = self.norms, self.layers
        x, y = norm.fused(x, None, None, one.weight, one.bias, EPS)  # type: ignore[arg-type]
        x, y = norm.fused(x, first(y), factor, two.weight, two.bias, EPS)  # type: ignore[arg-type]
        out: Tensor = x + second(y)
        return out

    def forward(self, x: Tensor, factor: Tensor | None) -> Tensor:
        if "kept" not in self.how:
            return self.body(x, factor)
        contexts = partial(create_selective_checkpoint_contexts, policy)
        out: Tensor = checkpoint(self.body, x, factor, use_reentrant=False, context_fn=contexts)
        return out


def policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.adclr.add_norm.default)
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("how", ["plainly", "autocast", "kept", "kept, autocast"])
def test_compiled_whole(how: str, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    calls = []
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", lambda *inputs: (calls.append(inputs[-2]), forward(*inputs))[1])
    layers = Layers(how).to(DEVICE)
    low = torch.float16 if "autocast" in how else torch.float32
    x, factor = torch.randn(21, 32, device=DEVICE).to(low), torch.rand(21, 1, device=DEVICE) if scaled else None
    results = []
    for model in (layers, torch.compile(layers, fullgraph=True, backend="aot_eager")):
        layers.zero_grad()
        calls.clear()
        own = x.clone().requires_grad_()
        with torch.autocast(DEVICE.type, torch.float16, enabled="autocast" in how):
            out = model(own, factor)
            assert out.dtype == low
            out.float().square().sum().backward()
            assert calls == [True, True]  # what is kept is not made again
            with torch.no_grad():
                taught = model(own, factor)
        assert calls == [True, True, False, False]
        assert torch.equal(out, taught)
        results.append([out.detach(), own.grad, *(weight.grad for weight in layers.parameters())])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-3, atol=1e-3 if low == torch.float16 else 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_kept(form: str) -> None:
    x, branch, factor, weight, bias = given(form)
    x.requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one), one)[1], lambda one: one):
        total, _ = norm.fused(x, branch, factor, weight.requires_grad_(), bias, EPS)
    assert [one.data_ptr() for one in (kept[0], kept[3])] == [total.data_ptr(), weight.data_ptr()]
    assert [one.shape for one in kept[1:3]] == [x.shape[:1]] * 2
    assert len(kept) == (5 if form == "scaled" else 4)
    torch.testing.assert_close(kept[1], total.detach().mean(1))
    if branch is None:
        assert total is x


def test_a_sum_without_a_factor_has_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    x, branch, _, weight, bias = given("added")
    assert branch is not None
    seen = []
    backward = norm.backward
    monkeypatch.setattr(norm, "backward", lambda *inputs: (seen.append(backward(*inputs)), seen[-1])[1])
    total, y = norm.fused(x.requires_grad_(), branch.requires_grad_(), None, weight, bias, EPS)
    dx, dbranch = torch.autograd.grad([total, y], [x, branch], [torch.ones_like(x)] * 2)
    assert seen[0][1].numel() == 0
    assert dx.data_ptr() == dbranch.data_ptr() == seen[0][0].data_ptr()


def test_a_teacher_keeps_nothing() -> None:
    x, branch, factor, weight, bias = given("scaled")
    with torch.no_grad():
        total, y = norm.fused(x.requires_grad_(), branch, factor, weight, bias, EPS)
    assert not total.requires_grad
    for actual in norm._outputs(x, True, False, x.dtype)[2:]:
        assert actual.numel() == 0
    total, y, mean, rstd = norm._add_norm(x, branch, None, weight, bias, EPS, False, x.dtype)
    assert mean.numel() == rstd.numel() == 0
    with pytest.raises(RuntimeError, match="without keeping"):
        y.sum().backward()


def test_the_kernels_are_used_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(dim: int = 384, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", before: tuple[int, ...] = (9,)):  # type: ignore[no-untyped-def]
        x = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(*before, dim))
        return norm.fits(x)  # type: ignore[arg-type]

    assert fits()
    assert fits(dtype=torch.float16)
    assert not fits(dtype=torch.float32)
    assert not fits(device="cpu")
    assert not fits(dim=24)
    assert not fits(dim=norm.MAX_WIDTH + 16)
    assert not fits(before=(2, 9))
    monkeypatch.setattr(triton_available, "possible", False)
    assert not fits()


def test_what_does_not_belong_together() -> None:
    x, branch, factor, weight, bias = given("scaled", 9, 32)
    assert branch is not None
    assert factor is not None
    with pytest.raises(ValueError, match="no kernel"):
        norm.fused(x[:, :24], None, None, weight[:24], bias[:24], EPS)
    with pytest.raises(ValueError, match="no kernel"):
        norm.fused(x, branch, factor, weight[:16], bias, EPS)
    with pytest.raises(ValueError, match="not for"):
        norm.fused(x, branch[:4], factor, weight, bias, EPS)
    with pytest.raises(ValueError, match="not for"):
        norm.fused(x, branch, factor[:4], weight, bias, EPS)
