"""The micro-batch, how many images fit into memory at once: measured on a GPU, estimated by a formula on a CPU."""

from __future__ import annotations

import gc

import torch

from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.model.named_tensors import Masks, Views
from adclr.system import distributed
from adclr.system.machine import GIB, available_gpu_memory, host_memory
from adclr.training import plan_cost
from adclr.training.methods import Method, vits

GPU_SHARE = 0.9  # of the free memory; the rest is for fragmentation and the images of the next batch
CPU_SHARE = 0.5
SMALLER = "choose a smaller model.size, views.num_local or method.num_prototypes"


def fit_micro_batch(
    method: Method,
    settings: Settings,
    local_batch: int,
    device: torch.device,
    dtype: torch.dtype | None,
    at_most: int | None = None,
) -> int:
    """Return the largest divisor of this process's batch that fits into memory."""
    return choose_micro_batch(needed_memory(method, settings, device, dtype), local_batch, device, at_most)


def needed_memory(
    method: Method, settings: Settings, device: torch.device, dtype: torch.dtype | None
) -> tuple[float, float]:
    """Return the bytes whatever the batch, on a CPU 0, and the bytes for each image."""
    if device.type == "cuda":
        return measure_memory(method, settings, device, dtype)
    return 0.0, estimate_image_bytes(settings)


def choose_micro_batch(
    needed: tuple[float, float], local_batch: int, device: torch.device, at_most: int | None = None
) -> int:
    """Return the largest divisor of this process's batch that fits into what is free now."""
    fixed_bytes, image_bytes = needed
    if device.type == "cuda":
        free_bytes = GPU_SHARE * available_gpu_memory(device) - fixed_bytes
    else:
        free_bytes = CPU_SHARE * host_memory() / distributed.local_world_size()
    return largest_divisor(local_batch, image_bytes, free_bytes, at_most)


def largest_divisor(local_batch: int, image_bytes: float, free_bytes: float, at_most: int | None = None) -> int:
    """Return the largest divisor of a batch that fits into `free_bytes`."""
    most = min(local_batch, at_most or local_batch)
    sizes = [n for n in range(1, most + 1) if local_batch % n == 0 and n * image_bytes <= free_bytes]
    if not sizes:
        raise UserError(
            f"not even one image fits: it needs {image_bytes / GIB:.2f} GiB and {max(0.0, free_bytes) / GIB:.2f} are "
            f"free; {SMALLER}"
        )
    return sizes[-1]


def measure_memory(
    method: Method, settings: Settings, device: torch.device, dtype: torch.dtype | None
) -> tuple[float, float]:
    """Return the bytes whatever the batch and the bytes for each image, from forward and backward of 2 and 6 images.

    Leaves weights, gradients and centers as they were. Blocks run uncompiled: compiling them for these sizes would take
    longer than all else. Compiled they need less.
    """
    for backbone in vits(method):
        backbone.plain_blocks()
    if settings.train.checkpoint_activations:
        vits(method)[0].checkpoint_blocks()
    peaks, fits = {}, True
    for count in (2, 2, 6):  # the first also allocates what is allocated once
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        try:
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                losses = method(random_views(settings, count, device), settings.method.teacher_temperature)
            losses.total.backward()
            del losses
        except torch.OutOfMemoryError:
            fits = False
            break
        peaks[count] = torch.cuda.max_memory_allocated(device)
    if not fits:
        raise UserError(f"not even {count} images fit into {available_gpu_memory(device) / GIB:.1f} GiB; {SMALLER}")
    method.forget()
    image_bytes = (peaks[6] - peaks[2]) / 4
    moments = 8 * sum(p.numel() for p in method.student.parameters() if p.requires_grad)
    return peaks[2] - 2 * image_bytes + moments, image_bytes


def estimate_image_bytes(settings: Settings) -> float:
    """Return the bytes for each image in float32: about 24 widths a token and block for backward, 4 times the logits.

    The peak of resident memory grew by 0.78 to 0.88 of this for each image (steps of 4 and 12 images; adclr_small with
    ViT-T and ViT-S, adclr_mim_small with ViT-T, adclr_vits16 with 8192 prototypes).
    """
    views, patch = settings.views, settings.model.patch_size
    dim, depth, _ = settings.model.shape
    queries = settings.query_tokens
    tokens = 2 * ((views.global_size // patch) ** 2 + 1 + queries) + views.num_local * (
        (views.local_size // patch) ** 2 + 1 + queries * settings.method.queries_in_local_views
    )
    rows = 2 + views.num_local + (2 + views.num_local * settings.method.queries_in_local_views) * queries
    rows += settings.num_anchored * queries // max(1, views.num_queries)  # local [CLS], once more for each copy
    if settings.masked:
        rows += int((views.global_size // patch) ** 2 * views.mask_ratio[1])
    blocks = depth / 24 + 1 if settings.train.checkpoint_activations else depth  # inputs of all, and all of one
    numbers = 24 * dim * blocks * tokens + 4 * settings.method.num_prototypes * rows
    if settings.method.neighbor_weight:  # both GELUs of the second head, and its logits
        method = settings.method
        numbers += 4 * plan_cost.num_patches(settings) * (method.head_hidden_dim + method.neighbor_prototypes)
    return 4.0 * numbers


def random_views(settings: Settings, count: int, device: torch.device, hidden: int | None = None) -> Views:
    """Return views of noise in the number and size of real ones; `hidden` patches of each masked, None: the most."""
    views, patch, channels = settings.views, settings.model.patch_size, settings.model.num_channels

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    masks = None
    if settings.masked:
        patches = (views.global_size // patch) ** 2
        hidden = max(1, int(patches * views.mask_ratio[1]) if hidden is None else hidden)
        grid = (torch.arange(patches, device=device) < hidden).expand(2, count, patches)
        index = torch.nonzero(grid.flatten()).flatten()
        masks = Masks(grid, index, torch.full((len(index),), 1.0 / (hidden * 2 * count), device=device))
    return Views(
        noise(2, count, channels, views.global_size, views.global_size),
        noise(views.num_local, count, channels, views.local_size, views.local_size) if views.num_local else None,
        noise(count, views.num_queries, channels, patch, patch) if views.num_queries else None,
        masks,
    )
