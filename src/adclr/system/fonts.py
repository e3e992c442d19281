"""Fonts for names in pictures: Pillow's default font, else one of the system, else characters are spelled out.

Pillow's default font needs no file and has little more than ASCII. No font is shipped here: one with the letters of all
scripts is larger than the rest of the program.
"""

from __future__ import annotations

import os
import sys
import unicodedata
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from PIL import ImageFont

from adclr.system.text import printable

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
ENDINGS = (".ttf", ".otf", ".ttc")
# Fonts of many scripts; the first that has a name's letters is taken. Other fonts of the system come after them.
PREFERRED = (
    *("DejaVuSans", "NotoSans-Regular", "NotoSansCJK-Regular", "NotoSansCJKjp-Regular", "wqy-microhei"),
    *("DroidSansFallbackFull", "DroidSansFallback", "Arial Unicode", "segoeui", "msyh", "YuGothM", "malgun"),
)
STYLES = ("bold", "italic", "oblique", "mono", "serif", "condensed", "light", "black", "thin")
MAX_FONTS = 400  # that are opened
PROBE_SIZE = 16  # pixels, at which glyphs are compared
NO_CHARACTER = "\ufffe"  # no font has it, so its glyph is that of a missing character

_reported: list[str] = []  # missing characters, which are reported once


class DrawableText(NamedTuple):
    """A text as it can be drawn, and the font that has all its letters."""

    text: str
    font: Font


def drawable_text(text: str, size: int) -> DrawableText:
    """Return a name with a font in which it can be read, at a size in pixels.

    Characters that no font here has are spelled out: an accent is dropped (café: cafe), any other letter becomes its
    code point (犬: U+72AC). Accents that are characters of their own, as in names of files of macOS, are first joined
    to their letters; spaces of other kinds are drawn as plain ones.
    """
    text = "".join(" " if c.isspace() else c for c in unicodedata.normalize("NFC", printable(text)))
    needed = "".join(sorted({c for c in text if not c.isascii()}))
    path = _best(needed)
    missing = {c for c in needed if not _has(path, c)}
    font = _open(path, size)
    return DrawableText(_spell_out(text, missing, path) if missing else text, font)


def font_folders() -> list[Path]:
    """Return the folders where systems keep their fonts."""
    home = Path.home()
    if sys.platform == "darwin":
        return [Path("/System/Library/Fonts"), Path("/Library/Fonts"), home / "Library/Fonts"]
    if sys.platform == "win32":
        return [Path(os.environ.get("WINDIR", "C:/Windows")) / "Fonts", home / "AppData/Local/Microsoft/Windows/Fonts"]
    shared = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    personal = os.environ.get("XDG_DATA_HOME") or str(home / ".local/share")
    return [*(Path(folder) / "fonts" for folder in [personal, *shared.split(":")] if folder), home / ".fonts"]


@lru_cache(maxsize=1)
def _paths() -> tuple[str, ...]:
    """Return the font files of the system, plain sans-serif ones of many scripts first."""
    paths = [
        os.path.join(folder, file)
        for top in font_folders()
        for folder, _, files in os.walk(top)
        for file in files
        if file.lower().endswith(ENDINGS)
    ]

    def order(path: str) -> tuple[int, int, str]:
        stem = os.path.splitext(os.path.basename(path))[0]
        styles = sum(style in stem.lower() for style in STYLES)
        return PREFERRED.index(stem) if stem in PREFERRED else len(PREFERRED), styles, path

    return tuple(sorted(paths, key=order)[:MAX_FONTS])


@lru_cache(maxsize=4096)
def _best(needed: str) -> str:
    """Return the path of the first font with all these characters, or with most of them; "" is Pillow's default."""
    best, fewest = "", sum(not _has("", c) for c in needed)
    for path in _paths() if fewest else ():
        missing = sum(not _has(path, c) for c in needed)
        if missing < fewest:
            best, fewest = path, missing
        if not fewest:
            break
    return best


@lru_cache(maxsize=64)
def _open(path: str, size: int, layout: ImageFont.Layout | None = None) -> Font:
    if not path:
        return ImageFont.load_default(size=size)
    return ImageFont.truetype(path, size, layout_engine=layout)


@lru_cache(maxsize=2**18)
def _has(path: str, character: str) -> bool:
    """Return whether a font has a glyph for a character; Pillow offers no other way than to compare pixels.

    By the basic layout: the other one puts a dotted circle before a vowel sign, such as Hindi's, that stands alone, so
    that a missing sign would not look like a missing character.
    """
    try:
        font = _open(path, PROBE_SIZE, ImageFont.Layout.BASIC)
        glyph, missing = font.getmask(character), font.getmask(NO_CHARACTER)
    except (OSError, ValueError, ImportError):  # a font of colors or fixed sizes, or a damaged one
        return False
    return (glyph.size, bytes(glyph)) != (missing.size, bytes(missing))


def _spell_out(text: str, missing: set[str], path: str) -> str:
    plain = {c: _without_accent(c, path) if c in missing else c for c in text}
    parts = []
    for readable, letters in groupby(text, lambda c: bool(plain[c])):
        if readable:
            parts.append("".join(plain[c] for c in letters))
        else:
            parts.append("U+" + "-".join(f"{ord(c):04X}" for c in letters))
    coded = [c for c in text if not plain[c]]
    if coded and not _reported:
        _reported.extend(coded)
        print(
            f"no font here has {coded[0]}, so that in pictures such letters are spelled as code points; "
            "install one that has them, such as Noto Sans",
            file=sys.stderr,
        )
    return "".join(parts)


def _without_accent(character: str, path: str) -> str:
    """Return the letters of a character without its accents; "" if the font does not have these either."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", character) if not unicodedata.combining(c))
    return plain if plain != character and all(c.isascii() or _has(path, c) for c in plain) else ""


def clear_caches() -> None:
    """Search for fonts again at the next use."""
    for function in (_paths, _best, _open, _has):
        function.cache_clear()
    _reported.clear()
