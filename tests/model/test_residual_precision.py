"""`train.residual_precision=float32`: blocks add to float32 tokens, and compute in bfloat16 as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adclr.config.parsing import build
from adclr.config.settings import Settings
from adclr.model import blocks, vit
from adclr.model.vit import VisionTransformer
from adclr.training import job, plan_cost

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "read-only queries": {"query_read_only_blocks": 2},
    "DINOv3": {"position_embedding": "rotary", "mlp": "gated", "num_registers": 2, "layer_scale": 0.1},
    "class attention": {"class_attention": 2},
}


def network(**changes: Any) -> VisionTransformer:
    torch.manual_seed(0)
    built = VisionTransformer(48, 6, 3, 4, 16, **changes)
    for parameter in built.parameters():  # sums that grow from block to block, as in a trained network
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 0.5)
    return built


def outputs(net: VisionTransformer, images: Tensor, queries: Tensor | None) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=images.dtype == torch.float32):
        tokens = net(images, queries=queries)
    parts = [tokens.cls, tokens.patches.flatten(0, 1)] + ([] if queries is None else [tokens.queries.flatten(0, 1)])
    return torch.cat([part.double() for part in parts])


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_nearer_to_those_of_float64(kind: str) -> None:
    net = network(**KINDS[kind])
    images = torch.randn(3, 3, 16, 16)
    queries = None if kind == "class attention" else torch.randn(3, 2, 3, 4, 4)
    rounded = outputs(net, images, queries)
    net.float32_residual = True
    wide = outputs(net, images, queries)
    exact = outputs(net.double(), images.double(), None if queries is None else queries.double())
    errors = [float((actual - exact).square().mean().sqrt()) for actual in (wide, rounded)]
    assert 0 < errors[0] < 0.9 * errors[1]


def test_blocks_get_float32_tokens_and_bfloat16_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    types = []

    def run(call: Any) -> tuple[Tensor, Tensor]:
        types.append((call[1].dtype, call[2].dtype))
        return blocks.run_block(call)

    monkeypatch.setattr(vit, "run_block", run)
    net, images = network(), torch.randn(2, 3, 16, 16)
    for wide in (False, True):
        net.float32_residual = wide
        with torch.autocast("cpu", torch.bfloat16):
            net(images)
    assert types == [(torch.bfloat16, torch.bfloat16)] * 6 + [(torch.float32, torch.bfloat16)] * 6


def test_without_autocast_it_changes_nothing() -> None:
    net, images, queries = network(), torch.randn(2, 3, 16, 16), torch.randn(2, 2, 3, 4, 4)
    before = outputs(net.double(), images.double(), queries.double())
    net.float32_residual = True
    assert torch.equal(outputs(net, images.double(), queries.double()), before)


@pytest.mark.parametrize("value", ["auto", "float32"])
def test_the_setting_reaches_both_branches_and_the_estimate_of_memory(value: str) -> None:
    tiny = {"dim": 32, "depth": 2, "num_heads": 2, "num_prototypes": 16, "head_hidden_dim": 16}
    settings = build(Settings, tiny | {"residual_precision": value})
    method = job.build(settings)
    wide = value == "float32"
    assert method.student.backbone.float32_residual == method.teacher.backbone.float32_residual == wide
    extra = 2 * plan_cost.RESIDUAL_BYTES if wide else 0
    assert plan_cost.stored_bytes(settings) == 2 * plan_cost.ACTIVATION_BYTES + extra
