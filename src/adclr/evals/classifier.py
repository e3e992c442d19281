"""A backbone with a linear layer on it: what fine-tuning trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from adclr.data.draws import combine, key_of
from adclr.model.vit import Input, VisionTransformer

HEAD_SCALE = 0.001  # of the head's first weights, so that the backbone is not shaken at the start

Pool = Literal["cls", "mean_patch"]


class Classifier(nn.Module):
    def __init__(self, vit: VisionTransformer, num_classes: int, pool: Pool, seed: int) -> None:
        super().__init__()
        self.vit, self.pool = vit, pool
        self.head = nn.Linear(vit.dim, num_classes)
        generator = torch.Generator().manual_seed(combine(seed, key_of("head")) % 2**63)
        nn.init.trunc_normal_(self.head.weight, std=0.02 * HEAD_SCALE, generator=generator)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, kept: Tensor | None = None) -> Tensor:
        """B×K logits; while it trains, by compiled blocks if there are any, which know one size of batch."""
        given = Input(images, patches=self.pool == "mean_patch")
        tokens = self.vit.forward_many([given], kept)[0] if self.training else self.vit(images)
        logits: Tensor = self.head(tokens.cls if self.pool == "cls" else tokens.patches.mean(dim=1))
        return logits

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Its parameters by the names they have in timm."""
        for name, parameter in self.named_parameters():
            yield name.removeprefix("vit."), parameter

    def state(self) -> dict[str, Tensor]:
        return {name.removeprefix("vit."): tensor.detach() for name, tensor in self.state_dict().items()}
