"""Strategies: they find the one root cause in everything that was read about an attempt.

A strategy is a callable that takes a `JobErrors` and returns a `Verdict`; a plain function will do. Register it with
`register_strategy`, or in the entry-point group ``firstfault.strategies`` of your distribution. Imports `evidence`,
`exceptions` and `model`, never storage.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from firstfault.errors import StrategyError, UnknownStrategyError
from firstfault.evidence.texts import message_of
from firstfault.exceptions.fingerprint import fingerprint_of
from firstfault.exceptions.stack_position import where_it_stood
from firstfault.model import (
    TIME_LIMIT,
    JobErrors,
    Origin,
    Reads as Reads,
    Reason,
    Scope,
    Subject,
    Verdict,
    Victims,
    WorkerError,
    Writer,
)
from firstfault.model.failure import CTRL_C, FROM_OUTSIDE, OF_LOGS, explain_end
from firstfault.utils.text import one_line, sentence_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from firstfault.evidence.diagnosis import Diagnosis


ENTRY_POINT_GROUP = "firstfault.strategies"
DEFAULT_STRATEGY = "evidence"

_BUILT_IN = {
    "evidence": "firstfault.strategies.rules:evidence",
    "earliest": "firstfault.strategies.earliest:earliest",
}


@runtime_checkable
class AggregationStrategy(Protocol):
    """Finds the root cause. Pure: the same `JobErrors` gives the same `Verdict`, in any order of its failures."""

    def __call__(self, job: JobErrors, /) -> Verdict:
        """Return the verdict on an attempt with at least one failure."""


_ATTRIBUTE = "firstfault_reads"
_DIAGNOSIS = "firstfault_takes_diagnosis"
_S = TypeVar("_S", bound=Callable[..., Any])


def reads(what: Reads, named: Callable[[JobErrors], Iterable[int]] | None = None) -> Callable[[_S], _S]:
    """Decorate a strategy that does not need every document; those that were not opened are in `JobErrors.unopened`.

    For `Reads.GROUPS`, `named` returns the ranks whose documents are needed too, from those read so far.
    """

    def mark(strategy: _S) -> _S:
        setattr(strategy, _ATTRIBUTE, (what, named))
        return strategy

    return mark


def reads_of(strategy: AggregationStrategy) -> tuple[Reads, Callable[[JobErrors], Iterable[int]] | None]:
    """Return the arguments of the strategy's `reads`."""
    found: tuple[Reads, Callable[[JobErrors], Iterable[int]] | None] = getattr(strategy, _ATTRIBUTE, (Reads.ALL, None))
    return found


_registered: dict[str, AggregationStrategy] = {}


def register_strategy(name: str, strategy: AggregationStrategy) -> AggregationStrategy:
    """Register `strategy` as `name` in this process, and return it.

    Raises:
        StrategyError: the name is taken or not a word, or `strategy` cannot be called with one argument.
    """
    if not name.isidentifier():
        raise StrategyError(f"a strategy's name must be a word of letters, digits and _, not {name!r}")
    if name in _registered or name in _BUILT_IN:
        raise StrategyError(f"there is a strategy {name!r} already; choose another name")
    _validate(name, strategy, "register_strategy")
    _registered[name] = strategy
    return strategy


def unregister_strategy(name: str) -> None:
    """Remove a strategy that was registered at run time, if there is one of this name."""
    _registered.pop(name, None)


def strategy_names() -> tuple[str, ...]:
    """Return the names of all strategies, built-in ones first."""
    installed = [point.name for point in _entry_points()]
    return tuple(dict.fromkeys([*_BUILT_IN, *_registered, *sorted(installed)]))


def get_strategy(strategy: str | AggregationStrategy) -> AggregationStrategy:
    """Return the strategy of this name; a callable is checked and returned.

    Raises:
        UnknownStrategyError: no strategy has this name.
        StrategyError: it cannot be loaded, or is not a strategy; the text names its distribution.
    """
    if not isinstance(strategy, str):
        _validate(getattr(strategy, "__name__", repr(strategy)), strategy, "the caller")
        return strategy
    if strategy in _registered:
        return _registered[strategy]
    if strategy in _BUILT_IN:
        module, _, attribute = _BUILT_IN[strategy].partition(":")
        built_in: AggregationStrategy = getattr(importlib.import_module(module), attribute)
        return built_in
    return _from_entry_point(strategy)


