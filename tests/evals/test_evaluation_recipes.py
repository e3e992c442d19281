"""Recipes of evaluations: each is of its evaluation, opens as recipes do, and runs when it is made small."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import adclr as package
from adclr import cli, evals
from adclr.config import parsing
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.evals import mask_rcnn
from dense_scenes import instances, saved, segmented

NAMES = parsing.recipe_names("evaluate")


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_opens_with_command_cost_and_score(name: str) -> None:
    lines = parsing.recipe_text(name, "evaluate").splitlines()
    assert lines[0].startswith("# ")
    for line, word in zip(lines[1:4], ("# command:", "# cost:", "# expected:"), strict=True):
        assert line.startswith(word)
        assert len(line) > len(word) + 5
    evaluation = name.split("_")[0]
    assert f"evaluate {evaluation} " in lines[1]
    assert lines[1].endswith(f"--recipe {name}")
    defaults = parsing.build(evals.import_evaluation(evaluation).Settings)
    assert parsing.differences(defaults, parsing.build(type(defaults), parsing.load_recipe(name, "evaluate"))) or (
        name in ("segmentation_linear", "detection_1x")  # which name the defaults
    )


SOME = ("segmentation_small_fpn", "segmentation_upernet", "detection_small", "incontext_full")


@pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.full) for name in NAMES]
)
def test_every_recipe_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is but for size: fewer and smaller everything."""
    monkeypatch.setattr(mask_rcnn, "WIDTH", 16)
    monkeypatch.setattr(mask_rcnn, "SAMPLES", 16)
    evaluation, weights = name.split("_")[0], saved(tmp_path / "weights")
    small: dict[str, Any] = {"size": 16} if evaluation != "detection" else {"sides": [32, 48], "longest": 48}
    if evaluation != "incontext":
        small |= {"steps": 2, "batch_size": 2}
    if "fpn" in name or "upernet" in name:
        small["width"] = 8
    data = (instances if evaluation == "detection" else segmented)(tmp_path / "data", 3, 2, 32)
    scores = package.evaluate(evaluation, weights=weights, data=str(data), recipe=name, device="cpu", **small)
    assert scores["num_val"] == 2


def test_a_recipe_is_of_its_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"recipe 'detection_1x' is not one of segmentation \(recipes: seg"):
        evals.load_recipe("segmentation", "detection_1x")
    with pytest.raises(UserError, match="is not one of knn, which has none"):
        evals.load_recipe("knn", "x")
    with pytest.raises(UserError, match="did you mean 'segmentation_fpn'"):
        evals.load_recipe("segmentation", "segmentation_fpm")
    (tmp_path / "own.yaml").write_text("k: 7\n")
    assert evals.load_recipe("incontext", str(tmp_path / "own.yaml")) == {"k": 7}
    cli.main(["evaluate", "detection", "--help"])
    assert "settings of detection (recipes: detection_1x, detection_small):" in capsys.readouterr().out


def test_every_command_and_setting_of_the_page_is_understood() -> None:
    text = (Path(__file__).parents[2] / "docs" / "dense.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(line)[1:]
        options = cli.parser().parse_args([word for word in words if not cli.WORD.match(word)])
        values = parsing.parse_words([word for word in words if cli.WORD.match(word)])
        if options.command == "pretrain":
            parsing.build(Settings, parsing.load_recipe(options.recipe), values)
        else:
            chosen = evals.import_evaluation(options.name).Settings
            parsing.build(chosen, evals.load_recipe(options.name, options.recipe), values)
    dense = [evals.import_evaluation(name).Settings for name in ("incontext", "segmentation", "detection", "video")]
    known = {field for chosen in dense for field in chosen.model_fields}
    for word in re.findall(r"`(\w+)=[^`]*`", text):
        assert word in known | {"key"}, word
    for name in re.findall(r"`(?:segmentation|detection|incontext)_[a-z_]*[a-z]`", text):
        assert name.strip("`") in [*NAMES, "incontext_miou"], name
