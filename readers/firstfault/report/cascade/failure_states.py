"""The state of a failure in a cascade: root cause, suspect, victim, stopped, unclear."""

from __future__ import annotations

from firstfault.evidence.classification import ClassifiedFailure, FailureClass
from firstfault.model import Scope, Subject, Suspect, Verdict, WorkerError
from firstfault.model.failure import LAST_LINES_OF_SUCCESS, OF_LOGS
from firstfault.report.states import State

_STATE_OF_CLASS = {
    FailureClass.CONSEQUENCE: State.VICTIM,
    FailureClass.UNCLEAR: State.UNCLEAR,
    FailureClass.FINISHED: State.FINISHED,
}


def find_state(failure: WorkerError, judged: ClassifiedFailure, verdict: Verdict) -> State:
    """Return the state that the verdict gives a failure or, without one, the state of its class."""
    failure_class = judged.failure_class
    is_sure = verdict.scope is not Scope.UNDETERMINED
    # first of all: a root cause that hung was stopped by its agent, too, and would be STOPPED below
    if is_sure and (failure is verdict.root or _is_root(failure, verdict)):
        return State.ROOT
    if any(_is_suspect(failure, suspect) for suspect in verdict.suspects):
        return State.SUSPECT
    if failure.has_unseen_end:
        is_finished = failure.sent_signals[0].reason == LAST_LINES_OF_SUCCESS
        return State.FINISHED if is_finished else State.UNREPORTED
    if failure.place.engine == OF_LOGS and failure.is_silent and not failure.sent_signals:
        return State.UNREPORTED  # it was suspected of its silence, and no line is about its end
    if failure.stopped_by_agent:
        return State.STOPPED if failure_class is FailureClass.CONSEQUENCE else State.UNCLEAR
    if judged.waited and verdict.category == "hang" and is_sure:
        return State.VICTIM  # of the rank that it waited for
    if failure_class is FailureClass.UNCLEAR and is_sure and verdict.confidence == "high":
        return State.VICTIM  # unclear alone, but the verdict is certain
    # a fault makes it a suspect if the strategy names suspects, since it lists only a few of them
    unexplained_state = State.SUSPECT if verdict.suspects and is_sure else State.UNCLEAR
    return _STATE_OF_CLASS.get(failure_class, unexplained_state)


def _is_root(failure: WorkerError, verdict: Verdict) -> bool:
    """Whether a failure is of one of the verdict's ranks, and has its fault,
    or is of the verdict's node's agent.

    Other ranks with the same fault aren't root causes: of several SIGKILLs the verdict may name
    only the first.
    """
    if verdict.scope in {Scope.RANK, Scope.RANKS}:
        if len(verdict.ranks) > 1 and failure.rank in verdict.ranks:
            return True  # ranks that are guilty together may wait in different groups
        is_alike = verdict.root is None or failure.fingerprint == verdict.fingerprint
        is_there = not verdict.node or failure.node == verdict.node
        return failure.rank in verdict.ranks and is_alike and is_there
    return failure.subject is Subject.AGENT and failure.node == verdict.node


def _is_suspect(failure: WorkerError, suspect: Suspect) -> bool:
    # a suspect without a rank is a node
    if suspect.rank is None:
        return failure.subject is Subject.AGENT and failure.node == suspect.node
    return failure.rank == suspect.rank and (not suspect.node or failure.node == suspect.node)
