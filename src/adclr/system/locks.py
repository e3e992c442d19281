"""Locks on files, which end with the process that holds them, also if it is killed."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from typing import IO, Any

from adclr.config.errors import UserError

POSSIBLE = (
    find_spec("fcntl") is not None
)  # Windows has other locks, and neither links nor signals as they are used here
WINDOWS = "adclr does not run on Windows; run it in WSL 2, the Linux of Windows, which `wsl --install` installs"


def check_system() -> None:
    """Refuse a system without the locks that keep two processes from writing the same files."""
    if not POSSIBLE:
        raise UserError(WINDOWS)


def lock(file: IO[Any], wait: bool = False) -> None:
    """Lock an open file; raise BlockingIOError if another process has it, unless told to wait.

    A file system without locks is taken as it is.
    """
    check_system()
    # not there on Windows
    import fcntl

    if wait:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass
