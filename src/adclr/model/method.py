"""The method: a student, a teacher that is its moving average, and up to three losses between them.

Without queries it is DINO; without queries and with masks, iBOT; with queries, ADCLR; with both, ADCLR*; without either
and with class attention and the neighbor loss, SelfPatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from adclr.model.heads import Branch as Branch
from adclr.model.heads import ProjectionHead
from adclr.model.losses import Center, anchor_loss, masked_loss, neighbor_weights, paired_loss, sinkhorn
from adclr.model.named_tensors import Input, Views
from adclr.model.ops import head_loss, streams
from adclr.model.vit import VisionTransformer
from adclr.system import distributed

Kind = Literal["global", "query", "masked", "neighbor"]

KERNEL_TEMPERATURE = 0.07  # of the teacher in the fused loss; others are reached by scaling its logits


class Losses(NamedTuple):
    """Scalars of one batch; only `total` has a gradient in every path. Unused terms are 0."""

    total: Tensor
    global_: Tensor
    query: Tensor
    masked: Tensor
    neighbor: Tensor
    entropy: Tensor  # of the teacher's [CLS] targets, as a share of log K: 1 if uniform, 0 if one-hot


class Outputs(NamedTuple):
    """The student's logits or the teacher's targets.

    Of the Q queries of an image, read-only copies included, A are anchored to a local view. V is the number of the
    branch's views that have queries; for an anchored query the student has one output more, its local view's `[CLS]`.
    """

    global_: Tensor  # V×B×K
    anchored: Tensor | None  # V×(B·A)×K, for the student (V+1)×(B·A)×K
    query: Tensor | None  # V×(B·(Q-A))×K
    masked: Tensor | None  # M×K
    neighbor: Tensor | None = None  # all patches of all views × K of the second head


class Projections(NamedTuple):
    """The head's output for one branch's tokens, before the prototypes; in the order of `Outputs`."""

    rows: Tensor  # rows×256, of unit length
    sizes: tuple[int, int, int, int]  # rows of each kind
    patches: Tensor | None = None  # by the second head: a row for each patch of the global views, then the local ones


class ADCLR(nn.Module):
    """One step is `losses = method(views, teacher_temperature)`, backward, optimizer, `method.update(momentum, ok)`."""

    def __init__(
        self,
        student: Branch,
        teacher: Branch,
        *,
        query_weight: float = 0.5,
        masked_weight: float = 0.0,
        neighbor_weight: float = 0.0,
        num_neighbors: int = 4,
        student_temperature: float = 0.1,
        center_momentum: float = 0.9,
        center: Literal["separate", "shared"] = "separate",
        target: Literal["center", "sinkhorn"] = "center",
        queries_in_local_views: bool = False,
        anchored_queries: int = 0,  # A: the first queries of an image, each cut out at the position of a local view
        read_only_copies: bool = False,  # each query enters twice: as an ordinary one, and as a read-only one
        anchor: VisionTransformer | None = None,  # whose similarities between patches the student keeps
        anchor_weight: float = 0.0,
    ) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.query_weight, self.masked_weight, self.neighbor_weight = query_weight, masked_weight, neighbor_weight
        self.num_neighbors = num_neighbors if neighbor_weight else 0
        self.anchor, self.anchor_weight = anchor, anchor_weight
        if self.anchor is not None:
            self.anchor.requires_grad_(False)
        self.student_temperature, self.parallel_teacher = student_temperature, False
        self.target = target
        self.queries_in_local_views = queries_in_local_views
        self.anchored_queries, self.query_copies = anchored_queries, 2 if read_only_copies else 1
        self.num_prototypes = student.head.last_layer.direction.shape[0]
        kinds = ("shared",) if center == "shared" else ("global", "query", "masked")
        self.centers = nn.ModuleDict({kind: Center(self.num_prototypes, center_momentum) for kind in kinds})
        if self.num_neighbors:
            assert student.patch_head is not None
            self.centers["neighbor"] = Center(student.patch_head.last_layer.direction.shape[0], center_momentum)
        self.train()

    def center(self, kind: Kind) -> Center:
        """Return the center of one kind of token."""
        center = self.centers[kind if kind in self.centers else "shared"]
        assert isinstance(center, Center)
        return center

    def train(self, mode: bool = True) -> ADCLR:
        """Set the student's mode; the teacher has no drop path and stays in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        if self.anchor is not None:
            self.anchor.eval()
        return self

    def forward(
        self, views: Views, teacher_temperature: float | Tensor, query_temperature: float | Tensor | None = None
    ) -> Losses:
        """Return the losses of a batch. `query_temperature` is the teacher's for queries, by default the same."""
        if query_temperature is None:
            query_temperature = teacher_temperature
        if self._runs_kernels(views.global_crops):
            device = views.global_crops.device if self.parallel_teacher else None
            teacher, (student, patches) = streams.beside(self._project_teacher, self._project_student, views, device)
            losses = self._fused_losses(teacher, student, views, teacher_temperature, query_temperature)
        else:
            targets = self.teacher_targets(views, teacher_temperature, query_temperature)
            student, patches = self._project_student(views)
            losses = self._plain_losses(targets, self.student_logits(views, student), views)
        if self.anchor is None:
            return losses
        anchor = self.anchor_weight * anchor_loss(patches, self._anchor_patches(self.anchor, views))
        return losses._replace(total=losses.total + anchor)

    @torch.no_grad()
    def _anchor_patches(self, anchor: VisionTransformer, views: Views) -> Tensor:
        """Return the patches of the unmasked global views as the weights had them that the training began with."""
        (tokens,) = anchor.forward_many([Input(views.global_crops.flatten(0, 1))])
        return tokens.patches

    def _runs_kernels(self, crops: Tensor) -> bool:
        """Return whether the last layer and the losses are one operation, with kernels."""
        return self.target == "center" and crops.is_cuda and head_loss.fits(crops)

    # -- backbones and heads --

    @torch.no_grad()
    def _project_teacher(self, views: Views) -> Projections:
        """Run the teacher on the unmasked global views; the centers observe all patches, masked or not.

        The neighbor loss alone needs its local views too.
        """
        crops, head, around = views.global_crops, self.teacher.head, self.num_neighbors
        inputs = [self._input(crops, views.queries, patches=views.masks is not None, num_neighbors=around)]
        if around and views.local_crops is not None:
            inputs.append(Input(views.local_crops.flatten(0, 1), patches=False, num_neighbors=around))
        outputs = self.teacher.backbone.forward_many(inputs)
        tokens = outputs[0]
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
        projections = self._order_rows(cls, query, masked, views)
        if not around:
            return projections
        patches = _project_patches(self.teacher, [part.neighbors for part in outputs])
        self._observe("neighbor", patches, self.teacher.patch_head)
        return projections._replace(patches=patches)

    def _observe(self, kind: Kind, projected: Tensor, head: ProjectionHead | None = None) -> None:
        """Update a center's sums. The prototypes are linear: the mean of the logits is the logits of the mean."""
        if self.target == "center":
            head = head or self.teacher.head
            with torch.autocast(projected.device.type, enabled=False):
                mean = projected.mean(dim=0, dtype=head.last_layer.direction.dtype)
                self.center(kind).observe(head.prototypes(mean), projected.shape[0])

    def _project_student(self, views: Views) -> tuple[Projections, Tensor]:
        """Run the student on all views, the global ones masked; the head runs once for all tokens.

        Return the projections, and the patches of the global views, none if no loss needs them.
        """
        crops = views.global_crops
        mask = None if views.masks is None else views.masks.grid.flatten(0, 1)
        all_patches = self.num_neighbors > 0
        needs_patches = mask is not None or all_patches or self.anchor is not None
        inputs = [self._input(crops, views.queries, mask=mask, patches=needs_patches)]
        if views.local_crops is not None:
            queries = views.queries if self.queries_in_local_views else None
            inputs.append(self._input(views.local_crops, queries, patches=all_patches))
        outputs = self.student.backbone.forward_many(inputs)
        cls = torch.cat([tokens.cls for tokens in outputs])
        rows = [cls]
        rows += [tokens.queries.flatten(0, 1) for tokens in outputs if tokens.queries is not None]
        num_queries = sum(len(part) for part in rows[1:])
        if views.masks is not None:
            rows.append(outputs[0].patches.flatten(0, 1)[views.masks.index])
        projected = self.student.head.project(torch.cat(rows))
        sizes = [len(cls), num_queries, len(projected) - len(cls) - num_queries]
        cls, query, masked = projected.split_with_sizes(sizes)
        projections = self._order_rows(cls, query, masked, views, projected)
        if all_patches:
            patches = _project_patches(self.student, [tokens.patches for tokens in outputs])
            projections = projections._replace(patches=patches)
        return projections, outputs[0].patches

    def _input(self, crops: Tensor, queries: Tensor | None, **options: Any) -> Input:
        """Return the input of crops V×B×...: every view gets the same queries, and then their read-only copies."""
        if queries is not None:
            queries = queries.repeat(len(crops), self.query_copies, 1, 1, 1)
            options["ordinary_queries"] = queries.shape[1] // 2 if self.query_copies == 2 else 0
        return Input(crops.flatten(0, 1), queries, **options)

    def _order_rows(
        self, cls: Tensor, query: Tensor, masked: Tensor, views: Views, joined: Tensor | None = None
    ) -> Projections:
        """Return rows in the order of `Outputs`; `joined` is the concatenation of the three, if there is one.

        In the student's rows the `[CLS]` of local views follow those of the global views. They are repeated as the
        outputs for anchored queries.
        """
        anchored = min(self.anchored_queries, views.num_queries)
        if not anchored:
            joined = torch.cat([cls, query, masked]) if joined is None else joined
            return Projections(joined, (len(cls), 0, len(query), len(masked)))
        batch, dim = views.global_crops.shape[1], cls.shape[-1]
        query = query.view(-1, batch, self.query_copies, views.num_queries, dim)
        local = cls.view(-1, batch, dim)[2 : 2 + anchored].transpose(0, 1)  # B×A×256; the teacher has none
        local = local.repeat(1, self.query_copies, 1)
        parts = [cls, query[:, :, :, :anchored].reshape(-1, dim), local.reshape(-1, dim)]
        parts += [query[:, :, :, anchored:].reshape(-1, dim), masked]
        sizes = [len(part) for part in parts]
        return Projections(torch.cat(parts), (sizes[0], sizes[1] + sizes[2], sizes[3], sizes[4]))

    # -- losses in plain PyTorch --

    @torch.no_grad()
    def teacher_targets(
        self, views: Views, teacher_temperature: float | Tensor, query_temperature: float | Tensor | None = None
    ) -> Outputs:
        """Return the probabilities that the student learns to predict."""
        projections = self._project_teacher(views)
        logits = self._split_kinds(self.teacher, projections, views)

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
            # anchored or not, all queries are one batch, over which prototypes are used equally
            both = targets("query", torch.cat([logits.anchored, logits.query], dim=1))
            assert both is not None
            anchored, query = both.split_with_sizes([logits.anchored.shape[1], logits.query.shape[1]], dim=1)
            return Outputs(global_, anchored, query, targets("masked", logits.masked))
        return Outputs(
            global_,
            targets("query", logits.anchored),
            targets("query", logits.query),
            targets("masked", logits.masked),
            targets("neighbor", logits.neighbor),
        )

    def student_logits(self, views: Views, projections: Projections | None = None) -> Outputs:
        """Return the student's logits; of its projections, if they are there already."""
        if projections is None:
            projections, _ = self._project_student(views)
        return self._split_kinds(self.student, projections, views)

    def _split_kinds(self, branch: Branch, projections: Projections, views: Views) -> Outputs:
        """Return the logits of a branch by kind."""
        logits, neighbor = branch.head.prototypes(projections.rows), None
        if projections.patches is not None:
            neighbor = branch.heads[-1].prototypes(projections.patches)
        batch, width = views.global_crops.shape[1], logits.shape[-1]
        cls, anchored, query, masked = logits.split_with_sizes(projections.sizes)
        num_anchored = self.query_copies * min(self.anchored_queries, views.num_queries)
        num_others = self.query_copies * views.num_queries - num_anchored
        return Outputs(
            cls.view(-1, batch, width),
            anchored.view(-1, batch * num_anchored, width) if num_anchored else None,
            query.view(-1, batch * num_others, width) if num_others else None,
            None if views.masks is None else masked,
            neighbor,
        )

    def _plain_losses(self, targets: Outputs, logits: Outputs, views: Views) -> Losses:
        temperature, masks = self.student_temperature, views.masks
        query = masked = neighbor = logits.global_.new_zeros((), dtype=torch.float32)
        global_ = paired_loss(targets.global_, logits.global_, temperature)
        num_queries = sum(part.shape[1] for part in (targets.anchored, targets.query) if part is not None)
        for target, prediction in ((targets.anchored, logits.anchored), (targets.query, logits.query)):
            if target is not None and prediction is not None:
                share = target.shape[1] / num_queries
                query = query + share * paired_loss(target, prediction, temperature)
        if logits.masked is not None:
            assert targets.masked is not None
            assert masks is not None
            masked = masked_loss(targets.masked, logits.masked, masks.weight, temperature)
        total = global_ + self.query_weight * query + self.masked_weight * masked
        if logits.neighbor is not None:
            assert targets.neighbor is not None
            neighbor = masked_loss(targets.neighbor, logits.neighbor, self._neighbor_weights(views), temperature)
            total = total + self.neighbor_weight * neighbor
        entropy = torch.special.entr(targets.global_).sum(dim=-1).mean() / math.log(self.num_prototypes)
        return Losses(total, global_, query, masked, neighbor, entropy)

    def _neighbor_weights(self, views: Views) -> Tensor:
        """Return the weight of each row of `Projections.patches` in the neighbor loss."""
        crops = [part for part in (views.global_crops, views.local_crops) if part is not None]
        grids = [self.student.backbone.grid_of(part.shape[3], part.shape[4]) for part in crops]
        patches, num_views = [rows * columns for rows, columns in grids], [len(part) for part in crops]
        return neighbor_weights(views.global_crops.shape[1], patches, num_views, views.global_crops)

    # -- losses with kernels --

    def _fused_losses(
        self,
        teacher: Projections,
        student: Projections,
        views: Views,
        teacher_temperature: float | Tensor,
        query_temperature: float | Tensor,
    ) -> Losses:
        """Return the losses of `_plain_losses` without storing all logits; only `total` has a gradient."""
        images, weight = views.global_crops.shape[1], self.query_weight
        # every query counts the same, however many outputs the student has for it
        share = min(self.anchored_queries, views.num_queries) / max(1, views.num_queries)
        # the temperature changes from step to step, which the teacher's logits take instead of the kernels
        scale, query_scale = KERNEL_TEMPERATURE / teacher_temperature, KERNEL_TEMPERATURE / query_temperature
        query_center = self.center("query").value * query_scale
        _, num_anchored, num_others, _ = (size // 2 for size in teacher.sizes)  # of both teacher views
        parts = [head_loss.Part(images, student.sizes[0] // images, self.center("global").value * scale, 1.0)]
        if share:
            views_each = student.sizes[1] // num_anchored
            parts.append(head_loss.Part(num_anchored, views_each, query_center, weight * share))
        views_each = student.sizes[2] // max(1, num_others)
        parts.append(head_loss.Part(num_others, views_each, query_center, weight * (1 - share)))
        patch_weights = student.rows[:0, 0] if views.masks is None else views.masks.weight
        masked_center = self.center("masked").value * scale
        parts.append(head_loss.Part(student.sizes[3], 1, masked_center, self.masked_weight, patch_weights))
        cls, anchored, query, masked = teacher.rows.split_with_sizes(teacher.sizes)
        result = head_loss.head_loss(
            student.rows,
            self.student.head.last_layer.matrix(),
            torch.cat([cls * scale, anchored * query_scale, query * query_scale, masked * scale]),
            self.teacher.head.last_layer.matrix(),
            parts,
            self.student_temperature,
            KERNEL_TEMPERATURE,
        )
        global_, *of_queries, masked = result.losses
        query = of_queries[0] * share + of_queries[1] * (1 - share) if share else of_queries[0]
        total, neighbor = result.total, torch.zeros_like(masked)
        if student.patches is not None and teacher.patches is not None:
            part_total, neighbor = self._fused_neighbor_loss(teacher.patches, student.patches, views, scale)
            total = total + part_total
        return Losses(total, global_, query, masked, neighbor, result.entropy)

    def _fused_neighbor_loss(
        self, teacher: Tensor, student: Tensor, views: Views, scale: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the neighbor loss of rows×256, weighted and not; `scale` is that of the teacher's logits."""
        prototypes, teacher_prototypes = (
            branch.heads[-1].last_layer.matrix() for branch in (self.student, self.teacher)
        )
        center, weights = self.center("neighbor").value * scale, self._neighbor_weights(views)
        part = head_loss.Part(len(student), 1, center, self.neighbor_weight, weights)
        temperatures = self.student_temperature, KERNEL_TEMPERATURE
        result = head_loss.head_loss(student, prototypes, teacher * scale, teacher_prototypes, [part], *temperatures)
        return result.total, result.losses[0]

    # -- after the step --

    def forget(self) -> None:
        """Reset gradients and the sums of the centers, as if no batch had come since the last update."""
        self.zero_grad(set_to_none=True)
        for center in self.centers.values():
            assert isinstance(center, Center)
            center.forget()

    @torch.no_grad()
    def update(self, momentum: float | Tensor, ok: Tensor, head_only: bool = False) -> None:
        """Move the teacher and the centers after a step; where `ok` is false they stay the same to the bit.

        `head_only` is for a frozen backbone: the weighted mean of two equal numbers is not always that number, so the
        teacher's backbone is left out.
        """
        keep = torch.where(ok, momentum, 1.0).to(torch.float32)
        teacher, student = (
            [distributed.local_tensor(p) for module in modules for p in module.parameters()]
            for modules in ((b.heads if head_only else [b]) for b in (self.teacher, self.student))
        )
        torch._foreach_mul_(teacher, keep)
        torch._foreach_add_(teacher, list(torch._foreach_mul(student, 1 - keep)))
        for center in self.centers.values():
            assert isinstance(center, Center)
            center.update(ok)


def _project_patches(branch: Branch, parts: Sequence[Tensor | None]) -> Tensor:
    """Return the projections of patches by the second head, of all views one after the other: views×N×D -> rows×256."""
    return branch.heads[-1].project(torch.cat([part.flatten(0, 1) for part in parts if part is not None]))
