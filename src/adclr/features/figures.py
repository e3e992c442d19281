"""The figures of `adclr visualize`: attention, queries, principal components and matches, with their settings."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field

from adclr.config.parsing import Count, Device, Ratio, Section, Share, Side, UserError
from adclr.data.decode import Pixels
from adclr.data.random_draws import key_of
from adclr.features import analysis, drawing
from adclr.features.analysis import Box, Floats, InputImage
from adclr.features.drawing import ColorBar, Tile
from adclr.system.progress import track
from adclr.weights.backbone import Weights

MAX_ON_SHEET = 24  # images on the sheet of all
HEADS_ON_SHEET = 6
CELL = 160  # pixels, on a sheet
ATTENTION = ColorBar("0", "the top 0.5 %, at least 2x", "attention; x: times the mean of all patches")
QUERY_BAR = ColorBar(
    "0", "the top 0.5 %, at least 2x; cosine 1", "attention (x: times the mean); similarity: cosine of output and patch"
)
LINES = (
    "A line joins two patches that are each other's nearest. Its color is that of its position in the left image, from "
    "teal at the upper left to yellow at the lower right; the more similar the patches, the stronger it is."
)
COMPONENTS = (
    "Red, green and blue are the first three principal components of the patches of all images: patches "
    "of one color have similar features; which color it is means nothing."
)


class FigureSettings(Section):
    """Settings of all figures."""

    size: Side | None = Field(None, description="shorter side of the images, pixels; null: twice the size of training")
    num_images: Count | None = Field(32, description="number of images, spread over the collection; null: all")
    block: int = Field(-1, description="block of the attention or patches; 0 is the first, -1 the last")
    device: Device = Field("auto", description="auto: the GPU if there is one")


@dataclass(frozen=True)
class Figure:
    """The sheets of all images and the numbers of each; the pictures of single images are files by then."""

    sheets: dict[str, Image.Image]  # by file name
    rows: list[dict[str, Any]]  # the numbers of each picture
    totals: dict[str, Any] = field(default_factory=dict)  # numbers of all images together
    limits: str = ""  # what the sheets leave out


def picture_file(out: Path, number: int, image: InputImage, figure: str) -> Path:
    """`0003_dogs_rex.attention.png`: unique, and of letters that every file system takes."""
    stem = "".join(c if (c.isascii() and c.isalnum()) or c in "-_" else "_" for c in os.path.splitext(image.name)[0])
    return out / f"{number:04d}_{stem[-80:]}.{figure}.png"


def _save_picture(out: Path, number: int, image: InputImage, figure: str, picture: Image.Image) -> None:
    drawing.save_picture(picture_file(out, number, image, figure), picture, "visualize")


def _peak(values: Floats) -> str:
    return f"peak {values.max():.1f}x"


def _picture_side(image: InputImage) -> int:
    """Return the longer side of an image in its own picture: never smaller than in the network."""
    return max(2 * CELL, *map(int, image.pixels.shape[1:]))


def _sheet_limits(count: int, num_heads: int = 0) -> str:
    """Return what a sheet leaves out, in words for the sheet and for the terminal."""
    parts = [f"{MAX_ON_SHEET} of {count} images, spread over them"] if count > MAX_ON_SHEET else []
    parts += [f"heads 0 to {HEADS_ON_SHEET - 1} of {num_heads}"] if num_heads > HEADS_ON_SHEET else []
    return f"This sheet has {', and '.join(parts)}; the single pictures have all." if parts else ""


# -- attention --


class AttentionSettings(FigureSettings):
    """Settings of `adclr visualize attention`."""

    mass: Ratio = Field(0.6, description="share of the attention in the thresholded picture")


def draw_attention(weights: Weights, images: Sequence[InputImage], settings: AttentionSettings, out: Path) -> Figure:
    """Draw each image, the mean of the heads of `[CLS]`, the patches that hold most of it, and each head."""
    cells, rows, on_sheet = [], [], drawing.spread_evenly(len(images), MAX_ON_SHEET)
    for number, image in enumerate(track(images, "attention", len(images))):
        maps, _ = analysis.attend(weights, image, analysis.read_memory(weights, image), block=settings.block)
        single = _attention_cells(image, maps[:, 0], settings.mass, _picture_side(image))
        _save_picture(out, number, image, "attention", drawing.compose_sheet(drawing.wrapped(single, 3), bar=ATTENTION))
        if number in on_sheet:
            cells.append(_attention_cells(image, maps[: 1 + HEADS_ON_SHEET, 0], settings.mass, CELL))
        mask = analysis.top_mass(maps[0, 0], settings.mass)
        rows.append({"name": image.name, "peak": float(maps[0].max()), "share_of_patches": float(mask.mean())})
    limits = _sheet_limits(len(images), weights.vit.num_heads)
    sheet = drawing.compose_sheet(cells, [images[number].name for number in on_sheet], ATTENTION, limits)
    return Figure({"attention.png": sheet}, rows, limits=limits)


def _attention_cells(image: InputImage, maps: Floats, mass: float, side: int) -> list[Tile]:
    """Return the cells of (1+H)×rows×columns maps of `[CLS]`."""
    shown = drawing.display_image(image.pixels, side)
    mask = analysis.top_mass(maps[0], mass)
    return [
        Tile(shown, "image"),
        Tile(drawing.overlay_attention(shown, maps[0]), "[CLS]", _peak(maps[0])),
        Tile(drawing.dimmed(shown, mask), f"{mass:.0%} of it", f"on {mask.mean():.0%}"),
        *(
            Tile(drawing.overlay_attention(shown, values), f"head {n}", _peak(values))
            for n, values in enumerate(maps[1:])
        ),
    ]


# -- queries --


class QueriesSettings(FigureSettings):
    """Settings of `adclr visualize queries`."""

    box: tuple[Ratio, Ratio, Ratio, Ratio] | None = Field(
        None, description="query box: left, top, right, bottom, as shares of width and height; null: random"
    )
    num_queries: Annotated[int, Field(ge=1, le=4)] = Field(2, description="random queries per image")
    scale: tuple[Share, Share] = Field((0.05, 0.15), description="area of a random query, as a share of the image")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="random seed of the queries")
    across: Annotated[int, Field(ge=0, le=12)] = Field(
        4, description="number of images whose first queries are compared across images; 0: none"
    )
    against: str | None = Field(None, description="second weights; queries_against.png compares the attention of both")


@dataclass(frozen=True)
class QueryMaps:
    """The attention and the answers of queries of an image to itself."""

    image: InputImage
    boxes: Sequence[Box]
    cls: Floats  # rows×columns, attention of `[CLS]`
    attention: Floats  # Q×rows×columns, of the queries
    similarity: Floats  # Q×rows×columns, cosine of each answer and the patches

    def cells(self, side: int) -> list[Tile]:
        """Return the image with its boxes, the attention of `[CLS]`, and two maps for each query."""
        shown = drawing.display_image(self.image.pixels, side)
        cells = [
            Tile(drawing.outline_boxes(shown, self.boxes), "image"),
            Tile(drawing.overlay_attention(shown, self.cls), "[CLS]", _peak(self.cls)),
        ]
        for n, (values, cosines) in enumerate(zip(self.attention, self.similarity, strict=True)):
            number, color = f" {n + 1}" if len(self.boxes) > 1 else "", drawing.mark(n)
            cells.append(Tile(drawing.overlay_attention(shown, values), f"query{number}", _peak(values), color))
            cells.append(_similarity_cell(shown, cosines, color))
        return cells


def _similarity_cell(shown: Image.Image, cosines: Floats, color: drawing.Color = drawing.INK) -> Tile:
    return Tile(drawing.heat(shown, cosines, 1.0), "similarity", f"up to {cosines.max():.2f}", color)


def query_image(weights: Weights, image: InputImage, boxes: Sequence[Box], block: int = -1) -> QueryMaps:
    """Return the maps of boxes of an image as queries to itself."""
    memory = analysis.read_memory(weights, image)
    cls, _ = analysis.attend(weights, image, memory, block=block)
    crops = np.stack([image.crop(box, weights.vit.patch_size) for box in boxes])
    maps, answers = analysis.attend(weights, image, memory, crops, block)
    cosines = analysis.similarity(answers, memory.tokens.patches[0].float().cpu()).numpy()
    return QueryMaps(image, boxes, cls[0, 0], maps[0], cosines.reshape(maps[0].shape))


def draw_queries(weights: Weights, images: Sequence[InputImage], settings: QueriesSettings, out: Path) -> Figure:
    """Draw the attention of the queries of each image in it, and the first query of some images in all of these."""
    other = _load_other(weights, images, settings)
    cells, rows, boxes = [], [], [_query_boxes(image, settings) for image in images]
    on_sheet = drawing.spread_evenly(len(images), MAX_ON_SHEET)
    for number, image in enumerate(track(images, "queries", len(images))):
        maps = query_image(weights, image, boxes[number], settings.block)
        single = drawing.compose_sheet(drawing.wrapped(maps.cells(_picture_side(image)), 4), bar=QUERY_BAR)
        _save_picture(out, number, image, "queries", single)
        if number in on_sheet:
            cells.append(maps.cells(CELL))
        rows.append({"name": image.name, "boxes": boxes[number], "peaks": maps.attention.max(axis=(1, 2)).tolist()})
    limits, totals = _sheet_limits(len(images)), dict[str, Any]()
    sheets = {
        "queries.png": drawing.compose_sheet(cells, [images[number].name for number in on_sheet], QUERY_BAR, limits)
    }
    if settings.across and len(images) > 1:
        numbers = drawing.spread_evenly(len(images), settings.across)
        first_boxes = [boxes[number][0] for number in numbers]
        asked = [images[n] for n in numbers], first_boxes, settings.block
        sheets["queries_across.png"] = _draw_across(weights, *asked)
        if other is not None:
            sheets["queries_against.png"], totals = _draw_against([weights, other], *asked)
    return Figure(sheets, rows, totals, limits)


def _query_boxes(image: InputImage, settings: QueriesSettings) -> list[Box]:
    if settings.box:
        left, top, right, bottom = settings.box
        if left >= right or top >= bottom:
            raise UserError(
                f"box={list(settings.box)} is empty; write left, top, right, bottom, such as [0.2,0.2,0.5,0.5]"
            )
        return [settings.box]
    return analysis.draw_boxes(image, key_of(image.name), settings.num_queries, settings.scale, settings.seed)


def _draw_across(weights: Weights, images: Sequence[InputImage], boxes: Sequence[Box], block: int) -> Image.Image:
    """Draw two rows for each image: the attention of its query in every image, and the patches like its answer.

    Matched are images of its own class. The answer is the one in the query's own image, for all of them."""
    memories = [analysis.read_memory(weights, image) for image in images]
    rows, names = [], []
    for query_image, query_memory, box in zip(images, memories, boxes, strict=True):
        crop = query_image.crop(box, weights.vit.patch_size)[None]
        _, answer = analysis.attend(weights, query_image, query_memory, crop, block)
        boxed = drawing.outline_boxes(drawing.display_image(query_image.pixels, CELL), [box])
        upper = [Tile(boxed, "query", color=drawing.mark(0))]
        lower = [Tile(drawing.display_image(crop[0], CELL), "resized to a patch")]
        for image, memory in zip(images, memories, strict=True):
            maps, _ = analysis.attend(weights, image, memory, crop, block)
            cosines = analysis.similarity(answer, memory.tokens.patches[0].float().cpu()).numpy()
            shown = drawing.display_image(image.pixels, CELL)
            relation = class_relation(query_image, image)
            upper.append(Tile(drawing.overlay_attention(shown, maps[0, 0]), relation, _peak(maps[0, 0])))
            lower.append(_similarity_cell(shown, cosines.reshape(maps.shape[2:])))
        rows += [upper, lower]
        names += [query_image.name, ""]
    return drawing.compose_sheet(rows, names, QUERY_BAR)


