"""Images/s, ms and GiB of the training step of a distillation, with the teacher's forward pass in it.

    python benchmarks/distill.py [--only "ViT-T"] [--batch 256] [--steps 10] [--warmup 5] [--repeats 3] [--json FILE]
                                 [--tiny]

By the code that training runs, of the recipe distill_small with another teacher or student; views are noise, made once,
so there is no data path in it. Teachers have random weights, which take the same time. Each figure is the median of
several repeats within this one run, with the least and the most: compare figures of one run only. `first step after` is
the time from the settings to the end of the first step: building both networks, compiling and recording.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from adclr.config import parsing
from adclr.config.distillation import DistillSettings
from adclr.config.parsing import VIT_SIZES
from adclr.model.vit import VisionTransformer
from adclr.system import devices
from adclr.system.files import write_json
from adclr.system.runs import provenance
from adclr.training import distillation, job, micro_batch, schedules
from adclr.training.step import Step, time_calls

GIB = 2**30
TINY: dict[str, Any] = {
    "model.dim": 32,
    "model.depth": 2,
    "model.num_heads": 2,
    "views.global_size": 64,
    "views.local_size": 64,
}


@dataclass(frozen=True)
class Case:
    teacher: str  # size
    student: str  # size, or network of timm

    @property
    def name(self) -> str:
        student = self.student if ":" in self.student else f"ViT-{self.student[0].upper()}/16"
        return f"ViT-{self.teacher[0].upper()}/16 to {student}"

    def settings(self, tiny: bool) -> DistillSettings:
        key = "distill.student" if ":" in self.student else "model.size"
        recipe = parsing.load_recipe("distill_small", "distill")
        return parsing.build(DistillSettings, recipe, {key: self.student}, TINY if tiny else {})

    def build_teacher(self, tiny: bool) -> VisionTransformer:
        dim, depth, heads = (48, 2, 3) if tiny else VIT_SIZES[self.teacher]
        return VisionTransformer(dim, depth, heads, 16).eval()


CASES = [
    Case("small", "tiny"),
    Case("base", "tiny"),
    Case("base", "small"),
    Case("large", "small"),
    Case("base", "timm:resnet50"),
    Case("base", "timm:convnext_tiny"),
]


def work(case: Case, batch: int, device: torch.device, tiny: bool) -> Callable[[], object]:
    """One step of a case, ready to be done again and again."""
    settings = case.settings(tiny)
    method = distillation.assemble(settings, case.build_teacher(tiny)).to(device)
    optimizer = schedules.make_optimizer(method.student, settings)
    dtype = devices.autocast_dtype("auto", device)
    job.compile_method(method, settings, device, dtype, batch)
    step = Step(settings, method, optimizer, device, dtype)
    views = micro_batch.random_views(settings, batch, device)
    values = schedules.Schedules(settings, 1000).at(50_000)
    return lambda: step([views], values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="rows whose name has this in it; may be repeated")
    for name, number in (("batch", 256), ("steps", 10), ("warmup", 5), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="to try it: networks and views as small as can be")
    given = parser.parse_args()
    device, rows = devices.select_device("auto"), []
    for case in CASES:
        if given.only and not any(words in case.name for words in given.only):
            continue
        batch = 4 if given.tiny else given.batch
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        once = work(case, batch, device, given.tiny)
        once()
        if device.type == "cuda":
            torch.cuda.synchronize()
        first = time.monotonic() - started
        spent = time_calls(once, device, given.steps, given.repeats, given.warmup)
        middle = statistics.median(spent)
        gib = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None
        row = {"images_per_second": batch / middle, "milliseconds": 1000 * middle, "gib": gib}
        row |= {"first_step_seconds": first}
        row |= {"least_milliseconds": 1000 * min(spent), "most_milliseconds": 1000 * max(spent)}
        rows.append(asdict(case) | {"name": case.name, "batch": batch} | row)
        memory = "" if gib is None else f", {gib:.1f} GiB"
        rate = f"{batch / middle:.0f}" if batch / middle >= 10 else f"{batch / middle:.2g}"
        speed = f"{rate} images/s, {1000 * middle:.1f} ms{memory}; first step after {first:.1f} s"
        print(f"{case.name} batch {batch}: {speed}", flush=True)
    if given.json:
        write_json(given.json, {"rows": rows, "provenance": provenance()})


if __name__ == "__main__":
    main()
