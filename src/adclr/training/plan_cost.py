"""What settings cost, by counting: parameters, arithmetic, memory, bytes on disk. Knows nothing of torch.

Arithmetic and parameters are exact up to what is not a matrix product; memory on a GPU is a model, whose constants are
named here and were fitted to measured runs.
"""

from __future__ import annotations

from typing import NamedTuple

from adclr.config.settings import Settings

# Bytes kept for backward, for each unit of width, token and block, of compiled blocks under bfloat16 autocast: two sums
# (4) and their norms (4), q, k, v (6), what attention gave (2), and the input of GELU (8). ADCLR with ViT-S/16 took
# 90 MB for each image more on an H200, of which 2.3 are the views.
ACTIVATION_BYTES = 24
INPUT_BYTES = 4  # of these, the tokens that a block takes, and their norm: all that is kept where it is computed again
# Logits are made in chunks, whatever the batch: `fused.CHUNK_BYTES`, and the gradient of the prototypes beside them.
LOGIT_BYTES = 2**29
# The context of CUDA and its libraries, which no allocator of torch's sees.
CONTEXT_BYTES = 2**30 // 2

HEADER_BYTES = 120  # of the safetensors header, for each tensor
JSON_BYTES = 2000  # state.json and manifest.json of a checkpoint, about
ROW_BYTES = 440  # a line of metrics.jsonl and one of timing.jsonl


class Parameters(NamedTuple):
    """How many numbers, and in how many tensors; of one branch (the teacher is a second one)."""

    backbone: int
    head: int
    trained: int  # of both
    tensors: int

    @property
    def all(self) -> int:
        return self.backbone + self.head


def parameters(settings: Settings) -> Parameters:
    model, method = settings.model, settings.method
    dim, depth, _ = model.shape
    patches, registers = _patches(settings, settings.views.global_size), model.num_registers
    block = 12 * dim * dim + 13 * dim + (2 * dim if model.layer_scale else 0)
    prefix = registers + 1 + (0 if registers else 1)  # [CLS], registers, and the position of [CLS] if there are none
    backbone = (
        (model.num_channels * model.patch_size**2 + 1) * dim
        + (prefix + patches + settings.masked + 2) * dim  # with the mask token and the last norm
        + depth * block
    )
    hidden, narrow, count = method.head_hidden_dim, method.head_bottleneck_dim, method.num_prototypes
    head = (dim + 1) * hidden + (hidden + 1) * hidden + (hidden + 1) * narrow + count * narrow + count
    frozen = 0 if method.train_gain else count
    tensors = 6 + bool(registers) + settings.masked + depth * (14 if model.layer_scale else 12) + 8
    return Parameters(backbone, head, backbone + head - frozen, tensors)


class Flops(NamedTuple):
    """Floating-point operations for one image; a multiply and an add are two."""

    teacher: float  # forward
    student: float  # forward and backward
    again: float  # what train.checkpoint_activations computes a second time, which is no progress; 0 without it

    @property
    def step(self) -> float:
        return self.teacher + self.student


def flops(settings: Settings, hidden: float | None = None) -> Flops:
    """Of the matrix products of a step; `hidden` patches of each global view, on average as many as the settings say.

    Attention is counted for the pairs of tokens that it needs, asking × answering, however it is computed. Backward
    is twice the forward, but for the patches' pixels, which need no gradient.
    """
    views, method = settings.views, settings.method
    queries = views.num_queries
    local_queries = queries if method.queries_in_local_views else 0
    embed, body = _view(settings, views.global_size, queries, settings.masked)
    embed_local, body_local = 0.0, 0.0
    if views.num_local:
        embed_local, body_local = _view(settings, views.local_size, local_queries, False)
    masked = 0.0
    if settings.masked:
        masked = 2 * (hidden_patches(settings) if hidden is None else hidden)
    patches = 2 * _patches(settings, views.global_size) if settings.masked else 0  # the teacher's center sees them all
    asked = 2 * (1 + queries)
    said = asked + views.num_local * (1 + local_queries) + masked
    teacher = 2 * (embed + body) + _head(settings, asked + patches, asked + masked)
    blocks = 2 * body + views.num_local * body_local
    learned = blocks + _head(settings, said, said + settings.num_anchored)  # local [CLS] that answer queries too
    student = 3 * learned + 2 * (2 * embed + views.num_local * embed_local)
    return Flops(teacher, student, blocks if settings.train.checkpoint_activations else 0.0)


