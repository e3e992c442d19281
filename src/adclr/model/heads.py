"""The projection head, shared by `[CLS]`, queries and patches, and a backbone with its heads."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adclr.model.vit import VisionTransformer


class ProjectionHead(nn.Module):
    """DINO's head: D -> 2048 -> 2048 -> 256, L2-normalized, then K weight-normalized prototypes without bias.

    `project` and `prototypes` are separate because the second is linear: the mean of the logits is the logits of the
    mean projection, so the centers use every patch without computing its K logits.
    """

    def __init__(
        self,
        dim: int,
        num_prototypes: int,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
        train_gain: bool = True,
    ) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden_dim),
            nn.GELU(),
            nn.Linear(hidden_dim, hidden_dim),
            nn.GELU(),
            nn.Linear(hidden_dim, bottleneck_dim),
        )
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.last_layer = Prototypes(bottleneck_dim, num_prototypes, train_gain)

    def project(self, x: Tensor) -> Tensor:
        """...×D -> ...×256 of unit length."""
        return F.normalize(self.mlp(x), dim=-1)

    def prototypes(self, projected: Tensor) -> Tensor:
        """...×256 -> ...×K logits."""
        return cast(Tensor, self.last_layer(projected))

    def forward(self, x: Tensor) -> Tensor:
        """...×D -> ...×K logits."""
        return self.prototypes(self.project(x))


class Prototypes(nn.Module):
    """A weight-normalized linear layer: rows of unit length times gains, K×1, which are decayed as in DINO."""

    def __init__(self, dim: int, num_prototypes: int, train_gain: bool) -> None:
        super().__init__()
        direction = torch.empty(num_prototypes, dim)
        nn.init.kaiming_uniform_(direction, a=5**0.5)
        self.direction = nn.Parameter(direction)
        self.gain = nn.Parameter(torch.ones(num_prototypes, 1), requires_grad=train_gain)

    def matrix(self) -> Tensor:
        """Return the prototypes, K×256."""
        return self.gain * F.normalize(self.direction, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        """...×256 -> ...×K logits."""
        return F.linear(x, self.matrix())


class Branch(nn.Module):
    """A backbone with its head, and perhaps a second one for the neighbor loss: the student or the teacher."""

    def __init__(
        self, backbone: VisionTransformer, head: ProjectionHead, patch_head: ProjectionHead | None = None
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.patch_head = patch_head

    @property
    def heads(self) -> list[ProjectionHead]:
        """Return the one or two heads."""
        return [self.head] if self.patch_head is None else [self.head, self.patch_head]
