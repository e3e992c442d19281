"""Exported weights, read by timm, transformers, onnxruntime and ourselves, give our outputs; or nothing is written."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import adclr as package
from adclr.config.parsing import UserError
from adclr.features import reader
from adclr.model.positions import PositionResampling
from adclr.model.vit import VisionTransformer
from adclr.weights import export as room
from adclr.weights.backbone import Architecture, Description, architecture_of, load_weights, write_backbone
from adclr.weights.export import export
from adclr.weights.export.onnx import resampling
from foreign import backbone, state_of
from test_cli import refused
from tiny import TINY, Adclr, words

SIZES = ((32, 32), (48, 24), (16, 72))
KINDS: dict[str, dict[str, Any]] = {
    "plain ViT": {},
    "registers and LayerScale": {"num_registers": 2, "layer_scale": 0.4},
    "one channel, odd norms": {"num_channels": 1, "norm_eps": 1e-3},
}


def kept(folder: Path, **options: Any) -> tuple[VisionTransformer, Path]:
    vit = backbone(**options)
    folder.mkdir(parents=True)
    gray = (0.5,) * vit.num_channels
    write_backbone(folder, state_of(vit), Description(architecture=architecture_of(vit), mean=gray, std=gray))
    return vit, folder


@torch.no_grad()
def agree(vit: VisionTransformer, theirs: Any, sizes: tuple[tuple[int, int], ...] = SIZES) -> None:
    for size in sizes:
        images = torch.randn(3, vit.num_channels, *size, generator=torch.Generator().manual_seed(2))
        tokens, (cls, patches) = vit(images), theirs(images)
        torch.testing.assert_close(cls, tokens.cls, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(patches, tokens.patches, rtol=1e-4, atol=1e-4)


def split(features: Tensor, vit: VisionTransformer) -> tuple[Tensor, Tensor]:
    return features[:, 0], features[:, vit.num_prefix :]


def run_card(folder: Path, images: Tensor, **names: Any) -> Tensor:
    """The Python of a card as its reader would run it, with his images."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    code = code.replace("FOLDER", str(folder)).replace('"model.', f'"{folder}/model.')
    scope: dict[str, Any] = {"images": images, **names}
    exec(code, scope)
    found = scope["features"] if "features" in scope else scope["tokens"].cls
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_timm_loads_strictly_and_gives_our_outputs(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vit, run = kept(tmp_path / "run", **KINDS[kind])
    out = export(run, "timm", tmp_path / "out")
    assert "loads these weights; outputs agree" in capsys.readouterr().out
    images = torch.randn(2, vit.num_channels, 48, 24)
    torch.testing.assert_close(run_card(out, images)[:, 0], vit(images).cls, rtol=1e-4, atol=1e-4)
    if kind == "one channel, odd norms":
        assert not (out / "config.json").exists()  # it could not say the epsilon
        return
    values = json.loads((out / "config.json").read_text())
    model = timm.create_model(values["architecture"], num_classes=0, **values["model_args"]).eval()
    model.load_state_dict(load_file(out / "model.safetensors"), strict=True)
    agree(vit, lambda x: split(model.forward_features(x), vit))
    whole = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    agree(vit, lambda x: split(whole.forward_features(x), vit))
    assert whole.pretrained_cfg["mean"] == [0.5, 0.5, 0.5]
    again = load_weights(out)  # and back
    assert again.vit.num_heads == vit.num_heads
    assert again.mean == (0.5, 0.5, 0.5)
    agree(vit, lambda x: again.vit(x)[:2])


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "Dinov2WithRegistersModel"),
        ({"num_registers": 2, "layer_scale": 0.4}, "Dinov2WithRegistersModel"),
        ({"position_resampling": "plain", "norm_eps": 1e-3}, "Dinov2Model"),
        ({"num_channels": 1}, "Dinov2WithRegistersModel"),
    ],
)
@torch.no_grad()
def test_transformers_loads_the_folder_and_gives_our_outputs(
    options: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    vit, run = kept(tmp_path / "run", **options)
    out = export(run, "huggingface", tmp_path / "out")
    model, told = transformers.AutoModel.from_pretrained(out, output_loading_info=True)
    assert type(model).__name__ == kind
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    agree(vit, lambda x: split(model(pixel_values=x).last_hidden_state, vit))
    again = load_weights(out)
    assert again.report is not None
    assert again.report.missing == ()
    assert again.mean == (0.5,) * vit.num_channels
    agree(vit, lambda x: again.vit(x)[:2])


@torch.no_grad()
def test_the_preprocessor_prepares_images_as_our_evaluations_do(tmp_path: Path) -> None:
    vit, run = kept(tmp_path / "run")
    out = export(run, "huggingface", tmp_path / "out")
    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    image = Image.fromarray(np.kron(pixels[::8, ::8], np.ones((8, 8, 1), np.uint8)))
    array, framing = np.asarray(image).transpose(2, 0, 1), reader.center_crop((32, 32))
    ours = torch.from_numpy(reader.resize(array, framing(*array.shape[1:]))).float() / 255
    expected = vit(((ours - 0.5) / 0.5)[None]).cls
    found = run_card(out, torch.empty(0), image=image)[:, 0]
    assert F.cosine_similarity(found, expected).item() > 0.995  # torchvision and Pillow round differently


@pytest.mark.parametrize("options", [{"num_registers": 2, "layer_scale": 0.4}, {"position_resampling": "offset"}])
@torch.no_grad()
def test_onnxruntime_gives_our_outputs(options: dict[str, Any], tmp_path: Path) -> None:
    vit, run = kept(tmp_path / "run", **options)
    out = export(run, "onnx", tmp_path / "out")
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])

    def theirs(images: Tensor) -> list[Tensor]:
        return [torch.from_numpy(found) for found in session.run(None, {"images": images.numpy()})]

    agree(vit, theirs)
    one = torch.randn(1, 3, 32, 40)  # one side as stored
    torch.testing.assert_close(theirs(one)[0], vit(one).cls, rtol=1e-4, atol=1e-4)
    assert {value.name: value.shape for value in (*session.get_inputs(), *session.get_outputs())} == {
        "images": ["batch", 3, "height", "width"],
        "cls": ["batch", vit.dim],
        "patches": ["batch", "patches", vit.dim],
    }
    values = onnx.load(out / "model.onnx").graph.value_info
    sides = [side.dim_param for value in values for side in value.type.tensor_type.shape.dim]
    assert {"rows", "columns"} <= set(sides)
    assert not [side for side in sides if re.search(r"\bs\d+\b|None", side)]
    assert str(Path(package.__file__).parent).encode() not in (out / "model.onnx").read_bytes()
    assert not list(out.glob("*.data"))


