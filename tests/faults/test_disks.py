"""Disks that are full, read-only, over quota or broken: training goes on, or ends cleanly with a good checkpoint."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import adclr as package
import lives
import soak
from adclr.config.parsing import UserError
from adclr.system.runs import Run
from adclr.training import checkpoint
from adclr.training.checkpoint_writer import Writer
from adclr.training.journal import Journal
from tiny import TINY, tiny

# In the process: the disk is full from a step until another one. Saves are at 2, 4, 6, ...
FULL = """
import os, adclr.training.journal as j
step, filler = j.Journal.step, {filler!r}
def filling(self, done, *rest):
    if done == {since}:
        while not self.run.steps()[-1:] == [{since} - 1]: pass
        with open(filler, "wb") as file:
            for size in (2**16, 2**12, 1):
                try:
                    while True: os.write(file.fileno(), b"x" * size)
                except OSError: pass
    if done == {until}: os.unlink(filler)
    step(self, done, *rest)
j.Journal.step = filling
"""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here; errors are injected in the other tests")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def saved(tmp_path: Path) -> Run:
    return two_saved(tmp_path / "run")


def two_saved(path: Path) -> Run:
    run = Run(path)
    method, optimizer = lives.made()
    for step in (1, 2):
        checkpoint.write(run, lives.state(step), checkpoint.parts(method, optimizer), keep=2)
    return run


def test_a_disk_that_fills_at_any_byte_leaves_a_whole_checkpoint(saved: Run) -> None:
    """ENOSPC at 20 random bytes, after a part of the piece was taken, as a disk does it."""
    method, optimizer = lives.made()
    tensors = checkpoint.parts(method, optimizer)
    size = sum(path.stat().st_size for path in (saved.checkpoints / "step_2").iterdir())
    real = os.write
    for place in sorted(random.Random(0).sample(range(size), 20)):
        left = place

        def write(handle: int, data: Any) -> int:
            nonlocal left
            if left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken = real(handle, bytes(data)[:left])
            left -= taken
            return taken

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "write", write)
            with pytest.raises(OSError, match="No space"):
                checkpoint.write(saved, lives.state(3), tensors, keep=2)
        assert lives.newest(saved.path) == 2
        assert sorted(path.name for path in saved.checkpoints.iterdir()) == ["latest", "step_1", "step_2"]
        assert checkpoint.load(saved, method, optimizer) == lives.state(2)


def test_a_file_system_that_is_really_full_leaves_a_whole_checkpoint(small: Path) -> None:
    """20 random amounts of room, in pages as tmpfs gives it, each too little for the save."""
    run = two_saved(small / "run")
    method, optimizer = lives.made()
    tensors = checkpoint.parts(method, optimizer)
    pages = sum(-(-path.stat().st_size // 4096) for path in (run.checkpoints / "step_2").iterdir())
    rng = random.Random(1)
    for _ in range(20):
        room = os.statvfs(small).f_bavail - rng.randrange(pages)
        (small / "filler").write_bytes(b"x" * (room * 4096))
        with pytest.raises(OSError, match="No space"):
            checkpoint.write(run, lives.state(3), tensors, keep=2)
        assert lives.newest(run.path) == 2
        (small / "filler").unlink()
    checkpoint.write(run, lives.state(3), tensors, keep=2)
    assert lives.newest(run.path) == 3


CHANGES = {"checkpoint_every_steps": 2, "free_checkpoints": "false", "epochs": 3}


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package.pretrain(images / "train", out=tmp_path_factory.mktemp("whole") / "run", **(TINY | CHANGES)).path


def test_a_disk_that_is_full_for_a_while_costs_one_checkpoint(images: Path, small: Path, whole: Path) -> None:
    out = small / "run"
    before = FULL.format(filler=str(small / "filler"), since=5, until=8)
    code, _, errors = lives.finish(lives.start(images / "train", out, before=before, **CHANGES))
    assert code == 0, errors
    assert "the checkpoint of step 6 cannot be written" in errors
    assert "No space left on device" in errors
    assert lives.digest(out) == lives.digest(whole)  # metrics.jsonl too


def test_a_disk_that_stays_full_ends_the_run_with_its_last_checkpoint(images: Path, small: Path, whole: Path) -> None:
    out = small / "run"
    before = FULL.format(filler=str(small / "filler"), since=5, until=99)
    code, _, errors = lives.finish(lives.start(images / "train", out, before=before, **CHANGES))
    assert code == 2, errors
    assert "Traceback" not in errors
    last = errors.strip().splitlines()[-1]
    assert last.startswith("adclr: the checkpoint of step 10 cannot be written")
    assert last.endswith("make room there, and the same command resumes from step 4, the last that was saved")
    assert lives.newest(out) == 4
    (small / "filler").unlink()
    package.pretrain(images / "train", out=out, **(TINY | CHANGES))
    assert lives.digest(out) == lives.digest(whole)


# In the process: the disk is full as soon as a function of the training begins.
FULL_FROM = """
import errno, os, adclr.training.loop as t
work, real = t.{function}, os.write
def full(handle, data):
    if os.readlink(f"/proc/self/fd/{{handle}}").startswith({out!r}):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return real(handle, data)
