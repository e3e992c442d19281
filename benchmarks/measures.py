"""What each measure gives: the step of ADCLR with all of them, and with one left out at a time.

    python benchmarks/measures.py [--batch 256] [--only TEXT ...] [--json FILE] [--tiny]

ViT-S/16 of `adclr_vits16`, views of noise; as in benchmarks/step.py, whose functions it uses. What a row leaves out is
replaced for that row only, by what a plain program does. Compare figures of one run only.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import step as benchmark
import torch
from torch import Tensor, nn

from adclr.config.settings import Settings
from adclr.model import optim
from adclr.model.method import ADCLR
from adclr.model.named_tensors import Input, Tokens
from adclr.model.ops import attention, head_loss, mlp, norm
from adclr.model.vit import VisionTransformer
from adclr.system import devices
from adclr.system.files import write_json
from adclr.system.runs import provenance
from adclr.training import job, micro_batch, schedules
from adclr.training.step import Step, time_calls

Patch = AbstractContextManager[object]


def never(*_: object) -> bool:
    return False


def without(room: object, gate: str) -> Patch:
    return mock.patch.object(room, gate, never)  # a function, which the compiler can follow


def one_by_one(vit: VisionTransformer, inputs: Sequence[Input]) -> list[Tokens]:
    return [vit._forward([item], vit.run_block)[0] for item in inputs]


def all_patches(vit: VisionTransformer, inputs: Sequence[Input]) -> list[Tokens]:
    return vit._forward([item._replace(patches=True) for item in inputs], vit.run_block)


def plainly(vit: VisionTransformer, inputs: Sequence[Input]) -> list[Tokens]:
    return [vit._forward([item._replace(patches=True)], vit.run_block)[0] for item in inputs]


class Voidless(torch.optim.AdamW):
    """Without the flag that voids a step, which only the fused kernel takes."""

    found_inf = property(lambda _: None, lambda *_: None)


def adamw_by_parameter(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """What `optim.make_optimizer` makes, but for the kernel."""
    made = make_optimizer(model, settings)
    betas, capturable = settings.optim.betas, made.defaults["capturable"]  # a CUDA graph must not ask for the count
    groups = [{"params": group["params"], "decayed": group["decayed"]} for group in made.param_groups]
    return Voidless(groups, lr=0.0, betas=betas, weight_decay=0.0, foreach=False, fused=False, capturable=capturable)


make_optimizer = schedules.make_optimizer


def each(operation: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """An operation on lists, tensor by tensor; the second argument is a list too, or one for all."""

    def loop(tensors: Iterable[Tensor], *others: Any) -> list[Tensor]:
        more = [other if isinstance(other, Sequence) else [other] * len(list(tensors)) for other in others]
        return [operation(*given) for given in zip(tensors, *more, strict=True)]

    return loop


def by_parameter(room: object, name: str, **operations: Callable[..., Tensor]) -> Patch:
    """A function that goes on to the end with loops in place of torch's operations on lists."""
    whole, loops = getattr(room, name), {key: each(operation) for key, operation in operations.items()}

    def function(*args: Any, **options: Any) -> object:
        with mock.patch.multiple(torch, **loops):
            return whole(*args, **options)

    return mock.patch.object(room, name, function)


@dataclass(frozen=True)
class Case:
    name: str
    patches: Callable[[], list[Patch]] = list
    compiled: bool = True
    recorded: bool = True


def of_crops() -> list[Patch]:
    return [mock.patch.object(VisionTransformer, "forward_many", one_by_one)]


def of_patches() -> list[Patch]:
    return [mock.patch.object(VisionTransformer, "forward_many", all_patches)]


def of_attention() -> list[Patch]:
    return [without(attention, "fits")]


def of_logits() -> list[Patch]:
    return [without(head_loss, "fits")]


def of_blocks() -> list[Patch]:
    return [without(norm, "fits"), without(mlp, "fits")]


def of_adamw() -> list[Patch]:
    return [mock.patch.object(schedules, "make_optimizer", adamw_by_parameter)]


