"""In-context segmentation against its formula written slowly, on ideal features, and as a user runs it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import adclr as package
from adclr.data.sets.pixels import IGNORE, open_segmented
from adclr.evals import frames, incontext
from adclr.evals.incontext import PatchMemory, patch_labels, predict_labels, sample_patches
from adclr.features import reader
from dense_scenes import backbone, evaluated, saved, segmented
from tiny import TINY

CPU = torch.device("cpu")


def slow(memory: PatchMemory, query: torch.Tensor, k: int, temperature: float) -> list[float]:
    similarity = [float(key.double() @ query.double()) for key in memory.keys]
    nearest = sorted(range(len(similarity)), key=lambda i: -similarity[i])[:k]
    weights = [math.exp(similarity[i] / temperature) for i in nearest]
    total = sum(weights)
    columns = range(memory.labels.shape[1])
    return [sum(w * float(memory.labels[i, c]) for w, i in zip(weights, nearest, strict=True)) / total for c in columns]


def test_the_nearest_are_read_by_a_softmax_in_any_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    keys = torch.nn.functional.normalize(torch.randn(300, 8), dim=1)
    memory = PatchMemory(keys, torch.rand(300, 4))
    queries = torch.nn.functional.normalize(torch.randn(20, 8), dim=1)
    expected = torch.tensor([slow(memory, query, 30, 0.05) for query in queries])
    whole = predict_labels(memory, queries, 30, 0.05)
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=0)
    monkeypatch.setattr(incontext, "MAX_SIMILARITIES", 1200)
    monkeypatch.setattr(incontext, "MAX_KEYS", 64)
    torch.testing.assert_close(predict_labels(memory, queries, 30, 0.05), whole, atol=1e-6, rtol=0)
    few = predict_labels(PatchMemory(keys[:5], memory.labels[:5]), queries, 30, 1e6)  # all there are, and all alike
    torch.testing.assert_close(few, memory.labels[:5].mean(dim=0).expand(20, -1), atol=1e-4, rtol=0)


def test_labels_of_patches_are_counted() -> None:
    rng = np.random.default_rng(0)
    labels = rng.choice([0, 1, 2, IGNORE], (2, 8, 12)).astype(np.uint8)
    counts = patch_labels(torch.from_numpy(labels), (2, 3), 4, 3)
    for image in range(2):
        for row in range(2):
            for column in range(3):
                cell = labels[image, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
                expected = [int((cell == c).sum()) for c in range(3)]
                assert counts[image, row * 3 + column].tolist() == expected


def test_rare_classes_come_more_often_and_unlabeled_patches_never() -> None:
    counts = torch.zeros(100, 3)
    counts[:80, 0] = 5  # common
    counts[80:90, 1] = 5  # rare; the last ten have no label
    picks = torch.zeros(100)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        chosen = sample_patches(counts, 20, torch.rand(100, generator=generator))
        assert len(chosen) == 20
        assert (chosen.diff() > 0).all()
        picks[chosen] += 1
    assert picks[90:].sum() == 0
    assert picks[80:90].mean() > 2.5 * picks[:80].mean()
    assert len(sample_patches(counts, 1000, torch.rand(100))) == 90


def test_ideal_features_score_100() -> None:
    """Each patch of one class, and features that tell the class: the memory says what is there."""
    torch.manual_seed(0)
    grid, num_classes = (6, 7), 5
    classes = torch.randint(0, num_classes, (3, *grid))
    labels = classes.repeat_interleave(4, 1).repeat_interleave(4, 2).to(torch.uint8)
    features = torch.eye(num_classes)[classes.flatten(1)].flatten(0, 1)
    shares = patch_labels(labels, grid, 4, num_classes).flatten(0, 1) / 16
    said = predict_labels(PatchMemory(features, shares), features, 30, 0.02)
    assert torch.equal(said.argmax(dim=1), classes.flatten())
    confusion = incontext.iou.Confusion(num_classes, CPU)
    confusion.add(said.argmax(dim=1), classes.flatten())
    assert incontext.iou.scores("x", confusion.matrix(), list("abcde"))["x_miou"] == 100


def score(data: Path, **changes: Any) -> dict[str, Any]:
    settings = incontext.Settings(**({"size": 32, "memory_size": 400, "k": 5, "num_workers": 2} | changes))
    return incontext.score(backbone(), open_segmented(data), settings, CPU, show=False)


def test_scores_do_not_hang_on_the_batch(tmp_path: Path) -> None:
    data = segmented(tmp_path, 6, 4, 40)
    Image.new("RGB", (60, 40), "red").save(data / "images" / "val" / "9.png")  # of another size
    Image.new("L", (60, 40)).save(data / "labels" / "val" / "9.png")
    one, other = score(data, batch_size=1, num_workers=1), score(data, batch_size=4)
    assert one["num_memory"] == 6 * 64  # 66 would be allowed, but an image has 8×8 patches
    for name, value in one.items():
        if name != "per_class":
            assert other[name] == pytest.approx(value, abs=0.05), name  # a pixel more or less at a tie


def test_images_of_many_sizes_do_not_all_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 images of 40 sizes no two make a batch; those that wait stay within what may be held."""

    class Sizes:
        root, paths, num_ahead = Path("sizes"), [str(n) for n in range(40)], 0

        def __len__(self) -> int:
            return 40

        def read(self, index: int) -> bytes:
            return bytes(100 + index)

    read: list[int] = []

    def decoder(data: bytes) -> Any:
        read.append(len(data))
        return np.zeros((4, 1, len(data)), np.uint8)

    monkeypatch.setattr(reader, "MAX_WAITING_BYTES", 1000)
    images = reader.ImageReader(Sizes(), decoder, None, CPU, 1)  # type: ignore[arg-type]
    batches = frames.read_frames(images, 8, "val", show=False)
    first = next(batches)
    assert len(read) < 30
    indices = [index for actual in (first, *batches) for index in actual.indices]
    assert sorted(indices) == list(range(40))


