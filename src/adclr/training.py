"""Pretraining: build -> resume -> loop -> export."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adclr import auto, cache, checkpoint, distributed, fit, health, launch, optim
from adclr.ahead import Ahead
from adclr.augment import Views, render
from adclr.config import UserError
from adclr.decode import Decoder
from adclr.devices import autocast_dtype, choose
from adclr.draws import combine, epoch_order, key_of
from adclr.feed import Batch, Feed
from adclr.heads import ProjectionHead
from adclr.journal import Journal
from adclr.launch import Launch
from adclr.meter import Meter
from adclr.method import ADCLR, Branch
from adclr.nvjpeg import GpuDecoder
from adclr.probe import NAMES, Images, Probe, open_images, summary
from adclr.runs import Run, write_json
from adclr.settings import Settings
from adclr.sharding import Sharded
from adclr.signals import Signals
from adclr.speed import Compiled, prepare, ready, repeatable
from adclr.step import Step
from adclr.views import plan
from adclr.weights import architecture, save_backbone
from adclr.writer import Writer

CHECKPOINT_STEPS = 500  # least number of steps between checkpoints where no number is set


def pretrain(
    data: str | Path | None, out: str | Path, recipe: str | Path | None = None, resume: bool = False, **settings: Any
) -> Run:
    """`pretrain("photos/", out="runs/photos", recipe="adclr_vits16", epochs=100)`: trains, or goes on, to the end."""
    return run(launch.prepare(data, out, recipe, settings, resume))


def build(settings: Settings) -> ADCLR:
    """The method that settings describe, newly initialised from their seed."""
    torch.manual_seed(combine(settings.train.seed, key_of("initial weights")) % 2**63)
    method, shape = settings.method, architecture(settings)

    def branch(drop_path: float) -> Branch:
        head = ProjectionHead(
            shape.dim,
            method.num_prototypes,
            method.head_hidden_dim,
            method.head_bottleneck_dim,
            method.train_gain,
        )
        return Branch(shape.build(drop_path, mask_token=settings.masked), head)

    return ADCLR(
        branch(settings.model.drop_path),
        branch(0.0),
        query_weight=method.query_weight,
        masked_weight=method.masked_weight,
        student_temperature=method.student_temperature,
        center_momentum=method.center_momentum,
        center=method.center,
        target=method.target,
        queries_in_local_views=method.queries_in_local_views,
    )


@dataclass(frozen=True)
class Job:
    """All that a pretraining consists of while it runs."""

    settings: Settings
    run: Run
    method: ADCLR
    optimizer: torch.optim.AdamW
    state: checkpoint.State | None  # where it was resumed, if it was
    schedules: optim.Schedules
    feed: Feed
    device: torch.device
    dtype: torch.dtype | None  # of autocast
    micro_batch: int  # images at once in this process
    meter: Meter
    fingerprint: str  # of the collection
    sharded: Sharded | None = None

    def teacher(self) -> Branch:
        """Whole; all processes must ask."""
        return self.method.teacher if self.sharded is None else self.sharded.teacher()

    @property
    def accumulate(self) -> int:
        return self.settings.train.batch_size // distributed.world_size() // self.micro_batch


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
            _train(job, start, step, _probe(job, images))
        except torch.OutOfMemoryError:
            fits = False  # what fits is measured below, where the traceback no longer holds on to memory
        if not fits:
            step = None  # with the memory that it has recorded
            raise UserError(_too_large(job))
        backbone = job.teacher().backbone.state_dict()
        if distributed.is_main():
            _finish(job, backbone)
        distributed.barrier()
    return run


def assemble(launched: Launch, device: torch.device, before: int | None = None) -> Job:
    """The job, resumed; from a checkpoint before a step if one is given."""
    settings, source, run = launched.settings, launched.source, launched.run
    method = build(settings).to(device)
    dtype = autocast_dtype(settings.train.precision, device)
    optimizer = optim.make_optimizer(method.student, settings)
    if before is None:
        state = checkpoint.load(run, method, optimizer)
    else:
        state = checkpoint.load_before(before, run, method, optimizer)
    if state is not None:
        _check_resumable(launched, state)

    listed = {row.get("path") for row in run.rows("quarantine.jsonl")}

    def quarantine(path: str, reason: str) -> None:
        row = {"path": path, "reason": reason}
        if distributed.world_size() > 1:
            run.append_once("quarantine.jsonl", row, key="path")  # reads the file, so that no process repeats another
        elif path not in listed:
            run.append("quarantine.jsonl", row)

    workers = settings.data.num_workers
    feed = Feed(
        source,
        auto.cpu_count() if workers is None else workers,
        decoder(settings),
        settings.data.max_unreadable,
        pin=device.type == "cuda",
        on_unreadable=quarantine,
        gpu_decoder=GpuDecoder(decoder(settings), device) if GpuDecoder.suits(device) else None,
    )
    gpu = fit.available(device) if device.type == "cuda" else 0.0
    room = cache.Room(fit.host_memory() / distributed.local_world_size(), gpu)
    show = distributed.is_main()
    feed.store = cache.make(settings.data.cache, feed.read, len(source), feed.num_workers, room, device, show)
    return Job(
        settings=settings,
        run=run,
        method=method,
        optimizer=optimizer,
        state=state,
        schedules=optim.Schedules(settings, len(source) // settings.train.batch_size),
        feed=feed,
        device=device,
        dtype=dtype,
        micro_batch=_micro_batch(settings, state, method, device, dtype),
        meter=Meter(device, settings.train.log_every_steps),
        fingerprint=source.fingerprint(),
    )


def decoder(settings: Settings) -> Decoder:
    data = settings.data
    return Decoder(data.max_pixels, settings.model.num_channels, data.max_value, data.shrink_above, data.max_side)


def _micro_batch(
    settings: Settings, state: checkpoint.State | None, method: ADCLR, device: torch.device, dtype: torch.dtype | None
) -> int:
    """The one that is set; or that of the run so far, so that drop path draws the same; or the one that fits."""
    if settings.train.micro_batch_size:
        return settings.train.micro_batch_size
    if state is not None and state.processes == distributed.world_size():
        return state.micro_batch_size
    local_batch = settings.train.batch_size // distributed.world_size()
    fitted = fit.fitted(method, settings, local_batch, device, dtype)
    return int(distributed.min_(torch.tensor(float(fitted), device=device)).item())  # the same in every process


def _check_resumable(launched: Launch, state: checkpoint.State) -> None:
    root, run, settings = launched.source.root, launched.run, launched.settings
    if state.fingerprint != launched.source.fingerprint() and not settings.data.allow_changed:
        raise UserError(
            f"{root} does not hold the images that {run.path} was started with; "
            "restore them or set data.allow_changed=true"
        )
    steps = len(launched.source) // settings.train.batch_size
    if state.steps_per_epoch != steps:
        raise UserError(
            f"{root} gives {steps} steps an epoch where {run.path} had {state.steps_per_epoch}, "
            "so its schedules no longer fit; restore the images or choose another --out"
        )


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
        checkpoint.tidy(run)
        for name in ("metrics.jsonl", "timing.jsonl", "voided.jsonl"):
            run.cut(name, -1 if state is None else start)
        if launched.source.listing is not None:
            launched.source.listing.save(run.path / launch.INDEX)
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
        "automatic_choice": launched.reasons,
    }


def order(job: Job, start: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(epoch, indices) of every micro-batch of this process, from a step on."""
    local = job.settings.train.batch_size // distributed.world_size()
    for epoch, batch in batches_of(job, start):
        mine = batch[distributed.rank() * local :][:local]
        for micro in range(0, local, job.micro_batch):
            yield epoch, mine[micro : micro + job.micro_batch]


