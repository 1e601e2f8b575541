"""Documents and roster entries, to and from bytes, and how much of each part is kept."""

import contextlib
import string
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.execution_pb2 import ExecutionError
from hypothesis import given, settings
from hypothesis import strategies as st

from firstfault import model
from firstfault.errors import BadDocumentError
from firstfault.model import (
    CollectiveProgress,
    ExceptionInfo,
    FrameInfo,
    NodePresence,
    Place,
    Seal,
    StackDump,
    WorkerError,
)
from firstfault.reading import fetch
from firstfault.testing import START_NS, make_error, make_presence
from firstfault.wire.codecs import MAX_LINE_CHARACTERS_READ
from firstfault.wire.documents import (
    MAX_DOCUMENT_BYTES,
    decode,
    decode_presence,
    encode,
    encode_presence,
    encode_seal,
)
from firstfault.wire.json_schemas import MAX_RESTART_BYTES, restart_to_json
from firstfault_proto.v1 import errors_pb2 as pb
from tests.readers.any_failure import failures_and_entries
from tests.readers.conftest import Attempt
from tests.reports.every_field import filled
from tests.seals import RECORD

_REF = model.DocumentRef("e1-document.pb", "s3://bucket/e1-document.pb", 17, 400)
_NANO = 1_000_000_000

# without what looks like a secret: redaction has tests of its own
_TEXT = st.text(
    st.sampled_from(string.ascii_letters + " .,'()[]\n\t\u00e9\u2192\U0001f525"), max_size=40
)
_ERRORS, _PRESENCES = failures_and_entries(_TEXT, st.integers(0, 2**32 - 1))


# --- round trips ----------------------------------------------------------------------------------


@settings(max_examples=50)
@given(_ERRORS)
def test_every_field_of_a_failure_survives_the_round_trip(error: WorkerError) -> None:
    """Every field survives the round trip, also through a program that knows
    only flyteidl's messages.
    """
    data = encode(error)
    assert decode(data, _REF) == replace(error, documents=(_REF,))
    flytes = ErrorDocument.FromString(data)
    assert decode(flytes.SerializeToString(), _REF) == replace(error, documents=(_REF,))
    read = flytes.error
    assert (read.code, read.message, read.worker) == (error.code, error.message, error.worker)
    assert ContainerError.Kind.Name(read.kind) == error.kind.value
    assert ExecutionError.ErrorKind.Name(read.origin) == error.origin.value
    assert read.HasField("timestamp") == (error.timestamp_ns is not None)
    assert read.timestamp.seconds * _NANO + read.timestamp.nanos == (error.timestamp_ns or 0)


@given(_PRESENCES)
def test_a_roster_entry_survives_the_round_trip(presence: NodePresence) -> None:
    """A roster entry survives the round trip."""
    local = presence.place.local_rank or 0
    if local + len(presence.ranks) < 2**32:
        assert decode_presence(encode_presence(presence), "r1.pb") == presence


_SEAL = replace(
    filled(Seal, "text"),
    name=_REF.name,
    code="USER",
    message="boom",
    kind=model.Kind.RECOVERABLE,
    origin=model.Origin.SYSTEM,
    fault_timestamp_ns=START_NS - 1,
    worker="worker-3",
)


_FULL_DATA = encode(filled(WorkerError, "text"))
_FULL_PRESENCE: NodePresence = filled(NodePresence, "text")


# --- Flyte's own message --------------------------------------------------------------------------


def test_flyte_reads_a_sealed_verdict() -> None:
    """A sealed verdict survives the round trip; parsed as flyteidl's ErrorDocument,
    it is what Flyte shows.
    """
    assert decode(encode_seal(_SEAL), _REF) == _SEAL
    read = ErrorDocument.FromString(encode_seal(_SEAL)).error
    assert (read.code, read.message, read.worker) == ("USER", "boom", "worker-3")
    assert (read.kind, read.origin) == (ContainerError.RECOVERABLE, ExecutionError.SYSTEM)
    assert read.timestamp.ToNanoseconds() == START_NS - 1


