"""What firstfault concludes, as the first parts of a brief."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from firstfault.model import Outcome
from firstfault.render.markdown import escape
from firstfault.report.data import Report
from firstfault.report.formatting import format_ranks, shorten_list
from firstfault.report.parts.restart_lines import restart_line
from firstfault.report.parts.sections import build_sections
from firstfault.utils.text import one_line

_MAX_GROUPS, _MAX_REASONS, _MAX_STEPS, _MAX_UNKNOWN_POINTS = 10, 5, 2, 8
_MAX_LINE_CHARS = 260
_FIELDS = {"Cause", "Unknown", "Next", "Attempts"}
"""Answers that a brief shows elsewhere, or in its own words."""


@dataclass(frozen=True, slots=True)
class NoFailure:
    """An attempt in which firstfault found no failure."""

    uri: str
    outcome: Outcome
    why: str
    """What proves the outcome, or why it's unknown."""
    restarts: tuple[str, ...] = field(default=())
    """What failed before, one restart a line."""


Subject = Report | NoFailure


def title(subject: Subject) -> str:
    """Return the first line of a brief."""
    outcome = subject.outcome.value.capitalize()
    if isinstance(subject, Report):
        return f"# {outcome}: {escape(one_line(subject.answers.what, 200))}"
    is_unknown = subject.outcome is Outcome.UNKNOWN
    return f"# {outcome}" + (": no failure found, and no proof of success" if is_unknown else "")


def conclude(subject: Subject) -> Iterator[str]:
    """Yield list items: the cause, how sure it is, where, whether to retry, and why."""
    if isinstance(subject, NoFailure):
        yield _item("Read from", subject.uri)
        yield _item("Why", subject.why)
        yield from (_item("Restarted after", line) for line in subject.restarts[:_MAX_GROUPS])
        return
    answers, verdict = subject.answers, subject.verdict
    yield _item("Confidence", f"{answers.confidence}; rule {verdict.rule or verdict.strategy}")
    yield _item("Category", f"{answers.category}; {answers.fault_owner.value}")
    parts = build_sections(subject)
    yield from (_item(fact.name, fact.value) for fact in parts.answers if fact.name not in _FIELDS)
    yield from (_item("Next", step.text) for step in answers.steps[:_MAX_STEPS])
    yield from (_item("Why", line) for line in shorten_list(parts.evidence.lines, _MAX_REASONS))
    yield from (_item("Suspect", line) for line in shorten_list(parts.suspects.lines, _MAX_REASONS))
    yield from (_item(fact.name, fact.value) for fact in parts.facts)
    yield from (_item(fact.name, fact.value) for fact in parts.details if fact.name != "Victims")
    yield from (
        _item("Restarted after", restart_line(one)) for one in subject.job.restarts if one.restart
    )
    if subject.uri:
        yield _item("Read from", subject.uri)


def list_groups(subject: Subject) -> Iterator[str]:
    """Yield an item for each group of processes with the same failure and state."""
    groups = subject.cascade.groups if isinstance(subject, Report) else ()
    for group in groups[:_MAX_GROUPS]:
        who = f"ranks {format_ranks(group.ranks, 60)}" if len(group.ranks) > 1 else group.who()
        count = f" ({group.count} processes)" if group.count > 1 else ""
        names = (
            [ref.name for ref in group.first.failure.documents] if group.first is not None else []
        )
        lines = f", {', '.join(names[:2])}" if names else ""
        yield _item(group.label, f"{who}{count}{lines}: {group.description}")
    if len(groups) > _MAX_GROUPS:
        yield f"- and {len(groups) - _MAX_GROUPS} more groups"


def list_missing(subject: Subject, more: Sequence[str]) -> Iterator[str]:
    """Yield what isn't known."""
    unknown = subject.answers.unknown if isinstance(subject, Report) else ()
    yield from (
        f"- {escape(one_line(line, _MAX_LINE_CHARS))}"
        for line in shorten_list((*unknown, *more), _MAX_UNKNOWN_POINTS)
    )


def _item(name: str, value: str) -> str:
    return f"- {name}: {escape(one_line(value, _MAX_LINE_CHARS))}"
