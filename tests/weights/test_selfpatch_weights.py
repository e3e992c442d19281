"""SelfPatch's public checkpoints, its runs and their exports: the tokens are the same wherever a backbone goes."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adclr as package
from adclr.config.parsing import UserError
from adclr.model.vit import VisionTransformer
from adclr.weights.backbone import Weights, load_weights, write_backbone
from foreign import prefixed, projection_head

State = dict[str, Tensor]
DIM, DEPTH, PATCH, SIDE = 64, 3, 8, 4


def draw(*shape: int, generator: torch.Generator) -> Tensor:
    return 0.3 * torch.randn(*shape, generator=generator)


def public_state() -> tuple[State, State]:
    """Trunk and class-attention head under the names of SelfPatch's program, with random numbers."""
    g = torch.Generator().manual_seed(3)

    def linear(name: str, rows: int, columns: int) -> State:
        return {f"{name}.weight": draw(rows, columns, generator=g), f"{name}.bias": draw(rows, generator=g)}

    def norm(name: str) -> State:
        return {f"{name}.weight": 1 + draw(DIM, generator=g), f"{name}.bias": draw(DIM, generator=g)}

    trunk = {"pos_embed": draw(1, SIDE * SIDE, DIM, generator=g)}
    trunk |= {"patch_embed.proj.weight": draw(DIM, 3, PATCH, PATCH, generator=g)}
    trunk |= {"patch_embed.proj.bias": draw(DIM, generator=g)}
    head: State = {"cls_token": draw(1, 1, DIM, generator=g)}
    for i in range(DEPTH):
        block = f"blocks.{i}"
        trunk |= norm(f"{block}.norm1") | linear(f"{block}.attn.qkv", 3 * DIM, DIM)
        trunk |= linear(f"{block}.attn.proj", DIM, DIM) | norm(f"{block}.norm2")
        trunk |= linear(f"{block}.mlp.fc1", 4 * DIM, DIM) | linear(f"{block}.mlp.fc2", DIM, 4 * DIM)
    for i in range(2):
        block = f"cls_blocks.{i}"
        for layer in "qkv":
            head |= linear(f"{block}.attn.{layer}", DIM, DIM)
        head |= norm(f"{block}.norm1") | linear(f"{block}.attn.proj", DIM, DIM) | norm(f"{block}.norm2")
        head |= linear(f"{block}.mlp.fc1", 4 * DIM, DIM) | linear(f"{block}.mlp.fc2", DIM, 4 * DIM)
    return trunk, head | norm("norm")


def checkpoint(trunk: State, head: State) -> dict[str, object]:
    """As the program saves it: the student in DDP, the teacher not; the teacher is what counts."""
    whole = prefixed(trunk, "backbone.") | prefixed(head, "ca_head.")
    whole |= projection_head("c_head.") | projection_head("p_head.")
    return {
        "student": {f"module.{name}": torch.zeros_like(tensor) for name, tensor in whole.items()},
        "teacher": whole,
        "optimizer": {"state": {}, "param_groups": []},
        "epoch": 200,
        "args": argparse.Namespace(arch="vit_tiny", k_num=4),
        "dino_loss": {"center": torch.zeros(1, 1, 4), "patch_center": torch.zeros(1, 4)},
    }


