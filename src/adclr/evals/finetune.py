"""Fine-tuning: a linear layer on the backbone, and both trained on labeled images.

Protocol (iBOT's, which is BEiT's): AdamW with layer-wise learning rate decay, warm-up and cosine, drop path,
RandAugment, random erasing, mixup or cutmix in every step, label smoothing; `[CLS]` or the mean patch of the last
block; resize to 256/224 and center crop in test. The score is that of the last epoch. `from_scratch` is the control:
the same ViT, newly initialized, without learning rate decay.

With an output prefix the training is resumed in the folder PREFIX (see `trainer`), which finally holds
model.safetensors, with timm's keys and the head's, and model.json, together weights like any others; classes.json has
the classes of the head. PREFIX.png is the confusion matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from adclr.config.parsing import Beta, Count, NonNegative, Positive, Ratio, Section, Share, Side, UserError, setting
from adclr.data.feed import Prefetcher
from adclr.data.random_draws import Draws, combine, key_of
from adclr.data.sets.classes import LabeledImages
from adclr.evals import trainer
from adclr.evals.accuracy import accuracies, count_images
from adclr.evals.crops import CropBatch, TrainingCrops, Transform
from adclr.evals.features import CenterCrops, compute_features, readable_labels
from adclr.evals.mixing import Eraser, draw_mix, drop_path_scales, smooth_labels
from adclr.evals.randaugment import randaugment
from adclr.evals.task import ClassificationSettings, crop_size, open_classification
from adclr.evals.trainer import Trainer
from adclr.features.reader import normalizer
from adclr.model import optim
from adclr.model.named_tensors import Input
from adclr.model.vit import VisionTransformer
from adclr.system import distributed
from adclr.system.devices import autocast_dtype
from adclr.system.files import write_json
from adclr.system.runs import Run
from adclr.weights.backbone import Weights

BASE_WIDTH = 768  # of ViT-B
TEST_BATCH_SIZE = 256
HEAD_SCALE = 0.001  # of the head's initial weights, so that its first gradients disturb the backbone little

Pool = Literal["cls", "mean_patch"]


class FinetuneSettings(Section):
    """Settings of a fine-tuning, which `transfer` has too."""

    epochs: Count = Field(100, description="passes over the train split (iBOT on ImageNet: ViT-S 200, ViT-B 100)")
    batch_size: Count = Field(256, description="images per step, over all processes (iBOT: 1024)")
    micro_batch_size: Count | None = setting(
        None,
        description="images per forward pass in one process; null: no gradient accumulation",
        free=["resume", "study"],
    )
    lr: Positive = Field(1e-3, description="learning rate of the last layer at batch size 256")
    final_lr: NonNegative = Field(1e-6, description="learning rate at the end of the cosine schedule")
    warmup_epochs: NonNegative | None = Field(
        None, description="epochs of the linear warm-up; null: a tenth of all epochs"
    )
    weight_decay: NonNegative = Field(
        0.05, description="weight decay, except of biases, norms, tokens and position embeddings"
    )
    layer_decay: Share | None = Field(
        None,
        description="learning rate of a layer relative to the next; null: 0.65 for ViT-B, else 0.75; from scratch 1",
    )
    clip_norm: Positive | None = Field(None, description="limit of the gradient norm of all parameters")
    drop_path: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="drop path rate of the last block; null: 0.1, from ViT-B on 0.2"
    )
    pool: Pool = Field("cls", description="input of the head")
    min_crop: Share = Field(0.08, description="smallest area of a training crop, as a share of the image")
    randaugment: Annotated[float, Field(ge=0, le=10)] = Field(
        9.0, description="strength of RandAugment, RGB images only; 0: off"
    )
    erase: Ratio = Field(0.25, description="probability of random erasing")
    mixup: NonNegative = Field(0.8, description="parameter of the Beta distribution of mixup; 0: off")
    cutmix: NonNegative = Field(
        1.0, description="parameter of the Beta distribution of cutmix; 0: off. Each step uses mixup or cutmix"
    )
    smoothing: Ratio = Field(0.1, description="label smoothing")
    ema: Beta | None = Field(None, description="momentum of an average of the weights, which is scored too")
    validate_every: Count | None = setting(
        None, description="epochs between validations; null: one at the end", free=["resume"]
    )
    checkpoint_minutes: Positive = setting(2.0, "minutes between checkpoints", free=["resume", "study"])
    size: Side | None = Field(None, description="image size, pixels; null: the size of training")
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", description="auto: bfloat16 on a GPU that has it", free=["study"]
    )
    compile: Literal["auto", "on", "off"] = setting(
        "auto", description="compile the blocks; auto: on a GPU", free=["resume", "study"]
    )


class Settings(FinetuneSettings, ClassificationSettings):
    """Settings of `evaluate finetune`."""


class Classifier(nn.Module):
    """A backbone with a linear layer on it."""

    def __init__(self, vit: VisionTransformer, num_classes: int, pool: Pool, seed: int) -> None:
        super().__init__()
        self.vit, self.pool = vit, pool
        if pool == "mean_patch":  # class attention does not take part: the loss has no gradient for it
            vit.blocks_token_only.requires_grad_(False)
            vit.cls_token.requires_grad_(not vit.class_attention)
        self.head = nn.Linear(vit.dim, num_classes)
        generator = torch.Generator().manual_seed(combine(seed, key_of("head")) % 2**63)
        nn.init.trunc_normal_(self.head.weight, std=0.02 * HEAD_SCALE, generator=generator)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, path_scales: Tensor | None = None) -> Tensor:
        """Return B×K logits; blocks that are compiled, for one batch size, are used in training only."""
        if self.training:
            (tokens,) = self.vit.forward_many([Input(images, patches=self.pool == "mean_patch")], path_scales)
        else:
            tokens = self.vit(images)
        logits: Tensor = self.head(tokens.cls if self.pool == "cls" else tokens.patches.mean(dim=1))
        return logits

    def timm_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by their names in timm."""
        for name, parameter in self.named_parameters():
            yield name.removeprefix("vit."), parameter

    def timm_state(self) -> dict[str, Tensor]:
        """Return the state by its names in timm."""
        return {name.removeprefix("vit."): tensor.detach() for name, tensor in self.state_dict().items()}


