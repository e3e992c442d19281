"""How many files of the program a reader has to open: those whose functions one piece of work calls, on a CPU.

    python benchmarks/traced_files.py [--list]

The pieces: one training step with logging (its arithmetic is what `Step` calls, without the making of the batch),
`adclr evaluate incontext` and `adclr embed`, each on a few built-in scenes, threads included. Imports do not count.
`--list` names the files, with the functions.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import adclr
from adclr import cli
from adclr.data.sets import scenes
from adclr.training.schedules import Schedules

SOURCE = f"{Path(adclr.__file__).parent}/"
FILES = defaultdict[str, set[str]]  # functions by file
TRACED_STEP = 6  # in the middle of the run: images are read ahead, nothing is set up and nothing is saved
TINY = (
    *("views.global_size=16", "views.local_size=8", "views.num_local=2", "model.patch_size=4", "model.dim=32"),
    *("model.depth=2", "model.num_heads=2", "method.head_hidden_dim=24", "method.head_bottleneck_dim=8"),
    *("method.num_prototypes=32", "train.epochs=4", "train.batch_size=8", "train.log_every_steps=1"),
    *("train.device=cpu", "train.report=false"),
)


def is_function(code: CodeType) -> bool:
    """Return whether code is a function of the program, and not the body of a module or class."""
    return code.co_filename.startswith(SOURCE) and bool(code.co_flags & inspect.CO_NEWLOCALS)


def is_arithmetic(frame: FrameType | None) -> bool:
    """Return whether a call comes from `Step`, and not from the views that it takes."""
    while frame is not None:
        name = frame.f_code.co_filename.removeprefix(SOURCE)
        if name.startswith("data/"):
            return False
        if name == "training/step.py" and frame.f_code.co_name == "__call__":
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def traced(files: FILES, arithmetic: FILES | None = None) -> Iterator[None]:
    """Collect the functions that are called, in all threads that are started meanwhile too."""

    def on_event(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and is_function(frame.f_code):
            name = frame.f_code.co_filename.removeprefix(SOURCE)
            files[name].add(frame.f_code.co_name)
            if arithmetic is not None and is_arithmetic(frame):
                arithmetic[name].add(frame.f_code.co_name)

    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def command(*words: object) -> None:
    """Run a command of the program; its output is not shown."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        cli.main([str(word) for word in words])


def trace_step(images: Path, out: Path) -> tuple[FILES, FILES]:
    """Return the files of one step, and of its arithmetic."""
    files, arithmetic = FILES(set), FILES(set)
    step_files, step_arithmetic = FILES(set, {"training/loop.py": {"_take_steps"}}), FILES(set)
    real = Schedules.at

    def at(self: Schedules, step: int) -> Any:  # called where a step begins
        if step == TRACED_STEP:
            files.clear()
            arithmetic.clear()
        elif step == TRACED_STEP + 1:
            step_files.update({file: set(functions) for file, functions in files.items()})
            step_arithmetic.update({file: set(functions) for file, functions in arithmetic.items()})
        return real(self, step)

    Schedules.at = at  # type: ignore[method-assign]
    try:
        with traced(files, arithmetic):
            command("pretrain", images / "kinds/train", "--out", out, "--recipe", "adclr_small", *TINY)
    finally:
        Schedules.at = real  # type: ignore[method-assign]
    return step_files, step_arithmetic


def trace_command(*words: object) -> FILES:
    """Return the files of a command."""
    files = FILES(set)
    with traced(files):
        command(*words)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the files, with the functions that are called")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        folder = Path(name)
        scenes.write_scenes(folder / "kinds", seed=3, num_train=32, num_val=16, size=24, show=False)
        scenes.write_pixels(folder / "pixels", seed=5, first=0, num_train=8, num_val=4, size=48)
        weights = folder / "run"
        step, arithmetic = trace_step(folder, weights)
        data = "--weights", weights, "--data", folder / "pixels", "--out", folder / "scores.json"
        rows = {
            "one training step": step,
            "its arithmetic": arithmetic,
            "evaluate incontext": trace_command("evaluate", "incontext", *data, "device=cpu", "size=32"),
            "embed": trace_command("embed", weights, folder / "kinds/val", "--out", folder / "f.parquet", "device=cpu"),
        }
    for title, files in rows.items():
        lines = sum(len(Path(SOURCE, file).read_text(encoding="utf-8").splitlines()) for file in files)
        print(f"{title:<20} {len(files):>3} files of {lines:>5} lines together")
        for file in sorted(files) if options.list else ():
            print(f"    {file}: {', '.join(sorted(files[file]))}")


if __name__ == "__main__":
    main()
