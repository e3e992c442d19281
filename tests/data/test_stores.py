"""Images in an S3 store train as those in a folder, whatever the connection does; see also test_store_cache."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

import adclr as package
from adclr.config.parsing import UserError
from adclr.data import file_stamps
from adclr.data.collection import open_source
from adclr.data.sets.classes import open_labeled
from adclr.data.sources import ImageFolder, store_reader, tar_shards
from adclr.system import stores
from store_server import Server
from tiny import TINY

pytestmark = pytest.mark.usefixtures("store")


@pytest.fixture(scope="module")
def folder(images: Path) -> ImageFolder:
    return ImageFolder(images / "train")


@pytest.fixture(scope="module")
def url(store_server: Server, folder: ImageFolder) -> str:
    assert isinstance(folder.root, Path)
    return store_server.put_folder(folder.root, "train")


def write_shards(folder: ImageFolder, out: Path, count: int = 3) -> None:
    out.mkdir()
    for number in range(count):
        with tarfile.open(out / f"part-{number}.tar", "w") as archive:
            for path in folder.paths[number::count]:
                archive.add(Path(folder.root) / path, path)


def metrics(run_path: Path) -> str:
    return (run_path / "metrics.jsonl").read_text()


def test_a_folder_in_a_store_is_the_folder(folder: ImageFolder, url: str) -> None:
    source = open_source(url)
    assert source.paths == folder.paths
    assert source.fingerprint() == folder.fingerprint()
    assert [source.read(i) for i in range(len(source))] == [folder.read(i) for i in range(len(folder))]
    assert [source.label(i) for i in range(len(source))] == [folder.label(i) for i in range(len(folder))]
    with pytest.raises(UserError, match="does not exist, or holds nothing"):
        open_source("s3://pictures/nothing")
    with pytest.raises(UserError, match=r"s3://absent/x\.tar cannot be read \(the object does not exist\)"):
        open_source("s3://absent/x.tar")


TRAINED = {"recipe": "adclr_small", **TINY, "num_workers": 2}


@pytest.fixture(scope="module")
def expected(folder: ImageFolder, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    run = package.pretrain(folder.root, out=tmp_path_factory.mktemp("local") / "run", **TRAINED)
    return (run.path / "backbone.safetensors").read_bytes()


@pytest.mark.parametrize("cache", ["auto", "off"])
def test_faults_of_the_store_change_no_weight(
    store: Server, url: str, expected: bytes, tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three in ten of all requests fails, in each way a server or a network does."""
    monkeypatch.setenv("ADCLR_LOCAL_CACHE_GIB", "0" if cache == "off" else "1")  # so that each epoch reads again
    with store.faults(rate=0.3, kinds=["500", "503", "truncate", "reset"], seed=1):
        run = package.pretrain(url, out=tmp_path / "run", **TRAINED, cache="off")
        counts = store.counts()
    assert all(counts.get(kind) for kind in ("500", "503", "truncate", "reset")), counts
    assert (run.path / "backbone.safetensors").read_bytes() == expected
    assert not (run.path / "quarantine.jsonl").exists()


def write_parquet(folder: ImageFolder, path: Path, indices: range, **options: object) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"bytes": folder.read(i), "path": folder.paths[i]} for i in indices]
    table = pa.table({"image": rows, "label": [folder.label(i) for i in indices]})
    parquet.write_table(table, path, **options)


@pytest.mark.parametrize("kind", ["shards", "pattern", "list", "parquet", "arrow", "local shards", "local parquet"])
def test_every_format_gives_the_weights_of_the_folder(
    store: Server, folder: ImageFolder, expected: bytes, tmp_path: Path, kind: str
) -> None:
    made = tmp_path / "made"
    if "shards" in kind or kind == "pattern":
        write_shards(folder, made)
    elif "list" in kind:
        made.mkdir()
        (made / "all.txt").write_text("\n".join(folder.paths[::-1]))  # its order does not count
        assert isinstance(folder.root, Path)
        store.put_folder(folder.root, "train")
    else:
        made.mkdir()
        for number in range(3):
            rows = range(number, len(folder), 3)
            write_parquet(folder, made / f"{number}.parquet", rows, row_group_size=4)
    if kind == "arrow":
        import pyarrow as pa
        from pyarrow import feather, ipc, parquet

        for number in range(3):  # one of them a stream, as `datasets` writes them
            table = parquet.read_table(made / f"{number}.parquet")
            (made / f"{number}.parquet").unlink()
            if number:
                feather.write_feather(table, made / f"{number}.arrow", compression="uncompressed", chunksize=5)
            else:
                with pa.OSFile(str(made / "0.arrow"), "wb") as file, ipc.new_stream(file, table.schema) as stream:
                    stream.write_table(table)
    data: str | Path = made
    if "local" not in kind and kind != "arrow":
        prefix = "train" if kind == "list" else f"formats-{kind}"
        store.put_folder(made, prefix)
        data = f"s3://pictures/{prefix}" + {"list": "/all.txt", "pattern": "/part-{0..2}.tar"}.get(kind, "")
    source = open_source(data)
    assert len(source) == len(folder)
    index = source.keys.tolist().index(int(folder.keys[7]))
    assert source.read(index) == folder.read(7)
    assert source.label(index) == folder.label(7)
    with store.faults(rate=0.2, kinds=["500", "truncate", "reset"], seed=2):
        run = package.pretrain(data, out=tmp_path / "run", **TRAINED)
    assert (run.path / "backbone.safetensors").read_bytes() == expected


