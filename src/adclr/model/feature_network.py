"""Any network that returns a vector and a map of features, as the tokens of a ViT: ResNets, ConvNeXts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from adclr.model.named_tensors import Input, Tokens


class FeatureNetwork(nn.Module):
    """Wraps a network whose forward takes images B×C×height×width and returns (pooled B×D, map B×E×rows×columns).

    The pooled vector is the `cls` of its tokens, the map gives the `patches`. It has no query tokens, no masks and no
    blocks.
    """

    def __init__(self, network: nn.Module, name: str, input_size: tuple[int, int], num_channels: int = 3) -> None:
        super().__init__()
        self.network, self.name = network, name
        self.input_size, self.num_channels = input_size, num_channels
        self.num_prefix, self.depth = 1, 1  # `cls`; its features count as those of one block
        self.class_attention = 0  # see `VisionTransformer`
        self._grids: dict[tuple[int, int], tuple[int, int]] = {}  # by the size of the images
        tokens = self._probe(*input_size)
        self.dim, self.map_dim = tokens.cls.shape[-1], tokens.patches.shape[-1]
        self.grid = self._grids[input_size]
        # pixels from one position of the map to the next, which evaluations round the sides of images to
        self.patch_size = max(1, round(input_size[0] / self.grid[0]))

    @torch.no_grad()
    def _probe(self, height: int, width: int) -> Tokens:
        """Return the tokens of one black image; running statistics stay as they are."""
        training = self.training
        parameter = next(self.parameters())
        self.eval()
        tokens = self.forward(torch.zeros(1, self.num_channels, height, width, device=parameter.device))
        self.train(training)
        return tokens

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return (rows, columns) of the map of an image."""
        if (height, width) not in self._grids:
            self._probe(height, width)
        return self._grids[height, width]

    def forward(self, images: Tensor, queries: Tensor | None = None, mask: Tensor | None = None) -> Tokens:
        """Return the tokens of images."""
        if mask is not None or (queries is not None and queries.shape[1]):
            raise ValueError(f"{self.name} takes neither queries nor masks")
        pooled, features = self.network(images)
        self._grids[images.shape[2], images.shape[3]] = features.shape[2], features.shape[3]
        return Tokens(cls=pooled, patches=features.flatten(2).transpose(1, 2), queries=None, registers=None)

    def intermediate(self, images: Tensor, layers: int | Sequence[int]) -> list[Tokens]:
        """Return the tokens after the only block that there is."""
        if layers not in (1, [0], [-1]):
            raise ValueError(f"{self.name} has no blocks")
        return [self.forward(images)]

    def forward_many(self, inputs: Sequence[Input]) -> list[Tokens]:
        """Return the tokens of several inputs, such as crops of several sizes."""
        return [self.forward(item.images, item.queries, item.mask) for item in inputs]
