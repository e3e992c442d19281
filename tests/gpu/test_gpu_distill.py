"""Distillation on a GPU: the recorded step, against float32, and a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import adclr as package
from adclr.config.distillation import DistillSettings
from adclr.config.parsing import build
from adclr.data.augment import render
from adclr.data.packed import pack
from adclr.data.view_plan import plan_batch
from adclr.model.named_tensors import Views
from adclr.training import distillation, schedules
from adclr.training.methods import copy_student
from adclr.training.step import Step
from adclr.weights.backbone import architecture, save_backbone
from on_gpu import CUDA, images_of, write_scenes
from tiny import TINY_STUDENT, tiny

pytestmark = pytest.mark.gpu
STUDENTS = ["vit", "timm:resnet10t", "timm:convnext_atto"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of another patch size and width than the student."""
    folder = tmp_path_factory.mktemp("teacher")
    settings = tiny(model__dim=256, model__num_heads=4, model__depth=3, model__patch_size=8, views__global_size=96)
    torch.manual_seed(1)
    save_backbone(folder, architecture(settings).build().state_dict(), settings)
    return folder


def settings_of(teacher: Path, student: str, **changes: Any) -> DistillSettings:
    if student != "vit":
        pytest.importorskip("timm")
    values = {
        "distill.teacher": str(teacher),
        "distill.student": student,
        "model.dim": 128,
        "model.depth": 2,
        "model.num_heads": 2,
        "model.patch_size": 16,
        "views.global_size": 96,
        "views.local_size": 64,
        "views.num_local": 2,
        "train.batch_size": 8,
        "optim.warmup_epochs": 0,
    }
    return build(DistillSettings, values, changes)


def views_of(settings: DistillSettings, count: int = 8) -> Views:
    packed = pack(images_of(count), pin=True)
    plan = plan_batch(settings, 0, np.arange(count, dtype=np.uint64), packed.sizes)
    return render(packed.to(CUDA), plan, settings.data.mean, settings.data.std)


def steps_of(settings: DistillSettings, count: int, recorded: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Take so many steps on the same views; return the student's state and the losses."""
    method = distillation.build(settings).to(CUDA)
    optimizer = schedules.make_optimizer(method.student, settings)
    step, views, losses = Step(settings, method, optimizer, CUDA, torch.bfloat16, record=recorded), None, []
    for number in range(count):
        views = views or views_of(settings)
        torch.manual_seed(number)
        result, ok = step([views], schedules.Schedules(settings, 10).at(number))
        assert ok
        losses.append(result)
    assert bool(step.graphs) == recorded
    return copy_student(method).state_dict(), torch.stack(losses)


@pytest.mark.parametrize("student", STUDENTS)
def test_a_recorded_step_is_the_step(teacher: Path, student: str) -> None:
    """Recording has no effect of its own, also not on the running statistics of batch norm."""
    settings = settings_of(teacher, student)
    (a, losses_a), (b, losses_b) = (steps_of(settings, 5, recorded) for recorded in (False, True))
    assert torch.allclose(losses_a, losses_b, rtol=2e-2, atol=2e-3)
    assert losses_b[-1, 0] < losses_b[0, 0]
    for name, tensor in a.items():
        if tensor.is_floating_point():
            assert torch.allclose(tensor, b[name], rtol=0.1, atol=2e-2), name
        else:
            assert torch.equal(tensor, b[name]), name  # the number of batches


@pytest.mark.parametrize("parallel", [False, True])
def test_a_recorded_vit_is_the_same_to_the_bit(teacher: Path, parallel: bool) -> None:
    """Also if the teacher runs beside the student."""
    plain, other = (settings_of(teacher, "vit", drop_path=0.2, parallel_teacher=value) for value in (False, parallel))
    (a, losses_a), (b, losses_b) = steps_of(plain, 5, recorded=False), steps_of(other, 5, recorded=True)
    assert torch.equal(losses_a, losses_b)
    assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@pytest.mark.parametrize("recorded", [False, True])
def test_a_step_never_waits_for_the_gpu(teacher: Path, recorded: bool) -> None:
    settings = settings_of(teacher, "vit")
    method = distillation.build(settings).to(CUDA)
    optimizer = schedules.make_optimizer(method.student, settings)
    take, views = Step(settings, method, optimizer, CUDA, torch.bfloat16, record=recorded), views_of(settings)
    values = schedules.Schedules(settings, 10).at(5)
    take([views], values)
    torch.cuda.set_sync_debug_mode("error")
    try:
        take([views], values)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bfloat16_gives_the_losses_of_float32(teacher: Path) -> None:
    settings = settings_of(teacher, "vit")
    method, views = distillation.build(settings).to(CUDA), views_of(settings)
    exact = torch.stack([*method(views)]).detach()
    method.forget()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        rounded = torch.stack([*method(views)]).detach()
    assert torch.allclose(exact, rounded, atol=0.02)


@pytest.mark.parametrize("student", ["vit", "timm:resnet10t"])
def test_a_run_on_a_gpu(teacher: Path, student: str, tmp_path: Path) -> None:
    data = write_scenes(tmp_path / "data")
    if student != "vit":
        pytest.importorskip("timm")
    sizes = {"views.global_size": 64, "views.local_size": 64, "model.dim": 128, "model.patch_size": 8}
    changes = TINY_STUDENT | sizes | {"distill.student": student, "train.device": "cuda", "probe.data": str(data)}
    run = package.distill(teacher, data / "train", tmp_path / "run", **changes)
    losses = [row["loss"] for row in run.rows("metrics.jsonl") if "loss" in row]
    assert losses[-1] < losses[0]
    assert package.evaluate("knn", weights=run.path, data=data)["knn_top1"] >= 0
