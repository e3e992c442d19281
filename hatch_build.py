"""Metadata that depend on where the repository is published: project URLs, and the README with absolute links.

A package index shows the README without the repository, so relative links and pictures would be broken there. The
address is that of the GitHub workflow that builds the package, or of the git remote `origin`. Without either, pictures
are left out and links become text.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAPER = "https://arxiv.org/abs/2306.13337"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def find_repository(root: str) -> str | None:
    """Return the GitHub address of the repository, None if it is not known."""
    name = os.environ.get("GITHUB_REPOSITORY")
    if name:
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}"
    try:
        command = ["git", "-C", root, "remote", "get-url", "origin"]
        remote = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.fullmatch(
        r"(?:https://(?:[^@/]+@)?|ssh://git@|git@)github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?", remote
    )
    return f"https://github.com/{found[1]}" if found else None


def absolute_links(text: str, repository: str | None) -> str:
    """Return Markdown whose relative links lead to the repository; without one, pictures and links are taken out."""

    def replace(link: re.Match[str]) -> str:
        is_picture, name, path = link[1] == "!", link[2], link[3]
        if repository is None:
            return "" if is_picture else name
        return f"{link[1]}[{name}]({repository}/{'raw' if is_picture else 'blob'}/HEAD/{path})"

    return LINK.sub(replace, text)


class Metadata(MetadataHookInterface):
    """Fills in `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the two fields that pyproject.toml calls dynamic."""
        repository = find_repository(self.root)
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(readme, repository)}
        metadata["urls"] = {"Paper": PAPER}
        if repository:
            pages = {"Documentation": "/tree/HEAD/docs", "Changelog": "/blob/HEAD/CHANGELOG.md", "Issues": "/issues"}
            metadata["urls"] |= {"Repository": repository} | {name: repository + page for name, page in pages.items()}
