"""Pretraining that goes on from weights: where it begins, and a watch over what becomes of them.

Student and teacher start as the same backbone, with new heads. While the heads warm up the backbone stands still: the
gradients of a random head would only spoil it. W is read when settings are made and at step 0, never again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor

from adclr.config.sections import UserError
from adclr.config.settings import VIT_SIZES, Settings
from adclr.data.draws import mix
from adclr.data.sources import Source, Subset
from adclr.evals.features import extract
from adclr.model.blocks import LayerScale
from adclr.model.method import ADCLR
from adclr.system import distributed
from adclr.system.files import write_atomically
from adclr.system.runs import Run
from adclr.training.journal import Probe
from adclr.training.signals import Signals
from adclr.weights.backbone import Weights, load_weights
from adclr.weights.tensors import fit_tensors, read_tensors

SHAPE = ("model.dim", "model.depth", "model.num_heads")
# What the tensors are made for, so that nobody can ask for something else; and what goes with them unless one does.
FIXED = (*SHAPE, "model.patch_size", "model.num_registers", "model.num_channels")
RULES = ("model.query_keys", "model.query_read_only_blocks", "model.position_resampling", "model.norm_eps")
KEPT = ("model.layer_scale", *RULES, "data.mean", "data.std", "data.max_value")
FEATURES = "start_features.safetensors"  # in a run: what the weights made of a few images, and the keys of these
WATCHED = 256  # images
WORSE_KNN = 1.0  # points below the start that are worth a warning
LEAST_COSINE = 0.5  # of features with those at the start, in the mean
LEAST_RANK = 0.5  # of features, of their rank at the start


def facts(weights: Weights) -> dict[str, Any]:
    """The settings that weights decide."""
    vit = weights.vit
    found = {path: getattr(vit, path.removeprefix("model.")) for path in (*FIXED, *RULES)}
    first = vit.blocks[0]
    scaled = isinstance(getattr(first, "ls1", None), LayerScale)
    found |= {"model.layer_scale": 1.0 if scaled else None, "data.mean": weights.mean, "data.std": weights.std}
    return found | {"data.max_value": weights.max_value}


def settings_of(init: str, said: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The settings that weights decide and nobody else has, by full name, and a sentence about them."""
    found = facts(load_weights(init, partial=None))
    size, patch = said.get("model.size"), found["model.patch_size"]
    wanted = dict(zip(SHAPE, VIT_SIZES.get(str(size), ()), strict=False)) | dict(said)
    for path in FIXED:
        if wanted.get(path) is not None and wanted[path] != found[path]:
            name = path if path in said else f"model.size={size}, that is {path}"
            raise UserError(
                f"{init} is of {path}={found[path]}, but {name}={wanted[path]} was asked for; "
                "leave that out or use other weights"
            )
    scale = "model.layer_scale"
    if scale in said and (said[scale] is None) != (found[scale] is None):
        raise UserError(
            f"{init} has {'no' if found[scale] is None else 'a'} LayerScale; leave out {scale}={said[scale]}"
        )
    dim, depth, heads = (found[path] for path in SHAPE)
    told = f"the model is that of {init}: width {dim}, {depth} blocks, {heads} heads, patches of {patch}"
    named = [name for name, shape in VIT_SIZES.items() if shape == (dim, depth, heads)]
    if named and not {"model.size", *SHAPE} & set(said):
        found |= {"model.size": named[0]} | dict.fromkeys(SHAPE)
    return {path: value for path, value in found.items() if path not in said}, told


def begin(method: ADCLR, settings: Settings) -> str:
    """Gives student and teacher the backbone of the weights, positions resampled if need be; their fingerprint."""
    assert settings.model.init is not None
    weights, path = load_weights(settings.model.init, partial=None), Path(settings.model.init)
    for branch in (method.student, method.teacher):
        backbone = branch.backbone
        own = backbone.state_dict()
        state = weights.vit.state_dict() | {name: own[name] for name in ("mask_token",) if name in own}  # which is new
        with torch.no_grad():
            state["pos_embed"] = weights.vit.positions(backbone.grid).clone()
        fit_tensors(own, state, path)
        if (weights.vit.num_heads, weights.vit.patch_size) != (backbone.num_heads, backbone.patch_size):
            raise UserError(f"{path} is of other heads or patches than the settings; use the weights it began with")
        backbone.load_state_dict(state)
    return weights.fingerprint()


