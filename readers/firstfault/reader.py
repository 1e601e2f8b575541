"""Flyte's OutputReader for jobs in which several workers report errors."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from firstfault.aio import run_sync
from firstfault.assemble import Findings, Unreadable, assemble, nodes_done, silent_nodes
from firstfault.errors import (
    BadDocumentError,
    FirstFaultError,
    ObjectNotFoundError,
    StoreError,
    UsageError,
)
from firstfault.keys import RosterKey
from firstfault.model import (
    DocumentRef,
    JobErrors,
    NodePresence,
    Origin,
    Phase,
    Place,
    Seal,
    Verdict,
    WorkerError,
    Writer,
)
from firstfault.places import DECK, OUTPUTS, Layout, is_error_file, is_stock_error_file
from firstfault.report.json import decision_from_json, verdict_from_json
from firstfault.report.text import flyte_message
from firstfault.retry import RetryContext, decide
from firstfault.store import join, open_store
from firstfault.strategies import DEFAULT_STRATEGY, get_strategy, run_strategy
from firstfault.wire import MAX_DOCUMENT_BYTES, decode, decode_presence

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from flyteidl.core.literals_pb2 import LiteralMap

    from firstfault.model import Decision
    from firstfault.retry import RetryPolicy
    from firstfault.store import ObjectInfo, Store
    from firstfault.strategies import AggregationStrategy

__all__ = ["Conclusion", "ExecutionError", "MultiErrorFileOutputReader", "failed"]

_PARALLEL_GETS = 32
_FIRST_POLL_S = 0.05
_LONGEST_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class ExecutionError:
    """What Flyte's ``io.ExecutionError`` carries, plus when and where."""

    code: str
    message: str
    kind: Origin
    recoverable: bool
    timestamp_ns: int | None = None
    worker: str = ""
    error_uri: str = ""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What one look brought."""

    job: JobErrors
    verdict: Verdict
    decision: Decision


class MultiErrorFileOutputReader:
    """Reads an attempt's outputs and the errors of all of its workers.

    It mirrors Flyte's ``OutputReader`` (`is_error`, `read_error`, `exists`, `read`, `is_file`, `deck_exists`) and adds
    what it concludes: `conclude`, `job`, `verdict`, `decision`. Three layouts are read together: firstfault's error
    documents, Flyte's ``error-<uuid>.pb`` beside the outputs (flytekit 1.14 and later), and a plain ``error.pb``.

    Every call looks afresh. Storage that cannot be listed raises `StoreError`; it never reads as "no error".

    Args:
        uri: an output prefix, an ``errors/`` folder, or a single document.
        strategy: name of a registered strategy, or a callable; None takes the one the job was run with, else
            `DEFAULT_STRATEGY`.
        expected_nodes: how many nodes should report; overrides what the roster says.
        settle_seconds: how long to wait for nodes that have not reported; 0 reads what is there.
        retry_policy: None for firstfault's default.
        storage_options: for fsspec; by default from flytekit's and the library's own settings.
        own_findings: what this pod knows by itself: all there is for a pod that may write but not list, and
            otherwise what it could not upload.
        enough: asked with the roster at each look; true ends the wait as if every node had reported.
        give_up: once set, ends the wait; what is there by then is read.
    """

    def __init__(  # noqa: PLR0913 - keyword options with defaults
        self,
        uri: str,
        *,
        strategy: str | AggregationStrategy | None = None,
        expected_nodes: int | None = None,
        settle_seconds: float = 0.0,
        retry_policy: RetryPolicy | None = None,
        storage_options: Mapping[str, Any] | None = None,
        own_findings: Findings | None = None,
        enough: Callable[[Sequence[NodePresence]], bool] | None = None,
        give_up: threading.Event | None = None,
    ) -> None:
        if expected_nodes is not None and expected_nodes < 1:
            raise UsageError(f"expected_nodes must be at least 1, not {expected_nodes}")
        if settle_seconds < 0:
            raise UsageError(f"settle_seconds must not be negative, not {settle_seconds}")
        self._layout = Layout.of(uri)
        self._strategy = get_strategy(strategy) if strategy is not None else None
        self._strategy_name = strategy if isinstance(strategy, str) else ""
        self._expected_nodes = expected_nodes
        self._settle_seconds = settle_seconds
        self._retry_policy = retry_policy
        self._storage_options = storage_options
        self._own_findings = own_findings
        self._enough = enough
        self._give_up = give_up

    @property
    def errors_uri(self) -> str:
        """URI of the folder that holds the error documents."""
        return self._layout.errors_uri()

    # --- Flyte's OutputReader -----------------------------------------------------------------------------------

    def is_error(self) -> bool:
        """Whether the attempt failed. Errors beat outputs; failures that were recovered from are none."""
        return failed(self.job())

    def read_error(self) -> ExecutionError:
        """Return the root cause as Flyte's error; ``ErrorFileNotFound`` (SYSTEM, recoverable) if there is none.

        The message is the whole report; for a root cause that Flyte's own entrypoint wrote, its text unchanged.
        """
        conclusion = self.conclude()
        if conclusion is None:
            return ExecutionError(
                code="ErrorFileNotFound",
                message=f"no error document in {self.errors_uri}",
                kind=Origin.SYSTEM,
                recoverable=True,
                error_uri=self.errors_uri,
            )
        verdict, decision = conclusion.verdict, conclusion.decision
        root = verdict.root
        stock = root is not None and root.writer is Writer.STOCK
        return ExecutionError(
            code=verdict.code,
            message=verdict.message if stock else flyte_message(verdict, decision, uri=self._layout.root),
            kind=decision.origin,
            recoverable=decision.retry,
            timestamp_ns=verdict.timestamp_ns,
            worker=verdict.node or "",
            error_uri=self.errors_uri,
        )

    def exists(self) -> bool:
        """Whether the attempt left outputs."""
        return run_sync(self._exists(OUTPUTS))

    def read(self) -> tuple[LiteralMap | None, ExecutionError | None]:
        """Return (outputs, None), or (None, error) if there are none or they are not readable."""
        from flyteidl.core.literals_pb2 import LiteralMap  # noqa: PLC0415 - only this call needs it
        from google.protobuf.message import DecodeError  # noqa: PLC0415

        where = join(self._layout.root, OUTPUTS)
        try:
            data = run_sync(self._get(OUTPUTS))
        except ObjectNotFoundError:
            message = f"outputs not found at {where}"
            return None, ExecutionError("OutputsNotFound", message, Origin.SYSTEM, recoverable=True)
        outputs = LiteralMap()
        try:
            outputs.ParseFromString(data)
        except DecodeError as error:
            message = f"{where} holds no outputs: {error}"
            return None, ExecutionError("OutputsBadFormat", message, Origin.SYSTEM, recoverable=True)
        return outputs, None

    def is_file(self) -> bool:
        """Whether outputs are a file rather than held in memory: always."""
        return True

    def deck_exists(self) -> bool:
        """Whether the attempt left a deck."""
        return run_sync(self._exists(DECK))

    # --- what firstfault adds -----------------------------------------------------------------------------------

    def conclude(self, context: RetryContext | None = None) -> Conclusion | None:
        """Return what was read, the verdict on it and the decision, all from one look; None if there is no error.

        Raises:
            StoreError: the storage could not be listed.
        """
        return self.conclude_from(self.job(), context)

    def conclude_from(self, job: JobErrors, context: RetryContext | None = None) -> Conclusion | None:
        """As `conclude`, from what has been read already."""
        if not failed(job):
            return None
        sealed = job.seals[0] if job.seals else None
        if sealed is not None and self._speaks(sealed, job):
            verdict = _verdict_of_seal(sealed, job)
        else:
            verdict = run_strategy(self._strategy or _strategy_of(job), job)
        context = context or RetryContext(pods_alive=not silent_nodes(job))
        decision = None
        if self._retry_policy is None and sealed is not None and _agrees(sealed, verdict):
            # sealed under the task's own policy, which may be anything; it holds as long as the verdict is the same
            decision = decision_from_json(sealed.json)
            if decision is not None:
                decision = replace(decision, enforced=context.pods_alive)
        return Conclusion(job, verdict, decision or decide(verdict, self._retry_policy, context))

    def _speaks(self, seal: Seal, job: JobErrors) -> bool:
        """Whether the pods' own verdict is taken: the documents are gone, or it rests on some that were lost."""
        if not job.failures:
            return True
        same_strategy = self._strategy is None or self._strategy_name == seal.strategy
        return same_strategy and seal.count > job.document_count

    def verdict(self) -> Verdict | None:
        """Return the verdict, None if there is no error."""
        conclusion = self.conclude()
        return conclusion.verdict if conclusion else None

    def decision(self) -> Decision | None:
        """Return whether to run the task again, None if there is no error."""
        conclusion = self.conclude()
        return conclusion.decision if conclusion else None

    def job(self) -> JobErrors:
        """Return everything that is known about the attempt.

        Raises:
            StoreError: the storage could not be listed.
        """
        return run_sync(self.job_async())

    async def job_async(self) -> JobErrors:
        """As `job`, for a caller with an event loop."""
        async with open_store(self._layout.root, self._storage_options) as store:
            try:
                roster, bad, done = await self._settle(store)
                findings = self._with_own(await self._look(store, roster, bad))
            except StoreError as error:
                if self._own_findings is None:
                    raise
                note = f"own node only, the others' documents could not be looked at: {error}"
                own = replace(self._own_findings, notes=(*self._own_findings.notes, note))
                return assemble(own, expected_nodes=self._expected_nodes, settled=False)
            settled = done or self._settle_seconds <= 0
            return assemble(findings, expected_nodes=self._expected_nodes, settled=settled)

    # --- one look -----------------------------------------------------------------------------------------------

    async def _exists(self, name: str) -> bool:
        async with open_store(self._layout.root, self._storage_options) as store:
            return await store.exists(name)

    async def _get(self, name: str) -> bytes:
        async with open_store(self._layout.root, self._storage_options) as store:
            return await store.get(name)

    def _with_own(self, findings: Findings) -> Findings:
        """Add what this pod knows and could not upload."""
        if self._own_findings is None:
            return findings
        present = {ref.name for document in findings.documents for ref in document.documents}
        lost = [
            document
            for document in self._own_findings.documents
            if not any(ref.name in present for ref in document.documents)
        ]
        return replace(findings, documents=(*findings.documents, *lost))

    async def _settle(self, store: Store) -> tuple[list[NodePresence], list[Unreadable], bool]:
        """Read the roster until every node is done or the time is up; say which."""
        deadline = time.monotonic() + self._settle_seconds
        pause = _FIRST_POLL_S
        known: dict[str, NodePresence] = {}
        unreadable: list[Unreadable] = []
        while True:
            names = await self._list_roster(store)
            # an entry never changes once it is there: each is read once, however often the folder is listed
            new = [item for item in names if item.name not in known]
            read, bad = await _read_roster(store, self._layout.roster or "", new)
            known.update(read)
            unreadable += bad
            roster = list(known.values())
            done = nodes_done(roster, self._expected_nodes)
            left = deadline - time.monotonic()
            if not done and left > 0 and self._enough is not None:
                done = await asyncio.to_thread(self._enough, roster)
            if done or left <= 0 or await self._pause(min(pause, left)):
                return roster, unreadable, done
            pause = min(pause * 1.5, _LONGEST_POLL_S)

    async def _pause(self, seconds: float) -> bool:
        """Wait; return at once, with True, when the caller gives up."""
        if self._give_up is None:
            await asyncio.sleep(seconds)
            return False
        return await asyncio.to_thread(self._give_up.wait, seconds)

    async def _list_roster(self, store: Store) -> list[ObjectInfo]:
        if self._layout.roster is None:
            return []
        return [item for item in await store.list(self._layout.roster) if is_error_file(item.name)]

    async def _look(self, store: Store, roster: list[NodePresence], bad: list[Unreadable]) -> Findings:
        layout = self._layout
        paths: list[tuple[str, ObjectInfo | None]] = []
        foreign: list[str] = []
        if layout.document is not None:
            paths.append((layout.document, None))
        if layout.errors is not None:
            for item in await store.list(layout.errors):
                if is_error_file(item.name):
                    paths.append((join_name(layout.errors, item.name), item))
                else:
                    foreign.append(item.name)
        if layout.stock is not None:
            paths += [
                (join_name(layout.stock, item.name), item)
                for item in await store.list(layout.stock)
                if is_stock_error_file(item.name)
            ]
        gate = asyncio.Semaphore(_PARALLEL_GETS)
        results = await asyncio.gather(*(_read(store, gate, path, item) for path, item in paths))
        return Findings(
            documents=tuple(result for result in results if isinstance(result, WorkerError)),
            seals=tuple(result for result in results if isinstance(result, Seal)),
            roster=tuple(roster),
            unreadable=tuple(result for result in results if isinstance(result, Unreadable)),
            foreign=tuple(foreign),
            notes=tuple(f"roster entry not readable: {item.name}: {item.reason}" for item in bad),
        )


