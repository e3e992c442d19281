"""Images of any sizes, end to end in one tensor of bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """B images, each C×height×width uint8, one behind the other."""

    bytes: Tensor  # 1-D uint8, on any device
    offsets: NDArray[np.int64]  # B, where each image starts
    sizes: NDArray[np.int64]  # B×2, height and width
    num_channels: int

    def to(self, device: torch.device) -> Packed:
        """Copy the bytes to a device, without waiting where they are pinned."""
        return Packed(self.bytes.to(device, non_blocking=True), self.offsets, self.sizes, self.num_channels)


def pack(images: list[NDArray[np.uint8]], pin: bool = False) -> Packed:
    """Pack images of C×height×width; from pinned memory they are copied to a GPU without waiting."""
    lengths = np.array([image.size for image in images], np.int64)
    flat = torch.empty(int(lengths.sum()), dtype=torch.uint8, pin_memory=pin)
    ends, array = np.cumsum(lengths), flat.numpy()
    # By NumPy: PyTorch copies more than 32 kB with a team of threads, which among threads that decode wait long for one
    # another. Three processes of 16 threads on 2 cores decoded 1000 images/s of 112 pixels each; by NumPy 2400.
    for image, end in zip(images, ends, strict=True):
        array[int(end) - image.size : int(end)] = image.reshape(-1)
    sizes = np.array([image.shape[1:] for image in images], np.int64).reshape(-1, 2)
    return Packed(flat, ends - lengths, sizes, len(images[0]))
