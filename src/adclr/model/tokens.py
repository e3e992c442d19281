"""Inputs and outputs of the ViT, by name; shape letters are those of `vit.py`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
