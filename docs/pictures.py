"""Draws the pictures of README.md and looking.md from the built-in scenes: `make pictures`, 15 minutes on 2 cores.

The commands are those a user would type; what is drawn goes to docs/pictures. The page and the explorer are
photographed by Chromium where there is one. The pictures of photographs need weights and scikit-image, whose samples
they show (free of rights: NASA, SpaceX, Stefan van der Walt, Pikolo Espresso Bar):

    python docs/pictures.py --photographs WEIGHTS
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parent.parent  # all other paths are below it, so that no picture shows where that is
OUT, RUNS = Path("docs/pictures"), Path("runs")
DEMO, DRAWN, COLLAPSED = RUNS / "demo", RUNS / "pictures", RUNS / "collapsed"
PUBLISHED, READ_ONLY = RUNS / "published", RUNS / "read_only"  # published queries, and read-only ones
VAL = DEMO / "scenes/val"
SCENES = [VAL / name for name in ("bar/02007.png", "disc/02420.png", "ring/02024.png", "triangle/02489.png")]
CLASSES = [VAL / name for name in ("disc/02006.png", "disc/02017.png", "flower/02013.png", "flower/02016.png")]
FLOWERS = [VAL / "flower" / name for name in ("02013.png", "02016.png", "02021.png")]
VARIED = [*SCENES[:1], *(VAL / name for name in ("cross/02078.png", "disc/02249.png", "flower/02270.png"))]
VARIED += [VAL / name for name in ("frame/02460.png", "ring/02380.png", "star/02081.png", "triangle/02489.png")]


def adclr(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "adclr", *map(str, words)], check=True, cwd=ROOT)


def keep(drawn: Path, name: str) -> None:
    """Into the repository, as a JPEG with all its colors: a fifth of the bytes."""
    with Image.open(ROOT / drawn) as picture:
        picture.convert("RGB").save(ROOT / OUT / f"{name}.jpg", quality=90, subsampling=0, optimize=True)


def draw() -> None:
    run = DEMO / "run"
    keep(DEMO / "attention.png", "demo")
    adclr("visualize", "attention", run, *SCENES, "--out", DRAWN, "size=128")
    keep(DRAWN / "attention.png", "attention")
    adclr("visualize", "queries", run, *CLASSES, "--out", DRAWN, "size=128", "box=[0.35,0.35,0.6,0.6]")
    keep(DRAWN / "queries_across.png", "queries_across")
    compared = ("--out", DRAWN / "against", "size=128", "box=[0.35,0.35,0.6,0.6]", f"against={READ_ONLY}")
    adclr("visualize", "queries", PUBLISHED, *CLASSES, *compared)
    keep(DRAWN / "against/queries_against.png", "queries_against")
    adclr("visualize", "pca", run, *VARIED, "--out", DRAWN, "size=128")
    keep(DRAWN / "pca.png", "pca")
    adclr("visualize", "pca", run, *VARIED, "--out", DRAWN / "things", "size=128", "background=remove")
    keep(DRAWN / "things/pca.png", "pca_things")
    adclr("visualize", "match", run, *FLOWERS, "--out", DRAWN, "size=128")
    keep(DRAWN / "match.png", "match")
    adclr("visualize", "queries", COLLAPSED, *SCENES, "--out", DRAWN / "collapsed", "size=128", "seed=1")
    keep(DRAWN / "collapsed/queries.png", "collapsed")


def photograph(chromium: str) -> None:
    """The page of the demo's run, and the explorer on its scenes."""
    from playwright.sync_api import sync_playwright

    adclr("report", DEMO / "run")
    link = "image=bar/02007.png&box=0.3,0.25,0.55,0.5&patch=0.37,0.92&view=match"
    command = [sys.executable, "-m", "adclr", "explore", DEMO / "run", VAL, "--port", "0", "num_images=60", "size=128"]
    with (
        sync_playwright() as browsers,
        subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, cwd=ROOT) as explorer,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(explorer.send_signal, signal.SIGINT)
        browser = browsers.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 2100})
        page.goto((ROOT / DEMO / "run/report.html").as_uri())
        page.screenshot(path=ROOT / DRAWN / "report.png")
        assert explorer.stdout is not None
        address = explorer.stdout.readline().split()[1]
        for name, width, height, scheme in (("explorer", 1280, 860, "light"), ("explorer_hand", 390, 1200, "dark")):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(f"{address}#{link}")
            page.wait_for_selector("body[data-busy=false][data-finished=true][data-pointed]")
            page.screenshot(path=ROOT / DRAWN / f"{name}.png")
        browser.close()
    for name in ("report", "explorer", "explorer_hand"):
        keep(DRAWN / f"{name}.png", name)


def draw_photographs(weights: str) -> None:
    """Draw queries and principal components of scikit-image's photographs."""
    from skimage import data

    folder = RUNS / "photographs"
    (ROOT / folder).mkdir(parents=True, exist_ok=True)
    names = ("astronaut", "chelsea", "coffee", "rocket")
    for name in names:
        Image.fromarray(getattr(data, name)()).save(ROOT / folder / f"{name}.png")
    files = [folder / f"{name}.png" for name in names]
    adclr("visualize", "queries", weights, *files, "--out", DRAWN / "photographs", "size=336")
    keep(DRAWN / "photographs/queries.png", "photographs")
    adclr("visualize", "pca", weights, *files, "--out", DRAWN / "photographs", "size=336")
    keep(DRAWN / "photographs/pca.png", "photographs_pca")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", metavar="WEIGHTS", help="draw only these, with weights that you have")
    arguments = parser.parse_args()
    (ROOT / OUT).mkdir(exist_ok=True)
    if arguments.photographs:
        draw_photographs(arguments.photographs)
        return
    adclr("demo", "--out", DEMO)
    collapse = ("teacher_temperature=1", "teacher_temperature_start=1", f"probe.data={DEMO / 'scenes'}")
    adclr("pretrain", DEMO / "scenes/train", "--out", COLLAPSED, "--recipe", "demo_adclr", *collapse)
    read_only = (
        "model.query_read_only_blocks=1",
        "model.query_keys=patches",
        "query_temperature=0.1",
        "query_weight=0.5",
    )
    for out, changes in ((PUBLISHED, ()), (READ_ONLY, read_only)):
        adclr("pretrain", DEMO / "scenes/train", "--out", out, "--recipe", "demo_adclr", *changes)
    draw()
    chromium = shutil.which("chromium")
    if chromium:
        photograph(chromium)


if __name__ == "__main__":
    main()
