"""Victims that exited on their own, by the program's own watchdog or timeout:
their last output mentions a wait.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from firstfault.evidence.classification import ClassifiedFailure, FailureClass
from firstfault.evidence.diagnosis import Candidate, Diagnosis
from firstfault.evidence.hangs import find_stragglers
from firstfault.evidence.texts import find_message
from firstfault.exceptions.fatal_text import find_telling_line
from firstfault.exceptions.first_cause import find_first_cause, iter_exceptions
from firstfault.exceptions.stack_position import PositionKind, locate_main_thread
from firstfault.utils.lazy_pattern import LazyPattern

VAGUE_CATEGORIES = {"", "exit", "interrupted", "signal", "unknown", "user_code"}
"""Categories of failures without a matching signature."""
MIN_RANKS = 2
DISTRIBUTED_PACKAGE = "torch/distributed/"

# About a process or a job that makes no progress
_NO_PROGRESS = LazyPattern(r"""(?i)
  \b(?:no|without|lack[ ]of|missed|lost|stale)[ ](?:\w+[ ])?(?:progress|activity|updates?)\b
  |heart[- _]?beat
  |watch[- _]?dog
  |\b(?:stall(?:s|ed)?|hangs?|hung|hanging|frozen|froze)\b
  |dead-?lock
