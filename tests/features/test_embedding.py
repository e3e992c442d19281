"""Features on disk: what the network makes of each image alone, every row once, whatever happens on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tarfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file

import adclr as package
from adclr import cli
from adclr.config.parsing import UserError, free_settings
from adclr.data.decode import Decoder
from adclr.data.sources import ImageFolder
from adclr.features import embedding, embedding_files, reader
from adclr.features.embedding import EmbeddingSettings, Network
from adclr.features.embedding_files import Parts
from adclr.features.reader import SameSize, center_crop, whole_image
from adclr.weights.backbone import Weights, architecture, architecture_of, load_weights, save_backbone
from tiny import Adclr, adclr_command, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = [(24, 40), (40, 24), (24, 24), (9, 33), (24, 40), (17, 17), (50, 40)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViT of width 16 for images of 16 pixels in patches of 4, with all its numbers drawn."""
    folder = tmp_path_factory.mktemp("weights")
    settings = tiny(data__mean=(0.3, 0.4, 0.5))
    torch.manual_seed(1)
    state = {
        name: torch.randn_like(tensor) * 0.3 for name, tensor in architecture(settings).build().state_dict().items()
    }
    save_backbone(folder, state, settings)
    return folder / "backbone.safetensors"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """21 images of seven sizes in two folders."""
    rng = np.random.default_rng(0)
    for number in range(21):
        height, width = SIZES[number % len(SIZES)]
        path = tmp_path / "photos" / f"c{number % 2}" / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(path)
    return tmp_path / "photos"


def rows_of(path: Path) -> dict[str, np.ndarray]:
    table = pq.read_table(path)
    assert table.column_names == ["path", "vector"]
    paths = table["path"].to_pylist()
    assert len(set(paths)) == len(paths)
    vectors = table["vector"].combine_chunks()
    flat = vectors.values.to_numpy(zero_copy_only=False)
    return dict(zip(paths, flat.reshape(len(paths), -1), strict=True))


def maps_of(folder: Path) -> dict[str, np.ndarray]:
    found = {}
    for line in (folder / "index.jsonl").read_text().splitlines():
        row = json.loads(line)
        shape = (row["height"], row["width"], 16)
        if row["shard"].endswith(".npy"):
            patches = np.load(folder / row["shard"], mmap_mode="r")
            found[row["path"]] = patches[row["key"] : row["key"] + shape[0] * shape[1]].reshape(shape)
        else:
            found[row["path"]] = load_file(folder / row["shard"])[row["key"]]
        assert found[row["path"]].shape == shape
    return found


loaded_once = cache(load_weights)


@torch.no_grad()
def tokens_of(weights: Path, photos: Path, path: str, framing: reader.Framing) -> Any:
    """One image alone, in float32."""
    loaded = loaded_once(weights)
    image = Decoder()((photos / path).read_bytes())
    made = torch.from_numpy(reader.resize(image, framing(*image.shape[1:]))).float() / 255
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (loaded.mean, loaded.std))
    return loaded.vit(((made - mean) / std).unsqueeze(0))


@pytest.mark.parametrize("vector", ["cls", "mean_patch", "both"])
def test_vectors_are_what_the_network_makes_of_each_image(
    weights: Path, photos: Path, tmp_path: Path, vector: str
) -> None:
    about = package.embed(weights, photos, out=tmp_path / "f.parquet", vector=vector, part_size=8, batch_size=5)
    assert (about["rows"], about["unreadable"], about["dim"]) == (21, 0, 32 if vector == "both" else 16)
    found = rows_of(tmp_path / "f.parquet")
    assert list(found) == list(ImageFolder(photos).paths)  # in the order of the collection
    for path, values in found.items():
        tokens = tokens_of(weights, photos, path, center_crop((16, 16)))
        expected = {"cls": tokens.cls[0], "mean_patch": tokens.patches[0].mean(dim=0)}
        wanted = torch.cat(list(expected.values())) if vector == "both" else expected[vector]
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, wanted.numpy(), atol=1e-5 * wanted.norm().item())
    assert json.loads((tmp_path / "f.parquet.json").read_text())["rows"] == 21
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.parquet", "f.parquet.json", "photos"]


