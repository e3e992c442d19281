"""Labeled pixels as they are laid out, and what can be wrong with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from adclr.config.parsing import UserError
from adclr.data.decode import Decoder
from adclr.data.sets import scenes
from adclr.data.sets.pixels import IGNORE, check, open_segmented
from dense_scenes import CLASSES, refused, saved, segmented


def test_pairs_are_the_scenes(tmp_path: Path) -> None:
    actual = open_segmented(segmented(tmp_path))
    check(actual, show=False)
    assert (len(actual.train), len(actual.val), actual.classes) == (8, 4, CLASSES)
    for index, name in enumerate(actual.val.paths):
        made = scenes.scene(5, int(Path(name).stem), 48)
        pixels = actual.decoder(Decoder())(actual.val.read(index))
        assert np.array_equal(pixels[:3], made.image.transpose(2, 0, 1))
        assert np.array_equal(pixels[3], made.labels())
    shrunk = actual.decoder(Decoder(), largest=24)(actual.val.read(0))
    assert shrunk.shape == (4, 24, 24)
    assert set(np.unique(shrunk[3])) <= set(range(11))


def test_each_split_can_be_a_set_and_one_folder_is_split(tmp_path: Path) -> None:
    whole = segmented(tmp_path / "whole", 30, 1)
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (tmp_path / "two" / split).mkdir(parents=True, exist_ok=True)
            (whole / kind / split).rename(tmp_path / "two" / split / kind)
    for split in ("train", "val"):
        (tmp_path / "two" / split / "classes.txt").write_text("\n".join(CLASSES))
    assert len(open_segmented(tmp_path / "two").train) == 30
    (tmp_path / "two" / "val" / "classes.txt").write_text("\n".join([*CLASSES[:3], "cat", *CLASSES[4:]]))
    with pytest.raises(UserError, match="differ, first triangle and cat; give both the same"):
        open_segmented(tmp_path / "two")

    for kind in ("images", "labels"):
        (tmp_path / "two" / "train" / kind).rename(tmp_path / kind)
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES))
    one = open_segmented(tmp_path)
    assert len(one.train) + len(one.val) == 30
    assert 0 < len(one.val) < 15
    assert not set(one.train.paths) & set(one.val.paths)
    with pytest.raises(UserError, match="images/train does not exist"):
        open_segmented(tmp_path, val="test")  # which would be scored on something else


def test_a_split_that_is_not_there_is_not_another_one(tmp_path: Path) -> None:
    folder = segmented(tmp_path, 2, 1, 8)
    with pytest.raises(UserError, match="images/trian does not exist; train_split and val_split name two"):
        open_segmented(folder, train="trian")
    for kind in ("images", "labels"):
        (folder / kind / "train").rename(folder / kind / "training")
    with pytest.raises(UserError, match="images/train does not exist"):
        open_segmented(folder)
    assert len(open_segmented(folder, train="training").train) == 2


def test_ade20k_begins_at_one(tmp_path: Path) -> None:
    for split in ("training", "validation"):
        for kind in ("images", "annotations"):
            (tmp_path / kind / split).mkdir(parents=True)
        Image.new("RGB", (6, 4)).save(tmp_path / "images" / split / "a.jpg")
        label = np.array([[0, 1, 2, 149, 150, 255]] * 4, np.uint8)
        Image.fromarray(label).save(tmp_path / "annotations" / split / "a.png")
    actual = open_segmented(tmp_path)
    assert len(actual.classes) == 150
    assert actual.classes[0] == "class 1"
    assert actual.decoder(Decoder())(actual.val.read(0))[3, 0].tolist() == [IGNORE, 0, 1, 148, 149, IGNORE]
    rows = ["Idx\tRatio\tTrain\tVal\tName", *(f"{n}\t0.1\t1\t1\tthing {n}, it" for n in range(1, 151))]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(rows))
    assert open_segmented(tmp_path).classes[149] == "thing 150, it"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sky\nroad\n\n", ["sky", "road"]),
        ("0\tsky\n1\troad\n255\tignore (void)\n", ["sky", "road"]),
        ("1 road\n0 sky\n", ["sky", "road"]),
        ("0 sky\n2 road\n", "do not run from 0 to 1"),
        ("0 sky\n1 road\n1 tree\n", "gives two classes one number"),
        ("sky\n", "names 1 classes; there must be 2"),
        ("sky\nsky\n", "the class sky twice"),
    ],
)
def test_class_lists(tmp_path: Path, text: str, expected: list[str] | str) -> None:
    folder = segmented(tmp_path, 2, 1, 8)
    (folder / "classes.txt").write_text(text)
    if isinstance(expected, list):
        assert open_segmented(folder).classes == expected
    else:
        with pytest.raises(UserError, match=expected):
            open_segmented(folder)


def test_offenders_are_named_before_anything_is_done(tmp_path: Path) -> None:
    folder = segmented(tmp_path, 8, 2, 12)
    labels = folder / "labels" / "train"
    wrong = {
        "1": Image.fromarray(np.full((12, 12), 77, np.uint8)),
        "2": Image.new("L", (9, 12)),
        "3": Image.new("RGB", (12, 12)),
    }
    for name, image in wrong.items():
        image.save(labels / f"{name}.png")
    (labels / "4.png").write_bytes(b"no image")
    Image.new("L", (12, 12)).save(labels / "5.jpg")
    (labels / "5.png").unlink()
    with pytest.raises(UserError) as caught:
        check(open_segmented(folder), show=False)
    message = str(caught.value)
    assert f"{labels}/1.png has the value 77, where classes are 0 to 10 and 255 is ignored" in message
    assert "2.png is 9x12 pixels where its image is 12x12" in message
    assert "3.png has colors (mode RGB); a label is gray or has a palette, and 2 more; fix the labels" in message
    assert "\n" not in message
    for name in wrong:
        (labels / f"{name}.png").unlink()
    with pytest.raises(UserError, match=r"1\.png has no label; .*2\.png has no label; .*3\.png has no label; fix"):
        open_segmented(folder)


def test_values_of_16_bits_and_other_values_to_ignore(tmp_path: Path) -> None:
    folder = segmented(tmp_path, 2, 1, 8)
    wide = np.zeros((8, 8), np.uint16)
    wide[0] = 1000
    Image.fromarray(wide).save(folder / "labels" / "val" / "2.png")
    with pytest.raises(UserError, match="has the value 1000"):
        check(open_segmented(folder), show=False)
    actual = open_segmented(folder, ignore=1000)
    check(actual, show=False)
    assert (actual.decoder(Decoder())(actual.val.read(0))[3, :2, 0] == [IGNORE, 0]).all()
    with pytest.raises(UserError, match="ignore=3 is the number of the class triangle"):
        open_segmented(folder, ignore=3)


def test_a_turned_photograph_has_the_size_of_its_label(tmp_path: Path) -> None:
    folder = segmented(tmp_path, 2, 1, 8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (10, 8)).save(folder / "images" / "val" / "2.jpg", exif=exif)
    (folder / "images" / "val" / "2.png").unlink()
    Image.new("L", (8, 10)).save(folder / "labels" / "val" / "2.png")
    check(open_segmented(folder), show=False)


def test_mistakes_are_one_sentence_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, weights = segmented(tmp_path / "data", 2, 1, 12), saved(tmp_path / "weights")
    Image.fromarray(np.full((12, 12), 11, np.uint8)).save(folder / "labels" / "val" / "2.png")
    said = refused(capsys, "evaluate", "incontext", "--weights", weights, "--data", folder)
    assert "2.png has the value 11, where classes are 0 to 10" in said
    assert not (weights / "evals").exists()
    said = refused(capsys, "evaluate", "incontext", "--weights", weights, "--data", tmp_path)
    assert "holds no images/ and labels/" in said
