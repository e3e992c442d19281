"""The Triton kernels against the plain operations; on a machine without a GPU they run in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from adclr.config.settings import Settings
from adclr.data import augment
from adclr.data.augment import kernels, launch_kernels
from adclr.data.packed import pack
from adclr.data.random_draws import key_of
from adclr.data.sets import scenes
from adclr.data.view_plan import plan_batch
from kernel_device import DEVICE, needs_interpreter
from tiny import tiny

pytestmark = needs_interpreter
NEAR = 0.1  # of 255: weights and pixels on their way are float16
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(autouse=True)
def larger_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a small block as for a large one."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(kernels, "TILE", 128)
        monkeypatch.setattr(kernels, "COLUMNS", 128)
        monkeypatch.setattr(kernels, "DEPTH", 128)
        monkeypatch.setattr(kernels, "PIXELS", 2**16)


def test_blocks_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, images = tiny(num_local=0, num_queries=2), pictures()[1:2]
    large, _ = both(settings, "queries", images)
    for name in ("TILE", "COLUMNS", "DEPTH"):
        monkeypatch.setattr(kernels, name, 16)
    monkeypatch.setattr(kernels, "PIXELS", 8)
    small, slow = both(settings, "queries", images)
    torch.testing.assert_close(small, large, rtol=0, atol=0.1)
    torch.testing.assert_close(small, slow, rtol=0, atol=NEAR)


def pictures(channels: int = 3) -> list[np.ndarray]:
    made = []
    for index, (height, width) in enumerate([(64, 50), (33, 90), (120, 40), (9, 7)]):
        image = Image.fromarray(scenes.scene(1, index, 96).image).resize((width, height))
        made.append(np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)[np.arange(channels) % 3]))
    return made


def both(settings: Settings, kind: str, images: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """(kernels, plain) views of one kind, brought back to 0..255."""
    packed = pack(images).to(DEVICE)
    keys = np.array([key_of(str(number)) for number in range(len(images))], np.uint64)
    crops = getattr(plan_batch(settings, 0, keys, packed.sizes), kind)
    channels = packed.num_channels
    mean, std = (np.resize(numbers, channels).tolist() for numbers in (MEAN, STD))
    fast = launch_kernels.render_crops(packed, [crops], tuple(mean), tuple(std))[0].cpu()
    plain = augment._render(packed, crops, tuple(mean), tuple(std)).cpu()
    assert fast.shape == plain.shape

    def pixels(x: torch.Tensor) -> torch.Tensor:
        return (x * torch.tensor(std).view(-1, 1, 1) + torch.tensor(mean).view(-1, 1, 1)) * 255

    return pixels(fast), pixels(plain)


def test_crops_resized_and_flipped() -> None:
    plain = tiny(num_queries=6, jitter=0, gray=0, global_blur=(0, 0), local_blur=0, solarize=(0, 0))
    for kind in ("global_crops", "local_crops", "queries"):
        fast, slow = both(plain, kind, pictures())
        torch.testing.assert_close(fast, slow, rtol=0, atol=NEAR)


@pytest.mark.parametrize("kind", ["global_crops", "local_crops"])
def test_everything_together(kind: str) -> None:
    settings = tiny(jitter=0.9, gray=0.4, global_blur=(0.7, 0.7), local_blur=0.5, solarize=(0.4, 0.6), num_local=4)
    fast, slow = both(settings, kind, pictures())
    # a pixel at the edge of solarizing may fall on either side
    assert (fast - slow).abs().mean() < 0.1
    assert ((fast - slow).abs() > 2 * NEAR).float().mean() < 2e-3


@pytest.mark.parametrize("step", range(4))
def test_each_step_of_the_jitter_alone(step: int) -> None:
    names = ("brightness", "contrast", "saturation", "hue")
    off = dict.fromkeys(names, 0.0)
    settings = tiny(**(off | {names[step]: 0.4}), jitter=1, gray=0, global_blur=(0, 0), solarize=(0, 0))
    fast, slow = both(settings, "global_crops", pictures())
    torch.testing.assert_close(fast, slow, rtol=0, atol=2 * NEAR)
    still, _ = both(tiny(**off, jitter=1, gray=0, global_blur=(0, 0), solarize=(0, 0)), "global_crops", pictures())
    assert (fast - still).abs().mean() > 1  # the step does something


@pytest.mark.parametrize("tile", [16, 128])
def test_blur_alone(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one tile and over their borders."""
    monkeypatch.setattr(kernels, "TILE", tile)
    for sigma in ((0.1, 0.1), (2.0, 2.0)):
        settings = tiny(jitter=0, gray=0, global_blur=(1, 1), blur_sigma=sigma, solarize=(0, 0))
        fast, slow = both(settings, "global_crops", pictures()[:2])
        torch.testing.assert_close(fast, slow, rtol=0, atol=NEAR)


