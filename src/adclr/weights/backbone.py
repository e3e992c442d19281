"""Weights of a backbone: safetensors and a JSON file that describes them. `load` takes those of other programs too.

A W, wherever a command takes one: a run directory or its backbone.safetensors; a file or folder of DINO, iBOT, DINOv2,
MAE, SelfPatch, timm or Hugging Face (`FILE::student` for another state in it than the teacher's); the URL of one of
these in a store; or timm:NAME. docs/weights.md.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from safetensors.torch import save
from torch import Tensor

from adclr.config import parsing
from adclr.config.distillation import DistillSettings
from adclr.config.parsing import VIT_SIZES, Deviation, Positive, Ratio, Section, Side, UserError, Width
from adclr.config.settings import Settings
from adclr.data.decode import Decoder
from adclr.model.feature_network import FeatureNetwork
from adclr.model.vit import VisionTransformer
from adclr.system import distributed
from adclr.system.files import write_atomically, write_json
from adclr.system.runs import Run
from adclr.system.store_urls import conceal, is_remote
from adclr.system.stores import mirror as store_mirror
from adclr.system.text import printable
from adclr.weights import layouts, origins, snapshot
from adclr.weights.networks import NetworkDescription, network_state, restore_network
from adclr.weights.origins import StoredWeights
from adclr.weights.tensors import Report, cover, fingerprint, read_tensors

# what the descriptions of earlier versions of this program do not say
NEWER = {"norm_eps", "class_attention", "position_embedding", "mlp"}


class Architecture(Section):
    """The architecture of a backbone: the arguments of `VisionTransformer`."""

    dim: Width = Field(384, description="width")
    depth: Annotated[int, Field(ge=1, le=1000)] = Field(12, description="blocks")
    num_heads: Width = Field(6, description="heads")
    patch_size: Side = Field(16, description="pixels")
    input_size: tuple[Side, Side] = Field((224, 224), description="height and width positions are stored for")
    num_registers: int = Field(0, ge=0, le=1024, description="number of register tokens")
    num_channels: Annotated[int, Field(ge=1, le=256)] = Field(3, description="of the images")
    layer_scale: Positive | None = Field(None, description="initial LayerScale")
    query_keys: Literal["image", "patches", "image_and_self", "all"] = Field(
        "image", description="see model.query_keys"
    )
    position_resampling: Literal["antialias", "plain", "offset"] = Field(
        "antialias", description="see model.position_resampling"
    )
    norm_eps: Annotated[float, Field(gt=0, le=0.1)] = Field(1e-6, description="epsilon of the layer norms")
    query_read_only_blocks: Annotated[int, Field(ge=0, le=1000)] = Field(
        0, description="see model.query_read_only_blocks"
    )
    class_attention: Annotated[int, Field(ge=0, le=100)] = Field(0, description="see model.class_attention")
    position_embedding: Literal["learned", "rotary"] = Field("learned", description="see model.position_embedding")
    mlp: Literal["plain", "gated"] = Field("plain", description="see model.mlp")

    def build(self, drop_path: float = 0.0, mask_token: bool = False) -> VisionTransformer:
        """Return a new network of this architecture."""
        return VisionTransformer(**self.model_dump(), drop_path=drop_path, mask_token=mask_token)


class Description(Section):
    """The content of backbone.json."""

    architecture: Architecture = Architecture()
    mean: tuple[Ratio, ...] = Field((0.485, 0.456, 0.406), description="of each channel, of 1")
    std: tuple[Deviation, ...] = Field((0.229, 0.224, 0.225), description="of each channel, of 1")
    max_value: Positive | None = Field(None, description="see data.max_value")


@dataclass(frozen=True)
class Weights:
    """A backbone in eval mode and how its images are normalized."""

    vit: VisionTransformer  # or a `FeatureNetwork`, of `load_weights(..., networks=True)`
    mean: tuple[float, ...]
    std: tuple[float, ...]
    max_value: float | None = None  # white in images of more than 8 bits
    report: Report | None = None  # of the tensors of the file

    @property
    def decoder(self) -> Decoder:
        """Return the decoder of images for this backbone: as in its training, but images are never shrunk."""
        return Decoder(num_channels=self.vit.num_channels, max_value=self.max_value)

    @property
    def network(self) -> FeatureNetwork | None:
        """The backbone if it is no ViT of this program."""
        backbone: object = self.vit
        return backbone if isinstance(backbone, FeatureNetwork) else None

    @property
    def patch_dim(self) -> int:
        """The width of the patches; in some networks it is not that of the pooled vector."""
        return self.vit.dim if self.network is None else self.network.map_dim

    def describe(self) -> Description:
        """Return the content of backbone.json."""
        shape = architecture_of(self.vit)
        return Description(architecture=shape, mean=self.mean, std=self.std, max_value=self.max_value)

    def fingerprint(self) -> str:
        """Return a hash of everything that decides which features these weights give an image."""
        vit = self.vit
        if self.network is not None:
            facts = self.network.name, self.network.input_size, self.mean, self.std, self.max_value
            return fingerprint(self.network.state_dict(), repr(facts))
        rules = (vit.num_heads, vit.patch_size, vit.input_size, vit.position_resampling, vit.norm_eps)
        return fingerprint(vit.state_dict(), repr((rules, self.mean, self.std, self.max_value)))


def architecture(settings: Settings) -> Architecture:
    """Return the architecture that settings describe."""
    (dim, depth, num_heads), size = settings.model.shape, settings.views.global_size
    shape = {"dim": dim, "depth": depth, "num_heads": num_heads, "input_size": (size, size)}
    rest = {name: getattr(settings.model, name) for name in Architecture.model_fields.keys() - shape.keys()}
    return Architecture(**shape, **rest)


def architecture_of(vit: VisionTransformer) -> Architecture:
    """Return the architecture of a backbone; the inverse of `Architecture.build`."""
    return Architecture(**{name: getattr(vit, name) for name in Architecture.model_fields})


def _describe(settings: Settings) -> Description:
    """Return the description of the backbone that settings train."""
    data = settings.data
    return Description(architecture=architecture(settings), mean=data.mean, std=data.std, max_value=data.max_value)


def create_backbone(name: str, **options: Any) -> VisionTransformer:
    """Return a new ViT by name, such as `vit_small_patch16`; options are those of `VisionTransformer`."""
    match = re.fullmatch(r"vit_([a-z]+)_patch(4|8|14|16)", name)
    if not match or match[1] not in VIT_SIZES:
        raise UserError(
            f"unknown backbone '{name}'; write vit_SIZE_patchP with SIZE {'|'.join(VIT_SIZES)} and P 4|8|14|16"
        )
    dim, depth, num_heads = VIT_SIZES[match[1]]
    return VisionTransformer(dim, depth, num_heads, int(match[2]), **options)


def save_backbone(folder: Path, state: Mapping[str, Tensor], settings: Settings) -> None:
    """Write backbone.safetensors and backbone.json of a run."""
    write_backbone(folder, state, _describe(settings))


def write_backbone(folder: Path, state: Mapping[str, Tensor], description: Description) -> None:
    """Write backbone.safetensors and backbone.json, without the mask token, which only pretraining needs."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in state.items() if name != "mask_token"}
    write_json(folder / "backbone.json", description.model_dump(mode="json"))
    write_atomically(folder / "backbone.safetensors", save(tensors))


