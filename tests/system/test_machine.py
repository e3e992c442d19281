"""When this process started."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from adclr.system import machine


def test_the_start_of_the_process_is_before_its_first_line() -> None:
    program = "import time; time.sleep(0.3); from adclr.system import machine; "
    program += "print(time.monotonic() - machine.process_start())"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    # the system counts in hundredths of a second
    assert 0.3 <= float(done.stdout) + 0.02 <= time.monotonic() - started + 0.04


def test_where_the_system_does_not_say_it_the_first_import_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "PROCESS", tmp_path / "none")
    assert machine.process_start() == machine.STARTED
    (tmp_path / "none").write_text("1 (a name) with spaces) S")
    assert machine.process_start() == machine.STARTED


def test_a_shell_that_became_this_process_does_not_count() -> None:
    program = "from adclr.system import machine; machine.LONGEST_START = 0.5; "
    program += "import time; print(time.monotonic() - machine.process_start())"
    command = ["bash", "-c", 'sleep 1; exec "$0" -c "$1"', sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.5
