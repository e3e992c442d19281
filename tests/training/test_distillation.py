"""Distillation as users run it: learning, exact resume, several processes, other networks, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import nn

import adclr as package
from adclr import cli
from adclr.config import parsing
from adclr.config.distillation import DistillSettings
from adclr.config.parsing import UserError
from adclr.config.settings import Settings
from adclr.data.sets import scenes
from adclr.data.sets.classes import open_labeled
from adclr.evals.features import CenterCrops
from adclr.features.reader import normalizer
from adclr.report import health
from adclr.system import optional
from adclr.system.runs import Run
from adclr.training import distillation, launch, loop, replay
from adclr.training.methods import evaluated
from adclr.weights import networks
from adclr.weights.backbone import Weights, architecture, load_weights, save_backbone
from dense_scenes import segmented
from tiny import TINY, TINY_STUDENT, Adclr, adclr_command, tiny, words

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone of other width than the students', with all its numbers drawn, and a normalization of its own."""
    folder = tmp_path_factory.mktemp("teacher")
    settings = tiny(model__dim=24, model__num_heads=3, data__mean=(0.3, 0.4, 0.5), data__std=(0.2, 0.3, 0.1))
    torch.manual_seed(1)
    state = architecture(settings).build().state_dict()
    save_backbone(folder, {name: 0.2 * torch.randn_like(tensor) for name, tensor in state.items()}, settings)
    return folder


def distill(teacher: Path, data: Path, out: Path, **changes: Any) -> Run:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return package.distill(teacher, data, out, **(TINY_STUDENT | named))


