"""The exceptions that carry a verdict out of a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException

if TYPE_CHECKING:
    from firstfault_torch.verdict.seal import SealedVerdict
    from flytekitplugins.firstfault.flyte_engine import Published


class VerdictSealedError(Exception):
    """Carries a sealed verdict from a task's `execute` to its `dispatch_execute`, which leaves it for the entrypoint.

    Args:
        headline: the verdict in one line.
        published: what this pod has published, and what it has not.
    """

    def __init__(self, headline: str, published: Published) -> None:
        super().__init__(headline)
        self.published = published


class RecoverableVerdictSealedError(VerdictSealedError, FlyteRecoverableException):
    """A `VerdictSealedError` to be retried; to code outside of a dispatch it is a FlyteRecoverableException."""

    def __init__(self, headline: str, published: Published) -> None:
        FlyteRecoverableException.__init__(self, headline)
        self.published = published


class ElasticTaskError(FlyteUserRuntimeException, RuntimeError):
    """A local call failed for a reason that is not recoverable.

    kfpytorch documents a RuntimeError and raises a FlyteUserRuntimeException; this is both.

    Args:
        error: torch's ChildFailedError, or the agent's own error.
        timestamp: the root cause's time, seconds since the Unix epoch; None: not known.
    """

    def __init__(self, error: Exception, timestamp: float | None = None) -> None:
        FlyteUserRuntimeException.__init__(self, error, timestamp=timestamp)


def verdict_error(verdict: SealedVerdict, published: Published) -> VerdictSealedError:
    """Return the exception that a pod raises after it has published a verdict."""
    kind = RecoverableVerdictSealedError if verdict.decision.retry else VerdictSealedError
    return kind(verdict.verdict.headline, published)