def _load_other(weights: Weights, images: Sequence[InputImage], settings: QueriesSettings) -> Weights | None:
    """Return the second network; refuse one that cannot be shown beside the first."""
    if settings.against is None:
        return None
    if not settings.across or len(images) < 2:
        raise UserError("against compares networks in several images; give two images or more, and across=2 or more")
    other = analysis.load(settings.against, weights.vit.cls_token.device)
    if other.vit.num_channels != weights.vit.num_channels:
        raise UserError(f"{settings.against} takes images of {other.vit.num_channels} channels; choose other weights")
    if not -other.vit.depth <= settings.block < other.vit.depth:
        raise UserError(f"{settings.against} has no block {settings.block}; write one of its {other.vit.depth}")
    return other


def _draw_against(
    networks: Sequence[Weights], images: Sequence[InputImage], boxes: Sequence[Box], block: int
) -> tuple[Image.Image, dict[str, Any]]:
    """Draw a row for each network: `[CLS]` of every image, then the query of each image in every image.

    The numbers are the peaks of the attention, as multiples of the mean of all patches.
    """
    names = [analysis.short_name(weights.report.source if weights.report else "") for weights in networks]
    shown = [drawing.display_image(image.pixels, CELL) for image in images]
    own_images, memories = [], []
    for weights in networks:  # whose patches may be of different sizes
        patch = weights.vit.patch_size
        own_images.append([analysis.prepare_image(x.name, x.pixels, min(x.pixels.shape[1:]), patch) for x in images])
        memories.append([analysis.read_memory(weights, image) for image in own_images[-1]])

    def attend(network: int, crops: Pixels | None) -> list[Floats]:
        pairs = zip(own_images[network], memories[network], strict=True)
        return [analysis.attend(networks[network], *pair, crops, block)[0][0, 0] for pair in pairs]

    rows, row_names = [], []
    numbers: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        maps = attend(number, None)
        cells = [Tile(drawing.overlay_attention(s, m), "[CLS]", _peak(m)) for s, m in zip(shown, maps, strict=True)]
        rows.append([Tile(Image.new("RGB", (1, 1), drawing.PAPER)), *cells])
        row_names.append(name)
        numbers.append({"weights": name, "cls": [float(m.max()) for m in maps], "queries": []})
    for asked, (image, box) in enumerate(zip(images, boxes, strict=True)):
        relations = [class_relation(image, other) for other in images]
        for number, name in enumerate(names):
            maps = attend(number, own_images[number][asked].crop(box, networks[number].vit.patch_size)[None])
            query = Tile(drawing.outline_boxes(shown[asked], [box]), "query", color=drawing.mark(0))
            parts = zip(shown, maps, relations, strict=True)
            rows.append([query, *(Tile(drawing.overlay_attention(s, m), word, _peak(m)) for s, m, word in parts)])
            row_names.append(name)
            query_row = {"image": image.name, "peaks": [float(m.max()) for m in maps], "relations": relations}
            numbers[number]["queries"].append(query_row)
    against = {"images": [image.name for image in images], "networks": numbers}
    return drawing.compose_sheet(rows, row_names, ATTENTION), {"against": against}


