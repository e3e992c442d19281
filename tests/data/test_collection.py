"""Lists, shards and Hugging Face data sets give what the folder gives; an index is used while it is true."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest

import adclr as package
from adclr.config.parsing import UserError
from adclr.data import listing, listing_builder, sources
from adclr.data.collection import expand, open_source
from adclr.data.sets.classes import open_labeled
from adclr.data.sources import ImageFolder, tar_shards
from adclr.training import launch
from tiny import TINY, Adclr, words


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


@pytest.fixture
def folder(images: Path) -> ImageFolder:
    return ImageFolder(images / "train")


def test_a_list_reads_what_it_names(folder: ImageFolder, tmp_path: Path) -> None:
    shutil.copytree(folder.root, tmp_path / "pictures")
    lines = [f"pictures/{path}" for path in folder.paths[:10]]
    lines[1] += "\tspecial"
    lines += ["", lines[0], str(folder.root / folder.paths[11]), "missing.png"]  # empty, twice, absolute, missing
    (tmp_path / "list.txt").write_text("\n".join(lines) + "\n")
    source = open_source(tmp_path / "list.txt")
    assert len(source) == 12
    assert [source.read(i) for i in range(11)] == [folder.read(i) for i in [*range(10), 11]]
    assert (source.label(0), source.label(1)) == ("pictures", "special")
    with pytest.raises(OSError, match="missing"):
        source.read(11)
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(UserError, match="names no image"):
        open_source(tmp_path / "empty.txt")


def test_shards_are_read_at_random(folder: ImageFolder, tmp_path: Path) -> None:
    for number in range(3):
        chosen = range(number, len(folder), 3)
        files = {folder.paths[i]: folder.read(i) for i in chosen} | {"readme.md": b"x", ".hidden.png": b"x"}
        write_tar(tmp_path / f"part-{number:03d}.tar", files)
    for where in (tmp_path, tmp_path / "*.tar", tmp_path / "part-{000..002}.tar"):
        source = open_source(where)
        assert len(source) == len(folder)
        assert sorted(map(source.read, range(len(source)))) == sorted(map(folder.read, range(len(folder))))
        for index in (17, 3, 30):
            shard, _, member = source.paths[index].partition("/")
            assert shard.startswith("part-")
            assert source.read(index) == (folder.root / member).read_bytes()
            assert source.label(index) == member.split("/")[0]
    assert len(open_source(tmp_path / "part-001.tar")) == 11
    for split in ("train", "val"):
        (tmp_path / "both" / split).mkdir(parents=True)
        shutil.copy(tmp_path / "part-000.tar", tmp_path / "both" / split)
    assert len(open_labeled(tmp_path / "both").train.source) == 11
    with pytest.raises(UserError, match="too few images of class"):
        open_labeled(tmp_path)


def test_an_archive_beside_photos_is_not_the_collection(folder: ImageFolder, tmp_path: Path) -> None:
    shutil.copytree(folder.root, tmp_path / "photos")
    write_tar(tmp_path / "photos" / "backup.tar", {"old.png": folder.read(0)})
    assert open_source(tmp_path / "photos").paths == folder.paths


def test_shards_named_twice_or_alike_are_not_mixed_up(folder: ImageFolder, tmp_path: Path) -> None:
    for number, name in enumerate(("a01", "b1", "c1")):
        write_tar(tmp_path / f"{name}.tar", {f"{name}.png": folder.read(number)})
    source = open_source(str(tmp_path / "*{0..1}*.tar"))
    assert sorted(source.paths) == ["a01.tar/a01.png", "b1.tar/b1.png", "c1.tar/c1.png"]
    for index, path in enumerate(source.paths):
        assert source.read(index) == folder.read(["a01", "b1", "c1"].index(path.split(".")[0]))
    for number, kind in enumerate(("cat", "dog")):
        (tmp_path / "m" / kind).mkdir(parents=True)
        write_tar(tmp_path / "m" / kind / "0.tar", {"1.png": folder.read(number), "1.cls": kind.encode()})
    alike = open_source(str(tmp_path / "m" / "*" / "0.tar"))
    assert alike.paths == ["cat/0.tar/1.png", "dog/0.tar/1.png"]
    assert [alike.label(i) for i in range(2)] == ["cat", "dog"]
    assert len(set(alike.keys.tolist())) == 2


def test_lists_as_other_systems_write_them(folder: ImageFolder, tmp_path: Path) -> None:
    path = str(folder.root / folder.paths[0])
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbf" + path.encode() + b"\r\n./x/2.png\r\n")
    source = open_source(tmp_path / "bom.txt")
    assert source.read(0) == folder.read(0)
    assert [source.label(i) for i in range(2)] == [folder.label(0), "x"]
    (tmp_path / "wide.txt").write_bytes(path.encode("utf-16"))
    with pytest.raises(UserError, match="not text in UTF-8"):
        open_source(tmp_path / "wide.txt")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "pipe.txt").write_text("pipe.png\n/dev/zero\n")
    for index in range(2):
        with pytest.raises(OSError, match="not a regular file"):
            open_source(tmp_path / "pipe.txt").read(index)


def test_hidden_files_and_links_beside_shards(folder: ImageFolder, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    write_tar(tmp_path / "s" / "0.tar", {"1.png": folder.read(0)})
    (tmp_path / "s" / ".preview.png").write_bytes(folder.read(0))
    assert open_source(tmp_path / "s").paths == ["0.tar/1.png"]
    os.symlink(folder.root, tmp_path / "s" / "linked")
    assert len(open_source(tmp_path / "s")) == len(folder)


def test_labels_beside_the_images_of_a_shard(folder: ImageFolder, tmp_path: Path) -> None:
    files = {"a.b.png": folder.read(0), "a.cls": b"3\n", "c.png": folder.read(1), "d.txt": b"no", "e.cls": b"7" * 999}
    write_tar(tmp_path / "x.tar", files)
    source = open_source(tmp_path / "x.tar")
    assert [source.label(i) for i in range(2)] == ["3", None]


def whole_tar(folder: ImageFolder, path: Path) -> tuple[bytes, list[int]]:
    """A shard of 10 images, and where the header of each member and the end-of-archive blocks begin."""
    write_tar(path, {folder.paths[i]: folder.read(i) for i in range(10)})
    with tarfile.open(path) as archive:
        starts = [member.offset for member in archive]
        return path.read_bytes(), [*starts, archive.offset]


@pytest.mark.parametrize("cut", ["member's end", "header", "data", "padding", "one record"])
def test_a_shard_that_is_cut_off_is_damaged_not_shorter(folder: ImageFolder, tmp_path: Path, cut: str) -> None:
    path = tmp_path / "cut.tar"
    whole, starts = whole_tar(folder, path)
    sixth = folder.paths[6]
    length, reason, readable = {
        "member's end": (starts[6], f"it ends at byte {starts[6]} without end-of-archive blocks", 6),
        "header": (starts[6] + 100, f"it is cut off inside a header, at byte {starts[6] + 100},", 6),
        "data": (starts[6] + 600, f"it is cut off inside {sixth}", 6),
        "padding": (starts[7] - 1, f"it ends at byte {starts[7] - 1} without end-of-archive blocks", 7),
        "one record": (starts[10], f"it ends at byte {starts[10]} without end-of-archive blocks", 10),
    }[cut]
    path.write_bytes(whole[:length])
    with pytest.raises(UserError) as error:
        open_source(path)
    assert str(error.value) == (
        f"shard {path} is damaged: {reason} after {readable} readable members, the last of which is "
        f"{folder.paths[readable - 1]}; write it again, or set data.allow_damaged_shards=true to pretrain on what can "
        "be read"
    )
    source = open_source(path, allow_damaged=True)
    assert [source.read(i) for i in range(len(source))] == [folder.read(i) for i in range(readable)]


def test_a_header_that_was_overwritten_is_damage(folder: ImageFolder, tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    whole, starts = whole_tar(folder, path)
    path.write_bytes(whole[: starts[4]] + b"x" * 512 + whole[starts[4] + 512 :])
    with pytest.raises(UserError, match=rf"the header at byte {starts[4]} is broken or cut off after 4 readable"):
        open_source(path)


def test_members_behind_zeros_are_not_passed_over(folder: ImageFolder, tmp_path: Path) -> None:
    """A block of zeros where a header was, as a disk leaves it that lost a page, or two archives in one file."""
    path = tmp_path / "x.tar"
    whole, starts = whole_tar(folder, path)
    for content in (
        whole[: starts[4]] + bytes(512) + whole[starts[4] + 512 :],
        whole[: starts[4]] + bytes(10240) + whole,
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"zeros at byte {starts[4]}, .* and more behind them, after 4 readable"):
            open_source(path)
        assert len(open_source(path, allow_damaged=True)) == 4
    path.write_bytes(whole + bytes(10**6))  # filled up
    assert len(open_source(path)) == 10


@pytest.mark.parametrize("writer", ["w", "w|", "GNU tar", "one zero block", "part of a zero block"])
def test_a_shard_with_an_end_is_whole_whoever_wrote_it(folder: ImageFolder, tmp_path: Path, writer: str) -> None:
    """Among them a member that ends exactly at the end of a record of 10240 bytes."""
    data = folder.read(0).ljust(10240 - 512, b"\0")
    (tmp_path / "1.png").write_bytes(data)
    path = tmp_path / "x.tar"
    if writer == "GNU tar":
        subprocess.run(["tar", "-cf", path, "-C", tmp_path, "1.png"], check=True)
    else:
        mode = "w|" if writer == "w|" else "w"  # w|: as WebDataset's TarWriter
        with tarfile.open(path, mode, format=tarfile.USTAR_FORMAT) as archive:
            archive.add(tmp_path / "1.png", "1.png")
    assert path.stat().st_size == 20480
    if "zero block" in writer:
        os.truncate(path, 10240 + (512 if writer == "one zero block" else 100))
    source = open_source(path)
    assert [source.read(i) for i in range(len(source))] == [data]


def test_of_several_shards_the_damaged_one_is_named(
    folder: ImageFolder, tmp_path: Path, adclr: Adclr, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number in range(3):
        whole, starts = whole_tar(folder, data / f"{number}.tar")
        if number:
            (data / f"{number}.tar").write_bytes(whole[: starts[-1 - number]])
    sentence = rf"^2 of 3 shards are damaged, the first one is {data}/1\.tar: it ends at byte"
    with pytest.raises(UserError, match=sentence):
        open_source(data)
    refused = adclr("pretrain", data, "--out", tmp_path / "run", *words(TINY))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.startswith(f"adclr: 2 of 3 shards are damaged, the first one is {data}/1.tar")
    assert not (tmp_path / "run").exists()
    tiny = TINY | {"recipe": "adclr_small", "epochs": 1, "warmup_epochs": 0, "allow_damaged_shards": True}
    run = package.pretrain(data, out=tmp_path / "run", labels=True, **tiny)
    assert f"shard {data}/2.tar is damaged: it ends at byte" in capsys.readouterr().err
    assert run.starts()[0]["images"] == 10 + 9 + 8
    # the index that the run has saved knows of the damage
    with pytest.raises(UserError, match=sentence):
        launch.prepare(None, run.path, overrides={"allow_damaged_shards": False})


def test_shards_that_cannot_be_read(folder: ImageFolder, tmp_path: Path) -> None:
    cut = tmp_path / "cut.tar"
    whole, _ = whole_tar(folder, cut)
    cut.write_bytes(whole[:300])
    with pytest.raises(UserError, match=r"cut\.tar cannot be read as an uncompressed tar file \(truncated header\)"):
        open_source(cut)
    (tmp_path / "zip.tar").write_bytes(b"PK" + bytes(600))
    with pytest.raises(UserError, match=r"zip\.tar cannot be read as an uncompressed tar file"):
        open_source(tmp_path / "zip.tar")
    write_tar(tmp_path / "none.tar", {"a.txt": b"x"})
    with pytest.raises(UserError, match="hold no image"):
        open_source(tmp_path / "none.tar")
    with pytest.raises(UserError, match=r"shard .*gone-1\.tar cannot be read"):
        open_source(tmp_path / "gone-{0..1}.tar".replace("{0", "{1"))
    with pytest.raises(UserError, match="no file is named as"):
        open_source(tmp_path / "gone*.tar")


def test_ranges_in_names() -> None:
    assert expand("a-{008..011}.tar") == ["a-008.tar", "a-009.tar", "a-010.tar", "a-011.tar"]
    assert expand("{1..2}/{3..4}.tar") == ["1/3.tar", "1/4.tar", "2/3.tar", "2/4.tar"]
    for pattern in ("{0..99999999}.tar", "{5..3}.tar"):
        with pytest.raises(UserError, match="check its range"):
            expand(pattern)


def test_a_hugging_face_data_set_on_disk(folder: ImageFolder, tmp_path: Path) -> None:
    import datasets

    kinds = sorted({str(folder.label(i)) for i in range(len(folder))})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=kinds)})
    rows = {
        "image": [{"bytes": folder.read(i), "path": None} for i in range(len(folder))],
        "label": [folder.label(i) for i in range(len(folder))],
    }
    data = datasets.Dataset.from_dict(rows, features=features)
    data.save_to_disk(tmp_path / "one")
    source = open_source(f"hf:{tmp_path}/one")
    assert [source.read(i) for i in range(len(source))] == [folder.read(i) for i in range(len(folder))]
    assert [source.label(i) for i in range(len(source))] == [folder.label(i) for i in range(len(folder))]
    assert len(set(source.keys.tolist())) == len(folder)
    data.select(range(len(folder) - 1, -1, -1)).save_to_disk(tmp_path / "other")
    assert open_source(f"hf:{tmp_path}/other").fingerprint() != source.fingerprint()
    datasets.DatasetDict(train=data, val=data).save_to_disk(tmp_path / "two")
    with pytest.raises(UserError, match=r"name one of them, such as hf:.*/train"):
        open_source(f"hf:{tmp_path}/two")
    assert open_labeled(f"hf:{tmp_path}/two").classes == kinds
    with pytest.raises(UserError, match="is not a data set written by save_to_disk"):
        open_source(f"hf:{folder.root}")
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "words")
    with pytest.raises(UserError, match="no column of images, only text"):
        open_source(f"hf:{tmp_path}/words")
    run = package.pretrain(f"hf:{tmp_path}/one", out=tmp_path / "run", recipe="adclr_small", labels=True, **TINY)
    assert run.finished


def test_every_source_trains_the_same_pixels(folder: ImageFolder, tmp_path: Path) -> None:
    """A shard whose members carry the folder's names has other keys; a list of the same names has the same."""
    names = "\n".join(folder.paths)
    shutil.copytree(folder.root, tmp_path / "here")
    (tmp_path / "here" / "list.txt").write_text(names)
    tiny = {"recipe": "adclr_small", **TINY}
    one = package.pretrain(folder.root, out=tmp_path / "one", **tiny)
    two = package.pretrain(tmp_path / "here" / "list.txt", out=tmp_path / "two", **tiny)
    assert (one.path / "metrics.jsonl").read_text() == (two.path / "metrics.jsonl").read_text()
    write_tar(tmp_path / "x.tar", {folder.paths[i]: folder.read(i) for i in range(len(folder))})
    assert package.pretrain(tmp_path / "x.tar", out=tmp_path / "three", **tiny).finished


