"""The linear probe: a grid is what each learning rate would be alone, features are DINO's, and nothing else counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from adclr.config.parsing import UserError
from adclr.data.augment import crop
from adclr.data.random_draws import Draws, crop_boxes
from adclr.data.sets.classes import open_labeled
from adclr.evals import linear
from adclr.evals.crops import ASPECT, TrainingCrops, fit_batch_size
from adclr.evals.task import crop_size
from adclr.model.vit import VisionTransformer
from plain_images import colored, weights

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def score(data: Path, **changes: Any) -> dict[str, Any]:
    settings = linear.Settings(**({"epochs": 12, "batch_size": 16} | changes))
    return linear.score(weights(), open_labeled(data), settings, CPU)


def test_a_grid_is_torchs_sgd_of_each_rate() -> None:
    torch.manual_seed(0)
    features, labels, lrs = torch.randn(60, 8), torch.randint(0, 4, (60,)), (0.01, 0.1, 3.0)
    grid = linear.Grid(8, 4, lrs, 0, CPU)
    alone = []
    for _ in lrs:
        layer = torch.nn.Linear(8, 4)
        layer.weight.data, layer.bias.data = grid.weight[:4].clone(), torch.zeros(4)
        alone.append(layer)
    optimizers = [torch.optim.SGD(layer.parameters(), lr, momentum=0.9) for layer, lr in zip(alone, lrs, strict=True)]
    for step in range(20):
        rows = slice(step % 3 * 20, step % 3 * 20 + 20)
        factor = 1 - step / 20
        grid.step(features[rows], labels[rows], factor, shared=False)
        for layer, optimizer, lr in zip(alone, optimizers, lrs, strict=True):
            optimizer.param_groups[0]["lr"] = lr * factor
            optimizer.zero_grad()
            F.cross_entropy(layer(features[rows]), labels[rows]).backward()
            optimizer.step()
    actual = grid(features)
    for number, layer in enumerate(alone):
        torch.testing.assert_close(actual[:, number], layer(features), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quick", [True, False])
def test_rates_together_score_what_they_score_alone(tmp_path: Path, quick: bool) -> None:
    data, lrs = colored(tmp_path, 40, 40, shuffled=True), (0.001, 0.1, 1.0)
    together = score(data, lrs=lrs, quick=quick, epochs=4)
    for lr in lrs:
        alone = score(data, lrs=lr, quick=quick, epochs=4)
        assert alone[f"linear_top1_lr{lr:g}"] == pytest.approx(together[f"linear_top1_lr{lr:g}"], abs=0.1)
        assert alone["linear_top1"] == alone[f"linear_top1_lr{lr:g}"]
    best = max(lrs, key=lambda lr: together[f"linear_top1_lr{lr:g}"])
    assert (together["best_lr"], together["best_lr_chosen_on"]) == (best, "val")
    assert together["linear_top1"] == together[f"linear_top1_lr{best:g}"]


@pytest.mark.parametrize("quick", [True, False])
def test_separable_classes_score_100_and_meaningless_ones_by_chance(tmp_path: Path, quick: bool) -> None:
    actual = score(colored(tmp_path / "a"), quick=quick)
    assert actual["linear_top1"] == actual["linear_mean_class"] == 100
    assert actual["per_class"] == {"c0": 100, "c1": 100, "c2": 100}
    assert actual["confusion"] == [[8, 0, 0], [0, 8, 0], [0, 0, 8]]
    chance = score(colored(tmp_path / "b", 60, 60, shuffled=True), quick=quick, lrs=0.1)
    assert 15 < chance["linear_top1"] < 55  # of three classes, 60 images: 33 ± 6


def test_scores_do_not_hang_on_threads_or_on_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = colored(tmp_path, 40, 40, shuffled=True)
    (data / "train" / "c0" / "broken.png").write_bytes(b"no image")
    plain = score(data, epochs=3)
    assert plain["num_unreadable"] == 1
    assert plain["num_train"] == 40
    assert score(data, epochs=3, num_workers=7) == plain
    monkeypatch.setattr(linear, "TEST_BATCH_SIZE", 7)
    assert score(data, epochs=3) == plain
    monkeypatch.setattr("adclr.data.cache.decode_all", lambda *_, **__: None)  # decoded anew in every epoch
    assert score(data, epochs=3, num_workers=3) == plain


def test_features_are_dinos() -> None:
    images = torch.randn(2, 3, 32, 32)
    for vit in (VisionTransformer(384, 6, 6, 16, 32).eval(), VisionTransformer(768, 2, 12, 16, 32).eval()):
        actual = linear.pool(vit, linear.LinearSettings(), None)(images)
        assert actual.shape == (2, 1536)
        if vit.dim == 384:
            torch.testing.assert_close(actual[:, -384:], vit(images).cls)
            torch.testing.assert_close(actual[:, :384], vit.intermediate(images, [2])[0].cls)
        else:
            torch.testing.assert_close(actual, torch.cat([vit(images).cls, vit(images).patches.mean(1)], dim=1))
    small = VisionTransformer(16, 2, 2, 8, 16).eval()
    assert linear.pool(small, linear.LinearSettings(), None)(torch.randn(1, 3, 16, 16)).shape == (1, 32)  # no 4 blocks
    both = linear.pool(small, linear.LinearSettings(num_blocks=1, mean_patch=True), None)
    assert both(torch.randn(1, 3, 16, 16)).shape == (1, 32)


def test_crops_are_torchvisions_of_the_same_boxes() -> None:
    from torchvision.transforms.v2 import functional

    from adclr.data.packed import pack

    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (3, h, w), np.uint8) for h, w in ((50, 70), (33, 40), (90, 20))]
    packed = pack(images)
    draws = Draws(0, 0, np.arange(3).astype(np.uint64))
    boxes = crop_boxes(draws, "train", 1, packed.sizes, (0.08, 1.0), ASPECT)[:, 0]
    flip = np.array([True, False, True])
    for made, image, (top, left, height, width), turned in zip(
        crop(packed, boxes, flip, 16), images, boxes.tolist(), flip, strict=True
    ):
        part = torch.from_numpy(image).float()
        there = functional.resized_crop(part, top, left, height, width, [16, 16], 3, antialias=True).clamp(0, 255)
        torch.testing.assert_close(made, (there.flip(-1) if turned else there) / 255, rtol=0, atol=1e-4)


def test_the_place_of_an_unreadable_image_has_the_next_ones_label(tmp_path: Path) -> None:
    data = colored(tmp_path, 12, 6, num_classes=2)
    labeled = open_labeled(data)
    last = [index for index, label in enumerate(labeled.train.labels) if label == 0][-1]  # the next is of class 1
    (data / "train" / labeled.train.source.paths[last]).write_bytes(b"no image")
    crops = TrainingCrops(weights(), labeled, linear.Settings(), CPU, 24, 12, 0.08)
    shown = crops.batches(0, 1, 12, lambda images, _: (images, None))
    (batch,) = list(shown)
    shown.close()
    red = batch.images[:, 0].mean(dim=(1, 2)) > batch.images[:, 1].mean(dim=(1, 2))
    assert batch.labels.tolist() == [0 if is_red else 1 for is_red in red]
    assert batch.labels.sum() == 7
    assert crops.num_readable() == 11


def test_batches_and_sizes_that_cannot_be_are_refused() -> None:
    assert fit_batch_size(256, 1000, 2) == 256
    assert fit_batch_size(256, 99, 4) == 96
    with pytest.raises(UserError, match="batch_size=7 does not divide by 2"):
        fit_batch_size(7, 100, 2)
    with pytest.raises(UserError, match="too few"):
        fit_batch_size(8, 1, 2)
    with pytest.raises(UserError, match="size=20 is not divisible by patches of 8"):
        crop_size(weights().vit, 20)
    assert crop_size(weights().vit, None) == 24
    with pytest.raises(UserError, match="set size"):
        crop_size(VisionTransformer(16, 1, 2, 8, (16, 24)), None)


def unreadable(data: Path, split: str, name: str) -> None:
    for path in (data / split / name).iterdir():
        path.write_bytes(b"no image")


def test_too_many_unreadable_images_are_refused(tmp_path: Path) -> None:
    data = colored(tmp_path, 30, 30)
    unreadable(data, "val", "c1")
    with pytest.raises(UserError, match=r"10 of 30 images of .*val cannot be read; fix them or raise max_unreadable"):
        score(data)
    with pytest.raises(UserError, match="no image of class c1"):
        score(data, max_unreadable=0.5)
    mended = colored(tmp_path, 30, 30)
    unreadable(mended, "train", "c2")
    for quick in (True, False):
        with pytest.raises(UserError, match="fix them or raise max_unreadable"):
            score(mended, quick=quick)
        with pytest.raises(UserError, match="no image of class c2"):
            score(mended, quick=quick, max_unreadable=0.5)


def test_another_size_and_a_new_backbone(tmp_path: Path) -> None:
    data = colored(tmp_path)
    assert score(data, size=32, quick=True)["linear_top1"] == 100
    Image.new("RGB", (9, 2000)).save(data / "val" / "c0" / "long.png")
    assert score(data, epochs=1, quick=True)["num_val"] == 25
