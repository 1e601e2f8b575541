"""One line about a verdict, an exception or a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.evidence.failure_message import message_of
from firstfault.model import Subject
from firstfault.model.signal_meanings import explain_end
from firstfault.report.words import size
from firstfault.text import one_line

if TYPE_CHECKING:
    from firstfault.model import Resources, Verdict, WorkerError

__all__ = ["headline_parts", "line_of", "memory_text"]

_LINE = 200
_LONG = 400
_NEAR_THE_LIMIT = 0.9


def headline_parts(verdict: Verdict) -> tuple[str, str]:
    """Return a verdict's headline in two parts: the fault in one or two words, and a sentence about it."""
    root, headline = verdict.root, _whole_headline(verdict)
    what = message_of(root).what if root is not None else ""
    if what and headline.startswith(f"{what},"):
        return what, headline[len(what) :].partition(": ")[2]
    name, _, text = headline.partition(": ")
    return name.split(",", 1)[0], text


def _whole_headline(verdict: Verdict) -> str:
    """Return the headline before it was cut, if the message begins with it."""
    begin, cut, _ = verdict.headline.rpartition("...")
    whole = one_line(verdict.message, _LONG)
    return whole if cut and verdict.headline.endswith("...") and whole.startswith(begin) else verdict.headline


def line_of(failure: WorkerError) -> str:
    """Return what happened to a process in one line, without its name."""
    if failure.stopped_by_agent and not failure.crashed_while_stopped:
        sent = failure.sent_signals[0]
        return one_line(f"{failure.signal or sent.signal}: {sent.reason}", _LINE)
    if failure.subject is Subject.AGENT and failure.exception is None:
        return one_line(failure.message, _LINE) or failure.code
    said = message_of(failure)
    if said.text or said.exception is not None:
        return one_line(f"{said.what}: {said.text}" if said.text else said.what, _LINE)
    if failure.signal or failure.exit_code is not None:
        return one_line(f"{failure.what}: {explain_end(failure)}", _LINE)
    # flytekit's texts start with ``Trace:`` and carry the sentence after ``Message:``
    _, found, tail = failure.message.rpartition("\nMessage:")
    return one_line(tail if found else failure.message, _LINE) or failure.code


def memory_text(found: Resources) -> str:
    """Return what the kernel's OOM killer was after: "15.9 of 16.0 GiB"."""
    peak, limit = found.memory_peak_bytes or found.memory_used_bytes, found.memory_limit_bytes
    if peak is None or limit is None:
        return "by the kernel's OOM killer"
    used, most = size(peak), size(limit)
    number, _, unit = used.partition(" ")
    text = f"{number} of {most}" if most.endswith(f" {unit}") else f"{used} of {most}"
    return text if peak >= _NEAR_THE_LIMIT * limit else f"its machine had no memory left; it used {text}"
