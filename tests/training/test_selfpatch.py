"""A run of SelfPatch, from the command line to all that uses its weights; resumed, on two processes, continued."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import adclr as package
from adclr import cli
from adclr.config.parsing import UserError
from adclr.evals import linear
from adclr.evals.finetune import Classifier
from adclr.features import analysis
from adclr.features.explorer.library import Library
from adclr.model.optim import layer_decay_groups
from adclr.model.vit import VisionTransformer
from adclr.report.metrics import LOSSES
from adclr.study.study_file import read_study
from adclr.system.runs import Run
from adclr.training.meter import Meter, check_state
from adclr.weights.backbone import Weights, load_weights, write_backbone
from studied import SMALL
from tiny import TINY, words

CHANGES: dict[str, Any] = TINY | {
    "views.num_queries": 0,
    "views.local_size": 12,
    "model.drop_path": 0.0,
    "method.neighbor_prototypes": 24,
    "optim.freeze_last_layer_epochs": 0.5,
    "train.checkpoint_every_steps": 3,
    "train.keep_checkpoints": 9,
}


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of the shipped recipe, as a user starts it."""
    out = tmp_path_factory.mktemp("selfpatch") / "run"
    cli.main(["pretrain", str(images / "train"), "--out", str(out), "--recipe", "selfpatch_small", *words(CHANGES)])
    return Run(out)


def test_a_run_trains_both_losses_and_its_parts_are_there(run: Run) -> None:
    rows = [row for row in run.rows("metrics.jsonl") if "loss" in row]
    assert len(rows) == 8
    for row in rows:
        assert row["loss"] == pytest.approx(row["loss_global"] + 0.1 * row["loss_neighbor"], rel=1e-5)
        assert row["loss_query"] == row["loss_masked"] == 0
    folder = run.checkpoints / "latest"
    centers, student = (load_file(folder / f"{part}.safetensors") for part in ("centers", "student"))
    assert centers["neighbor.value"].shape == (24,)
    assert centers["neighbor.value"].abs().sum() > 0
    assert student["patch_head.last_layer.direction"].shape == (24, 8)
    exported = load_file(run.path / "backbone.safetensors")
    assert "blocks_token_only.1.gamma_2" in exported
    assert exported["pos_embed"].shape == (1, 16, 16)
    assert not [name for name in exported if "head" in name]
    assert "loss_neighbor" in LOSSES


def test_every_command_takes_the_weights(run: Run, images: Path, tmp_path: Path) -> None:
    data, photos, weights = str(images), str(images / "val"), str(run.path)
    for name, more in (("knn", []), ("linear", ["epochs=2"]), ("finetune", ["epochs=1", "pool=mean_patch"])):
        out = tmp_path / f"{name}.json"
        cli.main(["evaluate", name, "--weights", weights, "--data", data, "--out", str(out), "device=cpu", *more])
        assert json.loads(out.read_text())["scores"]
    pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    cli.main(["embed", weights, photos, "--out", str(tmp_path / "features.parquet"), "device=cpu", "vector=both"])
    assert parquet.read_table(tmp_path / "features.parquet").num_rows == 16
    for name in ("attention", "queries", "pca"):
        out = tmp_path / name
        cli.main(["visualize", name, weights, photos, "--out", str(out), "device=cpu", "num_images=2"])
        with Image.open(out / f"{name}.png") as picture:
            assert picture.width > 100
    cli.main(["export", weights, "--to", "safetensors", "--out", str(tmp_path / "exported")])
    assert "by SelfPatch" in (tmp_path / "exported" / "README.md").read_text()
    pictures = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        ours, theirs = package.load(run.path)(pictures), package.load(tmp_path / "exported")(pictures)
    assert torch.equal(ours.cls, theirs.cls)


def test_the_embedding_is_the_token_of_class_attention(run: Run) -> None:
    vit = package.load(run.path)
    assert vit.class_attention == 2
    picture = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        before = vit(picture)
        for parameter in vit.class_blocks[1].parameters():
            parameter.zero_()
        after = vit(picture)
    assert not torch.allclose(before.cls, after.cls)
    assert torch.equal(before.patches, after.patches)


