"""Mask R-CNN of torchvision on the pyramid of a ViT, with the numbers of mmdetection where the two differ."""

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
PROPOSALS = 1000  # that are left after suppression; torchvision keeps 2000 in training
PASTED = 2**26  # pixels of masks at once
SAMPLED = 512  # of them, with their objects, that the heads of an image learn from


class Cast(nn.Module):
    """Runs a module under autocast and gives float32: coordinates in bfloat16 would be off by pixels."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    @property
    def out_channels(self) -> int:
        """Which Mask R-CNN asks its backbone."""
        return WIDTH

    def forward(self, *given: Any) -> Any:
        device = next(self.parameters()).device.type
        with torch.autocast(device, dtype=self.dtype, enabled=self.dtype is not None):
            return _wide(self.inner(*given))


def _wide(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.float()
    if isinstance(found, dict):
        return OrderedDict((name, _wide(value)) for name, value in found.items())
    return type(found)(_wide(value) for value in found)


class Backbone(nn.Module):
    """Images -> five levels of width 256, at strides 4 to 64 for patches of 16 pixels."""

    def __init__(self, vit: VisionTransformer, window: int | None) -> None:
        super().__init__()
        self.pyramid = Pyramid(vit, blocks_at(vit.depth, BLOCKS), normed=False, rescaled=True, frozen=False)
        self.fpn = FeaturePyramidNetwork([vit.dim] * len(BLOCKS), WIDTH, extra_blocks=LastLevelMaxPool())
        self.window = window
        self.kept: Tensor | None = None  # what drop path multiplies with in the next pass

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = self.pyramid(images, self.kept, self.window)
        named = OrderedDict((str(level), x) for level, x in enumerate(maps))
        return cast("dict[str, Tensor]", self.fpn(named))


class Resize(GeneralizedRCNNTransform):  # type: ignore[misc]  # torchvision's classes have no types
    """torchvision's, but in training each image's shorter side is what was drawn for it."""

    def __init__(self, side: int, longest: int, weights: Weights) -> None:
        divisor = math.lcm(32, 2 * weights.vit.patch_size)
        super().__init__(side, longest, list(weights.mean), list(weights.std), divisor)
        self.sides: list[int] = []

    def torch_choice(self, k: Sequence[int]) -> int:  # noqa: ARG002
        return self.sides.pop(0)

    def postprocess(
        self, result: list[dict[str, Tensor]], image_shapes: list[Any], original_image_sizes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        """Boxes and masks at the size of the image as it was; masks are N×height×width, true where the object is."""
        if not self.training:
            for found, size, original in zip(result, image_shapes, original_image_sizes, strict=True):
                found["boxes"] = resize_boxes(found["boxes"], size, original)
                found["masks"] = pasted(found["masks"][:, 0], found["boxes"], original)
        return result


def pasted(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """N×M×M probabilities in boxes -> N×height×width, true where they are at least a half.

    All masks of an image at once, sampled at the centers of its pixels; torchvision pastes one after the other, and
    rounds boxes to whole pixels.
    """
    at_once = max(1, PASTED // (size[0] * size[1]))
    made = [torch.zeros(0, *size, dtype=torch.bool, device=masks.device)]
    for mask, box in zip(torch.split(masks, at_once), torch.split(boxes, at_once), strict=True):
        left, top, right, bottom = box.unsqueeze(-1).unbind(1)  # each n×1
        y = (torch.arange(size[0], device=box.device) + 0.5 - top) / (bottom - top).clamp(min=1e-6) * 2 - 1
        x = (torch.arange(size[1], device=box.device) + 0.5 - left) / (right - left).clamp(min=1e-6) * 2 - 1
        grid = torch.stack([x[:, None].expand(-1, size[0], -1), y[:, :, None].expand(-1, -1, size[1])], dim=-1)
        made.append(F.grid_sample(mask[:, None].float(), grid, align_corners=False)[:, 0] >= 0.5)
    return torch.cat(made)


def run_lengths(masks: Tensor) -> list[list[int]]:
    """Of N×height×width masks those of COCO: down the columns, background first. Only changes leave the device."""
    flat = masks.transpose(1, 2).flatten(1)
    changed = (flat != F.pad(flat, (1, 0))[:, :-1]).nonzero().cpu().numpy()
    ends = np.searchsorted(changed[:, 0], np.arange(len(flat) + 1))
    places = (changed[first:last, 1] for first, last in itertools.pairwise(ends))
    return [np.diff(own, prepend=0, append=flat.shape[1]).tolist() for own in places]


class Detector(nn.Module):
    """(images in [0, 1], targets, sides) -> losses in training; images -> detections in test."""

    def __init__(
        self, weights: Weights, num_classes: int, side: int, longest: int, window: int | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        rcnn = MaskRCNN(
            Cast(Backbone(weights.vit, window), dtype),
            num_classes + 1,
            rpn_post_nms_top_n_train=PROPOSALS,
            rpn_post_nms_top_n_test=PROPOSALS,
            box_batch_size_per_image=SAMPLED,
            mask_head=MaskRCNNHeads(WIDTH, (WIDTH,) * 4, 1),
        )
        rcnn.roi_heads.mask_predictor = MaskRCNNPredictor(WIDTH, WIDTH, num_classes + 1)
        rcnn.transform = Resize(side, longest, weights)
        rcnn.rpn.head = Cast(rcnn.rpn.head, dtype)
        heads = rcnn.roi_heads
        for name in ("box_head", "box_predictor", "mask_head", "mask_predictor"):
            setattr(heads, name, Cast(getattr(heads, name), dtype))
        self.rcnn = rcnn

    @property
    def backbone(self) -> Backbone:
        return cast(Backbone, self.rcnn.backbone.inner)

    def forward(
        self,
        images: list[Tensor],
        targets: list[dict[str, Tensor]] | None = None,
        sides: list[int] | None = None,
        kept: Tensor | None = None,
    ) -> Any:
        self.backbone.kept = kept
        self.rcnn.transform.sides = list(sides or ())
        return self.rcnn(images, targets)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Its parameters, those of the ViT by their own names."""
        before = "rcnn.backbone.inner.pyramid.vit."
        return [(name.removeprefix(before), p) for name, p in self.named_parameters()]
