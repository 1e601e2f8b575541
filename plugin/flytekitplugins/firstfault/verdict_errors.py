"""The exceptions that carry a verdict out of a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException

if TYPE_CHECKING:
    from firstfault_torch.verdict.seal import SealedVerdict
    from flytekitplugins.firstfault.flyte_engine import Published

__all__ = ["ElasticTaskError", "RecoverableVerdictSealedError", "VerdictSealedError", "verdict_error"]


class VerdictSealedError(Exception):
    """Carries a sealed verdict from the task's execution to its dispatch, where Flyte's entrypoint takes it.

    Args:
        headline: one line.
        document: bytes of the ``error.pb``.
        leaves_deck: another pod writes the deck.
    """

    def __init__(self, headline: str, document: bytes, *, leaves_deck: bool = False) -> None:
        super().__init__(headline)
        self.document = document
        self.leaves_deck = leaves_deck


class RecoverableVerdictSealedError(VerdictSealedError, FlyteRecoverableException):
    """The same for a verdict that is to be retried: code outside of a dispatch sees a FlyteRecoverableException."""

    def __init__(self, headline: str, document: bytes, *, leaves_deck: bool = False) -> None:
        FlyteRecoverableException.__init__(self, headline)
        self.document = document
        self.leaves_deck = leaves_deck


class ElasticTaskError(FlyteUserRuntimeException, RuntimeError):
    """A local call failed for a reason that is not recoverable.

    kfpytorch documents a RuntimeError and raises a FlyteUserRuntimeException; this is both.

    Args:
        error: torch's ChildFailedError, or the agent's own error.
        timestamp: seconds since the Unix epoch of the root cause, None if not known.
    """

    def __init__(self, error: Exception, timestamp: float | None = None) -> None:
        FlyteUserRuntimeException.__init__(self, error, timestamp=timestamp)


def verdict_error(verdict: SealedVerdict, published: Published) -> VerdictSealedError:
    """Return what a pod raises that has published a verdict."""
    kind = RecoverableVerdictSealedError if verdict.conclusion.decision.retry else VerdictSealedError
    headline = verdict.conclusion.verdict.headline
    return kind(headline, published.document, leaves_deck=not published.writes_deck)
