"""Which round and incarnation are judged, if documents and roster differ."""

from dataclasses import replace
from typing import Any

import pytest

from firstfault import model
from firstfault.conclude import conclude
from firstfault.layout import error_key_for
from firstfault.reading.assemble import Snapshot
from firstfault.strategies import get_strategy, run_strategy
from firstfault.testing import make_error, make_job, make_presence
from lab.cascades.objects import Objects, looked_at

_STARTED = 5
"""The incarnation of both nodes."""


def _failed(rank: int, message: str, **fields: Any) -> model.WorkerError:
    """Return the document of one of two ranks on each of two nodes."""
    place = {
        "node": f"w-{rank // 2}",
        "group_rank": rank // 2,
        "group_world_size": 2,
        "incarnation": _STARTED,
    }
    return make_error(rank, message=message, **{**place, **fields})


_LOST = {"exception": "RuntimeError", "message": "Connection reset by peer"}
_ROOT = _failed(0, "'lr'", exception="KeyError")
_VICTIM = _failed(3, at_ms=50, **_LOST)
_MANY = 300


def _entries(
    *documents: model.WorkerError, phase: model.Phase = model.Phase.FAILED, **place: Any
) -> tuple[model.NodePresence, ...]:
    """Return the entries of both nodes, with a receipt for each of the documents."""
    entries = []
    for number in (0, 1):
        own = [item for item in documents if item.place.group_rank == number]
        receipts = tuple(
            model.Receipt(item.documents[0].name, durable=True, rank=item.rank) for item in own
        )
        here = {
            "node": f"w-{number}",
            "group_rank": number,
            "nodes": 2,
            "incarnation": _STARTED,
            **place,
        }
        entries.append(
            make_presence(phase, ranks=(2 * number, 2 * number + 1), receipts=receipts, **here)
        )
    return tuple(entries)


_FORGED = [
    _failed(3, "forged", at_ms=-100, round=7, group_world_size=1),
    _failed(1, "forged", at_ms=100, incarnation=10**13 - 1),
]


def _verdict(job: model.JobErrors, strategy: str = "evidence") -> model.Verdict:
    return run_strategy(get_strategy(strategy), job)


@pytest.mark.parametrize("strategy", ["evidence", "earliest"])
@pytest.mark.parametrize("forged", _FORGED, ids=["round", "incarnation"])
def test_a_document_alone_replaces_no_others(forged: model.WorkerError, strategy: str) -> None:
    """A document whose round or incarnation no roster entry confirms makes no document history,
    and is noted.
    """
    job = make_job(_ROOT, _VICTIM, forged, roster=_entries(_ROOT, _VICTIM))

    assert {failure.message for failure in job.failures} == {
        _ROOT.message,
        _VICTIM.message,
        "forged",
    }
    assert (job.history, job.round, len(job.roster)) == ((), 0, 2)
    assert not job.coverage.complete
    (note,) = job.coverage.notes
    assert note.startswith(f"the document of rank {forged.rank} on {forged.node} names ")
    assert _verdict(job, strategy).confidence != "high"


@pytest.mark.parametrize("phase", model.Phase)
def test_a_later_round_without_an_entry_is_reported(phase: model.Phase) -> None:
    """If the only document is of a round that no roster entry confirms, it is the root cause,
    without high confidence.

    An agent may be killed before its entry is in the storage.
    """
    job = make_job(_failed(3, "forged", round=1), roster=_entries(phase=phase))
    conclusion = conclude(job)
    assert (conclusion.verdict.ranks, conclusion.verdict.confidence) == ((3,), "medium")
    assert any("names round 1" in note for note in job.coverage.notes)


@pytest.mark.parametrize(
    ("record", "judged"),
    [
        ({}, ["forged"]),
        ({"restart": False}, ["'lr'", "forged"]),
        ({"kind": model.RestartKind.IN_PROCESS}, ["'lr'", "forged"]),
        ({"number": 3}, ["'lr'", "forged"]),
    ],
)
def test_the_record_of_a_restart_confirms_the_next_round(
    record: dict[str, Any], judged: list[str]
) -> None:
    """After a recorded restart, a document of the next round is enough to make
    the failed round history.
    """
    restart = replace(
        model.RestartRecord(model.RestartKind.ROUND, 0, "", restart=True, reason=""), **record
    )
    last = _failed(3, "forged", round=1, at_ms=9_000)
    job = make_job(_ROOT, last, roster=_entries(_ROOT), restarts=(restart,))
    assert [failure.message for failure in job.failures] == judged
    assert not job.coverage.complete
    assert any("names round 1" in note for note in job.coverage.notes)


def test_an_entry_confirms_round_and_incarnation() -> None:
    """A roster entry of a document's round and incarnation makes the others history,
    and nothing is noted.
    """
    for place in ({"round": 1}, {"incarnation": 9}):
        last = _failed(3, "forged", at_ms=9_000, **place)
        job = make_job(
            _ROOT,
            _VICTIM,
            last,
            roster=(*_entries(_ROOT, _VICTIM), *_entries(last, **place)),
        )
        assert [failure.message for failure in job.failures] == ["forged"]
        assert (len(job.history), job.coverage.complete, job.coverage.notes) == (2, True, ())
    # the name of an entry that cannot be read has no node, but a group rank and an incarnation
    bare = make_presence(model.Phase.JOINED, node="", group_rank=1, incarnation=9)
    job = make_job(_VICTIM, _failed(3, "forged", incarnation=9), roster=(*_entries(_VICTIM), bare))
    assert [failure.message for failure in job.failures] == ["forged"]
    assert not any("names" in note for note in job.coverage.notes)


def _large(*others: model.WorkerError) -> Snapshot:
    """Return a cascade that is too large to open every document."""
    of_victims = {**_LOST, "fingerprint": "1:" + "a" * 12}
    victims = [
        _failed(rank, node=f"w-{rank % 2}", group_rank=rank % 2, at_ms=10 + rank / 10, **of_victims)
        for rank in range(4, _MANY)
    ]
    documents = (replace(_ROOT, fingerprint="1:" + "b" * 12, documents=()), *victims, *others)
    named = [
        replace(item, documents=(model.DocumentRef(error_key_for(item)),)) for item in documents
    ]
    return Snapshot(documents=tuple(named), roster=_entries())


@pytest.mark.parametrize("strategy", ["evidence", "earliest"])
@pytest.mark.parametrize("forged", _FORGED, ids=["round", "incarnation"])
def test_a_name_alone_replaces_no_others(forged: model.WorkerError, strategy: str) -> None:
    """In a large cascade, a name that no roster entry confirms makes no document history."""
    snapshot = _large(replace(forged, documents=()))
    job = looked_at(Objects.of(snapshot), strategy)
    assert job.document_count == _MANY - 2
    assert not job.coverage.complete
    assert _verdict(job, strategy).confidence != "high"
    if strategy == "evidence":
        assert {0, forged.rank} <= {failure.rank for failure in job.failures}
        assert any(
            f"rank {forged.rank} on {forged.node} names" in note for note in job.coverage.notes
        )
        assert not any("earlier rounds" in note for note in job.coverage.notes)
