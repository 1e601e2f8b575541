"""Find stragglers: ranks behind in their collectives, elsewhere in the code, or unresponsive.

Each function checks one kind of evidence and returns candidates; `find_stragglers` combines them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from firstfault.evidence.classification import (
    BARRIER_REPORT,
    DUMP_SIGNAL,
    MISMATCH,
    STORE_WAIT,
    STUCK,
    TIMED_OUT,
    ClassifiedFailure,
    FailureClass,
    is_own_fault,
    names_a_wait,
    prints_a_peers_error,
    prints_a_timeout,
)
from firstfault.evidence.diagnosis import (
    Candidate,
    Diagnosis,
)
from firstfault.evidence.progress import (
    Progress,
    find_message_peers,
    find_ranks_behind,
    get_printed_text,
    group_progress,
    parse_progress,
    parse_reported_wait,
)
from firstfault.evidence.unreported import find_agentless_exits, map_unfailed_ranks_to_nodes
from firstfault.exceptions.exceptions_in_text import format_place
from firstfault.exceptions.first_cause import find_first_cause, find_own_frames, iter_exceptions
from firstfault.exceptions.printed_tracebacks import find_printed_exception
from firstfault.exceptions.stack_position import PositionKind, locate_main_thread
from firstfault.model import Collective, CollectiveProgress, ThreadFailure, WorkerError
from firstfault.model.failure import RECORDED_ONLY
from firstfault.utils.lazy_pattern import LazyPattern

COMPARED_FIELDS = (
    ("operation", "called", 0),
    ("dtypes", "used", 0),
    ("dtypes", "used", 1),
    ("sizes", "passed", 0),
    ("sizes", "passed", 1),
)
"""Fields of a collective, the verb for them in a sentence,
and whether inputs (0) or outputs (1) are compared.
"""
MAX_CULPRITS = 3
"""If more ranks than this qualify, they hardly have one fault:
more likely the majority waits for something else.
"""
MIN_TIMED_OUT_PER_CULPRIT = 2
"""Minimum of timed-out ranks for each rank without a timeout."""
_MAX_LISTED_RANKS = 4
"""In a text about ranks that called one collective."""
LINE_IN_FUNCTION = re.compile(r":\d+ in (?!main$|<module>$)")
"""The line in a position such as "train.py:12 in step": positions in one function count as equal.
"""
EXCEPTIONS_ON_STOP = {"KeyboardInterrupt", "SignalException", "SystemExit"}
"""Exceptions raised in response to the agent's signal."""
CHECKPOINT_PACKAGE = "torch/distributed/checkpoint/"
MISSING_RANKS_REPORTS = {
    "awaited-ranks",
    "barrier-timed-out-tasks",
    "desync-report",
    BARRIER_REPORT,
    "stalled-ops",
}
"""Signatures of reports that compare all ranks."""
DivergedRanks = dict[str, list[tuple[int, str]]]
"""Groups in which ranks called different collectives,
each with the ranks that differ from a majority, if any.
"""


