"""Damaged runs, places that cannot be written, numbers that go wrong: one sentence, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import adclr as package
from adclr.config import parsing
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.evals import knn
from adclr.system import machine
from adclr.system.files import check_writable
from adclr.system.runs import Run
from adclr.training import launch
from adclr.weights import snapshot
from tiny import TINY, Adclr, tiny, words


def pretrain(data: Path, out: Path, **changes: Any) -> Run:
    return package.pretrain(data, out=out, **(TINY | {name.replace("__", "."): v for name, v in changes.items()}))


@pytest.fixture(scope="module")
def made(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after step 6 of 8, for tests to copy and damage."""
    run = pretrain(images / "train", tmp_path_factory.mktemp("made") / "run", checkpoint_every_steps=3)
    for name in ("results.json", "backbone.safetensors", "backbone.json"):
        (run.path / name).unlink()
    shutil.rmtree(run.checkpoints / "step_8")
    return run.path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run", symlinks=True))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("provenance.json", b"{}", "is not a list of starts"),
        ("provenance.json", b"[", "it is not JSON"),
        ("settings.yaml", b"train:\n  epochs: x\n", "settings.yaml is damaged"),
        ("settings.yaml", b"- 1\n", "is not a file of settings"),
        ("checkpoints/step_6/manifest.json", b"[]", "is damaged at student.safetensors"),
        ("checkpoints/step_6/state.json", b"[]", "is damaged at state.json"),
    ],
)
def test_damaged_files_are_named(images: Path, run: Path, file: str, content: bytes, message: str) -> None:
    (run / file).write_bytes(content)
    with pytest.raises(UserError, match=message):
        pretrain(images / "train", run)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.jsonl", b'\xff\xfe{\n{"step": "a", "loss": 1}\n{"step": null}\n[1]\n'),
        ("timing.jsonl", b'{"step": 2}\n'),
        ("quarantine.jsonl", b'{"path": "c0/tr'),
        ("checkpoints/step_²/manifest.json", b""),
    ],
    ids=["metrics", "timing", "quarantine", "odd checkpoint"],
)
def test_damage_that_can_be_mended_is(images: Path, run: Path, file: str, content: bytes) -> None:
    (run / file).parent.mkdir(exist_ok=True)
    with open(run / file, "ab") as opened:
        opened.write(content)
    done = pretrain(images / "train", run)
    assert done.finished
    assert all("step" in row for row in done.rows("metrics.jsonl"))


def test_a_copy_without_links_goes_on_and_loads(images: Path, run: Path) -> None:
    whole = package.load(run)
    (run / "checkpoints" / "latest").unlink()
    assert torch.equal(package.load(run).norm.weight, whole.norm.weight)
    shutil.copytree(run / "checkpoints" / "step_6", run / "checkpoints" / "latest")
    done = pretrain(images / "train", run)
    assert os.readlink(done.checkpoints / "latest") == "step_8"