def batches_of(job: Job, start: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(epoch, indices) of every step from one on, over all processes."""
    per_epoch, size = job.schedules.steps_per_epoch, job.settings.train.batch_size
    for step in range(start, job.schedules.total_steps):
        epoch, place = divmod(step, per_epoch)
        if place == 0 or step == start:
            shuffled = epoch_order(job.settings.train.seed, epoch, job.feed.source.keys)
        yield epoch, shuffled[place * size : (place + 1) * size]


def _keys(job: Job, step: int) -> list[str]:
    """Of the images of a step, which is counted from 1."""
    _, indices = next(batches_of(job, step - 1))
    return [f"{key:016x}" for key in job.feed.source.keys[indices]]


def views_of(job: Job, order: Iterable[tuple[int, NDArray[np.int64]]]) -> Ahead:
    """The views of each (epoch, indices)."""
    data = job.settings.data
    batches = job.feed.batches(order, lambda epoch, keys, sizes: plan(job.settings, epoch, keys, sizes))

    def make(batch: Batch) -> Views:
        return render(batch.packed.to(job.device), batch.plan, data.mean, data.std)

    return Ahead(batches, make, job.device)


def _train(job: Job, start: int, take: Step, probe: Probe | None) -> None:
    settings, schedules, total = job.settings, job.schedules, job.schedules.total_steps
    every = settings.train.checkpoint_every_steps or max(CHECKPOINT_STEPS, schedules.steps_per_epoch)
    views, stop = views_of(job, order(job, start)), False
    try:
        with (
            Journal(settings, job.run, schedules, job.meter, views, lambda step: _keys(job, step), start) as journal,
            Signals(journal.say) as signals,
            Writer(job.run, settings, journal.say) as writer,
        ):
            if probe and probe.missing(start):
                journal.score(start, lambda: probe(signals))
            for step in range(start, total):
                values = schedules.at(step)
                losses, ok = take(seeded(job, views, step), values)
                done = step + 1
                journal.step(done, values, losses, ok, partial(_look, job, views, values))
                if probe and probe.due(done):
                    journal.score(done, lambda: probe(signals))
                stop = signals.asked()
                if stop or done % every == 0 or done == total:
                    _save(job, writer, done)
                writer.check()
                if stop:
                    break
        if stop:
            signals.stop(done)
    finally:
        views.close()


def _look(job: Job, views: Ahead, values: optim.Values) -> dict[str, float]:
    assert views.last is not None
    return health.measure(job.method, views.last, values.teacher_temperature, job.dtype, job.teacher())


def _probe(job: Job, images: Images | None) -> Probe | None:
    if images is None:
        return None
    return Probe(job.settings, job.run, job.schedules, lambda: job.teacher().backbone, images, job.device)


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


def seeded(job: Job, views: Iterator[Views], step: int) -> Iterator[Views]:
    """The views of each micro-batch of a step."""
    for micro in range(job.accumulate):
        seen = next(views)
        torch.manual_seed(drop_path_seed(job.settings, step, micro))
        yield seen


def drop_path_seed(settings: Settings, step: int, micro: int) -> int:
    """Drop path is all that draws from a generator; it starts anew here so that a resumed step draws the same."""
    return combine(settings.train.seed, step, distributed.rank(), micro) % 2**63


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
            "gpu_gib": torch.cuda.max_memory_allocated(job.device) / fit.GIB if job.device.type == "cuda" else None,
            "last": next((row for row in reversed(metrics) if row.get("loss") is not None), None),
            "probes": [row for row in metrics if any(name in row for name in NAMES)],
            "unreadable_images": len(unreadable),
        },
    )
    if learned := summary(metrics):
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
        fits = fit.fitted(job.method, job.settings, local, job.device, job.dtype, at_most=less)
    room = fit.available(job.device) / fit.GIB
    return (
        f"{job.micro_batch} images at once do not fit into {room:.0f} GiB of GPU memory; "
        f"set train.micro_batch_size={fits}"
    )
