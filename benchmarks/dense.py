"""What the dense evaluations cost on this device: seconds of a step, images/s, and peak memory; noise for images.

    python benchmarks/dense.py [--only incontext|segmentation|detection] [--repeats 5] [--json FILE]

ViT-S/16 by default: in-context segmentation at 512 pixels, a step of each head, and of Mask R-CNN at 800×1333.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adclr.evals import segmentation
from adclr.evals.incontext import Encoder, PatchMemory, predict_labels
from adclr.evals.mask_rcnn import Detector
from adclr.system.devices import autocast_dtype, select_device
from adclr.weights.backbone import Weights, create_backbone

GIB = 2**30


def timed(device: torch.device, repeats: int, work: Callable[[], Any]) -> tuple[float, float]:
    """(median seconds, peak GiB), after two goes that are not timed."""
    for _ in range(2):
        work()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(repeats):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else float("nan")
    return sorted(seconds)[len(seconds) // 2], peak


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fresh(name: str, device: torch.device) -> Weights:
    torch.manual_seed(0)
    return Weights(create_backbone(name).to(device).eval(), (0.5,) * 3, (0.25,) * 3)


def in_context(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    weights = fresh(options.backbone, device)
    encode = Encoder(weights, "auto", device)
    images = torch.rand(options.batch, 3, options.size, options.size, device=device)
    rows = []
    with torch.no_grad():
        seconds, peak = timed(device, options.repeats, lambda: encode(images))
        rows.append({"what": "encode images", "images_per_second": options.batch / seconds, "gib": peak})
        queries = encode(images).flatten(0, 1)
        for size in options.memory:
            keys = torch.nn.functional.normalize(torch.randn(size, weights.vit.dim, device=device), dim=1)
            memory = PatchMemory(keys.to(queries.dtype), torch.rand(size, 21, device=device).to(queries.dtype))
            seconds, peak = timed(
                device, options.repeats, lambda memory=memory: predict_labels(memory, queries, 30, 0.02)
            )
            rate = options.batch / seconds
            rows.append({"what": f"ask a memory of {size}", "images_per_second": rate, "gib": peak})
            del keys, memory
    return rows


def heads(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    return [one_head(head, options, device) for head in ("linear", "fpn", "upernet")]


def one_head(head: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    settings = segmentation.Settings.model_validate({"head": head, "size": options.size})
    model = segmentation.Segmenter(
        fresh(options.backbone, device), settings, segmentation.protocol_of(settings), 150
    ).to(device)
    model = model.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-4, fused=True)
    images = torch.randn(options.batch, 3, options.size, options.size, device=device)
    labels = torch.randint(0, 150, (options.batch, options.size, options.size), device=device)
    dtype = autocast_dtype("auto", device)

    def step() -> None:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            losses = model(images, labels)
        torch.stack(list(losses.values())).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds, peak = timed(device, options.repeats, step)
    return {"what": f"step of {head}, {options.batch} crops", "seconds": seconds, "gib": peak}


def detector(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    return [one_detector(window, options, device) for window in (None, 14)]


def one_detector(window: int | None, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """A step on images of one size with seven squares each; then what its parts take, one after the other."""
    height, width = options.detection_size
    weights = fresh(options.backbone, device)
    model = Detector(weights, 80, height, width, window, autocast_dtype("auto", device)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    images = [torch.rand(3, height, width, device=device) for _ in range(options.detection_batch)]
    targets = [squares(height, width, 7, device) for _ in images]
    sides, spent, rcnn = [height] * len(images), dict[str, float](), model.rcnn

    def step() -> None:
        losses = model(images, targets, sides)
        torch.stack(list(losses.values())).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds, peak = timed(device, options.repeats, step)
    for name, part in (("backbone", rcnn.backbone), ("rpn", rcnn.rpn), ("roi_heads", rcnn.roi_heads)):
        watch(part, name, spent, device)
    started = time.perf_counter()
    losses = model(images, targets, sides)
    _wait(device)
    spent["forward"] = time.perf_counter() - started
    started = time.perf_counter()
    torch.stack(list(losses.values())).sum().backward()
    _wait(device)
    spent["backward"] = time.perf_counter() - started
    name = f"Mask R-CNN {height}x{width}, {len(images)} images, {'global' if window is None else 'windows'}"
    return {"what": name, "seconds": seconds, "gib": peak} | spent


def watch(part: torch.nn.Module, name: str, spent: dict[str, float], device: torch.device) -> None:
    def before(*_: Any) -> None:
        _wait(device)
        spent[name] = -time.perf_counter()

    def after(*_: Any) -> None:
        _wait(device)
        spent[name] += time.perf_counter()

    part.register_forward_pre_hook(before)
    part.register_forward_hook(after)


def squares(height: int, width: int, count: int, device: torch.device) -> dict[str, Tensor]:
    side = min(height, width) // 4
    corners = torch.stack([torch.randint(0, n - side, (count,)) for n in (width, height)], dim=1)
    boxes = torch.cat([corners, corners + side], dim=1)
    masks = torch.zeros(count, height, width, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    labels = torch.randint(1, 81, (count,))
    return {"boxes": boxes.float().to(device), "labels": labels.to(device), "masks": masks.to(device)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["incontext", "segmentation", "detection"])
    parser.add_argument("--backbone", default="vit_small_patch16")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--memory", type=int, nargs="+", default=[102_400, 1_024_000])
    parser.add_argument("--detection-size", type=int, nargs=2, default=[800, 1333])
    parser.add_argument("--detection-batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = select_device("auto")
    rows = []
    for name, measure in (("incontext", in_context), ("segmentation", heads), ("detection", detector)):
        if options.only in (None, name):
            for row in measure(options, device):
                rows.append(row)
                print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
