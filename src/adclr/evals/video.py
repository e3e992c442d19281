"""Video object segmentation without training: the masks of the first frame are propagated from frame to frame.

Protocol (DINO's, after Jabri et al.): features of the last block's patches, L2-normalized; each patch of a frame is
compared with those of the first frame and of the 7 frames before it that are at most 12 patches away; the labels of the
5 most similar are averaged by a softmax of their similarities over 0.1. Frames have a shorter side of 480 pixels. J, F
and their mean as DAVIS 2017 measures them: over all frames but the first and last, then over the objects of all clips.
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
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from adclr.config.parsing import Count, Positive, Side, UserError, setting
from adclr.data.decode import Unreadable
from adclr.data.sets import davis
from adclr.data.sets.davis import Clip
from adclr.data.sets.pixels import IGNORE
from adclr.evals.frames import Frames, resize_images
from adclr.evals.overlays import Overlays
from adclr.evals.task import EvaluationSettings, check_inputs, load_backbone
from adclr.features.reader import normalizer
from adclr.system import distributed
from adclr.system.devices import autocast_dtype, select_device, send
from adclr.system.progress import track
from adclr.weights.backbone import Weights

SIDE_UNIT = 64  # pixels; the longer side is a multiple, as in DINO's program
TOLERANCE = 0.008  # of contours, relative to the diagonal


class Settings(EvaluationSettings):
    """Settings of `evaluate video`."""

    data: str = setting("", "folder of DAVIS", free=["study"])
    split: str = Field("val", description="list of clips in ImageSets/YEAR")
    year: str = Field("2017", description="year of the list of clips")
    resolution: str = Field("480p", description="resolution: the folder in JPEGImages and Annotations")
    size: Side = Field(480, description="shorter side of the frames, pixels")
    queue: Count = Field(7, description="number of previous frames to match, besides the first")
    neighborhood: Annotated[int, Field(ge=0)] = setting(
        12, description="radius of matching, patches; 0: unlimited", old_name="neighbourhood"
    )
    k: Count = Field(5, description="number of neighbors whose labels are averaged")
    temperature: Positive = Field(0.1, description="temperature of the softmax over the neighbors' similarities")
    batch_size: Count = Field(16, description="frames per batch")
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", description="auto: bfloat16 on a GPU that has it", free=["study"]
    )
    pictures: Annotated[int, Field(ge=0, le=64)] = setting(
        4, description="number of clips of which a frame is drawn", free=["study"]
    )


def run(settings: Settings, prefix: Path | None = None) -> dict[str, Any]:
    """Segment all clips and return the scores."""
    check_inputs("video", settings, "clips")
    clips = davis.open_davis(settings.data, settings.split, settings.year, settings.resolution)
    davis.check(clips)
    device = select_device(settings.device)
    return score(load_backbone(settings, device), clips, settings, device, prefix)


def resized_size(height: int, width: int, side: int, patch: int) -> tuple[int, int]:
    """Return the size of resized frames: the shorter side in whole patches, the longer rounded down to a unit.

    The unit is 64 pixels if that is a multiple of the patch size, else a patch.
    """
    unit = SIDE_UNIT if SIDE_UNIT % patch == 0 else patch
    short = patch * max(1, round(side / patch))
    long = unit * max(1, int(side * max(height, width) / min(height, width) // unit))
    long = max(long, short)
    return (short, long) if height <= width else (long, short)


def neighborhood(grid: tuple[int, int], radius: int, device: torch.device) -> Tensor:
    """Return N×N, true where two patches are at most `radius` rows and columns apart; 0: everywhere."""
    rows = torch.arange(grid[0], device=device).repeat_interleave(grid[1])
    columns = torch.arange(grid[1], device=device).repeat(grid[0])
    if not radius:
        return torch.ones(len(rows), len(rows), dtype=torch.bool, device=device)
    return ((rows[:, None] - rows).abs() <= radius) & ((columns[:, None] - columns).abs() <= radius)


def propagate(
    features: Tensor, first: Tensor, grid: tuple[int, int], queue: int, radius: int, k: int, temperature: float
) -> Tensor:
    """Return labels T×N×C of frames with features T×N×D of length 1; `first` are those of the first frame, N×C."""
    allowed = neighborhood(grid, radius, features.device)
    all_labels, recent = [first], deque[tuple[Tensor, Tensor]](maxlen=queue)
    for frame in features[1:]:
        context = [(features[0], first), *recent]
        similarity = torch.cat([(frame @ other.T).masked_fill(~allowed, -torch.inf) for other, _ in context], dim=1)
        context_labels = torch.cat([labels for _, labels in context])
        best, nearest = similarity.topk(min(k, similarity.shape[1]), dim=1)
        weight = F.softmax(best / temperature, dim=1)
        all_labels.append(torch.einsum("nk,nkc->nc", weight, context_labels[nearest]))
        recent.append((frame, all_labels[-1]))
    return torch.stack(all_labels)


@torch.no_grad()
def _segment(
    weights: Weights, frames: Tensor, mask: Tensor, objects: list[int], settings: Settings, dtype: torch.dtype | None
) -> Tensor:
    """Return T×height×width numbers of objects, counted from 1, 0 for background; frames are T×C×height×width.

    `mask` is that of the first frame, with the values `objects`.
    """
    vit, device, size = weights.vit, frames.device, (frames.shape[-2], frames.shape[-1])
    small = resized_size(*size, settings.size, vit.patch_size)
    grid, normalize = vit.grid_of(*small), normalizer(weights, device)
    features = []
    for part in torch.split(frames, settings.batch_size):
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            patches = vit(normalize(resize_images(part, small))).patches
        features.append(F.normalize(patches.float(), dim=-1))
    values = torch.tensor([0, *objects], device=device)
    small_mask = F.interpolate(mask[None, None].float(), size=grid, mode="nearest-exact").flatten().long()
    first = (small_mask[:, None] == values).float()
    labels = propagate(
        torch.cat(features), first, grid, settings.queue, settings.neighborhood, settings.k, settings.temperature
    )
    masks = []
    for frame_map in labels.transpose(1, 2).unflatten(2, grid):  # type: ignore[no-untyped-call]
        enlarged = F.interpolate(frame_map[None], size=small, mode="bilinear")[0]
        low, high = enlarged.amin(dim=(1, 2), keepdim=True), enlarged.amax(dim=(1, 2), keepdim=True)
        stretched = torch.where(high > 0, (enlarged - low) / (high - low).clamp(min=1e-12), enlarged)
        likeliest = stretched.argmax(dim=0)[None, None].float()
        masks.append(F.interpolate(likeliest, size=size, mode="nearest-exact")[0, 0].long())
    return torch.stack(masks)


def score(
    weights: Weights, clips: list[Clip], settings: Settings, device: torch.device, prefix: Path | None = None
) -> dict[str, Any]:
    """Return J, F and J&F in percent, over the objects of all clips; `per_clip` has those of each clip."""
    dtype, local_clips = autocast_dtype(settings.precision, device), distributed.local_range(len(clips))
    classes = ["background", *(f"object {n}" for n in range(1, davis.MOST_OBJECTS + 1))]
    overlays = Overlays(classes, settings.pictures, len(clips), prefix)
    rows = []
    with ThreadPoolExecutor(settings.num_workers or 8) as pool:
        for number in track(local_clips, "video", len(local_clips), distributed.is_main()):
            clip = clips[number]
            frames, masks = (send(array, device) for array in _read_clip(clip, weights, pool))
            objects = clip.objects()
            predicted = _segment(weights, frames, masks[0], objects, settings, dtype)
            for object_number, value in enumerate(objects, 1):
                pair = predicted[1:-1] == object_number, masks[1:-1] == value
                rows.append([number, value, region(*pair).mean().item(), contour(*pair).mean().item()])
            last = len(masks) - 2
            overlays.add(*_overlay_frame(number, frames[last], masks[last], predicted[last], objects))
    table = distributed.gather(torch.tensor(rows, dtype=torch.float64).view(-1, 4)).numpy()
    overlays.write()
    j, f = 100 * table[:, 2], 100 * table[:, 3]
    per_clip = {
        clip.name: {"j": float(j[in_clip].mean()), "f": float(f[in_clip].mean()), "objects": float(in_clip.sum())}
        for number, clip in enumerate(clips)
        if (in_clip := table[:, 0] == number).any()
    }
    return {
        "video_j_and_f": float((j.mean() + f.mean()) / 2),
        "video_j": float(j.mean()),
        "video_f": float(f.mean()),
        "num_clips": float(len(clips)),
        "num_objects": float(len(table)),
        "per_clip": per_clip,
    }


def _overlay_frame(
    number: int, frame: Tensor, mask: Tensor, predicted: Tensor, objects: list[int]
) -> tuple[Frames, Tensor]:
    """Return a frame with its labels, and its prediction, for an overlay of the objects without the background."""
    labels = torch.zeros_like(predicted)
    for object_number, value in enumerate(objects, 1):
        labels[mask == value] = object_number
    labels, predicted = (torch.where(numbers == 0, IGNORE, numbers)[None] for numbers in (labels, predicted))
    return Frames([number], torch.cat([frame, labels.to(torch.uint8)])[None]), predicted


def _read_clip(clip: Clip, weights: Weights, pool: ThreadPoolExecutor) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the frames, T×C×height×width, and the masks, T×height×width."""
    try:
        frames = list(pool.map(lambda path: davis.read_frame(path, weights.decoder), clip.frames))
        masks = list(pool.map(davis.read_mask, clip.masks))
    except (Unreadable, OSError) as error:
        raise UserError(f"a frame or mask of clip {clip.name} cannot be read ({error}); fix it") from None
    sizes = {frame.shape[1:] for frame in frames} | {mask.shape for mask in masks}
    if len(sizes) > 1:
        raise UserError(f"frames and masks of clip {clip.name} are not all of one size; fix it")
    return np.stack(frames), np.stack(masks)


