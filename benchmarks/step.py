"""Images/s, ms, GiB and share of peak arithmetic of the training step alone, beside a plain float16 DINO step.

    python benchmarks/step.py [--only "ADCLR ViT-S"] [--steps 10] [--warmup 5] [--repeats 3] [--json FILE]
        [--uncompiled] [--set train.parallel_teacher=true] [--tiny]

A step is the teacher's and the student's forward, the losses, backward, clipping, AdamW, the teacher's average and the
centers, by the code that training runs; views are noise, made once, so there is no data path in it. Each figure is the
median of several repeats within this one run, with the least and the most: compare figures of one run only. A share of
peak is the arithmetic of `cost.flops` over the time and over the rate of a large bfloat16 product, measured first.
Warm-up steps include what is compiled. A ViT-B is the ViT-S recipe with model.size=base.
`deterministic` is train.deterministic=true.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from plain_dino import PlainDino

from adclr.config import parsing
from adclr.config.settings import Settings
from adclr.system import devices
from adclr.system.files import write_json
from adclr.system.runs import provenance
from adclr.training import job, micro_batch, plan_cost, schedules
from adclr.training.step import Step, time_calls

GIB = 2**30
MATMUL = 8192  # side of the product whose rate counts as the peak; on a CPU 512
VALUES = schedules.Values(lr=1e-4, weight_decay=0.04, momentum=0.996, teacher_temperature=0.04, freeze_last_layer=False)
RECIPES = {"plain": "dino_vits16", "DINO": "dino_vits16", "ADCLR": "adclr_vits16"}
RECIPES |= {"iBOT": "ibot_vits16", "ADCLR*": "adclr_mim_vits16", "ADCLR+": "adclr_plus_vits16"}
RECIPES |= {"SelfPatch": "selfpatch_vits16"}
TINY: dict[str, Any] = {
    "model.dim": 32,
    "model.depth": 2,
    "model.num_heads": 2,
    "model.patch_size": 8,
    "views.global_size": 32,
    "views.local_size": 16,
    "method.num_prototypes": 64,
    "method.head_hidden_dim": 32,
    "method.head_bottleneck_dim": 16,
}


@dataclass(frozen=True)
class Case:
    method: str
    size: str = "small"
    batch: int = 256
    local: int = 10
    queries: int | None = None  # the recipe's
    deterministic: bool = False

    def settings(self, tiny: bool, uncompiled: bool = False, given: Sequence[str] = ()) -> Settings:
        changes: dict[str, Any] = {"model.size": self.size, "views.num_local": self.local}
        if uncompiled:
            changes["train.compile"] = "off"
        if self.queries is not None:
            changes["views.num_queries"] = self.queries
        changes |= parsing.parse_words(given)
        return parsing.build(Settings, parsing.load_recipe(RECIPES[self.method]), changes, TINY if tiny else {})

    def name(self, settings: Settings) -> str:
        letter, views = self.size[0].upper(), settings.views
        more = " deterministic" if self.deterministic else ""
        return f"{self.method} ViT-{letter}/16 L={self.local} Q={views.num_queries} batch {self.batch}{more}"


METHODS = ("plain", "DINO", "ADCLR", "ADCLR+", "iBOT", "ADCLR*", "SelfPatch")
CASES = [
    *(Case(method) for method in METHODS),
    Case("ADCLR", deterministic=True),
    *(Case(method, batch=64) for method in METHODS),
    *(Case(method, "base", 128) for method in METHODS),
    *(Case(method, "base", 64) for method in ("plain", "DINO", "ADCLR")),
    *(Case(method, local=local) for method in ("DINO", "ADCLR") for local in (0, 2, 6)),
    # 10 queries and none (which is DINO) stand above
    Case("ADCLR", batch=64, queries=196),
    Case("ADCLR", queries=196),
]


@dataclass(frozen=True)
class Row:
    name: str
    batch: int
    images_per_second: float
    milliseconds: float
    least_milliseconds: float
    most_milliseconds: float
    gib: float | None
    gflop_per_image: float
    share_of_peak: float


def work(case: Case, settings: Settings, batch: int, device: torch.device) -> Callable[[], object]:
    """One step of a case, ready to be done again and again."""
    hidden = round(plan_cost.hidden_patches(settings))  # as many as are hidden on average, not the most
    views = micro_batch.random_views(settings, batch, device, hidden)
    if case.method == "plain":
        method, model = settings.method, settings.model
        head = (method.head_hidden_dim, method.head_bottleneck_dim, method.num_prototypes)
        clip = settings.optim.clip_norm or float("inf")
        side = settings.views.global_size
        plain = PlainDino(model.shape, model.patch_size, side, head, model.drop_path, clip, device)
        local = [] if views.local_crops is None else list(views.local_crops)
        crops = [*views.global_crops, *local]
        return lambda: plain.step(crops)
    built = job.build(settings).to(device)
    optimizer = schedules.make_optimizer(built.student, settings)
    dtype = devices.autocast_dtype("auto", device)
    job.compile_method(built, settings, device, dtype, batch)
    step = Step(settings, built, optimizer, device, dtype)
    return lambda: step([views], VALUES)


def measure(case: Case, device: torch.device, peak: float, given: argparse.Namespace) -> Row:
    settings = case.settings(given.tiny, given.uncompiled, given.set)
    batch = 4 if given.tiny else case.batch
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # what is recorded as a graph takes its memory then, and never again
    with devices.deterministic(case.deterministic):
        once = work(case, settings, batch, device)
        spent = time_calls(once, device, given.steps, given.repeats, given.warmup)
    middle = statistics.median(spent)
    operations = plan_cost.flops(settings, round(plan_cost.hidden_patches(settings))).step
    return Row(
        case.name(settings),
        batch,
        batch / middle,
        1000 * middle,
        1000 * min(spent),
        1000 * max(spent),
        torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None,
        operations / 1e9,
        batch * operations / middle / peak,
    )


def measured(case: Case, device: torch.device, peak: float, given: argparse.Namespace) -> Row | str:
    """The row, or why there is none; whatever happened, nothing is left on the device."""
    actual: Row | str
    try:
        actual = measure(case, device, peak, given)
    except torch.OutOfMemoryError:
        actual = "out of memory"
    except Exception as error:  # one row that fails must not cost the others
        actual = " ".join(f"{type(error).__name__}: {error}".split())[:160]
    gc.collect()
    if "torch._dynamo" in sys.modules:  # what was compiled for a row holds on to its parameters
        torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return actual


def matmul_rate(device: torch.device) -> float:
    """Operations/s of a large bfloat16 product."""
    side = MATMUL if device.type == "cuda" else 512
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    return 2 * side**3 / statistics.median(time_calls(lambda: a @ b, device, 10, 5))


def ratios(rows: list[Row]) -> Iterator[tuple[str, float]]:
    """The comparisons that are asked for, of the rows that are there."""
    there = {row.name: row for row in rows}
    for size, batches in (("S", (256, 64)), ("B", (128, 64))):
        for batch in batches:
            plain, dino, adclr, plus, selfpatch = (
                there.get(f"{name} ViT-{size}/16 L=10 Q={queries} batch {batch}")
                for name, queries in (("plain", 0), ("DINO", 0), ("ADCLR", 10), ("ADCLR+", 10), ("SelfPatch", 0))
            )
            where = f"ViT-{size}/16, batch {batch}"
            for name, ours in (("DINO", dino), ("ADCLR", adclr)):
                if plain and ours:
                    yield f"images/s, {name} over plain DINO, {where}", ours.images_per_second / plain.images_per_second
            exact = there.get(f"ADCLR ViT-{size}/16 L=10 Q=10 batch {batch} deterministic")
            if adclr and exact:
                yield f"time, deterministic over not, {where}", exact.milliseconds / adclr.milliseconds
            if dino and plus:
                yield f"time, ADCLR+ over DINO, {where}", plus.milliseconds / dino.milliseconds
            if dino and selfpatch:
                yield f"time, SelfPatch over DINO, {where}", selfpatch.milliseconds / dino.milliseconds
                if dino.gib and selfpatch.gib:
                    yield f"memory, SelfPatch over DINO, {where}", selfpatch.gib / dino.gib
            if dino and adclr:
                yield f"time, Q=10 over Q=0, {where}", adclr.milliseconds / dino.milliseconds
                if dino.gib and adclr.gib:
                    yield f"memory, Q=10 over Q=0, {where}", adclr.gib / dino.gib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="rows whose name has this in it; may be repeated")
    for name, default in (("steps", 10), ("warmup", 5), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, after every row")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of all rows")
    parser.add_argument("--uncompiled", action="store_true", help="blocks as runs of fewer than 50 000 steps have them")
    parser.add_argument("--tiny", action="store_true", help="tiny models and 4 images, to see that it runs")
    parser.add_argument("--list", action="store_true", help="name the rows and stop")
    given = parser.parse_args()
    cases = [(case, case.name(case.settings(given.tiny))) for case in CASES]
    cases = [(case, name) for case, name in cases if not given.only or any(word in name for word in given.only)]
    if not cases or given.list:
        print("\n".join(name for _, name in cases) or "no row has such a name; --list names them")
        raise SystemExit(0 if cases else 2)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for the deterministic row, read before all others
    device = devices.select_device("auto")
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU only"
    peak = matmul_rate(device)
    print(
        f"{machine}; torch {torch.__version__}; a large bfloat16 product runs at {peak / 1e12:.3g} TFLOP/s", flush=True
    )
    if given.tiny:
        print("tiny models and 4 images in every row: the figures mean nothing")
    print(f"{'':<40} {'images/s':>9} {'ms a step':>10} {'(least to most)':>20} {'GiB':>7} {'of peak':>8}")
    rows: list[Row] = []
    failed: dict[str, str] = {}
    started = provenance()

    def save() -> None:
        if given.json:
            facts = {"machine": machine, "cuda": torch.version.cuda, "matmul_tflops": peak / 1e12, "tiny": given.tiny}
            facts |= {name: getattr(given, name) for name in ("steps", "warmup", "repeats", "uncompiled", "set")}
            actual = {"rows": [asdict(row) for row in rows], "failed": failed, "ratios": dict(ratios(rows))}
            write_json(given.json, facts | actual | {"provenance": started})

    for case, name in cases:
        row = measured(case, device, peak, given)
        if isinstance(row, str):
            failed[name] = row
            print(f"{name:<40} {row}", flush=True)
        else:
            rows.append(row)
            spread = f"({row.least_milliseconds:.1f} to {row.most_milliseconds:.1f})"
            gib = "" if row.gib is None else f"{row.gib:.1f}"
            print(
                f"{name:<40} {row.images_per_second:>9.0f} {row.milliseconds:>10.1f} {spread:>20} {gib:>7} "
                f"{row.share_of_peak:>8.1%}",
                flush=True,
            )
        save()
    for name, ratio in ratios(rows):
        print(f"{name}: {ratio:.2f}")
    if given.json:
        print(f"written to {given.json}")


if __name__ == "__main__":
    main()
