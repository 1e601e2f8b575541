"""Polling the roster: a real recorder, real entries in a folder."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from firstfault.layout import roster_key_for
from firstfault.model import Phase
from firstfault.recorder import Recorder
from firstfault.testing import make_presence
from firstfault_torch.node.document_writer import node_recorder
from firstfault_torch.rounds import liveness
from firstfault_torch.rounds.liveness import RosterPoll

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.prefix import Prefix

OWN = 1
ROUND = 2
OLD, NEW = 1_700_000_000_000, 1_800_000_000_000
"""Incarnations."""
SOON_S = 30.0
NEVER_S = 0.5


@pytest.fixture
def look(prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., queue.Queue[int]]]:
    """Begin to poll as node 1, round 2; return the queue of reported failures."""
    monkeypatch.setattr(liveness, "ROSTER_POLL_S", 0.1)
    monkeypatch.setattr(liveness, "_POLLS_PER_SECOND", 100.0)
    looks: list[RosterPoll] = []
    with node_recorder(replace(prefix.recording(), round=ROUND)) as recording:
        assert recording.files is not None
        Recorder(recording.files).roster(SOON_S)  # so that the first poll is answered at once

        def begin(patience: float = 0.0, incarnation: int = OLD) -> queue.Queue[int]:
            heard: queue.Queue[int] = queue.Queue()
            looks.append(
                RosterPoll(
                    replace(recording, incarnation=incarnation),
                    recording.files,
                    group_rank=OWN,
                    nodes=2,
                    patience_seconds=patience,
                    on_failure=heard.put,
                )
            )
            return heard

        yield begin
        for one in looks:
            one.end()
    assert not [thread for thread in threading.enumerate() if thread.name == "firstfault-roster"]


def enter(prefix: Prefix, phase: Phase, group_rank: int, round_number: int = ROUND, incarnation: int = OLD) -> None:
    """Write a roster entry as a node does."""
    entry = make_presence(phase, incarnation=incarnation)
    entry = replace(entry, place=replace(entry.place, group_rank=group_rank, round=round_number))
    folder: Path = prefix.folder / "firstfault" / "roster"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / roster_key_for(entry)).write_bytes(b"")


def _silent(heard: queue.Queue[int]) -> bool:
    """Whether nothing is reported for a while."""
    with contextlib.suppress(queue.Empty):
        heard.get(timeout=NEVER_S)
        return False
    return True


def test_a_failure_that_was_not_broadcast(look: Callable[..., queue.Queue[int]], prefix: Prefix) -> None:
    """Another node's failure in this round is reported once; its own, joining, success and other rounds are not."""
    heard = look()
    enter(prefix, Phase.JOINED, 0)
    enter(prefix, Phase.SUCCEEDED, 3)
    enter(prefix, Phase.FAILED, OWN)
    enter(prefix, Phase.FAILED, 4, ROUND - 1)
    assert _silent(heard)
    enter(prefix, Phase.FAILED, 5)
    assert heard.get(timeout=SOON_S) == 5
    enter(prefix, Phase.FAILED, 6)
    assert _silent(heard)


def test_patience(look: Callable[..., queue.Queue[int]], prefix: Prefix) -> None:
    """A failure after which the workers may restart is not reported at once."""
    enter(prefix, Phase.FAILED, 0)
    began = time.monotonic()
    heard = look(patience=0.5)
    assert heard.get(timeout=SOON_S) == 0
    assert time.monotonic() - began >= 0.5


@pytest.mark.parametrize(
    "joined",
    [[(0, NEW)], [(OWN, NEW)], [], [(0, OLD - 1)]],
    ids=["the other", "this node", "neither", "a clock that is behind"],
)
def test_an_earlier_run_in_the_same_prefix(
    joined: list[tuple[int, int]], look: Callable[..., queue.Queue[int]], prefix: Prefix
) -> None:
    """A failure of an earlier run, in a round of the same number, is not reported; a new one is.

    The entries of this run may come late, and the clocks of the nodes may differ.
    """
    for group_rank in (0, OWN):
        enter(prefix, Phase.JOINED, group_rank)
        enter(prefix, Phase.FAILED, group_rank)
    for group_rank, incarnation in joined:
        enter(prefix, Phase.JOINED, group_rank, incarnation=incarnation)
    heard = look(incarnation=NEW)
    assert _silent(heard)
    enter(prefix, Phase.FAILED, 0, incarnation=NEW)
    assert heard.get(timeout=SOON_S) == 0


def test_an_entry_of_an_earlier_run_that_arrives_late(look: Callable[..., queue.Queue[int]], prefix: Prefix) -> None:
    """A failure that is older than the same group rank's newest entry is not reported, whenever it is uploaded."""
    enter(prefix, Phase.JOINED, 0, incarnation=NEW)
    heard = look(incarnation=NEW)
    enter(prefix, Phase.FAILED, 0)
    assert _silent(heard)


def test_a_storage_that_cannot_be_listed(look: Callable[..., queue.Queue[int]], prefix: Prefix) -> None:
    """A roster that cannot be listed is not a failure, and the polling continues."""
    roster = prefix.folder / "firstfault" / "roster"
    roster.parent.mkdir(parents=True, exist_ok=True)
    roster.write_text("a file in the folder's place")
    heard = look()
    assert _silent(heard)
    roster.unlink()
    enter(prefix, Phase.FAILED, 0)
    assert heard.get(timeout=SOON_S) == 0
