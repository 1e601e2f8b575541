"""The verdict on a fault: a failure that isn't a consequence, or a node that ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from firstfault.evidence import faults
from firstfault.evidence.classification import (
    LAUNCHER_SUMMARY_SIGNATURES,
    ORIGINAL_FAILURE_REASON,
    ClassifiedFailure,
    FailureClass,
    aborted_without_reason,
)
from firstfault.evidence.diagnosis import NODE_END_CLASSES, Diagnosis, FirstFault
from firstfault.evidence.hangs import describe_dead_thread
from firstfault.evidence.texts import has_reached_end
from firstfault.evidence.unreported import are_unlisted
from firstfault.evidence.watchdogs import find_stragglers_before_exits, reports_timed_out_wait
from firstfault.exceptions.ending_exception import find_ending_exception
from firstfault.exceptions.exceptions_in_text import format_place, get_short_name
from firstfault.exceptions.fingerprint import normalize_message
from firstfault.exceptions.first_cause import find_causes, find_first_cause, find_own_frames
from firstfault.exceptions.printed_tracebacks import find_printed_exception
from firstfault.exceptions.source_files import find_library
from firstfault.exceptions.stack_position import (
    PositionKind,
    find_crash_position,
    locate_main_thread,
)
from firstfault.model import FrameInfo, JobErrors, Reason, Subject, Suspect, Verdict, WorkerError
from firstfault.model.failure import OF_LOGS
from firstfault.strategies.headlines import build_headline, name_process
from firstfault.strategies.reasons import (
    MAX_SUSPECTS,
    STRATEGY_NAME,
    count_class,
    describe_early_end,
    explain_wrong_clocks,
    get_failures,
)
from firstfault.strategies.verdicts import build_verdict
from firstfault.utils.text import duration

_PHRASES_BY_CLASS = {
    FailureClass.CONSEQUENCE: (
        "rank failed",
        "ranks failed",
        " because of it: stopped, or lost a peer",
    ),
    FailureClass.UNCLEAR: ("rank", "ranks", " failed as the cause or a consequence"),
}
"""Phrases of a reason that counts the remaining failures of a class: singular, plural,
rest of the sentence.
"""


def build_fault_verdict(diagnosis: Diagnosis, fault: FirstFault) -> Verdict:
    """Return the verdict that the first fault is the root cause."""
    first, classified = fault.first, diagnosis.classified
    # Unread ranks have the first fault only if all read ranks with its fingerprint do. After a
    # node's SIGKILL at noon and another node's a minute later, two faults share a fingerprint.
    read_count = sum(item.failure.fingerprint == first.failure.fingerprint for item in classified)
    unread_count = (
        len(diagnosis.job.unopened_like(first.failure.fingerprint))
        if read_count == len(fault.failed_alike)
        else 0
    )
    # A rank that was stopped while it raised the same exception has the fault, too. A rank that was
    # in a finalizer that the exception passes through probably has it; a rank near that line may
    # have been about to fail.
    stopped_raising = _find_ranks_stopped_raising(first, classified)
    counted_ids = set(map(id, stopped_raising))
    stopped_unwinding = [
        item
        for item in _find_ranks_stopped_unwinding(first, classified)
        if id(item) not in counted_ids
    ]
    counted_ids |= set(map(id, stopped_unwinding))
    stopped_near_line = [
        item
        for item in _find_ranks_stopped_in_function(first, classified)
        if id(item) not in counted_ids
    ]
    possibly_earlier = _find_possibly_earlier_failures(diagnosis, fault)
    doubts = _list_doubts(diagnosis, fault)
    why = [Reason(f"{name_process(first.failure)} {first.why}", (first.failure,))]
    why += _explain_dead_threads(first.failure)
    if len(fault.failed_alike) + unread_count > 1:
        why.append(
            Reason(
                f"{len(fault.failed_alike) + unread_count} ranks failed in the same way",
                get_failures(fault.failed_alike),
            )
        )
    why += [
        Reason(_describe_other_fault(diagnosis, first, other), (other.failure,))
        for other in fault.others[:3]
    ]
    why += _explain_stopped_ranks(first, stopped_raising, stopped_near_line)
    if stopped_unwinding:
        why.append(
            Reason(
                f"{len(stopped_unwinding)} more stopped where that exception passes",
                get_failures(stopped_unwinding),
            )
        )
    why += _list_failure_counts(
        diagnosis, [item for item in classified if id(item) not in counted_ids]
    )
    why += _explain_blame(diagnosis, first)
    why += doubts
    # several faults may be the first one if the clocks can't order them
    possible_firsts = [first, *fault.rivals]
    failures_without_time = get_failures(
        item for item in possible_firsts if item.failure.timestamp_ns is None
    )
    if failures_without_time and fault.rivals:
        timeless_text = (
            f"{len(failures_without_time)} of {len(possible_firsts)}"
            " possible first failures have no time"
        )
        why.append(Reason(timeless_text, failures_without_time))
    why += explain_wrong_clocks(diagnosis)
    has_printed = any(item.why == faults.AFTER_A_PRINTED_ERROR for item in classified)
    stragglers_before_exits = find_stragglers_before_exits(diagnosis, fault.failed_alike)
    is_uncontested = not (
        fault.others
        or possibly_earlier
        or stopped_near_line
        or stopped_unwinding
        or stopped_raising
        or doubts
        or has_printed
        or stragglers_before_exits
    )
    confidence = _rate_confidence(fault, is_sure=is_uncontested and diagnosis.job.coverage.complete)
    failed_alike = (
        get_failures((*fault.failed_alike, *stopped_raising))
        if len(fault.failed_alike) + len(stopped_raising) + unread_count > 1
        else ()
    )
    verdict = build_root_verdict(diagnosis.job, first, why, confidence, failed_alike)
    suspects = [
        Suspect(_describe_other_fault(diagnosis, first, other), other.failure.rank, other.node)
        for other in [*fault.others, *possibly_earlier][:MAX_SUSPECTS]
    ]
    suspects += [
        Suspect(item.why, item.rank, item.node or None) for item in stragglers_before_exits
    ]
    covers_all_ranks = (
        0 < first.failure.place.world_size <= len(verdict.ranks) + len(stopped_unwinding)
    )
    more_ranks_phrase = (
        f", and probably {'all' if covers_all_ranks else f'{len(stopped_unwinding)} more'}"
        if stopped_unwinding
        else ""
    )
    other_nodes = {item.failure.node for item in fault.failed_alike} - {first.failure.node, ""}
    more_ranks_phrase = (
        f" and {len(other_nodes)} more"
        if other_nodes and not verdict.ranks and first.failure.node
        else more_ranks_phrase
    )
    explanation = (
        describe_early_end(first.failure, get_failures(classified))
        if has_reached_end(first.failure)
        else ""
    )
    headline = build_headline(first.failure, verdict.ranks, more_ranks_phrase, explanation)
    return replace(verdict, headline=headline, suspects=tuple(suspects[:MAX_SUSPECTS]))


def build_root_verdict(
    job: JobErrors,
    root: ClassifiedFailure,
    why: Iterable[Reason],
    confidence: str,
    failed_alike: Sequence[WorkerError] = (),
) -> Verdict:
    """Return the verdict on a root cause with the category of its text,
    unless the document has a specific one.
    """
    verdict = build_verdict(
        job,
        root.failure,
        strategy=STRATEGY_NAME,
        why=why,
        confidence=confidence,
        same=failed_alike,
    )
    has_category = root.failure.recoverable or root.failure.category not in {
        "",
        "user_code",
        "exit",
        "stopped",
    }
    is_victim = (
        root.failure_class is FailureClass.CONSEQUENCE
        and root.signature not in LAUNCHER_SUMMARY_SIGNATURES
    )
    if is_victim and root.category == "" and not has_category:
        return replace(verdict, category="collective")  # its peer left nothing
    # only an agent's own report makes a node preempted or lost: these categories are retried on the
    # system's budget
    if has_category or root.category in {"", "preemption", "node_lost"}:
        return verdict
    return replace(verdict, category=root.category)


def _list_doubts(diagnosis: Diagnosis, fault: FirstFault) -> list[Reason]:
    """Return what contradicts the first fault itself."""
    first = fault.first
    failed_alike = get_failures(fault.failed_alike)
    has_peers = len(diagnosis.classified) > 1
    is_printed_only = first.category == "disk_full" and find_ending_exception(first.failure) is None
    ends_with_wait = reports_timed_out_wait(first) and (
        first.failure.exception is None or len(failed_alike) > 1
    )
    # A doubt lowers the confidence to medium. An agent's roster entry lists the documents of its
    # node: a document that isn't listed may have been written by any process with access to the
    # attempt's folder.
    doubts = {
        "the agent of its node didn't list this failure": are_unlisted(diagnosis.job, failed_alike),
        "an exit without a reason may follow any error, even a peer's": (
            has_peers and _is_exit_without_reason(first)
        ),
        "on a full disk, cleanup or a checkpoint fails like this after any error": (
            len(failed_alike) > 1 and is_printed_only
        ),
        "its stderr ends with a wait, which may be for a peer": has_peers and ends_with_wait,
        "its error doesn't explain why the attempts failed": (
            has_peers and faults.gave_up(first.failure)
        ),
        "its last attempt may have failed for a different reason": (
            first.why == ORIGINAL_FAILURE_REASON
        ),
    }
    return [Reason(text, (first.failure,)) for text, applies in doubts.items() if applies]


def _rate_confidence(fault: FirstFault, *, is_sure: bool) -> str:
    first = fault.first
    is_unclear = fault.first.failure_class is FailureClass.UNCLEAR
    if (is_unclear and first.failure.signal) or (
        faults.gave_up(first.failure) and len(fault.failed_alike) > 1
    ):
        return "low"
    if fault.rivals:
        return (
            "low"
            if any(rival.failure_class is first.failure_class for rival in fault.rivals)
            else "medium"
        )
    return (
        "medium"
        if not is_sure or is_unclear or first.in_flight or aborted_without_reason(first.failure)
        else "high"
    )


def _is_exit_without_reason(first: ClassifiedFailure) -> bool:
    """Whether a program may exit like this after any error, a peer's too: with exit code 0 or 1,
    or without any output.
    """
    failure = first.failure
    if first.failure_class is not FailureClass.OWN_EXIT or failure.signal:
        return False
    if failure.exception is None:
        return not failure.log_tail.strip()
    unspecific_messages = {"", "0", "1", "None"}  # a program exits with 1 after any error
    return (
        failure.exception.type == "SystemExit" and failure.exception.message in unspecific_messages
    )


def _explain_stopped_ranks(
    first: ClassifiedFailure,
    stopped_raising: Sequence[ClassifiedFailure],
    stopped_near_line: Sequence[ClassifiedFailure],
) -> list[Reason]:
    """Return the reasons about ranks that were stopped where the root cause was raised."""
    reasons = []
    if stopped_raising:
        was_or_were = "was" if len(stopped_raising) == 1 else "were"
        text = (
            f"{len(stopped_raising)} more {was_or_were} stopped with an exception in flight that"
            " was raised at the same line"
        )
        if find_crash_position(stopped_raising[0].failure):
            text = f"{len(stopped_raising)} more crashed at the same line while stopped"
        elif (first.failure.exit_code or 0) > 0 and find_printed_exception(
            first.failure.printed
        ) is not None:
            text = (
                f"{len(stopped_raising)} more printed the same exception, {was_or_were} stopped,"
                " and ended with the same exit code"
            )
        reasons.append(Reason(text, get_failures(stopped_raising)))
    if stopped_near_line:
        position = (
            _find_raise_position(stopped_near_line[0].failure)
            or locate_main_thread(stopped_near_line[0].failure).frame
        )
        name = name_process(stopped_near_line[0].failure)
        text = (
            f"{name} was stopped at {position} and not waiting for a peer: it may have failed, too"
        )
        text += f", like {len(stopped_near_line) - 1} more" if len(stopped_near_line) > 1 else ""
        reasons.append(Reason(text, get_failures(stopped_near_line)))
    return reasons


def _explain_dead_threads(root: WorkerError) -> list[Reason]:
    """Return the reasons about threads of the root cause's process that had failed before it."""
    return [
        Reason(f"before, {describe_dead_thread(thread)}", (root,))
        for thread in root.thread_failures[:1]
        if root.exception is not None
        and thread.timestamp_ns is not None
        and root.timestamp_ns is not None
        and thread.timestamp_ns < root.timestamp_ns
    ]


