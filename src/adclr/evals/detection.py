"""Detection and instance segmentation: Mask R-CNN with a feature pyramid on the backbone, trained on COCO's json.

Protocol (the paper's): blocks 4, 6, 8 and 12 rescaled to strides 4 to 32; AdamW of 3e-4 for a batch of 32 (in
proportion for others), decay 0.05, layer decay 0.75, drop path 0.05; a warm-up of 1000 steps, a tenth at epochs 8 and
11 of 12; shorter side 480 to 800 in steps of 32, longer at most 1333, flips; test at 800. Box and mask AP as COCO
measures them. `window` makes all blocks but those four look no farther than windows, as ViTDet's do, and leaves out
`[CLS]`. With a place to write to, training is resumed there (see `course`), and the model is left there.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from adclr.config.sections import Count, Share, UserError
from adclr.config.settings import Side
from adclr.data.draws import Draws, Words, combine, epoch_order, key_of
from adclr.data.feed import Batch, Feed
from adclr.data.prefetch import Ahead
from adclr.data.sets import coco
from adclr.data.sets.coco import Instances, Object, coco_masks, filled, open_instances
from adclr.data.sets.pixels import IGNORE
from adclr.evals import trainer
from adclr.evals.features import count_unreadable
from adclr.evals.frames import Frames, read_frames
from adclr.evals.mask_rcnn import Detector, run_lengths
from adclr.evals.mixing import kept
from adclr.evals.overlays import Pictures
from adclr.evals.task import Conditions, weights_of
from adclr.evals.trainer import Course, Pace
from adclr.features.reader import ImageReader
from adclr.model import optim
from adclr.system import distributed, machine
from adclr.system.devices import autocast_dtype, choose, send
from adclr.system.runs import Run
from adclr.weights.backbone import Weights
from adclr.weights.tensors import fingerprint

EPOCHS, DROPS = 12, (8 / 12, 11 / 12)  # of the 1x schedule
LR, LR_BATCH, WARMUP, DECAY, LAYER_DECAY, DROP_PATH = 3e-4, 32, 1000, 0.05, 0.75, 0.05
STEP = 32  # pixels between shorter sides
DRAWN_FROM = 0.5  # score from which a detection is drawn
# settings that a resumed training may have otherwise: how, not what
HOW = {
    *("weights", "data", "num_workers", "device", "max_unreadable", "checkpoint_minutes"),
    *("pictures", "test_batch_size"),
}


class Settings(Pace, Conditions):
    data: str = Field("", description="folder with annotations/instances_{train,val}.json and the images")
    train_split: str = Field("train", description="of the json that is learned from")
    val_split: str = Field("val", description="and of the one that is scored")
    drop_bad: bool = Field(False, description="leave bad objects out instead of refusing the file")
    epochs: Count = Field(EPOCHS, description="where no steps are set")
    sides: tuple[Side, Side] = Field(
        (480, 800), description="least and largest shorter side in training; test: largest"
    )
    longest: Side = Field(1333, description="longer side, at most")
    window: Annotated[int, Field(ge=1)] | None = Field(
        None, description="patches across the windows of attention, 14 for one; null: all blocks see the whole image"
    )
    drop_path: Annotated[float, Field(ge=0, lt=1)] = Field(DROP_PATH, description="of the last block")
    layer_decay: Share | None = Field(
        None, description="speed of a layer, of the one above; null: 0.75, from scratch 1"
    )
    test_batch_size: Count = Field(4, description="test images at once, of one size")
    precision: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on a GPU that has it")
    pictures: Annotated[int, Field(ge=0, le=64)] = Field(4, description="val images whose detections are drawn")


@dataclass(frozen=True)
class Shown:
    """What a step sees; lists have an entry for each image."""

    images: list[Tensor]  # C×height×width in [0, 1]
    targets: list[dict[str, Tensor]]
    sides: list[int]
    kept: Tensor | None

    def tensors(self) -> list[Tensor]:
        more = [] if self.kept is None else [self.kept]
        return [*self.images, *(tensor for target in self.targets for tensor in target.values()), *more]


@dataclass(frozen=True)
class Plan:
    flip: NDArray[np.bool_]
    sides: NDArray[np.int64]
    draws: Draws


class Examples:
    """Batches of images with their objects; in a batch all are wide or all are high, so that little is filled up."""

    def __init__(self, weights: Weights, instances: Instances, settings: Settings, device: torch.device) -> None:
        self.instances, self.settings, self.device, self.depth = instances, settings, device, weights.vit.depth
        self.batch_size = settings.batch_size or LR_BATCH
        if self.batch_size % distributed.world_size():
            raise UserError(f"batch_size={self.batch_size} does not divide by {distributed.world_size()} processes")
        self.learned = instances.learned()
        self.wide = instances.sizes[self.learned, 1] >= instances.sizes[self.learned, 0]
        self.keys = instances.photos.keys[self.learned]
        counts = [int(self.wide.sum()), int((~self.wide).sum())]
        self.steps_per_epoch = sum(-(-count // self.batch_size) for count in counts)
        workers = settings.num_workers or machine.cpu_count()
        pin = device.type == "cuda"
        self.feed = Feed(instances.photos, workers, weights.decoder, settings.max_unreadable, pin=pin)
        self.feed.keep("auto", device)

    def _epoch(self, epoch: int) -> list[NDArray[np.int64]]:
        """The batches of an epoch. The last of the wide and of the high ones are filled with their first again."""
        order = epoch_order(self.settings.seed, epoch, self.keys)
        made = []
        for shape in (True, False):
            own = order[self.wide[order] == shape]
            if len(own):
                full = np.resize(own, -(-len(own) // self.batch_size) * self.batch_size)
                made += np.split(self.learned[full], len(full) // self.batch_size)
        turn = Draws(self.settings.seed, epoch, np.zeros(1, np.uint64)).permutation("batches", len(made))[0]
        return [made[place] for place in turn]

    def _order(self, start: int, end: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        local = self.batch_size // distributed.world_size()
        own = slice(distributed.rank() * local, (distributed.rank() + 1) * local)
        for step in range(start, end):
            epoch, place = divmod(step, self.steps_per_epoch)
            if place == 0 or step == start:
                batches = self._epoch(epoch)
            yield epoch, batches[place][own]

    def _plan(self, epoch: int, keys: Words, sizes: NDArray[np.int64]) -> Plan:  # noqa: ARG002
        draws = Draws(self.settings.seed, epoch, keys)
        least, most = self.settings.sides
        choices = np.array([*range(least, most, STEP), most])
        sides = choices[np.floor(draws.uniform("side", 1)[:, 0] * len(choices)).astype(np.int64)]
        return Plan(draws.chance("flip", 0.5, 1)[:, 0], sides, draws)

    def batches(self, start: int, end: int) -> Ahead[Shown]:
        return Ahead(self.feed.batches(self._order(start, end), self._plan), self._make, self.device)

    def _make(self, batch: Batch[Plan]) -> Shown:
        plan, packed = batch.plan, batch.packed.to(self.device)
        images, targets = [], []
        for place, index in enumerate(self.feed.shown(batch.indices).tolist()):
            height, width = packed.sizes[place].tolist()
            offset, flip = int(packed.offsets[place]), bool(plan.flip[place])
            pixels = packed.bytes[offset : offset + packed.num_channels * height * width]
            image = pixels.view(packed.num_channels, height, width).float() / 255
            images.append(image.flip(-1) if flip else image)
            own = [one for one in self.instances.objects[index] if not one.crowd]
            targets.append(self._target(own, height, width, flip))
        dropped = kept(plan.draws, self.depth, self.settings.drop_path, self.device)
        return Shown(images, targets, plan.sides.tolist(), dropped)

    def _target(self, own: list[Object], height: int, width: int, flip: bool) -> dict[str, Tensor]:
        boxes = np.array([one.box for one in own], np.float32).reshape(-1, 4)
        masks = (
            np.stack([filled(one.mask, height, width) for one in own])
            if own
            else np.zeros((0, height, width), np.uint8)
        )
        if flip:
            boxes = np.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], axis=1)
            masks = masks[:, :, ::-1]
        labels = np.array([one.kind + 1 for one in own], np.int64)
        return {
            "boxes": send(boxes, self.device),
            "labels": send(labels, self.device),
            "masks": send(masks, self.device),
        }


def run(settings: Settings, place: Path | None = None) -> dict[str, Any]:
    if not settings.weights or not settings.data:
        raise UserError("detection needs both weights and objects; give --weights and --data")
    coco.coco_masks()
    train, val = open_instances(settings.data, settings.train_split, settings.val_split, settings.drop_bad)
    coco.check((train, val), settings.num_workers, distributed.is_main())
    device = choose(settings.device)
    return score(weights_of(settings, device), train, val, settings, device, place)


def score(
    weights: Weights,
    train: Instances,
    val: Instances,
    settings: Settings,
    device: torch.device,
    place: Path | None = None,
) -> dict[str, Any]:
    """Trains; AP of boxes and masks in percent, and how many steps and images they rest on."""
    if settings.sides[0] > settings.sides[1] or settings.sides[1] > settings.longest:
        raise UserError(f"sides={list(settings.sides)} and longest={settings.longest} are not in order; set them so")
    dtype = autocast_dtype(settings.precision, device)
    torch.manual_seed(combine(settings.seed, key_of("detector")) % 2**63)
    model = Detector(weights, len(train.classes), settings.sides[1], settings.longest, settings.window, dtype).to(
        device
    )
    work = None if place is None else Run(place)
    with trainer.locked(work):
        distributed.barrier()
        whole = assemble(model, weights, train, settings, device, work)
        steps = trainer.train(whole)
        detections, missed = detect(model, weights, val, settings, device, place)
        found: dict[str, Any] = {"num_detections": float(len(detections))}
        if distributed.is_main():  # whose numbers alone are asked for
            seen = val.without(missed)  # of what was never seen nothing was missed
            for kind in ("box", "mask"):
                found = average_precision(seen, detections, kind) | found
        facts = {"classes": train.classes, "mean": weights.mean, "std": weights.std, "window": settings.window}
        trainer.finish(whole, facts)
    return found | {
        "num_steps": float(steps),
        "num_train": float(len(train.learned())),
        "num_val": float(len(val.photos) - len(missed)),
        "num_unreadable": float(len(missed)),
    }


def assemble(
    model: Detector, weights: Weights, train: Instances, settings: Settings, device: torch.device, work: Run | None
) -> Course:
    examples = Examples(weights, train, settings, device)
    total = settings.steps or settings.epochs * examples.steps_per_epoch
    peak = settings.lr or LR * examples.batch_size / LR_BATCH
    warmup = min(WARMUP, total // 10) if settings.warmup_steps is None else settings.warmup_steps
    layer_decay = settings.layer_decay or (1.0 if settings.from_scratch else LAYER_DECAY)
    decay = DECAY if settings.weight_decay is None else settings.weight_decay
    groups = optim.layer_groups(model.named(), weights.vit.depth, layer_decay, decay)

    def lr_at(share: float, step: int) -> float:
        return peak * min(1.0, (step + 1) / (warmup + 1)) * math.prod(0.1 for drop in DROPS if share >= drop)

    def losses(network: nn.Module, seen: Shown) -> dict[str, Tensor]:
        found: dict[str, Tensor] = network(seen.images, seen.targets, seen.sides, seen.kept)
        return found

    return Course(
        name="detection",
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.0, fused=True),
        batches=examples.batches,
        losses=losses,
        lr_at=lr_at,
        total=total,
        seed=settings.seed,
        device=device,
        clip_norm=settings.clip_norm,
        minutes=settings.minutes,
        checkpoint_minutes=settings.checkpoint_minutes,
        run=work,
        identity={
            "settings": settings.model_dump(mode="json", exclude=HOW),
            "images": train.photos.fingerprint(),
            "start": fingerprint(model.state_dict()),
        },
    )


@torch.no_grad()
def detect(
    model: Detector, weights: Weights, val: Instances, settings: Settings, device: torch.device, place: Path | None
) -> tuple[list[dict[str, Any]], set[int]]:
    """What a detector finds in the val images, of all processes, and which of these could not be read."""
    reader = ImageReader(val.photos, weights.decoder, None, device, settings.num_workers)
    pictures = Pictures(val.classes, settings.pictures if place is not None else 0, len(val.photos))
    lines: list[str] = []
    model.eval()
    for frames in read_frames(reader, settings.test_batch_size, "val"):
        found = model(list(frames.pixels.float() / 255))
        for index, own in zip(frames.indices, found, strict=True):
            lines += [json.dumps(row) for row in rows_of(own, val, index)]
        if any(index in pictures.wanted for index in frames.indices):
            _draw(pictures, frames, found, val, device)
    text = torch.from_numpy(np.frombuffer("".join(line + "\n" for line in lines).encode(), np.uint8).copy())
    everything = bytes(distributed.gather(text).numpy()).decode()
    count_unreadable(reader, settings.max_unreadable)  # refuses too many
    missed = set(distributed.gather(torch.tensor(sorted(reader.unreadable), dtype=torch.int64)).tolist())
    if place is not None:
        pictures.write(place)
    return [json.loads(line) for line in everything.splitlines()], missed


def rows_of(found: dict[str, Tensor], val: Instances, index: int) -> list[dict[str, Any]]:
    """Detections of an image in the form of COCO's results."""
    kernel = coco.coco_masks()
    height, width = found["masks"].shape[1:]
    boxes, labels, scores = (found[name].double().tolist() for name in ("boxes", "labels", "scores"))
    rows = []
    for (left, top, right, bottom), label, score, runs in zip(
        boxes, labels, scores, run_lengths(found["masks"]), strict=True
    ):
        mask = kernel.frPyObjects({"size": [height, width], "counts": runs}, height, width)
        counts = mask["counts"]
        rows.append(
            {
                "image_id": val.numbers[index],
                "category_id": val.categories[int(label) - 1],
                "bbox": [left, top, right - left, bottom - top],
                "score": score,
                "segmentation": {
                    "size": [height, width],
                    "counts": counts if isinstance(counts, str) else counts.decode(),
                },
            }
        )
    return rows


