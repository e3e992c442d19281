"""Is it learning, is it collapsing: measures of the teacher on a few images, and the words for the user.

Two collapses are DINO's own: every image gets the same target, either all prototypes alike (uniform) or the same few
(constant). In a third, features of different images differ along few directions only (dimensional). The fourth is of
attention both ways (`model.query_keys=all`): `[CLS]` reads the queries, which both views share, and not the image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from adclr.model.effective_rank import deviation, effective_rank
from adclr.model.losses import sinkhorn, soft_cross_entropy
from adclr.model.method import ADCLR, Branch
from adclr.model.views import Views
from adclr.model.vit import VisionTransformer
from adclr.system import distributed

Measures = dict[str, float]

IMAGES = 64  # that are looked at; by arithmetic 1 % of a step of 256 images with ViT-S/16, once in many steps
GAP_QUERIES = 4  # of each image, whose K logits are looked at
IN_A_ROW = 3  # measures that must agree before anything is said
# Below this share of what an untrained teacher's targets tell of an image, or below so many nats, they tell nothing. An
# untrained ViT-S/16 has 0.15 nats, healthy small runs stayed above 0.3 of theirs, forced collapses fell below 0.005.
TOLD, NATS = 0.02, 3e-4
UNIFORM = 0.8  # share of ln K above which a target that tells nothing is called uniform
RANK = 0.1  # of the untrained teacher's
DIRECTIONS = 1.2  # an effective rank below which features differ in one direction only
LEAK = 0.5


class Finding(NamedTuple):
    name: str
    words: str  # what was seen, and what to change


@torch.no_grad()
def measure(
    method: ADCLR,
    views: Views,
    temperature: float,
    dtype: torch.dtype | None,
    teacher: Branch | None = None,
    query_temperature: float | None = None,
) -> Measures:
    """Of the teacher, or a whole copy of it, on the global views of a batch's first images; waits for the device."""
    teacher = teacher or method.teacher
    crops = views.global_crops[:, :IMAGES]
    queries = None if views.queries is None else views.queries[:IMAGES]
    device = crops.device
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        both = None if queries is None else queries.repeat(2, 1, 1, 1, 1)
        tokens = teacher.backbone(crops.flatten(0, 1), both)
        logits = teacher.head(tokens.cls)
    if method.target == "sinkhorn":
        targets = sinkhorn(logits, temperature)
    else:
        targets = method.center("global").targets(logits, temperature)
    found = _of_targets(targets)
    kinds = {"cls": tokens.cls, "patches": tokens.patches.flatten(0, 1)}
    if tokens.queries is not None:
        kinds["queries"] = tokens.queries.flatten(0, 1)
        if teacher.backbone.query_keys == "all" and queries is not None and crops.shape[1] > 1:
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                found["queries_in_cls"] = _leak(teacher.backbone, crops[0], queries, tokens.cls[: crops.shape[1]])
        elif queries is not None and crops.shape[1] > 1:
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                gap = _query_image_gap(method, teacher, crops, queries, query_temperature or temperature)
            found["query_image_gap"] = gap
    for kind, features in kinds.items():
        features = features.float().nan_to_num()
        found[f"deviation_{kind}"], found[f"rank_{kind}"] = deviation(features), effective_rank(features)
    found["teacher_student_distance"] = _distance(method)
    numbers = torch.stack([value.float().nan_to_num() for value in found.values()]).tolist()
    return dict(zip(found, numbers, strict=True))


def _of_targets(targets: Tensor) -> dict[str, Tensor]:
    """n×K probabilities: how much they tell of which image they are of, and how many prototypes they name."""
    rows, prototypes = targets.shape
    mean = targets.mean(dim=0)
    entropy, of_mean = torch.special.entr(targets).sum(dim=-1).mean(), torch.special.entr(mean).sum()
    used = torch.zeros(prototypes, device=targets.device).index_fill_(0, targets.argmax(dim=-1), 1.0).sum()
    return {
        "target_entropy": entropy / math.log(prototypes),  # 1: uniform
        "target_kl": of_mean - entropy,  # mean KL from each target to the mean of them; 0: all the same
        "prototypes_used": used / min(rows, prototypes),
    }


