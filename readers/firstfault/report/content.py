"""Everything a report says, as data: the five answers, and what they rest on. Message, page and terminal draw it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.model import Scope, Subject
from firstfault.report.attempts import changes_between
from firstfault.report.cascade import cascade_of
from firstfault.report.json import format_timestamp
from firstfault.report.redaction import redacted
from firstfault.report.words import (
    CATEGORY_ADVICE,
    UNDETERMINED_ADVICE,
    Blame,
    State,
    about_category,
    blame_of_category,
    duration,
    explain_signal,
    ranks_text,
    size,
)
from firstfault.stacks import where_it_stood
from firstfault.text import one_line
from firstfault.tracebacks import own_frames, place_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from firstfault.model import CausedBy, CollectiveProgress, Decision, JobErrors, ThreadFailure, Verdict, WorkerError
    from firstfault.report.attempts import AttemptSummary
    from firstfault.report.cascade import Cascade

__all__ = ["Answers", "Fact", "Report", "Step", "report_of"]

_FEW = 5
_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that is known: "exit code", "-9 (SIGKILL)"."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Step:
    """Something to do next."""

    text: str
    command: str = ""
    """To be copied; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The five questions of whoever finds a dead job."""

    what: str
    """One line: "ValueError: bad sample"."""
    blame: Blame
    category: str
    """With its meaning."""
    where: str
    """One line: "rank 3 (local_rank 1) on worker-1"."""
    code: str
    """"train.py:41 in step"; empty if nobody knows."""
    fate: str
    """"will be retried", "will not be retried", or that it is advice."""
    fate_reason: str
    steps: tuple[Step, ...]
    unknown: tuple[str, ...]
    """Sentences, the most important first; empty if nothing is."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a report says."""

    job: JobErrors
    verdict: Verdict
    decision: Decision
    answers: Answers
    facts: tuple[Fact, ...]
    """About the root cause: rank, host, exit code, pid, time, memory."""
    cascade: Cascade
    followers: str
    """How many followed, and how much later: "7, 5 of them stopped by their agents; ..."; empty if nobody did."""
    clocks: str
    """How far times of different nodes can be compared."""
    coverage: str
    """How many nodes were heard: "4 of 4"."""
    attempts: tuple[AttemptSummary, ...] = ()
    """All that are known, this one among them, by number; empty or one: there is nothing to compare."""
    changes: tuple[str, ...] = ()
    """What has changed from each attempt to the next."""
    uri: str = ""
    """Of the attempt's documents; empty: not known."""


def report_of(  # noqa: PLR0913 - keywords
    job: JobErrors,
    verdict: Verdict,
    decision: Decision,
    *,
    uri: str = "",
    logs: Mapping[str, str] | None = None,
    attempts: Sequence[AttemptSummary] = (),
) -> Report:
    """Return what a report on an attempt says; credentials in the verdict's texts are left out.

    Args:
        job: what was read.
        verdict: on it.
        decision: on the verdict.
        uri: where the attempt's documents lie.
        logs: by node, files with what its pod printed, where they are at hand; instead of a command for the cluster.
        attempts: summaries of other attempts, and of this one if there are any.
    """
    verdict = redacted(verdict)
    cascade = cascade_of(job, verdict)
    ordered = tuple(sorted(attempts, key=lambda attempt: attempt.number))
    return Report(
        job=job,
        verdict=verdict,
        decision=decision,
        answers=_answers(job, verdict, decision, uri, logs or {}),
        facts=tuple(_facts(verdict)),
        cascade=cascade,
        followers=_followers(verdict, cascade),
        clocks=_clocks(cascade),
        coverage=_coverage(verdict),
        attempts=ordered,
        changes=changes_between(ordered),
        uri=uri,
    )


# --- the five answers -----------------------------------------------------------------------------------------------


