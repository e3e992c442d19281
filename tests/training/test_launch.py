"""From a command to settings: short trials, more epochs for a run that has ended, limits."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

import adclr as package
from adclr import cli
from adclr.config import parsing
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.study.study_file import read_study
from adclr.system.runs import Run
from adclr.training import launch
from studied import study
from tiny import TINY, Adclr, words

SHORT = {name: value for name, value in TINY.items() if name not in ("train.epochs", "optim.warmup_epochs")}
IN_EPOCHS = ("optim.warmup_epochs", "method.teacher_temperature_warmup_epochs", "optim.freeze_last_layer_epochs")


def lengths(settings: Settings) -> tuple[float, ...]:
    flat = parsing.flatten(settings.model_dump())
    return tuple(flat[path] for path in IN_EPOCHS)


def test_a_short_trial_has_a_short_warm_up(images: Path, tmp_path: Path, adclr: Adclr) -> None:
    command = ["pretrain", images / "train", "--out", tmp_path / "run", "--recipe", "adclr_small", *words(SHORT)]
    done = adclr(*command, "epochs=2")
    assert done.returncode == 0, done.stderr
    assert "optim.warmup_epochs=0.1 instead of 10" in done.stdout
    stored = yaml.safe_load((tmp_path / "run/settings.yaml").read_text())
    assert stored["optim"]["warmup_epochs"] == 0.1  # of 2, as 10 of 200
    assert stored["method"]["teacher_temperature_warmup_epochs"] == 0.3  # as 30 of 200
    assert stored["optim"]["freeze_last_layer_epochs"] == 1
    assert "is finished" in adclr(*command, "epochs=2").stdout


@pytest.mark.parametrize(
    ("recipe", "said", "expected"),
    [
        ({}, {"epochs": 5}, (0.5, 1.5, 1)),
        ({}, {"epochs": 1}, (0.1, 0.3, 0.01)),
        ({}, {"train.epochs": 20}, (10, 6.0, 1)),  # only what does not fit
        ({}, {"train": {"epochs": 30}}, (10, 30, 1)),
        ({"epochs": 400, "freeze_last_layer_epochs": 3}, {"epochs": 2}, (0.05, 0.15, 0.015)),
        ({"train": {"epochs": 5}}, {}, (0.5, 30, 1)),  # a recipe that says its epochs and no more
        ({"train": {"epochs": 50}}, {}, (10, 30, 1)),
        ({}, {"epochs": 5, "warmup_epochs": 1}, (1, 1.5, 1)),
        ({}, {"epochs": 5, "method.teacher_temperature_warmup_epochs": 9}, (0.5, 9, 1)),
    ],
)
def test_what_the_user_does_not_set_is_scaled_if_it_does_not_fit(
    recipe: dict[str, object], said: dict[str, object], expected: tuple[float, ...]
) -> None:
    assert lengths(launch.resolve_settings(recipe, said)) == pytest.approx(expected)


def test_what_the_user_sets_is_not_scaled() -> None:
    for recipe, said in (({}, {"epochs": 5, "warmup_epochs": 5}), ({"epochs": 5, "warmup_epochs": 6}, {})):
        with pytest.raises(UserError, match=r"leaves none of the 5 epochs; set optim\.warmup_epochs=0\.5"):
            launch.resolve_settings(recipe, said)
    with pytest.raises(UserError, match=r"train\.epochs='many'"):
        launch.resolve_settings({}, {"epochs": "many"})


@pytest.mark.parametrize("name", parsing.recipe_names())
def test_recipes_are_left_as_they_are(name: str) -> None:
    recipe = parsing.load_recipe(name)
    assert launch.resolve_settings(recipe, {}) == parsing.build(Settings, recipe)


def test_a_study_and_its_runs_scale_alike(tmp_path: Path) -> None:
    file = study(tmp_path, recipe="adclr_small", settings={"train.epochs": 4})
    (cell,) = read_study(file).cells
    assert lengths(cell.settings) == (0.2, 0.6, 1)
    assert lengths(launch.resolve_settings(parsing.load_recipe(cell.recipe), cell.overrides)) == lengths(cell.settings)


def test_a_run_from_before_lengths_were_scaled_is_resumed(images: Path, tmp_path: Path) -> None:
    said = SHORT | {"epochs": 4, "optim.warmup_epochs": 1}
    old = said | {"method.teacher_temperature_warmup_epochs": 30}
    run = package.pretrain(images / "train", tmp_path / "run", recipe="adclr_small", **old)
    launched = launch.prepare(images / "train", run.path, "adclr_small", said)
    assert lengths(launched.settings) == (1, 30, 1)
    with pytest.raises(UserError, match=r"teacher_temperature_warmup_epochs is 30\.0 there and 20\.0 here"):
        launch.prepare(images / "train", run.path, "adclr_small", said | {"teacher_temperature_warmup_epochs": 20})


def test_more_epochs_for_a_run_that_has_ended(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence names a command that does it, and that command works."""
    monkeypatch.chdir(tmp_path)
    run = package.pretrain(images / "train", "a run", recipe="adclr_vits16", **TINY)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        cli.main(["pretrain", str(images / "train"), "--out", "a run", *words(TINY), "epochs=5"])
    assert stopped.value.code == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "a run has done its 2 epochs, and its learning rate ends there" in sentence
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    command = re.search(r"adclr (pretrain .*)$", sentence)
    assert command is not None
    assert "epochs=3" in command[1]
    cli.main(shlex.split(command[1]))
    (further,) = (path for path in tmp_path.iterdir() if path.name != "a run")
    settings = Run(further).settings()
    assert settings is not None
    assert settings.model.init == "a run"
    assert settings.train.epochs == 3
    assert settings.train.batch_size == TINY["train.batch_size"]
    assert Run(further).finished


def test_other_epochs_for_a_run_that_has_not_ended(images: Path, tmp_path: Path) -> None:
    run = package.pretrain(images / "train", tmp_path / "run", recipe="adclr_vits16", **TINY)
    (run.path / "results.json").unlink()
    with pytest.raises(UserError, match=r"is a run of 2 epochs.*leave out epochs=5, or choose another --out"):
        launch.prepare(images / "train", run.path, None, {"epochs": 5})


def test_fewer_epochs_than_a_run_has_done_are_refused_as_such(images: Path, tmp_path: Path) -> None:
    """Not as too few for its warm-up, which nobody has asked for."""
    run = Run(tmp_path / "run")
    run.write_settings(parsing.build(Settings, TINY, {"data.path": str(images / "train"), "warmup_epochs": 1.0}))
    run.append("metrics.jsonl", {"step": 1, "loss": 2.0})
    with pytest.raises(UserError, match=r"is a run of 2 epochs, .*; leave out epochs=1, or choose another --out"):
        launch.prepare(None, run.path, None, {"epochs": 1})


@pytest.mark.parametrize("epochs", [-1, 0])
def test_epochs_below_1_are_refused_by_their_own_name(images: Path, tmp_path: Path, epochs: int) -> None:
    with pytest.raises(UserError, match=rf"train\.epochs={epochs} is not possible"):
        launch.prepare(images / "train", tmp_path / "run", "adclr_small", {"epochs": epochs})


@pytest.mark.parametrize("epochs", ["1e9", "100001"])
def test_epochs_without_end_are_refused(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], epochs: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["pretrain", str(images / "train"), "--out", str(tmp_path / "run"), f"epochs={epochs}"])
    assert stopped.value.code == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "train.epochs=1" in sentence
    assert "less than or equal to 100000" in sentence
    assert not (tmp_path / "run").exists()
