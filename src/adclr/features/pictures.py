"""How maps are drawn: over their image, in colours that read well for the colour-blind, on sheets with labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from adclr.data.decode import Pixels
from adclr.features.analysis import Box, Floats, centres, enlarged
from adclr.system import outputs
from adclr.system.files import write_atomically
from adclr.system.fonts import Font, Lettering, lettering

Colour = tuple[int, int, int]
# Viridis, whose brightness rises evenly, at nine places
VIRIDIS = np.array(
    [
        (68, 1, 84), (71, 45, 123), (59, 82, 139), (44, 114, 142), (33, 145, 140), (40, 174, 128), (94, 201, 98),
        (170, 220, 50), (253, 231, 37),
    ],
    np.float64,
)  # fmt: skip
MARKS: tuple[Colour, ...] = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (204, 121, 167))  # of Okabe and Ito
INK, QUIET, PAPER = (20, 20, 20), (105, 105, 105), (255, 255, 255)
GAP, PAD = 6, 10  # pixels between cells, and around all
MIN_SCALE = 2.0  # of a map of attention: one without a peak is to look flat


def viridis(values: Floats) -> NDArray[np.uint8]:
    """Numbers in [0, 1] -> ...×3."""
    place = np.clip(values, 0, 1) * (len(VIRIDIS) - 1)
    rgb = [np.interp(place, np.arange(len(VIRIDIS)), VIRIDIS[:, channel]) for channel in range(3)]
    return np.stack(rgb, axis=-1).round().astype(np.uint8)


def shown(pixels: Pixels, side: int) -> Image.Image:
    """An image as people see it, its longer side so many pixels; of other than three channels the first, in grey."""
    colours = pixels if len(pixels) == 3 else pixels[[0, 0, 0]]
    image = Image.fromarray(np.ascontiguousarray(colours.transpose(1, 2, 0)))
    scale = side / max(image.size)
    size = tuple(max(1, round(n * scale)) for n in image.size)
    return image if size == image.size else image.resize((size[0], size[1]), Image.Resampling.BICUBIC)


def heat(image: Image.Image, values: Floats, top: float, bottom: float = 0.0, strength: float = 0.75) -> Image.Image:
    """A map over its image in grey, so that one sees what it lies on."""
    fine = enlarged(values, image.height, image.width)
    colours = viridis((fine - bottom) / max(top - bottom, 1e-12))
    grey = np.asarray(image.convert("L"), np.float64)[..., None]
    return Image.fromarray((strength * colours + (1 - strength) * grey).round().astype(np.uint8))


def attention_scale(values: Floats) -> float:
    """Return the upper end of the scale of a map of attention: where its top 0.5 % of patches begin, but at least 2."""
    return max(MIN_SCALE, float(np.percentile(values, 99.5)))


def attention(image: Image.Image, values: Floats) -> Image.Image:
    """Return a map of attention, of mean 1, over its image."""
    return heat(image, values, attention_scale(values))


def dimmed(image: Image.Image, kept: NDArray[np.bool_]) -> Image.Image:
    """The patches that are kept, as they are; the others dark and grey."""
    dark = Image.eval(image.convert("L"), lambda value: value // 4).convert("RGB")
    return Image.composite(image, dark, _mask(image, kept))


def tinted(image: Image.Image, colours: Floats, kept: NDArray[np.bool_] | None = None) -> Image.Image:
    """rows×columns×3 in [0, 1] enlarged to the image; patches that are not kept are dark."""
    fine = np.stack([enlarged(colours[..., channel], image.height, image.width) for channel in range(3)], axis=-1)
    found = Image.fromarray((fine * 255).round().astype(np.uint8))
    return found if kept is None else Image.composite(found, Image.new("RGB", image.size, INK), _mask(image, kept))


def _mask(image: Image.Image, kept: NDArray[np.bool_]) -> Image.Image:
    return Image.fromarray(kept.astype(np.uint8) * 255).resize(image.size, Image.Resampling.NEAREST)


def marked(image: Image.Image, boxes: Sequence[Box]) -> Image.Image:
    """With a frame around each box, bright in dark so that it shows on any ground."""
    found = image.copy()
    draw, width = ImageDraw.Draw(found), max(2, max(image.size) // 80)
    for number, (left, top, right, bottom) in enumerate(boxes):
        corners = (left * image.width, top * image.height, right * image.width - 1, bottom * image.height - 1)
        draw.rectangle(corners, outline=INK, width=width + 2)
        inner = tuple(c + d for c, d in zip(corners, (1, 1, -1, -1), strict=True))
        if inner[2] > inner[0] and inner[3] > inner[1]:
            draw.rectangle(inner, outline=mark(number), width=width)
    return found


def mark(number: int) -> Colour:
    return MARKS[number % len(MARKS)]


# -- sheets --


def spread(count: int, most: int) -> list[int]:
    """Returns at most `most` numbers below `count`, ascending and evenly spread, the first and the last among them."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64).tolist() if count and most else []


