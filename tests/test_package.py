"""What is shipped: the wheel in a clean environment, its metadata, benchmarks, and the links of the README."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

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
    studies = {name for name in inside if name.startswith("adclr/study/studies/")}
    assert inside - shipped - studies <= {"adclr/py.typed", "adclr/study/task.sh"}
    assert {f"adclr/study/studies/{path.name}" for path in (ROOT / "studies").glob("*.yaml")} <= studies
    assert any(name.startswith("adclr/study/studies/results/runs/") for name in studies)
    assert "adclr/py.typed" in inside
    assert any(name.endswith("licenses/LICENSE") for name in names)


def built_metadata() -> dict[str, Any]:
    """Return the project's metadata as the build has them."""
    core = pytest.importorskip("hatchling.metadata.core")
    manager = pytest.importorskip("hatchling.plugin.manager")
    project = core.ProjectMetadata(str(ROOT), manager.PluginManager())
    return {"readme": project.core.readme, "urls": project.core.urls, "authors": project.core.authors_data}


def test_the_page_on_a_package_index_has_no_relative_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/adclr")
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    built = built_metadata()
    links = re.findall(r"\]\(([^)]+)\)", built["readme"])
    assert len(links) > 20
    assert all(re.match(r"https://|#", link) for link in links)
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", built["readme"])
    assert pictures == ["https://github.com/someone/adclr/raw/HEAD/docs/pictures/photographs.jpg"]
    assert "https://github.com/someone/adclr/blob/HEAD/docs/results.md" in links
    assert built["urls"]["Repository"] == "https://github.com/someone/adclr"
    assert built["urls"]["Paper"].startswith("https://arxiv.org/")
    assert built["authors"]["name"]


def test_without_a_known_address_no_picture_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")  # a remote that is not GitHub's
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "remote.origin.url")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", str(tmp_path))
    built = built_metadata()
    assert "![" not in built["readme"]
    assert all(re.match(r"https://|#", link) for link in re.findall(r"\]\(([^)]+)\)", built["readme"]))
    assert list(built["urls"]) == ["Paper"]


@pytest.mark.full
def test_the_docker_image_is_built_and_answers() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, timeout=60).returncode:
        pytest.skip("Docker is not installed, or its daemon is not running")
    pulled = subprocess.run([docker, "pull", "python:3.12-slim"], capture_output=True, text=True, timeout=300)
    if pulled.returncode:
        pytest.skip(f"the base image cannot be downloaded: {pulled.stderr.strip()[-200:]}")
    run(docker, "build", "--tag", "adclr-test", ROOT)
    assert adclr.__version__ in run(docker, "run", "--rm", "adclr-test", "--version")


def test_what_the_dockerfile_copies_exists() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert "pyproject.toml" in copied
    assert all((ROOT / name).exists() for name in copied)
    extras = re.search(r'"\.\[([\w,]+)\]"', text)
    assert extras
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(extras[1].split(",")) <= set(known)


def test_the_links_of_the_readme_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_the_method_page_names_things_that_exist() -> None:
    text = (ROOT / "docs/method.md").read_text(encoding="utf-8")
    checked = 0
    files = {path.stem: path for path in (ROOT / "src/adclr").rglob("*.py") if path.stem != "__init__"}
    files |= {path.parent.name: path.parent for path in (ROOT / "src/adclr").rglob("__init__.py")}
    for module, name, attribute in set(re.findall(r"`(\w+)\.(\w+)(?:\.(\w+))?`", text)):
        if module not in files or name == "json":  # of the files of a run
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
