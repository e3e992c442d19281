"""The names that other programs give the tensors of a ViT, and their conversion to ours, which are timm's.

Known: DINO, iBOT, DINOv2 (with and without registers), DINOv3, MAE, SelfPatch, timm, and Hugging Face's ViT, ViT-MAE,
ViT-MSN, Dinov2, Dinov2-with-registers and DINOv3-ViT. All but DINOv3 compute the same function; they differ in names,
in which tokens have a position, and in how positions are resampled when images are of another size. DINOv3 has rotary
positions, no bias of keys, and in some sizes a gated MLP. SelfPatch's has class attention.
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
from adclr.model.positions import PositionResampling, periods

# The one tensor that every layout has: the part of its name before this is the prefix of the backbone.
PLAIN_ANCHOR, HF_ANCHOR = "patch_embed.proj.weight", "embeddings.patch_embeddings.projection.weight"
HF_DINOV3_ANCHOR = "embeddings.patch_embeddings.weight"

# Heads, decoders and tokens of training: no part of the backbone. Any other name that is not known is a refusal.
EXTRA = re.compile(
    r"(head|heads|head_dist|dino_head|ibot_head|koleo_head|c_head|p_head|fc|fc_norm|pre_logits|classifier|pooler|attn_pool"
    r"|mask_token|masked_embed|embeddings\.mask_token|decoder\w*|local_cls_norm|projectors"
    r"|rope_embed|blocks\.[\d.]+\.attn\.qkv\.bias_mask)(\.|$)"
)
PERIODS, BIAS_MASK = "rope_embed.periods", ".attn.qkv.bias_mask"  # of DINOv3's own files

PLAIN_NAMES = (
    (r"blocks\.\d+\.(\d+)\.", r"blocks.\1."),  # DINOv2 trains with its blocks in chunks, numbered through
    (r"(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma"),  # iBOT, DeiT III
    (r"(?:register|storage)_tokens$", "reg_token"),
    (r"\.mlp\.w1\.", ".mlp.fc1_g."),
    (r"\.mlp\.w2\.", ".mlp.fc1_x."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
    (r"\.attn\.([qv])_bias$", r".attn.\1.bias"),  # timm's DINOv3
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
HF_DINOV3_NAMES = (
    (r"embeddings\.cls_token$", "cls_token"),
    (r"embeddings\.register_tokens$", "reg_token"),
    (r"embeddings\.patch_embeddings\.", "patch_embed.proj."),
    (r"(?:model\.)?layer\.(\d+)\.", r"blocks.\1."),
    (r"\.attention\.([qkv])_proj\.", r".attn.\1."),
    (r"\.attention\.o_proj\.", ".attn.proj."),
    (r"\.mlp\.gate_proj\.", ".mlp.fc1_g."),
    (r"\.mlp\.up_proj\.", ".mlp.fc1."),  # `_rename_gated` distinguishes the gated MLP
    (r"\.mlp\.down_proj\.", ".mlp.fc2."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
)
NAMES = {PLAIN_ANCHOR: PLAIN_NAMES, HF_ANCHOR: HF_NAMES, HF_DINOV3_ANCHOR: HF_DINOV3_NAMES}
OTHER_SWIGLU = re.compile(r"\.mlp\.(w12|weights_in|weights_out)\.")  # DINOv2's, whose width is another


@dataclass(frozen=True)
class Layout:
    """A naming of tensors, and how positions are resampled by the program that uses it."""

    name: str
    resampling: PositionResampling
    rotary: bool = False  # DINOv3's positions, which are no tensors


@dataclass(frozen=True)
class NamedTensors:
    """Tensors under our names."""

    state: dict[str, Tensor]
    layout: Layout
    origin: dict[str, tuple[str, ...]] = field(default_factory=dict)  # our name -> their names
    left: tuple[str, ...] = ()  # their names of tensors that are no part of a backbone
    unknown: tuple[str, ...] = ()  # their names of tensors that may be


def rename_tensors(
    tensors: Mapping[str, Tensor], path: str, hints: Iterable[str] = (), ours: bool = False
) -> NamedTensors:
    """Return the backbone in tensors of any known layout, under our names; `hints` may name the layout.

    `ours`: this program wrote them.
    """
    prefix, anchor = _find_prefix(tensors, path)
    inside = {key.removeprefix(prefix): key for key in tensors if key.startswith(prefix)}
    swiglu = next((key for key in inside if OTHER_SWIGLU.search(key)), None)
    if swiglu:
        raise UserError(
            f"{path} has a SwiGLU ({inside[swiglu]}), which is of another shape than DINOv3's; "
            "use weights with a plain MLP"
        )
    names = NAMES[anchor]
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
        key = _rename(inner.removeprefix(CLASS_HEAD), CLASS_HEAD_NAMES if of_class_head else names)
        if key in state:
            raise UserError(f"{path} has {key} twice, as {origin[key][0]} and as {full}; it is not the state of a ViT")
        state[key], origin[key] = tensors[full], (full,)
    if any(inner.startswith(CLASS_HEAD) for inner in inside):
        _add_layer_scale(state, origin)
    if anchor == HF_DINOV3_ANCHOR and any(".mlp.fc1_g." in key for key in state):
        for mapping in (state, origin):
            _rename_gated(mapping)
    layout = _layout(anchor, set(inside), state, hints)
    if layout.rotary:
        _check_periods(tensors, inside, path)
        _fill_biases(state, origin, path, ours or any(key.endswith(BIAS_MASK) for key in inside))
    _join_qkv(state, origin)
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
        raise UserError(f"{path} holds numbers that are not finite in {key}; these weights cannot be used")
    if key.endswith(("reg_token", "register_tokens", "storage_tokens", "cls_token")) and (
        values.dim() != 3 or values.shape[0] != 1
    ):
        raise UserError(f"{path} has {key} of shape {tuple(values.shape)}, not 1 x tokens x width; restore it")
    return values


def _rename(inner: str, names: Iterable[tuple[str, str]]) -> str:
    for pattern, ours in names:
        # a pattern that begins with a dot is for a part of the name, the others for its beginning
        inner = re.sub(pattern if pattern.startswith(r"\.") else "^" + pattern, ours, inner)
    return inner


def _is_ours(key: str) -> bool:
    inner = r"norm[12]\.(weight|bias)|attn\.(qkv|proj)\.(weight|bias)|mlp\.fc(1|2|1_g|1_x)\.(weight|bias)|ls[12]\.gamma"
    class_attention = r"norm[12]\.(weight|bias)|attn\.[qkv]\.(weight|bias)|attn\.proj\.(weight|bias)"
    class_attention += r"|mlp\.fc[12]\.(weight|bias)|gamma_[12]"
    outer = r"cls_token|reg_token|pos_embed|patch_embed\.proj\.(weight|bias)|norm\.(weight|bias)"
    return re.fullmatch(rf"{outer}|blocks\.\d+\.({inner})|blocks_token_only\.\d+\.({class_attention})", key) is not None


def _find_prefix(tensors: Mapping[str, Tensor], path: str) -> tuple[str, str]:
    """Return the prefix of every name of the backbone, and the anchor that it precedes."""
    candidates = [
        (key[: -len(anchor)], anchor)
        for key in tensors
        for anchor in NAMES
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


def _rename_gated(named: dict[str, Any]) -> None:
    """Rename the second layer of gated MLPs, which Hugging Face calls as the first of plain ones."""
    for key in [key for key in named if re.search(r"\.mlp\.fc1\.", key)]:
        named[key.replace(".mlp.fc1.", ".mlp.fc1_x.")] = named.pop(key)


def _check_periods(tensors: Mapping[str, Tensor], inside: Mapping[str, str], path: str) -> None:
    """Refuse rotary positions that are not DINOv3's; their file rounds the periods to bfloat16."""
    stored = tensors[inside[PERIODS]] if PERIODS in inside else None
    if stored is None:
        return
    expected = periods(4 * stored.numel()) if stored.dim() == 1 else None
    if expected is None or not torch.allclose(stored.double(), expected, rtol=1e-2):
        raise UserError(
            f"{path} has other rotary positions than DINOv3 ({inside[PERIODS]}); use weights with a base of 100"
        )


