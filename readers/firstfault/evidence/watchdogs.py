"""Ranks that a watchdog of the program's own ended, or that gave up: what they printed last tells of their wait."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from firstfault.evidence.classification import ClassifiedFailure, FailureClass
from firstfault.evidence.diagnosis import Candidate, Diagnosis
from firstfault.evidence.hangs import hung
from firstfault.evidence.texts import message_of
from firstfault.exceptions.fatal_text import find_telling_line
from firstfault.exceptions.first_cause import find_first_cause, iter_exceptions
from firstfault.exceptions.stack_position import PositionKind, locate_main_thread

_STALL = (
    r"\b(?:no|without|lack of|missed|lost|stale) (?:\w+ )?(?:progress|activity|updates?)\b|heart[- _]?beat"
    r"|watch[- _]?dog|\b(?:stall(?:s|ed)?|hangs?|hung|hanging|frozen|froze)\b|dead-?lock"
)
_OF_ALL = re.compile(rf"{_STALL}|\b(?:barrier|collective|peers?|ranks)\b", re.IGNORECASE)
"""Found in the last words of a process that looked after the whole job."""
_TELLS = re.compile(
    rf"{_STALL}|\b(?:no|without) (?:\w+ )?(?:response|answer)\b|\b(?:stuck|unresponsive)\b"
    r"|time[sd]?[- ]?out|deadline|\bwait(?:s|ed|ing)? (?:for|on|too|longer|\d)|\bg[ai]v(?:e|en|ing) up\b"
    r"|\b(?:longer|more) than \d|(?:not|n't) (?:\w+ )?(?:respond|answer|arriv|advanc)"
    r"|(?:not|n't) (?:\w+ )?(?:finish|complet|progress|reach|return)[^\n]*(?:\bin time\b|\bwithin\b|\d ?s)",
    re.IGNORECASE,
)
"""Found in the last words of a process whose wait didn't end."""
_TELLS_ELSE = re.compile(
    r"^(?:Assertion|Attribute|FileNotFound|Import|Index|Key|Lookup|ModuleNotFound|Name|Type|Value)Error\b"
    r"|(?i:\b(?:argument|config\w*|expected|invalid|missing|must|option|unknown|unrecogni[sz]ed)\b)"
)
_NO_REASON = re.compile(r"\A\Z|[^\x00-\x7F]|\d ?(?:s|ms|m|min\w*|se[ckg]\w*)\b", re.IGNORECASE)
"""Found where there are no last words, or they are in another language or tell of a duration."""
_VAGUE = {"", "exit", "interrupted", "signal", "unknown", "user_code"}
"""Categories of failures whose texts no signature fits."""
_SEVERAL = 2
_GROUP = "torch/distributed/"


def without_leavers(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis in which ranks that left because nothing moved had waited, if there is another cause.

    That is a fault of another rank, or a few ranks that stood elsewhere. Last words tell of the wait. Without any, or
    in another language, most ranks must have exited alike after a collective. If several tell of a wait and no rank
    stood elsewhere, each of them may be the cause.
    """
    told = [judged for judged in diagnosis.classified if tells_of_a_wait(judged) and _may_be_for_a_peer(judged)]
    exits = list(filter(_is_exit, diagnosis.classified))
    codes, known = {judged.failure.exit_code for judged in told or exits}, set(map(id, told))
    left = told + [judged for judged in exits if id(judged) not in known and judged.failure.exit_code in codes]
    count = len(left) + len(diagnosis.job.unopened_like(*{judged.failure.fingerprint for judged in left}))
    size = max(_SEVERAL, len(diagnosis.workers), *(judged.failure.place.world_size for judged in left))
    is_most = len(codes) == 1 and count * 2 > size
    if not told and not (is_most and all(_NO_REASON.search(_words(judged)) for judged in left)):
        return diagnosis
    if count < _SEVERAL and not _OF_ALL.search(_words(left[0])):
        return diagnosis  # it may have waited for anything
    others = _as_waits(diagnosis, left)
    if any(judged.failure_class <= FailureClass.EXTERNAL for judged in others.classified):
        return others
    if _stood_elsewhere(others, has_begun=not told):
        return replace(others, late=tuple(left))
    return others if told and count >= _SEVERAL and _is_exit(told[0]) else diagnosis


def may_have_waited_for(diagnosis: Diagnosis, left: Collection[ClassifiedFailure]) -> list[Candidate]:
    """Return the ranks that stood elsewhere when these exited, and had called a collective before."""
    return _stood_elsewhere(_as_waits(diagnosis, left), has_begun=True) if all(map(_is_exit, left)) else []


def tells_of_a_wait(judged: ClassifiedFailure) -> bool:
    """Whether a process that ended by itself tells, in words of the program's own, that its wait didn't end."""
    words, is_victim = _words(judged), judged.waited or judged.failure_class is FailureClass.CONSEQUENCE
    is_open = _is_vague(judged) and not is_victim and not judged.failure.recoverable
    return is_open and _TELLS.search(words) is not None and _TELLS_ELSE.search(words) is None


def _may_be_for_a_peer(judged: ClassifiedFailure) -> bool:
    """Whether nothing shows that a rank waited for something of its own, such as a server or a program.

    An exception that is raised outside of collectives is about that, unless its text speaks of the remaining ranks.
    """
    exception = judged.failure.exception
    if exception is None or any(_GROUP in frame.file for link in iter_exceptions(exception) for frame in link.frames):
        return True
    has_called = any(progress.is_outstanding for progress in judged.failure.collectives)
    return has_called or _OF_ALL.search(_words(judged)) is not None


def _is_vague(judged: ClassifiedFailure) -> bool:
    return judged.category in _VAGUE and not (judged.specific or judged.signature or judged.failure.sent_signals)


def _is_exit(judged: ClassifiedFailure) -> bool:
    failure = judged.failure
    return _is_vague(judged) and failure.exception is None and bool(failure.exit_code) and not failure.signal


def _words(judged: ClassifiedFailure) -> str:
    """Return the message of a failed process; if it has none of its own, the last line that it printed."""
    found = message_of(judged.failure)
    is_bare = found.exception is not None and not find_first_cause(found.exception).message
    return find_telling_line(judged.failure.printed) if is_bare or not found.text else f"{found.what}: {found.text}"


def _stood_elsewhere(diagnosis: Diagnosis, *, has_begun: bool) -> list[Candidate]:
    """Return the ranks that the others waited for; `has_begun`: only if one had called a collective."""
    found = hung(diagnosis)
    begun = any(progress.enqueued for item in found if item.failure for progress in item.failure.collectives)
    return found if len(found) * 2 <= len(diagnosis.workers) and (begun or not has_begun) else []


def _as_waits(diagnosis: Diagnosis, left: Collection[ClassifiedFailure]) -> Diagnosis:
    """Return the diagnosis in which these ranks had waited, except those whose own stack shows something else."""
    changed = {
        id(item): replace(
            item,
            failure_class=FailureClass.UNCLEAR,
            waited=locate_main_thread(item.failure).kind is not PositionKind.ELSEWHERE,
        )
        for item in left
    }
    return replace(diagnosis, classified=tuple(changed.get(id(item), item) for item in diagnosis.classified))
