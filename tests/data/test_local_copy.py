"""Data sets of labeled pixels and objects in a store: copied once to the local cache, and then as on a disk."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import adclr as package
from adclr import cli
from adclr.config.parsing import UserError
from adclr.data.sets.davis import open_davis
from adclr.data.sets.pixels import open_segmented
from adclr.data.sets.public import open_set
from adclr.system import stores
from adclr.system.stores import StoreFile, local_copy
from adclr.system.stores.local_copy import local_folder
from dense_scenes import segmented
from store_server import BUCKET, Server
from tiny import TINY


@pytest.fixture(autouse=True)
def nothing_held(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process uses no copy before a test, and none after it."""
    monkeypatch.setattr(local_copy, "_held", {})
    yield
    release()


def release() -> None:
    """Stop using all copies, as the end of this process does."""
    for handle in local_copy._held.values():
        os.close(handle)
    local_copy._held.clear()


def files_below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def pixels(store: Server, tmp_path: Path) -> tuple[Path, str]:
    folder = segmented(tmp_path / "pixels", 3, 2, 24)
    return folder, store.put_folder(folder, f"{tmp_path.name}/pixels")


def test_a_copy_is_the_folder_and_is_made_once(store: Server, pixels: tuple[Path, str]) -> None:
    folder, url = pixels
    with store.faults(rate=0.3, kinds=["500", "truncate", "reset"], seed=1):
        copy = local_folder(url)
    assert files_below(copy) == files_below(folder)
    release()  # as another command
    with store.faults():
        assert local_folder(f"{url}/") == copy
        assert store.counts()["requests"] == 1  # the listing