def save_network(folder: Path, network: FeatureNetwork, settings: Settings) -> None:
    """Write backbone.safetensors and backbone.json of a student that is no ViT of this program."""
    data = settings.data
    write_network(folder, network, data.mean, data.std, data.max_value)


def write_network(
    folder: Path,
    network: FeatureNetwork,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    max_value: float | None,
) -> None:
    """Write backbone.safetensors, by the network's own names, and backbone.json."""
    description = NetworkDescription(
        network=network.name,
        input_size=network.input_size,
        num_channels=network.num_channels,
        mean=mean,
        std=std,
        max_value=max_value,
    )
    write_json(folder / "backbone.json", description.model_dump(mode="json"))
    write_atomically(folder / "backbone.safetensors", save(network_state(network), metadata={"format": "pt"}))


def load(weights: str | os.PathLike[str], partial: bool = False) -> VisionTransformer:
    """Return the backbone of a run (its teacher; the latest if unfinished) or of other weights, in eval mode.

    `weights` is whatever the commands take: the directory of a run, a file or folder of weights, a URL, or timm:NAME.
    With `partial`, parts that the weights lack are initialized at random.
    """
    return load_weights(weights, partial).vit


def load_weights(
    weights: str | os.PathLike[str],
    partial: bool | None = False,
    input_size: int | tuple[int, int] | None = None,
    show: bool = True,
    networks: bool = False,
) -> Weights:
    """Return weights as a backbone, and how its images are normalized.

    With `networks` it can be a student of a distillation that is no ViT, such as a ResNet; otherwise that is refused.

    Weights that lack tensors, or that have tensors unknown to this ViT, are refused unless `partial`, with which the
    missing ones are newly initialized; None is for commands without the option. With `input_size` (height and width)
    positions are resampled to it once, in the way of the weights' authors. Which tensors were used is in `report`, and
    on stderr unless the weights are of this program.
    """
    stored, ours = _find(weights)
    if "network" in stored.description:
        return _assemble_network(stored, networks)
    loaded = _assemble(stored, ours, partial)
    if input_size is not None:
        loaded = _resize_positions(loaded, (input_size, input_size) if isinstance(input_size, int) else input_size)
    assert loaded.report is not None
    if show and distributed.is_main() and (not ours or loaded.report.missing or loaded.report.resized):
        print("\n".join(map(printable, loaded.report.lines())), file=sys.stderr)
    return loaded


