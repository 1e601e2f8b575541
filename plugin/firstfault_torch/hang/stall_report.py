"""The report on a stall: which ranks wait in which collective, for which straggler,
and where that rank is.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from firstfault.evidence.hangs import find_different_calls
from firstfault.evidence.progress import drop_messages
from firstfault.exceptions.stack_position import PositionKind, locate_main_thread
from firstfault.model import DocumentRef, WorkerError
from firstfault.reading.assemble import Snapshot, assemble
from firstfault.strategies import DEFAULT_STRATEGY, get_strategy, run_strategy
from firstfault.strategies.headlines import join_ranks
from firstfault.utils.text import one_line
from firstfault.wire.documents import decode, encode
from firstfault_torch.protocol.stall_limits import FIRST_STEPS_FACTOR
from firstfault_torch.protocol.stall_messages import StallReport

DOCUMENT_SUFFIX, OBSERVATION_SUFFIX = ".pb", ".json"
MAX_LISTED_RANKS = 3
"""Stragglers listed with their positions."""
MAX_LINE_CHARACTERS = 400
CollectiveCall = tuple[str, int, str]
"""Operation, sequence number, group."""


@dataclass(frozen=True, slots=True)
class WorkerObservation:
    """What an agent observes of a worker without progress, besides the content of its document."""

    group_rank: int
    local_rank: int
    unchanged_seconds: float | None = None
    """How long the main thread has been at its position; None for an unresponsive worker."""
    findings: tuple[str, ...] = ()
    """What was observed, as sentences without a subject: "is stopped by a signal (SIGSTOP)"."""
    is_busy: bool = False
    """Whether its main thread moves, or the worker uses the CPU, reads or writes."""
    is_paused_on_purpose: bool = False
    """Whether the program or a person paused it: a watchdog's block, a debugger, SIGSTOP."""
    stalled_seconds: float | None = None
    """Seconds without progress on its node; if None, those of the concluding agent."""
    ends_attempt: bool = True
    """Whether its node has been without progress for long enough to end the attempt."""


def to_files(workers: Iterable[tuple[WorkerError, WorkerObservation]]) -> dict[str, bytes]:
    """Serialize one node's observations."""
    files: dict[str, bytes] = {}
    for failure, facts in workers:
        files[f"{failure.rank}{DOCUMENT_SUFFIX}"] = encode(failure)
        files[f"{failure.rank}{OBSERVATION_SUFFIX}"] = json.dumps(asdict(facts)).encode()
    return files


def from_files(
    files: Mapping[str, bytes],
) -> tuple[list[WorkerError], dict[int, WorkerObservation]]:
    """Parse all nodes' observations: documents, and `WorkerObservation` by rank."""
    names = [name.removesuffix(DOCUMENT_SUFFIX) for name in files if name.endswith(DOCUMENT_SUFFIX)]
    ranks = sorted(int(name) for name in names if name.isdecimal())
    found = (
        decode(files[f"{rank}{DOCUMENT_SUFFIX}"], DocumentRef(f"{rank}{DOCUMENT_SUFFIX}"))
        for rank in ranks
    )
    facts = {rank: json.loads(files[f"{rank}{OBSERVATION_SUFFIX}"]) for rank in ranks}
    return [failure for failure in found if isinstance(failure, WorkerError)], {
        rank: WorkerObservation(**{**each, "findings": tuple(each["findings"])})
        for rank, each in facts.items()
    }


