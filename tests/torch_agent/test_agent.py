"""An agent documents its workers' deaths and its own errors,
and stays torch's agent if its own code fails.
"""

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import Mock

import pytest
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

from firstfault import model
from firstfault.conclude import conclude
from firstfault.layout import error_key_for
from firstfault.reading.assemble import Snapshot, assemble
from firstfault.report.first_line import first_line
from firstfault.strategies import get_strategy
from firstfault.testing import make_error, make_job
from firstfault.wire.documents import decode, encode
from firstfault_torch.agent import launch as launch_module
from firstfault_torch.agent.agent import ReportingAgent
from firstfault_torch.agent.deaths import (
    ExitEvidence,
    TorchKeptException,
    WorkerExit,
    WorkerSnapshot,
    WorkerStop,
    describe_agent_failure,
    describe_exit,
)
from firstfault_torch.agent.launch import RoundEnd, build_job, launch_agent
from firstfault_torch.agent.node_round import NodeRound
from firstfault_torch.agent.reporter import NodeReport
from firstfault_torch.agent.settings import AgentSettings
from firstfault_torch.agent.signals import SignalReceived, SignalWatch
from firstfault_torch.agent.stop_processes import WorkerStopper
from firstfault_torch.compat.torch_agent import log_root_or_first_failure
from firstfault_torch.compat.torch_agent import worker_processes as _processes
from firstfault_torch.failures.failure_records import ErrorClass
from firstfault_torch.node.document_writer import open_worker_spool
from firstfault_torch.options import Options
from firstfault_torch.rounds.failure_broadcast import FailureBroadcast
from firstfault_torch.rounds.peer_connections import PeerConnections
from firstfault_torch.worker.in_flight import Moment
from tests.prefix import Prefix
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.forks]

Start: TypeAlias = Callable[..., ReportingAgent]
PLACE = model.Place(node="worker-1", rank=3, local_rank=1, group_rank=1)
KEPT = TorchKeptException(model.ExceptionInfo("ValueError", "boom"), "Traceback of it")
SAVING_S = 1.0
STOPPED = "another worker of this node had failed"


def _death(local_rank: int, exit_code: int, at: Moment | None = None) -> WorkerExit:
    moment = at or Moment.now()
    return WorkerExit(local_rank, 4000 + local_rank, exit_code, moment.wall_ns, moment.monotonic_ns)


def _failures(report: NodeReport) -> list[model.WorkerError]:
    """Return what a node's documents are about."""
    found = [
        decode(data, model.DocumentRef(path))
        for path, data in report.copies.items()
        if "/errors/" in path
    ]
    return [failure for failure in found if isinstance(failure, model.WorkerError)]


# --- one death ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exit_code", "stopped", "kept", "code", "category", "message"),
    [
        (-9, "", None, "USER:SIGKILL", "signal", "which its agent did not send; exit code -9"),
        (-11, "", None, "USER:SIGSEGV", "signal", "was killed by SIGSEGV"),
        (3, "", None, "USER:ExitCode", "exit", "exited with code 3 without an exception"),
        (-15, STOPPED, None, "USER:Stopped", "stopped", "was stopped by its agent with SIGTERM"),
        (
            -11,
            STOPPED,
            None,
            "USER:Stopped",
            "stopped",
            "was killed by SIGSEGV while its agent stopped it",
        ),
        (1, STOPPED, KEPT, "USER:Stopped", "stopped", "was stopped by its agent"),
        (1, "", KEPT, "USER:RuntimeError", "user_code", KEPT.traceback),
        (-6, "", KEPT, "USER:RuntimeError", "user_code", KEPT.traceback),
    ],
)
def test_a_death(  # noqa: PLR0917
    exit_code: int,
    stopped: str,
    kept: TorchKeptException | None,
    code: str,
    category: str,
    message: str,
) -> None:
    """A death's code is its signal, its exit code, "stopped",
    or that of the exception that torch kept.
    """
    death = _death(1, exit_code)
    stop = WorkerStop(stopped, death.monotonic_ns - 1) if stopped else None
    failure = describe_exit(death, PLACE, stop=stop, traces=ExitEvidence(kept))
    verdict = get_strategy("earliest")(assemble(Snapshot(documents=(failure,))))
    assert (failure.code, verdict.category) == (code, category)
    assert message in failure.message
    assert (failure.writer, failure.subject) == (model.Writer.AGENT, model.Subject.WORKER)
    assert (failure.exit_code, failure.signal) == (exit_code, death.signal)
    assert (failure.place, failure.worker) == (PLACE, "worker-1")
    assert (failure.timestamp_ns, failure.monotonic_ns) == (death.wall_ns, death.monotonic_ns)
    assert (failure.kind, failure.origin) == (model.Kind.NON_RECOVERABLE, model.Origin.USER)
    assert failure.exception == (kept.exception if kept is not None and not stopped else None)
    assert [sent.reason for sent in failure.sent_signals] == ([STOPPED] if stopped else [])
    assert failure.fingerprint


