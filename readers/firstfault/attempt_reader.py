"""Reads one attempt from its storage: the only way to its documents and roster."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from firstfault import model
from firstfault.conclude import Conclusion, Judgment, conclude
from firstfault.errors import (
    BadDocumentError,
    StoreError,
    StoreUnavailableError,
    UsageError,
)
from firstfault.layout import ERROR_FILE, OUTPUTS, VERDICT_JSON, Layout
from firstfault.reading.assemble import Snapshot
from firstfault.reading.request import Patience, Request
from firstfault.report.data import AttemptSummary, Report, report_conclusion, with_attempts
from firstfault.retry import RetryContext, RetryPolicy
from firstfault.store import Store, open_store
from firstfault.strategies import AggregationStrategy, get_reading_needs, get_strategy
from firstfault.strategies.registry import find_sealed_strategy
from firstfault.utils.run_sync import run_sync
from firstfault.wire.json_schemas import from_json, restore_seal

_SEALED = model.DocumentRef(ERROR_FILE)


async def read_sealed_judgment(uri: str) -> Judgment | None:
    """Return the judgment that an attempt's nodes published in ``error.pb``, or None if it is
    missing or unreadable. This takes one request and doesn't read the root cause's document.

    Raises:
        StoreUnavailableError: the storage doesn't answer.
    """
    from firstfault.wire.documents import (  # noqa: PLC0415 - logs are read without documents
        MAX_DOCUMENT_BYTES,
        decode,
    )

    try:
        async with open_store(uri) as store:
            seal = decode(await store.get(ERROR_FILE, limit=MAX_DOCUMENT_BYTES), _SEALED)
    except StoreUnavailableError:
        raise  # a second request would wait as long again
    except (StoreError, BadDocumentError):
        return None
    sealed = from_json(seal.json) if isinstance(seal, model.Seal) else None
    return Judgment(*sealed, is_sealed=True) if sealed is not None else None


class AttemptReader:
    """Reads one attempt: the errors of all of its workers, and what follows from them.

    It reads three layouts together: firstfault's error documents, Flyte's ``error-<uuid>.pb`` next
    to the outputs (flytekit 1.14 and later), and a plain ``error.pb``.

    Every call reads the storage again. A storage that can't be listed raises `StoreError`, never
    "no error". `firstfault.reading.attempt` reads, `firstfault.conclude` judges.

    Args:
        uri: an output prefix, an ``errors/`` folder, or a single document.
        strategy: name of a registered strategy, or a callable; None takes that of the job, else
            `DEFAULT_STRATEGY`.
        expected_nodes: number of nodes that should report; overrides the roster's.
        settle_seconds: how long to wait for nodes that haven't reported; 0 doesn't wait.
        retry_policy: None for firstfault's default.
        storage_options: fsspec's options; they override the environment.
        copies: files of the attempt that the caller has, by path below the output prefix. They need
            no request; the reader adds those that aren't in the storage, and uses them alone if it
            can't list the storage.
        fresh: whether to open every document itself, although the pods left copies of what they
            concluded from.
        enough: called with the roster after each listing; True ends the wait as if every node had
            reported.
        shutdown_requested: once set, ends the wait.
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
        copies: Mapping[str, bytes] | None = None,
        fresh: bool = False,
        enough: Callable[[Sequence[model.NodePresence]], bool] | None = None,
        shutdown_requested: threading.Event | None = None,
    ) -> None:
        if expected_nodes is not None and expected_nodes < 1:
            raise UsageError(f"expected_nodes must be at least 1, not {expected_nodes}")
        if settle_seconds < 0:
            raise UsageError(f"settle_seconds must not be negative, not {settle_seconds}")
        if strategy is not None:
            get_strategy(strategy)  # refuse an unknown one before anything is read
        self._uri = uri
        self._layout = Layout.of(uri)
        self._strategy = strategy
        self._retry_policy = retry_policy
        self._storage_options = storage_options
        self._copies = copies or {}
        patience = Patience(settle_seconds, expected_nodes, enough, shutdown_requested)
        self._request = Request(self._layout, self._find_needs, patience, fresh)
        self.read_files: Mapping[str, bytes] = {}
        """What the last read opened, by path below the output prefix; for readers with copies."""

    @property
    def errors_uri(self) -> str:
        """URI of the folder of error documents."""
        return self._layout.errors_uri()

    def exists(self) -> bool:
        """Whether the attempt has outputs."""
        return run_sync(self._exists(OUTPUTS))

    def conclude(self, context: RetryContext | None = None) -> Conclusion | None:
        """Read the attempt once; return the job, the verdict and the decision,
        None without an error.

        Raises:
            StoreError: the storage could not be listed.
        """
        return self.conclude_from(self.job(), context)

    def conclude_from(
        self, job: model.JobErrors, context: RetryContext | None = None
    ) -> Conclusion | None:
        """Do the same as `conclude`, with the documents that have already been read."""
        return conclude(job, strategy=self._strategy, policy=self._retry_policy, context=context)

    def report(
        self,
        conclusion: Conclusion,
        *,
        attempts: Sequence[AttemptSummary] = (),
        logs: Mapping[str, str] | None = None,
    ) -> Report:
        """Return the report on a conclusion of this reader; see `firstfault.report.build_report`
        for its parts.
        """
        return with_attempts(report_conclusion(conclusion, uri=self._uri, logs=logs), attempts)

    def verdict(self) -> model.Verdict | None:
        """Return the verdict; None without an error."""
        conclusion = self.conclude()
        return conclusion.verdict if conclusion else None

    def decision(self) -> model.Decision | None:
        """Return the decision whether to run the task again; None without an error."""
        conclusion = self.conclude()
        return conclusion.decision if conclusion else None

    def restarts(self) -> tuple[model.RestartRecord, ...]:
        """Return what was decided after each failed round of the attempt, oldest first.

        Raises:
            StoreError: the storage could not be listed.
        """
        return self.job().restarts

    def job(self) -> model.JobErrors:
        """Return the failures, the roster and the coverage of the attempt.

        Raises:
            StoreError: the storage could not be listed.
        """
        return run_sync(self.job_async())

    async def job_async(self) -> model.JobErrors:
        """Return the same as `job`, in the caller's event loop."""
        from firstfault.reading.attempt import (  # noqa: PLC0415 - who reads logs doesn't need it
            read_job,
        )
        from firstfault.reading.fetch import StoreWithCopies  # noqa: PLC0415 - as above

        try:
            async with open_store(self._layout.root, self._storage_options) as opened:
                if not self._copies:
                    return await self._with_handed_over_verdict(
                        opened, await read_job(opened, self._request)
                    )
                store = StoreWithCopies(opened, self._copies, opened.uri)
                self.read_files = store.read
                return await read_job(store, self._request)
        except StoreError as error:
            if not self._copies:
                raise
            # the storage can't be listed: conclude from the caller's documents rather than fail
            return await self._read_copies(f"only the documents at hand were read; {error}")

    async def _with_handed_over_verdict(
        self, store: Store, job: model.JobErrors
    ) -> model.JobErrors:
        """Add the verdict that the nodes left for the next attempt if ``error.pb`` isn't there.

        A folder's listing may lag by a minute on NFS, so that a reader on another machine misses
        the newest file.
        """
        if job.seals or not job.has_failed or self._layout.document:
            return job
        try:
            seal = restore_seal(VERDICT_JSON, (await store.get(VERDICT_JSON)).decode())
        except (StoreError, UnicodeDecodeError):
            return job
        return replace(job, seals=(seal,)) if seal is not None else job

    def with_additional_sources(self, additional: Snapshot) -> AttemptReader:
        """Return this reader; it adds what logs and flight recorders of the same job contain."""
        self._request = replace(self._request, additional=additional)
        return self

    def read_copies(self, note: str) -> model.JobErrors:
        """Return the job that the copies alone make, without a request; `note` is the reason,
        for the coverage.
        """
        return run_sync(self._read_copies(note))

    async def _read_copies(self, note: str) -> model.JobErrors:
        from firstfault.reading.attempt import read_once  # noqa: PLC0415 - as above
        from firstfault.reading.fetch import StoreWithCopies  # noqa: PLC0415 - as above

        # never settled: other nodes may have reports that can't be read now; `fresh` would open
        # documents in a storage that can't be listed
        alone = StoreWithCopies(None, self._copies, self._layout.root)
        self.read_files = alone.read
        return replace(
            await read_once(alone, replace(self._request, fresh=False, notes=(note,))),
            settled=False,
        )

    async def follow(self, interval_seconds: float = 1.0) -> AsyncGenerator[model.JobErrors, None]:
        """Yield the job of a running attempt at once and after each change,
        until all nodes are done.

        A pause is at least ten times as long as the last listing took, and at most a minute.
        Without a change only names are listed. A storage that doesn't answer is listed again after
        the next pause. The shortest pause is `interval_seconds`.

        Raises:
            UsageError: the URI is a single document.
            StoreError: the storage refuses a request.
        """
        from firstfault.reading.attempt import follow  # noqa: PLC0415 - as above

        if self._layout.document:
            raise UsageError(
                f"{self.errors_uri} is a single document; follow an output prefix or an errors/"
                " folder"
            )
        async with (
            open_store(self._layout.root, self._storage_options) as store,
            # close the iterator before its store: a listing may be in flight if the caller stops
            # early
            contextlib.aclosing(follow(store, self._request, interval_seconds)) as jobs,
        ):
            async for job in jobs:
                yield job

    def _find_needs(self, seals: Sequence[model.Seal]) -> model.ReadingNeeds:
        """Return what the strategy needs to read. The strategy is the caller's or, without one,
        that of the pods' sealed verdict.
        """
        # the pods may have concluded with a strategy of the job's own: an answer here should agree
        # with theirs
        strategy = (
            find_sealed_strategy(seals) if self._strategy is None else get_strategy(self._strategy)
        )
        return get_reading_needs(strategy)

    async def _exists(self, name: str) -> bool:
        async with open_store(self._layout.root, self._storage_options) as store:
            return await store.exists(name)

    async def _get(self, name: str) -> bytes:
        async with open_store(self._layout.root, self._storage_options) as store:
            return await store.get(name)
