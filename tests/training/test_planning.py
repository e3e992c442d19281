"""A plan against the run it is of, the model against its own constants, and the command as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import adclr as package
from adclr import cli
from adclr.config import parsing
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.data import augment
from adclr.data.decode import Decoder, Pixels
from adclr.data.feed import Feed
from adclr.model.named_tensors import Views
from adclr.system import machine
from adclr.training import launch, micro_batch, plan_cost, plan_gpus, plan_trial, planning
from adclr.training.step import Step
from tiny import TINY, Adclr, words

H200 = plan_gpus.GPUS["h200"]
MISTAKES = [  # arguments ({d}: images, {t}: an empty place), what the sentence says
    ([], "give the images, or their number as --images N; neither was given"),
    (["{d}", "--images", "5"], "not both"),
    (["{t}/nowhere", "--gpu", "h200"], "nowhere does not exist"),
    (["--images", "none"], "'none' is not a number from 1 on"),
    (["--images", "0"], "'0' is not a number from 1 on"),
    (["--images", "9", "--recipe", "adclr_vits16", "--gpu", "h200"], "fewer than train.batch_size=1024; set"),
    (["--images", "5000", "--gpu", "h20"], "unknown GPU 'h20'; did you mean 'h200'?"),
    (["--images", "5000", "--gpu", "a100"], "could be a100-40gb or a100-80gb"),
    (["--images", "5000", "--gpu-memory", "40"], "needs both --gpu-memory (GiB) and --gpu-tflops"),
    (["--images", "5000", "--gpu-memory", "-4"], "'-4' is not a number above 0"),
    (["--images", "5000", "--gpu-tflops", "0"], "'0' is not a number above 0"),
    (["--images", "5000", "--gpu", "h200", "--gpus", "3", "--recipe", "dino_vits16"], "does not divide over 3 GPUs"),
    (["--images", "5000", "--gpu", "h200", "--recipe", "dino_vit"], "unknown recipe 'dino_vit'; did you mean"),
    (["--images", "5000", "--gpu", "h200", "train.epoch=3"], "did you mean 'train.epochs'?"),
    (["--images", "5000", "--gpu", "h200", "recipe=dino_vits16"], "write --recipe dino_vits16"),
    (["{d}", "data.path=x", "--gpu", "h200"], "images were named twice"),
    (["--images", "5000", "--gpu", "h200", "precision=float32"], "are in bfloat16"),
    (["--images", "5000", "--gpu", "h200", "--json", "{t}"], "is a folder; give the name of a file"),
    (["--images", "5000", "--gpu", "h200", "--out", "{t}/a.md/run"], "a.md is a file"),
    (
        ["--images", "5000", "--gpu-memory", "1.5", "--gpu-tflops", "9", "--recipe", "adclr_vitb16"],
        "not even one image fits",
    ),
]


def refused(adclr: Adclr, arguments: list[str], message: str, **environment: str) -> None:
    done = adclr("plan", *arguments, **environment)
    assert done.returncode == 2, (done.stdout, done.stderr)
    (sentence,) = done.stderr.strip().splitlines()
    assert sentence.startswith("adclr: ")
    assert message in sentence


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes_are_one_sentence(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """In this process, since starting one for each takes longer than all of the rest."""
    (tmp_path / "a.md").write_text("no image")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", *(argument.format(d=images / "train", t=tmp_path) for argument in arguments)])
    assert stopped.value.code == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert sentence.startswith("adclr: ")
    assert message in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["a.md"]


def test_mistakes_of_where_it_runs(adclr: Adclr) -> None:
    few = ["--images", "5000", "--recipe", "adclr_vits16"]
    refused(adclr, [*few, "--gpus", "2"], "this machine has none to measure", CUDA_VISIBLE_DEVICES="")
    refused(adclr, [*few, "--gpu", "h200"], "leave out torchrun", WORLD_SIZE="2", RANK="0")


def test_where_the_gpu_decodes_its_rate_counts(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from adclr.data.nvjpeg import GpuDecoder

    asked: list[Feed] = []

    def rate(feed: Feed, batch: int = 4, batches: int = 2) -> float:
        asked.append(feed)
        return 1000 + real(feed, batch, batches) * 0

    real = Feed.rate
    monkeypatch.setattr(GpuDecoder, "suits", lambda _: True)
    monkeypatch.setattr(Feed, "rate", rate)
    file = tmp_path / "plan.json"
    cli.main(["plan", str(images / "train"), "--json", str(file), "--recipe", "adclr_vits16", *words(TINY)])
    assert json.loads(file.read_text())["decoded"]["images_per_second"] == 1000
    assert "about 1000 images/s" in capsys.readouterr().out
    assert asked[0].gpu_decoder is not None


def test_a_plan_is_of_the_run_that_follows(images: Path, tmp_path: Path, adclr: Adclr) -> None:
    out, file, tiny = tmp_path / "run", tmp_path / "plan.json", words(TINY)
    done = adclr("plan", images / "train", "--out", out, "--json", file, "--recipe", "adclr_vits16", *tiny)
    assert done.returncode == 0, done.stderr
    assert not out.exists()
    plan = json.loads(file.read_text())
    for word in ("recipe   adclr_vits16: 32 images, 2 epochs, 8 steps", "measured on", "CPU", "batch", "time", "free"):
        assert word in done.stdout
    assert f"written to {file}" in done.stdout
    run = package.pretrain(images / "train", out=out, recipe="adclr_vits16", **TINY)
    results = json.loads((run.path / "results.json").read_text())
    assert plan["steps"] == results["steps"]
    assert plan["measured"] is True
    (start,) = run.starts()
    assert plan["memory"]["micro_batch_size"] == start["micro_batch_size"]
    assert plan["memory"]["accumulate"] * plan["memory"]["micro_batch_size"] == 8
    assert plan["decoded"]["kept"] == "ram"
    assert plan["decoded"]["gib"] * 2**30 == pytest.approx(32 * 3 * 24 * 24)
    assert plan["time"]["hours"] * 3600 == pytest.approx(64 / plan["time"]["images_per_second"])
    size = sum(path.stat().st_size for path in (run.checkpoints / "latest").iterdir())
    assert plan["disk"]["checkpoint_gb"] * 1e9 == pytest.approx(size, rel=0.05)
    assert plan["disk"]["index_gb"] * 1e9 == pytest.approx((run.path / launch.INDEX).stat().st_size, abs=2000)
    assert plan["settings"] == parsing.build(Settings, plan["settings"]).model_dump(mode="json")
    assert plan["provenance"]["adclr"] == package.__version__


def test_the_model_is_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    settings = parsing.build(Settings, parsing.load_recipe("adclr_vits16"))
    plan = planning.plan_run(None, images=1_281_167, recipe="adclr_vits16", gpu=H200, num_gpus=8)
    text = capsys.readouterr().out
    assert "ESTIMATED, not measured: H200" in text
    assert plan["steps"] == 100 * 1251
    rate = 8 * 128 / planning.estimate_step_seconds(settings, H200, 128, 128, num_gpus=8)
    share = rate / 8 * plan_cost.flops(settings).step / 989e12
    assert f"of which {share:.0%} are assumed to be reached" in " ".join(text.split())
    assert plan["time"]["images_per_second"] == pytest.approx(rate)
    assert plan["time"]["hours"] == pytest.approx(100 * 1251 * 1024 / rate / 3600)
    memory = plan["memory"]
    assert (memory["micro_batch_size"], memory["accumulate"]) == (128, 1)
    small = planning.plan_run(None, images=1_281_167, recipe="adclr_vits16", gpu=plan_gpus.GPUS["l4"])["memory"]
    assert small["micro_batch_size"] * small["accumulate"] == 1024
    assert small["micro_batch_size"] <= small["images_that_fit"] < 2 * small["micro_batch_size"]
    assert small["fixed_gib"] + small["images_that_fit"] * small["image_gib"] <= micro_batch.GPU_SHARE * 22


# method (by its recipe), model.size, batch, images/s: of one H200, from docs/performance.md
MEASURED = [
    ("adclr_vits16", "small", 256, 2565),
    ("adclr_vits16", "small", 64, 2155),
    ("adclr_vits16", "base", 128, 925),
    ("adclr_vits16", "base", 64, 885),
    ("dino_vits16", "small", 256, 2706),
    ("dino_vits16", "base", 128, 964),
    ("ibot_vits16", "small", 256, 2574),
    ("adclr_mim_vits16", "base", 128, 905),
]


@pytest.mark.parametrize(("recipe", "size", "batch", "measured"), MEASURED)
def test_the_model_gives_what_was_measured(recipe: str, size: str, batch: int, measured: float) -> None:
    told = {"size": size, "batch_size": batch}
    plan = planning.plan_run(None, images=5000, recipe=recipe, gpu=H200, overrides=told)
    assert plan["memory"]["micro_batch_size"] == batch
    assert plan["time"]["images_per_second"] == pytest.approx(measured, rel=0.1)


def test_the_estimate_knows_checkpointing_compiling_and_cuda_graphs() -> None:
    def plan(num_gpus: int = 1, **changes: Any) -> Any:
        told = {"batch_size": 64} | changes
        return planning.plan_run(None, images=5000, recipe="adclr_vits16", gpu=H200, num_gpus=num_gpus, overrides=told)

    def rate(plan: Any) -> float:
        return float(plan["time"]["images_per_second"])

    usual, again, unrecorded = plan(), plan(checkpoint_activations=True), plan(cuda_graph="off")
    assert again["memory"]["image_gib"] < 0.35 * usual["memory"]["image_gib"]
    # a forward of the student's blocks more: about a fifth of all
    assert 0.75 * rate(usual) < rate(again) < 0.9 * rate(usual)
    assert again["time"]["gflop_per_image"] == usual["time"]["gflop_per_image"]
    assert unrecorded["memory"]["image_gib"] < usual["memory"]["image_gib"]
    assert rate(unrecorded) == pytest.approx(879, rel=0.15)  # at this batch; `docs/log.md`
    compiled, uncompiled = plan(compile="on"), plan(compile="off")  # both are recorded
    assert uncompiled["memory"] == usual["memory"]
    assert 0.98 * rate(compiled) < rate(uncompiled) == rate(usual)  # of 7800 steps
    assert rate(plan(epochs=1000)) == rate(compiled) > rate(uncompiled)
    # neither micro-batches nor several processes are recorded
    for halves in (plan(batch_size=128, micro_batch_size=64), plan(2, batch_size=128)):
        assert rate(halves) / halves["gpus"] == pytest.approx(rate(unrecorded))
    large, large_off = plan(batch_size=256, compile="on"), plan(batch_size=256, compile="off")
    assert rate(large_off) == pytest.approx(0.987 * rate(large), rel=0.005)


@pytest.mark.parametrize(("changes", "expected"), [({}, (1, 8)), ({"micro_batch_size": 4}, (2, 4))])
def test_steps_are_timed_as_training_takes_them(
    images: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], expected: tuple[int, int]
) -> None:
    """(micro-batches, images of each), after a step of two images to see how long they take."""
    taken = set()
    take = Step.accumulate_gradients

    def learn(step: Step, views: list[Views], *temperatures: float) -> torch.Tensor:
        taken.add((step.accumulate, len(views), views[0].global_crops.shape[1]))
        return take(step, views, *temperatures)

    monkeypatch.setattr(Step, "accumulate_gradients", learn)
    plan = planning.plan_run(str(images / "train"), recipe="adclr_vits16", overrides=TINY | changes)
    accumulate, count = expected
    assert taken == {(1, 1, 2), (accumulate, accumulate, count)}
    assert plan["memory"]["accumulate"] == accumulate
    assert f"with steps of {'2 × 4' if accumulate > 1 else '8'} random images" in plan["basis"]


def work(seconds: float) -> None:
    """Uses so much CPU time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.mark.usefixtures("one_thread")
