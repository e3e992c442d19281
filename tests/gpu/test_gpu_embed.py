"""Features on a GPU: Pillow's pixels by kernels, the CPU's features, and a backbone that waits in a recorded step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import adclr as package
from adclr.data.augment import frame_kernels
from adclr.data.decode import Decoder
from adclr.data.packed import pack
from adclr.data.sources import ImageFolder
from adclr.features import reader
from adclr.features.reader import ImageReader, center_crop, whole_image
from adclr.weights.backbone import architecture, save_backbone
from on_gpu import CUDA, write_scenes
from test_reader import picture
from tiny import TINY, tiny

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("framing", [center_crop((224, 224)), whole_image(448, 14, 2048), whole_image(None, 16, 2048)])
def test_photographs_of_real_sizes_are_pillows(framing: reader.Framing) -> None:
    made = [
        picture(*size, seed) for seed, size in enumerate([(500, 375), (333, 500), (1200, 1600), (64, 80), (40, 3000)])
    ]
    frames = [framing(*image.shape[1:]) for image in made]
    sizes = np.array([3 * frame.height * frame.width for frame in frames])
    out = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=CUDA)
    places = np.cumsum(sizes) - sizes
    frame_kernels.resize(pack(made).to(CUDA), np.array(frames), places, out)
    for image, frame, place, size in zip(made, frames, places, sizes, strict=True):
        actual = out[place : place + size].cpu().view(3, frame.height, frame.width).numpy().astype(int)
        difference = np.abs(actual - reader.resize(image, frame))
        assert difference.max() <= 1
        assert (difference > 0).mean() < 5e-3


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """JPEGs that the GPU decodes and PNGs that the CPU does, of several sizes."""
    (tmp_path / "photos").mkdir()
    for number in range(40):
        height, width = [(300, 400), (400, 300), (224, 224), (90, 700)][number % 4]
        image = Image.fromarray(picture(height, width, number).transpose(1, 2, 0))
        name = f"{number:02d}.{'png' if number % 5 == 0 else 'jpg'}"
        # colors at full resolution, of which the two decoders make the same pixels but for rounding
        image.save(tmp_path / "photos" / name, **({} if name.endswith("png") else {"quality": 95, "subsampling": 0}))
    (tmp_path / "photos" / "17.jpg").write_bytes(b"broken")
    return tmp_path / "photos"


def test_images_come_as_on_the_cpu(photos: Path) -> None:
    source, framing = ImageFolder(photos), whole_image(96, 16, 512)
    device = torch.device("cuda", 0)
    seen: dict[int, np.ndarray] = {}
    unreadable: set[str] = set()
    for batch in ImageReader(source, Decoder(), framing, device, gpu_decoding=True).batches(
        [np.arange(0, 16), np.arange(16, 40)]
    ):
        unreadable |= {source.paths[index] for index in batch.unreadable}
        for group in batch.groups:
            seen |= dict(zip(group.indices.tolist(), group.pixels.cpu().numpy(), strict=True))
    assert unreadable == {"17.jpg"}
    assert len(seen) == 39
    for index, pixels in seen.items():
        image = Decoder()(source.read(index))
        difference = np.abs(pixels.astype(int) - reader.resize(image, framing(*image.shape[1:])))
        if source.paths[index].endswith(".png"):
            assert difference.max() == 0
        assert difference.mean() < 1


def vectors(path: Path) -> np.ndarray:
    column = pq.read_table(path)["vector"].combine_chunks()
    return column.values.to_numpy(zero_copy_only=False).reshape(len(column), -1)


def test_features_are_the_cpus_whatever_the_batch(photos: Path, tmp_path: Path) -> None:
    settings = tiny(model__dim=192, model__num_heads=3, model__patch_size=16, global_size=64, local_size=32)
    torch.manual_seed(0)
    save_backbone(tmp_path / "w", architecture(settings).build().state_dict(), settings)
    for path in photos.glob("*.jpg"):
        path.unlink()  # which the two decoders round otherwise
    results = {}
    for name, changes in {
        "cpu": {"device": "cpu"},
        "float32": {"precision": "float32"},
        "bfloat16": {},
        "singly": {"batch_size": 1},
    }.items():
        package.embed(tmp_path / "w" / "backbone.safetensors", photos, tmp_path / f"{name}.parquet", **changes)
        rows = vectors(tmp_path / f"{name}.parquet")
        results[name] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(results["float32"], results["cpu"], atol=1e-3)
    assert (results["bfloat16"] * results["cpu"]).sum(axis=1).min() > 0.999
    assert (results["bfloat16"] * results["singly"]).sum(axis=1).min() > 0.9999


def test_patch_maps_of_all_sizes_in_one_pass(photos: Path, tmp_path: Path) -> None:
    settings = tiny(model__dim=64, model__num_heads=1, model__patch_size=16, global_size=64, local_size=32)
    save_backbone(tmp_path / "w", architecture(settings).build().state_dict(), settings)
    about = package.embed(tmp_path / "w" / "backbone.safetensors", photos, tmp_path / "maps", dense=True, size=None)
    assert (about["rows"], about["unreadable"]) == (39, 1)
    shapes = {tensor.shape for tensor in load_file(tmp_path / "maps" / "part-000000.safetensors").values()}
    assert shapes == {(19, 25, 64), (25, 19, 64), (14, 14, 64), (6, 44, 64)}


def test_a_backbone_waits_in_a_recorded_step(tmp_path: Path) -> None:
    """Compiled and recorded, as a user runs it: two recordings, one with the backbone still and one without."""
    scenes = write_scenes(tmp_path / "scenes")
    settings: dict[str, Any] = TINY | {"train.device": "cuda"}
    first = package.pretrain(scenes / "train", out=tmp_path / "first", **settings)
    steps = {"checkpoint_every_steps": 1, "keep_checkpoints": 99, "freeze_backbone_epochs": 1}
    second = package.pretrain(scenes / "train", out=tmp_path / "second", init=first.path, **settings, **steps)
    initial = load_file(first.path / "backbone.safetensors")
    for step, still in ((1, True), (8, True), (9, False), (16, False)):
        for part in ("student", "teacher"):
            state = load_file(second.checkpoints / f"step_{step}" / f"{part}.safetensors")
            same = [torch.equal(state[f"backbone.{name}"], tensor) for name, tensor in initial.items()]
            assert all(same) if still else not any(same), (part, step)
    rows = [row for row in second.rows("metrics.jsonl") if "drift_cosine" in row]
    assert rows[0]["drift_cosine"] == pytest.approx(1)
    assert all(row["loss"] is not None for row in second.rows("metrics.jsonl") if "loss" in row)
