"""Each failure's failure_class: did it fail by itself, or because of somebody?"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from firstfault.evidence.signatures import Role
from firstfault.evidence.texts import Classification, classify, pointer_in
from firstfault.model import Subject, Writer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from firstfault.evidence.texts import Pointer
    from firstfault.model import ExceptionInfo, JobErrors, WorkerError

__all__ = ["ClassifiedFailure", "FailureClass", "classify_failures"]

_GENERAL = {"program", "missing-file", ""}
"""Signatures that an exception meets because it meets no other."""
_OF_ANY_CONNECTION = {"connection-lost", "connection-unclear"}
"""Signatures that do not know whose connection it was."""
_GROUP = "torch/distributed/"
_PROGRAMS_OWN = {"ValueError", "TypeError", "LookupError", "AttributeError", "NameError", "AssertionError"}
"""Types, with those derived from them, that no transport raises."""
_TRANSPORTS = {"RuntimeError", "OSError", "EOFError"}
_SUMMARY = "launcher-summary"
"""Signature of what a launcher says about all of its workers."""
_WAIT = "hang"
"""Category of the signatures of a wait in vain."""
_ANSWERS = {"SignalException", "KeyboardInterrupt"}
"""What the handler of a signal raises."""
_CRASHES = {"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS", "SIGKILL"}
_STOPS = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}
_VARYING = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b(?P<rank>rank) \d+|\d{4,}", re.IGNORECASE)
"""Addresses, ranks and long numbers; not the short ones, which are exit codes, signals and error numbers."""
_UNTOLD = 128
"""What shells add to a signal's number to make an exit code of it."""


class FailureClass(enum.IntEnum):
    """What a failure is, from the strongest reason to be the root cause to the weakest."""

    OWN_FAULT = 0
    """An exception of its own, or local evidence of a fault."""
    OWN_EXIT = 1
    """A signal or an exit that its agent did not cause."""
    LOST = 2
    """An agent, and with it its node, is gone."""
    EXTERNAL = 3
    """A node was told to go."""
    UNCLEAR = 4
    """Both readings are common: a collective's timeout, an abort."""
    CONSEQUENCE = 5
    """It names a peer that is gone, or was stopped."""


@dataclass(frozen=True, slots=True)
class ClassifiedFailure:
    """A failure and what it is."""

    failure: WorkerError
    failure_class: FailureClass
    why: str
    """Half a sentence behind its name."""
    category: str = ""
    """A more precise one than the failure's own, if a text gives one."""
    pointer: Pointer | None = None
    """Whom it names."""
    specific: bool = False
    """A signature knows this very fault, rather than that it is an exception."""
    in_flight: bool = False
    """The exception had not left the task function when its process was stopped."""
    waited: bool = False
    """It waited in vain for somebody, until its time was up."""

    @property
    def node(self) -> str | None:
        """The failure's node, None if it has no name."""
        return self.failure.node or None


def classify_failures(job: JobErrors) -> tuple[ClassifiedFailure, ...]:
    """Return the failure_class of every failure of the round that is judged, in their order."""
    gone = {
        failure.node
        for failure in job.failures
        if failure.subject is Subject.AGENT and failure.category in {"preemption", "node_lost"}
    }
    return tuple(_finding(failure, gone) for failure in job.failures)


def _finding(failure: WorkerError, gone: set[str]) -> ClassifiedFailure:
    if failure.subject is Subject.AGENT:
        return _of_agent(failure)
    if failure.stopped_by_agent:
        sent = failure.sent_signals[0]
        if failure.signal in _CRASHES | {"SIGABRT"} and failure.signal != sent.signal:
            why = f"crashed ({failure.signal}) while its agent stopped it"
            return ClassifiedFailure(failure, FailureClass.UNCLEAR, why, "signal")
        return ClassifiedFailure(failure, FailureClass.CONSEQUENCE, f"was stopped by its agent: {sent.reason}")
    if failure.exception is not None:
        return _of_exception(failure, failure.exception, gone)
    if failure.signal or failure.exit_code is not None:
        return _of_death(failure, gone)
    return _of_text(failure)


