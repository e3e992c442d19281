"""The page itself: one HTML file that needs nothing beside it, in dark and light, on a desk and in a hand."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from adclr import __version__, evals
from adclr.config.sections import flatten
from adclr.config.settings import Settings
from adclr.data.jpeg import read_header
from adclr.evals.wording import is_percent
from adclr.report import measures
from adclr.report.charts import Line, chart, legend, number
from adclr.report.measures import Measure
from adclr.report.story import Scores, Story, changed, differences
from adclr.system import outputs

# rows of a strip, of each image
KINDS = {"[CLS]": "where [CLS] looks", "query": "where a query looks", "components": "components of the patches"}
STRIP = 104  # pixels, its width on the page
# what `story.PARTS` are called
SPENT = {
    "waiting_for_images": "waiting for images",
    "looking": "measuring health",
    "saving": "saving checkpoints",
    "drawing": "pictures and this page",
    "probing": "probes",
}
ALWAYS = ("head", "how", "epochs")  # settings of evaluations that are shown even if they are the default
STARTS = ("started", "from_step", "device", "precision", "processes", "images")  # of provenance.json
MOST_MOMENTS = 10  # shown of a run


def render(stories: Sequence[Story]) -> str:
    """The report of one run, or of several side by side."""
    title = stories[0].name if len(stories) == 1 else f"{len(stories)} runs"
    one = stories[0] if len(stories) == 1 else None
    names = [story.name for story in stories]
    sections = [
        _head(stories, title),
        _section("health", "How it is", _words(stories)),
        _section("differences", "What differs in the settings", _differences(stories)) if not one else "",
        _section("losses", "Losses", _charts(stories, measures.with_levels(stories))),
        _section("scores", "Scores while training", _charts(stories, measures.SCORES)),
        _section("measures", "Health", _charts(stories, measures.with_bands(stories) | measures.others(stories))),
        _section("pictures", "What it sees, over training", "".join(_pictures(story, not one) for story in stories)),
        _section("evaluations", "Evaluations", _evaluations(stories)),
        _section("speed", "Speed", _charts(stories, measures.SPEED) + _time(stories)),
        _section("run", "What was run", "".join(_run(story, not one) for story in stories)),
        _section("schedules", "Schedules", _charts(stories, measures.SCHEDULES)),
    ]
    key = "" if one else legend(names)
    written = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · adclr</title>'
        f'<meta name="generator" content="{outputs.words("report")} {__version__}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        f"<style>{_part('style.css')}</style></head><body><main>{sections[0]}{key}{''.join(sections[1:])}"
        f"<footer>written {written} by adclr {__version__}</footer></main>"
        f"<script>{_part('chart.js')}</script></body></html>\n"
    )


def _part(name: str) -> str:
    return (resources.files("adclr") / "report" / name).read_text(encoding="utf-8")


def _section(name: str, title: str, body: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>{body}</section>' if body else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>' if body else ""


def duration(seconds: float) -> str:
    hours, minutes = int(seconds // 3600), int(seconds % 3600 // 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds % 60:.0f} s" if minutes else f"{seconds:.1f} s"


# -- what stands on top --


def _facts(story: Story) -> dict[str, str]:
    knn, speed = story.knn(), story.results and story.results.get("images_per_second")
    if not isinstance(speed, int | float):
        speed = story.last("images_per_second")
    total = story.settings.get("train.epochs")
    epochs = "–" if story.epochs is None else number(round(story.epochs, 1))
    return {
        "state": story.state,
        "epochs": f"{epochs} of {total}" if total else epochs,
        "steps": str(story.step),
        "loss": "–" if story.last("loss") is None else number(story.last("loss") or 0.0),
        "kNN": "–" if knn is None else f"{knn:.1f} %",
        "images/s": "–" if speed is None else f"{speed:.0f}",
        "time": duration(story.seconds),
    }


def _head(stories: Sequence[Story], title: str) -> str:
    if len(stories) > 1:
        rows = [[f"<b>{escape(story.name)}</b>", *map(escape, _facts(story).values())] for story in stories]
        return f"<header><h1>{escape(title)}</h1>{_table(['run', *_facts(stories[0])], rows)}</header>"
    (story,) = stories
    tiles = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in _facts(story).items())
    about = f"{story.settings.get('recipe') or 'no recipe'} · {story.path}"
    return f'<header><h1>{escape(title)}</h1><p>{escape(about)}</p><dl class="tiles">{tiles}</dl></header>'


def _words(stories: Sequence[Story]) -> str:
    found = ""
    for story in stories:
        words = measures.verdict(story)
        items = "".join(
            f'<li class="{"good" if word.good else "bad"}">{"✓" if word.good else "!"} {escape(word.text)}</li>'
            for word in words
        )
        if items:
            found += (f"<h3>{escape(story.name)}</h3>" if len(stories) > 1 else "") + f'<ul class="words">{items}</ul>'
    return found


def _differences(stories: Sequence[Story]) -> str:
    rows = [[f"<code>{escape(name)}</code>", *map(escape, values)] for name, values in differences(list(stories))]
    if not rows:
        return "<p>Nothing: all settings are the same.</p>"
    return _table(["setting", *(escape(story.name) for story in stories)], rows)


# -- curves --


def _charts(stories: Sequence[Story], wanted: Mapping[str, Measure]) -> str:
    found = []
    for name, measure in wanted.items():
        lines = [
            Line(story.name, story.curves[name], style)
            for style, story in enumerate(stories)
            if any(value for _, value in story.curves.get(name, ()))  # a part that is not used is 0 throughout
        ]
        found.append(chart(measure.title, lines, measure.meaning, measure.healthy, measure.floor, measure.level))
    return f'<div class="charts">{"".join(found)}</div>' if any(found) else ""


def _time(stories: Sequence[Story]) -> str:
    """How the time was spent."""
    bars = ""
    for story in stories:
        if not story.seconds:
            continue
        aside = {words: story.spent[part] for part, words in SPENT.items()}
        whole = story.seconds + story.spent["probing"]
        parts = {"steps": max(0.0, whole - sum(aside.values())), **aside}
        shares = {words: min(1.0, seconds / whole) for words, seconds in parts.items()}
        text = ", ".join(f"{words} {share:.1%}" for words, share in shares.items())
        name = f"<b>{escape(story.name)}</b> " if len(stories) > 1 else ""
        colours = {words: f"background:var(--c{number})" for number, words in enumerate(parts)}
        pieces = "".join(f'<i style="{colours[words]};width:{share:.2%}"></i>' for words, share in shares.items())
        keys = "".join(
            f'<span><i style="{colours[words]}"></i> {words} {share:.1%}</span>' for words, share in shares.items()
        )
        bars += (
            f"<p>{name}{duration(whole)}</p>"
            f'<div class="split" role="img" aria-label="{text}">{pieces}</div><p class="legend">{keys}</p>'
        )
    return f'<div class="time">{bars}</div>' if bars else ""


# -- pictures --


def _pictures(story: Story, named: bool) -> str:
    """Strips side by side, the first with the images themselves, then one for each moment."""
    if not story.moments:
        return ""
    first, *later = story.moments
    step = max(1, -(-len(later) // (MOST_MOMENTS - 1)))
    chosen = [first, *later[::-1][::step][::-1]]
    per_epoch = story.steps_per_epoch or 0.0
    strips, rows = [], ""
    images = story.moments[0].file.with_name("images.jpg")
    for label, file in [("images", images), *((_moment(m.step, per_epoch), m.file) for m in chosen)]:
        try:
            held = file.read_bytes()
        except OSError:
            continue
        data, rows = base64.b64encode(held).decode(), rows or _rows(held)
        strips.append(
            f'<figure><figcaption>{label}</figcaption><img alt="{label}" src="data:image/jpeg;base64,{data}"></figure>'
        )
    title = f"<h3>{escape(story.name)}</h3>" if named else ""
    about = (
        f"<p>Of each image, from top to bottom: {'; '.join(KINDS.values())}. Maps are from dark, 0, to bright, the top "
        "0.5 % of patches and at least twice the mean. Components are drawn as red, green and blue, in the order and "
        "with the signs nearest to the moment before: only which patches have one colour means anything.</p>"
    )
    return f'{title}{about}<div class="film" tabindex="0">{rows}{"".join(strips)}</div>'


def _rows(strip: bytes) -> str:
    """The names of the rows of a strip, whose cells are squares."""
    header = read_header(strip)
    if header is None or not header.width:
        return ""
    names = (list(KINDS) * (header.height // header.width))[: header.height // header.width]
    cells = "".join(f"<span>{name}</span>" for name in names)
    return f'<div class="rows" style="height:{header.height * STRIP / header.width:.0f}px">{cells}</div>'


def _moment(step: int, per_epoch: float) -> str:
    return f"epoch {number(round(step / per_epoch, 1))}" if per_epoch else f"step {step}"


# -- tables --


def _evaluations(stories: Sequence[Story]) -> str:
    every = [scores for story in stories for scores in story.scores]
    rows = []
    for story in stories:
        for scores in story.scores:
            alike = [other.settings for other in every if other.evaluation == scores.evaluation]
            numbers = ", ".join(
                f"{escape(name)} <b>{_score(name, value)}</b>"
                for name, value in scores.numbers.items()
                if name != "num_steps"  # which stands among the settings
            )
            name = scores.evaluation + (", from scratch" if scores.from_scratch else "")
            cells = [f"<b>{escape(name)}</b>", escape(scores.data), escape(_settings(scores, alike)), numbers]
            cells.append(escape(scores.when[:16]))
            rows.append(cells if len(stories) == 1 else [escape(story.name), *cells])
    head = ["evaluation", "data", "settings", "scores", "when"]
    return _table(head if len(stories) == 1 else ["run", *head], rows)


def _score(name: str, value: float) -> str:
    return f"{value:.2f} %" if is_percent(name) else number(value)


def _settings(scores: Scores, alike: Sequence[Mapping[str, Any]]) -> str:
    """Returns the settings that tell an evaluation from others of its name, or from the default, and its steps."""
    words = []
    defaults = _defaults(scores.evaluation)
    for name, value in scores.settings.items():
        differs = any(other.get(name) != value for other in alike) or (name in defaults and defaults[name] != value)
        if value is not None and name != "steps" and (name in ALWAYS or differs):
            words.append(f"{name}={value if isinstance(value, str) else json.dumps(value)}")
    if "num_steps" in scores.numbers:
        words.append(f"{scores.numbers['num_steps']:.0f} steps")
    return ", ".join(words)


@cache
def _defaults(evaluation: str) -> Mapping[str, Any]:
    """Returns the default settings of an evaluation by full name; none if this version does not have it."""
    if evaluation not in evals.NAMES:
        return {}
    return flatten(evals.module(evaluation).Settings().model_dump(mode="json"))


def _run(story: Story, named: bool) -> str:
    defaults = flatten(Settings().model_dump(mode="json"))
    rows = [
        [f"<code>{escape(name)}</code>", f"<b>{_value(value)}</b>", _value(default)]
        for name, value, default in changed(story, defaults)
    ]
    every = [[f"<code>{escape(name)}</code>", _value(value)] for name, value in story.settings.items()]
    starts = [
        [escape(str(start.get(name, "–"))) for name in STARTS]
        + [escape(str(start.get("commit") or start.get("adclr") or "–")[:12]), f"<code>{_command(start)}</code>"]
        for start in story.starts
    ]
    every_table = _table(["setting", "value"], every)
    found = (
        _table(["setting, where it is not the default", "value", "default"], rows)
        + (f"<details><summary>all {len(every)} settings</summary>{every_table}</details>" if every else "")
        + _table([name.replace("_", " ") for name in (*STARTS, "commit", "command")], starts)
        + _packages(story)
    )
    return f"<details><summary>{escape(story.name)}</summary>{found}</details>" if named else found


def _value(value: Any) -> str:
    return escape(value if isinstance(value, str) and value else json.dumps(value))


def _command(start: Mapping[str, Any]) -> str:
    words = start.get("command")
    return escape(" ".join(["adclr", *map(str, words[1:])])) if isinstance(words, list) and words else "–"


def _packages(story: Story) -> str:
    """Of the last start."""
    if not story.starts:
        return ""
    last = story.starts[-1]
    packages = last.get("packages")
    versions = [f"{name} {version}" for name, version in packages.items()] if isinstance(packages, dict) else []
    text = ", ".join(
        [f"adclr {last.get('adclr')}", f"Python {last.get('python')}", *versions, str(last.get("platform"))]
    )
    return f"<p>{escape(text)}</p>"
