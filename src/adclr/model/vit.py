"""The Vision Transformer. Query tokens attend to image tokens; image tokens never attend to query tokens.

Shape letters of the whole package: B images, V views, Q queries, N patches, T tokens of a sequence, D width, H heads,
K prototypes, C channels, R registers, P side of a patch in pixels. A sequence is `[CLS]`, registers if any, patches
and queries, in this order; all but the queries are image tokens. With class attention the sequence has no `[CLS]`,
which `class_attention.py` makes of the patches at the end. State-dict keys are timm's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adclr.model.blocks import (
    Attention,
    Block,
    MlpKind,
    PatchEmbed,
    QueryKeys,
    RunBlock,
    clear_queries,
    draw_drop_path,
    drop_path_of_tokens,
    groups_without_patches,
    operation_dtype,
    partition_windows,
    run_block,
    run_checkpointed,
    run_selectively_checkpointed,
    split_groups,
)
from adclr.model.class_attention import ClassAttentionBlock, cls_attention, read_patches, select_neighbors
from adclr.model.named_tensors import Input, Memory, Tokens, name_tokens
from adclr.model.ops.attention import Group
from adclr.model.ops.dispatch import norm
from adclr.model.ops.rotation import Rotation
from adclr.model.positions import (
    PositionEmbedding,
    PositionResampling,
    resample_positions,
    rotation_of_groups,
    rotation_of_windows,
)
from adclr.model.shape import SHAPE, check_shape


class VisionTransformer(nn.Module):
    """A ViT whose forward takes optional query crops and an optional mask and returns named tokens.

    With registers `[CLS]` has no position embedding, as in timm's register models. `input_size` is the (height, width)
    for which position embeddings are stored; any other size divisible by P works too. Rotary positions, DINOv3's, are
    not stored: they turn the attention queries and keys of patches, and attention keys have no bias. With
    `class_attention` blocks, `[CLS]` is made by them at the end, of the patches alone; LayerScale begins at 1 in them
    if there is none elsewhere.
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
        class_attention: int = 0,
        position_embedding: PositionEmbedding = "learned",
        mlp: MlpKind = "plain",
    ) -> None:
        super().__init__()
        learned = position_embedding == "learned"
        queries = (query_keys, query_read_only_blocks)
        check_shape(dim, depth, num_heads, num_registers, *queries, class_attention, rotary=not learned)
        height, width = (input_size, input_size) if isinstance(input_size, int) else input_size
        self.dim, self.depth, self.num_heads, self.patch_size = dim, depth, num_heads, patch_size
        self.input_size, self.num_channels = (height, width), num_channels
        self.num_registers, self.layer_scale, self.norm_eps = num_registers, layer_scale, norm_eps
        self.query_keys: QueryKeys = query_keys
        self.query_read_only_blocks = query_read_only_blocks  # the last n; see `_clears_queries`
        self.position_resampling: PositionResampling = position_resampling
        self.position_embedding: PositionEmbedding = position_embedding
        self.mlp: MlpKind = mlp
        self.grid = self.grid_of(height, width)
        self.class_attention = class_attention
        self.num_prefix = 0 if class_attention else 1 + num_registers
        self.positioned_prefix = 1 if learned and not num_registers and not class_attention else 0
        self.patch_embed = PatchEmbed(patch_size, num_channels, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.reg_token = nn.Parameter(torch.zeros(1, num_registers, dim)) if num_registers else None
        positions = self.positioned_prefix + self.grid[0] * self.grid[1]
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, dim)) if learned else None
        self.mask_token = nn.Parameter(torch.zeros(1, dim)) if mask_token else None
        self.blocks = nn.ModuleList(
            Block(dim, Attention(dim, num_heads, query_keys, self.num_prefix, learned), layer_scale, norm_eps, mlp)
            for _ in range(depth)
        )
        self.blocks_token_only = nn.ModuleList(
            ClassAttentionBlock(dim, num_heads, layer_scale or 1.0, norm_eps) for _ in range(class_attention)
        )
        self.drop_path = drop_path  # rate of the last block; linear from 0 in the first
        self.run_block: RunBlock = run_block  # for `forward_many`
        self.float32_residual = False  # under autocast; else tokens have its type, and blocks store half as many bytes
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        self.initialize()

    def initialize(self) -> None:
        """Draw the weights of tokens, position embeddings and linear layers as timm does."""
        for token in (self.cls_token, self.reg_token, self.pos_embed):
            if token is not None:
                nn.init.trunc_normal_(token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return (rows, columns) of the patches of an image."""
        if height % self.patch_size or width % self.patch_size or not height or not width:
            raise ValueError(f"an image of {height}x{width} pixels is not divisible by patches of {self.patch_size}")
        return height // self.patch_size, width // self.patch_size

    def like(self) -> VisionTransformer:
        """Return a ViT of the same shape with new weights, the baseline to compare these weights with."""
        return VisionTransformer(**{name: getattr(self, name) for name in SHAPE})

    def _clears_queries(self, block: int) -> bool:
        """Return whether query tokens are set to zero in this block, the first of the read-only ones.

        The block's attention queries are computed before that. From here on a query token is only what it has read from
        the image: its own pixels cannot solve the loss (docs/method.md).
        """
        return self.query_read_only_blocks > 0 and block == self.depth - self.query_read_only_blocks

    # -- embedding --

    def positions(self, grid: tuple[int, int]) -> Tensor:
        """Return the position embeddings of `[CLS]`, if it has one, and a grid of patches, resampled."""
        assert self.pos_embed is not None, "rotary positions are no embeddings"
        return resample_positions(self.pos_embed, self.positioned_prefix, self.grid, grid, self.position_resampling)

    def embed(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the image tokens, B×(1+R+N)×D, with class attention B×N×D."""
        batch = images.shape[0]
        grid = self.grid_of(images.shape[2], images.shape[3])
        x: Tensor = self.patch_embed(images)
        if mask is not None:
            if self.mask_token is None:
                raise ValueError("this backbone was made without a mask token")
            x = torch.where(mask.unsqueeze(-1), self.mask_token.to(x.dtype), x)
        if self.class_attention:
            return x + self.positions(grid)
        cls = self.cls_token.expand(batch, -1, -1)
        if self.pos_embed is not None:
            positions = self.positions(grid)
            if self.reg_token is None:
                return torch.cat([cls, x], dim=1) + positions
            x = x + positions
        registers = [] if self.reg_token is None else [self.reg_token.expand(batch, -1, -1)]
        return torch.cat([cls, *registers, x], dim=1)

    def _rotation(
        self, images: Sequence[Tensor], groups: Sequence[Group], prefix: int | None = None
    ) -> Rotation | None:
        """Return the rotation of the tokens of images, one tensor for each group; None where positions are learned."""
        if self.pos_embed is not None:
            return None
        grids = [self.grid_of(*tensor.shape[-2:]) for tensor in images]
        prefix = self.num_prefix if prefix is None else prefix
        return rotation_of_groups(grids, prefix, groups, self.dim // self.num_heads, images[0])

    def embed_queries(self, queries: Tensor) -> Tensor:
        """B×Q×C×P×P -> B×Q×D, with the projection of the patches and no position embedding."""
        if queries.shape[-2:] != (self.patch_size, self.patch_size):
            raise ValueError(f"query crops must be {self.patch_size}x{self.patch_size} pixels, one patch each")
        batch, count = queries.shape[:2]
        embedded: Tensor = self.patch_embed(queries.flatten(0, 1))
        return embedded.view(batch, count, self.dim)

    def _embed_sequences(self, images: Tensor, queries: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Group]:
        """Return (image and query tokens M×D, their group)."""
        x = self.embed(images, mask)
        num_image = x.shape[1]
        if queries is not None and queries.shape[1]:
            x = torch.cat([x, self.embed_queries(queries)], dim=1)
        return x.flatten(0, 1), Group(x.shape[0], x.shape[1], num_image)

    # -- forward --

    def forward(self, images: Tensor, queries: Tensor | None = None, mask: Tensor | None = None) -> Tokens:
        """Return the tokens of images B×C×height×width, queries B×Q×C×P×P and a mask B×N, true where masked."""
        return self._forward([Input(images, queries, mask)], run_block)[0]

    def forward_many(self, inputs: Sequence[Input], drop_path: Tensor | None = None) -> list[Tokens]:
        """Return the tokens of several inputs, such as crops of several sizes, that share all matrix products.

        `drop_path`, depth×2×sequences, are the factors of drop path, for a caller that draws them.
        """
        return self._forward(inputs, self.run_block, drop_path)

    def _forward(self, inputs: Sequence[Input], run: RunBlock, drop_path: Tensor | None = None) -> list[Tokens]:
        embedded = [self._embed_sequences(item.images, item.queries, item.mask) for item in inputs]
        groups = tuple(group for _, group in embedded)
        keep_patches = tuple(item.patches for item in inputs)
        x = self._to_residual(torch.cat([x for x, _ in embedded]))
        if drop_path is None and self.training:
            sequences = sum(group.sequences for group in groups)
            drop_path = draw_drop_path(self.drop_path, self.depth, sequences, x.device)
        factors = drop_path_of_tokens(drop_path, self.depth, groups)
        turned = self._rotation([item.images for item in inputs], groups)
        normed = self.first_norm(x)
        for i, (block, next_norm) in enumerate(self._blocks_and_norms()):
            if self._clears_queries(i):
                x = clear_queries(x, groups, [item.ordinary_queries for item in inputs])
            needed = keep_patches if i == self.depth - 1 and not self.class_attention else None
            x, normed = run((block, x, normed, groups, next_norm, factors[i], needed, turned))
        if self.class_attention:
            parts = zip(inputs, split_groups(x, groups), split_groups(normed, groups), groups, strict=True)
            return [self._add_cls(item, tokens, last, group.image) for item, tokens, last, group in parts]
        groups = groups_without_patches(groups, keep_patches)
        return [
            name_tokens(tokens, group.image, self.num_prefix, patches)
            for tokens, group, patches in zip(split_groups(normed, groups), groups, keep_patches, strict=True)
        ]

    def _add_cls(self, item: Input, x: Tensor, normed: Tensor, num_image: int) -> Tokens:
        """Return the tokens of one input, B×T×D before and after the final norm, with `[CLS]` by class attention."""
        patches, neighbors = x[:, :num_image], None
        if item.num_neighbors:
            neighbors = select_neighbors(patches, self.grid_of(*item.images.shape[2:]), item.num_neighbors)
        cls, around = read_patches(self.class_blocks, self.cls_token[0], patches, neighbors)
        tokens = name_tokens(normed, num_image, self.num_prefix, item.patches, self._final_norm(cls))
        return tokens if around is None else tokens._replace(neighbors=self._final_norm(around).view_as(patches))

    def _final_norm(self, x: Tensor) -> Tensor:
        return norm(x, self.norm.weight, self.norm.bias, self.norm.eps)

    @property
    def class_blocks(self) -> list[ClassAttentionBlock]:
        """Return the class-attention blocks; none where `[CLS]` goes through all blocks."""
        return cast("list[ClassAttentionBlock]", list(self.blocks_token_only))

    def _blocks_and_norms(self) -> Iterator[tuple[Block, nn.LayerNorm]]:
        """Yield each block with the norm that follows it: the `norm1` of the next block, or the final norm."""
        blocks = cast("list[Block]", list(self.blocks))
        yield from zip(blocks, [*(block.norm1 for block in blocks[1:]), self.norm], strict=True)

    def first_norm(self, x: Tensor) -> Tensor:
        """Return the `norm1` of the first block, M×D."""
        first = cast(Block, self.blocks[0]).norm1
        return norm(x, first.weight, first.bias, first.eps, operation_dtype(x))

    def _to_residual(self, x: Tensor) -> Tensor:
        """Return embedded tokens in the type to which blocks add."""
        return x if self.float32_residual else x.to(operation_dtype(x))

    def compile_blocks(self, **options: Any) -> None:
        """Compile the blocks for `forward_many`: for each shape one graph for all but the last block."""
        run = run_checkpointed if self.run_block is run_checkpointed else run_selectively_checkpointed
        self.run_block = torch.compile(run, dynamic=False, **options)

    def plain_blocks(self) -> None:
        """Undo `compile_blocks` and `checkpoint_blocks`."""
        self.run_block = run_block

    def checkpoint_blocks(self) -> None:
        """Let `forward_many` store only the inputs of blocks for backward, which computes the rest again."""
        self.run_block = run_checkpointed

    def intermediate(
        self,
        images: Tensor,
        layers: int | Sequence[int],
        norm: bool = True,
        drop_path: Tensor | None = None,
        needs_cls: bool = True,
    ) -> list[Tokens]:
        """Return the tokens after each of the blocks `layers` (or the last n), through the final norm if `norm`.

        `drop_path`, depth×2×B, are the factors of drop path. In training blocks run as in `forward_many`. With class
        attention `[CLS]` is as if the trunk ended at that block; without `needs_cls` it is then empty.
        """
        indices = range(self.depth - layers, self.depth) if isinstance(layers, int) else layers
        indices = [layer % self.depth for layer in indices]
        run = self.run_block if self.training else run_block
        x, group = self._embed_sequences(images, None, None)
        x = self._to_residual(x)
        normed = self.first_norm(x)
        factors = drop_path_of_tokens(drop_path, self.depth, (group,))
        turned = self._rotation([images], (group,))
        outputs = {}
        for i, (block, next_norm) in enumerate(self._blocks_and_norms()):
            x, normed = run((block, x, normed, (group,), next_norm, factors[i], None, turned))
            if i in indices:
                output = normed if norm and next_norm is self.norm else self.norm(x) if norm else x
                cls = x[:0] if self.class_attention else None
                if self.class_attention and needs_cls:
                    cls, _ = read_patches(self.class_blocks, self.cls_token[0], x.view(*group[:2], self.dim))
                    cls = self.norm(cls) if norm else cls
                outputs[i] = name_tokens(output.unflatten(0, group[:2]), group.image, self.num_prefix, cls=cls)
        return [outputs[i] for i in indices]

    def in_windows(
        self, images: Tensor, layers: Sequence[int], side: int, norm: bool = True, drop_path: Tensor | None = None
    ) -> list[Tensor]:
        """Return the patches after each of the blocks `layers`, B×N×D, with window attention in all other blocks.

        A window is at most side×side patches. `[CLS]` and registers are left out, since they belong to no window.
        """
        grid, batch = self.grid_of(images.shape[2], images.shape[3]), images.shape[0]
        run = self.run_block if self.training else run_block
        order, windows = partition_windows(grid, side, batch, images.device)
        inverse, count = order.argsort(), grid[0] * grid[1]
        x = self._to_residual(self.embed(images)[:, self.num_prefix :].flatten(0, 1))
        normed = self.first_norm(x)
        whole = (Group(batch, count, count),)
        factors = drop_path_of_tokens(drop_path, self.depth, whole)
        turned = self._rotation([images], whole, prefix=0)
        turned_windows = None if turned is None else rotation_of_windows(turned, grid, side)
        outputs = {}
        for i, (block, next_norm) in enumerate(self._blocks_and_norms()):
            factor = factors[i]
            if i in layers:
                x, normed = run((block, x, normed, whole, next_norm, factor, None, turned))
                outputs[i] = (self.norm(x) if norm else x).unflatten(0, (batch, count))
            else:
                factor = None if factor is None else factor[:, order]
                x, normed = run((block, x[order], normed[order], windows, next_norm, factor, None, turned_windows))
                x, normed = x[inverse], normed[inverse]
        return [outputs[layer] for layer in layers]

    def attention(self, images: Tensor, queries: Tensor | None = None, block: int = -1) -> Tensor:
        """Return the B×H×T×T attention of one block, float32; rows and columns in the order of the tokens."""
        x, group = self._embed_sequences(images, queries, None)
        turned = self._rotation([images], (group,))
        normed = self.first_norm(x)
        for i, (layer, next_norm) in enumerate(self._blocks_and_norms()):
            if i == block % self.depth:
                return layer.attn.weights(normed.view(*group[:2], self.dim), group.image, turned)
            if self._clears_queries(i):
                x = clear_queries(x, (group,))
            x, normed = layer(x, normed, (group,), next_norm, rotation=turned)
        raise AssertionError("a ViT has at least one block")

    # -- images first, queries later --

    def read(self, images: Tensor) -> Memory:
        """Return the keys and values of images for `ask`: no image token depends on a query."""
        if self.query_keys == "all":
            raise ValueError("with query_keys=all the image reads its queries, so it cannot be read before them")
        x = self.embed(images)
        turned = self._rotation([images], (Group(len(x), x.shape[1], x.shape[1]),))
        keys, values = [], []
        for block in cast("list[Block]", self.blocks):
            q, k, v = block.attn.split(block.norm1(x), turned)
            keys.append(k)
            values.append(v)
            x = block.think(x + block.ls1(block.attn.join(F.scaled_dot_product_attention(q, k, v))))
        cls = None
        if self.class_attention:
            projected = [class_block.project(x) for class_block in self.class_blocks]
            keys += [k for k, _ in projected]
            values += [v for _, v in projected]
            cls = self.norm(read_patches(self.class_blocks, self.cls_token[0], x)[0])
        return Memory(keys, values, name_tokens(self.norm(x), x.shape[1], self.num_prefix, cls=cls))

    def ask(self, memory: Memory, queries: Tensor) -> Tensor:
        """Return B×Q×D, the tokens that `forward` returns for these queries, at the cost of the queries alone."""
        x = self.embed_queries(queries)
        for i, (block, keys, values) in enumerate(self._blocks_and_memory(memory)):
            x = block.cross_attend(x, keys, values, self.query_keys, clear=self._clears_queries(i))
        return cast(Tensor, self.norm(x))

    def gaze(
        self, memory: Memory, queries: Tensor | None = None, block: int = -1, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return (attention of the queries in a block, B×H×Q×T, see `Attention.cross_attention`; the result of `ask`).

        Without queries it is the attention of `[CLS]`, at the cost of one token instead of the T×T of `attention`: like
        a query, it attends to the image tokens only. With class attention, whose blocks alone have `[CLS]`, blocks are
        counted from the end, and those before have the first. A temperature above 1 flattens the returned attention.
        """
        query_keys = self.query_keys
        if queries is None and self.class_attention:
            back = max(-self.class_attention, block % self.depth - self.depth)  # -1: the last
            projected = memory.keys[self.depth :], memory.values[self.depth :]
            cls_maps, cls = cls_attention(self.class_blocks, self.cls_token[0], *projected, back, temperature)
            return cls_maps, self.norm(cls).unsqueeze(1)
        if queries is None:
            query_keys, x = "image", self.cls_token.expand(memory.keys[0].shape[0], -1, -1)
            if self.pos_embed is not None and self.positioned_prefix:
                x = x + self.pos_embed[:, :1]
        else:
            x = self.embed_queries(queries)
        attention = None
        for i, (layer, keys, values) in enumerate(self._blocks_and_memory(memory)):
            if i == block % self.depth:
                attention = layer.attn.cross_attention(layer.norm1(x), keys, query_keys, temperature)
            clear = queries is not None and self._clears_queries(i)
            x = layer.cross_attend(x, keys, values, query_keys, clear)
        assert attention is not None, "a ViT has at least one block"
        return attention, self.norm(x)

    def _blocks_and_memory(self, memory: Memory) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """Yield each block of the trunk with the keys and values of its image tokens."""
        blocks = cast("list[Block]", self.blocks)
        yield from zip(blocks, memory.keys[: self.depth], memory.values[: self.depth], strict=True)
