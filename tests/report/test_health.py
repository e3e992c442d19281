"""Diagnoses of health metrics, forced collapses, and the score without labels."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import adclr as package
from adclr.data.random_draws import Draws
from adclr.data.sets import scenes
from adclr.evals import matching
from adclr.report import health, record
from adclr.report.metrics import describe_status
from adclr.training.probe import summarize
from tiny import TINY, Adclr

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

import collapses

CPU = torch.device("cpu")


def row(**changes: float) -> dict[str, float]:
    return {
        "target_kl": 0.3,
        "target_entropy": 0.5,
        "rank_cls": 10.0,
        "rank_patches": 20.0,
        "rank_queries": 20.0,
    } | changes


@pytest.mark.parametrize(
    ("bad", "name", "words"),
    [
        ({"target_kl": 1e-4, "target_entropy": 0.999}, "uniform collapse", r"lower method\.teacher_temperature"),
        ({"target_kl": 1e-4, "target_entropy": 0.01}, "constant collapse", r"lower method\.center_momentum"),
        ({"rank_patches": 1.1}, "dimensional collapse", "the effective rank of patches is 1.1, "),
        ({"queries_in_cls": 0.9}, "collapse onto the queries", r"set model\.query_keys=image"),
    ],
)
def test_which_collapse_is_found_and_when(bad: dict[str, float], name: str, words: str) -> None:
    first = row()
    assert health.diagnose([first]) is None
    assert health.diagnose([first] * 10) is None
    assert health.diagnose([first, row(**bad), row(**bad)]) is None  # three in a row
    assert health.diagnose([first, row(**bad), row(), row(**bad), row(**bad)]) is None
    finding = health.diagnose([first, row(), row(**bad), row(**bad), row(**bad)])
    assert finding is not None
    assert finding.name == name
    assert re.search(words, finding.words)
    assert health.diagnose([first, *[row(**bad)] * 3, row()]) is None  # it got over it


SHORTCUT = {"query_image_gap": 0.01, "query_loss_of_log_k": 0.05, "query_temperature": 0.04}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"query_image_gap": 0.4}, False),  # it reads the image
        ({"query_loss_of_log_k": 0.6}, False),  # it has learned nothing yet: every gap is small then
        ({"query_temperature": 0.1}, False),  # soft targets
    ],
)
def test_the_query_shortcut_is_named_with_the_settings_to_change(changes: dict[str, float], expected: bool) -> None:
    first, later = row(), row(**(SHORTCUT | changes))
    assert health.diagnose_shortcut([first, later, later]) is None  # three in a row
    finding = health.diagnose_shortcut([first, *[later] * 3])
    assert (finding is not None) is expected
    if finding is not None:
        assert "only 0.01 nats higher" in finding.words
        assert re.search(r"set method\.query_temperature=0\.12.*views\.query_source=local", finding.words)
    for temperature, named in ((0.07, expected), (0.12, False)):  # after its warm-up; 0.12: targets are to get soft
        finding = health.diagnose_shortcut([first, *[later] * 3], last_temperature=temperature)
        assert (finding is not None) is named
    assert health.diagnose_shortcut([first, *[row()] * 3]) is None  # of a run of an earlier version
    assert health.diagnose([first, *[later] * 3]) is None  # it is no collapse


def test_published_queries_take_the_shortcut_and_read_only_ones_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenes.write_scenes(tmp_path / "scenes", seed=0, num_train=400, num_val=8, size=64, show=False)
    changes = {"train.epochs": 16, "query_weight": 2.0, "num_prototypes": 64, "lr": 4e-3}
    run = collapses.train(tmp_path / "scenes", tmp_path / "published", **changes)
    assert "query shortcut: queries are matched by their own pixels" in capsys.readouterr().err
    rows = [row for row in run.rows("metrics.jsonl") if "target_kl" in row]
    assert all(row["query_temperature"] == pytest.approx(0.04) for row in rows)
    assert any("Query shortcut" in statement.text for statement in describe_status(record.read_record(run.path)))
    changes |= {"query_read_only_blocks": 2, "query_keys": "patches"}
    run = collapses.train(tmp_path / "scenes", tmp_path / "read_only", **changes)
    assert "query shortcut" not in capsys.readouterr().err
    assert [row for row in run.rows("metrics.jsonl") if "target_kl" in row][-1]["query_image_gap"] > 0.5


# 40 steps, 4 patches
SHORT = {"train.epochs": 20, "train.batch_size": 16, "warmup_epochs": 1, "dim": 24, "depth": 2, "num_queries": 2}
SHORT |= {"global_size": 8, "local_size": 4, "health_every_steps": 5, "log_every_steps": 5}


@pytest.mark.parametrize("name", collapses.FORCED)
def test_forced_collapses_are_named(
    images: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, changes = collapses.FORCED[name]
    few = {"num_queries": 16} if "num_queries" in changes else {}
    findings = collapses.findings(collapses.train(images, tmp_path / "run", **(SHORT | changes | few)))
    assert {name for _, name in findings} == {expected}
    assert f"step {findings[0][0]}: {expected}: " in capsys.readouterr().err


def test_a_healthy_run_has_no_findings_and_its_health_is_in_the_metrics(images: Path, tmp_path: Path) -> None:
    run = collapses.train(images, tmp_path / "run", **SHORT)
    assert collapses.findings(run) == []
    rows = [row for row in run.rows("metrics.jsonl") if "target_kl" in row]
    assert [row["step"] for row in rows] == list(range(5, 41, 5))
    for name in ("target_entropy", "prototypes_used", "deviation_cls", "rank_patches", "loss_of_log_k"):
        assert all(name in row for row in rows)


def test_health_is_measured_at_lines_of_the_metrics(images: Path, tmp_path: Path) -> None:
    changes = TINY | {"log_every_steps": 3, "health_every_steps": 5, "epochs": 5}
    run = package.pretrain(images / "train", out=tmp_path / "run", **changes)
    assert [row["step"] for row in run.rows("metrics.jsonl") if "target_kl" in row] == [3, 6, 12, 15, 20]
    never = package.pretrain(images / "train", out=tmp_path / "never", **(TINY | {"health_every_steps": None}))
    assert not any("target_kl" in row for row in never.rows("metrics.jsonl"))


def test_patches_are_matched_to_their_places() -> None:
    """Features that say where in the image a patch lies find their place; noise finds it by chance."""
    grid, keys = (6, 6), torch.arange(50).numpy().astype("uint64")
    one, other = matching.draw_views(Draws(0, 0, keys), CPU)

    def where(boxes: matching.Boxes) -> torch.Tensor:
        down, across = matching._middles(grid, CPU)
        x, y = boxes.to_image(across.flatten(), down.flatten())
        angles = torch.stack([x, y], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    right, chance, count = matching.match_patches(where(one), where(other), one, other, grid)
    assert right == count > 500
    torch.manual_seed(0)
    right, chance, count = matching.match_patches(torch.randn(50, 36, 8), torch.randn(50, 36, 8), one, other, grid)
    assert right / count == pytest.approx(chance / count, abs=0.03)
    assert 2 / 36 < chance / count <= 4 / 36  # those between which a place lies, fewer at the edge


def test_views_are_cut_where_the_boxes_say() -> None:
    """An image whose colors are its places shows in each view the places that `place` gives."""
    down, across = matching._middles((60, 60), CPU)
    image = torch.stack([across, down, across]).expand(8, 3, 60, 60)
    for boxes in matching.draw_views(Draws(0, 0, torch.arange(8).numpy().astype("uint64")), CPU):
        cut = matching.crop_views(image, boxes, (12, 12))
        v, u = matching._middles((12, 12), CPU)
        x, y = boxes.to_image(u, v)
        assert (cut[:, 0] - x).abs().max() < 0.02
        assert (cut[:, 1] - y).abs().max() < 0.02
        back = boxes.to_view(x.flatten(1), y.flatten(1))
        assert torch.allclose(back[0], u.flatten().expand(8, -1), atol=1e-5)
        assert torch.allclose(back[1], v.flatten().expand(8, -1), atol=1e-5)


def test_images_are_found_again_by_their_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "ROWS", 3)  # several parts
    features = torch.randn(10, 32)
    near = features + 0.1 * torch.randn(10, 32)
    assert matching.count_matches(features, 7 * near) == 10
    assert matching.count_matches(features, near[[1, 0, *range(2, 10)]]) == 8
    assert matching.count_matches(torch.ones(10, 32), torch.ones(10, 32)) == 1  # it says the same of all


def test_what_counts_as_learning() -> None:
    """Three deviations of a share of images; patches of an image are one case; and never beside a finding."""

    def row(images: float, patches: float) -> dict[str, float]:
        shares = {"image_matching": images, "patch_matching": patches}
        return shares | {"held_out_rank_cls": 4.0, "held_out_rank_patches": 9.0, "held_out_images": 400.0}

    def conclusion(images: float, patches: float, finding: str | None = None) -> str:
        return (summarize([{"loss": 1.0}, row(20.0, 50.0), row(images, patches)], finding) or "").rpartition(": ")[2]

    assert conclusion(34.0, 48.0) == "it has learned"
    assert conclusion(20.0, 66.0) == "it has learned"
    assert conclusion(25.0, 53.0) == "no clear sign that it has learned"  # which two untrained networks can differ by
    assert conclusion(3.0, 30.0) == "no clear sign that it has learned"
    assert conclusion(34.0, 48.0, "uniform collapse") == "not to be trusted, because there is a uniform collapse"
    assert summarize([row(20.0, 50.0)]) is None


def test_the_score_without_labels(images: Path, tmp_path: Path, adclr: Adclr, capsys: Any) -> None:
    run = package.pretrain(
        images / "train", out=tmp_path / "run", **(TINY | {"probe.held_out": str(images / "val"), "every_epochs": 1})
    )
    scored = [(row["step"], row["patch_matching"]) for row in run.rows("metrics.jsonl") if "patch_matching" in row]
    assert [step for step, _ in scored] == [0, 4, 8]
    assert "on 16 held-out images" in capsys.readouterr().out
    scores = package.evaluate("matching", weights=run.path, data=images / "val", device="cpu")
    assert scores["patch_matching"] == pytest.approx(scored[-1][1], abs=1e-3)
    assert scores["num_images"] == 16
    assert scores["patch_matching_untrained"] != scores["patch_matching"]
    assert scores["patch_matching_untrained"] > scores["patch_matching_chance"]
    last = [row for row in run.rows("metrics.jsonl") if "image_matching" in row][-1]
    assert scores["image_matching"] == pytest.approx(last["image_matching"], abs=1e-3)
    assert scores["rank_cls"] == pytest.approx(last["held_out_rank_cls"], rel=1e-2)
    assert scores["image_matching_chance"] == 100 / 16
    done = adclr("evaluate", "matching", "--weights", run.path, "--data", images / "val", "max_images=5")
    assert done.returncode == 0, done.stderr
    assert "num_images 5" in " ".join(done.stdout.split())
