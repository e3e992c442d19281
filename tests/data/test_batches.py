"""What a step is shown depends on (seed, epoch, key) alone, not on the resume position or the number of processes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from adclr.config.settings import Settings
from adclr.data.batches import TrainingBatches
from adclr.data.decode import Decoder
from adclr.data.feed import Feed
from adclr.data.sources import ImageFolder
from adclr.model.named_tensors import Views
from adclr.system import distributed
from tiny import tiny

SETTINGS = tiny()  # 2 epochs of 4 steps of 8 images


def batches(images: Path, micro_batch: int = 8, settings: Settings = SETTINGS) -> TrainingBatches:
    feed = Feed(ImageFolder(images / "train"), 2, Decoder())
    return TrainingBatches(settings, feed, torch.device("cpu"), micro_batch)


def views_from(training: TrainingBatches, start: int) -> list[Views]:
    with closing(training.from_step(start)) as views:
        return list(views)


def same(first: Views, second: Views) -> bool:
    return all(map(torch.equal, first.tensors(), second.tensors()))


def test_a_resumed_run_is_shown_the_same_views(images: Path) -> None:
    whole = views_from(batches(images), 0)
    assert len(whole) == 8
    for start in (1, 4, 6):
        resumed = views_from(batches(images), start)
        assert len(resumed) == 8 - start
        assert all(map(same, resumed, whole[start:]))
    assert not same(*views_from(batches(images), 3)[:2])


def test_micro_batches_are_parts_of_a_step(images: Path) -> None:
    whole, parts = views_from(batches(images), 0), views_from(batches(images, 4), 0)
    assert len(parts) == 16
    for step, views in enumerate(whole):
        pair = parts[2 * step : 2 * step + 2]
        assert torch.equal(views.global_crops, torch.cat([part.global_crops for part in pair], dim=1))


def test_processes_share_the_images_of_a_step(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = views_from(batches(images), 0)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    parts = []
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        parts.append(views_from(batches(images, 4), 0))
    for views, first, second in zip(whole, *parts, strict=True):
        assert torch.equal(views.global_crops, torch.cat([first.global_crops, second.global_crops], dim=1))


def test_an_epoch_has_every_image_once_in_an_order_of_its_own(images: Path) -> None:
    training = batches(images)
    epochs = [[training.step_indices(step) for step in range(4 * epoch, 4 * epoch + 4)] for epoch in (0, 1)]
    for number, steps in enumerate(epochs):
        assert [epoch for epoch, _ in steps] == [number] * 4
        assert sorted(np.concatenate([indices for _, indices in steps]).tolist()) == list(range(32))
    assert not np.array_equal(epochs[0][0][1], epochs[1][0][1])
    keys = training.feed.source.keys[training.step_indices(5)[1]]
    assert training.step_keys(5) == [f"{key:016x}" for key in keys.tolist()]
