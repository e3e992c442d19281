"""Diagnosis of collapses from the health metrics of a run.

DINO has two collapses, in which every image gets the same target: all prototypes alike (uniform), or the same few
(constant). In a third, features of different images differ along few directions only (dimensional). The fourth comes
with attention both ways (`model.query_keys=all`): `[CLS]` reads the queries, which both views share, and not the image.
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


class Finding(NamedTuple):
    """A collapse or a shortcut."""

    name: str
    words: str  # what was measured, and what to change


def lower_limit(name: str, untrained: Mapping[str, float]) -> float:
    """Return the value of `target_kl`, or of a rank, below which a run has collapsed."""
    share, least = (MIN_KL_SHARE, MIN_KL) if name == "target_kl" else (MIN_RANK_SHARE, MIN_RANK)
    return max(least, share * untrained[name])


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

    if all(row.get("queries_in_cls", 0.0) > MAX_QUERIES_IN_CLS for row in latest):
        return Finding(
            "collapse onto the queries",
            f"[CLS] follows the queries and not the image in {100 * last['queries_in_cls']:.0f} % of images: both "
            "views have the same ones, so the loss is met without looking; set model.query_keys=image or far fewer "
            "views.num_queries",
        )
    if all_below_limit("target_kl"):
        nats = f"{last['target_kl']:.2g} nats, {untrained['target_kl']:.2g} untrained"
        if sum(row["target_entropy"] for row in latest) / len(latest) > UNIFORM_ENTROPY:
            return Finding(
                "uniform collapse",
                f"the teacher tells images apart by {nats}, and its targets are all prototypes alike; sharpen them: "
                "lower method.teacher_temperature and its start, well below the student's 0.1",
            )
        return Finding(
            "constant collapse",
            f"the teacher tells images apart by {nats}, and its targets are the same few prototypes; center more: "
            "lower method.center_momentum (0.9), raise method.teacher_temperature_start, or lower optim.lr",
        )
    for kind in ("cls", "patches", "queries"):
        name = f"rank_{kind}"
        if name in untrained and all_below_limit(name):
            return Finding(
                "dimensional collapse",
                f"the features of {kind} differ in {last[name]:.1f} directions only, {untrained[name]:.1f} untrained; "
                "raise train.batch_size, lower optim.lr or optim.weight_decay_end",
            )
    return None


def diagnose_shortcut(rows: Sequence[Measures], in_a_row: int = MEASURES_IN_A_ROW) -> Finding | None:
    """Return a finding if in all of the last rows queries are matched by their own pixels, None otherwise.

    Features may still get better, so this is no collapse. With soft targets a small gap is normal.
    """

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
        f"queries are matched by their own pixels: in another image their loss is only "
        f"{rows[-1]['query_image_gap']:.2g} nats higher; set method.query_temperature=0.12, "
        "method.query_temperature_start=0.06 and views.query_source=local, as the adclr_plus recipes do",
    )
