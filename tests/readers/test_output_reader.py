"""The reader: Flyte's OutputReader, what it adds to it, and the three layouts."""

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from flyteidl.core.execution_pb2 import ExecutionError as FlyteExecutionError
from flyteidl.core.literals_pb2 import Literal, LiteralMap, Primitive, Scalar

from firstfault.conclude import Conclusion, Judgment, find_judgment
from firstfault.errors import BadDocumentError, ObjectNotFoundError, ObjectTooLargeError, UsageError
from firstfault.layout import VERDICT_JSON, error_key_for
from firstfault.model import Decision, JobErrors, Kind, Origin, Verdict
from firstfault.output_reader import ExecutionError, MultiErrorFileOutputReader
from firstfault.retry import RetryContext, decide, never
from firstfault.strategies import get_strategy
from firstfault.testing import START_NS, make_error, make_presence
from firstfault.wire.documents import MAX_DOCUMENT_BYTES, encode
from firstfault.wire.json_schemas import to_json
from tests.readers.conftest import Attempt
from tests.seals import encode_sealed_verdict

_OUTPUTS = LiteralMap(literals={"loss": Literal(scalar=Scalar(primitive=Primitive(integer=7)))})


def test_outputs_are_returned_as_flytes_message(attempt: Attempt) -> None:
    """The outputs of a successful attempt are returned as flyteidl's message."""
    attempt.put("outputs.pb", _OUTPUTS.SerializeToString())
    reader = attempt.reader()
    assert (reader.exists(), reader.deck_exists(), reader.is_error()) == (True, False, False)
    assert reader.read() == (_OUTPUTS, None)
    attempt.put("deck.html", b"<html>")
    assert reader.deck_exists(), "each call looks again"


