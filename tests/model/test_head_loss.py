"""Last layer and losses in chunks: against loops over the formula in float64, and against the plain operations."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adclr.model.losses import Center
from adclr.model.method import ADCLR
from adclr.model.named_tensors import Views
from adclr.model.ops import head_loss, head_loss_kernels
from adclr.model.ops.head_loss import Part
from kernel_device import DEVICE, needs_interpreter
from test_method import METHODS, make, make_views

pytestmark = needs_interpreter
DIM, STUDENT, TEACHER = 16, 0.1, 0.04


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few prototypes are several blocks, the last of them not full."""
    monkeypatch.setattr(head_loss_kernels, "STATISTICS", (32, 1))
    monkeypatch.setattr(head_loss_kernels, "GRADIENT", (64, 1))


class Case(NamedTuple):
    student: Tensor
    prototypes: Tensor
    teacher: Tensor
    teacher_prototypes: Tensor
    parts: tuple[Part, ...]

    def run(self) -> head_loss.Result:
        return head_loss.head_loss(*self, STUDENT, TEACHER)


def draw(*shape: int, spread: float = 1.0) -> Tensor:
    return torch.randn(*shape) * spread


def case(
    num_prototypes: int = 130, global_: tuple[int, int] = (3, 5), query: tuple[int, int] = (4, 2), masked: int = 5
) -> Case:
    """(items, views) of the parts; coefficients and weights that differ. Student and teacher agree in part."""
    torch.manual_seed(0)
    parts = (
        Part(*global_, draw(num_prototypes, spread=0.05).to(DEVICE), 1.0),
        Part(*query, draw(num_prototypes, spread=0.05).to(DEVICE), 0.7),
        Part(masked, 1, draw(num_prototypes, spread=0.05).to(DEVICE), 0.3, torch.rand(masked, device=DEVICE) ** 3),
    )

    def rows(counts: list[int]) -> Tensor:
        return F.normalize(draw(sum(counts), DIM), dim=-1).to(DEVICE)

    directions = F.normalize(draw(num_prototypes, DIM), dim=-1)
    gain, noise = 1 + draw(num_prototypes, 1, spread=0.1), draw(num_prototypes, DIM, spread=0.05)
    return Case(
        rows([part.student_rows for part in parts]).requires_grad_(),
        (gain * directions).to(DEVICE).requires_grad_(),
        rows([part.teacher_rows for part in parts]),
        (directions + noise).to(DEVICE),
        parts,
    )


def slow(case: Case) -> tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor]:
    """(total, losses, entropy, gradient of rows, of prototypes): one pair of rows after the other, in float64."""
    student, prototypes = (x.detach().cpu().double().requires_grad_() for x in case[:2])
    teacher, teacher_prototypes = (x.cpu().double() for x in case[2:4])
    losses: list[Tensor] = []
    entropies: list[list[Tensor]] = []
    total = student.sum() * 0
    own = taught = 0
    for part in case.parts:
        center = part.center.cpu().double()
        teacher_views = 2 if part.weights is None else 1
        terms, entropies = [], [*entropies, []]
        for item in range(part.items):
            targets = [
                torch.softmax((teacher_prototypes @ teacher[taught + v * part.items + item] - center) / TEACHER, 0)
                for v in range(teacher_views)
            ]
            entropies[-1] += [-(p * p.log()).nan_to_num().sum() for p in targets]
            for v, target in enumerate(targets):
                for s in range(part.views):
                    if s != v or part.weights is not None:
                        logits = prototypes @ student[own + s * part.items + item] / STUDENT
                        h = -(target * torch.log_softmax(logits, 0)).sum()
                        terms.append(h if part.weights is None else h * part.weights[item].item())
        if part.weights is None and part.items:
            terms = [term / len(terms) for term in terms]
        losses.append(sum(terms, torch.zeros((), dtype=torch.float64)))
        total = total + part.coefficient * losses[-1]
        own, taught = own + part.student_rows, taught + part.teacher_rows
    entropy = torch.stack(entropies[0]).mean() / math.log(len(prototypes))
    gradients = torch.autograd.grad(total, (student, prototypes))
    return total.detach(), [loss.detach() for loss in losses], entropy, *gradients


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


