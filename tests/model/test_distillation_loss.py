"""The loss of a distillation: against the formula in float64, with gradients; grids; steps that are void."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adclr.model import optim
from adclr.model.distillation import Distillation, Projector, Student, Teacher, feature_loss, resample
from adclr.model.feature_network import FeatureNetwork
from adclr.model.named_tensors import Views
from adclr.model.vit import VisionTransformer

pytestmark = pytest.mark.usefixtures("one_thread")


def slow_loss(student: Tensor, teacher: Tensor, weight: float) -> Tensor:
    """1 - cos(s, t) + weight · smooth L1 of both at length √D, by scalars: the mean over rows."""
    total = torch.zeros((), dtype=torch.float64)
    rows, width = student.shape
    for row in range(rows):
        s, t = student[row], teacher[row]
        s, t = s / (s * s).sum().sqrt(), t / (t * t).sum().sqrt()
        smooth = torch.zeros((), dtype=torch.float64)
        for i in range(width):
            difference = (s[i] - t[i]).abs() * math.sqrt(width)
            smooth = smooth + (0.5 * difference**2 if difference < 1 else difference - 0.5)
        total = total + 1 - (s * t).sum() + weight * smooth / width
    return total / rows


def random_weights(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def method_of(student: VisionTransformer | FeatureNetwork, patch_dim: int, **options: object) -> Distillation:
    teacher = VisionTransformer(12, 2, 2, 4, 16)
    head = Projector(student.dim, patch_dim, teacher.dim)
    method = Distillation(Student(student, head), Teacher(teacher), **options)  # type: ignore[arg-type]
    random_weights(method, 3)
    return method


def views_of(count: int = 3) -> Views:
    generator = torch.Generator().manual_seed(1)
    large, small = (torch.randn(n, count, 3, size, size, generator=generator) for n, size in ((2, 16), (3, 8)))
    return Views(large, small, None, None)


@pytest.mark.parametrize("weight", [0.0, 0.5, 2.0])
def test_loss_and_gradient_are_the_formulas(weight: float) -> None:
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(5, 7, generator=generator, requires_grad=True)
    teacher = torch.randn(5, 7, generator=generator)
    loss, cosine = feature_loss(student, teacher, weight)
    (gradient,) = torch.autograd.grad(loss, student)
    exact = student.detach().double().requires_grad_()
    expected = slow_loss(exact, teacher.double(), weight)
    (expected_gradient,) = torch.autograd.grad(expected, exact)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(gradient.double(), expected_gradient, atol=1e-7)
    assert cosine.item() == pytest.approx(1 - slow_loss(exact, teacher.double(), 0.0).item(), abs=1e-6)
    scaled, _ = feature_loss(3 * student, 0.1 * teacher, weight)  # the length of features does not matter
    assert scaled.item() == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("grid", ["student", "teacher"])
def test_losses_of_a_batch_are_means_over_crops(grid: str) -> None:
    """Patches of 8 pixels learn from patches of 4: the grids are 2x2 and 4x4, of local crops 1x1 and 2x2."""
    method = method_of(VisionTransformer(8, 2, 2, 8, 16), 8, grid=grid, patch_weight=0.7, smooth_l1_weight=0.5)
    views = views_of()
    losses = method(views, 0.04)
    losses.total.backward()
    gradients = [p.grad.clone() for p in method.student.parameters() if p.grad is not None]
    assert len(gradients) == len(list(method.student.parameters()))
    assert all(p.grad is None for p in method.teacher.parameters())

    method.zero_grad()
    head, parts = method.student.head, []
    assert views.local_crops is not None
    for images in [*views.global_crops, *views.local_crops]:
        ours = method.student.backbone(images)
        with torch.no_grad():
            theirs = method.teacher.backbone(images)
        student, teacher = head.patches(ours.patches), theirs.patches
        side, other = (round(math.sqrt(t.shape[1])) for t in (student, teacher))

        def to_side(tokens: Tensor, now: int, then: int) -> Tensor:
            maps = tokens.transpose(1, 2).unflatten(2, (now, now))
            return F.interpolate(maps, (then, then), mode="bilinear", antialias=True).flatten(2).transpose(1, 2)

        if grid == "student":
            teacher = to_side(teacher, other, side)
        else:
            student = to_side(student, side, other)
        rows = student.flatten(0, 1).double(), teacher.flatten(0, 1).double()
        cls = slow_loss(head.cls(ours.cls).double(), theirs.cls.double(), 0.5)
        parts.append((cls, slow_loss(*rows, 0.5)))
    cls, patches = (sum(part[i] for part in parts) / len(parts) for i in (0, 1))
    assert isinstance(cls, Tensor)
    assert isinstance(patches, Tensor)
    total = cls + 0.7 * patches
    assert losses.total.item() == pytest.approx(total.item(), rel=1e-5)
    assert (losses.cls.item(), losses.patches.item()) == pytest.approx((cls.item(), patches.item()), rel=1e-5)
    total.backward()
    for parameter, gradient in zip(method.student.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_resampling_a_grid_to_itself_changes_nothing_and_constants_stay() -> None:
    features = torch.randn(2, 12, 5)
    assert resample(features, (3, 4), (3, 4)) is features
    constant = torch.randn(2, 1, 5).expand(2, 12, 5)
    for target in ((1, 1), (2, 7), (9, 9)):
        resampled = resample(constant, (3, 4), target)
        assert resampled.shape == (2, target[0] * target[1], 5)
        assert torch.allclose(resampled, constant[:, :1].expand_as(resampled), atol=1e-6)


def test_a_perfect_student_has_no_loss() -> None:
    """With the teacher's weights and a projector that changes nothing."""
    student = VisionTransformer(12, 2, 2, 4, 16)
    method = method_of(student, 12)
    student.load_state_dict(method.teacher.backbone.state_dict())
    with torch.no_grad():
        for layer in (method.student.head.cls, method.student.head.patches):
            assert isinstance(layer, nn.Linear)
            layer.weight.copy_(torch.eye(12))
            layer.bias.zero_()
    losses = method(views_of())
    assert losses.total.item() == pytest.approx(0, abs=1e-5)
    assert losses.cosine_patches.item() == pytest.approx(1, abs=1e-5)


