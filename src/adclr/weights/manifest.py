"""Sizes and SHA-256 of the files of a checkpoint: written last, asked before any of them is believed. No torch here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adclr.config.sections import UserError
from adclr.system.runs import Run, read_json

NAME = "manifest.json"


class Found(NamedTuple):
    step: int | None  # of the newest whole checkpoint
    damaged: dict[int, str]  # newer ones, and where each is damaged


def facts(path: Path) -> dict[str, Any]:
    """0.6 s for each GiB on one core that knows SHA-256."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def damage(folder: Path, names: Sequence[str]) -> str | None:
    """The first of these files that is not what the manifest says."""
    try:
        told = read_json(folder / NAME)
    except UserError:
        return NAME
    for name in names:
        try:
            if not isinstance(told, dict) or facts(folder / name) != told.get(name):
                return name
        except OSError:
            return name
    return None


def newest(run: Run, names: Sequence[str], before: int | None = None) -> Found:
    """The newest checkpoint (of those before a step) in which these files are whole."""
    damaged: dict[int, str] = {}
    for step in reversed([step for step in run.steps() if before is None or step < before]):
        name = damage(run.checkpoints / f"step_{step}", names)
        if name is None:
            return Found(step, damaged)
        damaged[step] = name
    return Found(None, damaged)
