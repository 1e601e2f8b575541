"""The merge of documents into `JobErrors`."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstfault import model
from firstfault.layout import ErrorKey
from firstfault.model.job import nodes_done, pods_live
from firstfault.reading.assemble import Snapshot, Unreadable, assemble, compute_digest
from firstfault.testing import START_NS, make_error, make_presence

_KILLED = {"writer": model.Writer.AGENT, "exception": None, "exit_code": -9, "signal": "SIGKILL"}


def _job(
    *documents: model.WorkerError, expected_nodes: int | None = None, **snapshot: Any
) -> model.JobErrors:
    return assemble(Snapshot(documents=documents, **snapshot), expected_nodes=expected_nodes)


def get_messages(failures: tuple[model.WorkerError, ...]) -> list[str]:
    return [failure.message for failure in failures]


# --- which documents count ------------------------------------------------------------------------


_OLD, _NEW = {"message": "old", "node": "a"}, {"message": "new", "node": "a", "at_ms": 5}


@pytest.mark.parametrize(
    ("documents", "roster", "judged", "history"),
    [
        ([_OLD], [{"round": 1}], [], ["old"]),
        ([_OLD, {**_NEW, "round": 1}], [], ["new"], ["old"]),
        ([_OLD], [{"incarnation": 7}], ["old"], []),
        ([{**_OLD, "incarnation": 1, "group_rank": 0}], [{"incarnation": 2}], [], ["old"]),
        (
            [
                {**_OLD, "incarnation": 1},
                {**_NEW, "incarnation": 2},
                {"node": "b", "incarnation": 1, "at_ms": 9},
            ],
            [],
            ["new", "boom"],
            ["old"],
        ),
        (
            [{**_OLD, "incarnation": 5}, {**_NEW, "incarnation": 4, "round": 1}],
            [],
            ["new"],
            ["old"],
        ),
        (
            [{"writer": model.Writer.STOCK, "exception": None}, {**_NEW, "round": 3}],
            [],
            ["boom", "new"],
            [],
        ),
    ],
    ids=[
        *(
            "a later round began",
            "a later round's document",
            "no incarnation",
            "the node came back",
        ),
        *("a newer incarnation", "an incarnation of another round", "a stock file"),
    ],
)
def test_documents_before_a_restart_are_history(
    documents: list[Any],
    roster: list[Any],
    judged: list[str],
    history: list[str],
) -> None:
    """A document is history if its node or the job has restarted since."""
    entries = tuple(make_presence(model.Phase.JOINED, node="a", **place) for place in roster)
    job = _job(*(make_error(**fields) for fields in documents), roster=entries)
    assert (get_messages(job.failures), get_messages(job.history)) == (judged, history)


@pytest.mark.parametrize(
    ("judged", "named", "count"), [(0, 1, 1), (1, 0, 0)], ids=["later", "earlier"]
)
def test_an_unreadable_document_counts_by_the_round_in_its_name(
    judged: int, named: int, count: int
) -> None:
    """An unreadable document of a later round is counted and hides no other;
    one of an earlier round does not count.
    """
    name = str(ErrorKey(named, START_NS, 0, 0, "", 0, "0" * 32))
    job = _job(
        make_error(round=judged, group_world_size=1), unreadable=(Unreadable(name, "empty"),)
    )
    assert (len(job.failures), job.round, job.coverage.unreadable) == (1, judged, count)


# --- one worker, heard twice ----------------------------------------------------------------------


def test_a_worker_and_its_agent_are_merged() -> None:
    """The agent's fields are added to the worker's;
    the worker's own fields stay. A fingerprint is never missing.
    """
    sent = (model.SentSignal("SIGTERM", "stopped because rank 0 failed"),)
    word = make_error(3, message="mine", at_ms=5, log_tail="")
    told = {
        "log_tail": "tail",
        "category": "signal",
        "resources": model.Resources(1),
        "sent_signals": sent,
    }
    seen = make_error(
        3,
        message="agent's",
        at_ms=1,
        **_KILLED,
        **told,
        fingerprint="1:0123456789ab",
    )
    (alone,) = _job(seen).failures
    assert (alone.stopped_by_agent, alone.fingerprint) == (True, "1:0123456789ab")
    (failure,) = _job(seen, word).failures
    assert not failure.stopped_by_agent
    assert failure.fingerprint.startswith("2:")
    assert (failure.message, failure.writer, failure.timestamp_ns) == (
        "mine",
        model.Writer.WORKER,
        word.timestamp_ns,
    )
    assert failure.exception == word.exception
    assert (failure.exit_code, failure.signal, failure.log_tail) == (-9, "SIGKILL", "tail")
    assert (failure.category, failure.resources) == ("signal", model.Resources(1))
    assert failure.documents == tuple(
        sorted(word.documents + seen.documents, key=lambda ref: ref.name)
    )


_EVIDENCE = {
    "exit_code": 1,
    "signal": "SIGABRT",
    "sent_signals": (model.SentSignal("SIGTERM", "rank 0 failed"),),
    "log_tail": "tail",
    "category": "data",
    "resources": model.Resources(memory_used_bytes=7),
    "stack_dumps": (model.StackDump(99, 3, "frames"),),
    "thread_failures": (
        model.ThreadFailure("loader", START_NS, model.ExceptionInfo("OSError", "disk")),
    ),
    "handled_exceptions": (
        model.HandledException(START_NS, model.ExceptionInfo("ValueError", "no labels")),
    ),
    "collectives": (model.CollectiveProgress("default_pg", "allreduce", 41, 40),),
    "caused_by": model.CausedBy(0, "worker-0", "e1.pb"),
}


def test_fields_missing_in_the_workers_document_come_from_the_agents() -> None:
    """Fields that the worker's document lacks come from the agent's, never the other way round."""
    seen = make_error(3, writer=model.Writer.AGENT, exception=None, **_EVIDENCE)
    other = make_error(
        3,
        writer=model.Writer.RECORDER,
        exception=None,
        exit_code=9,
        signal="SIGFPE",
        log_tail="other",
    )
    (failure,) = _job(other, make_error(3), seen).failures
    assert {name: getattr(failure, name) for name in _EVIDENCE} == _EVIDENCE


# --- the end of a log, from the roster ------------------------------------------------------------


def test_a_failure_gets_its_log_from_the_roster() -> None:
    """The log that an agent put into its roster entry belongs to its worker's failure,
    also one of an earlier round.
    """
    roster = (
        make_presence(round=0, log_tails=(model.LogTail(3, "epoch 1"),)),
        make_presence(
            round=1, log_tails=(model.LogTail(3, "epoch 2"), model.LogTail(4, "of another rank"))
        ),
    )
    old = make_error(3, message="old", group_rank=0)
    new = make_error(3, message="new", group_rank=0, round=1)
    job = _job(old, new, roster=roster)
    assert [(failure.message, failure.log_tail) for failure in job.failures] == [("new", "epoch 2")]
    assert [(failure.message, failure.log_tail) for failure in job.history] == [("old", "epoch 1")]


@pytest.mark.parametrize(
    "other",
    [
        {"log_tail": "its own"},
        {"node": "worker-9"},
        {"rank": 4},
        {"incarnation": 8},
        {"subject": model.Subject.AGENT},
    ],
)
def test_a_log_of_the_roster_belongs_to_its_worker_only(other: dict[str, Any]) -> None:
    """A failure with a log keeps it; another node's, rank's,
    incarnation's or agent's failure gets none.
    """
    roster = (make_presence(log_tails=(model.LogTail(3, "epoch 2"),)),)
    job = _job(make_error(**{"rank": 3, "group_rank": 0, **other}), roster=roster)
    assert [failure.log_tail for failure in job.failures] == [other.get("log_tail", "")]


# --- one worker, heard while its exception was in flight ------------------------------------------

_FIRST = model.ExceptionInfo("KeyError", "'label'")
_RAISED_AGAIN = model.ExceptionInfo("KeyError", "'label'", notes=("with all its frames",))
_CLEAN_UP = model.ExceptionInfo("RuntimeError", "the clean-up failed")
_RAISED_FROM = model.ExceptionInfo(
    "ValueError", "bad sample", causes=(replace(_FIRST, relation="cause"),)
)


def make_report(
    exception: model.ExceptionInfo | None,
    at_ms: float,
    *,
    in_flight: bool = False,
    **fields: Any,
) -> model.WorkerError:
    message = exception.message if exception is not None else ""
    return make_error(
        3,
        at_ms=at_ms,
        exception=exception,
        message=message,
        in_flight=in_flight,
        **fields,
    )


@pytest.mark.parametrize(
    ("final", "exception"),
    [
        (_RAISED_AGAIN, _RAISED_AGAIN),
        (_RAISED_FROM, _RAISED_FROM),
        (_CLEAN_UP, _FIRST),
        (None, _FIRST),
    ],
    ids=["the same", "raised from it", "of the clean-up", "none"],
)
@pytest.mark.parametrize("final_ms", [-5, 9])
def test_the_final_exception_replaces_only_its_own_one_in_flight(
    final: model.ExceptionInfo | None, exception: model.ExceptionInfo, final_ms: float
) -> None:
    """The final exception replaces the first one only if it is the same or was raised from it."""
    (failure,) = _job(make_report(final, final_ms), make_report(_FIRST, 0, in_flight=True)).failures
    assert (failure.exception, failure.message) == (exception, exception.message)
    assert failure.timestamp_ns == START_NS + min(final_ms, 0) * 1_000_000
    assert (failure.in_flight, len(failure.documents)) == (False, 2)


def test_the_clocks_of_a_merged_failure_belong_together() -> None:
    """With the earlier time come its monotonic time, its boot and the delay of its upload."""
    early = {"monotonic_ns": 1, "boot_id": "b", "upload_delay_ns": 2}
    late = {"monotonic_ns": 8, "boot_id": "b", "upload_delay_ns": 9}
    (failure,) = _job(
        make_report(_RAISED_AGAIN, 9, **late), make_report(_FIRST, 0, in_flight=True, **early)
    ).failures
    assert failure.exception == _RAISED_AGAIN
    assert {name: getattr(failure, name) for name in early} == early


def test_without_a_final_document_the_first_exception_in_flight_counts() -> None:
    """Without a final document of the worker it is still in flight; of several the first counts,
    from its last one.
    """
    (failure,) = _job(
        make_report(_FIRST, 5, in_flight=True), make_error(3, at_ms=0, **_KILLED)
    ).failures
    assert (failure.exception, failure.in_flight, failure.exit_code) == (_FIRST, True, -9)
    assert failure.timestamp_ns == START_NS + 5_000_000
    (failure,) = _job(
        make_report(_CLEAN_UP, 2, in_flight=True),
        make_report(_RAISED_FROM, 1, in_flight=True),
        make_report(_FIRST, 0, in_flight=True),
    ).failures
    assert (failure.exception, failure.in_flight, failure.timestamp_ns) == (
        _RAISED_FROM,
        True,
        START_NS,
    )


@pytest.mark.parametrize(("pid", "at_ms"), [(7, 0), (0, 0), (8, 9)])
def test_only_the_same_process_was_in_flight(pid: int, at_ms: float) -> None:
    """A time in flight counts only if both documents are from the same process."""
    (failure,) = _job(
        make_report(_RAISED_AGAIN, 9, pid=7), make_report(_FIRST, 0, pid=pid, in_flight=True)
    ).failures
    assert failure.exception == _RAISED_AGAIN
    assert failure.timestamp_ns == START_NS + at_ms * 1_000_000


# --- documents that were taken back ---------------------------------------------------------------

_HANDLED = "e1-handled.pb"
_WITHDRAWN = model.Receipt(_HANDLED, durable=True, rank=3, withdrawn=True)


def _handled(**fields: Any) -> model.WorkerError:
    fields = {
        "node": "a",
        "group_rank": 0,
        "in_flight": True,
        "documents": (model.DocumentRef(_HANDLED),),
        **fields,
    }
    return make_error(3, **fields)


@pytest.mark.parametrize("phase", model.Phase)
@pytest.mark.parametrize("judged", [1, 2])
def test_a_withdrawn_document_is_no_failure_and_no_history(phase: model.Phase, judged: int) -> None:
    """A withdrawn document of the last round or an earlier one is no failure, no history,
    and not counted.
    """
    entries = (
        make_presence(phase, node="a", round=1, receipts=(_WITHDRAWN,)),
        make_presence(model.Phase.FAILED, node="a", round=judged),
    )
    job = _job(_handled(round=1), roster=entries)
    assert (job.failures, job.history, job.document_count, job.digest) == (
        (),
        (),
        0,
        compute_digest([]),
    )
    assert len(job.handled) == (judged == 1)
    assert (job.coverage.complete, job.coverage.notes) == (True, ())


@pytest.mark.parametrize(
    "place", [{"round": 0}, {"incarnation": 6}, {"node": "b", "group_rank": 1}, {"group_rank": 1}]
)
@pytest.mark.parametrize("read", [True, False])
def test_an_entry_withdraws_no_document_of_others(place: dict[str, Any], read: bool) -> None:
    """A receipt of another node, round or incarnation withdraws nothing:
    neither a failure nor an unreadable file.
    """
    own = {"node": "a", "group_rank": 0, "round": 1, "incarnation": 5}
    document = make_error(3, **own)
    name = document.documents[0].name
    taken_back = model.Receipt(name, durable=True, withdrawn=True)
    entries = (
        make_presence(model.Phase.FAILED, **own, receipts=(model.Receipt(name, durable=True),)),
        make_presence(model.Phase.FAILED, **{**own, **place}, receipts=(taken_back,)),
    )
    documents, unreadable = ((document,), ()) if read else ((), (Unreadable(name, "empty"),))
    job = _job(*documents, roster=entries, unreadable=unreadable)
    assert (len(job.failures) + len(job.history), job.coverage.unreadable) == (
        (1, 0) if read else (0, 1)
    )
    own_entry = make_presence(model.Phase.FAILED, **own, receipts=(taken_back,))
    job = _job(*documents, roster=(own_entry,), unreadable=unreadable)
    assert (job.failures, job.coverage.unreadable, job.coverage.complete) == ((), 0, True)


@pytest.mark.parametrize(
    "receipts",
    [
        (_WITHDRAWN,),
        (replace(_WITHDRAWN, durable=False, error="refused"),),
        (model.Receipt(_HANDLED, durable=False, error="late"), _WITHDRAWN),
        (model.Receipt(_HANDLED, durable=True), _WITHDRAWN),
    ],
)
@pytest.mark.parametrize("unreadable", [(), (Unreadable(_HANDLED, "empty"),)])
def test_a_withdrawn_document_is_not_missed(
    receipts: tuple[model.Receipt, ...], unreadable: tuple[Unreadable, ...]
) -> None:
    """A withdrawn document never makes the coverage incomplete."""
    job = _job(
        roster=(make_presence(model.Phase.SUCCEEDED, node="a", receipts=receipts),),
        unreadable=unreadable,
    )
    assert (job.coverage.complete, job.coverage.notes, job.coverage.unreadable) == (True, (), 0)
    assert job.roster[0].receipts == receipts


_ENTRY = {"node": "a", "group_rank": 0, "round": 1, "incarnation": 2}


@pytest.mark.parametrize(
    ("phase", "place", "document", "counts"),
    [
        (model.Phase.SUCCEEDED, {}, {}, False),
        (model.Phase.SUCCEEDED, {}, {"in_flight": False}, True),
        (model.Phase.FAILED, {}, {}, True),
        (model.Phase.JOINED, {}, {}, True),
        (model.Phase.SUCCEEDED, {"node": "b"}, {}, True),
        (model.Phase.SUCCEEDED, {"group_rank": 1}, {}, True),
        (model.Phase.SUCCEEDED, {"round": 0}, {}, True),
        (model.Phase.SUCCEEDED, {"incarnation": 1}, {}, True),
    ],
)
def test_an_exception_in_flight_of_a_succeeded_node_was_handled(
    phase: model.Phase,
    place: dict[str, Any],
    document: dict[str, Any],
    counts: bool,
) -> None:
    """An exception in flight was handled if its node succeeded in the same
    round and incarnation.
    """
    entry = make_presence(
        phase, **{**_ENTRY, **place}, receipts=(model.Receipt(_HANDLED, durable=True),)
    )
    job = _job(_handled(**{**_ENTRY, **document}), roster=(entry,))
    assert bool(job.failures) is counts
    assert not any("it is not there" in note for note in job.coverage.notes)


_OF_A_NODE = (model.Writer.AGENT, model.Writer.RECORDER)
_AGENT = {"subject": model.Subject.AGENT, "writer": model.Writer.AGENT}


@pytest.mark.parametrize(
    ("documents", "count"),
    [
        ([{"rank": 3, "node": "a"}, {"rank": 3, "node": "b"}], 2),
        (
            [
                {"pid": pid, "writer": writer}
                for pid in (7, 8)
                for writer in (model.Writer.WORKER, model.Writer.AGENT)
            ],
            2,
        ),
        (
            [
                {**_AGENT, "group_rank": 0},
                {"rank": 0, "group_rank": 0},
                {"rank": 0, "group_rank": 0, **_KILLED},
            ],
            2,
        ),
        ([{**_AGENT, "node": "", "worker": "", "group_rank": rank} for rank in (0, 0, 1)], 2),
        (
            [
                {"rank": 3},
                {"rank": 3, "round": 1},
                {"rank": 3, "round": 1, "incarnation": 2},
                {"round": 2},
            ],
            4,
        ),
        ([{"writer": model.Writer.STOCK, "exception": None}] * 3, 3),
        (
            [
                {**_AGENT, "group_rank": 0, "pid": pid, "writer": who}
                for pid, who in enumerate(_OF_A_NODE, 7)
            ],
            1,
        ),
    ],
    ids=[
        *(
            "nodes with one rank",
            "pids",
            "an agent and its worker",
            "agents without a name",
            "rounds",
            "stock files",
        ),
        "an agent and its recorder",
    ],
)
def test_documents_about_one_process_are_one_failure(
    documents: list[dict[str, Any]], count: int
) -> None:
    """Documents about one process, or one agent, of one round and incarnation are one failure."""
    job = _job(*(make_error(**{"rank": None, **fields}) for fields in documents))
    assert len(job.failures) + len(job.history) == count


def test_failures_are_sorted_by_time_and_the_roster_by_rank() -> None:
    """Failures come by time, at the same time by rank, and without a time last;
    the judged round's roster by rank.
    """
    entries = (
        make_presence(model.Phase.JOINED, node="b", group_rank=1, round=1),
        make_presence(model.Phase.JOINED, node="a", group_rank=0, round=1),
        make_presence(model.Phase.FAILED, node="a", group_rank=0, round=0),
    )
    assert _job(roster=entries).roster == (entries[1], entries[0])
    documents = (
        make_error(0, at_ms=None, message="untimed"),
        make_error(9, at_ms=5, message="tie 9"),
        make_error(2, at_ms=5, message="tie 2"),
        make_error(None, at_ms=5, message="tie without"),
        make_error(7, at_ms=1, message="first"),
    )
    assert get_messages(_job(*documents).failures) == [
        "first",
        "tie 2",
        "tie 9",
        "tie without",
        "untimed",
    ]


# --- no order of reading matters ------------------------------------------------------------------

_DOCUMENTS = st.builds(
    make_error,
    rank=st.none() | st.integers(0, 2),
    node=st.sampled_from(["", "a", "b"]),
    at_ms=st.none() | st.integers(0, 2),
    exception=st.sampled_from([None, "ValueError", "KeyError"]),
    message=st.sampled_from(["x", "y"]),
    writer=st.sampled_from(model.Writer),
    subject=st.sampled_from(model.Subject),
    round=st.integers(0, 1),
    incarnation=st.integers(0, 1),
    group_rank=st.none() | st.integers(0, 1),
    exit_code=st.none() | st.integers(0, 1),
    pid=st.integers(0, 2),
    in_flight=st.booleans(),
    documents=st.sampled_from([(), (model.DocumentRef("withdrawn.pb"),)]),
)
_ENTRIES = st.builds(
    make_presence,
    st.sampled_from(model.Phase),
    node=st.sampled_from(["a", "b"]),
    group_rank=st.integers(0, 1),
    timestamp_ns=st.integers(0, 1),
    round=st.integers(0, 1),
    incarnation=st.integers(0, 1),
    receipts=st.sampled_from([(), (model.Receipt("withdrawn.pb", durable=True, withdrawn=True),)]),
)


_UNIQUE_NAMES = st.lists(
    _DOCUMENTS, max_size=8, unique_by=lambda document: document.documents[0].name
)


@settings(max_examples=50)
@given(_UNIQUE_NAMES, st.lists(_ENTRIES, max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_reading_does_not_matter(
    documents: list[model.WorkerError], entries: list[model.NodePresence], shuffler: random.Random
) -> None:
    """The job does not depend on the order of documents and roster entries."""
    unreadable = [Unreadable("b.pb", "empty"), Unreadable("a.pb", "refused")]
    expected = _job(*documents, roster=tuple(entries), unreadable=tuple(unreadable))
    for items in (documents, entries, unreadable):
        shuffler.shuffle(items)
    assert _job(*documents, roster=tuple(entries), unreadable=tuple(unreadable)) == expected


@given(st.lists(_DOCUMENTS, max_size=8))
def test_no_document_is_lost(documents: list[model.WorkerError]) -> None:
    """Every document is in exactly one failure, judged or history."""
    job = _job(*documents)
    names = [ref.name for failure in job.failures + job.history for ref in failure.documents]
    assert sorted(names) == sorted(ref.name for document in documents for ref in document.documents)
    assert job.document_count == sum(len(failure.documents) for failure in job.failures)


# --- the digest -----------------------------------------------------------------------------------


def test_the_digest_is_over_the_documents_names() -> None:
    """The digest depends on the documents' names, not on their order."""
    one = make_error(0)
    other = make_error(1)
    assert compute_digest([one, other]) == compute_digest([other, one])
    assert (
        len(
            {
                compute_digest([]),
                compute_digest([one]),
                compute_digest([other]),
                compute_digest([one, other]),
            }
        )
        == 4
    )


