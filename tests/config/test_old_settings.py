"""Settings that were renamed or became constants since version 0.1: old files and old results still work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import adclr as package
from adclr import cli, evals
from adclr.config import parsing
from adclr.config.parsing import UserError, build, parse_words
from adclr.config.settings import Settings
from adclr.evals import score_text
from adclr.report.record import read_record
from adclr.study.results import Results
from adclr.study.study_file import read_study
from studied import SMALL
from tiny import TINY

OLD_NAMES = {"gray": "grey", "solarize": "solarise"}
CONSTANTS: dict[str, Any] = {
    "views.aspect_ratio": [0.75, 4 / 3],
    "views.mask_probability": 0.5,
    "views.mask_ratio": [0.1, 0.5],
    "method.student_temperature": 0.1,
    "train.max_void_steps": 50,
    "probe.images_at_once": 256,
    "probe.pixels_size": None,
    "probe.memory_size": 102_400,
}
SEGMENTATION = {"name": "segmentation", "data": "photos", "score": "segmentation_miou"}


@pytest.fixture(autouse=True)
def _no_warning_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "_warned", set())


def as_in_version_0_1(file: Path) -> None:
    """Rewrites the settings of a run as version 0.1 wrote them."""
    tree = yaml.safe_load(file.read_text())
    for new, old in OLD_NAMES.items():
        tree["views"][old] = tree["views"].pop(new)
    for path, value in CONSTANTS.items():
        group, _, name = path.partition(".")
        tree[group][name] = value
    file.write_text(yaml.safe_dump(tree))


@pytest.mark.parametrize("name", ["views.grey", "grey"])
def test_an_old_name_is_accepted_with_one_warning(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for layer in ({name: 0.3}, parse_words([f"{name}=0.3"]), {"views": {"grey": 0.3}}):
        settings = build(Settings, layer)
        assert settings.views.gray == 0.3
        assert "grey" not in settings.model_dump()["views"]
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["adclr: the setting views.grey is now views.gray; the next version will not accept the old name"]


def test_old_names_of_evaluations_and_embeddings_are_accepted() -> None:
    from adclr.evals import segmentation, video
    from adclr.features import embedding

    assert build(segmentation.Settings, {"colours": False}).colors is False
    assert build(video.Settings, {"neighbourhood": 3}).neighborhood == 3
    assert build(embedding.EmbeddingSettings, {"normalise": True}).normalize is True


def test_constants_are_accepted_at_their_value_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert build(Settings, CONSTANTS) == build(Settings, {"aspect_ratio": (3 / 4, 4 / 3)}) == Settings()
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError) as error:
        build(Settings, {"views.mask_ratio": [0.2, 0.5]})
    assert str(error.value) == "views.mask_ratio is a constant, [0.1, 0.5], and cannot be [0.2, 0.5]; leave it out"
    assert not {path for path, _, _ in parsing.describe(Settings)} & set(CONSTANTS)


def test_a_run_of_version_0_1_is_resumed_without_a_warning(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = package.pretrain(images / "train", out=tmp_path / "run", **TINY, grey=0.3)
    assert capsys.readouterr().err.count("views.grey is now views.gray") == 1
    file = run.path / "settings.yaml"
    assert yaml.safe_load(file.read_text())["views"]["gray"] == 0.3
    as_in_version_0_1(file)
    parsing._warned.clear()
    stored = run.settings()
    assert stored is not None
    assert stored.views.gray == 0.3
    cli.main(["pretrain", "--resume", "--out", str(run.path)])
    captured = capsys.readouterr()
    assert "is now" not in captured.err
    assert "is finished" in captured.out
    with pytest.raises(UserError, match=r"views\.gray is 0\.3 there and 0\.2 here"):
        package.pretrain(images / "train", out=run.path, **TINY, gray=0.2)
    report = read_record(run.path)
    assert report.settings == parsing.flatten(stored.model_dump(mode="json"))


def test_a_settings_file_of_version_0_1_is_a_recipe(images: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(build(Settings, TINY, {"gray": 0.3}).model_dump(mode="json")))
    as_in_version_0_1(file)
    run = package.pretrain(images / "train", out=tmp_path / "run", recipe=file)
    stored = run.settings()
    assert stored is not None
    assert stored.views.gray == 0.3


@pytest.mark.parametrize(
    ("name", "settings", "file"),  # the file names are those that version 0.1 gave
    [
        ("segmentation", {}, "x-1dd581e0.json"),
        ("segmentation", {"colors": False}, "x-2ef256fa.json"),
        ("video", {"neighborhood": 3}, "x-6e039c3a.json"),
        ("knn", {}, "x-f11e7e1e.json"),
    ],
)
def test_scores_of_version_0_1_keep_their_file_name(
    tmp_path: Path, name: str, settings: dict[str, Any], file: str
) -> None:
    built = build(evals.import_evaluation(name).Settings, {"weights": tmp_path, "data": "/x"}, settings)
    assert evals.result_path(name, built).name == file


def test_a_control_of_version_0_1_is_found(tmp_path: Path) -> None:
    from adclr.evals.segmentation import Settings as Segmentation

    settings = Segmentation(weights=str(tmp_path), data=str(tmp_path), colors=False)
    stored = settings.model_dump(mode="json") | {"from_scratch": True, "colours": False}
    del stored["colors"]
    folder = tmp_path / "evals"
    folder.mkdir()
    for file, changes in (("control.json", {}), ("another.json", {"colours": True})):
        text = {"scores": {"segmentation_miou": 20.0}, "settings": stored | changes}
        (folder / file).write_text(json.dumps(text))
    (line,) = score_text.compare_with_control(
        "segmentation", settings, {"segmentation_miou": 30.0}, folder / "none.json", [folder]
    )
    assert "10.0 points above" in line
    assert str(folder / "control.json") in line


def test_results_of_a_study_of_version_0_1_are_found(tmp_path: Path) -> None:
    """The keys are those that version 0.1 gave; what its recipe `demo` trained is `demo_adclr` now."""

    def written(gray: str, colors: str) -> Path:
        evaluations = {"mIoU": SEGMENTATION | {"settings": {colors: False}}}
        study = SMALL | {"recipe": "demo_adclr", "settings": {gray: 0.3}, "evaluations": evaluations}
        (tmp_path / "study.yaml").write_text(json.dumps(study))
        return tmp_path / "study.yaml"

    for names in (("views.grey", "colours"), ("views.gray", "colors")):
        study = read_study(written(*names))
        (cell,), (evaluation,) = study.cells, study.outline.evaluations.values()
        assert (cell.key, evaluation.key) == ("f649cfada69006d8", "0611ca1782980c87")
    results = Results(tmp_path / "results")
    file = results.file(cell)
    file.parent.mkdir(parents=True)
    known, built = cell.identity, evaluation.score_settings()
    assert (known["settings"]["views.gray"], built["colors"]) == (0.3, False)

    def write(gray: float, colors: bool) -> None:
        old = {path: value for path, value in known["settings"].items() if path != "views.gray"} | CONSTANTS
        scored = {"scores": {"segmentation_miou": 30.0}, "built": {"colours": colors}}
        text = {
            **known,
            "settings": old | {"views.grey": gray},
            "training": {},
            "evaluations": {evaluation.key: scored},
        }
        file.write_text(json.dumps(text))

    write(0.3, False)
    assert results.is_complete(study, cell)
    write(0.1, False)
    with pytest.raises(UserError, match=r"made with views\.gray=0\.1, which is 0\.3 now"):
        results.read(cell)
    write(0.3, True)
    with pytest.raises(UserError, match="made with colors=True, which is False now"):
        results.is_complete(study, cell)


def test_an_embedding_of_version_0_1_is_finished(images: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    run = package.pretrain(images / "train", out=tmp_path / "run", **(TINY | {"epochs": 1, "warmup_epochs": 0}))
    shutil.rmtree(run.path / "checkpoints")
    out = tmp_path / "features.parquet"
    about = package.embed(run.path, images / "val", out=out, normalize=True)
    file = tmp_path / "features.parquet.json"
    old = json.loads(file.read_text())
    old["normalise"] = old.pop("normalize")
    file.write_text(json.dumps(old))
    before = out.stat().st_mtime_ns
    assert package.embed(run.path, images / "val", out=out, normalize=True)["rows"] == about["rows"]
    assert out.stat().st_mtime_ns == before
    with pytest.raises(UserError, match="normalize=True where False was asked for"):
        package.embed(run.path, images / "val", out=out)
