"""List an attempt's folders in as few requests as possible, and select the documents to open.

The selection is pure: it depends only on names and on the documents read so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from firstfault.layout import (
    ErrorKey,
    Layout,
    RosterKey,
    error_key_for,
    is_bundle,
    is_error_file,
    is_of_nodes,
    is_restart_record,
    is_stock_error_file,
    join_name,
)
from firstfault.model import Phase, Unopened, WorkerError
from firstfault.store import ObjectInfo, Page, ReadableStore
from firstfault.utils.run_sync import each, gathered

_STOCK = "error"
"""Start of a listing: Flyte's own files sort after this name, and before our folders."""
_BEFORE_NAMES = "!"
"""Sorts before all names in a folder. Some storages don't accept a trailing slash instead."""
_AFTER_KEYS = "e1-:"
"""Sorts after every key of grammar version 1: ":" is the character after "9"."""
_CONCURRENT_PARTS = 32
"""Maximum number of listing parts that are read concurrently."""
_LAST = 1 << 64


# --- listing --------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Named:
    """A listed error document with its fields parsed from the name;
    about 400 bytes. Compared by identity.
    """

    key: ErrorKey
    size: int
    last_modified_ns: int | None
    """None: the document may exist only as a copy in a node's bundle."""

    @property
    def moment(self) -> int:
        """The sort key by time, in nanoseconds; documents without a time come last."""
        return _LAST if self.key.timestamp_ns is None else self.key.timestamp_ns

    @property
    def process(self) -> tuple[int | None, int | None, int]:
        """The process that the document is about:
        the same for documents of a worker and of its agent.
        """
        return (self.key.rank, self.key.group_rank, self.key.incarnation)


@dataclass
class Listing:
    """The files of one attempt. Object names are paths relative to the layout's root."""

    layout: Layout
    documents: list[Named] = field(default_factory=list)
    """Error documents with names of the grammar."""
    others: list[ObjectInfo] = field(default_factory=list)
    """Documents with unknown names, which must all be opened."""
    foreign: list[str] = field(default_factory=list)
    """Names of files that aren't documents."""
    stock: list[ObjectInfo] = field(default_factory=list)
    """Flyte's own error files."""
    roster: list[ObjectInfo] = field(default_factory=list)
    bundles: list[ObjectInfo] = field(default_factory=list)
    """Bundles with copies of documents and roster entries."""
    restarts: list[ObjectInfo] = field(default_factory=list)
    """Records of restarts within the attempt."""
    in_order: bool = True
    """Whether all pages so far were sorted by name."""
    rest: str | None = None
    """The name after which to continue listing, up to the last key; None: all keys are listed."""
    rest_after_keys: str | None = None
    """The name after which to continue listing the files behind the keys; None: all are listed."""

    @property
    def of_nodes(self) -> list[ObjectInfo]:
        """Bundles with the files of all nodes, if each node has a separate folder."""
        return [item for item in self.bundles if is_of_nodes(item.base)]

    def change_mark(self) -> tuple[object, ...]:
        """Return a value that changes when an object is added, removed or overwritten."""
        # documents are immutable and may be many, so the sum of their uuids is enough
        rest = frozenset((*self.others, *self.stock, *self.roster, *self.of_nodes, *self.restarts))
        return (
            len(self.documents),
            sum(int(document.key.uuid, 16) for document in self.documents),
            rest,
        )

    def item(self, document: Named) -> ObjectInfo:
        """Return the listed object of a document."""
        return ObjectInfo(
            f"{self.layout.errors}/{document.key}", document.size, document.last_modified_ns
        )

    def last_round(self) -> int:
        """Return the highest round in the names of documents; -1 if there are none."""
        return max((document.key.round for document in self.documents), default=-1)

    def add(self, objects: Iterable[ObjectInfo]) -> None:
        """Add objects, sorted by kind."""
        for item in objects:
            folder, _, name = item.name.rpartition("/")
            if folder == self.layout.errors:
                key = ErrorKey.parse(name)
                if key is not None:
                    self.documents.append(Named(key, item.size, item.last_modified_ns))
                elif is_error_file(name):
                    self.others.append(item)
                else:
                    self.foreign.append(name)
            elif folder == self.layout.roster:
                if is_error_file(name):
                    self.roster.append(item)
                elif is_bundle(name):
                    self.bundles.append(item)
                elif is_restart_record(name):
                    self.restarts.append(item)
            elif self.layout.has_stock and not folder and is_stock_error_file(name):
                self.stock.append(item)


