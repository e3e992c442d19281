"""DINOv3's ViTs: outputs equal timm's and transformers' in every layout, back and forth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from adclr.config.parsing import UserError
from adclr.model.vit import VisionTransformer
from adclr.weights.backbone import Description, Weights, architecture_of, load_weights, write_backbone
from adclr.weights.export import export
from foreign import State, dinov3

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = ((32, 32), (48, 24), (8, 72), (136, 40))
# two heads, so that each must have its own part of a rotation
NARROW = {"patch_size": 8, "embed_dim": 128, "num_heads": 2, "depth": 3}
NAMES = ["vit_small_patch16_dinov3_qkvb", "vit_small_patch16_dinov3", "vit_small_plus_patch16_dinov3_qkvb"]
FAMILIES = ["vit_small", "vit_small_plus", "vit_base", "vit_large", "vit_huge_plus"]


def perturb(model: Any) -> Any:
    """Move parameters far from their initial values, where an error would not show: LayerScale, biases, registers."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        is_matrix = parameter.ndim in (2, 4)
        scale = parameter[0].numel() ** -0.5 if is_matrix else 0.1  # so that rounding grows little in the widest
        parameter.data.add_(scale * torch.randn_like(parameter))
    for name, parameter in model.named_parameters():
        if any(word in name for word in ("gamma", "lambda1")):
            parameter.data.add_(0.5)
    return model.eval()


def timms(name: str = NAMES[0], **options: Any) -> Any:
    return perturb(timm.create_model(name, num_classes=0, **(NARROW | options)))


@torch.no_grad()
def agree(vit: VisionTransformer, theirs: Any, sizes: tuple[tuple[int, int], ...] = SIZES) -> None:
    """Compare all tokens, relative to the largest number of the output."""
    for size in sizes:
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(2))
        tokens, expected = vit(images), theirs(images)
        registers = [] if tokens.registers is None else [tokens.registers]
        found = torch.cat([tokens.cls[:, None], *registers, tokens.patches], dim=1)
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max())


def written(folder: Path, state: State, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, folder / name)
    return folder / name


def report_of(weights: Weights) -> Any:
    assert weights.report is not None
    return weights.report


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_timms_weights_give_timms_outputs(name: str, tmp_path: Path) -> None:
    theirs = timms(name)
    loaded = load_weights(written(tmp_path, theirs.state_dict()))
    report = report_of(loaded)
    assert (report.layout, report.missing, report.left) == ("timm DINOv3", (), ())
    assert set(report.taken) == theirs.state_dict().keys()
    assert loaded.vit.norm_eps == 1e-5
    assert "rotary positions as DINOv3 has them, since the weights store none" in report.assumed
    agree(loaded.vit, theirs.forward_features)
    # a rotation that is left out shows
    images = torch.randn(2, 3, 48, 24)
    tokens = loaded.vit(images)
    for block in loaded.vit.blocks:
        block.attn.forward = lambda x, groups, _, attn=block.attn: type(attn).forward(attn, x, groups)
    assert (loaded.vit(images).cls - tokens.cls).abs().max() > 1e-2


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_every_size_of_timm_is_the_same_ours(family: str, tmp_path: Path) -> None:
    depth = {"depth": 2} if family == "vit_huge_plus" else {}  # of 3 GB
    theirs = perturb(timm.create_model(f"{family}_patch16_dinov3_qkvb", num_classes=0, **depth))
    vit = load_weights(written(tmp_path, theirs.state_dict())).vit
    agree(vit, theirs.forward_features, ((224, 224), (96, 160)))


GATED = {"use_gated_mlp": True, "hidden_act": "silu"}


def transformers_model(**options: Any) -> Any:
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 2}
    shape |= {"patch_size": 8, "image_size": 32, "num_register_tokens": 4}
    model = transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**(shape | options)))
    return perturb(model)


