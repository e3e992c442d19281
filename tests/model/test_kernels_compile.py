"""Every kernel is compiled for GPUs that are not here: the interpreter runs what the compiler may refuse."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
import adclr
from compiled_for import SHARED

HERE = Path(__file__).parents[1]


def launched() -> set[str]:
    """module.kernel of all that the program launches, by its source."""
    names = set()
    for file in Path(adclr.__path__[0]).rglob("*.py"):
        text = file.read_text()
        names |= {f"{file.stem}.{name}" for name in re.findall(r"^ *(_\w+)\[\(", text, re.MULTILINE)}
        if another := re.search(r"import (\w*kernels)(?: as kernels)?$", text, re.MULTILINE):
            names |= {f"{another[1]}.{name}" for name in re.findall(r"kernels\.(_\w+)\[\(", text)}
    return names


def compiled(capability: int, tmp_path: Path, *more: str) -> list[dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(HERE / "compiled_for.py"), str(capability), *more]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    actual: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert not [form for form in actual if "error" in form]
    assert max(form["shared"] for form in actual) <= SHARED[capability] * 1024
    return actual


def test_each_kernel_compiles_for_an_h200(tmp_path: Path) -> None:
    names = {".".join(form["name"].split(".")[-2:]) for form in compiled(90, tmp_path)}
    assert names == launched() != set()


@pytest.mark.full
@pytest.mark.parametrize("capability", sorted(SHARED))
def test_all_forms_compile_for_other_gpus(capability: int, tmp_path: Path) -> None:
    compiled(capability, tmp_path, "--all")
