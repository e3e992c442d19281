"""Pretraining that goes on from weights: the same features at first, a backbone that waits, and a watch over it."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import adclr as package
from adclr import cli
from adclr.config import parsing
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.data.random_draws import key_of
from adclr.data.sources import ImageFolder
from adclr.evals.features import extract_features
from adclr.system.runs import Run
from adclr.training import continued_pretraining, job, launch, planning
from adclr.training.journal import Journal
from adclr.training.plan_gpus import Gpu
from adclr.training.schedules import Schedules
from adclr.weights.backbone import architecture, load_weights, save_backbone
from test_loop import assert_same_state
from tiny import TINY, tiny, words

pytestmark = pytest.mark.usefixtures("one_thread")
# all that is not of the model, so that the model is taken from the weights
FREE = {name: value for name, value in TINY.items() if not name.startswith("model.")}
STEPS = {"checkpoint_every_steps": 1, "keep_checkpoints": 100}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone of another shape than any size has, with all its numbers drawn."""
    folder = tmp_path_factory.mktemp("weights")
    settings = tiny(model__dim=24, model__num_heads=3, data__mean=(0.3, 0.4, 0.5), data__std=(0.2, 0.3, 0.1))
    torch.manual_seed(1)
    state = architecture(settings).build().state_dict()
    save_backbone(folder, {name: 0.2 * torch.randn_like(tensor) for name, tensor in state.items()}, settings)
    return folder / "backbone.safetensors"


def pretrain(images: Path, out: Path, weights: Path, **changes: Any) -> Run:
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return package.pretrain(images / "train", out=out, recipe="adclr_small", init=weights, **(FREE | changes))


def backbone(run: Path, part: str, step: int) -> dict[str, torch.Tensor]:
    state = load_file(run / "checkpoints" / f"step_{step}" / f"{part}.safetensors")
    return {name.removeprefix("backbone."): t for name, t in state.items() if name.startswith("backbone.")}


