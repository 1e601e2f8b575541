"""Strategies: they find the one root cause in everything that was read about an attempt.

A strategy is a callable that takes a `JobErrors` and returns a `Verdict`; a plain function will do. Register it with
`register_strategy`, or in the entry-point group ``firstfault.strategies`` of your distribution. Imports `evidence`,
`exceptions` and `model`, never storage.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from firstfault.errors import StrategyError, UnknownStrategyError
from firstfault.model import JobErrors, Reads, Verdict
from firstfault.strategies._verdict import sources_of, undetermined, verdict_for, who

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from firstfault.evidence.diagnosis import Diagnosis

__all__ = [
    "DEFAULT_STRATEGY",
    "AggregationStrategy",
    "Reads",
    "get_strategy",
    "reads",
    "reads_of",
    "register_strategy",
    "run_strategy",
    "sources_of",
    "strategy_names",
    "undetermined",
    "unregister_strategy",
    "verdict_for",
    "who",
]

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
        ...


_ATTRIBUTE = "firstfault_reads"
_DIAGNOSIS = "firstfault_takes_diagnosis"
_S = TypeVar("_S", bound=Callable[..., Any])


def reads(what: Reads, named: Callable[[JobErrors], Iterable[int]] | None = None) -> Callable[[_S], _S]:
    """Decorate a strategy that does not need every document.

    The documents that were not opened are in `JobErrors.unopened`.

    Args:
        what: how much the strategy reads.
        named: for `Reads.GROUPS`: returns the ranks whose documents are needed too, from those read so far.
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
