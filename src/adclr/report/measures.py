"""What the numbers of a run are called, what they mean, where they are healthy, and what they say in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from adclr.report.charts import Band
from adclr.report.story import Story


class Measure(NamedTuple):
    title: str
    meaning: str
    healthy: Band | None = None
    floor: float | None = None


LOSSES = {
    "loss": Measure("loss", "the sum that is trained on"),
    "loss_global": Measure("global loss", "DINO's: [CLS] of one view against the teacher's of another", floor=0),
    "loss_query": Measure("query loss", "ADCLR's: a query's answer in one view against that in the other", floor=0),
    "loss_masked": Measure("masked loss", "iBOT's: hidden patches against what the teacher sees there", floor=0),
}
SCORES = {"knn_top1": Measure("kNN accuracy, %", "of the teacher's [CLS], by the labels of the probe")}
HEALTH = {
    "teacher_entropy": Measure(
        "entropy of the targets",
        "of ln K; 1 is the same weight on every prototype, 0 is all on one",
        Band(0.02, 0.95),
        0,
    ),
}
SPEED = {"images_per_second": Measure("images per second", "of training, all processes together", floor=0)}
SCHEDULES = {
    "lr": Measure("learning rate", "", floor=0),
    "weight_decay": Measure("weight decay", "", floor=0),
    "momentum": Measure("momentum of the teacher", ""),
    "teacher_temperature": Measure("temperature of the teacher", ""),
    "voided_steps": Measure(
        "void steps", "whose losses or gradients were not finite, and which changed nothing", floor=0
    ),
}
HIDDEN = {"seconds", "seconds_waiting_for_images"}  # shown as a share of the time


def others(stories: Sequence[Story]) -> dict[str, Measure]:
    """Measures that this page has no words for, so that nothing that was measured is left out."""
    known = {*LOSSES, *SCORES, *HEALTH, *SPEED, *SCHEDULES, *HIDDEN}
    names = dict.fromkeys(name for story in stories for name in story.curves if name not in known)
    return {name: Measure(name.replace("_", " "), "") for name in names}


class Word(NamedTuple):
    good: bool
    text: str


TAIL = 0.1  # of a curve, over which it is judged
UNIFORM, CONSTANT = 0.95, 0.02  # of ln K


def verdict(story: Story) -> list[Word]:
    """What a look at the curves would tell."""
    found = [Word(False, words) for _, words in story.said]
    entropy, loss = _tail(story, "teacher_entropy"), _tail(story, "loss_global")
    prototypes = story.settings.get("method.num_prototypes")
    most = math.log(prototypes) if isinstance(prototypes, int) and prototypes > 1 else None
    if entropy is not None and entropy > UNIFORM:
        found.append(
            Word(
                False,
                f"The targets are nearly uniform (entropy {entropy:.2f} of ln K), so the teacher tells nothing apart: "
                "lower method.teacher_temperature, or let it warm up for longer.",
            )
        )
    elif entropy is not None and loss is not None and most and entropy < CONSTANT and loss < 0.05 * most:
        found.append(
            Word(
                False,
                f"The targets are all on one prototype (entropy {entropy:.3f} of ln K) and the loss is nearly 0: every "
                "image looks the same to the teacher. Set method.center_momentum to 0.9 and lower optim.lr.",
            )
        )
    elif entropy is not None:
        found.append(Word(True, f"The targets are neither uniform nor constant (entropy {entropy:.2f} of ln K)."))
    found += _score_words(story)
    if story.seconds and story.waited > 0.2 * story.seconds:
        share = story.waited / story.seconds
        found.append(
            Word(
                False,
                f"{share:.0%} of the time went into waiting for images: use data.cache, or more data.num_workers.",
            )
        )
    void = sum(value for _, value in story.curves.get("voided_steps", ()))
    if void:
        found.append(Word(False, f"{void:.0f} steps were void, their losses or gradients not finite."))
    if story.unreadable:
        found.append(Word(False, f"{story.unreadable} images could not be read; quarantine.jsonl lists them."))
    return found


def _score_words(story: Story) -> list[Word]:
    scores = story.curves.get("knn_top1", [])
    if len(scores) < 2:
        return []
    first, last, best = scores[0][1], scores[-1][1], max(value for _, value in scores)
    change = f"kNN went from {first:.1f} % to {last:.1f} %"
    if last <= first:
        return [Word(False, f"{change}: nothing was learned that neighbours would show.")]
    fell = f", but it had been {best:.1f} %" if last < best - 1 else ""
    return [Word(not fell, f"{change}{fell}.")]


def _tail(story: Story, name: str) -> float | None:
    points = story.curves.get(name)
    if not points:
        return None
    values = [value for _, value in points[-max(1, round(TAIL * len(points))) :]]
    return sum(values) / len(values)
