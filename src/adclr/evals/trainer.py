"""The training loop of evaluations that train: AdamW steps, metrics, checkpoints and resuming.

With a run directory the training is resumed there: it holds metrics.jsonl, checkpoints/ while the training runs, and
model.safetensors and model.json when it is finished.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adclr.config.parsing import Count, NonNegative, Positive, Section, Share, UserError, free_settings, setting
from adclr.data.feed import Prefetcher
from adclr.data.random_draws import combine
from adclr.model.compiled import compile_blocks
from adclr.model.vit import VisionTransformer
from adclr.system import distributed, outputs
from adclr.system.files import write_atomically, write_json
from adclr.system.progress import ProgressLine
from adclr.system.runs import Run
from adclr.weights import snapshot
from adclr.weights.tensors import fit_tensors

LOG_EVERY = 20  # steps between rows of metrics.jsonl, and between checks of the loss


class TrainingSettings(Section):
    """Length and speed of a training; null stands for the value of the protocol."""

    steps: Count | None = Field(None, description="training steps; null: those of the protocol")
    batch_size: Count | None = Field(
        None, description="images per step, over all processes; null: that of the protocol"
    )
    lr: Positive | None = Field(None, description="peak learning rate; null: that of the protocol")
    warmup_steps: int | None = Field(
        None, ge=0, description="steps of the linear warm-up; null: that of the protocol, at most a tenth of all steps"
    )
    weight_decay: NonNegative | None = Field(
        None, description="weight decay, except of biases, norms, tokens and position embeddings"
    )
    layer_decay: Share | None = Field(
        None, description="learning rate of a layer relative to the next layer; from scratch 1"
    )
    clip_norm: Positive | None = Field(None, description="limit of the gradient norm of all parameters")
    minutes: Positive | None = Field(
        None, description="time limit of training, minutes; the schedule ends with it. Such a run is not repeatable"
    )
    checkpoint_minutes: Positive = setting(5.0, "minutes between checkpoints", free=["resume", "study"])


@dataclass(kw_only=True)
class Trainer(ABC):
    """Trains `model`; a subclass supplies the batches, the losses and the learning rate."""

    name: str
    settings: Any  # with seed, clip_norm and checkpoint_minutes
    model: nn.Module
    optimizer: torch.optim.AdamW  # each parameter group has a `scale`, a factor of the learning rate
    total_steps: int
    minutes: float | None = None
    run: Run | None
    identity: dict[str, Any]  # which training a checkpoint belongs to
    num_micro_batches: int = 1  # of a step, in each process
    ema: nn.Module | None = None  # moving average of the model's parameters
    ema_momentum: float = 0.0
    log_every: int = LOG_EVERY  # steps
    seconds: float = 0.0  # of training before the checkpoint that was resumed

    find_unused_parameters: ClassVar[bool] = True  # see DistributedDataParallel

    @abstractmethod
    def batches(self, start: int, end: int) -> Prefetcher[Any]:
        """Return this process's micro-batches of steps `start` to `end` - 1."""

    @abstractmethod
    def losses(self, model: nn.Module, batch: Any, step: int) -> dict[str, Tensor]:
        """Return the losses of a micro-batch by name, which are summed; in several processes `model` is wrapped."""

    @abstractmethod
    def lr_at(self, progress: float, step: int) -> float:
        """Return the learning rate of a step; `progress` is the completed share of the training."""

    def log(self, step: int, losses: dict[str, float], lr: float, seconds: float) -> dict[str, Any]:
        """Return the row of metrics.jsonl after a step; `losses` are means since the last row."""
        check_finite(losses["loss"], f"at step {step}")
        return {"step": step, "seconds": round(seconds, 2), "lr": lr} | losses

    def train(self) -> int:
        """Train to the end, from the last checkpoint if there is one; return the number of steps."""
        if self.minutes is not None and distributed.world_size() > 1:
            raise UserError(
                "minutes= needs one process, because several would not stop at the same step; set steps instead"
            )
        start = self._resume()
        model: nn.Module = self.model.train()
        if distributed.world_size() > 1 and start < self.total_steps:
            if next(model.parameters()).is_cuda:  # in place; parameters and state keys stay
                model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
            model = DistributedDataParallel(model, find_unused_parameters=self.find_unused_parameters)
        sums: dict[str, Tensor] = {}
        step, logged, text = start, start, ""
        started = saved = time.monotonic()
        with (
            closing(self.batches(start, self.total_steps)) as batches,
            ProgressLine(self.name, self.total_steps, start, distributed.is_main()) as line,
        ):
            while step < self.total_steps and (progress := self._progress(step, started)) < 1:
                lr = self.lr_at(progress, step)
                for name, value in self._step(model, batches, step, lr).items():
                    sums[name] = sums[name] + value if name in sums else value
                step += 1
                if step % self.log_every == 0 or step == self.total_steps:
                    means = {name: value / (step - logged) for name, value in sums.items()}
                    text = self._write_metrics(step, means, lr, time.monotonic() - started)
                    sums, logged = {}, step
                line.move(step, text)
                if self.run is not None and time.monotonic() - saved > 60 * self.settings.checkpoint_minutes:
                    self._save(step, self.seconds + time.monotonic() - started)
                    saved = time.monotonic()
        if self.run is not None and step > start:
            self._save(step, math.inf)
        self.model.eval()
        return step

    def _progress(self, step: int, started: float) -> float:
        """Return the completed share of the steps or of the minutes, whichever is larger."""
        progress = step / self.total_steps
        if self.minutes is None:
            return progress
        return max(progress, (self.seconds + time.monotonic() - started) / (60 * self.minutes))

    def _step(self, model: nn.Module, batches: Prefetcher[Any], step: int, lr: float) -> dict[str, Tensor]:
        """Do one optimizer step; return the losses, which stay on the device."""
        # for dropout and the sampling of proposals
        torch.manual_seed(combine(self.settings.seed, step, distributed.rank()) % 2**63)
        sums: dict[str, Tensor] = {}
        for number in range(1, self.num_micro_batches + 1):
            accumulating = isinstance(model, DistributedDataParallel) and number < self.num_micro_batches
            with model.no_sync() if accumulating else nullcontext():  # type: ignore[operator]
                losses = self.losses(model, next(batches), step)
                losses = {name: value / self.num_micro_batches for name, value in losses.items()}
                loss = torch.stack(list(losses.values())).sum()
                loss.backward()  # type: ignore[no-untyped-call]
            for name, value in ({"loss": loss} | losses).items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        if self.settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            averages: list[Tensor] = list(self.ema.parameters())
            with torch.no_grad():
                torch._foreach_lerp_(averages, list(self.model.parameters()), 1 - self.ema_momentum)
        return sums

    def _write_metrics(self, step: int, means: dict[str, Tensor], lr: float, seconds: float) -> str:
        """Append a row to metrics.jsonl; return its text for the progress line."""
        values = distributed.all_reduce_sum(torch.stack(list(means.values())).float()) / distributed.world_size()
        row = self.log(step, dict(zip(means, values.tolist(), strict=True)), lr, seconds)
        if self.run is not None and distributed.is_main():
            self.run.append("metrics.jsonl", row)
        return f"loss {row['loss']:.3f}" + (f" top-1 {row['top1']:.2f}" if "top1" in row else "")

    def compile(self, vit: VisionTransformer, batch: Any) -> None:
        """Compile the blocks by one trial on a batch of noise; gradients and buffers stay as they were."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

        def trial() -> None:
            losses = self.losses(self.model.train(), batch, 0)
            torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]

        compile_blocks([vit], trial)
        self.optimizer.zero_grad(set_to_none=True)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(before[name])

    def _parts(self) -> snapshot.Parts:
        """Return the tensors of a checkpoint."""
        parts = {"model": self.model.state_dict(), "optimizer": snapshot.optimizer_state(self.model, self.optimizer)}
        return parts if self.ema is None else parts | {"ema": self.ema.state_dict()}

    def _save(self, step: int, seconds: float) -> None:
        """Write a checkpoint; infinite `seconds` mark the end of a training whose `minutes` are over."""
        if self.run is not None and distributed.is_main():
            state = {"step": step, "seconds": min(seconds, 1e12), "identity": self.identity}
            snapshot.save(self.run, step, self._parts(), state, keep=1)

    def _resume(self) -> int:
        """Restore the latest checkpoint; return the number of completed steps."""
        if self.run is None:
            return 0
        steps = self.run.steps()
        if not steps:
            distributed.barrier()  # until all processes have listed the checkpoints
            if distributed.is_main():
                self.run.cut("metrics.jsonl", -1)
            return 0
        folder, parts = self.run.checkpoints / f"step_{steps[-1]}", self._parts()
        stored, state = snapshot.load(folder, list(parts))
        if not isinstance(state, dict) or state.get("identity") != self.identity:
            raise UserError(
                f"{self.run.path} holds a training of other weights, images or settings; "
                "delete it or choose another --out"
            )
        for name, model in (("model", self.model), ("ema", self.ema)):
            if model is not None:
                fit_tensors(parts[name], stored[name], folder / f"{name}.safetensors")
                model.load_state_dict(stored[name])
        snapshot.load_optimizer(self.model, self.optimizer, stored["optimizer"], folder / "optimizer.safetensors")
        for parameter, moments in self.optimizer.state.items():
            for name, value in moments.items():
                if value.shape == parameter.shape:  # the fused kernel needs the memory format of the parameter
                    moments[name] = torch.empty_like(parameter).copy_(value)
        seconds = state.get("seconds", 0.0)  # fine-tuning did not store them in version 0.1
        if not isinstance(seconds, float):
            raise UserError(f"{folder}/state.json does not say how long it took; delete that directory to start anew")
        self.seconds = seconds
        distributed.barrier()
        if distributed.is_main():
            self.run.cut("metrics.jsonl", steps[-1])
            print(f"resuming from step {steps[-1]} of {self.total_steps}", file=sys.stderr)
        return steps[-1]

    def finish(self, description: dict[str, Any], state: Mapping[str, Tensor] | None = None) -> None:
        """Write model.json and model.safetensors, by default the state of the model, and delete the checkpoints."""
        if self.run is None or not distributed.is_main():
            return
        state = self.model.state_dict() if state is None else state
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        write_json(self.run.path / "model.json", description)
        write_atomically(self.run.path / "model.safetensors", save(tensors))
        shutil.rmtree(self.run.checkpoints, ignore_errors=True)


def check_finite(loss: float, position: str) -> None:
    """Refuse to continue with a loss that is no number."""
    if not math.isfinite(loss):
        raise UserError(f"the loss is not finite {position}; set a lower lr, or clip_norm=1")


def identify(settings: Section, images: Any, start: str) -> dict[str, Any]:
    """Return what identifies a training: the settings that decide its result, the images and the initial weights."""
    # by the names of version 0.1, so that its trainings are resumed
    chosen = settings.model_dump(mode="json", exclude=free_settings(type(settings), "resume"), by_alias=True)
    return {"settings": chosen, "images": images, "start": start}


def lock(run: Run | None) -> Any:
    """Return a context in which no other program trains in this run directory."""
    return run.lock(outputs.author_words("evaluate")) if run is not None and distributed.is_main() else nullcontext()
