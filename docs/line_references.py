"""Set the line numbers in docs/architecture.md: `python docs/line_references.py`. A test checks that they are right.

A reference is a link [`Class.method`](../src/adclr/file.py#L12); the number is the line of that definition.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).parent / "architecture.md"
LINK = re.compile(r"\[`([\w.]+)`\]\((\.\./src/[\w/.]+\.py)#L(\d+)\)")


def line_of(name: str, file: Path) -> int:
    """Return the line of a class, a function, a method or a constant of a file."""
    node: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    for part in name.split("."):
        node = next(child for child in ast.iter_child_nodes(node) if part in _names(child))
    line: int = node.lineno  # type: ignore[attr-defined]
    return line


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def updated(text: str) -> str:
    """Return the page with the lines of today."""

    def link(match: re.Match[str]) -> str:
        return f"[`{match[1]}`]({match[2]}#L{line_of(match[1], PAGE.parent / match[2])})"

    return LINK.sub(link, text)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
