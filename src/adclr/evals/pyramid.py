"""Feature maps of a ViT for decoders: after some of its blocks, at the stride of its patches or as a pyramid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adclr.model.vit import VisionTransformer
from adclr.system import distributed


class _SumOverProcesses(torch.autograd.Function):
    """The sum over all processes, whose gradient is the sum of the processes' gradients."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # noqa: ARG004
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # noqa: ARG004
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total


class BatchNorm(nn.BatchNorm2d):
    """Batch norm over the batch of all processes, for CPUs.

    `nn.SyncBatchNorm`, into which `Trainer` converts it on GPUs, refuses tensors on the CPU.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized maps."""
        if not self.training or distributed.world_size() == 1:
            return super().forward(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        values = x.float()
        sums = torch.stack([values.sum(dim=(0, 2, 3)), values.square().sum(dim=(0, 2, 3))])
        count = x.numel() / x.shape[1] * distributed.world_size()  # every process has as many images
        total: Tensor = _SumOverProcesses.apply(sums)
        mean, square = total / count
        variance = (square - mean.square()).clamp(min=0)
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum or 0.1)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum or 0.1)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        normalized: Tensor = values * scale.view(-1, 1, 1) + (self.bias - mean * scale).view(-1, 1, 1)
        return normalized.to(x.dtype)


def blocks_at(depth: int, of_twelve: Sequence[int]) -> list[int]:
    """Return the blocks, counted from 0, at the relative depths that these blocks, counted from 1, have in ViT-B."""
    return [max(1, round(number * depth / 12)) - 1 for number in of_twelve]


class Pyramid(nn.Module):
    """Maps B×D×h×w after some blocks, through the last norm if `normed`.

    `rescaled`: the four maps are 4 times, twice, once and half as large as the grid of patches: for patches of 16
    pixels strides 4, 8, 16 and 32. A `frozen` ViT is not trained.
    """

    def __init__(
        self, vit: VisionTransformer, blocks: Sequence[int], normed: bool, rescaled: bool, frozen: bool
    ) -> None:
        super().__init__()
        self.vit, self.blocks, self.normed, self.frozen = vit, list(blocks), normed, frozen
        vit.requires_grad_(not frozen)
        dim = vit.dim
        self.rescale: nn.ModuleList | None = None
        if rescaled:
            assert len(blocks) == 4
            larger = (nn.ConvTranspose2d(dim, dim, 2, 2), BatchNorm(dim), nn.GELU(), nn.ConvTranspose2d(dim, dim, 2, 2))
            parts = (nn.Sequential(*larger), nn.ConvTranspose2d(dim, dim, 2, 2), nn.Identity(), nn.MaxPool2d(2, 2))
            self.rescale = nn.ModuleList(parts)

    def forward(self, images: Tensor, path_scales: Tensor | None = None, windows: int | None = None) -> list[Tensor]:
        """Return the maps; `path_scales`: factors of drop path; `windows`: see `VisionTransformer.in_windows`."""
        grid = self.vit.grid_of(images.shape[-2], images.shape[-1])
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            if windows is None:
                tokens = self.vit.intermediate(images, self.blocks, self.normed, path_scales, needs_cls=False)
                patches = [block_tokens.patches for block_tokens in tokens]
            else:
                patches = self.vit.in_windows(images, self.blocks, windows, self.normed, path_scales)
        maps = [features.transpose(1, 2).reshape(len(images), -1, *grid) for features in patches]
        return maps if self.rescale is None else [part(x) for part, x in zip(self.rescale, maps, strict=True)]
