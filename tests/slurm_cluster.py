"""A SLURM cluster on this machine: two nodes of two slots each. Debian: apt-get install slurm-wlm munge.

`python tests/slurm_cluster.py COMMAND...` runs a command in a new cluster, such as `bash` or `sinfo`.

Its daemons belong to the user that starts it, listen on 127.0.0.1 at free ports, write to one new folder, need no
cgroups and end with the process that has started them. Jobs of the partition `low` are queued again when a job of the
partition `high` needs their nodes.
"""

from __future__ import annotations

import ctypes
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

NODES = ("slots1", "slots2")
SLOTS = 2  # of each node; the machine may have fewer cores
KILL_SECONDS = 30  # between SIGTERM and SIGKILL, SLURM's own default
PR_SET_PDEATHSIG = 1

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
FirstJobId={job}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=0,batch_sched_delay=0,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={kill}
MinJobAge=300
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=high Nodes=ALL MaxTime=60 PriorityTier=2 PreemptMode=OFF State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={slots} RealMemory=1000 State=UNKNOWN"


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def missing() -> str | None:
    """Return why no cluster can be started here, None if one can."""
    for program in ("munged", "slurmctld", "slurmd", "sbatch"):
        if _find(program) is None:
            return f"{program} is not installed; apt-get install slurm-wlm munge"
    return None


# Tests in a cluster take a minute or two: part of `make test` where SLURM is installed, else of `make test-full`, which
# says why it skips them.
in_cluster = pytest.mark.full if missing() else pytest.mark.timeout(900)


class Cluster:
    """A running cluster: its environment, and its commands."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment

    def call(self, *command: str) -> str:
        """Run a command of SLURM and return what it prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def submit(self, *arguments: str) -> str:
        """Return the number of a new job."""
        return self.call("sbatch", "--parsable", *arguments)

    def state(self, job: str) -> str:
        """Return PENDING, RUNNING, COMPLETED and so on."""
        return self.call("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")

    def logs(self) -> str:
        """Return the ends of the logs of the daemons, for messages of tests that fail."""
        return "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(self.folder.glob("*.log")))

    def wait(self, job: str, *states: str, seconds: float = 240) -> None:
        """Wait until a job has one of the states."""
        wait_for(lambda: self.state(job) in states, seconds, lambda: f"{job}: {self.state(job)}\n{self.logs()}")

    def start_again(self, job: str) -> None:
        """Wait until a job was queued again and runs; SLURM lets it wait for two minutes, which this spares."""
        self.wait(job, "PENDING")
        # slurmd counts in seconds: a job that starts in the second in which it was killed is taken for the killed one
        time.sleep(2)
        deadline = time.monotonic() + 60
        while self.state(job) == "PENDING":
            assert time.monotonic() < deadline, self.logs()
            # while the nodes are cleaned up SLURM sets the time itself, once more
            update = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
            subprocess.run(update, env=self.environment, capture_output=True, timeout=60, check=False)
            time.sleep(1)


def wait_for(condition: Callable[[], bool], seconds: float, explain: Callable[[], str] = str) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.1)


@contextmanager
def running() -> Iterator[Cluster]:
    """Start a cluster, and end it, with all of its jobs, when the block ends."""
    with ExitStack() as stack:
        # not in pytest's folder, whose path is too long for a socket
        folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        (folder / "munge").mkdir(mode=0o700)
        key = folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "log", "pid", "seed")]
        # --force: the folder of its socket is not accessible to everybody
        _start(stack, "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge)
        wait_for((folder / "munge.socket").exists, 20)
        configuration = folder / "slurm.conf"
        configuration.write_text(_configure(folder))
        cluster = Cluster(folder, dict(os.environ) | {"SLURM_CONF": str(configuration)})
        _start(stack, "slurmctld", "-D", "-f", str(configuration))
        for node in NODES:
            (folder / node).mkdir()
            _start(stack, "slurmd", "-D", "-N", node, "-f", str(configuration))
        wait_for(lambda: _idle(cluster) == len(NODES), 60, cluster.logs)
        stack.callback(_cancel, cluster)
        yield cluster


def _configure(folder: Path) -> str:
    host = socket.gethostname().split(".")[0]
    ports = _free_ports(1 + len(NODES))
    nodes = [
        NODE.format(name=name, host=host, port=port, slots=SLOTS) for name, port in zip(NODES, ports[1:], strict=True)
    ]
    return CONFIGURATION.format(
        folder=folder,
        host=host,
        controller=ports[0],
        user=getpass.getuser(),
        kill=KILL_SECONDS,
        nodes="\n".join(nodes),
        job=1 + secrets.randbelow(50_000),  # docs/pretrain.slurm derives its port from it
    )


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _start(stack: ExitStack, program: str, *arguments: str) -> None:
    """Start a daemon that ends with the block, and with this process if that is killed."""
    path = _find(program)
    assert path is not None, program
    libc, parent = ctypes.CDLL(None), os.getpid()

    def end_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    output = subprocess.DEVNULL
    process = subprocess.Popen([path, *arguments], stdout=output, stderr=output, preexec_fn=end_with_parent)
    stack.callback(_stop, process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _idle(cluster: Cluster) -> int:
    """Return how many nodes are there and have nothing to do."""
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--partition=low", "--format=%t"],
        env=cluster.environment,
        capture_output=True,
        text=True,
    )
    return done.stdout.split().count("idle")


def _cancel(cluster: Cluster) -> None:
    """End all jobs: their processes are not children of the daemons."""
    subprocess.run(["scancel", "--user", getpass.getuser()], env=cluster.environment, timeout=60, check=False)
    wait_for(lambda: _idle(cluster) == len(NODES), KILL_SECONDS + 30, cluster.logs)


def main(command: Sequence[str]) -> int:
    """Run a command in a new cluster and return its exit code."""
    reason = missing()
    if reason is not None or not command:
        print(reason or __doc__, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with running() as cluster:
        return subprocess.run(command, env=cluster.environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
