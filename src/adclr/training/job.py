"""Everything one training works with: method, optimizer, images, and the checkpoint that a run resumes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from adclr.config.distillation import DistillSettings
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.data.batches import TrainingBatches
from adclr.data.decode import Decoder
from adclr.data.feed import Feed
from adclr.data.file_stamps import Stamps
from adclr.data.nvjpeg import GpuDecoder
from adclr.data.random_draws import combine, key_of
from adclr.model.compiled import CompileResult, compile_blocks
from adclr.model.distillation import Student
from adclr.model.heads import ProjectionHead
from adclr.model.method import ADCLR, Branch
from adclr.model.vit import VisionTransformer
from adclr.system import distributed, machine
from adclr.system.devices import autocast_dtype
from adclr.system.runs import Run
from adclr.training import checkpoint, continued_pretraining, distillation, launch
from adclr.training.fsdp import Sharded
from adclr.training.launch import Launch
from adclr.training.meter import Meter
from adclr.training.methods import Method, evaluated, loss_names, vits
from adclr.training.micro_batch import choose_micro_batch, needed_memory, random_views
from adclr.training.plan_cost import compiles_blocks
from adclr.training.schedules import Schedules, make_optimizer
from adclr.weights import snapshot
from adclr.weights.backbone import Weights, architecture


def _build_method(settings: Settings) -> Method:
    """Return the method of either kind of settings."""
    return distillation.build(settings) if isinstance(settings, DistillSettings) else build(settings)


def build(settings: Settings) -> ADCLR:
    """Return the method that settings describe, its weights initialized from their seed."""
    torch.manual_seed(combine(settings.train.seed, key_of("initial weights")) % 2**63)
    method, shape = settings.method, architecture(settings)

    def head(num_prototypes: int) -> ProjectionHead:
        sizes = method.head_hidden_dim, method.head_bottleneck_dim
        return ProjectionHead(shape.dim, num_prototypes, *sizes, method.train_gain)

    def branch(drop_path: float) -> Branch:
        first = head(method.num_prototypes)
        second = head(method.neighbor_prototypes) if method.neighbor_weight else None
        return Branch(shape.build(drop_path, mask_token=settings.masked), first, second)

    model = ADCLR(
        branch(settings.model.drop_path),
        branch(0.0),
        query_weight=method.query_weight,
        masked_weight=method.masked_weight,
        neighbor_weight=method.neighbor_weight,
        num_neighbors=method.num_neighbors,
        student_temperature=method.student_temperature,
        center_momentum=method.center_momentum,
        center=method.center,
        target=method.target,
        queries_in_local_views=method.queries_in_local_views,
        anchored_queries=settings.num_anchored,
        read_only_copies=method.read_only_copies,
        anchor=shape.build() if method.anchor_weight else None,
        anchor_weight=method.anchor_weight,
    )
    model.parallel_teacher = settings.train.parallel_teacher
    if settings.train.checkpoint_activations:
        model.student.backbone.checkpoint_blocks()
    for backbone in (model.student.backbone, model.teacher.backbone):
        backbone.float32_residual = settings.train.residual_precision == "float32"
    return model


def compile_method(
    method: Method,
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype | None,
    micro_batch: int,
    total_steps: int | None = None,  # of the run; None: many
) -> CompileResult | None:
    """Compile the blocks of both backbones for micro-batches of this size; None where `compiles_blocks` is false.

    On a CPU they are compiled under `train.compile=on` only. The trial step that compiles leaves weights, gradients and
    centers as they were.
    """
    on_cpu = device.type == "cpu" and settings.train.compile == "auto"
    if on_cpu or not compiles_blocks(settings, micro_batch, total_steps):
        return None

    def trial() -> None:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            losses = method(random_views(settings, micro_batch, device), settings.method.teacher_temperature)
        losses.total.backward()

    compiled = compile_blocks(vits(method), trial)
    method.forget()
    return compiled


@dataclass(frozen=True)
class Job:
    """All parts of a training while it runs."""

    settings: Settings
    run: Run
    method: Method
    optimizer: torch.optim.AdamW
    state: checkpoint.State | None  # of the checkpoint it was resumed from, if any
    schedules: Schedules
    feed: Feed
    batches: TrainingBatches
    device: torch.device
    dtype: torch.dtype | None  # of autocast
    micro_batch: int  # images at once in this process
    meter: Meter
    fingerprint: str  # of the collection
    stamps: Stamps | None  # of its images, in the first process
    init: str | None  # fingerprint of the weights that this start has read, if it has
    sharded: Sharded | None = None

    @property
    def start(self) -> int:
        """Steps done when it was resumed; 0 for a new run."""
        return 0 if self.state is None else self.state.step

    @property
    def accumulate(self) -> int:
        """Micro-batches of a step in this process."""
        return self.settings.train.batch_size // distributed.world_size() // self.micro_batch

    def evaluated(self) -> Branch | Student:
        """Return what is scored and exported, with all of its weights; all processes must call it.

        The teacher, always the same object, or of a distillation a copy of the student.
        """
        return evaluated(self.method) if self.sharded is None else self.sharded.teacher()


def load_job(launched: Launch, device: torch.device, before: int | None = None) -> Job:
    """Build all parts of a run and restore its newest checkpoint, or the newest before a step; write nothing.

    Without a checkpoint the run starts at step 0. `record_start` then brings the files of the run to the same step.
    """
    settings, source, run = launched.settings, launched.source, launched.run
    data, dtype = settings.data, autocast_dtype(settings.train.precision, device)
    feed = Feed(
        source,
        machine.cpu_share() if data.num_workers is None else data.num_workers,
        decoder(settings),
        data.max_unreadable,
        pin=device.type == "cuda",
        on_unreadable=_quarantine(run),
        gpu_decoder=GpuDecoder(decoder(settings), device) if GpuDecoder.suits(device) else None,
    )
    with feed.keeping(data.cache, device):  # images are decoded meanwhile
        method = _build_method(settings).to(device)
        optimizer = make_optimizer(method.student, settings)
        if before is None:
            state = checkpoint.load(run, method, optimizer)
        else:
            state = checkpoint.load_before(before, run, method, optimizer)
        meter = Meter(device, settings.train.log_every_steps, loss_names(method))
        now = launch.read_stamps(launched) if distributed.is_main() else None
        if state is not None:
            _check_resumable(launched, state, now)
            meter.restore(state.meter)
        init = None
        if state is None and settings.model.init:
            assert isinstance(method, ADCLR)
            init = continued_pretraining.load_init(method, settings)
        if state is not None and isinstance(method, ADCLR):
            continued_pretraining.load_anchor(method, run)
        micro_batch = _known_micro_batch(settings, state)
        needed = needed_memory(method, settings, device, dtype) if micro_batch is None else (0.0, 0.0)
        launched.mark("network")
    launched.mark("images")
    if micro_batch is None:
        images = choose_micro_batch(needed, settings.train.batch_size // distributed.world_size(), device)
        # the same in every process
        micro_batch = int(distributed.all_reduce_min(torch.tensor(float(images), device=device)).item())
    return Job(
        settings=settings,
        run=run,
        method=method,
        optimizer=optimizer,
        state=state,
        schedules=Schedules(settings, len(source) // settings.train.batch_size),
        feed=feed,
        batches=TrainingBatches(settings, feed, device, micro_batch),
        device=device,
        dtype=dtype,
        micro_batch=micro_batch,
        meter=meter,
        fingerprint=source.fingerprint(),
        stamps=now,
        init=init,
    )


def record_start(job: Job, launched: Launch, compiled: CompileResult | None) -> None:
    """Write the settings and provenance of this start, and remove the rows of steps that will be done again."""
    run, source = job.run, launched.source
    distributed.barrier()  # all processes have read what the first one is about to write over
    if not distributed.is_main():
        return
    # data.allow_changed holds for one start only
    data = job.settings.data.model_copy(update={"allow_changed": False})
    if job.state is None and isinstance(job.method, ADCLR):
        continued_pretraining.save_anchor(job.method, run)
    run.write_settings(job.settings.model_copy(update={"data": data}))
    run.add_provenance(_provenance(job, launched, compiled))
    snapshot.remove_leftovers(run)
    for name in ("metrics.jsonl", "timing.jsonl", "voided.jsonl"):
        run.cut(name, -1 if job.state is None else job.start)
    if source.listing is not None:
        source.listing.save(run.path / launch.INDEX)
    if job.stamps is not None:
        job.stamps.save(run.path / launch.STAMPS, source.keys)
    run.cut("quarantine.jsonl", float("inf"))  # only the part of a line that a crash left


def shard(job: Job) -> Job:
    """Return the job with its weights spread over the processes, where settings ask for it and there are several."""
    if not job.settings.train.shard or not distributed.in_group():
        return job
    assert isinstance(job.method, ADCLR), "a distillation has no setting train.shard"
    if job.device.type == "cuda" and machine.gpu_sharers() > 1:
        # torch 2.11: gloo's all_gather_into_tensor of CUDA tensors ends in a segmentation fault
        raise UserError("train.shard=true needs a GPU for each process; leave it out where processes share one")
    sharded = Sharded(job.method, job.optimizer, job.settings, job.device)
    return replace(job, sharded=sharded, optimizer=sharded.optimizer)


def decoder(settings: Settings) -> Decoder:
    """Return the decoder that settings describe."""
    data = settings.data
    return Decoder(data.max_pixels, settings.model.num_channels, data.max_value, data.shrink_above, data.max_side)


def _quarantine(run: Run) -> Callable[[str, str], None]:
    """Return a function that lists an unreadable image in quarantine.jsonl, once."""
    listed = {row.get("path") for row in run.rows("quarantine.jsonl")}

    def quarantine(path: str, reason: str) -> None:
        row = {"path": path, "reason": reason}
        if distributed.world_size() > 1:
            run.append_once("quarantine.jsonl", row, key="path")  # reads the file, so that no process repeats another
        elif path not in listed:
            run.append("quarantine.jsonl", row)

    return quarantine


def _known_micro_batch(settings: Settings, state: checkpoint.State | None) -> int | None:
    """Return the size that is set, or that of the run so far, so that drop path draws the same; None: one that fits."""
    if settings.train.micro_batch_size:
        return settings.train.micro_batch_size
    if state is not None and state.processes == distributed.world_size():
        return state.micro_batch_size
    return None


def _provenance(job: Job, launched: Launch, compiled: CompileResult | None) -> dict[str, Any]:
    """Return what provenance.json says of this start beside the command and versions."""
    teacher = {"teacher": distillation.origin(job.settings)} if isinstance(job.settings, DistillSettings) else {}
    return teacher | {
        "from_step": job.start,
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


def _check_resumable(launched: Launch, state: checkpoint.State, now: Stamps | None) -> None:
    """Raise a UserError if images or settings are not those that a checkpoint was written with."""
    root, run, settings = launched.source.root, launched.run, launched.settings
    if state.fingerprint != launched.source.fingerprint() and not settings.data.allow_changed:
        raise UserError(
            f"{root} does not hold the images that {run.path} was started with; "
            "restore them or set data.allow_changed=true"
        )
    change = None if now is None or settings.data.allow_changed else launch.describe_replaced(launched, now)
    if change is not None:
        raise UserError(f"{change} since {run.path} was started; restore what was there or set data.allow_changed=true")
    steps = len(launched.source) // settings.train.batch_size
    if state.steps_per_epoch != steps:
        raise UserError(
            f"{root} gives {steps} steps an epoch where {run.path} had {state.steps_per_epoch}, "
            "so its schedules no longer fit; restore the images or choose another --out"
        )
    batch = settings.train.batch_size
    if state.step > steps * settings.train.epochs or batch % (state.processes * state.micro_batch_size):
        raise UserError(
            f"{run.checkpoints}/step_{state.step} has {state.step} steps done by {state.processes} processes of "
            f"{state.micro_batch_size} images at once, which its settings do not allow; delete it to resume another"
        )


def evaluated_weights(job: Job) -> Weights:
    """Return what an evaluation takes; all processes must call it."""
    data = job.settings.data
    return Weights(cast(VisionTransformer, job.evaluated().backbone), data.mean, data.std, data.max_value)
