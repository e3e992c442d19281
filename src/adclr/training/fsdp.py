"""FSDP2: weights, teacher, gradients and moments sharded over the processes, for networks too large for one GPU.

A sharded weight is a DTensor. Blocks gather their matrices when they run; all other weights are gathered for the whole
forward and backward pass. What follows the backward pass (clipping, AdamW, the teacher's average) is elementwise, so
each process works on its local shards, which are ordinary tensors. Checkpoints hold full tensors, whether sharded or
not.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import Tensor, nn

from adclr.config.settings import Settings
from adclr.model.blocks import Block
from adclr.model.method import ADCLR, Branch
from adclr.system import distributed


class ShardedAdamW(torch.optim.AdamW):
    """AdamW on the local shards of this process; `shard_of` maps a weight to its shard."""

    shard_of: dict[Tensor, nn.Parameter]

    def take_gradients(self) -> None:
        """Move gradients from the weights, where the backward pass leaves them, to the shards."""
        for weight, shard in self.shard_of.items():
            shard.grad = None if weight.grad is None else distributed.local_tensor(weight.grad)
            weight.grad = None


class Sharded:
    """Shards a method in place; has its optimizer, and a full copy of its teacher for scores in a single process."""

    def __init__(self, method: ADCLR, optimizer: torch.optim.AdamW, settings: Settings, device: torch.device) -> None:
        # takes half a second to import
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor import DTensor, distribute_tensor

        self._method, self._teacher = method, copy.deepcopy(method.teacher)
        moments = [
            [(name, optimizer.state.get(p, {})) for name, p in _named_parameters(method, group)]
            for group in optimizer.param_groups
        ]
        options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        mesh = init_device_mesh(device.type, (distributed.world_size(),))
        reduced = torch.bfloat16 if settings.train.reduce_precision == "bfloat16" else None
        policy = MixedPrecisionPolicy(reduce_dtype=reduced)
        for branch in (method.student, method.teacher):
            for block in cast(list[Block], branch.backbone.blocks):
                # not its norms: each is used by the block before it too, which adds and normalizes in one kernel
                fully_shard([block.attn.qkv, block.attn.proj, block.mlp], mesh=mesh, mp_policy=policy)
        fully_shard(method, mesh=mesh, mp_policy=policy)
        weights = dict(method.student.named_parameters())
        shard_of: dict[Tensor, nn.Parameter] = {}
        groups = []
        for named, option in zip(moments, options, strict=True):
            for name, _ in named:
                shard_of[weights[name]] = nn.Parameter(distributed.local_tensor(weights[name].detach()))
            groups.append(option | {"params": [shard_of[weights[name]] for name, _ in named]})
        self.optimizer = ShardedAdamW(groups, fused=True)
        self.optimizer.shard_of = shard_of
        for name, state in (pair for named in moments for pair in named):
            weight = weights[name]
            assert isinstance(weight, DTensor)
            for key, value in state.items():
                if value.shape == weight.shape:
                    value = distributed.local_tensor(distribute_tensor(value, weight.device_mesh, weight.placements))
                self.optimizer.state[shard_of[weight]][key] = value

    def teacher(self) -> Branch:
        """Return the full copy with the present weights; all processes must call it."""
        with torch.no_grad():
            for full, weight in zip(self._teacher.parameters(), self._method.teacher.parameters(), strict=True):
                full.copy_(distributed.full_tensor(weight))
        return self._teacher


def state_of(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> dict[str, Tensor]:
    """Return the state an optimizer has of a weight, sharded as the weight is."""
    state: dict[str, Tensor]
    if not isinstance(optimizer, ShardedAdamW):
        state = optimizer.state.get(weight, {})
        return state
    from torch.distributed.tensor import DTensor

    assert isinstance(weight, DTensor)
    shard = optimizer.shard_of.get(weight)
    state = {} if shard is None else optimizer.state.get(shard, {})

    def to_dtensor(value: Tensor) -> Tensor:
        if shard is None or value.shape != shard.shape or value.ndim == 0:
            return value
        return DTensor.from_local(
            value, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride(), run_check=False
        )

    return {key: to_dtensor(value) for key, value in state.items()}


def sync_gradients(method: ADCLR, enabled: bool) -> None:
    """Set whether the next backward pass adds gradients up over the processes."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(method, FSDPModule)
    method.set_requires_gradient_sync(enabled)


def _named_parameters(method: ADCLR, group: dict[str, object]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of an optimizer group with their names in the student."""
    names = {parameter: name for name, parameter in method.student.named_parameters()}
    parameters = group["params"]
    assert isinstance(parameters, list)
    return [(names[parameter], parameter) for parameter in parameters]
