"""`adclr visualize`: attention, queries, principal components and matches of images, as pictures and numbers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field

from adclr.config.sections import Count, Device, Ratio, Section, Share, UserError
from adclr.config.settings import Side
from adclr.data import collection
from adclr.data.collection import open_source
from adclr.data.draws import key_of
from adclr.data.sources import SUFFIXES, Files, Source
from adclr.features import analysis, pictures
from adclr.features.analysis import Box, Floats, Seen
from adclr.features.pictures import Bar, Cell
from adclr.features.reader import ImageReader
from adclr.system import outputs
from adclr.system.devices import choose
from adclr.system.files import check_writable, write_json
from adclr.system.progress import track
from adclr.system.runs import provenance
from adclr.weights.backbone import Weights

ON_SHEET = 24  # images at most on the sheet of all
HEADS_ON_SHEET = 6
CELL = 160  # pixels, on a sheet
ATTENTION = Bar("0", "the top 0.5 %, at least 2x", "attention; x: times the mean of all patches")
BOTH = Bar(
    "0", "the top 0.5 %, at least 2x; cosine 1", "attention (x: times the mean); alike: cosine of answer and patch"
)
LINES = (
    "A line joins two patches that are each other's nearest. Its colour is that of its place in the left image, from "
    "teal at the upper left to yellow at the lower right; the more alike the patches, the stronger it is."
)
COMPONENTS = (
    "Red, green and blue are the first three principal components of the patches of all images: what has one colour is "
    "alike to the network; which colour it is means nothing."
)


class Look(Section):
    """What all pictures can be told."""

    size: Side | None = Field(
        None, description="shorter side of images in the network, pixels; null: twice what it was trained at"
    )
    num_images: Count | None = Field(32, description="images shown, spread over the collection; null: all")
    block: int = Field(-1, description="block whose attention or patches are shown; -1 is the last, 0 the first")
    device: Device = Field("auto", description="auto: the GPU if there is one")


class Attention(Look):
    mass: Ratio = Field(0.6, description="share of the attention that the thresholded picture keeps")


class Queries(Look):
    box: tuple[Ratio, Ratio, Ratio, Ratio] | None = Field(
        None, description="left, top, right, bottom of the query, of the width and height; null: drawn at random"
    )
    num_queries: Annotated[int, Field(ge=1, le=4)] = Field(2, description="queries drawn in each image")
    scale: tuple[Share, Share] = Field((0.05, 0.15), description="area of a drawn query, of the image's")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="of the drawing")
    across: Annotated[int, Field(ge=0, le=12)] = Field(
        4, description="images, spread over those shown, whose first queries are asked in all of these; 0: none"
    )


class Pca(Look):
    background: Literal["keep", "remove"] = Field(
        "keep", description="remove: only patches of things, as the first component and [CLS] part them from the ground"
    )


class Match(Look):
    num_lines: Count = Field(40, description="pairs that are drawn, the most alike")


Save = Callable[[str, Image.Image], None]
# files of all images, by the name of the picture
SHEETS = {name: (f"{name}.png",) for name in ("attention", "pca", "match")} | {
    "queries": ("queries.png", "queries_across.png")
}


@dataclass(frozen=True)
class Drawn:
    sheets: dict[str, Image.Image]  # by file name
    rows: list[dict[str, Any]]  # the numbers of each image
    about: dict[str, Any] = field(default_factory=dict)  # and of all together
    less: str = ""  # what is not on the sheets


def run(
    name: str, weights: str, images: Sequence[str], out: Path, settings: Look, overwrite: bool = False
) -> dict[str, Any]:
    """Draws; writes a picture of each image, a sheet of all and NAME.json to `out`; returns what that holds."""
    check_writable(out)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; choose another --out")
    record = out / f"{name}.json"
    outputs.check("visualize", [record, *(out / file for file in SHEETS[name])], overwrite, record)
    source = open_images(images)
    collection.check_apart(out, source)
    loaded = analysis.load(weights, choose(settings.device))
    depth = loaded.vit.depth
    if not -depth <= settings.block < depth:
        raise UserError(f"these weights have {depth} blocks, and no block {settings.block}; write 0 to {depth - 1}")
    seen = gather(source, loaded, settings)
    files = [out / file_name(number, one, name) for number, one in enumerate(seen)]
    outputs.check("visualize", files, overwrite, record)
    made: list[str] = []

    def save(file: str, picture: Image.Image) -> None:
        pictures.save(out / file, picture, "visualize")
        made.append(file)

    drawn = DRAW[name][1](loaded, seen, settings, save)
    for file, picture in drawn.sheets.items():
        pictures.save(out / file, picture, "visualize")
    report = {"weights": weights, "settings": settings.model_dump(mode="json"), **drawn.about, "images": drawn.rows}
    write_json(record, report | {"provenance": provenance() | outputs.signature("visualize")})
    print(f"written to {out}: {', '.join(drawn.sheets)}, {len(made)} single pictures, {name}.json")
    if drawn.less:
        print(drawn.less)
    return report


def open_images(words: Sequence[str]) -> Source:
    """A collection, or image files one by one."""
    files = [word for word in words if word.lower().endswith(SUFFIXES) and os.path.isfile(word)]
    if len(files) == len(words):
        return Files(files)
    if len(words) == 1:
        return open_source(words[0])
    wrong = next(word for word in words if word not in files)
    raise UserError(f"{wrong} is not an image file; name image files, or one folder")


def gather(source: Source, weights: Weights, settings: Look) -> list[Seen]:
    """The images to be shown; unreadable ones are named and left out."""
    size = settings.size or 2 * min(weights.vit.input_size)
    count = min(len(source), settings.num_images or len(source))
    chosen = np.linspace(0, len(source) - 1, count).round().astype(np.int64)
    if count < len(source):
        print(f"{count} of {len(source)} images, spread over the collection; num_images=null takes all")
    reader = ImageReader(source, weights.decoder, None, torch.device("cpu"))
    seen = []
    for index, pixels in track(reader.images(chosen.tolist()), "reading", count):
        seen.append(analysis.see(source.paths[index], pixels, size, weights.vit.patch_size, source.label(index)))
    reader.print_skipped(None)
    if not seen:
        raise UserError(f"none of the {count} images of {source.root} can be read; adclr doctor says more")
    return seen


def file_name(number: int, seen: Seen, what: str) -> str:
    """`0003_dogs_rex.attention.png`: unique, and of letters that every system takes."""
    stem = "".join(c if (c.isascii() and c.isalnum()) or c in "-_" else "_" for c in os.path.splitext(seen.name)[0])
    return f"{number:04d}_{stem[-80:]}.{what}.png"


def peak(values: Floats) -> str:
    return f"peak {values.max():.1f}x"


def side_of(seen: Seen) -> int:
    """The longer side in a picture of its own: never smaller than the network saw it."""
    return max(2 * CELL, *map(int, seen.pixels.shape[1:]))


def left_out(count: int, num_heads: int = 0) -> str:
    """What is on no sheet, in words for the sheet and for the terminal."""
    parts = [f"{ON_SHEET} of {count} images, spread over them"] if count > ON_SHEET else []
    parts += [f"heads 0 to {HEADS_ON_SHEET - 1} of {num_heads}"] if num_heads > HEADS_ON_SHEET else []
    return f"This sheet has {', and '.join(parts)}; the single pictures have all." if parts else ""


# -- attention --


def draw_attention(weights: Weights, seen: Sequence[Seen], settings: Attention, save: Save) -> Drawn:
    """Of each image: itself, the mean of the heads of `[CLS]`, the patches that hold most of it, and each head."""
    rows, found, on_sheet = [], [], pictures.spread(len(seen), ON_SHEET)
    for number, one in enumerate(track(seen, "attention", len(seen))):
        maps, _ = analysis.gaze(weights, one, analysis.read(weights, one), block=settings.block)
        cells = attention_cells(one, maps[:, 0], settings.mass, side_of(one))
        save(file_name(number, one, "attention"), pictures.sheet(pictures.wrapped(cells, 3), bar=ATTENTION))
        if number in on_sheet:
            rows.append(attention_cells(one, maps[: 1 + HEADS_ON_SHEET, 0], settings.mass, CELL))
        kept = analysis.heaviest(maps[0, 0], settings.mass)
        found.append({"name": one.name, "peak": float(maps[0].max()), "share_of_patches": float(kept.mean())})
    less = left_out(len(seen), weights.vit.num_heads)
    sheet = pictures.sheet(rows, [seen[number].name for number in on_sheet], ATTENTION, less)
    return Drawn({"attention.png": sheet}, found, less=less)


def attention_cells(seen: Seen, maps: Floats, mass: float, side: int) -> list[Cell]:
    """From (1+H)×rows×columns maps of `[CLS]`."""
    image = pictures.shown(seen.pixels, side)
    kept = analysis.heaviest(maps[0], mass)
    return [
        Cell(image, "image"),
        Cell(pictures.attention(image, maps[0]), "[CLS]", peak(maps[0])),
        Cell(pictures.dimmed(image, kept), f"{mass:.0%} of it", f"on {kept.mean():.0%}"),
        *(Cell(pictures.attention(image, values), f"head {n}", peak(values)) for n, values in enumerate(maps[1:])),
    ]


# -- queries --


@dataclass(frozen=True)
class Asked:
    """What an image answers to queries of its own."""

    seen: Seen
    boxes: Sequence[Box]
    cls: Floats  # rows×columns, attention of `[CLS]`
    attention: Floats  # Q×rows×columns, of the queries
    alike: Floats  # Q×rows×columns, cosine of each answer and the patches

    def cells(self, side: int) -> list[Cell]:
        image = pictures.shown(self.seen.pixels, side)
        cells = [
            Cell(pictures.marked(image, self.boxes), "image"),
            Cell(pictures.attention(image, self.cls), "[CLS]", peak(self.cls)),
        ]
        for n, (values, alike) in enumerate(zip(self.attention, self.alike, strict=True)):
            number = f" {n + 1}" if len(self.boxes) > 1 else ""
            colour = pictures.mark(n)
            cells.append(Cell(pictures.attention(image, values), f"query{number}", peak(values), colour))
            cells.append(Cell(pictures.heat(image, alike, 1.0), "alike", f"up to {alike.max():.2f}", colour))
        return cells


def ask(weights: Weights, seen: Seen, boxes: Sequence[Box], block: int = -1) -> Asked:
    memory = analysis.read(weights, seen)
    cls, _ = analysis.gaze(weights, seen, memory, block=block)
    crops = np.stack([seen.crop(box, weights.vit.patch_size) for box in boxes])
    maps, answers = analysis.gaze(weights, seen, memory, crops, block)
    alike = analysis.similarity(answers, memory.tokens.patches[0].float().cpu()).numpy()
    return Asked(seen, boxes, cls[0, 0], maps[0], alike.reshape(maps[0].shape))


def draw_queries(weights: Weights, seen: Sequence[Seen], settings: Queries, save: Save) -> Drawn:
    """Of each image: where its queries look in it; then the first query of some images in all of these."""
    rows, found, boxes = [], [], [query_boxes(one, settings) for one in seen]
    on_sheet = pictures.spread(len(seen), ON_SHEET)
    for number, one in enumerate(track(seen, "queries", len(seen))):
        asked = ask(weights, one, boxes[number], settings.block)
        save(
            file_name(number, one, "queries"), pictures.sheet(pictures.wrapped(asked.cells(side_of(one)), 4), bar=BOTH)
        )
        if number in on_sheet:
            rows.append(asked.cells(CELL))
        found.append({"name": one.name, "boxes": boxes[number], "peaks": asked.attention.max(axis=(1, 2)).tolist()})
    less = left_out(len(seen))
    sheets = {"queries.png": pictures.sheet(rows, [seen[number].name for number in on_sheet], BOTH, less)}
    if settings.across and len(seen) > 1:
        some = pictures.spread(len(seen), settings.across)
        sheets["queries_across.png"] = across(
            weights, [seen[number] for number in some], [boxes[number][0] for number in some], settings.block
        )
    return Drawn(sheets, found, less=less)


def query_boxes(seen: Seen, settings: Queries) -> list[Box]:
    if settings.box:
        left, top, right, bottom = settings.box
        if left >= right or top >= bottom:
            raise UserError(
                f"box={list(settings.box)} is empty; write left, top, right, bottom, such as [0.2,0.2,0.5,0.5]"
            )
        return [settings.box]
    return analysis.drawn_boxes(seen, key_of(seen.name), settings.num_queries, settings.scale, settings.seed)


def across(weights: Weights, seen: Sequence[Seen], boxes: Sequence[Box], block: int = -1) -> Image.Image:
    """Two rows for each image: where its query looks in every image, and which patches there are like its answer.

    Matched are images of its own class. The answer is that in its own image, for all of them."""
    memories = [analysis.read(weights, one) for one in seen]
    rows, names = [], []
    for own, memory, box in zip(seen, memories, boxes, strict=True):
        crop, image = own.crop(box, weights.vit.patch_size)[None], pictures.shown(own.pixels, CELL)
        _, answer = analysis.gaze(weights, own, memory, crop, block)
        upper = [Cell(pictures.marked(image, [box]), "query", colour=pictures.mark(0))]
        lower = [Cell(pictures.shown(crop[0], CELL), "as it is asked")]
        for one, kept in zip(seen, memories, strict=True):
            maps, _ = analysis.gaze(weights, one, kept, crop, block)
            alike = analysis.similarity(answer, kept.tokens.patches[0].float().cpu()).numpy().reshape(maps.shape[2:])
            image = pictures.shown(one.pixels, CELL)
            upper.append(Cell(pictures.attention(image, maps[0, 0]), relation(own, one), peak(maps[0, 0])))
            lower.append(Cell(pictures.heat(image, alike, 1.0), "alike", f"up to {alike.max():.2f}"))
        rows += [upper, lower]
        names += [own.name, ""]
    return pictures.sheet(rows, names, BOTH)


def relation(query: Seen, other: Seen) -> str:
    """The paper's words: matched are images of one class, where folders tell."""
    if query is other:
        return "itself"
    if query.label is None or other.label is None:
        return ""
    return "matched" if query.label == other.label else "mismatched"