def test_scores_are_those_of_the_folder(
    pixels: tuple[Path, str], images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an evaluation, of the probe of a training, and of a study."""
    folder, url = pixels
    run = package.pretrain(images / "train", out=tmp_path / "run", **(TINY | {"epochs": 1, "warmup_epochs": 0}))
    scored = {"weights": str(run.path), "device": "cpu", "size": 16}
    here = package.evaluate("incontext", data=str(folder), **scored)
    assert package.evaluate("incontext", data=url, **scored) == here
    settings = TINY | {"epochs": 1, "warmup_epochs": 0}
    rows = []
    for name, data in (("disk", str(folder)), ("store", url)):
        probed = package.pretrain(images / "train", out=tmp_path / name, **settings, **{"probe.pixels": data})
        rows.append([row["incontext_miou"] for row in probed.rows("metrics.jsonl") if "incontext_miou" in row])
    assert len(rows[0]) == 2
    assert rows[0] == rows[1]
    capsys.readouterr()
    evaluation = {"name": "incontext", "data": "labels", "score": "incontext_miou", "settings": {"size": 16}}
    outline = {"title": "T", "data": "photos/train", "recipe": "demo", "evaluations": {"mIoU": evaluation}}
    outline["arms"] = {"untrained": {"untrained": True, "settings": {"model.dim": 24}}}
    (tmp_path / "x.yaml").write_text(json.dumps(outline))
    tables = []
    for number, data in enumerate((str(folder), url)):
        words = ["study", str(tmp_path / "x.yaml"), "--out", str(tmp_path / f"study{number}")]
        cli.main([*words, "--results", str(tmp_path / f"results{number}"), f"labels={data}", f"photos={images}"])
        tables.append(re.findall(r"^\| untrained.*\d.*$", capsys.readouterr().out, re.MULTILINE))
    assert tables[0] == tables[1] != []


def test_a_changed_data_set_is_another_copy(store: Server, pixels: tuple[Path, str]) -> None:
    folder, url = pixels
    first = local_folder(url)
    before = files_below(first)
    (folder / "classes.txt").write_text("other\nnames\n")
    store.put(f"{url.removeprefix(f's3://{BUCKET}/')}/classes.txt", b"other\nnames\n")
    second = local_folder(url)
    assert second != first
    assert files_below(second) == files_below(folder)
    assert files_below(first) == before  # a command that reads it goes on


def test_an_interrupted_copy_is_completed(pixels: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, url = pixels
    read, fetched, lock = stores.read, list[str](), threading.Lock()

    def interrupted(file: StoreFile, *part: int) -> bytes:
        with lock:
            fetched.append(file.url)
            if len(fetched) == 5:
                raise KeyboardInterrupt
        return read(file, *part)

    monkeypatch.setattr(stores, "CONNECTIONS", 2)
    monkeypatch.setattr(stores, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        local_folder(url)
    whole = set(fetched[:4])
    fetched.clear()
    monkeypatch.setattr(stores, "read", lambda file, *part: (fetched.append(file.url), read(file, *part))[1])
    copy = local_folder(url)
    assert files_below(copy) == files_below(folder)
    assert not whole & set(fetched)


def test_copies_not_in_use_make_room_and_a_larger_one_is_refused(
    store: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [f"s3://{BUCKET}/{tmp_path.name}/{name}" for name in "abc"]
    for name in "abc":
        store.put(f"{tmp_path.name}/{name}/file", bytes(600_000))
    monkeypatch.setenv("ADCLR_LOCAL_CACHE_GIB", str(1_500_000 / 2**30))
    first, second = local_folder(urls[0]), local_folder(urls[1])
    third = local_folder(urls[2])  # both others are in use: none is deleted
    assert all(folder.exists() for folder in (first, second, third))
    release()
    again = local_folder(urls[0])
    assert again == first
    store.put(f"{tmp_path.name}/d/file", bytes(600_000))
    fourth = local_folder(f"s3://{BUCKET}/{tmp_path.name}/d")
    assert [folder.exists() for folder in (first, second, third, fourth)] == [True, False, False, True]
    store.put(f"{tmp_path.name}/large/file", bytes(1_600_000))
    large = f"s3://{BUCKET}/{tmp_path.name}/large"
    for value, size in (("0.001", "0.001"), ("0", "0")):
        monkeypatch.setenv("ADCLR_LOCAL_CACHE_GIB", value)
        message = rf"^{large} holds 0\.00149 GiB, which are copied to the local cache of {size} GiB; set ADCLR_LOCAL_C"
        with pytest.raises(UserError, match=message):
            local_folder(large)


def test_two_processes_make_one_copy(store: Server, pixels: tuple[Path, str]) -> None:
    folder, url = pixels
    code = f"from adclr.system.stores.local_copy import local_folder; print(local_folder({url!r}))"
    with store.faults(latency=0.02):
        processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in "ab"]
        paths = {process.communicate(timeout=120)[0].strip() for process in processes}
        requests = store.counts()["requests"]
    assert len(paths) == 1
    assert files_below(Path(paths.pop())) == files_below(folder)
    assert requests <= 2 + len(files_below(folder)) + 2  # two listings, each object once


def test_what_is_wrong_is_said_of_the_url(pixels: tuple[Path, str], tmp_path: Path) -> None:
    _, url = pixels
    with pytest.raises(UserError, match=f"^{url}/none does not exist or holds nothing; check the URL$"):
        open_segmented(f"{url}/none")
    with pytest.raises(UserError, match=f"^{url}/images ") as error:
        open_segmented(f"{url}/images")
    assert str(tmp_path / "cache") not in str(error.value)
    with pytest.raises(UserError, match=f"^folder {url}/JPEGImages/480p does not exist; videos are laid out as DAVIS"):
        open_davis(url)
    with pytest.raises(UserError, match=f"^{url} does not hold cifar10 as it is published"):
        open_set("cifar10", url)


@pytest.mark.parametrize("name", ["../x", "a/../../x", "a//x", "./x", "a\0x"])
def test_objects_whose_names_lead_elsewhere_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "list_files", lambda url: [StoreFile(f"{url}/{name}", 1, 1)])
    with pytest.raises(UserError, match=r"which is no name of a file below a folder; rename it$"):
        local_folder("s3://pictures/pixels")


def test_a_disk_without_room_is_named(
    pixels: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local_copy, "_fetch", full)
    with pytest.raises(UserError, match=r"cannot be copied to .* \(No space left on device\); set ADCLR_LOCAL"):
        local_folder(pixels[1])
    shutil.rmtree(tmp_path / "cache")
