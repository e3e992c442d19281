"""The step on a GPU: recorded, compiled, resumed, and against float32."""

from __future__ import annotations

import copy
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import adclr as package
from adclr.config.parsing import build
from adclr.config.settings import Settings
from adclr.data.augment import render
from adclr.data.packed import pack
from adclr.data.view_plan import plan_batch
from adclr.model.named_tensors import Views
from adclr.system.devices import deterministic
from adclr.training import job
from on_gpu import CUDA, autocast, default_views, for_kernels, images_of, write_scenes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("masked_weight", [0.0, 1.0])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_step_never_waits_for_the_gpu(recorded: bool, masked_weight: float) -> None:
    """Views, forward, backward, update, teacher and centers, with the debug mode in which waiting is an error."""
    from adclr.training import schedules
    from adclr.training.step import Step

    settings = build(Settings, {"masked_weight": masked_weight, "num_prototypes": 4096})
    method = job.build(settings).to(CUDA)
    packed = pack(images_of(8), pin=True)
    made = plan_batch(settings, 0, np.arange(8, dtype=np.uint64), packed.sizes)
    values = schedules.Schedules(settings, 100).at(1000)
    optimizer = schedules.make_optimizer(method.student, settings)
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


SMALL = {
    "size": "tiny",
    "depth": 3,
    "num_prototypes": 1024,
    "num_local": 4,
    "drop_path": 0.3,
    "batch_size": 8,
}


# positions, MLP, registers and norms as in DINOv3's ViT-S+
DINOV3 = {"position_embedding": "rotary", "mlp": "gated", "num_registers": 4, "layer_scale": 0.1, "norm_eps": 1e-5}


def steps_of(
    settings: Settings,
    views: Views,
    count: int,
    compiled: bool,
    recorded: bool,
    query_temperature: float | None = None,
) -> tuple[Any, list[Any]]:
    """So many steps on the same views from one seed, with values that change as they do in training."""
    from adclr.training import schedules
    from adclr.training.step import Step

    method = job.build(settings).to(CUDA)
    if compiled:
        compilation = job.compile_method(method, settings, CUDA, torch.bfloat16, 8)
        assert compilation is not None
        assert compilation.failure is None
    optimizer = schedules.make_optimizer(method.student, settings)
    step = Step(settings, method, optimizer, CUDA, torch.bfloat16, record=recorded)
    losses = []
    for number in range(count):
        torch.manual_seed(1000 + number)
        values = schedules.Values(1e-3, 0.04 + 0.01 * number, 0.99, 0.04 + 0.005 * number, freeze_last_layer=number < 2)
        values = replace(values, query_temperature=query_temperature)
        found_losses, ok = step([views], values)
        losses.append(found_losses.tolist())
        assert ok.item()
    assert bool(step.graphs) == recorded
    return method, losses


@pytest.mark.parametrize("masked_weight", [0.0, 1.0])
def test_a_recorded_step_is_the_step(masked_weight: float) -> None:
    """Drop path, temperature, weight decay, the frozen last layer, teacher and centers: to the bit as without.

    Where sums are made in one order; in any order AdamW's first steps, which are of one length however small the
    gradient, make 1e-4 of it.
    """

    settings, views = default_views(8, CUDA, **SMALL, masked_weight=masked_weight)
    with deterministic(True):
        plain, losses = steps_of(settings, views, 6, compiled=False, recorded=False)
        again, same = steps_of(settings, views, 6, compiled=False, recorded=True)
    assert same == losses
    for (name, a), b in zip(plain.state_dict().items(), again.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_teacher_beside_the_student_changes_nothing(recorded: bool) -> None:
    settings, views = default_views(8, CUDA, **SMALL, masked_weight=1.0)
    parallel = settings.model_copy(update={"train": settings.train.model_copy(update={"parallel_teacher": True})})
    with deterministic(True):
        plain, losses = steps_of(settings, views, 12, compiled=False, recorded=recorded)
        again, same = steps_of(parallel, views, 12, compiled=False, recorded=recorded)
    assert again.parallel_teacher
    assert same == losses
    for (name, a), b in zip(plain.state_dict().items(), again.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("changes", [{}, {"target": "sinkhorn"}, {"query_keys": "patches"}, {"num_local": 0}, DINOV3])
def test_recording_changes_nothing_to_the_bit(changes: dict[str, Any]) -> None:
    """Student, teacher, centers and moments after a step are those of before when recording is done."""
    from adclr.training import schedules
    from adclr.training.step import Step

    settings, views = default_views(8, CUDA, **(SMALL | changes))
    method = job.build(settings).to(CUDA)
    optimizer = schedules.make_optimizer(method.student, settings)
    values = schedules.Values(1e-3, 0.04, 0.99, 0.05, freeze_last_layer=False)
    Step(settings, method, optimizer, CUDA, torch.bfloat16, record=False)([views], values)
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
    step = Step(settings, method, optimizer, CUDA, torch.bfloat16)
    nothing = schedules.Values(0.0, 0.0, 1.0, float("nan"), freeze_last_layer=False)
    _, ok = step([views], nothing)  # recorded, and run once with numbers that void it
    assert step.graphs
    assert not ok
    for name, tensor in method.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, msg=name)
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))


