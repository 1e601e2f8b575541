"""Whether workers are restarted within an attempt, and the records of it."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from firstfault.conclude import (
    Conclusion,
    RestartContext,
    build_restart_record,
    conclude,
    decide_restart,
)
from firstfault.layout import (
    ROSTER,
    is_bundle,
    is_error_file,
    is_restart_record,
    restart_record_name,
)
from firstfault.model import (
    TIME_LIMIT,
    ExceptionInfo,
    FrameInfo,
    Kind,
    Phase,
    Resources,
    RestartKind,
    RestartRecord,
    WorkerError,
)
from firstfault.model.job import STALLS_OF_ROUND
from firstfault.retry import (
    RetryContext,
    RetryPolicy,
    decide,
    exhausted,
    explicit,
    never,
    on_category,
    same_fault_again,
)
from firstfault.strategies import build_undetermined_verdict
from firstfault.testing import START_NS, make_error, make_job, make_presence
from firstfault.wire.json_schemas import restart_from_json, restart_to_json
from tests.readers.commands import Ran
from tests.readers.conftest import Attempt
from tests.readers.scenes import agent_failure
from tests.seals import RECORD

CONTEXT = RestartContext(round=0, restarts_left=3, lifetime_seconds=30.0)
BUG = make_error(3)
RECOVERABLE = make_error(3, kind=Kind.RECOVERABLE, code="USER:Recoverable")
PREEMPTED = make_error(3, category="preemption")
CERTAIN = make_error(3, exception="TypeError")
KILLED = make_error(3, exception=None, signal="SIGKILL", exit_code=-9)
_FRAMES = (
    FrameInfo(
        "/venv/site-packages/torch/cuda/__init__.py",
        9,
        "synchronize",
        "torch._C._cuda_synchronize()",
    ),
)
ECC, GONE = (
    make_error(
        3,
        category="gpu_hardware",
        exception=ExceptionInfo("RuntimeError", f"CUDA error: {text}", frames=_FRAMES),
    )
    for text in ("uncorrectable ECC error encountered", "GPU has fallen off the bus")
)
HOST_OOM = make_error(
    3,
    category="host_oom",
    resources=Resources(oom_kill=1, memory_limit_bytes=100, memory_peak_bytes=10),
)
NO_SECOND_RESTART = explicit() & ~same_fault_again()
SAME_NODE = {"again": True, "previous_node": "worker-0"}
TOO_FEW = {"nodes_left": 1, "min_nodes": 2}


def _concluded(
    root: WorkerError, context: RestartContext, policy: RetryPolicy | None = None
) -> Conclusion:
    asked = context.to_retry_context(RetryContext(attempt=1, retries=1))
    found = conclude(make_job(root), strategy="earliest", policy=policy, context=asked)
    assert found is not None
    return found


def _fingerprint(root: WorkerError) -> str:
    return _concluded(root, CONTEXT).verdict.fingerprint


@pytest.mark.parametrize(
    ("root", "policy", "changes", "restart", "says"),
    [
        (
            BUG,
            None,
            {},
            True,
            "the same code may fail again, but that isn't proven, and torch elastic restarts",
        ),
        (
            BUG,
            None,
            {"again": True},
            False,
            "the previous round failed with the same fault, and this one trained",
        ),
        (
            BUG,
            None,
            {"again": True, "lifetime_seconds": 3600.0},
            True,
            "torch elastic restarts after any failure",
        ),
        (CERTAIN, None, {}, False, "a TypeError is a bug in the program, so it would fail again"),
        (
            KILLED,
            None,
            {},
            True,
            "nothing shows whether the same would happen again, and torch elastic restarts",
        ),
        (KILLED, None, {"again": True}, True, "torch elastic restarts after any failure"),
        (RECOVERABLE, None, {}, True, "was raised as recoverable (uses one of max_restarts)"),
        (RECOVERABLE, never(), {}, False, "the policy never retries"),
        (RECOVERABLE, explicit() & ~exhausted(), {}, True, "was raised as recoverable"),
        (
            RECOVERABLE,
            NO_SECOND_RESTART,
            SAME_NODE,
            False,
            "the previous round failed with the same",
        ),
        (RECOVERABLE, None, {"again": True}, True, "was raised as recoverable"),
        (BUG, on_category("user_code"), {}, True, "an exception in the training code"),
        (
            BUG,
            on_category("user_code"),
            {"again": True},
            False,
            "the previous round failed with the same fault",
        ),
        (PREEMPTED, None, {"nodes_left": 3, "min_nodes": 2}, True, "preemption"),
        (PREEMPTED, None, {"nodes_left": 3, "min_nodes": 2, "again": True}, True, "preemption"),
        *(
            (root, None, TOO_FEW, False, "the job needs 2 nodes, and 1 are left")
            for root in (PREEMPTED, RECOVERABLE)
        ),
        (ECC, None, {}, True, "a faulty GPU"),
        (
            ECC,
            None,
            SAME_NODE,
            False,
            "the same fault, and this one trained less than 10 minutes",
        ),
        (ECC, None, {"again": True, "previous_node": "worker-1"}, True, "a faulty GPU"),
        (GONE, None, {}, False, "the GPU is gone, and a restart would need it"),
        (HOST_OOM, None, {}, True, "the host ran out of memory"),
    ],
)
def test_workers_restart_unless_a_proof_speaks_against_it(
    root: WorkerError,
    policy: RetryPolicy | None,
    changes: dict[str, Any],
    restart: bool,
    says: str,
) -> None:
    """Workers restart as under torch, unless a proof speaks against it,
    or too few nodes are left.
    """
    changes = dict(changes)
    if changes.pop("again", False):
        changes["previous_fingerprint"] = _fingerprint(root)
    context = replace(CONTEXT, **changes)
    concluded = _concluded(root, context, policy)
    decided, reason = decide_restart(concluded.verdict, concluded.decision, context)
    assert decided is restart
    assert says in reason


def test_an_unknown_cause_leaves_the_restart_to_torch() -> None:
    """Torch's way counts, also after a second round: faults that aren't known can't be the same."""
    verdict = replace(
        build_undetermined_verdict(make_job(BUG), "nothing stands out"),
        fingerprint="1:aaaaaaaaaaaa",
    )
    for context in (CONTEXT, replace(CONTEXT, previous_fingerprint="1:aaaaaaaaaaaa")):
        decision = decide(verdict, None, context.to_retry_context(RetryContext()))
        restart, reason = decide_restart(verdict, decision, context)
        assert restart
        assert reason.startswith("nothing shows whether the same would happen again")
        assert reason.endswith("torch elastic restarts after any failure")


