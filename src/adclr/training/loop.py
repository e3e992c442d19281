"""Training from start to end: load the job, take its steps, export the backbone.

One step continues in `training/step.py`, and from there in `model/method.py`.
"""

from __future__ import annotations

import os
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adclr.config.distillation import DistillSettings
from adclr.config.parsing import UserError
from adclr.data.feed import Prefetcher
from adclr.model.distillation import Backbone, Distillation
from adclr.model.feature_network import FeatureNetwork
from adclr.model.method import Branch
from adclr.model.named_tensors import Views
from adclr.report import health
from adclr.report.live import LiveReport, picture_steps
from adclr.system import distributed, machine
from adclr.system.devices import deterministic, select_device
from adclr.system.files import write_json
from adclr.system.runs import Run
from adclr.system.text import printable
from adclr.training import checkpoint, continued_pretraining, journal, launch
from adclr.training.checkpoint_writer import Writer
from adclr.training.distillation import measure_student
from adclr.training.health_metrics import measure_health
from adclr.training.job import Job, compile_method, evaluated_weights, load_job, record_start, shard
from adclr.training.journal import Journal
from adclr.training.launch import Launch
from adclr.training.micro_batch import fit_micro_batch
from adclr.training.probe import (
    SCORE_NAMES,
    Images,
    Probe,
    compare_on_own_images,
    describe_own_images,
    open_images,
    summarize,
)
from adclr.training.schedules import Values
from adclr.training.signals import Signals
from adclr.training.step import Step
from adclr.weights.backbone import save_backbone, save_network

CHECKPOINT_STEPS = 500  # least number of steps between checkpoints where no number is set


def pretrain(
    data: str | Path | None, out: str | Path, recipe: str | Path | None = None, resume: bool = False, **settings: Any
) -> Run:
    """Train to the end, or resume: `pretrain("photos/", out="runs/photos", recipe="adclr_vits16", epochs=100)`."""
    return train(launch.prepare(data, out, recipe, settings, resume))


def distill(
    teacher: str | os.PathLike[str],
    data: str | Path | None,
    out: str | Path,
    recipe: str | Path | None = None,
    resume: bool = False,
    **settings: Any,
) -> Run:
    """Train a student to give a teacher's features: `distill("runs/large", "photos/", out="runs/small", epochs=50)`.

    `teacher` is any weights that `adclr.load` takes; the student is a ViT, or any network: `student="timm:resnet50"`.
    """
    named = settings | {"distill.teacher": os.fspath(teacher)}
    return train(launch.prepare(data, out, recipe, named, resume, DistillSettings))


def train(launched: Launch) -> Run:
    """Train a prepared run to the end, from its newest checkpoint if it has one."""
    settings, run = launched.settings, launched.run
    if run.finished:
        launch.check_finished(launched)
        print(printable(f"{run.path} is finished: {run.path}/backbone.safetensors"))
        return run
    device = select_device(settings.train.device)
    images = open_images(settings)
    launched.mark("torch")
    with (
        distributed.session(device),
        run.lock() if distributed.is_main() else nullcontext(),
        deterministic(settings.train.deterministic),
    ):
        distributed.barrier()  # the directory exists and the first process has its lock
        job = load_job(launched, device)
        fits, step = True, None
        try:
            steps = job.schedules.total_steps
            compiled = compile_method(job.method, settings, device, job.dtype, job.micro_batch, steps)
            record_start(job, launched, compiled)
            job = shard(job)
            step = Step(settings, job.method, job.optimizer, device, job.dtype, job.accumulate)
            live = _open_live(job)
            launched.mark("compiling")
            _take_steps(job, step, _make_probe(job, images), live, launched)
        except torch.OutOfMemoryError:
            fits = False  # the size that fits is measured below, where no traceback holds on to memory
        if not fits:
            step = None  # with the memory of its CUDA graph
            raise UserError(_describe_size_that_fits(job))
        backbone = job.evaluated().backbone
        if distributed.is_main():
            _finish(job, backbone)
            if live:
                live.page()
        distributed.barrier()
    return run


def _take_steps(
    job: Job, take_step: Step, probe: journal.Probe | None, live: LiveReport | None, launched: Launch
) -> None:
    """Take all steps that are left; log, score, save and draw between them."""
    settings, schedules, start, total = job.settings, job.schedules, job.start, job.schedules.total_steps
    save_every = settings.train.checkpoint_every_steps or max(CHECKPOINT_STEPS, schedules.steps_per_epoch)
    drawn_steps = picture_steps(total) if settings.train.report else ()
    stop = False
    with (
        closing(job.batches.from_step(start)) as views,
        Journal(
            job.settings,
            job.run,
            schedules,
            job.meter,
            views,
            lambda done: job.batches.step_keys(done - 1),
            start,
            launched.started,
            launched.seconds_by_part(),
        ) as journal,
        Signals(journal.say) as signals,
        Writer(job.run, settings, journal.say) as writer,
    ):
        if probe and probe.missing(start):
            journal.score(start, probe, signals)
        if live:
            with journal.timed("drawing"):
                live.begin(start)
        for step in range(start, total):
            values = schedules.at(step)
            losses, ok = take_step(job.batches.step_views(views, step), values)
            done, measure = step + 1, partial(_measure_health, job, views, values)
            journal.step(done, values, losses, ok, measure)
            if probe and probe.due(done):
                journal.score(done, probe, signals)
            stop, save_now = signals.poll(writer.overdue())
            if stop or save_now or done % save_every == 0 or done == total:
                with journal.timed("saving"):
                    _save(job, writer, done)
            writer.check()
            weights = (
                evaluated_weights(job) if done in drawn_steps else None
            )  # sharded weights are gathered by all processes
            if live:
                with journal.timed("drawing"):
                    live.weights = weights or live.weights
                    live(done)
            if stop:
                journal.stop(done, measure)
                if live:
                    live.page()
                break
    if stop:
        signals.exit(done)


