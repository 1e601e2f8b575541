"""The five answers of a report: cause, place, retry, what to do next, and what is unknown."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from firstfault.conclude import UNUSED_RESTARTS
from firstfault.evidence.library_calls import is_raised_by_loader_signal
from firstfault.evidence.texts import is_unexplained_write
from firstfault.exceptions.ending_exception import find_ending_exception
from firstfault.exceptions.exceptions_in_text import format_place
from firstfault.exceptions.first_cause import find_own_frames
from firstfault.exceptions.source_files import is_library_file
from firstfault.exceptions.stack_position import find_crash_frames, locate_main_thread
from firstfault.model import (
    CATEGORIES,
    Action,
    JobErrors,
    Origin,
    RestartKind,
    Scope,
    Subject,
    Verdict,
    WorkerError,
)
from firstfault.model.failure import CANCELLED, FROM_OUTSIDE, JOB_END_CODES, PREEMPTED, REQUEUED
from firstfault.model.job import UNNAMED_PROCESS
from firstfault.report.case import Case, count_terminated_nodes, find_machine
from firstfault.report.engine_words import EngineWords
from firstfault.report.fault_owner import FaultOwner, describe_fault_owner
from firstfault.report.formatting import MAX_LISTED_ITEMS, format_ranks, shorten_list
from firstfault.report.headline import split_fault
from firstfault.report.next_steps import Step, find_next_steps
from firstfault.report.unknowns import list_unknowns
from firstfault.strategies.registry import DEFAULT_STRATEGY
from firstfault.utils.text import one_line

_MAX_LINE_CHARACTERS = 200
_ENDED_FROM_OUTSIDE = "ended from outside"
"""Printed instead of a category if a log can't distinguish a preemption from a time limit, a drain
and an abort.
"""


@dataclass(frozen=True, slots=True)
class Answers:
    """The beginning of every report, in this order."""

    what: str
    """One line: "ValueError: bad sample"."""
    fault_owner: FaultOwner
    category: str
    """With its meaning: "user_code: an exception of ..."."""
    confidence: str
    """With the strategy, if that isn't the default: "high", "low (strategy earliest)"."""
    where: str
    """One line: "rank 3 (local rank 1) on worker-1"."""
    code: str
    """"train.py:41 in step"; empty if unknown."""
    source: str
    """The line of code there; empty if it could not be read."""
    retry: str
    """"yes", "no", "no (advice: Flyte may retry anyway)", "retried, attempt 1 succeeded"."""
    retry_reason: str
    steps: tuple[Step, ...]
    unknown: tuple[str, ...]
    """Sentences, the most important first; empty if everything is known."""

    @property
    def fault(self) -> str:
        """The fault's owner and the confidence: "your code, category data, confidence high"."""
        name = self.category.partition(":")[0]
        kind = name if name == _ENDED_FROM_OUTSIDE else f"category {name}"
        return f"{self.fault_owner.value}, {kind}, confidence {self.confidence}"

    @property
    def place(self) -> str:
        """Where it was, and at which line of the program."""
        return f"{self.where}, {self.code}" if self.code else self.where


def build_answers(case: Case) -> Answers:
    """Return the answers."""
    job, verdict = case.job, case.verdict
    code, source = _find_code_line(job, verdict)
    by = f" (by strategy {verdict.strategy})" if verdict.strategy != DEFAULT_STRATEGY else ""
    place_text = (
        "unknown" if job.named_ranks else f"unknown: {case.engine.source} names no rank and no node"
    )
    local = verdict.root.place.local_rank if verdict.root is not None and case.is_alone else None
    if local is not None:
        place_text = f"local rank {local} of a node that {case.engine.source} doesn't name"
    if not case.is_alone:
        place_text = _describe_place(job, verdict, case.engine)
    return Answers(
        what=_describe_fault(verdict),
        fault_owner=_fault_owner(case),
        category=_describe_category(verdict, case.engine),
        confidence=f"{verdict.confidence}{by}",
        where=place_text,
        code=code,
        source=source,
        retry=case.engine.describe_retry(case.decision),
        retry_reason=f"{case.decision.reason}{_describe_same_end(case)}",
        steps=tuple(find_next_steps(case, _find_shared_code(job, verdict, code))),
        unknown=tuple(list_unknowns(case)),
    )


