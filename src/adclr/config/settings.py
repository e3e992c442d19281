"""What a pretraining run can be told: every setting with its kind, its default, and what it means. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from adclr.config.sections import Count, Device, NonNegative, Positive, Ratio, Section, Several, Share

# Beyond these a number is a slip of the pen: layers wider than any GPU holds, temperatures that float32 does not.
Side = Annotated[int, Field(ge=1, le=16384)]  # pixels
Width = Annotated[int, Field(ge=1, le=65536)]
Temperature = Annotated[float, Field(ge=0.001, le=1000)]
Deviation = Annotated[float, Field(ge=0.001, le=1000)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Crops = Annotated[int, Field(ge=0, le=10_000)]
Epochs = Annotated[int, Field(ge=1, le=100_000)]

# width, depth, heads of each size of the ViT
VIT_SIZES: dict[str, tuple[int, int, int]] = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
}


class Data(Section):
    """The collection of images."""

    path: str = Field("", description="folder, .txt list, .tar shards or hf:PATH (the DATA of the command line)")
    labels: bool = Field(False, description="the first level of sub-folders names classes; only the probe uses them")
    num_workers: int | None = Field(
        None,
        ge=0,
        description="decoding threads; 0: one, and nothing ahead; null: the CPU cores, divided by the processes here",
    )
    max_pixels: Count = Field(100_000_000, description="a picture of more pixels is refused before it is decoded")
    max_value: Positive | None = Field(
        None,
        description="white in images of more than 8 bits; null: the least of 8, 10, 12, 14, 16 bits that holds each",
    )
    shrink_above: Side | None = Field(
        1024, description="a JPEG is decoded at 1/2, 1/4 or 1/8 while its shorter side stays this long; null: never"
    )
    max_side: Side | None = Field(None, description="longer side to which larger images are resized; null: none")
    cache: Literal["auto", "off", "ram", "gpu"] = Field(
        "auto", description="where images are kept once decoded; auto: on the GPU or in memory if they fit"
    )
    max_unreadable: Ratio = Field(0.1, description="share of unreadable images above which the run stops")
    mean: tuple[Ratio, ...] = Field((0.485, 0.456, 0.406), description="mean of each channel, of 1")
    std: tuple[Deviation, ...] = Field((0.229, 0.224, 0.225), description="deviation of each channel, of 1")
    allow_changed: bool = Field(False, description="resume although the collection is not what it was")
    allow_damaged_shards: bool = Field(
        False, description="train on what can be read of .tar shards that are cut off; otherwise they are refused"
    )
    check: Literal["time", "content"] = Field(
        "time",
        description="what tells on resuming that an image was replaced: its size and time of modification, or its "
        "content, for which every image is read at each start",
    )


class Views(Section):
    """Which crops are made of an image, and how they are altered."""

    global_size: Side = Field(224, description="side of the 2 global crops, pixels")
    local_size: Side = Field(96, description="side of a local crop, pixels")
    num_local: Crops = Field(10, description="local crops of each image")
    num_queries: Crops = Field(10, description="Q, query crops of each image, each one patch large; 0 is DINO")
    global_scale: tuple[Share, Share] = Field((0.4, 1.0), description="area of a global crop, of the image's")
    local_scale: tuple[Share, Share] = Field((0.05, 0.4), description="area of a local crop")
    query_scale: tuple[Share, Share] = Field((0.05, 0.15), description="area of a query crop")
    aspect_ratio: tuple[Positive, Positive] = Field((3 / 4, 4 / 3), description="width over height, log-uniform")
    flip: Ratio = Field(0.5, description="probability of a horizontal flip")
    jitter: Ratio = Field(0.8, description="probability of colour jitter")
    brightness: Ratio = Field(0.4, description="jitter: factor in 1 +- this")
    contrast: Ratio = Field(0.4, description="jitter: factor in 1 +- this")
    saturation: Ratio = Field(0.2, description="jitter: factor in 1 +- this")
    hue: Annotated[float, Field(ge=0, le=0.5)] = Field(0.1, description="jitter: shift, of the colour circle")
    grey: Ratio = Field(0.2, description="probability of a grey crop")
    global_blur: tuple[Ratio, Ratio] = Field((1.0, 0.1), description="probability of blur, each global crop's")
    local_blur: Ratio = Field(0.5, description="probability of blur of a local crop")
    blur_sigma: tuple[Deviation, Deviation] = Field((0.1, 2.0), description="deviation of the blur, pixels of the crop")
    solarise: tuple[Ratio, Ratio] = Field((0.0, 0.2), description="probability of solarising, each global crop's")
    query_photometric: Literal["none", "local"] = Field(
        "none", description="none: queries are only flipped; local: altered as local crops are"
    )
    query_source: Literal["random", "local"] = Field(
        "random",
        description="local: query i is the box of local crop i, whose [CLS] must match the query's target too; "
        "queries beyond views.num_local are drawn at random",
    )
    mask_probability: Ratio = Field(
        0.5, description="share of global crops that are masked (with method.masked_weight > 0)"
    )
    mask_ratio: tuple[Ratio, Ratio] = Field((0.1, 0.5), description="share of patches masked in such a crop")

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        for name in (
            "global_scale",
            "local_scale",
            "query_scale",
            "aspect_ratio",
            "blur_sigma",
            "mask_ratio",
        ):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"views.{name} must go from low to high, not from {low} to {high}")
        return self


class Model(Section):
    """The Vision Transformer."""

    init: str | None = Field(
        None, description="weights that student and teacher start from; the model is then theirs; null: random numbers"
    )
    size: Literal["tiny", "small", "base", "large"] = Field("small", description="width, depth and heads of the ViT")
    patch_size: Literal[4, 8, 14, 16] = Field(16, description="side of a patch, pixels")
    num_channels: Annotated[int, Field(ge=1, le=256)] = Field(
        3, description="3: RGB; 1: grey; others: TIFF files of so many bands. Colours are changed in RGB only"
    )
    dim: Width | None = Field(None, description="width instead of the size's")
    depth: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        None, description="number of blocks instead of the size's"
    )
    num_heads: Width | None = Field(None, description="heads instead of the size's")
    num_registers: int = Field(0, ge=0, le=1024, description="register tokens")
    layer_scale: Positive | None = Field(None, description="initial LayerScale; null: none")
    drop_path: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.1, description="drop path of the last block, linear in depth; student only"
    )
    query_keys: Literal["image", "patches", "image_and_self", "all"] = Field(
        "image", description="what a query attends to; 'all' is the bidirectional ablation"
    )
    query_read_only_blocks: Annotated[int, Field(ge=0, le=1000)] = Field(
        0, description="last blocks in which a query holds only what it has read there, and none of its own pixels"
    )
    position_resampling: Literal["antialias", "plain", "offset"] = Field(
        "antialias", description="how positions are resampled when the grid differs; offset: as DINO's own code does"
    )
    norm_eps: Annotated[float, Field(gt=0, le=0.1)] = Field(1e-6, description="epsilon of the norms")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(width, depth, heads)"""
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
        return self