@dataclass(kw_only=True)
class FinetuneTrainer(Trainer):
    """The training of a classifier, and its test on the val split."""

    settings: Settings
    weights: Weights
    labeled: LabeledImages
    model: Classifier
    ema: Classifier | None
    crops: TrainingCrops
    val_crops: CenterCrops
    val_labels: Tensor
    size: int
    micro_batch_size: int
    dtype: torch.dtype | None  # of autocast
    drop_path: float

    find_unused_parameters: ClassVar[bool] = False

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.crops.device

    def lr_at(self, progress: float, step: int) -> float:  # noqa: ARG002
        """Return the learning rate of the last layer."""
        settings = self.settings
        warmup_epochs = settings.epochs / 10 if settings.warmup_epochs is None else settings.warmup_epochs
        warmup_steps = round(warmup_epochs * self.crops.steps_per_epoch)
        peak = settings.lr * self.crops.batch_size / 256
        return optim.warmup_cosine(step, warmup_steps, self.total_steps, peak, settings.final_lr)

    def batches(self, start: int, end: int) -> Prefetcher[CropBatch]:
        """Return the micro-batches of augmented crops."""
        return self.crops.batches(start, end, self.micro_batch_size, self._augmentation())

    def _augmentation(self) -> Transform:
        """Return the augmentation of crops but for mixup and cutmix, which `losses` do."""
        settings, vit, mean = self.settings, self.model.vit, self.weights.mean
        normalize = normalizer(self.weights, self.device)
        erase = Eraser(settings.erase, vit.num_channels, self.size, settings.seed, self.device)

        def augment(images: Tensor, draws: Draws) -> tuple[Tensor, Tensor | None]:
            if settings.randaugment and vit.num_channels == 3:
                images = randaugment(images, draws, settings.randaugment, mean)
            path_scales = drop_path_scales(draws, vit.depth, self.drop_path, self.device)
            return erase(normalize(images), draws), path_scales

        return augment

    def losses(self, model: nn.Module, batch: CropBatch, step: int) -> dict[str, Tensor]:
        """Return the cross-entropy of mixed images and soft labels."""
        settings = self.settings
        mix = draw_mix(settings.seed, step, settings.mixup, settings.cutmix, self.size)
        targets = smooth_labels(batch.labels, len(self.labeled.classes), settings.smoothing)
        images, targets = mix(batch.images, targets)
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            logits = model(images, batch.path_scales)
        return {"loss": F.cross_entropy(logits.float(), targets)}

    def log(self, step: int, losses: dict[str, float], lr: float, seconds: float) -> dict[str, Any]:  # noqa: ARG002
        """Return the row of an epoch, with the top-1 accuracy if it is due."""
        epoch, validate_every = step // self.crops.steps_per_epoch, self.settings.validate_every
        trainer.check_finite(losses["loss"], f"in epoch {epoch}")
        if epoch == 1:
            self.crops.check_if_streamed()
        row = {"step": step, "epoch": epoch, "loss": losses["loss"], "lr": lr}
        if validate_every is not None and epoch % validate_every == 0:
            row["top1"] = 100 * (self.rank_classes(self.model)[:, 0] == self.val_labels).double().mean().item()
            self.model.train()
        return row

    def compile_if_set(self) -> None:
        """Compile the blocks for the micro-batch size, by default on a GPU only."""
        mode, size, vit = self.settings.compile, self.micro_batch_size, self.model.vit
        if mode == "off" or (mode == "auto" and self.device.type != "cuda"):
            return
        images = torch.randn(size, vit.num_channels, self.size, self.size, device=self.device)
        labels = torch.zeros(size, dtype=torch.int64, device=self.device)
        path_scales = torch.ones(vit.depth, 2, size, device=self.device) if self.drop_path else None
        self.compile(vit, CropBatch(images, labels, path_scales))

    def rank_classes(self, model: Classifier) -> Tensor:
        """Return the five likeliest classes of each val image of all processes, n×5."""
        model.eval()
        count = min(5, len(self.labeled.classes))

        def rank(images: Tensor) -> Tensor:
            with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
                logits: Tensor = model(images)
            return logits.float().topk(count, dim=-1).indices  # exact in float32 too, up to 16 million classes

        show = distributed.is_main() and self.settings.validate_every is None
        return compute_features(self.val_crops, rank, "val", show).values.long()


