"""What must hold on a GPU: the bits of the method under bfloat16, views as on the CPU, no waiting, memory that fits."""

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

import adclr as package
from adclr import fit, fused, scenes, training
from adclr.augment import Views, pack, render
from adclr.blocks import QueryKeys
from adclr.config import build
from adclr.draws import key_of
from adclr.feed import Batch
from adclr.settings import Settings
from adclr.views import plan
from adclr.weights import create_backbone
from tiny import TINY, tiny, words

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def autocast() -> torch.autocast:
    return torch.autocast("cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("query_keys", ["image", "patches", "image_and_self"])
@torch.no_grad()
def test_the_three_consequences_in_bfloat16(query_keys: QueryKeys) -> None:
    torch.manual_seed(0)
    vit = create_backbone("vit_small_patch16", query_keys=query_keys).eval().to(CUDA)
    images = torch.randn(4, 3, 224, 224, device=CUDA)
    queries = torch.randn(4, 10, 3, 16, 16, device=CUDA)
    others = torch.randn_like(queries)
    others[:, 7] = queries[:, 7]
    order = torch.randperm(10, device=CUDA)
    with autocast():
        a, b, c, none = vit(images, queries), vit(images, others), vit(images, queries[:, order]), vit(images)
    assert torch.equal(a.cls, b.cls)
    assert torch.equal(a.patches, b.patches)
    assert torch.equal(a.queries[:, 7], b.queries[:, 7])
    assert not torch.equal(a.queries, b.queries)
    for x, y in ((a.queries[:, order], c.queries), (a.cls, none.cls), (a.patches, none.patches)):
        assert ((x - y).norm() / x.norm()).item() < 1e-2


def test_no_gradient_from_queries_in_bfloat16() -> None:
    vit = create_backbone("vit_small_patch16").to(CUDA)
    queries = torch.randn(2, 10, 3, 16, 16, device=CUDA, requires_grad=True)
    with autocast():
        tokens = vit(torch.randn(2, 3, 224, 224, device=CUDA), queries)
    (tokens.cls.float().sum() + tokens.patches.float().square().sum()).backward()
    assert queries.grad is not None
    assert torch.count_nonzero(queries.grad) == 0


def images_of(count: int) -> list[np.ndarray]:
    sizes = [(200, 260), (97, 64), (300, 301), (31, 17)]
    made = []
    for i in range(count):
        height, width = sizes[i % len(sizes)]
        image = scenes.scene(0, i, 301).image[:height, :width]
        made.append(np.ascontiguousarray(image.transpose(2, 0, 1)))
    return made


def default_views(count: int, device: torch.device, **changes: Any) -> tuple[Settings, Views]:
    settings = build(Settings, changes)
    packed = pack(images_of(count), pin=device.type == "cuda")
    keys = np.array([key_of(str(i)) for i in range(count)], np.uint64)
    made = plan(settings, 0, keys, packed.sizes)
    return settings, render(packed.to(device), made, settings.data.mean, settings.data.std)


def test_views_are_those_of_the_cpu() -> None:
    _, cpu = default_views(8, torch.device("cpu"), masked_weight=1.0)
    _, gpu = default_views(8, CUDA, masked_weight=1.0)
    assert cpu.local_crops is not None
    assert gpu.local_crops is not None
    assert cpu.queries is not None
    assert gpu.queries is not None
    for a, b in ((cpu.global_crops, gpu.global_crops), (cpu.local_crops, gpu.local_crops), (cpu.queries, gpu.queries)):
        difference = (a - b.cpu()).abs()
        assert difference.mean() < 1e-4
        assert (difference > 0.05).float().mean() < 1e-3  # a pixel at the threshold of solarising, or of no hue
    assert cpu.masks is not None
    assert gpu.masks is not None
    assert torch.equal(cpu.masks.grid, gpu.masks.grid.cpu())
    assert torch.equal(cpu.masks.index, gpu.masks.index.cpu())


def test_bfloat16_losses_are_near_float32s() -> None:
    settings, views = default_views(8, CUDA, masked_weight=1.0, num_prototypes=8192, drop_path=0.0)
    method = training.build(settings).to(CUDA)
    exact = method(views, 0.04)
    with autocast():
        near = method(views, 0.04)
    for name in ("global_", "query", "masked"):
        assert getattr(near, name).item() == pytest.approx(getattr(exact, name).item(), rel=1e-2), name


def test_losses_in_chunks_are_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """At full size in float32; and with the network in bfloat16, whose own rounding is then the larger."""
    settings, views = default_views(8, CUDA, masked_weight=1.0, **{"model.drop_path": 0.0})
    method = training.build(settings).to(CUDA)
    found = {}
    for name, chunks, low in (("plain", False, False), ("chunks", True, False), ("bfloat16", True, True)):
        monkeypatch.setattr(fused, "possible", lambda images, chunks=chunks: chunks)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=low):
            losses = method(views, 0.04)
        losses.total.backward()
        head = method.student.head
        gradients = [p.grad.flatten() for p in (head.mlp[0].weight, head.last_layer.direction) if p.grad is not None]
        found[name] = torch.stack(list(losses)).detach(), gradients
        method.zero_grad(set_to_none=True)
    for name, tolerance, cosine in (("chunks", 1e-5, 1 - 1e-6), ("bfloat16", 1e-2, 0.98)):
        torch.testing.assert_close(found[name][0], found["plain"][0], rtol=tolerance, atol=0)
        for a, b in zip(found[name][1], found["plain"][1], strict=True):
            assert torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0) > cosine, name


