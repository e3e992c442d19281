"""The time until a kNN accuracy is reached: by hand from the lines of a run, and of a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adclr.config.parsing import UserError
from adclr.data.sets import scenes
from adclr.study import table, time_to_knn, worker
from adclr.study.jobs import Workspace, build_job, pending_evaluations
from adclr.study.results import Results
from adclr.study.study_file import read_study
from adclr.study.time_to_knn import TimeSettings, measure, seconds_until
from adclr.system.runs import Run
from studied import KNN, study
from tiny import TINY

TIMING = [
    {"step": 10, "seconds": 20.0, "seconds_starting": 7.0, "seconds_to_first_step": 12.0, "seconds_probing": 99.0},
    {"step": 20, "seconds": 10.0},
    {"step": 25, "seconds": 5.0},  # stopped here
    {"step": 40, "seconds": 30.0, "seconds_starting": 4.0, "seconds_to_first_step": 8.0},
    {"step": 40, "seconds": 2.0},  # after the last step
]


@pytest.mark.parametrize(
    ("step", "seconds"), [(0, 7.0), (5, 17.0), (10, 27.0), (15, 32.0), (20, 37.0), (25, 42.0), (30, 56.0), (40, 76.0)]
)
def test_seconds_are_summed_over_starts_and_divided_between_lines(step: int, seconds: float) -> None:
    assert seconds_until(TIMING, step) == pytest.approx(seconds)


def write_run(folder: Path, accuracies: list[float]) -> Run:
    run = Run(folder)
    for row in TIMING:
        run.append("timing.jsonl", row)
    for number, accuracy in enumerate(accuracies):
        row = {"step": 10 * number, "epoch": 2.0 * number}
        run.append("metrics.jsonl", row | {"loss": 1.0})
        run.append("metrics.jsonl", row | {"knn_top1": accuracy})
    return run


def test_the_first_probe_that_reaches_it_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path, [10.0, 40.0, 30.0, 50.0])
    reached = {"minutes": 27 / 60, "epochs": 2.0, "best": 50.0, "seconds_to_first_step": 12.0}
    assert measure(run, TimeSettings(at_least=35)) == pytest.approx(reached)
    assert measure(run, TimeSettings(at_least=40))["epochs"] == 2
    assert measure(run, TimeSettings(at_least=40.1))["minutes"] == pytest.approx(56 / 60)
    assert measure(run, TimeSettings(at_least=51)) == {"best": 50.0, "seconds_to_first_step": 12.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {}}, "at_least"),
        ({"settings": {"at_least": 101}}, "at_least"),
        ({"data": None}, "needs data"),
        ({"score": "knn_top1"}, "has no score 'knn_top1'; it has: minutes, epochs"),
        ({"recipe": "x"}, "has no recipes; leave out recipe"),
    ],
)
def test_mistakes_in_the_column_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = study(tmp_path, evaluations={"minutes": column(50) | changes})
    with pytest.raises(UserError, match=message):
        read_study(file)


def test_all_columns_of_a_study_are_of_one_probe(tmp_path: Path) -> None:
    other = column(60) | {"settings": {"at_least": 60, "every_epochs": 2}}
    file = study(tmp_path, evaluations={"a": column(50), "b": other})
    with pytest.raises(UserError, match="the same data and every_epochs"):
        read_study(file)


def column(at_least: float) -> dict[str, Any]:
    return {"name": "time_to_knn", "data": "photos", "score": "minutes", "settings": {"at_least": at_least}}


def test_a_run_is_scored_on_the_way_and_one_without_scores_is_trained_again(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    scenes.write_scenes(photos, 0, 24, 8, 24, show=False)
    settings = TINY | {"train.epochs": 2, "train.log_every_steps": 1, "train.report": False}
    columns = {"to 1 %": column(1), "to 100 %": column(100)}
    file = study(tmp_path, settings=settings, arms={"ADCLR": None, "start": {"untrained": True}}, evaluations=columns)
    parsed, results = read_study(file), Results(tmp_path / "results")
    cell, untrained = parsed.cells
    assert results.missing_evaluations(untrained, parsed.outline.evaluations) == []  # nothing is trained there
    here = Workspace(tmp_path / "runs", {"photos": photos}, [None])
    job = build_job(parsed, cell, results, here)
    assert job["probe"] == {"probe.data": str(photos), "probe.every_epochs": 1}
    worker.run_job(job)
    stored = [one["scores"] for one in json.loads(results.file(cell).read_text())["evaluations"].values()]
    assert stored[0]["epochs"] == 0.0  # chance is above 1 %
    assert stored[0]["minutes"] > 0  # since this process started
    assert "minutes" not in stored[1]
    assert stored[1]["seconds_to_first_step"] > 60 * stored[0]["minutes"]
    assert not (tmp_path / f"runs/{cell.key}-timed").exists()
    rows = table.collect_rows(parsed, results)
    page = table.render_page(parsed, results, rows, None)
    assert "**Not reached: to 100 %, by ADCLR, seed 0.**" in page
    assert "start-up s" in page
    assert "`minutes` until kNN on photos, scored every 1 epochs, is at least 1 %" in page
    # weights that came without these scores: the training is repeated beside them
    metrics = tmp_path / f"runs/{cell.key}/metrics.jsonl"
    metrics.write_text("".join(line for line in metrics.read_text().splitlines(True) if "knn_top1" not in line))
    results.file(cell).unlink()
    weights = (tmp_path / f"runs/{cell.key}/backbone.safetensors").read_bytes()
    worker.run_job(build_job(parsed, cell, results, here))
    assert (tmp_path / f"runs/{cell.key}-timed/backbone.safetensors").read_bytes() == weights
    again = [one["scores"] for one in json.loads(results.file(cell).read_text())["evaluations"].values()]
    assert again[0]["best"] == stored[0]["best"]


def test_without_the_images_of_the_training_no_time_is_measured(tmp_path: Path) -> None:
    columns = {"kNN": KNN | {"data": "flowers"}, "minutes": column(50) | {"data": "flowers"}}
    parsed, results = read_study(study(tmp_path, evaluations=columns)), Results(tmp_path / "results")
    (cell,) = parsed.cells
    here = Workspace(tmp_path / "runs", {"flowers": tmp_path}, [None])
    assert pending_evaluations(parsed, cell, results, here) is None
    both = Workspace(tmp_path / "runs", {"flowers": tmp_path, "photos": tmp_path}, [None])
    pending = pending_evaluations(parsed, cell, results, both)
    assert pending is not None
    assert [one.name for one in pending] == ["knn", time_to_knn.NAME]
