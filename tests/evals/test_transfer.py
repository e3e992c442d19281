"""One command over several data sets, public ones as they lie on disk; and the same numbers from one process or two."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import adclr as package
from adclr import cli
from adclr.config import parsing
from adclr.config.parsing import UserError
from adclr.data.decode import Decoder
from adclr.data.sets import public
from adclr.data.sets.classes import open_labeled
from adclr.evals import NAMES, finetune, format_scores, import_evaluation, transfer
from adclr.evals.task import EvaluationSettings, load_backbone
from adclr.system.runs import Run
from plain_images import colored, weights

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = {"linear.epochs": 6, "linear.quick": True, "finetune.epochs": 1, "finetune.batch_size": 8}


@pytest.fixture
def backbone(tmp_path: Path) -> Path:
    """A file of weights, as `adclr pretrain` leaves it."""
    made = weights()
    shape = {"dim": 32, "depth": 3, "num_heads": 2, "patch_size": 8, "input_size": [24, 24]}
    (tmp_path / "backbone.json").write_text(
        json.dumps({"architecture": shape, "mean": made.mean, "std": made.std, "max_value": None})
    )
    save_file(made.vit.state_dict(), tmp_path / "backbone.safetensors")
    return tmp_path / "backbone.safetensors"


def test_a_line_for_each_data_set_and_what_is_done_stays_done(
    tmp_path: Path, backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [colored(tmp_path / "a" / "set"), colored(tmp_path / "b" / "set", 24, 12, num_classes=2)]
    out = tmp_path / "out" / "both.json"

    def run(**changes: Any) -> dict[str, Any]:
        given = {"weights": backbone, "data": data, "how": ["linear", "finetune"], "device": "cpu"}
        return package.evaluate("transfer", out=out, **given, **QUICK, **changes)

    actual = run()
    assert set(actual) == {
        *(f"set-{n}_{how}_top1" for n in (1, 2) for how in ("linear", "finetune")),
        *("mean_linear_top1", "mean_finetune_top1", "table"),
    }
    assert [row["classes"] for row in actual["table"]] == [3, 2]
    assert actual["mean_linear_top1"] == (actual["set-1_linear_top1"] + actual["set-2_linear_top1"]) / 2
    assert json.loads(out.read_text())["scores"] == actual
    lines = transfer.table(actual["table"]).splitlines()
    assert lines[0].split() == ["data", "classes", "train", "val", "linear", "finetune"]
    assert lines[2].split()[:4] == ["set-2", "2", "24", "12"]
    assert len({len(line) for line in lines}) == 1

    done: list[str] = []
    real = finetune.run
    monkeypatch.setattr(finetune, "run", lambda settings, place: (done.append(settings.data), real(settings, place))[1])
    (tmp_path / "out" / "both" / "set-2-finetune.json").unlink()  # as if it had been stopped there
    assert run() == actual
    assert done == [str(data[1])]
    run(seed=1)
    assert len(done) == 3
    told = json.loads(backbone.with_suffix(".json").read_text())
    told["architecture"]["num_heads"] = 4  # the same numbers, other features
    backbone.with_suffix(".json").write_text(json.dumps(told))
    run(seed=1)
    assert len(done) == 5


def test_names_of_data_sets_are_never_alike_and_never_paths(tmp_path: Path, backbone: Path) -> None:
    few = colored(tmp_path / "x" / "set", 12, 6, num_classes=2)
    data = [few, colored(tmp_path / "set-1", 24, 12), colored(tmp_path / "a:b" / "set"), f"hf:{tmp_path}/y:z/of"]
    assert len(set(transfer._names(tuple(map(str, data))))) == 4
    assert transfer._names((f"{tmp_path}/a:b/set", "cifar10:data", "hf:some/where")) == ["set", "cifar10", "where"]
    before = {*tmp_path.iterdir(), tmp_path / "out", tmp_path / "out.json"}
    given: dict[str, Any] = {"weights": backbone, "device": "cpu", "linear.epochs": 1, "linear.quick": True}
    actual = package.evaluate("transfer", out=tmp_path / "out.json", data=data[:3], **given)
    assert [row["train"] for row in actual["table"]] == [12, 24, 48]
    assert len(actual) == 3 + 2
    assert set(tmp_path.iterdir()) == before


def test_all_is_looked_at_before_anything_is_trained(tmp_path: Path, backbone: Path) -> None:
    data = [colored(tmp_path / "a"), tmp_path / "nowhere"]
    with pytest.raises(UserError, match="nowhere does not exist"):
        package.evaluate("transfer", weights=backbone, data=data, out=tmp_path / "out.json", device="cpu")
    with pytest.raises(UserError, match="give --weights and --data"):
        package.evaluate("transfer", weights=backbone, data=[])
    with pytest.raises(UserError, match=r"could be linear\.epochs or finetune\.epochs"):
        package.evaluate("transfer", weights=backbone, data=data, epochs=3)
    for empty in ({"how": []}, {"linear.lrs": []}):
        with pytest.raises(UserError, match="should have at least 1 item"):
            package.evaluate("transfer", weights=backbone, data=data, **empty)
    assert not list(tmp_path.glob("out*"))


def pixels(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def jpeg(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(seed, 20, 30, 3)).save(path)


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    def write(name: str, content: Any) -> list[str]:
        file = root / CIFAR10.base_folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(content))
        return [name, hashlib.md5(file.read_bytes()).hexdigest()]

    def batch(seed: int) -> dict[str, Any]:
        return {"data": pixels(seed, 6, 3072), "labels": [0, 1, 2, 0, 1, 2]}

    monkeypatch.setattr(CIFAR10, "train_list", [write(f"data_batch_{n}", batch(n)) for n in (1, 2)])
    monkeypatch.setattr(CIFAR10, "test_list", [write("test_batch", batch(3))])
    name, checksum = write("batches.meta", {"label_names": ["ship", "dog", "ship"]})
    monkeypatch.setattr(CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": checksum})


def test_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="does not hold cifar10 as it is published"):
        open_labeled(f"cifar10:{tmp_path}")
    write_cifar(tmp_path, monkeypatch)
    actual = open_labeled(f"cifar10:{tmp_path}")
    assert actual.classes == ["0000 ship", "0001 dog", "0002 ship"]  # two that are called alike stay two
    assert (len(actual.train.labels), len(actual.val.labels)) == (12, 6)
    assert actual.train.labels.tolist() == [0, 1, 2] * 4
    image = Decoder()(actual.train.source.read(7))
    assert np.array_equal(image, pixels(2, 6, 3072)[1].reshape(3, 32, 32))


class Mine:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(os.environ["ADCLR_TEST_MINE"]),)


def test_a_pickle_that_is_not_cifars_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, monkeypatch)
    monkeypatch.setenv("ADCLR_TEST_MINE", str(tmp_path / "stepped_on"))
    (tmp_path / "cifar-10-batches-py" / "data_batch_2").write_bytes(pickle.dumps(Mine()))
    with pytest.raises(UserError, match="does not hold cifar10"):
        open_labeled(f"cifar10:{tmp_path}")
    assert not (tmp_path / "stepped_on").exists()


def test_flowers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.io import savemat
    from torchvision.datasets import Flowers102

    monkeypatch.setattr(Flowers102, "_check_integrity", lambda _: True)
    folder = tmp_path / "flowers-102"
    for number in range(1, 9):
        jpeg(folder / "jpg" / f"image_{number:05d}.jpg", number)
    savemat(folder / "setid.mat", {"trnid": [1, 2], "valid": [3, 4], "tstid": [5, 6, 7, 8]})
    savemat(folder / "imagelabels.mat", {"labels": [1, 2, 1, 2, 2, 2, 1, 1]})
    actual = open_labeled(f"flowers:{tmp_path}")
    assert actual.train.labels.tolist() == [0, 1, 0, 1]  # train and val
    assert actual.val.labels.tolist() == [1, 1, 0, 0]
    assert Decoder()(actual.val.source.read(0)).shape == (3, 20, 30)


def test_cars(tmp_path: Path) -> None:
    from scipy.io import savemat

    folder = tmp_path / "stanford_cars"
    kind = [("fname", object), ("class", np.uint8)]

    def annotations(split: str, labels: list[int]) -> dict[str, Any]:
        names = [f"{n:05d}.jpg" for n in range(len(labels))]
        for number, name in enumerate(names):
            jpeg(folder / f"cars_{split}" / name, number)
        return {"annotations": np.array(list(zip(names, labels, strict=True)), dtype=kind)}

    (folder / "devkit").mkdir(parents=True)
    savemat(folder / "devkit" / "cars_train_annos.mat", annotations("train", [1, 2, 2]))
    savemat(folder / "cars_test_annos_withlabels.mat", annotations("test", [2, 1]))
    savemat(folder / "devkit" / "cars_meta.mat", {"class_names": np.array(["Audi A4", "Fiat 500"], dtype=object)})
    actual = open_labeled(f"cars:{tmp_path}")
    assert actual.classes == ["0000 Audi A4", "0001 Fiat 500"]
    assert (actual.train.labels.tolist(), actual.val.labels.tolist()) == ([0, 1, 1], [1, 0])
    assert Decoder()(actual.train.source.read(2)).shape == (3, 20, 30)


def test_inaturalist(tmp_path: Path) -> None:
    def write(split: str, files: dict[str, int]) -> None:
        told = {
            "images": [{"id": 10 * n, "file_name": file} for n, file in enumerate(files)],
            "annotations": [{"image_id": 10 * n, "category_id": label} for n, label in enumerate(files.values())],
            "categories": [{"id": 4, "name": "Parus"}, {"id": 7, "name": "Quercus"}],
        }
        (tmp_path / f"{split}2018.json").write_text(json.dumps(told))

    jpeg(tmp_path / "train_val2018" / "a.jpg", 0)
    write("train", {"train_val2018/a.jpg": 4, "train_val2018/b.jpg": 7})
    with pytest.raises(UserError, match=r"there is no val2018\.json"):
        open_labeled(f"inat18:{tmp_path}")
    write("val", {"train_val2018/c.jpg": 7})
    actual = open_labeled(f"inat18:{tmp_path}")
    assert actual.classes == ["0004 Parus", "0007 Quercus"]
    assert actual.val.labels.tolist() == [1]
    assert Decoder()(actual.train.source.read(0)).shape == (3, 20, 30)
    write("val", {"../../secret.jpg": 7})
    with pytest.raises(UserError, match="outside of the folder"):
        open_labeled(f"inat18:{tmp_path}")
    (tmp_path / "val2018.json").write_text("[1]")
    with pytest.raises(UserError, match="does not hold inat18"):
        open_labeled(f"inat18:{tmp_path}")
    with pytest.raises(UserError, match="does not exist; check the path behind inat19:"):
        open_labeled("inat19:/nowhere")


def test_a_missing_scipy_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(UserError, match=r"pip install 'adclr\[transfer\]'"):
        public.open_set("cars", str(tmp_path))


SCRIPT = """
import sys
import torch, adclr
from adclr.system import distributed
weights, data, out = sys.argv[1:]
with distributed.session(torch.device("cpu")):
    common = {"weights": weights, "data": data, "device": "cpu"}
    adclr.evaluate("knn", out=f"{out}/knn.json", features="both", **common)
    adclr.evaluate("linear", out=f"{out}/linear.json", epochs=3, batch_size=16, **common)
    adclr.evaluate("linear", out=f"{out}/quick.json", epochs=3, batch_size=16, quick=True, **common)
    adclr.evaluate("finetune", out=f"{out}/finetune.json", epochs=3, batch_size=16, ema=0.9, lr=0.02, **common)