def test_a_disk_that_is_full_is_said_of_the_file_that_was_to_be(tmp_path: Path) -> None:
    _, run = kept(tmp_path / "run")
    out = tmp_path / "out"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # no file may be longer, as if there were no room
    try:
        with pytest.raises(OSError, match="File too large") as error:
            export(run, "onnx", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.filename == str(out / "model.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("stored", [4, 14, 37])
@pytest.mark.parametrize("how", ["antialias", "plain", "offset"])
def test_matrices_resample_as_interpolation_does(stored: int, how: PositionResampling) -> None:
    for wanted in (1, 2, 3, 7, 13, 14, 15, 40):
        each = torch.eye(stored).view(stored, 1, stored, 1).expand(-1, -1, -1, stored).contiguous()
        if how == "offset":
            found = F.interpolate(each, scale_factor=((wanted + 0.1) / stored, 1.0), mode="bicubic")
        else:
            found = F.interpolate(each, size=(wanted, stored), mode="bicubic", antialias=how == "antialias")
        matrix = resampling(stored, torch.arange(wanted, dtype=torch.float32), how)
        torch.testing.assert_close(matrix, found[:, 0, :, 0].T, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_our_own_format_comes_back_whole(tmp_path: Path) -> None:
    options = {"query_read_only_blocks": 1, "query_keys": "patches"}
    vit, run = kept(tmp_path / "run", num_channels=1, norm_eps=1e-3, position_resampling="offset", **options)
    out = export(run, "safetensors", tmp_path / "deep" / "out")
    again = load_weights(out)
    assert architecture_of(again.vit) == architecture_of(vit)
    images = torch.randn(2, 1, 48, 24)
    assert torch.equal(again.vit(images).cls, vit(images).cls)
    queries = torch.randn(2, 3, 1, vit.patch_size, vit.patch_size)
    answers = vit(images, queries).queries
    assert answers is not None
    assert torch.equal(again.vit(images, queries).queries, answers)
    vit.query_read_only_blocks = 0
    assert not torch.equal(vit(images, queries).queries, answers)
    torch.testing.assert_close(run_card(out, images), vit(images).cls)


def test_positions_can_be_resized_on_the_way(tmp_path: Path) -> None:
    vit, run = kept(tmp_path / "run")
    out = export(run, "safetensors", tmp_path / "out", input_size=48)
    again = package.load(out)
    assert again.input_size == (48, 48)
    images = torch.randn(1, 3, 48, 48)
    torch.testing.assert_close(again(images).cls, vit(images).cls, rtol=1e-4, atol=1e-4)
    assert "4x4 to 6x6" in json.loads((out / "export.json").read_text())["weights"]["resized"]["pos_embed"]


def test_what_another_program_cannot_do_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, run = kept(tmp_path / "run", position_resampling="offset")
    for to in ("timm", "huggingface"):
        out = export(run, to, tmp_path / to)
        sentence = "resamples positions differently, so that outputs differ slightly"
        assert sentence in capsys.readouterr().out
        assert sentence in (out / "README.md").read_text()
        assert "on images of 32x32 pixels" in (out / "README.md").read_text()
    wide = VisionTransformer(64, 1, 1, 8, (16, 32)).eval()
    (tmp_path / "wide").mkdir()
    write_backbone(tmp_path / "wide", state_of(wide), Description(architecture=architecture_of(wide)))
    with pytest.raises(UserError, match="are square, not of 16x32 pixels; add --input-size"):
        export(tmp_path / "wide", "huggingface", tmp_path / "square")
    assert export(tmp_path / "wide", "huggingface", tmp_path / "square", input_size=32).is_dir()


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = kept(tmp_path / "run")

    def names() -> list[str]:
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))

    before = names()
    with pytest.raises(UserError, match="cannot export to 'tflite'; choose timm, huggingface, onnx, safetensors"):
        export(run, "tflite", tmp_path / "new" / "out")
    with pytest.raises(UserError, match="run was not written by adclr export; choose another"):
        export(run, "timm", run)
    with pytest.raises(UserError, match=r"because .* is a file; choose another place"):
        export(run, "timm", run / "backbone.json" / "out")
    with pytest.raises(UserError, match="do not exist"):
        export(tmp_path / "nowhere", "timm", tmp_path / "new" / "out")
    monkeypatch.setattr(room, "TOLERANCE", -1.0)
    with pytest.raises(UserError, match=r"outputs of timm [\d.]+ differ by .*, so nothing was written"):
        export(run, "timm", tmp_path / "new" / "out")
    monkeypatch.undo()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room.card, "write", full)
    with pytest.raises(OSError, match="No space left") as error:
        export(run, "safetensors", tmp_path / "new" / "deeper" / "out")
    assert error.value.filename == str(tmp_path / "new" / "deeper" / "out")
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"writing ONNX needs onnx, which is not installed; run: pip install 'adclr\[onnx\]'"
    ):
        export(run, "onnx", tmp_path / "new" / "out")
    assert names() == before
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "not checked: timm" in (export(run, "timm", tmp_path / "untried") / "README.md").read_text()