def _answers(job: JobErrors, verdict: Verdict, decision: Decision, uri: str, logs: Mapping[str, str]) -> Answers:
    root = verdict.root
    return Answers(
        what=_what(verdict),
        blame=blame_of_category(verdict),
        category=about_category(verdict.category),
        where=_where(verdict),
        code=_code(root),
        fate=_fate(decision),
        fate_reason=decision.reason,
        steps=tuple(_steps(job, verdict, uri, logs)),
        unknown=tuple(_unknown(job, verdict)),
    )


def _what(verdict: Verdict) -> str:
    root = verdict.root
    if verdict.scope is Scope.UNDETERMINED:
        return verdict.headline
    what, found, text = verdict.headline.partition(": ")
    name = what.split(",", 1)[0]
    if root is not None and root.signal and root.exception is None and not root.sent_signals:
        return f"{name}: {explain_signal(root.signal, root.resources) or text}"
    return f"{name}: {text}" if found else name


def _where(verdict: Verdict) -> str:
    if verdict.scope is Scope.UNDETERMINED:
        suspects = [f"rank {item.rank}" if item.rank is not None else str(item.node) for item in verdict.suspects]
        more = f" and {len(suspects) - _FEW} more" if len(suspects) > _FEW else ""
        return f"one of: {', '.join(suspects[:_FEW])}{more}" if suspects else "nobody stands out"
    on = f" on {verdict.node}" if verdict.node else ""
    if len(verdict.ranks) > 1:
        return f"{len(verdict.ranks)} ranks ({ranks_text(verdict.ranks, 60)}), the first{on}"
    if not verdict.ranks:
        is_agent = verdict.root is not None and verdict.root.subject is Subject.AGENT
        return f"the agent{on}" if is_agent and verdict.scope is not Scope.EXTERNAL else verdict.node or "not known"
    local = verdict.root.place.local_rank if verdict.root is not None else None
    return f"rank {verdict.ranks[0]}{'' if local is None else f' (local_rank {local})'}{on}"


def _code(root: WorkerError | None) -> str:
    if root is None:
        return ""
    frames = own_frames(root.exception) if root.exception is not None else ()
    return place_of(frames[-1]) if frames else where_it_stood(root).frame


def _fate(decision: Decision) -> str:
    if decision.enforced:
        return "will be retried" if decision.retry else "will not be retried"
    return f"{'should be' if decision.retry else 'should not be'} retried; Flyte decides by itself, this is advice"


def _steps(job: JobErrors, verdict: Verdict, uri: str, logs: Mapping[str, str]) -> Iterator[Step]:
    if verdict.scope is Scope.UNDETERMINED:
        yield Step(UNDETERMINED_ADVICE)
    else:
        advice = CATEGORY_ADVICE.get(verdict.category, CATEGORY_ADVICE["unknown"])
        code = _code(verdict.root)
        yield Step(f"{advice}: {code}" if code else advice)
    pod = verdict.node or next((item.node for item in verdict.suspects if item.node), "")
    if pod in logs:
        yield Step("its pod's log", f"less {logs[pod]}")
    elif pod:
        yield Step("its pod's log", f"kubectl logs {pod} -n {_namespace(job, verdict) or '<namespace>'}")
    if uri:
        yield Step("more", f"firstfault show {uri}")


def _namespace(job: JobErrors, verdict: Verdict) -> str:
    """Of the pod, or of any other of the job: they share it."""
    places = [failure.place for failure in job.failures] + [entry.place for entry in job.roster]
    if verdict.root is not None:
        places.insert(0, verdict.root.place)
    return next((place.namespace for place in places if place.namespace), "")


