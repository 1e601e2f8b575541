"""Classify each failure of a round as a root-cause candidate, as unclear,
or as a consequence of another failure.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from firstfault.evidence.certain_bugs import find_missing_program
from firstfault.evidence.library_calls import (
    DATA_LOADER_FOLDER,
    classify_by_library_call,
    was_raised_by_config_parser,
)
from firstfault.evidence.signatures import Role
from firstfault.evidence.texts import Classification, Pointer, classify, full_disk
from firstfault.exceptions.ending_exception import find_ending_exception, find_original_failure
from firstfault.exceptions.exceptions_in_text import get_short_name
from firstfault.exceptions.fatal_text import (
    extract_fatal_text,
    find_native_lines,
    find_telling_line,
)
from firstfault.exceptions.first_cause import (
    find_causes,
    find_first_cause,
    is_wrapper,
    iter_exceptions,
)
from firstfault.exceptions.flytekit_files import is_output_error
from firstfault.exceptions.printed_tracebacks import find_printed_exception, is_double_init_error
from firstfault.exceptions.stack_position import PositionKind, has_left_program, locate_main_thread
from firstfault.model import ExceptionInfo, ExpiredDeadline, JobErrors, Subject, WorkerError, Writer
from firstfault.model.failure import (
    CANCELLED,
    CRASHES,
    DIED,
    FROM_OUTSIDE,
    OF_LOGS,
    RECORDED_ONLY,
    STOPS,
    ended_by,
    get_shell_signal,
)
from firstfault.utils.lazy_pattern import LazyPattern

ORIGINAL_FAILURE_REASON = "failed on its own, and retried the step"
"""The reason for a rank that is classified by its first try."""
_UNSPECIFIC_CONNECTION_SIGNATURES = {"connection-lost", "connection-unclear"}
"""Signatures of lost connections where the text doesn't identify the remote end."""
GPU_CATEGORIES = {"gpu_kernel", "gpu_hardware"}
"""Categories of faults that a peer's failure can't cause."""
_PROCESS_GROUP_FOLDER = "torch/distributed/"
_CHILD_PROCESS_FILES = (
    DATA_LOADER_FOLDER,
    "torch/multiprocessing/",
    "multiprocessing/resource_sharer.py",
    "multiprocessing/pool.py",
)
"""Libraries that connect a process to its own child processes;
matched against the file names of frames.
"""
_PROGRAM_ERROR_TYPES = {
    "ValueError",
    "TypeError",
    "LookupError",
    "AttributeError",
    "NameError",
    "AssertionError",
}
"""Exception types, including subclasses, that no transport raises:
they point to a bug in the program.
"""
_TRANSPORT_ERROR_TYPES = {"RuntimeError", "OSError", "EOFError"}
LAUNCHER_SUMMARY_SIGNATURES = {"launcher-box", "launcher-summary"}
"""Signatures of a launcher's summary of all its workers."""
TIMED_OUT, DUMP_SIGNAL, STUCK = "watchdog-timeout", "dump-signal", "watchdog-stuck"
"""Signatures of NCCL's watchdog: its own timeout, another rank's timeout,
and a watchdog thread that is stuck.
"""
_WATCHDOG_SIGNATURES = {TIMED_OUT, DUMP_SIGNAL, STUCK}
MISMATCH = "gloo-size-mismatch"
"""Signature of a message longer than its receiver expects:
sender or receiver may have the wrong size.
"""
_NCCL_UNHANDLED_SIGNATURE = "nccl-unhandled"
"""Signature of an error that NCCL reports without its cause."""
BARRIER_REPORT = "monitored-barrier-report"
"""Signature of rank 0's report of the first rank missing at a monitored barrier."""
STORE_WAIT = "store-wait"
"""Signature of a wait for a key in the job's store."""
_KEPT_SIGNATURES = {
    BARRIER_REPORT,
    MISMATCH,
    STORE_WAIT,
    "awaited-ranks",
    "barrier-timed-out-tasks",
    "stalled-ops",
}
"""Signatures that rules need even if an exception has the text."""
_MISSING_FILE, _LOADER_FILE = "missing-file", "torch/utils/data/"
_CHECKPOINT_ON_RANKS = "checkpoint-of-ranks"
"""Signature of an error that all ranks raise and that names the rank that had it."""
_WAIT_CATEGORY = "hang"
"""Category of the signatures of waits that timed out."""
_DEVICE_ASSERT = "device-assert"
NONFINITE_ASSERTION = re.compile(
    r"\bAssertion [`'][^`'\n]{0,200}\b(?:nan|inf|finite|infinite|non-?finite)\b", re.IGNORECASE
)
"""A kernel's assertion about its values: the exception only reports that one has failed."""
_LINE_NUMBER = re.compile(r":\d+ in ")
_MIN_MAJORITY_FACTOR = 3
"""Ranks in one function count as waiting if, with other waits,
they outnumber the rest by this factor.
"""
_INTERRUPT = "KeyboardInterrupt"
_SIGNAL_HANDLER_EXCEPTIONS = {"SignalException", _INTERRUPT}
"""Exceptions that a signal handler raises."""
_UNCATCHABLE_SIGNALS = CRASHES | {"SIGKILL"}
"""Signals that a handler can't catch, or hardly ever does:
the signal itself is how the process ended.
"""
_FAULTHANDLER_THREAD_LINE = "Current thread 0x"
"""In faulthandler's output if the fatal signal hit a Python thread, not one of a native library."""
_MAX_LOG_LINES = 100
"""Lines at the end of a log that are searched for a timeout."""