def _list_failure_counts(
    diagnosis: Diagnosis, classified: Sequence[ClassifiedFailure]
) -> list[Reason]:
    reasons = []
    for failure_class, (singular, plural, phrase_end) in _PHRASES_BY_CLASS.items():
        counted = [
            item
            for item in classified
            if not item.failure.has_unseen_end and not _is_launcher_failure_in_log(item)
        ]
        if count := count_class(counted, diagnosis.job, failure_class):
            members = get_failures(item for item in counted if item.failure_class is failure_class)
            reasons.append(
                Reason(f"{count} {singular if count == 1 else plural}{phrase_end}", members)
            )
    return reasons


def _is_launcher_failure_in_log(item: ClassifiedFailure) -> bool:
    """Whether a failure is that of a launcher, known from its traceback in a log: it's no rank."""
    return item.failure.subject is Subject.AGENT and item.failure.place.engine == OF_LOGS


def _explain_blame(diagnosis: Diagnosis, first: ClassifiedFailure) -> list[Reason]:
    count = diagnosis.blame_counts.of(first)
    ranks = {None, first.failure.rank}
    other_failures = (item for item in diagnosis.classified if item is not first)
    blaming = (item for item in other_failures if item.pointer and item.pointer.rank in ranks)
    text = f"{count} other {'failure blames' if count == 1 else 'failures blame'} it"
    return [Reason(text, get_failures(blaming))] if count else []