def test_pictures_of_cls_in_blocks_without_it_are_refused(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vit, folder = VisionTransformer(16, 3, 2, 4, 16, class_attention=2), tmp_path / "deep"
    folder.mkdir()
    write_backbone(folder, vit.state_dict(), Weights(vit, (0.5,) * 3, (0.25,) * 3).describe())
    words = ["visualize", "attention", str(folder), str(images / "val"), "device=cpu", "num_images=1"]
    for block in (0, -3):
        with pytest.raises(SystemExit) as error:
            cli.main([*words, "--out", str(tmp_path / "no"), f"block={block}"])
        assert error.value.code == 2
        assert "these weights have [CLS] in the last 2 blocks only; write block=-2 to -1" in capsys.readouterr().err
        assert not (tmp_path / "no").exists()
    for block in (1, -1):
        cli.main([*words, "--out", str(tmp_path / "yes"), f"block={block}", "--overwrite"])


@torch.no_grad()
def test_the_explorer_reads_and_asks_it(run: Run) -> None:
    weights = load_weights(run.path)
    library = Library("selfpatch", weights, 16)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 16, 16), np.uint8)
    inputs = [library.prepare(picture) for picture in pixels]
    library.read([0, 1], inputs)
    (group,) = library.groups
    stored = [*group.memory.keys, *group.memory.values, group.memory.tokens.patches]
    assert library.bytes_of((4, 4)) == sum(tensor.nbytes for tensor in stored) / 2
    for block in (0, 1, -1):  # the trunk has two blocks, as many as class attention
        maps = dict(library.cls(block))
        attention, _ = weights.vit.gaze(analysis.read_memory(weights, inputs[1]), None, block)
        expected = analysis.patch_attention(attention, 0, (4, 4))[0, 0, 0].numpy()
        np.testing.assert_allclose(maps[1], expected, rtol=2e-2)
        assert len(library.query(0, (0.1, 0.1, 0.5, 0.6), block)) == 2


def test_evaluations_treat_class_attention_as_the_end_of_the_network(run: Run) -> None:
    vit = package.load(run.path)
    features = linear.pool(vit, linear.LinearSettings(), None)(torch.randn(2, 3, 16, 16))
    assert features.shape == (2, 16)  # [CLS] of one block, where others have those of the last ones
    groups = layer_decay_groups(vit.named_parameters(), vit.depth, 0.5, 0.1)
    scales = {
        name: g["scale"] for g in groups for name, p in vit.named_parameters() if any(p is q for q in g["params"])
    }
    assert scales["cls_token"] == scales["blocks_token_only.0.attn.k.weight"] == scales["norm.bias"] == 1
    assert scales["pos_embed"] == 0.5 ** (vit.depth + 1)
    classifier = Classifier(vit, 3, "mean_patch", seed=0)
    classifier.train()(torch.randn(2, 3, 16, 16)).sum().backward()
    for name, parameter in classifier.named_parameters():  # so that several processes wait for no gradient
        assert (parameter.grad is not None) == parameter.requires_grad, name


def assert_same_end(a: Path, b: Path, exactly: bool) -> None:
    for part in ("student", "teacher", "centers"):
        left, right = (load_file(path / f"checkpoints/step_8/{part}.safetensors") for path in (a, b))
        assert left.keys() == right.keys()
        for name, tensor in left.items():
            if exactly:
                assert torch.equal(tensor, right[name]), name
            else:
                torch.testing.assert_close(tensor, right[name], rtol=1e-3, atol=1e-4)


def test_a_resumed_run_ends_as_the_whole_one(run: Run, tmp_path: Path) -> None:
    part = tmp_path / "part"
    shutil.copytree(run.path, part, symlinks=True)
    for name in ("results.json", "backbone.safetensors", "backbone.json"):
        (part / name).unlink()
    for step in (6, 8):
        shutil.rmtree(part / f"checkpoints/step_{step}")
    cli.main(["pretrain", "--resume", "--out", str(part)])
    starts = json.loads((part / "provenance.json").read_text())
    assert [start["from_step"] for start in starts] == [0, 3]
    assert_same_end(run.path, part, exactly=True)


