"""The five answers for whoever finds a dead job: what failed, where, retried or not, what next, what is unknown."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.exceptions.stack_position import where_it_stood
from firstfault.exceptions.tracebacks import first_member, own_frames, place_of
from firstfault.model import Scope, Subject
from firstfault.report.words import (
    CATEGORY_ADVICE,
    UNDETERMINED_ADVICE,
    FaultOwner,
    State,
    about_category,
    explain_signal,
    fault_owner_of,
    ranks_text,
)
from firstfault.text import one_line, sentence_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from firstfault.model import Decision, ExceptionInfo, JobErrors, Verdict, WorkerError
    from firstfault.report.attempt_changes import AttemptSummary
    from firstfault.report.cascade import Cascade

__all__ = ["Answers", "Step", "answers_on", "described", "headline_parts"]

_FEW = 5
_LINE = 200
_LONG = 400
_NOWHERE = "not known: its document names no rank and no node"
_RANKS = 60
"""Characters."""
_OF_EVENTS = {"node_lost", "preemption", "host_oom", "infrastructure"}
"""Categories of which Kubernetes' events tell more than the pod's log."""
_POD = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
"""What Kubernetes takes for a name; a command with anything else in it would not be this command."""
_FROM_OUTSIDE = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"}


@dataclass(frozen=True, slots=True)
class Step:
    """Something to do next."""

    text: str
    command: str = ""
    """To be copied; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What a report says first, in this order."""

    what: str
    """One line: "ValueError: bad sample"."""
    fault_owner: FaultOwner
    category: str
    """With its meaning."""
    where: str
    """One line: "rank 3 (local_rank 1) on worker-1"."""
    code: str
    """"train.py:41 in step"; empty if nobody knows."""
    source: str
    """The line of code there; empty if it could not be read."""
    fate: str
    """"will be retried", "will not be retried", "was retried: attempt 1 succeeded", or that it is advice."""
    fate_reason: str
    steps: tuple[Step, ...]
    unknown: tuple[str, ...]
    """Sentences, the most important first; empty if nothing is."""


def answers_on(  # noqa: PLR0913, PLR0917 - what a report is made of
    job: JobErrors,
    verdict: Verdict,
    decision: Decision,
    uri: str,
    logs: Mapping[str, str],
    attempts: Sequence[AttemptSummary],
    number: int | None,
    cascade: Cascade,
) -> Answers:
    """Return the answers; arguments as for `firstfault.report.report_of`, with this attempt's number and cascade."""
    code, source = _code(job, verdict)
    return Answers(
        what=_what(verdict),
        fault_owner=_fault_owner(job, verdict),
        category=about_category(verdict.category),
        where=_NOWHERE if _is_alone(job, verdict) else _where(verdict),
        code=code,
        source=source,
        fate=_fate(decision, number, attempts),
        fate_reason=decision.reason,
        steps=tuple(_steps(job, verdict, code, uri, logs)),
        unknown=tuple(_unknown(job, verdict, cascade)),
    )


def _fault_owner(job: JobErrors, verdict: Verdict) -> FaultOwner:
    if verdict.scope is Scope.UNDETERMINED and not _is_alone(job, verdict):
        return FaultOwner.UNKNOWN
    return fault_owner_of(verdict.category)


def headline_parts(verdict: Verdict) -> tuple[str, str]:
    """Return what a verdict's headline says: the fault in a word or two, and the sentence about it."""
    root, headline = verdict.root, _whole_headline(verdict)
    if root is not None and headline.startswith(f"{root.what},"):
        return root.what, headline[len(root.what) :].partition(": ")[2]
    name, _, text = headline.partition(": ")
    return name.split(",", 1)[0], text


def _whole_headline(verdict: Verdict) -> str:
    """A headline as it was before it was cut, where the message begins with it."""
    begin, cut, _ = verdict.headline.rpartition("...")
    whole = one_line(verdict.message, _LONG)
    return whole if cut and verdict.headline.endswith("...") and whole.startswith(begin) else verdict.headline


# --- what and where ---------------------------------------------------------------------------------------------------


def _what(verdict: Verdict) -> str:
    if verdict.scope is Scope.UNDETERMINED:
        return verdict.headline
    root = verdict.root
    name, text = headline_parts(verdict)
    if root is not None and root.signal and root.exception is None and not root.sent_signals:
        text = explain_signal(root.signal, root.resources) or text
    if root is not None and root.exception is not None and name == root.what:
        text = one_line(_deeper(root) or text, _LINE)
    return f"{name}: {text}" if text else name