class Method(Section):
    """The losses, the teacher and the projection head."""

    query_weight: NonNegative = Field(0.5, description="lambda, weight of the query loss")
    masked_weight: NonNegative = Field(0.0, description="mu, weight of the masked-patch loss; 0: nothing is masked")
    queries_in_local_views: bool = Field(False, description="the student's local crops carry the queries too")
    center: Literal["separate", "shared"] = Field(
        "separate",
        description="one running center for each kind of token, or one for all: beside queries [CLS] collapses",
    )
    center_momentum: Ratio = Field(0.9, description="momentum of the centers")
    target: Literal["center", "sinkhorn"] = Field("center", description="how the teacher's output becomes a target")
    student_temperature: Temperature = Field(0.1, description="tau_s")
    teacher_temperature: Temperature = Field(0.07, description="tau_t after its warm-up")
    teacher_temperature_start: Temperature = Field(0.04, description="tau_t at the start")
    teacher_temperature_warmup_epochs: NonNegative = Field(30, description="epochs over which tau_t rises, linearly")
    query_temperature: Temperature | None = Field(
        None, description="the teacher's temperature for queries; null: tau_t, as published"
    )
    query_temperature_start: Temperature | None = Field(
        None, description="the same at the start, rising as tau_t does; null: constant"
    )
    momentum: Ratio = Field(0.996, description="the teacher's momentum at the start")
    momentum_end: Ratio = Field(1.0, description="the teacher's momentum at the end, by a cosine")
    head_hidden_dim: Width = Field(2048, description="width of the projection head")
    head_bottleneck_dim: Width = Field(256, description="width before the prototypes")
    num_prototypes: Annotated[int, Field(ge=2, le=2**24)] = Field(65536, description="K")
    train_gain: bool = Field(
        True, description="train the gain of the weight-normalised last layer (norm_last_layer false)"
    )


