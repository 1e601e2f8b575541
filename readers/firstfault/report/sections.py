"""A report's parts as finished texts, in the order in which a person reads them: printers only lay them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.exceptions.first_cause import own_frames
from firstfault.exceptions.stack_position import readable_stack
from firstfault.exceptions.tracebacks import place_of
from firstfault.layout import Layout
from firstfault.model import RestartKind, Scope
from firstfault.report.facts import Fact
from firstfault.report.headline import line_of
from firstfault.report.words import State, counted, few, is_retried, ranks_text
from firstfault.strategies import who
from firstfault.text import one_line, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from firstfault.model import JobErrors, RestartRecord, Verdict, WorkerError
    from firstfault.report.data import Report

LOG_TITLE = "Last lines of its log"
STACK_TITLE = "Where it stood"
_FACT = 300
_LINE = 200
_RECOVERED = 20
_SUSPECTS = 5
_SHOWN = 8
"""Victims that are listed; the others are counted."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part with a title; it has no lines if there is nothing to show."""

    title: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(self.lines)


@dataclass(frozen=True, slots=True)
class Sections:
    """The parts, in this order."""

    answers: tuple[Fact, ...]
    """What a person asks first: root cause, retry, whose fault, where, when, what to do, what is not known."""
    commands: Section
    changes: Section
    """What changed from each attempt to the next."""
    code: Section
    """The program's own frames."""
    stack: Section
    """Of a root cause without a traceback."""
    message: Section
    """Its text; for a hang without the stack at its end."""
    log: Section
    details: tuple[Fact, ...]
    """What fewer people need: the job, victims, coverage, category, confidence."""
    evidence: Section
    suspects: Section
    attempts: Section
    recovered: Section
    documents: Section
    raw: Section


def sections_of(report: Report) -> Sections:
    """Return the parts of a report."""
    verdict, root = report.verdict, report.verdict.root
    frames = own_frames(root.exception) if root is not None and root.exception is not None else ()
    has_traceback = root is not None and root.exception is not None and bool(root.exception.frames)
    message = message_text(verdict)
    attempts = [attempt.line for attempt in report.attempts] if len(report.attempts) > 1 else []
    documents = [Layout.of(report.uri).errors_uri()] if report.uri else []
    suspects = (f"{suspect.name}, {suspect.why}" for suspect in verdict.suspects)
    return Sections(
        answers=tuple(_answers(report)),
        commands=Section("To copy", tuple(step.command for step in report.answers.steps if step.command)),
        changes=Section("Attempts", report.changes),
        code=Section("In your code", tuple(f"{place_of(at)}: {at.code}" if at.code else place_of(at) for at in frames)),
        stack=Section(STACK_TITLE, tuple(stack_lines(root)) if root is not None else ()),
        message=Section("Traceback" if has_traceback else "Message", tuple(message.split("\n")) if message else ()),
        log=Section(LOG_TITLE, tuple(log_lines(root)) if root is not None else ()),
        details=tuple(_details(report)),
        evidence=Section("Evidence", verdict.why),
        suspects=Section("Suspects", tuple(suspects)),
        attempts=Section("Attempts side by side", tuple(attempts)),
        recovered=Section("Recovered from, by restarts within this attempt", tuple(recovered_lines(report.job))),
        documents=Section("Documents", tuple(documents)),
        raw=Section("Raw values", tuple(fact.line for fact in report.raw)),
    )


# --- facts ----------------------------------------------------------------------------------------------------------


def _answers(report: Report) -> Iterator[Fact]:
    verdict, decision, answers = report.verdict, report.decision, report.answers
    yield Fact("root cause", verdict.headline)
    yield Fact("retry", f"{'yes' if is_retried(decision) else 'no'}, {decision.reason}")
    if not decision.enforced or not report.engine.enforcer:
        yield Fact(*report.engine.enforced(decision))
    yield Fact("fault", answers.fault_owner.value)
    if verdict.node and not any(fact.name == report.engine.node for fact in report.facts):
        yield Fact(report.engine.node, verdict.node)
    yield from report.facts
    if answers.code:
        yield Fact("code", answers.code)
    if answers.steps:
        yield Fact("next", answers.steps[0].text)
    yield from (Fact("unknown", sentence) for sentence in answers.unknown)
    if report.change:
        yield Fact("since the previous attempt", report.change)


def _details(report: Report) -> Iterator[Fact]:
    verdict = report.verdict
    if job := report.identity.parts(report.engine):
        yield Fact("job", "; ".join(job))
    yield from _victims(report)
    if before := [record for record in report.job.restarts if record.restart]:
        faults = "; ".join(f"{_restarted(record)}: {record.headline}" for record in before)
        yield Fact(f"restarted {counted(len(before), 'time')} before", faults)
    yield Fact(f"{report.engine.nodes} reported", report.coverage)
    if report.clocks:
        yield Fact("clocks", report.clocks)
    yield Fact("category", verdict.category)
    yield Fact("confidence", f"{verdict.confidence} (strategy {verdict.strategy})")


