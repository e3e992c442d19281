"""Weights of a backbone: safetensors and a JSON file that says what they are. `load` takes a run or such a file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from adclr import config, manifest
from adclr.config import Positive, Ratio, Section, UserError
from adclr.decode import Decoder
from adclr.runs import Run, read_json, write_atomically, write_json
from adclr.settings import VIT_SIZES, Deviation, Settings, Side, Width
from adclr.vit import VisionTransformer


class Architecture(Section):
    """What a backbone is: the arguments of `VisionTransformer` that its weights do not show on their own."""

    dim: Width = Field(384, description="width")
    depth: Annotated[int, Field(ge=1, le=1000)] = Field(12, description="blocks")
    num_heads: Width = Field(6, description="heads")
    patch_size: Side = Field(16, description="pixels")
    input_size: tuple[Side, Side] = Field((224, 224), description="height and width positions are stored for")
    num_registers: int = Field(0, ge=0, le=1024, description="register tokens")
    num_channels: Annotated[int, Field(ge=1, le=256)] = Field(3, description="of the images")
    layer_scale: Positive | None = Field(None, description="initial LayerScale")
    query_keys: Literal["image", "patches", "image_and_self", "all"] = Field(
        "image", description="see model.query_keys"
    )
    position_resampling: Literal["antialias", "plain"] = Field("antialias", description="see model.position_resampling")

    def build(self, drop_path: float = 0.0, mask_token: bool = False) -> VisionTransformer:
        return VisionTransformer(**self.model_dump(), drop_path=drop_path, mask_token=mask_token)


class Description(Section):
    """backbone.json"""

    architecture: Architecture = Architecture()
    mean: tuple[Ratio, ...] = Field((0.485, 0.456, 0.406), description="of each channel, of 1")
    std: tuple[Deviation, ...] = Field((0.229, 0.224, 0.225), description="of each channel, of 1")
    max_value: Positive | None = Field(None, description="see data.max_value")


@dataclass(frozen=True)
class Weights:
    """A backbone in eval mode and how its images are normalised."""

    vit: VisionTransformer
    mean: tuple[float, ...]
    std: tuple[float, ...]
    max_value: float | None = None  # white in images of more than 8 bits

    @property
    def decoder(self) -> Decoder:
        """How images are decoded for this backbone: as in its training, but never shrunk."""
        return Decoder(num_channels=self.vit.num_channels, max_value=self.max_value)


def architecture(settings: Settings) -> Architecture:
    model, size = settings.model, settings.views.global_size
    dim, depth, num_heads = model.shape
    return Architecture(
        dim=dim,
        depth=depth,
        num_heads=num_heads,
        patch_size=model.patch_size,
        input_size=(size, size),
        num_registers=model.num_registers,
        num_channels=model.num_channels,
        layer_scale=model.layer_scale,
        query_keys=model.query_keys,
        position_resampling=model.position_resampling,
    )


def describe(settings: Settings) -> Description:
    data = settings.data
    return Description(architecture=architecture(settings), mean=data.mean, std=data.std, max_value=data.max_value)


def create_backbone(name: str, **options: Any) -> VisionTransformer:
    """A new ViT by name, such as `vit_small_patch16`; options are those of `VisionTransformer`."""
    match = re.fullmatch(r"vit_([a-z]+)_patch(4|8|14|16)", name)
    if not match or match[1] not in VIT_SIZES:
        raise UserError(
            f"unknown backbone '{name}'; write vit_SIZE_patchP with SIZE {'|'.join(VIT_SIZES)} and P 4|8|14|16"
        )
    dim, depth, num_heads = VIT_SIZES[match[1]]
    return VisionTransformer(dim, depth, num_heads, int(match[2]), **options)


def save_backbone(folder: Path, state: Mapping[str, Tensor], settings: Settings) -> None:
    """backbone.safetensors and backbone.json; the mask token stays behind, nothing but pretraining needs it."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in state.items() if name != "mask_token"}
    write_json(folder / "backbone.json", describe(settings).model_dump(mode="json"))
    write_atomically(folder / "backbone.safetensors", save(tensors))


def load(weights: str | Path) -> VisionTransformer:
    """The backbone of a run (its teacher, the latest if unfinished) or of a backbone.safetensors, in eval mode."""
    return load_weights(weights).vit


def load_weights(weights: str | Path) -> Weights:
    path = Path(weights)
    if os.path.isdir(path):
        return _load_run(path)
    if not os.path.exists(path):  # unlike Path.exists, it takes a name that is too long, or no permission, as a no
        raise UserError(f"weights {path} do not exist; give a run directory or its backbone.safetensors")
    if path.suffix != ".safetensors":
        raise UserError(f"{path} is not a .safetensors file; give a run directory or its backbone.safetensors")
    described = path.with_suffix(".json")
    if not described.exists():
        raise UserError(f"{described} is missing; it lies beside {path.name} and says what the weights are")
    return _assemble(read_tensors(path), _description(described), path)


def _load_run(path: Path) -> Weights:
    file = path / "backbone.safetensors"
    if file.exists():
        return load_weights(file)
    run = Run(path)
    settings, found = run.settings(), manifest.newest(run, ["teacher.safetensors"])
    if settings is None or found.step is None:
        raise UserError(
            f"{path} holds neither backbone.safetensors nor a whole checkpoint; give the directory of a run"
        )
    latest = run.checkpoints / f"step_{found.step}" / "teacher.safetensors"
    state = {
        name.removeprefix("backbone."): tensor
        for name, tensor in read_tensors(latest).items()
        if name.startswith("backbone.") and name != "backbone.mask_token"
    }
    return _assemble(state, describe(settings), latest)


def _description(path: Path) -> Description:
    values = read_json(path)
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a description of weights; restore it")
    return config.build(Description, values)


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with open(path, "rb"):  # safetensors says of a file that may not be read that it is not there
            return load_file(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); check it and its permissions") from None
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}); restore it or use another") from None


def _assemble(state: dict[str, Tensor], description: Description, path: Path) -> Weights:
    try:
        with torch.device("meta"):
            vit = description.architecture.build()
    except ValueError as error:
        raise UserError(f"the description of {path} is of no possible backbone: {error}; restore it") from None
    fit(vit.state_dict(), state, path)
    for name, tensor in state.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise UserError(f"{path} holds numbers that are not finite in {name}; these weights are of no use")
    vit.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    if not len(description.mean) == len(description.std) == vit.num_channels:
        raise UserError(f"the description of {path} has another number of means than of channels; restore it")
    return Weights(vit.eval(), description.mean, description.std, description.max_value)


def fit(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], path: Path) -> None:
    """Refuses weights of another architecture, naming the first tensor that differs."""
    for name in [*wanted, *found]:
        if name not in found:
            problem = f"lacks {name}"
        elif name not in wanted:
            problem = f"has {name}, which this architecture does not"
        elif wanted[name].shape != found[name].shape:
            problem = f"has {name} of shape {tuple(found[name].shape)} instead of {tuple(wanted[name].shape)}"
        else:
            continue
        raise UserError(f"{path} is of another architecture: it {problem}; use weights that fit the settings")
