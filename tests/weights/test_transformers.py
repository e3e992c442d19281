"""Hugging Face's folders, written by transformers itself, and ours, read by it: the same numbers on either side."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from adclr.config.parsing import UserError
from adclr.weights.backbone import load_weights

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 8,
}
WIDE = {"intermediate_size": 192}
MODELS: list[tuple[str, str, dict[str, Any], str]] = [  # model, its config, what else it is told, how it resamples
    ("ViTModel", "ViTConfig", WIDE, "plain"),
    ("ViTForImageClassification", "ViTConfig", WIDE, "plain"),
    (
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        WIDE | {"decoder_hidden_size": 16, "decoder_num_attention_heads": 2},
        "plain",
    ),
    ("Dinov2Model", "Dinov2Config", {"layerscale_value": 0.3}, "plain"),
    ("Dinov2ForImageClassification", "Dinov2Config", {}, "plain"),
    ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {"num_register_tokens": 2}, "antialias"),
    ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {"num_register_tokens": 0}, "antialias"),
]


def make(model: str, config: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    theirs = getattr(transformers, model)(getattr(transformers, config)(**SHAPE, **options)).eval()
    for parameter in theirs.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return theirs


@pytest.mark.parametrize(("model", "config", "options", "resampling"), MODELS)
@torch.no_grad()
def test_folders_compute_what_transformers_computes(
    model: str, config: str, options: dict[str, Any], resampling: str, tmp_path: Path
) -> None:
    theirs = make(model, config, options)
    theirs.save_pretrained(tmp_path)
    actual = load_weights(tmp_path)
    assert actual.report is not None
    assert (actual.report.missing, actual.vit.position_resampling) == ((), resampling)
    assert actual.mean == ((0.5, 0.5, 0.5) if config == "ViTConfig" else (0.485, 0.456, 0.406))
    base = getattr(theirs, theirs.base_model_prefix, theirs)
    skip = 1 + options.get("num_register_tokens", 0)
    for size in ((32, 32), (48, 24)):
        images = torch.randn(2, 3, *size)
        if "MAE" in model:
            ordered = torch.arange(size[0] * size[1] // 64).expand(2, -1) / 1000
            base.config.mask_ratio = 0.0
            theirs_out = base(images, noise=ordered, interpolate_pos_encoding=True).last_hidden_state
        else:
            more = {"interpolate_pos_encoding": True} if model.startswith("ViT") else {}
            theirs_out = base(images, **more).last_hidden_state
        tokens = actual.vit(images)
        torch.testing.assert_close(tokens.cls, theirs_out[:, 0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(tokens.patches, theirs_out[:, skip:], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_other_files_of_a_folder_are_read_too(tmp_path: Path) -> None:
    theirs = make("ViTModel", "ViTConfig", WIDE)
    images = torch.randn(1, 3, 32, 32)
    expected = theirs(images).last_hidden_state[:, 0]

    def same(weights: Path) -> None:
        torch.testing.assert_close(load_weights(weights).vit(images).cls, expected, rtol=1e-4, atol=1e-4)

    theirs.save_pretrained(tmp_path / "whole")
    same(tmp_path / "whole" / "model.safetensors")
    (tmp_path / "whole" / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.3]}')
    assert load_weights(tmp_path / "whole").mean == (0.1, 0.2, 0.3)
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    same(tmp_path / "shards")
    index = tmp_path / "shards" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    with pytest.raises(UserError, match="does not list the files of the weights"):
        load_weights(tmp_path / "shards")
    shutil.copytree(tmp_path / "whole", tmp_path / "pickled")
    state = load_file(tmp_path / "pickled" / "model.safetensors")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pickled" / "pytorch_model.bin")
    same(tmp_path / "pickled")
    # the names of its modules since version 5, and a prefix
    names = {
        "encoder.layer": "layers",
        "attention.attention.query": "attention.q_proj",
        "intermediate.dense": "mlp.fc1",
    }
    names |= {"attention.attention.key": "attention.k_proj", "attention.attention.value": "attention.v_proj"}
    names |= {"attention.output.dense": "attention.o_proj", ".output.dense": ".mlp.fc2"}
    renamed = {}
    for name, tensor in state.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed["vit." + name] = tensor
    save_file(renamed, tmp_path / "whole" / "model.safetensors")
    same(tmp_path / "whole")


def test_folders_that_are_no_such_vit_are_refused(tmp_path: Path) -> None:
    make("Dinov2Model", "Dinov2Config", {}).save_pretrained(tmp_path)
    config, file = json.loads((tmp_path / "config.json").read_text()), tmp_path / "model.safetensors"
    state = load_file(file)
    for changes, match in (
        ({"model_type": "swin"}, "is of the model type 'swin'; these are taken: vit, vit_mae"),
        ({"model_type": 3}, "does not describe a ViT"),
        ({"use_swiglu_ffn": True}, "has an MLP with SwiGLU, which this ViT does not have"),
        ({"hidden_act": "quick_gelu"}, "has an MLP with quick_gelu, which"),
        ({"patch_size": [8, 4]}, "has patches of 8x4 pixels, not square ones"),
        ({"patch_size": 16}, "which are not those of the 2x2 patches of its input_size"),
        ({"hidden_size": 96}, r"cls_token of shape \(1, 1, 48\) instead of \(1, 1, 96\)"),
        ({"num_hidden_layers": 3}, r"lacks blocks\.2\.norm1\.weight"),
        ({"num_attention_heads": 7}, "7 heads do not divide the width 48"),
        ({"image_size": 10**9}, "is not possible"),
        ({"layer_norm_eps": -1}, "norm_eps=-1"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(UserError, match=match) as refused:
            load_weights(tmp_path)
        assert "\n" not in str(refused.value)
    (tmp_path / "config.json").write_text(json.dumps(config))
    old = "encoder.layer.1.attention.attention.key.weight"
    save_file({name + "s" if name == old else name: tensor for name, tensor in state.items()}, file)
    with pytest.raises(UserError, match=rf"lacks blocks\.1\.attn\.qkv\.weight and has .*{old}s"):
        load_weights(tmp_path)
    swiglu = {
        name.replace("mlp.fc1", "mlp.weights_in").replace("mlp.fc2", "mlp.weights_out"): t for name, t in state.items()
    }
    save_file(swiglu, file)
    with pytest.raises(UserError, match=r"has a SwiGLU \(encoder\.layer\.0\.mlp\.weights_in"):
        load_weights(tmp_path)
    file.unlink()
    with pytest.raises(
        UserError, match=r"holds neither model\.safetensors nor pytorch_model\.bin; download its weights too"
    ):
        load_weights(tmp_path)
