"""Health metrics against their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from adclr.model.losses import sinkhorn
from adclr.training import job, micro_batch
from adclr.training.health_metrics import _measure_targets, measure_health
from tiny import tiny

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
    measured = measure_health(method, views, 0.04, None, query_temperature=0.08)["query_image_gap"]
    assert measured == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)


def test_a_query_that_does_not_read_has_no_gap() -> None:
    settings = tiny()
    method = job.build(settings)
    with torch.no_grad():
        for block in method.teacher.backbone.blocks:
            block.attn.proj.weight.zero_()  # nothing of the image arrives
    assert measure_health(method, micro_batch.random_views(settings, 4, CPU), 0.04, None)["query_image_gap"] == 0


def test_measures_of_targets_are_the_formulas() -> None:
    torch.manual_seed(0)
    targets = torch.randn(6, 5).mul(2).softmax(dim=-1)
    measures = _measure_targets(targets)
    mean = targets.mean(dim=0)
    kl = sum((p * (p / mean).log()).sum() for p in targets) / 6
    assert measures["target_kl"].item() == pytest.approx(float(kl), rel=1e-5)
    entropy = -sum((p * p.log()).sum() for p in targets) / 6 / math.log(5)
    assert measures["target_entropy"].item() == pytest.approx(float(entropy), rel=1e-5)
    assert measures["prototypes_used"].item() == pytest.approx(len(set(targets.argmax(dim=1).tolist())) / 5)
    same = torch.ones(6, 5) / 5
    assert _measure_targets(same)["target_kl"].abs() < 1e-6


@pytest.mark.parametrize("changes", [{}, {"num_queries": 0}, {"target": "sinkhorn"}, {"query_keys": "all"}])
def test_measuring_changes_nothing(changes: dict[str, Any]) -> None:
    settings = tiny(**changes)
    method = job.build(settings)
    views = micro_batch.random_views(settings, 3, CPU)
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    sums = {name: center._sum.clone() for name, center in method.centers.items()}  # type: ignore[union-attr,operator]
    measures = measure_health(method, views, 0.04, None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in method.state_dict().items())
    assert all(torch.equal(center._sum, sums[name]) for name, center in method.centers.items())  # type: ignore[arg-type]
    assert all(math.isfinite(value) for value in measures.values())
    assert ("rank_queries" in measures) == (settings.views.num_queries > 0)
    assert ("queries_in_cls" in measures) == (settings.model.query_keys == "all")
    assert measures["teacher_student_distance"] == 0
    with torch.no_grad():
        for parameter in method.student.parameters():
            parameter.mul_(1.5)
    assert measure_health(method, views, 0.04, None)["teacher_student_distance"] == pytest.approx(0.5, rel=1e-4)
