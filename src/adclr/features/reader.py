"""Images as a network at rest sees them: read, decoded, resized, in order, a batch at a time; unreadable ones named.

Whoever decodes an image also resizes it, so that a photograph of 36 MB is never kept longer than that takes: the CPU by
Pillow, in the thread that read the file; the GPU, which decodes plain JPEGs by the batch, by kernels with Pillow's
pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from adclr.config.sections import UserError
from adclr.data.augment.resample import needed
from adclr.data.cache import Store
from adclr.data.decode import Decoder, Pixels, Unreadable
from adclr.data.nvjpeg import Encoded, GpuDecoder
from adclr.data.packed import Packed
from adclr.data.sources import Source, fail, reason_of
from adclr.system import triton_available
from adclr.system.devices import send, stream
from adclr.system.machine import cpu_count
from adclr.system.threads import in_order

RESIZE = 256 / 224  # the shorter side before the centre is cut, of the side that is cut
BICUBIC = Image.Resampling.BICUBIC
TOGETHER = 2**28  # bytes of pixels that the GPU decodes at once


class Frame(NamedTuple):
    """What is made of an image: all of it is resized to rows×columns, and of that a part is taken."""

    rows: int
    columns: int
    top: int
    left: int
    height: int
    width: int


Framing = Callable[[int, int], Frame]  # (height, width) of an image -> what is made of it
Item = Pixels | Encoded | str  # a frame, a file that the GPU is to decode, or why there is neither


def centre(size: tuple[int, int]) -> Framing:
    """The shorter side to 256/224 of the size, then the centre: how evaluations see images."""
    height, width = size

    def framing(rows: int, columns: int) -> Frame:
        scale = max(height * RESIZE / rows, width * RESIZE / columns)
        whole = max(height, round(rows * scale)), max(width, round(columns * scale))
        return Frame(*whole, (whole[0] - height) // 2, (whole[1] - width) // 2, height, width)

    return framing


def whole(side: int | None, patch: int, max_side: int) -> Framing:
    """All of the image: its shorter side to `side` pixels (None: as it is), but the longer to at most `max_side`; both
    then to the nearest number of whole patches."""

    def framing(rows: int, columns: int) -> Frame:
        scale = 1.0 if side is None else side / min(rows, columns)
        scale = min(scale, max_side / max(rows, columns))
        most = max(1, max_side // patch)
        height, width = (patch * min(most, max(1, round(n * scale / patch))) for n in (rows, columns))
        return Frame(height, width, 0, 0, height, width)

    return framing


def resize(image: Pixels, frame: Frame) -> Pixels:
    """The frame of an image, by bicubic resampling; nothing is computed of what lies outside of it.

    Across, then down, in two calls: in one, Pillow 13 goes down first where an image is more than about twice as high
    as wide, which changes pixels beside sharp edges by up to 30 of 255.
    """
    rows, columns, top, left, height, width = frame
    down, across = image.shape[1] / rows, image.shape[2] / columns
    first, used = (int(n) for n in needed(image.shape[1], rows, top, height))
    sides = left * across, 0, min((left + width) * across, image.shape[2]), used
    ends = 0, max(0.0, top * down - first), width, min((top + height) * down - first, used)
    made = []
    for channel in image:
        part = Image.fromarray(channel[first : first + used]).resize((width, used), BICUBIC, sides)
        made.append(np.asarray(part.resize((width, height), BICUBIC, ends)))
    return np.stack(made)


@dataclass(frozen=True)
class Alike:
    """Images of one size."""

    indices: NDArray[np.int64]  # in the source
    pixels: Tensor  # n×C×height×width uint8, on the device


@dataclass(frozen=True)
class Batch:
    groups: list[Alike]
    unreadable: dict[int, str]  # index -> reason


class Images:
    """`for batch in Images(source, decoder, centre((224, 224)), device).batches([[0, 1, 2], [3, 4]])`"""

    def __init__(
        self,
        source: Source,
        decoder: Decoder,
        framing: Framing,
        device: torch.device,
        num_workers: int | None = None,
        store: Store | None = None,  # pixels that are there already, of every image
        gpu_decoding: bool = True,  # where the device can; of colours at half resolution its pixels are other ones
    ) -> None:
        self.source, self.decoder, self.framing, self.device, self.store = source, decoder, framing, device, store
        self.num_workers = cpu_count() if num_workers is None else num_workers
        on_gpu = device.type == "cuda" and triton_available.possible and gpu_decoding
        self.gpu = GpuDecoder(decoder, device) if on_gpu and GpuDecoder.suits(device) else None

    def batches(self, order: Iterable[NDArray[np.int64]]) -> Generator[Batch, None, None]:
        """One batch for each array of indices."""
        stored = self.store is not None and self.store.on_gpu
        made = in_order(
            order,
            lambda indices: indices[:0] if stored else indices,
            self._bring,
            self._assemble,
            lambda: str(self.source.root),
            self.num_workers,
            torch.cuda.current_device() if self.device.type == "cuda" else None,
        )
        try:
            for batch in made:
                if self.device.type == "cuda":
                    for group in batch.groups:  # memory is not given away before this stream is done with it
                        group.pixels.record_stream(torch.cuda.current_stream(self.device))
                yield batch
        finally:
            made.close()

    def _bring(self, index: int) -> Item:
        if self.store is not None:
            return self._resized(self.store.image(index))
        try:
            data = self.source.read(index)
            return (self.gpu.take(data) if self.gpu is not None else None) or self._resized(self.decoder(data))
        except (Unreadable, OSError) as error:
            lost = self.source.lost(index)
            if lost is not None:
                raise UserError(f"{lost} has disappeared; bring it back and run it again") from None
            return reason_of(error)
        except Exception as error:
            fail(error, self.source, index)

    def _resized(self, image: Pixels) -> Pixels:
        return resize(image, self.framing(*image.shape[1:]))

    def _assemble(self, indices: NDArray[np.int64], items: list[Item]) -> Batch:
        own = stream("decoding", self.device) if self.device.type == "cuda" else None  # of the GPU's decoder too
        with torch.cuda.stream(own):
            groups: list[Alike] = []
            if self.store is not None and not items:
                groups = self._framed(self.store.select(indices), indices)
            elif self.gpu is not None:
                groups = self._decode(self.gpu, indices, items)
            batch = self._join(indices, items, groups)
        if own is not None:
            own.synchronize()  # this thread waits, not the one that launches the network
        return batch

    def _decode(self, gpu: GpuDecoder, indices: NDArray[np.int64], items: list[Item]) -> list[Alike]:
        """What the GPU decodes; files that it cannot are given to the CPU, in `items`, which says what is wrong."""
        groups = []
        for places in _portions(items):
            packed = None
            while places and packed is None:
                encoded = [item for item in (items[place] for place in places) if isinstance(item, Encoded)]
                packed, failed = gpu.pack(list(encoded))
                for number in failed:
                    items[places[number]] = self._by_cpu(encoded[number].data)
                places = [place for place in places if isinstance(items[place], Encoded)]
            if packed is not None:
                groups += self._framed(packed, indices[places])
        return groups

    def _by_cpu(self, data: bytes) -> Pixels | str:
        try:
            return self._resized(self.decoder(data))
        except Unreadable as error:
            return str(error)

    def _framed(self, packed: Packed, indices: NDArray[np.int64]) -> list[Alike]:
        """The frames of images that lie on the GPU."""
        from adclr.data.augment import frame_kernels

        frames = np.array([self.framing(*size) for size in packed.sizes.tolist()], np.int64)
        shapes, channels = frames[:, 4:], packed.num_channels
        order = np.lexsort((shapes[:, 1], shapes[:, 0]))  # those of one size side by side
        sizes = channels * shapes.prod(axis=1)
        places = np.empty_like(sizes)
        places[order] = np.cumsum(sizes[order]) - sizes[order]
        out = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=self.device)
        frame_kernels.resize(packed, frames, places, out)
        groups = []
        for part in np.split(order, np.flatnonzero(np.diff(shapes[order], axis=0).any(axis=1)) + 1):
            start, (height, width) = int(places[part[0]]), shapes[part[0]].tolist()
            flat = out[start : start + len(part) * channels * height * width]
            groups.append(Alike(indices[part], flat.view(len(part), channels, height, width)))
        return groups

    def _join(self, indices: NDArray[np.int64], items: list[Item], groups: list[Alike]) -> Batch:
        """Frames that the CPU made and groups that the GPU did, those of one size together."""
        frames: dict[tuple[int, ...], list[tuple[int, Pixels]]] = {}
        unreadable = {}
        for index, item in zip(indices.tolist(), items, strict=bool(items)):
            if isinstance(item, str):
                unreadable[index] = item
            elif not isinstance(item, Encoded):
                frames.setdefault(item.shape, []).append((index, item))
        for made in frames.values():
            pixels = send(np.stack([frame for _, frame in made]), self.device)
            groups = [*groups, Alike(np.array([index for index, _ in made], np.int64), pixels)]
        alike: dict[tuple[int, ...], list[Alike]] = {}
        for group in groups:
            alike.setdefault(tuple(group.pixels.shape[1:]), []).append(group)
        return Batch([_merged(same) for same in alike.values()], unreadable)


def _merged(groups: list[Alike]) -> Alike:
    if len(groups) == 1:
        return groups[0]
    indices = np.concatenate([group.indices for group in groups])
    return Alike(indices, torch.cat([group.pixels for group in groups]))


def _portions(items: list[Item]) -> list[list[int]]:
    """The places of files that the GPU is to decode, in runs of so few pixels that they fit."""
    portions: list[list[int]] = []
    room = 0
    for place, item in enumerate(items):
        if isinstance(item, Encoded):
            size = 3 * item.header.height * item.header.width
            if not portions or size > room:
                portions.append([])
                room = TOGETHER
            portions[-1].append(place)
            room -= size
    return portions
