"""A run written before the modules were moved into packages resumes, loads, evaluates and is reported.

`tests/fixtures/run_before_packages` holds what commit 0f35dde wrote: `whole` is a finished run of 8 steps on the
built-in scenes with two of its evaluations, `stopped` the same run killed after step 5 with its checkpoint of step 3,
and `outputs.json` what the finished backbone answers to fixed images. Times and the index of files are left out.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import adclr
from adclr.system.runs import Run
from tiny import Adclr

FIXTURE = Path(__file__).parents[1] / "fixtures" / "run_before_packages"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Return a copy that the test may change."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "old"))


def test_a_stopped_run_goes_on_to_the_weights_of_the_finished_one(old: Path, images: Path, adclr: Adclr) -> None:
    """The losses of all 8 steps and the final backbone are those of the run that was not stopped.

    Images have other modification times here, which is said and does not stop it.
    """
    done = adclr("pretrain", images / "train", "--out", old / "stopped")
    assert done.returncode == 0, done.stderr
    losses, expected = (
        {row["step"]: row["loss"] for row in Run(old / name).rows("metrics.jsonl") if "loss" in row}
        for name in ("stopped", "whole")
    )
    assert losses.keys() == expected.keys() == set(range(1, 9))
    assert losses == pytest.approx(expected, rel=1e-4)
    resumed, whole = (torch.cat([p.flatten() for p in load(old / name).parameters()]) for name in ("stopped", "whole"))
    torch.testing.assert_close(resumed, whole, rtol=1e-3, atol=1e-4)


def load(path: Path) -> torch.nn.Module:
    return adclr.load(path)


def test_a_finished_run_is_known_as_finished(old: Path, images: Path, adclr: Adclr) -> None:
    before = (old / "whole" / "backbone.safetensors").read_bytes()
    done = adclr("pretrain", images / "train", "--out", old / "whole")
    assert done.returncode == 0, done.stderr
    assert (old / "whole" / "backbone.safetensors").read_bytes() == before


def test_its_weights_answer_as_they_did() -> None:
    vit = load(FIXTURE / "whole").eval()
    images = torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)
    queries = torch.linspace(1, -1, 2 * 3 * 4 * 4).view(1, 2, 3, 4, 4)
    with torch.no_grad():
        tokens = vit(images, queries=queries)
    expected = {name: torch.tensor(value) for name, value in json.loads((FIXTURE / "outputs.json").read_text()).items()}
    torch.testing.assert_close(tokens.cls[0], expected["cls"])
    torch.testing.assert_close(tokens.queries[0], expected["queries"])
    torch.testing.assert_close(tokens.patches[0].mean(0), expected["patches_mean"])


@pytest.mark.parametrize(("name", "data", "words"), [("knn", "", ["k=5"]), ("matching", "val", [])])
def test_its_weights_score_as_they_did(
    old: Path, images: Path, adclr: Adclr, name: str, data: str, words: list[str]
) -> None:
    (file,) = (old / "whole" / "evals" / name).glob("*.json")
    expected = json.loads(file.read_text())["scores"]
    out = old / "again.json"
    done = adclr(
        "evaluate", name, "--weights", old / "whole", "--data", images / data, "--out", out, "device=cpu", *words
    )
    assert done.returncode == 0, done.stderr
    scores = json.loads(out.read_text())["scores"]
    assert scores.keys() >= expected.keys()
    for key, value in expected.items():
        if isinstance(value, int | float):
            assert scores[key] == pytest.approx(value, rel=1e-3), key


def test_both_are_reported(old: Path, adclr: Adclr) -> None:
    done = adclr("report", old / "whole", old / "stopped", "--out", old / "report.html")
    assert done.returncode == 0, done.stderr
    page = (old / "report.html").read_text()
    assert "whole" in page
    assert "stopped" in page
