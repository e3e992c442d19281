"""Plans: crop boxes as torchvision draws them, masks as iBOT does, and nothing that hangs on the batch."""

from __future__ import annotations

import numpy as np
import pytest

from adclr.config.settings import Settings
from adclr.data.random_draws import TRIES, Draws, crop_boxes, key_of
from adclr.data.view_plan import Crops, block_masks, num_masked_rows, plan_batch
from tiny import tiny

KEYS = np.array([key_of(f"{i}.png") for i in range(1000)], np.uint64)
SIZES = np.array([[60 + i % 50, 90 - i % 30] for i in range(1000)], np.int64)


def arrays(crops: Crops) -> list[np.ndarray]:
    return [value for value in vars(crops).values() if isinstance(value, np.ndarray)]


def test_an_images_plan_does_not_hang_on_its_neighbors() -> None:
    settings = tiny(masked_weight=1.0)
    whole, part = plan_batch(settings, 5, KEYS, SIZES), plan_batch(settings, 5, KEYS[[8, 3]], SIZES[[8, 3]])
    for a, b in (
        (whole.global_crops, part.global_crops),
        (whole.local_crops, part.local_crops),
        (whole.queries, part.queries),
    ):
        assert a is not None
        assert b is not None
        for x, y in zip(arrays(a), arrays(b), strict=True):
            assert np.array_equal(x[[8, 3]], y)
    assert whole.masks is not None
    assert part.masks is not None
    assert np.array_equal(whole.masks[[8, 3]], part.masks)
    other = plan_batch(settings, 6, KEYS, SIZES)
    assert not np.array_equal(other.global_crops.boxes, whole.global_crops.boxes)


def test_anchored_queries_are_the_boxes_of_local_crops_and_the_rest_are_random() -> None:
    for num_queries in (2, 3, 7):
        changes = {"num_local": 3, "num_queries": num_queries}
        anchored, random = (
            plan_batch(tiny(query_source=source, **changes), 5, KEYS, SIZES) for source in ("local", "random")
        )
        local, queries, free = anchored.local_crops, anchored.queries, random.queries
        assert local is not None
        assert queries is not None
        assert free is not None
        count = min(3, num_queries)
        assert np.array_equal(queries.boxes[:, :count], local.boxes[:, :count])
        assert np.array_equal(queries.flip[:, :count], local.flip[:, :count])
        assert np.array_equal(queries.boxes[:, count:], free.boxes[:, count:])
        assert np.array_equal(queries.flip[:, count:], free.flip[:, count:])
        assert not queries.jitter.any()
        assert not queries.sigma.any()  # raw pixels
        assert queries.size == 4
        for a, b in ((anchored.global_crops, random.global_crops), (local, random.local_crops)):
            assert all(np.array_equal(x, y) for x, y in zip(arrays(a), arrays(b), strict=True))  # type: ignore[arg-type]


def test_boxes_have_the_area_and_shape_they_should() -> None:
    boxes = crop_boxes(Draws(0, 0, KEYS), "global", 4, SIZES, (0.4, 1.0), (3 / 4, 4 / 3))
    top, left, height, width = np.moveaxis(boxes, -1, 0)
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= SIZES[:, :1]).all()
    assert (left + width <= SIZES[:, 1:]).all()
    area = height * width / SIZES.prod(axis=1, keepdims=True)
    assert area.min() > 0.38
    ratio = width / height
    assert ratio.min() > 0.72
    assert ratio.max() < 1.38
    small = crop_boxes(Draws(0, 0, KEYS), "query", 4, SIZES, (0.05, 0.15), (3 / 4, 4 / 3))
    share = small[..., 2] * small[..., 3] / SIZES.prod(axis=1, keepdims=True)
    assert abs(share.mean() - 0.1) < 0.003  # uniform in (0.05, 0.15): nearly every first try fits
    log_ratio = np.log(small[..., 3] / small[..., 2])
    assert abs(log_ratio.mean()) < 0.02
    assert abs(log_ratio.std() - 2 * np.log(4 / 3) / 12**0.5) < 0.01
    # places are spread evenly over what there is room for
    for at, side, image in ((small[..., 0], small[..., 2], SIZES[:, :1]), (small[..., 1], small[..., 3], SIZES[:, 1:])):
        assert abs(((at + 0.5) / (image - side + 1)).mean() - 0.5) < 0.02


