"""A Hugging Face data set on disk (written by `save_to_disk`), as a source; needs the extra `huggingface`."""

from __future__ import annotations

import os
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from adclr.config.parsing import UserError
from adclr.data.sources import Source
from adclr.system.optional import require
from adclr.system.outputs import is_searched

STATE = "state.json"  # a file of every such data set


class HuggingFace(Source):
    """The first column of images; labels are those of the first column of classes. `hf:PATH` or `hf:PATH/train`."""

    def __init__(self, path: str) -> None:
        datasets = require("datasets", "huggingface", "hf:")
        if not (Path(path) / STATE).exists():
            splits = Path(path) / "dataset_dict.json"
            hint = (
                f"it holds splits; name one of them, such as hf:{path}/train" if splits.exists() else "check the path"
            )
            raise UserError(f"{path} is not a data set written by save_to_disk; {hint}")
        try:
            dataset: Any = datasets.load_from_disk(path)
        except Exception as error:  # of many kinds, all about what is on the disk
            raise UserError(f"data set {path} cannot be opened ({error}); write it again") from None
        images = [name for name, kind in dataset.features.items() if isinstance(kind, datasets.Image)]
        if not images:
            raise UserError(f"data set {path} has no column of images, only {', '.join(dataset.features)}")
        classes = [name for name, kind in dataset.features.items() if isinstance(kind, datasets.ClassLabel)]
        self.names: list[str] = dataset.features[classes[0]].names if classes else []
        self.classes: list[int] = list(dataset[classes[0]]) if classes else []
        self.column: Any = dataset.cast_column(images[0], datasets.Image(decode=False)).select_columns([images[0]])
        self.name = images[0]
        self.version = str(getattr(dataset, "_fingerprint", ""))
        self.folder = Path(path)
        super().__init__(self.folder, [f"{number:09d}" for number in range(len(dataset))])

    def fingerprint(self) -> str:
        """Return a hash that includes the data set's own fingerprint, since rows have no names."""
        return blake2b(f"{super().fingerprint()} {self.version}".encode(), digest_size=16).hexdigest()

    def file(self, index: int) -> str:  # noqa: ARG002
        """Return the file that exists as long as the data set does."""
        return str(self.folder / STATE)

    @cached_property
    def files(self) -> tuple[int, int]:
        """Return the bytes of all files of the data set, and when the last of them was modified (ns)."""
        statuses = [os.stat(file["filename"]) for file in self.column.cache_files]
        return sum(s.st_size for s in statuses), max((s.st_mtime_ns for s in statuses), default=0)

    def stamp(self, index: int) -> tuple[int, int]:  # noqa: ARG002
        """Return the same stamp for all rows, which share a few files."""
        return self.files

    def holds(self, folder: str | Path) -> bool:
        """Return whether a folder is that of the data set or below it."""
        return is_searched(folder, [self.root])

    def lost(self, index: int) -> str | None:
        """Return the data set if it has disappeared as a whole."""
        return None if os.path.exists(self.file(index)) else str(self.root)

    def read(self, index: int) -> bytes:
        """Return the encoded image of a row."""
        item = self.column[index][self.name]
        if item is None:
            raise OSError("the data set has no image here")
        if item["bytes"] is not None:
            return bytes(item["bytes"])
        return Path(item["path"]).read_bytes()

    def label(self, index: int) -> str | None:
        """Return the name of the class of a row."""
        number = self.classes[index] if self.classes else None
        return self.names[number] if number is not None and 0 <= number < len(self.names) else None