@pytest.mark.parametrize(
    ("exit_code", "first", "after_ns", "by_us"),
    [
        (-15, (), 0, True),
        (-9, (), 5, True),
        (1, (), 5, True),
        (0, (), 5, True),
        (-15, (), -1, False),
        (-15, (0,), 5, True),
        (-15, (0, 1), 5, False),
        (-11, (), 5, True),
        (-6, (), 5, True),
        (-11, (), -1, False),
        (-11, (1,), 5, False),
    ],
)
def test_what_a_stop_has_ended(
    exit_code: int,
    first: tuple[int, ...],
    after_ns: int,
    by_us: bool,
) -> None:
    """A stop ended all that ended after it began, also by a crash in the clean-up;
    not those that failed first.
    """
    death = _death(1, exit_code)
    assert (
        WorkerStop(STOPPED, death.monotonic_ns - after_ns, failed_first=frozenset(first)).ended(
            death
        )
        is by_us
    )


@pytest.mark.parametrize(
    ("oom_kill", "stopped", "category"),
    [(True, False, "host_oom"), (False, False, ""), (None, False, ""), (True, True, "")],
)
def test_a_kill_by_the_kernel(oom_kill: bool | None, stopped: bool, category: str) -> None:
    """A SIGKILL that the agent did not send is host_oom if the kernel counted an OOM kill."""
    death = _death(1, -9)
    stop = WorkerStop(STOPPED, death.monotonic_ns - 1) if stopped else None
    failure = describe_exit(
        death,
        PLACE,
        stop=stop,
        traces=ExitEvidence(resources=model.Resources(oom_kill=oom_kill)),
    )
    assert (failure.category, failure.resources.oom_kill) == (category, oom_kill)


def test_what_was_seen_before_a_stop() -> None:
    """The document tells what the agent learned of a worker before the stop;
    a fatal signal's stack counts more.
    """
    death = _death(1, -15)
    seen = WorkerSnapshot(
        "where it stood", (model.CollectiveProgress("default_pg", "allreduce", 7, 6),)
    )
    cause = model.CausedBy(0, "worker-0", "e1-the-root.pb")
    stop = WorkerStop(
        STOPPED,
        death.monotonic_ns - 1,
        caused_by=cause,
        observations={1: seen, 0: WorkerSnapshot("not its")},
    )
    failure = describe_exit(death, PLACE, stop=stop)
    assert [(dump.pid, dump.rank, dump.text) for dump in failure.stack_dumps] == [
        (death.pid, 3, "where it stood")
    ]
    assert (failure.collectives, failure.caused_by) == (seen.collectives, cause)
    crashed = describe_exit(
        _death(1, -11),
        PLACE,
        stop=stop,
        traces=ExitEvidence(fatal_stack="where it crashed"),
    )
    assert [dump.text for dump in crashed.stack_dumps] == ["where it crashed"]


# --- the agent itself -----------------------------------------------------------------------------


def test_the_agent_was_terminated_or_failed() -> None:
    """A signal to the agent is a preemption, retried on the system's budget;
    an error has its traceback.
    """
    error = SignalException("told", sigval=signal.SIGTERM)
    failure = describe_agent_failure(
        error,
        ErrorClass.PREEMPTION,
        model.Place(node="worker-1"),
        Moment(17, 4),
    )
    assert (failure.category, failure.signal, failure.subject) == (
        "preemption",
        "SIGTERM",
        model.Subject.AGENT,
    )
    assert (failure.kind, failure.origin, failure.exception) == (
        model.Kind.RECOVERABLE,
        model.Origin.SYSTEM,
        None,
    )
    assert (failure.timestamp_ns, failure.monotonic_ns) == (17, 4)
    assert "SIGTERM" in failure.message
    failure = describe_agent_failure(
        RuntimeError("the agent's"),
        ErrorClass.PLATFORM_ERROR,
        model.Place(node="worker-1"),
        Moment.now(),
    )
    assert (failure.category, failure.code) == ("platform", "SYSTEM:AgentError")
    assert failure.exception.type == "RuntimeError"


