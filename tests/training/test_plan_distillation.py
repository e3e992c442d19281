"""The plan of a distillation against real students, torch's count of operations, and the files of a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import adclr as package
from adclr.config import parsing
from adclr.config.distillation import DistillSettings
from adclr.config.parsing import UserError
from adclr.model.distillation import Distillation
from adclr.training import distillation, micro_batch, plan_distillation, plan_gpus, planning
from adclr.weights.backbone import architecture, save_backbone
from tiny import TINY_STUDENT, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

H200 = plan_gpus.GPUS["h200"]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the student, of the teacher
    "plain": ({}, {}),
    "other grids": ({"views.global_size": 16, "views.local_size": 8}, {"patch_size": 8}),
    "on the teacher's grid": ({"distill.grid": "teacher"}, {"patch_size": 8}),
    "hidden projector, no local crops": ({"distill.projector_hidden_dim": 40, "views.num_local": 0}, {}),
    "DINOv3 and class attention": (
        {"model.class_attention": 1},
        {"position_embedding": "rotary", "num_registers": 4, "mlp": "gated", "layer_scale": 0.1},
    ),
    "recomputed": ({"train.checkpoint_activations": True}, {}),
}


def build(student: dict[str, Any], teacher: dict[str, Any]) -> tuple[DistillSettings, Distillation]:
    settings = parsing.build(DistillSettings, TINY_STUDENT | {"model.dim": 64, "model.num_heads": 4} | student)
    shape = tiny(**{f"model__{name}": value for name, value in ({"dim": 96, "num_heads": 4} | teacher).items()})
    return settings, distillation.assemble(settings, architecture(shape).build().eval())


@pytest.mark.parametrize("case", list(CASES))
def test_operations_and_parameters_are_those_of_the_method(case: str) -> None:
    settings, method = build(*CASES[case])
    cost = plan_distillation.describe_cost(settings, method)
    views = micro_batch.random_views(settings, 8, torch.device("cpu"))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        method(views).total.backward()
    assert counter.get_total_flops() / 8 == pytest.approx(cost.flops + cost.again, rel=0.01)
    assert (cost.again > 0) == settings.train.checkpoint_activations
    assert cost.parameters == {
        "backbone": sum(p.numel() for p in method.student.backbone.parameters()),
        "head": sum(p.numel() for p in method.student.head.parameters()),
        "teacher": sum(p.numel() for p in method.teacher.parameters()),
    }


def test_a_larger_teacher_takes_time_and_little_memory() -> None:
    plans = [plan_distillation.describe_cost(*build({}, {"depth": depth})) for depth in (2, 8)]
    assert plans[1].flops > 1.5 * plans[0].flops
    seconds = [
        planning.estimate_step_seconds(build({}, {})[0], H200, 256, 256, cost=cost) - planning.UPDATE_SECONDS
        for cost in plans
    ]
    assert seconds[1] > 1.5 * seconds[0]
    assert plans[0].gpu_memory is not None
    assert plans[1].gpu_memory is not None
    assert plans[0].gpu_memory[1] == plans[1].gpu_memory[1]  # a teacher stores nothing for backward


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    settings = tiny(model__dim=24, model__num_heads=3)
    torch.manual_seed(1)
    save_backbone(folder, architecture(settings).build().state_dict(), settings)
    return folder


def test_a_plan_is_of_the_distillation_that_follows(images: Path, teacher: Path, tmp_path: Path) -> None:
    file, student = tmp_path / "plan.json", TINY_STUDENT | {"model.dim": 64, "train.epochs": 1}
    plan = planning.plan_run(
        str(images / "train"), overrides=student, recipe="distill_tiny", teacher=str(teacher), file=file
    )
    assert json.loads(file.read_text())["settings"]["distill"]["teacher"] == str(teacher)
    run = package.distill(teacher, images / "train", tmp_path / "run", recipe="distill_tiny", **student)
    results = json.loads((run.path / "results.json").read_text())
    assert plan["steps"] == results["steps"]
    assert plan["memory"]["micro_batch_size"] == run.starts()[0]["micro_batch_size"]
    size = sum(path.stat().st_size for path in (run.checkpoints / "latest").iterdir())
    assert plan["disk"]["checkpoint_gb"] * 1e9 == pytest.approx(size, rel=0.05)
    backbone = (run.path / "backbone.safetensors").stat().st_size
    assert plan["disk"]["backbone_gb"] * 1e9 == pytest.approx(backbone, rel=0.05)


def test_a_plan_of_a_gpu_names_the_teacher(teacher: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planning.plan_run(None, 5000, overrides={"views.local_size": 96}, gpu=H200, teacher=str(teacher))
    assert plan["recipe"] == "distill_small"
    assert plan["measured"] is False
    out = " ".join(capsys.readouterr().out.split())
    assert f"the teacher is {teacher}: width 24" in out
    assert "projector of 0.0 M, teacher of 0.1 M" in out


def test_networks_are_measured_and_not_estimated(teacher: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("timm")
    changes = TINY_STUDENT | {"distill.student": "timm:test_resnet", "views.global_size": 64, "views.local_size": 32}
    plan = planning.plan_run(None, 32, overrides=changes, teacher=str(teacher))
    assert plan["time"]["gflop_per_image"] > 0
    assert "measured on" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"not of timm:test_resnet; leave out --gpu to measure here"):
        planning.plan_run(None, 32, overrides=changes, teacher=str(teacher), gpu=H200)


def test_the_recipes_of_the_other_command_are_named(teacher: Path) -> None:
    with pytest.raises(
        UserError, match=r"distill_tiny is a recipe of adclr distill, or adclr plan --teacher W; choose"
    ):
        planning.plan_run(None, 5000, recipe="distill_tiny", gpu=H200)
    with pytest.raises(UserError, match=r"dino_small is a recipe of adclr pretrain; choose one of: distill_small"):
        planning.plan_run(None, 5000, recipe="dino_small", gpu=H200, teacher=str(teacher))
