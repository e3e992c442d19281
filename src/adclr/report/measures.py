"""What the numbers of a run are called, what they mean, where they are healthy, and what they say in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from adclr.report import health
from adclr.report.charts import Band, Level
from adclr.report.story import PARTS, Story


class Measure(NamedTuple):
    title: str
    meaning: str
    healthy: Band | None = None
    floor: float | None = None
    level: Level | None = None


LOSSES = {
    "loss": Measure("loss", "the sum that is trained on"),
    "loss_global": Measure("global loss", "DINO's: [CLS] of one view against the teacher's of another", floor=0),
    "loss_query": Measure("query loss", "ADCLR's: a query's answer in one view against that in the other", floor=0),
    "loss_masked": Measure("masked loss", "iBOT's: hidden patches against what the teacher sees there", floor=0),
}
SCORES = {
    "knn_top1": Measure("kNN accuracy, %", "of the teacher's [CLS], by the labels of the probe"),
    "image_matching": Measure(
        "images found again, %", "by [CLS], in another view, among all that it does not train on"
    ),
    "patch_matching": Measure(
        "patches matched, %", "that find their place in another view of images it does not train on"
    ),
    "incontext_miou": Measure("in-context mIoU, %", "of the teacher's patches, by the labelled pixels of the probe"),
}
HEALTH = {
    "teacher_entropy": Measure(  # no range: high or low, it may learn, as long as targets tell something of an image
        "entropy of the targets", "of ln K; 1 is the same weight on every prototype, 0 is all on one", floor=0
    ),
    "target_kl": Measure(
        "what targets tell of an image, nats", "from each target to the mean of all; 0 is nothing", floor=0
    ),
    "prototypes_used": Measure("prototypes in use", "of as many as there are images or prototypes", floor=0),
    "loss_of_log_k": Measure("global loss of ln K", "1 is what knowing nothing costs", Band(0, 1), floor=0),
    "rank_cls": Measure("directions of [CLS]", "effective rank: in how many directions images differ", floor=0),
    "rank_patches": Measure("directions of patches", "effective rank", floor=0),
    "rank_queries": Measure("directions of queries", "effective rank", floor=0),
    "deviation_cls": Measure("deviation of [CLS]", "of features of length 1, from image to image", floor=0),
    "deviation_patches": Measure("deviation of patches", "of features of length 1", floor=0),
    "deviation_queries": Measure("deviation of queries", "of features of length 1", floor=0),
    "query_image_gap": Measure(
        "loss of a query in another image", "minus that in its own, nats; near 0 its own pixels solve it", floor=0
    ),
    "queries_in_cls": Measure("[CLS] that follow the queries", "and not their image", Band(0, health.LEAK), floor=0),
    "teacher_student_distance": Measure(
        "distance of student and teacher", "of their weights, of the teacher's", floor=0
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
# of the time; the entropy of a batch; how many the scores without labels are of
HIDDEN = {"seconds", *(f"seconds_{part}" for part in PARTS), "target_entropy", "held_out_images"}


def others(stories: Sequence[Story]) -> dict[str, Measure]:
    """Measures that this page has no words for, so that nothing that was measured is left out."""
    known = {*LOSSES, *SCORES, *HEALTH, *SPEED, *SCHEDULES, *HIDDEN}
    names = dict.fromkeys(name for story in stories for name in story.curves if name not in known)
    return {name: Measure(name.replace("_", " "), "") for name in names}


class Word(NamedTuple):
    good: bool
    text: str


def with_bands(stories: Sequence[Story]) -> dict[str, Measure]:
    """The measures of health, with the range in which the doctor says nothing; it hangs on the untrained network."""
    found = dict(HEALTH)
    first = [story.looks[0] for story in stories if story.looks]
    for name, least, share in (
        ("target_kl", health.NATS, health.TOLD),
        *((f"rank_{kind}", health.DIRECTIONS, health.RANK) for kind in ("cls", "patches", "queries")),
    ):
        limits = [max(least, share * look[name]) for look in first if name in look]
        if limits:
            found[name] = found[name]._replace(healthy=Band(max(limits), math.inf))
    return found


def with_levels(stories: Sequence[Story]) -> dict[str, Measure]:
    """The losses, with what knowing nothing costs where all runs have as many prototypes."""
    counts = {story.settings.get("method.num_prototypes") for story in stories}
    (count,) = counts if len(counts) == 1 else (None,)
    if not isinstance(count, int) or count < 2:
        return LOSSES
    level = Level(math.log(count), f"ln {count}: knowing nothing")
    return LOSSES | {name: LOSSES[name]._replace(level=level) for name in ("loss_global", "loss_query")}


def verdict(story: Story) -> list[Word]:
    """What a look at the curves would tell."""
    found = [Word(False, words) for _, words in story.said]
    finding = health.diagnose(story.looks)
    if finding is not None:
        found.append(Word(False, f"{finding.name.capitalize()}: {finding.words}."))
    elif len(story.looks) > health.IN_A_ROW:
        told = story.looks[-1]["target_kl"]
        found.append(Word(True, f"It does not collapse: the teacher tells images apart by {told:.2g} nats."))
    elif len(story.looks) > 1:
        found.append(_first_sign(story.looks))
    found += _score_words(story)
    waited = story.spent["waiting_for_images"]
    if story.seconds and waited > 0.2 * story.seconds:
        share = waited / story.seconds
        found.append(
            Word(
                False,
                f"{share:.0%} of the time went into waiting for images: use data.cache, or more data.num_workers.",
            )
        )
    void = sum(value for _, value in story.curves.get("voided_steps", ()))  # of which voided.jsonl says more
    if void:
        found.append(Word(False, f"{void:.0f} steps were void, their losses or gradients not finite."))
    if story.unreadable:
        found.append(Word(False, f"{story.unreadable} images could not be read; quarantine.jsonl lists them."))
    return found


def _first_sign(looks: Sequence[health.Measures]) -> Word:
    """What too few measures for the doctor say."""
    finding, count = health.diagnose(looks, len(looks) - 1), len(looks)
    if finding is not None:
        return Word(False, f"{finding.name.capitalize()}, by {count} measures only: {finding.words}.")
    nats = looks[-1]["target_kl"]
    return Word(True, f"No sign of a collapse in {count} measures: the teacher tells images apart by {nats:.2g} nats.")


def _score_words(story: Story) -> list[Word]:
    found = []
    for name, measure in SCORES.items():
        scores = [value for _, value in story.curves.get(name, ())]
        if len(scores) < 2:
            continue
        change = f"{measure.title.removesuffix(', %')} went from {scores[0]:.1f} % to {scores[-1]:.1f} %"
        if scores[-1] <= scores[0]:
            found.append(Word(False, f"{change}: no sign that it has learned."))
        else:
            fell = f", but it had been {max(scores):.1f} %" if scores[-1] < max(scores) - 1 else ""
            found.append(Word(not fell, f"{change}{fell}."))
    return found
