"""Where kernels are tested: on the GPU if there is one, else in Triton's interpreter (see conftest)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


needs_interpreter = pytest.mark.skipif(
    DEVICE.type == "cpu" and version(triton.__version__) < (3, 7) and version(np.__version__) >= (2, 5),
    reason="the interpreter of this Triton takes arrays of one number for numbers, which this NumPy no longer allows",
)
