"""The directory of a run: its settings, provenance, lock and logs.

RUN/{settings.yaml, provenance.json, metrics.jsonl (by step), timing.jsonl, quarantine.jsonl, checkpoints/,
stamps.npz, backbone.safetensors, backbone.json, results.json, evals/NAME/*.json, report.html, pictures/}
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

import adclr
from adclr.config import parsing
from adclr.config.distillation import settings_class
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.system import files
from adclr.system.files import append, open_no_follow, read_json, sync, write_atomically, write_json
from adclr.system.store_urls import conceal

STOPPED = "stopped"  # true in the last row of metrics.jsonl of a run that was stopped by a signal or a limit
PACKAGES = ("torch", "numpy", "pillow", "safetensors", "pydantic")


class Run:
    """A directory from which a run can be resumed, explained and compared."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.trouble: OSError | None = None  # why rows are held back
        self._held: dict[str, str] = {}  # rows by file that the disk would not take
        self._lock = threading.RLock()

    def __fspath__(self) -> str:
        """Return its path, so that it can be given wherever a path of weights is expected: `load(pretrain(...))`."""
        return os.fspath(self.path)

    __str__ = __fspath__

    def __repr__(self) -> str:
        return f"Run({os.fspath(self.path)!r})"

    def settings(self) -> Settings | None:
        """Return the settings that it was started with; None if nothing was started here."""
        file = self.path / "settings.yaml"
        try:
            text = file.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError):
            raise UserError(f"{file} cannot be read; restore it or choose another --out") from None
        values = parsing.load_yaml(text, str(file))
        if not isinstance(values, dict):
            raise UserError(f"{file} is not a file of settings; restore it or choose another --out")
        try:
            return parsing.build(settings_class(values), values, warn=False)
        except UserError as error:
            raise UserError(f"{file} is damaged ({error}); restore it or choose another --out") from None

    @contextmanager
    def lock(self, note: str = "") -> Iterator[None]:
        """Refuse if another process has the run; `note` is written into the lock file if that is new."""
        with files.lock(self.path, "training in") as file:
            if note and not file.tell():
                file.write(f"{note}\n".encode())
                file.flush()
            try:
                yield
            finally:
                if [path.name for path in self.path.iterdir()] == [".lock"]:  # nothing was written
                    (self.path / ".lock").unlink()
                    self.path.rmdir()

    def write_settings(self, settings: Settings) -> None:
        """Write settings.yaml."""
        text = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        write_atomically(self.path / "settings.yaml", text.encode())

    def add_provenance(self, facts: Mapping[str, Any]) -> None:
        """Add the entry of a start to provenance.json: command, versions, commit, and these facts."""
        write_json(self.path / "provenance.json", [*self.starts(), provenance() | dict(facts)])

    def starts(self) -> list[Any]:
        """Return the entries of provenance.json, one for each start."""
        file = self.path / "provenance.json"
        entries = read_json(file) if file.exists() else []
        if not isinstance(entries, list):
            raise UserError(f"{file} is not a list of starts; restore it or delete it")
        return entries

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return (self.path / "results.json").exists()

    @property
    def begun(self) -> bool:
        """Whether it has results, a checkpoint or losses, which a new start would lose."""
        return self.finished or bool(self.steps()) or any("loss" in row for row in self.rows("metrics.jsonl"))

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending."""
        steps = []
        for path in self.checkpoints.glob("step_*") if self.checkpoints.is_dir() else ():
            number = path.name.removeprefix("step_")
            if number.isascii() and number.isdecimal() and len(number) < 16 and (path / "manifest.json").exists():
                steps.append(int(number))
        return sorted(steps)

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Append a row to a .jsonl file; one that the disk does not take is held back and written before the next."""
        with self._lock:
            self._held[name] = self._held.get(name, "") + json.dumps(row) + "\n"
            try:
                self._write_held()
            except OSError as error:
                self.trouble = error

    def _write_held(self) -> None:
        for name in list(self._held):
            append(self.path / name, self._held[name].encode())
            del self._held[name]
        self.trouble = None

    def settle(self) -> None:
        """Wait until all rows are on the disk."""
        with self._lock:
            self._write_held()
        for path in self.path.glob("*.jsonl"):
            sync(path)

    def append_once(self, name: str, row: Mapping[str, Any], key: str) -> None:
        """Append a row unless a row of any process has the same value under `key`, or the disk is full."""
        with suppress(OSError), open(self.path / name, "ab", opener=open_no_follow) as file:
            files.lock_file(file, wait=True)
            if all(other.get(key) != row[key] for other in self.rows(name)):
                file.write((json.dumps(row) + "\n").encode())

    def rows(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of a .jsonl file; a last line that a crash cut short is left out."""
        file = self.path / name
        if not file.exists():
            return
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row

    def cut(self, name: str, step: float) -> None:
        """Drop the rows after a step, which a resumed run writes again, and what is not a row.

        The row that says where the run was stopped is dropped too: a resumed run leaves the same rows as one without a
        stop.
        """
        rows = [row for row in self.rows(name) if _number(row.get("step", 0)) <= step and not row.get(STOPPED)]
        if (self.path / name).exists():
            write_atomically(self.path / name, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else float("inf")  # an int may be too large for a float


def provenance() -> dict[str, Any]:
    """Return what to reproduce a result by: time, command, commit and versions."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [conceal(word) for word in sys.argv],
        "adclr": adclr.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of this program's source, with '+' if it was altered; None if installed from a wheel."""
    package = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "system/runs.py")
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", str(package)) else "")
    except (OSError, subprocess.SubprocessError):
        return None
