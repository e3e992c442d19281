"""Studies in SLURM: each run is submitted once, whatever happens to the command; with stand-ins and for real."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import slurm_cluster
from adclr import cli
from adclr.config.parsing import UserError
from adclr.data.sets import scenes
from adclr.study import slurm, slurm_queue
from adclr.study.jobs import Workspace
from adclr.study.results import Results
from adclr.study.slurm import run_cells_in_slurm
from adclr.study.study_file import Study, read_study
from studied import KNN, store_results, study
from tiny import TINY

# QUEUE has a line for each task, as squeue prints it; ANSWER says how a command fails.
SBATCH = f"""#!{sys.executable}
import os, re, sys, time
from pathlib import Path
folder = Path(os.environ["FAKE_SLURM"])
with open(folder / "calls", "a") as calls:
    print(" ".join(sys.argv[1:]), file=calls)
answer = os.environ.get("SBATCH_ANSWER", "")
while (folder / "held").exists():
    time.sleep(0.05)
if answer == "refuse":
    sys.exit("sbatch: error: invalid partition specified: gpu")
name = re.search("--job-name=(\\\\S+)", " ".join(sys.argv))[1]
last = int(re.search("--array=0-(\\\\d+)", " ".join(sys.argv))[1])
job = 100 + len((folder / "calls").read_text().splitlines())
with open(folder / "queue", "a") as queue:
    for index in range(last + 1):
        print(name, index, "PENDING", f"{{job}}_{{index}}", "Priority", sep="|", file=queue)
if answer == "lose":
    sys.exit("sbatch: error: Socket timed out on send/recv operation")
print(job)
"""
SQUEUE = """#!/bin/sh
[ -e "$FAKE_SLURM/down" ] && { echo "Unable to contact slurm controller" >&2; exit 1; }
cat "$FAKE_SLURM/queue" 2>/dev/null; true
"""
ARMS = {"one": None, "other": {"settings": {"depth": 1}}, "third": {"settings": {"depth": 3}}}


class FakeSlurm:
    """Stand-ins for sbatch and squeue, and what happens while the study waits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.waits: list[Callable[[], None]] = []  # one for each time the study waits

    def calls(self) -> list[str]:
        """Return the arguments of each sbatch."""
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def lines(self) -> list[list[str]]:
        return [line.split("|") for line in (self.folder / "queue").read_text().splitlines()]

    def set_state(self, index: int, state: str | None, job: int = 101) -> None:
        """Change the state of a task; None takes it out of the queue."""
        lines = [line for line in self.lines() if state is not None or line[3] != f"{job}_{index}"]
        for line in lines:
            if line[3] == f"{job}_{index}":
                line[2] = state or ""
        (self.folder / "queue").write_text("".join("|".join(line) + "\n" for line in lines))

    def sleep(self, _: float) -> None:
        assert self.waits, "the study waits although nothing will happen"
        self.waits.pop(0)()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(folder))
    cluster = FakeSlurm(folder)
    monkeypatch.setattr(slurm, "time", SimpleNamespace(monotonic=time.monotonic, sleep=cluster.sleep))
    monkeypatch.setattr(slurm, "SETTLE_SECONDS", 0.0)
    return cluster


