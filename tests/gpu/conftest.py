"""GPU tests: `pytest -m gpu tests/gpu` on a machine with an NVIDIA GPU."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    assert torch.cuda.is_available(), "these tests are for a machine with an NVIDIA GPU"