def join_name(folder: str, name: str) -> str:
    """Path of an object relative to the store's root."""
    return f"{folder}/{name}" if folder else name


async def _read(
    store: Store, gate: asyncio.Semaphore, path: str, item: ObjectInfo | None
) -> WorkerError | Seal | Unreadable:
    name = path.rsplit("/", 1)[-1]
    if item is not None and item.size > MAX_DOCUMENT_BYTES:
        return _too_large(name, item.size)
    async with gate:
        try:
            data = await store.get(path, limit=MAX_DOCUMENT_BYTES if item is None else None)
            ref = DocumentRef(
                name=name,
                uri=join(store.uri, path),
                last_modified_ns=item.last_modified_ns if item else None,
                size=len(data),
            )
            return decode(data, ref)
        except ObjectNotFoundError:
            if item is None:
                raise
            return Unreadable(name, "gone between listing and reading")
        except (StoreError, BadDocumentError) as error:
            if item is None:
                raise
            return Unreadable(name, str(error))


def _too_large(name: str, size: int) -> Unreadable:
    return Unreadable(name, f"{size} bytes, more than the {MAX_DOCUMENT_BYTES} that a document may have")


async def _read_roster(
    store: Store, folder: str, names: list[ObjectInfo]
) -> tuple[dict[str, NodePresence], list[Unreadable]]:
    """Return entries by name; of one that cannot be read, what its name says, so that it still counts for its round."""
    gate = asyncio.Semaphore(_PARALLEL_GETS)

    async def read(item: ObjectInfo) -> NodePresence | Unreadable:
        if item.size > MAX_DOCUMENT_BYTES:
            return _too_large(item.name, item.size)
        async with gate:
            try:
                data = await store.get(join_name(folder, item.name))
                return decode_presence(data, item.name)
            except (StoreError, BadDocumentError) as error:
                return Unreadable(item.name, str(error))

    results = dict(zip((item.name for item in names), await asyncio.gather(*map(read, names)), strict=True))
    entries = {name: result for name, result in results.items() if isinstance(result, NodePresence)}
    bad = [result for result in results.values() if isinstance(result, Unreadable)]
    for item in bad:
        key = RosterKey.parse(item.name)
        if key is not None:
            place = Place(round=key.round, group_rank=key.group_rank, incarnation=key.incarnation)
            entries[item.name] = NodePresence(key.phase, place)
    return entries, bad


