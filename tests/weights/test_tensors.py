"""Files that lie: whatever is in them, one sentence, nothing run, no memory taken for what is not there."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from adclr.config.parsing import UserError
from adclr.weights.backbone import load_weights
from adclr.weights.tensors import kind_of, read_torch
from foreign import backbone, dinov2, prefixed, state_of
from test_cli import refused
from tiny import Adclr


class Bomb:
    """Unpickled by pickle, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.mark}'",)


def saved(content: object, **options: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        load_weights(path)
    sentence = str(error.value)
    assert "\n" not in sentence
    assert len(sentence) < 600
    return sentence


def test_a_pickle_that_runs_code_is_refused(adclr: Adclr, tmp_path: Path) -> None:
    mark, out = tmp_path / "mark", tmp_path / "new" / "out"
    state = state_of(backbone())
    bombs = {
        "zip.pth": saved(state | {"x": Bomb(mark)}),
        "old.pt": saved({"teacher": state, "args": Bomb(mark)}, _use_new_zipfile_serialization=False),
        "raw.pkl": pickle.dumps(Bomb(mark)),
        "false.safetensors": saved(state | {"x": Bomb(mark)}),
    }
    for name, content in bombs.items():
        (tmp_path / name).write_bytes(content)
        refusal(tmp_path / name)
        assert not mark.exists(), name
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text('{"model_type": "vit", "auto_map": {"AutoModel": "evil.Model"}}')
    (tmp_path / "folder" / "evil.py").write_text(f"open({str(mark)!r}, 'w')")
    (tmp_path / "folder" / "pytorch_model.bin").write_bytes(bombs["zip.pth"])
    assert "needs posix.system, which is code and not data" in refusal(tmp_path / "folder")
    done = adclr("export", tmp_path / "zip.pth", "--to", "timm", "--out", out, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
    refused(done, "needs posix.system, which is code and not data, so it was not loaded; use a file of tensors alone")
    assert not mark.exists()
    assert not (tmp_path / "new").exists()


def test_one_type_is_allowed_and_no_other(tmp_path: Path) -> None:
    torch.serialization.add_safe_globals([Bomb])  # by another package, say
    try:
        for content, asked in (
            ({"args": argparse.Namespace(a=1, b=[2.0, "c"], c=argparse.Namespace())}, None),
            ({"a": np.float64(1)}, "numpy"),
            ({"a": Path("x")}, "pathlib"),
            ({"a": torch.nn.Linear(1, 1)}, "torch.nn.modules.linear.Linear"),
            ({"a": argparse.HelpFormatter}, "argparse.HelpFormatter"),
            ({"a": Bomb(tmp_path / "mark")}, "posix.system"),
            ({"a": Bomb}, "Bomb"),
        ):
            (tmp_path / "a.pth").write_bytes(saved(content))
            if asked is None:
                actual = read_torch(tmp_path / "a.pth")["args"]
                assert vars(actual) == {"a": 1, "b": [2.0, "c"], "c": argparse.Namespace()}
                continue
            with pytest.raises(UserError, match=f"{asked}.*, which is code and not data"):
                read_torch(tmp_path / "a.pth")
        assert Bomb in torch.serialization.get_safe_globals()
        assert argparse.Namespace not in torch.serialization.get_safe_globals()
    finally:
        torch.serialization.clear_safe_globals()


def test_what_is_cut_short_or_called_by_another_name_is_refused(tmp_path: Path) -> None:
    state = state_of(backbone())
    whole = {
        "a.pth": saved(state),
        "b.safetensors": save(state),
        "c.pt": saved(state, _use_new_zipfile_serialization=False),
    }
    for name, content in whole.items():
        for length in (0, 1, 8, 9, 100, len(content) // 2, len(content) - 1):
            (tmp_path / name).write_bytes(content[:length])
            assert refusal(tmp_path / name).endswith(("use another", "a file of weights"))
    (tmp_path / "a.pth").write_bytes(whole["b.safetensors"])
    assert "is a safetensors file by another name; call it a.safetensors" in refusal(tmp_path / "a.pth")
    (tmp_path / "b.safetensors").write_bytes(whole["a.pth"])
    assert "is not a safetensors file but a torch file; call it b.pth" in refusal(tmp_path / "b.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"<html>not found</html>")
    assert "is not a whole safetensors file" in refusal(tmp_path / "b.safetensors")
    (tmp_path / "e.pth").write_bytes(b"<html>not found</html>")
    assert "is neither a safetensors nor a torch file" in refusal(tmp_path / "e.pth")
    assert kind_of(tmp_path / "e.pth") == "other"
    np.savez(tmp_path / "vit.npz", a=np.zeros(3))
    assert "is not a whole torch file of tensors" in refusal(tmp_path / "vit.npz")


def test_random_damage_never_does_more_than_be_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state = {name: tensor.half() for name, tensor in state_of(backbone()).items()}
    # every claim of a file is near its beginning or its end
    for name, content in (("a.pth", saved(state)), ("b.safetensors", save(state))):
        for _ in range(150):
            damaged = bytearray(content)
            for _ in range(rng.integers(1, 4)):
                edge = int(rng.integers(0, min(6000, len(content))))
                damaged[edge if rng.random() < 0.6 else -edge - 1] = int(rng.integers(0, 256))
            (tmp_path / name).write_bytes(damaged)
            with contextlib.suppress(UserError):  # and nothing else
                load_weights(tmp_path / name, show=False)


def test_claims_take_no_memory(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state = state_of(backbone())
    header = {"norm.bias": {"dtype": "F32", "shape": [10**13], "data_offsets": [0, 4 * 10**13]}}
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    assert "is not a whole safetensors file" in refusal(tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").write_bytes((2**62).to_bytes(8, "little") + text)
    assert "is not a whole safetensors file" in refusal(tmp_path / "a.safetensors")
    wide = torch.zeros(1, 1, 1).expand(1, 10**6, 10**6)
    for name, value, match in (
        ("pos_embed", wide, r"fewer numbers than pos_embed of shape \(1, 1000000, 1000000\)"),
        ("head.weight", wide, "fewer numbers than head.weight"),
        ("norm.bias", torch.zeros(10**12, device="meta"), "norm.bias without its numbers"),
        ("norm.bias", torch.zeros(64).to_sparse(), "norm.bias without its numbers"),
    ):
        (tmp_path / "b.pth").write_bytes(saved(state | {name: value}))
        with pytest.raises(UserError, match=match):
            load_weights(tmp_path / "b.pth")
    names = {f"blocks.{i}.norm1.weight": torch.zeros(1) for i in range(1000)}
    torch.save(names | {"patch_embed.proj.weight": torch.zeros(16384, 3, 1, 1)}, tmp_path / "d.pth")
    with pytest.raises(UserError, match="covers less than a hundredth of the backbone"):
        load_weights(tmp_path / "d.pth", partial=True)  # of 13 TB
    with zipfile.ZipFile(io.BytesIO(saved(state))) as old, zipfile.ZipFile(tmp_path / "c.pth", "w") as new:
        for entry in old.infolist():  # a bomb: what unpacks to more than it takes
            new.writestr(entry.filename, bytes(2**22) + old.read(entry), zipfile.ZIP_DEFLATED)
    assert "is compressed, which torch's own files are not" in refusal(tmp_path / "c.pth")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # 512 MiB


def test_numbers_must_be_numbers(tmp_path: Path) -> None:
    state = state_of(backbone())
    for bad in (torch.tensor(float("nan")), torch.tensor(float("inf")), torch.tensor(1e300, dtype=torch.float64)):
        broken = state["norm.bias"].to(bad.dtype).clone()
        broken[3] = bad
        save_file(state | {"norm.bias": broken}, tmp_path / "a.safetensors")
        assert "holds numbers that are not finite in norm.bias" in refusal(tmp_path / "a.safetensors")
    for kind in (torch.int64, torch.bool, torch.complex64):
        torch.save(prefixed(state | {"norm.bias": torch.ones(64, dtype=kind)}, "module."), tmp_path / "b.pth")
        assert "not finite in module.norm.bias" in refusal(tmp_path / "b.pth")
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        save_file({name: tensor.to(kind) for name, tensor in state.items()}, tmp_path / "c.safetensors")
        assert load_weights(tmp_path / "c.safetensors").vit.norm.bias.dtype == torch.float32


@pytest.mark.parametrize(
    "make", [lambda: state_of(backbone()), lambda: dinov2(backbone(num_registers=2, layer_scale=1.0))]
)
def test_tensors_of_any_other_shape_are_refused(make: Callable[[], dict[str, torch.Tensor]], tmp_path: Path) -> None:
    state = make()
    blocks = ("blocks.0.", "blocks.2.mlp.fc2")  # the others are no others
    for name in [
        name for name in state if name != "mask_token" and (not name.startswith("blocks.") or name.startswith(blocks))
    ]:
        for shape in ((), (3,), (2, 0, 64), (1, 2, 3, 4, 5)):
            torch.save(state | {name: torch.zeros(shape)}, tmp_path / "a.pth")
            assert "a.pth" in refusal(tmp_path / "a.pth")


def test_other_things_are_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    endless: dict[str, object] = {}
    endless["model"] = endless
    for content, match in (
        ([1, 2], "holds no tensors"),
        ({}, "holds no tensors"),
        (torch.zeros(3), "holds no tensors"),
        ({"model": {"epoch": 3}}, "holds no tensors"),
        (endless, "holds no tensors"),
        ({"a": torch.zeros(3)}, r"holds no patch_embed\.proj\.weight, so it is not the state of one ViT"),
        ({1: torch.zeros(3)}, "whose name cannot be read"),
        ({"a\nb": torch.zeros(3)}, "whose name cannot be read"),
        ({"a" * 10**5: torch.zeros(3)}, "whose name cannot be read"),
        ({"patch_embed.proj.weight": torch.zeros(64, 3, 8, 4)}, "not that of square patches"),
        (state_of(backbone(num_channels=1)), "images of 1 channels, and nothing says their mean and deviation; write"),
        (
            {"patch_embed.proj.weight": torch.zeros(64, 3, 8, 8), "blocks.999999999.norm1.weight": torch.zeros(1)},
            "lacks",
        ),
        (prefixed(state_of(backbone()), "a.") | prefixed(state_of(backbone()), "b."), "holds several"),
        (state_of(backbone()) | {"blocks.1.0.norm1.weight": torch.zeros(64)}, "has blocks.0.norm1.weight twice"),
    ):
        torch.save(content, path)
        with pytest.raises(UserError, match=match):
            load_weights(path)
