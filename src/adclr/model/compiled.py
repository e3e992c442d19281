"""Blocks compiled, or left as they are where that fails."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from adclr.model.vit import VisionTransformer


def _is_news(record: logging.LogRecord) -> bool:
    """All but this one: what is made again in backward has nothing in place, and the user could not change it."""
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


class Compiled(NamedTuple):
    seconds: float  # that compiling took, or finding what an earlier run had compiled
    failure: str | None  # why blocks run uncompiled although they should not


def compile_blocks(backbones: Sequence[VisionTransformer], trial: Callable[[], None]) -> Compiled:
    """`trial` does one step of noise, forward and backward, so that whatever goes wrong does so here.

    Then blocks stay as they were and the user is told.
    """
    plain = [backbone.run_block for backbone in backbones]
    started, failure = time.monotonic(), None
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_news)
    torch.compiler.reset()  # all models share one function, and 8 forms of it are kept
    for backbone in backbones:
        backbone.compile_blocks()
    try:
        trial()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler has many ways to fail, most of them somebody's missing compiler
        for backbone, before in zip(backbones, plain, strict=True):
            backbone.run_block = before
        reason = " ".join(str(error).split("\n\n")[0].split())  # what follows is a traceback and advice on it
        failure = f"{type(error).__name__}: {reason[:300]}"
        print(f"the blocks could not be compiled, so training is slower ({failure})", file=sys.stderr)
    return Compiled(time.monotonic() - started, failure)