def _unknown(job: JobErrors, verdict: Verdict) -> Iterator[str]:
    if verdict.scope is Scope.UNDETERMINED:
        yield "who it was: nobody can be told from the others"
    elif verdict.confidence != "high":
        yield f"how sure this is: confidence is {verdict.confidence}"
    for suspect in verdict.suspects[:_FEW]:
        name = f"rank {suspect.rank}" if suspect.rank is not None else str(suspect.node)
        yield f"whether it was {name}: {suspect.why}"
    if len(verdict.suspects) > _FEW:
        yield f"and {len(verdict.suspects) - _FEW} more suspects"
    if not verdict.settled:
        yield "not settled: the wait for the other nodes ran out"
    coverage = verdict.coverage
    if coverage.unreadable:
        yield f"what {coverage.unreadable} documents say that could not be read"
    yield from coverage.notes
    yield from _unknown_of_root(verdict)
    if coverage.expected is None and not job.roster:
        yield "how many nodes took part: nobody said"


def _unknown_of_root(verdict: Verdict) -> Iterator[str]:
    """What the kind of the fault leaves open, however sure it is who it was."""
    root = verdict.root
    if verdict.scope is Scope.UNDETERMINED:
        return
    if verdict.category == "hang":
        yield "when it began to hang: nobody saw that"
    elif verdict.timestamp_ns is None:
        yield "when it was: the root cause carries no time"
    if verdict.category == "node_lost":
        yield "why the node is gone: it left no word"
    if root is None or root.exception is not None or root.sent_signals or root.subject is Subject.AGENT:
        return
    if root.signal == "SIGKILL" and not root.resources.oom_kill:
        excluded = "not its agent" + (", not the kernel for want of memory" if root.resources.oom_kill == 0 else "")
        yield f"who killed it: {excluded}"
    elif root.signal in {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"}:
        yield f"who sent it {root.signal}: not its agent"
    elif root.signal == "" and root.exit_code is not None:
        yield "why it exited: it left no exception"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_FEW])
    return f"{shown} and {len(names) - _FEW} more" if len(names) > _FEW else shown


# --- facts ----------------------------------------------------------------------------------------------------------


def _facts(verdict: Verdict) -> Iterator[Fact]:
    root = verdict.root
    if root is None:
        if verdict.node:
            yield Fact("node", verdict.node)
        yield Fact("time", format_timestamp(verdict.timestamp_ns) or "not recorded")
        return
    yield from _place_facts(root)
    yield from _end_facts(root)
    yield Fact("time", format_timestamp(verdict.timestamp_ns) or "not recorded")
    if root.place.restart_count:
        yield Fact("restarts before", str(root.place.restart_count))
    if root.caused_by is not None:
        yield Fact("stopped after a failure of", _cause(root.caused_by))
    yield from _few("thread", [_thread(thread) for thread in root.thread_failures])
    memory = ", ".join(_memory(root))
    if memory:
        yield Fact("memory", memory)
    yield from _few("last collective", [_collective(progress) for progress in root.collectives])
    if root.versions:
        yield Fact("versions", ", ".join(f"{name} {version}" for name, version in root.versions))


def _place_facts(root: WorkerError) -> Iterator[Fact]:
    place = root.place
    if place.rank is not None:
        yield Fact("rank", _with(str(place.rank), "local_rank", place.local_rank))
    if root.node:
        yield Fact("node", root.node)
    if place.host and place.host != root.node:
        yield Fact("host", place.host)


def _end_facts(root: WorkerError) -> Iterator[Fact]:
    pid = root.place.pid or None
    if root.exit_code is not None:
        yield Fact("exit code", _with(str(root.exit_code), "pid", pid))
    elif pid is not None:
        yield Fact("pid", str(pid))
    if root.signal and root.sent_signals:
        yield Fact("signal", f"{root.signal}, sent by its agent: {root.sent_signals[0].reason}")
    elif root.signal:
        explained = explain_signal(root.signal, root.resources)
        yield Fact("signal", f"{root.signal}: {explained}" if explained else root.signal)


def _with(text: str, name: str, value: int | None) -> str:
    return text if value is None else f"{text} ({name} {value})"


