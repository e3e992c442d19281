"""Diagnosis of collapses from the health metrics of a run.

DINO has two collapses, in which every image gets the same target: all prototypes equally (uniform), or the same few
(constant). In a third, features of different images differ along few directions only (dimensional). The fourth comes
with attention both ways (`model.query_keys=all`): `[CLS]` reads the queries, which both views share, and not the image.

A distillation has a target that does not move. It is measured how well the student follows, and whether its features
differ in as many directions as the teacher's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Measures = dict[str, float]  # by name: the health metrics of a step

MEASURES_IN_A_ROW = 3  # that must agree before a collapse is reported
# Below this share of an untrained teacher's KL divergence, or below so many nats, targets do not depend on the image.
# An untrained ViT-S/16 has 0.15 nats, healthy small runs stayed above 0.3 of theirs, forced collapses fell below 0.005.
MIN_KL_SHARE, MIN_KL = 0.02, 3e-4
# The same for effective ranks; at 1.2 features differ in one direction only.
MIN_RANK_SHARE, MIN_RANK = 0.1, 1.2
UNIFORM_ENTROPY = 0.8  # share of ln K above which targets that do not depend on the image are called uniform
MAX_QUERIES_IN_CLS = 0.5  # share of images
# The shortcut of queries: their loss, as a share of ln K, is solved, and another image raises it by few nats only.
# Published ADCLR ends at 0.01 and 0.008 on Imagenette, at 0.07 and 0.02 in tests; read-only queries at 0.2 and 4.
SOLVED_QUERY_LOSS, MIN_QUERY_GAP = 0.2, 0.1
SHARP_QUERY_TEMPERATURE = 0.08  # below it soft targets did not make up for the shortcut (docs/adclr_plus.md)
MIN_AGREEMENT_GAIN = 0.02  # of the cosine with the teacher; a student that gains less since the first measure is stuck
GOOD_AGREEMENT = 0.5  # cosine above which a student is not called stuck


class Finding(NamedTuple):
    """A collapse or a shortcut."""

    name: str
    words: str  # what was measured, and what to change


def lower_limit(name: str, untrained: Mapping[str, float]) -> float:
    """Return the value of `target_kl`, or of a rank, below which a run has collapsed.

    It is a share of the untrained teacher's, of a distillation a share of its teacher's.
    """
    share, least = (MIN_KL_SHARE, MIN_KL) if name == "target_kl" else (MIN_RANK_SHARE, MIN_RANK)
    return max(least, share * untrained.get(f"teacher_{name}", untrained[name]))


def is_measured(row: Mapping[str, object]) -> bool:
    """Return whether a row of metrics.jsonl has health metrics, of a pretraining or of a distillation."""
    return row.keys() >= {"target_kl", "target_entropy"} or row.keys() >= {"agreement_cls", "teacher_rank_cls"}


def summarize(measures: Measures) -> str:
    """Return a few words for the progress line."""
    if "agreement_cls" in measures:
        return f"rank {measures['rank_cls']:.1f} of {measures['teacher_rank_cls']:.1f}"
    return f"kl {measures['target_kl']:.2g}, rank {measures['rank_cls']:.1f}"


def diagnose(rows: Sequence[Measures], in_a_row: int = MEASURES_IN_A_ROW) -> Finding | None:
    """Return the collapse that the last `in_a_row` rows agree on, None if there is none.

    The first row is of the untrained teacher.
    """
    if len(rows) <= in_a_row:
        return None
    untrained, latest = rows[0], rows[-in_a_row:]
    last = latest[-1]

    def all_below_limit(name: str) -> bool:
        return all(name in row and row[name] < lower_limit(name, untrained) for row in latest)

    if "agreement_cls" in last:
        return _diagnose_student(untrained, latest)
    if all(row.get("queries_in_cls", 0.0) > MAX_QUERIES_IN_CLS for row in latest):
        return Finding(
            "collapse onto the queries",
            f"[CLS] follows the queries instead of the image in {100 * last['queries_in_cls']:.0f} % of images: both "
            "views share them, so the loss is solved without the image; set model.query_keys=image or far fewer "
            "views.num_queries",
        )
    if all_below_limit("target_kl"):
        nats = f"{last['target_kl']:.2g} nats, {untrained['target_kl']:.2g} untrained"
        if sum(row["target_entropy"] for row in latest) / len(latest) > UNIFORM_ENTROPY:
            return Finding(
                "uniform collapse",
                f"targets of different images differ by {nats}, and each target is uniform over the prototypes; "
                "sharpen them: lower method.teacher_temperature and its start, well below the student's 0.1",
            )
        return Finding(
            "constant collapse",
            f"targets of different images differ by {nats}, and they all use the same few prototypes; center more: "
            "lower method.center_momentum (0.9), raise method.teacher_temperature_start, or lower optim.lr",
        )
    for kind in ("cls", "patches", "queries"):
        name = f"rank_{kind}"
        if name in untrained and all_below_limit(name):
            return Finding(
                "dimensional collapse",
                f"the effective rank of {kind} is {last[name]:.1f}, {untrained[name]:.1f} untrained; "
                "raise train.batch_size, lower optim.lr or optim.weight_decay_end",
            )
    return None


def diagnose_shortcut(
    rows: Sequence[Measures], in_a_row: int = MEASURES_IN_A_ROW, last_temperature: float | None = None
) -> Finding | None:
    """Return a finding if in all of the last rows queries are matched by their own pixels, None otherwise.

    Features may still get better, so this is no collapse. With soft targets a small gap is normal, also in runs whose
    targets are still to get soft: `last_temperature` is the teacher's for queries after its warm-up.
    """
    if last_temperature is not None and last_temperature >= SHARP_QUERY_TEMPERATURE:
        return None

    def is_shortcut(row: Measures) -> bool:
        measured = all(name in row for name in ("query_image_gap", "query_loss_of_log_k", "query_temperature"))
        return (
            measured
            and row["query_image_gap"] < MIN_QUERY_GAP
            and row["query_loss_of_log_k"] < SOLVED_QUERY_LOSS
            and row["query_temperature"] < SHARP_QUERY_TEMPERATURE
        )

    if len(rows) <= in_a_row or not all(is_shortcut(row) for row in rows[-in_a_row:]):
        return None
    return Finding(
        "query shortcut",
        f"queries are matched by their own pixels: in another image, their loss is only "
        f"{rows[-1]['query_image_gap']:.2g} nats higher; set method.query_temperature=0.12, "
        "method.query_temperature_start=0.06 and views.query_source=local, as the adclr_plus recipes do",
    )


def _diagnose_student(first: Measures, latest: Sequence[Measures]) -> Finding | None:
    """Return what is wrong with the student of a distillation, None if nothing is; `first` is the first row."""
    last = latest[-1]
    agreement = first.get("agreement_cls", 0.0)
    stuck = min(GOOD_AGREEMENT, agreement + MIN_AGREEMENT_GAIN)
    if all(row.get("agreement_cls", 1.0) < stuck for row in latest):
        return Finding(
            "student that does not follow its teacher",
            f"the cosine of its [CLS] with the teacher's is {last['agreement_cls']:.2f}, {agreement:.2f} at first; "
            "raise optim.lr or lower it, or set distill.projector_hidden_dim=2048",
        )
    for kind in ("cls", "patches"):
        name = f"rank_{kind}"
        if all(name in row and row[name] < lower_limit(name, row) for row in latest):
            return Finding(
                "dimensional collapse",
                f"the effective rank of the student's {kind} is {last[name]:.1f}, the teacher's "
                f"{last[f'teacher_{name}']:.1f}; raise train.batch_size, lower optim.lr or optim.weight_decay_end",
            )
    return None
