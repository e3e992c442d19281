"""Public labelled data sets as they lie on disk, as sources: `cifar10:DIR`, `cifar100:DIR`, `flowers:DIR`, `cars:DIR`,
`inat18:DIR`, `inat19:DIR`.

torchvision knows the layouts of the first four, and its loaders are asked never to download. CIFAR's files are pickles;
torchvision opens them only if their MD5 is the published one. Of iNaturalist its loader knows no splits, so the
competition's own train20XX.json and val20XX.json are read.
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

from adclr.config.sections import UserError
from adclr.data.sources import Items, Source
from adclr.system.files import read_json
from adclr.system.optional import require
from adclr.system.text import one_line


class Files(Items):
    """Images that lie below a folder, each with its class."""

    def __init__(self, root: Path, paths: Sequence[str], labels: Sequence[str]) -> None:
        super().__init__(root, paths)
        self.labels = labels

    def label(self, index: int) -> str | None:
        return self.labels[index]


class Arrays(Items):
    """Images in memory; as bytes they are BMP files, from which the same pixels come."""

    def __init__(self, root: Path, split: str, images: NDArray[np.uint8], labels: Sequence[str]) -> None:
        super().__init__(root, [f"{split}/{number:06d}" for number in range(len(images))])
        self.images, self.labels = images, labels

    def file(self, index: int) -> str:  # noqa: ARG002
        return str(self.root)

    def read(self, index: int) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(self.images[index]).save(buffer, "BMP")
        return buffer.getvalue()

    def label(self, index: int) -> str | None:
        return self.labels[index]


def numbered(number: int, name: str) -> str:
    """Class names of their own may be there twice; in this form they also sort as they are numbered."""
    return f"{number:04d} {name}"


def _cifar(name: str) -> Callable[[Path], tuple[Source, Source]]:
    def opened(root: Path) -> tuple[Source, Source]:
        from torchvision import datasets

        def split(train: bool) -> Source:
            found: Any = getattr(datasets, name)(root, train=train, download=False)
            labels = [numbered(target, found.classes[target]) for target in found.targets]
            return Arrays(root, "train" if train else "test", found.data, labels)

        return split(True), split(False)

    return opened


def _flowers(root: Path) -> tuple[Source, Source]:
    """Trained on the official train and val splits together (2040 images), as is usual, and scored on test."""
    require("scipy.io", "transfer", "flowers:")
    from torchvision.datasets import Flowers102

    def split(*names: str) -> Source:
        found: list[Any] = [Flowers102(root, split=name, download=False) for name in names]
        files = [os.path.relpath(file, root) for part in found for file in part._image_files]
        return Files(root, files, [numbered(label, "flower") for part in found for label in part._labels])

    return split("train", "val"), split("test")


def _cars(root: Path) -> tuple[Source, Source]:
    require("scipy.io", "transfer", "cars:")
    from torchvision.datasets import StanfordCars

    def split(name: str) -> Source:
        found: Any = StanfordCars(root, split=name, download=False)
        files = [os.path.relpath(file, root) for file, _ in found._samples]
        return Files(root, files, [numbered(label, found.classes[label]) for _, label in found._samples])

    return split("train"), split("test")


def _inaturalist(year: int) -> Callable[[Path], tuple[Source, Source]]:
    def split(root: Path, name: str) -> Source:
        if not (root / f"{name}{year}.json").exists():
            raise ValueError(f"there is no {name}{year}.json")
        told = read_json(root / f"{name}{year}.json")
        files = {image["id"]: str(image["file_name"]) for image in told["images"]}
        classes = {int(category["id"]): str(category["name"]) for category in told["categories"]}
        pairs = [(files[one["image_id"]], int(one["category_id"])) for one in told["annotations"]]
        if any(os.path.isabs(file) or ".." in Path(file).parts for file, _ in pairs):
            raise ValueError("it names files outside of the folder")
        return Files(root, [file for file, _ in pairs], [numbered(label, classes[label]) for _, label in pairs])

    return lambda root: (split(root, "train"), split(root, "val"))


KINDS: dict[str, Callable[[Path], tuple[Source, Source]]] = {
    "cifar10": _cifar("CIFAR10"),
    "cifar100": _cifar("CIFAR100"),
    "flowers": _flowers,
    "cars": _cars,
    "inat18": _inaturalist(2018),
    "inat19": _inaturalist(2019),
}


def open_set(kind: str, where: str) -> tuple[Source, Source]:
    """The train and the val split."""
    root = Path(where)
    if not os.path.isdir(root):
        raise UserError(f"folder {root} does not exist; check the path behind {kind}:")
    try:
        return KINDS[kind](root)
    except UserError:
        raise
    except Exception as error:  # of many kinds, all about what is on the disk
        reason = one_line(error)
        raise UserError(f"{root} does not hold {kind} as it is published ({reason}); unpack it there") from None
