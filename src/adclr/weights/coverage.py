"""Which tensors of a file make the backbone: all of it, or no weights, unless a part was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from adclr.config.sections import UserError


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


def fit(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], path: object) -> None:
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
