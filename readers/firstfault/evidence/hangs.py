"""The ranks that the others waited for: behind in their collectives, elsewhere in the code, or not answering.

torch's flight recorder, or the text that its watchdog printed, shows how many collectives of each group a rank did.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

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
from firstfault.evidence.diagnosis import Candidate, Diagnosis, ended_alone, without_failure
from firstfault.evidence.progress import (
    Progress,
    behind,
    message_peers,
    printed_by,
    progress_by_group,
    progress_in_text,
)
from firstfault.exceptions.first_cause import find_first_cause, find_own_frames, iter_exceptions
from firstfault.exceptions.printed_tracebacks import find_printed_exception
from firstfault.exceptions.stack_position import PositionKind, locate_main_thread
from firstfault.exceptions.traceback_format import format_place
from firstfault.model import Collective, CollectiveProgress, ThreadFailure, WorkerError
from firstfault.model.failure import RECORDED_ONLY

_SAME_EVERYWHERE = re.compile(r"all_?reduce|all_?gather|reduce_scatter|broadcast", re.IGNORECASE)
"""Operations whose ranks all pass the same sizes."""
_COMPARED = (
    ("operation", "called", 0),
    ("dtypes", "used", 0),
    ("dtypes", "used", 1),
    ("sizes", "passed", 0),
    ("sizes", "passed", 1),
)
"""Fields of a collective, how a sentence speaks of them, and whether inputs (0) or outputs (1) are compared."""
_MANY = 3
"""More ranks than this aren't one fault."""
_SEVERAL = 2
"""So many ranks must have timed out for each one that didn't."""
_WITHIN = re.compile(r":\d+ in (?!main$|<module>$)")
"""In a place in the program: its line, if its function is small."""
_ANSWERS = {"KeyboardInterrupt", "SignalException", "SystemExit"}
"""What a process raises because of its agent's signal."""
_CHECKPOINT = "torch/distributed/checkpoint/"
_REPORTS = {"desync-report", BARRIER_REPORT, "stalled-ops"}
"""Signatures of reports that compare all ranks."""
_CALLS = re.compile(r"torch/distributed/distributed_c10d\.py$")
_OF_SOME_RANKS = re.compile(r"\bgroup=|\b(?:i?send|i?recv|batch_isend_irecv)\b")
"""Calls that not all ranks make."""
Apart = dict[str, list[tuple[int, str]]]
"""The groups whose ranks called a collective differently, each with the ranks that differ from most, if most agree."""