def region(predicted: Tensor, true: Tensor) -> Tensor:
    """Return J, the intersection over union of each pair of masks; 1 where both are empty."""
    intersection = (predicted & true).sum(dim=(1, 2)).double()
    union = (predicted | true).sum(dim=(1, 2)).double()
    return torch.where(union > 0, intersection / union.clamp(min=1), 1.0)


def contour(predicted: Tensor, true: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """Return F, the harmonic mean of the shares of the predicted contour near the true one and vice versa."""
    height, width = true.shape[1:]
    radius = math.ceil(tolerance * math.hypot(height, width)) if tolerance < 1 else int(tolerance)
    contours = boundary(predicted), boundary(true)
    dilated = dilate(contours[0], radius), dilate(contours[1], radius)
    num_predicted, num_true = (line.sum(dim=(1, 2)).double() for line in contours)
    predicted_near = (contours[0] & dilated[1]).sum(dim=(1, 2)).double()
    true_near = (contours[1] & dilated[0]).sum(dim=(1, 2)).double()
    precision = torch.where(num_predicted > 0, predicted_near / num_predicted.clamp(min=1), 1.0)
    recall = torch.where(num_true > 0, true_near / num_true.clamp(min=1), 1.0)
    total = precision + recall
    return torch.where(total > 0, 2 * precision * recall / total.clamp(min=1e-12), 0.0)


def boundary(mask: Tensor) -> Tensor:
    """Return the pixels that differ from the one to the right, below, or below to the right."""
    padded = F.pad(mask.float().unsqueeze(1), (0, 1, 0, 1), mode="replicate").squeeze(1) > 0.5
    return (mask ^ padded[:, :-1, 1:]) | (mask ^ padded[:, 1:, :-1]) | (mask ^ padded[:, 1:, 1:])


def dilate(lines: Tensor, radius: int) -> Tensor:
    """Return the pixels at most `radius` away from a line."""
    axis = torch.arange(-radius, radius + 1, device=lines.device)
    disc = (axis[:, None] ** 2 + axis**2 <= radius**2).float()
    return F.conv2d(lines.float().unsqueeze(1), disc[None, None], padding=radius).squeeze(1) > 0.5
