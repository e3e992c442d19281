"""A recording that fails, with CUDA played: in which order it is put back, and what whoever asked for it is told.

What really is put back is looked at in tests/gpu, and whether the runs compared there are valid, here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adclr.config import parsing
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.model.named_tensors import Views
from adclr.model.ops import attention
from adclr.training import cuda_graph, job, micro_batch, schedules
from adclr.training.cuda_graph import RecordedStep, RecordingError
from adclr.training.step import Step
from tiny import tiny

POOL = (0, 7)


class Cuda:
    """Notes what is asked of it; `given_up` is a recording that CUDA ends with an error."""

    def __init__(self, given_up: bool = False, refuses: str = "", capturing: bool = False) -> None:
        self.given_up, self.refuses, self.capturing = given_up, refuses, capturing
        self.calls: list[str] = []
        self.streams: list[object] = []  # entered and not left
        self.ended = False

    def note(self, name: str) -> None:
        self.calls.append(name)
        if name == self.refuses:
            raise RuntimeError(f"{name} is refused")

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams.pop()

    # -- the graph --

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        assert (pool, capture_error_mode, len(self.streams)) == (POOL, "thread_local", 1)
        self.note("begin")

    def capture_end(self) -> None:
        assert len(self.streams) == 1
        self.note("end")
        if self.given_up:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.ended = True

    def pool(self) -> tuple[int, int]:
        if not self.ended:
            raise RuntimeError("called without a preceding successful capture")
        return POOL

    def reset(self) -> None:
        self.note("reset")

    # -- memory and random numbers --

    def end_allocating(self, _: int | None, pool: tuple[int, int]) -> None:
        assert pool == POOL
        self.note("end allocating")
        if self.ended:
            raise RuntimeError("not currently recording")

    def release(self, _: int | None, pool: tuple[int, int]) -> None:
        assert pool == POOL
        self.note("release")

    def rand(self, *_: object, **__: object) -> None:
        self.note("rand")
        if self.capturing:
            raise RuntimeError("offset increment outside graph capture")

    def graphsafe_set_state(self, _: object) -> None:
        self.note("new state")
        self.capturing = False


class Side:
    device = torch.device("cpu")

    def wait_stream(self, _: object) -> None:
        pass


def attempt(cuda: Cuda, monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> RecordedStep:
    for name, value in {
        "CUDAGraph": lambda: cuda,
        "graph_pool_handle": lambda: POOL,
        "stream": cuda.stream,
        "current_stream": lambda _: Side(),
        "synchronize": lambda _: None,
        "empty_cache": lambda: None,
        "default_generators": {None: cuda},
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end_allocating, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", cuda.release, raising=False)
    monkeypatch.setattr(cuda_graph, "shared_stream", lambda *_: Side())
    monkeypatch.setattr(cuda_graph, "_failed", [])
    views = micro_batch.random_views(tiny(), 2, torch.device("cpu"))
    monkeypatch.setattr(torch, "rand", cuda.rand)

    def work(_: Views, numbers: Tensor) -> tuple[Tensor, ...]:
        if "begin" in cuda.calls and error is not None:
            raise error
        return (numbers.sum(),)

    try:
        return RecordedStep(work, views, (1.0, 2.0))
    finally:
        assert not cuda.streams


CASES: list[tuple[dict[str, Any], list[str]]] = [
    # the host waited: nothing was ended, and the generator still counts for the recording
    (
        {"given_up": True, "capturing": True},
        ["begin", "end", "end allocating", "release", "reset", "rand", "new state", "rand"],
    ),
    ({"given_up": True}, ["begin", "end", "end allocating", "release", "reset", "rand"]),
    # an error of Python's: the graph is whole, and has the pool
    ({}, ["begin", "end", "end allocating", "reset", "rand"]),
]


@pytest.mark.parametrize(("how", "calls"), CASES)
def test_a_failed_recording_is_put_back(monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], calls: list[str]) -> None:
    cuda = Cuda(**how)
    torch.manual_seed(5)
    with pytest.raises(RecordingError, match=r"^no waiting here$") as told:
        attempt(cuda, monkeypatch, ValueError("no\nwaiting here"))
    assert cuda.calls == calls
    assert torch.initial_seed() == 5
    assert told.value.__context__ is None  # nothing holds the tensors of the recording


def test_memory_that_is_full_stays_that_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since who asked then takes fewer images."""
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        attempt(Cuda(), monkeypatch, torch.OutOfMemoryError("full"))


