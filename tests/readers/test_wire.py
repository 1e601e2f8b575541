"""Documents and roster entries, to and from bytes."""

from __future__ import annotations

import contextlib
import string
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.execution_pb2 import ExecutionError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given
from hypothesis import strategies as st

from firstfault.errors import BadDocumentError
from firstfault.model import (
    CausedBy,
    Collective,
    CollectiveProgress,
    DocumentRef,
    ExceptionInfo,
    ExpiredDeadline,
    FileSystem,
    FrameInfo,
    Kind,
    LogTail,
    NodePresence,
    NodeSetup,
    Origin,
    Phase,
    Place,
    Receipt,
    Resources,
    Seal,
    SentSignal,
    StackDump,
    Subject,
    SystemState,
    ThreadFailure,
    WorkerError,
    Writer,
)
from firstfault.testing import START_NS, make_error
from firstfault.wire.documents import MAX_DOCUMENT_BYTES, decode, decode_presence, encode, encode_presence, encode_seal
from firstfault_proto.v1 import errors_pb2 as pb
from tests.reports.every_field import filled

if TYPE_CHECKING:
    from collections.abc import Callable

_REF = DocumentRef("e1-document.pb", "s3://bucket/e1-document.pb", 17, 400)
_NANO = 1_000_000_000

# --- what a document may hold ---------------------------------------------------------------------------------------

# without what looks like a secret: redaction has tests of its own
_TEXT = st.text(st.sampled_from(string.ascii_letters + " .,'()[]\n\t\u00e9\u2192\U0001f525"), max_size=40)
_SMALL = st.integers(0, 2**32 - 1)
_BIG = st.integers(0, 2**64 - 1)
_TIME = st.none() | st.integers(1, 2**64 - 1)
_BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "str": _TEXT,
    "int": _SMALL,
    "bool": st.booleans(),
    "float": st.floats(0, 1e6),
    "int | None": st.none() | _SMALL,
    "tuple[str, ...]": st.lists(_TEXT, max_size=3).map(tuple),
    "tuple[int, ...]": st.lists(_SMALL, max_size=3).map(tuple),
    "tuple[int, int]": st.tuples(_SMALL, _SMALL),
    **{kind.__name__: st.sampled_from(kind) for kind in (Kind, Origin, Writer, Subject, Phase)},
}
"""By a field's annotation: a field of another type has to be named, so none is forgotten."""


