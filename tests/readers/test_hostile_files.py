"""Files of an attempt with fields that no version of firstfault writes: reading,
judging and drawing never raise.
"""

import copy
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from firstfault import model
from firstfault.conclude import find_judgment
from firstfault.errors import BadDocumentError
from firstfault.layout import error_key_for, roster_key_for
from firstfault.model import (
    DocumentRef,
    ExceptionInfo,
    NodePresence,
    Phase,
    Suspect,
    Victims,
    WorkerError,
)
from firstfault.reading import fetch
from firstfault.testing import START_NS, make_error, make_presence
from firstfault.wire import json_schemas
from firstfault.wire.documents import (
    MAX_DOCUMENT_BYTES,
    decode,
    decode_presence,
    encode,
    encode_presence,
    unpack,
)
from firstfault_proto.v1 import errors_pb2 as pb
from tests.all_forms import FORMS
from tests.readers.conftest import Attempt
from tests.reports.every_field import KINDS_OF_ROOT, filled
from tests.seals import DECISION, RECORD, VERDICT, encode_sealed_verdict

_MISSING = object()
_TEXTS = (
    "",
    "x" * 100_000,
    "\x00\x1b[31m\u202e\n",
    "\ud800",
    "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59.999999999Z",
)
_NUMBERS = (
    True,
    0,
    -1,
    2**31,
    2**32,
    2**63,
    2**64,
    10**30,
    1.5,
    math.nan,
    math.inf,
    -math.inf,
    1e308,
)
_NESTED = ([], [None], ["x"], [[]], [-1], [True], {}, {"1": None}, {"-1": "x"}, {"a": {"b": [1]}})
_VALUES = (None, *_NUMBERS, *_TEXTS, *_NESTED, _MISSING)


