"""Milliseconds of one layer's MLP, M×D -> M×D, forward, and forward and backward: our operation beside PyTorch's.

    python benchmarks/mlp.py [--dtype bfloat16] [--seconds 35]

One GPU, captured as a CUDA graph, so that it is the device's time. Parameters are float32 and cast, as in training.
Every line is checked against float64. `--tiny` tries the script itself on a CPU. Compare figures of one run only.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

if "--tiny" in sys.argv:  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from graph_time import milliseconds
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from adclr.model.ops import dispatch, mlp
from adclr.model.ops.mlp import BackwardConfig, ForwardConfig

Mlp = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
FORWARDS = [
    ForwardConfig(1024, 4),
    ForwardConfig(2048, 4),
    ForwardConfig(4096, 4),
    ForwardConfig(2048, 8),
    ForwardConfig(4096, 8),
    ForwardConfig(8192, 8),
]
BACKWARDS = [
    BackwardConfig(4, 256, 128, 4),
    BackwardConfig(8, 256, 128, 4),
    BackwardConfig(8, 256, 128, 8),
    BackwardConfig(8, 128, 128, 4),
    BackwardConfig(4, 512, 128, 8),
    BackwardConfig(4, 512, 128, 4),
    BackwardConfig(4, 256, 64, 4),
    BackwardConfig(4, 256, 256, 4),
    BackwardConfig(2, 512, 128, 4),
]


def attempt(name: str, work: Callable[[], str]) -> None:
    """One that does not compile or launch must not stop the others."""
    try:
        said = work()
    except Exception as problem:
        said = f"{type(problem).__name__}: {' '.join(str(problem).split())[:110]}"
    print(f"  {name:<47} {said}", flush=True)


class Case(NamedTuple):
    inputs: list[Tensor]  # y, w1, b1, w2, b2
    grad: Tensor
    expected: list[Tensor]  # output and gradients, in float64

    @property
    def hidden(self) -> Tensor:
        y, w1, b1 = (x.detach().to(self.grad.dtype) for x in self.inputs[:3])
        return torch.addmm(b1, y, w1.t())


def both(function: Mlp, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Output and gradients."""
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def case_of(rows: int, dim: int, device: torch.device, dtype: torch.dtype) -> Case:
    numbers = torch.Generator(device).manual_seed(0)

    def some(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=numbers, device=device)

    y, grad = some(rows, dim).to(dtype), some(rows, dim).to(dtype)
    w1, w2 = some(4 * dim, dim, scale=dim**-0.5), some(dim, 4 * dim, scale=0.5 * dim**-0.5)
    inputs = [y, w1, some(4 * dim), w2, some(dim)]
    exact = [x.to(dtype).double().requires_grad_() for x in inputs]  # as the products see it
    return Case([x.requires_grad_() for x in inputs], grad, both(dispatch.mlp_plain, exact, grad.double()))


def measure(name: str, function: Mlp, case: Case, alone: bool = True) -> None:
    """Checks, times and prints. `alone`: forward by itself too, which `torch.compile` must compile by itself."""

    def forward() -> None:
        with torch.no_grad():
            function(*case.inputs)

    def work() -> str:
        actual = both(function, case.inputs, case.grad)
        wrong = [
            float((mine.double() - true).norm() / true.norm()) for mine, true in zip(actual, case.expected, strict=True)
        ]
        errors = " ".join(f"{error:.1e}" for error in wrong)
        if not max(wrong) < 2e-2:
            return f"WRONG: errors {errors}"
        first = f"{milliseconds(forward):9.3f}" if alone else f"{'':9}"
        return f"{first} {milliseconds(lambda: both(function, case.inputs, case.grad)):9.3f}   {errors}"

    attempt(name, work)


# -- what it is beside --


