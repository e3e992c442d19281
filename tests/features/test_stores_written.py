"""Weights come from a store; exports and embeddings go there. Credentials go nowhere."""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

import adclr as package
from adclr import cli
from adclr.config.parsing import UserError
from adclr.features import embedding
from adclr.weights.backbone import load_weights
from store_server import BUCKET, Server
from tiny import TINY, Adclr, words


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package.pretrain(
        images / "train", out=tmp_path_factory.mktemp("run") / "run", recipe="adclr_small", **TINY
    ).path


def test_weights_of_a_run_are_read_from_a_store(store: Server, run: Path, images: Path, tmp_path: Path) -> None:
    url = store.put_folder(run, "weights/run")
    here = load_weights(run).fingerprint()
    with store.faults(rate=0.4, kinds=["500", "truncate", "reset"], seed=1):
        assert load_weights(url).fingerprint() == here
    assert load_weights(f"{url}/backbone.safetensors").fingerprint() == here
    more = {name: value for name, value in TINY.items() if not name.startswith("model.")} | {"recipe": "adclr_small"}
    local = package.pretrain(images / "train", out=tmp_path / "local", init=str(run), **more)
    started = package.pretrain(images / "train", out=tmp_path / "more", init=url, **more)
    assert started.starts()[0]["init"] == local.starts()[0]["init"]
    scores = package.evaluate("knn", weights=url, data=str(images), device="cpu")
    assert scores == package.evaluate("knn", weights=str(run), data=str(images), device="cpu")
    with pytest.raises(UserError, match=rf"{url}/none.pth do not exist"):
        load_weights(f"{url}/none.pth")
    with pytest.raises(UserError, match=r"holds neither backbone\.safetensors nor config\.json"):
        load_weights("s3://pictures/nowhere")
    store.put("weights/run/backbone.safetensors", b"no weights")
    with pytest.raises(UserError, match=rf"{url}/backbone\.safetensors is not a whole safetensors file"):
        load_weights(url)


