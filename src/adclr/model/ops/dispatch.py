"""The operations of a block: each in plain PyTorch, which works everywhere and is the reference of its kernels.

On NVIDIA GPUs, where they fit, the kernels of `attention.py`, `mlp.py` and `norm.py` run instead. On a CPU this file is
all there is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from adclr.model.ops import attention
from adclr.model.ops import mlp as mlp_operation
from adclr.model.ops import norm as norm_operation
from adclr.model.ops.attention import Group


def attend(qkv: Tensor, groups: Sequence[Group], num_heads: int) -> Tensor:
    """M×3D -> M×D, with M the tokens of all groups and D the heads side by side, as in timm's qkv layer."""
    if qkv.is_cuda and attention.fits(qkv, groups, num_heads):
        return attention.fused(qkv, groups, num_heads)
    return attend_plain(qkv, groups, num_heads)


def attend_plain(qkv: Tensor, groups: Sequence[Group], num_heads: int) -> Tensor:
    """Run PyTorch's attention on each group."""
    dim = qkv.shape[1] // 3
    outputs, row = [], 0
    for sequences, tokens, image, hidden in groups:
        rows = qkv[row : row + sequences * tokens].view(sequences, tokens, 3, num_heads, dim // num_heads)
        q, k, v = rows.permute(2, 0, 3, 1, 4)
        if hidden and tokens > image:
            image_output = F.scaled_dot_product_attention(q[:, :, :image], k[:, :, :image], v[:, :, :image])
            keys, values = k[:, :, hidden:image], v[:, :, hidden:image]
            output = torch.cat([image_output, F.scaled_dot_product_attention(q[:, :, image:], keys, values)], dim=2)
        else:
            output = F.scaled_dot_product_attention(q, k[:, :, :image], v[:, :, :image])
        outputs.append(output.transpose(1, 2).reshape(sequences * tokens, dim))
        row += sequences * tokens
    return torch.cat(outputs)


def mlp(y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """...×D -> ...×D, in y's type or autocast's. Parameters and their gradients may be float32."""
    if torch.is_autocast_enabled(y.device.type):
        y = y.to(torch.get_autocast_dtype(y.device.type))
    if y.is_cuda and mlp_operation.fits(y):
        return mlp_operation.fused(y, w1, b1, w2, b2)
    return mlp_plain(y, w1, b1, w2, b2)


def mlp_plain(y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Run PyTorch's operations."""
    hidden = F.linear(y, w1.to(y.dtype), b1.to(y.dtype))
    return F.linear(F.gelu(hidden), w2.to(y.dtype), b2.to(y.dtype))


def add_norm(
    x: Tensor,
    branch: Tensor | None,
    factor: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (x + branch · factor, its LayerNorm), M×D. The sum has the type of x, and so has the norm without `dtype`.

    `factor`, M or M×1, has no gradient. Without it the sum is x + branch, and without a branch x.
    """
    run = norm_operation.fused if x.is_cuda and norm_operation.fits(x, dtype) else add_norm_plain
    return run(x, branch, factor, weight, bias, eps, dtype)


def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return the LayerNorm of x, M×D."""
    return add_norm(x, None, None, weight, bias, eps, dtype)[1]


def add_norm_plain(
    x: Tensor,
    branch: Tensor | None,
    factor: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Run PyTorch's LayerNorm in float32, on the sum rounded to the type of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if branch is not None:
        addend = branch.to(wide) if factor is None else branch.to(wide) * factor.detach().reshape(-1, 1)
        x = (x.to(wide) + addend).to(x.dtype)
    normed = F.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps)
    return x, normed.to(x.dtype if dtype is None else dtype)
