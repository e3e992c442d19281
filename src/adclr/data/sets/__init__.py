"""Labeled data sets: classes, masks, objects and videos; here what they share: the split, and checks of their files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from adclr.config.parsing import UserError
from adclr.data.decode import Decoder, Unreadable, size_of
from adclr.data.random_draws import Keys, mix
from adclr.system.machine import cpu_count
from adclr.system.progress import track
from adclr.system.store_urls import is_remote
from adclr.system.stores.local_copy import local_folder

NUM_NAMED = 3  # problems that a message names
Item = TypeVar("Item")
Others = ParamSpec("Others")
Opened = TypeVar("Opened")


def takes_url(
    open_folder: Callable[Concatenate[str | Path, Others], Opened],
) -> Callable[Concatenate[str | Path, Others], Opened]:
    """Let a function that opens a folder take a URL too: the folder is copied from the store to the local cache."""

    @wraps(open_folder)
    def open_anywhere(path: str | Path, /, *others: Others.args, **named: Others.kwargs) -> Opened:
        if not is_remote(path):
            return open_folder(path, *others, **named)
        local = local_folder(str(path))
        try:
            return open_folder(local, *others, **named)
        except UserError as error:  # with the name that the user gave
            raise UserError(str(error).replace(str(local), str(path))) from None

    return open_anywhere


def split_by_key(keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of a train and a val split: a fifth of the images, chosen by their keys, is val."""
    held_out = mix(keys) % np.uint64(5) == 0
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def refuse(problems: Sequence[str], remedy: str) -> None:
    """Raise `UserError` with the first problems and the remedy, if there are any."""
    if problems:
        more = f", and {len(problems) - NUM_NAMED} more" if len(problems) > NUM_NAMED else ""
        raise UserError(f"{'; '.join(problems[:NUM_NAMED])}{more}; {remedy}")


def check_each(
    items: Sequence[Item],
    problem_of: Callable[[Item], str | None],
    remedy: str,
    title: str,
    num_workers: int | None,
    show: bool,
) -> None:
    """Check items by threads, before anything is trained on them, and refuse those with a problem."""
    with ThreadPoolExecutor(num_workers or cpu_count()) as pool:
        problems = list(track(pool.map(problem_of, items), title, len(items), show))
    refuse([problem for problem in problems if problem], remedy)


def image_size(read: Callable[[], bytes], expected: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return (height, width) of an upright image; None if it cannot be read, which is counted where it is used.

    It is decoded only if the size in its header is not the expected one.
    """
    try:
        data = read()
        size = size_of(data)
        return size if size == expected else Decoder()(data).shape[1:]
    except (Unreadable, OSError):
        return None
