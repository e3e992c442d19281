"""Would drop path that skips the work of dropped samples be faster? One block, forward and backward, both ways.

    python benchmarks/drop_path.py [--tiny]

`all` is the block as it is trained: every sample goes through, and a factor of 0 or 1 / (1 - rate) is on the sum.
`skip` draws as many sequences as are kept on average, takes their tokens out, and adds what comes of them in again, so
that shapes stay as a CUDA graph needs them. Both compiled, on the tokens of 256 images: 2×224 + 10×96, 10 queries.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence

if "--tiny" in sys.argv:  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor, nn

from adclr.model.blocks import Attention, Block, expand_to_tokens, run_block
from adclr.model.ops.attention import Group
from adclr.training.step import time_calls

RATES = (0.05, 0.1, 0.3)  # 0.05 is the mean over blocks of drop_path=0.1


def drawn(groups: Sequence[Group], rate: float, device: torch.device) -> tuple[Tensor, list[Group]]:
    """The rows of the sequences that are kept, and what they are."""
    rows, kept, start = [], [], 0
    for group in groups:
        count = round((1 - rate) * group.sequences)
        chosen = torch.randperm(group.sequences, device=device)[:count].sort().values
        rows.append((start + chosen[:, None] * group.tokens + torch.arange(group.tokens, device=device)).flatten())
        kept.append(group._replace(sequences=count))
        start += group.sequences * group.tokens
    return torch.cat(rows), kept


def skipping(block: Block, x: Tensor, draws: Sequence[tuple[Tensor, list[Group]]], rate: float) -> Tensor:
    (rows, groups), (others, _) = draws
    scale = 1 / (1 - rate)
    part = block.attn.proj(block.attn(block.norm1(x.index_select(0, rows)), groups))
    x = x.index_add(0, rows, part.to(x.dtype), alpha=scale)
    part = block.mlp(block.norm2(x.index_select(0, others)))
    return x.index_add(0, others, part.to(x.dtype), alpha=scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU, to see that it runs")
    tiny = parser.parse_args().tiny
    device = torch.device("cpu" if tiny else "cuda")
    dim, heads = (32, 2) if tiny else (384, 6)
    groups = [Group(4, 20, 17), Group(8, 5, 5)] if tiny else [Group(512, 207, 197), Group(2560, 37, 37)]
    torch.manual_seed(0)
    block = Block(dim, Attention(dim, heads, "image", 1), None).to(device)
    following = nn.LayerNorm(dim, eps=1e-6).to(device)
    stream = torch.float32 if tiny else torch.bfloat16
    tokens, sequences = (sum(g.sequences * size for g, size in zip(groups, sizes, strict=True)) for sizes in (
        [g.tokens for g in groups], [1] * len(groups)))  # fmt: skip
    x = torch.randn(tokens, dim, device=device, dtype=stream).requires_grad_()
    grad = torch.randn(tokens, dim, device=device, dtype=stream)
    kept = expand_to_tokens((torch.rand(2, sequences, device=device) > 0.05) / 0.95, groups)
    whole = run_block if tiny else torch.compile(run_block, dynamic=False)

    def all_of_it() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=not tiny):
            out, y = whole((block, x, block.norm1(x).to(stream), tuple(groups), following, kept, None))
        torch.autograd.backward([out, y], [grad, grad.to(y.dtype)])

    def measure(name: str, work: object) -> float:
        assert callable(work)
        for _ in range(3):
            work()
        if not tiny:
            torch.cuda.synchronize()
        spent = 1000 * statistics.median(time_calls(work, device, 2 if tiny else 20, 1 if tiny else 5))
        print(f"{name:<12} {spent:8.3f} ms", flush=True)
        return spent

    print("CPU, tiny: the figures mean nothing" if tiny else torch.cuda.get_device_name())
    base = measure("all", all_of_it)
    for rate in RATES:
        draws = [drawn(groups, rate, device) for _ in range(2)]
        part = skipping if tiny else torch.compile(skipping, dynamic=False)

        def some(rate: float = rate, draws: Sequence[tuple[Tensor, list[Group]]] = draws, part: object = part) -> None:
            assert callable(part)
            with torch.autocast(device.type, torch.bfloat16, enabled=not tiny):
                out = part(block, x, draws, rate)
                y = following(out)
            torch.autograd.backward([out, y], [grad, grad.to(y.dtype)])

        spent = measure(f"skip {rate:.0%}", some)
        print(f"{'':<12} {spent / base:8.3f} of all")


if __name__ == "__main__":
    main()