async def begin(
    store: ReadableStore,
    layout: Layout,
    eager: Callable[[ObjectInfo], None] = lambda _: None,
    small: int = 0,
) -> Listing:
    """List two pages concurrently: the first documents, and the first names after the keys.

    The first page has the earliest failures of the last round, the second page its roster. If
    `Listing.in_order` is False, the storage doesn't sort by name, and the listing must be started
    over by folder.

    Args:
        store: the store of the layout's root.
        layout: the attempt's folders.
        eager: called with the first document by name as soon as it is listed, to start reading
            early.
        small: `eager` isn't called if the page has at most this number of objects.
    """
    listing = Listing(layout)
    end = _get_keys_end(layout)

    async def documents() -> None:
        page = await store.page(_STOCK if layout.has_stock else f"{layout.errors}/{_BEFORE_NAMES}")
        item = next(
            (item for item in page.objects if item.name.startswith(f"{layout.errors}/")), None
        )
        if item is not None and len(page.objects) > small:
            eager(item)
        listing.rest = _take(listing, page, end)

    async def after_keys() -> None:
        listing.rest_after_keys = _take(listing, await store.page(end), None)

    await gathered(documents(), after_keys())
    return listing


async def list_everything(
    store: ReadableStore,
    layout: Layout,
    begun: Listing | None = None,
    cuts: Sequence[str] = (),
) -> Listing:
    """Return the complete listing of an attempt's folders; continues a listing from `begin`.

    Args:
        store: the store of the layout's root.
        layout: the attempt's folders.
        begun: the listing to continue.
        cuts: sorted paths below the root that split the remaining listing into parts, which are
            read concurrently. The paths need not exist.
    """
    # without sorted pages, positions between pages mean nothing: then start over and list folder by
    # folder
    if begun is not None and begun.in_order:
        end = _get_keys_end(layout)
        parts = [
            *_split_range(begun.rest, cuts, end),
            *_split_range(begun.rest_after_keys, cuts, None),
        ]

        async def read_part(part: tuple[str, str | None]) -> None:
            start: str | None
            start, end = part
            while start is not None and begun.in_order:
                start = _take(begun, await store.page(start), end)

        await each(read_part, parts, _CONCURRENT_PARTS)
        if begun.in_order:
            return begun
    listing = Listing(layout)

    async def read(folder: str) -> None:
        found = await store.list(folder)
        listing.add(
            ObjectInfo(join_name(folder, item.name), item.size, item.last_modified_ns)
            for item in found
        )

    await gathered(*map(read, (layout.errors, layout.roster, *([""] if layout.has_stock else []))))
    return listing


def _get_keys_end(layout: Layout) -> str:
    return f"{layout.errors}/{_AFTER_KEYS}"


def _take(listing: Listing, page: Page, end: str | None) -> str | None:
    """Add a page up to the name `end`; return the name after which to continue,
    None if the listing is complete.
    """
    listing.in_order &= page.is_sorted
    listing.add(item for item in page.objects if end is None or item.name <= end)
    last = page.objects[-1].name if page.objects else ""
    if not page.has_more or (end is not None and last >= end):
        return None
    errors, roster = listing.layout.errors, listing.layout.roster
    if end is None:
        # "0" is the character after "/", so this is the end of the roster folder; files after it
        # aren't ours
        return max(last, f"{roster}/{_BEFORE_NAMES}") if last < f"{roster}0" else None
    # after Flyte's own files, jump to the documents: folders in between may be large
    return last if last.startswith(_STOCK) else max(last, f"{errors}/{_BEFORE_NAMES}")


