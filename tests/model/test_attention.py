"""Attention against its formula in float64; on a machine without a GPU the kernels run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from adclr.model.ops import attention, dispatch
from adclr.model.ops.attention import Config, Group
from adclr.system import triton_available
from kernel_device import DEVICE, needs_interpreter

HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter multiplies the bits of bfloat16
pytestmark = needs_interpreter
VARIANTS = {  # forward, backward
    "whole": (Config("forward", 128, 128, 4), Config("whole", 0, 0, 4)),
    "whole, 2 heads": (Config("forward", 32, 32, 4, heads=2), Config("whole", 0, 0, 4, heads=2)),
    "rows": (Config("forward", 16, 64, 4, 1), Config("rows", 32, 0, 4, 1)),
    "two": (Config("forward", 32, 32, 4, 1), Config("two", 32, 16, 4, 1)),
}
FEW = [Group(2, 5, 5), Group(1, 21, 17), Group(1, 37, 37), Group(2, 21, 17, 1)]
# at, before and behind the edges of tiles of 16, 32 and 64
EDGES = [Group(1, 16, 16), Group(1, 17, 16), Group(1, 32, 32), Group(1, 33, 33), Group(1, 65, 64), Group(1, 70, 66)]
EDGES += [Group(1, 17, 16, 15), Group(1, 36, 33, 5), Group(1, 70, 65, 1), Group(1, 16, 16, 3)]


def qkv_of(groups: list[Group], heads: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    rows = sum(group.sequences * group.tokens for group in groups)
    return torch.randn(rows, 3 * heads * width, generator=numbers).to(DEVICE, dtype)


def parts(x: Tensor, groups: list[Group]) -> Iterator[tuple[Group, Tensor]]:
    """Each group with its rows, sequences × tokens × columns."""
    rows = [group.sequences * group.tokens for group in groups]
    for group, part in zip(groups, x.split(rows), strict=True):
        yield group, part.unflatten(0, (group.sequences, group.tokens))


def formula(qkv: Tensor, groups: list[Group], heads: int) -> Tensor:
    """softmax(q kᵀ / √d) v for one sequence and one head after the other, in float64."""
    qkv, outs = qkv.double(), []
    width = qkv.shape[1] // 3 // heads
    for group, part in parts(qkv, groups):
        for sequence in part:
            q, k, v = sequence.view(group.tokens, 3, heads, width).unbind(1)
            reads = []
            for head in range(heads):
                scores = q[:, head] @ k[: group.image, head].T / width**0.5
                scores[group.image :, : group.hidden] = -torch.inf
                weights = scores.exp() / scores.exp().sum(1, keepdim=True)
                reads.append(weights @ v[: group.image, head])
            outs.append(torch.cat(reads, dim=1))
    return torch.cat(outs)


def gradient(function: object, qkv: Tensor, groups: list[Group], heads: int, seed: int = 9) -> tuple[Tensor, Tensor]:
    """(output, gradient of qkv) for a gradient of the output that is the same for all."""
    x = qkv.detach().clone().requires_grad_()
    out = function(x, groups, heads)  # type: ignore[operator]
    numbers = torch.Generator().manual_seed(seed)
    out.backward(torch.randn(out.shape, generator=numbers).to(HALF).to(out))  # a number of every type
    assert x.grad is not None
    return out.detach(), x.grad


def check(qkv: Tensor, groups: list[Group], heads: int, tolerance: float) -> None:
    actual, expected = gradient(attention.fused, qkv, groups, heads), gradient(formula, qkv.double(), groups, heads)
    for mine, true in zip(actual, expected, strict=True):
        assert mine.dtype == qkv.dtype
        torch.testing.assert_close(mine.double(), true, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every variant for float32, which shows an error that half the precision would hide."""
    forward, backward = VARIANTS[request.param]
    monkeypatch.setitem(attention.FORWARD, "exact", forward)
    monkeypatch.setitem(attention.BACKWARD, "exact", backward)
    return str(request.param)


@pytest.mark.parametrize(("groups", "heads", "width"), [(FEW, 4, 16), (EDGES, 1, 16), ([Group(1, 70, 66)], 1, 64)])
@pytest.mark.usefixtures("variant")
def test_every_variant_is_the_formula(groups: list[Group], heads: int, width: int) -> None:
    if DEVICE.type == "cuda" and width > 16:
        pytest.skip("float32 tiles of this size do not fit")
    check(qkv_of(groups, heads, width), groups, heads, 1e-5)