@pytest.mark.parametrize("options", [{}, GATED, {"num_register_tokens": 0, "query_bias": False, "value_bias": False}])
def test_transformers_folders_give_its_outputs(options: dict[str, Any], tmp_path: Path) -> None:
    theirs = transformers_model(**options)
    theirs.save_pretrained(tmp_path)
    loaded = load_weights(tmp_path)
    report = report_of(loaded)
    assert (report.layout, report.missing) == ("Hugging Face DINOv3", ())
    assert loaded.vit.input_size == (32, 32)
    agree(loaded.vit, lambda images: theirs(images).last_hidden_state)
    # the names of the modules of version 5, and a prefix
    state = {
        f"dinov3.{key.replace('layer.', 'model.layer.', 1) if key.startswith('layer.') else key}": tensor
        for key, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    written(tmp_path, state)
    agree(load_weights(tmp_path).vit, lambda images: theirs(images).last_hidden_state)


@pytest.mark.parametrize("name", [NAMES[0], NAMES[2]])
def test_the_original_files_give_the_same_outputs(name: str, tmp_path: Path) -> None:
    theirs = timms(name)
    original = dinov3(theirs.state_dict(), num_heads=2)
    torch.save(original, tmp_path / "dinov3_vits16_pretrain.pth")
    loaded = load_weights(tmp_path / "dinov3_vits16_pretrain.pth")
    report = report_of(loaded)
    assert (report.layout, report.missing) == ("DINOv3", ())
    assert {"rope_embed.periods", "mask_token", "blocks.0.attn.qkv.bias_mask"} <= set(report.left)
    agree(loaded.vit, theirs.forward_features)
    # as it is saved in training: a prefix, and a norm for local crops
    training = {f"teacher.backbone.{key}": tensor for key, tensor in original.items()}
    training["teacher.backbone.local_cls_norm.weight"] = torch.randn(128)
    training["teacher.dino_head.mlp.0.weight"] = torch.randn(4)
    torch.save({"teacher": training}, tmp_path / "training.pth")
    agree(load_weights(tmp_path / "training.pth").vit, theirs.forward_features)


def test_what_would_give_other_outputs_is_refused(tmp_path: Path) -> None:
    original = dinov3(timms().state_dict(), num_heads=2)

    def refused(changes: State, match: str, without: tuple[str, ...] = ()) -> None:
        state = {key: tensor for key, tensor in (original | changes).items() if key not in without}
        with pytest.raises(UserError, match=match) as error:
            load_weights(written(tmp_path, state))
        assert "\n" not in str(error.value)

    refused({"rope_embed.periods": original["rope_embed.periods"] * 1.1}, "other rotary positions than DINOv3")
    refused({"rope_embed.periods": torch.ones(())}, "other rotary positions than DINOv3")
    refused({"cls_norm.weight": torch.ones(128)}, r"has cls_norm\.weight")
    key_bias = {"blocks.1.attn.qkv.bias": torch.ones(384)}
    masks = tuple(key for key in original if key.endswith("bias_mask"))
    refused(key_bias, r"has biases of attention keys \(blocks\.1\.attn\.\)", masks)
    refused({}, r"lacks blocks\.1\.attn\.qkv\.bias", ("blocks.1.attn.qkv.bias",))
    refused({"blocks.1.attn.qkv.weight": torch.ones(())}, r"lacks|shape")
    refused({"blocks.1.attn.qkv.bias": torch.ones(())}, "shape")
    refused({"storage_tokens": torch.ones(4, 128)}, r"storage_tokens of shape \(4, 128\)")
    refused({"blocks.0.mlp.w12.weight": torch.ones(4, 4)}, "has a SwiGLU .*of another shape than DINOv3's")
    # with the mask they count as 0, whatever they are
    state = original | {
        "blocks.1.attn.qkv.bias": torch.cat([torch.ones(128), torch.full((128,), torch.nan), torch.ones(128)])
    }
    loaded = load_weights(written(tmp_path, state))
    assert (loaded.vit.state_dict()["blocks.1.attn.qkv.bias"][128:256] == 0).all()


def test_folders_of_other_positions_are_refused(tmp_path: Path) -> None:
    transformers_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, match in (
        ({"rope_theta": 10000.0}, "a base of 10000, not DINOv3's 100"),
        ({"hidden_act": "silu"}, "an MLP with silu"),
        ({"use_gated_mlp": True}, "an MLP with gelu"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(UserError, match=match):
            load_weights(tmp_path)


@torch.no_grad()
def test_timm_names_are_taken_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    theirs = perturb(timm.create_model("vit_small_plus_patch16_dinov3", num_classes=0, depth=12))
    cached = tmp_path / "hub/models--timm--vit_small_plus_patch16_dinov3.lvd1689m"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    written(cached / "snapshots" / ("0" * 40), theirs.state_dict())
    loaded = load_weights("timm:vit_small_plus_patch16_dinov3")
    assert loaded.vit.input_size == (256, 256)
    assert (loaded.vit.mlp, loaded.vit.num_heads) == ("gated", 6)
    agree(loaded.vit, theirs.forward_features, ((64, 96),))
    with pytest.raises(UserError, match="other positions than DINOv3's rotary ones"):
        load_weights("timm:vit_small_patch16_rope_224")


OURS: dict[str, dict[str, Any]] = {
    "S": {"num_registers": 4, "layer_scale": 1.0, "norm_eps": 1e-5},
    "S+": {"num_registers": 4, "layer_scale": 1.0, "norm_eps": 1e-5, "mlp": "gated"},
    "bare": {"num_registers": 0, "norm_eps": 1e-3},
}


def ours(folder: Path, **options: Any) -> tuple[VisionTransformer, Path]:
    vit = perturb(VisionTransformer(128, 2, 2, 8, 32, position_embedding="rotary", **options))
    folder.mkdir()
    write_backbone(folder, vit.state_dict(), Description(architecture=architecture_of(vit)))
    return vit, folder


@pytest.mark.parametrize("kind", OURS)
@torch.no_grad()
def test_exports_are_read_by_timm_and_transformers(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vit, run = ours(tmp_path / "run", **OURS[kind])

    def tokens(loaded: VisionTransformer) -> Any:
        return lambda images: torch.cat(_ordered(loaded, images), dim=1)

    agree(load_weights(run).vit, tokens(vit))
    for to in ("timm", "huggingface", "safetensors"):
        out = export(run, to, tmp_path / to)
        assert "loads these weights; outputs agree" in capsys.readouterr().out
        assert "rotary, of any size" in (out / "README.md").read_text()
        if to == "timm" and kind == "bare":
            continue  # no config.json, which could not say the epsilon: not known without it
        agree(load_weights(out).vit, tokens(vit))
    model, info = transformers.AutoModel.from_pretrained(tmp_path / "huggingface", output_loading_info=True)
    assert type(model).__name__ == "DINOv3ViTModel"
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    agree(vit, lambda images: model(pixel_values=images).last_hidden_state)
    if kind != "bare":
        whole = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
        agree(vit, whole.forward_features)


def _ordered(vit: VisionTransformer, images: Tensor) -> list[Tensor]:
    tokens = vit(images)
    return [tokens.cls[:, None], *([] if tokens.registers is None else [tokens.registers]), tokens.patches]


@torch.no_grad()
def test_onnx_gives_our_outputs(tmp_path: Path) -> None:
    vit, run = ours(tmp_path / "run", **OURS["S+"])
    session = onnxruntime.InferenceSession(export(run, "onnx", tmp_path / "out") / "model.onnx")
    for size in SIZES:
        images = torch.randn(2, 3, *size)
        cls, patches = (torch.from_numpy(part) for part in session.run(None, {"images": images.numpy()}))
        torch.testing.assert_close(cls, vit(images).cls, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(patches, vit(images).patches, rtol=1e-4, atol=1e-4)


def test_no_other_program_has_learned_positions_and_a_gated_mlp(tmp_path: Path) -> None:
    vit = VisionTransformer(64, 1, 1, 8, 32, mlp="gated")
    write_backbone(tmp_path, vit.state_dict(), Description(architecture=architecture_of(vit)))
    for to in ("timm", "huggingface"):
        with pytest.raises(UserError, match="no ViT with learned positions and a gated MLP; export to onnx"):
            export(tmp_path, to, tmp_path / to)
    assert load_weights(tmp_path).vit.mlp == "gated"


def test_another_input_size_changes_no_tensor(tmp_path: Path) -> None:
    vit, run = ours(tmp_path / "run", **OURS["S"])
    loaded = load_weights(run, input_size=(48, 24))
    assert loaded.vit.input_size == (48, 24)
    agree(loaded.vit, lambda images: torch.cat(_ordered(vit, images), dim=1))
    assert loaded.vit.state_dict().keys() == vit.state_dict().keys()
