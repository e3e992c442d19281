"""Reading weights of other programs: torch and safetensors files, folders of Hugging Face and timm, timm's cache."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from pydantic import BaseModel, ValidationError
from torch import Tensor

from adclr.config.parsing import UserError
from adclr.model.positions import ROTARY_BASE
from adclr.system.files import read_json
from adclr.system.optional import require
from adclr.weights.tensors import check_plain, kind_of, read_tensors, read_torch

# States within a torch file, in the order of preference: a moving average is what its authors evaluate.
BRANCHES = ("teacher", "model_ema", "state_dict_ema", "student", "model", "state_dict", "backbone", "encoder")
FOLDER_FILES = ("model.safetensors", "pytorch_model.bin")
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALVES = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}

# Hugging Face's model types: mean and deviation if the folder does not say, epsilon of the norms likewise.
HF_TYPES: dict[str, tuple[dict[str, Any], float]] = {
    "vit": (HALVES, 1e-12),
    "vit_mae": (IMAGENET, 1e-12),
    "vit_msn": (IMAGENET, 1e-6),
    "dinov2": (IMAGENET, 1e-6),
    "dinov2_with_registers": (IMAGENET, 1e-6),
    "dinov3_vit": (IMAGENET, 1e-5),
}


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of a file or folder, and their description."""

    source: str
    tensors: dict[str, Tensor]
    branch: str = ""  # which of several states in the file
    description: dict[str, Any] = field(default_factory=dict)  # fields of backbone.Description
    hints: tuple[str, ...] = ()  # words that may name their layout


def from_file(path: Path, branch: str = "") -> StoredWeights:
    """Read a file of tensors; a .json of the same name beside it may describe them, as backbone.json does."""
    if path.name in FOLDER_FILES and (path.parent / "config.json").exists():
        return from_folder(path.parent, path.name, branch)
    file = path.with_suffix(".json")
    description = read_json(file) if file.exists() else {}
    if not isinstance(description, dict):
        raise UserError(f"{file} is not a description of weights; fix it or move it away")
    return replace(_read(path, branch), description=description)


def _read(path: Path, branch: str = "") -> StoredWeights:
    kind, is_safetensors = kind_of(path), path.suffix == ".safetensors"  # by content, by name
    if kind == "safetensors" and not is_safetensors:
        raise UserError(
            f"{path} is a safetensors file by another name; call it {path.with_suffix('.safetensors').name}"
        )
    if kind == "torch" and is_safetensors:
        raise UserError(f"{path} is not a safetensors file but a torch file; call it {path.with_suffix('.pth').name}")
    if kind == "other" and not is_safetensors:
        raise UserError(f"{path} is neither a safetensors nor a torch file; give a run directory or a file of weights")
    content: Any = read_tensors(path) if is_safetensors else read_torch(path)
    keys = [] if is_safetensors or not isinstance(content, dict) else [key for key in content if isinstance(key, str)]
    state, branch = _select_state(content, branch, str(path))
    return StoredWeights(str(path), state, branch, hints=(path.stem, *(key for key in keys if "." not in key)))


