"""Text from outside (names of files and classes, reasons of other programs), made safe to print."""

from __future__ import annotations

import unicodedata

JOINERS = "\u200c\u200d"  # zero-width (non-)joiner, without which Persian, Indic scripts and emoji are misspelled


def printable(text: str) -> str:
    """Returns the text with everything that a terminal would obey instead of show escaped as Python writes it.

    These are control characters (among them escape sequences, newlines and tabs), bidirectional overrides and other
    invisible characters, line separators, and bytes that are not UTF-8. Letters of all scripts and all spaces stay.
    """
    if text.isprintable():
        return text
    return "".join(c if _is_shown(c) else c.encode("unicode_escape").decode("ascii") for c in text)


def _is_shown(character: str) -> bool:
    return character.isprintable() or character in JOINERS or unicodedata.category(character) == "Zs"


def printable_lines(text: str) -> str:
    """Returns a text of several lines with each of them made printable."""
    return "\n".join(printable(line) for line in text.split("\n"))


def format_size(gigabytes: float) -> str:
    for unit, length in (("TB", 1e3), ("GB", 1.0), ("MB", 1e-3)):
        if gigabytes >= length:
            return f"{gigabytes / length:.3g} {unit}"
    return f"{gigabytes * 1e6:.0f} kB"
