"""A report as plain text: the message that Flyte shows.

ASCII, one fact a line, no columns: Flyte's panel is about 40 characters wide, its lists keep 55 characters of the
first line, and a text is cut in its middle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.model import Scope
from firstfault.report.words import explain_signal
from firstfault.text import elide, one_line, printable, sentence_of
from firstfault.tracebacks import own_frames, place_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from firstfault.model import Decision, Verdict, WorkerError
    from firstfault.report.content import Report

__all__ = ["ascii_line", "fact_lines", "first_line", "flyte_message", "log_lines", "stack_lines"]

_LIST_WIDTH = 55
_FIRST_LINE = 89
_MESSAGE = 16_000
"""Characters; Flyte keeps the first and last 50 KB of a text."""
_SHOWN = 8
"""Victims, notes and sentences that are listed; the rest is counted."""
_FACT = 300
_STACK_LINES = 30
_LOG_LINES = 20
_FRAMES = 12
_LINE = 200
_NODE_TAIL = 10
"""Characters of the node's name that the answer has room for, however long the rest is."""


def first_line(verdict: Verdict, decision: Decision) -> str:
    """One line of less than 90 characters whose first 55 say what, which rank, which node, and retry or not."""
    root = verdict.root
    # a rank that hung was stopped in the end, which is not what went wrong
    is_itself = root is not None and not root.stopped_by_agent
    what = root.what if root is not None and is_itself else verdict.headline.split(":", 1)[0].split(",", 1)[0]
    fate = "retry" if decision.retry else "no retry"
    subject = _subject(verdict)
    node = _spaced(verdict.node or "")
    what = one_line(_spaced(what), _LIST_WIDTH - len(subject) - min(len(node), _NODE_TAIL) - len(fate) - 3)
    answer = " ".join(part for part in (what if what != subject else "", subject) if part)
    node = _fit_node(node, _LIST_WIDTH - len(answer) - len(fate) - 2)
    answer = " ".join(part for part in (answer, node, fate) if part)
    detail = one_line(_spaced(_detail(verdict)), max(_FIRST_LINE - len(answer) - 2, 0))
    return f"{answer}: {detail}" if detail else answer


