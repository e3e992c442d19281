"""What fine-tuning does to images and labels: each operation against timm's, or against the formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment, mixup
from torch import Tensor

from adclr.data.random_draws import Draws
from adclr.data.sets import scenes
from adclr.evals import randaugment as ra
from adclr.evals.mixing import Eraser, Mix, draw_mix, drop_path_scales, smooth_labels

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")
FILL = (0.5, 0.4, 0.3)


def keys(count: int) -> np.ndarray:
    return np.arange(count).astype(np.uint64)


def photo(index: int = 0, size: int = 64) -> tuple[Image.Image, Tensor]:
    image = scenes.scene(2, index, size).image
    return Image.fromarray(image), torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255


def difference(made: Tensor, expected: Image.Image, inside: int = 0) -> Tensor:
    """Of 255, without a border."""
    there = torch.from_numpy(np.asarray(expected).copy()).permute(2, 0, 1).float()
    apart = (made[0] * 255 - there).abs()
    return apart[:, inside : apart.shape[1] - inside, inside : apart.shape[2] - inside]


THEIRS = {
    ra.autocontrast: "AutoContrast",
    ra.equalize: "Equalize",
    ra.invert: "Invert",
    ra.posterize: "PosterizeIncreasing",
    ra.solarize: "SolarizeIncreasing",
    ra.solarize_add: "SolarizeAdd",
    ra.saturation: "ColorIncreasing",
    ra.contrast: "ContrastIncreasing",
    ra.brightness: "BrightnessIncreasing",
    ra.sharpness: "SharpnessIncreasing",
}


@pytest.mark.parametrize("change", ra.POINTWISE, ids=lambda change: change.__name__)
@pytest.mark.parametrize(("level", "sign"), [(3.0, 1.0), (9.0, -1.0), (9.9, 1.0)])
def test_operations_are_timms(change: Any, level: float, sign: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_augment.random, "random", lambda: 0.9 if sign < 0 else 0.1)  # which negates, or not
    name = THEIRS[change]
    to_arguments = auto_augment.LEVEL_TO_ARG[name]
    arguments = to_arguments(level, {}) if to_arguments else ()
    image, x = photo()
    expected = auto_augment.NAME_TO_OP[name](image, *arguments)
    told = ra.strengths(change, np.array([level]), np.array([sign]))
    made = change(x.clone(), torch.from_numpy(told.astype(np.float32)).view(-1, 1, 1, 1))
    if arguments:
        assert told[0] == pytest.approx(arguments[0])
    apart = difference(made, expected)
    assert apart.max() <= 2.5  # they work on bytes
    assert apart.mean() < 1


@pytest.mark.parametrize("number", range(5), ids=ra.GEOMETRIC)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_movements_are_timms(number: int, sign: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_augment.random, "random", lambda: 0.9 if sign < 0 else 0.1)
    name = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")[number]
    image, x = photo()
    (argument,) = auto_augment.LEVEL_TO_ARG[name](6.0, {})
    fill = tuple(round(255 * c) for c in FILL)
    expected = auto_augment.NAME_TO_OP[name](image, argument, resample=Image.Resampling.BICUBIC, fillcolor=fill)
    matrix = ra.matrices(np.array([number]), np.array([6.0]), np.array([sign])).astype(np.float32)
    made = ra.warp(x, torch.from_numpy(matrix), torch.tensor(FILL).view(3, 1, 1))
    apart = difference(made, expected)
    assert apart.mean() < 3  # kernels and borders differ a little,
    assert apart.mean() < 0.3 * difference(x, expected).mean()  # the movement does not


def test_randaugment_alters_each_image_by_its_own_key() -> None:
    x = torch.cat([photo(i, 32)[1] for i in range(40)])
    whole = ra.randaugment(x.clone(), Draws(0, 1, keys(40)), 9.0, FILL)
    for i in (0, 17, 39):
        alone = ra.randaugment(x[i : i + 1].clone(), Draws(0, 1, keys(40)[i : i + 1]), 9.0, FILL)
        torch.testing.assert_close(whole[i : i + 1], alone, rtol=0, atol=1e-5)
    untouched = (whole == x).flatten(1).all(dim=1).double().mean().item()
    assert 0.08 < untouched < 0.45  # a quarter has neither of its two operations
    other = ra.randaugment(x.clone(), Draws(0, 2, keys(40)), 9.0, FILL)
    assert not torch.equal(whole, other)
    assert whole.min() >= 0
    assert whole.max() <= 1


def test_erasing_is_a_rectangle_of_noise_for_a_quarter() -> None:
    count, size = 400, 32
    erase = Eraser(0.25, 3, size, 0, CPU)
    x = torch.full((count, 3, size, size), 9.0)  # no noise is that large
    made = erase(x.clone(), Draws(0, 0, keys(count)))
    gone = made != 9
    touched = gone.flatten(1).any(dim=1)
    assert 0.18 < touched.double().mean() < 0.32
    for mask in gone[touched]:
        assert torch.equal(mask[0], mask[1])
        rows, columns = mask[0].any(dim=1).nonzero().flatten(), mask[0].any(dim=0).nonzero().flatten()
        assert mask[0].sum() == len(rows) * len(columns) == (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
        assert 0.01 < mask[0].double().mean() < 0.38
    noise = made[gone]
    assert abs(noise.mean()) < 0.1
    assert abs(noise.std() - 1) < 0.1
    alone = erase(x[:1].clone(), Draws(0, 0, keys(count)[touched.numpy()][:1]))
    assert torch.equal(alone[0], made[touched][0])
    assert torch.equal(Eraser(0.0, 3, size, 0, CPU)(x.clone(), Draws(0, 0, keys(count))), x)


def test_mixing_by_hand() -> None:
    images, targets = torch.randn(5, 3, 8, 8), smooth_labels(torch.tensor([0, 1, 2, 0, 1]), 3, 0.1)
    other = [1, 0, 3, 2, 4]
    faint, soft = Mix(0.7, None)(images.clone(), targets)
    for i, j in enumerate(other):
        torch.testing.assert_close(faint[i], 0.7 * images[i] + 0.3 * images[j])
        torch.testing.assert_close(soft[i], 0.7 * targets[i] + 0.3 * targets[j])
    pasted, _ = Mix(0.75, (2, 4, 6, 8))(images.clone(), targets)
    for i, j in enumerate(other):
        torch.testing.assert_close(pasted[i, :, 2:6, 4:8], images[j, :, 2:6, 4:8])
        torch.testing.assert_close(pasted[i, :, :, :4], images[i, :, :, :4])
    halves = [Mix(0.7, None)(part.clone(), part_targets)[0] for part, part_targets in ((images[:2], targets[:2]),)]
    torch.testing.assert_close(halves[0], faint[:2])


def test_soft_labels_are_timms() -> None:
    labels, share = torch.tensor([2, 0]), 0.3
    expected = mixup.mixup_target(labels, 4, share, 0.1)  # which mixes with the batch turned about
    actual = Mix(share, None)(torch.zeros(2, 3, 4, 4), smooth_labels(labels, 4, 0.1))[1]
    torch.testing.assert_close(actual, expected)


def test_shares_are_drawn_as_told() -> None:
    drawn = [draw_mix(0, step, 0.8, 1.0, 32) for step in range(2000)]
    cut = [mix for mix in drawn if mix.box is not None]
    assert 0.45 < len(cut) / 2000 < 0.55
    for mix in cut:
        assert mix.box is not None
        top, left, bottom, right = mix.box
        assert mix.share == pytest.approx(1 - (bottom - top) * (right - left) / 32**2)
    faint = [mix.share for mix in drawn if mix.box is None]
    assert np.mean(faint) == pytest.approx(0.5, abs=0.03)
    assert np.var(faint) == pytest.approx(1 / (4 * (2 * 0.8 + 1)), rel=0.1)  # of Beta(0.8, 0.8)
    assert draw_mix(0, 5, 0.8, 1.0, 32) == drawn[5]
    assert all(draw_mix(0, step, 0.8, 0.0, 32).box is None for step in range(9))
    assert all(draw_mix(0, step, 0.0, 1.0, 32).box is not None for step in range(9))
    assert draw_mix(0, 0, 0.0, 0.0, 32).share == 1


def test_drop_path_is_drawn_for_each_image() -> None:
    actual = drop_path_scales(Draws(0, 0, keys(4000)), 3, 0.4, CPU)
    assert actual is not None
    assert actual.shape == (3, 2, 4000)
    assert (actual[0] == 1).all()
    for block, rate in ((1, 0.2), (2, 0.4)):
        assert actual[block].unique().tolist() == pytest.approx([0, 1 / (1 - rate)])
        assert (actual[block] == 0).double().mean().item() == pytest.approx(rate, abs=4 * math.sqrt(0.24 / 8000))
    some = drop_path_scales(Draws(0, 0, keys(4000)[100:103]), 3, 0.4, CPU)
    assert some is not None
    assert torch.equal(some, actual[:, :, 100:103])
    assert drop_path_scales(Draws(0, 0, keys(2)), 3, 0.0, CPU) is None
