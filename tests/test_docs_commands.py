"""Commands on the pages that no reader follows line by line: those whose data a test has run, and all are accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, NoReturn

import pytest

from adclr import cli, evals, study
from adclr.config.distillation import DistillSettings
from adclr.config.parsing import UserError, build, load_recipe
from adclr.data import doctor
from adclr.evals import mask_rcnn
from adclr.features import embedding
from adclr.study import shipped, study_file
from adclr.training import launch, planning
from adclr.weights import export
from dense_scenes import clip, instances
from test_docs import PAGES, ROOT, blocks, reader, run_line

__all__ = ["reader"]  # a fixture

# What the commands of these pages name, a test has: runs/photos and data in the layouts of the page
RUN = ["docs/dense.md", "docs/evaluations.md", "docs/weights.md"]
ALL = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
CHECKED = [page for page in ALL if page not in PAGES and blocks(page, "sh")]
LISTINGS = ["docs/looking.md", "docs/paper.md", "docs/studies.md"]  # commands of SCENES, or with a column of remarks
OTHER_DATA = re.compile(r"imagenet/|cifar10:|flowers:|pets/|\bW\b|\.pth\b")  # of lines that are checked only


class Accepted(Exception):
    """Everything that a command says about its settings is right; its work would begin here."""


def lines_of(page: str, language: str = "sh") -> list[str]:
    joined = "".join(blocks(page, language)).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def accept(*_: Any, **__: Any) -> NoReturn:
    raise Accepted


def accept_training(
    _: str, __: str, recipe: str | None, values: dict[str, Any], ___: bool, kind: Any, *____: Any
) -> None:
    group = "distill" if kind is DistillSettings else ""
    build(kind, *([load_recipe(recipe, group)] if recipe else []), values)
    raise Accepted


def accept_plan(_: str, __: Any, recipe: str | None, values: dict[str, Any], *more: Any) -> None:
    accept_training("", "", recipe, values, False, DistillSettings if more[-1] else launch.Settings)


def accept_study(options: Any, values: dict[str, Any]) -> None:
    file, _ = shipped.find_study(Path(options.file))
    names = {study_file.data_name(cell.data) for cell in study_file.read_study(file).cells}
    names |= {study_file.data_name(one.data or "") for one in study_file.read_study(file).outline.evaluations.values()}
    for name in values:
        assert name in names, name
    raise Accepted


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands end where their work begins."""
    monkeypatch.setattr(launch, "prepare", accept_training)
    monkeypatch.setattr(planning, "plan_run", accept_plan)
    monkeypatch.setattr(study, "run_command", accept_study)
    for module, name in (
        (evals, "run_evaluation"),
        (embedding, "embed_collection"),
        (doctor, "examine_collection"),
        (export, "export"),
    ):
        monkeypatch.setattr(module, name, accept)


def check_line(line: str) -> None:
    """Check a command without doing its work."""
    program, *parts = shlex.split(line, comments=True)
    if program == "torchrun":
        program, parts = "adclr", parts[parts.index("-m") + 2 :]
    elif program == "sbatch":
        place = parts.index("docs/pretrain.slurm")
        data, out, *more = parts[place + 1 :]
        program, parts = "adclr", ["pretrain", data, "--out", out, *more]
    if program == "adclr":
        with pytest.raises(Accepted):
            cli._main(parts)
        return
    assert program in ("python", "pytest"), line
    [file] = [part for part in parts if part.startswith(("tests/", "benchmarks/", "studies/", "docs/"))]
    assert (ROOT / file).exists(), line
    if program == "python":
        for option in re.findall(r"--[\w-]+", line):
            name = option.removeprefix("--")
            assert re.search(rf'"(?:--)?{name}"', (ROOT / file).read_text(encoding="utf-8")), line


@pytest.mark.usefixtures("reader", "no_work")
@pytest.mark.parametrize("page", CHECKED)
def test_every_command_is_accepted(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for line in lines_of(page):
        try:
            check_line(line)
        except SystemExit:
            pytest.fail(f"{line}: {capsys.readouterr().err}")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("page", [page for page in ["README.md", *ALL] if page not in LISTINGS])
def test_commands_in_other_blocks_are_accepted(page: str, reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those marked `text`, whose data or weights a reader has and a test has not; a page's study is in mine.yaml."""
    (reader / "mine.yaml").write_text("".join(blocks(page, "yaml")), encoding="utf-8")
    for line in lines_of(page, "text"):
        if line.startswith(("adclr ", "torchrun ", "sbatch ")):
            try:
                check_line(line)
            except SystemExit:
                pytest.fail(f"{line}: {capsys.readouterr().err}")


@pytest.mark.usefixtures("reader", "no_work")
@pytest.mark.parametrize(
    "wrong",
    [
        "adclr pretrain photos/ --out RUN --recipe adclr_vits61",
        "adclr pretrain photos/ --out RUN epoch5=3",
        "adclr evaluate knn --weights W --data labeled/ ks=3",
        "adclr embed W photos/",
        "adclr plan photos/ --recipe distill_tiny",
        "adclr study studies/none.yaml",
        "python benchmarks/data.py --no-such-option 3",
    ],
)
def test_a_wrong_command_is_noticed(wrong: str) -> None:
    with pytest.raises((SystemExit, AssertionError, UserError)):
        check_line(wrong)


@pytest.mark.parametrize("page", RUN)
def test_commands_whose_data_is_here_work(
    page: str, reader: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_rcnn, "WIDTH", 32)
    monkeypatch.setattr(mask_rcnn, "SAMPLES", 32)
    run_line("adclr pretrain photos/ --out runs/photos --recipe adclr_small")
    if page.endswith("dense.md"):
        instances(reader / "coco", 4, 2, 48)
        clip(reader / "DAVIS")
    lines = [line for line in lines_of(page) if not OTHER_DATA.search(line)]
    assert len(lines) > 2
    for line in lines:
        try:
            run_line(line)
        except SystemExit as error:
            if error.code:
                pytest.fail(f"{line}: {capsys.readouterr().err}")
