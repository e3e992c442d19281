"""Compiled blocks that cannot be compiled, memory that is traded for time, and views made ahead."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adclr import pretrain
from adclr.data.feed import Prefetcher
from adclr.model.blocks import run_block, run_checkpointed
from adclr.model.ops import attention, head_loss, mlp, norm
from adclr.model.vit import VisionTransformer
from adclr.system import devices, trial_kernels, triton_available
from adclr.training import job, micro_batch, plan_cost
from adclr.training.job import build
from kernel_device import DEVICE, needs_interpreter
from tiny import TINY, tiny

CPU = torch.device("cpu")


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no compiler\nof any kind")


def with_backend(backend: Any) -> Any:
    def compile_blocks(vit: VisionTransformer) -> None:
        real(vit, backend=backend)

    real = VisionTransformer.compile_blocks
    return compile_blocks


def test_a_compiler_that_fails_costs_speed_and_not_the_run(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(VisionTransformer, "compile_blocks", with_backend(broken))
    run = pretrain(images / "train", tmp_path / "run", **(TINY | {"compile": "on"}))
    said = capsys.readouterr().err
    assert "could not be compiled, so training is slower" in said
    assert "no compiler" in said
    facts = json.loads((run.path / "provenance.json").read_text())[0]["compiled"]
    assert "no compiler" in facts["failure"]
    plain = pretrain(images / "train", tmp_path / "plain", **(TINY | {"compile": "off"}))
    assert json.loads((plain.path / "provenance.json").read_text())[0]["compiled"] is None
    assert list(run.rows("metrics.jsonl")) == list(plain.rows("metrics.jsonl"))


@needs_interpreter
def test_the_least_kernel_runs() -> None:
    trial_kernels.launch(DEVICE)


def test_kernels_that_cannot_be_compiled_are_not_launched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine may have Triton and no C compiler; Triton says so when it first launches something."""
    monkeypatch.setattr(triton_available, "possible", True)
    monkeypatch.setattr(trial_kernels, "launch", broken)
    triton_available.check_launch(CPU)
    assert triton_available.possible  # nothing was tried
    gpu = SimpleNamespace(device=torch.device("cuda:0"), is_cuda=True, dtype=torch.bfloat16, shape=(9, 64))
    assert norm.fits(gpu)  # type: ignore[arg-type]
    for _ in range(2):
        triton_available.check_launch(torch.device("cuda:0"))
        assert not triton_available.possible
    assert capsys.readouterr().err == "Triton cannot compile kernels here, so all is slower (no compiler of any kind)\n"
    assert not any(module.fits(gpu) for module in (norm, mlp))  # type: ignore[arg-type]
    assert not attention.fits(gpu, [], 1)  # type: ignore[arg-type]
    assert not head_loss.fits(gpu)  # type: ignore[arg-type]


@pytest.mark.parametrize("supported", [True, False])
def test_bfloat16_only_where_a_gpu_has_it(monkeypatch: pytest.MonkeyPatch, supported: bool) -> None:
    """A T4 imitates it, which is slower than float32; who asks for it gets it all the same."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported or including_emulation)
    monkeypatch.setattr(devices, "_has_bfloat16", devices._has_bfloat16.__wrapped__)
    gpu = torch.device("cuda", 0)
    assert devices.autocast_dtype("auto", gpu) == (torch.bfloat16 if supported else None)
    assert devices.autocast_dtype("bfloat16", gpu) == torch.bfloat16
    assert devices.autocast_dtype("auto", torch.device("cpu")) is None


def test_compiling_leaves_the_method_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VisionTransformer, "compile_blocks", with_backend("aot_eager"))
    settings = tiny(compile="on", masked_weight=1.0)
    method = build(settings)
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    compiled = job.compile_method(method, settings, CPU, None, 4)
    assert compiled is not None
    assert compiled.failure is None
    assert method.student.backbone.run_block is not run_block
    assert all(torch.equal(tensor, before[name]) for name, tensor in method.state_dict().items())
    assert all(parameter.grad is None for parameter in method.parameters())


QUIET = """
import torch
from adclr.training.job import build, compile_method
from adclr.model.vit import VisionTransformer
from tiny import tiny
real = VisionTransformer.compile_blocks
VisionTransformer.compile_blocks = lambda vit: real(vit, backend="aot_eager")
settings = tiny(compile="on")
assert compile_method(build(settings), settings, torch.device("cpu"), None, 4).failure is None
"""


def test_the_compiler_says_nothing_that_is_no_news() -> None:
    """In a process of its own: it says each thing once. Without the filter four lines on in-place operations."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", QUIET],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout + done.stderr == ""


def test_auto_compiles_on_a_gpu_only_and_activations_are_checkpointed_when_asked() -> None:
    method = build(tiny())
    assert job.compile_method(method, tiny(), CPU, None, 4) is None
    assert method.student.backbone.run_block is run_block
    method = build(tiny(checkpoint_activations=True))
    assert job.compile_method(method, tiny(checkpoint_activations=True), CPU, None, 4) is None
    assert method.student.backbone.run_block is run_checkpointed
    assert method.teacher.backbone.run_block is run_block


@pytest.mark.parametrize(
    ("changes", "micro_batch", "steps", "expected"),
    [
        ({}, 8, plan_cost.COMPILE_STEPS, True),
        ({}, 8, plan_cost.COMPILE_STEPS - 1, False),
        ({}, 8, None, True),
        ({}, 4, 100, True),  # micro-batches, or several processes: the step is not recorded
        ({"cuda_graph": "off"}, 8, 100, True),
        ({"compile": "on"}, 8, 100, True),
        ({"compile": "off"}, 8, 10**6, False),
        ({"compile": "on", "shard": True}, 8, 10**6, False),
    ],
)
def test_auto_compiles_where_it_saves_more_time_than_it_takes(
    changes: dict[str, Any], micro_batch: int, steps: int | None, expected: bool
) -> None:
    assert plan_cost.compiles_blocks(tiny(**changes), micro_batch, steps) is expected


def test_training_with_checkpointed_activations_is_the_same(images: Path, tmp_path: Path) -> None:
    losses = []
    for again in (False, True):
        run = pretrain(images / "train", tmp_path / str(again), **(TINY | {"checkpoint_activations": again}))
        losses.append([row["loss"] for row in run.rows("metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_deterministic_holds_while_it_is_asked_for() -> None:
    with devices.deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with devices.deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()


def test_views_come_in_order_and_batches_are_closed() -> None:
    closed = []

    def batches() -> Any:
        try:
            yield from range(5)
        finally:
            closed.append(True)

    ahead: Any = Prefetcher(batches(), lambda batch: 10 * batch, CPU)  # type: ignore[arg-type, return-value]
    assert [next(ahead), next(ahead)] == [0, 10]
    ahead.close()
    assert closed == [True]
    ahead = Prefetcher(batches(), lambda batch: 10 * batch, CPU)  # type: ignore[arg-type, return-value]
    assert list(ahead) == [0, 10, 20, 30, 40]


def test_the_micro_batch_is_fitted_to_blocks_that_are_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30)
    for again, run in ((True, run_checkpointed), (False, run_block)):
        settings = tiny(checkpoint_activations=again)
        method = build(settings)
        method.register_forward_hook(lambda m, *_: seen.append(m.student.backbone.run_block))
        micro_batch.measure_memory(method, settings, CPU, None)
        assert seen == [run] * 3
        seen.clear()
    assert micro_batch.estimate_image_bytes(
        tiny(depth=12, checkpoint_activations=True)
    ) < micro_batch.estimate_image_bytes(tiny(depth=12))