CASES = {
    "all parts": case,
    "two views": lambda: case(48, (3, 2)),
    "twelve views": lambda: case(130, (2, 12), (0, 0), 0),
    "queries in all views": lambda: case(65, (2, 4), (3, 4), 0),
    "one item": lambda: case(32, (1, 3), (1, 2), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_the_formulas(name: str) -> None:
    given = CASES[name]()
    found = given.run()
    total, losses, entropy, for_student, for_prototypes = slow(given)
    assert error(found.total, total) < 1e-5
    for a, b in zip(found.losses, losses, strict=True):
        assert a.shape == ()
        assert error(a, b) < 1e-5
    assert error(found.entropy, entropy) < 1e-5
    (found.total / 4).backward()
    assert given.student.grad is not None
    assert given.prototypes.grad is not None
    assert error(given.student.grad * 4, for_student) < 1e-5
    assert error(given.prototypes.grad * 4, for_prototypes) < 1e-5


def test_autocast_means_float16() -> None:
    given = case()
    total, losses, entropy, for_student, for_prototypes = slow(given)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        found = given.run()
    found.total.backward()
    assert found.total.dtype == torch.float32
    assert error(found.total, total) < 1e-3  # with bfloat16 logits it would not be
    for a, b in zip((*found.losses, found.entropy), (*losses, entropy), strict=True):
        assert error(a, b) < 1e-2
    for a, b in ((given.student.grad, for_student), (given.prototypes.grad, for_prototypes)):
        assert a is not None
        assert a.dtype == torch.float32
        assert F.cosine_similarity(a.cpu().double().flatten(), b.flatten(), dim=0) > 0.9999


def test_float16_keeps_small_probabilities_and_small_weights() -> None:
    """A nearly uniform softmax over many prototypes, and weights a thousandth of the largest."""
    torch.manual_seed(1)
    num_prototypes, items = 4096, 2
    given = case(num_prototypes, (2, 2), (0, 0), items)
    weights = torch.tensor([1.0, 1e-3], device=DEVICE)
    flat = (given.prototypes * 0.01).detach().requires_grad_()
    given = given._replace(prototypes=flat, parts=(*given.parts[:2], given.parts[2]._replace(weights=weights)))
    _, _, _, for_student, _ = slow(given)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16), pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_loss_kernels, "STATISTICS", (1024, 1))
        patch.setattr(head_loss_kernels, "GRADIENT", (1024, 1))
        given.run().total.backward()
    assert given.student.grad is not None
    for row in range(len(for_student)):
        assert error(given.student.grad[row], for_student[row]) < 1e-2, row


