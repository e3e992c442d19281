"""Detection and instance segmentation: Mask R-CNN with a feature pyramid on the backbone, trained on COCO's json.

Protocol (the paper's): blocks 4, 6, 8 and 12 rescaled to strides 4 to 32; AdamW with a learning rate of 3e-4 for a
batch of 32 (in proportion for others), weight decay 0.05, layer decay 0.75, drop path 0.05; a warm-up of 1000 steps,
the learning rate divided by 10 at epochs 8 and 11 of 12; shorter side 480 to 800 in steps of 32, longer at most 1333,
flips; test at 800. Box and mask AP as COCO measures them. With `window` all blocks but those four attend within
windows, as ViTDet's do, and without `[CLS]`. With an output prefix the training is resumed in the folder PREFIX (see
`trainer`), which finally holds the model; PREFIX.png shows some detections.
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

from adclr.config.parsing import Count, Share, Side, UserError, setting
from adclr.data.feed import Batch, Feed, Prefetcher
from adclr.data.random_draws import Draws, Keys, combine, epoch_order, key_of
from adclr.data.sets import coco
from adclr.data.sets.coco import Instance, Instances, fill_mask, import_masks, open_instances
from adclr.data.sets.pixels import IGNORE
from adclr.evals import trainer
from adclr.evals.features import count_unreadable
from adclr.evals.frames import Frames, read_frames
from adclr.evals.mask_rcnn import Detector, run_lengths
from adclr.evals.mixing import drop_path_scales
from adclr.evals.overlays import Overlays
from adclr.evals.task import EvaluationSettings, check_inputs, load_backbone
from adclr.evals.trainer import Trainer, TrainingSettings
from adclr.features.reader import ImageReader
from adclr.model import optim
from adclr.system import distributed, machine
from adclr.system.devices import autocast_dtype, select_device, send
from adclr.system.runs import Run
from adclr.weights.backbone import Weights
from adclr.weights.tensors import fingerprint

EPOCHS, LR_DROPS = 12, (8 / 12, 11 / 12)  # of the 1x schedule
LR, LR_BATCH, WARMUP, DECAY, LAYER_DECAY, DROP_PATH = 3e-4, 32, 1000, 0.05, 0.75, 0.05
SIDE_STEP = 32  # pixels between shorter sides
MIN_DRAWN_SCORE = 0.5  # of detections in the figure
# index of each score in the statistics of COCO's program
STATISTICS = {"ap": 0, "ap50": 1, "ap75": 2, "ap_small": 3, "ap_medium": 4, "ap_large": 5, "ar100": 8}


class Settings(TrainingSettings, EvaluationSettings):
    """Settings of `evaluate detection`."""

    data: str = setting(
        "", description="folder with annotations/instances_{train,val}.json and the images", free=["resume", "study"]
    )
    train_split: str = Field("train", description="train split: its json file in annotations/")
    val_split: str = Field("val", description="split to score: its json file in annotations/")
    drop_bad: bool = Field(False, description="skip bad objects instead of stopping with an error")
    epochs: Count = Field(EPOCHS, description="epochs, if steps is not set")
    sides: tuple[Side, Side] = Field(
        (480, 800), description="smallest and largest shorter side in training, pixels; the test uses the largest"
    )
    longest: Side = Field(1333, description="limit of the longer side, pixels")
    window: Annotated[int, Field(ge=1)] | None = Field(
        None, description="side of attention windows, patches (for example 14); null: global attention in all blocks"
    )
    drop_path: Annotated[float, Field(ge=0, lt=1)] = Field(DROP_PATH, description="drop path rate of the last block")
    layer_decay: Share | None = Field(
        None, description="learning rate of a layer relative to the next layer; null: 0.75, from scratch 1"
    )
    test_batch_size: Count = setting(4, "test images of one size per batch", free=["resume", "study"])
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", description="auto: bfloat16 on a GPU that has it", free=["study"]
    )
    pictures: Annotated[int, Field(ge=0, le=64)] = setting(
        4, description="number of val images whose detections are drawn", free=["resume", "study"]
    )


@dataclass(frozen=True)
class _DetectionBatch:
    """Images with their objects; lists have an entry for each image."""

    images: list[Tensor]  # C×height×width in [0, 1]
    targets: list[dict[str, Tensor]]
    sides: list[int]  # to which the shorter sides are resized
    path_scales: Tensor | None  # factors of drop path, see `mixing.drop_path_scales`

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the batch."""
        path_scales = [] if self.path_scales is None else [self.path_scales]
        return [*self.images, *(tensor for target in self.targets for tensor in target.values()), *path_scales]


