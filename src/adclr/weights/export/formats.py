"""The files of each export format, and how the program that they are for reads them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from adclr.config.parsing import VIT_SIZES, UserError
from adclr.model.feature_network import FeatureNetwork
from adclr.model.vit import VisionTransformer
from adclr.system.files import write_atomically, write_json
from adclr.weights.backbone import Weights, load_weights, write_backbone, write_network
from adclr.weights.export import dinov3, onnx
from adclr.weights.networks import TIMM, network_state

Outputs = Callable[[Tensor], tuple[Tensor, Tensor]]  # images -> [CLS], patches


@dataclass(frozen=True)
class Export:
    """The files of an export: how they are used and checked."""

    library: str
    usage: str
    reader: Callable[[], tuple[str, Outputs]]  # (program and its version, outputs); ImportError if it is not installed
    notes: tuple[str, ...] = ()
    any_size: bool = True  # whether the program resamples positions as we do


def _state(vit: VisionTransformer) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in vit.state_dict().items()}


def _write(path: Path, state: dict[str, Tensor]) -> None:
    """Write a safetensors file that other users may read, unlike those of safetensors' `save_file`."""
    write_atomically(path, save(state, metadata={"format": "pt"}))


def _resampling_notes(vit: VisionTransformer, program: str, ways: tuple[str, ...]) -> tuple[str, ...]:
    if vit.pos_embed is None or vit.position_resampling in ways:
        return ()
    height, width = vit.input_size
    return (
        f"on images of another size than {height}x{width} pixels, {program} resamples positions differently, so that "
        "outputs differ slightly",
    )


# -- safetensors --


def _safetensors(weights: Weights, folder: Path) -> Export:
    if weights.network is None:
        write_backbone(folder, _state(weights.vit), weights.describe())
    else:
        write_network(folder, weights.network, weights.mean, weights.std, weights.max_value)

    def reader() -> tuple[str, Outputs]:
        vit = load_weights(folder, show=False, networks=True).vit
        return "adclr", lambda images: vit(images)[:2]

    usage = """
```python
import adclr

vit = adclr.load("FOLDER")  # of this card
tokens = vit(images)  # tokens.cls, tokens.patches
```
"""
    return Export("adclr", usage, reader)


# -- timm --


def _check_class(vit: VisionTransformer, program: str) -> None:
    if vit.mlp == "gated" and vit.pos_embed is not None:
        raise UserError(
            f"{program} has no ViT with learned positions and a gated MLP; export to onnx or safetensors instead"
        )


def _timm_state(vit: VisionTransformer) -> dict[str, Tensor]:
    """Return the state under timm's names: ours, but for those of its class of DINOv3, which has a LayerScale."""
    if vit.pos_embed is not None:
        return _state(vit)
    state = {f"blocks.{i}.gamma_{number}": torch.ones(vit.dim) for i in range(vit.depth) for number in (1, 2)}
    for name, tensor in _state(vit).items():
        if name.endswith("attn.qkv.bias"):
            q, _, v = tensor.chunk(3)
            start = name.removesuffix("qkv.bias")
            state |= {f"{start}q_bias": q.clone(), f"{start}v_bias": v.clone()}
        else:
            state[name.replace(".ls1.gamma", ".gamma_1").replace(".ls2.gamma", ".gamma_2")] = tensor
    return state


