"""The page of a run: it holds what the run left, needs nothing beside it, and takes files as it finds them."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from adclr import report
from adclr.config.parsing import UserError
from adclr.data.sources import ImageFolder
from adclr.features import analysis
from adclr.report import charts
from adclr.report import live as live_module
from adclr.report.live import LiveReport, choose_images
from adclr.report.metrics import describe_status
from adclr.report.page import format_run_time, render_page
from adclr.report.record import read_record
from adclr.system.runs import Run
from adclr.training import launch, loop
from adclr.weights.backbone import load_weights
from tiny import TINY, Adclr

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    loop.train(launch.prepare(images / "train", folder, None, TINY | {"probe.data": str(images), "train.report": True}))
    (folder / "evals/knn").mkdir(parents=True)
    scores: dict[str, dict[str, object]] = {
        "scores": {"knn_top1": 43.25, "broken": "x"},
        "settings": {"data": "flowers"},
        "provenance": {"started": "2026"},
    }
    (folder / "evals/knn/flowers-1.json").write_text(json.dumps(scores))
    scores["settings"] |= {"from_scratch": True}
    (folder / "evals/knn/flowers-2.json").write_text(json.dumps(scores))
    (folder / "evals/knn/other.json").write_text("[1, 2")
    return folder


class Reader(HTMLParser):
    """Checks that tags close, and collects what a browser would fetch."""

    VOID = ("meta", "img", "br", "link", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    return reader


def test_a_run_writes_its_own_page_with_pictures_over_time(run: Path) -> None:
    text = (run / "report.html").read_text()
    reader = read(text)
    moments = sorted(int(path.stem.removeprefix("step_")) for path in (run / "pictures").glob("step_*.jpg"))
    assert moments[0] == 0
    assert moments[-1] == 8  # 2 epochs of 4 steps
    assert len(moments) >= 5
    with Image.open(run / "pictures" / "step_0.jpg") as first, Image.open(run / "pictures" / "images.jpg") as shown:
        assert first.size == shown.size
    assert len(reader.links) == 1 + len(moments)
    assert all(link.startswith("data:image/jpeg;base64,") for link in reader.links)  # nothing from anywhere
    assert "default-src 'none'" in text
    for name in (
        "Loss",
        "Global loss",
        "Query loss",
        "kNN accuracy",
        "Entropy of targets",
        "Effective rank of [CLS]",
        "Images per second",
    ):
        assert f"<b>{name}" in text
    assert "Masked loss" not in text  # it was not used
    assert ">finished<" in text
    assert "method.head_hidden_dim" in text
    assert text.count("data:image") == len(reader.links)


def test_what_was_evaluated_beside_the_run_is_on_the_page(run: Path, adclr: Adclr) -> None:
    done = adclr("report", run)
    assert done.returncode == 0, done.stderr
    assert str(run / "report.html") in done.stdout
    text = (run / "report.html").read_text()
    assert "knn_top1 <b>43.25 %</b>" in text
    assert "flowers" in text
    assert text.count("<b>knn, from scratch</b>") == text.count("<b>knn</b>") == 1
    assert "broken" not in text


def test_an_evaluation_brings_the_page_of_its_run_up_to_date(
    run: Path, images: Path, tmp_path: Path, adclr: Adclr
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "evals")
    report.write_report([str(folder)], None)
    page = folder / "report.html"
    command = ["evaluate", "knn", "--weights", folder, "--data", images, "k=3"]
    done = adclr(*command, "--out", tmp_path / "elsewhere.json")
    assert done.returncode == 0, done.stderr
    assert "<b>knn</b>" not in page.read_text()  # scores elsewhere are not on it
    done = adclr(*command)
    assert done.returncode == 0, done.stderr
    assert page.read_text().count("<b>knn</b>") == 1
    page.write_text("my notes")
    done = adclr(*command, "features=both")
    assert done.returncode == 0, done.stderr
    assert page.read_text() == "my notes"
    page.unlink()
    done = adclr(*command, "features=mean_patch")
    assert done.returncode == 0, done.stderr
    assert not page.exists()  # who switched it off does not get one


def test_runs_side_by_side(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "second"
    shutil.copytree(run, other)
    changed = (other / "settings.yaml").read_text().replace("num_queries: 2", "num_queries: 0")
    (other / "settings.yaml").write_text(changed)
    out = report.write_report([str(run), str(other)], tmp_path / "both.html")
    text = out.read_text()
    read(text)
    table = text.split("Differences in settings")[1].split("</section>")[0]
    assert re.findall(r"<code>([\w.]+)</code></td><td>(\w+)</td><td>(\w+)<", table) == [("views.num_queries", "2", "0")]
    assert text.count('data-name="second"') == text.count('data-name="first"') > 5
    with pytest.raises(UserError, match="say where it goes with --out"):
        report.write_report([str(run), str(other)], None)
    same = tmp_path / "x" / "second"
    shutil.copytree(other, same)
    apart = report.write_report([str(other), str(same)], tmp_path / "apart.html").read_text()
    assert f"<b>{same}</b>" in apart
    assert "None: all settings are the same" in apart


@pytest.fixture(scope="module")
def long(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 100 000 steps with 10 000 lines of 23 measures."""
    long = tmp_path_factory.mktemp("runs") / "long"
    shutil.copytree(run, long)
    names = [f"measure_{i}" for i in range(20)]
    with open(long / "metrics.jsonl", "w") as metrics, open(long / "timing.jsonl", "w") as timing:
        for step in range(10, 100_001, 10):
            row = {
                "step": step,
                "epoch": step / 100,
                "loss": 5 + math.sin(step),
                "loss_global": 4.0,
                "teacher_entropy": 0.5,
            }
            metrics.write(json.dumps(row | dict.fromkeys(names, 1.0 / step)) + "\n")
            timing.write(json.dumps({"step": step, "seconds": 2.0, "images_per_second": 1000.0}) + "\n")
    return long


