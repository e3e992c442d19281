"""Features of any images: a vector for each, as Parquet, or a map of its patches. A stopped command can be resumed.

The features of an image depend on the image alone, not on threads, batches or other images, but for the rounding of
matrix products, which depends on their size: 1e-5 of a vector's length in float32, a cosine of 0.9999 in bfloat16.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from adclr.config import parsing
from adclr.config.parsing import Count, Device, Section, Side, UserError, setting
from adclr.data import collection, file_stamps
from adclr.data.collection import open_source
from adclr.data.file_stamps import Check
from adclr.data.random_draws import key_of
from adclr.data.sources import Source
from adclr.features.embedding_files import Parts
from adclr.features.embedding_resume import Format, PartStamps
from adclr.features.embedding_workers import SharedParts
from adclr.features.reader import (
    Framing,
    ImageBatch,
    ImageReader,
    SameSize,
    center_crop,
    normalizer,
    split_batches,
    whole_image,
)
from adclr.model.named_tensors import Input, Tokens
from adclr.system import machine
from adclr.system.devices import autocast_dtype, select_device
from adclr.system.files import check_writable
from adclr.system.progress import ProgressLine
from adclr.system.runs import provenance
from adclr.system.store_urls import base_name, conceal, is_remote
from adclr.system.stores import mirror as store_mirror
from adclr.system.text import printable
from adclr.weights.backbone import Weights, load_weights

# tokens that go through the network at once: 256 images of 224 pixels are 50 432 of them with patches of 16
MAX_TOKENS = 2**17
PART_ROWS, PART_BYTES = 8192, 2**28  # of a part: vectors, patch maps
ASSUMED_SIDE = 1024  # pixels of images that keep their size, for the size of a part
MAX_PENDING = 3  # batches that wait to be written


class EmbeddingSettings(Section):
    """Settings of `adclr embed`."""

    vector: Literal["cls", "mean_patch", "both"] = Field(
        "cls", description="[CLS], the mean of the patches, or both concatenated"
    )
    normalize: bool = setting(False, "L2-normalize each vector", old_name="normalise")
    size: Literal["input"] | Side | None = Field(
        "input", description="image size, pixels; input: the size of training; null: the images' own sizes"
    )
    framing: Literal["auto", "crop", "whole"] = Field(
        "auto",
        description="crop: resize to 256/224 of size, center crop; whole: shorter side of size, rounded to patches; "
        "auto: whole for patch maps and size=null, else crop",
    )
    max_side: Side = Field(2048, description="limit of the longer side of whole images, pixels")
    dtype: Literal["float32", "float16"] | None = Field(
        None, description="data type of the output; null: float32 for vectors, float16 for patch maps"
    )
    format: Literal["safetensors", "npy"] = Field("safetensors", description="file format of patch maps")
    part_size: Count | None = Field(
        None, description="images per part file; null: 8192, or patch maps of about 256 MiB"
    )
    shared: bool = setting(
        False, "several commands write to the same folder; each part is written by one of them", free=["resume"]
    )
    batch_size: Count = setting(256, "images per batch", free=["resume"])
    num_workers: int | None = setting(None, "decoding threads; null: one per CPU core", free=["resume"], ge=1)
    gpu_decoding: bool = Field(
        True,
        description="decode JPEGs on the GPU if it can; pixels differ by about 1 of 255 from the CPU's",
    )
    check: Check = setting(
        "time",
        "detect replaced images by size and modification time, or by content, which reads all images first",
        free=["resume"],
    )
    device: Device = setting("auto", "auto: the GPU if there is one", free=["resume"])
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 autocast on a GPU that has it, else float32"
    )


def embed(
    weights: str | os.PathLike[str],
    images: str | Path,
    out: str | Path,
    dense: bool = False,
    partial: bool = False,
    overwrite: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Write the features of images and return a summary: `embed("runs/photos", "photos/", out="features.parquet")`."""
    return embed_collection(
        os.fspath(weights),
        str(images),
        os.fspath(out),
        dense,
        parsing.build(EmbeddingSettings, settings),
        partial,
        overwrite,
    )


