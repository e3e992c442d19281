"""The measures against their formulas, what is said of them, forced collapses, and the score without labels."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import adclr as package
from adclr.data.draws import Draws
from adclr.evals import matching
from adclr.model.losses import sinkhorn
from adclr.report import health
from adclr.training import job, micro_batch
from adclr.training.probe import summarize
from tiny import TINY, Adclr, tiny

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

import collapses

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "changes", [{}, {"query_read_only_blocks": 2, "query_keys": "patches"}, {"target": "sinkhorn"}]
)
def test_the_query_gap_is_the_loss_in_another_image_minus_that_in_its_own(changes: dict[str, Any]) -> None:
    settings = tiny(num_queries=3, **changes)
    method = job.build(settings).double()
    torch.manual_seed(3)
    for parameter in method.teacher.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    method.center("query").value.normal_(0, 0.05)
    views = micro_batch.random_views(settings, 4, CPU).map(torch.Tensor.double)
    assert views.queries is not None
    backbone, head = method.teacher.backbone, method.teacher.head
    with torch.no_grad():
        logits = head(backbone(views.global_crops[0], views.queries).queries)
        if method.target == "sinkhorn":
            targets = sinkhorn(logits.flatten(0, 1), 0.08).view_as(logits)
        else:
            targets = torch.softmax((logits - method.center("query").value) / 0.08, -1)
        gaps = []
        for b in range(4):
            for i in range(3):
                query = views.queries[b : b + 1, i : i + 1]
                own, other = (
                    torch.log_softmax(head(backbone(views.global_crops[1][[at]], query).queries[0, 0]) / 0.1, -1)
                    for at in (b, (b + 1) % 4)
                )
                gaps.append(((own - other) * targets[b, i]).sum().item())
    measured = health.measure(method, views, 0.04, None, query_temperature=0.08)["query_image_gap"]
    assert measured == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)


def test_a_query_that_does_not_read_has_no_gap() -> None:
    settings = tiny()
    method = job.build(settings)
    with torch.no_grad():
        for block in method.teacher.backbone.blocks:
            block.attn.proj.weight.zero_()  # nothing of the image arrives
    assert health.measure(method, micro_batch.random_views(settings, 4, CPU), 0.04, None)["query_image_gap"] == 0


def test_measures_of_targets_are_the_formulas() -> None:
    torch.manual_seed(0)
    targets = torch.randn(6, 5).mul(2).softmax(dim=-1)
    found = health._of_targets(targets)
    mean = targets.mean(dim=0)
    kl = sum((p * (p / mean).log()).sum() for p in targets) / 6
    assert found["target_kl"].item() == pytest.approx(float(kl), rel=1e-5)
    entropy = -sum((p * p.log()).sum() for p in targets) / 6 / math.log(5)
    assert found["target_entropy"].item() == pytest.approx(float(entropy), rel=1e-5)
    assert found["prototypes_used"].item() == pytest.approx(len(set(targets.argmax(dim=1).tolist())) / 5)
    same = torch.ones(6, 5) / 5
    assert health._of_targets(same)["target_kl"].abs() < 1e-6


@pytest.mark.parametrize("changes", [{}, {"num_queries": 0}, {"target": "sinkhorn"}, {"query_keys": "all"}])
def test_looking_changes_nothing(changes: dict[str, Any]) -> None:
    settings = tiny(**changes)
    method = job.build(settings)
    views = micro_batch.random_views(settings, 3, CPU)
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    sums = {name: center._sum.clone() for name, center in method.centers.items()}  # type: ignore[union-attr,operator]
    found = health.measure(method, views, 0.04, None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in method.state_dict().items())
    assert all(torch.equal(center._sum, sums[name]) for name, center in method.centers.items())  # type: ignore[arg-type]
    assert all(math.isfinite(value) for value in found.values())
    assert ("rank_queries" in found) == (settings.views.num_queries > 0)
    assert ("queries_in_cls" in found) == (settings.model.query_keys == "all")
    assert found["teacher_student_distance"] == 0
    with torch.no_grad():
        for parameter in method.student.parameters():
            parameter.mul_(1.5)
    assert health.measure(method, views, 0.04, None)["teacher_student_distance"] == pytest.approx(0.5, rel=1e-4)


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
        ({"rank_patches": 1.1}, "dimensional collapse", "the features of patches differ in 1.1 directions only"),
        ({"queries_in_cls": 0.9}, "collapse onto the queries", r"set model\.query_keys=image"),
    ],
)
def test_what_is_said_and_when(bad: dict[str, float], name: str, words: str) -> None:
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


# 40 steps, 4 patches
SHORT = {"train.epochs": 20, "train.batch_size": 16, "warmup_epochs": 1, "dim": 24, "depth": 2, "num_queries": 2}
SHORT |= {"global_size": 8, "local_size": 4, "health_every_steps": 5, "log_every_steps": 5}


@pytest.mark.parametrize("name", collapses.FORCED)
def test_forced_collapses_are_named(
    images: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted, changes = collapses.FORCED[name]
    few = {"num_queries": 16} if "num_queries" in changes else {}
    found = collapses.findings(collapses.train(images, tmp_path / "run", **(SHORT | changes | few)))
    assert {said for _, said in found} == {wanted}
    assert f"step {found[0][0]}: {wanted}: " in capsys.readouterr().err


def test_nothing_is_said_of_a_healthy_run_and_looks_are_in_the_metrics(images: Path, tmp_path: Path) -> None:
    run = collapses.train(images, tmp_path / "run", **SHORT)
    assert collapses.findings(run) == []
    looks = [row for row in run.rows("metrics.jsonl") if "target_kl" in row]
    assert [look["step"] for look in looks] == list(range(5, 41, 5))
    for name in ("target_entropy", "prototypes_used", "deviation_cls", "rank_patches", "loss_of_log_k"):
        assert all(name in look for look in looks)


def test_looks_are_at_lines_of_the_metrics(images: Path, tmp_path: Path) -> None:
    changes = TINY | {"log_every_steps": 3, "health_every_steps": 5, "epochs": 5}
    run = package.pretrain(images / "train", out=tmp_path / "run", **changes)
    assert [row["step"] for row in run.rows("metrics.jsonl") if "target_kl" in row] == [3, 6, 12, 15, 20]
    never = package.pretrain(images / "train", out=tmp_path / "never", **(TINY | {"health_every_steps": None}))
    assert not any("target_kl" in row for row in never.rows("metrics.jsonl"))


def test_patches_are_matched_to_their_places() -> None:
    """Features that say where in the image a patch lies find their place; noise finds it by chance."""
    grid, keys = (6, 6), torch.arange(50).numpy().astype("uint64")
    one, other = matching.draw(Draws(0, 0, keys), CPU)

    def where(boxes: matching.Boxes) -> torch.Tensor:
        down, across = matching._middles(grid, CPU)
        x, y = boxes.place(across.flatten(), down.flatten())
        angles = torch.stack([x, y], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    right, chance, count = matching.match(where(one), where(other), one, other, grid)
    assert right == count > 500
    torch.manual_seed(0)
    right, chance, count = matching.match(torch.randn(50, 36, 8), torch.randn(50, 36, 8), one, other, grid)
    assert right / count == pytest.approx(chance / count, abs=0.03)
    assert 2 / 36 < chance / count <= 4 / 36  # those between which a place lies, fewer at the edge


def test_views_are_cut_where_the_boxes_say() -> None:
    """An image whose colours are its places shows in each view the places that `place` gives."""
    down, across = matching._middles((60, 60), CPU)
    image = torch.stack([across, down, across]).expand(8, 3, 60, 60)
    for boxes in matching.draw(Draws(0, 0, torch.arange(8).numpy().astype("uint64")), CPU):
        cut = matching.cut(image, boxes, (12, 12))
        v, u = matching._middles((12, 12), CPU)
        x, y = boxes.place(u, v)
        assert (cut[:, 0] - x).abs().max() < 0.02
        assert (cut[:, 1] - y).abs().max() < 0.02
        back = boxes.find(x.flatten(1), y.flatten(1))
        assert torch.allclose(back[0], u.flatten().expand(8, -1), atol=1e-5)
        assert torch.allclose(back[1], v.flatten().expand(8, -1), atol=1e-5)


def test_images_are_found_again_by_their_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "ROWS", 3)  # several parts
    features = torch.randn(10, 32)
    near = features + 0.1 * torch.randn(10, 32)
    assert matching.found_again(features, 7 * near) == 10
    assert matching.found_again(features, near[[1, 0, *range(2, 10)]]) == 8
    assert matching.found_again(torch.ones(10, 32), torch.ones(10, 32)) == 1  # it says the same of all


def test_what_counts_as_learning() -> None:
    """Three deviations of a share of images; patches of an image are one case; and never beside a finding."""

    def row(images: float, patches: float) -> dict[str, float]:
        shares = {"image_matching": images, "patch_matching": patches}
        return shares | {"held_out_rank_cls": 4.0, "held_out_rank_patches": 9.0, "held_out_images": 400.0}

    def said(images: float, patches: float, finding: str | None = None) -> str:
        return (summarize([{"loss": 1.0}, row(20.0, 50.0), row(images, patches)], finding) or "").rpartition(": ")[2]

    assert said(34.0, 48.0) == "it has learned"
    assert said(20.0, 66.0) == "it has learned"
    assert said(25.0, 53.0) == "no clear sign that it has learned"  # which two untrained networks can differ by
    assert said(3.0, 30.0) == "no clear sign that it has learned"
    assert said(34.0, 48.0, "uniform collapse") == "not to be trusted, for there is a uniform collapse"
    assert summarize([row(20.0, 50.0)]) is None


def test_the_score_without_labels(images: Path, tmp_path: Path, adclr: Adclr, capsys: Any) -> None:
    run = package.pretrain(
        images / "train", out=tmp_path / "run", **(TINY | {"probe.held_out": str(images / "val"), "every_epochs": 1})
    )
    scored = [(row["step"], row["patch_matching"]) for row in run.rows("metrics.jsonl") if "patch_matching" in row]
    assert [step for step, _ in scored] == [0, 4, 8]
    assert "of 16 images held out" in capsys.readouterr().out
    found = package.evaluate("matching", weights=run.path, data=images / "val", device="cpu")
    assert found["patch_matching"] == pytest.approx(scored[-1][1], abs=1e-3)
    assert found["num_images"] == 16
    assert found["patch_matching_untrained"] != found["patch_matching"]
    assert found["patch_matching_untrained"] > found["patch_matching_chance"]
    last = [row for row in run.rows("metrics.jsonl") if "image_matching" in row][-1]
    assert found["image_matching"] == pytest.approx(last["image_matching"], abs=1e-3)
    assert found["rank_cls"] == pytest.approx(last["held_out_rank_cls"], rel=1e-2)
    assert found["image_matching_chance"] == 100 / 16
    done = adclr("evaluate", "matching", "--weights", run.path, "--data", images / "val", "max_images=5")
    assert done.returncode == 0, done.stderr
    assert "num_images 5" in " ".join(done.stdout.split())
