"""docs/pretrain.slurm, with stand-ins for SLURM's commands and in a real cluster: stopped, queued again, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lives
import slurm_cluster
from adclr.system.runs import Run
from tiny import TINY, words

SCRIPT = Path(__file__).parents[2] / "docs" / "pretrain.slurm"
# two processes of one machine; SIGTERM reaches them by scancel
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
  echo $! >>"$STEP"
done
code=0
for process in $(cat "$STEP"); do wait "$process" || code=$?; done
exit $code
"""
SCANCEL = '#!/bin/bash\n[ "$1" = --signal=TERM ] && kill -TERM $(cat "$STEP")\n'
SCONTROL = '#!/bin/bash\n[ "$1" = requeue ] && echo "$2" >> "$REQUEUED"\ntrue\n'
CHANGES: dict[str, Any] = {"epochs": 100, "model.drop_path": 0.0, "cache": "off"}  # 400 steps


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of one machine with two processes."""
    commands = tmp_path / "bin"
    commands.mkdir()
    python = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL), ("python", python)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(10_000 + os.getpid()), "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    job |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    files = {"REQUEUED": str(tmp_path / "requeued"), "STEP": str(tmp_path / "step")}
    return dict(os.environ) | job | files | {"PATH": f"{commands}:{os.environ['PATH']}"}


def job(slurm: dict[str, str], data: Path, out: Path, **changes: Any) -> subprocess.Popen[str]:
    Path(slurm["STEP"]).unlink(missing_ok=True)
    command = ["bash", str(SCRIPT), str(data), str(out), *words(TINY | changes)]
    return subprocess.Popen(command, env=slurm, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.full
def test_a_job_whose_time_is_up_is_queued_again_and_ends_in_the_next(
    images: Path, tmp_path: Path, slurm: dict[str, str]
) -> None:
    out = tmp_path / "run"
    process = job(slurm, images / "train", out, **CHANGES)
    lives.until(lambda: len(list(Run(out).rows("metrics.jsonl"))) > 5, process)
    process.send_signal(signal.SIGUSR1)
    started = time.monotonic()
    code, _, errors = lives.finish(process)
    assert time.monotonic() - started < 30
    assert code == 0, errors
    assert Path(slurm["REQUEUED"]).read_text() == f"{slurm['SLURM_JOB_ID']}\n"
    saved = lives.newest(out)
    assert saved is not None
    assert saved == max(row["step"] for row in Run(out).rows("metrics.jsonl"))
    code, _, errors = lives.finish(job(slurm, images / "train", out, **CHANGES))
    assert code == 0, errors
    assert Run(out).finished
    assert Path(slurm["REQUEUED"]).read_text() == f"{slurm['SLURM_JOB_ID']}\n"  # not once more


def test_a_mistake_is_not_queued_again(tmp_path: Path, slurm: dict[str, str]) -> None:
    code, _, errors = lives.finish(job(slurm, tmp_path / "nothing", tmp_path / "run"))
    assert code == 2
    assert "does not exist; check the path" in errors
    assert not Path(slurm["REQUEUED"]).exists()


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm_cluster.Cluster]:
    """Two nodes; `python` is that of the tests."""
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    with slurm_cluster.running() as running:
        running.environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        yield running


def submit(cluster: slurm_cluster.Cluster, data: Path, out: Path, **changes: Any) -> str:
    """Return the number of a job of docs/pretrain.slurm, with a process on each of the two nodes."""
    options = ["--gpus-per-node=0", "--ntasks-per-node=1", "--cpus-per-task=1", "--time=20", f"--output={out}.log"]
    return cluster.submit(*options, str(SCRIPT), str(data), str(out), *words(TINY | CHANGES | changes))


def wait_for_rows(cluster: slurm_cluster.Cluster, out: Path, count: int) -> None:
    log = Path(f"{out}.log")
    slurm_cluster.wait_for(
        lambda: len(list(Run(out).rows("metrics.jsonl"))) > count,
        240,
        lambda: f"{log.read_text() if log.exists() else ''}\n{cluster.logs()}",
    )


@slurm_cluster.in_cluster
def test_a_job_that_is_preempted_in_each_way_ends_with_the_weights_of_one_that_is_not(
    images: Path, tmp_path: Path, cluster: slurm_cluster.Cluster
) -> None:
    """SIGUSR1 as before the end of its time, `scontrol requeue`, a job that goes before, and SIGTERM of its grace."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    first = submit(cluster, images / "train", whole)
    cluster.wait(first, "COMPLETED")
    job = submit(cluster, images / "train", out)
    wait_for_rows(cluster, out, 10)
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    start_again(cluster, job, out)
    cluster.call("scontrol", "requeue", job)
    start_again(cluster, job, out)
    preempt(cluster)
    start_again(cluster, job, out)
    cluster.call("scontrol", "update", "PartitionName=low", "GraceTime=60")
    try:
        preempt(cluster)
        start_again(cluster, job, out)
    finally:
        cluster.call("scontrol", "update", "PartitionName=low", "GraceTime=0")
    cluster.wait(job, "COMPLETED")
    starts = [start["from_step"] for start in json.loads((out / "provenance.json").read_text())]
    assert len(starts) == 5
    assert 0 == starts[0] < starts[1] < starts[2] < starts[3] < starts[4]
    assert Run(out).finished
    assert lives.digest(out) == lives.digest(whole)


def start_again(cluster: slurm_cluster.Cluster, job: str, out: Path) -> None:
    """Wait until a job that was stopped has saved its last step, is queued again, and has trained on."""
    cluster.start_again(job)
    saved = lives.newest(out)
    assert saved is not None
    wait_for_rows(cluster, out, saved + 10)


def preempt(cluster: slurm_cluster.Cluster) -> None:
    """Submit a short job that needs all nodes, of a partition that goes before, and wait until it is done."""
    other = cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    cluster.wait(other, "COMPLETED")


@slurm_cluster.in_cluster
def test_a_mistake_and_a_canceled_job_are_not_queued_again(
    images: Path, tmp_path: Path, cluster: slurm_cluster.Cluster
) -> None:
    mistaken, out = submit(cluster, tmp_path / "nothing", tmp_path / "none"), tmp_path / "canceled"
    cluster.wait(mistaken, "FAILED")
    assert "does not exist; check the path" in (tmp_path / "none.log").read_text()
    canceled = submit(cluster, images / "train", out, epochs=5000)
    wait_for_rows(cluster, out, 5)
    cluster.call("scancel", canceled)
    cluster.wait(canceled, "CANCELLED")
    assert lives.newest(out) == max(row["step"] for row in Run(out).rows("metrics.jsonl"))
    time.sleep(2)
    assert cluster.state(canceled) == "CANCELLED"
