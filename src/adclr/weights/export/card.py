"""The model card of exported weights: what they are, how they were made and what they score, from the run's own files.

Paths of the machine stay out of it, for a card is made to be given away: a collection is named by its last part.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from adclr.config.sections import UserError, flatten
from adclr.config.settings import Settings
from adclr.system.files import read_json
from adclr.system.runs import Run
from adclr.system.text import printable
from adclr.weights.backbone import RESAMPLED, Weights

HEADER = """---
library_name: {library}
pipeline_tag: image-feature-extraction
tags: [self-supervised-learning, vision-transformer, adclr]
---
"""


def find_run(weights: str) -> Run | None:
    """The run whose weights these are, if they are a run's."""
    folder = Path(weights) if os.path.isdir(weights) else Path(weights).parent
    named_so = os.path.isdir(weights) or Path(weights).name == "backbone.safetensors"
    run = Run(folder)
    return run if named_so and (folder / "settings.yaml").exists() and run.settings() is not None else None


def write(
    weights: Weights, run: Run | None, library: str, usage: str, notes: Iterable[str], checked: Iterable[str]
) -> str:
    """Markdown."""
    vit = weights.vit
    sections = [
        HEADER.format(library=library) + f"\n# {_title(weights, run)}\n\n{_first_words(weights, run)}",
        f"## Use\n\n{usage.strip()}",
        "## Images\n\n" + _table(_images(weights)),
        "## Architecture\n\n"
        + _table(
            {
                "blocks, width, heads": f"{vit.depth}, {vit.dim}, {vit.num_heads}",
                "patches": f"{vit.patch_size}x{vit.patch_size} pixels",
                "registers": vit.num_registers,
                "LayerScale": "yes" if vit.layer_scale else "no",
                "parameters": f"{sum(p.numel() for p in vit.parameters()):,}",
                "positions at other sizes": RESAMPLED[vit.position_resampling],
            }
        ),
    ]
    if run is not None:
        settings = run.settings()
        assert settings is not None
        sections += ["## Training\n\n" + _table(_training(run, settings)), _settings(settings)]
        scores = _scores(run)
        if scores:
            sections.append("## Scores\n\n| evaluation | data | score | |\n|---|---|---|---|\n" + "\n".join(scores))
    told = [*checked, *notes]
    if told:
        sections.append("## Good to know\n\n" + "\n".join(f"- {line}" for line in told))
    if run is None and weights.report is not None:
        sections.append("## Where the weights are from\n\n```text\n" + "\n".join(_without_path(weights)) + "\n```")
    return "\n\n".join(sections) + "\n"


def _title(weights: Weights, run: Run | None) -> str:
    vit = weights.vit
    letter = {192: "Ti", 384: "S", 768: "B", 1024: "L", 1280: "H"}.get(vit.dim, f"{vit.depth}x{vit.dim}")
    return f"ViT-{letter}/{vit.patch_size}" + (f", {_cell(run.path.resolve().name)}" if run else "")


def _first_words(weights: Weights, run: Run | None) -> str:
    settings = run.settings() if run else None
    if settings is None:
        layout = weights.report.layout if weights.report else "unknown"
        return f"A Vision Transformer whose weights come from a file of the layout {layout}, exported by ADCLR."
    method = "ADCLR" if settings.views.num_queries and settings.method.query_weight else "DINO"
    if settings.masked:
        method = "ADCLR*" if method == "ADCLR" else "iBOT"
    return f"A Vision Transformer trained without labels by {method}; these are the weights of the teacher's backbone."


def _images(weights: Weights) -> dict[str, object]:
    height, width = weights.vit.input_size
    shown: dict[str, object] = {
        "size": f"{height}x{width} pixels; any other that is divisible by {weights.vit.patch_size}",
        "channels": weights.vit.num_channels,
        "values": f"0 to 1, minus {_numbers(weights.mean)}, over {_numbers(weights.std)}",
    }
    return shown | ({"white": weights.max_value} if weights.max_value else {})


def _training(run: Run, settings: Settings) -> dict[str, object]:
    results = read_json(run.path / "results.json") if run.finished else {}
    starts = [start for start in run.starts() if isinstance(start, dict)]
    last, steps = starts[-1] if starts else {}, results.get("steps") if isinstance(results, dict) else None
    versions = last.get("packages") or {}
    rows = {
        "recipe": last_part(settings.recipe),
        "images": last.get("images"),
        "collection": f"{last_part(settings.data.path)}, {last.get('collection')}",
        "epochs": settings.train.epochs,
        "steps": steps or f"{run.steps()[-1] if run.steps() else 0}, unfinished",
        "batch": settings.train.batch_size,
        "hours": _hours(results),
        "device": last.get("device"),
        "processes": last.get("processes"),
        "precision": last.get("precision"),
        "adclr": last.get("adclr"),
        "commit": last.get("commit"),
        "torch": versions.get("torch") if isinstance(versions, dict) else None,
        "started": starts[0].get("started") if starts else None,
        "resumed": f"{len(starts) - 1} times" if len(starts) > 1 else None,
    }
    return {name: value for name, value in rows.items() if value}


def _hours(results: Any) -> str | None:
    seconds = results.get("seconds_training") if isinstance(results, dict) else None
    return f"{seconds / 3600:.2f}" if isinstance(seconds, int | float) else None


def _settings(settings: Settings) -> str:
    """Those that are not the defaults."""
    plain = flatten(Settings().model_dump(mode="json"))
    changed = {
        name: last_part(value) if isinstance(value, str) else value
        for name, value in flatten(settings.model_dump(mode="json")).items()
        if value != plain[name]
    }
    return "Settings that are not the defaults:\n\n" + _table(changed)


def _scores(run: Run) -> list[str]:
    """Rows of the evaluations that lie in the run; a file that is not one of ours is passed over.

    Of a control it is said that it is one, for its scores are not of these weights; classes are left to the file.
    """
    rows = []
    for path in sorted(run.path.glob("evals/*/*.json")):
        try:
            found = read_json(path)
        except UserError:
            continue
        parts = (found.get("scores"), found.get("settings")) if isinstance(found, dict) else (None, None)
        scores, settings = ({} if not isinstance(part, dict) else part for part in parts)
        data = settings.get("data", "")
        named = " + ".join(last_part(str(one)) for one in (data if isinstance(data, list) else [data]))
        evaluation = path.parent.name + (", from scratch" if settings.get("from_scratch") else "")
        for name, value in scores.items():
            if isinstance(value, int | float) and not name.startswith("num_"):
                shown = f"{value:g}" if 0 < abs(value) < 1 else f"{value:.2f}"  # learning rates are small
                rows.append(f"| {_cell(evaluation)} | {_cell(named)} | {_cell(name)} | {shown} |")
    return rows


def _without_path(weights: Weights) -> list[str]:
    assert weights.report is not None
    source = weights.report.source
    return [line.replace(source, last_part(source)) for line in weights.report.lines()]


def last_part(path: str) -> str:
    return os.path.basename(path.rstrip("/")) or path


def _numbers(values: Iterable[float]) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in values) + "]"


def _table(rows: Mapping[str, object]) -> str:
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def _cell(value: object) -> str:
    return printable(" ".join(str(value).split()).replace("|", "\\|"))