def takes_diagnosis(strategy: _S) -> _S:
    """Decorate a strategy that takes the job's `Diagnosis` as its second argument."""
    setattr(strategy, _DIAGNOSIS, True)
    return strategy


def run_strategy(strategy: AggregationStrategy, job: JobErrors, diagnosis: Diagnosis | None = None) -> Verdict:
    """Return the strategy's verdict on `job`, with coverage and digest filled in from `job`.

    A job without a readable failure is undetermined. A strategy that `takes_diagnosis` gets the one of `job`.

    Raises:
        StrategyError: it raised, or did not return a Verdict.
    """
    if not job.failures:
        return undetermined(job, getattr(strategy, "__name__", "none"))
    name = getattr(strategy, "__name__", repr(strategy))
    try:
        verdict = strategy(job, diagnosis) if getattr(strategy, _DIAGNOSIS, False) else strategy(job)  # type: ignore[call-arg]
    except Exception as error:  # a strategy is third-party code; its caller gets one type of error
        raise StrategyError(f"the strategy {name} raised {type(error).__name__}: {error}") from error
    if not isinstance(verdict, Verdict):
        raise StrategyError(f"the strategy {name} returned {type(verdict).__name__}; it must return a Verdict")
    return replace(
        verdict,
        coverage=job.coverage,
        settled=job.settled,
        digest=job.digest,
        document_count=job.document_count,
    )


def _entry_points() -> tuple[EntryPoint, ...]:
    import importlib.metadata  # noqa: PLC0415 - slow, and not needed for built-in strategies

    return tuple(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))


def _from_entry_point(name: str) -> AggregationStrategy:
    points = [point for point in _entry_points() if point.name == name]
    if not points:
        raise UnknownStrategyError(f"there is no strategy {name!r}; known are {', '.join(strategy_names())}")
    if len(points) > 1:
        owners = ", ".join(sorted(_owner(point) for point in points))
        raise StrategyError(
            f"the strategy {name!r} is offered by several distributions ({owners}); uninstall all but one"
        )
    point = points[0]
    try:
        loaded = point.load()
    except Exception as error:  # a module of another distribution may raise anything when it is imported
        raise StrategyError(f"the strategy {name!r} of {_owner(point)} cannot be loaded: {error}") from error
    _validate(name, loaded, _owner(point))
    found: AggregationStrategy = loaded
    return found


