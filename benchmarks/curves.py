"""Loss curves of the fast and the plain way of training, from one seed on the same views.

    python benchmarks/curves.py [--steps 200] [--batch 32] [--json FILE] [--tiny]

`plain` is float32, eager, with PyTorch's own attention, norms, MLPs and float32 logits; `fast` is what training does on
a GPU: bfloat16, our kernels, compiled, recorded. The noise to judge their difference by is that of a second fast run
whose drop path draws otherwise. Scenes as images, ViT-S/16 of `adclr_vits16` with the schedule of a short run.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

if "--tiny" in sys.argv:  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from adclr.config import parsing
from adclr.config.settings import Settings
from adclr.data import augment
from adclr.data.packed import pack
from adclr.data.random_draws import key_of
from adclr.data.sets import scenes
from adclr.data.view_plan import plan_batch
from adclr.model.ops import attention, head_loss, mlp, norm
from adclr.system import devices
from adclr.system.files import write_json
from adclr.system.runs import provenance
from adclr.training import job
from adclr.training.schedules import Schedules, make_optimizer
from adclr.training.step import Step

IMAGES = 256
TINY = {"model.size": "tiny", "model.depth": 2, "method.num_prototypes": 64, "views.num_local": 2}


def never(*_: object) -> bool:
    return False


def train(settings: Settings, images: list[np.ndarray], steps: int, fast: bool, draw: int) -> list[float]:
    device, batch = devices.select_device("auto"), settings.train.batch_size
    dtype = devices.autocast_dtype("auto", device) if fast else None
    method = job.build(settings).to(device)
    if fast:
        job.compile_method(method, settings, device, dtype, batch)
    step = Step(settings, method, make_optimizer(method.student, settings), device, dtype, record=fast)
    schedules = Schedules(settings, IMAGES // batch)
    keys = np.array([key_of(str(number)) for number in range(len(images))], np.uint64)
    losses = []
    for number in range(steps):
        epoch, place = divmod(number, schedules.steps_per_epoch)
        chosen = np.random.default_rng(epoch).permutation(len(images))[place * batch : (place + 1) * batch]
        packed = pack([images[i] for i in chosen])
        drawn = plan_batch(settings, epoch, keys[chosen], packed.sizes)
        views = augment.render(packed.to(device), drawn, settings.data.mean, settings.data.std)
        torch.manual_seed(draw * 10**6 + number)  # drop path
        actual, _ = step([views], schedules.at(number))
        losses.append(actual[0])
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    return [float(loss) for loss in losses]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the curves there")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that it runs")
    given = parser.parse_args()
    words = {"train.batch_size": given.batch, "train.epochs": -(-given.steps * given.batch // IMAGES)}
    words |= {"optim.lr": 2e-3, "optim.warmup_epochs": 0.5, "method.momentum": 0.99}
    settings = parsing.build(Settings, parsing.load_recipe("adclr_vits16"), words, TINY if given.tiny else {})
    images = [scenes.scene(0, number, 128).image.transpose(2, 0, 1).copy() for number in range(IMAGES)]
    curves = {}
    for name, fast, draw in (("plain", False, 0), ("fast", True, 0), ("fast, other drops", True, 1)):
        with ExitStack() as stack:
            if not fast:
                for operation in (attention, norm, mlp, head_loss):
                    stack.enter_context(mock.patch.object(operation, "fits", never))
            curves[name] = train(settings, images, given.steps, fast, draw)
        tenths = np.array_split(np.array(curves[name]), min(10, given.steps))
        print(f"{name:<18} " + " ".join(f"{part.mean():7.3f}" for part in tenths), flush=True)
    smooth = {
        name: np.array([part.mean() for part in np.array_split(np.array(c), min(20, given.steps))])
        for name, c in curves.items()
    }
    apart = float(np.abs(smooth["fast"] / smooth["plain"] - 1).mean())
    noise = float(np.abs(smooth["fast, other drops"] / smooth["fast"] - 1).mean())
    print(f"mean relative difference of twentieths of the curve: fast to plain {apart:.2e}, other drops {noise:.2e}")
    if given.json:
        facts = {"steps": given.steps, "batch": given.batch, "tiny": given.tiny, "provenance": provenance()}
        write_json(given.json, facts | {"curves": curves, "fast_to_plain": apart, "noise": noise})


if __name__ == "__main__":
    main()
