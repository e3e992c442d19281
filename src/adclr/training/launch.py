"""From a command to settings, images and a run directory: every mistake that can be found before torch is imported."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adclr import evals
from adclr.config import auto, parsing
from adclr.config.distillation import DEFAULT_RECIPE, DistillSettings
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.data import collection, file_stamps
from adclr.data.collection import open_source
from adclr.data.file_stamps import Stamps
from adclr.data.sources import Source
from adclr.system import store_urls
from adclr.system.files import check_writable
from adclr.system.machine import num_processes
from adclr.system.outputs import is_searched
from adclr.system.runs import Run
from adclr.system.stores import cache as store_cache
from adclr.system.text import printable, shell_join
from adclr.training import loggers

INDEX = "index.npz"  # in a run: the images of the collection, with their paths and labels
MAX_WARNINGS = 5  # damaged shards that are named one by one
STAMPS = "stamps.npz"  # in a run: sizes and times of the images when it was last started
# Settings in epochs that must be shorter than the run, and whether they may be as long.
IN_EPOCHS = {
    "optim.warmup_epochs": False,
    "method.teacher_temperature_warmup_epochs": True,
    "optim.freeze_last_layer_epochs": False,
}


@dataclass(frozen=True)
class Launch:
    """A run that is ready to start or resume."""

    settings: Settings
    source: Source
    run: Run
    reasons: list[str]  # of the automatic choice, for the user
    started: float = field(default_factory=time.monotonic)  # when the command or call began, by `time.monotonic`
    marks: list[tuple[str, float]] = field(default_factory=list)  # parts of the start, and when each ended

    def mark(self, part: str) -> None:
        """Note that a part of the start has ended."""
        self.marks.append((part, time.monotonic()))

    def seconds_by_part(self) -> dict[str, float]:
        """Return the seconds of each part of the start, in their order."""
        ends = [self.started, *(end for _, end in self.marks)]
        return {part: round(end - begin, 2) for (part, end), begin in zip(self.marks, ends, strict=False)}


def prepare(
    data: str | Path | None,
    out: str | Path,
    recipe: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    kind: type[Settings] = Settings,
    started: float | None = None,
) -> Launch:
    """Check everything and return the settings, images and directory of a run; nothing is written.

    `kind` is the class of the settings: of pretraining or of a distillation. `started` is when the command began, by
    `time.monotonic`; by default now.
    """
    begun = time.monotonic()
    if store_urls.is_remote(out):
        raise UserError(
            f"a run lies on a disk of this machine, not at {store_urls.conceal(str(out))}; name a folder as --out"
        )
    run = Run(out)
    check_writable(run.path)
    stored = run.settings()
    overrides = add_images(data, overrides)
    if stored is not None and type(stored) is not kind and run.begun:
        raise UserError(f"{run.path} holds a run of adclr {stored.command}; use that command or choose another --out")
    if stored is None and run.path.exists() and (not run.path.is_dir() or _has_other_files(run.path)):
        raise UserError(f"{run.path} exists and holds no run; choose another --out")
    if stored is not None and not run.begun:
        stored = None  # it failed before its first step, and its settings may be why
    if stored is None and resume:
        raise UserError(f"{run.path} holds no run to resume; leave out --resume to start one")
    # names and values first, since that is quick; the collection after
    base = recipe_settings(recipe, kind)
    if not base and stored is None and kind is DistillSettings:
        base = recipe_settings(DEFAULT_RECIPE, kind)
    automatic = not base and stored is None
    if not base and stored is not None:
        base = stored.model_dump(mode="json")
    if kind is DistillSettings:
        overrides, reasons = adopt_teacher(base, overrides, stored)
    else:
        overrides, reasons = adopt_init(base, overrides, stored)
    if stored is not None:
        epochs = overrides.get("train.epochs", stored.train.epochs)
        if isinstance(epochs, int) and epochs != stored.train.epochs:  # before it is compared with the warm-up
            raise UserError(_describe_epochs(run, stored, epochs))
        overrides = _unscaled(base, overrides, stored) | overrides
    settings = resolve_settings(base, overrides, kind)
    if not settings.data.path:
        raise UserError("no images were named; give the folder that holds them")
    loggers.check(settings.train.loggers)
    store_cache.configure(settings.data.local_cache, settings.data.local_cache_gib)
    source = open_source(settings.data.path, run.path / INDEX, settings.data.allow_damaged_shards)
    _warn_of_damage(source)
    if stored is None:
        collection.check_apart(run.path, source)
        _check_apart_from_probe(run.path, settings)
    if automatic:
        choice = collection.choose_recipe(source, settings.train.device)
        reasons = choice.reasons + reasons
        base = choice_settings(choice)
        settings = resolve_settings(base, overrides)
    if stored is None:
        defaults = _with_defaults(base, kind)
        reasons = reasons + [
            f"{path}={value:g} instead of {defaults[path]:g}: in proportion to train.epochs={settings.train.epochs}"
            for path, value in _shortened_epochs(base, overrides, kind).items()
        ]
    else:
        if stored.train.epochs != settings.train.epochs:
            raise UserError(_describe_epochs(run, stored, settings.train.epochs))
        differences = parsing.differences(stored, settings, parsing.free_settings(kind, "resume"))
        if differences:
            raise UserError(f"{run.path} holds a run with other settings: {differences[0]}; choose another --out")
    check_batch(settings, len(source), num_processes(), "processes")
    launch = Launch(settings, source, run, reasons, begun if started is None else started, [("program", begun)])
    launch.mark("list of images")
    return launch


def add_images(data: str | Path | None, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the user's settings together with the images that were named on their own."""
    overrides = dict(overrides or {})
    if "recipe" in overrides:
        raise UserError(f"a recipe is not a setting; write --recipe {overrides['recipe']}")
    if data is not None:
        if {"path", "data.path"} & set(overrides):
            raise UserError(f"images were named twice, as {data} and by data.path; leave out one of them")
        overrides["data.path"] = str(data)
    return _conceal(overrides)


