"""Two functions beside each other: which stream waits for which, with streams that only say so."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from adclr.config.parsing import UserError, build
from adclr.config.settings import Settings
from adclr.model.ops import streams
from adclr.training import job
from tiny import TINY

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


class Named:
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def wait_stream(self, other: Named) -> None:
        self.calls.append(f"{self.name} waits for {other.name}")


def test_both_begin_after_what_was_before_and_what_follows_waits_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(streams, "_side_stream", lambda _: Named("side", calls))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Named("main", calls))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: calls.append(f"on {stream.name}") or nullcontext())

    def first(number: int) -> str:
        calls.append("first")
        return f"first {number}"

    def second(number: int) -> int:
        calls.append("second")
        return number + 1

    for device in (GPU, CPU, None):
        assert streams.beside(first, second, 3, device) == ("first 3", 4)
    assert calls == [
        "side waits for main",
        "on side",
        "first",
        "second",
        "main waits for side",
        *["first", "second"] * 2,
    ]


def test_the_setting_reaches_the_method_and_is_refused_where_weights_are_spread() -> None:
    assert job.build(build(Settings, TINY | {"train.parallel_teacher": True})).parallel_teacher
    assert not job.build(build(Settings, TINY)).parallel_teacher
    with pytest.raises(UserError, match="the whole teacher in each process"):
        build(Settings, TINY | {"train.parallel_teacher": True, "train.shard": True})