def test_outputs_without_flyteidl_name_the_extra_to_install(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without flyteidl, an error names the extra that brings it; errors are read without it."""
    monkeypatch.setitem(sys.modules, "flyteidl.core.literals_pb2", None)
    attempt.put("outputs.pb", _OUTPUTS.SerializeToString())
    with pytest.raises(
        UsageError, match=r"^Flyte's outputs need flyteidl, .* pip install .*'firstfault\[flyte\]'"
    ):
        attempt.reader().read()
    assert attempt.reader().exists()


@pytest.mark.parametrize(
    ("data", "code"), [(None, "OutputsNotFound"), (b"not protobuf", "OutputsBadFormat")]
)
def test_unreadable_outputs_are_flytes_error_with_their_uri(
    attempt: Attempt, data: bytes | None, code: str
) -> None:
    """Missing or invalid outputs are Flyte's error with their URI,
    which the system's budget retries.
    """
    if data is not None:
        attempt.put("outputs.pb", data)
    reader = attempt.reader()
    assert reader.is_file()
    assert reader.exists() is (data is not None)
    outputs, error = reader.read()
    assert outputs is None
    assert (error.code, error.kind, error.recoverable) == (code, Origin.SYSTEM, True)
    assert f"{attempt.uri}/outputs.pb" in error.message


def test_read_error_carries_the_whole_report(attempt: Attempt) -> None:
    """The error for Flyte has the root's code, time and worker, and the report as its message."""
    attempt.write(
        make_error(
            3,
            node="w-1",
            code="USER:KeyError",
            kind=Kind.RECOVERABLE,
            message="bad sample",
        ),
        make_error(0, node="w-0", at_ms=30, exception="RuntimeError", message="peer is gone"),
    )
    reader = attempt.reader()
    with ThreadPoolExecutor(8) as pool:  # threads may share a reader
        (read,) = {asked.result() for asked in [pool.submit(reader.read_error) for _ in range(8)]}
    assert (read.code, read.kind, read.recoverable) == ("USER:KeyError", Origin.USER, True)
    assert (read.timestamp_ns, read.worker) == (START_NS, "w-1")
    assert read.error_uri == reader.errors_uri == f"{attempt.uri}/firstfault/errors"
    assert read.message.splitlines()[0] == "ValueError rank 3 w-1 retry: bad sample"
    assert "  rank 0: RuntimeError: peer is gone" in read.message
    assert f"firstfault show {attempt.uri}" in read.message


def test_a_stock_root_cause_keeps_its_text(attempt: Attempt) -> None:
    """If the root cause is a file of Flyte's own, its text is not touched."""
    attempt.write_flyte_error(
        f"error-{'a' * 32}.pb",
        message="Trace:\n\n  File x\n\nMessage:\n\n  boom",
        seconds=5,
        worker="w-1",
    )
    assert attempt.reader().read_error().message == "Trace:\n\n  File x\n\nMessage:\n\n  boom"


def test_the_three_layouts_are_read_together(attempt: Attempt) -> None:
    """Our documents, error-<uuid>.pb and error.pb beside the outputs are read together."""
    attempt.write(make_error(0, node="w-0", at_ms=2_000, message="ours"))
    attempt.write_flyte_error(
        f"error-{'a' * 32}.pb",
        seconds=START_NS // 10**9 + 1,
        worker="w-1",
        message="with a uuid",
    )
    attempt.write_flyte_error("error.pb", message="plain")
    conclusion = attempt.reader().conclude()
    assert [failure.message for failure in conclusion.job.failures] == [
        "with a uuid",
        "ours",
        "plain",
    ]
    assert conclusion.verdict.node == "w-1"


@pytest.mark.parametrize(
    "below", ["", "/", "/firstfault", "/firstfault/errors", "/firstfault/errors/"]
)
def test_a_folder_may_be_named_at_any_depth(attempt: Attempt, below: str) -> None:
    """The output prefix, our folder in it and its errors folder all lead
    to documents and roster.
    """
    (name,) = attempt.write(make_error(3))
    attempt.join(make_presence(nodes=2))
    reader = MultiErrorFileOutputReader(attempt.uri + below)
    verdict = reader.verdict()
    assert (verdict.ranks, verdict.coverage.expected) == ((3,), 2)
    assert reader.errors_uri == f"{attempt.uri}/firstfault/errors"
    # each failure has its document's name, URI, size and modification time
    path = attempt.folder / "firstfault" / "errors" / name
    ((document,),) = (failure.documents for failure in reader.job().failures)
    assert (document.name, document.uri, document.size) == (name, str(path), path.stat().st_size)
    assert abs(document.last_modified_ns - path.stat().st_mtime_ns) < 10_000


def test_a_single_document_can_be_read(attempt: Attempt) -> None:
    """One document, ours or Flyte's, can be read by itself."""
    (name,) = attempt.write(make_error(3))
    attempt.write(make_error(0, at_ms=-5))
    attempt.write_flyte_error("error.pb", message="plain")
    ours = MultiErrorFileOutputReader(f"{attempt.uri}/firstfault/errors/{name}")
    verdict = ours.verdict()
    assert (verdict.ranks, verdict.coverage.notes) == ((3,), ())
    assert ours.errors_uri.endswith(name)
    assert MultiErrorFileOutputReader(f"{attempt.uri}/error.pb").verdict().message == "plain"


@pytest.mark.parametrize(("name", "folder"), [("error.pb", "."), ("errors", "firstfault")])
def test_a_bare_name_is_a_path_in_the_working_directory(
    attempt: Attempt,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    folder: str,
) -> None:
    """A bare name is a path in the working directory."""
    attempt.write_flyte_error("error.pb", message="here")
    attempt.write(make_error(message="here"))
    monkeypatch.chdir(attempt.folder / folder)
    assert MultiErrorFileOutputReader(name).verdict().message == "here"


@pytest.mark.parametrize(
    ("data", "kind", "reason"),
    [
        (None, ObjectNotFoundError, "error-x"),
        (b"", BadDocumentError, r"error-x\.pb is empty"),
        (bytes(MAX_DOCUMENT_BYTES + 1), ObjectTooLargeError, r"error-x\.pb"),
    ],
    ids=["missing", "empty", "too large"],
)
def test_an_unreadable_single_document_raises_an_error(
    attempt: Attempt,
    data: bytes | None,
    kind: type[Exception],
    reason: str,
) -> None:
    """A single document that is missing, broken or too large raises an error,
    also inside a running event loop.
    """
    if data is not None:
        attempt.put("error-x.pb", data)

    async def inside() -> None:
        MultiErrorFileOutputReader(f"{attempt.uri}/error-x.pb").verdict()

    with pytest.raises(kind, match=reason):
        asyncio.run(inside())


def test_foreign_files_are_noted_and_broken_entries_missed(attempt: Attempt) -> None:
    """A file in the errors folder that is not a document is only noted;
    an unreadable roster entry is missed.
    """
    attempt.write(make_error())
    attempt.join(make_presence(nodes=1))
    for name in ("errors/README.md", "errors/old/e.pb", "roster/README.md"):
        attempt.put(f"firstfault/{name}", b"")
    coverage = attempt.reader().verdict().coverage
    assert (coverage.unreadable, coverage.complete) == (0, True)
    (foreign,) = coverage.notes
    assert foreign.endswith("ignored: README.md")
    attempt.put("firstfault/roster/r1-broken.pb", b"")
    coverage = attempt.reader().verdict().coverage
    assert not coverage.complete
    (note,) = {*coverage.notes} - {foreign}
    assert note.startswith("roster entry not readable: r1-broken.pb: ")


def test_a_file_name_that_is_no_utf8_is_read(tmp_path: Path) -> None:
    """A file whose name is no UTF-8, as a disk may have it, is read like any other."""
    folder = tmp_path / "firstfault" / "errors"
    folder.mkdir(parents=True)
    (folder / os.fsdecode(b"e\xff.pb")).write_bytes(encode(make_error(3, message="bad sample")))
    conclusion = MultiErrorFileOutputReader(str(tmp_path)).conclude()
    assert conclusion.verdict.ranks == (3,)


def test_the_strategy_is_chosen_by_name_or_passed(attempt: Attempt) -> None:
    """The default strategy is evidence; another is given by name or as a function."""
    attempt.write(
        make_error(0, at_ms=0, kind=Kind.RECOVERABLE, message="not yet"), make_error(1, at_ms=5)
    )

    def backwards(job: JobErrors) -> Verdict:
        return get_strategy("earliest")(replace(job, failures=job.failures[1:]))

    assert attempt.reader().verdict().ranks == (0,)
    assert attempt.reader(strategy="earliest").verdict().strategy == "earliest"
    assert attempt.reader(strategy=backwards).verdict().ranks == (1,)


def test_the_callers_policy_and_context_decide(attempt: Attempt) -> None:
    """The caller's policy and context decide."""
    attempt.write(make_error(kind=Kind.RECOVERABLE))
    assert attempt.reader().decision().retry
    assert not attempt.reader(retry_policy=never()).decision().retry
    seen = []

    def policy(verdict: Verdict, context: RetryContext) -> bool:
        seen.append(context)
        return False

    context = RetryContext(attempt=2, pods_alive=False)
    conclusion = attempt.reader(retry_policy=policy).conclude(context)
    assert seen == [context]
    assert not conclusion.decision.enforced


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"expected_nodes": 0}, "expected_nodes must be at least 1"),
        ({"settle_seconds": -1}, "settle_seconds must not be negative"),
        ({"strategy": "no_such"}, "unknown strategy 'no_such'; available: "),
    ],
)
def test_an_invalid_argument_is_refused_before_reading(
    options: dict[str, Any], reason: str
) -> None:
    """An invalid argument raises a UsageError before anything is read."""
    with pytest.raises(UsageError, match=reason):
        MultiErrorFileOutputReader("out", **options)


