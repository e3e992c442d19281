"""Public labeled data sets on disk: `cifar10:DIR`, `cifar100:`, `flowers:`, `cars:`, `inat18:`, `inat19:DIR`.

torchvision reads the first four and never downloads. CIFAR's files are pickles; torchvision opens them only if their
MD5 is the published one. torchvision's iNaturalist has no splits, so the competition's own train20XX.json and
val20XX.json are read.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from adclr.config.parsing import UserError
from adclr.data.sets import takes_url
from adclr.data.sources import Source
from adclr.system.files import read_json
from adclr.system.optional import require
from adclr.system.text import one_line


class LabeledFiles(Source):
    """Image files below a folder, each with its class."""

    def __init__(self, root: Path, paths: Sequence[str], labels: Sequence[str]) -> None:
        super().__init__(root, paths)
        self.labels = labels

    def label(self, index: int) -> str | None:
        """Return the class of an image."""
        return self.labels[index]


class LabeledArrays(Source):
    """Images in memory; their bytes are BMP files, which decode to the same pixels."""

    def __init__(self, root: Path, split: str, images: NDArray[np.uint8], labels: Sequence[str]) -> None:
        super().__init__(root, [f"{split}/{number:06d}" for number in range(len(images))])
        self.images, self.labels = images, labels

    def file(self, index: int) -> str:  # noqa: ARG002
        """Return the folder of the data set."""
        return str(self.root)

    def read(self, index: int) -> bytes:
        """Return an image as a BMP file."""
        buffer = io.BytesIO()
        Image.fromarray(self.images[index]).save(buffer, "BMP")
        return buffer.getvalue()

    def label(self, index: int) -> str | None:
        """Return the class of an image."""
        return self.labels[index]


def _numbered(number: int, name: str) -> str:
    """Return a unique class name that sorts by its number; two classes may have the same name."""
    return f"{number:04d} {name}"


def _cifar(name: str) -> Callable[[Path], tuple[Source, Source]]:
    def open_splits(root: Path) -> tuple[Source, Source]:
        from torchvision import datasets

        def split(train: bool) -> Source:
            dataset: Any = getattr(datasets, name)(root, train=train, download=False)
            labels = [_numbered(target, dataset.classes[target]) for target in dataset.targets]
            return LabeledArrays(root, "train" if train else "test", dataset.data, labels)

        return split(True), split(False)

    return open_splits


def _flowers(root: Path) -> tuple[Source, Source]:
    """Open Flowers: the official train and val splits together (2040 images), as is usual, and test."""
    require("scipy.io", "transfer", "flowers:")
    from torchvision.datasets import Flowers102

    def split(*names: str) -> Source:
        parts: list[Any] = [Flowers102(root, split=name, download=False) for name in names]
        files = [os.path.relpath(file, root) for part in parts for file in part._image_files]
        return LabeledFiles(root, files, [_numbered(label, "flower") for part in parts for label in part._labels])

    return split("train", "val"), split("test")


def _cars(root: Path) -> tuple[Source, Source]:
    require("scipy.io", "transfer", "cars:")
    from torchvision.datasets import StanfordCars

    def split(name: str) -> Source:
        cars: Any = StanfordCars(root, split=name, download=False)
        files = [os.path.relpath(file, root) for file, _ in cars._samples]
        return LabeledFiles(root, files, [_numbered(label, cars.classes[label]) for _, label in cars._samples])

    return split("train"), split("test")


def _inaturalist(year: int) -> Callable[[Path], tuple[Source, Source]]:
    def split(root: Path, name: str) -> Source:
        if not (root / f"{name}{year}.json").exists():
            raise ValueError(f"there is no {name}{year}.json")
        content = read_json(root / f"{name}{year}.json")
        files = {image["id"]: str(image["file_name"]) for image in content["images"]}
        classes = {int(category["id"]): str(category["name"]) for category in content["categories"]}
        pairs = [
            (files[annotation["image_id"]], int(annotation["category_id"])) for annotation in content["annotations"]
        ]
        if any(os.path.isabs(file) or ".." in Path(file).parts for file, _ in pairs):
            raise ValueError("it names files outside of the folder")
        return LabeledFiles(root, [file for file, _ in pairs], [_numbered(label, classes[label]) for _, label in pairs])

    return lambda root: (split(root, "train"), split(root, "val"))


KINDS: dict[str, Callable[[Path], tuple[Source, Source]]] = {
    "cifar10": _cifar("CIFAR10"),
    "cifar100": _cifar("CIFAR100"),
    "flowers": _flowers,
    "cars": _cars,
    "inat18": _inaturalist(2018),
    "inat19": _inaturalist(2019),
}


def open_set(kind: str, folder: str) -> tuple[Source, Source]:
    """Return the train and the val split."""
    return _open_folder(folder, kind)


@takes_url
def _open_folder(folder: str | Path, kind: str) -> tuple[Source, Source]:
    root = Path(folder)
    if not os.path.isdir(root):
        raise UserError(f"folder {root} does not exist; check the path behind {kind}:")
    try:
        return KINDS[kind](root)
    except UserError:
        raise
    except Exception as error:  # many kinds, all about the files
        reason = one_line(error)
        raise UserError(f"{root} does not hold {kind} as it is published ({reason}); unpack it there") from None