@pytest.mark.parametrize("recorded", [False, True])
def test_a_step_never_waits_for_the_gpu(recorded: bool) -> None:
    """Views, forward, backward, update, teacher and centers, with the debug mode in which waiting is an error."""
    from adclr import optim
    from adclr.step import Step

    settings = build(Settings, {"masked_weight": 0.0 if recorded else 1.0, "num_prototypes": 4096})
    method = training.build(settings).to(CUDA)
    packed = pack(images_of(8), pin=True)
    made = plan(settings, 0, np.arange(8, dtype=np.uint64), packed.sizes)
    values = optim.Schedules(settings, 100).at(1000)
    optimizer = optim.make_optimizer(method.student, settings)
    take = Step(settings, method, optimizer, CUDA, torch.bfloat16, record=recorded)

    def step() -> None:
        views = render(packed.to(CUDA), made, settings.data.mean, settings.data.std)
        torch.manual_seed(1)
        take([views], values)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p.isfinite().all() for p in method.parameters())


def write_scenes(folder: Path) -> Path:
    scenes.write(folder, seed=3, num_train=64, num_val=16, size=48, show=False)
    return folder


def test_a_run_on_the_gpu_ends_resumes_and_loads(tmp_path: Path) -> None:
    images = write_scenes(tmp_path / "scenes")
    changes = TINY | {
        "device": "cuda",
        "compile": "off",
        "masked_weight": 1.0,
        "probe.data": str(images),
        "checkpoint_every_steps": 3,
    }
    run = package.pretrain(images / "train", out=tmp_path / "run", **changes)
    results = json.loads((run.path / "results.json").read_text())
    assert results["steps"] == 16
    assert results["gpu_gib"] > 0
    start = json.loads((run.path / "provenance.json").read_text())[0]
    assert start["precision"] == "bfloat16"
    assert start["micro_batch_size"] == 8
    (run.path / "results.json").unlink()
    shutil.rmtree(run.checkpoints / "step_16")
    package.pretrain(images / "train", out=tmp_path / "run", **changes)
    starts = json.loads((run.path / "provenance.json").read_text())
    assert [start["from_step"] for start in starts] == [0, 15]
    assert run.finished
    scores = package.evaluate("knn", weights=run.path, data=images)
    on_cpu = package.evaluate("knn", weights=run.path, data=images, device="cpu")
    assert abs(scores["knn_top1"] - on_cpu["knn_top1"]) <= 100 / 16


