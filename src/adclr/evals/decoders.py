"""From maps of a backbone to classes of pixels: a linear layer, Semantic FPN, and UperNet with its auxiliary head.

Widths, kernels and the order of things are mmsegmentation's. A decoder gives logits at the stride of its finest map,
and in training those of an auxiliary head or None.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adclr.evals.pyramid import BatchNorm

Logits = tuple[Tensor, Tensor | None]
DROPOUT = 0.1
POOLED = (1, 2, 3, 6)  # cells across, of UperNet's pooling pyramid


def convolution(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    """Convolution, batch norm, ReLU."""
    layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, BatchNorm(outputs), nn.ReLU(inplace=True))


def enlarged(x: Tensor, like: Tensor) -> Tensor:
    return x if x.shape[-2:] == like.shape[-2:] else F.interpolate(x, size=like.shape[-2:], mode="bilinear")


class Linear(nn.Module):
    """Batch norm and a linear layer on the last map."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.norm = BatchNorm(dim)
        self.classify = nn.Conv2d(dim, num_classes, 1)
        nn.init.normal_(self.classify.weight, std=0.01)

    def forward(self, maps: Sequence[Tensor]) -> Logits:
        return self.classify(self.norm(maps[-1])), None


class Fpn(nn.Module):
    """A feature pyramid; of each level 3x3 convolutions of half its width, summed at the size of the first.

    A level has as many convolutions, each but the first level's before a doubling, as for strides 4, 8, 16 and 32.
    SelfPatch leaves them so for maps that are all at stride 16: they are doubled and brought back to the first's size.
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
                layers.append(convolution(width if number == 0 else head, head, 3))
                if level:
                    layers.append(nn.Upsample(scale_factor=2, mode="bilinear"))
            self.heads.append(nn.Sequential(*layers))
        self.dropout = nn.Dropout2d(DROPOUT)
        self.classify = nn.Conv2d(head, num_classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Logits:
        levels = top_down([lateral(x) for lateral, x in zip(self.lateral, maps, strict=True)], "nearest")
        levels = [smooth(x) for smooth, x in zip(self.smooth, levels, strict=True)]
        found = self.heads[0](levels[0])
        for head, x in zip(self.heads[1:], levels[1:], strict=True):
            found = found + enlarged(head(x), found)
        return self.classify(self.dropout(found)), None


def top_down(levels: list[Tensor], mode: str) -> list[Tensor]:
    """Each level plus the sum of those above it."""
    for place in range(len(levels) - 1, 0, -1):
        below = levels[place - 1]
        levels[place - 1] = below + F.interpolate(levels[place], size=below.shape[-2:], mode=mode)
    return levels


class UperNet(nn.Module):
    """A pooling pyramid on the last map, a feature pyramid, all levels together; and an auxiliary head on the third."""

    def __init__(self, dims: Sequence[int], num_classes: int, width: int, auxiliary: int) -> None:
        super().__init__()
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(cells), convolution(dims[-1], width, 1)) for cells in POOLED
        )
        self.pooled = convolution(dims[-1] + len(POOLED) * width, width, 3)
        self.lateral = nn.ModuleList(convolution(dim, width, 1) for dim in dims[:-1])
        self.smooth = nn.ModuleList(convolution(width, width, 3) for _ in dims[:-1])
        self.together = convolution(len(dims) * width, width, 3)
        self.dropout = nn.Dropout2d(DROPOUT)
        self.classify = nn.Conv2d(width, num_classes, 1)
        layers = (convolution(dims[2], auxiliary, 3), nn.Dropout2d(DROPOUT), nn.Conv2d(auxiliary, num_classes, 1))
        self.auxiliary = nn.Sequential(*layers)

    def forward(self, maps: Sequence[Tensor]) -> Logits:
        last = maps[-1]
        top = self.pooled(torch.cat([last, *(enlarged(pool(last), last) for pool in self.pools)], dim=1))
        levels = top_down([*(lateral(x) for lateral, x in zip(self.lateral, maps, strict=False)), top], "bilinear")
        levels = [smooth(x) for smooth, x in zip(self.smooth, levels, strict=False)] + levels[-1:]
        found = self.together(torch.cat([enlarged(x, levels[0]) for x in levels], dim=1))
        return self.classify(self.dropout(found)), self.auxiliary(maps[2]) if self.training else None