def class_relation(query: InputImage, other: InputImage) -> str:
    """Return the paper's word for two images: matched are those of one class, where folders are classes."""
    if query is other:
        return "itself"
    if query.label is None or other.label is None:
        return ""
    return "matched" if query.label == other.label else "mismatched"


# -- principal components --


class PcaSettings(FigureSettings):
    """Settings of `adclr visualize pca`."""

    background: Literal["keep", "remove"] = Field(
        "keep",
        description="remove: foreground patches only, selected by the first component and the attention of [CLS]",
    )


def draw_pca(weights: Weights, images: Sequence[InputImage], settings: PcaSettings, out: Path) -> Figure:
    """Draw the patches of all images in one basis: patches of one color are similar, within and between images."""
    features = [
        analysis.patch_features(weights, image, settings.block) for image in track(images, "patches", len(images))
    ]
    patches, ends = torch.cat(features), np.cumsum([len(part) for part in features])[:-1]
    foreground = np.ones(len(patches), np.bool_)
    if settings.background == "remove":
        cls = [
            analysis.attend(weights, image, analysis.read_memory(weights, image))[0][0, 0].ravel() for image in images
        ]
        foreground = analysis.foreground(patches, np.concatenate(cls))
    basis = analysis.fit_basis(patches[torch.from_numpy(foreground)])
    limits = _sheet_limits(len(images))
    about = COMPONENTS + (" Dark patches are background and are left out." if not foreground.all() else "")
    cells, rows, on_sheet = [], [], drawing.spread_evenly(len(images), MAX_ON_SHEET)
    for number, (image, part, mask) in enumerate(zip(images, features, np.split(foreground, ends), strict=True)):
        grid = image.grid(weights.vit)
        colors, grid_mask = basis.colors(part).reshape(*grid, 3), mask.reshape(grid)
        single = [Tile(drawing.display_image(image.pixels, _picture_side(image)), image.name)]
        single.append(Tile(drawing.overlay_colors(single[0].image, colors, grid_mask), "components"))
        _save_picture(out, number, image, "pca", drawing.compose_sheet([single], about=about))
        if number in on_sheet:
            shown = drawing.display_image(image.pixels, CELL)
            cells += [Tile(shown, image.name), Tile(drawing.overlay_colors(shown, colors, grid_mask))]
        rows.append({"name": image.name, "share_of_things": float(mask.mean())})
    num_columns = 2 * min(4, math.ceil(math.sqrt(len(cells) / 2)))
    sheet = drawing.compose_sheet(drawing.wrapped(cells, num_columns), about=f"{about} {limits}")
    return Figure({"pca.png": sheet}, rows, {"explained_variance": basis.explained.tolist()}, limits)