def _policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    kept = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def again(*inputs: Tensor) -> Tensor:
    """GELU made again in backward, as in `blocks.run_selectively_checkpointed`."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    actual: Tensor = checkpoint(
        dispatch.mlp_plain, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )
    return actual


def products(case: Case, of_weights: torch.dtype) -> None:
    """The two products of forward and the four of backward, and how long fc2's bias takes."""
    y, w1, b1, w2, b2 = (x.detach().to(case.grad.dtype) for x in case.inputs)
    hidden, grad = case.hidden, case.grad

    def forward() -> None:
        torch.addmm(b1, y, w1.t())
        torch.addmm(b2, hidden, w2.t())

    def whole() -> None:
        forward()
        torch.mm(grad, w2)
        torch.mm(hidden, w1)
        mlp._product(grad.t(), hidden, of_weights)
        mlp._product(hidden.t(), y, of_weights)

    name = f"products alone, weights' gradients {str(of_weights).removeprefix('torch.')}"
    attempt(name, lambda: f"{milliseconds(forward):9.3f} {milliseconds(whole):9.3f}")


def sums(case: Case) -> None:
    table = torch.ones(-(-case.grad.shape[0] // mlp.BACKWARD.span), 4 * case.grad.shape[1], device=case.grad.device)

    def work() -> str:
        of_rows = milliseconds(lambda: case.grad.sum(0, dtype=torch.float32))
        return f"{of_rows:9.3f} {milliseconds(lambda: table.sum(0)):9.3f}"

    attempt("the sums alone: grad for b2, the table for b1", work)


# -- candidates --


def tune(case: Case, until: float) -> None:
    """The kernels by themselves; leaves the fastest set, so that what follows uses them."""
    hidden = case.hidden
    out, back = torch.empty_like(hidden), torch.zeros_like(hidden)  # zeros stay zeros, however often it is run
    size = hidden.numel() * hidden.element_size()
    kinds: list[tuple[str, list[Any], Callable[[], object], int]] = [
        ("FORWARD", FORWARDS, lambda: mlp.gelu(hidden, out), 2),
        ("BACKWARD", BACKWARDS, lambda: mlp.gelu_backward(hidden, back, out), 4),
    ]
    for table, candidates, work, passes in kinds:
        set_before, times = getattr(mlp, table), {}
        for config in candidates:
            if time.perf_counter() > until:
                print("  no time for the other candidates")
                break
            setattr(mlp, table, config)

            def told(config: Any = config, work: Any = work, times: Any = times, passes: int = passes) -> str:
                times[config] = milliseconds(work)
                return f"{times[config]:9.3f} {1e-9 * passes * size / times[config]:9.2f} TB/s"

            attempt(label(config), told)
        setattr(mlp, table, min(times, key=lambda config: times[config]) if times else set_before)
        print(f"  -> {label(getattr(mlp, table))}")


def label(config: ForwardConfig | BackwardConfig) -> str:
    if isinstance(config, ForwardConfig):
        return f"GELU {config.numbers} warps {config.warps}"
    return f"and its gradient {config.rows}×{config.columns} of {config.span} warps {config.warps}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU in Triton's interpreter")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--seconds", type=float, default=35, help="after these, nothing new is begun")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device("cpu" if args.tiny else "cuda")
    dtype = getattr(torch, args.dtype)
    print(f"{'CPU' if args.tiny else torch.cuda.get_device_name()}, torch {torch.__version__}, {dtype}")
    started = time.perf_counter()
    until = started + args.seconds
    backend = "aot_eager" if args.tiny else "inductor"
    for rows, dim in [(70, 16), (37, 24)] if args.tiny else [(200_704, 384), (100_352, 768)]:
        case = case_of(rows, dim, device, dtype)
        title = f"{rows}×{dim}, {4 * dim} in between"
        print(f"\n{title:<49} {'forward':>9} {'and back':>9}   errors of out, y, w1, b1, w2, b2", flush=True)
        measure("ours, as it is set", mlp.fused, case)
        for kind in (torch.float32, dtype):
            products(case, kind)
        sums(case)
        tune(case, min(until, time.perf_counter() + 0.3 * args.seconds))
        measure("ours, the fastest of the above", mlp.fused, case)
        for name, function in (("plain, compiled", dispatch.mlp_plain), ("plain, compiled, GELU made again", again)):
            if time.perf_counter() > until:
                print(f"  no time for: {name}")
                continue
            torch._dynamo.reset()
            compiled = torch.compile(function, dynamic=False, fullgraph=True, backend=backend)
            measure(name, compiled, case, alone=function is dispatch.mlp_plain)
        del case
    print(f"\n{time.perf_counter() - started:.0f} seconds")


if __name__ == "__main__":
    main()
