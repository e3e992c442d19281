"""Labeled pixels for tests: the built-in scenes as folders, a tiny backbone, and evaluations in two processes."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from adclr import cli
from adclr.config import parsing
from adclr.config.settings import Settings
from adclr.data.sets import scenes
from adclr.model.vit import VisionTransformer
from adclr.weights import backbone as weights_room
from adclr.weights.backbone import Weights
from tiny import TINY, words

CLASSES = ["ground", *scenes.KINDS]


def clear(size: int, count: int) -> list[int]:
    """Scenes of which no object is hidden but for a sliver, which no stride could show."""
    least = size * size / 40
    whole = (i for i in range(1000) if all(o.mask.sum() >= least for o in scenes.scene(5, i, size).objects))
    return list(itertools.islice(whole, count))


def segmented(folder: Path, num_train: int = 8, num_val: int = 4, size: int = 48, same: bool = False) -> Path:
    """images/, labels/ and classes.txt; `same`: the val scenes are the first train scenes, and clear ones."""
    chosen = clear(size, num_train) if same else list(range(num_train + num_val))
    for split, these in (("train", chosen[:num_train]), ("val", chosen[:num_val] if same else chosen[num_train:])):
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
        for index in these:
            made = scenes.scene(5, index, size)
            Image.fromarray(made.image).save(folder / "images" / split / f"{index}.png")
            Image.fromarray(made.labels()).save(folder / "labels" / split / f"{index}.png")
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return folder


def backbone(dim: int = 32, depth: int = 2, patch: int = 4, size: int = 16, **more: Any) -> Weights:
    torch.manual_seed(0)
    vit = VisionTransformer(dim, depth, dim // 16, patch, size, **more)
    return Weights(vit.eval(), (0.5,) * 3, (0.25,) * 3)


def saved(folder: Path, dim: int = 32, depth: int = 2) -> Path:
    """The weights of a new tiny backbone in a folder."""
    settings = parsing.build(Settings, TINY, {"model.dim": dim, "model.depth": depth})
    torch.manual_seed(0)
    weights_room.save_backbone(folder, weights_room.architecture(settings).build().state_dict(), settings)
    return folder


def evaluated(name: str, processes: int, weights: Path, data: Path, out: Path, **settings: Any) -> dict[str, Any]:
    """The scores of `adclr evaluate`, run as a user does; in one process, this one."""
    command = ["evaluate", name, "--weights", str(weights), "--data", str(data), "--out", str(out)]
    command += words({"device": "cpu", "num_workers": 1} | settings)
    if processes == 1:
        cli.main(command)
    else:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        done = subprocess.run([*start, "-m", "adclr", *command], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    scores: dict[str, Any] = json.loads(out.read_text())["scores"]
    return scores


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a command says that ends with exit code 2: one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        cli.main([str(word) for word in words])
    assert caught.value.code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("adclr: ")]
    assert len(said) == 1
    return said[0]


def striped(height: int, width: int, channels: int = 3) -> np.ndarray:
    """An image in which every pixel is another."""
    rng = np.random.default_rng(height * 1000 + width)
    return rng.integers(0, 256, (channels, height, width), np.uint8)


def instances(folder: Path, num_train: int = 8, num_val: int = 4, size: int = 64, same: bool = False) -> Path:
    """The scenes with COCO's json: masks as run lengths; `same`: the val scenes are the first train scenes."""
    chosen = clear(size, num_train) if same else list(range(num_train + num_val))
    number = 0
    for split, these in (("train", chosen[:num_train]), ("val", chosen[:num_val] if same else chosen[num_train:])):
        (folder / "images" / split).mkdir(parents=True)
        images, annotations = [], []
        for index in these:
            made = scenes.scene(5, index, size)
            Image.fromarray(made.image).save(folder / "images" / split / f"{index}.png")
            images.append({"id": index + 1, "file_name": f"{index}.png", "width": size, "height": size})
            for thing in made.objects:
                number += 1
                left, top, right, bottom = thing.box
                annotations.append(
                    {
                        "id": number,
                        "image_id": index + 1,
                        "category_id": 2 * thing.kind + 1,  # with gaps, as COCO's
                        "bbox": [left, top, right - left, bottom - top],
                        "area": int(thing.mask.sum()),
                        "iscrowd": 0,
                        "segmentation": {"size": [size, size], "counts": run_lengths(thing.mask)},
                    }
                )
        categories = [{"id": 2 * kind + 1, "name": name} for kind, name in enumerate(scenes.KINDS)]
        actual = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations").mkdir(exist_ok=True)
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(actual))
    return folder


def clip(folder: Path) -> Path:
    """One clip of four frames in DAVIS's folders: a scene that moves by two pixels a frame."""
    scene = scenes.scene(5, 1, 64)
    labels = np.where(scene.labels() > 0, 1, 0).astype(np.uint8)
    for kind in ("JPEGImages", "Annotations"):
        (folder / kind / "480p" / "clip").mkdir(parents=True)
    for number in range(4):
        there = np.s_[2 * number : 2 * number + 48, :48]
        Image.fromarray(scene.image[there]).save(folder / f"JPEGImages/480p/clip/{number:05}.jpg", quality=95)
        label = Image.fromarray(labels[there])
        label.putpalette([0, 0, 0, 255, 0, 0])
        label.save(folder / f"Annotations/480p/clip/{number:05}.png")
    sets = folder / "ImageSets" / "2017"
    sets.mkdir(parents=True)
    (sets / "val.txt").write_text("clip\n")
    return folder


def run_lengths(mask: np.ndarray) -> list[int]:
    flat = np.concatenate([[0], mask.T.reshape(-1).astype(int)])
    ends = np.flatnonzero(np.diff(flat))
    return [int(n) for n in np.diff([0, *ends, mask.size])]