def _of_agent(failure: WorkerError) -> ClassifiedFailure:
    if failure.category == "preemption":
        return ClassifiedFailure(failure, FailureClass.EXTERNAL, "was told to go")
    if failure.category == "node_lost":
        return ClassifiedFailure(failure, FailureClass.LOST, "is gone without a word")
    if failure.exception is None:
        return ClassifiedFailure(failure, FailureClass.OWN_FAULT, "failed")
    found = _chain(failure.exception)
    if found.role is Role.PRIMARY:
        return ClassifiedFailure(
            failure, FailureClass.OWN_FAULT, f"failed: {found.why}", _precise(found), found.pointer, _is(found)
        )
    failure_class = FailureClass.UNCLEAR if found.role is Role.AMBIGUOUS else FailureClass.CONSEQUENCE
    return ClassifiedFailure(failure, failure_class, f"lost the others: {found.why}", "", found.pointer)


def _of_exception(failure: WorkerError, exception: ExceptionInfo, gone: set[str]) -> ClassifiedFailure:
    name = exception.type.rsplit(".", 1)[-1]
    if name in _ANSWERS:
        if failure.node in gone or failure.sent_signals:
            return ClassifiedFailure(failure, FailureClass.CONSEQUENCE, "was told to go with its node")
        return ClassifiedFailure(
            failure, FailureClass.OWN_EXIT, "was ended by a signal that its agent had not sent", "signal"
        )
    if name == "SystemExit":
        if failure.sent_signals:
            return ClassifiedFailure(failure, FailureClass.CONSEQUENCE, "left when its agent stopped it")
        return ClassifiedFailure(failure, FailureClass.OWN_EXIT, "left by itself", "exit")
    found = _chain(exception)
    in_flight = failure.in_flight and bool(failure.sent_signals)
    if found.role is Role.PRIMARY:
        why = "raised an exception of its own" if not _is(found) else f"reports a fault of its own ({found.signature})"
        return ClassifiedFailure(
            failure, FailureClass.OWN_FAULT, why, _precise(found), found.pointer, _is(found), in_flight
        )
    if found.role is Role.SECONDARY and _is_of_the_program(exception):
        why = "raised an exception of its own, whatever its text reminds of"
        return ClassifiedFailure(failure, FailureClass.OWN_FAULT, why, in_flight=in_flight)
    if found.role is Role.SECONDARY and found.signature in _OF_ANY_CONNECTION and not _is_of_a_group(exception):
        why = f"lost a connection, which need not be one to a peer ({found.signature})"
        return ClassifiedFailure(failure, FailureClass.UNCLEAR, why, "network", found.pointer, in_flight=in_flight)
    if found.role is Role.SECONDARY:
        why = f"names somebody else ({found.signature}): {found.why}"
        waited = found.category == _WAIT
        return ClassifiedFailure(
            failure, FailureClass.CONSEQUENCE, why, "", found.pointer, in_flight=in_flight, waited=waited
        )
    why = f"can be read in both ways ({found.signature or 'unknown text'}): {found.why}"
    waited = found.category == _WAIT
    return ClassifiedFailure(
        failure, FailureClass.UNCLEAR, why, found.category, found.pointer, in_flight=in_flight, waited=waited
    )


def _is_of_a_group(exception: ExceptionInfo) -> bool:
    """Whether an exception came out of torch's collectives or its store, or nobody can tell."""
    frames = [frame for link in (exception, *exception.causes) for frame in link.frames]
    return not frames or any(_GROUP in frame.file for frame in frames)


def _is_of_the_program(exception: ExceptionInfo) -> bool:
    """Whether it is of a type that no transport raises, and came from outside of torch's collectives."""
    links = (exception, *exception.causes)
    names = {name.rsplit(".", 1)[-1] for link in links for name in (link.type, *link.bases)}
    return bool(names & _PROGRAMS_OWN) and not names & _TRANSPORTS and not _is_of_a_group(exception)


