"""Scores of the teacher during training: kNN on labeled images, in-context segmentation on labeled pixels, and
matching of images and patches without labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.data.collection import open_source
from adclr.data.sets.classes import LabeledImages, open_labeled
from adclr.data.sets.pixels import Segmented, check, open_segmented
from adclr.data.sources import Source
from adclr.evals import incontext, knn, matching
from adclr.evals.features import CenterCrops
from adclr.system import distributed
from adclr.system.runs import Run
from adclr.training.schedules import Schedules
from adclr.training.signals import Signals
from adclr.weights.backbone import Weights, load_weights

# names in metrics.jsonl of scores without labels; the health measures have ranks of the same names
HELD_OUT = {"rank_cls": "held_out_rank_cls", "rank_patches": "held_out_rank_patches", "num_images": "held_out_images"}
NUM_OWN_IMAGES = 256  # by which a run without a probe is judged in the end
SCORE_NAMES = ("knn_top1", "patch_matching", "incontext_miou")  # one of which every probe has


@dataclass(frozen=True)
class Images:
    """The images of the probes."""

    labeled: LabeledImages | None
    held_out: Source | None
    segmented: Segmented | None


def open_images(settings: Settings) -> Images | None:
    """Return the images of the probes; None if the settings name none."""
    labeled = settings.probe.data or (settings.data.path if settings.data.labels else None)
    held_out, pixels = settings.probe.held_out, settings.probe.pixels
    if not labeled and not held_out and not pixels:
        return None
    segmented = open_segmented(pixels) if pixels else None
    if segmented is not None:
        check(segmented, settings.data.num_workers or None, show=distributed.local_rank() == 0)
    source = open_source(held_out) if held_out else None
    allowed = settings.data.allow_damaged_shards and not settings.probe.data  # the setting is about the training images
    return Images(open_labeled(labeled, allowed) if labeled else None, source, segmented)


class Probe:
    """`scores = probe(signals)` in all processes; the first one computes them while the others wait."""

    def __init__(
        self,
        settings: Settings,
        run: Run,
        schedules: Schedules,
        teacher: Callable[[], Weights],  # called by all processes
        images: Images,
        device: torch.device,
    ) -> None:
        self.run, self.images, self.device, self.k = run, images, device, settings.probe.k
        self.total_steps, self.teacher = schedules.total_steps, teacher
        self.every = settings.probe.every_epochs * schedules.steps_per_epoch
        common: dict[str, Any] = {
            "batch_size": settings.probe.images_at_once,
            "num_workers": settings.data.num_workers or None,
        }
        # an unreadable image of the probe does not end a run
        self.knn = knn.Settings(k=(self.k,), max_unreadable=1.0, **common)
        self.crops: tuple[CenterCrops, CenterCrops] | None = None
        self.matching = matching.Settings(**common)
        self.dense = incontext.Settings(
            size=settings.views.global_size,
            memory_size=settings.probe.memory_size,
            num_workers=common["num_workers"],
            max_unreadable=1.0,
        )

    def due(self, done: int) -> bool:
        """Return whether the teacher is scored after so many steps."""
        return done % self.every == 0 or done == self.total_steps

    def missing(self, start: int) -> bool:
        """Return whether a run must be scored before it continues: a new one, and one that was stopped in a probe."""
        rows = [row for row in self.run.rows("metrics.jsonl") if row.get("step") == start]
        return self.due(start) and not any(name in row for row in rows for name in SCORE_NAMES)

    def __call__(self, signals: Signals) -> dict[str, float]:
        """Return the scores; none if a signal came."""
        alone, teacher = distributed.world_size() == 1, self.teacher()
        dense = {} if alone else self._score_pixels(teacher)  # in which all processes take part
        scores = signals.interruptible(lambda: self._score(teacher)) if distributed.is_main() else None
        distributed.barrier()
        return scores | dense if scores is not None else {}

    def warning(self, scores: dict[str, float]) -> str | None:  # noqa: ARG002
        """Return no warning: these scores have no threshold."""
        return None

    def _score(self, teacher: Weights) -> dict[str, float]:
        scores, images = {}, self.images
        if images.labeled is not None:
            # decoded once, and fast: features of 13 400 photographs (ViT-S, 224 pixels, H200) take 3.6 s in float32
            self.crops = self.crops or knn.open_crops(teacher, images.labeled, self.knn, self.device, cache=True)
            accuracy = knn.score(
                teacher, images.labeled, self.knn, self.device, show=False, crops=self.crops, fast=True
            )
            scores["knn_top1"] = accuracy[f"knn_top1_k{min(self.k, int(accuracy['num_train']))}"]
        if images.held_out is not None:
            matched = matching.score(teacher, images.held_out, self.matching, self.device, show=False)
            scores |= {HELD_OUT.get(name, name): matched[name] for name in (*matching.SCORES, "num_images")}
        return scores | (self._score_pixels(teacher) if distributed.world_size() == 1 else {})

    def _score_pixels(self, teacher: Weights) -> dict[str, float]:
        if self.images.segmented is None:
            return {}
        scores = incontext.score(teacher, self.images.segmented, self.dense, self.device, show=False)
        return {"incontext_miou": scores["incontext_miou"]}


def compare_on_own_images(
    settings: Settings, run: Run, source: Source, device: torch.device
) -> dict[str, float] | None:
    """Return how well a finished run without any probe matches views of its own images, and an untrained network.

    So a run for which nothing was set says in the end whether it has learned; None for another, or if none of these
    images can be read. Images that were not trained on would say more (`probe.held_out`).
    """
    if not settings.recipe.startswith("auto:") or settings.model.init is not None or open_images(settings) is not None:
        return None
    chosen = matching.Settings(
        max_images=NUM_OWN_IMAGES,
        batch_size=settings.probe.images_at_once,
        num_workers=settings.data.num_workers or None,
    )
    try:
        scores = matching.compare(load_weights(str(run.path)), source, chosen, device, show=False)
    except UserError:
        return None
    untrained = {name: scores[f"{name}_untrained"] for name in matching.SCORES}
    return scores | {"has_learned": float(matching.has_learned(untrained, scores))}


def _describe_matching(scores: Mapping[str, float]) -> str:
    """Return a sentence on views of images of the collection, beside those of an untrained network."""
    images, patches = (
        f"{scores[name]:.1f} % (untrained network: {scores[f'{name}_untrained']:.1f} %)"
        for name in ("image_matching", "patch_matching")
    )
    return (
        f"on {scores['num_images']:.0f} training images, the nearest neighbor of a view is the other view of its image "
        f"for {images}, and {patches} of the patches match the same location"
    )


def describe_own_images(scores: Mapping[str, float], finding: str | None = None) -> str:
    """Return a sentence on these scores; `finding` is the last on the run's health."""
    verdict = "it has learned" if scores["has_learned"] else "no clear sign that it has learned"
    if finding is not None:
        verdict = f"not to be trusted, because there is a {finding}"
    return f"{_describe_matching(scores)}: {verdict}"


def summarize(rows: list[dict[str, Any]], finding: str | None = None) -> str | None:
    """Return a sentence on the scores without labels, if there are any; `finding` is the last on the run's health."""
    scored = [row for row in rows if "image_matching" in row]
    if len(scored) < 2:
        return None
    first, last = (
        {name: row[HELD_OUT.get(name, name)] for name in (*matching.SCORES, "num_images")}
        for row in (scored[0], scored[-1])
    )
    verdict = "it has learned" if matching.has_learned(first, last) else "no clear sign that it has learned"
    if finding is not None:
        verdict = f"not to be trusted, because there is a {finding}"
    images, patches = (f"{last[n]:.1f} % (untrained: {first[n]:.1f} %)" for n in ("image_matching", "patch_matching"))
    return (
        f"on {last['num_images']:.0f} held-out images, the nearest neighbor of a view is the other view of its image "
        f"for {images}, and {patches} of the patches match the same location; effective rank of [CLS] "
        f"{last['rank_cls']:.1f} (untrained: {first['rank_cls']:.1f}): {verdict}"
    )
