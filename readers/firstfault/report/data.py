"""A report as data: answers, facts, cascade, attempts. `sections` orders them; `firstfault.render` prints them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.evidence.diagnosis import diagnose
from firstfault.layout import attempt_of
from firstfault.report.answers import Case, answers_on, machine_of
from firstfault.report.cascade import cascade_of
from firstfault.report.facts import clocks_text, coverage_text, facts_of, followers_text, identity_of, raw_facts
from firstfault.report.headline import first_line
from firstfault.report.words import engine_of, is_retried, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from firstfault.evidence.diagnosis import Diagnosis
    from firstfault.model import Decision, JobErrors, Verdict, WorkerError
    from firstfault.report.answers import Answers
    from firstfault.report.facts import Fact, JobIdentity

_RANKS = 40
"""Characters."""


@dataclass(frozen=True, slots=True)
class AttemptSummary:
    """One attempt in short."""

    number: int
    verdict: Verdict | None = None
    """None: it did not fail, or this is not known; see `note`."""
    decision: Decision | None = None
    note: str = ""
    """"succeeded", or why nothing is known."""
    nodes: tuple[str, ...] = ()
    """Names of those that took part, as far as known."""
    seconds: float | None = None
    """How long it took; None: not known."""

    @property
    def outcome(self) -> str:
        """How it ended, in a line."""
        return self.verdict.headline if self.verdict is not None else self.note

    @property
    def line(self) -> str:
        """How it ended, whether it was worth another one, and how long it took."""
        retry = "" if self.decision is None else ", retry" if is_retried(self.decision) else ", no retry"
        took = f", {self.seconds:.1f} s" if self.seconds is not None else ""
        return f"attempt {self.number}: {self.outcome}{retry}{took}"


@dataclass(frozen=True, slots=True)
class Report(Case):
    """What a report says about its case."""

    answers: Answers
    facts: tuple[Fact, ...]
    """About the root cause: rank, pod, machine, exit code, time, memory."""
    raw: tuple[Fact, ...]
    """What few people need: process ids, exact times, digests."""
    identity: JobIdentity
    followers: str
    """The victims and how much later they failed: "2 lost a peer, 5 stopped by their agents; ..."; empty: none."""
    clocks: str
    """How exactly times of different nodes can be compared."""
    coverage: str
    """How many nodes reported: "4 of 4"."""
    number: int | None
    """The attempt's number, from 0; None: not known."""
    attempts: tuple[AttemptSummary, ...] = ()
    """All known attempts by number, with this one; fewer than two: there is nothing to compare."""

    @property
    def first_line(self) -> str:
        """The line with which every form begins, less than 90 characters."""
        return first_line(self.verdict, self.decision)

    @property
    def changes(self) -> tuple[str, ...]:
        """What changed from each attempt to the next."""
        return changes_between(self.attempts)

    @property
    def change(self) -> str:
        """What changed since the attempt before this one; empty: not known."""
        number = self.number
        pair = [attempt for attempt in self.attempts if number is not None and attempt.number in {number - 1, number}]
        return next(iter(changes_between(pair)), "")


def report_of(  # noqa: PLR0913 - keywords
    job: JobErrors,
    verdict: Verdict,
    decision: Decision,
    *,
    uri: str = "",
    logs: Mapping[str, str] | None = None,
    diagnosis: Diagnosis | None = None,
) -> Report:
    """Return what a report on an attempt says, without credentials.

    Args:
        job: what was read.
        verdict: on it.
        decision: on the verdict.
        uri: of the attempt's documents.
        logs: local log files by node; they replace the engine's commands.
        diagnosis: of the job, from its `Conclusion`; None: it is computed.
    """
    diagnosis = diagnosis or diagnose(job)
    cascade = cascade_of(job, verdict, diagnosis)
    case = Case(job, verdict, decision, cascade, engine_of(job, verdict), uri, logs or {})
    # the number is in the output prefix or in the documents
    here = attempt_of(uri) if uri else None
    numbers = [here[1]] if here is not None else [place.attempt for place in job.places if place.incarnation]
    return Report(
        *(job, verdict, decision, cascade, case.engine, uri, case.logs),
        answers=answers_on(case),
        facts=tuple(facts_of(verdict, cascade, case.engine, machine_of(job, verdict))),
        raw=tuple(raw_facts(verdict)),
        identity=identity_of(job, verdict, cascade, uri),
        followers=followers_text(verdict, cascade, diagnosis.clocks),
        clocks=clocks_text(cascade, diagnosis.clocks),
        coverage=coverage_text(verdict, cascade),
        number=max(numbers, default=None),
    )