@pytest.mark.parametrize(
    ("origin", "expected"),
    [(ExecutionError.SYSTEM, model.Origin.SYSTEM), (7, model.Origin.UNKNOWN)],
)
def test_flytes_own_files_are_read_and_marked(origin: int, expected: model.Origin) -> None:
    """A file of Flyte's own is read with its code, message, kind, origin, time and worker,
    and marked as such.
    """
    error = ContainerError(
        code="red",
        message="hi",
        kind=ContainerError.RECOVERABLE,
        origin=origin,
        worker="worker-1",
    )
    error.timestamp.FromNanoseconds(START_NS + 7)
    read = decode(ErrorDocument(error=error).SerializeToString(), _REF)
    assert read == WorkerError(
        code="red",
        message="hi",
        kind=model.Kind.RECOVERABLE,
        origin=expected,
        timestamp_ns=START_NS + 7,
        worker="worker-1",
        place=Place(node="worker-1"),
        writer=model.Writer.STOCK,
        documents=(_REF,),
    )


@pytest.mark.parametrize(
    ("ours", "flytes", "read"), [(7, None, 7), (0, 9, 9), (7, 9, 7), (0, None, None)]
)
def test_firstfaults_time_overrides_flytes(ours: int, flytes: int | None, read: int | None) -> None:
    """The time of our own part of a document overrides Flyte's."""
    document = pb.WorkerErrorDocument(failure=pb.WorkerFailure(wall_time_ns=ours))
    document.error.code = "USER"
    if flytes is not None:
        document.error.timestamp.nanos = flytes
    assert decode(document.SerializeToString(), _REF).timestamp_ns == read


# --- hostile bytes --------------------------------------------------------------------------------


@given(st.binary(max_size=300), st.integers(0, 10_000), st.integers(0, 255))
def test_random_bytes_decode_or_raise_bad_document(data: bytes, position: int, value: int) -> None:
    """Arbitrary bytes, and a document with one changed byte, decode or raise BadDocumentError."""
    changed = bytearray(_FULL_DATA)
    changed[position % len(changed)] = value
    for each in (data, bytes(changed)):
        with contextlib.suppress(BadDocumentError):
            decode(each, _REF)
    with contextlib.suppress(BadDocumentError):
        decode_presence(data, "r1.pb")


@pytest.mark.parametrize("data", [b"", b"not protobuf", _FULL_DATA, b"\x10\x63"])
def test_a_bad_roster_entry_is_named_in_the_error(data: bytes) -> None:
    """Invalid bytes and an unknown phase raise an error with the entry's name."""
    with pytest.raises(BadDocumentError, match=r"r1-entry\.pb is not a roster entry"):
        decode_presence(data, "r1-entry.pb")


# --- what writers may not forget ------------------------------------------------------------------

_SECRET = "password=hunter22"  # noqa: S105 - the one that has to go


def test_secrets_are_redacted_in_every_field() -> None:
    """No credential is in a failure or a seal, nor in a roster entry,
    except for names of objects.
    """
    entry: NodePresence = filled(NodePresence, _SECRET)
    receipts = tuple(replace(receipt, name="e1.pb") for receipt in entry.receipts)
    entry = replace(entry, receipts=receipts)
    for data, count in ((encode(filled(WorkerError, _SECRET)), 30), (encode_presence(entry), 15)):
        assert b"hunter22" not in data
        assert data.count(b"password=***") > count
    assert b"hunter22" not in encode_seal(replace(_SEAL, message=_SECRET))
    # Flyte's entrypoint writes a message as it is; a reader never has its credentials
    error = ContainerError(code=_SECRET, message=f"{_SECRET} was refused", worker="worker-1")
    read = decode(ErrorDocument(error=error).SerializeToString(), _REF)
    assert (read.code, read.message) == ("password=***", "password=*** was refused")
    # what is redacted moves what is marked, so such a line has no mark
    code = "login(password='hunter2-and-more') + row['x']"
    frame = FrameInfo("train.py", 7, "train", code, (code,), 7, (37, 45))
    read = decode(
        encode(make_error(exception=ExceptionInfo("KeyError", "x", frames=(frame,)))), _REF
    )
    (stored,) = read.exception.frames
    assert "hunter2" not in stored.code + stored.context[0]
    assert stored.marked == (0, 0)


