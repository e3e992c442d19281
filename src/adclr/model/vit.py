"""The one Vision Transformer: query tokens read the image; the image never reads them back.

Shape letters used throughout: B images, V views, Q queries, N patches, T tokens, D width, H heads, K prototypes,
C channels, P side of a patch in pixels. Image tokens are `[CLS]`, registers if any, then patches, in this order;
queries stand behind them. State keys are timm's, so weights go both ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adclr.model.blocks import (
    Attention,
    Block,
    QueryKeys,
    RunBlock,
    again_block,
    by_group,
    clear_queries,
    for_tokens,
    lean_block,
    left,
    run_block,
    windows_of,
)
from adclr.model.ops.attention import Group
from adclr.model.ops.norm import norm

# All bicubic: with antialiasing, without, or without and for a grid OFFSET larger, as DINO's own code has it.
PositionResampling = Literal["antialias", "plain", "offset"]
OFFSET = 0.1  # of a patch


class Tokens(NamedTuple):
    cls: Tensor  # B×D
    patches: Tensor  # B×N×D; N is 0 where they were not wanted
    queries: Tensor | None  # B×Q×D
    registers: Tensor | None  # B×R×D


class Input(NamedTuple):
    """What one forward pass takes."""

    images: Tensor  # B×C×height×width
    queries: Tensor | None = None  # B×Q×C×P×P
    mask: Tensor | None = None  # B×N, true where a patch is hidden
    patches: bool = True  # whether patches (and registers) are wanted; without them the last block is cheaper


class Memory(NamedTuple):
    """What was kept of images that were read, enough to answer any query later."""

    keys: list[Tensor]  # of each block, B×H×T×(D/H)
    values: list[Tensor]
    tokens: Tokens


class PatchEmbed(nn.Module):
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


def to_stream(x: Tensor) -> Tensor:
    """The tokens as they go from block to block: under autocast in its type, so that half as much is moved and kept."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


@lru_cache(maxsize=128)  # of images of any size there are many grids, and a matrix is a few MB
def _resampling(
    stored: tuple[int, int], wanted: tuple[int, int], how: PositionResampling, device: torch.device
) -> Tensor:
    """The matrix that resamples a grid: the gradient of interpolation, on a GPU, adds up in no fixed order."""
    count = stored[0] * stored[1]
    with torch.no_grad(), torch.inference_mode(False):
        each = torch.eye(count).view(count, 1, *stored)
        if how == "offset":
            scale = [(new + OFFSET) / old for new, old in zip(wanted, stored, strict=True)]
            found = F.interpolate(each, scale_factor=scale, mode="bicubic")
        else:
            found = F.interpolate(each, size=wanted, mode="bicubic", antialias=how == "antialias")
        return found.view(count, -1).T.contiguous().to(device)


class VisionTransformer(nn.Module):
    """A ViT whose forward takes optional query crops and an optional mask and returns named tokens.

    With registers the position of `[CLS]` is left out, as in timm's register models (its token can carry it).
    `input_size` is (height, width) for which positions are stored; any other size divisible by P works too.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        num_heads: int,
        patch_size: int,
        input_size: int | tuple[int, int] = 224,
        num_registers: int = 0,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        query_keys: QueryKeys = "image",
        position_resampling: PositionResampling = "antialias",
        mask_token: bool = False,
        num_channels: int = 3,
        norm_eps: float = 1e-6,
        query_read_only_blocks: int = 0,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide the width {dim}")
        if not 0 <= query_read_only_blocks <= depth:
            raise ValueError(f"query_read_only_blocks is {query_read_only_blocks} where there are {depth} blocks")
        if query_read_only_blocks and query_keys in ("image_and_self", "all"):
            raise ValueError(f"query_read_only_blocks needs queries that do not attend to queries, not {query_keys=}")
        height, width = (input_size, input_size) if isinstance(input_size, int) else input_size
        self.dim, self.depth, self.num_heads, self.patch_size = dim, depth, num_heads, patch_size
        self.input_size, self.num_channels = (height, width), num_channels
        self.num_registers = num_registers
        self.layer_scale, self.norm_eps = layer_scale, norm_eps
        self.query_keys: QueryKeys = query_keys
        self.query_read_only_blocks = query_read_only_blocks  # the last n blocks; see `_is_first_read_only`
        self.position_resampling: PositionResampling = position_resampling
        self.grid = self.grid_of(height, width)
        self.num_prefix = 1 + num_registers
        self.positioned_prefix = 0 if num_registers else 1
        self.patch_embed = PatchEmbed(patch_size, num_channels, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.reg_token = nn.Parameter(torch.zeros(1, num_registers, dim)) if num_registers else None
        positions = self.positioned_prefix + self.grid[0] * self.grid[1]
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, dim))
        self.mask_token = nn.Parameter(torch.zeros(1, dim)) if mask_token else None
        self.blocks = nn.ModuleList(
            Block(dim, Attention(dim, num_heads, query_keys, self.num_prefix), layer_scale, norm_eps)
            for _ in range(depth)
        )
        self.drop_path = drop_path  # of the last block, the first has none, linear in between
        self.run_block: RunBlock = run_block  # by `forward_many`
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        self.initialise()

    def initialise(self) -> None:
        for token in (self.cls_token, self.reg_token, self.pos_embed):
            if token is not None:
                nn.init.trunc_normal_(token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        if height % self.patch_size or width % self.patch_size or not height or not width:
            raise ValueError(f"an image of {height}x{width} pixels is not divisible by patches of {self.patch_size}")
        return height // self.patch_size, width // self.patch_size

    def like(self) -> VisionTransformer:
        """A new one of the same shape: the control of everything that these weights are good for."""
        return VisionTransformer(
            self.dim,
            self.depth,
            self.num_heads,
            self.patch_size,
            self.input_size,
            self.num_registers,
            self.layer_scale,
            query_keys=self.query_keys,
            position_resampling=self.position_resampling,
            num_channels=self.num_channels,
            norm_eps=self.norm_eps,
            query_read_only_blocks=self.query_read_only_blocks,
        )

    def _is_first_read_only(self, block: int) -> bool:
        """Whether queries lose their own content on entering this block.

        Their attention query still comes from it, their residual is set to zero, and from here on a query consists only
        of what it has read from the image: its own pixels cannot solve the loss (docs/method.md).
        """
        return self.query_read_only_blocks > 0 and block == self.depth - self.query_read_only_blocks

    # -- tokens in --

    def positions(self, grid: tuple[int, int]) -> Tensor:
        """The positions of `[CLS]` (unless there are registers) and of a grid of patches, resampled if need be."""
        if grid == self.grid:
            return self.pos_embed
        prefix, stored = self.pos_embed[:, : self.positioned_prefix], self.pos_embed[:, self.positioned_prefix :]
        matrix = _resampling(self.grid, grid, self.position_resampling, stored.device)
        with torch.autocast(stored.device.type, enabled=False):
            return torch.cat([prefix, (matrix.to(stored.dtype) @ stored)], dim=1)

    def embed(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """The image tokens, B×(1+R+N)×D."""
        batch = images.shape[0]
        grid = self.grid_of(images.shape[2], images.shape[3])
        x = self.patch_embed(images)
        if mask is not None:
            if self.mask_token is None:
                raise ValueError("this backbone was made without a mask token")
            x = torch.where(mask.unsqueeze(-1), self.mask_token.to(x.dtype), x)
        cls = self.cls_token.expand(batch, -1, -1)
        positions = self.positions(grid)
        if self.reg_token is None:
            return torch.cat([cls, x], dim=1) + positions
        return torch.cat([cls, self.reg_token.expand(batch, -1, -1), x + positions], dim=1)

    def embed_queries(self, queries: Tensor) -> Tensor:
        """B×Q×C×P×P -> B×Q×D: the same projection as the patches', and no position."""
        if queries.shape[-2:] != (self.patch_size, self.patch_size):
            raise ValueError(f"query crops must be {self.patch_size}x{self.patch_size} pixels, one patch each")
        batch, count = queries.shape[:2]
        embedded: Tensor = self.patch_embed(queries.flatten(0, 1))
        return embedded.view(batch, count, self.dim)

    def _kept(self, num_sequences: int, device: torch.device) -> Tensor | None:
        """What drop path multiplies with, depth×2×sequences: 0, or 1 / (1 - rate) so that the mean stays."""
        if not self.training or not self.drop_path:
            return None
        rates = torch.linspace(0, self.drop_path, self.depth, device=device)[:, None, None]
        return (torch.rand(self.depth, 2, num_sequences, device=device) >= rates) / (1 - rates)

    def _start(self, images: Tensor, queries: Tensor | None, mask: Tensor | None) -> tuple[Tensor, int]:
        x = self.embed(images, mask)
        num_image = x.shape[1]
        if queries is not None and queries.shape[1]:
            x = torch.cat([x, self.embed_queries(queries)], dim=1)
        return x, num_image

    def _name(self, x: Tensor, num_image: int, patches: bool = True) -> Tokens:
        prefix = self.num_prefix if patches else 1
        return Tokens(
            cls=x[:, 0],
            patches=x[:, prefix:num_image],
            queries=x[:, num_image:] if x.shape[1] > num_image else None,
            registers=x[:, 1:prefix] if prefix > 1 else None,
        )

    # -- tokens out --

    def forward(self, images: Tensor, queries: Tensor | None = None, mask: Tensor | None = None) -> Tokens:
        return self._forward([Input(images, queries, mask)], run_block)[0]

    def forward_many(self, inputs: Sequence[Input], kept: Tensor | None = None) -> list[Tokens]:
        """`forward` of several inputs at once, such as crops of several sizes; in training, as fast as can be.

        `kept`, depth×2×sequences, is what drop path multiplies with, for who draws that himself.
        """
        return self._forward(inputs, self.run_block, kept)

    def _forward(self, inputs: Sequence[Input], run: RunBlock, kept: Tensor | None = None) -> list[Tokens]:
        started = [self._start(item.images, item.queries, item.mask) for item in inputs]
        groups = tuple(Group(x.shape[0], x.shape[1], num_image) for x, num_image in started)
        wanted = tuple(item.patches for item in inputs)
        x = to_stream(torch.cat([x.flatten(0, 1) for x, _ in started]))
        if kept is None:
            kept = self._kept(sum(group.sequences for group in groups), x.device)
        # of all blocks at once: block by block these were a hundred small operations of a step
        factors = [None] * self.depth if kept is None else for_tokens(kept, groups).unbind()
        y = self.first_norm(x)
        for i, (block, following) in enumerate(self._with_norms()):
            last = i == self.depth - 1
            if self._is_first_read_only(i):
                x = clear_queries(x, groups)
            x, y = run((block, x, y, groups, following, factors[i], wanted if last else None))
        groups = left(groups, wanted)
        return [
            self._name(part, group.image, all_of_it)
            for part, group, all_of_it in zip(by_group(y, groups), groups, wanted, strict=True)
        ]

    def _with_norms(self) -> Iterator[tuple[Block, nn.LayerNorm]]:
        """Each block with the norm that comes behind it: of the next one, or the last."""
        blocks = cast("list[Block]", list(self.blocks))
        yield from zip(blocks, [*(block.norm1 for block in blocks[1:]), self.norm], strict=True)

    def first_norm(self, x: Tensor) -> Tensor:
        first = cast(Block, self.blocks[0]).norm1
        return norm(x, first.weight, first.bias, first.eps)

    def compile_blocks(self, **options: Any) -> None:
        """From now on `forward_many` runs blocks compiled: one graph for all but the last, for each shape."""
        run = again_block if self.run_block is again_block else lean_block
        self.run_block = torch.compile(run, dynamic=False, **options)

    def plain_blocks(self) -> None:
        """As at first."""
        self.run_block = run_block

    def checkpoint_blocks(self) -> None:
        """From now on `forward_many` keeps only the inputs of blocks for backward, and runs them again there."""
        self.run_block = again_block

    def intermediate(
        self, images: Tensor, layers: int | Sequence[int], norm: bool = True, kept: Tensor | None = None
    ) -> list[Tokens]:
        """Tokens after each of the given blocks (or of the last n), through the final norm unless told otherwise.

        `kept`, depth×2×B, is what drop path multiplies with. In training blocks run as those of `forward_many` do.
        """
        wanted = range(self.depth - layers, self.depth) if isinstance(layers, int) else layers
        chosen = [layer % self.depth for layer in wanted]
        run = self.run_block if self.training else run_block
        x, num_image = self._start(images, None, None)
        group = Group(x.shape[0], x.shape[1], num_image)
        x = to_stream(x.flatten(0, 1))
        y = self.first_norm(x)
        factors = [None] * self.depth if kept is None else for_tokens(kept, (group,)).unbind()
        found = {}
        for i, (block, following) in enumerate(self._with_norms()):
            x, y = run((block, x, y, (group,), following, factors[i], None))
            if i in chosen:
                seen = y if norm and following is self.norm else self.norm(x) if norm else x
                found[i] = self._name(seen.unflatten(0, group[:2]), num_image)
        return [found[i] for i in chosen]

    def in_windows(
        self, images: Tensor, layers: Sequence[int], side: int, norm: bool = True, kept: Tensor | None = None
    ) -> list[Tensor]:
        """Patches after each of the given blocks, B×N×D, for large images: the other blocks look no farther than their
        window of the grid, at most side×side patches. `[CLS]` and registers are left out, since no window has them.
        """
        grid, batch = self.grid_of(images.shape[2], images.shape[3]), images.shape[0]
        run = self.run_block if self.training else run_block
        order, windows = windows_of(grid, side, batch, images.device)
        back, count = order.argsort(), grid[0] * grid[1]
        x = to_stream(self.embed(images)[:, self.num_prefix :].flatten(0, 1))
        y = self.first_norm(x)
        whole = (Group(batch, count, count),)
        factors = [None] * self.depth if kept is None else for_tokens(kept, whole).unbind()
        found = {}
        for i, (block, following) in enumerate(self._with_norms()):
            factor = factors[i]
            if i in layers:
                x, y = run((block, x, y, whole, following, factor, None))
                found[i] = (self.norm(x) if norm else x).unflatten(0, (batch, count))
            else:
                here = None if factor is None else factor[:, order]
                x, y = run((block, x[order], y[order], windows, following, here, None))
                x, y = x[back], y[back]
        return [found[layer] for layer in layers]

    def attention(self, images: Tensor, queries: Tensor | None = None, block: int = -1) -> Tensor:
        """B×H×T×T attention of one block, float32; rows and columns in the order of the tokens."""
        x, num_image = self._start(images, queries, None)
        group = Group(x.shape[0], x.shape[1], num_image)
        x = x.flatten(0, 1)
        y = self.first_norm(x)
        for i, (layer, following) in enumerate(self._with_norms()):
            if i == block % self.depth:
                return layer.attn.weights(y.view(*group[:2], self.dim), num_image)
            if self._is_first_read_only(i):
                x = clear_queries(x, (group,))
            x, y = layer(x, y, (group,), following)
        raise AssertionError("a ViT has at least one block")

    # -- read once, ask often --

    def read(self, images: Tensor) -> Memory:
        """Reads images and keeps what queries will need: since no image token reads a query, this is all."""
        if self.query_keys == "all":
            raise ValueError("with query_keys=all the image reads its queries, so it cannot be read before them")
        x, num_image = self._start(images, None, None)
        keys, values = [], []
        for block in self.blocks:
            assert isinstance(block, Block)
            q, k, v = block.attn.split(block.norm1(x))
            keys.append(k)
            values.append(v)
            x = block.think(x + block.ls1(block.attn.join(block.attn.attend(q, k, v, num_image))))
        return Memory(keys, values, self._name(self.norm(x), num_image))

    def ask(self, memory: Memory, queries: Tensor) -> Tensor:
        """B×Q×D: what `forward` gives for these queries, at the cost of the queries alone."""
        x = self.embed_queries(queries)
        for i, (block, keys, values) in enumerate(zip(self.blocks, memory.keys, memory.values, strict=True)):
            assert isinstance(block, Block)
            x = block.ask(x, keys, values, self.query_keys, clear=self._is_first_read_only(i))
        return cast(Tensor, self.norm(x))

    def gaze(
        self, memory: Memory, queries: Tensor | None = None, block: int = -1, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(attention of the queries in a block, B×H×Q×T, see `Attention.asked`; what `ask` gives for them).

        Without queries `[CLS]` asks: it reads what an image token reads, so it too can come later, and its attention
        costs one token instead of the T×T of `attention`. A temperature above 1 flattens the attention that is shown.
        """
        rule = self.query_keys
        if queries is None:
            rule, x = "image", self.cls_token.expand(memory.keys[0].shape[0], -1, -1)
            x = x + self.pos_embed[:, : self.positioned_prefix] if self.positioned_prefix else x
        else:
            x = self.embed_queries(queries)
        found = None
        for i, (layer, keys, values) in enumerate(zip(self.blocks, memory.keys, memory.values, strict=True)):
            assert isinstance(layer, Block)
            if i == block % self.depth:
                found = layer.attn.asked(layer.norm1(x), keys, rule, temperature)
            x = layer.ask(x, keys, values, rule, clear=queries is not None and self._is_first_read_only(i))
        assert found is not None, "a ViT has at least one block"
        return found, self.norm(x)