def _any(kind: Any, without: set[str] = frozenset(), **named: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return objects of a dataclass with any value in each field."""
    names = {field.name: field.type for field in fields(kind) if field.name not in without}
    return st.builds(kind, **{name: named[name] if name in named else _BY_TYPE[hint] for name, hint in names.items()})


def _some(items: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, max_size=most).map(tuple)


def _exceptions(depth: int) -> st.SearchStrategy[ExceptionInfo]:
    inner = _some(_exceptions(depth - 1), 2) if depth else st.just(())
    relation = st.sampled_from(["", "cause", "context"])
    frames = _some(_any(FrameInfo))
    return _any(ExceptionInfo, frames=frames, text_frames=frames, causes=inner, members=inner, relation=relation)


_PLACES = _any(Place, incarnation=_BIG)
_CAUSES = st.none() | _any(CausedBy)
_BIG_OR_NONE = dict.fromkeys((field.name for field in fields(Resources)), st.none() | _BIG)
_SPACES = _any(FileSystem, free_bytes=_BIG, total_bytes=_BIG, free_inodes=_BIG, total_inodes=_BIG)
_COLLECTIVES = _any(Collective, sequence=_BIG)
_ERRORS = _any(
    WorkerError,
    {"documents", "newer"},
    timestamp_ns=st.none() | st.integers(1, 2**64 - 1).filter(lambda stamp: stamp < 253_402_300_800 * _NANO),
    place=_PLACES,
    exception=st.none() | _exceptions(2),
    exit_code=st.none() | st.integers(-(2**31), 2**31 - 1),
    sent_signals=_some(_any(SentSignal)),
    resources=_any(Resources, **_BIG_OR_NONE),
    monotonic_ns=_TIME,
    upload_delay_ns=_TIME,
    versions=st.dictionaries(_TEXT, _TEXT, max_size=3).map(lambda found: tuple(sorted(found.items()))),
    stack_dumps=_some(_any(StackDump)),
    thread_failures=_some(_any(ThreadFailure, timestamp_ns=_TIME, exception=_exceptions(1)), 2),
    collectives=_some(_any(CollectiveProgress, enqueued=_BIG, completed=st.none() | _BIG, last=_some(_COLLECTIVES))),
    caused_by=_CAUSES,
    expired=st.none() | _any(ExpiredDeadline),
    system=_any(SystemState, file_systems=_some(_SPACES), limits=_some(st.tuples(_TEXT, _BIG))),
)
_PRESENCES = _any(
    NodePresence,
    {"newer"},
    place=_PLACES,
    receipts=_some(_any(Receipt, fault_to_durable_ns=_TIME)),
    timestamp_ns=_TIME,
    first_failure=_CAUSES,
    log_tails=_some(_any(LogTail)),
    setup=_any(NodeSetup),
)


# --- round trips ----------------------------------------------------------------------------------------------------


@given(_ERRORS)
def test_a_failure_comes_back(error: WorkerError) -> None:
    """Every field of a failure survives the round trip, and the failure names its document."""
    assert decode(encode(error), _REF) == replace(error, documents=(_REF,))


@given(_PRESENCES)
def test_a_roster_entry_comes_back(presence: NodePresence) -> None:
    """A roster entry survives the round trip."""
    local = presence.place.local_rank or 0
    if local + len(presence.ranks) < 2**32:
        assert decode_presence(encode_presence(presence), "r1.pb") == presence


_SEAL = Seal(
    name=_REF.name,
    digest="d" * 32,
    count=12,
    strategy="earliest",
    json='{"schema": "firstfault.verdict/v1"}',
    timestamp_ns=START_NS,
    node="worker-1",
    code="USER",
    message="boom",
    kind=Kind.RECOVERABLE,
    origin=Origin.SYSTEM,
    fault_timestamp_ns=START_NS - 1,
    worker="worker-3",
)


def test_a_seal_comes_back() -> None:
    """A sealed verdict survives the round trip."""
    assert decode(encode_seal(_SEAL), _REF) == _SEAL


def _full_error() -> WorkerError:
    full: WorkerError = filled(WorkerError, "text")
    return replace(full, code="USER", in_flight=True, documents=(_REF,))


_FULL_PRESENCE: NodePresence = filled(NodePresence, "text")


def test_a_failure_with_everything_comes_back() -> None:
    """No part is lost beside others."""
    assert decode(encode(_full_error()), _REF) == _full_error()
    assert decode_presence(encode_presence(_FULL_PRESENCE), "r1.pb") == _FULL_PRESENCE


# --- Flyte's own message --------------------------------------------------------------------------------------------


@given(_ERRORS)
def test_flyte_reads_our_documents(error: WorkerError) -> None:
    """Parsed as flyteidl's ErrorDocument, our document has the same code, message, kind, origin, time and worker."""
    read = ErrorDocument.FromString(encode(error)).error
    assert (read.code, read.message, read.worker) == (error.code, error.message, error.worker)
    assert ContainerError.Kind.Name(read.kind) == error.kind.value
    assert ExecutionError.ErrorKind.Name(read.origin) == error.origin.value
    assert read.HasField("timestamp") == (error.timestamp_ns is not None)
    assert read.timestamp.seconds * _NANO + read.timestamp.nanos == (error.timestamp_ns or 0)


@given(_ERRORS)
def test_what_flyte_writes_again_is_still_ours(error: WorkerError) -> None:
    """Our document survives a program that knows only flyteidl's messages."""
    through_flyte = ErrorDocument.FromString(encode(error)).SerializeToString()
    assert decode(through_flyte, _REF) == decode(encode(error), _REF)


def test_flyte_reads_a_sealed_verdict() -> None:
    """Parsed as flyteidl's ErrorDocument, a sealed verdict is the error that Flyte shows."""
    read = ErrorDocument.FromString(encode_seal(_SEAL)).error
    assert (read.code, read.message, read.worker) == ("USER", "boom", "worker-3")
    assert (read.kind, read.origin) == (ContainerError.RECOVERABLE, ExecutionError.SYSTEM)
    assert read.timestamp.ToNanoseconds() == START_NS - 1


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (ExecutionError.UNKNOWN, Origin.UNKNOWN),
        (ExecutionError.USER, Origin.USER),
        (ExecutionError.SYSTEM, Origin.SYSTEM),
        (7, Origin.UNKNOWN),
    ],
)
def test_we_read_flytes_documents(origin: int, expected: Origin) -> None:
    """A file of Flyte's own is read with its code, message, kind, origin, time and worker, and marked as such."""
    error = ContainerError(code="red", message="hi", kind=ContainerError.RECOVERABLE, origin=origin, worker="worker-1")
    error.timestamp.FromNanoseconds(START_NS + 7)
    read = decode(ErrorDocument(error=error).SerializeToString(), _REF)
    assert read == WorkerError(
        code="red",
        message="hi",
        kind=Kind.RECOVERABLE,
        origin=expected,
        timestamp_ns=START_NS + 7,
        worker="worker-1",
        place=Place(node="worker-1"),
        writer=Writer.STOCK,
        documents=(_REF,),
    )


