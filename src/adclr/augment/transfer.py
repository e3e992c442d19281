"""Numbers from the host to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device, without waiting for what the device is doing (which unpinned memory would)."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
