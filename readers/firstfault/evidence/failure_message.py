"""What a failed process says: one rule for the headline, the report, the category and the class of its failure.

It is the first cause of the exception that the process raised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.exceptions.first_cause import causes_of, first_cause, is_wrapper
from firstfault.exceptions.remote_traceback import short_name, with_remote
from firstfault.text import sentence_of

if TYPE_CHECKING:
    from firstfault.exceptions.first_cause import Causes
    from firstfault.model import ExceptionInfo, WorkerError

__all__ = ["Message", "described", "message_of"]


@dataclass(frozen=True, slots=True)
class Message:
    """What a failed process says."""

    what: str
    """One or two words: the exception's short name, the signal or the exit code."""
    text: str = ""
    """A sentence; empty: the process says nothing."""
    about: str = ""
    """What this process said about an exception of another process; empty if it is this one's."""
    wrapper: str = ""
    """What was raised because of it: "raised as TrainingError: training failed"; empty if nothing was."""
    exception: ExceptionInfo | None = None
    """The exception, with its wrappers; None: there is none."""

    @property
    def with_wrapper(self) -> str:
        """The text, and what was raised because of it."""
        return "; ".join(part for part in (self.text, self.wrapper) if part)

    @property
    def whole(self) -> str:
        """The text, and all that was said about it."""
        return "; ".join(part for part in (self.text, self.about, self.wrapper) if part)


def message_of(failure: WorkerError) -> Message:
    """Return what a failed process says."""
    if failure.exception is not None:
        return _of_exception(failure.exception)
    return Message(failure.what)


def described(exception: ExceptionInfo) -> str:
    """Return an exception in one line: "ValueError: bad sample"."""
    name, text = short_name(exception), sentence_of(exception.message)
    return f"{name}: {text}" if text else name


def _of_exception(exception: ExceptionInfo) -> Message:
    causes, original = causes_of(exception), first_cause(exception)
    text, here = sentence_of(original.message), sentence_of(with_remote(causes.first).message)
    about = here if here != text else ""
    return Message(short_name(original), text, about, _wrapper_of(causes, text), exception)


def _wrapper_of(causes: Causes, text: str) -> str:
    """Return how the first cause left the program, if that says more than the cause itself."""
    if not causes.wrappers or (text and text in causes.wrappers[0].message):
        return ""
    outer, inner = causes.wrappers[0], (*causes.wrappers[1:], causes.first)[0]
    return f"{'raised as' if is_wrapper(outer, inner) else 'then'} {described(outer)}"
