"""Mask R-CNN of torchvision on the pyramid of a ViT, with the hyperparameters of mmdetection where the two differ."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.transform import GeneralizedRCNNTransform, resize_boxes
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from adclr.evals.pyramid import Pyramid, blocks_at
from adclr.model.vit import VisionTransformer
from adclr.weights.backbone import Weights

BLOCKS = (4, 6, 8, 12)  # of twelve
WIDTH = 256  # of the feature pyramid, and of the mask head
PROPOSALS = 1000  # after non-maximum suppression; torchvision has 2000 in training
MASK_PIXELS = 2**26  # pasted at once
SAMPLES = 512  # proposals and objects of an image that the heads are trained on


class Autocast(nn.Module):
    """Runs a module under autocast and returns float32: coordinates in bfloat16 would be off by pixels."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    @property
    def out_channels(self) -> int:
        """The width of the maps, which Mask R-CNN reads from its backbone."""
        return WIDTH

    def forward(self, *inputs: Any) -> Any:
        """Return the outputs of the module in float32."""
        device = next(self.parameters()).device.type
        with torch.autocast(device, dtype=self.dtype, enabled=self.dtype is not None):
            return _to_float32(self.inner(*inputs))


def _to_float32(outputs: Any) -> Any:
    """Convert all tensors in nested outputs."""
    if isinstance(outputs, Tensor):
        return outputs.float()
    if isinstance(outputs, dict):
        return OrderedDict((name, _to_float32(value)) for name, value in outputs.items())
    return type(outputs)(_to_float32(value) for value in outputs)


class Backbone(nn.Module):
    """Images -> five levels of width 256, at strides 4 to 64 for patches of 16 pixels."""

    def __init__(self, vit: VisionTransformer, window: int | None) -> None:
        super().__init__()
        self.pyramid = Pyramid(vit, blocks_at(vit.depth, BLOCKS), normed=False, rescaled=True, frozen=False)
        self.fpn = FeaturePyramidNetwork([vit.dim] * len(BLOCKS), WIDTH, extra_blocks=LastLevelMaxPool())
        self.window = window
        self.path_scales: Tensor | None = None  # factors of drop path in the next forward pass

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the levels by name."""
        maps = self.pyramid(images, self.path_scales, self.window)
        named = OrderedDict((str(level), x) for level, x in enumerate(maps))
        return cast("dict[str, Tensor]", self.fpn(named))


class _Resize(GeneralizedRCNNTransform):  # type: ignore[misc]  # torchvision's classes have no types
    """torchvision's transform with one difference: in training the shorter side of each image is given by `sides`."""

    def __init__(self, side: int, longest: int, weights: Weights) -> None:
        divisor = math.lcm(32, 2 * weights.vit.patch_size)
        super().__init__(side, longest, list(weights.mean), list(weights.std), divisor)
        self.sides: list[int] = []

    def torch_choice(self, k: Sequence[int]) -> int:  # noqa: ARG002
        """Return the shorter side of the next image; torchvision draws it from `k`."""
        return self.sides.pop(0)

    def postprocess(
        self, result: list[dict[str, Tensor]], image_shapes: list[Any], original_image_sizes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        """Resize boxes and masks to the size of the original image; masks become N×height×width booleans."""
        if not self.training:
            for detections, size, original in zip(result, image_shapes, original_image_sizes, strict=True):
                detections["boxes"] = resize_boxes(detections["boxes"], size, original)
                detections["masks"] = paste_masks(detections["masks"][:, 0], detections["boxes"], original)
        return result


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Convert N×M×M probabilities in boxes to N×height×width, true where they are at least a half.

    All masks of an image are sampled together at the centers of its pixels; torchvision pastes one after the other, and
    rounds boxes to whole pixels.
    """
    at_once = max(1, MASK_PIXELS // (size[0] * size[1]))
    parts = [torch.zeros(0, *size, dtype=torch.bool, device=masks.device)]
    for mask, box in zip(torch.split(masks, at_once), torch.split(boxes, at_once), strict=True):
        left, top, right, bottom = box.unsqueeze(-1).unbind(1)  # each n×1
        y = (torch.arange(size[0], device=box.device) + 0.5 - top) / (bottom - top).clamp(min=1e-6) * 2 - 1
        x = (torch.arange(size[1], device=box.device) + 0.5 - left) / (right - left).clamp(min=1e-6) * 2 - 1
        grid = torch.stack([x[:, None].expand(-1, size[0], -1), y[:, :, None].expand(-1, -1, size[1])], dim=-1)
        parts.append(F.grid_sample(mask[:, None].float(), grid, align_corners=False)[:, 0] >= 0.5)
    return torch.cat(parts)


def run_lengths(masks: Tensor) -> list[list[int]]:
    """Return COCO's run lengths of N×height×width masks: down the columns, background first.

    Only the positions at which the value changes are copied from the device.
    """
    flat = masks.transpose(1, 2).flatten(1)
    changed = (flat != F.pad(flat, (1, 0))[:, :-1]).nonzero().cpu().numpy()
    ends = np.searchsorted(changed[:, 0], np.arange(len(flat) + 1))
    starts = (changed[first:last, 1] for first, last in itertools.pairwise(ends))
    return [np.diff(mask_starts, prepend=0, append=flat.shape[1]).tolist() for mask_starts in starts]


class Detector(nn.Module):
    """(images in [0, 1], targets, sides) -> losses in training; images -> detections in test."""

    def __init__(
        self, weights: Weights, num_classes: int, side: int, longest: int, window: int | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        rcnn = MaskRCNN(
            Autocast(Backbone(weights.vit, window), dtype),
            num_classes + 1,
            rpn_post_nms_top_n_train=PROPOSALS,
            rpn_post_nms_top_n_test=PROPOSALS,
            box_batch_size_per_image=SAMPLES,
            mask_head=MaskRCNNHeads(WIDTH, (WIDTH,) * 4, 1),
        )
        rcnn.roi_heads.mask_predictor = MaskRCNNPredictor(WIDTH, WIDTH, num_classes + 1)
        rcnn.transform = _Resize(side, longest, weights)
        rcnn.rpn.head = Autocast(rcnn.rpn.head, dtype)
        heads = rcnn.roi_heads
        for name in ("box_head", "box_predictor", "mask_head", "mask_predictor"):
            setattr(heads, name, Autocast(getattr(heads, name), dtype))
        self.rcnn = rcnn

    @property
    def backbone(self) -> Backbone:
        """The ViT with its pyramid."""
        return cast(Backbone, self.rcnn.backbone.inner)

    def forward(
        self,
        images: list[Tensor],
        targets: list[dict[str, Tensor]] | None = None,
        sides: list[int] | None = None,
        path_scales: Tensor | None = None,
    ) -> Any:
        """Return the losses in training, else the detections of each image."""
        self.backbone.path_scales = path_scales
        self.rcnn.transform.sides = list(sides or ())
        return self.rcnn(images, targets)

    def timm_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters by name, those of the ViT by their names in timm."""
        vit_prefix = "rcnn.backbone.inner.pyramid.vit."
        return [(name.removeprefix(vit_prefix), p) for name, p in self.named_parameters()]
