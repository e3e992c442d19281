"""Files of tensors from anywhere, read as data: safetensors, and torch files of which only tensors are unpickled.

What a file claims is checked before memory is taken for it. Nothing in it is ever run.
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

from adclr.config.sections import UserError

ZIP, PICKLE = b"PK\x03\x04", b"\x80"  # how torch files begin, since torch 1.6 and before


def kind_of(path: Path) -> Literal["safetensors", "torch", "other"]:
    """By its first bytes, whatever it is called."""
    try:
        with open(path, "rb") as file:
            head = file.read(9)
    except OSError as error:
        raise _unreadable(path, error) from None
    if head[8:] == b"{":  # after the length of the header, 8 bytes
        return "safetensors"
    return "torch" if head.startswith((ZIP, PICKLE)) else "other"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """A safetensors file."""
    try:
        with open(path, "rb"):  # safetensors says of a file that may not be read that it is not there
            return load_file(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}); restore it or use another") from None


def read_torch(path: Path) -> Any:
    """A torch file: tensors, plain containers, and the argparse.Namespace that DINO's files hold; no other type."""
    try:
        _check_archive(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # what other packages have allowed in this process is not allowed here
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
    """torch does not compress: an entry that unpacks to more than it takes in the file is not torch's."""
    with open(path, "rb") as file:
        if file.read(4) != ZIP:
            return
    try:
        with zipfile.ZipFile(path) as archive:
            honest = all(entry.file_size == entry.compress_size for entry in archive.infolist())
    except (ValueError, zipfile.BadZipFile, NotImplementedError, EOFError):
        raise _refused(path, "") from None
    if not honest:
        raise UserError(f"{path} is compressed, which torch's own files are not; restore it or use another")


def _refused(path: Path, error: str) -> UserError:
    asked = re.search(r"GLOBAL ([\w.]+)", error)
    if asked:
        return UserError(
            f"{path} wants {asked[1]} to be loaded, which is not data, so nothing of it was; "
            "use a file of tensors alone, best a .safetensors"
        )
    return UserError(f"{path} is not a whole torch file of tensors; restore it or use another")


def plain(name: str, value: Tensor, path: str) -> Tensor:
    """Refuses a tensor that is not simply numbers in memory; one of stride 0 can claim more than there is."""
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
    """What became of the tensors that were given."""

    source: str
    layout: str
    branch: str  # which of several states in the file, such as teacher
    taken: tuple[str, ...]  # names in the file
    left: tuple[str, ...]
    missing: tuple[str, ...]  # our names, drawn anew
    resized: dict[str, str]  # our name -> from what to what
    assumed: tuple[str, ...]  # what the file does not say

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people: a line for each thing there is to say."""
        branch = f", {self.branch}" if self.branch else ""
        found = [f"{self.source}: {self.layout}{branch}, {len(self.taken)} tensors taken, {len(self.left)} left"]
        if self.left:
            found.append(f"  left:    {summary(self.left)}")
        if self.missing:
            found.append(f"  missing: {summary(self.missing)}, drawn anew")
        found += [f"  resized: {name}, {how}" for name, how in self.resized.items()]
        found += [f"  assumed: {what}" for what in self.assumed]
        return found


def summary(names: tuple[str, ...], most: int = 6) -> str:
    """head.mlp.0.weight, head.mlp.0.bias, cls -> head.* (2), cls"""
    firsts = Counter(name.split(".")[0] if "." in name else name for name in names)
    words = [f"{first}.* ({count})" if first not in names else first for first, count in firsts.items()]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def difference(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    """The first tensor that is not there, too many, or of another shape, in words; None if all fit."""
    for name in [*wanted, *found]:
        if name not in found:
            return f"lacks {name}"
        if name not in wanted:
            return f"has {name}, which this architecture does not"
        if wanted[name].shape != found[name].shape:
            return f"has {name} of shape {tuple(found[name].shape)} instead of {tuple(wanted[name].shape)}"
    return None


def fit_tensors(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], path: object) -> None:
    """Refuses weights of another architecture, naming the first tensor that differs."""
    problem = difference(wanted, found)
    if problem:
        raise UserError(f"{path} is of another architecture: it {problem}; use weights that fit the settings")


def cover(
    wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], unknown: tuple[str, ...], path: str, partial: bool | None
) -> tuple[str, ...]:
    """The names that are missing or of another shape: none, or the weights are refused unless `partial`.

    It is None where nobody can be told that a part will do.
    """
    missing = tuple(name for name in wanted if name not in found or wanted[name].shape != found[name].shape)
    if partial:
        # memory for a backbone that is named but is not there, whatever its claimed size, is not taken
        if 100 * sum(t.numel() for n, t in wanted.items() if n not in missing) < sum(
            t.numel() for t in wanted.values()
        ):
            raise UserError(f"{path} covers less than a hundredth of the backbone; use other weights")
        return missing
    problem = difference(wanted, found)
    if unknown:
        stray = f"has {unknown[0]}, which this architecture does not"
        problem = f"{problem} and {stray}" if problem else stray
    if problem:
        remedy = "make such of them with adclr export --partial" if partial is None else "say --partial"
        raise UserError(
            f"{path} is of another architecture: it {problem}; use weights that cover the backbone, or {remedy}"
        )
    return ()