def public_forward(trunk: State, head: State, images: Tensor) -> tuple[Tensor, Tensor]:
    """[CLS] and patches as the program computes them: no LayerScale, positions on a grid 0.1 patches larger."""

    def apply(state: State, name: str, x: Tensor) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(state: State, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (DIM,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    def mlp(state: State, name: str, x: Tensor) -> Tensor:
        return apply(state, f"{name}.fc2", F.gelu(apply(state, f"{name}.fc1", x)))

    grid = images.shape[-1] // PATCH
    positions = trunk["pos_embed"]
    if grid != SIDE:
        square = positions.view(1, SIDE, SIDE, DIM).permute(0, 3, 1, 2)
        square = F.interpolate(square, scale_factor=((grid + 0.1) / SIDE,) * 2, mode="bicubic")
        positions = square.flatten(2).transpose(1, 2)
    x = F.conv2d(images, trunk["patch_embed.proj.weight"], trunk["patch_embed.proj.bias"], PATCH)
    x = x.flatten(2).transpose(1, 2) + positions
    for i in range(DEPTH):
        block = f"blocks.{i}"
        q, k, v = apply(trunk, f"{block}.attn.qkv", norm(trunk, f"{block}.norm1", x)).chunk(3, dim=-1)
        x = x + apply(
            trunk, f"{block}.attn.proj", torch.softmax(q @ k.transpose(1, 2) / math.sqrt(DIM), dim=-1) @ v
        )  # one head, by the width of 64
        x = x + mlp(trunk, f"{block}.mlp", norm(trunk, f"{block}.norm2", x))
    token = head["cls_token"].expand(len(x), -1, -1)
    for i in range(2):
        block = f"cls_blocks.{i}"
        all_tokens = norm(head, f"{block}.norm1", torch.cat([token, x], dim=1))
        q = apply(head, f"{block}.attn.q", all_tokens[:, :1]) / math.sqrt(DIM)
        k, v = apply(head, f"{block}.attn.k", all_tokens), apply(head, f"{block}.attn.v", all_tokens)
        token = token + apply(head, f"{block}.attn.proj", torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v)
        token = token + mlp(head, f"{block}.mlp", norm(head, f"{block}.norm2", token))
    return norm(head, "norm", token)[:, 0], norm(head, "norm", x)


def same_as_public(vit: VisionTransformer, trunk: State, head: State) -> None:
    for size in (SIDE * PATCH, 6 * PATCH):
        images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            tokens, (cls, patches) = vit(images), public_forward(trunk, head, images)
        torch.testing.assert_close(tokens.cls, cls, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(tokens.patches, patches, rtol=1e-4, atol=1e-4)


def test_a_public_checkpoint_loads_and_computes_the_same(tmp_path: Path) -> None:
    trunk, head = public_state()
    torch.save(checkpoint(trunk, head), tmp_path / "checkpoint.pth")
    loaded = load_weights(tmp_path / "checkpoint.pth")
    report = loaded.report
    assert report is not None
    assert (report.layout, report.branch) == ("SelfPatch", "teacher")
    assert (loaded.vit.class_attention, loaded.vit.position_resampling) == (2, "offset")
    assert set(report.taken) == {f"backbone.{name}" for name in trunk} | {f"ca_head.{name}" for name in head}
    assert {name.split(".")[0] for name in report.left} == {"c_head", "p_head"}
    assert report.missing == ()
    same_as_public(loaded.vit, trunk, head)
    student = load_weights(f"{tmp_path}/checkpoint.pth::student").vit
    assert not student.cls_token.any()


def test_names_without_the_backbones_prefix_load_too(tmp_path: Path) -> None:
    trunk, head = public_state()
    torch.save(trunk | prefixed(head, "ca_head."), tmp_path / "weights.pth")
    same_as_public(load_weights(tmp_path / "weights.pth").vit, trunk, head)


def test_the_trunk_alone_is_refused_and_taken_in_part(tmp_path: Path) -> None:
    """As weights for detection are stored: nothing makes [CLS]."""
    trunk, head = public_state()
    torch.save(trunk, tmp_path / "selfpatch.pth")
    with pytest.raises(UserError, match="lacks cls_token"):
        load_weights(tmp_path / "selfpatch.pth")
    vit = load_weights(tmp_path / "selfpatch.pth", partial=True).vit
    assert vit.class_attention == 2
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    before_norm = {"norm.weight": torch.ones(DIM), "norm.bias": torch.zeros(DIM)}
    _, patches = public_forward(trunk, head | before_norm, images)
    with torch.no_grad():
        torch.testing.assert_close(vit(images).patches, patches, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["cls_token", "cls_blocks.1.attn.k.weight", "norm.bias"])
def test_a_checkpoint_without_one_tensor_is_refused(tmp_path: Path, name: str) -> None:
    trunk, head = public_state()
    del head[name]
    torch.save(checkpoint(trunk, head), tmp_path / "checkpoint.pth")
    with pytest.raises(UserError, match="of another architecture: it lacks"):
        load_weights(tmp_path / "checkpoint.pth")


def saved(folder: Path) -> Weights:
    torch.manual_seed(0)
    vit = VisionTransformer(64, 1, 1, 8, 32, class_attention=2).eval()
    for parameter in vit.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    weights = Weights(vit, (0.5,) * 3, (0.25,) * 3)
    folder.mkdir()
    write_backbone(folder, vit.state_dict(), weights.describe())
    return weights


@torch.no_grad()
def test_our_own_weights_say_what_they_are(tmp_path: Path) -> None:
    vit = saved(tmp_path / "weights").vit
    architecture = json.loads((tmp_path / "weights" / "backbone.json").read_text())["architecture"]
    assert architecture["class_attention"] == 2
    loaded = package.load(tmp_path / "weights")
    images = torch.randn(2, 3, 32, 48)
    assert torch.equal(loaded(images).cls, vit(images).cls)
    larger = load_weights(tmp_path / "weights", input_size=(48, 48)).vit
    assert larger.pos_embed.shape == (1, 36, 64)
    square = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(larger(square).cls, vit(square).cls, rtol=1e-4, atol=1e-4)


def test_weights_written_before_class_attention_still_say_they_are_ours(tmp_path: Path) -> None:
    vit = VisionTransformer(64, 2, 1, 8, 32)
    write_backbone(tmp_path, vit.state_dict(), Weights(vit, (0.5,) * 3, (0.25,) * 3).describe())
    description = json.loads((tmp_path / "backbone.json").read_text())
    assert description["architecture"].pop("class_attention") == 0
    (tmp_path / "backbone.json").write_text(json.dumps(description))
    report = load_weights(tmp_path).report
    assert report is not None
    assert report.layout == "ADCLR"


@pytest.mark.parametrize(("to", "program"), [("timm", "timm"), ("huggingface", "Hugging Face")])
def test_exports_that_cannot_be_are_refused(tmp_path: Path, to: str, program: str) -> None:
    saved(tmp_path / "weights")
    with pytest.raises(UserError, match=f"^{program} has no ViT whose .* export to onnx or safetensors$"):
        package.export(tmp_path / "weights", to=to, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_onnx_and_safetensors_give_our_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    saved(tmp_path / "weights")
    for to in ("safetensors", "onnx"):
        package.export(tmp_path / "weights", to=to, out=tmp_path / to)
        assert "loads these weights; outputs agree" in capsys.readouterr().out
    assert "class-attention blocks" in (tmp_path / "onnx" / "README.md").read_text()
