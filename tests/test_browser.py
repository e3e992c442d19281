"""The explorer as a user has it: the program in a process of its own, the page in Chromium, on a desk and in a hand."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from adclr import explorer, launch, scenes, training
from adclr.explorer.gallery import Gallery
from adclr.explorer.library import Library
from adclr.sources import ImageFolder
from adclr.weights import load_weights
from tiny import TINY

uvicorn = pytest.importorskip("uvicorn", reason="the extra explore is not installed")
server = pytest.importorskip("adclr.explorer.server", reason="the extra explore is not installed")

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
        training.run(launch.prepare(folder / "photos", folder / f"net{number}", None, settings))
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
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found
        return found[0]

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
    with playwright.sync_playwright() as found:
        opened = found.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
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


VIEW, TILE = "#panels figure:nth-child(1) canvas", "#results li:nth-child(1) canvas"


@needs_chromium
def test_a_box_changes_the_maps_and_its_own_image_is_first(browser: Any, one: str) -> None:
    page = visit(browser, one)
    assert len(names(page)) == 12
    before, tile = pixels(page, VIEW), pixels(page, TILE)
    drag(page, (0.05, 0.1), (0.5, 0.6))
    until(page, "location.hash.includes('box=0.0')")
    page.wait_for_selector("body[data-busy=false]", timeout=WAIT)
    assert pixels(page, VIEW) != before
    assert pixels(page, TILE) != tile
    assert names(page)[0] == "00.png"
    after(page, lambda: page.locator("#results li button").nth(4).click())
    chosen = page.locator("#name").inner_text()
    assert chosen != "00.png"
    assert names(page)[0] == chosen
    scores = page.locator("#results li b").all_inner_texts()
    assert scores[0] == "1.00"
    assert [float(text) for text in scores] == sorted(map(float, scores), reverse=True)
    assert page.errors == []


@needs_chromium
def test_views_blocks_heads_and_temperatures_change_what_is_seen(browser: Any, one: str) -> None:
    page = visit(browser, one)
    seen = {pixels(page, VIEW)}
    for act in (
        lambda: page.locator("#view label", has_text="match").click(),
        lambda: page.locator("#view label", has_text="components").click(),
        lambda: page.locator("#view label", has_text="[CLS]").click(),
        lambda: page.locator("#block").fill("1"),
        lambda: page.locator("#head").select_option("1"),
        lambda: page.locator("#temperature").fill("-2"),
        lambda: (page.evaluate("document.activeElement.blur()"), page.keyboard.press("1")),
    ):
        after(page, act)
        seen.add(pixels(page, VIEW))
    assert len(seen) == 8
    for word in ("block=0", "head=1", "temperature=0.25"):
        assert word in page.url
    page.locator("#rank").select_option("name")
    numbered = [name for name in names(page) if name[0].isdigit()]
    assert numbered == sorted(numbered)
    assert page.errors == []


@needs_chromium
def test_a_link_gives_the_same_picture_again(browser: Any, one: str) -> None:
    page = visit(browser, one)
    drag(page, (0.2, 0.3), (0.8, 0.7))
    after(page, lambda: page.locator("#results li button").nth(2).click())
    after(page, lambda: page.locator("#block").fill("1"))
    after(page, lambda: page.locator("#view label", has_text="match").click())
    shown = [pixels(page, selector) for selector in ("#image", VIEW, TILE)], names(page)
    again = visit(browser, page.url)
    assert again.url == page.url
    assert ([pixels(again, selector) for selector in ("#image", VIEW, TILE)], names(again)) == shown
    page.reload()
    page.wait_for_selector("body[data-busy=false][data-finished=true]", timeout=WAIT)
    assert pixels(page, VIEW) == shown[0][1]
    strange = visit(browser, f"{one}#image=../../etc/passwd&box=1,2,NaN&view=x&block=1e9&head=-4&temperature=0&rank=")
    assert strange.locator("#name").inner_text() == names(strange)[0]
    assert strange.errors == []


@needs_chromium
def test_two_networks_side_by_side_on_the_same_query(browser: Any, two: str) -> None:
    page = visit(browser, two)
    assert page.locator("#results h2").all_inner_texts() == ["net0", "net1"]
    assert page.locator("#panels figure").count() == 4
    assert pixels(page, VIEW) != pixels(page, "#panels figure:nth-child(3) canvas")
    drag(page, (0.1, 0.1), (0.6, 0.5))
    until(page, "!location.hash.includes('box=0.35')")
    page.wait_for_selector("body[data-busy=false]", timeout=WAIT)
    assert names(page, 0)[0] == names(page, 1)[0] == "00.png"
    assert names(page, 0) != names(page, 1)
    assert page.errors == []


@needs_chromium
def test_a_patch_that_is_pointed_at_shows_what_is_like_it(browser: Any, two: str) -> None:
    page = visit(browser, two)
    box = page.locator("#image").bounding_box()
    panel = "#panels figure:nth-child(2) canvas"
    found = {pixels(page, panel)}
    for x in (0.1, 0.6):
        after(page, lambda x=x: page.mouse.move(box["x"] + x * box["width"], box["y"] + 0.4 * box["height"]), "pointed")
        found.add(pixels(page, panel))
    assert len(found) == 3
    assert "like the patch" in page.locator("#panels").inner_text()
    assert page.errors == []


@needs_chromium
def test_a_link_points_at_the_same_patch_again(browser: Any, two: str) -> None:
    page = visit(browser, two)
    box = page.locator("#image").bounding_box()
    at = box["x"] + 0.7 * box["width"], box["y"] + 0.3 * box["height"]
    after(page, lambda: page.mouse.move(*at), "pointed")
    until(page, "location.hash.includes('patch=0.7')")
    similar = [f"#panels figure:nth-child({n}) canvas" for n in (2, 4)]
    again = visit(browser, page.url)
    until(again, "document.body.dataset.pointed > 0")
    assert [pixels(again, panel) for panel in similar] == [pixels(page, panel) for panel in similar]
    assert again.locator("#panels").inner_text().count("like the patch") == 2
    after(page, lambda: page.locator("#results li button").nth(3).click())
    assert "patch" not in page.url  # it was of the other image
    for wrong in ("0.5", "0.5,2", "a,b", "NaN,0", ",", "0.1,0.2,0.3"):
        strange = visit(browser, f"{two}#patch={wrong}")
        assert "like the patch" not in strange.locator("#panels").inner_text()
        assert strange.errors == []
        strange.context.close()
    assert page.errors == again.errors == []


@needs_chromium
def test_keys_point_at_patches(browser: Any, one: str) -> None:
    page = visit(browser, f"{one}#box=0.25,0.25,0.5,0.5")
    panel = "#panels figure:nth-child(2) canvas"
    found = [pixels(page, panel)]
    page.locator("#image").focus()
    for key, place in (("ArrowLeft", "0.375,0.375"), ("ArrowLeft", "0.3125,0.4375"), ("ArrowDown", "0.3125,0.5625")):
        after(page, lambda key=key: page.keyboard.press(f"Alt+{key}"), "pointed")
        until(page, f"location.hash.includes('patch={place}')")  # first the middle of the box, then patch by patch
        found.append(pixels(page, panel))
    for _ in range(8):
        after(page, lambda: page.keyboard.press("Alt+ArrowLeft"), "pointed")
    until(page, "location.hash.includes('patch=0.0625,')")  # and no further
    assert len(set(found)) == 4
    assert "box=0.25,0.25,0.5,0.5" in page.url
    page.keyboard.press("Escape")
    until(page, "!location.hash.includes('patch')")
    assert pixels(page, panel) == found[0]
    assert "Alt and arrows" in page.locator("#hint").inner_text()
    assert page.errors == []


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_the_key_is_seen_and_names_can_be_read(browser: Any, two: str, width: int) -> None:
    page = visit(browser, two, width)
    key, stage, results = (page.locator(part).bounding_box() for part in ("#key", "#stage", "#results"))
    assert stage["y"] + stage["height"] <= key["y"] < key["y"] + key["height"] <= results["y"]
    if width == 1280:
        assert key["y"] + key["height"] < 900  # without scrolling
    assert "attention" in page.locator("#key").inner_text()
    cut = """spans => spans.filter(s => s.scrollWidth > s.clientWidth + 1 || s.scrollHeight > s.clientHeight + 1
                                        || getComputedStyle(s).textOverflow == 'ellipsis').map(s => s.innerText)"""
    names_cut = page.locator("#results li span").evaluate_all(cut)
    assert [name for name in names_cut if "onerror" not in name] == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.errors == []


@needs_chromium
def test_keys_move_and_size_the_box(browser: Any, one: str) -> None:
    page = visit(browser, f"{one}#box=0.25,0.25,0.5,0.5")

    def box() -> list[float]:
        found = re.search(r"box=([\d.,]+)", page.url)
        assert found
        return [float(edge) for edge in found[1].split(",")]

    page.locator("#image").focus()
    after(page, lambda: page.keyboard.press("ArrowRight"))
    assert box() == pytest.approx([0.375, 0.25, 0.625, 0.5], abs=1e-3)  # one of 8 patches
    after(page, lambda: page.keyboard.press("Shift+ArrowDown"))
    assert box() == pytest.approx([0.375, 0.25, 0.625, 0.625], abs=1e-3)
    for _ in range(8):
        after(page, lambda: page.keyboard.press("ArrowUp"))
    assert box() == pytest.approx([0.375, 0, 0.625, 0.375], abs=1e-3)  # and no further
    page.keyboard.press("Tab")
    for _ in range(4):
        if page.evaluate("document.activeElement.tagName") == "BUTTON":
            break
        page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    after(page, lambda: page.keyboard.press("Enter"))
    assert page.locator("#name").inner_text() != "00.png"
    assert page.errors == []


@needs_chromium
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_it_fits_into_a_hand_and_takes_touches(browser: Any, two: str, scheme: str) -> None:
    page = visit(browser, two, 390, has_touch=True, is_mobile=True, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 200) == (scheme == "dark")
    page.locator("#theme").tap()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != paper
    box = page.locator("#image").bounding_box()
    assert box["width"] > 350
    x, y = box["x"] + 0.3 * box["width"], box["y"] + 0.3 * box["height"]
    after(page, lambda: page.touchscreen.tap(x, y), "pointed")
    after(page, lambda: page.locator("#results li button").nth(1).tap())
    touch = page.context.new_cdp_session(page)
    page.locator("#image").scroll_into_view_if_needed()
    box = page.locator("#image").bounding_box()

    for kind, share in (("touchStart", 0.2), ("touchMove", 0.4), ("touchMove", 0.7), ("touchEnd", None)):
        at = (
            []
            if share is None
            else [{side: box[side] + share * box[of] for side, of in (("x", "width"), ("y", "height"))}]
        )
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": at})
    until(page, "/box=0.(2|19)[^&]*,0.(7|69)[^&]*$/.test(location.hash)")
    for control in page.locator("button:visible, select:visible").all()[:8]:
        assert control.bounding_box()["height"] >= 24
    assert page.errors == []


@needs_chromium
def test_the_page_can_be_used_while_images_are_read(browser: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Library.read

    def slow(self: Library, *given: Any) -> None:
        time.sleep(0.7)
        read(self, *given)

    monkeypatch.setattr(Library, "read", slow)
    monkeypatch.setattr(Library, "together", 2)
    gallery = Gallery(ImageFolder(place / "photos"), [Library("x", load_weights(place / "net0"), 32)], None, 1.0)
    program = uvicorn.Server(uvicorn.Config(server.build(gallery, None), log_level="warning", lifespan="on"))
    listening = explorer._listen("127.0.0.1", 0)
    thread = threading.Thread(target=program.run, args=([listening],), daemon=True)
    thread.start()
    page = visit(browser, f"http://127.0.0.1:{listening.getsockname()[1]}/#image=07.png", finished="false")
    assert 0 < len(names(page)) < 12
    assert "reading" in page.locator("#progress").inner_text()
    drag(page, (0.1, 0.1), (0.5, 0.5))
    page.wait_for_selector("body[data-finished=true]", timeout=WAIT)
    page.wait_for_selector("body[data-busy=false]", timeout=WAIT)
    assert len(names(page)) == 12
    assert page.locator("#name").inner_text() == names(page)[0] == "07.png"  # the link's, though it came late
    assert page.errors == []
    program.should_exit = True
    thread.join(timeout=20)


@needs_chromium
def test_the_picture_can_be_saved(browser: Any, two: str, tmp_path: Path) -> None:
    page = visit(browser, two)
    with page.expect_download() as download:
        page.locator("#save").click()
    download.value.save_as(tmp_path / "saved.png")
    with Image.open(tmp_path / "saved.png") as picture:
        assert picture.width > 900
        assert picture.height > 500
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 1000
    assert page.errors == []


@needs_chromium
def test_elsewhere_the_printed_address_lets_one_in(browser: Any, serve: Callable[..., str]) -> None:
    address = serve("--host", "0.0.0.0").replace("0.0.0.0", "127.0.0.1")
    assert "?token=" in address
    page = visit(browser, address)
    assert "token" not in page.url
    assert len(names(page)) == 12
    stranger = browser.new_context().new_page()
    assert stranger.goto(address.partition("?")[0]).status == 401


def test_paths_that_lead_out_are_refused_as_they_are_written(one: str) -> None:
    """By hand, since a browser tidies paths before it sends them."""
    host, port = re.findall(r"//([\d.]+):(\d+)", one)[0]
    for path in (
        "/../secret.txt",
        "/image/../../secret.txt",
        "/image/%2e%2e/secret.txt",
        "/image/0.jpg/../../../secret.txt",
    ):
        with socket.create_connection((host, int(port)), timeout=10) as line:
            line.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            reply = b"".join(iter(lambda line=line: line.recv(4096), b""))
        assert reply.startswith(b"HTTP/1.1 404"), path
        assert b"secret" not in reply
