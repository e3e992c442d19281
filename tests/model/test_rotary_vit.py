"""The ViT with rotary positions: what holds for queries, the ways to run it, and a slow reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adclr.model.blocks import QueryKeys
from adclr.model.named_tensors import Input
from adclr.model.ops.attention import Group
from adclr.model.vit import VisionTransformer
from test_rotation import formula
from test_vit import UNIDIRECTIONAL, inputs, make

pytestmark = pytest.mark.usefixtures("one_thread")


def rotary(query_keys: QueryKeys = "image", **options: object) -> VisionTransformer:
    return make(
        query_keys, **({"num_registers": 2, "layer_scale": 0.5, "mlp": "gated"} | options), position_embedding="rotary"
    )


def slow(vit: VisionTransformer, images: Tensor, queries: Tensor) -> Tensor:
    """All tokens in float64, block by block; queries are neither turned nor attended to."""
    x = torch.cat([vit.embed(images), vit.embed_queries(queries)], dim=1)
    batch, tokens, image = *x.shape[:2], x.shape[1] - queries.shape[1]
    grid = vit.grid_of(*images.shape[-2:])
    for block in vit.blocks:
        attn = block.attn
        bias = attn.qkv.bias.clone()
        bias[vit.dim : 2 * vit.dim] = 0
        qkv = block.norm1(x) @ attn.qkv.weight.T + bias
        turned = formula(qkv.flatten(0, 1), [Group(batch, tokens, image)], [grid], vit.num_prefix, vit.num_heads)
        q, k, v = turned.view(batch, tokens, 3, vit.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k[:, :, :image].mT / k.shape[-1] ** 0.5).exp()
        read = (scores / scores.sum(-1, keepdim=True)) @ v[:, :, :image]
        x = x + block.ls1.gamma * attn.proj(read.transpose(1, 2).flatten(2))
        y = block.norm2(x)
        gate = y @ block.mlp.fc1_g.weight.T + block.mlp.fc1_g.bias
        hidden = gate / (1 + (-gate).exp()) * (y @ block.mlp.fc1_x.weight.T + block.mlp.fc1_x.bias)
        x = x + block.ls2.gamma * block.mlp.fc2(hidden)
    return vit.norm(x)


@torch.no_grad()
def test_the_vit_is_the_slow_reference() -> None:
    vit, (_, queries) = rotary().double(), inputs()
    images, queries = torch.randn(2, 3, 24, 40).double(), queries[:2].double()
    tokens, expected = vit(images, queries), slow(vit, images, queries)
    actual = torch.cat([tokens.cls[:, None], tokens.registers, tokens.patches, tokens.queries], dim=1)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("query_keys", UNIDIRECTIONAL)
@torch.no_grad()
def test_queries_change_nothing_and_do_not_depend_on_their_order(query_keys: QueryKeys) -> None:
    vit, (images, queries) = rotary(query_keys), inputs()
    tokens, others = vit(images, queries), vit(images, 100 * torch.randn_like(queries))
    assert torch.equal(tokens.cls, others.cls)
    assert torch.equal(tokens.patches, others.patches)
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(vit(images, queries[:, order]).queries, tokens.queries[:, order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("query_keys", UNIDIRECTIONAL)
@torch.no_grad()
def test_queries_asked_later_answer_the_same(query_keys: QueryKeys) -> None:
    vit, (_, queries) = rotary(query_keys), inputs()
    images = torch.randn(3, 3, 48, 24)
    tokens, memory = vit(images, queries), vit.read(images)
    torch.testing.assert_close(memory.tokens.patches, tokens.patches, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(vit.ask(memory, queries), tokens.queries, rtol=1e-4, atol=1e-5)
    attention, cls = vit.gaze(memory)
    torch.testing.assert_close(cls[:, 0], tokens.cls, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attention[:, :, 0], vit.attention(images)[:, :, 0], rtol=1e-4, atol=1e-5)
    asked = vit.gaze(memory, queries)[0]
    rows = vit.attention(images, queries)[:, :, -queries.shape[1] :]
    torch.testing.assert_close(asked[..., : rows.shape[-1] - queries.shape[1]], rows[..., : -queries.shape[1]])


@torch.no_grad()
def test_crops_of_several_sizes_together_are_each_alone() -> None:
    vit, (images, queries) = rotary(), inputs()
    small = torch.randn(5, 3, 16, 24)
    together = vit.forward_many([Input(images, queries), Input(small, patches=False)])
    alone = [vit(images, queries), vit(small)]
    torch.testing.assert_close(together[0].patches, alone[0].patches, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together[0].queries, alone[0].queries, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together[1].cls, alone[1].cls, rtol=1e-4, atol=1e-5)
    (after,) = vit.intermediate(images, [1])
    assert not torch.allclose(after.patches, alone[0].patches)
    torch.testing.assert_close(vit.intermediate(images, 1)[0].patches, alone[0].patches, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_patch_has_its_place_in_the_image_also_in_a_window() -> None:
    """Attention within windows, by a mask on the whole grid."""
    vit = rotary()
    images = torch.randn(2, 3, 40, 24)  # 5x3 patches, in windows of at most 2x2
    (actual,) = vit.in_windows(images, [2], 2)
    (whole,) = vit.in_windows(images, [2], 100)
    rows, columns = range(5), range(3)
    cut = [number for number, part in enumerate(torch.arange(5).tensor_split(3)) for _ in part]
    across = [number for number, part in enumerate(torch.arange(3).tensor_split(2)) for _ in part]
    window = torch.tensor([cut[row] * 2 + across[column] for row in rows for column in columns])
    same = window[:, None] == window[None]
    x = vit.embed(images)[:, vit.num_prefix :]
    turned = vit._rotation([images], (Group(2, 15, 15),), prefix=0)
    for i, block in enumerate(vit.blocks):
        q, k, v = block.attn.split(block.norm1(x), turned)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if i < 2:
            scores = scores.masked_fill(~same, float("-inf"))
        x = block.think(x + block.ls1(block.attn.join(scores.softmax(-1) @ v)))
    torch.testing.assert_close(actual, vit.norm(x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(actual, whole, atol=1e-3)


def test_biases_of_keys_count_as_0_and_have_no_gradient() -> None:
    vit, (images, queries) = rotary(), inputs()
    tokens = vit(images, queries)
    (tokens.patches.square().sum() + tokens.queries.square().sum()).backward()
    for block in vit.blocks:
        gradient = block.attn.qkv.bias.grad.view(3, -1)
        assert gradient[1].count_nonzero() == 0
        assert gradient[0].count_nonzero() == gradient[2].count_nonzero() == vit.dim
        block.attn.qkv.bias.data[vit.dim : 2 * vit.dim] += 100
    assert torch.equal(vit(images, queries).patches, tokens.patches)


def test_it_is_trained_compiled_and_computed_again_as_it_is() -> None:
    vit, (images, queries) = rotary().train(), inputs()
    batch = [Input(images, queries), Input(torch.randn(2, 3, 16, 16), patches=False)]
    gradients = []
    for prepare in (vit.plain_blocks, vit.checkpoint_blocks, lambda: vit.compile_blocks(backend="aot_eager")):
        prepare()
        vit.zero_grad()
        outputs = vit.forward_many(batch)
        (outputs[0].patches.square().mean() + outputs[1].cls.square().mean()).backward()
        gradients.append([p.grad.clone() for p in vit.parameters() if p.grad is not None])
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-6)


def test_a_new_one_has_the_same_shape_and_no_positions() -> None:
    vit = rotary()
    again = vit.like()
    assert again.state_dict().keys() == vit.state_dict().keys()
    assert not any("pos" in name for name in vit.state_dict())
    assert again.position_embedding == "rotary"
    with pytest.raises(ValueError, match="divisible by 4, not 6"):
        VisionTransformer(12, 1, 2, 8, position_embedding="rotary")
