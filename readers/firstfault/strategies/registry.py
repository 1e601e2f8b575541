"""The registry of strategies: built in, registered at run time, or installed as entry points.
Runs a strategy on a job, and reads what the strategy declares to need.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from firstfault.errors import FirstFaultError, StrategyError, UnknownStrategyError
from firstfault.model import DocumentsNeeded, JobErrors, ReadingNeeds, Seal, Verdict
from firstfault.strategies.verdicts import build_undetermined_verdict

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from firstfault.evidence.diagnosis import Diagnosis


ENTRY_POINT_GROUP = "firstfault.strategies"
DEFAULT_STRATEGY = "evidence"

BUILT_IN_STRATEGIES = {
    "evidence": "firstfault.strategies.rules:evidence",
    "earliest": "firstfault.strategies.earliest:earliest",
}
"""Module and function of each, imported on first use."""


@runtime_checkable
class AggregationStrategy(Protocol):
    """Finds the root cause. Pure: the same `JobErrors` gives the same `Verdict`,
    whatever the order of its failures.
    """

    def __call__(self, job: JobErrors, /) -> Verdict:
        """Return the verdict on an attempt with at least one failure."""


_registered: dict[str, AggregationStrategy] = {}


def register_strategy(name: str, strategy: AggregationStrategy) -> AggregationStrategy:
    """Register a strategy in this process, and return it.

    Raises:
        StrategyError: the name is taken or not a word, or `strategy` can't be called with one
            argument.
    """
    if not name.isidentifier():
        raise StrategyError(
            f"a strategy's name must be a word of letters, digits and _, not {name!r}"
        )
    if name in _registered or name in BUILT_IN_STRATEGIES:
        raise StrategyError(f"there is a strategy {name!r} already; choose another name")
    _validate(name, strategy, "register_strategy")
    _registered[name] = strategy
    return strategy


def unregister_strategy(name: str) -> None:
    """Remove a strategy that was registered at run time; no-op if there is none."""
    _registered.pop(name, None)


def list_strategy_names() -> tuple[str, ...]:
    """Return the names of all strategies, built-in ones first."""
    installed = [point.name for point in _find_entry_points()]
    return tuple(dict.fromkeys([*BUILT_IN_STRATEGIES, *_registered, *sorted(installed)]))


def get_strategy(strategy: str | AggregationStrategy) -> AggregationStrategy:
    """Return the strategy with this name. A callable is checked and returned.

    Raises:
        UnknownStrategyError: no strategy has this name.
        StrategyError: it can't be loaded, or isn't a strategy. The text names its distribution.
    """
    if not isinstance(strategy, str):
        _validate(getattr(strategy, "__name__", repr(strategy)), strategy, "the caller")
        return strategy
    # names registered in this process come first, then built-in ones, then entry points, which are
    # slow to list
    if strategy in _registered:
        return _registered[strategy]
    if strategy in BUILT_IN_STRATEGIES:
        module, _, attribute = BUILT_IN_STRATEGIES[strategy].partition(":")
        built_in: AggregationStrategy = getattr(importlib.import_module(module), attribute)
        return built_in
    return _load_entry_point(strategy)


def find_sealed_strategy(seals: Sequence[Seal]) -> AggregationStrategy:
    """Return the strategy of a sealed verdict if it can be loaded here,
    else the default strategy.
    """
    for seal in sorted(seals, key=lambda seal: seal.order):
        try:
            return get_strategy(seal.strategy)
        except FirstFaultError:
            continue  # a plug-in of the pods' image, which isn't installed here or doesn't load
    return get_strategy(DEFAULT_STRATEGY)


def _find_entry_points() -> tuple[EntryPoint, ...]:
    import importlib.metadata  # noqa: PLC0415 - slow, and not needed for built-in strategies

    return tuple(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))


def _load_entry_point(name: str) -> AggregationStrategy:
    points = [point for point in _find_entry_points() if point.name == name]
    if not points:
        raise UnknownStrategyError(
            f"unknown strategy {name!r}; available: {', '.join(list_strategy_names())}"
        )
    # picking one of them would make verdicts depend on the order of installation
    if len(points) > 1:
        owners = ", ".join(sorted(_name_origin(point) for point in points))
        raise StrategyError(
            f"the strategy {name!r} is offered by several distributions ({owners}); uninstall all"
            " but one"
        )
    point = points[0]
    try:
        loaded = point.load()
    except (
        Exception
    ) as error:  # a module of another distribution may raise anything when it is imported
        raise StrategyError(
            f"the strategy {name!r} of {_name_origin(point)} cannot be loaded: {error}"
        ) from error
    _validate(name, loaded, _name_origin(point))
    installed: AggregationStrategy = loaded
    return installed


def _name_origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def _validate(name: str, strategy: object, owner: str) -> None:
    # a class is callable, too, but calling it returns an instance, not a verdict
    if not callable(strategy) or inspect.isclass(strategy):
        raise StrategyError(
            f"the strategy {name!r} of {owner} must be callable with a JobErrors; {strategy!r}"
            " is not"
        )
    try:
        signature = inspect.signature(strategy)
    except (TypeError, ValueError):
        return  # a builtin without a signature: if it isn't a strategy, running it raises
    try:
        signature.bind(None)
    except TypeError as error:
        raise StrategyError(
            f"the strategy {name!r} of {owner} must take one argument, a JobErrors: {error}"
        ) from error
    if inspect.iscoroutinefunction(strategy):
        raise StrategyError(
            f"the strategy {name!r} of {owner} must be a plain function; it decides, it does no I/O"
        )


_READING_NEEDS_ATTRIBUTE = "firstfault_reading_needs"
_TAKES_DIAGNOSIS_ATTRIBUTE = "firstfault_takes_diagnosis"
_Strategy = TypeVar("_Strategy", bound=Callable[..., Any])


def needs_documents(
    documents: DocumentsNeeded, find_more_ranks: Callable[[JobErrors], Iterable[int]] | None = None
) -> Callable[[_Strategy], _Strategy]:
    """Decorate a strategy that can do without some documents. `JobErrors.unopened`
    counts the unread ones.

    Args:
        documents: how many it needs.
        find_more_ranks: see `ReadingNeeds.find_more_ranks`.
    """

    def decorate(strategy: _Strategy) -> _Strategy:
        setattr(strategy, _READING_NEEDS_ATTRIBUTE, ReadingNeeds(documents, find_more_ranks))
        return strategy

    return decorate


def get_reading_needs(strategy: AggregationStrategy) -> ReadingNeeds:
    """Return what the strategy declared with `needs_documents`;
    by default it needs every document.
    """
    needs: ReadingNeeds = getattr(strategy, _READING_NEEDS_ATTRIBUTE, ReadingNeeds())
    return needs


def takes_diagnosis(strategy: _Strategy) -> _Strategy:
    """Decorate a strategy that takes the job's `Diagnosis` as its second argument."""
    setattr(strategy, _TAKES_DIAGNOSIS_ATTRIBUTE, True)
    return strategy


