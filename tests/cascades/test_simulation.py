"""A small part of ``make simulation``, and tests of the simulation itself."""

from __future__ import annotations

from collections import Counter

import pytest

from firstfault.reading.assemble import assemble
from firstfault.strategies import get_strategy, run_strategy
from tests.cascades.making import Rules, cascades
from tests.cascades.replay import last_written
from tests.cascades.simulation import judge, measure, simulate

_FEW = Rules(workers=128)


@pytest.mark.slow
def test_evidence_holds_when_documents_are_late_missing_and_wrong() -> None:
    """In simulated cascades of 128 workers the verdict is right, or undetermined if the root left no document."""
    tallies, _ = simulate(_FEW, range(10))

    ours, earliest = tallies["evidence"], tallies["earliest"]
    total = ours.total()
    assert total["right"] + total["honest"] == 10, ours.outcomes
    assert ours.sure_and_wrong == 0
    assert earliest.total()["right"] < 5, "the simulation is too easy"


def test_the_same_seed_makes_the_same_cascade() -> None:
    """The same seed makes the same cascade, except for the random part of the names."""

    def seen(seed: int) -> list[tuple[object, ...]]:
        (cascade,) = cascades(_FEW, [seed])
        return [(item.rank, item.node, item.timestamp_ns, item.message) for item in cascade.snapshot.documents]

    assert seen(7) == seen(7)
    assert seen(7) != seen(8)


def test_the_shares_of_the_rules() -> None:
    """The shares of late and unreadable documents, and of cascades without their root, are those of the rules."""
    made = list(cascades(_FEW, range(30)))
    kept = sum(len(cascade.snapshot.documents) for cascade in made)
    unreadable = sum(len(cascade.snapshot.unreadable) for cascade in made)
    without = sum(not root.left for cascade in made for root in cascade.roots)

    assert 0.005 < unreadable / kept < 0.02
    assert 0 < without < 15
    assert len(Counter(cascade.fault for cascade in made)) > 8
    for cascade in made:
        ranks = [rank for entry in cascade.snapshot.roster for rank in entry.ranks if entry.phase.value == "joined"]
        assert sorted(ranks) == list(range(128))


def test_a_wrong_verdict_is_called_wrong() -> None:
    """The judge calls a verdict that names another rank wrong."""
    (cascade,) = cascades(Rules(workers=64, root_missing=0, late=0, unreadable=0, two_roots=0), [3])
    job = assemble(cascade.snapshot, expected_nodes=8)
    assert judge(cascade, run_strategy(get_strategy("evidence"), job)) == "right"
    victims = [failure for failure in job.failures if failure.rank not in {root.rank for root in cascade.roots}]
    other = assemble(type(cascade.snapshot)(tuple(victims[:1])), expected_nodes=8)
    assert judge(cascade, run_strategy(last_written, other)) == "wrong"


@pytest.mark.slow
def test_a_measurement() -> None:
    """A measurement states the number of workers, and the seconds and megabytes of the verdict."""
    said = measure(256)
    assert "of 256 workers" in said
    assert _figures(said) > (0.0, 0.0)


@pytest.mark.timing
def test_a_verdict_on_a_thousand_workers_takes_little() -> None:
    """A verdict on 1,000 workers stays within its limits of time and memory, in a process that does nothing else."""
    seconds, megabytes = _figures(measure(1024))
    assert seconds < 2
    assert megabytes < 200


def _figures(said: str) -> tuple[float, float]:
    seconds = float(said.partition("verdict ")[2].partition(" s")[0])
    megabytes = float(said.rpartition("; ")[2].partition(" MB")[0])
    return seconds, megabytes
