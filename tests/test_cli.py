"""The program as a user meets it, above all when the user errs: one sentence, exit code 2, nothing written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from adclr import cli
from adclr.config import parsing
from adclr.config.settings import Settings
from tiny import TINY, Adclr, words


def test_help_is_instant_and_needs_no_torch(adclr: Adclr) -> None:
    check = (
        "import sys; sys.argv = ['adclr', '--help']\nfrom adclr.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    )
    check += "assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules), 'imported too much'"
    times = []
    for _ in range(3):
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
        times.append(time.monotonic() - started)
        assert done.returncode == 0, done.stderr
    assert min(times) < 0.5
    for command in ("demo", "pretrain", "evaluate"):
        assert command in done.stdout
    assert adclr().stdout == done.stdout  # no command at all is a question too


def test_help_of_a_command_lists_its_settings_with_their_defaults(adclr: Adclr) -> None:
    text = adclr("pretrain", "--help").stdout
    for line in (
        "train.epochs ",
        "100 ",
        "views.num_queries ",
        "method.query_weight ",
        "--recipe",
        "(auto | cpu | cuda | mps)",
    ):
        assert line in text
    assert "temperature" in adclr("evaluate", "knn", "--help").stdout


@pytest.mark.parametrize("command", ["pretrain", "plan"])
def test_help_shows_the_common_settings_and_help_all_every_one(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed(option: str) -> list[str]:
        cli.main([command, option])
        text = capsys.readouterr().out
        lines.append(text.rstrip().splitlines()[-1])
        return [line.split()[0] for line in text.splitlines() if re.match(r"  (\w+\.\w+|recipe) ", line)]

    lines: list[str] = []
    common, every = listed("--help"), listed("--help-all")
    assert every == [path for path, _ in parsing.leaves(Settings)]
    assert 25 <= len(common) <= 35
    assert set(common) < set(every)
    assert lines[0] == f"adclr {command} --help-all lists {len(every) - len(common)} more settings"
    assert lines[1].split()[0] == every[-1]


def test_recipes_are_listed_without_torch() -> None:
    check = "import sys; from adclr.cli import main; main(['pretrain', '--list-recipes'])\n"
    check += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("adclr_vits16", "dino_vits16", "ibot_vits16", "adclr_mim_vits16", "adclr_vitb16", "adclr_small"):
        assert name in done.stdout


def refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode == 2, (done.stdout, done.stderr)
    (sentence,) = done.stderr.strip().splitlines()
    assert sentence.startswith("adclr: ")
    assert message in sentence


QUICK = [  # arguments ({d}: images, {t}: an empty place), what the sentence says
    (["pretrain", "{t}/nowhere", "--out", "{t}/run"], "nowhere does not exist"),
    (
        ["pretrain", "{d}/train/disc", "--out", "{t}/run", "--recipe", "adclr_small"],
        "fewer than train.batch_size=64; set",
    ),
    (["pretrain", "{t}/empty", "--out", "{t}/run"], "holds no image"),
    (["pretrain", "{t}/texts", "--out", "{t}/run"], "holds no image; these count: .jpg"),
    (
        ["pretrain", "{t}/texts/a.md", "--out", "{t}/run"],
        "is not a folder, a list (.txt .lst .list), a .tar shard or a table (.parquet .arrow)",
    ),
    (["pretrain", "{d}", "--out", "{t}/run", "--recipe", "adclr_vit_s16"], "did you mean 'adclr_vits16'?"),
    (["pretrain", "{d}", "--out", "{t}/run", "train.epoch=3"], "did you mean 'train.epochs'?"),
    (["pretrain", "{d}", "--out", "{t}/run", "epochs=many"], "train.epochs='many'"),
    (["pretrain", "{d}", "--out", "{t}/run", "global_size=100"], "not divisible by model.patch_size=16"),
    (["pretrain", "{d}", "--out", "{t}/run", "dim=8", "num_heads=16"], "does not divide the width 8"),
    (["pretrain", "{d}", "--out", "{t}/texts"], "exists and holds no run; choose another --out"),
    (["pretrain", "{d}", "--out", "{t}/run", "--resume"], "holds no run to resume"),
    (["pretrain", "{d}"], "give --out"),
    (["pretrain", "--out", "{t}/run"], "no images were named"),
    (["pretrain", "{d}", "extra", "--out", "{t}/run"], "unrecognized arguments: extra"),
    (["evaluate"], "no evaluation was named"),
    (["demo", "epochs=5"], "the demo takes no settings"),
    (["explode"], "invalid choice: 'explode'"),
    (["--weights"], "unrecognized arguments: --weights"),
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.md").write_text("no image")
    return tmp_path


def tree(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(("arguments", "message"), QUICK, ids=[message for _, message in QUICK])
def test_mistakes_that_need_no_torch(
    adclr: Adclr, images: Path, place: Path, arguments: list[str], message: str
) -> None:
    before = tree(place)
    started = time.monotonic()
    done = adclr(*(a.format(d=images, t=place) for a in arguments), fresh=True)
    assert time.monotonic() - started < 3
    refused(done, message)
    assert tree(place) == before


def test_mistakes_that_need_torch(adclr: Adclr, images: Path, place: Path) -> None:
    tiny = words(TINY)
    cases = [
        (["evaluate", "knm", "--weights", "w", "--data", images], "unknown evaluation 'knm'; there are: knn"),
        (["evaluate", "knn", "--weights", place / "w", "--data", images], "do not exist"),
        (
            ["evaluate", "knn", "--weights", place, "--data", images],
            "neither backbone.safetensors nor a whole checkpoint",
        ),
        (["evaluate", "knn", "--weights", place, "--data", images, "kk=3"], "did you mean 'k'?"),
        (["evaluate", "knn", "--data", images], "give --weights and --data"),
        (["evaluate", "knn", "--weights", place, "--data", images / "train" / "disc"], "no class folder"),
        (["pretrain", images, "--out", place / "run", *tiny, "device=cuda"], "torch finds no GPU here"),
        (["pretrain", images, "--out", place / "run", *tiny, "probe.data=/nowhere"], "/nowhere does not exist"),
    ]
    before = tree(place)
    adclr("--version")  # the first command of a test process waits for imports
    for arguments, message in cases:
        started = time.monotonic()
        done = adclr(*arguments, CUDA_VISIBLE_DEVICES="")
        assert time.monotonic() - started < 10
        refused(done, message)
    assert tree(place) == before


def test_a_run_is_made_resumed_compared_and_scored(adclr: Adclr, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ["pretrain", images / "train", "--out", out, *words(TINY)]
    first = adclr(*command)
    assert first.returncode == 0, first.stderr
    assert f"done: {out}/backbone.safetensors" in first.stdout
    assert "images/s" in first.stderr
    before = tree(out)
    again = adclr(*command)
    assert again.returncode == 0
    assert "is finished" in again.stdout
    assert adclr("pretrain", "--resume", "--out", out).returncode == 0  # nothing else need be said again
    refused(adclr(*command, "lr=0.5"), "holds a run with other settings: optim.lr is 0.01 there and 0.5 here")
    refused(adclr(*command, "--recipe", "dino_vits16"), "holds a run with other settings")
    assert adclr(*command, "num_workers=1", "keep_checkpoints=5").returncode == 0  # how, not what
    assert tree(out) == before
    scored = adclr("evaluate", "knn", "--weights", out, "--data", images, "k=[3, 5]")
    assert scored.returncode == 0, scored.stderr
    assert "knn_top1 " in scored.stdout
    (file,) = (out / "evals" / "knn").glob("*.json")
    written = json.loads(file.read_text())
    assert set(written) == {"scores", "settings", "provenance"}
    assert {"knn_top1", "knn_top1_k3", "knn_top1_k5", "knn_top5_k3"} <= set(written["scores"])
    assert 0 <= written["scores"]["knn_top1"] <= 100
    refused(
        adclr("evaluate", "knn", "--weights", out / "settings.yaml", "--data", images),
        "is neither a safetensors nor a torch file",
    )
    (out / "settings.yaml").write_text("train: [")
    refused(adclr(*command), "is not readable as YAML")


def test_without_a_recipe_the_choice_is_explained(adclr: Adclr, images: Path, tmp_path: Path) -> None:
    changes = {k: v for k, v in TINY.items() if k.startswith(("model.d", "model.num", "method.", "train.device"))}
    command = ["pretrain", images / "train", "--out", tmp_path / "run", *words(changes), "epochs=1", "warmup_epochs=0"]
    done = adclr(*command)
    assert done.returncode == 0, done.stderr
    assert "recipe adclr_cpu: there is no GPU" in done.stdout
    assert "views of 24 and 12 pixels, patches of 4" in done.stdout
    again = adclr(*command)  # the same command again finds its run, whatever would be chosen now
    assert again.returncode == 0, again.stderr


def test_words_are_told_from_arguments() -> None:
    assert cli.WORD.match("train.epochs=5")
    assert cli.WORD.match("loggers=[wandb]")
    for argument in ("--out=run", "./a=b", "/data/x=1", "photos"):
        assert not cli.WORD.match(argument)