# --- coverage -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("documents", "told", "expected", "reported"),
    [
        ([], None, None, 0),
        ([{"group_world_size": 4}], None, 4, 1),
        ([{"group_world_size": 4}], 2, 2, 1),
        ([{}], 1, 1, 1),
        ([{"rank": 0, "node": "a"}, {"rank": 1, "node": "a"}], None, None, 1),
        (
            [
                {"node": node, "writer": model.Writer.STOCK, "exception": None}
                for node in ("", "", "a", "a")
            ],
            None,
            None,
            3,
        ),
        (
            [{"rank": rank, "node": "", "worker": "", "group_rank": rank} for rank in range(3)],
            None,
            None,
            3,
        ),
    ],
)
def test_nodes_are_counted_by_name_else_by_group_rank(
    documents: list[dict[str, Any]],
    told: int | None,
    expected: int,
    reported: int,
) -> None:
    """Nodes are counted by name, else by group rank;
    a nameless file of Flyte's own counts for itself.
    """
    coverage = _job(
        *(make_error(**{"rank": None, **fields}) for fields in documents), expected_nodes=told
    ).coverage
    assert (coverage.expected, coverage.reported, coverage.complete) == (
        expected,
        reported,
        expected == reported,
    )


@pytest.mark.parametrize(
    ("phase", "reported"), [(model.Phase.SUCCEEDED, 2), (model.Phase.JOINED, 1)]
)
def test_coverage_is_complete_with_a_final_entry_of_every_node(
    phase: model.Phase, reported: int
) -> None:
    """The coverage is complete with a final entry of every node;
    one that joined and sent nothing is named.
    """
    roster = (
        make_presence(node="a", nodes=2),
        make_presence(phase, node="b", group_rank=1, nodes=2),
    )
    coverage = _job(make_error(0, node="a", group_rank=0), roster=roster).coverage
    assert (coverage.expected, coverage.reported, coverage.complete) == (2, reported, reported == 2)
    assert coverage.notes == (() if reported == 2 else ("took part but sent no report: b",))
    entries = tuple(
        make_presence(model.Phase.JOINED, node=f"n{n:03}", group_rank=n, nodes=200)
        for n in range(200)
    )
    (note,) = _job(roster=entries).coverage.notes
    assert note == "took part but sent no report: n000, n001, n002, n003, n004 and others"


