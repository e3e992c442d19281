"""Index and order of millions of images in a process that may have little memory of its own.

The limit is the system's (RLIMIT_DATA): memory that is written, not pages of files. What needs a list of all names, or
an array of the whole order, ends with MemoryError.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
from adclr.data import key_order, listing_builder, sources
from adclr.data.key_order import epoch_pieces, examine_keys
from adclr.data.listing import load_listing
from adclr.data.random_draws import epoch_order

def limit(megabytes):
    used = next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]
    resource.setrlimit(resource.RLIMIT_DATA, (int(used) * 1024 + megabytes * 2**20,) * 2)

def fails(work):
    try:
        work()
    except MemoryError:
        return True
    return False
"""

INDEX = """
COUNT = 3_000_000
sources.SORTED_AT_ONCE, listing_builder.IN_MEMORY, key_order.PIECE = 2**18, 2**23, 2**18

def names(first, last):  # as folders give them: the last one first, in no order
    return [f"folder{n // 1000:06d}/{n * 7919 % 1000:09d}.jpeg" for n in range(first, last)]

def build(storage):
    ordered = listing_builder.SortedNames(storage)
    for last in range(COUNT, 0, -200_000):
        ordered.add(names(last - 200_000, last))
    builder = listing_builder.ListingBuilder(storage)
    for part in ordered.parts([]):
        builder.add(part)
    return builder.listing({sys.argv[1]: (0, 0, 0, 0, 0)}, {})

limit(120)
assert fails(lambda: sorted(names(0, COUNT)))
with listing_builder.Storage([sys.argv[1]]) as storage:
    build(storage).save(Path(sys.argv[1]) / "index.npz")
listing = load_listing(Path(sys.argv[1]) / "index.npz")
assert len(listing.names) == COUNT
assert [listing.names[n] for n in (0, 1000, COUNT - 1)] == [
    "folder000000/000000000.jpeg", "folder000001/000000000.jpeg", "folder002999/000000999.jpeg"]
order = epoch_pieces(1, 2, listing.keys)
seen = np.zeros(COUNT, bool)
for first in range(0, COUNT, 1000):
    seen[order.select(first, first + 1000)] = True
assert seen.all()
"""

ORDER = """
COUNT = 24_000_000
with open(sys.argv[1] + "/keys", "wb") as file:
    for seed in range(24):
        file.write(np.random.default_rng(seed).integers(0, 2**64, COUNT // 24, dtype=np.uint64).tobytes())
keys = np.memmap(sys.argv[1] + "/keys", np.uint64, "r")
limit(280)
assert fails(lambda: epoch_order(1, 2, keys))
some = epoch_pieces(1, 2, keys).select(COUNT // 2, COUNT // 2 + 100_000)
assert examine_keys(keys).distinct
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits this memory")
@pytest.mark.parametrize("script", [INDEX, ORDER], ids=["index", "order"])
def test_memory_does_not_grow_with_the_collection(script: str, tmp_path: Path) -> None:
    environment = os.environ | {"ADCLR_LOCAL_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LIMITED + script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
