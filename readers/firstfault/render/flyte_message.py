"""A report as plain text: the message that Flyte shows.

ASCII, one fact a line, no columns: Flyte's panel is about 40 characters wide, its lists show the beginning of the first
line, and Flyte cuts a long text in its middle.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from firstfault.exceptions.first_cause import own_frames
from firstfault.exceptions.stack_position import readable_stack
from firstfault.exceptions.tracebacks import place_of
from firstfault.model import RestartKind, Scope
from firstfault.render.first_line import first_line
from firstfault.report.headline import line_of
from firstfault.report.words import State, counted, ranks_text
from firstfault.strategies import who
from firstfault.text import elide, one_line, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from firstfault.model import JobErrors, RestartRecord, Verdict, WorkerError
    from firstfault.report.data import Report

__all__ = [
    "MESSAGE_TITLE",
    "fact_lines",
    "flyte_message",
    "indented",
    "log_lines",
    "recovered_lines",
    "restart_line",
    "said",
    "stack_lines",
]

MESSAGE_TITLE = "message:"
"""Stands above the root cause's text, whose lines are indented."""
_MESSAGE = 16_000
"""Characters; Flyte keeps the first and last 50 KB of a text."""
_SHOWN = 8
"""Listed victims, notes and sentences; the others are counted."""
_FACT = 300
_STACK_LINES = 30
_RECOVERED = 20
_LOG_LINES = 20
_FRAMES = 12
_LINE = 200