def test_the_images_themselves_are_recognized(tmp_path: Path) -> None:
    """Val scenes that are in the memory: their own patches are their nearest, and say what they are."""
    data = segmented(tmp_path, 4, 4, 32, same=True)
    actual = score(data, memory_size=10**6, k=1)
    assert actual["incontext_aacc"] > 90  # what is lost is at edges, which run through patches
    assert actual["num_memory"] == 4 * 64
    augmented = score(data, memory_size=10**6, augment_epochs=2, batch_size=3)
    assert augmented["num_memory"] > 300
    assert augmented["incontext_miou"] > 20


def test_unreadable_images_are_left_out_and_too_many_refused(tmp_path: Path) -> None:
    data = segmented(tmp_path, 4, 4, 32)
    (data / "images" / "val" / "5.png").write_bytes(b"broken")
    actual = score(data, max_unreadable=0.5)
    assert (actual["num_val"], actual["num_unreadable"]) == (3, 1)
    with pytest.raises(ValueError, match=r"1 of 4 images of .* cannot be read"):
        score(data)


def test_what_another_process_could_not_read_is_counted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of images drawn anew that are not kept, a process meets only its own; here the other one met numbers 0 and 1."""
    data = segmented(tmp_path, 4, 4, 32)
    (data / "images" / "train" / "0.png").write_bytes(b"broken")
    monkeypatch.setattr("adclr.data.feed.distributed.gather", lambda own: torch.cat([own, torch.tensor([0, 1])]))
    actual = score(data, max_unreadable=0.5, augment_epochs=1)
    assert (actual["num_train"], actual["num_unreadable"]) == (2, 2)


def test_as_a_user_runs_it_in_one_process_and_in_two(tmp_path: Path) -> None:
    data, weights = segmented(tmp_path / "data", 5, 4, 32), saved(tmp_path / "weights")
    settings = {"size": 32, "memory_size": 300, "k": 5, "pictures": 2}
    one = evaluated("incontext", 1, weights, data, tmp_path / "one.json", **settings)
    two = evaluated("incontext", 2, weights, data, tmp_path / "two.json", **settings)
    assert one["per_class"].keys() == two["per_class"].keys()
    for name in ("incontext_miou", "incontext_aacc", "num_memory", "num_val"):
        assert one[name] == pytest.approx(two[name], abs=0.05)
    with Image.open(tmp_path / "one.png") as picture, Image.open(tmp_path / "two.png") as of_two:
        assert picture.width > 3 * 240
        first, second = (np.asarray(one, np.float64) for one in (picture, of_two))
        assert first.shape == second.shape  # as many images, from both processes' parts
        assert np.abs(first - second).mean() < 2


def test_as_a_probe_during_pretraining(images: Path, tmp_path: Path) -> None:
    data = segmented(tmp_path / "data", 4, 2, 32)
    run = package.pretrain(images / "train", out=tmp_path / "run", **(TINY | {"probe.pixels": data, "train.epochs": 1}))
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "incontext_miou" in row] == [0, 4]
    assert all(0 < row["incontext_miou"] < 100 for row in rows if "incontext_miou" in row)
    assert len(json.loads((run.path / "results.json").read_text())["probes"]) == 2