def _split_range(
    start: str | None, cuts: Iterable[str], end: str | None
) -> list[tuple[str, str | None]]:
    """Split a listing into parts: for each, the name before its first name, and its last name.

    Args:
        start: the name after which to continue; None: the listing is complete.
        cuts: sorted names at which to split.
        end: the last name; None: no limit.
    """
    if start is None:
        return []
    between = [name for name in cuts if name > start and (end is None or name < end)]
    return list(zip([start, *between], [*between, end], strict=True))


# --- which documents of a large attempt are opened ------------------------------------------------

SMALL_ATTEMPT = 128
"""Maximum number of documents, and of roster entries, in a small attempt: all of them are opened.
"""
FIRST_STEP_OF_EACH_FAULT = 16
"""Number of documents to open of each fault in the first step."""
FIRST_STEP = 1024
"""Number of documents to open in the first step, of all faults together."""
NEXT_STEP = 256
"""Number of documents to open in each further step."""
MAX_STEPS = 6
"""Maximum number of further steps."""
MAX_SIMULTANEOUS = 16
"""Maximum number of simultaneous documents, and of Flyte's own files, that `earliest` opens."""
EARLIER_ROUNDS = 32
"""Number of documents of earlier rounds to open in a large attempt."""


def by_time(documents: Iterable[Named]) -> list[Named]:
    """Sort documents by time, then by rank."""
    return sorted(
        documents, key=lambda document: (document.moment, document.key.rank or 0, document.key.uuid)
    )


def of_round(
    documents: Iterable[Named], number: int, newest: Mapping[int | None, int]
) -> list[Named]:
    """Return the documents of a round and of later rounds by time,
    without a node's earlier incarnations.

    Args:
        documents: all documents of an attempt.
        number: the round.
        newest: the newest incarnations in this round's roster, by group rank; if empty, those in
            the names count.
    """
    found = [document for document in documents if document.key.round >= number]
    incarnations = dict(newest)
    for key in [document.key for document in found] if not newest else ():
        incarnations[key.group_rank] = max(incarnations.get(key.group_rank, 0), key.incarnation)

    def is_newest(key: ErrorKey) -> bool:
        # without a group rank or an incarnation, treat it as the newest
        return (
            key.group_rank is None
            or not key.incarnation
            or key.incarnation >= incarnations.get(key.group_rank, 0)
        )

    return by_time(
        document for document in found if document.key.round > number or is_newest(document.key)
    )


def unconfirmed(
    documents: Iterable[Named], number: int, newest: Mapping[int | None, int]
) -> list[Named]:
    """Return the documents with a later round than `number`,
    or a newer incarnation than the roster's.
    """

    def is_newer(key: ErrorKey) -> bool:
        return key.round > number or key.incarnation > newest.get(key.group_rank, key.incarnation)

    return [document for document in documents if is_newer(document.key)]


def by_fault(documents: Iterable[Named]) -> dict[str, list[Named]]:
    """Group documents by the fingerprint in their names; the order stays the same."""
    groups: dict[str, list[Named]] = {}
    for document in documents:
        groups.setdefault(document.key.fingerprint, []).append(document)
    return groups


def of_processes(documents: Iterable[Named], among: Iterable[Named]) -> Iterator[Named]:
    """Yield the documents in `among` about the same processes as `documents`,
    written by worker or agent.
    """
    wanted = {document.process for document in documents if document.key.rank is not None}
    return (document for document in among if document.process in wanted)


def newest_incarnations(listing: Listing) -> dict[int | None, int] | None:
    """Return each node's newest incarnation in the documents' last round;
    None if the roster's last round differs.
    """
    keys = [key for item in listing.roster if (key := RosterKey.parse(item.base)) is not None]
    last = listing.last_round()
    return (
        None
        if keys and max(key.round for key in keys) != last
        else list_round_incarnations(keys, last)
    )


