"""Evaluations: one file each, one shape each: `Settings` and `run(settings) -> dict of numbers`.

They know a backbone and labelled data, nothing of how the backbone was trained.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from adclr import config
from adclr.config import UserError

NAMES = ("knn", "linear")


def module(name: str) -> ModuleType:
    if name not in NAMES:
        raise UserError(f"unknown evaluation '{name}'; there are: {', '.join(NAMES)}")
    return importlib.import_module(f"adclr.evals.{name}")


def evaluate(name: str, **settings: Any) -> dict[str, float]:
    """`evaluate("knn", weights="runs/photos", data="labelled/")`"""
    chosen = module(name)
    scores: dict[str, float] = chosen.run(config.build(chosen.Settings, settings))
    return scores