"""


def test_two_processes_score_what_one_does(tmp_path: Path, backbone: Path) -> None:
    """With drop path, mixing, RandAugment and an image that cannot be read."""
    data = colored(tmp_path / "data", 45, 41, shuffled=True)
    (data / "val" / "c0" / "broken.png").write_bytes(b"no image")
    (data / "train" / "c1" / "broken.png").write_bytes(b"no image")
    (tmp_path / "script.py").write_text(SCRIPT)
    for number in (1, 2):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if number == 2 else []
        command = [sys.executable, *launch, tmp_path / "script.py", backbone, data, tmp_path / str(number)]
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        assert done.returncode == 0, done.stderr
    for name in ("knn", "linear", "quick", "finetune"):
        one, two = (json.loads((tmp_path / str(n) / f"{name}.json").read_text()) for n in (1, 2))
        assert one["scores"] == two["scores"], name
        assert one["scores"]["num_unreadable"] == 2
        assert (one["provenance"]["processes"], two["provenance"]["processes"]) == (1, 2)
    rows = [list(Run(tmp_path / str(n) / "finetune").rows("metrics.jsonl")) for n in (1, 2)]
    for a, b in zip(*rows, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def tree(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_bad_data_is_one_sentence_and_nothing_is_written(
    tmp_path: Path, backbone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, single = colored(tmp_path / "data"), colored(tmp_path / "single", 8, 4, num_classes=1)

    def refused(message: str, *arguments: object) -> None:
        before = tree(tmp_path)
        with pytest.raises(SystemExit) as stopped:
            cli.main([*map(str, ("evaluate", *arguments, "--weights", backbone)), "device=cpu"])
        assert stopped.value.code == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("adclr: ")
        assert message in said
        assert tree(tmp_path) == before

    refused("linear takes one --data, not 2; transfer takes several", "linear", "--data", data, data)
    refused("did you mean 'min_crop'?", "finetune", "--data", data, "mincrop=0.3")
    refused("has only one class (c0)", "transfer", "--data", data, single)
    (data / "train" / "c2").rename(tmp_path / "away")
    refused("val has classes that", "finetune", "--data", data)
    (tmp_path / "away").rename(data / "train" / "c2")
    for path in (data / "train" / "c1").iterdir():
        path.write_bytes(b"no image")
    refused("cannot be read", "finetune", "--data", data)
    refused("no image of class c1 in", "linear", "--data", data, "max_unreadable=0.9")


def test_the_control_is_the_same_vit_newly_made(backbone: Path) -> None:
    def state(**changes: Any) -> dict[str, torch.Tensor]:
        return load_backbone(EvaluationSettings(weights=str(backbone), **changes), torch.device("cpu")).vit.state_dict()

    trained, control, again = state(), state(from_scratch=True), state(from_scratch=True)
    other = state(from_scratch=True, seed=1)
    assert {name: tensor.shape for name, tensor in trained.items()} == {k: v.shape for k, v in control.items()}
    for name in ("blocks.1.attn.qkv.weight", "patch_embed.proj.weight", "pos_embed"):
        assert torch.equal(control[name], again[name])
        assert not torch.equal(control[name], trained[name])
        assert not torch.equal(control[name], other[name])


def test_scores_for_people_leave_each_class_to_the_file() -> None:
    lines = format_scores(
        {"a_top1": 50.0, "b": 33.333, "best_lr": 0.0005, "why": "val", "per_class": {"x": 1.0}}
    ).splitlines()
    assert [line.split() for line in lines] == [
        ["a_top1", "50.00", "%"],
        ["b", "33.33"],
        ["best_lr", "0.0005"],
        ["why", "val"],
    ]


def test_every_command_of_the_page_is_understood() -> None:
    text = (Path(__file__).parents[2] / "docs" / "evaluations.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) >= 10
    for line in lines:
        words = shlex.split(line)[1:]
        options = cli.parser().parse_args([word for word in words if not cli.WORD.match(word)])
        assert options.weights
        assert options.data
        values = parsing.parse_words([word for word in words if cli.WORD.match(word)])
        parsing.build(import_evaluation(options.name).Settings, values)
    for row in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE):
        named = set(re.findall(r"`(\w+)`", row))
        assert any(named <= set(import_evaluation(name).Settings.model_fields) for name in NAMES), row
