"""What the agents tell of a job that stands still: who waits where, for which rank, and what that one does."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from firstfault.evidence.progress import without_messages
from firstfault.exceptions.stack_position import PositionKind, locate_main_thread
from firstfault.model import DocumentRef, WorkerError
from firstfault.reading.assemble import Snapshot, assemble
from firstfault.strategies import DEFAULT_STRATEGY, get_strategy, run_strategy
from firstfault.utils.text import one_line
from firstfault.wire.documents import decode, encode

DOCUMENT_FILE, _FACTS = ".pb", ".json"
_MOST = 3
"""Ranks of which a place is told."""
_LONGEST = 400
_Call = tuple[str, int, str]
"""Of a collective: operation, number, group."""


@dataclass(frozen=True, slots=True)
class WorkerObservation:
    """What an agent knows of a worker that stands still, besides what its document has."""

    group_rank: int
    local_rank: int
    stood_seconds: float | None = None
    """How long its main thread has been at the same place; None: it doesn't answer."""
    says: tuple[str, ...] = ()
    """Sentences without a subject: "is stopped by a signal (SIGSTOP)"."""
    works: bool = False
    """Whether its main thread moves, or it uses the CPU, or reads or writes."""
    may_stand: bool = False
    """Whether the program or a person lets it stand: a block of the watchdog, a debugger, SIGSTOP."""


@dataclass(frozen=True, slots=True)
class StallReport:
    """What one agent concluded for all."""

    lines: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    """Those for which the others wait; empty: none stands out."""
    node: str = ""
    at: str = ""
    """Where the first of them is: "loader.py:88 in read_shard"."""
    ends: tuple[tuple[int, int], ...] = ()
    """Group rank and local rank of the workers that are ended for it; empty: nothing is ended."""

    @property
    def place(self) -> str:
        """Where the first of the ranks is; without ranks, what is told of the others: "no rank stands out"."""
        return self.at or "".join(self.lines[:1]).rpartition("; ")[2]


def to_files(workers: Iterable[tuple[WorkerError, WorkerObservation]]) -> dict[str, bytes]:
    """Return what a node hands in."""
    files: dict[str, bytes] = {}
    for failure, facts in workers:
        files[f"{failure.rank}{DOCUMENT_FILE}"] = encode(failure)
        files[f"{failure.rank}{_FACTS}"] = json.dumps(asdict(facts)).encode()
    return files


def from_files(files: Mapping[str, bytes]) -> tuple[list[WorkerError], dict[int, WorkerObservation]]:
    """Return what all nodes handed in: documents, and facts by rank."""
    names = [name.removesuffix(DOCUMENT_FILE) for name in files if name.endswith(DOCUMENT_FILE)]
    ranks = sorted(int(name) for name in names if name.isdecimal())
    found = (decode(files[f"{rank}{DOCUMENT_FILE}"], DocumentRef(f"{rank}{DOCUMENT_FILE}")) for rank in ranks)
    facts = {rank: json.loads(files[f"{rank}{_FACTS}"]) for rank in ranks}
    return [failure for failure in found if isinstance(failure, WorkerError)], {
        rank: WorkerObservation(**{**each, "says": tuple(each["says"])}) for rank, each in facts.items()
    }


def build_stall_report(  # noqa: PLR0913 - keywords
    files: Mapping[str, bytes],
    seconds: float,
    *,
    missing: Sequence[int] = (),
    ends: bool = False,
    spares: bool = True,
    own: int = 0,
) -> StallReport:
    """Return what is told of a job that stands still; no lines: ranks work by themselves.

    Args:
        files: what the nodes handed in.
        seconds: without progress.
        missing: group ranks of nodes that handed in nothing.
        ends: whether the attempt is to be ended.
        spares: not if a rank that is waited for shows that it works.
        own: the group rank of the agent that concludes.
    """
    failures, facts = from_files(files)
    verdict = run_strategy(get_strategy(DEFAULT_STRATEGY), assemble(Snapshot(tuple(failures))))
    ranks = verdict.ranks or tuple(item.rank for item in verdict.suspects if item.rank is not None)
    accused = [rank for rank in ranks if rank in facts]
    accused = accused if len(accused) < max(len(failures), 2) else []
    ranks = tuple(accused[:_MOST])
    by_rank = {failure.rank: failure for failure in failures if failure.rank is not None}
    waiting = [failure for failure in failures if failure.rank not in accused and _waits(failure, at_gpu=bool(ranks))]
    if not waiting and any(each.works for each in facts.values()):
        return StallReport(())
    calls = Counter(call for failure in waiting for call in _outstanding(failure)[:1])
    parts = [_waiters(failures, waiting, calls), *_awaited(by_rank, ranks, calls)]
    absent = [str(rank) for rank in range(failures[0].place.world_size) if rank not in by_rank]
    if not ranks and not missing:
        parts.append(f"rank {', '.join(absent)} has ended" if absent else "no rank stands out")
    elif more := len(accused[_MOST:]):
        parts.append(f"and {more} more")
    if missing:
        one = len(missing) == 1
        node = f"node {missing[0]} (rank {', '.join(absent)})"
        who = node if one else f"{len(missing)} nodes, the first of them {missing[0]},"
        parts.append(f"{who} told nothing: {'its' if one else 'their'} ranks go on, or the agent does not run")
    lines = [one_line(f"no progress for {seconds:.0f} s: {'; '.join(parts)}", _LONGEST)]
    lines += [one_line(f"rank {rank}: {_doing(by_rank[rank], facts[rank])}", _LONGEST) for rank in ranks]
    first = by_rank[ranks[0]] if ranks else None
    at = locate_main_thread(first).frame if first is not None else ""
    told = StallReport(tuple(lines), ranks, first.node if first is not None else "", at)
    if not ends or missing:
        return told
    working = [rank for rank in ranks or facts if _works(by_rank[rank], facts[rank], seconds)]
    spared = (working if spares else []) or [rank for rank, each in facts.items() if each.may_stand]
    if spared:
        first_spared = facts[spared[0]]
        why = "; ".join(first_spared.says) or f"was elsewhere {first_spared.stood_seconds or 0:.0f} s ago"
        return _with(told, f"not ended: rank {spared[0]} {why}")
    killed = [facts[rank] for rank in ranks] or [each for each in facts.values() if each.group_rank == own][:1]
    return _with(told, "the attempt is ended for it", tuple((each.group_rank, each.local_rank) for each in killed))


