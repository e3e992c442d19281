"""Training: exact resume after a real kill, the same with other threads or processes, and what a run leaves."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import adclr as package
from adclr.config import parsing
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.data import batches
from adclr.system.runs import Run
from adclr.training import checkpoint_writer, job, journal, launch
from tiny import TINY, adclr_command, words

PARTS = ("student", "teacher", "optimizer", "centers")


def state_of(run: Path, step: int) -> dict[str, dict[str, torch.Tensor]]:
    folder = run / "checkpoints" / f"step_{step}"
    return {part: load_file(folder / f"{part}.safetensors") for part in PARTS}


def assert_same_state(a: Path, b: Path, step: int) -> None:
    left, right = state_of(a, step), state_of(b, step)
    for part in PARTS:
        assert left[part].keys() == right[part].keys()
        for name, tensor in left[part].items():
            assert torch.equal(tensor, right[part][name]), (part, name)
    assert (a / "metrics.jsonl").read_text() == (b / "metrics.jsonl").read_text()


def pretrain(data: Path, out: Path, **changes: Any) -> Run:
    return package.pretrain(data, out=out, **(TINY | {name.replace("__", "."): v for name, v in changes.items()}))


FULL: dict[str, Any] = {"masked_weight": 1.0, "log_every_steps": 2, "micro_batch_size": 4}  # all terms, accumulation
# queries of all kinds: anchored and random, ordinary and read-only, with targets that get softer
PLUS: dict[str, Any] = {"query_source": "local", "num_queries": 3, "read_only_copies": True}
PLUS |= {"query_read_only_blocks": 1, "query_temperature": 0.12, "query_temperature_start": 0.06}


@pytest.mark.parametrize(
    ("workers", "first", "queries"), [(0, 3, {}), (3, 5, PLUS)]
)  # 4 steps are an epoch: in the first, in the second
def test_eight_steps_are_three_and_a_kill_and_five(
    images: Path, tmp_path: Path, workers: int, first: int, queries: dict[str, Any]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pretrain(images / "train", whole, num_workers=1, **FULL | queries)  # 2 epochs of 4 steps
    assert Run(whole).steps() == [8]
    changes = TINY | FULL | queries | {"checkpoint_every_steps": first, "num_workers": workers}
    command = ["pretrain", images / "train", "--out", parts, *words(changes)]
    # the process stops itself dead, in the middle of an epoch and of a line of metrics, two steps later
    killer = (
        "import os, signal, sys, time, adclr.training.journal as j; from adclr.cli import main; step = j.Journal.step\n"
        "def dead(self, done, *rest):\n"
        "    step(self, done, *rest)\n"
        f"    while done == {first + 2}:\n"
        "        if self.run.steps(): os.kill(os.getpid(), signal.SIGKILL)\n"  # what was saved is on the disk
        "        time.sleep(0.01)\n"
        "j.Journal.step = dead; main(sys.argv[1:])"
    )
    killed = adclr_command(*command, program=killer)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert Run(parts).steps() == [first]
    assert [row["step"] for row in Run(parts).rows("metrics.jsonl")] == list(range(2, first + 2, 2))
    done = adclr_command(*command)
    assert done.returncode == 0, done.stderr
    assert_same_state(whole, parts, 8)
    a, b = load_file(whole / "backbone.safetensors"), load_file(parts / "backbone.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in a)
    starts = json.loads((parts / "provenance.json").read_text())
    assert [start["from_step"] for start in starts] == [0, first]


def test_a_run_leaves_what_explains_it(images: Path, tmp_path: Path) -> None:
    run = pretrain(images / "train", tmp_path / "run", probe__data=str(images), every_epochs=1, k=5)
    assert run.finished
    settings = run.settings()
    assert settings is not None
    assert settings.train.epochs == 2
    metrics = list(run.rows("metrics.jsonl"))
    assert [row["step"] for row in metrics if "loss" in row] == list(range(1, 9))
    assert [row["step"] for row in metrics if "knn_top1" in row] == [0, 4, 8]
    first = next(row for row in metrics if "loss" in row)
    assert first["loss"] == pytest.approx(first["loss_global"] + settings.method.query_weight * first["loss_query"])
    assert first["lr"] == 0
    results = json.loads((run.path / "results.json").read_text())
    assert results["steps"] == 8
    assert len(results["probes"]) == 3
    assert results["seconds_to_first_step"] > results["seconds_starting"] > 0
    start = json.loads((run.path / "provenance.json").read_text())[0]
    for fact in ("command", "commit", "packages", "python", "device", "images", "collection", "micro_batch_size"):
        assert fact in start
    assert start["images"] == 32
    timing = list(run.rows("timing.jsonl"))
    assert all(row["images_per_second"] > 0 for row in timing[:-1])
    assert timing[0]["seconds_to_first_step"] == results["seconds_to_first_step"]  # without the probe before it
    assert timing[0]["seconds_to_first_step"] <= timing[0]["seconds_starting"] + timing[0]["seconds"]
    parts = timing[0]["parts_of_starting"]
    assert list(parts) == ["program", "list of images", "torch", "network", "images", "compiling"]
    assert sum(parts.values()) == pytest.approx(timing[0]["seconds_starting"], abs=0.5)
    assert not any("parts_of_starting" in row for row in timing[1:])
    for part in ("looking", "probing", "saving"):
        spent = sum(row.get(f"seconds_{part}", 0.0) for row in timing)
        assert 0 < spent < 60, part
    rest = timing[-1]  # after the last line of metrics.jsonl: no steps, but a checkpoint
    assert "images_per_second" not in rest
    assert 0 < rest["seconds_saving"] <= rest["seconds"]
    vit = package.load(run.path)
    assert not vit.training
    assert vit(torch.randn(1, 3, 16, 16)).cls.shape == (1, 16)
    teacher = load_file(run.path / "checkpoints" / "latest" / "teacher.safetensors")
    assert torch.equal(vit.cls_token, teacher["backbone.cls_token"])  # the weights are the teacher's


def test_a_run_in_python_is_given_wherever_weights_are(images: Path, tmp_path: Path) -> None:
    run = pretrain(images / "train", tmp_path / "run")
    assert os.fspath(run) == str(run) == str(tmp_path / "run")
    by_path, by_run = package.load(tmp_path / "run"), package.load(run)
    assert all(torch.equal(by_run.state_dict()[name], tensor) for name, tensor in by_path.state_dict().items())
    assert package.evaluate("knn", weights=run, data=images)["num_val"] == 16
    package.embed(run, images / "val", out=tmp_path / "features.npy")
    package.export(run, to="safetensors", out=tmp_path / "exported")
    assert (tmp_path / "exported" / "backbone.safetensors").exists()
    further = pretrain(images / "train", tmp_path / "further", init=run)
    assert further.settings().model.init == str(run)


def test_a_finished_run_is_left_alone(images: Path, tmp_path: Path) -> None:
    run = pretrain(images / "train", tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    pretrain(images / "train", tmp_path / "run")
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_an_unfinished_run_gives_its_latest_teacher(images: Path, tmp_path: Path) -> None:
    run = pretrain(images / "train", tmp_path / "run", masked_weight=1.0)
    for name in ("backbone.safetensors", "backbone.json", "results.json"):
        (run.path / name).unlink()
    vit = package.load(run.path)
    teacher = load_file(run.path / "checkpoints" / "latest" / "teacher.safetensors")
    assert torch.equal(vit.norm.weight, teacher["backbone.norm.weight"])
    assert "mask_token" not in vit.state_dict()


def test_only_the_newest_checkpoints_are_kept_and_latest_is_the_newest(images: Path, tmp_path: Path) -> None:
    run = pretrain(images / "train", tmp_path / "run", checkpoint_every_steps=2, keep_checkpoints=3)
    assert run.steps() == [4, 6, 8]
    assert os.readlink(run.checkpoints / "latest") == "step_8"
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step_4", "step_6", "step_8"]
    assert sorted(path.name for path in (run.checkpoints / "step_8").iterdir()) == sorted(
        [f"{part}.safetensors" for part in PARTS] + ["manifest.json", "state.json"]
    )


def test_a_checkpoint_is_written_every_so_many_minutes(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a step takes; here each takes ten minutes."""
    clock = itertools.count(step=600.0)
    monkeypatch.setattr(checkpoint_writer, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    run = pretrain(images / "train", tmp_path / "run", keep_checkpoints=9)
    assert run.steps() == [2, 4, 6, 8]  # and not only at the end


def test_minutes_between_checkpoints_can_be_set_and_changed(images: Path, tmp_path: Path) -> None:
    run = pretrain(images / "train", tmp_path / "often", checkpoint_every_minutes=1e-9, keep_checkpoints=9)
    assert run.steps() == list(range(1, 9))
    run = pretrain(images / "train", tmp_path / "never", checkpoint_every_minutes=None, keep_checkpoints=9)
    assert run.steps() == [8]
    (run.path / "results.json").unlink()
    pretrain(images / "train", run.path, checkpoint_every_minutes=3)
    stored = run.settings()
    assert stored is not None
    assert stored.train.checkpoint_every_minutes == 3


def test_a_run_of_days_is_warned_of_once(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrain(images / "train", tmp_path / "short")
    assert "warning" not in capsys.readouterr().err
    clock = itertools.count(step=8 * 3600.0)
    monkeypatch.setattr(journal, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    pretrain(images / "train", tmp_path / "long", log_every_steps=4)
    (warning,) = (line for line in capsys.readouterr().err.splitlines() if "warning" in line)
    assert re.fullmatch(r"warning: it takes about \d+\.\d (days|hours); fewer train\.epochs, .*adclr_cpu.*", warning)


def unfinished(images: Path, out: Path, **changes: Any) -> Run:
    run = pretrain(images / "train", out, checkpoint_every_steps=3, **changes)
    (run.path / "results.json").unlink()
    shutil.rmtree(run.checkpoints / "step_8")
    (run.checkpoints / "latest").unlink()
    os.symlink("step_6", run.checkpoints / "latest")
    return run


def test_a_run_is_resumed_with_what_says_how_it_computes_changed(images: Path, tmp_path: Path) -> None:
    """`train.cuda_graph=off` is what the program advises where a step cannot be recorded."""
    run = unfinished(images, tmp_path / "run")
    whole = state_of(pretrain(images / "train", tmp_path / "whole").path, 8)
    how = {"train__compile": "off", "train__cuda_graph": "off", "train__checkpoint_activations": True}
    pretrain(images / "train", run.path, **how)
    assert run.finished
    for part, tensors in state_of(run.path, 8).items():
        assert all(torch.equal(tensor, whole[part][name]) for name, tensor in tensors.items())
    settings = run.settings()
    assert settings is not None
    train = settings.train
    assert (train.compile, train.cuda_graph, train.checkpoint_activations) == ("off", "off", True)
    assert run.starts()[-1]["from_step"] == 6


def test_a_damaged_checkpoint_is_refused_by_name(images: Path, tmp_path: Path) -> None:
    run = unfinished(images, tmp_path / "run")
    file = run.checkpoints / "step_6" / "teacher.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"step_6 is damaged at teacher\.safetensors"):
        pretrain(images / "train", run.path)
    shutil.rmtree(run.checkpoints / "step_6")  # as it advises
    pretrain(images / "train", run.path)
    assert run.finished


def test_a_checkpoint_of_another_architecture_is_refused(images: Path, tmp_path: Path) -> None:
    run = unfinished(images, tmp_path / "run")
    other = pretrain(images / "train", tmp_path / "other", dim=24)
    shutil.rmtree(run.checkpoints / "step_6")
    shutil.copytree(other.checkpoints / "step_8", run.checkpoints / "step_6")
    with pytest.raises(UserError, match=r"another architecture: it has backbone\.cls_token of shape"):
        pretrain(images / "train", run.path)


def test_a_changed_collection_is_refused_unless_allowed(images: Path, tmp_path: Path) -> None:
    shutil.copytree(images / "train", tmp_path / "train")
    run = unfinished(tmp_path, tmp_path / "run")
    some = next((tmp_path / "train").rglob("*.png"))
    shutil.copy(some, some.with_name("one_more.png"))
    with pytest.raises(UserError, match=r"data\.allow_changed=true"):
        pretrain(tmp_path / "train", run.path)
    pretrain(tmp_path / "train", run.path, allow_changed=True)
    assert run.finished


def test_unreadable_images_are_skipped_counted_and_listed(images: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(images / "train", data)
    broken = sorted(data.rglob("*.png"))[:2]
    for path in broken:
        path.write_bytes(path.read_bytes()[:50])
    run = pretrain(data, tmp_path / "run", num_workers=3)
    listed = list(run.rows("quarantine.jsonl"))
    assert sorted(row["path"] for row in listed) == [str(path.relative_to(data)) for path in broken]
    assert all(row["reason"] for row in listed)
    assert json.loads((run.path / "results.json").read_text())["unreadable_images"] == 2


@pytest.mark.parametrize("target", ["center", "sinkhorn"])
def test_two_processes_train_as_one(images: Path, tmp_path: Path, target: str) -> None:
    """torchrun with 2 gloo processes: the same data, centers and gradients, so the same losses."""
    changes = TINY | {"masked_weight": 1.0, "model.drop_path": 0.0, "method.target": target}
    changes |= PLUS if target == "sinkhorn" else {}
    single = package.pretrain(images / "train", out=tmp_path / "one", **changes)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "adclr", "pretrain"]
    both = subprocess.run(
        [sys.executable, *command, str(images / "train"), "--out", str(tmp_path / "two"), *words(changes)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert both.returncode == 0, both.stderr
    one, two = (list(Run(path).rows("metrics.jsonl")) for path in (single.path, tmp_path / "two"))
    assert len(one) == len(two) == 8
    for a, b in zip(one, two, strict=True):
        for name in ("loss", "loss_global", "loss_query", "loss_masked", "teacher_entropy"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), (a["step"], name)
    a, b = state_of(single.path, 8), state_of(tmp_path / "two", 8)
    for part in ("student", "teacher", "centers"):
        for name, tensor in a[part].items():
            torch.testing.assert_close(tensor, b[part][name], rtol=1e-3, atol=1e-4)


def test_accumulation_changes_nothing_but_rounding(images: Path, tmp_path: Path) -> None:
    runs = [
        pretrain(images / "train", tmp_path / str(m), micro_batch_size=m, masked_weight=1.0, model__drop_path=0.0)
        for m in (8, 2)
    ]
    for a, b in zip(*(run.rows("metrics.jsonl") for run in runs), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_a_poisoned_batch_is_void_and_training_goes_on(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = batches.render

    def poisoned(packed: Any, plan: Any, mean: Any, std: Any) -> Any:
        views = clean(packed, plan, mean, std)
        poisoned.count += 1  # type: ignore[attr-defined]
        if poisoned.count == 4:  # type: ignore[attr-defined]
            views.global_crops[0, 0, 0, 0, 0] = float("nan")
        return views

    poisoned.count = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(batches, "render", poisoned)
    run = pretrain(images / "train", tmp_path / "run", checkpoint_every_steps=1, keep_checkpoints=9)
    rows = list(run.rows("metrics.jsonl"))
    assert [row["voided_steps"] for row in rows] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert rows[3]["loss"] is None
    before, after = state_of(run.path, 3), state_of(run.path, 4)
    for part in PARTS:
        assert all(torch.equal(before[part][name], after[part][name]) for name in before[part])
    assert all(row["loss"] > 0 for row in rows[4:])


@pytest.mark.parametrize("logger", ["tensorboard", "wandb", "mlflow"])
def test_loggers_offline(images: Path, tmp_path: Path, logger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = pretrain(images / "train", tmp_path / "run", loggers=[logger])
    losses = [row["loss"] for row in run.rows("metrics.jsonl")]
    if logger == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run.path / "tensorboard"))
        events.Reload()
        found = [event.value for event in events.Scalars("loss")]
    elif logger == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{run.path / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("adclr")
        assert experiment is not None
        (entry,) = client.search_runs([experiment.experiment_id])
        assert entry.data.params["train.epochs"] == "2"
        found = [metric.value for metric in client.get_metric_history(entry.info.run_id, "loss")]
    else:
        (file,) = (run.path / "wandb").glob("offline-run-*/run-*.wandb")
        assert file.stat().st_size > 1000
        assert b"loss_query" in file.read_bytes()
        return
    assert found == pytest.approx(losses, rel=1e-5)


def test_a_missing_logger_names_its_extra(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'adclr\[wandb\]'"):
        launch.prepare(images, tmp_path / "run", "demo", {"loggers": ["wandb"], "train.batch_size": 8})
    assert not (tmp_path / "run").exists()


def test_weights_that_do_not_fit_are_refused(images: Path, tmp_path: Path) -> None:
    run = pretrain(images / "train", tmp_path / "run")
    file = run.path / "backbone.safetensors"
    tensors = load_file(file)

    def refused(match: str) -> None:
        with pytest.raises(UserError, match=match):
            package.load(file)

    save_file({k: v for k, v in tensors.items() if k != "norm.bias"}, file)
    refused(r"lacks norm\.bias")
    save_file(tensors | {"extra": torch.zeros(1)}, file)
    refused("has extra, which")
    save_file(tensors | {"norm.bias": torch.zeros(3)}, file)
    refused(r"norm\.bias of shape \(3,\) instead of \(16,\)")
    file.write_bytes(file.read_bytes()[:-7])
    refused("not a whole safetensors file")
    (run.path / "backbone.json").unlink()
    refused("is missing")
    with pytest.raises(UserError, match="do not exist"):
        package.load(tmp_path / "nothing")
    with pytest.raises(UserError, match="neither"):
        package.load(tmp_path)


def test_a_student_learns_what_a_teacher_that_stands_still_says(images: Path, tmp_path: Path) -> None:
    still = {"momentum": 1.0, "momentum_end": 1.0, "center_momentum": 1.0, "teacher_temperature_start": 0.07}
    run = pretrain(images / "train", tmp_path / "run", epochs=30, warmup_epochs=1, masked_weight=1.0, **still)
    rows = list(run.rows("metrics.jsonl"))
    for name in ("loss_global", "loss_query", "loss_masked"):
        first, last = (sum(row[name] for row in part) / 8 for part in (rows[:8], rows[-8:]))
        assert last < 0.9 * first, name


def test_settings_build_the_method_they_describe() -> None:
    def names(**changes: Any) -> set[str]:
        settings = parsing.build(Settings, TINY, changes)
        return set(job.build(settings).student.state_dict())

    assert "backbone.reg_token" in names(num_registers=2)
    assert "backbone.blocks.0.ls1.gamma" in names(layer_scale=0.1)
    a = job.build(parsing.build(Settings, TINY))
    b = job.build(parsing.build(Settings, TINY))
    c = job.build(parsing.build(Settings, TINY, {"seed": 1}))
    assert torch.equal(a.student.backbone.pos_embed, b.student.backbone.pos_embed)
    assert not torch.equal(a.student.backbone.pos_embed, c.student.backbone.pos_embed)


@pytest.mark.parametrize("channels", [1, 5])
def test_images_of_other_channels_train_and_score(tmp_path: Path, channels: int) -> None:
    import numpy as np
    import tifffile

    rng = np.random.default_rng(0)
    for number in range(40):
        kind = number % 2
        bands = rng.integers(0, 2000, (channels, 24, 30), np.uint16) + 2000 * kind
        file = tmp_path / "data" / f"kind{kind}" / f"{number}.tif"
        file.parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(file, bands if channels > 1 else bands[0], photometric="minisblack")
    changes = {"model.num_channels": channels, "max_value": 4095, "mean": [0.5] * channels, "std": [0.25] * channels}
    run = pretrain(tmp_path / "data", tmp_path / "run", recipe="adclr_small", labels=True, k=5, **changes)
    vit = package.load(run.path)
    assert vit.patch_embed.proj.weight.shape[1] == channels
    assert json.loads((run.path / "results.json").read_text())["unreadable_images"] == 0
    assert package.evaluate("knn", weights=run.path, data=tmp_path / "data", k=5)["knn_top1_k5"] > 80
    with pytest.raises(UserError, match=r"set data\.mean to the images' own"):
        pretrain(tmp_path / "data", tmp_path / "other", num_channels=channels)
