"""Crops of images and labels against resizing the whole and cutting a piece out."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from adclr.data.packed import pack
from adclr.data.random_draws import Draws
from adclr.data.sets.pixels import IGNORE, open_segmented
from adclr.evals.scaled_crops import NUM_COLOR_DRAWS, TRIES, ScaledCropPlan, ScaledCrops, crop, distort_colors
from dense_scenes import backbone, segmented, striped

CPU = torch.device("cpu")
SIZES = [(20, 30), (33, 17), (24, 24)]
RESIZED = [(40, 60), (25, 13), (24, 24)]  # larger, smaller, as it is


def plan_of(corners: list[tuple[int, int]], flip: list[bool]) -> ScaledCropPlan:
    all_tries = np.repeat(np.array(corners)[:, None], TRIES, axis=1)
    draws = Draws(0, 0, np.arange(3, dtype=np.uint64))
    return ScaledCropPlan(
        np.array(RESIZED), all_tries, np.array(flip), np.zeros((3, NUM_COLOR_DRAWS), np.float32), draws
    )


def test_a_crop_is_a_piece_of_the_resized_image() -> None:
    images = [striped(*size, channels=4) for size in SIZES]
    corners, size = [(7, 19), (0, 0), (2, 1)], 20
    actual, labels, inside = crop(pack(images), plan_of(corners, [False, True, False]), size)
    for place, (image, target, (top, left)) in enumerate(zip(images, RESIZED, corners, strict=True)):
        pixels = torch.from_numpy(image).float().unsqueeze(0)
        whole = F.interpolate(pixels[:, :3], size=target, mode="bilinear")[0] / 255
        nearest = F.interpolate(pixels[:, 3:], size=target, mode="nearest-exact")[0, 0].long()
        right, bottom = left + size - target[1], top + size - target[0]
        padding = (0, max(0, right), 0, max(0, bottom))
        whole, nearest = F.pad(whole, padding), F.pad(nearest, padding, value=IGNORE)
        expected, classes = (part[..., top : top + size, left : left + size] for part in (whole, nearest))
        if place == 1:
            expected, classes = expected.flip(-1), classes.flip(-1)
            assert inside[1].sum() == 13 * 20
            assert (labels[1][~inside[1]] == IGNORE).all()
        else:
            assert inside[place].all()
        torch.testing.assert_close(actual[place] * inside[place], expected, atol=1e-5, rtol=0)
        assert torch.equal(labels[place], classes)


def test_a_crop_with_too_much_of_one_class_is_drawn_again() -> None:
    label = np.zeros((1, 64, 64), np.uint8)
    label[:, :, 40:] = 1
    image = np.concatenate([striped(64, 64), label])
    corners = np.zeros((1, TRIES, 2), np.int64)  # all class 0
    corners[0, 4:] = (0, 30)  # half of each
    plan = ScaledCropPlan(
        np.array([[64, 64]]),
        corners,
        np.array([False]),
        np.zeros((1, NUM_COLOR_DRAWS), np.float32),
        Draws(0, 0, np.zeros(1, np.uint64)),
    )
    assert crop(pack([image]), plan, 20)[1].float().mean() == 0.5
    corners[0, 4:-1], corners[0, -1] = 0, (3, 0)  # none fits: the last is taken
    actual = crop(pack([image]), plan, 20)
    torch.testing.assert_close(actual[0][0], torch.from_numpy(image[:3, 3:23, :20]).float() / 255)


def test_colors_change_by_their_numbers_alone() -> None:
    torch.manual_seed(0)
    x = torch.rand(4, 3, 5, 5)
    numbers = torch.zeros(4, NUM_COLOR_DRAWS)
    torch.testing.assert_close(distort_colors(x.clone(), numbers), x, atol=1e-6, rtol=0)
    numbers[0, 0], numbers[1, 2], numbers[2, 3], numbers[3, 4] = 1.0, -1.0, -1.0, 0.5
    actual = distort_colors(x.clone(), numbers)
    torch.testing.assert_close(actual[0], (x[0] + 32 / 255).clamp(0, 1))
    torch.testing.assert_close(actual[1], x[1] * 0.5)
    top = x[2].amax(dim=0)
    torch.testing.assert_close(actual[2], top - (top - x[2]) / 2)
    torch.testing.assert_close(actual[3].amax(dim=0), x[3].amax(dim=0))  # a turned hue is as bright
    assert not torch.allclose(actual[3], x[3], atol=0.01)
    # at most 18 of the 180 steps that OpenCV, and so mmsegmentation, divides the circle into: 36 degrees
    red, most = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1), torch.zeros(1, NUM_COLOR_DRAWS)
    most[0, 4] = 1.0
    torch.testing.assert_close(distort_colors(red, most).flatten(), torch.tensor([1.0, 0.6, 0.0]))


def shown(data: Path, batch_size: int, steps: int) -> dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    actual = open_segmented(data)
    weights = backbone()
    crops = ScaledCrops(
        weights, actual.train, actual.decoder(weights.decoder), CPU, 24, batch_size, 7, drop_path=0.5, num_workers=2
    )
    rows = {}
    with closing(crops.batches(0, steps)) as batches:
        for batch in batches:
            assert batch.path_scales is not None
            for row, position in enumerate(batch.positions.tolist()):
                rows[position] = batch.images[row], batch.labels[row], batch.path_scales[..., row]
    return rows


def test_what_a_pair_is_shown_as_does_not_hang_on_the_batch(tmp_path: Path) -> None:
    """Ten pairs, in batches that run over the end of an epoch; the whole is kept in memory or not."""
    data = segmented(tmp_path, 10, 2, 32)
    one, other = shown(data, 4, 6), shown(data, 3, 8)
    assert sorted(one) == sorted(other) == list(range(24))
    for number in one:
        for a, b in zip(one[number], other[number], strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(one[0][0], one[10][0])
    labels = {n: row[1] for n, row in one.items()}
    assert all(((label < 11) | (label == IGNORE)).all() for label in labels.values())


def test_a_set_that_does_not_fit_is_decoded_as_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = segmented(tmp_path, 6, 2, 32)
    kept = shown(data, 4, 3)
    monkeypatch.setattr("adclr.data.cache.decode_all", lambda *_: None)
    again = shown(data, 4, 3)
    assert all(torch.equal(kept[n][0], again[n][0]) for n in kept)
