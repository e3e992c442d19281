"""What the tests on a GPU share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adclr.config.parsing import build
from adclr.config.settings import Settings
from adclr.data.augment import render
from adclr.data.packed import pack
from adclr.data.random_draws import key_of
from adclr.data.sets import scenes
from adclr.data.view_plan import plan_batch
from adclr.model.named_tensors import Views
from tiny import TINY

CUDA = torch.device("cuda")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as repeatable steps ask, before cuBLAS starts


def autocast() -> torch.autocast:
    return torch.autocast("cuda", dtype=torch.bfloat16)


def images_of(count: int) -> list[np.ndarray]:
    sizes = [(200, 260), (97, 64), (300, 301), (31, 17)]
    made = []
    for i in range(count):
        height, width = sizes[i % len(sizes)]
        image = scenes.scene(0, i, 301).image[:height, :width]
        made.append(np.ascontiguousarray(image.transpose(2, 0, 1)))
    return made


def default_views(count: int, device: torch.device, **changes: Any) -> tuple[Settings, Views]:
    settings = build(Settings, changes)
    packed = pack(images_of(count), pin=device.type == "cuda")
    keys = np.array([key_of(str(i)) for i in range(count)], np.uint64)
    made = plan_batch(settings, 0, keys, packed.sizes)
    return settings, render(packed.to(device), made, settings.data.mean, settings.data.std)


def for_kernels(**changes: Any) -> dict[str, Any]:
    """Tiny settings with sizes that the kernels of attention, norms, MLPs and losses take."""
    return TINY | {"dim": 128, "num_prototypes": 256, "head_bottleneck_dim": 64, "device": "cuda"} | changes


def write_scenes(folder: Path) -> Path:
    scenes.write_scenes(folder, seed=3, num_train=64, num_val=16, size=48, show=False)
    return folder
