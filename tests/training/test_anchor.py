"""The anchor: an image's patches stay as alike as the weights had them that training began with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from adclr import cli
from adclr.config import parsing
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.model.losses import anchor_loss
from adclr.model.vit import VisionTransformer
from adclr.system.runs import Run
from adclr.training import continued_pretraining, job, micro_batch
from adclr.weights.backbone import Weights, load_weights, write_backbone
from test_continued_pretraining import FREE, STEPS, pretrain, weights  # noqa: F401  # a fixture
from tiny import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def similarities(patches: Tensor) -> Tensor:
    """The cosines of all pairs of patches of each image, in float64."""
    unit = patches.double() / patches.double().square().sum(-1, keepdim=True).sqrt()
    return torch.einsum("bnd,bmd->bnm", unit, unit)


def test_the_loss_is_its_formula() -> None:
    torch.manual_seed(0)
    patches, anchor = torch.randn(3, 7, 5, requires_grad=True), torch.randn(3, 7, 5)
    expected = (similarities(patches) - similarities(anchor)).square().mean()
    actual = anchor_loss(patches, anchor)
    torch.testing.assert_close(actual.double(), expected)
    actual.backward()
    assert patches.grad is not None
    assert patches.grad.abs().max() > 0
    # lengths, and a rotation of all features, change nothing
    turn = torch.linalg.qr(torch.randn(5, 5)).Q
    torch.testing.assert_close(anchor_loss(3 * anchor @ turn, anchor), torch.zeros(()), atol=1e-6, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(anchor_loss(patches, anchor), actual)


def method_of(weights: Path, **changes: Any) -> tuple[Any, Settings]:  # noqa: F811
    taken, _ = continued_pretraining.adopt_settings(str(weights), {})
    settings = parsing.build(Settings, FREE, taken, {"init": str(weights), "drop_path": 0.0, **changes})
    method = job.build(settings)
    continued_pretraining.load_init(method, settings)
    return method, settings


@pytest.mark.parametrize("masked_weight", [0.0, 1.0])
def test_it_adds_what_the_student_has_moved_and_nothing_at_the_start(weights: Path, masked_weight: float) -> None:  # noqa: F811
    method, settings = method_of(weights, anchor_weight=2.5, masked_weight=masked_weight)
    plain, _ = method_of(weights, masked_weight=masked_weight)
    views = micro_batch.random_views(settings, 3, torch.device("cpu"))
    crops = views.global_crops.flatten(0, 1)
    mask = None if views.masks is None else views.masks.grid.flatten(0, 1)
    for moved in (0.0, 0.3):
        with torch.no_grad():
            for one in (method, plain):
                torch.manual_seed(3)
                for parameter in one.student.backbone.parameters():
                    parameter.add_(moved * torch.randn_like(parameter))
            patches = method.student.backbone(crops, mask=mask).patches
            fixed = load_weights(weights).vit(crops).patches
        expected = 2.5 * (similarities(patches) - similarities(fixed)).square().mean()
        losses, others = method(views, 0.05), plain(views, 0.05)
        torch.testing.assert_close((losses.total - others.total).double(), expected, rtol=1e-4, atol=1e-6)
        assert [part.item() for part in losses[1:]] == pytest.approx([part.item() for part in others[1:]])
        if not masked_weight:
            assert (expected > 1e-3) == (moved > 0)


def test_it_goes_together_with_the_neighbor_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vit = VisionTransformer(24, 2, 3, 4, 16, class_attention=2, mlp="gated")
    write_backbone(tmp_path, vit.state_dict(), Weights(vit, (0.5,) * 3, (0.25,) * 3).describe())
    changes = {"num_queries": 0, "neighbor_weight": 0.1, "neighbor_prototypes": 20}
    (method, settings), (plain, _) = (
        method_of(tmp_path / "backbone.safetensors", anchor_weight=weight, **changes) for weight in (2.5, 0.0)
    )
    views = micro_batch.random_views(settings, 3, torch.device("cpu"))
    crops = views.global_crops.flatten(0, 1)
    with torch.no_grad():
        for one in (method, plain):
            torch.manual_seed(3)
            for parameter in one.student.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        patches, fixed = method.student.backbone(crops).patches, vit(crops).patches
    expected = 2.5 * (similarities(patches) - similarities(fixed)).square().mean()
    losses, others = method(views, 0.05), plain(views, 0.05)
    assert expected > 1e-3
    assert losses.neighbor > 0
    torch.testing.assert_close((losses.total - others.total).double(), expected, rtol=1e-4, atol=1e-6)
    assert [part.item() for part in losses[1:]] == pytest.approx([part.item() for part in others[1:]])


def test_the_anchor_keeps_similarities_in_training_and_over_a_resume(
    images: Path,
    weights: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    distance = {}
    for anchor_weight in (0.0, 50.0):
        out = tmp_path / str(anchor_weight)
        changes = {"anchor_weight": anchor_weight, "freeze_backbone_epochs": 0, "momentum": 0.5, "lr": 0.5}
        run = pretrain(images, out, weights, **changes, **STEPS)
        assert (run.path / continued_pretraining.ANCHOR).exists() == bool(anchor_weight)
        pixels = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            actual, first = (similarities(load_weights(one).vit(pixels).patches) for one in (run.path, weights))
        distance[anchor_weight] = (actual - first).square().mean().item()
    assert distance[50.0] < 0.7 * distance[0.0]
    state = load_file(run.path / "backbone.safetensors")
    assert all(torch.equal(t, load_file(weights)[n]) for n, t in load_file(run.path / "anchor.safetensors").items())
    # the weights it began with may be gone
    cut = Run(shutil.copytree(run.path, tmp_path / "cut", symlinks=True))
    *_, before, last = cut.steps()
    for name in ("backbone.safetensors", "results.json", "checkpoints/latest"):
        (cut.path / name).unlink()
    shutil.rmtree(cut.checkpoints / f"step_{last}")
    (cut.checkpoints / "latest").symlink_to(f"step_{before}")
    (cut.path / "anchor.safetensors").rename(tmp_path / "anchor")
    with pytest.raises(SystemExit):
        cli.main(["pretrain", "--resume", "--out", str(cut.path)])
    (tmp_path / "anchor").rename(cut.path / "anchor.safetensors")
    cli.main(["pretrain", "--resume", "--out", str(cut.path)])
    again = load_file(cut.path / "backbone.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in state.items())


def test_an_anchor_needs_weights() -> None:
    with pytest.raises(UserError, match=r"anchors to given weights; set model\.init too"):
        tiny(anchor_weight=1.0)
