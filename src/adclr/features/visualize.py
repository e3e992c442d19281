"""`adclr visualize`: reads images and writes a figure of them, as pictures and numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adclr.config.parsing import UserError
from adclr.data import collection
from adclr.data.collection import open_source
from adclr.data.sources import SUFFIXES, Files, Source
from adclr.features import analysis, drawing, figures
from adclr.features.analysis import InputImage
from adclr.features.figures import Figure, FigureSettings, picture_file
from adclr.features.reader import ImageReader
from adclr.system import outputs
from adclr.system.devices import select_device
from adclr.system.files import check_writable, write_json
from adclr.system.progress import track
from adclr.system.runs import provenance
from adclr.system.text import printable
from adclr.weights.backbone import Weights

FIGURES: dict[str, tuple[type[FigureSettings], Callable[..., Figure]]] = {
    "attention": (figures.AttentionSettings, figures.draw_attention),
    "queries": (figures.QueriesSettings, figures.draw_queries),
    "pca": (figures.PcaSettings, figures.draw_pca),
    "match": (figures.MatchSettings, figures.draw_match),
}
# files of all images, by the name of the figure
SHEETS = {name: (f"{name}.png",) for name in ("attention", "pca", "match")} | {
    "queries": ("queries.png", "queries_across.png", "queries_against.png")
}


def write_figures(
    name: str, weights: str, images: Sequence[str], out: Path, settings: FigureSettings, overwrite: bool = False
) -> dict[str, Any]:
    """Write a picture of each image, a sheet of all and NAME.json to `out`; return what the JSON file holds."""
    check_writable(out)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; choose another --out")
    record = out / f"{name}.json"
    outputs.check_overwrite("visualize", [record, *(out / file for file in SHEETS[name])], overwrite, record)
    source = open_images(images)
    collection.check_apart(out, source)
    loaded = analysis.load(weights, select_device(settings.device))
    depth = loaded.vit.depth
    if not -depth <= settings.block < depth:
        raise UserError(f"these weights have {depth} blocks, and no block {settings.block}; write 0 to {depth - 1}")
    with_cls = loaded.vit.class_attention or depth
    if name == "attention" and settings.block % depth < depth - with_cls:
        raise UserError(f"these weights have [CLS] in the last {with_cls} blocks only; write block={-with_cls} to -1")
    inputs = _read_inputs(source, loaded, settings)
    files = [picture_file(out, number, image, name) for number, image in enumerate(inputs)]
    outputs.check_overwrite("visualize", files, overwrite, record)
    collection.check_no_images(out, record, overwrite)
    figure = FIGURES[name][1](loaded, inputs, settings, out)
    for file, picture in figure.sheets.items():
        drawing.save_picture(out / file, picture, "visualize")
    report = {"weights": weights, "settings": settings.model_dump(mode="json"), **figure.totals, "images": figure.rows}
    write_json(record, report | {"provenance": provenance() | outputs.signature("visualize")})
    print(
        f"written to {printable(str(out))}: {', '.join(figure.sheets)}, {len(figure.rows)} single pictures, {name}.json"
    )
    if figure.limits:
        print(figure.limits)
    return report


def open_images(words: Sequence[str]) -> Source:
    """Return the source of one collection or of image files named one by one."""
    files = [word for word in words if word.lower().endswith(SUFFIXES) and os.path.isfile(word)]
    if len(files) == len(words):
        return Files(files)
    if len(words) == 1:
        return open_source(words[0])
    wrong = next(word for word in words if word not in files)
    raise UserError(f"{wrong} is not an image file; name image files, or one folder")


def _read_inputs(source: Source, weights: Weights, settings: FigureSettings) -> list[InputImage]:
    """Return the images to be shown; print the unreadable ones and leave them out."""
    size = settings.size or 2 * min(weights.vit.input_size)
    count = min(len(source), settings.num_images or len(source))
    indices = np.linspace(0, len(source) - 1, count).round().astype(np.int64).tolist()
    if count < len(source):
        print(f"{count} of {len(source)} images, spread over the collection; num_images=null takes all")
    reader = ImageReader(source, weights.decoder, None, torch.device("cpu"))
    inputs = [
        analysis.prepare_image(source.paths[index], pixels, size, weights.vit.patch_size, source.label(index))
        for index, pixels in track(reader.images(indices), "reading", count)
    ]
    reader.print_skipped(None)
    if not inputs:
        raise UserError(f"none of the {count} images of {source.root} can be read; adclr doctor says more")
    return inputs