def _deeper(root: WorkerError) -> str:
    """What an exception says with what it was raised from, or what it wraps: a sentence of its own may say nothing."""
    raised = root.exception
    if raised is None:
        return ""
    text = sentence_of(raised.message)
    leaf = first_member(raised)
    if leaf is not None:
        return f"{described(leaf)}; {text}"
    lines = raised.message.strip().splitlines()
    if text.startswith("Caught ") and "Original Traceback" in raised.message:  # torch, of a process of its own
        return f"{text} {lines[-1].strip()}"
    links = [link for link in raised.causes if link.relation == "cause"]
    if not links or links[-1] is not raised.causes[-1]:
        return ""
    return f"{text}; caused by {described(links[-1])}"


def described(exception: ExceptionInfo) -> str:
    """Return "ValueError: bad sample"."""
    name, text = exception.type.rsplit(".", 1)[-1], sentence_of(exception.message)
    return f"{name}: {text}" if text else name


def _is_alone(job: JobErrors, verdict: Verdict) -> bool:
    """Whether all there is is one document that names nobody: what failed is known, and not where."""
    return verdict.scope is Scope.UNDETERMINED and len(job.failures) == 1 and verdict.node is None


def _where(verdict: Verdict) -> str:
    if verdict.scope is Scope.UNDETERMINED:
        suspects = [suspect.name for suspect in verdict.suspects]
        more = f" and {len(suspects) - _FEW} more" if len(suspects) > _FEW else ""
        if suspects:
            return f"one of: {', '.join(suspects[:_FEW])}{more}"
        return f"no rank is known, on {verdict.node}" if verdict.node else "nobody stands out"
    on = f" on {verdict.node}" if verdict.node else ""
    if len(verdict.ranks) > 1:
        return f"{len(verdict.ranks)} ranks ({ranks_text(verdict.ranks, 60)}), the first{on}"
    if not verdict.ranks:
        is_agent = verdict.root is not None and verdict.root.subject is Subject.AGENT
        return f"the agent{on}" if is_agent and verdict.scope is not Scope.EXTERNAL else verdict.node or "not known"
    local = verdict.root.place.local_rank if verdict.root is not None else None
    return f"rank {verdict.ranks[0]}{'' if local is None else f' (local_rank {local})'}{on}"


def _code(job: JobErrors, verdict: Verdict) -> tuple[str, str]:
    """Where in the program it was, and the line there; of an undetermined verdict, where all were."""
    if verdict.root is not None:
        return _code_of(verdict.root)
    if verdict.scope is not Scope.UNDETERMINED:
        return "", ""  # a node has no place in the program
    places = {_code_of(failure) for failure in job.failures}
    return places.pop() if len(places) == 1 else ("", "")


def _code_of(failure: WorkerError) -> tuple[str, str]:
    frames = own_frames(failure.exception) if failure.exception is not None else ()
    return (place_of(frames[-1]), frames[-1].code) if frames else (where_it_stood(failure).frame, "")


# --- retried or not ---------------------------------------------------------------------------------------------------


def _fate(decision: Decision, number: int | None, attempts: Sequence[AttemptSummary]) -> str:
    later = [attempt for attempt in attempts if number is not None and attempt.number > number]
    if later:
        last = later[-1]
        ended = "failed too" if last.verdict is not None else last.note
        return f"was retried: attempt {last.number} {ended}"
    if decision.is_spent:
        return "will not be retried: no retries are left"
    if decision.enforced:
        return "will be retried" if decision.retry else "will not be retried"
    return f"{'should be' if decision.retry else 'should not be'} retried; Flyte decides by itself, this is advice"


# --- what next --------------------------------------------------------------------------------------------------------


def _steps(job: JobErrors, verdict: Verdict, code: str, uri: str, logs: Mapping[str, str]) -> Iterator[Step]:
    advice = _advice(job, verdict, code)
    yield Step(f"{advice}{'' if advice.endswith(' at') else ':'} {code}" if code else advice)
    pod = _pod(job, verdict)
    namespace = _namespace(job, verdict)
    within = f" -n {namespace}" if namespace else ""
    if pod in logs:
        yield Step("its pod's log", f"less {shlex.quote(logs[pod])}")
    elif _POD.fullmatch(pod):
        if verdict.category in _OF_EVENTS:
            yield Step("its pod's events", f"kubectl describe pod {pod}{within}")
        yield Step("its pod's log", f"kubectl logs {pod}{within}")
    if uri:
        yield Step("more", f"firstfault show {shlex.quote(uri)}")


