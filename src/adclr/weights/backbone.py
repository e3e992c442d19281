"""Weights of a backbone: safetensors and a JSON file that says what they are. `load` takes those of others too.

A W, wherever one is asked for: a run directory or its backbone.safetensors; a file or folder of DINO, iBOT, DINOv2,
MAE, timm or Hugging Face (`FILE::student` for another state in it than the teacher's); or timm:NAME. docs/weights.md.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from safetensors.torch import save
from torch import Tensor

from adclr.config import sections
from adclr.config.sections import Positive, Ratio, Section, UserError
from adclr.config.settings import VIT_SIZES, Deviation, Settings, Side, Width
from adclr.data.decode import Decoder
from adclr.model.vit import VisionTransformer
from adclr.system import distributed
from adclr.system.files import write_atomically, write_json
from adclr.system.runs import Run
from adclr.system.text import printable
from adclr.weights import layouts, origins, snapshot
from adclr.weights.origins import Given
from adclr.weights.tensors import Report, cover, fingerprint, read_tensors


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
    position_resampling: Literal["antialias", "plain", "offset"] = Field(
        "antialias", description="see model.position_resampling"
    )
    norm_eps: Annotated[float, Field(gt=0, le=0.1)] = Field(1e-6, description="epsilon of the norms")
    query_read_only_blocks: Annotated[int, Field(ge=0, le=1000)] = Field(
        0, description="see model.query_read_only_blocks"
    )

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
    report: Report | None = None  # what became of the tensors of the file

    @property
    def decoder(self) -> Decoder:
        """How images are decoded for this backbone: as in its training, but never shrunk."""
        return Decoder(num_channels=self.vit.num_channels, max_value=self.max_value)

    def fingerprint(self) -> str:
        """Return a hash of everything that decides which features these weights give an image."""
        vit = self.vit
        rules = (vit.num_heads, vit.patch_size, vit.input_size, vit.position_resampling, vit.norm_eps)
        return fingerprint(vit.state_dict(), repr((rules, self.mean, self.std, self.max_value)))


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
        norm_eps=model.norm_eps,
        query_read_only_blocks=model.query_read_only_blocks,
    )


def architecture_of(vit: VisionTransformer) -> Architecture:
    """What a backbone that is there is; the inverse of `Architecture.build`."""
    return Architecture(**{name: getattr(vit, name) for name in Architecture.model_fields})


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
    write_backbone(folder, state, describe(settings))


def write_backbone(folder: Path, state: Mapping[str, Tensor], description: Description) -> None:
    """backbone.safetensors and backbone.json; the mask token stays behind, nothing but pretraining needs it."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in state.items() if name != "mask_token"}
    write_json(folder / "backbone.json", description.model_dump(mode="json"))
    write_atomically(folder / "backbone.safetensors", save(tensors))


def load(weights: str | Path, partial: bool = False) -> VisionTransformer:
    """The backbone of a run (its teacher, the latest if unfinished) or of any W (see above), in eval mode."""
    return load_weights(weights, partial).vit


def load_weights(
    weights: str | Path,
    partial: bool | None = False,
    input_size: int | tuple[int, int] | None = None,
    show: bool = True,
) -> Weights:
    """A W as a backbone and how its images are normalised.

    Tensors that are missing, or that this ViT has no place for, are a refusal unless `partial`, with which the missing
    are drawn anew; None is for commands that cannot be told so. With `input_size` (height and width) positions are
    resampled to it once, as their makers would. What became of the tensors is in `report`, and on stderr unless the
    weights are ours.
    """
    given, ours = _find(weights)
    found = _assemble(given, ours, partial)
    if input_size is not None:
        found = _resized(found, (input_size, input_size) if isinstance(input_size, int) else input_size)
    assert found.report is not None
    if show and distributed.is_main() and (not ours or found.report.missing or found.report.resized):
        print("\n".join(map(printable, found.report.lines())), file=sys.stderr)
    return found


def _find(weights: str | Path) -> tuple[Given, bool]:
    """The tensors, and whether they are ours."""
    text = str(weights)
    if text.startswith("timm:"):
        return origins.from_timm(text.removeprefix("timm:")), False
    # unlike Path.exists, os.path's take a name that is too long, or no permission, as a no
    name, _, branch = text.rpartition("::") if "::" in text and not os.path.exists(text) else (text, "", "")
    path = Path(name)
    if os.path.isdir(path):
        if not os.path.exists(path / "backbone.safetensors"):
            if os.path.exists(path / "config.json"):
                return origins.from_folder(path, branch=branch), False
            return _find_in_run(path), True
        path /= "backbone.safetensors"
    if not os.path.exists(path):
        raise UserError(f"weights {path} do not exist; give a run directory, a file of weights or timm:NAME")
    described = path.with_suffix(".json")
    if path.name == "backbone.safetensors" and not described.exists():
        raise UserError(f"{described} is missing; it lies beside {path.name} and says what the weights are")
    given = origins.from_file(path, branch)
    shape = given.said.get("architecture")
    return given, isinstance(shape, dict) and Architecture.model_fields.keys() - {"norm_eps"} <= shape.keys()


