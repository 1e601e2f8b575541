"""A report as data: answers, facts, cascade, attempts, and its parts as finished texts,
in the order of reading.

`firstfault.render` only lays them out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.evidence.completion import classify_outcome
from firstfault.evidence.diagnosis import Diagnosis, diagnose
from firstfault.exceptions.first_cause import find_own_frames
from firstfault.exceptions.stack_dumps import format_stack_dump
from firstfault.exceptions.stack_position import locate_main_thread
from firstfault.exceptions.traceback_format import format_place
from firstfault.layout import Layout, parse_attempt_number
from firstfault.model import (
    Decision,
    JobErrors,
    Outcome,
    RestartKind,
    RestartRecord,
    Scope,
    Verdict,
    WorkerError,
)
from firstfault.report.answers import Answers, build_answers
from firstfault.report.cascade import build_cascade, clocks_text, coverage_text, followers_text
from firstfault.report.case import Case
from firstfault.report.engine_words import FLYTE, EngineWords, find_engine_words
from firstfault.report.facts import Fact, list_facts, list_raw_facts
from firstfault.report.first_line import first_line
from firstfault.report.formatting import format_ranks, shorten_list
from firstfault.report.headline import summarize_failure
from firstfault.report.job_identity import JobIdentity, identify_job
from firstfault.report.states import State
from firstfault.strategies.headlines import name_process
from firstfault.strategies.verdicts import MAX_SOURCES_PER_REASON
from firstfault.utils.text import counted, one_line, printable

if TYPE_CHECKING:
    from firstfault.conclude import Conclusion

_RANKS = 40
"""Characters of the line about a victim."""


@dataclass(frozen=True, slots=True)
class AttemptSummary:
    """One attempt in short."""

    number: int
    outcome: Outcome
    verdict: Verdict | None = None
    """None: it didn't fail, or this isn't known."""
    decision: Decision | None = None
    note: str = ""
    """Why nothing is known."""
    nodes: tuple[str, ...] = ()
    """Names of those that took part, if known."""
    seconds: float | None = None
    """How long it took; None: unknown."""
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
    """The victims and how much later they failed: "2 lost a peer, 5 stopped by their agents; ...";
    empty: none.
    """
    clocks: str
    """How exactly times of different nodes can be compared."""
    coverage: str
    """How many nodes reported: "4 of 4 reported"."""
    number: int | None
    """The attempt's number, from 0; None: unknown."""
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
        """What changed since the attempt before this one; empty: unknown."""
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
    here = parse_attempt_number(uri) if uri else None
    numbers = (
        [here[1]]
        if here is not None
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
    found = []
    for index, after in enumerate(attempts[1:], 1):
        # compare with the last attempt that is known
        known = (
            item
            for item in reversed(attempts[:index])
            if item.verdict is not None or after.verdict is None
        )
        before = next(known, attempts[index - 1])
        found.append(
            f"attempt {before.number} to {after.number}: {', '.join(_list_changes(before, after))}"
        )
    return tuple(found)


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
        moved = (
            f"on {noun} {format_ranks(other.ranks, _RANKS)} after {format_ranks(one.ranks, _RANKS)}"
        )
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


# --- the parts as finished texts ------------------------------------------------------------------

LOG_TITLE = "Last lines of its log"
STACK_TITLE = "Stack"
_MAX_RESTART_LINE = 300
"""Characters of the line about a restart."""
_PLACE_FACTS = {"Rank", "Node", "Pod", "Machine"}
_MAX_STACK_LINE = 200
"""Characters of one line of a stack or log."""
_MAX_RECOVERED = 20
"""Recovered failures that are listed."""
_MAX_STALLED_RANKS = 3
"""Ranks that a line about stalls names."""
_MAX_SUSPECTS = 5
"""Failures that may be the root cause and have their stack and log shown."""
_MAX_VICTIM_LINE = 160
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
    """About the root cause, without those that are in the answers."""
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


# --- facts ----------------------------------------------------------------------------------------


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
    text, detail = sentence.partition(": ")[2], cause.partition(": ")[2]
    return bool(text) and text.removeprefix("it ") == detail.removeprefix("rank ").partition(" ")[2]


def _list_details(report: Report) -> Iterator[Fact]:
    verdict = report.verdict
    if job := report.identity.parts(report.engine):
        yield Fact("Job", ", ".join(job))
    if report.identity.trained:
        yield Fact("Progress", report.identity.trained)
    yield from _list_victims(report)
    if before := [record for record in report.job.restarts if record.restart]:
        faults = tuple(f"{_describe_restart(record)}: {record.headline}" for record in before)
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
        f"rank {rank}: {one_line(line, _MAX_VICTIM_LINE)}" for rank, line in victims[:_MAX_VICTIMS]
    ]
    lines += [f"and {count - len(lines)} more"] if lines and count > len(lines) else []
    return Fact(name, text, tuple(lines))


# --- what is quoted -------------------------------------------------------------------------------


def message_text(verdict: Verdict) -> str:
    """Return the verdict's text; for a hang without the stack at its end,
    which `stack_lines` returns.

    If nothing of an attempt could be read, its text is its notes, which every form shows elsewhere.
    """
    text = verdict.message.strip()
    # every form shows the notes where it lists what isn't known
    if verdict.root is None and text == "\n".join(verdict.coverage.notes):
        return "no error document could be read"
    own = _own_stack(verdict.root).strip() if verdict.root is not None else ""
    return text.removesuffix(own).rstrip() if own else text


