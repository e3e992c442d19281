"""ADCLR: Vision Transformers pretrained without labels, with features for whole images and for places in them.

The public names below are imported when they are first used, so that `import adclr` and `adclr --help` need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from adclr.evals import evaluate
    from adclr.features.embedding import embed
    from adclr.model.method import ADCLR
    from adclr.model.vit import VisionTransformer
    from adclr.training.loop import distill, pretrain
    from adclr.weights.backbone import create_backbone, load
    from adclr.weights.export import export

__all__ = [
    "ADCLR",
    "VisionTransformer",
    "__version__",
    "create_backbone",
    "distill",
    "embed",
    "evaluate",
    "export",
    "load",
    "pretrain",
]

_HOME = {
    "ADCLR": "adclr.model.method",
    "VisionTransformer": "adclr.model.vit",
    "create_backbone": "adclr.weights.backbone",
    "distill": "adclr.training.loop",
    "embed": "adclr.features.embedding",
    "evaluate": "adclr.evals",
    "export": "adclr.weights.export",
    "load": "adclr.weights.backbone",
    "pretrain": "adclr.training.loop",
}


def __dir__() -> list[str]:
    """The public names: submodules that were imported meanwhile are no part of the interface."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'adclr' has no attribute {name!r}")

    from adclr.system import machine

    with machine.passive_waiting():
        value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
