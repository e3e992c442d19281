"""Images with a class for every pixel: `images/ labels/ classes.txt`, or ADE20K's folders.

DIR/images/{train,val}/**.jpg with DIR/labels/{train,val}/**.png of the same names and DIR/classes.txt; or DIR/train and
DIR/val, each with images/, labels/ and classes.txt; or DIR/images and DIR/labels, which are split 80/20. ADE20K:
DIR/images/{training,validation}, DIR/annotations/{training,validation}, where 0 is no class and classes begin at 1.
A label is a gray or palette image whose values are class numbers. In memory an image and its label are one item with
one more channel, the last, in which `IGNORE` marks pixels that do not count.
"""

from __future__ import annotations

import io
import os
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from adclr.config.parsing import UserError
from adclr.data.decode import Decoder, Pixels, Unreadable, resize_channels
from adclr.data.sets import check_each, image_size, refuse, split_by_key, takes_url
from adclr.data.sources import ImageFolder, Source, index_folder, lost_folder, read_file

IGNORE = 255
MOST_CLASSES = 250
LABEL_FORMATS = ("PNG", "BMP", "TIFF", "GIF")  # which store values without loss
ADE = {"train": "training", "val": "validation"}


@dataclass(frozen=True)
class Numbering:
    """The meaning of the values of label files."""

    num_classes: int
    ignore: int
    reduced: bool  # 0 is no class, and classes begin at 1

    @cached_property
    def table(self) -> NDArray[np.int16]:
        """Return the class of each value, `IGNORE`, or -1 for a value that is no class."""
        table = np.full(2**16, -1, np.int16)
        first = int(self.reduced)
        table[first : first + self.num_classes] = np.arange(self.num_classes)
        table[self.ignore] = IGNORE
        if self.reduced:
            table[0] = IGNORE
        return table

    def __call__(self, values: NDArray[np.uint16]) -> NDArray[np.uint8]:
        """Return the class of each value, or raise `Unreadable`."""
        classes = self.table[values]
        if (classes < 0).any():
            wrong = int(values[classes < 0][0])
            first = int(self.reduced)
            raise Unreadable(
                f"has the value {wrong}, where classes are {first} to {first + self.num_classes - 1} "
                f"and {self.ignore} is ignored"
            )
        return classes.astype(np.uint8)


class Pairs(Source):
    """Images with labels; the bytes of an item are the length of the image's file, that file and the label's."""

    def __init__(self, images: Path, labels: Path, names: list[str], files: list[str]) -> None:
        super().__init__(images, names)
        self.labels, self.files = labels, files  # names of the label files

    def read(self, index: int) -> bytes:
        """Return the length of the image's file, that file and the label's."""
        image = self.image(index)
        return len(image).to_bytes(8, "big") + image + self.label_file(index)

    def lost(self, index: int) -> str | None:
        """Return the folder of the image or of the label if it has disappeared."""
        return super().lost(index) or lost_folder(os.path.join(self.labels, self.files[index]))

    def image(self, index: int) -> bytes:
        """Return the file of an image."""
        return read_file(self.file(index))

    def label_file(self, index: int) -> bytes:
        """Return the file of a label."""
        return read_file(os.path.join(self.labels, self.files[index]))

    def part(self, chosen: NDArray[np.int64]) -> Pairs:
        """Return some of the pairs."""
        return Pairs(Path(self.root), self.labels, [self.paths[i] for i in chosen], [self.files[i] for i in chosen])


@dataclass(frozen=True)
class PairDecoder:
    """`decoder(data)` returns (C+1)×height×width, the label last, or raises `Unreadable`."""

    image: Decoder
    numbering: Numbering
    largest: int | None = None  # shorter side to which larger ones are shrunk

    def __call__(self, data: bytes) -> Pixels:
        """Decode an image and its label."""
        length = int.from_bytes(data[:8], "big")
        pixels = self.image(data[8 : 8 + length])
        label = self.numbering(read_label(data[8 + length :]))
        if label.shape != pixels.shape[1:]:
            raise Unreadable(_sizes(pixels.shape[1:], label.shape))
        side = min(label.shape)
        if self.largest is not None and side > self.largest:
            height, width = (round(n * self.largest / side) for n in label.shape)
            pixels = resize_channels(pixels, height, width)
            label = resize_channels(label[None], height, width, Image.Resampling.NEAREST)[0]
        return np.concatenate([pixels, label[None]])