def _advice(job: JobErrors, verdict: Verdict, code: str) -> str:
    root = verdict.root
    if _is_alone(job, verdict):
        return f"read the text below: {CATEGORY_ADVICE.get(verdict.category, CATEGORY_ADVICE['unknown'])}"
    if verdict.scope is Scope.UNDETERMINED and code:
        return f"{UNDETERMINED_ADVICE}; all were at"
    if verdict.scope is Scope.UNDETERMINED:
        return UNDETERMINED_ADVICE
    if verdict.category == "hang" and not code:
        return "it answered nothing: look at its node, its GPU and what it reads from"
    if root is not None and root.signal == "SIGKILL" and verdict.category == "signal":
        return "see who kills processes on its node: the node's events and the kernel's log"
    return CATEGORY_ADVICE.get(verdict.category, CATEGORY_ADVICE["unknown"])


def _pod(job: JobErrors, verdict: Verdict) -> str:
    """The pod to look at: the root cause's, else the first suspect's, else the first that failed."""
    if verdict.node:
        return verdict.node
    named = [suspect.node for suspect in verdict.suspects] + [failure.node for failure in job.failures]
    return next((node for node in named if node), "")


def _namespace(job: JobErrors, verdict: Verdict) -> str:
    """Of the pod, or of any other of the job: they share it."""
    places = [failure.place for failure in job.failures] + [entry.place for entry in job.roster]
    if verdict.root is not None:
        places.insert(0, verdict.root.place)
    return next((place.namespace for place in places if place.namespace), "")


# --- what is unknown --------------------------------------------------------------------------------------------------


def _unknown(job: JobErrors, verdict: Verdict, cascade: Cascade) -> Iterator[str]:
    if verdict.scope is Scope.UNDETERMINED and len(job.failures) == 1:
        yield "where it was: its document names no rank and no node"
    elif verdict.scope is Scope.UNDETERMINED:
        yield "who it was: nobody can be told from the others"
    elif verdict.confidence != "high":
        yield f"whether it was really this one: confidence is {verdict.confidence}, see the evidence"
    for suspect in verdict.suspects[:_FEW]:
        yield f"whether it was {suspect.name}: {suspect.why}"
    if len(verdict.suspects) > _FEW:
        yield f"and {len(verdict.suspects) - _FEW} more suspects"
    if not verdict.settled:
        yield "not settled: the wait for the other nodes ran out"
    yield from _unknown_of_nodes(verdict)
    silent = [item.rank for item in cascade.ranks if item.state is State.SILENT]
    if silent:
        yield f"what became of {_ranks_named(silent)}: no report"
    yield from _unknown_of_root(verdict)
    unclear = {event.failure.node for event in cascade.events if event.bounds is None and event.at_ns is not None}
    if unclear:
        yield f"the order of times on {len(unclear)} {'node' if len(unclear) == 1 else 'nodes'}: clocks not compared"


def _unknown_of_nodes(verdict: Verdict) -> Iterator[str]:
    coverage = verdict.coverage
    if coverage.unreadable:
        yield f"what {coverage.unreadable} documents say that could not be read"
    yield from coverage.notes
    if coverage.expected is None:
        yield "how many nodes took part: nobody said"
    elif coverage.expected is not None and coverage.expected > coverage.reported and not coverage.notes:
        yield f"what {coverage.expected - coverage.reported} of {coverage.expected} nodes saw: they were not heard"


def _ranks_named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_text(list(ranks), _RANKS)}"


def _unknown_of_root(verdict: Verdict) -> Iterator[str]:
    """What the kind of the fault leaves open, however sure it is who it was."""
    if verdict.scope is Scope.UNDETERMINED:
        return
    if verdict.category == "hang":
        yield "when it began to hang: nobody saw that"
    elif verdict.timestamp_ns is None:
        yield "when it was: the root cause carries no time"
    if verdict.category == "node_lost":
        yield "why the node, or its agent, is gone: it could not say so itself"
    if verdict.category == "preemption":
        yield "who told it to go: a preemption, a drain, a time limit, or a person"
    if verdict.root is not None:
        yield from _unknown_of_death(verdict.root)


def _unknown_of_death(root: WorkerError) -> Iterator[str]:
    if root.exception is not None or root.sent_signals or root.subject is Subject.AGENT:
        return
    if root.signal == "SIGKILL" and not root.resources.oom_kill:
        excluded = "not its agent" + (", and no OOM kill was counted" if root.resources.oom_kill == 0 else "")
        yield f"who killed it: {excluded}"
    elif root.signal in _FROM_OUTSIDE:
        yield f"who sent it {root.signal}: not its agent"
    elif not root.signal and root.exit_code is not None:
        yield "why it exited: it left no exception"
