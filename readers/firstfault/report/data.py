"""A report as data: answers, facts, cascade, and attempts.

`firstfault.report.parts` has its parts as finished texts, which `firstfault.render` only lays out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.evidence.completion import classify_outcome
from firstfault.evidence.diagnosis import Diagnosis, diagnose
from firstfault.layout import parse_attempt_number
from firstfault.model import (
    Decision,
    JobErrors,
    Outcome,
    Verdict,
    WorkerError,
)
from firstfault.report.answers import Answers, build_answers
from firstfault.report.cascade import build_cascade
from firstfault.report.cascade.sentences import clocks_text, coverage_text, followers_text
from firstfault.report.case import Case
from firstfault.report.engine_words import FLYTE, EngineWords, find_engine_words
from firstfault.report.facts import Fact, list_facts, list_raw_facts
from firstfault.report.first_line import first_line
from firstfault.report.formatting import format_ranks
from firstfault.report.job_identity import JobIdentity, identify_job

if TYPE_CHECKING:
    from firstfault.conclude import Conclusion

_MAX_RANKS_CHARACTERS = 40
"""Characters of a list of ranks."""


@dataclass(frozen=True, slots=True)
class AttemptSummary:
    """One attempt in short."""

    number: int
    outcome: Outcome
    verdict: Verdict | None = None
    """None if it didn't fail or this isn't known."""
    decision: Decision | None = None
    note: str = ""
    """Why nothing is known."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes that took part; empty if unknown."""
    seconds: float | None = None
    """How long it took; None if unknown."""
    engine: EngineWords = FLYTE
    """The words for what ran it."""

    @property
    def summary(self) -> str:
        """How it ended, in a line."""
        return (
            self.verdict.headline if self.verdict is not None else self.note or self.outcome.value
        )

    @property
    def line(self) -> str:
        """How it ended, retry decision and duration, in a line."""
        retry = "" if self.decision is None else f", {self.engine.summarize_retry(self.decision)}"
        took = f", {self.seconds:.1f} s" if self.seconds is not None else ""
        return f"attempt {self.number}: {self.summary}{retry}{took}"


@dataclass(frozen=True, slots=True)
class Report(Case):
    """What a report contains about its case."""

    answers: Answers
    facts: tuple[Fact, ...]
    """About the root cause: rank, pod, machine, exit code, time, memory."""
    raw: tuple[Fact, ...]
    """Rarely needed values: process ids, exact times, digests."""
    identity: JobIdentity
    followers: str
    """The victims and how much later they failed, "2 lost a peer, 5 stopped by their agents; ...",
    or empty if there are none.
    """
    clocks: str
    """How exactly times of different nodes can be compared."""
    coverage: str
    """How many nodes reported: "4 of 4 reported"."""
    number: int | None
    """The attempt's number, from 0; None if unknown."""
    attempts: tuple[AttemptSummary, ...] = ()
    """All known attempts by number, with this one; fewer than two: there is nothing to compare."""

    @property
    def outcome(self) -> Outcome:
        """How the attempt ended."""
        return classify_outcome(self.verdict, self.job)

    @property
    def first_line(self) -> str:
        """The line with which every form begins, at most 78 characters."""
        return first_line(self.verdict, self.decision, self.engine)

    @property
    def has_reported(self) -> bool:
        """Whether every node reported, so that there is nothing to print about it."""
        is_plain = "," not in self.coverage and "(" not in self.coverage
        # a log has no nodes that report
        return self.engine.cites or (self.verdict.coverage.complete and is_plain)

    @property
    def changes(self) -> tuple[str, ...]:
        """What changed from each attempt to the next."""
        return changes_between(self.attempts)

    @property
    def change(self) -> str:
        """What changed since the attempt before this one; empty if unknown."""
        number = self.number
        pair = [
            attempt
            for attempt in self.attempts
            if number is not None and attempt.number in {number - 1, number}
        ]
        return next(iter(changes_between(pair)), "")


def build_report(  # noqa: PLR0913 - keywords
    job: JobErrors,
    verdict: Verdict,
    decision: Decision,
    *,
    uri: str = "",
    logs: Mapping[str, str] | None = None,
    diagnosis: Diagnosis | None = None,
) -> Report:
    """Return the report on an attempt as data, without credentials.

    The local files in `logs`, by node, replace the engine's commands. Without a diagnosis of the
    job it is computed.
    """
    diagnosis = diagnosis or diagnose(job)
    cascade = build_cascade(job, verdict, diagnosis)
    case = Case(job, verdict, decision, cascade, find_engine_words(job, verdict), uri, logs or {})
    # the number is in the output prefix or in the documents
    run_and_number = parse_attempt_number(uri) if uri else None
    numbers = (
        [run_and_number[1]]
        if run_and_number is not None
        else [place.attempt for place in job.places if place.incarnation]
    )
    return Report(
        *(job, verdict, decision, cascade, case.engine, uri, case.logs),
        answers=build_answers(case),
        facts=tuple(list_facts(case)),
        raw=tuple(list_raw_facts(verdict)),
        identity=identify_job(case),
        followers=followers_text(verdict, cascade, diagnosis.clocks),
        clocks=clocks_text(cascade, diagnosis.clocks),
        coverage=coverage_text(verdict, cascade),
        number=max(numbers, default=None),
    )