def test_a_batch_that_hides_more_than_there_is_room_for_is_recorded_anew() -> None:
    from adclr.training import schedules
    from adclr.training.step import Step

    settings, views = default_views(8, CUDA, **SMALL, masked_weight=1.0)
    assert views.masks is not None
    more = replace(views.masks, index=views.masks.index[:-3], weight=views.masks.weight[:-3])  # another number
    method = job.build(settings).to(CUDA)
    step = Step(settings, method, schedules.make_optimizer(method.student, settings), CUDA, torch.bfloat16)
    values = schedules.Values(1e-3, 0.04, 0.99, 0.05, freeze_last_layer=False)
    for made in (views, replace(views, masks=more), views):
        losses, ok = step([made], values)
        assert ok.item()
        assert losses.isfinite().all()
        assert len(step.graphs) == 1


def test_a_step_that_cannot_be_recorded_is_taken_unrecorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host waits in the midst of the recording, which CUDA forbids; to the bit as if none had been tried."""
    from adclr.model.method import ADCLR
    from adclr.system.devices import deterministic
    from adclr.training import schedules
    from adclr.training.step import Step

    settings, views = default_views(8, CUDA, **SMALL)
    update, waited = ADCLR.update, []

    def waiting(method: ADCLR, momentum: torch.Tensor, ok: torch.Tensor, head_only: bool = False) -> None:
        if torch.cuda.is_current_stream_capturing():
            waited.append(True)
            ok.item()
        update(method, momentum, ok, head_only)

    with deterministic(True):
        _, expected = steps_of(settings, views, 6, compiled=False, recorded=False)
        monkeypatch.setattr(ADCLR, "update", waiting)
        method = job.build(settings).to(CUDA)
        step = Step(settings, method, schedules.make_optimizer(method.student, settings), CUDA, torch.bfloat16)
        current, losses = torch.cuda.current_stream(), []
        for number in range(6):
            torch.manual_seed(1000 + number)
            values = schedules.Values(
                1e-3, 0.04 + 0.01 * number, 0.99, 0.04 + 0.005 * number, freeze_last_layer=number < 2
            )
            found, ok = step([views], values)
            losses.append(found.tolist())
            assert ok.item()
    assert len(waited) == 1
    assert not step.record
    assert not step.graphs
    assert "could not be recorded as a CUDA graph" in capsys.readouterr().err
    assert losses == expected
    assert np.isfinite(losses).all()
    assert torch.cuda.current_stream() == current
    # memory is taken and given back, and random numbers follow the seed
    before = torch.cuda.memory_allocated()
    large = torch.ones(2**26, device=CUDA)
    assert large.sum().item() == 2**26
    del large
    assert torch.cuda.memory_allocated() == before
    torch.manual_seed(3)
    first = torch.rand(5, device=CUDA)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(5, device=CUDA), first)
    assert torch.ones(3).pin_memory().to(CUDA, non_blocking=True).sum().item() == 3


def test_after_a_failed_recording_another_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a later run in the same process; an error of Python's, which leaves the recording whole, is put back too."""
    from adclr.model.method import ADCLR
    from adclr.training import schedules
    from adclr.training.step import Step

    settings, views = default_views(8, CUDA, **SMALL)
    update = ADCLR.update
    for waits in (True, False):

        def failing(
            method: ADCLR, momentum: torch.Tensor, ok: torch.Tensor, head_only: bool = False, waits: bool = waits
        ) -> None:
            if torch.cuda.is_current_stream_capturing():
                if waits:
                    torch.cuda.synchronize()
                raise ValueError("not while it is recorded")
            update(method, momentum, ok, head_only)

        with monkeypatch.context() as patch:
            patch.setattr(ADCLR, "update", failing)
            method = job.build(settings).to(CUDA)
            optimizer = schedules.make_optimizer(method.student, settings)
            step = Step(settings, method, optimizer, CUDA, torch.bfloat16)
            _, ok = step([views], schedules.Values(1e-3, 0.04, 0.99, 0.05, freeze_last_layer=False))
            assert ok.item()
            assert not step.record
        _, losses = steps_of(settings, views, 3, compiled=False, recorded=True)
        assert np.isfinite(losses).all()