def _find(weights: str | os.PathLike[str]) -> tuple[StoredWeights, bool]:
    """Return the tensors of a W, and whether this program wrote them."""
    text = conceal(os.fspath(weights))
    if is_remote(text):
        url, _, branch = text.rpartition("::") if "::" in text else (text, "", "")
        with store_mirror.local_weights(url) as copy:
            stored, ours = _find(f"{copy}::{branch}" if branch else copy)
            return replace(stored, source=url), ours
    if text.startswith("timm:"):
        return origins.from_timm(text.removeprefix("timm:")), False
    # os.path.exists is False where Path.exists raises: for a name that is too long, or without permission
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
    description = path.with_suffix(".json")
    if path.name == "backbone.safetensors" and not description.exists():
        raise UserError(f"{description} is missing; it lies beside {path.name} and says what the weights are")
    stored = origins.from_file(path, branch)
    shape = stored.description.get("architecture")
    return stored, isinstance(shape, dict) and Architecture.model_fields.keys() - NEWER <= shape.keys()


def _assemble_network(stored: StoredWeights, networks: bool) -> Weights:
    """Return weights of a network that is no ViT of this program."""
    if not networks:
        raise UserError(
            f"{stored.source} is of {printable(str(stored.description['network']))}, which is no ViT; "
            "evaluate knn, linear, matching and incontext, embed and export --to timm take it"
        )
    network, described = restore_network(stored.description, stored.tensors, stored.source)
    report = Report(stored.source, "ADCLR", stored.branch, tuple(stored.tensors), (), (), {}, ())
    vit = cast(VisionTransformer, network)
    return Weights(vit, described.mean, described.std, described.max_value, report)


def _find_in_run(path: Path) -> StoredWeights:
    run = Run(path)
    settings = run.settings()
    part = "student" if isinstance(settings, DistillSettings) else "teacher"
    newest = snapshot.find_newest(run, [f"{part}.safetensors"])
    if settings is None or newest.step is None:
        raise UserError(
            f"{path} holds neither backbone.safetensors nor a whole checkpoint; give the directory of a run"
        )
    latest = run.checkpoints / f"step_{newest.step}" / f"{part}.safetensors"
    tensors = read_tensors(latest)
    if isinstance(settings, DistillSettings) and not settings.student_is_vit:
        prefix, data, side = "backbone.network.model.", settings.data, settings.views.global_size
        named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        description: dict[str, Any] = {
            "network": settings.distill.student,
            "input_size": (side, side),
            "num_channels": settings.model.num_channels,
            "mean": data.mean,
            "std": data.std,
            "max_value": data.max_value,
        }
        return StoredWeights(str(latest), named, part, description)
    return StoredWeights(str(latest), tensors, part, _describe(settings).model_dump())


