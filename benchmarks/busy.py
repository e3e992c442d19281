"""Images/s of a tiny training run on a CPU: alone, beside a busy process, and two such runs at once.

    python benchmarks/busy.py [--seconds 20] [--json FILE] [--tiny]

Each case is measured as `adclr pretrain` runs it, and once more with threads that spin while they wait, which is what
GNU OpenMP does where nobody tells it otherwise. "Of what is left" compares with the speed alone, times the share of the
cores that the other processes leave: of two cores beside one busy process half, of two runs at once half for each.
At least half of what is left is the aim. Compare figures of one run only, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from adclr.data.sets import scenes
from adclr.system import machine
from adclr.system.files import write_json
from adclr.system.runs import Run, provenance

BATCH = 32
EPOCHS = 50_000  # longer than any measurement: a run is ended when it has been measured
LONGEST = 600.0  # seconds until a run must have taken its first steps
SETTINGS = {"batch_size": BATCH, "epochs": EPOCHS, "log_every_steps": 1, "health_every_steps": "null"}
SETTINGS |= {"report": "false", "device": "cpu"}
TINY = {"model.dim": 16, "model.depth": 2, "model.num_heads": 2, "num_prototypes": 16, "head_hidden_dim": 16}
WAITING: dict[str, dict[str, str]] = {"sleep": {}, "spin": {"GOMP_SPINCOUNT": "300000"}}


@dataclass(frozen=True)
class Row:
    threads: str  # sleep or spin while they wait
    case: str
    images_per_second: float  # of each run
    of_alone: float
    of_what_is_left: float


@contextmanager
def process(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a Python program meanwhile; its last words are shown if it ends by itself."""
    with tempfile.TemporaryFile() as errors:
        started = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.DEVNULL, stderr=errors, env=dict(environment)
        )
        try:
            yield started
            if started.poll() is not None:
                errors.seek(0)
                raise SystemExit(f"{' '.join(command)} ended: {errors.read().decode(errors='replace')[-500:]}")
        finally:
            started.kill()
            started.wait()


def steps(run: Run) -> list[float]:
    """Seconds of each step that a run has taken so far."""
    return [row["seconds"] for row in run.rows("timing.jsonl") if "images_per_second" in row]


def measure(folder: Path, images: Path, runs: int, busy: int, waiting: str, given: argparse.Namespace) -> float:
    """Returns the mean images/s of so many runs at once beside so many busy processes."""
    names = (*machine.WAIT_VARIABLES, *machine.THREAD_VARIABLES)
    environment = {name: value for name, value in os.environ.items() if name not in names} | WAITING[waiting]
    words = [f"{name}={value}" for name, value in (SETTINGS | (TINY if given.tiny else {})).items()]
    results = [Run(folder / f"run{number}") for number in range(runs)]
    with ExitStack() as stack:
        for _ in range(busy):
            stack.enter_context(process(["-c", "while True: pass"], environment))
        for run in results:
            command = ["-m", "adclr", "pretrain", str(images), "--out", str(run.path), "--recipe", "demo", *words]
            stack.enter_context(process(command, environment))
        wait(lambda: all(len(steps(run)) > 2 for run in results))  # the first steps set things up
        before = [len(steps(run)) for run in results]
        time.sleep(given.seconds)
        wait(lambda: all(len(steps(run)) > count for run, count in zip(results, before, strict=True)))
        spent = [steps(run)[count:] for run, count in zip(results, before, strict=True)]
    return sum(BATCH * len(seconds) / sum(seconds) for seconds in spent) / runs


def wait(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST
    while not ready():
        if time.monotonic() > deadline:
            raise SystemExit(f"no steps were taken within {LONGEST:.0f} seconds")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="that each case is measured (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, after every row")
    parser.add_argument("--tiny", action="store_true", help="a tiny model for a moment, to see that it runs")
    given = parser.parse_args()
    if given.tiny:
        given.seconds = 0.2
    cores = machine.cpu_count()
    left = (cores - 1) / cores if cores > 1 else 0.5  # beside a busy process
    # runs, busy processes, share of the cores for each run
    cases = {"alone": (1, 0, 1.0), "beside a busy process": (1, 1, left), "two at once": (2, 0, 0.5)}
    print(f"{cores} CPU cores; one minute's load before: {os.getloadavg()[0]:.1f}", flush=True)
    print(f"{'threads':<9}{'':<24} {'images/s':>9} {'of alone':>9} {'of what is left':>16}")
    rows: list[Row] = []
    for waiting in WAITING if not given.tiny else ("sleep",):
        for case, (runs, busy, share) in cases.items():
            with tempfile.TemporaryDirectory() as place:
                images = Path(place) / "scenes"
                scenes.write_scenes(images, 0, 64 if given.tiny else 512, 1, 32, show=False)
                rate = measure(Path(place), images / "train", runs, busy, waiting, given)
            alone = next((row.images_per_second for row in rows if row.case == "alone"), rate)  # asleep
            row = Row(waiting, case, rate, rate / alone, rate / (alone * share))
            rows.append(row)
            print(f"{waiting:<9}{case:<24} {rate:>9.1f} {row.of_alone:>9.0%} {row.of_what_is_left:>16.0%}", flush=True)
            if given.json:
                facts = {"cores": cores, "seconds": given.seconds, "tiny": given.tiny, "provenance": provenance()}
                write_json(given.json, facts | {"rows": [asdict(row) for row in rows]})
    if given.json:
        print(f"written to {given.json}")


if __name__ == "__main__":
    main()