def _draw(
    pictures: Pictures, frames: Frames, found: list[dict[str, Tensor]], val: Instances, device: torch.device
) -> None:
    """The classes of objects and of detections as pixels, the most certain on top."""
    height, width = frames.size
    labels = np.full((len(frames.indices), height, width), IGNORE, np.uint8)
    predicted = torch.full(labels.shape, IGNORE, dtype=torch.int64, device=device)
    for place, (index, own) in enumerate(zip(frames.indices, found, strict=True)):
        for one in val.objects[index]:
            labels[place][filled(one.mask, height, width) > 0] = one.kind
        certain = int((own["scores"] >= DRAWN_FROM).sum())
        for number in reversed(range(certain)):
            predicted[place][own["masks"][number]] = own["labels"][number] - 1
    seen = torch.cat([frames.pixels, torch.from_numpy(labels).to(device).unsqueeze(1)], dim=1)
    pictures.add(Frames(frames.indices, seen), predicted)


# the place of each among COCO's twelve numbers
PLACES = {"ap": 0, "ap50": 1, "ap75": 2, "ap_small": 3, "ap_medium": 4, "ap_large": 5, "ar100": 8}


def average_precision(
    instances: Instances, detections: list[dict[str, Any]], kind: Literal["box", "mask"]
) -> dict[str, Any]:
    """Percentages, KIND_ap and so on, None where there is nothing to measure, and KIND_ap of each class.

    Detections are as COCO's results: image_id, category_id, bbox, score, and for masks segmentation. A mask is small,
    medium or large by its own area; where a box is given too, COCO's program would take that of the box.
    """
    coco_masks()  # says so if it is not there
    from faster_coco_eval import COCO, COCOeval_faster

    numbers: dict[str, Any] = {}
    left_out = "bbox" if kind == "mask" else "segmentation"
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(instances.dataset())
        told = [{k: v for k, v in one.items() if k != left_out} for one in detections]
        found = truth.loadRes(told) if told else COCO(instances.dataset() | {"annotations": []})
        measure = COCOeval_faster(truth, found, iouType="bbox" if kind == "box" else "segm")
        measure.evaluate()
        measure.accumulate()
        measure.summarize()
    for name, place in PLACES.items():
        numbers[f"{kind}_{name}"] = _percent(measure.stats[place])
    precision = np.asarray(measure.eval["precision"])[:, :, :, 0, -1]  # thresholds, recalls, classes; of any area
    means = [precision[:, :, c][precision[:, :, c] > -1] for c in range(len(instances.classes))]
    each = [_percent(values.mean()) if values.size else None for values in means]
    return numbers | {f"{kind}_per_class": dict(zip(instances.classes, each, strict=True))}


def _percent(value: Any) -> float | None:
    return None if value < 0 else 100 * float(value)
