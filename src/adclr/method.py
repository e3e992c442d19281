"""The method: a student, a teacher that is its moving average, and up to three losses between them.

Without queries it is DINO; without queries and with masks, iBOT; with queries, ADCLR; with both, ADCLR*.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from adclr.heads import ProjectionHead
from adclr.losses import Center, masked_loss, paired_loss, sinkhorn
from adclr.vit import Input, Tokens, VisionTransformer


class Masks(Protocol):
    """Which patches of the student's global views are hidden, and where the hidden ones lie."""

    @property
    def grid(self) -> Tensor: ...  # 2×B×N bool
    @property
    def index(self) -> Tensor: ...  # M places in the flattened grid
    @property
    def weight(self) -> Tensor: ...  # M, 1 / (hidden patches of the view · B · 2)


class Views(Protocol):
    @property
    def global_crops(self) -> Tensor: ...  # 2×B×3×S×S
    @property
    def local_crops(self) -> Tensor | None: ...  # L×B×3×s×s
    @property
    def queries(self) -> Tensor | None: ...  # B×Q×3×P×P
    @property
    def masks(self) -> Masks | None: ...


class Losses(NamedTuple):
    """Scalars of one batch; `total` has the gradient. Terms that are not used are 0."""

    total: Tensor
    global_: Tensor
    query: Tensor
    masked: Tensor
    entropy: Tensor  # of the teacher's [CLS] targets, of log K: 1 is uniform, 0 is one prototype for each


class Targets(NamedTuple):
    global_: Tensor  # 2×B×K
    query: Tensor | None  # 2×(B·Q)×K
    masked: Tensor | None  # M×K


