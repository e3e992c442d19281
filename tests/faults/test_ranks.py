"""Several processes: the same data and gradients as of one, with whole and with spread weights; and if one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import adclr as package
import lives
from adclr.system.files import read_json
from adclr.system.runs import Run
from adclr.training import job, micro_batch, schedules
from adclr.training.step import Step
from tiny import TINY, tiny

CHANGES: dict[str, Any] = {"model__drop_path": 0.0, "train__batch_size": 12, "epochs": 3, "masked_weight": 1.0}
NAMED = TINY | {name.replace("__", "."): value for name, value in CHANGES.items()}


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return package.pretrain(images / "train", out=tmp_path_factory.mktemp("whole") / "run", **NAMED)


def losses(run: Run) -> list[tuple[float, ...]]:
    names = ("step", "loss", "loss_global", "loss_query", "loss_masked", "teacher_entropy")
    return [tuple(row[name] for name in names) for row in run.rows("metrics.jsonl")]


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("ranks", "workers", "changes"),
    [
        (3, 4, {}),
        (2, 0, {"shard": "true", "micro_batch_size": 2, "checkpoint_activations": "true"}),
        *(pytest.param(ranks, workers, {}, marks=FULL) for ranks in (1, 2, 3) for workers in (0, 1, 2)),
        pytest.param(3, 2, {"shard": "true"}, marks=FULL),
        pytest.param(2, 2, {"micro_batch_size": 3}, marks=FULL),
    ],
)
def test_any_number_of_processes_and_workers_learns_the_same(
    images: Path, tmp_path: Path, whole: Run, ranks: int, workers: int, changes: dict[str, Any]
) -> None:
    process = lives.start(
        images / "train", tmp_path / "run", ranks=ranks, num_workers=workers, cache="off", **(CHANGES | changes)
    )
    code, _, errors = lives.finish(process, 240)
    assert code == 0, errors
    for a, b in zip(losses(whole), losses(Run(tmp_path / "run")), strict=True):
        assert a == pytest.approx(b, rel=1e-5), a[0]
    exported = [load_file(path / "backbone.safetensors") for path in (whole.path, tmp_path / "run")]
    assert exported[0].keys() == exported[1].keys()
    for name, tensor in exported[0].items():
        torch.testing.assert_close(tensor, exported[1][name], rtol=1e-3, atol=1e-4)


def test_all_processes_save_when_the_clock_of_the_first_says_so(images: Path, tmp_path: Path, whole: Run) -> None:
    """The clock of the others stands still, so that they would never save by themselves."""
    before = """
import itertools, os, types
from adclr.training import checkpoint_writer
count = itertools.count(step=600.0 if os.environ["RANK"] == "0" else 0.0)
checkpoint_writer.time = types.SimpleNamespace(monotonic=lambda: next(count))
"""
    process = lives.start(
        images / "train", tmp_path / "run", before=before, ranks=2, keep_checkpoints=20, cache="off", **CHANGES
    )
    code, _, errors = lives.finish(process, 240)
    assert code == 0, errors
    run = Run(tmp_path / "run")
    assert run.steps() == [3, 6]  # due after 20 minutes, at step 2, which all know a step later; and the end
    for a, b in zip(losses(whole), losses(run), strict=True):
        assert a == pytest.approx(b, rel=1e-5), a[0]


GRADIENTS = """
import sys, torch
from safetensors.torch import save_file
sys.path.insert(0, {tests!r})
from adclr.system import distributed
from adclr.training import job, micro_batch, schedules
from adclr.training.fsdp import Sharded
from adclr.training.step import Step
from tiny import tiny
cpu = torch.device("cpu")
with distributed.session(cpu):
    settings = tiny(**{changes!r})
    method = job.build(settings)
    optimizer = schedules.make_optimizer(method.student, settings)
    if {shard}:
        optimizer = Sharded(method, optimizer, settings, cpu).optimizer
    torch.manual_seed(0)
    views = [micro_batch.random_views(settings, 2, cpu) for _ in range(2)]
    Step(settings, method, optimizer, cpu, None).accumulate_gradients([views[distributed.rank()]], 0.05, 0.1)
    found = {{n: distributed.full_tensor(p.grad) for n, p in method.student.named_parameters() if p.grad is not None}}
    if distributed.is_main():
        save_file(found, {out!r})