# -- principal components --


def draw_pca(weights: Weights, seen: Sequence[Seen], settings: Pca, save: Save) -> Drawn:
    """The patches of all images in one basis: what has one colour is alike, within an image and between them."""
    features = [analysis.features(weights, one, settings.block) for one in track(seen, "patches", len(seen))]
    every, ends = torch.cat(features), np.cumsum([len(part) for part in features])[:-1]
    things = np.ones(len(every), np.bool_)
    if settings.background == "remove":
        cls = [analysis.gaze(weights, one, analysis.read(weights, one))[0][0, 0].ravel() for one in seen]
        things = analysis.foreground(every, np.concatenate(cls))
    basis = analysis.basis(every[torch.from_numpy(things)])
    less, removed = left_out(len(seen)), " Dark is the ground, which was left out." if not things.all() else ""
    about = COMPONENTS + removed
    cells, found, on_sheet = [], [], pictures.spread(len(seen), ON_SHEET)
    for number, (one, part, kept) in enumerate(zip(seen, features, np.split(things, ends), strict=True)):
        grid = one.grid(weights.vit)
        colours, mask = basis.colours(part).reshape(*grid, 3), kept.reshape(grid)
        single = [Cell(pictures.shown(one.pixels, side_of(one)), one.name)]
        single.append(Cell(pictures.tinted(single[0].image, colours, mask), "components"))
        save(file_name(number, one, "pca"), pictures.sheet([single], about=about))
        if number in on_sheet:
            image = pictures.shown(one.pixels, CELL)
            cells += [Cell(image, one.name), Cell(pictures.tinted(image, colours, mask))]
        found.append({"name": one.name, "share_of_things": float(kept.mean())})
    rows = pictures.wrapped(cells, 2 * min(4, math.ceil(math.sqrt(len(cells) / 2))))
    sheet = pictures.sheet(rows, about=f"{about} {less}")
    return Drawn({"pca.png": sheet}, found, {"explained_variance": basis.explained.tolist()}, less)