def _paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every part of a JSON value."""
    yield path
    for key in (
        node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    ):
        yield from _paths(node[key], (*path, key))


def _changed(document: Any, path: tuple[Any, ...], value: Any) -> str:
    """Return the JSON with another value at one place, or without it."""
    if not path:
        return json.dumps(value)
    changed = at = copy.deepcopy(document)
    for key in path[:-1]:
        at = at[key]
    if value is _MISSING:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(changed)


def _changes(text: str) -> Iterator[str]:
    document = json.loads(text)
    for path in _paths(document):
        yield from (
            _changed(document, path, value) for value in _VALUES if path or value is not _MISSING
        )


_TURNS = itertools.cycle(FORMS.values())


def _drawn(attempt: Attempt) -> None:
    """Read an attempt that failed, judge it, and draw its JSON, and another form by turns."""
    reader = attempt.reader()
    conclusion = reader.conclude()
    assert conclusion is not None, "it failed, whatever one of its files says"
    report = reader.report(conclusion)
    assert next(_TURNS)(report)
    json.loads(FORMS["json"](report), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


# --- seals ----------------------------------------------------------------------------------------

_SEALED = json_schemas.to_json(VERDICT, DECISION)


def _seal(text: str, **changes: Any) -> bytes:
    return encode_sealed_verdict(VERDICT, DECISION, json=text, **changes)


def test_a_seal_with_any_value_is_drawn_or_ignored(attempt: Attempt) -> None:
    """A seal with any value in any field is drawn if it is valid, else ignored."""
    drawn = set()
    for text in _changes(_SEALED):
        read = json_schemas.from_json(text)
        if repr(read) in drawn:
            continue  # the same report
        drawn.add(repr(read))
        attempt.put("error.pb", _seal(text))
        _drawn(attempt)
    assert len(drawn) > 80


def test_a_changed_seal_is_written_again_as_it_was_read() -> None:
    """What is read of a changed seal is written again as it was:
    nothing in it was taken for something else.
    """
    for text in _changes(_SEALED):
        if (read := json_schemas.from_json(text)) is None:
            continue
        again = json.loads(json_schemas.to_json(*read))
        said = json.loads(text)
        for whole in (again, said):  # what may be left out
            whole["verdict"]["coverage"].setdefault("notes", [])
            whole["decision"].setdefault("retries_left", None)
            whole["decision"].setdefault("action", "")
            whole["decision"].setdefault("failed_starts", 0)
            whole["verdict"]["timestamp"] = ""
            whole["verdict"].setdefault("rule", "")
            whole["verdict"].setdefault("machine", "")
            for suspect in whole["verdict"]["suspects"]:
                suspect.update({name: suspect.get(name) for name in ("rank", "node")})
        assert again == said


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        (lambda count: {"ranks": tuple(range(count))}, json_schemas.MAX_RANKS),
        (lambda count: {"why": ("x",) * count}, json_schemas.MAX_SENTENCES),
        (lambda count: {"suspects": (Suspect("x", rank=1),) * count}, json_schemas.MAX_SENTENCES),
        (
            lambda count: {"victims": Victims(1, tuple((rank, "x") for rank in range(count)))},
            json_schemas.MAX_SENTENCES,
        ),
        (
            lambda count: {"coverage": replace(VERDICT.coverage, notes=("x",) * count)},
            json_schemas.MAX_SENTENCES,
        ),
    ],
    ids=["ranks", "why", "suspects", "victims", "notes"],
)
def test_a_seal_with_endless_lists_is_invalid(
    changes: Callable[[int], dict[str, Any]], limit: int
) -> None:
    """A seal with more of anything than a job can have is not valid:
    to print it would take minutes.
    """
    for count, is_valid in ((limit, True), (limit + 1, False)):
        verdict = replace(VERDICT, **changes(count))
        assert json_schemas.from_json(json_schemas.to_json(verdict, DECISION)) == (
            (verdict, DECISION) if is_valid else None
        )


@pytest.mark.parametrize("count", [1, 3])
def test_an_invalid_seal_does_not_overrule_documents(
    count: int, attempt: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    """The documents are judged as if the seal were not there, and one warning names it."""
    attempt.write(make_error(3, node="w-1"))
    without = attempt.reader().conclude()
    broken = _SEALED.replace('"settled":false', '"settled":"no"')
    assert broken != _SEALED
    for number in range(count):
        attempt.put(f"error-{number:032x}.pb", _seal(broken, count=100, code="FORGED"))
    found = attempt.reader().conclude()
    assert (found.verdict, found.decision) == (without.verdict, without.decision)
    (record,) = caplog.records
    assert f"error-{0:032x}.pb is not valid" in record.getMessage()


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_seal_of_more_documents_counts_only_if_some_may_be_missing(
    is_whole: bool, attempt: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    """A seal that claims more documents than there are is shown only if some may be missing;
    schedulers follow it.
    """
    error = make_error(3, node="w-1", group_rank=0, group_world_size=1)
    attempt.write(error)
    if is_whole:
        attempt.join(make_presence(Phase.FAILED, node="w-1", ranks=(3,)))
    without = attempt.reader().conclude()
    assert without.verdict.headline != VERDICT.headline
    attempt.put(f"error-{'1' * 32}.pb", _seal(_SEALED, count=100))
    found = attempt.reader().conclude()
    assert (
        found.verdict.headline
        == (without if is_whole else replace(without, verdict=VERDICT)).verdict.headline
    )
    warnings = [record.getMessage() for record in caplog.records]
    told = "claims 100 documents, and the attempt has 1; schedulers still follow it"
    assert [told in text for text in warnings] == ([True] if is_whole else [])
    assert find_judgment(found).verdict.headline == VERDICT.headline


def test_a_valid_seal_counts_before_an_invalid_one(attempt: Attempt) -> None:
    """Without documents, the seal that can be read is taken,
    also if another says that it rests on more.
    """
    attempt.put(f"error-{'0' * 32}.pb", _seal("{}", count=100, code="FORGED"))
    attempt.put(f"error-{'1' * 32}.pb", _seal(_SEALED))
    assert attempt.reader().conclude().verdict.headline == VERDICT.headline


# --- records of restarts --------------------------------------------------------------------------


def test_a_restart_record_with_any_value_is_drawn_or_left_out(attempt: Attempt) -> None:
    """A record with any value in any field is drawn if it is valid, else left out;
    the failure stays.
    """
    attempt.write(make_error(3, node="w-1"))
    whole = json_schemas.restart_to_json(RECORD).decode()
    read = {
        record
        for text in _changes(whole)
        if (record := json_schemas.restart_from_json(text.encode())) is not None
    }
    assert len(read) > 30
    for text in (json_schemas.restart_to_json(record) for record in read):
        attempt.put("firstfault/roster/decision-round-00002-0000000.json", text)
        _drawn(attempt)
    attempt.put("firstfault/roster/decision-round-00002-0000000.json", b"[")
    _drawn(attempt)


# --- bundles of copies ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index",
    [
        *(
            [["a", 4], ["b", -4], ["c", 4]],
            [["a", True], ["b", 3]],
            [["a"]],
            {"a": 4},
            None,
            4,
            [[["a"], 4, 5]],
        ),
        *([["a", size]] for size in (10**30, 4.0, "4", None, "b", 3, 5)),
        [["errors/\ud800.pb", 4]],
    ],
    ids=str,
)
def test_a_bundle_with_a_hostile_index_is_useless_and_costs_no_memory(index: Any) -> None:
    """Sizes that do not follow each other through the content make a bundle useless,
    and cost no memory.
    """
    with pytest.raises(BadDocumentError):
        unpack(zlib.compress(json.dumps(index).encode() + b"\ndata"))


def test_only_some_of_many_damaged_bundles_are_tried(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged bundles do not make a reader download them all."""
    attempt.write(*(make_error(rank) for rank in range(9)))
    for number in range(20):
        attempt.put(f"firstfault/roster/copies-{number:064x}.bundle", b"damaged")
    asked: list[str] = []
    monkeypatch.setattr(fetch, "bundle_name", lambda data, **_: asked.append(data) or "")
    assert len(attempt.reader().job().failures) == 9
    assert len(asked) == 4