class FailureClass(enum.IntEnum):
    """Ordered from the strongest reason to be the root cause to the weakest."""

    OWN_FAULT = 0
    """The process raised an exception that isn't about a peer,
    or shows other local evidence of a fault.
    """
    OWN_EXIT = 1
    """The process exited, or died by a signal that its agent didn't send."""
    NODE_LOST = 2
    """An agent and its node are gone."""
    EXTERNAL = 3
    """A node was terminated from outside, as by a preemption."""
    UNCLEAR = 4
    """May be cause or consequence: a collective's timeout, an abort."""
    CONSEQUENCE = 5
    """The failure names a peer that is gone, or its agent stopped the process."""
    FINISHED = 6
    """The program ran to its end, and no other failure is about that."""


@dataclass(frozen=True, slots=True)
class ClassifiedFailure:
    """A failure with its class."""

    failure: WorkerError
    failure_class: FailureClass
    why: str
    """The reason, as a sentence without its subject: the caller prepends the process's name."""
    category: str = ""
    """A category more precise than the failure's own, or empty if the text doesn't give one."""
    pointer: Pointer | None = None
    """The process or host that the failure's text names."""
    specific: bool = False
    """Whether a signature matches this particular fault, not just any exception."""
    in_flight: bool = False
    """The exception had not left the task function when its process was stopped."""
    waited: bool = False
    """Whether the process timed out waiting for a peer."""
    signature: str = ""
    """Id of the signature that matches the text; empty if none matches or the text was ignored."""

    @property
    def node(self) -> str | None:
        """The failure's node, None if it has no name."""
        return self.failure.node or None


_RAISED_ITSELF = "raised its own exception"
_CLASS_BY_ROLE = {
    Role.PRIMARY: FailureClass.OWN_FAULT,
    Role.SECONDARY: FailureClass.CONSEQUENCE,
    Role.AMBIGUOUS: FailureClass.UNCLEAR,
}


def classify_failures(job: JobErrors) -> tuple[ClassifiedFailure, ...]:
    """Classify every failure of the judged round, in the same order."""
    ended_nodes = {
        failure.node
        for failure in job.failures
        if failure.subject is Subject.AGENT and failure.category in {"node_lost", *FROM_OUTSIDE}
    }
    if "" in ended_nodes:  # a scheduler ended the whole job
        ended_nodes |= {failure.node for failure in job.failures}
    return _demote_waiting_majority([_classify(failure, ended_nodes) for failure in job.failures])


def _demote_waiting_majority(
    classified: Sequence[ClassifiedFailure],
) -> tuple[ClassifiedFailure, ...]:
    """Reclassify the majority as waiting if most ranks missed a deadline in the same
    function and a few elsewhere.

    A wait for the GPU counts as one function, whatever the frame. Other functions count only if no
    rank is known to be in a collective: then the program may communicate through another library
    than torch.
    """
    waits = sum(item.waited for item in classified)
    positions = {
        number: locate_main_thread(item.failure)
        for number, item in enumerate(classified)
        if item.failure.expired is not None
        and item.failure_class is FailureClass.OWN_FAULT
        and item.specific
    }
    functions = {
        number: ""
        if position.kind is PositionKind.TORCH
        else _LINE_NUMBER.sub(" in ", position.frame)
        for number, position in positions.items()
        if position.kind is PositionKind.TORCH or (position.frame and not waits)
    }
    # the few ranks elsewhere are the suspects; without any, all ranks are alike and none can be
    # demoted
    ((usual, size),) = Counter(functions.values()).most_common(1) or [("", 0)]
    if not 0 < _MIN_MAJORITY_FACTOR * (len(positions) - size) <= size + waits:
        return tuple(classified)
    why = "was where most peers were at its deadline"
    return tuple(
        (
            replace(item, failure_class=FailureClass.UNCLEAR, why=why, specific=False, waited=True)
            if functions.get(number) == usual
            else item
        )
        for number, item in enumerate(classified)
    )


