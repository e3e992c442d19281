"""Studies run in real processes, which are stopped and killed; their GPUs and cores."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from adclr.config.parsing import UserError
from adclr.data.sets import scenes
from adclr.study.jobs import Workspace
from adclr.study.results import Results
from adclr.study.runner import list_gpus, run_cells
from adclr.study.study_file import read_study
from studied import KNN, study
from tiny import TINY, Adclr


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    scenes.write_scenes(folder, 0, 48, 16, 24, show=False)
    return folder


REAL = {"settings": TINY | {"train.checkpoint_every_steps": 1}, "arms": {"ADCLR": None, "start": {"untrained": True}}}
REAL |= {"control": "start", "seeds": [0]}


def test_what_is_missing_is_run_and_nothing_twice(tmp_path: Path, photos: Path, adclr: Adclr) -> None:
    file, options = study(tmp_path / "studies", **REAL), ["--out", tmp_path / "runs"]
    first = adclr("study", file, *options, f"photos={photos}")
    assert first.returncode == 0, first.stderr
    page = (tmp_path / "studies/results/one.md").read_text()
    assert page in first.stdout
    assert "missing" not in page
    runs = sorted((tmp_path / "studies/results/runs").glob("*.json"))
    assert len(runs) == 2
    trained = next(json.loads(run.read_text()) for run in runs if not json.loads(run.read_text())["untrained"])
    assert trained["training"]["steps"] == 12
    assert trained["data"] == "photos/train"
    assert str(tmp_path) not in json.dumps(trained)  # it can be shown to anybody
    assert trained["provenance"][0]["collection"]
    assert ET.parse(tmp_path / "studies/results/one.svg")
    written = {run: run.stat().st_mtime_ns for run in (tmp_path / "runs").rglob("*.safetensors")}
    # one more column: only it is scored
    other = KNN | {"settings": {"k": [3], "device": "cpu", "features": "both"}}
    pictures = {"maps": {"name": "attention", "data": "photos/val", "settings": {"num_images": 2}}}
    changes = {"evaluations": {"kNN": KNN, "mean patch": other}, "pictures": pictures}
    more = study(tmp_path / "studies", **REAL | changes)
    again = adclr("study", more, *options, f"photos={photos}")
    assert again.returncode == 0, again.stderr
    assert {run: run.stat().st_mtime_ns for run in (tmp_path / "runs").rglob("*.safetensors")} == written
    scored = json.loads(runs[0].read_text())["evaluations"]
    assert len(scored) == 2
    assert len(list((tmp_path / "runs").glob("*/pictures/maps/attention.png"))) == 2
    assert "Pictures: `adclr visualize attention` of photos/val, in pictures/maps of each run" in again.stdout
    # elsewhere, without data and without runs, from what is committed
    remade = adclr("study", file, "--out", tmp_path / "nowhere")
    assert remade.returncode == 0, remade.stderr
    assert (tmp_path / "studies/results/one.md").read_text() in remade.stdout
    assert "2 runs, 2 of them done" in remade.stdout
    assert not (tmp_path / "nowhere").exists()


def test_only_the_runs_that_are_named_are_made(tmp_path: Path, photos: Path, adclr: Adclr) -> None:
    arms = {"first": None, "second": {"settings": {"momentum": 0.97}}}
    file = study(tmp_path / "studies", **REAL | {"arms": arms, "control": "first", "seeds": [0, 1]})
    options = ["--out", tmp_path / "runs", f"photos={photos}"]
    listing = adclr("study", file, "--only", "second, seed 1", "--dry-run")
    assert listing.returncode == 0, listing.stderr
    assert "second, seed 1" in listing.stdout
    assert "first, seed" not in listing.stdout
    done = adclr("study", file, "--only", "second, seed 1", *options)
    assert done.returncode == 0, done.stderr
    (result,) = (tmp_path / "studies/results/runs").glob("*.json")
    trained = json.loads(result.read_text())["settings"]
    assert (trained["method.momentum"], trained["train.seed"]) == (0.97, 1)
    assert "3 of 4 runs are missing" in done.stdout
    refused = adclr("study", file, "--only", "third", *options)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == (
        "adclr: no run has 'third' in its name; there are: first, seed 0; second, seed 0; first, seed 1; second, seed 1"
    )


def test_what_has_no_data_here_waits_and_weights_can_come_from_elsewhere(
    tmp_path: Path, photos: Path, adclr: Adclr
) -> None:
    flowers = KNN | {"data": "flowers"}
    file = study(tmp_path / "studies", **REAL | {"evaluations": {"kNN": KNN, "flowers": flowers}})
    known = [f"photos={photos}", f"cars={tmp_path}"]  # one list for several studies
    first = adclr("study", file, "--out", tmp_path / "runs", *known)
    assert first.returncode == 0, first.stderr
    assert "not used by this study: cars" in first.stdout
    assert "left out, since it was not said where their data lies (flowers=DIR): flowers\n" in first.stdout
    assert "**Not scored yet: flowers of 2 runs.**" in first.stdout
    # on another machine, which has the weights and the flowers, but not the photos
    for run in (tmp_path / "runs").glob("*/backbone.*"):
        (tmp_path / "brought" / run.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(run, tmp_path / "brought" / run.parent.name)
    scored = adclr("study", file, "--out", tmp_path / "brought", f"flowers={photos}")
    assert scored.returncode == 0, scored.stderr
    assert "Not scored yet" not in scored.stdout
    assert "again" not in scored.stdout
    assert not list((tmp_path / "brought").glob("*/metrics.jsonl"))  # nothing was trained
    # without the weights it is trained again, and said to be
    more = study(tmp_path / "studies", **REAL | {"evaluations": {"cars": KNN | {"data": "cars"}}})
    again = adclr("study", more, "--out", tmp_path / "none", f"cars={photos}")
    assert "1 runs are missing; say where the data lies to make them: photos=DIR" in again.stdout
    assert "trained again" not in again.stdout  # the other one is untrained
    again = adclr("study", more, "--out", tmp_path / "none", f"cars={photos}", f"photos={photos}")
    assert "1 runs are trained again to be scored, since their weights are not in" in again.stdout
    assert "1 runs, 1 of them done" not in again.stdout


def test_runs_end_with_a_study_that_is_killed(tmp_path: Path, photos: Path) -> None:
    settings = {**TINY, "train.epochs": 1000, "train.checkpoint_every_steps": 100_000}
    file = study(tmp_path / "studies", settings=settings)
    command = ["study", str(file), "--out", str(tmp_path / "runs"), f"photos={photos}"]
    process = subprocess.Popen([sys.executable, "-m", "adclr", *command], stdout=subprocess.DEVNULL)
    run = tmp_path / "runs" / read_study(file).cells[0].key
    wait_for(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 500)
    process.kill()
    process.wait()
    wait_for(lambda: any(run.glob("checkpoints/step_*/manifest.json")))
    with open(run / ".lock", "ab") as lock:
        wait_for(lambda: not locked(lock))


def locked(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_study_that_is_stopped_goes_on(tmp_path: Path, photos: Path, adclr: Adclr) -> None:
    changes = REAL | {"settings": {**TINY, "train.epochs": 15, "train.checkpoint_every_steps": 1000}, "arms": {}}
    file = study(tmp_path / "studies", **(changes | {"control": None}))
    command = ["study", str(file), "--out", str(tmp_path / "runs"), f"photos={photos}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "adclr", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what a shell starts with & ignores it
    )
    (cell,) = read_study(file).cells
    metrics = tmp_path / "runs" / cell.key / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size > 500):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert b"the same command makes what is missing" in said
    assert b"Traceback" not in said
    log = (tmp_path / "runs/jobs" / f"{cell.key}.log").read_text()
    assert "saved" in log  # the run was let save
    assert list((tmp_path / "runs" / cell.key / "checkpoints").glob("step_*"))
    done = adclr(*command)
    assert done.returncode == 0, done.stderr
    starts = json.loads((tmp_path / "runs" / cell.key / "provenance.json").read_text())
    assert len(starts) == 2
    assert starts[1]["from_step"] > 0


def test_time_that_is_up_and_mistakes_of_the_user(tmp_path: Path, photos: Path, adclr: Adclr) -> None:
    arms = {"a": {"untrained": True}, "b": {"untrained": True, "settings": {"depth": 1}}}
    file = study(tmp_path / "studies", **(REAL | {"arms": arms, "control": None}))
    options = ["--out", tmp_path / "runs"]
    limit = ["--minutes", "0.01"]  # less than one run takes
    limited = adclr("study", file, *options, *limit, f"photos={photos}")
    assert limited.returncode == 0, limited.stderr
    assert "1 runs were not begun, since the time was up" in limited.stdout
    (tmp_path / "empty").mkdir()
    for words, message in (
        ([f"pictures={tmp_path}/no"], "uses no data called 'pictures'; it uses: photos"),
        ([f"photos={photos}", "epochs=3"], "uses no data called 'epochs'"),  # a setting is not passed over
        ([f"photos={tmp_path}/no"], "does not exist; check the path"),
        ([f"photos={tmp_path}/empty"], "seed 0: "),  # a run that cannot be scored says why
    ):
        refused = adclr("study", file, *options, *words)
        assert refused.returncode == 2, refused.stderr
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr
    both = adclr(
        "study",
        file,
        "--out",
        tmp_path / "both",
        "--results",
        tmp_path / "r",
        "--at-once",
        "2",
        *limit,
        f"photos={photos}",
    )
    assert both.returncode == 0, both.stderr
    assert "not begun" not in both.stdout  # the second did not wait for the first
    nothing = adclr("study", file, *options)
    assert nothing.returncode == 0
    assert "say where the data lies to make them: photos=DIR" in nothing.stdout


@pytest.mark.parametrize("code", [9, 2])
def test_a_run_that_fails_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The processes are real; in the options of Python they are a script that fails for one of the three runs."""
    program = tmp_path / "python"
    program.write_text(
        '#!/bin/sh\necho "working on $4"\ngrep -q \'"model.depth": 1\' "$4" && exit CODE\necho done >> ran\n'.replace(
            "CODE", str(code)
        )
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.chdir(tmp_path)
    arms = {"fine": {"settings": {"depth": 3}}, "bad": {"settings": {"depth": 1}}, "good": None}
    parsed, workspace = read_study(study(tmp_path, arms=arms)), Workspace(tmp_path / "o", {"photos": tmp_path}, [None])
    with pytest.raises(UserError) as caught:
        run_cells(parsed, parsed.cells, Results(tmp_path / "r"), workspace, None)
    assert str(caught.value).startswith("1 of 3 runs failed, first bad, seed 0 (working on ")
    assert "the same command tries again" in str(caught.value)
    assert (tmp_path / "ran").read_text() == "done\ndone\n"  # the one behind it too


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not bind processes to cores")
def test_runs_at_once_have_cores_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("this machine has one core")
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\ngrep Cpus_allowed_list /proc/self/status >> cores\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.chdir(tmp_path)
    parsed = read_study(study(tmp_path, arms={"one": None, "other": {"settings": {"depth": 1}}}))
    workspace = Workspace(tmp_path / "o", {"photos": tmp_path}, [None, None])
    run_cells(parsed, parsed.cells, Results(tmp_path / "r"), workspace, None)
    first, second = (
        set(line.split(":")[1].strip().split(",")) for line in (tmp_path / "cores").read_text().splitlines()
    )
    assert not first & second
    assert os.sched_getaffinity(0) == cores


def test_a_gpu_for_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert list_gpus() == [None] or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list_gpus() == ["0", "1", "2"]
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "4,7")
    assert list_gpus() == ["4", "7"]


def test_a_worker_sets_the_environment_before_torch_is_imported() -> None:
    """OpenMP reads its wait policy when torch is imported, also where SLURM starts the worker."""
    code = "import sys, adclr.study.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
