"""Two functions beside each other on a GPU, on two CUDA streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

A = TypeVar("A")
T = TypeVar("T")
U = TypeVar("U")


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def beside(first: Callable[[A], T], second: Callable[[A], U], argument: A, device: torch.device | None) -> tuple[T, U]:
    """Return the results of two functions of one argument; on a GPU the first runs beside the second.

    Without a device, or on a CPU, it runs before the second. Memory of the first is safe: its stream begins by waiting
    for all that the current one has been given, so whatever used the results of an earlier call is over by then.
    """
    if device is None or device.type != "cuda":
        return first(argument), second(argument)
    current, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        result = first(argument)
    other = second(argument)
    current.wait_stream(side)
    return result, other
