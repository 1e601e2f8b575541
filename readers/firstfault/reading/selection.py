"""Which documents of a large attempt are opened. Pure: from names and what was read so far to names.

A small attempt is read whole. In a large cascade the names tell which documents are alike: several of each fault are
opened, then those of the ranks that were named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.layout import ErrorKey, RosterKey
from firstfault.model import Phase, Reads, Unopened, WorkerError

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from firstfault.model import JobErrors
    from firstfault.reading.listing import KeyTable, Listing
    from firstfault.store import ObjectInfo

SMALL = 128
"""As many documents are all opened, and as many roster entries."""
OF_EACH_FAULT = 16
"""Documents that are opened of one fault, at first."""
AT_FIRST = 1024
"""Documents that are opened at first, of all faults together."""
MORE = 256
"""Documents that are opened in each step after that."""
STEPS = 6
NO_FAULT = "0" * 12
AT_ONCE = 16
"""Files of Flyte's own that `earliest` opens beside the first document, at most; and documents of one moment."""
OF_HISTORY = 32
"""Documents of earlier rounds that are opened of a large attempt."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a strategy wants to read."""

    reads: Reads
    named: Callable[[JobErrors], Iterable[int]] = lambda _: ()
    """After a first look: the ranks whose documents it wants as well."""


def newest_incarnations(listing: Listing) -> dict[int | None, int] | None:
    """Return the incarnation of each node of the documents' last round; None if a roster has another last round."""
    parsed = [RosterKey.parse(item.name) for item in listing.roster]
    keys = [key for key in parsed if key is not None]
    last = listing.table.last_round()
    return None if keys and max(key.round for key in keys) != last else incarnations_of_round(keys, last)


def incarnations_of_round(keys: Iterable[RosterKey], round_: int) -> dict[int | None, int]:
    """Return each node's newest incarnation in a round."""
    newest: dict[int | None, int] = {}
    for key in keys:
        if key.round == round_:
            newest[key.group_rank] = max(newest.get(key.group_rank, 0), key.incarnation)
    return newest


def first_rows(listing: Listing, newest: Mapping[int | None, int] | None) -> list[int]:
    """Return the documents of the last round's first moment; none where more than they have to be looked at."""
    table = listing.table
    is_small = len(table) <= SMALL
    if newest is None or is_small or listing.others or listing.foreign or len(listing.stock) > AT_ONCE:
        return []
    # in the order of their names, and so of time
    rows = table.rows_of_round(table.last_round(), newest)
    first = [row for row in rows[: AT_ONCE + 1] if table.moment(row) == table.moment(rows[0])]
    return first if len(first) <= AT_ONCE else []


def some_of_each_fault(groups: Mapping[str, array[int]]) -> list[int]:
    """Return the rows to open first: of each fault the earliest, the last, and some between them.

    Where there are more faults than may be opened, those come first that are rare, and those that are early.
    """
    share = max(1, min(OF_EACH_FAULT, AT_FIRST // max(len(groups), 1)))
    chosen = list(groups.values())
    if len(chosen) > AT_FIRST:
        rare = sorted(range(len(chosen)), key=lambda index: len(chosen[index]))[: AT_FIRST // 2]
        chosen = [chosen[index] for index in sorted({*rare, *range(AT_FIRST // 2)})]
    return [row for rows in chosen for row in _some(rows, share)]


def _some(rows: Sequence[int], count: int) -> list[int]:
    if len(rows) <= count:
        return list(rows)
    early = max(count // 2, 1)
    rest = count - early
    step = (len(rows) - 1 - early) / max(rest - 1, 1)
    return [*rows[:early], *sorted({rows[len(rows) - 1 - int(number * step)] for number in range(rest)})]


def unopened_by_fault(table: KeyTable, rows: Iterable[int], opened: Mapping[int, object]) -> tuple[Unopened, ...]:
    """Return what was not opened, by fault."""
    found = []
    for digits, members in table.by_fault(rows).items():
        left = [row for row in members if row not in opened]
        if not left:
            continue
        said = {read.fingerprint for read in map(opened.get, members) if isinstance(read, WorkerError)}
        ranks = {rank for rank in map(table.rank, left) if rank is not None}
        nodes = {node for node in map(table.group_rank, left) if node is not None}
        names_hash = sum(map(table.number, left))
        group = Unopened(
            min(said, default=f"?:{digits}"), len(left), tuple(sorted(ranks)), tuple(sorted(nodes)), names_hash
        )
        found.append(group)
    return tuple(sorted(found, key=lambda group: (-group.count, group.fingerprint)))


def agrees(key: ErrorKey, error: WorkerError) -> bool:
    """Whether a document agrees with its name."""
    place = error.place
    # as the name has it, which is bounded
    said = ErrorKey.parse(
        str(
            ErrorKey(
                place.round,
                error.timestamp_ns,
                place.rank,
                place.group_rank,
                error.fingerprint.partition(":")[2],
                place.incarnation,
                key.uuid,
            )
        )
    )
    return said == key


def roster_entries_to_open(items: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Return the entries of the last round, of a node that has said how it ended that one alone; and foreign ones."""

    def life(key: RosterKey) -> tuple[int, int | None, int]:
        return (key.round, key.group_rank, key.incarnation)

    keys = {item.name: RosterKey.parse(item.name) for item in items}
    last = max((key.round for key in keys.values() if key is not None), default=0)
    ended = {life(key) for key in keys.values() if key is not None and key.phase is not Phase.JOINED}
    return [
        item
        for item in items
        if (key := keys[item.name]) is None
        or (key.round == last and (key.phase is not Phase.JOINED or life(key) not in ended))
    ]