def test_a_rounds_record_has_verdict_decision_and_ranks() -> None:
    """It has the verdict in short, the decision, and the ranks of the round."""
    root = replace(BUG, place=replace(BUG.place, world_size=8))
    context = replace(CONTEXT, round=4)
    record = build_restart_record(_concluded(root, context), context)
    assert (record.kind, record.number, record.rank, record.node) == (
        RestartKind.ROUND,
        4,
        3,
        root.place.node,
    )
    assert (record.restart, record.category, record.world_size_before) == (True, "user_code", 8)
    assert (record.timestamp_ns, record.fingerprint) == (root.timestamp_ns, _fingerprint(root))


@pytest.mark.parametrize(
    "record",
    [
        RECORD,
        RestartRecord(RestartKind.IN_PROCESS, 0, "", restart=False, reason=""),
        replace(RECORD, is_agreed=False, headline="äöü \u2028 \x00".replace("\x00", "")),
    ],
)
def test_a_record_is_the_same_after_writing_and_reading(record: RestartRecord) -> None:
    """A record is the same after writing and reading, with unknown fields or not;
    its credentials are removed.
    """
    assert restart_from_json(restart_to_json(record)) == record
    later = restart_to_json(record).replace(b'{"schema"', b'{"tomorrow":[1],"schema"')
    assert restart_from_json(later) == record
    secret = restart_from_json(
        restart_to_json(replace(record, headline="password=hunter22 was refused"))
    )
    assert "hunter22" not in secret.headline


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"schema":"firstfault.conclude/v9"}',
        restart_to_json(RECORD)[:-9],
        restart_to_json(RECORD).replace(b'"round"', b'"unknown"'),
        restart_to_json(RECORD).replace(b":2,", b":-2,"),
        restart_to_json(RECORD).replace(b":12.5", b":NaN"),
        b"[" * 100_000,
    ],
)
def test_other_files_are_no_restart_records(data: bytes) -> None:
    """Anything else is no record."""
    assert restart_from_json(data) is None


def test_a_records_name_sorts_before_the_rosters_entries() -> None:
    """It is no document and no bundle, and sorts before the roster's entries."""
    name = restart_record_name("round", 7, 3)
    assert name == "decision-round-00007-0000003.json"
    assert is_restart_record(name)
    assert is_restart_record(restart_record_name("in-process", 10**9, 10**9))
    assert not is_error_file(name)
    assert not is_bundle(name)
    assert name < "r1-"
    assert not is_restart_record("decision-round-7-3.json")


