"""Segmentation: heads that overfit, windows that add up to the whole, protocols, resuming."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from adclr.config.parsing import UserError
from adclr.data.sets import scenes
from adclr.data.sets.pixels import IGNORE, open_segmented
from adclr.evals import iou, segmentation
from adclr.evals.decoders import Fpn, Linear, UperNet
from adclr.evals.pyramid import BatchNorm, Pyramid, blocks_at
from adclr.evals.segmentation import (
    Segmenter,
    Settings,
    predict,
    predict_sliding,
    predict_whole,
    protocol_of,
    window_starts,
)
from adclr.evals.trainer import Trainer
from dense_scenes import CLASSES, backbone, evaluated, refused, saved, segmented

CPU = torch.device("cpu")
PLAIN: dict[str, Any] = {
    "scales": (1.0, 1.0),
    "colors": False,
    "frozen": False,
    "drop_path": 0.0,
    "layer_decay": 1.0,
    "num_workers": 1,
    "inference": "whole",
    "warmup_steps": 10,
    "width": 32,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors are so small here that a second thread does nothing but wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def overfitted(folder: Path, count: int, patch: int, pixels: int, **settings: Any) -> float:
    """mIoU on the scenes it was trained on."""
    data, size = segmented(folder, count, count, pixels, same=True), settings["size"]
    weights = backbone(settings.pop("dim", 32), 2, patch, size)
    actual = segmentation.score(weights, open_segmented(data), Settings(**(PLAIN | settings)), CPU)
    miou: float = actual["segmentation_miou"]
    return miou


def test_a_linear_head_on_an_ideal_feature_map_scores_100() -> None:
    """Features that tell the class of every pixel, in directions of their own and with some noise."""
    torch.manual_seed(0)
    labels = torch.stack([torch.from_numpy(scenes.scene(5, i, 32).labels()).long() for i in range(8)])
    directions = torch.randn(11, 16)
    maps = (directions[labels] + 0.1 * torch.randn(*labels.shape, 16)).permute(0, 3, 1, 2)
    head = Linear(16, 11)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(head([maps])[0], labels).backward()
        optimizer.step()
    head.eval()
    confusion = iou.Confusion(11, CPU)
    confusion.add(head([maps])[0].argmax(dim=1), labels)
    assert iou.scores("x", confusion.matrix(), CLASSES)["x_miou"] == 100


@pytest.mark.parametrize(
    ("head", "patch", "pixels", "settings"),
    [
        ("linear", 1, 16, {"size": 16, "steps": 80, "lr": 5e-3}),
        ("fpn", 1, 16, {"size": 16, "steps": 100, "lr": 1e-2}),
        ("upernet", 4, 24, {"size": 24, "steps": 130, "lr": 5e-3}),
    ],
)
def test_each_head_overfits_four_scenes(
    tmp_path: Path, head: str, patch: int, pixels: int, settings: dict[str, Any]
) -> None:
    assert overfitted(tmp_path, 4, patch, pixels, head=head, batch_size=4, **settings) >= 95


@pytest.mark.full
@pytest.mark.parametrize(("head", "rescaled"), [("linear", False), ("fpn", False), ("fpn", True), ("upernet", True)])
def test_each_head_overfits_eight_scenes(tmp_path: Path, head: str, rescaled: bool) -> None:
    settings = {"rescaled": rescaled, "size": 64, "steps": 300, "lr": 3e-3, "dim": 64, "batch_size": 8}
    assert overfitted(tmp_path, 8, 4 if rescaled else 2, 32, head=head, **settings) >= 95


def test_windows_cover_a_length_and_end_where_it_ends() -> None:
    assert window_starts(10, 10, 4) == window_starts(7, 10, 4) == [0]
    assert window_starts(16, 10, 4) == [0, 4, 6]
    assert window_starts(18, 10, 4) == [0, 4, 8]
    for length in range(5, 40):
        covered = {start + i for start in window_starts(length, 5, 3) for i in range(5)}
        assert covered == set(range(length))


def test_sliding_is_the_mean_of_its_windows_and_one_window_is_the_whole() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(3, 4, 4, 4)
    images = torch.rand(2, 3, 16, 24)
    torch.testing.assert_close(predict_sliding(layer, images, 24, 16), predict_whole(layer, images))
    sums, counts = torch.zeros(2, 4, 16, 24), torch.zeros(16, 24)
    for top in (0, 4, 8):
        for left in (0, 4, 8, 12, 16):
            piece = predict_whole(layer, images[..., top : top + 8, left : left + 8])
            sums[..., top : top + 8, left : left + 8] += piece
            counts[top : top + 8, left : left + 8] += 1
    for at_once in (1, 100):
        torch.testing.assert_close(predict_sliding(layer, images, 8, 4, at_once), sums / counts)


def test_a_trained_segmenter_sees_the_same_through_one_window() -> None:
    settings = Settings(head="upernet", size=32, width=16)
    weights = backbone(32, 2, 4, 16)
    model = Segmenter(weights, settings, protocol_of(settings), 5).eval()
    images = torch.randint(0, 256, (2, 3, 30, 30), dtype=torch.uint8)
    with torch.no_grad():
        results = [predict(lambda x: model.logits(x)[0], images, 32, 8, window) for window in (None, (32, 21))]
        mirrored = predict(lambda x: model.logits(x)[0], images, 32, 8, None, (1.0,), mirrored=True)
        flipped = predict(lambda x: model.logits(x)[0], images.flip(-1), 32, 8, None, (1.0,), mirrored=True)
        several = predict(lambda x: model.logits(x)[0], images, 32, 8, None, (0.5, 1.0, 1.5))
    assert torch.equal(results[0], results[1])
    assert results[0].shape == several.shape == (2, 30, 30)
    assert (mirrored == flipped.flip(-1)).float().mean() > 0.99  # an image and its mirror image are one


def test_maps_are_at_the_strides_of_a_pyramid() -> None:
    assert blocks_at(12, [4, 6, 8, 12]) == [3, 5, 7, 11]
    assert blocks_at(24, [3, 6, 9, 12]) == [5, 11, 17, 23]
    assert blocks_at(2, [4, 6, 8, 12]) == [0, 0, 0, 1]
    vit = backbone(32, 4, 4, 16, num_registers=2).vit
    images = torch.randn(2, 3, 32, 48)
    maps = Pyramid(vit, [0, 1, 2, 3], True, True, False)(images)
    assert [tuple(x.shape) for x in maps] == [(2, 32, 32, 48), (2, 32, 16, 24), (2, 32, 8, 12), (2, 32, 4, 6)]
    flat = Pyramid(vit, [1, 3], True, False, True)(images)
    torch.testing.assert_close(flat[1].flatten(2).transpose(1, 2), vit(images).patches)
    assert not flat[0].requires_grad
    assert Fpn([32] * 4, 7, 16)(maps)[0].shape == (2, 7, 32, 48)
    head = UperNet([32] * 4, 7, 16, 8)
    logits, auxiliary = head(maps)
    assert logits.shape == (2, 7, 32, 48)
    assert auxiliary is not None
    assert auxiliary.shape == (2, 7, 8, 12)
    assert head.eval()(maps)[1] is None


def test_decoders_are_as_wide_and_deep_as_the_sources() -> None:
    """iBOT's UperNet is as wide as its ViT, with an auxiliary head of 256; SelfPatch's Semantic FPN has heads of 1, 1,
    2 and 3 convolutions, whatever the strides of its maps."""
    weights = backbone(64, 4, 4, 16)

    def decoder(**settings: Any) -> torch.nn.Module:
        made = Settings(**settings)
        return Segmenter(weights, made, protocol_of(made), 7).decoder

    upernet = decoder(head="upernet")
    assert isinstance(upernet, UperNet)
    assert (upernet.classify.in_channels, upernet.auxiliary[-1].in_channels) == (64, 256)
    narrow = decoder(head="upernet", width=16)
    assert isinstance(narrow, UperNet)
    assert (narrow.classify.in_channels, narrow.auxiliary[-1].in_channels) == (16, 8)
    for rescaled in (False, True):
        fpn = decoder(head="fpn", rescaled=rescaled)
        assert isinstance(fpn, Fpn)
        convolutions = [sum(isinstance(m, torch.nn.Conv2d) for m in head.modules()) for head in fpn.heads]
        assert (convolutions, fpn.classify.in_channels) == ([1, 1, 2, 3], 128)
    same = Fpn([8] * 4, 7, 4)([torch.randn(2, 8, 5, 6) for _ in range(4)])[0]
    assert same.shape == (2, 7, 5, 6)


def test_protocols_are_the_sources_and_settings_come_first() -> None:
    upernet = protocol_of(Settings(head="upernet"))
    assert (upernet.steps, upernet.lr, upernet.layer_decay, upernet.sliding) == (160_000, 3e-5, 0.9, True)
    assert protocol_of(Settings(head="upernet", from_scratch=True)).layer_decay == 1
    fpn = protocol_of(Settings(head="fpn", steps=500, lr=1e-3, frozen=True))
    assert (fpn.steps, fpn.lr, fpn.warmup_steps, fpn.drop_path, fpn.sliding) == (500, 1e-3, 50, 0.0, False)
    assert protocol_of(Settings()).frozen


def test_layers_are_slower_the_deeper_they_lie(tmp_path: Path) -> None:
    settings = Settings(head="fpn", size=16, layer_decay=0.5, width=16)
    weights, data = backbone(), open_segmented(segmented(tmp_path, 2, 1, 16))
    protocol = protocol_of(settings)
    model = Segmenter(weights, settings, protocol, 11)
    made = segmentation.assemble(weights, data, settings, protocol, model, CPU, None)
    scale = {id(p): group["scale"] for group in made.optimizer.param_groups for p in group["params"]}
    named = dict(model.named_parameters())
    assert scale[id(named["pyramid.vit.pos_embed"])] == 0.125
    assert scale[id(named["pyramid.vit.blocks.1.attn.qkv.weight"])] == 0.5
    assert scale[id(named["decoder.classify.weight"])] == 1
    assert len(scale) == len(named)


def test_ignored_pixels_have_no_gradient_but_count_in_the_mean() -> None:
    logits = torch.randn(1, 3, 4, 4, requires_grad=True)
    labels = torch.zeros(1, 4, 4, dtype=torch.int64)
    labels[0, :2] = IGNORE
    loss = segmentation._loss(logits, labels)
    loss.backward()
    expected = F.cross_entropy(logits[..., 2:, :], labels[:, 2:]) / 2
    torch.testing.assert_close(loss, expected)
    assert logits.grad is not None
    assert (logits.grad[..., :2, :] == 0).all()


def test_batch_norm_of_one_process_is_torchs() -> None:
    torch.manual_seed(0)
    ours, theirs, x = BatchNorm(4), torch.nn.BatchNorm2d(4), torch.randn(3, 4, 5, 5)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_torchs_batch_norm_for_gpus_takes_over_parameters_and_state() -> None:
    """Several processes on GPUs train with `nn.SyncBatchNorm`; the optimizer and the state keep their tensors."""
    settings = Settings(head="upernet", size=32, width=16)
    model = Segmenter(backbone(32, 2, 4, 16), settings, protocol_of(settings), 5)
    parameters, state = dict(model.named_parameters()), model.state_dict()
    converted = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert not any(isinstance(module, BatchNorm) for module in model.modules())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == {
        name: value.data_ptr() for name, value in state.items()
    }


def test_training_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_segmented(segmented(tmp_path / "data", 5, 2, 16))
    settings = Settings(**(PLAIN | {"head": "upernet", "size": 16, "steps": 6, "batch_size": 3, "width": 8}))

    def trained(prefix: Path) -> tuple[dict[str, Any], bytes]:
        actual = segmentation.score(backbone(), data, settings, CPU, prefix)
        return actual, (prefix / "model.safetensors").read_bytes()

    straight, model = trained(tmp_path / "straight")
    step = Trainer._step
    monkeypatch.setattr(Trainer, "_step", lambda *given: 1 / 0 if given[3] == 4 else step(*given))
    monkeypatch.setattr("adclr.evals.trainer.time.monotonic", iter(range(0, 10**9, 1000)).__next__)  # saves every step
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path / "resumed")
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "resumed" / "checkpoints").glob("step_*")] == ["step_4"]
    state = json.loads((tmp_path / "resumed" / "checkpoints" / "step_4" / "state.json").read_text())
    assert "colours" in state["identity"]["settings"]  # by its name in version 0.1, whose trainings are resumed
    changed = settings.model_copy(update={"lr": 1.0})
    with pytest.raises(UserError, match="holds a training of other weights, images or settings"):
        segmentation.score(backbone(), data, changed, CPU, tmp_path / "resumed")
    again, same = trained(tmp_path / "resumed")
    assert again == straight
    assert same == model
    assert not (tmp_path / "resumed" / "checkpoints").exists()
    rows = [json.loads(line) for line in (tmp_path / "resumed" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [6]
    assert json.loads((tmp_path / "resumed" / "model.json").read_text())["classes"] == CLASSES


def test_training_ends_when_its_time_is_up(tmp_path: Path) -> None:
    data = open_segmented(segmented(tmp_path / "data", 4, 1, 16))
    settings = Settings(**(PLAIN | {"size": 16, "steps": 10**6, "batch_size": 2, "minutes": 0.02}))
    actual = segmentation.score(backbone(), data, settings, CPU)
    assert 1 <= actual["num_steps"] < 1000


def test_numbers_that_go_wrong_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_segmented(segmented(tmp_path / "data", 4, 1, 16))
    monkeypatch.setattr(segmentation, "_loss", lambda logits, _: logits.sum() * float("nan"))
    settings = Settings(**(PLAIN | {"size": 16, "steps": 40, "batch_size": 2}))
    with pytest.raises(UserError, match=r"the loss is not finite at step 20; set a lower lr"):
        segmentation.score(backbone(), data, settings, CPU)
    with pytest.raises(UserError, match="size=18 is not divisible by 4; set size=20"):
        segmentation.score(backbone(), data, settings.model_copy(update={"size": 18}), CPU)


def test_as_a_user_runs_it_in_one_process_and_in_two(tmp_path: Path) -> None:
    """The linear head draws nothing in its network: two processes see and learn what one does."""
    data, weights = segmented(tmp_path / "data", 6, 4, 16), saved(tmp_path / "weights")
    settings = {"size": 16, "steps": 12, "batch_size": 4, "lr": 0.01, "frozen": False, "warmup_steps": 0}
    one = evaluated("segmentation", 1, weights, data, tmp_path / "one.json", test_batch_size=1, **settings)
    two = evaluated("segmentation", 2, weights, data, tmp_path / "two.json", test_batch_size=3, **settings)
    for name in ("segmentation_miou", "segmentation_aacc", "num_steps", "num_val"):
        assert one[name] == pytest.approx(two[name], abs=0.5), name
    losses = [json.loads((tmp_path / n / "metrics.jsonl").read_text())["loss"] for n in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert (tmp_path / "one.png").exists()


def test_settings_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, weights = segmented(tmp_path / "data", 2, 1, 16), saved(tmp_path / "weights")
    words = ("evaluate", "segmentation", "--weights", weights, "--data", data, "size=16")
    assert "the linear head reads one map" in refused(capsys, *words, "rescaled=true")
    assert "stride=17 would leave pixels between windows of 16" in refused(capsys, *words, "stride=17")
    assert "scales=[2.0, 0.5] are not in order" in refused(capsys, *words, "scales=[2.0,0.5]")
    assert "no statistics for batch norm" in refused(capsys, *words, "head=upernet", "batch_size=1")
    assert "test_scales=[] is not possible" in refused(capsys, *words, "test_scales=[]")
    assert not (weights / "evals").exists()
    Image.fromarray(np.zeros((16, 12), np.uint8)).save(data / "labels" / "val" / "2.png")
    assert "2.png is 12x16 pixels where its image is 16x16" in refused(capsys, *words)
