"""kNN against votes counted by hand, and scores that do not hang on batches."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import adclr as package
from adclr.config.parsing import UserError
from adclr.data.sets.classes import open_labeled
from adclr.evals import accuracy, knn
from adclr.features.drawing import viridis
from adclr.features.reader import ImageReader, center_crop, resize
from adclr.model.vit import VisionTransformer
from adclr.weights.backbone import Weights, create_backbone

pytestmark = pytest.mark.usefixtures("one_thread")


def test_votes_are_weighted_by_similarity() -> None:
    train = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]]), dim=1)
    labels = torch.tensor([0, 1, 1, 2])
    val = torch.tensor([[1.0, 0.0]])
    one, two, four = knn.vote(train, labels, val, 3, (1, 2, 4), 0.07)
    assert one[0, 0] == two[0, 0] == 0
    votes = {0: math.exp(1 / 0.07), 1: math.exp(0.8 / 0.07) + 1, 2: math.exp(0.6 / 0.07)}
    assert four[0].tolist() == sorted(votes, key=lambda c: -votes[c])
    flat = knn.vote(train, labels, val, 3, (4,), 1e6)[0]  # all votes alike: class 1 has two
    assert flat[0, 0] == 1


def slow_knn(train: np.ndarray, labels: np.ndarray, image: np.ndarray, k: int) -> int:
    similarity = train @ image
    votes = np.zeros(labels.max() + 1)
    for i in np.argsort(-similarity)[:k]:
        votes[labels[i]] += math.exp(similarity[i] / 0.07)
    return int(votes.argmax())


def test_votes_equal_a_loop_in_float64_in_any_chunks() -> None:
    torch.manual_seed(0)
    train = torch.nn.functional.normalize(torch.randn(300, 8), dim=1)
    val = torch.nn.functional.normalize(torch.randn(50, 8), dim=1)
    labels = torch.randint(0, 5, (300,))
    for chunk in (7, 1024):
        for k, actual in zip((10, 200), knn.vote(train, labels, val, 5, (10, 200), 0.07, chunk), strict=True):
            expected = [slow_knn(train.double().numpy(), labels.numpy(), v.double().numpy(), k) for v in val]
            assert actual[:, 0].tolist() == expected


def colored(folder: Path, shuffled: bool = False) -> Path:
    """Two classes of plain images, red and blue; or labels that mean nothing."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 60), ("val", 40)):
        for i in range(count):
            kind = int(rng.integers(2))
            named = int(rng.integers(2)) if shuffled else kind
            path = folder / split / f"c{named}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            level = int(rng.integers(150, 255))
            Image.new("RGB", (20, 20), (level, 20, 20) if kind else (20, 20, level)).save(path)
    return folder