@pytest.mark.parametrize(
    "text", ["bad \udc80 byte", "\ud800", "NUL \x00", "\U0010ffff", "\x1b[31m"]
)
def test_invalid_utf8_is_escaped_in_every_field(text: str) -> None:
    """Invalid UTF-8 is escaped in every field."""
    read = decode(encode(filled(WorkerError, text)), _REF)
    assert read.message == text.encode("utf-8", "backslashreplace").decode().replace("\x00", "")


def _wide(text: str) -> ExceptionInfo:
    """Return an exception with more parts than a document has room for."""
    frame = FrameInfo(text, 7, text, text)
    leaf = ExceptionInfo(text, text, (text,) * 100, (frame,) * 200, (text,) * 100)
    return replace(leaf, causes=(leaf,) * 2, members=(leaf,) * 2)


def _nested(depth: int) -> ExceptionInfo:
    group = ExceptionInfo("ValueError", "innermost")
    for _ in range(depth):
        group = ExceptionInfo("ExceptionGroup", "group", members=(group,))
    return group


_FIRE = "\U0001f525"
_HUGE: dict[str, Callable[[], WorkerError]] = {
    "escaped everywhere": lambda: filled(WorkerError, "\udc80" * 20_000),
    "wide": lambda: make_error(exception=_wide(_FIRE * 1_000)),
    "deep": lambda: make_error(exception=_nested(500)),
    "stacks": lambda: make_error(
        exception=None, stack_dumps=(StackDump(7, 3, _FIRE * 70_000),) * 70
    ),
}


@pytest.mark.parametrize("what", _HUGE)
def test_a_huge_failures_document_is_within_the_limit(what: str) -> None:
    """The document of a huge failure is below the limit, decodes, names who failed,
    and has its exception if any.
    """
    error = _HUGE[what]()
    data = encode(error)
    assert len(data) < MAX_DOCUMENT_BYTES
    read = decode(data, _REF)
    assert isinstance(read, WorkerError)
    assert (read.rank, read.timestamp_ns) == (error.rank, error.timestamp_ns)
    assert (read.exception is None) is (error.exception is None)


def test_an_overlong_setup_is_ignored() -> None:
    """A roster entry with a text that is longer than ours says nothing about its node:
    a page repeats such texts.
    """
    entry = pb.RosterEntry()
    entry.ParseFromString(encode_presence(_FULL_PRESENCE))
    entry.setup.source_url = "https://a.com/" + "x" * 50_000
    assert decode_presence(entry.SerializeToString(), "r1.pb").setup == model.NodeSetup()


def test_a_too_large_document_loses_its_notes_first() -> None:
    """A document that is too large because of its notes loses the notes, and keeps frames,
    bases and causes.
    """
    frame = FrameInfo("train.py", 7, "train", "step()")
    cause = ExceptionInfo("OSError", "disk", relation="cause")
    small = ExceptionInfo("ValueError", "boom", ("Exception",), (frame,), causes=(cause,))
    read = decode(
        encode(make_error(exception=replace(small, notes=("\U0001f525" * 16_000,) * 50))), _REF
    )
    assert read.exception == small


@pytest.mark.parametrize(
    ("dumps", "kept", "most"), [(1, 1, 65_536), (16, 16, 65_536), (99, 64, 16_384)]
)
def test_stack_dumps_share_the_limit_and_keep_both_ends(dumps: int, kept: int, most: int) -> None:
    """Every process's stack keeps both ends; many processes get less room each."""
    stack = "first frame\n" + "frame\n" * 15_000 + "last frame"
    error = make_error(stack_dumps=tuple(StackDump(pid, pid, stack) for pid in range(dumps)))
    read = decode(encode(error), _REF)
    assert [dump.pid for dump in read.stack_dumps] == list(range(kept))
    assert {len(dump.text) for dump in read.stack_dumps} == {most}
    assert all(dump.text.startswith("first frame") for dump in read.stack_dumps)
    assert all(dump.text.endswith("last frame") for dump in read.stack_dumps)