def failed(job: JobErrors) -> bool:
    """Whether what was read means that the attempt failed.

    An unreadable document, or a node that said it failed and left none, is a failure nobody can name.
    """
    said = any(presence.phase is Phase.FAILED for presence in job.roster)
    return bool(job.failures or job.seals or job.coverage.unreadable or said)


def _strategy_of(job: JobErrors) -> AggregationStrategy:
    """The strategy the job itself was sealed with, if it is known here."""
    for seal in job.seals:
        try:
            return get_strategy(seal.strategy)
        except FirstFaultError:
            continue  # of a plug-in that is not here, or broken here
    return get_strategy(DEFAULT_STRATEGY)


def _agrees(seal: Seal, verdict: Verdict) -> bool:
    return seal.digest == verdict.digest and seal.strategy == verdict.strategy


def _verdict_of_seal(seal: Seal, job: JobErrors) -> Verdict:
    verdict = verdict_from_json(seal.json)
    if verdict is None:
        # sealed by another version; what it says to Flyte is readable all the same
        spoken = WorkerError(
            seal.code,
            seal.message,
            seal.kind,
            seal.origin,
            seal.fault_timestamp_ns,
            seal.worker,
            Place(node=seal.worker),
        )
        verdict = run_strategy(get_strategy("earliest"), replace(job, failures=(spoken,)))
    note = "no error documents were read; this is the verdict that the pods sealed"
    notes = (*verdict.coverage.notes, *job.coverage.notes, note)
    return replace(verdict, coverage=replace(verdict.coverage, notes=notes, complete=False))
