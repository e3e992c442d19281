"""Videos with masks of their objects, in DAVIS's folders.

DIR/JPEGImages/480p/CLIP/00000.jpg, DIR/Annotations/480p/CLIP/00000.png (objects are numbered from 1, all else is
background) and DIR/ImageSets/2017/val.txt with a clip on each line; without such a list all clips are used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from adclr.config.parsing import UserError
from adclr.data.decode import Decoder, Pixels, Unreadable
from adclr.data.sets import refuse, takes_url
from adclr.data.sets.pixels import read_label
from adclr.data.sources import SUFFIXES, read_file

MOST_OBJECTS = 250


@dataclass(frozen=True)
class Clip:
    """A video and the masks of its objects."""

    name: str
    frames: list[str]  # paths, in the order of their names
    masks: list[str]  # of each frame

    def objects(self) -> list[int]:
        """Return the numbers of the objects in the first frame."""
        return [int(n) for n in np.unique(read_mask(self.masks[0])) if 0 < n <= MOST_OBJECTS]


def read_mask(path: str) -> NDArray[np.uint8]:
    """Return the object numbers of a mask, height×width; 0 is background."""
    values = read_label(read_file(path))
    if values.max(initial=0) > 255:
        raise Unreadable("has values above 255")
    return values.astype(np.uint8)


def read_frame(path: str, decoder: Decoder) -> Pixels:
    """Return the pixels of a frame."""
    return decoder(read_file(path))


@takes_url
def open_davis(path: str | Path, split: str = "val", year: str = "2017", resolution: str = "480p") -> list[Clip]:
    """Return the clips of a split, by their names alone; `check` reads their first frames."""
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
        frame_files, mask_files = (_files(folder / name) for folder in (frames, masks))
        missing = sorted(set(frame_files) - set(mask_files))
        if not frame_files:
            problems.append(f"{frames / name} holds no frames")
        elif missing:
            problems.append(f"{masks / name} has no mask for frame {missing[0]}")
        elif len(frame_files) < 3:
            problems.append(f"{frames / name} has fewer than 3 frames")
        else:
            stems = sorted(frame_files)
            clips.append(Clip(name, [frame_files[stem] for stem in stems], [mask_files[stem] for stem in stems]))
    refuse(problems, _remedy(root))
    return clips


def _files(folder: Path) -> dict[str, str]:
    """Return paths by the names of frames."""
    if not os.path.isdir(folder):
        return {}
    entries = (entry for entry in os.scandir(folder) if entry.name.lower().endswith(SUFFIXES))
    return {os.path.splitext(entry.name)[0]: entry.path for entry in entries if not entry.name.startswith(".")}


def check(clips: list[Clip]) -> None:
    """Refuse clips whose first mask has no object or another size than its frame."""
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
    refuse(problems, _remedy(Path(clips[0].masks[0]).parent.parent))


def _remedy(folder: Path) -> str:
    return f"fix the clips in {folder} or take them off the list"