def hung(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the ranks that the others waited for, by their stacks, collective counters and failed threads.

    Where all ranks are in the same place, none is returned. If no rank timed out, all stand where they were stopped.
    """
    if not diagnosis.waits:
        return []
    if failed := _failed_checkpoints(diagnosis.workers):
        return _candidates(diagnosis, failed)
    classified = diagnosis.classified
    alive = _sorted(diagnosis)
    recorded, printed = progress_by_group(alive)
    groups = sorted({*recorded, *printed})
    known = {group: {**printed.get(group, {}), **recorded.get(group, {})} for group in groups}
    # a rank that met an error about a peer stood where it handled that
    raised = (item for item in classified if item.failure.exception and item.failure_class >= FailureClass.UNCLEAR)
    victims = (item for item in raised if not (item.failure.sent_signals and item.failure.what in _ANSWERS))
    met = {item.failure.rank for item in (*diagnosis.waits, *victims)}
    elsewhere = _elsewhere(alive, met, diagnosis.waits)
    apart = _apart(recorded, printed)
    late, is_one_fault = behind(known, apart, message_peers(alive))
    missing = _without_dump(alive)
    reasons = [
        *elsewhere,
        *_each(apart),
        *late.items(),
        *_told_by_dumps(alive, missing, has_late=bool(late)),
        *_not_started(recorded),
        *_threads(diagnosis.workers),
        *_frozen(alive),
        *_did_not_time_out(diagnosis.workers),
        *_reported(classified),
        *_said_nothing(diagnosis.workers),
    ]
    if elsewhere:
        # a rank that waited itself isn't the one that the others waited for, whatever its counters and threads; nor is
        # one that tries again after its timeout
        met |= {failure.rank for failure in alive if prints_a_timeout(failure)}
        reasons = [(rank, why) for rank, why in reasons if rank not in met]
    found = _candidates(diagnosis, reasons)
    # groups of other ranks have other names and counts
    are_shared = late if is_one_fault else {}
    return [replace(item, is_shared=item.rank in are_shared, is_sure=not missing) for item in found]


def _without_dump(alive: Sequence[WorkerError]) -> set[int]:
    """Return the ranks that are members of a group and left no dump, in a job of which only dumps are known."""
    groups = {progress.members for failure in alive for progress in failure.collectives}
    is_of_dumps = all(failure.code == RECORDED_ONLY for failure in alive)
    return set().union(*groups) - {failure.rank for failure in alive} if is_of_dumps else set()


def _told_by_dumps(alive: Sequence[WorkerError], missing: Collection[int], *, has_late: bool) -> list[tuple[int, str]]:
    """Return the few ranks without a dump; if all have one and none is behind, the few that didn't wait."""
    idle = [
        failure.rank
        for failure in alive
        if failure.rank is not None and not any(progress.is_outstanding for progress in failure.collectives)
    ]
    is_of_dumps = all(failure.code == RECORDED_ONLY for failure in alive)
    found = sorted(missing) if missing or has_late or not is_of_dumps else idle
    if len(found) > _MANY or len(found) * 2 >= len(alive):
        return []
    others = len(alive) - len(idle)
    told = "left no readable dump of its flight recorder" if missing else "had no collective outstanding"
    return [(rank, f"it {told}, and {others} others waited") for rank in found]


def _candidates(diagnosis: Diagnosis, reasons: Iterable[tuple[int, str]], category: str = "hang") -> list[Candidate]:
    """Return the ranks that have reasons as candidates, each with its document, if it left one."""
    by_rank = {failure.rank: failure for failure in _sorted(diagnosis)}
    found: dict[int, list[str]] = defaultdict(list)
    for rank, why in reasons:
        found[rank].append(why)
    return [
        Candidate("; ".join(why), rank, getattr(by_rank.get(rank), "node", ""), by_rank.get(rank), category, len(why))
        for rank, why in sorted(found.items())
    ]


def _sorted(diagnosis: Diagnosis) -> list[WorkerError]:
    """Return the failures of workers by rank: in whatever order they were read, the result is the same."""
    return sorted(
        (judged.failure for judged in diagnosis.workers),
        key=lambda failure: (failure.rank or 0, failure.node, failure.message, repr(failure.documents)),
    )


def mismatched(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the rank that passed another size than the others, if one received a message longer than it expects.

    The receiver aborts, so the others' flight recorders decide: if one of them differs, it is that rank; if all agree,
    it is the receiver. Two ranks that differ can't be told apart.
    """
    receivers = [judged.failure for judged in diagnosis.classified if judged.signature == MISMATCH]
    if not receivers:
        return []
    recorded, printed = progress_by_group([judged.failure for judged in diagnosis.workers])
    odd = dict(_each(_apart(recorded, printed)))
    agreeing = max((len(members) for members in recorded.values()), default=0)
    receiver = receivers[0].rank
    if not odd and len(receivers) == 1 and receiver is not None and not receivers[0].collectives and agreeing > 1:
        odd = {receiver: "it received a message longer than it expects, and the others' sizes agree"}
    return _candidates(diagnosis, odd.items(), "user_code") if len(odd) == 1 else []


def called_differently(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the few ranks of a group that all waited in different collectives: which of them is wrong isn't known."""
    waited = {judged.failure.rank for judged in diagnosis.waits}
    for progress in progress_by_group(_sorted(diagnosis)):
        for group, members in sorted(progress.items()):
            is_split = len(members) <= _MANY + 1 and members.keys() <= waited and _first_odd_ones(members) == []
            calls = {rank: one.last[-1] for rank, one in sorted(members.items()) if one.last} if is_split else {}
            if len(calls) > 1:
                told = ", ".join(f"rank {rank} {call.operation} with {call.sizes}" for rank, call in calls.items())
                number = next(iter(calls.values())).sequence
                why = f"it called a different collective as number {number} of {group}: {told}"
                return _candidates(diagnosis, [(rank, why) for rank in calls], "user_code")
    return []


def left_behind(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the ranks that had not called a collective which most others had outstanding when they failed alike.

    When NCCL aborts a communicator after a timeout, the main threads continue with data that never arrived. They may
    raise anything before the watchdog ends their process.
    """
    workers = [] if diagnosis.waits else diagnosis.workers
    misled = [
        judged
        for judged in workers
        if judged.failure_class is FailureClass.UNCLEAR
        and judged.failure.exception is not None
        and any(progress.is_outstanding for progress in judged.failure.collectives)
    ]
    alike = {judged.failure.fingerprint for judged in misled}
    if len(misled) < _SEVERAL or len(misled) * 2 <= len(workers) or len(alike) > 1:
        return []
    failed = {judged.failure.rank for judged in misled}
    recorded, _ = progress_by_group([judged.failure for judged in workers])
    late, _ = behind(recorded, {}, message_peers(judged.failure for judged in workers))
    return _candidates(diagnosis, [(rank, why) for rank, why in late.items() if rank not in failed])


def returned_early(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the ranks whose function had returned when all others lost a peer: those that left, with fewer batches.

    A rank that destroys its process group at its end, or just leaves, closes its connections. Of a program that exits
    with 0 nothing is recorded.
    """
    if left := ended_alone(diagnosis.job):
        why = "its process had ended by itself, and the others waited for it or lost a peer"
        victims = [item for item in diagnosis.workers if item.waited or item.failure_class is FailureClass.CONSEQUENCE]
        is_cause = len(left) <= min(_MANY, len(victims)) and len(victims) == len(diagnosis.workers)
        return [Candidate(why, at.place.rank, at.place.node, None, "exit") for at in left if is_cause]
    workers = diagnosis.workers
    stood = [(item.failure, locate_main_thread(item.failure)) for item in workers]
    # a victim that handles its peer's error may leave, too
    found = [
        Candidate(f"{where.exit_stage} when the others lost a peer", failure.rank, failure.node, failure, "exit")
        for failure, where in stood
        if where.exit_stage and where.raised_at is None and not prints_a_peers_error(failure.printed)
    ]
    is_lost = any(judged.waited or judged.failure.exception is not None for judged in workers)
    size = max((judged.failure.place.world_size for judged in workers), default=0)
    silent = without_failure(diagnosis.job)
    is_complete = len({judged.failure.rank for judged in workers} | silent.keys()) == size
    are_victims = all(judged.waited or judged.failure_class is FailureClass.CONSEQUENCE for judged in workers)
    if not is_complete or not are_victims or not is_lost or len(found) + len(silent) > _MANY:
        return []
    meanwhile = "while the others waited for it" if diagnosis.waits else "when the others lost a peer"
    why = f"it had exited with code 0 {meanwhile}"
    return found + [Candidate(why, rank, node, None, "exit") for rank, node in silent.items()]


def waited_apart(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the rank that waited in another operation than most, by the tracebacks of their timeouts.

    It left an operation out, or called one more. Ranks of several groups, and those that send and receive, may differ.
    """
    calls: dict[int, tuple[str, str]] = {}
    for judged in diagnosis.workers:
        exception = judged.failure.exception or getattr(
            find_printed_exception(judged.failure.printed), "exception", None
        )
        if judged.failure.rank is None or exception is None or judged.failure.collectives:
            return []
        if not names_a_wait(find_first_cause(exception)):
            return []
        own, frames = find_own_frames(exception)[-1:], find_first_cause(exception).frames
        called = [frame.function for frame in frames if _CALLS.search(frame.file)] or [""]
        if not own or _OF_SOME_RANKS.search(f"{own[0].code} {called[-1]}"):
            return []
        calls[judged.failure.rank] = (called[-1], format_place(own[0]))
    if len(calls) <= _SEVERAL:
        return []
    usual, number = Counter(calls.values()).most_common(1)[0]
    odd = {rank: call for rank, call in calls.items() if call[0] != usual[0]}
    size = max(judged.failure.place.world_size for judged in diagnosis.workers)
    if len(odd) != 1 or number != size - 1:
        return []
    ((rank, (name, at)),) = odd.items()
    why = f"it waited in {name or 'a backward pass'} at {at}, the others at {usual[1]}"
    return _candidates(diagnosis, [(rank, why)])


def all_in_one_collective(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the node of a job on one node if all ranks timed out in the same collective, with the same sizes.

    Then none of them was missing: the data didn't get from one to another.
    """
    works: dict[int, list[tuple[str, Collective]]] = {}
    for judged in diagnosis.waits:
        if judged.failure.rank is not None:
            found = progress_in_text(printed_by(judged.failure))
            works[judged.failure.rank] = [(progress.group, work) for progress in found for work in progress.last]
    size = max((judged.failure.place.world_size for judged in diagnosis.classified), default=0)
    nodes = {judged.failure.node for judged in diagnosis.classified}
    waits = list(works.values())
    if size < _SEVERAL or len(works) < size or any(wait != waits[0] or not wait for wait in waits) or len(nodes) != 1:
        return []
    work = waits[0][0][1]
    why = f"all {len(works)} ranks waited in {work.operation} number {work.sequence}, and none finished"
    return [Candidate(why, None, nodes.pop(), None, "network")]


def _apart(recorded: Progress, printed: Progress) -> Apart:
    """Return the ranks that differ from most in the first collective of a group in which the ranks differ.

    Recorders and texts give operations and sizes in different words, so each is compared with its own kind.
    """
    found: Apart = {}
    for progress in (recorded, printed):
        for group, members in progress.items():
            odd = _first_odd_ones(members)
            if odd is not None and not found.get(group):
                found[group] = [(rank, f"as collective {number} of group {group} {why}") for rank, number, why in odd]
    return found


def _each(apart: Apart) -> list[tuple[int, str]]:
    return [each for group in sorted(apart) for each in apart[group]]


def _first_odd_ones(members: dict[int, CollectiveProgress]) -> list[tuple[int, int, str]] | None:
    """Return what differs in the first collective in which ranks differ; None: they agree in all."""
    steps: dict[int, dict[int, Collective]] = defaultdict(dict)
    for rank, progress in members.items():
        if progress.last_operation:
            steps[progress.enqueued][rank] = Collective(progress.enqueued, progress.last_operation)
        for entry in progress.last:
            if not entry.is_p2p:
                steps[entry.sequence][rank] = entry
    odd: list[tuple[int, int, str]] | None = None
    for number, calls in sorted(steps.items()):
        found = _odd_ones(calls)
        if found:
            return [(rank, number, why) for rank, why in found]  # a rank that has diverged differs in all that follows
        if found is not None:
            odd = []
    return odd


def _odd_ones(calls: dict[int, Collective]) -> list[tuple[int, str]] | None:
    """Return the ranks that called one collective with another operation, type or size than most; None: all agree."""
    is_same_everywhere = any(_SAME_EVERYWHERE.search(call.operation) for call in calls.values())
    for field, verb, side in _COMPARED:
        if field == "sizes" and not is_same_everywhere:
            break  # the ranks may pass different sizes
        # an operation's backend stands before it: "gloo:all_reduce"
        told = {rank: getattr(call, field).rpartition(":")[2] for rank, call in calls.items()}
        sides = {rank: text.split(" -> ") for rank, text in told.items()}
        # the root of a gather has outputs and the others none; an operation has only one side
        values = {rank: parts[side] for rank, parts in sides.items() if side < len(parts) and parts[side]}
        if len(set(values.values())) > 1:
            usual, number = Counter(values.values()).most_common(1)[0]
            shown = next(told[rank] for rank, value in values.items() if value == usual)
            return [
                (rank, f"it {verb} {told[rank]}, the others {shown}")
                for rank, value in sorted(values.items())
                if value != usual and number * 2 > len(values)
            ]
    return None


def _not_started(recorded: Progress) -> list[tuple[int, str]]:
    """Return the few ranks whose GPU had not started a collective that the others' GPUs had."""
    found = []
    for group, members in sorted(recorded.items()):
        states: dict[int, str] = {}
        numbers = {progress.enqueued for progress in members.values()}
        for rank, progress in members.items():
            for entry in progress.last:
                states[rank] = states.get(rank, "") if entry.is_p2p else entry.state
        waiting = sorted(rank for rank, state in states.items() if state == "scheduled")
        # some recorders never tell that a collective has started
        if len(numbers) == 1 and "started" in states.values() and len(waiting) * 2 < len(states):
            found += [(rank, f"it had not started the last collective of group {group}") for rank in waiting]
    return found


def _elsewhere(
    alive: Sequence[WorkerError], waited: Collection[int | None], waits: Sequence[ClassifiedFailure]
) -> list[tuple[int, str]]:
    """Return the few ranks that were outside of any collective while others waited in one.

    If all waits were for keys in the store, a rank in a collective may be the one that didn't set them. The main
    thread of ranks that `waited` may stand at any wait for the GPU. A rank that stands where those of `waits` did waits
    as well.
    """
    raised = [judged.failure.exception for judged in waits if judged.failure.exception is not None]
    lines = {format_place(frame) for exception in raised for frame in find_own_frames(exception)[-1:]}
    functions = {_WITHIN.sub(" in ", line) for line in lines}
    stood = {failure.rank: (locate_main_thread(failure), failure) for failure in alive if failure.rank not in waited}
    stood = {rank: at for rank, at in stood.items() if at[0].exit_stage or at[0].frame not in {"", *lines}}
    away = {rank: at for rank, at in stood.items() if rank is not None and at[0].kind is PositionKind.ELSEWHERE}
    away = {rank: at for rank, at in away.items() if _WITHIN.sub(" in ", at[0].frame) not in functions} or away
    if not away and all(judged.signature == STORE_WAIT for judged in waits):
        away = {rank: at for rank, at in stood.items() if rank is not None}
    if len(away) > _MANY:
        return []
    return [
        (rank, f"{where.description} while the others waited for it")
        for rank, (where, failure) in sorted(away.items())
        if not prints_a_timeout(failure)  # it may be about to try again
    ]


def _threads(workers: Sequence[ClassifiedFailure]) -> list[tuple[int, str]]:
    """Return the ranks that have a dead thread, and neither timed out nor stand in a collective.

    A rank that waits for another one doesn't do so because of its own helper thread.
    """
    return [
        (failure.rank, _why_ended(thread))
        for judged in workers
        for failure in (judged.failure,)
        if failure.rank is not None
        and not judged.waited
        and locate_main_thread(failure).kind is not PositionKind.COLLECTIVE
        for thread in failure.thread_failures[:1]
    ]


def _failed_checkpoints(workers: Sequence[ClassifiedFailure]) -> list[tuple[int, str]]:
    """Return the ranks with a thread that failed by itself in torch's checkpoint, in which the others' threads wait.

    It doesn't matter where the main threads stand: each waits for its own thread, or trains on.
    """
    return [
        (failure.rank, _why_ended(thread))
        for judged in workers
        for failure in (judged.failure,)
        for thread in failure.thread_failures
        if failure.rank is not None
        and is_own_fault(thread.exception)
        and any(_CHECKPOINT in frame.file for link in iter_exceptions(thread.exception) for frame in link.frames)
    ]


def _why_ended(thread: ThreadFailure) -> str:
    return f"its thread {thread.thread!r} ended with {thread.exception.type}: {thread.exception.message}"


def _did_not_time_out(workers: Sequence[ClassifiedFailure]) -> list[tuple[int, str]]:
    """Return the few ranks that didn't time out although most others did.

    A rank that has joined a collective of NCCL times out with the others of its group: their watchdogs wait for each
    other's dumps before they end the processes. One that hasn't joined is stopped, or fails when it comes and the
    others are gone. gloo has no watchdog: there the first timeout ends the others' wait.
    """
    timed_out = (judged for judged in workers if judged.waited and judged.signature in {TIMED_OUT, DUMP_SIGNAL})
    waited = {judged.failure.rank for judged in timed_out}
    others = {
        judged.failure.rank: judged.signature
        for judged in workers
        if judged.failure.rank is not None
        and judged.failure.rank not in waited
        and (judged.failure_class is FailureClass.CONSEQUENCE or judged.signature == STUCK or judged.failure.is_silent)
    }
    if len(others) > _MANY or len(waited) < _SEVERAL * len(others):
        return []
    why = {DUMP_SIGNAL: "it had no collective outstanding", STUCK: "its watchdog could not run"}
    return [
        (rank, f"{why.get(signature, 'it did not time out')} when {len(waited)} others waited in a collective")
        for rank, signature in sorted(others.items())
    ]


def _said_nothing(workers: Sequence[ClassifiedFailure]) -> list[tuple[int, str]]:
    """Return the rank of which a log has no word about a failure, if all others timed out or lost a peer.

    Agents tell where a rank stood that they stopped: then that decides.
    """
    failures = [judged.failure for judged in workers]
    if any(failure.stack_dumps or failure.collectives for failure in failures):
        return []
    quiet = [failure for failure in failures if failure.stopped_by_agent or failure.is_silent]
    if len(quiet) != 1 or quiet[0].rank is None or prints_a_timeout(quiet[0]):
        return []
    return [(quiet[0].rank, f"its log has no word about a failure, and {len(failures) - 1} others timed out or failed")]


def _reported(classified: Sequence[ClassifiedFailure]) -> list[tuple[int, str]]:
    """Return the ranks that a report of missing ranks names, torch's or Horovod's, and that report no other rank."""
    reports = [(item, item.pointer.rank) for item in classified if item.signature in _REPORTS and item.pointer]
    missing = {rank for _, rank in reports if rank is not None} - {item.failure.rank for item, _ in reports}
    return [(rank, "a report of missing ranks names it") for rank in sorted(missing)]


def _frozen(alive: Sequence[WorkerError]) -> list[tuple[int, str]]:
    """Return the few ranks that gave neither a stack nor counters and had to be killed."""
    frozen = {
        failure.rank
        for failure in alive
        if failure.rank is not None
        and any(sent.signal == "SIGKILL" for sent in failure.sent_signals)
        and not failure.collectives
        and locate_main_thread(failure).kind is PositionKind.UNKNOWN
    }
    if len(frozen) > _MANY or len(frozen) * 2 > len(alive):
        return []
    return [(rank, "it answered no signal and was killed by SIGKILL") for rank in sorted(frozen)]
