"""The explorer as a user has it: the program in a process of its own, the page in Chromium, on a desk and in a hand."""

from __future__ import annotations

import http.server
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from adclr.data.sources import ImageFolder
from adclr.features import explorer
from adclr.features.explorer.gallery import Gallery
from adclr.features.explorer.library import Library
from adclr.weights.backbone import load_weights
from browsing import WAIT, after, drag, names, needs_chromium, pixels, until, visit

pytest_plugins = ["browsing"]
uvicorn = pytest.importorskip("uvicorn", reason="the extra explore is not installed")
server = pytest.importorskip("adclr.features.explorer.server", reason="the extra explore is not installed")

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
    assert "similarity to the patch" in page.locator("#panels").inner_text()
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
    assert again.locator("#panels").inner_text().count("similarity to the patch") == 2
    after(page, lambda: page.locator("#results li button").nth(3).click())
    assert "patch" not in page.url  # it was of the other image
    for wrong in ("0.5", "0.5,2", "a,b", "NaN,0", ",", "0.1,0.2,0.3"):
        strange = visit(browser, f"{two}#patch={wrong}")
        assert "similarity to the patch" not in strange.locator("#panels").inner_text()
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
    assert "Alt and arrow keys" in page.locator("#hint").inner_text()
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
    monkeypatch.setattr(Library, "batch_size", 2)
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


@pytest.fixture(scope="module")
def everywhere(serve: Callable[..., str]) -> str:
    return serve("--host", "0.0.0.0")


@needs_chromium
def test_elsewhere_the_printed_address_lets_one_in(browser: Any, everywhere: str) -> None:
    assert everywhere.startswith("http://localhost:")
    assert "?token=" in everywhere
    page = visit(browser, everywhere)
    assert "token" not in page.url
    assert len(names(page)) == 12
    stranger = browser.new_context().new_page()
    assert stranger.goto(everywhere.partition("?")[0]).status == 401


@pytest.fixture
def other_site(everywhere: str) -> Iterator[str]:
    """A page with the token link: to a browser 127.0.0.1 and localhost are two sites."""

    class Linking(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(f'<a href="{everywhere}#box=0.1,0.1,0.5,0.5">look</a>'.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Linking) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{site.server_address[1]}/"
        site.shutdown()


@needs_chromium
def test_a_token_link_works_from_another_site_and_other_sites_get_nothing(
    browser: Any, everywhere: str, other_site: str
) -> None:
    page = browser.new_context().new_page()
    page.goto(other_site)
    page.click("a")
    page.wait_for_selector("body[data-busy=false][data-finished=true]", timeout=WAIT)
    assert "token" not in page.url
    assert "box=0.1,0.1,0.5,0.5" in page.url
    page.goto(other_site)
    answers: list[int] = []
    page.on("response", lambda response: answers.append(response.status) if "api" in response.url else None)
    state = everywhere.partition("?")[0] + "api/state"
    page.evaluate("state => fetch(state, { mode: 'no-cors', credentials: 'include' })", state)
    assert answers == [401]  # without the cookie
    assert page.goto(state).status == 200  # there is one


@needs_chromium
def test_the_address_has_the_box_as_soon_as_a_drag_ends(browser: Any, one: str) -> None:
    page = visit(browser, one)
    page.route("**/api/query?*", lambda route: None)  # the server never answers
    drag(page, (0.1, 0.2), (0.5, 0.75))
    box = page.evaluate("new URLSearchParams(location.hash.slice(1)).get('box')")
    assert [float(edge) for edge in box.split(",")] == pytest.approx([0.1, 0.2, 0.5, 0.75], abs=0.01)
    page.evaluate(
        """() => {
             const write = history.replaceState.bind(history);
             history.replaceState = () => { history.replaceState = write; throw new Error("too many addresses"); };
           }"""
    )
    drag(page, (0.3, 0.2), (0.6, 0.75))
    until(page, "location.hash.includes('box=0.3,')")  # a second later, since browsers refuse too many at once
    page.unroute_all(behavior="ignoreErrors")


COLORFULNESS = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let sum = 0;
  for (let i = 0; i < data.length; i += 4)
    sum += Math.max(data[i], data[i + 1], data[i + 2]) - Math.min(data[i], data[i + 1], data[i + 2]);
  return sum / (data.length / 4);
}"""


@needs_chromium
def test_a_map_without_a_peak_does_not_hide_its_image(browser: Any, one: str) -> None:
    page = visit(browser, f"{one}#temperature=100")  # all patches get nearly the same attention
    assert max(page.eval_on_selector(canvas, COLORFULNESS) for canvas in (TILE, VIEW)) < 25

    def peaked(route: Any) -> None:
        answer = route.fetch().json()
        route.fulfill(json=answer | {"peaks": [2.0 for _ in answer["ids"]]})

    page.route("**/api/query?*", peaked)
    after(page, lambda: page.locator("#head").select_option("1"))
    assert min(page.eval_on_selector(canvas, COLORFULNESS) for canvas in (TILE, VIEW)) > 60
    assert page.errors == []


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
