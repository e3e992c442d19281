"""An image that is replaced under its name is noticed: by embeddings, and by a run that is resumed."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import adclr as package
from adclr import cli
from adclr.config.parsing import UserError
from adclr.data import file_stamps
from adclr.data.collection import open_source
from adclr.data.file_stamps import Stamps
from adclr.data.random_draws import mix
from adclr.features.embedding_files import Parts
from adclr.system.runs import Run
from adclr.training import launch
from adclr.weights.backbone import architecture, save_backbone
from test_embedding import maps_of, rows_of
from tiny import TINY, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
EMBED: dict[str, Any] = {"part_size": 4, "batch_size": 4, "device": "cpu"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(1)
    state = {name: torch.randn_like(t) * 0.3 for name, t in architecture(tiny()).build().state_dict().items()}
    save_backbone(folder, state, tiny())
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """16 images, in one folder, of two days ago."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(16):
        photograph(folder / f"{number:02d}.bmp", number)
    return folder


def photograph(path: Path, seed: int, side: int = 16, days_ago: float = 2.0) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(pixels).save(path)  # as BMP all are of one size in bytes
    modified = os.stat(path).st_mtime - days_ago * 86400
    os.utime(path, (modified, modified))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the parts that were computed."""
    numbers: list[int] = []
    real = Parts.write
    monkeypatch.setattr(
        Parts, "write", lambda self, number, *rest: (numbers.append(number), real(self, number, *rest))[1]
    )
    return numbers


FORMS = {"file": ("f.parquet", {}), "folder": ("f", {}), "maps": ("m", {"dense": True, "format": "npy"})}


@pytest.mark.parametrize("form", list(FORMS))
def test_an_embedding_of_replaced_images_is_brought_up_to_date(
    weights: Path, photos: Path, tmp_path: Path, written: list[int], form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, more = FORMS[form]
    out, read = tmp_path / name, maps_of if form == "maps" else rows_of
    package.embed(weights, photos, out=out, **EMBED, **more)
    before = read(out)
    assert written == [0, 1, 2, 3]
    written.clear()
    package.embed(weights, photos, out=out, **EMBED, **more)
    assert "is finished: 16 images" in capsys.readouterr().out
    photograph(photos / "06.bmp", 100, days_ago=1)  # the same size, another time
    package.embed(weights, photos, out=out, **EMBED, **more)
    assert written == [1]  # the part that it lies in
    assert "1 of 4 parts" in capsys.readouterr().out
    after = read(out)
    package.embed(weights, photos, out=tmp_path / f"new-{name}", **EMBED, **more)
    expected = read(tmp_path / f"new-{name}")
    assert list(after) == list(before) == list(expected)
    for path in after:
        np.testing.assert_array_equal(after[path], expected[path])
        assert np.array_equal(after[path], before[path]) == (path != "06.bmp")
    written.clear()
    package.embed(weights, photos, out=out, **EMBED, **more)
    assert written == []
    assert not (tmp_path / "f.parquet.parts").exists()


def test_images_that_break_and_are_mended_are_counted(weights: Path, photos: Path, tmp_path: Path) -> None:
    out, whole = tmp_path / "f.parquet", (photos / "05.bmp").read_bytes()
    for number in (5, 8, 9, 10, 11):  # one of a part, and all of another
        (photos / f"{number:02d}.bmp").write_bytes(b"broken")
    assert package.embed(weights, photos, out=out, **EMBED)["rows"] == 11
    (photos / "05.bmp").write_bytes(whole)
    about = package.embed(weights, photos, out=out, **EMBED)
    assert (about["rows"], about["unreadable"]) == (12, 4)
    assert len(rows_of(out)) == 12
    for number in (8, 9, 10, 11):
        photograph(photos / f"{number:02d}.bmp", number, days_ago=1)
    about = package.embed(weights, photos, out=out, **EMBED)
    assert (about["rows"], about["unreadable"]) == (16, 0)
    assert not (tmp_path / "f.parquet.unreadable.jsonl").exists()
    for number in range(8, 12):
        (photos / f"{number:02d}.bmp").write_bytes(b"broken again")
    package.embed(weights, photos, out=tmp_path / "folder", **EMBED)
    assert not (tmp_path / "folder" / "part-000002.parquet").exists()


@pytest.mark.parametrize("form", ["file", "folder"])
def test_parts_of_an_embedding_that_was_stopped_are_checked_too(
    weights: Path, photos: Path, tmp_path: Path, written: list[int], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    out = tmp_path / FORMS[form][0]
    with monkeypatch.context() as patch:
        real = Parts.write

        def stop(self: Parts, number: int, *rest: Any) -> None:
            if number == 3:
                raise KeyboardInterrupt
            real(self, number, *rest)

        patch.setattr(Parts, "write", stop)
        with pytest.raises(KeyboardInterrupt):
            package.embed(weights, photos, out=out, **EMBED)
    written.clear()
    photograph(photos / "00.bmp", 100, days_ago=1)
    package.embed(weights, photos, out=out, **EMBED)
    assert written == [0, 3]
    package.embed(weights, photos, out=tmp_path / "new.parquet", **EMBED)
    expected = rows_of(tmp_path / "new.parquet")
    for path, vector in rows_of(out).items():
        np.testing.assert_array_equal(vector, expected[path])


def test_an_update_that_is_stopped_goes_on(
    weights: Path, photos: Path, tmp_path: Path, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "f.parquet"
    package.embed(weights, photos, out=out, **EMBED)
    for number in (0, 15):
        photograph(photos / f"{number:02d}.bmp", 100 + number, days_ago=1)
    from adclr.features import embedding_files

    for when in ("_join", "write_json"):  # before the parts are put together, and after it
        with monkeypatch.context() as patch:
            real = getattr(embedding_files, when)

            def stop(path: Path, value: Any, real: Any = real) -> Any:
                if path.name == ".f.parquet.tmp" or (path.name == "f.parquet.json" and value["finished"]):
                    raise KeyboardInterrupt
                return real(path, value)

            patch.setattr(embedding_files, when, stop)
            with pytest.raises(KeyboardInterrupt):
                package.embed(weights, photos, out=out, **EMBED)
    assert written == [0, 1, 2, 3, 0, 3]  # each once more at most
    package.embed(weights, photos, out=out, **EMBED)
    assert written == [0, 1, 2, 3, 0, 3]
    package.embed(weights, photos, out=tmp_path / "new.parquet", **EMBED)
    expected = rows_of(tmp_path / "new.parquet")
    for path, vector in rows_of(out).items():
        np.testing.assert_array_equal(vector, expected[path])


def test_content_decides_if_that_is_said(
    weights: Path, photos: Path, tmp_path: Path, written: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "f.parquet"
    words = ["embed", str(weights), str(photos), "--out", str(out), "--check", "content"]
    words += [f"{name}={value}" for name, value in EMBED.items()]
    cli.main(words)
    written.clear()
    times = os.stat(photos / "06.bmp")
    photograph(photos / "06.bmp", 100)
    os.utime(photos / "06.bmp", ns=(times.st_atime_ns, times.st_mtime_ns))  # nothing shows it but its content
    for path in photos.iterdir():
        if path.name != "06.bmp":
            os.utime(path)  # touched, not changed
    cli.main(words)
    assert written == [1]
    package.embed(weights, photos, out=out, **EMBED)  # the new times are known by now
    assert written == [1]
    assert "is finished" in capsys.readouterr().out


def test_an_embedding_of_version_0_1_is_compared_by_its_own_time(
    weights: Path, photos: Path, tmp_path: Path, written: list[int]
) -> None:
    out = tmp_path / "f.parquet"
    package.embed(weights, photos, out=out, **EMBED)
    about = json.loads((tmp_path / "f.parquet.json").read_text())
    about.pop("parts")
    (tmp_path / "f.parquet.json").write_text(json.dumps(about))
    written.clear()
    package.embed(weights, photos, out=out, **EMBED)
    assert written == []
    photograph(photos / "06.bmp", 100, days_ago=-1)
    package.embed(weights, photos, out=out, **EMBED)
    assert written == [0, 1, 2, 3]


# -- files of the user, in the places of an embedding --


def test_an_embedding_replaces_nothing_that_is_not_its_own(weights: Path, photos: Path, tmp_path: Path) -> None:
    for name in ("f.parquet", "f.parquet.json", "f.parquet.unreadable.jsonl", "f.parquet.parts/mine.txt"):
        mine = tmp_path / name
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")
        with pytest.raises(
            UserError, match=r"was not written by adclr embed; choose another --out, or add --overwrite"
        ):
            package.embed(weights, photos, out=tmp_path / "f.parquet", **EMBED)
        assert mine.read_text() == "mine"
        mine.unlink()
    (tmp_path / "f.parquet.parts").rmdir()
    for name in ("f.parquet", "f.parquet.json"):
        (tmp_path / name).write_text("mine")
    package.embed(weights, photos, out=tmp_path / "f.parquet", overwrite=True, **EMBED)
    assert len(rows_of(tmp_path / "f.parquet")) == 16
    package.embed(weights, photos, out=tmp_path / "f.parquet", **EMBED)  # its own by now


def test_other_features_take_the_place_of_these_only_if_that_is_said(
    weights: Path, photos: Path, tmp_path: Path
) -> None:
    for name in ("f.parquet", "folder"):
        out = tmp_path / name
        package.embed(weights, photos, out=out, **EMBED | {"part_size": 2})
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(UserError, match=r"made with vector=cls where both was asked for; .*--overwrite"):
            package.embed(weights, photos, out=out, vector="both", **EMBED)
        package.embed(weights, photos, out=out, vector="both", overwrite=True, **EMBED)
        assert {len(vector) for vector in rows_of(out).values()} == {32}
    assert len(list((tmp_path / "folder").glob("part-*"))) == 4
    assert (tmp_path / "notes.txt").exists()


# -- runs --


def start(photos: Path, out: Path, **more: Any) -> Run:
    return package.pretrain(photos, out, **TINY | {"batch_size": 8, "epochs": 3, "checkpoint_every_steps": 1} | more)


@pytest.fixture
def stopped(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that ended in the middle."""
    from adclr.training.journal import Journal

    real = Journal.step

    def step(self: Journal, done: int, *rest: Any) -> None:
        real(self, done, *rest)
        if done == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "step", step)
        with pytest.raises(KeyboardInterrupt):
            start(photos, tmp_path / "run")
    assert Run(tmp_path / "run").steps()
    return tmp_path / "run"


