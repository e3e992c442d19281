"""`studies/hold_out.py`: a part of the training images is held out, the same one on every machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def hold_out(*words: object) -> None:
    subprocess.run([sys.executable, ROOT / "studies/hold_out.py", *map(str, words)], check=True, capture_output=True)


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_fifth_of_the_images_is_held_out_and_nothing_of_val(tmp_path: Path) -> None:
    for number in range(200):
        for split in ("train", "val"):
            file = tmp_path / "set" / split / f"class{number % 2}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(f"{split} {number}".encode())
    hold_out(tmp_path / "set", tmp_path / "out")
    train, val = names(tmp_path / "out" / "train"), names(tmp_path / "out" / "val")
    assert train | val == names(tmp_path / "set" / "train")
    assert not train & val
    assert 20 <= len(val) <= 60
    assert all(path.read_bytes().startswith(b"train") for path in (tmp_path / "out").rglob("*.png"))


def test_one_drive_is_held_out_with_its_labels(tmp_path: Path) -> None:
    for kind in ("images", "labels"):
        (tmp_path / "set" / kind / "train").mkdir(parents=True)
        for drive in ("0001TP", "0006R0"):
            (tmp_path / "set" / kind / "train" / f"{drive}_1.png").write_bytes(b"x")
    (tmp_path / "set" / "classes.txt").write_text("sky\nroad\n")
    hold_out(tmp_path / "set", tmp_path / "out", "--pixels", "--prefix", "0006R0")
    for kind in ("images", "labels"):
        assert names(tmp_path / "out" / kind) == {"train/0001TP_1.png", "val/0006R0_1.png"}
    assert (tmp_path / "out" / "classes.txt").exists()
