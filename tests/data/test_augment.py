"""Views against Pillow and torchvision, for the same boxes and factors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as TF
from PIL import Image

from adclr.config.settings import Settings
from adclr.data.augment import render
from adclr.data.augment.photometric import blur, brightness, contrast, hue, photometric, saturation, solarize, to_gray
from adclr.data.augment.resample import resample, resample_each
from adclr.data.packed import Packed, pack
from adclr.data.random_draws import key_of
from adclr.data.sets import scenes
from adclr.data.view_plan import plan_batch
from tiny import tiny


def picture(index: int, height: int, width: int) -> np.ndarray:
    """A scene with edges and textures, cut to a size: 3×height×width."""
    image = scenes.scene(1, index, 256).image
    return np.ascontiguousarray(np.asarray(Image.fromarray(image).resize((width, height))).transpose(2, 0, 1))


IMAGES = [picture(0, 256, 256), picture(1, 101, 190), picture(2, 150, 64), picture(3, 9, 7)]


def crops_of(packed: Packed, which: list[int], boxes: np.ndarray, flip: list[bool], size: int) -> torch.Tensor:
    """Made all at once and one by one, which must agree."""
    index = np.array(which)
    where = packed.bytes, packed.offsets[index], packed.sizes[index], boxes, np.array(flip), size
    together, alone = resample(*where), resample_each(*where)
    torch.testing.assert_close(together * 255, alone * 255, rtol=0, atol=0.02)
    return together


@pytest.mark.parametrize("size", [224, 96, 48, 16, 8])
def test_crop_and_resize_are_pillows(size: int) -> None:
    boxes = np.array(
        [[10, 20, 200, 180], [0, 0, 101, 190], [30, 5, 60, 50], [0, 0, 9, 7], [100, 100, 70, 91], [3, 2, 1, 1]]
    )
    which, flip = [0, 1, 2, 3, 0, 3], [False, True, False, True, True, False]
    actual = crops_of(pack(IMAGES), which, boxes, flip, size)
    for n, (image, (top, left, height, width)) in enumerate(zip(which, boxes, strict=True)):
        theirs = Image.fromarray(IMAGES[image].transpose(1, 2, 0)).crop((left, top, left + width, top + height))
        theirs = theirs.resize((size, size), Image.Resampling.BICUBIC)
        if flip[n]:
            theirs = theirs.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        expected = torch.from_numpy(np.asarray(theirs).transpose(2, 0, 1).copy()).float()
        difference = (actual[n] * 255 - expected).abs()
        assert difference.mean() <= 0.5, (n, difference.mean())  # Pillow rounds twice, we do not
        assert difference.max() <= 3


@pytest.mark.parametrize("size", [96, 16])
def test_crop_and_resize_are_torchs_to_rounding(size: int) -> None:
    actual = crops_of(pack(IMAGES), [1], np.array([[5, 7, 90, 150]]), [False], size)
    source = torch.from_numpy(IMAGES[1][None, :, 5:95, 7:157].copy()).float()
    expected = torch.nn.functional.interpolate(source, size=(size, size), mode="bicubic", antialias=True)
    torch.testing.assert_close(actual * 255, expected.clamp(0, 255), rtol=0, atol=2e-3)


def photo(n: int = 6, size: int = 40) -> torch.Tensor:
    return torch.stack([torch.from_numpy(picture(i, size, size)).float() / 255 for i in range(n)])


@pytest.mark.parametrize(
    ("ours", "theirs", "factors"),
    [
        (brightness, TF.adjust_brightness, [0.6, 0.9, 1.0, 1.2, 1.4, 0.0]),
        (contrast, TF.adjust_contrast, [0.6, 0.9, 1.0, 1.2, 1.4, 0.0]),
        (saturation, TF.adjust_saturation, [0.8, 0.9, 1.0, 1.1, 1.2, 0.0]),
        (hue, TF.adjust_hue, [-0.1, -0.05, 0.0, 0.05, 0.1, 0.5]),
    ],
)
def test_each_jitter_is_torchvisions(ours, theirs, factors) -> None:  # type: ignore[no-untyped-def]
    x = photo()
    x[5] = to_gray(x[5:])  # gray has no hue
    actual = ours(x, torch.tensor(factors).view(-1, 1, 1, 1))
    for n, factor in enumerate(factors):
        torch.testing.assert_close(actual[n], theirs(x[n], factor), rtol=0, atol=1e-4)


def test_gray_blur_and_solarize_are_torchvisions() -> None:
    x = photo()
    torch.testing.assert_close(to_gray(x), TF.rgb_to_grayscale(x), rtol=0, atol=1e-6)
    sigma = [0.1, 0.5, 1.0, 1.5, 1.9, 2.0]
    actual = blur(x, torch.tensor(sigma))
    for n, s in enumerate(sigma):
        torch.testing.assert_close(actual[n], TF.gaussian_blur(x[n], [13, 13], [s, s]), rtol=0, atol=1e-5)
    torch.testing.assert_close(solarize(x), TF.solarize(x, 128 / 255))


def test_steps_come_in_the_order_drawn_and_only_where_drawn() -> None:
    x = photo()
    factors = np.array([[1.3, 0.7, 1.2, 0.07]] * 6)
    order = np.array([[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1], [0, 1, 2, 3], [0, 1, 2, 3]])
    jitter = np.array([True, True, True, True, False, False])
    gray = np.array([False, True, False, False, False, True])
    sigma = np.array([0.0, 0.0, 1.1, 0.0, 0.0, 0.7])
    solar = np.array([False, False, True, False, False, True])
    actual = photometric(x.clone(), jitter, factors, order, gray, sigma, solar)
    steps = [TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue]
    for n in range(6):
        y = x[n]
        for step in order[n] if jitter[n] else ():
            y = steps[step](y, factors[n, step])
        if gray[n]:
            y = TF.rgb_to_grayscale(y, 3)
        if sigma[n]:
            y = TF.gaussian_blur(y, [13, 13], [sigma[n]] * 2)
        if solar[n]:
            y = TF.solarize(y, 128 / 255)
        torch.testing.assert_close(actual[n], y, rtol=0, atol=1e-3)
    assert torch.equal(actual[4], x[4])


def test_views_have_their_shapes_and_do_not_hang_on_their_neighbors_by_one_bit() -> None:
    settings = tiny(masked_weight=1.0, num_queries=3)
    keys = np.array([key_of(str(i)) for i in range(4)], np.uint64)
    mean, std = settings.data.mean, settings.data.std
    together = pack(IMAGES)
    whole = render(together, plan_batch(settings, 0, keys, together.sizes), mean, std)
    assert whole.global_crops.shape == (2, 4, 3, 16, 16)
    assert whole.local_crops is not None
    assert whole.local_crops.shape == (2, 4, 3, 8, 8)
    assert whole.queries is not None
    assert whole.queries.shape == (4, 3, 3, 4, 4)
    for n in range(4):
        alone = pack([IMAGES[n]])
        one = render(alone, plan_batch(settings, 0, keys[n : n + 1], alone.sizes), mean, std)
        assert torch.equal(one.global_crops[:, 0], whole.global_crops[:, n])
        assert one.local_crops is not None
        assert torch.equal(one.local_crops[:, 0], whole.local_crops[:, n])
        assert one.queries is not None
        assert torch.equal(one.queries[0], whole.queries[n])
    masks = whole.masks
    assert masks is not None
    assert torch.equal(masks.grid.flatten().nonzero().flatten(), masks.index)
    per_view = torch.zeros(2 * 4 * 16).index_put((masks.index,), masks.weight).view(2, 4, 16).sum(-1)
    expected = masks.grid.any(-1).float() / 8
    torch.testing.assert_close(per_view, expected)


def test_a_query_is_the_raw_image_resized_and_normalized() -> None:
    settings = tiny(flip=0.0)
    packed = pack(IMAGES[:1])
    made = plan_batch(settings, 0, np.array([5], np.uint64), packed.sizes)
    views = render(packed, made, settings.data.mean, settings.data.std)
    assert made.queries is not None
    assert views.queries is not None
    top, left, height, width = made.queries.boxes[0, 1]
    crop = Image.fromarray(IMAGES[0].transpose(1, 2, 0)).crop((left, top, left + width, top + height))
    theirs = torch.from_numpy(np.asarray(crop.resize((4, 4), Image.Resampling.BICUBIC)).copy()).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (settings.data.mean, settings.data.std))
    assert (views.queries[0, 1] * std + mean - theirs).abs().mean() < 1 / 255


def photographs() -> list[np.ndarray]:
    """Two real ones, 427×640, that come with scikit-learn."""
    from sklearn.datasets import load_sample_images

    return [np.ascontiguousarray(image.transpose(2, 0, 1)) for image in load_sample_images().images]


@pytest.mark.parametrize(
    ("kind", "size"), [("global_crops", 224), ("local_crops", 96), ("queries", 16), ("queries", 8)]
)
def test_views_of_photographs_are_pillows(kind: str, size: int) -> None:
    """The boxes that are really drawn, at the sizes that are really made."""
    images = photographs()
    keys = np.array([key_of("china"), key_of("flower")], np.uint64)
    made = plan_batch(Settings(), 0, keys, np.array([image.shape[1:] for image in images]))
    crops = getattr(made, kind)
    packed = pack(images)
    for number, image in enumerate(images):
        which = np.full(crops.boxes.shape[1], number)
        actual = crops_of(packed, which.tolist(), crops.boxes[number], crops.flip[number].tolist(), size)
        for crop, (top, left, height, width), flip in zip(actual, crops.boxes[number], crops.flip[number], strict=True):
            theirs = Image.fromarray(image.transpose(1, 2, 0)).crop((left, top, left + width, top + height))
            theirs = theirs.resize((size, size), Image.Resampling.BICUBIC)
            if flip:
                theirs = theirs.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            expected = torch.from_numpy(np.asarray(theirs).transpose(2, 0, 1).copy()).float()
            assert (crop * 255 - expected).abs().mean() <= 1


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x: brightness(x, torch.tensor(1.4)), lambda x: TF.adjust_brightness(x, 1.4)),
        (lambda x: brightness(x, torch.tensor(0.6)), lambda x: TF.adjust_brightness(x, 0.6)),
        (lambda x: contrast(x, torch.tensor(1.4)), lambda x: TF.adjust_contrast(x, 1.4)),
        (lambda x: contrast(x, torch.tensor(0.6)), lambda x: TF.adjust_contrast(x, 0.6)),
        (lambda x: saturation(x, torch.tensor(1.2)), lambda x: TF.adjust_saturation(x, 1.2)),
        (lambda x: saturation(x, torch.tensor(0.8)), lambda x: TF.adjust_saturation(x, 0.8)),
        (lambda x: hue(x, torch.tensor([0.1]).view(1, 1, 1, 1)), lambda x: TF.adjust_hue(x, 0.1)),
        (lambda x: hue(x, torch.tensor([-0.1]).view(1, 1, 1, 1)), lambda x: TF.adjust_hue(x, -0.1)),
        (lambda x: to_gray(x), lambda x: TF.rgb_to_grayscale(x)),
        (lambda x: blur(x, torch.tensor([0.3, 2.0])), lambda x: blurred(x, [0.3, 2.0])),
        (solarize, lambda x: TF.solarize(x, 128 if x.dtype == torch.uint8 else 128 / 255)),
    ],
)
def test_each_step_on_photographs_is_torchvisions(ours, theirs) -> None:  # type: ignore[no-untyped-def]
    """On numbers as we keep them nearly to the bit; on bytes, which torchvision rounds, within 1 of 255 in the mean."""
    bytes_ = torch.stack([torch.from_numpy(image[:, 150:374, 200:424].copy()) for image in photographs()])
    x = bytes_ / 255
    actual = ours(x.clone())
    torch.testing.assert_close(actual, theirs(x), rtol=0, atol=1e-4)
    assert (actual * 255 - theirs(bytes_)).abs().mean(dim=(1, 2, 3)).max() <= 1
    assert (actual - x).abs().mean() > 0.01  # the step does something


def blurred(x: torch.Tensor, sigmas: list[float]) -> torch.Tensor:
    return torch.stack([TF.gaussian_blur(one, [13, 13], [s, s]) for one, s in zip(x, sigmas, strict=True)])
