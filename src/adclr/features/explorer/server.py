"""The web server of the page: its own files, images by number, and answers as JSON. No file is opened by a name."""

from __future__ import annotations

import base64
import contextlib
import math
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from importlib import resources
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adclr.features.analysis import Box, Floats
from adclr.features.drawing import attention_scale
from adclr.features.explorer.gallery import Gallery
from adclr.features.explorer.library import Library

LOCAL = ("127.0.0.1", "localhost", "::1")  # names of this machine
FILES = {"/": ("index.html", "text/html"), "/explorer.css": ("explorer.css", "text/css")}
FILES |= {f"/{name}": (name, "text/javascript") for name in ("explorer.js", "maps.js", "state.js")}
COOKIE = "adclr_token"
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def build(gallery: Gallery, token: str | None) -> ASGIApp:
    """Return the application, which reads the images while it runs.

    Without a token it answers only requests to a name of this machine.
    """

    def model(parameters: QueryParams) -> Library:
        return gallery.libraries[_whole(parameters, "model", 0, len(gallery.libraries) - 1)]

    def image(parameters: QueryParams) -> int:
        return _whole(parameters, "image", 0, len(gallery.shown) - 1)

    def view(parameters: QueryParams, library: Library) -> dict[str, Any]:
        vit = library.vit
        head = None if parameters.get("head", "mean") == "mean" else _whole(parameters, "head", 0, vit.num_heads - 1)
        block = _whole(parameters, "block", 0, vit.depth - 1) if "block" in parameters else vit.depth - 1
        return {"block": block, "head": head, "temperature": _fraction(parameters, "temperature", 0.05, 100.0, 1.0)}

    def state(parameters: QueryParams) -> dict[str, Any]:
        since, shown = _whole(parameters, "since", 0, 10**9, 0), gallery.shown
        return {
            "models": [
                {"name": x.name, "depth": x.vit.depth, "heads": x.vit.num_heads, "patch": x.vit.patch_size}
                for x in gallery.libraries
            ],
            "images": [
                {
                    "name": image.name,
                    "label": image.label,
                    "width": image.width,
                    "height": image.height,
                    "grids": image.grids,
                }
                for image in shown[since:]
            ],
            "tried": gallery.num_read,
            "total": len(gallery.images),
            "finished": gallery.finished,
            "skipped": len(gallery.skipped),
            "note": gallery.note,
        }

    def num_known(parameters: QueryParams) -> int:
        """Return how many images the page knows of: while they are read, there may be more here already."""
        return _whole(parameters, "known", 0, 10**9 - 1, 10**9 - 1)

    def query(parameters: QueryParams) -> dict[str, Any]:
        library, started = model(parameters), time.perf_counter()
        answers = library.query(image(parameters), _box(parameters), **view(parameters, library))
        answers = [answer for answer in answers if answer.id < num_known(parameters)]
        return {
            "ids": [answer.id for answer in answers],
            **_attention([answer.attention for answer in answers]),
            "match": _packed(answer.match for answer in answers),
            "windows": [[round(edge, 4) for edge in answer.window] for answer in answers],
            "scores": [round(answer.score, 4) for answer in answers],
            "answers": [round(answer.answer, 4) for answer in answers],
            "milliseconds": round(1000 * (time.perf_counter() - started)),
        }

    def cls(parameters: QueryParams) -> dict[str, Any]:
        library = model(parameters)
        maps = [map_ for map_ in library.cls(**view(parameters, library)) if map_[0] < num_known(parameters)]
        return {"ids": [id_ for id_, _ in maps], **_attention([values for _, values in maps])}

    def components(parameters: QueryParams) -> dict[str, Any]:
        maps = [map_ for map_ in model(parameters).components() if map_[0] < num_known(parameters)]
        return {"ids": [id_ for id_, _ in maps], "maps": _packed(values for _, values in maps)}

    def similar(parameters: QueryParams) -> dict[str, Any]:
        number, library = image(parameters), model(parameters)
        rows, columns = gallery.shown[number].grids[gallery.libraries.index(library)]
        patch = _whole(parameters, "row", 0, rows - 1), _whole(parameters, "column", 0, columns - 1)
        return {"maps": _packed([library.similar(number, *patch)])}

    def picture(request: Request) -> Response:
        number = request.path_params["number"]
        if not 0 <= number < len(gallery.shown):
            raise HTTPException(404, "there is no such image")
        return Response(gallery.shown[number].jpeg, media_type="image/jpeg", headers={"cache-control": "max-age=3600"})

    @contextlib.asynccontextmanager
    async def reading(_: Starlette) -> AsyncIterator[None]:
        reader = threading.Thread(target=gallery.read, name="reader", daemon=True)
        reader.start()
        yield
        gallery.stop.set()

    functions = {"state": state, "query": query, "cls": cls, "components": components, "similar": similar}
    routes = [Route(path, _file(name, kind)) for path, (name, kind) in FILES.items()]
    routes += [Route(f"/api/{name}", _endpoint(function)) for name, function in functions.items()]
    routes += [Route("/image/{number:int}.jpg", picture)]
    handlers = {HTTPException: _refuse}
    return Guard(Starlette(routes=routes, lifespan=reading, exception_handlers=handlers), token)  # type: ignore[arg-type]