def _of_death(failure: WorkerError, gone: set[str]) -> ClassifiedFailure:
    said = _classified(failure.log_tail, "", ()) if failure.log_tail else None
    signal = failure.signal or _signal_of(failure.exit_code)
    if signal in _STOPS and failure.node in gone:
        return ClassifiedFailure(failure, FailureClass.CONSEQUENCE, "was told to go with its node")
    if said is not None and said.role is Role.PRIMARY and said.signature not in _GENERAL | {"killed", "crashed"}:
        why = f"wrote before it died ({said.signature}): {said.why}"
        return ClassifiedFailure(failure, FailureClass.OWN_FAULT, why, _precise(said), said.pointer, specific=True)
    if signal == "SIGKILL" and failure.resources.oom_kill:
        return ClassifiedFailure(
            failure, FailureClass.OWN_EXIT, "was killed by the kernel for want of memory", "host_oom"
        )
    if signal in _CRASHES or signal in _STOPS:
        return ClassifiedFailure(failure, FailureClass.OWN_EXIT, f"was ended by {signal}, which its agent had not sent")
    if signal == "SIGABRT":
        if said is not None and said.role is Role.SECONDARY:
            return ClassifiedFailure(
                failure, FailureClass.CONSEQUENCE, f"aborted over a peer ({said.signature})", "", said.pointer
            )
        if said is not None and said.category == _WAIT:
            why = f"aborted over a wait ({said.signature})"
            return ClassifiedFailure(failure, FailureClass.UNCLEAR, why, said.category, said.pointer, waited=True)
        return ClassifiedFailure(failure, FailureClass.OWN_EXIT, "aborted, which its agent had not asked for")
    if failure.exit_code == 1:
        return ClassifiedFailure(failure, FailureClass.UNCLEAR, "exited with code 1, which says nothing of why")
    return ClassifiedFailure(failure, FailureClass.OWN_EXIT, f"exited by itself with code {failure.exit_code}")


def _of_text(failure: WorkerError) -> ClassifiedFailure:
    """A file of Flyte's own: nothing but a text."""
    found = _classified(failure.message, failure.code if failure.writer is not Writer.STOCK else "", ())
    if found.signature == _SUMMARY:
        return ClassifiedFailure(failure, FailureClass.UNCLEAR, "is a launcher's summary, of what it saw first")
    if found.role is Role.SECONDARY:
        return ClassifiedFailure(
            failure, FailureClass.CONSEQUENCE, f"names somebody else ({found.signature})", "", found.pointer
        )
    if found.role is Role.AMBIGUOUS and found.signature:
        why, waited = f"can be read in both ways ({found.signature})", found.category == _WAIT
        return ClassifiedFailure(failure, FailureClass.UNCLEAR, why, found.category, waited=waited)
    return ClassifiedFailure(
        failure, FailureClass.OWN_FAULT, "has a file of Flyte's own", _precise(found), found.pointer, _is(found)
    )


def _signal_of(exit_code: int | None) -> str:
    """The signal that a shell made an exit code of."""
    names = {6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
    return names.get(exit_code - _UNTOLD, "") if exit_code is not None else ""


def _chain(exception: ExceptionInfo) -> Classification:
    """Return what an exception with its causes says.

    Local evidence anywhere in the chain counts. Else what came first: an exception that was raised from, or while
    handling, one that names a peer is a consequence, whatever its own text; one that names a peer, raised while
    handling one of the program's own, is what became of a fault.
    """
    links = [_link(link) for link in (exception, *exception.causes)]
    links += [_chain(member) for member in exception.members]
    local = next((link for link in links if link.role is Role.PRIMARY and _is(link)), None)
    if local is not None:
        return local
    if exception.members:
        return min(links[1:], key=lambda link: (link.role is not Role.PRIMARY, link.role is not Role.SECONDARY))
    return links[-1]


def _link(exception: ExceptionInfo) -> Classification:
    # whatever it is called, it was raised
    return _classified(exception.message, exception.type, (*exception.bases, "BaseException"))


def _classified(message: str, exception_type: str, bases: Iterable[str]) -> Classification:
    """Classify a text; thousands of victims that differ in nothing but numbers are looked at once."""
    found = _cached(_VARYING.sub(_same_for_all, message), exception_type, tuple(bases))
    if found.pointer is None:
        return found
    return replace(found, pointer=pointer_in(f"{exception_type}: {message}", found.signature))


def _same_for_all(number: re.Match[str]) -> str:
    return "1.1.1.1" if "." in number[0] else "rank 0" if number["rank"] else "1111"


@lru_cache(maxsize=4096)
def _cached(message: str, exception_type: str, bases: tuple[str, ...]) -> Classification:
    return classify(message, exception_type, bases)


def _is(found: Classification) -> bool:
    return found.signature not in _GENERAL


def _precise(found: Classification) -> str:
    return found.category if found.category not in {"unknown", "user_code"} else ""
