"""Several commands that fill one folder of part files together (`adclr embed ... shared=true`); any may come and go.

A worker takes a part by the lock of a file, which the system gives back when the worker dies, however it does. So a
part is made by one worker at a time, and one whose worker has died is taken over at once. The records of complete parts
are those of a single worker; the last worker writes the description, which lists all parts:

    FOLDER/.lock       held by all workers together, or by one command without shared=true
    FOLDER/.setup      held by one worker while it begins or ends
    FOLDER/_claims/N   held by the worker of a part
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adclr.config.parsing import UserError
from adclr.features import embedding_resume
from adclr.features.embedding_files import Parts, Rows
from adclr.features.embedding_resume import Facts
from adclr.system.files import read_json

POLL_SECONDS = 0.2  # between two looks whether the parts of other workers are done, or free again


class SharedParts(Parts):
    """The parts of an embedding that several workers make."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.single:
            raise UserError(f"workers write part files, and {self.out} is one file; give the name of a folder")
        self.claims = self.folder / "_claims"
        self._held: dict[int, int] = {}  # open lock files by part

    @contextmanager
    def open(self) -> Iterator[None]:
        """Join the workers of the folder; the first one removes what a crash left, and checks what is there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "a", encoding="utf-8") as file:
            with self._setup():
                self.done.mkdir(exist_ok=True)
                self.claims.mkdir(exist_ok=True)
                if _lock(file.fileno(), fcntl.LOCK_EX):
                    self._begin()
                elif not _lock(file.fileno(), fcntl.LOCK_SH):
                    raise UserError(
                        f"a command without shared=true is writing to {self.folder}; wait for it or stop it"
                    )
                else:
                    self._check_same()
                fcntl.flock(file, fcntl.LOCK_SH)
            try:
                yield
            finally:
                for handle in self._held.values():
                    os.close(handle)
                self._held.clear()

    @contextmanager
    def _setup(self) -> Iterator[None]:
        path = self.folder / ".setup"
        while True:
            with open(path, "a", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if _is_file(file.fileno(), path):  # else the worker that held it has finished and deleted it
                    yield
                    return

    def _check_same(self) -> None:
        """Refuse to join workers that make another embedding."""
        other = embedding_resume.difference(self.layout.started, self.facts)
        if other is not None:
            raise UserError(f"workers are making {self.out} with {other}; give them the same settings")

    def _is_finished(self) -> bool:
        """Return whether the last worker has written the description."""
        try:
            return bool(read_json(self.layout.about).get("finished"))
        except (UserError, AttributeError):
            return False

    def missing(self) -> Iterator[int]:  # type: ignore[override]
        """Take parts that no other worker has, one after the other."""
        for number in super().missing():
            if self._claim(number):
                yield number

    def _claim(self, number: int) -> bool:
        """Take a part, unless another worker has it or has finished it."""
        if number in self._held or self.layout.record(number).exists():
            return False
        try:
            handle = os.open(self.claims / f"{number:06d}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # all is finished and cleared away
            return False
        # the description is written before the records are deleted, and so is looked at after them
        if not _lock(handle, fcntl.LOCK_EX) or self.layout.record(number).exists() or self._is_finished():
            os.close(handle)
            return False
        self._held[number] = handle
        return True

    def write(self, number: int, rows: Rows, unreadable: Mapping[str, str]) -> None:
        """Write a part and give it back."""
        super().write(number, rows, unreadable)
        os.close(self._held.pop(number))

    def wait(self) -> bool:
        """Wait for the parts of the other workers; return whether there is one to take over."""
        while not self._is_finished():
            missing = super().missing()
            if not missing:
                return False
            if any(self._is_free(number) for number in missing):
                return True
            time.sleep(POLL_SECONDS)
        return False

    def _is_free(self, number: int) -> bool:
        free = self._claim(number)
        if free:
            os.close(self._held.pop(number))
        return free

    def finish(self, more: Facts) -> dict[str, Any]:
        """Write the description if no other worker has, and return it."""
        with self._setup():
            about: dict[str, Any] = read_json(self.layout.about) if self._is_finished() else super().finish(more)
            for folder in (self.done, self.claims):  # a worker that began meanwhile has made them again
                shutil.rmtree(folder, ignore_errors=True)
            (self.folder / ".setup").unlink(missing_ok=True)
            return about


def _is_file(handle: int, path: Path) -> bool:
    """Return whether an open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _lock(handle: int, kind: int) -> bool:
    """Lock a file without waiting; return whether that was possible."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UserError(
            f"workers need a file system with locks ({error.strerror}); leave out shared=true, or choose another --out"
        ) from None
    return True
