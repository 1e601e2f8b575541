"""What an agent says of its workers' deaths and of its own, and that it stays torch's agent when it cannot."""

from __future__ import annotations

import json
import signal
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

from firstfault.assemble import Findings, assemble
from firstfault.keys import error_key_for
from firstfault.model import ExceptionInfo, Kind, Origin, Phase, Place, Subject, Writer
from firstfault.strategies import get_strategy
from firstfault.testing import make_error
from firstfault.wire import encode
from flytekitplugins.firstfault import agent as agent_module
from flytekitplugins.firstfault import launch as launch_module
from flytekitplugins.firstfault.agent import ReportingAgent
from flytekitplugins.firstfault.agent_documents import LastWords, about_agent, about_death, last_words
from flytekitplugins.firstfault.deaths import Death
from flytekitplugins.firstfault.in_flight import Moment
from flytekitplugins.firstfault.launch import LaunchFailedError, launch
from flytekitplugins.firstfault.recorder import Spool
from flytekitplugins.firstfault.taxonomy import Sort

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Prefix

    from firstfault.model import WorkerError

PLACE = Place(node="worker-1", rank=3, local_rank=1, group_rank=1)
WORDS = LastWords(ExceptionInfo("ValueError", "boom"), "Traceback of it")
STOPPED = "another worker of this node had failed"


def _death(local_rank: int, exit_code: int, at: Moment | None = None) -> Death:
    moment = at or Moment.now()
    return Death(local_rank, 4000 + local_rank, exit_code, moment.wall_ns, moment.monotonic_ns)


def _verdict_of(*failures: WorkerError) -> Any:
    return get_strategy("earliest")(assemble(Findings(documents=failures)))


# --- one death ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exit_code", "stopped", "words", "code", "category"),
    [
        (-9, "", None, "USER:SIGKILL", "signal"),
        (-11, "", None, "USER:SIGSEGV", "signal"),
        (-15, "", None, "USER:SIGTERM", "signal"),
        (3, "", None, "USER:ExitCode", "exit"),
        (-15, STOPPED, None, "USER:Stopped", "stopped"),
        (1, "", WORDS, "USER:RuntimeError", "user_code"),
        (-6, "", WORDS, "USER:RuntimeError", "user_code"),
    ],
)
def test_a_death_is_told(exit_code: int, stopped: str, words: LastWords | None, code: str, category: str) -> None:
    """A death is told by its signal or exit code, by what torch kept of an exception, or as the agent's own doing."""
    death = _death(1, exit_code)
    failure = about_death(death, PLACE, stopped, words)
    verdict = _verdict_of(failure)
    assert (failure.code, verdict.category) == (code, category)
    assert (failure.writer, failure.subject) == (Writer.AGENT, Subject.WORKER)
    assert (failure.exit_code, failure.signal) == (exit_code, death.signal)
    assert (failure.place, failure.worker) == (PLACE, "worker-1")
    assert (failure.timestamp_ns, failure.monotonic_ns) == (death.wall_ns, death.monotonic_ns)
    assert (failure.kind, failure.origin) == (Kind.NON_RECOVERABLE, Origin.USER)
    assert failure.stopped_by_agent is bool(stopped)
    assert failure.fingerprint


def test_a_signal_of_unknown_origin_is_not_the_agents() -> None:
    """The text says that the agent had not sent the signal: that is what makes it a root cause."""
    assert "which its agent had not sent; exit code -9" in about_death(_death(1, -9), PLACE, "", None).message
    assert "was stopped by its agent with SIGTERM" in about_death(_death(1, -15), PLACE, STOPPED, None).message


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"py_callstack": "Traceback of it", "timestamp": "1"}, "Traceback of it"),
        ({"py_callstack": ""}, "ValueError: boom"),
        ({}, "ValueError: boom"),
        (None, "ValueError: boom"),
        ("odd", "ValueError: boom"),
    ],
)
def test_last_words_in_torchs_file(extra: object, text: str, tmp_path: Path) -> None:
    """What a worker left in torch's error.json is taken for its exception, whatever its second half looks like."""
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "ValueError: boom", "extraInfo": extra}}))
    words = last_words(str(path), "")
    assert words is not None
    assert (words.exception.type, words.exception.message) == ("ValueError", "boom")
    assert words.traceback == text


def test_no_last_words(tmp_path: Path) -> None:
    """A worker that left neither of torch's files has said nothing."""
    assert last_words(str(tmp_path / "error.json"), "") is None
    assert last_words(str(tmp_path / "error.json"), str(tmp_path / "traceback")) is None


# --- the agent itself -----------------------------------------------------------------------------------------------


def test_the_agent_was_told_to_go() -> None:
    """A signal to the agent comes from outside: preemption, retried on the system's budget."""
    error = SignalException("told", sigval=signal.SIGTERM)
    moment = Moment(17, 4)
    failure = about_agent(error, Sort.PREEMPTION, Place(node="worker-1"), moment)
    assert (failure.category, failure.signal, failure.subject) == ("preemption", "SIGTERM", Subject.AGENT)
    assert (failure.kind, failure.origin) == (Kind.RECOVERABLE, Origin.SYSTEM)
    assert failure.exception is None
    assert (failure.timestamp_ns, failure.monotonic_ns) == moment
    assert "SIGTERM" in failure.message