class Convolutions(nn.Module):
    """A network with batch norm, whose vector and map have two widths."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 4, 4), nn.BatchNorm2d(6), nn.ReLU())
        self.head = nn.Linear(6, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.stem(images)
        return self.head(features.mean(dim=(2, 3))), features


def state(method: Distillation) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in method.state_dict().items()}


@pytest.mark.parametrize("bad", [True, False])
def test_a_void_step_leaves_running_statistics_to_the_bit(bad: bool) -> None:
    network = FeatureNetwork(Convolutions(), "small", (16, 16))
    assert (network.dim, network.map_dim, network.grid, network.grid_of(8, 12)) == (10, 6, (4, 4), (2, 3))
    method = method_of(network, network.map_dim)
    groups = [{"params": list(method.student.parameters()), "decayed": True}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0, fused=True)
    views, before = views_of(), state(method)
    if bad:
        views.global_crops[0, 1, 2, 3, 4] = float("inf")
    losses = method(views, 0.04)
    losses.total.backward()
    ok = optim.optimizer_step(optimizer, 0.01, 0.1, 3.0, losses.total)
    method.update(0.9, ok)
    after = state(method)
    assert bool(ok) != bad
    same = {name for name in before if torch.equal(before[name], after[name])}
    teacher = {name for name in before if name.startswith("teacher.")}
    assert same == set(before) if bad else same == teacher


def test_what_is_forgotten_leaves_no_trace() -> None:
    """Two micro-batches count for the running statistics, unless the step is given up."""
    method = method_of(FeatureNetwork(Convolutions(), "small", (16, 16)), 6)
    before = state(method)
    for _ in range(2):
        method(views_of()).total.backward()
    method.forget()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(method).items())
    assert all(parameter.grad is None for parameter in method.parameters())
    for _ in range(2):
        method(views_of())
    method.update(0.9, torch.tensor(True))
    assert state(method)["student.backbone.network.stem.1.num_batches_tracked"] == 2 * 2  # sizes of crops


def test_a_temperature_that_is_no_number_voids_the_step() -> None:
    """A step is recorded so, without an effect; any number has none."""
    method, views = method_of(VisionTransformer(8, 2, 2, 4, 16), 8), views_of()
    losses = method(views).total
    assert method(views, 0.04).total == losses
    assert method(views, torch.tensor(float("nan"))).total.isnan()