# --- documents and roster entries -----------------------------------------------------------------

_FULL: WorkerError = filled(WorkerError, "w-1")
_PLACE = replace(
    _FULL.place,
    round=2,
    group_rank=1,
    world_size=8,
    group_world_size=2,
    incarnation=START_NS // 10**6,
)
_THREAD = model.ThreadFailure("loader", START_NS, ExceptionInfo("OSError", "disk"))
_RAISED = replace(
    _FULL,
    place=_PLACE,
    timestamp_ns=START_NS,
    fingerprint="1:0123456789ab",
    exception=filled(ExceptionInfo, "w-1", depth=2),
    thread_failures=(_THREAD,),
    **KINDS_OF_ROOT["raised"],
)
_KILLED = replace(_RAISED, exception=None, expired=_FULL.expired, sent_signals=_FULL.sent_signals)
_ENTRY: NodePresence = replace(filled(NodePresence, "w-1"), place=_PLACE)
_HOSTILE_TEXT = "\x1b]0;x\x07\u202e\x00</script>\r\n\ud7ff" * 40
_EXTREMES: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_STRING: ("", _HOSTILE_TEXT),
    FieldDescriptor.CPPTYPE_BOOL: (True, False),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 0, 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 0, 2**63 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: (math.nan, math.inf, -1.0, 1e308),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 99),
}


def _field_changes(root: Message) -> list[bytes]:
    """Return the bytes with each field set to extremes, left out, and repeated;
    a field of 0 is as one left out.
    """
    return [*dict.fromkeys(_changed_fields(root, root))]


def _changed_fields(root: Message, message: Message) -> Iterator[bytes]:
    for field in message.DESCRIPTOR.fields:
        before = type(message).FromString(message.SerializePartialToString())
        message.ClearField(field.name)
        yield root.SerializePartialToString()
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[_HOSTILE_TEXT] = _HOSTILE_TEXT
            yield root.SerializePartialToString()
        elif (
            field.is_repeated
            if hasattr(field, "is_repeated")
            else field.label == FieldDescriptor.LABEL_REPEATED
        ):
            values = list(getattr(before, field.name)) or (
                [] if field.message_type else [_EXTREMES[field.cpp_type][-1]]
            )
            getattr(message, field.name).extend(values * 120)
            yield root.SerializePartialToString()
        elif field.message_type is None:
            for value in _EXTREMES[field.cpp_type]:
                setattr(message, field.name, value)
                yield root.SerializePartialToString()
        message.CopyFrom(before)
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        parts = [value] if hasattr(value, "DESCRIPTOR") else value[:1]
        for part in parts:
            yield from _changed_fields(root, part)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside others"])
