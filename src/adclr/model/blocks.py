"""The blocks of the ViT. They work on flat tokens, M×D, of sequences of one or more lengths one behind the other.

A `Group` is sequences of one length. Crops of all sizes share the norms and the matrix products, and only attention
knows where one sequence ends. Shape letters are those of `vit.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from adclr.model.ops.attention import Group, attend
from adclr.model.ops.mlp import mlp
from adclr.model.ops.norm import add_norm

QueryKeys = Literal["image", "patches", "image_and_self", "all"]


def readable(num_tokens: int, num_image: int, num_prefix: int, rule: QueryKeys, device: torch.device) -> Tensor:
    """T×T, true where the token of the row may read the token of the column: the rule, spelled out."""
    allowed = torch.zeros(num_tokens, num_tokens, dtype=torch.bool, device=device)
    allowed[:, :num_image] = True
    if rule == "all":
        allowed[:] = True
    elif rule == "patches":
        allowed[num_image:, :num_prefix] = False
    elif rule == "image_and_self":
        allowed |= torch.eye(num_tokens, dtype=torch.bool, device=device)
    return allowed


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int, query_keys: QueryKeys, num_prefix: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_keys: QueryKeys = query_keys
        self.num_prefix = num_prefix  # [CLS] and registers
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """B×T×D -> queries, keys, values, each B×H×T×(D/H)."""
        return self._heads(self.qkv(x))

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, tokens, width = qkv.shape
        q, k, v = qkv.view(batch, tokens, 3, self.num_heads, width // 3 // self.num_heads).permute(2, 0, 3, 1, 4)
        return q, k, v

    def join(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.proj(x.transpose(1, 2).flatten(2)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, num_image: int) -> Tensor:
        """Every token asks. Who answers is the rule; by default the image tokens, so that one call does it all."""
        sdpa = F.scaled_dot_product_attention
        n, prefix = num_image, self.num_prefix
        if q.shape[2] == n or self.query_keys == "all":
            return sdpa(q, k, v)
        if self.query_keys == "image":
            return sdpa(q, k[:, :, :n], v[:, :, :n])
        if self.query_keys == "patches":
            image = sdpa(q[:, :, :n], k[:, :, :n], v[:, :, :n])
            query = sdpa(q[:, :, n:], k[:, :, prefix:n], v[:, :, prefix:n])
            return torch.cat([image, query], dim=2)
        mask = readable(q.shape[2], n, prefix, self.query_keys, q.device)
        return sdpa(q, k, v, attn_mask=mask)

    def forward(self, x: Tensor, groups: Sequence[Group]) -> Tensor:
        """M×D -> M×D, heads side by side, before `proj`."""
        qkv = self.qkv(x)
        if self.query_keys == "all":
            groups = [group._replace(image=group.tokens) for group in groups]
        elif self.query_keys == "patches":
            groups = [group._replace(hidden=self.num_prefix) for group in groups]
        if self.query_keys != "image_and_self":
            return attend(qkv, groups, self.num_heads)
        found = []
        for part, group in zip(by_group(qkv, groups), groups, strict=True):
            q, k, v = self._heads(part)
            found.append(self.attend(q, k, v, group.image).transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat(found)

    def ask(self, x: Tensor, keys: Tensor, values: Tensor, rule: QueryKeys) -> Tensor:
        """What `forward` gives for query tokens `x`, from the kept keys and values of the image tokens."""
        q, k, v = self.split(x)
        keys, values = keys.to(q.dtype), values.to(q.dtype)  # they may be kept in half of it
        mask = None
        if rule == "patches":
            keys, values = keys[:, :, self.num_prefix :], values[:, :, self.num_prefix :]
        elif rule == "image_and_self":
            n, queries = keys.shape[2], q.shape[2]
            keys, values = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
            mask = readable(n + queries, n, self.num_prefix, rule, q.device)[n:]
        return self.join(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))

    def asked(self, x: Tensor, keys: Tensor, rule: QueryKeys, temperature: float) -> Tensor:
        """B×H×Q×T, the attention of tokens `x` over the image tokens, float32.

        Rows sum to 1; under `image_and_self` together with a last column, a query's attention to itself."""
        q, k, _ = self.split(x)
        scores = (q @ keys.to(q.dtype).transpose(-2, -1)).float()
        if rule == "image_and_self":
            scores = torch.cat([scores, (q * k).sum(dim=-1, keepdim=True).float()], dim=-1)
        elif rule == "patches":
            scores[..., : self.num_prefix] = float("-inf")
        return F.softmax(scores * (q.shape[-1] ** -0.5 / temperature), dim=-1)

    def weights(self, x: Tensor, num_image: int) -> Tensor:
        """B×H×T×T attention, every row summing to 1; columns beyond the image tokens are 0 but for two rules."""
        q, k, _ = self.split(x)
        scores = (q @ k.transpose(-2, -1)).float() * q.shape[-1] ** -0.5
        allowed = readable(x.shape[1], num_image, self.num_prefix, self.query_keys, x.device)
        return F.softmax(scores.masked_fill(~allowed, float("-inf")), dim=-1)


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return mlp(x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)