@dataclass(frozen=True)
class Segmented:
    """Images with a class for every pixel, in two splits."""

    train: Pairs
    val: Pairs
    classes: list[str]
    numbering: Numbering

    def decoder(self, image: Decoder, largest: int | None = None) -> PairDecoder:
        """Return a decoder of pairs; `largest` is the shorter side to which larger ones are shrunk."""
        return PairDecoder(image, self.numbering, largest)


def _sizes(image: tuple[int, ...], label: tuple[int, ...]) -> str:
    return f"is {label[1]}x{label[0]} pixels where its image is {image[1]}x{image[0]}"


def read_label(data: bytes, max_pixels: int = 100_000_000) -> NDArray[np.uint16]:
    """Return the values of a label file, height×width, or raise `Unreadable`."""
    try:
        with Image.open(io.BytesIO(data), formats=LABEL_FORMATS) as image:
            if image.width * image.height > max_pixels:
                raise Unreadable(f"is {image.width}x{image.height} pixels, too many")
            if image.mode not in ("1", "L", "P", "I;16", "I;16B", "I;16L", "I"):
                raise Unreadable(f"has colors (mode {image.mode}); a label is gray or has a palette")
            values = np.asarray(image)
    except Unreadable:
        raise
    except UnidentifiedImageError:
        raise Unreadable(f"is not an image of a kind that keeps numbers ({', '.join(LABEL_FORMATS)})") from None
    except Exception as error:  # decoders raise more kinds of error than they document
        raise Unreadable(f"cannot be read ({type(error).__name__})") from None
    if values.ndim != 2 or values.min(initial=0) < 0 or values.max(initial=0) >= 2**16:
        raise Unreadable("has values that are not class numbers")
    return values.astype(np.uint16)


@takes_url
def open_segmented(path: str | Path, train: str = "train", val: str = "val", ignore: int = IGNORE) -> Segmented:
    """Return the pairs of a folder, by their names alone; `check` reads them."""
    root = Path(path)
    if not os.path.isdir(root):
        raise UserError(f"folder {root} does not exist; give one with images/, labels/ and classes.txt")
    if os.path.isdir(root / "annotations" / ADE["train"]):
        return _open_ade(root, train, val, ignore)
    if os.path.isdir(root / train / "images"):
        classes, val_classes = (_read_classes(root, split, ignore) for split in (train, val))
        if classes != val_classes:
            pairs_of_names = zip_longest(classes, val_classes, fillvalue="no class")
            differing = next(pair for pair in pairs_of_names if pair[0] != pair[1])
            raise UserError(
                f"the classes of {root / train} and {root / val} differ, first {differing[0]} and {differing[1]}; "
                "give both the same classes.txt"
            )
        splits = [_pairs(root / split / "images", root / split / "labels") for split in (train, val)]
        return _segmented(splits[0], splits[1], classes, ignore, False)
    if not os.path.isdir(root / "images") or not os.path.isdir(root / "labels"):
        raise UserError(f"{root} holds no images/ and labels/; docs/dense.md says how labeled pixels are laid out")
    classes = _read_classes(root, "", ignore)
    if os.path.isdir(root / "images" / train):
        splits = [_pairs(root / "images" / split, root / "labels" / split) for split in (train, val)]
    else:
        if (train, val) != ("train", "val") or os.path.isdir(root / "images" / val):
            raise UserError(f"folder {root / 'images' / train} does not exist; train_split and val_split name two")
        whole = _pairs(root / "images", root / "labels")
        splits = [whole.part(indices) for indices in split_by_key(whole.keys)]
    return _segmented(splits[0], splits[1], classes, ignore, False)