@pytest.mark.parametrize(
    ("size", "box"), [((10, 200), (0, 93, 10, 13)), ((200, 10), (93, 0, 13, 10)), ((1, 1), (0, 0, 1, 1))]
)
def test_where_no_try_fits_the_largest_central_crop_is_taken(size: tuple[int, int], box: tuple[int, ...]) -> None:
    boxes = crop_boxes(Draws(0, 0, KEYS[:1]), "x", 1, np.array([size]), (0.9, 1.0), (3 / 4, 4 / 3))
    top, left, height, width = boxes[0, 0]
    assert (height, width) == box[2:]
    assert abs(top - box[0]) <= 1
    assert abs(left - box[1]) <= 1


def test_how_often_things_are_done() -> None:
    settings = tiny(num_local=10, num_queries=10)
    made = plan_batch(settings, 0, KEYS, SIZES)
    g, local, queries = made.global_crops, made.local_crops, made.queries
    assert local is not None
    assert queries is not None
    assert (g.sigma[:, 0] > 0).all()
    assert abs((g.sigma[:, 1] > 0).mean() - 0.1) < 0.03
    assert abs((local.sigma > 0).mean() - 0.5) < 0.02
    assert not g.solarize[:, 0].any()
    assert abs(g.solarize[:, 1].mean() - 0.2) < 0.05
    assert not local.solarize.any()
    for crops in (g, local):
        assert abs(crops.jitter.mean() - 0.8) < 0.03
        assert abs(crops.gray.mean() - 0.2) < 0.03
        assert abs(crops.flip.mean() - 0.5) < 0.04
        assert abs(crops.factors - [1, 1, 1, 0]).max(axis=(0, 1)) == pytest.approx([0.4, 0.4, 0.2, 0.1], abs=0.005)
    # queries: nothing but the flip
    assert abs(queries.flip.mean() - 0.5) < 0.02
    assert not (queries.jitter | queries.gray | queries.solarize | (queries.sigma > 0)).any()
    altered = plan_batch(tiny(query_photometric="local"), 0, KEYS, SIZES).queries
    assert altered is not None
    assert abs(altered.jitter.mean() - 0.8) < 0.03


def test_no_queries_no_local_views_no_masks() -> None:
    made = plan_batch(tiny(num_queries=0, num_local=0), 0, KEYS[:2], SIZES[:2])
    assert made.queries is None
    assert made.local_crops is None
    assert made.masks is None


def test_a_batch_has_room_for_the_patches_that_are_hidden() -> None:
    """The mean and four deviations of what is drawn, never more than can be; masks fall short of what is drawn."""
    budgets = Draws(0, 0, np.arange(40_000, dtype=np.uint64))
    hidden = np.where(budgets.chance("masked", 0.5, 2), budgets.uniform("mask ratio", 2, low=0.1, high=0.5), 0.0)
    for batch in (8, 64):
        sums = hidden.reshape(-1, 2 * batch).sum(axis=1)
        room = num_masked_rows(2 * batch, 100, 0.5, (0.1, 0.5)) / 100
        assert room == pytest.approx(min(sums.mean() + 4 * sums.std(), batch), rel=0.05)
    assert num_masked_rows(2, 100, 0.5, (0.1, 0.5)) == 100  # both views, half of each
    settings = tiny(masked_weight=1.0)
    made = plan_batch(settings, 0, np.arange(64, dtype=np.uint64), np.full((64, 2), 40))
    assert made.masks is not None
    assert made.masks.sum() <= made.masked_rows < made.masks.size
    assert (
        plan_batch(
            tiny(masked_weight=1.0, target="sinkhorn"), 0, np.arange(4, dtype=np.uint64), np.full((4, 2), 40)
        ).masked_rows
        == 0
    )


