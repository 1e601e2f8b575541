"""Whole attempts of hostile documents, read, judged and drawn in every form."""

import time
from collections.abc import Callable, Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firstfault.conclude import Conclusion, conclude
from firstfault.layout import error_key_for, roster_key_for
from firstfault.model import (
    CausedBy,
    NodePresence,
    Phase,
    Receipt,
    SentSignal,
    StackDump,
    WorkerError,
    Writer,
)
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.reading.assemble import find_judged_round
from firstfault.report import Report, build_report
from firstfault.testing import make_error, make_job, make_presence
from firstfault.wire.documents import encode, encode_presence
from firstfault_proto.v1 import errors_pb2 as pb
from tests.all_forms import FORMS
from tests.readers.any_failure import failures_and_entries

_YEAR_9999 = 253_402_300_799


_TEXT = st.text(max_size=20) | st.sampled_from(
    [
        *(
            "",
            "\x00",
            "\r",
            "a\rb",
            "\u202eabc",
            "\ud800",
            "\x1b[31m",
            "a\nretry: yes",
            "\u2028",
            "\U0001f525" * 40,
        ),
        *(
            "x" * 3_000,
            "w-0",
            "w-1",
            "boom",
            "Connection closed by peer",
            "SIGKILL",
            "SIGTERM",
            "hang",
            "node_lost",
        ),
    ]
)
_NUMBER = st.sampled_from([0, 0, 0, 1, 2, 3, 99, 2**31, 2**32 - 1])
_FAILURES, _ENTRIES = failures_and_entries(_TEXT, _NUMBER)


def _files(failures: list[WorkerError], entries: list[NodePresence]) -> list[tuple[str, bytes]]:
    files = [
        (f"firstfault/errors/{error_key_for(failure)}", encode(failure)) for failure in failures
    ]
    return files + [
        (f"firstfault/roster/{roster_key_for(entry)}", encode_presence(entry)) for entry in entries
    ]


def _read(
    files: list[tuple[str, bytes]], forms: Mapping[str, Callable[[Report], str]] = FORMS
) -> Conclusion | None:
    """Return what a reader concludes, after it was drawn; None:
    the job recovered in a later round.
    """
    reader = MultiErrorFileOutputReader("memory://nowhere", copies=dict(files))
    conclusion = reader.conclude_from(reader.read_copies("only copies were read"))
    if conclusion is not None:
        report = reader.report(conclusion)
        for draw in forms.values():
            assert 0 < len(draw(report)) < 5_000_000
    return conclusion


def _concluded(
    files: list[tuple[str, bytes]], forms: Mapping[str, Callable[[Report], str]] = FORMS
) -> Conclusion:
    conclusion = _read(files, forms)
    assert conclusion is not None, "an attempt with a document has failed"
    return conclusion


