"""Fine-tuning: a linear layer on the backbone, and all of it trained on labels.

Protocol (iBOT's, which is BEiT's): AdamW with a learning rate that decays from layer to layer, warm-up and cosine, drop
path, RandAugment, random erasing, mixup or cutmix in every step, smoothed labels; `[CLS]` or the mean patch of the last
block; resize to 256/224 and centre crop in test. The score is that of the last epoch. `from_scratch` is the control:
the same ViT, newly initialised, all layers at full speed.

With a place to write to it is resumed there: PLACE/metrics.jsonl and PLACE/checkpoints while it runs, and when it is
done PLACE/model.safetensors, with timm's keys and the head's, and PLACE/model.json, together weights like any others;
PLACE/classes.json says what the head tells apart.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adclr.config.sections import Count, NonNegative, Positive, Ratio, Section, Share, UserError
from adclr.config.settings import Beta, Side
from adclr.data.draws import Draws
from adclr.data.sets.classes import Labelled
from adclr.evals.accuracy import accuracies
from adclr.evals.classifier import Classifier, Pool
from adclr.evals.crops import Alter, Crops, Shown, side
from adclr.evals.features import CenterCrops, compute_features, labels_of
from adclr.evals.mixing import Eraser, draw_mix, kept, smoothed
from adclr.evals.randaugment import randaugment
from adclr.evals.task import Task, begin
from adclr.evals.trainer import locked
from adclr.features.reader import normalizer
from adclr.model import optim
from adclr.model.compiled import compile_blocks
from adclr.system import distributed
from adclr.system.devices import autocast_dtype
from adclr.system.files import write_atomically, write_json
from adclr.system.progress import Line
from adclr.system.runs import Run
from adclr.weights import snapshot
from adclr.weights.backbone import Weights
from adclr.weights.tensors import fit_tensors

BASE = 768  # width of ViT-B
AT_ONCE = 256  # images, where nothing is trained
# settings that a resumed fine-tuning may have otherwise: how, not what
HOW = {
    *("weights", "data", "num_workers", "device", "max_unreadable"),
    *("micro_batch_size", "compile", "checkpoint_minutes", "validate_every"),
}


class Protocol(Section):
    epochs: Count = Field(100, description="over the train split (iBOT on ImageNet: ViT-S 200, ViT-B 100)")
    batch_size: Count = Field(256, description="images of a step, of all processes (iBOT: 1024)")
    micro_batch_size: Count | None = Field(None, description="images at once in a process; null: all of its part")
    lr: Positive = Field(1e-3, description="at batch 256, of the last layer")
    final_lr: NonNegative = Field(1e-6, description="at the end of the cosine")
    warmup_epochs: NonNegative | None = Field(None, description="linear from 0; null: a tenth of the epochs")
    weight_decay: NonNegative = Field(0.05, description="not of biases, norms, tokens and positions")
    layer_decay: Share | None = Field(
        None, description="speed of a layer, of the one above; null: 0.65 for ViT-B, else 0.75, from scratch 1"
    )
    clip_norm: Positive | None = Field(None, description="largest norm of the gradient of all parameters")
    drop_path: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="of the last block; null: 0.1, and 0.2 from ViT-B on"
    )
    pool: Pool = Field("cls", description="what the head reads")
    min_crop: Share = Field(0.08, description="least area of a training crop, of the image's")
    randaugment: Annotated[float, Field(ge=0, le=10)] = Field(9.0, description="strength; 0: none; RGB images only")
    erase: Ratio = Field(0.25, description="probability that a rectangle of an image is noise")
    mixup: NonNegative = Field(0.8, description="parameter of its Beta distribution; 0: none")
    cutmix: NonNegative = Field(1.0, description="the same of cutmix; of both one is drawn for each step")
    smoothing: Ratio = Field(0.1, description="of the labels")
    ema: Beta | None = Field(None, description="average the weights too, with this momentum, and score that as well")
    validate_every: Count | None = Field(None, description="epochs between scores; null: one at the end")
    checkpoint_minutes: Positive = Field(2.0, description="between checkpoints")
    size: Side | None = Field(None, description="side of the images in pixels; null: as the backbone was trained")
    precision: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on a GPU that has it")
    compile: Literal["auto", "on", "off"] = Field("auto", description="compile the blocks; auto: on a GPU")


class Settings(Protocol, Task):
    pass


@dataclass(frozen=True)
class Job:
    """All that a fine-tuning consists of while it runs."""

    settings: Settings
    weights: Weights
    labelled: Labelled
    model: Classifier
    ema: Classifier | None
    optimizer: torch.optim.AdamW
    crops: Crops
    val_crops: CenterCrops
    val_labels: Tensor
    run: Run | None
    identity: dict[str, Any]  # what a checkpoint must be of
    size: int
    dtype: torch.dtype | None  # of autocast
    drop_path: float

    @property
    def device(self) -> torch.device:
        return self.crops.device

    @property
    def total(self) -> int:
        return self.settings.epochs * self.crops.steps_per_epoch

    @property
    def micro(self) -> int:
        """Images at once in this process."""
        local = self.crops.batch_size // distributed.world_size()
        return min(self.settings.micro_batch_size or local, local)

    @property
    def accumulate(self) -> int:
        return self.crops.batch_size // distributed.world_size() // self.micro

    def lr(self, step: int) -> float:
        """Of the last layer."""
        settings, each = self.settings, self.crops.steps_per_epoch
        warmup = settings.epochs / 10 if settings.warmup_epochs is None else settings.warmup_epochs
        peak = settings.lr * self.crops.batch_size / 256
        return optim.warm_cosine(step, round(warmup * each), self.total, peak, settings.final_lr)


def run(settings: Settings, place: Path | None = None) -> dict[str, Any]:
    weights, labelled, device = begin("finetune", settings)
    return score(weights, labelled, settings, device, place)


def score(
    weights: Weights, labelled: Labelled, settings: Settings, device: torch.device, place: Path | None = None
) -> dict[str, Any]:
    """Trains the backbone of `weights` itself; accuracies in percent, and how many images they rest on."""
    run = None if place is None else Run(place)
    job = assemble(weights, labelled, settings, device, run)
    with locked(run):
        distributed.barrier()  # the directory is there, and it is ours
        fits = True
        try:
            train(job)
        except torch.OutOfMemoryError:
            fits = False  # said below, where the traceback no longer holds on to memory
        if not fits:
            less = max(2, job.micro // 2)
            raise UserError(f"{job.micro} images at once do not fit into the GPU; set micro_batch_size={less}")
        found = accuracies("finetune", rank_classes(job, job.model), job.val_labels, labelled.classes, place)
        if job.ema is not None:
            averaged = accuracies("finetune", rank_classes(job, job.ema), job.val_labels, labelled.classes)
            found["finetune_top1_ema"] = averaged["finetune_top1"]
        if run is not None and distributed.is_main():
            finish(job, run)
    num_train, num_val = job.crops.num_readable(), len(job.val_labels)
    num_images = len(labelled.train.labels) + len(labelled.val.labels)
    return found | {
        "num_train": float(num_train),
        "num_val": float(num_val),
        "num_unreadable": float(num_images - num_train - num_val),
    }


def assemble(weights: Weights, labelled: Labelled, settings: Settings, device: torch.device, run: Run | None) -> Job:
    size, vit = side(weights.vit, settings.size), weights.vit
    base = vit.dim >= BASE
    layer_decay = settings.layer_decay or (1.0 if settings.from_scratch else 0.65 if vit.dim == BASE else 0.75)
    val_crops = CenterCrops(
        weights, labelled.val.source, device, AT_ONCE, settings.num_workers, (size, size), shared=True, cache=True
    )
    # read before anything is trained, so that what is wrong with them is said now
    seen = compute_features(val_crops, lambda images: images[:, 0, 0, :1], "val images", distributed.is_main())
    val_labels = labels_of(seen, labelled.val, labelled.classes, settings.max_unreadable)
    pairs = bool(settings.mixup or settings.cutmix)
    crops = Crops(weights, labelled, settings, device, size, settings.batch_size, settings.min_crop, pairs)
    local = crops.batch_size // distributed.world_size()
    micro = min(settings.micro_batch_size or local, local)
    if local % micro or (pairs and micro % 2):
        raise UserError(f"micro_batch_size={micro} must be even and divide a process's {local} images; choose such")
    model = Classifier(vit, len(labelled.classes), settings.pool, settings.seed).to(device)
    told = settings.model_dump(mode="json", exclude=HOW)
    data = [split.source.fingerprint() for split in (labelled.train, labelled.val)]
    optimizer = torch.optim.AdamW(
        optim.layer_groups(model.named(), vit.depth, layer_decay, settings.weight_decay), lr=0.0, fused=True
    )
    return Job(
        settings=settings,
        weights=weights,
        labelled=labelled,
        model=model,
        ema=None if settings.ema is None else deepcopy(model).eval(),
        optimizer=optimizer,
        crops=crops,
        val_crops=val_crops,
        val_labels=val_labels,
        run=run,
        identity={"settings": told, "images": data, "start": weights.fingerprint()},
        size=size,
        dtype=autocast_dtype(settings.precision, device),
        drop_path=(0.2 if base else 0.1) if settings.drop_path is None else settings.drop_path,
    )


def altering(job: Job) -> Alter:
    """Crops in [0, 1] -> what the network is shown, and what drop path multiplies with."""
    settings, vit, mean = job.settings, job.model.vit, job.weights.mean
    normalise = normalizer(job.weights, job.device)
    erase = Eraser(settings.erase, vit.num_channels, job.size, settings.seed, job.device)
    colours = settings.randaugment and vit.num_channels == 3

    def alter(images: Tensor, draws: Draws) -> tuple[Tensor, list[Tensor]]:
        if colours:
            images = randaugment(images, draws, settings.randaugment, mean)
        dropped = kept(draws, vit.depth, job.drop_path, job.device)
        return erase(normalise(images), draws), [] if dropped is None else [dropped]

    return alter


def train(job: Job) -> None:
    settings, crops, start = job.settings, job.crops, resume(job)
    _compile(job)
    model = job.model.train() if distributed.world_size() == 1 else DistributedDataParallel(job.model.train())
    losses = torch.zeros((), device=job.device)
    counted, saved = 0, time.monotonic()
    with (
        closing(crops.batches(start, job.total, job.micro, altering(job))) as shown,
        Line("finetune", job.total, start, distributed.is_main()) as line,
    ):
        for step in range(start, job.total):
            losses += _step(job, model, shown, step)
            counted += 1
            done = step + 1
            line.move(done)
            if done % crops.steps_per_epoch == 0:
                _epoch_done(job, done, losses / counted, line)
                losses, counted = torch.zeros_like(losses), 0
            due = time.monotonic() - saved > 60 * settings.checkpoint_minutes or done == job.total
            if due and job.run is not None and distributed.is_main():
                snapshot.save(job.run, done, _parts(job), {"step": done, "identity": job.identity}, keep=1)
                saved = time.monotonic()


def _step(job: Job, model: nn.Module, shown: Iterator[Shown], step: int) -> Tensor:
    """One step of the optimizer; the loss, on the device."""
    settings, classes = job.settings, len(job.labelled.classes)
    mix = draw_mix(settings.seed, step, settings.mixup, settings.cutmix, job.size)
    total = torch.zeros((), device=job.device)
    for micro in range(job.accumulate):
        seen = next(shown)
        images, targets = mix(seen.images, smoothed(seen.labels, classes, settings.smoothing))
        last = micro == job.accumulate - 1
        with model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext():
            with torch.autocast(job.device.type, dtype=job.dtype, enabled=job.dtype is not None):
                logits = model(images, seen.more[0] if seen.more else None)
            loss = F.cross_entropy(logits.float(), targets) / job.accumulate
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    if settings.clip_norm is not None:
        nn.utils.clip_grad_norm_(job.model.parameters(), settings.clip_norm)
    lr = job.lr(step)
    for group in job.optimizer.param_groups:
        group["lr"] = lr * group["scale"]
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
    if job.ema is not None and settings.ema is not None:
        average: list[Tensor] = list(job.ema.parameters())
        with torch.no_grad():
            torch._foreach_lerp_(average, list(job.model.parameters()), 1 - settings.ema)
    return total


def _epoch_done(job: Job, done: int, loss: Tensor, line: Line) -> None:
    """What is said and asked at the end of an epoch."""
    epoch, every = done // job.crops.steps_per_epoch, job.settings.validate_every
    row = {"step": done, "epoch": epoch, "loss": distributed.sum_(loss).item() / distributed.world_size()}
    row["lr"] = job.lr(done - 1)
    if not math.isfinite(row["loss"]):
        raise UserError(f"the loss is no number any more in epoch {epoch}; set a lower lr, or clip_norm=1")
    if epoch == 1 and job.crops.feed.store is None:
        job.crops.check()
    if every is not None and epoch % every == 0:
        ranking = rank_classes(job, job.model)
        row["top1"] = 100 * (ranking[:, 0] == job.val_labels).double().mean().item()
        job.model.train()
    if distributed.is_main():
        line.move(done, f"loss {row['loss']:.3f}" + (f" top-1 {row['top1']:.2f}" if "top1" in row else ""))
        if job.run is not None:
            job.run.append("metrics.jsonl", row)


def rank_classes(job: Job, model: Classifier) -> Tensor:
    """The five likeliest classes of each val image, n×5; of all processes together."""
    model.eval()
    most = min(5, len(job.labelled.classes))

    def likeliest(images: Tensor) -> Tensor:
        with torch.autocast(job.device.type, dtype=job.dtype, enabled=job.dtype is not None):
            logits: Tensor = model(images)
        return logits.float().topk(most, dim=-1).indices  # exact in float32 too, up to 16 million classes

    found = compute_features(
        job.val_crops, likeliest, "val", distributed.is_main() and job.settings.validate_every is None
    )
    return found.values.long()


# -- from one start to the next --


def _parts(job: Job) -> snapshot.Parts:
    parts = {"model": job.model.state_dict(), "optimizer": snapshot.optimizer_state(job.model, job.optimizer)}
    return parts if job.ema is None else parts | {"ema": job.ema.state_dict()}


def resume(job: Job) -> int:
    """Restores the latest checkpoint; the number of steps that are done."""
    if job.run is None:
        return 0
    steps = job.run.steps()
    if not steps:
        distributed.barrier()  # until all have looked
        if distributed.is_main():
            job.run.cut("metrics.jsonl", -1)
        return 0
    folder, parts = job.run.checkpoints / f"step_{steps[-1]}", _parts(job)
    stored, state = snapshot.load(folder, list(parts))
    if not isinstance(state, dict) or state.get("identity") != job.identity:
        raise UserError(
            f"{job.run.path} holds a fine-tuning of other weights, images or settings; "
            "delete it or choose another --out"
        )
    for name, model in (("model", job.model), ("ema", job.ema)):
        if model is not None:
            fit_tensors(parts[name], stored[name], folder / f"{name}.safetensors")
            model.load_state_dict(stored[name])
    snapshot.load_optimizer(job.model, job.optimizer, stored["optimizer"], folder / "optimizer.safetensors")
    distributed.barrier()
    if distributed.is_main():
        job.run.cut("metrics.jsonl", steps[-1])
        print(f"going on from step {steps[-1]} of {job.total}", file=sys.stderr)
    return steps[-1]


def _compile(job: Job) -> None:
    """Leaves no gradient behind."""
    mode = job.settings.compile
    if mode == "off" or (mode == "auto" and job.device.type != "cuda"):
        return

    def trial() -> None:
        images = torch.randn(job.micro, job.model.vit.num_channels, job.size, job.size, device=job.device)
        ones = torch.ones(job.model.vit.depth, 2, job.micro, device=job.device) if job.drop_path else None
        with torch.autocast(job.device.type, dtype=job.dtype, enabled=job.dtype is not None):
            logits = job.model.train()(images, ones)
        logits.float().sum().backward()

    compile_blocks([job.model.vit], trial)
    job.optimizer.zero_grad(set_to_none=True)


def finish(job: Job, run: Run) -> None:
    """Leaves the trained model where the checkpoints were."""
    best = job.model if job.ema is None else job.ema
    tensors = {name: tensor.cpu().contiguous() for name, tensor in best.state().items()}
    head = {"classes": job.labelled.classes, "pool": job.settings.pool, "size": job.size}
    write_json(run.path / "classes.json", head)
    write_json(run.path / "model.json", job.weights.describe().model_dump(mode="json"))
    write_atomically(run.path / "model.safetensors", save(tensors))
    shutil.rmtree(run.checkpoints, ignore_errors=True)
