"""GPUs that are not here: memory and peak of those a plan may be for. Knows nothing of torch."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from adclr.config.sections import UserError


@dataclass(frozen=True)
class Gpu:
    name: str
    gib: float  # of the H200 as torch reports it; of the others what is sold, less a few per cent, not looked at
    tflops: float  # peak of dense bfloat16 with float32 sums, from the maker's data sheets


GPUS = {
    "a10": Gpu("A10", 22.1, 125),
    "a100-40gb": Gpu("A100 40GB", 39.4, 312),
    "a100-80gb": Gpu("A100 80GB", 79.2, 312),
    "b200": Gpu("B200", 178.0, 2250),
    "h100-pcie": Gpu("H100 PCIe", 79.1, 756),
    "h100-sxm": Gpu("H100 SXM", 79.1, 989),
    "h200": Gpu("H200", 139.8, 989),
    "l4": Gpu("L4", 22.0, 121),
    "l40s": Gpu("L40S", 44.4, 362),
    "rtx3090": Gpu("RTX 3090", 23.6, 71),
    "rtx4090": Gpu("RTX 4090", 23.5, 165),
    "rtx5090": Gpu("RTX 5090", 31.3, 209),
}


def find(name: str | None, gib: float | None, tflops: float | None) -> Gpu | None:
    """The GPU that options describe: one of the table, its numbers replaced where they are given; None for none."""
    if name is None:
        if gib is None and tflops is None:
            return None
        if gib is None or tflops is None:
            raise UserError("a GPU needs both --gpu-memory (GiB) and --gpu-tflops, or a name: --gpu h200")
        return Gpu("a GPU", gib, tflops)
    word = re.sub(r"nvidia|geforce|[\s_-]", "", name.lower())
    found = [key for key in GPUS if key.replace("-", "") == word]
    if not found and word:
        found = [key for key in GPUS if key.startswith(f"{word}-")]
    if len(found) > 1:
        raise UserError(f"--gpu {name} could be {' or '.join(found)}; write one of them")
    if not found:
        near = difflib.get_close_matches(word, GPUS, n=1, cutoff=0.7)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(GPUS)};"
        raise UserError(f"unknown GPU '{name}'; {hint} --gpu-memory and --gpu-tflops describe any other")
    known = GPUS[found[0]]
    return Gpu(known.name, gib or known.gib, tflops or known.tflops)