@pytest.mark.parametrize("failure", [_RAISED, _KILLED], ids=["raised", "killed"])
def test_a_document_with_any_value_is_drawn_and_the_attempt_failed(
    failure: Any, beside: bool, attempt: Attempt
) -> None:
    """A document with any value in any field is drawn, and the attempt stays failed."""
    if beside:
        other = replace(_PLACE, rank=0, node="w-0", group_rank=0)
        attempt.join(_ENTRY)
        attempt.write(make_error(place=other, at_ms=30, message="Connection closed by peer"))
    else:
        failure = replace(failure, sent_signals=())
    changes = _field_changes(pb.WorkerErrorDocument.FromString(encode(failure)))
    assert len(changes) > 200
    name = f"firstfault/errors/{error_key_for(failure)}"
    # by turns: what a field does beside others and alone seldom differs
    for data in changes[beside::2]:
        attempt.put(name, data)
        _drawn(attempt)


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.JOINED])
def test_a_roster_entry_with_any_value_hides_no_failure(phase: Phase, attempt: Attempt) -> None:
    """A roster entry with any value in any field is drawn,
    and cannot turn a failure into one of an earlier round.
    """
    attempt.write(_RAISED)
    entry = replace(_ENTRY, phase=phase)
    name = f"firstfault/roster/{roster_key_for(entry)}"
    for data in _field_changes(pb.RosterEntry.FromString(encode_presence(entry))):
        attempt.put(name, data)
        _drawn(attempt)


def test_a_roster_entrys_name_outweighs_its_content(attempt: Attempt) -> None:
    """Its name counts, and a note says that the entry was not used."""
    attempt.write(_RAISED)
    later = replace(_ENTRY, place=replace(_ENTRY.place, round=99))
    attempt.put(f"firstfault/roster/{roster_key_for(_ENTRY)}", encode_presence(later))
    job = attempt.reader().job()
    assert (job.round, len(job.failures), len(job.history)) == (2, 1, 0)
    assert any("contradicts its name" in note for note in job.coverage.notes)
    assert not job.coverage.complete


# --- how much is read -----------------------------------------------------------------------------


def test_documents_beyond_the_limit_are_counted_as_not_read(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader opens so many documents and bytes of an attempt;
    the others are counted as not read.
    """
    attempt.write(*(make_error(rank) for rank in range(12)))
    attempt.put("firstfault/errors/other.pb", encode(make_error(20)))
    monkeypatch.setattr(fetch, "MAX_OPENED_FILES", 10)
    job = attempt.reader().job()
    assert (len(job.failures), job.coverage.unreadable) == (10, 3)
    assert "not opened: of an attempt 10 documents" in job.coverage.notes[0]
    monkeypatch.setattr(fetch, "MAX_OPENED_FILES", 100)
    monkeypatch.setattr(fetch, "MAX_OPENED_BYTES", 5 * len(encode(make_error(0))))
    job = attempt.reader().job()
    assert 0 < len(job.failures) <= 5
    assert job.coverage.unreadable == 13 - len(job.failures)


def test_roster_entries_beyond_the_limit_count_by_their_names(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Roster entries count too; what their names say is used."""
    attempt.join(
        *(
            make_presence(Phase.FAILED, node=f"w-{node}", group_rank=node, nodes=20)
            for node in range(20)
        )
    )
    monkeypatch.setattr(fetch, "MAX_OPENED_FILES", 15)
    job = attempt.reader().job()
    assert attempt.reader().is_error()
    assert {entry.place.group_rank for entry in job.roster} == set(range(20))


def test_an_object_that_grew_beyond_the_limit_is_refused() -> None:
    """A document and an entry beyond the limit are refused, although the listing said less."""
    large = encode(make_error(0)) + bytes(MAX_DOCUMENT_BYTES)
    for read in (
        lambda: decode(large, DocumentRef("e1.pb")),
        lambda: decode_presence(large, "r1.pb"),
    ):
        with pytest.raises(BadDocumentError, match="more than the limit"):
            read()