def test_many_unreadable_documents_are_counted_and_some_named() -> None:
    """All unreadable documents are counted; five are named with their reasons."""
    unreadable = tuple(Unreadable(f"{number}.pb", "empty") for number in range(9))
    coverage = _job(make_error(), unreadable=unreadable).coverage
    assert coverage.unreadable == 9
    assert coverage.notes[0] == "not readable: 0.pb: empty"
    assert coverage.notes[5:] == ("4 more documents are not readable",)


@pytest.mark.parametrize("stored_at", [START_NS, None])
def test_a_stored_document_is_not_missed_whatever_its_receipt(stored_at: int | None) -> None:
    """A document that the storage has is not missed, whatever its receipt says;
    one that was handed over is.
    """
    reference = model.DocumentRef("e1-late.pb", last_modified_ns=stored_at)
    receipt = model.Receipt(
        "e1-late.pb",
        durable=False,
        error="the storage did not answer within 5.0 s",
        rank=0,
    )
    roster = (make_presence(ranks=(0,), receipts=(receipt,)),)
    coverage = _job(make_error(group_rank=0, documents=(reference,)), roster=roster).coverage
    assert coverage.complete is (stored_at is not None)
    assert any("was not uploaded" in note for note in coverage.notes) is (stored_at is None)


@pytest.mark.parametrize(
    ("receipt", "snapshot", "note"),
    [
        ({}, {}, "worker-0 reported the upload of e1.pb, but the document is missing"),
        ({}, {"unreadable": (Unreadable("e1.pb", "empty"),)}, "not readable: e1.pb: empty"),
        (
            {"durable": False, "error": "no", "rank": 3},
            {},
            "the document of rank 3 on worker-0 was not uploaded: no",
        ),
    ],
)
def test_a_missed_document_makes_the_coverage_incomplete(
    receipt: dict[str, Any], snapshot: dict[str, Any], note: str
) -> None:
    """A document that was not uploaded, or has gone, makes the coverage incomplete."""
    entry = make_presence(
        receipts=(model.Receipt(**{"name": "e1.pb", "durable": True, **receipt}),)
    )
    coverage = _job(make_error(), roster=(entry,), **snapshot).coverage
    assert (coverage.complete, coverage.notes) == (False, (note,))


