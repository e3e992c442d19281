"""The recipe and settings for a collection when no recipe is named, chosen by its images and the memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SMALL_COLLECTION = 100_000  # images; below, ImageNet's schedules are too short in steps
LARGE_COLLECTION = 1_000_000
STEPS = 30_000  # about what a small collection is trained for: 200 epochs of 10 000 images in batches of 64
BATCH = 64  # of a small collection: at equal epochs better than 128, since there are more steps (docs/log.md)
# On a CPU the images of all epochs together are limited: 2 cores take about 20 images/s of `adclr_cpu`.
CPU_IMAGES = 300_000  # 4 hours
CPU_EPOCHS = 20, 120  # the fewest, of large collections, and the most: 400 photographs take 40 minutes
CPU_BATCH = 32
GIB = 2**30


@dataclass(frozen=True)
class Choice:
    """A recipe, settings on top of it by path, and the reasons in sentences."""

    recipe: str
    settings: dict[str, Any]
    reasons: list[str]


def choose(num_images: int, side: int, memory: int | None) -> Choice:
    """Return the recipe and settings for images of about `side` pixels and a GPU of `memory` bytes; None: no GPU."""
    if memory is None:
        return _choose_for_cpu(num_images, side)
    settings: dict[str, Any] = {}
    reasons = []
    if num_images >= SMALL_COLLECTION and side > 128:
        large = num_images >= LARGE_COLLECTION and memory >= 60 * GIB
        recipe = "adclr_plus_vitb16" if large else "adclr_plus_vits16"
        reasons.append(f"recipe {recipe}: {num_images} images of about {side} pixels")
    else:
        recipe = "adclr_plus_small"
        reason = f"{side} pixels are small images" if side <= 128 else f"{num_images} images are a small collection"
        reasons.append(f"recipe {recipe}: {reason}")
        if side > 128:
            settings |= {"model.patch_size": 16, "views.global_size": 224, "views.local_size": 96}
            settings |= {"views.blur_sigma": [0.1, 2.0]}
            reasons.append(f"views of 224 and 96 pixels, patches of 16: the images are about {side} pixels")
        elif side < 64:
            size = max(16, side // 4 * 4)
            local = max(8, size // 2 // 4 * 4)
            settings |= {"model.patch_size": 4, "views.global_size": size, "views.local_size": local}
            reasons.append(f"views of {size} and {local} pixels, patches of 4: the images are about {side} pixels")
        else:
            size = min(96, side // 8 * 8)
            local = max(16, size // 2 // 8 * 8)
            settings |= {"model.patch_size": 8, "views.global_size": size, "views.local_size": local}
            reasons.append(f"views of {size} and {local} pixels, patches of 8: the images are about {side} pixels")
        batch = _batch_size(num_images, BATCH)
        epochs = int(min(800, max(20, round(STEPS / max(1, num_images // batch)))))
        schedule, reason = _schedule(num_images, batch, epochs)
        settings |= schedule | {"method.teacher_temperature_warmup_epochs": epochs // 2}
        reasons.append(reason)
    reasons.append(
        "ADCLR+: on 9469 photographs its features were better than those of DINO and ADCLR (docs/results.md)"
    )
    reasons.append(f"the micro-batch will be fitted to the GPU's {memory / GIB:.0f} GiB")
    return Choice(recipe, settings, reasons)


def _choose_for_cpu(num_images: int, side: int) -> Choice:
    settings: dict[str, Any] = {}
    recipe, reasons = "adclr_cpu", ["recipe adclr_cpu: there is no GPU"]
    if side < 96:  # else the views of the recipe
        patch = 8 if side >= 48 else 4
        size = max(16, min(8, side // patch) * patch)
        local = max(2 * patch, size // 2 // patch * patch)
        settings |= {"model.patch_size": patch, "views.global_size": size, "views.local_size": local}
        reasons.append(f"views of {size} and {local} pixels, patches of {patch}: the images are about {side} pixels")
    fewest, most = CPU_EPOCHS
    schedule, reason = _schedule(
        num_images, _batch_size(num_images, CPU_BATCH), min(most, max(fewest, CPU_IMAGES // num_images))
    )
    return Choice(recipe, settings | schedule, [*reasons, reason])


def _batch_size(num_images: int, most: int) -> int:
    """Return the batch size of a small collection: a power of 2, at most `most`, at least eight steps in an epoch."""
    return min(most, 1 << max(0, (num_images // 8).bit_length() - 1))


def _schedule(num_images: int, batch: int, epochs: int) -> tuple[dict[str, Any], str]:
    """Return the settings of batch size and epochs, and a sentence about them."""
    settings = {"train.batch_size": batch, "train.epochs": epochs, "optim.warmup_epochs": max(1, epochs // 20)}
    return settings, f"batch {batch}, {epochs} epochs: about {epochs * max(1, num_images // batch)} steps"
