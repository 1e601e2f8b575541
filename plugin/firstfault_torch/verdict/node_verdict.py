"""After a failure: wait a bounded time for the other nodes, read, conclude, seal."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from firstfault.errors import BadDocumentError, StoreError
from firstfault.model import DocumentRef, Phase, Seal, WorkerError
from firstfault.model.roster import pods_live
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.reading.assemble import Snapshot, assemble
from firstfault.render.message import flyte_message
from firstfault.report import report_of
from firstfault.retry import RetryContext
from firstfault.store import open_store
from firstfault.strategies import DEFAULT_STRATEGY, strategy_names
from firstfault.sync import run_sync
from firstfault.wire.documents import MAX_DOCUMENT_BYTES, decode, encode, encode_seal
from firstfault.wire.verdict_json import to_json
from firstfault_torch.guard import bounded, logger
from firstfault_torch.verdict.previous import previous_attempt, retries_left

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from firstfault.conclude import Conclusion
    from firstfault.model import JobErrors, NodePresence
    from firstfault.report import Report
    from firstfault.report.attempt_changes import AttemptSummary
    from firstfault.retry import RetryPolicy
    from firstfault_torch.context import Recording

_DEAF_S = 3.0
"""After so many seconds a node that has not heard of the failure is taken for dead: it is not waited for."""
_PLAIN = "earliest"
"""The strategy in place of one that raises: the one with the least in it that could."""
_LEAST_S = 0.3
"""Longest wait for the verdict on the attempt before, where there is no time to wait, seconds."""
_STORAGE_S = 10.0
"""Longest time that listing and reading may take beyond the wait for the other nodes."""

__all__ = ["newest_seal", "report_on", "sealed", "settle", "torch_error_data"]


def settle(  # noqa: PLR0913 - keywords
    recording: Recording,
    failures: Sequence[WorkerError],
    *,
    seconds: float,
    policy: RetryPolicy | None,
    attempt: int,
    retries: int | None = None,
    expected_nodes: int | None = None,
    heard_by: Callable[[], set[int] | None] = lambda: None,
    give_up: threading.Event | None = None,
) -> Conclusion:
    """Return the verdict on the attempt and the decision.

    It waits until every node that lives has said that it is done, at most `seconds`. What this node knows counts in
    any case, also if the storage cannot be listed. A policy that raises is replaced by the default one, a strategy
    that raises by `earliest`, with a warning.

    Args:
        recording: where the documents are, and the strategy.
        failures: what this node knows itself.
        seconds: longest wait.
        policy: the task's retry policy.
        attempt: number of the attempt, from 0.
        retries: the task's, None if not known.
        expected_nodes: overrides what the roster says.
        heard_by: group ranks of the agents that have heard of the failure; None: nobody can say.
        give_up: once set, ends the wait.
    """
    # as the storage has them: capped and redacted
    own = Snapshot(documents=tuple(_through_wire(failure) for failure in failures))

    def reader(strategy: str, policy: RetryPolicy | None) -> MultiErrorFileOutputReader:
        return MultiErrorFileOutputReader(
            recording.output_prefix,
            strategy=strategy,
            settle_seconds=seconds,
            retry_policy=policy,
            own_snapshot=own,
            expected_nodes=expected_nodes,
            enough=_AllThatLive(heard_by).have_reported,
            give_up=give_up,
        )

    def look() -> JobErrors | None:
        try:
            # a strategy that is not there is spoken of when it is asked for its verdict
            known = recording.strategy in strategy_names()
            return reader(recording.strategy if known else DEFAULT_STRATEGY, None).job()
        except StoreError as error:
            logger.warning("only this node's own documents are looked at: %s", error)
            return None

    job = bounded(look, seconds + _STORAGE_S, "looking at the other nodes' documents")
    if job is None:
        note = "own node only, the storage did not answer in time"
        job = assemble(replace(own, notes=(note,)), expected_nodes=expected_nodes, settled=False)
    previous = previous_attempt(recording, max(seconds, _LEAST_S), give_up)
    context = RetryContext(
        attempt=attempt,
        retries=retries,
        retries_left=retries_left(attempt, retries, previous),
        pods_alive=pods_live(job),
        previous_fingerprint=previous.verdict.fingerprint if previous is not None else "",
    )
    conclusion, before = None, ""
    for strategy, chosen in _alternatives(recording.strategy, policy):
        try:
            conclusion = reader(strategy, chosen).conclude_from(job, context)
            break
        except Exception as error:
            if strategy == _PLAIN and chosen is None:
                raise
            # both may be third-party code; the attempt needs a verdict, and one line about it
            said = f"({type(error).__name__}: {error}); firstfault's defaults decide"
            if said != before:
                logger.warning("the strategy %s or the task's retry policy failed %s", strategy, said)
            before = said
    if conclusion is None:
        raise LookupError("no failure is on record, neither here nor in the storage")
    return conclusion


def _alternatives(strategy: str, policy: RetryPolicy | None) -> list[tuple[str, RetryPolicy | None]]:
    """What to try in turn: the task's own; without its strategy; without its policy; without both."""
    found = [(strategy, policy), (_PLAIN, policy)]
    return found if policy is None else [*found, (strategy, None), (_PLAIN, None)]


