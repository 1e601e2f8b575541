"""What firstfault derives from flytekit's classes: the exceptions that carry a verdict,
and a worker's checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import flytekit
from flytekit.core.checkpointer import SyncCheckpoint
from flytekit.core.context_manager import FlyteContextManager
from flytekit.exceptions.user import FlyteDataNotFoundException, FlyteRecoverableException

from firstfault_torch.guard import logger, suppress_internal_errors

if TYPE_CHECKING:
    from firstfault_torch.engine import Publication


class VerdictSealedError(Exception):
    """Carries a sealed verdict from a task's `execute` to its `dispatch_execute`,
    which leaves it to the entrypoint.
    """

    def __init__(self, publication: Publication) -> None:
        super().__init__(publication.sealed.verdict.headline)
        self.publication = publication


class RecoverableVerdictSealedError(VerdictSealedError, FlyteRecoverableException):
    """A `VerdictSealedError` to retry; outside of a dispatch, also a FlyteRecoverableException."""


def build_verdict_error(publication: Publication) -> VerdictSealedError:
    """Return the exception that a pod raises after it has published a verdict."""
    is_retried = publication.sealed.decision.retry
    return (RecoverableVerdictSealedError if is_retried else VerdictSealedError)(publication)


class _OptionalCheckpoint(SyncCheckpoint):
    """flytekit's checkpoint, but a missing checkpoint of the previous attempt isn't an error.

    flytekit gives each retry the path of that checkpoint, and raises FlyteDataNotFoundException if
    nothing is there: a job that failed in its first epoch would fail in its retry because of it.
    """

    def prev_exists(self) -> bool:
        """Whether the attempt before has saved a checkpoint."""
        # flytekit's method only checks that the backend passed a path, so ask the storage as well.
        # If the storage can't be asked, keep flytekit's answer; `restore` then reports the error.
        if not super().prev_exists():
            return False
        with suppress_internal_errors("looking for the checkpoint of the attempt before"):
            source = self._checkpoint_src
            files = FlyteContextManager.current_context().file_access.get_filesystem_for_path(
                source
            )
            return bool(files.exists(source))
        return True

    def restore(self, path: Path | str | None = None) -> Path | None:
        """Return the folder of the previous attempt's checkpoint, or None if it saved none."""
        try:
            folder: Path | None = super().restore(path)
        except FlyteDataNotFoundException:
            logger.warning("the previous attempt saved no checkpoint; starting without one")
            return None
        return folder


def expect_missing_checkpoint() -> None:
    """Let this process's checkpoint return None if the previous attempt saved none;
    don't change other classes.
    """
    with suppress_internal_errors("preparing Flyte's checkpoint"):
        try:
            checkpoint = flytekit.current_context().checkpoint
        except NotImplementedError:
            return  # no checkpoints in this execution
        # Another class, such as a user's subclass, may define these methods itself.
        if type(checkpoint) is SyncCheckpoint:
            # Change the class in place: a finalized copy would remove the temporary folder into
            # which other forked workers may be downloading.
            checkpoint.__class__ = _OptionalCheckpoint