def test_a_slow_model_is_timed_by_two_images(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def learn(_: Step, views: list[Views], *__: object) -> None:
        taken.append(views[0].global_crops.shape[1])
        work(0.02)

    monkeypatch.setattr(Step, "__call__", learn)
    monkeypatch.setattr(plan_trial, "CPU_STEP_SECONDS", 0.02)
    plan = planning.plan_run(str(images / "train"), recipe="adclr_vits16", overrides=TINY)
    assert set(taken) == {2}
    assert plan["time"]["steps_images_per_second"] == pytest.approx(100, rel=0.5)


@pytest.mark.parametrize(("slowdown", "expected"), [(1, 8), (9, 8), (200, 2)])
def test_a_busy_machine_does_not_change_how_many_images_are_timed(
    images: Path, monkeypatch: pytest.MonkeyPatch, slowdown: float, expected: int
) -> None:
    """Unless a step took minutes: an update that takes as long for 2 images as for 8 would count four times."""

    def seconds(work: Callable[[], object], _: int) -> tuple[float, float]:
        work()
        return 0.5, 0.5 * slowdown

    monkeypatch.setattr(plan_trial, "_cpu_seconds", seconds)
    monkeypatch.setattr(Step, "__call__", lambda *_: None)
    plan = planning.plan_run(str(images / "train"), recipe="adclr_vits16", overrides=TINY)
    assert f"with steps of {expected} random images" in " ".join(plan["basis"].split())


@pytest.mark.usefixtures("one_thread")
def test_a_plan_does_not_count_what_is_paid_once(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first image of a thread, nor the first step, nor the part of a step that its images share."""
    threads, steps = set(), list[int]()
    decode = Decoder.__call__

    def first_is_slow(decoder: Decoder, data: bytes) -> Pixels:
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            time.sleep(0.5)
        return decode(decoder, data)

    def learn(*_: object) -> None:
        steps.append(1)
        work(1.0 if len(steps) == 1 else 0.1)  # whatever the number of images

    monkeypatch.setattr(Decoder, "__call__", first_is_slow)
    monkeypatch.setattr(Step, "__call__", learn)
    plan = planning.plan_run(str(images / "train"), recipe="adclr_vits16", overrides=TINY | {"cache": "off"})
    assert plan["decoded"]["images_per_second"] > 200
    assert plan["time"]["steps_images_per_second"] == pytest.approx(80, rel=0.3)  # 8 images in 0.1 seconds


@pytest.mark.usefixtures("one_thread")
def test_a_plan_is_the_same_on_a_busy_machine(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside three processes for each core a step takes four times as long, which is no property of the run.

    Its steps take a known CPU time for each image, on one thread; those of a tiny network take milliseconds and vary
    threefold.
    """

    def learn(_: Step, views: list[Views], *__: object) -> None:
        work(0.02 * sum(one.global_crops.shape[1] for one in views))

    monkeypatch.setattr(Step, "__call__", learn)

    def plan() -> Any:
        return planning.plan_run(str(images / "train"), recipe="adclr_vits16", overrides=TINY)

    quiet, others = plan(), []
    try:
        for _ in range(3 * machine.cpu_count()):
            others.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        busy = plan()
    finally:
        for other in others:
            other.kill()
            other.wait()
    rates = [one["time"]["steps_images_per_second"] for one in (quiet, busy)]
    assert rates[1] > rates[0] / 2
    assert re.search(r"other programs make it \d+\.\d times slower", busy["basis"])


@pytest.mark.usefixtures("one_thread")
def test_on_a_cpu_views_and_decoding_take_time_too(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    render = augment.render

    def slow(packed: Any, *rest: Any) -> Views:
        work(0.05 * len(packed.sizes))
        return render(packed, *rest)

    def plan(**changes: Any) -> Any:
        return planning.plan_run(str(images / "train"), recipe="adclr_vits16", overrides=TINY | changes)

    monkeypatch.setattr(augment, "render", slow)
    kept = plan()["time"]
    assert 10 < kept["images_per_second"] < 20
    parts = 1 / kept["steps_images_per_second"] + 1 / kept["views_images_per_second"]
    assert kept["images_per_second"] == pytest.approx(1 / parts)
    monkeypatch.setattr(Feed, "rate", lambda feed, *_: 30.0)
    again = plan(cache="off")["time"]
    parts = 1 / again["steps_images_per_second"] + 1 / again["views_images_per_second"] + 1 / 30
    assert again["images_per_second"] == pytest.approx(1 / parts)


def test_a_plan_without_images_has_views_of_noise(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planning.plan_run(None, images=50, recipe="adclr_vits16", overrides=TINY)
    assert plan["time"]["images_per_second"] < plan["time"]["views_images_per_second"]
    views = f"{plan['time']['views_images_per_second']:.0f}"
    assert f"and their views at {views}, without probes" in " ".join(capsys.readouterr().out.split())


def test_who_should_not_start_is_warned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {"images": 50_000_000, "recipe": "adclr_vitb16", "gpu": plan_gpus.GPUS["l4"]}
    plan = planning.plan_run(None, **told, out=tmp_path / "run")
    (warning,) = plan["warnings"]
    assert warning.startswith("it takes about ")
    assert "days; fewer train.epochs, a smaller model.size" in warning
    monkeypatch.setattr(planning, "_free_bytes", lambda path: 1e6)
    plan = planning.plan_run(None, **told, overrides={"micro_batch_size": 1024}, out=tmp_path / "run")
    first, _, last = plan["warnings"]
    assert "train.micro_batch_size=1024 does not fit: at most" in first
    assert "has 1 MB free" in last


def test_without_a_recipe_one_is_chosen_as_pretrain_would(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planning.plan_run(str(images / "train"), gpu=H200)
    assert plan["recipe"] == "auto: adclr_plus_small"
    assert "24 pixels are small images" in capsys.readouterr().out
    plan = planning.plan_run(None, images=2_000_000, gpu=H200)
    assert plan["recipe"] == "auto: adclr_plus_vitb16"
    assert "image size assumed: 256 pixels" in capsys.readouterr().out


def test_images_on_the_gpu_leave_less_room(images: Path) -> None:
    def plan(**changes: Any) -> Any:
        return planning.plan_run(str(images / "train"), gpu=H200, recipe="adclr_vits16", overrides=TINY | changes)

    free, taken = plan(cache="off"), plan(cache="gpu")
    assert (free["decoded"]["kept"], taken["decoded"]["kept"]) == (None, "gpu")
    assert free["memory"]["images_that_fit"] > taken["memory"]["images_that_fit"]
    with pytest.raises(UserError, match="not on a GPU"):
        planning.plan_run(str(images / "train"), recipe="adclr_vits16", overrides=TINY | {"cache": "gpu"})


def test_names_of_gpus() -> None:
    for name in ("h200", "H200", "NVIDIA H200"):
        assert plan_gpus.find_gpu(name, None, None) == H200
    for name in ("NVIDIA GeForce RTX 4090", "rtx-4090", "rtx_4090"):
        assert plan_gpus.find_gpu(name, None, None) == plan_gpus.GPUS["rtx4090"]
    assert plan_gpus.find_gpu("A100 80GB", None, None) == plan_gpus.GPUS["a100-80gb"]
    assert plan_gpus.find_gpu("a10", 12.0, None) == plan_gpus.Gpu("A10", 12.0, 125)
    assert plan_gpus.find_gpu(None, 10.0, 20.0) == plan_gpus.Gpu("a GPU", 10.0, 20.0)
    assert plan_gpus.find_gpu(None, None, None) is None


def test_too_many_images_at_once_are_told_which_number_fits(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("adclr.training.step.Step.__call__", full)
    with pytest.raises(UserError, match=r"8 images at once do not fit into .* GiB; set train\.micro_batch_size=4"):
        planning.plan_run(str(images / "train"), recipe="adclr_vits16", overrides=TINY)


def test_help_lists_the_settings_at_once(adclr: Adclr) -> None:
    started = time.monotonic()
    text = adclr("plan", "--help", fresh=True).stdout
    assert time.monotonic() - started < 3
    for word in ("--images", "--gpu-memory", "--json", "train.batch_size", "h200"):
        assert word in text