def of_clipping() -> list[Patch]:
    return [by_parameter(optim, "optimizer_step", _foreach_norm=torch.linalg.vector_norm, _foreach_mul_=Tensor.mul_)]


def of_mean() -> list[Patch]:
    return [by_parameter(ADCLR, "update", _foreach_mul_=Tensor.mul_, _foreach_mul=torch.mul, _foreach_add_=Tensor.add_)]


def of_all() -> list[Patch]:
    forward = mock.patch.object(VisionTransformer, "forward_many", plainly)
    return [forward, *of_attention(), *of_logits(), *of_blocks(), *of_adamw(), *of_clipping(), *of_mean()]


CASES = [
    Case("all measures"),
    Case("a forward for each crop size", of_crops),
    Case("PyTorch's attention", of_attention),
    Case("logits of all rows in float32", of_logits),
    Case("norms and MLPs left to the compiler", of_blocks),
    Case("the last block of every patch", of_patches),
    Case("AdamW parameter by parameter", of_adamw),
    Case("clipping parameter by parameter", of_clipping),  # and weight decay
    Case("teacher's mean parameter by parameter", of_mean),
    Case("not compiled", compiled=False),
    Case("not recorded as a CUDA graph", recorded=False),
    Case("none of them", of_all, compiled=False, recorded=False),
]


def measure(case: Case, batch: int, tiny: bool, device: torch.device) -> dict[str, float | str | None]:
    settings = benchmark.Case("ADCLR", batch=batch).settings(tiny)
    dtype = devices.autocast_dtype("auto", device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with ExitStack() as stack:
        for patch in case.patches():
            stack.enter_context(patch)
        method = job.build(settings).to(device)
        if case.compiled:
            job.compile_method(method, settings, device, dtype, batch)
        optimizer = schedules.make_optimizer(method.student, settings)
        take = Step(settings, method, optimizer, device, dtype, record=case.recorded)
        views = micro_batch.random_views(settings, batch, device)
        before = {name: tensor.to("cpu", copy=True) for name, tensor in method.state_dict().items()}
        take([views], benchmark.VALUES)
        # recording takes a step that is void, but only to the fused AdamW: others are left with what is not a number
        method.load_state_dict(before)
        for state in optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
        for _ in range(3):
            losses, ok = take([views], benchmark.VALUES)
        assert ok.item(), (case.name, losses)
        spent = statistics.median(time_calls(lambda: take([views], benchmark.VALUES), device, 2 if tiny else 8, 3))
    gib = torch.cuda.max_memory_allocated() / benchmark.GIB if device.type == "cuda" else None
    return {"name": case.name, "images_per_second": batch / spent, "milliseconds": 1000 * spent, "gib": gib}


def _asked(case: Case, only: list[str] | None) -> bool:
    return only is None or case is CASES[0] or any(text in case.name for text in only)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="rows whose name has it, and the first; again: more"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, after every row")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and 4 images, to see that it runs")
    given = parser.parse_args()
    device, batch = devices.select_device("auto"), 4 if given.tiny else given.batch
    print(
        f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}; torch {torch.__version__}; batch {batch}"
    )
    rows: list[dict[str, float | str | None]] = []
    started = provenance()
    for case in [one for one in CASES if _asked(one, given.only)]:
        try:
            row = measure(case, batch, given.tiny, device)
        except torch.OutOfMemoryError:
            row = {"name": case.name, "images_per_second": None, "milliseconds": None, "gib": None}
        rows.append(row)
        first, speed, gib = rows[0]["images_per_second"], row["images_per_second"], row["gib"]
        assert isinstance(first, float)
        share = f"{speed:8.0f} images/s  {100 * speed / first:5.1f} %" if isinstance(speed, float) else "out of memory"
        print(f"{case.name:<38} {share}" + (f"  {gib:5.1f} GiB" if isinstance(gib, float) else ""), flush=True)
        if given.json:
            write_json(given.json, {"batch": batch, "rows": rows, "provenance": started})
        gc.collect()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
