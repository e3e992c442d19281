"""Class attention, as in CaiT: one learned token reads patches, which do not change any more, and becomes `[CLS]`.

With `VisionTransformer(class_attention=n)` the blocks of the trunk have patches alone; n of these blocks follow. Keys
and values of a patch do not depend on the token, so they are computed once, however many tokens read it: SelfPatch's
patch loss lets the same token read the neighbors of every patch. State-dict keys are those of timm's CaiT.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adclr.model.blocks import Mlp
from adclr.model.ops.dispatch import add_norm, norm


class ClassAttention(nn.Module):
    """Multi-head attention of one token to itself and to the patches of its sequence."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, token: Tensor, keys: Tensor, values: Tensor, few: bool = False) -> Tensor:
        """Return what tokens B×D, or the one token 1×D of all sequences, read from keys and values B×S×D, as B×D.

        For `few` keys PyTorch's kernels of attention are wasteful, which fill tiles of 16 keys or more, and take at
        most 65535 sequences, where the neighbors of all patches of a batch are several times as many.
        """
        q, own_key, own_value = self.q(token), self.k(token), self.v(token)
        if few:
            read = self._read_few(q, own_key, own_value, keys, values)
        else:
            size = (keys.shape[0], 1, keys.shape[2])
            all_keys = torch.cat([own_key.unsqueeze(1).expand(size), keys.to(q.dtype)], dim=1)
            all_values = torch.cat([own_value.unsqueeze(1).expand(size), values.to(q.dtype)], dim=1)
            q, all_keys, all_values = map(self._split_heads, (q.unsqueeze(1).expand(size), all_keys, all_values))
            read = F.scaled_dot_product_attention(q, all_keys, all_values).flatten(1)
        return cast(Tensor, self.proj(read))

    def _read_few(self, q: Tensor, own_key: Tensor, own_value: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return attention in elementwise operations, summed in float32 at least."""
        given, dtype = q.dtype, torch.promote_types(q.dtype, torch.float32)
        heads = (self.num_heads, q.shape[-1] // self.num_heads)
        q, own_key, own_value = (x.to(dtype).view(-1, *heads) for x in (q, own_key, own_value))  # B×H×(D/H)
        keys, values = (x.reshape(*x.shape[:2], *heads) for x in (keys, values))  # B×S×H×(D/H)
        own_score = (q * own_key).sum(dim=-1).unsqueeze(1).expand(keys.shape[0], 1, -1)
        scores = torch.cat([own_score, (q.unsqueeze(1) * keys).sum(dim=-1)], dim=1)  # B×(1+S)×H
        attention = F.softmax(scores * q.shape[-1] ** -0.5, dim=1).unsqueeze(-1)
        read = attention[:, 0] * own_value + (attention[:, 1:] * values).sum(dim=1)
        return read.flatten(1).to(given)

    def weights(self, token: Tensor, keys: Tensor, temperature: float = 1.0) -> Tensor:
        """Return the attention of tokens B×D to keys B×S×D and, in the last column, to themselves: B×H×1×(S+1)."""
        q, own_key = self.q(token), self.k(token)
        keys = torch.cat([keys.to(q.dtype), own_key.unsqueeze(1).expand(keys.shape[0], 1, -1)], dim=1)
        q = self._split_heads(q.unsqueeze(1))
        scores = (q @ self._split_heads(keys).transpose(-2, -1)).float()
        return F.softmax(scores * (q.shape[-1] ** -0.5 / temperature), dim=-1)

    def _split_heads(self, x: Tensor) -> Tensor:
        """B×S×D -> B×H×S×(D/H)."""
        return x.reshape(*x.shape[:2], self.num_heads, x.shape[2] // self.num_heads).transpose(1, 2)


class ClassAttentionBlock(nn.Module):
    """Class attention and MLP, each with LayerScale, added to the token; the patches stay as they are."""

    def __init__(self, dim: int, num_heads: int, layer_scale: float, norm_eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = ClassAttention(dim, num_heads)
        self.gamma_1 = nn.Parameter(torch.full((dim,), layer_scale))
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, 4 * dim)
        self.gamma_2 = nn.Parameter(torch.full((dim,), layer_scale))

    def project(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, each B×N×D, of patches B×N×D before the final norm."""
        normed = self.norm_token(patches.flatten(0, 1)).view_as(patches)
        return self.attn.k(normed), self.attn.v(normed)

    def norm_token(self, token: Tensor) -> Tensor:
        """Return the `norm1` of tokens M×D."""
        return norm(token, self.norm1.weight, self.norm1.bias, self.norm1.eps)

    def forward(self, token: Tensor, keys: Tensor, values: Tensor, few: bool = False) -> Tensor:
        """Return tokens B×D that have read keys and values B×S×D; `token` is B×D, or 1×D for all sequences."""
        read = self.attn(self.norm_token(token), keys, values, few) * self.gamma_1
        weight, bias, eps = self.norm2.weight, self.norm2.bias, self.norm2.eps
        token, normed = add_norm(token.expand(read.shape), read, None, weight, bias, eps)
        thought = cast(Tensor, self.mlp(normed)) * self.gamma_2
        return token + thought.to(token.dtype)


def read_patches(
    blocks: Sequence[ClassAttentionBlock], token: Tensor, patches: Tensor, neighbors: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return what a token 1×D becomes when it reads all patches of each sequence, B×D, and those around each patch.

    Patches are B×N×D; `neighbors`, (B·N)×k, lists for each patch rows of the flattened patches, and the second result
    is (B·N)×D. Without neighbors it is None.
    """
    cls = token = token.to(patches.dtype)
    for block in blocks:
        keys, values = block.project(patches)
        cls = block(cls, keys, values)
        if neighbors is not None:
            token = block(token, keys.flatten(0, 1)[neighbors], values.flatten(0, 1)[neighbors], few=True)
    return cls, None if neighbors is None else token


def cls_attention(
    blocks: Sequence[ClassAttentionBlock],
    token: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    block: int,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return the attention of the token in a block, B×H×1×(N+1), see `ClassAttention.weights`, and the token B×D.

    Keys and values are those of the patches in each block, B×N×D.
    """
    attention = None
    for i, layer in enumerate(blocks):
        if i == block % len(blocks):
            attention = layer.attn.weights(layer.norm_token(token), keys[i], temperature)
        token = layer(token, keys[i], values[i])
    assert attention is not None
    return attention, token


# -- neighbors --

# Rows and columns from a patch to half of the eight around it; the other half are their opposites.
_HALF_WINDOW = ((0, 1), (1, -1), (1, 0), (1, 1))


@torch.no_grad()
def select_neighbors(patches: Tensor, grid: tuple[int, int], count: int) -> Tensor:
    """Return the `count` most similar of the eight patches around each one, as rows of the flattened patches.

    Patches are B×N×D in a grid of (rows, columns), which wraps around at its border; the result is (B·N)×count.
    Similarity is the cosine. With fewer than three rows or columns a window holds some patches more than once.
    """
    unit = F.normalize(patches.to(torch.promote_types(patches.dtype, torch.float32)), dim=-1)
    unit = unit.view(len(patches), *grid, -1)
    similarities = []
    for rows, columns in _HALF_WINDOW:
        # what a patch and the one behind the shift have in common, also as seen from the other
        forward = (unit * unit.roll((-rows, -columns), dims=(1, 2))).sum(dim=-1)
        similarities += [forward, forward.roll((rows, columns), dims=(1, 2))]
    similarity = torch.stack(similarities, dim=-1).flatten(0, 2)
    chosen = similarity.topk(count, dim=-1, sorted=False).indices
    return _window_rows(len(patches), grid, patches.device).gather(1, chosen)


@lru_cache(maxsize=32)
def _window_rows(batch: int, grid: tuple[int, int], device: torch.device) -> Tensor:
    """Return the rows of the eight patches around each one, (B·N)×8, in the order of `select_neighbors`."""
    with torch.inference_mode(False):
        rows = torch.arange(batch * grid[0] * grid[1]).view(batch, *grid)
        around = []
        for down, right in _HALF_WINDOW:
            around += [rows.roll((-down, -right), dims=(1, 2)), rows.roll((down, right), dims=(1, 2))]
        return torch.stack(around, dim=-1).flatten(0, 2).to(device)
