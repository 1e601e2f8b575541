"""NCCL's communicators are aborted: with fake process groups, because there is no GPU here."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from firstfault_torch.inprocess import hooks
from firstfault_torch.inprocess.hooks import AbortTorchDistributed
from firstfault_torch.inprocess.state import State

if TYPE_CHECKING:
    from collections.abc import Callable

LONG_S = 30.0


class FakeNccl:
    """A backend whose communicator is aborted as a test says."""

    def __init__(self, how: Callable[[], object] = lambda: None) -> None:
        self.how = how
        self.aborted = threading.Event()

    def abort(self) -> None:
        """Abort the communicator."""
        self.aborted.set()
        self.how()


class FakeGroup:
    """A process group with one backend for the GPU, or none."""

    def __init__(self, backend: object = None) -> None:
        self.backend = backend

    def _get_backend(self, device: torch.device) -> object:
        assert device.type == "cuda"
        if self.backend is None:
            raise RuntimeError("no backend for the device")
        return self.backend


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let these be the process's groups."""

    def be(*found: FakeGroup) -> None:
        monkeypatch.setattr(c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
        monkeypatch.setattr(type(c10d._world), "pg_map", property(lambda _: dict.fromkeys(found)))
        monkeypatch.setattr(dist, "is_initialized", lambda: True)

    return be


def test_every_communicator_is_aborted(groups: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that raises, or that hangs, keeps no other from being aborted; groups without a GPU are left alone."""
    monkeypatch.setattr(hooks, "NCCL_ABORT_S", 0.3)
    release = threading.Event()

    def fail() -> None:
        raise RuntimeError("NCCL error: remote process exited")

    hanging, failing, healthy = FakeNccl(lambda: release.wait(LONG_S)), FakeNccl(fail), FakeNccl()
    groups(FakeGroup(hanging), FakeGroup(), FakeGroup(failing), FakeGroup(object()), FakeGroup(healthy))
    state = State.from_env()
    began = time.monotonic()
    assert AbortTorchDistributed()(state) is state
    assert time.monotonic() - began < LONG_S / 3
    assert all(backend.aborted.wait(LONG_S) for backend in (hanging, failing, healthy))
    release.set()


def test_without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first group there is nothing to abort."""
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    state = State.from_env()
    assert AbortTorchDistributed()(state) is state
