"""Pictures of what a backbone looks at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from adclr.weights import Weights

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels
# Anchors of viridis, which reads well for the colour-blind and in grey
VIRIDIS = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], np.float64)
MARKS = ((230, 159, 0), (86, 180, 233))  # of the queries: orange and sky blue of Okabe and Ito's palette
CELL = 160  # pixels
MARGIN = 6


def colours(values: NDArray[np.float64]) -> Image.Image:
    """A map of numbers in [0, 1] as an image."""
    place = np.clip(values, 0, 1) * (len(VIRIDIS) - 1)
    rgb = np.stack([np.interp(place, np.arange(len(VIRIDIS)), VIRIDIS[:, c]) for c in range(3)], axis=-1)
    return Image.fromarray(rgb.round().astype(np.uint8))


def normalised(image: Image.Image, weights: Weights) -> Tensor:
    pixels = torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1).float() / 255
    return (pixels - torch.tensor(weights.mean).view(3, 1, 1)) / torch.tensor(weights.std).view(3, 1, 1)


def query_crop(image: Image.Image, box: Box, patch_size: int) -> Image.Image:
    return image.convert("RGB").crop(box).resize((patch_size, patch_size), Image.Resampling.BICUBIC)


@torch.no_grad()
def attention_maps(weights: Weights, image: Image.Image, boxes: Sequence[Box]) -> list[NDArray[np.float64]]:
    """Over the patches, the last block's attention (mean of heads) of `[CLS]` and of each query; each from 0 to 1."""
    vit = weights.vit
    device = vit.pos_embed.device
    pixels = normalised(image, weights).unsqueeze(0).to(device)
    crops = torch.stack([normalised(query_crop(image, box, vit.patch_size), weights) for box in boxes])
    attention = vit.attention(pixels, crops.unsqueeze(0).to(device))[0].mean(dim=0).cpu().double().numpy()
    grid = vit.grid_of(image.height, image.width)
    patches = slice(vit.num_prefix, vit.num_prefix + grid[0] * grid[1])
    maps = []
    for row in (0, *range(patches.stop, patches.stop + len(boxes))):
        found = attention[row, patches].reshape(grid)
        maps.append((found - found.min()) / max(float(np.ptp(found)), 1e-12))
    return maps


def attention_sheet(weights: Weights, images: Sequence[Image.Image], boxes: Sequence[Sequence[Box]]) -> Image.Image:
    """A row for each image: itself with its query boxes, the attention of `[CLS]`, and of each query."""
    columns = ["image", "attention of [CLS]", *(f"of query {n + 1}" for n in range(len(boxes[0])))]
    font = ImageFont.load_default(size=14)
    step, head = CELL + MARGIN, 26
    sheet = Image.new("RGB", (len(columns) * step + MARGIN, len(images) * step + head + MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(columns):
        draw.text((MARGIN + column * step, MARGIN), title, fill=MARKS[column - 2] if column > 1 else "black", font=font)
    for row, (image, own) in enumerate(zip(images, boxes, strict=True)):
        shown = image.convert("RGB").resize((CELL, CELL), Image.Resampling.BICUBIC)
        pen = ImageDraw.Draw(shown)
        for (left, top, right, bottom), mark in zip(own, MARKS, strict=False):
            scale = CELL / image.width, CELL / image.height
            corners = (left * scale[0], top * scale[1], right * scale[0] - 1, bottom * scale[1] - 1)
            pen.rectangle(corners, outline=mark, width=3)
        cells = [shown]
        for found in attention_maps(weights, image, own):
            cells.append(colours(found).resize((CELL, CELL), Image.Resampling.BICUBIC))
        for column, cell in enumerate(cells):
            sheet.paste(cell, (MARGIN + column * step, head + row * step))
    return sheet
