"""After a failure: wait a bounded time for the other nodes, read, conclude, seal."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from firstfault.assemble import Findings, assemble, silent_nodes
from firstfault.errors import StoreError
from firstfault.model import DocumentRef, Seal, WorkerError
from firstfault.reader import Conclusion, MultiErrorFileOutputReader
from firstfault.report import flyte_message, to_json
from firstfault.retry import RetryContext
from firstfault.text import redact
from firstfault.wire import decode, encode, encode_seal
from flytekitplugins.firstfault.guard import bounded, logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault.model import JobErrors, Verdict
    from firstfault.retry import RetryPolicy
    from flytekitplugins.firstfault.environment import Recording

_STORAGE_S = 10.0
"""Longest time that listing and reading may take beyond the wait for the other nodes."""

__all__ = ["sealed", "settle"]


def settle(  # noqa: PLR0913 - keywords
    recording: Recording,
    failures: Sequence[WorkerError],
    *,
    seconds: float,
    policy: RetryPolicy | None,
    attempt: int,
    retries: int | None = None,
    expected_nodes: int | None = None,
) -> Conclusion:
    """Return the verdict on the attempt and the decision.

    It waits until every node has said that it is done, at most `seconds`. What this node knows counts in any case,
    also if the storage cannot be listed. A strategy or policy that raises is replaced by firstfault's default, with
    a warning.

    Args:
        recording: where the documents are, and the strategy.
        failures: what this node knows itself.
        seconds: longest wait.
        policy: the task's retry policy.
        attempt: number of the attempt, from 0.
        retries: the task's, None if not known.
        expected_nodes: overrides what the roster says.
    """
    # as the storage has them: capped and redacted
    own = Findings(documents=tuple(_through_wire(failure) for failure in failures))

    def reader(strategy: str, policy: RetryPolicy | None) -> MultiErrorFileOutputReader:
        return MultiErrorFileOutputReader(
            recording.output_prefix,
            strategy=strategy,
            settle_seconds=seconds,
            retry_policy=policy,
            own_findings=own,
            expected_nodes=expected_nodes,
        )

    def look() -> JobErrors | None:
        try:
            return reader("earliest", None).job()
        except StoreError as error:
            logger.warning("only this node's own documents are looked at: %s", error)
            return None

    job = bounded(look, seconds + _STORAGE_S, "looking at the other nodes' documents")
    if job is None:
        note = "own node only, the storage did not answer in time"
        job = assemble(replace(own, notes=(note,)), expected_nodes=expected_nodes, settled=False)
    # a node that joined and fell silent may have died as a whole pod; then the job fails and Flyte reads no file
    context = RetryContext(attempt=attempt, retries=retries, pods_alive=not silent_nodes(job))
    try:
        conclusion = reader(recording.strategy, policy).conclude_from(job, context)
    except Exception as error:  # noqa: BLE001 - a strategy or policy is third-party code; the attempt needs a verdict
        logger.warning(
            "the strategy %s or the task's retry policy failed (%s: %s); firstfault's defaults decide",
            recording.strategy,
            type(error).__name__,
            error,
        )
        conclusion = reader("earliest", None).conclude_from(job, context)
    if conclusion is None:
        raise LookupError("no failure is on record, neither here nor in the storage")
    return conclusion


def sealed(conclusion: Conclusion, recording: Recording, node: str) -> tuple[Seal, bytes]:
    """Return the sealed verdict and the bytes of the ``error.pb`` that hands it to Flyte."""
    verdict, decision = _redacted(conclusion.verdict), conclusion.decision
    seal = Seal(
        name="",
        digest=verdict.digest,
        count=verdict.document_count,
        strategy=verdict.strategy,
        json=to_json(verdict, decision),
        timestamp_ns=time.time_ns(),
        node=node,
        code=verdict.code,
        message=flyte_message(verdict, decision, uri=recording.output_prefix),
        kind=decision.kind,
        origin=decision.origin,
        fault_timestamp_ns=verdict.timestamp_ns,
        worker=verdict.node or "",
    )
    return seal, encode_seal(seal)


def _through_wire(failure: WorkerError) -> WorkerError:
    ref = failure.documents[0] if failure.documents else DocumentRef("")
    document = decode(encode(failure), ref)
    return replace(document, documents=failure.documents) if isinstance(document, WorkerError) else failure


def _redacted(verdict: Verdict) -> Verdict:
    """Return the verdict without credentials: a stock error.pb it rests on has not been through our wire."""
    victims, coverage = verdict.victims, verdict.coverage
    return replace(
        verdict,
        headline=redact(verdict.headline),
        message=redact(verdict.message),
        why=tuple(redact(sentence) for sentence in verdict.why),
        victims=replace(victims, by_rank=tuple((rank, redact(line)) for rank, line in victims.by_rank)),
        coverage=replace(coverage, notes=tuple(redact(note) for note in coverage.notes)),
    )


def torch_error_data(conclusion: Conclusion) -> dict[str, Any]:
    """Return the root cause as torch's ``error.json`` has it."""
    from flytekitplugins.firstfault.torch_files import error_file_data  # noqa: PLC0415 - only under another launcher

    verdict = conclusion.verdict
    root = verdict.root
    exception = root.exception if root is not None else None
    return error_file_data(
        exception.type if exception is not None else verdict.code,
        exception.message if exception is not None else verdict.headline,
        verdict.message,
        verdict.timestamp_ns or time.time_ns(),
    )