def slow_mask(u: list[np.ndarray], budget: float, rows: int, columns: int) -> np.ndarray:
    """One blockwise mask, written from iBOT's rule with the numbers given."""
    mask, count, attempt = np.zeros((rows, columns), bool), 0, 0
    while count < budget:
        added = 0
        for _ in range(10):
            a, b, c, d = u[attempt]
            attempt += 1
            least = (min(rows, columns) // 3) ** 2
            area = least + a * (budget - count - least)
            aspect = np.exp(np.log(0.3) + b * (np.log(1 / 0.3) - np.log(0.3)))
            h, w = round(float(np.sqrt(area * aspect))), round(float(np.sqrt(area / aspect)))
            if h < rows and w < columns:
                top, left = int(c * (rows - h + 1)), int(d * (columns - w + 1))
                block = mask[top : top + h, left : left + w]
                new = h * w - int(block.sum())
                if 0 < new <= budget - count:
                    block[:] = True
                    added = new
                    break
        if not added:
            break
        count += added
    return mask


@pytest.mark.parametrize("grid", [(14, 14), (6, 6), (7, 12)])
def test_masks_are_ibots(grid: tuple[int, int]) -> None:
    keys = KEYS[:60]
    draws = Draws(4, 1, keys)
    masks = block_masks(draws, 2, grid, 0.5, (0.1, 0.5))
    share = draws.uniform("mask ratio", 2, low=0.1, high=0.5) * grid[0] * grid[1]
    budgets = np.where(draws.chance("masked", 0.5, 2), share, 0)
    numbers = [draws.uniform(f"mask block {i}", 2, 4) for i in range(300)]
    for image in range(len(keys)):
        for view in range(2):
            slow = slow_mask([u[image, view] for u in numbers], budgets[image, view], *grid)
            assert np.array_equal(masks[image, view].reshape(grid), slow)


def test_masks_hide_the_share_they_should() -> None:
    masks = block_masks(Draws(0, 0, KEYS), 2, (14, 14), 0.5, (0.1, 0.5))
    share = masks.mean(axis=-1)
    assert share.max() <= 0.5
    assert abs((share > 0).mean() - 0.5) < 0.04
    assert 0.22 < share[share > 0].mean() < 0.32


def test_settings_are_the_papers() -> None:
    views = Settings().views
    assert (views.global_size, views.local_size, views.num_local, views.num_queries) == (224, 96, 10, 10)
    assert (views.global_scale, views.local_scale, views.query_scale) == ((0.4, 1.0), (0.05, 0.4), (0.05, 0.15))


def test_each_kind_of_crop_has_its_own_area() -> None:
    """The whole range of its own setting, and not another's."""
    sizes = np.full((1000, 2), 1000, np.int64)
    made = plan_batch(Settings(), 0, KEYS, sizes)
    wanted = {"global_crops": (0.4, 1.0), "local_crops": (0.05, 0.4), "queries": (0.05, 0.15)}
    for kind, (low, high) in wanted.items():
        boxes = getattr(made, kind).boxes
        area = boxes[..., 2] * boxes[..., 3] / 1e6
        assert low - 0.002 < area.min() < low + 0.01
        assert high - 0.03 < area.max() < high + 0.002
        ratio = boxes[..., 3] / boxes[..., 2]
        assert 0.74 < ratio.min() < 0.76
        assert 1.31 < ratio.max() < 1.35


def test_how_much_is_masked() -> None:
    settings = Settings().model_copy(update={"method": Settings().method.model_copy(update={"masked_weight": 1.0})})
    masks = plan_batch(settings, 0, KEYS, SIZES).masks
    assert masks is not None
    share = masks.mean(axis=-1)
    assert abs((share > 0).mean() - 0.5) < 0.03  # every other view
    assert share.max() <= 0.5
    assert share.max() > 0.45
    assert 0.2 < share[share > 0].mean() < 0.32  # the mean of U(0.1, 0.5), less where no block fits any more


def test_of_ten_tries_the_first_that_fits_is_taken() -> None:
    """By a loop over all tries, of which the program draws only those that it needs."""
    sizes = np.array([[40, 60], [100, 42], [1, 90], [64, 64]] * 64)
    draws = Draws(3, 1, np.arange(256, dtype=np.uint64) * np.uint64(977))
    scale, ratio = (0.3, 1.0), (3 / 4, 4 / 3)
    actual = crop_boxes(draws, "local", 5, sizes, scale, ratio)
    areas = draws.uniform("local area", 5, TRIES, low=scale[0], high=scale[1])
    aspects = np.exp(draws.uniform("local aspect", 5, TRIES, low=np.log(ratio[0]), high=np.log(ratio[1])))
    which = []
    for image, (height, width) in enumerate(sizes):
        for crop in range(5):
            for number in range(TRIES):
                area, aspect = height * width * areas[image, crop, number], aspects[image, crop, number]
                h, w = round(float(np.sqrt(area / aspect))), round(float(np.sqrt(area * aspect)))
                if 0 < h <= height and 0 < w <= width:
                    assert tuple(actual[image, crop, 2:]) == (h, w)
                    which.append(number)
                    break
            else:  # the largest in the middle
                tall, wide = min(height, max(1, round(width / ratio[0]))), min(width, max(1, round(height * ratio[1])))
                assert tuple(actual[image, crop, 2:]) == (tall, wide)
    assert {0, 1, 2} <= set(which)  # the first, and others
    assert len(which) < 5 * len(sizes)  # and none