def _find_in_run(path: Path) -> Given:
    run = Run(path)
    settings, found = run.settings(), snapshot.newest(run, ["teacher.safetensors"])
    if settings is None or found.step is None:
        raise UserError(
            f"{path} holds neither backbone.safetensors nor a whole checkpoint; give the directory of a run"
        )
    latest = run.checkpoints / f"step_{found.step}" / "teacher.safetensors"
    return Given(str(latest), read_tensors(latest), "teacher", describe(settings).model_dump())


def _assemble(given: Given, ours: bool, partial: bool | None) -> Weights:
    path = given.source
    named = layouts.name(given.tensors, path, given.hints)
    said = sections.flatten(given.said)
    known = {name.removeprefix("architecture.") for name in said if name.startswith("architecture.")}
    try:
        shown = layouts.shape(named, known, path)
        description = sections.build(Description, {"architecture": shown}, said)
        with torch.device("meta"):
            vit = description.architecture.build()
    except UserError as error:
        if not said:
            raise
        raise UserError(f"what is said of {path} does not fit: {error}") from None
    except ValueError as error:
        raise UserError(f"the description of {path} is of no possible backbone: {error}; restore it") from None
    if vit.num_channels != 3 and not {"mean", "std"} <= said.keys():
        raise UserError(
            f"{path} takes images of {vit.num_channels} channels, and nothing says their mean and deviation; "
            "write both into a .json of the same name beside it"
        )
    if not len(description.mean) == len(description.std) == vit.num_channels:
        raise UserError(f"the description of {path} has another number of means than of channels; restore it")
    named = layouts.place(named, vit.grid, path)
    missing = cover(vit.state_dict(), named.state, named.unknown, path, partial)
    state = {name: tensor for name, tensor in named.state.items() if name in vit.state_dict() and name not in missing}
    report = Report(
        source=path,
        layout="ADCLR" if ours else named.layout.name,
        branch=given.branch,
        taken=tuple(full for name in state for full in named.origin[name]),
        left=(*named.left, *named.unknown, *(f for n in named.origin if n not in state for f in named.origin[n])),
        missing=missing,
        resized={},
        assumed=() if ours else tuple(_assumed(named.layout, vit, known, said)),
    )
    if missing:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            state |= {
                name: tensor
                for name, tensor in description.architecture.build().state_dict().items()
                if name in missing
            }
    vit.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
    return Weights(vit.eval(), description.mean, description.std, description.max_value, report)


def _assumed(layout: layouts.Layout, vit: VisionTransformer, known: set[str], said: Mapping[str, Any]) -> list[str]:
    """What the tensors do not show, and nothing beside them says."""
    found = []
    if "num_heads" not in known:
        found.append(f"num_heads={vit.num_heads}, by the width of {vit.dim}")
    if "mean" not in said and layout.name == "timm":
        found.append("mean and deviation of ImageNet, for nothing says others")
    if "position_resampling" not in known:
        size = "x".join(map(str, vit.input_size))
        found.append(
            f"positions, stored for {size} pixels, are resampled as there: {RESAMPLED[vit.position_resampling]}"
        )
    return found


RESAMPLED = {
    "antialias": "bicubic with antialiasing",
    "plain": "bicubic without antialiasing",
    "offset": "bicubic without antialiasing, to a grid 0.1 patches larger",
}


def _resized(weights: Weights, size: tuple[int, int]) -> Weights:
    """The same backbone with positions stored for images of another size."""
    old, report = weights.vit, weights.report
    try:
        grid = old.grid_of(*size)
    except ValueError as error:
        raise UserError(f"{error}; choose another input size") from None
    if grid == old.grid:
        return weights
    shape = architecture_of(old).model_copy(update={"input_size": size})
    with torch.device("meta"):
        vit = shape.build()
    with torch.no_grad():
        vit.load_state_dict(old.state_dict() | {"pos_embed": old.positions(grid).clone()}, assign=True)
    how = f"{old.grid[0]}x{old.grid[1]} to {grid[0]}x{grid[1]} patches, {RESAMPLED[old.position_resampling]}"
    assert report is not None
    return replace(weights, vit=vit.eval(), report=replace(report, resized={"pos_embed": how}))