@pytest.mark.parametrize(("groups", "heads", "width"), [(FEW, 2, 64), (EDGES, 1, 32), ([Group(1, 100, 90)], 1, 128)])
def test_float32_as_it_is_set(groups: list[Group], heads: int, width: int) -> None:
    check(qkv_of(groups, heads, width), groups, heads, 1e-5)


@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_half_precision_as_it_is_set(width: int) -> None:
    groups = [Group(2, 37, 37), Group(1, 64, 60), Group(1, 140, 130)]
    sizes = {attention.size_class(group.tokens, group.image, width, HALF) for group in groups}
    assert sizes == {"short", "large" if width == 128 else "long"}
    qkv = qkv_of(groups, 2, width, HALF)
    check(qkv, groups, 2, 3e-2 if torch.bfloat16 == HALF else 4e-3)


def test_the_largest_sequences() -> None:
    groups = [Group(1, 207, 197), Group(1, 282, attention.MAX_KEYS)]
    check(qkv_of(groups, 1, 64, HALF), groups, 1, 3e-2 if torch.bfloat16 == HALF else 4e-3)


@pytest.mark.usefixtures("variant")
def test_queries_do_not_change_what_the_image_reads() -> None:
    with_queries, without = Group(2, 40, 33), Group(2, 33, 33)
    qkv = qkv_of([with_queries], 2, 16)
    image = qkv.view(2, 40, -1)[:, :33].reshape(66, -1)
    out = attention.fused(qkv, [with_queries], 2).view(2, 40, -1)[:, :33]
    assert torch.equal(out.reshape(66, -1), attention.fused(image, [without], 2))


@pytest.mark.usefixtures("variant")
def test_who_does_not_answer_gets_no_gradient_as_a_key() -> None:
    groups = [Group(2, 5, 5), Group(2, 60, 17)]
    qkv = qkv_of(groups, 2, 16)
    for group, part in parts(qkv, groups):
        part.unflatten(2, (3, -1))[:, group.image :, 1:] = float("nan")  # nor is it looked at
    out, grad = gradient(attention.fused, qkv, groups, 2)
    assert out.isfinite().all()
    assert grad.isfinite().all()
    for group, part in parts(grad, groups):
        asked = part.unflatten(2, (3, -1))
        assert (asked[:, group.image :, 1:] == 0).all()
        assert (asked[:, : group.image] != 0).all()


@pytest.mark.usefixtures("variant")
def test_all_of_every_result_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, empty_like = attention._outputs, torch.empty_like
    nan = float("nan")
    monkeypatch.setattr(attention, "_outputs", lambda *args: tuple(made.fill_(nan) for made in outputs(*args)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **named: empty_like(*args, **named).fill_(nan))
    groups = [*FEW, Group(0, 9, 9), Group(1, 70, 33)]
    qkv = qkv_of(groups, 3, 16)
    out, lse = attention.forward(qkv, groups, 3, keep=True)
    grad = attention.backward(torch.ones_like(out), qkv, out, lse, groups, 3)
    for result in (out, lse, grad):
        assert result.isfinite().all()


@pytest.mark.usefixtures("variant")
def test_large_scores() -> None:
    groups = [Group(1, 37, 33)]
    for q, k in [(20.0, 20.0), (20.0, -20.0)]:  # all scores near 1600, or near -1600: e to that is no number
        qkv = qkv_of(groups, 1, 16)
        qkv[:, :16], qkv[:, 16:32] = q + 0.01 * qkv[:, :16], k + 0.01 * qkv[:, 16:32]
        actual, expected = (gradient(how, qkv, groups, 1) for how in (attention.fused, dispatch.attend_plain))
        for mine, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-3)


