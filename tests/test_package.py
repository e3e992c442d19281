"""What is shipped: the wheel in a clean environment, its metadata, benchmarks, and the links of the README."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import adclr
from adclr.config import parsing
from adclr.config.settings import Settings
from tiny import THREADS, TINY, words

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run(*command: object, cwd: Path | None = None) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": str(THREADS)}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=540, cwd=cwd, env=environment
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (made,) = folder.glob("*.whl")
    return made


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    importlib.import_module("adclr.evals.knn")  # which imports many others
    assert dir(adclr) == sorted(adclr.__all__)
    assert all(getattr(adclr, name) is not None for name in dir(adclr))
    assert adclr.evals.knn.HEADLINE_K == 20  # submodules are there all the same


def metadata(wheel: Path) -> list[str]:
    """What the wheel needs, without its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        needs = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    return [need for need in needs if "extra ==" not in need]


def install(folder: Path, *what: object) -> Path:
    """A new environment with only this in it; the folder of its commands."""
    venv.create(folder, with_pip=True)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "-c", ROOT / "constraints.txt", *what)
    return folder / "bin"


def test_the_wheel_works_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """All that it needs but torch, which is large and which these commands must not need."""
    needs = metadata(wheel)
    assert any(need.startswith("torch") for need in needs)
    bin_ = install(tmp_path / "env", *(need for need in needs if not need.startswith("torch")))
    run(bin_ / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", wheel)
    assert "pretrain" in run(bin_ / "adclr", "--help", cwd=tmp_path)
    listed = run(bin_ / "adclr", "pretrain", "--list-recipes", cwd=tmp_path)
    assert [line.split()[0] for line in listed.splitlines()] == parsing.recipe_names()
    assert adclr.__version__ in run(bin_ / "adclr", "--version", cwd=tmp_path)
    assert str(tmp_path) in run(bin_ / "python", "-c", "import adclr; print(adclr.__file__)", cwd=tmp_path)


@pytest.mark.full
def test_the_wheel_trains_in_a_clean_environment(wheel: Path, images: Path, tmp_path: Path) -> None:
    bin_ = install(tmp_path / "env", wheel)
    assert "pretrain" in run(bin_ / "adclr", "--help", cwd=tmp_path)
    run(bin_ / "adclr", "pretrain", images / "train", "--out", tmp_path / "run", *words(TINY), cwd=tmp_path)
    assert (tmp_path / "run" / "backbone.safetensors").exists()


def test_the_wheel_holds_the_program_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    source = ROOT / "src"
    kinds = (".py", ".yaml", ".html", ".css", ".js", ".j2", ".jinja")
    shipped = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.suffix in kinds}
    inside = {name for name in names if ".dist-info/" not in name}
    assert shipped <= inside
    assert inside - shipped <= {"adclr/py.typed"}
    assert "adclr/py.typed" in inside
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_links_of_the_readme_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_the_method_page_names_things_that_exist() -> None:
    text = (ROOT / "docs/method.md").read_text(encoding="utf-8")
    checked = 0
    files = {path.stem: path for path in (ROOT / "src/adclr").rglob("*.py") if path.stem != "__init__"}
    files |= {path.parent.name: path.parent for path in (ROOT / "src/adclr").rglob("__init__.py")}
    for module, name, attribute in set(re.findall(r"`(\w+)\.(\w+)(?:\.(\w+))?`", text)):
        if module not in files:
            continue
        dotted = ".".join(files[module].relative_to(ROOT / "src").with_suffix("").parts)
        imported = importlib.import_module(dotted)
        # a name of the module, or of its class of the same name: `tokens.patches` is a field of `Tokens`
        definition = getattr(imported, name, getattr(getattr(imported, module.capitalize(), None), name, None))
        if definition is None:  # not code but a setting, which raises if there is none
            parsing.full_name(Settings, f"{module}.{name}")
            continue
        assert not attribute or hasattr(definition, attribute), (module, name, attribute)
        checked += 1
    assert checked >= 12


def test_the_citation_is_readable() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == adclr.__version__
    assert cited["license"] == "Apache-2.0"
    assert f"## {adclr.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.full
def test_the_benchmark_of_the_data_path_runs() -> None:
    small = ("--images", 4, "--side", 64, "--batch", 2, "--repeats", 1)
    text = run(sys.executable, ROOT / "benchmarks" / "data.py", *small)
    for stage in (
        "read, on threads",
        "decode, on threads",
        "plan",
        "views",
        "all, from files",
        "all, from the cache",
        "ours over theirs",
    ):
        assert stage in text


@pytest.mark.full
def test_the_benchmark_of_embedding_runs() -> None:
    small = ("--images", 4, "--side", 64, "--batch", 2, "--repeats", 1, "--times", 2)
    for dense in ((), ("--dense",)):
        model = ("--model", "vit_tiny_patch16", "--size", 32)
        text = run(sys.executable, ROOT / "benchmarks" / "embed.py", *small, *model, *dense)
        for stage in ("read", "decode", "resize", "forward", "write", "all, from files", "all, from images kept in"):
            assert stage in text
        assert text.count("slowest stage from") == 2


def test_the_benchmark_of_dense_evaluations_runs() -> None:
    small = ("--backbone", "vit_tiny_patch16", "--size", 32, "--batch", 2, "--memory", 100, "--repeats", 1)
    sizes = ("--detection-size", 64, 96, "--detection-batch", 1)
    text = run(sys.executable, ROOT / "benchmarks" / "dense.py", *small, *sizes)
    for what in ("encode images", "ask a memory of 100", "step of upernet", "1 images, windows"):
        assert what in text


def test_costs_of_the_papers_runs_follow_from_measured_speed() -> None:
    """docs/imagenet.md by images/s of docs/performance.md, and by the step that launches limited in docs/log.md."""
    measured = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    table = (ROOT / "docs/imagenet.md").read_text(encoding="utf-8").split("## Cost")[1].split("DINO takes")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    launched = re.search(r"\| batch 64 \| (\d+) \|", (ROOT / "docs/log.md").read_text(encoding="utf-8"))
    assert launched
    network, checked = "", 0
    for name, epochs, *shown in rows[1:]:
        network = name.removeprefix("ADCLR, ") or network
        speed = re.search(rf"\| ADCLR \(Q = 10\), {network}, batch (?:256|128) \| (\d+) \|", measured)
        assert speed
        for gpus, kept, hours in zip((1, 8, 32), (1.0, 0.98, 0.93), shown, strict=True):
            limits = [0.88 * int(speed[1])]
            by_launches = 1024 / gpus * int(launched[1]) / 64  # images/s of a GPU
            if gpus > 1 and by_launches < limits[0]:
                limits.append(by_launches)
            expected = [1281167 * int(epochs) / 3600 / (gpus * kept * limit) for limit in limits]
            assert [float(one) for one in hours.split("–")] == pytest.approx(expected, rel=0.03, abs=0.06)
            checked += 1
    assert checked == 15
