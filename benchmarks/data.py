"""Images/s of each stage of the data path and of all together, beside a plain torchvision + DataLoader pipeline.

    python benchmarks/data.py [--images 2048] [--side 500] [--batch 128] [--repeats 5]
    python benchmarks/data.py --train 30     # steps of training instead: from one constant batch, the cache, files

Photo-like JPEGs are generated in a temporary folder. Every figure is the median of several repeats within this one run:
compare figures of one run only. Views are 2×224 + 10×96 + 10 queries of 16 pixels, from `adclr_vits16`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from torchvision.transforms import v2

from adclr.config import parsing
from adclr.config.settings import Settings
from adclr.data import augment
from adclr.data.batches import TrainingBatches
from adclr.data.decode import Decoder
from adclr.data.feed import Feed, Prefetcher
from adclr.data.nvjpeg import GpuDecoder
from adclr.data.packed import pack
from adclr.data.sets import scenes
from adclr.data.sources import ImageFolder
from adclr.data.view_plan import plan_batch
from adclr.model.named_tensors import Views
from adclr.system.machine import cpu_count


def write_photos(folder: Path, count: int, side: int) -> int:
    """Scenes with the grain of a camera, as JPEG files; the mean bytes of one. 16 scenes, the rest shifted copies."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    base = [scenes.scene(0, number, side).image.astype(np.float32) for number in range(min(16, count))]
    for number in range(count):
        image = np.roll(base[number % len(base)], number, axis=1) + rng.normal(0, 6, (side, side, 1))
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{number:06d}.jpg", quality=90)
    return sum(path.stat().st_size for path in folder.iterdir()) // count


def rate(name: str, images: int, repeats: int, device: torch.device, work: Callable[[], Any]) -> float:
    """Times `work`, which handles so many images, after one round to warm up."""
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    speed = images / statistics.median(times[1:])
    print(
        f"{name:<52} {speed:>9.0f} images/s   ({images / max(times[1:]):.0f} to {images / min(times[1:]):.0f})",
        flush=True,
    )
    return speed


def blurred(image: Image.Image) -> Image.Image:
    """As DINO's own code has it: by Pillow. With torchvision's blur the whole pipeline takes 1.3 times as long."""
    return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))


