"""After a failure: wait a bounded time for the other nodes, read, conclude, seal."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from firstfault.conclude import Conclusion
from firstfault.model import DocumentRef, Kind, Seal, Verdict, WorkerError
from firstfault.retry import never
from firstfault.strategies import earliest, register_strategy, unregister_strategy
from firstfault.testing import make_error
from firstfault.wire.documents import decode, encode, encode_seal
from firstfault_torch import run, time_limits
from firstfault_torch.agent.launch import RoundEnd
from firstfault_torch.agent.reporter import NodeReport
from firstfault_torch.conclusion.sealed_verdict import build_torch_error_data
from firstfault_torch.engine import PlainEngine
from firstfault_torch.node.document_writer import document_path, get_file, put_file, record_error
from firstfault_torch.node_context import NodeContext
from firstfault_torch.options import Options
from firstfault_torch.rounds.election import VerdictElection
from tests.prefix import Prefix
from tests.recordings import conclude_node, make_node_context, seal_conclusion
from tests.s3_server import S3
from tests.torch_agent.stores import acknowledge, hosted

LONG_S = 60.0


def _wrote(uri: str, failure: WorkerError) -> WorkerError:
    """Upload a document and return the failure as its node knows it."""
    _, receipt = record_error(failure, make_node_context(uri, 30.0), None, 30)
    assert receipt.durable
    return replace(failure, documents=(DocumentRef(receipt.name),))


def _failure(rank: int, **fields: Any) -> WorkerError:
    return make_error(rank, node=f"worker-{rank}", group_rank=rank, group_world_size=2, **fields)


def _settled(
    node_context: NodeContext,
    *failures: WorkerError,
    seconds: float = 0.0,
    **options: Any,
) -> Conclusion:
    return conclude_node(node_context, failures, seconds=seconds, **options)


_NEW_MODULES = """
import sys
from firstfault_torch import run
run.import_conclusion_modules()
before = set(sys.modules)
from firstfault.attempt_reader import AttemptReader
AttemptReader("", copies={"error.pb": b""}).read_copies("")
print([name for name in set(sys.modules) - before if name.startswith("firstfault")])
"""


@pytest.mark.slow
def test_reading_modules_are_loaded_before_a_failure() -> None:
    """An agent that reads documents after a failure imports no module of ours:
    the disk may be gone.
    """
    program = [sys.executable, "-c", _NEW_MODULES]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize("uploaded", [True, False])
def test_what_this_node_knows_counts_once(uploaded: bool, prefix: Prefix) -> None:
    """This node's own failure counts also if its document was never uploaded,
    and once if it was.
    """
    own = _failure(0, message="lost on the way")
    conclusion = _settled(prefix.node_context(), _wrote(prefix.uri, own) if uploaded else own)
    assert "lost on the way" in conclusion.verdict.headline
    assert (len(conclusion.job.failures), conclusion.verdict.document_count) == (1, 1)


def test_without_a_failure_there_is_no_verdict(prefix: Prefix) -> None:
    """Without any failure there is no verdict."""
    with pytest.raises(LookupError, match="no failure is recorded"):
        _settled(prefix.node_context())


def test_a_missing_list_permission_is_named(
    s3_no_list: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that may not list the storage judges its own failures and names
    the missing permission.
    """
    for name, value in s3_no_list.environment().items():
        monkeypatch.setenv(name, value)
    uri = s3_no_list.uri("settle")
    _wrote(uri, _failure(1, at_ms=0, message="the root, out of sight"))
    own = _wrote(uri, _failure(0, at_ms=5, message="what I know"))
    conclusion = _settled(make_node_context(uri), own, seconds=LONG_S)
    assert "what I know" in conclusion.verdict.headline
    assert not conclusion.verdict.settled
    assert not conclusion.verdict.coverage.complete
    (note,) = conclusion.verdict.coverage.notes
    assert note.startswith("only the documents at hand were read; cannot list s3://")
    assert "permission" in note


@pytest.fixture
def strategy() -> Iterator[Callable[[Any], str]]:
    """Register a function as a strategy for the duration of a test; return its name."""

    def register(function: Any) -> str:
        register_strategy("of_this_test", function)
        return "of_this_test"

    yield register
    unregister_strategy("of_this_test")


