"""Reading and comparing tensors of any origin: safetensors, and torch files of which only tensors are unpickled.

What a file claims is checked before memory is allocated for it. No code in it is ever run.
"""

from __future__ import annotations

import argparse
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from adclr.config.parsing import UserError

ZIP, PICKLE = b"PK\x03\x04", b"\x80"  # how torch files begin, since torch 1.6 and before


def kind_of(path: Path) -> Literal["safetensors", "torch", "other"]:
    """Return the format of a file by its first bytes, whatever its name."""
    try:
        with open(path, "rb") as file:
            head = file.read(9)
    except OSError as error:
        raise _unreadable(path, error) from None
    if head[8:] == b"{":  # after the length of the header, 8 bytes
        return "safetensors"
    return "torch" if head.startswith((ZIP, PICKLE)) else "other"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file."""
    try:
        with open(path, "rb"):  # safetensors says of a file that may not be read that it is not there
            return load_file(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}); restore it or use another") from None


def read_torch(path: Path) -> Any:
    """Return a torch file: tensors, plain containers, and the argparse.Namespace of DINO's files; no other type."""
    try:
        _check_archive(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # those that other packages have added in this process
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise _unreadable(path, error) from None
    except Exception as error:  # a damaged file fails anywhere in the reader, in a dozen ways
        raise _refused(path, str(error)) from None
    finally:
        torch.serialization.add_safe_globals(allowed)


def _check_archive(path: Path) -> None:
    """Refuse a compressed archive: torch does not compress, and an entry could unpack to any size."""
    with open(path, "rb") as file:
        if file.read(4) != ZIP:
            return
    try:
        with zipfile.ZipFile(path) as archive:
            uncompressed = all(entry.file_size == entry.compress_size for entry in archive.infolist())
    except (ValueError, zipfile.BadZipFile, NotImplementedError, EOFError):
        raise _refused(path, "") from None
    if not uncompressed:
        raise UserError(f"{path} is compressed, which torch's own files are not; restore it or use another")


def _refused(path: Path, error: str) -> UserError:
    requested = re.search(r"GLOBAL ([\w.]+)", error)
    if requested:
        return UserError(
            f"{path} needs {requested[1]}, which is code and not data, so it was not loaded; "
            "use a file of tensors alone, best a .safetensors"
        )
    return UserError(f"{path} is not a whole torch file of tensors; restore it or use another")


def check_plain(name: str, value: Tensor, path: str) -> Tensor:
    """Return a tensor; refuse one that is not plain numbers in memory: stride 0 can claim more than there are."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.device.type != "cpu" or value.layout != torch.strided:
        raise UserError(f"{path} holds {name} without its numbers; use a file of plain tensors")
    if value.is_quantized or value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise UserError(f"{path} holds fewer numbers than {name} of shape {tuple(value.shape)} has; restore it")
    return value.detach()


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read ({error.strerror or error}); check it and its permissions")


def fingerprint(tensors: Mapping[str, Tensor], description: str = "") -> str:
    """Return a hash of a description and of the names and values of tensors."""
    digest = blake2b(description.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Report:
    """Which tensors of a file were taken, and which were left, missing or resized."""

    source: str
    layout: str
    branch: str  # which of several states in the file, such as teacher
    taken: tuple[str, ...]  # names in the file
    left: tuple[str, ...]
    missing: tuple[str, ...]  # our names, drawn anew
    resized: dict[str, str]  # our name -> from what to what
    assumed: tuple[str, ...]  # what the file does not say

    def as_json(self) -> dict[str, Any]:
        """Return the report as a dictionary."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        branch = f", {self.branch}" if self.branch else ""
        lines = [f"{self.source}: {self.layout}{branch}, {len(self.taken)} tensors taken, {len(self.left)} left"]
        if self.left:
            lines.append(f"  left:    {_summary(self.left)}")
        if self.missing:
            lines.append(f"  missing: {_summary(self.missing)}, drawn anew")
        lines += [f"  resized: {name}, {how}" for name, how in self.resized.items()]
        lines += [f"  assumed: {text}" for text in self.assumed]
        return lines


def _summary(names: tuple[str, ...], most: int = 6) -> str:
    """Return names by their first part: head.mlp.0.weight, head.mlp.0.bias, cls -> head.* (2), cls."""
    firsts = Counter(name.split(".")[0] if "." in name else name for name in names)
    words = [f"{first}.* ({count})" if first not in names else first for first, count in firsts.items()]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def _difference(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str | None:
    """Return the first tensor that is missing, superfluous or of another shape, in words; None if all fit."""
    for name in [*expected, *tensors]:
        if name not in tensors:
            return f"lacks {name}"
        if name not in expected:
            return f"has {name}, which this architecture does not"
        if expected[name].shape != tensors[name].shape:
            return f"has {name} of shape {tuple(tensors[name].shape)} instead of {tuple(expected[name].shape)}"
    return None


def fit_tensors(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: object) -> None:
    """Refuse weights of another architecture, naming the first tensor that differs."""
    problem = _difference(expected, tensors)
    if problem:
        raise UserError(f"{path} is of another architecture: it {problem}; use weights that fit the settings")


def cover(
    expected: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    unknown: tuple[str, ...],
    path: str,
    partial: bool | None,
) -> tuple[str, ...]:
    """Return the names that are missing or of another shape; unless `partial`, refuse weights that lack any.

    `partial` is None for commands that do not have the option.
    """
    missing = tuple(name for name in expected if name not in tensors or expected[name].shape != tensors[name].shape)
    if partial:
        covered = sum(tensor.numel() for name, tensor in expected.items() if name not in missing)
        # no memory is allocated for a backbone that a file describes but does not hold
        if 100 * covered < sum(tensor.numel() for tensor in expected.values()):
            raise UserError(f"{path} covers less than a hundredth of the backbone; use other weights")
        return missing
    problem = _difference(expected, tensors)
    if unknown:
        extra = f"has {unknown[0]}, which this architecture does not"
        problem = f"{problem} and {extra}" if problem else extra
    if problem:
        remedy = "complete them with adclr export --partial" if partial is None else "add --partial"
        raise UserError(
            f"{path} is of another architecture: it {problem}; use weights that cover the backbone, or {remedy}"
        )
    return ()
