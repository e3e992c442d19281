"""The studies that come with the program, found by name where there is no checkout."""

from __future__ import annotations

import shutil
from pathlib import Path

from adclr.config.parsing import UserError
from adclr.study.results import Results
from adclr.study.study_file import Study

# beside this module in a wheel; at the root of the repository in a checkout
FOLDERS = (Path(__file__).parent / "studies", Path(__file__).parents[3] / "studies")
WORKING_RESULTS = Path("studies/results")  # of a shipped study, below the working directory


def _folder() -> Path:
    """Return the folder of the shipped studies."""
    for folder in FOLDERS:
        if (folder / "scenes.yaml").is_file():
            return folder
    raise UserError("this installation has no studies; name a study file by its path")


def shipped_names() -> list[str]:
    """Return the names of the shipped studies, sorted."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def find_study(file: Path) -> tuple[Path, bool]:
    """Return the path of a study and whether it is a shipped one: `main` or `studies/main.yaml` where no such file is.

    A file that exists is always taken as it is, so a copy that was edited is used instead of the shipped study.
    """
    if file.exists():
        return file, False
    named = file.parent in (Path(), Path("studies")) and file.suffix in ("", ".yaml")
    if named and file.stem in shipped_names():
        return _folder() / f"{file.stem}.yaml", True
    known = f"; studies that come with the program: {', '.join(shipped_names())}" if named else ""
    raise UserError(f"study {file} does not exist; check the path{known}")


def copy_results(study: Study, results: Results) -> None:
    """Copy the shipped results of a study into the folder of results, unless they are there."""
    source, target = _folder() / "results/runs", results.folder / "runs"
    missing = [
        path for cell in study.cells for path in source.glob(f"{cell.key}*.json") if not (target / path.name).exists()
    ]
    for path in missing:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / path.name)
