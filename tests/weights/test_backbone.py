"""Weights of others: every layout loads completely and computes what its makers compute; one renamed key does not."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

import adclr as package
from adclr.config.parsing import UserError
from adclr.model.vit import VisionTransformer
from adclr.weights.backbone import Weights, architecture_of, load_weights
from foreign import SIZE, State, backbone, chunked, dinov2, mae, prefixed, projection_head, sines, state_of


def training_file(state: State) -> dict[str, object]:
    """What DINO and iBOT save while they train."""
    other = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    return {
        "student": prefixed(other, "module.backbone.") | projection_head("module.head."),
        "teacher": prefixed(state, "backbone.") | projection_head(),
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "epoch": 7,
        "args": argparse.Namespace(arch="vit_tiny", patch_size=8, local_crops_scale=(0.05, 0.4)),
        "fp16_scaler": None,
    }


def dino_file(vit: VisionTransformer) -> object:
    return training_file(state_of(vit)) | {"dino_loss": {"center": torch.zeros(1, 4)}}


def ibot_file(vit: VisionTransformer) -> object:
    file = training_file(state_of(vit)) | {"ibot_loss": {"center": torch.zeros(1, 4), "center2": torch.zeros(1, 1, 4)}}
    student = file["student"]
    assert isinstance(student, dict)
    student["module.backbone.masked_embed"] = torch.zeros(1, vit.dim)
    return file


def gammas(vit: VisionTransformer) -> object:
    state = state_of(vit)
    renamed = {name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): t for name, t in state.items()}
    return {"state_dict": renamed | {"masked_embed": torch.zeros(1, vit.dim)}}


def sine_backbone() -> VisionTransformer:
    vit = backbone()
    vit.pos_embed.data.copy_(sines(vit.dim, 4))
    return vit


def scaled(**options: object) -> VisionTransformer:
    return backbone(layer_scale=0.5, **options)


Case = tuple[str, Callable[[], VisionTransformer], Callable[[VisionTransformer], object], str, str, str]
CASES: list[Case] = [  # name of the file, backbone, content, layout, branch, resampling
    ("checkpoint.pth", backbone, dino_file, "DINO", "teacher", "offset"),
    ("dino_deitsmall16_pretrain.pth", backbone, state_of, "DINO", "", "offset"),
    ("checkpoint.pth", backbone, ibot_file, "iBOT", "teacher", "offset"),
    ("checkpoint_teacher.pth", scaled, gammas, "iBOT", "state_dict", "offset"),
    ("vits14.pth", scaled, dinov2, "DINOv2", "", "offset"),
    (
        "teacher_checkpoint.pth",
        scaled,
        lambda vit: {"teacher": prefixed(chunked(dinov2(vit)), "backbone.") | projection_head("dino_head.")},
        "DINOv2",
        "teacher",
        "offset",
    ),
    ("reg4.pth", lambda: scaled(num_registers=4), dinov2, "DINOv2 with registers", "", "antialias"),
    ("visualize.pth", sine_backbone, lambda vit: {"model": mae(vit)}, "MAE", "model", "plain"),
    ("pretrain_vit.pth", sine_backbone, lambda vit: {"model": state_of(vit)}, "MAE", "model", "plain"),
    ("plain.pth", backbone, lambda vit: state_of(vit) | {"head.weight": torch.randn(5, 64)}, "timm", "", "antialias"),
    (
        "ema.pth",
        backbone,
        lambda vit: {"state_dict": {}, "state_dict_ema": state_of(vit)},
        "timm",
        "state_dict_ema",
        "antialias",
    ),
]
IDS = [f"{layout} {name}" for name, _, _, layout, _, _ in CASES]


def same(a: VisionTransformer, b: VisionTransformer, size: int = SIZE) -> None:
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        left, right = a(images), b(images)
    torch.testing.assert_close(left.cls, right.cls, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(left.patches, right.patches, rtol=1e-4, atol=1e-4)


def write(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize(("file", "make", "content", "layout", "branch", "resampling"), CASES, ids=IDS)
def test_every_layout_loads_completely(
    file: str,
    make: Callable[[], VisionTransformer],
    content: Callable[[VisionTransformer], object],
    layout: str,
    branch: str,
    resampling: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    vit = make()
    path = write(tmp_path / file, content(vit))
    found = load_weights(path)
    report = found.report
    assert report is not None
    assert (report.layout, report.branch, found.vit.position_resampling) == (layout, branch, resampling)
    assert len(report.taken) == len(state_of(vit))
    assert not report.missing
    assert f"{layout}{', ' if branch else ''}{branch}, {len(report.taken)} tensors taken" in capsys.readouterr().err
    same(vit, found.vit)
    assert not found.vit.training
    assert found.mean == (0.485, 0.456, 0.406)


@pytest.mark.parametrize(("file", "make", "content", "layout", "branch", "resampling"), CASES, ids=IDS)
def test_one_renamed_key_is_refused_by_name(
    file: str,
    make: Callable[[], VisionTransformer],
    content: Callable[[VisionTransformer], object],
    layout: str,
    branch: str,
    resampling: str,
    tmp_path: Path,
) -> None:
    del layout, resampling
    whole = content(make())
    assert isinstance(whole, dict)
    state = whole[branch] if branch else whole
    ends = ("attn.qkv.weight", "norm.bias", "cls_token", "mlp.fc2.bias", "pos_embed", "patch_embed.proj.bias")
    wanted = [name for name in state if name.endswith(ends)]
    wanted = [name for name in wanted if "decoder" not in name]
    assert len(wanted) == 10
    for name in wanted:
        renamed = {key + "x" if key == name else key: value for key, value in state.items()}
        path = write(tmp_path / file, whole | {branch: renamed} if branch else renamed)
        with pytest.raises(UserError) as refused:
            load_weights(path)
        assert f"{name}x, which this architecture does not" in str(refused.value)
        assert "lacks" in str(refused.value)
        assert "\n" not in str(refused.value)


def dinos_positions(stored: Tensor, height: int, width: int, antialias: bool, offset: float) -> Tensor:
    """As DINO and DINOv2 resample, by their description: a scale, not a size, if there is an offset."""
    side = math.isqrt(stored.shape[1] - 1)
    grid = stored[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    if offset:
        scale = ((height + offset) / side, (width + offset) / side)
        found = F.interpolate(grid, scale_factor=scale, mode="bicubic", antialias=antialias)
    else:
        found = F.interpolate(grid, size=(height, width), mode="bicubic", antialias=antialias)
    assert found.shape[-2:] == (height, width)
    return torch.cat([stored[:, :1], found.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


@pytest.mark.parametrize("grid", [(6, 6), (2, 9), (4, 7), (30, 3)])
@pytest.mark.parametrize(
    ("how", "antialias", "offset"), [("offset", False, 0.1), ("plain", False, 0), ("antialias", True, 0)]
)
def test_positions_are_resampled_as_their_makers_do(
    grid: tuple[int, int], how: str, antialias: bool, offset: float
) -> None:
    vit = backbone(position_resampling=how)
    expected = dinos_positions(vit.pos_embed.detach(), *grid, antialias=antialias, offset=offset)
    torch.testing.assert_close(vit.positions(grid).detach(), expected, rtol=1e-4, atol=1e-5)


def test_positions_are_resized_once_and_it_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vit = scaled(num_registers=2)
    path = write(tmp_path / "reg.pth", dinov2(vit))
    found = load_weights(path, input_size=48)
    assert found.vit.input_size == (48, 48)
    assert found.vit.pos_embed.shape == (1, 36, 64)
    same(vit, found.vit, 48)
    assert "resized: pos_embed, 4x4 to 6x6 patches, bicubic with antialiasing" in capsys.readouterr().err
    assert load_weights(path, input_size=(SIZE, SIZE)).report.resized == {}  # type: ignore[union-attr]
    with pytest.raises(UserError, match="50x48 pixels is not divisible by patches of 8; choose another input size"):
        load_weights(path, input_size=(50, 48))


def test_the_student_is_taken_if_asked_for(tmp_path: Path) -> None:
    file = dino_file(backbone())
    assert isinstance(file, dict)
    other = backbone()
    other.norm.bias.data += 1
    file["student"] = prefixed(state_of(other), "module.backbone.") | projection_head("module.head.")
    path = write(tmp_path / "checkpoint.pth", file)
    same(other, package.load(f"{path}::student"))
    same(backbone(), package.load(path))
    with pytest.raises(UserError, match="holds no pupil; it holds args, dino_loss, epoch"):
        package.load(f"{path}::pupil")
    # one model that holds both
    both = prefixed(state_of(other), "student.backbone.") | prefixed(state_of(backbone()), "teacher.backbone.")
    path = write(tmp_path / "both.pth", {"model": both})
    same(backbone(), package.load(path))
    same(other, package.load(f"{write(tmp_path / 'flat.pth', both)}::student"))


def test_a_part_is_taken_if_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vit = backbone()
    state = state_of(vit)
    del state["norm.weight"], state["blocks.1.mlp.fc1.weight"]
    state |= {
        "fc_norm.weight": torch.ones(64),
        "blocks.0.attn.q_norm.weight": torch.ones(64),
        "norm.bias": torch.ones(3),
    }
    path = write(tmp_path / "part.pth", state)
    with pytest.raises(
        UserError, match=r"lacks blocks\.1\.mlp\.fc1\.weight and has blocks\.0\.attn\.q_norm\.weight, which"
    ):
        load_weights(path)
    found = load_weights(path, partial=True)
    assert found.report is not None
    assert set(found.report.missing) == {"norm.weight", "norm.bias", "blocks.1.mlp.fc1.weight"}
    assert set(found.report.left) == {"fc_norm.weight", "blocks.0.attn.q_norm.weight", "norm.bias"}
    assert torch.equal(found.vit.norm.weight, torch.ones(64))
    assert torch.equal(found.vit.blocks[0].mlp.fc1.weight, vit.blocks[0].mlp.fc1.weight)  # type: ignore[union-attr]
    again = load_weights(path, partial=True).vit.blocks[1].mlp.fc1.weight  # type: ignore[union-attr]
    assert torch.equal(found.vit.blocks[1].mlp.fc1.weight, again)  # type: ignore[union-attr]
    assert "missing: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "registers"),
    [({}, 0), ({"no_embed_class": True}, 0), ({"reg_tokens": 2}, 2), ({"reg_tokens": 3, "no_embed_class": True}, 3)],
)
@pytest.mark.parametrize("kind", [".pth", ".safetensors"])
@torch.no_grad()
def test_states_of_timm_compute_what_timm_computes(
    options: dict[str, object], registers: int, kind: str, tmp_path: Path
) -> None:
    """Whichever tokens have a position there."""
    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 1, "dynamic_img_size": True}
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=5, init_values=0.3, **shape, **options).eval()
    for parameter in theirs.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    path = tmp_path / f"model{kind}"
    {".safetensors": save_file, ".pth": torch.save}[kind](theirs.state_dict(), path)
    found = load_weights(path)
    assert found.vit.num_registers == registers
    assert found.report is not None
    assert set(found.report.left) == {"head.weight", "head.bias"}
    assert any("ImageNet" in line for line in found.report.assumed)
    for size in ((32, 32), (48, 24)):
        images = torch.randn(2, 3, *size)
        features, tokens = theirs.forward_features(images), found.vit(images)
        torch.testing.assert_close(tokens.cls, features[:, 0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(tokens.patches, features[:, 1 + registers :], rtol=1e-4, atol=1e-4)


def test_what_a_file_does_not_say_can_be_said_beside_it(tmp_path: Path) -> None:
    vit = backbone()
    torch.manual_seed(0)
    narrow = VisionTransformer(48, 2, 3, 8, (16, 40), norm_eps=1e-3).eval()
    path = write(tmp_path / "narrow.pth", state_of(narrow))
    with pytest.raises(UserError, match=r"the number of heads of .* cannot be told from its width 48"):
        load_weights(path)
    said = {"architecture": {"num_heads": 3}}
    path.with_suffix(".json").write_text(json.dumps(said))
    with pytest.raises(UserError, match="11 positions, which are not those of a square image; write its input_size"):
        load_weights(path)
    said["architecture"] |= {"input_size": [16, 40], "norm_eps": 1e-3}  # type: ignore[dict-item]
    path.with_suffix(".json").write_text(json.dumps(said | {"mean": [0.1, 0.2, 0.3]}))
    found = load_weights(path)
    assert found.mean == (0.1, 0.2, 0.3)
    images = torch.randn(1, 3, 16, 40)
    assert torch.allclose(found.vit(images).cls, narrow(images).cls, atol=1e-5)
    path = write(tmp_path / "other.pth", state_of(vit))
    for text, match in (
        ('{"learning_rate": 3}', "does not fit: unknown setting 'learning_rate'"),
        ("[]", "is not a description of weights"),
        ("{", "it is not JSON"),
        ('{"architecture": {"patch_size": 16, "input_size": [64, 64]}}', r"patch_embed\.proj\.weight of shape"),
        ('{"architecture": {"dim": 128, "num_heads": 2}}', r"cls_token of shape \(1, 1, 64\) instead of \(1, 1, 128\)"),
        ('{"architecture": {"num_heads": 5}}', "5 heads do not divide the width 64"),
        ('{"architecture": {"input_size": [64, 64]}}', "has 17 positions, which are not those of the 8x8 patches"),
    ):
        path.with_suffix(".json").write_text(text)
        with pytest.raises(UserError, match=match):
            load_weights(path)


def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, where nothing can be downloaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("torch.hub._get_torch_home", lambda: str(tmp_path / "torch"))

    def network(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", network)
    return tmp_path


@torch.no_grad()
def test_timms_pretrained_weights_are_taken_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, tmp_path)
    with pytest.raises(UserError, match=r"timm:vit_tiny_patch16_224 are not on this machine; download them once"):
        load_weights("timm:vit_tiny_patch16_224")
    with pytest.raises(UserError, match="did you mean timm:vit_"):  # and none that is not a plain ViT, as gcvit_small
        load_weights("timm:vit_smal")
    with pytest.raises(UserError, match="did you mean timm:vit_tiny_patch16_224"):
        load_weights("timm:vit_tiny_patch16_22")
    with pytest.raises(UserError, match=r"Invalid pretrained tag \(bogus\)"):
        load_weights("timm:vit_tiny_patch16_224.bogus")
    with pytest.raises(UserError, match="is a ResNet, not a ViT"):
        load_weights("timm:resnet18")
    with pytest.raises(UserError, match="without plain GELU"):
        load_weights("timm:vit_base_patch16_clip_quickgelu_224")
    theirs = timm.create_model("vit_tiny_patch16_224", pretrained=False).eval()
    kept = tmp_path / "hub/models--timm--vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs/main").write_text("0" * 40)
    (kept / "snapshots" / ("0" * 40)).mkdir(parents=True)
    save_file(theirs.state_dict(), kept / "snapshots" / ("0" * 40) / "model.safetensors")
    found = load_weights("timm:vit_tiny_patch16_224")
    assert found.mean == (0.5, 0.5, 0.5)
    assert found.report is not None
    assert (found.report.source, found.report.layout) == ("timm:vit_tiny_patch16_224", "timm")
    images = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(found.vit(images).cls, theirs.forward_features(images)[:, 0], rtol=1e-4, atol=1e-4)
    # the other place
    (tmp_path / "torch/hub/checkpoints").mkdir(parents=True)
    (small,) = [timm.create_model("vit_small_patch16_224", num_classes=0)]
    torch.save(small.state_dict(), tmp_path / "torch/hub/checkpoints/dino_deitsmall16_pretrain.pth")
    assert load_weights("timm:vit_small_patch16_224.dino").vit.num_heads == 6


def test_without_timm_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(UserError, match=r"pip install 'adclr\[timm\]'"):
        load_weights("timm:vit_tiny_patch16_224")


def test_a_backbone_is_described_as_it_was_built() -> None:
    for options in (
        {},
        {"num_registers": 3, "layer_scale": 0.5},
        {"norm_eps": 1e-5, "position_resampling": "offset"},
        {"query_read_only_blocks": 2},
    ):
        vit = backbone(**options)
        again = architecture_of(vit).build()
        assert again.state_dict().keys() == vit.state_dict().keys()
        assert architecture_of(again) == architecture_of(vit)
    assert isinstance(Weights(backbone(), (0.5,), (0.5,)).report, type(None))