def test_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs the pods says that it ended them for a time limit: the verdict is that,
    and it is not retried.
    """
    limit = tmp_path / "time-limit"
    monkeypatch.setenv("FIRSTFAULT_TIME_LIMIT_FILE", str(limit))
    terminated = SignalException("terminated", sigval=signal.SIGTERM)
    failures = []
    for text in ("", "90.0"):
        if text:
            limit.write_text(text, encoding="ascii")
        failures.append(
            describe_agent_failure(
                terminated,
                ErrorClass.PREEMPTION,
                model.Place(node="worker-1"),
                Moment.now(),
            )
        )
    before, after = (conclude(make_job(failure)) for failure in failures)
    assert (before.verdict.code, before.decision.retry) == ("SYSTEM:Preemption", True)
    assert (after.verdict.code, after.verdict.category, after.decision.retry) == (
        model.TIME_LIMIT,
        "preemption",
        False,
    )
    assert first_line(after.verdict, after.decision).startswith(
        "time limit worker-1 no retry: the attempt reached its time limit of 90 s"
    )


# --- looking at the workers -----------------------------------------------------------------------

LONG_S = 60.0


def _wait_to_be_stopped(answers: tuple[str, ...], ready: Any) -> None:
    """Be a worker that trains until it is stopped, and then reacts in one of these ways."""
    answer = answers[int(os.environ["LOCAL_RANK"])]
    handlers: dict[str, Any] = {
        "dies": signal.SIG_DFL,
        "exits": lambda *_: os._exit(7),
        "crashes": lambda *_: os.kill(os.getpid(), signal.SIGSEGV),
        "ignores it": signal.SIG_IGN,
        "saves": lambda *_: (time.sleep(SAVING_S), os._exit(7)),
    }
    faulthandler.disable()
    signal.signal(signal.SIGTERM, handlers[answer])
    ready.release()
    time.sleep(LONG_S)


@pytest.fixture
def others(prefix: Prefix) -> Iterator[FailureBroadcast]:
    """Return the failure broadcast of the other node, worker-0; its liveness connection is open."""
    store = PrefixStore("round", TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    watch = FailureBroadcast(store, 0, lambda: None)
    lines = PeerConnections(store, 0, "worker-0", "localhost", lambda *_: None)
    yield watch
    lines.end()
    watch.end()


@pytest.fixture
def start(
    prefix: Prefix, others: FailureBroadcast, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ReportingAgent]]:
    """Start an agent with two real workers, ranks 2 and 3 of worker-1,
    that react to a stop as given.
    """
    monkeypatch.setenv("FIRSTFAULT_NODE", "worker-1")
    made: list[ReportingAgent] = []

    def begin(*answers: str, stop_seconds: float = 5.0) -> ReportingAgent:
        ready = multiprocessing.get_context("fork").Semaphore(0)
        handler = Mock(use_agent_store=False)
        handler.get_run_id.return_value = "run"
        workers = partial(_wait_to_be_stopped, answers or ("dies", "dies"), ready)
        spec = WorkerSpec(
            "default",
            2,
            handler,
            entrypoint=functools.update_wrapper(workers, _wait_to_be_stopped),
        )
        spec.max_restarts, spec.monitor_interval = 0, 0.05
        agent = ReportingAgent(
            prefix.node_context(),
            AgentSettings(
                Options(stop_seconds=stop_seconds, terminated_stop_seconds=LONG_S), SignalWatch()
            ),
            spec=spec,
            logs_specs=DefaultLogsSpecs(),
            start_method="fork",
        )
        made.append(agent)
        group = agent._worker_group
        group.store, group.master_addr, group.master_port = others._store, "localhost", 0
        group.group_rank, group.group_world_size = 1, 2
        for local_rank, worker in enumerate(group.workers):
            worker.global_rank, worker.world_size = 2 + local_rank, 4
        agent.node.begin(0, 0, 0)
        for local_rank, pid in agent._start_workers(group).items():
            group.workers[local_rank].id = pid
        group.state = WorkerState.HEALTHY
        for _ in range(2):
            assert ready.acquire(timeout=LONG_S)
        return agent

    yield begin
    for agent in made:
        for process in _processes(agent._pcontext):
            process.kill()
            process.join()
        agent.close()
        agent.node.end(is_last=False)


def _kill(agent: ReportingAgent, *local_ranks: int) -> None:
    for local_rank in local_ranks:
        pid = _processes(agent._pcontext)[local_rank].pid
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _look(agent: ReportingAgent) -> RunResult:
    """Let the agent monitor until it sees a failure;
    return torch's result after all documents are written.
    """
    deadline = time.monotonic() + LONG_S
    while (result := agent._monitor_workers(agent._worker_group)).state is not WorkerState.FAILED:
        assert time.monotonic() < deadline, "it sees nothing"
    agent.close()
    return result


@pytest.fixture(params=["before torch looks", "while torch looks"])
def dies(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[ReportingAgent], None]:
    """Let a worker die before its agent looks, or between that and torch's own look."""
    if request.param == "before torch looks":
        return lambda agent: _kill(agent, 1)

    def at_torchs_look(agent: ReportingAgent) -> None:
        torchs_own = LocalElasticAgent._monitor_workers

        def late(self: LocalElasticAgent, group: Any) -> RunResult:
            _kill(agent, 1)
            result: RunResult = torchs_own(self, group)
            return result

        monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", late)

    return at_torchs_look


