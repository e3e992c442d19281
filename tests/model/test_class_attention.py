"""Class attention and SelfPatch's patch loss: against timm's CaiT, brute-force loops, and the formulas in float64."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from timm.models.cait import LayerScaleBlockClassAttn
from torch import Tensor, nn

from adclr.config import parsing
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.model.class_attention import ClassAttentionBlock, select_neighbors
from adclr.model.method import ADCLR
from adclr.model.named_tensors import Input, Views
from adclr.model.ops import head_loss, head_loss_kernels
from adclr.model.optim import optimizer_step
from adclr.model.vit import VisionTransformer
from adclr.training.schedules import make_optimizer
from kernel_device import DEVICE, needs_interpreter
from test_method import make, make_views
from tiny import tiny

SELFPATCH = {"num_queries": 0, "class_attention": 2, "neighbor_weight": 0.1, "neighbor_prototypes": 20}


def selfpatch(**changes: object) -> tuple[Settings, ADCLR]:
    return make(**(SELFPATCH | {"local_size": 12} | changes))


def network(**options: object) -> VisionTransformer:
    torch.manual_seed(0)
    vit = VisionTransformer(48, 3, 3, 8, 32, class_attention=2, **options).eval()  # type: ignore[arg-type]
    for parameter in vit.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return vit


# -- the blocks --


@torch.no_grad()
def test_blocks_are_those_of_timms_cait_under_its_names() -> None:
    block = network().class_blocks[0]
    theirs = LayerScaleBlockClassAttn(48, 3, qkv_bias=True, norm_layer=partial(nn.LayerNorm, eps=1e-6))
    theirs.load_state_dict(block.state_dict())
    patches, token = torch.randn(5, 7, 48), torch.randn(5, 48)
    expected = theirs(patches, token.unsqueeze(1))[:, 0]
    for few in (False, True):
        torch.testing.assert_close(block(token, *block.project(patches), few=few), expected, rtol=1e-5, atol=1e-5)
    one = token[:1]  # the same for all sequences
    expected = theirs(patches, one.expand(5, -1).unsqueeze(1))[:, 0]
    for few in (False, True):
        torch.testing.assert_close(block(one, *block.project(patches), few=few), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_cls_is_made_at_the_end_of_patches_alone() -> None:
    vit, images = network(), torch.randn(2, 3, 32, 32)
    assert vit.pos_embed.shape == (1, 16, 48)
    x = vit.patch_embed(images) + vit.pos_embed
    for block in vit.blocks:
        q, k, v = block.attn.split(block.norm1(x))
        x = block.think(x + block.attn.join(F.scaled_dot_product_attention(q, k, v)))
    token = vit.cls_token.expand(2, -1, -1)
    for block in vit.class_blocks:
        theirs = LayerScaleBlockClassAttn(48, 3, qkv_bias=True, norm_layer=partial(nn.LayerNorm, eps=1e-6))
        theirs.load_state_dict(block.state_dict())
        token = theirs(x, token)
    tokens = vit(images)
    torch.testing.assert_close(tokens.cls, vit.norm(token)[:, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tokens.patches, vit.norm(x), rtol=1e-4, atol=1e-4)
    assert tokens.registers is None
    assert tokens.neighbors is None


@torch.no_grad()
def test_every_way_to_run_a_network_gives_the_same_tokens() -> None:
    vit, images, queries = network(), torch.randn(2, 3, 40, 24), torch.randn(2, 4, 3, 8, 8)
    tokens = vit(images, queries)
    (many,) = vit.forward_many([Input(images, patches=False)])
    memory, (last,) = vit.read(images), vit.intermediate(images, 1)
    (without,) = vit.intermediate(images, 1, needs_cls=False)
    assert (torch.equal(without.patches, last.patches), len(without.cls)) == (True, 0)
    for other in (many, memory.tokens, last):
        torch.testing.assert_close(other.cls, tokens.cls, rtol=1e-4, atol=1e-4)
    assert many.patches.shape == (2, 0, 48)
    for patches in (memory.tokens.patches, last.patches, vit.in_windows(images, [0, 1, 2], 9)[-1]):
        torch.testing.assert_close(patches, tokens.patches, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(vit.ask(memory, queries), tokens.queries, rtol=1e-4, atol=1e-4)
    attention, cls = vit.gaze(memory)
    assert attention.shape == (2, 3, 1, 16)
    torch.testing.assert_close(cls[:, 0], tokens.cls, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(attention.sum(-1), torch.ones(2, 3, 1))
    first, _ = vit.gaze(memory, block=-2)
    assert not torch.allclose(first, attention)
    assert torch.equal(first, vit.gaze(memory, block=0)[0])  # of the first block that has [CLS]
    assert vit.like().state_dict().keys() == vit.state_dict().keys()


@torch.no_grad()
def test_the_attention_that_is_shown_is_the_one_that_is_used() -> None:
    vit, images = network(), torch.randn(1, 3, 32, 32)
    memory = vit.read(images)
    attention, _ = vit.gaze(memory, block=-2)
    block, token = vit.class_blocks[0], vit.cls_token[0]
    values = torch.cat([memory.values[vit.depth], block.attn.v(block.norm1(token)).unsqueeze(0)], dim=1)
    read = torch.einsum("bhs,bshd->bhd", attention[:, :, 0], values.view(1, 17, 3, 16)).flatten(1)
    expected = block.attn(block.norm1(token), memory.keys[vit.depth], memory.values[vit.depth])
    torch.testing.assert_close(block.attn.proj(read), expected, rtol=1e-4, atol=1e-5)


# -- neighbors --


@pytest.mark.parametrize("grid", [(3, 3), (4, 4), (3, 5), (6, 4)])
def test_neighbors_are_those_of_a_loop_over_the_window(grid: tuple[int, int]) -> None:
    rows, columns = grid
    patches = torch.randn(2, rows * columns, 8, generator=torch.Generator().manual_seed(2))
    chosen = select_neighbors(patches, grid, 4).view(2, rows * columns, 4)
    for image in range(2):
        for row in range(rows):
            for column in range(columns):
                own = patches[image, row * columns + column]
                similarities = {}
                for down in (-1, 0, 1):
                    for right in (-1, 0, 1):
                        if (down, right) != (0, 0):  # wrapping around the border
                            place = (row + down) % rows * columns + (column + right) % columns
                            other = patches[image, place]
                            similarities[place] = float(own @ other / own.norm() / other.norm())
                assert len(similarities) == 8
                best = sorted(similarities, key=lambda place: -similarities[place])[:4]
                actual = chosen[image, row * columns + column] - image * rows * columns
                assert sorted(actual.tolist()) == sorted(best)


def test_windows_wrap_around_the_border() -> None:
    """The corner's like is in the corner across, which is a neighbor only by wrapping."""
    patches = torch.eye(25).unsqueeze(0)
    patches[0, 24] = patches[0, 0] + 0.01 * patches[0, 24]
    assert select_neighbors(patches, (5, 5), 1)[0].item() == 24
    assert select_neighbors(patches, (5, 5), 1)[24].item() == 0


