"""How much features differ from image to image: their deviation and their effective rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _centered(features: Tensor) -> Tensor:
    """Return n×D features of unit length minus their mean."""
    unit = F.normalize(features, dim=-1)
    return unit - unit.mean(dim=0)


def deviation(features: Tensor) -> Tensor:
    """Return the standard deviation of n×D features of unit length: 0 if all are the same, 1 if their mean is 0."""
    return _centered(features).square().sum(dim=-1).mean().sqrt()


def effective_rank(features: Tensor) -> Tensor:
    """Return in how many directions n×D features of unit length differ: 1 if in one only, D if equally in all.

    It is exp of the entropy of the covariance's eigenvalues as shares of their sum.
    """
    centered = _centered(features)
    gram = centered.T @ centered if centered.shape[0] > centered.shape[1] else centered @ centered.T
    eigenvalues = torch.linalg.eigvalsh(gram).clamp(min=0)
    shares = eigenvalues / eigenvalues.sum().clamp(min=1e-30)
    entropy: Tensor = torch.special.entr(shares).sum()
    return entropy.exp()
