"""Pretraining: build -> resume -> loop -> export."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adclr.config.sections import UserError
from adclr.data.augment import Views
from adclr.data.prefetch import Ahead
from adclr.model.compiled import Compiled
from adclr.report import health
from adclr.report.live import Live, moments
from adclr.system import distributed, machine
from adclr.system.devices import choose
from adclr.system.files import write_json
from adclr.system.runs import Run
from adclr.training import checkpoint, continued, journal, launch
from adclr.training.checkpoint_writer import Writer
from adclr.training.health import measure_health
from adclr.training.job import Job, assemble, keys_of, order, seeded, teacher, views_of
from adclr.training.journal import Journal
from adclr.training.launch import Launch
from adclr.training.micro_batch import fitted
from adclr.training.probe import NAMES, Images, Probe, open_images, summary
from adclr.training.schedules import Values
from adclr.training.sharding import Sharded
from adclr.training.signals import Signals
from adclr.training.speed import prepare, ready, repeatable
from adclr.training.step import Step
from adclr.weights import snapshot
from adclr.weights.backbone import save_backbone

CHECKPOINT_STEPS = 500  # least number of steps between checkpoints where no number is set


def pretrain(
    data: str | Path | None, out: str | Path, recipe: str | Path | None = None, resume: bool = False, **settings: Any
) -> Run:
    """`pretrain("photos/", out="runs/photos", recipe="adclr_vits16", epochs=100)`: trains, or goes on, to the end."""
    return run(launch.prepare(data, out, recipe, settings, resume))


def run(launched: Launch) -> Run:
    """Runs to the end what was prepared; the same again resumes it."""
    settings, run = launched.settings, launched.run
    if run.finished:
        launch.check_finished(launched)
        print(f"{run.path} is finished: {run.path}/backbone.safetensors")
        return run
    device = choose(settings.train.device)
    images = open_images(settings)
    with (
        distributed.session(device),
        run.lock() if distributed.is_main() else nullcontext(),
        repeatable(settings.train.deterministic),
    ):
        distributed.barrier()  # the directory is there, and it is ours
        job = assemble(launched, device)
        fits, step = True, None
        try:
            compiled = prepare(job.method, settings, device, job.dtype, job.micro_batch)
            start = _resume(job, launched, compiled)
            if settings.train.shard and distributed.world_size() > 1:
                sharded = Sharded(job.method, job.optimizer, settings, device)
                job = replace(job, sharded=sharded, optimizer=sharded.optimizer)
            step = Step(settings, job.method, job.optimizer, device, job.dtype, job.accumulate, ready(compiled))
            live = _live(job)
            _train(job, start, step, _probe(job, start, images), live)
        except torch.OutOfMemoryError:
            fits = False  # what fits is measured below, where the traceback no longer holds on to memory
        if not fits:
            step = None  # with the memory that it has recorded
            raise UserError(_too_large(job))
        backbone = job.teacher().backbone.state_dict()
        if distributed.is_main():
            _finish(job, backbone)
            if live:
                live.page()
        distributed.barrier()
    return run


def _resume(job: Job, launched: Launch, compiled: Compiled | None) -> int:
    """Opens the files of the run; the number of steps already done."""
    run, state = job.run, job.state
    if state is not None:
        job.meter.restore(state.meter)
    start = 0 if state is None else state.step
    distributed.barrier()  # until all have read what the first process is about to write over
    if distributed.is_main():
        # that a changed collection is allowed is said for one start only
        data = job.settings.data.model_copy(update={"allow_changed": False})
        run.write_settings(job.settings.model_copy(update={"data": data}))
        run.add_provenance(_facts(job, launched, compiled, start))
        snapshot.tidy(run)
        for name in ("metrics.jsonl", "timing.jsonl", "voided.jsonl"):
            run.cut(name, -1 if state is None else start)
        if launched.source.listing is not None:
            launched.source.listing.save(run.path / launch.INDEX)
        if job.stamps is not None:
            job.stamps.save(run.path / launch.STAMPS, launched.source.keys)
        run.cut("quarantine.jsonl", float("inf"))  # only what a crash left of a line
    return start


def _facts(job: Job, launched: Launch, compiled: Compiled | None, start: int) -> dict[str, Any]:
    return {
        "from_step": start,
        "device": torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
        "precision": "float32" if job.dtype is None else "bfloat16",
        "processes": distributed.world_size(),
        "micro_batch_size": job.micro_batch,
        "compiled": None if compiled is None else compiled._asdict(),
        "images": len(launched.source),
        "cache": None if job.feed.store is None else f"{job.feed.store.gib:.3f} GiB",
        "collection": job.fingerprint,
        "init": job.init,
        "automatic_choice": launched.reasons,
    }


def _live(job: Job) -> Live | None:
    """Pictures and the page, by the first process."""
    weights = teacher(job)  # which all are asked for
    if not job.settings.train.report or not distributed.is_main():
        return None
    return Live(job.run, weights, job.feed.source, job.schedules.total_steps)


def _train(job: Job, start: int, take: Step, probe: journal.Probe | None, live: Live | None) -> None:
    settings, schedules, total = job.settings, job.schedules, job.schedules.total_steps
    every = settings.train.checkpoint_every_steps or max(CHECKPOINT_STEPS, schedules.steps_per_epoch)
    pictured = moments(total) if settings.train.report else ()
    views, stop = views_of(job, order(job, start)), False
    try:
        with (
            Journal(settings, job.run, schedules, job.meter, views, lambda step: keys_of(job, step), start) as journal,
            Signals(journal.say) as signals,
            Writer(job.run, settings, journal.say) as writer,
        ):
            if probe and probe.missing(start):
                journal.score(start, probe, signals)
            if live:
                with journal.apart("drawing"):
                    live.begin(start)
            for step in range(start, total):
                values = schedules.at(step)
                losses, ok = take(seeded(job, views, step), values)
                done = step + 1
                look = partial(_look, job, views, values)
                journal.step(done, values, losses, ok, look)
                if probe and probe.due(done):
                    journal.score(done, probe, signals)
                stop, overdue = signals.asked(writer.overdue())
                if stop or overdue or done % every == 0 or done == total:
                    with journal.apart("saving"):
                        _save(job, writer, done)
                writer.check()
                if done in pictured:
                    job.teacher()  # where it is spread, the copy that `live` draws is as old as the last asking
                if live:
                    with journal.apart("drawing"):
                        live(done)
                if stop:
                    journal.stop(done, look)
                    if live:
                        live.page()
                    break
        if stop:
            signals.stop(done)
    finally:
        views.close()


def _look(job: Job, views: Ahead[Views], values: Values) -> dict[str, float]:
    assert views.last is not None
    return measure_health(
        job.method, views.last, values.teacher_temperature, job.dtype, job.teacher(), values.query_temperature
    )


def _probe(job: Job, start: int, images: Images | None) -> journal.Probe | None:
    """Scores of the images there are for it, and a watch if the run has weights to lose."""
    settings, run, schedules, weights = job.settings, job.run, job.schedules, partial(teacher, job)
    probe = None if images is None else Probe(settings, run, schedules, weights, images, job.device)
    if settings.model.init is None:
        return probe
    steps = schedules.steps_per_epoch, schedules.total_steps
    return continued.Watch(run, settings, weights, job.feed.source, job.device, steps, start, probe)


def _save(job: Job, writer: Writer, done: int) -> None:
    state = checkpoint.State(
        done,
        job.schedules.steps_per_epoch,
        job.fingerprint,
        {},
        distributed.world_size(),
        job.micro_batch,
    )
    writer.save(state, checkpoint.parts(job.method, job.optimizer), job.meter.total(), job.meter.decoder())


def _finish(job: Job, backbone: dict[str, Tensor]) -> None:
    """Exports the teacher's backbone and sums up the run."""
    run, settings = job.run, job.settings
    save_backbone(run.path, backbone, settings)
    metrics, timing = list(run.rows("metrics.jsonl")), list(run.rows("timing.jsonl"))
    unreadable = list(run.rows("quarantine.jsonl"))
    speeds = [row["images_per_second"] for row in timing if "images_per_second" in row]
    write_json(
        run.path / "results.json",
        {
            "steps": job.schedules.total_steps,
            "epochs": settings.train.epochs,
            "seconds_training": sum(row.get("seconds", 0.0) for row in timing),
            "images_per_second": float(np.median(speeds)) if speeds else None,
            "gpu_gib": torch.cuda.max_memory_allocated(job.device) / machine.GIB if job.device.type == "cuda" else None,
            "last": next((row for row in reversed(metrics) if row.get("loss") is not None), None),
            "probes": [row for row in metrics if any(name in row for name in (*NAMES, "drift_cosine"))],
            "unreadable_images": len(unreadable),
        },
    )
    finding = health.diagnose([row for row in metrics if "target_kl" in row])
    if learned := summary(metrics, finding and finding.name):
        print(learned)
    if unreadable:
        print(f"{len(unreadable)} images could not be read and were skipped: {run.path}/quarantine.jsonl lists them")
    print(f"done: {run.path}/backbone.safetensors")


def _too_large(job: Job) -> str:
    """One sentence with the size that fits, measured; with other processes, which are not asked, half is said."""
    job.optimizer.zero_grad(set_to_none=True)
    job.optimizer.state.clear()
    torch.cuda.empty_cache()
    local, less = job.micro_batch * job.accumulate, max(1, job.micro_batch // 2)
    fits = max(size for size in range(1, less + 1) if local % size == 0)
    if distributed.world_size() == 1:
        fits = fitted(job.method, job.settings, local, job.device, job.dtype, at_most=less)
    room = machine.available(job.device) / machine.GIB
    return (
        f"{job.micro_batch} images at once do not fit into {room:.0f} GiB of GPU memory; "
        f"set train.micro_batch_size={fits}"
    )