def _timm_arguments(vit: VisionTransformer) -> tuple[str, dict[str, Any]]:
    """Return the name and the other arguments with which `timm.create_model` builds the same ViT."""
    shape, rotary = (vit.dim, vit.depth, vit.num_heads), vit.pos_embed is None
    size = next((name for name, known in VIT_SIZES.items() if known == shape), None)
    arguments: dict[str, Any] = {"num_classes": 0, "dynamic_img_size": True}
    if size is None:
        arguments |= {"embed_dim": vit.dim, "depth": vit.depth, "num_heads": vit.num_heads}
    if vit.patch_size != 16:
        arguments["patch_size"] = vit.patch_size
    if vit.input_size != (224, 224):
        arguments["img_size"] = list(vit.input_size)
    if vit.num_channels != 3:
        arguments["in_chans"] = vit.num_channels
    if vit.layer_scale or rotary:
        arguments["init_values"] = 1.0
    if rotary:
        arguments["num_reg_tokens"] = vit.num_registers
        if vit.mlp == "gated":
            arguments |= {"swiglu_mlp": True, "swiglu_align_to": 8}
        return f"vit_{size or 'tiny'}_patch16_dinov3_qkvb", arguments
    if vit.num_registers:
        arguments |= {"reg_tokens": vit.num_registers, "no_embed_class": True}
    return f"vit_{size or 'tiny'}_patch16_224", arguments


def _timm_network(weights: Weights, network: FeatureNetwork, folder: Path) -> Export:
    """Write a network that is timm's already, under timm's names."""
    name, state = network.name.removeprefix(TIMM), network_state(network)
    _write(folder / "model.safetensors", state)
    import timm  # the network could not have been built without it

    known = timm.get_pretrained_cfg(name)
    config: dict[str, Any] = {
        "input_size": [network.num_channels, *network.input_size],
        "mean": weights.mean,
        "std": weights.std,
        "num_classes": 0,
        "interpolation": "bicubic",
        "crop_pct": 0.875,
    }
    config |= {part: getattr(known, part) for part in ("first_conv", "classifier") if known is not None}
    model_arguments = {} if network.num_channels == 3 else {"in_chans": network.num_channels}
    values = {"architecture": name, "num_classes": 0, "num_features": network.dim, "pretrained_cfg": config}
    write_json(folder / "config.json", values | {"model_args": model_arguments})
    options = "".join(f", {key}={value!r}" for key, value in model_arguments.items())

    def reader() -> tuple[str, Outputs]:
        file = folder / "model.safetensors"
        model: Any = timm.create_model(name, num_classes=0, checkpoint_path=str(file), **model_arguments).eval()

        def outputs(images: Tensor) -> tuple[Tensor, Tensor]:
            features = model.forward_features(images)
            if getattr(model, "output_fmt", "NCHW") == "NHWC":
                features = features.permute(0, 3, 1, 2)
            return model(images), features.flatten(2).transpose(1, 2)

        return f"timm {timm.__version__}", outputs

    usage = f"""
```python
import timm

model = timm.create_model("{name}", num_classes=0, checkpoint_path="model.safetensors"{options})
features = model.eval()(images)  # a vector for each image
maps = model.forward_features(images)  # the last map of features

# or load the whole folder: timm.create_model("local-dir:FOLDER", pretrained=True)
```
"""
    return Export("timm", usage, reader)


