"""A save that is killed, or fails, at any of the calls it makes; damaged checkpoints; a writer beside the training."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as standard

import adclr as package
import lives
from adclr.config.parsing import UserError
from adclr.system.runs import Run
from adclr.training import checkpoint
from adclr.training.checkpoint_writer import Writer
from adclr.weights import snapshot
from tiny import TINY, tiny

CALLS = ("write", "fsync", "rename", "replace", "mkdir", "symlink", "unlink", "rmdir")


@pytest.fixture
def saved(tmp_path: Path) -> Run:
    """A run with checkpoints of steps 1 and 2."""
    run = Run(tmp_path / "run")
    method, optimizer = lives.made()
    for step in (1, 2):
        checkpoint.write(run, lives.state(step), checkpoint.parts(method, optimizer), keep=2)
    return run


@contextmanager
def watched(
    after: Callable[[str, tuple[Any, ...]], None] = lambda name, arguments: None,
    before: Callable[[str, tuple[Any, ...]], None] = lambda name, arguments: None,
) -> Iterator[None]:
    """Every call by which a file or directory is changed is told, before it is made and after."""

    def instead(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            before(name, arguments)
            result = real(*arguments, **named)
            after(name, arguments)
            return result

        return call

    real = {name: getattr(os, name) for name in CALLS}
    for name, function in real.items():
        setattr(os, name, instead(name, function))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def in_a_child(work: Callable[..., None]) -> int:
    """The exit status of a process that does it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return status


def test_the_file_is_what_safetensors_writes(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "b": torch.randn(3, 5, generator=generator),
        "a": torch.randn(2, 3, generator=generator).t(),  # not contiguous
        "step": torch.tensor(3.0),
        "none": torch.zeros(0, 4),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "long": torch.arange(3),
        "double": torch.randn(2, generator=generator, dtype=torch.float64),
    }
    told = snapshot._write(tmp_path / "x.safetensors", tensors)
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    assert told["bytes"] == (tmp_path / "x.safetensors").stat().st_size
    assert told == snapshot.describe_file(tmp_path / "x.safetensors")
    theirs = standard({name: tensor.contiguous() for name, tensor in tensors.items()})
    assert len(theirs) == told["bytes"]