def _few(name: str, values: Sequence[str]) -> Iterator[Fact]:
    for value in values[:_FEW]:
        yield Fact(name, value)
    if len(values) > _FEW:
        yield Fact(name, f"and {len(values) - _FEW} more")


def _cause(cause: CausedBy) -> str:
    if cause.rank is None:
        return cause.node or "another node"
    return f"rank {cause.rank} on {cause.node}" if cause.node else f"rank {cause.rank}"


def _thread(failure: ThreadFailure) -> str:
    exception = failure.exception
    text = one_line(exception.message)
    return f"{failure.thread} ended by {exception.type.rsplit('.', 1)[-1]}" + (f": {text}" if text else "")


def _collective(progress: CollectiveProgress) -> str:
    number = f"{progress.last_operation} #{progress.enqueued}".lstrip()
    completed = f", {progress.completed} completed" if progress.completed is not None else ""
    return f"{number}{completed} (group {progress.group})"


def _memory(root: WorkerError) -> Iterator[str]:
    found = root.resources
    limit = f" of {size(found.memory_limit_bytes)}" if found.memory_limit_bytes is not None else ""
    if found.memory_peak_bytes is not None:
        yield f"peak {size(found.memory_peak_bytes)}{limit}"
    if found.memory_used_bytes is not None:
        yield f"in use {size(found.memory_used_bytes)}" + ("" if found.memory_peak_bytes is not None else limit)
    elif found.memory_peak_bytes is None and limit:
        yield f"limit {size(found.memory_limit_bytes or 0)}"
    if found.oom_kill is not None:
        yield f"oom_kill rose by {found.oom_kill}"


# --- the others -----------------------------------------------------------------------------------------------------


def _followers(verdict: Verdict, cascade: Cascade) -> str:
    count = verdict.victims.count
    if not count:
        return ""
    if verdict.scope is Scope.UNDETERMINED:
        return f"{count}, each of them cause or victim"
    stopped = cascade.count(State.STOPPED)
    kinds = str(count)
    if stopped:
        whose = "its agent" if stopped == 1 else "their agents"
        kinds += f", {stopped} of them stopped by {whose}" if stopped < count else f", stopped by {whose}"
    after = [
        event for event in cascade.events if event.state in {State.VICTIM, State.STOPPED} and event.at_ns is not None
    ]
    if not after:
        return kinds
    first, last = after[0], after[-1]
    name = f"rank {first.failure.rank}" if first.failure.rank is not None else first.failure.node
    on = f" on {first.failure.node}" if first.failure.rank is not None and first.failure.node else ""
    text = f"{kinds}; the first was {name}{on}" + (f", {first.later}" if cascade.from_root else "")
    return f"{text}; the last {last.later}" if last is not first else text


def _clocks(cascade: Cascade) -> str:
    others = [event for event in cascade.events if event.at_ns != 0]
    if not others:
        return ""
    unknown = {event.failure.node for event in others if event.bounds is None and event.at_ns is not None}
    widths = [event.bounds.high - event.bounds.low for event in others if event.bounds is not None]
    widest = max(widths, default=0)
    said = []
    if unknown:
        whose = _names(sorted(unknown)) if len(unknown) <= _FEW else f"{len(unknown)} nodes"
        said.append(f"nobody knows how right the clocks of {whose} are")
    if widths and widest <= _MS:
        said.append("all processes read one clock" if not unknown else "the others share one clock")
    elif widths:
        said.append(f"times are known to within {duration(widest)}")
    return "; ".join(said)


def _coverage(verdict: Verdict) -> str:
    coverage = verdict.coverage
    expected = coverage.expected if coverage.expected is not None else "an unknown number"
    text = f"{coverage.reported} of {expected}"
    parts = [] if coverage.complete else ["incomplete"]
    if coverage.unreadable:
        parts.append(f"{coverage.unreadable} documents could not be read")
    if not verdict.settled:
        parts.append("the wait for the others ran out")
    return ", ".join([text, *parts])