# Reports that a container ended, or ends again and again, without its exit code
_CONTAINER_ENDED = LazyPattern(r"(?i)back-?off\b|^[a-z0-9][a-z0-9.-]*\s+\d+/\d+\s+\S*Error\b")


def _classify(failure: WorkerError, ended_nodes: set[str]) -> ClassifiedFailure:
    if failure.subject is Subject.AGENT:
        return _classify_agent(failure)
    if failure.code == RECORDED_ONLY:
        # only the flight recorder's dump exists: it shows whether the rank waited, but not how the
        # process ended
        waited = any(progress.is_outstanding for progress in failure.collectives)
        of_peers = FailureClass.UNCLEAR if waited else FailureClass.CONSEQUENCE
        return ClassifiedFailure(
            failure,
            of_peers,
            failure.message,
            _WAIT_CATEGORY if waited else "",
            waited=waited,
        )
    # before the agent's signals: the first try failed before the agent stopped the process during a
    # later one
    if (tried := _classify_original_failure(failure)) is not None:
        return tried
    if failure.stopped_by_agent:
        return _classify_stopped_worker(failure)
    if failure.exception is not None:
        return _classify_exception(failure, failure.exception, ended_nodes)
    if failure.expired is not None:
        return _classify_deadline(failure, failure.expired)
    if failure.signal or failure.exit_code is not None:
        return _classify_exit(failure, ended_nodes)
    if failure.code == DIED:
        why = "died, its launcher doesn't report how"
        how = "exit" if _CONTAINER_ENDED.search(failure.message) else "signal"
        return ClassifiedFailure(failure, FailureClass.OWN_EXIT, why, how)
    if failure.is_silent and failure.writer is not Writer.STOCK:
        return ClassifiedFailure(failure, FailureClass.UNCLEAR, "ended without a reason")
    return _classify_text(failure)


def _classify_stopped_worker(failure: WorkerError) -> ClassifiedFailure:
    """Classify a worker that was stopped by its agent."""
    sent = failure.sent_signals[0]
    # SIGKILL isn't a crash: the agent sends it after the grace period if the process is still
    # running
    if failure.signal in CRASHES | {"SIGABRT"} and failure.signal != sent.signal:
        ended = _classify_exit(failure, set())
        if ended.signature:  # the end of stderr has a known cause
            return replace(ended, why=f"{ended.why}, while its agent stopped it")
        why = f"crashed ({failure.signal}) while its agent stopped it"
        return ClassifiedFailure(failure, FailureClass.UNCLEAR, why, "signal")
    if printed := _classify_printed_error(failure, "ended"):
        return printed
    log = _classified(failure.printed)
    signature = log.signature if log.signature in _WATCHDOG_SIGNATURES else ""
    # another rank's timeout also reaches ranks that weren't waiting: only an outstanding collective
    # proves a wait
    waited = signature == TIMED_OUT or (signature == DUMP_SIGNAL and log.role is Role.SECONDARY)
    waited = waited or _left_after_a_wait(failure)
    why = f"was stopped{'' if failure.place.engine == OF_LOGS else ' by its agent'}: {sent.reason}"
    return ClassifiedFailure(
        failure,
        FailureClass.CONSEQUENCE,
        why,
        waited=waited,
        signature=signature,
    )


def _classify_original_failure(failure: WorkerError) -> ClassifiedFailure | None:
    """Classify a process that retried by its first try. Return None if it didn't retry or its last
    try is as informative.
    """
    raised = failure.exception
    # "initialize the process group twice": the retry didn't destroy the first try's group, so this
    # error is secondary
    is_second = raised is not None and is_double_init_error(raised)
    exception = find_ending_exception(failure) if is_second else find_original_failure(failure)
    if is_second and exception is raised:
        why = "retried with a process group that an unknown first failure left behind"
        return ClassifiedFailure(
            failure,
            FailureClass.UNCLEAR,
            why,
            waited=bool(failure.collectives),
        )
    if exception is None:
        return None
    judged = _classify_raised(failure, exception)
    if not is_own_fault(exception):
        return judged
    category = judged.category or "user_code"
    return replace(
        judged,
        why=ORIGINAL_FAILURE_REASON,
        category=category,
        in_flight=failure.stopped_by_agent,
    )


