"""Color jitter in random order, gray, blur and solarize, each on some of the crops of a batch.

Crops are n×3×S×S float32 in [0, 1]. The host knows which crop gets which, so that nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from adclr.system.devices import send

Array = NDArray[Any]
BLUR_RADIUS = 6  # three deviations of the widest default blur


def to_gray(x: Tensor) -> Tensor:
    """Return n×1×S×S luma, ITU-R 601."""
    r, g, b = x.unbind(1)
    return (0.2989 * r + 0.587 * g + 0.114 * b).unsqueeze(1)


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Scale all channels."""
    return (x * factor).clamp_(0, 1)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Scale the distance from the mean luma of the crop."""
    mean = to_gray(x).mean(dim=(1, 2, 3), keepdim=True)
    return (x * factor + mean * (1 - factor)).clamp_(0, 1)


def saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Scale the distance from the luma of each pixel."""
    return (x * factor + to_gray(x) * (1 - factor)).clamp_(0, 1)


def hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the color circle by `shift` of a full turn: RGB -> hue, saturation, value -> RGB."""
    r, g, b = x.unbind(1)
    value, _ = x.max(dim=1)
    chroma = value - x.amin(dim=1)
    safe = torch.where(chroma > 0, chroma, torch.ones_like(chroma))
    sixth = torch.where(
        value == r,
        (g - b) / safe,
        torch.where(value == g, 2 + (b - r) / safe, 4 + (r - g) / safe),
    )
    turned = sixth + 6 * shift[:, 0]
    channels = []
    for start in (5.0, 3.0, 1.0):  # red, green, blue
        k = (turned + start) % 6
        channels.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, dim=1)


def blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Apply a Gaussian blur to each crop with its own deviation, reflected at the border."""
    radius = min(BLUR_RADIUS, x.shape[-1] - 1)
    distance = torch.arange(-radius, radius + 1, device=x.device, dtype=torch.float32)
    kernel = torch.exp(-0.5 * (distance / sigma.view(-1, 1)) ** 2)  # n×taps
    total = torch.zeros_like(kernel[:, 0])
    for t in range(2 * radius + 1):
        total = total + kernel[:, t]
    kernel = (kernel / total.unsqueeze(1)).view(len(x), -1, 1, 1, 1)
    size = x.shape[-1]
    padded = F.pad(x, (radius, radius, 0, 0), mode="reflect")
    half = torch.zeros_like(x)
    for t in range(2 * radius + 1):
        half += padded[..., t : t + size] * kernel[:, t]
    padded = F.pad(half, (0, 0, radius, radius), mode="reflect")
    whole = torch.zeros_like(x)
    for t in range(2 * radius + 1):
        whole += padded[..., t : t + size, :] * kernel[:, t]
    return whole


def solarize(x: Tensor) -> Tensor:
    """Invert what is brighter than 128 of 255."""
    return torch.where(x >= 128 / 255, 1 - x, x)


JITTER: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (brightness, contrast, saturation, hue)


def photometric(
    x: Tensor, jitter: Array, factors: Array, order: Array, gray: Array, sigma: Array, solarized: Array
) -> Tensor:
    """Apply to each crop what its row says: jitter n, factors n×4, order n×4, gray n, sigma n, solarized n."""

    def alter(selected: Array, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        chosen = np.flatnonzero(selected)
        if len(chosen):
            index = send(chosen, x.device)
            x[index] = change(x[index], index)

    strengths = send(factors.astype(np.float32), x.device).view(len(x), 4, 1, 1, 1)
    sigmas = send(sigma.astype(np.float32), x.device)
    for position in range(4):
        for step, change in enumerate(JITTER):
            chosen = jitter & (order[:, position] == step)
            alter(chosen, lambda part, at, step=step, change=change: change(part, strengths[at, step]))  # type: ignore[misc]
    alter(gray, lambda part, _: to_gray(part).expand_as(part))
    alter(sigma > 0, lambda part, at: blur(part, sigmas[at]))
    alter(solarized, lambda part, _: solarize(part))
    return x
