"""Select the failures that may be the root cause, the first of them,
and the stopped ranks with the same fault.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from firstfault.evidence.classification import (
    GPU_CATEGORIES,
    MISMATCH,
    ClassifiedFailure,
    FailureClass,
    prints_a_peers_error,
)
from firstfault.evidence.clocks import Clocks
from firstfault.evidence.diagnosis import NODE_END_CLASSES, BlameCounts, Diagnosis, FirstFault
from firstfault.evidence.hangs import find_stragglers
from firstfault.evidence.progress import drop_messages, get_waited_ns, group_progress
from firstfault.evidence.texts import find_message, is_unexplained_write
from firstfault.evidence.watchdogs import demote_ranks_that_gave_up
from firstfault.exceptions.ending_exception import ALL_TRIES_FAILED
from firstfault.exceptions.exceptions_in_text import get_short_name
from firstfault.exceptions.fingerprint import normalize_message
from firstfault.model import Subject, WorkerError

_PROCESS_GROUP_FOLDER = "torch/distributed/"
AFTER_A_FAILED_COLLECTIVE = "raised an exception after its own collective had failed"
AFTER_A_PRINTED_ERROR = "raised an exception after it had printed a peer's error"
"""The reason for a victim that printed a peer's error. Weaker evidence than a collective:
other output may match.
"""
_LONG_WAIT_NS = 60_000_000_000
"""Shorter than any NCCL timeout in use, longer than the difference between clocks."""
_MAX_ACCUSATION_LEAD_NS = 10_000_000_000
"""A failure that names a rank this long before that rank's fault isn't about that fault."""
_NAMED_RANK = re.compile(r"\branks?\W{1,4}(\d{1,6})\b", re.IGNORECASE)


def find_faults(diagnosis: Diagnosis) -> Diagnosis:
    """Set the possible root causes of a diagnosis,
    after ranks that failed after a peer's error became victims.

    An exception that was still inside the task function when its process was stopped isn't a fault
    if another rank may have timed out before it was raised.
    """
    diagnosis = demote_ranks_that_gave_up(_demote_ranks_after_peer_errors(diagnosis))
    waits, clocks = [judged.failure for judged in diagnosis.waits], diagnosis.clocks
    is_before_waits = clocks.make_before_all_check(waits)
    faults = tuple(
        judged
        for judged in diagnosis.classified
        if _is_fault(judged, diagnosis.blame_counts)
        and (not judged.in_flight or is_before_waits(judged.failure))
    )
    # a rank had timed out before any fault was recorded: the wait explains the faults, not the
    # reverse
    if any(map(clocks.make_before_all_check([fault.failure for fault in faults]), waits)):
        return replace(diagnosis, late=(*diagnosis.late, *faults))
    first = _choose_first(faults, clocks, diagnosis.blame_counts) if faults else None
    return replace(diagnosis, faults=faults, first=first)


def _is_fault(judged: ClassifiedFailure, blame_counts: BlameCounts) -> bool:
    """Whether a failure may be the root cause; an unclear exit counts if the agents
    broadcast it as the first one.
    """
    # the receiver of a message with a wrong size exits first, but the sender may be wrong
    may_be = is_unclear_exit(judged) and judged.signature != MISMATCH
    return judged.failure_class <= FailureClass.EXTERNAL or (
        may_be and blame_counts.times_broadcast(judged) > 0
    )


def gave_up(failure: WorkerError) -> bool:
    """Whether a process only reports that its retries failed:
    the actual reason may be a peer's error.
    """
    return ALL_TRIES_FAILED.match(find_message(failure).text) is not None


def is_unclear_exit(judged: ClassifiedFailure) -> bool:
    """Whether a worker exited on its own, without an exception or another reason,
    and wasn't waiting.
    """
    failure = judged.failure
    is_exit = (
        failure.exception is None
        and failure.subject is Subject.WORKER
        and not failure.stopped_by_agent
    )
    return (
        judged.failure_class is FailureClass.UNCLEAR
        and is_exit
        and not failure.is_silent
        and not judged.waited
    )


def came_after_long_wait(diagnosis: Diagnosis) -> bool:
    """Whether most ranks had waited in a collective for long before any fault was recorded.

    A watchdog prints how long its rank had waited. A fault at the end of that time isn't the reason
    for the wait: when the abort of a communicator unblocks ranks, they may raise anything.
    """
    faults = diagnosis.faults
    waits = [(judged.failure, get_waited_ns(judged.failure)) for judged in diagnosis.waits]
    long = [
        (failure, waited)
        for failure, waited in waits
        if waited >= _LONG_WAIT_NS and failure.timestamp_ns
    ]
    if (
        not long
        or len(long) * 2 < len(diagnosis.workers)
        or any(item.failure.timestamp_ns is None for item in faults)
    ):
        return False
    # "late" means in the second half of the shortest wait, which leaves room for wrong clocks and
    # slow teardowns
    began = max((failure.timestamp_ns or 0) - waited for failure, waited in long)
    return all(
        (item.failure.timestamp_ns or 0) - began > min(waited for _, waited in long) // 2
        for item in faults
    )


# --- ranks that failed after a peer's error -------------------------------------------------------


def _demote_ranks_after_peer_errors(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis in which ranks that failed after a peer's error are victims,
    if there is another cause.

    Such a rank retried, or its error handler raised. The actual cause is a fault of another rank
    that may have been earlier, or a straggler that most ranks waited for.
    """
    recorded, _ = group_progress([judged.failure for judged in diagnosis.workers])
    # for each group, the number of collectives that all members (with a flight recorder dump) have
    # called
    called_by_all = [
        (min(item.enqueued for item in members.values()), members) for members in recorded.values()
    ]
    counts = {
        (rank, item.group): count
        for count, members in called_by_all
        for rank, item in members.items()
    }
    met = ((judged, _explain_met_peer_error(judged, counts)) for judged in diagnosis.classified)
    reason_by_id = {id(judged): why for judged, why in met if why}
    roots = [
        judged for judged in diagnosis.classified if judged.failure_class <= FailureClass.EXTERNAL
    ]
    own_faults = [judged for judged in roots if id(judged) not in reason_by_id]
    if own_faults:
        # a fault that certainly came later can't be the cause, and ranks with the same fault share
        # one cause
        first = diagnosis.clocks.may_be_first([judged.failure for judged in own_faults])
        earliest = [
            fault.failure for fault, is_first in zip(own_faults, first, strict=True) if is_first
        ]
        is_before_all = diagnosis.clocks.make_before_all_check(
            earliest or [fault.failure for fault in own_faults]
        )
        prints = {fault.failure.fingerprint for fault in own_faults} - {""}
        # Keep the rest as faults: a rank with the same fingerprint as an independent fault failed
        # for the same reason, and a rank that failed before all independent faults can't be their
        # victim.
        reason_by_id = {
            id(item): reason_by_id[id(item)]
            for item in roots
            if id(item) in reason_by_id
            and (item.failure.fingerprint not in prints or gave_up(item.failure))
            and not is_before_all(item.failure)
        }
    changed = tuple(
        (
            replace(
                judged,
                failure_class=FailureClass.CONSEQUENCE,
                why=reason_by_id[id(judged)],
                waited=not own_faults,
            )
            if id(judged) in reason_by_id
            else judged
        )
        for judged in diagnosis.classified
    )
    others = replace(diagnosis, classified=changed)
    # without an independent fault, the peers' errors need a straggler as their cause
    return (
        others
        if own_faults or (len(reason_by_id) * 2 > len(changed) and find_stragglers(others))
        else diagnosis
    )


