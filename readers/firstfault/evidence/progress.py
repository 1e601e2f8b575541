"""Compare the ranks' progress in each group's collectives,
and find the stragglers by these counters.

Counters come from torch's flight recorder, or from the text that its watchdog printed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from firstfault.evidence.signatures import Pattern
from firstfault.model import Collective, CollectiveProgress, WorkerError
from firstfault.model.failure import DEFAULT_GROUP, format_group_name
from firstfault.utils.lazy_pattern import LazyPattern

UNNAMED_GROUP = ""
"""The group of a text or a recorder without a group name."""
MAX_LISTED_MEMBERS = 8
"""Maximum number of ranks listed in a sentence."""
_NS_PER_SECOND = 1_000_000_000
_MAX_STAMPS_APART_NS = 3600 * _NS_PER_SECOND
"""A watchdog's line further from its process's end has another time zone, or is of another failure.
"""
UNKNOWN_GROUP_SIZE = 1 << 30
SEND_OR_RECEIVE = re.compile(r":(?:send|recv) \d+(?:->|<-)(?P<peer>\d{1,7})$")

Progress = dict[str, dict[int, CollectiveProgress]]
"""The progress by group, then by global rank."""

# The counters of a rank's collectives, with the group's name, as torch's watchdogs and monitors
# print them since 2.2
_PRINTED_COUNTERS = Pattern(
    r"\[PG (?:ID \d+ PG GUID )?(?P<guid>[^\s(\]]+) ?(?:\((?P<description>[^)\n]*)\))? ?Rank \d+\]"
    r"[^\n]*?(?:work(?: sequence id)?: (?P<number>\d{1,18})[, ][^\n]*?)?"
    r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,18}), last completed (?:NCCL )?work: (?P<completed>-?\d{1,18})"
)

# The collective that timed out
_TIMED_OUT_WORK = Pattern(
    r"Work\w*\(\s*SeqNum=(?P<number>\d{1,18}), OpType=(?P<operation>\w+)"
    r"(?:,\s+NumelIn=(?P<input>\d+), NumelOut=(?P<output>\d+))?"
)

# The run time of the collective that timed out; torch 2.15's second NCCL backend prints nothing
# else about it
_RUN_TIME = Pattern(
    r"(?:ran for|\[TC\][^\n]*Operation timed out after)[ ]"
    r"(?P<ms>\d{1,12}) (?:milliseconds before timing out|ms\b)"
)


def parse_progress(text: str) -> tuple[CollectiveProgress, ...]:
    """Parse each group's progress from the last lines of torch's watchdog or monitor."""
    counted: dict[str, CollectiveProgress] = {}
    numbers: dict[str, str] = {}
    for counters in _PRINTED_COUNTERS.find_all(text):
        guid = counters["guid"]
        description = counters.get("description", "")
        name = format_group_name(guid, description or (DEFAULT_GROUP if guid == "0" else ""))
        counted[name] = CollectiveProgress(
            name,
            "",
            max(int(counters["enqueued"]), 0),
            max(int(counters["completed"]), 0),
        )
        numbers[counters.get("number", "")] = name
    # The line about the timed-out collective has no group. Counters printed for the same collective
    # number name the group; without them, it is clear only if at most one group was printed.
    for timed_out in _TIMED_OUT_WORK.find_all(text)[:1]:
        number = int(timed_out["number"])
        operation = timed_out["operation"]
        sizes = (
            f"{timed_out['input']} -> {timed_out['output']} elements"
            if "input" in timed_out
            else ""
        )
        work = Collective(number, operation, sizes, state="started")
        name = numbers.get(
            timed_out["number"],
            next(iter(counted), UNNAMED_GROUP) if len(counted) <= 1 else UNNAMED_GROUP,
        )
        known = counted.get(name, CollectiveProgress(name, "", number, number - 1))
        counted[name] = replace(known, last=(work,))
    return tuple(counted.values())


def get_printed_text(failure: WorkerError) -> str:
    """Return the texts that may contain a watchdog's lines: the end of the log,
    then the message.
    """
    return f"{failure.printed}\n{failure.message}"


def get_waited_ns(failure: WorkerError) -> int:
    """Return the nanoseconds in a collective until the watchdog timed out, or 0 if unknown."""
    run_time = _RUN_TIME.search(get_printed_text(failure))
    return int(run_time["ms"]) * 1_000_000 if run_time is not None else 0


@dataclass(frozen=True, slots=True)
class WaitBegin:
    """When the wait began that a watchdog's timeout ended."""

    failure: WorkerError
    time_ns: int
    """The time of the watchdog's line, less `waited_ns`."""
    waited_ns: int


