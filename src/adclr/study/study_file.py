"""A study as its YAML file describes it: its runs, and the scores of each. Imports no torch.

    title: Does the weight of the queries matter?
    data: imagenette/train            # a name; the command line gives its folder: imagenette=DIR
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
      minutes to 75 %: {name: time_to_knn, data: imagenette, score: minutes, settings: {at_least: 75}}
    pictures:                         # by name of a folder; drawn of every run, kept beside its weights
      queries: {name: queries, data: imagenette/val, settings: {num_images: 20}}

An arm may have images of its own (`data`), and weights of an arm above it: `init: ARM` trains them further,
`teacher: ARM` distills them into a new ViT.

The settings of a run identify it, so that studies share their runs: a control is trained once for all of them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from adclr import evals
from adclr.config import parsing
from adclr.config.distillation import DEFAULT_RECIPE, DistillSettings
from adclr.config.parsing import Count, Positive, Section, Several, UserError
from adclr.config.settings import Settings
from adclr.study import time_to_knn
from adclr.training import launch

TRAINING = "training"  # instead of an evaluation: a number of the run's own metrics
SCENES = "scenes"  # the built-in data set
DATA = re.compile(r"(?:(?P<kind>\w+):)?(?P<name>[\w.-]+)(?P<subfolder>(?:/[\w.-]+)*)")  # flowers:NAME/train
# settings that a study has keys of its own for
RESERVED = ("data.path", "train.seed", "model.init", "distill.teacher", "distill.teacher_fingerprint")
# settings that are those of the weights that a run starts from or learns from, unless the arm sets them
OF_WEIGHTS = ("data.mean", "data.std", "data.max_value")

Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Evaluation(Section):
    """A column of the table: an evaluation and one of its scores."""

    name: str
    score: str = Field(description="the number of its scores that is shown")
    data: str | None = None
    recipe: str | None = Field(None, description="of the evaluation")
    settings: dict[str, Any] = Field(default_factory=dict)
    digits: Annotated[int, Field(ge=0, le=6)] = 1

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.name not in (TRAINING, time_to_knn.NAME, *evals.NAMES):
            raise ValueError(
                f"unknown evaluation '{self.name}'; there are: {', '.join(evals.NAMES)}, {TRAINING} for a number "
                f"of the run's own metrics, and {time_to_knn.NAME}"
            )
        if self.is_time and self.score not in time_to_knn.SCORES:
            raise ValueError(f"{self.name} has no score '{self.score}'; it has: {', '.join(time_to_knn.SCORES)}")
        if self.is_time and self.recipe is not None:
            raise ValueError(f"{self.name} has no recipes; leave out recipe: {self.recipe}")
        if (self.data is None) != (self.name == TRAINING):
            raise ValueError(f"evaluation {self.name} {'has no data' if self.data else 'needs data: NAME'}; fix it")
        return self

    @property
    def is_time(self) -> bool:
        """Return whether it is measured during the training, and not on its weights."""
        return self.name == time_to_knn.NAME

    @property
    def settings_class(self) -> type[Section]:
        """The `Settings` of the evaluation."""
        if self.is_time:
            return time_to_knn.TimeSettings
        settings: type[Section] = evals.import_evaluation(self.name).Settings
        return settings

    @property
    def key(self) -> str:
        """Return the name of its scores in a result: a hash, in which settings have the names of version 0.1."""
        names = parsing.old_names(self.settings_class) if self.name != TRAINING else {}
        settings = {names.get(name, name): value for name, value in self.settings.items()}
        return _digest([self.name, self.data, self.recipe, sorted(settings.items())])

    def build(self, weights: str, data: str) -> Any:
        """Return its settings for weights and data."""
        if self.is_time:
            return parsing.build(time_to_knn.TimeSettings, self.settings)
        layers = evals.load_recipe(self.name, self.recipe), self.settings, {"weights": weights, "data": data}
        return parsing.build(self.settings_class, *layers)

    def score_settings(self) -> dict[str, Any]:
        """Return all settings that can change its scores, also those at their default, as JSON values."""
        settings = self.build("W", "D")
        free, flat = parsing.free_settings(type(settings), "study"), parsing.flatten(settings.model_dump(mode="json"))
        return {path: value for path, value in flat.items() if path not in free}


class Picture(Section):
    """Pictures of every run: what `adclr visualize NAME` draws of some images."""

    name: Literal["attention", "queries", "pca", "match"]
    data: str
    settings: dict[str, Any] = Field(default_factory=dict)

    def build(self) -> Any:
        """Return its settings."""
        from adclr.features import visualize

        return parsing.build(visualize.FIGURES[self.name][0], self.settings)


class Arm(Section):
    """A kind of run."""

    recipe: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    untrained: bool = Field(False, description="the ViT as it begins, which nothing is trained of")
    data: str | None = Field(None, description="images instead of the study's")
    init: str | None = Field(None, description="arm whose weights are trained further")
    teacher: str | None = Field(None, description="arm whose weights a new ViT learns from, as in adclr distill")
    seeds: Several[Seed] | None = Field(
        None, description="instead of the study's; for other seeds arms that need its weights take those of the first"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(map(bool, (self.untrained, self.init, self.teacher))) > 1:
            raise ValueError("an arm has one of untrained, init and teacher; leave out the others")
        return self


class Outline(Section):
    """The file of a study."""

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
    images: dict[str, Count] = Field(default_factory=dict, description="training images of each data set, for the cost")
    small: str | None = Field(None, description="the study beside this one that asks the same of small data")
    evaluations: Annotated[dict[str, Evaluation], Field(min_length=1)]
    pictures: dict[Annotated[str, Field(pattern=r"^[\w-]+$")], Picture] = Field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    arm: str
    point: str  # of the grid, as text: num_queries=10
    values: tuple[Any, ...]  # of that point
    seed: int
    recipe: str
    overrides: Mapping[str, Any]  # settings on top of the recipe, by full name
    settings: Settings  # data.path is the name of the data set
    untrained: bool
    source: Cell | None = None  # the run whose weights it starts from, or learns from

    @property
    def label(self) -> str:
        """Return the name of its row: arm and point."""
        return ", ".join(part for part in (self.arm, self.point) if part) or self.recipe

    @property
    def identity(self) -> dict[str, Any]:
        """Return all that determines the weights."""
        flat = parsing.flatten(self.settings.model_dump(mode="json"))
        free = parsing.free_settings(self.kind, "resume")
        settings = {path: value for path, value in flat.items() if path not in free}
        identity = {"data": self.data, "untrained": self.untrained, "settings": settings}
        return identity if self.source is None else identity | {self.source_name: self.source.key}

    @property
    def data(self) -> str:
        """Return the name of its images."""
        return self.settings.data.path

    @property
    def kind(self) -> type[Settings]:
        """Return the class of its settings: of pretraining or of a distillation."""
        return type(self.settings)

    @property
    def source_name(self) -> str:
        """Return what an arm calls the source."""
        return "teacher" if self.kind is DistillSettings else "init"

    @property
    def key(self) -> str:
        """Return a hash of the identity, in which settings have the names of version 0.1, whose results are found so.

        Settings at their default are left out, so that a new setting of the program changes no key.
        """
        identity, defaults = self.identity, parsing.flatten(self.kind().model_dump(mode="json"))
        names, settings = parsing.old_names(self.kind), identity["settings"]
        changed = {names.get(path, path): value for path, value in settings.items() if value != defaults[path]}
        source = [] if self.source is None else [self.source_name, self.source.key]
        return _digest([identity["data"], self.untrained, sorted(changed.items()), *source])


@dataclass(frozen=True)
class Study:
    """A study and all its runs."""

    file: Path
    outline: Outline
    cells: tuple[Cell, ...]  # in the order in which they are run: all of one seed, then all of the next

    @property
    def arms(self) -> list[str]:
        """Return the names of the arms in their order in the file."""
        return list(dict.fromkeys(cell.arm for cell in self.cells))

    @property
    def points(self) -> list[str]:
        """Return the points of the grid, sorted if they are numbers, else in their order in the file."""
        points = {cell.point: cell.values for cell in self.cells}
        numeric = all(isinstance(value, int | float) for values in points.values() for value in values)
        return sorted(points, key=lambda point: points[point]) if numeric else list(points)

    @property
    def labels(self) -> list[str]:
        """Return the rows of the table."""
        labels = {(cell.arm, cell.point): cell.label for cell in self.cells}
        return [labels[arm, point] for arm in self.arms for point in self.points]

    @property
    def training_data(self) -> list[str]:
        """Return the data that its runs are trained on, each once."""
        return list(dict.fromkeys([self.outline.data, *(cell.data for cell in self.cells)]))

    def data_names(self) -> set[str]:
        """Return the names of all data sets it uses."""
        data = [*self.training_data, *(figure.data for figure in self.outline.pictures.values())]
        data += [one.data for one in self.outline.evaluations.values() if one.data is not None]
        return {data_name(one) for one in data}


def _digest(value: Any) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def _parse_data(data: str) -> re.Match[str]:
    parts = DATA.fullmatch(data)
    if parts is None or ".." in data:
        raise UserError(f"data '{data}' is not a name; write one such as imagenette/train, and imagenette=DIR when run")
    return parts


def data_name(data: str) -> str:
    """Return imagenette of imagenette/train, and of flowers:imagenette."""
    return _parse_data(data)["name"]


def data_folder(data: str, folders: Mapping[str, Path]) -> Path:
    """Return the folder of data, without its kind."""
    parts = _parse_data(data)
    return Path(f"{folders[parts['name']]}{parts['subfolder']}")


def data_path(data: str, folders: Mapping[str, Path]) -> str:
    """Return the folder of data after its kind, if it has one, as evaluations take it: flowers:/data/imagenette."""
    kind = _parse_data(data)["kind"]
    return f"{kind}:{data_folder(data, folders)}" if kind else str(data_folder(data, folders))


def read_study(file: Path) -> Study:
    """Read a study and refuse every mistake in it, before a run begins."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"study {file} cannot be read ({reason}); check the path") from None
    tree = parsing.load_yaml(text, f"study {file}")
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise UserError(f"study {file} is not a map; write lines such as 'title: ...' and 'recipe: adclr_small'")
    try:
        outline = parsing.validate_settings(Outline, tree)
        cells = tuple(_cells(outline))
        study = Study(file, outline, cells)
        study.data_names()  # raises for one that is not a name
        for title, evaluation in outline.evaluations.items():
            _check_evaluation(title, evaluation)
        for figure in outline.pictures.values():
            figure.build()
    except UserError as error:
        raise UserError(f"study {file}: {error}") from None
    probes = {(one.data, one.build("", "").every_epochs) for one in outline.evaluations.values() if one.is_time}
    if len(probes) > 1:
        raise UserError(f"study {file}: all {time_to_knn.NAME} need the same data and every_epochs; make them the same")
    if outline.control is not None and outline.control not in study.labels:
        raise UserError(f"study {file}: control '{outline.control}' is none of: {'; '.join(study.labels)}")
    return study


