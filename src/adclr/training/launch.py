"""From a command to settings, a collection and a run directory: all that can be refused before torch is imported."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adclr.config import auto, sections
from adclr.config.sections import UserError
from adclr.config.settings import Settings
from adclr.data import collection, stamps
from adclr.data.collection import open_source
from adclr.data.sources import Source
from adclr.data.stamps import Stamps
from adclr.system.files import check_writable
from adclr.system.machine import num_processes
from adclr.system.runs import Run
from adclr.training import loggers

INDEX = "index.npz"  # in a run: what was found when the collection was searched
MOST_WARNINGS = 5  # damaged shards that are named one by one
STAMPS = "stamps.npz"  # in a run: sizes and times of the images when it was last started
# What may differ when a run is resumed, because it does not say what is computed but how.
FREE = (
    "recipe",
    "data.path",
    "data.num_workers",
    "data.cache",
    "data.max_unreadable",
    "data.allow_changed",
    "data.allow_damaged_shards",
    "data.check",
    "train.device",
    "train.compile",
    "train.cuda_graph",
    "train.checkpoint_activations",
    "train.micro_batch_size",
    "train.shard",
    "train.max_void_steps",
    "train.log_every_steps",
    "train.health_every_steps",
    "train.checkpoint_every_steps",
    "train.checkpoint_every_minutes",
    "train.keep_checkpoints",
    "train.free_checkpoints",
    "train.loggers",
    "train.report",
    "probe.data",
    "probe.held_out",
    "probe.every_epochs",
    "probe.k",
    "probe.images_at_once",
    "probe.pixels",
    "probe.pixels_size",
    "probe.memory_size",
    "data.labels",
)

# Settings in epochs that must fit into those of the run, and whether they may fill it.
IN_EPOCHS = {
    "optim.warmup_epochs": False,
    "method.teacher_temperature_warmup_epochs": True,
    "optim.freeze_last_layer_epochs": False,
}


@dataclass(frozen=True)
class Launch:
    settings: Settings
    source: Source
    run: Run
    reasons: list[str]  # of the automatic choice, for the user


def prepare(
    data: str | Path | None,
    out: str | Path,
    recipe: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> Launch:
    """Everything is checked before anything is written."""
    run = Run(out)
    check_writable(run.path)
    stored = run.settings()
    overrides = dict(overrides or {})
    if "recipe" in overrides:
        raise UserError(f"a recipe is not a setting; write --recipe {overrides['recipe']}")
    if data is not None:
        if {"path", "data.path"} & set(overrides):
            raise UserError(f"images were named twice, as {data} and by data.path; leave out one of them")
        overrides["data.path"] = str(data)
    if stored is None and run.path.exists() and (not run.path.is_dir() or _foreign(run.path)):
        raise UserError(f"{run.path} exists and holds no run; choose another --out")
    if stored is not None and not run.begun:
        stored = None  # it failed before it did anything, and its settings may be why
    if stored is None and resume:
        raise UserError(f"{run.path} holds no run to resume; leave out --resume to start one")
    # names and values first, since that is quick; the collection after
    named = os.fspath(recipe) if recipe is not None and recipe != "auto" else None
    base: Mapping[str, Any] = {}
    if named is not None:
        base = sections.recipe(named) | {"recipe": named}
    elif stored is not None:
        base = stored.model_dump(mode="json")
    overrides, told = adopted(base, overrides, stored)
    if stored is not None:
        overrides = _unscaled(base, overrides, stored) | overrides
    settings = settle(base, overrides)
    if not settings.data.path:
        raise UserError("no images were named; give the folder that holds them")
    loggers.check(settings.train.loggers)
    source = open_source(settings.data.path, run.path / INDEX, settings.data.allow_damaged_shards)
    _warn_of_damage(source)
    if stored is None:
        collection.check_apart(run.path, source)
    reasons = told
    if named is None and stored is None:
        choice = collection.choose_for(source, settings.train.device)
        reasons = choice.reasons + told
        base = choice_settings(choice)
        settings = settle(base, overrides)
    if stored is None:
        reasons = reasons + [
            f"{path}={value:g} instead of {_own(base)[path]:g}: in proportion to train.epochs={settings.train.epochs}"
            for path, value in shortened(base, overrides).items()
        ]
    else:
        if stored.train.epochs != settings.train.epochs:
            raise UserError(_other_epochs(run, stored.train.epochs, settings.train.epochs))
        found = sections.differences(stored, settings, FREE)
        if found:
            raise UserError(f"{run.path} holds a run with other settings: {found[0]}; choose another --out")
    check_batch(settings, len(source))
    return Launch(settings, source, run, reasons)


def _warn_of_damage(source: Source) -> None:
    """Says which shards are damaged where that is allowed; in the first process only."""
    if source.listing is None or os.environ.get("RANK", "0") != "0":
        return
    damaged = [(path, problem) for path, problem in source.listing.problems.items() if path in source.listing.facts]
    for shard, problem in damaged[:MOST_WARNINGS]:
        print(f"shard {shard} is damaged: {problem}; these are used", file=sys.stderr)
    if len(damaged) > MOST_WARNINGS:
        print(f"and {len(damaged) - MOST_WARNINGS} more shards; adclr doctor lists them", file=sys.stderr)


def adopted(
    base: Mapping[str, Any], overrides: Mapping[str, Any], stored: Settings | None = None
) -> tuple[dict[str, Any], list[str]]:
    """What the user says, and with it what the weights say that he starts from (`model.init`); and why.

    A run that has begun knows what they said, so that it does not need them any more.
    """
    said = {sections.full_name(Settings, name): value for name, value in sections.flatten(overrides).items()}
    known = {sections.full_name(Settings, name): value for name, value in sections.flatten(base).items()} | said
    init = known.get("model.init")
    if not init:
        return said, []
    from adclr.training import continued

    if stored is None:
        taken, told = continued.adopt_settings(os.fspath(init), said)
        return taken | said, [told]
    before = sections.flatten(stored.model_dump(mode="json"))
    paths = ("model.size", *continued.FIXED, *continued.KEPT)
    return {path: before[path] for path in paths if path not in said} | said, []


def choice_settings(choice: auto.Choice) -> dict[str, Any]:
    """The settings of an automatic choice, in the place of a recipe's."""
    return sections.flatten(sections.recipe(choice.recipe)) | choice.settings | {"recipe": f"auto: {choice.recipe}"}


