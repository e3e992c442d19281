"""Whether our own kernels for a GPU can run here. Where they cannot, PyTorch's operations do the same, slower.

Triton compiles a kernel when it is first launched, and needs a C compiler for that, which a machine may lack.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import torch

# Asked wherever a kernel could be launched, compiled code included; so it is a fact by then, not a trial.
possible = find_spec("triton") is not None  # it is not, on macOS


def try_out(device: torch.device) -> None:
    """Launches the least kernel; if that fails, none is launched in this process, and the user is told."""
    global possible
    if not possible or device.type != "cuda":
        return
    try:
        from adclr.system.trial_kernels import launch

        launch(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # somebody's missing compiler, driver or folder to write to
        possible = False
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        print(f"Triton cannot compile kernels here, so all is slower ({reason})", file=sys.stderr)
