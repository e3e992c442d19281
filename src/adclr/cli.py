"""The command line. torch is imported only when a command runs, so that --help is instant.

Exit codes: 0 success; 2 a mistake of the user, explained in one sentence; 75 training was stopped by SIGTERM, SIGINT
(Ctrl-C) or SIGUSR1 and has saved, so that the same command resumes; 128 + the number of a signal, stopped without
saving, as by a second one; 1 anything else, with its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from adclr import __version__
from adclr.system import files, machine
from adclr.system.arguments import Parser, attach_value, count, format_rows, positive, seed
from adclr.system.store_urls import conceal
from adclr.system.text import printable

W = "weights: a run, a file (or FILE::student) or folder of DINO, DINOv2, MAE, timm, ..., a URL of one, or timm:NAME"
PARTIAL = "accept weights that lack parts of the backbone; the missing parts are initialized at random"
CHECK = "detect replaced images by size and modification time (time, the default) or by content"
OVERWRITE = "replace files that this command did not write; without it, such files are an error"
WORD = re.compile(r"[A-Za-z_][\w.]*=")  # key=value; a path with '=' in it can be written ./path


def _require(options: Namespace, name: str, sentence: str) -> None:
    if not getattr(options, name):
        options.parser.error(sentence)


def _path(name: str | None) -> Path | None:
    return Path(name) if name else None


Run = Callable[[Namespace, dict[str, Any]], None]  # (options, values of key=value words)


def _demo(options: Namespace, _: dict[str, Any]) -> None:
    from adclr import demo

    demo.run_demo(Path(options.out), options.seed, options.overwrite)


def _pretrain(options: Namespace, values: dict[str, Any]) -> None:
    from adclr.config.settings import Settings

    if options.list_recipes:
        _list_recipes()
        return
    _train(options, values, Settings)


def _distill(options: Namespace, values: dict[str, Any]) -> None:
    from adclr.config.distillation import DistillSettings
    from adclr.config.parsing import UserError

    if options.list_recipes:
        _list_recipes("distill")
        return
    if options.teacher is not None:
        if {"teacher", "distill.teacher"} & set(values):
            raise UserError(f"the teacher was named twice, as {options.teacher} and by distill.teacher; leave out one")
        values["distill.teacher"] = options.teacher
    _train(options, values, DistillSettings)


def _list_recipes(kind: str = "") -> None:
    from adclr.config import parsing

    for name in parsing.recipe_names(kind):
        first = parsing.recipe_text(name, kind).splitlines()[0].removeprefix("# ")
        print(f"{name:<20} {first}")


def _train(options: Namespace, values: dict[str, Any], kind: Any) -> None:
    """Pretrain or distill; `kind` is the class of the settings."""
    _require(options, "out", "no output directory was named; give --out RUN")
    from adclr.training import launch

    values |= {"data.check": options.check} if options.check else {}
    resume = bool(options.resume or options.replay)
    started = machine.process_start()
    launched = launch.prepare(options.data, options.out, options.recipe, values, resume, kind, started)
    if options.replay is not None:
        from adclr.training import replay

        replay.replay_step(launched, options.replay)
        return
    for reason in launched.reasons if os.environ.get("RANK", "0") == "0" else ():
        print(printable(reason), flush=True)
    from adclr.training import loop

    loop.train(launched)


def _evaluate(options: Namespace, values: dict[str, Any]) -> None:
    from adclr import evals
    from adclr.config.parsing import UserError, build

    name, several = options.name, options.name == "transfer"
    _require(options, "name", f"no evaluation was named; there are: {', '.join(evals.NAMES)}")
    evaluation = evals.import_evaluation(name)
    if options.data:
        if len(options.data) > 1 and not several:
            raise UserError(f"{name} takes one --data, not {len(options.data)}; transfer takes several")
        values["data"] = options.data if several else options.data[0]
    values |= {key: value for key in ("weights", "from_scratch", "partial") if (value := getattr(options, key))}
    settings = build(evaluation.Settings, evals.load_recipe(name, options.recipe), values)
    out = _path(options.out) or evals.result_path(name, settings)
    evals.run_evaluation(name, settings, out, say=True, overwrite=options.overwrite)
    if (out.parent.parent.parent / "report.html").exists():
        from adclr import report

        report.refresh_report(out)


def _embed(options: Namespace, values: dict[str, Any]) -> None:
    from adclr.config.parsing import build
    from adclr.features import embedding

    for name, argument in (("weights", "W"), ("images", "IMAGES"), ("out", "--out PATH")):
        _require(options, name, f"{argument} is missing; write adclr embed W IMAGES --out features.parquet")
    settings = build(embedding.EmbeddingSettings, values, {"check": options.check} if options.check else {})
    embedding.embed_collection(
        options.weights, options.images, options.out, options.dense, settings, options.partial, options.overwrite
    )


def _doctor(options: Namespace, values: dict[str, Any]) -> None:
    from adclr.config.parsing import build
    from adclr.data import doctor

    _require(options, "data", "no images were named; give the folder that holds them")
    doctor.examine_collection(options.data, Path(options.out), build(doctor.DoctorSettings, values), options.overwrite)


def _plan(options: Namespace, values: dict[str, Any]) -> None:
    from adclr.training import plan_gpus, planning

    gpu = plan_gpus.find_gpu(options.gpu, options.gpu_memory, options.gpu_tflops)
    run = options.data, options.images, options.recipe, values
    files = _path(options.out), _path(options.json), options.overwrite
    planning.plan_run(*run, gpu, options.gpus, *files, options.teacher)


def _export(options: Namespace, _: dict[str, Any]) -> None:
    from adclr.weights.export import export

    export(options.weights, options.to, options.out, options.partial, options.input_size, options.overwrite)


def _visualize(options: Namespace, values: dict[str, Any]) -> None:
    from adclr.config.parsing import build
    from adclr.features import visualize

    if options.name not in visualize.FIGURES:
        options.parser.error(f"no picture was named; there are: {', '.join(visualize.FIGURES)}")
    _require(options, "images", "weights and images are both needed; write W and then the images")
    settings = build(visualize.FIGURES[options.name][0], values)
    where = options.weights, options.images, Path(options.out)
    visualize.write_figures(options.name, *where, settings, options.overwrite)


def _report(options: Namespace, _: dict[str, Any]) -> None:
    from adclr import report

    print(printable(f"written to {report.write_report(options.runs, _path(options.out), options.overwrite)}"))


def _study(options: Namespace, values: dict[str, Any]) -> None:
    from adclr import study

    study.run_command(options, values)


def _explore(options: Namespace, values: dict[str, Any]) -> None:
    from adclr.config.parsing import build
    from adclr.features import explorer

    _require(options, "images", "weights and images are both needed; write W and then the images")
    if not 0 <= options.port < 65536:
        options.parser.error(f"{options.port} is not a port; write a number from 0 to 65535")
    weights = [options.weights, options.against] if options.against else [options.weights]
    explorer.serve(weights, options.images, options.host, options.port, build(explorer.ExplorerSettings, values))


NO_SETTINGS = {"demo": "the demo", "export": "an export", "report": "a report"}


def parser() -> Parser:
    """Return the parser of all commands."""
    main = Parser(
        prog="adclr",
        description="Pretrain a Vision Transformer on images without labels, and evaluate its features.",
        epilog="adclr COMMAND --help lists the settings of a command with their defaults.",
    )
    main.add_argument("--version", action="version", version=f"adclr {__version__}")
    main.set_defaults(help=False, help_all=False)
    commands = main.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    collection = "folder, .txt list, .tar shards, Parquet, hf:NAME, or a URL of one (s3:// gs:// az:// https:// hf://)"
    recipe = "a recipe or a .yaml file; by default chosen by the number of images"

    def command(
        name: str, run: Run, summary: str, settings: str | None = None, epilog: str | None = None
    ) -> Callable[..., argparse.Action]:
        """Add a command whose --help lists `settings`, MODULE:CLASS or MODULE; return what adds its arguments."""
        about = f"{summary[0].upper()}{summary[1:]}."
        subparser = commands.add_parser(name, help=summary, description=about, epilog=epilog, add_help=settings is None)
        subparser.set_defaults(parser=subparser, run=run, settings=settings)
        return subparser.add_argument

    add = command("demo", _demo, "train and score on built-in images, on a CPU, in a few minutes")
    add("--out", default="runs/demo", metavar="DIR", help="output directory (default: %(default)s)")
    add("--seed", type=seed, default=0, help="seed of images and training (default: %(default)s)")

    def training(add: Callable[..., argparse.Action], recipe: str) -> None:
        add("data", nargs="?", metavar="DATA", help=collection)
        add("--out", metavar="RUN", help="directory of the run; an unfinished run in it is resumed")
        add("--recipe", metavar="NAME", help=recipe)
        add("--resume", action="store_true", help="resume the run in --out; never start a new one")
        step = "repeat a step of the run in --out and name the first tensor that is not finite"
        add("--replay", type=count, metavar="STEP", help=step)
        add("--check", choices=("time", "content"), help=CHECK)
        add("--list-recipes", action="store_true", help="list the recipes and exit")

    add = command("pretrain", _pretrain, "train on a folder of images", "adclr.config.settings:Settings")
    training(add, recipe)

    settings = "adclr.config.distillation:DistillSettings"
    add = command("distill", _distill, "train a smaller network to reproduce the features of given weights", settings)
    add("teacher", nargs="?", metavar="TEACHER", help=W)
    training(add, "distill_tiny, distill_small or a .yaml file (default: distill_small)")

    add = command("evaluate", _evaluate, "score weights on labeled images", "adclr.evals")
    add("name", nargs="?", metavar="NAME", help="the evaluation: knn, linear, finetune, incontext, ...: see below")
    add("--weights", metavar="W", help=W)
    add("--partial", action="store_true", help=PARTIAL)
    labeled = "labeled folder: train/ and val/, or one that is split 80/20; or KIND:DIR. transfer takes several; "
    add("--data", nargs="+", metavar="DIR", help=labeled + "matching takes any images")
    add("--recipe", metavar="NAME", help="a recipe of the evaluation, NAME_..., or a .yaml file")
    add("--from-scratch", action="store_true", help="score the same ViT untrained, as a control")
    add("--out", metavar="FILE", help="JSON file of the scores (default: in evals/NAME/ beside the weights)")

    settings = "adclr.features.embedding:EmbeddingSettings"
    add = command("embed", _embed, "write features of images: one vector per image, or patch maps", settings)
    add("weights", nargs="?", metavar="W", help=W)
    add("images", nargs="?", metavar="IMAGES", help=collection)
    add("--out", metavar="PATH", help="a .parquet file, or a folder of part files; s3://, gs:// and az:// work too")
    add("--partial", action="store_true", help=PARTIAL)
    add("--check", choices=("time", "content"), help=CHECK)
    add("--dense", action="store_true", help="write patch maps, height x width x D, to the folder --out")

    add = command("doctor", _doctor, "list broken, duplicate and tiny images", "adclr.data.doctor:DoctorSettings")
    add("data", nargs="?", metavar="DATA", help=collection)
    add("--out", default="runs/doctor", metavar="DIR", help="directory of the report (default: %(default)s)")

    add = command("plan", _plan, "estimate memory, time and disk space of a run", "adclr.config.settings:Settings")
    add("data", nargs="?", metavar="DATA", help=collection)
    add("--images", type=count, metavar="N", help="number of images, instead of DATA")
    add("--teacher", metavar="W", help="plan adclr distill with these weights; adclr distill --help has its settings")
    add("--recipe", metavar="NAME", help=recipe)
    add("--gpu", metavar="NAME", help="estimate for a GPU that this machine lacks: h200, rtx4090, ...")
    add("--gpu-memory", type=positive, metavar="GiB", help="memory of a GPU that --gpu does not know")
    add("--gpu-tflops", type=positive, metavar="X", help="peak throughput of that GPU in dense bfloat16, TFLOPS")
    add("--gpus", type=count, default=1, metavar="N", help="number of GPUs (default: %(default)s)")
    add("--out", metavar="RUN", help="directory of the run, to check its free disk space")
    add("--json", metavar="FILE", help="also write the plan as JSON")

    add = command("export", _export, "convert weights for timm, Hugging Face, ONNX, or to safetensors")
    add("weights", metavar="W", help=W)
    add("--to", required=True, metavar="FORMAT", help="timm, huggingface, onnx or safetensors")
    add("--out", required=True, metavar="DIR", help="output folder, with a model card; s3://, gs:// and az:// work too")
    add("--input-size", type=count, metavar="PIXELS", help="resample position embeddings to images of this side")
    add("--partial", action="store_true", help=PARTIAL)

    add = command("visualize", _visualize, "draw attention, queries, components or matches", "adclr.features.visualize")
    add("name", nargs="?", metavar="NAME", help="attention, queries, pca or match")
    add("weights", nargs="?", metavar="W", help=W)
    add("images", nargs="*", metavar="IMAGES", help="a folder, or image files")
    add("--out", default="runs/pictures", metavar="DIR", help="output directory (default: %(default)s)")

    add = command("report", _report, "write one HTML page about a run, or about several side by side")
    add("runs", nargs="+", metavar="RUN", help="the directory of a run, finished or not")
    add("--out", metavar="FILE", help="the page (default: report.html in the run)")

    names = "NAME=DIR gives the folder of a data set of the study. Columns without their data are left out."
    add = command("study", _study, "train the missing runs of a study, and write its table and figure", epilog=names)
    add("file", nargs="?", metavar="FILE", help="a .yaml file, or the name of a shipped study, such as main")
    add("--list", action="store_true", help="list the shipped studies with their cost and exit")
    add("--dry-run", action="store_true", help="list runs, evaluations and cost of the study and exit; needs no data")
    add("--small", action="store_true", help="take the small variant of the study, for small data")
    add("--gpu", metavar="NAME", help="GPU that the cost is estimated for: rtx4090, a100-80gb, ... (default: h200)")
    add("--out", default="runs/studies", metavar="DIR", help="directory of the runs (default: %(default)s)")
    add("--results", metavar="DIR", help="directory of table and figure (default: results/ beside the study)")
    add("--only", action="append", default=[], metavar="TEXT", help="make the runs whose names contain this text")
    add("--minutes", type=positive, metavar="N", help="start no run that would end after N minutes")
    add("--at-once", type=count, metavar="N", help="runs on each GPU at a time (default: 1); with slurm: jobs at once")
    add("--launcher", choices=("local", "slurm"), default="local", help="slurm: make runs as an array of SLURM jobs")
    add("--slurm", default="", metavar="OPTIONS", help='options of sbatch: "--partition=gpu --gpus=1 --time=4:00:00"')

    add = command(
        "explore", _explore, "explore attention and similarity in a browser", "adclr.features.explorer:ExplorerSettings"
    )
    add("weights", nargs="?", metavar="W", help=W)
    add("images", nargs="*", metavar="IMAGES", help="a folder, or image files")
    add("--against", metavar="W", help="second weights, to compare side by side")
    add("--host", default="127.0.0.1", help="address (default: %(default)s); others need the printed token")
    add("--port", type=int, default=8765, help="port (default: %(default)s); 0: any free port")

    for name, subparser in commands.choices.items():
        short = name in ("pretrain", "distill", "plan")  # which have many settings
        listed = "the most common settings" if short else "every setting with its default"
        if not subparser.add_help:
            subparser.add_argument("-h", "--help", action="store_true", help=f"show this help and {listed}")
        if short:
            subparser.add_argument("--help-all", action="store_true", help="show this help and every setting")
        if name not in ("pretrain", "distill", "explore"):
            subparser.add_argument("--overwrite", action="store_true", help=OVERWRITE)
    return main


def _settings_to_list(options: Namespace) -> Iterator[tuple[str, type]]:
    """Yield (title, settings class) for --help."""
    path, _, settings = options.settings.partition(":")
    module, name = importlib.import_module(path), getattr(options, "name", None)
    if options.command == "evaluate":
        for item in [name] if name else module.NAMES:
            yield f"settings of {item}{module.recipe_hint(item)}:", module.import_evaluation(item).Settings
    elif options.command == "visualize":
        for item in [name] if name in module.FIGURES else module.FIGURES:
            yield f"settings of {item}:", module.FIGURES[item][0]
    else:
        recipes = ", with the defaults that recipes start from"
        note = {"pretrain": recipes, "distill": recipes, "plan": ", as of adclr pretrain"}
        yield f"settings{note.get(options.command, '')}:", getattr(module, settings)


def _print_help(options: Namespace) -> None:
    from adclr.config.parsing import describe

    options.parser.print_help()
    for title, settings in _settings_to_list(options):
        rows = describe(settings, advanced=options.help_all)
        print(f"\n{title}\n{format_rows(rows)}")
        hidden = len(describe(settings)) - len(rows)
        if hidden:
            print(f"\n{options.parser.prog} --help-all lists {hidden} more settings")


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    for stream in (sys.stdout, sys.stderr):  # a name the terminal cannot show must not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    machine.configure_openmp()  # before a command imports torch
    try:
        _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:  # `adclr pretrain --help | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        print("adclr: stopped", file=sys.stderr)
        raise SystemExit(130) from None


def _main(arguments: list[str]) -> None:
    arguments = [conceal(word) for word in attach_value("--slurm", arguments)]  # no credentials in what is written
    words = [argument for argument in arguments if WORD.match(argument)]
    top = parser()
    options = top.parse_args([argument for argument in arguments if not WORD.match(argument)])
    if options.command is None:
        top.print_help()
        raise SystemExit(0)
    if words and options.command in NO_SETTINGS:
        options.parser.error(f"{NO_SETTINGS[options.command]} takes no settings, but was given {words[0]}")
    # pydantic takes 60 ms to import, which plain --help need not wait for
    from adclr.config.parsing import UserError, parse_words

    try:
        if options.help or options.help_all:
            _print_help(options)
        else:
            files.check_system()
            options.run(options, parse_words(words))
    except UserError as error:
        print(f"adclr: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a folder that went away: the system's sentence says it
        then = "the same command resumes from the last checkpoint, which is intact" if _saved(options) else "try again"
        name = printable(str(error.filename or "a file"))
        print(f"adclr: {name}: {error.strerror or error}; fix this and {then}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        if options.command in ("embed", "study"):
            print("adclr: stopped; the same command makes what is missing", file=sys.stderr)
            raise SystemExit(130) from None
        if not _saved(options):
            raise
        print("adclr: stopped; the same command resumes from the last checkpoint", file=sys.stderr)
        raise SystemExit(130) from None


def _saved(options: Namespace) -> bool:
    """Return whether a training of this command has a checkpoint."""
    trains = options.command in ("demo", "pretrain", "distill") and options.out
    return bool(trains) and any(Path(options.out).glob("**/checkpoints/step_*"))
