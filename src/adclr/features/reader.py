"""The reader of images for frozen networks: reads images of a source by index, decodes, resizes and batches them.

The thread that decodes an image also resizes it, so that a photograph of 36 MB is in memory no longer than that takes.
The CPU resizes by Pillow; a GPU that decodes plain JPEGs by the batch resizes them by kernels with Pillow's pixels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from adclr.config.parsing import UserError
from adclr.data.augment.resample import source_range
from adclr.data.cache import Store
from adclr.data.decode import Decoder, Pixels, Unreadable
from adclr.data.nvjpeg import Encoded, GpuDecoder
from adclr.data.packed import Packed
from adclr.data.sources import Source, error_reason, raise_with_name
from adclr.data.sources.store_reader import read_ahead
from adclr.system import triton_available
from adclr.system.devices import decoding_stream, send
from adclr.system.machine import cpu_count
from adclr.system.progress import ProgressLine
from adclr.system.text import printable
from adclr.system.threads import load_in_order
from adclr.weights.backbone import Weights

RESIZE = 256 / 224  # the shorter side before the center is cropped, relative to the crop
BICUBIC = Image.Resampling.BICUBIC
MAX_DECODE_BYTES = 2**28  # pixels that the GPU decodes at once
CHUNK = 4  # whole images in one job of the threads: few, since they are large
MAX_WAITING_BYTES = 2**29  # whole images that wait for others of their size

Decoded = TypeVar("Decoded")


class Frame(NamedTuple):
    """The resized size of a whole image, rows×columns, and the part of it that is used."""

    rows: int
    columns: int
    top: int
    left: int
    height: int
    width: int


Framing = Callable[[int, int], Frame]  # (height, width) of an image -> its frame
Item = Pixels | Encoded | str  # resized pixels, a file that the GPU is to decode, or why an image is unreadable


def center_crop(size: tuple[int, int]) -> Framing:
    """Return the framing of evaluations: the shorter side to 256/224 of the size, then the center."""
    height, width = size

    def framing(rows: int, columns: int) -> Frame:
        scale = max(height * RESIZE / rows, width * RESIZE / columns)
        resized = max(height, round(rows * scale)), max(width, round(columns * scale))
        return Frame(*resized, (resized[0] - height) // 2, (resized[1] - width) // 2, height, width)

    return framing


def whole_image(side: int | None, patch: int, max_side: int) -> Framing:
    """Return the framing of whole images: the shorter side to `side` pixels (None: unchanged), the longer to at most
    `max_side`, both rounded to whole patches."""

    def framing(rows: int, columns: int) -> Frame:
        scale = 1.0 if side is None else side / min(rows, columns)
        scale = min(scale, max_side / max(rows, columns))
        max_patches = max(1, max_side // patch)
        height, width = (patch * min(max_patches, max(1, round(n * scale / patch))) for n in (rows, columns))
        return Frame(height, width, 0, 0, height, width)

    return framing


def resize(image: Pixels, frame: Frame) -> Pixels:
    """Return the frame of an image, by bicubic resampling; pixels outside of the frame are not computed.

    Across, then down, in two calls: in one, Pillow 13 goes down first where an image is more than about twice as high
    as wide, which changes pixels beside sharp edges by up to 30 of 255.
    """
    rows, columns, top, left, height, width = frame
    down, across = image.shape[1] / rows, image.shape[2] / columns
    first, count = (int(n) for n in source_range(image.shape[1], rows, top, height))
    across_box = left * across, 0, min((left + width) * across, image.shape[2]), count
    down_box = 0, max(0.0, top * down - first), width, min((top + height) * down - first, count)
    channels = []
    for channel in image:
        narrow = Image.fromarray(channel[first : first + count]).resize((width, count), BICUBIC, across_box)
        channels.append(np.asarray(narrow.resize((width, height), BICUBIC, down_box)))
    return np.stack(channels)


def normalizer(weights: Weights, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the normalization of a network's inputs: (images - mean) / std, of images in [0, 1] or of uint8 ones."""
    mean, std = (send(np.array(n, np.float32).reshape(-1, 1, 1), device) for n in (weights.mean, weights.std))

    def normalize(images: Tensor) -> Tensor:
        pixels = images.float() / 255 if images.dtype == torch.uint8 else images
        return (pixels - mean) / std

    return normalize


def split_batches(indices: NDArray[np.int64], batch_size: int) -> list[NDArray[np.int64]]:
    """Return runs of at most `batch_size` indices."""
    return [indices[start : start + batch_size] for start in range(0, len(indices), batch_size)]


def _read_image(source: Source, decode: Callable[[bytes], Decoded], index: int) -> Decoded | str:
    """Return an image of a source, decoded, or the reason why it is unreadable; a folder that is gone is an error."""
    try:
        return decode(source.read(index))
    except (Unreadable, OSError) as error:
        lost = source.lost(index)
        if lost is not None:
            raise UserError(
                f"{lost} does not exist or has disappeared; restore it or correct its path, and run it again"
            ) from None
        return error_reason(error)
    except Exception as error:
        raise_with_name(error, source, index)


