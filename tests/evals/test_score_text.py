"""What `adclr evaluate` prints: scores with their unit, and a line against the same network without pretraining."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from adclr import cli
from adclr.evals import import_evaluation, score_text
from adclr.training import launch, loop
from tiny import TINY


@pytest.fixture(scope="module")
def trained(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a probe at the start and at the end."""
    folder = tmp_path_factory.mktemp("words") / "run"
    loop.train(launch.prepare(images / "train", folder, None, TINY | {"probe.data": str(images)}))
    return folder


def evaluate(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    capsys.readouterr()
    cli.main(["evaluate", *map(str, words)])
    return capsys.readouterr().out.splitlines()


def last(lines: list[str]) -> str:
    """The line about the control, which stands before the one that names the file."""
    assert lines[-1].startswith("written to")
    return lines[-2]


def test_scores_have_units(trained: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = evaluate(capsys, "knn", "--weights", trained, "--data", images)
    scores = [line.split() for line in lines]
    for name in ("knn_top1", "knn_top5_k20", "knn_mean_class"):
        (number,) = [words[1:] for words in scores if words[0] == name and len(words) < 4]
        assert number[1:] == ["%"]
    assert ["num_val", "16"] in scores


def test_the_first_probe_of_the_run_is_the_control(
    trained: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(trained / "evals", ignore_errors=True)
    line = last(evaluate(capsys, "knn", "--weights", trained, "--data", images))
    assert "the same network without pretraining" in line
    assert "the run's first probe" in line
    other = last(evaluate(capsys, "knn", "--weights", trained, "--data", images, "features=both"))
    assert "--from-scratch" in other  # the probe measured something else


def test_the_command_that_is_named_gives_the_control(
    trained: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a file" / "backbone.safetensors"
    file.parent.mkdir()
    for name in ("backbone.safetensors", "backbone.json"):
        shutil.copy(trained / name, file.parent)
    words = ("knn", "--weights", file, "--data", images, "features=mean_patch", "k=[3,5]")
    line = last(evaluate(capsys, *words))
    assert line.startswith("for the same network without pretraining, run: adclr evaluate knn ")
    control = evaluate(capsys, *shlex.split(line.partition("run: ")[2])[2:])
    assert not any("without pretraining" in text for text in control)
    score, before = (
        float(next(text.split()[1] for text in lines if text.startswith("knn_top1 ")))
        for lines in (evaluate(capsys, *words), control)
    )
    line = last(evaluate(capsys, *words, "--out", tmp_path / "elsewhere.json"))
    assert line.startswith(f"knn_top1 {score:.1f} % is ")
    points = score - before
    assert (
        "the same as" if abs(points) < 0.05 else f"{abs(points):.1f} points {'above' if points > 0 else 'below'}"
    ) in line
    assert f"({before:.1f} %, {file.parent}/evals/knn/" in line


def test_a_control_beside_the_file_of_the_scores_is_taken(
    trained: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("knn", "--weights", trained, "--data", images, "temperature=0.1")
    evaluate(capsys, *words, "--from-scratch", "--out", tmp_path / "control.json")
    evaluate(capsys, *words[:-1], "temperature=0.2", "--from-scratch", "--out", tmp_path / "another.json")
    (tmp_path / "broken.json").write_text("{")
    assert f"{tmp_path}/control.json)" in last(evaluate(capsys, *words, "--out", tmp_path / "scores.json"))
    moved = tmp_path / "moved"
    shutil.copytree(trained, moved)
    assert "--from-scratch" in last(evaluate(capsys, *words[:2], moved, *words[3:]))  # other weights


def test_matching_has_its_control_with_it(trained: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = last(evaluate(capsys, "matching", "--weights", trained, "--data", images / "val"))
    assert line.startswith("image_matching ")
    assert "measured with it" in line


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ({"knn_top1": 50.0, "knn_top1_untrained": 30.0}, "50.0 % is 20.0 points above"),
        ({"knn_top1": 20.0, "knn_top1_untrained": 30.0}, "20.0 % is 10.0 points below"),
        ({"knn_top1": 30.0, "knn_top1_untrained": 30.0}, "30.0 % is the same as"),
    ],
)
def test_a_score_is_above_below_or_the_same(scores: dict[str, Any], words: str, tmp_path: Path) -> None:
    (line,) = score_text.compare_with_control(
        "knn", import_evaluation("knn").Settings(weights="w", data="d"), scores, tmp_path / "none.json"
    )
    assert words in line
