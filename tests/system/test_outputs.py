"""No command replaces a file that it did not write, nor writes among the images it reads."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import adclr as package
from adclr import cli, demo
from adclr.config.parsing import UserError
from adclr.data.collection import open_source
from adclr.data.sources import Files, ImageFolder
from adclr.system import outputs
from adclr.system.outputs import is_searched
from adclr.system.runs import Run
from adclr.training import launch
from adclr.weights import snapshot
from adclr.weights.backbone import architecture, save_backbone
from studied import store_results, study
from tiny import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    save_backbone(folder, architecture(tiny()).build().state_dict(), tiny())
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What little a report needs."""
    folder = Run(tmp_path_factory.mktemp("run"))
    folder.write_settings(tiny())
    for step in range(3):
        folder.append("metrics.jsonl", {"step": step, "epoch": step / 3, "loss": 3.0 - step})
    return folder.path


@pytest.fixture
def command(
    weights: Path, run: Path, images: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> tuple[Callable[..., None], list[str]]:
    """A command that writes into tmp_path, and the files that it writes there."""
    data, name = str(images / "train"), request.param
    last = ImageFolder(data).paths[-1].replace("/", "_").removesuffix(".png")
    arguments, files = {
        "evaluate": (
            ["evaluate", "knn", "--weights", weights, "--data", images, "--out", tmp_path / "q.json", "device=cpu"],
            ["q.json", "q.png"],
        ),
        "doctor": (["doctor", data, "--out", tmp_path], ["doctor.json", "doctor.txt", "contact_sheet.png"]),
        "report": (["report", run, "--out", tmp_path / "page.html"], ["page.html"]),
        "plan": (
            ["plan", "--images", "5000", "--recipe", "adclr_vits16", "--gpu", "h200", "--json", tmp_path / "p.json"],
            ["p.json"],
        ),
        "visualize": (
            ["visualize", "pca", weights, data, "--out", tmp_path, "num_images=2", "device=cpu"],
            ["pca.json", "pca.png", f"0001_{last}.pca.png"],
        ),
        "study": (["study", "STUDY", "--results", tmp_path], ["one.md", "one.json", "one.svg"]),
    }[name]
    if name == "study":
        file = study(tmp_path / "studies", arms={"a": None, "b": {"settings": {"depth": 1}}})
        store_results(tmp_path, file, {("a", 0): 50.0, ("b", 0): 60.0})
        arguments[1] = file
    return (lambda *more: cli.main([*map(str, arguments), *more])), files


ALL = ["evaluate", "doctor", "report", "plan", "visualize", "study"]


@pytest.mark.parametrize("command", ALL, indirect=True)
def test_a_file_of_the_user_is_replaced_only_if_that_is_said(
    command: tuple[Callable[..., None], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work, files = command
    for name in files:
        mine = b"\xff\xd8 a photo" if name.endswith("png") else b'{"mine": 1}'
        (tmp_path / name).write_bytes(mine)
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        with pytest.raises(SystemExit, match="2"):
            work()
        message = capsys.readouterr().err
        assert f"{name} was not written by adclr " in message
        assert "--overwrite" in message
        assert message.count("\n") <= 1 + message.count("\nadclr: ")
        assert (tmp_path / name).read_bytes() == mine
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before  # and nothing beside it
        (tmp_path / name).unlink()
    for name in files:
        (tmp_path / name).write_bytes(b"mine")
    work("--overwrite")
    assert b"mine" not in {(tmp_path / name).read_bytes() for name in files}


@pytest.mark.parametrize("command", ALL, indirect=True)
def test_what_a_command_wrote_it_writes_anew(command: tuple[Callable[..., None], list[str]], tmp_path: Path) -> None:
    work, files = command
    work()
    assert {name for name in files if (tmp_path / name).exists()} == set(files)
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in files}
    work()
    assert all((tmp_path / name).stat().st_mtime_ns > times[name] for name in files)


# -- outputs of version 0.1, which say less --


def without_words(path: Path) -> None:
    """Takes from a file what version 0.1 did not write into it."""
    if path.suffix == ".png":
        with Image.open(path) as image:
            image.save(path)
    elif path.suffix == ".json":
        value = json.loads(path.read_bytes())
        value["provenance"].pop("written_by")
        path.write_text(json.dumps(value, indent=2))
    else:
        path.write_bytes(outputs.AUTHOR.sub(b"", path.read_bytes()))
    assert outputs.read_author(path) is None


@pytest.mark.parametrize("command", ["evaluate", "doctor", "report", "plan", "visualize"], indirect=True)
def test_what_version_0_1_wrote_is_known(
    command: tuple[Callable[..., None], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work, files = command
    work()
    for name in files:
        without_words(tmp_path / name)
    work()
    assert {outputs.read_author(tmp_path / name) for name in files} != {None}
    if len(files) > 1:  # now that the record is of this version, it no longer vouches for what has no words
        without_words(tmp_path / files[-1])
        with pytest.raises(SystemExit, match="2"):
            work()
        assert f"{files[-1]} was not written by" in capsys.readouterr().err


def test_the_files_of_another_command_are_not_taken_for_own(
    weights: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "q.json"
    package.evaluate("knn", out=out, weights=weights, data=images, device="cpu")
    scores = out.read_bytes()
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", "--images", "5000", "--recipe", "adclr_vits16", "--gpu", "h200", "--json", str(out)])
    assert "q.json was not written by adclr plan; choose another --json, or add --overwrite" in capsys.readouterr().err
    assert out.read_bytes() == scores


def test_the_photo_of_the_report_stays_a_photo(weights: Path, images: Path, tmp_path: Path) -> None:
    photo = tmp_path / "photo.jpg"
    Image.new("RGB", (8, 8), "teal").save(photo)
    before = photo.read_bytes()
    with pytest.raises(UserError, match=r"photo\.jpg was not written by adclr evaluate"):
        package.evaluate("knn", out=photo, weights=weights, data=images, device="cpu")
    assert photo.read_bytes() == before
    package.evaluate("knn", out=photo, weights=weights, data=images, device="cpu", overwrite=True)
    assert "scores" in json.loads(photo.read_bytes())


# -- folders that evaluations train in --


def test_a_folder_of_the_user_is_not_trained_in(weights: Path, images: Path, tmp_path: Path) -> None:
    mine = tmp_path / "q" / "model.safetensors"
    mine.parent.mkdir()
    mine.write_bytes(b"mine")
    arguments = {"weights": weights, "data": images, "out": tmp_path / "q.json", "epochs": 1, "device": "cpu"}
    with pytest.raises(UserError, match=r"q was not written by adclr evaluate"):
        package.evaluate("finetune", **arguments)
    assert mine.read_bytes() == b"mine"
    assert [path.name for path in tmp_path.rglob("*")] == ["q", "model.safetensors"]
    package.evaluate("finetune", **arguments, overwrite=True)
    assert mine.read_bytes() != b"mine"
    package.evaluate("finetune", **arguments)  # its own by now
    (tmp_path / "q" / ".lock").write_bytes(b"")  # as version 0.1 left it
    package.evaluate("finetune", **arguments)


def test_a_run_of_pretraining_is_not_trained_in(weights: Path, images: Path, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "photos")
    (tmp_path / "photos" / ".lock").touch()  # which every run has
    with pytest.raises(UserError, match="photos was not written by adclr evaluate"):
        package.evaluate("finetune", weights=weights, data=images, out=tmp_path / "photos.json", device="cpu")
    assert list(Run(tmp_path / "photos").rows("metrics.jsonl"))


# -- exports --


def test_an_export_is_written_anew_unless_somebody_changed_it(weights: Path, tmp_path: Path) -> None:
    out = tmp_path / "made"
    package.export(weights, "safetensors", out)
    (out / "notes.txt").write_text("mine")
    package.export(weights, "safetensors", out)
    (out / "README.md").write_text("# My own card\n")
    with pytest.raises(UserError, match=r"README\.md was changed since adclr export wrote it; .*--overwrite"):
        package.export(weights, "safetensors", out)
    assert (out / "README.md").read_text() == "# My own card\n"
    package.export(weights, "safetensors", out, overwrite=True)
    assert "My own card" not in (out / "README.md").read_text()
    assert (out / "notes.txt").read_text() == "mine"
    assert not list(tmp_path.glob(".*"))


def test_an_export_does_not_move_into_a_folder_of_the_user(weights: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"model was not written by adclr export; .*--overwrite"):
        package.export(weights, "timm", out)
    assert [path.name for path in out.iterdir()] == ["config.json"]
    package.export(weights, "timm", out, overwrite=True)
    assert json.loads((out / "config.json").read_text())["architecture"]
    package.export(weights, "safetensors", out)  # of what was there, what the new one has not is taken away
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "backbone.json",
        "backbone.safetensors",
        "export.json",
    ]


def test_an_export_replaces_neither_an_added_file_nor_one_outside(weights: Path, tmp_path: Path) -> None:
    out, victim = tmp_path / "made", tmp_path / "victim.txt"
    package.export(weights, "safetensors", out)
    (out / "config.json").write_text("mine")  # which only another format has
    with pytest.raises(UserError, match=r"config\.json was not written by adclr export"):
        package.export(weights, "timm", out)
    assert (out / "config.json").read_text() == "mine"
    assert not list(tmp_path.glob(".*"))
    victim.write_text("outside")
    record = json.loads((out / "export.json").read_text())
    record["files"]["../victim.txt"] = snapshot.describe_file(victim)  # in a folder that somebody gave away
    (out / "export.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="was not written by adclr export"):
        package.export(weights, "safetensors", out)
    assert victim.exists()


# -- the demo --


def test_the_demo_leaves_a_picture_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "attention.png").write_bytes(b"mine")
    with pytest.raises(UserError, match=r"attention\.png was not written by adclr demo"):
        demo.run_demo(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["attention.png"]


# -- among the images --


@pytest.fixture
def collection(images: Path, tmp_path: Path) -> Path:
    shutil.copytree(images / "train", tmp_path / "photos")
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(next(iter(sorted((images / "val").rglob("*.png")))), tmp_path / "elsewhere" / "linked.png")
    (tmp_path / "photos" / "more").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "photos"


def test_a_folder_that_is_searched_for_images_is_no_output(collection: Path, tmp_path: Path, weights: Path) -> None:
    before = sorted(collection.rglob("*"))
    data = str(collection)
    for out in (collection, collection / "disc", collection / "new" / "report", tmp_path / "elsewhere"):
        for words in (
            ["doctor", data, "--out", str(out)],
            ["visualize", "pca", str(weights), data, "--out", str(out), "device=cpu"],
            ["embed", str(weights), data, "--out", str(out), "--dense", "device=cpu"],
            ["pretrain", data, "--out", str(out / "run"), "--recipe", "demo"],
        ):
            with pytest.raises(SystemExit, match="2"):
                cli.main(words)
    assert sorted(collection.rglob("*")) == before


def test_pictures_do_not_go_among_images_of_another_collection(
    collection: Path, images: Path, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = next(path for path in sorted((images / "train").iterdir()) if path.is_dir())
    out = shutil.copytree(others, tmp_path / "others")
    before, data, overwrite = sorted(out.iterdir()), str(collection), ["--overwrite"]
    doctor = ["doctor", data, "--out", str(out)]
    visualize = ["visualize", "pca", str(weights), data, "--out", str(out), "num_images=2", "device=cpu"]
    for words in (doctor, visualize):
        with pytest.raises(SystemExit, match="2"):
            cli.main(words)
        assert f"{out} has other images, such as " in capsys.readouterr().err
    assert sorted(out.iterdir()) == before
    for words in (doctor, visualize):
        with suppress(SystemExit):
            cli.main(words + overwrite)
        with suppress(SystemExit):
            cli.main(words)  # into a folder that has its own files by now
        assert "other images" not in capsys.readouterr().err
    assert {"doctor.json", "pca.json"} <= {path.name for path in out.iterdir()}


def test_no_file_goes_among_the_images_either(
    collection: Path, weights: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, data, plan = sorted(collection.rglob("*")), str(collection), ["--recipe", "demo"]
    shutil.copytree(run, tmp_path / "run")
    Run(tmp_path / "run").write_settings(tiny(path=data))
    for folder in (collection, collection / "disc" / "new", tmp_path / "elsewhere"):
        for words in (
            ["embed", str(weights), data, "--out", str(folder / "f.parquet"), "device=cpu"],
            ["plan", data, "--json", str(folder / "p.json"), *plan],
            ["evaluate", "matching", "--weights", str(weights), "--data", data, "--out", str(folder / "q.json")],
            ["report", str(tmp_path / "run"), "--out", str(folder / "page.html")],
        ):
            if folder.name == "elsewhere" and words[0] in ("evaluate", "report"):
                continue  # where a link leads is known only to who has searched
            with pytest.raises(SystemExit, match="2"):
                cli.main(words)
            assert "lies in the collection" in capsys.readouterr().err
    assert sorted(collection.rglob("*")) == before
    assert not list((tmp_path / "elsewhere").glob("*.[!p]*"))


def test_a_run_is_not_among_the_labeled_images_of_its_probe(collection: Path, images: Path, tmp_path: Path) -> None:
    for name in ("data", "held_out"):
        values = {f"probe.{name}": str(collection), "batch_size": 8}
        with pytest.raises(UserError, match=r"lies in the collection .*photos, so"):
            launch.prepare(images / "train", collection / "disc" / "run", "demo", values)
        launch.prepare(images / "train", tmp_path / "run", "demo", values)


def test_a_study_does_not_write_into_its_data(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its results would count as files of labels, so that it never found its scores again."""
    file = study(tmp_path)
    for words in (["--results", str(images / "results")], ["--out", str(images / "runs"), "--results", str(tmp_path)]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["study", str(file), *words, f"photos={images}"])
        assert f"lies in the collection {images}, so" in capsys.readouterr().err


def test_a_folder_has_one_identity_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that does not tell Photos from photos, where the real paths of the two differ."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "Photos").symlink_to("photos")
    monkeypatch.setattr(os.path, "realpath", os.path.abspath)
    assert is_searched(tmp_path / "Photos", [tmp_path / "photos"])
    assert is_searched(tmp_path / "Photos" / "new", [tmp_path / "photos"])
    assert not is_searched(tmp_path / "new", [tmp_path / "photos"])


def test_every_kind_of_collection_knows_what_it_is_searched_in(collection: Path, tmp_path: Path) -> None:
    whole = open_source(collection)
    assert whole.holds(collection)
    assert whole.holds(collection / "disc" / "new")
    assert whole.holds(tmp_path / "elsewhere" / "new")  # a link leads there
    assert not whole.holds(tmp_path)
    assert not whole.holds(tmp_path / "runs")
    assert not whole.holds(collection / ".hidden" / "new")  # which no search enters
    first = sorted(collection.rglob("*.png"))[0]
    named = Files([str(first)])
    assert named.holds(first.parent)
    assert not named.holds(first.parent / "new")  # only these files are read
    (tmp_path / "list.txt").write_text(f"{first}\n")
    assert open_source(tmp_path / "list.txt").holds(first.parent)
    assert not open_source(tmp_path / "list.txt").holds(tmp_path)
    (tmp_path / "shards").mkdir()
    with tarfile.open(tmp_path / "shards" / "a.tar", "w") as archive:
        archive.add(first, "a.png")
    for name in (tmp_path / "shards", f"{tmp_path}/shards/*.tar"):
        assert open_source(name).holds(tmp_path / "shards")
        assert not open_source(name).holds(tmp_path / "elsewhere")
    (tmp_path / "tables").mkdir()
    table = pyarrow.table({"image": [first.read_bytes()]})
    parquet.write_table(table, tmp_path / "tables" / "a.parquet")
    for name in (tmp_path / "tables", tmp_path / "tables" / "a.parquet"):  # with a picture either is a folder of images
        assert open_source(name).holds(tmp_path / "tables")
        assert not open_source(name).holds(tmp_path / "elsewhere")


def test_an_evaluation_writes_no_picture_among_its_images(weights: Path, collection: Path, images: Path) -> None:
    for data, out in ((collection, collection / "disc" / "q.json"), (images, images / "train" / "q.json")):
        with pytest.raises(UserError, match=r"lies in the collection .*; choose another --out"):
            package.evaluate("knn", out=out, weights=weights, data=data, device="cpu")
    assert not list(images.rglob("q.*"))


def test_help_has_overwrite_for_every_command_that_writes(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("demo", "evaluate", "embed", "doctor", "plan", "export", "visualize", "report", "study"):
        with suppress(SystemExit):
            cli.main([name, "--help"])
        assert "--overwrite" in capsys.readouterr().out, name
