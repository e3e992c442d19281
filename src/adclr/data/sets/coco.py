"""Objects with boxes and masks in COCO's JSON format, checked; bad objects are refused or left out.

DIR/annotations/instances_{train,val}.json (or instances_train2017.json and so on); the files it names are below DIR,
DIR/images, DIR/images/SPLIT or DIR/SPLIT. As in COCO, crowd regions are not learned and not counted as missed; images
without objects are not learned from and count in the test. Masks are polygons or run lengths.

The file is not trusted. faster-coco-eval fills masks, but only after the checks here: its index trusts every row, and
it compares run lengths with the size only while it fills all pixels, which may be a terabyte by a wrong size.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adclr.config.parsing import UserError
from adclr.data.sets import check_each, image_size, refuse, takes_url
from adclr.data.sources import Source, read_file
from adclr.system.optional import require
from adclr.system.text import printable

OUTSIDE = 1.0  # pixels that a box may reach over the border, by rounding
LEAST = 1e-2  # pixels, smallest side of a box: float32 cannot tell the edges of a smaller one apart in a resized image

Mask = list[list[float]] | NDArray[np.int64]  # polygons, or run lengths down the columns beginning with background


@dataclass(frozen=True)
class Instance:
    """One annotated object."""

    number: int  # its id in the file
    kind: int  # index in `Instances.classes`
    box: tuple[float, float, float, float]  # left, top, right, bottom, inside the image
    mask: Mask
    area: float
    crowd: bool


@dataclass(frozen=True)
class Instances:
    """The objects of a split's images."""

    photos: Source
    sizes: NDArray[np.int64]  # height and width of each
    numbers: list[int]  # their ids in the file
    objects: list[list[Instance]]  # of each
    classes: list[str]
    categories: list[int]  # their ids in the file

    def learned(self) -> NDArray[np.int64]:
        """Return the indices of images that have an object that is no crowd."""
        return np.array([i for i, objects in enumerate(self.objects) if any(not o.crowd for o in objects)], np.int64)

    def without(self, indices: set[int]) -> Instances:
        """Return the same without some images and their objects."""
        left = [index for index in range(len(self.photos)) if index not in indices]
        photos = Source(self.photos.root, [self.photos.paths[i] for i in left])
        numbers, objects = [self.numbers[i] for i in left], [self.objects[i] for i in left]
        return replace(self, photos=photos, sizes=self.sizes[left], numbers=numbers, objects=objects)

    def dataset(self) -> dict[str, Any]:
        """Return the annotations in COCO's format again, for its metrics."""
        images = [
            {"id": number, "height": int(height), "width": int(width), "file_name": name}
            for number, (height, width), name in zip(self.numbers, self.sizes, self.photos.paths, strict=True)
        ]
        annotations = []
        for image, objects in zip(images, self.objects, strict=True):
            for object_ in objects:
                left, top, right, bottom = object_.box
                annotation = {
                    "id": object_.number,
                    "image_id": image["id"],
                    "category_id": self.categories[object_.kind],
                }
                annotation |= {"bbox": [left, top, right - left, bottom - top], "area": object_.area}
                if isinstance(object_.mask, np.ndarray):
                    mask: Any = {"size": [image["height"], image["width"]], "counts": object_.mask.tolist()}
                else:
                    mask = object_.mask
                annotations.append(annotation | {"segmentation": mask, "iscrowd": int(object_.crowd)})
        categories = [{"id": c, "name": name} for c, name in zip(self.categories, self.classes, strict=True)]
        return {"info": {}, "images": images, "annotations": annotations, "categories": categories}


@takes_url
def open_instances(path: str | Path, train: str, val: str, drop_bad: bool = False) -> tuple[Instances, Instances]:
    """Return the train and val objects, both checked; `drop_bad` leaves bad objects out instead of refusing them."""
    root = Path(path)
    first, second = (_open(root, split, drop_bad) for split in (train, val))
    pairs = [dict(zip(split.categories, split.classes, strict=True)) for split in (first, second)]
    if pairs[0] != pairs[1]:
        differing = sorted({*pairs[0].items()} ^ {*pairs[1].items()})[0]
        raise UserError(
            f"the categories of {train} and {val} in {root} differ, first at {differing[0]} ({differing[1]}); "
            "give both files the same list"
        )
    if not len(first.learned()):
        raise UserError(f"no image of {train} in {root} has an object; there is nothing to learn from")
    return first, second


