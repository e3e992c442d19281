"""`adclr explore`: a local page on which a box drawn in one image becomes a query to all images."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket

from pydantic import Field

from adclr.config.parsing import Count, Device, Positive, Section, Side, UserError
from adclr.system.optional import require


class ExplorerSettings(Section):
    """Settings of `adclr explore`."""

    size: Side | None = Field(None, description="shorter side of the images, pixels; null: the size of training")
    num_images: Count | None = Field(
        500, description="limit of the number of images, spread over the collection; null: all"
    )
    max_gib: Positive = Field(4.0, description="memory limit, GiB; ViT-S/16 at 224 pixels needs 3.8 MB per image")
    device: Device = Field("auto", description="auto: the GPU if there is one")


def serve(weights: list[str], images: list[str], host: str, port: int, settings: ExplorerSettings) -> None:
    """Serve the page until it is stopped."""
    uvicorn, _ = (require(package, "explore", "adclr explore") for package in ("uvicorn", "starlette"))
    from adclr.features import analysis
    from adclr.features.explorer import server
    from adclr.features.explorer.gallery import Gallery
    from adclr.features.explorer.library import Library
    from adclr.features.visualize import open_images
    from adclr.system.devices import select_device

    source, device = open_images(images), select_device(settings.device)
    libraries = [Library(analysis.short_name(name), analysis.load(name, device), settings.size) for name in weights]
    gallery = Gallery(source, libraries, settings.num_images, settings.max_gib)
    token = None if host in server.LOCAL else secrets.token_urlsafe(16)
    listening = _listen(host, port)
    query = f"?token={token}" if token else ""
    first, *others = [f"http://{name}:{listening.getsockname()[1]}/{query}" for name in _names(host, listening)]
    elsewhere = "".join(f"\n  or {address} from another machine" for address in others)
    print(f"open {first} (Ctrl-C ends it){elsewhere}", flush=True)
    config = uvicorn.Config(server.build(gallery, token), log_level="warning", lifespan="on", access_log=False)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run([listening])


def _names(host: str, listening: socket.socket) -> list[str]:
    """Returns the hosts of the printed addresses: localhost first if the socket listens on all interfaces.

    `http://0.0.0.0` is an address to listen on. Browsers refuse it, and from another machine it leads nowhere.
    """
    bound = ipaddress.ip_address(listening.getsockname()[0])
    if not bound.is_unspecified:
        return [f"[{host}]" if ":" in host else host]
    return ["localhost", _outgoing_address()]


def _outgoing_address() -> str:
    """Returns the IPv4 address from which this machine reaches others, or its name if it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # an address for documentation; connecting a UDP socket sends no packet
        return str(probe.getsockname()[0])
    return socket.gethostname()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except OSError as error:
        raise UserError(f"{host}:{port} cannot be used ({error.strerror}); choose another --port or --host") from None
    return listening