def _assemble(stored: StoredWeights, ours: bool, partial: bool | None) -> Weights:
    path = stored.source
    named = layouts.rename_tensors(stored.tensors, path, stored.hints, ours)
    described = parsing.flatten(stored.description)
    known = {name.removeprefix("architecture.") for name in described if name.startswith("architecture.")}
    try:
        inferred = layouts.infer_architecture(named, known, path)
        description = parsing.build(Description, {"architecture": inferred}, described)
        with torch.device("meta"):
            vit = description.architecture.build()
    except UserError as error:
        if not described:
            raise
        raise UserError(f"the description of {path} does not fit: {error}") from None
    except ValueError as error:
        raise UserError(f"the description of {path} does not fit any backbone: {error}; restore it") from None
    if vit.num_channels != 3 and not {"mean", "std"} <= described.keys():
        raise UserError(
            f"{path} takes images of {vit.num_channels} channels, and nothing says their mean and deviation; "
            "write both into a .json of the same name beside it"
        )
    if not len(description.mean) == len(description.std) == vit.num_channels:
        raise UserError(f"the description of {path} has another number of means than of channels; restore it")
    named = layouts.convert_positions(named, vit.grid, path)
    missing = cover(vit.state_dict(), named.state, named.unknown, path, partial)
    state = {name: tensor for name, tensor in named.state.items() if name in vit.state_dict() and name not in missing}
    report = Report(
        source=path,
        layout="ADCLR" if ours else named.layout.name,
        branch=stored.branch,
        taken=tuple(full for name in state for full in named.origin[name]),
        left=(*named.left, *named.unknown, *(f for n in named.origin if n not in state for f in named.origin[n])),
        missing=missing,
        resized={},
        assumed=() if ours else tuple(_assumptions(named.layout, vit, known, described)),
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


def _assumptions(
    layout: layouts.Layout, vit: VisionTransformer, known: set[str], described: Mapping[str, Any]
) -> list[str]:
    """Return what neither the tensors nor their description determine, in words."""
    assumptions = []
    if "num_heads" not in known:
        assumptions.append(f"num_heads={vit.num_heads}, by the width of {vit.dim}")
    if "mean" not in described and layout.name in ("timm", "timm DINOv3", "DINOv3"):
        assumptions.append("mean and deviation of ImageNet, since the weights name no others")
    if "position_embedding" not in known and vit.position_embedding == "rotary":
        assumptions.append("rotary positions as DINOv3 has them, since the weights store none")
    if "position_resampling" not in known and vit.position_embedding == "learned":
        size = "x".join(map(str, vit.input_size))
        assumptions.append(
            f"positions, stored for {size} pixels, are resampled as there: {RESAMPLED[vit.position_resampling]}"
        )
    return assumptions


def describe_positions(vit: VisionTransformer) -> str:
    """Return how a ViT has positions at sizes that are not stored, in words."""
    return "rotary, of any size" if vit.pos_embed is None else RESAMPLED[vit.position_resampling]


RESAMPLED = {
    "antialias": "bicubic with antialiasing",
    "plain": "bicubic without antialiasing",
    "offset": "bicubic without antialiasing, to a grid 0.1 patches larger",
}


def _resize_positions(weights: Weights, size: tuple[int, int]) -> Weights:
    """Return the same backbone with positions stored for images of another size."""
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
    if old.pos_embed is None:
        vit.load_state_dict(old.state_dict(), assign=True)
        return replace(weights, vit=vit.eval())
    with torch.no_grad():
        vit.load_state_dict(old.state_dict() | {"pos_embed": old.positions(grid).clone()}, assign=True)
    how = f"{old.grid[0]}x{old.grid[1]} to {grid[0]}x{grid[1]} patches, {RESAMPLED[old.position_resampling]}"
    assert report is not None
    return replace(weights, vit=vit.eval(), report=replace(report, resized={"pos_embed": how}))
