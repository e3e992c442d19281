"""One run of a study and its scores, in a process of its own: `python -m adclr.study.work JOB [LEASH]`.

JOB is a file of JSON, LEASH the number of a pipe that ends with the study.
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
from adclr.config import sections
from adclr.config.sections import UserError
from adclr.study import results
from adclr.study.outline import Evaluation
from adclr.system.files import read_json
from adclr.system.runs import Run
from adclr.system.text import printable
from adclr.training import launch, loop
from adclr.training.job import build
from adclr.weights.backbone import save_backbone


def work(job: dict[str, Any]) -> None:
    """Trains what is not trained, scores what is not scored, and keeps each as soon as it is there."""
    run, result = Run(job["run"]), Path(job["result"])
    if not result.exists() or not (run.path / "backbone.safetensors").exists():
        if job["untrained"]:
            settings = launch.settle(sections.recipe(job["recipe"]), job["said"])
            save_backbone(run.path, build(settings).teacher.backbone.state_dict(), settings)
        else:
            loop.run(launch.prepare(job["data"], run.path, job["recipe"], job["said"]))
        if not result.exists():
            results.keep_training(result, job["known_by"], run, job["untrained"], job.get("fingerprint"))
    for spec in job["evaluations"]:
        evaluation = sections.validated(Evaluation, spec["evaluation"])
        print(f"evaluate {evaluation.name} on {spec['data']}", flush=True)
        settings = evaluation.build(str(run.path), spec["data"])
        started = time.monotonic()
        scores = evals.score(evaluation.name, settings, evals.file_of(evaluation.name, settings))
        results.keep_scores(result, evaluation, scores, time.monotonic() - started, spec.get("fingerprint"))


def end_with(leash: int) -> None:
    """Saves and ends when the study does, however that ends: nobody would know of a run that goes on by itself."""
    os.read(leash, 1)  # nothing is ever written to it
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    if len(sys.argv) > 2:
        threading.Thread(target=end_with, args=(int(sys.argv[2]),), daemon=True).start()
    try:
        work(read_json(Path(sys.argv[1])))
    except UserError as error:
        print(f"adclr: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
