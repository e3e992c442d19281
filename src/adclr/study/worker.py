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
from adclr.config.parsing import UserError
from adclr.study import results
from adclr.study.study_file import Evaluation
from adclr.system import openmp
from adclr.system.files import read_json
from adclr.system.runs import Run
from adclr.system.text import printable
from adclr.training import launch


def run_job(job: dict[str, Any]) -> None:
    """Train and score what is missing, and write each result as soon as it is there."""
    # they import torch, which then reads the environment that `main` has set
    from adclr.training import loop
    from adclr.training.job import build
    from adclr.weights.backbone import save_backbone

    run, result = Run(job["run"]), Path(job["result"])
    if not result.exists() or not (run.path / "backbone.safetensors").exists():
        if job["untrained"]:
            settings = launch.resolve_settings(parsing.load_recipe(job["recipe"]), job["overrides"])
            save_backbone(run.path, build(settings).teacher.backbone.state_dict(), settings)
        else:
            loop.train(launch.prepare(job["data"], run.path, job["recipe"], job["overrides"]))
        if not result.exists():
            results.write_training(result, job["identity"], run, job["untrained"], job["fingerprint"])
    for task in job["evaluations"]:
        evaluation = parsing.validate_settings(Evaluation, task["evaluation"])
        print(f"evaluate {evaluation.name} on {task['data']}", flush=True)
        settings = evaluation.build(str(run.path), task["data"])
        started = time.monotonic()
        scores = evals.run_evaluation(evaluation.name, settings, evals.result_path(evaluation.name, settings))
        results.add_scores(result, evaluation, scores, time.monotonic() - started, task["fingerprint"])


def _stop_with_study(pipe: int) -> None:
    """Save and exit when the study ends, however it ends: a run must not go on unnoticed."""
    os.read(pipe, 1)  # returns when the pipe is closed; nothing is ever written to it
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run the job that the arguments name; a user's mistake exits with code 2."""
    openmp.configure()
    if len(sys.argv) > 2:
        threading.Thread(target=_stop_with_study, args=(int(sys.argv[2]),), daemon=True).start()
    try:
        run_job(read_json(Path(sys.argv[1])))
    except UserError as error:
        print(f"adclr: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