def _find_possibly_earlier_failures(
    diagnosis: Diagnosis, fault: FirstFault
) -> list[ClassifiedFailure]:
    """Return the failures that may have happened before the root cause; they lower the confidence.

    These are exits without a reason. If the root cause is a lost or terminated node, they are also
    ranks that timed out waiting.
    """
    first, counted_ids = fault.first, {*map(id, fault.failed_alike), *map(id, fault.others)}
    is_node_end = first.failure_class in NODE_END_CLASSES
    other_failures = [item for item in diagnosis.classified if id(item) not in counted_ids]
    unclear_failures = [
        item
        for item in other_failures
        if faults.is_unclear_exit(item) or (item.waited and is_node_end)
    ]
    possibly_earlier = [
        item
        for item in unclear_failures
        if not diagnosis.clocks.is_before(first.failure, item.failure)
    ]
    return sorted(
        possibly_earlier,
        key=lambda item: (item.failure.rank or 0, item.failure.node, repr(item.failure)),
    )


def _describe_other_fault(
    diagnosis: Diagnosis, first: ClassifiedFailure, other: ClassifiedFailure
) -> str:
    gap = diagnosis.clocks.get_certain_gap_ns(first.failure, other.failure)
    when = (
        f", at least {duration(gap, is_rounded_down=True)} later"
        if gap
        else ", at about the same time"
    )
    # a line of a log without a time proves no time
    is_timed = first.failure.timestamp_ns is not None and other.failure.timestamp_ns is not None
    when = when if is_timed or first.failure.place.engine != OF_LOGS else ""
    return f"{name_process(other.failure)} {other.why} too{when}"


