"""The settings of a pretraining run, each with its type, default and meaning. Imports no torch."""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from adclr.config.combinations import refuse_class_attention, refuse_epochs, refuse_micro_batch, refuse_queries
from adclr.config.parsing import (
    VIT_SIZES,
    Beta,
    Count,
    Deviation,
    Device,
    NonNegative,
    Positive,
    Ratio,
    Section,
    Several,
    Share,
    Side,
    Width,
    setting,
)

advanced = partial(setting, advanced=True)  # shown by --help-all only
runtime = partial(advanced, free=["resume"])  # how a run works, not what it computes: may change on resume
# Limits that catch typing errors: temperatures that float32 does not hold, runs that never end.
Temperature = Annotated[float, Field(ge=0.001, le=1000)]
Crops = Annotated[int, Field(ge=0, le=10_000)]
Epochs = Annotated[int, Field(ge=1, le=100_000)]


class Data(Section):
    """The collection of images."""

    path: str = setting(
        "",
        "folder, .txt list, .tar shards, Parquet, hf:NAME, or one of these at a URL (the DATA of the command line)",
        free=["resume"],
    )
    labels: bool = setting(
        False, "names of first-level folders are class labels; only the probe uses them", free=["resume"]
    )
    num_workers: int | None = runtime(
        None, "decoding threads; 0: one thread without prefetching; null: CPU cores per process", ge=0
    )
    max_pixels: Count = advanced(100_000_000, "images with more pixels are rejected before decoding")
    max_value: Positive | None = advanced(
        None,
        "white in images of more than 8 bits; null: the smallest of 8, 10, 12, 14 or 16 bits that holds the image",
    )
    shrink_above: Side | None = advanced(
        1024, "decode JPEGs at 1/2, 1/4 or 1/8 while the shorter side has at least this many pixels; null: never"
    )
    max_side: Side | None = advanced(None, "resize larger images to this longer side, pixels; null: off")
    cache: Literal["auto", "off", "ram", "gpu"] = runtime(
        "auto", "where decoded images are cached; auto: on the GPU or in memory if they fit"
    )
    local_cache: str | None = runtime(
        None,
        "folder that caches data read from object stores; null: $ADCLR_LOCAL_CACHE, or ~/.cache/adclr",
    )
    local_cache_gib: NonNegative | None = runtime(
        None, "size limit of that cache, GiB; 0: no cache; null: $ADCLR_LOCAL_CACHE_GIB, or 20"
    )
    max_unreadable: Ratio = runtime(0.1, "share of unreadable images above which the run stops")
    mean: tuple[Ratio, ...] = setting((0.485, 0.456, 0.406), "mean of each channel, 0 to 1")
    std: tuple[Deviation, ...] = setting((0.229, 0.224, 0.225), "standard deviation of each channel, 0 to 1")
    allow_changed: bool = runtime(False, "resume although images of the collection have changed")
    allow_damaged_shards: bool = runtime(
        False, "train on the readable part of truncated .tar shards; otherwise they are an error"
    )
    check: Literal["time", "content"] = runtime(
        "time",
        "detect replaced images on resume by size and modification time, or by content, which reads every image",
    )


