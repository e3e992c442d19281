"""Who may import whom: arrows go down, no cycles."""

from __future__ import annotations

import ast
from pathlib import Path

import adclr

SOURCE = Path(adclr.__file__).parent
GROUND = {"config", "settings", "runs", "progress", "draws", "boxes", "distributed", "memory", "text"}
METHOD = {"attention", "norm", "mlp", "blocks", "vit", "heads", "losses", "fused", "method"}
METHOD |= {"gpu_code", "attention_kernels", "norm_kernels", "mlp_kernels", "fused_kernels", "trial_kernels"}


def imports(path: Path) -> tuple[set[str], set[str]]:
    """(rooms of ours, other top-level packages) that a file imports anywhere."""
    ours, others = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            if parts[0] != "adclr":
                others.add(parts[0])
            elif len(parts) > 1:
                ours.add(parts[1])
            else:
                ours |= {alias.name for alias in node.names}
    return ours - {"__version__"}, others


ROOMS = {
    path.relative_to(SOURCE).as_posix(): imports(path)
    for path in sorted(SOURCE.rglob("*.py"))
    if path.name != "__init__.py"
}
ROOMS |= {
    f"{name}/__init__.py": imports(SOURCE / name / "__init__.py")
    for name in ("augment", "evals", "report", "explorer", "study")
}


def room(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def test_the_method_knows_tensors_only() -> None:
    for name in METHOD:
        ours, others = ROOMS[f"{name}.py"]
        assert ours <= METHOD | {"distributed"}, name
        kernels = {"triton"} if name.endswith("_kernels") else set()  # which nobody imports before he runs them
        known = {"torch", "math", "typing", "collections", "functools", "importlib", "sys", "__future__"}
        assert others <= known | kernels, name


def test_the_ground_floor_knows_nothing_above_it() -> None:
    for name in GROUND:
        ours, _ = ROOMS[f"{name}.py"]
        assert ours <= GROUND, name


def test_torch_is_not_needed_to_refuse_a_command() -> None:
    for name in (
        "cli",
        "config",
        "settings",
        "runs",
        "progress",
        "draws",
        "sources",
        "launch",
        "decode",
        "loggers",
        "planning",
        "cost",
        "gpus",
        "memory",
        "doctor",
        "auto",
        "workers",
    ):
        tree = ast.parse((SOURCE / f"{name}.py").read_text())
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert "torch" not in ast.dump(ast.Module(top, [])), name


def test_triton_is_not_needed_where_there_is_no_gpu() -> None:
    for file in ROOMS:
        tree = ast.parse((SOURCE / file).read_text())
        top = ast.dump(ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], []))
        if not file.endswith("kernels.py"):
            assert "triton" not in top, file
            assert "kernels" not in top, file


def test_evaluations_do_not_know_how_weights_were_made() -> None:
    for file, (ours, _) in ROOMS.items():
        if file.startswith("evals/"):
            assert not ours & {"method", "losses", "views", "training", "jobs", "heads", "checkpoint", "fit", "step"}, (
                file
            )


def test_there_are_no_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for file, (ours, _) in ROOMS.items():
        graph.setdefault(room(file), set()).update(name for name in ours if name != room(file))
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above, name))
        if name not in done:
            for below in graph.get(name, ()):
                visit(below, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_no_room_is_a_cupboard() -> None:
    for file in ROOMS:
        assert room(file) not in {"utils", "common", "helpers", "registry", "base", "misc"}
        assert len((SOURCE / file).read_text().splitlines()) <= 420, file


def test_optional_packages_are_imported_where_they_are_used() -> None:
    for file in ROOMS:
        optional = {"wandb", "mlflow", "tensorboard", "timm", "transformers", "onnxruntime", "huggingface_hub"}
        optional |= {"pyarrow", "faster_coco_eval"}
        if file != "explorer/server.py":  # which is itself imported where it is used
            optional |= {"starlette", "uvicorn"}
        tree = ast.parse((SOURCE / file).read_text())
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not optional & set(ast.dump(node).replace("'", " ").replace(".", " ").split()), file