def _open(root: Path, split: str, drop_bad: bool) -> Instances:
    files = [root / "annotations" / f"instances_{split}{year}.json" for year in ("", "2017")]
    file = next((f for f in files if f.exists()), None)
    if file is None:
        raise UserError(
            f"{root} holds no annotations/instances_{split}.json; docs/dense.md says how objects are laid out"
        )
    try:
        content = json.loads(read_file(os.fspath(file)))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise UserError(f"{file} cannot be read ({reason}); restore it") from None
    if not isinstance(content, dict) or not all(
        isinstance(content.get(k), list) and all(isinstance(row, dict) for row in content[k])
        for k in ("images", "annotations", "categories")
    ):
        raise UserError(f"{file} has no lists of images, annotations and categories; it is not COCO's json")
    return _assemble(root, file, split, content, drop_bad)


def _assemble(root: Path, file: Path, split: str, content: dict[str, Any], drop_bad: bool) -> Instances:
    categories = sorted((row.get("id"), row.get("name")) for row in content["categories"] if _is_category(row))
    if (
        len(categories) != len(content["categories"])
        or not categories
        or len({c for c, _ in categories}) < len(categories)
    ):
        raise UserError(f"{file} has categories without an id and a name, or two of one id; fix them")
    rows = content["images"]
    for row in rows:
        values = [row.get(key) for key in ("id", "width", "height")]
        if not all(_is_whole(n) for n in values) or min(values[1:]) < 1 or not isinstance(row.get("file_name"), str):
            raise UserError(f"{file} has an image without id, width, height or file_name: {str(row)[:80]}; fix it")
    numbers = [int(row["id"]) for row in rows]
    if not rows or len(set(numbers)) < len(numbers):
        raise UserError(f"{file} lists no image, or two of one id; fix it")
    names = [os.path.normpath(row["file_name"]) for row in rows]
    folder = _folder(root, split, names)
    missing = [n for n in names if os.path.isabs(n) or n.startswith("..") or not os.path.isfile(folder / n)]
    refuse([f"{name}, which {file.name} names, is not in {folder}" for name in missing], "bring the files there")
    index_of = {number: index for index, number in enumerate(numbers)}
    kinds = {number: kind for kind, (number, _) in enumerate(categories)}
    sizes = np.array([[row["height"], row["width"]] for row in rows], np.int64)
    objects: dict[int, list[Instance]] = defaultdict(list)
    problems, ids = [], set()
    for row in content["annotations"]:
        number = row.get("id")
        try:
            if not _is_whole(number) or number in ids:
                raise ValueError("has no id, or one that another has")
            ids.add(number)
            if row.get("image_id") not in index_of or row.get("category_id") not in kinds:
                raise ValueError(f"is of an image or category that is not listed ({row.get('image_id')!r})"[:100])
            index = index_of[row["image_id"]]
            objects[index].append(_object(row, kinds[row["category_id"]], *sizes[index].tolist()))
        except (ValueError, TypeError, OverflowError) as error:
            problems.append(f"object {number!r} of {file.name} {error}"[:200])
    if not drop_bad:
        refuse(problems, "fix them, or set drop_bad=true to leave them out")
    elif problems:
        print(printable(f"{len(problems)} objects of {file} are left out, first: {problems[0]}"))
    classes, category_ids = [name for _, name in categories], [number for number, _ in categories]
    objects_of = [objects[index] for index in range(len(rows))]
    return Instances(Source(folder, names), sizes, numbers, objects_of, classes, category_ids)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _is_category(row: dict[str, Any]) -> bool:
    return _is_whole(row.get("id")) and isinstance(row.get("name"), str)


