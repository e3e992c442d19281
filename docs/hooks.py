"""Writes the pages of the site that come from the code: commands, settings and the changelog. mkdocs calls it."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
FETCHED = "https://unpkg.com/iframe-worker/shim"
SHIM = "assets/worker_shim.js"
RESULTS = "studies/results"
LINK = "(docs/"  # the changelog lies beside docs/, its page in it


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "reference/commands.md": commands(),
        "reference/settings.md": settings(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace(LINK, "("),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    # pages and figures of studies lie beside docs/, where `adclr study` writes them
    for path in sorted((ROOT / RESULTS).glob("*.*")):
        if path.suffix in (".md", ".svg"):
            files.append(File.generated(config, f"{RESULTS}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to the results of studies at their copies in the site, and write out links to the source."""
    markdown = re.sub(r"\[`([\w.]+)`\]\(\.\./src/adclr/([\w/.]+)#L(\d+)\)", r"`\1` (`\2`, line \3)", markdown)
    markdown = re.sub(r"\[`[\w.]+`\]\(\.\./src/adclr/([\w/.]+)\)", r"`\1`", markdown)
    return markdown.replace(f"](../{RESULTS}/", f"]({RESULTS}/")


def on_page_content(html: str, **_: Any) -> str:
    """Link every picture to its file: in a column of text, and on a phone, words in it are too small to read."""
    return re.sub(r'(<img [^>]*src="([^"]+)"[^>]*>)', r'<a href="\2">\1</a>', html)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Replace a script that the offline plugin fetches from the network by our own."""
    return output.replace(FETCHED, "../" * page.url.count("/") + SHIM)


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same on pages without a source, such as 404."""
    return output_content.replace(FETCHED, f"/{SHIM}")


def commands() -> str:
    """Return every command with its options, from the parser of the program."""
    from adclr import cli

    os.environ["COLUMNS"] = "100"
    lines = ["# Commands", "", "`adclr COMMAND --help` prints the same, and the settings of the command.", ""]
    for name, parser in _parsers(cli.parser()):
        lines += [f"## adclr {name}", "", "```text", parser.format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def settings() -> str:
    """Return tables of all settings: of pretraining, of each evaluation and of the other commands."""
    from adclr import evals
    from adclr.config.distillation import Distill
    from adclr.config.settings import Settings
    from adclr.data import doctor
    from adclr.features import embedding, explorer, visualize

    lines = [
        "# Settings",
        "",
        "Give settings as `key=value` after a command, as keyword arguments in Python, or in a file: `--recipe FILE`.",
        "A short name is enough where it is unique: `epochs=100` is `train.epochs=100`.",
        "",
        "## Pretraining",
        "",
    ]
    for name, field in Settings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            lines += [f"### {name}", "", *_table(section, f"{name}."), ""]
    lines += [
        "## Distillation",
        "",
        "`adclr distill` has the settings of pretraining without `method.`, queries and `train.shard`, and:",
        "",
        *_table(Distill, "distill."),
        "",
    ]
    for name in evals.NAMES:
        lines += [f"## adclr evaluate {name}", "", *_table(evals.import_evaluation(name).Settings), ""]
    others: dict[str, Any] = {
        "embed": embedding.EmbeddingSettings,
        "doctor": doctor.DoctorSettings,
        "explore": explorer.ExplorerSettings,
    }
    others |= {f"visualize {name}": kind for name, (kind, _) in visualize.FIGURES.items()}
    for name, kind in others.items():
        lines += [f"## adclr {name}", "", *_table(kind), ""]
    return "\n".join(lines)


def _table(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    yield "| setting | default | meaning |"
    yield "|---|---|---|"
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            default = "see below"
        meaning = (field.description or "").replace("|", "\\|").replace("<", "&lt;")
        yield f"| `{prefix}{name}` | `{_text(default)}` | {meaning} |"


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_text, value))}]"
    return str(value) or "none"
