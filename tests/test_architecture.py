"""Import rules between modules: packages in one order, no cycles, and nothing heavy where it is not needed.

docs/architecture.md explains the packages. The rules look at every import of every module, also at those inside
functions, unless a rule says otherwise.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import adclr
from adclr import evals

SOURCE = Path(adclr.__file__).parent
ROOT = Path(__file__).parents[1]
# Lowest first; a package imports only those before it.
ORDER = (
    *("config", "system", "model", "data", "weights", "features", "evals", "report", "training", "study"),
    *("demo", "cli", "__main__"),
)
# Modules that may be imported before torch: `adclr --help` and refusing a mistake do not wait for it.
WITHOUT_TORCH = (
    *("config", "cli", "system.arguments", "system.files", "system.machine", "system.optional", "system.outputs"),
    *("system.progress", "system.runs", "system.text", "system.threads"),
    *("system.stores", "system.store_urls", "data.sources", "data.listing", "data.listing_builder", "data.key_order"),
    *("data.collection", "data.decode"),
    *("data.doctor", "training.launch", "training.planning", "training.plan_cost"),
    *("training.plan_gpus", "training.loggers", "data.random_draws"),
)
OPTIONAL = {
    *("wandb", "mlflow", "tensorboard", "timm", "transformers", "onnxruntime", "huggingface_hub", "pyarrow"),
    *(
        "faster_coco_eval",
        "starlette",
        "uvicorn",
        "tifffile",
        "datasets",
        "fsspec",
        "s3fs",
        "gcsfs",
        "adlfs",
        "aiohttp",
    ),
}
LONGEST = 420  # lines of a file


class Import(NamedTuple):
    """One imported module and where it is imported."""

    module: str
    line: int
    at_top: bool  # runs when the importing module is imported
    in_function: bool  # runs when a function is called


def module_name(path: Path, source: Path) -> str:
    """Return the dotted name below the package: `model.vit`, and `model` for `model/__init__.py`."""
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def modules(source: Path) -> dict[str, Path]:
    """Return every module below `source`, by name; not `adclr` itself, whose public names are imported lazily."""
    names = {module_name(path, source): path for path in sorted(source.rglob("*.py"))}
    names.pop("__init__")
    return names


def imports(path: Path, known: dict[str, Path]) -> tuple[Import, ...]:
    """Return the imports of a file: modules of ours by their dotted name below `adclr`, others by their full name."""
    return _parse_imports(path.read_text(encoding="utf-8"), frozenset(known))


@cache
def _parse_imports(source: str, known: frozenset[str]) -> tuple[Import, ...]:
    return tuple(_walk_imports(ast.parse(source), known))


def _walk_imports(tree: ast.Module, known: frozenset[str]) -> Iterator[Import]:
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    checking = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"relative import in line {node.lineno}"
            # `from adclr.model import vit` imports a module, `from adclr.model.vit import VisionTransformer` a name
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("adclr.") in known else node.module for name in full]
        else:
            continue
        at_top = node not in inside and node not in checking
        yield from (
            Import(name.removeprefix("adclr."), node.lineno, at_top, node in inside)
            for name in names
            if name != "adclr"
        )


def violations(source: Path) -> list[str]:
    """Return a sentence for every import that breaks a rule."""
    known = modules(source)
    sentences = []
    for name, path in known.items():
        package = name.split(".")[0]
        kernels = name.endswith("kernels")
        for target, line, at_top, _ in imports(path, known):
            top = target.split(".")[0]
            reasons = []
            if target in known:
                if ORDER.index(top) > ORDER.index(package):
                    reasons.append(f"{package} comes before {top}")
                if package == "model" and top == "system" and target not in MODEL_MAY_IMPORT:
                    reasons.append("model knows tensors only")
                if package == "data" and top == "model" and target != "model.named_tensors":
                    reasons.append("data takes model.named_tensors alone")
                if package == "weights" and top == "data" and target != "data.decode":
                    reasons.append("weights take data.decode alone")
                if package == "evals" and target in METHOD:
                    reasons.append("evaluations do not know how weights were trained")
                if at_top and target.endswith("kernels") and not kernels:
                    reasons.append("kernels are imported where they are launched")
            else:
                if package == "model" and top not in {*MODEL_PACKAGES, *(["triton"] if kernels else [])}:
                    reasons.append("model knows tensors only")
                if at_top and top == "triton" and not kernels:
                    reasons.append("there may be no Triton")
                if at_top and top == "torch" and any(name == w or name.startswith(f"{w}.") for w in WITHOUT_TORCH):
                    reasons.append("torch is imported where it is used")
                if (
                    at_top and top in OPTIONAL and name != "features.explorer.server"
                ):  # itself imported where it is used
                    reasons.append("an optional package is imported where it is used")
            sentences += [f"{name}:{line} imports {target}: {reason}" for reason in reasons]
    return sentences


MODEL_MAY_IMPORT = ("system.distributed", "system.triton_available")
MODEL_PACKAGES = {
    *("torch", "math", "typing", "collections", "functools", "importlib", "sys", "dataclasses", "__future__"),
    *("logging", "time"),  # of compiling
}
# Sections of settings are called as what they set, `Config` is of one kernel, `Finding` of one diagnosis.
SHARED_NAMES = {"Settings", "Views", "Probe", "Config", "Finding", "Sample"}
METHOD = ("model.method", "model.losses", "model.heads", "data.view_plan")


def cycles(source: Path) -> list[str]:
    """Return the cycles of imports between modules, functions included.

    A package's `__init__` is a module of its own: that Python runs it before its submodules is no dependency.
    """
    known = modules(source)
    graph = {name: {i.module for i in imports(path, known) if i.module in known} for name, path in known.items()}
    done: set[str] = set()
    chains = []

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            chains.append(" -> ".join((*above[above.index(name) :], name)))
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    return chains


def needless_function_imports(source: Path) -> list[str]:
    """Return imports of our modules inside functions that could stand at the top of their file.

    Three reasons count: the command line starts fast, torch or an optional package is imported late, Triton may be
    missing. An import that only dodges a cycle is none of these, and a cycle besides: `cycles` follows functions too.
    """
    known = modules(source)
    tops = {name: [i.module for i in imports(path, known) if i.at_top] for name, path in known.items()}

    @cache
    def loaded(name: str) -> frozenset[str]:
        """Return the packages of others that importing a module imports, itself or through other modules of ours."""
        packages, waiting, visited = set[str](), [name], {name}
        while waiting:
            for target in tops[waiting.pop()]:
                if target not in known:
                    packages.add(target.split(".")[0])
                elif target not in visited:
                    visited.add(target)
                    waiting.append(target)
        return frozenset(packages)

    return [
        f"{name}:{line} imports {target} inside a function"
        for name, path in known.items()
        for target, line, _, in_function in imports(path, known)
        if in_function and target in known and name != "cli" and not target.endswith("kernels")
        if "torch" in loaded(name) or "torch" not in loaded(target)
        if not loaded(target) & OPTIONAL
    ]


def test_imports_inside_functions_have_a_reason() -> None:
    assert needless_function_imports(SOURCE) == []


def test_a_needless_import_inside_a_function_is_noticed(tmp_path: Path) -> None:
    copy = copied(tmp_path)
    with (copy / "evals/knn.py").open("a") as text:
        text.write("\ndef late():\n    from adclr.evals import iou\n")
    (sentence,) = set(needless_function_imports(copy)) - set(needless_function_imports(SOURCE))
    assert sentence.endswith("imports evals.iou inside a function")


def test_imports_follow_the_order_of_packages() -> None:
    assert violations(SOURCE) == []


def test_there_are_no_cycles_between_modules() -> None:
    assert cycles(SOURCE) == []


UPWARD = [
    ("config/settings.py", "from adclr.data.random_draws import key_of", "config comes before data"),
    ("model/vit.py", "from adclr.system import files", "model knows tensors only"),
    ("model/vit.py", "import os", "model knows tensors only"),
    ("data/feed.py", "from adclr.model.vit import VisionTransformer", "data takes model.named_tensors alone"),
    ("evals/knn.py", "from adclr.model.losses import anything", "evaluations do not know how weights were trained"),
    ("evals/knn.py", "def f():\n    from adclr.training import loop", "evals comes before training"),
    ("training/step.py", "from adclr.study import table", "training comes before study"),
    ("system/files.py", "import torch", "torch is imported where it is used"),
    ("features/embedding.py", "import pyarrow.parquet", "an optional package is imported where it is used"),
]


@pytest.mark.parametrize(("file", "line", "reason"), UPWARD, ids=[f"{file} {line[:40]}" for file, line, _ in UPWARD])
def test_a_forbidden_import_is_noticed(tmp_path: Path, file: str, line: str, reason: str) -> None:
    copy = copied(tmp_path)
    with (copy / file).open("a") as text:
        text.write(f"\n{line}\n")
    (sentence,) = set(violations(copy)) - set(violations(SOURCE))
    assert sentence.startswith(f"{module_name(Path(file), Path())}:")
    assert sentence.endswith(reason)


def test_a_cycle_is_noticed(tmp_path: Path) -> None:
    copy = copied(tmp_path)
    with (copy / "features/explorer/server.py").open("a") as text:
        text.write("\nfrom adclr.features import explorer\n")
    assert any("features.explorer.server" in chain for chain in cycles(copy))


def copied(folder: Path) -> Path:
    """Return a copy of the source files, for a test to spoil."""
    for path in SOURCE.rglob("*.py"):
        copy = folder / path.relative_to(SOURCE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    return folder


def test_the_top_level_is_short_and_every_package_says_what_belongs_there() -> None:
    entries = [path for path in SOURCE.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= 15, sorted(path.name for path in entries)
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert path.name == "__main__.py" or ast.get_docstring(tree), path


def test_no_module_is_a_drawer_for_everything() -> None:
    for name, path in modules(SOURCE).items():
        assert not {*name.split(".")} & {"utils", "common", "helpers", "registry", "base", "misc"}, name
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST, name


class Uses(NamedTuple):
    """What a Python file may take from our modules."""

    imported: frozenset[tuple[str, str]]  # (module, name)
    modules: frozenset[str]  # that it imports, or names in a string
    names: frozenset[str]  # behind a dot or in a string

    def include(self, module: str, name: str) -> bool:
        """Return whether the file may use this name of this module."""
        return (module, name) in self.imported or (module in self.modules and name in self.names)


@cache
def _uses(source: str, known: frozenset[str]) -> Uses:
    nodes = list(ast.walk(ast.parse(source)))
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    imported = {
        (node.module.removeprefix("adclr."), alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    used = {i.module for i in _parse_imports(source, known)} | {string.removeprefix("adclr.") for string in strings}
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)} | strings
    return Uses(frozenset(imported), frozenset(used & known), frozenset(names))


def unused_public_functions(source: Path) -> list[str]:
    """Return the functions without an underscore that no other module, test, benchmark, script or page names."""
    known = modules(source)
    texts = {path: path.read_text(encoding="utf-8") for path in (*known.values(), source / "__init__.py")}
    for folder in ("tests", "benchmarks", "docs"):
        texts |= {path: path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")}
    uses = {path: _uses(text, frozenset(known)) for path, text in texts.items()}
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    on_pages = set(re.findall(r"`(?:\w+\.)*(\w+)`", pages))
    return [
        f"{name}: {node.name}"
        for name, path in known.items()
        for node in ast.parse(texts[path]).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name not in {"main", *on_pages}
        if not (node.name == "run" and name.startswith("evals."))  # of an evaluation, imported by its name
        if not any(use.include(name, node.name) for file, use in uses.items() if file != path)
    ]


def test_a_function_that_only_its_own_file_uses_begins_with_an_underscore() -> None:
    assert unused_public_functions(SOURCE) == []


def test_a_public_function_that_nothing_uses_is_noticed(tmp_path: Path) -> None:
    copy = copied(tmp_path)
    with (copy / "evals/iou.py").open("a") as text:
        text.write("\ndef describe():\n    return describe\n")  # other modules have functions of this name
    assert unused_public_functions(copy) == ["evals.iou: describe"]


def test_run_and_settings_are_the_shape_of_an_evaluation() -> None:
    """One meaning for each name: other modules say what they run, and whose settings they have."""
    with_names: dict[str, set[str]] = {"run": set(), "Settings": set()}
    for name, path in modules(SOURCE).items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in with_names:
                with_names[node.name].add(name)
    evaluations = {f"evals.{name}" for name in evals.NAMES}
    assert with_names == {"run": evaluations, "Settings": {*evaluations, "config.settings"}}


def test_a_class_has_a_name_of_its_own() -> None:
    """One meaning for each name, but for `SHARED_NAMES`."""
    homes: dict[str, set[str]] = {}
    for name, path in modules(SOURCE).items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(name)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1 and name not in SHARED_NAMES} == {}


def test_no_submodule_hides_a_public_function() -> None:
    """Importing `adclr.embed` would replace the function of that name on the package."""
    assert not {name.split(".")[0] for name in modules(SOURCE)} & set(adclr.__all__)


def test_modules_of_the_standard_library_and_of_torch_are_all_that_the_model_needs() -> None:
    assert sys.stdlib_module_names >= MODEL_PACKAGES - {"torch"}