def flyte_message(report: Report) -> str:
    """The text that Flyte shows for a failed attempt, under 16 KB; its first line stands again at its end."""
    verdict, root = report.verdict, report.verdict.root
    line = first_line(verdict, report.decision)
    tail = ["", *_last(report), "", line]
    facts = [line, "", *fact_lines(report), *_own_code(root)]
    room = _MESSAGE - sum(len(part) + 1 for part in [*facts, *tail]) - 2
    blocks = [elide(_ascii(block), max(room // 3, 200)) for block in _blocks(verdict)]
    room -= sum(len(block) + 2 for block in blocks)
    body = elide(printable(_ascii(verdict.message.strip())), max(room, 200))
    return elide("\n".join([*facts, "", body, *_apart(blocks), *tail]), _MESSAGE)


def fact_lines(report: Report) -> list[str]:
    """Return what is known, one fact a line: what, retry, where, when, who followed, who was heard, what to do."""
    return [ascii_line(line, _FACT) for line in _facts(report)]


def ascii_line(text: str, limit: int) -> str:
    """One line of ASCII, bounded, that steers no terminal: it may quote a document that somebody else wrote."""
    return elide(printable(_ascii(text)).replace("\n", " ").replace("\t", " "), limit).replace("\n", " ")


def stack_lines(root: WorkerError) -> list[str]:
    """Return where the root stood, if no traceback says it; from its own stack among those of its node."""
    if root.exception is not None and root.exception.frames:
        return []
    place = root.place
    own = [dump.text for dump in root.stack_dumps if place.pid and dump.pid == place.pid]
    own += [dump.text for dump in root.stack_dumps if place.rank is not None and dump.rank == place.rank]
    return _lines(own[0]) if own else []


def log_lines(root: WorkerError) -> list[str]:
    """Return what the root printed last, as a terminal would show it."""
    return _lines(root.log_tail)


# --- facts ----------------------------------------------------------------------------------------------------------


def _facts(report: Report) -> Iterator[str]:
    verdict, decision, answers = report.verdict, report.decision, report.answers
    yield f"root cause: {verdict.headline}"
    yield f"retry: {'yes' if decision.retry else 'no'}, {decision.reason}"
    yield f"enforced by Flyte: {'yes' if decision.enforced else 'no, this is advice'}"
    yield f"fault: {answers.blame.value}"
    yield f"category: {verdict.category}"
    if verdict.node and not any(fact.name == "node" for fact in report.facts):
        yield f"node: {verdict.node}"
    yield from (f"{fact.name}: {fact.value}" for fact in report.facts)
    if answers.code:
        yield f"code: {answers.code}"
    yield from _victims(report)
    yield f"nodes heard: {report.coverage}"
    if report.clocks:
        yield f"clocks: {report.clocks}"
    yield f"confidence: {verdict.confidence}, by the strategy {verdict.strategy}"
    yield from _first_of("unknown", answers.unknown)
    if answers.steps:
        yield f"next: {answers.steps[0].text}"
    if report.changes:
        yield f"since the attempt before: {report.changes[-1]}"


def _victims(report: Report) -> Iterator[str]:
    victims = report.verdict.victims
    if not victims.count:
        return
    name = "failed" if report.verdict.scope is Scope.UNDETERMINED else "victims"
    yield f"{name}: {report.followers or victims.count}"
    shown = victims.by_rank[:_SHOWN]
    for rank, line in shown:
        yield f"  rank {rank}: {one_line(line, 100)}"
    if shown and victims.count > len(shown):
        yield f"  and {victims.count - len(shown)} more"


def _own_code(root: WorkerError | None) -> Iterator[str]:
    frames = own_frames(root.exception) if root is not None and root.exception is not None else ()
    if not frames:
        return
    yield from ("", "in your code:")
    if len(frames) > _FRAMES:
        yield f"  ... {len(frames) - _FRAMES} more frames"
    for frame in frames[-_FRAMES:]:
        yield "  " + ascii_line(f"{place_of(frame)}: {frame.code}" if frame.code else place_of(frame), _LINE)


def _blocks(verdict: Verdict) -> Iterator[str]:
    """Where the root stood, and what it printed last; each with a title, indented."""
    root = verdict.root
    if root is None:
        return
    stack = stack_lines(root)
    # of a rank that hung the verdict's own text has it
    if stack and stack[-1].strip() not in verdict.message:
        more = len(stack) - _STACK_LINES
        rest = [f"... {more} more lines"] if more > 0 else []
        yield "\n  ".join(["where it stood:", *stack[:_STACK_LINES], *rest])
    log = log_lines(root)
    if log:
        yield "\n  ".join(["last lines of its log:", *log[-_LOG_LINES:]])


def _lines(text: str) -> list[str]:
    """The lines that show something. Of one that was written over, as by a progress bar, what a terminal would show."""
    lines = (printable(line.rstrip("\r").rpartition("\r")[2]).rstrip() for line in text.split("\n"))
    return [line if len(line) <= _LINE else line[: _LINE - 3] + "..." for line in lines if line]


def _apart(blocks: Iterable[str]) -> Iterator[str]:
    for block in blocks:
        yield from ("", block)


def _last(report: Report) -> Iterator[str]:
    yield from (ascii_line(line, _FACT) for line in _first_of("why", report.verdict.why))
    commands = [step.command for step in report.answers.steps if step.command]
    if commands:
        yield from ("", "to copy:", *(one_line(_ascii(command), 2_000) for command in commands))


def _first_of(name: str, sentences: tuple[str, ...]) -> Iterator[str]:
    yield from (f"{name}: {sentence}" for sentence in sentences[:_SHOWN])
    if len(sentences) > _SHOWN:
        yield f"{name}: and {len(sentences) - _SHOWN} more"


# --- the first line -------------------------------------------------------------------------------------------------


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
    if root is not None and root.signal and not root.sent_signals:
        explained = explain_signal(root.signal, root.resources)
        if explained:
            # who did it says more than that somebody did
            return explained.rpartition("; ")[2] if root.resources.oom_kill else explained.partition("; ")[0]
    _, found, text = verdict.headline.partition(": ")
    return text if found else ""


def _fit_node(node: str, room: int) -> str:
    """A node's name in at most `room` characters; its end tells pods apart, so the beginning goes first."""
    if len(node) <= room:
        return node
    return ".." + node[-(room - 2) :] if room > 4 else ""  # noqa: PLR2004 - less tells nothing


def _spaced(text: str) -> str:
    """One line of printable ASCII, its words one space apart."""
    return " ".join(printable(_ascii(text)).split())


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii")