def build_stall_report(  # noqa: PLR0913 - keywords
    files: Mapping[str, bytes],
    seconds: float,
    *,
    missing: Sequence[int] = (),
    ends_attempt: bool = False,
    continues_if_busy: bool = True,
    is_starting: bool = False,
    is_silent_if_busy: bool = False,
    own: int = 0,
    end_seconds: float | None = None,
) -> StallReport:
    """Build the report on a stall; it has no lines if no rank waits and ranks are busy,
    as in an evaluation.

    Args:
        files: the observations of all nodes (`to_files`).
        seconds: time without progress.
        missing: group ranks of nodes without observations.
        ends_attempt: whether to end the attempt.
        continues_if_busy: don't end it if a straggler is busy.
        is_starting: whether the training is in its first steps.
        is_silent_if_busy: return no lines if a straggler is busy.
        own: group rank of the agent that concludes.
        end_seconds: time without progress after which the attempt is ended, outside of the first
            steps; None if it is never ended.
    """
    failures, facts = from_files(files)
    # The last rank that made progress counts: in another group, the ranks of a node may have gone
    # on for a while.
    stalled = (each.stalled_seconds for each in facts.values() if each.stalled_seconds is not None)
    seconds = min(stalled, default=seconds)
    ends_attempt = ends_attempt and all(each.ends_attempt for each in facts.values())
    accused = _find_stragglers(failures, facts)
    ranks = tuple(accused[:MAX_LISTED_RANKS])
    by_rank = {failure.rank: failure for failure in failures if failure.rank is not None}
    others = [failure for failure in failures if failure.rank not in accused]
    waiting = [failure for failure in others if _is_waiting(failure, counts_gpu_waits=bool(ranks))]
    # No rank waits and some are busy: an evaluation or a save without collectives, not a stall.
    if not waiting and any(each.is_busy for each in facts.values()):
        return StallReport(())
    if is_silent_if_busy and any(
        _is_busy(by_rank[rank], facts[rank], seconds) for rank in accused or facts
    ):
        return StallReport(())
    calls = Counter(call for failure in waiting for call in _list_outstanding(failure)[:1])
    absent = sorted({*range(failures[0].place.world_size)} - by_rank.keys())
    different = find_different_calls(failures) if not accused and not absent else None
    if different is not None:
        parts = [
            (
                f"{len(waiting)} of {len(failures)} ranks wait in different collectives as"
                f" #{different.number} ({different.group}): {different.text}"
            )
        ]
    else:
        parts = [
            _describe_waiting_ranks(failures, waiting, calls),
            *_describe_stragglers(by_rank, ranks, calls),
            *_describe_exited_and_missing(accused, absent, missing),
        ]
    since = " since the first steps" if is_starting else ""
    lines = [
        one_line(f"no progress for {seconds:.0f} s{since}: {', '.join(parts)}", MAX_LINE_CHARACTERS)
    ]
    lines += [
        _describe_position(by_rank[rank], facts[rank], is_starting=is_starting) for rank in ranks
    ]
    first = by_rank[ranks[0]] if ranks else None
    report = StallReport(tuple(lines), ranks)
    if first is not None:
        where = locate_main_thread(first)
        peers = " while its peers waited for it" if waiting else ""
        stage = f"{where.exit_stage}{peers}" if where.exit_stage else ""
        report = replace(report, node=first.node, position=where.frame, exit_stage=stage)
    if missing:
        return report
    if not ends_attempt:
        when = _describe_end(seconds, end_seconds, is_starting=is_starting)
        return _append_line(report, when) if when else report
    return _decide_end(
        report, by_rank, facts, seconds, continues_if_busy=continues_if_busy, own=own
    )


def _find_stragglers(
    failures: Sequence[WorkerError], facts: Mapping[int, WorkerObservation]
) -> list[int]:
    """Return the ranks named by the verdict on the observations, the earliest first. Return an
    empty list if no rank differs from the rest.
    """
    verdict = run_strategy(get_strategy(DEFAULT_STRATEGY), assemble(Snapshot(tuple(failures))))
    ranks = verdict.ranks or tuple(item.rank for item in verdict.suspects if item.rank is not None)
    accused = [rank for rank in ranks if rank in facts]
    # If all ranks are accused, none stands out. A job of one rank may still accuse that one.
    return accused if len(accused) < max(len(failures), 2) else []


