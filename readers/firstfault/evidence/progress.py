"""How far the ranks came in the collectives of each group, and which of them the others waited for.

torch's flight recorder, or the text that its watchdog printed, shows how many collectives of each group a rank did.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from firstfault.evidence.signatures import Pattern
from firstfault.model import Collective, CollectiveProgress, WorkerError
from firstfault.model.failure import DEFAULT_GROUP, name_of_group

_COUNTS = Pattern(
    r"\[PG (?:ID \d+ PG GUID )?(?P<guid>[^\s(\]]+) ?(?:\((?P<description>[^)\n]*)\))? ?Rank \d+\]"
    r"[^\n]*?(?:work(?: sequence id)?: (?P<number>\d{1,18})[, ][^\n]*?)?"
    r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,18}), last completed (?:NCCL )?work: (?P<completed>-?\d{1,18})"
)
"""What torch's watchdogs and monitors print since 2.2."""
_WORK = Pattern(
    r"Work\w*\(\s*SeqNum=(?P<number>\d{1,18}), OpType=(?P<operation>\w+)"
    r"(?:,\s+NumelIn=(?P<input>\d+), NumelOut=(?P<output>\d+))?"
)
"""The collective that has timed out."""
_RAN = Pattern(
    r"(?:ran for|\[TC\][^\n]*Operation timed out after) (?P<ms>\d{1,12}) (?:milliseconds before timing out|ms\b)"
)
"""How long it ran; torch 2.15's other NCCL backend tells neither the collective nor counters."""
_UNNAMED = ""
"""The group of a text that names none, or of a recorder that doesn't tell its name."""
_FEW = 8
"""Members of a group that a sentence lists."""
_UNKNOWN_SIZE = 1 << 30
_OF_ALL = re.compile(
    r"nccl\w*:_?(?:all_?reduce|all_?gather|reduce_scatter|all_?to_?all|barrier)(?!.*coalesced)", re.IGNORECASE
)
"""A collective that ends on no rank before all ranks have given it their data."""
_MESSAGE = re.compile(r":(?:send|recv) \d+(?:->|<-)(?P<peer>\d{1,7})$")

Progress = dict[str, dict[int, CollectiveProgress]]
"""By group and global rank."""


def progress_in_text(text: str) -> tuple[CollectiveProgress, ...]:
    """Return each group's progress as torch's watchdog or monitor printed it last."""
    counted: dict[str, CollectiveProgress] = {}
    numbers: dict[str, str] = {}
    for found in _COUNTS.find_all(text):
        guid, description = found["guid"], found.get("description", "")
        name = name_of_group(guid, description or (DEFAULT_GROUP if guid == "0" else ""))
        counted[name] = CollectiveProgress(name, "", max(int(found["enqueued"]), 0), max(int(found["completed"]), 0))
        numbers[found.get("number", "")] = name
    for found in _WORK.find_all(text)[:1]:
        number, operation = int(found["number"]), found["operation"]
        sizes = f"{found['input']} -> {found['output']} elements" if "input" in found else ""
        work = Collective(number, operation, sizes, state="started")
        name = numbers.get(found["number"], next(iter(counted), _UNNAMED) if len(counted) <= 1 else _UNNAMED)
        known = counted.get(name, CollectiveProgress(name, "", number, number - 1))
        counted[name] = replace(known, last=(work,))
    return tuple(counted.values())


def printed_by(failure: WorkerError) -> str:
    """Return the texts in which a watchdog's lines may be: the end of the log, then the message."""
    return f"{failure.printed}\n{failure.message}"


def waited_ns(failure: WorkerError) -> int:
    """Return how long a rank had waited in a collective when its watchdog gave up, nanoseconds; 0: unknown."""
    found = _RAN.search(printed_by(failure))
    return int(found["ms"]) * 1_000_000 if found is not None else 0


