"""COCO's json as data, what can be wrong with it, and average precision against pycocotools and by hand."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as their_masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from adclr.config.parsing import UserError
from adclr.data.sets import scenes
from adclr.data.sets.coco import Instances, check, decode_runs, fill_mask, open_instances
from adclr.evals.detection import STATISTICS, average_precision
from dense_scenes import instances, run_lengths


def test_objects_are_the_scenes(tmp_path: Path) -> None:
    train, val = open_instances(instances(tmp_path), "train", "val")
    check((train, val), show=False)
    assert (len(train.photos), len(val.photos), train.classes) == (8, 4, list(scenes.KINDS))
    for index, name in enumerate(train.photos.paths):
        made = scenes.scene(5, int(Path(name).stem), 64)
        assert [one.kind for one in train.objects[index]] == [thing.kind for thing in made.objects]
        for one, thing in zip(train.objects[index], made.objects, strict=True):
            assert one.box == thing.box
            assert np.array_equal(fill_mask(one.mask, 64, 64), thing.mask)


def test_polygons_and_both_kinds_of_run_lengths_are_pycocotools() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        mask = np.asfortranarray(rng.random((13, 17)) < rng.random())
        compressed = their_masks.encode(mask.astype(np.uint8))
        assert decode_runs(compressed["counts"].decode()) == run_lengths(mask)
        assert np.array_equal(fill_mask(np.array(run_lengths(mask)), 13, 17), mask)
        polygon = (rng.random(8) * 13).tolist()
        theirs = their_masks.decode(their_masks.merge(their_masks.frPyObjects([polygon], 13, 17)))
        assert np.array_equal(fill_mask([polygon], 13, 17), theirs)


def changed(folder: Path, change: Callable[[dict[str, Any]], Any], split: str = "train") -> Path:
    file = folder / "annotations" / f"instances_{split}.json"
    actual = json.loads(file.read_text())
    change(actual)
    file.write_text(json.dumps(actual))
    return folder


def first(**more: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda found: found["annotations"][0].update(more)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            first(bbox=[0, 0, 0, 5]),
            r"object 1 of instances_train\.json has a box of no area; fix them, or",
        ),
        (first(bbox=[60, 0, 1e-7, 5]), "has a box of no area"),  # in float32
        (first(bbox=[60, 0, 10, 5]), "has a box that leaves its image of 64x64"),
        (first(bbox=[0, 0, "x", 5]), "has no box of four numbers"),
        (first(bbox=[0, 0, float("nan"), 5]), "has no box of four numbers"),
        (first(image_id=99), "is of an image or category that is not listed"),
        (first(image_id=[1]), "object 1 of"),
        (first(category_id=2), "is of an image or category that is not listed"),
        (first(segmentation=[]), "has no mask"),
        (first(segmentation=[[1, 2, 3, 4]]), "polygon that is not at least three pairs"),
        (first(segmentation={"size": [64, 64], "counts": [5, -5, 64 * 64]}), "run lengths that do not fit"),
        (first(segmentation={"size": [64, 64], "counts": "oooo"}), "run lengths that do not fit|cannot be read"),
        (first(segmentation={"size": [9, 9], "counts": [81]}), "run lengths that do not fit"),
        (first(id=2), "has no id, or one that another has"),
    ],
)
def test_bad_objects_are_named_or_left_out(tmp_path: Path, change: Any, message: str) -> None:
    folder = changed(instances(tmp_path), change)
    with pytest.raises(UserError, match=message) as caught:
        open_instances(folder, "train", "val")
    assert "\n" not in str(caught.value)
    whole = sum(len(made.objects) for made in (scenes.scene(5, i, 64) for i in range(8)))
    train, _ = open_instances(folder, "train", "val", drop_bad=True)
    assert sum(len(own) for own in train.objects) == whole - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda found: found["images"][2].update(file_name="no.png"),
            r"no\.png, which instances_train\.json names, is not in",
        ),
        (lambda found: found["images"][2].update(file_name="../../x.png"), "is not in"),
        (lambda found: found["images"][2].update(width=0), "an image without id, width, height or file_name"),
        (lambda found: found["images"].append(found["images"][0]), "two of one id"),
        (lambda found: found["categories"].append({"id": 1, "name": "again"}), "two of one id"),
        (
            lambda found: found["categories"][0].update(name="other"),
            r"categories of train and val .* differ, first",
        ),
        (lambda found: found.pop("annotations"), "is not COCO's json"),
        (lambda found: found.update(images=[1]), "is not COCO's json"),
        (lambda found: found.update(annotations=[]), "no image of train .* has an object"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_instances(changed(instances(tmp_path), change), "train", "val")


def test_images_of_another_size_than_said_are_named(tmp_path: Path) -> None:
    folder = instances(tmp_path, 2, 1)
    Image.new("RGB", (30, 20)).save(folder / "images" / "val" / "2.png")
    with pytest.raises(UserError, match=r"2\.png is 30x20 pixels where its json says 64x64; fix"):
        check(open_instances(folder, "train", "val"), show=False)
    (folder / "annotations" / "instances_val.json").write_text("{")
    with pytest.raises(UserError, match="it is not JSON"):
        open_instances(folder, "train", "val")
    with pytest.raises(UserError, match=r"holds no annotations/instances_test\.json"):
        open_instances(folder, "train", "test")


def guessed(truth: Instances, seed: int) -> list[dict[str, Any]]:
    """Detections that are sometimes right, a little off, of another class, or nowhere."""
    rng = np.random.default_rng(seed)
    results = []
    for index, own in enumerate(truth.objects):
        height, width = truth.sizes[index].tolist()
        for one in [*own, *own[:1]]:
            mask = fill_mask(one.mask, height, width).copy()
            shift = int(rng.integers(-4, 5))
            mask = np.roll(mask, shift, axis=1)
            left, top, right, bottom = one.box
            kind = one.kind if rng.random() < 0.8 else int(rng.integers(len(truth.classes)))
            code = their_masks.encode(np.asfortranarray(mask))
            results.append(
                {
                    "image_id": truth.numbers[index],
                    "category_id": truth.categories[kind],
                    "bbox": [left + shift, top, right - left, bottom - top],
                    "score": float(rng.random()),
                    "segmentation": {"size": list(code["size"]), "counts": code["counts"].decode()},
                }
            )
    return results


@pytest.mark.parametrize("seed", [0, 1])
def test_average_precision_is_pycocotools(tmp_path: Path, seed: int) -> None:
    """With a crowd, an image without objects, and classes that are not there."""

    def crowd(found: dict[str, Any]) -> None:
        found["annotations"][0]["iscrowd"] = 1
        last = found["images"][-1]["id"]
        found["annotations"] = [one for one in found["annotations"] if one["image_id"] != last]

    _, val = open_instances(changed(instances(tmp_path, 1, 12), crowd, "val"), "train", "val")
    assert [len(own) for own in val.objects][-1] == 0
    assert val.objects[0][0].crowd
    detections = guessed(val, seed)
    for ours, theirs in (("box", "bbox"), ("mask", "segm")):
        with contextlib.redirect_stdout(io.StringIO()):
            truth = COCO()
            truth.dataset = val.dataset()
            truth.createIndex()
            # whoever scores masks leaves boxes out, or pycocotools takes the area of the box for that of the mask
            told = "segmentation" if ours == "mask" else "bbox"
            rows = [{k: one[k] for k in ("image_id", "category_id", "score", told)} for one in detections]
            measure = COCOeval(truth, truth.loadRes(rows), theirs)
            measure.evaluate()
            measure.accumulate()
            measure.summarize()
        found = average_precision(val, detections, ours)  # type: ignore[arg-type]
        for name, index in STATISTICS.items():
            expected = measure.stats[index]
            if expected < 0:
                assert found[f"{ours}_{name}"] is None
            else:
                assert found[f"{ours}_{name}"] / 100 == pytest.approx(expected, abs=1e-6)
        assert 0 < found[f"{ours}_ap"] < 100


def test_average_precision_worked_by_hand(tmp_path: Path) -> None:
    """Two objects of one class; the surest detection is right, the next is nowhere, the third finds the other.

    Precision is 1 up to a recall of a half, then 2/3: (51 · 1 + 50 · 2/3) / 101 of COCO's 101 points.
    """
    folder = changed(instances(tmp_path, 1, 2), lambda found: found.update(annotations=found["annotations"][:0]), "val")

    def two(found: dict[str, Any]) -> None:
        square = np.zeros((64, 64), bool)
        square[10:30, 10:30] = True
        for number, image in enumerate(found["images"], 1):
            found["annotations"].append(
                {
                    "id": number,
                    "image_id": image["id"],
                    "category_id": 1,
                    "bbox": [10, 10, 20, 20],
                    "area": 400,
                    "iscrowd": 0,
                    "segmentation": {"size": [64, 64], "counts": run_lengths(square)},
                }
            )

    _, val = open_instances(changed(folder, two, "val"), "train", "val")
    rows = [(val.numbers[0], 10, 0.9), (val.numbers[0], 40, 0.8), (val.numbers[1], 10, 0.7)]
    detections = [
        {"image_id": n, "category_id": 1, "bbox": [left, 10, 20, 20], "score": score} for n, left, score in rows
    ]
    found = average_precision(val, detections, "box")
    assert found["box_ap"] == pytest.approx(100 * (51 + 50 * 2 / 3) / 101)
    assert found["box_ap50"] == pytest.approx(found["box_ap"])
    assert found["box_per_class"]["disc"] == pytest.approx(found["box_ap"])
    assert found["box_per_class"]["star"] is None
    nothing = average_precision(val, [], "box")
    assert nothing["box_ap"] == nothing["box_ap_small"] == nothing["box_per_class"]["disc"] == 0
    assert nothing["box_ap_large"] is None  # nothing is large, so nothing large was missed
    assert nothing["box_per_class"]["star"] is None


def test_masks_are_small_by_their_own_area(tmp_path: Path) -> None:
    """A frame of 40x40 pixels, one wide: a medium box, a small mask. Found where nothing is, it is no small thing
    that is nowhere only if its box counted."""
    frame, square = np.zeros((64, 64), bool), np.zeros((64, 64), bool)
    frame[10:50, 10:50] = True
    frame[11:49, 11:49] = False
    square[0:8, 0:8] = True

    def one(found: dict[str, Any]) -> None:
        thing = {"id": 1, "image_id": found["images"][0]["id"], "category_id": 1, "iscrowd": 0, "area": 64}
        mask = {"size": [64, 64], "counts": run_lengths(square)}
        found["annotations"] = [thing | {"bbox": [0, 0, 8, 8], "segmentation": mask}]

    _, val = open_instances(changed(instances(tmp_path, 1, 1), one, "val"), "train", "val")

    def detection(mask: np.ndarray, box: list[int], score: float) -> dict[str, Any]:
        code = their_masks.encode(np.asfortranarray(mask.astype(np.uint8)))
        told = {"size": [64, 64], "counts": code["counts"].decode()}
        row = {"image_id": val.numbers[0], "category_id": 1, "score": score}
        return row | {"bbox": box, "segmentation": told}

    detections = [detection(frame, [10, 10, 40, 40], 0.9), detection(square, [0, 0, 8, 8], 0.8)]
    assert average_precision(val, detections, "mask")["mask_ap_small"] == pytest.approx(50)
    assert average_precision(val, detections, "box")["box_ap_small"] == pytest.approx(100)