def test_a_job_has_one_record_of_each_restart(attempt: Attempt) -> None:
    """The job has one record of each restart, oldest first: a completed one of a common decision,
    if there is one.
    """
    attempt.write(make_error(3, round=1))
    first = replace(RECORD, number=0, timestamp_ns=1_000)
    second = replace(RECORD, number=1, timestamp_ns=2_000, restart=False)
    inner = replace(first, kind=RestartKind.IN_PROCESS)
    begun = replace(first, lost_seconds=None)
    for group_rank, record in enumerate(
        (second, begun, first, replace(first, is_agreed=False), begun)
    ):
        attempt.put(
            f"{ROSTER}/{restart_record_name('round', record.number, group_rank)}",
            restart_to_json(record),
        )
    attempt.put(f"{ROSTER}/{restart_record_name('round', 2, 0)}", b"{")
    attempt.put(f"{ROSTER}/{restart_record_name('in-process', 0, 0)}", restart_to_json(inner))
    reader = attempt.reader()
    assert reader.restarts() == (inner, first, second)
    job = reader.job()
    assert job.restarts == (inner, first, second)
    assert job.coverage.notes == ()


def test_show_lists_restarts_and_their_cost(attempt: Attempt, run: Callable[..., Ran]) -> None:
    """The command lists the restarts of an attempt and the seconds that they cost,
    also if it succeeded.
    """
    show = partial(run, "show", "--recovered", attempt.uri)
    attempt.put("outputs.pb", b"")
    assert (show().code, show().out) == (0, "no restarts recorded\n")
    for number in range(2):
        record = replace(
            RECORD,
            kind=RestartKind.IN_PROCESS,
            number=number,
            lost_seconds=1.25,
            restart=True,
        )
        attempt.put(
            f"{ROSTER}/{restart_record_name('in-process', number, 0)}", restart_to_json(record)
        )
    ran = show()
    *lines, total = ran.out.splitlines()
    assert ran.code == 0
    assert [line.partition(":")[0] for line in lines] == [
        "in-process restart 0",
        "in-process restart 1",
    ]
    assert total == "2 restarts, 2 s lost in all"
    found = json.loads(show("--json").out)
    assert found["lost_seconds"] == 2.5
    assert [record["number"] for record in found["restarts"]] == [0, 1]
    assert show("--markdown").code == 2


STALL = RestartRecord(
    RestartKind.STALL,
    0,
    "rank 17 at loader.py:88 in read_shard",
    restart=False,
    reason="no progress for 61 s: 63 of 64 ranks wait",
    rank=17,
    timestamp_ns=START_NS,
    world_size_before=64,
)


@pytest.mark.parametrize(
    ("lost", "number", "cause"),
    [
        (
            None,
            0,
            "no progress for 6 h: rank 17 at loader.py:88 in read_shard, the agent was terminated",
        ),
        (74.0, 0, "the agent was terminated"),
        (None, STALLS_OF_ROUND, "the agent was terminated"),
    ],
)
def test_a_termination_during_a_stall_names_the_straggler(
    attempt: Attempt,
    run: Callable[..., Ran],
    lost: float | None,
    number: int,
    cause: str,
) -> None:
    """`show` prints the rank that a running job waits for; after the job's end the cause has it,
    and the duration.
    """
    record = replace(STALL, lost_seconds=lost, number=number)
    attempt.join(make_presence(Phase.JOINED, node="worker-1", group_rank=1))
    attempt.put(f"{ROSTER}/{restart_record_name('stall', number, 0)}", restart_to_json(record))
    hint = run("show", attempt.uri).err
    assert (STALL.reason in hint, STALL.headline in hint) == ("6 h" in cause, "6 h" in cause)
    attempt.write(agent_failure(1, "preemption", 6 * 3_600_000, message="the agent was terminated"))
    text = " ".join(run("show", "-v", attempt.uri).out.split())
    assert f" Cause terminated: {cause} infrastructure, category preemption, " in text
    seconds = lost or (21_600 if number == 0 else 0)
    assert (
        f"Stalls: 1 stall, {seconds:.0f} s in total, {64 * seconds / 3600:.2f} rank hours, waiting"
        " for rank" in text
    )


def test_a_time_limit_during_a_stall_needs_more_than_time(
    attempt: Attempt, run: Callable[..., Ran]
) -> None:
    """More time alone doesn't help a job that made no progress, so the advice is another one."""
    record = replace(STALL, headline="rank 17: its function had returned while its peers waited")
    limit = replace(
        agent_failure(1, "preemption", 600_000, message="the attempt reached its time limit"),
        code=TIME_LIMIT,
    )
    for has_stalled in (False, True):
        if has_stalled:
            name = restart_record_name("stall", 0, 0)
            attempt.put(f"{ROSTER}/{name}", restart_to_json(record))
        attempt.write(limit)
        text = " ".join(run("show", attempt.uri).out.split())
        advice = "find out why the job made no progress before you raise the time limit"
        assert (advice in text) is has_stalled
        assert ("rank 17: its function had returned" in text) is has_stalled
