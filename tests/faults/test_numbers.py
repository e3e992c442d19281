"""Numbers that are not finite: the step leaves everything as it was, its images are listed, and it can be replayed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import adclr as package
import lives
from adclr.config.parsing import UserError
from adclr.config.settings import Train
from adclr.data import batches
from adclr.data.random_draws import key_of
from adclr.model.losses import Center
from adclr.model.method import ADCLR
from adclr.system.runs import Run
from adclr.training import checkpoint, job, launch, micro_batch, replay, schedules
from adclr.training.meter import LOSS_NAMES, Meter
from adclr.training.step import Step
from tiny import TINY, Adclr, tiny

VALUES = schedules.Values(0.01, 0.1, 0.9, 0.05, False)


def in_the_loss(method: ADCLR, patch: pytest.MonkeyPatch, bad: float) -> None:
    forward = method.forward

    def poisoned(*arguments: Any) -> Any:
        losses = forward(*arguments)
        return losses._replace(total=losses.total * bad)

    patch.setattr(method, "forward", poisoned)


def in_a_gradient(method: ADCLR, patch: pytest.MonkeyPatch, bad: float) -> None:
    hook = method.student.backbone.blocks[0].attn.qkv.weight.register_hook(
        lambda g: g.index_fill(0, torch.tensor(3), bad)
    )
    patch.setattr(method, "_undo", hook.remove, raising=False)


def in_an_activation(who: str) -> Callable[[ADCLR, pytest.MonkeyPatch, float], None]:
    def poison(method: ADCLR, patch: pytest.MonkeyPatch, bad: float) -> None:
        layer = getattr(method, who).head.mlp[0]
        hook = layer.register_forward_hook(lambda _, __, out: out.index_fill(-1, torch.tensor(5), bad))
        patch.setattr(method, "_undo", hook.remove, raising=False)

    return poison


def everything(method: ADCLR, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    actual = {
        f"{part} {name}": tensor.clone()
        for part, tensors in checkpoint.parts(method, optimizer).items()
        for name, tensor in tensors.items()
    }
    for kind, center in method.centers.items():
        assert isinstance(center, Center)
        actual[f"seen {kind}"] = center._sum.clone()
    return actual


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient", "student's activation", "teacher's activation", "input"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_void_step_leaves_all_as_it_was(
    monkeypatch: pytest.MonkeyPatch, where: str, bad: float, accumulate: int
) -> None:
    """To the bit: weights, teacher, centers, moments and step counts; and the step after is as if it had not been."""
    settings = tiny(masked_weight=1.0, drop_path=0.0)
    method = job.build(settings)
    optimizer = schedules.make_optimizer(method.student, settings)
    step = Step(settings, method, optimizer, torch.device("cpu"), None, accumulate)
    torch.manual_seed(0)
    views = [micro_batch.random_views(settings, 3, torch.device("cpu")) for _ in range(3 * accumulate)]
    first, second, third = (views[i * accumulate : (i + 1) * accumulate] for i in range(3))
    assert step(iter(first), VALUES)[1]
    before = everything(method, optimizer)
    if where == "input":
        second[-1].global_crops[1, 0, 0, 3, 3] = bad
    else:
        kinds = {
            "loss": in_the_loss,
            "gradient": in_a_gradient,
            "student's activation": in_an_activation("student"),
            "teacher's activation": in_an_activation("teacher"),
        }
        kinds[where](method, monkeypatch, bad)
    _, ok = step(iter(second), VALUES)
    assert not ok
    after = everything(method, optimizer)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    if hasattr(method, "_undo"):
        method._undo()
    monkeypatch.undo()
    other = job.build(settings)
    other_optimizer = schedules.make_optimizer(other.student, settings)
    never = Step(settings, other, other_optimizer, torch.device("cpu"), None, accumulate)
    for some in (first, third):
        never(iter(some), VALUES)
    assert step(iter(third), VALUES)[1]
    end = everything(method, optimizer)
    for name, tensor in everything(other, other_optimizer).items():
        assert torch.equal(tensor, end[name]), name


def test_the_meter_remembers_which_steps_were_void() -> None:
    meter = Meter(torch.device("cpu"), every=4)
    good, bad = torch.arange(1.0, 7.0), torch.tensor([math.nan, 1, 2, 3, 4, 5])
    for done, (losses, ok) in enumerate([(good, True), (bad, False), (good * 3, True), (good, False)], 11):
        meter.add(done, losses, torch.tensor(ok))
        if done == 12:
            total, decode = meter.total(), meter.decoder()
    remembered = json.loads(json.dumps(decode(total)))  # after more steps have been taken
    assert remembered["void"] == [[12, None, 1.0, 2.0, 3.0, 4.0, 5.0]]
    assert remembered["last_void"] == 1
    means, void, last = meter.read()
    assert means == {name: 2.0 * (i + 1) for i, name in enumerate(LOSS_NAMES)} | {"voided_steps": 2}
    assert [(v.step, v.losses[0]) for v in void] == [(12, None), (14, 1.0)]
    assert last == 1
    meter.add(15, bad, torch.tensor(False))
    assert meter.read().last_void == 2
    other = Meter(torch.device("cpu"), every=4)
    other.restore(remembered)
    for done, (losses, ok) in enumerate([(good * 3, True), (good, False)], 13):
        other.add(done, losses, torch.tensor(ok))
    assert other.read() == (means, void, last)
    other.restore(remembered)  # a run that was stopped among void steps goes on counting them
    other.add(13, bad, torch.tensor(False))
    assert other.read().last_void == 2


def marked(images: Path, folder: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A collection, and an image of it one of whose crops will be of numbers that have no square in float32."""
    data = folder / "data"
    shutil.copytree(images / "train", data)
    name = sorted(data.rglob("*.png"))[7].relative_to(data)
    plans: dict[int, Any] = {}
    real_plan, real_render = batches.plan_batch, batches.render

    def plan(settings: Any, epoch: int, keys: Any, sizes: Any) -> Any:
        made = real_plan(settings, epoch, keys, sizes)
        plans[id(made)] = made, keys
        return made

    def render(packed: Any, made: Any, mean: Any, std: Any) -> Any:
        views = real_render(packed, made, mean, std)
        _, keys = plans.pop(id(made))
        views.local_crops[0, torch.from_numpy(keys == key_of(str(name)))] *= 1e30
        return views

    patch.setattr(batches, "render", render)
    patch.setattr(batches, "plan_batch", plan)
    return data, name