def test_grids_with_fewer_than_three_rows_or_columns_have_neighbors() -> None:
    for grid in ((2, 2), (1, 3), (1, 1)):
        count = grid[0] * grid[1]
        chosen = select_neighbors(torch.randn(3, count, 8), grid, 4)
        assert chosen.shape == (3 * count, 4)
        assert torch.equal(chosen // count, torch.arange(3).repeat_interleave(count).unsqueeze(1).expand(-1, 4))


# -- the method, in float64 and from the formulas --


class Reference:
    """SelfPatch written out: one view, one image, one patch after the other."""

    def __init__(self, method: ADCLR) -> None:
        self.method = method

    def trunk(self, vit: VisionTransformer, image: Tensor) -> Tensor:
        """C×S×S -> N×D, before the final norm."""
        patch, side = vit.patch_size, image.shape[-1] // vit.patch_size
        weight = vit.patch_embed.proj.weight.flatten(1)
        tokens = []
        for row in range(side):
            for column in range(side):
                area = image[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
                tokens.append(weight @ area.flatten() + vit.patch_embed.proj.bias)
        x = torch.stack(tokens) + vit.positions((side, side))[0]
        for block in vit.blocks:
            qkv = self.linear(block.attn.qkv, self.normed(block.norm1, x))
            heads = []
            for head in range(vit.num_heads):
                width = vit.dim // vit.num_heads
                q, k, v = (qkv[:, part * vit.dim + head * width :][:, :width] for part in range(3))
                heads.append(torch.softmax(q @ k.T / math.sqrt(width), dim=1) @ v)
            x = x + self.linear(block.attn.proj, torch.cat(heads, dim=1))
            x = x + self.mlp(block.mlp, self.normed(block.norm2, x))
        return x

    def linear(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x @ layer.weight.T + layer.bias

    def mlp(self, layers: nn.Module, x: Tensor) -> Tensor:
        hidden = self.linear(layers.fc1, x)
        return self.linear(layers.fc2, hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2))))

    def normed(self, norm: nn.LayerNorm, x: Tensor) -> Tensor:
        centered = x - x.mean(dim=-1, keepdim=True)
        deviation = (centered.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt()
        return centered / deviation * norm.weight + norm.bias

    def read(self, vit: VisionTransformer, patches: Tensor) -> Tensor:
        """What the learned token becomes when it attends to itself and these patches, S×D -> D, normed."""
        token = vit.cls_token[0, 0]
        for block in vit.class_blocks:
            tokens = self.normed(block.norm1, torch.cat([token[None], patches]))
            q = self.linear(block.attn.q, tokens[:1])
            k, v = self.linear(block.attn.k, tokens), self.linear(block.attn.v, tokens)
            heads, width = [], vit.dim // vit.num_heads
            for head in range(vit.num_heads):
                at = slice(head * width, (head + 1) * width)
                heads.append(torch.softmax(q[:, at] @ k[:, at].T / math.sqrt(width), dim=1) @ v[:, at])
            token = token + block.gamma_1 * self.linear(block.attn.proj, torch.cat(heads, dim=1))[0]
            token = token + block.gamma_2 * self.mlp(block.mlp, self.normed(block.norm2, token))
        return self.normed(vit.norm, token)

    def around(self, x: Tensor, count: int) -> list[Tensor]:
        """Of each patch the most similar of the eight around it, wrapping."""
        side = math.isqrt(len(x))
        groups = []
        for row in range(side):
            for column in range(side):
                places = [
                    (row + down) % side * side + (column + right) % side
                    for down in (-1, 0, 1)
                    for right in (-1, 0, 1)
                    if (down, right) != (0, 0)
                ]
                similarity = [F.cosine_similarity(x[row * side + column], x[place], dim=0).item() for place in places]
                best = sorted(range(8), key=lambda i: -similarity[i])[:count]
                groups.append(x[[places[i] for i in best]])
        return groups

    def logits(self, head: nn.Module, x: Tensor) -> Tensor:
        for i in (0, 2, 4):
            x = self.linear(head.mlp[i], x)
            x = x * 0.5 * (1 + torch.erf(x / math.sqrt(2))) if i < 4 else x
        x = x / x.norm()
        rows = head.last_layer.direction
        return (head.last_layer.gain * rows / rows.norm(dim=1, keepdim=True)) @ x

    def losses(self, views: Views, temperature: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(global loss, patch loss, mean teacher logits by kind)."""
        method = self.method
        student, teacher = method.student, method.teacher
        crops = list(views.global_crops) + ([] if views.local_crops is None else list(views.local_crops))
        batch = len(crops[0])
        global_targets, patch_terms, answers = [], [], []
        observed: dict[str, list[Tensor]] = {"global": [], "neighbor": []}

        def target(logits: Tensor, kind: str) -> Tensor:
            return torch.softmax((logits - method.center(kind).value) / temperature, 0)  # type: ignore[arg-type]

        for number, view in enumerate(crops):
            with torch.no_grad():
                read = [self.trunk(teacher.backbone, image) for image in view]
                if number < 2:
                    logits = [self.logits(teacher.head, self.read(teacher.backbone, x)) for x in read]
                    observed["global"] += logits
                    global_targets.append([target(one, "global") for one in logits])
                around = [
                    [
                        self.logits(teacher.patch_head, self.read(teacher.backbone, group))
                        for group in self.around(x, method.num_neighbors)
                    ]
                    for x in read
                ]
                observed["neighbor"] += [one for image in around for one in image]
            own = [self.trunk(student.backbone, image) for image in view]
            answers.append([self.logits(student.head, self.read(student.backbone, x)) for x in own])
            terms = []
            for image in range(batch):
                for patch, logits in zip(own[image], around[image], strict=True):
                    answer = self.logits(student.patch_head, self.normed(student.backbone.norm, patch))
                    p = target(logits, "neighbor")
                    terms.append(-(p * torch.log_softmax(answer / 0.1, 0)).sum())
            patch_terms.append(torch.stack(terms).mean())
        pairs = [
            -(global_targets[t][image] * torch.log_softmax(answers[s][image] / 0.1, 0)).sum()
            for t in range(2)
            for s in range(len(crops))
            if s != t
            for image in range(batch)
        ]
        means = {kind: torch.stack(rows).mean(dim=0) for kind, rows in observed.items()}
        return torch.stack(pairs).mean(), torch.stack(patch_terms).mean(), means


def doubled(views: Views) -> Views:
    return views.map(lambda tensor: tensor.double())


@pytest.mark.parametrize("changes", [{}, {"num_local": 0}, {"num_neighbors": 2}], ids=str)
def test_loss_and_gradients_are_those_of_the_formulas(changes: dict[str, object]) -> None:
    settings, method = selfpatch(**changes)
    method, views = method.double(), doubled(make_views(settings, batch=2))
    losses = method(views, 0.05)
    global_, patch, _ = Reference(copy.deepcopy(method)).losses(views, 0.05)
    assert losses.global_.item() == pytest.approx(global_.item(), abs=1e-8)
    assert losses.neighbor.item() == pytest.approx(patch.item(), abs=1e-8)
    assert losses.total.item() == pytest.approx((global_ + 0.1 * patch).item(), abs=1e-8)
    losses.total.backward()
    slow = copy.deepcopy(method)
    slow.zero_grad(set_to_none=True)
    global_, patch, _ = Reference(slow).losses(views, 0.05)
    (global_ + 0.1 * patch).backward()
    for (name, ours), theirs in zip(method.student.named_parameters(), slow.student.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None, name
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-7, atol=1e-8, msg=name)
    assert all(p.grad is None for p in method.teacher.parameters())


def test_two_steps_are_those_of_the_formulas() -> None:
    """AdamW, clipping, decay, teacher and both centers, by numbers that float32 holds exactly."""
    lr, decay, clip, momentum = 2.0**-7, 0.25, 0.5, 0.9375
    settings, method = selfpatch()
    method = method.double()
    reference = copy.deepcopy(method)
    optimizer = make_optimizer(method.student, settings)
    parameters = list(reference.student.parameters())
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    for step in (1, 2):
        views = doubled(make_views(settings, batch=2, seed=step))
        loss = method(views, 0.0625).total
        loss.backward()
        assert optimizer_step(optimizer, lr, decay, clip, loss)
        optimizer.zero_grad(set_to_none=True)
        method.update(momentum, torch.tensor(True))

        reference.zero_grad(set_to_none=True)
        global_, patch, means = Reference(reference).losses(views, 0.0625)
        (global_ + 0.1 * patch).backward()
        with torch.no_grad():
            for p, m, v in zip(parameters, first, second, strict=True):
                assert p.grad is not None
                grad = p.grad * min(1.0, clip / (p.grad.norm().item() + 1e-6))
                if p.ndim > 1:
                    p.mul_(1 - lr * decay)
                m.mul_(0.9).add_(0.1 * grad)
                v.mul_(0.999).add_(0.001 * grad.square())
                p.sub_(lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))
            for t, s in zip(reference.teacher.parameters(), parameters, strict=True):
                t.copy_(momentum * t + (1 - momentum) * s)
            for kind, mean in means.items():
                center = reference.center(kind).value  # type: ignore[arg-type]
                center.copy_(0.9 * center + 0.1 * mean)
    for (name, ours), theirs in zip(method.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8, msg=name)
    for kind in ("global", "neighbor"):
        a, b = (one.center(kind).value for one in (method, reference))  # type: ignore[arg-type]
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


def test_each_view_weighs_the_same_whatever_its_patches() -> None:
    settings, method = selfpatch(num_local=3)
    weights = method._neighbor_weights(make_views(settings, batch=2))
    assert len(weights) == 2 * (2 * 16 + 3 * 9)
    torch.testing.assert_close(weights[: 2 * 2 * 16].sum(), torch.tensor(2 / 5))
    assert weights.sum().item() == pytest.approx(1)


def test_gradients_reach_what_they_should() -> None:
    """The patch loss alone trains the trunk and the second head, not class attention and not the first head."""
    settings, method = selfpatch()
    method(make_views(settings), 0.05).neighbor.backward()
    for name, parameter in method.student.named_parameters():
        outside = name.startswith(("head.", "backbone.blocks_token_only.", "backbone.cls_token"))
        assert (parameter.grad is None or not parameter.grad.any()) == outside, name
    assert all(p.grad is None for p in method.teacher.parameters())


def test_without_weight_there_is_no_second_head_and_the_teacher_reads_no_local_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, method = selfpatch(neighbor_weight=0.0)
    assert not [name for name in method.state_dict() if "patch_head" in name or "neighbor" in name]
    read = []
    original = method.teacher.backbone.forward_many
    monkeypatch.setattr(method.teacher.backbone, "forward_many", lambda i: read.append(len(i)) or original(i))
    assert method(make_views(settings), 0.05).neighbor == 0
    assert read == [1]


def test_the_other_methods_have_the_parameters_they_had() -> None:
    names = make(num_queries=0)[1].state_dict()
    assert not [name for name in names if "patch_head" in name or "token_only" in name or "neighbor" in name]


def test_both_last_layers_are_frozen_together() -> None:
    from adclr.training.schedules import Values
    from adclr.training.step import Step

    settings, method = selfpatch()
    before = {name: p.clone() for name, p in method.student.named_parameters()}
    step = Step(settings, method, make_optimizer(method.student, settings), torch.device("cpu"), None)
    losses, ok = step([make_views(settings)], Values(0.01, 0.1, 0.9, 0.05, freeze_last_layer=True))
    assert ok
    assert len(losses) == 6
    for name, parameter in method.student.named_parameters():
        assert torch.equal(parameter, before[name]) == ("last_layer" in name), name


# -- kernels --


@needs_interpreter
def test_the_fused_path_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss_kernels, "STATISTICS", (32, 1))
    monkeypatch.setattr(head_loss_kernels, "GRADIENT", (64, 1))
    settings, method = selfpatch(num_local=1, neighbor_prototypes=70)
    method, views = method.to(DEVICE), make_views(settings, batch=1).map(lambda tensor: tensor.to(DEVICE))
    results = []
    for fits in (False, True):
        monkeypatch.setattr(ADCLR, "_runs_kernels", lambda *_, fits=fits: fits)
        losses = method(views, 0.05)
        losses.total.backward()
        sums = [center._sum.clone() for center in method.centers.values()]
        results.append((losses, [p.grad.clone() for p in method.student.parameters()], sums))  # type: ignore[union-attr]
        method.forget()
    (plain, plain_gradients, plain_sums), (fused, fused_gradients, fused_sums) = results
    for a, b in zip(plain, fused, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(plain_gradients, fused_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    for a, b in zip(plain_sums, fused_sums, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@needs_interpreter
def test_the_fused_path_stores_no_logits_of_all_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of a few patches nothing that is stored has as many numbers as patches times prototypes."""
    settings, method = selfpatch(neighbor_prototypes=512)
    method, views = method.to(DEVICE), make_views(settings, batch=1).map(lambda tensor: tensor.to(DEVICE))
    monkeypatch.setattr(ADCLR, "_runs_kernels", lambda *_: True)
    monkeypatch.setattr(head_loss, "CHUNK_BYTES", 8 * 2 * 512 * 4)
    rows = 2 * 16 + 2 * 9
    stored: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t.numel()) or t, lambda t: t):
        method(views, 0.05)
    assert stored
    assert max(stored) < rows * 512 / 2