def test_a_callers_copies_are_added_if_the_storage_lacks_them(attempt: Attempt) -> None:
    """A caller's own copies are added only if they are not in the storage."""
    shared = make_error(0, at_ms=9, message="uploaded")
    lost = make_error(1, at_ms=0, message="lost")
    copies = {
        f"firstfault/errors/{error_key_for(error)}": encode(error) for error in (shared, lost)
    }
    attempt.put(next(iter(copies)), encode(shared))
    conclusion = attempt.reader(copies=copies).conclude()
    assert [failure.message for failure in conclusion.job.failures] == ["lost", "uploaded"]
    assert conclusion.verdict.document_count == 2


_SEALED = Decision(
    retry=True,
    kind=Kind.RECOVERABLE,
    origin=Origin.USER,
    enforced=True,
    reason="the task's own policy",
)


def _seal(conclusion: Conclusion, decision: Decision = _SEALED, **changes: Any) -> bytes:
    return encode_sealed_verdict(conclusion.verdict, decision, message="the report", **changes)


def _lose_documents(attempt: Attempt) -> None:
    for path in (attempt.folder / "firstfault" / "errors").iterdir():
        path.unlink()


def test_the_sealed_decision_holds_while_documents_are_the_same(attempt: Attempt) -> None:
    """The sealed decision is used while the documents are the same,
    and the caller names no policy and strategy.
    """
    attempt.write(make_error())
    before = attempt.reader().conclude()
    attempt.put("error.pb", _seal(before))
    after = attempt.reader().conclude()
    assert after.decision == _SEALED
    assert (after.job.failures, after.verdict) == (
        before.job.failures,
        before.verdict,
    ), "a seal is no failure"
    dead = attempt.reader().conclude(RetryContext(pods_alive=False))
    assert dead.decision == replace(_SEALED, enforced=False)
    assert attempt.reader(retry_policy=never()).decision().reason == "the policy never retries"
    assert attempt.reader(strategy="earliest").decision() != _SEALED


