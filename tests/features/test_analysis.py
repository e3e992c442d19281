"""What is looked at, as numbers: against slow references, and where the answer is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adclr.features import analysis
from adclr.features.analysis import InputImage, Matches
from adclr.model.vit import VisionTransformer
from adclr.weights.backbone import Weights

RNG = np.random.default_rng(0)
MEAN = STD = (0.5, 0.5, 0.5)


def weights(positions: bool = True) -> Weights:
    torch.manual_seed(0)
    vit = VisionTransformer(24, 2, 2, 4, 32).eval()
    for parameter in vit.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    if not positions:
        vit.pos_embed.data.zero_()
    return Weights(vit, MEAN, STD)


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return RNG.integers(0, 256, (channels, height, width), np.uint8)


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ((100, 100), 32, (32, 32)),
        ((480, 640), 448, (448, 592)),
        ((640, 480), 224, (304, 224)),
        ((1, 1), 32, (32, 32)),
        ((10, 5000), 32, (16, 128)),  # longer than four times its height: shrunk until it is not
        ((33, 35), 33, (32, 32)),
    ],
)
def test_images_of_any_shape_are_filled_by_patches(
    shape: tuple[int, int], size: int, expected: tuple[int, int]
) -> None:
    seen = analysis.prepare_image("a", noise(*shape), size, 16)
    assert seen.pixels.shape == (3, *expected)
    assert seen.pixels.dtype == np.uint8


def test_an_image_that_fits_is_not_touched_and_a_crop_of_a_patch_is_the_patch() -> None:
    pixels = noise(32, 64)
    seen = analysis.prepare_image("a", pixels, 32, 4)
    assert seen.pixels is pixels
    crop = seen.crop((8 / 64, 4 / 32, 12 / 64, 8 / 32), 4)
    assert np.array_equal(crop, pixels[:, 4:8, 8:12])
    assert seen.crop((0, 0, 1, 1), 4).shape == (3, 4, 4)


def test_attention_over_patches_has_the_mean_one_and_the_mean_of_heads_comes_first() -> None:
    held, seen = weights(), InputImage("a", noise(16, 24))
    maps, answers = analysis.attend(held, seen, analysis.read_memory(held, seen))
    assert maps.shape == (1 + 2, 1, 4, 6)
    np.testing.assert_allclose(maps.mean(axis=(2, 3)), 1, rtol=1e-5)
    whole = held.vit.attention(analysis.network_input(held, seen.pixels[None]))[0, :, 0, 1:].detach()
    expected = whole.mean(0) / whole.mean()
    np.testing.assert_allclose(maps[0, 0].ravel(), expected, rtol=1e-4)
    np.testing.assert_allclose(maps[2, 0].ravel(), whole[1] / whole[1].mean(), rtol=1e-4)
    assert answers.shape == (1, 24)


def test_the_heaviest_patches_are_the_fewest_that_hold_the_share() -> None:
    for share in (0.1, 0.6, 0.95):
        values = RNG.random((5, 7)).astype(np.float32) ** 4
        kept = analysis.top_mass(values, share)
        assert values[kept].sum() >= share * values.sum() * (1 - 1e-6)
        assert values[kept].min() >= values[~kept].max()
        smallest = values[kept].min()
        assert values[kept].sum() - smallest < share * values.sum()
    assert analysis.top_mass(np.ones((2, 2), np.float32), 1.0).all()
    assert not analysis.top_mass(np.ones((2, 2), np.float32), 0.0).any()


def test_maps_are_smooth_and_aligned_to_the_pixel() -> None:
    rows, columns, patch = 28, 36, 16  # 448 pixels and more
    values = np.zeros((rows, columns), np.float32)
    values[9, 20] = 1
    fine = analysis.enlarge(values, rows * patch, columns * patch)
    y, x = np.mgrid[: rows * patch, : columns * patch] + 0.5
    assert (fine * y).sum() / fine.sum() == pytest.approx(9.5 * patch, abs=0.05)  # the middle of that patch
    assert (fine * x).sum() / fine.sum() == pytest.approx(20.5 * patch, abs=0.05)
    assert np.abs(np.diff(fine, axis=0)).max() < 1.5 / patch  # no step as between patches
    assert fine.min() == 0
    assert fine.max() <= 1
    assert np.allclose(analysis.enlarge(np.full((3, 4), 2.5, np.float32), 100, 90), 2.5)


def test_mutual_nearest_neighbors_by_going_through_all() -> None:
    a, b = torch.randn(9, 5), torch.randn(11, 5)
    cosines = np.array(
        [[float(np.dot(x, y) / np.linalg.norm(x) / np.linalg.norm(y)) for y in b.numpy()] for x in a.numpy()]
    )
    expected = {
        (i, j)
        for i in range(9)
        for j in range(11)
        if cosines[i, j] == cosines[i].max() and cosines[i, j] == cosines[:, j].max()
    }
    actual = analysis.mutual_neighbors(a, b)
    assert set(zip(actual.first.tolist(), actual.second.tolist(), strict=True)) == expected
    assert list(actual.cosine) == sorted(actual.cosine, reverse=True)
    np.testing.assert_allclose(actual.cosine, cosines[actual.first, actual.second], rtol=1e-5)
    old, analysis.CHUNK = analysis.CHUNK, 4
    try:
        assert np.array_equal(analysis.mutual_neighbors(a, b).first, actual.first)
    finally:
        analysis.CHUNK = old


def test_a_shifted_copy_is_matched_by_its_shift_and_the_flow_follows() -> None:
    """Without positions, so that nothing but what is in the patches counts."""
    held, wide = weights(positions=False), noise(32, 72)
    first, second = InputImage("a", wide[:, :, :64].copy()), InputImage("b", wide[:, :, 8:].copy())
    matches = analysis.mutual_neighbors(analysis.patch_features(held, first), analysis.patch_features(held, second))
    rows, columns = np.divmod(matches.first, 16)
    there = np.divmod(matches.second, 16)
    right = (there[0] == rows) & (there[1] == columns - 2)
    assert right.sum() >= 0.9 * 8 * 14  # of the patches that are in both
    assert right.mean() >= 0.9
    exact = Matches(matches.first[right], matches.second[right], matches.cosine[right])
    flow = analysis.flow(exact, (8, 16), (8, 16))
    shift = flow - analysis.patch_centers((8, 16)).reshape(8, 16, 2)
    np.testing.assert_allclose(shift[..., 0], -2 / 16, atol=1e-4)
    np.testing.assert_allclose(shift[..., 1], 0, atol=1e-4)


def test_components_do_not_hang_on_the_order_and_have_a_sign() -> None:
    x = torch.randn(400, 12, dtype=torch.float64) * torch.linspace(4, 0.5, 12)
    actual = analysis.fit_basis(x)
    order = torch.randperm(400)
    again = analysis.fit_basis(x[order])
    torch.testing.assert_close(again.directions, actual.directions, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(again.colors(x), actual.colors(x), atol=1e-5)
    mirrored = analysis.fit_basis(2 * x.mean(dim=0) - x)  # the same variances; nothing but a convention fixes the sign
    torch.testing.assert_close(mirrored.directions, actual.directions, rtol=1e-6, atol=1e-8)
    for direction in actual.directions:
        assert direction[direction.abs().argmax()] > 0
    _, s, v = np.linalg.svd((x - x.mean(dim=0)).numpy(), full_matrices=False)
    np.testing.assert_allclose(abs((v[:3] * actual.directions.numpy()).sum(axis=1)), 1, rtol=1e-9)
    np.testing.assert_allclose(actual.explained, (s**2 / (s**2).sum())[:3], rtol=1e-5)
    colors = actual.colors(x)
    assert colors.shape == (400, 3)
    assert colors.min() == 0
    assert colors.max() == 1


def test_the_split_is_the_one_that_leaves_the_least_variance() -> None:
    for _ in range(5):
        values = np.concatenate([RNG.normal(0, 1, 30), RNG.normal(6, 1, 20)])
        cut = analysis.otsu_threshold(values)
        numbers = np.sort(values)
        within = [numbers[:i].var() * i + numbers[i:].var() * (50 - i) for i in range(1, 50)]
        best = int(np.argmin(within)) + 1
        assert numbers[best - 1] < cut < numbers[best]
    assert analysis.otsu_threshold(np.array([3.0])) == 3.0


def test_things_are_what_the_class_token_looks_at() -> None:
    ground, thing = torch.randn(60, 8) * 0.1, torch.randn(20, 8) * 0.1 + 2
    features = torch.cat([ground, thing])
    attention = np.r_[np.ones(60), 3 * np.ones(20)].astype(np.float32)
    actual = analysis.foreground(features, attention)
    assert actual[60:].all()
    assert not actual[:60].any()
    assert analysis.foreground(features, attention[::-1].copy())[:60].all()  # it looks at the others: so they are it
    assert analysis.foreground(torch.ones(4, 8), np.ones(4, np.float32)).all()
