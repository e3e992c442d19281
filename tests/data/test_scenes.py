from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from adclr.data.sets import scenes
from adclr.demo import query_boxes
from adclr.features.drawing import viridis


def test_a_scene_is_a_function_of_its_numbers() -> None:
    a, b, c = scenes.scene(1, 5), scenes.scene(1, 5), scenes.scene(1, 6)
    assert np.array_equal(a.image, b.image)
    assert not np.array_equal(a.image, c.image)
    assert a.image.shape == (64, 64, 3)
    assert scenes.scene(1, 5, 31).image.shape == (31, 31, 3)


def test_masks_and_boxes_are_where_the_objects_are() -> None:
    for index in range(60):
        made = scenes.scene(0, index, 48)
        sizes = [int(thing.mask.sum()) for thing in made.objects]
        assert made.kind == made.objects[int(np.argmax(sizes))].kind
        assert (np.sum([thing.mask for thing in made.objects], axis=0) <= 1).all()  # each pixel is one object's
        for thing in made.objects:
            left, top, right, bottom = thing.box
            rows, columns = np.nonzero(thing.mask)
            assert (rows.min(), columns.min(), rows.max() + 1, columns.max() + 1) == (top, left, bottom, right)
        labels = made.labels()
        assert set(np.unique(labels)) <= {0, *(thing.kind + 1 for thing in made.objects)}
        # an object looks other than the ground around it
        largest = max(made.objects, key=lambda thing: thing.mask.sum())
        inside, outside = made.image[largest.mask], made.image[labels == 0]
        assert abs(inside.astype(float).std() - outside.astype(float).std()) > 5


def test_all_kinds_come_about_equally_often() -> None:
    counts = Counter(scenes.scene(0, index, 16).kind for index in range(600))
    assert len(counts) == len(scenes.KINDS) == 10
    assert min(counts.values()) > 25


def test_folders_hold_what_the_scenes_say(tmp_path: Path) -> None:
    scenes.write_scenes(tmp_path, 2, 12, 6, 20, show=False)
    assert len(list((tmp_path / "train").rglob("*.png"))) == 12
    for file in (tmp_path / "val").rglob("*.png"):
        made = scenes.scene(2, int(file.stem), 20)
        assert file.parent.name == scenes.KINDS[made.kind]
        assert np.array_equal(np.asarray(Image.open(file)), made.image)


def test_queries_of_the_demo_lie_within_the_image() -> None:
    for number in range(12):
        for left, top, right, bottom in query_boxes(scenes.scene(0, number, 64)):
            assert 0 <= left < right <= 1
            assert 0 <= top < bottom <= 1


def test_colors_go_from_dark_to_light() -> None:
    shades = np.asarray(Image.fromarray(viridis(np.linspace(0, 1, 20, dtype=np.float32).reshape(1, -1))).convert("L"))
    assert (np.diff(shades[0].astype(int)) > 0).all()
