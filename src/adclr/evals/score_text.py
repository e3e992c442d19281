"""Scores as text: with their unit, and compared with the same network without pretraining."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from adclr.config import parsing
from adclr.config.parsing import Section, UserError
from adclr.system.files import read_json
from adclr.system.runs import Run
from adclr.system.text import shell_join

# names of scores that are percentages; all others are counts, ranks or chosen settings
PERCENT = re.compile(r"_top[15](_|$)|_mean_class$|_(miou|aacc|macc)$|^(image|patch)_matching|^video_|^(box|mask)_a[pr]")
# the main score of each evaluation; `transfer` has a mean for each way of scoring
MAIN_SCORES = {
    "knn": "knn_top1",
    "linear": "linear_top1",
    "finetune": "finetune_top1",
    "matching": "image_matching",
    "incontext": "incontext_miou",
    "segmentation": "segmentation_miou",
    "video": "video_j_and_f",
    "detection": "box_ap",
}
MAX_FILES, MAX_BYTES = 200, 2**22  # files of a folder that are read, and their size


def is_percent(name: str) -> bool:
    """Return whether a score of this name is a percentage."""
    return PERCENT.search(name) is not None


def with_unit(name: str, value: float) -> str:
    """Return a score as text: percentages with two decimals and their sign, counts whole."""
    if is_percent(name):
        return f"{value:.2f} %"
    return f"{value:.0f}" if value % 1 == 0 else f"{value:.2f}" if value > 1 else f"{value:.2g}"


class _Control(NamedTuple):
    """Scores of the same network without pretraining."""

    scores: Mapping[str, Any]
    origin: str


def compare_with_control(
    name: str, settings: Any, scores: Mapping[str, Any], control: Path, folders: Iterable[Path] = ()
) -> list[str]:
    """Return one line for each main score: the difference to the same network without pretraining.

    `control` is the file that the same evaluation with from_scratch=true writes; `folders` may have it under other
    names. If there is none, the line has the command that writes it. An evaluation from scratch gets no line.
    """
    if getattr(settings, "from_scratch", False):
        return []
    lines, missing = [], False
    for headline in _main_scores(name, scores):
        untrained = _find_control(name, settings, headline, scores, control, folders)
        if untrained is None:
            missing = True
            continue
        score, before = float(scores[headline]), float(untrained.scores[headline])
        points = score - before
        relation = f"{points:.1f} points above" if points > 0 else f"{-points:.1f} points below"
        if abs(points) < 0.05:
            relation = "the same as"
        lines.append(
            f"{headline} {score:.1f} % is {relation} the same network without pretraining "
            f"({before:.1f} %, {untrained.origin})"
        )
    if missing:
        lines.append(f"for the same network without pretraining, run: {_command(name, settings)}")
    return lines


def _main_scores(name: str, scores: Mapping[str, Any]) -> list[str]:
    """Return the names of the main scores that were measured."""
    keys = [MAIN_SCORES[name]] if name in MAIN_SCORES else [k for k in scores if re.fullmatch(r"mean_\w+_top1", k)]
    return [key for key in keys if isinstance(scores.get(key), int | float)]


def _find_control(
    name: str, settings: Any, headline: str, scores: Mapping[str, Any], control: Path, folders: Iterable[Path]
) -> _Control | None:
    """Return control scores with this main score: measured together, from a file, or of the first probe of the run."""
    if f"{headline}_untrained" in scores:
        return _Control({headline: scores[f"{headline}_untrained"]}, "measured with it")
    kind = type(settings)
    expected = _compared_settings(kind, settings.model_dump(mode="json"))
    others = (path for folder in folders for path in sorted(folder.glob("*.json"))[:MAX_FILES])
    for path in dict.fromkeys([control, *others]):
        content = _read_object(path)
        stored, numbers = content.get("settings"), content.get("scores")
        if not isinstance(stored, dict) or stored.get("from_scratch") is not True or not isinstance(numbers, dict):
            continue
        same = path == control or _compared_settings(kind, stored) == expected
        if same and isinstance(numbers.get(headline), int | float):
            return _Control(numbers, str(path))
    return _first_probe(name, settings, headline)


def _compared_settings(kind: type[Section], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in which comparable evaluations agree, with absolute paths."""
    free = parsing.free_settings(kind, "control")
    compared = {key: value for key, value in parsing.current_names(kind, settings).items() if key not in free}
    for key in ("weights", "data"):
        value = compared.get(key)
        paths = value if isinstance(value, list | tuple) else [value]
        compared[key] = [os.path.abspath(str(path)) for path in paths]
    return compared


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if it cannot be read."""
    try:
        content = read_json(path) if path.stat().st_size <= MAX_BYTES else None
    except (OSError, UserError):
        return {}
    return content if isinstance(content, dict) else {}


def _first_probe(name: str, settings: Any, headline: str) -> _Control | None:
    """Return the score before the first step, if the run's probe measured the same on the same data."""
    if name not in ("knn", "incontext") or not os.path.isdir(settings.weights):
        return None
    run = Run(settings.weights)
    try:
        trained = run.settings()
        rows = list(run.rows("metrics.jsonl"))
    except (OSError, UserError):  # not a run, or a damaged one
        return None
    if trained is None or trained.model.init is not None:  # its weights were pretrained before its first step
        return None
    probe = trained.probe
    if name == "knn":
        data = probe.data or (trained.data.path if trained.data.labels else None)
        same = probe.k == 20  # that of knn_top1, whatever other `k` the evaluation reports
        default_keys = {"features", "temperature"}
    else:
        data = probe.pixels
        same = (settings.size, settings.memory_size) == (trained.views.global_size, probe.memory_size)
        default_keys = {"train_split", "val_split", "ignore", "augment_epochs", "k", "temperature", "seed"}
    defaults = type(settings)()
    same = same and all(getattr(settings, key) == getattr(defaults, key) for key in default_keys)
    if not same or not data or os.path.abspath(data) != os.path.abspath(settings.data):
        return None
    for row in rows:
        if row.get("step") == 0 and isinstance(row.get(headline), int | float):
            return _Control(row, "the run's first probe")
    return None


def _command(name: str, settings: Any) -> str:
    """Return the command that scores the same network from scratch."""
    data = settings.data if isinstance(settings.data, tuple) else (settings.data,)
    words = ["adclr", "evaluate", name, "--weights", settings.weights, "--data", *data, "--from-scratch"]
    if settings.partial:
        words.append("--partial")
    return shell_join([*words, *_changed_settings(settings)])


def _changed_settings(settings: Any) -> Iterator[str]:
    """Yield key=value of the settings that are not the default."""
    defaults = parsing.flatten(type(settings)().model_dump(mode="json"))
    for key, value in parsing.flatten(settings.model_dump(mode="json")).items():
        if key not in ("weights", "data", "from_scratch", "partial") and value != defaults[key]:
            yield f"{key}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
