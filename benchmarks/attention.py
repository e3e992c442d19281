"""Milliseconds of one layer's attention from qkv (M×3D) to its output (M×D), and back: our kernels beside PyTorch's.

    python benchmarks/attention.py [--dtype bfloat16] [--tune] [--seconds 75]

A table of the step's two shapes, the global views' and the local ones', and of both together: flash, cuDNN,
memory-efficient, FlexAttention and ours. One GPU, captured as a CUDA graph, so that it is the device's time. PyTorch's
kernels are timed with what they need around them, as in `dispatch.attend_plain`: qkv in heads, and the gradient put
together again. Every line is first checked on the last sequences against float64; what fails has a line that says why,
and no figure in the table. `--tune` first tries other sizes of our tiles. `--tiny` tries the script itself on a CPU.
Compare figures of one run only.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

if "--tiny" in sys.argv:  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from graph_time import milliseconds
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from adclr.model.ops import attention, dispatch
from adclr.model.ops.attention import Config, Group

Attend = Callable[[Tensor, list[Group], int], Tensor]
FORWARDS = {
    "short": [
        Config("forward", 64, 64, 4),
        Config("forward", 64, 32, 4),
        Config("forward", 64, 64, 4, 2, 2),
        Config("forward", 64, 64, 4, 2, 3),
        Config("forward", 64, 64, 4, 3, 6),
        Config("forward", 64, 64, 2),
    ],
    "long": [
        Config("forward", 128, 64, 8),
        Config("forward", 128, 64, 8, 3),
        Config("forward", 128, 64, 4),
        Config("forward", 256, 64, 8),
        Config("forward", 64, 64, 4),
        Config("forward", 64, 32, 4),
        Config("forward", 64, 128, 4),
        Config("forward", 64, 256, 4),
        Config("forward", 128, 128, 8),
        Config("forward", 128, 256, 8),
    ],
}
BACKWARDS = {
    "short": [
        Config("whole", 64, 64, 4),
        Config("whole", 64, 64, 4, 2, 2),
        Config("whole", 64, 64, 4, 2, 3),
        Config("whole", 64, 64, 4, 3, 6),
        Config("whole", 64, 64, 8),
        Config("rows", 64, 64, 4),
    ],
    "long": [
        Config("rows", 32, 256, 8),
        Config("rows", 32, 256, 8, 1),
        Config("rows", 16, 256, 8),
        Config("rows", 32, 256, 16),
        Config("two", 64, 32, 4),
        Config("two", 64, 32, 4, registers=128),
        Config("two", 64, 32, 4, 3, registers=128),
        Config("two", 64, 64, 4),
        Config("two", 128, 32, 8, registers=128),
        Config("two", 128, 64, 8),
    ],
}


class Case(NamedTuple):
    name: str
    groups: list[Group]
    heads: int
    width: int
    size: str | None  # whose candidates --tune tries


def cases(tiny: bool) -> list[Case]:
    if tiny:
        return [
            Case("tiny", [Group(3, 70, 66)], 2, 16, "long"),
            Case("tiny", [Group(3, 37, 37)], 2, 16, "short"),
            Case("tiny", [Group(2, 70, 66), Group(3, 37, 37)], 3, 16, None),
        ]
    large, small = Group(512, 207, 197), Group(2560, 37, 37)
    return [
        Case("ViT-S", [large], 6, 64, "long"),
        Case("ViT-S", [small], 6, 64, "short"),
        Case("ViT-S", [large, small], 6, 64, None),
        Case("ViT-B", [large._replace(sequences=256), small._replace(sequences=1280)], 12, 64, None),
    ]


def both(attend: Attend, qkv: Tensor, grad: Tensor, groups: list[Group], heads: int) -> tuple[Tensor, Tensor]:
    """(output, gradient of qkv)."""
    out = attend(qkv, groups, heads)
    return out.detach(), torch.autograd.grad(out, qkv, grad)[0]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def errors(attend: Attend, qkv: Tensor, grad: Tensor, groups: list[Group], heads: int) -> tuple[float, float]:
    """Relative errors of the last two sequences of each group: the largest of the output, and of the gradient."""
    out, back = both(attend, qkv, grad, groups, heads)
    row, worst = 0, (0.0, 0.0)
    for group in groups:
        last = group._replace(sequences=min(2, group.sequences))
        row += group.sequences * group.tokens
        rows = slice(row - last.sequences * last.tokens, row)
        exact = qkv.detach()[rows].double().requires_grad_()
        true_out, true_back = both(dispatch.attend_plain, exact, grad[rows].double(), [last], heads)
        worst = max(worst[0], error(out[rows], true_out)), max(worst[1], error(back[rows], true_back))
    return worst


class Line(NamedTuple):
    forward: float
    total: float


def measure(name: str, attend: Attend, case: Case, qkv: Tensor, grad: Tensor) -> Line | None:
    """Checks, times and prints; None where it failed."""

    def forward() -> None:
        with torch.no_grad():
            attend(qkv, case.groups, case.heads)

    try:
        of_out, of_back = errors(attend, qkv, grad, case.groups, case.heads)
        if not max(of_out, of_back) < 1e-2:
            print(f"  {name:<47} WRONG: errors {of_out:.1e} {of_back:.1e}", flush=True)
            return None
        line = Line(
            milliseconds(forward, warmup=20, rep=60),
            milliseconds(lambda: both(attend, qkv, grad, case.groups, case.heads), warmup=20, rep=60),
        )
    except Exception as problem:  # one that does not compile or launch must not stop the others
        print(f"  {name:<47} {type(problem).__name__}: {' '.join(str(problem).split())[:110]}", flush=True)
        return None
    print(f"  {name:<47} {line.forward:9.3f} {line.total:9.3f}   {of_out:.1e} {of_back:.1e}", flush=True)
    return line


def label(config: Config) -> str:
    limits = f" registers {config.registers}" if config.registers else ""
    return f"{config.variant} {config.rows}×{config.keys} warps {config.warps} stages {config.stages}" + (
        f" heads {config.heads}{limits}" if config.heads > 1 else limits
    )


def with_backend(backend: SDPBackend) -> Attend:
    def attend(qkv: Tensor, groups: list[Group], heads: int) -> Tensor:
        with sdpa_kernel(backend):
            return dispatch.attend_plain(qkv, groups, heads)

    return attend


def flex() -> Attend:
    from torch.nn.attention.flex_attention import flex_attention

    @torch.compile(dynamic=False)
    def attend(qkv: Tensor, groups: list[Group], heads: int) -> Tensor:
        outs, row = [], 0
        for sequences, tokens, image in groups:
            part = qkv[row : row + sequences * tokens].view(sequences, tokens, 3, heads, -1)
            q, k, v = part.permute(2, 0, 3, 1, 4)
            read = flex_attention(q, k[:, :, :image], v[:, :, :image])
            assert isinstance(read, Tensor)
            outs.append(read.transpose(1, 2).reshape(sequences * tokens, -1))
            row += sequences * tokens
        return torch.cat(outs)

    return attend


def ways() -> dict[str, Attend]:
    """All that the table compares, by name."""
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    theirs = {name: with_backend(backend) for name, backend in backends.items()}
    return theirs | {"FlexAttention": flex(), "ours": attention.fused}


def as_table(titles: list[str], lines: dict[str, list[Line | None]]) -> list[str]:
    """Rows of Markdown: milliseconds forward, and forward with backward."""
    rows = [f"| ms forward, and with backward | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    for name, actual in lines.items():
        figures = (f"{line.forward:.3f}, {line.total:.3f}" if line else "failed" for line in actual)
        rows.append(f"| {name} | {' | '.join(figures)} |")
    return rows


def tune(case: Case, size: str, qkv: Tensor, grad: Tensor, until: float) -> None:
    """Tries the candidates and leaves the fastest in the tables, so that what follows uses them."""
    for table, candidates, which in ((attention.FORWARD, FORWARDS, 0), (attention.BACKWARD, BACKWARDS, 1)):
        before, best = table[size], (float("inf"), table[size])
        for config in candidates[size]:
            if time.perf_counter() > until:
                print("  no time for the other candidates")
                break
            table[size] = config
            actual = measure(label(config), attention.fused, case, qkv, grad)
            if actual:
                best = min(best, (actual[which], config), key=lambda pair: pair[0])
        table[size] = best[1] if best[0] < float("inf") else before
        print(f"  -> {label(table[size])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU in Triton's interpreter")
    parser.add_argument("--tune", action="store_true", help="try other sizes of our tiles, and go on with the fastest")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--seconds", type=float, default=75, help="after these, no more candidates")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")  # PyTorch's reasons why a kernel of its own is not available
    device = torch.device("cpu" if args.tiny else "cuda")
    dtype = torch.float16 if args.tiny else getattr(torch, args.dtype)  # the interpreter has no product of bfloat16
    print(f"{'CPU' if args.tiny else torch.cuda.get_device_name()}, torch {torch.__version__}, {dtype}")
    started = time.perf_counter()
    table: dict[str, list[Line | None]] = {}
    titles: list[str] = []
    for case in cases(args.tiny):
        rows = sum(group.sequences * group.tokens for group in case.groups)
        dim = case.heads * case.width
        numbers = torch.Generator(device).manual_seed(0)
        qkv = torch.randn(rows, 3 * dim, generator=numbers, device=device).to(dtype).requires_grad_()
        grad = torch.randn(rows, dim, generator=numbers, device=device).to(dtype)
        sizes = " + ".join(f"{group.sequences}×{group.tokens}/{group.image}" for group in case.groups)
        title = f"{case.name} {sizes}, {case.heads} heads of {case.width}"
        titles.append(title)
        print(f"\n{title:<49} {'forward':>9} {'and back':>9}   errors of out, dqkv", flush=True)
        if args.tune and case.size and dtype != torch.float32:  # which has small tiles of its own, for every size
            until = started + args.seconds * (0.6 if case.size == "long" else 1)  # the short ones get their turn
            tune(case, case.size, qkv, grad, until)
        for name, attend in ways().items():
            table.setdefault(name, []).append(measure(name, attend, case, qkv, grad))
    print(f"\n{time.perf_counter() - started:.0f} seconds\n")
    print("\n".join(as_table(titles, table)))


if __name__ == "__main__":
    main()
