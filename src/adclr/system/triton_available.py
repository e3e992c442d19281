"""Whether our own Triton kernels can run on this machine; otherwise PyTorch's operations do the same, slower.

Triton compiles a kernel when it is first launched, and needs a C compiler for that, which a machine may lack.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import torch

from adclr.system.text import one_line

# Read wherever a kernel could be launched, also in compiled code, so it is settled once, by `check_launch`.
possible = find_spec("triton") is not None  # there is none for macOS


def check_launch(device: torch.device) -> None:
    """Launch the smallest kernel; if that fails, print why and launch none in this process."""
    global possible
    if not possible or device.type != "cuda":
        return
    try:
        from adclr.system.trial_kernels import launch

        launch(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a missing compiler, driver or writable folder
        possible = False
        print(f"Triton cannot compile kernels here, so all is slower ({one_line(error, 300)})", file=sys.stderr)