_SLOW = settings(
    max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@pytest.mark.slow
@_SLOW
@given(st.lists(_FAILURES, min_size=1, max_size=4), st.lists(_ENTRIES, max_size=2))
def test_no_attempt_makes_a_reader_raise(
    failures: list[WorkerError], entries: list[NodePresence]
) -> None:
    """Ranks beyond the world, times of any year and texts of any kind are drawn in every form."""
    _read(_files(failures, entries))


@pytest.mark.parametrize("with_roster", [False, True])
def test_an_attempt_with_a_document_cut_at_any_byte_has_failed(with_roster: bool) -> None:
    """Whatever is left of its only document:
    an attempt that failed is never one without an error.
    """
    failure = make_error(3, node="w-1", exit_code=1, log_tail="step")
    data = encode(failure)
    path = f"firstfault/errors/{error_key_for(failure)}"
    entry = make_presence(Phase.FAILED, node="w-1", nodes=1, ranks=(3,))
    others = _files([], [entry]) if with_roster else []
    for length in range(len(data) + 1):
        job = _concluded([(path, data[:length]), *others], {}).job
        assert job.failures or job.coverage.unreadable


@pytest.mark.parametrize(
    "seconds", [-62_135_596_800, -1, 0, 1, _YEAR_9999, _YEAR_9999 + 1, -(2**63), 2**63 - 1]
)
@pytest.mark.parametrize("nanos", [0, -1, 2**31 - 1])
def test_times_of_any_year_are_drawn(seconds: int, nanos: int) -> None:
    """The years 1 and 9999, and times that no calendar has, are drawn;
    times of a calendar are kept.
    """
    document = pb.WorkerErrorDocument()
    document.error.code, document.error.message = "USER", "boom"
    document.error.timestamp.seconds, document.error.timestamp.nanos = seconds, nanos
    other = _files([make_error(1, node="w-1")], [])
    conclusion = _concluded([("error.pb", document.SerializeToString()), *other])
    times = {failure.timestamp_ns for failure in conclusion.job.failures}
    assert (seconds * 10**9 in times) is (nanos == 0 and 0 < seconds <= _YEAR_9999)


@pytest.mark.parametrize(
    "text",
    [
        "[PG ID 0 PG GUID 0(x) Rank 1] at work: 9, last enqueued work: 9, last completed work: 9",
        "WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=9) ran for 9 milliseconds before timing out.",
        'Current thread 0x9 (most recent call first):\n  File "a.py", line 9 in f\n',
        "Tried to allocate 9 GiB. watchdog got stuck for 9 seconds",
    ],
    ids=["counts", "work", "stack", "amounts"],
)
def test_a_number_of_thousands_of_digits_is_ignored(text: str) -> None:
    """It has more digits than Python takes for a number, so it is none:
    the attempt is judged and drawn.
    """
    text = text.replace("9", "9" * 5_000)
    dead = {"exception": None, "signal": "SIGABRT", "exit_code": -6, "writer": Writer.AGENT}
    stack = StackDump(7, 1, text)
    errors = [
        make_error(0),
        make_error(1, node="w-1", log_tail=text, message=text, stack_dumps=(stack,), **dead),
    ]
    _concluded(_files(errors, []))


@pytest.mark.parametrize("function", ["f", "f{}"])
def test_ten_thousand_frames_are_drawn_in_every_form(function: str) -> None:
    """A document with 10,000 frames, and one with 10,000 equal frames of a recursion,
    are drawn in every form.
    """
    document = pb.WorkerErrorDocument()
    document.error.code = "USER"
    exception = document.failure.exception
    exception.type = "RecursionError"
    for number in range(10_000):
        exception.frames.add(
            file="/job/train.py",
            line=7,
            function=function.format(number),
            code="f()",
        )
    _concluded([("firstfault/errors/x.pb", document.SerializeToString())])


_SHAPES = (
    *(
        " \n",
        ": ",
        "\x1b[1",
        "/a",
        "USER:X: error=",
        "\nMessage:",
        "https://a:b",
        "terminated by SIG",
        "a-1-worker-",
    ),
    *(
        "0x1f ",
        '  File "/job/a.py", line 1, in f\n    x\n',
        "Thread 0x1 (most recent call first):\n",
    ),
    *("[PG ID 1 PG GUID 1 ", "WorkNCCL(SeqNum=3, OpType=", "work: 3, ", "  File \n"),
    "[PG ID 1 PG GUID 1 Rank 0] work: 3, last enqueued work: 4, last completed work: ",
    "\nDuring handling of the above exception, another exception occurred:\n\n",
    (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call"
        " last):\n"
    ),
)
"""Beginnings of what the reader's own patterns look for, repeated."""
_LONGEST_TEXT = 30_000
_SOON_S = 2
"""Of this thread; a thirtieth of a second is expected."""


def _classify_text(part: str, text: str) -> WorkerError:
    if part == "log":
        return make_error(3, exception=None, exit_code=1, message="", log_tail=text)
    if part == "stack":
        sent = (SentSignal("SIGTERM", text[:100]),)
        dumps = (StackDump(9, 3, text),)
        return make_error(
            3,
            exception=None,
            signal="SIGTERM",
            message="",
            pid=9,
            sent_signals=sent,
            stack_dumps=dumps,
        )
    return make_error(3, exception=None if part == "message" else "ValueError", message=text)


def _seconds(part: str, text: str) -> float:
    job = make_job(
        _classify_text(part, text), make_error(1, at_ms=50, message="Connection closed by peer")
    )
    began = time.thread_time()
    found = conclude(job)
    report = build_report(job, found.verdict, found.decision, diagnosis=found.diagnosis)
    for form in ("message", "plain -v", "markdown", "json"):
        FORMS[form](report)
    return time.thread_time() - began


@pytest.mark.slow
@pytest.mark.parametrize("part", ["message", "exception", "log", "stack"])
def test_time_is_linear_in_a_text(part: str) -> None:
    """Whatever a text repeats, it is judged and drawn at once:
    in quadratic time it would take ten seconds and more.
    """
    for shape in _SHAPES:
        assert _seconds(part, shape * (_LONGEST_TEXT // len(shape))) < _SOON_S, shape


def test_time_is_linear_in_documents_without_a_group_rank() -> None:
    """Documents of 10,000 nodes without group ranks are sorted into rounds at once."""
    documents = [
        make_error(0, node=f"w-{number}", incarnation=number + 1) for number in range(10_000)
    ]
    began = time.thread_time()
    judged = find_judged_round((), documents, ())
    assert all(map(judged.has, documents))
    assert time.thread_time() - began < 1


def test_time_is_linear_in_documents() -> None:
    """An attempt is judged at once in which thousands were stopped while they raised,
    and thousands timed out later.
    """
    sent = (SentSignal("SIGTERM", "because another rank failed"),)
    raised = [
        make_error(
            rank,
            node=f"w-{rank}",
            in_flight=True,
            sent_signals=sent,
            caused_by=CausedBy(rank + 1, "w-0", ""),
        )
        for rank in range(2_000)
    ]
    timeout = "Timed out waiting 60000ms for recv operation to complete"
    waits = [
        make_error(rank, at_ms=90_000_000, node=f"w-{rank}", message=timeout)
        for rank in range(2_000, 4_000)
    ]
    began = time.thread_time()
    assert conclude(make_job(*raised, *waits)) is not None
    assert time.thread_time() - began < 15


@pytest.mark.parametrize(
    "text", ["Connection closed by peer", "Timed out waiting 60000ms for recv operation"]
)
def test_time_is_linear_in_faults(text: str) -> None:
    """A verdict on 8,000 victims takes a second, also if each claims a fault of its own."""
    victims = (
        make_error(
            rank,
            node=f"w-{rank}",
            exception="RuntimeError",
            message=text,
            fingerprint=f"1:{rank:012x}",
        )
        for rank in range(8_000)
    )
    job = make_job(make_error(8_000), *victims)
    began = time.thread_time()
    assert conclude(job) is not None
    assert time.thread_time() - began < 4


@pytest.mark.parametrize(
    "message",
    ["boom", "CUDA error: an illegal memory access was encountered", "No space left on device"],
)
def test_a_failure_its_agent_did_not_list_has_medium_confidence_at_most(message: str) -> None:
    """A worker that writes a document for another pod's rank blames it with medium confidence
    at most, and it shows.
    """
    place = {"node": "w-1", "group_rank": 1, "group_world_size": 2}
    ended = {
        "exception": None,
        "signal": "SIGTERM",
        "sent_signals": (SentSignal("SIGTERM", "stop"),),
    }
    stopped = [make_error(rank, at_ms=900, **ended, **place) for rank in (2, 3)]
    forged = make_error(3, at_ms=500, exception="RuntimeError", message=message, **place)
    other = make_presence(node="w-0", nodes=2, ranks=(0, 1))
    for listed, confidence in ((stopped, "medium"), ([*stopped, forged], "high")):
        receipts = tuple(Receipt(item.documents[0].name, durable=True) for item in listed)
        own = make_presence(node="w-1", group_rank=1, nodes=2, ranks=(2, 3), receipts=receipts)
        conclusion = conclude(make_job(*stopped, forged, roster=(other, own)))
        verdict = conclusion.verdict
        assert (verdict.ranks, verdict.confidence) == ((3,), confidence)
        assert any("its node didn't list this failure" in reason for reason in verdict.why) is (
            confidence == "medium"
        )
