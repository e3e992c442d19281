"""Mask R-CNN on a ViT: it overfits, sees what the json says, and does not hang on batches or processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.models.detection.roi_heads import paste_masks_in_image

from adclr.config.parsing import UserError
from adclr.data.sets.coco import fill_mask, open_instances
from adclr.evals import detection, mask_rcnn
from adclr.evals.detection import Examples, Settings
from adclr.evals.mask_rcnn import Autocast, Backbone, Detector
from dense_scenes import backbone, evaluated, instances, refused, saved
from dense_scenes import run_lengths as slow_run_lengths
from test_coco import changed

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "sides": (128, 128),
    "longest": 128,
    "drop_path": 0.0,
    "layer_decay": 1.0,
    "num_workers": 1,
    "warmup_steps": 10,
    "clip_norm": 1.0,
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Heads an eighth as wide, and one thread: tensors are small here."""
    monkeypatch.setattr(mask_rcnn, "WIDTH", 32)
    monkeypatch.setattr(mask_rcnn, "SAMPLES", 32)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def overfitted(folder: Path, count: int, patch: int, dim: int, **settings: Any) -> dict[str, Any]:
    train, val = open_instances(instances(folder / "data", count, count, same=True), "train", "val")
    weights = backbone(dim, 4, patch, 128)
    return detection.score(weights, train, val, Settings(**(SMALL | settings)), CPU, folder / "out")


def test_it_overfits_two_scenes(tmp_path: Path) -> None:
    actual = overfitted(tmp_path, 2, 16, 32, steps=45, batch_size=2, lr=2e-3)
    assert actual["box_ap50"] >= 95
    assert actual["mask_ap50"] >= 95
    assert (tmp_path / "out.png").exists()
    assert json.loads((tmp_path / "out" / "model.json").read_text())["classes"][0] == "disc"


@pytest.mark.full
@pytest.mark.parametrize("window", [None, 4])
def test_it_overfits_sixteen_scenes(tmp_path: Path, window: int | None) -> None:
    actual = overfitted(tmp_path, 16, 8, 64, steps=250, batch_size=8, lr=2e-3, window=window)
    assert actual["box_ap50"] >= 95
    assert actual["mask_ap50"] >= 95


def test_examples_are_what_the_json_says(tmp_path: Path) -> None:
    def crowd(found: dict[str, Any]) -> None:
        found["annotations"][0]["iscrowd"] = 1
        second = found["images"][1]["id"]
        found["annotations"] = [one for one in found["annotations"] if one["image_id"] != second]

    train, _ = open_instances(changed(instances(tmp_path, 6, 1), crowd), "train", "val")
    settings = Settings(sides=(96, 160), batch_size=2, num_workers=1, drop_path=0.5)
    examples = Examples(backbone(), train, settings, CPU)
    assert len(examples.indices) == 5 - (len(train.objects[0]) == 1)  # nothing is learned of an image without objects
    seen: list[tuple[int, bool]] = []
    with closing(examples.batches(0, 6)) as batches:
        for shown in batches:
            for image, target, side in zip(shown.images, shown.targets, shown.sides, strict=True):
                assert side in (96, 128, 160)
                pixels = (image * 255).round().byte().numpy()
                for index in examples.indices.tolist():
                    stored = examples.feed.image(index)
                    for flip in (False, True):
                        if np.array_equal(stored[:, :, ::-1] if flip else stored, pixels):
                            seen.append((index, flip))
                            own = [one for one in train.objects[index] if not one.crowd]
                            masks = np.stack([fill_mask(one.mask, 64, 64) for one in own])
                            masks = masks[:, :, ::-1] if flip else masks
                            assert np.array_equal(target["masks"].numpy(), masks)
                            assert target["labels"].tolist() == [one.kind + 1 for one in own]
                            for box, mask in zip(target["boxes"].tolist(), masks, strict=True):
                                rows, columns = np.nonzero(mask)
                                edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                                assert box == [float(n) for n in edges]
    assert {index for index, _ in seen} == set(examples.indices.tolist())
    assert {flip for _, flip in seen} == {False, True}
    assert len(seen) == 12


