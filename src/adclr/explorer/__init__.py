"""`adclr explore`: a local page on which to draw a box in an image and see at once where that query looks, in all."""

from __future__ import annotations

import contextlib
import secrets
import socket
from pathlib import Path

from pydantic import Field

from adclr.config import Count, Device, Positive, Section, UserError
from adclr.settings import Side

LOCAL = ("127.0.0.1", "localhost", "::1")  # names of this machine


class Settings(Section):
    size: Side | None = Field(
        None, description="shorter side of images in the network, pixels; null: what it was trained at"
    )
    num_images: Count | None = Field(500, description="images at most, spread over the collection; null: all")
    max_gib: Positive = Field(4.0, description="memory for what is kept of them; 3.8 MB an image for ViT-S/16 at 224")
    device: Device = Field("auto", description="auto: the GPU if there is one")


def run(weights: list[str], images: list[str], host: str, port: int, settings: Settings) -> None:
    """Serves until it is stopped."""
    try:
        import uvicorn

        from adclr.explorer import server
    except ModuleNotFoundError as error:
        raise UserError(f"the page needs {error.name}, which is not here; run: pip install 'adclr[explore]'") from None
    from adclr import looking
    from adclr.devices import choose
    from adclr.explorer.gallery import Gallery
    from adclr.explorer.library import Library
    from adclr.visualize import open_images

    source, device = open_images(images), choose(settings.device)
    libraries = [Library(_short(name), looking.load(name, device), settings.size) for name in weights]
    gallery = Gallery(source, libraries, settings.num_images, settings.max_gib)
    token = None if host in LOCAL else secrets.token_urlsafe(16)
    listening = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}/{f'?token={token}' if token else ''}"
    print(f"open {address} (Ctrl-C ends it)", flush=True)
    config = uvicorn.Config(server.build(gallery, token), log_level="warning", lifespan="on", access_log=False)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run([listening])


def _short(name: str) -> str:
    path = Path(name)
    return path.parent.name if path.name in ("run", "backbone.safetensors") and path.parent.name else path.name


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(128)
    except OSError as error:
        raise UserError(f"{host}:{port} cannot be used ({error.strerror}); choose another --port or --host") from None
    return found
