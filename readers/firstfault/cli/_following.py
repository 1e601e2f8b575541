"""Follows one running attempt for ``firstfault watch``, and prints what changes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import click

from firstfault.cli import _support as cli
from firstfault.utils.loggers import get_logger
from firstfault.utils.text import counted

if TYPE_CHECKING:
    from firstfault.attempt import Attempt
    from firstfault.attempt_reader import AttemptReader
    from firstfault.conclude import Conclusion
    from firstfault.model import JobErrors

logger = get_logger(__name__)

_SEALING_SECONDS = 5.0
"""How long to wait for the pods' sealed verdict after the last report,
and for a last report after the verdict.
"""
_NEXT_ATTEMPT_LISTINGS = 5
"""Interval between two checks for the next attempt, in intervals between two listings."""


def follow_in_time(
    progress: Progress,
    interval: float,
    successor: AttemptReader | None,
    seconds: float | None,
    *,
    is_live: bool,
) -> bool:
    """Show each change of an attempt until it is decided or the next one has begun;
    return False after `seconds`.

    Args:
        progress: of the attempt.
        interval: minimum seconds between two listings.
        successor: the reader of the next attempt, or None not to wait for one.
        seconds: the timeout, or None for no timeout.
        is_live: also print how fast the nodes advance.
    """
    try:
        asyncio.run(
            asyncio.wait_for(
                _show_until_decided(progress, interval, successor, is_live=is_live), seconds
            )
        )
    except asyncio.TimeoutError:
        return False
    return True


async def _show_until_decided(
    progress: Progress,
    interval: float,
    successor: AttemptReader | None,
    *,
    is_live: bool = False,
) -> None:
    """Show each change of an attempt until it is decided or the next one has begun."""
    # The first of these ends the wait. A retry may begin before this attempt is decided, for
    # instance after the last pod was killed without a report; the caller's timeout cancels all
    # tasks.
    followed = asyncio.ensure_future(_follow_attempt(progress, interval))
    # the live view isn't awaited below: it runs until it is cancelled and must not decide when to
    # stop
    live = asyncio.ensure_future(_show_progress(progress) if is_live else asyncio.sleep(0))
    begins = asyncio.ensure_future(_wait_for_begin(successor, _NEXT_ATTEMPT_LISTINGS * interval))
    try:
        ended, _ = await asyncio.wait((followed, begins), return_when=asyncio.FIRST_COMPLETED)
        progress.is_superseded = begins in ended
        for task in ended:
            task.result()  # raise what it raised
    finally:
        for task in (followed, begins, live):
            task.cancel()
        await asyncio.gather(followed, begins, live, return_exceptions=True)


async def _show_progress(progress: Progress) -> None:
    """Print how fast the nodes advance."""
    from firstfault.cli._live import live  # noqa: PLC0415 - as above
    from firstfault.errors import StoreError  # noqa: PLC0415

    try:
        await progress.has_begun.wait()  # a wrong URI isn't written to
        await live(progress.reader.errors_uri, progress.note)
    except StoreError as error:
        progress.note(f"the agents cannot be asked how fast the nodes advance: {error}")


async def _follow_attempt(progress: Progress, interval: float) -> None:
    """Show each change of an attempt until it is decided."""
    while progress.is_running:
        async with contextlib.aclosing(progress.reader.follow(interval)) as jobs:
            while (
                job := await _wait_for_change(
                    jobs, _SEALING_SECONDS if progress.is_sealed else None
                )
            ) is not None:
                progress.show(job)
        # every node has reported: what is left is the verdict that one of them seals
        ends = time.monotonic() + _SEALING_SECONDS
        while progress.last is not None and not progress.is_sealed and time.monotonic() < ends:
            await asyncio.sleep(interval)
            if (job := await _read_job(progress.reader)) is not None:
                progress.show(job)


async def _wait_for_change(
    jobs: AsyncIterator[JobErrors], seconds: float | None
) -> JobErrors | None:
    """Return the next change; None if there is none within `seconds`."""
    try:
        return await asyncio.wait_for(anext(jobs, None), seconds)
    except asyncio.TimeoutError:
        return None


async def _wait_for_begin(reader: AttemptReader | None, interval: float) -> None:
    """Wait until an attempt has left a document; forever without a `reader`."""
    while True:
        await asyncio.sleep(interval)
        job = await _read_job(reader) if reader is not None else None
        if job is not None and (job.roster or job.failures or job.seals):
            return


async def _read_job(reader: AttemptReader) -> JobErrors | None:
    """Return what an attempt has left; None if the storage doesn't answer."""
    from firstfault.errors import StoreUnavailableError  # noqa: PLC0415 - as above

    try:
        return await reader.job_async()
    except StoreUnavailableError as error:
        logger.warning("the storage does not answer, retrying: %s", error)
        return None


