"""Images -> features, the way evaluations see them: resized, centre-cropped, normalised, in order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adclr.config.sections import UserError
from adclr.data.decode import Decoder, Pixels, Unreadable
from adclr.data.sets.classes import Split
from adclr.data.sources import Source
from adclr.features.reader import centre, resize
from adclr.system import distributed
from adclr.system.machine import cpu_count, host_memory
from adclr.system.progress import track
from adclr.system.text import printable
from adclr.system.threads import in_order
from adclr.weights.backbone import Weights

KEPT_SHARE = 0.25  # of the free memory that images may fill that are looked at more than once


@dataclass(frozen=True)
class Features:
    values: Tensor  # n×D float32, on the CPU
    kept: NDArray[np.int64]  # which images of the source they are of: all but the unreadable
    unreadable: dict[str, str]  # path -> reason


def prepare(image: Pixels, size: tuple[int, int]) -> Pixels:
    """Shorter side to 256/224 of the input size by bicubic resampling, then the centre: C×height×width."""
    return resize(image, centre(size)(*image.shape[1:]))


def prepared(
    source: Source,
    size: tuple[int, int],
    batch_size: int,
    num_workers: int | None,
    decoder: Decoder,
    chosen: Sequence[int] | None = None,
) -> Generator[list[NDArray[np.uint8] | str], None, None]:
    """Batches of prepared images, of all in the order of the source or of those chosen; the reason stands for an
    unreadable one."""
    order = np.arange(len(source)) if chosen is None else np.array(chosen, np.int64)

    def one(index: int) -> NDArray[np.uint8] | str:
        try:
            return prepare(decoder(source.read(index)), size)
        except (Unreadable, OSError) as error:
            return str(error)

    return in_order(
        (order[first : first + batch_size] for first in range(0, len(order), batch_size)),
        lambda batch: batch,
        one,
        lambda batch, images: images,
        lambda: str(source.root),
        num_workers or cpu_count(),
    )


class Album:
    """The prepared images of a source; `shared`: in each of several processes only its part of them.

    Those that are to be seen `again` are kept after the first time, if they fit into memory.
    """

    def __init__(
        self,
        weights: Weights,
        source: Source,
        batch_size: int = 256,
        num_workers: int | None = None,
        size: tuple[int, int] | None = None,
        shared: bool = False,
        again: bool = False,
    ) -> None:
        self.weights, self.source, self.batch_size, self.num_workers = weights, source, batch_size, num_workers
        self.size = size or weights.vit.input_size
        self.shared = shared and distributed.world_size() > 1
        self.chosen = distributed.part(len(source)) if self.shared else range(len(source))
        self.unreadable: dict[str, str] = {}
        needed = len(self.chosen) * weights.vit.num_channels * self.size[0] * self.size[1]
        self.again = again and needed <= KEPT_SHARE * host_memory() / distributed.local_world_size()
        self.pages: list[tuple[list[int], NDArray[np.uint8]]] | None = None

    def __len__(self) -> int:
        """Batches."""
        return -(-len(self.chosen) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[list[int], NDArray[np.uint8]]]:
        """(which of the source, images) of each batch, without the unreadable ones."""
        if self.pages is not None:
            yield from self.pages
            return
        pages = []
        made = prepared(
            self.source, self.size, self.batch_size, self.num_workers, self.weights.decoder, chosen=self.chosen
        )
        with closing(made):
            for number, batch in enumerate(made):
                readable = []
                for index, image in zip(self.chosen[number * self.batch_size :], batch, strict=False):
                    if isinstance(image, str):
                        self.unreadable[self.source.paths[index]] = image
                    else:
                        readable.append((index, image))
                shape = (0, self.weights.vit.num_channels, *self.size)
                images = np.stack([image for _, image in readable]) if readable else np.zeros(shape, np.uint8)
                page = [index for index, _ in readable], images
                if self.again:
                    pages.append(page)
                yield page
        self.pages = pages if self.again else None


@torch.no_grad()
def look(
    album: Album, pool: Callable[[Tensor], Tensor], device: torch.device, name: str = "features", show: bool = True
) -> Features:
    """`pool(images)` for every readable image, float32 throughout; of all processes together if they share it."""
    mean = torch.tensor(album.weights.mean, device=device).view(-1, 1, 1)
    std = torch.tensor(album.weights.std, device=device).view(-1, 1, 1)
    values, kept = [], []
    for indices, images in track(album, name, len(album), show):
        if len(indices):
            pixels = torch.from_numpy(images).to(device)
            values.append(pool((pixels.float() / 255 - mean) / std).float().cpu())
            kept += indices
    source = album.source
    if not values:
        where = f"the {len(album.chosen)} images of {source.root} that this process reads" if album.shared else None
        raise UserError(f"none of {where or f'the {len(source)} images of {source.root}'} can be read")
    for path, reason in list(album.unreadable.items())[:5] if show else ():
        print(printable(f"skipped {path}: {reason}"), file=sys.stderr)
    found, places = torch.cat(values), torch.tensor(kept)
    if album.shared:
        found, places = distributed.gather(found), distributed.gather(places)
    return Features(found, places.numpy(), album.unreadable)


def extract(
    weights: Weights,
    source: Source,
    pool: Callable[[Tensor], Tensor],
    device: torch.device,
    batch_size: int = 256,
    num_workers: int | None = None,
    name: str = "features",
    show: bool = True,
    size: tuple[int, int] | None = None,
    shared: bool = False,
) -> Features:
    """`look`, once."""
    return look(Album(weights, source, batch_size, num_workers, size, shared), pool, device, name, show)


def labels_of(found: Features, split: Split, classes: list[str], max_unreadable: float) -> Tensor:
    """The labels of the images that could be read; refuses to score what is left when too many could not."""
    check_readable(split, len(split.labels) - len(found.kept), max_unreadable)
    labels = split.labels[found.kept]
    check_classes(split, labels, classes)
    return torch.from_numpy(labels)


def check_readable(split: Split, unreadable: int, most: float) -> None:
    if unreadable > most * len(split.labels):
        raise UserError(
            f"{unreadable} of {len(split.labels)} images of {split.source.root} cannot be read; "
            "mend them or raise max_unreadable"
        )


def check_classes(split: Split, left: NDArray[np.int64], classes: list[str]) -> None:
    """`left` are the labels of the readable images."""
    empty = np.setdiff1d(split.labels, left)
    if len(empty):
        raise UserError(f"no image of class {classes[empty[0]]} in {split.source.root} can be read; mend or remove it")