@pytest.mark.parametrize("masked_weight", [0.0, 1.0])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, masked_weight: float) -> None:
    """Compiled and recorded, as a user runs it, by the kernels."""
    images = write_scenes(tmp_path / "scenes")
    changes = for_kernels(masked_weight=masked_weight, checkpoint_every_steps=5, keep_checkpoints=9)
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


@pytest.mark.parametrize("changes", [{}, DINOV3], ids=["plain", "DINOv3"])
def test_a_compiled_and_recorded_step_is_near_the_step(changes: dict[str, Any]) -> None:
    settings, views = default_views(8, CUDA, **(SMALL | changes))
    _, losses = steps_of(settings, views, 6, compiled=False, recorded=False)
    _, near = steps_of(settings, views, 6, compiled=True, recorded=True)
    np.testing.assert_allclose(near, losses, rtol=2e-2)


def test_a_run_is_recorded_with_and_without_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train.compile=off` is recorded too; `train.cuda_graph=off` is not, and its losses are the same to the bit."""
    from adclr.training import step

    recorded: list[int] = []

    class Counted(step.RecordedStep):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            recorded[-1] += 1

    monkeypatch.setattr(step, "RecordedStep", Counted)
    images, losses = write_scenes(tmp_path / "scenes"), []
    how = ({"compile": "on"}, {"compile": "off"}, {"compile": "off", "cuda_graph": "off"})
    for number, changes in enumerate(how):
        recorded.append(0)
        changes = for_kernels(masked_weight=0.0, deterministic=True) | changes
        run = package.pretrain(images / "train", out=tmp_path / str(number), **changes)
        losses.append([row["loss"] for row in run.rows("metrics.jsonl")])
    assert [count > 0 for count in recorded] == [True, True, False]
    assert losses[1] == losses[2]


QUERIES = {
    "anchored": {"query_source": "local"},
    "anchored, read-only": {"query_source": "local", "query_read_only_blocks": 2, "query_keys": "patches"},
    "anchored, read-only copies": {"query_source": "local", "read_only_copies": True, "query_read_only_blocks": 2},
    "read-only, keys of the image": {"query_read_only_blocks": 1},
    "anchored and random, masked": {"query_source": "local", "num_queries": 7, "masked_weight": 1.0},
    "DINOv3": DINOV3,
    "anchor": {"anchor_weight": 1.0, "init": "weights.pth"},
    "float32 residual": {"query_source": "local", "residual_precision": "float32", "masked_weight": 1.0},
    "DINOv3, masked, keys of the image": DINOV3 | {"query_keys": "patches", "masked_weight": 1.0},
}


@pytest.mark.parametrize("name", QUERIES)
def test_a_recorded_step_is_the_step_whatever_queries_are(name: str) -> None:

    settings, views = default_views(8, CUDA, **(SMALL | QUERIES[name]))
    with deterministic(True):
        plain, losses = steps_of(settings, views, 4, compiled=False, recorded=False, query_temperature=0.1)
        again, same = steps_of(settings, views, 4, compiled=False, recorded=True, query_temperature=0.1)
    assert same == losses
    for (key, a), b in zip(plain.state_dict().items(), again.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=key)
    _, others = steps_of(settings, views, 1, compiled=False, recorded=True)
    assert others[0] != losses[0]  # the temperature of queries arrives


@pytest.mark.parametrize("name", ["ADCLR*", *QUERIES])
def test_the_fast_way_has_the_gradients_of_float64(name: str) -> None:
    """bfloat16, kernels and chunks against the plain code in float64: a ViT-S with all losses of the method."""
    changes = QUERIES.get(name, {"masked_weight": 1.0})
    settings, views = default_views(8, CUDA, **({"num_prototypes": 8192, "drop_path": 0.0} | changes))
    method = job.build(settings).to(CUDA)
    exact = copy.deepcopy(method).double()
    results = []
    for model in (method, exact):
        given = views.map(lambda x: x.double() if x.is_floating_point() else x) if model is exact else views
        with autocast() if model is method else nullcontext():
            losses = model(given, 0.05, 0.1)
        losses.total.backward()
        gradients = {n: p.grad.double() for n, p in model.student.named_parameters() if p.grad is not None}
        results.append(([loss.item() for loss in losses], gradients))
    (losses, gradients), (exact_losses, exact_gradients) = results
    assert losses == pytest.approx(exact_losses, rel=1e-2)
    assert gradients.keys() == exact_gradients.keys()
    for parameter, expected in exact_gradients.items():
        cosine = torch.nn.functional.cosine_similarity(gradients[parameter].flatten(), expected.flatten(), dim=0)
        assert cosine > 0.999, (parameter, cosine.item())
