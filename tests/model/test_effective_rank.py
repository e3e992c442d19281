"""Deviation and effective rank of features whose directions are known."""

from __future__ import annotations

import pytest
import torch

from adclr.model.effective_rank import deviation, effective_rank


def test_the_rank_is_the_number_of_directions_used_alike() -> None:
    torch.manual_seed(0)
    for rank in (1, 3, 8):
        directions = torch.linalg.qr(torch.randn(16, 16))[0][:rank]
        codes = torch.linalg.qr(torch.randn(400, rank))[0]
        features = codes @ directions
        rank_found = effective_rank(features)
        # unit length takes one direction away, or not, but never adds one
        assert rank_found <= rank + 1e-3
        assert rank_found > 0.7 * rank
        assert 0 < deviation(features) <= 1
    same = torch.randn(1, 16).expand(50, 16)
    assert deviation(same) < 1e-6
    few = torch.randn(5, 64)  # fewer rows than directions: the other way round, the same number
    centered = torch.nn.functional.normalize(few, dim=-1)
    centered = centered - centered.mean(dim=0)
    shares = torch.linalg.svdvals(centered).square()
    shares = shares[shares > 1e-9] / shares.sum()
    assert effective_rank(few).item() == pytest.approx(torch.exp(-(shares * shares.log()).sum()).item(), rel=1e-3)


def test_the_effective_rank_counts_directions() -> None:
    assert effective_rank(torch.ones(5, 8)) == 1  # all alike
    axes = torch.cat([torch.eye(6), -torch.eye(6)])
    assert effective_rank(axes) == pytest.approx(6)
    assert effective_rank(torch.outer(torch.linspace(-1, 1, 9), torch.ones(4))) == pytest.approx(1)