@pytest.mark.parametrize("size", [16, 24])
def test_student_and_teacher_begin_as_the_weights_to_the_bit(weights: Path, size: int) -> None:
    taken, _ = continued_pretraining.adopt_settings(str(weights), {})
    settings = parsing.build(Settings, FREE, taken, {"init": str(weights), "global_size": size, "masked_weight": 1.0})
    method = job.build(settings)
    heads = {name: tensor.clone() for name, tensor in method.student.head.state_dict().items()}
    assert continued_pretraining.load_init(method, settings) == load_weights(weights).fingerprint()
    loaded = load_weights(weights).vit
    method.eval()
    images = torch.randn(5, 3, size, size)
    with torch.no_grad():
        expected = loaded(images)
        for branch in (method.student, method.teacher):
            actual = branch.backbone(images)
            assert torch.equal(actual.cls, expected.cls)
            assert torch.equal(actual.patches, expected.patches)
    assert method.student.backbone.pos_embed.shape[1] == 1 + (size // 4) ** 2
    assert method.student.backbone.mask_token is not None  # which the weights do not have
    for name, tensor in method.student.head.state_dict().items():
        assert torch.equal(tensor, heads[name])


def test_the_backbone_waits_for_the_heads_and_then_moves(images: Path, weights: Path, tmp_path: Path) -> None:
    frozen = {"freeze_backbone_epochs": 0.75, "freeze_last_layer_epochs": 0.25}
    run = pretrain(images, tmp_path / "run", weights, **frozen, **STEPS)
    initial = load_file(weights)
    for step in range(1, 9):
        for part in ("student", "teacher"):
            actual = backbone(run.path, part, step)
            still = [name for name in initial if torch.equal(actual[name], initial[name])]
            assert len(still) == len(initial) if step <= 3 else len(still) == 0, (part, step)
    for part in ("student", "teacher"):  # the first step has a learning rate of 0
        heads = [load_file(run.path / f"checkpoints/step_{n}/{part}.safetensors")["head.mlp.0.weight"] for n in (1, 3)]
        assert not torch.allclose(*heads)
    moments = load_file(run.path / "checkpoints/step_3/optimizer.safetensors")
    assert not any(name.startswith("backbone") for name in moments)

    settings = run.settings()
    assert settings is not None
    assert (settings.model.init, settings.optim.freeze_backbone_epochs) == (str(weights), 0.75)
    assert (settings.model.shape, settings.data.mean) == ((24, 2, 3), (0.3, 0.4, 0.5))
    assert json.loads((run.path / "provenance.json").read_text())[0]["init"] == load_weights(weights).fingerprint()
    rows = [row for row in run.rows("metrics.jsonl") if "drift_cosine" in row]
    assert [row["step"] for row in rows] == [0, 8]
    assert rows[0]["drift_cosine"] == pytest.approx(1, abs=1e-12)
    assert rows[1]["drift_cosine"] < 1
    assert json.loads((run.path / "results.json").read_text())["probes"] == rows
    # what it began with is what the weights alone make of the images
    source = ImageFolder(images / "train")
    kept = load_file(run.path / continued_pretraining.FEATURES)
    loaded = load_weights(weights)
    actual = extract_features(loaded, source, lambda x: loaded.vit(x).cls, torch.device("cpu"), show=False)
    assert torch.equal(kept["features"], actual.values)
    assert kept["keys"].numpy().view(np.uint64).tolist() == [key_of(path) for path in source.paths]
    assert rows[0]["effective_rank"] == pytest.approx(slow_rank(actual.values.double().numpy()))
    # on resume it is computed again: an earlier version may have written another formula's number
    metrics = run.path / "metrics.jsonl"
    metrics.write_text(
        metrics.read_text().replace(f'"effective_rank": {rows[0]["effective_rank"]}', '"effective_rank": 99')
    )
    assert [row for row in run.rows("metrics.jsonl") if row.get("effective_rank") == 99]
    schedules = Schedules(settings, 4)
    watch = continued_pretraining.ForgettingProbe(
        run, settings, schedules, lambda: loaded, source, torch.device("cpu"), 8, None
    )
    assert watch.first["effective_rank"] == pytest.approx(rows[0]["effective_rank"])


def slow_rank(features: np.ndarray) -> float:
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    values = np.linalg.svd(unit - unit.mean(axis=0), compute_uv=False) ** 2
    shares = values / values.sum()
    return float(np.exp(-sum(p * np.log(p) for p in shares if p > 0)))


@pytest.mark.parametrize("checkpoint", [2, 5])  # in the frozen epoch, and after it
def test_a_resumed_run_needs_no_weights_and_ends_the_same(
    images: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: int
) -> None:
    own = tmp_path / "weights"
    shutil.copytree(weights.parent, own)
    settings = {"freeze_backbone_epochs": 1, "probe.data": str(images), "every_epochs": 1, "masked_weight": 1.0, "k": 3}
    pretrain(images, tmp_path / "whole", own, **settings)
    step = Journal.step

    def stopping(self: Journal, done: int, *rest: Any) -> None:
        step(self, done, *rest)
        if done == checkpoint + 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "step", stopping)
    with pytest.raises(KeyboardInterrupt):
        pretrain(images, tmp_path / "parts", own, **settings, checkpoint_every_steps=checkpoint)
    monkeypatch.undo()
    assert Run(tmp_path / "parts").steps() == [checkpoint]
    shutil.rmtree(own)
    pretrain(images, tmp_path / "parts", own, **settings)  # the recipe is named again
    assert_same_state(tmp_path / "whole", tmp_path / "parts", 8)
    whole = tmp_path / "whole"
    rows = [row for row in Run(whole).rows("metrics.jsonl") if "knn_top1" in row]
    assert [row["step"] for row in rows] == [0, 4, 8]
    assert rows[1]["drift_cosine"] == pytest.approx(1)  # nothing has moved
    with pytest.raises(UserError, match=r"other settings: model\.init"):
        pretrain(images, whole, tmp_path / "others", **settings)


