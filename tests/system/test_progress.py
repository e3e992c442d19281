"""The progress line: how long is left, in units that people think in."""

from __future__ import annotations

import itertools

import pytest

from adclr.system import progress
from adclr.system.progress import ProgressLine


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.02, "0.02 seconds"),
        (59, "59 seconds"),
        (119, "119 seconds"),
        (600, "10.0 minutes"),
        (7000, "116.7 minutes"),
        (67_680, "18.8 hours"),
        (396_661, "4.6 days"),
        (70_000_000, "810.2 days"),
    ],
)
def test_durations_have_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert progress.format_duration(seconds) == text


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute between two looks at the clock."""
    clock = itertools.count(step=30.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))


@pytest.mark.usefixtures("slow")
def test_what_is_left_of_a_long_run_is_in_days(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("pretrain", 10_001) as line:
        line.move(0)
        line.move(2, "loss 5.1")
    assert capsys.readouterr().err.splitlines() == ["pretrain 0/10001", "pretrain 2/10001 loss 5.1 3.5 days left"]


@pytest.mark.usefixtures("slow")
def test_a_terminal_shows_what_is_left_however_slow_the_steps_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with ProgressLine("pretrain", 10_001) as line:
        line.move(0)
        line.move(2, "loss 5.1")
    assert "3.5 days left" in capsys.readouterr().err
