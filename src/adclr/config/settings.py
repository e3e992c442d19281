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
        False, "the first level of sub-folders names classes; only the probe uses them", free=["resume"]
    )
    num_workers: int | None = runtime(
        None, "decoding threads; 0: one, and nothing ahead; null: the CPU cores, divided by the processes here", ge=0
    )
    max_pixels: Count = advanced(100_000_000, "a picture of more pixels is refused before it is decoded")
    max_value: Positive | None = advanced(
        None, "white in images of more than 8 bits; null: the least of 8, 10, 12, 14, 16 bits that holds each"
    )
    shrink_above: Side | None = advanced(
        1024, "a JPEG is decoded at 1/2, 1/4 or 1/8 while its shorter side stays this long; null: never"
    )
    max_side: Side | None = advanced(None, "longer side to which larger images are resized; null: none")
    cache: Literal["auto", "off", "ram", "gpu"] = runtime(
        "auto", "where images are kept once decoded; auto: on the GPU or in memory if they fit"
    )
    local_cache: str | None = runtime(
        None,
        "folder on this machine that keeps what was read from a store; null: $ADCLR_LOCAL_CACHE, or ~/.cache/adclr",
    )
    local_cache_gib: NonNegative | None = runtime(
        None, "its largest size; 0: nothing is kept; null: $ADCLR_LOCAL_CACHE_GIB, or 20"
    )
    max_unreadable: Ratio = runtime(0.1, "share of unreadable images above which the run stops")
    mean: tuple[Ratio, ...] = setting((0.485, 0.456, 0.406), "mean of each channel, of 1")
    std: tuple[Deviation, ...] = setting((0.229, 0.224, 0.225), "deviation of each channel, of 1")
    allow_changed: bool = runtime(False, "resume although the collection is not what it was")
    allow_damaged_shards: bool = runtime(
        False, "train on what can be read of .tar shards that are cut off; otherwise they are refused"
    )
    check: Literal["time", "content"] = runtime(
        "time",
        "what tells on resuming that an image was replaced: its size and time of modification, or its "
        "content, for which every image is read at each start",
    )


