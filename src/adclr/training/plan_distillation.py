"""The cost of a distillation: student, projector and the forward pass of the teacher. See `plan_cost`."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from adclr.config.distillation import DistillSettings
from adclr.config.settings import Settings
from adclr.model.distillation import Distillation
from adclr.model.feature_network import FeatureNetwork
from adclr.model.vit import VisionTransformer
from adclr.training import plan_cost
from adclr.training.plan_cost import Cost

# Bytes for each number of a teacher's token, computed and not measured: the target (2) and the projected feature (2) in
# bfloat16; in float32 what normalizing, cosine and smooth L1 store for backward (24).
TARGET_BYTES = 28
# Bytes for each unit of width and token of the teacher while it runs: sum, norm, q, k, v, hidden layer before and
# after GELU. They are free again when the student stores its own.
TEACHER_BYTES = 26


def describe_cost(settings: DistillSettings, method: Distillation) -> Cost:
    """Return the cost of a distillation; of a student that is no ViT without the estimates for a GPU."""
    student, teacher = method.student.backbone, method.teacher.backbone
    of_teacher = _settings_of(settings, teacher)
    backbone, projector = _count(student), _count(method.student.head)
    trained = backbone + projector
    tensors = len(list(method.student.parameters()))
    buffers = sum(buffer.numel() for buffer in student.buffers())
    student_flops = 3 * _projector_flops(settings, method)
    if isinstance(student, FeatureNetwork):
        student_flops += 3 * _count_operations(student, settings)
        again = 0.0
    else:
        embed, body = _forward_flops(settings)
        student_flops += 2 * embed + 3 * body
        again = body if settings.train.checkpoint_activations else 0.0
    teacher_flops = sum(_forward_flops(of_teacher))
    gpu = None
    if not isinstance(student, FeatureNetwork):
        # weights, gradients and two moments in float32, a bfloat16 copy; of the teacher weights and that copy
        fixed = 18 * trained + 6 * _count(teacher) + plan_cost.CONTEXT_BYTES
        gpu = float(fixed), _image_bytes(settings, of_teacher)
    return Cost(
        parameters={"backbone": backbone, "head": projector, "teacher": _count(teacher)},
        work=((student_flops + again, student.dim), (teacher_flops, teacher.dim)),
        again=again,
        depth=max(student.depth, teacher.depth),
        gpu_memory=gpu,
        host_bytes=16.0 * trained + 4.0 * _count(teacher),
        checkpoint_bytes=4 * (3 * trained + tensors + buffers) + 4 * plan_cost.HEADER_BYTES * tensors + 2000,
        backbone_bytes=4 * (backbone + buffers) + plan_cost.HEADER_BYTES * tensors,
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _settings_of(settings: Settings, vit: VisionTransformer) -> Settings:
    """Return the settings with the model of a ViT."""
    names = ("dim", "depth", "num_heads", "patch_size", "num_registers", "class_attention", "position_embedding", "mlp")
    return settings.model_copy(
        update={"model": settings.model.model_copy(update={name: getattr(vit, name) for name in names})}
    )


def _sides(settings: Settings) -> list[tuple[int, int]]:
    """Return (side in pixels, number of crops) of the views of an image."""
    views = settings.views
    return [(views.global_size, 2)] + ([(views.local_size, views.num_local)] if views.num_local else [])


def _forward_flops(settings: Settings) -> tuple[float, float]:
    """Return the forward operations of a ViT on all crops of an image: projection of the pixels, and blocks."""
    embed = body = 0.0
    for side, count in _sides(settings):
        of_pixels, of_blocks = plan_cost.view_flops(settings, side, 0, needs_patches=True)
        embed += count * of_pixels
        body += count * (of_blocks + plan_cost.class_attention_flops(settings, side))
    return embed, body


def _projector_flops(settings: DistillSettings, method: Distillation) -> float:
    """Return the forward operations of the projector on all crops of an image, and of resampling its features."""
    head, student, teacher = method.student.head, method.student.backbone, method.teacher.backbone

    def of_one(layers: nn.Module) -> float:
        return sum(2.0 * layer.weight.numel() for layer in layers.modules() if isinstance(layer, nn.Linear))

    flops = 0.0
    for side, count in _sides(settings):
        ours, theirs = (rows * columns for rows, columns in (net.grid_of(side, side) for net in (student, teacher)))
        flops += count * (of_one(head.cls) + ours * of_one(head.patches))
        if ours != theirs:
            # a product with a matrix: of the student's features also backward, of the teacher's once
            share = 1 / 3 if settings.distill.grid == "student" else 2 / 3
            flops += count * share * 2.0 * ours * theirs * teacher.dim
    return flops


def _count_operations(network: FeatureNetwork, settings: Settings) -> float:
    """Return the forward operations of any network on all crops of an image, as torch counts them."""
    total, training = 0.0, network.training
    network.eval()
    for side, count in _sides(settings):
        image = torch.zeros(1, settings.model.num_channels, side, side)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            network(image)
        total += count * counter.get_total_flops()
    network.train(training)
    return total


def _image_bytes(settings: Settings, of_teacher: Settings) -> float:
    """Return the estimated bytes of an image in the step of a GPU under bfloat16 autocast."""

    def tokens(one: Settings) -> int:
        prefix = 1 + one.model.num_registers
        return sum(count * ((side // one.model.patch_size) ** 2 + prefix) for side, count in _sides(one))

    views = settings.views
    pixels = settings.model.num_channels * (2 * views.global_size**2 + views.num_local * views.local_size**2)
    copies = 2 if plan_cost.allows_cuda_graph(settings) else 1
    (width, _, _), (teacher_width, _, _) = settings.model.shape, of_teacher.model.shape
    stored = plan_cost.stored_bytes(settings) * width * tokens(settings)
    targets = TARGET_BYTES * teacher_width * max(tokens(settings), tokens(of_teacher))
    running = TEACHER_BYTES * teacher_width * tokens(of_teacher)
    return float(max(stored + targets, running) + 4 * copies * pixels)
