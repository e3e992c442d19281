"""The explorer in a browser: two tiny networks, twelve scenes, the program in a process of its own, and Chromium."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from adclr.data.sets import scenes
from adclr.training import launch, loop
from tiny import TINY

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium on this machine (apt-get install chromium)"
)
WAIT = 30_000  # milliseconds


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny networks and twelve scenes, one of them not square, one with a name that is not meant for a page."""
    folder = tmp_path_factory.mktemp("browser")
    for index in range(12):
        image = Image.fromarray(scenes.scene(0, index, 48).image)
        name = {3: "wide.png", 5: "<img src=x onerror=alert(1)>.png"}.get(index, f"{index:02d}.png")
        (folder / "photos").mkdir(exist_ok=True)
        (image.crop((0, 8, 48, 40)) if index == 3 else image).save(folder / "photos" / name)
    for number in range(2):
        settings = TINY | {"train.epochs": 1, "train.seed": number, "views.global_size": 32}
        loop.train(launch.prepare(folder / "photos", folder / f"net{number}", None, settings))
    (folder / "secret.txt").write_text("secret")
    return folder


@pytest.fixture(scope="module")
def serve(place: Path) -> Iterator[Callable[..., str]]:
    """`serve(...)` starts the program and gives the address it prints."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> str:
        command = [
            sys.executable,
            "-m",
            "adclr",
            "explore",
            str(place / "net0"),
            str(place / "photos"),
            "--port",
            "0",
            *words,
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        started.append(process)
        assert process.stdout is not None
        match = re.search(r"http://\S+", process.stdout.readline())
        assert match
        return match[0]

    yield start
    for process in started:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0  # the ordinary way to end it
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def one(serve: Callable[..., str]) -> str:
    return serve()


@pytest.fixture(scope="module")
def two(serve: Callable[..., str], place: Path) -> str:
    return serve("--against", str(place / "net1"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as actual:
        opened = actual.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def visit(browser: Any, address: str, width: int = 1280, finished: str = "true", **options: Any) -> Any:
    """A page on which all images were read, or some; whatever goes wrong on it is an error."""
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    page = context.new_page()
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: page.errors.append("a dialog"))
    page.goto(address)
    page.wait_for_selector(f"body[data-busy=false][data-finished={finished}]", timeout=WAIT)
    return page


def until(page: Any, expression: str) -> None:
    """By asking again and again: the page's own rules forbid what Playwright's waiting would run in it."""
    end = time.monotonic() + WAIT / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


def after(page: Any, act: Callable[[], object], what: str = "shown") -> None:
    """Waits until what an act has caused is on the page."""
    before = page.evaluate(f"Number(document.body.dataset.{what} ?? 0)")
    act()
    until(page, f"Number(document.body.dataset.{what} ?? 0) > {before}")
    page.wait_for_selector("body[data-busy=false]", timeout=WAIT)


def pixels(page: Any, selector: str) -> str:
    return str(page.eval_on_selector(selector, "canvas => canvas.toDataURL()"))


def drag(page: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    box = page.locator("#image").bounding_box()
    at = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in (start, end)]
    page.mouse.move(*at[0])
    page.mouse.down()
    page.mouse.move(*at[1], steps=4)
    page.mouse.up()


def names(page: Any, column: int = 0) -> list[str]:
    labels = page.locator("#results ol").nth(column).locator("button").evaluate_all("b => b.map(x => x.ariaLabel)")
    return [re.sub(r"^\d+: (.*), [-\d.]+$", r"\1", label) for label in labels]