@pytest.mark.usefixtures("variant")
def test_the_same_bits_every_time() -> None:
    qkv = qkv_of(FEW, 3, 16)
    for one, other in zip(*(gradient(attention.fused, qkv, FEW, 3) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


def test_a_gradient_that_is_one_number_over_and_over() -> None:
    x = qkv_of(FEW, 1, 16).requires_grad_()
    attention.fused(x, FEW, 1).sum().backward()
    y = x.detach().double().requires_grad_()
    formula(y, FEW, 1).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-5, atol=1e-5)


def test_plain_is_the_formula() -> None:
    groups = [*FEW, *EDGES]
    qkv = qkv_of(groups, 3, 16).double()
    for mine, true in zip(*(gradient(how, qkv, groups, 3) for how in (dispatch.attend, formula)), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-10)


def test_the_operation_is_well_behaved() -> None:
    groups = [Group(1, 5, 5), Group(1, 20, 17)]
    flat = [number for group in groups for number in group]
    for dtype in (torch.float32, HALF):
        for keep in (False, True):
            qkv = qkv_of(groups, 1, 16, dtype).requires_grad_(keep)
            torch.library.opcheck(attention._attend, (qkv, flat, 1, keep))
        out, lse = attention.forward(qkv.detach(), groups, 1, keep=True)
        torch.library.opcheck(attention._attend_backward, (torch.ones_like(out), qkv.detach(), out, lse, flat, 1))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(attention.fused(self.qkv(x), FEW, 2))
        return out


@pytest.mark.parametrize("how", ["plainly", "autocast"])
def test_compiled_whole(how: str) -> None:
    torch.manual_seed(0)
    layers = Layers().to(DEVICE)
    x = torch.randn(sum(group.sequences * group.tokens for group in FEW), 32, device=DEVICE)
    results = []
    for model in (layers, torch.compile(layers, fullgraph=True, backend="aot_eager")):
        layers.zero_grad()
        with torch.autocast(DEVICE.type, HALF, enabled=how == "autocast"):
            out = model(x)
            with torch.no_grad():
                taught = model(x)
        out.float().square().sum().backward()
        assert layers.qkv.weight.grad is not None
        assert torch.equal(out, taught)
        results.append((out.detach(), layers.qkv.weight.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)


def test_a_teacher_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    forward = attention.forward

    def spy(qkv: Tensor, groups: list[Group], heads: int, keep: bool) -> tuple[Tensor, Tensor]:
        out, lse = forward(qkv, groups, heads, keep)
        kept.append(lse.numel())
        return out, lse

    monkeypatch.setattr(attention, "forward", spy)
    qkv = qkv_of(FEW, 2, 16).requires_grad_()
    with torch.no_grad():
        attention.fused(qkv, FEW, 2)
    attention.fused(qkv.detach(), FEW, 2)
    attention.fused(qkv, FEW, 2)
    assert kept == [0, 0, 2 * qkv.shape[0]]
    out, _ = attention._attend(qkv, [1, qkv.shape[0], 1], 2, False)
    with pytest.raises(RuntimeError, match="without keeping"):
        out.sum().backward()


def test_the_kernels_are_used_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_has_shared_memory", lambda index: index == 0)

    def fits(
        image: int = 197, width: int = 64, dtype: torch.dtype = torch.bfloat16, device: str = "cuda:0", heads: int = 6
    ) -> bool:
        qkv = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(999, 3 * heads * width))
        return attention.fits(qkv, [Group(1, 37, 37), Group(1, 300, image)], heads)  # type: ignore[arg-type]

    assert fits()
    assert not fits(dtype=torch.float32)
    assert fits(width=16)
    assert not fits(image=attention.MAX_KEYS + 1)
    assert not fits(width=48)
    assert not fits(width=256)
    assert not fits(dtype=torch.float64)
    assert not fits(device="cpu")
    assert not fits(device="cuda:1")  # too small a GPU
    monkeypatch.setattr(triton_available, "possible", False)
    assert not fits()


def test_plain_where_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = qkv_of(FEW, 2, 12)  # heads of 12 are no tile, on any device
    monkeypatch.setattr(attention, "fused", None)
    torch.testing.assert_close(dispatch.attend(qkv, FEW, 2).double(), formula(qkv, FEW, 2), rtol=1e-4, atol=1e-4)


def test_groups_that_are_not_these_tokens() -> None:
    qkv = qkv_of(FEW, 2, 16)
    for groups in ([Group(1, 5, 5)], [Group(1, qkv.shape[0], 0)], [Group(1, qkv.shape[0], qkv.shape[0] + 1)]):
        with pytest.raises(ValueError, match="tokens are not"):
            attention.fused(qkv, groups, 2)