# -- matches --


@dataclass(frozen=True)
class Pair:
    """Two images and the patches of theirs that are each other's nearest."""

    first: Seen
    second: Seen
    grids: tuple[analysis.Grid, analysis.Grid]
    matches: analysis.Matches

    def ends(self) -> Floats:
        """n×4: (x, y) in the first image and in the second, as shares."""
        both = zip(self.grids, self.matches[:2], strict=True)
        return np.concatenate([analysis.centres(grid)[places] for grid, places in both], axis=1)

    def cells(self, side: int, num_lines: int) -> list[Cell]:
        first, second = (pictures.shown(one.pixels, side) for one in (self.first, self.second))
        drawn = pictures.lines(first, second, self.ends()[:num_lines], self.matches.cosine[:num_lines])
        warped = pictures.warped(first, second, analysis.flow(self.matches, *self.grids))
        pairs = len(self.matches.first)
        return [
            Cell(drawn, "mutual nearest patches", f"{min(num_lines, pairs)} of {pairs}"),
            Cell(warped, "second, warped"),
            Cell(Image.blend(first, warped, 0.5), "over the first"),
        ]


def draw_match(weights: Weights, seen: Sequence[Seen], settings: Match, save: Save) -> Drawn:
    """The first image and each other: lines between mutual nearest patches, and the other one warped onto the first."""
    if len(seen) < 2:
        raise UserError("a match is between two images, and only one is here; name the other one too")
    first, *others = seen
    features, grid = analysis.features(weights, first, settings.block), first.grid(weights.vit)
    rows, found, on_sheet = [], [], pictures.spread(len(others), ON_SHEET)
    for number, other in enumerate(track(others, "matching", len(others)), 1):
        matches = analysis.mutual(features, analysis.features(weights, other, settings.block))
        pair = Pair(first, other, (grid, other.grid(weights.vit)), matches)
        single = pictures.sheet(
            [pair.cells(side_of(first), settings.num_lines)], about=f"Left {first.name}, right {other.name}. {LINES}"
        )
        save(file_name(number, other, "match"), single)
        if number - 1 in on_sheet:
            rows.append(pair.cells(CELL, settings.num_lines))
        ends = pair.ends()
        found.append(
            {
                "name": other.name,
                "pairs": len(ends),
                "share_of_patches": len(ends) / len(features),
                "cosine_median": float(np.median(matches.cosine)),
                "shift_median": np.median(ends[:, 2:] - ends[:, :2], axis=0).tolist(),
            }
        )
    less = left_out(len(others))
    about = f"Left {first.name}, right the image that is named beside. {LINES} {less}"
    sheet = pictures.sheet(rows, [others[number].name for number in on_sheet], about=about)
    return Drawn({"match.png": sheet}, found, {"first": first.name}, less)


DRAW: dict[str, tuple[type[Look], Callable[..., Drawn]]] = {
    "attention": (Attention, draw_attention),
    "queries": (Queries, draw_queries),
    "pca": (Pca, draw_pca),
    "match": (Match, draw_match),
}