@pytest.mark.parametrize(
    "stamp",
    [{"seconds": 0, "nanos": 0}, {"seconds": -1}, {"seconds": 10**15}, {"seconds": 5, "nanos": -1}, {"nanos": 10**9}],
)
def test_a_time_that_cannot_be_is_no_time(stamp: dict[str, int]) -> None:
    """A timestamp at or before the epoch, after the year 9999, or of impossible nanoseconds counts as missing."""
    document = ErrorDocument(error=ContainerError(code="red", timestamp=stamp))
    read = decode(document.SerializeToString(), _REF)
    assert isinstance(read, WorkerError)
    assert read.timestamp_ns is None


@pytest.mark.parametrize(("ours", "flytes", "read"), [(7, None, 7), (0, 9, 9), (7, 9, 7), (0, None, None)])
def test_our_time_comes_before_flytes(ours: int, flytes: int | None, read: int | None) -> None:
    """The time of our own part of a document overrides Flyte's."""
    document = pb.WorkerErrorDocument(failure=pb.WorkerFailure(wall_time_ns=ours))
    document.error.code = "USER"
    if flytes is not None:
        document.error.timestamp.nanos = flytes
    assert decode(document.SerializeToString(), _REF).timestamp_ns == read


# --- hostile bytes --------------------------------------------------------------------------------------------------


def _decoded(data: bytes) -> WorkerError | Seal | NodePresence | None:
    with contextlib.suppress(BadDocumentError):
        return decode(data, _REF)
    return None


@pytest.mark.parametrize("data", [encode(_full_error()), encode_seal(_SEAL)], ids=["document", "seal"])
def test_a_document_cut_off_anywhere(data: bytes) -> None:
    """A document that is cut at any byte decodes or raises BadDocumentError, and raises at most cuts."""
    results = [_decoded(data[:length]) for length in range(len(data))]
    assert sum(result is None for result in results) > len(data) * 0.9
    assert all(result is None or result.code == "USER" for result in results)


def test_a_roster_entry_cut_off_anywhere() -> None:
    """A roster entry that is cut at any byte decodes or raises BadDocumentError."""
    data = encode_presence(_FULL_PRESENCE)
    bad = 0
    for length in range(len(data)):
        try:
            decode_presence(data[:length], "r1.pb")
        except BadDocumentError:
            bad += 1
    assert bad > len(data) * 0.8


@given(st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    """Arbitrary bytes decode or raise BadDocumentError."""
    _decoded(data)
    with contextlib.suppress(BadDocumentError):
        decode_presence(data, "r1.pb")


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_one_wrong_byte(position: int, value: int) -> None:
    """A document with one changed byte decodes or raises BadDocumentError."""
    data = bytearray(encode(_full_error()))
    data[position % len(data)] = value
    _decoded(bytes(data))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"\n", "is not an error document"),
        (b"not protobuf", "is not an error document"),
        (b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code></Error>', "is not an error document"),
        (encode_presence(_FULL_PRESENCE), "has no error"),
        (b"\x0a\x04\x0a\x02\xff\xfe", "is not an error document"),
    ],
    ids=["empty", "one byte", "text", "xml", "roster entry", "not UTF-8"],
)
def test_a_bad_document_says_which_and_why(data: bytes, reason: str) -> None:
    """The error for invalid bytes has the document's name and the reason."""
    with pytest.raises(BadDocumentError, match=rf"e1-document\.pb {reason}"):
        decode(data, _REF)


