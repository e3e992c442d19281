"""Time and memory of the index and the order of a very large collection: names only, without images.

    python benchmarks/collection.py [--images 1000000] [--folder-images 1000] [--batch 1024] [--ranks 2] [--where DIR]
    python benchmarks/collection.py --random-keys      # what follows the making of an index, sooner: keys are no hashes
    python benchmarks/collection.py --files 200000     # of real empty files instead: what listing them costs

Names such as train/0123/00/0123004567.jpeg are made as a search of folders would give them: folder after folder, in no
order within each. The folders are there, since a kept index looks at each of them; the files are not. Every stage is a
process of its own. Times are [wall seconds, seconds of the processor]. Memory is what a process holds for itself at its
peak, sampled every 10 ms; pages of the index, which all processes share and the system can drop, are told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from adclr.data import listing_builder, sources
from adclr.data.file_stamps import WATCHED
from adclr.data.key_order import epoch_pieces, smallest
from adclr.data.listing import Facts, Listing, Names, fact, load_listing
from adclr.data.random_draws import mix

MB = 1e6
ROW = b"\0train/0000/00/0000000000.jpeg"  # a separator and a name, all of whose digits are 0


class Memory:
    """Samples what this process holds: its own memory, and pages of files."""

    def __init__(self) -> None:
        self.own = self.files = 0.0
        self.start, _ = self.now()
        self._stop = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    @staticmethod
    def now() -> tuple[float, float]:
        """Own memory and pages of files in MB."""
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return tuple(int(fields[name].split()[0]) * 1024 / MB for name in ("RssAnon", "RssFile"))  # type: ignore[return-value]

    def _sample(self) -> None:
        while not self._stop.wait(0.01):
            own, files = self.now()
            self.own, self.files = max(self.own, own), max(self.files, files)

    def peak(self) -> dict[str, float]:
        """The peaks in MB; of its own memory above that of the empty program."""
        own, files = self.now()
        return {"own_mb": max(self.own, own) - self.start, "shared_mb": max(self.files, files)}


Seconds = list[float]  # on the clock, and of the processor


def timed(work: Callable[[], Any]) -> tuple[Seconds, Any]:
    """Seconds of some work, and what it returns."""
    wall, processor = time.perf_counter(), time.process_time()
    value = work()
    return [time.perf_counter() - wall, time.process_time() - processor], value


def folder_name(number: int) -> str:
    return f"train/{number // 100:04d}/{number % 100:02d}"


def run_index(root: Path) -> Path:
    return root.parent / "run" / "index.npz"


def names_of(number: int, count: int, folder_images: int) -> list[str]:
    """The names in a folder, in no order."""
    first = number * folder_images
    inside = range(first, min(first + folder_images, count))
    folder, step = folder_name(number), 7919 if len(inside) % 7919 else 1
    return [f"{folder}/{inside[i * step % len(inside)]:010d}.jpeg" for i in range(len(inside))]


def append_random(builder: listing_builder.ListingBuilder, first: int, last: int, folder_images: int) -> None:
    """Append the names of some images at once, in order, with keys that only look like hashes of them."""
    numbers = np.arange(first, last)
    folders, width = numbers // folder_images, len(ROW)
    text = np.tile(np.frombuffer(ROW, np.uint8), (last - first, 1))
    for start, values, digits in ((7, folders // 100, 4), (12, folders % 100, 2), (15, numbers, 10)):
        for digit in range(digits):
            text[:, start + digit] += (values // 10 ** (digits - 1 - digit) % 10).astype(np.uint8)
    builder.names.text.append(text.reshape(-1)[0 if first else 1 :])  # no separator before the first
    builder.names.ends.append(np.arange(first + 1, last + 1) * width - 1)
    builder.keys.append(mix(numbers.astype(np.uint64)))


def build(root: Path, count: int, folder_images: int, random_keys: bool) -> dict[str, Any]:
    """Make and save the index, as `sources.index_folder` does once it has the names."""
    index, memory, num_folders = run_index(root), Memory(), -(-count // folder_images)
    facts: Facts = {os.path.abspath(root): fact(root, False)}
    for number in range(num_folders):
        folder = root / folder_name(number)
        facts[str(folder)] = fact(folder, False)
    facts_mb = Memory.now()[0] - memory.start

    def make(storage: listing_builder.Storage) -> Listing:
        builder = listing_builder.ListingBuilder(storage)
        if random_keys:
            for first in range(0, count, 2**18):
                append_random(builder, first, min(first + 2**18, count), folder_images)
            names_, keys = builder.names.names(), builder.keys.array()
            return Listing(names_, keys, facts, known_fingerprint="random")
        ordered, names = listing_builder.SortedNames(storage), list[str]()
        for number in reversed(range(num_folders)):
            names += names_of(number, count, folder_images)
            if len(names) >= sources.SORTED_AT_ONCE:
                ordered.add(names)
                names = []
        for part in ordered.parts(names):
            builder.add(part)
        return builder.listing(facts, {})

    seconds, listing = timed(lambda: listing_builder.build_listing([os.path.abspath(root)], make))
    saved, _ = timed(lambda: listing.save(index))
    return memory.peak() | {
        "seconds": seconds,
        "save_in_run_seconds": saved,
        "index_mb": index.stat().st_size / MB,
        "name_bytes": listing.names.text.nbytes / count,
        "folders": len(facts),
        "folders_own_mb": facts_mb,
        "fingerprint": listing.fingerprint,
    }


def use(root: Path, count: int, batch: int, stage: str, start: float, random_keys: bool) -> dict[str, Any]:
    """Open the kept index and begin in the middle of an epoch, as every rank does; or go through a whole epoch."""
    index, memory = run_index(root), Memory()
    if stage == "cold":
        with open(index, "rb+") as file:
            os.fsync(file.fileno())  # what is not on the disk yet, stays in memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if start:
        time.sleep(max(0.0, start - time.time()))
    load_seconds, listing = timed(lambda: load_listing(index))
    assert listing is not None
    current_seconds, current = timed(listing.current)
    assert current, "the index does not describe its folders"
    watched_seconds, _ = timed(lambda: np.sort(smallest(listing.keys, WATCHED, mix)))
    order = epoch_pieces(0, 3, listing.keys)
    names_ = Names(listing.names.text, listing.names.ends) if random_keys else listing.names  # which checks each
    middle = count // 2 // batch * batch
    first_seconds, indices = timed(lambda: order.select(middle, middle + batch))
    names_seconds, names = timed(lambda: [names_[index] for index in indices.tolist()])
    assert len(set(names)) == min(batch, count)
    result = {
        "open_seconds": load_seconds,
        "folders_unchanged_seconds": current_seconds,
        "choose_stamps_seconds": watched_seconds,
        "first_batch_order_seconds": first_seconds,
        "first_batch_names_seconds": names_seconds,
        "start_seconds": np.sum(
            [load_seconds, current_seconds, watched_seconds, first_seconds, names_seconds], axis=0
        ).tolist(),
    }
    if stage == "epoch":
        order, steps = epoch_pieces(0, 4, listing.keys), list[Seconds]()
        total = 0
        for first in range(0, count - batch + 1, batch):
            seconds, indices = timed(lambda first=first: order.select(first, first + batch))  # type: ignore[misc]
            steps.append(seconds)
            total += len(indices)
        result |= {
            "epoch_seconds": np.sum(steps, axis=0).tolist(),
            "steps": len(steps),
            "step_mean_seconds": np.mean(steps, axis=0).tolist(),
            "step_median_seconds": np.median(steps, axis=0).tolist(),
            "step_most_seconds": np.max(steps, axis=0).tolist(),
            "pieces": len(order.pieces),
        }
    return memory.peak() | result


def list_files(root: Path, count: int, folder_images: int) -> dict[str, Any]:
    """List real empty files, twice: the first time as they have just been created."""
    for number in range(-(-count // folder_images)):
        for name in names_of(number, count, folder_images):
            (root / name).touch()
    memory = Memory()
    first, listing = timed(lambda: sources.index_folder(root))
    assert len(listing.names) == count
    second, _ = timed(lambda: sources.index_folder(root))
    again, _ = timed(listing.current)
    return memory.peak() | {
        "seconds": [first, second],
        "names_per_second": [count / first[0], count / second[0]],
        "unchanged_seconds": again,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--folder-images", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--files", type=int, default=0, help="list so many real files instead")
    parser.add_argument("--random-keys", action="store_true")
    parser.add_argument("--where", type=Path, default=None, help="a folder with room for about 150 bytes an image")
    parser.add_argument("--stage", default="")
    parser.add_argument("--start", type=float, default=0.0)
    options = parser.parse_args()
    if options.stage:
        root, count = options.where, options.images
        if options.stage == "files":
            result = list_files(root, count, options.folder_images)
        elif options.stage == "build":
            result = build(root, count, options.folder_images, options.random_keys)
        else:
            result = use(root, count, options.batch, options.stage, options.start, options.random_keys)
        print(json.dumps(result))
        return
    scratch = Path(tempfile.mkdtemp(prefix="collection", dir=options.where))
    root = scratch / "images"
    count = options.files or options.images

    def stage(name: str, start: float = 0.0) -> subprocess.Popen[str]:
        sizes = ["--images", str(count), "--folder-images", str(options.folder_images), "--batch", str(options.batch)]
        sizes += ["--random-keys"] if options.random_keys else []
        command = [sys.executable, __file__, "--stage", name, "--where", str(root), "--start", str(start), *sizes]
        environment = os.environ | {"ADCLR_LOCAL_CACHE": str(scratch / "cache")}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
        text, _ = process.communicate()
        if process.returncode:
            raise SystemExit(process.returncode)
        result: dict[str, Any] = json.loads(text)
        return result

    def show(name: str, result: dict[str, Any]) -> None:
        results[name] = result
        print(f"{name}:", file=sys.stderr)
        for key, value in result.items():
            print(f"  {key}: {value:.6g}" if isinstance(value, float) else f"  {key}: {value}", file=sys.stderr)

    results: dict[str, Any] = {"images": count}
    try:
        for number in range(-(-count // options.folder_images)):
            (root / folder_name(number)).mkdir(parents=True)
        if options.files:
            show("files", finish(stage("files")))
        else:
            show("build", finish(stage("build")))
            show("open, index not in memory", finish(stage("cold")))
            begin = time.time() + 3
            ranks = [stage("rank", begin) for _ in range(options.ranks)]
            for number, process in enumerate(ranks):
                show(f"rank {number} of {options.ranks} at once", finish(process))
            show("open, and an epoch", finish(stage("epoch")))
            sizes = {"index": results["build"]["index_mb"], "memory to build": results["build"]["own_mb"]}
            results["bytes_per_image"] = {name: size * MB / count for name, size in sizes.items()}
    finally:
        shutil.rmtree(scratch)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
