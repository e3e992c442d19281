"""The names that other programs give the tensors of a ViT, and their conversion to ours, which are timm's.

Known: DINO, iBOT, DINOv2 (with and without registers), MAE, SelfPatch, timm, and Hugging Face's ViT, ViT-MAE, ViT-MSN,
Dinov2 and Dinov2-with-registers. All compute the same function; they differ in names, in which tokens have a position,
and in how positions are resampled when images are of another size. SelfPatch's has class attention.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from adclr.config.parsing import UserError
from adclr.model.positions import PositionResampling

# The one tensor that every layout has: the part of its name before this is the prefix of the backbone.
PLAIN_ANCHOR, HF_ANCHOR = "patch_embed.proj.weight", "embeddings.patch_embeddings.projection.weight"

# Heads, decoders and tokens of training: no part of the backbone. Any other name that is not known is a refusal.
EXTRA = re.compile(
    r"(head|heads|head_dist|dino_head|ibot_head|koleo_head|c_head|p_head|fc|fc_norm|pre_logits|classifier|pooler|attn_pool"
    r"|mask_token|masked_embed|embeddings\.mask_token|decoder\w*)(\.|$)"
)

PLAIN_NAMES = (
    (r"blocks\.\d+\.(\d+)\.", r"blocks.\1."),  # DINOv2 trains with its blocks in chunks, numbered through
    (r"(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma"),  # iBOT, DeiT III
    (r"register_tokens$", "reg_token"),
)
HF_NAMES = (
    (r"embeddings\.cls_token$", "cls_token"),
    (r"embeddings\.position_embeddings$", "pos_embed"),
    (r"embeddings\.register_tokens$", "reg_token"),
    (r"embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"(?:encoder\.layer|layers)\.(\d+)\.", r"blocks.\1."),
    (r"\.attention\.(?:attention\.query|q_proj)\.", ".attn.q."),
    (r"\.attention\.(?:attention\.key|k_proj)\.", ".attn.k."),
    (r"\.attention\.(?:attention\.value|v_proj)\.", ".attn.v."),
    (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.(?:norm1|layernorm_before)\.", ".norm1."),
    (r"\.(?:norm2|layernorm_after)\.", ".norm2."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"layernorm\.", "norm."),
)
# SelfPatch's: class attention is a module beside the backbone, with the norm of all tokens
CLASS_HEAD = "ca_head."
CLASS_HEAD_NAMES = ((r"cls_blocks\.", "blocks_token_only."),)
SWIGLU = re.compile(r"\.mlp\.(w12|w3|weights_in|weights_out|gate_proj)\.")


@dataclass(frozen=True)
class Layout:
    """A naming of tensors, and how positions are resampled by the program that uses it."""

    name: str
    resampling: PositionResampling


@dataclass(frozen=True)
class NamedTensors:
    """Tensors under our names."""

    state: dict[str, Tensor]
    layout: Layout
    origin: dict[str, tuple[str, ...]] = field(default_factory=dict)  # our name -> their names
    left: tuple[str, ...] = ()  # their names of tensors that are no part of a backbone
    unknown: tuple[str, ...] = ()  # their names of tensors that may be


def rename_tensors(tensors: Mapping[str, Tensor], path: str, hints: Iterable[str] = ()) -> NamedTensors:
    """Return the backbone in tensors of any known layout, under our names; `hints` may name the layout."""
    prefix, anchor = _find_prefix(tensors, path)
    inside = {key.removeprefix(prefix): key for key in tensors if key.startswith(prefix)}
    swiglu = next((key for key in inside if SWIGLU.search(key)), None)
    if swiglu:
        raise UserError(f"{path} has a SwiGLU ({inside[swiglu]}), which this ViT has not; use weights with a plain MLP")
    names = PLAIN_NAMES if anchor == PLAIN_ANCHOR else HF_NAMES
    class_head = prefix.removesuffix("backbone.") + CLASS_HEAD
    state: dict[str, Tensor] = {}
    origin: dict[str, tuple[str, ...]] = {}
    left = [key for key in tensors if not key.startswith((prefix, class_head))]
    inside |= {CLASS_HEAD + key.removeprefix(class_head): key for key in tensors if key.startswith(class_head)}
    for inner, full in inside.items():
        if EXTRA.match(inner):
            left.append(full)
            continue
        of_class_head = inner.startswith(CLASS_HEAD)
        ours = _rename(inner.removeprefix(CLASS_HEAD), CLASS_HEAD_NAMES if of_class_head else names)
        if ours in state:
            raise UserError(f"{path} has {ours} twice, as {origin[ours][0]} and as {full}; it is no state of a ViT")
        state[ours], origin[ours] = tensors[full], (full,)
    if any(inner.startswith(CLASS_HEAD) for inner in inside):
        _add_layer_scale(state, origin)
    _join_qkv(state, origin)
    layout = _layout(anchor, set(inside), state, hints)
    if "reg_token" in state and state["reg_token"].shape[:2] == (1, 0):  # a layout with registers, a ViT without
        del state["reg_token"]
        left += origin.pop("reg_token")
    unknown = [key for key in state if not _is_ours(key)]
    return NamedTensors(
        {key: _check_numbers((*origin[key], key)[0], state[key], path) for key in state if key not in unknown},
        layout,
        {key: full for key, full in origin.items() if key not in unknown},
        tuple(left),
        tuple(full for key in unknown for full in origin[key]),
    )


def _check_numbers(key: str, tensor: Tensor, path: str) -> Tensor:
    """Return a tensor in float32; refuse numbers that are not finite, and tokens of another shape."""
    values = tensor.float() if tensor.is_floating_point() else None
    if values is None or not values.isfinite().all():
        raise UserError(f"{path} holds numbers that are not finite in {key}; these weights are of no use")
    if key.endswith(("reg_token", "register_tokens", "cls_token")) and (values.dim() != 3 or values.shape[0] != 1):
        raise UserError(f"{path} has {key} of shape {tuple(values.shape)}, not 1 x tokens x width; restore it")
    return values


def _rename(inner: str, names: Iterable[tuple[str, str]]) -> str:
    for pattern, ours in names:
        # a pattern that begins with a dot is for a part of the name, the others for its beginning
        inner = re.sub(pattern if pattern.startswith(r"\.") else "^" + pattern, ours, inner)
    return inner


def _is_ours(key: str) -> bool:
    inner = r"norm[12]\.(weight|bias)|attn\.(qkv|proj)\.(weight|bias)|mlp\.fc[12]\.(weight|bias)|ls[12]\.gamma"
    class_attention = r"norm[12]\.(weight|bias)|attn\.[qkv]\.(weight|bias)|attn\.proj\.(weight|bias)"
    class_attention += r"|mlp\.fc[12]\.(weight|bias)|gamma_[12]"
    outer = r"cls_token|reg_token|pos_embed|patch_embed\.proj\.(weight|bias)|norm\.(weight|bias)"
    return re.fullmatch(rf"{outer}|blocks\.\d+\.({inner})|blocks_token_only\.\d+\.({class_attention})", key) is not None


def _find_prefix(tensors: Mapping[str, Tensor], path: str) -> tuple[str, str]:
    """Return the prefix of every name of the backbone, and the anchor that it precedes."""
    candidates = [
        (key[: -len(anchor)], anchor)
        for key in tensors
        for anchor in (PLAIN_ANCHOR, HF_ANCHOR)
        if key == anchor or key.endswith("." + anchor)
    ]
    # of a model that holds student and teacher
    teachers = [(prefix, anchor) for prefix, anchor in candidates if "teacher" in prefix]
    chosen = teachers if len(candidates) > 1 else candidates
    if len(chosen) != 1:
        count = f"several {PLAIN_ANCHOR}" if candidates else f"no {PLAIN_ANCHOR}"
        raise UserError(f"{path} holds {count}, so it is not the state of one ViT; docs/weights.md lists what is taken")
    return chosen[0]


def _join_qkv(state: dict[str, Tensor], origin: dict[str, tuple[str, ...]]) -> None:
    """Join queries, keys and values, which Hugging Face stores separately."""
    for first in [key for key in state if re.search(r"^blocks\..*\.attn\.q\.(weight|bias)$", key)]:
        parts = [first.replace(".attn.q.", f".attn.{part}.") for part in "qkv"]
        shapes = {state[part].shape for part in parts if part in state}
        if all(part in state for part in parts) and len(shapes) == 1 and () not in shapes:
            joined = first.replace(".attn.q.", ".attn.qkv.")
            origin[joined] = tuple(full for part in parts for full in origin.pop(part))
            state[joined] = torch.cat([state.pop(part) for part in parts])


def _add_layer_scale(state: dict[str, Tensor], origin: dict[str, tuple[str, ...]]) -> None:
    """Add factors of 1 to class-attention blocks, which have none in SelfPatch's program."""
    for key in [key for key in state if re.search(r"^blocks_token_only\.\d+\.norm[12]\.bias$", key)]:
        gamma = re.sub(r"norm([12])\.bias$", r"gamma_\1", key)
        if gamma not in state:
            state[gamma], origin[gamma] = torch.ones(state[key].shape), ()


