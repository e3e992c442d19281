"""A tiny ViT under the names that others use, written out from their documentation, independent of `layouts`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from adclr.model.vit import VisionTransformer

State = dict[str, Tensor]
SIZE = 32  # pixels, of patches of 8


def backbone(**options: object) -> VisionTransformer:
    """Far from its initial values, where errors would hide; 64 wide, so that the width tells its one head."""
    torch.manual_seed(0)
    vit = VisionTransformer(64, 3, 1, 8, SIZE, **options).eval()  # type: ignore[arg-type]
    for parameter in vit.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return vit


def state_of(vit: VisionTransformer) -> State:
    return {name: tensor.clone() for name, tensor in vit.state_dict().items() if name != "mask_token"}


def prefixed(state: Mapping[str, Tensor], prefix: str) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def projection_head(prefix: str = "head.") -> State:
    names = ["mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "last_layer.weight_g", "last_layer.weight_v"]
    return {prefix + name: torch.randn(4) for name in names}


def sines(dim: int, side: int) -> Tensor:
    """MAE's positions: none for [CLS]; for a patch sines and cosines of its column, then of its row."""
    rows = [torch.zeros(dim)]
    for row in range(side):
        for column in range(side):
            waves = [place / 10000 ** (k / (dim // 4)) for place in (column, row) for k in range(dim // 4)]
            quarter = dim // 4
            numbers = [math.sin(w) for w in waves[:quarter]] + [math.cos(w) for w in waves[:quarter]]
            numbers += [math.sin(w) for w in waves[quarter:]] + [math.cos(w) for w in waves[quarter:]]
            rows.append(torch.tensor(numbers))
    return torch.stack(rows).unsqueeze(0)


def chunked(state: Mapping[str, Tensor], chunk: int = 2) -> State:
    """DINOv2's training state: blocks.CHUNK.BLOCK, blocks numbered through."""
    return {
        re.sub(r"^blocks\.(\d+)\.", lambda m: f"blocks.{int(m[1]) // chunk}.{m[1]}.", name): tensor
        for name, tensor in state.items()
    }


def dinov2(vit: VisionTransformer) -> State:
    """The published files: a mask token, LayerScale, and a position for [CLS] even if there are registers."""
    state = state_of(vit) | {"mask_token": torch.randn(1, vit.dim)}
    if vit.num_registers:
        state["register_tokens"] = state.pop("reg_token")
        position = torch.randn(1, 1, vit.dim)
        state["cls_token"] = state["cls_token"] - position
        state["pos_embed"] = torch.cat([position, state["pos_embed"]], dim=1)
    return state


def mae(vit: VisionTransformer) -> State:
    decoder = {"decoder_embed.weight": torch.randn(8, vit.dim), "decoder_pos_embed": torch.randn(1, 17, 8)}
    decoder |= {"mask_token": torch.randn(1, 1, 8), "decoder_blocks.0.norm1.weight": torch.randn(8)}
    return state_of(vit) | decoder | {"decoder_norm.bias": torch.randn(8), "decoder_pred.bias": torch.randn(8)}


def dinov3(timms: Mapping[str, Tensor], num_heads: int) -> State:
    """The published files, from timm's state: biases joined, those of keys masked, and the periods in bfloat16."""
    state: State = {}
    dim = timms["cls_token"].shape[-1]
    names = {"reg_token": "storage_tokens", "gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}
    names |= {"mlp.fc1_g.": "mlp.w1.", "mlp.fc1_x.": "mlp.w2."}
    gated = any("fc1_g" in name for name in timms)
    if gated:
        names["mlp.fc2."] = "mlp.w3."
    for name, tensor in timms.items():
        new = name
        for old, other in names.items():
            new = new.replace(old, other)
        if name.endswith("v_bias"):
            continue
        if name.endswith("q_bias"):
            new = name.replace("q_bias", "qkv.bias")
            tensor = torch.cat([tensor, torch.zeros(dim), timms[name.replace("q_bias", "v_bias")]])
            state[f"{new}_mask"] = torch.cat([torch.ones(dim), torch.zeros(dim), torch.ones(dim)])
        state[new] = tensor.clone()
    width = dim // num_heads
    spacing = [100 ** (2 * i / (width // 2)) for i in range(width // 4)]
    state["rope_embed.periods"] = torch.tensor(spacing).to(torch.bfloat16)
    return state | {"mask_token": torch.randn(1, dim)}