class Plain(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """What most programs do: Pillow and torchvision transforms in worker processes."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.paths = sorted(folder.iterdir())
        views, patch = settings.views, settings.model.patch_size
        tail = [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(settings.data.mean, settings.data.std),
        ]

        def crops(
            size: int, scale: tuple[float, float], blur: float, solarize: float, colors: bool = True
        ) -> v2.Compose:
            steps: list[Any] = [
                v2.RandomResizedCrop(size, scale, interpolation=3, antialias=True),
                v2.RandomHorizontalFlip(),
            ]
            if colors:
                steps += [v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8), v2.RandomGrayscale(0.2)]
                steps += [v2.RandomApply([blurred], blur), v2.RandomSolarize(128, solarize)]
            return v2.Compose(steps + tail)

        self.kinds = [
            (1, crops(views.global_size, views.global_scale, 1.0, 0.0)),
            (1, crops(views.global_size, views.global_scale, 0.1, 0.2)),
            (views.num_local, crops(views.local_size, views.local_scale, 0.5, 0.0)),
            (views.num_queries, crops(patch, views.query_scale, 0.0, 0.0, colors=False)),
        ]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        with Image.open(self.paths[index]) as image:
            picture = image.convert("RGB")
        return [make(picture) for count, make in self.kinds for _ in range(count)]


class Bench:
    """The pieces of a data path over one folder, put together as training does it."""

    def __init__(self, folder: Path, settings: Settings, batch: int, device: torch.device) -> None:
        self.settings, self.batch, self.device = settings, batch, device
        self.source, self.decoder = ImageFolder(folder), Decoder()
        self.gpu = GpuDecoder(self.decoder, device) if GpuDecoder.suits(device) else None

    def feed(self, cached: bool) -> Feed:
        feed = Feed(self.source, cpu_count(), self.decoder, pin=self.device.type == "cuda", gpu_decoder=self.gpu)
        if cached:
            feed.keep("auto", self.device)
        return feed

    def views(self, feed: Feed, batches: int) -> Prefetcher[Views]:
        count = len(self.source)
        order = ((0, np.arange(i * self.batch, (i + 1) * self.batch) % count) for i in range(batches))
        return TrainingBatches(self.settings, feed, self.device, self.batch).prefetch(order)

    def run(self, feed: Feed, batches: int) -> None:
        views = self.views(feed, batches)
        for _ in views:
            pass
        views.close()


def stages(bench: Bench, repeats: int) -> None:
    """Each stage on its own."""
    source, decoder, device, data = bench.source, bench.decoder, bench.device, bench.settings.data
    everything = list(range(len(source)))
    with ThreadPoolExecutor(cpu_count()) as pool:
        parts = [everything[i : i + 8] for i in range(0, len(everything), 8)]

        def all_of(work: Callable[[int], Any]) -> list[Any]:
            return list(pool.map(lambda part: [work(i) for i in part], parts))

        rate("read, on threads", len(source), repeats, device, lambda: all_of(source.read))
        blobs = [source.read(i) for i in everything]
        rate("decode, on threads", len(source), repeats, device, lambda: all_of(lambda i: decoder(blobs[i])))
    if bench.gpu is not None:
        encoded = [bench.gpu.take(blob) for blob in blobs[: bench.batch]]
        whole: list[Any] = [item for item in encoded if item is not None]
        gpu = bench.gpu
        rate("decode, on the GPU", len(whole), repeats, device, lambda: gpu.pack(whole))
    indices = np.arange(bench.batch) % len(source)
    packed = pack([decoder(blobs[int(i)]) for i in indices], pin=device.type == "cuda")
    drawn = plan_batch(bench.settings, 0, source.keys[indices], packed.sizes)
    here = packed.to(device)
    count = len(indices)
    rate("plan", count, repeats, device, lambda: plan_batch(bench.settings, 0, source.keys[indices], packed.sizes))
    rate("copy to the device", count, repeats, device, lambda: packed.to(device))
    rate("views", count, repeats, device, lambda: augment.render(here, drawn, data.mean, data.std))
    if device.type == "cuda":
        kinds = [crops for crops in (drawn.global_crops, drawn.local_crops, drawn.queries) if crops is not None]

        def plainly() -> None:
            for crops in kinds:
                augment._render(here, crops, data.mean, data.std)

        rate("views, without the kernels", count, repeats, device, plainly)


def training_rates(bench: Bench, steps: int, repeats: int) -> None:
    """Images/s of real training steps from one constant batch, from the cache and from files, in turn."""
    from adclr.training import job, schedules
    from adclr.training.step import Step

    settings, device = bench.settings, bench.device
    method = job.build(settings).to(device)
    job.compile_method(method, settings, device, torch.bfloat16, bench.batch)
    optimizer = schedules.make_optimizer(method.student, settings)
    step = Step(settings, method, optimizer, device, torch.bfloat16)
    values = schedules.Values(1e-4, 0.04, 0.99, settings.method.teacher_temperature, freeze_last_layer=False)
    feeds = {"the cache": bench.feed(cached=True), "files": bench.feed(cached=False)}
    constant = next(bench.views(feeds["the cache"], 1))
    results: dict[str, list[float]] = {}
    for number in range(repeats + 1):
        for name in ("one constant batch", "the cache", "files"):
            views = None if name == "one constant batch" else bench.views(feeds[name], steps + 3)
            for i in range(steps + 3):
                if i == 3:  # the first views are on their way
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                step([constant if views is None else next(views)], values)
            torch.cuda.synchronize()
            if number:
                results.setdefault(name, []).append(steps * bench.batch / (time.perf_counter() - started))
            if views is not None:
                views.close()
    still = statistics.median(results["one constant batch"])
    for name, rates in results.items():
        middle = statistics.median(rates)
        spread = f"({min(rates):.0f} to {max(rates):.0f}), {100 * middle / still:.1f} % of the constant batch"
        print(f"{'training from ' + name:<52} {middle:>9.0f} images/s   {spread}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("images", 2048), ("side", 500), ("batch", 128), ("repeats", 5), ("train", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = parsing.build(Settings, parsing.load_recipe("adclr_vits16") | {"train": {"batch_size": given.batch}})
    repeats = given.repeats
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "photos"
        size = write_photos(folder, given.images, given.side)
        what = torch.cuda.get_device_name() if device.type == "cuda" else "CPU only"
        print(f"{given.images} JPEGs of {given.side} pixels, {size // 1000} kB each; {cpu_count()} cores; {what}")
        bench = Bench(folder, settings, given.batch, device)
        if given.train:
            training_rates(bench, given.train, repeats)
            return
        stages(bench, repeats)
        batches = -(-given.images // given.batch)
        files, kept = bench.feed(cached=False), bench.feed(cached=True)
        ours = rate("all, from files", batches * given.batch, repeats, device, lambda: bench.run(files, batches))
        where = "none fits" if kept.store is None else "GPU" if kept.store.on_gpu else "host memory"
        many = 8 * batches if kept.store is not None and kept.store.on_gpu else batches
        rate(f"all, from the cache ({where})", many * given.batch, repeats, device, lambda: bench.run(kept, many))
        # small batches, so that every worker has several
        loader = torch.utils.data.DataLoader(
            Plain(folder, settings),
            16,
            num_workers=cpu_count(),
            persistent_workers=True,
            multiprocessing_context="fork",
        )
        plain = rate(
            "torchvision transforms in a DataLoader, all cores",
            len(bench.source),
            min(repeats, 3),
            device,
            lambda: [[view.to(device) for view in made] for made in loader],
        )
        print(f"from files, ours over theirs: {ours / plain:.1f}")


if __name__ == "__main__":
    main()
