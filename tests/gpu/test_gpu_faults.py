"""Faults on a GPU: saves that nothing waits for, signals, numbers that are not finite, looks at the health."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import adclr as package
from adclr.config.parsing import build
from adclr.config.settings import Settings
from adclr.system.runs import Run
from adclr.training import checkpoint, job, launch, replay, schedules
from adclr.training.checkpoint_writer import Writer
from adclr.training.health_metrics import measure_health
from adclr.training.meter import Meter
from adclr.training.step import Step
from on_gpu import CUDA, default_views, write_scenes
from tiny import TINY

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

import lives

pytestmark = pytest.mark.gpu
VALUES = schedules.Values(1e-3, 0.04, 0.996, 0.05, False)


def made(**changes: Any) -> tuple[Settings, Any, torch.optim.AdamW]:
    settings = build(Settings, {"num_prototypes": 4096} | changes)
    method = job.build(settings).to(CUDA)
    return settings, method, schedules.make_optimizer(method.student, settings)


def copies(method: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    parts = checkpoint.parts(method, optimizer)
    return {f"{part} {name}": tensor.clone() for part, named in parts.items() for name, tensor in named.items()}


@pytest.mark.parametrize("record", [False, True])
def test_a_save_never_waits_and_is_of_its_moment(tmp_path: Path, record: bool) -> None:
    """Steps, the meter and saves with the debug mode in which waiting for the GPU is an error; the step after changes
    nothing of what is being written."""
    settings, method, optimizer = made()
    _, views = default_views(8, CUDA, num_prototypes=4096)
    step = Step(settings, method, optimizer, CUDA, torch.bfloat16, record=record)
    meter, run = Meter(CUDA, 10), Run(tmp_path / "run")
    with Writer(run, settings, print) as writer:

        def save(done: int) -> None:
            losses, ok = step([views], VALUES)
            meter.add(done, losses, ok)
            state = checkpoint.State(done, 10, "none", {}, 1, 8)
            writer.save(state, checkpoint.parts(method, optimizer), meter.total(), meter.decoder())

        save(1)  # pins the memory
        writer.wait()
        step([views], VALUES)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            save(2)
            torch.cuda.set_sync_debug_mode("default")
            before = copies(method, optimizer)
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(3):
                step([views], VALUES)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for part in ("student", "teacher", "optimizer", "centers"):
        for name, tensor in load_file(run.checkpoints / "step_2" / f"{part}.safetensors").items():
            assert torch.equal(tensor, before[f"{part} {name}"].cpu()), (part, name)
    assert any(not torch.equal(t, before[name]) for name, t in copies(method, optimizer).items())


def test_a_signal_is_answered_within_ten_seconds_by_a_vit_s(tmp_path: Path) -> None:
    images = write_scenes(tmp_path / "scenes")
    out = tmp_path / "run"
    words = ["epochs=100000", "train.batch_size=32", "log_every_steps=1", "warmup_epochs=1"]
    command = ["pretrain", str(images / "train"), "--out", str(out), "--recipe", "adclr_vits16", *words]
    process = subprocess.Popen(
        [sys.executable, "-m", "adclr", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    lives.until(lambda: len(list(Run(out).rows("metrics.jsonl"))) > 20, process, 300)
    process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    code, _, errors = lives.finish(process)
    seconds = time.monotonic() - started
    print(f"{seconds:.1f} s from SIGTERM to the end")
    assert code == 75, errors
    assert seconds < 10
    last = max(row["step"] for row in Run(out).rows("metrics.jsonl"))
    assert lives.newest(out) is not None
    assert last - 1 <= (lives.newest(out) or 0) <= last + 1


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("where", ["input", "gradient"])
def test_a_void_step_leaves_all_as_it_was(record: bool, where: str) -> None:
    settings, method, optimizer = made(drop_path=0.0)
    _, views = default_views(4, CUDA, num_prototypes=4096)
    if where == "gradient":  # a hook on a weight is recorded with the step, so it must say by a tensor when it acts
        poison = torch.zeros((), device=CUDA)
        weight = method.student.backbone.blocks[0].attn.qkv.weight
        weight.register_hook(lambda gradient: gradient + poison)
    step = Step(settings, method, optimizer, CUDA, torch.bfloat16, record=record)
    assert step([views], VALUES)[1]
    before = copies(method, optimizer)
    if where == "input":
        bad = views.map(torch.Tensor.clone)
        bad.global_crops[0, 0, 0, 0, 0] = float("nan")
    else:
        bad = views
        poison.fill_(float("nan"))
    _, ok = step([bad], VALUES)
    assert not ok
    for name, tensor in copies(method, optimizer).items():
        assert torch.equal(tensor, before[name]), name
    if where == "gradient":
        poison.zero_()
    assert step([views], VALUES)[1]


def test_looking_costs_little_and_agrees_with_a_cpu() -> None:
    settings, method, _ = made()
    _, views = default_views(64, CUDA, num_prototypes=4096)
    actual = measure_health(method, views, 0.04, torch.bfloat16)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(5):
        measure_health(method, views, 0.04, torch.bfloat16)
    milliseconds = (time.perf_counter() - started) / 5 * 1000
    print(f"a look takes {milliseconds:.1f} ms")
    assert milliseconds < 200
    there = measure_health(job.build(settings), views.map(torch.Tensor.cpu), 0.04, None)
    for name in ("target_entropy", "deviation_cls", "rank_cls", "rank_patches", "deviation_queries"):
        assert actual[name] == pytest.approx(there[name], rel=0.1), name


def test_a_step_is_replayed(tmp_path: Path) -> None:
    images = write_scenes(tmp_path / "scenes")
    changes = TINY | {"device": "cuda", "checkpoint_every_steps": 3, "num_prototypes": 64}
    run = package.pretrain(images / "train", out=tmp_path / "run", **changes)
    loss = [row["loss"] for row in run.rows("metrics.jsonl")][4]
    actual = replay.replay_step(launch.prepare(None, run.path, resume=True), 5)
    assert not actual["void"]
    assert actual["losses"]["loss"] == pytest.approx(loss, rel=1e-3)
