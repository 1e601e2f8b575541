"""How much of each part a writer stores and a reader takes. Files with hostile sizes are in test_hostile_files.py."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from firstfault import model
from firstfault.errors import BadDocumentError
from firstfault.model import CollectiveProgress, DocumentRef, ExceptionInfo, FrameInfo, WorkerError
from firstfault.reading import fetch
from firstfault.testing import make_error, make_presence
from firstfault.wire.documents import decode, decode_presence, encode, encode_presence
from firstfault.wire.forms import MAX_READ_LINE
from firstfault.wire.json_schemas import MAX_RESTART_BYTES, restart_to_json
from firstfault_proto.v1 import errors_pb2 as pb
from tests.seals import RECORD

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Attempt

_LONG = "x" * 1_000_000
_MANY = [pb.ExceptionRecord()] * 5_000
_FRAME = FrameInfo("t.py", 7, "f", "x", ("line",) * 50, 5)


def _raised(**fields: Any) -> WorkerError:
    return make_error(exception=ExceptionInfo("E", "boom", **fields))


@pytest.mark.parametrize(
    ("written", "size", "cap"),
    [
        (make_error(message=_LONG), lambda read: len(read.message), 64 * 1024),
        (make_error(code=_LONG), lambda read: len(read.code), 500),
        (make_error(node=_LONG), lambda read: len(read.place.node), 500),
        (make_error(log_tail=_LONG), lambda read: len(read.log_tail), 32 * 1024),
        (make_error(message=_LONG), lambda read: len(read.exception.message), 16 * 1024),
        (_raised(frames=(_FRAME,) * 10_000), lambda read: len(read.exception.frames), 100),
        (_raised(frames=(_FRAME,)), lambda read: len(read.exception.frames[0].context), 5),
        (_raised(text_frames=(_FRAME,) * 999), lambda read: len(read.exception.text_frames), 100),
        (_raised(bases=("B",) * 999), lambda read: len(read.exception.bases), 50),
        (_raised(notes=("n",) * 999), lambda read: len(read.exception.notes), 50),
        (_raised(notes=(_LONG,)), lambda read: len(read.exception.notes[0]), 16 * 1024),
        (_raised(causes=(ExceptionInfo("E", ""),) * 99), lambda read: len(read.exception.causes), 10),
        (_raised(members=(ExceptionInfo("E", ""),) * 99), lambda read: len(read.exception.members), 10),
        (
            make_error(thread_failures=(model.ThreadFailure("t", 1, ExceptionInfo("E", "")),) * 50),
            lambda read: len(read.thread_failures),
            10,
        ),
        (make_error(sent_signals=(model.SentSignal("S", "r"),) * 99), lambda read: len(read.sent_signals), 50),
        (make_error(versions=tuple((str(n), "1") for n in range(99))), lambda read: len(read.versions), 50),
        (make_error(collectives=(CollectiveProgress("g", "o", 1, 1),) * 99), lambda read: len(read.collectives), 50),
        (
            make_error(collectives=(CollectiveProgress("g", "o", 1, 1, members=(1,) * 20_000),)),
            lambda read: len(read.collectives[0].members),
            16_384,
        ),
        (
            make_error(collectives=(CollectiveProgress("g", "o", 1, 1, (model.Collective(1, "o"),) * 99),)),
            lambda read: len(read.collectives[0].last),
            10,
        ),
    ],
)
def test_a_document_keeps_so_much(written: WorkerError, size: Callable[[WorkerError], int], cap: int) -> None:
    """A writer stores exactly so much of what is too long."""
    read = decode(encode(written), DocumentRef("e1.pb"))
    assert isinstance(read, WorkerError)
    assert size(read) == cap


def _read(change: Callable[[pb.WorkerFailure], object]) -> WorkerError:
    """What is read of a document that no writer of ours would write."""
    document = pb.WorkerErrorDocument.FromString(encode(make_error()))
    change(document.failure)
    read = decode(document.SerializeToString(), DocumentRef("e1.pb"))
    assert isinstance(read, WorkerError)
    return read


def _nest(failure: pb.WorkerFailure) -> None:
    inner = failure.exception
    for _ in range(90):
        inner = inner.members.add(type="ExceptionGroup")


def _depth(exception: ExceptionInfo) -> int:
    return 1 + (_depth(exception.members[0]) if exception.members else 0)


@pytest.mark.parametrize(
    ("change", "size", "cap"),
    [
        (lambda it: it.exception.members.extend(_MANY), lambda read: len(read.exception.members), 1_999),
        (lambda it: it.exception.causes.extend(_MANY), lambda read: len(read.exception.causes), 1_999),
        (lambda it: setattr(it, "signal", "x" * 10_000), lambda read: len(read.signal), MAX_READ_LINE),
        (lambda it: it.sent_signals.extend([pb.SentSignal()] * 500), lambda read: len(read.sent_signals), 50),
        (_nest, lambda read: _depth(read.exception), 6),
        (lambda it: it.exception.frames.extend([pb.Frame()] * 3_000), lambda read: len(read.exception.frames), 1_000),
        (lambda it: it.exception.text_frames.extend([pb.Frame()] * 999), lambda e: len(e.exception.text_frames), 100),
        (lambda it: it.thread_failures.extend([pb.ThreadFailure()] * 500), lambda read: len(read.thread_failures), 100),
        (lambda it: it.stack_dumps.extend([pb.StackDump()] * 100_000), lambda read: len(read.stack_dumps), 64),
        (lambda it: it.collectives.extend([pb.CollectiveProgress()] * 999), lambda read: len(read.collectives), 50),
        (
            lambda it: it.collectives.add(last=[pb.Collective()] * 50_000),
            lambda read: len(read.collectives[0].last),
            10,
        ),
    ],
)
def test_a_reader_takes_so_much(
    change: Callable[[pb.WorkerFailure], None], size: Callable[[WorkerError], int], cap: int
) -> None:
    """A reader takes exactly so much of what no writer writes."""
    assert size(_read(change)) == cap


def test_what_a_reader_leaves_out_is_counted() -> None:
    """Exceptions and threads are counted in a note, the frames between both ends of a stack in a number."""
    assert _read(_nest).exception.members[0].members[0].notes == ()
    many = _read(lambda failure: failure.exception.members.extend(_MANY))
    assert many.exception.notes[-1].startswith("... 3001 more members left out")
    threads = _read(lambda failure: failure.thread_failures.extend([pb.ThreadFailure()] * 500))
    assert threads.thread_failures[-1].exception.notes[-1].startswith("... 400 more failed threads left out")
    deep = _read(lambda failure: failure.exception.frames.extend(pb.Frame(line=line) for line in range(1, 3_000)))
    assert [frame.line for frame in deep.exception.frames] == [7, *range(1, 500), *range(2_500, 3_000)]
    assert deep.exception.frames_omitted == 2_000


def test_a_roster_entry_keeps_so_much() -> None:
    """A roster entry has the ends of eight logs, 2 KiB each, and short lines."""
    logs = tuple(model.LogTail(rank, f"{rank} {_LONG}") for rank in range(20))
    entry = make_presence(first_failure_reason=_LONG, log_tails=logs, setup=model.NodeSetup(task=_LONG, gpus=8))
    read = decode_presence(encode_presence(entry), "r1.pb")
    assert [len(tail.text) for tail in read.log_tails] == [2 * 1024] * 8
    assert (len(read.first_failure_reason), len(read.setup.task)) == (500, 500)


def test_the_workers_of_a_roster_entry(attempt: Attempt) -> None:
    """An entry with more workers, or receipts, than a node has is refused, so that it costs a reader nothing."""
    as_many = make_presence(ranks=tuple(range(16_384)))
    assert decode_presence(encode_presence(as_many), "r1.pb") == as_many
    for entry in (
        make_presence(ranks=tuple(range(16_385))),
        make_presence(receipts=(model.Receipt("e1.pb", durable=True),) * 16_385),
    ):
        with pytest.raises(
            BadDocumentError, match=r"^r1\.pb is not a roster entry: it lists 16,385 workers of one node"
        ):
            decode_presence(encode_presence(entry), "r1.pb")
    attempt.write(make_error(0))
    attempt.join(make_presence(ranks=tuple(range(16_385))))
    job = attempt.reader().job()
    assert len(job.failures) == 1
    assert any("16,385 workers" in note for note in job.coverage.notes)


def test_records_of_restarts_that_are_read(attempt: Attempt) -> None:
    """A record of more than 64 KiB is left out, and of very many the last 64 by name are read."""
    for number in range(100):
        name = f"firstfault/roster/decision-round-{number:05d}-0000000.json"
        attempt.put(name, restart_to_json(replace(RECORD, number=number)))
    large = restart_to_json(replace(RECORD, number=99)) + b" " * MAX_RESTART_BYTES
    attempt.put("firstfault/roster/decision-round-00099-0000000.json", large)
    assert [record.number for record in attempt.reader().restarts()] == list(range(36, 99))


def test_how_large_a_bundle_may_be(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger bundle of copies is not downloaded, and every document is read by itself."""
    attempt.write(*(make_error(rank) for rank in range(9)))
    attempt.put(f"firstfault/roster/copies-{0:064x}.bundle", b"x" * 100)
    monkeypatch.setattr(fetch, "_MAX_BUNDLE_BYTES", 99)
    monkeypatch.setattr(fetch, "bundle_name", lambda _: pytest.fail("it was downloaded"))
    assert len(attempt.reader().job().failures) == 9