def _raises(*_: object) -> Any:
    raise ZeroDivisionError("no failures per node")


def _returns_nothing(_: object) -> Any:
    return None


def _odd(job: Any) -> Verdict:
    return replace(earliest(job), headline=object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "policy", "reason"),
    [
        (
            _raises,
            None,
            "StrategyError: the strategy _raises raised ZeroDivisionError: no failures per node",
        ),
        (_returns_nothing, None, "StrategyError: the strategy"),
        (_odd, None, "TypeError: "),
        (None, _raises, "ZeroDivisionError: no failures per node"),
        ("of_a_plugin", None, "unknown strategy 'of_a_plugin'"),
    ],
    ids=["raises", "returns nothing", "cannot be stored", "a policy raises", "unknown"],
)
def test_a_failing_strategy_or_policy_is_replaced(  # noqa: PLR0917
    function: Any,
    policy: Any,
    reason: str,
    prefix: Prefix,
    strategy: Callable[[Any], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is replaced by firstfault's default, with one warning; there is still a verdict."""
    name = strategy(function) if callable(function) else function or "earliest"
    node_context = replace(prefix.node_context(), strategy=name)
    found = _settled(node_context, _failure(0, kind=Kind.RECOVERABLE), policy=policy)
    assert (found.verdict.strategy, found.verdict.ranks, found.decision.retry) == (
        "earliest",
        (0,),
        True,
    )
    (line,) = caplog.records
    assert f"the strategy {name} or the task's retry policy failed (" in line.getMessage()
    assert reason in line.getMessage()


@pytest.mark.parametrize("strategy", ["evidence", "earliest"])
def test_the_tasks_strategy_decides(strategy: str, prefix: Prefix) -> None:
    """The strategy that the task names decides."""
    failures = [_failure(0, at_ms=0, kind=Kind.RECOVERABLE), _failure(1, at_ms=9, message="last")]
    verdict = _settled(replace(prefix.node_context(), strategy=strategy), *failures).verdict
    assert (verdict.strategy, verdict.ranks) == (strategy, (0,))


@pytest.mark.parametrize("leaving", [False, True])
def test_a_blocking_policy_does_not_hold_the_pod(
    leaving: bool,
    prefix: Prefix,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It must not hold the pod: after a limit, and soon after the pod was told to end,
    the defaults decide.
    """
    monkeypatch.setattr(time_limits, "CONCLUDE_TIMEOUT_SECONDS", LONG_S if leaving else 0.3)
    monkeypatch.setattr(time_limits, "TERMINATED_CONCLUDE_TIMEOUT_SECONDS", 0.3)
    release = threading.Event()
    asked = []
    shutdown_requested = threading.Event()

    def blocks(*_: object) -> bool:
        asked.append(1)
        if leaving:
            shutdown_requested.set()
        release.wait(LONG_S)
        return False

    began = time.monotonic()
    recoverable = _failure(0, kind=Kind.RECOVERABLE)
    try:
        found = _settled(
            prefix.node_context(),
            recoverable,
            policy=blocks,
            shutdown_requested=shutdown_requested,
        )
    finally:
        release.set()
    assert time.monotonic() - began < LONG_S / 2
    assert (found.decision.retry, found.verdict.strategy, len(asked)) == (True, "earliest", 1)
    assert "it takes too long); using firstfault's defaults" in caplog.text


@pytest.mark.parametrize(
    ("policy", "retry"), [(None, True), (never(), False), (lambda *_: False, False)]
)
def test_the_tasks_policy_decides(prefix: Prefix, policy: Any, retry: bool) -> None:
    """The decision is the task's own policy's, else the default's;
    it learns of the attempt's number and retries.
    """
    seen = []

    def told(verdict: Verdict, context: Any) -> Any:
        seen.append((context.attempt, context.retries, context.pods_alive))
        return policy(verdict, context)

    node_context = make_node_context(prefix.uri, attempt=2)
    own = _failure(0, kind=Kind.RECOVERABLE)
    assert _settled(node_context, own, policy=policy and told, retries=5).decision.retry is retry
    assert seen == ([(2, 5, True)] if policy else [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"message": "bad batch"}, "ValueError: bad batch"),
        (
            {"exception": None, "signal": "SIGKILL", "code": "USER:SIGKILL"},
            "USER:SIGKILL: SIGKILL, rank 1 on worker-1",
        ),
    ],
    ids=["exception", "death"],
)
def test_an_outer_launcher_gets_the_root_cause_in_torchs_format(
    fields: dict[str, Any], message: str, prefix: Prefix
) -> None:
    """An outer launcher gets the root cause in torch's format;
    a death by its code and the verdict's headline.
    """
    verdict = _settled(prefix.node_context(), _failure(1, **fields)).verdict
    found = build_torch_error_data(verdict)["message"]
    assert found["message"].startswith(message)
    assert found["extraInfo"] == {"py_callstack": verdict.message, "timestamp": "1700000000"}


@pytest.fixture
def last_resort(prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that ends node 0's process as an agent whose main thread is blocked does,
    but for the exit.
    """
    monkeypatch.setattr(run, "end_node_recorder", lambda _: None)
    monkeypatch.setattr(run.os, "_exit", lambda _: None)
    own = _wrote(prefix.uri, _failure(0, message="own"))
    end = RoundEnd(
        prefix.node_context(), NodeReport({document_path(own.documents[0].name): encode(own)})
    )
    engine = PlainEngine(str(prefix.folder.parent), 0, "worker-0")
    monkeypatch.setattr(
        type(engine), "published_verdict", lambda _: get_file(prefix.uri, "error.pb")
    )
    settings = run.ExitSettings(engine, Options(), threading.Event())
    return lambda: run._end_process(run.FailedNode(end), settings)


@pytest.mark.parametrize(("age_s", "stays"), [(None, False), (0, True), (3600, False)])
def test_a_node_without_time_replaces_only_an_outdated_verdict(
    age_s: int | None,
    stays: bool,
    prefix: Prefix,
    last_resort: Callable[[], None],
) -> None:
    """A node without time to read replaces an outdated verdict,
    but none of a node that had time.
    """
    document = b""
    if age_s is not None:
        other = seal_conclusion(
            _settled(prefix.node_context(), _failure(1, message="another")), prefix.node_context()
        ).sealed
        document = encode_seal(replace(other.seal, timestamp_ns=time.time_ns() - age_s * 10**9))
        put_file(prefix.uri, "error.pb", document)
    last_resort()
    left = (prefix.folder / "error.pb").read_bytes()
    assert (left == document) is stays
    assert isinstance(decode(left, DocumentRef("error.pb")), Seal)


@pytest.mark.slow
@pytest.mark.forks
@pytest.mark.parametrize("published", [True, False])
def test_a_leader_without_store_adopts_a_published_verdict(
    published: bool, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader adopts a verdict that another node has published;
    without one it publishes its own.
    """
    other = seal_conclusion(
        _settled(prefix.node_context(), _failure(1, message="another")), prefix.node_context()
    ).sealed
    document = encode_seal(replace(other.seal, timestamp_ns=time.time_ns()))
    with hosted() as (process, store):

        def policy(*_: object) -> bool:
            process.kill()
            process.join()
            if published:
                put_file(prefix.uri, "error.pb", document)
            return False

        own = _wrote(prefix.uri, _failure(0, message="own"))
        copies = {document_path(own.documents[0].name): encode(own)}
        election = VerdictElection(0, 1)
        ended = threading.Event()
        acknowledge(store, 0)
        peers: Any = SimpleNamespace(
            settlement=election,
            settle=lambda copies, seconds, *_, **__: election.settle(
                (store.clone(), store.clone()),
                copies,
                seconds,
                ended,
            ),
        )
        end = RoundEnd(prefix.node_context(), NodeReport(copies), peers=peers)
        engine = PlainEngine(str(prefix.folder.parent), 0, "worker-0")
        monkeypatch.setattr(
            type(engine), "published_verdict", lambda _: get_file(prefix.uri, "error.pb")
        )
        found = run.reach_verdict(
            end, run.ExitSettings(engine, Options(retry_policy=policy), ended)
        )
    assert found is not None
    left = (prefix.folder / "error.pb").read_bytes()
    assert (found.sealed.document, left == document) == (left, published)
