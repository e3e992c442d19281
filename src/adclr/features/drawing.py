"""Drawing of maps: over their image, in colors that read well for the color-blind, on sheets with labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from adclr.data.decode import Pixels
from adclr.features.analysis import Box, Floats, enlarge, patch_centers
from adclr.system import outputs
from adclr.system.files import write_atomically
from adclr.system.fonts import DrawableText, Font, drawable_text

Color = tuple[int, int, int]
# Viridis, whose brightness rises evenly, at nine points
VIRIDIS = np.array(
    [
        (68, 1, 84), (71, 45, 123), (59, 82, 139), (44, 114, 142), (33, 145, 140), (40, 174, 128), (94, 201, 98),
        (170, 220, 50), (253, 231, 37),
    ],
    np.float64,
)  # fmt: skip
MARKS: tuple[Color, ...] = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (204, 121, 167))  # of Okabe and Ito
INK, QUIET, PAPER = (20, 20, 20), (105, 105, 105), (255, 255, 255)
GAP, PAD = 6, 10  # pixels between cells, and around all
MIN_SCALE = 2.0  # of a map of attention: one without a peak is to look flat


def viridis(values: Floats) -> NDArray[np.uint8]:
    """Return the colors of numbers in [0, 1], ... -> ...×3; those of a diverged network, which are not, count as 0."""
    positions = np.nan_to_num(np.clip(values, 0, 1)) * (len(VIRIDIS) - 1)
    rgb = [np.interp(positions, np.arange(len(VIRIDIS)), VIRIDIS[:, channel]) for channel in range(3)]
    return np.stack(rgb, axis=-1).round().astype(np.uint8)


def display_image(pixels: Pixels, side: int) -> Image.Image:
    """Return an image with a longer side of so many pixels; of other than three channels the first, in gray."""
    colors = pixels if len(pixels) == 3 else pixels[[0, 0, 0]]
    image = Image.fromarray(np.ascontiguousarray(colors.transpose(1, 2, 0)))
    scale = side / max(image.size)
    size = tuple(max(1, round(n * scale)) for n in image.size)
    return image if size == image.size else image.resize((size[0], size[1]), Image.Resampling.BICUBIC)


def heat(image: Image.Image, values: Floats, top: float, bottom: float = 0.0, strength: float = 0.75) -> Image.Image:
    """Return a map over its image in gray."""
    fine = enlarge(values, image.height, image.width)
    colors = viridis((fine - bottom) / max(top - bottom, 1e-12))
    gray = np.asarray(image.convert("L"), np.float64)[..., None]
    return Image.fromarray((strength * colors + (1 - strength) * gray).round().astype(np.uint8))


def attention_scale(values: Floats) -> float:
    """Return the upper end of the scale of a map of attention: where its top 0.5 % of patches begin, but at least 2."""
    return max(MIN_SCALE, float(np.percentile(values, 99.5)))


def overlay_attention(image: Image.Image, values: Floats) -> Image.Image:
    """Return a map of attention, of mean 1, over its image."""
    return heat(image, values, attention_scale(values))


def dimmed(image: Image.Image, mask: NDArray[np.bool_]) -> Image.Image:
    """Return an image with the patches outside of a mask dark and gray."""
    dark = Image.eval(image.convert("L"), lambda value: value // 4).convert("RGB")
    return Image.composite(image, dark, _enlarge_mask(image, mask))


def overlay_colors(image: Image.Image, colors: Floats, mask: NDArray[np.bool_] | None = None) -> Image.Image:
    """Return rows×columns×3 colors in [0, 1] enlarged to the image; patches outside of a mask are dark."""
    fine = np.stack([enlarge(colors[..., channel], image.height, image.width) for channel in range(3)], axis=-1)
    picture = Image.fromarray((np.nan_to_num(fine) * 255).round().astype(np.uint8))
    if mask is None:
        return picture
    return Image.composite(picture, Image.new("RGB", image.size, INK), _enlarge_mask(image, mask))


def _enlarge_mask(image: Image.Image, mask: NDArray[np.bool_]) -> Image.Image:
    return Image.fromarray(mask.astype(np.uint8) * 255).resize(image.size, Image.Resampling.NEAREST)


def outline_boxes(image: Image.Image, boxes: Sequence[Box]) -> Image.Image:
    """Return an image with a frame around each box, bright within dark so that it shows on any background."""
    picture = image.copy()
    draw, width = ImageDraw.Draw(picture), max(2, max(image.size) // 80)
    for number, (left, top, right, bottom) in enumerate(boxes):
        corners = (left * image.width, top * image.height, right * image.width - 1, bottom * image.height - 1)
        draw.rectangle(corners, outline=INK, width=width + 2)
        inner = tuple(c + d for c, d in zip(corners, (1, 1, -1, -1), strict=True))
        if inner[2] > inner[0] and inner[3] > inner[1]:
            draw.rectangle(inner, outline=mark(number), width=width)
    return picture


def mark(number: int) -> Color:
    """Return the color of a box by its number."""
    return MARKS[number % len(MARKS)]


# -- sheets --


def spread_evenly(count: int, most: int) -> list[int]:
    """Returns at most `most` numbers below `count`, ascending and evenly spread, the first and the last among them."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64).tolist() if count and most else []


