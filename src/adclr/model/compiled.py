"""Compilation of the blocks, with a fallback to uncompiled ones."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from adclr.model.vit import VisionTransformer


class CompileResult(NamedTuple):
    """The outcome of `compile_blocks`."""

    seconds: float  # spent on compiling, or on loading from the compiler's cache
    failure: str | None  # why blocks run uncompiled


def compile_blocks(backbones: Sequence[VisionTransformer], trial: Callable[[], None]) -> CompileResult:
    """Compile the blocks and run `trial`, one forward and backward on noise, so that failures occur here.

    After a failure the blocks run as before, and a warning is printed.
    """
    previous = [backbone.run_block for backbone in backbones]
    started, failure = time.monotonic(), None
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_relevant)
    torch.compiler.reset()  # all models share one function, of which 8 variants are cached
    for backbone in backbones:
        backbone.compile_blocks()
    try:
        trial()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler fails in many ways, most often because a C compiler is missing
        for backbone, run_block in zip(backbones, previous, strict=True):
            backbone.run_block = run_block
        reason = " ".join(str(error).split("\n\n")[0].split())  # a traceback and advice follow
        failure = f"{type(error).__name__}: {reason[:300]}"
        print(f"the blocks could not be compiled, so training is slower ({failure})", file=sys.stderr)
    return CompileResult(time.monotonic() - started, failure)


def _is_relevant(record: logging.LogRecord) -> bool:
    """Return false for a warning about in-place operations in checkpoints: blocks have none."""
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()
