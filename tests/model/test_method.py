"""The method: what is DINO, what is iBOT, where gradients go, and how the teacher and the centers move."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from adclr.config.settings import Settings
from adclr.data.augment import _hidden
from adclr.model.losses import Center, sinkhorn
from adclr.model.method import ADCLR
from adclr.model.named_tensors import Masks, Tokens, Views
from adclr.training.job import build
from tiny import tiny


def make_views(settings: Settings, batch: int = 3, seed: int = 0) -> Views:
    generator = torch.Generator().manual_seed(seed)
    views, patch = settings.views, settings.model.patch_size

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    masks = None
    if settings.masked:
        grid = torch.rand(2, batch, (views.global_size // patch) ** 2, generator=generator) < 0.4
        grid[0, 0] = False
        weight = (1 / (grid.sum(-1, keepdim=True).clamp(min=1) * 2 * batch)).expand_as(grid)
        masks = Masks(grid, grid.flatten().nonzero().flatten(), weight[grid])
    crops = noise(2, batch, 3, views.global_size, views.global_size)
    local = noise(views.num_local, batch, 3, views.local_size, views.local_size) if views.num_local else None
    queries = noise(batch, views.num_queries, 3, patch, patch) if views.num_queries else None
    return Views(crops, local, queries, masks)


def with_room(views: Views, room: int) -> Views:
    """As a GPU gets them."""
    assert views.masks is not None
    index, weight = _hidden(views.masks.grid.numpy(), room)
    return replace(views, masks=Masks(views.masks.grid, torch.from_numpy(index), torch.from_numpy(weight)))


def test_patches_that_fill_the_room_change_nothing() -> None:
    settings, method = make(masked_weight=1.0)
    views = make_views(settings)
    assert views.masks is not None
    hidden = len(views.masks.index)
    for few in (0, hidden):
        same = with_room(views, few).masks
        assert same is not None
        assert torch.equal(same.index, views.masks.index)
        torch.testing.assert_close(same.weight, views.masks.weight)
    filled = with_room(views, hidden + 7)
    assert filled.masks is not None
    assert len(filled.masks.index.unique()) == hidden + 7
    assert not views.masks.grid.flatten()[filled.masks.index[hidden:]].any()
    found = []
    for seen in (views, filled):
        losses = method(seen, 0.05)
        losses.total.backward()
        found.append((torch.stack(list(losses)).detach(), [p.grad for p in method.student.parameters()]))
        method.forget()
    torch.testing.assert_close(found[0][0], found[1][0])
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def make(**changes: object) -> tuple[Settings, ADCLR]:
    settings = tiny(model__drop_path=0.0, **changes)
    method = build(settings)
    torch.manual_seed(5)
    for parameter in method.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    for center in method.centers.values():
        assert isinstance(center, Center)
        center.value.normal_(0, 0.05)
    return settings, method


def slow_losses(
    method: ADCLR, views: Views, temperature: float, query_temperature: float | None = None
) -> dict[str, float]:
    """The three losses view by view and token by token, in float64, from METHOD's formulas."""
    method = copy.deepcopy(method).double()
    double = torch.float64

    def h(target: Tensor, logits: Tensor) -> float:
        return -(target * torch.log_softmax(logits / 0.1, -1)).sum().item()

    def target(logits: Tensor, kind: str) -> Tensor:
        center = method.center(kind)  # type: ignore[arg-type]
        tau = query_temperature if kind == "query" and query_temperature else temperature
        return torch.softmax((logits - center.value) / tau, -1)

    queries = None if views.queries is None else views.queries.to(double)
    masks, blocks = views.masks, method.student.backbone.query_read_only_blocks

    def read(branch: str, crop: Tensor, queries: Tensor | None, mask: Tensor | None = None) -> Tokens:
        """With read-only copies two passes: that of ordinary queries, and that of read-only ones."""
        vit = getattr(method, branch).backbone
        tokens: Tokens = vit(crop, queries, mask)
        if queries is None or method.query_copies == 1:
            return tokens
        vit.query_read_only_blocks = 0
        ordinary = vit(crop, queries, mask).queries
        vit.query_read_only_blocks = blocks
        assert ordinary is not None
        assert tokens.queries is not None
        return tokens._replace(queries=torch.cat([ordinary, tokens.queries], dim=1))

    with torch.no_grad():
        teacher, student = [], []
        for v, crop in enumerate(views.global_crops.to(double)):
            teacher.append(read("teacher", crop, queries))
            student.append(read("student", crop, queries, None if masks is None else masks.grid[v]))
        for crop in [] if views.local_crops is None else views.local_crops.to(double):
            student.append(read("student", crop, queries if method.queries_in_local_views else None))
        t_head, s_head = method.teacher.head, method.student.head
        batch = views.global_crops.shape[1]
        global_ = [
            h(target(t_head(teacher[t].cls[b]), "global"), s_head(student[s].cls[b]))
            for t in range(2)
            for s in range(len(student))
            if s != t
            for b in range(batch)
        ]
        result = {"global": sum(global_) / len(global_), "query": 0.0, "masked": 0.0}
        if queries is not None:
            # of each query the mean over its pairs, then the mean over queries and images
            number = method.query_copies * queries.shape[1]
            for b in range(batch):
                for i in range(number):
                    targets = [target(t_head(teacher[t].queries[b, i]), "query") for t in range(2)]
                    pairs = [
                        h(targets[t], s_head(student[s].queries[b, i]))
                        for t in range(2)
                        for s in range(len(student))
                        if s != t and student[s].queries is not None
                    ]
                    box = i % queries.shape[1]
                    if box < method.anchored_queries:  # the local view of this number is where the query was cut out
                        pairs += [h(targets[t], s_head(student[2 + box].cls[b])) for t in range(2)]
                    result["query"] += sum(pairs) / len(pairs) / (batch * number)
        if masks is not None:
            for v in range(2):
                for b in range(batch):
                    hidden = masks.grid[v, b].nonzero().flatten().tolist()
                    terms = [
                        h(target(t_head(teacher[v].patches[b, n]), "masked"), s_head(student[v].patches[b, n]))
                        for n in hidden
                    ]
                    result["masked"] += sum(terms) / max(1, len(terms)) / (2 * batch)
        return result


