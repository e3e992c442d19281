"""Memory and peak speed of GPUs that a plan may be for, without torch."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from adclr.config.parsing import UserError

ASSUMED_SIDE = 256  # pixels of images of which only the number is known


@dataclass(frozen=True)
class Gpu:
    """A GPU that need not be present."""

    name: str
    gib: float  # of the H200 as torch reports it; of the others the nominal size less a few percent, not measured
    tflops: float  # peak of dense bfloat16 with float32 sums, from the data sheets


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


def find_gpu(name: str | None, gib: float | None, tflops: float | None) -> Gpu | None:
    """Return the GPU that options describe: one of the table, with numbers replaced by those given; None for none."""
    if name is None:
        if gib is None and tflops is None:
            return None
        if gib is None or tflops is None:
            raise UserError("a GPU needs both --gpu-memory (GiB) and --gpu-tflops, or a name: --gpu h200")
        return Gpu("a GPU", gib, tflops)
    word = re.sub(r"nvidia|geforce|[\s_-]", "", name.lower())
    matches = [key for key in GPUS if key.replace("-", "") == word]
    if not matches and word:
        matches = [key for key in GPUS if key.startswith(f"{word}-")]
    if len(matches) > 1:
        raise UserError(f"--gpu {name} could be {' or '.join(matches)}; write one of them")
    if not matches:
        near = difflib.get_close_matches(word, GPUS, n=1, cutoff=0.7)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(GPUS)};"
        raise UserError(f"unknown GPU '{name}'; {hint} --gpu-memory and --gpu-tflops describe any other")
    known = GPUS[matches[0]]
    return Gpu(known.name, gib or known.gib, tflops or known.tflops)
