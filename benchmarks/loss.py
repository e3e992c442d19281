"""Time and memory of last layer and losses, forward and backward: plain operations beside `fused`, and its constants.

    python benchmarks/loss.py [--batch 256] [--prototypes 65536] [--masked 0]

On a GPU in about a minute. Rows are those of 2 + 10 views with 10 queries. Constants are changed one at a time; compare
figures of one run only. `--tiny` runs all of it once on a CPU, in Triton's interpreter, to see that it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if "--tiny" in sys.argv:  # before any kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"

from adclr.model.losses import Center, masked_loss, paired_loss
from adclr.model.ops import head_loss, head_loss_kernels
from adclr.model.ops.head_loss import Part

STUDENT, TEACHER = 0.1, 0.04
Result = tuple[Tensor, Tensor, Tensor]  # loss, gradients of rows and of prototypes


class Task(NamedTuple):
    student: Tensor
    prototypes: Tensor
    teacher: Tensor
    teacher_prototypes: Tensor
    parts: tuple[Part, ...]

    @property
    def device(self) -> torch.device:
        return self.student.device


def make(args: argparse.Namespace, batch: int, device: torch.device) -> Task:
    """Rows around one direction for each item, so that teacher and student agree as they do in training."""
    torch.manual_seed(0)
    centers = [torch.randn(args.prototypes, device=device) * 0.02 for _ in range(3)]
    weights = torch.rand(args.masked * batch, device=device) + 0.1
    parts = (
        Part(batch, 2 + args.local, centers[0], 1.0),
        Part(batch * args.queries, 2, centers[1], 0.5),
        Part(args.masked * batch, 1, centers[2], 1.0, weights / weights.sum()),
    )
    items = [F.normalize(torch.randn(part.items, args.dim, device=device), dim=-1) for part in parts]

    def rows(views: list[int]) -> Tensor:
        near = [item.repeat(number, 1) for item, number in zip(items, views, strict=True)]
        every = torch.cat(near)
        return F.normalize(every + torch.randn_like(every) * 0.5 / args.dim**0.5, dim=-1)

    prototypes = F.normalize(torch.randn(args.prototypes, args.dim, device=device), dim=-1)
    moved = F.normalize(prototypes + torch.randn_like(prototypes) * 0.2 / args.dim**0.5, dim=-1)
    return Task(
        rows([part.views for part in parts]).requires_grad_(),
        moved.requires_grad_(),
        rows([2, 2, 1]),
        prototypes,
        parts,
    )


def autocast(task: Task, low: bool) -> torch.autocast:
    return torch.autocast(task.device.type, dtype=torch.bfloat16, enabled=low)


def plain(task: Task, low: bool = True) -> Result:
    """What `method.compare` does, for each part."""
    total = torch.zeros((), device=task.device)
    own = taught = 0
    with autocast(task, low):
        logits = F.linear(task.student, task.prototypes)
        with torch.no_grad():
            answers = F.linear(task.teacher, task.teacher_prototypes)
        for part in task.parts:
            if part.items:
                center = Center(len(part.center), 0.9).to(task.device)
                center.value = part.center
                targets = center.targets(answers[taught : taught + part.teacher_rows], TEACHER)
                mine = logits[own : own + part.student_rows]
                if part.weights is None:
                    targets, mine = targets.unflatten(0, (2, -1)), mine.unflatten(0, (part.views, -1))
                    loss = paired_loss(targets, mine, STUDENT)
                else:
                    loss = masked_loss(targets, mine, part.weights, STUDENT)
                total = total + part.coefficient * loss
            own, taught = own + part.student_rows, taught + part.teacher_rows
    return total.detach(), *torch.autograd.grad(total, (task.student, task.prototypes))


def in_chunks(task: Task, low: bool = True) -> Result:
    with autocast(task, low):
        total = head_loss.head_loss(*task, STUDENT, TEACHER).total
    return total.detach(), *torch.autograd.grad(total, (task.student, task.prototypes))


def products(task: Task) -> None:
    """The four matrix products alone, in float16: what no kernel of ours can be faster than."""
    rows, prototypes, teacher = task.student.half(), task.prototypes.half(), task.teacher.half()
    whole = len(rows) + len(teacher)
    step = max(1, head_loss.CHUNK_BYTES // (2 * len(prototypes)) * len(rows) // whole)
    for start in range(0, len(rows), step):
        logits = rows[start : start + step] @ prototypes.t()
        head_loss._product(logits, prototypes)
        head_loss._product(logits.t(), rows[start : start + step])
        del logits
    for start in range(0, len(teacher), step):
        teacher[start : start + step] @ prototypes.t()


def measure(task: Task, work: Callable[[], Any]) -> str:
    if task.device.type == "cpu":
        started = time.perf_counter()
        work()
        return f"{1000 * (time.perf_counter() - started):9.2f} ms"
    from triton.testing import do_bench

    work()  # compiles
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return f"{do_bench(work, return_mode='median'):9.2f} ms {peak:8.2f} GiB"


def line(name: str, work: Callable[[], str]) -> None:
    """One line, also of what fails: the others are still of use."""
    try:
        text = work()
    except Exception as problem:
        text = f"failed: {type(problem).__name__}: {str(problem).strip().splitlines()[:1]}"
    print(f"{name:<56} {text}", flush=True)


def accuracy(task: Task) -> None:
    expected = plain(task, low=False)

    def against(work: Callable[[Task, bool], Result], low: bool) -> str:
        actual = work(task, low)
        loss = ((actual[0] - expected[0]) / expected[0]).abs().item()
        text = f"loss {loss:.0e} off"
        for name, a, b in zip(("rows", "prototypes"), actual[1:], expected[1:], strict=True):
            cosine = F.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()
            text += f"; gradient of {name}: cosine {cosine:.6f}, length {(a.norm() / b.norm()).item():.5f}"
        return text

    print(f"against plain float32, {task.parts[0].items} images:")
    line("plain, bfloat16", lambda: against(plain, True))
    line("in chunks, float16", lambda: against(in_chunks, True))
    line("in chunks, float32", lambda: against(in_chunks, False))


def kernels_alone(task: Task) -> None:
    """The two kernels by themselves on a chunk of the first part and one of the second."""
    for kind, part in zip(("[CLS]", "queries"), task.parts, strict=False):
        num_prototypes = len(part.center)
        items = min(part.items, head_loss.CHUNK_BYTES // (2 * (2 + part.views) * num_prototypes))

        def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.rand(*shape, device=task.device, dtype=dtype)

        answers, logits = (numbers(items * n, num_prototypes, dtype=torch.float16) for n in (2, part.views))
        blocks = head_loss_kernels.num_blocks(num_prototypes)
        sums = numbers(4, len(answers), blocks), numbers(2, len(logits), blocks)
        tables = numbers(2, len(answers)), numbers(2, len(logits)), numbers(items)
        rest = ((1.0, 1.0), items, True)
        works: dict[str, Callable[[], None]] = {
            "statistics": partial(head_loss_kernels.statistics, answers, part.center, logits, *sums, *rest),
            "gradient": partial(head_loss_kernels.gradient, answers, part.center, logits, *tables, *rest),
        }
        for name, work in works.items():
            moved = answers.nbytes + logits.nbytes * (2 if name == "gradient" else 1)
            line(f"kernel {name}, {kind}, {moved / 2**30:.2f} GiB to move", partial(measure, task, work))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--prototypes", type=int, default=65536)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--local", type=int, default=10, help="local views")
    parser.add_argument("--queries", type=int, default=10)
    parser.add_argument("--masked", type=int, default=0, help="masked patches for each image")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = torch.device("cpu" if args.tiny else "cuda")
    if args.tiny:
        args.batch, args.prototypes, args.dim, args.local, args.queries, args.masked = 2, 130, 16, 1, 1, 1

    accuracy(make(args, max(2, args.batch // 16), device))
    task = make(args, args.batch, device)
    print(f"\n{len(task.student)} rows of the student, {len(task.teacher)} of the teacher, K = {args.prototypes}:")
    line("plain, bfloat16", lambda: measure(task, lambda: plain(task)))
    line("in chunks, as it is set", lambda: measure(task, lambda: in_chunks(task)))
    line("the matrix products of it alone", lambda: measure(task, lambda: products(task)))
    candidates: list[tuple[Any, str, list[Any]]] = [
        (head_loss_kernels, "STATISTICS", [(512, 1), (1024, 1), (1024, 4), (2048, 4), (2048, 8), (4096, 8)]),
        (head_loss_kernels, "GRADIENT", [(512, 1), (1024, 4), (2048, 4), (2048, 8), (4096, 8)]),
        (head_loss, "CHUNK_BYTES", [size * 2**20 for size in (64, 128, 256, 512, 1024)]),
    ]
    for module, name, values in candidates:
        usual = getattr(module, name)
        for value in values[:2] if args.tiny else values:
            setattr(module, name, value)
            shown = f"{value // 2**20} MiB" if name == "CHUNK_BYTES" else f"{value[0]} prototypes, {value[1]} warps"
            line(f"  {name} {shown}", lambda: measure(task, lambda: in_chunks(task)))
        setattr(module, name, usual)
    line("in chunks, as it is set, once more", lambda: measure(task, lambda: in_chunks(task)))
    kernels_alone(task)


if __name__ == "__main__":
    main()