def _explain_met_peer_error(judged: ClassifiedFailure, counts: dict[tuple[int, str], int]) -> str:
    """Return the evidence that a rank had received a peer's error before it raised, or an empty
    string without such evidence.

    The evidence is a collective that not all members called, or a printed error about a peer.
    """
    exception = judged.failure.exception
    if judged.failure_class > FailureClass.OWN_EXIT or exception is None:
        return ""
    # an exception raised by torch's collectives has a text about the peer; from init_process_group
    # it may be a retry
    begins = any(frame.function == "init_process_group" for frame in exception.frames)
    if exception.frames and _PROCESS_GROUP_FOLDER in exception.frames[-1].file and not begins:
        return ""
    # gloo fails in the call itself, so a collective that a peer never called has raised; NCCL's
    # calls return at once
    if any(
        progress.last_operation.startswith("gloo:")
        and progress.enqueued > counts.get((judged.failure.rank or 0, progress.group), 0)
        for progress in map(drop_messages, judged.failure.collectives)
    ):
        return AFTER_A_FAILED_COLLECTIVE
    has_printed = not judged.specific and prints_a_peers_error(judged.failure.printed)
    return AFTER_A_PRINTED_ERROR if has_printed else ""


# --- the first of several faults ------------------------------------------------------------------


