"""torch's private names: what firstfault does with them, and torch's own behaviour without one."""

import contextlib
import datetime as dt
import json
import logging
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore, distributed_c10d
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher.api import LaunchConfig
from torch.torch_version import TorchVersion

from firstfault_torch import compat
from firstfault_torch.agent.exit_watch import ExitWatch
from firstfault_torch.agent.launch import build_job, launch_agent
from firstfault_torch.agent.settings import AgentSettings
from firstfault_torch.agent.signals import SignalWatch
from firstfault_torch.compat import torch_agent
from firstfault_torch.compat.torch_worker import (
    flight_recorders,
    group_teardown,
    shut_down_gloo_connections,
    unread_backends,
)
from firstfault_torch.options import Options
from firstfault_torch.worker.in_flight import InFlight, watch_process_groups
from firstfault_torch.worker.process_state import read_collective_progress
from tests.nodes import forkserver
from tests.prefix import Prefix
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _warn_again() -> Iterator[None]:
    compat.warn_once.cache_clear()
    yield
    compat.warn_once.cache_clear()


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if "as firstfault expects" in record.getMessage()
    ]


def test_the_installed_torch_has_every_name() -> None:
    """The torch that is installed has every name;
    a missing attribute of the agent is found before it runs.
    """
    assert torch_agent.find_missing_names() == ()
    assert torch_agent.find_missing_names(SimpleNamespace(_pcontext=None)) == (
        "_worker_group",
        "_remaining_restarts",
    )  # type: ignore[arg-type]
    assert flight_recorders()
    assert group_teardown() is distributed_c10d.destroy_process_group