class Views(Section):
    """Crops of an image, and their augmentation."""

    global_size: Side = setting(224, "side of the 2 global crops, pixels")
    local_size: Side = setting(96, "side of a local crop, pixels")
    num_local: Crops = setting(10, "local crops of each image")
    num_queries: Crops = setting(10, "Q, query crops of each image, each one patch large; 0 is DINO")
    global_scale: tuple[Share, Share] = advanced((0.4, 1.0), "area of a global crop, of the image's")
    local_scale: tuple[Share, Share] = advanced((0.05, 0.4), "area of a local crop")
    query_scale: tuple[Share, Share] = advanced((0.05, 0.15), "area of a query crop")
    # width over height of crops, log-uniform; torchvision's default, as in DINO and iBOT
    aspect_ratio: ClassVar[tuple[float, float]] = (3 / 4, 4 / 3)
    flip: Ratio = setting(0.5, "probability of a horizontal flip")
    jitter: Ratio = setting(0.8, "probability of color jitter")
    brightness: Ratio = advanced(0.4, "jitter: factor in 1 +- this")
    contrast: Ratio = advanced(0.4, "jitter: factor in 1 +- this")
    saturation: Ratio = advanced(0.2, "jitter: factor in 1 +- this")
    hue: Annotated[float, Field(ge=0, le=0.5)] = advanced(0.1, "jitter: shift, of the color circle")
    gray: Ratio = advanced(0.2, "probability of a gray crop", old_name="grey")
    global_blur: tuple[Ratio, Ratio] = advanced((1.0, 0.1), "probability of blur, each global crop's")
    local_blur: Ratio = advanced(0.5, "probability of blur of a local crop")
    blur_sigma: tuple[Deviation, Deviation] = advanced((0.1, 2.0), "deviation of the blur, pixels of the crop")
    solarize: tuple[Ratio, Ratio] = advanced(
        (0.0, 0.2), "probability of solarizing, each global crop's", old_name="solarise"
    )
    query_photometric: Literal["none", "local"] = advanced(
        "none", "none: queries are only flipped; local: altered as local crops are"
    )
    query_source: Literal["random", "local"] = advanced(
        "random",
        "local: query i is the box of local crop i, whose [CLS] must match the query's target too; "
        "queries beyond views.num_local are drawn at random",
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

    init: str | None = setting(
        None, "weights that student and teacher start from; the model is then theirs; null: random numbers"
    )
    size: Literal["tiny", "small", "base", "large"] = setting("small", "width, depth and heads of the ViT")
    patch_size: Literal[4, 8, 14, 16] = setting(16, "side of a patch, pixels")
    num_channels: Annotated[int, Field(ge=1, le=256)] = setting(
        3, "3: RGB; 1: gray; others: TIFF files of so many bands. Colors are changed in RGB only"
    )
    dim: Width | None = advanced(None, "width instead of the size's")
    depth: Annotated[int, Field(ge=1, le=1000)] | None = advanced(None, "number of blocks instead of the size's")
    num_heads: Width | None = advanced(None, "heads instead of the size's")
    num_registers: int = advanced(0, "register tokens", ge=0, le=1024)
    layer_scale: Positive | None = advanced(None, "initial LayerScale; null: none")
    class_attention: Annotated[int, Field(ge=0, le=100)] = advanced(
        0,
        "blocks after the others that alone have [CLS], which reads the patches there, as in SelfPatch, with 2; "
        "0: [CLS] is in all blocks. Not with queries or registers, which stand beside [CLS] in the other blocks",
    )
    drop_path: Annotated[float, Field(ge=0, lt=1)] = advanced(
        0.1, "drop path of the last block, linear in depth; student only"
    )
    query_keys: Literal["image", "patches", "image_and_self", "all"] = advanced(
        "image", "what a query attends to; 'all' is the bidirectional ablation"
    )
    query_read_only_blocks: Annotated[int, Field(ge=0, le=1000)] = advanced(
        0, "last blocks in which a query holds only what it has read there, and none of its own pixels"
    )
    position_resampling: Literal["antialias", "plain", "offset"] = advanced(
        "antialias", "how positions are resampled when the grid differs; offset: as DINO's own code does"
    )
    norm_eps: Annotated[float, Field(gt=0, le=0.1)] = advanced(1e-6, "epsilon of the norms")
    position_embedding: Literal["learned", "rotary"] = advanced(
        "learned", "learned: added to patches; rotary: DINOv3's, turns attention queries and keys of patches by angles"
    )
    mlp: Literal["plain", "gated"] = advanced(
        "plain", "plain: two layers with GELU; gated: SwiGLU, three layers, as in DINOv3's ViT-S+"
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
        "weight of SelfPatch's patch loss (0.1 there): a patch must predict the patches around it; "
        "needs model.class_attention; 0: none",
    )
    num_neighbors: Annotated[int, Field(ge=1, le=8)] = advanced(
        4, "of the eight patches around a patch, those most similar to it that its target is made of"
    )
    neighbor_prototypes: Annotated[int, Field(ge=2, le=2**24)] = advanced(
        4096, "K of the second head, which the patch loss has for itself"
    )
    queries_in_local_views: bool = advanced(False, "the student's local crops carry the queries too")
    read_only_copies: bool = advanced(
        False, "every query enters twice, read-only in the last model.query_read_only_blocks only the second time"
    )
    center: Literal["separate", "shared"] = advanced(
        "separate", "one running center for each kind of token, or one for all: beside queries [CLS] collapses"
    )
    center_momentum: Ratio = advanced(0.9, "momentum of the centers")
    target: Literal["center", "sinkhorn"] = advanced("center", "how the teacher's output becomes a target")
    # tau_s; the same in DINO, iBOT and DINOv2: how sharp targets are against it is set by the teacher's temperature
    student_temperature: ClassVar[float] = 0.1
    teacher_temperature: Temperature = setting(0.07, "tau_t after its warm-up")
    teacher_temperature_start: Temperature = advanced(0.04, "tau_t at the start")
    teacher_temperature_warmup_epochs: NonNegative = advanced(30, "epochs over which tau_t rises, linearly")
    query_temperature: Temperature | None = setting(
        None, "the teacher's temperature for queries; null: tau_t, as published"
    )
    query_temperature_start: Temperature | None = advanced(
        None, "the same at the start, rising as tau_t does; null: constant"
    )
    momentum: Ratio = setting(0.996, "the teacher's momentum at the start")
    momentum_end: Ratio = advanced(1.0, "the teacher's momentum at the end, by a cosine")
    head_hidden_dim: Width = advanced(2048, "width of the projection head")
    head_bottleneck_dim: Width = advanced(256, "width before the prototypes")
    num_prototypes: Annotated[int, Field(ge=2, le=2**24)] = setting(65536, "K")
    anchor_weight: NonNegative = advanced(
        0.0, "weight of the anchor: similarities between an image's patches stay those of model.init; 0: none"
    )
    train_gain: bool = advanced(True, "train the gain of the weight-normalized last layer (norm_last_layer false)")


class Optim(Section):
    """AdamW and its schedules."""

    lr: Positive = setting(5e-4, "learning rate for each 256 images of the batch")
    final_lr: NonNegative = advanced(1e-6, "learning rate at the end")
    warmup_epochs: NonNegative = setting(10, "epochs over which the learning rate rises from 0")
    weight_decay: NonNegative = setting(0.04, "weight decay at the start")
    weight_decay_end: NonNegative = advanced(0.4, "weight decay at the end, by a cosine")
    betas: tuple[Beta, Beta] = advanced((0.9, 0.999), "AdamW's")
    clip_norm: Positive | None = advanced(3.0, "largest gradient norm of each parameter tensor on its own; null: none")
    freeze_last_layer_epochs: NonNegative = advanced(1, "epochs in which the head's last layer is frozen")
    layer_decay: Share = advanced(
        1.0, "learning rate of a block of the backbone, of that of the next; 1: the same for all, as from scratch"
    )
    freeze_backbone_epochs: NonNegative | None = advanced(
        None, "epochs in which only the heads learn, where model.init is set; null: a tenth of all, at most 1"
    )


class Train(Section):
    """Length, batch size, device, checkpoints and logs."""

    epochs: Epochs = setting(100, "passes over the images")
    batch_size: Count = setting(1024, "images in one step, over all processes")
    micro_batch_size: Count | None = runtime(
        None, "images at once in one process, the rest accumulated; null: fitted to memory"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = setting(0, "everything random follows from it")
    device: Device = setting("auto", "auto: the GPU if there is one", free=["resume"])
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "auto: bfloat16 autocast on a GPU that has it, else float32"
    )
    compile: Literal["auto", "on", "off"] = runtime(
        "auto", "compile the blocks of the ViT, which takes under a minute; auto: on GPUs, but in short runs on one GPU"
    )
    cuda_graph: Literal["auto", "off"] = runtime(
        "auto", "record the step as one CUDA graph; auto: on one GPU, where a micro-batch is a step"
    )
    checkpoint_activations: bool = runtime(
        False, "keep only the inputs of blocks and run them again in backward: less memory, more time"
    )
    shard: bool = runtime(
        False, "spread weights and moments over the processes (FSDP2), for ViT-L and larger; not compiled"
    )
    reduce_precision: Literal["float32", "bfloat16"] = advanced(
        "float32", "of gradients on their way between processes"
    )
    deterministic: bool = advanced(False, "refuse operations that are not repeated to the bit on a GPU")
    # steps in a row with a loss or gradient that is not finite, after which the run ends; single ones do occur
    max_void_steps: ClassVar[int] = 50
    log_every_steps: Count = runtime(10, "steps between lines of metrics.jsonl")
    health_every_steps: Count | None = runtime(100, "steps between looks at whether it collapses; null: never")
    checkpoint_every_steps: Count | None = runtime(
        None, "steps between checkpoints; null: one an epoch, or every 500 if epochs are shorter"
    )
    checkpoint_every_minutes: Positive | None = runtime(
        15.0, "minutes after which a checkpoint is written besides; null: never for the time's sake"
    )
    keep_checkpoints: Count = runtime(2, "newest checkpoints kept")
    free_checkpoints: bool = runtime(
        True, "on a full disk, delete the oldest checkpoints for a new one; never the newest"
    )
    report: bool = runtime(True, "write report.html, with pictures of three images, while it trains")
    loggers: Several[Literal["tensorboard", "wandb", "mlflow"]] = setting(
        (), "where the curves also go", free=["resume"]
    )


class Probe(Section):
    """Scores of the teacher during training: kNN, matching of patches, in-context segmentation."""

    data: str | None = setting(
        None, "labeled folder (train/ and val/, or one that is split 80/20), for a kNN score", free=["resume"]
    )
    held_out: str | None = setting(
        None,
        "images that are not trained on: how often are they and their patches found in another view?",
        free=["resume"],
    )
    every_epochs: Count = setting(10, "epochs between probes; the start and the end always", free=["resume"])
    k: Count = runtime(20, "neighbors")
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
                example = [0.5 if name == "mean" else 0.25] * min(channels, 4)
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
        refuse_epochs(self.train.epochs, self.optim.warmup_epochs, self.frozen_epochs, self.model.init is not None)
        refuse_micro_batch(self.train.batch_size, self.train.micro_batch_size)
        return self