@pytest.mark.parametrize("fault", ["kill", "EIO"])
def test_latest_loads_wherever_a_save_is_cut_short(saved: Run, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A process is killed after its 1st, 2nd, ... call, or that call fails, always from the same two checkpoints."""
    monkeypatch.setattr(snapshot, "PIECE", 8192)
    method, optimizer = lives.made()
    tensors = checkpoint.parts(method, optimizer)
    whole = saved.path.with_name("whole")
    shutil.copytree(saved.path, whole, symlinks=True)
    ends = set()

    def save(last: int) -> None:
        """Comes to its end, with another status than otherwise, if there are not so many calls."""
        count = 0

        def stop(*_: Any) -> None:
            nonlocal count
            count += 1
            if count == last and fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if count == last:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        with watched(**{"after" if fault == "kill" else "before": stop}):
            checkpoint.write(saved, lives.state(3), tensors, keep=2)
        if count < last:
            os._exit(7)

    for number in itertools.count(1):
        if in_a_child(lambda last=number: save(last)) == 7 << 8:
            break
        step = lives.newest(saved.path)
        assert step in (2, 3)
        ends.add(step)
        assert (saved.checkpoints / "latest").is_symlink()
        found = checkpoint.load(saved, method, optimizer)
        assert found is not None
        assert found.step == step
        snapshot.remove_leftovers(saved)
        names = {path.name for path in saved.checkpoints.iterdir()}
        assert names <= {"latest", "step_1", "step_2", "step_3"}
        if number % 5 == 0:  # and the next save works, whatever was left behind
            checkpoint.write(saved, lives.state(4), tensors, keep=2)
            assert lives.newest(saved.path) == 4
        shutil.rmtree(saved.path)
        shutil.copytree(whole, saved.path, symlinks=True)
    assert ends == {2, 3}
    assert number - 1 > 150
    print(f"{fault}: {number - 1} times")  # docs/reliability.md has the sum


def test_everything_is_synced_before_it_is_named_and_named_before_anything_is_deleted(saved: Run) -> None:
    """What a power cut may lose is what was not synced; so the order of calls is what counts."""
    events: list[tuple[str, str]] = []

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        target = arguments[0]
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
        events.append((name, os.path.join(path)))

    method, optimizer = lives.made()
    with watched(before=note):
        checkpoint.write(saved, lives.state(3), checkpoint.parts(method, optimizer), keep=2)
    folder = str(saved.checkpoints / ".step_3.tmp")
    named = events.index(("rename", folder))
    for path in {path for name, path in events if name == "write"}:
        last_write = max(i for i, event in enumerate(events) if event == ("write", path))
        assert ("fsync", path) in events[last_write:named], path
    in_folder = [i for i, (name, path) in enumerate(events) if path.startswith(folder) and name in ("write", "replace")]
    assert ("fsync", folder) in events[max(in_folder) : named]
    linked = events.index(("replace", str(saved.checkpoints / ".latest.tmp")))
    here = ("fsync", str(saved.checkpoints))
    assert here in events[named:linked]
    deleted = events.index(("rename", str(saved.checkpoints / "step_1")))
    assert named < linked < deleted
    assert here in events[linked:deleted]


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_sentence(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = TINY | {"checkpoint_every_steps": 3, "keep_checkpoints": 3}
    whole = package.pretrain(images / "train", out=tmp_path / "whole", **changes)
    run = Run(shutil.copytree(whole.path, tmp_path / "run", symlinks=True))
    for name in ("results.json", "backbone.safetensors", "backbone.json"):
        (run.path / name).unlink()
    assert run.steps() == [3, 6, 8]
    for step, part in ((8, "teacher"), (6, "optimizer")):
        file = run.checkpoints / f"step_{step}" / f"{part}.safetensors"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    teacher = load_file(run.checkpoints / "step_6" / "teacher.safetensors")  # which is whole
    assert torch.equal(package.load(run.path).norm.weight, teacher["backbone.norm.weight"])
    package.pretrain(images / "train", out=run.path, **changes)
    said = capsys.readouterr().err
    assert (
        "step_8 is damaged at teacher.safetensors and is now called step_8.damaged; training resumes from step 3"
        in said
    )
    assert "step_6 is damaged at optimizer.safetensors" in said
    assert lives.digest(run.path) == lives.digest(whole.path)
    assert {"step_8.damaged", "step_6.damaged"} < {path.name for path in run.checkpoints.iterdir()}


def test_latest_leads_past_a_damaged_checkpoint_at_once(saved: Run) -> None:
    method, optimizer = lives.made()
    (saved.checkpoints / "step_2" / "student.safetensors").write_bytes(b"")
    assert checkpoint.load(saved, method, optimizer) == lives.state(1)
    assert os.readlink(saved.checkpoints / "latest") == "step_1"
    assert lives.newest(saved.path) == 1


def test_the_first_save_syncs_the_name_of_the_folder_too(tmp_path: Path) -> None:
    run, method_and_optimizer, synced = Run(tmp_path / "run"), lives.made(), []

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{arguments[0]}") if name == "fsync" else name)

    with watched(before=note):
        checkpoint.write(run, lives.state(1), checkpoint.parts(*method_and_optimizer), keep=2)
    assert str(run.path) in synced[: synced.index("rename")]


def metered(numbers: torch.Tensor) -> dict[str, Any]:
    return {"sums": numbers.tolist()}


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (time.sleep(seconds), real(handle))[1])


def test_the_training_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is written is what was there when it was saved, not what came after."""
    slow(monkeypatch, 0.1)
    method, optimizer = lives.made()
    run, said = Run(tmp_path / "run"), []
    before = method.student.backbone.norm.weight.clone()
    with Writer(run, tiny(), said.append) as writer:
        started = time.monotonic()
        writer.save(lives.state(1), checkpoint.parts(method, optimizer), torch.arange(7.0), metered)
        assert time.monotonic() - started < 0.1
        with torch.no_grad():
            method.student.backbone.norm.weight.add_(1.0)
        assert run.steps() == []  # nothing is said to be there that is not
        writer.save(lives.state(2), checkpoint.parts(method, optimizer), torch.zeros(7), metered)
        assert time.monotonic() - started > 0.5  # there is one copy, so the second save waits for the first
        assert run.steps() == [1]
    assert run.steps() == [1, 2]
    for step, value in ((1, before), (2, before + 1)):
        student = load_file(run.checkpoints / f"step_{step}" / "student.safetensors")
        assert torch.equal(student["backbone.norm.weight"], value)
    assert snapshot.read_json(run.checkpoints / "step_1" / "state.json")["meter"] == {"sums": list(range(7))}
    assert said == []
    assert not any(thread.name.startswith("checkpoint") for thread in threading.enumerate())


def test_errors_of_the_writer_come_up_in_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> None:
        raise ZeroDivisionError("a mistake of ours")

    method, optimizer = lives.made()
    monkeypatch.setattr(checkpoint, "write", wrong)

    def loop() -> None:
        with Writer(Run(tmp_path / "run"), tiny(), print) as writer:
            writer.save(lives.state(1), checkpoint.parts(method, optimizer), torch.zeros(7), metered)
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                writer.check()
                time.sleep(0.01)

    with pytest.raises(ZeroDivisionError):
        loop()


@pytest.mark.parametrize(
    "lengths", [((2, 3), (1, 10)), pytest.param(((1, 2), (2, 5), (3, 7), (1, 10)), marks=pytest.mark.full)]
)
def test_resuming_with_other_numbers_of_processes(
    images: Path, tmp_path: Path, lengths: tuple[tuple[int, int], ...]
) -> None:
    """(processes, steps), killed in between: the same data and losses as of one process all along."""
    changes = {"model__drop_path": 0.0, "train__batch_size": 6, "epochs": 2, "checkpoint_every_steps": 1}
    named = {name.replace("__", "."): value for name, value in changes.items()}
    whole = package.pretrain(images / "train", out=tmp_path / "whole", **(TINY | named))
    out = tmp_path / "parts"
    for ranks, last in lengths:
        process = lives.start(images / "train", out, ranks=ranks, **changes)
        if last < 10:
            deadline = time.monotonic() + 60
            while not any(step >= last for step in Run(out).steps()) and time.monotonic() < deadline:
                time.sleep(0.005)
            lives.kill(process)
        else:
            code, _, errors = lives.finish(process)
            assert code == 0, errors
    starts = snapshot.read_json(out / "provenance.json")
    assert [start["processes"] for start in starts] == [ranks for ranks, _ in lengths]
    assert all(start["from_step"] for start in starts[1:])
    one, many = (list(run.rows("metrics.jsonl")) for run in (whole, Run(out)))
    assert [row["step"] for row in one] == [row["step"] for row in many] == list(range(1, 11))
    for a, b in zip(one, many, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4), a["step"]  # sums of other order: 1.2e-5 was seen


def test_no_whole_checkpoint_at_all_is_an_error_and_touches_nothing(saved: Run) -> None:
    method, optimizer = lives.made()
    for step in (1, 2):
        (saved.checkpoints / f"step_{step}" / "student.safetensors").write_bytes(b"")
    before = sorted(str(path) for path in saved.path.rglob("*"))
    with pytest.raises(UserError, match=r"step_2 is damaged at student\.safetensors and no other is whole"):
        checkpoint.load(saved, method, optimizer)
    assert sorted(str(path) for path in saved.path.rglob("*")) == before
