"""Which GPU a process gets, and what processes that share one may do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from adclr.config.parsing import UserError, build
from adclr.config.settings import Settings
from adclr.system import distributed, machine
from adclr.training import job
from tiny import tiny


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process of two on a machine with one GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in (("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(distributed.SHARE_GPUS, raising=False)


@pytest.mark.usefixtures("second_of_two")
def test_a_process_without_a_gpu_of_its_own_shares_one_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.gpu_sharers() == 2
    with pytest.raises(
        UserError, match="process 1 has no GPU of its own: there are 1; start fewer, or set ADCLR_SHARE"
    ):
        distributed.gpu_number()
    monkeypatch.setenv(distributed.SHARE_GPUS, "1")
    assert distributed.gpu_number() == 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (machine.gpu_sharers(), distributed.gpu_number()) == (1, 1)


def test_processes_that_torchrun_starts_again_do_not_find_what_the_first_ones_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun keeps one store, in which gloo leaves the addresses of its processes."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (environment | {"MASTER_PORT": str(server.port)}).items():
        monkeypatch.setenv(name, value)

    def store(start: int) -> Any:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(start))
        return distributed._store_of_this_start()

    store(0).set("address", "here")
    assert store(0).check(["address"])
    assert not store(1).check(["address"])
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")  # machines, which count for themselves
    assert store(1) is None
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")  # without torchrun
    assert distributed._store_of_this_start() is None


@dataclass(frozen=True)
class Unsharded:
    """What `job.shard` looks at before it shards."""

    settings: Settings
    method: Any
    device: torch.device = field(default_factory=lambda: torch.device("cuda", 0))


@pytest.mark.usefixtures("second_of_two")
def test_weights_are_not_sharded_over_processes_that_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's all-gather of CUDA tensors ends the process with a segmentation fault."""
    monkeypatch.setattr(distributed, "in_group", lambda: True)
    settings = tiny(shard=True)
    unsharded = cast(job.Job, Unsharded(settings, job.build(settings)))
    with pytest.raises(UserError, match=r"train\.shard=true needs a GPU for each process; leave it out where"):
        job.shard(unsharded)
    whole = cast(job.Job, Unsharded(build(Settings, {}), None))
    assert job.shard(whole) is whole