@dataclass(frozen=True)
class Cell:
    image: Image.Image
    title: str = ""
    note: str = ""  # small, behind the title
    colour: Colour = INK  # of the title


@dataclass(frozen=True)
class Bar:
    """What the colours mean."""

    low: str
    high: str
    about: str


def sheet(
    rows: Sequence[Sequence[Cell]], names: Sequence[str] = (), bar: Bar | None = None, about: str = "", text: int = 14
) -> Image.Image:
    """Cells in rows and columns, each with its title above it, the names of the rows at the left, colours below and
    under them, in as many lines as it takes, what else is to be known."""
    small = max(9, text - 3)
    columns = max(len(row) for row in rows)
    widths = [max(row[c].image.width for row in rows if c < len(row)) for c in range(columns)]
    beside = min(220, max((int(_length(*_short(name, small, 220))) for name in names), default=0))
    left = PAD + (beside + GAP if names else 0)
    line, total = text + 8, left + sum(widths) + GAP * (columns - 1) + PAD
    heads = [line if any(cell.title or cell.note for cell in row) else 0 for row in rows]
    talls = [max(cell.image.height for cell in row) for row in rows]
    words = _broken(about, small, total - left - PAD)
    foot = (line + 16 if bar else 0) + (len(words) * (text + 2) + GAP if words else 0)
    found = Image.new("RGB", (total, 2 * PAD + sum(heads) + sum(talls) + GAP * (len(rows) - 1) + foot), PAPER)
    draw = ImageDraw.Draw(found)
    y = PAD
    for number, row in enumerate(rows):
        x = left
        for cell, width in zip(row, widths, strict=False):
            if heads[number]:
                title, font = _short(cell.title, text, width)
                draw.text((x, y), title, fill=cell.colour, font=font)
                at = x + _length(title, font) + (6 if title else 0)
                note, font = lettering(cell.note, small)
                if at + _length(note, font) <= x + width:
                    draw.text((at, y + 2), note, fill=QUIET, font=font)
            found.paste(cell.image, (x, y + heads[number]))
            x += width + GAP
        if names:
            middle = y + heads[number] + talls[number] // 2
            name, font = _short(names[number], small, beside)
            draw.text((PAD, middle), name, fill=QUIET, font=font, anchor="lm")
        y += heads[number] + talls[number] + GAP
    if bar:
        _draw_bar(found, draw, left, y + 4, bar, text)
        y += line + 16
    for number, part in enumerate(words):
        part, font = lettering(part, small)
        draw.text((left, y + number * (text + 2)), part, fill=QUIET, font=font)
    return found


def _draw_bar(found: Image.Image, draw: ImageDraw.ImageDraw, x: int, y: int, bar: Bar, text: int) -> None:
    size = max(9, text - 2)
    font = lettering("", size).font
    at = x
    draw.text((at, y), bar.low, fill=INK, font=font)
    at += int(font.getlength(bar.low)) + GAP
    ramp = Image.fromarray(np.repeat(viridis(np.linspace(0, 1, 120, dtype=np.float32))[None], text, axis=0))
    found.paste(ramp, (at, y))
    at += ramp.width + GAP
    draw.text((at, y), bar.high, fill=INK, font=font)
    at += int(font.getlength(bar.high)) + 2 * GAP
    about, font = _short(bar.about, size, max(0, found.width - at - PAD))
    draw.text((at, y), about, fill=QUIET, font=font)


