"""Which documents of a large attempt are opened.

The selection is pure: it depends only on names and on the documents read so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from firstfault.layout import ErrorKey, RosterKey, error_key_for
from firstfault.model import Phase, Unopened, WorkerError
from firstfault.reading.listing import ListedDocument, Listing
from firstfault.store import ObjectInfo

MAX_SMALL_ATTEMPT_FILES = 128
"""Maximum number of documents, and of roster entries, in a small attempt: all of them are opened.
"""
FIRST_STEP_DOCUMENTS_OF_FAULT = 16
"""Number of documents to open of each fault in the first step."""
FIRST_STEP_DOCUMENTS = 1024
"""Number of documents to open in the first step, of all faults together."""
NEXT_STEP_DOCUMENTS = 256
"""Number of documents to open in each further step."""
MAX_STEPS = 6
"""Maximum number of further steps."""
MAX_SIMULTANEOUS_DOCUMENTS = 16
"""Maximum number of simultaneous documents, and of Flyte's own files, that `earliest` opens."""
EARLIER_ROUND_DOCUMENTS = 32
"""Number of documents of earlier rounds to open in a large attempt."""


def sort_by_time(documents: Iterable[ListedDocument]) -> list[ListedDocument]:
    """Sort documents by time, then by rank."""
    return sorted(
        documents,
        key=lambda document: (document.sort_time_ns, document.key.rank or 0, document.key.uuid),
    )


def list_round_documents(
    documents: Iterable[ListedDocument], number: int, newest: Mapping[int | None, int]
) -> list[ListedDocument]:
    """Return the documents of a round and of later rounds by time,
    without a node's earlier incarnations.

    Args:
        documents: all documents of an attempt.
        number: the round.
        newest: the newest incarnations in this round's roster, by group rank; if empty, those in
            the names count.
    """
    candidates = [document for document in documents if document.key.round >= number]
    incarnations = dict(newest)
    for key in [document.key for document in candidates] if not newest else ():
        incarnations[key.group_rank] = max(incarnations.get(key.group_rank, 0), key.incarnation)

    def is_newest(key: ErrorKey) -> bool:
        # without a group rank or an incarnation, treat it as the newest
        return (
            key.group_rank is None
            or not key.incarnation
            or key.incarnation >= incarnations.get(key.group_rank, 0)
        )

    return sort_by_time(
        document
        for document in candidates
        if document.key.round > number or is_newest(document.key)
    )


def find_unconfirmed(
    documents: Iterable[ListedDocument], number: int, newest: Mapping[int | None, int]
) -> list[ListedDocument]:
    """Return the documents with a later round than `number`,
    or a newer incarnation than the roster's.
    """

    def is_newer(key: ErrorKey) -> bool:
        return key.round > number or key.incarnation > newest.get(key.group_rank, key.incarnation)

    return [document for document in documents if is_newer(document.key)]


def group_by_fault(documents: Iterable[ListedDocument]) -> dict[str, list[ListedDocument]]:
    """Group documents by the fingerprint in their names, in the same order."""
    groups: dict[str, list[ListedDocument]] = {}
    for document in documents:
        groups.setdefault(document.key.fingerprint, []).append(document)
    return groups


def find_related_documents(
    documents: Iterable[ListedDocument], among: Iterable[ListedDocument]
) -> Iterator[ListedDocument]:
    """Yield the documents in `among` about the same processes as `documents`,
    written by worker or agent.
    """
    wanted = {document.process_key for document in documents if document.key.rank is not None}
    return (document for document in among if document.process_key in wanted)


def find_newest_incarnations(listing: Listing) -> dict[int | None, int] | None:
    """Return each node's newest incarnation in the documents' last round;
    None if the roster's last round differs.
    """
    keys = [key for item in listing.roster if (key := RosterKey.parse(item.base)) is not None]
    last = listing.find_last_round()
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


def find_first_documents(
    listing: Listing, newest: Mapping[int | None, int] | None
) -> list[ListedDocument]:
    """Return the documents with the last round's earliest time;
    none if these aren't enough for `earliest`.
    """
    is_small = len(listing.documents) <= MAX_SMALL_ATTEMPT_FILES
    if (
        newest is None
        or is_small
        or listing.unknown_documents
        or listing.foreign_files
        or len(listing.flyte_error_files) > MAX_SIMULTANEOUS_DOCUMENTS
    ):
        return []
    documents = list_round_documents(listing.documents, listing.find_last_round(), newest)
    first = [
        document
        for document in documents[: MAX_SIMULTANEOUS_DOCUMENTS + 1]
        if document.sort_time_ns == documents[0].sort_time_ns
    ]
    return first if len(first) <= MAX_SIMULTANEOUS_DOCUMENTS else []


def sample_faults(groups: Mapping[str, Sequence[ListedDocument]]) -> list[ListedDocument]:
    """Return the documents to open first: of each fault the earliest, the last,
    and some in between.

    If there are too many faults, half of the documents are of the rarest faults and half of the
    earliest ones: the root cause is usually rare, and early.
    """
    share = max(1, min(FIRST_STEP_DOCUMENTS_OF_FAULT, FIRST_STEP_DOCUMENTS // max(len(groups), 1)))
    chosen = list(groups.values())
    if len(chosen) > FIRST_STEP_DOCUMENTS:
        rare = sorted(range(len(chosen)), key=lambda index: len(chosen[index]))[
            : FIRST_STEP_DOCUMENTS // 2
        ]
        chosen = [chosen[index] for index in sorted({*rare, *range(FIRST_STEP_DOCUMENTS // 2)})]
    return [document for documents in chosen for document in _sample(documents, share)]


def _sample(documents: Sequence[ListedDocument], count: int) -> list[ListedDocument]:
    if len(documents) <= count:
        return list(documents)
    # half of the sample are the earliest documents, the rest are spread evenly and include the last
    early_count = max(count // 2, 1)
    rest_count = count - early_count
    step = (len(documents) - 1 - early_count) / max(rest_count - 1, 1)
    places = sorted({len(documents) - 1 - int(number * step) for number in range(rest_count)})
    return [*documents[:early_count], *(documents[place] for place in places)]


def summarize_unopened(
    documents: Iterable[ListedDocument], opened: Mapping[ListedDocument, object]
) -> tuple[Unopened, ...]:
    """Summarize the unopened documents by fault, the largest group first."""
    summaries = []
    for fingerprint, members in group_by_fault(documents).items():
        unopened_keys = [document.key for document in members if document not in opened]
        if not unopened_keys:
            continue
        fingerprints = {
            read.fingerprint for read in map(opened.get, members) if isinstance(read, WorkerError)
        }
        ranks = {key.rank for key in unopened_keys if key.rank is not None}
        nodes = {key.group_rank for key in unopened_keys if key.group_rank is not None}
        names_hash = sum(int(key.uuid, 16) for key in unopened_keys)
        name = min(fingerprints, default=f"?:{fingerprint}")
        summaries.append(
            Unopened(
                name, len(unopened_keys), tuple(sorted(ranks)), tuple(sorted(nodes)), names_hash
            )
        )
    return tuple(sorted(summaries, key=lambda group: (-group.count, group.fingerprint)))


def agrees_with_name(key: ErrorKey, error: WorkerError) -> bool:
    """Whether a document agrees with its name."""
    return error_key_for(error, key.uuid) == str(key)


def select_roster_entries(items: Sequence[ObjectInfo]) -> list[ObjectInfo]:
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