# --- ranks that were stopped where the first fault was raised -------------------------------------


def _find_ranks_stopped_raising(
    first: ClassifiedFailure, classified: Sequence[ClassifiedFailure]
) -> list[ClassifiedFailure]:
    """Return the ranks that were stopped while they failed in the same way as `first`.

    Their exceptions were propagating, or they crashed, or they were exiting.
    """
    exception = first.failure.exception
    exit_code = first.failure.exit_code or 0
    if crashed_at := find_crash_position(first.failure):
        return [
            item
            for item in _find_stopped(first, classified)
            if find_crash_position(item.failure) == crashed_at
        ]
    # only a printed exception identifies the fault: other last lines, such as progress, are equal
    # on all ranks
    if exit_code > 0 and (last_printed := _find_last_printed(first.failure)):
        alike = (
            item for item in _find_stopped(first, classified) if item.failure.exit_code == exit_code
        )
        return [item for item in alike if _find_last_printed(item.failure) == last_printed]
    if exception is None or find_causes(exception).wrappers:
        return []  # peers' errors are wrapped at the same line
    frames = find_first_cause(exception).frames
    if not frames or find_library(frames[-1]) == "torch":
        return []  # peers' errors are raised there, too
    raised_at = format_place(frames[-1])
    stopped_alike = []
    for item in _find_stopped(first, classified):
        position = locate_main_thread(item.failure)
        # without an answer from the process, a running finalizer's position shows the line of the
        # exception
        if raised_at == (
            _find_raise_position(item.failure) or (position.frame if position.is_finalizing else "")
        ):
            stopped_alike.append(item)
    return stopped_alike