# --- waiting --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phases", "expected_nodes", "done"),
    [
        ([], None, False),
        ([], 2, False),
        ([model.Phase.FAILED, model.Phase.SUCCEEDED], None, True),
        ([model.Phase.FAILED, model.Phase.JOINED], None, False),
        ([model.Phase.FAILED], None, False),
        ([model.Phase.FAILED], 1, True),
        ([model.Phase.FAILED, model.Phase.FAILED], 3, False),
    ],
)
def test_all_nodes_are_done_with_a_final_entry_of_the_last_round(
    phases: list[model.Phase], expected_nodes: int | None, done: bool
) -> None:
    """All nodes are done if as many as take part have a final entry of the last round;
    each counts once.
    """
    entries = [
        make_presence(phase, node=f"n{n}", group_rank=n, nodes=2, incarnation=1)
        for n, phase in enumerate(phases)
    ]
    assert nodes_done(entries * 2, expected_nodes) is done
    assert not nodes_done([*entries, make_presence(model.Phase.JOINED, round=1)], expected_nodes)
    again = make_presence(model.Phase.JOINED, node="n0", group_rank=0, nodes=2, incarnation=9)
    assert not nodes_done([*entries, again], expected_nodes), "it was restarted in place"


@pytest.mark.parametrize(
    ("failures", "roster", "live"),
    [
        ([make_error(0)], [make_presence(nodes=1)], True),
        ([make_error(0)], [make_presence(model.Phase.JOINED, nodes=1)], False),
        (
            [make_error(None, subject=model.Subject.AGENT, category="platform")],
            [make_presence(nodes=1)],
            True,
        ),
        (
            [make_error(None, subject=model.Subject.AGENT, category="node_lost")],
            [make_presence(nodes=1)],
            False,
        ),
        ([make_error(0)], [], True),
    ],
    ids=["done", "silent", "its agent failed", "its agent is gone", "an empty roster"],
)
def test_a_node_without_a_final_entry_counts_as_a_lost_pod(
    failures: list[model.WorkerError], roster: list[model.NodePresence], live: bool
) -> None:
    """A node without a final entry, or with a lost agent, counts as a lost pod."""
    assert pods_live(_job(*failures, roster=tuple(roster))) is live