""")

# In the last output of a process that watched the whole job, as are the words of `_NO_PROGRESS`
_JOB_WIDE_WORD = LazyPattern(r"(?i)\b(?:barrier|collective|peers?|ranks)\b")

# An empty text, another language, or a duration
_NO_REASON_GIVEN = LazyPattern(r"(?i)\A\Z|[^\x00-\x7F]|\d[ ]?(?:s|ms|m|min\w*|se[ckg]\w*)\b")


def demote_ranks_that_gave_up(diagnosis: Diagnosis) -> Diagnosis:
    """Reclassify ranks that gave up waiting as victims, if there is a different cause.

    The cause is another rank's fault, or a few ranks outside of collectives. The last output of a
    victim mentions its wait; without output, or in another language, most ranks must have exited
    with one code after a collective. If several ranks mention a wait and no rank was elsewhere,
    each of them may be the cause.
    """
    gave_up = [
        judged
        for judged in diagnosis.classified
        if reports_timed_out_wait(judged) and _may_wait_for_peer(judged)
    ]
    # a program's own watchdog often exits without a usable message: ranks with the same exit code
    # count, too
    exits = list(filter(_is_exit, diagnosis.classified))
    codes = {judged.failure.exit_code for judged in gave_up or exits}
    gave_up_ids = set(map(id, gave_up))
    waiting_failures = gave_up + [
        judged
        for judged in exits
        if id(judged) not in gave_up_ids and judged.failure.exit_code in codes
    ]
    # unread documents with the same fingerprint count, too: in a large cascade only a few are
    # opened
    count = len(waiting_failures) + len(
        diagnosis.job.unopened_like(*{judged.failure.fingerprint for judged in waiting_failures})
    )
    size = max(
        MIN_RANKS,
        len(diagnosis.workers),
        *(judged.failure.place.world_size for judged in waiting_failures),
    )
    is_most = len(codes) == 1 and count * 2 > size
    if not gave_up and not (
        is_most and all(_mentions(judged, _NO_REASON_GIVEN) for judged in waiting_failures)
    ):
        return diagnosis
    if count < MIN_RANKS and not _mentions(waiting_failures[0], _NO_PROGRESS, _JOB_WIDE_WORD):
        return diagnosis  # it may have waited for anything
    others = _reclassify_as_waits(diagnosis, waiting_failures)
    if any(judged.failure_class <= FailureClass.EXTERNAL for judged in others.classified):
        return others
    # Rank 3 is stuck in its data loader, and ranks 0 to 2 gave up: the straggler explains the
    # exits. Without a message it must have called a collective before: during startup, ranks may
    # exit with one code for any shared reason.
    if _find_stragglers_elsewhere(others, has_begun=not gave_up):
        return replace(others, late=tuple(waiting_failures))
    return others if gave_up and count >= MIN_RANKS and _is_exit(gave_up[0]) else diagnosis


def find_stragglers_before_exits(
    diagnosis: Diagnosis, exits: Collection[ClassifiedFailure]
) -> list[Candidate]:
    """Return the stragglers at the time when the ranks in `exits` exited,
    if a straggler had called a collective.
    """
    if not all(map(_is_exit, exits)):
        return []
    return _find_stragglers_elsewhere(_reclassify_as_waits(diagnosis, exits), has_begun=True)


# In the last output of a process with an unfinished wait, as are the words of `_NO_PROGRESS`
_UNFINISHED_WAIT = LazyPattern(r"""(?i)
  \b(?:no|without)[ ](?:\w+[ ])?(?:response|answer)\b
  |\b(?:stuck|unresponsive)\b
  |time[sd]?[- ]?out
  |deadline
  |\bwait(?:s|ed|ing)?[ ](?:for|on|too|longer|\d)
  |\bg[ai]v(?:e|en|ing)[ ]up\b
  |\b(?:longer|more)[ ]than[ ]\d
  |(?:not|n't)[ ](?:\w+[ ])?(?:respond|answer|arriv|advanc)
  |(?:not|n't)[ ](?:\w+[ ])?(?:finish|complet|progress|reach|return)[^\n]*(?:\bin[ ]time\b|\bwithin\b|\d[ ]?s)
""")

# An error that is about something else than a wait
_UNRELATED_ERROR = LazyPattern(r"""
  ^(?:Assertion|Attribute|FileNotFound|Import|Index|Key|Lookup|ModuleNotFound|Name|Type|Value)Error\b
  |(?i:\b(?:argument|config\w*|expected|invalid|missing|must|option|unknown|unrecogni[sz]ed)\b)
""")


def reports_timed_out_wait(judged: ClassifiedFailure) -> bool:
    """Whether a process that exited on its own mentions an unfinished wait in its own output."""
    is_victim = judged.waited or judged.failure_class is FailureClass.CONSEQUENCE
    is_open = _is_vague(judged) and not is_victim and not judged.failure.recoverable
    return (
        is_open
        and _mentions(judged, _NO_PROGRESS, _UNFINISHED_WAIT)
        and not _mentions(judged, _UNRELATED_ERROR)
    )


def _may_wait_for_peer(judged: ClassifiedFailure) -> bool:
    """Whether a rank may have waited for a peer, rather than for a server or a child process.

    An exception raised outside of collectives isn't about a peer, unless its text mentions ranks or
    collectives.
    """
    exception = judged.failure.exception
    if exception is None or any(
        DISTRIBUTED_PACKAGE in frame.file
        for link in iter_exceptions(exception)
        for frame in link.frames
    ):
        return True
    has_called = any(progress.is_outstanding for progress in judged.failure.collectives)
    return has_called or _mentions(judged, _NO_PROGRESS, _JOB_WIDE_WORD)


def _is_vague(judged: ClassifiedFailure) -> bool:
    return judged.category in VAGUE_CATEGORIES and not (
        judged.specific or judged.signature or judged.failure.sent_signals
    )


def _is_exit(judged: ClassifiedFailure) -> bool:
    failure = judged.failure
    return (
        _is_vague(judged)
        and failure.exception is None
        and bool(failure.exit_code)
        and not failure.signal
    )


def _mentions(judged: ClassifiedFailure, *patterns: LazyPattern) -> bool:
    """Whether one of these patterns is in the last message of a failed process."""
    text = _get_last_message(judged)
    return any(pattern.search(text) for pattern in patterns)


def _get_last_message(judged: ClassifiedFailure) -> str:
    """Return a failed process's own message, or the last line that it printed."""
    message = find_message(judged.failure)
    is_bare = message.exception is not None and not find_first_cause(message.exception).message
    return (
        find_telling_line(judged.failure.printed)
        if is_bare or not message.text
        else f"{message.what}: {message.text}"
    )


def _find_stragglers_elsewhere(diagnosis: Diagnosis, *, has_begun: bool) -> list[Candidate]:
    """Return the stragglers; with `has_begun`, only if a straggler had called a collective."""
    stragglers = find_stragglers(diagnosis)
    begun = any(
        progress.enqueued
        for item in stragglers
        if item.failure
        for progress in item.failure.collectives
    )
    return (
        stragglers
        if len(stragglers) * 2 <= len(diagnosis.workers) and (begun or not has_begun)
        else []
    )


def _reclassify_as_waits(
    diagnosis: Diagnosis, failures: Collection[ClassifiedFailure]
) -> Diagnosis:
    """Reclassify these failures as waits, except where the stack shows something else."""
    changed = {}
    for item in failures:
        waited = locate_main_thread(item.failure).kind is not PositionKind.ELSEWHERE
        changed[id(item)] = replace(item, failure_class=FailureClass.UNCLEAR, waited=waited)
    return replace(
        diagnosis, classified=tuple(changed.get(id(item), item) for item in diagnosis.classified)
    )