class Progress:
    """Prints what has changed since the previous listing."""

    def __init__(self, reader: AttemptReader, *, as_json: bool) -> None:
        self.reader = reader
        self.last: Conclusion | None = None
        """The last answer, or None if the attempt hasn't failed."""
        self.is_superseded = False
        """Whether the task's next attempt has begun."""
        self.has_begun = asyncio.Event()
        """Set when a node has joined."""
        self.is_running = True
        """Whether the attempt runs, perhaps again after a failure."""
        self._as_json = as_json
        self._nodes = ""
        self._stalls = 0

    @property
    def is_sealed(self) -> bool:
        """Whether the pods have sealed their verdict."""
        return self.last is not None and bool(self.last.job.seals)

    def show(self, job: JobErrors) -> None:
        """Print what has changed."""
        from firstfault.model.job import nodes_done  # noqa: PLC0415 - as above
        from firstfault.report.parts.restart_lines import list_stalls  # noqa: PLC0415

        for record in list_stalls(job)[self._stalls :]:
            self.note(record.reason)
            self._stalls += 1
        if job.roster:
            self.has_begun.set()
        conclusion = self.reader.conclude_from(job)
        self.is_running = conclusion is None and not nodes_done(job.roster, job.coverage.expected)
        if conclusion is None:
            if self.last is not None:
                self.note("the job recovered from the failed round; still watching")
            elif job.settled:
                self.note("every node has finished without a failure")
            elif job.roster:
                self._print_nodes(job)
            self.last = None
            return
        before, self.last = self.last, conclusion
        # a decided answer is left to `print_attempt`, which prints the whole report
        is_decided = job.settled and self.is_sealed
        if not is_decided and (before is None or _answer(before) != _answer(conclusion)):
            # an answer was printed before, and documents that arrived later changed it
            if before is not None:
                self.note("corrected by later documents")
            self._print(conclusion)
        self._print_nodes(job)
        if job.settled and (before is None or not before.job.settled):
            self.note("every node has reported")

    def note_end(self, read: Attempt) -> None:
        """Print that the answer which follows is decided."""
        if (
            self.last is None
            or read.conclusion is None
            or _answer(self.last) == _answer(read.conclusion)
        ):
            self.note("decided")
        else:
            self.note("decided, and corrected by later documents")

    def _print(self, conclusion: Conclusion) -> None:
        from firstfault.render.json_report import json_report  # noqa: PLC0415 - as above

        report = self.reader.report(conclusion)
        if self._as_json:
            click.echo(json_report(report, decided=False))
        else:
            cli.echo(f"preliminary: {report.first_line}")

    def _print_nodes(self, job: JobErrors) -> None:
        expected = job.coverage.expected
        nodes = counted(expected, "node") if expected else "? nodes"
        of = (
            ""
            if expected is not None and job.coverage.reported > expected
            else f" of {expected or '?'}"
        )
        reported = f"{job.coverage.reported}{of} nodes have reported"
        # a healthy job has no reports to count, so the line shows its round
        line = reported if self.last is not None else f"round {job.round} runs on {nodes}"
        if line != self._nodes:
            self.note(line)
        self._nodes = line

    @staticmethod
    def note(text: str) -> None:
        """Print a line with the time."""
        # stderr: stdout has only answers, so that --json can be piped
        click.echo(f"firstfault: {time.strftime('%H:%M:%S')} {text}", err=True)


def _answer(conclusion: Conclusion) -> tuple[object, ...]:
    """Return the parts that make two answers differ; the coverage is none of them."""
    verdict, decision = conclusion.verdict, conclusion.decision
    return (
        verdict.scope,
        verdict.ranks,
        verdict.node,
        verdict.code,
        verdict.category,
        decision.retry,
        decision.origin,
    )
