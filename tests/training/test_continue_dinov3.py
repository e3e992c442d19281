"""DINOv3's weights through the program: trained further, resumed, scored, embedded, drawn, explored and exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import adclr as package
from adclr import cli
from adclr.config.parsing import UserError, build
from adclr.features import analysis, visualize
from adclr.features.explorer.library import Library
from adclr.features.visualize import FIGURES
from adclr.system.runs import Run
from adclr.weights.backbone import load_weights
from test_continued_pretraining import FREE
from test_dinov3 import perturb

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A narrow ViT-S+ of timm; 64 wide heads as there."""
    shape = {"patch_size": 8, "embed_dim": 128, "num_heads": 2, "depth": 2}
    theirs = perturb(timm.create_model("vit_small_plus_patch16_dinov3", num_classes=0, **shape))
    file = tmp_path_factory.mktemp("dinov3") / "model.safetensors"
    save_file(theirs.state_dict(), file)
    return file


@pytest.fixture(scope="module")
def run(weights: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("runs") / "run"
    changes: dict[str, Any] = {"masked_weight": 1.0, "freeze_backbone_epochs": 0, "checkpoint_every_steps": 2}
    torch.set_num_threads(1)  # as the tests, since it is compared to the bit; a module's fixture is before theirs
    return package.pretrain(images / "train", out=out, recipe="adclr_small", init=weights, **(FREE | changes))


def test_they_are_trained_further_and_stay_dinov3s(run: Run, weights: Path) -> None:
    settings = run.settings()
    assert settings is not None
    model = settings.model
    assert (model.position_embedding, model.mlp, model.num_registers) == ("rotary", "gated", 4)
    assert (model.norm_eps, model.layer_scale, model.shape) == (1e-5, 1.0, (128, 2, 2))
    state, started = load_file(run.path / "backbone.safetensors"), load_weights(weights).vit.state_dict()
    assert state.keys() == started.keys()
    moved = {name for name, tensor in state.items() if not torch.equal(tensor, started[name])}
    assert moved == state.keys()
    for block in range(2):
        assert state[f"blocks.{block}.attn.qkv.bias"][128:256].count_nonzero() == 0  # keys have none
    described = json.loads((run.path / "backbone.json").read_text())["architecture"]
    assert (described["position_embedding"], described["mlp"]) == ("rotary", "gated")


def test_a_run_that_was_cut_off_goes_on_to_the_same_weights(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "cut", symlinks=True)
    cut = Run(tmp_path / "cut")
    *_, before, last = cut.steps()
    for name in ("backbone.safetensors", "results.json", "checkpoints/latest"):
        (cut.path / name).unlink()
    shutil.rmtree(cut.checkpoints / f"step_{last}")
    (cut.checkpoints / "latest").symlink_to(f"step_{before}")
    cli.main(["pretrain", "--resume", "--out", str(cut.path)])
    state, again = (load_file(one.path / "backbone.safetensors") for one in (run, cut))
    assert all(torch.equal(tensor, again[name]) for name, tensor in state.items())


def test_they_are_refused_for_another_architecture(weights: Path, images: Path, tmp_path: Path) -> None:
    for changes in ({"position_embedding": "learned"}, {"mlp": "plain"}):
        with pytest.raises(UserError, match=f"model.{next(iter(changes))}="):
            package.pretrain(
                images / "train", out=tmp_path / "run", recipe="adclr_small", init=weights, **(FREE | changes)
            )
    assert not (tmp_path / "run").exists()


def test_they_are_scored_embedded_and_drawn(run: Run, images: Path, tmp_path: Path) -> None:
    for name, changes in (("knn", {"k": 3}), ("matching", {}), ("finetune", {"epochs": 1, "batch_size": 16})):
        data = images / "val" if name == "matching" else images
        scores = package.evaluate(name, weights=run.path, data=data, device="cpu", **changes)
        assert all(np.isfinite(value) for value in scores.values() if isinstance(value, float))
    package.embed(run.path, images / "val", out=tmp_path / "features", dense=True, device="cpu")
    assert any((tmp_path / "features").iterdir())
    pictures = [str(path) for path in sorted((images / "val").rglob("*.*"))[:2]]
    for name, (kind, *_) in FIGURES.items():
        visualize.write_figures(name, str(run.path), pictures, tmp_path / name, build(kind, {"device": "cpu"}))


@torch.no_grad()
def test_the_explorer_asks_as_the_vit_answers(run: Run) -> None:
    library = Library("x", load_weights(run.path), 32)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 48), np.uint8)
    library.read([0], [library.prepare(pixels)])
    box = (0.25, 0.25, 0.75, 0.75)
    (answer,) = library.query(0, box)
    image = library.inputs[0]
    pixels, crop = (analysis.network_input(library.weights, part) for part in (image.pixels, image.crop(box, 8)))
    expected = library.vit.attention(pixels[None], crop[None, None])[0, :, -1, library.vit.num_prefix : -1]
    of_patches = expected.mean(0).flatten()
    shares = answer.attention.flatten() / answer.attention.sum()
    np.testing.assert_allclose(shares, of_patches / of_patches.sum(), rtol=0.05, atol=0.001)