def _classify_by_role(
    failure: WorkerError,
    classification: Classification,
    why: str,
    *,
    signature: str = "",
    in_flight: bool = False,
) -> ClassifiedFailure:
    """Classify a failure by its text's role; a text about another process gives no category."""
    failure_class = _CLASS_BY_ROLE[classification.role]
    is_own = classification.role is Role.PRIMARY
    return ClassifiedFailure(
        failure,
        failure_class,
        why,
        (
            classification.specific_category
            if is_own
            else classification.category
            if classification.role is Role.AMBIGUOUS
            else ""
        ),
        classification.pointer,
        specific=is_own and classification.is_specific,
        in_flight=in_flight,
        waited=not is_own and classification.category == _WAIT_CATEGORY,
        signature=signature,
    )


def _classify_agent(failure: WorkerError) -> ClassifiedFailure:
    if failure.category in FROM_OUTSIDE:
        why = "was canceled" if failure.code == CANCELLED else FROM_OUTSIDE[failure.category]
        return ClassifiedFailure(failure, FailureClass.EXTERNAL, why)
    if failure.category == "node_lost":
        return ClassifiedFailure(failure, FailureClass.NODE_LOST, "disappeared without a report")
    if failure.exception is None:
        return ClassifiedFailure(failure, FailureClass.OWN_FAULT, "failed")
    classification = _classify_chain(failure.exception)
    if classification.role is Role.PRIMARY:
        return _classify_by_role(failure, classification, f"failed: {classification.why}")
    # an agent doesn't take part in collectives
    return replace(
        _classify_by_role(failure, classification, f"lost its peers: {classification.why}"),
        category="",
        waited=False,
    )


def _classify_deadline(failure: WorkerError, expired: ExpiredDeadline) -> ClassifiedFailure:
    """Classify a worker that its agent killed for a missed deadline:
    a victim if it was waiting in a collective.
    """
    position = locate_main_thread(failure)
    has_outstanding = any(progress.is_outstanding for progress in failure.collectives)
    if position.kind is PositionKind.COLLECTIVE or (
        position.kind is PositionKind.TORCH and has_outstanding
    ):
        why = f"waited in a collective until its deadline: {expired.text}"
        return ClassifiedFailure(failure, FailureClass.UNCLEAR, why, _WAIT_CATEGORY, waited=True)
    position_phrase = f", at {position.frame}" if position.frame else ""
    why = f"was killed by its agent for a deadline: {expired.text}{position_phrase}"
    return ClassifiedFailure(failure, FailureClass.OWN_FAULT, why, _WAIT_CATEGORY, specific=True)


def _classify_exception(
    failure: WorkerError, exception: ExceptionInfo, ended_nodes: set[str]
) -> ClassifiedFailure:
    while exception.type == "SystemExit" and exception.causes:
        # `except ...: sys.exit(1)`: classify the handled exception, not the exit
        exception = replace(exception.causes[0], causes=exception.causes[1:])
    name = get_short_name(exception)
    raised = {name, get_short_name(find_first_cause(exception))}  # a cleanup may raise after it
    is_answer = bool(raised & _SIGNAL_HANDLER_EXCEPTIONS)
    if failure.sent_signals:  # the program may have wrapped the signal handler's exception
        is_answer = is_answer or any(
            get_short_name(link) in _SIGNAL_HANDLER_EXCEPTIONS
            for link in iter_exceptions(exception)
        )
    if is_answer and (failure.node in ended_nodes or failure.sent_signals):
        return ClassifiedFailure(failure, FailureClass.CONSEQUENCE, "was terminated with its node")
    if is_answer:
        why = "was ended by a signal that its agent didn't send"
        category = "interrupted" if _INTERRUPT in raised else "signal"
        return ClassifiedFailure(failure, FailureClass.OWN_EXIT, why, category)
    if name == "SystemExit":
        return _classify_exit_call(failure, exception)
    judged = _classify_raised(failure, exception)
    if judged.why == _RAISED_ITSELF and is_output_error(exception):
        judged = replace(judged, why="returned a value that flytekit can't convert")
    is_own = failure.category == "exit" and judged.failure_class is FailureClass.OWN_FAULT
    return replace(judged, category=judged.category or "user_code") if is_own else judged


