"""What a study asks, from its file: which runs, which scores of each. Knows nothing of torch.

    title: Does the weight of the queries matter?
    data: imagenette/train            # a name; where it lies is said on the command line: imagenette=DIR
    recipe: adclr_small
    settings: {train.epochs: 50}      # of all runs
    arms:                             # kinds of run, by name; each may change settings or the recipe
      one way: {}
      both ways: {settings: {model.query_keys: all}}
    grid: {views.num_queries: [1, 10]}  # and every arm with each of these
    control: one way, num_queries=1   # what the others are compared with
    seeds: [0, 1, 2]
    evaluations:                      # columns of the table, by title
      kNN: {name: knn, data: imagenette, score: knn_top1_k20}
      rank: {name: training, score: rank_cls}   # the last one in the run's own metrics.jsonl

A run is known by its settings, whatever study asks for it, so that a control is trained once for all of them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from adclr import evals
from adclr.config import sections
from adclr.config.sections import Positive, Section, Several, UserError
from adclr.config.settings import Settings
from adclr.training import launch

TRAINING = "training"  # in the place of an evaluation: a number of the run itself
SCENES = "scenes"  # the data set that is built in
PLACE = re.compile(r"(?:(?P<kind>\w+):)?(?P<name>[\w.-]+)(?P<below>(?:/[\w.-]+)*)")
OWN = ("data.path", "train.seed")  # settings that a study says in its own words

Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Evaluation(Section):
    name: str
    score: str = Field(description="the number of its scores that is shown")
    data: str | None = None
    recipe: str | None = Field(None, description="of the evaluation")
    settings: dict[str, Any] = Field(default_factory=dict)
    digits: Annotated[int, Field(ge=0, le=6)] = 1

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.name not in (TRAINING, *evals.NAMES):
            raise ValueError(
                f"unknown evaluation '{self.name}'; there are: {', '.join(evals.NAMES)}, and {TRAINING} for a number "
                "of the run's own metrics"
            )
        if (self.data is None) != (self.name == TRAINING):
            raise ValueError(f"evaluation {self.name} {'has no data' if self.data else 'needs data: NAME'}; mend that")
        return self

    @property
    def settings_class(self) -> type[Section]:
        """The `Settings` of the evaluation."""
        settings: type[Section] = evals.module(self.name).Settings
        return settings

    @property
    def key(self) -> str:
        """By which its scores are found again: a hash, in which settings have the names of version 0.1."""
        names = sections.old_names(self.settings_class) if self.name != TRAINING else {}
        settings = {names.get(name, name): value for name, value in self.settings.items()}
        return digest([self.name, self.data, self.recipe, sorted(settings.items())])

    def build(self, weights: str, data: str) -> Any:
        """Its settings."""
        layers = evals.recipe_of(self.name, self.recipe), self.settings, {"weights": weights, "data": data}
        return sections.build(self.settings_class, *layers)

    def computed(self) -> dict[str, Any]:
        """All its settings that say what is computed, those at their default too, as JSON has them."""
        settings = self.build("W", "D")
        free, flat = sections.free_settings(type(settings), "study"), sections.flatten(settings.model_dump(mode="json"))
        return {path: value for path, value in flat.items() if path not in free}


class Arm(Section):
    recipe: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    untrained: bool = Field(False, description="the ViT as it begins, which nothing is trained of")


class Outline(Section):
    title: str
    question: str = ""
    data: str
    recipe: str
    settings: dict[str, Any] = Field(default_factory=dict)
    arms: dict[str, Arm | None] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    control: str | None = None
    seeds: Several[Seed] = (0,)
    minutes: Positive | None = Field(None, description="after which no run is begun that would end later")
    evaluations: Annotated[dict[str, Evaluation], Field(min_length=1)]


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    arm: str
    point: str  # of the grid, in words
    values: tuple[Any, ...]  # and as it is
    seed: int
    recipe: str
    said: Mapping[str, Any]  # settings on top of the recipe, by full name
    settings: Settings  # with a data set's name for its path
    untrained: bool

    @property
    def label(self) -> str:
        return ", ".join(part for part in (self.arm, self.point) if part) or self.recipe

    @property
    def known_by(self) -> dict[str, Any]:
        """All that says what is computed."""
        flat = sections.flatten(self.settings.model_dump(mode="json"))
        free = sections.free_settings(Settings, "resume")
        kept = {path: value for path, value in flat.items() if path not in free}
        return {"data": self.settings.data.path, "untrained": self.untrained, "settings": kept}

    @property
    def key(self) -> str:
        """A hash of the settings that are not the default, so that a new setting changes no key.

        They have the names of version 0.1 in it, so that results of that version are found.
        """
        known, default = self.known_by, sections.flatten(Settings().model_dump(mode="json"))
        names = sections.old_names(Settings)
        told = {names.get(path, path): value for path, value in known["settings"].items() if value != default[path]}
        return digest([known["data"], self.untrained, sorted(told.items())])


@dataclass(frozen=True)
class Study:
    file: Path
    outline: Outline
    cells: tuple[Cell, ...]  # in the order in which they are run: all of one seed, then all of the next

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(cell.arm for cell in self.cells))

    @property
    def points(self) -> list[str]:
        """Of the grid, as a table has them: in the order of their numbers, if that is what they are."""
        found = {cell.point: cell.values for cell in self.cells}
        ordered = all(isinstance(value, int | float) for values in found.values() for value in values)
        return sorted(found, key=lambda point: found[point]) if ordered else list(found)

    @property
    def labels(self) -> list[str]:
        labels = {(cell.arm, cell.point): cell.label for cell in self.cells}
        return [labels[arm, point] for arm in self.arms for point in self.points]

    def data_names(self) -> set[str]:
        """Of all data sets it uses."""
        wanted = [self.outline.data, *(one.data for one in self.outline.evaluations.values() if one.data)]
        return {name_of(place) for place in wanted}


def digest(value: Any) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def _parts(place: str) -> re.Match[str]:
    found = PLACE.fullmatch(place)
    if found is None or ".." in place:
        raise UserError(
            f"data '{place}' is not a name; write one such as imagenette/train, and imagenette=DIR when run"
        )
    return found


def name_of(place: str) -> str:
    """imagenette of imagenette/train, and of flowers:imagenette."""
    return _parts(place)["name"]


def locate(place: str, folders: Mapping[str, Path]) -> str:
    """Where the data lies, with its kind if it has one."""
    found = _parts(place)
    kind = f"{found['kind']}:" if found["kind"] else ""
    return f"{kind}{folders[found['name']]}{found['below']}"


def folder_of(place: str, folders: Mapping[str, Path]) -> Path:
    """Returns where the data lies, without its kind."""
    parts = _parts(place)
    return Path(f"{folders[parts['name']]}{parts['below']}")


def read(file: Path) -> Study:
    """Everything that can be wrong with a study is found here, before a run begins."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"study {file} cannot be read ({reason}); check the path") from None
    tree = sections.load_yaml(text, f"study {file}")
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise UserError(f"study {file} is not a map; write lines such as 'title: ...' and 'recipe: adclr_small'")
    try:
        outline = sections.validated(Outline, tree)
        cells = tuple(_cells(outline))
        study = Study(file, outline, cells)
        study.data_names()
        for title, evaluation in outline.evaluations.items():
            _check_evaluation(title, evaluation)
    except UserError as error:
        raise UserError(f"study {file}: {error}") from None
    if outline.control is not None and outline.control not in study.labels:
        raise UserError(f"study {file}: control '{outline.control}' is none of: {'; '.join(study.labels)}")
    return study