@pytest.mark.parametrize("data", [b"", b"not protobuf", encode(_full_error()), b"\x10\x63"])
def test_a_bad_roster_entry_says_which(data: bytes) -> None:
    """Invalid bytes and an unknown phase raise an error with the entry's name."""
    with pytest.raises(BadDocumentError, match=r"r1-entry\.pb is not a roster entry"):
        decode_presence(data, "r1-entry.pb")


# --- other versions of the schema -----------------------------------------------------------------------------------


def test_fields_of_a_newer_schema_are_tolerated() -> None:
    """Unknown fields and messages of a document are ignored."""
    document = pb.WorkerErrorDocument.FromString(encode(_full_error()))
    document.failure.schema_version = 99
    newer = document.SerializeToString()
    newer += bytes([0xFA, 0x3F, 4]) + b"news"  # field 1023, a string
    failure = bytes([0x98, 0x7D, 1])  # field 2003 of the failure, a number
    newer += bytes([0xCA, 0x3E, len(failure)]) + failure  # field 1001 once more: protobuf merges the two
    assert decode(newer, _REF) == replace(_full_error(), newer=True)
    assert len(UnknownFieldSet(pb.WorkerErrorDocument.FromString(newer))) == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"writer": 9}, {"writer": Writer.RECORDER}),
        ({"subject": 9}, {"subject": Subject.WORKER}),
        ({"category": "of_the_future"}, {"category": "of_the_future"}),
    ],
)
def test_values_of_a_newer_schema_are_tolerated(change: dict[str, Any], expected: dict[str, Any]) -> None:
    """An unknown writer or subject does not make a document unreadable."""
    document = pb.WorkerErrorDocument.FromString(encode(_full_error()))
    for name, value in change.items():
        setattr(document.failure, name, value)
    read = decode(document.SerializeToString(), _REF)
    assert read == replace(_full_error(), **expected)


# --- what writers may not forget ------------------------------------------------------------------------------------

_SECRET = "password=hunter22"  # noqa: S105 - the one that has to go


def _everywhere(text: str) -> WorkerError:
    """Return a failure with `text` in every string field."""
    return filled(WorkerError, text)


def test_secrets_are_redacted_in_every_field() -> None:
    """An encoded failure has no credential in any field."""
    data = encode(_everywhere(_SECRET))
    assert b"hunter22" not in data
    assert data.count(b"password=***") > 30


def test_secrets_are_redacted_in_roster_entries_and_seals() -> None:
    """An encoded roster entry has no credential in any field, except for names of objects; a seal has none."""
    entry: NodePresence = filled(NodePresence, _SECRET)
    receipts = tuple(replace(receipt, name="e1.pb") for receipt in entry.receipts)
    data = encode_presence(replace(entry, receipts=receipts))
    assert b"hunter22" not in data
    assert data.count(b"password=***") > 15
    assert b"hunter22" not in encode_seal(replace(_SEAL, message=_SECRET))


def test_secrets_in_flytes_own_files_are_redacted_when_they_are_read() -> None:
    """Flyte's entrypoint writes a message as it is; a reader never has its credentials."""
    error = ContainerError(code=_SECRET, message=f"{_SECRET} was refused", worker="worker-1")
    read = decode(ErrorDocument(error=error).SerializeToString(), _REF)
    assert isinstance(read, WorkerError)
    assert (read.code, read.message) == ("password=***", "password=*** was refused")


@pytest.mark.parametrize("text", ["lone \udc80 surrogate", "\ud800", "NUL \x00", "\U0010ffff", "\x1b[31m"])
def test_any_text_can_be_stored(text: str) -> None:
    """Invalid UTF-8 is escaped in every field."""
    assert isinstance(decode(encode(_everywhere(text)), _REF), WorkerError)


def test_a_lone_surrogate_is_escaped() -> None:
    """Escaped characters are recognisable."""
    read = decode(encode(make_error(message="bad \udc80 byte")), _REF)
    assert read.message == "bad \\udc80 byte"


def _wide(text: str) -> ExceptionInfo:
    """Return an exception with more parts than a document has room for."""
    frame = FrameInfo(text, 7, text, text)
    leaf = ExceptionInfo(text, text, (text,) * 100, (frame,) * 200, (text,) * 100)
    return replace(leaf, causes=(leaf,) * 20, members=(leaf,) * 20)


