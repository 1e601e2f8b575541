"""Runs a strategy on a job, and reads what the strategy declares to need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from firstfault.errors import StrategyError
from firstfault.model import DocumentsNeeded, JobErrors, ReadingNeeds, Verdict
from firstfault.strategies.registry import AggregationStrategy
from firstfault.strategies.verdicts import build_undetermined_verdict

if TYPE_CHECKING:
    from firstfault.evidence.diagnosis import Diagnosis

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