def test_a_reader_enforces_nothing_without_flyte(attempt: Attempt) -> None:
    """What the nodes of a job under torchrun published as advice stays advice;
    so is what a reader decides itself.
    """
    failure = make_error()
    attempt.write(replace(failure, place=replace(failure.place, engine="plain")))
    before = attempt.reader().conclude()
    assert before.job.engine == "plain"
    assert not before.decision.enforced
    for enforced in (False, True):
        attempt.put("error.pb", _seal(before, replace(_SEALED, enforced=enforced)))
        assert attempt.reader().conclude().decision.enforced is enforced


def test_a_seal_that_rests_on_less_does_not_decide(attempt: Attempt) -> None:
    """With a document more than the seal has, verdict and decision are made again."""
    attempt.write(make_error(3, at_ms=5))
    attempt.put("error.pb", _seal(attempt.reader().conclude()))
    attempt.write(make_error(0, at_ms=0, message="late"))
    conclusion = attempt.reader().conclude()
    assert conclusion.verdict.message == "late"
    assert conclusion.decision == decide(conclusion.verdict)


def test_a_scheduler_follows_the_published_verdict_despite_late_documents(attempt: Attempt) -> None:
    """A scheduler follows the verdict and the decision that the nodes published,
    although a document came late.
    """
    attempt.write(make_error(3, at_ms=5))
    before = attempt.reader().conclude()
    assert find_judgment(before) == Judgment(before.verdict, before.decision)
    attempt.put("error.pb", _seal(before))
    attempt.write(make_error(0, at_ms=0, message="late"))
    judgment = find_judgment(attempt.reader().conclude())
    assert (judgment.verdict.headline, judgment.decision, judgment.is_sealed) == (
        before.verdict.headline,
        _SEALED,
        True,
    )
    assert judgment.verdict.root == before.verdict.root, (
        "a caller may ask what kind of fault it was"
    )
    for_flyte = attempt.reader().read_error()
    assert (for_flyte.recoverable, for_flyte.timestamp_ns) == (True, before.verdict.timestamp_ns)
    assert "late" not in for_flyte.message.splitlines()[0]
    assert not attempt.reader(retry_policy=never()).read_error().recoverable, (
        "the caller's own policy"
    )