def stack_lines(failure: WorkerError) -> list[str]:
    """Return a process's stack when it was stopped, as a person reads it;
    empty if it has a traceback.
    """
    if failure.exception is not None and failure.exception.frames:
        return []
    return _list_lines(format_stack_dump(_own_stack(failure)))


def _own_stack(failure: WorkerError) -> str:
    place = failure.place
    own = [dump.text for dump in failure.stack_dumps if place.pid and dump.pid == place.pid]
    own += [
        dump.text
        for dump in failure.stack_dumps
        if place.rank is not None and dump.rank == place.rank
    ]
    return next(iter(own), "")


def log_lines(failure: WorkerError) -> list[str]:
    """Return a process's last stderr lines, as a terminal would show them."""
    return _list_lines(failure.log_tail)


def _list_lines(text: str) -> list[str]:
    """Return the lines that aren't empty; of a progress bar's line what is after
    the last carriage return.
    """
    lines = (printable(line.rstrip("\r").rpartition("\r")[2]).rstrip() for line in text.split("\n"))
    return [
        line if len(line) <= _MAX_STACK_LINE else line[: _MAX_STACK_LINE - 3] + "..."
        for line in lines
        if line
    ]


def quoted_failures(report: Report) -> list[WorkerError]:
    """Return the failures with a stack or log to show: the root cause, or a few that may be it,
    and suspects' stacks.

    If the root cause is undetermined, one stopped process for each place where some were stopped is
    shown, too.
    """
    verdict, events = report.verdict, report.cascade.events
    if verdict.root is not None or verdict.scope is not Scope.UNDETERMINED:
        suspects = [
            event.failure
            for event in events
            if event.state is State.SUSPECT and _own_stack(event.failure)
        ]
        return [
            *([verdict.root] if verdict.root is not None else []),
            *suspects[: _MAX_SUSPECTS - 1],
        ]
    mays = {State.SUSPECT, State.UNCLEAR}
    may_be = [event.failure for event in events if event.state in mays]
    # ranks that were stopped at the same line have similar stacks: keep one for each line
    places = {
        locate_main_thread(event.failure).frame: event.failure
        for event in events
        if _own_stack(event.failure)
    }
    return [
        *may_be[:_MAX_SUSPECTS],
        *(failure for failure in places.values() if failure not in may_be),
    ][: 2 * _MAX_SUSPECTS]


# --- restarts -------------------------------------------------------------------------------------


def recovered_lines(job: JobErrors, limit: int = _MAX_RECOVERED) -> list[str]:
    """Return the first `limit` failures that the job recovered from, one a line,
    and how many more there are.

    A round with a record of its restart has one line, about its root cause.
    """
    # `history` has the failures of recorded rounds, too; they would be listed twice
    recorded = {record.number for record in job.restarts if record.kind is RestartKind.ROUND}
    lines = [restart_line(record) for record in job.restarts if record.restart]
    others = (failure for failure in job.history if failure.place.round not in recorded)
    lines += [
        f"round {item.place.round}: {name_process(item)}: {summarize_failure(item)}"
        for item in others
    ]
    return shorten_list(lines, limit)


def restart_line(record: RestartRecord) -> str:
    """Return what failed before a restart, why the workers were restarted,
    and how long that took.
    """
    took = f", {record.lost_seconds:.0f} s lost" if record.lost_seconds is not None else ""
    sizes = (record.world_size_before, record.world_size_after)
    resized = (
        f", {sizes[1]} ranks instead of {sizes[0]}"
        if None not in sizes and sizes[0] != sizes[1]
        else ""
    )
    text = (
        f"{_describe_restart(record)}: {record.headline} (restarted:"
        f" {record.reason}{took}{resized})"
    )
    return one_line(text, _MAX_RESTART_LINE)


def list_stalls(job: JobErrors) -> list[RestartRecord]:
    """Return the records of the times in which the job made no progress."""
    return [record for record in job.restarts if record.kind is RestartKind.STALL]


def stalls_line(stalls: Sequence[RestartRecord], ended_ns: int | None = None) -> str:
    """Return how often and how long a job made no progress, its cost, and the ranks it waited for,
    most frequent first.

    If the last one has no end, it lasted until `ended_ns`, nanoseconds since the Unix epoch.
    """
    seconds, last = [record.lost_seconds or 0 for record in stalls], stalls[-1]
    if last.lost_seconds is None and None not in {last.timestamp_ns, ended_ns}:
        seconds[-1] = max((ended_ns or 0) - (last.timestamp_ns or 0), 0) / 1e9
    hours = (
        sum(
            each * (record.world_size_before or 0)
            for each, record in zip(seconds, stalls, strict=True)
        )
        / 3600
    )
    places = Counter(record.headline for record in stalls)
    waits = [f"{place} ({counted(number, 'time')})" for place, number in places.most_common()]
    total = (
        f"{counted(len(stalls), 'stall')}, {sum(seconds):.0f} s in total, {hours:.2f} rank hours"
    )
    return f"{total}, waiting for {', '.join(shorten_list(waits, _MAX_STALLED_RANKS))}"


def _describe_restart(record: RestartRecord) -> str:
    return (
        f"{'round' if record.kind is RestartKind.ROUND else 'in-process restart'} {record.number}"
    )