def test_a_void_step_is_listed_and_replayed_to_the_image_and_the_operation(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, name = marked(images, tmp_path, monkeypatch)
    changes = TINY | {"checkpoint_every_steps": 3, "log_every_steps": 3, "keep_checkpoints": 9}
    run = package.pretrain(data, out=tmp_path / "run", **changes)
    rows = list(run.rows("voided.jsonl"))
    assert [row["epoch"] for row in rows] == [0, 1]  # once in each
    for row in rows:
        assert row["cause"] in ("a loss", "a gradient")
        assert len(row["keys"]) == 8
        assert f"{key_of(str(name)):016x}" in row["keys"]
        assert row["losses"].keys() == set(LOSS_NAMES)
    assert sum(row["voided_steps"] for row in run.rows("metrics.jsonl")) == 2

    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    step = rows[0]["step"]
    actual = replay.replay_step(launch.prepare(None, run.path, resume=True), step)
    assert actual["void"]
    assert [image["path"] for image in actual["images"]] == [str(name)]
    assert any(f"{room}.py" in actual["first_operation"] for room in ("vit", "blocks", "dispatch"))
    assert actual["input_finite"]
    assert actual["finite_in_float32"] is False
    assert actual["weights_not_finite"] == []
    assert json.loads((run.path / "replay" / f"step_{step}.json").read_text()) == actual
    assert {path: path.read_bytes() for path in before} == before
    good = next(number for number in range(1, 9) if number not in [row["step"] for row in rows])
    actual = replay.replay_step(launch.prepare(None, run.path, resume=True), good)
    assert not actual["void"]
    assert actual["images"] == []


def test_replaying_from_the_command_line(images: Path, tmp_path: Path, adclr: Adclr) -> None:
    run = package.pretrain(images / "train", out=tmp_path / "run", **(TINY | {"checkpoint_every_steps": 5}))
    loss = [row["loss"] for row in run.rows("metrics.jsonl")][6]
    done = adclr("pretrain", "--out", run.path, "--replay", 7)
    assert done.returncode == 0, done.stderr
    assert f"step 7 is finite here, its loss is {loss:.4f}" in done.stdout
    actual = json.loads((run.path / "replay" / "step_7.json").read_text())
    assert actual["from_checkpoint"] == 5
    assert actual["losses"]["loss"] == pytest.approx(loss, rel=1e-6)
    for arguments, message in (
        (("--out", run.path, "--replay", 9), "has only 8 steps"),
        (("--out", tmp_path / "none", "--replay", 1), "holds no run to resume"),
        (("--out", run.path, "--replay", 0), "is not a number from 1 on"),
    ):
        done = adclr("pretrain", *arguments)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_a_run_of_void_steps_ends_with_advice_and_a_good_checkpoint(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    changes = TINY | {"lr": 1e38, "warmup_epochs": 0, "clip_norm": None, "epochs": 100}
    changes |= {"checkpoint_every_steps": 1, "log_every_steps": 5}
    monkeypatch.setattr(Train, "max_void_steps", 7)
    with pytest.raises(UserError, match=rf"last \d+ steps had no effect.*adclr pretrain --out {out} --replay \d+, or"):
        package.pretrain(images / "train", out=out, **changes)
    steps = [row["step"] for row in Run(out).rows("voided.jsonl")]
    assert 7 <= len(steps) < 7 + 5
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert lives.newest(out) is not None
