"""Studies that come with the program: found by name from any folder, with their results."""

from __future__ import annotations

from pathlib import Path

import pytest

from adclr import study
from adclr.config.parsing import UserError
from adclr.study import shipped

SHIPPED = Path(__file__).parents[2] / "studies"


def test_a_shipped_study_is_written_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plus` is complete: its page is made from the stored results, without images and without training."""
    monkeypatch.chdir(tmp_path)
    page = study.run_study(Path("plus"), Path("runs/studies"), None, {})
    assert page == Path("studies/results/plus.md")
    assert page.read_bytes() == (SHIPPED / "results/plus.md").read_bytes()
    stored = {path.name for path in (tmp_path / "studies/results/runs").iterdir()}
    assert len(stored) == 6
    assert stored <= {path.name for path in (SHIPPED / "results/runs").iterdir()}
    assert not (tmp_path / "runs").exists()


def test_a_result_that_is_there_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study.run_study(Path("plus"), Path("runs/studies"), None, {})
    first = sorted((tmp_path / "studies/results/runs").iterdir())[0]
    first.write_text(first.read_text() + "\n")
    before = first.stat().st_mtime_ns
    study.run_study(Path("studies/plus.yaml"), Path("runs/studies"), None, {})
    assert first.stat().st_mtime_ns == before


def test_names_paths_and_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "main" in shipped.shipped_names()
    for name in ("main", "main.yaml", "studies/main.yaml"):
        assert shipped.find_study(Path(name)) == (SHIPPED / "main.yaml", True)
    own = tmp_path / "main.yaml"
    own.write_text("title: mine")
    assert shipped.find_study(Path("main.yaml")) == (Path("main.yaml"), False)  # a file is taken before a shipped study
    with pytest.raises(UserError, match="studies that come with the program: anchor, "):
        shipped.find_study(Path("mian"))
    with pytest.raises(UserError, match=r"elsewhere/main\.yaml does not exist; check the path$"):
        shipped.find_study(Path("elsewhere/main.yaml"))


def test_an_installed_package_has_them_beside_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDERS", (tmp_path / "none",))
    with pytest.raises(UserError, match="has no studies"):
        shipped.shipped_names()
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies/scenes.yaml").touch()
    monkeypatch.setattr(shipped, "FOLDERS", (tmp_path / "none", tmp_path / "studies"))
    assert shipped.shipped_names() == ["scenes"]