def _nested(depth: int) -> ExceptionInfo:
    group = ExceptionInfo("ValueError", "innermost")
    for _ in range(depth):
        group = ExceptionInfo("ExceptionGroup", "group", members=(group,))
    return group


@pytest.mark.parametrize(
    "build",
    [
        lambda: make_error(message="x" * 10_000_000),
        lambda: make_error(message="\U0001f525" * 3_000_000),
        lambda: make_error(message="\udc80" * 1_000_000),
        lambda: _everywhere("word " * 100_000),
        lambda: _everywhere("\udc80" * 100_000),
        lambda: make_error(exception=_wide("\U0001f525" * 1_000)),
        lambda: make_error(exception=_nested(500)),
        lambda: make_error(sent_signals=(SentSignal("SIGTERM", "why " * 1_000),) * 5_000),
        lambda: make_error(versions=tuple((f"package {number}", "1" * 900) for number in range(5_000))),
        lambda: make_error(stack_dumps=(StackDump(7, 3, "\U0001f525" * 100_000),) * 70),
        lambda: make_error(thread_failures=(ThreadFailure("loader", 1, _wide("\U0001f525" * 25)),) * 12),
        lambda: make_error(collectives=(CollectiveProgress("g" * 900, "allreduce", 41, 40),) * 5_000),
    ],
    ids=[
        "long",
        "emoji",
        "surrogates",
        "everywhere",
        "escaped everywhere",
        "wide",
        "deep",
        "signals",
        "versions",
        "stacks",
        "threads",
        "collectives",
    ],
)
def test_a_document_is_never_larger_than_readers_take(build: Callable[[], WorkerError]) -> None:
    """The document of a huge failure is below the limit, decodes, and says who failed."""
    error = build()
    data = encode(error)
    assert len(data) < MAX_DOCUMENT_BYTES
    read = decode(data, _REF)
    assert isinstance(read, WorkerError)
    assert (read.rank, read.timestamp_ns) == (error.rank, error.timestamp_ns)
    assert read.exception is not None


@pytest.mark.parametrize(
    ("place", "read"),
    [
        (Place(rank=-1, local_rank=-1, group_rank=-1), Place()),
        (Place(rank=2**40, group_rank=2**32), Place()),
        (Place(rank=0, local_rank=0, group_rank=0), Place(rank=0, local_rank=0, group_rank=0)),
        (Place(world_size=-1, pid=-1, attempt=-1, round=-1, incarnation=-1, restart_count=-1), Place()),
        (Place(round=2**40, group_world_size=2**40), Place(round=2**32 - 1, group_world_size=2**32 - 1)),
    ],
)
def test_a_number_out_of_range_does_not_cost_the_document(place: Place, read: Place) -> None:
    """An invalid rank, such as torch's -1 before the rendezvous, becomes None; a count is limited to its range."""
    assert decode(encode(make_error(place=place)), _REF).place == read
    assert decode_presence(encode_presence(NodePresence(Phase.JOINED, place)), "r1.pb").place == read


def test_a_setup_that_no_version_wrote() -> None:
    """A roster entry with a text that is longer than ours says nothing about its node: a page repeats such texts."""
    entry = pb.RosterEntry()
    entry.ParseFromString(encode_presence(_FULL_PRESENCE))
    entry.setup.source_url = "https://a.com/" + "x" * 50_000
    assert decode_presence(entry.SerializeToString(), "r1.pb").setup == NodeSetup()


def test_a_mark_in_a_line_with_a_credential() -> None:
    """What is redacted moves what is marked, so such a line has no mark."""
    code = "login(password='hunter2-and-more') + row['x']"
    frame = FrameInfo("train.py", 7, "train", code, (code,), 7, (37, 45))
    read = decode(encode(make_error(exception=ExceptionInfo("KeyError", "x", frames=(frame,)))), _REF)
    assert isinstance(read, WorkerError)
    assert read.exception is not None
    (stored,) = read.exception.frames
    assert "hunter2" not in stored.code + stored.context[0]
    assert stored.marked == (0, 0)