def test_the_agent_failed() -> None:
    """An error of the agent is told with its traceback."""
    failure = about_agent(RuntimeError("the agent's"), Sort.PLATFORM_ERROR, Place(node="worker-1"), Moment.now())
    assert (failure.category, failure.code) == ("platform", "SYSTEM:AgentError")
    assert failure.exception is not None
    assert failure.exception.type == "RuntimeError"


# --- looking at the workers -----------------------------------------------------------------------------------------


class _Watch:
    """A DeathWatch that has seen what it is told."""

    def __init__(self, *seen: Death) -> None:
        self.seen = list(seen)

    def deaths(self) -> list[Death]:
        return self.seen

    def stop(self) -> None:
        """Nothing to stop."""


@pytest.fixture
def agent(prefix: Prefix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReportingAgent:
    """An agent of two workers, ranks 2 and 3 of worker-1, which nobody has started."""
    monkeypatch.setenv("_F_WN", "worker-1")
    spec = WorkerSpec("default", 2, Mock(), entrypoint=print, max_restarts=0)
    made = ReportingAgent(recording=prefix.recording(), spec=spec, logs_specs=DefaultLogsSpecs(), start_method="fork")
    for local_rank, worker in enumerate(made._worker_group.workers):
        worker.global_rank, worker.world_size = 2 + local_rank, 4
    made._worker_group.group_rank, made._worker_group.group_world_size = 1, 2
    made._watch = _Watch()
    made.report.error_files = {local_rank: str(tmp_path / str(local_rank) / "error.json") for local_rank in (0, 1)}
    return made


def _look(
    agent: ReportingAgent, monkeypatch: pytest.MonkeyPatch, *local_ranks: int, deaths: Callable[[], list[Death]]
) -> None:
    """Let torch look, find that these workers failed first, and stop the others; `deaths` come while it looks."""
    failures = {2 + rank: ProcessFailure(rank, 4000 + rank, -9, "no such file") for rank in local_ranks}
    result = RunResult(WorkerState.FAILED, failures=failures)

    def torchs_own(*_: object) -> RunResult:
        agent._watch.seen += deaths()
        return result

    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", torchs_own)
    found = agent._monitor_workers(agent._worker_group)
    agent.close()
    assert found is result, "torch's own result"


def _by_rank(prefix: Prefix) -> dict[int | None, WorkerError]:
    return {failure.rank: failure for failure in prefix.failures()}


@pytest.mark.parametrize("seen_before", [True, False], ids=["before torch looked", "while torch looked"])
def test_who_was_stopped(
    seen_before: bool, agent: ReportingAgent, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch stopped the other worker, not the one it found dead, however close to its look that one died."""
    if seen_before:
        agent._watch.seen.append(_death(1, -9))
        _look(agent, monkeypatch, 1, deaths=lambda: [_death(0, -15)])
    else:
        _look(agent, monkeypatch, 1, deaths=lambda: [_death(1, -9), _death(0, -15)])
    found = _by_rank(prefix)
    assert not found[3].stopped_by_agent
    assert (found[3].signal, found[3].code) == ("SIGKILL", "USER:SIGKILL")
    assert found[2].stopped_by_agent
    assert found[2].sent_signals[0].reason == STOPPED


def test_a_second_death_by_itself(agent: ReportingAgent, prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that exited while the others were stopped was not stopped: no signal ended it."""
    _look(agent, monkeypatch, 1, deaths=lambda: [_death(0, 7), _death(1, -9)])
    assert {rank: failure.stopped_by_agent for rank, failure in _by_rank(prefix).items()} == {2: False, 3: False}


def test_a_report_ends_with_its_roster_entry(
    agent: ReportingAgent, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the node says that it is done, its documents are there, with a receipt for each."""
    _look(agent, monkeypatch, 0, deaths=lambda: [_death(0, -9), _death(1, -9)])
    (entry,) = prefix.roster()
    assert entry.phase is Phase.FAILED
    assert entry.ranks == (2, 3)
    assert (entry.place.node, entry.place.group_rank, entry.place.group_world_size) == ("worker-1", 1, 2)
    assert {receipt.name for receipt in entry.receipts} == {path.name for path in prefix.errors.iterdir()}
    assert {receipt.rank for receipt in entry.receipts} == {2, 3}
    assert all(receipt.durable and receipt.fault_to_durable_ns for receipt in entry.receipts)


def _spooled(agent: ReportingAgent, local_rank: int) -> tuple[str, bytes]:
    """Leave a document in a worker's spool, as one that could not upload it; return its name and its bytes."""
    own = make_error(2 + local_rank, node="worker-1", message="last words", monotonic_ns=time.monotonic_ns())
    name, data = error_key_for(own), encode(own)
    Spool.beside(agent.report.error_files[local_rank]).add(name, data)
    return name, data


def test_what_a_worker_could_not_upload(agent: ReportingAgent, prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document that waits in the spool is uploaded by the agent as it is, and no other is written for that worker."""
    name, data = _spooled(agent, 1)
    _look(agent, monkeypatch, 1, deaths=lambda: [_death(1, -9)])
    assert [path.name for path in prefix.errors.iterdir()] == [name]
    assert (prefix.errors / name).read_bytes() == data
    assert [failure.message for failure in agent.report.failures] == ["last words"]


def test_documents_of_two_workers_at_once(
    agent: ReportingAgent, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each spooled document's receipt is that of its own worker, in whatever order the uploads run."""
    ranks = {_spooled(agent, local_rank)[0]: 2 + local_rank for local_rank in (0, 1)}
    both = threading.Barrier(2)

    class Both(list[Any]):
        """A list in which each thread finds the other's entry as well."""

        def extend(self, items: Any) -> None:
            super().extend(items)
            both.wait(30)

    agent.report.failures = Both()
    _look(agent, monkeypatch, 0, deaths=lambda: [_death(0, 1), _death(1, 1)])
    assert {receipt.name: receipt.rank for receipt in agent.report.receipts} == ranks


@pytest.mark.parametrize("broken", ["_document_deaths", "_finish_report"])
def test_when_our_code_breaks(
    broken: str, agent: ReportingAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If our own code raises, torch's result is returned as if we were not there, with a warning."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(ReportingAgent, broken, fail)
    _look(agent, monkeypatch, 1, deaths=lambda: [_death(1, -9)])
    assert "firstfault failed while" in caplog.text
    assert "ZeroDivisionError: ours" in caplog.text


# --- launching ------------------------------------------------------------------------------------------------------


def _config(**fields: Any) -> LaunchConfig:
    values: dict[str, Any] = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1, "run_id": "run"}
    values |= {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "start_method": "fork", "monitor_interval": 0.05}
    return LaunchConfig(**(values | fields))


@pytest.mark.parametrize(
    ("fields", "category", "code", "kind"),
    [
        ({"rdzv_backend": "nonsense"}, "input", "USER:InputError", Kind.NON_RECOVERABLE),
        (
            {"min_nodes": 2, "max_nodes": 2, "rdzv_configs": {"timeout": 1, "join_timeout": 1}},
            "rendezvous",
            "SYSTEM:RendezvousError",
            Kind.RECOVERABLE,
        ),
    ],
    ids=["before there is an agent", "nobody comes"],
)
def test_a_launch_that_fails(  # noqa: PLR0917
    fields: dict[str, Any], category: str, code: str, kind: Kind, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the agent itself is documented too, and the node says that it is done."""
    monkeypatch.setenv("_F_WN", "worker-1")
    with pytest.raises(LaunchFailedError) as caught:
        launch(_config(**fields), print, (), prefix.recording())
    (failure,) = prefix.failures()
    assert (failure.category, failure.code, failure.kind) == (category, code, kind)
    assert (failure.subject, failure.node, failure.rank) == (Subject.AGENT, "worker-1", None)
    assert [entry.phase for entry in prefix.roster()] == [Phase.FAILED]
    assert not isinstance(caught.value.error, ChildFailedError)
    assert caught.value.report.failures[0].code == code


def test_a_node_that_is_not_needed(prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without which the job finished returns no results, and no failure."""
    monkeypatch.setattr(agent_module.LocalElasticAgent, "run", lambda *_: None)
    assert launch(_config(), print, (), prefix.recording()) == {}
    assert prefix.failures() == []


def _signalled(*_: object) -> None:
    raise SignalException("told to go", sigval=signal.SIGTERM)


def test_a_signal_leaves_the_rendezvous_open(prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that is told to go says so, has a failure to seal, and lets another one take its place."""
    handler = Mock()
    monkeypatch.setattr(launch_module.rendezvous_registry, "get_rendezvous_handler", lambda _: handler)
    monkeypatch.setattr(agent_module.LocalElasticAgent, "run", _signalled)
    with pytest.raises(LaunchFailedError) as caught:
        launch(_config(), print, (), prefix.recording())
    (failure,) = prefix.failures()
    assert isinstance(caught.value.error, SignalException)
    assert [known.category for known in caught.value.report.failures] == ["preemption"]
    assert (failure.category, failure.signal) == ("preemption", "SIGTERM")
    handler.shutdown.assert_not_called()


def test_the_rendezvous_is_closed_after_a_failure(prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed worker no other node shall join: the rendezvous is shut down."""
    handler = Mock()
    monkeypatch.setattr(launch_module.rendezvous_registry, "get_rendezvous_handler", lambda _: handler)
    failures = {0: ProcessFailure(0, 4000, 1, "no such file")}
    result = RunResult(WorkerState.FAILED, failures=failures)
    monkeypatch.setattr(agent_module.LocalElasticAgent, "run", lambda *_: result)
    with pytest.raises(LaunchFailedError) as caught:
        launch(_config(), print, (), prefix.recording())
    assert isinstance(caught.value.error, ChildFailedError)
    handler.shutdown.assert_called_once()
