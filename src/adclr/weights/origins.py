"""Where weights of others are found: torch and safetensors files, folders of Hugging Face and of timm, timm's cache."""

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

from adclr.config.sections import UserError
from adclr.system.files import read_json
from adclr.system.optional import require
from adclr.weights.tensors import kind_of, plain, read_tensors, read_torch

# States within a torch file, in the order of preference: a moving average is what its makers evaluate.
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
}


@dataclass(frozen=True)
class Given:
    """Tensors as they were found, and what was said of them."""

    source: str
    tensors: dict[str, Tensor]
    branch: str = ""  # which of several states it is
    said: dict[str, Any] = field(default_factory=dict)  # of weights.Description
    hints: tuple[str, ...] = ()  # words that tell whose they are


def from_file(path: Path, branch: str = "") -> Given:
    """A file of tensors; a .json of the same name beside it may say what they are, as backbone.json does."""
    beside = path.parent / "config.json"
    if path.name in FOLDER_FILES and beside.exists():
        return from_folder(path.parent, path.name, branch)
    described = path.with_suffix(".json")
    said = read_json(described) if described.exists() else {}
    if not isinstance(said, dict):
        raise UserError(f"{described} is not a description of weights; mend it or move it away")
    return replace(_read(path, branch), said=said)


def _read(path: Path, branch: str = "") -> Given:
    kind, named_so = kind_of(path), path.suffix == ".safetensors"
    if kind == "safetensors" and not named_so:
        raise UserError(
            f"{path} is a safetensors file by another name; call it {path.with_suffix('.safetensors').name}"
        )
    if kind == "torch" and named_so:
        raise UserError(f"{path} is not a safetensors file but a torch file; call it {path.with_suffix('.pth').name}")
    if kind == "other" and not named_so:
        raise UserError(f"{path} is neither a safetensors nor a torch file; give a run directory or a file of weights")
    content: Any = read_tensors(path) if named_so else read_torch(path)
    words = tuple(key for key in content if isinstance(key, str)) if isinstance(content, dict) and not named_so else ()
    state, found = _state(content, branch, str(path))
    return Given(str(path), state, found, hints=(path.stem, *(word for word in words if "." not in word)))


def _state(content: Any, branch: str, path: str) -> tuple[dict[str, Tensor], str]:
    """The tensors of the branch that is asked for, or of the first there is, and its name."""
    found = ""
    for _ in range(4):  # a dictionary can hold itself
        if not isinstance(content, Mapping):
            break
        if branch and not isinstance(content.get(branch), Mapping):
            inside = {key: value for key, value in content.items() if str(key).startswith(f"{branch}.")}
            if not inside:
                names = ", ".join(sorted({str(key).split(".")[0] for key in content})[:8])
                raise UserError(f"{path} holds no {branch}; it holds {names}")
            content, found, branch = inside, branch, ""
            continue
        inner = branch or next((name for name in BRANCHES if isinstance(content.get(name), Mapping)), None)
        if inner is None:
            break
        content, found, branch = content[inner], inner, ""
    tensors = (
        {key: value for key, value in content.items() if isinstance(value, Tensor)}
        if isinstance(content, Mapping)
        else {}
    )
    if not tensors:
        raise UserError(f"{path} holds no tensors; give a file of weights")
    for key in tensors:
        if not isinstance(key, str) or not key.isprintable() or len(key) > 500:
            raise UserError(f"{path} holds a tensor whose name cannot be read; it is no file of weights")
    return {key: plain(key, value, path) for key, value in tensors.items()}, found


class _Config(BaseModel):
    """What counts of a Hugging Face config.json."""

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


class _Preprocessor(BaseModel):
    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None


def from_folder(folder: Path, file: str | None = None, branch: str = "") -> Given:
    """A folder with a config.json: Hugging Face's, or timm's if it names an architecture. Its code is never run."""
    values = read_json(folder / "config.json")
    try:
        if isinstance(values, dict) and "model_type" not in values and isinstance(values.get("architecture"), str):
            return replace(_read(_only_file(folder, file), branch), source=str(folder), said=_said_by_timm(values))
        said = _said_by_hf(folder, _Config.model_validate(values))
    except ValidationError:
        raise UserError(f"{folder}/config.json does not describe a ViT; restore it or give another folder") from None
    index = folder / "model.safetensors.index.json"
    if file is None and index.exists() and not (folder / "model.safetensors").exists():
        return Given(str(folder), _sharded(folder, index), said=said)
    return replace(_read(_only_file(folder, file), branch), source=str(folder), said=said, hints=())


def _only_file(folder: Path, file: str | None) -> Path:
    for name in (file,) if file else FOLDER_FILES:
        if (folder / name).exists():
            return folder / name
    raise UserError(f"{folder} holds neither {' nor '.join(FOLDER_FILES)}; download its weights too")