def test_the_published_verdict_and_decision_are_printed_together(attempt: Attempt) -> None:
    """A reader that judges the same documents otherwise, as a later version may,
    prints the nodes' verdict.
    """
    attempt.write(make_error(3, at_ms=5), make_error(0, at_ms=0, message="first"))
    other = replace(attempt.reader().verdict(), ranks=(3,), headline="by an older version")
    attempt.put("error.pb", encode_sealed_verdict(other, _SEALED))
    found = attempt.reader().conclude()
    assert (found.verdict.headline, found.decision) == ("by an older version", _SEALED)
    judged_again = attempt.reader(strategy="evidence").conclude()
    assert judged_again.verdict.ranks == (0,)
    assert judged_again.decision != _SEALED


def test_the_file_for_the_next_attempt_replaces_a_missing_error_file(attempt: Attempt) -> None:
    """If a lagging file system hides error.pb, the verdict in verdict.json beside it counts."""
    attempt.write(make_error(3))
    verdict = attempt.reader().verdict()
    attempt.put(VERDICT_JSON, b"{")
    assert attempt.reader().conclude().sealed is None
    attempt.put(VERDICT_JSON, to_json(verdict, _SEALED).encode())
    found = attempt.reader().conclude()
    assert (found.verdict, found.decision, find_judgment(found).is_sealed) == (
        verdict,
        _SEALED,
        True,
    )


def test_the_sealed_strategy_is_the_default(attempt: Attempt) -> None:
    """Without a strategy of the caller's that of the seal is used, if it is known."""
    attempt.write(make_error(0, at_ms=0, kind=Kind.RECOVERABLE), make_error(1, at_ms=5))
    first = attempt.reader(strategy="earliest").conclude()
    attempt.put("error.pb", _seal(first))
    assert attempt.reader().verdict().strategy == "earliest"
    attempt.put("error.pb", _seal(first, strategy="of_the_future"))
    assert attempt.reader().verdict().strategy == "evidence"


def test_the_sealed_verdict_is_used_when_the_documents_are_gone(attempt: Attempt) -> None:
    """Without documents the sealed verdict is used, and a note says so."""
    attempt.write(make_error(3, node="w-1", message="bad sample"))
    attempt.put("firstfault/errors/README.md", b"")
    conclusion = attempt.reader().conclude()
    attempt.put("error.pb", _seal(conclusion))
    _lose_documents(attempt)
    again = attempt.reader().conclude()
    assert again.verdict.headline == conclusion.verdict.headline
    assert again.verdict.ranks == (3,)
    assert not again.verdict.coverage.complete
    assert again.verdict.coverage.notes[0] == conclusion.verdict.coverage.notes[0]
    assert again.verdict.coverage.notes[-1].endswith("this is the verdict that the nodes sealed")
    assert again.decision == _SEALED


def test_the_seal_with_the_most_documents_is_used(attempt: Attempt) -> None:
    """The seal with the most documents is used, not the latest."""
    few = attempt.reader()
    attempt.write(make_error(3, at_ms=5, message="few"))
    attempt.put(f"error-{'f' * 32}.pb", _seal(few.conclude()))
    attempt.write(make_error(0, at_ms=0, message="many"))
    attempt.put(f"error-{'e' * 32}.pb", _seal(few.conclude()))
    _lose_documents(attempt)
    assert attempt.reader().verdict().message == "many"


def test_flyte_fields_cover_flytes_own() -> None:
    """The error has code, message, kind, recoverable, time, worker and URI,
    as Flyte's ExecutionError has.
    """
    ours = {field.name for field in fields(ExecutionError)}
    theirs = {field.name for field in FlyteExecutionError.DESCRIPTOR.fields}
    assert {"recoverable", "timestamp_ns"} <= ours
    assert theirs - ours <= {"timestamp", "recoverability"}