def _choose_first(
    faults: Sequence[ClassifiedFailure], clocks: Clocks, blame_counts: BlameCounts
) -> FirstFault:
    faults = _drop_failures_that_blame_a_fault(_drop_aftermath(faults, clocks), clocks)
    faults = _drop_writes_to_full_disk(faults)
    faults = sorted(faults, key=lambda fault: _build_sort_key(fault, blame_counts))
    may_be_first = clocks.may_be_first([fault.failure for fault in faults])
    contenders = [fault for fault, may_be in zip(faults, may_be_first, strict=True) if may_be]
    # contradictory clocks: each fault seems later than another
    contenders = contenders or list(faults)
    first = contenders[0]
    # Equal exceptions, or equal texts before an exit, are one fault at any time. Equal signals have
    # no text to compare, so they are one fault only if they may have come at the same time.
    has_called_exit = first.failure.exception is not None
    tells = first.failure_class is not FailureClass.OWN_EXIT or (
        has_called_exit and find_message(first.failure).text
    )
    alike = faults if tells else contenders
    failed_alike = tuple(fault for fault in alike if _is_same(fault, first))
    alike_ids = set(map(id, failed_alike))
    other_faults = tuple(fault for fault in faults if id(fault) not in alike_ids)
    return FirstFault(
        first,
        failed_alike,
        other_faults,
        tuple(fault for fault in contenders if not _is_same(fault, first)),
    )


def _drop_aftermath(faults: Sequence[ClassifiedFailure], clocks: Clocks) -> list[ClassifiedFailure]:
    """Drop exits of workers on a lost or terminated node,
    unless they certainly came before the node's end.

    Also drop workers that died by SIGTERM after another worker of their node had failed: torch's
    agent sends SIGTERM.
    """
    ends: dict[str, list[ClassifiedFailure]] = {}
    earliest: dict[str, ClassifiedFailure] = {}
    for fault in faults:
        if fault.failure_class in NODE_END_CLASSES:
            ends.setdefault(fault.failure.node, []).append(fault)
        elif not _is_terminated(fault) and not (
            fault.failure.node in earliest
            and clocks.is_before(earliest[fault.failure.node].failure, fault.failure)
        ):
            earliest[fault.failure.node] = fault

    def follows(fault: ClassifiedFailure) -> bool:
        # the end of an unnamed node is the end of the whole job
        ends_of_nodes = [
            *ends.get(fault.failure.node, []),
            *(ends.get("", []) if fault.failure.node else []),
        ]
        first = earliest.get(fault.failure.node)
        is_exit = (
            fault.failure_class is FailureClass.OWN_EXIT and fault.failure.subject is Subject.WORKER
        )
        if (
            is_exit
            and first is not None
            and _is_terminated(fault)
            and clocks.is_before(first.failure, fault.failure)
        ):
            return True
        return (
            is_exit
            and bool(ends_of_nodes)
            and not any(clocks.is_before(fault.failure, end.failure) for end in ends_of_nodes)
        )

    return [fault for fault in faults if not follows(fault)]


def _is_terminated(fault: ClassifiedFailure) -> bool:
    exception = fault.failure.exception
    return fault.failure.signal == "SIGTERM" or (
        exception is not None and get_short_name(exception) == "SignalException"
    )