def test_a_store_that_is_down_is_named_and_no_image_is_blamed(
    store: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends, keeps its checkpoint, and the same command goes on to the same weights as without the outage."""
    monkeypatch.setenv("ADCLR_LOCAL_CACHE_GIB", "0")
    monkeypatch.setattr(stores, "PATIENCE_SECONDS", 0.5)
    settings = TRAINED | {"cache": "off", "checkpoint_every_steps": 1, "epochs": 3}
    whole = package.pretrain(url, out=tmp_path / "whole", **settings)
    read, count = stores.read, [0]

    def read_and_fail(*arguments: object) -> bytes:
        count[0] += 1
        if count[0] == 60:
            store.request("PUT", "/_faults", RESETS)
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(stores, "read", read_and_fail)
    with (
        store.faults(),
        pytest.raises(UserError, match=r"^s3://pictures/train/.* cannot be reached \(.*tries\); check"),
    ):
        package.pretrain(url, out=tmp_path / "run", **settings)
    assert not (tmp_path / "run" / "quarantine.jsonl").exists()
    monkeypatch.setattr(stores, "_down", {})
    run = package.pretrain(None, out=tmp_path / "run")
    assert run.starts()[-1]["from_step"] > 0
    assert (run.path / "backbone.safetensors").read_bytes() == (whole.path / "backbone.safetensors").read_bytes()


def test_an_outage_is_no_damage_of_a_table_or_a_shard(
    store: Server, folder: ImageFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADCLR_LOCAL_CACHE_GIB", "0")
    monkeypatch.setattr(stores, "PATIENCE_SECONDS", 0.3)
    write_parquet(folder, tmp_path / "x.parquet", range(8), row_group_size=4)
    url = store.put("outage/x.parquet", (tmp_path / "x.parquet").read_bytes())
    source = open_source(url)
    write_shards(folder, tmp_path / "shards", 1)
    shard = store.put("outage/x.tar", (tmp_path / "shards" / "part-0.tar").read_bytes())
    with store.faults(rate=1, kinds=["truncate"]):
        with pytest.raises(UserError, match=r"x\.parquet cannot be reached"):
            source.read(0)
        with pytest.raises(UserError, match=r"x\.tar cannot be reached"):
            open_source(shard)
    monkeypatch.setattr(stores, "_down", {})
    monkeypatch.setattr(store_reader, "BLOCK", 4096)
    monkeypatch.setattr(store_reader, "BLOCKS_AHEAD", 0)
    read, starts = stores.read, list[int]()

    def read_and_fail(file: stores.StoreFile, start: int = 0, length: int | None = None) -> bytes:
        starts.append(start)
        if start > 8192:  # behind the first headers
            store.request("PUT", "/_faults", RESETS)
        return read(file, start, length)

    with store.faults(), monkeypatch.context() as patched:
        patched.setattr(stores, "read", read_and_fail)
        with pytest.raises(UserError, match=r"^s3://pictures/outage/x\.tar cannot be reached"):
            open_source(shard, allow_damaged=True)
    assert starts[:2] == [0, 4096]
    assert source.read(0) == folder.read(0)


RESETS = b'{"rate": 1, "kinds": ["reset"]}'


def test_a_missing_image_is_listed_and_a_refusal_is_not(store: Server, folder: ImageFolder) -> None:
    assert isinstance(folder.root, Path)
    url = store.put_folder(folder.root, "some")
    source = open_source(url)
    store.delete(f"some/{folder.paths[3]}")
    with pytest.raises(FileNotFoundError):
        source.read(3)
    assert source.lost(3) is None
    with store.faults(rate=1, kinds=["403"]), pytest.raises(UserError, match=r"may not be read.*AWS_"):
        source.read(4)
    for path in folder.paths:
        store.delete(f"some/{path}")
    assert source.lost(3) == url
    with pytest.raises(UserError, match="s3://pictures/some does not exist, or holds nothing"):
        open_source(url)


def test_a_replaced_object_is_noticed(store: Server, folder: ImageFolder, tmp_path: Path) -> None:
    assert isinstance(folder.root, Path)
    url = store.put_folder(folder.root, "replaced")
    run = package.pretrain(url, out=tmp_path / "run", **TRAINED)
    before = file_stamps.read_stamps(open_source(url))
    store.put(f"replaced/{folder.paths[5]}", folder.read(5))  # the same content has the same ETag
    assert not len(file_stamps.find_replaced(before, file_stamps.read_stamps(open_source(url)), "time"))
    altered = bytearray(folder.read(5))
    altered[-20] ^= 1
    store.put(f"replaced/{folder.paths[5]}", bytes(altered))
    source = open_source(url)
    assert file_stamps.find_replaced(before, file_stamps.read_stamps(source), "time").tolist() == [5]
    assert source.read(5) == bytes(altered)  # and not what the local cache has of the same name and size
    with pytest.raises(UserError, match=f"1 image of {url} was replaced, {folder.paths[5]}"):
        package.pretrain(url, out=run.path)


def test_labels_in_a_store_are_probed_and_scored(store: Server, images: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_shards(ImageFolder(images / split), tmp_path / split, 2)
        store.put_folder(tmp_path / split, f"labeled/{split}")
    labeled = open_labeled("s3://pictures/labeled")
    here = open_labeled(images)
    assert labeled.classes == here.classes
    order = np.argsort(labeled.val.source.keys), np.argsort(here.val.source.keys)
    assert labeled.val.labels[order[0]].tolist() == here.val.labels[order[1]].tolist()


def test_a_list_names_local_and_remote_images(store: Server, folder: ImageFolder, url: str, tmp_path: Path) -> None:
    local = Path(folder.root) / folder.paths[0]
    lines = [str(local), f"{url}/{folder.paths[1]}\tspecial", f"{url}/gone.png", f"{store.endpoint}/pictures/train/x"]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    source = open_source(tmp_path / "list.txt")
    source.announce(range(3))
    assert [source.read(i) for i in range(2)] == [folder.read(i) for i in range(2)]
    assert source.label(1) == "special"
    assert [source.stamp(i)[0] for i in range(3)] == [len(folder.read(0)), len(folder.read(1)), -1]
    for index in (2, 3):
        with pytest.raises(FileNotFoundError):
            source.read(index)


def test_a_url_without_a_bucket_and_a_host_that_is_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("s3://", "s3://no bucket/x"):
        with pytest.raises(UserError, match=f"^{url} names no bucket; check the URL$"):
            open_source(url)
    monkeypatch.setattr(stores, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(UserError, match=r"x\.tar cannot be reached \(Cannot connect to host 127\.0\.0\.1:1"):
        open_source("https://127.0.0.1:1/x.tar")


def test_https_reads_lists_and_shards(store: Server, folder: ImageFolder, tmp_path: Path) -> None:
    write_shards(folder, tmp_path / "shards", 2)
    store.put_folder(tmp_path / "shards", "web")
    store.put("web/list.txt", b"part-0.tar.jpg\n")
    base = f"{store.endpoint}/pictures/web"
    with store.faults(rate=0.3, kinds=["500", "503", "truncate", "reset"], seed=4):
        source = open_source(f"{base}/part-{{0..1}}.tar")
        assert sorted(map(source.read, range(len(source)))) == sorted(map(folder.read, range(len(folder))))
    assert open_source(f"{base}/list.txt").stamp(0) == (-1, 0)


def test_a_kept_index_of_shards_is_used_until_they_change(
    store: Server, folder: ImageFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(folder, tmp_path / "shards", 2)
    url, index = store.put_folder(tmp_path / "shards", "indexed"), tmp_path / "index.npz"
    first = open_source(url)
    assert first.listing is not None
    first.listing.save(index)
    with monkeypatch.context() as patched:
        patched.setattr(tar_shards, "index_shards", lambda *_: pytest.fail("indexed again"))
        again = open_source(url, index)
    assert [again.read(i) for i in range(len(again))] == [first.read(i) for i in range(len(first))]
    store.put("indexed/part-2.tar", (tmp_path / "shards" / "part-0.tar").read_bytes())
    assert len(open_source(url, index)) == 32 + 16
    store.delete("indexed/part-2.tar")
    store.put("indexed/part-1.tar", (tmp_path / "shards" / "part-0.tar").read_bytes())
    assert open_source(url, index).fingerprint() != first.fingerprint()


@pytest.mark.parametrize(
    ("scheme", "package_name"), [("gs", "gcsfs"), ("az", "adlfs"), ("s3", "s3fs"), ("hf", "huggingface_hub")]
)
def test_a_missing_package_is_named(scheme: str, package_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_filesystems", {})
    monkeypatch.setitem(sys.modules, package_name, None)
    install = package_name if scheme in ("gs", "az") else r"'adclr\[remote\]'"
    with pytest.raises(
        UserError, match=rf"^{scheme}:// needs {package_name}, which is not installed; run: pip install {install}$"
    ):
        open_source(f"{scheme}://bucket/photos")
