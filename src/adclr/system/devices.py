"""The device to work on, its streams and precision, and copies to it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adclr.config.parsing import UserError
from adclr.system import distributed, triton_available


def select_device(name: str) -> torch.device:
    """Return the device of a name; `auto` is the GPU if there is one, for a process of torchrun that of its number.

    A Mac's GPU is used only if it is named: it runs PyTorch's own operations, and no test has run there.
    """
    if name == "mps":
        return _select_mps()
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError("device=cuda was asked for but torch finds no GPU here; set device=cpu or install its driver")
    if name == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", distributed.gpu_number())
    torch.cuda.set_device(device)
    triton_available.check_launch(device)
    return device


def _select_mps() -> torch.device:
    if not torch.backends.mps.is_available():
        raise UserError("device=mps was asked for but torch finds no GPU of a Mac here; set device=cpu")
    if distributed.is_main():
        print("device=mps is untested; device=cpu computes the same if it fails", file=sys.stderr)
    return torch.device("mps")


def set_current_device(device: torch.device) -> None:
    """Select a GPU in a new thread, which would otherwise work on the first."""
    if device.index is not None:
        torch.cuda.set_device(device)


@cache
def shared_stream(purpose: str, device: torch.device) -> torch.cuda.Stream:  # noqa: ARG001
    """Return the stream for a purpose, one in a process: torch has 32 of a device and then returns the first again."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_idle_streams: dict[tuple[str, torch.device], list[torch.cuda.Stream]] = {}
_streams_lock = threading.Lock()
_of_thread = threading.local()  # its exclusive streams, by purpose and device


@contextmanager
def exclusive_stream(purpose: str, device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Work on a stream that no other thread has meanwhile, and wait for it at the end; None and no stream on a CPU.

    Within it, the same purpose and device mean the same stream, which is then waited for once.
    """
    if device.type != "cuda":
        yield None
        return
    key = purpose, device
    held: dict[tuple[str, torch.device], torch.cuda.Stream] = _of_thread.__dict__.setdefault("streams", {})
    if key in held:
        yield held[key]
        return
    with _streams_lock:
        idle = _idle_streams.setdefault(key, [])
        stream = idle.pop() if idle else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    held[key] = stream
    try:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield stream
    finally:
        del held[key]
        stream.synchronize()
        with _streams_lock:
            idle.append(stream)


def decoding_stream(device: torch.device) -> AbstractContextManager[torch.cuda.Stream | None]:
    """Return the context in which a thread decodes on a GPU: on a stream of its own, empty at the end.

    torchvision's decoder writes into memory of the current stream from a stream that waits for nothing. So memory that
    was freed while operations on the current stream still had to read it would be overwritten before they did, by the
    images that another thread decodes. The likely cause of a device-side assertion on a busy GPU (docs/log.md).
    """
    return exclusive_stream("decoding", device)


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return bfloat16 where the setting names it, or by default on a GPU that has it; None is float32 throughout."""
    if precision == "bfloat16" or (precision == "auto" and device.type == "cuda" and _has_bfloat16()):
        return torch.bfloat16
    return None


@cache
def _has_bfloat16() -> bool:
    """Return whether the GPU has bfloat16: PyTorch emulates it on older ones (T4, V100), slower than float32."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


@contextmanager
def tensor_float32(device: torch.device) -> Iterator[None]:
    """Let products of float32 matrices on a GPU round their inputs to 10 bits, which is several times as fast."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Make operations that a GPU does not repeat to the bit errors, or replace them by others that it does repeat."""
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, finds nothing
    try:
        _check_cublas()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]  # type: ignore[attr-defined]


def _check_cublas() -> None:
    """Refuse if cuBLAS was started in this process before its workspace was configured."""
    if torch.cuda.is_available():
        try:
            torch.ones(2, 2, device="cuda").mm(torch.ones(2, 2, device="cuda"))
        except RuntimeError:
            raise UserError(
                "train.deterministic=true comes too late in this process, which has used the GPU; "
                "set the environment variable CUBLAS_WORKSPACE_CONFIG=:4096:8 before it starts"
            ) from None


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return a copy on the device, without waiting for what the device is doing (as unpinned memory would)."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def send_all(arrays: list[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return copies of several arrays, sent in one transfer: each would cost 50 µs of the host's time."""
    *offsets, size = np.cumsum([0] + [-(-array.nbytes // 16) * 16 for array in arrays]).tolist()  # aligned to 16 bytes
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = buffer.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        host[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    sent = buffer.to(device, non_blocking=True)
    return [
        sent[offset : offset + array.nbytes].view(_dtype(array.dtype)).view(array.shape)
        for array, offset in zip(arrays, offsets, strict=True)
    ]


@cache
def _dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
