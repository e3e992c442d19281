"""Numbers from the host to the device."""

from __future__ import annotations

from functools import cache
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


def send_all(arrays: list[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """All of them in one copy: each would cost 50 µs of the host's time."""
    places = np.cumsum([0] + [-(-array.nbytes // 16) * 16 for array in arrays])  # each begins at 16 bytes
    buffer = torch.empty(int(places[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
    written = buffer.numpy()
    for array, place in zip(arrays, places[:-1], strict=True):
        written[place : place + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    sent = buffer.to(device, non_blocking=True)
    return [
        sent[place : place + array.nbytes].view(_dtype(array.dtype)).view(array.shape)
        for array, place in zip(arrays, places[:-1], strict=True)
    ]


@cache
def _dtype(kind: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, kind)).dtype
