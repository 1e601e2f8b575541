"""A large cascade: few documents are opened, and the verdict is that of all documents."""

from collections.abc import Iterable
from dataclasses import replace
from unittest.mock import Mock

import pytest

from firstfault import model
from firstfault.errors import ObjectNotFoundError, StoreUnavailableError
from firstfault.exceptions.fingerprint import compute_fingerprint
from firstfault.layout import ERRORS, ErrorKey, error_key_for
from firstfault.reading.assemble import Snapshot, assemble
from firstfault.store import ObjectInfo, Page
from firstfault.strategies import (
    AggregationStrategy,
    DocumentsNeeded,
    get_strategy,
    needs_documents,
    run_strategy,
)
from firstfault.testing import START_NS, make_error, make_presence
from lab.cascades.objects import Objects, looked_at

MANY = 600
"""More than are all opened."""
CLOSED = "Connection closed by peer [10.0.0.3]:2{rank:04d}"


def add_written_name(error: model.WorkerError) -> model.WorkerError:
    """Return an error with the name that its writer would give it."""
    return replace(error, documents=(model.DocumentRef(error_key_for(error)),))


def document(rank: int, **fields: object) -> model.WorkerError:
    """Return the document of a rank, with the fingerprint that its writer would give it."""
    place = {"node": f"w-{rank // 8}", "group_rank": rank // 8, "world_size": MANY}
    error = make_error(rank, **{**place, **fields})  # type: ignore[arg-type]
    return add_written_name(replace(error, fingerprint=compute_fingerprint(error)))


def victim(rank: int) -> model.WorkerError:
    """Return the document of a rank that lost its peer."""
    return document(
        rank,
        at_ms=10 + rank / 10,
        exception="RuntimeError",
        message=CLOSED.format(rank=rank),
    )


def root(rank: int = 211, **fields: object) -> model.WorkerError:
    """Return the document of a rank's own fault."""
    return document(rank, **{"at_ms": 5, "message": "bad batch", **fields})


def death(rank: int, **fields: object) -> model.WorkerError:
    """Return the document of an agent about a worker that ended without an exception."""
    return document(rank, exception=None, writer=model.Writer.AGENT, **fields)


def cascade(*others: model.WorkerError, leave_out: Iterable[int] = ()) -> Snapshot:
    """Return the snapshot of a job in which all ranks except `others` lost a peer."""
    gone = {error.rank for error in others} | set(leave_out)
    victims = [victim(rank) for rank in range(MANY) if rank not in gone]
    roster = [
        make_presence(
            phase,
            node=f"w-{node}",
            group_rank=node,
            nodes=MANY // 8,
            ranks=tuple(range(8 * node, 8 * node + 8)),
        )
        for node in range(MANY // 8)
        for phase in (model.Phase.JOINED, model.Phase.FAILED)
    ]
    return Snapshot(documents=(*victims, *others), roster=tuple(roster))


def read_as_objects(
    snapshot: Snapshot, strategy: str | AggregationStrategy = "evidence"
) -> tuple[model.JobErrors, Objects]:
    """Return the verdict on the snapshot, written as objects, and the requests of the reader."""
    objects = Objects.of(snapshot)
    return looked_at(objects, strategy), objects


# --- evidence -------------------------------------------------------------------------------------


def test_a_few_opened_documents_give_the_verdict_of_all() -> None:
    """A few of the documents are opened; verdict, counts and digest are those of all documents."""
    snapshot = cascade(root())
    job, objects = read_as_objects(snapshot)
    whole = assemble(snapshot)
    verdict, full = (run_strategy(get_strategy("evidence"), item) for item in (job, whole))

    documents = objects.gets - MANY // 8
    assert documents < 40, "the other requests are one roster entry for each node"
    assert len(job.failures) == documents
    assert verdict.root.rank == 211
    for field in (
        "ranks",
        "node",
        "code",
        "category",
        "headline",
        "confidence",
        "scope",
        "digest",
        "document_count",
    ):
        assert getattr(verdict, field) == getattr(full, field), field
    assert verdict.victims.count == full.victims.count == MANY - 1
    assert verdict.coverage.complete
    assert (verdict.coverage.expected, verdict.coverage.reported) == (MANY // 8,) * 2
    assert (
        f"read {documents} of {MANY} documents (the rest report the same faults)"
        in verdict.coverage.notes
    )
    assert f"{MANY - 1} ranks failed because of it: stopped, or lost a peer" in verdict.why


def test_one_fault_of_all_ranks_names_all_without_opening_all() -> None:
    """If every rank has the same fault, the verdict has all ranks although few
    documents were opened.
    """
    snapshot = Snapshot(documents=tuple(root(rank) for rank in range(MANY)))
    job, objects = read_as_objects(snapshot)
    verdict = run_strategy(get_strategy("evidence"), job)

    assert objects.gets < 40
    assert verdict.scope is model.Scope.RANKS
    assert verdict.ranks == tuple(range(MANY))
    assert verdict.victims.count == 0
    assert f"{MANY} ranks failed in the same way" in verdict.why


def test_a_fault_at_two_times_names_only_opened_ranks_of_the_first() -> None:
    """If half of the job was killed a minute later,
    the verdict has only opened ranks of the first half.
    """

    def killed(rank: int) -> model.WorkerError:
        at_ms = 0 if rank < MANY // 2 else 60_000
        clock = {"at_ms": at_ms, "boot_id": "one", "monotonic_ns": 1 + at_ms * 1_000_000}
        return death(rank, signal="SIGKILL", exit_code=-9, **clock)

    job, _ = read_as_objects(replace(cascade(), documents=tuple(map(killed, range(MANY)))))
    verdict = run_strategy(get_strategy("evidence"), job)
    opened = {failure.rank for failure in job.failures}
    assert job.unopened
    assert set(verdict.ranks) <= opened
    assert max(verdict.ranks) < MANY // 2


def stopped(rank: int, given: int = 40, **fields: object) -> model.WorkerError:
    """Return the document of an agent about a stopped worker, with its number of collectives."""
    stack = (
        "Current thread 0x00007f (most recent call first):\n"
        '  File "/x/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n'
        '  File "/job/train.py", line 20 in step\n'
    )
    told = {
        "sent_signals": (model.SentSignal("SIGTERM", "rank 7 on w-0 failed: DistBackendError"),),
        "stack_dumps": (model.StackDump(1, rank, stack),),
        "collectives": (model.CollectiveProgress("default_pg", "all_reduce", given, None),),
    }
    ended = {"signal": "SIGTERM", "exit_code": -15, "at_ms": 100 + rank, "message": "stopped"}
    return death(rank, **{**ended, **told, **fields})


def test_the_only_hung_worker_among_stopped_ones_is_opened_and_named() -> None:
    """The only worker with fewer collectives than the others is opened and named."""
    timed_out = document(
        7,
        exception="torch.distributed.DistBackendError",
        message="Timed out waiting 1800000ms for recv operation to complete",
        collectives=(model.CollectiveProgress("default_pg", "all_reduce", 40, None),),
    )
    others = [stopped(rank) for rank in range(MANY) if rank not in {7, 233}]
    job, objects = read_as_objects(cascade(timed_out, *others, stopped(233, 39)))
    verdict = run_strategy(get_strategy("evidence"), job)
    assert objects.gets < 110
    assert verdict.category == "hang"
    assert verdict.ranks == (233,)


def test_an_own_death_among_hundreds_of_stops_is_found() -> None:
    """A worker that its agent did not stop is found among hundreds that were
    stopped by the same signal.
    """
    others = [stopped(rank) for rank in range(MANY) if rank != 233]
    job, _ = read_as_objects(cascade(death(233, signal="SIGTERM", exit_code=-15), *others))
    assert run_strategy(get_strategy("evidence"), job).ranks == (233,)


def test_documents_of_ambiguous_names_are_opened() -> None:
    """If only some opened workers of a fault were stopped, as in names of older versions,
    more are opened.
    """
    ended = [stopped(rank) for rank in range(MANY)]
    ended[3] = death(3, signal="SIGTERM", exit_code=-15, at_ms=1)
    documents = [add_written_name(replace(error, fingerprint="1:" + "a" * 12)) for error in ended]
    job, _ = read_as_objects(replace(cascade(leave_out=range(MANY)), documents=tuple(documents)))
    assert run_strategy(get_strategy("evidence"), job).ranks == (3,)


def test_a_workers_and_its_agents_documents_are_opened_together() -> None:
    """The agent's and the worker's documents about one process are opened together."""
    words = [victim(rank) for rank in range(MANY) if rank != 211]
    deaths = [death(rank, exit_code=70, at_ms=5000 + rank) for rank in range(MANY) if rank != 211]
    job, _ = read_as_objects(replace(cascade(root()), documents=(root(), *words, *deaths)))
    assert all(len(failure.documents) == 2 for failure in job.failures if failure.rank != 211)
    verdict = run_strategy(get_strategy("evidence"), job)
    assert verdict.ranks == (211,)
    assert verdict.victims.count == MANY - 1


def test_a_failure_that_only_a_peer_names_is_opened() -> None:
    """A failure that only a peer's text names is opened."""
    text = "[Rank 233]: Rank 233 failed to pass monitoredBarrier in 1800000 ms"
    others = [rank for rank in range(MANY) if rank != 233]
    blaming = [
        document(rank, at_ms=10 + rank, exception="RuntimeError", message=text) for rank in others
    ]
    job, _ = read_as_objects(cascade(*blaming, victim(233)))
    assert 233 in {failure.rank for failure in job.failures}


def test_a_strategy_whose_find_more_ranks_raises_gets_the_default(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A strategy whose `find_more_ranks` raises gets the default documents,
    and a warning is logged.
    """

    @needs_documents(DocumentsNeeded.SAMPLE, lambda job: [1 // len(job.history)])
    def broken(job: model.JobErrors) -> model.Verdict:
        return run_strategy(get_strategy("evidence"), job)

    job, objects = read_as_objects(cascade(root()), broken)
    assert run_strategy(broken, job).ranks == (211,)
    assert objects.gets < 110
    assert "failed to name the documents that it wants (ZeroDivisionError" in caplog.text


def test_of_10000_faults_a_bounded_number_is_opened() -> None:
    """If every rank has another fault, a bounded number is opened, including the earliest."""
    texts = (f"fault {chr(97 + rank % 26) * (2 + rank // 26)}" for rank in range(3000))
    words = [
        document(rank, node="w-0", group_rank=0, at_ms=rank, message=text)
        for rank, text in enumerate(texts)
    ]
    job, objects = read_as_objects(Snapshot(documents=tuple(words)))
    assert len({error.fingerprint for error in words}) > 2000
    assert objects.gets <= 1500
    assert job.failures[0].rank == 0
    assert job.document_count == 3000


# --- what names say wrong -------------------------------------------------------------------------


def test_a_name_that_contradicts_its_document_opens_all() -> None:
    """If one document contradicts its name, or a strategy does not declare what it reads,
    all are opened.
    """
    liar = root(211, at_ms=900)
    key = ErrorKey.parse(error_key_for(liar))
    assert key is not None
    name = str(replace(key, timestamp_ns=START_NS))
    snapshot = cascade(replace(liar, documents=(model.DocumentRef(name),)))
    for strategy in ("evidence", "earliest"):
        job, _ = read_as_objects(snapshot, strategy)
        assert len(job.failures) == MANY
        assert job.failures[-1].rank == 211
    assert run_strategy(get_strategy("earliest"), job).ranks == (0,)

    def undeclared(job: model.JobErrors) -> model.Verdict:
        return get_strategy("earliest")(job)

    job, _ = read_as_objects(cascade(root()), undeclared)
    assert len(job.failures) == MANY
    plain = [add_written_name(replace(victim(rank), fingerprint="")) for rank in range(MANY)]
    job, _ = read_as_objects(Snapshot(documents=tuple(plain)))
    assert len(job.failures) == MANY, "a name without a fingerprint does not tell the fault"


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_unreadable_document_is_replaced_by_a_similar_one(is_gone: bool) -> None:
    """If chosen documents are damaged, or gone since they were listed, others are opened;
    the unreadable ones count.
    """
    gone = Mock(side_effect=ObjectNotFoundError)
    snapshot = cascade(root())
    bad = {f"{ERRORS}/{error.documents[0].name}" for error in snapshot.documents[:8]}
    objects = Objects.of(snapshot).objects
    broken = {name: (objects[name][0], gone if is_gone else lambda: b"\xff\xff") for name in bad}
    verdict = run_strategy(
        get_strategy("evidence"), looked_at(Objects({**objects, **broken}), "evidence")
    )
    assert verdict.ranks == (211,)
    assert verdict.coverage.unreadable == 8
    assert not verdict.coverage.complete
    assert (
        any("gone between listing and reading" in note for note in verdict.coverage.notes)
        is is_gone
    )


def test_of_recovered_rounds_few_documents_are_opened() -> None:
    """Documents of an earlier round are history: a few are opened, the others counted."""
    snapshot = cascade(root())
    later = make_presence(model.Phase.SUCCEEDED, node="w-0", group_rank=0, nodes=1, round=1)
    for strategy in ("evidence", "earliest"):
        job, objects = read_as_objects(
            replace(snapshot, roster=(*snapshot.roster, later)), strategy
        )
        assert job.failures == ()
        assert job.unopened == ()
        assert 0 < len(job.history) < MANY
        assert objects.gets < 110
        unopened = MANY - len(job.history)
        assert f"{unopened} documents of earlier rounds were not opened" in job.coverage.notes


def test_a_withdrawn_document_counts_as_neither_opened_nor_listed() -> None:
    """A document that its node has withdrawn counts neither as opened nor as listed."""
    handled = root(3, in_flight=True, at_ms=1)
    snapshot = cascade(root(), handled)
    name = handled.documents[0].name
    roster = [
        (
            replace(entry, receipts=(model.Receipt(name, durable=True, withdrawn=True, rank=3),))
            if entry.phase is model.Phase.FAILED and entry.place.group_rank == 0
            else entry
        )
        for entry in snapshot.roster
    ]
    for strategy in ("evidence", "earliest"):
        job, _ = read_as_objects(replace(snapshot, roster=tuple(roster)), strategy)
        assert run_strategy(get_strategy(strategy), job).ranks == (211,)
        assert job.document_count == MANY - 1
        assert not any("earlier rounds" in note for note in job.coverage.notes)


@pytest.mark.parametrize("stored_at", [START_NS, None])
def test_a_stored_document_is_not_missed_although_unopened(stored_at: int | None) -> None:
    """Documents that the storage has are not missed, also unopened ones;
    those that were handed over are.
    """
    snapshot = cascade(root())
    documents = [
        replace(item, documents=(replace(item.documents[0], last_modified_ns=stored_at),))
        for item in snapshot.documents
    ]
    late = tuple(
        model.Receipt(item.documents[0].name, durable=False, error="late", rank=item.rank)
        for item in documents
    )
    roster = [
        replace(entry, receipts=late) if entry.place.group_rank == 0 else entry
        for entry in snapshot.roster
    ]
    job, _ = read_as_objects(replace(snapshot, documents=tuple(documents), roster=tuple(roster)))
    assert job.unopened
    assert job.coverage.complete is (stored_at is not None)
    assert any("was not uploaded" in note for note in job.coverage.notes) is (stored_at is None)


# --- earliest -------------------------------------------------------------------------------------


def test_earliest_opens_one_document() -> None:
    """`earliest` sends two listings and one read, and its notes say what it did not read."""
    job, objects = read_as_objects(cascade(root()), "earliest")
    verdict = run_strategy(get_strategy("earliest"), job)
    assert (objects.lists, objects.gets) == (2, 1)
    assert verdict.ranks == (211,)
    assert verdict.victims.count == MANY - 1
    assert not verdict.coverage.complete
    assert verdict.confidence == "medium"
    assert (
        f"only the first page of names was read ({MANY} documents), and 1 were opened"
        in verdict.coverage.notes
    )


def test_all_documents_with_the_earliest_time_are_opened() -> None:
    """All documents with the earliest time are opened."""
    tied = [root(211), root(12), document(5, at_ms=5, exception=None, exit_code=1)]
    job, objects = read_as_objects(cascade(*tied), "earliest")
    assert objects.gets == 3
    assert run_strategy(get_strategy("earliest"), job).root == next(
        item for item in job.failures if item.rank == 12
    )


@pytest.mark.parametrize("name", ["zzz.pb", "a.pb", "e1-zzz.pb"])
def test_a_document_of_another_name_is_opened(name: str) -> None:
    """A document with any other name is opened: it may be the earliest."""
    snapshot = cascade(root())
    foreign = make_error(99, node="w-12", group_rank=12, at_ms=-5, message="first of all")
    foreign = replace(foreign, documents=(model.DocumentRef(name),))
    job, _ = read_as_objects(
        replace(snapshot, documents=(*snapshot.documents, foreign)), "earliest"
    )
    assert run_strategy(get_strategy("earliest"), job).message == "first of all"


@pytest.mark.parametrize(
    "first",
    [
        root(3, at_ms=1, in_flight=True, sent_signals=(model.SentSignal("SIGTERM", "x"),)),
        stopped(3, at_ms=0),
    ],
    ids=["in flight", "stopped"],
)
def test_earliest_reads_all_if_the_first_process_was_stopped(first: model.WorkerError) -> None:
    """If the first document is about a process that was stopped,
    `earliest` decides as it does on all documents.
    """
    snapshot = cascade(root(), first)
    job, _ = read_as_objects(snapshot, "earliest")
    expected = run_strategy(get_strategy("earliest"), assemble(snapshot))
    assert run_strategy(get_strategy("earliest"), job).ranks == expected.ranks


# --- storages -------------------------------------------------------------------------------------


class _Shuffled(Objects):
    """A store with unsorted pages."""

    async def page(self, after: str = "") -> Page:
        page = await super().page(after)
        return replace(page, objects=page.objects[::-1])

    async def list(self, folder: str = "") -> list[ObjectInfo]:
        return (await super().list(folder))[::-1]


def test_an_unsorted_listing_gives_the_same_answer() -> None:
    """If names are not sorted, everything is listed, and the answer is the same."""
    snapshot = cascade(root())
    for strategy in ("earliest", "evidence"):
        job = looked_at(_Shuffled.of(snapshot), strategy)
        assert run_strategy(get_strategy(strategy), job).ranks == (211,)
        assert job.document_count == MANY


class _Broken(Objects):
    """A store that fails behind the first page."""

    async def page(self, after: str = "") -> Page:
        if "e1-" in after and not after.endswith("e1-:"):
            raise StoreUnavailableError("the second page")
        return await super().page(after)


def test_a_listing_that_breaks_off_is_an_error() -> None:
    """If the second page cannot be read, an error is raised; `earliest` does not need it."""
    snapshot = Snapshot(documents=(root(), *(victim(rank) for rank in range(1200) if rank != 211)))
    with pytest.raises(StoreUnavailableError, match="the second page"):
        looked_at(_Broken.of(snapshot), "evidence")
    assert run_strategy(
        get_strategy("earliest"), looked_at(_Broken.of(snapshot), "earliest")
    ).ranks == (211,)


def test_objects_beside_the_documents_cost_few_requests() -> None:
    """Thousands of objects beside the documents cost a request or two,
    not a listing of all of them.
    """
    others = [
        f"{folder}/{number}"
        for folder in ("experiments", "firstfault/other")
        for number in range(4000)
    ]
    objects = Objects(
        {**Objects.of(cascade(root())).objects, **dict.fromkeys(others, (None, bytes))}
    )
    job = looked_at(objects, "evidence")
    assert job.document_count == MANY
    assert objects.lists < 8
    assert ERRORS.startswith("firstfault/")
