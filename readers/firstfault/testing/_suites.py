"""Builders of failures, roster entries and jobs with plausible defaults;
the conformance suite that uses them.
"""

# ruff: noqa: S101 - a suite of tests asserts, and its numbers are the expectation

from __future__ import annotations

import dataclasses
import inspect
import itertools
import random
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from firstfault import model
from firstfault.layout import error_key_for
from firstfault.reading.assemble import Snapshot, assemble
from firstfault.render.flyte_message import flyte_message
from firstfault.render.markdown import markdown
from firstfault.report import build_report
from firstfault.retry import decide
from firstfault.strategies import AggregationStrategy, get_strategy, run_strategy
from firstfault.wire.json_schemas import from_json, to_json, verdict_to_dict

START_NS = 1_700_000_000_000_000_000
"""Start of the builders' clock, nanoseconds since the Unix epoch."""
_NS_PER_MS = 1_000_000
_PLACE_FIELDS = frozenset(field.name for field in dataclasses.fields(model.Place))


def make_error(
    rank: int | None = 0,
    *,
    node: str = "worker-0",
    at_ms: float | None = 0,
    exception: str | model.ExceptionInfo | None = "ValueError",
    message: str = "boom",
    **fields: Any,
) -> model.WorkerError:
    """Return a failure of the process with global rank `rank`.

    Args:
        rank: None for a failure without a rank.
        node: its name.
        at_ms: when it was recorded, milliseconds after `START_NS`; None for none.
        exception: the exception's qualified name, a whole record, or None for an end without an
            exception.
        message: of the exception, and of the document.
        fields: any other field of `WorkerError` or of its `Place`.
    """
    place = {name: fields.pop(name) for name in tuple(fields) if name in _PLACE_FIELDS}
    if isinstance(exception, str):
        frame = model.FrameInfo("/job/train.py", 7, "train", "step(batch)")
        exception = model.ExceptionInfo(
            exception,
            message,
            bases=("Exception", "BaseException"),
            frames=(frame,),
        )
    values: dict[str, Any] = {
        "code": "USER",
        "message": message,
        "kind": model.Kind.NON_RECOVERABLE,
        "origin": model.Origin.USER,
        "timestamp_ns": None if at_ms is None else START_NS + int(at_ms * _NS_PER_MS),
        "worker": node,
        "place": model.Place(**{"rank": rank, "node": node, **place}),
        "writer": model.Writer.WORKER,
        "exception": exception,
        **fields,
    }
    error = model.WorkerError(**values)
    if error.documents:
        return error
    return dataclasses.replace(error, documents=(model.DocumentRef(error_key_for(error)),))


def make_presence(
    phase: model.Phase = model.Phase.FAILED,
    *,
    node: str = "worker-0",
    group_rank: int = 0,
    nodes: int = 1,
    **fields: Any,
) -> model.NodePresence:
    """Return the roster entry of a node in a round of `nodes` nodes.

    `fields` are any other fields of `NodePresence` or of its `Place`.
    """
    place = {name: fields.pop(name) for name in tuple(fields) if name in _PLACE_FIELDS}
    where = model.Place(
        **{"node": node, "group_rank": group_rank, "group_world_size": nodes, **place}
    )
    return model.NodePresence(phase, where, **{"timestamp_ns": START_NS, **fields})


def make_job(*failures: model.WorkerError, **snapshot: Any) -> model.JobErrors:
    """Return the job that a reader assembles from these failures;
    `snapshot` are other fields of `Snapshot`.
    """
    return assemble(Snapshot(documents=failures, **snapshot))


# --- the suite ------------------------------------------------------------------------------------

