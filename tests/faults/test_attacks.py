"""Files that are made to do harm, and files that are damaged at random: an error message each, and nothing else.

`pytest -m "" tests/faults/test_attacks.py` mutates 2000 of each kind; the ordinary tests 150.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import adclr as package
from adclr import report
from adclr.config import parsing
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.system.runs import Run
from adclr.training import checkpoint, job, launch, schedules
from adclr.weights import snapshot
from tiny import TINY, tiny

CANARY = "touched"
STEP = "checkpoints/step_8"


class Harm:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.target}",)


def pickled(target: Path) -> bytes:
    return pickle.dumps(Harm(target))


def torch_saved(target: Path) -> bytes:
    data = io.BytesIO()
    torch.save({"backbone": Harm(target)}, data)
    return data.getvalue()


def npy(target: Path) -> bytes:
    data = io.BytesIO()
    np.save(data, np.array([Harm(target)], dtype=object), allow_pickle=True)
    return data.getvalue()


def npz(target: Path) -> bytes:
    data = io.BytesIO()
    np.savez(data, names=np.array([Harm(target)], dtype=object), facts=np.array([Harm(target)], dtype=object))
    return data.getvalue()


def nested_zip(target: Path) -> bytes:
    inner = npz(target)
    for _ in range(5):
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w") as archive:
            archive.writestr("names.npy", inner)
            archive.writestr("../../escaped.npy", inner)
        inner = data.getvalue()
    return inner


def zip_bomb(_: Path) -> bytes:
    """512 MiB of zeros in half a megabyte."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("names.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (2**29,)})
        for _ in range(2**9):
            file.write(bytes(2**20))
    return data.getvalue()


def yaml_tag(target: Path) -> bytes:
    return f"train: !!python/object/apply:os.system ['touch {target}']\n".encode()


def yaml_new(target: Path) -> bytes:
    return f"train: !!python/object/new:subprocess.Popen [['touch', '{target}']]\n".encode()


def yaml_bomb(_: Path) -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    return "\n".join(lines).encode()


def deep_json(_: Path) -> bytes:
    return b"[" * 200_000


# (the file, what it becomes)
PAYLOADS: list[tuple[str, Callable[[Path], bytes]]] = [
    ("backbone.safetensors", pickled),
    ("backbone.safetensors", torch_saved),
    ("backbone.safetensors", nested_zip),
    ("backbone.safetensors", npy),
    ("backbone.json", pickled),
    ("backbone.json", deep_json),
    ("checkpoints/step_8/student.safetensors", pickled),
    ("checkpoints/step_8/teacher.safetensors", torch_saved),
    ("checkpoints/step_8/optimizer.safetensors", npz),
    ("checkpoints/step_8/centers.safetensors", nested_zip),
    ("checkpoints/step_8/state.json", pickled),
    ("checkpoints/step_8/state.json", deep_json),
    ("checkpoints/step_8/manifest.json", deep_json),
    ("checkpoints/step_8/manifest.json", lambda _: json.dumps({"../../../../x": {"bytes": 1}}).encode()),
    ("index.npz", pickled),
    ("index.npz", npz),
    ("index.npz", nested_zip),
    ("index.npz", zip_bomb),
    ("settings.yaml", yaml_tag),
    ("settings.yaml", yaml_new),
    ("settings.yaml", yaml_bomb),
    ("provenance.json", deep_json),
    ("metrics.jsonl", pickled),
    *((file, deep_json) for file in ("metrics.jsonl", "timing.jsonl", "quarantine.jsonl", "voided.jsonl")),
    ("results.json", deep_json),
]


