"""A run is a directory from which it can be resumed, explained and compared. Knows nothing of torch.

RUN/{settings.yaml, provenance.json, metrics.jsonl (by step), timing.jsonl, quarantine.jsonl, checkpoints/,
backbone.safetensors, backbone.json, results.json, evals/NAME/*.json}
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

import adclr
from adclr import config
from adclr.config import UserError
from adclr.settings import Settings

PACKAGES = ("torch", "numpy", "pillow", "safetensors", "pydantic")


def write_atomically(path: Path, data: bytes) -> None:
    """The file is there whole or not at all, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise UserError(f"{path} cannot be read ({reason}); restore it or start another run") from None


class Run:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"

    # -- what it is --

    def settings(self) -> Settings | None:
        """The settings it was started with; None if nothing was started here."""
        file = self.path / "settings.yaml"
        if not file.exists():
            return None
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise UserError(f"{file} cannot be read; restore it or choose another --out") from None
        values = config.load_yaml(text, str(file))
        if not isinstance(values, dict):
            raise UserError(f"{file} is not a file of settings; restore it or choose another --out")
        return config.build(Settings, values)

    def write_settings(self, settings: Settings) -> None:
        text = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        write_atomically(self.path / "settings.yaml", text.encode())

    def add_provenance(self, facts: Mapping[str, Any]) -> None:
        """One entry for each start: command, versions, commit, and the facts given."""
        file = self.path / "provenance.json"
        starts = read_json(file) if file.exists() else []
        assert isinstance(starts, list)
        write_json(file, [*starts, provenance() | dict(facts)])

    @property
    def finished(self) -> bool:
        return (self.path / "results.json").exists()

    # -- what happened --

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self, name: str) -> Iterator[dict[str, Any]]:
        """The rows of a .jsonl file; a last line that a crash cut short is left out."""
        file = self.path / name
        if not file.exists():
            return
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row

    def cut(self, name: str, step: int) -> None:
        """Drops the rows after a step, those that a resumed run will write again."""
        kept = [json.dumps(row) + "\n" for row in self.rows(name) if row.get("step", 0) <= step]
        if (self.path / name).exists():
            write_atomically(self.path / name, "".join(kept).encode())


def provenance() -> dict[str, Any]:
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
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
    """The commit of this program's own source, with '+' if it was altered; None if it was installed from a wheel."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "runs.py")
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", str(here)) else "")
    except (OSError, subprocess.SubprocessError):
        return None