def _describe_same_end(case: Case) -> str:
    """Return a sentence that the attempt's previous start of the workers ended in the same way, or
    an empty string if that isn't known.
    """
    earlier_restarts = [
        record
        for record in case.job.restarts
        if record.restart and record.kind is RestartKind.ROUND
    ]
    is_unclear = case.decision.action is Action.UNKNOWN and not case.engine.cites
    is_known = UNUSED_RESTARTS in case.decision.reason  # it compares with the start before
    if (
        not earlier_restarts
        or not is_unclear
        or earlier_restarts[-1].headline != case.verdict.headline
        or is_known
    ):
        return ""
    count = sum(
        1
        for _ in itertools.takewhile(
            lambda record: record.headline == case.verdict.headline, earlier_restarts[::-1]
        )
    )
    return f"; the {'start' if count == 1 else f'{count} starts'} before ended in the same way"


def _describe_category(verdict: Verdict, engine: EngineWords) -> str:
    if _has_unproven_preemption(verdict, engine):
        return _ENDED_FROM_OUTSIDE
    meaning = CATEGORIES.get(verdict.category)
    return f"{verdict.category}: {meaning}" if meaning else verdict.category


def _has_unproven_preemption(verdict: Verdict, engine: EngineWords) -> bool:
    """Whether a log shows that a job was ended from outside, but not that it was preempted."""
    return (
        engine.cites
        and verdict.category == "preemption"
        and verdict.code not in {PREEMPTED, REQUEUED}
    )


def _fault_owner(case: Case) -> FaultOwner:
    verdict = case.verdict
    if verdict.code == CANCELLED:
        return FaultOwner.NONE
    if _has_unproven_preemption(verdict, case.engine):
        return FaultOwner.UNKNOWN
    # a person may have aborted a job if all its nodes were terminated
    may_be_aborted = verdict.category == "preemption" and count_terminated_nodes(case.job).are_all
    if verdict.scope is Scope.UNDETERMINED or may_be_aborted:
        return FaultOwner.UNKNOWN
    root = verdict.root
    if root is not None and root.recoverable and root.origin is not Origin.SYSTEM:
        return FaultOwner.TRANSIENT
    if verdict.category == "storage" and root is not None and is_unexplained_write(root):
        return FaultOwner.EITHER
    owner = describe_fault_owner(verdict.category, case.engine)[0]
    is_guess = owner is FaultOwner.CODE and case.engine.cites and not _shows_own_code(verdict)
    return FaultOwner.EITHER if is_guess else owner


def _shows_own_code(verdict: Verdict) -> bool:
    """Whether a log shows that the program failed in its own code: in a frame outside of libraries.

    An error of a GPU appears wherever the program waits for it, and a library or a driver may have
    caused it.
    """
    root = verdict.root
    if root is None or not _find_code(root, verdict.headline)[0]:
        return False
    return (
        verdict.category != "gpu_kernel"
        or "device-side assert triggered" in f"{root.message}\n{root.printed}"
    )


def _describe_fault(verdict: Verdict) -> str:
    if verdict.scope is Scope.UNDETERMINED:
        return verdict.headline
    name, text = split_fault(verdict)
    text = one_line(text, _MAX_LINE_CHARACTERS)
    if verdict.category == "hang" and len(verdict.ranks) == 1 and text.startswith("it was"):
        text = text.replace("it was", f"rank {verdict.ranks[0]} was", 1)
    return f"{name}: {text}" if text else name


