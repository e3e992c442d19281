"""Objects with boxes and masks, in COCO's json: read as data, checked, and left out where they cannot be used.

DIR/annotations/instances_{train,val}.json (or instances_train2017.json and so on); the files it names lie below DIR,
DIR/images, DIR/images/SPLIT or DIR/SPLIT. As COCO has it: crowd regions are not learned and not counted as missed;
images without objects are not learned from and count in the test. Masks come as polygons or as run lengths.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adclr.config.sections import UserError
from adclr.data.decode import Decoder, Unreadable, size_of
from adclr.data.sources import Items, read_file
from adclr.system.machine import cpu_count
from adclr.system.optional import require
from adclr.system.progress import track
from adclr.system.text import printable

NAMED = 3  # offenders that a message names
OUTSIDE = 1.0  # pixels that a box may reach over the edge, by rounding
LEAST = 1e-2  # pixels that it is wide and high: float32 cannot tell the edges of less apart in a resized image


@dataclass(frozen=True)
class Object:
    number: int  # its id in the file
    kind: int  # place in `Instances.classes`
    box: tuple[float, float, float, float]  # left, top, right, bottom, inside the image
    mask: list[list[float]] | NDArray[np.int64]  # polygons, or run lengths down the columns beginning with background
    area: float
    crowd: bool


class Photos(Items):
    def __init__(self, root: Path, names: list[str]) -> None:
        super().__init__(root, names)


@dataclass(frozen=True)
class Instances:
    """The objects of a split's images."""

    photos: Photos
    sizes: NDArray[np.int64]  # height and width of each
    numbers: list[int]  # their ids in the file
    objects: list[list[Object]]  # of each
    classes: list[str]
    categories: list[int]  # their ids in the file

    def learned(self) -> NDArray[np.int64]:
        """Which images have an object that is no crowd."""
        return np.array([i for i, own in enumerate(self.objects) if any(not o.crowd for o in own)], np.int64)

    def without(self, places: set[int]) -> Instances:
        """The same less some images and what is in them."""
        left = [place for place in range(len(self.photos)) if place not in places]
        names, numbers = [self.photos.paths[i] for i in left], [self.numbers[i] for i in left]
        photos, objects = Photos(self.photos.root, names), [self.objects[i] for i in left]
        return replace(self, photos=photos, sizes=self.sizes[left], numbers=numbers, objects=objects)

    def dataset(self) -> dict[str, Any]:
        """In COCO's form again, for its measures."""
        images = [
            {"id": number, "height": int(height), "width": int(width), "file_name": name}
            for number, (height, width), name in zip(self.numbers, self.sizes, self.photos.paths, strict=True)
        ]
        annotations = []
        for image, own in zip(images, self.objects, strict=True):
            for one in own:
                left, top, right, bottom = one.box
                mask = one.mask
                if isinstance(mask, np.ndarray):
                    mask = {"size": [image["height"], image["width"]], "counts": mask.tolist()}  # type: ignore[assignment]
                annotations.append(
                    {
                        "id": one.number,
                        "image_id": image["id"],
                        "category_id": self.categories[one.kind],
                        "bbox": [left, top, right - left, bottom - top],
                        "segmentation": mask,
                        "area": one.area,
                        "iscrowd": int(one.crowd),
                    }
                )
        named = [{"id": c, "name": name} for c, name in zip(self.categories, self.classes, strict=True)]
        return {"info": {}, "images": images, "annotations": annotations, "categories": named}


def open_instances(path: str | Path, train: str, val: str, drop_bad: bool = False) -> tuple[Instances, Instances]:
    """The train and val objects; whatever is wrong with either is said now. `drop_bad` leaves bad objects out."""
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
    file = next((f for f in _candidates(root, split) if f.exists()), None)
    if file is None:
        raise UserError(
            f"{root} holds no annotations/instances_{split}.json; docs/dense.md says how objects are laid out"
        )
    try:
        found = json.loads(read_file(os.fspath(file)))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise UserError(f"{file} cannot be read ({reason}); restore it") from None
    if not isinstance(found, dict) or not all(
        isinstance(found.get(k), list) and all(isinstance(row, dict) for row in found[k])
        for k in ("images", "annotations", "categories")
    ):
        raise UserError(f"{file} has no lists of images, annotations and categories; it is not COCO's json")
    return _assemble(root, file, split, found, drop_bad)


def _candidates(root: Path, split: str) -> list[Path]:
    return [root / "annotations" / f"instances_{split}{year}.json" for year in ("", "2017")]