@pytest.mark.parametrize(
    ("settings", "framing"),
    [
        ({"size": 24}, center_crop((24, 24))),
        ({"size": None}, whole_image(None, 4, 2048)),
        ({"size": 12, "framing": "whole", "max_side": 20}, whole_image(12, 4, 20)),
    ],
)
def test_vectors_at_other_sizes(
    weights: Path, photos: Path, tmp_path: Path, settings: dict[str, Any], framing: reader.Framing
) -> None:
    package.embed(weights, photos, out=tmp_path / "f.parquet", normalize=True, dtype="float16", **settings)
    for path, values in rows_of(tmp_path / "f.parquet").items():
        assert values.dtype == np.float16
        wanted = F.normalize(tokens_of(weights, photos, path, framing).cls[0], dim=0)
        np.testing.assert_allclose(values, wanted.numpy(), atol=1e-3)


@pytest.mark.parametrize(
    ("format_", "settings", "framing"),
    [
        ("safetensors", {"size": None}, whole_image(None, 4, 2048)),
        ("npy", {"size": 32, "dtype": "float32", "part_size": 4}, whole_image(32, 4, 2048)),
        ("safetensors", {"framing": "crop", "normalize": True}, center_crop((16, 16))),
    ],
)
def test_patch_maps_are_of_any_size(
    weights: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format_: str,
    settings: dict[str, Any],
    framing: reader.Framing,
) -> None:
    monkeypatch.setattr(embedding, "MAX_TOKENS", 200)  # groups are cut, and several go together
    about = package.embed(weights, photos, out=tmp_path / "maps", dense=True, format=format_, batch_size=9, **settings)
    assert about["rows"] == 21
    found = maps_of(tmp_path / "maps")
    assert list(found) == list(ImageFolder(photos).paths)
    for path, values in found.items():
        image = Decoder()((photos / path).read_bytes())
        frame = framing(*image.shape[1:])
        expected = tokens_of(weights, photos, path, framing).patches[0].view(frame.height // 4, frame.width // 4, 16)
        expected = F.normalize(expected, dim=-1) if "normalize" in settings else expected
        assert values.dtype == settings.get("dtype", "float16")
        np.testing.assert_allclose(values, expected.numpy(), atol=1e-5 if values.dtype == np.float32 else 4e-3)


def test_results_do_not_hang_on_batches_or_threads(weights: Path, photos: Path, tmp_path: Path) -> None:
    found = []
    for batch_size, workers, size in ((1, 1, 8192), (4, 3, 8192), (21, 2, 5)):
        out = tmp_path / f"{batch_size}.parquet"
        package.embed(weights, photos, out=out, batch_size=batch_size, num_workers=workers, part_size=size, size=None)
        found.append(rows_of(out))
    for other in found[1:]:
        assert list(other) == list(found[0])
        for path, values in other.items():
            assert np.abs(values - found[0][path]).max() <= 1e-5 * np.linalg.norm(values)


def test_portions_hold_every_image_once_and_few_tokens(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "MAX_TOKENS", 100)
    network = Network(load_weights(weights), embedding.EmbeddingSettings(), True, torch.device("cpu"))
    shapes = [(16, 16, 7), (4, 4, 40), (80, 40, 2), (8, 8, 3)]  # 17, 2, 201 and 5 tokens
    groups, first = [], 0
    for height, width, count in shapes:
        groups.append(
            SameSize(np.arange(first, first + count), torch.zeros(count, 3, height, width, dtype=torch.uint8))
        )
        first += count
    portions = list(network._portions(groups))
    assert [int(i) for some in portions for group in some for i in group.indices] == list(range(52))
    for some in portions:
        tokens = [len(g.indices) * (1 + g.pixels.shape[2] * g.pixels.shape[3] // 16) for g in some]
        assert sum(tokens) <= 100 or [len(g.indices) for g in some] == [1]
    assert len(portions) < 10


def test_any_source_is_taken_and_any_name(weights: Path, photos: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(photos / "c0", "c0")
    package.embed(weights, tmp_path / "a.tar", out=tmp_path / "tar.parquet")
    assert next(iter(rows_of(tmp_path / "tar.parquet"))).startswith("a.tar/c0/")
    odd = os.fsencode(photos) + b"/caf\xe9.png"
    shutil.copy(photos / "c0" / "00.png", odd)
    (tmp_path / "list.txt").write_bytes(b"photos/c1/01.png\n" + os.fsencode("photos/") + b"caf\xe9.png\n")
    package.embed(weights, tmp_path / "list.txt", out=tmp_path / "folder", part_size=1)
    assert list(rows_of(tmp_path / "folder")) == ["photos/c1/01.png", "photos/caf\\udce9.png"]  # a folder is a table
    assert (tmp_path / "folder" / "part-000001.parquet").exists()


# -- stopped and gone on with --

KILLER = """
import os, signal, sys
import adclr.features.embedding_files as p
from adclr.cli import main
where = sys.argv[1]
def dead(at, real):
    count = [0]
    def stop(*words, **options):
        count[0] += 1
        if count[0] == at: os.kill(os.getpid(), signal.SIGKILL)
        return real(*words, **options)
    return stop
if where == "rename": os.replace = dead(4, os.replace)  # after what is told at the start, a part and its record
if where == "record": p.write_json = dead(3, p.write_json)
if where == "merge":
    join = p._join
    p._join = lambda path, files: (join(path, files[:2]), os.kill(os.getpid(), signal.SIGKILL))
main(sys.argv[2:])
"""


@pytest.mark.parametrize("where", ["rename", "record", "merge"])
def test_a_killed_embedding_goes_on(
    weights: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Killed with half a part on the disk, between a part and its record, and while parts are put together."""
    settings = {"part_size": 4, "batch_size": 4}
    package.embed(weights, photos, out=tmp_path / "whole.parquet", **settings)
    out = tmp_path / "f.parquet"
    words = ["embed", weights, photos, "--out", out, *(f"{name}={value}" for name, value in settings.items())]
    killed = adclr_command(where, *words, program=KILLER, OMP_NUM_THREADS="1")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not out.exists()
    done = sorted((tmp_path / "f.parquet.parts" / "_done").glob("*.json"))
    files = sorted(path.name for path in (tmp_path / "f.parquet.parts").glob("*part*"))
    assert (len(done), len(files)) == {"rename": (1, 2), "record": (1, 2), "merge": (6, 6)}[where]
    assert (".part-000001.parquet.tmp" in files) == (where == "rename")
    seen: list[int] = []
    real = Parts.write
    monkeypatch.setattr(Parts, "write", lambda self, number, *rest: (seen.append(number), real(self, number, *rest))[1])
    package.embed(weights, photos, out=out, **settings)
    assert seen == list(range(len(done), 6))  # what was done is not done again
    expected = rows_of(tmp_path / "whole.parquet")
    assert list(rows_of(out)) == list(expected)
    for path, values in rows_of(out).items():
        np.testing.assert_allclose(values, expected[path], atol=1e-5)
    assert not (tmp_path / "f.parquet.parts").exists()


def test_a_full_disk_is_one_sentence_and_no_loss(
    weights: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = embedding_files._write_safetensors, []

    def full(path: Path, rows: Any) -> Any:
        written.append(path)
        if len(written) == 3:
            path.write_bytes(b"half")
            raise SafetensorError("No space left on device")
        return real(path, rows)

    monkeypatch.setattr(embedding_files, "_write_safetensors", full)
    settings: dict[str, Any] = {"dense": True, "part_size": 4, "batch_size": 4}
    with pytest.raises(UserError, match=r"part-000002.safetensors cannot be written \(No space left on device\)"):
        package.embed(weights, photos, out=tmp_path / "maps", **settings)
    assert not any((tmp_path / "maps").glob(".*.tmp"))
    package.embed(weights, photos, out=tmp_path / "maps", **settings)
    assert len(written) == 7  # the third a second time
    assert list(maps_of(tmp_path / "maps")) == list(ImageFolder(photos).paths)


def test_what_is_finished_is_left_alone_and_anything_else_refused(weights: Path, photos: Path, tmp_path: Path) -> None:
    out, maps = tmp_path / "f.parquet", tmp_path / "maps"
    first = package.embed(weights, photos, out=out)
    before = out.stat().st_mtime_ns
    assert package.embed(weights, photos, out=out, batch_size=3) == first
    assert out.stat().st_mtime_ns == before
    package.embed(weights, photos, out=maps, dense=True)
    other = tmp_path / "other" / "backbone.safetensors"
    shutil.copytree(weights.parent, other.parent)
    save_file({name: tensor * 1.01 for name, tensor in load_tensors(weights).items()}, other)
    for changes, message in (
        ({"vector": "both"}, "made with vector=cls where both was asked for"),
        ({"weights": other}, "made with other weights"),
        ({"out": maps}, "dense=True"),
        ({"out": photos}, "lies in the collection"),
        ({"out": weights.parent}, r"was not written by adclr embed; choose another --out, or add --overwrite"),
        ({"out": tmp_path / "f.parquet.json"}, "is a file; give the name of a folder"),
    ):
        with pytest.raises(UserError, match=message):
            package.embed(**{"weights": weights, "images": photos, "out": out} | changes)
    (photos / "c0" / "00.png").unlink()
    with pytest.raises(UserError, match="made with other images"):
        package.embed(weights, photos, out=out)


def test_a_setting_may_differ_on_resume_if_its_field_says_so(weights: Path) -> None:
    free = free_settings(EmbeddingSettings, "resume")
    assert free == {"batch_size", "num_workers", "device", "check", "shared"}
    facts = Network(load_weights(weights), EmbeddingSettings(), False, torch.device("cpu")).facts()
    assert set(EmbeddingSettings.model_fields) - set(facts) == free


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    mine = Parts(tmp_path / "f.parquet", "parquet", 21, 8192, {"weights": "x"})
    with mine.open(), pytest.raises(UserError, match="another process is writing"), mine.open():
        pass
    assert not mine.folder.exists()  # nothing came of it


def test_unreadable_images_are_listed_beside(adclr: Adclr, weights: Path, photos: Path, tmp_path: Path) -> None:
    bad = [photos / "c0" / "00.png", photos / "c1" / "13.png", photos / "c1" / "19.png"]
    for path in bad:
        path.write_bytes(path.read_bytes()[:60])
    done = adclr("embed", weights, photos, "--out", tmp_path / "f.parquet", "part_size=1", "batch_size=4")
    assert done.returncode == 0, done.stderr
    assert "3 images could not be read and were left out" in done.stdout
    assert len(rows_of(tmp_path / "f.parquet")) == 18
    listed = [json.loads(line) for line in (tmp_path / "f.parquet.unreadable.jsonl").read_text().splitlines()]
    assert [row["path"] for row in listed] == [str(path.relative_to(photos)) for path in bad]
    assert all(row["reason"] for row in listed)
    for path in photos.rglob("*.png"):
        path.write_bytes(b"broken")
    for dense, out in ((False, tmp_path / "g.parquet"), (True, tmp_path / "maps")):
        with pytest.raises(UserError, match="none of the 21 images can be read"):
            package.embed(weights, photos, out=out, dense=dense)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] in "gm") == []


def test_bad_input_is_one_sentence_and_leaves_nothing(
    weights: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(weights.parent, broken)
    (broken / "backbone.safetensors").write_bytes(weights.read_bytes()[:2000])
    huge = tmp_path / "huge"
    shutil.copytree(weights.parent, huge)
    state = load_tensors(weights)
    save_file(state | {"norm.weight": state["norm.weight"] * 1e6}, huge / "backbone.safetensors")
    out = tmp_path / "made" / "f.parquet"
    for changes, message in (
        ({"size": 18}, "size=18 is not divisible by these weights' patches of 4; set size=16"),
        ({"size": None, "framing": "crop"}, "size=null gives none"),
        ({"format": "npy"}, "format is a setting of --dense"),
        ({"dense": True, "vector": "both"}, "vector is a setting without --dense"),
        ({"dense": True}, "give that of a folder"),
        ({"weights": tmp_path / "nowhere"}, "do not exist"),
        ({"weights": broken}, "not a whole safetensors file"),
        ({"images": tmp_path / "nowhere"}, "does not exist"),
        ({"weights": huge, "dtype": "float16"}, "too large for dtype=float16"),
        ({"out": photos / "c0" / "00.png" / "f"}, "is a file"),
        ({"vectr": "cls"}, "did you mean 'vector'"),
        ({"device": "cuda"}, "no GPU here"),
    ):
        if changes.get("device") and torch.cuda.is_available():
            continue
        with pytest.raises(UserError, match=message):
            package.embed(**{"weights": weights, "images": photos, "out": out} | changes)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'adclr\[embed\]'"):
        package.embed(weights, photos, out=out)
    assert not any((tmp_path / "made").rglob("*"))


def test_the_command_says_what_is_missing(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["embed", str(weights)])
    assert "IMAGES is missing; write adclr embed W IMAGES --out features.parquet" in capsys.readouterr().err
    cli.main(["embed", "--help"])
    assert "mean_patch" in capsys.readouterr().out


def test_weights_have_fingerprints(weights: Path) -> None:
    loaded = load_weights(weights)

    first = loaded.fingerprint()
    assert load_weights(weights).fingerprint() == first
    assert Weights(loaded.vit, (0.5, 0.5, 0.5), loaded.std).fingerprint() != first
    other = architecture_of(loaded.vit).model_copy(update={"norm_eps": 1e-5}).build().eval()
    other.load_state_dict(loaded.vit.state_dict())
    assert replace(loaded, vit=other).fingerprint() != first
    with torch.no_grad():
        loaded.vit.cls_token[0, 0, 0] += 1e-3
    assert loaded.fingerprint() != first