def settle(base: Mapping[str, Any], said: Mapping[str, Any]) -> Settings:
    """Builds the settings of a recipe with what the user says on top.

    Warm-ups that are too long for the epochs are shortened in proportion, unless the user has set them.
    """
    return sections.build(Settings, base, shortened(base, said), said)


def shortened(base: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, float]:
    """Returns the settings in epochs that fit into the recipe's epochs and not into the user's, scaled to these.

    A recipe that says nothing of its warm-up has the default one, which is scaled to its epochs too.
    """
    default, own, told = _own({}), _own(base), _named(said)
    epochs, found = told.get("train.epochs", own["train.epochs"]), {}
    for path, may_fill in IN_EPOCHS.items():
        length, reference = own[path], own["train.epochs"]
        if path == "optim.warmup_epochs" and path not in _named(base) and not _fits(length, reference, may_fill):
            reference = default["train.epochs"]
        if path not in told and _fits(length, reference, may_fill) and not _fits(length, epochs, may_fill):
            found[path] = float(f"{length * epochs / reference:.3g}")
    return found


def _fits(length: Any, epochs: Any, may_fill: bool) -> bool:
    """Whether so many epochs are a part of the others; what is no number is for others to refuse."""
    numbers = isinstance(length, int | float) and isinstance(epochs, int | float)
    return not numbers or length < epochs or (may_fill and length == epochs)


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their full names."""
    return {sections.full_name(Settings, name): value for name, value in sections.flatten(values).items()}


def _own(base: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a recipe, with the defaults of those that it does not set."""
    return sections.flatten(Settings().model_dump(mode="json")) | _named(base)


def _unscaled(base: Mapping[str, Any], said: Mapping[str, Any], stored: Settings) -> dict[str, Any]:
    """Settings in epochs that a run has as its recipe has them: it began before they were scaled."""
    before = sections.flatten(stored.model_dump(mode="json"))
    return {path: before[path] for path in shortened(base, said) if before[path] == _own(base)[path]}


def _other_epochs(run: Run, before: int, wanted: int) -> str:
    """A sentence on what to do instead of changing the epochs of a run."""
    if not run.finished or wanted < before:
        return (
            f"{run.path} is a run of {before} epochs, by which its learning rate falls; leave out epochs={wanted}, or "
            "choose another --out"
        )
    further, file = f"{run.path}-further", run.path / "settings.yaml"
    command = ["adclr", "pretrain", "--out", further, "--recipe", str(file), f"init={run.path}"]
    return (
        f"{run.path} has done its {before} epochs, and its learning rate ends there; train its weights further, from a "
        f"new warm-up on, by {shlex.join(command)} epochs={wanted - before}"
    )


def _foreign(folder: Path) -> bool:
    """Whether there is anything but what a start that failed early leaves."""
    return any(path.name not in (".lock", "quarantine.jsonl") for path in folder.iterdir())


def check_finished(launched: Launch) -> None:
    """A finished run is not gone on with; that must not look as if other images had been learned from."""
    starts = launched.run.starts()
    before = starts[-1].get("collection") if starts and isinstance(starts[-1], dict) else None
    if before is not None and before != launched.source.fingerprint():
        raise UserError(
            f"{launched.run.path} is finished and {launched.source.root} is not what it learned from; "
            "choose another --out"
        )
    data = launched.settings.data
    if (launched.run.path / STAMPS).exists() and not data.allow_changed:
        words = replaced(launched, stamps.take(launched.source, data.check, data.num_workers))
        if words is not None:
            raise UserError(
                f"{launched.run.path} is finished and {words} since; choose another --out, or set "
                "data.allow_changed=true"
            )


def replaced(launched: Launch, now: Stamps) -> str | None:
    """Returns, in words, how many images were replaced since a run was last started, and one of them; None if none."""
    source = launched.source
    before = stamps.load(launched.run.path / STAMPS, source.keys)
    if before is None:  # a run of version 0.1
        return None
    indices = stamps.replaced(before, now, launched.settings.data.check)
    if not len(indices):
        return None
    first = source.paths[int(indices[0])]
    if len(indices) == 1:
        return f"1 image of {source.root} was replaced, {first},"
    return f"{len(indices)} images of {source.root} were replaced, such as {first},"


def check_batch(settings: Settings, num_images: int) -> None:
    batch, world = settings.train.batch_size, num_processes()
    if num_images < batch:
        raise UserError(
            f"{settings.data.path} holds {num_images} images, fewer than train.batch_size={batch}; "
            f"set train.batch_size={2 ** (num_images.bit_length() - 1)} or less"
        )
    if batch % world:
        raise UserError(
            f"train.batch_size={batch} does not divide over {world} processes; choose a multiple of {world}"
        )
    micro = settings.train.micro_batch_size
    if micro and (batch // world) % micro:
        raise UserError(
            f"train.micro_batch_size={micro} does not divide the {batch // world} images of each of {world} processes"
        )
