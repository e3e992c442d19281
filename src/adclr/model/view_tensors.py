"""The views of a batch as the method takes them; shape letters are those of `vit.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Masks:
    """Which patches of the student's global views are masked, M of them in all."""

    grid: Tensor  # 2×B×N bool, true where a patch is masked
    index: Tensor  # M, indices of masked patches in the flattened grid
    weight: Tensor  # M, 1 / (masked patches of the view · B · 2)


@dataclass(frozen=True)
class Views:
    """Two global views of each image, local views, query crops and masks, if any."""

    global_crops: Tensor  # 2×B×C×S×S
    local_crops: Tensor | None  # L×B×C×s×s
    queries: Tensor | None  # B×Q×C×P×P
    masks: Masks | None

    @property
    def num_queries(self) -> int:
        """Q, 0 without queries."""
        return 0 if self.queries is None else self.queries.shape[1]

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in a fixed order."""
        masks = (self.masks.grid, self.masks.index, self.masks.weight) if self.masks is not None else ()
        return [t for t in (self.global_crops, self.local_crops, self.queries, *masks) if t is not None]

    def map(self, function: Callable[[Tensor], Tensor]) -> Views:
        """Return views with `function` applied to each tensor."""
        local, queries = (None if t is None else function(t) for t in (self.local_crops, self.queries))
        masks = self.masks and Masks(function(self.masks.grid), function(self.masks.index), function(self.masks.weight))
        return Views(function(self.global_crops), local, queries, masks)
