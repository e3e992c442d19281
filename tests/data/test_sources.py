from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from adclr.config.parsing import UserError
from adclr.data.sets.classes import open_labeled
from adclr.data.sources import ImageFolder
from adclr.system import progress


def touch(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path, format="PNG")


def test_a_folder_is_searched_to_the_bottom_in_a_stable_order(tmp_path: Path) -> None:
    touch(tmp_path, "b/2.png", "b/1.JPG", "a/x/y/3.webp", "0.tiff", ".hidden.png", ".cache/4.png", "a/.x.png")
    (tmp_path / "notes.txt").write_text("no image")
    source = ImageFolder(tmp_path)
    assert source.paths == ["0.tiff", "a/x/y/3.webp", "b/1.JPG", "b/2.png"]
    assert [source.label(i) for i in range(4)] == [None, "a", "b", "b"]
    assert len(set(source.keys.tolist())) == 4


def test_links_are_followed_once(tmp_path: Path) -> None:
    touch(tmp_path / "real", "1.png")
    data = tmp_path / "data"
    data.mkdir()
    os.symlink(tmp_path / "real", data / "a")
    os.symlink(tmp_path / "real", data / "b")
    os.symlink(data, data / "loop")
    os.symlink(tmp_path / "gone", data / "broken.png")
    assert len(ImageFolder(data)) == 1


def test_links_that_lead_nowhere_are_named_and_looked_for_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    os.symlink(tmp_path / "later.png", data / "a.png")
    os.symlink("loop.png", data / "loop.png")
    with pytest.raises(UserError, match=r"holds no image that is there: .*\.png is a link to .*, which is not there"):
        ImageFolder(data)
    touch(data, "b.png")
    source = ImageFolder(data)
    assert source.listing is not None
    assert sorted(source.listing.problems) == [f"{data}/a.png", f"{data}/loop.png"]
    assert source.listing.current()
    touch(tmp_path, "later.png")  # which changes nothing of the folder
    assert not source.listing.current()
    assert ImageFolder(data).paths == ["a.png", "b.png"]


def test_a_file_and_links_to_it_are_one_image(tmp_path: Path) -> None:
    touch(tmp_path / "data", "b/1.png", "b/2.png")
    touch(tmp_path / "far", "3.png", "4.png", "5.png")
    (tmp_path / "data" / "a").mkdir()
    for name, file in (
        ("a/one.png", "data/b/1.png"),  # there already
        ("z.png", "far/3.png"),
        ("a/three.png", "far/3.png"),  # the first name of two
        ("b/four.png", "far/4.png"),
        ("chain.png", "data/b/four.png"),
    ):
        os.symlink(tmp_path / file, tmp_path / "data" / name)
    os.symlink(tmp_path / "data", tmp_path / "door")
    for root in (tmp_path / "data", tmp_path / "door"):
        assert ImageFolder(root).paths == ["a/three.png", "b/1.png", "b/2.png", "b/four.png"]


def test_progress_moves_within_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(2500):
        (tmp_path / f"{number}.jpg").touch()
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    assert len(ImageFolder(tmp_path)) == 2500
    assert capsys.readouterr().err.splitlines() == ["indexing: 1000 images", "indexing: 2000 images"]


def test_the_fingerprint_is_of_names_wherever_they_lie(tmp_path: Path) -> None:
    touch(tmp_path / "one", "a/1.png", "2.png")
    touch(tmp_path / "two", "a/1.png", "2.png")
    touch(tmp_path / "three", "a/1.png", "3.png")
    one, two, three = (ImageFolder(tmp_path / name) for name in ("one", "two", "three"))
    assert one.fingerprint() == two.fingerprint() != three.fingerprint()
    assert np.array_equal(one.keys, two.keys)


def test_a_labeled_folder_is_split_by_key(tmp_path: Path) -> None:
    touch(tmp_path, *(f"{kind}/{i}.png" for kind in "ab" for i in range(100)))
    actual = open_labeled(tmp_path)
    assert actual.classes == ["a", "b"]
    assert len(actual.train.source) + len(actual.val.source) == 200
    assert 20 < len(actual.val.source) < 60
    assert not set(actual.train.source.paths) & set(actual.val.source.paths)
    before = set(actual.val.source.paths)
    touch(tmp_path, "b/more.png")  # moves no other image from one side to the other
    assert before <= set(open_labeled(tmp_path).val.source.paths) <= before | {"b/more.png"}


def test_train_and_val_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    touch(tmp_path, "train/cat/1.png", "train/dog/2.png", "val/dog/3.png")
    actual = open_labeled(tmp_path)
    assert actual.train.labels.tolist() == [0, 1]
    assert actual.val.labels.tolist() == [1]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "holds no image"),
        (("train/cat/1.png", "val/cat/2.png"), "only one class"),
        (("train/cat/1.png", "train/dog/2.png", "val/cow/3.png"), "cow"),
        (("cat/1.png", "dog/2.png", "3.png"), "no class folder"),
    ],
)
def test_labels_that_cannot_be_scored_are_refused(tmp_path: Path, files: tuple[str, ...], message: str) -> None:
    touch(tmp_path, *files)
    with pytest.raises(UserError, match=message):
        open_labeled(tmp_path)
