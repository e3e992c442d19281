"""The demo as shipped: it ends, it learns, it shows; and a second time it has nothing left to do."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from PIL import Image

from tiny import Adclr


@pytest.mark.timeout(600)
def test_the_demo_learns_in_minutes(adclr: Adclr, tmp_path: Path) -> None:
    started = time.monotonic()
    done = adclr("demo", "--out", tmp_path / "demo")
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    found = re.search(r"before training ([\d.]+) %, after ([\d.]+) %: \+([\d.]+) points", done.stdout)
    assert found, done.stdout
    assert float(found[3]) >= 15
    assert seconds < 240
    results = json.loads((tmp_path / "demo/run/results.json").read_text())
    assert results["probes"][-1]["knn_top1"] == pytest.approx(float(found[2]), abs=0.06)
    with Image.open(tmp_path / "demo/attention.png") as picture:
        assert picture.width > 600
        assert len(set(picture.convert("RGB").getdata())) > 1000  # not blank
    again = adclr("demo", "--out", tmp_path / "demo")
    assert again.returncode == 0
    assert found[0] in again.stdout
    assert "is finished" in again.stdout


def test_the_demo_does_not_write_into_what_it_did_not_make(adclr: Adclr, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    done = adclr("demo", "--out", tmp_path)
    assert done.returncode == 2
    assert "holds something else" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
    words = adclr("demo", "epochs=3")
    assert words.returncode == 2
    assert "takes no settings" in words.stderr
