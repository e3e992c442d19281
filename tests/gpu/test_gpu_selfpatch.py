"""SelfPatch on a GPU: recorded, without waiting, in chunks, against float64; and its runs."""

from __future__ import annotations

import copy
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import adclr as package
from adclr.config.parsing import build
from adclr.config.settings import Settings
from adclr.model.class_attention import ClassAttentionBlock, select_neighbors
from adclr.model.ops import head_loss
from adclr.model.vit import VisionTransformer
from adclr.system.devices import deterministic
from adclr.system.machine import GIB
from adclr.training import job, micro_batch, plan_cost, schedules
from adclr.training.step import Step
from on_gpu import CUDA, autocast, default_views, for_kernels, write_scenes
from test_gpu_step import SMALL, steps_of

pytestmark = pytest.mark.gpu
SELFPATCH: dict[str, Any] = {"num_queries": 0, "class_attention": 2, "neighbor_weight": 0.1}


@pytest.mark.parametrize("recorded", [False, True])
def test_a_step_never_waits_for_the_gpu(recorded: bool) -> None:
    settings, views = default_views(8, CUDA, **(SELFPATCH | {"num_prototypes": 4096}))
    method = job.build(settings).to(CUDA)
    optimizer = schedules.make_optimizer(method.student, settings)
    step = Step(settings, method, optimizer, CUDA, torch.bfloat16, record=recorded)
    values = schedules.Schedules(settings, 100).at(1000)
    step([views], values)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step([views], values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(step.graphs) == recorded
    assert all(p.isfinite().all() for p in method.parameters())


@pytest.mark.parametrize("changes", [{}, {"num_local": 0}, {"class_attention": 1, "neighbor_weight": 0.0}], ids=str)
def test_a_recorded_step_is_the_step(changes: dict[str, Any]) -> None:
    settings, views = default_views(8, CUDA, **(SMALL | SELFPATCH | changes))
    with deterministic(True):
        plain, losses = steps_of(settings, views, 6, compiled=False, recorded=False)
        again, same = steps_of(settings, views, 6, compiled=False, recorded=True)
    assert same == losses
    for (name, a), b in zip(plain.state_dict().items(), again.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)


def test_a_compiled_and_recorded_step_is_near_the_step() -> None:
    settings, views = default_views(8, CUDA, **(SMALL | SELFPATCH))
    _, losses = steps_of(settings, views, 6, compiled=False, recorded=False)
    _, near = steps_of(settings, views, 6, compiled=True, recorded=True)
    np.testing.assert_allclose(near, losses, rtol=2e-2)


def test_losses_in_chunks_are_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, views = default_views(8, CUDA, **(SELFPATCH | {"drop_path": 0.0}))
    method = job.build(settings).to(CUDA)
    results = []
    for chunks in (False, True):
        monkeypatch.setattr(head_loss, "fits", lambda _, chunks=chunks: chunks)
        losses = method(views, 0.04)
        losses.total.backward()
        assert method.student.patch_head is not None
        gradients = [method.student.patch_head.last_layer.direction.grad, method.student.backbone.cls_token.grad]
        results.append((torch.stack(list(losses)).detach(), [g.clone() for g in gradients if g is not None]))
        method.forget()
    (plain, plain_gradients), (chunked, chunked_gradients) = results
    torch.testing.assert_close(chunked, plain, rtol=1e-5, atol=1e-6)
    assert len(plain_gradients) == 2
    for a, b in zip(chunked_gradients, plain_gradients, strict=True):
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 1 - 1e-5


def test_the_fast_way_has_the_gradients_of_float64() -> None:
    """bfloat16, kernels and chunks. Where two neighbors are equally similar to rounding, another one may be chosen."""
    settings, views = default_views(8, CUDA, **(SELFPATCH | {"num_prototypes": 8192, "drop_path": 0.0}))
    method = job.build(settings).to(CUDA)
    exact = copy.deepcopy(method).double()
    results = []
    for model in (method, exact):
        given = views.map(lambda x: x.double()) if model is exact else views
        with autocast() if model is method else nullcontext():
            losses = model(given, 0.05)
        losses.total.backward()
        gradients = {n: p.grad.double() for n, p in model.student.named_parameters() if p.grad is not None}
        results.append(([loss.item() for loss in losses], gradients))
    (losses, gradients), (exact_losses, exact_gradients) = results
    assert losses == pytest.approx(exact_losses, rel=1e-2)
    assert gradients.keys() == exact_gradients.keys()
    for name, expected in exact_gradients.items():
        if name.endswith("attn.k.bias"):  # adds the same number to all logits of a softmax: its gradient is 0
            scale = exact_gradients[name.replace("k.bias", "v.bias")].norm()
            assert max(expected.norm(), gradients[name].norm()) < 0.01 * scale, name
            continue
        cosine = torch.nn.functional.cosine_similarity(gradients[name].flatten(), expected.flatten(), dim=0)
        assert cosine > (0.99 if name.startswith("patch_head") else 0.999), (name, cosine.item())


@torch.no_grad()
def test_neighbors_are_those_of_the_cpu_and_may_be_many() -> None:
    patches = torch.randn(400, 196, 64)  # more windows than kernels of attention take sequences
    ours, theirs = select_neighbors(patches.to(CUDA), (14, 14), 4).cpu(), select_neighbors(patches, (14, 14), 4)
    assert torch.equal(ours.sort(dim=1).values, theirs.sort(dim=1).values)
    block = ClassAttentionBlock(64, 2, 1.0, 1e-6)
    token = torch.randn(1, 64)
    keys, values = (x.flatten(0, 1)[theirs] for x in block.project(patches))
    expected = block(token, keys, values, few=True)
    block = block.to(CUDA)
    keys, values = (x.flatten(0, 1)[ours.to(CUDA)] for x in block.project(patches.to(CUDA)))
    torch.testing.assert_close(block(token.to(CUDA), keys, values, few=True).cpu(), expected, rtol=1e-3, atol=1e-3)


def test_no_logits_of_all_patches_are_stored() -> None:
    """With K = 65536 in the second head too they would be 2 · 680 · 16 · 65536 numbers, 2.8 GiB in half precision."""
    peaks = []
    for prototypes in (4096, 65536):
        settings = build(Settings, SELFPATCH | {"neighbor_prototypes": prototypes, "num_prototypes": 4096})
        method = job.build(settings).to(CUDA)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            with autocast():
                method(micro_batch.random_views(settings, 16, CUDA), 0.04).total.backward()
        peaks.append(torch.cuda.max_memory_allocated())
        del method
    more_weights = 4 * 61440 * 256 * 6  # two branches, gradients of two kinds, copies
    assert peaks[1] - peaks[0] < more_weights + head_loss.CHUNK_BYTES + 0.3 * GIB


def test_memory_is_about_what_is_planned() -> None:
    settings = build(Settings, SELFPATCH)
    method = job.build(settings).to(CUDA)
    _, measured = micro_batch.measure_memory(method, settings, CUDA, torch.bfloat16)
    _, estimated = plan_cost.gpu_memory(settings)
    print(f"an image: {measured / 2**20:.1f} MiB measured, {estimated / 2**20:.1f} estimated")
    assert 0.5 < estimated / measured < 2


@torch.no_grad()
def test_tokens_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    vit = VisionTransformer(384, 3, 6, 16, 224, class_attention=2).eval()
    images = torch.randn(2, 3, 224, 224)
    expected = vit(images)
    vit = vit.to(CUDA)
    exact = vit(images.to(CUDA))
    with autocast():
        near = vit(images.to(CUDA))
        memory = vit.read(images.to(CUDA))
    for name in ("cls", "patches"):
        reference = getattr(expected, name)
        for tokens, most in ((exact, 1e-3), (near, 2e-2), (memory.tokens, 2e-2)):
            error = (getattr(tokens, name).float().cpu() - reference).norm() / reference.norm()
            assert error < most, name


def test_a_run_ends_resumes_and_loads(tmp_path: Path) -> None:
    images = write_scenes(tmp_path / "scenes")
    changes = for_kernels(
        **{"views.local_size": 12, "probe.data": str(images), "checkpoint_every_steps": 3, **SELFPATCH}
    )
    run = package.pretrain(images / "train", out=tmp_path / "run", **changes)
    assert json.loads((run.path / "results.json").read_text())["steps"] == 16
    (run.path / "results.json").unlink()
    shutil.rmtree(run.checkpoints / "step_16")
    package.pretrain(images / "train", out=tmp_path / "run", **changes)
    starts = json.loads((run.path / "provenance.json").read_text())
    assert [start["from_step"] for start in starts] == [0, 15]
    scores = package.evaluate("knn", weights=run.path, data=images)
    on_cpu = package.evaluate("knn", weights=run.path, data=images, device="cpu")
    assert abs(scores["knn_top1"] - on_cpu["knn_top1"]) <= 100 / 16


def test_two_deterministic_runs_are_the_same_to_the_bit(tmp_path: Path) -> None:
    images = write_scenes(tmp_path / "scenes")
    changes = for_kernels(**{"views.local_size": 12, "deterministic": True, **SELFPATCH})
    runs = [package.pretrain(images / "train", out=tmp_path / name, **changes) for name in ("a", "b")]
    losses = [[row["loss"] for row in run.rows("metrics.jsonl")] for run in runs]
    assert losses[0] == losses[1]
