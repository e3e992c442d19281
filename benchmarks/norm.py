"""Milliseconds of a residual sum with drop path and the LayerNorm of it, and back: our kernels beside the compiler's.

    python benchmarks/norm.py [--dtype bfloat16] [--seconds 35]

One GPU, captured as a CUDA graph, so that it is the device's time. GB/s are of the bytes that must move: forward reads
x and branch and writes the sum and its norm, backward reads the sum and two gradients and writes two. Every line is
first checked against float64: the first and last rows, and the gradients of weight and bias. `--tiny` tries the script
itself on a CPU. Compare figures of one run only.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

if "--tiny" in sys.argv:  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from graph_time import milliseconds
from torch import Tensor

from adclr.model.ops import dispatch, norm
from adclr.model.ops.norm import Config

AddNorm = Callable[..., tuple[Tensor, Tensor]]
EPS = 1e-6
CHECKED = 512  # rows, at either end
FORWARDS = {
    384: [
        Config(8, 4),
        Config(16, 4),
        Config(4, 4),
        Config(16, 8),
        Config(4, 2),
        Config(8, 4, programs=132 * 8),
    ],
    768: [
        Config(4, 4),
        Config(8, 4),
        Config(8, 8),
        Config(2, 2),
        Config(4, 4, programs=132 * 8),
    ],
}
BACKWARDS = {
    384: [
        Config(4, 4, programs=132 * 6),
        Config(4, 4, programs=132 * 7),
        Config(4, 4, programs=132 * 14),
        Config(8, 8, programs=132 * 3),
        Config(8, 4, programs=132 * 3),
        Config(8, 4, programs=132 * 4, registers=128),
        Config(8, 4, programs=132 * 3, stages=2),
        Config(8, 8, programs=132 * 3, stages=2),
    ],
    768: [
        Config(4, 4, programs=132 * 3),
        Config(4, 4, programs=132 * 6),
        Config(4, 4, programs=132 * 4, registers=128),
        Config(2, 4, programs=132 * 6),
        Config(4, 8, programs=132 * 3),
        Config(4, 4, programs=132 * 3, stages=2),
    ],
}


class Case(NamedTuple):
    x: Tensor
    branch: Tensor
    factor: Tensor
    weight: Tensor
    bias: Tensor
    dtotal: Tensor
    dy: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.branch, self.weight, self.bias]


def case(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> Case:
    numbers = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers, device=device)

    x, branch, dtotal, dy = (draw(rows, dim).to(dtype) for _ in range(4))
    factor = (draw(rows, 1) > -1).float() * 1.2
    made = Case(x, branch, factor, 1 + 0.1 * draw(dim), 0.1 * draw(dim), dtotal, dy)
    for leaf in made.leaves:
        leaf.requires_grad_()
    return made


def both(add_norm: AddNorm, given: Case) -> list[Tensor]:
    """[sum, norm, gradients of x, branch, weight and bias]"""
    outs = add_norm(*given[:5], EPS)
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, given.leaves, [given.dtotal, given.dy])]


def expected(given: Case) -> list[Tensor]:
    """Of the rows that are checked, in float64; of weight and bias, over all rows, some at a time."""
    rows = given.x.shape[0]
    ends = torch.cat([torch.arange(min(CHECKED, rows)), torch.arange(max(0, rows - CHECKED), rows)])
    actual: list[Tensor] = []
    for chosen in (ends.to(given.x.device), *torch.arange(rows, device=given.x.device).split(25_000)):
        x, branch, factor, dtotal, dy = (
            tensor.detach()[chosen].double() for tensor in (*given[:3], given.dtotal, given.dy)
        )
        weights = given.weight.detach().double(), given.bias.detach().double()
        part = Case(x, branch, factor, *weights, dtotal, dy)
        for leaf in part.leaves:
            leaf.requires_grad_()
        results = both(dispatch.add_norm_plain, part)
        if not actual:
            actual = [*results[:4], torch.zeros_like(weights[0]), torch.zeros_like(weights[1])]
        else:
            actual[4] += results[4]
            actual[5] += results[5]
    return [ends.to(given.x.device), *actual]


def errors(add_norm: AddNorm, given: Case, true: list[Tensor]) -> list[float]:
    """Relative: of sum, norm, and the gradients of x, branch, weight and bias."""
    actual = both(add_norm, given)
    actual = [*(one[true[0]] for one in actual[:4]), *actual[4:]]
    return [float((mine.double() - one).norm() / one.norm()) for mine, one in zip(actual, true[1:], strict=True)]


class Line(NamedTuple):
    forward: float
    total: float


def measure(name: str, add_norm: AddNorm, given: Case, true: list[Tensor]) -> Line | None:
    """Checks, times and prints; None where it failed."""

    def forward() -> None:
        with torch.no_grad():
            add_norm(*given[:5], EPS)

    try:
        wrong = errors(add_norm, given, true)
        if not max(wrong) < 1e-2:
            print(f"  {name:<44} WRONG: errors {' '.join(f'{one:.0e}' for one in wrong)}", flush=True)
            return None
        line = Line(milliseconds(forward, rep=40), milliseconds(lambda: both(add_norm, given), rep=40))
    except Exception as problem:  # one that does not compile or launch must not stop the others
        print(f"  {name:<44} {type(problem).__name__}: {' '.join(str(problem).split())[:110]}", flush=True)
        return None
    size = given.x.numel() * given.x.element_size() * 1e-6
    speeds = [size * times / taken for times, taken in ((4, line.forward), (9, line.total))]
    shown = " ".join(f"{taken:8.3f} {speed:6.0f}" for taken, speed in zip(line, speeds, strict=True))
    print(f"  {name:<44} {shown}   {' '.join(f'{one:.0e}' for one in wrong)}", flush=True)
    return line


def label(name: str, config: Config) -> str:
    more = f" stages {config.stages}" if config.stages > 1 else ""
    more += f" registers {config.registers}" if config.registers else ""
    return f"{name} {config.rows} rows {config.warps} warps {config.programs} programs{more}"


def tune(given: Case, true: list[Tensor], until: float) -> None:
    """Tries the candidates and leaves the fastest in the tables."""
    dim = given.x.shape[1]
    for name, table, candidates, which in (("→", norm.FORWARD, FORWARDS, 0), ("←", norm.BACKWARD, BACKWARDS, 1)):
        size = min(size for size in table if size >= dim)
        before, best = table[size], (float("inf"), table[size])
        for config in candidates.get(dim, [before, before._replace(programs=2)]):
            if time.perf_counter() > until:
                print("  no time for the other candidates")
                break
            table[size] = config
            actual = measure(label(name, config), norm.fused, given, true)
            if actual:
                best = min(best, (actual[which], config), key=lambda pair: pair[0])
        table[size] = best[1] if best[0] < float("inf") else before
        print(f"  {label('fastest ' + name, table[size])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU in Triton's interpreter")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--seconds", type=float, default=35, help="after these, no more candidates")
    args = parser.parse_args()
    device = torch.device("cpu" if args.tiny else "cuda")
    dtype = getattr(torch, args.dtype)
    print(f"{'CPU' if args.tiny else torch.cuda.get_device_name()}, torch {torch.__version__}, {dtype}")
    started = time.perf_counter()
    cases = [(45, 48), (33, 64)] if args.tiny else [(200_704, 384), (100_352, 768)]
    for number, (rows, dim) in enumerate(cases):
        given = case(rows, dim, dtype, device)
        true = expected(given)
        title = f"{rows}×{dim}"
        print(f"\n{title:<46} {'forward':>8} {'GB/s':>6} {'and back':>8} {'GB/s':>6}   errors", flush=True)
        compiled = torch.compile(
            dispatch.add_norm_plain, dynamic=False, backend="aot_eager" if args.tiny else "inductor"
        )
        measure("the compiler's", compiled, given, true)
        tune(given, true, started + args.seconds * (0.55 if number == 0 else 1))
        measure("ours, the fastest of the above", norm.fused, given, true)
    print(f"\n{time.perf_counter() - started:.0f} seconds")


if __name__ == "__main__":
    main()
