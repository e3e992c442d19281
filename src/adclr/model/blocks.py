"""The layers and blocks of the ViT. Blocks take flat tokens: M×D, all sequences of all groups one after the other.

A `Group` is sequences of one length, such as the crops of one size. All groups share the norms and the matrix products;
only attention splits them into sequences. Shape letters are those of `vit.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from adclr.model.ops.attention import Group
from adclr.model.ops.dispatch import add_norm, attend, mlp
from adclr.model.ops.rotation import Rotation, rotate

QueryKeys = Literal["image", "patches", "image_and_self", "all"]
MlpKind = Literal["plain", "gated"]


# -- which tokens a query attends to --


def restrict_keys(group: Group, query_keys: QueryKeys, num_prefix: int) -> Group:
    """Return the group with the range of keys that the rule gives its queries.

    - `image`: queries attend to the image tokens;
    - `patches`: not to the first `num_prefix` of them, `[CLS]` and registers;
    - `all`: every token attends to every token, so queries count as image tokens;
    - `image_and_self`: also to themselves, which is no range: `attention_mask` adds it.
    """
    if query_keys == "all":
        return group._replace(image=group.tokens)
    return group._replace(hidden=num_prefix) if query_keys == "patches" else group


def attention_mask(group: Group, query_keys: QueryKeys, num_prefix: int, device: torch.device) -> Tensor:
    """Return T×T, true where the token of the row attends to the token of the column."""
    keys = restrict_keys(group, query_keys, num_prefix)
    mask = torch.zeros(group.tokens, group.tokens, dtype=torch.bool, device=device)
    mask[:, : keys.image] = True
    mask[group.image :, : keys.hidden] = False
    if query_keys == "image_and_self":
        mask |= torch.eye(group.tokens, dtype=torch.bool, device=device)
    return mask


# -- flat tokens --


def split_groups(x: Tensor, groups: Sequence[Group]) -> list[Tensor]:
    """M×... -> sequences×tokens×... of each group."""
    parts = torch.split(x, [group.sequences * group.tokens for group in groups])
    return [part.view(*group[:2], *x.shape[1:]) for part, group in zip(parts, groups, strict=True)]


def expand_to_tokens(values: Tensor, groups: Sequence[Group]) -> Tensor:
    """...×sequences -> ...×M×1, the same value for all tokens of a sequence."""
    parts = torch.split(values, [group.sequences for group in groups], dim=-1)
    expanded = [
        part[..., None].expand(*part.shape, group.tokens).flatten(-2) for part, group in zip(parts, groups, strict=True)
    ]
    return torch.cat(expanded, dim=-1).unsqueeze(-1)


def _drop_patches(x: Tensor, groups: Sequence[Group], keep_patches: Sequence[bool]) -> Tensor:
    """Return the tokens of groups that keep their patches, and of the others only `[CLS]` and queries."""
    parts = []
    for part, group, keep in zip(split_groups(x, groups), groups, keep_patches, strict=True):
        tokens = part if keep else torch.cat([part[:, :1], part[:, group.image :]], dim=1)
        parts.append(tokens.flatten(0, 1))
    return torch.cat(parts)


def groups_without_patches(groups: Sequence[Group], keep_patches: Sequence[bool]) -> tuple[Group, ...]:
    """Return the groups of what `_drop_patches` returns."""
    return tuple(
        group if keep else Group(group.sequences, 1 + group.tokens - group.image, 1)
        for group, keep in zip(groups, keep_patches, strict=True)
    )


def clear_queries(x: Tensor, groups: Sequence[Group], ordinary: Sequence[int] | None = None) -> Tensor:
    """Return M×D with the rows of query tokens set to zero, but for the first `ordinary` queries of each group."""
    ordinary = (0,) * len(groups) if ordinary is None else tuple(ordinary)
    return x.masked_fill(_is_read_only(tuple(groups), ordinary, x.device), 0.0)


@lru_cache(maxsize=128)
def _is_read_only(groups: tuple[Group, ...], ordinary: tuple[int, ...], device: torch.device) -> Tensor:
    """Return M×1, true for query tokens that are not ordinary ones."""
    with torch.inference_mode(False):
        rows = [
            torch.arange(group.tokens).ge(group.image + count).repeat(group.sequences)
            for group, count in zip(groups, ordinary, strict=True)
        ]
        return torch.cat(rows).unsqueeze(1).to(device)


@lru_cache(maxsize=128)
def partition_windows(
    grid: tuple[int, int], side: int, batch: int, device: torch.device
) -> tuple[Tensor, tuple[Group, ...]]:
    """Return the order of the patches of `batch` images window by window, and the windows, one group for each shape.

    The grid is cut into as few windows of at most side×side patches as possible, as equal as possible: they have at
    most two heights and two widths, and none is padded.
    """
    indices = torch.arange(grid[0] * grid[1]).view(grid)
    windows = [
        window
        for rows in indices.tensor_split(-(-grid[0] // side))
        for window in rows.tensor_split(-(-grid[1] // side), 1)
    ]
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for window in windows:
        by_shape.setdefault(window.shape, []).append(window.flatten())
    starts = torch.arange(batch).view(-1, 1) * indices.numel()
    order = torch.cat([(starts + torch.cat(equal_shapes)).flatten() for equal_shapes in by_shape.values()])
    groups = (
        Group(batch * len(equal_shapes), len(equal_shapes[0]), len(equal_shapes[0]))
        for equal_shapes in by_shape.values()
    )
    return order.to(device), tuple(groups)


def operation_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which operations on x run: that of autocast if it is on."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


# -- drop path: branches of a block are left out for whole sequences, at random, more often in later blocks --


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


# -- modules --


class PatchEmbed(nn.Module):
    """The linear projection of patches."""

    def __init__(self, patch_size: int, num_channels: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(num_channels, dim, patch_size, patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """B×C×height×width -> B×N×D. One matrix product: patches do not overlap."""
        batch, channels, height, width = images.shape
        patch = self.proj.kernel_size[0]
        x = images.view(batch, channels, height // patch, patch, width // patch, patch)
        x = x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return F.linear(x, self.proj.weight.flatten(1), self.proj.bias)


class LinearWithoutKeyBias(nn.Linear):
    """The qkv layer of DINOv3: its bias of keys counts as 0 and has no gradient.

    Without a rotation a bias of keys changes no attention weight; with one it does.
    """

    def forward(self, x: Tensor) -> Tensor:
        """...×D -> ...×3D."""
        q, k, v = self.bias.chunk(3)
        return F.linear(x, self.weight, torch.cat([q, torch.zeros_like(k), v]))


class Attention(nn.Module):
    """Multi-head attention in which `query_keys` says what query tokens attend to, see `restrict_keys`.

    A `rotation` turns the attention queries and keys of tokens that have a position, see `positions.py`.
    """

    def __init__(self, dim: int, num_heads: int, query_keys: QueryKeys, num_prefix: int, key_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_keys: QueryKeys = query_keys
        self.num_prefix = num_prefix  # [CLS] and registers
        self.qkv = nn.Linear(dim, 3 * dim) if key_bias else LinearWithoutKeyBias(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def split(self, x: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """B×T×D -> attention queries, keys and values, each B×H×T×(D/H)."""
        qkv: Tensor = self.qkv(x)
        if rotation is not None:
            group = Group(x.shape[0], x.shape[1], x.shape[1])
            qkv = rotate(qkv.flatten(0, 1), rotation, (group,), self.num_heads).view(qkv.shape)
        return self._split_heads(qkv)

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, tokens, width = qkv.shape
        q, k, v = qkv.view(batch, tokens, 3, self.num_heads, width // 3 // self.num_heads).permute(2, 0, 3, 1, 4)
        return q, k, v

    def join(self, x: Tensor) -> Tensor:
        """B×H×T×(D/H) -> B×T×D, through `proj`."""
        return cast(Tensor, self.proj(x.transpose(1, 2).flatten(2)))

    def forward(self, x: Tensor, groups: Sequence[Group], rotation: Rotation | None = None) -> Tensor:
        """M×D -> M×D, heads side by side, before `proj`."""
        qkv = self.qkv(x)
        if rotation is not None:
            qkv = rotate(qkv, rotation, groups, self.num_heads)
        if self.query_keys != "image_and_self":
            ranges = [restrict_keys(group, self.query_keys, self.num_prefix) for group in groups]
            return attend(qkv, ranges, self.num_heads)
        outputs = []
        for part, group in zip(split_groups(qkv, groups), groups, strict=True):
            mask = None
            if group.tokens > group.image:
                mask = attention_mask(group, self.query_keys, self.num_prefix, x.device)
            output = F.scaled_dot_product_attention(*self._split_heads(part), attn_mask=mask)
            outputs.append(output.transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat(outputs)

    def cross_attend(self, x: Tensor, keys: Tensor, values: Tensor, query_keys: QueryKeys) -> Tensor:
        """Return B×Q×D: what query tokens `x` read from the keys and values of the image tokens, through `proj`."""
        q, k, v = self.split(x)
        keys, values = keys.to(q.dtype), values.to(q.dtype)  # they may be stored in half precision
        group, mask = _cross_group(q, keys), None
        if query_keys == "image_and_self":
            keys, values = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
            mask = attention_mask(group, query_keys, self.num_prefix, q.device)[group.image :]
        else:
            first = restrict_keys(group, query_keys, self.num_prefix).hidden
            keys, values = keys[:, :, first:], values[:, :, first:]
        return self.join(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))

    def cross_attention(self, x: Tensor, keys: Tensor, query_keys: QueryKeys, temperature: float) -> Tensor:
        """Return B×H×Q×T, the attention of query tokens `x` to the image tokens, float32.

        Rows sum to 1; under `image_and_self` together with a last column, a query's attention to itself.
        """
        q, k, _ = self.split(x)
        scores = (q @ keys.to(q.dtype).transpose(-2, -1)).float()
        group = _cross_group(q, keys)
        mask = attention_mask(group, query_keys, self.num_prefix, q.device)[group.image :, : group.image]
        scores = scores.masked_fill(~mask, float("-inf"))
        if query_keys == "image_and_self":
            scores = torch.cat([scores, (q * k).sum(dim=-1, keepdim=True).float()], dim=-1)
        return F.softmax(scores * (q.shape[-1] ** -0.5 / temperature), dim=-1)

    def weights(self, x: Tensor, num_image: int, rotation: Rotation | None = None) -> Tensor:
        """Return B×H×T×T attention, every row summing to 1; columns of queries are 0 but under two of the rules."""
        q, k, _ = self.split(x, rotation)
        scores = (q @ k.transpose(-2, -1)).float() * q.shape[-1] ** -0.5
        mask = attention_mask(Group(x.shape[0], x.shape[1], num_image), self.query_keys, self.num_prefix, x.device)
        return F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)


def _cross_group(q: Tensor, keys: Tensor) -> Group:
    """Return the group of sequences whose image tokens have these keys and whose query tokens are `q`."""
    return Group(q.shape[0], keys.shape[2] + q.shape[2], keys.shape[2])


class Mlp(nn.Module):
    """Two linear layers with GELU in between."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """...×D -> ...×D."""
        return mlp(x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)


class GatedMlp(nn.Module):
    """SwiGLU: two linear layers, one of which, through SiLU, is the factor of the other, and a third one behind.

    In PyTorch's operations everywhere: it stores four numbers for each hidden one, and compiled two.
    """

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1_g = nn.Linear(dim, hidden_dim)
        self.fc1_x = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """...×D -> ...×D."""
        return cast(Tensor, self.fc2(F.silu(self.fc1_g(x)) * self.fc1_x(x)))


class LayerScale(nn.Module):
    """One learned factor for each of the D features."""

    def __init__(self, dim: int, value: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), value))

    def forward(self, x: Tensor) -> Tensor:
        """...×D -> ...×D."""
        return x * self.gamma


class Block(nn.Module):
    """A pre-norm transformer block: attention and MLP, each with LayerScale and drop path, added to the tokens."""

    def __init__(
        self, dim: int, attention: Attention, layer_scale: float | None, norm_eps: float = 1e-6, mlp: MlpKind = "plain"
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = attention
        self.ls1: nn.Module = LayerScale(dim, layer_scale) if layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp: nn.Module = GatedMlp(dim, 4 * dim) if mlp == "gated" else Mlp(dim, 4 * dim)
        self.ls2: nn.Module = LayerScale(dim, layer_scale) if layer_scale else nn.Identity()

    def forward(
        self,
        x: Tensor,
        normed: Tensor,
        groups: Sequence[Group],
        next_norm: nn.LayerNorm,
        drop_path: Tensor | None = None,
        keep_patches: Sequence[bool] | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(tokens, their `norm1`) -> (tokens, their `next_norm`), all M×D.

        A sum and its norm are one operation; so a block ends with the norm that the next one begins with. `drop_path`,
        2×M×1, holds the factors of the two branches of each token. In the last block `keep_patches` says for each group
        whether its patches are returned; if not, only their keys and values are computed.
        """
        attended = self.attn(normed, groups, rotation)
        if keep_patches is not None and not all(keep_patches):
            x, attended = (_drop_patches(tokens, groups, keep_patches) for tokens in (x, attended))
            if drop_path is not None:
                drop_path = torch.stack([_drop_patches(factor, groups, keep_patches) for factor in drop_path])
        first, second = (None, None) if drop_path is None else drop_path
        x, normed = _add_norm(x, self.ls1(self.attn.proj(attended)), first, self.norm2)
        return _add_norm(x, self.ls2(self.mlp(normed)), second, next_norm)

    def cross_attend(
        self, x: Tensor, keys: Tensor, values: Tensor, query_keys: QueryKeys, clear: bool = False
    ) -> Tensor:
        """B×Q×D -> B×Q×D: what `forward` does to query tokens, from stored keys and values of the image tokens.

        `clear` sets the queries to zero after their attention query is computed, as `clear_queries` does.
        """
        read = cast(Tensor, self.ls1(self.attn.cross_attend(self.norm1(x), keys, values, query_keys)))
        return self.think(read if clear else x + read)

    def think(self, x: Tensor) -> Tensor:
        """B×T×D -> B×T×D: add the MLP branch."""
        return x + cast(Tensor, self.ls2(self.mlp(self.norm2(x))))