def _timm(weights: Weights, folder: Path) -> Export:
    if weights.network is not None:
        return _timm_network(weights, weights.network, folder)
    _refuse_class_attention(weights, "timm")
    vit = weights.vit
    _check_class(vit, "timm")
    name, arguments = _timm_arguments(vit)
    _write(folder / "model.safetensors", _timm_state(vit))
    odd_norm = vit.norm_eps != (1e-5 if vit.pos_embed is None else 1e-6)
    if not odd_norm:  # timm's config.json has no field for it
        config: dict[str, Any] = {
            "input_size": [vit.num_channels, *vit.input_size],
            "mean": weights.mean,
            "std": weights.std,
        }
        config |= {"interpolation": "bicubic", "crop_pct": 0.875, "num_classes": 0, "fixed_input_size": False}
        config |= {"first_conv": "patch_embed.proj", "classifier": "head"}
        model_arguments = {key: value for key, value in arguments.items() if key != "num_classes"}
        values = {"architecture": name, "num_classes": 0, "num_features": vit.dim, "pretrained_cfg": config}
        write_json(folder / "config.json", values | {"model_args": model_arguments})

    def reader() -> tuple[str, Outputs]:
        import timm

        more: dict[str, Any] = {"norm_layer": partial(torch.nn.LayerNorm, eps=vit.norm_eps)} if odd_norm else {}
        model: Any = timm.create_model(name, **arguments, **more).eval()
        model.load_state_dict(load_file(folder / "model.safetensors"))

        def outputs(images: Tensor) -> tuple[Tensor, Tensor]:
            features = model.forward_features(images)
            return features[:, 0], features[:, vit.num_prefix :]

        return f"timm {timm.__version__}", outputs

    options = "".join(f", {key}={value!r}" for key, value in arguments.items())
    norm = f", norm_layer=partial(torch.nn.LayerNorm, eps={vit.norm_eps!r})" if odd_norm else ""
    imports = "from functools import partial\n\nimport torch\n" if odd_norm else ""
    shorter = (
        '\n# or load the whole folder: timm.create_model("local-dir:FOLDER", pretrained=True)' if not odd_norm else ""
    )
    usage = f"""
```python
{imports}import timm
from safetensors.torch import load_file

model = timm.create_model("{name}"{options}{norm})
model.load_state_dict(load_file("model.safetensors")){shorter}
features = model.eval().forward_features(images)  # [CLS], {"registers, " if vit.num_registers else ""}then patches
```
"""
    notes = _resampling_notes(vit, "timm", ("antialias",))
    return Export("timm", usage, reader, notes, any_size=not notes)


# -- Hugging Face --


def _huggingface_state(vit: VisionTransformer) -> dict[str, Tensor]:
    """Return the state under the names of Dinov2 (with registers); a LayerScale of 1 changes nothing."""
    state = _state(vit)
    positions = state["pos_embed"]
    if not vit.positioned_prefix:
        positions = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
    renamed = {
        "embeddings.cls_token": state["cls_token"],
        "embeddings.mask_token": torch.zeros(1, vit.dim),
        "embeddings.position_embeddings": positions,
        "layernorm.weight": state["norm.weight"],
        "layernorm.bias": state["norm.bias"],
    }
    if _with_registers(vit):
        renamed["embeddings.register_tokens"] = state.get("reg_token", torch.zeros(1, 0, vit.dim))
    for kind in ("weight", "bias"):
        renamed[f"embeddings.patch_embeddings.projection.{kind}"] = state[f"patch_embed.proj.{kind}"]
    for i in range(vit.depth):
        ours, theirs = f"blocks.{i}.", f"encoder.layer.{i}."
        for kind in ("weight", "bias"):
            parts = state[f"{ours}attn.qkv.{kind}"].chunk(3)
            for part, tensor in zip(("query", "key", "value"), parts, strict=True):
                renamed[f"{theirs}attention.attention.{part}.{kind}"] = tensor.clone()
            renamed[f"{theirs}attention.output.dense.{kind}"] = state[f"{ours}attn.proj.{kind}"]
            for layer in ("norm1", "norm2", "mlp.fc1", "mlp.fc2"):
                renamed[f"{theirs}{layer}.{kind}"] = state[f"{ours}{layer}.{kind}"]
        for number in (1, 2):
            gamma = state.get(f"{ours}ls{number}.gamma", torch.ones(vit.dim))
            renamed[f"{theirs}layer_scale{number}.lambda1"] = gamma
    return renamed


def _with_registers(vit: VisionTransformer) -> bool:
    """Return whether Dinov2-with-registers fits, which antialiases, even without registers; Dinov2 does not."""
    return bool(vit.num_registers) or vit.position_resampling == "antialias"