def _cells(outline: Outline) -> list[Cell]:
    arms = outline.arms or {"": None}
    for name, values in outline.grid.items():
        if not values:
            raise UserError(f"grid {name} has no values; give it some or leave it out")
    points = list(itertools.product(*([(name, value) for value in values] for name, values in outline.grid.items())))
    found = []
    for seed in outline.seeds:
        for arm_name, arm in arms.items():
            for point in points:
                found.append(_cell(outline, arm_name, arm or Arm(), dict(point), seed))
    keys: dict[str, Cell] = {}
    for cell in found:
        twin = keys.setdefault(cell.key, cell)
        if twin is not cell:
            raise UserError(f"'{twin.label}' and '{cell.label}' are the same run; leave one of them out")
    return found


def _cell(outline: Outline, name: str, arm: Arm, point: Mapping[str, Any], seed: int) -> Cell:
    recipe = arm.recipe or outline.recipe
    said: dict[str, Any] = {}
    for layer in (outline.settings, arm.settings, point):
        for short, value in sections.flatten(layer).items():
            path = sections.full_name(Settings, short)
            if path in OWN:
                raise UserError(f"{path} is not a setting here; a study says 'data: NAME' and 'seeds: [0, 1]'")
            said[path] = value
    said["train.seed"] = seed
    settings = launch.settle(sections.recipe(recipe), said | {"data.path": outline.data})
    words = [f"{path.rsplit('.', 1)[-1]}={_shown(value)}" for path, value in point.items()]
    return Cell(name, ", ".join(words), tuple(point.values()), seed, recipe, said, settings, arm.untrained)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(_shown(one) for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check_evaluation(title: str, evaluation: Evaluation) -> None:
    if evaluation.name == TRAINING:
        return
    if {"weights", "data", "from_scratch", "partial"} & set(evaluation.settings):
        raise UserError(f"evaluation '{title}' is told its weights and data by the study; leave them out of settings")
    try:
        evaluation.build("W", "D")
    except UserError as error:
        raise UserError(f"evaluation '{title}': {error}") from None