def test_the_micro_batch_is_fitted_to_memory() -> None:
    settings = build(Settings, {})
    method = training.build(settings).to(CUDA)
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    fixed, each = fit.measure(method, settings, CUDA, torch.bfloat16)
    assert all(torch.equal(tensor, before[name]) for name, tensor in method.state_dict().items())
    assert all(p.grad is None for p in method.parameters())
    for count in (16, 32):
        torch.cuda.reset_peak_memory_stats()
        with autocast():
            losses = method(fit.random_views(settings, count, CUDA), 0.04)
        losses.total.backward()
        peak = torch.cuda.max_memory_allocated()
        method.zero_grad(set_to_none=True)
        del losses
        predicted = fixed + count * each
        print(f"micro-batch {count}: {peak / fit.GIB:.2f} GiB, predicted {predicted / fit.GIB:.2f}")
        assert 0.8 < predicted / peak < 1.4
    assert fit.fitted(method, settings, 1024, CUDA, torch.bfloat16) >= 256


def test_too_large_a_micro_batch_is_one_sentence_with_the_size_that_fits(tmp_path: Path) -> None:
    images = write_scenes(tmp_path / "scenes")
    changes = {
        "size": "small",
        "num_prototypes": 65536,
        "batch_size": 64,
        "micro_batch_size": 64,
        "warmup_epochs": 0,
        "device": "cuda",
        "compile": "off",
    }
    limited = (
        "import sys, torch; torch.cuda.set_per_process_memory_fraction(5 * 2**30 / "
        "torch.cuda.get_device_properties(0).total_memory); from adclr.cli import main; main(sys.argv[1:])"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            limited,
            "pretrain",
            str(images / "train"),
            "--out",
            str(tmp_path / "run"),
            *words(changes),
        ],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "64 images at once do not fit" in done.stderr
    assert "set train.micro_batch_size=" in done.stderr
    print(done.stderr.strip().splitlines()[-1])


def test_batches_are_pinned(tmp_path: Path) -> None:
    from adclr.decode import Decoder
    from adclr.feed import Feed
    from adclr.sources import ImageFolder

    source = ImageFolder(write_scenes(tmp_path / "scenes") / "train")
    settings = tiny()
    feed = Feed(source, 4, Decoder(), pin=True)
    batch: Batch = next(feed.batches([(0, np.arange(8))], lambda e, k, s: plan(settings, e, k, s)))
    assert batch.packed.bytes.is_pinned()


def test_a_run_from_the_gpu_cache_sees_what_a_run_from_files_sees(tmp_path: Path) -> None:
    images = write_scenes(tmp_path / "scenes")
    losses = {}
    for cache in ("off", "ram", "gpu", "auto"):
        run = package.pretrain(
            images / "train",
            out=tmp_path / cache,
            recipe="adclr_small",
            **(TINY | {"device": "cuda", "compile": "off", "cache": cache}),
        )
        losses[cache] = [row["loss"] for row in run.rows("metrics.jsonl")]
        kept = json.loads((run.path / "provenance.json").read_text())[0]["cache"]
        assert (kept is None) == (cache == "off")
    for cache in ("ram", "gpu", "auto"):
        assert losses[cache] == pytest.approx(losses["off"], rel=1e-2)


SMALL = {
    "size": "tiny",
    "depth": 3,
    "num_prototypes": 1024,
    "num_local": 4,
    "drop_path": 0.3,
    "batch_size": 8,
}