class _AllThatLive:
    """Knows when no living node is missing: an agent that lives hears of a failure within milliseconds.

    Args:
        heard_by: group ranks of the agents that have; None: the store they share is gone, and a node with it.
    """

    def __init__(self, heard_by: Callable[[], set[int] | None]) -> None:
        self._heard_by = heard_by
        self._since = time.monotonic()

    def have_reported(self, roster: Sequence[NodePresence]) -> bool:
        """Whether every node that lives has said that it is done."""
        if time.monotonic() - self._since < _DEAF_S:
            return False
        last = max((entry.place.round for entry in roster), default=0)
        current = [entry for entry in roster if entry.place.round == last]
        done = {entry.place.group_rank for entry in current if entry.phase is not Phase.JOINED}
        living = self._heard_by()
        if living is None:
            nodes = max((entry.place.group_world_size for entry in current), default=0)
            return nodes > 1 and len(done) >= nodes - 1
        return bool(living) and living <= done


def sealed(conclusion: Conclusion, recording: Recording, node: str) -> tuple[Seal, bytes]:
    """Return the sealed verdict and the bytes of the ``error.pb`` that hands it to Flyte."""
    report = report_on(conclusion, recording)
    verdict, decision = report.verdict, report.decision
    seal = Seal(
        name="",
        digest=verdict.digest,
        count=verdict.document_count,
        strategy=verdict.strategy,
        json=to_json(verdict, decision),
        timestamp_ns=time.time_ns(),
        node=node,
        code=verdict.code,
        message=flyte_message(report),
        kind=decision.kind,
        origin=decision.origin,
        fault_timestamp_ns=verdict.timestamp_ns,
        worker=verdict.node or "",
    )
    return seal, encode_seal(seal)


def report_on(conclusion: Conclusion, recording: Recording, attempts: Sequence[AttemptSummary] = ()) -> Report:
    """Return what a report on a conclusion says, without credentials.

    Args:
        conclusion: on the attempt.
        recording: where its documents are.
        attempts: others to be shown beside it.
    """
    job, verdict, decision = conclusion.job, conclusion.verdict, conclusion.decision
    return report_of(job, verdict, decision, uri=recording.output_prefix, attempts=attempts)


def newest_seal(seal: Seal, document: bytes, output_prefix: str) -> bytes:
    """Return the error.pb that is to stay: what another pod has left, if it rests on more documents than ours.

    Pods that saw the same documents came to the same verdict; one that had to conclude early saw fewer of them.
    """

    async def left() -> bytes:
        async with open_store(output_prefix) as store:
            return await store.get("error.pb", limit=MAX_DOCUMENT_BYTES)

    try:
        other = run_sync(left())
        found = decode(other, DocumentRef("error.pb"))
    except (StoreError, BadDocumentError):
        return document  # there is none, or none that could be read
    return other if isinstance(found, Seal) and found.count > seal.count else document


def _through_wire(failure: WorkerError) -> WorkerError:
    ref = failure.documents[0] if failure.documents else DocumentRef("")
    document = decode(encode(failure), ref)
    return replace(document, documents=failure.documents) if isinstance(document, WorkerError) else failure


def torch_error_data(conclusion: Conclusion) -> dict[str, Any]:
    """Return the root cause as torch's ``error.json`` has it."""
    from firstfault_torch.error_file import error_file_data  # noqa: PLC0415 - only under another launcher

    verdict = conclusion.verdict
    root = verdict.root
    exception = root.exception if root is not None else None
    return error_file_data(
        exception.type if exception is not None else verdict.code,
        exception.message if exception is not None else verdict.headline,
        verdict.message,
        verdict.timestamp_ns or time.time_ns(),
    )