def _layout(anchor: str, names: set[str], state: Mapping[str, Tensor], hints: Iterable[str]) -> Layout:
    """Return the layout by tensors that only one has, else by hints: bare backbones of DINO and iBOT have no such."""
    scaled = "blocks.0.ls1.gamma" in state
    words = " ".join(hints).lower()
    if anchor == HF_ANCHOR:
        if "embeddings.register_tokens" in names:
            return Layout("Hugging Face Dinov2 with registers", "antialias")
        return Layout("Hugging Face Dinov2" if scaled else "Hugging Face ViT", "plain")
    if any(name.startswith(CLASS_HEAD) for name in names) or "selfpatch" in words:
        return Layout("SelfPatch", "offset")
    if "register_tokens" in names:
        return Layout("DINOv2 with registers", "antialias")
    if "mask_token" in names and scaled:
        return Layout("DINOv2", "offset")
    if any(key.startswith("decoder_") for key in names) or _sine_positions(state.get("pos_embed")):
        return Layout("MAE", "plain")
    if "masked_embed" in names or "ibot" in words:
        return Layout("iBOT", "offset")
    if ("dino" in words or "teacher" in words) and "reg_token" not in names:
        return Layout("DINO", "offset")
    return Layout("timm", "antialias")


def _sine_positions(positions: Tensor | None) -> bool:
    """Return whether positions are MAE's fixed ones: 0 for [CLS], and sines and cosines of 0 for the first patch."""
    if positions is None or positions.dim() != 3 or positions.shape[1] < 2 or positions.shape[2] % 4:
        return False
    zeros_ones = torch.tensor([0.0, 1.0, 0.0, 1.0]).repeat_interleave(positions.shape[2] // 4)
    first_two = torch.stack([torch.zeros_like(zeros_ones), zeros_ones])
    return torch.allclose(positions[0, :2].float(), first_two, atol=1e-4)


def infer_architecture(named: NamedTensors, known: set[str], path: str) -> dict[str, Any]:
    """Return the arguments of `VisionTransformer` that these tensors determine; `known` ones need no guess."""
    state = named.state
    kernel = state[PLAIN_ANCHOR]
    if kernel.dim() != 4 or kernel.shape[2] != kernel.shape[3]:
        raise UserError(f"{path} has {PLAIN_ANCHOR} of shape {tuple(kernel.shape)}, not that of square patches")
    dim, patch_size = kernel.shape[0], kernel.shape[2]
    blocks = {key.split(".")[1] for key in state if key.startswith("blocks.")}
    arguments: dict[str, Any] = {
        "dim": dim,
        "depth": len(blocks) or 1,
        "patch_size": patch_size,
        "num_channels": kernel.shape[1],
        "num_registers": state["reg_token"].shape[1] if "reg_token" in state else 0,
        "layer_scale": 1.0 if any(key.endswith(".ls1.gamma") for key in state) else None,
        "position_resampling": named.layout.resampling,
        "class_attention": _count_class_attention(state),
    }
    if "num_heads" not in known:
        # 64 channels each but for ViT-H
        arguments["num_heads"] = 16 if dim == 1280 else max(1, dim // 64)
        if dim % 64:
            raise UserError(
                f"the number of heads of {path} cannot be told from its width {dim}; "
                'write {"architecture": {"num_heads": H}} into a .json of the same name beside it'
            )
    if "input_size" not in known:
        side = math.isqrt(_count_positions(named, path, None)[1]) if "pos_embed" in state else 14
        arguments["input_size"] = (side * patch_size, side * patch_size)
    return arguments


def _count_positions(named: NamedTensors, path: str, grid: tuple[int, int] | None) -> tuple[int, int]:
    """Return how many positions are of prefix tokens, and how many of patches."""
    positions = named.state["pos_embed"]
    if positions.dim() != 3 or positions.shape[0] != 1:
        raise UserError(
            f"{path} has pos_embed of shape {tuple(positions.shape)}, not 1 x positions x width; restore it"
        )
    total = positions.shape[1]
    registers = named.state["reg_token"].shape[1] if "reg_token" in named.state else 0
    has_prefix = not _count_class_attention(named.state)
    # timm's have none for the prefix tokens, or one for each; those that DINOv2 trained have one, for [CLS]
    candidates = (0, 1 + registers, 1) if registers and "timm" in named.layout.name else (1, 0) if has_prefix else (0,)
    for num_prefix in dict.fromkeys(candidates):
        patches = total - num_prefix
        if patches > 0 and (patches == grid[0] * grid[1] if grid else math.isqrt(patches) ** 2 == patches):
            return num_prefix, patches
    expected = f"the {grid[0]}x{grid[1]} patches it is said to have" if grid else "a square image"
    raise UserError(
        f"{path} has {total} positions, which are not those of {expected}; "
        "say its input_size in a .json of the same name beside it, or use another"
    )


def convert_positions(named: NamedTensors, grid: tuple[int, int], path: str) -> NamedTensors:
    """Return positions as in our ViT: one for [CLS] and each patch, or with registers for patches alone.

    A position is added to its token: where our ViT has none it is added into the token, and where theirs has none it is
    0, so that the sums are the same.
    """
    state = dict(named.state)
    if "pos_embed" not in state or "cls_token" not in state or _count_class_attention(state):
        return named
    num_prefix, _ = _count_positions(named, path, grid)
    prefix, patches = state["pos_embed"][:, :num_prefix], state["pos_embed"][:, num_prefix:]
    if "reg_token" in state:
        state["pos_embed"] = patches
        if num_prefix:
            state["cls_token"] = state["cls_token"] + prefix[:, :1]
        if num_prefix > 1:
            state["reg_token"] = state["reg_token"] + prefix[:, 1:]
    elif not num_prefix:
        state["pos_embed"] = torch.cat([torch.zeros_like(patches[:, :1]), patches], dim=1)
    return replace(named, state=state)


def _count_class_attention(state: Mapping[str, Tensor]) -> int:
    """Return the number of class-attention blocks, which SelfPatch's trunk alone, stored for detection, lacks."""
    numbers = {key.split(".")[1] for key in state if key.startswith("blocks_token_only.")}
    positions = state.get("pos_embed")
    if numbers or "cls_token" in state or positions is None or positions.dim() != 3:
        return len(numbers)
    return 2 if math.isqrt(positions.shape[1]) ** 2 == positions.shape[1] else 0
