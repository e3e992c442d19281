"""The process of one run of a study: `python -m adclr.study.worker JOB [PIPE]` trains and scores it.

JOB is a JSON file, PIPE the file descriptor of a pipe that is closed when the study ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from adclr import evals
from adclr.config import parsing
from adclr.config.distillation import DistillSettings
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.study import results, time_to_knn
from adclr.study.study_file import Evaluation, Picture
from adclr.system import machine
from adclr.system.files import read_json
from adclr.system.runs import Run
from adclr.system.text import printable
from adclr.training import launch


def run_job(job: dict[str, Any]) -> None:
    """Train and score what is missing, and write each result as soon as it is there."""
    # they import torch, which then reads the environment that `main` has set
    from adclr.features import visualize
    from adclr.training.job import build
    from adclr.weights.backbone import save_backbone

    run, result = Run(job["run"]), Path(job["result"])
    if not result.exists() or not (run.path / "backbone.safetensors").exists():
        if job["untrained"]:
            settings = launch.resolve_settings(parsing.load_recipe(job["recipe"]), job["overrides"])
            save_backbone(run.path, build(settings).teacher.backbone.state_dict(), settings)
        else:
            _train(job, run)
        if not result.exists():
            results.write_training(result, job["identity"], run, job["untrained"], job["fingerprint"])
    for task in job["evaluations"]:
        evaluation = parsing.validate_settings(Evaluation, task["evaluation"])
        settings = evaluation.build(str(run.path), task["data"])
        started = time.monotonic()
        if evaluation.is_time:
            scores = time_to_knn.measure(_timed_run(job, run), settings)
        else:
            print(f"evaluate {evaluation.name} on {task['data']}", flush=True)
            scores = evals.run_evaluation(evaluation.name, settings, evals.result_path(evaluation.name, settings))
        results.add_scores(result, evaluation, scores, time.monotonic() - started, task["fingerprint"])
    for task in job["pictures"]:
        figure = parsing.validate_settings(Picture, task["figure"])
        print(f"draw {figure.name} of {task['data']}", flush=True)
        visualize.write_figures(figure.name, str(run.path), [task["data"]], Path(task["out"]), figure.build())


def _train(job: dict[str, Any], run: Run) -> None:
    """Train a run, scored on the way if the time to an accuracy is asked for."""
    from adclr.training import loop

    kind, overrides = DistillSettings if job["command"] == "distill" else Settings, job["overrides"] | job["probe"]
    started = machine.process_start()
    loop.train(launch.prepare(job["data"], run.path, job["recipe"], overrides, kind=kind, started=started))


def _timed_run(job: dict[str, Any], run: Run) -> Run:
    """Return the run if it was scored on the way; else the same training once more, in a folder beside it."""
    data, every_epochs = job["probe"]["probe.data"], job["probe"]["probe.every_epochs"]
    again = Run(f"{run.path}-timed")
    for one in (run, again):
        if time_to_knn.is_timed(one, data, every_epochs):
            return one
    print("train again, to measure the time to an accuracy", flush=True)
    _train(job, again)
    return again


def _stop_with_study(pipe: int) -> None:
    """Save and exit when the study ends, however it ends: no run may continue unnoticed."""
    os.read(pipe, 1)  # returns when the pipe is closed; nothing is ever written to it
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run the job that the arguments name; a user's mistake exits with code 2."""
    machine.configure_openmp()
    if len(sys.argv) > 2:
        threading.Thread(target=_stop_with_study, args=(int(sys.argv[2]),), daemon=True).start()
    try:
        run_job(read_json(Path(sys.argv[1])))
    except UserError as error:
        print(f"adclr: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
