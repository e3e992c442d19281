"""Pretraining from given weights (`model.init`): their settings, loading them, a check that features do not decline.

Student and teacher start from the same backbone, with new heads. While the heads warm up the backbone is frozen: the
gradients of a random head would only harm it. The weights are read when settings are built and at step 0, never again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor

from adclr.config.parsing import VIT_SIZES, UserError
from adclr.config.settings import Settings
from adclr.data.key_order import smallest
from adclr.data.random_draws import mix
from adclr.data.sources import Source, Subset
from adclr.evals.features import extract_features
from adclr.model.blocks import LayerScale
from adclr.model.effective_rank import effective_rank
from adclr.model.method import ADCLR
from adclr.system import distributed
from adclr.system.files import write_atomically
from adclr.system.runs import Run
from adclr.training.journal import Probe
from adclr.training.schedules import Schedules
from adclr.training.signals import Signals
from adclr.weights.backbone import Weights, load_weights
from adclr.weights.tensors import fit_tensors, read_tensors

SHAPE = ("model.dim", "model.depth", "model.num_heads")
# Settings that the shapes of the tensors fix; and those of KEPT, which are taken over unless the user sets them.
FIXED = (
    *SHAPE,
    "model.patch_size",
    "model.num_registers",
    "model.num_channels",
    "model.class_attention",
    "model.position_embedding",
    "model.mlp",
)
RULES = ("model.query_keys", "model.query_read_only_blocks", "model.position_resampling", "model.norm_eps")
KEPT = ("model.layer_scale", *RULES, "data.mean", "data.std", "data.max_value")
FEATURES = "start_features.safetensors"  # in a run: features of a few images at the start, and their keys
ANCHOR = "anchor.safetensors"  # in a run: the backbone of model.init, where method.anchor_weight is set
NUM_IMAGES = 256  # whose features are compared
KNN_DROP = 1.0  # points below the start that give a warning
MIN_COSINE = 0.5  # mean cosine of features with those at the start
MIN_RANK = 0.5  # effective rank, as a share of that at the start


def _settings_of_weights(weights: Weights) -> dict[str, Any]:
    """Return the settings that weights determine, by full name."""
    vit = weights.vit
    settings = {path: getattr(vit, path.removeprefix("model.")) for path in (*FIXED, *RULES)}
    has_layer_scale = isinstance(getattr(vit.blocks[0], "ls1", None), LayerScale)
    settings["model.layer_scale"] = 1.0 if has_layer_scale else None
    return settings | {"data.mean": weights.mean, "data.std": weights.std, "data.max_value": weights.max_value}


def adopt_settings(init: str, overrides: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the settings that weights determine and the user does not set, by full name, and a sentence on them."""
    settings = _settings_of_weights(load_weights(init, partial=None))
    size, patch = overrides.get("model.size"), settings["model.patch_size"]
    requested = dict(zip(SHAPE, VIT_SIZES.get(str(size), ()), strict=False)) | dict(overrides)
    for path in FIXED:
        if requested.get(path) is not None and requested[path] != settings[path]:
            name = path if path in overrides else f"model.size={size}, that is {path}"
            raise UserError(
                f"{init} is of {path}={settings[path]}, but {name}={requested[path]} was asked for; "
                "leave that out or use other weights"
            )
    scale = "model.layer_scale"
    if scale in overrides and (overrides[scale] is None) != (settings[scale] is None):
        raise UserError(
            f"{init} has {'no' if settings[scale] is None else 'a'} LayerScale; leave out {scale}={overrides[scale]}"
        )
    dim, depth, heads = (settings[path] for path in SHAPE)
    reason = f"the model is that of {init}: width {dim}, {depth} blocks, {heads} heads, patches of {patch}"
    sizes = [name for name, shape in VIT_SIZES.items() if shape == (dim, depth, heads)]
    if sizes and not {"model.size", *SHAPE} & set(overrides):
        settings |= {"model.size": sizes[0]} | dict.fromkeys(SHAPE)
    return {path: value for path, value in settings.items() if path not in overrides}, reason


def load_init(method: ADCLR, settings: Settings) -> str:
    """Load the weights of `model.init` into student and teacher, positions resampled; return their fingerprint."""
    assert settings.model.init is not None
    weights, path = load_weights(settings.model.init, partial=None), settings.model.init
    anchors = [] if method.anchor is None else [method.anchor]
    for backbone in (method.student.backbone, method.teacher.backbone, *anchors):
        initial = backbone.state_dict()
        state = weights.vit.state_dict()
        if "mask_token" in initial:  # which the weights do not have
            state["mask_token"] = initial["mask_token"]
        if weights.vit.pos_embed is not None:
            with torch.no_grad():
                state["pos_embed"] = weights.vit.positions(backbone.grid).clone()
        fit_tensors(initial, state, path)
        if (weights.vit.num_heads, weights.vit.patch_size) != (backbone.num_heads, backbone.patch_size):
            raise UserError(f"{path} has other heads or patches than the settings; use the weights it began with")
        backbone.load_state_dict(state)
    return weights.fingerprint()


def save_anchor(method: ADCLR, run: Run) -> None:
    """Write the weights of the anchor into the run, which reads them when it is resumed."""
    if method.anchor is not None:
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in method.anchor.state_dict().items()}
        write_atomically(run.path / ANCHOR, save(state))


