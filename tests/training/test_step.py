"""The trainer against a loop written out from the formulas, and what a default is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import adclr as package
from adclr.config import parsing
from adclr.config.settings import Settings
from adclr.data import augment
from adclr.data.batches import drop_path_seed
from adclr.data.decode import Decoder
from adclr.data.packed import pack
from adclr.data.random_draws import epoch_order
from adclr.data.sources import ImageFolder
from adclr.data.view_plan import plan_batch
from adclr.model.losses import Center
from adclr.model.method import ADCLR
from adclr.training import job
from tiny import TINY, tiny

CHANGES: dict[str, Any] = {
    "masked_weight": 1.0,
    "model.drop_path": 0.0,
    "epochs": 3,
    "train.batch_size": 8,
    "warmup_epochs": 0.5,
    "teacher_temperature_warmup_epochs": 2,
    "weight_decay": 0.1,
    "weight_decay_end": 0.3,
    "clip_norm": 0.05,
    "center_momentum": 0.8,
    "query_weight": 0.7,
    "mean": (0.3, 0.4, 0.5),
    "std": (0.2, 0.3, 0.1),
}


def cosine(a: float, b: float, x: float) -> float:
    return b + (a - b) * (1 + math.cos(math.pi * x)) / 2


def written_out(settings: Settings, folder: Path) -> tuple[ADCLR, list[float]]:
    """3 epochs of 4 steps of 8 images; AdamW, its clipping and the moving average by hand."""
    source, method = ImageFolder(folder), job.build(settings)
    names = [name for name, _ in method.student.named_parameters()]
    students = dict(method.student.named_parameters())
    teachers = dict(method.teacher.named_parameters())
    first = {name: torch.zeros_like(students[name], dtype=torch.float64) for name in names}
    second = {name: torch.zeros_like(students[name], dtype=torch.float64) for name in names}
    count = dict.fromkeys(names, 0)
    total, losses = 12, []
    for step in range(total):
        epoch, place = divmod(step, 4)
        order = epoch_order(settings.train.seed, epoch, source.keys)[place * 8 : place * 8 + 8]
        packed = pack([Decoder()(source.read(int(i))) for i in order])
        views = augment.render(
            packed, plan_batch(settings, epoch, source.keys[order], packed.sizes), (0.3, 0.4, 0.5), (0.2, 0.3, 0.1)
        )
        actual = method(views, 0.04 + (0.07 - 0.04) * min(1.0, epoch / 2))
        losses.append(actual.total.item())
        method.zero_grad()
        actual.total.backward()
        lr = 0.01 * 8 / 256
        lr = lr * step / 2 if step < 2 else cosine(lr, 1e-6, (step - 2) / 10)
        decay, momentum = cosine(0.1, 0.3, step / 12), cosine(0.9, 1.0, step / 12)
        with torch.no_grad():
            for name in names:
                p, g = students[name], students[name].grad
                if name.startswith("head.last_layer") and epoch < 1:
                    continue  # frozen
                assert g is not None
                g = g.double()
                g = g * min(1.0, 0.05 / (g.norm().item() + 1e-6))
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.999 * second[name] + 0.001 * g * g
                count[name] += 1
                m = first[name] / (1 - 0.9 ** count[name])
                v = second[name] / (1 - 0.999 ** count[name])
                q = p.double() * (1 - lr * decay * (p.ndim > 1)) - lr * m / (v.sqrt() + 1e-8)
                p.copy_(q.float())
            for name in names:  # after the student has moved
                teachers[name].mul_(momentum).add_(students[name], alpha=1 - momentum)
            for center in method.centers.values():
                assert isinstance(center, Center)
                center.update(torch.tensor(True))
    return method, losses


def test_training_is_the_loop_written_out(images: Path, tmp_path: Path) -> None:
    settings = parsing.build(Settings, parsing.load_recipe("adclr_vits16"), TINY, CHANGES)
    run = package.pretrain(images / "train", out=tmp_path / "run", recipe="adclr_vits16", **(TINY | CHANGES))
    method, losses = written_out(settings, images / "train")
    rows = [row["loss"] for row in run.rows("metrics.jsonl")]
    assert rows == pytest.approx(losses, rel=2e-5)
    for part, module in (("student", method.student), ("teacher", method.teacher), ("centers", method.centers)):
        expected = module.state_dict()
        for name, tensor in load_file(run.checkpoints / "latest" / f"{part}.safetensors").items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=2e-5, msg=f"{part} {name}")


def test_drop_path_starts_anew_for_every_step_and_micro_batch(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    seed = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda number: (seeds.append(number), seed(number))[1])
    package.pretrain(images / "train", out=tmp_path / "run", **(TINY | {"micro_batch_size": 4, "epochs": 1}))
    seeds = seeds[: 1 + 4 * 2]  # the initial weights, then 4 steps of 2 micro-batches; views of its own images follow
    assert len(seeds) == 9
    assert len(set(seeds)) == len(seeds)
    monkeypatch.setattr("adclr.system.distributed.rank", lambda: 1)
    assert drop_path_seed(tiny(), 0, 0) not in seeds  # another process draws otherwise


def test_the_probe_scores_the_teacher(images: Path, tmp_path: Path) -> None:
    """A teacher that stands still scores the same before and after, and as the exported weights do."""
    still = {"momentum": 1.0, "momentum_end": 1.0, "lr": 1.0, "probe.data": str(images), "k": 5}
    run = package.pretrain(images / "train", out=tmp_path / "run", **(TINY | still))
    first, last = (row["knn_top1"] for row in run.rows("metrics.jsonl") if "knn_top1" in row)
    assert first == last
    scores = package.evaluate("knn", weights=run.path, data=images, k=[5])
    assert scores["knn_top1_k5"] == last
    student = load_file(run.checkpoints / "latest" / "student.safetensors")
    teacher = load_file(run.checkpoints / "latest" / "teacher.safetensors")
    assert not np.allclose(student["backbone.norm.weight"], teacher["backbone.norm.weight"])


def test_defaults_are_the_papers() -> None:
    """ViT-S/16 as the method's table of training has it."""
    s = Settings()
    v, m, o = s.views, s.method, s.optim
    assert (s.model.shape, s.model.patch_size, s.model.drop_path) == ((384, 12, 6), 16, 0.1)
    assert (s.model.query_keys, s.model.position_resampling) == ("image", "antialias")
    assert (v.global_size, v.local_size, v.num_local, v.num_queries) == (224, 96, 10, 10)
    assert (v.global_scale, v.local_scale, v.query_scale) == ((0.4, 1.0), (0.05, 0.4), (0.05, 0.15))
    assert (v.aspect_ratio, v.flip) == ((3 / 4, 4 / 3), 0.5)
    assert (v.brightness, v.contrast, v.saturation, v.hue, v.jitter, v.gray) == (0.4, 0.4, 0.2, 0.1, 0.8, 0.2)
    assert (v.global_blur, v.local_blur, v.blur_sigma, v.solarize) == ((1.0, 0.1), 0.5, (0.1, 2.0), (0.0, 0.2))
    assert (v.mask_probability, v.mask_ratio, v.query_photometric) == (0.5, (0.1, 0.5), "none")
    assert (m.query_weight, m.masked_weight, m.queries_in_local_views) == (0.5, 0.0, False)
    assert (m.center, m.center_momentum, m.target) == ("separate", 0.9, "center")
    assert (m.student_temperature, m.teacher_temperature_start, m.teacher_temperature) == (0.1, 0.04, 0.07)
    assert (m.teacher_temperature_warmup_epochs, m.momentum, m.momentum_end) == (30, 0.996, 1.0)
    assert (m.head_hidden_dim, m.head_bottleneck_dim, m.num_prototypes, m.train_gain) == (2048, 256, 65536, True)
    assert (o.lr, o.final_lr, o.warmup_epochs, o.betas) == (5e-4, 1e-6, 10, (0.9, 0.999))
    assert (o.weight_decay, o.weight_decay_end, o.clip_norm, o.freeze_last_layer_epochs) == (0.04, 0.4, 3.0, 1)
    assert (s.train.batch_size, s.data.mean, s.data.std) == (1024, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    b = parsing.build(Settings, parsing.load_recipe("adclr_vitb16"))
    assert (b.model.shape, b.optim.lr, b.optim.final_lr, b.optim.clip_norm) == ((768, 12, 12), 7.5e-4, 2e-6, 0.3)
    assert (b.optim.freeze_last_layer_epochs, b.method.teacher_temperature_warmup_epochs) == (3, 50)
    assert b.method.train_gain is False
