"""The parts of a report as finished texts, in the order of reading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from firstfault.exceptions.exceptions_in_text import format_place
from firstfault.exceptions.first_cause import find_own_frames
from firstfault.layout import Layout
from firstfault.model import Scope
from firstfault.report.data import Report
from firstfault.report.facts import Fact
from firstfault.report.formatting import format_ranks, shorten_list
from firstfault.report.parts.quoted_output import log_lines, message_text, stack_lines
from firstfault.report.parts.restart_lines import (
    list_stalls,
    name_restart,
    recovered_lines,
    stalls_line,
)
from firstfault.report.states import State
from firstfault.strategies.verdicts import MAX_SOURCES_PER_REASON
from firstfault.utils.text import counted, one_line

LOG_TITLE = "Last lines of its log"
STACK_TITLE = "Stack"
_PLACE_FACTS = {"Rank", "Node", "Pod", "Machine"}
_MAX_VICTIM_CHARACTERS = 160
"""Characters of the line about a victim."""
_MAX_VICTIMS = 8
"""Maximum number of listed victims; further ones are counted."""


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
    """What a person asks first: Cause, Where, Retry, Next, Unknown, Attempts."""
    facts: tuple[Fact, ...]
    """Facts about the root cause that the answers don't contain."""
    commands: Section
    changes: Section
    """What changed from each attempt to the next."""
    code: Section
    """The program's own frames."""
    stack: Section
    """The stack of a root cause without a traceback."""
    message: Section
    """Its text; for a hang without the stack at its end."""
    log: Section
    details: tuple[Fact, ...]
    """Job, progress, victims, restarts, stalls,
    and what is unusual about the nodes and their clocks.
    """
    evidence: Section
    suspects: Section
    attempts: Section
    recovered: Section
    documents: Section
    raw: Section


def build_sections(report: Report) -> Sections:
    """Return the parts of a report."""
    verdict, root = report.verdict, report.verdict.root
    frames = (
        find_own_frames(root.exception) if root is not None and root.exception is not None else ()
    )
    message = message_text(verdict)
    what = report.answers.what
    message = "" if message in what or repeats_cause(message, what) else message
    # one attempt has nothing to be compared with
    attempts = [attempt.line for attempt in report.attempts] if len(report.attempts) > 1 else []
    documents = [Layout.of(report.uri).errors_uri()] if report.uri else []
    suspects = (f"{suspect.name}: {suspect.why}" for suspect in verdict.suspects)
    reasons = (
        report.engine.cited(why, names, MAX_SOURCES_PER_REASON)
        for why, names in verdict.reasons
        if not repeats_cause(why, what)
    )
    message_title = "Traceback" if "Traceback (most recent call last)" in message else "Message"
    code = (f"{format_place(at)}: {at.code}" if at.code else format_place(at) for at in frames)
    return Sections(
        answers=tuple(_list_answers(report)),
        facts=tuple(fact for fact in report.facts if fact.name not in _PLACE_FACTS),
        commands=Section(
            "Commands", tuple(step.command for step in report.answers.steps if step.command)
        ),
        changes=Section("Attempts", report.changes),
        code=Section("In your code", tuple(code)),
        stack=Section(STACK_TITLE, tuple(stack_lines(root)) if root is not None else ()),
        message=Section(message_title, tuple(message.split("\n")) if message else ()),
        log=Section(LOG_TITLE, tuple(log_lines(root)) if root is not None else ()),
        details=tuple(_list_details(report)),
        evidence=Section("Why", tuple(reasons)),
        suspects=Section("Suspects", tuple(suspects)),
        attempts=Section("Attempts side by side", tuple(attempts)),
        recovered=Section(
            "Recovered by restarts within this attempt", tuple(recovered_lines(report.job))
        ),
        documents=Section("Documents", tuple(documents)),
        raw=Section("Raw values", tuple(fact.line for fact in report.raw)),
    )


def _list_answers(report: Report) -> Iterator[Fact]:
    answers = report.answers
    yield Fact("Cause", answers.what, (answers.fault,))
    yield Fact("Where", answers.place)
    yield Fact("Retry", f"{answers.retry}: {answers.retry_reason}")
    # the place is in the row above
    yield from (
        Fact("Next", step.text.removesuffix(f": {answers.code}")) for step in answers.steps[:1]
    )
    yield from (Fact("Unknown", sentence) for sentence in answers.unknown)
    if report.change:
        yield Fact("Attempts", report.change)


def repeats_cause(sentence: str, cause: str) -> bool:
    """Whether a sentence about a process only repeats the cause, as for a hang."""
    text = sentence.partition(": ")[2]
    detail = cause.partition(": ")[2]
    return bool(text) and text.removeprefix("it ") == detail.removeprefix("rank ").partition(" ")[2]


def _list_details(report: Report) -> Iterator[Fact]:
    verdict = report.verdict
    if job := report.identity.parts(report.engine):
        yield Fact("Job", ", ".join(job))
    if report.identity.trained:
        yield Fact("Progress", report.identity.trained)
    yield from _list_victims(report)
    if before := [record for record in report.job.restarts if record.restart]:
        faults = tuple(f"{name_restart(record)}: {record.headline}" for record in before)
        yield Fact(
            "Restarts", counted(len(before), "restart"), tuple(shorten_list(faults, _MAX_VICTIMS))
        )
    if stalls := list_stalls(report.job):
        ended_ns = verdict.timestamp_ns if report.job.last_stall is not None else None
        yield Fact("Stalls", stalls_line(stalls, ended_ns))
    # that all nodes reported, and use one clock, is the normal case and needs no row
    if not report.has_reported:
        yield Fact(report.engine.nodes.capitalize(), report.coverage)
    if report.clocks:
        yield Fact("Clocks", report.clocks)


def _list_victims(report: Report) -> Iterator[Fact]:
    """Yield the victims, and the ranks that failed too and may be the root cause."""
    victims = report.verdict.victims
    if report.verdict.scope is Scope.UNDETERMINED:
        if victims.count:
            yield _build_list_fact("Failed", str(victims.count), victims.by_rank, victims.count)
        return
    states = {item.rank: item.state for item in report.cascade.ranks}
    # The verdict's victims may include ranks that the cascade shows as suspects or unclear: these
    # are listed as "Failed too". Stopped ranks are only counted: their agents stopped all of them
    # for the same reason.
    after = [item for item in victims.by_rank if states.get(item[0]) is State.VICTIM]
    if report.followers:
        count = report.cascade.count(State.VICTIM) if report.cascade.events else victims.count
        names = {item.rank: [ref.name for ref in item.documents] for item in report.job.failures}
        after = [
            (rank, report.engine.cited(one_line(line, 100), names.get(rank, ())))
            for rank, line in after
        ]
        yield _build_list_fact("Victims", report.followers, after, max(count, len(after)))
    besides = [
        item for item in victims.by_rank if states.get(item[0]) in {State.SUSPECT, State.UNCLEAR}
    ]
    if besides:
        yield _build_list_fact(
            "Failed too",
            format_ranks([rank for rank, _ in besides], 60),
            besides,
            len(besides),
        )


def _build_list_fact(name: str, text: str, victims: Sequence[tuple[int, str]], count: int) -> Fact:
    lines = [
        f"rank {rank}: {one_line(line, _MAX_VICTIM_CHARACTERS)}"
        for rank, line in victims[:_MAX_VICTIMS]
    ]
    lines += [f"and {count - len(lines)} more"] if lines and count > len(lines) else []
    return Fact(name, text, tuple(lines))
