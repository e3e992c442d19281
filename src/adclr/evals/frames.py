"""Whole images, with labels or without, as dense evaluations test on them: in batches of one size, on the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adclr.config.sections import UserError
from adclr.data.decode import Pixels, Unreadable
from adclr.data.sources import Source
from adclr.system import distributed
from adclr.system.devices import send
from adclr.system.machine import cpu_count
from adclr.system.progress import Line
from adclr.system.text import printable
from adclr.system.threads import in_order

TOGETHER = 4  # images that threads hand over at once: few, since they are whole
NUMBERS = 2**28  # of enlarged scores held at once (1 GiB)
HELD = 2**29  # bytes of images that wait for others of their size


@dataclass(frozen=True)
class Frames:
    """Images of one size."""

    indices: list[int]  # in the source
    pixels: Tensor  # n×channels×height×width uint8; of labelled pixels the last channel is the label

    @property
    def images(self) -> Tensor:
        return self.pixels[:, :-1]

    @property
    def labels(self) -> Tensor:
        return self.pixels[:, -1]

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[-2], self.pixels.shape[-1]


class Reader:
    """The items of a source, once, in each of several processes only its part; those it cannot read are named."""

    def __init__(
        self,
        source: Source,
        decoder: Callable[[bytes], Pixels],
        device: torch.device,
        batch_size: int,
        num_workers: int | None,
    ) -> None:
        self.source, self.decoder, self.device = source, decoder, device
        self.batch_size, self.num_workers = batch_size, num_workers or cpu_count()
        self.unreadable: dict[str, str] = {}

    def batches(self, name: str, show: bool = True) -> Iterator[Frames]:
        """A batch is full, or the last of its size: images wait for others of their size.

        When too many wait, as they would where hardly two are of one size, those go on of which there are most.
        """
        waiting: dict[tuple[int, ...], list[tuple[int, Pixels]]] = {}
        held = 0
        chosen = distributed.part(len(self.source))
        made = self._decoded(chosen)
        with closing(made), Line(name, len(chosen), show=show and distributed.is_main()) as line:
            for done, (index, pixels) in enumerate(chain.from_iterable(made), 1):
                if isinstance(pixels, str):
                    self.unreadable[self.source.paths[index]] = pixels
                else:
                    alike = waiting.setdefault(pixels.shape, [])
                    alike.append((index, pixels))
                    held += pixels.nbytes
                    shape = pixels.shape
                    if held > HELD and len(alike) < self.batch_size:
                        shape = max(waiting, key=lambda other: len(waiting[other]))
                    if held > HELD or len(alike) == self.batch_size:
                        ready = waiting.pop(shape)
                        held -= sum(item.nbytes for _, item in ready)
                        yield self._stacked(ready)
                line.move(done)
            for rest in waiting.values():
                yield self._stacked(rest)
        for path, reason in list(self.unreadable.items())[:5] if show else ():
            print(printable(f"skipped {path}: {reason}"), file=sys.stderr)

    def num_unreadable(self, most: float) -> int:
        """Of all processes; refuses to score what is left when too many could not be read."""
        count = int(distributed.sum_(torch.tensor([len(self.unreadable)], device=self.device)).item())
        if count > most * len(self.source):
            raise UserError(
                f"{count} of {len(self.source)} images of {self.source.root} cannot be read; "
                "mend them or raise max_unreadable"
            )
        return count

    def _stacked(self, alike: list[tuple[int, Pixels]]) -> Frames:
        return Frames([index for index, _ in alike], send(np.stack([item for _, item in alike]), self.device))

    def _decoded(self, chosen: Sequence[int]) -> Generator[list[tuple[int, Pixels | str]], None, None]:
        def one(index: int) -> tuple[int, Pixels | str]:
            try:
                return index, self.decoder(self.source.read(index))
            except (Unreadable, OSError) as error:
                return index, str(error)

        return in_order(
            (np.array(chosen[first : first + TOGETHER]) for first in range(0, len(chosen), TOGETHER)),
            lambda part: part,
            one,
            lambda part, items: items,
            lambda: str(self.source.root),
            self.num_workers,
            ahead=self.num_workers,
        )


def fitting(size: tuple[int, int], side: int, unit: int, most: float = 4.0) -> tuple[int, int]:
    """The size whose shorter side is about `side`, and the longer at most `most` times that, in whole units."""
    scale = min(side / min(size), most * side / max(size))
    tall, wide = (unit * max(1, round(n * scale / unit)) for n in size)
    return tall, wide


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """n×C×height×width uint8 -> float32 in [0, 1]; bilinear, antialiased where they are made smaller."""
    pixels = images.float() / 255
    if images.shape[-2:] == size:
        return pixels
    return F.interpolate(pixels, size=size, mode="bilinear", antialias=True)


def likeliest(scores: Tensor, size: tuple[int, int]) -> Tensor:
    """n×K×h×w -> n×height×width: scores enlarged, and the class of the largest; of a few classes at once."""
    batch, num_classes = scores.shape[:2]
    at_once = max(1, NUMBERS // (batch * size[0] * size[1]))
    best = chosen = None
    for first in range(0, num_classes, at_once):
        enlarged = F.interpolate(scores[:, first : first + at_once].float(), size=size, mode="bilinear")
        top, which = enlarged.max(dim=1)
        if best is None or chosen is None:
            best, chosen = top, which
        else:
            chosen = torch.where(top > best, which + first, chosen)
            best = torch.maximum(best, top)
    assert chosen is not None
    return chosen