def _huggingface(weights: Weights, folder: Path) -> Export:
    _refuse_class_attention(weights, "Hugging Face")
    vit = weights.vit
    _check_class(vit, "transformers")
    (height, width), registers, rotary = vit.input_size, _with_registers(vit), vit.pos_embed is None
    if height != width:
        raise UserError(f"Hugging Face's positions are square, not of {height}x{width} pixels; add --input-size")
    kind, name = ("dinov2_with_registers", "Dinov2WithRegistersModel") if registers else ("dinov2", "Dinov2Model")
    values: dict[str, Any] = {
        "architectures": [name],
        "model_type": kind,
        "hidden_size": vit.dim,
        "num_hidden_layers": vit.depth,
        "num_attention_heads": vit.num_heads,
        "mlp_ratio": 4,
        "hidden_act": "gelu",
        "layer_norm_eps": vit.norm_eps,
        "image_size": height,
        "patch_size": vit.patch_size,
        "num_channels": vit.num_channels,
        "qkv_bias": True,
        "layerscale_value": 1.0,
        "use_swiglu_ffn": False,
        "dtype": "float32",
    }
    if registers or rotary:
        values["num_register_tokens"] = vit.num_registers
    if rotary:
        name, values = "DINOv3ViTModel", dinov3.describe(vit, values)
    _write(folder / "model.safetensors", dinov3.rename(vit, _state(vit)) if rotary else _huggingface_state(vit))
    write_json(folder / "config.json", values)
    notes = list(_resampling_notes(vit, "transformers", ("antialias",) if registers else ("plain",)))
    has_processor = vit.num_channels == 3 and weights.max_value is None
    write_json(folder / "preprocessor_config.json", _preprocessor(weights))

    def reader() -> tuple[str, Outputs]:
        import transformers
        from transformers.utils import logging

        logging.disable_progress_bar()
        model: Any = getattr(transformers, name).from_pretrained(folder).eval()
        logging.enable_progress_bar()

        def outputs(images: Tensor) -> tuple[Tensor, Tensor]:
            features = model(pixel_values=images).last_hidden_state
            return features[:, 0], features[:, vit.num_prefix :]

        return f"transformers {transformers.__version__}", outputs

    if has_processor:
        usage = (
            'processor = AutoImageProcessor.from_pretrained("FOLDER")\npixels = processor(image, return_tensors="pt")'
        )
    else:
        usage = 'pixels = {"pixel_values": images}'
    usage = f"""
```python
from transformers import {"AutoImageProcessor, " if has_processor else ""}AutoModel

model = AutoModel.from_pretrained("FOLDER")  # of this card
{usage}
features = model(**pixels).last_hidden_state  # [CLS], {"registers, " if vit.num_registers else ""}then patches
```
"""
    return Export("transformers", usage, reader, tuple(notes), any_size=not notes)


def _preprocessor(weights: Weights) -> dict[str, Any]:
    """Return the preprocessing of our evaluations: shorter side to 256/224 of the input, then the center."""
    side = weights.vit.input_size[0]
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": weights.vit.num_channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": round(side * 256 / 224)},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": weights.mean,
        "image_std": weights.std,
    }


# -- ONNX --


def _onnx(weights: Weights, folder: Path) -> Export:
    file = folder / "model.onnx"
    print("writing ONNX, which takes some seconds", file=sys.stderr)
    onnx.write(weights.vit, file)

    def reader() -> tuple[str, Outputs]:
        import onnxruntime

        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

        def outputs(images: Tensor) -> tuple[Tensor, Tensor]:
            cls, patches = session.run(["cls", "patches"], {"images": images.numpy()})
            return torch.from_numpy(cls), torch.from_numpy(patches)

        return f"onnxruntime {onnxruntime.__version__}", outputs

    usage = """
```python
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
cls, patches = session.run(["cls", "patches"], {"images": images})  # float32, any batch, height and width
```
"""
    return Export("onnx", usage, reader)


def _refuse_class_attention(weights: Weights, program: str) -> None:
    if weights.vit.class_attention:
        raise UserError(
            f"{program} has no ViT whose [CLS] is made by class attention at the end; export to onnx or safetensors"
        )


NETWORK_FORMATS = ("timm", "safetensors")  # which take a network that is no ViT too
WRITERS: dict[str, Callable[[Weights, Path], Export]] = {
    "timm": _timm,
    "huggingface": _huggingface,
    "onnx": _onnx,
    "safetensors": _safetensors,
}