class Optim(Section):
    """AdamW and its schedules."""

    lr: Positive = Field(5e-4, description="learning rate for each 256 images of the batch")
    final_lr: NonNegative = Field(1e-6, description="learning rate at the end")
    warmup_epochs: NonNegative = Field(10, description="epochs over which the learning rate rises from 0")
    weight_decay: NonNegative = Field(0.04, description="weight decay at the start")
    weight_decay_end: NonNegative = Field(0.4, description="weight decay at the end, by a cosine")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="AdamW's")
    clip_norm: Positive | None = Field(
        3.0, description="largest gradient norm of each parameter tensor on its own; null: none"
    )
    freeze_last_layer_epochs: NonNegative = Field(1, description="epochs in which the head's last layer stands still")
    freeze_backbone_epochs: NonNegative | None = Field(
        None,
        description="epochs in which only the heads learn, where model.init is set; null: a tenth of all, at most 1",
    )


class Train(Section):
    """How long, how large, where, and what is kept."""

    epochs: Epochs = Field(100, description="passes over the images")
    batch_size: Count = Field(1024, description="images in one step, over all processes")
    micro_batch_size: Count | None = Field(
        None, description="images at once in one process, the rest accumulated; null: fitted to memory"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="everything random follows from it")
    device: Device = Field("auto", description="auto: the GPU if there is one")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 autocast on a GPU that has it, else float32"
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="compile the blocks of the ViT, which takes under a minute; auto: on a GPU"
    )
    cuda_graph: Literal["auto", "off"] = Field(
        "auto", description="record the step as one CUDA graph; auto: on one GPU, where a micro-batch is a step"
    )
    checkpoint_activations: bool = Field(
        False, description="keep only the inputs of blocks and run them again in backward: less memory, more time"
    )
    shard: bool = Field(
        False, description="spread weights and moments over the processes (FSDP2), for ViT-L and larger; not compiled"
    )
    reduce_precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of gradients on their way between processes"
    )
    deterministic: bool = Field(False, description="refuse operations that are not repeated to the bit on a GPU")
    max_void_steps: Count = Field(
        50, description="steps in a row with a loss or gradient that is not finite, after which the run ends"
    )
    log_every_steps: Count = Field(10, description="steps between lines of metrics.jsonl")
    health_every_steps: Count | None = Field(
        100, description="steps between looks at whether it collapses; null: never"
    )
    checkpoint_every_steps: Count | None = Field(
        None, description="steps between checkpoints; null: one an epoch, or every 500 if epochs are shorter"
    )
    checkpoint_every_minutes: Positive | None = Field(
        15.0, description="minutes after which a checkpoint is written besides; null: never for the time's sake"
    )
    keep_checkpoints: Count = Field(2, description="newest checkpoints kept")
    free_checkpoints: bool = Field(
        True, description="on a full disk, delete the oldest checkpoints for a new one; never the newest"
    )
    report: bool = Field(True, description="write report.html, with pictures of three images, while it trains")
    loggers: Several[Literal["tensorboard", "wandb", "mlflow"]] = Field((), description="where the curves also go")


