"""A report as data: answers, facts, cascade, attempts. `sections` orders them; `firstfault.render` prints them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.evidence.diagnosis import diagnose
from firstfault.layout.paths import attempt_of
from firstfault.report.answers import Case, answers_on, machine_of
from firstfault.report.attempt_changes import changes_between
from firstfault.report.cascade import cascade_of
from firstfault.report.counts import clocks_text, coverage_text, followers_text
from firstfault.report.engine_words import FLYTE, EngineWords, engine_of
from firstfault.report.facts import facts_of, identity_of, raw_facts
from firstfault.report.headline import first_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from firstfault.evidence.diagnosis import Diagnosis
    from firstfault.model import Decision, JobErrors, Verdict
    from firstfault.report.answers import Answers
    from firstfault.report.attempt_changes import AttemptSummary
    from firstfault.report.cascade import Cascade
    from firstfault.report.facts import Fact, JobIdentity


@dataclass(frozen=True, slots=True)
class Report:
    """What a report says."""

    job: JobErrors
    verdict: Verdict
    decision: Decision
    answers: Answers
    facts: tuple[Fact, ...]
    """About the root cause: rank, pod, machine, exit code, time, memory."""
    raw: tuple[Fact, ...]
    """What few people need: process ids, exact times, digests."""
    identity: JobIdentity
    cascade: Cascade
    followers: str
    """The victims and how much later they failed: "2 lost a peer, 5 stopped by their agents; ..."; empty: none."""
    clocks: str
    """How exactly times of different nodes can be compared."""
    coverage: str
    """How many nodes reported: "4 of 4"."""
    attempts: tuple[AttemptSummary, ...] = ()
    """All known attempts by number, with this one; fewer than two: there is nothing to compare."""
    changes: tuple[str, ...] = ()
    """What changed from each attempt to the next."""
    change: str = ""
    """What changed since the attempt before this one; empty: not known."""
    number: int | None = None
    """The attempt's number, from 0; None: not known."""
    uri: str = ""
    """Of the attempt's documents; empty: not known."""
    engine: EngineWords = FLYTE
    """The words for what ran the job."""

    @property
    def first_line(self) -> str:
        """The line with which every form begins, less than 90 characters."""
        return first_line(self.verdict, self.decision)


def report_of(  # noqa: PLR0913 - keywords
    job: JobErrors,
    verdict: Verdict,
    decision: Decision,
    *,
    uri: str = "",
    logs: Mapping[str, str] | None = None,
    attempts: Sequence[AttemptSummary] = (),
    diagnosis: Diagnosis | None = None,
) -> Report:
    """Return what a report on an attempt says, without credentials.

    Args:
        job: what was read.
        verdict: on it.
        decision: on the verdict.
        uri: of the attempt's documents.
        logs: local log files by node; they replace the engine's commands.
        attempts: summaries of all attempts, if there are several.
        diagnosis: of the job, from its `Conclusion`; None: it is computed.
    """
    diagnosis = diagnosis or diagnose(job)
    clocks = diagnosis.clocks
    cascade = cascade_of(job, verdict, diagnosis)
    number, engine = _number(job, uri), engine_of(job, verdict)
    ordered = tuple(sorted(attempts, key=lambda attempt: attempt.number))
    case = Case(job, verdict, decision, cascade, engine, uri, number, ordered, logs or {})
    return Report(
        job=job,
        verdict=verdict,
        decision=decision,
        answers=answers_on(case),
        facts=tuple(facts_of(verdict, cascade, engine, machine_of(job, verdict))),
        raw=tuple(raw_facts(verdict)),
        identity=identity_of(job, verdict, cascade, uri),
        cascade=cascade,
        followers=followers_text(verdict, cascade, clocks),
        clocks=clocks_text(cascade, clocks),
        coverage=coverage_text(verdict, cascade),
        attempts=ordered,
        changes=changes_between(ordered),
        change=_change(ordered, number),
        number=number,
        uri=uri,
        engine=engine,
    )


def with_attempts(report: Report, attempts: Sequence[AttemptSummary]) -> Report:
    """Return a report that is compared with the attempts before it.

    Args:
        report: on the last attempt.
        attempts: summaries of this attempt and those before it.
    """
    ordered = tuple(sorted(attempts, key=lambda attempt: attempt.number))
    return replace(report, attempts=ordered, changes=changes_between(ordered), change=_change(ordered, report.number))


def _change(attempts: Sequence[AttemptSummary], number: int | None) -> str:
    pair = [attempt for attempt in attempts if number is not None and attempt.number in {number - 1, number}]
    return next(iter(changes_between(pair)), "")


def _number(job: JobErrors, uri: str) -> int | None:
    """Return the attempt's number from the end of the output prefix or from the documents; None: neither has it."""
    found = attempt_of(uri) if uri else None
    if found is not None:
        return found[1]
    return max((place.attempt for place in job.places if place.incarnation), default=None)
