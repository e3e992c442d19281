"""Hugging Face's folders, written by transformers itself, and ours, read by it: the same numbers on either side."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from adclr.config import UserError
from adclr.weights import load_weights

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 8,
}
WIDE = {"intermediate_size": 192}
MODELS: list[tuple[str, str, dict[str, Any], str]] = [  # model, its config, what else it is told, how it resamples
    ("ViTModel", "ViTConfig", WIDE, "plain"),
    ("ViTForImageClassification", "ViTConfig", WIDE, "plain"),
    (
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        WIDE | {"decoder_hidden_size": 16, "decoder_num_attention_heads": 2},
        "plain",
    ),
    ("Dinov2Model", "Dinov2Config", {"layerscale_value": 0.3}, "plain"),
    ("Dinov2ForImageClassification", "Dinov2Config", {}, "plain"),
    ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {"num_register_tokens": 2}, "antialias"),
    ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {"num_register_tokens": 0}, "antialias"),
]


def make(model: str, config: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    theirs = getattr(transformers, model)(getattr(transformers, config)(**SHAPE, **options)).eval()
    for parameter in theirs.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return theirs


@pytest.mark.parametrize(("model", "config", "options", "resampling"), MODELS)
@torch.no_grad()
def test_folders_compute_what_transformers_computes(
    model: str, config: str, options: dict[str, Any], resampling: str, tmp_path: Path
) -> None:
    theirs = make(model, config, options)
    theirs.save_pretrained(tmp_path)
    found = load_weights(tmp_path)
    assert found.report is not None
    assert (found.report.missing, found.vit.position_resampling) == ((), resampling)
    assert found.mean == ((0.5,) * 3 if model.startswith("ViTM") is False and "ViT" in model else (0.485, 0.456, 0.406))
    base = getattr(theirs, theirs.base_model_prefix, theirs)
    skip = 1 + options.get("num_register_tokens", 0)
    for size in ((32, 32), (48, 24)):
        images = torch.randn(2, 3, *size)
        if "MAE" in model:
            ordered = torch.arange(size[0] * size[1] // 64).expand(2, -1) / 1000
            base.config.mask_ratio = 0.0
            theirs_out = base(images, noise=ordered, interpolate_pos_encoding=True).last_hidden_state
        else:
            more = {"interpolate_pos_encoding": True} if model.startswith("ViT") else {}
            theirs_out = base(images, **more).last_hidden_state
        tokens = found.vit(images)
        torch.testing.assert_close(tokens.cls, theirs_out[:, 0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(tokens.patches, theirs_out[:, skip:], rtol=1e-4, atol=1e-4)