class Probe(Section):
    """Scores of the teacher during training: kNN, matching of patches, in-context segmentation."""

    data: str | None = Field(
        None, description="labelled folder (train/ and val/, or one that is split 80/20), for a kNN score"
    )
    held_out: str | None = Field(
        None,
        description="images that are not trained on: how often are they and their patches found in another view?",
    )
    every_epochs: Count = Field(10, description="epochs between probes; the start and the end always")
    k: Count = Field(20, description="neighbours")
    images_at_once: Count = Field(256, description="images that go through the network together")
    pixels: str | None = Field(None, description="labelled pixels (see evaluate incontext) for in-context mIoU")
    pixels_size: Side | None = Field(None, description="shorter side of those images; null: that of the global crops")
    memory_size: Count = Field(102_400, description="labelled patches that in-context segmentation remembers")


class Settings(Section):
    """Everything that says what a run is."""

    recipe: str = Field("", description="the recipe these settings started from")
    data: Data = Data()
    views: Views = Views()
    model: Model = Model()
    method: Method = Method()
    optim: Optim = Optim()
    train: Train = Train()
    probe: Probe = Probe()

    @property
    def masked(self) -> bool:
        return self.method.masked_weight > 0

    @property
    def num_anchored(self) -> int:
        """How many queries of an image are boxes of its local crops."""
        views = self.views
        return min(views.num_queries, views.num_local) if views.query_source == "local" else 0

    @property
    def frozen_epochs(self) -> float:
        """Epochs in which the backbone stands still."""
        wanted = self.optim.freeze_backbone_epochs
        if wanted is None:
            return 0.0 if self.model.init is None else min(1.0, self.train.epochs / 10)
        return wanted

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
        if views.query_source == "local" and views.num_queries and not views.num_local:
            raise ValueError(
                "views.query_source=local takes queries from local crops, and views.num_local=0; "
                "set views.num_local=6, or views.query_source=random"
            )
        if self.method.query_temperature_start is not None and self.method.query_temperature is None:
            raise ValueError(
                "method.query_temperature_start needs an end; set method.query_temperature too, or leave it out"
            )
        if self.masked and self.model.query_keys == "all" and views.num_queries:
            raise ValueError(
                "model.query_keys=all lets queries leak masked pixels; "
                "set method.masked_weight=0 or another model.query_keys"
            )
        if self.optim.warmup_epochs >= self.train.epochs:
            raise ValueError(
                f"optim.warmup_epochs={self.optim.warmup_epochs:g} leaves none of the {self.train.epochs} epochs; "
                f"set optim.warmup_epochs={self.train.epochs / 10:g} or more train.epochs"
            )
        if self.frozen_epochs and self.model.init is None:
            raise ValueError(
                "optim.freeze_backbone_epochs would freeze random numbers; set model.init too, or leave it out"
            )
        if self.frozen_epochs >= self.train.epochs:
            raise ValueError(
                f"optim.freeze_backbone_epochs={self.frozen_epochs:g} leaves none of the {self.train.epochs} epochs; "
                f"set optim.freeze_backbone_epochs={self.train.epochs / 10:g} or more train.epochs"
            )
        micro = self.train.micro_batch_size
        if micro and self.train.batch_size % micro:
            fits = max(m for m in range(1, micro + 1) if self.train.batch_size % m == 0)
            raise ValueError(
                f"train.micro_batch_size={micro} does not divide train.batch_size={self.train.batch_size}; "
                f"set train.micro_batch_size={fits}"
            )
        return self