def list_round_incarnations(keys: Iterable[RosterKey], round_: int) -> dict[int | None, int]:
    """Return each node's newest incarnation in a round."""
    newest: dict[int | None, int] = {}
    for key in keys:
        if key.round == round_:
            newest[key.group_rank] = max(newest.get(key.group_rank, 0), key.incarnation)
    return newest


def first_documents(listing: Listing, newest: Mapping[int | None, int] | None) -> list[Named]:
    """Return the documents with the last round's earliest time;
    none if these aren't enough for `earliest`.
    """
    is_small = len(listing.documents) <= SMALL_ATTEMPT
    if (
        newest is None
        or is_small
        or listing.others
        or listing.foreign
        or len(listing.stock) > MAX_SIMULTANEOUS
    ):
        return []
    documents = of_round(listing.documents, listing.last_round(), newest)
    first = [
        document
        for document in documents[: MAX_SIMULTANEOUS + 1]
        if document.moment == documents[0].moment
    ]
    return first if len(first) <= MAX_SIMULTANEOUS else []


def sample_faults(groups: Mapping[str, Sequence[Named]]) -> list[Named]:
    """Return the documents to open first: of each fault the earliest, the last,
    and some in between.

    If there are too many faults, half of the documents are of the rarest faults and half of the
    earliest ones: the root cause is usually rare, and early.
    """
    share = max(1, min(FIRST_STEP_OF_EACH_FAULT, FIRST_STEP // max(len(groups), 1)))
    chosen = list(groups.values())
    if len(chosen) > FIRST_STEP:
        rare = sorted(range(len(chosen)), key=lambda index: len(chosen[index]))[: FIRST_STEP // 2]
        chosen = [chosen[index] for index in sorted({*rare, *range(FIRST_STEP // 2)})]
    return [document for documents in chosen for document in _sample(documents, share)]


def _sample(documents: Sequence[Named], count: int) -> list[Named]:
    if len(documents) <= count:
        return list(documents)
    # half of the sample are the earliest documents, the rest are spread evenly and include the last
    early = max(count // 2, 1)
    rest = count - early
    step = (len(documents) - 1 - early) / max(rest - 1, 1)
    places = sorted({len(documents) - 1 - int(number * step) for number in range(rest)})
    return [*documents[:early], *(documents[place] for place in places)]


def unopened_by_fault(
    documents: Iterable[Named], opened: Mapping[Named, object]
) -> tuple[Unopened, ...]:
    """Summarize the unopened documents by fault, the largest group first."""
    found = []
    for fingerprint, members in by_fault(documents).items():
        left = [document.key for document in members if document not in opened]
        if not left:
            continue
        said = {
            read.fingerprint for read in map(opened.get, members) if isinstance(read, WorkerError)
        }
        ranks = {key.rank for key in left if key.rank is not None}
        nodes = {key.group_rank for key in left if key.group_rank is not None}
        names_hash = sum(int(key.uuid, 16) for key in left)
        name = min(said, default=f"?:{fingerprint}")
        found.append(
            Unopened(name, len(left), tuple(sorted(ranks)), tuple(sorted(nodes)), names_hash)
        )
    return tuple(sorted(found, key=lambda group: (-group.count, group.fingerprint)))


def agrees(key: ErrorKey, error: WorkerError) -> bool:
    """Whether a document agrees with its name."""
    return error_key_for(error, key.uuid) == str(key)


def roster_entries_to_open(items: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Return the last round's entries, without "joined" entries of nodes that have a final one,
    and unknown files.
    """

    def life(key: RosterKey) -> tuple[int, int | None, int]:
        return (key.round, key.group_rank, key.incarnation)

    keys = {item.name: RosterKey.parse(item.base) for item in items}
    last = max((key.round for key in keys.values() if key is not None), default=0)
    ended = {
        life(key) for key in keys.values() if key is not None and key.phase is not Phase.JOINED
    }
    return [
        item
        for item in items
        if (key := keys[item.name]) is None
        or (key.round == last and (key.phase is not Phase.JOINED or life(key) not in ended))
    ]