def _drop_failures_that_blame_a_fault(
    faults: Sequence[ClassifiedFailure], clocks: Clocks
) -> list[ClassifiedFailure]:
    """Drop failures that only report another rank's fault: they name that rank,
    and it names no rank itself.

    The program's own exception names a rank if it mentions the rank and contains the whole text of
    that rank's fault. A failure long before the named rank's fault stays.
    """
    accusing_none: dict[int, list[ClassifiedFailure]] = {}
    for fault in faults:
        if fault.failure.rank is not None and (fault.pointer is None or fault.pointer.rank is None):
            accusing_none.setdefault(fault.failure.rank, []).append(fault)

    def accuses(fault: ClassifiedFailure) -> bool:
        rank = fault.pointer.rank if fault.pointer is not None else None
        accused = (
            accusing_none.get(rank, []) if rank is not None and rank != fault.failure.rank else []
        )
        if not accused:
            text = find_message(fault.failure).text
            named = set(map(int, _NAMED_RANK.findall(text))) - {fault.failure.rank}
            spoken = (
                (item, find_message(item.failure).text)
                for rank in named
                for item in accusing_none.get(rank, ())
            )
            accused = [
                item
                for item, repeated in spoken
                if repeated and repeated in text and repeated != text
            ]
        return any(
            clocks.get_certain_gap_ns(fault.failure, item.failure) < _MAX_ACCUSATION_LEAD_NS
            for item in accused
        )

    return [fault for fault in faults if not accuses(fault)]


def _drop_writes_to_full_disk(faults: Sequence[ClassifiedFailure]) -> list[ClassifiedFailure]:
    """Drop failed writes without a reason if another rank's error has the reason: a full disk.

    On a full file system that all ranks share, some of them get ENOSPC, and others find that less
    was written.
    """
    if not any(fault.category == "disk_full" for fault in faults):
        return list(faults)
    return [
        fault
        for fault in faults
        if fault.category not in {"storage", "checkpoint"}
        or not is_unexplained_write(fault.failure)
    ]


def _build_sort_key(fault: ClassifiedFailure, blame_counts: BlameCounts) -> tuple[object, ...]:
    """Return the sort key of faults with an uncertain order in time: by evidence, then by
    accusations, then by time.

    An exit that the agents broadcast sorts before an exception that names no peer: a program may
    catch a peer's error and raise its own exception instead.
    """
    failure = fault.failure
    is_killed = failure.signal == "SIGKILL" and not failure.sent_signals
    return (
        # a peer can't cause a GPU fault or a SIGKILL from outside, and the cleanup after one may
        # fail in any way
        not is_killed and fault.category not in GPU_CATEGORIES,
        # when its process was stopped, the exception was still inside the task function, which
        # might have handled it
        fault.in_flight,
        # "all tries failed" hides the actual error
        gave_up(failure),
        # a signature identifies this particular fault
        not fault.specific,
        # the agents noticed these failures first
        -blame_counts.times_broadcast(fault),
        # an exception, then an exit, then the end of a node
        fault.failure_class,
        # peers name the process that they lost the connection to
        -blame_counts.of(fault),
        # clocks may differ, so times count only here; a failure without a time comes last
        failure.timestamp_ns is None,
        failure.timestamp_ns or 0,
        # arbitrary, so that all readers of the same documents choose the same failure
        failure.rank if failure.rank is not None else 1 << 62,
        failure.node,
        failure.message,
        failure.code,
        failure.fingerprint,
        tuple(document.name for document in failure.documents),
        repr(failure),
    )


def _is_same(fault: ClassifiedFailure, first: ClassifiedFailure) -> bool:
    is_from_outside = fault.failure_class is first.failure_class is FailureClass.EXTERNAL
    if fault is first or is_from_outside or fault.category == first.category == "interrupted":
        return True
    fingerprint = first.failure.fingerprint
    is_fault = first.failure_class in {FailureClass.OWN_FAULT, FailureClass.OWN_EXIT}
    text = find_message(fault.failure)
    of_first = find_message(first.failure)
    # a crash while the agent stopped the process has the stopped position in its fingerprint:
    # compare the texts
    is_crash = fault.failure.crashed_while_stopped or first.failure.crashed_while_stopped
    if is_fault and is_crash and fault.specific and fault.signature == first.signature:
        return (text.what, normalize_message(text.text)) == (
            of_first.what,
            normalize_message(of_first.text),
        )
    if not is_fault or not fingerprint or fault.failure.fingerprint != fingerprint:
        return False
    if gave_up(fault.failure) and not gave_up(first.failure):
        return bool(of_first.text) and of_first.text in fault.failure.printed
    # sys.exit(1) has the same fingerprint whatever was printed before it: the text must be equal,
    # too
    if (
        text.exception is not fault.failure.exception
        or of_first.exception is not first.failure.exception
    ):
        return (text.what, normalize_message(text.text)) == (
            of_first.what,
            normalize_message(of_first.text),
        )
    return fault.failure.exception is not None or fault.signature == first.signature
