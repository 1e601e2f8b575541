"""Cases of missing and damaged files; test_assemble has those about rounds and merged documents."""

from typing import Any

import pytest

from firstfault.errors import AccessDeniedError, StoreError, StoreUnavailableError
from firstfault.layout import ErrorKey, error_key_for
from firstfault.model import DocumentRef, Origin, Phase, Scope
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.store import ObjectInfo
from firstfault.store.fsspec_store import FsspecStore
from firstfault.testing import START_NS, make_error, make_job, make_presence
from firstfault.wire.documents import MAX_DOCUMENT_BYTES, encode
from tests.readers.conftest import Attempt

_NS_PER_SECOND = 1_000_000_000

_EXIT = make_error(0, node="w-0", exception=None, exit_code=1)
_TIES = {
    "the lowest rank": ([make_error(rank, node=f"w-{9 - rank}") for rank in (7, 2, 5)], 2),
    "a rank before none": ([make_error(None, node="w-0"), make_error(4, node="w-1")], 4),
    "an exception before a bare exit": ([_EXIT, make_error(6, node="w-1")], 6),
    "both": ([_EXIT, make_error(9, node="w-1"), make_error(5, node="w-2")], 5),
}


@pytest.mark.parametrize(("errors", "rank"), _TIES.values(), ids=_TIES)
def test_same_timestamp_is_decided_by_evidence_then_lowest_rank(
    attempt: Attempt, errors: list, rank: int
) -> None:
    """With equal times evidence decides, then the lowest rank."""
    for name, error in enumerate(errors):
        attempt.put(f"firstfault/errors/{name}.pb", encode(error))
    verdict = attempt.reader(strategy="earliest").verdict()
    assert (verdict.ranks, verdict.confidence) == ((rank,), "low")
    assert any("have the same time" in sentence for sentence in verdict.why)


@pytest.mark.parametrize("folder", ["firstfault/errors/", ""], ids=["ours", "stock"])
def test_a_failure_without_a_time_comes_last_and_is_noted(attempt: Attempt, folder: str) -> None:
    """A failure without a time is not 1970: it comes last, and the verdict says so."""
    attempt.put(f"{folder}error-{'a' * 32}.pb", encode(make_error(0, node="w-0", at_ms=None)))
    attempt.put(f"{folder}error-{'b' * 32}.pb", encode(make_error(1, node="w-1", at_ms=5)))
    verdict = attempt.reader(strategy="earliest").verdict()
    assert verdict.ranks == (1,)
    assert verdict.timestamp_ns == START_NS + 5_000_000
    assert "1 of 2 failures have no recorded time and were put last" in verdict.why