@pytest.mark.parametrize("how", ["size", "time"])
def test_a_run_is_not_resumed_with_a_replaced_image(stopped: Path, photos: Path, how: str) -> None:
    photograph(photos / "06.bmp", 100, side=20 if how == "size" else 16, days_ago=1)
    before = sorted((path, path.stat().st_mtime_ns) for path in stopped.rglob("*"))
    with pytest.raises(UserError) as caught:
        start(photos, stopped)
    assert str(caught.value) == (
        f"1 image of {photos} was replaced, 06.bmp, since {stopped} was started; "
        "restore what was there or set data.allow_changed=true"
    )
    assert sorted((path, path.stat().st_mtime_ns) for path in stopped.rglob("*")) == before
    assert start(photos, stopped, allow_changed=True).finished
    assert start(photos, stopped).finished  # these images are known by now


def test_of_very_many_images_some_are_looked_at(
    stopped: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_stamps, "MOST_WATCHED", 10)
    monkeypatch.setattr(file_stamps, "WATCHED", 6)
    launched = launch.prepare(photos, stopped)
    source = launched.source
    watched = file_stamps.watched_images(source, "time")
    assert watched is not None
    assert watched.tolist() == sorted(np.argsort(mix(source.keys))[:6].tolist())
    assert file_stamps.watched_images(source, "content") is None  # which is to read all
    others = [index for index in range(len(source)) if index not in watched]
    # the run has the stamps of all images, from before there were so many; and then those of some
    for file in (stopped / launch.STAMPS, tmp_path / "some.npz"):
        monkeypatch.setattr(launch, "STAMPS", str(file))
        if file.exists():
            assert len(np.load(file)["keys"]) == len(source)
        else:
            launch.read_stamps(launched).save(file, source.keys)
            assert len(np.load(file)["keys"]) == 6
        assert launch.describe_replaced(launched, launch.read_stamps(launched)) is None
        name = source.paths[others[0]]
        before = (photos / name).stat().st_mtime_ns
        os.utime(photos / name, ns=(1, 1))  # not noticed: the price, of which docs/reliability.md tells
        assert launch.describe_replaced(launched, launch.read_stamps(launched)) is None
        os.utime(photos / name, ns=(before, before))
        first, second = (photos / source.paths[index] for index in watched[[2, 4]])
        times = first.stat().st_mtime_ns, second.stat().st_mtime_ns
        os.utime(first, ns=(1, 1))
        clause = launch.describe_replaced(launched, launch.read_stamps(launched))
        assert clause == f"1 image of {photos} was replaced, {source.paths[watched[2]]},"
        os.utime(second, ns=(1, 1))
        clause = launch.describe_replaced(launched, launch.read_stamps(launched))
        assert clause == f"2 images among 6 of {photos} were replaced, such as {source.paths[watched[2]]},"
        for path, time in zip((first, second), times, strict=True):
            os.utime(path, ns=(time, time))


