"""Record or check the exact results of the program: the demo, every recipe, every evaluation.

    python tests/golden/golden.py record FILE [--only demo|recipes|evaluations]
    python tests/golden/golden.py check FILE [--only ...]

FILE is JSON. Values are hashes of weights and scores with all their digits, from commands as a user runs them, with one
thread. They are the same to the bit on one machine only (processor, torch): `check` says so when the machine differs.
Use it around a change that must not change behavior: record before, check after. 13 minutes on 2 cores, 4 of them the
demo.

before_packages.json has the values of commit 3eda53c, before the modules were moved into packages, on the machine that
it names: there `check` still gives all of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from adclr import demo
from adclr.data.sets import scenes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

Values = dict[str, Any]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}

# A network as small as can be that still has every part.
TINY = [
    "views.global_size=16",
    "views.local_size=8",
    "views.num_local=2",
    "model.patch_size=4",
    "model.dim=32",
    "model.depth=2",
    "model.num_heads=2",
    "method.head_hidden_dim=24",
    "method.head_bottleneck_dim=8",
    "method.num_prototypes=32",
    "method.momentum=0.9",
    "method.teacher_temperature_warmup_epochs=1",
    "optim.warmup_epochs=0.5",
    "optim.freeze_last_layer_epochs=0.5",
    "optim.lr=0.01",
    "train.epochs=5",
    "train.batch_size=8",
    "train.log_every_steps=1",
    "train.device=cpu",
    "train.report=false",
    "train.micro_batch_size=4",
]

EVALUATIONS = {
    "knn": ("kinds", []),
    "linear": ("kinds", ["epochs=3"]),
    "finetune": ("kinds", ["epochs=2", "batch_size=8"]),
    "transfer": ("kinds", ["how=[linear]", "linear.epochs=2"]),
    "matching": ("kinds/val", []),
    "incontext": ("pixels", ["size=32"]),
    "segmentation linear": ("pixels", ["size=32", "steps=6", "batch_size=4"]),
    "segmentation fpn": ("pixels", ["head=fpn", "width=8", "size=32", "steps=4", "batch_size=4"]),
    "segmentation upernet": ("pixels", ["head=upernet", "width=8", "size=32", "steps=4", "batch_size=4"]),
    "detection": ("coco", ["sides=[32, 48]", "longest=48", "steps=3", "batch_size=2"]),
    "video": ("video", ["size=32"]),
}


def adclr(*words: object) -> str:
    """The output of a command, which must succeed."""
    command = [sys.executable, "-m", "adclr", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def machine() -> Values:
    import torch

    model = ""
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else ""
    return {
        "cpu": model or platform.processor(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def of_demo(folder: Path) -> Values:
    """The demo's run with published queries, which it had when the values were recorded."""
    images, run = folder / "demo/scenes", folder / "demo/run"
    if not images.exists():
        scenes.write_scenes(images, 0, demo.NUM_TRAIN, demo.NUM_VAL, demo.SIZE)
    adclr("pretrain", images / "train", "--out", run, "--recipe", "demo_adclr", f"probe.data={images}")
    return {"demo, published queries": digest(run / "backbone.safetensors")}


def recipe_names() -> list[str]:
    return [line.split()[0] for line in adclr("pretrain", "--list-recipes").splitlines() if line.strip()]


def kinds_of(folder: Path) -> Path:
    """Labeled scenes: train/CLASS/*.png and val/CLASS/*.png."""
    if not folder.exists():
        scenes.write_scenes(folder, seed=3, num_train=32, num_val=16, size=24, show=False)
    return folder


def of_recipes(folder: Path) -> Values:
    data, values = kinds_of(folder / "kinds"), {}
    for name in recipe_names():
        run = folder / "runs" / name
        adclr("pretrain", data / "train", "--out", run, "--recipe", name, *TINY)
        values[f"recipe {name}"] = digest(run / "backbone.safetensors")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        values[f"recipe {name}, losses"] = [row["loss"] for row in rows if "loss" in row]
    return values


def pixels_of(folder: Path) -> Path:
    if not folder.exists():
        scenes.write_pixels(folder, seed=5, first=0, num_train=8, num_val=4, size=48)
    return folder


def coco_of(folder: Path) -> Path:
    if not folder.exists():
        from dense_scenes import instances

        instances(folder, 4, 2, 48)
    return folder


def video_of(folder: Path) -> Path:
    if not folder.exists():
        from dense_scenes import clip

        clip(folder)
    return folder


def of_evaluations(folder: Path) -> Values:
    data = {"kinds": kinds_of(folder / "kinds"), "pixels": pixels_of(folder / "pixels")}
    data |= {"coco": coco_of(folder / "coco"), "video": video_of(folder / "video")}
    weights, values = folder / "weights", {}
    if not weights.exists():
        adclr("pretrain", data["kinds"] / "train", "--out", weights, "--recipe", "adclr_small", *TINY)
    for title, (place, words) in EVALUATIONS.items():
        name, out = title.split()[0], folder / f"{title.replace(' ', '_')}.json"
        adclr("evaluate", name, "--weights", weights, "--data", folder / place, "--out", out, "device=cpu", *words)
        values[f"evaluate {title}"] = json.loads(out.read_text())["scores"]
    features = folder / "features.parquet"
    adclr("embed", weights, data["kinds"] / "val", "--out", features, "device=cpu", "vector=both")
    import pyarrow.parquet as parquet

    table = parquet.read_table(features)
    vectors = np.array([list(row) for row in table["vector"].to_pylist()], np.float32)
    values["embed"] = hashlib.sha256(vectors.tobytes() + "".join(table["path"].to_pylist()).encode()).hexdigest()
    return values


PARTS: dict[str, Callable[[Path], Values]] = {"demo": of_demo, "recipes": of_recipes, "evaluations": of_evaluations}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", choices=list(PARTS), action="append", help="may be repeated")
    given = parser.parse_args()
    values: Values = {"machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        for name in given.only or PARTS:
            values |= PARTS[name](Path(folder))
            print(f"{name}: {len(values) - 1} values so far", flush=True)
    if given.action == "record":
        given.file.parent.mkdir(parents=True, exist_ok=True)
        given.file.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
        print(f"written to {given.file}")
        return
    recorded = json.loads(given.file.read_text())
    if recorded["machine"] != values["machine"]:
        raise SystemExit(f"recorded on another machine: {recorded['machine']}, this is {values['machine']}")
    names = [name for name in values if name in recorded and name != "machine"]
    changed = [name for name in names if recorded[name] != values[name]]
    for name in changed:
        print(f"{name}: recorded {recorded[name]}\n  is now {values[name]}")
    missing = [] if given.only else sorted(set(recorded) - set(values))
    print(f"{len(names) - len(changed)} of {len(names)} values are as recorded; no longer there: {missing or 'none'}")
    raise SystemExit(1 if changed or missing else 0)


if __name__ == "__main__":
    main()