def embed_collection(
    weights: str,
    images: str,
    out: str | Path,
    dense: bool,
    settings: EmbeddingSettings,
    partial: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the features of images, or the parts of them that are missing; return what the JSON file says of them."""
    if machine.num_processes() > 1:
        raise UserError(
            "adclr embed does not use torchrun; for several workers, run the command several times with shared=true"
        )
    weights, images, url = conceal(weights), conceal(images), conceal(os.fspath(out))
    if is_remote(url):
        if settings.shared:
            raise UserError(f"workers share a folder on a disk, and {url} is in a store; leave out shared=true")
        if url.startswith(f"{images.rstrip('/')}/"):
            raise UserError(f"{url} lies in the collection {images}; choose another --out")
        single = url.endswith(".parquet")
        beside = ("", ".json", ".unreadable.jsonl") if single else ()
        last = f"{base_name(url)}.json" if single else "_embed.json"
        with store_mirror.uploaded(url, last, beside, resumed=True) as copy:
            described = embed_collection(weights, images, copy, dense, settings, partial, overwrite)
        print(f"uploaded to {url}")
        return described
    out = Path(out)
    kind: Format = settings.format if dense else "parquet"
    for name in ("vector",) if dense else ("format",):
        if name in settings.model_fields_set:
            raise UserError(f"{name} is a setting {'without' if dense else 'of'} --dense; leave it out")
    check_writable(out)
    Parts.check(out, kind)
    source = open_source(images)
    collection.check_apart(out, source, is_file=out.suffix == ".parquet")
    device = select_device(settings.device)
    loaded = load_weights(weights, partial, networks=True)
    network = Network(loaded, settings, dense, device)
    size, facts = network.part_size(), network.facts() | {"images": _hash_order(source)}
    part_stamps = PartStamps.of(
        file_stamps.read_stamps(source, settings.check, settings.num_workers), size, settings.check
    )
    parts_of = SharedParts if settings.shared else Parts
    parts = parts_of(out, kind, len(source), size, facts, part_stamps, overwrite)
    about = parts.finished()
    if about is not None:
        print(printable(f"{out} is finished: {about['rows']} images"))
        return about
    if parts.renewed:
        changed = f"{len(parts.renewed)} of {len(part_stamps.newest)} parts of {out}"
        print(f"images of {changed} have changed; these parts are written again")
    with parts.open():
        reader = ImageReader(
            source,
            loaded.decoder,
            network.framing,
            device,
            settings.num_workers,
            gpu_decoding=settings.gpu_decoding,
        )
        started = time.monotonic()
        num_images = fill(parts, reader, network, settings.batch_size)
        while parts.wait():
            num_images += fill(parts, reader, network, settings.batch_size)
        seconds = time.monotonic() - started
        rate = num_images / seconds
        totals = {"dim": network.dim, "seconds": seconds, "images_per_second": rate if num_images else None}
        about = parts.finish(totals | {"source": images, "weights_from": weights, "provenance": provenance()})
    if about["unreadable"]:
        left_out = f"{about['unreadable']} images could not be read and were left out"
        print(printable(f"{left_out}: {parts.unreadable} lists them"))
    print(printable(f"{about['rows']} images, {rate:.0f} images/s, written to {out}"))
    return about


def _hash_order(source: Source) -> str:
    """Return a hash of the images in their order, since parts are runs of it."""
    names = np.fromiter(map(key_of, source.paths), np.uint64, len(source))
    return blake2b(names.tobytes(), digest_size=16).hexdigest()


class SizeFeatures(NamedTuple):
    """Features of images of one size."""

    indices: NDArray[np.int64]
    values: Tensor  # n×D or n×height×width×D
    finite: Tensor  # whether all values are


class Network:
    """A network and what is computed with it: `network(groups)` returns features of images of several sizes."""

    def __init__(self, weights: Weights, settings: EmbeddingSettings, dense: bool, device: torch.device) -> None:
        self.weights, self.settings, self.dense, self.device = weights, settings, dense, device
        self.vit = weights.vit.to(device)
        self.framing = self._framing()
        self.autocast = autocast_dtype(settings.precision, device)
        self.dtype = getattr(torch, settings.dtype or ("float16" if dense else "float32"))
        patch_dim = weights.patch_dim
        self.dim = (
            patch_dim
            if dense
            else {"cls": self.vit.dim, "both": self.vit.dim + patch_dim}.get(settings.vector, patch_dim)
        )
        self.normalize = normalizer(weights, device)

    def _framing(self) -> Framing:
        settings, patch = self.settings, self.vit.patch_size
        size = self.vit.input_size if settings.size == "input" else settings.size
        framing = settings.framing
        if framing == "auto":
            framing = "whole" if self.dense or size is None else "crop"
        if framing == "whole":
            return whole_image(min(size) if isinstance(size, tuple) else size, patch, settings.max_side)
        if size is None:
            raise UserError("framing=crop needs a size, and size=null gives none; change one of them")
        sides = size if isinstance(size, tuple) else (size, size)
        if any(side % patch for side in sides):
            nearest = max(patch, round(sides[0] / patch) * patch)
            raise UserError(
                f"size={settings.size} is not divisible by these weights' patches of {patch}; set size={nearest}"
            )
        return center_crop(sides)

    def part_size(self) -> int:
        """Return how many images a part has."""
        if self.settings.part_size:
            return self.settings.part_size
        if not self.dense:
            return PART_ROWS
        side = min(self.vit.input_size) if self.settings.size == "input" else self.settings.size or ASSUMED_SIDE
        map_bytes = (side / self.vit.patch_size) ** 2 * self.weights.patch_dim * self.dtype.itemsize
        return int(min(PART_ROWS, max(1, PART_BYTES // map_bytes)))

    def facts(self) -> dict[str, Any]:
        """Return what must be the same where an embedding is resumed."""
        free = parsing.free_settings(EmbeddingSettings, "resume")
        resolved = {
            "dense": self.dense,
            "part_size": self.part_size(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "precision": "float32" if self.autocast is None else "bfloat16",
            "weights": self.weights.fingerprint(),
        }
        return self.settings.model_dump(mode="json", exclude=free | set(resolved)) | resolved

    @torch.no_grad()
    def __call__(self, groups: list[SameSize]) -> list[SizeFeatures]:
        """Return the features of all images; those of a large group come in several parts."""
        patches = self.dense or self.settings.vector != "cls"
        features = []
        for portion in self._portions(groups):
            inputs = [Input(self.normalize(group.pixels), patches=patches) for group in portion]
            with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                tokens = self.vit.forward_many(inputs)
            for group, group_tokens in zip(portion, tokens, strict=True):
                values = self._values(group_tokens, group.pixels.shape[2:])
                features.append(SizeFeatures(group.indices, values, values.isfinite().all()))
        return features

    def _portions(self, groups: list[SameSize]) -> Iterator[list[SameSize]]:
        """Yield groups, split where necessary, of at most `MAX_TOKENS` together."""
        portion: list[SameSize] = []
        free = MAX_TOKENS
        for group in groups:
            height, width = self.vit.grid_of(*group.pixels.shape[2:])
            num_tokens = self.vit.num_prefix + height * width
            start = 0
            while start < len(group.indices):
                if portion and free < num_tokens:
                    yield portion
                    portion, free = [], MAX_TOKENS
                count = min(len(group.indices) - start, max(1, free // num_tokens))
                portion.append(SameSize(group.indices[start : start + count], group.pixels[start : start + count]))
                start, free = start + count, free - count * num_tokens
        if portion:
            yield portion

    def _values(self, tokens: Tokens, size: torch.Size) -> Tensor:
        if self.dense:
            values = tokens.patches.float().reshape(-1, *self.vit.grid_of(*size), self.weights.patch_dim)
        elif self.settings.vector == "cls":
            values = tokens.cls.float()
        else:
            values = tokens.patches.float().mean(dim=1)
            if self.settings.vector == "both":
                values = torch.cat([tokens.cls.float(), values], dim=-1)
        if self.settings.normalize:
            values = F.normalize(values, dim=-1)
        features: Tensor = values.to(self.dtype)
        return features


class EmbeddedPart:
    """The rows of a part until it is complete; used by one thread, which waits for the GPU so that others need not."""

    def __init__(self, parts: Parts, source: Source) -> None:
        self.parts, self.source = parts, source
        self.rows: dict[int, NDArray[Any]] = {}
        self.unreadable: dict[int, str] = {}

    def add(
        self, number: int, features: list[SizeFeatures], ready: torch.cuda.Event | None, unreadable: dict[int, str]
    ) -> None:
        """Add a batch; with its last batch the part is written."""
        if ready is not None:
            ready.synchronize()
        for indices, values, finite in features:
            if not finite:
                path, dtype = self.source.paths[int(indices[0])], str(values.dtype).removeprefix("torch.")
                raise UserError(
                    f"features of {path}, or of an image after it, are not finite or too large for dtype={dtype}; "
                    "set dtype=float32, or use other weights"
                )
            self.rows |= dict(zip(indices.tolist(), values.numpy(), strict=True))
        self.unreadable |= unreadable
        if len(self.rows) + len(self.unreadable) == len(self.parts.indices(number)):
            paths = self.source.paths
            rows = [(paths[index], self.rows[index]) for index in sorted(self.rows)]
            self.parts.write(number, rows, {paths[index]: self.unreadable[index] for index in sorted(self.unreadable)})
            self.rows, self.unreadable = {}, {}


def fill(parts: Parts, reader: ImageReader, network: Network, batch_size: int, show: bool = True) -> int:
    """Write the parts that are missing; return how many images they have."""
    num_before, started = parts.num_done(), time.monotonic()
    part, num_images, pending = EmbeddedPart(parts, reader.source), 0, deque[Future[None]]()
    jobs = deque[tuple[int, NDArray[np.int64]]]()  # parts and indices of the batches that are on their way

    def order() -> Iterator[NDArray[np.int64]]:
        for number in parts.missing():  # which one of several workers takes only as it comes to it
            for indices in split_batches(parts.indices(number), batch_size):
                jobs.append((number, indices))
                yield indices

    batches = reader.batches(order())
    writer = ThreadPoolExecutor(1, "write")
    try:
        with ProgressLine("embed", parts.count, num_before, show) as line:
            for batch in batches:
                number, indices = jobs.popleft()
                pending.append(writer.submit(part.add, number, *_features_on_host(network, batch), batch.unreadable))
                if len(pending) > MAX_PENDING:
                    pending.popleft().result()
                num_images += len(indices)
                rate = num_images / (time.monotonic() - started)
                line.move(num_before + num_images, f"{rate:.0f} images/s")
            while pending:
                pending.popleft().result()
    except torch.OutOfMemoryError:
        raise UserError(
            f"{batch_size} images at once do not fit into the GPU's memory; set batch_size={max(1, batch_size // 2)}"
        ) from None
    finally:
        batches.close()
        writer.shutdown(wait=True, cancel_futures=True)
    return num_images


def _features_on_host(network: Network, batch: ImageBatch) -> tuple[list[SizeFeatures], torch.cuda.Event | None]:
    """Return features that are on the host once the event has occurred; the thread that launches it does not wait."""
    features = network(batch.groups)
    if network.device.type != "cuda":
        return features, None

    def to_host(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    on_host = [SizeFeatures(indices, to_host(values), to_host(finite)) for indices, values, finite in features]
    return on_host, torch.cuda.current_stream(network.device).record_event()