def find_stragglers(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the stragglers, by stacks, collective counters and failed threads;
    none if all ranks are alike.

    Stacks beat counters. A rank that waits in a collective of one group is often also behind in
    another group, or has a dead helper thread, as a consequence; its stack shows that it waits
    itself. So if any stack shows a rank outside of all collectives, ranks that waited aren't
    stragglers, even if their counters are behind.
    """
    if not diagnosis.waits and not _find_reported_missing(diagnosis.classified):
        # no rank timed out: each stack shows where its rank was stopped, not whom it waited for
        return []
    if failed := _find_failed_checkpoint_threads(diagnosis.workers):
        return _build_candidates(diagnosis, failed)
    classified = diagnosis.classified
    alive = _sort_failures(diagnosis)
    recorded, printed = group_progress(alive)
    groups = sorted({*recorded, *printed})
    progress_by_group = {
        group: {**printed.get(group, {}), **recorded.get(group, {})} for group in groups
    }
    # a rank that received an error about a peer was stopped while handling it: its position proves
    # nothing
    raised = (
        item
        for item in classified
        if item.failure.exception and item.failure_class >= FailureClass.UNCLEAR
    )
    victims = (
        item
        for item in raised
        if not (item.failure.sent_signals and item.failure.what in EXCEPTIONS_ON_STOP)
    )
    met = {item.failure.rank for item in (*diagnosis.waits, *victims)}
    elsewhere = _find_ranks_outside_collective(alive, met, diagnosis.waits)
    diverged = _find_diverged(recorded, printed)
    # stacks, then counters, then weaker signs: a rank with several reasons gets all of them, in
    # this order
    ranks_behind, is_one_fault = find_ranks_behind(
        progress_by_group, diverged, find_message_peers(alive)
    )
    missing = _list_ranks_without_dump(alive)
    reasons = [
        *elsewhere,
        *_flatten_diverged(diverged),
        *ranks_behind.items(),
        *_find_ranks_without_dump(alive, missing, has_late=bool(ranks_behind)),
        *_find_unstarted_ranks(recorded),
        *_find_dead_threads(diagnosis.workers),
        *_find_unresponsive_ranks(alive),
        *_find_ranks_without_timeout(diagnosis.workers),
        *_find_reported_missing(classified),
        *_find_rank_without_error(diagnosis.workers),
    ]
    if elsewhere:
        # a rank that printed a timeout waited, too, even if it is retrying now
        met |= {failure.rank for failure in alive if prints_a_timeout(failure)}
        reasons = [(rank, why) for rank, why in reasons if rank not in met]
    candidates = _build_candidates(diagnosis, reasons)
    reported = dict(_find_reported_missing(classified))
    # each culprit is the straggler of a different group, so several can be the root cause together
    are_shared = ranks_behind if is_one_fault else {}
    return [
        replace(
            item,
            is_shared=item.rank in are_shared,
            is_reported=item.rank in reported,
            is_sure=not missing,
        )
        for item in candidates
    ]


@dataclass(frozen=True, slots=True)
class OutOfStep:
    """Ranks that didn't do what their peers did."""

    ranks: dict[int, str]
    """With the reason of each."""
    has_majority: bool = True
    """Whether the remaining ranks agree: otherwise each of these ranks may be in step."""
    is_behind: bool = False
    """Whether only their last collectives show that they are behind. Earlier calls were the same.
    """


def find_ranks_out_of_step(diagnosis: Diagnosis) -> Iterator[OutOfStep]:
    """Yield ranks out of step, by the strongest evidence first."""
    alive = _sort_failures(diagnosis)
    recorded, printed = group_progress(alive)
    progress_by_group = {
        group: {**printed.get(group, {}), **recorded.get(group, {})}
        for group in sorted({*recorded, *printed})
    }
    diverged = _find_diverged(recorded, printed)
    ranks_behind, _ = find_ranks_behind(progress_by_group, diverged, find_message_peers(alive))
    waiting = {item.rank: item.why for item in find_stragglers(diagnosis) if item.rank is not None}
    split = {
        rank: f"the ranks of group {group} called different collectives"
        for group in sorted(diverged)
        if not diverged[group]
        for rank in progress_by_group[group]
    }
    uneven = {
        rank: f"the ranks of group {group} called different numbers of collectives"
        for group, members in progress_by_group.items()
        if len({progress.enqueued for progress in members.values()}) > 1
        for rank in members
    }
    reasons = (
        OutOfStep(dict(_flatten_diverged(diverged))),
        OutOfStep(ranks_behind, is_behind=True),
        OutOfStep(split, has_majority=False),
        OutOfStep(waiting, is_behind=True),
        OutOfStep(uneven, has_majority=False, is_behind=True),
    )
    return (item for item in reasons if item.ranks)


def _list_ranks_without_dump(alive: Sequence[WorkerError]) -> set[int]:
    """Return group members without a flight recorder dump, in a job known only by its dumps."""
    groups = {progress.members for failure in alive for progress in failure.collectives}
    is_of_dumps = all(failure.code == RECORDED_ONLY for failure in alive)
    return set().union(*groups) - {failure.rank for failure in alive} if is_of_dumps else set()


def _find_ranks_without_dump(
    alive: Sequence[WorkerError], missing: Collection[int], *, has_late: bool
) -> list[tuple[int, str]]:
    """Return the few ranks without a dump; if all have a dump and no rank is behind,
    the few ranks that didn't wait.
    """
    idle = [
        failure.rank
        for failure in alive
        if failure.rank is not None
        and not any(progress.is_outstanding for progress in failure.collectives)
    ]
    is_of_dumps = all(failure.code == RECORDED_ONLY for failure in alive)
    suspects = sorted(missing) if missing or has_late or not is_of_dumps else idle
    if len(suspects) > MAX_CULPRITS or len(suspects) * 2 >= len(alive):
        return []
    others = len(alive) - len(idle)
    what = "left no readable flight recorder dump" if missing else "had no collective outstanding"
    return [(rank, f"it {what}, and {others} peers waited") for rank in suspects]


def _build_candidates(
    diagnosis: Diagnosis, reasons: Iterable[tuple[int, str]], category: str = "hang"
) -> list[Candidate]:
    """Build one candidate per rank, with all reasons and the rank's document, if any."""
    by_rank = {failure.rank: failure for failure in _sort_failures(diagnosis)}
    reasons_of_rank: dict[int, list[str]] = defaultdict(list)
    for rank, why in reasons:
        reasons_of_rank[rank].append(why)
    return [
        Candidate(
            ", and ".join(why),
            rank,
            getattr(by_rank.get(rank), "node", ""),
            by_rank.get(rank),
            category,
            len(why),
        )
        for rank, why in sorted(reasons_of_rank.items())
    ]


def _sort_failures(diagnosis: Diagnosis) -> list[WorkerError]:
    return sort_by_rank(judged.failure for judged in diagnosis.workers)


def sort_by_rank(failures: Iterable[WorkerError]) -> list[WorkerError]:
    """Return failures by rank, so that results don't depend on the order of reading."""
    return sorted(
        failures,
        key=lambda failure: (
            failure.rank or 0,
            failure.node,
            failure.message,
            repr(failure.documents),
        ),
    )


def find_size_mismatch(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the rank with a wrong size, if a rank received a message longer than it expects.

    The receiver aborts, so the flight recorders of the remaining ranks decide: a single rank that
    differs is the culprit; if they agree, the receiver is. With two differing ranks, neither can be
    singled out.
    """
    receivers = [judged.failure for judged in diagnosis.classified if judged.signature == MISMATCH]
    if not receivers:
        return []
    recorded, printed = group_progress([judged.failure for judged in diagnosis.workers])
    odd = dict(_flatten_diverged(_find_diverged(recorded, printed)))
    # the aborted receiver left no flight recorder; at least two peers must agree, or nothing shows
    # who is wrong
    agreeing = max((len(members) for members in recorded.values()), default=0)
    receiver = receivers[0].rank
    if (
        not odd
        and len(receivers) == 1
        and receiver is not None
        and not receivers[0].collectives
        and agreeing > 1
    ):
        odd = {receiver: "it received a longer message than expected, and its peers' sizes agree"}
    return _build_candidates(diagnosis, odd.items(), "collective") if len(odd) == 1 else []


def find_mixed_calls(diagnosis: Diagnosis) -> list[Candidate]:
    """Return all ranks of a small group in which each waited in a different collective:
    none can be singled out.
    """
    waited = {judged.failure.rank for judged in diagnosis.waits}
    different = find_different_calls(_sort_failures(diagnosis))
    if (
        different is None
        or len(different.calls) > MAX_CULPRITS + 1
        or not different.calls.keys() <= waited
    ):
        return []
    place = f"number {different.number} of {different.group}"
    why = f"it called a different collective as {place}: {different.text}"
    return _build_candidates(diagnosis, [(rank, why) for rank in different.calls], "collective")


@dataclass(frozen=True, slots=True)
class DifferentCalls:
    """The first collective as which the ranks of a group called different ones,
    without a majority.
    """

    group: str
    number: int
    calls: dict[int, Collective]
    """By rank."""
    text: str
    """"rank 0 in all_reduce at train.py:62 in main, rank 1 in broadcast at train.py:50 in main"."""


def find_different_calls(failures: Sequence[WorkerError]) -> DifferentCalls | None:
    """Return the first collective in which the ranks of a group differ, or None if they agree or
    only a minority differs.

    Args:
        failures: of workers, in the order of their ranks.
    """
    for progress in group_progress(failures):
        for group, members in sorted(progress.items()):
            if _find_first_divergence(members) != []:
                continue
            for number, calls in sorted(_group_calls(members).items()):
                if _find_divergent_calls(calls) == []:
                    text = _describe_calls(dict(sorted(calls.items())), failures)
                    return DifferentCalls(group, number, dict(sorted(calls.items())), text)
    return None


def _describe_calls(calls: dict[int, Collective], failures: Sequence[WorkerError]) -> str:
    """Return which ranks are in which collective, and where."""
    names = {rank: call.operation.rpartition(":")[2] for rank, call in calls.items()}
    if len(set(names.values())) == 1:  # the sizes or types differ
        names = {
            rank: " ".join(
                filter(None, (names[rank], "with", *call.sizes.split(), *call.dtypes.split()[:1]))
            )
            for rank, call in calls.items()
        }
    wait_by_rank = {failure.rank: _locate_wait(failure) for failure in failures}
    ranks_by_place: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, name in names.items():
        ranks_by_place[name, wait_by_rank.get(rank, "")].append(rank)
    return ", ".join(
        f"{_list_ranks(ranks)} in {name}{f' at {frame}' if frame else ''}"
        for (name, frame), ranks in ranks_by_place.items()
    )


def _list_ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:_MAX_LISTED_RANKS]))
    unlisted_count = len(ranks) - _MAX_LISTED_RANKS
    more_phrase = f" and {unlisted_count} more" if unlisted_count > 0 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more_phrase}"


def _locate_wait(failure: WorkerError) -> str:
    """Return where a rank waited, by its stack or the exception that ended the wait."""
    frames = find_own_frames(failure.exception) if failure.exception is not None else ()
    return locate_main_thread(failure).frame or (format_place(frames[-1]) if frames else "")


def find_ranks_left_behind(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the ranks that hadn't called the collective in which most ranks
    failed with the same error.

    When NCCL aborts a communicator after a timeout, main threads continue with data that never
    arrived, and may raise any exception before the watchdog kills their process.
    """
    # if any rank reports a timeout, `find_stragglers` has better evidence
    workers = [] if diagnosis.waits else diagnosis.workers
    misled = [
        judged
        for judged in workers
        if judged.failure_class is FailureClass.UNCLEAR
        and judged.failure.exception is not None
        and any(progress.is_outstanding for progress in judged.failure.collectives)
    ]
    alike = {judged.failure.fingerprint for judged in misled}
    if len(misled) < MIN_TIMED_OUT_PER_CULPRIT or len(misled) * 2 <= len(workers) or len(alike) > 1:
        return []
    failed = {judged.failure.rank for judged in misled}
    recorded, _ = group_progress([judged.failure for judged in workers])
    ranks_behind, _ = find_ranks_behind(
        recorded, {}, find_message_peers(judged.failure for judged in workers)
    )
    return _build_candidates(
        diagnosis, [(rank, why) for rank, why in ranks_behind.items() if rank not in failed]
    )


def find_early_returns(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the ranks that had returned from training when all remaining ranks lost a peer:
    they had fewer batches.

    A rank that destroys its process group at the end, or exits, closes its connections. A program
    that exits with 0 leaves no document.
    """
    if exited_processes := find_agentless_exits(diagnosis.job):
        why = "its process had exited, and its peers waited for it or lost it"
        victims = [
            item
            for item in diagnosis.workers
            if item.waited or item.failure_class is FailureClass.CONSEQUENCE
        ]
        is_cause = len(exited_processes) <= min(MAX_CULPRITS, len(victims)) and len(victims) == len(
            diagnosis.workers
        )
        return [
            Candidate(why, exited_process.place.rank, exited_process.place.node, None, "exit")
            for exited_process in exited_processes
            if is_cause
        ]
    workers = diagnosis.workers
    positions = [(item.failure, locate_main_thread(item.failure)) for item in workers]
    # a rank with an exception propagating, or with a printed peer's error, exits because of the
    # peer: it is a victim
    exiting = [
        Candidate(
            f"{position.exit_stage} when its peers lost it",
            failure.rank,
            failure.node,
            failure,
            "exit",
        )
        for failure, position in positions
        if position.exit_stage
        and position.raised_at is None
        and not prints_a_peers_error(failure.printed)
    ]
    is_lost = any(judged.waited or judged.failure.exception is not None for judged in workers)
    size = max((judged.failure.place.world_size for judged in workers), default=0)
    silent = map_unfailed_ranks_to_nodes(diagnosis.job)
    # a rank that left nothing only counts as exited if every other rank is accounted for
    is_complete = len({judged.failure.rank for judged in workers} | silent.keys()) == size
    are_victims = all(
        judged.waited or judged.failure_class is FailureClass.CONSEQUENCE for judged in workers
    )
    if (
        not is_complete
        or not are_victims
        or not is_lost
        or len(exiting) + len(silent) > MAX_CULPRITS
    ):
        return []
    when = "while its peers waited for it" if diagnosis.waits else "when its peers lost it"
    why = f"it had exited with code 0 {when}"
    return exiting + [Candidate(why, rank, node, None, "exit") for rank, node in silent.items()]


_COLLECTIVES_FILE = LazyPattern(r"torch/distributed/distributed_c10d\.py$")

# Calls that may differ between ranks: operations in a subgroup, sends and receives
_SUBGROUP_CALL = LazyPattern(r"\bgroup=|\b(?:i?send|i?recv|batch_isend_irecv)\b")


def find_mismatched_wait(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the rank that timed out in a different operation than the majority,
    by the timeouts' tracebacks.

    It skipped an operation, or called an additional one. Subgroups, sends and receives are ignored:
    they may differ.
    """
    calls: dict[int, tuple[str, str]] = {}
    for judged in diagnosis.workers:
        exception = judged.failure.exception or getattr(
            find_printed_exception(judged.failure.printed), "exception", None
        )
        if judged.failure.rank is None or exception is None or judged.failure.collectives:
            return []
        first_cause = find_first_cause(exception)
        if not names_a_wait(first_cause):
            return []
        own_frames = find_own_frames(exception)[-1:]
        called = [
            frame.function for frame in first_cause.frames if _COLLECTIVES_FILE.search(frame.file)
        ]
        operation = called[-1] if called else ""
        if not own_frames or _SUBGROUP_CALL.search(f"{own_frames[0].code} {operation}"):
            return []
        calls[judged.failure.rank] = (operation, format_place(own_frames[0]))
    if len(calls) <= MIN_TIMED_OUT_PER_CULPRIT:
        return []
    usual, number = Counter(calls.values()).most_common(1)[0]
    odd = {rank: call for rank, call in calls.items() if call[0] != usual[0]}
    size = max(judged.failure.place.world_size for judged in diagnosis.workers)
    # every rank must be known, and all but one must agree: with fewer, the odd rank may be in the
    # majority
    if len(odd) != 1 or number != size - 1:
        return []
    ((rank, (name, position)),) = odd.items()
    why = f"it waited in {name or 'a backward pass'} at {position}, its peers at {usual[1]}"
    return _build_candidates(diagnosis, [(rank, why)])


def find_unfinished_collective(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the node of a single-node job if all ranks timed out in the same collective,
    with the same sizes.

    No rank was missing, so the transfer itself failed.
    """
    works: dict[int, list[tuple[str, Collective]]] = {}
    for judged in diagnosis.waits:
        if judged.failure.rank is not None:
            parsed = parse_progress(get_printed_text(judged.failure))
            works[judged.failure.rank] = [
                (progress.group, work) for progress in parsed for work in progress.last
            ]
    size = max((judged.failure.place.world_size for judged in diagnosis.classified), default=0)
    nodes = {judged.failure.node for judged in diagnosis.classified}
    waits = list(works.values())
    if (
        size < MIN_TIMED_OUT_PER_CULPRIT
        or len(works) < size
        or any(wait != waits[0] or not wait for wait in waits)
        or len(nodes) != 1
    ):
        return []
    work = waits[0][0][1]
    why = (
        f"all {len(works)} ranks waited in {work.operation} number {work.sequence}, and none"
        " finished"
    )
    return [Candidate(why, None, nodes.pop(), None, "network")]


def _find_diverged(recorded: Progress, printed: Progress) -> DivergedRanks:
    """Return for each group the ranks that differ from the majority in the first
    collective that differs.

    Recorders and printed texts spell operations and sizes differently, so each source is compared
    separately.
    """
    diverged: DivergedRanks = {}
    for progress in (recorded, printed):
        for group, members in progress.items():
            odd = _find_first_divergence(members)
            if odd is not None and not diverged.get(group):
                diverged[group] = [
                    (rank, f"as collective {number} of group {group} {why}")
                    for rank, number, why in odd
                ]
    return diverged


def _flatten_diverged(diverged: DivergedRanks) -> list[tuple[int, str]]:
    return [each for group in sorted(diverged) for each in diverged[group]]


def _find_first_divergence(
    members: dict[int, CollectiveProgress],
) -> list[tuple[int, int, str]] | None:
    """Return the ranks that differ in the first differing collective, with its number, or None if
    all ranks agree.
    """
    odd: list[tuple[int, int, str]] | None = None
    for number, calls in sorted(_group_calls(members).items()):
        divergent = _find_divergent_calls(calls)
        if divergent:
            # later collectives differ as a consequence
            return [(rank, number, why) for rank, why in divergent]
        if divergent is not None:
            odd = []
    return odd


def _group_calls(members: dict[int, CollectiveProgress]) -> dict[int, dict[int, Collective]]:
    """Return the known collectives of a group by number and rank."""
    steps: dict[int, dict[int, Collective]] = defaultdict(dict)
    for rank, progress in members.items():
        if progress.last_operation:
            steps[progress.enqueued][rank] = Collective(progress.enqueued, progress.last_operation)
        for entry in progress.last:
            if not entry.is_p2p:
                steps[entry.sequence][rank] = entry
    return steps


# Operations in which all ranks must pass equal sizes
_EQUAL_SIZES_OPERATION = LazyPattern(r"(?i)all_?reduce|all_?gather|reduce_scatter|broadcast")


def _find_divergent_calls(calls: dict[int, Collective]) -> list[tuple[int, str]] | None:
    """Return the ranks that differ from most in operation, type or size, or None if all agree."""
    is_same_everywhere = any(
        _EQUAL_SIZES_OPERATION.search(call.operation) for call in calls.values()
    )
    for field, verb, side in COMPARED_FIELDS:
        if field == "sizes" and not is_same_everywhere:
            break  # in this operation, ranks may pass different sizes
        # without the backend: "gloo:all_reduce"
        texts = {rank: getattr(call, field).rpartition(":")[2] for rank, call in calls.items()}
        sides = {rank: text.split(" -> ") for rank, text in texts.items()}
        # only the root of a gather has outputs; an operation name has only one side
        values = {
            rank: parts[side] for rank, parts in sides.items() if side < len(parts) and parts[side]
        }
        # only the first differing field counts: after a different operation, sizes differ as a
        # consequence
        if len(set(values.values())) > 1:
            usual, number = Counter(values.values()).most_common(1)[0]
            shown = next(texts[rank] for rank, value in values.items() if value == usual)
            return [
                (rank, f"it {verb} {texts[rank]}, its peers {shown}")
                for rank, value in sorted(values.items())
                if value != usual and number * 2 > len(values)
            ]
    return None


def _find_unstarted_ranks(recorded: Progress) -> list[tuple[int, str]]:
    """Return the few ranks that called a collective which their GPU hadn't started,
    unlike most GPUs.

    All ranks have called the same number of collectives, so the difference isn't in the program but
    on the GPU.
    """
    unstarted = []
    for group, members in sorted(recorded.items()):
        states: dict[int, str] = {}
        numbers = {progress.enqueued for progress in members.values()}
        for rank, progress in members.items():
            for entry in progress.last:
                states[rank] = states.get(rank, "") if entry.is_p2p else entry.state
        waiting = sorted(rank for rank, state in states.items() if state == "scheduled")
        # some backends never report "started": then "scheduled" proves nothing
        if len(numbers) == 1 and "started" in states.values() and len(waiting) * 2 < len(states):
            unstarted += [
                (rank, f"it had not started the last collective of group {group}")
                for rank in waiting
            ]
    return unstarted


def _find_ranks_outside_collective(
    alive: Sequence[WorkerError], waited: Collection[int | None], waits: Sequence[ClassifiedFailure]
) -> list[tuple[int, str]]:
    """Return the few ranks outside of any collective while other ranks waited in one.

    If all waits were for keys in the store, a rank in a collective may be the rank that didn't set
    them. Ranks in `waited` are excluded, because their main threads may be at any wait for the GPU;
    so are ranks at a position where a rank of `waits` waited.
    """
    raised = [judged.failure.exception for judged in waits if judged.failure.exception is not None]
    lines = {
        format_place(frame) for exception in raised for frame in find_own_frames(exception)[-1:]
    }
    functions = {LINE_IN_FUNCTION.sub(" in ", line) for line in lines}
    positions = {
        failure.rank: (locate_main_thread(failure), failure)
        for failure in alive
        if failure.rank not in waited
    }
    positions = {
        rank: position_and_failure
        for rank, position_and_failure in positions.items()
        if position_and_failure[0].exit_stage or position_and_failure[0].frame not in {"", *lines}
    }
    away = {
        rank: position_and_failure
        for rank, position_and_failure in positions.items()
        if rank is not None and position_and_failure[0].kind is PositionKind.ELSEWHERE
    }
    # prefer ranks in a function where no rank timed out: a rank near such a wait may be on its way
    # into it
    away = {
        rank: position_and_failure
        for rank, position_and_failure in away.items()
        if LINE_IN_FUNCTION.sub(" in ", position_and_failure[0].frame) not in functions
    } or away
    if not away and all(judged.signature == STORE_WAIT for judged in waits):
        away = {
            rank: position_and_failure
            for rank, position_and_failure in positions.items()
            if rank is not None
        }
    if len(away) > MAX_CULPRITS:
        return []
    return [
        (rank, f"{position.description} while its peers waited for it")
        for rank, (position, failure) in sorted(away.items())
        if not prints_a_timeout(failure)  # it waited, too, and may be retrying
    ]


def _find_dead_threads(workers: Sequence[ClassifiedFailure]) -> list[tuple[int, str]]:
    """Return the ranks with a dead thread that neither timed out nor are in a collective.

    A rank that is waiting in a collective waits for its peers, not for its own thread.
    """
    return [
        (failure.rank, describe_dead_thread(thread))
        for judged in workers
        for failure in (judged.failure,)
        if failure.rank is not None
        and not judged.waited
        and locate_main_thread(failure).kind is not PositionKind.COLLECTIVE
        for thread in failure.thread_failures[:1]
    ]


def _find_failed_checkpoint_threads(workers: Sequence[ClassifiedFailure]) -> list[tuple[int, str]]:
    """Return the ranks with a thread that failed on its own in torch's checkpoint,
    which all ranks' threads join.

    The main threads' positions don't matter: each main thread waits for its checkpoint thread, or
    continues training.
    """
    return [
        (failure.rank, describe_dead_thread(thread))
        for judged in workers
        for failure in (judged.failure,)
        for thread in failure.thread_failures
        if failure.rank is not None
        and is_own_fault(thread.exception)
        and any(
            CHECKPOINT_PACKAGE in frame.file
            for link in iter_exceptions(thread.exception)
            for frame in link.frames
        )
    ]


def describe_dead_thread(thread: ThreadFailure) -> str:
    """Return "its thread 'saver' ended with OSError: [Errno 28] No space left on device"."""
    return (
        f"its thread {thread.thread!r} ended with {thread.exception.type}:"
        f" {thread.exception.message}"
    )


def _find_ranks_without_timeout(workers: Sequence[ClassifiedFailure]) -> list[tuple[int, str]]:
    """Return the few ranks without a timeout although most ranks timed out.

    A rank that joined a collective of NCCL times out together with its group: the watchdogs wait
    for each other's dumps before they kill their processes. A rank that didn't join is stopped, or
    fails later because its peers are gone. gloo has no watchdog: there the first timeout ends the
    wait of all ranks.
    """
    timed_out = (
        judged
        for judged in workers
        if judged.waited and judged.signature in {TIMED_OUT, DUMP_SIGNAL}
    )
    waited = {judged.failure.rank for judged in timed_out}
    others = {
        judged.failure.rank: judged.signature
        for judged in workers
        if judged.failure.rank is not None
        and judged.failure.rank not in waited
        and (
            judged.failure_class is FailureClass.CONSEQUENCE
            or judged.signature == STUCK
            or judged.failure.is_silent
        )
    }
    if len(others) > MAX_CULPRITS or len(waited) < MIN_TIMED_OUT_PER_CULPRIT * len(others):
        return []
    why = {DUMP_SIGNAL: "it had no collective outstanding", STUCK: "its watchdog could not run"}
    return [
        (
            rank,
            (
                f"{why.get(signature, 'it did not time out')} while {len(waited)} peers waited in a"
                " collective"
            ),
        )
        for rank, signature in sorted(others.items())
    ]


def _find_rank_without_error(workers: Sequence[ClassifiedFailure]) -> list[tuple[int, str]]:
    """Return the rank without an error in its log, if all remaining ranks timed out or lost a peer.

    Only for jobs without stacks and counters, which would be better evidence.
    """
    failures = [judged.failure for judged in workers]
    if any(failure.stack_dumps or failure.collectives for failure in failures):
        return []
    quiet = [failure for failure in failures if failure.stopped_by_agent or failure.is_silent]
    if len(quiet) != 1 or quiet[0].rank is None or prints_a_timeout(quiet[0]):
        return []
    return [
        (quiet[0].rank, f"it logged no error, and {len(failures) - 1} peers timed out or failed")
    ]


def _find_reported_missing(classified: Sequence[ClassifiedFailure]) -> list[tuple[int, str]]:
    """Return the ranks listed as missing by a report that compares ranks,
    except ranks that sent such a report.
    """
    reports = [
        item for item in classified if item.signature in MISSING_RANKS_REPORTS and item.pointer
    ]
    reporters = {item.failure.rank for item in reports}
    reasons: dict[int, str] = {}
    for item in reports:
        wait = parse_reported_wait(item.failure)
        named = item.pointer.rank if item.pointer is not None else None
        ranks = wait.missing | ({named} if named is not None else set())
        for rank in sorted(ranks - reporters):
            reasons.setdefault(rank, wait.describe("it"))
    size = max((item.failure.place.world_size for item in classified), default=0)
    # if most ranks didn't come, the few that did may have been early
    are_most = len(reasons) > MAX_CULPRITS and len(reasons) * 2 > (size or 2 * len(reasons) - 1)
    return [] if are_most else sorted(reasons.items())


def _find_unresponsive_ranks(alive: Sequence[WorkerError]) -> list[tuple[int, str]]:
    """Return the few ranks that ignored the agent's signals until SIGKILL,
    and have neither a stack nor counters.
    """
    frozen = {
        failure.rank
        for failure in alive
        if failure.rank is not None
        and any(sent.signal == "SIGKILL" for sent in failure.sent_signals)
        and not failure.collectives
        and locate_main_thread(failure).kind is PositionKind.UNKNOWN
    }
    # if most ranks had to be killed, ignoring the signals is normal for this program
    if len(frozen) > MAX_CULPRITS or len(frozen) * 2 > len(alive):
        return []
    return [(rank, "it answered no signal and was killed by SIGKILL") for rank in sorted(frozen)]