@pytest.mark.parametrize(
    ("name", "given_", "read"),
    [
        (
            "collectives",
            (model.CollectiveProgress("g", "", -1, -1),),
            (model.CollectiveProgress("g", "", 0, 0),),
        ),
        ("caused_by", model.CausedBy(-1, "w-1", ""), model.CausedBy(None, "w-1", "")),
        ("stack_dumps", (StackDump(-1, -1, "x"),), (StackDump(0, None, "x"),)),
        ("resources", model.Resources(-1, 2**70, 0), model.Resources(0, 2**64 - 1, 0)),
        ("place", Place(rank=-1, local_rank=-1, group_rank=-1), Place()),
        ("place", Place(rank=2**40, group_rank=2**32), Place()),
        (
            "place",
            Place(rank=0, local_rank=0, group_rank=0),
            Place(rank=0, local_rank=0, group_rank=0),
        ),
        (
            "place",
            Place(world_size=-1, pid=-1, attempt=-1, round=-1, incarnation=-1, restart_count=-1),
            Place(),
        ),
        (
            "place",
            Place(round=2**40, group_world_size=2**40),
            Place(round=2**32 - 1, group_world_size=2**32 - 1),
        ),
    ],
)
def test_a_number_out_of_range_does_not_cost_the_document(
    name: str, given_: Any, read: Any
) -> None:
    """A number is limited to its range; an invalid rank, such as torch's -1 before the rendezvous,
    becomes None.
    """
    assert getattr(decode(encode(make_error(**{name: given_})), _REF), name) == read
    if name == "place":
        assert (
            decode_presence(
                encode_presence(NodePresence(model.Phase.JOINED, given_)), "r1.pb"
            ).place
            == read
        )


def test_the_same_failure_gives_the_same_bytes() -> None:
    """Encoding is deterministic, also for the map of versions."""
    versions = tuple((name, "1") for name in string.ascii_lowercase)
    error = make_error(versions=versions)
    assert encode(error) == encode(replace(error, versions=tuple(reversed(versions))))


# --- how much of each part a writer stores and a reader takes; test_hostile_files has hostile sizes
# -------------------


_LONG = "x" * 1_000_000
_MANY = [pb.ExceptionRecord()] * 5_000
_FRAME = FrameInfo("t.py", 7, "f", "x", ("line",) * 50, 5)


def _raised(**fields: Any) -> WorkerError:
    return make_error(exception=ExceptionInfo("E", "boom", **fields))


def make_collective(**fields: Any) -> WorkerError:
    return make_error(collectives=(CollectiveProgress("g", "o", 1, 1, **fields),))


_THREAD = model.ThreadFailure("t", 1, ExceptionInfo("E", ""))


