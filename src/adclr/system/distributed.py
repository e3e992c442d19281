"""Groups of processes: join and leave, rank, reduce, gather. All of it works in a single process too."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from adclr.config.parsing import UserError
from adclr.system import machine

TIMEOUT = timedelta(hours=2)  # the others wait while the first process scores a probe
SHARE_GPUS = "ADCLR_SHARE_GPUS"  # environment variable; 1: more processes than GPUs, by gloo, to try several processes
PEER_LOST = ("by peer", "remote process")  # in errors of gloo and NCCL when another process has ended


@contextmanager
def session(device: torch.device) -> Iterator[None]:
    """Join the group that torchrun prepared (RANK, WORLD_SIZE, ... in the environment), if there is one."""
    if "WORLD_SIZE" not in os.environ or int(os.environ["WORLD_SIZE"]) == 1 or dist.is_initialized():
        yield
        return
    # NCCL refuses processes that share a GPU
    backend = "nccl" if device.type == "cuda" and machine.gpu_sharers() == 1 else "gloo"
    store = _store_of_this_start()
    if store is None:
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in PEER_LOST):
            raise
        raise UserError("another process of this run has ended, so this one ends too; its message says why") from None
    finally:
        gc.collect()  # DDP's reducer holds the group in a cycle; left to the interpreter's end it can abort
        dist.destroy_process_group()


def _store_of_this_start() -> Any:
    """Return torchrun's store with names of their own for each of its restarts; None where there is none to restart.

    torchrun keeps one store over all restarts, in which a process would find the addresses of those that have died.
    On several machines it counts restarts by machine, and not all have the same number.
    """
    environment = os.environ
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or environment.get("GROUP_WORLD_SIZE") != "1":
        return None
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=TIMEOUT)  # type: ignore[attr-defined]
    start = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"start {start}", store)  # type: ignore[attr-defined]


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if in_group() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if in_group() else 1


def in_group() -> bool:
    """Return whether this process is in a group, as those of torchrun are if there are several."""
    return dist.is_initialized()


def is_main() -> bool:
    """Return whether this is the first process, the one that writes and prints."""
    return rank() == 0


def local_rank() -> int:
    """Return the number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Return how many processes share this machine and its memory."""
    return machine.local_processes()


def gpu_number() -> int:
    """Return the number of this process's GPU."""
    number, count = local_rank(), torch.cuda.device_count()
    if number < count:
        return number
    if os.environ.get(SHARE_GPUS) != "1":
        raise UserError(
            f"process {number} has no GPU of its own: there are {count}; start fewer, "
            f"or set {SHARE_GPUS}=1 to let processes share them, which is slower"
        )
    return number % count


def barrier() -> None:
    """Wait until all processes are here."""
    if in_group():
        dist.barrier()


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place."""
    if in_group():
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


def all_reduce_min(tensor: Tensor) -> Tensor:
    """Take the minimum of a tensor over all processes, in place."""
    if in_group():
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return tensor


def local_range(count: int) -> range:
    """Return which of `count` items are this process's; the processes have consecutive ranges."""
    return range(count * rank() // world_size(), count * (rank() + 1) // world_size())


def gather(tensor: Tensor) -> Tensor:
    """Return the rows of all processes in the order of the processes; their numbers may differ."""
    if not in_group():
        return tensor
    device = torch.device("cuda", gpu_number()) if dist.get_backend() == "nccl" else torch.device("cpu")
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor([len(tensor)], device=device))
    longest = max(int(count) for count in counts)
    padded = torch.zeros(longest, *tensor.shape[1:], dtype=tensor.dtype, device=device)
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)
    return torch.cat([rows[: int(count)] for rows, count in zip(gathered, counts, strict=True)]).to(tensor.device)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, or the tensor if it is not sharded (a DTensor)."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def full_tensor(tensor: Tensor) -> Tensor:
    """Return all of a tensor that may be sharded; all processes must call it."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


class HostGroup:
    """A group of the processes' CPUs: they exchange flags without waiting for their GPUs."""

    def __init__(self) -> None:
        self.group = None
        if in_group():
            group = dist.new_group(backend="gloo", timeout=TIMEOUT)
            assert isinstance(group, dist.ProcessGroup)
            self.group = group

    def ask(self, *flags: bool) -> Callable[[], list[bool]]:
        """Start to find out, for each flag, whether it is true in any process; the returned function waits for that."""
        if self.group is None:
            return lambda: list(flags)
        shared = torch.tensor(flags, dtype=torch.float32)
        work = dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        assert work is not None

        def wait() -> list[bool]:
            work.wait()
            return [bool(flag) for flag in shared]

        return wait