# -- matches --


class MatchSettings(FigureSettings):
    """Settings of `adclr visualize match`."""

    num_lines: Count = Field(40, description="number of most similar pairs to draw")


@dataclass(frozen=True)
class MatchedPair:
    """Two images and those of their patches that are each other's nearest neighbors."""

    first: InputImage
    second: InputImage
    grids: tuple[analysis.Grid, analysis.Grid]
    matches: analysis.Matches

    def ends(self) -> Floats:
        """Return n×4: (x, y) in the first image and in the second, as shares."""
        both = zip(self.grids, self.matches[:2], strict=True)
        return np.concatenate([analysis.patch_centers(grid)[indices] for grid, indices in both], axis=1)

    def cells(self, side: int, num_lines: int) -> list[Tile]:
        """Return the images with lines between their matches, and the second warped onto the first."""
        first, second = (drawing.display_image(image.pixels, side) for image in (self.first, self.second))
        joined = drawing.lines(first, second, self.ends()[:num_lines], self.matches.cosine[:num_lines])
        warped = drawing.warped(first, second, analysis.flow(self.matches, *self.grids))
        pairs = len(self.matches.first)
        return [
            Tile(joined, "mutual nearest patches", f"{min(num_lines, pairs)} of {pairs}"),
            Tile(warped, "second, warped"),
            Tile(Image.blend(first, warped, 0.5), "over the first"),
        ]


