"""A Hugging Face data set on disk (written by `save_to_disk`), as a source; needs the extra `huggingface`."""

from __future__ import annotations

import os
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from adclr.config.sections import UserError
from adclr.data.sources import Items, is_searched
from adclr.system.optional import require

STATE = "state.json"  # which every such data set has


class HuggingFace(Items):
    """The first column of images; labels are those of the first column of classes. `hf:PATH` or `hf:PATH/train`."""

    def __init__(self, path: str) -> None:
        datasets = require("datasets", "huggingface", "hf:")
        if not (Path(path) / STATE).exists():
            splits = Path(path) / "dataset_dict.json"
            hint = (
                f"it holds splits; name one of them, such as hf:{path}/train" if splits.exists() else "check the path"
            )
            raise UserError(f"{path} is no data set written by save_to_disk; {hint}")
        try:
            found: Any = datasets.load_from_disk(path)
        except Exception as error:  # of many kinds, all about what is on the disk
            raise UserError(f"data set {path} cannot be opened ({error}); write it again") from None
        images = [name for name, kind in found.features.items() if isinstance(kind, datasets.Image)]
        if not images:
            raise UserError(f"data set {path} has no column of images, only {', '.join(found.features)}")
        classes = [name for name, kind in found.features.items() if isinstance(kind, datasets.ClassLabel)]
        self.names: list[str] = found.features[classes[0]].names if classes else []
        self.classes: list[int] = list(found[classes[0]]) if classes else []
        self.column: Any = found.cast_column(images[0], datasets.Image(decode=False)).select_columns([images[0]])
        self.name = images[0]
        self.version = str(getattr(found, "_fingerprint", ""))
        super().__init__(Path(path), [f"{number:09d}" for number in range(len(found))])

    def fingerprint(self) -> str:
        """Rows have no names, so the data set's own mark tells one from another."""
        return blake2b(f"{super().fingerprint()} {self.version}".encode(), digest_size=16).hexdigest()

    def file(self, index: int) -> str:  # noqa: ARG002
        return str(self.root / STATE)

    @cached_property
    def files(self) -> tuple[int, int]:
        """Bytes of all files that hold the rows, and when the last of them was modified (ns)."""
        statuses = [os.stat(file["filename"]) for file in self.column.cache_files]
        return sum(s.st_size for s in statuses), max((s.st_mtime_ns for s in statuses), default=0)

    def stamp(self, index: int) -> tuple[int, int]:  # noqa: ARG002
        """Rows lie in a few files together, so that all have one stamp."""
        return self.files

    def holds(self, folder: str | Path) -> bool:
        return is_searched(folder, [self.root])

    def lost(self, index: int) -> str | None:
        """Rows lie in a few files together, which are there as long as what describes them."""
        return None if os.path.exists(self.file(index)) else str(self.root)

    def read(self, index: int) -> bytes:
        item = self.column[index][self.name]
        if item is None:
            raise OSError("the data set has no image here")
        if item["bytes"] is not None:
            return bytes(item["bytes"])
        return Path(item["path"]).read_bytes()

    def label(self, index: int) -> str | None:
        number = self.classes[index] if self.classes else None
        return self.names[number] if number is not None and 0 <= number < len(self.names) else None