def _cells(outline: Outline) -> list[Cell]:
    arms = outline.arms or {"": None}
    for name, values in outline.grid.items():
        if not values:
            raise UserError(f"grid {name} has no values; give it some or leave it out")
    points = list(itertools.product(*([(name, value) for value in values] for name, values in outline.grid.items())))
    cells: dict[str, Cell] = {}  # by key

    @cache
    def make(name: str, seed: int, number: int) -> Cell:
        arm, source = arms[name] or Arm(), None
        if (needed := arm.init or arm.teacher) is not None:
            if needed not in list(arms)[: list(arms).index(name)]:
                raise UserError(f"arm '{name}' needs the weights of '{needed}', which is none of the arms above it")
            seeds = _seeds(outline, arms[needed])
            source = make(needed, seed if seed in seeds else seeds[0], number)
        return _cell(outline, name, arm, dict(points[number]), seed, source)

    all_seeds = dict.fromkeys(seed for arm in arms.values() for seed in _seeds(outline, arm))
    for seed, name, number in itertools.product(all_seeds, arms, range(len(points))):
        if seed not in _seeds(outline, arms[name]):
            continue
        cell = make(name, seed, number)
        twin = cells.setdefault(cell.key, cell)
        if twin is not cell:
            raise UserError(f"'{twin.label}' and '{cell.label}' are the same run; leave one of them out")
    return list(cells.values())