def _add_norm(x: Tensor, branch: Tensor, factor: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    return add_norm(x, branch, factor, norm.weight, norm.bias, norm.eps, operation_dtype(x))


# -- ways to run a block in training --

# a block and the arguments of its `forward`
BlockCall = tuple[
    nn.Module, Tensor, Tensor, tuple[Group, ...], nn.LayerNorm, Tensor | None, tuple[bool, ...] | None, Rotation | None
]
RunBlock = Callable[[BlockCall], tuple[Tensor, Tensor]]


def run_block(call: BlockCall) -> tuple[Tensor, Tensor]:
    """Run a block and store for backward what autograd stores."""
    block, *arguments = call
    x, normed = block(*arguments)
    return x, normed


def run_checkpointed(call: BlockCall) -> tuple[Tensor, Tensor]:
    """Run a block, store only its input and compute the rest again in backward."""
    x, normed = checkpoint(run_block, call, use_reentrant=False, preserve_rng_state=False)
    return x, normed


def run_selectively_checkpointed(call: BlockCall) -> tuple[Tensor, Tensor]:
    """Run a block, store the results of matrix products and of `model.ops`, and compute the rest again in backward.

    For the compiler. The rest costs no more than reading its inputs. 24 bytes for each token and width under bfloat16.
    """
    contexts = partial(create_selective_checkpoint_contexts, _checkpoint_policy)
    x, normed = checkpoint(run_block, call, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return x, normed


def _checkpoint_policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    ops, aten = torch.ops.adclr, torch.ops.aten
    stored = (aten.mm.default, aten.addmm.default, ops.attend.default, ops.add_norm.default, ops.mlp.default)
    return CheckpointPolicy.MUST_SAVE if operation in stored else CheckpointPolicy.PREFER_RECOMPUTE
