"""Rotary positions against their formula in float64; without a GPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from adclr.model.ops import rotation
from adclr.model.ops.attention import Group
from adclr.model.ops.rotation import Rotation
from adclr.model.positions import rotation_of_groups
from kernel_device import DEVICE, needs_interpreter

HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter multiplies the bits of bfloat16
GROUPS = [Group(2, 9, 7), Group(3, 7, 7), Group(1, 17, 13, 1), Group(0, 5, 5)]  # [CLS], patches, queries
GRIDS = [(2, 3), (3, 2), (4, 3), (2, 2)]


def formula(qkv: Tensor, groups: Sequence[Group], grids: Sequence[tuple[int, int]], prefix: int, heads: int) -> Tensor:
    """Number by number: a pair is a complex number times exp(2 pi i position / period)."""
    width = qkv.shape[1] // 3 // heads
    out, row = qkv.double().cpu().clone(), 0
    for group, (rows, columns) in zip(groups, grids, strict=True):
        for _ in range(group.sequences):
            for token in range(group.tokens):
                patch = token - prefix
                if 0 <= patch < rows * columns:
                    place = ((patch // columns + 0.5) / rows * 2 - 1, (patch % columns + 0.5) / columns * 2 - 1)
                    for part in range(2):
                        for head in range(heads):
                            start = (part * heads + head) * width
                            for pair in range(width // 2):
                                axis, number = divmod(pair, width // 4)
                                turn = cmath.exp(2j * math.pi * place[axis] / 100 ** (4 * number / width))
                                ends = [start + pair, start + pair + width // 2]
                                value = complex(*(float(out[row, end]) for end in ends)) * turn
                                out[row, ends[0]], out[row, ends[1]] = value.real, value.imag
                row += 1
    return out.to(qkv.device)


def case(dtype: torch.dtype, heads: int = 3, width: int = 16) -> tuple[Tensor, Rotation]:
    rows = sum(group.sequences * group.tokens for group in GROUPS)
    qkv = torch.randn(rows, 3 * heads * width, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    return qkv, rotation_of_groups(GRIDS, 1, GROUPS, width, qkv)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (HALF, 1e-2)])
def test_the_reference_is_the_formula(dtype: torch.dtype, tolerance: float) -> None:
    qkv, table = case(dtype)
    actual = rotation.plain(qkv, table, GROUPS, 3)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), formula(qkv, GROUPS, GRIDS, 1, 3), rtol=tolerance, atol=tolerance)


@needs_interpreter
@pytest.mark.parametrize(("heads", "width"), [(3, 16), (2, 64), (1, 4)])
def test_the_kernel_is_the_reference(heads: int, width: int) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (HALF, 1e-2)):
        qkv, table = case(dtype, heads, width)
        qkv = qkv.requires_grad_()
        actual, expected = rotation.fused(qkv, table, GROUPS, heads), rotation.plain(qkv, table, GROUPS, heads)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        weights = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1)).to(actual)
        gradients = [torch.autograd.grad(out, qkv, weights)[0] for out in (actual, expected)]
        torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance)
        # values, and tokens without a position, are the same to the bit
        dim = heads * width
        assert torch.equal(actual[:, 2 * dim :], qkv[:, 2 * dim :])
        assert torch.equal(actual[[0, 7, 8]], qkv[[0, 7, 8]])
        assert not torch.equal(actual[1, :dim], qkv[1, :dim])


@needs_interpreter
def test_all_of_the_result_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, table = case(torch.float32)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **named: empty_like(*args, **named).fill_(float("nan")))
    assert rotation.fused(qkv, table, GROUPS, 3).isfinite().all()


def test_a_table_of_another_size_is_refused() -> None:
    qkv, table = case(torch.float32)
    for wrong in (table._replace(periods=(9, 7, 17, 4)), table._replace(table=table.table[:, 1:])):
        with pytest.raises(ValueError, match="table"):
            rotation.fused(qkv, wrong, GROUPS, 3)


def test_products_of_queries_and_keys_depend_on_the_way_between_patches() -> None:
    """The scores of two patches are those of any other two with as many rows and columns between them."""
    group, grid, width = Group(1, 20, 20), (4, 5), 32
    q, k, v = torch.randn(3, width, dtype=torch.float64)
    qkv = torch.cat([q, k, v]).expand(20, -1).contiguous()
    turned = rotation.plain(qkv, rotation_of_groups([grid], 0, [group], width, qkv), [group], 1)
    scores = (turned[:, :width] @ turned[:, width : 2 * width].T).view(*grid, *grid)
    torch.testing.assert_close(scores[0, 0, 1, 2], scores[2, 1, 3, 3])
    torch.testing.assert_close(scores[3, 4, 1, 0], scores[2, 4, 0, 0])
    assert (scores[0, 0, 1, 2] - scores[0, 0, 2, 1]).abs() > 1e-3


def test_compiled_code_has_it_as_one_operation() -> None:
    qkv, table = case(torch.float32)
    groups, rows = GROUPS, [group.sequences * group.tokens for group in GROUPS]

    def twice(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.adclr.rotate(2 * x, table.table, rows, list(table.periods), 3, False)
        return out + 1

    torch.library.opcheck(
        torch.ops.adclr.rotate,
        (qkv.requires_grad_(), table.table, rows, list(table.periods), 3, False),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    expected = rotation.plain(2 * qkv, table, groups, 3) + 1
    torch.testing.assert_close(torch.compile(twice, backend="aot_eager", fullgraph=True)(qkv), expected)
