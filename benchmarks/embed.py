"""Images/s of `adclr embed`: of each stage on its own, and of all together, from files and from images kept decoded.

    python benchmarks/embed.py [--images 2048] [--side 500] [--batch 256] [--model vit_small_patch16] [--dense]

Photo-like JPEGs are generated in a temporary folder; the weights are random numbers. Stages run beside each other, so
that the slowest decides, and it is named. Every figure is the median of several repeats within this one run.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adclr.data import cache
from adclr.data.packed import Packed, pack
from adclr.data.sources import ImageFolder, Subset
from adclr.features import embedding
from adclr.features.embedding import Network, fill
from adclr.features.embedding_files import Parts
from adclr.features.reader import ImageReader, SameSize, resize
from adclr.system.machine import cpu_count, host_memory
from adclr.weights.backbone import Weights, create_backbone
from data import rate, write_photos

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Bench:
    def __init__(self, folder: Path, given: argparse.Namespace, device: torch.device) -> None:
        self.folder, self.batch, self.repeats, self.device = folder, given.batch, given.repeats, device
        vit = create_backbone(given.model, input_size=given.size).eval()
        self.weights = Weights(vit, MEAN, STD)
        self.network = Network(self.weights, embedding.EmbeddingSettings(), given.dense, device)
        self.source = ImageFolder(folder)
        self.found: dict[str, float] = {}

    def rate(self, name: str, count: int, work: Callable[[], Any]) -> None:
        self.found[name] = rate(name, count, self.repeats, self.device, work)

    def images(self, times: int = 1, store: cache.Store | None = None) -> ImageReader:
        """The folder, so many times over."""
        indices = np.tile(np.arange(len(self.source)), times)
        if store is not None:
            kept = store.packed
            store = cache.Store(Packed(kept.bytes, kept.offsets[indices], kept.sizes[indices], 3))
        source = Subset(self.source, indices)
        return ImageReader(
            source, self.weights.decoder, self.network.framing, self.device, store=store, gpu_decoding=True
        )

    def parts(self, place: str, count: int) -> Parts:
        kind: Any = "safetensors" if self.network.dense else "parquet"
        return Parts(Path(place) / "out", kind, count, self.network.part_size(), {})

    def all(self, name: str, images: ImageReader) -> None:
        def work() -> None:
            with tempfile.TemporaryDirectory(dir=self.folder.parent) as place:
                parts = self.parts(place, len(images.source))
                with parts.open():
                    fill(parts, images, self.network, self.batch, show=False)

        self.rate(name, len(images.source), work)

    def stages(self) -> None:
        source, decoder, framing = self.source, self.weights.decoder, self.network.framing
        everything = list(range(len(source)))
        with ThreadPoolExecutor(cpu_count()) as pool:
            runs = [everything[i : i + 8] for i in range(0, len(everything), 8)]

            def all_of(work: Callable[[int], Any]) -> None:
                list(pool.map(lambda run: [work(i) for i in run], runs))

            self.rate("read, on threads", len(source), lambda: all_of(source.read))
            blobs = [source.read(i) for i in everything]
            self.rate("decode, on threads", len(source), lambda: all_of(lambda i: decoder(blobs[i])))
            pixels = [decoder(blob) for blob in blobs[: self.batch]]

            def resized(i: int) -> None:
                image = pixels[i % len(pixels)]
                resize(image, framing(*image.shape[1:]))

            self.rate("resize, on threads", len(source), lambda: all_of(resized))
        reader = self.images()
        if self.device.type == "cuda":
            self.on_gpu(reader, blobs[: self.batch], pixels)
        (batch,) = reader.batches([np.arange(min(self.batch, len(source)))])
        count = sum(len(group.indices) for group in batch.groups)
        self.rate("forward", count, lambda: self.network(batch.groups))
        self.write(batch.groups, count)

    def on_gpu(self, reader: ImageReader, blobs: list[bytes], pixels: list[Any]) -> None:
        gpu = reader.gpu
        taken = [] if gpu is None else [item for item in map(gpu.take, blobs) if item is not None]
        if gpu is not None and taken:
            self.rate("decode, on the GPU", len(taken), lambda: gpu.pack(list(taken)))
        packed = pack(pixels, pin=True).to(self.device)
        indices = np.arange(len(pixels))
        self.rate("resize, on the GPU", len(pixels), lambda: reader._resize_on_gpu(packed, indices))

    def write(self, groups: list[SameSize], count: int) -> None:
        rows = [
            (self.source.paths[int(index)], values)
            for made in self.network(groups)
            for index, values in zip(made.indices, made.values.cpu().numpy(), strict=True)
        ]
        size = min(self.network.part_size(), 4096)
        rows = (rows * -(-size // count))[:size]
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as place:
            parts = self.parts(place, size)
            parts.done.mkdir(parents=True)
            self.rate("write", size, lambda: parts.write(0, rows, {}))

    def store(self) -> cache.Store | None:
        def read(index: int) -> Any:
            return self.weights.decoder(self.source.read(index))

        gpu = float(torch.cuda.mem_get_info()[0]) if self.device.type == "cuda" else 0.0
        room = cache.FreeMemory(host_memory(), gpu)
        where: Any = "gpu" if gpu else "ram"
        return cache.build_store(where, read, len(self.source), cpu_count(), room, self.device, show=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("images", 2048), ("side", 500), ("batch", 256), ("repeats", 3), ("size", 224), ("times", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default="vit_small_patch16")
    parser.add_argument("--dense", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "photos"
        size = write_photos(folder, given.images, given.side)
        what = torch.cuda.get_device_name() if device.type == "cuda" else "CPU only"
        print(f"{given.images} JPEGs of {given.side} pixels, {size // 1000} kB each; {cpu_count()} cores; {what}")
        bench = Bench(folder, given, device)
        print(
            f"{given.model} at {given.size} pixels, {'patch maps' if given.dense else 'vectors'}, batch {given.batch}"
        )
        bench.stages()
        fast = {name: speed for name, speed in bench.found.items() if not _replaced(name, bench.found)}
        bench.all("all, from files", bench.images(max(1, given.times // 4)))
        store = bench.store()
        assert store is not None
        where = "the GPU" if store.on_gpu else "memory"
        bench.all(f"all, from images kept in {where}", bench.images(given.times, store))
        for source, left_out in (("files", ()), ("images that are kept", ("read", "decode"))):
            stages = {name: speed for name, speed in fast.items() if not name.startswith(left_out)}
            slowest = min(stages, key=lambda name: stages[name])
            print(f"slowest stage from {source}: {slowest}, {stages[slowest]:.0f} images/s")


def _replaced(name: str, found: dict[str, float]) -> bool:
    """Whether the GPU does for these files what threads would do."""
    return name.endswith("on threads") and name.replace("on threads", "on the GPU") in found


if __name__ == "__main__":
    main()
