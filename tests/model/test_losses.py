"""Each loss against a loop written from its formula, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from adclr.model.losses import Center, masked_loss, paired_loss, sinkhorn, soft_cross_entropy

K = 11


def slow_softmax(row: list[float], temperature: float) -> list[float]:
    powers = [math.exp(x / temperature) for x in row]
    return [p / sum(powers) for p in powers]


def slow_h(target: list[float], logits: list[float], temperature: float) -> float:
    """H(p_t, p_s) = -sum_k p_t[k] log p_s[k]"""
    return -sum(p * math.log(q) for p, q in zip(target, slow_softmax(logits, temperature), strict=True))


def slow_targets(logits: Tensor, center: Tensor, temperature: float) -> list[list[float]]:
    """p_t = softmax((t - c) / tau_t)"""
    return [
        slow_softmax([t - c for t, c in zip(row, center.tolist(), strict=True)], temperature) for row in logits.tolist()
    ]


def draw(*shape: int) -> Tensor:
    return torch.empty(*shape).uniform_(-1, 1)


@pytest.mark.parametrize(("student_views", "rows"), [(2, 4), (5, 3), (12, 2)])
def test_the_global_and_query_loss_is_the_mean_over_pairs_of_different_views(student_views: int, rows: int) -> None:
    torch.manual_seed(0)
    teacher, student, center = draw(2, rows, K), draw(student_views, rows, K), draw(K) * 0.1
    moving = Center(K, 0.9)
    moving.value.copy_(center)
    targets = torch.stack([moving.targets(view, 0.05) for view in teacher])
    slow = [slow_targets(view, center, 0.05) for view in teacher]
    terms = [
        slow_h(slow[t][r], student[s, r].tolist(), 0.1)
        for t in range(2)
        for s in range(student_views)
        if s != t
        for r in range(rows)
    ]
    expected = sum(terms) / len(terms)
    assert paired_loss(targets, student, 0.1).item() == pytest.approx(expected, rel=1e-6)


def test_the_masked_loss_is_the_mean_over_images_and_views_of_the_mean_over_hidden_patches() -> None:
    torch.manual_seed(1)
    images, patches = 3, 5
    hidden = torch.rand(2, images, patches) < 0.4
    hidden[0, 0] = False  # an unmasked view gives 0
    hidden[1, 1] = True
    teacher, student = draw(2, images, patches, K), draw(2, images, patches, K)
    center = Center(K, 0.9)
    expected = 0.0
    for v in range(2):
        for b in range(images):
            terms = [
                slow_h(slow_targets(teacher[v, b, n : n + 1], center.value, 0.06)[0], student[v, b, n].tolist(), 0.1)
                for n in range(patches)
                if hidden[v, b, n]
            ]
            expected += sum(terms) / max(1, len(terms)) / (2 * images)
    weight = (1 / (hidden.sum(-1, keepdim=True).clamp(min=1) * 2 * images)).expand_as(hidden)
    actual = masked_loss(center.targets(teacher[hidden], 0.06), student[hidden], weight[hidden], 0.1)
    assert actual.item() == pytest.approx(expected, rel=1e-6)
    assert masked_loss(teacher[:0, 0, 0], student[:0, 0, 0], weight[:0, 0, 0], 0.1).item() == 0


def test_logits_of_half_precision_are_compared_in_float32() -> None:
    torch.manual_seed(2)
    target, logits = torch.softmax(draw(4, K), -1), draw(4, K).bfloat16()
    expected = soft_cross_entropy(target, logits.float(), 0.1)
    assert torch.equal(soft_cross_entropy(target, logits, 0.1), expected)


def test_the_center_is_used_first_and_moves_once_from_all_that_was_seen() -> None:
    torch.manual_seed(3)
    center = Center(K, 0.9)
    center.value.copy_(draw(K))
    before = center.value.double()
    a, b = draw(4, K), draw(6, K)
    for part in (a, b):
        assert torch.equal(center.targets(part, 0.04), torch.softmax((part - center.value) / 0.04, -1))
        center.observe(part.mean(0), len(part))
        assert torch.equal(center.value.double(), before)
    center.update(torch.tensor(True))
    expected = before * 0.9 + torch.cat([a, b]).double().mean(0) * 0.1
    torch.testing.assert_close(center.value.double(), expected, rtol=1e-6, atol=1e-7)
    value = center.value.clone()
    center.update(torch.tensor(True))  # nothing was seen since
    assert torch.equal(center.value, value)


def test_a_void_step_leaves_the_center_alone_to_the_bit() -> None:
    center = Center(K, 0.9)
    center.value.copy_(draw(K))
    value = center.value.clone()
    center.observe(torch.full((K,), float("nan")), 3)
    center.update(torch.tensor(False))
    assert torch.equal(center.value, value)
    center.observe(torch.ones(K), 3)
    center.update(torch.tensor(True))
    assert center.value.isfinite().all()


def test_sinkhorn_uses_all_prototypes_alike() -> None:
    torch.manual_seed(4)
    logits = draw(64, 8)
    q = sinkhorn(logits, 0.5, iterations=100)
    torch.testing.assert_close(q.sum(1), torch.ones(64))
    torch.testing.assert_close(q.sum(0), torch.full((8,), 64 / 8), rtol=1e-3, atol=1e-3)
    # it rescales rows and columns and nothing else: q[i,j] q[k,l] / (q[i,l] q[k,j]) is that of exp(logits / tau)
    raw = torch.exp(logits.double() / 0.5)
    actual = q[0, 0] * q[1, 1] / (q[0, 1] * q[1, 0])
    expected = raw[0, 0] * raw[1, 1] / (raw[0, 1] * raw[1, 0])
    assert actual.item() == pytest.approx(expected.item(), rel=1e-4)
    assert sinkhorn(logits * 1e4, 0.04).isfinite().all()
