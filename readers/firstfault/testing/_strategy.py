"""The conformance suite for strategies."""
# ruff: noqa: S101 - a suite of tests asserts

from __future__ import annotations

import inspect
import random
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import pytest

from firstfault.model import CATEGORIES, JobErrors, Kind, Scope, SentSignal, Subject, Verdict, Writer
from firstfault.render.plain import flyte_message, markdown
from firstfault.report import report_of
from firstfault.retry import decide
from firstfault.strategies import AggregationStrategy, get_strategy, run_strategy
from firstfault.testing._build import make_error, make_job, make_presence
from firstfault.wire.json_schemas import to_json, verdict_from_json, verdict_to_dict

if TYPE_CHECKING:
    from collections.abc import Callable

_SHUFFLES = 20
_LONGEST_MESSAGE = 16_384
_HOSTILE = "\x1b[2J\r\x00<script>\u202e\U0001f525 \udc80%s{0}\nretry: yes\n"
_STOPPED = (SentSignal("SIGTERM", "stopped because rank 3 failed"),)


def _one_failure() -> JobErrors:
    return make_job(make_error(3, node="worker-1"), roster=(make_presence(node="worker-1", nodes=1),))


def _cascade() -> JobErrors:
    """One cause, two victims by their own exception, one process that its agent stopped."""
    peer = "Connection closed by peer"
    return make_job(
        make_error(3, node="worker-1", at_ms=0, exception="KeyError", message="'label'"),
        make_error(0, node="worker-0", at_ms=31, exception="RuntimeError", message=peer),
        make_error(1, node="worker-0", at_ms=32.5, exception="RuntimeError", message=peer),
        make_error(2, node="worker-1", at_ms=40, exception=None, writer=Writer.AGENT, sent_signals=_STOPPED),
    )


def _same_time() -> JobErrors:
    return make_job(*(make_error(rank, node=f"worker-{rank}", message=f"fault {rank}") for rank in (2, 0, 3, 1)))


def _without_timestamps() -> JobErrors:
    return make_job(*(make_error(rank, at_ms=None, message=f"fault {rank}") for rank in (2, 0, 1)))


def _hostile_strings() -> JobErrors:
    return make_job(
        make_error(0, node=_HOSTILE, exception=_HOSTILE, message=_HOSTILE, code=_HOSTILE, host=_HOSTILE),
        make_error(1, node="n" * 5_000, at_ms=1, exception="E" * 5_000, message="m" * 200_000),
        make_error(2, node="", at_ms=2, exception="", message="", code=""),
        make_error(3, at_ms=3, exception=None, signal=_HOSTILE, exit_code=-9, fingerprint=_HOSTILE),
    )


def _same_rank_twice() -> JobErrors:
    return make_job(
        make_error(5, node="worker-0", at_ms=0, message="mine"),
        make_error(5, node="worker-1", at_ms=0, message="no, mine"),
        make_error(5, node="worker-2", at_ms=1, message="no, mine"),
    )


def _agents_only() -> JobErrors:
    return make_job(
        *(
            make_error(
                None,
                node=f"worker-{number}",
                group_rank=number,
                at_ms=number,
                writer=Writer.AGENT,
                subject=Subject.AGENT,
                exception="torch.distributed.elastic.rendezvous.RendezvousTimeoutError",
            )
            for number in range(3)
        )
    )


def _all_stopped() -> JobErrors:
    return make_job(
        *(
            make_error(rank, at_ms=rank, exception=None, exit_code=-15, signal="SIGTERM", sent_signals=_STOPPED)
            for rank in range(3)
        )
    )


def _stock_files() -> JobErrors:
    return make_job(
        *(
            make_error(None, node="", at_ms=at_ms, exception=None, writer=Writer.STOCK, message="hi", kind=kind)
            for at_ms, kind in ((None, Kind.RECOVERABLE), (None, Kind.NON_RECOVERABLE), (1, Kind.NON_RECOVERABLE))
        )
    )


def _alike() -> JobErrors:
    """Failures without a rank that differ in one field each."""
    return make_job(
        *(
            make_error(None, node=node, at_ms=None, exception=None, writer=Writer.STOCK, code=code, message=message)
            for node in ("worker-0", "worker-1")
            for code in ("USER", "SYSTEM")
            for message in ("a", "b")
        )
    )


def _many_ranks() -> JobErrors:
    return make_job(*(make_error(rank, node=f"worker-{rank // 8}", at_ms=rank % 97) for rank in range(1_000)))


