"""A verdict as plain text: the message that Flyte shows, and what the terminal shows.

ASCII, one fact a line, no columns: Flyte's panel is about 40 characters wide, its lists keep 55 characters of the
first line, and a text is cut in its middle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.model import (
    CausedBy,
    CollectiveProgress,
    Decision,
    ExceptionInfo,
    Resources,
    Scope,
    ThreadFailure,
    Verdict,
    WorkerError,
)
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
_STACK_LINES = 30
_LOG_LINES = 20
_LINE = 200
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_UNIT = 1024
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
    blocks = [elide(_ascii(block), max(room // 3, 200)) for block in _blocks(verdict.root)]
    room -= sum(len(block) + 2 for block in blocks)
    body = elide(printable(_ascii(verdict.message.strip())), max(room, 200))
    return elide("\n".join([*facts, "", body, *_apart(blocks), *tail]), _MESSAGE)


def terminal_text(verdict: Verdict, decision: Decision, *, uri: str = "") -> str:
    """What ``firstfault show`` and ``firstfault run`` print: the same facts, the evidence, the message, the log."""
    lines = [first_line(verdict, decision), "", *_facts(verdict, decision), "", *_evidence(verdict)]
    lines += ["", printable(verdict.message.strip()), *_apart(_blocks(verdict.root))]
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
    if root.caused_by is not None:
        yield f"stopped after a failure of {_cause(root.caused_by)}"
    yield from _few((_thread_line(thread) for thread in root.thread_failures), "threads")
    yield from _memory_facts(root.resources)
    yield from _few((_collective_line(progress) for progress in root.collectives), "process groups")


def _cause(cause: CausedBy) -> str:
    if cause.rank is None:
        return cause.node or "another node"
    return f"rank {cause.rank} on {cause.node}" if cause.node else f"rank {cause.rank}"


def _thread_line(failure: ThreadFailure) -> str:
    exception = failure.exception
    text = sentence_of(exception.message)
    return f"thread {failure.thread} ended by {exception.type.rsplit('.', 1)[-1]}" + (f": {text}" if text else "")


def _collective_line(progress: CollectiveProgress) -> str:
    number = f"{progress.last_operation} #{progress.enqueued}".lstrip()
    completed = f", {progress.completed} completed" if progress.completed is not None else ""
    return f"last collective of group {progress.group}: {number}{completed}"


def _memory_facts(resources: Resources) -> Iterator[str]:
    sizes = (("peak", resources.memory_peak_bytes), ("in use", resources.memory_used_bytes))
    parts = [f"{name} {_size(size)}" for name, size in sizes if size is not None]
    if resources.memory_limit_bytes is not None:
        limit = f"limit {_size(resources.memory_limit_bytes)}"
        parts[:1] = [f"{parts[0]} of {limit}" if parts else limit]
    if resources.oom_kill is not None:
        times = "1 time" if resources.oom_kill == 1 else f"{resources.oom_kill} times"
        parts.append(f"the kernel's OOM killer struck {times}")
    if parts:
        yield f"memory: {', '.join(parts)}"


def _size(size: float) -> str:
    """Bytes for a person: "15.9 GiB"."""
    power = 0
    while size >= _UNIT and power < len(_UNITS) - 1:
        size /= _UNIT
        power += 1
    return f"{size:.{min(power, 1)}f} {_UNITS[power]}"


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


def _blocks(root: WorkerError | None) -> Iterator[str]:
    """Where the root stood, if no traceback says it, and what it printed last; each with a title, indented."""
    if root is None:
        return
    stack = _lines(_stack_of(root)) if root.exception is None or not root.exception.frames else []
    if stack:
        more = len(stack) - _STACK_LINES
        rest = [f"... {more} more lines"] if more > 0 else []
        yield "\n  ".join(["where it stood:", *stack[:_STACK_LINES], *rest])
    log = _lines(root.log_tail)
    if log:
        yield "\n  ".join(["last lines of its log:", *log[-_LOG_LINES:]])


def _stack_of(root: WorkerError) -> str:
    """The root's own stack among those of its node; empty if there is none."""
    place = root.place
    own = [dump.text for dump in root.stack_dumps if place.pid and dump.pid == place.pid]
    own += [dump.text for dump in root.stack_dumps if place.rank is not None and dump.rank == place.rank]
    return next(iter(own), "")


def _lines(text: str) -> list[str]:
    """The lines that show something. Of one that was written over, as by a progress bar, what a terminal would show."""
    lines = (printable(line.rstrip("\r").rpartition("\r")[2]).rstrip() for line in text.split("\n"))
    return [line if len(line) <= _LINE else line[: _LINE - 3] + "..." for line in lines if line]


def _apart(blocks: Iterable[str]) -> Iterator[str]:
    for block in blocks:
        yield from ("", block)


def _few(lines: Iterable[str], what: str) -> Iterator[str]:
    shown = list(lines)
    yield from shown[:_SHOWN]
    if len(shown) > _SHOWN:
        yield f"and {len(shown) - _SHOWN} more {what}"


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
