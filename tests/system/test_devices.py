"""Streams that one thread has at a time, with streams that only remember what is asked of them."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from adclr.system import devices

GPU = torch.device("cuda:0")


class Stream:
    """A stream with work that waiting for it does."""

    instances: list[Stream]

    def __init__(self, device: torch.device) -> None:
        assert device == GPU
        self.pending = 0
        Stream.instances.append(self)

    def synchronize(self) -> None:
        self.pending = 0


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    Stream.instances = []
    monkeypatch.setattr(devices, "_idle_streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return Stream.instances


def test_two_threads_never_have_one_stream_and_find_nothing_left_on_theirs(streams: list[Stream]) -> None:
    users: dict[int, int] = {}
    lock, wrong, meeting = threading.Lock(), [], threading.Barrier(4)

    def work() -> None:
        meeting.wait()
        for _ in range(200):
            with devices.exclusive_stream("decoding", GPU) as stream:
                with lock:
                    users[id(stream)] = users.get(id(stream), 0) + 1
                    if users[id(stream)] > 1 or stream.pending:  # type: ignore[union-attr]
                        wrong.append(stream)
                    stream.pending += 1  # type: ignore[union-attr]
                with devices.exclusive_stream("decoding", GPU) as inner, lock:
                    if inner is not stream or not inner.pending:  # type: ignore[union-attr]
                        wrong.append(inner)
                with lock:
                    users[id(stream)] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 1 <= len(streams) <= 4  # used again and again


def test_a_stream_is_waited_for_and_returned_after_an_error(streams: list[Stream]) -> None:
    def fail() -> None:
        with devices.exclusive_stream("decoding", GPU) as stream:
            stream.pending += 1  # type: ignore[union-attr]
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert streams[0].pending == 0
    with devices.exclusive_stream("decoding", GPU) as again:
        assert again is streams[0]
        with devices.exclusive_stream("views", GPU) as other:
            assert other is not again


def test_a_cpu_has_none() -> None:
    with devices.exclusive_stream("decoding", torch.device("cpu")) as stream:
        none: Any = stream
        assert none is None


def test_products_on_a_gpu_are_rounded_within_only() -> None:
    before = torch.get_float32_matmul_precision()

    def fail() -> None:
        with devices.tensor_float32(GPU):
            assert torch.get_float32_matmul_precision() == "high"
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert torch.get_float32_matmul_precision() == before
    with devices.tensor_float32(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == before