def flyte_message(report: Report) -> str:
    """Return the text that Flyte shows for a failed attempt: below 16 KB, with its first line repeated at the end."""
    verdict, root = report.verdict, report.verdict.root
    line = first_line(verdict, report.decision)
    tail = ["", *_last(report), "", line]
    facts = [line, "", *(_bounded(fact) for fact in _shown(_answers(report))), *_own_code(root)]
    details = ["", *(_bounded(fact) for fact in _shown(_details(report)))]
    room = _MESSAGE - sum(len(part) + 1 for part in [*facts, *details, *tail]) - 2
    blocks = [_block(title, "\n".join(lines), max(room // 3, 200)) for title, lines in _blocks(verdict)]
    room -= sum(len(block) + 2 for block in blocks)
    body = [_block(MESSAGE_TITLE, text, max(room, 200))] if (text := said(verdict)) else []
    return _both_ends("\n".join([*facts, *_apart([*body, *blocks]), *details, *tail]))


def fact_lines(report: Report) -> list[str]:
    """Return the facts, one a line: what, retry, where, when, what to do, what is not known, the job, victims, nodes.

    Control characters and line breaks in quoted documents are removed.
    """
    return _shown(itertools.chain(_answers(report), _details(report)))


def _shown(lines: Iterable[str]) -> list[str]:
    return [printable(line).replace("\n", " ").replace("\t", " ") for line in lines]


def said(verdict: Verdict) -> str:
    """Return the verdict's text; for a hang without the stack at its end, which `stack_lines` returns.

    The text of an attempt of which nothing could be read is its notes, which every form shows elsewhere.
    """
    text = verdict.message.strip()
    if verdict.root is None and text == "\n".join(verdict.coverage.notes):
        return "no error document could be read"
    own = _own_stack(verdict.root).strip() if verdict.root is not None else ""
    return text.removesuffix(own).rstrip() if own else text


def indented(text: str) -> str:
    """Return a quoted text with every line indented, so that none of them looks like an answer of the report."""
    return "\n".join(f"  {line}" if line.strip() else "" for line in text.split("\n"))


def stack_lines(root: WorkerError) -> list[str]:
    """Return the root cause's stack when it was stopped, as a person reads it; empty if it has a traceback."""
    if root.exception is not None and root.exception.frames:
        return []
    return _lines(readable_stack(_own_stack(root)))


def _own_stack(root: WorkerError) -> str:
    place = root.place
    own = [dump.text for dump in root.stack_dumps if place.pid and dump.pid == place.pid]
    own += [dump.text for dump in root.stack_dumps if place.rank is not None and dump.rank == place.rank]
    return next(iter(own), "")


def log_lines(root: WorkerError) -> list[str]:
    """Return the root cause's last stderr lines, as a terminal would show them."""
    return _lines(root.log_tail)


def recovered_lines(job: JobErrors, limit: int = _RECOVERED) -> list[str]:
    """Return the first `limit` failures that the job recovered from, one a line, and how many more there are.

    A round with a record of its restart has one line, about its root cause.
    """
    recorded = {record.number for record in job.restarts if record.kind is RestartKind.ROUND}
    restarts = [record for record in job.restarts if record.restart]
    others = [failure for failure in job.history if failure.place.round not in recorded]
    lines = [restart_line(record) for record in restarts[:limit]]
    lines += [f"round {item.place.round}: {who(item)}: {line_of(item)}" for item in others[: limit - len(lines)]]
    more = len(restarts) + len(others) - limit
    return [*lines, f"and {more} more"] if more > 0 else lines


def restart_line(record: RestartRecord) -> str:
    """Return what failed before a restart, why the workers were restarted, and how long that took."""
    took = f"; {record.lost_seconds:.0f} s until the workers ran again" if record.lost_seconds is not None else ""
    sizes = (record.world_size_before, record.world_size_after)
    resized = f"; {sizes[1]} ranks instead of {sizes[0]}" if None not in sizes and sizes[0] != sizes[1] else ""
    return one_line(f"{_restarted(record)}: {record.headline}: restarted, {record.reason}{took}{resized}", _FACT)


def _restarted(record: RestartRecord) -> str:
    return f"{'round' if record.kind is RestartKind.ROUND else 'in-process restart'} {record.number}"


# --- facts ----------------------------------------------------------------------------------------------------------


def _answers(report: Report) -> Iterator[str]:
    verdict, decision, answers = report.verdict, report.decision, report.answers
    yield f"root cause: {verdict.headline}"
    yield f"retry: {'no' if decision.is_spent or not decision.retry else 'yes'}, {decision.reason}"
    if not decision.enforced or not report.engine.enforcer:
        yield ": ".join(report.engine.enforced(decision))
    yield f"fault: {answers.fault_owner.value}"
    if verdict.node and not any(fact.name == report.engine.node for fact in report.facts):
        yield f"{report.engine.node}: {verdict.node}"
    yield from (f"{fact.name}: {fact.value}" for fact in report.facts)
    if answers.code:
        yield f"code: {answers.code}"
    if answers.steps:
        yield f"next: {answers.steps[0].text}"
    yield from _first_of("unknown", answers.unknown)
    if report.change:
        yield f"since the previous attempt: {report.change}"


def _details(report: Report) -> Iterator[str]:
    """Yield what fewer people need: the job, victims, coverage, category, confidence."""
    verdict = report.verdict
    if job := report.identity.parts(report.engine):
        yield f"job: {'; '.join(job)}"
    yield from _victims(report)
    if before := [record for record in report.job.restarts if record.restart]:
        faults = "; ".join(f"{_restarted(record)}: {record.headline}" for record in before)
        yield f"restarted {counted(len(before), 'time')} before: {faults}"
    yield f"{report.engine.nodes} reported: {report.coverage}"
    if report.clocks:
        yield f"clocks: {report.clocks}"
    yield f"category: {verdict.category}"
    yield f"confidence: {verdict.confidence} (strategy {verdict.strategy})"


def _victims(report: Report) -> Iterator[str]:
    """Yield the victims, and the ranks that failed too and may be the root cause."""
    victims = report.verdict.victims
    if report.verdict.scope is Scope.UNDETERMINED:
        yield from _listed("failed", str(victims.count), victims.by_rank, victims.count) if victims.count else ()
        return
    follows = {State.VICTIM, State.STOPPED}
    states = {item.rank: item.state for item in report.cascade.ranks}
    after = [item for item in victims.by_rank if states.get(item[0]) in follows]
    if report.followers:
        count = sum(state in follows for state in states.values()) if report.cascade.events else victims.count
        yield from _listed("victims", report.followers, after, max(count, len(after)))
    besides = [item for item in victims.by_rank if states.get(item[0]) in {State.SUSPECT, State.UNCLEAR}]
    if besides:
        yield from _listed("failed too", ranks_text([rank for rank, _ in besides], 60), besides, len(besides))


def _listed(name: str, text: str, lines: Sequence[tuple[int, str]], count: int) -> Iterator[str]:
    yield f"{name}: {text}"
    shown = lines[:_SHOWN]
    yield from (f"  rank {rank}: {one_line(line, 100)}" for rank, line in shown)
    if shown and count > len(shown):
        yield f"  and {count - len(shown)} more"


def _own_code(root: WorkerError | None) -> Iterator[str]:
    frames = own_frames(root.exception) if root is not None and root.exception is not None else ()
    if not frames:
        return
    yield from ("", "in your code:")
    if len(frames) > _FRAMES:
        yield f"  ... {len(frames) - _FRAMES} more frames"
    for frame in frames[-_FRAMES:]:
        yield "  " + _bounded(f"{place_of(frame)}: {frame.code}" if frame.code else place_of(frame), _LINE)


def _blocks(verdict: Verdict) -> Iterator[tuple[str, list[str]]]:
    """Yield the root cause's stack and its last log lines, each with its title."""
    root = verdict.root
    if root is None:
        return
    stack = stack_lines(root)
    if stack:
        more = len(stack) - _STACK_LINES
        rest = [f"... {more} more lines"] if more > 0 else []
        yield "where it stood:", [*stack[:_STACK_LINES], *rest]
    log = log_lines(root)
    if log:
        yield "last lines of its log:", log[-_LOG_LINES:]


def _block(title: str, text: str, limit: int) -> str:
    """Return a quoted text below its title, at most `limit` characters."""
    # first cut, then indented: a cut begins a line too
    text = printable(_ascii(text))
    room = limit - len(title)
    while len(shown := indented(elide(text, room))) + len(title) + 1 > limit and room:
        room = max(room - max(len(shown) + len(title) + 1 - limit, 1), 0)
    return f"{title}\n{shown}"


def _both_ends(text: str) -> str:
    """Return whole lines of both ends of a text, `_MESSAGE` characters at most."""
    if len(text) <= _MESSAGE:
        return text
    half = _MESSAGE // 2 - 50
    head, tail = text[:half].rpartition("\n")[0], text[-half:].partition("\n")[2]
    return f"{head}\n... {len(text) - len(head) - len(tail)} characters left out ...\n{tail}"


def _lines(text: str) -> list[str]:
    """Return the lines that are not empty; of a progress bar's line what is after the last carriage return."""
    lines = (printable(line.rstrip("\r").rpartition("\r")[2]).rstrip() for line in text.split("\n"))
    return [line if len(line) <= _LINE else line[: _LINE - 3] + "..." for line in lines if line]


def _apart(blocks: Iterable[str]) -> Iterator[str]:
    for block in blocks:
        yield from ("", block)


def _last(report: Report) -> Iterator[str]:
    yield from map(_bounded, _first_of("why", report.verdict.why))
    commands = [step.command for step in report.answers.steps if step.command]
    if commands:
        yield from ("", "to copy:", *(one_line(_ascii(command), 2_000) for command in commands))


def _first_of(name: str, sentences: tuple[str, ...]) -> Iterator[str]:
    yield from (f"{name}: {sentence}" for sentence in sentences[:_SHOWN])
    if len(sentences) > _SHOWN:
        yield f"{name}: and {len(sentences) - _SHOWN} more"


def _bounded(text: str, limit: int = _FACT) -> str:
    """Return one line of printable ASCII, without the middle of a long text."""
    line = printable(_ascii(text)).replace("\n", " ").replace("\t", " ")
    return elide(line, limit).replace("\n", " ")


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii")