_JOBS: dict[str, Callable[[], JobErrors]] = {
    "one failure": _one_failure,
    "cascade": _cascade,
    "same time": _same_time,
    "without timestamps": _without_timestamps,
    "hostile strings": _hostile_strings,
    "two documents claim the same rank": _same_rank_twice,
    "agents only": _agents_only,
    "all stopped by their agents": _all_stopped,
    "files of Flyte's own": _stock_files,
    "alike": _alike,
    "a thousand ranks": _many_ranks,
}


class StrategyTests:
    """Tests that every strategy must pass. Inherit it and set `strategy`.

    ::

        class TestMine(StrategyTests):
            strategy = "mine"                  # the name of a registered one
            # strategy = staticmethod(mine)    # or the function itself
    """

    strategy: ClassVar[str | AggregationStrategy]
    """The strategy under test: its name, a ``staticmethod`` around a function, or an object that can be called."""

    @pytest.fixture(params=_JOBS)
    def job(self, request: pytest.FixtureRequest) -> JobErrors:
        """The jobs of the tests; override it to add your own."""
        return _JOBS[request.param]()

    def test_returns_a_verdict_with_evidence(self, job: JobErrors) -> None:
        """The strategy returns a Verdict with a known scope and category, and with reasons."""
        verdict = self._under_test()(job)
        assert isinstance(verdict, Verdict)
        assert isinstance(verdict.scope, Scope)
        assert verdict.category in CATEGORIES
        assert verdict.confidence in {"high", "medium", "low"}
        assert verdict.strategy
        assert verdict.why
        assert all(isinstance(sentence, str) and sentence for sentence in verdict.why)
        assert len(verdict.headline.splitlines()) == 1

    def test_does_not_depend_on_the_order_of_failures(self, job: JobErrors) -> None:
        """The verdict is the same for any order of failures."""
        expected = self._said(job)
        shuffler = random.Random(20_170_228)  # noqa: S311 - an order, not a secret
        for _ in range(_SHUFFLES):
            failures = list(job.failures)
            shuffler.shuffle(failures)
            assert self._said(replace(job, failures=tuple(failures))) == expected

    def test_is_deterministic(self, job: JobErrors) -> None:
        """The strategy returns the same verdict twice."""
        assert self._under_test()(job) == self._under_test()(job)

    def test_names_only_what_is_in_the_job(self, job: JobErrors) -> None:
        """The root is one of the job's failures; the verdict's ranks and node are in its failures or its roster."""
        verdict = self._under_test()(job)
        assert verdict.root is None or verdict.root in job.failures
        ranks = {failure.rank for failure in job.failures}.union(*(entry.ranks for entry in job.roster))
        assert set(verdict.ranks) <= ranks
        assert tuple(sorted(set(verdict.ranks))) == verdict.ranks
        nodes = {failure.node for failure in job.failures} | {entry.place.node for entry in job.roster}
        assert verdict.node is None or verdict.node in nodes

    def test_the_root_is_no_victim(self, job: JobErrors) -> None:
        """If there is a root, there are fewer victims than failures."""
        verdict = self._under_test()(job)
        assert 0 <= verdict.victims.count < len(job.failures) + (verdict.root is None)
        assert len(verdict.victims.by_rank) <= verdict.victims.count

    def test_survives_the_round_trip_through_json(self, job: JobErrors) -> None:
        """The verdict survives the round trip through firstfault.verdict/v1, except for its root."""
        verdict = run_strategy(self._under_test(), job)
        again = verdict_from_json(to_json(verdict, decide(verdict)))
        assert again == replace(verdict, root=None)

    def test_can_be_decided_on_and_shown(self, job: JobErrors) -> None:
        """The verdict gives a decision, a bounded ASCII message for Flyte, and Markdown without control characters."""
        verdict = run_strategy(self._under_test(), job)
        decision = decide(verdict)
        report = report_of(job, verdict, decision)
        message = flyte_message(report)
        assert message.isascii()
        assert len(message) < _LONGEST_MESSAGE
        assert "\x1b" not in message + markdown(report)

    def _under_test(self) -> AggregationStrategy:
        # getattr would bind a plain function to the instance
        found = inspect.getattr_static(type(self), "strategy")
        return get_strategy(found.__func__ if isinstance(found, staticmethod) else found)

    def _said(self, job: JobErrors) -> object:
        """Return the verdict without its root, which may be either of two equal failures."""
        return verdict_to_dict(self._under_test()(job))