def test_an_export_in_a_store_is_that_of_a_folder(store: Server, run: Path, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/exports/vit"
    package.export(run, to="safetensors", out=tmp_path / "here")
    with store.faults(rate=0.2, kinds=["500", "reset"], seed=3):
        assert package.export(run, to="safetensors", out=url) == url
    names = {path.name for path in (tmp_path / "here").iterdir()}
    for name in names - {"export.json"}:
        assert store.get(f"exports/vit/{name}") == (tmp_path / "here" / name).read_bytes()
    assert load_weights(url).fingerprint() == load_weights(run).fingerprint()
    package.export(run, to="safetensors", out=url)  # nobody has changed it
    store.put("exports/vit/README.md", b"my own words")
    with pytest.raises(UserError, match=rf"{url}/README.md was changed since adclr export wrote it"):
        package.export(run, to="safetensors", out=url)
    assert store.get("exports/vit/README.md") == b"my own words"
    with pytest.raises(UserError, match="cannot be written to; stores that can are s3://"):
        package.export(run, to="safetensors", out="https://host/x")
    assert not list((tmp_path / "cache" / "outgoing").glob("*"))


@pytest.mark.parametrize("out", ["features.parquet", "parts"])
def test_an_embedding_in_a_store_is_that_of_a_disk(
    store: Server, run: Path, images: Path, tmp_path: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyarrow import parquet

    data, url = store.put_folder(images / "val", "val"), f"s3://{BUCKET}/embedded/{out}"
    settings = {"device": "cpu", "part_size": 5}
    package.embed(run, images / "val", tmp_path / out, **settings)
    write, count = embedding.Parts.write, [0]

    def fail_at_third(*arguments: object) -> None:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(embedding.Parts, "write", fail_at_third)
    with pytest.raises(KeyboardInterrupt):
        package.embed(run, data, url, **settings)
    monkeypatch.setattr(embedding.Parts, "write", write)
    with store.faults(rate=0.2, kinds=["503", "reset", "truncate"], seed=3):
        about = package.embed(run, data, url, **settings)
    assert (about["rows"], about["source"]) == (16, data)
    names = [out] if out.endswith(".parquet") else [f"{out}/part-{n:06d}.parquet" for n in range(4)]
    for name in names:
        here, there = parquet.read_table(tmp_path / name), parquet.read_table(io.BytesIO(store.get(f"embedded/{name}")))
        assert here["path"].to_pylist() == there["path"].to_pylist()
        np.testing.assert_array_equal(np.stack(here["vector"].to_numpy()), np.stack(there["vector"].to_numpy()))
    count[0] = -100
    monkeypatch.setattr(embedding.Parts, "write", lambda *_: pytest.fail("it was made again"))
    assert package.embed(run, data, url, **settings)["rows"] == 16
    store.put(f"embedded/{names[0]}.json" if out.endswith(".parquet") else f"embedded/{out}/_embed.json", b"{}")
    with pytest.raises(UserError, match="was not written by adclr embed"):
        package.embed(run, data, url, **settings)
    with pytest.raises(UserError, match="lies in the collection"):
        package.embed(run, data, f"{data}/features.parquet", **settings)


def test_a_run_does_not_lie_in_a_store(store: Server, images: Path, adclr: Adclr, tmp_path: Path) -> None:  # noqa: ARG001
    refused = adclr("pretrain", images, "--out", "s3://pictures/run", *words(TINY))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "a run lies on a disk of this machine, not at s3://pictures/run" in refused.stderr


def test_what_a_command_cannot_do_with_a_store_is_refused_at_once(
    run: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path made of a URL, s3:/bucket/x, would be a folder of that name on this machine."""
    monkeypatch.chdir(tmp_path)
    url, data, scored = "s3://ann:TopSecret1@pictures/x", images / "val", ("--weights", run, "device=cpu")
    commands: dict[str, list[tuple[object, ...]]] = {
        "to which only adclr embed and adclr export write": [
            ("doctor", data, "--out", url),
            ("visualize", "pca", run, data, "--out", url, "device=cpu"),
            ("evaluate", "knn", *scored, "--data", images, "--out", f"{url}.json"),
            ("report", run, "--out", f"{url}.html"),
            ("demo", "--out", url),
            ("study", "main", "--results", url),
        ],
        "imagenette=s3://pictures/x is in a store; copy it to a disk that all machines of the cluster share": [
            ("study", "main", f"imagenette={url}", "--results", tmp_path / "results", "--launcher", "slurm")
        ],
    }
    for message, lines in commands.items():
        for line in lines:
            with pytest.raises(SystemExit) as error:
                cli.main([str(word) for word in line])
            text = capsys.readouterr().err
            assert (error.value.code, text.count("\n"), "TopSecret1" in text) == (2, 1, False), line
            assert re.search(message, text), text
    assert not list(tmp_path.iterdir())


def test_a_bucket_to_write_to_that_is_not_there_is_named(store: Server, run: Path) -> None:
    assert store.port
    url = "s3://absent/weights"
    with pytest.raises(UserError, match=f"^{url}/README.md cannot be written, for its bucket does not exist; make it"):
        package.export(run, to="safetensors", out=url)


def test_credentials_are_in_no_file_and_no_output(
    store: Server,
    run: Path,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the environment, of a URL with a password, and of a signed one; with and without an error."""
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for path in sorted((images / "train").rglob("*.png")):
            archive.add(path, path.relative_to(images / "train"))
    store.put("signed/x.tar", (tmp_path / "x.tar").read_bytes())
    clean = f"http://127.0.0.1:{store.port}/{BUCKET}/signed/x.tar"
    web = f"{clean.replace('//', '//ann:TopSecret1@')}?X-Amz-Signature=TopSecret2&X-Amz-Credential=TopSecret3"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "TopSecret4")
    url, out = store.put_folder(run, "signed/run"), tmp_path / "out"
    missing = web.replace("x.tar", "missing.tar")
    commands: list[tuple[object, ...]] = [
        ("pretrain", web, "--out", out / "run", "--recipe", "adclr_small", *words(TINY)),
        ("doctor", web, "--out", out / "doctor", "num_workers=2"),
        ("plan", web, "--recipe", "adclr_small", "--json", out / "plan.json", *words(TINY)),
        ("embed", out / "run", web, "--out", out / "features.parquet", "device=cpu"),
        ("export", out / "run", "--to", "safetensors", "--out", out / "export"),
        ("evaluate", "knn", "--weights", url, "--data", images, "--out", out / "knn.json", "device=cpu"),
        ("doctor", missing, "--out", out / "doctor2"),
        ("pretrain", missing.replace(".tar", ".txt"), "--out", out / "run2"),
    ]
    for command in commands:
        monkeypatch.setattr(sys, "argv", ["adclr", *map(str, command)])
        try:
            cli.main()
        except SystemExit as end:
            assert (end.code, "missing" in str(command[1])) == (2, True), capsys.readouterr().err  # noqa: PT017
    said = "".join(capsys.readouterr())
    assert "TopSecret" not in said
    for name in ("missing.tar", "missing.txt"):
        assert clean.replace("x.tar", name) in said
    written = [path for path in [*out.rglob("*"), *(tmp_path / "cache").rglob("*")] if path.is_file()]
    assert len(written) > 20
    assert [path for path in written if b"TopSecret" in path.read_bytes()] == []
    assert clean in json.loads((out / "run" / "provenance.json").read_text())[0]["command"]