def _works(failure: WorkerError, facts: WorkerObservation, seconds: float) -> bool:
    """Whether a rank works, or has come to its place long after the job stood still, as while it starts."""
    came_late = facts.stood_seconds is not None and facts.stood_seconds < seconds / 2
    # a thread that waits for its GPU, or in a collective, uses the CPU
    waits = locate_main_thread(failure).kind in {PositionKind.TORCH, PositionKind.COLLECTIVE}
    return came_late or (facts.works and not waits)


def _with(told: StallReport, line: str, ends: tuple[tuple[int, int], ...] = ()) -> StallReport:
    return replace(told, lines=(*told.lines, one_line(line, _LONGEST)), ends=ends)


def _outstanding(failure: WorkerError) -> list[_Call]:
    """Return the collectives that a rank has called and that haven't ended."""
    return [
        (entry.operation.rpartition(":")[2], entry.sequence, progress.group)
        for progress in map(without_messages, failure.collectives)
        for entry in progress.last
        if progress.is_outstanding and entry.state != "completed" and entry.sequence > (progress.completed or 0)
    ]


def _waits(failure: WorkerError, *, at_gpu: bool) -> bool:
    """Whether a rank waits in a collective; without a recorder a wait for its GPU may be one."""
    stood = locate_main_thread(failure).kind
    return bool(_outstanding(failure)) or stood is PositionKind.COLLECTIVE or (at_gpu and stood is PositionKind.TORCH)


def _waiters(failures: Sequence[WorkerError], waiting: Sequence[WorkerError], calls: Counter[_Call]) -> str:
    """Return how many ranks wait, and in which collective most of them do."""
    who = f"{len(waiting)} of {len(failures)} ranks wait"
    if not calls and waiting:
        return f"{who} in a collective"
    if not calls:
        ((at, most),) = Counter(locate_main_thread(failure).frame for failure in failures).most_common(1)
        return f"{len(failures)} ranks stand outside of collectives, {most} of them at {at or 'a place not known'}"
    (operation, number, group), most = calls.most_common(1)[0]
    most_of = f", {most} of them" if len(calls) > 1 else ""
    return f"{who}{most_of} in {operation} #{number} ({group})"


def _awaited(by_rank: Mapping[int, WorkerError], ranks: Sequence[int], calls: Counter[_Call]) -> list[str]:
    """Return for each rank that is waited for its node, and how far it came in the group in which most wait."""
    operation, number, group = next((call for call, _ in calls.most_common(1)), ("", 0, ""))
    found = []
    for rank in ranks:
        failure = by_rank[rank]
        groups = map(without_messages, failure.collectives)
        begun = next((item.enqueued for item in groups if item.group == group), None)
        others = [name for name, *call in _outstanding(failure) if call == [number, group] and name != operation]
        told = f"has begun {begun:,}" if begun is not None else "is waited for"
        node = f" ({failure.node})" if failure.node else ""
        found.append(f"rank {rank}{node} {f'has called {others[0]} instead' if others else told}")
    return found


def _doing(failure: WorkerError, facts: WorkerObservation) -> str:
    """Return where a rank is, for how long at least, and what else is known of it."""
    where = locate_main_thread(failure)
    frame = where.frame or "its place is not known"
    code = next((line.strip() for line in _source(failure, where.frame)), "")
    since = f", since at least {facts.stood_seconds:.0f} s" if facts.stood_seconds else ""
    told = [f"{where.exit_stage or frame}{since}{': ' if code else ''}{code}", *facts.says]
    return "; ".join(told)


def _source(failure: WorkerError, frame: str) -> Iterable[str]:
    """Yield the source line below a frame in a stack."""
    place, _, function = frame.partition(" in ")
    name, _, line = place.rpartition(":")
    for dump in failure.stack_dumps:
        rows = dump.text.splitlines()
        for row, below in itertools.pairwise(rows):
            if f'{name}", line {line} in {function}' in row and below.startswith("    "):
                yield below