def _describe_place(job: JobErrors, verdict: Verdict, engine: EngineWords) -> str:
    if verdict.category in FROM_OUTSIDE and (terminated := count_terminated_nodes(job)).are_all:
        return f"all {terminated.count} {engine.nodes}, the first {verdict.node}"
    if verdict.scope is Scope.UNDETERMINED:
        suspects = [
            name
            for name in dict.fromkeys(item.name for item in verdict.suspects)
            if name != UNNAMED_PROCESS
        ]
        if suspects:
            names = " or ".join(shorten_list(suspects, MAX_LISTED_ITEMS))
            return f"{names.replace('or and ', 'or one of ')} (suspected)"
        return f"{verdict.node}, rank unknown" if verdict.node else "rank unknown"
    if verdict.code in JOB_END_CODES and not verdict.node:
        return "the whole job"
    on = f" on {verdict.node}" if verdict.node else ""
    if (machine := find_machine(job, verdict)) and len(verdict.ranks) <= 1:
        on += f" ({machine})"
    if len(verdict.ranks) > 1 and engine.cites:
        # stamped lines of several ranks don't prove which one was first
        example = (
            f", one of them rank {verdict.root.rank}{on}" if on and verdict.root is not None else ""
        )
        return f"{len(verdict.ranks)} ranks ({format_ranks(verdict.ranks, 60)}){example}"
    if len(verdict.ranks) > 1:
        return f"{len(verdict.ranks)} ranks ({format_ranks(verdict.ranks, 60)}), the first{on}"
    if not verdict.ranks:
        # of a lost node, a log names no agent
        is_node = engine.cites and verdict.category == "node_lost" and bool(on)
        is_agent = (
            verdict.root is not None and verdict.root.subject is Subject.AGENT and not is_node
        )
        # on[4:]: the name without " on " in front of it
        return (
            f"the agent{on}"
            if is_agent and verdict.scope is not Scope.EXTERNAL
            else on[4:] or "unknown"
        )
    local = verdict.root.place.local_rank if verdict.root is not None else None
    return f"rank {verdict.ranks[0]}{'' if local is None else f' (local rank {local})'}{on}"


def _find_code_line(job: JobErrors, verdict: Verdict) -> tuple[str, str]:
    """Return the root cause's place in the program and its line; if undetermined,
    the place that all failures share.
    """
    if verdict.root is not None:
        return _find_code(verdict.root, verdict.headline)
    if verdict.scope is not Scope.UNDETERMINED:
        return "", ""  # a node is at no place in the program
    places = {_find_code(failure) for failure in job.failures}
    return places.pop() if len(places) == 1 else ("", "")


def _find_shared_code(job: JobErrors, verdict: Verdict, code: str) -> str:
    """Return the place in the program that advice may name; if undetermined,
    only one that all failures share.
    """
    places = {_find_code(failure)[0] for failure in job.failures}
    return code if verdict.scope is not Scope.UNDETERMINED or places == {code} else ""


def _find_code(failure: WorkerError, headline: str = "") -> tuple[str, str]:
    """Return the place of the exception, or of the thread that crashed or is in the headline,
    else the main one's.
    """
    threads = (
        thread
        for thread in failure.thread_failures
        if f"thread {thread.thread!r} ended" in headline
    )
    exception = find_ending_exception(failure) or next(
        (thread.exception for thread in threads), None
    )
    if exception is not None and is_raised_by_loader_signal(exception):
        return "", ""  # the line at which the signal arrived explains nothing
    frames = find_own_frames(exception) if exception is not None else ()
    crashed = find_crash_frames(failure)
    # returns the last frame: the innermost frame outside of libraries, or else the crashed frame
    frames = frames or (
        *crashed[:1],
        *(frame for frame in crashed[::-1] if not is_library_file(frame.file)),
    )
    return (
        (format_place(frames[-1]), frames[-1].code)
        if frames
        else (locate_main_thread(failure).frame, "")
    )
