"""Data sets that the `datasets` package or the Hub has downloaded to this machine before, named hf:NAME or
hf:NAME/SPLIT; nothing is downloaded.

Either cache holds files that are read as they are: Arrow files of `datasets`, Parquet files or tar shards of the Hub.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from adclr.config.parsing import UserError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+){0,3}")
FILE_SPLIT = re.compile(r"(?P<split>[A-Za-z]\w*?)(?:[-_.]\d{4,6}(?:-of-\d{4,6})?)?$")  # of a name without its suffix
KINDS = (".parquet", ".arrow", ".tar")
VALIDATION = ("val", "validation", "valid", "dev", "test")  # names of the split beside train, the first that is there


def is_name(text: str) -> bool:
    """Return whether a text can be the name of a data set, and is no path on this machine."""
    return not os.path.exists(text) and NAME.fullmatch(text) is not None


def find_files(text: str) -> list[str]:
    """Return the files of NAME, NAME/SPLIT or NAME/CONFIG/SPLIT in the cache, sorted."""
    name, wanted, splits = _find(text)
    chosen = {key: files for key, files in splits.items() if set(wanted) <= set(key)}
    if not chosen:
        raise UserError(f"hf:{text} is not among the splits of {name}, {_listed(splits)}; name one of them")
    if len(chosen) > 1:
        several = len({config for config, _ in splits}) > 1
        first = "/".join((name, *next(iter(chosen))[0 if several else 1 :]))
        raise UserError(f"hf:{text} holds splits; name one of them, such as hf:{first} ({_listed(splits)})")
    return next(iter(chosen.values()))


def train_and_val(text: str) -> tuple[str, str] | None:
    """Return the names of the two splits of a labeled data set; None if it has no such pair."""
    name, wanted, splits = _find(text)
    if len(wanted) > 1 or any(wanted == [split] for _, split in splits):
        return None
    configs = {config for config, _ in splits if not wanted or config == wanted[0]}
    if len(configs) != 1:
        return None
    config = configs.pop()
    val = next((split for split in VALIDATION if (config, split) in splits), None)
    prefix = f"{name}/{config}" if wanted else name
    return (f"hf:{prefix}/train", f"hf:{prefix}/{val}") if val and (config, "train") in splits else None


Splits = dict[tuple[str, str], list[str]]  # files by configuration and split


def _find(text: str) -> tuple[str, list[str], Splits]:
    """Return the name of a data set, the words behind it, and its files."""
    parts = text.split("/")
    for count in (2, 1):
        name, wanted = "/".join(parts[:count]), parts[count:]
        splits = _of_datasets(name) or _of_hub(name)
        if splits:
            return name, wanted, splits
    raise UserError(
        f"hf:{text} is neither a data set written by save_to_disk nor in the Hugging Face cache of this machine; "
        "check the name, or download it once with datasets.load_dataset"
    )


def _home() -> Path:
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface").expanduser()


def _of_datasets(name: str) -> Splits:
    """Return the Arrow files that `datasets` has made of a data set: NAME/CONFIG/VERSION/HASH/NAME-SPLIT-....arrow."""
    root = Path(os.environ.get("HF_DATASETS_CACHE") or _home() / "datasets")
    folder = root / "___".join((*name.split("/")[:-1], _snake_case(name.split("/")[-1])))
    prefix, splits = _snake_case(name.split("/")[-1]) + "-", Splits()
    versions: dict[str, Path] = {}  # the newest of each configuration
    for info in sorted(folder.glob("*/*/*/dataset_info.json"), key=lambda path: path.stat().st_mtime):
        versions[info.parts[-4]] = info.parent
    for config, version in versions.items():
        for file in sorted(version.glob(f"{prefix}*.arrow")):
            match = FILE_SPLIT.match(file.stem.removeprefix(prefix))
            if match:
                splits.setdefault((config, match["split"]), []).append(str(file))
    return splits


def _snake_case(name: str) -> str:
    """Return a name as `datasets` writes it in its cache."""
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z\d])([A-Z])", r"\1_\2", name).lower()


def _of_hub(name: str) -> Splits:
    """Return the Parquet files or shards in the newest snapshot of a repository of the Hub."""
    root = Path(os.environ.get("HF_HUB_CACHE") or _home() / "hub") / f"datasets--{name.replace('/', '--')}"
    snapshots = sorted(root.glob("snapshots/*"), key=lambda path: path.stat().st_mtime)
    if not snapshots:
        return {}
    reference = root / "refs" / "main"
    main = root / "snapshots" / reference.read_text().strip() if reference.is_file() else snapshots[-1]
    snapshot = main if main in snapshots else snapshots[-1]
    files = [path for path in sorted(snapshot.rglob("*")) if path.name.endswith(KINDS) and path.is_file()]
    kind = next((kind for kind in KINDS if any(path.name.endswith(kind) for path in files)), "")
    splits: Splits = {}
    for path in files:
        match = FILE_SPLIT.match(path.stem)
        folders = path.relative_to(snapshot).parts[:-1]
        if path.name.endswith(kind):
            split = match["split"] if match else (folders or ("train",))[-1]
            config = folders[0] if folders and folders[0] not in ("data", split) else "default"
            splits.setdefault((config, split), []).append(str(path))
    return splits


def _listed(splits: Splits) -> str:
    several = len({config for config, _ in splits}) > 1
    return ", ".join("/".join(key) if several else key[1] for key in splits)
