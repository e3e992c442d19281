"""The ViT: the three exact consequences, the four readings, and timm's numbers."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from torch import Tensor

from adclr.model.blocks import Attention, QueryKeys, attention_mask, draw_drop_path, expand_to_tokens
from adclr.model.named_tensors import Input
from adclr.model.ops.attention import Group
from adclr.model.vit import VisionTransformer
from adclr.weights.backbone import create_backbone

UNIDIRECTIONAL: tuple[QueryKeys, ...] = ("image", "patches", "image_and_self")


def make(query_keys: QueryKeys = "image", **options: object) -> VisionTransformer:
    torch.manual_seed(0)
    vit = VisionTransformer(48, 3, 3, 8, 32, query_keys=query_keys, **options).eval()  # type: ignore[arg-type]
    for parameter in vit.parameters():  # far from the initial values, where attention is nearly uniform
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return vit


def inputs(batch: int = 3, queries: int = 5) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(batch, 3, 32, 32), torch.randn(batch, queries, 3, 8, 8)


@pytest.mark.parametrize("query_keys", UNIDIRECTIONAL)
@torch.no_grad()
def test_contents_of_queries_change_no_bit_of_the_image_tokens(query_keys: QueryKeys) -> None:
    vit, (images, queries) = make(query_keys), inputs()
    a, b = vit(images, queries), vit(images, 100 * torch.randn_like(queries))
    assert torch.equal(a.cls, b.cls)
    assert torch.equal(a.patches, b.patches)
    assert not torch.equal(a.queries, b.queries)
    without = vit(images)
    assert without.queries is None
    torch.testing.assert_close(without.cls, a.cls, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(without.patches, a.patches, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("query_keys", UNIDIRECTIONAL)
def test_image_tokens_have_exactly_no_gradient_from_queries(query_keys: QueryKeys) -> None:
    vit, (images, queries) = make(query_keys), inputs()
    queries.requires_grad_()
    tokens = vit(images, queries)
    (tokens.cls.square().sum() + tokens.patches.square().sum()).backward()
    assert queries.grad is not None
    assert torch.count_nonzero(queries.grad) == 0


@pytest.mark.parametrize("query_keys", UNIDIRECTIONAL)
@torch.no_grad()
def test_a_query_does_not_depend_on_the_others_by_one_bit(query_keys: QueryKeys) -> None:
    vit, (images, queries) = make(query_keys), inputs()
    others = torch.randn_like(queries)
    others[:, 2] = queries[:, 2]
    assert torch.equal(vit(images, queries).queries[:, 2], vit(images, others).queries[:, 2])


@pytest.mark.parametrize("query_keys", UNIDIRECTIONAL)
@torch.no_grad()
def test_permuting_queries_permutes_their_outputs(query_keys: QueryKeys) -> None:
    vit, (images, queries) = make(query_keys), inputs()
    order = torch.tensor([3, 0, 4, 1, 2])
    a, b = vit(images, queries[:, order]).queries, vit(images, queries).queries[:, order]
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_bidirectional_breaks_the_first_two_consequences() -> None:
    vit, (images, queries) = make("all"), inputs()
    others = torch.randn_like(queries)
    others[:, 2] = queries[:, 2]
    a, b = vit(images, queries), vit(images, others)
    assert (a.cls - b.cls).abs().max() > 1e-3
    assert (a.queries[:, 2] - b.queries[:, 2]).abs().max() > 1e-3


@pytest.mark.parametrize("read_only", [1, 2, 3])
@pytest.mark.parametrize("query_keys", ["image", "patches"])
@torch.no_grad()
def test_read_only_queries_are_the_definition(query_keys: QueryKeys, read_only: int) -> None:
    """In float64, block by block: the residual becomes zero after the n-th last block's attention query is made."""
    vit, (images, queries) = make(query_keys, query_read_only_blocks=read_only).double(), inputs()
    images, queries = images.double(), queries.double()
    x = torch.cat([vit.embed(images), vit.embed_queries(queries)], dim=1)
    image = x.shape[1] - queries.shape[1]
    for i, block in enumerate(vit.blocks):
        q, k, v = block.attn.split(block.norm1(x))
        answering = [list(range(image))] * image
        answering += [list(range(0 if query_keys == "image" else 1, image))] * queries.shape[1]
        if i == len(vit.blocks) - read_only:
            x[:, image:] = 0
        x = x + block.attn.join(slow_attention(q, k, v, answering))
        x = x + block.mlp(block.norm2(x))
    expected = vit.norm(x)
    tokens = vit(images, queries)
    torch.testing.assert_close(tokens.queries, expected[:, image:], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(tokens.patches, expected[:, 1:image], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("query_keys", ["image", "patches"])
@torch.no_grad()
def test_a_query_that_is_read_only_from_the_first_block_keeps_none_of_its_pixels(query_keys: QueryKeys) -> None:
    """Attention that is uniform tells queries apart no longer, so only their own content could."""
    vit, (images, queries) = make(query_keys, query_read_only_blocks=3), inputs()
    for block in vit.blocks:
        width = block.attn.qkv.weight.shape[0] // 3
        block.attn.qkv.weight[:width] = 0
        block.attn.qkv.bias[:width] = 0
    answers = vit(images, queries).queries
    torch.testing.assert_close(answers, answers[:, :1].expand_as(answers), rtol=1e-5, atol=1e-5)
    vit.query_read_only_blocks = 0
    assert vit(images, queries).queries.var(dim=1).mean() > 1e-3


@pytest.mark.parametrize("query_keys", ["image_and_self", "all"])
def test_read_only_queries_must_not_attend_to_themselves(query_keys: QueryKeys) -> None:
    with pytest.raises(ValueError, match="query_read_only_blocks"):
        make(query_keys, query_read_only_blocks=1)


def slow_attention(q: Tensor, k: Tensor, v: Tensor, answering: list[list[int]]) -> Tensor:
    """softmax(q·k / sqrt(d)) v in float64, token by token, over the tokens that answer each."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t, keys in enumerate(answering):
                scores = torch.stack([torch.dot(q[b, h, t], k[b, h, j]) for j in keys]) / math.sqrt(q.shape[-1])
                weights = torch.exp(scores) / torch.exp(scores).sum()
                for w, j in zip(weights, keys, strict=True):
                    out[b, h, t] += w * v[b, h, j]
    return out


@pytest.mark.parametrize("num_registers", [0, 2])
@pytest.mark.parametrize("query_keys", [*UNIDIRECTIONAL, "all"])
@torch.no_grad()
def test_each_reading_is_the_attention_it_says(query_keys: QueryKeys, num_registers: int) -> None:
    prefix, patches, queries = 1 + num_registers, 4, 3
    image = list(range(prefix + patches))
    own = [len(image) + i for i in range(queries)]
    answering = {
        "image": [image] * len(image) + [image] * queries,
        "patches": [image] * len(image) + [image[prefix:]] * queries,
        "image_and_self": [image] * len(image) + [[*image, i] for i in own],
        "all": [image + own] * (len(image) + queries),
    }[query_keys]
    attention = Attention(12, 3, query_keys, prefix)
    torch.manual_seed(2)
    q, k, v = torch.randn(3, 2, 3, len(image) + queries, 4)
    group = Group(2, len(image) + queries, len(image))
    attention.qkv = torch.nn.Identity()  # type: ignore[assignment]
    rows = torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).reshape(group.sequences * group.tokens, 36)
    actual = attention(rows, [group]).view(2, group.tokens, 3, 4).transpose(1, 2)
    torch.testing.assert_close(actual.double(), slow_attention(q, k, v, answering), rtol=1e-5, atol=1e-6)
    mask = attention_mask(group, query_keys, prefix, torch.device("cpu"))
    assert [row.nonzero().flatten().tolist() for row in mask] == answering


def copy_from_timm(name: str, size: int) -> tuple[torch.nn.Module, VisionTransformer]:
    torch.manual_seed(0)
    theirs = timm.create_model(name, pretrained=False, num_classes=0, img_size=size, dynamic_img_size=True).eval()
    for parameter in theirs.parameters():
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    size_name, patch = name.split("_")[1], int(name.split("_patch")[1].split("_")[0])
    registers = 4 if "reg4" in name else 0
    ours = create_backbone(
        f"vit_{size_name}_patch{patch}",
        input_size=size,
        num_registers=registers,
        layer_scale=1e-5 if "dinov2" in name else None,
    ).eval()
    ours.load_state_dict(theirs.state_dict())  # strict: the keys and shapes are the same
    return theirs, ours


@pytest.mark.parametrize(
    "name",
    ["vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224", "vit_small_patch14_reg4_dinov2"],
)
@torch.no_grad()
def test_outputs_equal_timms(name: str) -> None:
    theirs, ours = copy_from_timm(name, 224)
    patch = ours.patch_size
    for height, width in ((224, 224), (10 * patch, 17 * patch)):
        images = torch.randn(2, 3, height, width)
        expected, actual = theirs.forward_features(images), ours(images)  # type: ignore[operator]
        torch.testing.assert_close(actual.cls, expected[:, 0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(actual.patches, expected[:, ours.num_prefix :], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_intermediate_layers_equal_timms() -> None:
    theirs, ours = copy_from_timm("vit_tiny_patch16_224", 224)
    images = torch.randn(1, 3, 224, 224)
    expected = theirs.get_intermediate_layers(images, n=4, return_prefix_tokens=True, norm=True)  # type: ignore[operator]
    for (patches, prefix), tokens in zip(expected, ours.intermediate(images, 4), strict=True):
        torch.testing.assert_close(tokens.patches, patches, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(tokens.cls, prefix[:, 0], rtol=1e-5, atol=1e-5)
    last, first = ours.intermediate(images, [11, 0], norm=True)
    torch.testing.assert_close(last.cls, ours(images).cls)
    assert not torch.allclose(first.cls, last.cls)


@torch.no_grad()
def test_blocks_in_windows_see_their_window_alone() -> None:
    """Against windows that are cut out and run one by one; 5×7 patches in windows of at most 3×3."""
    vit = make("image", num_registers=2)
    images = torch.randn(2, 3, 5 * vit.patch_size, 7 * vit.patch_size)
    kept = torch.rand(vit.depth, 2, 2) + 0.5
    last = vit.depth - 1
    (actual,) = vit.in_windows(images, [last], 3, drop_path=kept)
    x = vit.embed(images)[:, vit.num_prefix :].unflatten(1, (5, 7))

    def through(block: int, part: torch.Tensor) -> torch.Tensor:
        layer = vit.blocks[block]
        flat = part.flatten(1, 2)
        q, k, v = layer.attn.split(layer.norm1(flat))
        mixed = layer.attn.join(torch.nn.functional.scaled_dot_product_attention(q, k, v))
        flat = flat + kept[block, 0].view(-1, 1, 1) * mixed
        flat = flat + kept[block, 1].view(-1, 1, 1) * layer.mlp(layer.norm2(flat))
        return flat.unflatten(1, part.shape[1:3])

    for block in range(last):
        pieces = [[through(block, part) for part in rows.tensor_split(3, 2)] for rows in x.tensor_split(2, 1)]
        x = torch.cat([torch.cat(row, dim=2) for row in pieces], dim=1)
    expected = vit.norm(through(last, x).flatten(1, 2))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


READ_ONLY: list[tuple[QueryKeys, int]] = [(keys, 0) for keys in UNIDIRECTIONAL]
READ_ONLY += [("image", 1), ("patches", 2), ("patches", 3)]


@pytest.mark.parametrize(("query_keys", "read_only"), READ_ONLY)
@torch.no_grad()
def test_read_once_and_ask_often_is_forward(query_keys: QueryKeys, read_only: int) -> None:
    options = {"num_registers": 2, "layer_scale": 0.5, "query_read_only_blocks": read_only}
    vit, (images, queries) = make(query_keys, **options), inputs()
    memory = vit.read(images)
    whole = vit(images, queries)
    torch.testing.assert_close(memory.tokens.cls, whole.cls, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(vit.ask(memory, queries), whole.queries, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(vit.ask(memory, queries[:, 1:2]), whole.queries[:, 1:2], rtol=1e-5, atol=1e-5)


def test_a_bidirectional_vit_cannot_be_read_before_its_queries() -> None:
    with pytest.raises(ValueError, match="query_keys=all"):
        make("all").read(torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize("num_registers", [0, 2])
@pytest.mark.parametrize(("query_keys", "read_only"), READ_ONLY)
@torch.no_grad()
def test_a_gaze_is_the_attention_without_its_cost(query_keys: QueryKeys, read_only: int, num_registers: int) -> None:
    vit, (images, queries) = make(query_keys, num_registers=num_registers, query_read_only_blocks=read_only), inputs()
    memory, num_image = vit.read(images), 1 + num_registers + 16
    for block in (0, 1, -1):
        whole = vit.attention(images, queries, block)
        seen, answers = vit.gaze(memory, queries, block)
        torch.testing.assert_close(seen.sum(-1), torch.ones(3, 3, 5), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(seen[..., :num_image], whole[:, :, num_image:, :num_image], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(answers, vit.ask(memory, queries))
        seen, cls = vit.gaze(memory, block=block)
        torch.testing.assert_close(seen, whole[:, :, :1, :num_image], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(cls[:, 0], vit(images).cls, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_half_a_memory_answers_nearly_the_same_and_heat_flattens_a_gaze() -> None:
    vit, (images, queries) = make(), inputs()
    memory = vit.read(images)
    halved = memory._replace(keys=[k.half() for k in memory.keys], values=[v.half() for v in memory.values])
    torch.testing.assert_close(vit.ask(halved, queries), vit.ask(memory, queries), rtol=1e-2, atol=1e-2)
    (cold, _), (warm, _), (hot, _) = (vit.gaze(memory, queries, temperature=t) for t in (0.5, 1.0, 1e6))
    assert (cold.amax(-1) > warm.amax(-1)).all()
    torch.testing.assert_close(hot, torch.full_like(hot, 1 / 17))


@pytest.mark.parametrize("query_keys", [*UNIDIRECTIONAL, "all"])
@torch.no_grad()
def test_attention_rows_sum_to_one_and_give_the_blocks_output(query_keys: QueryKeys) -> None:
    vit, (images, queries) = make(query_keys), inputs()
    tokens = 1 + 16 + 5
    weights = vit.attention(images, queries, block=1)
    assert weights.shape == (3, 3, tokens, tokens)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 3, tokens))
    x, group = vit._embed_sequences(images, queries, None)
    _, y = vit.blocks[0](x, vit.first_norm(x), [group], vit.blocks[1].norm1)
    y = y.unflatten(0, (3, tokens))
    attn = vit.blocks[1].attn
    assert isinstance(attn, Attention)
    _, _, v = attn.split(y)
    read = attn(y.flatten(0, 1), [group]).unflatten(0, (3, tokens))
    torch.testing.assert_close((weights @ v).transpose(1, 2).flatten(2), read, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_mask_replaces_embeddings_before_positions_are_added() -> None:
    vit = make(mask_token=True)
    images, _ = inputs()
    mask = torch.zeros(3, 16, dtype=torch.bool)
    mask[0, 3] = mask[2, 7] = True
    plain, masked = vit.embed(images), vit.embed(images, mask)
    assert vit.mask_token is not None
    torch.testing.assert_close(masked[0, 4], vit.mask_token[0] + vit.pos_embed[0, 4])
    changed = (plain != masked).any(dim=-1)
    assert changed.nonzero().tolist() == [[0, 4], [2, 8]]
    hidden = images.clone()
    hidden[0, :, 0:8, 24:32] = 9.0  # the pixels of patch 3, which nobody may see
    assert torch.equal(vit(images, mask=mask).cls, vit(hidden, mask=mask).cls)


@torch.no_grad()
def test_positions_of_another_grid() -> None:
    vit = make()
    assert vit.positions((4, 4)) is vit.pos_embed
    grid = vit.pos_embed[:, 1:].reshape(1, 4, 4, 48).permute(0, 3, 1, 2)
    for mode, antialias in (("antialias", True), ("plain", False)):
        vit.position_resampling = mode  # type: ignore[assignment]
        expected = torch.nn.functional.interpolate(grid, size=(2, 3), mode="bicubic", antialias=antialias)
        actual = vit.positions((2, 3))
        torch.testing.assert_close(actual[:, 1:].reshape(1, 2, 3, 48).permute(0, 3, 1, 2), expected)
        assert torch.equal(actual[:, 0], vit.pos_embed[:, 0])
    assert vit(torch.randn(1, 3, 16, 24)).patches.shape == (1, 6, 48)


@torch.no_grad()
def test_forward_many_is_forward_for_each() -> None:
    vit, (images, queries) = make(), inputs()
    small = images[:, :, :16, :24].contiguous()
    for query_keys in (*UNIDIRECTIONAL, "all"):
        vit = make(query_keys, mask_token=True)
        mask = torch.arange(16).expand(3, 16) % 3 == 0
        many = vit.forward_many([Input(images, queries, mask), Input(small), Input(small[:2], queries[:2])])
        for actual, expected in zip(
            many, [vit(images, queries, mask), vit(small), vit(small[:2], queries[:2])], strict=True
        ):
            torch.testing.assert_close(actual.cls, expected.cls)
            torch.testing.assert_close(actual.patches, expected.patches)
            torch.testing.assert_close(actual.queries, expected.queries)


@torch.no_grad()
def test_patches_that_are_not_wanted_change_nothing_else() -> None:
    for query_keys in (*UNIDIRECTIONAL, "all"):
        vit, (images, queries) = make(query_keys, num_registers=2), inputs()
        small = images[:, :, :16, :24].contiguous()
        whole = vit.forward_many([Input(images, queries), Input(small)])
        less = vit.forward_many([Input(images, queries, patches=False), Input(small, patches=False)])
        mixed = vit.forward_many([Input(images, queries), Input(small, patches=False)])
        for actual in (less, mixed):
            for a, b in zip(actual, whole, strict=True):
                torch.testing.assert_close(a.cls, b.cls)
                torch.testing.assert_close(a.queries, b.queries)
        assert less[0].patches.shape == (3, 0, 48)
        assert less[0].registers is None
        torch.testing.assert_close(mixed[0].patches, whole[0].patches)
        torch.testing.assert_close(mixed[0].registers, whole[0].registers)


def test_blocks_that_are_run_again_give_the_same_gradients_and_keep_less() -> None:
    images, queries = inputs()
    actual, kept = [], []
    for again in (False, True):
        vit = make(drop_path=0.3).train()
        if again:
            vit.checkpoint_blocks()
        sizes: list[int] = []

        def remember(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            tokens = vit.forward_many([Input(images, queries, patches=False)])[0]
        tokens.cls.square().sum().backward()
        actual.append([p.grad for p in vit.parameters() if p.grad is not None])
        kept.append(sum(sizes))
    for a, b in zip(*actual, strict=True):
        torch.testing.assert_close(a, b)
    assert kept[1] < 0.4 * kept[0]


def test_compiled_blocks_give_the_same_with_one_graph_for_all_of_them() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    vit, (images, queries) = make(drop_path=0.3).train(), inputs()
    given = [Input(images, queries), Input(images[:, :, :16, :24].contiguous())]

    def gradients() -> list[Tensor]:
        torch.manual_seed(3)
        vit.zero_grad()
        many = vit.forward_many(given)
        assert many[0].queries is not None
        (many[0].cls.square().sum() + many[0].queries.square().sum() + many[1].cls.square().sum()).backward()
        return [p.grad.clone() for p in vit.parameters() if p.grad is not None]

    plain = gradients()
    counter = CompileCounterWithBackend("aot_eager")
    vit.compile_blocks(backend=counter)
    for actual, expected in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 2  # one for the last block, which may leave out patches
    vit(images)  # an evaluation is not compiled
    assert counter.frame_count == 2


def test_drop_path_drops_whole_sequences_and_keeps_the_mean() -> None:
    vit = make(drop_path=0.5)
    images, _ = inputs()
    assert torch.equal(vit(images).cls, vit(images).cls)
    kept = draw_drop_path(vit.train().drop_path, vit.depth, 4000, torch.device("cpu"))
    assert kept is not None
    for block, rate in enumerate([0.0, 0.25, 0.5]):
        actual = kept[block]
        assert actual.unique().tolist() == ([1.0] if rate == 0 else [0.0, pytest.approx(1 / (1 - rate))])
        assert abs(actual.mean().item() - 1) < 0.05
        assert (actual[0] != actual[1]).any() or rate == 0  # each branch of a block draws for itself
    groups = [Group(2, 3, 3), Group(1, 2, 2)]
    assert expand_to_tokens(torch.tensor([0.0, 2.0, 5.0]), groups).flatten().tolist() == [0, 0, 0, 2, 2, 2, 5, 5]
    block = vit.blocks[0]
    x = torch.randn(8, 48)
    factors = expand_to_tokens(torch.tensor([[0.0, 2.0, 2.0], [0.0, 2.0, 2.0]]), groups)
    dropped, normed = block(x, vit.first_norm(x), groups, vit.norm, factors)
    assert torch.equal(dropped[:3], x[:3])
    assert not torch.isclose(dropped[3:], x[3:]).any(dim=1).all()
    half = x + 2 * block.ls1(block.attn.proj(block.attn(block.norm1(x), groups)))  # type: ignore[operator, union-attr]
    half = half + 2 * block.ls2(block.mlp(block.norm2(half)))  # type: ignore[operator]
    torch.testing.assert_close(dropped[3:], half[3:])
    torch.testing.assert_close(normed, vit.norm(dropped))


def test_what_cannot_be_is_said() -> None:
    vit = make()
    with pytest.raises(ValueError, match="not divisible"):
        vit(torch.randn(1, 3, 33, 32))
    with pytest.raises(ValueError, match="8x8"):
        vit(torch.randn(1, 3, 32, 32), torch.randn(1, 2, 3, 16, 16))
    with pytest.raises(ValueError, match="mask token"):
        vit(torch.randn(1, 3, 32, 32), mask=torch.ones(1, 16, dtype=torch.bool))
    with pytest.raises(ValueError, match="heads"):
        VisionTransformer(48, 1, 5, 8)
    with pytest.raises(ValueError, match="vit_SIZE_patchP"):
        create_backbone("resnet50")


@pytest.mark.parametrize(("name", "parameters"), [("vit_tiny_patch16", 5.5), ("vit_small_patch16", 21.7),
                                                  ("vit_base_patch8", 85.8), ("vit_large_patch14", 303.2)])  # fmt: skip
def test_sizes(name: str, parameters: float) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in create_backbone(name).parameters())
    assert abs(count / 1e6 - parameters) < 0.1


def test_drop_path_that_was_drawn_elsewhere() -> None:
    torch.manual_seed(0)
    vit = VisionTransformer(16, 3, 2, 8, 16).train()
    images = torch.randn(4, 3, 16, 16)
    kept = torch.ones(3, 2, 4)
    torch.testing.assert_close(vit.forward_many([Input(images)], kept)[0].cls, vit(images).cls)
    kept[1, :, 2] = 0  # the third image goes past the second block
    shorter = VisionTransformer(16, 2, 2, 8, 16)
    state = {
        name.replace("blocks.2.", "blocks.1."): t for name, t in vit.state_dict().items() if "blocks.1." not in name
    }
    shorter.load_state_dict(state)
    actual = vit.forward_many([Input(images)], kept)[0].cls
    torch.testing.assert_close(actual[2], shorter(images).cls[2])
    torch.testing.assert_close(actual[[0, 1, 3]], vit(images).cls[[0, 1, 3]])
