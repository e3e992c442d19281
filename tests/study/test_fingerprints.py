"""Scores of a study are those of the data that is named, not of another data set that had its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

import adclr as package
from adclr import cli
from adclr import study as studies
from adclr.data.sets import scenes
from adclr.study.fingerprints import compute_fingerprints, is_same
from adclr.study.jobs import Workspace, build_job
from adclr.study.results import Results
from adclr.study.study_file import Cell, Study, read_study
from adclr.study.worker import run_job
from adclr.weights.backbone import architecture, save_backbone
from plain_images import colored
from studied import KNN, store_results, study
from tiny import TINY, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
ARMS = {"ADCLR": None, "start": {"untrained": True}}
LAB = KNN | {"data": "lab"}
ONE = {"settings": TINY, "arms": ARMS, "data": "lab/train", "evaluations": {"kNN": LAB}}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are made here, one after the other: a process of its own for each takes seconds to start."""

    def run_cells(
        study: Study, cells: Sequence[Cell], results: Results, workspace: Workspace, minutes: float | None
    ) -> list[Cell]:
        assert minutes is None
        for cell in cells:
            run_job(json.loads(json.dumps(build_job(study, cell, results, workspace))))
        return []

    monkeypatch.setattr(studies, "run_cells", run_cells)


@pytest.fixture(scope="module")
def labs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two data sets of the same layout: names are the same in part, images are others."""
    folder = tmp_path_factory.mktemp("labs")
    scenes.write_scenes(folder / "A", 0, 48, 16, 24, show=False)
    scenes.write_scenes(folder / "B", 1, 48, 16, 24, show=False)
    return {"A": folder / "A", "B": folder / "B"}


def scores(folder: Path) -> dict[str, float]:
    numbers = json.loads((folder / "results" / "one.json").read_text())
    return {arm: columns["kNN"]["mean"] for arm, columns in numbers.items()}


def test_scores_are_of_the_data_that_is_named(
    tmp_path: Path, labs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = study(tmp_path, **ONE)

    def run(name: str) -> str:
        cli.main(["study", str(file), "--out", str(tmp_path / "runs"), *([f"lab={labs[name]}"] if name else [])])
        return capsys.readouterr().out

    assert "2 runs, 0 of them done" in run("A")
    first = scores(tmp_path)
    output = run("B")
    assert "2 runs, 0 of them done" in output
    assert f"1 runs here were trained on other images than those of {labs['B']}/train; they are not taken" in output
    assert f"kNN: 1 scores here are of other data than {labs['B']}; they are not taken" in output  # of the untrained
    assert scores(tmp_path) != first
    second = scores(tmp_path)
    # both are kept: neither is made again
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("backbone.safetensors")}
    assert len(times) == 3  # the untrained network is the same on both
    output = run("A")
    assert "2 runs, 2 of them done" in output
    assert "not taken" not in output
    assert scores(tmp_path) == first
    assert "2 runs, 2 of them done" in run("B")
    assert scores(tmp_path) == second
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("backbone.safetensors")} == times
    assert "on several data sets called lab; without lab=DIR the first is taken" in run("")
    assert scores(tmp_path) == first


def test_a_copy_of_the_data_is_the_same_data(tmp_path: Path, labs: dict[str, Path]) -> None:
    shutil.copytree(labs["A"], tmp_path / "copy", copy_function=shutil.copyfile)  # with new times
    (tmp_path / "copy" / ".DS_Store").write_text("of a file manager")
    file = study(tmp_path, **ONE)
    parsed = read_study(file)
    assert compute_fingerprints(parsed, {"lab": labs["A"]}) == compute_fingerprints(parsed, {"lab": tmp_path / "copy"})
    assert compute_fingerprints(parsed, {"lab": labs["A"]}) != compute_fingerprints(parsed, {"lab": labs["B"]})
    (tmp_path / "copy" / "train" / "notes.txt").write_text("no image")  # which nothing is trained on
    changed = compute_fingerprints(parsed, {"lab": tmp_path / "copy"})
    assert changed.training == compute_fingerprints(parsed, {"lab": labs["A"]}).training
    # it could be a file of labels
    assert changed.evaluations != compute_fingerprints(parsed, {"lab": labs["A"]}).evaluations


def test_data_of_the_same_names_and_sizes_is_told_apart(tmp_path: Path) -> None:
    """Uncompressed images of one size, and labels of as many letters."""
    file = study(tmp_path, **ONE)
    parsed, cell = read_study(file), read_study(file).cells[0]
    for name, color in (("A", "red"), ("B", "blue")):
        for number in range(5):
            image = tmp_path / name / "train" / "one" / f"{number}.bmp"
            image.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), color).save(image)
        (tmp_path / name / "labels.csv").write_text("0.bmp,cat\n")
    first, second = (compute_fingerprints(parsed, {"lab": tmp_path / name}) for name in "AB")
    assert not is_same(str(first.training), str(second.training))
    assert not is_same(first.evaluations["lab"], second.evaluations["lab"])
    results = Results(tmp_path / "results", first)
    written = results.file(cell)
    written.parent.mkdir(parents=True)
    written.write_text(json.dumps({"fingerprint": first.training}))
    assert Results(tmp_path / "results", second).file(cell) not in (written, tmp_path)
    shutil.rmtree(tmp_path / "B")
    shutil.copytree(tmp_path / "A", tmp_path / "B")
    assert compute_fingerprints(parsed, {"lab": tmp_path / "B"}) == first
    (tmp_path / "B" / "labels.csv").write_text("0.bmp,dog\n")
    corrected = compute_fingerprints(parsed, {"lab": tmp_path / "B"})
    assert corrected.training == first.training
    assert not is_same(corrected.evaluations["lab"], first.evaluations["lab"])


def test_fingerprints_of_names_and_sizes_are_still_compared(tmp_path: Path, labs: dict[str, Path]) -> None:
    """Results that are in the repository have those, without a hash of contents."""
    parsed = read_study(study(tmp_path, **ONE))
    for prints in (compute_fingerprints(parsed, {"lab": labs[name]}) for name in "AB"):
        for current in (*prints.training.values(), *prints.evaluations.values()):
            names, _, contents = current.partition(".")
            assert (len(names), len(contents)) == (32, 32)
            assert is_same(names, current)
            assert is_same(current, names)
            assert not is_same("0" * 32, current)
            assert not is_same(f"{names}.{'0' * 32}", current)


def test_results_that_say_nothing_of_their_data_are_taken(
    tmp_path: Path, labs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = study(tmp_path, **ONE)
    store_results(tmp_path / "results", file, {("ADCLR", 0): 50.0, ("start", 0): 40.0})
    cli.main(["study", str(file), "--out", str(tmp_path / "runs"), f"lab={labs['B']}"])
    output = capsys.readouterr().out
    assert "2 runs, 2 of them done" in output
    assert "not taken" not in output
    assert scores(tmp_path) == {"ADCLR": 50.0, "start": 40.0}


def test_only_scores_are_made_again_where_only_their_data_is_other(
    tmp_path: Path, labs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = study(tmp_path, **ONE | {"data": "photos/train"})
    command = ["study", str(file), "--out", str(tmp_path / "runs"), f"photos={labs['A']}"]
    cli.main([*command, f"lab={labs['A']}"])
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("backbone.safetensors")}
    capsys.readouterr()
    cli.main([*command, f"lab={labs['B']}"])
    output = capsys.readouterr().out
    assert "kNN: 2 scores here are of other data" in output
    assert "trained" not in output.split("\n\n")[0]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("backbone.safetensors")} == times
    (first, *_) = sorted((tmp_path / "results" / "runs").glob("*.json"))
    entries = json.loads(first.read_text())["evaluations"].values()
    assert len({entry["fingerprint"] for entry in entries}) == 2


def test_transfer_scores_a_replaced_image_again(tmp_path: Path) -> None:
    save_backbone(tmp_path / "w", architecture(tiny()).build().state_dict(), tiny())
    data, out = colored(tmp_path / "data", 24, 12), tmp_path / "t.json"
    settings = {"weights": tmp_path / "w", "data": [data], "out": out, "device": "cpu", "linear.quick": True}
    package.evaluate("transfer", **settings)
    (part,) = (tmp_path / "t").glob("*.json")
    before = part.stat().st_mtime_ns
    package.evaluate("transfer", **settings)
    assert part.stat().st_mtime_ns == before
    image = next((data / "train" / "c0").iterdir())
    shutil.copy(next((data / "train" / "c1").iterdir()), image)
    package.evaluate("transfer", **settings)
    assert part.stat().st_mtime_ns > before