# -- settings --


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_queries": 2}, "views.num_queries=0"),
        ({"num_registers": 1}, "model.num_registers=0"),
        ({"position_embedding": "rotary"}, "model.position_embedding=learned"),
        ({"class_attention": 0}, "model.class_attention=2"),
        ({"masked_weight": 1.0}, "method.masked_weight=0"),
        ({"target": "sinkhorn"}, "method.target=center"),
    ],
)
def test_combinations_without_a_meaning_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        tiny(**(SELFPATCH | changes))
    assert "\n" not in str(error.value)


def test_class_attention_alone_is_dino_and_ibot_on_another_network() -> None:
    for masked in (0.0, 1.0):
        settings, method = make(num_queries=0, class_attention=2, masked_weight=masked)
        losses = method(make_views(settings), 0.05)
        losses.total.backward()
        assert (losses.masked > 0) == (masked > 0)
        assert all(p.grad is not None for p in method.student.parameters())


def test_recipes_are_selfpatchs() -> None:
    made = {name: parsing.build(Settings, parsing.load_recipe(name)) for name in parsing.recipe_names()}
    assert sorted(parsing.differences(made["dino_small"], made["selfpatch_small"])) == [
        "method.neighbor_weight is 0.0 there and 0.1 here",
        "model.class_attention is 0 there and 2 here",
    ]
    full = made["selfpatch_vits16"]
    assert (full.method.num_prototypes, full.method.neighbor_prototypes, full.method.num_neighbors) == (65536, 4096, 4)
    assert (full.views.num_local, full.views.global_scale, full.views.local_scale) == (8, (0.25, 1.0), (0.05, 0.25))
    assert (full.method.teacher_temperature, full.method.teacher_temperature_start) == (0.04, 0.04)
    assert isinstance(network().class_blocks[0], ClassAttentionBlock)