def _select_state(content: Any, branch: str, path: str) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a branch, or without a name of the first there is, and the name of the branch."""
    name = ""
    for _ in range(4):  # a dictionary can hold itself
        if not isinstance(content, Mapping):
            break
        if branch and not isinstance(content.get(branch), Mapping):
            inside = {key: value for key, value in content.items() if str(key).startswith(f"{branch}.")}
            if not inside:
                names = ", ".join(sorted({str(key).split(".")[0] for key in content})[:8])
                raise UserError(f"{path} holds no {branch}; it holds {names}")
            content, name, branch = inside, branch, ""
            continue
        inner = branch or next((known for known in BRANCHES if isinstance(content.get(known), Mapping)), None)
        if inner is None:
            break
        content, name, branch = content[inner], inner, ""
    tensors = (
        {key: value for key, value in content.items() if isinstance(value, Tensor)}
        if isinstance(content, Mapping)
        else {}
    )
    if not tensors:
        raise UserError(f"{path} holds no tensors; give a file of weights")
    for key in tensors:
        if not isinstance(key, str) or not key.isprintable() or len(key) > 500:
            raise UserError(f"{path} holds a tensor whose name cannot be read; it is not a file of weights")
    return {key: check_plain(key, value, path) for key, value in tensors.items()}, name


class _Config(BaseModel):
    """The fields of a Hugging Face config.json that are read."""

    model_type: str
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    hidden_act: str = "gelu"
    layer_norm_eps: float | None = None
    image_size: int | tuple[int, int] | None = None
    patch_size: int | tuple[int, int] | None = None
    num_channels: int | None = None
    use_swiglu_ffn: bool = False
    use_gated_mlp: bool = False  # this and the next of DINOv3
    rope_theta: float | None = None


class _Preprocessor(BaseModel):
    """The fields of a Hugging Face preprocessor_config.json that are read."""

    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None


def from_folder(folder: Path, file: str | None = None, branch: str = "") -> StoredWeights:
    """Read a folder with a config.json of Hugging Face, or of timm if it names an architecture; its code is not run."""
    values = read_json(folder / "config.json")
    try:
        if isinstance(values, dict) and "model_type" not in values and isinstance(values.get("architecture"), str):
            stored = _read(_weights_file(folder, file), branch)
            return replace(stored, source=str(folder), description=_describe_timm(values))
        description = _describe_huggingface(folder, _Config.model_validate(values))
    except ValidationError:
        raise UserError(f"{folder}/config.json does not describe a ViT; restore it or give another folder") from None
    index = folder / "model.safetensors.index.json"
    if file is None and index.exists() and not (folder / "model.safetensors").exists():
        return StoredWeights(str(folder), _read_shards(folder, index), description=description)
    stored = _read(_weights_file(folder, file), branch)
    return replace(stored, source=str(folder), description=description, hints=())


def _weights_file(folder: Path, file: str | None) -> Path:
    for name in (file,) if file else FOLDER_FILES:
        if (folder / name).exists():
            return folder / name
    raise UserError(f"{folder} holds neither {' nor '.join(FOLDER_FILES)}; download its weights too")


def _describe_huggingface(folder: Path, config: _Config) -> dict[str, Any]:
    if config.model_type not in HF_TYPES:
        known = ", ".join(HF_TYPES)
        raise UserError(f"{folder} is of the model type {config.model_type!r}; these are taken: {known}")
    if config.rope_theta not in (None, ROTARY_BASE):
        raise UserError(
            f"{folder} has rotary positions with a base of {config.rope_theta:g}, not DINOv3's {ROTARY_BASE:g}; "
            "use other weights"
        )
    gated = config.model_type == "dinov3_vit" and config.use_gated_mlp
    if config.use_swiglu_ffn or config.hidden_act != ("silu" if gated else "gelu"):
        act = "SwiGLU" if config.use_swiglu_ffn else config.hidden_act
        raise UserError(f"{folder} has an MLP with {act}, which this ViT does not have; use other weights")
    normalization, eps = HF_TYPES[config.model_type]
    size, patch = config.image_size, config.patch_size
    if isinstance(patch, tuple) and patch[0] != patch[1]:
        raise UserError(f"{folder} has patches of {patch[0]}x{patch[1]} pixels, not square ones; use other weights")
    architecture: dict[str, Any] = {
        "dim": config.hidden_size,
        "depth": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "patch_size": patch[0] if isinstance(patch, tuple) else patch,
        "num_channels": config.num_channels,
        "input_size": (size, size) if isinstance(size, int) else size,
        "norm_eps": eps if config.layer_norm_eps is None else config.layer_norm_eps,
    }
    if config.model_type == "dinov3_vit":
        architecture |= {"position_embedding": "rotary", "mlp": "gated" if gated else "plain"}
    file = folder / "preprocessor_config.json"
    preprocessor = _Preprocessor.model_validate(read_json(file)) if file.exists() else _Preprocessor()
    return {
        "architecture": {name: value for name, value in architecture.items() if value is not None},
        "mean": preprocessor.image_mean or normalization["mean"],
        "std": preprocessor.image_std or normalization["std"],
    }


def _describe_timm(values: dict[str, Any]) -> dict[str, Any]:
    config, arguments = values.get("pretrained_cfg", values), values.get("model_args", {})
    if not isinstance(config, dict) or not isinstance(arguments, dict):
        return {}
    heads = {"num_heads": arguments["num_heads"]} if "num_heads" in arguments else {}
    return {"architecture": heads} | {name: config[name] for name in ("mean", "std") if name in config}


def _read_shards(folder: Path, index: Path) -> dict[str, Tensor]:
    values = read_json(index)
    files = values.get("weight_map") if isinstance(values, dict) else None
    names = set(files.values()) if isinstance(files, dict) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UserError(f"{index} does not list the files of the weights; restore it")
    tensors: dict[str, Tensor] = {}
    for name in sorted(names):
        tensors |= read_tensors(folder / name)
    return _select_state(tensors, "", str(folder))[0]


def from_timm(name: str) -> StoredWeights:
    """Read the pretrained weights of `timm:NAME` if they have been downloaded before; nothing is downloaded here."""
    timm = require("timm", "timm", f"timm:{name}")
    import torch
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models("vit_*"), n=1, cutoff=0.5)
        hint = f"did you mean timm:{near[0]}?" if near else "timm.list_models('vit*') lists them"
        raise UserError(f"timm has no model {name!r}; {hint}")
    try:
        config = timm.get_pretrained_cfg(name)
        with torch.device("meta"):  # no memory, no initial values
            model = timm.create_model(name, pretrained=False, num_classes=0)
    except RuntimeError as error:
        raise UserError(f"timm cannot make {name!r} ({str(error).rstrip('.')}); check the name") from None
    rotary = isinstance(model, Eva)
    if rotary and not _has_positions_of_dinov3(model):
        raise UserError(f"timm's {name} has other positions than DINOv3's rotary ones; choose another")
    if not rotary and not isinstance(model, VisionTransformer):
        raise UserError(f"timm's {name} is a {type(model).__name__}, not a ViT; choose one of its vit_* models")
    block: Any = model.blocks[0]
    activation, gated = getattr(block.mlp, "act", None), hasattr(block.mlp, "fc1_g")
    if (
        type(activation).__name__ != ("SiLU" if gated else "GELU")
        or getattr(activation, "approximate", "none") != "none"
    ):
        raise UserError(f"timm's {name} has an MLP without plain GELU, which this ViT does not have; choose another")
    file = _cached_file(config) if config else None
    if config is None or file is None:
        raise UserError(
            f"the weights of timm:{name} are not on this machine; download them once, with "
            f'python -c "import timm; timm.create_model({name!r}, pretrained=True)"'
        )
    heads, eps = block.attn.num_heads, getattr(block.norm1, "eps", 1e-6)
    architecture = {"num_heads": heads, "norm_eps": eps}
    if rotary:
        architecture |= {"position_embedding": "rotary", "mlp": "gated" if gated else "plain"}
        architecture["input_size"] = config.input_size[1:]
    description = {"architecture": architecture, "mean": config.mean, "std": config.std}
    return replace(_read(file), source=f"timm:{name}", description=description, hints=())


def _has_positions_of_dinov3(model: Any) -> bool:
    """Return whether one of timm's Eva models has rotary positions as DINOv3, and no learned ones."""
    rope = model.rope
    return (
        type(rope).__name__ == "RotaryEmbeddingDinoV3"
        and (rope.temperature, rope.min_period, rope.grid_offset) == (ROTARY_BASE, None, 0.0)
        and (rope.normalize_coords, rope.grid_indexing, rope.rotate_half) == ("separate", "ij", True)
        and model.pos_embed is None
    )


def _cached_file(config: Any) -> Path | None:
    """Return the file of timm's pretrained weights if they have been downloaded, from either of its two sources."""
    from huggingface_hub import try_to_load_from_cache
    from torch.hub import get_dir

    names = (config.hf_hub_filename,) if config.hf_hub_filename else FOLDER_FILES
    for name in names if config.hf_hub_id else ():
        repository, _, revision = config.hf_hub_id.partition("@")
        path = try_to_load_from_cache(repository, name, revision=revision or None)
        if isinstance(path, str):
            return Path(path)
    url = config.url[0] if isinstance(config.url, tuple) else config.url
    file = Path(get_dir()) / "checkpoints" / os.path.basename(urlparse(url or "").path)
    return file if file.is_file() and file.suffix in (".pth", ".pt", ".bin", ".safetensors") else None