def steps_of(settings: Settings, views: Views, count: int, compiled: bool, recorded: bool) -> tuple[Any, list[Any]]:
    """So many steps on the same views from one seed, with values that change as they do in training."""
    from adclr import optim, speed
    from adclr.step import Step

    method = training.build(settings).to(CUDA)
    if compiled:
        found = speed.prepare(method, settings, CUDA, torch.bfloat16, 8)
        assert found is not None
        assert found.failure is None
    optimizer = optim.make_optimizer(method.student, settings)
    step = Step(settings, method, optimizer, CUDA, torch.bfloat16, record=recorded)
    losses = []
    for number in range(count):
        torch.manual_seed(1000 + number)
        values = optim.Values(1e-3, 0.04 + 0.01 * number, 0.99, 0.04 + 0.005 * number, freeze_last_layer=number < 2)
        found_losses, ok = step([views], values)
        losses.append(found_losses.tolist())
        assert ok.item()
    assert bool(step.recorded) == recorded
    return method, losses


def test_a_recorded_step_is_the_step() -> None:
    """Drop path, temperature, weight decay, the frozen last layer, teacher and centers: all as without."""
    settings, views = default_views(8, CUDA, **SMALL)
    plain, losses = steps_of(settings, views, 6, compiled=False, recorded=False)
    again, same = steps_of(settings, views, 6, compiled=False, recorded=True)
    np.testing.assert_allclose(same, losses, rtol=1e-5)
    for (name, a), b in zip(plain.state_dict().items(), again.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("changes", [{}, {"target": "sinkhorn"}, {"query_keys": "patches"}, {"num_local": 0}])
def test_recording_changes_nothing_to_the_bit(changes: dict[str, Any]) -> None:
    """Student, teacher, centers and moments after a step are those of before when recording is done."""
    from adclr import optim
    from adclr.step import Step

    settings, views = default_views(8, CUDA, **(SMALL | changes))
    method = training.build(settings).to(CUDA)
    optimizer = optim.make_optimizer(method.student, settings)
    values = optim.Values(1e-3, 0.04, 0.99, 0.05, freeze_last_layer=False)
    Step(settings, method, optimizer, CUDA, torch.bfloat16)([views], values)
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
    step = Step(settings, method, optimizer, CUDA, torch.bfloat16, record=True)
    nothing = optim.Values(0.0, 0.0, 1.0, float("nan"), freeze_last_layer=False)
    _, ok = step([views], nothing)  # recorded, and run once with numbers that void it
    assert step.recorded
    assert not ok
    for name, tensor in method.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, msg=name)
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """Compiled and recorded, as a user runs it."""
    images = write_scenes(tmp_path / "scenes")
    changes = TINY | {"device": "cuda", "checkpoint_every_steps": 5, "keep_checkpoints": 9}
    whole = package.pretrain(images / "train", out=tmp_path / "whole", **changes)
    expected = [row["loss"] for row in whole.rows("metrics.jsonl")]
    shutil.copytree(whole.path, tmp_path / "cut")
    for path in (tmp_path / "cut").glob("*.json"):
        if path.name in ("results.json", "backbone.json"):
            path.unlink()
    (tmp_path / "cut" / "backbone.safetensors").unlink()
    for step in (10, 15, 16):
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / f"step_{step}", ignore_errors=True)
    again = package.pretrain(images / "train", out=tmp_path / "cut", **changes)
    found = [row["loss"] for row in again.rows("metrics.jsonl")]
    assert len(found) == len(expected)
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_compiled_and_recorded_step_is_near_the_step() -> None:
    settings, views = default_views(8, CUDA, **SMALL)
    _, losses = steps_of(settings, views, 6, compiled=False, recorded=False)
    _, near = steps_of(settings, views, 6, compiled=True, recorded=True)
    np.testing.assert_allclose(near, losses, rtol=2e-2)


def test_the_fast_way_has_the_gradients_of_float32() -> None:
    """Compiled, bfloat16, kernels and chunks against plain float32: a ViT-S with all three losses."""
    from adclr import attention, fused, speed

    settings, views = default_views(8, CUDA, masked_weight=1.0, num_prototypes=8192, drop_path=0.0)
    method = training.build(settings).to(CUDA)
    found = {}
    for fast in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if fast:
                compiled = speed.prepare(method, settings, CUDA, torch.bfloat16, 8)
                assert compiled is not None
                assert compiled.failure is None
                with autocast():
                    losses = method(views, 0.05)
            else:
                patch.setattr(attention, "fits", lambda *_: False)
                patch.setattr(fused, "possible", lambda *_: False)
                losses = method(views, 0.05)
            losses.total.backward()
        gradients = {n: p.grad.double() for n, p in method.student.named_parameters() if p.grad is not None}
        found[fast] = [loss.item() for loss in losses], gradients
        method.forget()
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-2)
    for name, exact in found[False][1].items():
        cosine = torch.nn.functional.cosine_similarity(found[True][1][name].flatten(), exact.flatten(), dim=0)
        assert cosine > 0.999, (name, cosine.item())