class Branch(nn.Module):
    """A backbone with its head; the student is one and the teacher is one."""

    def __init__(self, backbone: VisionTransformer, head: ProjectionHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head


class ADCLR(nn.Module):
    """`losses = method(views, teacher_temperature)`; backward; optimizer; `method.update(momentum, ok)`."""

    def __init__(
        self,
        student: Branch,
        teacher: Branch,
        *,
        query_weight: float = 0.5,
        masked_weight: float = 0.0,
        student_temperature: float = 0.1,
        center_momentum: float = 0.9,
        center: Literal["separate", "shared"] = "separate",
        target: Literal["center", "sinkhorn"] = "center",
        queries_in_local_views: bool = False,
    ) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.query_weight, self.masked_weight = query_weight, masked_weight
        self.student_temperature = student_temperature
        self.target = target
        self.queries_in_local_views = queries_in_local_views
        self.num_prototypes = student.head.last_layer.direction.shape[0]
        kinds = ("shared",) if center == "shared" else ("global", "query", "masked")
        self.centers = nn.ModuleDict({kind: Center(self.num_prototypes, center_momentum) for kind in kinds})
        self.train()

    def center(self, kind: Literal["global", "query", "masked"]) -> Center:
        center = self.centers[kind if kind in self.centers else "shared"]
        assert isinstance(center, Center)
        return center

    def train(self, mode: bool = True) -> ADCLR:
        super().train(mode)
        self.teacher.eval()  # drop path is the student's only
        return self

    def forward(self, views: Views, teacher_temperature: float) -> Losses:
        targets = self.teach(views, teacher_temperature)
        cls, query, masked = self.study(views)
        return self.compare(targets, cls, query, masked, views.masks)

    @torch.no_grad()
    def teach(self, views: Views, temperature: float) -> Targets:
        """The teacher reads the two whole global views and says what the student should."""
        crops = views.global_crops
        tokens = self.teacher.backbone(crops.flatten(0, 1), _for_each_view(views.queries, crops.shape[0]))
        head = self.teacher.head
        global_ = self._targets("global", head.project(tokens.cls), None, temperature)
        query = masked = None
        if tokens.queries is not None:
            query = self._targets("query", head.project(tokens.queries.flatten(0, 1)), None, temperature)
            query = query.view(crops.shape[0], -1, self.num_prototypes)
        if views.masks is not None:
            patches = head.project(tokens.patches.flatten(0, 1))
            masked = self._targets("masked", patches, views.masks.index, temperature)
        return Targets(global_.view(crops.shape[0], -1, self.num_prototypes), query, masked)

    def _targets(
        self,
        kind: Literal["global", "query", "masked"],
        projected: Tensor,
        index: Tensor | None,
        temperature: float,
    ) -> Tensor:
        """Targets of the rows at `index` (all if None); the center sees every row."""
        head = self.teacher.head
        logits = head.prototypes(projected if index is None else projected[index])
        if self.target == "sinkhorn":
            return sinkhorn(logits, temperature)
        center = self.center(kind)
        with torch.autocast(projected.device.type, enabled=False):
            mean = projected.mean(dim=0, dtype=head.last_layer.direction.dtype)
            center.observe(head.prototypes(mean), projected.shape[0])
        return center.targets(logits, temperature)

    def study(self, views: Views) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The student's logits: `[CLS]` V×B×K, queries V×(B·Q)×K, masked patches M×K; one pass of the head."""
        crops, batch = views.global_crops, views.global_crops.shape[1]
        mask = None if views.masks is None else views.masks.grid.flatten(0, 1)
        inputs = [Input(crops.flatten(0, 1), _for_each_view(views.queries, crops.shape[0]), mask)]
        if views.local_crops is not None:
            local = views.local_crops
            queries = views.queries if self.queries_in_local_views else None
            inputs.append(Input(local.flatten(0, 1), _for_each_view(queries, local.shape[0])))
        outputs: list[Tokens] = self.student.backbone.forward_many(inputs)
        cls = torch.cat([tokens.cls for tokens in outputs])
        rows = [cls]
        rows += [tokens.queries.flatten(0, 1) for tokens in outputs if tokens.queries is not None]
        num_queries = sum(len(part) for part in rows[1:])
        if views.masks is not None:
            rows.append(outputs[0].patches.flatten(0, 1)[views.masks.index])
        logits = self.student.head(torch.cat(rows))
        own, query, masked = logits.split([len(cls), num_queries, len(logits) - len(cls) - num_queries])
        return (
            own.unflatten(0, (-1, batch)),
            query.unflatten(0, (-1, batch * self._num_queries(views))) if num_queries else None,
            masked if views.masks is not None else None,
        )

    @staticmethod
    def _num_queries(views: Views) -> int:
        return 0 if views.queries is None else views.queries.shape[1]

    def compare(
        self, targets: Targets, cls: Tensor, query: Tensor | None, masked: Tensor | None, masks: Masks | None
    ) -> Losses:
        tau = self.student_temperature
        zero = cls.new_zeros((), dtype=torch.float32)
        losses = {"global": paired_loss(targets.global_, cls, tau), "query": zero, "masked": zero}
        if query is not None:
            assert targets.query is not None
            losses["query"] = paired_loss(targets.query, query, tau)
        if masked is not None:
            assert targets.masked is not None
            assert masks is not None
            losses["masked"] = masked_loss(targets.masked, masked, masks.weight, tau)
        total = losses["global"] + self.query_weight * losses["query"] + self.masked_weight * losses["masked"]
        entropy = torch.special.entr(targets.global_).sum(dim=-1).mean() / math.log(self.num_prototypes)
        return Losses(total, losses["global"], losses["query"], losses["masked"], entropy)

    def forget(self) -> None:
        """As if no batch had been seen since the last update."""
        self.zero_grad(set_to_none=True)
        for center in self.centers.values():
            assert isinstance(center, Center)
            center.forget()

    @torch.no_grad()
    def update(self, momentum: float, ok: Tensor) -> None:
        """Moves teacher and centers after a step; where `ok` is false all of them stay as they are, to the bit."""
        keep = torch.where(ok, momentum, 1.0).to(torch.float32)
        teacher: list[Tensor] = list(self.teacher.parameters())
        student: list[Tensor] = list(self.student.parameters())
        torch._foreach_mul_(teacher, keep)
        torch._foreach_add_(teacher, list(torch._foreach_mul(student, 1 - keep)))
        for center in self.centers.values():
            assert isinstance(center, Center)
            center.update(ok)


def _for_each_view(queries: Tensor | None, num_views: int) -> Tensor | None:
    """B×Q×... -> (V·B)×Q×...: the same pixels go to every view."""
    return None if queries is None else queries.repeat(num_views, 1, 1, 1, 1)
