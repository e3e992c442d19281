"""The batches of a pretraining, from top to bottom: order -> decode -> plan -> render -> prefetch.

order     which images a step is shown is a function of (seed, epoch, key)      here, `key_order.epoch_pieces`
decode    threads read and decode these images, or take them from the cache     `feed.Feed`
plan      boxes, jitter and masks of their crops, numbers only                  `view_plan.plan_batch`
render    the crops are cut out, resized and altered on the training device     `augment.render`
prefetch  on a GPU all this is done while the step before runs                  `feed.Prefetcher`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from adclr.config.settings import Settings
from adclr.data.augment import render
from adclr.data.feed import Batch, Feed, Prefetcher
from adclr.data.key_order import KeyOrder, epoch_pieces
from adclr.data.random_draws import combine
from adclr.data.view_plan import BatchPlan, plan_batch
from adclr.model.named_tensors import Views
from adclr.system import distributed

Order = Iterable[tuple[int, NDArray[np.int64]]]  # epoch and indices of the images of each micro-batch


class TrainingBatches:
    """What each step of a pretraining is shown; steps are counted from 0."""

    def __init__(self, settings: Settings, feed: Feed, device: torch.device, micro_batch: int) -> None:
        self.settings, self.feed, self.device, self.micro_batch = settings, feed, device, micro_batch
        self.batch_size = settings.train.batch_size
        self.local_batch = self.batch_size // distributed.world_size()  # images of a step in this process
        self.steps_per_epoch = len(feed.source) // self.batch_size
        self._shuffled: tuple[int, KeyOrder] | None = None  # the last epoch and its order

    def from_step(self, start: int) -> Prefetcher[Views]:
        """Return the views of every micro-batch of this process from a step on; close the iterator in the end."""
        return self.prefetch(self._micro_batches(start))

    def prefetch(self, order: Order) -> Prefetcher[Views]:
        """Return the views of the micro-batches of an order; close the iterator in the end."""
        batches = self.feed.batches(order, partial(plan_batch, self.settings))  # decoded, packed and planned by threads
        return Prefetcher(batches, self._render, self.device)  # by one more thread on a GPU

    def _render(self, batch: Batch[BatchPlan]) -> Views:
        data = self.settings.data
        return render(batch.packed.to(self.device), batch.plan, data.mean, data.std)

    def _micro_batches(self, start: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the epoch and the indices of every micro-batch of this process, from a step on."""
        for step in range(start, self.settings.train.epochs * self.steps_per_epoch):
            epoch, indices = self.step_indices(step)
            local = indices[distributed.rank() * self.local_batch :][: self.local_batch]
            for first in range(0, self.local_batch, self.micro_batch):
                yield epoch, local[first : first + self.micro_batch]

    def step_indices(self, step: int) -> tuple[int, NDArray[np.int64]]:
        """Return the epoch of a step and the indices of its images, over all processes."""
        epoch, position = divmod(step, self.steps_per_epoch)
        shuffled = self._shuffled  # one tuple, since the thread that makes batches asks too
        if shuffled is None or shuffled[0] != epoch:
            shuffled = epoch, epoch_pieces(self.settings.train.seed, epoch, self.feed.source.keys)
            self._shuffled = shuffled
        return epoch, shuffled[1].select(position * self.batch_size, (position + 1) * self.batch_size)

    def step_keys(self, step: int) -> list[str]:
        """Return the keys of the images of a step, as hexadecimal digits."""
        _, indices = self.step_indices(step)
        return [f"{key:016x}" for key in self.feed.source.keys[indices]]

    def step_views(self, views: Iterator[Views], step: int) -> Iterator[Views]:
        """Yield the views of each micro-batch of a step, and seed torch's generator before each.

        Only drop path draws from that generator; a resumed step draws the same because it is seeded here.
        """
        for micro in range(self.local_batch // self.micro_batch):
            micro_batch = next(views)
            torch.manual_seed(drop_path_seed(self.settings, step, micro))
            yield micro_batch


def drop_path_seed(settings: Settings, step: int, micro: int) -> int:
    """Return the seed of drop path in a micro-batch of a step in this process."""
    return combine(settings.train.seed, step, distributed.rank(), micro) % 2**63