def _said_by_hf(folder: Path, config: _Config) -> dict[str, Any]:
    if config.model_type not in HF_TYPES:
        known = ", ".join(HF_TYPES)
        raise UserError(f"{folder} is of the model type {config.model_type!r}; these are taken: {known}")
    if config.use_swiglu_ffn or config.hidden_act != "gelu":
        act = "SwiGLU" if config.use_swiglu_ffn else config.hidden_act
        raise UserError(f"{folder} has an MLP with {act}, which this ViT has not; use weights with plain GELU")
    normalisation, eps = HF_TYPES[config.model_type]
    size, patch = config.image_size, config.patch_size
    if isinstance(patch, tuple) and patch[0] != patch[1]:
        raise UserError(f"{folder} has patches of {patch[0]}x{patch[1]} pixels, not square ones; use other weights")
    told: dict[str, Any] = {
        "dim": config.hidden_size,
        "depth": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "patch_size": patch[0] if isinstance(patch, tuple) else patch,
        "num_channels": config.num_channels,
        "input_size": (size, size) if isinstance(size, int) else size,
        "norm_eps": eps if config.layer_norm_eps is None else config.layer_norm_eps,
    }
    file = folder / "preprocessor_config.json"
    shown = _Preprocessor.model_validate(read_json(file)) if file.exists() else _Preprocessor()
    return {
        "architecture": {name: value for name, value in told.items() if value is not None},
        "mean": shown.image_mean or normalisation["mean"],
        "std": shown.image_std or normalisation["std"],
    }


def _said_by_timm(values: dict[str, Any]) -> dict[str, Any]:
    shown, made = values.get("pretrained_cfg", values), values.get("model_args", {})
    if not isinstance(shown, dict) or not isinstance(made, dict):
        return {}
    heads = {"num_heads": made["num_heads"]} if "num_heads" in made else {}
    return {"architecture": heads} | {name: shown[name] for name in ("mean", "std") if name in shown}


def _sharded(folder: Path, index: Path) -> dict[str, Tensor]:
    values = read_json(index)
    files = values.get("weight_map") if isinstance(values, dict) else None
    names = set(files.values()) if isinstance(files, dict) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UserError(f"{index} does not list the files of the weights; restore it")
    tensors: dict[str, Tensor] = {}
    for name in sorted(names):
        tensors |= read_tensors(folder / name)
    return _state(tensors, "", str(folder))[0]


def from_timm(name: str) -> Given:
    """`timm:NAME`: its pretrained weights if they have been downloaded before; nothing is downloaded here."""
    timm = require("timm", "timm", f"timm:{name}")
    import torch
    from timm.models.vision_transformer import VisionTransformer

    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models("vit_*"), n=1, cutoff=0.5)
        hint = f"did you mean timm:{near[0]}?" if near else "timm.list_models('vit*') lists them"
        raise UserError(f"timm has no model {name!r}; {hint}")
    try:
        shown = timm.get_pretrained_cfg(name)
        with torch.device("meta"):  # no memory, no initial values
            model = timm.create_model(name, pretrained=False, num_classes=0)
    except RuntimeError as error:
        raise UserError(f"timm cannot make {name!r} ({str(error).rstrip('.')}); check the name") from None
    if not isinstance(model, VisionTransformer):
        raise UserError(f"timm's {name} is a {type(model).__name__}, not a ViT; choose one of its vit_* models")
    block: Any = model.blocks[0]
    gelu = getattr(block.mlp, "act", None)
    if type(gelu).__name__ != "GELU" or getattr(gelu, "approximate", "none") != "none":
        raise UserError(f"timm's {name} has an MLP without plain GELU, which this ViT has not; choose another")
    file = _cached(shown) if shown else None
    if shown is None or file is None:
        raise UserError(
            f"the weights of timm:{name} are not on this machine; download them once, with "
            f'python -c "import timm; timm.create_model({name!r}, pretrained=True)"'
        )
    heads, eps = block.attn.num_heads, getattr(block.norm1, "eps", 1e-6)
    said = {"architecture": {"num_heads": heads, "norm_eps": eps}, "mean": shown.mean, "std": shown.std}
    return replace(_read(file), source=f"timm:{name}", said=said, hints=())


def _cached(shown: Any) -> Path | None:
    """Where timm's pretrained weights lie once they have been downloaded, from either of its two sources."""
    from huggingface_hub import try_to_load_from_cache
    from torch.hub import get_dir

    names = (shown.hf_hub_filename,) if shown.hf_hub_filename else FOLDER_FILES
    for name in names if shown.hf_hub_id else ():
        repository, _, revision = shown.hf_hub_id.partition("@")
        found = try_to_load_from_cache(repository, name, revision=revision or None)
        if isinstance(found, str):
            return Path(found)
    url = shown.url[0] if isinstance(shown.url, tuple) else shown.url
    file = Path(get_dir()) / "checkpoints" / os.path.basename(urlparse(url or "").path)
    return file if file.is_file() and file.suffix in (".pth", ".pt", ".bin", ".safetensors") else None
