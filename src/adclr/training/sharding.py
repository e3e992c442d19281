"""FSDP2: weights, teacher, gradients and moments spread over the processes, for networks that are large for one GPU.

A weight that is spread is a DTensor. Blocks gather their matrices when they run; all other weights are gathered for the
whole of a forward and backward pass. What follows the backward pass (clipping, AdamW, the teacher's average) goes
element by element, so it works on each process's own pieces, which are ordinary tensors. Checkpoints hold whole tensors
and do not tell how they were made.
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


class Pieces(torch.optim.AdamW):
    """AdamW on the pieces of this process; `piece_of` finds that of a weight."""

    piece_of: dict[Tensor, nn.Parameter]

    def take_gradients(self) -> None:
        """From the weights, where the backward pass leaves them, to the pieces."""
        for weight, piece in self.piece_of.items():
            piece.grad = None if weight.grad is None else distributed.local(weight.grad)
            weight.grad = None


class Sharded:
    """A method that is spread from now on, its optimizer, and a whole copy of its teacher for who looks at it alone."""

    def __init__(self, method: ADCLR, optimizer: torch.optim.AdamW, settings: Settings, device: torch.device) -> None:
        # half a second to import, for who needs it
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor import DTensor, distribute_tensor

        self._method, self._teacher = method, copy.deepcopy(method.teacher)
        moments = [
            [(name, optimizer.state.get(p, {})) for name, p in _trained(method, group)]
            for group in optimizer.param_groups
        ]
        options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        mesh = init_device_mesh(device.type, (distributed.world_size(),))
        reduced = torch.bfloat16 if settings.train.reduce_precision == "bfloat16" else None
        policy = MixedPrecisionPolicy(reduce_dtype=reduced)
        for branch in (method.student, method.teacher):
            for block in cast(list[Block], branch.backbone.blocks):
                # not its norms: each is used by the block before it too, which adds and normalises in one
                fully_shard([block.attn.qkv, block.attn.proj, block.mlp], mesh=mesh, mp_policy=policy)
        fully_shard(method, mesh=mesh, mp_policy=policy)
        weights = dict(method.student.named_parameters())
        piece_of: dict[Tensor, nn.Parameter] = {}
        groups = []
        for named, option in zip(moments, options, strict=True):
            for name, _ in named:
                piece_of[weights[name]] = nn.Parameter(distributed.local(weights[name].detach()))
            groups.append(option | {"params": [piece_of[weights[name]] for name, _ in named]})
        self.optimizer = Pieces(groups, fused=True)
        self.optimizer.piece_of = piece_of
        for name, state in (pair for named in moments for pair in named):
            weight = weights[name]
            assert isinstance(weight, DTensor)
            for what, value in state.items():
                if value.shape == weight.shape:
                    value = distributed.local(distribute_tensor(value, weight.device_mesh, weight.placements))
                self.optimizer.state[piece_of[weight]][what] = value

    def teacher(self) -> Branch:
        """Whole, as it is now; all processes must ask."""
        with torch.no_grad():
            for whole, weight in zip(self._teacher.parameters(), self._method.teacher.parameters(), strict=True):
                whole.copy_(distributed.whole(weight))
        return self._teacher


def state_of(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> dict[str, Tensor]:
    """What an optimizer remembers of a weight, spread as the weight is."""
    if not isinstance(optimizer, Pieces):
        found: dict[str, Tensor] = optimizer.state.get(weight, {})
        return found
    from torch.distributed.tensor import DTensor

    assert isinstance(weight, DTensor)
    piece = optimizer.piece_of.get(weight)
    state: dict[str, Tensor] = {} if piece is None else optimizer.state.get(piece, {})

    def spread(value: Tensor) -> Tensor:
        if piece is None or value.shape != piece.shape or value.ndim == 0:
            return value
        return DTensor.from_local(
            value, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride(), run_check=False
        )

    return {what: spread(value) for what, value in state.items()}


def sync_gradients(method: ADCLR, wanted: bool) -> None:
    """Whether the next backward pass adds gradients up over the processes."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(method, FSDPModule)
    method.set_requires_gradient_sync(wanted)


def _trained(method: ADCLR, group: dict[str, object]) -> list[tuple[str, nn.Parameter]]:
    names = {parameter: name for name, parameter in method.student.named_parameters()}
    parameters = group["params"]
    assert isinstance(parameters, list)
    return [(names[parameter], parameter) for parameter in parameters]