def _classify_raised(failure: WorkerError, exception: ExceptionInfo) -> ClassifiedFailure:
    """Classify an exception that a process raised, or printed before it ended."""
    classification = classify_by_library_call(exception, _classify_chain(exception))
    in_flight = failure.in_flight and bool(failure.sent_signals)
    if (
        classification.signature == _CHECKPOINT_ON_RANKS
        and failure.rank in find_ranks_with_checkpoint_error(exception)
    ):
        # the rank's own traceback, copied into the text
        cause = _classify_link(find_first_cause(exception))
        category = (
            cause.specific_category if cause.role is Role.PRIMARY else ""
        ) or classification.category
        category = (
            "disk_full" if category == "storage" and full_disk(failure, exception) else category
        )
        why = "failed in a checkpoint, and all ranks raise its error"
        fault = ClassifiedFailure(failure, FailureClass.OWN_FAULT, why, category, specific=True)
        return replace(fault, in_flight=in_flight)
    if classification.role is Role.PRIMARY:
        why = (
            _RAISED_ITSELF
            if not classification.is_specific
            else f"reports its own fault ({classification.signature})"
        )
        judged = _classify_by_role(failure, classification, why, in_flight=in_flight)
        return _refine_category(failure, exception, classification, judged)
    # "connection reset" outside of torch's collectives isn't necessarily about a peer: it may be a
    # bug in the program, the connection to a child process, or the connection to an external
    # service
    if classification.role is Role.SECONDARY and not _is_about_group(exception):
        informative_causes = find_causes(exception).informative_causes
        types = {
            name.rsplit(".", 1)[-1]
            for link in informative_causes
            for name in (link.type, *link.bases)
        }
        if types & _PROGRAM_ERROR_TYPES and not types & _TRANSPORT_ERROR_TYPES:
            why = "raised an exception that no transport raises"
            return ClassifiedFailure(failure, FailureClass.OWN_FAULT, why, in_flight=in_flight)
        if owner := _find_own_process(exception):
            why = f"lost the connection to its own child process ({owner})"
            # a sample's exception is forwarded
            category = "signal" if owner == DATA_LOADER_FOLDER else ""
            return ClassifiedFailure(
                failure,
                FailureClass.OWN_FAULT,
                why,
                category,
                specific=True,
                in_flight=in_flight,
            )
        if classification.signature in _UNSPECIFIC_CONNECTION_SIGNATURES:
            why = f"lost a connection, perhaps not to a peer ({classification.signature})"
            return ClassifiedFailure(
                failure,
                FailureClass.UNCLEAR,
                why,
                "network",
                classification.pointer,
                in_flight=in_flight,
            )
    why = f"points to another process ({classification.signature}): {classification.why}"
    if classification.role is Role.AMBIGUOUS:
        text = classification.signature or "unknown text"
        why = f"may be cause or consequence ({text}): {classification.why}"
    signature = classification.signature if classification.signature in _KEPT_SIGNATURES else ""
    return _classify_by_role(failure, classification, why, signature=signature, in_flight=in_flight)


def _refine_category(
    failure: WorkerError,
    exception: ExceptionInfo,
    classification: Classification,
    judged: ClassifiedFailure,
) -> ClassifiedFailure:
    """Return a process's own fault with the category that its document or its output proves."""
    # the recorded space and limits prove more than the text
    if judged.category == "storage" and full_disk(failure, exception):
        return replace(judged, category="disk_full")
    if classification.signature == _MISSING_FILE and any(
        _LOADER_FILE in frame.file for frame in exception.frames
    ):
        # a sample, not a file that the job was configured to use
        return replace(judged, category="data")
    if classification.signature == _DEVICE_ASSERT and NONFINITE_ASSERTION.search(failure.printed):
        return replace(judged, category="numerics")
    is_limited = judged.category == "host_oom" and failure.system.memory_limit
    return replace(judged, category="config") if is_limited else judged


# The failed ranks in the error message of a checkpoint on all ranks
_CHECKPOINT_RANKS = LazyPattern(
    r"CheckpointException[^\n]{0,99}?ranks:\s*(?:dict_keys\()?\[(?P<ranks>\d{1,9}(?:,[ ]?\d{1,9})*)\]"
)


def find_ranks_with_checkpoint_error(exception: ExceptionInfo) -> set[int]:
    """Return the failed ranks listed in a CheckpointException of torch;
    empty for other exceptions.
    """
    matches = filter(
        None,
        (_CHECKPOINT_RANKS.search(link.message) for link in iter_exceptions(exception)),
    )
    return {int(rank) for match in matches for rank in match["ranks"].split(",")}