def test_the_model_is_that_of_the_weights_unless_the_user_errs(images: Path, weights: Path, tmp_path: Path) -> None:
    for name, wrong, message in (
        ("model.dim", 32, "is of model.dim=24, but model.dim=32 was asked for; leave that out or use other weights"),
        ("patch_size", 8, "is of model.patch_size=4, but model.patch_size=8 was asked for"),
        ("model.size", "small", "but model.size=small, that is model.dim=384 was asked for"),
        ("num_registers", 2, "is of model.num_registers=0, but"),
        ("layer_scale", 0.1, "has no LayerScale; leave out model.layer_scale"),
        ("freeze_backbone_epochs", 2, "leaves none of the 2 epochs"),
        ("views.local_size", 10, "is not divisible by model.patch_size=4"),
    ):
        with pytest.raises(UserError, match=message):
            pretrain(images, tmp_path / "run", weights, **{name: wrong})
    with pytest.raises(UserError, match="would freeze random numbers"):
        parsing.build(Settings, {"freeze_backbone_epochs": 1})
    with pytest.raises(UserError, match="do not exist"):
        pretrain(images, tmp_path / "run", tmp_path / "nowhere.safetensors")
    bad = tmp_path / "bad" / "backbone.safetensors"
    shutil.copytree(weights.parent, bad.parent)
    state = load_file(weights)
    save_file(state | {"norm.bias": state["norm.bias"] * float("nan")}, bad)
    with pytest.raises(UserError, match=r"not finite in norm\.bias"):
        pretrain(images, tmp_path / "run", bad)
    assert not (tmp_path / "run").exists()

    kept, told = continued_pretraining.adopt_settings(str(weights), {"data.mean": (0.5, 0.5, 0.5), "model.depth": 2})
    assert not {"data.mean", "model.depth", "model.size"} & set(kept)
    assert (kept["model.dim"], kept["model.patch_size"], kept["data.std"]) == (24, 4, (0.2, 0.3, 0.1))
    assert "width 24, 2 blocks, 3 heads, patches of 4" in told
    common = tiny(model__dim=None, model__depth=None, model__num_heads=None, layer_scale=0.1, num_registers=1)
    save_backbone(tmp_path / "common", architecture(common).build().state_dict(), common)
    kept, _ = continued_pretraining.adopt_settings(str(tmp_path / "common" / "backbone.safetensors"), {})
    assert (kept["model.size"], kept["model.dim"], kept["model.num_registers"]) == ("small", None, 1)
    assert kept["model.layer_scale"] is not None
    method = job.build(parsing.build(Settings, TINY | {"init": "x"} | kept))
    assert method.student.backbone.dim == 384


def test_no_recipe_and_a_plan_take_the_model_too(images: Path, weights: Path, tmp_path: Path) -> None:
    actual = launch.prepare(images / "train", tmp_path / "run", None, {"init": weights, "train.device": "cpu"})
    assert actual.settings.model.shape == (24, 2, 3)
    assert any("the model is that of" in reason for reason in actual.reasons)
    small = {"init": str(weights), "train.batch_size": 8}
    gpu = Gpu("x", 80.0, 900.0)
    planning.plan_run(None, 100, "adclr_small", small, gpu, file=tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["settings"]["model"]["dim"] == 24


def test_a_mistake_is_one_sentence_on_the_command_line(
    images: Path, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["pretrain", str(images / "train"), "--out", str(tmp_path / "run"), f"init={weights}", *words(TINY)])
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_watch_warns_once_when_features_get_worse(
    images: Path, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = {"lr": 30.0, "momentum": 0.0, "momentum_end": 0.0, "freeze_backbone_epochs": 0, "every_epochs": 1}
    assert pretrain(images, tmp_path / "run", weights, **wild).finished
    said = capsys.readouterr().err
    assert said.count("warning:") == 1
    assert "lower optim.lr" in said
    calm = pretrain(images, tmp_path / "calm", weights, lr=1e-6)
    assert "warning:" not in capsys.readouterr().err
    last = [row for row in calm.rows("metrics.jsonl") if "drift_cosine" in row][-1]
    assert last["drift_cosine"] > 0.999


def test_with_labels_the_score_decides_and_without_the_features() -> None:
    first = {"knn_top1": 60.0, "effective_rank": 40.0}
    describe = partial(continued_pretraining.describe_decline, first)
    assert describe(first | {"drift_cosine": 1.0}) is None
    assert describe({"knn_top1": 59.5, "effective_rank": 3.0, "drift_cosine": 0.1}) is None
    assert "kNN is 58.0 % where the weights it began with had 60.0 %" in str(describe({"knn_top1": 58.0}))
    assert "of [CLS] is 12.0, and was 40.0 at the start" in str(describe({"effective_rank": 12.0}))
    assert "their mean cosine is 0.30" in str(describe({"effective_rank": 40.0, "drift_cosine": 0.3}))
    assert describe({"effective_rank": 25.0, "drift_cosine": 0.8}) is None
