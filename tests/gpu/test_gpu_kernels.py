"""The tests of kernels, and of what else is made for a GPU, run there: elsewhere they run in Triton's interpreter."""

from __future__ import annotations

from types import ModuleType

import pytest

import test_attention
import test_augment_kernels
import test_head_loss
import test_mlp
import test_norm
import test_nvjpeg
import test_rotation
from adclr.system import devices, triton_available

pytestmark = pytest.mark.gpu


def gathered(module: ModuleType) -> type:
    """A module's tests with its fixtures, some of which are for each of its tests and so must not meet those of others.

    What they are not is in the class too, and pytest passes over it.
    """
    members = {name: staticmethod(value) for name, value in vars(module).items() if callable(value)}
    return type(module.__name__, (), members | {"pytestmark": getattr(module, "pytestmark", [])})


def test_they_are_possible_here() -> None:
    """Where one cannot be launched all others are left out, and everything works, slowly."""
    devices.select_device("cuda")
    assert triton_available.possible


TestAttention = gathered(test_attention)
TestHeadLoss = gathered(test_head_loss)
TestAugmentKernels = gathered(test_augment_kernels)
TestMlp = gathered(test_mlp)
TestNorm = gathered(test_norm)
TestRotation = gathered(test_rotation)
TestNvjpeg = gathered(test_nvjpeg)
