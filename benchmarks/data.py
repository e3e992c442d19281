"""Images/s of each stage of the data path and of all together, beside a plain torchvision + DataLoader pipeline.

    python benchmarks/data.py [--images 512] [--side 500] [--batch 128] [--repeats 5]

Photo-like JPEGs are generated in a temporary folder. Every figure is the median of several repeats within this one run:
compare figures of one run only. Views are 2×224 + 10×96 + 10 queries of 16 pixels, from `adclr_vits16`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from adclr import augment, cache, config, scenes
from adclr.auto import cpu_count
from adclr.decode import Decoder
from adclr.feed import Feed
from adclr.fit import host_memory
from adclr.settings import Settings
from adclr.sources import ImageFolder
from adclr.views import plan


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
            size: int, scale: tuple[float, float], blur: float, solarise: float, colours: bool = True
        ) -> v2.Compose:
            steps: list[Any] = [
                v2.RandomResizedCrop(size, scale, interpolation=3, antialias=True),
                v2.RandomHorizontalFlip(),
            ]
            if colours:
                steps += [v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8), v2.RandomGrayscale(0.2)]
                steps += [v2.RandomApply([v2.GaussianBlur(13, (0.1, 2.0))], blur), v2.RandomSolarize(128, solarise)]
            return v2.Compose(steps + tail)

        self.kinds = [
            (1, crops(views.global_size, views.global_scale, 1.0, 0.0)),
            (1, crops(views.global_size, views.global_scale, 0.1, 0.2)),
            (views.num_local, crops(views.local_size, views.local_scale, 0.5, 0.0)),
            (views.num_queries, crops(patch, views.query_scale, 0.0, 0.0, colours=False)),
        ]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        with Image.open(self.paths[index]) as image:
            picture = image.convert("RGB")
        return [make(picture) for count, make in self.kinds for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("images", 512), ("side", 500), ("batch", 128), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = config.build(Settings, config.recipe("adclr_vits16"))
    data, batch, repeats = settings.data, given.batch, given.repeats
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "photos"
        size = write_photos(folder, given.images, given.side)
        what = torch.cuda.get_device_name() if device.type == "cuda" else "CPU only"
        print(f"{given.images} JPEGs of {given.side} pixels, {size // 1000} kB each; {cpu_count()} cores; {what}")
        source, decoder = ImageFolder(folder), Decoder()
        everything = list(range(len(source)))
        with ThreadPoolExecutor(cpu_count()) as pool:
            rate("read", len(source), repeats, device, lambda: list(pool.map(source.read, everything)))
            rate(
                "read + decode on threads",
                len(source),
                repeats,
                device,
                lambda: list(pool.map(lambda i: decoder(source.read(i)), everything)),
            )
        indices = np.arange(batch) % len(source)
        packed = augment.pack([decoder(source.read(int(i))) for i in indices], pin=device.type == "cuda")
        drawn = plan(settings, 0, source.keys[indices], packed.sizes)
        here = packed.to(device)
        rate("plan", batch, repeats, device, lambda: plan(settings, 0, source.keys[indices], packed.sizes))
        rate("copy to the device", batch, repeats, device, lambda: packed.to(device))
        rate("views, plain", batch, repeats, device, lambda: augment.render(here, drawn, data.mean, data.std))
        if device.type == "cuda":
            from adclr.augment import kernels

            kinds = [crops for crops in (drawn.global_crops, drawn.local_crops, drawn.queries) if crops is not None]
            rate(
                "views, kernels",
                batch,
                repeats,
                device,
                lambda: [kernels.render_crops(here, crops, data.mean, data.std) for crops in kinds],
            )

        def order() -> Iterator[tuple[int, Any]]:
            return ((0, np.arange(i, i + batch) % len(source)) for i in range(0, len(source), batch))

        def feed_all(feed: Feed) -> None:
            for made in feed.batches(order(), lambda epoch, keys, sizes: plan(settings, epoch, keys, sizes)):
                augment.render(made.packed.to(device), made.plan, data.mean, data.std)

        steps = -(-len(source) // batch) * batch
        feed = Feed(source, cpu_count(), decoder, pin=device.type == "cuda")
        ours = rate("all, from files", steps, repeats, device, lambda: feed_all(feed))
        room = cache.Room(host_memory(), torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0.0)
        feed.store = cache.make("auto", feed.read, len(source), cpu_count(), room, device, show=False)
        where = "none fits" if feed.store is None else "GPU" if feed.store.on_gpu else "host memory"
        rate(f"all, from the cache ({where})", steps, repeats, device, lambda: feed_all(feed))
        loader = torch.utils.data.DataLoader(
            Plain(folder, settings), batch, num_workers=cpu_count(), persistent_workers=True, drop_last=False
        )
        os.environ["OMP_NUM_THREADS"] = "1"
        plain = rate(
            "torchvision transforms in a DataLoader, all cores",
            len(source),
            min(repeats, 3),
            device,
            lambda: [[view.to(device) for view in made] for made in loader],
        )
        print(f"from files, ours over theirs: {ours / plain:.1f}")


if __name__ == "__main__":
    main()
