"""Several processes with one GPU: two that share it by gloo, and one that is a group of NCCL by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import lives
from adclr.system.files import read_json
from adclr.system.runs import Run
from on_gpu import for_kernels, write_scenes
from tiny import words

pytestmark = pytest.mark.gpu

# sizes that all kernels take; no drop path, which draws differently for another number of processes
CHANGES = for_kernels(**{"model.drop_path": 0.0, "train.batch_size": 16, "train.epochs": 3, "optim.lr": 1e-3})
FLOAT32 = {"train.precision": "float32"}
NAMES = ("loss", "loss_global", "loss_query", "teacher_entropy")


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Baseline JPEG files, which nvJPEG decodes."""
    folder = tmp_path_factory.mktemp("scenes")
    for path in sorted((write_scenes(folder / "png") / "train").rglob("*.png")):
        target = folder / "jpeg" / f"{path.stem}.jpg"
        target.parent.mkdir(exist_ok=True)
        Image.open(path).convert("RGB").save(target, quality=95, subsampling=0)
    return folder / "jpeg"


def start(data: Path, out: Path, ranks: int = 1, before: str = "", **changes: Any) -> subprocess.Popen[str]:
    named = {name.replace(".", "__"): value for name, value in (CHANGES | changes).items()}
    return lives.start(data, out, ranks=ranks, before=before, threads=1, **named)


def run(data: Path, out: Path, ranks: int = 1, before: str = "", **changes: Any) -> Run:
    code, output, errors = lives.finish(start(data, out, ranks, before, **changes), 300)
    assert code == 0, output + errors
    return Run(out)


def losses(of: Run) -> torch.Tensor:
    return torch.tensor([[row[name] for name in NAMES] for row in of.rows("metrics.jsonl")], dtype=torch.float64)


def difference(a: Run, b: Run) -> torch.Tensor:
    """The largest relative difference of the losses of each step."""
    first, second = losses(a), losses(b)
    assert first.shape == second.shape
    return ((first - second).abs() / first.abs()).amax(dim=1)


@pytest.fixture(autouse=True)
def _share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADCLR_SHARE_GPUS", "1")


def test_without_leave_a_second_process_is_refused(
    jpegs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ADCLR_SHARE_GPUS")
    if torch.cuda.device_count() > 1:
        pytest.skip("there are several GPUs here")
    code, _, errors = lives.finish(start(jpegs, tmp_path / "run", ranks=2), 120)
    assert code != 0
    assert "process 1 has no GPU of its own: there are 1; start fewer, or set ADCLR_SHARE_GPUS=1" in errors


@pytest.mark.parametrize("cache", ["gpu", "off"])
@pytest.mark.parametrize("precision", ["float32", "auto"])
def test_two_processes_that_share_a_gpu_learn_what_one_does(
    jpegs: Path, tmp_path: Path, precision: str, cache: str
) -> None:
    """With kernels, and images from the cache on the GPU or by nvJPEG in each process. Steps of several processes are
    not recorded as CUDA graphs."""
    changes = {"train.precision": precision, "data.cache": cache}
    whole = run(jpegs, tmp_path / "one", **changes)
    halves = run(jpegs, tmp_path / "two", ranks=2, **changes)
    assert [read_json(one.path / "provenance.json")[0]["processes"] for one in (whole, halves)] == [1, 2]
    steps = difference(whole, halves)
    print(f"{precision} cache={cache}: first {steps[0]:.1e}, largest of {len(steps)} {steps.max():.1e}")
    assert steps[0] < 1e-4
    assert steps.max() < (1e-4 if precision == "float32" else 1e-2)


def test_weights_are_not_sharded_over_processes_that_share_a_gpu(jpegs: Path, tmp_path: Path) -> None:
    code, _, errors = lives.finish(start(jpegs, tmp_path / "run", ranks=2, **{"train.shard": True}), 120)
    assert code != 0
    assert "train.shard=true needs a GPU for each process; leave it out where processes share one" in errors


def test_a_run_resumes_with_another_number_of_processes(jpegs: Path, tmp_path: Path) -> None:
    """1, then 2, then 1 process, ended by SIGUSR1 after steps 4 and 8: the losses of an uninterrupted run."""
    whole, out = run(jpegs, tmp_path / "whole", **FLOAT32), tmp_path / "run"
    before = """
import os, signal, adclr.training.journal as j
step = j.Journal.step
def signalled(self, done, *rest):
    step(self, done, *rest)
    if done == {last}: os.kill(os.getpid(), signal.SIGUSR1)
j.Journal.step = signalled
"""
    for ranks, last in ((1, 4), (2, 8), (1, 12)):
        # several processes stop a step after the signal
        signalled = before.format(last=last - (ranks > 1)) if last < 12 else ""
        code, _, errors = lives.finish(start(jpegs, out, ranks, signalled, **FLOAT32), 300)
        assert (code == 0) == (last == 12), errors
        assert lives.newest(out) == last
    starts = read_json(out / "provenance.json")
    assert [(one["processes"], one["from_step"]) for one in starts] == [(1, 0), (2, 4), (1, 8)]
    assert difference(whole, Run(out)).max() < 1e-4


# a group of one process, in which every collective of the program is called
NCCL = """
import os, sys, torch
import torch.distributed as dist
from adclr.system import distributed
called = set()
def noted(name, original):
    def call(*arguments, **named):
        group = named.get("group")
        called.add((name, dist.get_backend(group)))
        return original(*arguments, **named)
    return call
torch.cuda.set_device(0)
dist.init_process_group("nccl", init_method="file://{out}.store", rank=0, world_size=1)
for name in ("all_reduce", "all_gather", "barrier", "all_gather_into_tensor", "reduce_scatter_tensor"):
    setattr(dist, name, noted(name, getattr(dist, name)))
device = torch.device("cuda", 0)
assert distributed.all_reduce_sum(torch.ones(3, device=device)).tolist() == [1, 1, 1]
assert distributed.all_reduce_min(torch.ones(3, device=device)).tolist() == [1, 1, 1]
assert distributed.gather(torch.arange(4)).tolist() == [0, 1, 2, 3]
distributed.barrier()
assert distributed.HostGroup().ask(True, False)() == [True, False]
from adclr.cli import main
try:
    main(sys.argv[1:])
finally:
    import json
    print(json.dumps(sorted(called)))
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("shard", "reduced"), [(False, "float32"), (True, "float32"), (False, "bfloat16")])
def test_a_group_of_nccl_with_one_process_learns_what_no_group_does(
    jpegs: Path, tmp_path: Path, shard: bool, reduced: str
) -> None:
    alone = run(jpegs, tmp_path / "alone", **FLOAT32)
    program, out = tmp_path / "program.py", tmp_path / "group"
    program.write_text(NCCL.format(out=out))
    changes = CHANGES | FLOAT32 | {"train.shard": shard, "train.reduce_precision": reduced}
    done = subprocess.run(
        [sys.executable, str(program), "pretrain", str(jpegs), "--out", str(out), *words(changes)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    called = [tuple(pair) for pair in json.loads(done.stdout.splitlines()[-1])]
    print(called)
    assert {("all_reduce", "nccl"), ("all_gather", "nccl"), ("barrier", "nccl"), ("all_reduce", "gloo")} <= set(called)
    steps = difference(alone, Run(out))
    print(f"shard={shard} reduced={reduced}: largest of {len(steps)} {steps.max():.1e}")
    assert steps.max() < (1e-4 if reduced == "float32" else 1e-2)
    weights = [load_file(path / "backbone.safetensors") for path in (alone.path, out)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-2, atol=1e-3, msg=name)