@dataclass(frozen=True)
class _Plan:
    """The random choices for each image of a batch."""

    flip: NDArray[np.bool_]
    sides: NDArray[np.int64]
    draws: Draws


class Examples:
    """Batches of images with their objects; those of a batch are all landscape or all portrait, to need little padding.

    The batch size is that of all processes.
    """

    def __init__(self, weights: Weights, instances: Instances, settings: Settings, device: torch.device) -> None:
        self.instances, self.settings, self.device, self.depth = instances, settings, device, weights.vit.depth
        self.batch_size = settings.batch_size or LR_BATCH
        if self.batch_size % distributed.world_size():
            raise UserError(f"batch_size={self.batch_size} does not divide by {distributed.world_size()} processes")
        self.indices = instances.learned()
        self.landscape = instances.sizes[self.indices, 1] >= instances.sizes[self.indices, 0]
        self.keys = instances.photos.keys[self.indices]
        counts = [int(self.landscape.sum()), int((~self.landscape).sum())]
        self.steps_per_epoch = sum(-(-count // self.batch_size) for count in counts)
        workers = settings.num_workers or machine.cpu_count()
        pin = device.type == "cuda"
        self.feed = Feed(instances.photos, workers, weights.decoder, settings.max_unreadable, pin=pin)
        self.feed.keep("auto", device)

    def _epoch_batches(self, epoch: int) -> list[NDArray[np.int64]]:
        """Return the batches of an epoch; the last landscape and the last portrait batch are filled with the first."""
        order = epoch_order(self.settings.seed, epoch, self.keys)
        batches = []
        for landscape in (True, False):
            chosen = order[self.landscape[order] == landscape]
            if len(chosen):
                full = np.resize(chosen, -(-len(chosen) // self.batch_size) * self.batch_size)
                batches += np.split(self.indices[full], len(full) // self.batch_size)
        shuffled = Draws(self.settings.seed, epoch, np.zeros(1, np.uint64)).permutation("batches", len(batches))[0]
        return [batches[number] for number in shuffled]

    def _order(self, start: int, end: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the epoch and the image indices of this process in each step."""
        local_size = self.batch_size // distributed.world_size()
        local = slice(distributed.rank() * local_size, (distributed.rank() + 1) * local_size)
        for step in range(start, end):
            epoch, number = divmod(step, self.steps_per_epoch)
            if number == 0 or step == start:
                batches = self._epoch_batches(epoch)
            yield epoch, batches[number][local]

    def _plan(self, epoch: int, keys: Keys, sizes: NDArray[np.int64]) -> _Plan:  # noqa: ARG002
        draws = Draws(self.settings.seed, epoch, keys)
        smallest, largest = self.settings.sides
        choices = np.array([*range(smallest, largest, SIDE_STEP), largest])
        sides = choices[np.floor(draws.uniform("side", 1)[:, 0] * len(choices)).astype(np.int64)]
        return _Plan(draws.chance("flip", 0.5, 1)[:, 0], sides, draws)

    def batches(self, start: int, end: int) -> Prefetcher[_DetectionBatch]:
        """Return an iterator, to be closed, over this process's batches of steps `start` to `end` - 1."""
        return Prefetcher(self.feed.batches(self._order(start, end), self._plan), self._make_batch, self.device)

    def _make_batch(self, batch: Batch[_Plan]) -> _DetectionBatch:
        plan, packed = batch.plan, batch.packed.to(self.device)
        images, targets = [], []
        for number, index in enumerate(self.feed.shown(batch.indices).tolist()):
            height, width = packed.sizes[number].tolist()
            offset, flip = int(packed.offsets[number]), bool(plan.flip[number])
            pixels = packed.bytes[offset : offset + packed.num_channels * height * width]
            image = pixels.view(packed.num_channels, height, width).float() / 255
            images.append(image.flip(-1) if flip else image)
            objects = [item for item in self.instances.objects[index] if not item.crowd]
            targets.append(self._target(objects, height, width, flip))
        path_scales = drop_path_scales(plan.draws, self.depth, self.settings.drop_path, self.device)
        return _DetectionBatch(images, targets, plan.sides.tolist(), path_scales)

    def _target(self, objects: list[Instance], height: int, width: int, flip: bool) -> dict[str, Tensor]:
        """Return the boxes, labels and masks of an image as torchvision's Mask R-CNN takes them."""
        boxes = np.array([item.box for item in objects], np.float32).reshape(-1, 4)
        labels = np.array([item.kind + 1 for item in objects], np.int64)
        masks = np.zeros((len(objects), height, width), np.uint8)
        for number, item in enumerate(objects):
            masks[number] = fill_mask(item.mask, height, width)
        if flip:
            boxes = np.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], axis=1)
            masks = masks[:, :, ::-1]
        arrays: dict[str, NDArray[Any]] = {"boxes": boxes, "labels": labels, "masks": masks}
        return {name: send(array, self.device) for name, array in arrays.items()}


@dataclass(kw_only=True)
class _DetectionTrainer(Trainer):
    """The training of a detector."""

    settings: Settings
    model: Detector
    examples: Examples
    peak_lr: float
    warmup_steps: int

    def batches(self, start: int, end: int) -> Prefetcher[_DetectionBatch]:
        """Return the batches of images with their objects."""
        return self.examples.batches(start, end)

    def losses(self, model: nn.Module, batch: _DetectionBatch, step: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the losses of proposals, boxes, classes and masks."""
        losses: dict[str, Tensor] = model(batch.images, batch.targets, batch.sides, batch.path_scales)
        return losses

    def lr_at(self, progress: float, step: int) -> float:
        """Return the learning rate: linear warm-up, and a tenth after each drop."""
        warmup = min(1.0, (step + 1) / (self.warmup_steps + 1))
        return self.peak_lr * warmup * math.prod(0.1 for drop in LR_DROPS if progress >= drop)


def run(settings: Settings, prefix: Path | None = None) -> dict[str, Any]:
    """Train a detector and return the scores."""
    check_inputs("detection", settings, "objects")
    import_masks()
    train, val = open_instances(settings.data, settings.train_split, settings.val_split, settings.drop_bad)
    coco.check((train, val), settings.num_workers, distributed.is_main())
    device = select_device(settings.device)
    return score(load_backbone(settings, device), train, val, settings, device, prefix)


def score(
    weights: Weights,
    train: Instances,
    val: Instances,
    settings: Settings,
    device: torch.device,
    prefix: Path | None = None,
) -> dict[str, Any]:
    """Train; return AP of boxes and masks in percent, and the numbers of steps and images."""
    if settings.sides[0] > settings.sides[1] or settings.sides[1] > settings.longest:
        raise UserError(f"sides={list(settings.sides)} and longest={settings.longest} do not ascend; reorder them")
    dtype = autocast_dtype(settings.precision, device)
    torch.manual_seed(combine(settings.seed, key_of("detector")) % 2**63)
    model = Detector(weights, len(train.classes), settings.sides[1], settings.longest, settings.window, dtype)
    model = model.to(device)
    run = None if prefix is None else Run(prefix)
    with trainer.lock(run):
        distributed.barrier()  # until the first process has locked the directory
        training = _assemble(model, weights, train, settings, device, run)
        steps = training.train()
        detections, unreadable = detect(model, weights, val, settings, device, prefix)
        scores: dict[str, Any] = {"num_detections": float(len(detections))}
        if distributed.is_main():  # only its scores are written
            readable = val.without(unreadable)  # objects of unreadable images do not count as missed
            for kind in ("box", "mask"):
                scores = average_precision(readable, detections, kind) | scores
        training.finish({"classes": train.classes, "mean": weights.mean, "std": weights.std, "window": settings.window})
    return scores | {
        "num_steps": float(steps),
        "num_train": float(len(train.learned())),
        "num_val": float(len(val.photos) - len(unreadable)),
        "num_unreadable": float(len(unreadable)),
    }


def _assemble(
    model: Detector, weights: Weights, train: Instances, settings: Settings, device: torch.device, run: Run | None
) -> _DetectionTrainer:
    """Return the training of the settings."""
    examples = Examples(weights, train, settings, device)
    total_steps = settings.steps or settings.epochs * examples.steps_per_epoch
    layer_decay = settings.layer_decay or (1.0 if settings.from_scratch else LAYER_DECAY)
    decay = DECAY if settings.weight_decay is None else settings.weight_decay
    groups = optim.layer_decay_groups(model.timm_parameters(), weights.vit.depth, layer_decay, decay)
    start = fingerprint(model.state_dict())
    return _DetectionTrainer(
        name="detection",
        settings=settings,
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.0, fused=True),
        total_steps=total_steps,
        minutes=settings.minutes,
        run=run,
        identity=trainer.identify(settings, train.photos.fingerprint(), start),
        examples=examples,
        peak_lr=settings.lr or LR * examples.batch_size / LR_BATCH,
        warmup_steps=min(WARMUP, total_steps // 10) if settings.warmup_steps is None else settings.warmup_steps,
    )


@torch.no_grad()
def detect(
    model: Detector, weights: Weights, val: Instances, settings: Settings, device: torch.device, prefix: Path | None
) -> tuple[list[dict[str, Any]], set[int]]:
    """Return the detections in the val images of all processes, and the indices of unreadable images."""
    reader = ImageReader(val.photos, weights.decoder, None, device, settings.num_workers)
    overlays = Overlays(val.classes, settings.pictures, len(val.photos), prefix)
    lines: list[str] = []
    model.eval()
    for frames in read_frames(reader, settings.test_batch_size, "val"):
        detections = model(list(frames.pixels.float() / 255))
        for index, of_image in zip(frames.indices, detections, strict=True):
            lines += [json.dumps(row) + "\n" for row in _coco_results(of_image, val, index)]
        if any(index in overlays.indices for index in frames.indices):
            _draw(overlays, frames, detections, val, device)
    text = torch.from_numpy(np.frombuffer("".join(lines).encode(), np.uint8).copy())
    all_lines = bytes(distributed.gather(text).numpy()).decode().splitlines()
    count_unreadable(reader, settings.max_unreadable)  # refuses too many
    all_unreadable = set(distributed.gather(torch.tensor(sorted(reader.unreadable), dtype=torch.int64)).tolist())
    overlays.write()
    return [json.loads(line) for line in all_lines], all_unreadable


def _coco_results(detections: dict[str, Tensor], val: Instances, index: int) -> list[dict[str, Any]]:
    """Return the detections of an image in the format of COCO's results."""
    kernel = import_masks()
    height, width = detections["masks"].shape[1:]
    boxes, labels, scores = (detections[name].double().tolist() for name in ("boxes", "labels", "scores"))
    rows = []
    for (left, top, right, bottom), label, score, lengths in zip(
        boxes, labels, scores, run_lengths(detections["masks"]), strict=True
    ):
        counts = kernel.frPyObjects({"size": [height, width], "counts": lengths}, height, width)["counts"]
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
    overlays: Overlays, frames: Frames, detections: list[dict[str, Tensor]], val: Instances, device: torch.device
) -> None:
    """Draw the classes of objects and of detections as pixels, the detections of the highest score on top."""
    height, width = frames.size
    labels = np.full((len(frames.indices), height, width), IGNORE, np.uint8)
    predicted = torch.full(labels.shape, IGNORE, dtype=torch.int64, device=device)
    for number, (index, of_image) in enumerate(zip(frames.indices, detections, strict=True)):
        for item in val.objects[index]:
            labels[number][fill_mask(item.mask, height, width) > 0] = item.kind
        count = int((of_image["scores"] >= MIN_DRAWN_SCORE).sum())
        for rank in reversed(range(count)):
            predicted[number][of_image["masks"][rank]] = of_image["labels"][rank] - 1
    pixels = torch.cat([frames.pixels, torch.from_numpy(labels).to(device).unsqueeze(1)], dim=1)
    overlays.add(Frames(frames.indices, pixels), predicted)


def average_precision(
    instances: Instances, detections: list[dict[str, Any]], kind: Literal["box", "mask"]
) -> dict[str, Any]:
    """Return percentages, KIND_ap and so on, None where there is nothing to measure, and KIND_ap of each class.

    Detections are in the format of COCO's results: image_id, category_id, bbox, score, and for masks segmentation. The
    area of a mask decides whether it is small, medium or large; with a box, COCO's program would take that of the box.
    """
    import_masks()  # refuses a missing package
    from faster_coco_eval import COCO, COCOeval_faster

    unused = "bbox" if kind == "mask" else "segmentation"
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(instances.dataset())
        results = [{key: value for key, value in row.items() if key != unused} for row in detections]
        predictions = truth.loadRes(results) if results else COCO(instances.dataset() | {"annotations": []})
        measure = COCOeval_faster(truth, predictions, iouType="bbox" if kind == "box" else "segm")
        measure.evaluate()
        measure.accumulate()
        measure.summarize()
    scores: dict[str, Any] = {f"{kind}_{name}": _percent(measure.stats[index]) for name, index in STATISTICS.items()}
    precision = np.asarray(measure.eval["precision"])[:, :, :, 0, -1]  # thresholds, recalls, classes; of any area
    values = [precision[:, :, c][precision[:, :, c] > -1] for c in range(len(instances.classes))]
    per_class = [_percent(of_class.mean()) if of_class.size else None for of_class in values]
    return scores | {f"{kind}_per_class": dict(zip(instances.classes, per_class, strict=True))}


def _percent(value: Any) -> float | None:
    """Return a share in percent; COCO's program has -1 where there is nothing to measure."""
    return None if value < 0 else 100 * float(value)
