"""One process or many: start and stop, rank, reduce, gather. Every call is right in one process too."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from adclr.config.sections import UserError
from adclr.system import machine

PATIENCE = timedelta(hours=2)  # since the others wait while the first process scores a probe

LOST = ("by peer", "remote process")  # what gloo and NCCL say of a process that is no more


@contextmanager
def session(device: torch.device) -> Iterator[None]:
    """Joins the group that torchrun prepared (RANK, WORLD_SIZE, ... in the environment), if there is one."""
    if "WORLD_SIZE" not in os.environ or int(os.environ["WORLD_SIZE"]) == 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in LOST):
            raise
        raise UserError("another process of this run has ended, so this one does too; that one says why") from None
    finally:
        gc.collect()  # DDP's reducer holds the group in a cycle; left to the interpreter's end it can abort
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


def local_rank() -> int:
    """The number of this process on its machine, which is the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """How many processes share this machine and its memory."""
    return machine.local_processes()


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def sum_(tensor: Tensor) -> Tensor:
    """Adds up over all processes, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


def min_(tensor: Tensor) -> Tensor:
    """The least over all processes, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return tensor


def part(count: int) -> range:
    """Which of `count` things in a row are this process's."""
    return range(count * rank() // world_size(), count * (rank() + 1) // world_size())


def gather(tensor: Tensor) -> Tensor:
    """The rows of all processes, of each perhaps another number, one behind the other in the order of the processes."""
    if world_size() == 1:
        return tensor
    device = torch.device("cuda", local_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor([len(tensor)], device=device))
    longest = max(int(count) for count in counts)
    padded = torch.zeros(longest, *tensor.shape[1:], dtype=tensor.dtype, device=device)
    padded[: len(tensor)] = tensor
    found = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(found, padded)
    rows = [rows[: int(count)] for rows, count in zip(found, counts, strict=True)]
    return torch.cat(rows).to(tensor.device)


def local(tensor: Tensor) -> Tensor:
    """The piece of a tensor that this process has: all of it unless it is spread, which makes it a DTensor."""
    piece: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return piece


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be spread, for which all processes must ask."""
    all_of_it: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return all_of_it


class Hosts:
    """Processes that ask each other without their GPUs, which would have to be waited for."""

    def __init__(self) -> None:
        self.group = None
        if world_size() > 1:
            group = dist.new_group(backend="gloo", timeout=PATIENCE)
            assert isinstance(group, dist.ProcessGroup)
            self.group = group

    def ask(self, *yes: bool) -> Callable[[], list[bool]]:
        """Asks several questions while other work is done; the function that is returned waits for the answers.

        The answer to a question is whether any process says yes.
        """
        if self.group is None:
            return lambda: list(yes)
        flags = torch.tensor(yes, dtype=torch.float32)
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        assert work is not None

        def answer() -> list[bool]:
            work.wait()
            return [bool(flag) for flag in flags]

        return answer
