"""The whole story on built-in images: render, pretrain, score before and after, and look."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from adclr.config.parsing import UserError
from adclr.data.sets import scenes
from adclr.data.sets.scenes import NUM_TRAIN, NUM_VAL, SIZE, Scene
from adclr.features import analysis, drawing, figures
from adclr.features.analysis import Box
from adclr.features.drawing import Cell
from adclr.system import outputs
from adclr.system.files import check_writable
from adclr.training import launch, loop
from adclr.weights.backbone import Weights, load_weights

SHOWN = (7, 16, 20, 26)  # val scenes of the picture, chosen for their variety of kinds


def run(out: Path, seed: int, overwrite: bool = False) -> None:
    """Everything lies in `out`; a second time goes on from where the first stopped.

    With `overwrite`, `out` may hold other files, which stay, and a demo of another seed is made anew.
    """
    started = time.monotonic()
    images, half, folder, picture = out / "scenes", out / ".scenes.tmp", out / "run", out / "attention.png"
    check_writable(out)
    note = images / "seed.txt"
    own = note.exists()  # version 0.1 put nothing into the picture
    outputs.check_overwrite("demo", () if own else [picture], overwrite)
    if os.path.exists(out) and not out.is_dir():
        raise UserError(f"{out} is a file; choose another --out")
    if out.is_dir() and not overwrite and any(path not in (images, half, folder, picture) for path in out.iterdir()):
        raise UserError(f"{out} holds something else; choose another --out, or say --overwrite to leave it there")
    if images.exists() and not own:
        raise UserError(f"{images} was not rendered by adclr demo; choose another --out")
    if own and note.read_text().strip() != str(seed):
        if not overwrite:
            raise UserError(f"{images} was rendered from another seed; choose another --out, or say --overwrite")
        for path in (folder, images):
            shutil.rmtree(path, ignore_errors=True)
    if not images.exists():
        print(f"rendering {NUM_TRAIN} + {NUM_VAL} scenes of {SIZE} pixels into {images}", flush=True)
        shutil.rmtree(half, ignore_errors=True)
        scenes.write_scenes(half, seed, NUM_TRAIN, NUM_VAL, SIZE)
        (half / note.name).write_text(f"{seed}\n")
        os.rename(half, images)
    overrides = {"train.seed": seed, "probe.data": str(images)}
    loop.run(launch.prepare(images / "train", folder, "demo", overrides))
    results = json.loads((folder / "results.json").read_text())
    before, after = (results["probes"][i]["knn_top1"] for i in (0, -1))
    shown = [scenes.scene(seed, NUM_TRAIN + index, SIZE) for index in SHOWN]
    drawing.save_picture(picture, draw(load_weights(folder), shown), "demo")
    print(f"kNN accuracy before training {before:.1f} %, after {after:.1f} %: {after - before:+.1f} points")
    print(f"the run:     {folder}")
    print(f"the weights: {folder}/backbone.safetensors")
    print(f"the picture: {picture}")
    print(f"{time.monotonic() - started:.0f} seconds")


def draw(weights: Weights, shown: Sequence[Scene]) -> Image.Image:
    """A row for each scene: its queries, where `[CLS]` and they look, what is like them, and components of patches."""
    patch = weights.vit.patch_size
    seen = [analysis.prepare_image(scenes.KINDS[s.kind], s.image.transpose(2, 0, 1), 2 * SIZE, patch) for s in shown]
    patches = [analysis.patch_features(weights, one) for one in seen]
    basis = analysis.fit_basis(torch.cat(patches))
    rows = []
    for scene, one, part in zip(shown, seen, patches, strict=True):
        cells = figures.query_image(weights, one, query_boxes(scene)).cells(figures.CELL)
        colours = basis.colours(part).reshape(*one.grid(weights.vit), 3)
        cells.append(
            Cell(drawing.overlay_colors(drawing.display_image(one.pixels, figures.CELL), colours), "components")
        )
        rows.append(cells)
    return drawing.compose_sheet(rows, [one.name for one in seen], figures.QUERY_BAR)


def query_boxes(scene: Scene) -> list[Box]:
    """Two queries: a square in the middle of the largest object, and one in a corner that is ground."""
    thing = max(scene.objects, key=lambda t: int(t.mask.sum()))
    size, side = scene.image.shape[0], scene.image.shape[0] // 4
    left, top = ((thing.box[i] + thing.box[i + 2]) // 2 - side // 2 for i in (0, 1))
    labels = scene.labels()
    corners = [(x, y) for x in (0, size - side) for y in (0, size - side)]
    x, y = min(corners, key=lambda c: int((labels[c[1] : c[1] + side, c[0] : c[0] + side] > 0).sum()))
    on_object = (max(0, left), max(0, top), min(size, left + side), min(size, top + side))
    boxes = on_object, (x, y, x + side, y + side)
    return [(box[0] / size, box[1] / size, box[2] / size, box[3] / size) for box in boxes]