def _classify_exit_call(failure: WorkerError, exception: ExceptionInfo) -> ClassifiedFailure:
    """Classify a call of ``sys.exit``, by the output before it if that gives a reason."""
    # the program's SIGTERM handler calls sys.exit: a reaction to the agent's signal, whatever was
    # printed before
    if failure.sent_signals and not failure.in_flight and not has_left_program(failure):
        why = "exited when its agent stopped it"
        waited = _left_after_a_wait(failure)
        return ClassifiedFailure(failure, FailureClass.CONSEQUENCE, why, waited=waited)
    log = _get_log_of_exit(failure, "")
    judged = _classify_printed_error(failure, "exited") or _classify_stderr_tail(
        failure,
        log,
        "exited",
        "",
    )
    refuses = log.signature == "usage" or was_raised_by_config_parser(exception)
    # an exit without a code in its text succeeded, unless its process had another code
    has_failed = bool(failure.exit_code) or exception.message not in {"", "0", "None"}
    if judged is None and has_failed and refuses:
        why = "rejected its command line or configuration"
        return ClassifiedFailure(failure, FailureClass.OWN_FAULT, why, "config", specific=True)
    in_flight = bool(failure.sent_signals)
    return judged or ClassifiedFailure(
        failure,
        FailureClass.OWN_EXIT,
        "exited on its own",
        "exit",
        in_flight=in_flight,
    )


def _classify_printed_error(failure: WorkerError, ended: str) -> ClassifiedFailure | None:
    """Classify a process by the exception that it printed before it ended. Return None if it
    printed no exception, or an unclear one.
    """
    exception = find_ending_exception(failure)
    if exception is None or exception is failure.exception or _last_word_about_a_peer(failure):
        return None
    classification = _classify_chain(exception)
    judged = replace(
        _classify_raised(failure, exception),
        signature=classification.signature if classification.is_specific else "",
    )
    name = get_short_name(find_causes(exception).first)
    if name == _INTERRUPT and not failure.sent_signals:
        return ClassifiedFailure(
            failure,
            FailureClass.OWN_EXIT,
            f"{ended} after a {name}",
            "interrupted",
        )
    if judged.failure_class is FailureClass.OWN_FAULT:
        why = f"{ended} after its own exception ({name})"
        return replace(judged, why=why, category=judged.category or "user_code")
    if judged.failure_class is FailureClass.CONSEQUENCE:
        return replace(judged, why=f"{ended} because of a peer ({judged.signature or name})")
    return None


# An exception's type and message in a line that the program itself logged
_NAMED_EXCEPTION = LazyPattern(r"\b(?P<type>[A-Z]\w*(?:Error|Exception|Timeout)):[ ]\S")


def _last_word_about_a_peer(failure: WorkerError) -> str:
    """Return the last line of the output if it names an exception about a peer;
    otherwise an empty string.

    Such a line overrides a traceback above it with a different exception: the program may have
    handled that one.
    """
    line = find_telling_line(failure.printed)
    printed = find_printed_exception(failure.printed)
    named = _NAMED_EXCEPTION.search(line)
    if named is None or printed is None or not names_a_peer(line):
        return ""
    return (
        line if named["type"] not in map(get_short_name, iter_exceptions(printed.exception)) else ""
    )


def _is_about_group(exception: ExceptionInfo) -> bool:
    """Whether an exception's first cause came out of torch's collectives or store;
    True if it has no frames.
    """
    frames = [frame for link in find_causes(exception).informative_causes for frame in link.frames]
    return not frames or any(_PROCESS_GROUP_FOLDER in frame.file for frame in frames)


def _find_own_process(exception: ExceptionInfo) -> str:
    """Return the entry of `_CHILD_PROCESS_FILES` if a child process's connection broke, else ""."""
    files = [
        frame.file for link in find_causes(exception).informative_causes for frame in link.frames
    ]
    # the program's own sockets break elsewhere
    is_local = bool(files) and "/multiprocessing/" in files[-1]
    return next(
        (
            owner
            for owner in _CHILD_PROCESS_FILES
            if is_local and any(owner in file for file in files)
        ),
        "",
    )


