"""Files of a store as files on this machine: weights that are read, and folders that are written and then uploaded."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from adclr.config.errors import UserError
from adclr.system import stores
from adclr.system.store_urls import base_name, join, parent
from adclr.system.stores import StoreFile
from adclr.system.stores.cache import cache_folder, local_cache, part_name

PIECE = 2**26  # bytes of a file that are fetched at once
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".tar", ".ckpt")
BESIDE = ("config.json", "preprocessor_config.json", "backbone.json")  # what may describe a file of weights


def _download(file: StoreFile, path: Path) -> None:
    """Write an object to a file, through the local cache."""
    cache = local_cache()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as target:
        for start in range(0, file.size, PIECE):
            size = min(PIECE, file.size - start)
            if cache is None:
                target.write(stores.read(file, start, size))
                continue
            name = part_name(file.url, file.size, file.version, start, size)
            target.write(cache.read(name, size, 0, size, lambda start=start, size=size: stores.read(file, start, size)))  # type: ignore[misc]


@contextmanager
def local_weights(url: str) -> Iterator[Path]:
    """Yield a copy of a file or folder of weights with the files that describe it; it is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="adclr-weights-") as folder:
        name = base_name(url)
        path = Path(folder) / (name or "weights")
        if name.endswith(WEIGHTS):
            try:
                _download(stores.stat(url), path)
            except FileNotFoundError:
                raise UserError(f"weights {url} do not exist; check the URL") from None
            for other in (f"{path.stem}.json", *BESIDE):
                _download_if_there(join(parent(url), other), path.with_name(other))
        else:
            files = {base_name(file.url): file for file in stores.list_files(url, below=False)}
            names = _needed(files)
            if not names:
                raise UserError(
                    f"{url} holds neither backbone.safetensors nor config.json; give a folder or file of weights"
                )
            for other in names:
                _download(files[other], path / other)
        try:
            yield path
        except UserError as error:  # with the name that the user gave
            raise UserError(str(error).replace(str(path), url).replace(folder, parent(url))) from None


def _download_if_there(url: str, path: Path) -> None:
    try:
        _download(stores.stat(url), path)
    except FileNotFoundError:
        return


def _needed(files: dict[str, StoreFile]) -> list[str]:
    """Return the names of the files in a folder that are read: those of a run, or of Hugging Face and timm."""
    if "backbone.safetensors" in files:
        return [name for name in files if name in ("backbone.safetensors", "backbone.json")]
    if "config.json" not in files:
        return []
    tensors = "model.safetensors" if "model.safetensors" in files else "pytorch_model.bin"
    shards = "model.safetensors.index.json" in files and tensors not in files
    return [
        name
        for name in files
        if name in (*BESIDE, tensors) or (shards and name.endswith((".safetensors", ".index.json")))
    ]


@contextmanager
def uploaded(url: str, last: str, beside: Sequence[str] = (), resumed: bool = False) -> Iterator[Path]:
    """Yield the path of a file or folder on this machine; afterwards what is new there is uploaded, `last` at the end.

    What is at the URL already is copied there first, so that a command treats it as it treats its earlier files on a
    disk. `beside` are the suffixes of the files beside a single file, "" for itself; without any it is a folder. With
    `resumed` what a stopped command has left is used again.
    """
    stores.check_writable(url)
    staging = cache_folder() / "outgoing" / blake2b(url.encode(), digest_size=8).hexdigest()
    path = staging / base_name(url)
    root = parent(url) if beside else url.rstrip("/")
    folder = staging if beside else path
    copied: dict[str, tuple[int, int]] = {}
    if not (resumed and staging.exists()):
        shutil.rmtree(staging, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in _present(url, root, beside):
            name = file.url[len(root) + 1 :]
            _download(file, folder / name)
            copied[name] = _state(folder / name)
        if not beside and not copied:
            folder.rmdir()
    try:
        yield path
    except UserError as error:  # with the name that the user gave
        if not resumed:
            shutil.rmtree(staging, ignore_errors=True)
        raise UserError(str(error).replace(str(path), url)) from None
    except BaseException:
        if not resumed:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    names = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]
    changed = [name for name in names if copied.get(name) != _state(folder / name)]
    stores.upload(folder, sorted(changed, key=lambda name: name == last), root)
    for name in copied.keys() - set(names):
        stores.delete(join(root, name))
    shutil.rmtree(staging, ignore_errors=True)


def _present(url: str, root: str, beside: Sequence[str]) -> list[StoreFile]:
    """Return the objects that a command would write over."""
    if not beside:
        return stores.list_files(url)
    files = []
    for suffix in beside:
        try:
            files.append(stores.stat(join(root, base_name(url) + suffix)))
        except FileNotFoundError:
            continue
    return files


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
