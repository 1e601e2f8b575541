"""Which fault of an interrupted iteration caused the others."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from firstfault_torch.inprocess.job import root_of
from firstfault_torch.inprocess.monitor_thread import position_of
from firstfault_torch.inprocess.store import Fault, FaultKind, Position

_STALL = FaultKind.SOFT_TIMEOUT


def _fault(rank: int, kind: FaultKind, **fields: Any) -> Fault:
    return Fault(rank, kind, "", 0, rank, **fields)


@pytest.mark.parametrize(
    ("faults", "root"),
    [
        ([], None),
        ([_fault(2, FaultKind.EXCEPTION), _fault(1, FaultKind.EXCEPTION)], 2),
        ([_fault(2, FaultKind.EXCEPTION), _fault(1, FaultKind.TERMINATED)], 1),
        ([_fault(2, FaultKind.SOFT_TIMEOUT, waits=True), _fault(1, FaultKind.SOFT_TIMEOUT)], 1),
        ([_fault(2, FaultKind.SOFT_TIMEOUT, waits=True), _fault(1, FaultKind.HARD_TIMEOUT)], 1),
        ([_fault(2, FaultKind.SOFT_TIMEOUT, begun=7), _fault(1, FaultKind.SOFT_TIMEOUT, begun=6)], 1),
        ([_fault(2, FaultKind.SOFT_TIMEOUT), _fault(1, FaultKind.SOFT_TIMEOUT)], 2),
        ([_fault(2, FaultKind.SOFT_TIMEOUT, waits=True), _fault(1, FaultKind.EXCEPTION)], 1),
        ([_fault(2, _STALL, waits=True), _fault(3, FaultKind.EXCEPTION), _fault(1, _STALL)], 1),
        ([_fault(3, FaultKind.EXCEPTION), _fault(2, _STALL, waits=True), _fault(1, _STALL)], 3),
    ],
    ids=["none", "first", "ended", "waits", "blocked", "fewest", "alike", "raised", "torn out", "raised before"],
)
def test_the_root(faults: list[Fault], root: int | None) -> None:
    """A rank that ended comes before one that raised, and a rank that waits for others comes last."""
    found = root_of(faults)
    assert (found.initial_rank if found is not None else None) == root


def test_where_a_thread_stands() -> None:
    """It is the innermost line of the user's code, with what that calls; a thread that has ended stands nowhere."""
    gate = threading.Event()

    def waiting() -> None:
        gate.wait()

    thread = threading.Thread(target=waiting)
    thread.start()
    try:
        position = position_of(thread.ident or 0, begun=3)
        while position is None or "threading" not in position.text:
            position = position_of(thread.ident or 0, begun=3)
    finally:
        gate.set()
        thread.join()
    line = waiting.__code__.co_firstlineno + 1
    assert position.text == f"test_root_of_a_restart.py:{line} in waiting, which calls threading.wait"
    assert (position.waits, position.begun) == (False, 3)
    assert Position.decode(position.encode()) == position
    assert position_of(2**40) is None