def _length(text: str, font: Font) -> float:
    return font.getlength(text)


def _short(text: str, size: int, width: float) -> Lettering:
    """As much of a text as fits, its end rather than its beginning: names of files differ there."""
    text, font = lettering(text, size)
    if font.getlength(text) <= width:
        return Lettering(text, font)
    while text and font.getlength(".." + text) > width:
        text = text[1:]
    return Lettering(".." + text if text else "", font)


def _broken(text: str, size: int, width: float) -> list[str]:
    """A text in lines of at most this width; a word that is longer is cut."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else ""
        if longer and _length(*lettering(longer, size)) <= width:
            lines[-1] = longer
        else:
            lines.append(_short(word, size, width).text)
    return lines


def wrapped(cells: Sequence[Cell], columns: int) -> list[Sequence[Cell]]:
    return [cells[start : start + columns] for start in range(0, len(cells), columns)]


def save(path: Path, image: Image.Image, command: str) -> None:
    write_atomically(path, outputs.png(image, command), durable=False)


# -- two images --


def lines(first: Image.Image, second: Image.Image, ends: Floats, strengths: Floats) -> Image.Image:
    """Two images side by side and lines between what matches; n×4: (x, y) in the first and in the second, as shares.

    A line's colour goes by its place in the first image, so that neighbours have like colours.
    """
    gap = max(GAP, first.width // 12)
    found = Image.new("RGB", (first.width + gap + second.width, max(first.height, second.height)), PAPER)
    found.paste(first, (0, 0))
    found.paste(second, (first.width + gap, 0))
    draw = ImageDraw.Draw(found, "RGBA")
    for (x, y, u, v), strength in zip(ends, strengths, strict=True):
        red, green, blue = viridis(np.array([0.4 + 0.3 * (x + y)], np.float32))[0].tolist()  # none of them dark
        start = x * first.width, y * first.height
        end = first.width + gap + u * second.width, v * second.height
        draw.line((*start, *end), fill=(red, green, blue, int(70 + 150 * strength)), width=max(1, first.width // 200))
        for px, py in (start, end):
            draw.ellipse((px - 2, py - 2, px + 2, py + 2), fill=(red, green, blue, 255))
    return found


def warped(first: Image.Image, second: Image.Image, places: Floats) -> Image.Image:
    """The second image drawn where the first has what it matches; rows×columns×2 places in the second, as shares."""
    rows, columns, _ = places.shape
    shift = places - centres((rows, columns)).reshape(places.shape)  # flat where places are not, so easy to enlarge
    x, y = centres((first.height, first.width)).reshape(first.height, first.width, 2).transpose(2, 0, 1)
    x = x + enlarged(shift[..., 0], first.height, first.width)
    y = y + enlarged(shift[..., 1], first.height, first.width)
    found = _sample(np.asarray(second, np.float64), x * second.width - 0.5, y * second.height - 0.5)
    return Image.fromarray(found.round().clip(0, 255).astype(np.uint8))


def _sample(source: NDArray[np.float64], x: Floats, y: Floats) -> NDArray[np.float64]:
    """Bilinear; beyond the edge is the edge."""
    height, width = source.shape[:2]
    x, y = x.clip(0, width - 1), y.clip(0, height - 1)
    left, top = np.floor(x).astype(np.int64), np.floor(y).astype(np.int64)
    right, bottom = np.minimum(left + 1, width - 1), np.minimum(top + 1, height - 1)
    a, b = (x - left)[..., None], (y - top)[..., None]
    upper = source[top, left] * (1 - a) + source[top, right] * a
    lower = source[bottom, left] * (1 - a) + source[bottom, right] * a
    return np.asarray(upper * (1 - b) + lower * b)
