"""Health of a run while it trains: metrics of the teacher on a few images; `report.health` interprets them."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from adclr.model.effective_rank import deviation, effective_rank
from adclr.model.losses import sinkhorn, soft_cross_entropy
from adclr.model.method import ADCLR, Branch, Kind
from adclr.model.named_tensors import Views
from adclr.model.vit import VisionTransformer
from adclr.report.health import Measures
from adclr.system import distributed

NUM_IMAGES = 64  # measured; by arithmetic 1 % of a step of 256 images with ViT-S/16, once in many steps
NUM_GAP_QUERIES = 4  # of each image, for `query_image_gap`


@torch.no_grad()
def measure_health(
    method: ADCLR,
    views: Views,
    temperature: float,
    dtype: torch.dtype | None,
    teacher: Branch | None = None,
    query_temperature: float | None = None,
) -> Measures:
    """Measure the teacher, or a whole copy of it, on the global views of the first images; waits for the device."""
    teacher = teacher or method.teacher
    crops = views.global_crops[:, :NUM_IMAGES]
    queries = None if views.queries is None else views.queries[:NUM_IMAGES]
    several = crops.shape[1] > 1  # images, so that one can be compared with another
    device = crops.device
    measures: dict[str, Tensor] = {}
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        tokens = teacher.backbone(crops.flatten(0, 1), None if queries is None else queries.repeat(2, 1, 1, 1, 1))
        logits = teacher.head(tokens.cls)
    measures |= _measure_targets(_targets(method, "global", logits, temperature))
    features = {"cls": tokens.cls, "patches": tokens.patches.flatten(0, 1)}
    if queries is not None and tokens.queries is not None:
        features["queries"] = tokens.queries.flatten(0, 1)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            if several and teacher.backbone.query_keys == "all":
                cls = tokens.cls[: crops.shape[1]]
                measures["queries_in_cls"] = _queries_in_cls(teacher.backbone, crops[0], queries, cls)
            elif several:
                temperature = query_temperature or temperature
                same_image, other_image = _query_losses(method, teacher, crops, queries, temperature)
                measures["query_image_gap"] = other_image - same_image
                measures["query_loss_of_log_k"] = same_image / math.log(method.num_prototypes)
                measures["query_temperature"] = torch.as_tensor(temperature, device=device)
    for kind, rows in features.items():
        rows = rows.float().nan_to_num()
        measures[f"deviation_{kind}"], measures[f"rank_{kind}"] = deviation(rows), effective_rank(rows)
    measures["teacher_student_distance"] = _weight_distance(method)
    numbers = torch.stack([value.float().nan_to_num() for value in measures.values()]).tolist()
    return dict(zip(measures, numbers, strict=True))


def _targets(method: ADCLR, loss: Kind, logits: Tensor, temperature: float) -> Tensor:
    """Return the target probabilities of one loss, ...×K as the logits."""
    if method.target == "sinkhorn":
        return sinkhorn(logits.flatten(0, -2), temperature).view(logits.shape)
    return method.center(loss).targets(logits, temperature)


def _measure_targets(targets: Tensor) -> dict[str, Tensor]:
    """Measure N×K probabilities: how much they depend on the image, and how many prototypes they use."""
    rows, prototypes = targets.shape
    mean = targets.mean(dim=0)
    entropy, mean_entropy = torch.special.entr(targets).sum(dim=-1).mean(), torch.special.entr(mean).sum()
    used = torch.zeros(prototypes, device=targets.device).index_fill_(0, targets.argmax(dim=-1), 1.0).sum()
    return {
        "target_entropy": entropy / math.log(prototypes),  # 1: uniform
        "target_kl": mean_entropy - entropy,  # mean KL from each target to the mean of them; 0: all the same
        "prototypes_used": used / min(rows, prototypes),
    }


def _queries_in_cls(backbone: VisionTransformer, crops: Tensor, queries: Tensor, cls: Tensor) -> Tensor:
    """Return the share of images whose `[CLS]`, with another image's queries, is nearer to that image's `[CLS]`."""
    swapped = F.normalize(backbone(crops, queries.roll(1, dims=0)).cls.float(), dim=-1)
    cls = F.normalize(cls.float(), dim=-1)
    to_image, to_queries = (swapped * cls).sum(dim=-1), (swapped * cls.roll(1, dims=0)).sum(dim=-1)
    return (to_queries > to_image).float().mean()


def _query_losses(
    method: ADCLR, teacher: Branch, crops: Tensor, queries: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of queries read in a view of their own image, and in one of another image, in nats.

    If both are the same the image does not matter: the query's own pixels, the same in both views, solve its loss. The
    target is the teacher's for the first view, the answers are its own in the second, at the student's temperature.
    """
    queries = queries[:, :NUM_GAP_QUERIES]

    def answer(crops: Tensor, queries: Tensor) -> Tensor:
        """Return B×Q×K logits."""
        tokens = teacher.backbone(crops, queries).queries
        assert tokens is not None
        return cast(Tensor, teacher.head(tokens))

    targets = _targets(method, "query", answer(crops[0], queries), temperature)
    same_image = answer(crops[1], queries)
    # row b of the rolled batch is query b - 1 read in image b; rolled back, query b read in image b + 1
    other_image = answer(crops[1], queries.roll(1, dims=0)).roll(-1, dims=0)
    tau = method.student_temperature
    return soft_cross_entropy(targets, same_image, tau).mean(), soft_cross_entropy(targets, other_image, tau).mean()


def _weight_distance(method: ADCLR) -> Tensor:
    """Return the norm of student - teacher weights, relative to that of the teacher's."""
    first = next(method.parameters())
    sums = torch.zeros(2, device=first.device)
    for student, teacher in zip(method.student.parameters(), method.teacher.parameters(), strict=True):
        a, b = distributed.local_tensor(student), distributed.local_tensor(teacher)
        sums += torch.stack([(a - b).square().sum(), b.square().sum()])
    if distributed.local_tensor(first) is not first:  # every process has a piece
        distributed.all_reduce_sum(sums)
    return (sums[0] / sums[1].clamp(min=1e-30)).sqrt()