@pytest.mark.parametrize("name", ["all parts", "queries in all views"])
def test_chunks_do_not_change_the_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, split = CASES[name](), CASES[name]()
    a = whole.run()
    a.total.backward()
    shapes = []
    statistics = head_loss_kernels.statistics
    monkeypatch.setattr(
        head_loss_kernels,
        "statistics",
        lambda *args: (shapes.append((args[0].shape, args[2].shape)), statistics(*args)),
    )
    monkeypatch.setattr(head_loss, "CHUNK_BYTES", 16 * 4 * whole.prototypes.shape[0])
    b = split.run()
    b.total.backward()
    assert len(shapes) > sum(part.items > 0 for part in whole.parts)
    assert all(taught[0] + studied[0] <= 16 for taught, studied in shapes)
    torch.testing.assert_close(b.total, a.total, rtol=1e-6, atol=0)
    torch.testing.assert_close(b.losses, a.losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(b.entropy, a.entropy, rtol=1e-6, atol=0)
    assert error(split.student.grad, whole.student.grad) < 1e-6
    assert error(split.prototypes.grad, whole.prototypes.grad) < 1e-6


def test_the_same_to_the_bit_every_time() -> None:
    results = []
    for _ in range(2):
        given = case()
        found = given.run()
        found.total.backward()
        results.append([found.total, *found.losses, found.entropy, given.student.grad, given.prototypes.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_without_masked_patches_their_loss_is_0() -> None:
    found = case(48, masked=0).run()
    assert found.losses[2] == 0
    assert found.total.requires_grad
    torch.testing.assert_close(found.total, found.losses[0] + 0.7 * found.losses[1])


def test_only_what_is_needed_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = case(48)
    expected = given.run()
    calls = []
    gradient, product = head_loss_kernels.gradient, head_loss._product
    monkeypatch.setattr(head_loss_kernels, "gradient", lambda *args: (calls.append("kernel"), gradient(*args)))
    monkeypatch.setattr(head_loss, "_product", lambda a, b: (calls.append("product"), product(a, b))[1])
    with torch.no_grad():
        found = given.run()
    assert torch.equal(found.total, expected.total)
    assert not found.total.requires_grad
    assert not calls
    frozen = given._replace(prototypes=given.prototypes.detach()).run()
    assert calls == ["kernel", "product"] * 3
    frozen.total.backward()
    assert given.student.grad is not None
    assert given.prototypes.grad is None


def test_no_matrix_of_rows_and_prototypes_is_kept() -> None:
    given = case(130, (12, 5))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x):
        total = given.run().total
    rows, num_prototypes = len(given.student), len(given.prototypes)
    assert sorted(kept) == sorted([rows * DIM, num_prototypes * DIM])
    total.backward()


def test_parts_have_no_graph_and_backward_can_be_repeated() -> None:
    given = case(48)
    found = given.run()
    assert not any(loss.requires_grad for loss in (*found.losses, found.entropy))
    found.total.backward(retain_graph=True)
    assert given.student.grad is not None
    once = given.student.grad.clone()
    found.total.backward()
    torch.testing.assert_close(given.student.grad, 2 * once)


def test_what_is_not_finite_makes_the_loss_so() -> None:
    for field in ("student", "prototypes", "teacher", "teacher_prototypes"):
        given = case(48)
        broken = getattr(given, field).detach().clone()
        broken[1, 0] = float("nan")
        found = given._replace(**{field: broken}).run()
        assert not found.total.isfinite(), field


@pytest.mark.parametrize("name", METHODS)
def test_the_method_gives_the_same_losses_gradients_and_centers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for forced in (False, True):
        settings, method = make(**METHODS[name])
        method = method.to(DEVICE)
        views = to_device(make_views(settings))
        monkeypatch.setattr(ADCLR, "_runs_kernels", lambda *_, forced=forced: forced)
        losses = method(views, 0.05, 0.12)  # the teacher's temperature for queries is another one
        losses.total.backward()
        method.update(1.0, torch.tensor(True, device=DEVICE))
        gradients = {n: p.grad for n, p in method.student.named_parameters()}
        results.append((losses, gradients, {n: c.value for n, c in method.centers.items() if isinstance(c, Center)}))
    plain, chunked = results
    for field in plain[0]._fields:
        a, b = getattr(chunked[0], field), getattr(plain[0], field)
        assert a.shape == b.shape == ()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=field)
    assert all(gradient is not None for gradient in plain[1].values())
    for part, other in ((plain[1], chunked[1]), (plain[2], chunked[2])):
        assert part.keys() == other.keys()
        for key, value in part.items():
            assert error(other[key], value) < 2e-5 or (other[key] - value).abs().max() < 1e-7, key


def test_the_method_without_a_masked_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, method = make(masked_weight=1.0)
    method, views = method.to(DEVICE), to_device(make_views(settings))
    assert views.masks is not None
    masks = type(views.masks)(torch.zeros_like(views.masks.grid), views.masks.index[:0], views.masks.weight[:0])
    monkeypatch.setattr(ADCLR, "_runs_kernels", lambda *_: True)
    losses = method(Views(views.global_crops, views.local_crops, views.queries, masks), 0.05)
    losses.total.backward()
    assert losses.masked == 0
    assert all(p.grad is not None for p in method.student.head.parameters())


def test_on_a_cpu_and_in_float64_the_plain_operations_are_used() -> None:
    assert not head_loss.fits(torch.zeros(1))
    assert head_loss.fits(torch.zeros(1, device=DEVICE)) == (DEVICE.type == "cuda")
    assert not head_loss.fits(torch.zeros(1, device=DEVICE, dtype=torch.float64))


def to_device(views: Views) -> Views:
    def moved(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(DEVICE)

    masks = views.masks
    if masks is not None:
        masks = type(masks)(masks.grid.to(DEVICE), masks.index.to(DEVICE), masks.weight.to(DEVICE))
    return Views(views.global_crops.to(DEVICE), moved(views.local_crops), moved(views.queries), masks)