def _folder(root: Path, split: str, names: list[str]) -> Path:
    """Return the folder of the first files; if they are nowhere, the most likely one."""
    folders = [root / "images" / split, root / split, root / f"{split}2017", root / "images", root]
    with_files = (folder for folder in folders if any(os.path.isfile(folder / name) for name in names[:10]))
    return next(with_files, None) or next(folder for folder in folders if os.path.isdir(folder))


def _object(row: dict[str, Any], kind: int, height: int, width: int) -> Instance:
    box = row.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(_is_number(n) for n in box):
        raise ValueError("has no box of four numbers")
    left, top, across, down = (float(n) for n in box)
    if across < LEAST or down < LEAST:
        raise ValueError("has a box of no area")
    if left < -OUTSIDE or top < -OUTSIDE or left + across > width + OUTSIDE or top + down > height + OUTSIDE:
        raise ValueError(f"has a box that leaves its image of {width}x{height}")
    inside = (max(left, 0.0), max(top, 0.0), min(left + across, float(width)), min(top + down, float(height)))
    if inside[2] - inside[0] < LEAST or inside[3] - inside[1] < LEAST:
        raise ValueError("has a box of no area")
    mask = _mask(row.get("segmentation"), height, width)
    area = float(row["area"]) if _is_number(row.get("area")) else across * down
    return Instance(int(row["id"]), kind, inside, mask, area, bool(row.get("iscrowd", 0)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _mask(value: Any, height: int, width: int) -> Mask:
    """Return polygons clipped to the image, or run lengths whose sum is its size."""
    if isinstance(value, list) and value:
        polygons = []
        for line in value:
            if not isinstance(line, list) or len(line) < 6 or len(line) % 2 or not all(_is_number(n) for n in line):
                raise ValueError("has a polygon that is not at least three pairs of numbers")
            points = np.array(line, np.float64).reshape(-1, 2).clip(0, [width, height])
            polygons.append(points.flatten().tolist())
        return polygons
    if isinstance(value, dict) and value.get("size") == [height, width]:
        counts = value.get("counts")
        if isinstance(counts, str):
            counts = decode_runs(counts)
        if isinstance(counts, list) and all(_is_whole(n) and n >= 0 for n in counts) and sum(counts) == height * width:
            return np.array(counts, np.int64)
    raise ValueError("has no mask, or run lengths that do not fit its image")


def decode_runs(text: str) -> list[int]:
    """Return the run lengths of COCO's compressed form.

    Five bits a letter; from the fourth run on, the difference to the last but one.
    """
    runs: list[int] = []
    value = shift = 0
    for letter in text.encode("ascii", "replace"):
        part = letter - 48
        if not 0 <= part < 64 or shift > 40:
            raise ValueError("has run lengths that cannot be read")
        value |= (part & 31) << shift
        shift += 5
        if not part & 32:
            if part & 16:
                value -= 1 << shift
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return runs


def check(splits: Sequence[Instances], num_workers: int | None = None, show: bool = True) -> None:
    """Refuse images of another size than their JSON says, before anything is trained on them."""

    def problem_of(item: tuple[Instances, int]) -> str | None:
        split, index = item
        expected = tuple(split.sizes[index].tolist())
        size = image_size(lambda: split.photos.read(index), expected)
        if size is None or size == expected:
            return None
        name = split.photos.file(index)
        return f"{name} is {size[1]}x{size[0]} pixels where its json says {expected[1]}x{expected[0]}"

    items = [(split, index) for split in splits for index in range(len(split.photos))]
    check_each(items, problem_of, "fix the images or the json", "checking images", num_workers, show)


def fill_mask(mask: Mask, height: int, width: int) -> NDArray[np.uint8]:
    """Return height×width, 1 where the object is, with polygons filled as COCO's own program does."""
    if isinstance(mask, np.ndarray):
        values = (np.arange(len(mask)) % 2).astype(np.uint8)
        return np.repeat(values, mask).reshape(width, height).T
    masks = import_masks()
    pixels: NDArray[np.uint8] = masks.decode(masks.merge(masks.frPyObjects(mask, height, width)))
    return pixels


def import_masks() -> Any:
    """Return COCO's functions for masks, of faster-coco-eval."""
    return require("faster_coco_eval.core.mask", "detection", "detection")