def _leak(backbone: VisionTransformer, crops: Tensor, queries: Tensor, own: Tensor) -> Tensor:
    """The share of images whose `[CLS]`, given another image's queries, becomes more like that image's own."""
    other = backbone(crops, queries.roll(1, dims=0)).cls
    unit, own = F.normalize(other.float(), dim=-1), F.normalize(own.float(), dim=-1)
    to_image, to_queries = (unit * own).sum(dim=-1), (unit * own.roll(1, dims=0)).sum(dim=-1)
    return (to_queries > to_image).float().mean()


def _query_image_gap(method: ADCLR, teacher: Branch, crops: Tensor, queries: Tensor, temperature: float) -> Tensor:
    """Nats by which the loss of a query rises when it is read in another image's view instead of its own image's.

    Near 0 the image does not matter: the query's own pixels, the same in both views, solve its loss. The target is the
    teacher's for the first view, the answers are its own in the second, at the student's temperature.
    """
    queries = queries[:, :GAP_QUERIES]

    def answers(crops: Tensor, queries: Tensor) -> Tensor:
        """B×Q×K"""
        tokens = teacher.backbone(crops, queries).queries
        assert tokens is not None
        return cast(Tensor, teacher.head(tokens))

    logits = answers(crops[0], queries)
    if method.target == "sinkhorn":
        targets = sinkhorn(logits.flatten(0, 1), temperature).view(logits.shape)
    else:
        targets = method.center("query").targets(logits, temperature)
    own = answers(crops[1], queries)
    # row b of the rolled batch is query b - 1 read in image b; rolled back, query b read in image b + 1
    other = answers(crops[1], queries.roll(1, dims=0)).roll(-1, dims=0)
    tau = method.student_temperature
    return (soft_cross_entropy(targets, other, tau) - soft_cross_entropy(targets, own, tau)).mean()


def _distance(method: ADCLR) -> Tensor:
    """Of the student's weights from the teacher's, of the length of those."""
    first = next(method.parameters())
    sums = torch.zeros(2, device=first.device)
    for student, teacher in zip(method.student.parameters(), method.teacher.parameters(), strict=True):
        a, b = distributed.local(student), distributed.local(teacher)
        sums += torch.stack([(a - b).square().sum(), b.square().sum()])
    if distributed.local(first) is not first:  # every process has a piece
        distributed.sum_(sums)
    return (sums[0] / sums[1].clamp(min=1e-30)).sqrt()


def diagnose(rows: Sequence[Measures], in_a_row: int = IN_A_ROW) -> Finding | None:
    """What is wrong after some measures, the first of them of the untrained teacher; None if nothing is.

    The last `in_a_row` measures must agree.
    """
    if len(rows) <= in_a_row:
        return None
    first, last = rows[0], rows[-in_a_row:]

    def all_below(name: str, limit: float) -> bool:
        return all(name in row and row[name] < limit for row in last)

    if all("queries_in_cls" in row and row["queries_in_cls"] > LEAK for row in last):
        return Finding(
            "collapse onto the queries",
            f"[CLS] follows the queries and not the image in {100 * last[-1]['queries_in_cls']:.0f} % of images: both "
            "views have the same ones, so the loss is met without looking; set model.query_keys=image or far fewer "
            "views.num_queries",
        )
    if all_below("target_kl", max(NATS, TOLD * first["target_kl"])):
        told = f"the teacher tells images apart by {last[-1]['target_kl']:.2g} nats, {first['target_kl']:.2g} untrained"
        if sum(row["target_entropy"] for row in last) / len(last) > UNIFORM:
            return Finding(
                "uniform collapse",
                f"{told}, and its targets are all prototypes alike; sharpen them: lower method.teacher_temperature and "
                "its start, well below the student's 0.1",
            )
        return Finding(
            "constant collapse",
            f"{told}, and its targets are the same few prototypes; center more: lower method.center_momentum (0.9), "
            "raise method.teacher_temperature_start, or lower optim.lr",
        )
    for kind in ("cls", "patches", "queries"):
        name = f"rank_{kind}"
        if name in first and all_below(name, max(DIRECTIONS, RANK * first[name])):
            return Finding(
                "dimensional collapse",
                f"the features of {kind} differ in {last[-1][name]:.1f} directions only, {first[name]:.1f} untrained; "
                "raise train.batch_size, lower optim.lr or optim.weight_decay_end",
            )
    return None
