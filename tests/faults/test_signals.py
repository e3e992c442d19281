"""SIGTERM, SIGINT and SIGUSR1, sent to real processes: saved, ended with code 75, and gone on with exactly."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import adclr as package
import lives
from adclr.system.runs import Run
from adclr.training.signals import SAVED, SIGNALS
from tiny import TINY

LONG = {"epochs": 5000}  # and no checkpoint before step 500

# the process signals itself after its third step
AT_STEP_3 = """
import os, signal, adclr.training.journal as j
step = j.Journal.step
def signalled(self, done, *rest):
    step(self, done, *rest)
    if done == 3: os.kill(os.getpid(), signal.{name})
j.Journal.step = signalled
"""
SLOW_DISK = """
import os, time
sync = os.fsync
def slow(handle):
    if "step_" in os.readlink(f"/proc/self/fd/{handle}"): time.sleep(60)
    sync(handle)
os.fsync = slow
"""
STUCK_AT_STEP_5 = """
import ctypes, adclr.training.journal as j
step = j.Journal.step
def stuck(self, done, *rest):
    step(self, done, *rest)
    if done == 5:
        lock, pthread = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        pthread.pthread_mutex_lock(lock)
        pthread.pthread_mutex_lock(lock)  # for ever, and no signal ends it
j.Journal.step = stuck
"""
LONG_PROBE = """
import time
from adclr.evals import knn
def score(*_, **__):
    open("{flag}", "w").close()
    time.sleep(100)
knn.score = score
"""


def steps(run: Path) -> list[int]:
    return [row["step"] for row in Run(run).rows("metrics.jsonl") if "loss" in row]


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package.pretrain(images / "train", out=tmp_path_factory.mktemp("whole") / "run", **TINY).path


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1"])  # SIGTERM in the tests that follow
def test_the_step_is_finished_saved_and_gone_on_from(images: Path, tmp_path: Path, whole: Path, name: str) -> None:
    out = tmp_path / "run"
    code, _, errors = lives.finish(lives.start(images / "train", out, before=AT_STEP_3.format(name=name)))
    assert code == SAVED == 75, errors
    assert "Traceback" not in errors
    assert f"{name}: ended after step 3, which is saved; the same command resumes from it" in errors
    assert lives.newest(out) == 3
    assert steps(out) == [1, 2, 3]
    package.pretrain(images / "train", out=out, **TINY)
    assert lives.digest(out) == lives.digest(whole)


def test_a_signal_from_outside_loses_no_step_and_takes_no_time(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = lives.start(images / "train", out, **LONG)
    lives.until(lambda: len(steps(out)) > 5, process)
    process.terminate()
    started = time.monotonic()
    code, _, errors = lives.finish(process)
    assert time.monotonic() - started < 10
    assert code == SAVED, errors
    assert lives.newest(out) == steps(out)[-1]


def test_a_second_signal_ends_it_at_once_and_harms_nothing(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert lives.finish(lives.start(images / "train", out, before=AT_STEP_3.format(name="SIGTERM")))[0] == SAVED
    process = lives.start(images / "train", out, before=SLOW_DISK)
    lives.until(lambda: (out / "checkpoints" / ".step_8.tmp").exists(), process)  # the last save has begun
    process.terminate()
    time.sleep(0.2)
    process.terminate()  # so soon after, it is the same one passed on by somebody
    time.sleep(1.5)
    assert process.poll() is None
    process.terminate()
    started = time.monotonic()
    code, _, errors = lives.finish(process)
    assert time.monotonic() - started < 2
    assert code == 128 + signal.SIGTERM
    assert "ended at once; the last checkpoint is whole" in errors
    assert lives.newest(out) == 3
    assert package.pretrain(images / "train", out=out, **TINY).finished


def test_a_second_signal_ends_a_process_that_is_stuck(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = lives.start(images / "train", out, before=STUCK_AT_STEP_5, **LONG)
    lives.until(lambda: len(steps(out)) == 5, process)
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert lives.finish(process, 5)[0] == 128 + signal.SIGINT


def test_a_probe_is_cut_short_and_taken_when_the_run_goes_on(images: Path, tmp_path: Path) -> None:
    out, flag = tmp_path / "run", tmp_path / "probing"
    changes = {"probe__data": str(images), "every_epochs": 1, "k": 5}
    named = TINY | {name.replace("__", "."): value for name, value in changes.items()}
    process = lives.start(images / "train", out, before=LONG_PROBE.format(flag=flag), **changes)
    lives.until(flag.exists, process)
    process.terminate()
    started = time.monotonic()
    code, _, errors = lives.finish(process)
    assert time.monotonic() - started < 10
    assert code == SAVED, errors
    assert lives.newest(out) == 1  # the probe before the first step was given up, and the step done
    whole = package.pretrain(images / "train", out=tmp_path / "whole", **named)
    package.pretrain(images / "train", out=out, **named)
    probed = [[row["step"] for row in Run(run).rows("metrics.jsonl") if "knn_top1" in row] for run in (out, whole.path)]
    assert probed == [[4, 8], [0, 4, 8]]


@pytest.mark.parametrize("to", [pytest.param("launcher", marks=pytest.mark.full), "one process"])
def test_two_processes_stop_after_the_same_step(images: Path, tmp_path: Path, to: str) -> None:
    out = tmp_path / "run"
    process = lives.start(images / "train", out, ranks=2, model__drop_path=0.0, **LONG)
    lives.until(lambda: len(steps(out)) > 5, process)
    if to == "launcher":
        process.terminate()
    else:
        os.kill(lives.children(process)[-1], signal.SIGUSR1)
    started = time.monotonic()
    code, _, errors = lives.finish(process)
    assert time.monotonic() - started < 20
    assert code != 0  # torchrun's own
    assert errors.count("which is saved; the same command resumes from it") == 1, errors
    assert "Traceback" not in errors.split("which is saved")[0]
    assert lives.newest(out) == steps(out)[-1]


def test_handlers_are_given_back(images: Path, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    package.pretrain(images / "train", out=tmp_path / "run", **TINY)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not any(thread.name == "signals" for thread in threading.enumerate())


def test_in_another_thread_signals_are_left_alone(images: Path, tmp_path: Path) -> None:
    thread = threading.Thread(target=lambda: package.pretrain(images / "train", out=tmp_path / "run", **TINY))
    thread.start()
    thread.join()
    assert Run(tmp_path / "run").finished
