"""What a signal to an agent does, and how much time each step has after it."""

from __future__ import annotations

import math
from enum import Enum

from firstfault_torch import time_limits


class SignalPhase(Enum):
    """What a signal does, depending on how far this pod is."""

    WORKING = "working"
    """The main thread is interrupted by torch's SignalException, and the signal is reported."""
    SETTLING = "settling"
    """The wait for other nodes ends, and the verdict is sealed with the reports that have arrived.
    """
    LEAVING = "leaving"
    """Do nothing: this pod is writing its result and exits soon."""

    @property
    def interrupts_main(self) -> bool:
        """Whether a signal raises an exception in the main thread."""
        return self is SignalPhase.WORKING

    @property
    def reports_signal(self) -> bool:
        """Whether a signal is a failure of this node."""
        return self is SignalPhase.WORKING

    @property
    def needs_main(self) -> bool:
        """Whether the main thread has to handle a signal. If not, another thread ends the pod."""
        return self is not SignalPhase.LEAVING


class Hurry(Enum):
    """How much time this process has."""

    NONE = "none"
    TERMINATED = "terminated"
    """It got a signal: SIGKILL follows, on Kubernetes after 30 s."""
    LEAVING_NOW = "leaving now"
    """The main thread didn't handle the signal: another thread ends the process."""


class ExitStep(Enum):
    """What a node waits for on its way from the end of a round to its own."""

    UPLOADS = "all documents of the node"
    LATE_UPLOAD = "an upload that begins after them"
    SETTLE = "the remaining nodes' reports"
    LEADERS = "a verdict of any agent that may lead"
    LEADER_PUBLISHES = "a verdict that is being published"
    TELL_PEERS = "the store, to hand in a report or a verdict outside of an election"
    READ = "the storage"
    PREVIOUS_VERDICT = "the verdict on the attempt before"
    CONCLUDE = "strategy and policy"
    PUBLISH = "the upload of the verdict"
    FLYTE_ERROR = "the upload of the error that Flyte reads"
    HANDOVER = "copies and the next attempt's file"
    REPORT = "one place of the report: a terminal, a file"
    ORPHANS = "processes that workers left"
    RECORDER = "the recorder to end"


def get_limit(step: ExitStep, hurry: Hurry, usual: float | None = None) -> float:
    """Return how many seconds a step may take; `usual` is an option's value in place of the
    usual limit. Hurry never makes a step longer.
    """
    limit, terminated, leaving_now = _get_limits(step)
    seconds = limit if usual is None else usual
    match hurry:
        case Hurry.NONE:
            return seconds
        case Hurry.TERMINATED:
            return min(seconds, terminated)
        case Hurry.LEAVING_NOW:
            return min(seconds, leaving_now)


def _get_limits(step: ExitStep) -> tuple[float, float, float]:
    """Return the usual limit of a step, the one of a terminated process, and the one of a process
    that the signal thread ends.
    """
    limits = time_limits
    publish = limits.TERMINATED_PUBLISH_TIMEOUT_SECONDS
    handover = limits.HANDOVER_TIMEOUT_SECONDS + limits.HANDOVER_SLACK_SECONDS
    own_step = limits.EXIT_STEP_TIMEOUT_SECONDS
    # Built at each call, because a test may change a limit.
    return {
        ExitStep.UPLOADS: _alike(
            limits.UPLOAD_DEADLINE_SECONDS, limits.TERMINATED_UPLOADS_TIMEOUT_SECONDS
        ),
        ExitStep.LATE_UPLOAD: _alike(
            limits.UPLOAD_DEADLINE_SECONDS, limits.TERMINATED_LATE_UPLOAD_TIMEOUT_SECONDS
        ),
        ExitStep.SETTLE: (limits.SETTLE_SECONDS, limits.TERMINATED_SETTLE_SECONDS, own_step),
        # Usually each agent that may lead has its turn.
        ExitStep.LEADERS: _alike(math.inf, limits.TERMINATED_PEER_VERDICT_TIMEOUT_SECONDS),
        ExitStep.LEADER_PUBLISHES: _alike(
            limits.LEADER_PUBLISH_TIMEOUT_SECONDS, limits.TERMINATED_PEER_PUBLISH_TIMEOUT_SECONDS
        ),
        ExitStep.TELL_PEERS: (limits.STORE_TIMEOUT_SECONDS, limits.STORE_TIMEOUT_SECONDS, own_step),
        ExitStep.READ: _alike(limits.READ_TIMEOUT_SECONDS, limits.TERMINATED_READ_TIMEOUT_SECONDS),
        ExitStep.PREVIOUS_VERDICT: _alike(
            limits.PREVIOUS_VERDICT_TIMEOUT_SECONDS,
            limits.TERMINATED_PREVIOUS_VERDICT_TIMEOUT_SECONDS,
        ),
        ExitStep.CONCLUDE: _alike(
            limits.CONCLUDE_TIMEOUT_SECONDS, limits.TERMINATED_CONCLUDE_TIMEOUT_SECONDS
        ),
        ExitStep.PUBLISH: _alike(limits.PUBLISH_TIMEOUT_SECONDS, publish),
        ExitStep.FLYTE_ERROR: (limits.PUBLISH_TIMEOUT_SECONDS, publish, own_step),
        # They have begun together with the verdict's upload.
        ExitStep.HANDOVER: (handover, handover, limits.SHUTDOWN_CALL_TIMEOUT_SECONDS),
        ExitStep.REPORT: (own_step, own_step, own_step),
        # No grace at the end: the pod's own SIGKILL may follow within seconds.
        ExitStep.ORPHANS: (limits.STOP_GRACE_SECONDS, own_step, 0.0),
        ExitStep.RECORDER: _alike(
            limits.EXIT_RECORDER_TIMEOUT_SECONDS, limits.EXIT_RECORDER_TIMEOUT_SECONDS
        ),
    }[step]


def _alike(usual: float, hurried: float) -> tuple[float, float, float]:
    return usual, hurried, hurried