def test_a_finished_run_does_not_seem_to_have_learned_from_replaced_images(photos: Path, tmp_path: Path) -> None:
    start(photos, tmp_path / "run", epochs=1)
    for number in (6, 7):
        photograph(photos / f"{number:02d}.bmp", 100, days_ago=1)
    with pytest.raises(UserError, match=r"run is finished and 2 images of .* were replaced, such as 06\.bmp, since"):
        start(photos, tmp_path / "run", epochs=1)
    assert start(photos, tmp_path / "run", epochs=1, allow_changed=True).finished


def test_a_copy_of_the_collection_is_resumed_with(stopped: Path, photos: Path, tmp_path: Path) -> None:
    """Every file has a new time, as on another machine."""
    shutil.copytree(photos, tmp_path / "copy", copy_function=shutil.copyfile)
    assert start(tmp_path / "copy", stopped).finished


def test_a_run_of_version_0_1_is_resumed(stopped: Path, photos: Path) -> None:
    (stopped / launch.STAMPS).unlink()
    photograph(photos / "06.bmp", 100, days_ago=1)  # of which nobody can know
    assert start(photos, stopped).finished
    assert (stopped / launch.STAMPS).exists()


def test_a_run_can_be_told_to_look_at_contents(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["pretrain", str(photos), "--out", str(out), "--check", "content"]
    words += [f"{name}={value}" for name, value in (TINY | {"train.epochs": 1}).items()]
    cli.main(words)
    for path in photos.iterdir():
        os.utime(path)
    cli.main(words)
    assert "is finished" in capsys.readouterr().out
    photograph(photos / "06.bmp", 100)
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert "1 image of" in capsys.readouterr().err


# -- stamps themselves --


def test_every_kind_of_collection_has_stamps(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("photos/00.bmp\nphotos/none.bmp\n")
    listed = file_stamps.read_stamps(open_source(tmp_path / "list.txt"))
    assert listed.sizes.tolist() == [(photos / "00.bmp").stat().st_size, -1]
    for number in (0, 1):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as archive:
            archive.add(photos / "00.bmp", "00.bmp")
            archive.add(photos / "01.bmp", "01.bmp")
    before = file_stamps.read_stamps(open_source(f"{tmp_path}/*.tar"))
    os.utime(tmp_path / "1.tar")
    after = file_stamps.read_stamps(open_source(f"{tmp_path}/*.tar"))
    assert file_stamps.find_replaced(before, after, "time").tolist() == [2, 3]  # all of the shard


def test_rows_of_a_hugging_face_data_set_have_stamps(photos: Path, tmp_path: Path) -> None:
    import datasets

    def write(path: Path, names: list[str]) -> Stamps:
        rows = datasets.Dataset.from_dict({"image": [str(photos / name) for name in names]})
        rows.cast_column("image", datasets.Image()).save_to_disk(path)
        return file_stamps.read_stamps(open_source(f"hf:{path}"))

    first = write(tmp_path / "a", ["00.bmp", "01.bmp"])
    assert len(first) == 2
    assert (first.times > 0).all()
    photograph(photos / "01.bmp", 1, side=64)
    other = write(tmp_path / "b", ["00.bmp", "01.bmp"])
    assert file_stamps.find_replaced(first, other, "time").tolist() == [0, 1]


def test_stamps_are_found_again_by_the_keys_of_images(tmp_path: Path) -> None:
    keys = np.array([30, 10, 20], np.uint64)
    taken = Stamps(np.array([3, 1, 2]), np.array([33, 11, 22]))
    taken.save(tmp_path / "s.npz", keys)
    again = file_stamps.load_stamps(tmp_path / "s.npz", np.array([10, 20, 30], np.uint64))
    assert again is not None
    assert (again.sizes.tolist(), again.times.tolist()) == ([1, 2, 3], [11, 22, 33])
    assert file_stamps.load_stamps(tmp_path / "s.npz", np.array([10, 20, 31], np.uint64)) is None
    (tmp_path / "s.npz").write_bytes(b"damaged")
    assert file_stamps.load_stamps(tmp_path / "s.npz", keys) is None