_SHUFFLES = 10
_MAX_MESSAGE_CHARACTERS = 16_384
_HOSTILE = "\x1b[2J\r\x00<script>\u202e\U0001f525 \udc80%s{0}\nretry: yes\n"
_STOPPED = (model.SentSignal("SIGTERM", "stopped because rank 3 failed"),)
_PEER = "Connection closed by peer"
_NO_RENDEZVOUS = "torch.distributed.elastic.rendezvous.RendezvousTimeoutError"
_AGENT: dict[str, Any] = {
    "writer": model.Writer.AGENT,
    "subject": model.Subject.AGENT,
    "exception": _NO_RENDEZVOUS,
}
_ENDED: dict[str, Any] = {
    "exception": None,
    "exit_code": -15,
    "signal": "SIGTERM",
    "sent_signals": _STOPPED,
}
_STOCK: dict[str, Any] = {"rank": None, "exception": None, "writer": model.Writer.STOCK}
_JOBS: dict[str, model.JobErrors] = {
    "one failure": make_job(
        make_error(3, node="worker-1"), roster=(make_presence(node="worker-1", nodes=1),)
    ),
    "one cause, two victims, and a process that its agent stopped": make_job(
        make_error(3, node="worker-1", at_ms=0, exception="KeyError", message="'label'"),
        make_error(0, node="worker-0", at_ms=31, exception="RuntimeError", message=_PEER),
        make_error(1, node="worker-0", at_ms=32.5, exception="RuntimeError", message=_PEER),
        make_error(
            2,
            node="worker-1",
            at_ms=40,
            exception=None,
            writer=model.Writer.AGENT,
            sent_signals=_STOPPED,
        ),
    ),
    "same time": make_job(
        *(make_error(rank, node=f"worker-{rank}", message=f"fault {rank}") for rank in (2, 0, 3, 1))
    ),
    "without timestamps": make_job(
        *(make_error(rank, at_ms=None, message=f"fault {rank}") for rank in (2, 0, 1))
    ),
    "hostile strings": make_job(
        make_error(
            0,
            node=_HOSTILE,
            exception=_HOSTILE,
            message=_HOSTILE,
            code=_HOSTILE,
            host=_HOSTILE,
        ),
        make_error(1, node="n" * 5_000, at_ms=1, exception="E" * 5_000, message="m" * 200_000),
        make_error(2, node="", at_ms=2, exception="", message="", code=""),
        make_error(3, at_ms=3, exception=None, signal=_HOSTILE, exit_code=-9, fingerprint=_HOSTILE),
    ),
    "three nodes claim the same rank": make_job(
        *(
            make_error(5, node=f"worker-{node}", at_ms=node // 2, message=f"claim {node}")
            for node in range(3)
        )
    ),
    "agents only": make_job(
        *(
            make_error(None, node=f"worker-{node}", group_rank=node, at_ms=node, **_AGENT)
            for node in range(3)
        )
    ),
    "all stopped by their agents": make_job(
        *(make_error(rank, at_ms=rank, **_ENDED) for rank in range(3))
    ),
    "files of Flyte's own": make_job(
        make_error(node="", at_ms=None, message="hi", kind=model.Kind.RECOVERABLE, **_STOCK),
        make_error(node="", at_ms=None, message="hi", **_STOCK),
        make_error(node="", at_ms=1, message="hi", **_STOCK),
    ),
    "without ranks, and different in one field each": make_job(
        *(
            make_error(node=node, at_ms=None, code=code, message=message, **_STOCK)
            for node, code, message in itertools.product(
                ("worker-0", "worker-1"), ("USER", "SYSTEM"), ("a", "b")
            )
        )
    ),
    "many ranks": make_job(
        *(make_error(rank, node=f"worker-{rank // 8}", at_ms=rank % 97) for rank in range(256))
    ),
}


class StrategyTests:
    """Tests that every strategy must pass. Inherit it and set `strategy`.

    ::

        class TestMine(StrategyTests):
            strategy = "mine"                  # the name of a registered one
            # strategy = staticmethod(mine)    # or the function itself
    """

    strategy: ClassVar[str | AggregationStrategy]
    """The strategy under test: its name, a ``staticmethod`` around a function,
    or an object that can be called.
    """

    @pytest.fixture(params=_JOBS)
    def job(self, request: pytest.FixtureRequest) -> model.JobErrors:
        """The jobs of the tests; override it to add your own."""
        return _JOBS[request.param]

    def test_returns_a_verdict_with_evidence(self, job: model.JobErrors) -> None:
        """The strategy returns a Verdict with a known scope and category, and with reasons."""
        verdict = self._under_test()(job)
        assert isinstance(verdict, model.Verdict)
        assert isinstance(verdict.scope, model.Scope)
        assert verdict.category in model.CATEGORIES
        assert verdict.confidence in {"high", "medium", "low"}
        assert verdict.strategy
        assert verdict.why
        assert all(isinstance(sentence, str) and sentence for sentence in verdict.why)
        assert len(verdict.headline.splitlines()) == 1

    def test_does_not_depend_on_the_order_of_failures(self, job: model.JobErrors) -> None:
        """The verdict is the same for any order of failures, and when it is asked for twice."""
        expected = self._without_root(job)
        shuffler = random.Random(20_170_228)  # noqa: S311 - an order, not a secret
        for _ in range(_SHUFFLES):
            failures = list(job.failures)
            shuffler.shuffle(failures)
            assert self._without_root(replace(job, failures=tuple(failures))) == expected
        assert self._under_test()(job) == self._under_test()(job)

    def test_names_only_what_is_in_the_job(self, job: model.JobErrors) -> None:
        """The root is one of the job's failures; the verdict's ranks and node are in its
        failures or its roster.
        """
        verdict = self._under_test()(job)
        assert verdict.root is None or verdict.root in job.failures
        ranks = {failure.rank for failure in job.failures}.union(
            *(entry.ranks for entry in job.roster)
        )
        assert set(verdict.ranks) <= ranks
        assert tuple(sorted(set(verdict.ranks))) == verdict.ranks
        nodes = {failure.node for failure in job.failures} | {
            entry.place.node for entry in job.roster
        }
        assert verdict.node is None or verdict.node in nodes

    def test_the_root_is_no_victim(self, job: model.JobErrors) -> None:
        """If there is a root, there are fewer victims than failures."""
        verdict = self._under_test()(job)
        assert 0 <= verdict.victims.count < len(job.failures) + (verdict.root is None)
        assert len(verdict.victims.by_rank) <= verdict.victims.count

    def test_survives_the_round_trip_through_json(self, job: model.JobErrors) -> None:
        """The verdict survives the round trip through firstfault.verdict/v1,
        except for its root.
        """
        verdict = run_strategy(self._under_test(), job)
        decision = decide(verdict)
        assert from_json(to_json(verdict, decision)) == (replace(verdict, root=None), decision)

    def test_can_be_decided_on_and_shown(self, job: model.JobErrors) -> None:
        """The verdict gives a decision, a bounded ASCII message for Flyte,
        and Markdown without control characters.
        """
        verdict = run_strategy(self._under_test(), job)
        decision = decide(verdict)
        report = build_report(job, verdict, decision)
        message = flyte_message(report)
        assert message.isascii()
        assert len(message) < _MAX_MESSAGE_CHARACTERS
        assert "\x1b" not in message + markdown(report)

    def _under_test(self) -> AggregationStrategy:
        # getattr would bind a plain function to the instance
        strategy = inspect.getattr_static(type(self), "strategy")
        return get_strategy(strategy.__func__ if isinstance(strategy, staticmethod) else strategy)

    def _without_root(self, job: model.JobErrors) -> object:
        """Return the verdict without its root, which may be either of two equal failures."""
        return verdict_to_dict(self._under_test()(job))
