"""The smallest kernel, to see whether Triton can compile and launch one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_one(numbers, COUNT: tl.constexpr):
    pointers = numbers + tl.arange(0, COUNT)
    tl.store(pointers, tl.load(pointers) + 1)


def launch(device: torch.device) -> None:
    """Launch a kernel that adds 1 and check the result."""
    numbers = torch.zeros(16, dtype=torch.int32, device=device)
    _add_one[(1,)](numbers, 16)
    if not bool((numbers == 1).all()):
        raise RuntimeError("a kernel ran and did nothing")
