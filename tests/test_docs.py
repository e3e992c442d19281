"""The documentation: the site builds, every command and line of Python in it runs, and its sentences are short."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from adclr import cli
from dense_scenes import segmented
from tiny import THREADS, TINY, TINY_STUDENT, words

ROOT = Path(__file__).parents[1]
# Pages whose commands are run, each in a folder of its own with photos/, labeled/, pixels/ and studies/. On other
# pages, and in blocks marked `text`, commands name data or machines that a test does not have.
PAGES = ["README.md", "docs/get_started.md", "docs/adclr_plus.md"]
PAGES += [f"docs/tutorials/{path.name}" for path in sorted((ROOT / "docs/tutorials").glob("*.md"))]
TINY_WORDS = [word for word in words(TINY) if not word.startswith("train.device")]
TINY_STUDENT_WORDS = [word for word in words(TINY_STUDENT) if not word.startswith("train.device")]
TRAINED = {
    "evaluate linear": ["epochs=2"],
    "evaluate finetune": ["epochs=2"],
    "evaluate segmentation": ["steps=4", "size=32", "batch_size=2"],
    "evaluate detection": ["steps=2", "sides=[48,48]", "longest=64", "batch_size=2"],
    "evaluate transfer": ["linear.epochs=2", "finetune.epochs=1"],
}
# Phrases that a reader has to decode; DESIGN calls for the field's own.
BANNED = re.compile(
    r"\b(in places|alike|the house|at rest|who may|how it is|goes on (?:from|with)|hang on|(?:is|are) told|is ruin"
    r"|what it is worth|held against|a riddle|scratch paper|knowing nothing|the whole story|what is like|its own luck"
    r"|tells? (?:images|things) apart|is not told apart|directions of \[CLS\]|mend|see to the|of no use|as such"
    r"|bring it back|no number any more|is no (?:port|file|state|data set)|for nothing says)(?!\w)",
    re.IGNORECASE,
)
BRITISH = re.compile(r"colour|grey|centre\b|labelled|neighbour|(?:normal|initial|solar|recogn)is[ei]", re.IGNORECASE)
LONGEST_MEAN = 18.0  # words of a sentence, on average over a page
LONGEST_SENTENCE = 60  # words
LONGEST_LINE = 160  # characters of a line of prose


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text_of(page), re.DOTALL)


@pytest.fixture
def reader(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which a reader types the commands of a page."""
    (tmp_path / "photos").symlink_to(images / "train")
    (tmp_path / "labeled").symlink_to(images)
    segmented(tmp_path / "pixels", 3, 2, 24)
    shutil.copytree(ROOT / "studies", tmp_path / "studies")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_line(line: str) -> None:
    """Run a command as written, with tiny settings behind it, and two processes where there are many."""
    program, *parts = shlex.split(line, comments=True)
    if program == "make":
        assert re.search(rf"^{parts[0]}:", text_of("Makefile"), re.MULTILINE)
        return
    if program == "pip":
        assert parts == ["install", "."]  # tested with the wheel
        return
    if "pretrain" in parts and "--out" in parts:
        parts += TINY_WORDS
        if any(word.startswith("views.query_source") for word in parts):
            parts += ["train.epochs=2"]
    if "distill" in parts and "--out" in parts:
        parts += TINY_STUDENT_WORDS
    for command, small in TRAINED.items():
        if parts[:2] == command.split():
            parts += small
    parts = ["size=32" if part in ("size=448", "size=224") else part for part in parts]
    if program == "torchrun":
        parts[parts.index("--nproc-per-node") + 1] = "2"
        command_line = [sys.executable, "-m", "torch.distributed.run", *parts]
        environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
        done = subprocess.run(command_line, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
    else:
        assert program == "adclr", line
        cli.main(parts)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_works(
    page: str, reader: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    if page.endswith("object_stores.md"):
        request.getfixturevalue("store").put_folder((reader / "photos").resolve(), "photos")
    joined = "".join(blocks(page, "sh")).replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line.strip()]
    if page != "docs/tutorials/multiband.md":
        assert lines
    for line in lines:
        try:
            run_line(line)
        except SystemExit as error:
            if error.code:
                pytest.fail(f"{line}: {capsys.readouterr().err}")
    for code in blocks(page, "python"):
        small = {"epochs": 1, "warmup_epochs": 0.0, "depth": 1, "train.batch_size": 16, "num_local": 1}
        small |= {"train.device": "cpu"}
        if "adclr.distill(" in code:  # the crops of the teacher, without a projection head
            small |= {"model.patch_size": 4, "views.global_size": 16, "views.local_size": 8}
        else:
            small |= {"head_hidden_dim": 16, "num_prototypes": 16}
        done = subprocess.run(
            [sys.executable, "-c", code.replace("epochs=100)", f"**{small!r})")],
            capture_output=True,
            text=True,
            cwd=reader,
            timeout=300,
            env=os.environ | {"OMP_NUM_THREADS": str(THREADS)},
        )
        assert done.returncode == 0, (page, done.stderr)


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells of docs/notebooks/features.ipynb, in a kernel of their own, with a network trained for one epoch."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("skimage", reason="scikit-image, whose photographs it shows, is not installed")
    monkeypatch.setenv("EPOCHS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", str(THREADS))
    notebook = nbformat.read(ROOT / "docs/notebooks/features.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # none are committed
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=500, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert "cls (4, 96)" in printed
    assert "with the right shift" in printed
    assert sum("image/png" in output.get("data", ()) for output in outputs) == 3
    assert json.loads((tmp_path / "runs/notebook/results.json").read_text())["epochs"] == 1


def test_the_study_that_is_shipped_is_what_its_numbers_make(reader: Path) -> None:
    cli.main(["study", "studies/scenes.yaml"])
    for page in ("scenes.md", "scenes.svg", "scenes.json"):
        assert (reader / "studies/results" / page).read_bytes() == (ROOT / "studies/results" / page).read_bytes()


class Resources(HTMLParser):
    """What a page loads by itself, and where its links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "a":
            self.links.append(values.get("href") or "")
        elif tag in ("script", "img", "iframe", "source") or (
            tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload")
        ):
            self.loaded += [value for key in ("src", "href") if (value := values.get(key))]


def test_the_site_builds_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        found = Resources()
        found.feed(page.read_text(encoding="utf-8"))
        for address in found.loaded:
            assert "//" not in address, (page.name, address)
            if page.name != "404.html":
                assert (page.parent / address.split("?")[0]).exists(), (page.name, address)
        for address in found.links:
            if page.name != "404.html" and address and not re.match(r"https?:|mailto:", address):
                path, _, anchor = address.partition("#")
                target = page.parent / path if path else page
                assert target.exists(), (page.name, address)
                if anchor and target.suffix == ".html":
                    assert f'id="{unquote(anchor)}"' in target.read_text(encoding="utf-8"), (page.name, address)
    settings = (site / "reference/settings.html").read_text(encoding="utf-8")
    assert "views.num_queries" in settings
    front = (site / "index.html").read_text(encoding="utf-8")
    assert re.search(r'<a href="pictures/photographs.jpg"><img [^>]*src="pictures/photographs.jpg"', front)
    assert "search_index.js" in {path.name for path in site.rglob("*.js")}  # search without a server


def sentences(page: str) -> list[str]:
    """Return the sentences of a page's prose: no code, tables, headings, links' targets or pictures."""
    text = re.sub(r"```.*?```|\$\$.*?\$\$", "", text_of(page), flags=re.DOTALL)
    text = re.sub(r"!\[.*?\]\(.*?\)", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\(.*?\)", "]", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not re.match(r"\s*(\||#|:::|options)", line)]
    joined = re.sub(r"\n\s*([-*]|\d+\.) ", "\n\n", "\n".join(lines))
    parts = [part for paragraph in joined.split("\n\n") for part in re.split(r"(?<=[.:?!])\s+", paragraph)]
    return [part.strip() for part in parts if len(part.split()) > 2]


PROSE = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
PROSE += [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]


def check_readable(parts: list[str], text: str) -> None:
    lengths = [len(part.split()) for part in parts]
    assert sum(lengths) / len(lengths) <= LONGEST_MEAN
    assert max(lengths) <= LONGEST_SENTENCE, max(parts, key=lambda part: len(part.split()))
    assert not BANNED.search(text), BANNED.search(text)


@pytest.mark.parametrize("page", PROSE)
def test_sentences_are_short_and_words_are_the_fields(page: str) -> None:
    text = text_of(page)
    check_readable(sentences(page), text)
    prose = re.sub(r"\]\(\S*\)", "]", re.sub(r"```.*?```", "", text, flags=re.DOTALL)).splitlines()
    long = [line for line in prose if len(line) > LONGEST_LINE and not line.lstrip().startswith(("|", "!["))]
    assert not long


def shown_strings() -> list[str]:
    """Return what the program shows: help, error messages, and the texts of its pages and of its model card."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = {
            id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and is_doc(node)
        }
        in_parts = {
            id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)
        } - {id(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "N" for p in node.values))
            elif (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | in_parts
            ):
                found.append(node.value)
    for ending in ("html", "j2", "jinja"):
        for path in sorted((ROOT / "src").rglob(f"*.{ending}")):
            text = re.sub(r"\{[{%#].*?[%#}]\}", " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
            found += re.split(r"<[^>]*>|\n", text)
    for path in sorted((ROOT / "src").rglob("*.js")):
        found += re.findall(r"[\"\x60]([A-Za-z][^\"\x60\n]* [^\"\x60\n]*)[\"\x60]", path.read_text(encoding="utf-8"))
    return [text for text in found if len(text.split()) > 2]


def is_doc(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    first = node.body[0] if node.body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def test_what_the_program_shows_is_short_and_in_the_fields_words() -> None:
    strings = shown_strings()
    assert len(strings) > 1000
    assert any("holds no run to resume" in text for text in strings)
    assert any("peak learning rate" in text for text in strings)
    parts = [part for text in strings for part in re.split(r"(?<=[.:;?!])\s+", text) if len(part.split()) > 2]
    check_readable(parts, "\n".join(strings))


@pytest.mark.parametrize("folder", ["docs", "src"])
def test_spelling_is_american(folder: str) -> None:
    """In the code British words are names of version 0.1 and words of draws, which are quoted: `"grey"`."""
    pages = [
        page
        for ending in ("md", "py", "yaml", "j2", "jinja", "js", "html")
        for page in (ROOT / folder).rglob(f"*.{ending}")
    ]
    assert len(pages) > 20
    for page in [*pages, *ROOT.glob("*.md")]:
        text = re.sub(r'"\w+"', "", page.read_text(encoding="utf-8"))
        assert not BRITISH.search(text), (page, BRITISH.search(text))


@pytest.mark.parametrize(
    "hard",
    [
        "A sentence " + "that is continued and continued " * 5 + "ends here.",
        "They are alike.",
        "It is good. " + "a " * 80,
    ],
)
def test_a_page_that_is_hard_to_read_is_noticed(hard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "text_of", lambda page: hard)
    with pytest.raises(AssertionError):
        test_sentences_are_short_and_words_are_the_fields("any")


def test_the_lines_of_the_architecture_page_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    import line_references

    text = text_of("docs/architecture.md")
    assert len(line_references.LINK.findall(text)) > 20
    assert line_references.updated(text) == text, "run: python docs/line_references.py"
    with pytest.raises(StopIteration):
        line_references.updated("[`nothing`](../src/adclr/model/vit.py#L1)")