COPIES = {"read_only_copies": True, "query_read_only_blocks": 1, "query_keys": "patches"}
METHODS = {
    "DINO": {"num_queries": 0},
    "iBOT": {"num_queries": 0, "masked_weight": 1.0},
    "ADCLR": {},
    "ADCLR*": {"masked_weight": 1.0},
    "no local views": {"num_local": 0},
    "queries in local views": {"queries_in_local_views": True},
    "shared center": {"center": "shared", "masked_weight": 1.0},
    "anchored": {"query_source": "local"},
    "anchored, masked": {"query_source": "local", "masked_weight": 1.0},
    "anchored, queries in local views": {"query_source": "local", "queries_in_local_views": True},
    "two anchored of five": {"query_source": "local", "num_queries": 5},
    "fewer queries than local views": {"query_source": "local", "num_queries": 1},
    "read-only": {"query_read_only_blocks": 1, "query_keys": "patches"},
    "anchored, read-only": {"query_source": "local", "query_read_only_blocks": 2},
    "anchored, read-only copies": {"query_source": "local", **COPIES},
    "read-only copies, masked": COPIES | {"masked_weight": 1.0},
    "two anchored of five, copies in local views": COPIES
    | {"query_source": "local", "num_queries": 5, "queries_in_local_views": True},
}


@pytest.mark.parametrize("query_temperature", [None, 0.12])
@pytest.mark.parametrize("name", METHODS)
def test_losses_equal_loops_over_the_formulas(name: str, query_temperature: float | None) -> None:
    settings, method = make(**METHODS[name])
    views = make_views(settings)
    losses = method.double()(  # in float64 both ways, so that only the formulas are compared
        Views(
            views.global_crops.double(),
            None if views.local_crops is None else views.local_crops.double(),
            None if views.queries is None else views.queries.double(),
            views.masks,
        ),
        0.05,
        query_temperature,
    )
    slow = slow_losses(method, views, 0.05, query_temperature)
    for found, term in ((losses.global_, "global"), (losses.query, "query"), (losses.masked, "masked")):
        assert found.item() == pytest.approx(slow[term], rel=1e-6), term
    total = slow["global"] + 0.5 * slow["query"] + settings.method.masked_weight * slow["masked"]
    assert losses.total.item() == pytest.approx(total, rel=1e-6)


def gradients(method: ADCLR, loss: Tensor) -> dict[str, Tensor]:
    method.zero_grad(set_to_none=True)
    loss.backward()
    return {n: p.grad for n, p in method.student.named_parameters() if p.grad is not None}


def test_adclr_has_dinos_parameters_and_adclr_star_only_the_mask_token_more() -> None:
    def count(**changes: object) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in make(**changes)[1].student.named_parameters()}

    dino, adclr, star = count(num_queries=0), count(), count(masked_weight=1.0)
    assert dino == adclr
    assert set(star) - set(dino) == {"backbone.mask_token"}


def test_without_weight_queries_leave_dinos_loss_and_gradients() -> None:
    settings, adclr = make(query_weight=0.0)
    _, dino = make(num_queries=0)
    views = make_views(settings)
    plain = Views(views.global_crops, views.local_crops, None, None)
    a, b = adclr(views, 0.05), dino(plain, 0.05)
    torch.testing.assert_close(a.global_, b.global_, rtol=1e-6, atol=0)
    torch.testing.assert_close(a.total, b.total, rtol=1e-6, atol=0)
    ours, theirs = gradients(adclr, a.total), gradients(dino, b.total)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-7)


def test_the_query_loss_alone_trains_the_patch_projection() -> None:
    settings, method = make()
    losses = method(make_views(settings), 0.05)
    found = gradients(method, losses.query)
    assert found["backbone.patch_embed.proj.weight"].abs().max() > 0
    assert found["backbone.blocks.0.attn.qkv.weight"].abs().max() > 0