@pytest.mark.parametrize(
    ("written", "size", "cap"),
    [
        (make_error(message=_LONG), lambda read: len(read.message), 64 * 1024),
        (make_error(code=_LONG), lambda read: len(read.code), 500),
        (make_error(node=_LONG), lambda read: len(read.place.node), 500),
        (make_error(log_tail=_LONG), lambda read: len(read.log_tail), 32 * 1024),
        (make_error(message=_LONG), lambda read: len(read.exception.message), 16 * 1024),
        (_raised(frames=(_FRAME,)), lambda read: len(read.exception.frames[0].context), 20),
        (_raised(text_frames=(_FRAME,) * 999), lambda read: len(read.exception.text_frames), 100),
        (_raised(bases=("B",) * 999), lambda read: len(read.exception.bases), 50),
        (_raised(notes=("n",) * 999), lambda read: len(read.exception.notes), 50),
        (_raised(notes=(_LONG,)), lambda read: len(read.exception.notes[0]), 16 * 1024),
        (
            _raised(causes=(ExceptionInfo("E", ""),) * 99),
            lambda read: len(read.exception.causes),
            10,
        ),
        (
            _raised(members=(ExceptionInfo("E", ""),) * 99),
            lambda read: len(read.exception.members),
            10,
        ),
        (make_error(thread_failures=(_THREAD,) * 50), lambda read: len(read.thread_failures), 10),
        (
            make_error(sent_signals=(model.SentSignal("S", "r"),) * 99),
            lambda read: len(read.sent_signals),
            50,
        ),
        (
            make_error(versions=tuple((str(n), "1") for n in range(99))),
            lambda read: len(read.versions),
            50,
        ),
        (
            make_error(collectives=(CollectiveProgress("g", "o", 1, 1),) * 99),
            lambda read: len(read.collectives),
            50,
        ),
        (
            make_collective(members=(1,) * 20_000),
            lambda read: len(read.collectives[0].members),
            16_384,
        ),
        (
            make_collective(last=(model.Collective(1, "o"),) * 99),
            lambda read: len(read.collectives[0].last),
            10,
        ),
    ],
)
def test_a_writer_stores_exactly_up_to_its_limits(
    written: WorkerError, size: Callable[[WorkerError], int], cap: int
) -> None:
    """A writer stores exactly so much of what is too long."""
    read = decode(encode(written), _REF)
    assert isinstance(read, WorkerError)
    assert size(read) == cap


def _read(change: Callable[[pb.WorkerFailure], object]) -> WorkerError:
    """What is read of a document that no writer of ours would write."""
    document = pb.WorkerErrorDocument.FromString(encode(make_error()))
    change(document.failure)
    read = decode(document.SerializeToString(), _REF)
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
        (
            lambda it: it.exception.causes.extend(_MANY),
            lambda read: len(read.exception.causes),
            1_999,
        ),
        (
            lambda it: setattr(it, "signal", "x" * 10_000),
            lambda read: len(read.signal),
            MAX_LINE_CHARACTERS_READ,
        ),
        (
            lambda it: it.sent_signals.extend([pb.SentSignal()] * 500),
            lambda read: len(read.sent_signals),
            50,
        ),
        (_nest, lambda read: _depth(read.exception), 6),
        (
            lambda it: it.exception.text_frames.extend([pb.Frame()] * 999),
            lambda e: len(e.exception.text_frames),
            100,
        ),
        (
            lambda it: it.stack_dumps.extend([pb.StackDump()] * 100_000),
            lambda read: len(read.stack_dumps),
            64,
        ),
        (
            lambda it: it.collectives.extend([pb.CollectiveProgress()] * 999),
            lambda read: len(read.collectives),
            50,
        ),
        (
            lambda it: it.collectives.add(last=[pb.Collective()] * 50_000),
            lambda e: len(e.collectives[0].last),
            10,
        ),
    ],
)
def test_a_reader_takes_exactly_up_to_its_limits(
    change: Callable[[pb.WorkerFailure], None], size: Callable[[WorkerError], int], cap: int
) -> None:
    """A reader takes exactly so much of what no writer writes."""
    assert size(_read(change)) == cap


def test_a_deep_stack_keeps_both_ends() -> None:
    """A deep stack keeps its outermost and innermost frames and the total
    number of omitted frames.
    """
    frames = tuple(FrameInfo("train.py", number, "recurse") for number in range(1_000))
    read = decode(encode(_raised(frames=frames, frames_omitted=5)), _REF)
    assert [frame.line for frame in read.exception.frames] == [*range(50), *range(950, 1_000)]
    assert read.exception.frames_omitted == 905


