"""Read one attempt: wait for its nodes, list its files, open documents, and assemble the result.

A small attempt is read completely. In a large cascade, the names show which documents have the same
fault: several documents of each fault are opened, then documents of the ranks that the strategy
requests. The strategy `earliest` needs only the first page of names and the first documents. If a
name contradicts its document, all are opened.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import replace

from firstfault import model
from firstfault.errors import StoreUnavailableError
from firstfault.layout import ErrorKey, Layout, RosterKey, is_error_file, is_of_entry
from firstfault.model import (
    DocumentsNeeded,
    JobErrors,
    NodePresence,
    ReadingNeeds,
    Seal,
    WorkerError,
)
from firstfault.model.job import nodes_done
from firstfault.reading import fetch, selection
from firstfault.reading.assemble import Snapshot, Unreadable, compute_judged_round
from firstfault.reading.listing import ListedDocument, Listing, begin_listing, list_everything
from firstfault.reading.request import Patience, Request
from firstfault.store import ObjectInfo, ReadableStore
from firstfault.utils.loggers import get_logger
from firstfault.utils.run_sync import gather_all, map_concurrently, try_await

logger = get_logger(__name__)

_FIRST_POLL_SECONDS = 0.05
_MAX_POLL_SECONDS = 1.0
_PAUSE_PER_LISTING = 10
"""`follow` pauses at least this multiple of the last listing's duration,
to limit the load on the storage.
"""
_MAX_PAUSE_SECONDS = 60.0


async def read_job(store: ReadableStore, request: Request) -> JobErrors:
    """Wait for the nodes as requested, and return the job.

    Raises:
        StoreError: the folder could not be listed, or the layout's only document could not be read.
    """
    known, done = await await_nodes(store, request.layout, request.patience)
    job = await read_once(store, request, known)
    return replace(job, settled=done or request.patience.seconds <= 0)


async def follow(
    store: ReadableStore, request: Request, interval_seconds: float
) -> AsyncGenerator[JobErrors, None]:
    """Yield the job at once and after each change, until all nodes are done. `AttemptReader.follow`
    has the details.

    Raises:
        StoreError: the storage refuses a request.
    """
    known: dict[str, NodePresence] = {}
    listed_state: tuple[object, ...] | None = None
    while True:
        began = time.monotonic()
        job = None
        try:
            begun = await begin_listing(store, request.layout) if store.has_ordered_pages else None
            listing = await list_everything(store, request.layout, begun)
            # opening documents is the expensive part, so skip it while the listing is unchanged
            if (state := listing.get_state()) != listed_state:
                job = await _ListingReader(
                    *await fetch.add_copies(store, listing), request, known
                ).read()
                listed_state = state
        except StoreUnavailableError as error:
            logger.warning("the storage does not answer, retrying: %s", error)
        if job is not None:
            done = nodes_done(known.values(), request.patience.expected_nodes)
            yield replace(job, settled=done)
            if done:
                return
        took = time.monotonic() - began
        await asyncio.sleep(
            min(max(interval_seconds, _PAUSE_PER_LISTING * took), _MAX_PAUSE_SECONDS)
        )


async def read_once(
    store: ReadableStore, request: Request, known: Mapping[str, NodePresence] | None = None
) -> JobErrors:
    """List an attempt, read it once, and return the job.

    Args:
        store: the store of the layout's root.
        request: the options.
        known: roster entries that were read earlier, by name.

    Raises:
        StoreError: the folder could not be listed, or the layout's only document could not be read.
    """
    layout = request.layout
    if layout.document:
        return request.job_of(
            fetch.build_snapshot([await fetch.read_document(store, layout.document)])
        )
    begun = None
    if store.has_ordered_pages and request.find_needs(()).documents is DocumentsNeeded.EARLIEST:
        snapshot, begun = await _read_first(store, layout)
        if snapshot is not None:
            return request.job_of(snapshot)
    elif store.has_ordered_pages:
        begun = await begin_listing(store, layout)
    # {} uses no copies; None reads the bundles after the listing
    copies: Mapping[str, bytes] | None = {} if request.fresh else None
    if begun is not None and not request.fresh:
        copies = await fetch.read_node_copies(store, begun)
    listing = await list_everything(
        store, layout, begun, fetch.find_part_starts(copies or {}, layout)
    )
    return await _ListingReader(
        *await fetch.add_copies(store, listing, copies), request, dict(known or {})
    ).read()


# --- waiting --------------------------------------------------------------------------------------


async def await_nodes(
    store: ReadableStore, layout: Layout, patience: Patience
) -> tuple[dict[str, NodePresence], bool]:
    """Read the roster until every node has reported or the wait is over.

    Args:
        store: of the attempt.
        layout: the attempt's folders.
        patience: how long to wait.

    Returns:
        The roster entries that were read, by name, and whether every node has reported.

    Raises:
        StoreError: the roster could not be listed.
    """
    deadline = time.monotonic() + patience.seconds
    pause = _FIRST_POLL_SECONDS
    known: dict[str, NodePresence] = {}
    unreadable: set[str] = set()
    while patience.seconds > 0 and not layout.document:
        # roster entries are immutable, so each is read only once
        new = [
            replace(item, name=f"{layout.roster}/{item.name}")
            for item in await store.list(layout.roster)
            if is_error_file(item.name) and item.name not in known
        ]
        read, bad = await fetch.read_roster(store, new)
        # an unreadable entry counts by its name for now, and `read_once` tries to read it again
        known.update(read)
        unreadable.update(item.name for item in bad)
        roster = list(known.values())
        done = nodes_done(roster, patience.expected_nodes)
        remaining_seconds = deadline - time.monotonic()
        if not done and remaining_seconds > 0 and patience.enough is not None:
            done = await asyncio.to_thread(patience.enough, roster)
        if (
            done
            or remaining_seconds <= 0
            or await _sleep_until_shutdown(
                min(pause, remaining_seconds), patience.shutdown_requested
            )
        ):
            return {name: entry for name, entry in known.items() if name not in unreadable}, done
        pause = min(pause * 1.5, _MAX_POLL_SECONDS)
    return known, False


async def _sleep_until_shutdown(seconds: float, shutdown_requested: threading.Event | None) -> bool:
    """Sleep; return True early if a shutdown is requested."""
    if shutdown_requested is None:
        await asyncio.sleep(seconds)
        return False
    return await asyncio.to_thread(shutdown_requested.wait, seconds)


# --- the first failure alone ----------------------------------------------------------------------


async def _read_first(store: ReadableStore, layout: Layout) -> tuple[Snapshot | None, Listing]:
    """Return a snapshot of the last round's earliest failure, from the first page of names,
    and the listing.

    The snapshot is None if more must be read: the attempt is small or has unknown files, or the
    first document is unreadable, about a stopped process, or about an exception in flight.
    """
    # the first document is requested while the second page is still loading: it saves one round
    # trip
    early_reads: dict[str, asyncio.Task[WorkerError | Seal | Unreadable]] = {}

    def start(item: ObjectInfo) -> None:
        early_reads[item.name] = asyncio.create_task(fetch.read_listed(store, item))

    async def read(item: ObjectInfo) -> WorkerError | Seal | Unreadable:
        task = early_reads.get(item.name)
        return await (task if task is not None else fetch.read_listed(store, item))

    try:
        listing = await begin_listing(store, layout, start, selection.MAX_SMALL_ATTEMPT_FILES)
        newest = selection.find_newest_incarnations(listing)
        first = selection.find_first_documents(listing, newest) if listing.is_sorted else []
        if not first or listing.all_nodes_bundles:
            return None, listing
        documents = await map_concurrently(
            read, [*map(listing.get_object, first), *listing.flyte_error_files]
        )
    finally:
        await asyncio.gather(*early_reads.values(), return_exceptions=True)
    opened = dict(zip(first, documents, strict=False))
    for document, read_of_it in opened.items():
        if not isinstance(read_of_it, WorkerError) or not selection.agrees_with_name(
            document.key, read_of_it
        ):
            return None, listing
        # handled later by the user's code, or caused by the agent's signal: such a failure may not
        # be the root cause
        if read_of_it.in_flight or read_of_it.stopped_by_agent:
            return None, listing
    at_least_phrase = " at least" if listing.resume_name_in_keys is not None else ""
    count = len(listing.documents)
    note = (
        f"only the first page of names was read ({count} documents{at_least_phrase}), and"
        f" {len(first)} were opened"
    )
    current = selection.list_round_documents(
        listing.documents, listing.find_last_round(), newest or {}
    )
    return (
        fetch.build_snapshot(
            documents, notes=(note,), unopened=selection.summarize_unopened(current, opened)
        ),
        listing,
    )


# --- all documents, or several of each fault ------------------------------------------------------


class _ListingReader:
    """Read the documents of one listing."""

    def __init__(
        self,
        store: ReadableStore,
        listing: Listing,
        request: Request,
        roster: dict[str, NodePresence],
    ) -> None:
        self._store = store
        self._request = request
        self._listing = listing
        self._roster = roster
        self._bad_roster: list[Unreadable] = []
        self._room = fetch.Room()
        self._opened: dict[ListedDocument, WorkerError | Seal | Unreadable] = {}
        self._judged: tuple[int, JobErrors] | None = None
        """The last assembled job, with the number of opened documents at that time."""
        self._rest: list[WorkerError | Seal | Unreadable] = []
        self._restarts: tuple[model.RestartRecord, ...] = ()
        self._current: list[ListedDocument] = []
        """Documents of the judged round, by time."""
        self._listed: dict[str, ListedDocument] = {}
        """Documents that a receipt mentions, by name."""
        self._history: list[ListedDocument] = []
        """Documents of earlier rounds and incarnations, by time."""

    async def read(self) -> JobErrors:
        """Read and return the job; adds the roster entries to the given dictionary."""
        documents = self._listing.documents
        is_small = len(documents) <= selection.MAX_SMALL_ATTEMPT_FILES
        opening = self._open(documents if is_small else ())
        await gather_all(self._read_roster(), self._read_rest(), self._read_restarts(), opening)
        named = {receipt.name for entry in self._roster.values() for receipt in entry.receipts}
        self._listed = (
            {name: item for item in documents if (name := str(item.key)) in named} if named else {}
        )
        needs = self._request.find_needs([item for item in self._rest if isinstance(item, Seal)])
        if not is_small and (
            needs.documents is DocumentsNeeded.ALL or not await self._read_sample(needs)
        ):
            await self._open(documents)
        return self._assemble_job()

    async def _read_rest(self) -> None:
        self._rest = await map_concurrently(
            self._read, [*self._listing.unknown_documents, *self._listing.flyte_error_files]
        )

    async def _read_restarts(self) -> None:
        self._restarts = await fetch.read_restarts(self._store, self._listing.restarts)

    async def _read_roster(self) -> None:
        items = [item for item in self._listing.roster if item.base not in self._roster]
        if len(items) > selection.MAX_SMALL_ATTEMPT_FILES:
            items = selection.select_roster_entries(items)
        read, self._bad_roster = await fetch.read_roster(self._store, items, self._room)
        self._roster.update(read)

    async def _open(self, documents: Iterable[ListedDocument]) -> None:
        new = [document for document in documents if document not in self._opened]
        self._opened.update(
            zip(
                new,
                await map_concurrently(self._read, map(self._listing.get_object, new)),
                strict=True,
            )
        )

    async def _read(self, item: ObjectInfo) -> WorkerError | Seal | Unreadable:
        return await fetch.read_listed(self._store, item, self._room)

    async def _read_sample(self, needs: ReadingNeeds) -> bool:
        """Open some documents of each fault, then those of requested ranks. Return False if a name
        contradicts its document.
        """
        documents = self._listing.documents
        keys = [key for key in map(RosterKey.parse, self._roster) if key is not None]
        round_ = compute_judged_round(
            {key.round for key in keys}, {item.key.round for item in documents}, self._restarts
        )
        newest = selection.list_round_incarnations(keys, round_)
        gone_names = {
            receipt.name
            for entry in self._roster.values()
            for receipt in entry.receipts
            if receipt.withdrawn
            and (key := ErrorKey.parse(receipt.name))
            and is_of_entry(key, entry.place)
        }
        current = selection.list_round_documents(documents, round_, newest)
        self._current = [
            document
            for document in current
            if not gone_names or str(document.key) not in gone_names
        ]
        self._history = selection.sort_by_time(set(documents).difference(current))
        groups = selection.group_by_fault(self._current)
        # names without a fingerprint don't identify the fault, so all these documents are opened
        wanted = [*groups.pop("", ()), *self._read_finished(keys)]
        wanted += selection.sample_faults(groups)
        if keys:
            wanted += selection.find_unconfirmed(
                self._current, max(key.round for key in keys), newest
            )[: selection.NEXT_STEP_DOCUMENTS]
        await self._open(self._history[: selection.EARLIER_ROUND_DOCUMENTS])
        # each step opens documents, then asks the strategy, which may request ranks that its
        # suspects depend on
        for _ in range(selection.MAX_STEPS):
            wanted = list(
                {*wanted, *selection.find_related_documents(wanted, self._current)}.difference(
                    self._opened
                )
            )
            if not wanted:
                return True
            await self._open(selection.sort_by_time(wanted))
            read = [
                (document, error)
                for document, error in self._opened.items()
                if isinstance(error, WorkerError)
            ]
            # one wrong name makes the grouping by names unreliable, so open all documents
            if not all(selection.agrees_with_name(document.key, error) for document, error in read):
                return False
            named, why = await try_await(self._find_more_ranks(needs))
            if named is None:  # a broken third-party strategy must not abort the reading
                logger.warning("the strategy failed to name the documents that it wants (%s)", why)
            unopened = [document for document in self._current if document not in self._opened]
            of_named = [document for document in unopened if document.key.rank in (named or ())]
            wanted = [*of_named[: selection.NEXT_STEP_DOCUMENTS], *self._list_unclear(groups)]
        return True

    async def _find_more_ranks(self, needs: ReadingNeeds) -> set[int]:
        """Return the ranks that the strategy requests."""
        return (
            set(needs.find_more_ranks(self._assemble_job()))
            if needs.find_more_ranks is not None
            else set()
        )

    def _read_finished(self, keys: Iterable[RosterKey]) -> list[ListedDocument]:
        """Return the documents of nodes that succeeded: their exceptions in flight were handled."""
        finished = {key.group_rank for key in keys if key.phase is model.Phase.SUCCEEDED}
        return [document for document in self._current if document.key.group_rank in finished][
            : selection.NEXT_STEP_DOCUMENTS
        ]

    def _list_unclear(self, groups: Mapping[str, Sequence[ListedDocument]]) -> list[ListedDocument]:
        """Return more documents of ambiguous faults. A fault is ambiguous if none of its documents
        was readable or only some of its processes were stopped.
        """
        unclear = []
        for documents in groups.values():
            read = [self._opened[document] for document in documents if document in self._opened]
            failures = [item for item in read if isinstance(item, WorkerError)]
            if read and len({bool(item.sent_signals) for item in failures}) != 1:
                unclear += [document for document in documents if document not in self._opened][
                    : selection.FIRST_STEP_DOCUMENTS_OF_FAULT
                ]
        return unclear

    def _assemble_job(self) -> JobErrors:
        """Assemble the documents read so far; cached until another document is opened."""
        opened = len(self._opened)
        if self._judged is None or self._judged[0] != opened:
            self._judged = (opened, self._request.job_of(self._build_snapshot()))
        return self._judged[1]

    def _build_snapshot(self) -> Snapshot:
        notes = tuple(
            f"roster entry not readable: {item.name}: {item.reason}" for item in self._bad_roster
        )
        unopened = selection.summarize_unopened(self._current, self._opened)
        return replace(
            fetch.build_snapshot([*self._opened.values(), *self._rest], notes, unopened),
            roster=tuple(self._roster.values()),
            foreign=tuple(self._listing.foreign_files),
            unopened_history=sum(document not in self._opened for document in self._history),
            listed_names=frozenset(self._listed),
            stored_names=frozenset(
                name for name, item in self._listed.items() if item.last_modified_ns is not None
            ),
            restarts=self._restarts,
        )