def test_a_page_of_ten_thousand_lines_is_small(long: Path) -> None:
    out = report.write_report([str(long)], None)
    assert out.stat().st_size < 5_000_000
    text = out.read_text()
    assert max(len(points.split()) for points in re.findall(r'points="([^"]+)"', text)) <= charts.MAX_POINTS
    assert "measure 19" in text  # a metric that has no title is drawn all the same


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine (apt-get install chromium)")
def test_a_page_of_ten_thousand_lines_opens_at_once(long: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    page_file = report.write_report([str(long)], None)
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        times, errors = [], []
        for _ in range(3):
            page = browser.new_page()
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            started = time.monotonic()
            page.goto(page_file.as_uri())  # until everything in it is loaded, its script included
            page.evaluate("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
            times.append(time.monotonic() - started)
        chart = page.locator(".chart svg").first
        chart.scroll_into_view_if_needed()
        chart.hover()
        assert page.locator(".chart .read").first.inner_text().startswith("epoch ")
        assert page.evaluate("document.querySelectorAll('.chart polyline').length") > 20
        browser.close()
    assert errors == []
    assert min(times) < 2 * max(1.0, os.getloadavg()[0] / 2), times  # of 2 cores, which others may be using


def test_healthy_ranges_are_shaded(run: Path) -> None:
    """Those that depend on the untrained network, and those that do not."""
    text = render_page([read_record(run)])
    figures = dict(re.findall(r'<figure class="chart"><figcaption><b>([^<]+)</b>(.*?)</figure>', text, re.DOTALL))
    untrained = read_record(run).health_rows[0]
    kl = max(3e-4, 0.02 * untrained["target_kl"])
    for title, healthy in {
        "KL of targets to their mean, nats": f"above {kl:.2g}",
        "Effective rank of [CLS]": f"above {max(1.2, 0.1 * untrained['rank_cls']):.2g}",
        "Effective rank of patches": f"above {max(1.2, 0.1 * untrained['rank_patches']):.2g}",
        "Effective rank of queries": f"above {max(1.2, 0.1 * untrained['rank_queries']):.2g}",
        "Global loss / ln K": "0 to 1",
    }.items():
        assert f"healthy {healthy}<" in figures[title], title
        (height,) = re.findall(r'class="band"[^>]* height="([\d.]+)"', figures[title])
        assert float(height) > 10, title  # pixels
    for title in ("Global loss", "Query loss"):
        assert 'class="level"' in figures[title]
        caption, drawn = figures[title].split("</figcaption>")
        assert "; dashed line: ln 32, the loss of uniform outputs" in caption
        assert "uniform" not in drawn  # where a curve near the line would run through it
    for title in ("Prototypes in use", "Entropy of targets"):  # no range is known
        assert 'class="band"' not in figures[title]


def test_the_page_shows_how_the_time_was_spent(run: Path) -> None:
    record = read_record(run)
    assert all(record.overheads[part] > 0 for part in ("looking", "saving", "drawing", "probing"))
    text = render_page([record])
    shown = re.search(r'class="split" role="img" aria-label="([^"]+)"', text)
    assert shown
    shares = [float(share) for share in re.findall(r"([\d.]+)%", shown[1])]
    assert len(shares) == 6
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_rows_of_the_strips_have_names(run: Path) -> None:
    text = render_page([read_record(run)])
    assert text.count("<span>components</span>") == 3
    with Image.open(run / "pictures/images.jpg") as strip:
        assert f'class="rows" style="height:{strip.height}px"' in text


def test_the_status_names_collapses_scores_and_void_steps(run: Path, tmp_path: Path) -> None:
    def status(rows: list[dict[str, object]]) -> str:
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copy(run / "settings.yaml", folder)
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": n} | row) + "\n" for n, row in enumerate(rows))
        )
        return " ".join(statement.text for statement in describe_status(read_record(folder)))

    def measures(kl: float, entropy: float = 0.9, rank: float = 8.0) -> dict[str, object]:
        return {"target_kl": kl, "target_entropy": entropy, "rank_cls": rank}

    assert "Uniform collapse" in status([measures(0.2), *[measures(1e-5, 0.99)] * 3])
    assert "Constant collapse" in status([measures(0.2), *[measures(1e-5, 0.01)] * 3])
    assert "Dimensional collapse" in status([measures(0.2), *[measures(0.2, rank=1.0)] * 3])
    assert "No collapse" in status([measures(0.2)] * 4)
    assert status([measures(1e-5)]) == ""  # too early to say
    assert "no sign of learning" in status([{"knn_top1": 30.0}, {"knn_top1": 25.0}])
    assert "it was 50.0 % before" in status([{"knn_top1": 30.0}, {"knn_top1": 50.0}, {"knn_top1": 40.0}])
    assert "3 steps had no effect" in status([{"voided_steps": 3}])
    assert "it collapses" in status([{"health": "it collapses"}, {"health": "it collapses"}])


def test_damaged_and_hostile_files_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    bad = tmp_path / "<script>alert(1)"
    bad.mkdir()
    (bad / "settings.yaml").write_text("recipe: '<img src=x onerror=alert(1)>'\nunknown: {a: 1}\n")
    rows = [
        '{"step": 1, "loss": NaN, "x\\"><script>": 1}',
        "[1]",
        '{"step": "a", "loss": 1}',
        '{"step": 2, "loss": 1e999',
        "\x00",
    ]
    (bad / "metrics.jsonl").write_text("\n".join(rows) + '\n{"step": 3, "loss": 2.5, "epoch": true, "note": "<b>hi"}\n')
    (bad / "provenance.json").write_text('[{"command": ["x", "<i>"], "packages": 3}, 5]')
    (bad / "results.json").write_text("{")
    (bad / "timing.jsonl").write_bytes(b"\xff\xfe\n")
    (bad / "pictures").mkdir()
    (bad / "pictures/step_x.jpg").write_bytes(b"1")
    text = report.write_report([str(bad)], tmp_path / "bad.html").read_text()
    read(text)
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert "<b>hi" not in text
    assert "ends at 2.5" in text
    for damaged in ("metrics.jsonl", "settings.yaml"):
        (bad / damaged).write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match="holds no run"):
        report.write_report([str(bad)], tmp_path / "bad.html")
    with pytest.raises(UserError, match="does not exist"):
        report.write_report([str(tmp_path / "nowhere")], None)