def test_what_a_reader_leaves_out_is_counted() -> None:
    """Exceptions and threads are counted in a note,
    the frames between both ends of a stack in a number.
    """
    assert _read(_nest).exception.members[0].members[0].notes == ()
    many = _read(lambda failure: failure.exception.members.extend(_MANY))
    assert many.exception.notes[-1].startswith("... 3001 more members left out")
    threads = _read(lambda failure: failure.thread_failures.extend([pb.ThreadFailure()] * 500))
    assert (
        threads.thread_failures[-1]
        .exception.notes[-1]
        .startswith("... 400 more failed threads left out")
    )
    deep = _read(
        lambda failure: failure.exception.frames.extend(
            pb.Frame(line=line) for line in range(1, 3_000)
        )
    )
    assert [frame.line for frame in deep.exception.frames] == [
        7,
        *range(1, 500),
        *range(2_500, 3_000),
    ]
    assert deep.exception.frames_omitted == 2_000
    group = pb.ExceptionRecord(
        type="ValueError", frames=[pb.Frame(line=line) for line in range(500)]
    )
    members = _read(
        lambda failure: failure.exception.members.extend([group] * 100)
    ).exception.members
    assert [len(member.frames) for member in members] == [500] * 39 + [499] + [2] * 60
    assert all(len(member.frames) + member.frames_omitted == 500 for member in members)


def test_a_roster_entry_keeps_the_ends_of_eight_logs() -> None:
    """A roster entry has the ends of eight logs, 2 KiB each, and short lines."""
    logs = tuple(model.LogTail(rank, f"{rank} {_LONG}") for rank in range(20))
    entry = make_presence(
        first_failure_reason=_LONG, log_tails=logs, setup=model.NodeSetup(task=_LONG, gpus=8)
    )
    read = decode_presence(encode_presence(entry), "r1.pb")
    assert [len(tail.text) for tail in read.log_tails] == [2 * 1024] * 8
    assert (len(read.first_failure_reason), len(read.setup.task)) == (500, 500)


def test_a_roster_entry_with_too_many_workers_is_refused(attempt: Attempt) -> None:
    """An entry with more workers, or receipts, than a node has is refused,
    so that it costs a reader nothing.
    """
    as_many = make_presence(ranks=tuple(range(16_384)))
    assert decode_presence(encode_presence(as_many), "r1.pb") == as_many
    for entry in (
        make_presence(ranks=tuple(range(16_385))),
        make_presence(receipts=(model.Receipt("e1.pb", durable=True),) * 16_385),
    ):
        with pytest.raises(
            BadDocumentError,
            match=r"^r1\.pb is not a roster entry: it lists 16,385 workers of one node",
        ):
            decode_presence(encode_presence(entry), "r1.pb")
    attempt.write(make_error(0))
    attempt.join(make_presence(ranks=tuple(range(16_385))))
    job = attempt.reader().job()
    assert len(job.failures) == 1
    assert any("16,385 workers" in note for note in job.coverage.notes)


def test_at_most_64_small_records_of_restarts_are_read(attempt: Attempt) -> None:
    """A record of more than 64 KiB is left out, and of very many the last 64 by name are read."""
    for number in range(100):
        name = f"firstfault/roster/decision-round-{number:05d}-0000000.json"
        attempt.put(name, restart_to_json(replace(RECORD, number=number)))
    large = restart_to_json(replace(RECORD, number=99)) + b" " * MAX_RESTART_BYTES
    attempt.put("firstfault/roster/decision-round-00099-0000000.json", large)
    assert [record.number for record in attempt.reader().restarts()] == list(range(36, 99))


def test_a_too_large_bundle_is_not_downloaded(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger bundle of copies is not downloaded, and every document is read by itself."""
    attempt.write(*(make_error(rank) for rank in range(9)))
    attempt.put(f"firstfault/roster/copies-{0:064x}.bundle", b"x" * 100)
    monkeypatch.setattr(fetch, "_MAX_BUNDLE_BYTES", 99)
    monkeypatch.setattr(fetch, "bundle_name", lambda _: pytest.fail("it was downloaded"))
    assert len(attempt.reader().job().failures) == 9