def test_what_tells_least_is_left_out_first() -> None:
    """A document that is too large because of its notes loses the notes, and keeps frames, bases and causes."""
    frame = FrameInfo("train.py", 7, "train", "step()")
    cause = ExceptionInfo("OSError", "disk", relation="cause")
    small = ExceptionInfo("ValueError", "boom", ("Exception",), (frame,), causes=(cause,))
    read = decode(encode(make_error(exception=replace(small, notes=("\U0001f525" * 16_000,) * 50))), _REF)
    assert read.exception == small


_LONG_STACK = "first frame\n" + "frame\n" * 100_000 + "last frame"


@pytest.mark.parametrize(
    ("dumps", "kept", "most"), [(1, 1, 65_536), (16, 16, 65_536), (64, 64, 16_384), (99, 64, 16_384)]
)
def test_stack_dumps_share_their_room(dumps: int, kept: int, most: int) -> None:
    """Every process's stack keeps both ends; many processes get less room each."""
    error = make_error(stack_dumps=tuple(StackDump(pid, pid, _LONG_STACK) for pid in range(dumps)))
    read = decode(encode(error), _REF)
    assert [dump.pid for dump in read.stack_dumps] == list(range(kept))
    assert {len(dump.text) for dump in read.stack_dumps} == {most}
    assert all(dump.text.startswith("first frame") for dump in read.stack_dumps)
    assert all(dump.text.endswith("last frame") for dump in read.stack_dumps)
    assert read.exception == error.exception


def test_a_document_too_large_for_its_stacks_has_no_exception_it_did_not_have() -> None:
    """A failure without an exception decodes without one after the limit removed its stacks."""
    error = make_error(exception=None, stack_dumps=(StackDump(7, 3, "\U0001f525" * 100_000),) * 64)
    read = decode(encode(error), _REF)
    assert (read.exception, read.stack_dumps) == (None, ())


def test_the_first_ten_threads_are_kept() -> None:
    """A document has at most ten thread failures, the first ones."""
    failures = tuple(ThreadFailure(f"t{number}", START_NS, ExceptionInfo("OSError", "disk")) for number in range(50))
    read = decode(encode(make_error(thread_failures=failures)), _REF)
    assert read.thread_failures == failures[:10]


@pytest.mark.parametrize(
    ("given_", "read"),
    [
        (
            {"collectives": (CollectiveProgress("g", "", -1, -1),)},
            {"collectives": (CollectiveProgress("g", "", 0, 0),)},
        ),
        ({"caused_by": CausedBy(-1, "w-1", "")}, {"caused_by": CausedBy(None, "w-1", "")}),
        ({"stack_dumps": (StackDump(-1, -1, "x"),)}, {"stack_dumps": (StackDump(0, None, "x"),)}),
        ({"resources": Resources(-1, 2**70, 0)}, {"resources": Resources(0, 2**64 - 1, 0)}),
    ],
    ids=["collectives", "caused_by", "stack_dumps", "resources"],
)
def test_evidence_out_of_range_does_not_cost_the_document(given_: dict[str, Any], read: dict[str, Any]) -> None:
    """An invalid number is limited to its range or left out."""
    assert decode(encode(make_error(**given_)), _REF) == replace(make_error(**read), documents=(_REF,))


def test_a_deep_nest_of_groups_keeps_its_outside() -> None:
    """Nested exception groups are kept to a depth of six."""
    group = decode(encode(make_error(exception=_nested(10))), _REF).exception
    levels = 1
    while group.members:
        (group,) = group.members
        levels += 1
    assert levels == 6


def test_a_long_message_keeps_both_ends() -> None:
    """A long message keeps both ends and says how many characters are left out."""
    read = decode(encode(make_error(message="first " + "x" * 10_000_000 + " last")), _REF)
    assert read.message.startswith("first ")
    assert read.message.endswith(" last")
    assert "characters left out" in read.message


def test_a_deep_stack_keeps_both_ends() -> None:
    """A deep stack keeps its outermost and innermost frames and the total number of omitted frames."""
    frames = tuple(FrameInfo("train.py", number, "recurse") for number in range(1_000))
    read = decode(
        encode(make_error(exception=ExceptionInfo("RecursionError", "", frames=frames, frames_omitted=5))), _REF
    )
    lines = [frame.line for frame in read.exception.frames]
    assert lines == [*range(50), *range(950, 1_000)]
    assert read.exception.frames_omitted == 905