@pytest.fixture(scope="module")
def made(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package.pretrain(images / "train", out=tmp_path_factory.mktemp("made") / "run", **TINY).path


@contextmanager
def no_growth() -> Iterator[None]:
    """At no moment 200 MB more than at first: the kernel keeps the peak, and forgets the one before if asked to."""

    def peak() -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    yield
    assert peak() - before < 200 * 10**6


def refusal(attempt: Callable[[], object]) -> str:
    """The message of the user's error that it ends with; nothing if it works."""
    try:
        attempt()
    except UserError as error:
        return str(error)
    return ""


def everything_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("number", range(len(PAYLOADS)), ids=[f"{make.__name__} as {file}" for file, make in PAYLOADS])
def test_files_that_would_do_harm_do_none(images: Path, made: Path, tmp_path: Path, number: int) -> None:
    file, make = PAYLOADS[number]
    run = tmp_path / "run"
    shutil.copytree(made, run, symlinks=True)
    (run / file).write_bytes(make(tmp_path / CANARY))
    if file.startswith(STEP) and not file.endswith(snapshot.MANIFEST):
        vouch(run / STEP)
    outside = everything_below(tmp_path) - {f"run/{name}" for name in everything_below(run)}
    attempts: list[Callable[[], object]] = [
        lambda: package.load(run),
        lambda: launch.prepare(images / "train", run),
        lambda: report.write_report([str(run)], run / "report.html"),
        lambda: unfinish(run),
        lambda: package.load(run),
        lambda: resumed(images, run),
    ]
    with no_growth():
        for attempt in attempts:
            message = refusal(attempt)
            assert "\n" not in message
            assert len(message) < 1000
    assert not (tmp_path / CANARY).exists()
    assert everything_below(tmp_path) - {f"run/{name}" for name in everything_below(run)} == outside


def vouch(folder: Path) -> None:
    """Makes the manifest say that all is as it was written, so that what reads the files behind it is met."""
    told = {name: snapshot.describe_file(folder / name) for name in checkpoint.NAMES}
    (folder / snapshot.MANIFEST).write_text(json.dumps(told))


def unfinish(run: Path) -> None:
    for name in ("results.json", "backbone.safetensors", "backbone.json"):
        (run / name).unlink(missing_ok=True)


def resumed(images: Path, run: Path) -> None:
    """Goes on with the run as if it were not finished."""
    (run / "results.json").unlink(missing_ok=True)
    package.pretrain(images / "train", out=run, **TINY)


STATES: list[Any] = [
    [],
    None,
    {},
    *({"step": value} for value in ("x", -5, 0, 7, 9, True, 8.5, 10**30)),
    *({"meter": value} for value in (None, {}, {"sums": ["a"], "void": [1]}, {"sums": [0.0] * 6, "void": []})),
    *({"meter": {"sums": [0.0] * 7, "void": [row]}} for row in ([10**30, *[0.0] * 5], [-1, *[0.0] * 5], [1], 5)),
    *({"micro_batch_size": value} for value in (0, -1, "a", 3, 10**30)),
    *({"processes": value} for value in (0, "a", 3)),
    *({"steps_per_epoch": value} for value in (0, None, 5)),
    {"fingerprint": None},
    {"more": 1},
]


@pytest.mark.parametrize("number", range(len(STATES)), ids=[str(state)[:40] for state in STATES])
def test_a_state_that_cannot_be_is_refused_in_one_sentence(
    images: Path, made: Path, tmp_path: Path, number: int
) -> None:
    run, state = Run(shutil.copytree(made, tmp_path / "run", symlinks=True)), STATES[number]
    file = run.path / STEP / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | state if state else state))
    vouch(run.path / STEP)
    unfinish(run.path)
    with pytest.raises(UserError) as refused:
        package.pretrain(images / "train", out=run.path, **TINY)
    assert "\n" not in str(refused.value)
    assert STEP in str(refused.value) or "steps an epoch" in str(refused.value)


@pytest.mark.parametrize("wrong", ["of one number", "too few", "of nothing known", "of another kind"])
def test_moments_that_do_not_fit_are_refused(made: Path, tmp_path: Path, wrong: str) -> None:
    """The fused kernel reads as many numbers as the weight has, wherever they end."""
    run, settings = Run(shutil.copytree(made, tmp_path / "run", symlinks=True)), tiny()
    file = run.path / STEP / "optimizer.safetensors"
    moments = load_file(file)
    name = next(name for name in moments if name.endswith("blocks.0.mlp.fc1.weight.exp_avg"))
    if wrong == "of one number":
        moments |= {full: value.flatten()[:1].clone() for full, value in moments.items() if "exp_avg" in full}
    elif wrong == "too few":
        del moments[name]
    elif wrong == "of nothing known":
        moments["../../x.exp_avg"] = torch.zeros(1)
    else:
        moments[name.replace("exp_avg", "momentum_buffer")] = moments[name].clone()
    save_file(moments, file)
    vouch(file.parent)
    method = job.build(settings)
    optimizer = schedules.make_optimizer(method.student, settings)
    with pytest.raises(UserError, match=r"optimizer\.safetensors is of another architecture: it (has|lacks) "):
        checkpoint.load(run, method, optimizer)
    assert not optimizer.state


def test_recipes_and_words_are_data(images: Path, tmp_path: Path) -> None:
    for make in (yaml_tag, yaml_new, yaml_bomb, pickled):
        (tmp_path / "r.yaml").write_bytes(make(tmp_path / CANARY))
        with pytest.raises(UserError):
            launch.prepare(images / "train", tmp_path / "run", tmp_path / "r.yaml")
        with pytest.raises(UserError):
            parsing.build(Settings, parsing.parse_words([f"train.epochs={make(tmp_path / CANARY).decode('latin-1')}"]))
    assert not (tmp_path / CANARY).exists()