def test_pictures_of_a_run_that_starts_anew_or_goes_on(run: Path, images: Path, tmp_path: Path) -> None:
    copy = tmp_path / "again"
    shutil.copytree(run, copy)
    weights = load_weights(copy)
    source = ImageFolder(images / "train")
    chosen = choose_images(source, weights)
    assert [seen.name for seen, _ in chosen] == [seen.name for seen, _ in choose_images(source, weights)]
    assert all(seen.pixels.shape == (3, 32, 32) for seen, _ in chosen)
    before = {path.name: path.read_bytes() for path in (copy / "pictures").iterdir()}
    live = LiveReport(Run(copy), weights, source, 8)
    live.begin(4)
    assert {path.name for path in (copy / "pictures").iterdir()} == set(before)
    live.begin(0)
    assert {path.name for path in (copy / "pictures").iterdir()} == {"images.jpg", "step_0.jpg"}


def test_a_disk_that_fails_stops_no_training(
    run: Path, images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(live_module, "write_atomically", full)
    live = LiveReport(Run(run), load_weights(run), ImageFolder(images / "train"), 8)
    live.begin(1)
    live(8)
    assert capsys.readouterr().err.count("No space left") == 1


def test_ticks_are_round_and_cover_the_range() -> None:
    for low, high in ((0, 1), (0.0123, 0.0456), (-3, 17), (99.5, 100.5), (1e-7, 3e-7), (0, 123456)):
        ticks = charts.Axis(low, high, 0, 1).ticks()
        assert 3 <= len(ticks) <= 8
        assert low - 1e-9 <= ticks[0]
        assert ticks[-1] <= high + 1e-9 * abs(high)
        steps = {round((b - a) / (ticks[1] - ticks[0]), 6) for a, b in pairwise(ticks)}
        assert steps == {1.0}
    assert charts.Axis(2, 2, 0, 1).ticks() == [2]


def test_averages_of_points_keep_the_mean_and_show_no_spike_at_the_end() -> None:
    for count in (101, 150, 4999, 5000, 5001):
        points = [(float(n), float(n % 7)) for n in range(count - 1)] + [(float(count - 1), 100.0)]
        averages = charts.average_points(points, 100)
        assert len(averages) == 100
        assert averages[-1][0] == pytest.approx(count, rel=0.02)
        assert sum(y for _, y in averages) / len(averages) == pytest.approx(sum(y for _, y in points) / count, abs=0.5)
        assert averages[-1][1] <= 100 / (count // 100) + 6  # the last point is a mean as all the others are
    assert charts.average_points(points[:50], 100) == points[:50]


def test_components_keep_their_colors_from_moment_to_moment(
    run: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_weights(run)
    chosen = choose_images(ImageFolder(images / "train"), weights)
    first = live_module.draw_strip(weights, chosen)
    basis = analysis.fit_basis

    def turned(features: torch.Tensor) -> analysis.Basis:
        """As good a basis: another order, other signs."""
        original = basis(features)
        swap, signs = [2, 0, 1], torch.tensor([1.0, -1.0, -1.0])
        directions = (original.directions * signs[:, None])[swap]
        low, high = np.percentile(((features.double() - original.mean) @ directions.T).numpy(), (1, 99), axis=0)
        return analysis.Basis(original.mean, directions, low, high, original.explained[swap])

    monkeypatch.setattr(analysis, "fit_basis", turned)

    def distance(strip: Image.Image) -> float:
        return float(np.abs(np.asarray(strip, np.float64) - np.asarray(first, np.float64)).mean())

    assert distance(live_module.draw_strip(weights, chosen)) > 10
    assert distance(live_module.draw_strip(weights, chosen, first)) < 0.01
    assert distance(live_module.draw_strip(weights, chosen, first.resize((10, 10)))) > 10  # not a strip of these


def test_the_previous_strip_is_read_from_disk(tmp_path: Path) -> None:
    assert live_module.read_last_strip(tmp_path / "nowhere", 5) is None
    for step, color in ((2, "red"), (10, "blue"), (30, "lime")):
        Image.new("RGB", (8, 8), color).save(tmp_path / f"step_{step}.jpg")
    strip = live_module.read_last_strip(tmp_path, 30)
    assert strip is not None
    assert strip.getpixel((4, 4))[2] > 200  # type: ignore[index]
    assert live_module.read_last_strip(tmp_path, 2) is None
    (tmp_path / "step_20.jpg").write_bytes(b"broken")
    assert live_module.read_last_strip(tmp_path, 30) is None


def test_a_chart_of_little_is_a_chart() -> None:
    assert charts.layout_chart("x", [charts.Line("a", [])]) is None
    macros = charts.TEMPLATES.get_template("report/chart.html.j2").module
    for points in ([(0.0, 0.0)], [(0.0, 5.0), (1.0, 5.0)], [(0.0, -1e-12), (1.0, 1e29)]):
        chart = charts.layout_chart("x", [charts.Line("a", points)], band=charts.Band(0.1, 0.9), floor=0)
        text = str(macros.draw_chart(chart))  # type: ignore[attr-defined]
        assert "nan" not in text
        assert "inf" not in text
        read(text)
    assert format_run_time(3725) == "1 h 02 min"
    assert format_run_time(65) == "1 min 5 s"