def run(settings: Settings, prefix: Path | None = None) -> dict[str, Any]:
    """Fine-tune and return the scores."""
    weights, labeled, device = open_classification("finetune", settings)
    return score(weights, labeled, settings, device, prefix)


def score(
    weights: Weights, labeled: LabeledImages, settings: Settings, device: torch.device, prefix: Path | None = None
) -> dict[str, Any]:
    """Train the backbone of `weights` itself; return accuracies in percent and the numbers of images."""
    training = assemble(weights, labeled, settings, device, None if prefix is None else Run(prefix))
    with trainer.lock(training.run):
        distributed.barrier()  # until the first process has locked the directory
        out_of_memory = False
        try:
            training.compile_if_set()
            training.train()
        except torch.OutOfMemoryError:
            out_of_memory = True  # raised below, where the traceback no longer holds memory
        if out_of_memory:
            size = training.micro_batch_size
            raise UserError(f"{size} images at once do not fit into the GPU; set micro_batch_size={max(2, size // 2)}")
        ranking = training.rank_classes(training.model)
        scores = accuracies("finetune", ranking, training.val_labels, labeled.classes, prefix)
        if training.ema is not None:
            averaged = accuracies("finetune", training.rank_classes(training.ema), training.val_labels, labeled.classes)
            scores["finetune_top1_ema"] = averaged["finetune_top1"]
        _finish(training)
    return scores | count_images(labeled, training.crops.num_readable(), len(training.val_labels))


def assemble(
    weights: Weights, labeled: LabeledImages, settings: Settings, device: torch.device, run: Run | None
) -> FinetuneTrainer:
    """Return the training of the settings, after reading the val images so that their faults are found now."""
    size, vit = crop_size(weights.vit, settings.size), weights.vit
    layer_decay = settings.layer_decay or (1.0 if settings.from_scratch else 0.65 if vit.dim == BASE_WIDTH else 0.75)
    val_crops = CenterCrops(
        weights,
        labeled.val.source,
        device,
        TEST_BATCH_SIZE,
        settings.num_workers,
        (size, size),
        shared=True,
        cache=True,
    )
    readable = compute_features(val_crops, lambda images: images[:, 0, 0, :1], "val images", distributed.is_main())
    val_labels = readable_labels(readable, labeled.val, labeled.classes, settings.max_unreadable)
    pairs = bool(settings.mixup or settings.cutmix)
    crops = TrainingCrops(weights, labeled, settings, device, size, settings.batch_size, settings.min_crop, pairs)
    local_size = crops.batch_size // distributed.world_size()
    micro = min(settings.micro_batch_size or local_size, local_size)
    if local_size % micro or (pairs and micro % 2):
        raise UserError(
            f"micro_batch_size={micro} must be even and divide a process's {local_size} images; choose another"
        )
    model = Classifier(vit, len(labeled.classes), settings.pool, settings.seed).to(device)
    groups = optim.layer_decay_groups(model.timm_parameters(), vit.depth, layer_decay, settings.weight_decay)
    images = [split.source.fingerprint() for split in (labeled.train, labeled.val)]
    default_drop_path = 0.2 if vit.dim >= BASE_WIDTH else 0.1
    return FinetuneTrainer(
        name="finetune",
        settings=settings,
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.0, fused=True),
        total_steps=settings.epochs * crops.steps_per_epoch,
        run=run,
        identity=trainer.identify(settings, images, weights.fingerprint()),
        num_micro_batches=local_size // micro,
        ema=None if settings.ema is None else deepcopy(model).eval(),
        ema_momentum=settings.ema or 0.0,
        log_every=crops.steps_per_epoch,
        weights=weights,
        labeled=labeled,
        crops=crops,
        val_crops=val_crops,
        val_labels=val_labels,
        size=size,
        micro_batch_size=micro,
        dtype=autocast_dtype(settings.precision, device),
        drop_path=default_drop_path if settings.drop_path is None else settings.drop_path,
    )


def _finish(training: FinetuneTrainer) -> None:
    """Write the trained model, its average if there is one, with its description and its classes."""
    weights, model = training.weights, training.ema or training.model
    if training.run is not None and distributed.is_main():
        head = {"classes": training.labeled.classes, "pool": training.settings.pool, "size": training.size}
        write_json(training.run.path / "classes.json", head)
    training.finish(weights.describe().model_dump(mode="json"), model.timm_state())