def _segmented(train: Pairs, val: Pairs, classes: list[str], ignore: int, reduced: bool) -> Segmented:
    if not len(train) or not len(val):
        raise UserError(f"{train.root} has too few images to be split; give images/train and images/val")
    if not reduced and ignore < len(classes):
        raise UserError(f"ignore={ignore} is the number of the class {classes[ignore]}; choose another number")
    return Segmented(train, val, classes, Numbering(len(classes), ignore, reduced))


def _open_ade(root: Path, train: str, val: str, ignore: int) -> Segmented:
    """Open ADE20K; objectInfo150.txt, if it exists, has the names in the last column of 150 lines below a header."""
    classes = [f"class {number}" for number in range(1, 151)]
    file = root / "objectInfo150.txt"
    if file.exists():
        rows = [line.split("\t") for line in _lines(file)]
        named = {int(row[0]): row[-1].strip() for row in rows if row[0].strip().isdecimal()}
        if sorted(named) == list(range(1, 151)):
            classes = [named[number] for number in range(1, 151)]
    splits = [ADE.get(split, split) for split in (train, val)]
    pairs = [_pairs(root / "images" / split, root / "annotations" / split) for split in splits]
    return _segmented(pairs[0], pairs[1], classes, ignore, True)


def _pairs(images: Path, labels: Path) -> Pairs:
    if not os.path.isdir(labels):
        raise UserError(f"folder {labels} does not exist; it holds the labels of {images}")
    names = list(ImageFolder(images).paths)
    label_names = {os.path.splitext(name)[0]: name for name in index_folder(labels).names}
    files = [label_names.get(os.path.splitext(name)[0], "") for name in names]
    problems = [f"{images / name} has no label" for name, file in zip(names, files, strict=True) if not file]
    refuse(problems, _remedy(labels))
    return Pairs(images, labels, names, files)


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise UserError(f"{file} cannot be read ({reason}); write the name of a class on each line") from None


def _read_classes(root: Path, split: str, ignore: int) -> list[str]:
    """Return the class names: a name on each line, or a number, a space and a name; the ignored number is no class."""
    file = root / split / "classes.txt"
    file = file if file.exists() else root / "classes.txt"
    lines = _lines(file)
    rows = [re.fullmatch(r"\s*(\d+)[\s,:]+(\S.*)", line) for line in lines]
    if all(rows):
        numbered = {int(row[1]): row[2].strip() for row in rows if row}
        if len(numbered) < len(rows):
            raise UserError(f"{file} gives two classes one number; number each its own")
        numbered.pop(ignore, None)
        if sorted(numbered) != list(range(len(numbered))):
            raise UserError(f"the numbers in {file} do not run from 0 to {len(numbered) - 1}; renumber the classes")
        names = [numbered[number] for number in range(len(numbered))]
    else:
        names = [line.strip() for line in lines]
    if not 2 <= len(names) <= MOST_CLASSES:
        raise UserError(f"{file} names {len(names)} classes; there must be 2 to {MOST_CLASSES}")
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{file} names the class {name} twice; each name stands for one class")
    return names


def check(segmented: Segmented, num_workers: int | None = None, show: bool = True) -> None:
    """Read every label and the size of every image before anything is trained on them, and refuse bad ones."""

    def problem_of(item: tuple[Pairs, int]) -> str | None:
        pairs, index = item
        name = os.path.join(pairs.labels, pairs.files[index])
        try:
            label = segmented.numbering(read_label(pairs.label_file(index)))
        except (Unreadable, OSError) as error:
            return f"{name} {error.strerror if isinstance(error, OSError) else error}"
        size = image_size(lambda: pairs.image(index), label.shape)
        return None if size is None or size == label.shape else f"{name} {_sizes(size, label.shape)}"

    items = [(pairs, index) for pairs in (segmented.train, segmented.val) for index in range(len(pairs))]
    check_each(items, problem_of, _remedy(segmented.train.labels), "checking labels", num_workers, show)


def _remedy(labels: Path) -> str:
    return f"fix the labels in {labels} or take these images out"
