"""The threads of torch on a CPU: how OpenMP waits, and how many threads a process starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adclr.system import machine
from adclr.training import job, launch
from studied import study
from tiny import TINY

OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
CORES = machine.cpu_count()


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a user who has set no variable of OpenMP, with the given ones."""
    return {name: value for name, value in os.environ.items() if name not in OPENMP} | variables


def openmp_settings(text: str) -> dict[str, str]:
    """Return the settings that a process printed when it loaded OpenMP, because OMP_DISPLAY_ENV was set."""
    display = re.search(r"OPENMP DISPLAY ENVIRONMENT BEGIN(.*?)OPENMP DISPLAY ENVIRONMENT END", text, re.DOTALL)
    if display is None:
        pytest.skip("this build of torch does not use GNU OpenMP")
    return dict(re.findall(r"(\w+) = '(.*?)'", display[1]))


def loaded(program: list[str], **variables: str) -> dict[str, str]:
    """Return the settings of OpenMP in a process that runs a program."""
    done = subprocess.run(
        [sys.executable, *program],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(OMP_DISPLAY_ENV="VERBOSE", **variables),
    )
    return openmp_settings(done.stderr)


def plan_command(images: Path) -> list[str]:
    """Return a command that imports torch and then ends with a mistake, before it measures anything."""
    return ["-m", "adclr", "plan", str(images / "train"), "--gpus", "2", "device=cpu"]


def test_threads_of_a_command_sleep_while_they_wait(images: Path) -> None:
    assert loaded(plan_command(images))["GOMP_SPINCOUNT"] == "0"


def test_what_the_user_has_set_is_left_alone(images: Path) -> None:
    variables = {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "2"}
    settings = loaded(plan_command(images), **variables)
    assert settings["OMP_WAIT_POLICY"] == "ACTIVE"
    assert settings["OMP_NUM_THREADS"] == "3"
    assert loaded(plan_command(images), GOMP_SPINCOUNT="1000")["GOMP_SPINCOUNT"] == "1000"


@pytest.mark.skipif(CORES < 2, reason="one core cannot be shared")
def test_processes_of_one_machine_share_its_cores(images: Path) -> None:
    settings = loaded(plan_command(images), LOCAL_WORLD_SIZE="2")
    assert settings["OMP_NUM_THREADS"] == str(CORES // 2)
    settings = loaded(plan_command(images), LOCAL_WORLD_SIZE=str(4 * CORES))
    assert settings["OMP_NUM_THREADS"] == "1"


def test_a_limited_container_gets_as_many_threads_as_it_has_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OPENMP:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert machine.openmp_environment() == {"OMP_WAIT_POLICY": "passive"}  # torch counts the cores itself
    (tmp_path / "cpu.max").write_text("300000 100000\n")
    assert machine.openmp_environment()["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert machine.openmp_environment()["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("MKL_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in machine.openmp_environment()


def test_processes_of_one_machine_share_the_decoding(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    for processes, threads in (("1", 8), ("3", 2), ("20", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        launched = launch.prepare(images / "train", tmp_path / "run", "adclr_vits16", TINY)
        assert job.load_job(launched, torch.device("cpu")).feed.num_workers == threads


def test_python_code_gets_the_same_and_keeps_its_environment() -> None:
    program = "import os, adclr; before = dict(os.environ); adclr.load; assert os.environ == before"
    assert loaded(["-c", program])["GOMP_SPINCOUNT"] == "0"


def test_importing_the_package_changes_no_environment() -> None:
    program = "import os, sys; before = dict(os.environ); import adclr; assert os.environ == before"
    program += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, env=environment())


def test_runs_of_a_study_sleep_while_they_wait(images: Path, tmp_path: Path) -> None:
    small = {"settings": {"train.epochs": 1, "optim.warmup_epochs": 0, "train.report": False}, "seeds": [0]}
    file = study(tmp_path, **small, arms={"untrained": {"untrained": True}})
    program = "import sys; from pathlib import Path; from adclr import study; "
    program += "study.run_study(Path(sys.argv[1]), Path(sys.argv[2]), None, {'photos': sys.argv[3]})"
    done = subprocess.run(
        [sys.executable, "-c", program, str(file), str(tmp_path / "runs"), str(images)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(OMP_DISPLAY_ENV="VERBOSE"),
    )
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "runs/jobs").glob("*.log")
    assert openmp_settings(log.read_text())["GOMP_SPINCOUNT"] == "0"
