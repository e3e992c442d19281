"""Videos with masks of their objects, in DAVIS's folders.

DIR/JPEGImages/480p/CLIP/00000.jpg, DIR/Annotations/480p/CLIP/00000.png (objects are numbered from 1, all else is
background) and DIR/ImageSets/2017/val.txt with a clip on each line; without such a list all clips are taken.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from adclr.config.sections import UserError
from adclr.data.decode import Decoder, Pixels, Unreadable
from adclr.data.sets.pixels import read_label
from adclr.data.sources import SUFFIXES, read_file

NAMED = 3  # offenders that a message names
MOST_OBJECTS = 250


@dataclass(frozen=True)
class Clip:
    name: str
    frames: list[str]  # paths, in the order of their names
    masks: list[str]  # of each frame

    def objects(self) -> list[int]:
        """The numbers of those in the first frame."""
        return [int(n) for n in np.unique(read_mask(self.masks[0])) if 0 < n <= MOST_OBJECTS]


def read_mask(path: str) -> NDArray[np.uint8]:
    values = read_label(read_file(path))
    if values.max(initial=0) > 255:
        raise Unreadable("has values above 255")
    return values.astype(np.uint8)


def read_frame(path: str, decoder: Decoder) -> Pixels:
    return decoder(read_file(path))


def open_davis(path: str | Path, split: str = "val", year: str = "2017", resolution: str = "480p") -> list[Clip]:
    root = Path(path)
    frames, masks = root / "JPEGImages" / resolution, root / "Annotations" / resolution
    for folder in (frames, masks):
        if not os.path.isdir(folder):
            raise UserError(f"folder {folder} does not exist; videos are laid out as DAVIS is, see docs/dense.md")
    listed = root / "ImageSets" / year / f"{split}.txt"
    if listed.exists():
        names = [line.strip() for line in listed.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        names = sorted(entry.name for entry in os.scandir(masks) if entry.is_dir())
    if not names:
        raise UserError(f"{listed if listed.exists() else masks} names no clip; each clip is a folder of frames")
    clips, problems = [], []
    for name in names:
        shown, known = (_files(folder / name) for folder in (frames, masks))
        missing = sorted(set(shown) - set(known))
        if not shown:
            problems.append(f"{frames / name} holds no frames")
        elif missing:
            problems.append(f"{masks / name} has no mask for frame {missing[0]}")
        elif len(shown) < 3:
            problems.append(f"{frames / name} has fewer than 3 frames")
        else:
            clips.append(Clip(name, [shown[stem] for stem in sorted(shown)], [known[stem] for stem in sorted(shown)]))
    _refuse(problems, root)
    return clips


def _files(folder: Path) -> dict[str, str]:
    """Paths by the names of frames."""
    if not os.path.isdir(folder):
        return {}
    entries = (entry for entry in os.scandir(folder) if entry.name.lower().endswith(SUFFIXES))
    return {os.path.splitext(entry.name)[0]: entry.path for entry in entries if not entry.name.startswith(".")}


def check(clips: list[Clip]) -> None:
    """Looks at the first frame of every clip: its mask has objects, and is as large as it."""
    problems = []
    for clip in clips:
        try:
            mask, frame = read_mask(clip.masks[0]), read_frame(clip.frames[0], Decoder())
            if mask.shape != frame.shape[1:]:
                problems.append(f"{clip.masks[0]} is not as large as its frame")
            elif not clip.objects():
                problems.append(f"{clip.masks[0]}, the first of its clip, shows no object")
        except (Unreadable, OSError) as error:
            problems.append(f"{clip.masks[0]} or its frame cannot be used ({error})")
    _refuse(problems, Path(clips[0].masks[0]).parent.parent)


def _refuse(problems: list[str], where: Path) -> None:
    if problems:
        more = f", and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        raise UserError(f"{'; '.join(problems[:NAMED])}{more}; mend the clips in {where} or take them off the list")
