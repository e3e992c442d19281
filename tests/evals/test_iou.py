"""mIoU against answers worked by hand and against torchmetrics."""

from __future__ import annotations

import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from adclr.data.sets.pixels import IGNORE
from adclr.evals import iou
from adclr.evals.frames import fit_size, most_likely_class

CPU = torch.device("cpu")


def test_an_answer_worked_by_hand() -> None:
    labels = torch.tensor([[0, 0, 0, 1], [1, 1, IGNORE, IGNORE]])
    predicted = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 2]])
    confusion = iou.Confusion(4, CPU)
    confusion.add(predicted[0], labels[0])  # in parts
    confusion.add(predicted[1], labels[1])
    assert confusion.matrix().tolist() == [[2, 1, 0, 0], [1, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    actual = iou.scores("x", confusion.matrix(), ["a", "b", "c", "d"])
    assert actual["x_miou"] == pytest.approx(
        50
    )  # 2/4 and 2/4; c was said only of what is ignored, so it does not occur
    assert actual["x_aacc"] == pytest.approx(100 * 4 / 6)
    assert actual["x_macc"] == pytest.approx(100 * 2 / 3)
    assert actual["per_class"]["a"] == {"iou": 50.0, "accuracy": pytest.approx(100 * 2 / 3), "pixels": 50.0}
    assert actual["per_class"]["c"] == {"iou": None, "accuracy": None, "pixels": 0.0}


def test_a_class_that_is_only_predicted_has_an_iou_of_0_and_no_accuracy() -> None:
    confusion = iou.Confusion(3, CPU)
    confusion.add(torch.tensor([0, 2]), torch.tensor([0, 0]))
    actual = iou.scores("x", confusion.matrix(), ["a", "b", "c"])
    assert actual["x_miou"] == pytest.approx(25)  # a 1/2, c 0
    assert actual["x_macc"] == pytest.approx(50)
    assert actual["per_class"]["c"]["iou"] == 0


@pytest.mark.parametrize("num_classes", [2, 19, 150])
def test_random_predictions_score_what_torchmetrics_says(num_classes: int) -> None:
    generator = torch.Generator().manual_seed(num_classes)
    labels = torch.randint(0, num_classes, (3, 40, 50), generator=generator)
    predicted = torch.where(
        torch.rand(3, 40, 50, generator=generator) < 0.5,
        labels,
        torch.randint(0, num_classes, (3, 40, 50), generator=generator),
    )
    labels[torch.rand(3, 40, 50, generator=generator) < 0.1] = IGNORE
    labels[labels == num_classes - 1] = 0  # a class that is only predicted
    confusion = iou.Confusion(num_classes, CPU)
    for part in range(3):
        confusion.add(predicted[part], labels[part].to(torch.uint8))
    actual = iou.scores("x", confusion.matrix(), [str(c) for c in range(num_classes)])
    each = MulticlassJaccardIndex(num_classes, average=None, ignore_index=IGNORE)(predicted, labels)
    mean = MulticlassJaccardIndex(num_classes, average="macro", ignore_index=IGNORE)(predicted, labels)
    right = MulticlassAccuracy(num_classes, average="micro", ignore_index=IGNORE)(predicted, labels)
    ours = [actual["per_class"][str(c)]["iou"] for c in range(num_classes)]
    torch.testing.assert_close(torch.tensor(ours) / 100, each, rtol=0, atol=1e-6)
    assert actual["x_miou"] / 100 == pytest.approx(mean.item(), abs=1e-6)
    assert actual["x_aacc"] / 100 == pytest.approx(right.item(), abs=1e-6)


def test_scores_are_enlarged_class_by_class_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 7, 5, 6)
    whole = torch.nn.functional.interpolate(scores, size=(33, 47), mode="bilinear").argmax(dim=1)
    assert torch.equal(most_likely_class(scores, (33, 47)), whole)
    monkeypatch.setattr("adclr.evals.frames.MAX_SCORES", 2 * 33 * 47 * 3)
    assert torch.equal(most_likely_class(scores, (33, 47)), whole)


def test_images_are_resized_to_whole_units() -> None:
    assert fit_size((360, 480), 512, 16) == (512, 688)
    assert fit_size((100, 1000), 512, 16) == (208, 2048)  # not longer than four times that
    assert fit_size((3, 3), 1, 16) == (16, 16)