"""


def torchrun(program: Path) -> subprocess.CompletedProcess[str]:
    """Two processes of a program."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize("shard", [False, True])
def test_the_gradient_is_that_of_one_process(tmp_path: Path, shard: bool) -> None:
    changes: dict[str, Any] = {"masked_weight": 1.0, "drop_path": 0.0, "batch_size": 4}
    if shard:  # the queries of ADCLR+, and read-only copies
        changes |= {"query_source": "local", "read_only_copies": True, "query_read_only_blocks": 1}
    settings, cpu = tiny(**changes), torch.device("cpu")
    method = job.build(settings)
    step = Step(settings, method, schedules.make_optimizer(method.student, settings), cpu, None, accumulate=2)
    torch.manual_seed(0)
    step.accumulate_gradients([micro_batch.random_views(settings, 2, cpu) for _ in range(2)], 0.05, 0.1)
    program, out = tmp_path / "program.py", tmp_path / "gradients.safetensors"
    program.write_text(
        GRADIENTS.format(tests=str(Path(__file__).parents[1]), shard=shard, out=str(out), changes=changes)
    )
    done = torchrun(program)
    assert done.returncode == 0, done.stderr
    found = load_file(out)
    for name, parameter in method.student.named_parameters():
        assert parameter.grad is not None
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5 * scale, msg=name)


VOID = """
import hashlib, sys, torch
sys.path.insert(0, {tests!r})
from adclr.system import distributed
from adclr.training import checkpoint, job, micro_batch, schedules
from adclr.training.fsdp import Sharded
from adclr.training.step import Step
from tiny import tiny
cpu, values = torch.device("cpu"), schedules.Values(0.01, 0.1, 0.9, 0.05, False)
with distributed.session(cpu):
    settings = tiny(masked_weight=1.0, drop_path=0.0, batch_size=4)
    method = job.build(settings)
    optimizer = schedules.make_optimizer(method.student, settings)
    if {shard}:
        optimizer = Sharded(method, optimizer, settings, cpu).optimizer
    def state():
        parts = checkpoint.parts(method, optimizer).values()
        tensors = [distributed.full_tensor(part[name]).contiguous() for part in parts for name in sorted(part)]
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()
    torch.manual_seed(distributed.rank())
    step = Step(settings, method, optimizer, cpu, None)
    first, second, third = (micro_batch.random_views(settings, 2, cpu) for _ in range(3))
    if distributed.rank() == 1:
        second.global_crops[0, 0, 0, 0, 0] = float("nan")
    told = []
    for views in (first, second, third):
        _, ok = step(iter([views]), values)
        told += [str(bool(ok)), state()]
    with open(f"{out}.{{distributed.rank()}}", "w") as file:
        file.write(" ".join(told))
    del step, optimizer, method  # at the interpreter's end, what holds on to the group can abort the process
"""


@pytest.mark.parametrize("shard", [False, True])
def test_a_number_that_is_not_finite_in_one_process_voids_the_step_in_all(tmp_path: Path, shard: bool) -> None:
    program, out = tmp_path / "program.py", tmp_path / "told"
    program.write_text(VOID.format(tests=str(Path(__file__).parents[1]), shard=shard, out=str(out)))
    done = torchrun(program)
    assert done.returncode == 0, done.stderr
    told = [Path(f"{out}.{rank}").read_text().split() for rank in range(2)]
    assert told[0] == told[1]
    assert told[0][::2] == ["True", "False", "True"]
    before, after, then = told[0][1::2]
    assert before == after != then


