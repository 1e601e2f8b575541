"""A verdict as plain text: the message that Flyte shows, and what the terminal shows.

ASCII, one fact a line, no columns: Flyte's panel is about 40 characters wide, its lists keep 55 characters of the
first line, and a text is cut in its middle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.model import Decision, ExceptionInfo, Scope, Verdict, WorkerError
from firstfault.report.json import format_timestamp
from firstfault.text import elide, one_line, printable, sentence_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["first_line", "flyte_message", "format_exception", "terminal_text"]

_LIST_WIDTH = 55
_FIRST_LINE = 90
_MESSAGE = 16_000
"""Characters; Flyte keeps the first and last 50 KB of a text."""
_SHOWN = 8
"""Victims, notes and sentences that are listed; the rest is counted."""
_FACT = 300
_NODE_TAIL = 10
"""Characters of the node's name that the answer has room for, however long the rest is."""


def first_line(verdict: Verdict, decision: Decision) -> str:
    """One line of at most 90 characters whose first 55 say what, which rank, which node, and retry or not."""
    root = verdict.root
    what = root.what if root is not None else verdict.headline.split(":", 1)[0].split(",", 1)[0]
    fate = "retry" if decision.retry else "no retry"
    subject = _subject(verdict)
    node = " ".join(printable(_ascii(verdict.node or "")).split())
    what = one_line(_ascii(what), _LIST_WIDTH - len(subject) - min(len(node), _NODE_TAIL) - len(fate) - 3)
    answer = " ".join(part for part in (what if what != subject else "", subject) if part)
    node = _fit_node(node, _LIST_WIDTH - len(answer) - len(fate) - 2)
    answer = " ".join(part for part in (answer, node, fate) if part)
    detail = one_line(_ascii(_detail(verdict)), max(_FIRST_LINE - len(answer) - 2, 0))
    return f"{answer}: {detail}" if detail else answer


def flyte_message(verdict: Verdict, decision: Decision, *, uri: str = "") -> str:
    """The text that Flyte shows for a failed attempt, under 16 KB; its first line stands again at its end."""
    line = first_line(verdict, decision)
    tail = ["", *_commands(verdict, uri), "", line]
    facts = [line, "", *_facts(verdict, decision)]
    room = _MESSAGE - sum(len(part) + 1 for part in [*facts, *tail]) - 2
    body = elide(printable(_ascii(verdict.message.strip())), max(room, 200))
    return elide("\n".join([*facts, "", body, *tail]), _MESSAGE)


def terminal_text(verdict: Verdict, decision: Decision, *, uri: str = "") -> str:
    """What ``firstfault show`` and ``firstfault run`` print: the same facts, the message, the evidence."""
    lines = [first_line(verdict, decision), "", *_facts(verdict, decision), "", *_evidence(verdict)]
    lines += ["", printable(verdict.message.strip())]
    if uri:
        lines += ["", f"documents: {uri}"]
    return "\n".join(lines)


def format_exception(exception: ExceptionInfo) -> str:
    """An exception as Python prints it: causes first, then its own traceback, message and notes."""
    parts = [_traceback(cause) + _BETWEEN.get(child, "") for cause, child in _chain(exception)]
    return "".join([*parts, _traceback(exception)]).rstrip("\n")


# --- parts ----------------------------------------------------------------------------------------------------------


def _facts(verdict: Verdict, decision: Decision) -> list[str]:
    return [_fact(line) for line in _fact_lines(verdict, decision)]


def _fact(line: str) -> str:
    """One line of ASCII, bounded, that steers no terminal: a fact may quote a document that somebody else wrote."""
    return elide(printable(_ascii(line)).replace("\n", " ").replace("\t", " "), _FACT).replace("\n", " ")


def _fact_lines(verdict: Verdict, decision: Decision) -> Iterator[str]:
    root = verdict.root
    yield f"root cause: {verdict.headline}"
    yield f"retry: {'yes' if decision.retry else 'no'}, {decision.reason}"
    yield f"enforced by Flyte: {'yes' if decision.enforced else 'no, this is advice'}"
    yield f"category: {verdict.category}"
    if verdict.node:
        yield f"node: {verdict.node}"
    if root is not None:
        yield from _root_facts(root)
    yield f"time: {format_timestamp(verdict.timestamp_ns) or 'not recorded'}"
    yield f"confidence: {verdict.confidence}, by the strategy {verdict.strategy}"
    yield from _victim_facts(verdict)
    yield from _coverage_facts(verdict)


