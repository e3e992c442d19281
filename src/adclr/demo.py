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
from adclr.features.drawing import Tile
from adclr.system import outputs
from adclr.system.files import check_writable
from adclr.training import launch, loop
from adclr.weights.backbone import Weights, load_weights

SHOWN = (7, 16, 20, 26)  # val scenes of the picture, chosen for their variety of kinds


def run_demo(out: Path, seed: int, overwrite: bool = False) -> None:
    """Render scenes, pretrain on them and draw what the weights attend to, all in `out`; resume what was stopped.

    With `overwrite`, `out` may hold other files, which stay, and a demo of another seed is replaced.
    """
    started = time.monotonic()
    images, half, folder, picture = out / "scenes", out / ".scenes.tmp", out / "run", out / "attention.png"
    check_writable(out)
    note = images / "seed.txt"
    rendered = note.exists()  # by a demo; version 0.1 did not sign the picture
    outputs.check_overwrite("demo", () if rendered else [picture], overwrite)
    if os.path.exists(out) and not out.is_dir():
        raise UserError(f"{out} is a file; choose another --out")
    if out.is_dir() and not overwrite and any(path not in (images, half, folder, picture) for path in out.iterdir()):
        raise UserError(f"{out} holds something else; choose another --out, or add --overwrite to leave it there")
    if images.exists() and not rendered:
        raise UserError(f"{images} was not rendered by adclr demo; choose another --out")
    if rendered and note.read_text().strip() != str(seed):
        if not overwrite:
            raise UserError(f"{images} was rendered from another seed; choose another --out, or add --overwrite")
        for path in (folder, images):
            shutil.rmtree(path, ignore_errors=True)
    if not images.exists():
        print(f"rendering {NUM_TRAIN} + {NUM_VAL} scenes of {SIZE} pixels into {images}", flush=True)
        shutil.rmtree(half, ignore_errors=True)
        scenes.write_scenes(half, seed, NUM_TRAIN, NUM_VAL, SIZE)
        (half / note.name).write_text(f"{seed}\n")
        os.rename(half, images)
    overrides = {"train.seed": seed, "probe.data": str(images)}
    loop.train(launch.prepare(images / "train", folder, "demo", overrides))
    results = json.loads((folder / "results.json").read_text())
    before, after = (results["probes"][i]["knn_top1"] for i in (0, -1))
    shown = [scenes.scene(seed, NUM_TRAIN + index, SIZE) for index in SHOWN]
    drawing.save_picture(picture, _draw(load_weights(folder), shown), "demo")
    print(f"kNN accuracy before training {before:.1f} %, after {after:.1f} %: {after - before:+.1f} points")
    print(f"the run:     {folder}")
    print(f"the weights: {folder}/backbone.safetensors")
    print(f"the picture: {picture}")
    print(f"{time.monotonic() - started:.0f} seconds")


def _draw(weights: Weights, shown: Sequence[Scene]) -> Image.Image:
    """Return a sheet with a row for each scene: queries, attention of `[CLS]` and queries, similarity, components."""
    patch = weights.vit.patch_size
    inputs = [analysis.prepare_image(scenes.KINDS[s.kind], s.image.transpose(2, 0, 1), 2 * SIZE, patch) for s in shown]
    patches = [analysis.patch_features(weights, image) for image in inputs]
    basis = analysis.fit_basis(torch.cat(patches))
    rows = []
    for scene, image, part in zip(shown, inputs, patches, strict=True):
        cells = figures.query_image(weights, image, query_boxes(scene)).cells(figures.CELL)
        colors = basis.colors(part).reshape(*image.grid(weights.vit), 3)
        cells.append(
            Tile(drawing.overlay_colors(drawing.display_image(image.pixels, figures.CELL), colors), "components")
        )
        rows.append(cells)
    return drawing.compose_sheet(rows, [image.name for image in inputs], figures.QUERY_BAR)


def query_boxes(scene: Scene) -> list[Box]:
    """Return two query boxes: a square in the middle of the largest object, and one in a corner that is ground."""
    largest = max(scene.objects, key=lambda t: int(t.mask.sum()))
    size, side = scene.image.shape[0], scene.image.shape[0] // 4
    left, top = ((largest.box[i] + largest.box[i + 2]) // 2 - side // 2 for i in (0, 1))
    labels = scene.labels()
    corners = [(x, y) for x in (0, size - side) for y in (0, size - side)]
    x, y = min(corners, key=lambda c: int((labels[c[1] : c[1] + side, c[0] : c[0] + side] > 0).sum()))
    on_object = (max(0, left), max(0, top), min(size, left + side), min(size, top + side))
    boxes = on_object, (x, y, x + side, y + side)
    return [(box[0] / size, box[1] / size, box[2] / size, box[3] / size) for box in boxes]
