"""Label propagation over drawn moving shapes, and J and F against the formula written slowly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from adclr.config.parsing import UserError
from adclr.data.sets import davis
from adclr.evals import video
from adclr.evals.video import Settings, boundary, contour, dilate, neighborhood, propagate, region, resized_size
from dense_scenes import backbone, evaluated, refused, saved

CPU = torch.device("cpu")


def disc(height: int, width: int, y: float, x: float, radius: float) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    actual: np.ndarray = (rows - y) ** 2 + (columns - x) ** 2 <= radius**2
    return actual


def drawn(folder: Path, clips: int = 2, frames: int = 6, height: int = 96, width: int = 128) -> Path:
    """A red disc and, in every other clip, a green square, moving over a pattern."""
    rng = np.random.default_rng(0)
    for clip in range(clips):
        places = [folder / kind / "480p" / f"clip{clip}" for kind in ("JPEGImages", "Annotations")]
        for place in places:
            place.mkdir(parents=True)
        ground = np.repeat(np.repeat(rng.integers(60, 110, (height // 16, width // 16, 3)), 16, 0), 16, 1)
        for frame in range(frames):
            image, mask = ground.astype(np.uint8).copy(), np.zeros((height, width), np.uint8)
            round_one = disc(height, width, 34 + 3 * frame, 36 + 4 * frame, 26)
            image[round_one], mask[round_one] = (220, 30, 30), 1
            if clip % 2:
                square = np.zeros_like(round_one)
                square[50:90, 84 - 2 * frame : 124 - 2 * frame] = True
                image[square & ~round_one], mask[square & ~round_one] = (30, 220, 60), 2
            Image.fromarray(image).save(places[0] / f"{frame:05d}.png")
            Image.fromarray(mask).save(places[1] / f"{frame:05d}.png")
    (folder / "ImageSets" / "2017").mkdir(parents=True)
    (folder / "ImageSets" / "2017" / "val.txt").write_text("".join(f"clip{n}\n" for n in range(clips)))
    return folder


def slow_f(predicted: np.ndarray, true: np.ndarray, radius: int) -> float:
    def line(mask: np.ndarray) -> np.ndarray:
        actual = np.zeros_like(mask)
        height, width = mask.shape
        for y in range(height):
            for x in range(width):
                others = [(min(y + b, height - 1), min(x + a, width - 1)) for b, a in ((0, 1), (1, 0), (1, 1))]
                actual[y, x] = any(mask[y, x] != mask[other] for other in others)
        return actual

    lines = line(predicted), line(true)
    axis = np.arange(-radius, radius + 1)
    round_one = axis[:, None] ** 2 + axis**2 <= radius**2
    near_by = [ndimage.binary_dilation(these, round_one) for these in lines]
    if not lines[0].any() and not lines[1].any():
        return 1.0
    precision = (lines[0] & near_by[1]).sum() / lines[0].sum() if lines[0].any() else 1.0
    recall = (lines[1] & near_by[0]).sum() / lines[1].sum() if lines[1].any() else 1.0
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def test_j_and_f_of_drawn_shapes() -> None:
    whole, half = torch.zeros(1, 20, 20, dtype=torch.bool), torch.zeros(1, 20, 20, dtype=torch.bool)
    whole[:, 4:14, 4:14], half[:, 4:14, 4:9] = True, True
    nothing = torch.zeros_like(whole)
    assert region(half, whole).item() == 0.5
    assert contour(whole, whole).item() == region(nothing, nothing).item() == contour(nothing, nothing).item() == 1
    assert region(nothing, whole).item() == contour(nothing, whole).item() == contour(whole, nothing).item() == 0
    # the contour of a square of side 10 is 40 pixels long and 1 more; moved by 1, all of it is within 1
    moved = whole.roll(1, dims=2)
    assert boundary(whole).sum() == 40
    assert contour(moved, whole, tolerance=1).item() == 1
    assert region(moved, whole).item() == pytest.approx(90 / 110)
    far = contour(whole.roll(4, dims=2), whole, tolerance=1).item()
    assert 0.3 < far < 0.8  # upper and lower sides meet for the most part, left and right ones nowhere


def test_f_is_its_formula() -> None:
    rng = np.random.default_rng(0)
    for _ in range(6):
        masks = [ndimage.gaussian_filter(rng.normal(size=(24, 31)), 2) > 0.03 for _ in range(2)]
        pair = [torch.from_numpy(mask)[None] for mask in masks]
        radius = math.ceil(0.05 * math.hypot(24, 31))
        assert contour(pair[0], pair[1], 0.05).item() == pytest.approx(slow_f(masks[0], masks[1], radius), abs=1e-9)
        both, either = (masks[0] & masks[1]).sum(), (masks[0] | masks[1]).sum()
        assert region(pair[0], pair[1]).item() == pytest.approx(both / either)
    dots = torch.zeros(1, 9, 9, dtype=torch.bool)
    dots[0, 4, 4] = True
    assert dilate(dots, 2).sum() == 13


def slow_propagation(
    features: np.ndarray, first: np.ndarray, grid: tuple[int, int], queue: int, reach: int, k: int, temperature: float
) -> list[np.ndarray]:
    actual, count = [first], grid[0] * grid[1]
    for t in range(1, len(features)):
        known = [0, *range(max(1, t - queue), t)]
        made = np.zeros_like(first)
        for n in range(count):
            y, x = divmod(n, grid[1])
            options = []
            for source in known:
                for m in range(count):
                    v, u = divmod(m, grid[1])
                    if abs(v - y) <= reach and abs(u - x) <= reach:
                        options.append((float(features[t, n] @ features[source, m]), source, m))
            best = sorted(options, reverse=True)[:k]
            weights = np.array([math.exp(similarity / temperature) for similarity, _, _ in best])
            for weight, (_, source, m) in zip(weights / weights.sum(), best, strict=True):
                made[n] += weight * actual[source][m]
        actual.append(made)
    return actual


def test_labels_are_handed_on_by_the_formula() -> None:
    rng = np.random.default_rng(0)
    grid = (4, 5)
    features = rng.normal(size=(6, 20, 7))
    features /= np.linalg.norm(features, axis=-1, keepdims=True)
    first = np.eye(3)[rng.integers(0, 3, 20)]
    given = torch.from_numpy(features), torch.from_numpy(first)
    for queue, reach, k in ((2, 1, 3), (7, 2, 5), (1, 9, 40)):
        expected = slow_propagation(features, first, grid, queue, reach, k, 0.1)
        actual = propagate(*given, grid, queue, reach, k, 0.1)
        torch.testing.assert_close(actual, torch.from_numpy(np.stack(expected)), atol=1e-5, rtol=0)
    assert neighborhood(grid, 0, CPU).all()


def test_ideal_features_hand_a_moving_shape_on_to_the_end() -> None:
    grid, truth = (30, 40), []
    for frame in range(12):
        truth.append(disc(30, 40, 10 + frame, 12 + 1.5 * frame, 7))
    masks = torch.from_numpy(np.stack(truth))
    torch.manual_seed(0)
    features = torch.nn.functional.normalize(
        torch.nn.functional.one_hot(masks.long(), 2).flatten(1, 2) + 0.05 * torch.randn(12, 1200, 2), dim=-1
    )
    first = torch.nn.functional.one_hot(masks[0].flatten().long(), 2).float()
    actual = propagate(features, first, grid, 7, 12, 5, 0.1).argmax(dim=-1).unflatten(1, grid).bool()
    assert region(actual, masks).min() > 0.99


def test_moving_shapes_score_90_with_a_new_backbone(tmp_path: Path) -> None:
    """Colors come through a random network well enough to follow a red disc and a green square."""
    clips = davis.open_davis(drawn(tmp_path))
    actual = video.score(backbone(48, 2, 4, 96), clips, Settings(size=96, num_workers=2), CPU, tmp_path / "out")
    assert actual["video_j_and_f"] >= 90
    assert (actual["num_clips"], actual["num_objects"]) == (2, 3)
    assert set(actual["per_clip"]) == {"clip0", "clip1"}
    with Image.open(tmp_path / "out.png") as picture:
        image, labels, predicted = (np.asarray(picture)[20:260, 6 + 326 * n :][:, :320].astype(int) for n in range(3))
    for painted in (labels, predicted):
        assert np.abs(painted - image)[:40, -40:].max() == 0  # the ground stays as it is
        assert np.abs(painted - image).max() > 50  # the disc does not
    other = video.score(backbone(48, 2, 4, 96), clips, Settings(size=96, batch_size=1), CPU)
    assert other["video_j"] == pytest.approx(actual["video_j"], abs=0.1)


def test_frames_have_dinos_sizes() -> None:
    assert resized_size(480, 854, 480, 16) == (480, 832)
    assert resized_size(480, 854, 480, 8) == (480, 832)
    assert resized_size(1080, 608, 480, 16) == (832, 480)
    assert resized_size(100, 100, 96, 14) == (98, 98)


def test_in_one_process_and_in_two(tmp_path: Path) -> None:
    data, weights = drawn(tmp_path / "data", 3, 4), saved(tmp_path / "weights")
    one, two = (evaluated("video", n, weights, data, tmp_path / f"{n}.json", size=32) for n in (1, 2))
    assert one["per_clip"].keys() == two["per_clip"].keys()
    for name in ("video_j", "video_f", "video_j_and_f", "num_objects"):
        assert one[name] == pytest.approx(two[name], abs=0.05)


def damaged(folder: Path, how: str) -> Any:
    masks = folder / "Annotations" / "480p" / "clip1"
    if how == "missing":
        (masks / "00002.png").unlink()
    elif how == "empty":
        Image.new("L", (128, 96)).save(masks / "00000.png")
    elif how == "size":
        Image.new("L", (10, 10), 1).save(masks / "00000.png")
    elif how == "broken":
        (masks / "00000.png").write_bytes(b"x")
    else:
        (folder / "ImageSets" / "2017" / "val.txt").write_text("clip7\n")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "clip1 has no mask for frame 00002; fix"),
        ("empty", r"clip1/00000\.png, the first of its clip, shows no object"),
        ("size", r"clip1/00000\.png is not as large as its frame"),
        ("broken", r"clip1/00000\.png or its frame cannot be used"),
        ("absent", "clip7 holds no frames"),
    ],
)
def test_offenders_are_named(tmp_path: Path, how: str, message: str) -> None:
    folder = drawn(tmp_path, 2, 3)
    damaged(folder, how)
    with pytest.raises(UserError, match=message):
        davis.check(davis.open_davis(folder))


def test_a_folder_that_is_no_davis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "evaluate", "video", "--weights", saved(tmp_path / "weights"), "--data", tmp_path)
    assert "JPEGImages/480p does not exist" in said