@dataclass(frozen=True)
class Tile:
    """A picture on a sheet, with its title."""

    image: Image.Image
    title: str = ""
    note: str = ""  # small, after the title
    color: Color = INK  # of the title


@dataclass(frozen=True)
class ColorBar:
    """A color bar and its meaning."""

    low: str
    high: str
    about: str


def compose_sheet(
    rows: Sequence[Sequence[Tile]],
    names: Sequence[str] = (),
    bar: ColorBar | None = None,
    about: str = "",
    text: int = 14,
) -> Image.Image:
    """Return cells in rows and columns on one sheet.

    Each has its title above it. The names of the rows are at the left, the color bar below, and under it `about`, in as
    many lines as it takes. `text` is the size of the letters.
    """
    small = max(9, text - 3)
    columns = max(len(row) for row in rows)
    widths = [max(row[c].image.width for row in rows if c < len(row)) for c in range(columns)]
    names_width = min(220, max((int(_length(*_shorten(name, small, 220))) for name in names), default=0))
    left = PAD + (names_width + GAP if names else 0)
    line, total = text + 8, left + sum(widths) + GAP * (columns - 1) + PAD
    heads = [line if any(cell.title or cell.note for cell in row) else 0 for row in rows]
    heights = [max(cell.image.height for cell in row) for row in rows]
    about_lines = _wrap(about, small, total - left - PAD)
    foot = (line + 16 if bar else 0) + (len(about_lines) * (text + 2) + GAP if about_lines else 0)
    picture = Image.new("RGB", (total, 2 * PAD + sum(heads) + sum(heights) + GAP * (len(rows) - 1) + foot), PAPER)
    draw = ImageDraw.Draw(picture)
    y = PAD
    for number, row in enumerate(rows):
        x = left
        for cell, width in zip(row, widths, strict=False):
            if heads[number]:
                title, font = _shorten(cell.title, text, width)
                draw.text((x, y), title, fill=cell.color, font=font)
                note_x = x + _length(title, font) + (6 if title else 0)
                note, font = drawable_text(cell.note, small)
                if note_x + _length(note, font) <= x + width:
                    draw.text((note_x, y + 2), note, fill=QUIET, font=font)
            picture.paste(cell.image, (x, y + heads[number]))
            x += width + GAP
        if names:
            middle = y + heads[number] + heights[number] // 2
            name, font = _shorten(names[number], small, names_width)
            draw.text((PAD, middle), name, fill=QUIET, font=font, anchor="lm")
        y += heads[number] + heights[number] + GAP
    if bar:
        _draw_bar(picture, draw, left, y + 4, bar, text)
        y += line + 16
    for number, about_line in enumerate(about_lines):
        words, font = drawable_text(about_line, small)
        draw.text((left, y + number * (text + 2)), words, fill=QUIET, font=font)
    return picture


