"""What the page says of a run in numbers and words: how far it came, its health, and its evaluations."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import adclr as package
from adclr.evals import matching
from adclr.report.metrics import describe_status
from adclr.report.page import render_page
from adclr.report.record import read_record
from adclr.training import launch, loop
from adclr.training.journal import Journal
from tiny import TINY

SPARSE = TINY | {"train.log_every_steps": 10, "train.epochs": 800, "train.report": True}  # 4 steps are an epoch


def train_and_stop(images: Path, out: Path, step: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Trains until a SIGTERM after a step, as a cluster sends it."""
    take_note = Journal.step

    def signalled(self: Journal, done: int, *rest: Any) -> None:
        take_note(self, done, *rest)
        if done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    launched = launch.prepare(images / "train", out, None, SPARSE | changes)
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "step", signalled)
        with pytest.raises(SystemExit) as stopped:
            loop.train(launched)
    assert stopped.value.code == 75


def tiles(text: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", text))


def test_a_run_stopped_before_its_first_line_says_how_far_it_came(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    train_and_stop(images, run, 2, monkeypatch, **{"probe.data": str(images)})
    shown = tiles((run / "report.html").read_text())  # written when it stops
    assert (shown["epochs"], shown["steps"], shown["state"]) == ("0.5 of 800", "2", "stopped")


def test_health_is_measured_at_the_end_and_where_a_run_stops(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lines every 10 steps and measures every 100, as by default."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    short = {"train.epochs": 7, "train.report": False}
    loop.train(launch.prepare(images / "train", whole, None, SPARSE | short))
    assert [row["step"] for row in read_record(whole).health_rows] == [10, 28]
    texts = [statement.text for statement in describe_status(read_record(whole))]
    assert any("No sign of a collapse in 2 measurements" in text for text in texts)

    train_and_stop(images, parts, 17, monkeypatch, **short)
    stopped = read_record(parts)
    assert ([row["step"] for row in stopped.health_rows], stopped.state) == ([10, 17], "stopped")
    assert any("No sign of a collapse" in statement.text for statement in describe_status(stopped))
    loop.train(launch.prepare(images / "train", parts, None, SPARSE | short))
    assert (parts / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()  # as if never stopped


def test_a_run_for_which_nothing_was_set_says_whether_it_has_learned(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By views of its own images, which its weights and an untrained network match."""
    short = {"train.epochs": 1, "train.report": True}
    loop.train(launch.prepare(images / "train", tmp_path / "run", None, SPARSE | short))
    assert "on 32 training images, the nearest neighbor of a view" in capsys.readouterr().out
    scores = json.loads((tmp_path / "run" / "results.json").read_text())["own_images"]
    expected = package.evaluate("matching", weights=tmp_path / "run", data=images / "train", device="cpu")
    for name in ("image_matching", "patch_matching", "patch_matching_untrained"):
        assert scores[name] == pytest.approx(expected[name], abs=1e-3)
    page = (tmp_path / "run" / "report.html").read_text()  # also the page that was written at the end
    assert "No clear sign that it has learned: on 32 training images" in page

    risen = expected | {"image_matching": 90.0, "image_matching_untrained": 10.0}
    monkeypatch.setattr(matching, "compare", lambda *_, **__: risen)
    (tmp_path / "run" / "results.json").unlink()
    loop.train(launch.prepare(images / "train", tmp_path / "run", None, SPARSE | short))
    assert "for 90.0 % (untrained network: 10.0 %), and" in capsys.readouterr().out
    texts = [statement.text for statement in describe_status(read_record(tmp_path / "run"))]
    assert any(text.startswith("It has learned: on 32 training images, the nearest neighbor") for text in texts)

    for damaged in ({}, [], "x", {"image_matching": "9"}):  # of another version, or somebody else's
        (tmp_path / "run" / "results.json").write_text(json.dumps({"own_images": damaged}))
        assert not any("training images" in one.text for one in describe_status(read_record(tmp_path / "run")))

    named = {"probe.held_out": str(images / "val")}
    loop.train(launch.prepare(images / "train", tmp_path / "probed", None, SPARSE | short | named))
    loop.train(launch.prepare(images / "train", tmp_path / "recipe", "adclr_small", SPARSE | short))
    assert "training images, the nearest" not in capsys.readouterr().out


def test_a_run_of_a_few_steps_has_a_word_on_its_health(tmp_path: Path) -> None:
    row = {"step": 10, "target_kl": 0.2, "target_entropy": 0.9}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert describe_status(read_record(tmp_path)) == []  # it has just begun
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row | {"stopped": True}) + "\n")
    (statement,) = describe_status(read_record(tmp_path))
    assert not statement.good
    assert statement.text.startswith("Health was measured once")
    assert "0.2 nats" in statement.text


def test_few_measures_can_say_that_it_collapses(tmp_path: Path) -> None:
    rows = [{"step": 10, "target_kl": 0.2, "target_entropy": 0.9}, {"step": 40, "target_kl": 1e-5, "target_entropy": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (statement,) = describe_status(read_record(tmp_path))
    assert not statement.good
    assert statement.text.startswith("Uniform collapse, from 2 measurements")


def evaluated(run: Path, name: str, file: str, scores: dict[str, float], **settings: object) -> None:
    (run / "evals" / name).mkdir(parents=True, exist_ok=True)
    content = {"scores": scores, "settings": {"data": "/data/camvid"} | settings, "provenance": {"started": file}}
    (run / "evals" / name / f"{file}.json").write_text(json.dumps(content))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text('{"step": 8, "epoch": 2.0, "loss": 3.0}\n')
    return tmp_path


def test_evaluations_of_one_name_are_told_apart(run: Path) -> None:
    evaluated(run, "segmentation", "1", {"segmentation_miou": 15.3, "num_steps": 500.0}, head="linear", steps=500)
    evaluated(run, "segmentation", "2", {"segmentation_miou": 30.6, "num_steps": 486.0}, head="fpn", minutes=0.5)
    evaluated(run, "segmentation", "3", {"segmentation_miou": 32.9, "num_steps": 40_000.0}, head="upernet", size=352)
    section = render_page([read_record(run)]).split('id="evaluations"')[1].split("</section>")[0]
    rows = [re.sub(r"<[^>]+>", " ", row) for row in section.split("<tr>")[2:]]
    for row, words in zip(
        rows,
        (("head=linear", "500 steps"), ("head=fpn", "486 steps"), ("head=upernet", "40000 steps", "size=352")),
        strict=True,
    ):
        assert all(word in row for word in words), (row, words)
    assert "15.30 %" in rows[0]
    assert "num_steps" not in section


def test_the_tile_has_the_knn_of_an_evaluation_where_no_probe_was(run: Path) -> None:
    assert tiles(render_page([read_record(run)]))["kNN"] == "–"
    evaluated(run, "knn", "2026-01-02", {"knn_top1": 43.25}, weights=str(run))
    evaluated(run, "knn", "2026-01-01", {"knn_top1": 40.0}, weights=str(run))
    evaluated(run, "knn", "2026-01-03", {"knn_top1": 9.0}, weights=str(run), from_scratch=True)
    assert tiles(render_page([read_record(run)]))["kNN"] == "43.2 %"  # the newest, and never the control
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 8, "epoch": 2.0, "knn_top1": 50.0}\n')
    assert tiles(render_page([read_record(run)]))["kNN"] == "50.0 %"