def _hostile(change: Callable[[pb.WorkerFailure], None]) -> WorkerError:
    """What is read of a document that no writer of ours would write."""
    document = pb.WorkerErrorDocument.FromString(encode(make_error()))
    change(document.failure)
    return decode(document.SerializeToString(), _REF)


def _nest(failure: pb.WorkerFailure) -> None:
    inner = failure.exception
    for _ in range(90):
        inner = inner.members.add(type="ExceptionGroup")


def test_members_beyond_a_readers_limit_are_counted() -> None:
    """A reader takes 2,000 exceptions of a document, and says of how many it took none."""
    read = _hostile(lambda failure: failure.exception.members.extend([pb.ExceptionRecord()] * 5_000))
    assert len(read.exception.members) == 1_999
    assert read.exception.notes[-1].startswith("... 3001 more members left out")
    read = _hostile(lambda failure: failure.exception.causes.extend([pb.ExceptionRecord()] * 5_000))
    assert len(read.exception.causes) == 1_999
    assert read.exception.notes[-1].startswith("... 3001 more causes left out")


def test_exceptions_too_deep_within_others_are_counted() -> None:
    """A reader follows members for six levels; the last one says that there are more."""
    exception = _hostile(_nest).exception
    depth = 1
    while exception.members:
        assert exception.notes == ()
        exception, depth = exception.members[0], depth + 1
    assert depth == 6
    assert exception.notes[-1].startswith("... 1 more members left out")


def test_frames_and_threads_beyond_a_readers_limit_are_counted() -> None:
    """A reader keeps both ends of a stack and the first threads, and says how many it left out."""

    def change(failure: pb.WorkerFailure) -> None:
        del failure.exception.frames[:]
        failure.exception.frames.extend(pb.Frame(line=number) for number in range(3_000))
        failure.exception.frames_omitted = 7
        failure.thread_failures.extend([pb.ThreadFailure()] * 500)

    read = _hostile(change)
    assert [frame.line for frame in read.exception.frames] == [*range(500), *range(2_500, 3_000)]
    assert read.exception.frames_omitted == 2_007
    assert len(read.thread_failures) == 100
    assert read.thread_failures[-1].exception.notes[-1].startswith("... 400 more failed threads left out")


def test_a_reader_takes_no_more_dumps_and_collectives_than_a_writer_writes() -> None:
    """Hundreds of thousands of empty parts cost a reader nothing."""

    def change(failure: pb.WorkerFailure) -> None:
        failure.stack_dumps.extend([pb.StackDump()] * 100_000)
        failure.exception.text_frames.extend([pb.Frame()] * 1_000)
        failure.collectives.extend([pb.CollectiveProgress(last=[pb.Collective()] * 50)] * 1_000)

    read = _hostile(change)
    assert (len(read.stack_dumps), len(read.collectives), len(read.collectives[0].last)) == (64, 50, 10)
    assert len(read.exception.text_frames) == 100


def test_the_same_failure_gives_the_same_bytes() -> None:
    """Encoding is deterministic, also for the map of versions."""
    versions = tuple((name, "1") for name in string.ascii_lowercase)
    error = make_error(versions=versions)
    assert encode(error) == encode(replace(error, versions=tuple(reversed(versions))))


def test_a_document_of_version_1_is_read() -> None:
    """The bytes of a version 1 document decode to the failure they were made from."""
    data = bytes.fromhex(
        "0a250a0455534552120a6261642073616d706c65180120012a080880e2cfaa0610073203772d31ca3e48080110011801221e0801100218fb"
        "d095ffbc312001280330013801400448025a03772d3170635107002a36fe9c9717a201160a0a56616c75654572726f721a08626164206461"
        "7461"
    )
    read = decode(data, _REF)
    assert read == WorkerError(
        code="USER",
        message="bad sample",
        kind=Kind.RECOVERABLE,
        origin=Origin.USER,
        timestamp_ns=START_NS + 7,
        worker="w-1",
        place=Place(1, 2, 1_700_000_000_123, 1, 3, 1, 1, 4, 2, node="w-1", pid=99),
        writer=Writer.WORKER,
        exception=ExceptionInfo("ValueError", "bad data"),
        documents=(_REF,),
    )
    assert encode(read) == data