def _file(name: str, kind: str) -> Callable[[Request], Response]:
    text = (resources.files("adclr.features") / "explorer" / name).read_bytes()
    return lambda _: Response(text, media_type=kind)


def _endpoint(function: Callable[[QueryParams], dict[str, Any]]) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(function, request.query_params))

    return endpoint


async def _refuse(_: Request, error: HTTPException) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code)


# -- parameters of a request --


def _whole(parameters: QueryParams, name: str, least: int, most: int, default: int | None = None) -> int:
    text = parameters.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise HTTPException(400, f"{name} must be a whole number from {least} to {most}")
    return int(text)


def _fraction(parameters: QueryParams, name: str, least: float, most: float, default: float) -> float:
    return _fractions(parameters.get(name, str(default)), name, 1, least, most)[0]


def _fractions(text: str, name: str, count: int, least: float, most: float) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(math.isfinite(n) and least <= n <= most for n in numbers):
        raise HTTPException(400, f"{name} must be {count} numbers from {least:g} to {most:g}")
    return numbers


def _box(parameters: QueryParams) -> Box:
    left, top, right, bottom = _fractions(parameters.get("box", ""), "box", 4, 0, 1)
    if right - left < 0.001 or bottom - top < 0.001:
        raise HTTPException(400, "box must be left, top, right, bottom, and not empty")
    return left, top, right, bottom


# -- answers --


def _packed(maps: Iterable[Floats]) -> str:
    """Return numbers in [0, 1] as bytes, one map after the other."""
    parts = [(np.clip(values, 0, 1) * 255).round().astype(np.uint8).tobytes() for values in maps]
    return base64.b64encode(b"".join(parts)).decode()


def _attention(maps: list[Floats]) -> dict[str, Any]:
    """Return maps of attention, each on its own scale, and their peaks."""
    tops = [attention_scale(values) for values in maps]
    return {
        "maps": _packed(values / top for values, top in zip(maps, tops, strict=True)),
        "peaks": [round(float(values.max()), 2) for values in maps],
    }


# -- access --


class Guard:
    """Lets requests through that have the token or, without one, that are to a name of this machine.

    A foreign page can make a browser send requests here under a name of its own that resolves to this machine; such a
    request has that name in its Host header.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the application with `HEADERS` added, or by a refusal."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                added = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in present]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await (self._refusal(Request(scope)) or self.app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Return the response to a request that may not pass; None if it may."""
        if self.token is None:
            return None if _host(request.headers) in LOCAL else JSONResponse({"error": "this is not its name"}, 421)
        cookie = f"{COOKIE}_{request.url.port or 80}"  # browsers send the cookies of a host to all its ports
        token = request.query_params.get("token")
        if token is not None and _same(token, self.token):
            answer = RedirectResponse(request.url.remove_query_params("token").path or "/", 303)
            # Lax: browsers withhold a strict cookie when the link was clicked on another site, so the redirect would
            # end in a 401. Other sites still cannot use it: requests that their pages make come without the cookie,
            # and a navigation, which comes with it, only reads.
            answer.set_cookie(cookie, self.token, httponly=True, samesite="lax")
            return answer
        if _same(request.cookies.get(cookie, ""), self.token):
            return None
        return JSONResponse({"error": "a token is needed: open the address that adclr explore has printed"}, 401)


def _same(token: str, expected: str) -> bool:
    return secrets.compare_digest(token.encode(), expected.encode())


def _host(headers: Headers) -> str:
    name = headers.get("host", "")
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