def _seeds(outline: Outline, arm: Arm | None) -> tuple[int, ...]:
    return outline.seeds if arm is None or arm.seeds is None else arm.seeds


def _cell(
    outline: Outline, name: str, arm: Arm, point: Mapping[str, Any], seed: int, source: Cell | None = None
) -> Cell:
    kind = DistillSettings if arm.teacher else Settings
    recipe = arm.recipe or (DEFAULT_RECIPE if arm.teacher else outline.recipe)
    overrides: dict[str, Any] = {}
    for layer in (outline.settings, arm.settings, point):
        for short, value in parsing.flatten(layer).items():
            path = parsing.full_name(kind, short)
            if path in RESERVED:
                raise UserError(
                    f"{path} is not a setting here; a study says 'data: NAME' and 'seeds: [0, 1]', and an arm "
                    "'init: ARM' or 'teacher: ARM'"
                )
            overrides[path] = value
    overrides["train.seed"] = seed
    base = parsing.flatten(parsing.load_recipe(recipe, "distill" if arm.teacher else ""))
    fixed = {"data.path": arm.data or outline.data}
    if source is not None:
        base |= _settings_of_weights(source, not arm.teacher)
        fixed["distill.teacher" if arm.teacher else "model.init"] = source.key  # `runner.build_job` names the folder
    settings = launch.resolve_settings(base, overrides | fixed, kind)
    label = ", ".join(f"{path.rsplit('.', 1)[-1]}={_format(value)}" for path, value in point.items())
    return Cell(name, label, tuple(point.values()), seed, recipe, overrides, settings, arm.untrained, source)


def _settings_of_weights(source: Cell, with_model: bool) -> dict[str, Any]:
    """Return the settings that a run takes over from the weights of another, as `launch.prepare` will."""
    flat = parsing.flatten(source.settings.model_dump(mode="json"))
    excluded = ("model.init", "model.drop_path")  # are no properties of weights
    model = [path for path in flat if path.startswith("model.") and path not in excluded] if with_model else []
    return {path: flat[path] for path in (*OF_WEIGHTS, "model.num_channels", *model)}


def _format(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(_format(one) for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check_evaluation(title: str, evaluation: Evaluation) -> None:
    if evaluation.name == TRAINING:
        return
    if {"weights", "data", "from_scratch", "partial"} & set(evaluation.settings):
        raise UserError(f"evaluation '{title}' takes weights and data from the study; leave them out of settings")
    try:
        evaluation.build("W", "D")
    except UserError as error:
        raise UserError(f"evaluation '{title}': {error}") from None