def test_the_log_names_the_failed_worker(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """The log has torch's line about the worker that failed, with its traceback,
    and none about a stopped one.
    """
    agent = start("exits", "dies")
    pids = [process.pid for process in _processes(agent._pcontext)]
    for rank, file in enumerate(agent._pcontext._pc.error_files):  # type: ignore[union-attr]
        Path(file).write_bytes(pickle.dumps(f"traceback of local rank {rank}"))
    _kill(agent, 1)
    _look(agent)
    log_root_or_first_failure(agent.node.reporter.report.failure_lines)  # the verdict is known
    torchs = "torch.distributed.elastic.multiprocessing.api"
    said = [record.getMessage() for record in caplog.records if record.name == torchs]
    what = f"failed (exitcode: -9) local_rank: 1 (pid: {pids[1]}) of fn: _wait_to_be_stopped"
    assert said == [f"{what}\ntraceback of local rank 1"]


@pytest.mark.parametrize(
    ("answer", "exit_code"), [("exits", 7), ("ignores it", -9), ("crashes", -11)]
)
def test_the_answer_to_being_stopped(
    answer: str,
    exit_code: int,
    start: Start,
    prefix: Prefix,
) -> None:
    """A worker counts as stopped however it reacts to the signal; one that ignores it is killed."""
    agent = start(answer, "dies", stop_seconds=0.5 if answer == "ignores it" else LONG_S)
    _kill(agent, 1)
    _look(agent)
    found = {
        failure.rank: (failure.exit_code, failure.stopped_by_agent) for failure in prefix.failures()
    }
    assert found == {2: (exit_code, True), 3: (-9, False)}


@pytest.mark.parametrize("signalled", ["another node", "this node"])
def test_a_signal_lengthens_a_stop(
    signalled: str,
    start: Start,
    others: FailureBroadcast,
    prefix: Prefix,
) -> None:
    """A worker that is stopped beside a failed one keeps torch's time if a node, perhaps this one,
    gets a signal.
    """
    agent = start("saves", "dies", stop_seconds=SAVING_S / 4)
    if signalled == "another node":
        others.announce_grace(LONG_S)
        wait_until(others.has_grace)
    else:
        received = SignalReceived(signal.SIGTERM, Moment.now())
        stopping = partial(wait_until, lambda: agent.node.workers.stopper.stopped is not None)
        told = threading.Thread(target=lambda: (stopping(), agent.node.report_signal(received)))
        told.start()
    _kill(agent, 1)
    _look(agent)
    assert {failure.rank: failure.exit_code for failure in prefix.failures() if failure.rank} == {
        2: 7,
        3: -9,
    }


def _spooled(agent: ReportingAgent, local_rank: int) -> tuple[str, bytes]:
    """Spool a document as a worker that could not upload it; return its name and its bytes."""
    own = make_error(
        2 + local_rank,
        node="worker-1",
        message="last words",
        monotonic_ns=time.monotonic_ns(),
    )
    name = error_key_for(own)
    data = encode(own)
    spool = open_worker_spool(
        agent.node.reporter.node_context,
        local_rank,
        agent.node.reporter.report.error_files[local_rank],
    )
    spool.add(name, data)
    return name, data


def test_documents_of_two_workers_at_once(start: Start) -> None:
    """Each spooled document's receipt belongs to its own worker,
    whatever the order of the uploads.
    """
    agent = start()
    ranks = {_spooled(agent, local_rank)[0]: 2 + local_rank for local_rank in (0, 1)}
    both = threading.Barrier(2)

    class Both(dict[str, bytes]):
        """A dictionary to which two threads add at the same time."""

        def __setitem__(self, path: str, data: bytes) -> None:
            super().__setitem__(path, data)
            if "/errors/" in path:
                both.wait(30)

    agent.node.reporter.report = replace(agent.node.reporter.report, copies=Both())
    _kill(agent, 0, 1)
    _look(agent)
    assert {receipt.name: receipt.rank for receipt in agent.node.reporter.report.receipts} == ranks


@pytest.mark.parametrize(
    ("owner", "broken"),
    [(NodeRound, "handle_failures"), (NodeRound, "report_failure"), (WorkerStopper, "carry_out")],
)
def test_when_our_code_breaks(
    owner: type,
    broken: str,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If our own code raises, torch's result is returned, with a warning."""
    agent = start()
    monkeypatch.setattr(owner, broken, Mock(side_effect=ZeroDivisionError("ours")))
    _kill(agent, 1)
    assert _look(agent).failures
    assert "firstfault: failed while" in caplog.text
    assert "ZeroDivisionError: ours" in caplog.text


# --- launching ------------------------------------------------------------------------------------


def _config(**fields: Any) -> LaunchConfig:
    values: dict[str, Any] = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1, "run_id": "run"}
    values |= {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "start_method": "fork",
        "monitor_interval": 0.05,
    }
    return LaunchConfig(**(values | fields))


def _launched(prefix: Prefix, signals: SignalWatch | None = None, **fields: Any) -> RoundEnd:
    return launch_agent(
        build_job(_config(**fields), print, ()),
        prefix.node_context(),
        AgentSettings(Options(stop_seconds=1.0), signals or SignalWatch()),
        Mock(side_effect=AssertionError("the main thread is there")),
    )


@pytest.mark.parametrize(
    ("fields", "category", "code", "kind"),
    [
        ({"rdzv_backend": "nonsense"}, "input", "USER:InputError", model.Kind.NON_RECOVERABLE),
        (
            {"min_nodes": 2, "max_nodes": 2, "rdzv_configs": {"timeout": 1, "join_timeout": 1}},
            "rendezvous",
            "SYSTEM:RendezvousError",
            model.Kind.RECOVERABLE,
        ),
    ],
    ids=["before there is an agent", "no other node comes"],
)
def test_a_launch_that_fails(  # noqa: PLR0917
    fields: dict[str, Any],
    category: str,
    code: str,
    kind: model.Kind,
    prefix: Prefix,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of the agent itself is documented, and the node announces its failure."""
    monkeypatch.setenv("FIRSTFAULT_NODE", "worker-1")
    end = _launched(prefix, **fields)
    (failure,) = prefix.failures()
    assert (failure.category, failure.code, failure.kind) == (category, code, kind)
    assert (failure.subject, failure.node, failure.rank) == (model.Subject.AGENT, "worker-1", None)
    assert [entry.phase for entry in prefix.roster()] == [model.Phase.FAILED]
    assert end.error is not None
    assert not isinstance(end.error, ChildFailedError)
    assert _failures(end.report)[0].code == code


@pytest.mark.parametrize("listening", [True, False])
def test_a_signal_leaves_the_rendezvous_open(
    listening: bool, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminated pod documents a preemption and leaves the rendezvous open for another pod.

    A task that was called from a thread hears no signals; there it is torch's exception alone that
    tells.
    """

    def signalled(*_: object) -> None:
        if listening:
            signal.raise_signal(signal.SIGTERM)
        else:
            raise SignalException("terminated", sigval=signal.SIGTERM)

    handler = Mock()
    monkeypatch.setattr(
        launch_module.rendezvous_registry, "get_rendezvous_handler", lambda _: handler
    )
    monkeypatch.setattr(LocalElasticAgent, "run", signalled)
    with SignalWatch() if listening else contextlib.nullcontext() as signals:
        end = _launched(prefix, signals)
    (failure,) = prefix.failures()
    assert isinstance(end.error, SignalException)
    assert [known.category for known in _failures(end.report)] == ["preemption"]
    assert (failure.category, failure.signal) == ("preemption", "SIGTERM")
    handler.shutdown.assert_not_called()


@pytest.mark.parametrize("needed", [True, False])
def test_the_rendezvous_is_closed_at_the_end(
    needed: bool, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is shut down after a failure, and by a node without which the job finished:
    that one has no result.
    """
    handler = Mock()
    monkeypatch.setattr(
        launch_module.rendezvous_registry, "get_rendezvous_handler", lambda _: handler
    )
    result = RunResult(WorkerState.FAILED, failures={0: ProcessFailure(0, 4000, 1, "no such file")})
    monkeypatch.setattr(LocalElasticAgent, "run", lambda *_: result if needed else None)
    end = _launched(prefix)
    assert (isinstance(end.error, ChildFailedError), end.results) == (
        needed,
        None if needed else {},
    )
    assert prefix.failures() == []
    handler.shutdown.assert_called_once()
