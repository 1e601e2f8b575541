"""Flyte's OutputReader for jobs that report errors from all workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault import model
from firstfault.attempt_reader import AttemptReader
from firstfault.conclude import find_judgment
from firstfault.errors import ObjectNotFoundError, UsageError
from firstfault.evidence.completion import classify_outcome
from firstfault.layout import DECK, OUTPUTS
from firstfault.render.flyte_message import flyte_message
from firstfault.store import join
from firstfault.utils.run_sync import run_sync

if TYPE_CHECKING:
    from flyteidl.core.literals_pb2 import LiteralMap


@dataclass(frozen=True, slots=True)
class ExecutionError:
    """The fields of Flyte's ``io.ExecutionError``, and the time, the worker and the URI."""

    code: str
    message: str
    kind: model.Origin
    recoverable: bool
    timestamp_ns: int | None = None
    worker: str = ""
    error_uri: str = ""


class MultiErrorFileOutputReader(AttemptReader):
    """An `AttemptReader` with the methods of Flyte's ``OutputReader``: `is_error`, `read_error`,
    `exists`, `read`, `is_file` and `deck_exists`; its arguments are the same.
    """

    def is_error(self) -> bool:
        """Whether the attempt failed, also if it has outputs. Failures that the job
        recovered from don't count.

        Neither does one of its teardown if the nodes published no error: the outputs are those of
        the finished job.
        """
        job = self.job()
        if job.seals or not job.has_failed:
            return bool(job.seals)
        conclusion = self.conclude_from(job)
        outcome = classify_outcome(conclusion.verdict if conclusion is not None else None, job)
        return outcome.has_failed or not self.exists()

    def read_error(self) -> ExecutionError:
        """Return the root cause as Flyte's error; ``ErrorFileNotFound`` (SYSTEM,
        recoverable) if there is none.

        What the nodes published counts, unless this reader was given a strategy or a policy of its
        own. The message is the whole report; if Flyte's entrypoint wrote the root cause, its
        message without credentials.
        """
        conclusion = self.conclude()
        if conclusion is None:
            message = f"no error document in {self.errors_uri}"
            return _build_missing_error("ErrorFileNotFound", message, self.errors_uri)
        if self._strategy is None and self._retry_policy is None:
            published = find_judgment(conclusion)
            conclusion = replace(conclusion, verdict=published.verdict, decision=published.decision)
        verdict, decision = conclusion.verdict, conclusion.decision
        # an error that Flyte's entrypoint wrote is passed on as it is
        stock = verdict.root is not None and verdict.root.writer is model.Writer.STOCK
        return ExecutionError(
            code=verdict.code,
            message=verdict.message if stock else flyte_message(self.report(conclusion)),
            kind=decision.origin,
            recoverable=decision.retry,
            timestamp_ns=verdict.timestamp_ns,
            worker=verdict.node or "",
            error_uri=self.errors_uri,
        )

    def read(self) -> tuple[LiteralMap | None, ExecutionError | None]:
        """Return (outputs, None), or (None, error) if the outputs are missing or not readable.

        Raises:
            UsageError: Flyte's messages aren't installed.
        """
        from google.protobuf.message import DecodeError  # noqa: PLC0415 - only this call needs it

        try:
            from flyteidl.core.literals_pb2 import LiteralMap  # noqa: PLC0415 - as above
        except ImportError as error:
            how = (
                "install the extra flyte: in a clone pip install '.[flyte]', else"
                " 'firstfault[flyte]' from your index"
            )
            raise UsageError(
                f"Flyte's outputs need flyteidl, which is not installed; {how}"
            ) from error

        where = join(self._layout.root, OUTPUTS)
        outputs = LiteralMap()
        try:
            outputs.ParseFromString(run_sync(self._get(OUTPUTS)))
        except ObjectNotFoundError:
            return None, _build_missing_error("OutputsNotFound", f"outputs not found at {where}")
        except DecodeError as error:
            return None, _build_missing_error(
                "OutputsBadFormat", f"{where} is not a file of outputs: {error}"
            )
        return outputs, None

    def is_file(self) -> bool:
        """Whether outputs are a file: always True."""
        return True

    def deck_exists(self) -> bool:
        """Whether the attempt has a deck."""
        return run_sync(self._exists(DECK))


def _build_missing_error(code: str, message: str, uri: str = "") -> ExecutionError:
    return ExecutionError(code, message, model.Origin.SYSTEM, recoverable=True, error_uri=uri)