def _root_facts(root: WorkerError) -> Iterator[str]:
    place = root.place
    if place.rank is not None:
        local = f" (local rank {place.local_rank})" if place.local_rank is not None else ""
        yield f"rank: {place.rank}{local}"
    if place.host and place.host != root.node:
        yield f"host: {place.host}"
    if root.exit_code is not None:
        yield f"exit code: {root.exit_code}" + (f" ({root.signal})" if root.signal else "")
    if place.pid:
        yield f"pid: {place.pid}"


def _victim_facts(verdict: Verdict) -> Iterator[str]:
    victims = verdict.victims
    if not victims.count:
        return
    yield f"victims: {victims.count}"
    shown = victims.by_rank[:_SHOWN]
    for rank, line in shown:
        yield f"  rank {rank}: {one_line(line, 100)}"
    if victims.count > len(shown):
        yield f"  and {victims.count - len(shown)} more"


def _coverage_facts(verdict: Verdict) -> Iterator[str]:
    coverage = verdict.coverage
    expected = coverage.expected if coverage.expected is not None else "an unknown number"
    yield f"nodes heard: {coverage.reported} of {expected}" + ("" if coverage.complete else ", incomplete")
    if not verdict.settled:
        yield "not settled: the wait for the other nodes ran out"
    yield from _first_of("note", coverage.notes)


def _evidence(verdict: Verdict) -> Iterator[str]:
    yield from (_fact(f"why: {sentence}") for sentence in verdict.why)
    for suspect in verdict.suspects:
        name = f"rank {suspect.rank}" if suspect.rank is not None else str(suspect.node)
        yield _fact(f"suspect: {name}, {suspect.why}")


def _commands(verdict: Verdict, uri: str) -> Iterator[str]:
    yield from map(_fact, _first_of("why", verdict.why))
    if uri:
        yield f"more: firstfault show {one_line(_ascii(uri), 2_000)}"


def _first_of(name: str, sentences: Sequence[str]) -> Iterator[str]:
    yield from (f"{name}: {sentence}" for sentence in sentences[:_SHOWN])
    if len(sentences) > _SHOWN:
        yield f"{name}: and {len(sentences) - _SHOWN} more"


def _subject(verdict: Verdict) -> str:
    if verdict.scope is Scope.UNDETERMINED:
        return "undetermined"
    if len(verdict.ranks) > 1:
        return f"{len(verdict.ranks)} ranks"
    return f"rank {verdict.ranks[0]}" if verdict.ranks else ""


def _detail(verdict: Verdict) -> str:
    root = verdict.root
    if root is not None and root.exception is not None:
        return sentence_of(root.exception.message)
    _, found, text = verdict.headline.partition(": ")
    return text if found else ""


def _fit_node(node: str, room: int) -> str:
    """A node's name in at most `room` characters; its end tells pods apart, so the beginning goes first."""
    if len(node) <= room:
        return node
    return ".." + node[-(room - 2) :] if room > 4 else ""  # noqa: PLR2004 - less tells nothing


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii")


# --- exceptions -----------------------------------------------------------------------------------------------------

_BETWEEN = {
    "cause": "\nThe above exception was the direct cause of the following exception:\n\n",
    "context": "\nDuring handling of the above exception, another exception occurred:\n\n",
}


def _chain(exception: ExceptionInfo) -> Iterable[tuple[ExceptionInfo, str]]:
    """Causes from the deepest to the nearest, each with how the next one hangs on it."""
    return [(cause, cause.relation) for cause in reversed(exception.causes)]


def _traceback(exception: ExceptionInfo) -> str:
    lines = ["Traceback (most recent call last):"] if exception.frames else []
    half = len(exception.frames) // 2
    for index, frame in enumerate(exception.frames):
        if exception.frames_omitted and index == half:
            lines.append(f"  ... {exception.frames_omitted} frames left out ...")
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        if frame.code:
            lines.append(f"    {frame.code}")
    lines.append(f"{exception.type}: {exception.message}" if exception.message else exception.type)
    lines.extend(exception.notes)
    for index, member in enumerate(exception.members, 1):
        lines.append(f"  ---- member {index} ----")
        lines.extend(f"  {line}" for line in format_exception(member).splitlines())
    return "\n".join(lines) + "\n"
