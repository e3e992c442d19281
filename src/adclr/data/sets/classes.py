"""Images with a class each: `DIR/train` and `DIR/val` with a folder for each class, or one such folder that is split.

Or a public data set, `KIND:DIR`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from adclr.config.parsing import UserError
from adclr.data.collection import is_folder, open_source
from adclr.data.sets import split_by_key
from adclr.data.sets.public import KINDS, open_set
from adclr.data.sources import Source, Subset, huggingface_cache
from adclr.data.sources.huggingface import HuggingFace
from adclr.data.sources.tables import Tables
from adclr.data.sources.tar_shards import TarShards
from adclr.system.store_urls import conceal, is_remote


@dataclass(frozen=True)
class Split:
    """Images and their class numbers."""

    source: Source
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class LabeledImages:
    """A labeled collection in two splits."""

    train: Split
    val: Split
    classes: list[str]


def open_labeled(path: str | Path, allow_damaged: bool = False) -> LabeledImages:
    """Open a labeled collection; see `open_source`.

    A fifth of an unsplit folder, chosen by the keys of its images, is the val split.
    """
    text = conceal(os.fspath(path))
    hub, remote = text.startswith("hf:") and not is_remote(text), is_remote(text)
    root: Path | str = text if remote else Path(text)
    folder = text.removeprefix("hf:") if hub else text
    train: Source
    val: Source
    kind, _, location = text.partition(":")
    if kind in KINDS:
        train, val = open_set(kind, location)
    elif hub and huggingface_cache.is_name(folder) and (pair := huggingface_cache.train_and_val(folder)):
        train, val = (open_source(split, allow_damaged=allow_damaged) for split in pair)
    elif is_folder(os.path.join(folder, "train")) and is_folder(os.path.join(folder, "val")):
        prefix = "hf:" if hub else ""
        splits = (prefix + os.path.join(folder, split) for split in ("train", "val"))
        train, val = (open_source(split, allow_damaged=allow_damaged) for split in splits)
    else:
        if not remote:
            _check_unsplit(Path(text))
        whole = open_source(text, allow_damaged=allow_damaged)
        train, val = (Subset(whole, indices) for indices in split_by_key(whole.keys))
    small = f"{root} is too small to be split into train and val; give {root}/train and {root}/val"
    if not len(train):
        raise UserError(small)
    classes = sorted({_label(train, i) for i in range(len(train))})
    if len(classes) < 2:
        raise UserError(f"{train.root} has only one class ({classes[0]}); scores need a sub-folder for each class")
    unknown = sorted({_label(val, i) for i in range(len(val))} - set(classes))
    if unknown and train.root == val.root and kind not in KINDS:
        raise UserError(
            f"{root} has too few images of class {unknown[0]} to be split; give {root}/train and {root}/val"
        )
    if unknown:
        raise UserError(f"{val.root} has classes that {train.root} lacks: {', '.join(unknown[:5])}; give both the same")
    if not len(val):
        raise UserError(small)
    numbers = {name: number for number, name in enumerate(classes)}
    return LabeledImages(_numbered(train, numbers), _numbered(val, numbers), classes)


def _check_unsplit(root: Path) -> None:
    """Refuse train/ and test/, which would count as two classes; a class of images may be called train."""
    for split, other in (("train", "val"), ("val", "train")):
        if os.path.isdir(root / split):
            with os.scandir(root / split) as entries:
                if any(entry.is_dir() and not entry.name.startswith(".") for entry in entries):
                    raise UserError(
                        f"{root} has {split}/ with folders in it and no {other}/; "
                        f"call the other split {other}/, or give {root / split} alone"
                    )


def _numbered(source: Source, numbers: dict[str, int]) -> Split:
    return Split(source, np.array([numbers[_label(source, i)] for i in range(len(source))], np.int64))


def _label(source: Source, index: int) -> str:
    label = source.label(index)
    if label is None:
        raise UserError(f"{source.root}/{source.paths[index]} {_without_label(source)}")
    return label


def _without_label(source: Source) -> str:
    """Return what an image without a label lacks, and what to do about it."""
    whole = source.whole if isinstance(source, Subset) else source
    if isinstance(whole, TarShards):
        return "has no label in a .cls or .json beside it, and lies in no class folder of its shard; add one of these"
    if isinstance(whole, Tables | HuggingFace):
        return "has no label; the data set needs a column of classes, called label"
    return "lies in no class folder; put it into one or remove it"
