"""The message of a failed process: one rule for the headline, the report, the category and the class of its failure.

It is the first cause of the exception that the process raised; else of the last one that it printed; else the line of
what it printed that tells why it ended; else its exit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.evidence.text_classification import classify
from firstfault.exceptions.death_text import bare_line, last_line, text_of_death, thrown
from firstfault.exceptions.first_cause import causes_of, first_cause, is_wrapper, own_frames
from firstfault.exceptions.printed_exception import exception_of
from firstfault.exceptions.remote_traceback import short_name, with_remote
from firstfault.exceptions.tracebacks import place_of
from firstfault.model import Subject
from firstfault.model.signal_meanings import signal_of_exit_code
from firstfault.text import sentence_of

if TYPE_CHECKING:
    from firstfault.exceptions.first_cause import Causes
    from firstfault.model import ExceptionInfo, WorkerError


_EXIT = "SystemExit"
_MANY_LINES = 200
_OF_ENDS = {"aborted", "aborted-by-the-shell", "crashed", "exit-code", "killed", "terminated", "told-by-signal"}
"""Signatures of texts that repeat how a process ended."""


@dataclass(frozen=True, slots=True)
class Message:
    """The message of a failed process."""

    what: str
    """One or two words: the exception's short name, the signal or the exit code."""
    text: str = ""
    """A sentence; empty: the process left none."""
    about: str = ""
    """What this process said about an exception of another process; empty if it is this one's."""
    wrapper: str = ""
    """What was raised because of it: "raised as TrainingError: training failed"; empty if nothing was."""
    exception: ExceptionInfo | None = None
    """The exception that it raised or printed, with its wrappers; None: there is none."""

    @property
    def with_wrapper(self) -> str:
        """The text, and what was raised because of it."""
        return "; ".join(part for part in (self.text, self.wrapper) if part)

    @property
    def whole(self) -> str:
        """The text, and all that was said about it."""
        return "; ".join(part for part in (self.text, self.about, self.wrapper) if part)


def message_of(failure: WorkerError) -> Message:
    """Return the message of a failed process."""
    exception = exception_of(failure)
    if exception is None:
        return _of_end(failure)
    found = _of_exception(exception)
    if exception is not failure.exception:
        parts = (found.wrapper, f"printed before {_end_of(failure)}")
        return replace(found, wrapper="; ".join(part for part in parts if part))
    if found.what == _EXIT and failure.exit_code != 0 and (line := _last_line(failure, "")):
        return replace(found, text=line, wrapper=_end_of(failure))
    return found


def _of_end(failure: WorkerError) -> Message:
    """Return the message of a process that neither raised nor printed an exception."""
    is_stopped = failure.sent_signals and not failure.crashed_while_stopped
    if is_stopped or failure.expired is not None or failure.subject is Subject.AGENT:
        return Message(failure.what)
    if not failure.signal and failure.exit_code is None:
        return Message(failure.what)
    signal = failure.signal or signal_of_exit_code(failure.exit_code)
    return Message(failure.what, _last_line(failure, signal))


def _last_line(failure: WorkerError, signal: str) -> str:
    """Return the line that tells why a process ended: the one whose signature its last lines have, else the last."""
    text = text_of_death(failure.log_tail, signal)
    found = classify(text) if text else None
    if found is not None and found.category != "unknown" and found.signature not in _OF_ENDS:
        lines = (thrown(text), *text.splitlines()[:_MANY_LINES])
        telling = (line for line in lines if line and classify(line).signature == found.signature)
        if line := next(telling, ""):
            return bare_line(line)
    if signal in {"", "SIGABRT"}:
        return bare_line(thrown(text) or last_line(text))
    return ""


def _end_of(failure: WorkerError) -> str:
    """Return how a process ended that printed an exception, or a line: "exit code 7"."""
    if failure.exception is not None and failure.exit_code is None:
        return f"exit code {sentence_of(failure.exception.message) or 0}"
    return failure.signal or f"exit code {failure.exit_code}"


def described(exception: ExceptionInfo) -> str:
    """Return an exception in one line: "ValueError: bad sample"."""
    name, text = short_name(exception), sentence_of(exception.message)
    return f"{name}: {text}" if text else name


def _of_exception(exception: ExceptionInfo) -> Message:
    causes, original = causes_of(exception), first_cause(exception)
    text, here = sentence_of(original.message), sentence_of(with_remote(causes.first).message)
    about = here if here != text else ""
    wrapper = _wrapper_of(causes, text)
    return Message(short_name(original), text or _raising_line(exception), about, wrapper, exception)


def _raising_line(exception: ExceptionInfo) -> str:
    """Return what stands for the text of an exception without one, as of a bare `assert`: the line that raised it."""
    frames = own_frames(exception)
    return f"{place_of(frames[-1])}: {frames[-1].code}".rstrip(": ") if frames else ""


def _wrapper_of(causes: Causes, text: str) -> str:
    """Return how the first cause left the program, if that tells more than the cause itself."""
    if not causes.wrappers or (text and text in causes.wrappers[0].message):
        return ""
    outer, inner = causes.wrappers[0], (*causes.wrappers[1:], causes.first)[0]
    return f"{'raised as' if is_wrapper(outer, inner) else 'then'} {described(outer)}"