@pytest.mark.parametrize("channels", [1, 5])
def test_other_channels(channels: int) -> None:
    numbers = {"model.num_channels": channels, "mean": [0.5] * channels, "std": [0.25] * channels}
    fast, slow = both(tiny(**numbers, global_blur=(1, 1)), "global_crops", pictures(channels))
    torch.testing.assert_close(fast, slow, rtol=0, atol=NEAR)


def test_a_view_does_not_hang_on_its_neighbors_by_one_bit() -> None:
    images, settings = pictures(), tiny(jitter=1, global_blur=(1, 1))
    keys = np.array([key_of(str(number)) for number in range(4)], np.uint64)

    def views(chosen: list[int]) -> torch.Tensor:
        packed = pack([images[i] for i in chosen]).to(DEVICE)
        crops = plan_batch(settings, 0, keys[chosen], packed.sizes).global_crops
        return launch_kernels.render_crops(packed, [crops], MEAN, STD)[0]

    assert torch.equal(views([0, 1, 2, 3])[:, 2], views([2])[:, 0])


@pytest.mark.parametrize(
    ("kind", "patch_size"), [("queries", 16), ("queries", 8), ("local_crops", 16), ("global_crops", 16)]
)
def test_photographs_are_pillows(kind: str, patch_size: int) -> None:
    """The sizes and boxes that are really used, of real photographs, half of them flipped."""
    from sklearn.datasets import load_sample_images

    chosen = slice(2 if kind == "queries" else 1)  # larger views take the interpreter seconds each
    photos = [np.ascontiguousarray(image.transpose(2, 0, 1)) for image in load_sample_images().images[chosen]]
    still = {"jitter": 0, "gray": 0, "global_blur": (0, 0), "local_blur": 0, "solarize": (0, 0)}
    views = Settings().views.model_copy(update=still | {"num_local": 2, "num_queries": 4})
    model = Settings().model.model_copy(update={"patch_size": patch_size})
    settings = Settings().model_copy(update={"views": views, "model": model})
    packed = pack(photos).to(DEVICE)
    keys = np.array([key_of(name) for name in ("china", "flower")[chosen]], np.uint64)
    crops = getattr(plan_batch(settings, 0, keys, packed.sizes), kind)
    assert crops.size == {"queries": patch_size, "local_crops": 96, "global_crops": 224}[kind]
    if kind == "queries":
        assert crops.flip.any()
        assert not crops.flip.all()
    actual = launch_kernels.render_crops(packed, [crops], (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))[0].cpu()
    for number, photo in enumerate(photos):
        for place, (top, left, height, width) in enumerate(crops.boxes[number]):
            theirs = Image.fromarray(photo.transpose(1, 2, 0)).crop((left, top, left + width, top + height))
            theirs = theirs.resize((crops.size, crops.size), Image.Resampling.BICUBIC)
            if crops.flip[number, place]:
                theirs = theirs.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            expected = torch.from_numpy(np.asarray(theirs).transpose(2, 0, 1).copy()).float()
            assert (actual[place, number] * 255 - expected).abs().mean() <= 1


def test_one_crop_of_each_image_and_nothing_else() -> None:
    packed = pack(pictures()).to(DEVICE)
    height, width = packed.sizes.T
    boxes = np.stack([height // 4, width // 5, height // 2, width - width // 5], axis=1)
    flip = np.array([True, False, False, True])
    fast = launch_kernels.resize_crops(packed, boxes, flip, 24)
    slow = augment.resample_each(packed.bytes.cpu(), packed.offsets, packed.sizes, boxes, flip, 24)
    torch.testing.assert_close(fast.cpu(), slow, rtol=0, atol=NEAR / 255)