def progress_by_group(workers: Sequence[WorkerError]) -> tuple[Progress, Progress]:
    """Return the progress that the flight recorders tell, and the one that texts tell, by group and rank.

    Groups of one name with other members are other groups. In the first, a member that has called none of its group's
    collectives has a count of 0.
    """
    recorded: Progress = defaultdict(dict)
    printed: Progress = defaultdict(dict)
    ranked = [(failure.rank, failure) for failure in workers if failure.rank is not None]
    every = [(rank, progress) for rank, failure in ranked for progress in failure.collectives]
    variants: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for _, progress in every:
        variants[progress.group].update([progress.members] if progress.members else [])
    for rank, progress in every:
        if name := _label(progress, rank, variants[progress.group]):
            recorded[name][rank] = without_messages(progress)
    for rank, failure in ranked:
        for progress in progress_in_text(printed_by(failure)):
            printed[_label(progress, rank, variants[progress.group])][rank] = progress
    known = {rank for rank, _ in every} - {rank for rank, progress in every if not progress.group}
    compared = {group: _comparable(group, members, known) for group, members in recorded.items()}
    names = {*recorded, *printed} - {_UNNAMED}
    if _UNNAMED in printed and len(names) <= 1:  # it is the only group
        name = next(iter(names), DEFAULT_GROUP)
        printed[name] = {**printed.pop(_UNNAMED), **printed.get(name, {})}
    return {group: members for group, members in compared.items() if members}, dict(printed)


def _comparable(group: str, members: dict[int, CollectiveProgress], known: set[int]) -> dict[int, CollectiveProgress]:
    """Return the members whose collectives are counted; a rank of `known` without a counter has called none."""
    silent = known.intersection(members_of(members)) - members.keys()
    ranks = members | {rank: CollectiveProgress(group, "", 0, 0) for rank in silent}
    if not any(entry.is_p2p for progress in members.values() for entry in progress.last):
        return ranks
    # a counter without a collective beside it counts messages
    return {rank: item for rank, item in ranks.items() if any(not entry.is_p2p for entry in item.last)}


def members_of(progress: Mapping[int, CollectiveProgress]) -> tuple[int, ...]:
    """Return the global ranks of a group's members; empty: unknown."""
    return next((item.members for item in progress.values() if item.members), ())


def _label(progress: CollectiveProgress, rank: int, variants: Collection[tuple[int, ...]]) -> str:
    """Return the name of a group; with its members if several groups have this name."""
    if len(variants) <= 1:
        return progress.group
    members = progress.members or next((found for found in variants if rank in found), ())
    return f"{progress.group} {_listed(members)}" if progress.group and members else _UNNAMED


def _listed(members: Sequence[int]) -> str:
    some = ", ".join(map(str, members[:_FEW]))
    return f"of ranks {some}" + (f", ... ({len(members)} ranks)" if len(members) > _FEW else "")


def without_messages(progress: CollectiveProgress) -> CollectiveProgress:
    """Return a group's progress by its collectives alone: gloo counts sends and receives with them.

    Each rank of a pipeline sends and receives another number of messages.
    """
    called = max((work.sequence for work in progress.last if not work.is_p2p), default=progress.enqueued)
    if called >= progress.enqueued or progress.completed is None:
        return progress
    return replace(progress, enqueued=called, completed=called - progress.is_outstanding)


# --- for whom the others waited ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Late:
    """A rank that is behind in a group."""

    group: str
    count: int
    usual: int
    size: int
    """Number of the group's members."""


def behind(
    groups: Progress, apart: Mapping[str, Sequence[tuple[int, str]]], peers: Mapping[int, set[int]]
) -> tuple[dict[int, str], bool]:
    """Return the ranks for which the others waited in their collectives, each with the reason, and if all are guilty.

    The smallest groups decide: in larger ones, those are behind, too, that waited for them. A rank that didn't see the
    end of collectives that need its data, and which have ended on the others, is guilty as well: its GPU, or the thread
    that watches it, is stuck. If those are other ranks, or ranks wait for each other, one of them may be a victim.

    `apart` has the groups whose ranks called a collective differently, with the ranks that differ; `peers` is what
    `message_peers` returns.
    """
    late = _not_called(groups, apart)
    stuck = _not_seen(groups)
    if stuck and stuck.keys() >= late.keys():
        return {rank: _sentence("saw the end of", at, groups) for rank, at in stuck.items()}, True
    awaited = {rank: peers.get(rank, set()) & late.keys() for rank in late}
    late = {rank: at for rank, at in late.items() if all(rank in awaited[peer] for peer in awaited[rank])}
    places = {(at.group, at.count) for at in late.values()}
    is_one_fault = not stuck and not any(awaited[rank] for rank in late) and len(places) == len(dict(places))
    reasons = {rank: _sentence("saw the end of", at, groups) for rank, at in stuck.items()}
    return reasons | {rank: _sentence("called", at, groups) for rank, at in late.items()}, is_one_fault


