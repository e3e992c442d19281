"""Schedules against values worked by hand; the update against AdamW written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from adclr.model.optim import optimizer_step
from adclr.training.schedules import Schedules, Values, make_optimizer
from tiny import tiny

SCHEDULES = Schedules(
    tiny(epochs=10, warmup_epochs=2, lr=1.0, final_lr=0.5, **{"train__batch_size": 512}, weight_decay=0.1,
         weight_decay_end=0.3, momentum=0.8, momentum_end=1.0, teacher_temperature_start=0.04, teacher_temperature=0.08,
         teacher_temperature_warmup_epochs=4, freeze_last_layer_epochs=1), 5)  # fmt: skip


def test_schedules() -> None:
    at = SCHEDULES.at
    assert SCHEDULES.total_steps == 50
    assert at(0).lr == 0
    assert at(5).lr == pytest.approx(2.0 * 5 / 10)  # 1.0 for each 256 images, half of the warm-up done
    assert at(10).lr == pytest.approx(2.0)
    assert at(30).lr == pytest.approx(0.5 + 1.5 * 0.5)  # half-way down
    assert at(49).lr == pytest.approx(0.5 + 1.5 * 0.5 * (1 + math.cos(math.pi * 39 / 40)))
    assert at(0).weight_decay == pytest.approx(0.1)
    assert at(25).weight_decay == pytest.approx(0.2)
    assert at(0).momentum == pytest.approx(0.8)
    assert at(25).momentum == pytest.approx(0.9)
    assert [at(s).teacher_temperature for s in (0, 4, 5, 12, 20, 49)] == pytest.approx(
        [0.04, 0.04, 0.05, 0.06, 0.08, 0.08]
    )
    assert [at(s).freeze_last_layer for s in (0, 4, 5)] == [True, True, False]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def give_gradients(model: nn.Module, scale: float = 1.0) -> torch.Tensor:
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn_like(parameter)
    return torch.tensor(1.0)


def test_a_step_is_adamw_with_each_tensor_clipped_on_its_own_and_only_matrices_decayed() -> None:
    model, settings = network(), tiny()
    optimizer = make_optimizer(model, settings)
    loss = give_gradients(model, scale=2.0)
    before = {n: p.detach().double().clone() for n, p in model.named_parameters()}
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    assert optimizer_step(optimizer, 0.1, 0.2, 3.0, loss)
    clipped = 0
    for name, parameter in model.named_parameters():
        g, p = grads[name], before[name]
        norm = g.norm().item()
        clipped += norm > 3
        g = g * min(1.0, 3.0 / (norm + 1e-6))
        if p.ndim > 1:
            p = p * (1 - 0.1 * 0.2)
        m, v = 0.1 * g, 0.001 * g * g
        p = p - 0.1 * (m / 0.1) / ((v / 0.001).sqrt() + 1e-8)
        torch.testing.assert_close(parameter.detach().double(), p, rtol=1e-5, atol=1e-6)
        # a first step of Adam does not depend on the scale of its gradient, so that is looked at itself
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), g, rtol=1e-5, atol=1e-6)
    assert 0 < clipped < len(before)


@pytest.mark.parametrize("class_attention", [0, 1])
def test_early_blocks_learn_more_slowly(class_attention: int) -> None:
    """The step of a parameter is that without layer decay, times the factor of its layer; so is its weight decay."""
    from adclr.training.job import build

    factors = {"backbone.blocks.0.": 0.25, "backbone.blocks.1.": 0.5, "backbone.norm": 1.0, "head": 1.0}
    factors |= {"backbone.mask_token": 1.0, "backbone.blocks_token_only.": 1.0}
    factors |= {"backbone.cls_token": 1.0 if class_attention else 0.125, "backbone": 0.125}
    moved = []
    for layer_decay in (1.0, 0.5):
        settings = tiny(masked_weight=1.0, num_queries=0, class_attention=class_attention, layer_decay=layer_decay)
        student = build(settings).student
        before = {name: p.detach().clone() for name, p in student.named_parameters()}
        for lr in (0.01, torch.tensor(0.01)):  # on a GPU it is a tensor
            student.load_state_dict(before, strict=False)
            assert optimizer_step(make_optimizer(student, settings), lr, 0.2, None, give_gradients(student))
        moved.append({name: p.detach() - before[name] for name, p in student.named_parameters()})
    for name, step in moved[1].items():
        factor = next(value for start, value in factors.items() if name.startswith(start))
        torch.testing.assert_close(step, factor * moved[0][name], rtol=1e-3, atol=1e-6)


def test_a_frozen_last_layer_neither_moves_nor_decays() -> None:
    from adclr.training import micro_batch
    from adclr.training.job import build
    from adclr.training.step import Step

    settings = tiny()
    method = build(settings)
    step = Step(settings, method, make_optimizer(method.student, settings), torch.device("cpu"), None)
    views = [micro_batch.random_views(settings, 4, torch.device("cpu"))]
    last = method.student.head.last_layer
    for frozen in (True, False):
        before = {n: p.detach().clone() for n, p in last.named_parameters()}
        moving = method.student.backbone.pos_embed.detach().clone()
        _, ok = step(views, Values(0.1, 0.2, 0.9, 0.05, freeze_last_layer=frozen))
        assert ok
        assert all(torch.equal(p, before[n]) == frozen for n, p in last.named_parameters())
        assert not torch.equal(method.student.backbone.pos_embed, moving)


def test_numbers_on_the_device_give_the_same_step() -> None:
    results = []
    for numbers in ((0.1, 0.2), (torch.tensor(0.1), torch.tensor(0.2))):
        model = network()
        optimizer = make_optimizer(model, tiny())
        for _ in range(3):
            optimizer_step(optimizer, *numbers, 3.0, give_gradients(model))
        results.append([p.detach() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_not_finite_voids_the_step_to_the_bit(where: str, bad: float) -> None:
    model = network()
    optimizer = make_optimizer(model, tiny())
    assert optimizer_step(optimizer, 0.1, 0.2, 3.0, give_gradients(model))
    state = {n: p.detach().clone() for n, p in model.named_parameters()}
    moments = [t.clone() for p in model.parameters() for t in optimizer.state[p].values()]
    loss = give_gradients(model)
    if where == "loss":
        loss = torch.tensor(bad)
    else:
        assert model[1].bias.grad is not None
        model[1].bias.grad[2] = bad
    assert not optimizer_step(optimizer, 0.1, 0.2, 3.0, loss)
    assert all(torch.equal(p, state[n]) for n, p in model.named_parameters())
    after = [t for p in model.parameters() for t in optimizer.state[p].values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    assert optimizer_step(optimizer, 0.1, 0.2, 3.0, give_gradients(model))
    assert all(p.isfinite().all() for p in model.parameters())


def test_positions_tokens_and_the_gain_are_decayed_biases_and_norms_are_not() -> None:
    from adclr.training.job import build

    student = build(tiny(masked_weight=1.0, layer_scale=0.1)).student
    optimizer = make_optimizer(student, tiny())
    decayed = {id(p) for group in optimizer.param_groups if group["decayed"] for p in group["params"]}
    names = {name for name, p in student.named_parameters() if id(p) in decayed}
    for name in ("pos_embed", "cls_token", "mask_token", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight"):
        assert f"backbone.{name}" in names
    assert "head.last_layer.gain" in names
    for name, p in student.named_parameters():
        assert (name in names) == (p.ndim > 1)
        if name.endswith((".bias", "norm.weight", "norm1.weight", "gamma")):
            assert name not in names


def test_a_step_told_by_the_device_is_the_step_and_one_without_a_temperature_is_void() -> None:
    """What a recorded step does, without the recording: its numbers are one tensor, and recording runs it void."""
    from adclr.training import micro_batch
    from adclr.training.job import build
    from adclr.training.step import Step, _frozen, _numbers

    settings, cpu = tiny(model__drop_path=0.0), torch.device("cpu")
    views = micro_batch.random_views(settings, 4, cpu)
    methods = [build(settings) for _ in range(2)]
    optimizers = [make_optimizer(method.student, settings) for method in methods]
    steps = [Step(settings, method, o, cpu, None) for method, o in zip(methods, optimizers, strict=True)]

    def state(which: int) -> list[torch.Tensor]:
        moments = [value for state in optimizers[which].state.values() for value in state.values()]
        return [tensor.clone() for tensor in (*methods[which].state_dict().values(), *moments)]

    for number in range(4):
        still = {"freeze_last_layer": number < 2, "freeze_backbone": number < 1}
        values = Values(0.01, 0.1 * number, 0.9, 0.04 + 0.01 * number, **still, query_temperature=0.1)
        losses, ok = steps[0]([views], values)
        same, fine = steps[1]._run([views], torch.tensor(_numbers(values)), _frozen(values))
        assert ok
        assert fine
        torch.testing.assert_close(losses, same)
        for a, b in zip(state(0), state(1), strict=True):
            torch.testing.assert_close(a, b)
    before = state(1)
    _, ok = steps[1]._run([views], torch.tensor([0.0, 0.0, 1.0, math.nan, math.nan]), (False, False))
    assert not ok
    assert all(torch.equal(a, b) for a, b in zip(before, state(1), strict=True))