def test_no_gradient_reaches_the_teacher() -> None:
    settings, method = make(masked_weight=1.0)
    method(make_views(settings), 0.05).total.backward()
    assert all(p.grad is None for p in method.teacher.parameters())
    assert not any(p.requires_grad for p in method.teacher.parameters())
    for p in method.student.parameters():
        assert p.grad is not None


def test_the_teacher_is_never_masked_and_the_student_is() -> None:
    settings, method = make(masked_weight=1.0)
    views = make_views(settings)
    assert views.masks is not None
    none = Masks(torch.zeros_like(views.masks.grid), views.masks.index, views.masks.weight)
    unmasked = Views(views.global_crops, views.local_crops, views.queries, none)
    with torch.no_grad():
        assert torch.equal(method.teacher_targets(views, 0.05).global_, method.teacher_targets(unmasked, 0.05).global_)
        assert not torch.allclose(method.student_logits(views)[0], method.student_logits(unmasked)[0])


def test_the_teacher_is_the_moving_average_and_starts_as_the_student() -> None:
    _, method = make()
    fresh = build(tiny())
    for s, t in zip(fresh.student.parameters(), fresh.teacher.parameters(), strict=True):
        assert torch.equal(s, t)
    before = [p.clone() for p in method.teacher.parameters()]
    method.update(0.7, torch.tensor(True))
    for old, new, student in zip(before, method.teacher.parameters(), method.student.parameters(), strict=True):
        torch.testing.assert_close(new, 0.7 * old + 0.3 * student.detach())
    before = [p.clone() for p in method.teacher.parameters()]
    method.update(0.7, torch.tensor(False))
    assert all(torch.equal(a, b) for a, b in zip(before, method.teacher.parameters(), strict=True))


@pytest.mark.parametrize("center", ["separate", "shared"])
def test_centers_follow_all_teacher_outputs_of_their_kind(center: str) -> None:
    settings, method = make(masked_weight=1.0, center=center)
    views = make_views(settings)
    with torch.no_grad():
        queries = views.queries.repeat(2, 1, 1, 1, 1)
        tokens = method.teacher.backbone(views.global_crops.flatten(0, 1), queries)
        head = method.teacher.head
        logits = {
            "global": head(tokens.cls),
            "query": head(tokens.queries.flatten(0, 1)),
            "masked": head(tokens.patches.flatten(0, 1)),  # all patches, not only the masked
        }
    if center == "shared":
        logits = {"shared": torch.cat(list(logits.values()))}
    expected = {kind: method.centers[kind].value * 0.9 + rows.mean(0) * 0.1 for kind, rows in logits.items()}
    assert set(method.centers) == set(logits)
    method(views, 0.05)
    method.update(1.0, torch.tensor(True))
    for kind, value in expected.items():
        torch.testing.assert_close(method.centers[kind].value, value, rtol=1e-5, atol=1e-6)


def test_drop_path_is_the_students_only_and_follows_the_seed() -> None:
    method = build(tiny(model__drop_path=0.5))
    assert method.teacher.backbone.drop_path == 0
    method.teacher.backbone.drop_path = 0.5  # even then: the teacher is in eval mode whatever the student is in
    method.train()
    views = make_views(tiny())
    with torch.no_grad():
        assert torch.equal(method.teacher_targets(views, 0.05).global_, method.teacher_targets(views, 0.05).global_)
        torch.manual_seed(1)
        a = method.student_logits(views)[0]
        b = method.student_logits(views)[0]
        torch.manual_seed(1)
        c = method.student_logits(views)[0]
    assert torch.equal(a, c)
    assert not torch.equal(a, b)


def test_sinkhorn_targets() -> None:
    settings, method = make(target="sinkhorn", masked_weight=1.0)
    targets = method.teacher_targets(make_views(settings), 0.05)
    assert targets.anchored is None
    for part in (targets.global_, targets.query, targets.masked):
        assert part is not None
        torch.testing.assert_close(part.sum(-1), torch.ones(part.shape[:-1]), rtol=1e-4, atol=1e-4)
    views = make_views(settings)
    with torch.no_grad():
        tokens = method.teacher.backbone(views.global_crops.flatten(0, 1), views.queries.repeat(2, 1, 1, 1, 1))
        expected = sinkhorn(method.teacher.head(tokens.cls), 0.05)
        other = sinkhorn(method.teacher.head(tokens.queries.flatten(0, 1)), 0.05)
    torch.testing.assert_close(method.teacher_targets(views, 0.05).global_.flatten(0, 1), expected)
    torch.testing.assert_close(method.teacher_targets(views, 0.05).query.flatten(0, 1), other)
    before = {kind: center.value.clone() for kind, center in method.centers.items()}
    method.update(1.0, torch.tensor(True))
    assert all(torch.equal(center.value, before[kind]) for kind, center in method.centers.items())  # not in use


def test_entropy_is_of_log_k() -> None:
    settings, method = make()
    views = make_views(settings)
    assert 0 < method(views, 0.05).entropy < 1
    assert method(views, 1e4).entropy.item() == pytest.approx(1, abs=1e-4)
    assert method(views, 1e-5).entropy.item() == pytest.approx(0, abs=1e-3)