class Views(Section):
    """Crops of an image, and their augmentation."""

    global_size: Side = setting(224, "side of the 2 global crops, pixels")
    local_size: Side = setting(96, "side of a local crop, pixels")
    num_local: Crops = setting(10, "local crops per image")
    num_queries: Crops = setting(10, "Q, query crops per image, each resized to one patch; 0 is DINO")
    global_scale: tuple[Share, Share] = advanced((0.4, 1.0), "area of a global crop, as a share of the image")
    local_scale: tuple[Share, Share] = advanced((0.05, 0.4), "area of a local crop, as a share of the image")
    query_scale: tuple[Share, Share] = advanced((0.05, 0.15), "area of a query crop, as a share of the image")
    # width over height of crops, log-uniform; torchvision's default, as in DINO and iBOT
    aspect_ratio: ClassVar[tuple[float, float]] = (3 / 4, 4 / 3)
    flip: Ratio = setting(0.5, "probability of a horizontal flip")
    jitter: Ratio = setting(0.8, "probability of color jitter")
    brightness: Ratio = advanced(0.4, "color jitter: factor from 1 - x to 1 + x")
    contrast: Ratio = advanced(0.4, "color jitter: factor from 1 - x to 1 + x")
    saturation: Ratio = advanced(0.2, "color jitter: factor from 1 - x to 1 + x")
    hue: Annotated[float, Field(ge=0, le=0.5)] = advanced(0.1, "color jitter: shift of the hue")
    gray: Ratio = advanced(0.2, "probability of grayscale", old_name="grey")
    global_blur: tuple[Ratio, Ratio] = advanced((1.0, 0.1), "blur probability of the two global crops")
    local_blur: Ratio = advanced(0.5, "probability of blur for a local crop")
    blur_sigma: tuple[Deviation, Deviation] = advanced((0.1, 2.0), "standard deviation of the blur, pixels of the crop")
    solarize: tuple[Ratio, Ratio] = advanced(
        (0.0, 0.2), "solarization probability of the two global crops", old_name="solarise"
    )
    query_photometric: Literal["none", "local"] = advanced(
        "none", "photometric changes of queries; none: only a flip; local: those of local crops"
    )
    query_source: Literal["random", "local"] = advanced(
        "random",
        "random: random boxes; local: query i is the box of local crop i, and its [CLS] must match the query's target",
    )
    # share of global crops that are masked (with method.masked_weight > 0), and of their patches; iBOT's
    mask_probability: ClassVar[float] = 0.5
    mask_ratio: ClassVar[tuple[float, float]] = (0.1, 0.5)

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        for name in ("global_scale", "local_scale", "query_scale", "blur_sigma"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"views.{name} must go from low to high, not from {low} to {high}")
        return self


