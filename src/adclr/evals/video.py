"""Video object segmentation without training: the masks of a first frame are handed on from frame to frame.

Protocol (DINO's, after Jabri et al.): features of the last block's patches, L2-normalised; each patch of a frame looks
at those of the first frame and of the 7 before it, no farther than 12 patches away; of all these the 5 most similar
hand on their labels, by a softmax of their similarities over 0.1. Frames have a shorter side of 480 pixels. J, F and
their mean as DAVIS 2017 measures them: over frames but the first and last, then objects of all clips.
"""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from adclr.config.sections import Count, Positive, UserError
from adclr.config.settings import Side
from adclr.data.decode import Unreadable
from adclr.data.sets import davis
from adclr.data.sets.davis import Clip
from adclr.data.sets.pixels import IGNORE
from adclr.evals.frames import Frames, resized
from adclr.evals.overlays import Pictures
from adclr.evals.task import Conditions, weights_of
from adclr.features.reader import normalizer
from adclr.system import distributed
from adclr.system.devices import autocast_dtype, choose, send
from adclr.system.progress import track
from adclr.weights.backbone import Weights

WHOLE = 64  # pixels that the longer side is a multiple of, as in DINO's program


class Settings(Conditions):
    data: str = Field("", description="DAVIS's folder")
    split: str = Field("val", description="list of clips, of ImageSets/YEAR")
    year: str = Field("2017", description="of the list")
    resolution: str = Field("480p", description="folder of JPEGImages and Annotations")
    size: Side = Field(480, description="shorter side of the frames, pixels")
    queue: Count = Field(7, description="frames before one that it looks at, beside the first")
    neighbourhood: Annotated[int, Field(ge=0)] = Field(12, description="patches that it looks far; 0: everywhere")
    k: Count = Field(5, description="neighbours that hand on their labels")
    temperature: Positive = Field(0.1, description="of the softmax over their similarities")
    batch_size: Count = Field(16, description="frames at once")
    precision: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on a GPU that has it")
    pictures: Annotated[int, Field(ge=0, le=64)] = Field(4, description="clips of which a frame is drawn")


def run(settings: Settings, place: Path | None = None) -> dict[str, Any]:
    if not settings.weights or not settings.data:
        raise UserError("video needs both weights and clips; give --weights and --data")
    clips = davis.open_davis(settings.data, settings.split, settings.year, settings.resolution)
    davis.check(clips)
    device = choose(settings.device)
    return score(weights_of(settings, device), clips, settings, device, place)