def test_two_processes_with_spread_weights_and_accumulation_train_as_one(
    run: Run, images: Path, tmp_path: Path
) -> None:
    changes = CHANGES | {"train.shard": True, "train.micro_batch_size": 2}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "adclr", "pretrain"]
    arguments = [str(images / "train"), "--out", str(tmp_path / "two"), "--recipe", "selfpatch_small", *words(changes)]
    both = subprocess.run(
        [sys.executable, *command, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert both.returncode == 0, both.stderr
    rows = [list(Run(path).rows("metrics.jsonl")) for path in (run.path, tmp_path / "two")]
    for a, b in zip(*rows, strict=True):
        for name in ("loss", "loss_global", "loss_neighbor"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), (a["step"], name)
    assert_same_end(run.path, tmp_path / "two", exactly=False)


def test_pretraining_goes_on_from_its_weights(run: Run, images: Path, tmp_path: Path) -> None:
    changes = CHANGES | {"train.epochs": 1, "optim.warmup_epochs": 0, "optim.freeze_backbone_epochs": 0.5}
    changes = {name: value for name, value in changes.items() if not name.startswith("model.")}
    more = package.pretrain(images / "train", out=tmp_path / "more", recipe="selfpatch_small", init=run.path, **changes)
    settings = more.settings()
    assert settings is not None
    assert settings.model.class_attention == 2
    dino = package.pretrain(
        images / "train", out=tmp_path / "dino", **(TINY | {"epochs": 1, "warmup_epochs": 0, "num_queries": 0})
    )
    with pytest.raises(UserError, match=r"is of model\.class_attention=0, but .*=2 was asked for"):
        package.pretrain(images / "train", out=tmp_path / "no", init=dino.path, class_attention=2, num_queries=0)


def test_checkpoints_of_before_the_loss_are_read() -> None:
    old = {"sums": [1.0, 2.0, 3.0, 4.0, 5.0, 2.0, 1.0], "void": [[3, None, 1.0, 2.0, 3.0, 4.0]], "last_void": 0}
    meter = Meter(torch.device("cpu"), every=2)
    meter.restore(check_state(old))
    assert meter.sums.tolist() == [1.0, 2.0, 3.0, 4.0, 0.0, 5.0, 2.0, 1.0]
    assert meter.void[0].losses == [None, 1.0, 2.0, 3.0, 0.0, 4.0]
    assert meter.read().means["teacher_entropy"] == 2.5
    for broken in ({"sums": [1.0] * 7}, {"sums": [1.0] * 6, "void": []}, {"sums": [1.0] * 8, "void": old["void"]}):
        with pytest.raises(ValueError):  # noqa: PT011  # pydantic's or ours
            check_state(broken)


def test_its_settings_are_no_part_of_the_keys_of_other_methods(tmp_path: Path) -> None:
    """A key that an earlier version gave, as `test_old_settings` knows it."""

    def key(**settings: object) -> str:
        evaluation = {"name": "segmentation", "data": "photos", "score": "segmentation_miou"}
        evaluations = {"mIoU": evaluation | {"settings": {"colors": False}}}
        study = SMALL | {"recipe": "demo_adclr", "evaluations": evaluations}
        study |= {"settings": {"views.gray": 0.3} | settings}
        (tmp_path / "study.yaml").write_text(json.dumps(study))
        (cell,) = read_study(tmp_path / "study.yaml").cells
        return cell.key

    assert key() == "f649cfada69006d8"
    assert key(**{"model.class_attention": 0, "method.neighbor_weight": 0.0}) == "f649cfada69006d8"
    assert key(**{"views.num_queries": 0, "model.class_attention": 2}) != "f649cfada69006d8"
