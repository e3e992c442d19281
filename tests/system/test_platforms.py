"""Windows, where there are no locks, and a Mac's GPU: one sentence each where something is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import adclr as package
from adclr.config.parsing import UserError
from adclr.system import devices, files
from adclr.system.runs import Run
from tiny import TINY, words

WITHOUT_FCNTL = "import sys; sys.modules['fcntl'] = None; from adclr import cli; cli.main(sys.argv[1:])"


def on_windows(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_FCNTL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_windows_is_refused_in_one_sentence(images: Path, tmp_path: Path) -> None:
    done = on_windows("pretrain", images / "train", "--out", tmp_path / "run", *words(TINY))
    assert done.returncode == 2
    assert done.stderr == f"adclr: {files.WINDOWS}\n"
    assert not list(tmp_path.iterdir())
    assert on_windows("--help").returncode == 0


def test_python_calls_are_refused_in_the_same_sentence(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOCKS_EXIST", False)
    with pytest.raises(UserError) as error:
        package.pretrain(images / "train", out=tmp_path / "run", **TINY)
    assert str(error.value) == files.WINDOWS
    with pytest.raises(UserError, match="WSL"), Run(tmp_path / "other").lock():
        pass
    assert not list(tmp_path.iterdir())


def test_a_locked_file_is_refused_or_waited_for(tmp_path: Path) -> None:
    with open(tmp_path / "file", "a") as first, open(tmp_path / "file", "a") as second:
        files.lock_file(first)
        with pytest.raises(BlockingIOError):
            files.lock_file(second)
        first.close()
        files.lock_file(second, wait=True)


def test_a_macs_gpu_is_used_if_it_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match="finds no GPU of a Mac here; set device=cpu"):
        devices.select_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices.select_device("mps") == torch.device("mps")
    assert "device=mps is untested" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.select_device("auto") == torch.device("cpu")
