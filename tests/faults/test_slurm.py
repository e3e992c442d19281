"""docs/pretrain.slurm with stand-ins for SLURM's commands: stopped, queued again, gone on with; not after a fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lives
from adclr.system.runs import Run
from tiny import TINY, words

SCRIPT = Path(__file__).parents[2] / "docs" / "pretrain.slurm"
SRUN = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
SCONTROL = '#!/bin/bash\n[ "$1" = show ] && echo localhost\n[ "$1" = requeue ] && echo "$2" >> "$REQUEUED"\ntrue\n'


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of one machine with two processes."""
    commands = tmp_path / "bin"
    commands.mkdir()
    torchrun = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", torchrun)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost", "GPUS_PER_NODE": "2"}
    path = f"{commands}:{os.environ['PATH']}"
    return dict(os.environ) | job | {"PATH": path, "REQUEUED": str(tmp_path / "requeued"), "OMP_NUM_THREADS": "1"}


def job(slurm: dict[str, str], data: Path, out: Path, **changes: Any) -> subprocess.Popen[str]:
    command = ["bash", str(SCRIPT), str(data), str(out), *words(TINY | changes)]
    return subprocess.Popen(command, env=slurm, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.full
def test_a_job_whose_time_is_up_is_queued_again_and_ends_in_the_next(
    images: Path, tmp_path: Path, slurm: dict[str, str]
) -> None:
    out = tmp_path / "run"
    changes = {"epochs": 100, "model.drop_path": 0.0}
    process = job(slurm, images / "train", out, **changes)
    lives.until(lambda: len(list(Run(out).rows("metrics.jsonl"))) > 5, process)
    process.send_signal(signal.SIGUSR1)
    started = time.monotonic()
    code, _, errors = lives.finish(process)
    assert time.monotonic() - started < 30
    assert code == 0, errors
    assert Path(slurm["REQUEUED"]).read_text() == "17\n"
    saved = lives.newest(out)
    assert saved is not None
    assert saved == max(row["step"] for row in Run(out).rows("metrics.jsonl"))
    code, _, errors = lives.finish(job(slurm, images / "train", out, **changes))
    assert code == 0, errors
    assert Run(out).finished
    assert Path(slurm["REQUEUED"]).read_text() == "17\n"  # not once more


def test_a_mistake_is_not_queued_again(tmp_path: Path, slurm: dict[str, str]) -> None:
    code, _, errors = lives.finish(job(slurm, tmp_path / "nothing", tmp_path / "run"))
    assert code != 0
    assert "does not exist; check the path" in errors
    assert not Path(slurm["REQUEUED"]).exists()