def _find_last_printed(failure: WorkerError) -> tuple[str, str] | None:
    """Return the type and text of the last exception that a process printed;
    None if it printed none.
    """
    printed = find_printed_exception(failure.printed)
    if printed is None:
        return None
    cause = find_first_cause(printed.exception)
    return get_short_name(cause), normalize_message(cause.message)


def _find_ranks_stopped_in_function(
    first: ClassifiedFailure, classified: Sequence[ClassifiedFailure]
) -> list[ClassifiedFailure]:
    """Return the ranks that were stopped in the function where `first` raised,
    or with any exception propagating.
    """
    exception = first.failure.exception
    own_frames = find_own_frames(exception) if exception is not None else ()
    return [
        item
        for item in _find_stopped(first, classified)
        if own_frames and _is_near(item.failure, own_frames[-1])
    ]


def _find_ranks_stopped_unwinding(
    first: ClassifiedFailure, classified: Sequence[ClassifiedFailure]
) -> list[ClassifiedFailure]:
    """Return the ranks stopped in a finalizer that the first fault's exception passed through,
    unless it may be a peer's error.
    """
    exception = first.failure.exception
    passed = set(map(format_place, find_own_frames(exception))) if exception is not None else set()
    called = {progress.group: progress.enqueued for progress in first.failure.collectives}
    positions = [
        (item, locate_main_thread(item.failure), item.failure.collectives)
        for item in _find_stopped(first, classified)
    ]
    unknown = [
        (item, collectives)
        for item, position, collectives in positions
        if position.is_finalizing and not position.raised_at and position.frame in passed
    ]
    # if a rank had called a collective that `first` hadn't, its exception may be the collective's
    # error about a peer
    return [
        item
        for item, collectives in unknown
        if collectives
        and all(progress.enqueued <= called.get(progress.group, -1) for progress in collectives)
    ]


def _find_raise_position(failure: WorkerError) -> str:
    """Return where the propagating exception of a stopped process was raised, "train.py:12 in
    step", or an empty string if no exception was propagating.
    """
    raised_at = locate_main_thread(failure).raised_at
    return (
        format_place(raised_at)
        if raised_at is not None and find_library(raised_at) != "torch"
        else ""
    )


def _find_stopped(
    first: ClassifiedFailure, classified: Sequence[ClassifiedFailure]
) -> list[ClassifiedFailure]:
    return [
        item
        for item in classified
        if item is not first and item.failure.stopped_by_agent and not item.waited
    ]


def _is_near(failure: WorkerError, raising_frame: FrameInfo) -> bool:
    position = locate_main_thread(failure)
    if _find_raise_position(failure):
        return True
    if position.kind is not PositionKind.ELSEWHERE or any(
        progress.is_outstanding for progress in failure.collectives
    ):
        return False
    file, function = raising_frame.file.rsplit("/", 1)[-1], raising_frame.function
    return position.frame.startswith(f"{file}:") and position.frame.endswith(f" in {function}")
