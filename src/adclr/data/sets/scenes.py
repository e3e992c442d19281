"""Built-in images: small scenes of textured objects of ten kinds on textured grounds, rendered, never downloaded.

`scene(seed, index, size)` is a pure function. A scene's class is the kind of its largest object. Masks and boxes are
rendered with it, so that segmentation and detection have ground truth too. A kind is an outline, a texture and a range
of hues; position, size, rotation, shades, ground and up to three small objects vary.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from adclr.data.random_draws import Draws
from adclr.system.progress import track

Field = NDArray[np.float64]
FINE = 2  # samples across a pixel, averaged
SIZE, NUM_TRAIN, NUM_VAL = 64, 2000, 500  # side in pixels and number of scenes in the demo, which studies use too


@dataclass(frozen=True)
class Object:
    """One object of a scene."""

    kind: int
    mask: NDArray[np.bool_]  # size×size, where it is visible
    box: tuple[int, int, int, int]  # left, top, right, bottom of the mask, right and bottom exclusive


@dataclass(frozen=True)
class Scene:
    """A rendered image with its ground truth."""

    image: NDArray[np.uint8]  # size×size×3
    kind: int  # of the largest object
    objects: list[Object]  # from the back to the front; completely hidden ones are left out

    def labels(self) -> NDArray[np.uint8]:
        """Return size×size labels: 0 is ground, kind + 1 an object."""
        labels = np.zeros(self.image.shape[:2], np.uint8)
        for item in self.objects:
            labels[item.mask] = item.kind + 1
        return labels


def _polygon(x: Field, y: Field, corners: int, depth: float = 1.0) -> Field:
    """Return the distance, in radii, to the outline of a regular polygon or (depth < 1) star; negative inside."""
    angle, radius = np.arctan2(y, x), np.hypot(x, y)
    sector = 2 * np.pi / corners
    folded = np.abs((angle + np.pi / 2) % sector - sector / 2)  # 0 at a corner's opposite, sector/2 at a corner
    px, py = radius * np.cos(sector / 2 - folded), radius * np.sin(sector / 2 - folded)
    inner = depth * np.cos(sector / 2)
    edge = np.array([inner * np.cos(sector / 2) - 1, inner * np.sin(sector / 2)])
    normal = np.array([edge[1], -edge[0]]) / np.hypot(*edge)
    return np.asarray((px - 1) * normal[0] + py * normal[1])


OUTLINES: dict[str, Callable[[Field, Field], Field]] = {
    "disc": lambda x, y: np.hypot(x, y) - 0.9,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) - 0.8,
    "triangle": lambda x, y: _polygon(x, y, 3),
    "star": lambda x, y: _polygon(x, y, 5, 0.5),
    "ring": lambda x, y: abs(np.hypot(x, y) - 0.68) - 0.25,
    "cross": lambda x, y: np.maximum(np.minimum(abs(x), abs(y)) - 0.28, np.maximum(abs(x), abs(y)) - 0.92),
    "bar": lambda x, y: np.maximum(abs(x) - 1.0, abs(y) - 0.38),
    "moon": lambda x, y: np.maximum(np.hypot(x, y) - 0.95, 0.75 - np.hypot(x - 0.5, y)),
    "flower": lambda x, y: np.hypot(x, y) - 0.72 - 0.22 * np.cos(6 * np.arctan2(y, x)),
    "frame": lambda x, y: abs(np.maximum(abs(x), abs(y)) - 0.68) - 0.2,
}
TEXTURES: dict[str, Callable[[Field, Field], Field]] = {
    "disc": lambda x, y: np.sin(9 * x),
    "square": lambda x, y: np.sin(7 * x) * np.sin(7 * y),
    "triangle": lambda x, y: np.sin(11 * np.hypot(x, y)),
    "star": lambda x, y: np.cos(5 * np.arctan2(y, x)),
    "ring": lambda x, y: np.sin(8 * np.arctan2(y, x)),
    "cross": lambda x, y: np.sin(14 * (x + y)),
    "bar": lambda x, y: np.sin(14 * x),
    "moon": lambda x, y: 1.5 * y,
    "flower": lambda x, y: np.cos(7 * np.hypot(x, y)),
    "frame": lambda x, y: np.sin(10 * x) + np.sin(10 * y),
}
KINDS = tuple(OUTLINES)


class _Dice:
    """Random numbers of one scene, in the order in which they are drawn."""

    def __init__(self, seed: int, index: int) -> None:
        self.draws, self.count = Draws(seed, 0, np.array([index], np.uint64)), 0

    def between(self, low: float, high: float) -> float:
        self.count += 1
        return float(self.draws.uniform(f"scene {self.count}", 1, low=low, high=high)[0, 0])

    def below(self, count: int) -> int:
        return int(self.between(0, count))

    def color(self, hue: float, saturation: tuple[float, float], value: tuple[float, float]) -> NDArray[np.float64]:
        rgb = colorsys.hsv_to_rgb(hue % 1, self.between(*saturation), self.between(*value))
        return np.array(rgb)


def _ground(dice: _Dice, x: Field, y: Field) -> Field:
    """Return a gradient between two colors with a few waves over it."""
    first, second = (dice.color(dice.between(0, 1), (0.0, 0.15), (0.2, 0.4)) for _ in range(2))
    angle = dice.between(0, 2 * np.pi)
    mix = 0.5 + 0.35 * (np.cos(angle) * x + np.sin(angle) * y)
    for _ in range(3):
        angle, frequency, phase = dice.between(0, 2 * np.pi), dice.between(3, 22), dice.between(0, 2 * np.pi)
        mix = mix + 0.12 * np.sin(frequency * (np.cos(angle) * x + np.sin(angle) * y) + phase)
    mix = np.clip(mix, 0, 1)[..., None]
    return np.asarray(first * mix + second * (1 - mix))


def scene(seed: int, index: int, size: int = SIZE) -> Scene:
    """Render one large object and up to three small ones, which may hide a part of it."""
    dice = _Dice(seed, index)
    line = (np.arange(size * FINE) + 0.5) / (size * FINE) * 2 - 1
    x, y = np.meshgrid(line, line)
    picture = _ground(dice, x, y)
    placed: list[tuple[int, NDArray[np.bool_]]] = []
    for number in range(1 + dice.below(4)):
        kind = dice.below(len(KINDS))
        radius = dice.between(0.5, 0.75) if number == 0 else dice.between(0.15, 0.28)
        reach = 1.05 - radius if number == 0 else 0.9
        cx, cy = dice.between(-reach, reach), dice.between(-reach, reach)
        rotation = dice.between(-0.5, 0.5)
        u, v = (x - cx) / radius, (y - cy) / radius
        u, v = np.cos(rotation) * u + np.sin(rotation) * v, np.cos(rotation) * v - np.sin(rotation) * u
        inside = OUTLINES[KINDS[kind]](u, v) < 0
        wave = np.clip(0.5 + 0.5 * TEXTURES[KINDS[kind]](u, v), 0, 1)[..., None]
        hue = kind / len(KINDS) + dice.between(-0.05, 0.05)
        light, dark = dice.color(hue, (0.4, 0.7), (0.85, 1.0)), dice.color(hue + 0.1, (0.6, 1.0), (0.2, 0.4))
        paint = light * wave + dark * (1 - wave)
        picture = np.where(inside[..., None], paint, picture)
        placed = [(k, mask & ~inside) for k, mask in placed] + [(kind, inside)]
    image = picture.reshape(size, FINE, size, FINE, 3).mean(axis=(1, 3))
    objects: list[Object] = []
    covered = np.zeros((size, size), np.bool_)
    for kind, mask in reversed(placed):  # a pixel shared in halves belongs to the nearer object
        visible = (mask.reshape(size, FINE, size, FINE).mean(axis=(1, 3)) >= 0.5) & ~covered
        covered |= visible
        if visible.any():
            rows, columns = np.flatnonzero(visible.any(axis=1)), np.flatnonzero(visible.any(axis=0))
            box = int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
            objects.insert(0, Object(kind, visible, box))
    largest = max(objects, key=lambda item: int(item.mask.sum()))
    return Scene((image * 255).round().astype(np.uint8), largest.kind, objects)


def write_scenes(folder: Path, seed: int, num_train: int, num_val: int, size: int = SIZE, show: bool = True) -> None:
    """Write folder/{train,val}/KIND/NUMBER.png; val scenes are other scenes."""
    for split, first, count in (("train", 0, num_train), ("val", num_train, num_val)):
        for kind in KINDS:
            (folder / split / kind).mkdir(parents=True, exist_ok=True)
        for index in track(range(first, first + count), f"render {split}", count, show):
            rendered = scene(seed, index, size)
            Image.fromarray(rendered.image).save(folder / split / KINDS[rendered.kind] / f"{index:05d}.png")


def write_pixels(folder: Path, seed: int, first: int, num_train: int, num_val: int, size: int = SIZE) -> None:
    """Write folder/{images,labels}/{train,val}/NUMBER.png and classes.txt; scenes are counted from `first`."""
    for split, start, count in (("train", first, num_train), ("val", first + num_train, num_val)):
        for subfolder in ("images", "labels"):
            (folder / subfolder / split).mkdir(parents=True, exist_ok=True)
        for index in track(range(start, start + count), f"render pixels {split}", count):
            rendered = scene(seed, index, size)
            Image.fromarray(rendered.image).save(folder / "images" / split / f"{index:05d}.png")
            Image.fromarray(rendered.labels()).save(folder / "labels" / split / f"{index:05d}.png")
    (folder / "classes.txt").write_text("\n".join(["ground", *KINDS]) + "\n")