def _victims(report: Report) -> Iterator[Fact]:
    """Yield the victims, and the ranks that failed too and may be the root cause."""
    victims = report.verdict.victims
    if report.verdict.scope is Scope.UNDETERMINED:
        yield from [_listed("failed", str(victims.count), victims.by_rank, victims.count)] if victims.count else ()
        return
    follows = {State.VICTIM, State.STOPPED}
    states = {item.rank: item.state for item in report.cascade.ranks}
    after = [item for item in victims.by_rank if states.get(item[0]) in follows]
    if report.followers:
        count = sum(state in follows for state in states.values()) if report.cascade.events else victims.count
        yield _listed("victims", report.followers, after, max(count, len(after)))
    besides = [item for item in victims.by_rank if states.get(item[0]) in {State.SUSPECT, State.UNCLEAR}]
    if besides:
        yield _listed("failed too", ranks_text([rank for rank, _ in besides], 60), besides, len(besides))


def _listed(name: str, text: str, victims: Sequence[tuple[int, str]], count: int) -> Fact:
    lines = [f"rank {rank}: {one_line(line, 100)}" for rank, line in victims[:_SHOWN]]
    lines += [f"and {count - len(lines)} more"] if lines and count > len(lines) else []
    return Fact(name, text, tuple(lines))


# --- what is quoted -------------------------------------------------------------------------------------------------


def message_text(verdict: Verdict) -> str:
    """Return the verdict's text; for a hang without the stack at its end, which `stack_lines` returns.

    The text of an attempt of which nothing could be read is its notes, which every form shows elsewhere.
    """
    text = verdict.message.strip()
    if verdict.root is None and text == "\n".join(verdict.coverage.notes):
        return "no error document could be read"
    own = _own_stack(verdict.root).strip() if verdict.root is not None else ""
    return text.removesuffix(own).rstrip() if own else text


def stack_lines(failure: WorkerError) -> list[str]:
    """Return a process's stack when it was stopped, as a person reads it; empty if it has a traceback."""
    if failure.exception is not None and failure.exception.frames:
        return []
    return _lines(readable_stack(_own_stack(failure)))


def _own_stack(failure: WorkerError) -> str:
    place = failure.place
    own = [dump.text for dump in failure.stack_dumps if place.pid and dump.pid == place.pid]
    own += [dump.text for dump in failure.stack_dumps if place.rank is not None and dump.rank == place.rank]
    return next(iter(own), "")


def log_lines(failure: WorkerError) -> list[str]:
    """Return a process's last stderr lines, as a terminal would show them."""
    return _lines(failure.log_tail)


def _lines(text: str) -> list[str]:
    """Return the lines that are not empty; of a progress bar's line what is after the last carriage return."""
    lines = (printable(line.rstrip("\r").rpartition("\r")[2]).rstrip() for line in text.split("\n"))
    return [line if len(line) <= _LINE else line[: _LINE - 3] + "..." for line in lines if line]


def quoted_failures(report: Report) -> list[WorkerError]:
    """Return the failures whose stack and log are shown: the root cause; if undetermined, a few that may be it."""
    root = report.verdict.root
    if root is not None or report.verdict.scope is not Scope.UNDETERMINED:
        return [root] if root is not None else []
    mays = {State.SUSPECT, State.UNCLEAR}
    return [event.failure for event in report.cascade.events if event.state in mays][:_SUSPECTS]


# --- restarts -------------------------------------------------------------------------------------------------------


def recovered_lines(job: JobErrors, limit: int = _RECOVERED) -> list[str]:
    """Return the first `limit` failures that the job recovered from, one a line, and how many more there are.

    A round with a record of its restart has one line, about its root cause.
    """
    recorded = {record.number for record in job.restarts if record.kind is RestartKind.ROUND}
    lines = [restart_line(record) for record in job.restarts if record.restart]
    others = (failure for failure in job.history if failure.place.round not in recorded)
    lines += [f"round {item.place.round}: {who(item)}: {line_of(item)}" for item in others]
    return few(lines, limit)


def restart_line(record: RestartRecord) -> str:
    """Return what failed before a restart, why the workers were restarted, and how long that took."""
    took = f"; {record.lost_seconds:.0f} s until the workers ran again" if record.lost_seconds is not None else ""
    sizes = (record.world_size_before, record.world_size_after)
    resized = f"; {sizes[1]} ranks instead of {sizes[0]}" if None not in sizes and sizes[0] != sizes[1] else ""
    return one_line(f"{_restarted(record)}: {record.headline}: restarted, {record.reason}{took}{resized}", _FACT)


def _restarted(record: RestartRecord) -> str:
    return f"{'round' if record.kind is RestartKind.ROUND else 'in-process restart'} {record.number}"
