"""The backbone as ONNX: images of any number, height and width in, `[CLS]` and patches out.

Positions are resampled in the graph by two small matrices of elementary operations: the bicubic Resize of ONNX is
another one, and runtimes differ in it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adclr.model.blocks import Block
from adclr.model.class_attention import read_patches
from adclr.model.positions import POSITION_OFFSET, PositionResampling, angles
from adclr.model.vit import VisionTransformer
from adclr.system import optional

ONE_FILE = 1_500_000_000  # bytes; a file of ONNX ends at 2 GiB, beyond which weights are in a second file


def _cubic(x: Tensor, a: float) -> Tensor:
    """Return the cubic kernel at a distance of x samples; `a` is its slope at 1."""
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def resampling(
    stored: int, targets: Tensor, how: PositionResampling, offset: float | Tensor = POSITION_OFFSET
) -> Tensor:
    """Return targets×stored weights: each resampled position along one side is a sum of stored ones.

    They are those of `F.interpolate`. `targets` are the numbers 0, 1, ... of the resampled positions; how many there
    are may be open until the graph runs.
    """
    count = targets[-1] + 1
    scale = stored / (count + offset if how == "offset" else count)
    at = (targets + 0.5) * scale - 0.5  # in stored positions
    cells = torch.arange(stored, dtype=targets.dtype)
    if how == "antialias":  # a kernel as wide as a resampled position, cut at the borders
        weights = _cubic((cells - at.unsqueeze(1)) / scale.clamp(min=1.0), a=-0.5)
        return weights / weights.sum(dim=1, keepdim=True)
    matrix = torch.zeros_like(targets).unsqueeze(1) * cells
    for tap in (-1, 0, 1, 2):  # four neighbors; those beyond the border are the border
        near = at.floor() + tap
        hit = (near.clamp(0, stored - 1).unsqueeze(1) == cells).to(targets.dtype)
        matrix = matrix + _cubic(at - near, a=-0.75).unsqueeze(1) * hit
    return matrix


class Portable(nn.Module):
    """`VisionTransformer.forward` of images, in operations that every runtime has."""

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return `[CLS]`, B×D, and patches, B×N×D, of B×C×height×width images."""
        vit = self.vit
        x = vit.patch_embed.proj(images)
        height, width = x.shape[2], x.shape[3]
        prefix: Tensor = vit.cls_token
        rotation = None
        if vit.pos_embed is None:
            rotation = self._rotation(height, width)
        else:
            x = x + self._positions(vit.pos_embed, height, width)
            prefix = prefix + vit.pos_embed[:, :1] if vit.positioned_prefix else prefix
        x = x.flatten(2).transpose(1, 2)
        if vit.class_attention:
            x = self._run_blocks(x, rotation)
            cls, _ = read_patches(vit.class_blocks, vit.cls_token[0], x)
            return vit.norm(cls), vit.norm(x)
        if vit.reg_token is not None:
            prefix = torch.cat([prefix, vit.reg_token], dim=1)
        x = vit.norm(self._run_blocks(torch.cat([prefix.expand(x.shape[0], -1, -1), x], dim=1), rotation))
        return x[:, 0], x[:, vit.num_prefix :]

    def _run_blocks(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        for block in self.vit.blocks:
            assert isinstance(block, Block)
            q, k, v = block.attn.split(block.norm1(x))
            if rotation is not None:
                q, k = (self._rotate(part, *rotation) for part in (q, k))
            mixed = F.scaled_dot_product_attention(q, k, v)
            x = block.think(x + block.ls1(block.attn.join(mixed)))
        return x

    def _rotation(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the angles of the patches of a grid, N×(D/H/2) each."""
        rows, columns = (torch.arange(count, dtype=torch.float32) for count in (height, width))
        turned = angles(rows, columns, self.vit.dim // self.vit.num_heads)
        return turned.cos(), turned.sin()

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return attention queries or keys, B×H×T×(D/H), with those of the patches turned."""
        prefix, patches = x[:, :, : self.vit.num_prefix], x[:, :, self.vit.num_prefix :]
        first, second = patches.chunk(2, dim=-1)
        patches = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return torch.cat([prefix, patches], dim=2)

    def _positions(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        """Return the positions of a grid, D×height×width."""
        vit, how = self.vit, self.vit.position_resampling
        stored = embeddings[0, vit.positioned_prefix :].view(*vit.grid, vit.dim)
        targets = [torch.arange(count, dtype=stored.dtype) for count in (height, width)]
        # on the stored grid nothing is resampled: the offset is 0 there, and the other ways are the identity
        same = torch.stack([t[-1] + 1 == count for t, count in zip(targets, vit.grid, strict=True)]).all()
        offset = torch.where(same, 0.0, POSITION_OFFSET)
        rows, columns = (resampling(old, new, how, offset) for old, new in zip(vit.grid, targets, strict=True))
        return torch.einsum("hi,ijd,wj->dhw", rows, stored, columns)


def check_installed() -> None:
    """Refuse an export without the packages that write ONNX."""
    for package in ("onnx", "onnxscript"):
        optional.check_installed(package, "onnx", "writing ONNX")


def write(vit: VisionTransformer, path: Path) -> None:
    """Write an .onnx file of input `images`, outputs `cls` and `patches`; under a minute for a ViT-S on 2 cores."""
    patch, dim = vit.patch_size, torch.export.Dim
    max_patches = 65536 // patch
    example = torch.zeros(2, vit.num_channels, 3 * patch, 5 * patch)  # neither the stored size nor square
    shapes = {
        "images": {
            0: dim("batch"),
            2: patch * dim("rows", max=max_patches),
            3: patch * dim("columns", max=max_patches),
        },
    }
    with _quiet():
        program: Any = torch.onnx.export(
            Portable(vit).eval(),
            (example,),
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=["images"],
            output_names=["cls", "patches"],
            verbose=False,
        )
        _remove_paths(program.model)
        _name_sides(program.model)
        size = sum(parameter.numel() * 4 for parameter in vit.parameters())
        try:
            program.save(path, external_data=size > ONE_FILE)
        except OSError as error:
            error.filename = error.filename or str(path)  # write(2) does not set it
            raise


def _remove_paths(model: Any) -> None:
    """Remove the file and line of this machine that the exporter records for each node."""
    model.metadata_props.clear()
    for graph in model.graphs():
        graph.metadata_props.clear()
        for value in (*graph, *graph.inputs, *graph.outputs, *graph.initializers.values()):
            value.metadata_props.clear()


def _name_sides(model: Any) -> None:
    """Name the dimensions that are open until the graph runs: the exporter calls them s18 and 8*rows.

    Rows and columns are those of patches, the output of the first convolution.
    """
    (images,), (_, patches) = model.graph.inputs, model.graph.outputs
    grid = next(node for node in model.graph if node.op_type == "Conv").outputs[0].shape[2:]
    names = {str(side.value): name for side, name in zip(grid, ("rows", "columns"), strict=True)}
    for graph in model.graphs():
        for value in (*graph.inputs, *graph.outputs, *(out for node in graph for out in node.outputs)):
            for axis, side in enumerate(value.shape or ()):
                if not isinstance(side, int) and side.value is not None:
                    value.shape[axis] = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), side.value)
    images.shape[2], images.shape[3] = "height", "width"
    patches.shape[1] = "patches"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress and deprecations of the exporter; an export that fails still raises its error."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
