"""The time of GPU work alone: recorded as a CUDA graph and replayed, so that launches from the host do not count."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from adclr.training.cuda_graph import record_graph


def milliseconds(work: Callable[[], object], warmup: int = 10, rep: int = 50) -> float:
    """Return the median time, over `rep` ms after `warmup` ms; on a CPU, where scripts are only tried, that of one."""
    if not torch.cuda.is_available():
        started = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - started)
    from triton.testing import do_bench

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    graph, _ = record_graph(work, aside)
    return float(do_bench(graph.replay, warmup=warmup, rep=rep, return_mode="median"))