def test_two_deterministic_runs_are_the_same_to_the_bit(tmp_path: Path) -> None:
    """As a user starts them: cuBLAS must be told before its first product."""
    from safetensors.torch import load_file

    images = write_scenes(tmp_path / "scenes")
    changes = TINY | {"device": "cuda", "deterministic": True, "epochs": 3}
    found = []
    for name in ("one", "two"):
        arguments = ["pretrain", str(images / "train"), "--out", str(tmp_path / name), *words(changes)]
        done = subprocess.run([sys.executable, "-m", "adclr", *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        metrics = (tmp_path / name / "metrics.jsonl").read_text()
        found.append((metrics, load_file(tmp_path / name / "backbone.safetensors")))
    assert found[0][0] == found[1][0]
    for tensor, other in zip(found[0][1].values(), found[1][1].values(), strict=True):
        assert torch.equal(tensor, other)


def test_thousands_of_views_leave_nothing_behind(tmp_path: Path) -> None:
    """Host memory, GPU memory and threads over 3000 batches from files, decoded and augmented on the GPU."""
    import threading

    from adclr.ahead import Ahead
    from adclr.decode import Decoder
    from adclr.feed import Feed
    from adclr.nvjpeg import GpuDecoder
    from adclr.sources import ImageFolder

    scenes.write(tmp_path / "scenes", seed=3, num_train=32, num_val=0, size=48, show=False)
    for path in sorted((tmp_path / "scenes" / "train").rglob("*.png")):
        Image.open(path).convert("RGB").save(path.with_suffix(".jpg"))
        path.unlink()
    source, settings = ImageFolder(tmp_path / "scenes" / "train"), tiny()
    feed = Feed(source, 4, Decoder(), pin=True, gpu_decoder=GpuDecoder(Decoder(), CUDA))
    order = ((0, np.arange(8) + 8 * (i % 4)) for i in range(3000))
    data = settings.data
    before = threading.active_count()
    views = Ahead(
        feed.batches(order, lambda e, k, s: plan(settings, e, k, s)),
        lambda batch: render(batch.packed.to(CUDA), batch.plan, data.mean, data.std),
        CUDA,
    )
    seen: dict[int, tuple[int, int]] = {}
    for number, _ in enumerate(views):
        if number in (500, 2999):
            torch.cuda.synchronize()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
            seen[number] = resident, torch.cuda.memory_reserved()
    views.close()
    assert threading.active_count() == before
    print({number: [size / 2**20 for size in sizes] for number, sizes in seen.items()})
    assert seen[2999][0] < seen[500][0] + 64 * 2**20
    assert seen[2999][1] <= seen[500][1] + 32 * 2**20


def test_interrupting_leaves_no_process_behind(tmp_path: Path) -> None:
    import signal
    import time

    images = write_scenes(tmp_path / "scenes")
    changes = TINY | {"device": "cuda", "compile": "off", "epochs": 100_000, "cache": "off"}
    arguments = ["pretrain", str(images / "train"), "--out", str(tmp_path / "run"), *words(changes)]
    with subprocess.Popen([sys.executable, "-m", "adclr", *arguments], stderr=subprocess.DEVNULL) as process:
        for _ in range(600):
            if (tmp_path / "run" / "metrics.jsonl").exists():
                break
            time.sleep(0.1)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        process.wait(timeout=20)
        assert time.monotonic() - started < 2
