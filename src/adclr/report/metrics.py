"""Titles, meanings and healthy ranges of the metrics of a run, and statements on its status."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from adclr.report import health
from adclr.report.charts import Band, Level
from adclr.report.record import OVERHEADS, RunRecord


class Metric(NamedTuple):
    """How a metric is drawn."""

    title: str
    meaning: str
    healthy: Band | None = None
    floor: float | None = None  # the y axis starts there or below
    level: Level | None = None
    remedy: str = ""  # what to do about a bad value


LOSSES = {
    "loss": Metric("Loss", "weighted sum of the losses below"),
    "loss_global": Metric("Global loss", "DINO: [CLS] of one view against the teacher's [CLS] of another", floor=0),
    "loss_query": Metric(
        "Query loss", "ADCLR: a query's output in one view against the teacher's in the other", floor=0
    ),
    "loss_cls": Metric("Loss of [CLS]", "student against teacher on the same crop", floor=0),
    "loss_patches": Metric("Loss of patches", "of the student's patches against the teacher's", floor=0),
    "cosine_cls": Metric("Cosine of [CLS] with the teacher's", "of the projected features, in training; 1 is equal"),
    "cosine_patches": Metric("Cosine of patches with the teacher's", "of the projected features, in training"),
    "loss_masked": Metric(
        "Masked loss", "iBOT: masked patches against the teacher's output at the same location", floor=0
    ),
    "loss_neighbor": Metric(
        "Neighbor loss", "SelfPatch: each patch against the teacher's output for its neighbors", floor=0
    ),
}
SCORES = {
    "knn_top1": Metric("kNN accuracy, %", "of the teacher's [CLS], by the labels of the probe"),
    "image_matching": Metric(
        "Images matched, %", "share of held-out images whose other view is the nearest neighbor of [CLS]"
    ),
    "patch_matching": Metric(
        "Patches matched, %", "share of patches whose nearest neighbor in the other view is at the same location"
    ),
    "incontext_miou": Metric("In-context mIoU, %", "of the teacher's patches, by the labeled pixels of the probe"),
}
HEALTH = {
    "teacher_entropy": Metric(  # no range: high or low, it may learn, as long as targets differ between images
        "Entropy of targets", "relative to ln K; 1: uniform over all prototypes, 0: all on one", floor=0
    ),
    "target_kl": Metric("KL of targets to their mean, nats", "0: all images have the same target", floor=0),
    "prototypes_used": Metric("Prototypes in use", "share of the possible ones, at most one per image", floor=0),
    "agreement_cls": Metric(
        "Agreement of [CLS] with the teacher", "cosine on global crops, as the student is evaluated; 1 is equal"
    ),
    "agreement_patches": Metric("Agreement of patches with the teacher", "the same of patches"),
    "neighbors_shared": Metric(
        "Shared nearest neighbors", "share of images whose most similar other image is the teacher's too", floor=0
    ),
    "loss_of_log_k": Metric("Global loss / ln K", "1: the loss of uniform outputs", Band(0, 1), floor=0),
    "rank_cls": Metric("Effective rank of [CLS]", "number of directions in which images differ", floor=0),
    "rank_patches": Metric("Effective rank of patches", "number of directions in which patches differ", floor=0),
    "teacher_rank_cls": Metric("Effective rank of the teacher's [CLS]", "on the same crops", floor=0),
    "teacher_rank_patches": Metric("Effective rank of the teacher's patches", "on the same crops", floor=0),
    "teacher_deviation_cls": Metric("Standard deviation of the teacher's [CLS]", "on the same crops", floor=0),
    "teacher_deviation_patches": Metric("Standard deviation of the teacher's patches", "on the same crops", floor=0),
    "rank_queries": Metric("Effective rank of queries", "number of directions in which queries differ", floor=0),
    "deviation_cls": Metric("Standard deviation of [CLS]", "of features of length 1, from image to image", floor=0),
    "deviation_patches": Metric("Standard deviation of patches", "of features of length 1", floor=0),
    "deviation_queries": Metric("Standard deviation of queries", "of features of length 1", floor=0),
    "query_image_gap": Metric(
        "Query loss in another image, nats",
        "minus that in its own image; near 0, with sharp targets, it is solved by the query's own pixels",
        floor=0,
    ),
    "query_loss_of_log_k": Metric("Query loss in its own image / ln K", "of the teacher, in two views", floor=0),
    "queries_in_cls": Metric(
        "Share of [CLS] that follow the queries",
        "instead of their image, as a share of images",
        Band(0, health.MAX_QUERIES_IN_CLS),
        floor=0,
    ),
    "teacher_student_distance": Metric(
        "Distance of student and teacher", "L2 distance of the weights, relative to the teacher's", floor=0
    ),
}
COLLAPSE = "If it falls to 0: lower optim.lr, raise optim.warmup_epochs."
FEW_DIRECTIONS = "If it falls to 1: raise train.batch_size, lower optim.lr or optim.weight_decay_end."
NOT_FOLLOWING = "If it does not rise: change optim.lr, or set distill.projector_hidden_dim=2048."
NO_REMEDY = "For information: nothing to do."
REMEDIES = {
    "teacher_entropy": "If it stays at 1: lower method.teacher_temperature. If it is 0 early: see the KL.",
    "target_kl": COLLAPSE,
    "prototypes_used": "If it stays near 0: raise method.teacher_temperature_start, lower optim.lr.",
    "agreement_cls": NOT_FOLLOWING,
    "agreement_patches": NOT_FOLLOWING,
    "neighbors_shared": NOT_FOLLOWING,
    "loss_of_log_k": "If it stays at 1: lower method.teacher_temperature, or train longer.",
    "rank_cls": FEW_DIRECTIONS,
    "rank_patches": FEW_DIRECTIONS,
    "rank_queries": FEW_DIRECTIONS,
    "teacher_rank_cls": NO_REMEDY,
    "teacher_rank_patches": NO_REMEDY,
    "teacher_deviation_cls": NO_REMEDY,
    "teacher_deviation_patches": NO_REMEDY,
    "deviation_cls": COLLAPSE,
    "deviation_patches": COLLAPSE,
    "deviation_queries": COLLAPSE,
    "query_image_gap": "If near 0 with query_temperature below 0.08: take an adclr_plus recipe.",
    "query_loss_of_log_k": "If below 0.2, and as low in another image: take an adclr_plus recipe. There it rises to 1.",
    "queries_in_cls": "Above 0.5: set model.query_keys=image.",
    "teacher_student_distance": NO_REMEDY,
}
SPEED = {"images_per_second": Metric("Images per second", "of training, all processes together", floor=0)}
SCHEDULES = {
    "lr": Metric("Learning rate", "", floor=0),
    "weight_decay": Metric("Weight decay", "", floor=0),
    "momentum": Metric("Teacher momentum", ""),
    "teacher_temperature": Metric("Teacher temperature", ""),
    "query_temperature": Metric("Teacher temperature for queries", ""),
    "voided_steps": Metric("Void steps", "steps without effect because a loss or gradient was not finite", floor=0),
}
# seconds, which the bar of the time shows; the entropy in the health batch; the number of held-out images
PARTS_OF_TIME = {f"seconds_{part}" for part in (*OVERHEADS, "starting", "to_first_step")}
NOT_DRAWN = {"seconds", *PARTS_OF_TIME, "target_entropy", "held_out_images"}
WAITING_SHARE = 0.2  # of the time; more is worth a statement


def loss_metrics(records: Sequence[RunRecord]) -> dict[str, Metric]:
    """Return the losses, with the cost of uniform outputs where all runs have the same number of prototypes."""
    counts = {record.settings.get("method.num_prototypes") for record in records}
    (count,) = counts if len(counts) == 1 else (None,)
    if not isinstance(count, int) or count < 2:
        return LOSSES
    level = Level(math.log(count), f"ln {count}, the loss of uniform outputs")
    return LOSSES | {name: LOSSES[name]._replace(level=level) for name in ("loss_global", "loss_query")}


def health_metrics(records: Sequence[RunRecord]) -> dict[str, Metric]:
    """Return the health metrics with their healthy ranges, which depend on the untrained network, and unknown metrics.

    Unknown metrics are drawn too, so that nothing that was measured is left out.
    """
    metrics = {name: metric._replace(remedy=REMEDIES[name]) for name, metric in HEALTH.items()}
    untrained = [record.health_rows[0] for record in records if record.health_rows]
    for name in ("target_kl", "rank_cls", "rank_patches", "rank_queries"):
        limits = [health.lower_limit(name, row) for row in untrained if name in row]
        if limits:
            metrics[name] = metrics[name]._replace(healthy=Band(max(limits), math.inf))
    known = {*LOSSES, *SCORES, *HEALTH, *SPEED, *SCHEDULES, *NOT_DRAWN}
    names = dict.fromkeys(name for record in records for name in record.curves if name not in known)
    return metrics | {name: Metric(name.replace("_", " "), "") for name in names}


class Statement(NamedTuple):
    """One sentence on the status of a run."""

    good: bool
    text: str


def describe_status(record: RunRecord) -> list[Statement]:
    """Return what the curves say about a run, in words."""
    statements = [Statement(False, text) for text in record.messages]
    names = ("method.query_temperature", "method.teacher_temperature")  # the first one that is set is that of queries
    temperature = next((value for name in names if isinstance(value := record.settings.get(name), float)), None)
    statements += _describe_health(record.health_rows, record.state in ("finished", "stopped"), temperature)
    statements += _describe_scores(record) + _describe_own_images(record)
    waiting = record.overheads["waiting_for_images"]
    if record.seconds and waiting > WAITING_SHARE * record.seconds:
        text = f"{waiting / record.seconds:.0%} of the time was spent waiting for images"
        statements.append(Statement(False, f"{text}: use data.cache, or more data.num_workers."))
    void = sum(value for _, value in record.curves.get("voided_steps", ()))  # voided.jsonl lists them
    if void:
        statements.append(
            Statement(False, f"{void:.0f} steps had no effect, because a loss or gradient was not finite.")
        )
    if record.num_unreadable:
        text = f"{record.num_unreadable} images could not be read; quarantine.jsonl lists them."
        statements.append(Statement(False, text))
    return statements


def _describe_health(
    rows: Sequence[health.Measures], ended: bool, last_temperature: float | None = None
) -> list[Statement]:
    """Return whether it collapses, by fewer measures than a warning needs with their number, and the query shortcut."""
    count = len(rows)
    if not count:
        return []
    last = rows[-1]
    if "agreement_cls" in last:
        measured = f"the cosine of the student's [CLS] with its teacher's is {last['agreement_cls']:.2f}"
    else:
        measured = f"targets of different images differ by {last['target_kl']:.2g} nats"
    if count == 1:
        if not ended:  # too early to say
            return []
        return [Statement(False, f"Health was measured once, which is too little to detect a collapse: {measured}.")]
    certain = count > health.MEASURES_IN_A_ROW
    finding = health.diagnose(rows, min(health.MEASURES_IN_A_ROW, count - 1))
    if finding is not None:
        basis = "" if certain else f", from {count} measurements only"
        return [Statement(False, f"{finding.name.capitalize()}{basis}: {finding.words}.")]
    if "agreement_cls" in last:
        return [
            Statement(
                True,
                f"The student follows its teacher: the cosine is {last['agreement_cls']:.2f} for [CLS] and "
                f"{last['agreement_patches']:.2f} for patches; the effective rank of its [CLS] is "
                f"{last['rank_cls']:.1f}, the teacher's {last['teacher_rank_cls']:.1f}.",
            )
        ]
    text = "No collapse" if certain else f"No sign of a collapse in {count} measurements"
    statements = [Statement(True, f"{text}: {measured}.")]
    shortcut = health.diagnose_shortcut(rows, min(health.MEASURES_IN_A_ROW, count - 1), last_temperature)
    if shortcut is not None:
        statements.append(Statement(False, f"{shortcut.name.capitalize()}: {shortcut.words}."))
    return statements


def _describe_own_images(record: RunRecord) -> list[Statement]:
    """Return whether a run without a probe has learned, by views of its own images."""
    scores = (record.results or {}).get("own_images")
    names = ("image_matching", "image_matching_untrained", "patch_matching", "patch_matching_untrained", "num_images")
    if not isinstance(scores, dict) or not all(isinstance(scores.get(name), int | float) for name in names):
        return []
    image, image_before, patch, patch_before, count = (float(scores[name]) for name in names)
    learned = scores.get("has_learned") == 1
    return [
        Statement(
            learned,
            f"{'It has learned' if learned else 'No clear sign that it has learned'}: on {count:.0f} training images, "
            f"the nearest neighbor of a view is the other view of its image for {image:.1f} % (untrained network: "
            f"{image_before:.1f} %), and {patch:.1f} % of the patches match the same location ({patch_before:.1f} %).",
        )
    ]


def _describe_scores(record: RunRecord) -> list[Statement]:
    statements = []
    for name, metric in SCORES.items():
        scores = [value for _, value in record.curves.get(name, ())]
        if len(scores) < 2:
            continue
        change = f"{metric.title.removesuffix(', %')} went from {scores[0]:.1f} % to {scores[-1]:.1f} %"
        if scores[-1] <= scores[0]:
            statements.append(Statement(False, f"{change}: no sign of learning."))
        elif scores[-1] < max(scores) - 1:
            statements.append(Statement(False, f"{change}, but it was {max(scores):.1f} % before."))
        else:
            statements.append(Statement(True, f"{change}."))
    return statements
