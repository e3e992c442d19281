"""Small labeled folders and backbones for tests of scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from adclr.model.vit import VisionTransformer
from adclr.weights.backbone import Weights

COLORS = ((220, 30, 30), (30, 200, 40), (40, 60, 230), (200, 190, 30))


def colored(
    folder: Path, num_train: int = 48, num_val: int = 24, num_classes: int = 3, shuffled: bool = False, size: int = 24
) -> Path:
    """Classes of noisy plain images that their color tells apart; or labels that mean nothing."""
    rng = np.random.default_rng(0)
    for split, count in (("train", num_train), ("val", num_val)):
        for i in range(count):
            kind = i % num_classes
            named = int(rng.integers(num_classes)) if shuffled else kind
            path = folder / split / f"c{named}" / f"{i:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.array(COLORS[kind]) + rng.normal(0, 20, (size, size + i % 5, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
    return folder


def weights(dim: int = 32, depth: int = 3, patch: int = 8, size: int = 24, seed: int = 0) -> Weights:
    torch.manual_seed(seed)
    return Weights(VisionTransformer(dim, depth, 2, patch, size).eval(), (0.5, 0.4, 0.45), (0.2, 0.25, 0.3))