class Launched:
    """A study of three runs, whose results the tests write."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder, self.file = folder, study(folder, arms=ARMS, **changes)
        self.study: Study = read_study(self.file)
        self.results = Results(folder / "results")
        self.workspace = Workspace(folder / "out", {"photos": folder})

    def run(self, options: str = "", at_once: int | None = None) -> None:
        missing = [cell for cell in self.study.cells if not self.results.is_complete(self.study, cell)]
        run_cells_in_slurm(self.study, missing, self.results, self.workspace, options, at_once)

    def finish(self, *labels: str) -> None:
        """Write the results of runs, as their tasks would."""
        store_results(self.folder / "results", self.file, {(label, 0): 50.0 for label in labels})
        for cell in self.study.cells:
            if cell.label in labels:
                folder = self.workspace.out / self.results.run_name(cell)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "backbone.safetensors").touch()

    def jobs(self) -> Path:
        return self.workspace.out / "jobs"


def test_each_run_is_a_task_of_an_array(tmp_path: Path, fake: FakeSlurm, capfd: pytest.CaptureFixture[str]) -> None:
    launched = Launched(tmp_path)
    fake.waits = [
        lambda: (launched.finish("one"), fake.set_state(0, "COMPLETED"), fake.set_state(1, "RUNNING"))[-1],
        lambda: launched.finish("one", "other", "third"),
    ]
    launched.run("--partition=gpu --time=4:00:00", at_once=2)
    (call,) = fake.calls()
    words = call.split(" ")
    assert "--array=0-2%2" in words
    assert {"--requeue", "--signal=B:USR1@120", "--partition=gpu", "--time=4:00:00"} <= set(words)
    task, python, listed = words[-3:]
    assert task == str(slurm_queue.TASK)
    assert python == sys.executable
    jobs = Path(listed).read_text().splitlines()
    names = [launched.results.run_name(cell) for cell in launched.study.cells]
    assert jobs == [str(launched.jobs() / f"{name}.json") for name in names]
    for job, cell in zip(jobs, launched.study.cells, strict=True):
        assert json.loads(Path(job).read_text())["overrides"] == cell.overrides
        assert Path(json.loads(Path(job).read_text())["run"]).is_absolute()
    said = "".join(capfd.readouterr())
    assert "3 runs submitted to SLURM as the array 101" in said
    assert said.count("kNN 50.0") == 3


def test_a_command_that_dies_finds_its_jobs_again(tmp_path: Path, fake: FakeSlurm) -> None:
    launched = Launched(tmp_path)

    def die() -> None:
        raise SystemExit(137)

    fake.waits = [die]
    with pytest.raises(SystemExit):
        launched.run()
    fake.set_state(0, "COMPLETED")
    launched.finish("one")
    fake.waits = [lambda: launched.finish("one", "other", "third")]
    launched.run()
    assert len(fake.calls()) == 1


def test_a_command_killed_while_it_submits_submits_once(tmp_path: Path, fake: FakeSlurm) -> None:
    """The first is killed while sbatch works; the second waits until sbatch has ended."""
    launched, held = Launched(tmp_path), fake.folder / "held"
    command = [sys.executable, "-u", "-m", "adclr", "study", str(launched.file), "--launcher", "slurm"]
    (tmp_path / "photos").mkdir()
    command += [f"photos={tmp_path}/photos", "--out", str(launched.workspace.out)]
    held.touch()
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    slurm_cluster.wait_for(lambda: len(fake.calls()) == 1, 200)
    first.kill()
    first.wait()
    assert len(list(launched.jobs().glob("adclr-one-*.txt"))) == 1
    second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert second.stdout is not None
    assert "3 runs, 0 of them done" in second.stdout.readline()
    time.sleep(0.5)  # in which it would submit
    assert not (fake.folder / "queue").exists()
    held.unlink()
    while "3 runs are in SLURM's queue already" not in second.stdout.readline():
        assert second.poll() is None
    launched.finish("one", "other", "third")
    second.communicate(timeout=200)
    assert second.returncode == 0
    assert len(fake.calls()) == 1


def test_an_answer_that_is_lost_is_looked_up(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    launched = Launched(tmp_path)
    monkeypatch.setenv("SBATCH_ANSWER", "lose")
    fake.waits = [lambda: launched.finish("one", "other", "third")]
    launched.run()
    assert "submitted to SLURM as the array 101" in capfd.readouterr().out
    assert len(fake.calls()) == 1


@pytest.mark.usefixtures("fake")
def test_what_sbatch_refuses_is_said_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Launched(tmp_path)
    monkeypatch.setenv("SBATCH_ANSWER", "refuse")
    with pytest.raises(UserError, match=r"SLURM refused the runs \(sbatch: error: invalid partition specified: gpu\)"):
        launched.run("--partition=gpu")
    assert not list(launched.jobs().glob("adclr-*"))


def test_a_run_that_fails_is_named_and_submitted_again_by_the_next_command(tmp_path: Path, fake: FakeSlurm) -> None:
    launched = Launched(tmp_path)

    def fail() -> None:
        log = launched.workspace.log_file(launched.study.cells[1], launched.results)
        log.write_text("epoch 3\nadclr: the network is too large\n")
        fake.set_state(1, "OUT_OF_MEMORY")
        fake.set_state(0, "RUNNING")
        fake.set_state(2, None)  # long ended

    fake.waits = [fail, lambda: None, lambda: launched.finish("one")]
    with pytest.raises(UserError) as caught:
        launched.run()
    message = str(caught.value)
    assert message.startswith("2 of 3 runs failed, first other, seed 0 (OUT_OF_MEMORY; adclr: the network is too large")
    assert message.endswith("the same command tries again")
    assert "without output" not in message
    fake.set_state(0, "COMPLETED")
    fake.waits = [lambda: launched.finish("one", "other", "third")]
    launched.run()
    assert ["--array=0-2" in fake.calls()[0], "--array=0-1" in fake.calls()[1]] == [True, True]
    assert len(list(launched.jobs().glob("adclr-*.txt"))) == 1  # the first array is forgotten


def test_a_task_that_is_queued_again_has_not_failed(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment its end is seen; then it waits for its next start."""
    monkeypatch.setattr(slurm, "SETTLE_SECONDS", 60.0)
    launched = Launched(tmp_path)
    fake.waits = [
        lambda: fake.set_state(1, "PREEMPTED"),
        lambda: fake.set_state(1, "PENDING"),
        lambda: launched.finish("one", "other", "third"),
    ]
    launched.run()