@pytest.mark.parametrize(
    "lives_of",
    [
        ((2, "true", 4), (1, "false", 6)),
        pytest.param(((1, "false", 1), (3, "true", 3), (2, "false", 5), (2, "true", 6)), marks=FULL),
    ],
)
def test_spread_and_whole_weights_go_on_from_each_other(
    images: Path, tmp_path: Path, whole: Run, lives_of: tuple[tuple[int, str, int], ...]
) -> None:
    """(processes, spread, steps); each is ended by SIGUSR1 but the last."""
    out = tmp_path / "run"
    before = """
import os, signal, adclr.training.journal as j
step = j.Journal.step
def signalled(self, done, *rest):
    step(self, done, *rest)
    if done == {last}: os.kill(os.getpid(), signal.SIGUSR1)
j.Journal.step = signalled
"""
    for ranks, shard, last in lives_of:
        told = before.format(last=last - (ranks > 1)) if last < 6 else ""
        process = lives.start(images / "train", out, before=told, ranks=ranks, shard=shard, **CHANGES)
        code, _, errors = lives.finish(process)
        assert (code == 0) == (last == 6), errors
        assert lives.newest(out) == last
    assert [start["from_step"] for start in read_json(out / "provenance.json")][1:] == [n for *_, n in lives_of][:-1]
    for a, b in zip(losses(whole), losses(Run(out)), strict=True):
        assert a == pytest.approx(b, rel=1e-5), a[0]


@FULL
@pytest.mark.parametrize("shard", ["true", "false"])
def test_gradients_may_travel_in_bfloat16(images: Path, tmp_path: Path, whole: Run, shard: str) -> None:
    changes = CHANGES | {"shard": shard, "reduce_precision": "bfloat16"}
    code, _, errors = lives.finish(lives.start(images / "train", tmp_path / "run", ranks=2, **changes))
    assert code == 0, errors
    found = losses(Run(tmp_path / "run"))
    assert found[2:] != losses(whole)[2:]
    for a, b in zip(losses(whole), found, strict=True):
        assert a == pytest.approx(b, rel=1e-2), a[0]


def test_a_process_that_is_killed_takes_the_run_down_and_its_checkpoint_stays(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    changes = CHANGES | {"epochs": 5000, "checkpoint_every_steps": 3}
    process = lives.start(images / "train", out, ranks=2, **changes)
    lives.until(lambda: bool(Run(out).steps()), process)
    os.kill(lives.children(process)[-1], signal.SIGKILL)
    started = time.monotonic()
    code, _, errors = lives.finish(process)
    assert time.monotonic() - started < 60
    assert code != 0
    assert "exitcode  : -9" in errors
    assert "Traceback" not in errors[: errors.index("(exitcode: -9)")]  # then comes torchrun's own
    assert lives.newest(out) is not None


@FULL
def test_torchrun_starts_a_run_again_whose_process_was_killed(images: Path, tmp_path: Path) -> None:
    """SIGKILL of the second process in the first life and of the first one in the second: as without, to the bit."""
    before = """
import os, signal, adclr.training.journal as j
step = j.Journal.step
def killed(self, done, *rest):
    step(self, done, *rest)
    life = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    if (life, done) in ((("1", "0"), 5), (("0", "1"), 9)): os.kill(os.getpid(), signal.SIGKILL)
j.Journal.step = killed
"""
    changes = CHANGES | {"epochs": 6, "checkpoint_every_steps": 2}
    outs = [tmp_path / "whole", tmp_path / "killed"]
    code, _, errors = lives.finish(lives.start(images / "train", outs[0], ranks=2, **changes), 300)
    assert code == 0, errors
    process = lives.start(images / "train", outs[1], ranks=2, before=before, max_restarts=3, **changes)
    code, _, errors = lives.finish(process, 300)
    assert code == 0, errors
    starts = [start["from_step"] for start in read_json(outs[1] / "provenance.json")]
    assert len(starts) == 3
    assert 0 == starts[0] < starts[1] < starts[2]
    assert lives.digest(outs[1]) == lives.digest(outs[0])


def test_the_reason_of_a_process_that_fails_is_shown_first(images: Path, tmp_path: Path) -> None:
    before = """
import os, adclr.training.journal as j
from adclr.config.parsing import UserError
step = j.Journal.step
def failing(self, done, *rest):
    step(self, done, *rest)
    if done == 3 and os.environ["RANK"] == "1": raise UserError("the second process has a reason")
j.Journal.step = failing
"""
    process = lives.start(images / "train", tmp_path / "run", ranks=2, before=before, **(CHANGES | {"epochs": 5000}))
    started = time.monotonic()
    code, _, errors = lives.finish(process)
    assert time.monotonic() - started < 60
    assert code != 0
    first = errors.index("adclr: the second process has a reason")
    assert "Traceback" not in errors[:first]
    assert "another process of this run has ended" not in errors[:first]
