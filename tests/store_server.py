"""An S3 server for tests: moto's, in a process of its own, with faults on request.

`python tests/store_server.py PORT` serves; `PUT /_faults` sets what goes wrong from then on, as JSON:
{"rate": of 1, "kinds": ["500", "503", "truncate", "reset", "403"], "latency": s, "seed": n}.
GET /_faults returns how many faults and requests there were. All others can fail.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUCKET = "pictures"
# moto looks whether a request is signed, not how
SIGNED = "AWS4-HMAC-SHA256 Credential=AKIA/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
ERRORS = {
    "500": ("500 Internal Server Error", "InternalError"),
    "503": ("503 Slow Down", "SlowDown"),
    "403": ("403 Forbidden", "AccessDenied"),
}


class Faults:
    """The application of a server that sometimes fails."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self.app, self.lock = app, threading.Lock()
        self.settings: dict[str, Any] = {}
        self.counts: Counter[str] = Counter()
        self.random = random.Random(0)

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/_faults":
            return self._control(environ, start)
        if latency := self.settings.get("latency"):
            time.sleep(latency)
        with self.lock:
            self.counts["requests"] += 1
            fails = self.random.random() < self.settings.get("rate", 0)
            num_faults = sum(self.counts.values()) - self.counts["requests"]
            kind = self.settings["kinds"][num_faults % len(self.settings["kinds"])] if fails else ""
            self.counts.update([kind] if kind else [])
        if kind in ERRORS:
            status, code = ERRORS[kind]
            body = f"<Error><Code>{code}</Code><Message>a fault of the test</Message></Error>".encode()
            start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        if kind == "reset":
            connection = environ["werkzeug.socket"]
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
        if kind == "truncate":
            return self._half(environ, start)
        return self.app(environ, start)

    def _half(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Send the headers of the whole answer and half of it."""

        def start_and_close(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            return start(status, [*headers, ("Connection", "close")], *rest)

        whole = b"".join(self.app(environ, start_and_close))
        return [whole[: len(whole) // 2]]

    def _control(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        body = json.dumps(self.counts).encode()
        if environ["REQUEST_METHOD"] == "PUT":
            self.settings = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            self.random = random.Random(self.settings.get("seed", 0))
            self.counts.clear()
        start("200 OK", [("Content-Length", str(len(body)))])
        return [body]


def serve(port: int) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_: Any) -> None:
            pass

        def log_error(self, *_: Any) -> None:
            pass

    app = Faults(DomainDispatcherApplication(create_backend_app))
    make_server("127.0.0.1", port, app, threaded=True, request_handler=Quiet).serve_forever()


class Server:
    """A running server, its bucket and its faults."""

    def __init__(self, port: int) -> None:
        self.port, self.endpoint = port, f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "AKIATESTKEYOFTESTS",
            "AWS_SECRET_ACCESS_KEY": "secret-key-of-tests",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, body, {"Authorization": SIGNED, "x-amz-acl": "public-read"})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        assert answer.status < 300, (method, path, answer.status, content)
        return content

    def put(self, name: str, data: bytes) -> str:
        """Write an object and return its URL."""
        self.request("PUT", f"/{BUCKET}/{name}", data)
        return f"s3://{BUCKET}/{name}"

    def put_folder(self, folder: Path, prefix: str) -> str:
        """Write all files of a folder and return its URL."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return f"s3://{BUCKET}/{prefix}"

    def get(self, name: str) -> bytes:
        return self.request("GET", f"/{BUCKET}/{name}")

    def delete(self, name: str) -> None:
        self.request("DELETE", f"/{BUCKET}/{name}")

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = json.loads(self.request("GET", "/_faults"))
        return counts

    @contextmanager
    def faults(self, **settings: Any) -> Iterator[None]:
        """Let requests fail, or take long, within a block."""
        self.request("PUT", "/_faults", json.dumps(settings).encode())
        try:
            yield
        finally:
            self.request("PUT", "/_faults", b"{}")


@contextmanager
def running() -> Iterator[Server]:
    """Start a server with a bucket, and end it with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, __file__, str(port)], stderr=subprocess.DEVNULL)
    server = Server(port)
    try:
        end = time.monotonic() + 60
        while True:
            try:
                server.request("PUT", f"/{BUCKET}")
                break
            except OSError:
                assert process.poll() is None, "the server has ended"
                assert time.monotonic() < end, "the server does not answer"
                time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(10)


if __name__ == "__main__":
    os.environ.setdefault("MOTO_S3_DEFAULT_KEY_BUFFER_SIZE", str(2**26))
    serve(int(sys.argv[1]))
