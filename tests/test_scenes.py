from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from adclr import scenes
from adclr.demo import query_boxes
from adclr.visualize import attention_maps, attention_sheet, colours
from test_knn import random_weights


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
    scenes.write(tmp_path, 2, 12, 6, 20, show=False)
    assert len(list((tmp_path / "train").rglob("*.png"))) == 12
    for file in (tmp_path / "val").rglob("*.png"):
        made = scenes.scene(2, int(file.stem), 20)
        assert file.parent.name == scenes.KINDS[made.kind]
        assert np.array_equal(np.asarray(Image.open(file)), made.image)


def test_the_picture_has_a_row_for_each_image_and_a_column_for_each_query() -> None:
    weights, made = random_weights(), [scenes.scene(0, i, 64) for i in range(3)]
    pictures, boxes = [Image.fromarray(m.image) for m in made], [query_boxes(m) for m in made]
    for own in boxes:
        for left, top, right, bottom in own:
            assert 0 <= left < right <= 64
            assert 0 <= top < bottom <= 64
    maps = attention_maps(weights, pictures[0], boxes[0])
    assert [m.shape for m in maps] == [(4, 4)] * 3
    assert all(m.min() == 0 and m.max() == 1 for m in maps)
    sheet = attention_sheet(weights, pictures, boxes)
    assert sheet.width > 4 * 160
    assert sheet.height > 3 * 160


def test_colours_go_from_dark_to_light() -> None:
    shades = np.asarray(colours(np.linspace(0, 1, 20).reshape(1, -1)).convert("L"))[0].astype(int)
    assert (np.diff(shades) > 0).all()
