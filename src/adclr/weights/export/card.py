"""The model card of exported weights: what they are, how they were trained and what they score, from the run's files.

No path of the machine is in it, since a card is made to be given away: a collection is named by the last part of its
path. `card.md.jinja` is the text.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from adclr.config.distillation import DistillSettings
from adclr.config.parsing import UserError, flatten
from adclr.config.settings import Settings
from adclr.system.files import read_json
from adclr.system.runs import Run
from adclr.system.text import printable
from adclr.weights.backbone import Weights, describe_positions


def find_run(weights: str) -> Run | None:
    """Return the run that weights belong to; None if they are not a run's."""
    is_folder = os.path.isdir(weights)
    folder = Path(weights) if is_folder else Path(weights).parent
    run = Run(folder)
    if not is_folder and Path(weights).name != "backbone.safetensors":
        return None
    return run if (folder / "settings.yaml").exists() and run.settings() is not None else None


def write(
    weights: Weights, run: Run | None, library: str, usage: str, notes: Iterable[str], checks: Iterable[str]
) -> str:
    """Return the card as Markdown."""
    settings = run.settings() if run else None
    loader = PackageLoader("adclr.weights.export", "")
    # Markdown is not escaped as HTML; `cell` escapes what names of files and settings may hold
    environment = Environment(loader=loader, autoescape=False, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["cell"] = _cell
    return environment.get_template("card.md.jinja").render(
        library=library,
        title=_title(weights, run),
        summary=_summary(weights, settings),
        usage=usage.strip(),
        images=_images(weights),
        architecture=_architecture(weights),
        training=_training(run, settings) if run and settings else None,
        settings=_changed_settings(settings) if settings else None,
        scores=_scores(run) if run else [],
        notes=[*checks, *notes],
        origin=None if run or weights.report is None else "\n".join(_report_lines(weights)),
    )


def _architecture(weights: Weights) -> dict[str, object]:
    vit, parameters = weights.vit, f"{sum(p.numel() for p in weights.vit.parameters()):,}"
    if weights.network is not None:
        name, (rows, columns) = weights.network.name, weights.network.grid
        widths = f"{weights.network.dim} of the vector, {weights.patch_dim} of the map"
        return {"network": name, "width": widths, "map": f"{rows}x{columns}", "parameters": parameters}
    return {
        "blocks, width, heads": f"{vit.depth}, {vit.dim}, {vit.num_heads}",
        "patches": f"{vit.patch_size}x{vit.patch_size} pixels",
        "registers": vit.num_registers,
        **({"class-attention blocks": vit.class_attention} if vit.class_attention else {}),
        "LayerScale": "yes" if vit.layer_scale else "no",
        "parameters": parameters,
        "positions at other sizes": describe_positions(vit),
    }


def _title(weights: Weights, run: Run | None) -> str:
    vit, suffix = weights.vit, f", {_cell(run.path.resolve().name)}" if run else ""
    if weights.network is not None:
        return f"{_cell(weights.network.name)}{suffix}"
    letter = {192: "Ti", 384: "S", 768: "B", 1024: "L", 1280: "H"}.get(vit.dim, f"{vit.depth}x{vit.dim}")
    return f"ViT-{letter}/{vit.patch_size}{suffix}"


def _summary(weights: Weights, settings: Settings | None) -> str:
    if settings is None:
        layout = weights.report.layout if weights.report else "unknown"
        return f"A Vision Transformer whose weights come from a file of the layout {layout}, exported by ADCLR."
    if isinstance(settings, DistillSettings):
        kind = "A Vision Transformer" if weights.network is None else "A network"
        teacher = last_part(settings.distill.teacher)
        return f"{kind} distilled without labels by ADCLR to reproduce the features of {_cell(teacher)}."
    method = "ADCLR" if settings.views.num_queries and settings.method.query_weight else "DINO"
    if settings.masked:
        method = "ADCLR*" if method == "ADCLR" else "iBOT"
    if settings.method.neighbor_weight:
        method = "SelfPatch"
    return f"A Vision Transformer trained without labels by {method}; these are the weights of the teacher's backbone."


def _images(weights: Weights) -> dict[str, object]:
    height, width = weights.vit.input_size
    mean, std = ("[" + ", ".join(f"{x:.6g}" for x in values) + "]" for values in (weights.mean, weights.std))
    divisible = f" that is divisible by {weights.vit.patch_size}" if weights.network is None else ""
    rows: dict[str, object] = {
        "size": f"{height}x{width} pixels; any other{divisible}",
        "channels": weights.vit.num_channels,
        "values": f"0 to 1, minus mean {mean}, divided by standard deviation {std}",
    }
    return rows | ({"white": weights.max_value} if weights.max_value else {})


def _training(run: Run, settings: Settings) -> dict[str, object]:
    results = read_json(run.path / "results.json") if run.finished else {}
    results = results if isinstance(results, dict) else {}
    starts = [start for start in run.starts() if isinstance(start, dict)]
    last = starts[-1] if starts else {}
    versions, seconds = last.get("packages") or {}, results.get("seconds_training")
    rows = {
        "recipe": last_part(settings.recipe),
        "images": last.get("images"),
        "collection": f"{last_part(settings.data.path)}, {last.get('collection')}",
        "epochs": settings.train.epochs,
        "steps": results.get("steps") or f"{run.steps()[-1] if run.steps() else 0}, unfinished",
        "batch": settings.train.batch_size,
        "hours": f"{seconds / 3600:.2f}" if isinstance(seconds, int | float) else None,
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


def _changed_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that are not the defaults."""
    defaults = flatten(type(settings)().model_dump(mode="json"))
    return {
        name: last_part(value) if isinstance(value, str) else value
        for name, value in flatten(settings.model_dump(mode="json")).items()
        if value != defaults[name]
    }


def _scores(run: Run) -> list[tuple[str, str, str, str]]:
    """Return (evaluation, data, name, score) of the evaluations in the run; files of another kind are passed over.

    A control is named as one, since its scores are not those of the weights; the scores of classes stay in the file.
    """
    rows = []
    for path in sorted(run.path.glob("evals/*/*.json")):
        try:
            record = read_json(path)
        except UserError:
            continue
        parts = (record.get("scores"), record.get("settings")) if isinstance(record, dict) else (None, None)
        scores, settings = ({} if not isinstance(part, dict) else part for part in parts)
        data = settings.get("data", "")
        data_name = " + ".join(last_part(str(one)) for one in (data if isinstance(data, list) else [data]))
        evaluation = path.parent.name + (", from scratch" if settings.get("from_scratch") else "")
        for name, value in scores.items():
            if isinstance(value, int | float) and not name.startswith("num_"):
                score = f"{value:g}" if 0 < abs(value) < 1 else f"{value:.2f}"  # learning rates are small
                rows.append((evaluation, data_name, name, score))
    return rows


def _report_lines(weights: Weights) -> list[str]:
    assert weights.report is not None
    source = weights.report.source
    return [line.replace(source, last_part(source)) for line in weights.report.lines()]


def last_part(path: str) -> str:
    """Return the last part of a path, without the folders before it."""
    return os.path.basename(path.rstrip("/")) or path


def _cell(value: object) -> str:
    """Return a value as the text of a table's cell, on one line, with its separators escaped."""
    return printable(" ".join(str(value).split()).replace("|", "\\|"))