_WATCHDOG_STAMP = LazyPattern(r"^\W{0,3}[EWFI](\d{3,4})[ ](\d\d:\d\d:\d\d)\.")


def find_wait_begin(failure: WorkerError) -> WaitBegin | None:
    """Return when a rank's wait began; None without the time of the watchdog's line,
    or how long the wait had taken.
    """
    waited_ns = get_waited_ns(failure)
    if not waited_ns or failure.timestamp_ns is None:
        return None
    ended_ns = failure.timestamp_ns
    lines = (line for line in get_printed_text(failure).splitlines() if _RUN_TIME.search(line))
    # torch's lines have no year; the failure's time may be that of the launcher's report, which
    # came later
    if stamp := _WATCHDOG_STAMP.search(next(lines, "")):
        year = datetime.fromtimestamp(ended_ns // _NS_PER_SECOND, timezone.utc).year
        try:
            printed = datetime.strptime(
                f"{year} {stamp[1]:0>4} {stamp[2]} +0000", "%Y %m%d %H:%M:%S %z"
            )
        except ValueError:
            return None
        printed_ns = int(printed.timestamp()) * _NS_PER_SECOND
        is_near = abs(printed_ns - ended_ns) < _MAX_STAMPS_APART_NS
        ended_ns = printed_ns if is_near else ended_ns
    return WaitBegin(failure, ended_ns - waited_ns, waited_ns) if ended_ns > waited_ns else None


@dataclass(frozen=True, slots=True)
class ReportedWait:
    """A report of ranks that waited, and of the ranks that they waited for."""

    missing: frozenset[int]
    """The ranks that the report lists as missing."""
    waiters: str
    """The ranks that waited, "ranks 0, 2", or their number; empty if unknown."""
    place: str
    """Where they waited: "barrier save_12"; empty if unknown."""

    def describe(self, awaited: str) -> str:
        """Return "ranks 0, 2 waited for it at barrier save_12",
        with a word for the missing ranks.
        """
        at = f" at {self.place}" if self.place else ""
        return f"{self.waiters or 'other ranks'} waited for {awaited}{at}"


# In reports that compare all ranks: the stragglers, or one rank in each line of a list
_MISSING_RANKS = LazyPattern(r"""(?m)
  (?i:\branks?)[ ](?P<late>\d+(?:,[ ]?\d+)*)[ ]failed[ ]to[ ]pass
| (?:^|\bnames:[ ]|,[ ])/job:\S*/task:(?P<task>\d+)
| (?i:\bmissing[ ]ranks:)[ ]?(?P<listed>\d+(?:,[ ]?\d+)*)
| ^(?P<horovod>\d{1,6}):[ ]\[[A-Za-z_]
| (?i:\bwaiting[ ]for[ ](?:\w+[ ])?ranks?(?:\(s\))?)[ :=]{0,2}[\[{(]?(?P<awaited>\d+(?:,[ ]?\d+)*)
| (?i:\branks?(?:\(s\))?)[ :=]{0,2}[\[{(]?(?P<absent>\d+(?:,[ ]?\d+)*)[\]})]?[ ]
  (?:(?:have|has|had)[ ]not|did[ ]not|didn't|never)[ ](?:reach|arrive|join|enter)
""")
_ARRIVED_RANKS = LazyPattern(
    r"tasks[ ]that[ ]reached[ ]the[ ]barrier:[ ](?P<arrived>\d{1,6})/(?P<size>\d{1,6})"
)


def parse_reported_wait(failure: WorkerError) -> ReportedWait:
    """Parse which ranks a failure's report lists as missing, and at which barrier or tensor."""
    text = failure.message
    lists = (next(filter(None, match.groups()), "") for match in _MISSING_RANKS.finditer(text))
    missing = frozenset(int(rank) for part in lists for rank in part.split(",") if part)
    counted = _ARRIVED_RANKS.search(text)
    waiters = "" if failure.rank is None else f"rank {failure.rank}"
    if counted is not None:
        arrived = int(counted["arrived"])
        size = int(counted["size"])
        waiters = f"{arrived} of {size} ranks"
        if arrived <= MAX_LISTED_MEMBERS and arrived + len(missing) == size:
            others = ", ".join(str(rank) for rank in range(size) if rank not in missing)
            waiters = f"rank{'s' if arrived > 1 else ''} {others}"
    return ReportedWait(missing, waiters, _name_wait_place(text))


# Where those ranks waited: JAX's barrier, torch's, Horovod's tensors
_PLACE_OF_WAIT = LazyPattern(r"""(?m)
  Barrier[ ]timed[ ]out\.[ ](?:Id|Barrier_id):[ ](?P<barrier>[^\s:]+)
| (?P<monitored>monitoredBarrier)
| ^\d{1,6}:[ ]\[(?P<tensor>[A-Za-z_][^\],\s]{0,100})
| ^(?P<stalled>[A-Za-z_][^\s\[]{0,100})[ ]\[missing[ ]ranks
""")


def _name_wait_place(text: str) -> str:
    place = _PLACE_OF_WAIT.search(text)
    if place is None:
        return ""
    if place["barrier"]:
        return f"barrier {place['barrier'].rstrip('.')}"
    return (
        "a monitored barrier"
        if place["monitored"]
        else f"tensor {place['tensor'] or place['stalled']}"
    )


# How many ranks came, to torch's store or to a barrier
_JOINED_WORKERS = LazyPattern(r"""
  world_size=(?P<size>\d{1,6}),[ ](?:worker_count|num_workers_joined)=(?P<count>\d{1,6})
| (?P<joined>\d{1,6})/(?P<of>\d{1,6})[ ]clients[ ]joined
""")


def describe_waits(failures: Sequence[WorkerError]) -> str:
    """Return what ranks waited for according to their texts, or an empty string if no text has it.

    "rank 0 waited for ranks 2, 3 at barrier save_12", "5 of 8 workers joined", "ranks 0, 1 waited
    in ALLREDUCE #7".
    """
    for failure in failures:
        wait = parse_reported_wait(failure)
        if wait.missing:
            return wait.describe(_name_ranks(wait.missing))
        if joined := _JOINED_WORKERS.search(failure.message):
            count = int(joined["count"] or joined["joined"])
            size = int(joined["size"] or joined["of"])
            if count > size:
                return f"{count} workers for a world of {size}: a stale init file or store"
            return f"{count} of {size} workers joined"
    ranks_by_call: dict[str, set[int]] = defaultdict(set)
    for failure in failures:
        if failure.rank is not None and (call := describe_timed_out_call(failure)):
            ranks_by_call[call].add(failure.rank)
    if len(ranks_by_call) != 1:
        return ""
    ((call, ranks),) = ranks_by_call.items()
    return f"{_name_ranks(ranks)} waited in {call}"


def describe_timed_out_call(failure: WorkerError) -> str:
    """Return the collective in which a watchdog's timeout ended a rank, "one-element ALLREDUCE #7",
    or an empty string if it is unknown.
    """
    works = [
        work for progress in parse_progress(get_printed_text(failure)) for work in progress.last
    ]
    if len(works) != 1:
        return ""
    is_of_one = works[0].sizes == "1 -> 1 elements"
    return f"{'one-element ' if is_of_one else ''}{works[0].operation} #{works[0].sequence}"


def _name_ranks(ranks: Collection[int]) -> str:
    listed = sorted(ranks)
    unlisted_count = len(listed) - MAX_LISTED_MEMBERS
    text = ", ".join(map(str, listed[:MAX_LISTED_MEMBERS])) + (
        f" and {unlisted_count} more" if unlisted_count > 0 else ""
    )
    return f"rank{'s' if len(listed) > 1 else ''} {text}"


def group_progress(workers: Sequence[WorkerError]) -> tuple[Progress, Progress]:
    """Return the progress from flight recorders, and that from printed texts, by group and rank.

    Groups with the same name and different members are different groups. In the flight recorders'
    progress, a member without any collective of its group has a count of 0.
    """
    recorded: Progress = defaultdict(dict)
    printed: Progress = defaultdict(dict)
    ranked = [(failure.rank, failure) for failure in workers if failure.rank is not None]
    every = [(rank, progress) for rank, failure in ranked for progress in failure.collectives]
    variants: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for _, progress in every:
        variants[progress.group].update([progress.members] if progress.members else [])
    for rank, progress in every:
        if name := _name_group(progress, rank, variants[progress.group]):
            recorded[name][rank] = drop_messages(progress)
    for rank, failure in ranked:
        for progress in parse_progress(get_printed_text(failure)):
            printed[_name_group(progress, rank, variants[progress.group])][rank] = progress
    # a recorder without group names doesn't show which groups its rank has called
    ranks_with_groups = {rank for rank, _ in every} - {
        rank for rank, progress in every if not progress.group
    }
    compared = {
        group: _keep_counted(group, members, ranks_with_groups)
        for group, members in recorded.items()
    }
    names = {*recorded, *printed} - {UNNAMED_GROUP}
    if UNNAMED_GROUP in printed and len(names) <= 1:  # it is the only group
        name = next(iter(names), DEFAULT_GROUP)
        printed[name] = {**printed.pop(UNNAMED_GROUP), **printed.get(name, {})}
    return {group: members for group, members in compared.items() if members}, dict(printed)


def _keep_counted(
    group: str, members: dict[int, CollectiveProgress], known: set[int]
) -> dict[int, CollectiveProgress]:
    """Return the members with comparable counters;
    ranks of `known` without a counter get a count of 0.
    """
    silent = known.intersection(get_members(members)) - members.keys()
    ranks = members | {rank: CollectiveProgress(group, "", 0, 0) for rank in silent}
    if not any(entry.is_p2p for progress in members.values() for entry in progress.last):
        return ranks
    # without a collective in the recorder, the counter may count sends and receives
    return {
        rank: item for rank, item in ranks.items() if any(not entry.is_p2p for entry in item.last)
    }


def get_members(progress: Mapping[int, CollectiveProgress]) -> tuple[int, ...]:
    """Return the global ranks of a group's members, or an empty tuple if they are unknown."""
    return next((item.members for item in progress.values() if item.members), ())


def _name_group(
    progress: CollectiveProgress, rank: int, variants: Collection[tuple[int, ...]]
) -> str:
    """Return a group's name; with its members if several groups share the name."""
    if len(variants) <= 1:
        return progress.group
    members = progress.members or next((variant for variant in variants if rank in variant), ())
    return (
        f"{progress.group} {_format_members(members)}"
        if progress.group and members
        else UNNAMED_GROUP
    )


def _format_members(members: Sequence[int]) -> str:
    some = ", ".join(map(str, members[:MAX_LISTED_MEMBERS]))
    return f"of ranks {some}" + (
        f", ... ({len(members)} ranks)" if len(members) > MAX_LISTED_MEMBERS else ""
    )


def drop_messages(progress: CollectiveProgress) -> CollectiveProgress:
    """Return a group's progress without sends and receives, which gloo includes in its counters.

    The ranks of a pipeline send and receive different numbers of messages.
    """
    called = max(
        (work.sequence for work in progress.last if not work.is_p2p), default=progress.enqueued
    )
    if called >= progress.enqueued or progress.completed is None:
        return progress
    return replace(progress, enqueued=called, completed=called - progress.is_outstanding)


# --- stragglers -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankBehind:
    """A rank that is behind in a group."""

    group: str
    count: int
    usual: int
    size: int
    """Number of the group's members."""


def find_ranks_behind(
    groups: Progress, apart: Mapping[str, Sequence[tuple[int, str]]], peers: Mapping[int, set[int]]
) -> tuple[dict[int, str], bool]:
    """Return the stragglers with reasons, and whether all of them are culprits of one fault.

    The smallest groups decide: in larger groups, victims that waited for a straggler are behind,
    too. A rank is also a culprit if a collective that needs its data completed on other ranks but
    not on this rank: its GPU, or the thread that watches the GPU, is stuck. If both kinds exist on
    different ranks, or ranks wait for each other, some may be victims.

    `apart` has the diverged ranks of each group; `peers` is the result of `find_message_peers`.
    """
    uncalled = _find_uncalled(groups, apart)
    stuck = _find_unseen(groups)
    if stuck and stuck.keys() >= uncalled.keys():
        return {
            rank: _format_sentence("saw the end of", behind, groups)
            for rank, behind in stuck.items()
        }, True
    # pipeline stages: drop a rank that waits for a message from another late rank, unless they wait
    # for each other
    awaited = {rank: peers.get(rank, set()) & uncalled.keys() for rank in uncalled}
    uncalled = {
        rank: behind
        for rank, behind in uncalled.items()
        if all(rank in awaited[peer] for peer in awaited[rank])
    }
    places = {(behind.group, behind.count) for behind in uncalled.values()}
    is_one_fault = (
        not stuck
        and not any(awaited[rank] for rank in uncalled)
        and len(places) == len(dict(places))
    )
    reasons = {
        rank: _format_sentence("saw the end of", behind, groups) for rank, behind in stuck.items()
    }
    return (
        reasons
        | {rank: _format_sentence("called", behind, groups) for rank, behind in uncalled.items()},
        is_one_fault,
    )


def find_message_peers(workers: Iterable[WorkerError]) -> dict[int, set[int]]:
    """Return for each rank the peers that its outstanding sends and receives wait for."""
    peers_by_rank: dict[int, set[int]] = {}
    for failure in workers:
        for progress in failure.collectives if failure.rank is not None else ():
            waiting = progress.last if progress.is_outstanding else ()
            ends = [
                SEND_OR_RECEIVE.search(entry.operation)
                for entry in waiting
                if entry.state != "completed"
            ]
            places = [int(end["peer"]) for end in ends if end is not None]
            members = [progress.members[place] for place in places if place < len(progress.members)]
            peers_by_rank.setdefault(failure.rank or 0, set()).update(members)
    return peers_by_rank


def _find_uncalled(
    groups: Progress, apart: Mapping[str, Sequence[tuple[int, str]]]
) -> dict[int, RankBehind]:
    """Return the ranks that haven't called a collective in which most members of the group wait.

    A rank may be behind in one group because it waits in another group: then it is a victim of the
    straggler there. Of tensor, pipeline and data parallel groups, the group that got stuck first
    explains the rest.

    In a group with diverged ranks (`apart`), only diverged ranks can be behind: the majority waits
    in the diverged collective, which other ranks may have completed with less data.
    """
    usual: dict[str, int] = {}
    counts_behind: dict[str, dict[int, int]] = {}
    for group, members in groups.items():
        counts = {rank: progress.enqueued for rank, progress in members.items()}
        # the count of the majority; without a majority, the highest
        usual_count, number = Counter(counts.values()).most_common(1)[0]
        usual[group] = usual_count if number * 2 > len(members) else max(counts.values())
        # the first collective that completed on no rank: a rank that called it is waiting, even if
        # others are ahead
        first = 1 + max(
            item.enqueued if item.completed is None else item.completed for item in members.values()
        )
        few = {rank: count for rank, count in counts.items() if count < min(usual[group], first)}
        if group in apart:
            few = {rank: few[rank] for rank, _ in apart[group] if rank in few}
        if few and len(few) * 2 <= len(counts):
            counts_behind[group] = few
    return _keep_innermost(
        (
            rank,
            RankBehind(
                group,
                count,
                usual[group],
                len(get_members(groups[group])) or UNKNOWN_GROUP_SIZE,
            ),
        )
        for group, counts in sorted(counts_behind.items())
        for rank, count in sorted(counts.items())
        if not any(
            other != group
            and rank not in ranks
            and rank in groups[other]
            and groups[other][rank].is_outstanding
            for other, ranks in counts_behind.items()
        )
    )


def _find_unseen(groups: Progress) -> dict[int, RankBehind]:
    """Return the ranks on which a collective hasn't completed although it has
    completed on other ranks.

    Only groups with a dump of every member count: if a member died, the dumps may have different
    times.
    """
    ranks_behind: list[tuple[int, RankBehind]] = []
    waits: set[int] = set()
    for group, members in sorted(groups.items()):
        ends = {
            rank: item.enqueued if item.completed is None else item.completed
            for rank, item in members.items()
        }
        max_count = max(ends.values())
        size = len(members)
        is_whole = set(get_members(members)) == members.keys()
        if not is_whole:
            continue
        unseen = [rank for rank, progress in members.items() if _has_unseen(progress, max_count)]
        unseen = unseen if len(unseen) * 2 <= size else []
        ranks_behind += [(rank, RankBehind(group, ends[rank], max_count, size)) for rank in unseen]
        waits.update(
            rank
            for rank, progress in members.items()
            if progress.is_outstanding and rank not in unseen
        )
    # waiting for a peer can't be the reason, so every group counts, not only the smallest
    return _by_rank((rank, behind) for rank, behind in ranks_behind if rank not in waits)


# A collective that completes on no rank before all ranks have contributed their data
_COLLECTIVE_OF_ALL_RANKS = LazyPattern(r"""(?i)
  nccl\w*:_?(?:all_?reduce|all_?gather|reduce_scatter|all_?to_?all|barrier)(?!.*coalesced)
""")


def _has_unseen(progress: CollectiveProgress, ended: int) -> bool:
    """Whether a rank's first incomplete collective needs all ranks' data and has
    completed on another rank.
    """
    done = progress.completed
    unseen_entries = (
        entry
        for entry in progress.last
        if done is not None and entry.sequence > done and not entry.is_p2p
    )
    first = next(unseen_entries, None)
    return (
        first is not None
        and first.sequence <= ended
        and _COLLECTIVE_OF_ALL_RANKS.match(first.operation) is not None
    )


def _keep_innermost(ranks_behind: Iterable[tuple[int, RankBehind]]) -> dict[int, RankBehind]:
    """Return only the ranks that are behind in one of the smallest groups."""
    ranks = _by_rank(ranks_behind)
    smallest = min((behind.size for behind in ranks.values()), default=0)
    return {rank: behind for rank, behind in ranks.items() if behind.size == smallest}


def _by_rank(ranks_behind: Iterable[tuple[int, RankBehind]]) -> dict[int, RankBehind]:
    """Return each rank with its smallest group; of groups of one size,
    that in which it is farthest behind.
    """
    return dict(
        sorted(
            ranks_behind,
            key=lambda item: (-item[1].size, item[1].usual - item[1].count, item[1].group),
        )
    )


def _format_sentence(verb: str, behind: RankBehind, groups: Progress) -> str:
    members = get_members(groups[behind.group])
    is_listed = (
        behind.group == DEFAULT_GROUP
        or behind.group.endswith(_format_members(members))
        or not 0 < len(members) <= MAX_LISTED_MEMBERS
    )
    which = behind.group if is_listed else f"{behind.group} {_format_members(members)}"
    return f"it {verb} {behind.count} collectives of group {which}, its peers {behind.usual}"