@pytest.mark.parametrize("refuses", ["release", "rand"])
def test_what_cannot_be_put_back_ends_the_run(monkeypatch: pytest.MonkeyPatch, refuses: str) -> None:
    with pytest.raises(UserError, match=r"recorded as a CUDA graph \(why\); set train\.cuda_graph=off"):
        attempt(Cuda(given_up=True, refuses=refuses), monkeypatch, ValueError("why"))


def test_a_recording_that_succeeds_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    made = attempt(cuda, monkeypatch, None)
    assert cuda.calls == ["begin", "end"]
    assert [result.item() for result in made.results] == [3.0]


def test_a_step_that_is_not_recorded_is_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise RecordingError("why")

    monkeypatch.setattr("adclr.training.step.RecordedStep", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    settings = tiny()
    method, device = job.build(settings), torch.device("cpu")
    step = Step(settings, method, schedules.make_optimizer(method.student, settings), device, None)
    step.record = True  # which a CPU never is
    values = schedules.Values(1e-3, 0.04, 0.99, 0.05, freeze_last_layer=False)
    for _ in range(2):
        losses, ok = step([micro_batch.random_views(settings, 2, device)], values)
        assert ok
        assert losses.isfinite().all()
    assert not step.record
    assert capsys.readouterr().err.count("could not be recorded as a CUDA graph, so it is slower (why)") == 1


RECORDABLE: list[tuple[dict[str, Any], int, bool]] = [  # settings, micro-batches of a step, whether it is recorded
    ({}, 1, True),
    ({"compile": "off"}, 1, True),
    ({"compile": "off", "cuda_graph": "off"}, 1, False),
    ({"cuda_graph": "off"}, 1, False),
    ({}, 2, False),
    ({"shard": True}, 1, False),
    ({"target": "sinkhorn"}, 1, True),
    ({"target": "sinkhorn", "masked_weight": 1.0}, 1, False),
]


@pytest.mark.parametrize(("changes", "accumulate", "recorded"), RECORDABLE)
def test_on_a_gpu_a_step_is_recorded_whether_it_is_compiled_or_not(
    changes: dict[str, Any], accumulate: int, recorded: bool
) -> None:
    settings = tiny(**changes)
    method = job.build(settings)
    optimizer = schedules.make_optimizer(method.student, settings)
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert Step(settings, method, optimizer, gpu, None, accumulate).record == recorded
    assert not Step(settings, method, optimizer, gpu, None, accumulate, record=False).record
    assert not Step(settings, method, optimizer, cpu, None, accumulate).record


def test_a_step_is_not_recorded_beside_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny()
    method = job.build(settings)
    monkeypatch.setattr("adclr.system.distributed.in_group", lambda: True)
    monkeypatch.setattr("adclr.training.step._data_parallel", lambda method, _: method)
    optimizer = schedules.make_optimizer(method.student, settings)
    assert not Step(settings, method, optimizer, torch.device("cuda", 0), None).record
    monkeypatch.undo()
    assert Step(settings, method, optimizer, torch.device("cuda", 0), None).record


@pytest.mark.parametrize("masked_weight", [0.0, 1.0])
def test_runs_that_are_compared_on_a_gpu_are_of_the_kernels(
    monkeypatch: pytest.MonkeyPatch, masked_weight: float
) -> None:
    """The settings of tests/gpu, which cannot run here: heads as wide as the kernels take them, and losses that are."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "gpu")
    told = importlib.import_module("on_gpu").for_kernels(masked_weight=masked_weight, device="cpu", deterministic=True)
    settings = parsing.build(Settings, told)
    dim, _, heads = settings.model.shape
    assert dim // heads in attention.HEAD_WIDTHS
    losses = job.build(settings)(micro_batch.random_views(settings, 2, torch.device("cpu")), 0.05)
    assert all(loss.isfinite() for loss in losses)
    assert bool(losses.masked) == bool(masked_weight)