def report_conclusion(
    conclusion: Conclusion, *, uri: str, logs: Mapping[str, str] | None = None
) -> Report:
    """Return the report on a conclusion."""
    job, verdict, decision = conclusion.job, conclusion.verdict, conclusion.decision
    return build_report(job, verdict, decision, uri=uri, logs=logs, diagnosis=conclusion.diagnosis)


# --- attempts -------------------------------------------------------------------------------------


def with_attempts(report: Report, attempts: Sequence[AttemptSummary]) -> Report:
    """Add a comparison of all `attempts` of the task, including the report's own;
    without attempts add nothing.
    """
    ordered = tuple(sorted(attempts, key=lambda attempt: attempt.number))
    answers = report.answers
    # a later attempt exists: what happened replaces the forecast
    if ordered and report.number is not None and (last := ordered[-1]).number > report.number:
        ended = "failed too" if last.outcome.has_failed else last.outcome.value
        ended = last.note or ended
        answers = replace(answers, retry=f"retried, attempt {last.number} {ended}")
    return replace(report, attempts=ordered, answers=answers)


def summarize_attempt(
    number: int,
    job: JobErrors,
    verdict: Verdict,
    decision: Decision,
) -> AttemptSummary:
    """Return the summary of an attempt that failed."""
    nodes = {entry.place.node for entry in job.roster} | {failure.node for failure in job.failures}
    engine = find_engine_words(job, verdict)
    return AttemptSummary(
        number,
        classify_outcome(verdict, job),
        verdict,
        decision,
        nodes=tuple(sorted(nodes - {""})),
        engine=engine,
    )


def changes_between(attempts: Sequence[AttemptSummary]) -> tuple[str, ...]:
    """Return a sentence for each attempt but the first:
    whether it had the same fault in the same place.
    """
    sentences = []
    for index, after in enumerate(attempts[1:], 1):
        # compare with the last attempt that is known
        earlier_with_verdict = (
            item
            for item in reversed(attempts[:index])
            if item.verdict is not None or after.verdict is None
        )
        before = next(earlier_with_verdict, attempts[index - 1])
        sentences.append(
            f"attempt {before.number} to {after.number}: {', '.join(_list_changes(before, after))}"
        )
    return tuple(sentences)


def _list_changes(before: AttemptSummary, after: AttemptSummary) -> Iterator[str]:
    one, other = before.verdict, after.verdict
    if one is None or other is None:
        yield from (
            f"attempt {item.number} {item.summary}"
            for item in (before, after)
            if item.verdict is None
        )
        return
    is_known = bool(one.fingerprint and other.fingerprint)
    if is_known and one.fingerprint == other.fingerprint:
        yield "the same fault again"
    elif one.category == other.category:
        yield (
            f"a different fault of the same category ({other.category})"
            if is_known
            else "can't be compared"
        )
    else:
        yield f"{'a different fault: ' if is_known else ''}{other.category} after {one.category}"
    if one.ranks and other.ranks:
        noun = "rank" if len(other.ranks) == 1 else "ranks"
        old_ranks = format_ranks(one.ranks, _MAX_RANKS_CHARACTERS)
        new_ranks = format_ranks(other.ranks, _MAX_RANKS_CHARACTERS)
        moved = f"on {noun} {new_ranks} after {old_ranks}"
        yield f"on the same {noun}" if one.ranks == other.ranks else moved
    if one.root is None or other.root is None:
        return
    yield from _compare_machines(one.root, other.root)
    old = dict(one.root.versions)
    new = dict(other.root.versions)
    yield from (
        f"{name} {new[name]} after {old[name]}"
        for name in sorted(old.keys() & new)
        if old[name] != new[name]
    )


def _compare_machines(one: WorkerError, other: WorkerError) -> Iterator[str]:
    """Yield whether machine and GPU of the root cause are the same; nothing if that isn't known.

    A machine is known by the kernel's boot id, which all of its pods share. The names of pods
    always differ: Flyte puts the attempt's number into them.
    """
    old, new = one.place, other.place
    # the most precise answer first: one GPU implies one machine
    if old.gpu and old.gpu == new.gpu:
        yield f"on the same GPU ({new.gpu})"
    elif (one.boot_id and one.boot_id == other.boot_id) or (
        old.machine and old.machine == new.machine
    ):
        yield f"on the same machine ({new.machine})" if new.machine else "on the same machine"
    elif old.machine and new.machine:
        yield f"on machine {new.machine} after {old.machine}"
    elif one.boot_id and other.boot_id:
        # the boot id changes with each boot, so a new one alone doesn't prove that it was another
        # machine
        yield "on another machine, or after a reboot"