def test_names_in_shards_lead_nowhere(images: Path, tmp_path: Path) -> None:
    """Members called ../../x.png, /x.png and links to files outside: images are read, nothing is unpacked."""
    shard, secret = tmp_path / "data" / "a.tar", tmp_path / "secret.png"
    shard.parent.mkdir()
    files = sorted((images / "train").rglob("*.png"))
    shutil.copy(files[0], secret)
    with tarfile.open(shard, "w") as archive:
        for number, path in enumerate(files[:16]):
            name = ("../../escaped", str(tmp_path / "absolute"), "..", "plain")[number % 4]
            archive.add(path, f"{name}/{number}.png")
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        archive.addfile(link)
    before = everything_below(tmp_path)
    run = package.pretrain(shard, out=tmp_path / "run", **TINY)
    assert run.finished
    after = everything_below(tmp_path)
    assert {name for name in after - before if not name.startswith("run")} == set()
    assert not any("link.png" in path for path in launch.prepare(shard, run.path).source.paths)


def test_links_in_a_run_are_not_written_through(images: Path, made: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(made, run, symlinks=True)
    out.mkdir()
    (out / "there").write_text('{"step": 1}\n')
    for name in ("metrics.jsonl", "timing.jsonl", "voided.jsonl", "quarantine.jsonl", ".lock", "settings.yaml"):
        kept = (run / name).read_bytes() if (run / name).exists() else None
        (run / name).unlink(missing_ok=True)
        for target in (out / "new", out / "there"):
            (run / name).unlink(missing_ok=True)
            (run / name).symlink_to(target)
            with suppress(UserError, OSError):
                resumed(images, run)
            assert [path.name for path in out.iterdir()] == ["there"], name
            assert (out / "there").read_text() == '{"step": 1}\n', name
        (run / name).unlink(missing_ok=True)
        if kept is not None:
            (run / name).write_bytes(kept)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut, doubled, moved or put in."""
    made = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        place = rng.randrange(len(made) or 1)
        kind = rng.randrange(6)
        if kind == 0 and made:
            made[place] = rng.randrange(256)
        elif kind == 1:
            del made[place : place + rng.choice([1, 4, 100, 10**6])]
        elif kind == 2:
            made[place:place] = rng.randbytes(rng.choice([1, 8, 200]))
        elif kind == 3:
            made[place : place + 8] = rng.choice([b"\xff" * 8, b"\0" * 8, (2**40).to_bytes(8, "little")])
        elif kind == 4:
            made[place:place] = made[place : place + 50]
        else:
            made[place : place + 1] = rng.choice([b"{", b"}", b'"', b"[", b":", b"\n", b"-", b"1e400", b"&a", b"!!"])
    return bytes(made)


def near_the_header(data: bytes, rng: random.Random) -> bytes:
    """Most of a safetensors file is weights, where nothing can go wrong."""
    head = 8 + int.from_bytes(data[:8], "little")
    return mutated(data[:head], rng) + data[head:] if rng.random() < 0.8 else mutated(data, rng)


COUNTS = [150, pytest.param(2000, marks=pytest.mark.full)]


@pytest.mark.parametrize("count", COUNTS)
def test_mutated_weights_are_read_or_refused(made: Path, tmp_path: Path, count: int) -> None:
    whole, rng = (made / "backbone.safetensors").read_bytes(), random.Random(0)
    shutil.copy(made / "backbone.json", tmp_path)
    file, refused = tmp_path / "backbone.safetensors", 0
    with no_growth():
        for _ in range(count):
            file.write_bytes(near_the_header(whole, rng))
            message = refusal(lambda: package.load(file))
            refused += bool(message)
            assert "\n" not in message
    assert refused > 0.6 * count


@pytest.mark.parametrize("count", COUNTS)
def test_mutated_recipes_are_read_or_refused(tmp_path: Path, count: int) -> None:
    texts = [parsing.recipe_text(name).encode() for name in parsing.recipe_names()]
    rng, refused = random.Random(0), 0
    with no_growth():
        for _ in range(count):
            (tmp_path / "r.yaml").write_bytes(mutated(rng.choice(texts), rng))
            message = refusal(lambda: parsing.build(Settings, parsing.load_recipe(str(tmp_path / "r.yaml"))))
            refused += bool(message)
            assert "\n" not in message
    assert refused > 0.2 * count


def test_a_checkpoint_with_a_number_of_a_tensor_too_large_is_refused(made: Path, tmp_path: Path) -> None:
    """A header that promises more than the file holds, and tensors that overlap."""
    shutil.copy(made / "backbone.json", tmp_path)
    file = tmp_path / "backbone.safetensors"
    save_file(load_file(made / "backbone.safetensors"), file)
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = next(iter(header))
    for offsets in ([0, 2**62], [2**63, 2**63 + 4], [4, 0], [0, 4]):
        other = json.dumps(header | {name: header[name] | {"data_offsets": offsets}}).encode()
        file.write_bytes(len(other).to_bytes(8, "little") + other + data[8 + size :])
        with pytest.raises(UserError, match="not a whole safetensors file"):
            package.load(file)
    assert Run(made).finished
