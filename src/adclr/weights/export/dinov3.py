"""Weights of a ViT with rotary positions as Hugging Face's DINOv3 has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adclr.model.positions import ROTARY_BASE
from adclr.model.vit import VisionTransformer


def rename(vit: VisionTransformer, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of a ViT under the names of Hugging Face's DINOv3; a LayerScale of 1 changes nothing."""
    renamed = {
        "embeddings.mask_token": torch.zeros(1, 1, vit.dim),
        "embeddings.register_tokens": torch.zeros(1, 0, vit.dim),
    }
    renamed |= {
        f"layer.{i}.layer_scale{number}.lambda1": torch.ones(vit.dim) for i in range(vit.depth) for number in (1, 2)
    }
    names = {
        "cls_token": "embeddings.cls_token",
        "reg_token": "embeddings.register_tokens",
        "patch_embed.proj.": "embeddings.patch_embeddings.",
        "blocks.": "layer.",
        "attn.proj.": "attention.o_proj.",
        "ls1.gamma": "layer_scale1.lambda1",
        "ls2.gamma": "layer_scale2.lambda1",
        "mlp.fc1.": "mlp.up_proj.",
        "mlp.fc1_g.": "mlp.gate_proj.",
        "mlp.fc1_x.": "mlp.up_proj.",
        "mlp.fc2.": "mlp.down_proj.",
    }
    for key, tensor in state.items():
        for ours, theirs in names.items():
            key = key.replace(ours, theirs)
        if ".attn.qkv." in key:
            for part, values in zip("qkv", tensor.chunk(3), strict=True):
                renamed[key.replace(".attn.qkv.", f".attention.{part}_proj.")] = values.clone()
        else:
            renamed[key] = tensor
    return {key: tensor for key, tensor in renamed.items() if not key.endswith("k_proj.bias")}


def describe(vit: VisionTransformer, values: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of Hugging Face's DINOv3; `values` are what it has in common with Dinov2's."""
    gated, others = vit.mlp == "gated", ("mlp_ratio", "qkv_bias", "use_swiglu_ffn")
    return {name: value for name, value in values.items() if name not in others} | {
        "architectures": ["DINOv3ViTModel"],
        "model_type": "dinov3_vit",
        "intermediate_size": 4 * vit.dim,
        "use_gated_mlp": gated,
        "hidden_act": "silu" if gated else "gelu",
        "rope_theta": ROTARY_BASE,
        "key_bias": False,
        "pos_embed_rescale": None,  # an augmentation of positions in training, which there is not here
    }