def draw_match(weights: Weights, images: Sequence[InputImage], settings: MatchSettings, out: Path) -> Figure:
    """Draw the first image and each other: lines between mutual nearest patches, and the other one warped onto it."""
    if len(images) < 2:
        raise UserError("a match is between two images, and only one is here; name the other one too")
    first, *others = images
    features, grid = analysis.patch_features(weights, first, settings.block), first.grid(weights.vit)
    cells, rows, on_sheet = [], [], drawing.spread_evenly(len(others), MAX_ON_SHEET)
    for number, other in enumerate(track(others, "matching", len(others)), 1):
        matches = analysis.mutual_neighbors(features, analysis.patch_features(weights, other, settings.block))
        pair = MatchedPair(first, other, (grid, other.grid(weights.vit)), matches)
        single = [pair.cells(_picture_side(first), settings.num_lines)]
        about = f"Left {first.name}, right {other.name}. {LINES}"
        _save_picture(out, number, other, "match", drawing.compose_sheet(single, about=about))
        if number - 1 in on_sheet:
            cells.append(pair.cells(CELL, settings.num_lines))
        ends = pair.ends()
        rows.append(
            {
                "name": other.name,
                "pairs": len(ends),
                "share_of_patches": len(ends) / len(features),
                "cosine_median": float(np.median(matches.cosine)),
                "shift_median": np.median(ends[:, 2:] - ends[:, :2], axis=0).tolist(),
            }
        )
    limits = _sheet_limits(len(others))
    about = f"Left {first.name}, right the image named beside the row. {LINES} {limits}"
    sheet = drawing.compose_sheet(cells, [others[number].name for number in on_sheet], about=about)
    return Figure({"match.png": sheet}, rows, {"first": first.name}, limits)