def test_an_index_is_kept_and_used_while_it_is_true(
    folder: ImageFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    shutil.copytree(folder.root, data)
    (data / "odd\nname \udcff.png").write_bytes(folder.read(0))
    index = tmp_path / "index.npz"
    found = open_source(data, index)
    assert found.listing is not None
    found.listing.save(index)

    below = next(path for path in data.iterdir() if path.is_dir())
    assert open_source(below, index).paths == ImageFolder(below).paths  # that of the folder above is no use

    def never(root: Path) -> listing.Listing:
        raise AssertionError(f"{root} was searched again")

    search = sources.index_folder
    monkeypatch.setattr(sources, "index_folder", never)
    again = open_source(data, index)
    assert again.paths == found.paths
    assert again.fingerprint() == found.fingerprint()
    some = next(data.rglob("*.png"))
    time.sleep(0.02)
    shutil.copy(some, some.with_name("new.png"))
    with pytest.raises(AssertionError, match="searched again"):
        open_source(data, index)
    monkeypatch.setattr(sources, "index_folder", search)
    assert len(open_source(data, index)) == len(found) + 1
    assert len(open_source(folder.root, index)) == len(folder)  # an index of another folder is no use
    for damage in (b"", b"PK", index.read_bytes()[:200]):
        index.write_bytes(damage)
        assert len(open_source(data, index)) == len(found) + 1


def test_an_index_of_shards(folder: ImageFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        files = {folder.paths[i]: folder.read(i) for i in range(number, 20, 2)} | {"a/1.cls": b"z"}
        write_tar(tmp_path / f"{number}.tar", files)
    index = tmp_path / "index.npz"
    found = open_source(tmp_path, index)
    assert found.listing is not None
    found.listing.save(index)
    monkeypatch.setattr(tar_shards, "index_shards", lambda files: pytest.fail("indexed again"))
    again = open_source(tmp_path, index)
    assert [again.read(i) for i in range(20)] == [found.read(i) for i in range(20)]
    assert [again.label(i) for i in range(20)] == [found.label(i) for i in range(20)]
    monkeypatch.undo()
    write_tar(tmp_path / "1.tar", {"only.png": folder.read(0)})
    os.utime(tmp_path / "1.tar", ns=(1, 1))
    assert len(open_source(tmp_path, index)) == 11


def test_a_run_keeps_its_index(images: Path, tmp_path: Path) -> None:
    run = package.pretrain(images / "train", out=tmp_path / "run", **TINY)
    kept = listing.load_listing(run.path / launch.INDEX)
    assert kept is not None
    assert kept.names == list(ImageFolder(images / "train").paths)
    assert np.array_equal(launch.prepare(None, run.path).source.keys, ImageFolder(images / "train").keys)


def test_a_million_names_are_indexed_and_loaded_in_seconds(tmp_path: Path) -> None:
    names = [f"n{i % 1000:08d}/image_{i:08d}.JPEG" for i in range(1_000_000)]
    started = time.monotonic()
    with listing_builder.Storage([str(tmp_path)]) as storage:
        builder = listing_builder.ListingBuilder(storage)
        builder.add(listing_builder.encode(names))
        made = builder.listing({str(tmp_path / str(i)): (0, i) for i in range(1000)}, {})
    made.save(tmp_path / "index.npz")
    back = listing.load_listing(tmp_path / "index.npz")
    assert back is not None
    assert back.names[-1] == names[-1]
    assert len(back.facts) == 1000
    assert time.monotonic() - started < 10