def test_a_controller_that_is_down_is_waited_for(
    tmp_path: Path, fake: FakeSlurm, capfd: pytest.CaptureFixture[str]
) -> None:
    launched, down = Launched(tmp_path), fake.folder / "down"
    fake.waits = [down.touch, lambda: None, down.unlink, lambda: launched.finish("one", "other", "third")]
    launched.run()
    said = "".join(capfd.readouterr())
    assert said.count("SLURM does not answer (Unable to contact slurm controller)") == 1
    down.touch()
    (tmp_path / "results/runs").rename(tmp_path / "away")
    with pytest.raises(UserError, match="try again later"):  # it may have the runs in its queue
        launched.run()
    assert len(fake.calls()) == 1


def test_columns_that_were_added_are_submitted_when_the_first_jobs_have_ended(tmp_path: Path, fake: FakeSlurm) -> None:
    launched = Launched(tmp_path)

    def die() -> None:
        raise SystemExit(137)

    fake.waits = [die]
    with pytest.raises(SystemExit):
        launched.run()
    first = json.loads((launched.jobs() / f"{launched.study.cells[0].key}.json").read_text())
    columns = {"kNN": KNN, "mean patch": KNN | {"settings": {"k": [3], "device": "cpu", "features": "both"}}}
    more = Launched(tmp_path, evaluations=columns)

    def end_first() -> None:
        assert json.loads((launched.jobs() / f"{launched.study.cells[0].key}.json").read_text()) == first
        for cell in launched.study.cells:
            (more.workspace.out / cell.key).mkdir()
            (more.workspace.out / cell.key / "backbone.safetensors").touch()
        store_results(tmp_path / "results", study(tmp_path, "two.yaml", arms=ARMS), dict.fromkeys(LABELS, 50.0))
        for index in range(3):
            fake.set_state(index, "COMPLETED")

    fake.waits = [end_first, lambda: more.finish("one", "other", "third")]
    more.run()
    assert len(fake.calls()) == 2
    (job,) = {json.dumps(json.loads(file.read_text())["evaluations"]) for file in launched.jobs().glob("*.json")}
    assert [one["evaluation"]["settings"]["features"] for one in json.loads(job)] == ["both"]