def test_a_run_goes_out_with_a_card_of_its_facts(adclr: Adclr, images: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "my_run", tmp_path / "out"
    begun = Architecture(dim=16, depth=2, num_heads=2, patch_size=4, input_size=(16, 16))
    (tmp_path / "begun").mkdir()
    write_backbone(tmp_path / "begun", begun.build().state_dict(), Description(architecture=begun))
    trained = adclr("pretrain", images / "train", "--out", run, *words(TINY), f"init={tmp_path / 'begun'}")
    assert trained.returncode == 0, trained.stderr
    scored = adclr("evaluate", "knn", "--weights", run, "--data", images)
    assert scored.returncode == 0, scored.stderr
    (evaluation,) = run.glob("evals/knn/*.json")
    control = adclr("evaluate", "knn", "--weights", run, "--data", images, "--from-scratch")
    assert control.returncode == 0, control.stderr
    many = {"linear_top1": 1.5, "best_lr": 0.0005, "per_class": {"a": 2.5}}
    (run / "evals" / "transfer").mkdir()
    (run / "evals" / "transfer" / "x.json").write_text(
        json.dumps({"scores": many, "settings": {"data": [f"{tmp_path}/a/", f"{tmp_path}/b"]}})
    )
    odd = tmp_path / os.fsdecode(b"odd\xff")  # a name that is not UTF-8
    odd.symlink_to(images)
    named = adclr("evaluate", "knn", "--weights", run, "--data", odd)
    assert named.returncode == 0, named.stderr
    assert adclr("report", run).returncode == 0
    score = json.loads(evaluation.read_text())["scores"]["knn_top1"]
    done = adclr("export", run, "--to", "timm", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "loads these weights; outputs agree" in done.stdout
    card = (out / "README.md").read_text()
    for fact in (
        "library_name: timm",
        "# ViT-2x16/4, my_run",
        "trained without labels by ADCLR;",
        "| images | 32 |",
        "| steps | 8 |",
        "| epochs | 2 |",
        "| views.num_queries | 2 |",
        "| data.path | train |",
        f"| knn | {images.name} | knn_top1 | {score:.2f} |",
        f"| knn, from scratch | {images.name} | knn_top1 | ",
        "| transfer | a + b | linear_top1 | 1.50 |",
        "| transfer | a + b | best_lr | 0.0005 |",
        "| model.init | begun |",
        "| knn | odd\\udcff | knn_top1 | ",
        f"| torch | {version('torch')} |",
        "| values | 0 to 1, minus mean [0.485, 0.456, 0.406], divided by standard deviation [0.229, 0.224, 0.225] |",
    ):
        assert fact in card, fact
    assert "per_class" not in card
    assert card.count(f"| knn | {images.name} | knn_top1 |") == 1
    for path in (out / "README.md", out / "config.json", out / "export.json"):
        assert str(tmp_path) not in path.read_text()
        assert str(images) not in path.read_text()
    facts = json.loads((out / "export.json").read_text())
    assert facts["weights"]["layout"] == "ADCLR"
    assert facts["provenance"]["adclr"] == package.__version__
    (out / "README.md").write_text("# My own card\n")
    refused(adclr("export", run, "--to", "timm", "--out", out), "README.md was changed since adclr export wrote it")
    refused(adclr("export", run, "--to", "timm", "--out", tmp_path / "b", "epochs=3"), "takes no settings")
    # an unfinished run: its latest teacher
    (run / "backbone.safetensors").unlink()
    (run / "results.json").unlink()
    again = export(run, "safetensors", tmp_path / "unfinished")
    assert "| steps | 8, unfinished |" in (again / "README.md").read_text()


def test_weights_of_others_are_scored_and_exported(adclr: Adclr, images: Path, tmp_path: Path) -> None:
    state = state_of(backbone())
    torch.save({"teacher": {f"backbone.{name}": tensor for name, tensor in state.items()}}, tmp_path / "their.pth")
    torch.save({name: tensor for name, tensor in state.items() if name != "norm.bias"}, tmp_path / "part.pth")
    out = tmp_path / "out"
    whole = adclr("evaluate", "knn", "--weights", tmp_path / "their.pth", "--data", images, "k=3")
    assert whole.returncode == 0, whole.stderr
    assert "their.pth: DINO, teacher, 42 tensors taken, 0 left" in whole.stderr
    command = ["evaluate", "knn", "--weights", tmp_path / "part.pth", "--data", images, "k=3"]
    refused(adclr(*command), "lacks norm.bias; use weights that cover the backbone, or add --partial")
    part = adclr(*command, "--partial")
    assert part.returncode == 0, part.stderr
    assert "missing: norm.* (1), drawn anew" in part.stderr
    assert len(list((tmp_path / "evals" / "knn").glob("*.json"))) == 2  # one for each of the two
    refused(adclr("export", tmp_path / "part.pth", "--to", "safetensors", "--out", out), "or add --partial")
    embedding = ["embed", tmp_path / "part.pth", images, "--out", tmp_path / "part.parquet"]
    refused(adclr(*embedding), "or add --partial")
    assert not list(tmp_path.glob("part.parquet*"))
    assert adclr(*embedding, "--partial").returncode == 0
    # these cannot be told so
    for other in (
        ["pretrain", images / "train", "--out", out, f"init={tmp_path / 'part.pth'}"],
        ["visualize", "attention", tmp_path / "part.pth", images, "--out", out],
    ):
        refused(adclr(*other), "or complete them with adclr export --partial")
    assert not out.exists()
    done = adclr("export", tmp_path / "part.pth", "--to", "safetensors", "--out", out, "--partial", "--input-size", 48)
    assert done.returncode == 0, done.stderr
    card = (out / "README.md").read_text()
    assert "part.pth: timm, 41 tensors taken, 0 left" in card
    assert "4x4 to 6x6 patches" in card
    assert str(tmp_path) not in card
