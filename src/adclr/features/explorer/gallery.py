"""The images that are explored: decoded, made small for the page, and read by each network, in the background.

Whoever decodes an image also makes it small, so that a photograph of 36 MB is never kept longer than that takes.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

import numpy as np

from adclr.config.sections import UserError
from adclr.data.decode import Unreadable
from adclr.data.sources import ImageFolder, Source
from adclr.features import pictures
from adclr.features.analysis import Grid, Seen
from adclr.features.explorer.library import Library
from adclr.system.machine import GIB, cpu_count
from adclr.system.progress import Line

SIDE = 512  # pixels, the longer side of an image on the page
QUALITY = 88
AHEAD = 32  # images that are decoded at once


@dataclass(frozen=True)
class Shown:
    """An image on the page: its pixels made anew, so that nothing else that its file holds is ever sent."""

    name: str
    jpeg: bytes
    width: int
    height: int
    grids: list[Grid]  # in each network


@dataclass(frozen=True)
class Decoded:
    """What is kept of an image until enough of its shape are there: a few hundred kB, however large it is."""

    name: str
    jpeg: bytes
    size: tuple[int, int]  # width and height of the JPEG
    seen: list[Seen]  # by each network


class Gallery:
    def __init__(self, source: Source, libraries: list[Library], num_images: int | None, max_gib: float) -> None:
        self.source, self.libraries, self.room = source, libraries, max_gib * GIB
        count = min(len(source), num_images or len(source))
        self.chosen = np.linspace(0, len(source) - 1, count).round().astype(np.int64).tolist()
        self.shown: list[Shown] = []  # by id
        self.skipped: dict[str, str] = {}  # name -> reason
        self.note = "" if count == len(source) else f"{count} of {len(source)} images, spread over the collection"
        self.tried = 0
        self.finished = False
        self.stop = Event()

    def read(self) -> None:
        """All of them, or as many as there is memory for; `stop` ends it after the images at hand."""
        waiting: dict[tuple[Grid, ...], list[Decoded]] = {}
        taken = 0
        with Line("reading", len(self.chosen)) as line:
            for found in self._decoded():
                if self.stop.is_set():
                    return
                self.tried += 1
                line.move(self.tried)
                if found is None:
                    continue
                grids = tuple(one.grid(library.vit) for one, library in zip(found.seen, self.libraries, strict=True))
                taken += sum(library.bytes_of(grid) for library, grid in zip(self.libraries, grids, strict=True))
                if taken > self.room:
                    self.note = (
                        f"{self.tried - 1} of {len(self.source)} images: no more fit into max_gib={self.room / GIB:g}"
                    )
                    break
                waiting.setdefault(grids, []).append(found)
                if len(waiting[grids]) == self.libraries[0].together:
                    self._shelve(grids, waiting.pop(grids))
            for grids, held in waiting.items():
                self._shelve(grids, held)
            for text in (self.note, *(f"skipped {name}: {reason}" for name, reason in list(self.skipped.items())[:5])):
                if text:
                    line.say(text)
        self.finished = True

    def _shelve(self, grids: tuple[Grid, ...], held: list[Decoded]) -> None:
        ids = range(len(self.shown), len(self.shown) + len(held))
        for number, library in enumerate(self.libraries):
            library.read(ids, [found.seen[number] for found in held])
        self.shown += [Shown(found.name, found.jpeg, *found.size, list(grids)) for found in held]

    def _decoded(self) -> Iterator[Decoded | None]:
        """In order; None for one that cannot be read."""
        with ThreadPoolExecutor(min(4, cpu_count()), thread_name_prefix="decode") as pool:
            for start in range(0, len(self.chosen), AHEAD):
                yield from pool.map(self._decode, self.chosen[start : start + AHEAD])

    def _decode(self, index: int) -> Decoded | None:
        name = self.source.paths[index]
        try:
            if not self._inside(name):
                raise Unreadable("it is a link that leads out of the folder")
            data = self.source.read(index)
            decoders = [library.weights.decoder for library in self.libraries]
            pixels = {decoder: decoder(data) for decoder in dict.fromkeys(decoders)}
        except (Unreadable, UserError, OSError) as error:  # of the user: a package that is missing
            self.skipped[name] = str(error)
            return None
        own = [pixels[decoder] for decoder in decoders]
        image = pictures.shown(own[0], min(SIDE, max(own[0].shape[1:])))
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=QUALITY)
        seen = [library.see(name, part) for library, part in zip(self.libraries, own, strict=True)]
        return Decoded(name, buffer.getvalue(), image.size, seen)

    def _inside(self, name: str) -> bool:
        """Whether a file of a folder lies in it, links followed: nothing outside is ever served."""
        if not isinstance(self.source, ImageFolder):
            return True  # named by the user one by one
        root = os.path.realpath(self.source.root)
        return os.path.commonpath([root, os.path.realpath(os.path.join(root, name))]) == root