def assert_same(a: Path, b: Path) -> None:
    left, right = load_file(a), load_file(b)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def train_supervised(data: Path, out: Path) -> Path:
    """Train a teacher on the labels, which takes seconds."""
    settings, labeled, cpu = tiny(model__dim=32, model__num_heads=4), open_labeled(str(data)), torch.device("cpu")
    torch.manual_seed(0)
    vit = architecture(settings).build()
    weights = Weights(vit, settings.data.mean, settings.data.std)
    (group,) = next(iter(CenterCrops(weights, labeled.train.source, cpu))).groups
    images, labels = normalizer(weights, cpu)(group.pixels), torch.from_numpy(labeled.train.labels[group.indices])
    head = nn.Linear(32, len(labeled.classes))
    optimizer = torch.optim.AdamW([*vit.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(100):
        flipped = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images, images.flip(-1))
        loss = F.cross_entropy(head(vit(flipped).cls), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    out.mkdir()
    save_backbone(out, vit.state_dict(), settings)
    return out


def test_a_student_comes_close_to_its_teacher_in_seconds(tmp_path: Path) -> None:
    scenes.write_scenes(tmp_path / "data", seed=3, num_train=128, num_val=64, size=24, show=False)
    teacher = train_supervised(tmp_path / "data", tmp_path / "teacher")
    plain = {"gray": 0, "jitter": 0, "solarize": [0, 0], "global_blur": [0, 0], "local_blur": 0}
    probe = {"probe.data": str(tmp_path / "data"), "probe.every_epochs": 100, "probe.k": 5, "health_every_steps": 40}
    length = {"train.epochs": 20, "batch_size": 16, "optim.lr": 0.05, "log_every_steps": 40}
    run = distill(teacher, tmp_path / "data/train", tmp_path / "run", **plain, **probe, **length)
    rows = list(run.rows("metrics.jsonl"))
    measured = [row for row in rows if "agreement_cls" in row]
    assert len(measured) == 4
    first, last = measured[0], measured[-1]
    assert last["agreement_cls"] > first["agreement_cls"] + 0.1
    assert last["cosine_patches"] > 0.8
    untrained, trained = (row["knn_top1"] for row in rows if "knn_top1" in row)
    of_teacher = package.evaluate("knn", weights=teacher, data=tmp_path / "data", k=[5], device="cpu")["knn_top1_k5"]
    assert untrained < of_teacher - 20  # there is something to learn
    assert trained > of_teacher - 12
    assert trained > untrained + 10


def test_a_run_leaves_what_explains_it(images: Path, teacher: Path, tmp_path: Path) -> None:
    run = distill(teacher, images / "train", tmp_path / "run", train__report=True, probe__data=str(images), probe__k=5)
    assert run.finished
    stored = yaml.safe_load((run.path / "settings.yaml").read_text())
    assert "method" not in stored
    assert stored["distill"]["teacher"] == str(teacher)
    fingerprint = load_weights(teacher).fingerprint()
    assert stored["distill"]["teacher_fingerprint"] == fingerprint
    assert stored["data"]["mean"] == [0.3, 0.4, 0.5]  # the teacher's: both see the same crops
    settings = run.settings()
    assert isinstance(settings, DistillSettings)
    start = run.starts()[0]
    assert start["teacher"] == {"weights": str(teacher.resolve()), "fingerprint": fingerprint}
    names = {"student.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}
    assert {path.name for path in (run.checkpoints / "latest").iterdir()} == names  # and no teacher
    student = load_file(run.checkpoints / "latest/student.safetensors")
    vit = package.load(run.path)
    assert (vit.dim, vit.training) == (16, False)
    assert torch.equal(vit.norm.weight, student["backbone.norm.weight"])  # the weights are the student's
    first = next(row for row in run.rows("metrics.jsonl") if "loss" in row)
    assert first["loss"] == pytest.approx(first["loss_cls"] + first["loss_patches"], rel=1e-5)
    assert not {"momentum", "teacher_temperature", "loss_of_log_k"} & first.keys()
    assert {"rank_cls", "teacher_rank_cls", "neighbors_shared", "agreement_patches"} <= first.keys()
    page = (run.path / "report.html").read_text()
    assert "Cosine of [CLS] with the teacher" in page
    assert "The student follows its teacher" in page
    assert "method.momentum" not in page
    # other commands take the run
    scores = package.evaluate("knn", weights=run.path, data=images, device="cpu")
    assert 0 <= scores["knn_top1"] <= 100
    package.embed(run.path, images / "val", tmp_path / "features.parquet", device="cpu")
    package.export(run.path, "timm", tmp_path / "exported")
    card = (tmp_path / "exported" / "README.md").read_text()
    assert f"to reproduce the features of {teacher.name}" in card
    (run.path / "results.json").unlink()
    (run.path / "backbone.safetensors").unlink()
    assert torch.equal(package.load(run.path).norm.weight, vit.norm.weight)  # of an unfinished run


def test_eight_steps_are_three_and_a_kill_and_five(images: Path, teacher: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    extra = {"micro_batch_size": 4, "log_every_steps": 2, "model__drop_path": 0.3}
    distill(teacher, images / "train", whole, **extra)
    changes = TINY_STUDENT | {name.replace("__", "."): value for name, value in extra.items()}
    changes |= {"checkpoint_every_steps": 3}
    command = [str(teacher), str(images / "train"), "--out", str(parts), *words(changes)]
    killer = (
        "import os, signal, sys, time, adclr.training.journal as j; from adclr.cli import main; step = j.Journal.step\n"
        "def dead(self, done, *rest):\n"
        "    step(self, done, *rest)\n"
        "    while done == 5:\n"
        "        if self.run.steps(): os.kill(os.getpid(), signal.SIGKILL)\n"
        "        time.sleep(0.01)\n"
        "j.Journal.step = dead; main(sys.argv[1:])"
    )
    killed = adclr_command("distill", *command, program=killer, OMP_NUM_THREADS="1")  # as this process has
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert Run(parts).steps() == [3]
    done = adclr_command("distill", *command, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    for name in ("student", "optimizer"):
        assert_same(*(run / f"checkpoints/step_8/{name}.safetensors" for run in (whole, parts)))
    assert_same(whole / "backbone.safetensors", parts / "backbone.safetensors")
    assert (whole / "metrics.jsonl").read_text() == (parts / "metrics.jsonl").read_text()
    assert [start["from_step"] for start in Run(parts).starts()] == [0, 3]


def distill_in_two_processes(teacher: Path, data: Path, out: Path, changes: dict[str, Any]) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "adclr", "distill"]
    both = subprocess.run(
        [sys.executable, *command, str(teacher), str(data), "--out", str(out), *words(TINY_STUDENT | changes)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert both.returncode == 0, both.stderr


@pytest.mark.full
@pytest.mark.usefixtures("own")
def test_a_network_with_batch_norm_trains_in_two_processes(images: Path, teacher: Path, tmp_path: Path) -> None:
    """Parameters without influence are not waited for."""
    pytest.importorskip("timm")
    for student in ("timm:resnet10t", "own:good"):
        out = tmp_path / student.partition(":")[2]
        distill_in_two_processes(teacher, images / "train", out, NETWORK | {"distill.student": student})
        losses = [row["loss"] for row in Run(out).rows("metrics.jsonl")]
        assert losses[-1] < losses[0]


def test_two_processes_train_as_one(images: Path, teacher: Path, tmp_path: Path) -> None:
    single = distill(teacher, images / "train", tmp_path / "one")
    distill_in_two_processes(teacher, images / "train", tmp_path / "two", {})
    one, two = (list(run.rows("metrics.jsonl")) for run in (single, Run(tmp_path / "two")))
    assert [row["loss"] for row in one] == pytest.approx([row["loss"] for row in two], rel=1e-4)
    a, b = (load_file(path / "backbone.safetensors") for path in (single.path, tmp_path / "two"))
    assert all(torch.allclose(a[name], b[name], atol=2e-3) for name in a)


def test_the_settings_of_pretraining_are_untouched() -> None:
    """Hashes of runs and studies are of all settings by name."""
    assert not any(path.startswith("distill") for path, _ in parsing.leaves(Settings))
    assert Settings().model_dump(mode="json").keys() == {
        *("recipe", "data", "views", "model", "method", "optim", "train", "probe")
    }
    assert {"method.num_prototypes", "views.num_queries", "train.shard", "model.init"}.isdisjoint(
        path for path, _ in parsing.leaves(DistillSettings)
    )


@pytest.mark.parametrize("name", parsing.recipe_names("distill"))
def test_recipes_give_the_sizes_of_their_names(name: str) -> None:
    settings = parsing.build(DistillSettings, parsing.load_recipe(name, "distill"))
    assert name == f"distill_{settings.model.size}"
    again = parsing.build(DistillSettings, yaml.safe_load(yaml.safe_dump(settings.model_dump(mode="json"))))
    assert again == settings


# -- the teacher --


@pytest.fixture(scope="module")
def coarse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of patches of 14 pixels."""
    folder = tmp_path_factory.mktemp("coarse")
    settings = tiny(model__patch_size=14, views__global_size=28, views__local_size=14)
    save_backbone(folder, architecture(settings).build().state_dict(), settings)
    return folder


def test_crops_are_of_a_size_that_both_can_take(images: Path, coarse: Path, tmp_path: Path) -> None:
    sizes = {name: value for name, value in TINY_STUDENT.items() if not name.startswith("views.")}
    prepared = launch.prepare(
        images / "train", tmp_path / "run", None, sizes | {"distill.teacher": str(coarse)}, kind=DistillSettings
    )
    views = prepared.settings.views
    assert (views.global_size, views.local_size) == (224, 84)  # 96 is not divisible by 14; 84 is, and by 4
    assert any("views.local_size=84 instead of 96" in reason for reason in prepared.reasons)


def test_the_users_sizes_and_normalization_are_not_changed(images: Path, coarse: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"global_size=16 is not divisible by the teacher's patches of 14 .*=28"):
        distill(coarse, images / "train", tmp_path / "run")
    with pytest.raises(UserError, match=r"data\.mean=\[0\.1, 0\.1, 0\.1\] is not the teacher's"):
        distill(coarse, images / "train", tmp_path / "run", global_size=28, local_size=28, data__mean=[0.1, 0.1, 0.1])
    assert not (tmp_path / "run").exists()


def unfinished(teacher: Path, images: Path, out: Path, **changes: Any) -> Run:
    run = distill(teacher, images / "train", out, checkpoint_every_steps=3, **changes)
    (run.path / "results.json").unlink()
    shutil.rmtree(run.checkpoints / "step_8")
    (run.checkpoints / "latest").unlink()
    os.symlink("step_6", run.checkpoints / "latest")
    return run


def test_another_teacher_is_refused_and_a_moved_one_is_not(images: Path, teacher: Path, tmp_path: Path) -> None:
    run = unfinished(teacher, images, tmp_path / "run")
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    state = load_file(other / "backbone.safetensors")
    state["norm.bias"][0] += 1e-3
    save_backbone(other, state, tiny(model__dim=24, model__num_heads=3))
    with pytest.raises(UserError, match="is not the teacher that the run began with"):
        distill(other, images / "train", run.path)
    moved = tmp_path / "moved"
    shutil.copytree(teacher, moved)
    distill(moved, images / "train", run.path)
    assert run.finished
    assert run.starts()[-1]["from_step"] == 6


def test_a_directory_belongs_to_one_command(images: Path, teacher: Path, tmp_path: Path) -> None:
    run = distill(teacher, images / "train", tmp_path / "run")
    with pytest.raises(UserError, match="holds a run of adclr distill; use that command"):
        package.pretrain(images / "train", run.path, **TINY)
    pretrained = package.pretrain(images / "train", tmp_path / "other", **TINY)
    with pytest.raises(UserError, match="holds a run of adclr pretrain; use that command"):
        distill(teacher, images / "train", pretrained.path)


def test_a_step_can_be_repeated(images: Path, teacher: Path, tmp_path: Path) -> None:
    run = distill(teacher, images / "train", tmp_path / "run", checkpoint_every_steps=3)
    result = replay.replay_step(launch.prepare(None, run.path, resume=True, kind=DistillSettings), 5)
    rows = {row["step"]: row for row in run.rows("metrics.jsonl")}
    assert not result["void"]
    assert result["losses"]["loss_cls"] == pytest.approx(rows[5]["loss_cls"], rel=1e-6)


def test_what_is_scored_is_a_copy_in_evaluation_mode(teacher: Path) -> None:
    settings = parsing.build(DistillSettings, TINY_STUDENT, {"distill.teacher": str(teacher), "drop_path": 0.9})
    method = distillation.build(settings)
    images = torch.randn(4, 3, 16, 16)
    scored = evaluated(method).backbone
    before = scored(images).cls
    assert torch.equal(scored(images).cls, before)
    assert not torch.equal(method.student.backbone(images).cls, before)  # which trains on, with drop path
    with torch.no_grad():
        for parameter in method.student.parameters():
            parameter.zero_()
    assert torch.equal(scored(images).cls, before)
    assert method.student.training
    assert not method.teacher.training


# -- health --


def measures(agreement: float, rank: float) -> dict[str, float]:
    ranks = {"rank_cls": rank, "teacher_rank_cls": 20.0, "rank_patches": 20.0, "teacher_rank_patches": 20.0}
    return {"agreement_cls": agreement, "agreement_patches": agreement} | ranks


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        ([(0.0, 5), (0.3, 9), (0.6, 15), (0.8, 18)], None),
        ([(0.0, 5), (0.01, 9), (0.0, 15), (0.01, 18)], "student that does not follow its teacher"),
        ([(0.0, 5), (0.01, 9), (0.0, 15)], None),  # too few to say
        ([(0.9, 5), (0.9, 18), (0.9, 18), (0.9, 18)], None),  # it begins well
        ([(0.1, 5), (0.7, 1.5), (0.7, 1.4), (0.7, 1.3)], "dimensional collapse"),
    ],
)
def test_findings_are_named(rows: list[tuple[float, float]], name: str | None) -> None:
    finding = health.diagnose([measures(*row) for row in rows])
    assert (finding and finding.name) == name


# -- students that are no ViT of this program --

NETWORK = {"views.global_size": 32, "views.local_size": 32, "train.epochs": 1, "views.num_local": 1}


@pytest.mark.parametrize("name", ["resnet10t", "convnext_atto"])
def test_a_network_of_timm_learns_and_is_exported(name: str, images: Path, teacher: Path, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    student = f"timm:{name}"
    run = distill(teacher, images / "train", tmp_path / "run", **(NETWORK | {"distill.student": student}))
    losses = [row["loss"] for row in run.rows("metrics.jsonl")]
    assert losses[-1] < losses[0]
    weights = load_weights(run.path, networks=True)
    assert weights.network is not None
    pixels = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        tokens = weights.vit(pixels)
    # the file is timm's own, pooled and dense
    file = str(run.path / "backbone.safetensors")
    model = timm.create_model(name, num_classes=0, checkpoint_path=file).eval()
    maps = timm.create_model(name, features_only=True, out_indices=(-1,)).eval()
    renamed = {key.replace("stages.", "stages_").replace("stem.", "stem_"): t for key, t in load_file(file).items()}
    wanted = maps.state_dict()
    maps.load_state_dict({key: (load_file(file) | renamed)[key] for key in wanted})
    with torch.no_grad():
        assert torch.equal(model(pixels), tokens.cls)
        (dense,) = maps(pixels)
    assert torch.allclose(dense.flatten(2).transpose(1, 2), tokens.patches, atol=1e-6)
    assert weights.vit.grid_of(64, 64) == tuple(dense.shape[2:])
    # evaluations and other commands
    segmented(tmp_path / "pixels", 3, 2, 32)
    few: dict[str, Any] = {"linear": {"epochs": 1}, "incontext": {"size": 32, "pictures": 0}}
    for evaluation, data in (
        ("knn", images),
        ("linear", images),
        ("matching", images / "val"),
        ("incontext", tmp_path / "pixels"),
    ):
        more = few.get(evaluation, {})
        assert package.evaluate(evaluation, weights=run.path, data=data, device="cpu", **more)
    control = package.evaluate("knn", weights=run.path, data=images, device="cpu", from_scratch=True)
    assert 0 <= control["knn_top1"] <= 100
    with pytest.raises(UserError, match="which is no ViT"):
        package.evaluate("finetune", weights=run.path, data=images, device="cpu")
    about = package.embed(run.path, images / "val", tmp_path / "features.parquet", device="cpu")
    assert about["dim"] == tokens.cls.shape[1]
    package.export(run.path, "timm", tmp_path / "exported")
    again = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(again(pixels), tokens.cls)
    for refusing in (lambda: package.load(run.path), lambda: package.export(run.path, "onnx", tmp_path / "onnx")):
        with pytest.raises(UserError, match="which is no ViT"):
            refusing()


def test_the_trial_of_a_network_leaves_no_trace() -> None:
    pytest.importorskip("timm")
    torch.manual_seed(0)
    tried = networks.build_network("timm:resnet10t", (32, 32))
    torch.manual_seed(0)
    new = networks.build_network("timm:resnet10t", (32, 32), train=False)
    for name, tensor in new.state_dict().items():
        assert torch.equal(tensor, tried.state_dict()[name]), name
    assert (tried.training, new.training) == (True, False)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in tried.parameters())


def test_a_file_that_is_not_of_its_network_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    network = networks.build_network("timm:resnet10t", (32, 32), train=False)
    state = networks.network_state(network)
    values = {"network": "timm:resnet10t", "input_size": (32, 32), "mean": [0.5] * 3, "std": [0.2] * 3}
    for changes, sentence in (
        ({"network": "timm:resnet18"}, "is of another architecture"),
        ({"network": "timm:../x"}, "timm has no model"),
        ({"network": "os:getcwd"}, "is not called because a file names it"),
        ({"input_size": (9_999, 32)}, "at most 1024 pixels"),
        ({"mean": [0.5]}, "another number of means"),
        ({"mean": ["a"]}, "does not fit any network"),
        ({"more": 1}, "does not fit any network"),
    ):
        with pytest.raises(UserError, match=sentence):
            networks.restore_network(values | changes, state, str(tmp_path))
    restored, _ = networks.restore_network(values, state, str(tmp_path))
    assert all(torch.equal(tensor, state[name]) for name, tensor in networks.network_state(restored).items())


def test_a_network_resumes_exactly_with_its_running_statistics(images: Path, teacher: Path, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    changes = NETWORK | {"distill.student": "timm:resnet10t", "train.epochs": 2, "micro_batch_size": 4}
    whole = distill(teacher, images / "train", tmp_path / "whole", **changes)
    parts = unfinished(teacher, images, tmp_path / "parts", **changes)
    distill(teacher, images / "train", parts.path, **changes)
    assert parts.starts()[-1]["from_step"] == 6
    for name in ("student", "optimizer"):
        assert_same(*(run.path / f"checkpoints/step_8/{name}.safetensors" for run in (whole, parts)))


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.conv, self.output, self.unused = nn.Conv2d(3, 6, 4, 4), output, nn.Linear(2, 2)

    def forward(self, images):
        return self.output(self.conv(images))

def good(): return Net(lambda maps: maps)
def both(): return Net(lambda maps: (maps.amax(dim=(2, 3))[:, :3], maps))
def vector(): return Net(lambda maps: maps.mean(dim=(2, 3)))
def nothing(): return Net(lambda maps: None)
def infinite(): return Net(lambda maps: maps / 0)
def constant(): return Net(lambda maps: maps.detach())
def fewer(): return Net(lambda maps: maps[:1])
def number(): return 3
def broken(): raise RuntimeError("no weights")
def empty(): return nn.Identity()
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module own.py in the current folder."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(("function", "dim"), [("good", 6), ("both", 3)])
def test_a_network_of_the_users_own(function: str, dim: int, images: Path, teacher: Path, tmp_path: Path) -> None:
    changes = NETWORK | {"distill.student": f"own:{function}", "probe.data": str(images), "probe.k": 5}
    run = distill(teacher, images / "train", tmp_path / "run", **changes)
    assert any("knn_top1" in row for row in run.rows("metrics.jsonl"))
    state = load_file(run.path / "backbone.safetensors")
    assert set(state) == {"conv.weight", "conv.bias", "unused.weight", "unused.bias"}  # its own names
    assert json.loads((run.path / "backbone.json").read_text())["network"] == f"own:{function}"
    projector = load_file(run.checkpoints / "latest/student.safetensors")["head.cls.weight"]
    assert projector.shape == (24, dim)
    # a file never makes the program call a function
    with pytest.raises(UserError, match="is not called because a file names it"):
        package.evaluate("knn", weights=run.path, data=images, device="cpu")
    (run.path / "results.json").unlink()
    with pytest.raises(UserError, match=r"called only if you name it; add distill\.student=own"):
        package.distill(teacher, images / "train", run.path)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("student", "sentence"),
    [
        ("own:vector", r"it returns a tensor of shape \[1, 6\]"),
        ("own:nothing", "it returns an object of type NoneType"),
        ("own:infinite", "features that are not finite"),
        ("own:constant", "features without a gradient"),
        ("own:fewer", "it returns a map of 1 images for 2"),
        ("own:number", r"returns an object of type int, not a torch\.nn\.Module"),
        ("own:broken", r"own:broken fails \(RuntimeError: no weights\)"),
        ("own:empty", "without parameters to train"),
        ("own:absent", "own has no function absent"),
        ("nowhere:net", "module nowhere cannot be imported"),
        ("timm:resnet51", "did you mean timm:resnet5"),
        ("timm:vit_tiny_patch16_224", "is a ViT, whose features are no map"),
        ("resnet50", "write vit, timm:NAME such as timm:resnet50"),
    ],
)
def test_a_student_that_cannot_learn_is_refused(
    student: str, sentence: str, images: Path, teacher: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=sentence):
        distill(teacher, images / "train", tmp_path / "run", **(NETWORK | {"distill.student": student}))
    assert not (tmp_path / "run").exists()


def test_timm_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(optional.importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"timm:resnet10t needs timm, which is not installed.*adclr\[timm\]"):
        networks.build_network("timm:resnet10t", (32, 32))


def test_a_crop_that_the_network_cannot_take_is_refused(images: Path, teacher: Path, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    changes = NETWORK | {"distill.student": "timm:convnext_atto", "local_size": 16}
    with pytest.raises(UserError, match=r"cannot take crops of 16 pixels; raise views\.local_size"):
        distill(teacher, images / "train", tmp_path / "run", **changes)


# -- the command --


def test_the_command_from_start_to_end(images: Path, teacher: Path, tmp_path: Path, adclr: Adclr) -> None:
    arguments = ("distill", teacher, images / "train", "--out", tmp_path / "run", "--recipe", "distill_tiny")
    done = adclr(*arguments, *words(TINY_STUDENT))
    assert done.returncode == 0, done.stderr
    assert "the teacher is" in done.stdout
    assert f"done: {tmp_path / 'run'}/backbone.safetensors" in done.stdout
    again = adclr(*arguments, *words(TINY_STUDENT))
    assert "is finished" in again.stdout
    listed = adclr("distill", "--list-recipes")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["distill_small", "distill_tiny"]
    text = adclr("distill", "--help-all").stdout
    assert "distill.smooth_l1_weight" in text
    assert "method." not in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no output directory was named"),
        (["--out", "run"], "no teacher was named; write adclr distill TEACHER DATA --out RUN"),
        (["nowhere", "DATA", "--out", "run"], "weights nowhere do not exist"),
        (["TEACHER", "--out", "run"], "no images were named"),
        (["TEACHER", "DATA", "--out", "run", "teacher=x"], "the teacher was named twice"),
        (["TEACHER", "DATA", "--out", "run", "num_queries=3"], "unknown setting 'num_queries'"),
        (
            ["TEACHER", "DATA", "--out", "run", "--recipe", "adclr_small"],
            "adclr_small is a recipe of adclr pretrain; choose one of: distill_small",
        ),
        (["TEACHER", "DATA", "--out", "run", "cls_weight=0", "patch_weight=0"], "are both 0"),
    ],
)
def test_mistakes_are_refused_in_one_sentence(
    arguments: list[str],
    sentence: str,
    images: Path,
    teacher: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = {"TEACHER": str(teacher), "DATA": str(images / "train")}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(["distill", *(named.get(word, word) for word in arguments)])
    assert end.value.code == 2
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith("adclr: ")
    assert sentence in last
    assert not Path("run").exists()


def test_the_python_call_resumes_only_if_told_to(teacher: Path, images: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run to resume"):
        loop.distill(teacher, images / "train", tmp_path / "run", resume=True)