def _owner(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def _validate(name: str, strategy: object, owner: str) -> None:
    if not callable(strategy) or inspect.isclass(strategy):
        raise StrategyError(f"the strategy {name!r} of {owner} must be callable with a JobErrors; {strategy!r} is not")
    try:
        signature = inspect.signature(strategy)
    except (TypeError, ValueError):
        return  # a builtin without a signature: running it will tell
    try:
        signature.bind(None)
    except TypeError as error:
        raise StrategyError(f"the strategy {name!r} of {owner} must take one argument, a JobErrors: {error}") from error
    if inspect.iscoroutinefunction(strategy):
        raise StrategyError(f"the strategy {name!r} of {owner} must be a plain function; it decides, it does no I/O")


# --- building a verdict -----------------------------------------------------------------------------------------------

_MAX_VICTIMS = 100
_MAX_SOURCES = 8
HEADLINE = 160
"""Characters of a headline at most."""
_INTERRUPTED = {"KeyboardInterrupt", "SIGINT", "exit code 130"}
"""How a process ends by SIGINT: the last one is a shell's exit code."""
_NO_CODE = {"", "USER:RuntimeError"}
"""What an engine gives a failure that has no code of its own."""


def candidates(job: JobErrors) -> tuple[WorkerError, ...]:
    """Return the failures that can be a root cause: without processes that their own agent stopped, if others exist.

    A process that was stopped while an exception was in flight counts as stopped, unless it raised that exception
    before any other failure: later exceptions may be caused by the failure for which the agent stopped its workers.
    """
    raised = tuple(failure for failure in job.failures if not failure.stopped_by_agent)
    caught = {id(item) for item in raised if item.in_flight and item.exception is not None and item.sent_signals}
    others = [failure for failure in raised if id(failure) not in caught]
    began_ns = min((failure.timestamp_ns for failure in others if failure.timestamp_ns is not None), default=0)
    early = {id(item) for item in raised if item.timestamp_ns is not None and item.timestamp_ns < began_ns}
    stopped = caught - early
    own = tuple(failure for failure in raised if id(failure) not in stopped)
    return (own if others else raised) or job.failures


def verdict_for(  # noqa: PLR0913 - the parts of a verdict
    job: JobErrors,
    root: WorkerError,
    *,
    strategy: str,
    why: Iterable[str | Reason],
    confidence: str,
    same: Sequence[WorkerError] = (),
) -> Verdict:
    """Return the verdict that `root` is the root cause.

    Args:
        job: what was read.
        root: one of its failures.
        strategy: the strategy's name, also that of the verdict's rule.
        why: sentences a person can check, each with the failures it rests on if it is a `Reason`.
        confidence: "high", "medium" or "low".
        same: failures with the same fault as `root`, `root` included, if several ranks have it; else empty. Ranks with
            this fault whose documents were not opened are added if every opened document with it is in `same`.
    """
    own = {id(failure) for failure in same}
    reasons = [Reason(reason) if isinstance(reason, str) else reason for reason in why]
    # if an opened document with this fault is not in `same`, an unopened one may not belong there either
    all_are = all(id(failure) in own for failure in job.failures if failure.fingerprint == root.fingerprint)
    alike = job.unopened_like(root.fingerprint) if same and all_are else ()
    ranks = tuple(sorted({failure.rank for failure in (same or [root]) if failure.rank is not None} | set(alike)))
    has_code = root.code not in _NO_CODE or root.writer is Writer.STOCK
    return replace(
        undetermined(job, strategy),
        scope=_scope(root, ranks),
        ranks=ranks,
        node=root.node or None,
        # else the exception's short name, the signal, or "ExitCode7"
        code=root.code if has_code else message_of(root).what.replace("exit code ", "ExitCode"),
        category=category_of(root),
        fingerprint=root.fingerprint or fingerprint_of(root),
        headline=headline_of(root, ranks),
        message=root.message,
        timestamp_ns=root.timestamp_ns,
        confidence=confidence,
        rule=strategy,
        why=tuple(reason.text for reason in reasons),
        sources=sources_of(reasons),
        victims=victims_of(job, root, same),
        root=root,
    )


def sources_of(reasons: Iterable[Reason]) -> tuple[tuple[str, ...], ...]:
    """Return for each reason the names of the documents it rests on, at most 8."""
    return tuple(
        tuple(ref.name for failure in reason.failures[:_MAX_SOURCES] for ref in failure.documents)[:_MAX_SOURCES]
        for reason in reasons
    )


def undetermined(job: JobErrors, strategy: str) -> Verdict:
    """Return the verdict on an attempt whose failures could not be read."""
    why = "a node reported a failure, but its error documents are missing"
    if job.coverage.unreadable:
        why = f"none of {job.coverage.unreadable} error documents could be read"
    return Verdict(
        scope=Scope.UNDETERMINED,
        code="ErrorFileBadFormat",
        category="unknown",
        headline=f"undetermined: {why}",
        message="\n".join(job.coverage.notes) or "no error document could be read",
        strategy=strategy,
        rule="undetermined",
        confidence="low",
        coverage=job.coverage,
        settled=job.settled,
        digest=job.digest,
        document_count=job.document_count,
    )


def category_of(failure: WorkerError) -> str:
    """Return the category that the writer claims, else the one of the exception, the signal or the exit code."""
    if failure.category:
        return failure.category
    if failure.recoverable and failure.origin is not Origin.SYSTEM:
        return "recoverable"
    if failure.stopped_by_agent:
        return "stopped"
    if message_of(failure).what in _INTERRUPTED:
        return "interrupted"
    if failure.exception is not None:
        return "user_code"
    if failure.signal:
        return "signal"
    if failure.exit_code is not None:
        return "exit"
    if failure.writer is Writer.STOCK:
        return "infrastructure" if failure.origin is Origin.SYSTEM else "user_code"
    return "unknown"


def who(failure: WorkerError) -> str:
    """Name a failure's process: "rank 3 on worker-1", "the agent of worker-1", "worker-1"."""
    node = failure.node
    if failure.rank is not None:
        return f"rank {failure.rank} on {node}" if node else f"rank {failure.rank}"
    if failure.subject is Subject.AGENT:
        return f"the agent of {node}" if node else "an agent"
    return node or "a worker without a name"


def headline_of(root: WorkerError, ranks: Sequence[int] = (), more: str = "") -> str:
    """One line: what, who, and the first line of its message; `more` follows who."""
    subject = (f"ranks {listed(ranks)}" if len(ranks) > 1 else who(root)) + more
    text = sentence_about(root)
    category, what = category_of(root), message_of(root).what
    if category == "preemption":
        what = "terminated"
    if category == "interrupted":
        what = f"interrupted ({'Ctrl-C, SIGINT' if root.code == CTRL_C else what})"
        subject, text = (root.node, "") if root.subject is Subject.AGENT and root.node else (subject, text)
    if root.code == TIME_LIMIT:
        what = "time limit"
    headline = f"{what}, {subject}" + (f": {text}" if text and text != what else "")
    return one_line(headline, HEADLINE)


def sentence_about(root: WorkerError) -> str:
    """Return what happened to a process, without its name; empty: not known."""
    said = message_of(root).with_wrapper
    if said:
        return said
    if root.subject is Subject.AGENT:
        return sentence_of(root.message)
    if root.expired is not None:
        at = where_it_stood(root).frame
        return f"{root.expired.text} at {at}" if at else root.expired.text
    is_stopped = root.sent_signals and not root.crashed_while_stopped
    if (root.signal and not is_stopped) or (root.exit_code is not None and not root.signal):
        return explain_end(root)
    # flytekit's texts start with ``Trace:`` and carry the sentence after ``Message:``
    _, found, tail = root.message.rpartition("\nMessage:")
    text = sentence_of(tail if found else root.message)
    if not text.endswith("error="):
        return text
    # flytekit puts torch's box after an empty line; the last line of the box is the exception's
    lines = [line.strip() for line in tail.splitlines() if line.strip(" =-")]
    return sentence_of(lines[-1])


def listed(ranks: Sequence[int], count: int | None = None) -> str:
    """Return at most 8 ranks as a text; `count` tells how many there are, if it is not their length."""
    shown = ranks[:8]  # as many as fit a line
    more = (len(ranks) if count is None else count) - len(shown)
    return ", ".join(map(str, shown)) + (f" and {more} more" if more > 0 else "")


def _scope(root: WorkerError, ranks: Sequence[int]) -> Scope:
    if root.category == "preemption" or (root.category in FROM_OUTSIDE and root.subject is Subject.AGENT):
        return Scope.EXTERNAL
    if len(ranks) > 1:
        return Scope.RANKS
    if ranks:
        return Scope.RANK
    return Scope.NODE if root.node else Scope.UNDETERMINED


def victims_of(job: JobErrors, root: WorkerError | None, same: Sequence[WorkerError] = ()) -> Victims:
    """Return all other failures, without those that have the root cause's fault and were not stopped by an agent."""
    fingerprint = root.fingerprint if root is not None else ""
    own = {id(root), *(id(failure) for failure in same)}
    victims = [
        failure
        for failure in job.failures
        if id(failure) not in own
        and (failure.stopped_by_agent or not fingerprint or failure.fingerprint != fingerprint)
    ]
    by_rank: dict[int, list[WorkerError]] = {}
    for failure in victims:
        if failure.rank is not None:
            by_rank.setdefault(failure.rank, []).append(failure)
    # two nodes may claim the same rank
    lines = [(rank, "; ".join(sorted(map(_line, by_rank[rank])))) for rank in sorted(by_rank)[:_MAX_VICTIMS]]
    return Victims(count=len(victims) + job.unopened_elsewhere(fingerprint), by_rank=tuple(lines))


def _line(failure: WorkerError) -> str:
    if failure.stopped_by_agent:
        sent = failure.sent_signals[0]
        by = "launcher" if failure.place.engine == OF_LOGS else "agent"
        return one_line(f"stopped by its {by} ({sent.signal}): {sent.reason}")
    said = message_of(failure)
    text = one_line(said.text or (failure.message if failure.exception is None else ""), 120)
    return one_line(f"{said.what}: {text}" if text else said.what)
