"""Scores on a GPU: crops and augmentation as on the CPU, the probe and fine-tuning end to end, compiled and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adclr.data.augment import crop
from adclr.data.packed import pack
from adclr.data.random_draws import Draws, crop_boxes
from adclr.data.sets.classes import open_labeled
from adclr.evals import finetune, linear
from adclr.evals.mixing import Eraser
from adclr.evals.randaugment import randaugment
from adclr.evals.trainer import Trainer
from adclr.model.vit import VisionTransformer
from on_gpu import CUDA, images_of
from plain_images import colored, weights

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")


def keys(count: int) -> np.ndarray:
    return np.arange(count).astype(np.uint64)


def test_crops_are_the_cpus() -> None:
    packed = pack(images_of(8))
    draws = Draws(0, 0, keys(8))
    boxes = crop_boxes(draws, "train", 1, packed.sizes, (0.08, 1.0), (3 / 4, 4 / 3))[:, 0]
    flip = draws.chance("flip", 0.5, 1)[:, 0]
    there, here = (crop(packed.to(device), boxes, flip, 224).cpu() for device in (CUDA, CPU))
    torch.testing.assert_close(there, here, rtol=0, atol=1 / 255)


def test_augmentation_is_the_cpus() -> None:
    x = torch.rand(64, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    made = []
    for device in (CUDA, CPU):
        draws = Draws(0, 0, keys(64))
        altered = randaugment(x.to(device).clone(), draws, 9.0, (0.5, 0.4, 0.3))
        made.append(Eraser(0.25, 3, 48, 0, device)(altered, draws).cpu())
    assert (made[0] - made[1]).abs().mean() < 1e-3  # a threshold may fall on the other side of a pixel


@pytest.mark.parametrize("quick", [True, False])
def test_a_probe_learns(tmp_path: Path, quick: bool) -> None:
    data = open_labeled(colored(tmp_path, 96, 48))
    made = weights(64, patch=8, size=48)
    made.vit.to(CUDA)
    actual = linear.score(made, data, linear.Settings(epochs=10, batch_size=32, quick=quick), CUDA)
    assert actual["linear_top1"] == 100


class Stopped(BaseException):
    pass


def test_fine_tuning_is_compiled_learns_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = open_labeled(colored(tmp_path / "data", 96, 48))
    settings = finetune.Settings(epochs=12, batch_size=32, lr=0.01, layer_decay=1.0, ema=0.5, checkpoint_minutes=1e-9)

    def run(place: Path) -> dict[str, Any]:
        torch.manual_seed(0)
        made = weights(64, patch=8, size=48)
        made.vit.to(CUDA)
        return finetune.score(made, data, settings, CUDA, place)

    compiled: list[VisionTransformer] = []
    real = VisionTransformer.compile_blocks
    monkeypatch.setattr(VisionTransformer, "compile_blocks", lambda vit: (compiled.append(vit), real(vit))[1])
    assert run(tmp_path / "whole")["finetune_top1"] == 100
    assert compiled
    assert "could not be compiled" not in capsys.readouterr().err
    step = Trainer._step

    def stopping(trainer: Trainer, model: Any, batches: Any, number: int, lr: float) -> dict[str, torch.Tensor]:
        if number == 20:
            raise Stopped
        return step(trainer, model, batches, number, lr)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", stopping)
        with pytest.raises(Stopped):
            run(tmp_path / "parts")
    assert run(tmp_path / "parts")["finetune_top1"] == 100
