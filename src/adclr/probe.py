"""What the teacher scores during training: kNN on labelled images, matching of patches on images without labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from adclr import distributed
from adclr.collection import open_source
from adclr.evals import knn, matching
from adclr.labelled import Labelled, open_labelled
from adclr.optim import Schedules
from adclr.runs import Run
from adclr.settings import Settings
from adclr.signals import Signals
from adclr.sources import Source
from adclr.vit import VisionTransformer
from adclr.weights import Weights

NAMES = ("knn_top1", "patch_matching")  # one of which every probe has


@dataclass(frozen=True)
class Images:
    """What the probes look at."""

    labelled: Labelled | None
    held_out: Source | None


def open_images(settings: Settings) -> Images | None:
    """None if no probe is wanted."""
    labelled = settings.probe.data or (settings.data.path if settings.data.labels else None)
    if not labelled and not settings.probe.held_out:
        return None
    held_out = open_source(settings.probe.held_out) if settings.probe.held_out else None
    return Images(open_labelled(labelled) if labelled else None, held_out)


class Probe:
    """`scores = probe(signals)` in all processes; the first one takes them while the others wait."""

    def __init__(
        self,
        settings: Settings,
        run: Run,
        schedules: Schedules,
        vit: Callable[[], VisionTransformer],  # whole; all processes ask
        images: Images,
        device: torch.device,
    ) -> None:
        self.run, self.images, self.device, self.k = run, images, device, settings.probe.k
        self.total_steps, data = schedules.total_steps, settings.data
        self.every = settings.probe.every_epochs * schedules.steps_per_epoch
        self.vit, self.data = vit, data
        common: dict[str, Any] = {
            "batch_size": settings.probe.images_at_once,
            "num_workers": settings.data.num_workers or None,
        }
        self.knn, self.matching = knn.Settings(k=(self.k,), **common), matching.Settings(**common)

    def due(self, done: int) -> bool:
        return done % self.every == 0 or done == self.total_steps

    def missing(self, start: int) -> bool:
        """Whether a run that begins here must be scored first: a new one, and one that was stopped in a probe."""
        rows = [row for row in self.run.rows("metrics.jsonl") if row.get("step") == start]
        return self.due(start) and not any(name in row for row in rows for name in NAMES)

    def __call__(self, signals: Signals) -> dict[str, float]:
        """Nothing if a signal came."""
        teacher = Weights(self.vit(), self.data.mean, self.data.std, self.data.max_value)
        scores = signals.cut_short(lambda: self._score(teacher)) if distributed.is_main() else None
        distributed.barrier()
        return scores or {}

    def _score(self, teacher: Weights) -> dict[str, float]:
        scores, images = {}, self.images
        if images.labelled is not None:
            found = knn.score(teacher, images.labelled, self.knn, self.device, show=False)
            scores["knn_top1"] = found[f"knn_top1_k{min(self.k, int(found['num_train']))}"]
        if images.held_out is not None:
            found = matching.score(teacher, images.held_out, self.matching, self.device, show=False)
            scores["patch_matching"] = found["patch_matching"]
        return scores


def summary(rows: list[dict[str, Any]]) -> str | None:
    """What the scores without labels say at the end, if there were any."""
    scores = [row["patch_matching"] for row in rows if "patch_matching" in row]
    if len(scores) < 2:
        return None
    verdict = "it has learned" if scores[-1] > scores[0] else "no sign that it has learned"
    share = f"{scores[-1]:.1f} % of cases, {scores[0]:.1f} % untrained"
    return f"patches find their place in another view in {share}: {verdict}"