def read_images(
    source: Source, decode: Callable[[bytes], Decoded], indices: Sequence[int], num_workers: int
) -> Generator[tuple[int, Decoded | str], None, None]:
    """Yield (index, decoded image or the reason why it is unreadable) in order, decoded ahead by threads."""
    chunks = load_in_order(
        read_ahead(split_batches(np.asarray(indices, np.int64), CHUNK), lambda chunk: chunk, source),
        lambda chunk: chunk,
        lambda index: (index, _read_image(source, decode, index)),
        lambda chunk, images: images,
        lambda: str(source.root),
        num_workers,
        ahead=num_workers,
    )
    with closing(chunks):
        yield from chain.from_iterable(chunks)


@dataclass(frozen=True)
class SameSize:
    """Images of one size."""

    indices: NDArray[np.int64]  # in the source
    pixels: Tensor  # n×C×height×width uint8


@dataclass(frozen=True)
class ImageBatch:
    """The images of a batch, grouped by size, and why the others are missing."""

    groups: list[SameSize]
    unreadable: dict[int, str]  # index -> reason


class ImageReader:
    """`for batch in ImageReader(source, decoder, center_crop((224, 224)), device).batches([[0, 1, 2], [3, 4]])`"""

    def __init__(
        self,
        source: Source,
        decoder: Callable[[bytes], Pixels],
        framing: Framing | None,  # None: images keep their size
        device: torch.device,
        num_workers: int | None = None,
        store: Store | None = None,  # decoded pixels of every image, if there are any
        gpu_decoding: bool = False,  # if the device can; pixels of subsampled colors then differ from the CPU's
    ) -> None:
        self.source, self.decoder, self.framing, self.device, self.store = source, decoder, framing, device, store
        self.num_workers = cpu_count() if num_workers is None else num_workers
        self.unreadable: dict[int, str] = {}  # index -> reason, of all images read so far
        self.gpu: GpuDecoder | None = None
        on_gpu = gpu_decoding and device.type == "cuda" and triton_available.possible and GpuDecoder.suits(device)
        if on_gpu and framing is not None and isinstance(decoder, Decoder):
            self.gpu = GpuDecoder(decoder, device)

    def batches(self, order: Iterable[NDArray[np.int64]]) -> Generator[ImageBatch, None, None]:
        """Yield one batch for each array of indices, on the device."""
        stored = self.store is not None and self.store.on_gpu
        batches = load_in_order(
            order if self.store is not None else read_ahead(order, lambda indices: indices, self.source),
            lambda indices: indices[:0] if stored else indices,
            self._read,
            self._assemble,
            lambda: str(self.source.root),
            self.num_workers,
            torch.cuda.current_device() if self.device.type == "cuda" else None,
        )
        with closing(batches):
            for batch in batches:
                self.unreadable |= batch.unreadable
                if self.device.type == "cuda":
                    for group in batch.groups:  # memory is not reused before this stream is done with it
                        group.pixels.record_stream(torch.cuda.current_stream(self.device))
                yield batch

    def images(self, indices: Sequence[int]) -> Generator[tuple[int, Pixels], None, None]:
        """Yield (index, pixels on the CPU) of the readable images, in order."""
        for index, pixels in read_images(self.source, self._decode, indices, self.num_workers):
            if isinstance(pixels, str):
                self.unreadable[index] = pixels
            else:
                yield index, pixels

    def batches_by_size(
        self, indices: Sequence[int], batch_size: int, name: str, show: bool
    ) -> Generator[SameSize, None, None]:
        """Yield batches of images of one size, each full or the last of its size, on the device.

        Images wait for others of their size. When too many wait, as they would where hardly two are of one size, those
        of the most frequent size go first.
        """
        waiting: dict[tuple[int, ...], list[tuple[int, Pixels]]] = {}
        num_bytes = 0
        with closing(self.images(indices)) as images, ProgressLine(name, len(indices), show=show) as line:
            for num_read, (index, pixels) in enumerate(images, 1):
                shape = pixels.shape
                waiting.setdefault(shape, []).append((index, pixels))
                num_bytes += pixels.nbytes
                full = len(waiting[shape]) == batch_size
                if num_bytes > MAX_WAITING_BYTES and not full:
                    shape = max(waiting, key=lambda other: len(waiting[other]))
                if num_bytes > MAX_WAITING_BYTES or full:
                    ready = waiting.pop(shape)
                    num_bytes -= sum(item.nbytes for _, item in ready)
                    yield self._stack(ready)
                line.move(num_read + len(self.unreadable))
            for rest in waiting.values():
                yield self._stack(rest)

    def print_skipped(self, most: int | None = 5) -> None:
        """Print the first unreadable images (None: all) and why they are."""
        for index, reason in list(self.unreadable.items())[:most]:
            print(printable(f"skipped {self.source.paths[index]}: {reason}"), file=sys.stderr)

    def _decode(self, data: bytes) -> Pixels:
        return self._resize(self.decoder(data))

    def _resize(self, image: Pixels) -> Pixels:
        return image if self.framing is None else resize(image, self.framing(*image.shape[1:]))

    def _stack(self, images: list[tuple[int, Pixels]]) -> SameSize:
        indices = np.array([index for index, _ in images], np.int64)
        return SameSize(indices, send(np.stack([pixels for _, pixels in images]), self.device))

    def _read(self, index: int) -> Item:
        if self.store is not None:
            return self._resize(self.store.image(index))
        return _read_image(self.source, self._take, index)

    def _take(self, data: bytes) -> Pixels | Encoded:
        encoded = self.gpu.take(data) if self.gpu is not None else None
        return encoded or self._decode(data)

    def _assemble(self, indices: NDArray[np.int64], items: list[Item]) -> ImageBatch:
        with decoding_stream(self.device):  # this thread waits at its end, not the one that launches the network
            groups: list[SameSize] = []
            if self.store is not None and not items:
                groups = self._resize_on_gpu(self.store.select(indices), indices)
            elif self.gpu is not None:
                groups = self._decode_on_gpu(self.gpu, indices, items)
            return self._join(indices, items, groups)

    def _decode_on_gpu(self, gpu: GpuDecoder, indices: NDArray[np.int64], items: list[Item]) -> list[SameSize]:
        """Decode the encoded items; those that the GPU cannot decode are replaced in `items` by what the CPU makes."""
        groups = []
        for positions in _split_encoded(items):
            packed = None
            while positions and packed is None:
                encoded = [item for item in (items[position] for position in positions) if isinstance(item, Encoded)]
                packed, failed = gpu.pack(list(encoded))
                for number in failed:
                    items[positions[number]] = self._decode_failed(encoded[number].data)
                positions = [position for position in positions if isinstance(items[position], Encoded)]
            if packed is not None:
                groups += self._resize_on_gpu(packed, indices[positions])
        return groups

    def _decode_failed(self, data: bytes) -> Pixels | str:
        try:
            return self._decode(data)
        except Unreadable as error:
            return str(error)

    def _resize_on_gpu(self, packed: Packed, indices: NDArray[np.int64]) -> list[SameSize]:
        """Return the frames of images whose pixels are on the GPU."""
        from adclr.data.augment import frame_kernels

        assert self.framing is not None
        frames = np.array([self.framing(*size) for size in packed.sizes.tolist()], np.int64)
        shapes, channels = frames[:, 4:], packed.num_channels
        order = np.lexsort((shapes[:, 1], shapes[:, 0]))  # images of one size side by side
        sizes = channels * shapes.prod(axis=1)
        offsets = np.empty_like(sizes)
        offsets[order] = np.cumsum(sizes[order]) - sizes[order]
        out = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=self.device)
        frame_kernels.resize(packed, frames, offsets, out)
        groups = []
        for part in np.split(order, np.flatnonzero(np.diff(shapes[order], axis=0).any(axis=1)) + 1):
            start, (height, width) = int(offsets[part[0]]), shapes[part[0]].tolist()
            flat = out[start : start + len(part) * channels * height * width]
            groups.append(SameSize(indices[part], flat.view(len(part), channels, height, width)))
        return groups

    def _join(self, indices: NDArray[np.int64], items: list[Item], groups: list[SameSize]) -> ImageBatch:
        """Return the groups of the GPU and the frames of the CPU, those of one size together."""
        frames: dict[tuple[int, ...], list[tuple[int, Pixels]]] = {}
        unreadable = {}
        for index, item in zip(indices.tolist(), items, strict=bool(items)):
            if isinstance(item, str):
                unreadable[index] = item
            elif not isinstance(item, Encoded):
                frames.setdefault(item.shape, []).append((index, item))
        by_size: dict[tuple[int, ...], list[SameSize]] = {}
        for group in (*groups, *map(self._stack, frames.values())):
            by_size.setdefault(tuple(group.pixels.shape[1:]), []).append(group)
        return ImageBatch([_merge(same) for same in by_size.values()], unreadable)


def _merge(groups: list[SameSize]) -> SameSize:
    if len(groups) == 1:
        return groups[0]
    indices = np.concatenate([group.indices for group in groups])
    return SameSize(indices, torch.cat([group.pixels for group in groups]))


def _split_encoded(items: list[Item]) -> list[list[int]]:
    """Return the positions of the files that the GPU decodes, in runs of at most `MAX_DECODE_BYTES` of pixels."""
    runs: list[list[int]] = []
    free = 0
    for position, item in enumerate(items):
        if isinstance(item, Encoded):
            size = 3 * item.header.height * item.header.width
            if not runs or size > free:
                runs.append([])
                free = MAX_DECODE_BYTES
            runs[-1].append(position)
            free -= size
    return runs
