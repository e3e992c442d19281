"""Studies: what is made of the numbers, as a table and as a figure."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from adclr.config.parsing import UserError
from adclr.study import figure, table
from adclr.study.results import Results
from adclr.study.study_file import read_study
from adclr.study.table import Sample
from studied import KNN, store_results, study


def test_means_deviations_and_intervals() -> None:
    scores, control = Sample({0: 71.0, 1: 73.0, 2: 75.0, 9: 1.0}), Sample({0: 70.0, 1: 70.0, 2: 73.0})
    difference = scores.minus(control)  # 1, 3, 2 of the seeds that both have
    assert dict(difference.by_seed) == {0: 1.0, 1: 3.0, 2: 2.0}
    assert (difference.mean, difference.deviation) == (2.0, 1.0)
    low, high = stats.t.interval(0.95, 2, loc=2.0, scale=1 / 3**0.5)
    half = difference.half_width()
    assert half is not None
    assert (2 - half, 2 + half) == pytest.approx((low, high), abs=1e-3)
    assert Sample({4: 1.0}).half_width() is None
    assert Sample({}).mean is None


def test_quantiles_are_students() -> None:
    count = len(table.T_QUANTILES)
    assert pytest.approx([stats.t.ppf(0.975, n) for n in range(1, count + 1)], abs=6e-4) == table.T_QUANTILES
    assert pytest.approx(stats.t.ppf(0.975, count + 4), abs=0.02) == table.T_QUANTILE_BEYOND


def test_the_page_says_what_was_found_and_what_is_missing(tmp_path: Path) -> None:
    rank = {"name": "training", "score": "rank_cls", "digits": 2}
    grid = {"views.num_queries": [10, 0]}
    file = study(tmp_path, grid=grid, seeds=[0, 1], control="num_queries=0", evaluations={"kNN": KNN, "rank": rank})
    scores = {("num_queries=10", 0): 50.0, ("num_queries=10", 1): 54.0, ("num_queries=0", 0): 49.0}
    parsed, results = store_results(tmp_path / "results", file, scores)
    rows = table.collect_rows(parsed, results)
    text = table.render_page(parsed, results, rows, None)
    lines = text.splitlines()
    assert "**1 of 4 runs are missing: num_queries=0, seed 1.**" in lines
    assert "| num_queries=0 (control) | 49.0 | 7.00 | 2.0 | 3.5 | 100 | 1 |" in lines
    assert "| num_queries=10 | 52.0 ± 2.8 | 7.00 ± 0.00 | 2.0 | 3.5 | 100 | 2 |" in lines
    assert "| num_queries=10 | +1.0 | +0.00 |" in lines  # of the one seed that both have
    assert "`knn_top1_k3` of `adclr evaluate knn` on photos" in text
    summary = table.summarize(rows, "num_queries=0")
    assert summary["num_queries=10"]["kNN"]["difference"]["by_seed"] == {0: 1.0}
    json.dumps(summary)


def test_an_asterisk_in_a_name_does_not_end_the_bold_sentence(tmp_path: Path) -> None:
    file = study(tmp_path, arms={"ADCLR*": {}, "λ 1": {"settings": {"method.query_weight": 1}}})
    parsed, results = store_results(tmp_path / "results", file, {})
    text = table.render_page(parsed, results, table.collect_rows(parsed, results), None)
    assert r"**2 of 2 runs are missing: ADCLR\*, seed 0; λ 1, seed 0.**" in text.splitlines()


def test_the_page_says_where_and_with_what_it_was_trained(tmp_path: Path) -> None:
    parsed, results = store_results(
        tmp_path / "results", study(tmp_path, seeds=[0, 1]), {("demo", 0): 50.0, ("demo", 1): 52.0}
    )

    def page(*commits: str | None) -> str:
        for cell, commit in zip(parsed.cells, commits, strict=True):
            start = {"device": "NVIDIA H200", "started": "2026-11-16T02:35:20+0000", "commit": commit}
            text = json.loads(results.file(cell).read_text()) | {"provenance": [start]}
            results.file(cell).write_text(json.dumps(text))
        return table.render_page(parsed, results, table.collect_rows(parsed, results), None)

    assert "Trained on NVIDIA H200; 2026-11-16; commit 0123456+, 89abcde. " in page("0123456789+", "89abcdef01")
    assert "2026-11-16; commit 89abcde. " in page(None, "89abcdef01")  # one of them where there was no git
    assert "2026-11-16; commit not recorded. " in page(None, None)
    assert "Minutes and images/s are those of each run" in page(None, None)  # others may have shared its GPU


def test_a_column_without_scores_is_named_and_left_out(tmp_path: Path) -> None:
    file = study(tmp_path, seeds=[0, 1])
    store_results(tmp_path / "results", file, {("demo", 0): 50.0, ("demo", 1): 52.0})
    other = KNN | {"data": "flowers"}
    parsed, results = store_results(
        tmp_path / "results", study(tmp_path, seeds=[0, 1], evaluations={"a": KNN, "b": other}), {}
    )
    lines = table.render_page(parsed, results, table.collect_rows(parsed, results), None).splitlines()
    assert "**Not scored yet: b of 2 runs.**" in lines
    assert "|  | a | minutes | GiB | images/s | seeds |" in lines
    assert not any("runs are missing" in line for line in lines)


def test_a_score_that_does_not_exist_is_named(tmp_path: Path) -> None:
    file = study(tmp_path, evaluations={"kNN": KNN | {"score": "top1"}})
    parsed, results = store_results(tmp_path / "results", file, {("demo", 0): 50.0})
    with pytest.raises(UserError, match="knn has no score 'top1'; it has: knn_top1_k3, knn_train"):
        table.collect_rows(parsed, results)


def test_a_number_of_the_training_that_no_run_wrote_is_named(tmp_path: Path) -> None:
    """Once all are there: those that are missing may be the ones that write it."""
    rank = {"name": "training", "score": "rank_clss"}
    file = study(tmp_path, seeds=[0, 1], evaluations={"rank": rank})
    parsed, results = store_results(tmp_path / "results", file, {("demo", 0): 50.0})
    table.collect_rows(parsed, results)
    parsed, results = store_results(tmp_path / "results", file, {("demo", 1): 50.0})
    with pytest.raises(UserError, match=r"no run has written a number 'rank_clss'; there are: .*rank_cls"):
        table.collect_rows(parsed, results)


@pytest.mark.parametrize("with_grid", [False, True])
def test_the_figure_has_a_dot_for_each_seed(tmp_path: Path, with_grid: bool) -> None:
    arms = {"one & all": None, "<two>": {"settings": {"query_keys": "all"}}}
    grid = {"views.num_queries": [1, 5]} if with_grid else {}
    file = study(tmp_path, arms=arms, grid=grid, seeds=[0, 1])
    labels = read_study(file).labels
    scores = {(label, seed): 40.0 + 10 * n + seed for n, label in enumerate(labels) for seed in (0, 1)}
    parsed, results = store_results(tmp_path / "results", file, scores)
    text = figure.draw_figure(parsed, table.collect_rows(parsed, results))
    assert text is not None
    root = ET.fromstring(text)
    dots = [node for node in root.iter("{http://www.w3.org/2000/svg}circle") if node.get("r") == "3"]
    assert len(dots) == len(scores)
    heights = [float(node.get("cy", 0)) for node in dots]
    assert min(heights) > 0
    assert heights == sorted(heights, reverse=True) or with_grid  # higher scores are drawn higher
    shown = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "one & all" in shown
    assert not with_grid or {"1", "5", "num_queries"} <= set(shown)


@pytest.mark.parametrize("with_grid", [False, True])
def test_an_arm_without_runs_is_not_in_the_figure(tmp_path: Path, with_grid: bool) -> None:
    arms = {"made": None, "half made": {"settings": {"momentum": 0.97}}, "to be made": {"settings": {"momentum": 0.9}}}
    grid = {"views.num_queries": [1, 5]} if with_grid else {}
    file = study(tmp_path, arms=arms, grid=grid)
    labels = read_study(file).labels
    scores = {(label, 0): 40.0 for label in labels if label.startswith("made")} | {
        (next(label for label in labels if label.startswith("half made")), 0): 50.0
    }
    parsed, results = store_results(tmp_path / "results", file, scores)
    text = figure.draw_figure(parsed, table.collect_rows(parsed, results))
    assert text is not None
    shown = {node.text for node in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}text")}
    assert {"made", "half made"} <= shown
    assert "to be made" not in shown


@pytest.mark.parametrize("kind", ["twelve arms", "two settings", "numbers"])
def test_names_in_the_figure_have_room(tmp_path: Path, kind: str) -> None:
    """Twelve arms of forty letters: every text lies within the picture, and none on another."""
    arms = {
        f"lr 1e-3, momentum 0.{n}, temperature 0.04, K": {"settings": {"momentum": n / 1000}} for n in range(901, 913)
    }
    changes: dict[str, Any] = {"arms": arms, "control": next(iter(arms))}
    if kind == "two settings":
        grid = {"views.num_queries": [1, 10], "model.query_keys": ["image", "image_and_self"]}
        changes = {"arms": dict(list(arms.items())[:3]), "grid": grid}
    elif kind == "numbers":
        changes = {"grid": {"views.num_queries": [0, 1, 2, 5, 10, 15]}, "control": "num_queries=10"}
    ranked = {"kNN %": KNN, "rank": {"name": "training", "score": "rank_cls"}}
    file = study(tmp_path, title="A title of some length", evaluations=ranked, **changes)
    parsed, results = store_results(tmp_path / "results", file, {(label, 0): 50.0 for label in read_study(file).labels})
    text = figure.draw_figure(parsed, table.collect_rows(parsed, results))
    assert text is not None
    root = ET.fromstring(text)
    boxes: list[tuple[float, float, float, float]] = []

    def look(node: ET.Element, x: float, y: float) -> None:
        moved = re.fullmatch(r"translate\(([\d.-]+) ([\d.-]+)\)", node.get("transform", ""))
        assert moved or "transform" not in node.attrib  # no slanted names
        x, y = (x + float(moved[1]), y + float(moved[2])) if moved else (x, y)
        if node.tag.endswith("text"):
            wide = 6.5 * len(node.text or "")  # pixels of sans-serif at this size, in the mean
            x += float(node.get("x", 0)) - wide * {"end": 1, "middle": 0.5}.get(node.get("text-anchor", ""), 0)
            y += float(node.get("y", 0))
            boxes.append((x, y - 10, x + wide, y + 3))
        for child in node:
            look(child, x, y)

    look(root, 0, 0)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    assert len(boxes) > 12
    assert all(min(x, y) >= 0 and to_x <= width and to_y <= height for x, y, to_x, to_y in boxes)
    for one, other in itertools.combinations(boxes, 2):
        assert one[0] >= other[2] or other[0] >= one[2] or one[1] >= other[3] or other[1] >= one[3]


def test_no_figure_of_nothing(tmp_path: Path) -> None:
    parsed, results = store_results(tmp_path / "results", study(tmp_path), {})
    assert figure.draw_figure(parsed, table.collect_rows(parsed, results)) is None


def read_tables(text: str) -> list[list[list[str]]]:
    """Return the cells of all tables of a page, the head first and without the line below it."""
    tables: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if not line.startswith("|"):
            tables.append([])
        elif not set(line) <= set("|-: "):
            tables[-1].append([cell.strip() for cell in line.split("|")[1:-1]])
    return [table for table in tables if table]


def is_part_of(table: list[list[str]], whole: list[list[str]]) -> bool:
    """Return whether a table has some columns of another one, and all its rows."""
    if not set(table[0]) <= set(whole[0]) or len(table) != len(whole):
        return False
    columns = [whole[0].index(name) for name in table[0]]
    return [[row[column] for column in columns] for row in whole] == table


def test_results_on_the_page_are_those_of_the_studies() -> None:
    """Every table of docs/results.md below its summary has columns of one in studies/results, and figures exist."""
    root = Path(__file__).parents[2]
    written = [table for page in (root / "studies/results").glob("*.md") for table in read_tables(page.read_text())]
    text = (root / "docs/results.md").read_text(encoding="utf-8")
    _, below = text.split("Nothing has been run on ImageNet", 1)
    shown = read_tables(below)
    assert len(shown) > 15
    assert [table for table in shown if not any(is_part_of(table, whole) for whole in written)] == []
    wrong = [[cell.replace("61.7", "61.8") for cell in row] for row in shown[0]]
    assert wrong != shown[0]
    assert not any(is_part_of(wrong, whole) for whole in written)
    for link in re.findall(r"\]\(([\w./]+)\)", text):
        assert (root / "docs" / link).exists(), link


STUDIES = Path(__file__).parents[2] / "studies"
SHIPPED_PAGES = sorted(page.stem for page in (STUDIES / "results").glob("*.md"))


@pytest.mark.parametrize("name", SHIPPED_PAGES)
def test_a_shipped_page_is_the_one_that_its_results_make(name: str) -> None:
    """Of a study whose runs are those of another one too, which may have trained more of them since."""
    parsed, results = read_study(STUDIES / f"{name}.yaml"), Results(STUDIES / "results")
    rows, file = table.collect_rows(parsed, results), results.folder / f"{name}.md"
    svg = figure.draw_figure(parsed, rows)
    expected = table.render_page(parsed, results, rows, f"{name}.svg" if svg is not None else None)
    assert file.read_text(encoding="utf-8") == expected, f"adclr study studies/{name}.yaml writes it anew"
    summary = json.loads(json.dumps(table.summarize(rows, parsed.outline.control)))  # with the seeds as names
    assert json.loads(file.with_suffix(".json").read_text(encoding="utf-8")) == summary


def test_missing_runs_of_the_papers_tables_are_counted() -> None:
    """Every "9 of 12 runs" of docs/paper.md is of the study that the sentence names, or of the first linked page."""
    sections = (STUDIES.parent / "docs/paper.md").read_text(encoding="utf-8").split("\n## ")
    counted = 0
    for section in sections:
        for missing, of, named in re.findall(r"(\d+) of (\d+) runs(?: of `(\w+)`)?", section):
            link = re.search(r"studies/results/(\w+)\.md", section)
            assert link is not None
            parsed, results = read_study(STUDIES / f"{named or link[1]}.yaml"), Results(STUDIES / "results")
            absent = [cell for cell in parsed.cells if results.read(cell) is None]
            assert (len(absent), len(parsed.cells)) == (int(missing), int(of)), section
            counted += 1
    assert counted >= 5


def test_our_numbers_beside_the_papers_are_those_of_the_page_that_is_linked() -> None:
    """Of every row of docs/paper.md that begins with a link to a page."""
    docs = Path(__file__).parents[2] / "docs"
    rows = re.findall(
        r"^\| ours, \[[^]]*\]\(([\w./]+)\)[^|]*\|(.*)\|$", (docs / "paper.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) > 20
    for page, cells in rows:
        numbers = set(re.findall(r"(?<=\| )\d+\.\d+", (docs / page).read_text(encoding="utf-8")))
        ours = {cell.strip() for cell in cells.split("|")} - {"", "–"}
        assert ours <= numbers, (page, ours - numbers)


@pytest.mark.parametrize(
    ("page", "start", "end"),
    [("README.md", "## Results", "## Compared with"), ("docs/adclr_plus.md", "## Results", "## How the settings")],
)
def test_numbers_of_results_are_those_of_the_studies(page: str, start: str, end: str) -> None:
    """The numbers of a table row stand in one row of studies/results, or are one method's differences in each seed.

    Those of a sentence stand somewhere in studies/results.
    """
    root = Path(__file__).parents[2]
    pages = [path.read_text(encoding="utf-8") for path in (root / "studies/results").glob("*.md")]
    rows = [_numbers(line) for text in pages for line in text.splitlines() if line.startswith("|")]
    for file in (root / "studies/results").glob("*.json"):
        for columns in json.loads(file.read_text(encoding="utf-8")).values():
            by_seed = [column.get("difference", {}).get("by_seed", {}).values() for column in columns.values()]
            rows.append({f"{number:+.1f}" for numbers in by_seed for number in numbers})
    anywhere = {number.lstrip("+-") for text in pages for number in _numbers(text)}
    anywhere |= {number.lstrip("+-") for row in rows for number in row}
    text = (root / page).read_text(encoding="utf-8")
    section = text[text.index(start) : text.index(end)]
    told = [numbers for line in section.splitlines() if line.startswith("|") and (numbers := _numbers(line))]
    assert len(told) > 2
    for numbers in told:
        assert any(numbers <= row for row in rows), numbers
    assert {number.lstrip("+-") for number in _numbers(section)} <= anywhere


def _numbers(text: str) -> set[str]:
    return set(re.findall(r"[+-]?\d+\.\d+", text))
