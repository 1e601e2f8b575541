"""Which of several faults was the first, as far as evidence and clocks tell."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.evidence.classification import ClassifiedFailure, FailureClass
from firstfault.evidence.failure_message import message_of
from firstfault.exceptions.fingerprint import normalized
from firstfault.model import Subject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault.evidence.accusations import Accusations
    from firstfault.evidence.clocks import Clocks

_LONG_AFTER_NS = 10_000_000_000
"""An accusation that is this much older than a fault is not about that fault."""
_RANK = re.compile(r"\branks?\W{1,4}(\d{1,6})\b", re.IGNORECASE)
ENDS_OF_NODES = {FailureClass.LOST, FailureClass.EXTERNAL}


@dataclass(frozen=True, slots=True)
class FirstFault:
    """The fault that was the first, or may have been."""

    first: ClassifiedFailure
    same: tuple[ClassifiedFailure, ...]
    """All failures with its fault, `first` included."""
    others: tuple[ClassifiedFailure, ...]
    """Other faults."""
    rivals: tuple[ClassifiedFailure, ...]
    """Other faults that may have been the first."""

    @property
    def is_of_a_process(self) -> bool:
        """Whether a process failed, not a node."""
        return self.first.failure_class not in ENDS_OF_NODES

    @property
    def is_alone(self) -> bool:
        """Whether there is no other fault."""
        return not (self.others or self.rivals)


def first_fault(faults: Sequence[ClassifiedFailure], clocks: Clocks, accusations: Accusations) -> FirstFault | None:
    """Return the first fault; None: there is none."""
    if not faults:
        return None
    faults = _without_accusers(_without_aftermath(faults, clocks), clocks)
    faults = sorted(faults, key=lambda fault: _order(fault, accusations))
    may_be_first = clocks.contenders([fault.failure for fault in faults])
    contenders = [fault for fault, may_be in zip(faults, may_be_first, strict=True) if may_be]
    contenders = contenders or list(faults)  # circular times: none is first
    first = contenders[0]
    # ranks may raise the same exception at any time; the same signal is the same fault only at the same time
    alike = contenders if first.failure_class is FailureClass.OWN_EXIT else faults
    same = tuple(fault for fault in alike if _is_same(fault, first))
    are_same = set(map(id, same))
    others = tuple(fault for fault in faults if id(fault) not in are_same)
    return FirstFault(first, same, others, tuple(fault for fault in contenders if not _is_same(fault, first)))


def _without_aftermath(faults: Sequence[ClassifiedFailure], clocks: Clocks) -> list[ClassifiedFailure]:
    """Leave out exits of a lost or terminated node's workers, unless they certainly were before the node's end."""
    ends: dict[str, list[ClassifiedFailure]] = {}
    for fault in faults:
        if fault.failure_class in ENDS_OF_NODES:
            ends.setdefault(fault.failure.node, []).append(fault)
    kept = []
    for fault in faults:
        gone = [end for end in ends.get(fault.failure.node, ()) if end is not fault]
        is_exit = fault.failure_class is FailureClass.OWN_EXIT and fault.failure.subject is Subject.WORKER
        if is_exit and gone and not any(clocks.before(fault.failure, end.failure) for end in gone):
            continue
        kept.append(fault)
    return kept


def _without_accusers(faults: Sequence[ClassifiedFailure], clocks: Clocks) -> list[ClassifiedFailure]:
    """Leave out failures that name a rank with a fault of its own which names no rank: they report that rank's fault.

    An exception of the program's own names a rank if it repeats what that rank wrote. A failure stays if it was long
    before that rank's fault.
    """
    accusing_none: dict[int, list[ClassifiedFailure]] = {}
    for fault in faults:
        if fault.failure.rank is not None and (fault.pointer is None or fault.pointer.rank is None):
            accusing_none.setdefault(fault.failure.rank, []).append(fault)

    def accuses(fault: ClassifiedFailure) -> bool:
        rank = fault.pointer.rank if fault.pointer is not None else None
        accused = accusing_none.get(rank, []) if rank is not None and rank != fault.failure.rank else []
        accused = accused or [
            item for rank in _named_by(fault) for item in accusing_none.get(rank, ()) if _repeats(fault, item)
        ]
        return any(clocks.gap_ns(fault.failure, item.failure) < _LONG_AFTER_NS for item in accused)

    return [fault for fault in faults if not accuses(fault)]


def _named_by(fault: ClassifiedFailure) -> set[int]:
    """Return the other ranks in the text of a failure."""
    ranks = {int(number) for number in _RANK.findall(message_of(fault.failure).text)}
    return ranks - {fault.failure.rank}


def _repeats(fault: ClassifiedFailure, other: ClassifiedFailure) -> bool:
    """Whether the text of a failure holds the whole text of another one, and more."""
    text, repeated = message_of(fault.failure).text, message_of(other.failure).text
    return repeated in text and repeated != text and bool(repeated)


def _order(fault: ClassifiedFailure, accusations: Accusations) -> tuple[object, ...]:
    """Return the sort key of faults whose order in time is not known: evidence, then accusations, then time.

    An exit that the agents broadcast comes before an exception that names no peer: a program may raise an exception of
    its own in place of a peer's error that it caught.
    """
    failure = fault.failure
    return (
        fault.in_flight,
        not fault.specific,
        -accusations.times_broadcast(fault),
        fault.failure_class,
        -accusations.of(fault),
        failure.timestamp_ns is None,
        failure.timestamp_ns or 0,
        failure.rank if failure.rank is not None else 1 << 62,
        failure.node,
        failure.message,
        failure.code,
        failure.fingerprint,
        tuple(document.name for document in failure.documents),
        repr(failure),
    )


def _is_same(fault: ClassifiedFailure, first: ClassifiedFailure) -> bool:
    if fault is first:
        return True
    if fault.failure_class is FailureClass.EXTERNAL and first.failure_class is FailureClass.EXTERNAL:
        return True
    fingerprint = first.failure.fingerprint
    is_fault = first.failure_class in {FailureClass.OWN_FAULT, FailureClass.OWN_EXIT}
    if not is_fault or not fingerprint or fault.failure.fingerprint != fingerprint:
        return False
    # a worker that calls sys.exit does not know what it printed: the text must agree, too
    text, of_first = message_of(fault.failure), message_of(first.failure)
    if text.exception is not fault.failure.exception or of_first.exception is not first.failure.exception:
        return (text.what, normalized(text.text)) == (of_first.what, normalized(of_first.text))
    return fault.failure.exception is not None or fault.signature == first.signature