def _describe_exited_and_missing(
    accused: Sequence[int], absent: Sequence[int], missing: Sequence[int]
) -> Iterator[str]:
    """Yield which ranks exited, how many more stragglers there are, and which nodes are missing."""
    if not accused and not missing:
        yield f"{_format_ranks(absent)} exited" if absent else "no single rank is behind"
    elif more := len(accused[MAX_LISTED_RANKS:]):
        yield f"and {more} more"
    if missing:
        yield _describe_missing_nodes(missing, absent)


def _describe_end(seconds: float, end_seconds: float | None, *, is_starting: bool) -> str:
    """Return when the attempt will be ended, or "" if never or if that time has passed."""
    ends_at = (end_seconds or 0) * (FIRST_STEPS_FACTOR if is_starting else 1)
    if seconds >= ends_at:
        return ""
    why = f" ({FIRST_STEPS_FACTOR} x {end_seconds:g} s in the first steps)" if is_starting else ""
    return f"the attempt ends after {ends_at:g} s without progress{why}"


def _decide_end(  # noqa: PLR0913 - keywords
    report: StallReport,
    by_rank: Mapping[int, WorkerError],
    facts: Mapping[int, WorkerObservation],
    seconds: float,
    *,
    continues_if_busy: bool,
    own: int,
) -> StallReport:
    """Add the workers to kill, or the reason why the attempt continues."""
    ranks = report.ranks
    working = [rank for rank in ranks or facts if _is_busy(by_rank[rank], facts[rank], seconds)]
    # A rank that was paused on purpose is spared even after `busy_seconds`: a person or the program
    # will resume it.
    paused = [rank for rank, each in facts.items() if each.is_paused_on_purpose]
    if spared := (working if continues_if_busy else []) or paused:
        first_spared = facts[spared[0]]
        why = (
            ", ".join(first_spared.findings)
            or f"was elsewhere {first_spared.unchanged_seconds or 0:.0f} s ago"
        )
        return _append_line(report, f"not ending the attempt: rank {spared[0]} {why}")
    # Without a straggler the agent that concludes ends one of its workers: any death ends the
    # attempt.
    killed = [facts[rank] for rank in ranks] or [
        each for each in facts.values() if each.group_rank == own
    ][:1]
    workers = tuple((each.group_rank, each.local_rank) for each in killed)
    return _append_line(report, "ending the attempt because of this stall", workers)


def _is_busy(failure: WorkerError, facts: WorkerObservation, seconds: float) -> bool:
    """Whether a rank is busy, or reached its position in the second half of the stall,
    as while a training starts.
    """
    came_late = facts.unchanged_seconds is not None and facts.unchanged_seconds < seconds / 2
    # waiting for a GPU or in a collective uses the CPU, too: torch polls
    waits = locate_main_thread(failure).kind in {PositionKind.TORCH, PositionKind.COLLECTIVE}
    return came_late or (facts.is_busy and not waits)


def _append_line(
    report: StallReport, line: str, workers_to_kill: tuple[tuple[int, int], ...] = ()
) -> StallReport:
    return replace(
        report,
        lines=(*report.lines, one_line(line, MAX_LINE_CHARACTERS)),
        workers_to_kill=workers_to_kill,
    )


def _list_outstanding(failure: WorkerError) -> list[CollectiveCall]:
    """Return the enqueued but incomplete collectives of a rank."""
    return [
        (entry.operation.rpartition(":")[2], entry.sequence, progress.group)
        for progress in map(drop_messages, failure.collectives)
        for entry in progress.last
        if progress.is_outstanding
        and entry.state != "completed"
        and entry.sequence > (progress.completed or 0)
    ]


def _is_waiting(failure: WorkerError, *, counts_gpu_waits: bool) -> bool:
    """Whether a rank waits in a collective; without a flight recorder,
    a wait for the GPU may be one.
    """
    kind = locate_main_thread(failure).kind
    waits = kind is PositionKind.COLLECTIVE or (counts_gpu_waits and kind is PositionKind.TORCH)
    return waits or bool(_list_outstanding(failure))