def load_anchor(method: ADCLR, run: Run) -> None:
    """Read the weights of the anchor from a run that is resumed."""
    if method.anchor is None:
        return
    file = run.path / ANCHOR
    if not file.exists():
        raise UserError(f"{file} is missing, which holds the weights of the anchor; restore it")
    state = read_tensors(file)
    fit_tensors(method.anchor.state_dict(), state, file)
    method.anchor.load_state_dict(state)


class ForgettingProbe:
    """Checks whether features decline from those at the start: by kNN where there are labels, else by drift and rank.

    Wraps the run's probe, if there is one. Features at the start are kept in the run directory.
    """

    def __init__(
        self,
        run: Run,
        settings: Settings,
        schedules: Schedules,
        teacher: Callable[[], Weights],  # called by all processes
        source: Source,
        device: torch.device,
        start: int,
        probe: Probe | None,
    ) -> None:
        self.run, self.settings, self.device, self.probe = run, settings, device, probe
        self.teacher = teacher
        chosen = smallest(source.keys, NUM_IMAGES, mix)
        self.source = Subset(source, np.sort(chosen))
        self.every, self.total = settings.probe.every_epochs * schedules.steps_per_epoch, schedules.total_steps
        self.at_start = start == 0
        self.first: dict[str, float] = {}  # scores at the start
        self.features: dict[int, Tensor] = {}  # at the start, by the key of the image
        self.warned = False
        if not self.at_start and distributed.is_main():
            self._load_start()

    def _load_start(self) -> None:
        """Read the features and scores that the run had at the start."""
        for row in self.run.rows("metrics.jsonl"):
            if row.get("step") == 0:
                self.first |= {name: value for name, value in row.items() if name in ("knn_top1", "effective_rank")}
        file = self.run.path / FEATURES
        if file.exists():
            tensors = read_tensors(file)
            self.features = dict(zip(tensors["keys"].tolist(), tensors["features"], strict=True))
            # measured again, since an earlier version of the program computed it by another formula
            self.first["effective_rank"] = effective_rank(tensors["features"].double()).item()

    def due(self, done: int) -> bool:
        """Return whether features are compared after so many steps."""
        return done % self.every == 0 or done == self.total

    def missing(self, start: int) -> bool:
        """Return whether a run must be scored before it continues."""
        rows = self.run.rows("metrics.jsonl")
        return self.due(start) and not any(row.get("step") == start and "effective_rank" in row for row in rows)

    def __call__(self, signals: Signals) -> dict[str, float]:
        """Return the scores of the probe and of the features; none if a signal came."""
        scores = self.probe(signals) if self.probe is not None else {}
        teacher = self.teacher()
        if distributed.is_main() and (scores or self.probe is None):
            feature_scores = signals.interruptible(lambda: self._score_features(teacher))
            scores = scores | feature_scores if feature_scores else {}
            if feature_scores and self.at_start:
                self.first, self.at_start = dict(scores), False
        distributed.barrier()
        return scores

    def _score_features(self, teacher: Weights) -> dict[str, float]:
        """Return the effective rank of the features and their mean cosine with those at the start."""
        data, vit = self.settings.data, teacher.vit
        workers, batch = data.num_workers or None, self.settings.probe.images_at_once
        extracted = extract_features(
            teacher, self.source, lambda images: vit(images).cls, self.device, batch, workers, show=False
        )
        features, keys = extracted.values, self.source.keys[extracted.indices].view(np.int64)
        if self.at_start:
            tensors = {"keys": torch.from_numpy(keys.copy()), "features": features}
            write_atomically(self.run.path / FEATURES, save(tensors))
            self.features = dict(zip(keys.tolist(), features, strict=True))
        shared = [index for index, key in enumerate(keys.tolist()) if key in self.features]
        scores = {"effective_rank": effective_rank(features.double()).item()}
        if shared:  # none are, on other images or where the file was lost
            before = torch.stack([self.features[int(keys[index])] for index in shared])
            scores["drift_cosine"] = F.cosine_similarity(features[shared].double(), before.double()).mean().item()
        return scores

    def warning(self, scores: dict[str, float]) -> str | None:
        """Return a warning the first time that features have declined."""
        text = None if self.warned or not scores else describe_decline(self.first, scores)
        self.warned = self.warned or text is not None
        return text


def describe_decline(first: Mapping[str, float], scores: Mapping[str, float]) -> str | None:
    """Return a sentence if scores are worse than the first: by kNN if there is one, else by rank and drift."""
    remedy = "lower optim.lr, raise method.momentum or freeze the backbone for longer"
    if "knn_top1" in scores:
        before, now = first.get("knn_top1", 0.0), scores["knn_top1"]
        if now < before - KNN_DROP:
            return f"kNN is {now:.1f} % where the weights it began with had {before:.1f} %; {remedy}"
        return None
    before, now = first.get("effective_rank", 0.0), scores.get("effective_rank", 0.0)
    if now < MIN_RANK * before:
        return f"the effective rank of [CLS] is {now:.1f}, and was {before:.1f} at the start; {remedy}"
    cosine = scores.get("drift_cosine", 1.0)
    if cosine < MIN_COSINE:
        return f"the features differ much from those at the start: their mean cosine is {cosine:.2f}; {remedy}"
    return None