def _draw_bar(picture: Image.Image, draw: ImageDraw.ImageDraw, x: int, y: int, bar: ColorBar, text: int) -> None:
    size = max(9, text - 2)
    font = drawable_text("", size).font
    draw.text((x, y), bar.low, fill=INK, font=font)
    x += int(font.getlength(bar.low)) + GAP
    ramp = Image.fromarray(np.repeat(viridis(np.linspace(0, 1, 120, dtype=np.float32))[None], text, axis=0))
    picture.paste(ramp, (x, y))
    x += ramp.width + GAP
    draw.text((x, y), bar.high, fill=INK, font=font)
    x += int(font.getlength(bar.high)) + 2 * GAP
    about, font = _shorten(bar.about, size, max(0, picture.width - x - PAD))
    draw.text((x, y), about, fill=QUIET, font=font)


def _length(text: str, font: Font) -> float:
    return font.getlength(text)


def _shorten(text: str, size: int, width: float) -> DrawableText:
    """Return as much of a text as fits, its end rather than its beginning: names of files differ there."""
    text, font = drawable_text(text, size)
    if font.getlength(text) <= width:
        return DrawableText(text, font)
    while text and font.getlength(".." + text) > width:
        text = text[1:]
    return DrawableText(".." + text if text else "", font)


def _wrap(text: str, size: int, width: float) -> list[str]:
    """Return a text in lines of at most this width; a longer word is cut."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else ""
        if longer and _length(*drawable_text(longer, size)) <= width:
            lines[-1] = longer
        else:
            lines.append(_shorten(word, size, width).text)
    return lines


def wrapped(cells: Sequence[Tile], columns: int) -> list[Sequence[Tile]]:
    """Return cells in rows of so many columns."""
    return [cells[start : start + columns] for start in range(0, len(cells), columns)]


def save_picture(path: Path, image: Image.Image, command: str) -> None:
    """Write a PNG file that says which command wrote it."""
    write_atomically(path, outputs.encode_png(image, command), durable=False)


# -- two images --


def lines(first: Image.Image, second: Image.Image, ends: Floats, strengths: Floats) -> Image.Image:
    """Return two images side by side with lines between matches, n×4: (x, y) in the first and second, as shares.

    A line has the color of its position in the first image, so that neighbors have similar colors.
    """
    gap = max(GAP, first.width // 12)
    picture = Image.new("RGB", (first.width + gap + second.width, max(first.height, second.height)), PAPER)
    picture.paste(first, (0, 0))
    picture.paste(second, (first.width + gap, 0))
    draw = ImageDraw.Draw(picture, "RGBA")
    for (x, y, u, v), strength in zip(ends, strengths, strict=True):
        red, green, blue = viridis(np.array([0.4 + 0.3 * (x + y)], np.float32))[0].tolist()  # none of them dark
        start = x * first.width, y * first.height
        end = first.width + gap + u * second.width, v * second.height
        draw.line((*start, *end), fill=(red, green, blue, int(70 + 150 * strength)), width=max(1, first.width // 200))
        for px, py in (start, end):
            draw.ellipse((px - 2, py - 2, px + 2, py + 2), fill=(red, green, blue, 255))
    return picture


def warped(first: Image.Image, second: Image.Image, flow: Floats) -> Image.Image:
    """Return the second image warped onto the first by rows×columns×2 positions in the second, as shares."""
    rows, columns, _ = flow.shape
    shift = flow - patch_centers((rows, columns)).reshape(flow.shape)  # smoother than positions, so easier to enlarge
    x, y = patch_centers((first.height, first.width)).reshape(first.height, first.width, 2).transpose(2, 0, 1)
    x = x + enlarge(shift[..., 0], first.height, first.width)
    y = y + enlarge(shift[..., 1], first.height, first.width)
    pixels = _sample(np.asarray(second, np.float64), x * second.width - 0.5, y * second.height - 0.5)
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))


def _sample(source: NDArray[np.float64], x: Floats, y: Floats) -> NDArray[np.float64]:
    """Return bilinear samples; beyond the edge is the edge."""
    height, width = source.shape[:2]
    x, y = x.clip(0, width - 1), y.clip(0, height - 1)
    left, top = np.floor(x).astype(np.int64), np.floor(y).astype(np.int64)
    right, bottom = np.minimum(left + 1, width - 1), np.minimum(top + 1, height - 1)
    a, b = (x - left)[..., None], (y - top)[..., None]
    upper = source[top, left] * (1 - a) + source[top, right] * a
    lower = source[bottom, left] * (1 - a) + source[bottom, right] * a
    return np.asarray(upper * (1 - b) + lower * b)