def _classify_exit(failure: WorkerError, ended_nodes: set[str]) -> ClassifiedFailure:
    signal = failure.signal or get_shell_signal(failure.exit_code)
    if signal in STOPS and failure.node in ended_nodes:
        return ClassifiedFailure(failure, FailureClass.CONSEQUENCE, "was terminated with its node")
    log = _get_log_of_exit(failure, signal)
    ended = "aborted" if signal else f"exited with code {failure.exit_code}"
    if printed := _classify_printed_error(failure, ended):
        return printed
    # a program that exits with 0 has handled whatever it printed
    is_reason = signal or failure.exit_code != 0
    if (
        is_reason
        and log.role is Role.PRIMARY
        and log.is_specific
        and log.signature not in {"killed", "crashed"}
    ):
        # a job's log doesn't show which of its lines were written to stderr
        printed_to = "printed" if failure.place.engine == OF_LOGS else "wrote to stderr"
        why = f"{printed_to} before it ended ({log.signature}): {log.why}"
        return _classify_by_role(failure, log, why, signature=log.signature)
    # the cgroup counts OOM kills per node, so this may have been another process, but it explains a
    # SIGKILL best
    if signal == "SIGKILL" and failure.resources.oom_kill:
        return ClassifiedFailure(
            failure,
            FailureClass.OWN_EXIT,
            "was killed by the kernel's OOM killer",
            "host_oom",
        )
    # A crash or a signal from outside isn't a reaction to a peer's error, so it wins over the
    # output. SIGABRT often is a reaction: NCCL's watchdog aborts the process after another rank's
    # timeout.
    if signal in _UNCATCHABLE_SIGNALS or signal in STOPS:
        why = _describe_signal(failure, signal)
        category = "interrupted" if signal == "SIGINT" else ""
        return ClassifiedFailure(failure, FailureClass.OWN_EXIT, why, category)
    if judged := _classify_stderr_tail(failure, log, ended, signal):
        return judged
    # watchdogs of other libraries abort without a message, too: the stacks alone don't show whether
    # the rank waited
    if signal == "SIGABRT" and failure.stack_dumps and aborted_without_reason(failure):
        why = "aborted without a reason: a failed check, or a watchdog that waited for another rank"
        return ClassifiedFailure(failure, FailureClass.UNCLEAR, why, "signal")
    if signal:
        return ClassifiedFailure(failure, FailureClass.OWN_EXIT, _describe_signal(failure, signal))
    # Python exits with 1 after any uncaught exception, a peer's error included
    if failure.exit_code == 1 and find_missing_program(failure) is None:
        return ClassifiedFailure(
            failure, FailureClass.UNCLEAR, "exited with code 1, without a reason"
        )
    return ClassifiedFailure(
        failure, FailureClass.OWN_EXIT, f"exited with code {failure.exit_code}"
    )


def _describe_signal(failure: WorkerError, signal: str) -> str:
    # in a log, no agent shows what it sent
    return ended_by(signal) + ("" if failure.place.engine == OF_LOGS else ", not sent by its agent")


def _get_log_of_exit(failure: WorkerError, signal: str) -> Classification:
    return _classified(
        _last_word_about_a_peer(failure) or extract_fatal_text(failure.printed, signal)
    )


def _classify_stderr_tail(
    failure: WorkerError,
    log: Classification,
    ended: str,
    signal: str,
) -> ClassifiedFailure | None:
    """Classify a process by its stderr tail if that may be about another process. Return None if
    the tail can't be about one.
    """
    if log.signature == MISMATCH:
        why = f"received a longer message than expected: {log.why}"
    elif log.role is Role.SECONDARY:
        why = f"{ended} because of a peer ({log.signature})"
    elif log.category == _WAIT_CATEGORY:
        why = f"{ended} because a wait timed out ({log.signature})"
    elif log.signature == _NCCL_UNHANDLED_SIGNATURE:
        why = f"{ended}, which may be cause or consequence ({log.signature}): {log.why}"
    else:
        return None
    judged = _classify_by_role(failure, log, why, signature=log.signature)
    # before an abort, a watchdog may also print another rank's timeout: only its own proves that
    # this rank waited
    is_of_another = (
        judged.failure_class is FailureClass.UNCLEAR and signal != "" and log.signature != TIMED_OUT
    )
    return replace(judged, waited=judged.waited and not is_of_another)


def aborted_without_reason(failure: WorkerError) -> bool:
    """Whether a process aborted without a reason: no message from native code,
    no Python thread that aborted.
    """
    in_python = any(_FAULTHANDLER_THREAD_LINE in dump.text for dump in failure.stack_dumps)
    return (
        failure.signal == "SIGABRT"
        and not in_python
        and not find_native_lines(failure.printed.splitlines())
    )


def _left_after_a_wait(failure: WorkerError) -> bool:
    """Whether a process printed that its own wait timed out,
    and exited while its agent was stopping it.
    """
    return (
        not failure.signal and bool(failure.exit_code) and _is_a_wait(_get_log_of_exit(failure, ""))
    )


# In lines of a log below the level of an error
_LOG_NOTICE = LazyPattern(r"\bW\d{3,4}[ ]\d\d:\d\d:|\[W\d{3,4}[ ]|\b(?:INFO|DEBUG)\b")


def prints_a_peers_error(stderr: str) -> bool:
    """Whether a process printed an error about a lost peer;
    notices about the job's store don't count.
    """
    own_lines = "\n".join(line for line in stderr.splitlines() if not _LOG_NOTICE.search(line))
    return _classified(own_lines).pointer != Pointer(store=True) and names_a_peer(own_lines)


