"""How an attempt ended."""

from __future__ import annotations

import enum


class Outcome(str, enum.Enum):
    """How an attempt ended, as far as it's known; `firstfault.evidence.completion` finds it."""

    SUCCEEDED = "succeeded"
    TEARDOWN_FAILED = "finished, teardown failed"
    """The job had finished before its first failure: nothing has to run again."""
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """By SIGINT, such as a person's Ctrl-C, or a closed terminal: category `interrupted`."""
    UNKNOWN = "unknown"
    """Nothing shows a failure or a success."""

    @property
    def has_finished(self) -> bool:
        """Whether the work is proven to be done, so that what depends on it may start."""
        return self in {Outcome.SUCCEEDED, Outcome.TEARDOWN_FAILED}

    @property
    def has_failed(self) -> bool:
        """Whether the attempt ended before its work was done."""
        return self in {Outcome.FAILED, Outcome.INTERRUPTED}