def random_weights() -> Weights:
    torch.manual_seed(0)
    vit = create_backbone("vit_tiny_patch16", input_size=32)
    return Weights(vit.eval(), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def test_separable_classes_score_100_and_meaningless_ones_by_chance(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    scores = knn.score(random_weights(), open_labeled(colored(tmp_path / "a")), knn.Settings(), cpu, show=False)
    assert scores["knn_top1"] == 100
    assert scores["num_train"] == 60
    assert set(scores) >= {"knn_top1_k10", "knn_top1_k20", "knn_top1_k60"}  # k is at most the number of images
    chance = knn.score(random_weights(), open_labeled(colored(tmp_path / "b", True)), knn.Settings(), cpu, show=False)
    assert 20 < chance["knn_top1"] < 80


@pytest.mark.parametrize(("batch_size", "workers"), [(1, 1), (7, 4), (64, 2)])
def test_scores_do_not_hang_on_batches_or_threads(tmp_path: Path, batch_size: int, workers: int) -> None:
    labeled = open_labeled(colored(tmp_path, True))
    settings = knn.Settings(batch_size=batch_size, num_workers=workers)
    actual = knn.score(random_weights(), labeled, settings, torch.device("cpu"), show=False)
    assert actual == knn.score(random_weights(), labeled, knn.Settings(), torch.device("cpu"), show=False)


def test_unreadable_images_are_left_out(tmp_path: Path) -> None:
    labeled = open_labeled(colored(tmp_path))
    (labeled.val.source.root / labeled.val.source.paths[3]).write_bytes(b"broken")
    scores = knn.score(random_weights(), labeled, knn.Settings(), torch.device("cpu"), show=False)
    assert scores["num_val"] == 39
    assert scores["knn_top1"] == 100


def test_images_are_resized_by_the_shorter_side_and_cut_in_the_middle() -> None:
    image = np.full((3, 150, 300), 255, np.uint8)
    image[:, :, :60] = image[:, :, 240:] = 0
    made = resize(image, center_crop((224, 224))(150, 300))
    assert made.shape == (3, 224, 224)
    assert (made[:, :, 5:-5] == 255).all()  # 256/150 of 180 white columns is wider than 224
    tall = resize(np.zeros((1, 500, 10), np.uint8), center_crop((32, 48))(500, 10))
    assert tall.shape == (1, 32, 48)
    photo = np.random.default_rng(0).integers(0, 256, (3, 40, 50), np.uint8)
    whole = Image.fromarray(photo.transpose(1, 2, 0)).resize((46, 37), Image.Resampling.BICUBIC)
    assert np.array_equal(
        resize(photo, center_crop((32, 32))(40, 50)), np.asarray(whole.crop((7, 2, 39, 34))).transpose(2, 0, 1)
    )


def test_the_public_call(images: Path, tmp_path: Path) -> None:
    from tiny import TINY

    run = package.pretrain(images / "train", out=tmp_path / "run", **TINY)
    scores = package.evaluate("knn", weights=run.path, data=images, k=[3])
    assert scores["knn_top1_k3"] >= 0
    with pytest.raises(ValueError, match="unknown evaluation"):
        package.evaluate("knnn", weights=run.path, data=images)


def test_each_class_its_confusions_and_the_picture(tmp_path: Path) -> None:
    data = colored(tmp_path / "data")
    for path in sorted((data / "val" / "c0").iterdir())[:5]:
        path.rename(data / "val" / "c1" / f"was_blue_{path.name}")
    labeled = open_labeled(data)
    actual = knn.score(
        random_weights(), labeled, knn.Settings(), torch.device("cpu"), show=False, prefix=tmp_path / "v1.5"
    )
    blue, red = (int((labeled.val.labels == label).sum()) for label in (0, 1))
    assert actual["confusion"] == [[blue, 0], [5, red - 5]]
    assert actual["per_class"] == {"c0": 100, "c1": pytest.approx(100 * (red - 5) / red)}
    assert actual["knn_mean_class"] == pytest.approx((100 + actual["per_class"]["c1"]) / 2)
    assert actual["knn_top1"] == actual["knn_top1_k20"] == pytest.approx(100 * 35 / 40)
    assert Image.open(tmp_path / "v1.5.png").size[0] > 900


def test_pictures_of_any_number_of_classes(tmp_path: Path) -> None:
    for count in (2, 64, 1000):
        accuracy.draw_confusion(
            tmp_path / f"{count}.png", np.eye(count, dtype=np.int64), ["a long name of a class " * 3] * count
        )
        image = np.asarray(Image.open(tmp_path / f"{count}.png"))
        assert (image == image[-12, -12]).all(axis=-1).any()  # the last of the diagonal is as bright as the first
    many = accuracy.accuracies("x", torch.zeros(3, 1, dtype=torch.int64), torch.tensor([0, 1, 1]), ["c"] * 2000)
    assert "confusion" not in many


def test_the_picture_of_confusions_explains_itself(tmp_path: Path) -> None:
    """Title, axis titles, a scale, and a number in each cell that is not empty."""
    counts = np.array([[8, 2, 0], [0, 10, 0], [1, 0, 9]])
    accuracy.draw_confusion(tmp_path / "x.png", counts, ["a", "b", "c"], "a title")
    image = np.asarray(Image.open(tmp_path / "x.png"))

    def of_share(share: float) -> np.ndarray:
        return (image == viridis(np.array(share, np.float32))).all(axis=-1)

    def inside(mask: np.ndarray) -> tuple[slice, slice]:
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        return slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)

    rows, columns = inside(of_share(0.2))  # the second cell of the first row
    side = columns.stop - columns.start
    assert not of_share(0.2)[rows, columns].all()  # the number in it
    assert of_share(0.0)[rows, columns.stop : columns.stop + side].all()  # the third is empty
    ink = image.max(axis=-1) < 120
    left, top, bottom = columns.start - side, rows.start, rows.start + 3 * side
    assert ink[:34, :200].any()  # the title
    assert ink[34:top, left : left + 3 * side].any(axis=1).sum() > 20  # names, and what they are names of
    assert ink[top:bottom, 10:34].any()  # the other axis, turned
    below = slice(bottom, image.shape[0])
    assert of_share(0.0)[below].any()
    assert of_share(1.0)[below].any()  # the scale
    numbered = tmp_path / "many.png"
    accuracy.draw_confusion(numbered, np.eye(200, dtype=np.int64), [f"class {n}" for n in range(200)])
    assert (np.asarray(Image.open(numbered))[100:800, 30:60].max(axis=-1) < 120).any()  # numbers of classes


@pytest.mark.parametrize("features", ["cls", "mean_patch", "both"])
def test_features_of_length_one(features: str) -> None:
    vit, images = random_weights().vit, torch.randn(3, 3, 32, 32)
    actual = knn.pool(vit, features)(images)
    tokens = vit(images)
    cls, patch = (torch.nn.functional.normalize(x, dim=1) for x in (tokens.cls, tokens.patches.mean(dim=1)))
    similarity = {"cls": cls @ cls.T, "mean_patch": patch @ patch.T, "both": (cls @ cls.T + patch @ patch.T) / 2}
    torch.testing.assert_close(actual @ actual.T, similarity[features])


def test_a_test_split_is_not_taken_for_a_class(tmp_path: Path) -> None:
    data = colored(tmp_path / "data")
    (data / "val").rename(data / "test")
    with pytest.raises(UserError, match=r"has train/ with folders in it and no val/; call the other split val/"):
        open_labeled(data)
    (data / "train").rename(data / "val")
    with pytest.raises(UserError, match=r"has val/ with folders in it and no train/"):
        open_labeled(data)
    # railways
    classes = data / "val"
    next(path for path in classes.iterdir()).rename(classes / "train")
    assert "train" in open_labeled(classes).classes


def test_kept_crops_give_the_same_scores_and_no_file_is_read_again(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labeled, settings, cpu = open_labeled(str(images)), knn.Settings(k=(5,)), torch.device("cpu")
    first, second = (
        Weights(VisionTransformer(32, 1, 2, 8, input_size=32).eval(), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
        for _ in range(2)
    )
    crops = knn.open_crops(first, labeled, settings, cpu, cache=True)
    assert knn.score(first, labeled, settings, cpu, show=False, crops=crops) == knn.score(
        first, labeled, settings, cpu, show=False
    )
    expected = knn.score(second, labeled, settings, cpu, show=False)
    monkeypatch.setattr(ImageReader, "batches", None)  # a read would fail
    assert knn.score(second, labeled, settings, cpu, show=False, crops=crops) == expected