def _fill_biases(
    state: dict[str, Tensor], origin: dict[str, tuple[str, ...]], path: str, ignores_key_bias: bool
) -> None:
    """Write 0 for the biases of queries, keys and values that DINOv3 does not have; refuse a bias of keys.

    A bias that only some blocks have is not filled, so that the weights are refused.
    """
    weights = [key for key in state if re.search(r"\.attn\.(qkv|q)\.weight$", key) and state[key].dim() == 2]
    starts = {re.sub(r"(qkv|q)\.weight$", "", key): state[key].shape[1] for key in weights}
    for part in "qkv":
        if not any(f"{start}{name}.bias" in state for start in starts for name in (part, "qkv")):
            for start, width in starts.items():
                state[f"{start}{part}.bias"], origin[f"{start}{part}.bias"] = torch.zeros(width), ()
    for start, width in starts.items():
        names = [f"{start}{part}.bias" for part in "qkv"]
        if all(name in state and state[name].shape == (width,) for name in names):
            origin[f"{start}qkv.bias"] = tuple(full for name in names for full in origin.pop(name))
            state[f"{start}qkv.bias"] = torch.cat([state.pop(name).float() for name in names])
        bias = state.get(f"{start}qkv.bias")
        if bias is None or bias.shape != (3 * width,):
            continue
        if ignores_key_bias:
            state[f"{start}qkv.bias"] = torch.cat([bias[:width], torch.zeros(width), bias[2 * width :]])
        elif bias[width : 2 * width].any():
            raise UserError(
                f"{path} has biases of attention keys ({start}), which ViTs with rotary positions do not have here; "
                "use other weights"
            )


def _layout(anchor: str, names: set[str], state: Mapping[str, Tensor], hints: Iterable[str]) -> Layout:
    """Return the layout by tensors that only one has, else by hints: bare backbones of DINO and iBOT have no such."""
    scaled = "blocks.0.ls1.gamma" in state
    words = " ".join(hints).lower()
    if anchor == HF_DINOV3_ANCHOR:
        return Layout("Hugging Face DINOv3", "antialias", rotary=True)
    if "storage_tokens" in names or PERIODS in names:
        return Layout("DINOv3", "antialias", rotary=True)
    # timm's; its other ViTs with rotary positions have no registers, or no final norm, or learned positions too
    if anchor == PLAIN_ANCHOR and "pos_embed" not in names and {"reg_token", "norm.weight"} <= names:
        return Layout("timm DINOv3", "antialias", rotary=True)
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
        "position_embedding": "rotary" if named.layout.rotary else "learned",
        "mlp": "gated" if any(".mlp.fc1_g." in key for key in state) else "plain",
    }
    if named.layout.rotary:
        arguments["norm_eps"] = 1e-5
    if "num_heads" not in known:
        # 64 channels each but for a ViT-H that is not DINOv3's
        arguments["num_heads"] = 16 if dim == 1280 and not named.layout.rotary else max(1, dim // 64)
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
    expected = f"the {grid[0]}x{grid[1]} patches of its input_size" if grid else "a square image"
    raise UserError(
        f"{path} has {total} positions, which are not those of {expected}; "
        "write its input_size into a .json of the same name beside it, or use another"
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
