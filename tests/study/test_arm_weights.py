"""Arms of a study that start from, or learn from, the weights of another arm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from adclr.config.distillation import DistillSettings
from adclr.config.parsing import UserError
from adclr.data.sets import scenes
from adclr.study import runner, table
from adclr.study.fingerprints import compute_fingerprints
from adclr.study.jobs import Workspace, build_job, pending_evaluations, with_sources
from adclr.study.results import Results
from adclr.study.runner import run_cells
from adclr.study.study_file import Cell, read_study
from adclr.study.worker import run_job
from studied import study
from tiny import TINY, TINY_STUDENT

pytestmark = pytest.mark.usefixtures("one_thread")

OF_VIEWS = {name: value for name, value in TINY.items() if name in TINY_STUDENT and not name.startswith("model.")}
STUDENT = {name: value for name, value in TINY_STUDENT.items() if name.startswith("model.")}
ARMS: dict[str, Any] = {
    "start": {
        "seeds": [4],
        "settings": {"model.dim": 24, "model.depth": 2, "model.num_heads": 3, "model.patch_size": 4},
    },
    "further": {"init": "start", "data": "others/train", "settings": {"method.anchor_weight": 1.0}},
    "distilled": {"teacher": "start", "recipe": "distill_tiny", "settings": STUDENT | {"train.epochs": 3}},
}
CHANGES: dict[str, Any] = {"settings": OF_VIEWS, "arms": ARMS, "seeds": [0, 1], "control": "start"}


def test_arms_take_the_weights_of_an_arm_above(tmp_path: Path) -> None:
    parsed = read_study(study(tmp_path, **CHANGES))
    assert [(cell.arm, cell.seed) for cell in parsed.cells] == [
        ("start", 4),
        ("further", 0),
        ("distilled", 0),
        ("further", 1),
        ("distilled", 1),
    ]
    start, further, distilled, *_ = parsed.cells
    assert further.source == distilled.source == start  # of the first seed that there is
    assert further.settings.model.dim == 24  # the model is that of the weights
    assert (further.data, distilled.data) == ("others/train", "photos/train")
    assert isinstance(distilled.settings, DistillSettings)
    assert distilled.settings.model.dim == 16
    assert parsed.data_names() == {"photos", "others"}
    same_seed = read_study(
        study(tmp_path, **CHANGES | {"arms": ARMS | {"start": {"settings": ARMS["start"]["settings"]}}})
    )
    by_name = {(cell.arm, cell.seed): cell for cell in same_seed.cells}
    assert by_name["further", 1].source == by_name["start", 1]


def test_a_run_is_known_by_the_weights_it_needs(tmp_path: Path) -> None:
    def keys(**changes: Any) -> dict[str, str]:
        arms = {name: arm | changes.get(name, {}) for name, arm in ARMS.items()}
        cells = read_study(study(tmp_path, **CHANGES | {"arms": arms, "seeds": [0]})).cells
        return {cell.arm: cell.key for cell in cells}

    before = keys()
    assert len(set(before.values())) == 3
    other_start = keys(start={"settings": ARMS["start"]["settings"] | {"method.query_weight": 0.1}})
    assert not set(before.values()) & set(other_start.values())
    moved = keys(further={"data": "photos/train"})
    assert [name for name in before if before[name] != moved[name]] == ["further"]


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "below": ({"a": {"init": "b"}, "b": None}, "arm 'a' needs the weights of 'b', which is none of the arms above it"),
    "itself": ({"a": {"teacher": "a"}}, "none of the arms above it"),
    "two": ({"a": None, "b": {"init": "a", "teacher": "a"}}, "one of untrained, init and teacher"),
    "untrained": ({"a": None, "b": {"init": "a", "untrained": True}}, "one of untrained, init and teacher"),
    "as a setting": ({"a": {"settings": {"model.init": "W"}}}, "and an arm 'init: ARM' or 'teacher: ARM'"),
    "another model": ({"a": None, "b": {"teacher": "a", "recipe": "demo"}}, "demo is a recipe of adclr pretrain"),
    "a loss it has not": ({"a": None, "b": {"teacher": "a", "settings": {"query_weight": 1}}}, "query_weight"),
    "the data": ({"a": {"data": "../x"}}, "is not a name"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_mistakes(tmp_path: Path, mistake: str) -> None:
    arms, message = MISTAKES[mistake]
    with pytest.raises(UserError) as caught:
        read_study(study(tmp_path, arms=arms))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def make(study_file: Path, out: Path, folders: dict[str, Path]) -> tuple[list[str], Results]:
    """Make what is missing in this process, as a study does in others; return the arms."""
    parsed = read_study(study_file)
    results = Results(study_file.parent / "results", compute_fingerprints(parsed, folders))
    workspace, made = Workspace(out, folders, (None,)), []
    possible = [one for one in parsed.cells if pending_evaluations(parsed, one, results, workspace) is not None]
    for cell in with_sources(possible, results, workspace):
        run_job(build_job(parsed, cell, results, workspace))
        made.append(cell.arm)
    return made, results


def test_weights_are_made_first_and_again_where_they_are_gone(tmp_path: Path) -> None:
    for seed, name in enumerate(("photos", "others")):
        scenes.write_scenes(tmp_path / name, seed + 3, 32, 16, 24, show=False)
    folders, out = {"photos": tmp_path / "photos", "others": tmp_path / "others"}, tmp_path / "runs"
    file = study(tmp_path, **CHANGES | {"seeds": [0], "arms": {name: ARMS[name] for name in ("start", "further")}})
    assert make(file, out, {"photos": folders["photos"]})[0] == ["start"]  # the other images are not here
    assert make(file, out, folders)[0] == ["further"]
    start, further = sorted(out.iterdir(), key=lambda folder: (folder / "anchor.safetensors").exists())
    anchor = load_file(further / "anchor.safetensors")
    assert all(anchor[key].equal(value) for key, value in load_file(start / "backbone.safetensors").items())
    shutil.rmtree(start)
    file = study(tmp_path, **CHANGES | {"seeds": [0]})
    made, results = make(file, out, folders)
    assert made == ["start", "distilled"]  # `further` is done and needs nothing
    parsed = read_study(file)
    assert all(results.is_complete(parsed, cell) for cell in parsed.cells)
    by_arm = {cell.arm: cell for cell in parsed.cells}
    written = json.loads(results.file(by_arm["distilled"]).read_text())
    assert written["teacher"] == by_arm["start"].key
    assert str(tmp_path) not in json.dumps(written)
    page = table.render_page(parsed, results, table.collect_rows(parsed, results), None)
    assert "further: trained on others/train, starts from the weights of start, recipe demo." in page
    assert "distilled: learns from the weights of start, recipe distill_tiny." in page
    # other images of the start: what was made from it is not taken
    scenes.write_scenes(tmp_path / "new", 5, 32, 16, 24, show=False)
    changed = Results(tmp_path / "results", compute_fingerprints(parsed, folders | {"photos": tmp_path / "new"}))
    assert [changed.is_complete(parsed, cell) for cell in parsed.cells] == [False, False, False]


def test_runs_wait_for_their_weights_and_fail_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = read_study(study(tmp_path, **CHANGES | {"arms": {"other": None} | ARMS, "seeds": [4]}))
    started: list[str] = []

    def start(_: object, cell: Cell, *others: Any) -> runner.Worker:
        started.append(cell.arm)
        exit_codes = iter([None, 1 if cell.arm == "start" else 0])  # runs for one look
        process = SimpleNamespace(poll=lambda: next(exit_codes, 0), returncode=1 if cell.arm == "start" else 0)
        process.terminate = process.wait = lambda *_: None
        (tmp_path / "log").write_text("out of memory\n")
        return runner.Worker(cell, others[2], tmp_path / "log", process, 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.0)
    workspace = Workspace(tmp_path / "runs", {}, (None, None))
    with pytest.raises(UserError) as caught:
        run_cells(parsed, parsed.cells, Results(tmp_path / "results"), workspace, None)
    assert started == ["other", "start"]  # both slots; the others never
    assert "3 of 4 runs failed, first start, seed 4 (out of memory" in str(caught.value)
    # where its weights are here, only its scores failed
    (tmp_path / "runs" / parsed.cells[1].key).mkdir(parents=True)
    (tmp_path / "runs" / parsed.cells[1].key / "backbone.safetensors").touch()
    with pytest.raises(UserError, match="1 of 4 runs failed"):
        run_cells(parsed, parsed.cells, Results(tmp_path / "results"), workspace, None)
    assert started[2:] == ["other", "start", "further", "distilled"]
