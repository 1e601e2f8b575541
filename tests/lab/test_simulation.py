"""A small part of ``make simulation``, and tests of the simulation itself."""

import pytest

from firstfault.reading.assemble import assemble
from firstfault.strategies import get_strategy, run_strategy
from lab.cascades.making import Rules, cascades
from lab.cascades.replay import last_written
from lab.cascades.simulation import judge, measure, simulate

_FEW = Rules(workers=128)


@pytest.mark.slow
def test_evidence_holds_when_documents_are_late_missing_and_wrong() -> None:
    """In simulated cascades of 128 workers the verdict is right,
    or undetermined if the root left no document.
    """
    tallies, _ = simulate(_FEW, range(10))

    ours, earliest = tallies["evidence"], tallies["earliest"]
    total = ours.total()
    assert total["right"] + total["honest"] == 10, ours.outcomes
    assert ours.sure_and_wrong == 0
    assert earliest.total()["right"] < 5, "the simulation is too easy"


def test_a_wrong_verdict_is_called_wrong() -> None:
    """The judge calls a verdict that names another rank wrong."""
    (cascade,) = cascades(Rules(workers=64, root_missing=0, late=0, unreadable=0, two_roots=0), [3])
    job = assemble(cascade.snapshot, expected_nodes=8)
    assert judge(cascade, run_strategy(get_strategy("evidence"), job)) == "right"
    victims = [
        failure
        for failure in job.failures
        if failure.rank not in {root.rank for root in cascade.roots}
    ]
    other = assemble(type(cascade.snapshot)(tuple(victims[:1])), expected_nodes=8)
    assert judge(cascade, run_strategy(last_written, other)) == "wrong"


@pytest.mark.timing
def test_a_verdict_on_1000_workers_stays_within_time_and_memory() -> None:
    """A verdict on 1,000 workers stays within its limits of time and memory,
    in a process that does nothing else.
    """
    seconds, megabytes = _figures(measure(1024))
    assert seconds < 2
    assert megabytes < 200


def _figures(said: str) -> tuple[float, float]:
    seconds = float(said.partition("verdict ")[2].partition(" s")[0])
    megabytes = float(said.rpartition("; ")[2].partition(" MB")[0])
    return seconds, megabytes
