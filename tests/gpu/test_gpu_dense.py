"""Dense evaluations on a GPU: as on the CPU, and they learn what they are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adclr.data.packed import pack
from adclr.data.sets import davis
from adclr.data.sets.coco import open_instances
from adclr.data.sets.pixels import open_segmented
from adclr.evals import detection, incontext, segmentation, video
from adclr.evals.incontext import PatchMemory, predict_labels
from adclr.evals.scaled_crops import crop
from dense_scenes import backbone, instances, segmented, striped
from on_gpu import CUDA
from test_scaled_crops import SIZES, plan_of
from test_video import drawn

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")


def test_crops_are_those_of_the_cpu() -> None:
    packed, plan = (
        pack([striped(*size, channels=4) for size in SIZES]),
        plan_of([(7, 19), (0, 0), (2, 1)], [False, True, False]),
    )
    for here, there in zip(crop(packed.to(CUDA), plan, 20), crop(packed, plan, 20), strict=True):
        torch.testing.assert_close(here.cpu(), there, atol=1e-5, rtol=0)


def test_the_nearest_of_a_large_memory_are_found() -> None:
    """Against float32 in one piece; where two are nearly alike, float16 may take the other."""
    torch.manual_seed(0)
    keys = torch.nn.functional.normalize(torch.randn(300_000, 64, device=CUDA), dim=1)
    labels = torch.rand(300_000, 9, device=CUDA)
    queries = torch.nn.functional.normalize(keys[::1000] + 0.3 * torch.randn(300, 64, device=CUDA), dim=1)
    actual = predict_labels(PatchMemory(keys.half(), labels.half()), queries.half(), 30, 0.02)
    similarity, nearest = (queries @ keys.T).topk(30, dim=1)
    expected = torch.einsum("nk,nkc->nc", (similarity / 0.02).softmax(dim=1), labels[nearest])
    assert (actual - expected).abs().mean() < 5e-3


def test_scores_are_those_of_the_cpu(tmp_path: Path) -> None:
    data = open_segmented(segmented(tmp_path / "pixels", 8, 6, 64))
    settings = incontext.Settings(size=64, memory_size=4000, precision="float32")
    scores = []
    for device in (CUDA, CPU):
        weights = backbone(64, 3, 4, 64)
        weights.vit.to(device)
        scores.append(incontext.score(weights, data, settings, device)["incontext_miou"])
    assert scores[0] == pytest.approx(scores[1], abs=1.0)
    weights = backbone(48, 2, 4, 96)
    weights.vit.to(CUDA)
    clips = davis.open_davis(drawn(tmp_path / "video"))
    assert video.score(weights, clips, video.Settings(size=96), CUDA)["video_j_and_f"] >= 90


@pytest.mark.parametrize(
    ("head", "rescaled", "more"),
    [("linear", False, {}), ("fpn", False, {}), ("fpn", True, {}), ("upernet", True, {"compile": True})],
)
def test_each_head_overfits_eight_scenes(tmp_path: Path, head: str, rescaled: bool, more: dict[str, Any]) -> None:
    data = open_segmented(segmented(tmp_path, 8, 8, 64, same=True))
    weights = backbone(128, 4, 8 if rescaled else 2, 64)
    weights.vit.to(CUDA)
    settings = segmentation.Settings.model_validate(
        {
            **{"head": head, "rescaled": rescaled, "size": 128 if rescaled else 64, "steps": 300, "batch_size": 8},
            **{"lr": 1e-3, "layer_decay": 1.0, "drop_path": 0.0, "frozen": False, "scales": (1.0, 1.0)},
            **{"colors": False, "inference": "whole", "width": 128},
            **more,
        }
    )
    assert segmentation.score(weights, data, settings, CUDA)["segmentation_miou"] >= 95


@pytest.mark.parametrize("window", [None, 4])
def test_mask_rcnn_overfits_sixteen_scenes(tmp_path: Path, window: int | None) -> None:
    train, val = open_instances(instances(tmp_path, 16, 16, 96, same=True), "train", "val")
    weights = backbone(128, 4, 16, 224)
    weights.vit.to(CUDA)
    settings = detection.Settings(
        steps=400,
        batch_size=8,
        lr=5e-4,
        sides=(192, 256),
        longest=256,
        layer_decay=1.0,
        drop_path=0.0,
        clip_norm=1.0,
        window=window,
    )
    actual = detection.score(weights, train, val, settings, CUDA)
    assert actual["box_ap50"] >= 95
    assert actual["mask_ap50"] >= 95
