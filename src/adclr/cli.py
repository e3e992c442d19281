"""The commands. torch is imported only when a command runs, so that --help is instant.

Exit codes: 0 success; 2 a mistake of the user's, said in one sentence; 75 training was stopped by SIGTERM, SIGINT
(Ctrl-C) or SIGUSR1 and has saved, so that the same command goes on; 128 + the number of a signal, stopped without
saving, as by a second one; 1 anything else, with its traceback.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from adclr import __version__
from adclr.system import openmp
from adclr.system.text import printable

W = "a run directory; a file (or FILE::student) or folder of DINO, iBOT, DINOv2, MAE, timm, Hugging Face; or timm:NAME"
PARTIAL = "take weights that do not cover the whole backbone; what is missing is drawn anew"
CHECK = "how a replaced image is noticed: by size and time of modification (default), or content; see check below"
OVERWRITE = "replace files that this command did not write; without it they are refused"
WORD = re.compile(r"[A-Za-z_][\w.]*=")  # key=value; a path with '=' in it can be written ./path


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"adclr: {printable(message)}; {self.prog} --help says more", file=sys.stderr)
        raise SystemExit(2)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"'{text}' is not a seed; write a number from 0 on")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10**12:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 on")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return number


def parser() -> Parser:
    main = Parser(
        prog="adclr",
        description="Pretrain a Vision Transformer on images without labels, and find out how good it is.",
        epilog="adclr COMMAND --help lists every setting with its default.",
    )
    main.add_argument("--version", action="version", version=f"adclr {__version__}")
    commands = main.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    demo = commands.add_parser("demo", help="the whole story on built-in images, on a CPU, in a few minutes")
    demo.add_argument("--out", default="runs/demo", metavar="DIR", help="where everything is written (%(default)s)")
    demo.add_argument("--seed", type=_seed, default=0, help="of images and training (%(default)s)")

    pretrain = commands.add_parser("pretrain", help="train on a folder of images", add_help=False)
    pretrain.add_argument(
        "data", nargs="?", metavar="DATA", help="folder (searched recursively), .txt list, .tar shards or hf:PATH"
    )
    pretrain.add_argument("--out", metavar="RUN", help="directory of the run; an unfinished one there is resumed")
    pretrain.add_argument(
        "--recipe", metavar="NAME", help="a recipe or a .yaml file; by default chosen from the images"
    )
    pretrain.add_argument("--resume", action="store_true", help="only go on with the run in --out, never start one")
    pretrain.add_argument(
        "--replay", type=_count, metavar="STEP", help="do a step of the run in --out again: what in it is not finite?"
    )
    pretrain.add_argument("--check", choices=("time", "content"), help=CHECK)
    pretrain.add_argument("--list-recipes", action="store_true", help="list the recipes and stop")
    pretrain.add_argument("-h", "--help", action="store_true", help="this, and every setting with its default")

    evaluate = commands.add_parser("evaluate", help="score weights on labelled images", add_help=False)
    evaluate.add_argument("name", nargs="?", metavar="NAME", help="knn, linear, finetune, incontext, ...: see below")
    evaluate.add_argument("--weights", metavar="W", help=W)
    evaluate.add_argument("--partial", action="store_true", help=PARTIAL)
    evaluate.add_argument(
        "--data",
        nargs="+",
        metavar="DIR",
        help="labelled folder: train/ and val/, or one that is split 80/20; or KIND:DIR; for transfer several; "
        "for matching any images",
    )
    evaluate.add_argument("--recipe", metavar="NAME", help="settings of a kind: NAME_... of the evaluation, or a .yaml")
    evaluate.add_argument("--from-scratch", action="store_true", help="the control: the same ViT, newly initialised")
    evaluate.add_argument("--out", metavar="FILE", help="JSON of the scores (evals/NAME/ beside the weights)")
    evaluate.add_argument("-h", "--help", action="store_true", help="this, and every setting with its default")

    embed = commands.add_parser("embed", help="features of images: a vector for each, or patch maps", add_help=False)
    embed.add_argument("weights", nargs="?", metavar="W", help=W)
    embed.add_argument("images", nargs="?", metavar="IMAGES", help="folder, .txt list, .tar shards or hf:PATH")
    embed.add_argument("--out", metavar="PATH", help="a .parquet file, or a folder of part files")
    embed.add_argument("--partial", action="store_true", help=PARTIAL)
    embed.add_argument("--check", choices=("time", "content"), help=CHECK)
    embed.add_argument("--dense", action="store_true", help="patch maps, height x width x D, into the folder --out")
    embed.add_argument("-h", "--help", action="store_true", help="this, and every setting with its default")

    doctor = commands.add_parser("doctor", help="what is wrong with a collection of images", add_help=False)
    doctor.add_argument("data", nargs="?", metavar="DATA", help="folder, .txt list, .tar shards or hf:PATH")
    doctor.add_argument("--out", default="runs/doctor", metavar="DIR", help="where the report goes (%(default)s)")
    doctor.add_argument("-h", "--help", action="store_true", help="this, and every setting with its default")

    plan = commands.add_parser("plan", help="memory, time and disk of a run that is not started yet", add_help=False)
    plan.add_argument("data", nargs="?", metavar="DATA", help="folder, .txt list, .tar shards or hf:PATH")
    plan.add_argument("--images", type=_count, metavar="N", help="their number, instead of DATA")
    plan.add_argument("--recipe", metavar="NAME", help="a recipe or a .yaml file; by default chosen from the images")
    plan.add_argument("--gpu", metavar="NAME", help="estimate for a GPU that is not here: h200, rtx4090, ...")
    plan.add_argument("--gpu-memory", type=_positive, metavar="GiB", help="memory of another GPU")
    plan.add_argument("--gpu-tflops", type=_positive, metavar="X", help="its peak in dense bfloat16")
    plan.add_argument("--gpus", type=_count, default=1, metavar="N", help="how many there are (%(default)s)")
    plan.add_argument("--out", metavar="RUN", help="where the run would go; is there room?")
    plan.add_argument("--json", metavar="FILE", help="write the plan there too")
    plan.add_argument("-h", "--help", action="store_true", help="this, and every setting with its default")

    export = commands.add_parser("export", help="weights for timm, Hugging Face, ONNX, or as safetensors")
    export.add_argument("weights", metavar="W", help=W)
    export.add_argument("--to", required=True, metavar="FORMAT", help="timm, huggingface, onnx or safetensors")
    export.add_argument("--out", required=True, metavar="DIR", help="the folder that is made, with a model card")
    export.add_argument("--input-size", type=_count, metavar="PIXELS", help="store positions for images of this side")
    export.add_argument("--partial", action="store_true", help=PARTIAL)

    visualize = commands.add_parser("visualize", help="pictures of what weights look at", add_help=False)
    visualize.add_argument("name", nargs="?", metavar="NAME", help="attention, queries, pca or match")
    visualize.add_argument("weights", nargs="?", metavar="W", help=W)
    visualize.add_argument("images", nargs="*", metavar="IMAGES", help="a folder, or image files")
    visualize.add_argument("--out", default="runs/pictures", metavar="DIR", help="where pictures go (%(default)s)")
    visualize.add_argument("-h", "--help", action="store_true", help="this, and every setting with its default")

    report = commands.add_parser("report", help="one HTML page about a run, or about several side by side")
    report.add_argument("runs", nargs="+", metavar="RUN", help="the directory of a run, finished or not")
    report.add_argument("--out", metavar="FILE", help="where the page goes (report.html in the run)")

    study = commands.add_parser(
        "study",
        help="a grid of runs and their scores: what is missing is run",
        epilog="NAME=DIR says where a data set of the study lies; what needs one that is not named is left out",
    )
    study.add_argument("file", metavar="FILE", help="a study, such as studies/main.yaml")
    study.add_argument("--out", default="runs/studies", metavar="DIR", help="where the runs go (%(default)s)")
    study.add_argument("--results", metavar="DIR", help="where numbers, table and figure go (results/ beside FILE)")
    study.add_argument("--minutes", type=_positive, metavar="N", help="begin no run that would end later")
    study.add_argument(
        "--at-once", type=_count, default=1, metavar="N", help="runs on each GPU at a time (%(default)s)"
    )

    explore = commands.add_parser("explore", help="a page on which to ask images with boxes", add_help=False)
    explore.add_argument("weights", nargs="?", metavar="W", help=W)
    explore.add_argument("images", nargs="*", metavar="IMAGES", help="a folder, or image files")
    explore.add_argument("--against", metavar="W", help="other weights, shown beside the first on the same query")
    explore.add_argument(
        "--host", default="127.0.0.1", help="(%(default)s); another one needs the token that is printed"
    )
    explore.add_argument("--port", type=int, default=8765, help="(%(default)s); 0: any that is free")
    explore.add_argument("-h", "--help", action="store_true", help="this, and every setting with its default")
    parsers = {"demo": demo, "pretrain": pretrain, "evaluate": evaluate, "doctor": doctor, "plan": plan}
    parsers |= {"embed": embed, "export": export, "visualize": visualize, "report": report, "explore": explore}
    parsers |= {"study": study}
    for command in (demo, evaluate, embed, doctor, plan, export, visualize, report, study):
        command.add_argument("--overwrite", action="store_true", help=OVERWRITE)
    main.set_defaults(parsers=parsers)
    return main


def main(argv: Sequence[str] | None = None) -> None:
    for stream in (sys.stdout, sys.stderr):  # a name the terminal cannot show must not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    openmp.configure()  # before a command imports torch
    try:
        _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:  # `adclr pretrain --help | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        print("adclr: stopped", file=sys.stderr)
        raise SystemExit(130) from None


def _main(arguments: list[str]) -> None:
    words = [argument for argument in arguments if WORD.match(argument)]
    top = parser()
    options = top.parse_args([argument for argument in arguments if not WORD.match(argument)])
    if options.command is None:
        top.print_help()
        raise SystemExit(0)
    # pydantic takes 60 ms to import, which plain --help need not wait for
    from adclr.config.sections import UserError

    try:
        commands = {"demo": _demo, "pretrain": _pretrain, "evaluate": _evaluate, "doctor": _doctor, "plan": _plan}
        commands |= {"embed": _embed, "export": _export, "visualize": _visualize, "report": _report}
        commands |= {"explore": _explore, "study": _study}
        commands[options.command](options, words)
    except UserError as error:
        print(f"adclr: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a folder that went away: the system's sentence says it
        then = "the same command goes on from the last checkpoint, which is whole" if _saved(options) else "try again"
        name = printable(str(error.filename or "a file"))
        print(f"adclr: {name}: {error.strerror or error}; see to it and {then}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        if options.command in ("embed", "study"):
            print("adclr: stopped; the same command goes on with what is missing", file=sys.stderr)
            raise SystemExit(130) from None
        if not _saved(options):
            raise
        print("adclr: stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        raise SystemExit(130) from None


def _saved(options: argparse.Namespace) -> bool:
    """Whether there is a checkpoint of a training that was asked for."""
    trains = options.command in ("demo", "pretrain") and options.out
    return bool(trains) and any(Path(options.out).glob("**/checkpoints/step_*"))


def _print_settings(model: type, title: str) -> None:
    from adclr.config.sections import describe

    rows = describe(model)
    width = max(len(path) for path, _, _ in rows)
    print(f"\n{title}")
    for path, default, meaning in rows:
        print(f"  {path:<{width}}  {default:<22} {meaning}")


def _pretrain(options: argparse.Namespace, words: list[str]) -> None:
    from adclr.config import sections
    from adclr.config.settings import Settings

    if options.help:
        options.parsers["pretrain"].print_help()
        _print_settings(Settings, "settings, with the defaults that recipes start from:")
        return
    if options.list_recipes:
        for name in sections.recipe_names():
            first = sections.recipe_text(name).splitlines()[0].removeprefix("# ")
            print(f"{name:<20} {first}")
        return
    if not options.out:
        options.parsers["pretrain"].error("no output directory was named; give --out RUN")
    from adclr.training import launch

    values = sections.parse_words(words) | ({"data.check": options.check} if options.check else {})
    resume = bool(options.resume or options.replay)
    launched = launch.prepare(options.data, options.out, options.recipe, values, resume)
    if options.replay is not None:
        from adclr.training import replay

        replay.run(launched, options.replay)
        return
    for reason in launched.reasons:
        print(printable(reason), flush=True)
    from adclr.training import loop

    loop.run(launched)


def _evaluate(options: argparse.Namespace, words: list[str]) -> None:
    from adclr import evals
    from adclr.config import sections

    if options.help:
        options.parsers["evaluate"].print_help()
        for name in [options.name] if options.name else evals.NAMES:
            _print_settings(evals.module(name).Settings, f"settings of {name}{evals.recipe_hint(name)}:")
        return
    if not options.name:
        options.parsers["evaluate"].error(f"no evaluation was named; there are: {', '.join(evals.NAMES)}")
    values = sections.parse_words(words)
    chosen = evals.module(options.name)
    if options.data:
        if len(options.data) > 1 and options.name != "transfer":
            raise sections.UserError(
                f"{options.name} takes one --data, not {len(options.data)}; transfer takes several"
            )
        values["data"] = options.data if options.name == "transfer" else options.data[0]
    values |= {key: value for key in ("weights", "from_scratch", "partial") if (value := getattr(options, key))}
    settings = sections.build(chosen.Settings, evals.recipe_of(options.name, options.recipe), values)
    out = Path(options.out) if options.out else evals.file_of(options.name, settings)
    evals.score(options.name, settings, out, say=True, overwrite=options.overwrite)


def _embed(options: argparse.Namespace, words: list[str]) -> None:
    from adclr.config import sections
    from adclr.features import embedding

    if options.help:
        options.parsers["embed"].print_help()
        _print_settings(embedding.Settings, "settings:")
        return
    for name, what in (("weights", "W"), ("images", "IMAGES"), ("out", "--out PATH")):
        if not getattr(options, name):
            options.parsers["embed"].error(f"{what} is missing; write adclr embed W IMAGES --out features.parquet")
    values = {"check": options.check} if options.check else {}
    settings = sections.build(embedding.Settings, sections.parse_words(words), values)
    out = Path(options.out)
    embedding.run(options.weights, options.images, out, options.dense, settings, options.partial, options.overwrite)


def _doctor(options: argparse.Namespace, words: list[str]) -> None:
    from adclr.config import sections
    from adclr.data import doctor

    if options.help:
        options.parsers["doctor"].print_help()
        _print_settings(doctor.Settings, "settings:")
        return
    if not options.data:
        options.parsers["doctor"].error("no images were named; give the folder that holds them")
    settings = sections.build(doctor.Settings, sections.parse_words(words))
    doctor.run(options.data, Path(options.out), settings, options.overwrite)


def _plan(options: argparse.Namespace, words: list[str]) -> None:
    from adclr.config import sections

    if options.help:
        from adclr.config.settings import Settings

        options.parsers["plan"].print_help()
        _print_settings(Settings, "settings, as of adclr pretrain:")
        return
    from adclr.training import plan_gpus, planning

    gpu = plan_gpus.find(options.gpu, options.gpu_memory, options.gpu_tflops)
    out, file = (Path(name) if name else None for name in (options.out, options.json))
    values = sections.parse_words(words)
    words_of = (options.data, options.images, options.recipe, values)
    planning.run(*words_of, gpu, options.gpus, out, file, options.overwrite)


def _export(options: argparse.Namespace, words: list[str]) -> None:
    if words:
        options.parsers["export"].error(f"an export takes no settings, but was given {words[0]}")
    from adclr.weights.export import export

    export(options.weights, options.to, options.out, options.partial, options.input_size, options.overwrite)


def _visualize(options: argparse.Namespace, words: list[str]) -> None:
    from adclr.config import sections
    from adclr.features import visualize

    if options.help:
        options.parsers["visualize"].print_help()
        for name in [options.name] if options.name in visualize.DRAW else visualize.DRAW:
            _print_settings(visualize.DRAW[name][0], f"settings of {name}:")
        return
    if options.name not in visualize.DRAW:
        options.parsers["visualize"].error(f"no picture was named; there are: {', '.join(visualize.DRAW)}")
    if not options.images:
        options.parsers["visualize"].error("weights and images are both needed; write W and then the images")
    settings = sections.build(visualize.DRAW[options.name][0], sections.parse_words(words))
    visualize.run(options.name, options.weights, options.images, Path(options.out), settings, options.overwrite)


def _report(options: argparse.Namespace, words: list[str]) -> None:
    if words:
        options.parsers["report"].error(f"a report takes no settings, but was given {words[0]}")
    from adclr import report

    out = Path(options.out) if options.out else None
    print(f"written to {report.run(options.runs, out, options.overwrite)}")


def _study(options: argparse.Namespace, words: list[str]) -> None:
    from adclr import study
    from adclr.config import sections

    results, data = Path(options.results) if options.results else None, sections.parse_words(words)
    out = Path(options.out)
    study.run(Path(options.file), out, results, data, options.minutes, options.at_once, options.overwrite)


def _explore(options: argparse.Namespace, words: list[str]) -> None:
    from adclr.config import sections
    from adclr.features import explorer

    if options.help:
        options.parsers["explore"].print_help()
        _print_settings(explorer.Settings, "settings:")
        return
    if not options.images:
        options.parsers["explore"].error("weights and images are both needed; write W and then the images")
    if not 0 <= options.port < 65536:
        options.parsers["explore"].error(f"{options.port} is no port; write a number from 0 to 65535")
    settings = sections.build(explorer.Settings, sections.parse_words(words))
    weights = [options.weights, options.against] if options.against else [options.weights]
    explorer.run(weights, options.images, options.host, options.port, settings)


def _demo(options: argparse.Namespace, words: list[str]) -> None:
    if words:
        options.parsers["demo"].error(f"the demo takes no settings, but was given {words[0]}")
    from adclr import demo

    demo.run(Path(options.out), options.seed, options.overwrite)