def filled(*arguments):
    os.write = full
    return work(*arguments)
t.{function} = filled
"""


@pytest.mark.parametrize(
    ("function", "last"),
    [
        ("record_start", "settings.yaml: No space left on device; fix this and try again"),
        (
            "_finish",
            "backbone.json: No space left on device; "
            "fix this and the same command resumes from the last checkpoint, which is intact",
        ),
    ],
)
def test_a_disk_that_is_full_at_the_start_or_the_end_is_said_with_the_file(
    images: Path, tmp_path: Path, whole: Path, function: str, last: str
) -> None:
    out = tmp_path / "run"
    before = FULL_FROM.format(function=function, out=str(out))
    code, _, errors = lives.finish(lives.start(images / "train", out, before=before, **CHANGES))
    assert code == 2, errors
    assert errors.strip().splitlines()[-1] == f"adclr: {out}/{last}"
    assert not list(out.glob("**/.*.tmp"))
    package.pretrain(images / "train", out=out, **(TINY | CHANGES))
    assert lives.digest(out) == lives.digest(whole)


@pytest.mark.full
def test_kills_a_full_disk_and_broken_images_at_once(small: Path, tmp_path: Path) -> None:
    """A short one; `python tests/faults/soak.py` is the long one."""
    soak.work(soak.collection(tmp_path / "data"), small, tmp_path / "whole", steps=200, kills=2, fulls=1, least=0.6)


def test_old_checkpoints_are_freed_for_a_new_one_if_that_is_allowed(small: Path) -> None:
    method, optimizer = lives.made()
    tensors, said = checkpoint.parts(method, optimizer), []
    for allowed in (True, False):
        run = two_saved(small / f"run_{allowed}")
        size = sum(path.stat().st_size for path in (run.checkpoints / "step_2").iterdir())
        room = os.statvfs(small).f_bavail - size // 4096 // 2
        (small / "filler").write_bytes(b"x" * (room * 4096))
        settings = tiny(free_checkpoints=allowed, keep_checkpoints=3)
        if allowed:
            with Writer(run, settings, said.append) as writer:
                writer.save(lives.state(3), tensors, torch.zeros(7), lambda _: {})
            assert run.steps() == [2, 3]
            assert said == [f"the disk of {run.path} is full: the checkpoint of step 1 was deleted"]
        else:
            writer = Writer(run, settings, said.append)
            writer.save(lives.state(3), tensors, torch.zeros(7), lambda _: {})
            with pytest.raises(UserError, match="No space left"):
                writer.__exit__(None, None, None)
            assert run.steps() == [1, 2]
        (small / "filler").unlink()
        shutil.rmtree(run.path)


@pytest.mark.parametrize("number", ["EROFS", "EDQUOT", "EIO", "ENOSPC"])
def test_writes_that_fail_for_a_while_cost_nothing_but_a_checkpoint(
    images: Path, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, number: str, capsys: Any
) -> None:
    """From step 5 to step 7 nothing can be written anywhere; saves are every second step."""
    real_open, real_write, failing = os.open, os.write, [False]
    step = Journal.step

    def fails() -> None:
        if failing[0]:
            raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))

    def open_(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            fails()
        return real_open(path, flags, *rest, **named)

    def write(handle: int, data: Any) -> int:
        fails()
        return real_write(handle, data)

    def stepped(self: Any, done: int, *rest: Any) -> None:
        if done == 5:
            while self.run.steps()[-1] != 4:
                pass
        failing[0] = 5 <= done < 8
        step(self, done, *rest)

    monkeypatch.setattr(Journal, "step", stepped)
    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "write", write)
    run = package.pretrain(images / "train", out=tmp_path / "run", **(TINY | CHANGES))
    said = " ".join(capsys.readouterr().err.split())
    assert f"step 6 cannot be written to {run.checkpoints} ({os.strerror(getattr(errno, number))})" in said
    assert "and nothing is missing" in said
    assert lives.digest(run.path) == lives.digest(whole)


def test_a_logger_that_fails_does_not_end_the_run(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    class Broken:
        def log(self, *_: Any) -> None:
            raise RuntimeError("no such server")

        def close(self) -> None:
            raise AssertionError("it was given up")

    monkeypatch.setattr("adclr.training.loggers.open_loggers", lambda *_: [Broken()])
    assert package.pretrain(images / "train", out=tmp_path / "run", **TINY).finished
    assert capsys.readouterr().err.count("Broken failed and gets no more curves (no such server)") == 1
