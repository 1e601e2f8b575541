"""Without one of torch's private names there is one warning, and torch's own behaviour."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from torch.distributed import TCPStore, distributed_c10d
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher.api import LaunchConfig

from firstfault_torch import compat
from firstfault_torch.agent.agent import job_of, launch_agent
from firstfault_torch.agent.local_workers import DeathWatch
from firstfault_torch.agent.node_round import AgentSettings
from firstfault_torch.agent.signals import SignalWatch
from firstfault_torch.compat.torch_agent import (
    HookedAgent,
    master_address,
    missing_names,
    traceback_files,
    unfinished,
    worker_processes,
)
from firstfault_torch.compat.torch_worker import flight_recorders, group_teardown
from firstfault_torch.options import Options
from firstfault_torch.worker.in_flight import InFlight, watch_process_groups
from firstfault_torch.worker.process_state import collective_progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.prefix import Prefix


@pytest.fixture(autouse=True)
def _warn_again() -> Iterator[None]:
    compat.warn_once.cache_clear()
    yield
    compat.warn_once.cache_clear()


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "where firstfault looks" in record.getMessage()]


def test_nothing_is_missing() -> None:
    """The torch that is installed has every name; a missing attribute of the agent is found before it runs."""
    assert missing_names() == ()
    assert missing_names(SimpleNamespace(_pcontext=None)) == ("_worker_group", "_remaining_restarts")  # type: ignore[arg-type]
    assert flight_recorders()
    assert group_teardown() is distributed_c10d.destroy_process_group


@pytest.mark.parametrize("table", ["_HOOKS", "_ATTRIBUTES"])
def test_a_name_that_is_missing(
    table: str, prefix: Prefix, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch's own agent runs the workers, with one warning that names the hook or the attribute."""
    ran: list[type] = []
    monkeypatch.setattr(LocalElasticAgent, "run", lambda self: ran.append(type(self)))
    monkeypatch.setattr(f"firstfault_torch.compat.torch_agent.{table}", ("_exit_barrier_before_a_rename",))
    config = LaunchConfig(1, 1, 1, run_id="run", rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork")
    settings = AgentSettings(Options(), SignalWatch())
    assert launch_agent(job_of(config, print, ()), prefix.recording(), settings, Mock()).results == {}
    assert ran == [LocalElasticAgent]
    (line,) = _warnings(caplog)
    assert "_exit_barrier_before_a_rename of its agent" in line


@pytest.mark.parametrize(
    ("call", "context", "expected"),
    [
        (worker_processes, SimpleNamespace(_pc=SimpleNamespace(error_files=[])), []),
        (worker_processes, SimpleNamespace(), []),
        (traceback_files, SimpleNamespace(_pc=SimpleNamespace(processes=[])), {}),
        (unfinished, SimpleNamespace(_return_values={}), frozenset()),
        (unfinished, SimpleNamespace(_ret_vals={}), frozenset()),
    ],
    ids=["processes", "_pc", "error_files", "_ret_vals", "_return_values"],
)
def test_a_process_context_that_lacks_a_name(
    call: Any, context: Any, expected: object, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing name gives an empty result, and one warning with the consequence."""
    assert call(context) == expected
    assert call(context) == expected
    assert len(_warnings(caplog)) == 1


def test_a_torch_without_flight_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the flight recorder the documents have no collectives."""
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        monkeypatch.delattr(f"torch._C._distributed_c10d.{name}", raising=False)
    assert flight_recorders() == []
    assert collective_progress() == ()


def test_a_teardown_that_cannot_be_watched(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Torch's function stays unchanged, with one warning."""
    monkeypatch.setattr(distributed_c10d, "destroy_process_group", min)
    undo = watch_process_groups(InFlight(Mock(), Mock()))
    undo()
    assert distributed_c10d.destroy_process_group is min  # type: ignore[comparison-overlap]
    assert len(_warnings(caplog)) == 1


@pytest.mark.parametrize("accepts", [True, False], ids=["torch 2.13", "torch before"])
def test_the_timeout_of_a_shutdown(accepts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's agent is given a timeout only if it takes one, and what else this torch passes."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", lambda _self, *_args, **more: given.append(more))
    parameters = frozenset({"death_sig", "timeout"} if accepts else {"death_sig", "is_restart"})
    monkeypatch.setattr("firstfault_torch.compat.torch_agent._SHUTDOWN_PARAMETERS", parameters)
    agent = HookedAgent.__new__(HookedAgent)
    agent._shutdown(timeout=7, **({} if accepts else {"is_restart": True}))
    assert given == [{"timeout": 7} if accepts else {"is_restart": True}]


# --- workers that run a binary ---------------------------------------------------------------------------------------


def test_workers_that_run_a_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deaths of torchrun's subprocesses are noticed as those of multiprocessing's, with and without pidfds."""
    for refused in (False, True):
        if refused:
            monkeypatch.setattr("os.pidfd_open", Mock(side_effect=OSError(38, "Function not implemented")))
        running = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        handlers = {0: SimpleNamespace(proc=running), 1: SimpleNamespace(proc=ended)}
        context = SimpleNamespace(subprocess_handlers=handlers)
        watch = DeathWatch(worker_processes(context))
        try:
            assert traceback_files(context) == {}
            assert unfinished(context) == frozenset()
            ended.wait(20)
            deadline = time.monotonic() + 20
            while not watch.ended() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert [(death.local_rank, death.exit_code) for death in watch.ended()] == [(1, 3)]
        finally:
            with contextlib.suppress(ProcessLookupError):
                running.kill()
            running.wait()
            watch.stop()


def test_the_address_of_the_workers_store() -> None:
    """It is a field of the group; before torch 2.4 it stood in the round's store, and there was no such field."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("MASTER_ADDR", "worker-0")
    store.set("MASTER_PORT", "1234")
    before: Any = SimpleNamespace(store=store)
    now: Any = SimpleNamespace(store=None, master_addr="worker-1", master_port=4321)
    assert [master_address(group) for group in (before, now)] == [("worker-0", 1234), ("worker-1", 4321)]