def names_a_wait(exception: ExceptionInfo) -> bool:
    """Whether an exception only reports that a wait for peers timed out."""
    return _is_a_wait(_classify_link(exception))


def prints_a_timeout(failure: WorkerError) -> bool:
    """Whether a worker printed that its own wait timed out; NCCL's watchdog doesn't count:
    it prints any rank's.
    """
    lines = (
        _classified(line) for line in failure.printed.splitlines()[-_MAX_LOG_LINES:] if line.strip()
    )
    return any(
        _is_a_wait(classification) and classification.signature not in _WATCHDOG_SIGNATURES
        for classification in lines
    )


def names_a_peer(text: str) -> bool:
    """Whether a text is about a lost peer, or about a timed-out wait for a peer."""
    classification = _classified(text)
    return classification.signature not in _UNSPECIFIC_CONNECTION_SIGNATURES and (
        classification.role is Role.SECONDARY or _is_a_wait(classification)
    )


def _classify_text(failure: WorkerError) -> ClassifiedFailure:
    """Classify a stock Flyte error file, which has no fields except its text."""
    classification = _classified(
        failure.message, failure.code if failure.writer is not Writer.STOCK else "", ()
    )
    if classification.signature in LAUNCHER_SUMMARY_SIGNATURES:
        return ClassifiedFailure(
            failure, FailureClass.UNCLEAR, "is a launcher's summary of what it observed first"
        )
    if classification.role is Role.SECONDARY:
        why, signature = (
            f"points to another process ({classification.signature})",
            classification.signature,
        )
        return replace(
            _classify_by_role(failure, classification, why, signature=signature), waited=False
        )
    if classification.role is Role.AMBIGUOUS and classification.signature:
        return _classify_by_role(
            failure, classification, f"may be cause or consequence ({classification.signature})"
        )
    wrote = (
        "left a stock Flyte error file"
        if failure.writer is Writer.STOCK
        else "printed its own error"
    )
    judged = _classify_by_role(failure, classification, wrote)
    category = classification.specific_category
    return replace(
        judged,
        failure_class=FailureClass.OWN_FAULT,
        category=category,
        specific=classification.is_specific,
    )


def is_own_fault(exception: ExceptionInfo) -> bool:
    """Whether an exception is about the process that raised it, not about a peer."""
    return _classify_chain(exception).role is Role.PRIMARY


def _classify_chain(exception: ExceptionInfo) -> Classification:
    """Classify an exception by its first cause, through causes, contexts and groups.

    Wrappers, raised because of the first cause, decide only if the first cause doesn't identify the
    faulty process: a program may raise anything for a peer's error, and a cleanup may fail in any
    way. A GPU fault counts at any depth.
    """
    causes = find_causes(exception)
    inner = list(map(_classify_link, causes.informative_causes))
    outer = list(map(_classify_link, causes.wrappers))
    root = inner[-1]
    local = [
        classification
        for classification in inner
        if classification.role is Role.PRIMARY and classification.is_specific
    ]
    local += [
        classification
        for classification in outer
        if classification.role is Role.PRIMARY and classification.category in GPU_CATEGORIES
    ]
    if not local and _tells_nothing(root, exception):
        path = itertools.pairwise((*causes.wrappers, causes.first))
        is_wrapped = [is_wrapper(around, within) for around, within in path]
        # wrappers that report the first cause, directly or through other wrappers; not failures of
        # a cleanup
        reports = (
            classification
            for number, classification in enumerate(outer)
            if all(is_wrapped[number:])
        )
        local = [
            classification
            for classification in reports
            if classification.role is Role.PRIMARY and classification.is_specific
        ][-1:]
    return local[0] if local else root


def _tells_nothing(root: Classification, exception: ExceptionInfo) -> bool:
    """Whether a first cause doesn't identify the faulty process or service."""
    if root.signature in _UNSPECIFIC_CONNECTION_SIGNATURES:
        return not _is_about_group(exception)
    return root.signature in {"", "unread", "bare-timeout"}


def _classify_link(exception: ExceptionInfo) -> Classification:
    # a raised class is an exception, whatever its name
    return _classified(exception.message, exception.type, (*exception.bases, "BaseException"))


@lru_cache(maxsize=4096)
def _classified(
    message: str, exception_type: str = "", bases: tuple[str, ...] = ()
) -> Classification:
    """Classify a text. Cached: many victims raise the same text,
    and several rules classify each.
    """
    return classify(message, exception_type, bases)


def _is_a_wait(classification: Classification) -> bool:
    return classification.role is Role.AMBIGUOUS and classification.category == _WAIT_CATEGORY
