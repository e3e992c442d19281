"""What must hold on a GPU: the bits of the method under bfloat16, views as on the CPU, no waiting, memory that fits."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import adclr as package
from adclr.config.parsing import build
from adclr.config.settings import Settings
from adclr.data.augment import render
from adclr.data.feed import Batch
from adclr.data.sets import scenes
from adclr.data.view_plan import plan_batch
from adclr.model.blocks import QueryKeys
from adclr.model.ops import head_loss
from adclr.model.positions import PositionEmbedding
from adclr.system.machine import GIB
from adclr.training import job, micro_batch
from adclr.weights.backbone import create_backbone
from on_gpu import CUDA, autocast, default_views, for_kernels, write_scenes
from tiny import TINY, tiny, words

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("query_keys", ["image", "patches", "image_and_self"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@torch.no_grad()
def test_the_three_consequences_in_bfloat16(query_keys: QueryKeys, positions: PositionEmbedding) -> None:
    torch.manual_seed(0)
    vit = create_backbone("vit_small_patch16", query_keys=query_keys, position_embedding=positions).eval().to(CUDA)
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


def test_views_are_those_of_the_cpu() -> None:
    _, cpu = default_views(8, torch.device("cpu"), masked_weight=1.0)
    _, gpu = default_views(8, CUDA, masked_weight=1.0)
    assert cpu.local_crops is not None
    assert gpu.local_crops is not None
    assert cpu.queries is not None
    assert gpu.queries is not None
    for a, b in ((cpu.global_crops, gpu.global_crops), (cpu.local_crops, gpu.local_crops), (cpu.queries, gpu.queries)):
        difference = (a - b.cpu()).abs()
        assert difference.mean() < 5e-4  # 2e-4 in Triton's interpreter: pixels on their way are float16; 0.01 of 255
        assert (difference > 0.05).float().mean() < 1e-3  # a pixel at the threshold of solarizing, or of no hue
    assert cpu.masks is not None
    assert gpu.masks is not None
    assert torch.equal(cpu.masks.grid, gpu.masks.grid.cpu())
    hidden = len(cpu.masks.index)
    assert torch.equal(cpu.masks.index, gpu.masks.index[:hidden].cpu())
    assert torch.equal(cpu.masks.weight, gpu.masks.weight[:hidden].cpu())
    assert not gpu.masks.weight[hidden:].any()


def test_bfloat16_losses_are_near_float32s() -> None:
    settings, views = default_views(8, CUDA, masked_weight=1.0, num_prototypes=8192, drop_path=0.0)
    method = job.build(settings).to(CUDA)
    exact = method(views, 0.04)
    with autocast():
        near = method(views, 0.04)
    for name in ("global_", "query", "masked"):
        assert getattr(near, name).item() == pytest.approx(getattr(exact, name).item(), rel=1e-2), name


def test_losses_in_chunks_are_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """At full size in float32; and with the network in bfloat16, whose own rounding is then the larger."""
    settings, views = default_views(8, CUDA, masked_weight=1.0, **{"model.drop_path": 0.0})
    method = job.build(settings).to(CUDA)
    actual = {}
    for name, chunks, low in (("plain", False, False), ("chunks", True, False), ("bfloat16", True, True)):
        monkeypatch.setattr(head_loss, "fits", lambda images, chunks=chunks: chunks)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=low):
            losses = method(views, 0.04)
        losses.total.backward()
        head = method.student.head
        gradients = [p.grad.flatten() for p in (head.mlp[0].weight, head.last_layer.direction) if p.grad is not None]
        actual[name] = torch.stack(list(losses)).detach(), gradients
        method.zero_grad(set_to_none=True)
    for name, tolerance, cosine in (("chunks", 1e-5, 1 - 1e-6), ("bfloat16", 1e-2, 0.98)):
        torch.testing.assert_close(actual[name][0], actual["plain"][0], rtol=tolerance, atol=0)
        for a, b in zip(actual[name][1], actual["plain"][1], strict=True):
            assert torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0) > cosine, name


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
    method = job.build(settings).to(CUDA)
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    fixed, each = micro_batch.measure_memory(method, settings, CUDA, torch.bfloat16)
    assert all(torch.equal(tensor, before[name]) for name, tensor in method.state_dict().items())
    assert all(p.grad is None for p in method.parameters())
    for count in (16, 32):
        torch.cuda.reset_peak_memory_stats()
        with autocast():
            losses = method(micro_batch.random_views(settings, count, CUDA), 0.04)
        losses.total.backward()
        peak = torch.cuda.max_memory_allocated()
        method.zero_grad(set_to_none=True)
        del losses
        predicted = fixed + count * each
        print(f"micro-batch {count}: {peak / GIB:.2f} GiB, predicted {predicted / GIB:.2f}")
        assert 0.8 < predicted / peak < 1.4
    assert micro_batch.fit_micro_batch(method, settings, 1024, CUDA, torch.bfloat16) >= 256


def test_too_large_a_micro_batch_is_one_sentence_with_the_size_that_fits(tmp_path: Path) -> None:
    images = write_scenes(tmp_path / "scenes")
    changes = {
        "size": "small",
        "num_prototypes": 65536,
        "batch_size": 64,
        "micro_batch_size": 64,
        "epochs": 1,
        "warmup_epochs": 0,
        "device": "cuda",
        "compile": "off",
    }
    limited = (
        "import sys, torch; torch.cuda.set_per_process_memory_fraction(3 * 2**30 / "
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


def test_a_machine_without_a_c_compiler_trains_all_the_same(tmp_path: Path) -> None:
    images = write_scenes(tmp_path / "scenes")
    # nothing that was compiled before, and no compiler: Triton and torch then have neither kernels nor launchers
    missing = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++", "PATH": "/nowhere"}
    caches = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    changes = TINY | {"device": "cuda", "dim": 64, "num_heads": 2, "epochs": 1, "compile": "on"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "adclr",
            "pretrain",
            str(images / "train"),
            "--out",
            str(tmp_path / "run"),
            *words(changes),
        ],
        capture_output=True,
        text=True,
        env=os.environ | missing | caches,
    )
    assert done.returncode == 0, done.stderr
    assert "Triton cannot compile kernels here, so all is slower" in done.stderr
    assert (tmp_path / "run" / "backbone.safetensors").exists()


def test_batches_are_pinned(tmp_path: Path) -> None:
    from adclr.data.decode import Decoder
    from adclr.data.feed import Feed
    from adclr.data.sources import ImageFolder

    source = ImageFolder(write_scenes(tmp_path / "scenes") / "train")
    settings = tiny()
    feed = Feed(source, 4, Decoder(), pin=True)
    batch: Batch = next(feed.batches([(0, np.arange(8))], lambda e, k, s: plan_batch(settings, e, k, s)))
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


@pytest.mark.parametrize("masked_weight", [0.0, 1.0])
def test_two_deterministic_runs_are_the_same_to_the_bit(tmp_path: Path, masked_weight: float) -> None:
    """As a user starts them: cuBLAS must be told before its first product."""
    from safetensors.torch import load_file

    images = write_scenes(tmp_path / "scenes")
    changes = for_kernels(masked_weight=masked_weight, deterministic=True, epochs=3)
    actual = []
    for name in ("one", "two"):
        arguments = ["pretrain", str(images / "train"), "--out", str(tmp_path / name), *words(changes)]
        done = subprocess.run([sys.executable, "-m", "adclr", *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        metrics = (tmp_path / name / "metrics.jsonl").read_text()
        actual.append((metrics, load_file(tmp_path / name / "backbone.safetensors")))
    assert actual[0][0] == actual[1][0]
    for tensor, other in zip(actual[0][1].values(), actual[1][1].values(), strict=True):
        assert torch.equal(tensor, other)


def test_thousands_of_views_leave_nothing_behind(tmp_path: Path) -> None:
    """Memory of host and GPU, threads and file handles over 3000 batches from files, decoded and augmented there."""
    import threading

    from adclr.data.decode import Decoder
    from adclr.data.feed import Feed, Prefetcher
    from adclr.data.nvjpeg import GpuDecoder
    from adclr.data.sources import ImageFolder

    scenes.write_scenes(tmp_path / "scenes", seed=3, num_train=32, num_val=0, size=48, show=False)
    for path in sorted((tmp_path / "scenes" / "train").rglob("*.png")):
        Image.open(path).convert("RGB").save(path.with_suffix(".jpg"))
        path.unlink()
    source, settings = ImageFolder(tmp_path / "scenes" / "train"), tiny()
    feed = Feed(source, 4, Decoder(), pin=True, gpu_decoder=GpuDecoder(Decoder(), CUDA))
    order = ((0, np.arange(8) + 8 * (i % 4)) for i in range(3000))
    data = settings.data
    before = threading.active_count()
    views = Prefetcher(
        feed.batches(order, lambda e, k, s: plan_batch(settings, e, k, s)),
        lambda batch: render(batch.packed.to(CUDA), batch.plan, data.mean, data.std),
        CUDA,
    )
    seen: dict[int, tuple[int, int, int, int]] = {}
    for number, _ in enumerate(views):
        if number in (500, 2950):
            torch.cuda.synchronize()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
            handles = len(os.listdir("/proc/self/fd"))
            seen[number] = resident, torch.cuda.memory_reserved(), threading.active_count(), handles
    views.close()
    assert threading.active_count() == before
    print({number: (host / 2**20, gpu / 2**20, *counts) for number, (host, gpu, *counts) in seen.items()})
    assert seen[2950][0] < seen[500][0] + 64 * 2**20
    assert seen[2950][1] <= seen[500][1] + 32 * 2**20
    assert seen[2950][2] == seen[500][2]
    assert seen[2950][3] <= seen[500][3] + feed.num_workers  # files that are being read just then


def test_a_busy_gpu_changes_no_pixel(tmp_path: Path) -> None:
    """Of files that are decoded by both decoders, in batches that two threads assemble."""
    import threading

    from adclr.data.decode import Decoder
    from adclr.data.feed import Feed
    from adclr.data.nvjpeg import GpuDecoder
    from adclr.data.sources import ImageFolder

    for number in range(24):
        image = Image.fromarray(scenes.scene(0, number, 64 + 16 * (number % 3)).image)
        # every third file is for the CPU, whose pixels the GPU then packs
        image.save(tmp_path / f"{number:02}.jpg", quality=92, subsampling=0, progressive=number % 3 == 0)
    source, decoder = ImageFolder(tmp_path), GpuDecoder(Decoder(), CUDA)
    feed = Feed(source, 4, Decoder(), pin=True, gpu_decoder=decoder)
    parts = [np.arange(8) + 8 * part for part in range(3)]

    def pixels(number: int) -> list[torch.Tensor]:
        order = ((0, parts[i % 3]) for i in range(number))
        copies = []
        for batch in feed.batches(order, lambda *_: None):
            batch.packed.bytes.record_stream(torch.cuda.current_stream(CUDA))  # as the prefetcher does
            copies.append(batch.packed.bytes.clone())
        return copies

    expected, stop = pixels(3), threading.Event()

    def occupy() -> None:
        side = torch.randn(4096, 4096, device=CUDA)
        with torch.cuda.stream(torch.cuda.Stream(CUDA)):
            while not stop.is_set():
                for _ in range(20):
                    side @ side
                torch.cuda.current_stream().synchronize()

    busy = [threading.Thread(target=occupy) for _ in range(2)]
    for thread in busy:
        thread.start()
    try:
        actual = pixels(600)
    finally:
        stop.set()
        for thread in busy:
            thread.join()
    wrong = [number for number, packed in enumerate(actual) if not torch.equal(packed, expected[number % 3])]
    assert not wrong


def processes_with(mark: str) -> list[int]:
    """Those that have a word in their environment, which children get from their parents."""
    actual = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is someone else's
            if mark.encode() in (folder / "environ").read_bytes():
                actual.append(int(folder.name))
    return actual


def test_interrupting_leaves_no_process_behind(tmp_path: Path) -> None:
    import signal
    import time

    images = write_scenes(tmp_path / "scenes")
    changes = TINY | {"device": "cuda", "compile": "off", "epochs": 100_000, "cache": "off"}
    arguments = ["pretrain", str(images / "train"), "--out", str(tmp_path / "run"), *words(changes)]
    mark = f"ADCLR_MARK={uuid.uuid4()}"
    environment = os.environ | dict([mark.split("=")])
    command = [sys.executable, "-m", "adclr", *arguments]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as process:
        for _ in range(600):
            if (tmp_path / "run" / "metrics.jsonl").exists():
                break
            time.sleep(0.1)
        time.sleep(0.5)
        assert process.pid in processes_with(mark)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        process.wait(timeout=20)
        while processes_with(mark) and time.monotonic() - started < 2:
            time.sleep(0.05)
        assert time.monotonic() - started < 2
        assert not processes_with(mark)
