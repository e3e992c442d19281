"""What the model takes and returns, tensors by name: views of a batch for the method, inputs and tokens for the ViT.

Shape letters are those of `vit.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# -- of the method --


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


# -- of the ViT --


class Tokens(NamedTuple):
    """The output tokens by name, after the final norm."""

    cls: Tensor  # B×D
    patches: Tensor  # B×N×D; N is 0 where `Input.patches` is false
    queries: Tensor | None  # B×Q×D
    registers: Tensor | None  # B×R×D
    neighbors: Tensor | None = None  # B×N×D, see `Input.num_neighbors`


class Input(NamedTuple):
    """The input of one forward pass."""

    images: Tensor  # B×C×height×width
    queries: Tensor | None = None  # B×Q×C×P×P
    mask: Tensor | None = None  # B×N, true where a patch is masked
    patches: bool = True  # whether to return patches and registers; without them the last block is cheaper
    ordinary_queries: int = 0  # the first so many keep their own pixels in the read-only blocks
    num_neighbors: int = 0  # with class attention: also what `[CLS]`'s token reads from so many neighbors of each patch


def name_tokens(x: Tensor, num_image: int, num_prefix: int, patches: bool = True, cls: Tensor | None = None) -> Tokens:
    """Return normed tokens B×T×D by name, of which `num_image` are image tokens, `[CLS]` and registers the prefix.

    `cls` where it is not among them, but made by class attention.
    """
    queries = x[:, num_image:] if x.shape[1] > num_image else None
    if cls is not None:
        return Tokens(cls, x[:, : num_image if patches else 0], queries, None)
    prefix = num_prefix if patches else 1
    registers = x[:, 1:prefix] if prefix > 1 else None
    return Tokens(x[:, 0], x[:, prefix:num_image], queries, registers)


class Memory(NamedTuple):
    """Keys and values of images, as in a KV cache: enough to run any queries on them later."""

    keys: list[Tensor]  # of each block, B×H×T×(D/H), and of each class-attention block, B×N×D
    values: list[Tensor]
    tokens: Tokens
