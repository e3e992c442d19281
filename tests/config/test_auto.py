"""The automatic choice, the fitted micro-batch, and the recipes that are shipped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import adclr as package
from adclr.config import auto, parsing
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.data import collection
from adclr.data.sources import ImageFolder
from adclr.training import job, launch, micro_batch, plan_cost
from tiny import TINY, tiny

GIB = 2**30


@pytest.mark.parametrize(
    ("images", "side", "memory", "recipe", "expected"),
    [
        (1_300_000, 400, 140 * GIB, "adclr_plus_vitb16", {}),
        (1_300_000, 400, 24 * GIB, "adclr_plus_vits16", {}),
        (1_300_000, 400, None, "adclr_cpu", {"train.epochs": 20}),
        (400, 1200, None, "adclr_cpu", {"train.batch_size": 32, "train.epochs": 120}),
        (3_000, 1200, None, "adclr_cpu", {"train.batch_size": 32, "train.epochs": 100}),
        (9_469, 90, None, "adclr_cpu", {"views.global_size": 64, "views.local_size": 32, "model.patch_size": 8}),
        (200_000, 400, 140 * GIB, "adclr_plus_vits16", {}),
        (
            9_469,
            224,
            140 * GIB,
            "adclr_plus_small",
            {"views.global_size": 224, "model.patch_size": 16, "train.batch_size": 64},
        ),
        (
            60_000,
            32,
            24 * GIB,
            "adclr_plus_small",
            {"views.global_size": 32, "views.local_size": 16, "model.patch_size": 4},
        ),
        (
            500_000,
            96,
            24 * GIB,
            "adclr_plus_small",
            {"views.global_size": 96, "views.local_size": 48, "model.patch_size": 8},
        ),
        (20, 300, None, "adclr_cpu", {"train.batch_size": 2}),
        (1, 17, None, "adclr_cpu", {"train.batch_size": 1, "views.global_size": 16, "views.local_size": 8}),
        (1, 17, 24 * GIB, "adclr_plus_small", {"train.batch_size": 1, "views.global_size": 16}),
    ],
)
def test_choices_fit_the_collection_and_can_be_built(
    images: int, side: int, memory: int | None, recipe: str, expected: dict[str, object]
) -> None:
    choice = auto.choose(images, side, memory)
    assert choice.recipe == recipe
    assert expected.items() <= choice.settings.items()
    settings = parsing.build(Settings, parsing.load_recipe(recipe), choice.settings)
    assert settings.train.batch_size <= images
    assert all(len(reason) > 10 for reason in choice.reasons)
    assert any(recipe in reason for reason in choice.reasons)


def test_the_recipe_for_a_cpu_is_small_and_of_the_same_method() -> None:
    """On 2 cores 25.8 GFLOP an image, the choice of before, is 2 images/s; this many are some 20."""
    cpu, small = (parsing.build(Settings, parsing.load_recipe(name)) for name in ("adclr_cpu", "adclr_small"))
    assert plan_cost.flops(cpu).step < 5e9
    assert (cpu.optim.lr * cpu.train.batch_size) == (small.optim.lr * small.train.batch_size)
    differing = {line.split()[0] for line in parsing.differences(cpu, small) if line.startswith("method.")}
    assert differing == {"method.num_prototypes", "method.head_hidden_dim"}
    for images, hours in ((400, 1), (3_000, 5), (10_000, 5)):
        settings = parsing.build(Settings, parsing.load_recipe("adclr_cpu"), auto.choose(images, 800, None).settings)
        assert images * settings.train.epochs / 20 / 3600 < hours


def test_the_median_side_is_read_from_headers(images: Path, tmp_path: Path) -> None:
    assert collection.median_side(ImageFolder(images / "train")) == 24
    (tmp_path / "a.jpg").write_bytes(b"nothing")
    with pytest.raises(UserError, match="are they images"):
        collection.median_side(ImageFolder(tmp_path))


def test_a_recipe_is_chosen_for_files_of_bands(tmp_path: Path) -> None:
    import tifffile

    for number in range(8):
        pixels = np.zeros((60, 70, 5), np.uint16)
        tifffile.imwrite(tmp_path / f"{number}.tif", pixels, photometric="minisblack", planarconfig="contig")
    bands = {"num_channels": 5, "mean": [0.5] * 5, "std": [0.25] * 5, "device": "cpu"}
    launched = launch.prepare(tmp_path, tmp_path.parent / "run", None, bands)
    assert (launched.settings.recipe, launched.settings.views.global_size) == ("auto: adclr_cpu", 56)


@pytest.mark.parametrize("name", parsing.recipe_names())
def test_every_recipe_opens_with_command_cost_and_score(name: str) -> None:
    lines = parsing.recipe_text(name).splitlines()
    assert lines[0].startswith("# ")
    for line, word in zip(lines[1:4], ("# command:", "# cost:", "# expected:"), strict=True):
        assert line.startswith(word)
        assert len(line) > len(word) + 5
        assert not any(part.isupper() and "_" in part for part in line.split()), "a figure that was never filled in"
    assert name.removesuffix(".yaml") in lines[1] or name == "demo"


@pytest.mark.parametrize("name", parsing.recipe_names())
def test_every_recipe_trains(name: str, images: Path, tmp_path: Path) -> None:
    """As it is but for size: fewer and smaller everything."""
    shrink = {k: v for k, v in TINY.items() if not k.startswith(("views.num", "method.momentum"))}
    keep = parsing.build(Settings, parsing.load_recipe(name))
    shrink |= {"num_local": min(2, keep.views.num_local), "num_queries": min(2, keep.views.num_queries), "epochs": 1,
               "warmup_epochs": 0, "freeze_last_layer_epochs": 0.5}  # fmt: skip
    run = package.pretrain(images / "train", out=tmp_path / "run", recipe=name, **shrink)
    row = list(run.rows("metrics.jsonl"))[-1]
    assert row["loss"] > 0
    assert (row["loss_query"] > 0) == (not name.startswith(("dino", "ibot", "selfpatch")))
    assert (row["loss_masked"] > 0) == name.startswith(("ibot", "adclr_mim"))
    assert (row["loss_neighbor"] > 0) == name.startswith("selfpatch")
    stored = run.settings()
    assert stored is not None
    assert stored.recipe == name


def test_recipes_are_the_methods_they_name() -> None:
    made = {name: parsing.build(Settings, parsing.load_recipe(name)) for name in parsing.recipe_names()}
    for family in ("vits16", "small"):
        dino, adclr = made[f"dino_{family}"], made[f"adclr_{family}"]
        own = ["method.query_weight is 0.5 there and 0.1 here"] if family == "small" else []  # nothing without queries
        assert sorted(parsing.differences(dino, adclr)) == [*own, "views.num_queries is 0 there and 10 here"]
        ibot, star = made[f"ibot_{family}"], made[f"adclr_mim_{family}"]
        assert parsing.differences(ibot, star) == ["views.num_queries is 0 there and 10 here"]
        assert star.method.masked_weight == 1.0
    small, base = made["adclr_vits16"], made["adclr_vitb16"]
    assert (small.optim.lr, small.optim.clip_norm, small.method.train_gain) == (5e-4, 3.0, True)
    assert (base.optim.lr, base.optim.clip_norm, base.method.train_gain) == (7.5e-4, 0.3, False)
    assert small.method.num_prototypes == 65536
    assert made["ibot_vits16"].method.num_prototypes == 8192


def test_on_a_cpu_the_micro_batch_follows_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, cpu = tiny(batch_size=96), torch.device("cpu")
    method = job.build(settings)
    each = micro_batch.estimate_image_bytes(settings)

    def with_memory(size: float) -> int:
        monkeypatch.setattr(micro_batch, "host_memory", lambda: size / micro_batch.CPU_SHARE)
        return micro_batch.fit_micro_batch(method, settings, 96, cpu, None)

    assert with_memory(1000 * each) == 96
    assert with_memory(50 * each) == 48
    assert with_memory(5 * each) == 4
    with pytest.raises(UserError, match="not even one image fits"):
        with_memory(0.5 * each)


def test_the_estimate_counts_what_a_run_has() -> None:
    base = micro_batch.estimate_image_bytes(tiny())
    for more in ({"num_local": 8}, {"num_queries": 9}, {"depth": 4}, {"num_prototypes": 999}, {"masked_weight": 1.0}):
        assert micro_batch.estimate_image_bytes(tiny(**more)) > base
    views = micro_batch.random_views(tiny(masked_weight=1.0), 3, torch.device("cpu"))
    assert views.masks is not None
    assert views.masks.weight.sum().item() == pytest.approx(1.0)