def hidden_patches(settings: Settings) -> float:
    """Patches hidden in a global view, on average."""
    views = settings.views
    return _patches(settings, views.global_size) * views.mask_probability * sum(views.mask_ratio) / 2


def _view(settings: Settings, side: int, queries: int, patches_wanted: bool) -> tuple[float, float]:
    """(projection of the pixels, all blocks) of one view, forward; where patches are not wanted the last block ends
    with attention for all tokens but `[CLS]` and queries."""
    model = settings.model
    dim, depth, _ = model.shape
    patches = _patches(settings, side)
    prefix = 1 + model.num_registers
    image = prefix + patches
    answering = {"image": image, "patches": patches, "image_and_self": image + 1, "all": image + queries}
    pairs = image * image + queries * answering[model.query_keys]
    if model.query_keys == "all":
        pairs += image * queries
    embed = 2.0 * model.num_channels * model.patch_size**2 * dim * (patches + queries)
    left_out = 0 if patches_wanted else image - 1
    blocks = depth * (24.0 * dim * dim * (image + queries) + 4.0 * dim * pairs)
    return embed, blocks - 18.0 * dim * dim * left_out


def _head(settings: Settings, projected: float, compared: float) -> float:
    """So many rows through the MLP, so many of them to the prototypes, forward."""
    method, dim = settings.method, settings.model.shape[0]
    hidden, narrow = method.head_hidden_dim, method.head_bottleneck_dim
    return projected * 2 * (dim * hidden + hidden * hidden + hidden * narrow) + (
        compared * 2 * narrow * method.num_prototypes
    )


def _patches(settings: Settings, side: int) -> int:
    return (side // settings.model.patch_size) ** 2


def allows_cuda_graph(settings: Settings) -> bool:
    """Return whether settings let one GPU that trains alone, without accumulating, record its step as a CUDA graph."""
    varying = settings.masked and settings.method.target == "sinkhorn"  # sizes, from batch to batch
    return settings.train.cuda_graph != "off" and not settings.train.shard and not varying


def gpu_memory(settings: Settings) -> tuple[float, float]:
    """(bytes whatever the batch, bytes for each image) of a step on a GPU under bfloat16 autocast: a model.

    Blocks keep as much uncompiled as compiled. What is recorded reads a second copy of the views; it is counted
    wherever settings allow a recording, however many GPUs and micro-batches there will be.
    """
    views, method = settings.views, settings.method
    dim, depth, _ = settings.model.shape
    count, local_queries = parameters(settings), views.num_queries if method.queries_in_local_views else 0
    # float32 weights of both branches, gradients and the two moments; bfloat16 copies of the student's weights
    fixed = 8 * count.all + 12 * count.trained + 2 * count.all + CONTEXT_BYTES + LOGIT_BYTES
    prefix = 1 + settings.model.num_registers
    tokens = 2 * (_patches(settings, views.global_size) + prefix + views.num_queries)
    tokens += views.num_local * (_patches(settings, views.local_size) + prefix + local_queries)
    pixels = settings.model.num_channels * (2 * views.global_size**2 + views.num_local * views.local_size**2)
    kept = ACTIVATION_BYTES * depth
    if settings.train.checkpoint_activations:  # inputs of all blocks, and all of one
        kept = INPUT_BYTES * depth + ACTIVATION_BYTES
    copies = 2 if allows_cuda_graph(settings) else 1
    return float(fixed), float(kept * dim * tokens + 4 * copies * pixels)


def checkpoint_bytes(settings: Settings) -> int:
    """One checkpoint: both branches, the optimizer's two moments and step counts, and the centers, in float32."""
    count, kinds = parameters(settings), 1 if settings.method.center == "shared" else 3
    numbers = 2 * count.all + 2 * count.trained + count.tensors + kinds * settings.method.num_prototypes
    return 4 * numbers + HEADER_BYTES * (5 * count.tensors + kinds) + JSON_BYTES


def backbone_bytes(settings: Settings) -> int:
    count = parameters(settings)
    return 4 * count.backbone + HEADER_BYTES * count.tensors


def log_bytes(settings: Settings, steps: int) -> int:
    return ROW_BYTES * (1 + steps // settings.train.log_every_steps)