def message_peers(workers: Iterable[WorkerError]) -> dict[int, set[int]]:
    """Return the ranks for whose messages, or to send them one, each rank waited."""
    found: dict[int, set[int]] = {}
    for failure in workers:
        for progress in failure.collectives if failure.rank is not None else ():
            waiting = progress.last if progress.is_outstanding else ()
            ends = [_MESSAGE.search(entry.operation) for entry in waiting if entry.state != "completed"]
            places = [int(end["peer"]) for end in ends if end is not None]
            members = [progress.members[place] for place in places if place < len(progress.members)]
            found.setdefault(failure.rank or 0, set()).update(members)
    return found


def _not_called(groups: Progress, apart: Mapping[str, Sequence[tuple[int, str]]]) -> dict[int, _Late]:
    """Return the ranks that haven't called a collective of a group in which most of its members wait.

    A rank that is behind in one group because it waits in another is a victim of the rank that is behind there: of
    tensor, pipeline and data parallel groups the one that is stuck first explains the others.

    After a collective in which ranks differ, one that called the same as most isn't behind: it waits in that
    collective, which the others may have completed with less data.
    """
    usual: dict[str, int] = {}
    late: dict[str, dict[int, int]] = {}
    for group, members in groups.items():
        counts = {rank: progress.enqueued for rank, progress in members.items()}
        # what most have called
        most, number = Counter(counts.values()).most_common(1)[0]
        usual[group] = most if number * 2 > len(members) else max(counts.values())
        # ranks that have called the first collective that has ended on no rank wait for the others, however far ahead
        first = 1 + max(item.enqueued if item.completed is None else item.completed for item in members.values())
        few = {rank: count for rank, count in counts.items() if count < min(usual[group], first)}
        if group in apart:
            few = {rank: few[rank] for rank, _ in apart[group] if rank in few}
        if few and len(few) * 2 <= len(counts):
            late[group] = few
    return _innermost(
        (rank, _Late(group, count, usual[group], len(members_of(groups[group])) or _UNKNOWN_SIZE))
        for group, counts in sorted(late.items())
        for rank, count in sorted(counts.items())
        if not any(
            other != group and rank not in ranks and rank in groups[other] and groups[other][rank].is_outstanding
            for other, ranks in late.items()
        )
    )


def _not_seen(groups: Progress) -> dict[int, _Late]:
    """Return the ranks that haven't seen the end of any collective in which they wait, though others have.

    Only in groups whose members all have a recorder: dumps of a job in which one has died may be of different times.
    """
    found: list[tuple[int, _Late]] = []
    waits: set[int] = set()
    for group, members in sorted(groups.items()):
        ends = {rank: item.enqueued if item.completed is None else item.completed for rank, item in members.items()}
        most, size = max(ends.values()), len(members)
        is_whole = set(members_of(members)) == members.keys()
        if not is_whole:
            continue
        unseen = [rank for rank, progress in members.items() if _has_unseen(progress, most)]
        unseen = unseen if len(unseen) * 2 <= size else []
        found += [(rank, _Late(group, ends[rank], most, size)) for rank in unseen]
        waits.update(rank for rank, progress in members.items() if progress.is_outstanding and rank not in unseen)
    # no rank is behind in this because it waits for another one, so each group counts
    return _by_rank((rank, at) for rank, at in found if rank not in waits)


def _has_unseen(progress: CollectiveProgress, ended: int) -> bool:
    """Whether the first collective that hasn't completed on a rank needs the data of all, and had ended elsewhere."""
    done = progress.completed
    left = (entry for entry in progress.last if done is not None and entry.sequence > done and not entry.is_p2p)
    first = next(left, None)
    return first is not None and first.sequence <= ended and _OF_ALL.match(first.operation) is not None


def _innermost(found: Iterable[tuple[int, _Late]]) -> dict[int, _Late]:
    """Return the ranks of the smallest groups."""
    ranks = _by_rank(found)
    smallest = min((at.size for at in ranks.values()), default=0)
    return {rank: at for rank, at in ranks.items() if at.size == smallest}


def _by_rank(found: Iterable[tuple[int, _Late]]) -> dict[int, _Late]:
    """Return each rank with its smallest group; of several with that in which it is farthest behind."""
    return dict(sorted(found, key=lambda item: (-item[1].size, item[1].usual - item[1].count, item[1].group)))


def _sentence(verb: str, at: _Late, groups: Progress) -> str:
    members = members_of(groups[at.group])
    is_listed = at.group == DEFAULT_GROUP or at.group.endswith(_listed(members)) or not 0 < len(members) <= _FEW
    which = at.group if is_listed else f"{at.group} {_listed(members)}"
    return f"it {verb} {at.count} collectives of group {which}, the others {at.usual}"