def effective_rank(features: Tensor) -> float:
    """In how many directions features spread: e to the entropy of their singular values, centred, n×D."""
    features = features.double()
    values = torch.linalg.svdvals(features - features.mean(dim=0))
    shares = values / values.sum().clamp(min=1e-30)
    return math.exp(torch.special.entr(shares).sum().item())


class Watch:
    """Looks whether features get worse than those it began with, with labels by kNN, without by what is left of them.

    Takes the place of the probe, if there is one. Features at the start are kept in the run.
    """

    def __init__(
        self,
        run: Run,
        settings: Settings,
        teacher: Callable[[], Weights],  # whole; all processes ask
        source: Source,
        device: torch.device,
        steps: tuple[int, int],  # of an epoch, of all
        start: int,
        probe: Probe | None,
    ) -> None:
        self.run, self.settings, self.device, self.probe = run, settings, device, probe
        self.teacher = teacher
        chosen = np.argsort(mix(source.keys), kind="stable")[:WATCHED]
        self.source = Subset(source, np.sort(chosen))
        self.every, self.total = settings.probe.every_epochs * steps[0], steps[1]
        self.fresh = start == 0
        self.first: dict[str, float] = {}  # scores at the start
        self.features: dict[int, Tensor] = {}  # at the start, by the key of the image
        self.warned = False
        if not self.fresh and distributed.is_main():
            self._recall()

    def _recall(self) -> None:
        file = self.run.path / FEATURES
        if file.exists():
            kept = read_tensors(file)
            self.features = dict(zip(kept["keys"].tolist(), kept["features"], strict=True))
        for row in self.run.rows("metrics.jsonl"):
            if row.get("step") == 0:
                self.first |= {name: value for name, value in row.items() if name in ("knn_top1", "effective_rank")}

    def due(self, done: int) -> bool:
        return done % self.every == 0 or done == self.total

    def missing(self, start: int) -> bool:
        rows = self.run.rows("metrics.jsonl")
        return self.due(start) and not any(row.get("step") == start and "effective_rank" in row for row in rows)

    def __call__(self, signals: Signals) -> dict[str, float]:
        scores = self.probe(signals) if self.probe is not None else {}
        teacher = self.teacher()
        if distributed.is_main() and (scores or self.probe is None):
            seen = signals.cut_short(lambda: self._look(teacher))
            scores = scores | seen if seen else {}
            if seen and self.fresh:
                self.first, self.fresh = dict(scores), False
        distributed.barrier()
        return scores

    def _look(self, teacher: Weights) -> dict[str, float]:
        data, vit = self.settings.data, teacher.vit
        workers, at_once = data.num_workers or None, self.settings.probe.images_at_once
        found = extract(teacher, self.source, lambda images: vit(images).cls, self.device, at_once, workers, show=False)
        keys = self.source.keys[found.kept].view(np.int64)
        if self.fresh:
            tensors = {"keys": torch.from_numpy(keys.copy()), "features": found.values}
            write_atomically(self.run.path / FEATURES, save(tensors))
            self.features = dict(zip(keys.tolist(), found.values, strict=True))
        shared = [place for place, key in enumerate(keys.tolist()) if key in self.features]
        scores = {"effective_rank": effective_rank(found.values)}
        if shared:  # none is, on other images or where the file was lost
            before = torch.stack([self.features[int(keys[place])] for place in shared])
            now = found.values[shared]
            scores["drift_cosine"] = F.cosine_similarity(now.double(), before.double()).mean().item()
        return scores

    def warning(self, scores: dict[str, float]) -> str | None:
        """Once, when features have become worse."""
        text = None if self.warned or not scores else judge(self.first, scores)
        self.warned = self.warned or text is not None
        return text


def judge(first: Mapping[str, float], scores: Mapping[str, float]) -> str | None:
    """A sentence if scores are worse than the first: by kNN if there is one, else by what is left of the features."""
    remedy = "lower optim.lr, raise method.momentum or freeze the backbone for longer"
    if "knn_top1" in scores:
        before, now = first.get("knn_top1", 0.0), scores["knn_top1"]
        if now < before - WORSE_KNN:
            return f"kNN is {now:.1f} % where the weights it began with had {before:.1f} %; {remedy}"
        return None
    before, now = first.get("effective_rank", 0.0), scores.get("effective_rank", 0.0)
    if now < LEAST_RANK * before:
        return f"features spread in {now:.1f} directions where they began with {before:.1f}; {remedy}"
    cosine = scores.get("drift_cosine", 1.0)
    if cosine < LEAST_COSINE:
        return f"little is left of the features it began with, their cosine is {cosine:.2f} in the mean; {remedy}"
    return None