class Model(Section):
    """The Vision Transformer."""

    init: str | None = setting(None, "weights to start from, which also set the architecture; null: random weights")
    size: Literal["tiny", "small", "base", "large"] = setting("small", "width, depth and heads of the ViT")
    patch_size: Literal[4, 8, 14, 16] = setting(16, "side of a patch, pixels")
    num_channels: Annotated[int, Field(ge=1, le=256)] = setting(
        3, "image channels: 3 is RGB, 1 gray, other numbers are bands of TIFF files. Only RGB images get color changes"
    )
    dim: Width | None = advanced(None, "width, instead of the size's")
    depth: Annotated[int, Field(ge=1, le=1000)] | None = advanced(None, "number of blocks, instead of the size's")
    num_heads: Width | None = advanced(None, "number of heads, instead of the size's")
    num_registers: int = advanced(0, "number of register tokens", ge=0, le=1024)
    layer_scale: Positive | None = advanced(None, "initial value of LayerScale; null: no LayerScale")
    class_attention: Annotated[int, Field(ge=0, le=100)] = advanced(
        0,
        "class-attention blocks at the end (SelfPatch: 2), which alone have [CLS]; 0: all have it. Not with queries",
    )
    drop_path: Annotated[float, Field(ge=0, lt=1)] = advanced(
        0.1, "drop path rate of the last block, linear in depth; student only"
    )
    query_keys: Literal["image", "patches", "image_and_self", "all"] = advanced(
        "image", "keys of a query; all: the image attends to queries too, an ablation that collapses"
    )
    query_read_only_blocks: Annotated[int, Field(ge=0, le=1000)] = advanced(
        0, "last blocks in which a query holds only what it reads from the image, not its own pixels"
    )
    position_resampling: Literal["antialias", "plain", "offset"] = advanced(
        "antialias", "resampling of position embeddings to another grid; offset: as in DINO's code"
    )
    norm_eps: Annotated[float, Field(gt=0, le=0.1)] = advanced(1e-6, "epsilon of the layer norms")
    position_embedding: Literal["learned", "rotary"] = advanced(
        "learned", "learned: added to the patches; rotary: rotary position embedding, as in DINOv3"
    )
    mlp: Literal["plain", "gated"] = advanced(
        "plain", "plain: two layers with GELU; gated: SwiGLU with three layers, as in DINOv3's ViT-S+"
    )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (width, depth, heads)."""
        dim, depth, heads = VIT_SIZES[self.size]
        return self.dim or dim, self.depth or depth, self.num_heads or heads

    @model_validator(mode="after")
    def _read_only(self) -> Self:
        depth = self.shape[1]
        if self.query_read_only_blocks > depth:
            raise ValueError(
                f"model.query_read_only_blocks={self.query_read_only_blocks} is more than the {depth} blocks of this "
                f"model; set model.query_read_only_blocks={depth} or less"
            )
        if self.query_read_only_blocks and self.query_keys in ("image_and_self", "all"):
            raise ValueError(
                f"model.query_keys={self.query_keys} lets a query attend to itself, so it would not be read-only; "
                "set model.query_keys=patches, or model.query_read_only_blocks=0"
            )
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        dim, _, heads = self.shape
        if dim % heads:
            fits = max(h for h in range(1, heads + 1) if dim % h == 0)
            raise ValueError(f"model.num_heads={heads} does not divide the width {dim}; set model.num_heads={fits}")
        if self.position_embedding == "rotary" and dim // heads % 4:
            raise ValueError(
                f"model.position_embedding=rotary needs heads whose width is divisible by 4, not {dim // heads}; "
                f"set model.dim={4 * heads * max(1, round(dim / heads / 4))}, or model.position_embedding=learned"
            )
        return self


class Method(Section):
    """The losses, the teacher and the projection head."""

    query_weight: NonNegative = setting(0.5, "lambda, weight of the query loss")
    masked_weight: NonNegative = setting(0.0, "mu, weight of the masked-patch loss; 0: nothing is masked")
    neighbor_weight: NonNegative = setting(
        0.0,
        "weight of SelfPatch's patch loss (0.1 in SelfPatch); needs model.class_attention; 0: off",
    )
    num_neighbors: Annotated[int, Field(ge=1, le=8)] = advanced(
        4, "SelfPatch: number of most similar patches, of the eight around a patch, that form its target"
    )
    neighbor_prototypes: Annotated[int, Field(ge=2, le=2**24)] = advanced(
        4096, "SelfPatch: prototypes of the head of the patch loss"
    )
    queries_in_local_views: bool = advanced(False, "add queries to the student's local crops too")
    read_only_copies: bool = advanced(
        False, "add a second copy of each query, read-only in the last model.query_read_only_blocks"
    )
    center: Literal["separate", "shared"] = advanced(
        "separate",
        "one running center for each kind of token, or one shared by all; with queries, shared collapses [CLS]",
    )
    center_momentum: Ratio = advanced(0.9, "momentum of the centers")
    target: Literal["center", "sinkhorn"] = advanced("center", "normalization of the teacher's output")
    # tau_s; the same in DINO, iBOT and DINOv2: how sharp targets are against it is set by the teacher's temperature
    student_temperature: ClassVar[float] = 0.1
    teacher_temperature: Temperature = setting(0.07, "temperature of the teacher, tau_t, after its warm-up")
    teacher_temperature_start: Temperature = advanced(0.04, "temperature of the teacher at the start")
    teacher_temperature_warmup_epochs: NonNegative = advanced(30, "epochs of its linear warm-up")
    query_temperature: Temperature | None = setting(
        None, "temperature of the teacher for queries; null: method.teacher_temperature, as published"
    )
    query_temperature_start: Temperature | None = advanced(
        None, "temperature of the teacher for queries at the start; null: constant"
    )
    momentum: Ratio = setting(0.996, "momentum of the teacher at the start")
    momentum_end: Ratio = advanced(1.0, "momentum of the teacher at the end of its cosine schedule")
    head_hidden_dim: Width = advanced(2048, "width of the projection head")
    head_bottleneck_dim: Width = advanced(256, "width of the bottleneck before the prototypes")
    num_prototypes: Annotated[int, Field(ge=2, le=2**24)] = setting(65536, "K, number of prototypes")
    anchor_weight: NonNegative = advanced(
        0.0, "weight of the Gram anchor, which preserves the patch similarities of model.init; 0: off"
    )
    train_gain: bool = advanced(True, "train the gain of the weight-normalized last layer (norm_last_layer=False)")


class Optim(Section):
    """AdamW and its schedules."""

    lr: Positive = setting(5e-4, "peak learning rate at batch size 256; scaled linearly with the batch")
    final_lr: NonNegative = advanced(1e-6, "learning rate at the end")
    warmup_epochs: NonNegative = setting(10, "epochs over which the learning rate rises from 0")
    weight_decay: NonNegative = setting(0.04, "weight decay at the start")
    weight_decay_end: NonNegative = advanced(0.4, "weight decay at the end, by a cosine")
    betas: tuple[Beta, Beta] = advanced((0.9, 0.999), "betas of AdamW")
    clip_norm: Positive | None = advanced(3.0, "gradient norm limit of each parameter tensor; null: off")
    freeze_last_layer_epochs: NonNegative = advanced(1, "epochs with a frozen last layer of the head")
    layer_decay: Share = advanced(1.0, "learning rate of a block relative to the next block; 1: the same rate for all")
    freeze_backbone_epochs: NonNegative | None = advanced(
        None, "epochs with a frozen backbone if model.init is set; null: a tenth of all epochs, at most 1"
    )


class Train(Section):
    """Length, batch size, device, checkpoints and logs."""

    epochs: Epochs = setting(100, "passes over the images")
    batch_size: Count = setting(1024, "images per step, over all processes")
    micro_batch_size: Count | None = runtime(
        None, "images per forward pass in one process, with gradient accumulation; null: as many as fit into memory"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = setting(0, "random seed")
    device: Device = setting("auto", "auto: the GPU if there is one", free=["resume"])
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "auto: bfloat16 autocast on a GPU that has it, else float32"
    )
    residual_precision: Literal["auto", "float32"] = advanced(
        "auto",
        "precision of the tokens that blocks add to; auto: as train.precision, with half the bytes under bfloat16",
    )
    compile: Literal["auto", "on", "off"] = runtime(
        "auto", "compile the blocks of the ViT, in under a minute; auto: on GPUs, except short runs on one GPU"
    )
    cuda_graph: Literal["auto", "off"] = runtime(
        "auto", "record the step as one CUDA graph; auto: on one GPU without gradient accumulation"
    )
    parallel_teacher: bool = runtime(
        False, "on a GPU, run the teacher beside the student, on a CUDA stream of its own; not with train.shard"
    )
    checkpoint_activations: bool = runtime(False, "recompute activations in backward: less memory, more time")
    shard: bool = runtime(
        False, "shard weights and optimizer state over the processes (FSDP2), for ViT-L and larger; not compiled"
    )
    reduce_precision: Literal["float32", "bfloat16"] = advanced("float32", "precision of gradients in all-reduce")
    deterministic: bool = advanced(False, "only use deterministic operations")
    # steps in a row with a loss or gradient that is not finite, after which the run ends; single ones do occur
    max_void_steps: ClassVar[int] = 50
    log_every_steps: Count = runtime(10, "steps between lines of metrics.jsonl")
    health_every_steps: Count | None = runtime(100, "steps between health measurements; null: off")
    checkpoint_every_steps: Count | None = runtime(
        None, "steps between checkpoints; null: one per epoch, or every 500 steps if epochs are shorter"
    )
    checkpoint_every_minutes: Positive | None = runtime(
        15.0, "also save a checkpoint after this many minutes; null: off"
    )
    keep_checkpoints: Count = runtime(2, "number of newest checkpoints to keep")
    free_checkpoints: bool = runtime(
        True, "on a full disk, delete the oldest checkpoints to save a new one; never the newest"
    )
    report: bool = runtime(True, "write report.html during training, with pictures of three images")
    loggers: Several[Literal["tensorboard", "wandb", "mlflow"]] = setting((), "experiment trackers", free=["resume"])


class Probe(Section):
    """Scores of the teacher during training: kNN, matching of patches, in-context segmentation."""

    data: str | None = setting(
        None, "labeled images (train/ and val/, or one folder that is split 80/20) for kNN accuracy", free=["resume"]
    )
    held_out: str | None = setting(
        None,
        "held-out images without labels, for the matching score of images and patches",
        free=["resume"],
    )
    every_epochs: Count = setting(10, "epochs between probes, besides the first and last", free=["resume"])
    k: Count = runtime(20, "number of neighbors")
    # images that go through the network together; without gradients, this takes less memory than a training step
    images_at_once: ClassVar[int] = 256
    pixels: str | None = setting(None, "labeled pixels (see evaluate incontext) for in-context mIoU", free=["resume"])
    pixels_size: ClassVar[None] = None  # shorter side of those images: that of the global crops
    # labeled patches that in-context segmentation remembers; 10 million, as published, take minutes in every probe
    memory_size: ClassVar[int] = 102_400


class Settings(Section):
    """All settings of a pretraining run."""

    recipe: str = runtime("", "the recipe these settings started from")
    data: Data = Data()
    views: Views = Views()
    model: Model = Model()
    method: Method = Method()
    optim: Optim = Optim()
    train: Train = Train()
    probe: Probe = Probe()

    @property
    def command(self) -> str:
        """Return the command that trains with such settings."""
        return "pretrain"

    @property
    def masked(self) -> bool:
        """Return whether there is a masked-patch loss."""
        return self.method.masked_weight > 0

    @property
    def num_anchored(self) -> int:
        """Return how many queries of an image are boxes of its local crops."""
        views = self.views
        return min(views.num_queries, views.num_local) if views.query_source == "local" else 0

    @property
    def query_tokens(self) -> int:
        """Return how many query tokens a view has: queries, and their read-only copies."""
        return self.views.num_queries * (2 if self.method.read_only_copies else 1)

    @property
    def frozen_epochs(self) -> float:
        """Return the epochs in which the backbone is frozen."""
        epochs = self.optim.freeze_backbone_epochs
        if epochs is None:
            return 0.0 if self.model.init is None else min(1.0, self.train.epochs / 10)
        return epochs

    @model_validator(mode="after")
    def _possible(self) -> Self:
        views, patch = self.views, self.model.patch_size
        channels = self.model.num_channels
        for name, numbers in (("mean", self.data.mean), ("std", self.data.std)):
            if len(numbers) != channels:
                example = [0.5 if name == "mean" else 0.25] * min(channels, 16)
                raise ValueError(
                    f"data.{name} has {len(numbers)} numbers where model.num_channels={channels}; "
                    f"set data.{name} to the images' own, such as {example}"
                )
        sizes = [("global_size", views.global_size)]
        if views.num_local:
            sizes.append(("local_size", views.local_size))
        for name, size in sizes:
            if size % patch:
                near = max(patch, round(size / patch) * patch)
                raise ValueError(
                    f"views.{name}={size} is not divisible by model.patch_size={patch}; set views.{name}={near}"
                )
        method = self.method
        refuse_queries(
            views.query_source == "local" and views.num_queries > 0 and not views.num_local,
            method.query_temperature_start is not None and method.query_temperature is None,
            self.masked and self.model.query_keys == "all" and views.num_queries > 0,
            method.read_only_copies and not self.model.query_read_only_blocks,
        )
        refuse_class_attention(
            self.model.class_attention,
            views.num_queries + self.model.num_registers,
            self.model.position_embedding == "rotary",
            self.method.neighbor_weight,
            self.masked,
            self.method.target,
        )
        if self.method.anchor_weight and self.model.init is None:
            raise ValueError("method.anchor_weight anchors to given weights; set model.init too, or leave it out")
        if self.train.parallel_teacher and self.train.shard:
            raise ValueError(
                "train.parallel_teacher needs the whole teacher in each process; leave out train.shard or it"
            )
        refuse_epochs(self.train.epochs, self.optim.warmup_epochs, self.frozen_epochs, self.model.init is not None)
        refuse_micro_batch(self.train.batch_size, self.train.micro_batch_size)
        return self