def _describe_waiting_ranks(
    failures: Sequence[WorkerError], waiting: Sequence[WorkerError], calls: Counter[CollectiveCall]
) -> str:
    """Return the number of waiting ranks, and the collective in which most of them wait."""
    who = f"{len(waiting)} of {len(failures)} ranks wait"
    if not calls and waiting:
        return f"{who} in a collective"
    # A rank that doesn't answer may be in a collective, too.
    answering = [failure for failure in failures if any(dump.text for dump in failure.stack_dumps)]
    if not calls and not answering:
        return f"none of {len(failures)} ranks answers"
    if not calls:
        ((at, most),) = Counter(
            locate_main_thread(failure).frame for failure in answering
        ).most_common(1)
        return (
            f"{len(answering)} ranks are outside of collectives, {most} of them at"
            f" {at or 'an unknown position'}"
        )
    (operation, number, group), most = calls.most_common(1)[0]
    most_of = f" ({most} of them)" if len(calls) > 1 else ""
    return f"{who}{most_of} in {operation} #{number} ({group})"


def _describe_stragglers(
    by_rank: Mapping[int, WorkerError], ranks: Sequence[int], calls: Counter[CollectiveCall]
) -> list[str]:
    """Return for each straggler its node and its progress in the group in which most ranks wait."""
    operation, number, group = next((call for call, _ in calls.most_common(1)), ("", 0, ""))
    found = []
    for rank in ranks:
        failure = by_rank[rank]
        groups = map(drop_messages, failure.collectives)
        begun = next((item.enqueued for item in groups if item.group == group), None)
        others = [
            name
            for name, *call in _list_outstanding(failure)
            if call == [number, group] and name != operation
        ]
        report = f"has called {begun:,}" if begun is not None else "is the straggler"
        node = f" ({failure.node})" if failure.node else ""
        found.append(f"rank {rank}{node} {f'has called {others[0]} instead' if others else report}")
    return found


def _describe_position(failure: WorkerError, facts: WorkerObservation, *, is_starting: bool) -> str:
    """Return a line with a rank's position, the minimum time there, and further findings."""
    where = locate_main_thread(failure)
    frame = where.frame or "unknown position"
    code = next((line.strip() for line in _find_source_line(failure, where.frame)), "")
    since = f", for at least {facts.unchanged_seconds:.0f} s" if facts.unchanged_seconds else ""
    # A rank that does nothing, such as one in `time.sleep`, neither loads nor compiles.
    is_elsewhere = where.kind is PositionKind.ELSEWHERE and not where.exit_stage
    is_loading = is_starting and facts.is_busy and is_elsewhere
    hint = ["may still be loading or compiling"] if is_loading else []
    parts = [
        f"{where.exit_stage or frame}{since}{f' ({code})' if code else ''}",
        *facts.findings,
        *hint,
    ]
    return one_line(f"rank {failure.rank}: {', '.join(parts)}", MAX_LINE_CHARACTERS)


def _describe_missing_nodes(nodes: Sequence[int], ranks: Sequence[int]) -> str:
    listed = (
        f"node {nodes[0]}"
        if len(nodes) == 1
        else f"{len(nodes)} nodes, starting with node {nodes[0]}"
    )
    why = "its ranks are making progress, or its agent is down"
    return f"no response from {listed}{f' ({_format_ranks(ranks)})' if ranks else ''}: {why}"


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {join_ranks(ranks)}"


def _find_source_line(failure: WorkerError, frame: str) -> Iterable[str]:
    """Yield the source line below a frame in a stack."""
    place, _, function = frame.partition(" in ")
    name, _, line = place.rpartition(":")
    for dump in failure.stack_dumps:
        rows = dump.text.splitlines()
        for row, below in itertools.pairwise(rows):
            if f'{name}", line {line} in {function}' in row and below.startswith("    "):
                yield below