def sides(height: int, width: int, side: int, patch: int) -> tuple[int, int]:
    """The shorter side in whole patches, the longer down to a whole number of them, or of 64 pixels if that is both."""
    unit = WHOLE if WHOLE % patch == 0 else patch
    short = patch * max(1, round(side / patch))
    long = unit * max(1, int(side * max(height, width) / min(height, width) // unit))
    long = max(long, short)
    return (short, long) if height <= width else (long, short)


def near(grid: tuple[int, int], reach: int, device: torch.device) -> Tensor:
    """N×N, true where two patches are at most `reach` rows and columns apart; 0: always."""
    rows = torch.arange(grid[0], device=device).repeat_interleave(grid[1])
    columns = torch.arange(grid[1], device=device).repeat(grid[0])
    if not reach:
        return torch.ones(len(rows), len(rows), dtype=torch.bool, device=device)
    return ((rows[:, None] - rows).abs() <= reach) & ((columns[:, None] - columns).abs() <= reach)


def propagate(
    features: Tensor, first: Tensor, grid: tuple[int, int], queue: int, reach: int, k: int, temperature: float
) -> Tensor:
    """T×N×D features of length 1 and N×C labels of the first frame -> T×N×C, the first being what was given."""
    allowed = near(grid, reach, features.device)
    found, recent = [first], deque[tuple[Tensor, Tensor]](maxlen=queue)
    for frame in features[1:]:
        known = [(features[0], first), *recent]
        similarity = torch.cat([(frame @ seen.T).masked_fill(~allowed, -torch.inf) for seen, _ in known], dim=1)
        labels = torch.cat([these for _, these in known])
        best, where = similarity.topk(min(k, similarity.shape[1]), dim=1)
        weight = F.softmax(best / temperature, dim=1)
        found.append(torch.einsum("nk,nkc->nc", weight, labels[where]))
        recent.append((frame, found[-1]))
    return torch.stack(found)


@torch.no_grad()
def segment(
    weights: Weights, frames: Tensor, mask: Tensor, objects: list[int], settings: Settings, dtype: torch.dtype | None
) -> Tensor:
    """T×C×height×width frames and the first mask -> T×height×width: places in `objects` from 1 on, 0 is background."""
    vit, device, size = weights.vit, frames.device, (frames.shape[-2], frames.shape[-1])
    small = sides(*size, settings.size, vit.patch_size)
    grid, normalise = vit.grid_of(*small), normalizer(weights, device)
    features = []
    for part in torch.split(frames, settings.batch_size):
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            patches = vit(normalise(resized(part, small))).patches
        features.append(F.normalize(patches.float(), dim=-1))
    numbers = torch.tensor([0, *objects], device=device)
    shrunk = F.interpolate(mask[None, None].float(), size=grid, mode="nearest-exact").flatten().long()
    first = (shrunk[:, None] == numbers).float()
    found = propagate(
        torch.cat(features), first, grid, settings.queue, settings.neighbourhood, settings.k, settings.temperature
    )
    maps = found.transpose(1, 2).unflatten(2, grid)  # type: ignore[no-untyped-call]
    made = []
    for each in maps:
        enlarged = F.interpolate(each[None], size=small, mode="bilinear")[0]
        low, high = enlarged.amin(dim=(1, 2), keepdim=True), enlarged.amax(dim=(1, 2), keepdim=True)
        stretched = torch.where(high > 0, (enlarged - low) / (high - low).clamp(min=1e-12), enlarged)
        labels = stretched.argmax(dim=0)[None, None].float()
        made.append(F.interpolate(labels, size=size, mode="nearest-exact")[0, 0].long())
    return torch.stack(made)


def score(
    weights: Weights, clips: list[Clip], settings: Settings, device: torch.device, place: Path | None = None
) -> dict[str, Any]:
    """J, F and J&F in percent, over the objects of all clips; `per_clip` has those of each."""
    dtype, own = autocast_dtype(settings.precision, device), distributed.part(len(clips))
    names = ["background", *(f"object {n}" for n in range(1, davis.MOST_OBJECTS + 1))]
    pictures = Pictures(names, settings.pictures if place is not None else 0, len(clips))
    rows = []
    with ThreadPoolExecutor(settings.num_workers or 8) as pool:
        for number in track(own, "video", len(own), distributed.is_main()):
            clip = clips[number]
            frames, masks = read(clip, weights, pool)
            objects = clip.objects()
            shown, truth = send(frames, device), send(masks, device)
            predicted = segment(weights, shown, truth[0], objects, settings, dtype)
            for which, label in enumerate(objects, 1):
                pair = predicted[1:-1] == which, truth[1:-1] == label
                rows.append([number, label, region(*pair).mean().item(), contour(*pair).mean().item()])
            last = len(truth) - 2
            order = torch.tensor(objects, device=device).view(-1, 1, 1)
            numbered = (truth[last] == order).long() * torch.arange(1, 1 + len(objects), device=device).view(-1, 1, 1)
            labels, drawn = (
                torch.where(objects_at == 0, IGNORE, objects_at)  # objects are painted, the background is not
                for objects_at in (numbered.sum(dim=0, keepdim=True), predicted[last : last + 1])
            )
            pictures.add(Frames([number], torch.cat([shown[last], labels.to(torch.uint8)])[None]), drawn)
    table = distributed.gather(torch.tensor(rows, dtype=torch.float64).view(-1, 4)).numpy()
    if place is not None:
        pictures.write(place)
    j, f = 100 * table[:, 2], 100 * table[:, 3]
    per_clip = {
        clip.name: {"j": float(j[mine].mean()), "f": float(f[mine].mean()), "objects": float(mine.sum())}
        for number, clip in enumerate(clips)
        if (mine := table[:, 0] == number).any()
    }
    return {
        "video_j_and_f": float((j.mean() + f.mean()) / 2),
        "video_j": float(j.mean()),
        "video_f": float(f.mean()),
        "num_clips": float(len(clips)),
        "num_objects": float(len(table)),
        "per_clip": per_clip,
    }


def read(clip: Clip, weights: Weights, pool: ThreadPoolExecutor) -> tuple[Any, Any]:
    """T×C×height×width and T×height×width, uint8."""
    try:
        frames = list(pool.map(lambda path: davis.read_frame(path, weights.decoder), clip.frames))
        masks = list(pool.map(davis.read_mask, clip.masks))
    except (Unreadable, OSError) as error:
        raise UserError(f"a frame or mask of clip {clip.name} cannot be read ({error}); mend it") from None
    sizes = {frame.shape[1:] for frame in frames} | {mask.shape for mask in masks}
    if len(sizes) > 1:
        raise UserError(f"frames and masks of clip {clip.name} are not all of one size; mend it")
    return np.stack(frames), np.stack(masks)


TOLERANCE = 0.008  # of the diagonal, by which a contour may be off


def region(predicted: Tensor, true: Tensor) -> Tensor:
    """J: intersection over union of each pair, 1 where both are empty."""
    both = (predicted & true).sum(dim=(1, 2)).double()
    either = (predicted | true).sum(dim=(1, 2)).double()
    return torch.where(either > 0, both / either.clamp(min=1), 1.0)


def contour(predicted: Tensor, true: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """F: harmonic mean of how much of the predicted contour is near the true one, and the other way round."""
    height, width = true.shape[1:]
    radius = math.ceil(tolerance * math.hypot(height, width)) if tolerance < 1 else int(tolerance)
    lines = boundary(predicted), boundary(true)
    near = thickened(lines[0], radius), thickened(lines[1], radius)
    counts = [line.sum(dim=(1, 2)).double() for line in lines]
    met = [(line & other).sum(dim=(1, 2)).double() for line, other in ((lines[0], near[1]), (lines[1], near[0]))]
    precision, recall = (m / c.clamp(min=1) for m, c in zip(met, counts, strict=True))
    said, there = counts[0] > 0, counts[1] > 0
    precision = torch.where(said, precision, 1.0)  # of nothing, nothing is wrong
    recall = torch.where(there, recall, 1.0)
    total = precision + recall
    return torch.where(total > 0, 2 * precision * recall / total.clamp(min=1e-12), 0.0)


def boundary(mask: Tensor) -> Tensor:
    """Pixels that differ from the one right, below, or right below of them."""
    wide = F.pad(mask.float().unsqueeze(1), (0, 1, 0, 1), mode="replicate").squeeze(1) > 0.5
    return (mask ^ wide[:, :-1, 1:]) | (mask ^ wide[:, 1:, :-1]) | (mask ^ wide[:, 1:, 1:])


def thickened(lines: Tensor, radius: int) -> Tensor:
    """All pixels at most `radius` away from one of the lines."""
    axis = torch.arange(-radius, radius + 1, device=lines.device)
    disc = (axis[:, None] ** 2 + axis**2 <= radius**2).float()
    return F.conv2d(lines.float().unsqueeze(1), disc[None, None], padding=radius).squeeze(1) > 0.5