_GOOD = encode(make_error(0, node="w-0", at_ms=-5, message="x" * 100))
_BROKEN = {
    "empty": (b"", "is empty (0 bytes)"),
    "truncated": (_GOOD[: len(_GOOD) // 2], "is not an error document"),
    "oversized": (
        _GOOD + b"\0" * MAX_DOCUMENT_BYTES,
        f"more than the limit of {MAX_DOCUMENT_BYTES}",
    ),
    "undecodable": (b"<html>502 Bad Gateway</html>", "is not an error document"),
    "of another kind": (b"\x10\x01", "has no error"),
}


@pytest.mark.parametrize(("data", "reason"), _BROKEN.values(), ids=_BROKEN)
@pytest.mark.parametrize(
    "name", ["firstfault/errors/broken.pb", f"error-{'b' * 32}.pb"], ids=["ours", "stock"]
)
def test_a_broken_document_is_skipped_counted_and_named(
    attempt: Attempt,
    name: str,
    data: bytes,
    reason: str,
) -> None:
    """An unreadable document is skipped, counted in the coverage, and named with the reason."""
    attempt.put(name, data)
    attempt.write(make_error(3, node="w-1", group_world_size=1))
    reader = attempt.reader()
    verdict = reader.verdict()
    assert verdict.ranks == (3,)
    assert (verdict.coverage.unreadable, verdict.coverage.complete) == (1, False)
    (note,) = verdict.coverage.notes
    assert name.rsplit("/", 1)[-1] in note
    assert reason in note
    assert note in reader.read_error().message


@pytest.mark.parametrize("data", [b"", bytes(MAX_DOCUMENT_BYTES + 1)], ids=["empty", "oversized"])
@pytest.mark.parametrize("name", ["firstfault/errors/broken.pb", "error.pb"], ids=["ours", "stock"])
def test_only_broken_documents_are_an_error_without_a_cause(
    attempt: Attempt, name: str, data: bytes
) -> None:
    """With an unreadable document alone the attempt has failed;
    the verdict is undetermined and names it.
    """
    attempt.put(name, data)
    reader = attempt.reader()
    assert reader.is_error()
    conclusion = reader.conclude()
    assert (conclusion.verdict.scope, conclusion.verdict.coverage.unreadable) == (
        Scope.UNDETERMINED,
        1,
    )
    assert name.rpartition("/")[2] in conclusion.verdict.message
    assert not conclusion.decision.retry
    read = reader.read_error()
    assert (read.code, read.recoverable) == ("ErrorFileBadFormat", False)
    assert read.message.splitlines()[0].startswith("undetermined no retry:")


def test_a_forbidden_document_is_skipped_counted_and_named(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document without read permission is skipped,
    counted and named with the missing permission.
    """
    (secret,) = attempt.write(make_error(0, node="w-0"))
    attempt.write(make_error(3, node="w-1", at_ms=9))
    get = FsspecStore.get

    async def refused(self: FsspecStore, path: str, *, limit: int | None = None) -> bytes:
        if path.endswith(secret):
            raise AccessDeniedError(
                f"cannot read {path}: refused; check the credentials and the read permission"
            )
        return await get(self, path, limit=limit)

    monkeypatch.setattr(FsspecStore, "get", refused)
    verdict = attempt.reader().verdict()
    assert verdict.ranks == (3,)
    assert verdict.coverage.unreadable == 1
    assert secret in verdict.coverage.notes[0]
    assert "the read permission" in verdict.coverage.notes[0]


_ONE_OF_TWO = (
    make_presence(node="w-0", nodes=2),
    make_presence(Phase.JOINED, node="w-1", group_rank=1, nodes=2),
)


@pytest.mark.parametrize(
    ("settle_seconds", "message", "listings"), [(30, "late", 3), (None, "early", 1)]
)
def test_a_late_document_is_waited_for(
    attempt: Attempt,
    monkeypatch: pytest.MonkeyPatch,
    settle_seconds: float | None,
    message: str,
    listings: int,
) -> None:
    """With time to settle, a document that is written after the first listing is the root cause."""
    looks: list[str] = []
    # who does not wait lists both folders at the same time
    before = {"firstfault/roster"} if settle_seconds else {"firstfault/roster", "firstfault/errors"}
    listed = FsspecStore.list

    async def later(self: FsspecStore, folder: str = "") -> list[ObjectInfo]:
        found = await listed(self, folder)
        looks.extend([folder] * folder.endswith("roster"))
        if folder in before:
            before.remove(folder)
            if not before:
                attempt.write(make_error(1, node="w-1", group_rank=1, at_ms=0, message="late"))
                attempt.join(make_presence(node="w-1", group_rank=1, nodes=2))
        return found

    attempt.write(make_error(0, node="w-0", group_rank=0, at_ms=30, message="early"))
    attempt.join(*_ONE_OF_TWO)
    monkeypatch.setattr(FsspecStore, "list", later)
    verdict = attempt.reader(
        **({"settle_seconds": settle_seconds} if settle_seconds else {})
    ).verdict()
    assert (verdict.message, verdict.settled) == (message, True)
    assert verdict.coverage.complete is (settle_seconds is not None)
    assert len(looks) == listings, "with time: two looks while it waited, and the one that it read"


def test_the_wait_is_bounded_and_its_timeout_reported(attempt: Attempt) -> None:
    """If a node never reports, the reader stops waiting, reports the timeout,
    and names the node.
    """
    attempt.write(make_error(0, node="w-0", group_rank=0))
    attempt.join(*_ONE_OF_TWO)
    reader = attempt.reader(settle_seconds=0.01)
    verdict = reader.verdict()
    assert (verdict.settled, verdict.coverage.complete) == (False, False)
    assert "took part but sent no report: w-1" in verdict.coverage.notes
    assert (
        "Unknown: failures on pods that didn't report within the timeout"
        in reader.read_error().message
    )


@pytest.mark.parametrize(("expected_nodes", "settled"), [(1, True), (2, False)])
def test_the_expected_number_of_nodes_ends_the_wait(
    attempt: Attempt, expected_nodes: int, settled: bool
) -> None:
    """The caller's number of nodes, not the roster's, decides how many are waited for."""
    attempt.write(make_error())
    attempt.join(make_presence(nodes=3))
    verdict = attempt.reader(settle_seconds=0.01, expected_nodes=expected_nodes).verdict()
    assert verdict.settled is settled
    assert verdict.coverage.expected == expected_nodes


def test_a_recovered_round_is_no_error(attempt: Attempt) -> None:
    """Failures of round 0 are history once round 1 has begun,
    and no error when it leaves outputs.
    """
    attempt.write(make_error())
    attempt.join(make_presence(Phase.JOINED, round=0), make_presence(Phase.SUCCEEDED, round=1))
    attempt.put("outputs.pb", b"")
    reader = attempt.reader()
    assert not reader.is_error()
    assert reader.conclude() is None
    assert len(reader.job().history) == 1


def test_the_document_is_the_authority_on_its_round(attempt: Attempt) -> None:
    """A name that claims a later round than its document does not make the
    other documents history.
    """
    name = str(ErrorKey(9, START_NS, 0, 0, "", 0, "0" * 32))
    attempt.put(f"firstfault/errors/{name}", encode(make_error(0, at_ms=5, message="claims")))
    attempt.write(make_error(1, message="first"))
    assert attempt.reader().verdict().message == "first"


@pytest.mark.parametrize("outputs", [True, False])
def test_nothing_found_is_not_an_error(attempt: Attempt, outputs: bool) -> None:
    """Without an error document there is no error;
    `read_error` returns Flyte's ErrorFileNotFound.
    """
    if outputs:
        attempt.put("outputs.pb", b"")
    reader = attempt.reader()
    assert not reader.is_error()
    assert (reader.conclude(), reader.verdict(), reader.decision()) == (None, None, None)
    read = reader.read_error()
    assert (read.code, read.kind, read.recoverable) == ("ErrorFileNotFound", Origin.SYSTEM, True)
    assert read.error_uri in read.message


def _refuse_listing(monkeypatch: pytest.MonkeyPatch, error: StoreError) -> None:
    request = FsspecStore.request

    async def refused(self: FsspecStore, verb: str, *more: Any) -> Any:
        if verb == "list":
            raise error
        return await request(self, verb, *more)

    monkeypatch.setattr(FsspecStore, "request", refused)


@pytest.mark.parametrize(
    "error", [AccessDeniedError("list refused"), StoreUnavailableError("no answer")]
)
def test_storage_that_cannot_be_listed_is_never_no_error(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, error: StoreError
) -> None:
    """Every method raises a typed error if the storage cannot be listed,
    also if there are outputs.
    """
    attempt.put("outputs.pb", b"")
    _refuse_listing(monkeypatch, error)
    for name in ("is_error", "read_error", "conclude", "verdict", "decision", "job"):
        with pytest.raises(type(error), match=str(error)):
            getattr(attempt.reader(), name)()


def test_in_a_pod_that_may_write_but_not_list(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that may not list uses the documents that it has, says so,
    and names the missing permission.
    """
    attempt.write(make_error(0, node="w-0", at_ms=-50, message="another pod's"))
    _refuse_listing(
        monkeypatch, AccessDeniedError("refused; check the credentials and the list permission")
    )
    own = make_error(3, node="w-1", group_world_size=2, message="mine")
    reader = attempt.reader(copies={f"firstfault/errors/{error_key_for(own)}": encode(own)})
    verdict = reader.verdict()
    assert verdict.message == "mine"
    assert not verdict.settled
    assert (verdict.coverage.expected, verdict.coverage.reported, verdict.coverage.complete) == (
        2,
        1,
        False,
    )
    (note,) = verdict.coverage.notes
    assert "only the documents at hand" in note
    assert "the list permission" in note
    assert note in reader.read_error().message


@pytest.mark.parametrize(
    ("late_s", "delay_s", "warned"),
    [
        (-600, 0, "about +600 s"),
        (-3, 0, "about +3 s"),
        (-2, 0, ""),
        (0, 0, ""),
        (60, 0, ""),
        (61, 0, "about -61 s"),
        (600, None, ""),
        (600, 600, ""),
    ],
)
def test_clock_skew_is_warned_of_and_the_recorded_time_is_used(
    late_s: int, delay_s: int | None, warned: str
) -> None:
    """The recorded time decides (the RFC's rule); a clock that contradicts the storage's is named.

    A late upload says nothing about the clock if its writer held it back, or if that is not known.
    """
    stamp = START_NS + late_s * _NS_PER_SECOND
    document = DocumentRef("a.pb", last_modified_ns=stamp)
    delay = None if delay_s is None else delay_s * _NS_PER_SECOND
    skewed = make_error(
        0,
        node="w-0",
        upload_delay_ns=delay,
        documents=(document,),
        group_world_size=1,
    )
    verdict = (
        MultiErrorFileOutputReader("unused", strategy="earliest")
        .conclude_from(make_job(skewed))
        .verdict
    )
    assert verdict.ranks == (0,)
    warnings = [sentence for sentence in verdict.why if "clock" in sentence]
    assert len(warnings) == bool(warned)
    if warned:
        order = "the order of times is not reliable"
        assert warnings == [f"the clock of w-0 differs from the storage's by {warned}; {order}"]
    assert verdict.confidence == ("low" if warned else "high")
