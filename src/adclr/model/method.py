"""The method: a student, a teacher that is its moving average, and up to three losses between them.

Without queries it is DINO; without queries and with masks, iBOT; with queries, ADCLR; with both, ADCLR*.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from adclr.model.heads import ProjectionHead
from adclr.model.losses import Center, masked_loss, paired_loss, sinkhorn
from adclr.model.ops import head_loss
from adclr.model.views import Masks, Views
from adclr.model.vit import Input, Tokens, VisionTransformer
from adclr.system import distributed

Kind = Literal["global", "query", "masked"]

TEMPERATURE = 0.07  # of the teacher's targets, where another is reached by scaling its outputs


class Losses(NamedTuple):
    """Scalars of one batch; `total` has the gradient. Terms that are not used are 0."""

    total: Tensor
    global_: Tensor
    query: Tensor
    masked: Tensor
    entropy: Tensor  # of the teacher's [CLS] targets, of log K: 1 is uniform, 0 is one prototype for each


class Outputs(NamedTuple):
    """One number for each prototype: the student's logits or the teacher's targets.

    A of the Q queries of an image are anchored to a local view. V is the number of the branch's views that have
    queries; the student has one more answer to an anchored query, the `[CLS]` of its local view.
    """

    global_: Tensor  # V×B×K
    anchored: Tensor | None  # V×(B·A)×K, for the student (V+1)×(B·A)×K
    query: Tensor | None  # V×(B·(Q-A))×K
    masked: Tensor | None  # M×K


class Rows(NamedTuple):
    """What the head projects of one branch's tokens, before the last layer; in the order of `Outputs`."""

    projected: Tensor  # R×256, of length 1
    sizes: tuple[int, int, int, int]  # rows of each kind


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
        anchored_queries: int = 0,  # A: the first queries of an image, each cut out where a local view is
    ) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.query_weight, self.masked_weight = query_weight, masked_weight
        self.student_temperature = student_temperature
        self.target = target
        self.queries_in_local_views = queries_in_local_views
        self.anchored_queries = anchored_queries
        self.num_prototypes = student.head.last_layer.direction.shape[0]
        kinds = ("shared",) if center == "shared" else ("global", "query", "masked")
        self.centers = nn.ModuleDict({kind: Center(self.num_prototypes, center_momentum) for kind in kinds})
        self.train()

    def center(self, kind: Kind) -> Center:
        center = self.centers[kind if kind in self.centers else "shared"]
        assert isinstance(center, Center)
        return center

    def train(self, mode: bool = True) -> ADCLR:
        super().train(mode)
        self.teacher.eval()  # drop path is the student's only
        return self

    def forward(
        self, views: Views, teacher_temperature: float | Tensor, query_temperature: float | Tensor | None = None
    ) -> Losses:
        """`query_temperature` is the teacher's for queries; None: the same as for all else."""
        temperatures = teacher_temperature, teacher_temperature if query_temperature is None else query_temperature
        if self.target == "center" and head_loss.possible(views.global_crops):
            taught = self.read_as_teacher(views)
            return self.compare_in_chunks(taught, self.read_as_student(views), views, *temperatures)
        return self.compare(self.teach(views, *temperatures), self.study(views), views.masks)

    @torch.no_grad()
    def read_as_teacher(self, views: Views) -> Rows:
        """The teacher reads the two whole global views; the centers see every row, also of patches not masked."""
        crops, head = views.global_crops, self.teacher.head
        queries = _for_each_view(views.queries, crops.shape[0])
        seen = Input(crops.flatten(0, 1), queries, patches=views.masks is not None)
        (tokens,) = self.teacher.backbone.forward_many([seen])
        cls = head.project(tokens.cls)
        query = masked = cls[:0]
        self._observe("global", cls)
        if tokens.queries is not None:
            query = head.project(tokens.queries.flatten(0, 1))
            self._observe("query", query)
        if views.masks is not None:
            patches = head.project(tokens.patches.flatten(0, 1))
            self._observe("masked", patches)
            masked = patches[views.masks.index]
        return self._rows(cls, query, masked, views)

    def _observe(self, kind: Kind, projected: Tensor) -> None:
        """The last layer is linear: the mean of the outputs is the output of the mean."""
        if self.target == "center":
            head = self.teacher.head
            with torch.autocast(projected.device.type, enabled=False):
                mean = projected.mean(dim=0, dtype=head.last_layer.direction.dtype)
                self.center(kind).observe(head.prototypes(mean), projected.shape[0])

    def read_as_student(self, views: Views) -> Rows:
        """The student reads all views, the global ones masked; one pass of the head."""
        crops = views.global_crops
        mask = None if views.masks is None else views.masks.grid.flatten(0, 1)
        queries = _for_each_view(views.queries, crops.shape[0])
        inputs = [Input(crops.flatten(0, 1), queries, mask, patches=mask is not None)]
        if views.local_crops is not None:
            local = views.local_crops
            queries = views.queries if self.queries_in_local_views else None
            inputs.append(Input(local.flatten(0, 1), _for_each_view(queries, local.shape[0]), patches=False))
        outputs: list[Tokens] = self.student.backbone.forward_many(inputs)
        cls = torch.cat([tokens.cls for tokens in outputs])
        rows = [cls]
        rows += [tokens.queries.flatten(0, 1) for tokens in outputs if tokens.queries is not None]
        num_queries = sum(len(part) for part in rows[1:])
        if views.masks is not None:
            rows.append(outputs[0].patches.flatten(0, 1)[views.masks.index])
        projected = self.student.head.project(torch.cat(rows))
        sizes = [len(cls), num_queries, len(projected) - len(cls) - num_queries]
        cls, query, masked = projected.split_with_sizes(sizes)
        return self._rows(cls, query, masked, views, projected)

    def _rows(self, cls: Tensor, query: Tensor, masked: Tensor, views: Views, joined: Tensor | None = None) -> Rows:
        """Puts rows in the order of `Outputs`; `joined` is all three of them together, where it is there already.

        Student rows have the `[CLS]` of local views behind those of the global ones: they answer anchored queries.
        """
        anchored = min(self.anchored_queries, views.num_queries)
        if not anchored:
            joined = torch.cat([cls, query, masked]) if joined is None else joined
            return Rows(joined, (len(cls), 0, len(query), len(masked)))
        batch, dim = views.global_crops.shape[1], cls.shape[-1]
        query = query.view(-1, batch, views.num_queries, dim)
        local = cls.view(-1, batch, dim)[2 : 2 + anchored].transpose(0, 1)  # B×A×256; the teacher has none
        parts = [cls, query[:, :, :anchored].reshape(-1, dim), local.reshape(-1, dim)]
        parts += [query[:, :, anchored:].reshape(-1, dim), masked]
        sizes = [len(part) for part in parts]
        return Rows(torch.cat(parts), (sizes[0], sizes[1] + sizes[2], sizes[3], sizes[4]))

    @torch.no_grad()
    def teach(
        self, views: Views, teacher_temperature: float | Tensor, query_temperature: float | Tensor | None = None
    ) -> Outputs:
        """What the teacher says the student should say."""
        rows = self.read_as_teacher(views)
        logits = self._split(self.teacher.head.prototypes(rows.projected), rows, views)

        def targets(kind: Kind, logits: Tensor | None) -> Tensor | None:
            if logits is None:
                return None
            flat = logits.flatten(0, -2)
            temperature = teacher_temperature
            if kind == "query" and query_temperature is not None:
                temperature = query_temperature
            if self.target == "sinkhorn":
                return sinkhorn(flat, temperature).view(logits.shape)
            return self.center(kind).targets(flat, temperature).view(logits.shape)

        global_ = targets("global", logits.global_)
        assert global_ is not None
        if self.target == "sinkhorn" and logits.anchored is not None and logits.query is not None:
            # one batch of queries, whatever they are: prototypes are used equally over all of them
            both = targets("query", torch.cat([logits.anchored, logits.query], dim=1))
            assert both is not None
            parts = both.split_with_sizes([logits.anchored.shape[1], logits.query.shape[1]], dim=1)
            return Outputs(global_, parts[0], parts[1], targets("masked", logits.masked))
        anchored, query = targets("query", logits.anchored), targets("query", logits.query)
        return Outputs(global_, anchored, query, targets("masked", logits.masked))

    def study(self, views: Views) -> Outputs:
        """The student's logits."""
        rows = self.read_as_student(views)
        return self._split(self.student.head.prototypes(rows.projected), rows, views)

    def _share_anchored(self, views: Views) -> float:
        """Of the queries: every query counts the same, however many answers it has."""
        count = views.num_queries
        return min(self.anchored_queries, count) / max(1, count)

    def compare_in_chunks(
        self,
        taught: Rows,
        studied: Rows,
        views: Views,
        teacher_temperature: float | Tensor,
        query_temperature: float | Tensor,
    ) -> Losses:
        """As `compare`, from rows before the last layer, whose logits are never all there; only `total` has a graph."""
        images = views.global_crops.shape[1]
        share, weight = self._share_anchored(views), self.query_weight
        # a temperature that changes is taken into the teacher's outputs, so that the kernels need not know it
        sharper, query_sharper = TEMPERATURE / teacher_temperature, TEMPERATURE / query_temperature
        query_center = self.center("query").value * query_sharper

        def items(kind: int) -> int:
            return taught.sizes[kind] // 2

        parts = [head_loss.Part(images, studied.sizes[0] // images, self.center("global").value * sharper, 1.0)]
        if share:
            parts.append(head_loss.Part(items(1), studied.sizes[1] // items(1), query_center, weight * share))
        views_each = studied.sizes[2] // max(1, items(2))
        parts.append(head_loss.Part(items(2), views_each, query_center, weight * (1 - share)))
        weights = studied.projected[:0, 0] if views.masks is None else views.masks.weight
        masked_center = self.center("masked").value * sharper
        parts.append(head_loss.Part(studied.sizes[3], 1, masked_center, self.masked_weight, weights))
        cls, anchored, query, masked = taught.projected.split_with_sizes(taught.sizes)
        compared = head_loss.compare(
            studied.projected,
            self.student.head.last_layer.matrix(),
            torch.cat([cls * sharper, anchored * query_sharper, query * query_sharper, masked * sharper]),
            self.teacher.head.last_layer.matrix(),
            parts,
            self.student_temperature,
            TEMPERATURE,
        )
        global_, *of_queries, masked = compared.losses
        query = of_queries[0] * share + of_queries[1] * (1 - share) if share else of_queries[0]
        return Losses(compared.total, global_, query, masked, compared.entropy)

    def compare(self, targets: Outputs, logits: Outputs, masks: Masks | None) -> Losses:
        tau = self.student_temperature
        zero = logits.global_.new_zeros((), dtype=torch.float32)
        losses = {"global": paired_loss(targets.global_, logits.global_, tau), "query": zero, "masked": zero}
        for wanted, answers in ((targets.anchored, logits.anchored), (targets.query, logits.query)):
            if wanted is not None and answers is not None:
                share = wanted.shape[1] / sum(t.shape[1] for t in (targets.anchored, targets.query) if t is not None)
                losses["query"] = losses["query"] + share * paired_loss(wanted, answers, tau)
        if logits.masked is not None:
            assert targets.masked is not None
            assert masks is not None
            losses["masked"] = masked_loss(targets.masked, logits.masked, masks.weight, tau)
        total = losses["global"] + self.query_weight * losses["query"] + self.masked_weight * losses["masked"]
        entropy = torch.special.entr(targets.global_).sum(dim=-1).mean() / math.log(self.num_prototypes)
        return Losses(total, losses["global"], losses["query"], losses["masked"], entropy)

    def _split(self, x: Tensor, rows: Rows, views: Views) -> Outputs:
        """R×K -> by kind."""
        batch, width = views.global_crops.shape[1], x.shape[-1]
        cls, anchored, query, masked = x.split_with_sizes(rows.sizes)
        count = views.num_queries
        num_anchored = min(self.anchored_queries, count)
        return Outputs(
            cls.view(-1, batch, width),
            anchored.view(-1, batch * num_anchored, width) if num_anchored else None,
            query.view(-1, batch * (count - num_anchored), width) if count > num_anchored else None,
            None if views.masks is None else masked,
        )

    def forget(self) -> None:
        """As if no batch had been seen since the last update."""
        self.zero_grad(set_to_none=True)
        for center in self.centers.values():
            assert isinstance(center, Center)
            center.forget()

    @torch.no_grad()
    def update(self, momentum: float | Tensor, ok: Tensor, head_only: bool = False) -> None:
        """Moves teacher and centers after a step; where `ok` is false all of them stay as they are, to the bit.

        `head_only` is for a student whose backbone stands still: the mean of two equal numbers is not always that
        number, so the teacher's backbone is not touched.
        """
        keep = torch.where(ok, momentum, 1.0).to(torch.float32)
        teacher, student = (
            [distributed.local(p) for p in (branch.head if head_only else branch).parameters()]
            for branch in (self.teacher, self.student)
        )
        torch._foreach_mul_(teacher, keep)
        torch._foreach_add_(teacher, list(torch._foreach_mul(student, 1 - keep)))
        for center in self.centers.values():
            assert isinstance(center, Center)
            center.update(ok)


def _for_each_view(queries: Tensor | None, num_views: int) -> Tensor | None:
    """B×Q×... -> (V·B)×Q×...: the same pixels go to every view."""
    return None if queries is None else queries.repeat(num_views, 1, 1, 1, 1)
