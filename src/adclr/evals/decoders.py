"""Decoders from feature maps to classes of pixels: a linear layer, Semantic FPN, and UperNet with its auxiliary head.

Widths, kernels and the order of layers are mmsegmentation's. A decoder returns logits at the stride of its finest map,
and in training those of its auxiliary head, if it has one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adclr.evals.pyramid import BatchNorm

Logits = tuple[Tensor, Tensor | None]  # of the decoder and of its auxiliary head
DROPOUT = 0.1
POOL_SIZES = (1, 2, 3, 6)  # of the sides of UperNet's pooled maps


def _convolution(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    """Return a convolution, a batch norm and a ReLU."""
    layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, BatchNorm(outputs), nn.ReLU(inplace=True))


def _resize_like(x: Tensor, like: Tensor) -> Tensor:
    """Resize a map to the size of another."""
    return x if x.shape[-2:] == like.shape[-2:] else F.interpolate(x, size=like.shape[-2:], mode="bilinear")


class Linear(nn.Module):
    """Batch norm and a linear layer on the last map."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.norm = BatchNorm(dim)
        self.classify = nn.Conv2d(dim, num_classes, 1)
        nn.init.normal_(self.classify.weight, std=0.01)

    def forward(self, maps: Sequence[Tensor]) -> Logits:
        """Return the logits of the maps, the finest first."""
        return self.classify(self.norm(maps[-1])), None


class Fpn(nn.Module):
    """A feature pyramid, and on each level 3x3 convolutions of half its width, summed at the size of the first level.

    The levels have 1, 1, 2 and 3 convolutions, each but the first level's followed by an upsampling by 2, as for
    strides 4, 8, 16 and 32. SelfPatch keeps them for maps that are all at stride 16: the sum is at the first's size.
    """

    def __init__(self, dims: Sequence[int], num_classes: int, width: int) -> None:
        super().__init__()
        head = max(1, width // 2)
        self.lateral = nn.ModuleList(nn.Conv2d(dim, width, 1) for dim in dims)
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in dims)
        self.heads = nn.ModuleList()
        for level in range(len(dims)):
            layers: list[nn.Module] = []
            for number in range(max(1, level)):
                layers.append(_convolution(width if number == 0 else head, head, 3))
                if level:
                    layers.append(nn.Upsample(scale_factor=2, mode="bilinear"))
            self.heads.append(nn.Sequential(*layers))
        self.dropout = nn.Dropout2d(DROPOUT)
        self.classify = nn.Conv2d(head, num_classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Logits:
        """Return the logits of the maps, the finest first."""
        levels = _add_top_down([lateral(x) for lateral, x in zip(self.lateral, maps, strict=True)], "nearest")
        levels = [smooth(x) for smooth, x in zip(self.smooth, levels, strict=True)]
        total = self.heads[0](levels[0])
        for head, x in zip(self.heads[1:], levels[1:], strict=True):
            total = total + _resize_like(head(x), total)
        return self.classify(self.dropout(total)), None


def _add_top_down(levels: list[Tensor], mode: str) -> list[Tensor]:
    """Add to each level the sum of the coarser levels, resized."""
    for number in range(len(levels) - 1, 0, -1):
        finer = levels[number - 1]
        levels[number - 1] = finer + F.interpolate(levels[number], size=finer.shape[-2:], mode=mode)
    return levels


class UperNet(nn.Module):
    """A pooling pyramid on the last map, a feature pyramid of fused levels, and an auxiliary head on the third map."""

    def __init__(self, dims: Sequence[int], num_classes: int, width: int, auxiliary: int) -> None:
        super().__init__()
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(size), _convolution(dims[-1], width, 1)) for size in POOL_SIZES
        )
        self.pooled = _convolution(dims[-1] + len(POOL_SIZES) * width, width, 3)
        self.lateral = nn.ModuleList(_convolution(dim, width, 1) for dim in dims[:-1])
        self.smooth = nn.ModuleList(_convolution(width, width, 3) for _ in dims[:-1])
        self.together = _convolution(len(dims) * width, width, 3)
        self.dropout = nn.Dropout2d(DROPOUT)
        self.classify = nn.Conv2d(width, num_classes, 1)
        layers = (_convolution(dims[2], auxiliary, 3), nn.Dropout2d(DROPOUT), nn.Conv2d(auxiliary, num_classes, 1))
        self.auxiliary = nn.Sequential(*layers)

    def forward(self, maps: Sequence[Tensor]) -> Logits:
        """Return the logits of the maps, the finest first."""
        last = maps[-1]
        top = self.pooled(torch.cat([last, *(_resize_like(pool(last), last) for pool in self.pools)], dim=1))
        levels = _add_top_down([*(lateral(x) for lateral, x in zip(self.lateral, maps, strict=False)), top], "bilinear")
        levels = [smooth(x) for smooth, x in zip(self.smooth, levels, strict=False)] + levels[-1:]
        fused = self.together(torch.cat([_resize_like(x, levels[0]) for x in levels], dim=1))
        return self.classify(self.dropout(fused)), self.auxiliary(maps[2]) if self.training else None