def run_strategy(
    strategy: AggregationStrategy, job: JobErrors, diagnosis: Diagnosis | None = None
) -> Verdict:
    """Return the strategy's verdict on a job, with the job's coverage and digest.

    Without a readable failure the verdict is undetermined, and the strategy isn't called.

    Args:
        strategy: the strategy.
        job: what was read.
        diagnosis: the diagnosis of `job`, for a strategy that `takes_diagnosis`. With None it
            computes its own.

    Raises:
        StrategyError: the strategy raised, or didn't return a Verdict.
    """
    # strategies may take `job.failures[0]` without a check
    if not job.failures:
        return build_undetermined_verdict(job, getattr(strategy, "__name__", "none"))
    name = getattr(strategy, "__name__", repr(strategy))
    try:
        verdict = (
            strategy(job, diagnosis)  # type: ignore[call-arg]
            if getattr(strategy, _TAKES_DIAGNOSIS_ATTRIBUTE, False)
            else strategy(job)
        )
    except Exception as error:  # a strategy is third-party code, so it may raise anything
        raise StrategyError(
            f"the strategy {name} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(verdict, Verdict):
        raise StrategyError(
            f"the strategy {name} returned {type(verdict).__name__}; it must return a Verdict"
        )
    # whatever the strategy filled in, these fields describe what was read
    return replace(
        verdict,
        coverage=job.coverage,
        settled=job.settled,
        digest=job.digest,
        document_count=job.document_count,
    )
