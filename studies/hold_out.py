"""Hold out a fifth of the training images, so that settings can be chosen without looking at the validation set.

    python studies/hold_out.py IMAGENETTE OUT            train/CLASS/*.jpg
    python studies/hold_out.py PETS OUT --pixels          images/train and labels/train
    python studies/hold_out.py CAMVID OUT --pixels --prefix 0006R0

Writes OUT/train and OUT/val (with --pixels OUT/images/{train,val} and OUT/labels/{train,val}), both made of the files
of IN/train alone. Which fifth an image is in follows from a hash of its path, so it is the same on every machine. With
--prefix the held-out images are those whose file names begin so: one drive of CamVid, whose frames are nearly equal.
Files are hard links where the file system allows it, else copies.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from adclr.data.random_draws import key_of

FIFTHS = 5


def split_of(relative: Path, prefix: str | None) -> str:
    """Return 'val' for one image in five, or for those of a prefix, else 'train'."""
    if prefix is not None:
        return "val" if relative.name.startswith(prefix) else "train"
    return "val" if key_of(f"held out {relative.with_suffix('').as_posix()}") % FIFTHS == 0 else "train"


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileExistsError:
        pass
    except OSError:
        shutil.copyfile(source, target)


def hold_out(source: Path, out: Path, pixels: bool, prefix: str | None = None) -> dict[str, int]:
    """Link the files, and return their number in each split."""
    counts = {"train": 0, "val": 0}
    for kind in ("images", "labels") if pixels else ("",):
        folder = source / kind / "train"
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            relative = path.relative_to(folder)
            split = split_of(relative, prefix)
            link(path, out / kind / split / relative)
            counts[split] += 1
    if pixels:
        link(source / "classes.txt", out / "classes.txt")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="IN")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--pixels", action="store_true", help="images/ and labels/ with a class for every pixel")
    parser.add_argument("--prefix", help="hold out the images whose file names begin so, instead of a fifth")
    given = parser.parse_args()
    counts = hold_out(given.source, given.out, given.pixels, given.prefix)
    if not counts["train"] or not counts["val"]:
        raise SystemExit(f"{given.source} has no training images that could be held out")
    print(f"{given.out}: {counts['train']} files to train on, {counts['val']} held out")


if __name__ == "__main__":
    main()