LABELS = [("one", 0), ("other", 0), ("third", 0)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slurm", "--partition=gpu"], "--slurm has options for SLURM; add --launcher slurm, or leave it out"),
        (["--launcher", "slurm", "--minutes", "5"], "limit those in SLURM by --slurm"),
        (["--launcher", "slurm", "--slurm", "--array=1-3"], "--array in --slurm is given by the study itself"),
        (["--launcher", "slurm", "--slurm", "-p gpu -J name"], "-J in --slurm is given by the study itself"),
        (["--launcher", "slurm", "--slurm", "--comment='a"], "has a quotation mark without its partner"),
        (["--launcher", "slurm", "photos=empty"], "sbatch was not found; run this on a machine of a SLURM cluster"),
    ],
)
def test_mistakes_of_the_user(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    file = study(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.main(["study", str(file), "--out", "out", *words])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


WORKER = """#!/bin/bash
trap 'echo saved; [ "$ENDS" = late ] && exit 75; exit 143' TERM
echo "trains $4"
[ "$ENDS" = fails ] && exit 2
[ "$ENDS" = well ] && exit 0
touch "$STARTED"
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("ends", "number", "code", "requeued"),
    [
        ("late", signal.SIGUSR1, 75, True),
        ("canceled", signal.SIGTERM, 143, False),
        ("fails", None, 2, False),
        ("well", None, 0, False),
    ],
)
def test_a_task_is_queued_again_when_its_time_is_up(
    tmp_path: Path, ends: str, number: int | None, code: int, requeued: bool
) -> None:
    for name, text in (("python", WORKER), ("scontrol", '#!/bin/sh\necho "$@" > "$REQUEUED"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755 | stat.S_IXUSR)
    jobs = tmp_path / "with space"
    jobs.mkdir()
    (tmp_path / "list").write_text(f"/not/this\n{jobs}/one.json\n")
    environment = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "17", "ENDS": ends, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    environment |= {"STARTED": str(tmp_path / "started"), "REQUEUED": str(tmp_path / "requeued")}
    command = ["bash", str(slurm_queue.TASK), str(tmp_path / "python"), str(tmp_path / "list")]
    process = subprocess.Popen(command, env=environment)
    if number is not None:
        slurm_cluster.wait_for((tmp_path / "started").exists, 20)
        process.send_signal(number)
    assert process.wait(20) == code
    assert f"trains {jobs}/one.json\n" in (jobs / "one.log").read_text()
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 17\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm_cluster.Cluster]:
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    with slurm_cluster.running() as running:
        yield running


@slurm_cluster.in_cluster
def test_a_study_in_a_cluster_survives_its_death_and_preemption(tmp_path: Path, cluster: slurm_cluster.Cluster) -> None:
    """Two trained runs and one that is not: killed and run again, one run preempted; results as on this machine."""
    photos = tmp_path / "photos"
    scenes.write_scenes(photos, 0, 48, 16, 24, show=False)
    settings = TINY | {"train.epochs": 20, "train.checkpoint_every_steps": 1000}
    arms = {"one": None, "other": {"settings": {"depth": 1}}, "start": {"untrained": True}}
    file = study(tmp_path / "studies", settings=settings, arms=arms)
    environment = cluster.environment | {"OMP_NUM_THREADS": "1"}

    def command(launcher: str) -> list[str]:
        places = ["--out", str(tmp_path / launcher), "--results", str(tmp_path / f"results_{launcher}")]
        return [sys.executable, "-m", "adclr", "study", str(file), *places, "--launcher", launcher, f"photos={photos}"]

    options = ["--slurm", "--time=10 --cpus-per-task=1 --partition=low"]
    first = subprocess.Popen([*command("slurm"), *options], env=environment, stdout=subprocess.DEVNULL)
    trained = [tmp_path / "slurm" / cell.key for cell in read_study(file).cells if not cell.untrained]
    slurm_cluster.wait_for(lambda: _rows(trained[0]) > 3, 240, cluster.logs)
    first.kill()
    first.wait()
    (task,) = cluster.call("squeue", "--noheader", "--array", "--format=%A", "--states=RUNNING").splitlines()[:1]
    second = subprocess.Popen([*command("slurm"), *options], env=environment, stdout=subprocess.PIPE, text=True)
    cluster.call("scontrol", "requeue", task)
    cluster.start_again(task)
    said, _ = second.communicate(timeout=400)
    assert second.returncode == 0, said
    assert "runs are in SLURM's queue already" in said
    assert "submitted" not in said
    starts = [len(json.loads((run / "provenance.json").read_text())) for run in trained]
    assert sorted(starts) == [1, 2]
    local = subprocess.run(command("local"), env=environment, capture_output=True, text=True, timeout=400)
    assert local.returncode == 0, local.stderr
    for name in [run.name for run in trained]:
        weights = [tmp_path / launcher / name / "backbone.safetensors" for launcher in ("slurm", "local")]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    scores = [
        [
            {key: one["scores"] for key, one in json.loads(result.read_text())["evaluations"].items()}
            for result in sorted((tmp_path / f"results_{launcher}/runs").glob("*.json"))
        ]
        for launcher in ("slurm", "local")
    ]
    assert scores[0] == scores[1]
    assert len(scores[0]) == 3


def _rows(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0
