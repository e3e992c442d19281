"""Drop path: the branches of a block are left out for whole sequences, at random, more often in later blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adclr.model.blocks import expand_to_tokens
from adclr.model.ops.attention import Group


def draw_drop_path(rate: float, depth: int, num_sequences: int, device: torch.device) -> Tensor | None:
    """Return the factors of drop path, depth×2×sequences: 0, or 1 / (1 - rate) so that the mean stays the same.

    `rate` is that of the last block; it is linear from 0 in the first. None at a rate of 0.
    """
    if not rate:
        return None
    rates = torch.linspace(0, rate, depth, device=device)[:, None, None]
    return (torch.rand(depth, 2, num_sequences, device=device) >= rates) / (1 - rates)


def drop_path_of_tokens(factors: Tensor | None, depth: int, groups: Sequence[Group]) -> Sequence[Tensor | None]:
    """depth×2×sequences -> 2×M×1 for each block. At once: block by block it was a hundred small operations."""
    return [None] * depth if factors is None else expand_to_tokens(factors, groups).unbind()
