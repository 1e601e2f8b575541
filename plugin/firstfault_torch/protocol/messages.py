"""The inputs and outputs of an election: events, operations of the store, and instructions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

# --- operations of the round's store ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Read:
    """Read a key; the answer is empty if it isn't set."""

    key: str


@dataclass(frozen=True, slots=True)
class Append:
    """Append to a key; the answer is empty."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class SetOnce:
    """Set a key unless it is set, and wake who waits for it; the answer is what counts."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Swap:
    """Set a key that has the value `before`, empty if unset; the answer is its value then."""

    key: str
    before: bytes
    value: bytes


Operation: TypeAlias = Read | Append | SetOnce | Swap


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """This node has stopped its workers, and hands in its report."""

    report: bytes
    settle_seconds: float
    """Longest wait for the peers' reports, seconds."""
    grace_seconds: float = 0.0
    """How much longer the workers of any node may take to end once one node got a signal."""
    may_leave: bool = True
    """Whether this agent, if its process has to end, may leave the decision to others."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The store has carried out all operations of a request."""

    request: int
    values: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The store didn't answer in time, or the connection broke.
    Any of the operations may have been carried out.
    """

    request: int


@dataclass(frozen=True, slots=True)
class KeySet:
    """A waiting connection has seen a key of this election. Only a hint: it may never come."""

    name: str
    value: bytes


@dataclass(frozen=True, slots=True)
class WaitingConnectionBroke:
    """The connection that waits for keys has broken. The store may live."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """`Election.deadline` has come."""


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """This process got a signal to end."""


@dataclass(frozen=True, slots=True)
class Concluded:
    """The leader has concluded, and asks whether it may publish."""


@dataclass(frozen=True, slots=True)
class ConclusionFailed:
    """The leader has no conclusion."""


@dataclass(frozen=True, slots=True)
class Published:
    """The leader has published its conclusion where users read it."""

    verdict: bytes


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The election is pointless: another failure ends the attempt."""


Event: TypeAlias = (
    Started
    | Answered
    | Unanswered
    | KeySet
    | WaitingConnectionBroke
    | TimePassed
    | ShutdownRequested
    | Concluded
    | ConclusionFailed
    | Published
    | Interrupted
)


# --- instructions -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskStore:
    """Carry out operations in their order on one connection, and answer with the request's number.
    All may be repeated. An optional answer is worth less time once the process has to end.
    """

    request: int
    operations: tuple[Operation, ...]
    purpose: str
    """For a log line: "looking which nodes live"."""
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class WatchKeys:
    """Wait for these keys, one after the other, on a connection of its own."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lead:
    """Conclude for all nodes, then answer with `Concluded` or `ConclusionFailed`."""

    reports: bytes
    """Frames of the agents that have reported."""
    joined: bytes
    """Frames of all agents from the start of their workers; empty if all have reported."""
    arrived: frozenset[int]
    """Group ranks of the agents that have reported."""
    complete: bool
    """Each other agent is known to be dead."""
    lost: frozenset[int]
    """Group ranks of the agents that leave or are dead."""


@dataclass(frozen=True, slots=True)
class Publish:
    """The answer to `Concluded`. If True, publish and answer with `Published`."""

    is_allowed: bool


@dataclass(frozen=True, slots=True)
class Adopt:
    """The election is over: this verdict counts."""

    verdict: bytes


class NoVerdictReason(Enum):
    """Why an election has ended without a verdict."""

    UNDECIDED = "no agent has published a verdict in time"
    STORE_LOST = "the store doesn't answer"
    LEFT_TO_OTHERS = "this process has to end, and other agents decide"
    INTERRUPTED = "another failure has ended the attempt"


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The election is over without a verdict."""

    reason: NoVerdictReason


Instruction: TypeAlias = AskStore | WatchKeys | Lead | Publish | Adopt | GiveUp
