"""Commands of the program as forks of a process that has imported it: processes of their own, 2 seconds sooner.

Half of the time of a short command is the import of torch. A fork has the program's code, environment, working folder,
output and exit code as `python -m adclr` would, only its imports are done. What torch reads from the environment when
it is imported is that of the tests; `serves` says whether a command may be a fork. Tests of what a start costs need
a process that has imported nothing: `adclr_command(..., fresh=True)`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

IMPORTED = (
    *("torchvision", "adclr.cli", "adclr.training.loop", "adclr.features.embedding", "adclr.features.visualize"),
    *("adclr.weights.export", "adclr.report.page", "adclr.study.runner", "adclr.evals.finetune"),
)
READ_AT_IMPORT = ("OMP_", "MKL_", "KMP_", "GOMP_", "PYTHON", "TRITON_", "TORCH", "LD_", "HF_")


def read_at_import(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that a fork cannot change."""
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}


class ForkServer:
    """The process that forks; one command at a time."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.fixed = read_at_import(environment)
        command = [sys.executable, __file__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self.received = b""

    def serves(self, environment: dict[str, str]) -> bool:
        """Return whether a command with these variables may be a fork."""
        return self.process.poll() is None and read_at_import(environment) == self.fixed

    def run(
        self, program: str | None, arguments: list[str], environment: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -m adclr`, or `python -c program`, with arguments, in the working folder of the caller."""
        with tempfile.TemporaryDirectory() as name:
            outputs = [str(Path(name, kind)) for kind in ("stdout", "stderr")]
            request = {"program": program, "arguments": arguments, "environment": environment}
            self._send(request | {"folder": os.getcwd(), "outputs": outputs})
            pid = self._receive(timeout)  # the first one waits for the imports
            try:
                status = self._receive(timeout)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                self._receive(60)
                raise subprocess.TimeoutExpired(arguments, timeout) from None
            texts = [Path(file).read_text(encoding="utf-8") for file in outputs]
        return subprocess.CompletedProcess(arguments, os.waitstatus_to_exitcode(status), *texts)

    def _send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def _receive(self, timeout: float) -> int:
        """Return the next number; select would not notice one that a buffered file has read already."""
        assert self.process.stdout is not None
        end = time.monotonic() + timeout
        while b"\n" not in self.received:
            if not select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError
            part = os.read(self.process.stdout.fileno(), 4096)
            assert part, "the fork server has ended"
            self.received += part
        number, _, self.received = self.received.partition(b"\n")
        return int(number)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(60)


def serve() -> dict[str, Any] | None:
    """Fork for each request and answer with the pid and the exit status; return, in a fork, its request."""
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            return dict(json.loads(line))
        os.write(1, f"{pid}\n".encode())
        os.write(1, f"{os.waitpid(pid, 0)[1]}\n".encode())
    return None


def become(request: dict[str, Any]) -> None:
    """Make this process the one that was asked for."""
    files = [os.open(os.devnull, os.O_RDONLY)]
    files += [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for path in request["outputs"]]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[0] = request["folder"]
    sys.argv = ["-c" if request["program"] else "adclr", *request["arguments"]]


if __name__ == "__main__":
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # else a fork copies the memory of what is imported, and takes a second to end
    request = serve()
    if request is not None:  # in a fork, which ends as any process does
        become(request)
        if request["program"]:
            exec(compile(request["program"], "<program>", "exec"))
        else:
            runpy.run_module("adclr", run_name="__main__", alter_sys=True)