@pytest.mark.parametrize("table", ["_HOOKS", "_ATTRIBUTES"])
def test_a_missing_name_leaves_the_job_to_torchs_agent(
    table: str,
    prefix: Prefix,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Torch's own agent runs the workers, with one warning that names the hook or the attribute."""
    ran: list[type] = []
    monkeypatch.setattr(LocalElasticAgent, "run", lambda self: ran.append(type(self)))
    monkeypatch.setattr(
        f"firstfault_torch.compat.torch_agent.{table}", ("_exit_barrier_before_a_rename",)
    )
    config = LaunchConfig(
        1,
        1,
        1,
        run_id="run",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
    )
    settings = AgentSettings(Options(), SignalWatch())
    assert (
        launch_agent(build_job(config, print, ()), prefix.node_context(), settings, Mock()).results
        == {}
    )
    assert ran == [LocalElasticAgent]
    (line,) = _warnings(caplog)
    assert "_exit_barrier_before_a_rename of its agent" in line


@pytest.mark.parametrize(
    ("call", "context", "expected"),
    [
        (torch_agent.worker_processes, SimpleNamespace(_pc=SimpleNamespace(error_files=[])), []),
        (torch_agent.worker_processes, SimpleNamespace(), []),
        (torch_agent.traceback_files, SimpleNamespace(_pc=SimpleNamespace(processes=[])), {}),
        (torch_agent.find_ranks_without_result, SimpleNamespace(_return_values={}), frozenset()),
        (torch_agent.find_ranks_without_result, SimpleNamespace(_ret_vals={}), frozenset()),
    ],
    ids=["processes", "_pc", "error_files", "_ret_vals", "_return_values"],
)
def test_a_missing_context_name_is_one_warning(
    call: Any,
    context: Any,
    expected: object,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A missing name gives an empty result, and one warning with the consequence."""
    assert call(context) == expected
    assert call(context) == expected
    assert len(_warnings(caplog)) == 1


def test_without_flight_recorder_documents_have_no_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the flight recorder the documents have no collectives."""
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        monkeypatch.delattr(f"torch._C._distributed_c10d.{name}", raising=False)
    assert flight_recorders() == []
    assert read_collective_progress() == ()


@pytest.mark.parametrize(
    ("calls", "entries", "number"),
    [(1, "gloo2:all_reduce", 1), (1, "gloo:all_reduce", 0), (0, "gloo2:all_reduce", 0)],
    ids=["renamed", "as before", "nothing called"],
)
def test_an_unread_recorder_is_one_warning(
    calls: int,
    entries: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning tells that the recorder that is read lacks the collectives of
    the backend that is used.
    """
    trace = json.dumps({"entries": [{"profiling_name": entries}]})
    monkeypatch.setattr(
        "torch._C._distributed_c10d._dump_fr_trace_json", lambda: trace, raising=False
    )
    gloo = SimpleNamespace(name=lambda: "gloo", _get_sequence_number_for_group=lambda: calls)
    group = Mock(_device_types=["cpu"], _get_backend=Mock(return_value=gloo))
    monkeypatch.setattr(
        "torch.distributed.distributed_c10d._world", SimpleNamespace(pg_map={group: None})
    )
    assert read_collective_progress() == read_collective_progress() == ()
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    assert unread_backends([]) == []
    told = [
        text
        for text in caplog.messages
        if "the flight recorder of gloo as firstfault expects" in text
    ]
    assert len(told) == number


def test_an_unwatchable_teardown_stays_unchanged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch's function stays unchanged, with one warning."""
    monkeypatch.setattr(distributed_c10d, "destroy_process_group", min)
    undo = watch_process_groups(InFlight(Mock(), Mock()))
    undo()
    assert distributed_c10d.destroy_process_group is min  # type: ignore[comparison-overlap]
    assert len(_warnings(caplog)) == 1


@pytest.mark.parametrize("accepts", [True, False], ids=["torch 2.13", "torch before"])
def test_torchs_agent_gets_a_timeout_only_if_it_takes_one(
    accepts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's agent is given a timeout only if it takes one."""

    def now(self: object, death_sig: int, timeout: int) -> None: ...

    def before(self: object, death_sig: int, is_restart: bool) -> None: ...

    monkeypatch.setattr(LocalElasticAgent, "_shutdown", now if accepts else before)
    assert torch_agent.shutdown_timeout(7) == ({"timeout": 7} if accepts else {})


def test_deaths_of_subprocesses_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deaths of torchrun's subprocesses are noticed as those of multiprocessing's,
    with and without pidfds.
    """
    for refused in (False, True):
        if refused:
            monkeypatch.setattr(
                "os.pidfd_open", Mock(side_effect=OSError(38, "Function not implemented"))
            )
        running = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        handlers = {0: SimpleNamespace(proc=running), 1: SimpleNamespace(proc=ended)}
        context = SimpleNamespace(subprocess_handlers=handlers)
        watch = ExitWatch(torch_agent.worker_processes(context))
        try:
            assert torch_agent.traceback_files(context) == {}
            assert torch_agent.find_ranks_without_result(context) == frozenset()
            ended.wait(20)
            wait_until(watch.ended)
            assert [(death.local_rank, death.exit_code) for death in watch.ended()] == [(1, 3)]
        finally:
            with contextlib.suppress(ProcessLookupError):
                running.kill()
            running.wait()
            watch.stop()


def test_the_workers_store_address_is_found_in_each_torch() -> None:
    """It is a field of the group; before torch 2.4 it stood in the round's store,
    and there was no such field.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("MASTER_ADDR", "worker-0")
    store.set("MASTER_PORT", "1234")
    before: Any = SimpleNamespace(store=store)
    now: Any = SimpleNamespace(store=None, master_addr="worker-1", master_port=4321)
    assert [torch_agent.master_address(group) for group in (before, now)] == [
        ("worker-0", 1234),
        ("worker-1", 4321),
    ]


def _log_an_exception(folder: Path) -> None:
    os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT), 2)
    assert "torch._dynamo" not in sys.modules
    torch_agent.format_exceptions_early()
    torch_agent.format_exceptions_early()  # as a second agent of this process does
    try:
        raise ValueError("boom of a worker")  # noqa: TRY301 - logged here
    except ValueError:
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").exception(
            "failed (exitcode: %s)", 1
        )
    assert "torch._dynamo" not in sys.modules


def test_logging_an_exception_imports_no_compiler(tmp_path: Path) -> None:
    """Logging an exception does not import torch's compiler;
    the log contains message and traceback once.
    """
    process = forkserver().Process(target=_log_an_exception, args=(tmp_path,))
    process.start()
    process.join(120)
    log = (tmp_path / "log").read_text()
    assert process.exitcode == 0, log
    for text in (
        "failed (exitcode: 1)",
        "Traceback (most recent call last):",
        "ValueError: boom of a worker",
    ):
        assert log.count(text) == 1


@pytest.mark.parametrize(
    ("version", "environment", "set_for_workers"),
    [
        ("2.3.1", {}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}),
        ("2.8.0", {}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}),
        ("2.8.0", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, {}),
        ("2.9.0", {}, {}),
        ("2.13.0+cpu", {}, {}),
    ],
)
def test_the_flight_recorder_is_turned_on_where_torch_does_not(
    version: str,
    environment: dict[str, str],
    set_for_workers: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is turned on where torch does not do that;
    a torch that does would warn of the old variable.
    """
    monkeypatch.setattr("torch.__version__", TorchVersion(version))
    assert torch_agent.flight_recorder_variables(environment) == set_for_workers


PATIENCE = dt.timedelta(seconds=60)


def test_a_waiting_peer_is_released_at_once(tmp_path: Path) -> None:
    """It fails at once, in each group, although the groups still exist;
    listening sockets and others' stay open.

    Without gloo there is nothing to shut down.
    """
    assert shut_down_gloo_connections() == 0
    places = [(rank, str(tmp_path / "store"), tmp_path) for rank in range(2)]
    ranks = [forkserver().Process(target=_rank_without_an_end, args=place) for place in places]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert "onnection" in (tmp_path / "first").read_text()
    assert "onnection" in (tmp_path / "second").read_text()


def _rank_without_an_end(rank: int, store: str, marks: Path) -> None:
    _rank(rank, store, marks)
    os._exit(0)  # at Python's end, gloo may abort a process that still has its groups


def _rank(rank: int, store: str, marks: Path) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=PATIENCE,
    )
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4), group=group)
    if rank == 0:
        with _listening() as listener, socket.create_connection(listener.getsockname()) as other:
            epoll = select.epoll()
            epoll.register(listener)
            epoll.register(other)
            assert shut_down_gloo_connections() == 2
            assert shut_down_gloo_connections() == 0
            opened = len(list(Path("/proc/self/fd").iterdir()))
            assert [shut_down_gloo_connections() for _ in range(10)] == [0] * 10
            assert len(list(Path("/proc/self/fd").iterdir())) < opened + 10, (
                "each call leaves a file open"
            )
            accepted, _ = listener.accept()
            other.sendall(b"still here")
            assert accepted.recv(10) == b"still here"
            accepted.close()
        dist.FileStore(store, 2).wait(["released"], PATIENCE)
        return
    for name, where in {"first": None, "second": group}.items():
        with pytest.raises(RuntimeError) as raised:
            dist.all_reduce(torch.ones(4), group=where)
        (marks / name).write_text(str(raised.value))
    dist.FileStore(store, 2).set("released", "1")


def _listening() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener
