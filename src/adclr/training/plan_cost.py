"""The cost of settings without torch: parameters, floating-point operations, memory, bytes on disk.

Parameters are exact, operations are those of all matrix products; memory on a GPU is estimated with the constants
below, which were fitted to measured runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from adclr.config.settings import Settings
from adclr.system.progress import format_duration

# Bytes stored for backward, for each unit of width, token and block, of compiled blocks under bfloat16 autocast: two
# sums (4) and their norms (4), q, k, v (6), the output of attention (2), and the input of GELU (8). ADCLR with ViT-S/16
# took 90 MB for each image more on an H200, of which 2.3 are the views.
ACTIVATION_BYTES = 24
GATED_BYTES = 24  # more, of a gated MLP that is not compiled: four numbers for each hidden one; computed, not measured
RESIDUAL_BYTES = 4  # more, of two sums in float32 instead of bfloat16
INPUT_BYTES = 4  # of these, the input tokens of a block and their norm: all that activation checkpointing stores
# Logits are computed in chunks, whatever the batch: `head_loss.CHUNK_BYTES`, and the gradient of the prototypes.
LOGIT_BYTES = 2**29
# For each unit of width and token of a class-attention block: a norm (2), keys and values (4), the same beside those of
# the token itself (4).
CLASS_ATTENTION_BYTES = 10
# The context of CUDA and its libraries, which torch's allocator does not count.
CONTEXT_BYTES = 2**30 // 2

HEADER_BYTES = 120  # of the safetensors header, for each tensor
JSON_BYTES = 2000  # state.json and manifest.json of a checkpoint, about
LONG_SECONDS = 24 * 3600.0  # of a run; beyond, the user is warned
ROW_BYTES = 440  # a line of metrics.jsonl and one of timing.jsonl


@dataclass(frozen=True)
class Cost:
    """The numbers that a plan is made of, of either kind of run."""

    parameters: Mapping[str, int]  # backbone and head; of a distillation also teacher
    work: tuple[
        tuple[float, int], ...
    ]  # operations of a step for one image, and the width of the network that does them
    again: float  # of these, computed a second time by train.checkpoint_activations
    depth: int  # blocks
    gpu_memory: tuple[float, float] | None  # estimated bytes whatever the batch, and for each image; None: no estimate
    host_bytes: float  # weights, gradients and moments on a CPU
    checkpoint_bytes: int
    backbone_bytes: int

    @property
    def flops(self) -> float:
        """Operations of a step for one image, without those computed a second time."""
        return sum(flops for flops, _ in self.work) - self.again


class Parameters(NamedTuple):
    """Number of parameters and of tensors of one branch (the teacher is a second one)."""

    backbone: int
    head: int
    trained: int  # of both
    tensors: int

    @property
    def all(self) -> int:
        """Parameters of backbone and head."""
        return self.backbone + self.head


def parameters(settings: Settings) -> Parameters:
    """Return the number of parameters that settings give."""
    model, method = settings.model, settings.method
    dim, depth, _ = model.shape
    patches, registers = _patches(settings, settings.views.global_size), model.num_registers
    block = 12 * dim * dim + 13 * dim + (2 * dim if model.layer_scale else 0)
    if model.mlp == "gated":
        block += 4 * dim * dim + 4 * dim
    class_block = 12 * dim * dim + 15 * dim
    # [CLS], registers, and the position of [CLS] if it stands beside patches alone
    prefix = registers + 1 + (0 if registers or model.class_attention else 1)
    if model.position_embedding == "rotary":
        prefix, patches = registers + 1, 0
    backbone = (
        (model.num_channels * model.patch_size**2 + 1) * dim
        + (prefix + patches + settings.masked + 2) * dim  # with the mask token and the last norm
        + depth * block
        + model.class_attention * class_block
    )
    hidden, narrow, count = method.head_hidden_dim, method.head_bottleneck_dim, method.num_prototypes
    heads = 2 if method.neighbor_weight else 1
    count += method.neighbor_prototypes * (heads - 1)
    mlp = (dim + 1) * hidden + (hidden + 1) * hidden + (hidden + 1) * narrow
    head = heads * mlp + count * narrow + count
    frozen = 0 if method.train_gain else count
    block_tensors = 12 + (2 if model.layer_scale else 0) + (2 if model.mlp == "gated" else 0)
    positions = model.position_embedding == "learned"
    tensors = 5 + positions + bool(registers) + settings.masked + depth * block_tensors + 8 * heads
    tensors += 18 * model.class_attention
    return Parameters(backbone, head, backbone + head - frozen, tensors)


class Flops(NamedTuple):
    """Floating-point operations for one image; a multiply and an add are two."""

    teacher: float  # forward
    student: float  # forward and backward
    again: float  # computed a second time by train.checkpoint_activations; 0 without it

    @property
    def step(self) -> float:
        """Operations of a step, without those computed a second time."""
        return self.teacher + self.student


def flops(settings: Settings, hidden: float | None = None) -> Flops:
    """Return the operations of all matrix products of a step; `hidden` patches of each global view are masked.

    None: as many as the settings give on average. Attention counts the pairs of query and key tokens that it needs,
    however it is computed. Backward is twice the forward, except for the pixels, which need no gradient.
    """
    views, method = settings.views, settings.method
    queries = settings.query_tokens
    local_queries = queries if method.queries_in_local_views else 0
    needs_patches = settings.model.class_attention > 0
    embed, body = view_flops(settings, views.global_size, queries, settings.masked or needs_patches)
    embed_local, body_local = 0.0, 0.0
    if views.num_local:
        embed_local, body_local = view_flops(settings, views.local_size, local_queries, needs_patches)
    masked = 0.0
    if settings.masked:
        masked = 2 * (hidden_patches(settings) if hidden is None else hidden)
    patches = 2 * _patches(settings, views.global_size) if settings.masked else 0  # the teacher's center takes all
    teacher_rows = 2 * (1 + queries)
    student_rows = teacher_rows + views.num_local * (1 + local_queries) + masked
    teacher = 2 * (embed + body) + _head(settings, teacher_rows + patches, teacher_rows + masked)
    if method.anchor_weight:  # the anchor on both global views, the student's patches, and similarities of both
        patches_each, width = _patches(settings, views.global_size), settings.model.shape[0]
        similarities = 2.0 * patches_each**2 * width
        embed_anchor, body_anchor = view_flops(settings, views.global_size, 0, True)
        teacher += 2 * (embed_anchor + body_anchor + class_attention_flops(settings, views.global_size) + similarities)
        body = view_flops(settings, views.global_size, queries, True)[1] + similarities
    blocks = 2 * body + views.num_local * body_local
    # local [CLS] tokens are compared with the targets of anchored queries too
    again = settings.num_anchored * queries // max(1, views.num_queries)
    forward = blocks + _head(settings, student_rows, student_rows + again)
    class_local = views.num_local * class_attention_flops(settings, views.local_size)
    class_global = 2 * class_attention_flops(settings, views.global_size)
    teacher, forward = teacher + class_global, forward + class_global + class_local
    if method.neighbor_weight:  # of every patch of all views, so that the teacher reads the local ones too
        rows = num_patches(settings)
        second_head = _head(settings, rows, rows, method.neighbor_prototypes)
        teacher += views.num_local * (embed_local + body_local) + class_local
        teacher += rows * _token_flops(settings) + second_head
        forward += second_head
    student = 3 * forward + 2 * (2 * embed + views.num_local * embed_local)
    return Flops(teacher, student, blocks if settings.train.checkpoint_activations else 0.0)


def image_flops(settings: Settings, side: int) -> float:
    """Return the operations of a forward pass of one square image, as evaluations take it."""
    embed, body = view_flops(settings, side, 0, True)
    return embed + body + class_attention_flops(settings, side)


def num_patches(settings: Settings) -> int:
    """Return the number of patches of all views of an image."""
    views = settings.views
    return 2 * _patches(settings, views.global_size) + views.num_local * _patches(settings, views.local_size)


def hidden_patches(settings: Settings) -> float:
    """Return the average number of masked patches in a global view."""
    views = settings.views
    return _patches(settings, views.global_size) * views.mask_probability * sum(views.mask_ratio) / 2


def view_flops(settings: Settings, side: int, queries: int, needs_patches: bool) -> tuple[float, float]:
    """Return the forward operations of one view: projection of the pixels, and all blocks.

    Where patches are not needed, the last block computes only attention for all tokens but `[CLS]` and queries.
    """
    model = settings.model
    dim, depth, _ = model.shape
    patches = _patches(settings, side)
    image = patches + (0 if model.class_attention else 1 + model.num_registers)
    num_keys = {"image": image, "patches": patches, "image_and_self": image + 1, "all": image + queries}
    pairs = image * image + queries * num_keys[model.query_keys]
    if model.query_keys == "all":
        pairs += image * queries
    embed = 2.0 * model.num_channels * model.patch_size**2 * dim * (patches + queries)
    skipped = 0 if needs_patches else image - 1
    mlp = 24.0 if model.mlp == "gated" else 16.0
    blocks = depth * ((8.0 + mlp) * dim * dim * (image + queries) + 4.0 * dim * pairs)
    return embed, blocks - (2.0 + mlp) * dim * dim * skipped


def class_attention_flops(settings: Settings, side: int) -> float:
    """Return the forward operations of class attention in one view: keys and values of its patches, and its token."""
    (dim, _, _), blocks, patches = settings.model.shape, settings.model.class_attention, _patches(settings, side)
    of_patches = blocks * (4.0 * dim * dim * patches + 4.0 * dim * (patches + 1))
    return of_patches + _token_flops(settings)


def _token_flops(settings: Settings) -> float:
    """Return the operations of one token in the class-attention blocks, whose first has the same for all sequences."""
    dim, blocks = settings.model.shape[0], settings.model.class_attention
    return (24.0 * blocks - 6.0) * dim * dim if blocks else 0.0


def _head(settings: Settings, projected: float, compared: float, prototypes: int | None = None) -> float:
    """Return the forward operations of a head: the MLP of `projected` rows, the prototypes of `compared` rows."""
    method, dim = settings.method, settings.model.shape[0]
    hidden, narrow = method.head_hidden_dim, method.head_bottleneck_dim
    return projected * 2 * (dim * hidden + hidden * hidden + hidden * narrow) + (
        compared * 2 * narrow * (prototypes or method.num_prototypes)
    )


def _patches(settings: Settings, side: int) -> int:
    return (side // settings.model.patch_size) ** 2


def allows_cuda_graph(settings: Settings) -> bool:
    """Return whether settings let one GPU that trains alone, without accumulating, record its step as a CUDA graph."""
    varying = settings.masked and settings.method.target == "sinkhorn"  # sizes, from batch to batch
    return settings.train.cuda_graph != "off" and not settings.train.shard and not varying


# Compiling takes 18 to 29 s, with a warm cache 5 to 9 s, and saves 0.6 to 1.6 ms of a recorded step, 0.7 to 5.5 % of it
# (docs/log.md): after so many steps it has paid for itself everywhere.
COMPILE_STEPS = 50_000


def compiles_blocks(settings: Settings, micro_batch: int, total_steps: int | None = None) -> bool:
    """Return whether blocks are compiled on a GPU; `auto`: in long runs, and where the step is not recorded.

    An unrecorded step waits for the CPU, which has fewer kernels of compiled blocks to launch. Without `total_steps`
    the run is taken to be long. The number is that of the whole run, so that a resumed run computes the same.
    """
    if settings.train.shard or settings.train.compile == "off":
        return False
    recorded = allows_cuda_graph(settings) and micro_batch == settings.train.batch_size  # in one process, at once
    short = total_steps is not None and total_steps < COMPILE_STEPS
    return settings.train.compile == "on" or not (recorded and short)


def gpu_memory(settings: Settings) -> tuple[float, float]:
    """Return the estimated bytes whatever the batch and for each image, of a step on a GPU under bfloat16 autocast.

    Blocks store as much uncompiled as compiled. A recorded step reads a second copy of the views; it is counted
    wherever settings allow recording, however many GPUs and micro-batches there will be.
    """
    views, method = settings.views, settings.method
    dim, _, _ = settings.model.shape
    count, local_queries = parameters(settings), settings.query_tokens if method.queries_in_local_views else 0
    # float32 weights of both branches, gradients and the two moments; bfloat16 copies of the student's weights
    anchor = 4 * count.backbone if method.anchor_weight else 0
    fixed = anchor + 8 * count.all + 12 * count.trained + 2 * count.all + CONTEXT_BYTES + LOGIT_BYTES
    prefix = 1 + settings.model.num_registers
    tokens = 2 * (_patches(settings, views.global_size) + prefix + settings.query_tokens)
    tokens += views.num_local * (_patches(settings, views.local_size) + prefix + local_queries)
    pixels = settings.model.num_channels * (2 * views.global_size**2 + views.num_local * views.local_size**2)
    stored, copies = stored_bytes(settings), 2 if allows_cuda_graph(settings) else 1
    second_head = 0
    if method.neighbor_weight:  # its inputs, both GELUs with theirs, projections and their gradients in float32
        row = 2 * dim + 8 * method.head_hidden_dim + 24 * method.head_bottleneck_dim
        second_head = num_patches(settings) * row
    return float(fixed), float(stored * dim * tokens + second_head + 4 * copies * pixels)


def stored_bytes(settings: Settings) -> int:
    """Return the bytes that the blocks of a ViT store for backward, for each unit of width and token."""
    depth = settings.model.shape[1]
    block = ACTIVATION_BYTES + (GATED_BYTES if settings.model.mlp == "gated" else 0)
    inputs, wide = INPUT_BYTES, settings.train.residual_precision == "float32"
    if wide:
        block, inputs = block + RESIDUAL_BYTES, inputs + RESIDUAL_BYTES // 2
    stored = block * depth
    if settings.train.checkpoint_activations:  # inputs of all blocks, and all of one
        stored = inputs * depth + block
    return stored + CLASS_ATTENTION_BYTES * settings.model.class_attention


def checkpoint_bytes(settings: Settings) -> int:
    """Return the bytes of a checkpoint: both branches, two moments, step counts and centers, in float32."""
    count, kinds = parameters(settings), 1 if settings.method.center == "shared" else 3
    numbers = 2 * count.all + 2 * count.trained + count.tensors + kinds * settings.method.num_prototypes
    if settings.method.neighbor_weight:
        numbers, kinds = numbers + settings.method.neighbor_prototypes, kinds + 1
    return 4 * numbers + HEADER_BYTES * (5 * count.tensors + kinds) + JSON_BYTES


def backbone_bytes(settings: Settings) -> int:
    """Return the bytes of the exported backbone."""
    count = parameters(settings)
    return 4 * count.backbone + HEADER_BYTES * count.tensors


def describe_cost(settings: Settings) -> Cost:
    """Return the cost of a pretraining."""
    count, operations, (dim, depth, _) = parameters(settings), flops(settings), settings.model.shape
    return Cost(
        parameters={"backbone": count.backbone, "head": count.head},
        work=((operations.step + operations.again, dim),),
        again=operations.again,
        depth=depth,
        gpu_memory=gpu_memory(settings),
        host_bytes=20.0 * count.all,  # with the teacher
        checkpoint_bytes=checkpoint_bytes(settings),
        backbone_bytes=backbone_bytes(settings),
    )


def log_bytes(settings: Settings, steps: int) -> int:
    """Return the bytes of metrics.jsonl and timing.jsonl."""
    return ROW_BYTES * (1 + steps // settings.train.log_every_steps)


def describe_long_run(seconds: float, on_gpu: bool, command: str = "pretrain") -> str:
    """Return a sentence on what makes a run of so many seconds shorter."""
    shorter = "fewer train.epochs, a smaller model.size, smaller views.global_size or fewer views.num_local"
    shorter += ", or more GPUs, make it shorter" if on_gpu else ", or a GPU, make it shorter"
    if not on_gpu and command == "pretrain":
        shorter += "; --recipe adclr_cpu is made for a CPU"
    return f"it takes about {format_duration(seconds)}; {shorter}"