def _open_live(job: Job) -> LiveReport | None:
    """Return the report that is written while training, in the first process; None where there is none."""
    weights = evaluated_weights(job)  # gathered by all processes
    if not job.settings.train.report or not distributed.is_main():
        return None
    return LiveReport(job.run, weights, job.feed.source, job.schedules.total_steps)


def _measure_health(job: Job, views: Prefetcher[Views], values: Values) -> dict[str, float]:
    """Return the health measures on the views of the last micro-batch: of the teacher, or of a distilled student."""
    assert views.last is not None
    if isinstance(job.method, Distillation):
        return measure_student(job.method, views.last, job.dtype)
    teacher = job.evaluated()
    assert isinstance(teacher, Branch)
    return measure_health(
        job.method, views.last, values.teacher_temperature, job.dtype, teacher, values.query_temperature
    )


def _make_probe(job: Job, images: Images | None) -> journal.Probe | None:
    """Return the probe of the images there are, with a check against forgetting if the run began from weights."""
    settings, run, schedules, weights = job.settings, job.run, job.schedules, partial(evaluated_weights, job)
    probe = None if images is None else Probe(settings, run, schedules, weights, images, job.device)
    if settings.model.init is None:
        return probe
    return continued_pretraining.ForgettingProbe(
        run, settings, schedules, weights, job.feed.source, job.device, job.start, probe
    )


def _save(job: Job, writer: Writer, done: int) -> None:
    """Save a checkpoint after so many steps; the writer fills in the state of the meter."""
    processes, steps_per_epoch = distributed.world_size(), job.schedules.steps_per_epoch
    state = checkpoint.State(done, steps_per_epoch, job.fingerprint, {}, processes, job.micro_batch)
    writer.save(state, checkpoint.parts(job.method, job.optimizer), job.meter.total(), job.meter.decoder())


def _finish(job: Job, backbone: Backbone) -> None:
    """Export the backbone, write results.json and print a summary."""
    run, settings = job.run, job.settings
    if isinstance(backbone, FeatureNetwork):
        save_network(run.path, backbone, settings)
    else:
        save_backbone(run.path, backbone.state_dict(), settings)
    metrics, timing = list(run.rows("metrics.jsonl")), list(run.rows("timing.jsonl"))
    unreadable = list(run.rows("quarantine.jsonl"))
    own_scores = compare_on_own_images(settings, run, job.feed.source, job.device)
    speeds = [row["images_per_second"] for row in timing if "images_per_second" in row]
    write_json(
        run.path / "results.json",
        {
            "steps": job.schedules.total_steps,
            "epochs": settings.train.epochs,
            "seconds_training": sum(row.get("seconds", 0.0) for row in timing),
            "seconds_starting": sum(row.get("seconds_starting", 0.0) for row in timing),
            "seconds_to_first_step": next(
                (row["seconds_to_first_step"] for row in timing if "seconds_to_first_step" in row), None
            ),
            "images_per_second": float(np.median(speeds)) if speeds else None,
            "gpu_gib": torch.cuda.max_memory_allocated(job.device) / machine.GIB if job.device.type == "cuda" else None,
            "last": next((row for row in reversed(metrics) if row.get("loss") is not None), None),
            "probes": [row for row in metrics if any(name in row for name in (*SCORE_NAMES, "drift_cosine"))],
            "unreadable_images": len(unreadable),
            **({} if own_scores is None else {"own_images": own_scores}),
        },
    )
    finding = health.diagnose([row for row in metrics if health.is_measured(row)])
    if learned := summarize(metrics, finding and finding.name):
        print(learned)
    if own_scores is not None:
        print(describe_own_images(own_scores, finding and finding.name))
    if unreadable:
        skipped = f"{len(unreadable)} images could not be read and were skipped"
        print(printable(f"{skipped}: {run.path}/quarantine.jsonl lists them"))
    print(printable(f"done: {run.path}/backbone.safetensors"))


def _describe_size_that_fits(job: Job) -> str:
    """Return a sentence with the micro-batch that fits: measured in one process, half of the present one in several."""
    job.optimizer.zero_grad(set_to_none=True)
    job.optimizer.state.clear()
    torch.cuda.empty_cache()
    local_batch, half = job.micro_batch * job.accumulate, max(1, job.micro_batch // 2)
    images = max(size for size in range(1, half + 1) if local_batch % size == 0)
    if distributed.world_size() == 1:
        images = fit_micro_batch(job.method, job.settings, local_batch, job.device, job.dtype, at_most=half)
    gib = machine.available_gpu_memory(job.device) / machine.GIB
    return (
        f"{job.micro_batch} images at once do not fit into {gib:.0f} GiB of GPU memory; "
        f"set train.micro_batch_size={images}"
    )