def test_a_full_disk_loses_nothing(images: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = snapshot._write

    def full(path: Path, tensors: Any) -> None:
        write(path, tensors)
        if path.name == "optimizer.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(snapshot, "_write", full)
    with pytest.raises(UserError, match=r"step 8 cannot be written to .*No space left"):
        pretrain(images / "train", run)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step_6"]
    monkeypatch.undo()
    assert pretrain(images / "train", run).finished


def test_two_at_once_in_one_place_are_refused(images: Path, tmp_path: Path, adclr: Adclr) -> None:
    out = tmp_path / "run"
    command = ["pretrain", images / "train", "--out", out, *words(TINY | {"epochs": 5000})]
    first = subprocess.Popen([sys.executable, "-m", "adclr", *map(str, command)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (out / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        second = adclr(*command)
        assert second.returncode == 2
        assert "another process is training in" in second.stderr
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
    steps = [row["step"] for row in Run(out).rows("metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))


def test_a_start_that_did_nothing_does_not_stand_in_the_way(images: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        pretrain(images / "train", tmp_path / "run", max_pixels=1)
    with pytest.raises(UserError, match="holds no run to resume"):
        launch.prepare(images / "train", tmp_path / "run", resume=True)
    assert pretrain(images / "train", tmp_path / "run").finished


def test_a_run_whose_steps_are_all_void_stops(images: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="steps had no effect"):
        pretrain(images / "train", tmp_path / "run", lr=1e38, warmup_epochs=0, clip_norm=None, epochs=100)
    assert not (tmp_path / "run" / "backbone.safetensors").exists()
    assert len(list(Run(tmp_path / "run").rows("metrics.jsonl"))) < 100


def test_other_images_are_not_taken_for_those_of_a_run(images: Path, run: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    for path in sorted((images / "train").rglob("*.png"))[:20]:
        shutil.copy(path, few / path.name) if few.exists() else few.mkdir()
    with pytest.raises(UserError, match="steps an epoch where"):
        pretrain(few, run, allow_changed=True)
    done = pretrain(images / "train", run, allow_changed=True)
    settings = done.settings()
    assert settings is not None
    assert settings.data.allow_changed is False  # said once, for one start
    with pytest.raises(UserError, match=r"is finished and .* is not what it learned from"):
        pretrain(few, run)


def test_the_micro_batch_of_a_run_stays(images: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less free memory at the second start must not change what drop path draws."""
    monkeypatch.setattr("adclr.training.job.choose_micro_batch", lambda *_, **__: 2)
    done = pretrain(images / "train", run)
    assert [start["micro_batch_size"] for start in json.loads((done.path / "provenance.json").read_text())] == [8, 8]


def test_host_memory_is_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable:   60 kB\n")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.host_memory() == 60 * 1024
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.host_memory() == 60 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    assert machine.host_memory() == 4000


def test_cores_are_those_that_a_container_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert machine.cpu_count() == 8  # there is no such limit
    for limit, cores in (("max 100000", 8), ("250000 100000", 3), ("5000 100000", 1), ("3200000 100000", 8)):
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
        assert machine.cpu_count() == cores


def test_probes_do_not_take_steps_out_of_the_timing(images: Path, tmp_path: Path) -> None:
    run = pretrain(images / "train", tmp_path / "run", probe__data=str(images), every_epochs=1, log_every_steps=3)
    *rows, rest = run.rows("timing.jsonl")
    assert [row["step"] for row in rows] == [3, 6, 8]
    assert rest["step"] == 8  # what came after the last step
    for row, steps in zip(rows, (3, 3, 2), strict=True):
        assert row["images_per_second"] * row["seconds"] == pytest.approx(8 * steps)


def test_two_processes_list_a_broken_image_once(images: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(images / "train", data)
    broken = sorted(data.rglob("*.png"))[5]
    broken.write_bytes(b"")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "adclr", "pretrain"]
    both = subprocess.run(
        [sys.executable, *command, str(data), "--out", str(tmp_path / "run"), *words(TINY | {"epochs": 6})],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert both.returncode == 0, both.stderr
    (row,) = Run(tmp_path / "run").rows("quarantine.jsonl")
    assert row["path"] == str(broken.relative_to(data))
    assert "1 images could not be read" in both.stdout


def test_places_that_cannot_be_written_are_refused_first(images: Path, tmp_path: Path, adclr: Adclr) -> None:
    (tmp_path / "file").write_text("")
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    for place in (tmp_path / "file" / "run", Path("/dev/null/run"), tmp_path / "loop" / "run", tmp_path / ("x" * 300)):
        started = time.monotonic()
        done = adclr("pretrain", images / "train", "--out", place, "--recipe", "demo", "batch_size=8", fresh=True)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert time.monotonic() - started < 3
    evaluated = adclr("evaluate", "knn", "--weights", tmp_path, "--data", images, "--out", tmp_path)
    assert (evaluated.returncode, evaluated.stderr.count("\n")) == (2, 1)
    assert "is a folder" in evaluated.stderr
    with pytest.raises(UserError, match="is a file"):
        check_writable(tmp_path / "file" / "run" / "x")


def test_links_that_lead_nowhere_are_passed_over(images: Path, tmp_path: Path) -> None:
    shutil.copytree(images / "train", tmp_path / "data")
    os.symlink("loop", tmp_path / "data" / "loop")
    os.symlink("loop.png", tmp_path / "data" / "loop.png")
    os.symlink("/nowhere/at/all.png", tmp_path / "data" / "none.png")
    assert len(launch.prepare(tmp_path / "data", tmp_path / "run", "demo", {"batch_size": 8}).source) == 32


def test_help_through_a_pipe_that_closes() -> None:
    command = f"{sys.executable} -m adclr pretrain --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 141
    assert done.stderr == ""


@pytest.mark.parametrize("world", ["abc", "0", "2"])
def test_an_environment_that_only_looks_like_torchrun(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match="torchrun is not at work"):
        launch.prepare(images / "train", tmp_path / "run", "demo", {"batch_size": 8})


def test_yaml_is_data(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    for text, message in (
        ("train:\n  epochs: 1\ntrain:\n  batch_size: 8\n", "'train' is there twice"),
        ("train: &a\n  epochs: 1\nviews: *a\n", "aliases are not taken"),
        ("a: &a [1]\nb: &b [*a,*a]\n", "aliases are not taken"),
        ("train: !!python/object/apply:os.system [ls]\n", "not readable as YAML"),
        ("train: null\n", "'train' is a group of settings"),
    ):
        recipe.write_text(text)
        with pytest.raises(UserError, match=message):
            parsing.build(Settings, parsing.load_recipe(str(recipe)))


def test_names_are_not_given_twice_or_in_the_wrong_place(images: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="named twice"):
        launch.prepare(images, tmp_path / "run", "demo", {"data.path": "elsewhere"})
    with pytest.raises(UserError, match="write --recipe foo"):
        launch.prepare(images, tmp_path / "run", None, {"recipe": "foo"})


def test_weights_that_hold_no_numbers_are_refused(images: Path, tmp_path: Path) -> None:
    run = pretrain(images / "train", tmp_path / "run")
    file = run.path / "backbone.safetensors"
    tensors = load_file(file)
    for bad in (tensors["norm.bias"] * float("nan"), torch.zeros(16, dtype=torch.int32)):
        save_file(tensors | {"norm.bias": bad}, file)
        with pytest.raises(UserError, match=r"not finite in norm\.bias"):
            package.load(file)
    save_file(tensors, file)
    description = json.loads((run.path / "backbone.json").read_text())
    for name, value in (("num_heads", 5), ("input_size", [33, 33]), ("depth", 10**9)):
        other = description | {"architecture": description["architecture"] | {name: value}}
        (run.path / "backbone.json").write_text(json.dumps(other))
        with pytest.raises(UserError):
            package.load(file)


def test_votes_do_not_overflow() -> None:
    train = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.9, 0.4]]), dim=1)
    labels, val = torch.tensor([1, 1, 0]), torch.tensor([[1.0, 0.0]])
    for temperature in (0.07, 0.01, 1e-6):
        (ranking,) = knn.vote(train, labels, val, 2, (3,), temperature)
        assert ranking[0, 0] == 1


def test_unreadable_images_are_counted_in_scores(images: Path, tmp_path: Path, adclr: Adclr) -> None:
    run = pretrain(images / "train", tmp_path / "run")
    data = tmp_path / "data"
    shutil.copytree(images, data)
    kinds = [kind for kind in sorted((data / "train").iterdir()) if len(list(kind.iterdir())) > 2]
    one = next(kinds[0].iterdir())
    one.write_bytes(b"no image")
    done = adclr("evaluate", "knn", "--weights", run.path, "--data", data)
    assert done.returncode == 0, done.stderr
    assert ["num_unreadable", "1"] in [line.split() for line in done.stdout.splitlines()]
    assert f"skipped {one.relative_to(data / 'train')}: it is not an image of a known format" in done.stderr
    adclr("evaluate", "knn", "--weights", run.path, "--data", data, "k=3")
    assert len(list((run.path / "evals" / "knn").glob("*.json"))) == 2  # neither wrote over the other
    for path in kinds[0].iterdir():
        path.write_bytes(b"no image")
    done = adclr("evaluate", "knn", "--weights", run.path, "--data", data, "max_unreadable=0.5")
    assert done.returncode == 2
    assert f"no image of class {kinds[0].name}" in done.stderr


def test_counts_are_neither_truths_nor_beyond_reason() -> None:
    for change in ({"epochs": True}, {"depth": 10**7}, {"global_size": 800_000}, {"betas": [1, 1]}, {"std": [0, 1, 1]}):
        with pytest.raises(UserError):
            tiny(**change)