def _conceal(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the credentials in their URLs, since they are written down."""
    return {name: store_urls.conceal(value) if isinstance(value, str) else value for name, value in values.items()}


def recipe_settings(recipe: str | Path | None, kind: type[Settings] = Settings) -> dict[str, Any]:
    """Return the settings of a recipe; none for `auto`, which is chosen by the images."""
    if recipe is None or recipe == "auto":
        return {}
    name = os.fspath(recipe)
    recipe_tree = parsing.load_recipe(name, "distill" if kind is DistillSettings else "")
    return _conceal(parsing.flatten(recipe_tree)) | {"recipe": name}


def _warn_of_damage(source: Source) -> None:
    """Print which shards are damaged, where that is allowed; in the first process only."""
    if source.listing is None or os.environ.get("RANK", "0") != "0":
        return
    damaged = [(path, problem) for path, problem in source.listing.problems.items() if path in source.listing.facts]
    for shard, problem in damaged[:MAX_WARNINGS]:
        print(printable(f"shard {shard} is damaged: {problem}; these are used"), file=sys.stderr)
    if len(damaged) > MAX_WARNINGS:
        print(f"and {len(damaged) - MAX_WARNINGS} more shards; adclr doctor lists them", file=sys.stderr)


def adopt_init(
    base: Mapping[str, Any], overrides: Mapping[str, Any], stored: Settings | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return the user's settings with those of the weights in `model.init` added, by full name, and the reasons.

    A run that has begun has the settings of the weights, so that it does not read them again.
    """
    overrides = _full_names(overrides)
    init = (_full_names(base) | overrides).get("model.init")
    if not init:
        return overrides, []
    from adclr.training import continued_pretraining

    if stored is None:
        settings, reason = continued_pretraining.adopt_settings(os.fspath(init), overrides)
        return settings | overrides, [reason]
    settings = parsing.flatten(stored.model_dump(mode="json"))
    paths = ("model.size", *continued_pretraining.FIXED, *continued_pretraining.KEPT)
    return {path: settings[path] for path in paths} | overrides, []


def adopt_teacher(
    base: Mapping[str, Any], overrides: Mapping[str, Any], stored: Settings | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the user's settings with those that the teacher determines added, by full name, and the reasons."""
    from adclr.training import distillation

    user = _full_names(overrides, DistillSettings)
    assert stored is None or isinstance(stored, DistillSettings)
    values = _with_defaults(base, DistillSettings) | user
    adopted, reasons = distillation.adopt_teacher(values, user, stored)
    return user | adopted, reasons


def choice_settings(choice: auto.Choice) -> dict[str, Any]:
    """Return the settings of an automatic choice, which stand in for those of a recipe."""
    return parsing.flatten(parsing.load_recipe(choice.recipe)) | choice.settings | {"recipe": f"auto: {choice.recipe}"}


def resolve_settings(
    base: Mapping[str, Any], overrides: Mapping[str, Any], kind: type[Settings] = Settings
) -> Settings:
    """Return the settings of a recipe with the user's on top.

    Warm-ups that are too long for the epochs are shortened in proportion, unless the user has set them.
    """
    return parsing.build(kind, base, _shortened_epochs(base, overrides, kind), overrides)


def _shortened_epochs(base: Mapping[str, Any], overrides: Mapping[str, Any], kind: type[Settings]) -> dict[str, float]:
    """Return the settings in epochs that fit into the recipe's epochs and not into the user's, scaled to these.

    A recipe that does not set its warm-up has the default one, which is scaled to its epochs too.
    """
    recipe, overrides = _with_defaults(base, kind), _full_names(overrides, kind)
    epochs, scaled = overrides.get("train.epochs", recipe["train.epochs"]), {}
    if isinstance(epochs, int) and epochs < 1:  # which is refused by its own name, not by that of a warm-up
        return {}
    for path, may_fill in IN_EPOCHS.items():
        if path not in recipe:  # of a distillation
            continue
        length, reference = recipe[path], recipe["train.epochs"]
        if (
            path == "optim.warmup_epochs"
            and path not in _full_names(base, kind)
            and not _fits(length, reference, may_fill)
        ):
            reference = Settings().train.epochs
        if path not in overrides and _fits(length, reference, may_fill) and not _fits(length, epochs, may_fill):
            scaled[path] = float(f"{length * epochs / reference:.3g}")
    return scaled


def _fits(length: Any, epochs: Any, may_fill: bool) -> bool:
    """Return whether a length is within the epochs; values that are not numbers are refused elsewhere."""
    numbers = isinstance(length, int | float) and isinstance(epochs, int | float)
    return not numbers or length < epochs or (may_fill and length == epochs)


def _full_names(values: Mapping[str, Any], kind: type[Settings] = Settings) -> dict[str, Any]:
    """Return settings by their full names."""
    return {parsing.full_name(kind, name): value for name, value in parsing.flatten(values).items()}


def _with_defaults(base: Mapping[str, Any], kind: type[Settings]) -> dict[str, Any]:
    """Return all settings of a recipe, with the defaults of those that it does not set."""
    return parsing.flatten(kind().model_dump(mode="json")) | _full_names(base, kind)


def _unscaled(base: Mapping[str, Any], overrides: Mapping[str, Any], stored: Settings) -> dict[str, Any]:
    """Return the settings in epochs that a run has unscaled, because it began before they were scaled."""
    kind = type(stored)
    before, recipe = parsing.flatten(stored.model_dump(mode="json")), _with_defaults(base, kind)
    return {path: before[path] for path in _shortened_epochs(base, overrides, kind) if before[path] == recipe[path]}


def _describe_epochs(run: Run, stored: Settings, epochs: int) -> str:
    """Return a sentence on what to do instead of changing the epochs of a run."""
    before = stored.train.epochs
    if not run.finished or epochs < before or isinstance(stored, DistillSettings):
        return (
            f"{run.path} is a run of {before} epochs, by which its learning rate falls; leave out epochs={epochs}, or "
            "choose another --out"
        )
    further, file = f"{run.path}-further", run.path / "settings.yaml"
    command = ["adclr", "pretrain", "--out", further, "--recipe", str(file), f"init={run.path}"]
    return (
        f"{run.path} has done its {before} epochs, and its learning rate ends there; train its weights further, from a "
        f"new warm-up on, by {shell_join(command)} epochs={epochs - before}"
    )


def _has_other_files(folder: Path) -> bool:
    """Return whether there are files other than those that a start that failed early leaves."""
    return any(path.name not in (".lock", "quarantine.jsonl") for path in folder.iterdir())


def _check_apart_from_probe(out: Path, settings: Settings) -> None:
    """Refuse a run in the data of its probes, which would take its pictures for images of a class."""
    probe = settings.probe
    for name, data in (("knn", probe.data), ("incontext", probe.pixels), ("matching", probe.held_out)):
        if data and is_searched(out, evals.searched_folders(name, data)):
            raise UserError(collection.describe_inside(out, data))


def check_finished(launched: Launch) -> None:
    """Raise a UserError if the images of a finished run have changed: it would seem to have learned from them."""
    starts = launched.run.starts()
    before = starts[-1].get("collection") if starts and isinstance(starts[-1], dict) else None
    if before is not None and before != launched.source.fingerprint():
        raise UserError(
            f"{launched.run.path} is finished and {launched.source.root} is not what it learned from; "
            "choose another --out"
        )
    data = launched.settings.data
    if (launched.run.path / STAMPS).exists() and not data.allow_changed:
        change = describe_replaced(launched, read_stamps(launched))
        if change is not None:
            raise UserError(
                f"{launched.run.path} is finished and {change} since; choose another --out, or set "
                "data.allow_changed=true"
            )


def read_stamps(launched: Launch) -> Stamps:
    """Return the stamps of the images of a run as they are now; of very many, of some."""
    source, data = launched.source, launched.settings.data
    return file_stamps.read_stamps(source, data.check, data.num_workers, file_stamps.watched_images(source, data.check))


def describe_replaced(launched: Launch, now: Stamps) -> str | None:
    """Return a clause on the images that were replaced since a run was last started; None if none were."""
    source = launched.source
    before = file_stamps.load_stamps(launched.run.path / STAMPS, source.keys, now.indices)
    if before is None:  # a run of version 0.1
        return None
    indices = file_stamps.find_replaced(before, now, launched.settings.data.check)
    if not len(indices):
        return None
    first = source.paths[int(indices[0] if now.indices is None else now.indices[indices[0]])]
    if len(indices) == 1:
        return f"1 image of {source.root} was replaced, {first},"
    sample = "" if now.indices is None else f" among {len(now)}"
    return f"{len(indices)} images{sample} of {source.root} were replaced, such as {first},"


def check_batch(settings: Settings, num_images: int, num_processes: int, unit: str) -> None:
    """Raise a UserError if a batch is larger than the collection or does not divide over processes or GPUs (`unit`)."""
    batch, path = settings.train.batch_size, settings.data.path
    if num_images < batch:
        size = f"{path} holds {num_images} images, fewer" if path else f"{num_images} images are fewer"
        raise UserError(
            f"{size} than train.batch_size={batch}; set train.batch_size={2 ** (num_images.bit_length() - 1)} or less"
        )
    if batch % num_processes:
        raise UserError(
            f"train.batch_size={batch} does not divide over {num_processes} {unit}; choose a multiple of "
            f"{num_processes}"
        )
    local_batch, micro_batch = batch // num_processes, settings.train.micro_batch_size
    if micro_batch and local_batch % micro_batch:
        raise UserError(
            f"train.micro_batch_size={micro_batch} does not divide the {local_batch} images of each of "
            f"{num_processes} {unit}"
        )
