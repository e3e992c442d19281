"""The explored images: decoded, made small for the page, and read by each network, in the background.

The thread that decodes an image also makes it small, so that a photograph of 36 MB is in memory no longer than that
takes.
"""

from __future__ import annotations

import io
import os
from contextlib import closing
from dataclasses import dataclass
from threading import Event

import numpy as np

from adclr.config.parsing import UserError
from adclr.data.decode import Unreadable
from adclr.data.sources import ImageFolder, Source, Subset
from adclr.features import drawing
from adclr.features.analysis import Grid, InputImage
from adclr.features.explorer.library import Library
from adclr.features.reader import read_images
from adclr.system.machine import GIB, cpu_count
from adclr.system.progress import ProgressLine

SIDE = 512  # pixels, the longer side of an image on the page
QUALITY = 88


@dataclass(frozen=True)
class PageImage:
    """An image on the page: its pixels encoded anew, so that nothing else that its file holds is ever sent."""

    name: str
    jpeg: bytes
    width: int
    height: int
    grids: list[Grid]  # in each network
    label: str | None = None  # its folder, where folders are classes


@dataclass(frozen=True)
class _Decoded:
    """An image until enough of its shape are there for a batch: a few hundred kB, however large its file is."""

    jpeg: bytes
    size: tuple[int, int]  # width and height of the JPEG
    inputs: list[InputImage]  # of each network


class _ServedImages(Subset):
    """Images of a source; of a folder only those that lie in it, links followed, so that no other file is served."""

    def read(self, index: int) -> bytes:
        if isinstance(self.whole, ImageFolder):  # other sources are files that the user named one by one
            root = os.path.realpath(self.root)
            path = os.path.realpath(os.path.join(root, self.paths[index]))
            if os.path.commonpath([root, path]) != root:
                raise Unreadable("it is a link that leads out of the folder")
        return super().read(index)

    def lost(self, index: int) -> None:  # noqa: ARG002  # a folder that is gone does not end the page
        return None


class Gallery:
    """The images of a page, read in the background."""

    def __init__(self, source: Source, libraries: list[Library], num_images: int | None, max_gib: float) -> None:
        count = min(len(source), num_images or len(source))
        self.images = _ServedImages(source, np.linspace(0, len(source) - 1, count).round().astype(np.int64))
        self.libraries, self.max_bytes, self.num_available = libraries, max_gib * GIB, len(source)
        self.shown: list[PageImage] = []  # by id
        self.skipped: dict[str, str] = {}  # name -> reason
        self.note = "" if count == len(source) else f"{count} of {len(source)} images, spread over the collection"
        self.num_read = 0
        self.finished = False
        self.stop = Event()

    def read(self) -> None:
        """Read all images, or as many as fit into memory; `stop` ends it after the next image."""
        waiting: dict[tuple[Grid, ...], list[tuple[int, _Decoded]]] = {}
        num_bytes, num_workers = 0, min(4, cpu_count())
        decoded = read_images(self.images, self._decode, range(len(self.images)), num_workers)
        with closing(decoded), ProgressLine("reading", len(self.images)) as line:
            for index, image in decoded:
                if self.stop.is_set():
                    return
                self.num_read += 1
                line.move(self.num_read)
                name = self.images.paths[index]
                if isinstance(image, str):
                    self.skipped[name] = image
                    continue
                grids = tuple(
                    input_.grid(library.vit) for input_, library in zip(image.inputs, self.libraries, strict=True)
                )
                num_bytes += sum(library.bytes_of(grid) for library, grid in zip(self.libraries, grids, strict=True))
                if num_bytes > self.max_bytes:
                    self.note = (
                        f"{self.num_read - 1} of {self.num_available} images: "
                        f"no more fit into max_gib={self.max_bytes / GIB:g}"
                    )
                    break
                waiting.setdefault(grids, []).append((index, image))
                if len(waiting[grids]) == self.libraries[0].batch_size:
                    self._add(grids, waiting.pop(grids))
            for grids, rest in waiting.items():
                self._add(grids, rest)
            for text in (self.note, *(f"skipped {name}: {reason}" for name, reason in list(self.skipped.items())[:5])):
                if text:
                    line.say(text)
        self.finished = True

    def _add(self, grids: tuple[Grid, ...], images: list[tuple[int, _Decoded]]) -> None:
        """Let every network read images of one shape, and show them."""
        ids = range(len(self.shown), len(self.shown) + len(images))
        for number, library in enumerate(self.libraries):
            library.read(ids, [image.inputs[number] for _, image in images])
        paths, label = self.images.paths, self.images.label
        self.shown += [PageImage(paths[i], image.jpeg, *image.size, list(grids), label(i)) for i, image in images]

    def _decode(self, data: bytes) -> _Decoded:
        decoders = [library.weights.decoder for library in self.libraries]
        try:
            pixels = {decoder: decoder(data) for decoder in dict.fromkeys(decoders)}
        except UserError as error:  # a package that is missing; the other images are shown all the same
            raise Unreadable(str(error)) from None
        inputs = [library.prepare(pixels[decoder]) for library, decoder in zip(self.libraries, decoders, strict=True)]
        first = pixels[decoders[0]]
        image = drawing.display_image(first, min(SIDE, max(first.shape[1:])))
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=QUALITY)
        return _Decoded(buffer.getvalue(), image.size, inputs)
