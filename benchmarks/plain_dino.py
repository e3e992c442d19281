"""A DINO step in plain eager PyTorch and float16, to compare with: nothing of `adclr` is in it.

Written from what is known of how DINO is usually trained: one backbone call for each size of crop, the head over all
class tokens together, attention spelled out, float16 autocast with a gradient scaler, one softmax and one cross entropy
for each pair of views, and Python loops over the parameters for clipping and for the teacher, each of which the GPU has
to be waited for. The shapes are those of DINO: pre-norm ViT, three-layer head, weight-normalized prototypes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)
        joined: Tensor = self.proj((weights @ v).transpose(1, 2).reshape(batch, tokens, dim))
        return joined


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, drop: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim, eps=1e-6), Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop = drop

    def kept(self, x: Tensor) -> Tensor:
        """Drop path: some images go without this branch."""
        if not self.training or not self.drop:
            return x
        keep = 1 - self.drop
        coin = (keep + torch.rand(x.shape[0], 1, 1, dtype=x.dtype, device=x.device)).floor()
        return x / keep * coin

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.kept(self.attention(self.norm1(x)))
        return x + self.kept(self.mlp(self.norm2(x)))


class Vit(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int, patch: int, side: int, drop: float) -> None:
        super().__init__()
        self.side = side // patch
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + self.side**2, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, drop * i / max(1, depth - 1)) for i in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def placed(self, side: int) -> Tensor:
        """Positions, resampled for a smaller crop."""
        if side == self.side:
            return self.positions
        grid = self.positions[:, 1:].reshape(1, self.side, self.side, -1).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, size=(side, side), mode="bicubic")
        return torch.cat([self.positions[:, :1], grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        side = x.shape[-1]
        x = torch.cat([self.cls.expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], dim=1) + self.placed(side)
        for block in self.blocks:
            x = block(x)
        cls: Tensor = self.norm(x)[:, 0]
        return cls


class Head(nn.Module):
    def __init__(self, dim: int, hidden: int, narrow: int, prototypes: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, narrow)
        )
        self.last = weight_norm(nn.Linear(narrow, prototypes, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(F.normalize(self.mlp(x), dim=-1))
        return logits


class Branch(nn.Module):
    def __init__(self, vit: Vit, head: Head) -> None:
        super().__init__()
        self.vit, self.head = vit, head

    def forward(self, crops: list[Tensor]) -> Tensor:
        """Crops of one size are joined; one backbone call for each size."""
        sizes = sorted({crop.shape[-1] for crop in crops}, reverse=True)
        cls = [self.vit(torch.cat([crop for crop in crops if crop.shape[-1] == size])) for size in sizes]
        logits: Tensor = self.head(torch.cat(cls))
        return logits


class PlainDino:
    """`step(crops)`: the two global crops first, each B×3×side×side, then the local ones."""

    def __init__(
        self,
        shape: tuple[int, int, int],  # width, depth, heads
        patch: int,
        side: int,
        head: tuple[int, int, int],  # hidden, bottleneck, prototypes
        drop_path: float,
        clip: float,
        device: torch.device,
    ) -> None:
        def branch(drop: float) -> Branch:
            return Branch(Vit(*shape, patch, side, drop), Head(shape[0], *head)).to(device)

        self.student, self.teacher = branch(drop_path), branch(0.0)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.center = torch.zeros(1, head[2], device=device)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.student.parameters() if p.ndim > 1], "weight_decay": 0.04},
            {"params": [p for p in self.student.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4)
        self.scaler = torch.amp.GradScaler(device.type)
        self.clip, self.device = clip, device

    def loss(self, student: Tensor, teacher: Tensor, views: int) -> Tensor:
        said = (student / 0.1).chunk(views)
        wanted = F.softmax((teacher - self.center) / 0.04, dim=-1).detach().chunk(2)
        total, pairs = torch.zeros((), device=self.device), 0
        for i, target in enumerate(wanted):
            for j, logits in enumerate(said):
                if i != j:
                    total = total + torch.sum(-target * F.log_softmax(logits, dim=-1), dim=-1).mean()
                    pairs += 1
        with torch.no_grad():
            self.center = 0.9 * self.center + 0.1 * teacher.float().mean(dim=0, keepdim=True)
        return total / pairs

    def step(self, crops: list[Tensor]) -> float:
        with torch.autocast(self.device.type, dtype=torch.float16):
            with torch.no_grad():
                teacher = self.teacher(crops[:2])
            loss = self.loss(self.student(crops), teacher, len(crops))
        value = loss.item()
        if not math.isfinite(value):
            raise RuntimeError(f"the loss is {value}")
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.unscale_(self.optimizer)
        for parameter in self.student.parameters():
            if parameter.grad is not None:
                factor = self.clip / (parameter.grad.norm(2) + 1e-6)
                if factor < 1:
                    parameter.grad.mul_(factor)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with torch.no_grad():
            for ours, theirs in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                theirs.mul_(0.996).add_((1 - 0.996) * ours.detach())
        return value