def test_an_epoch_has_every_image_and_batches_of_one_shape(tmp_path: Path) -> None:
    train, _ = open_instances(instances(tmp_path, 11, 1), "train", "val")
    train.sizes[:4] = (64, 32)  # say that these are high
    examples = Examples(backbone(), train, Settings(batch_size=3, num_workers=1), CPU)
    assert examples.steps_per_epoch == 2 + 3
    made = examples._epoch_batches(0)
    assert set(np.concatenate(made).tolist()) == set(range(11))
    for batch in made:
        assert len({int(n) < 4 for n in batch}) == 1
    again = examples._epoch_batches(0)
    assert all(np.array_equal(a, b) for a, b in zip(made, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(made, examples._epoch_batches(1), strict=True))


def test_levels_are_at_strides_4_to_64() -> None:
    weights = backbone(32, 4, 16, 64)
    for window in (None, 2):
        actual = Backbone(weights.vit, window)(torch.randn(1, 3, 128, 192))
        assert {name: tuple(x.shape[1:]) for name, x in actual.items()} == {
            "0": (32, 32, 48),
            "1": (32, 16, 24),
            "2": (32, 8, 12),
            "3": (32, 4, 6),
            "pool": (32, 2, 3),
        }


def test_boxes_stay_in_float32() -> None:
    layer = Autocast(torch.nn.Linear(4, 4), torch.bfloat16)
    assert layer(torch.randn(2, 4)).dtype == torch.float32
    both = Autocast(torch.nn.Identity(), None)
    both.register_parameter("x", torch.nn.Parameter(torch.zeros(1)))
    actual = both(([torch.zeros(1, dtype=torch.bfloat16)], {"a": torch.zeros(1, dtype=torch.float16)}))
    assert actual[0][0].dtype == actual[1]["a"].dtype == torch.float32


def test_masks_are_pasted_where_their_boxes_are() -> None:
    """Against ellipses drawn into the image, which torchvision, rounding boxes to whole pixels, meets less well."""
    boxes = torch.tensor([[4.3, 6.8, 44.6, 30.1], [20.0, 2.5, 60.4, 42.0], [-8.0, 10.9, 25.2, 50.0]])

    def ellipse(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y[:, None] ** 2 + 2 * x**2 < 0.8

    axis = (torch.arange(28) + 0.5) / 14 - 1
    blobs = ellipse(axis, axis).float().expand(3, 1, 28, 28)
    ours = mask_rcnn.paste_masks(blobs[:, 0], boxes, (48, 64))
    theirs = paste_masks_in_image(blobs, boxes, (48, 64))[:, 0] >= 0.5
    for mine, other, (left, top, right, bottom) in zip(ours, theirs, boxes.tolist(), strict=True):
        y = (torch.arange(48) + 0.5 - top) / (bottom - top) * 2 - 1
        true = ellipse(y, (torch.arange(64) + 0.5 - left) / (right - left) * 2 - 1)
        met, theirs_met = ((actual & true).sum() / (actual | true).sum() for actual in (mine, other))
        assert met > 0.95
        assert met >= theirs_met > 0.85
    full = mask_rcnn.paste_masks(torch.ones(1, 28, 28), torch.tensor([[3.0, 5.0, 11.0, 9.0]]), (20, 30))[0]
    assert full[5:9, 3:11].all()
    assert full.sum() == 4 * 8
    mask_rcnn.MASK_PIXELS, before = 48 * 64, mask_rcnn.MASK_PIXELS
    try:
        assert torch.equal(mask_rcnn.paste_masks(blobs[:, 0], boxes, (48, 64)), ours)  # one after the other
    finally:
        mask_rcnn.MASK_PIXELS = before
    everything = torch.cat([ours, torch.zeros(1, 48, 64, dtype=torch.bool), torch.ones(1, 48, 64, dtype=torch.bool)])
    expected = [slow_run_lengths(mask.numpy()) for mask in everything]
    actual = mask_rcnn.run_lengths(everything)
    assert actual == expected
    assert (actual[-2], actual[-1]) == ([48 * 64], [0, 48 * 64])
    assert mask_rcnn.run_lengths(everything[:0]) == []


def test_detections_do_not_hang_on_the_batch(tmp_path: Path) -> None:
    _, val = open_instances(instances(tmp_path, 1, 5), "train", "val")
    torch.manual_seed(0)
    model = Detector(backbone(32, 2, 8, 64), 10, 96, 160, None, None).eval()
    # a new detector is sure of nothing; this one is of what stands out to it
    torch.nn.init.normal_(model.rcnn.roi_heads.box_predictor.inner.cls_score.weight, std=0.5)
    results = []
    for size in (1, 3):
        settings = Settings(test_batch_size=size, num_workers=1)
        rows, missed = detection.detect(model, backbone(32, 2, 8, 64), val, settings, CPU, None)
        assert not missed
        results.append(sorted(rows, key=lambda row: (row["image_id"], -row["score"])))
    assert len(results[0]) == len(results[1]) > 5
    for one, other in zip(*results, strict=True):
        assert (one["image_id"], one["category_id"]) == (other["image_id"], other["category_id"])
        assert one["bbox"] == pytest.approx(other["bbox"], abs=1e-2)


def test_objects_of_unreadable_images_are_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = instances(tmp_path, 2, 4)
    (data / "images" / "val" / "3.png").write_bytes(b"broken")
    train, val = open_instances(data, "train", "val")
    measured, measure = [], detection.average_precision
    monkeypatch.setattr(detection, "average_precision", lambda *given: measured.append(given[0]) or measure(*given))
    settings = Settings(**(SMALL | {"steps": 1, "batch_size": 2, "sides": (32, 32), "longest": 32}))
    with pytest.raises(UserError, match=r"1 of 4 images of .* cannot be read"):
        detection.score(backbone(32, 2, 8, 64), train, val, settings, CPU)
    actual = detection.score(
        backbone(32, 2, 8, 64), train, val, settings.model_copy(update={"max_unreadable": 0.5}), CPU
    )
    assert (actual["num_val"], actual["num_unreadable"]) == (3, 1)
    for seen in measured:
        assert list(seen.photos.paths) == ["2.png", "4.png", "5.png"]
        assert {row["image_id"] for row in seen.dataset()["annotations"]} <= {3, 5, 6}
        assert seen.sizes.shape == (3, 2)


def test_two_processes(tmp_path: Path) -> None:
    """Test images are shared out, and found again in the scores: those of one process.

    Training draws other samples in other processes, so what it learns is made too little to be seen.
    """
    data, weights = instances(tmp_path / "data", 4, 3), saved(tmp_path / "weights")
    settings = {"steps": 1, "batch_size": 2, "sides": "[32,32]", "longest": 32, "lr": 1e-12}
    # heads of their full width in both: what this file makes smaller holds for this process alone
    mask_rcnn.WIDTH, mask_rcnn.SAMPLES = 256, 512
    one, two = (evaluated("detection", n, weights, data, tmp_path / f"{n}.json", **settings) for n in (1, 2))
    assert (two["num_val"], two["num_steps"]) == (3, 1)
    assert one["num_detections"] > 0
    for name, value in one.items():
        if not name.endswith("per_class"):
            assert two[name] == (None if value is None else pytest.approx(value, abs=0.01)), name


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, weights = instances(tmp_path / "data", 2, 1), saved(tmp_path / "weights")
    (data / "images" / "train" / "1.png").unlink()
    said = refused(capsys, "evaluate", "detection", "--weights", weights, "--data", data)
    assert "1.png, which instances_train.json names, is not in" in said
    train, val = open_instances(instances(tmp_path / "more", 2, 1), "train", "val")
    with pytest.raises(UserError, match=r"sides=\[200, 100\] and longest=1333 do not ascend"):
        detection.score(backbone(), train, val, Settings(sides=(200, 100)), CPU)
