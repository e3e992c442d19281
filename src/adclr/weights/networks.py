"""Networks that are no ViT of this program: those of timm by name, and what a user's function returns.

Only a network of timm is built again from a stored name. A function is called when the user names it on the command
line or in Python, never because a file does.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from adclr.config import parsing
from adclr.config.parsing import Deviation, Positive, Ratio, Section, Side, UserError
from adclr.model.feature_network import FeatureNetwork
from adclr.system.optional import require
from adclr.weights.tensors import fit_tensors

TIMM = "timm:"
MAX_SIDE = 1024  # pixels of an image that a network is tried on, which takes memory


class NetworkDescription(Section):
    """The content of backbone.json where the backbone is no ViT of this program."""

    network: str = Field(description="timm:NAME or MODULE:FUNCTION")
    input_size: tuple[Side, Side] = Field((224, 224), description="height and width of the images in training")
    num_channels: Annotated[int, Field(ge=1, le=256)] = Field(3, description="of the images")
    mean: tuple[Ratio, ...] = Field(description="of each channel, of 1")
    std: tuple[Deviation, ...] = Field(description="of each channel, of 1")
    max_value: Positive | None = Field(None, description="see data.max_value")


class _TimmFeatures(nn.Module):
    """A network of timm without its classifier, as pooled features and the last map."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"  # as Swin's maps are

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        model = cast(Any, self.model)
        features = model.forward_features(images)
        pooled = model.forward_head(features, pre_logits=True)
        return pooled, features.permute(0, 3, 1, 2) if self.channels_last else features


class _UserFeatures(nn.Module):
    """A user's network, which returns a map B×D×rows×columns, or (pooled B×E, map)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(images)
        pooled, features = output if isinstance(output, tuple) and len(output) == 2 else (None, output)
        if not isinstance(features, Tensor) or features.ndim != 4 or not features.is_floating_point():
            raise TypeError(f"it returns {_describe(output)}")
        if len(features) != len(images):
            raise TypeError(f"it returns a map of {len(features)} images for {len(images)}")
        if pooled is None:
            pooled = features.mean(dim=(2, 3))
        if not isinstance(pooled, Tensor) or pooled.ndim != 2 or len(pooled) != len(images):
            raise TypeError(f"its first output is {_describe(pooled)}")
        return pooled, features


def _describe(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {list(output.shape)} and type {str(output.dtype).removeprefix('torch.')}"
    if isinstance(output, list | tuple):
        return f"a {type(output).__name__} of {len(output)}"
    return f"an object of type {type(output).__name__}"


def build_network(name: str, input_size: tuple[int, int], num_channels: int = 3, train: bool = True) -> FeatureNetwork:
    """Return the new network of timm:NAME or MODULE:FUNCTION.

    One that is to be trained is tried on noise, and parameters that have no influence on its features are frozen.
    """
    model = _timm_model(name.removeprefix(TIMM), num_channels) if name.startswith(TIMM) else _user_model(name)
    if max(input_size) > MAX_SIDE:
        size = "x".join(map(str, input_size))
        raise UserError(f"{name} takes images of at most {MAX_SIDE} pixels here, not of {size}; choose a smaller size")
    features = _TimmFeatures(model) if name.startswith(TIMM) else _UserFeatures(model)
    needs = "features are needed as a map, batch x width x rows x columns, or as a vector and a map"
    try:
        network = FeatureNetwork(features, name, input_size, num_channels)
        if not train:
            return network.eval()
        state = {key: value.clone() for key, value in network.state_dict().items()}
        with torch.random.fork_rng(devices=[]):
            tokens = network.train()(torch.randn(2, num_channels, *input_size))
    except UserError:
        raise
    except Exception as error:  # of someone else's code, which fails in any way
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"the student {name} cannot be used: {reason}; its {needs}") from None
    if not tokens.cls.isfinite().all() or not tokens.patches.isfinite().all():
        raise UserError(f"the student {name} gives features that are not finite for an image of noise; fix it")
    if not tokens.cls.requires_grad or not tokens.patches.requires_grad:
        raise UserError(f"the student {name} has features without a gradient, so nothing would be learned; fix it")
    _freeze_unused(network, tokens.cls.sum() + tokens.patches.sum())
    network.load_state_dict(state)  # with the running statistics that it had
    return network


def rebuild_network(network: FeatureNetwork) -> FeatureNetwork:
    """Return a network of the same architecture with new weights."""
    return build_network(network.name, network.input_size, network.num_channels, train=False)


def _freeze_unused(network: nn.Module, output: Tensor) -> None:
    """Freeze parameters without influence: several processes would wait for their gradients."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(output, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_(gradient is not None)


def _timm_model(name: str, num_channels: int) -> nn.Module:
    timm = require("timm", "timm", f"{TIMM}{name}")
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=1, cutoff=0.5)
        hint = f"did you mean {TIMM}{near[0]}?" if near else "timm.list_models() lists them"
        raise UserError(f"timm has no model {name!r}; {hint}")
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=0, in_chans=num_channels)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"timm cannot make {name!r} ({str(error).rstrip('.')}); choose another student") from None
    if not all(hasattr(model, method) for method in ("forward_features", "forward_head")):
        raise UserError(f"timm's {name} has no features apart from its classifier; choose another student")
    if hasattr(model, "num_prefix_tokens"):
        raise UserError(f"timm's {name} is a ViT, whose features are no map; choose a student by model.size instead")
    return model


def _user_model(name: str) -> nn.Module:
    module_name, _, function_name = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:  # as `python -m` has it, so that a file beside the user is taken
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"the student's module {module_name} cannot be imported ({error}); start adclr in the folder that holds "
            f"{module_name.split('.')[0]}.py, or install it"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"{module_name} has no function {function_name}; check distill.student={name}")
    try:
        model = function()
    except Exception as error:  # of the user's code
        raise UserError(f"{name} fails ({type(error).__name__}: {error}); fix it, or check its arguments") from None
    if not isinstance(model, nn.Module):
        raise UserError(f"{name} returns {_describe(model)}, not a torch.nn.Module; fix it")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"{name} returns a module without parameters to train; fix it")
    return model


def network_state(network: FeatureNetwork) -> dict[str, Tensor]:
    """Return the state by the network's own names, which are timm's for a network of timm."""
    return {
        name.removeprefix("network.model."): tensor.detach().cpu().contiguous()
        for name, tensor in network.state_dict().items()
    }


def restore_network(values: dict[str, Any], tensors: dict[str, Tensor], path: str) -> tuple[FeatureNetwork, Any]:
    """Return the network that a backbone.json describes, with these tensors, and the description."""
    try:
        description = parsing.validate_settings(NetworkDescription, values)
    except UserError as error:
        raise UserError(f"the description of {path} does not fit any network: {error}; restore it") from None
    if not description.network.startswith(TIMM):
        raise UserError(
            f"{path} is of the network of your function {description.network}, which is not called because a file "
            "names it; call it yourself and load backbone.safetensors into what it returns"
        )
    if not len(description.mean) == len(description.std) == description.num_channels:
        raise UserError(f"the description of {path} has another number of means than of channels; restore it")
    with torch.device("meta"):  # no memory for a network that a file names but does not hold
        expected = _timm_model(description.network.removeprefix(TIMM), description.num_channels).state_dict()
    fit_tensors(expected, tensors, path)
    network = build_network(description.network, description.input_size, description.num_channels, train=False)
    network.network.model.load_state_dict(tensors)  # type: ignore[union-attr]
    return network, description