def _assemble(root: Path, file: Path, split: str, found: dict[str, Any], drop_bad: bool) -> Instances:
    categories = sorted((row.get("id"), row.get("name")) for row in found["categories"] if _is_category(row))
    if (
        len(categories) != len(found["categories"])
        or not categories
        or len({c for c, _ in categories}) < len(categories)
    ):
        raise UserError(f"{file} has categories without an id and a name, or two of one id; mend them")
    rows = found["images"]
    for row in rows:
        told = [row.get(key) for key in ("id", "width", "height")]
        if not all(_is_whole(n) for n in told) or min(told[1:]) < 1 or not isinstance(row.get("file_name"), str):
            raise UserError(f"{file} has an image without id, width, height or file_name: {str(row)[:80]}; mend it")
    numbers = [int(row["id"]) for row in rows]
    if not rows or len(set(numbers)) < len(numbers):
        raise UserError(f"{file} lists no image, or two of one id; mend it")
    names = [os.path.normpath(row["file_name"]) for row in rows]
    folder = _folder(root, split, names)
    missing = [n for n in names if os.path.isabs(n) or n.startswith("..") or not os.path.isfile(folder / n)]
    _refuse([f"{name}, which {file.name} names, is not in {folder}" for name in missing], "bring the files there")
    places = {number: place for place, number in enumerate(numbers)}
    kinds = {number: place for place, (number, _) in enumerate(categories)}
    sizes = np.array([[row["height"], row["width"]] for row in rows], np.int64)
    objects: dict[int, list[Object]] = defaultdict(list)
    problems, seen = [], set()
    for row in found["annotations"]:
        number = row.get("id")
        try:
            if not _is_whole(number) or number in seen:
                raise ValueError("has no id, or one that another has")
            seen.add(number)
            if row.get("image_id") not in places or row.get("category_id") not in kinds:
                raise ValueError(f"is of an image or category that is not listed ({row.get('image_id')!r})"[:100])
            place = places[row["image_id"]]
            objects[place].append(_object(row, kinds[row["category_id"]], *sizes[place].tolist()))
        except (ValueError, TypeError, OverflowError) as error:
            problems.append(f"object {number!r} of {file.name} {error}"[:200])
    if not drop_bad:
        _refuse(problems, "mend them, or set drop_bad=true to leave them out")
    elif problems:
        print(printable(f"{len(problems)} objects of {file} are left out, first: {problems[0]}"))
    own = [objects[place] for place in range(len(rows))]
    return Instances(Photos(folder, names), sizes, numbers, own, [n for _, n in categories], [c for c, _ in categories])


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _is_category(row: dict[str, Any]) -> bool:
    return _is_whole(row.get("id")) and isinstance(row.get("name"), str)


def _folder(root: Path, split: str, names: list[str]) -> Path:
    """Where the first files lie; if nowhere, where they most likely should."""
    places = [root / "images" / split, root / split, root / f"{split}2017", root / "images", root]
    there = [place for place in places if any(os.path.isfile(place / name) for name in names[:10])]
    return there[0] if there else next(place for place in places if os.path.isdir(place))


def _object(row: dict[str, Any], kind: int, height: int, width: int) -> Object:
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
    return Object(int(row["id"]), kind, inside, mask, area, bool(row.get("iscrowd", 0)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _mask(value: Any, height: int, width: int) -> list[list[float]] | NDArray[np.int64]:
    """Polygons kept inside the image, or run lengths that add up to it."""
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
            counts = runs_of(counts)
        if isinstance(counts, list) and all(_is_whole(n) and n >= 0 for n in counts) and sum(counts) == height * width:
            return np.array(counts, np.int64)
    raise ValueError("has no mask, or run lengths that do not fit its image")


def runs_of(text: str) -> list[int]:
    """The run lengths of COCO's compressed form: five bits a letter, and from the fourth on the difference to the last
    but one."""
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


def _refuse(problems: list[str], remedy: str) -> None:
    if problems:
        more = f", and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        raise UserError(f"{'; '.join(problems[:NAMED])}{more}; {remedy}")


def check(splits: Sequence[Instances], num_workers: int | None = None, show: bool = True) -> None:
    """Looks whether every image is as large as its file says, before anything is trained on them."""

    def one(place: tuple[Instances, int]) -> str | None:
        split, index = place
        wanted = tuple(split.sizes[index].tolist())
        try:
            data = split.photos.read(index)
            size = size_of(data)
            if size != wanted:  # unless it is to be turned
                _, *turned = Decoder()(data).shape
                size = turned[0], turned[1]
        except (Unreadable, OSError):
            return None  # images that cannot be read are counted where they are used
        if size == wanted:
            return None
        name = split.photos.root / split.photos.paths[index]
        return f"{name} is {size[1]}x{size[0]} pixels where its json says {wanted[1]}x{wanted[0]}"

    places = [(split, index) for split in splits for index in range(len(split.photos))]
    with ThreadPoolExecutor(num_workers or cpu_count()) as pool:
        found = list(track(pool.map(one, places), "checking images", len(places), show))
    _refuse([problem for problem in found if problem], "mend the images or the json")


# -- masks as pixels --


def filled(mask: list[list[float]] | NDArray[np.int64], height: int, width: int) -> NDArray[np.uint8]:
    """height×width, 1 where the object is, as COCO's own program fills polygons."""
    if isinstance(mask, np.ndarray):
        values = (np.arange(len(mask)) % 2).astype(np.uint8)
        return np.repeat(values, mask).reshape(width, height).T
    kernel = coco_masks()
    one = kernel.merge(kernel.frPyObjects(mask, height, width))
    found: NDArray[np.uint8] = kernel.decode(one)
    return found


def coco_masks() -> Any:
    """COCO's program for masks."""
    return require("faster_coco_eval.core.mask", "detection", "detection")