# --- attempts ---------------------------------------------------------------------------------------------------------


def with_attempts(report: Report, attempts: Sequence[AttemptSummary]) -> Report:
    """Return a report that is compared with the task's other attempts.

    Args:
        report: on one of them.
        attempts: summaries of this attempt and of others; none changes nothing.
    """
    ordered = tuple(sorted(attempts, key=lambda attempt: attempt.number))
    answers = report.answers
    if ordered and report.number is not None and (last := ordered[-1]).number > report.number:
        ended = "failed too" if last.verdict is not None else last.note
        answers = replace(answers, fate=f"was retried: attempt {last.number} {ended}")
    return replace(report, attempts=ordered, answers=answers)


def summary_of(number: int, job: JobErrors, verdict: Verdict, decision: Decision) -> AttemptSummary:
    """Return the summary of an attempt that failed."""
    nodes = {entry.place.node for entry in job.roster} | {failure.node for failure in job.failures}
    return AttemptSummary(number, verdict, decision, nodes=tuple(sorted(nodes - {""})))


def changes_between(attempts: Sequence[AttemptSummary]) -> tuple[str, ...]:
    """Return a sentence for each attempt but the first: whether it had the same fault in the same place."""
    found = []
    for index, after in enumerate(attempts[1:], 1):
        # skip an attempt of which nothing is known, after it was mentioned once
        known = (item for item in reversed(attempts[:index]) if item.verdict is not None or after.verdict is None)
        before = next(known, attempts[index - 1])
        found.append(f"attempt {before.number} to {after.number}: {', '.join(_changes(before, after))}")
    return tuple(found)


def _changes(before: AttemptSummary, after: AttemptSummary) -> Iterator[str]:
    one, other = before.verdict, after.verdict
    if one is None or other is None:
        yield from (f"attempt {item.number} {item.note}" for item in (before, after) if item.verdict is None)
        return
    is_known = bool(one.fingerprint and other.fingerprint)
    if is_known and one.fingerprint == other.fingerprint:
        yield "the same fault again"
    elif one.category == other.category:
        yield f"another fault of the same category ({other.category})" if is_known else "cannot be compared"
    else:
        yield f"{'another fault: ' if is_known else ''}{other.category} after {one.category}"
    if one.ranks and other.ranks:
        noun = "rank" if len(other.ranks) == 1 else "ranks"
        moved = f"on {noun} {ranks_text(other.ranks, _RANKS)} after {ranks_text(one.ranks, _RANKS)}"
        yield f"on the same {noun}" if one.ranks == other.ranks else moved
    if one.root is None or other.root is None:
        return
    yield from _machines(one.root, other.root)
    old, new = dict(one.root.versions), dict(other.root.versions)
    yield from (f"{name} {new[name]} after {old[name]}" for name in sorted(old.keys() & new) if old[name] != new[name])


def _machines(one: WorkerError, other: WorkerError) -> Iterator[str]:
    """Yield whether machine and GPU of the root cause are the same; nothing if that is not known.

    A machine is known by the kernel's boot id, which all of its pods share. The names of pods always differ: Flyte puts
    the attempt's number into them.
    """
    old, new = one.place, other.place
    if old.gpu and old.gpu == new.gpu:
        yield f"on the same GPU ({new.gpu})"
    elif (one.boot_id and one.boot_id == other.boot_id) or (old.machine and old.machine == new.machine):
        yield f"on the same machine ({new.machine})" if new.machine else "on the same machine"
    elif old.machine and new.machine:
        yield f"on machine {new.machine} after {old.machine}"
    elif one.boot_id and other.boot_id:
        yield "on another machine, or after a reboot"