class LayerScale(nn.Module):
    def __init__(self, dim: int, value: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def by_group(x: Tensor, groups: Sequence[Group]) -> list[Tensor]:
    """M×... -> sequences×tokens×... of each group."""
    parts = torch.split(x, [group.sequences * group.tokens for group in groups])
    return [part.view(*group[:2], *x.shape[1:]) for part, group in zip(parts, groups, strict=True)]


def for_tokens(numbers: Tensor, groups: Sequence[Group]) -> Tensor:
    """...×sequences -> ...×M×1, the same number for all tokens of a sequence."""
    parts = torch.split(numbers, [group.sequences for group in groups], dim=-1)
    spread = [
        part[..., None].expand(*part.shape, group.tokens).flatten(-2) for part, group in zip(parts, groups, strict=True)
    ]
    return torch.cat(spread, dim=-1).unsqueeze(-1)


def without_patches(x: Tensor, groups: Sequence[Group], wanted: Sequence[bool]) -> Tensor:
    """The tokens of groups whose patches are wanted; of the others `[CLS]` and queries alone."""
    parts = []
    for part, group, all_of_it in zip(by_group(x, groups), groups, wanted, strict=True):
        kept = part if all_of_it else torch.cat([part[:, :1], part[:, group.image :]], dim=1)
        parts.append(kept.flatten(0, 1))
    return torch.cat(parts)


def clear_queries(x: Tensor, groups: Sequence[Group]) -> Tensor:
    """M×D with the rows of all query tokens set to zero."""
    return x.masked_fill(_query_rows(tuple(groups), x.device), 0.0)


@lru_cache(maxsize=128)
def _query_rows(groups: tuple[Group, ...], device: torch.device) -> Tensor:
    """M×1, true for the tokens that are queries."""
    with torch.inference_mode(False):
        rows = [torch.arange(group.tokens).ge(group.image).repeat(group.sequences) for group in groups]
        return torch.cat(rows).unsqueeze(1).to(device)


def left(groups: Sequence[Group], wanted: Sequence[bool]) -> tuple[Group, ...]:
    """What `without_patches` leaves."""
    return tuple(
        group if all_of_it else Group(group.sequences, 1 + group.tokens - group.image, 1)
        for group, all_of_it in zip(groups, wanted, strict=True)
    )


@lru_cache(maxsize=128)
def windows_of(grid: tuple[int, int], side: int, batch: int, device: torch.device) -> tuple[Tensor, tuple[Group, ...]]:
    """The patches of `batch` images window by window, and the windows, those of one shape one group.

    The grid is cut into as few windows as go, as equal as can be: of two heights and two widths at most, and none is
    filled up.
    """
    places = torch.arange(grid[0] * grid[1]).view(grid)
    cut = [
        part for rows in places.tensor_split(-(-grid[0] // side)) for part in rows.tensor_split(-(-grid[1] // side), 1)
    ]
    shapes: dict[torch.Size, list[Tensor]] = {}
    for part in cut:
        shapes.setdefault(part.shape, []).append(part.flatten())
    starts = torch.arange(batch).view(-1, 1) * places.numel()
    order = torch.cat([(starts + torch.cat(alike)).flatten() for alike in shapes.values()])
    groups = (Group(batch * len(alike), len(alike[0]), len(alike[0])) for alike in shapes.values())
    return order.to(device), tuple(groups)


class Block(nn.Module):
    def __init__(self, dim: int, attention: Attention, layer_scale: float | None, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = attention
        self.ls1: nn.Module = LayerScale(dim, layer_scale) if layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, 4 * dim)
        self.ls2: nn.Module = LayerScale(dim, layer_scale) if layer_scale else nn.Identity()

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        groups: Sequence[Group],
        following: nn.LayerNorm,
        kept: Tensor | None = None,
        wanted: Sequence[bool] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(tokens, their `norm1`) -> (tokens, their norm of what is `following`), all M×D.

        A sum and the norm of it are one operation; so a block ends with the norm that the next one begins with.
        `kept`, 2×M×1, is what drop path multiplies the two branches of each token with. In the last block
        `wanted` says of each group whether its patches are used at all; where they are not, nothing is computed of
        them but what others read.
        """
        mixed = self.attn(y, groups)
        if wanted is not None and not all(wanted):
            x, mixed = without_patches(x, groups, wanted), without_patches(mixed, groups, wanted)
            if kept is not None:
                kept = torch.stack([without_patches(factor, groups, wanted) for factor in kept])
        first, second = (None, None) if kept is None else kept
        x, y = _add(x, self.ls1(self.attn.proj(mixed)), first, self.norm2)
        return _add(x, self.ls2(self.mlp(y)), second, following)

    def ask(self, x: Tensor, keys: Tensor, values: Tensor, rule: QueryKeys, clear: bool = False) -> Tensor:
        """B×Q×D; `clear` drops what `x` held, so that only what is read here remains."""
        read = cast(Tensor, self.ls1(self.attn.ask(self.norm1(x), keys, values, rule)))
        return self.think(read if clear else x + read)

    def think(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.ls2(self.mlp(self.norm2(x))))


def _add(x: Tensor, branch: Tensor, factor: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    return add_norm(x, branch, factor, norm.weight, norm.bias, norm.eps)


Given = tuple[
    nn.Module, Tensor, Tensor, tuple[Group, ...], nn.LayerNorm, Tensor | None, tuple[bool, ...] | None
]  # a block, and what it takes
RunBlock = Callable[[Given], tuple[Tensor, Tensor]]


def run_block(given: Given) -> tuple[Tensor, Tensor]:
    block, *rest = given
    x, y = block(*rest)
    return x, y


def again_block(given: Given) -> tuple[Tensor, Tensor]:
    """Keeps the input alone and computes the rest again in backward."""
    x, y = checkpoint(run_block, given, use_reentrant=False, preserve_rng_state=False)
    return x, y


def lean_block(given: Given) -> tuple[Tensor, Tensor]:
    """For the compiler: keeps what matrix products and the operations of our own gave; what is in between, which costs
    nothing but the reading, is made again in backward. 24 bytes for each token and width under bfloat16."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    x, y = checkpoint(run_block, given, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return x, y


def _policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    ours, aten = torch.ops.adclr, torch.ops.aten
    kept = (aten.mm.default, aten.addmm.default, ours.attend.default, ours.add_norm.default, ours.mlp.default)
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE
