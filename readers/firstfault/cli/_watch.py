"""``firstfault watch``: follows a running attempt."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import click

from firstfault.cli._output import show_report
from firstfault.cli._support import EXIT, debug_option, fail, uri_argument

if TYPE_CHECKING:
    from firstfault.conclude import Conclusion
    from firstfault.model import JobErrors
    from firstfault.output_reader import MultiErrorFileOutputReader

__all__ = ["watch"]


@click.command()
@uri_argument()
@click.option("--strategy", help="Strategy that finds the root cause; default: that of the job.")
@click.option("--expected-nodes", type=click.IntRange(min=1), metavar="N", help="Number of nodes that should report.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Shortest pause between two listings; longer where listing is slow.",
)
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Stop after this long.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (firstfault.verdict/v1) for each verdict.")
@debug_option
def watch(  # noqa: PLR0913, PLR0917 - click's options
    uri: str, strategy: str | None, expected_nodes: int | None, interval: float, timeout: float | None, as_json: bool
) -> int:
    """Follow a running attempt and print its root cause as soon as it is known.

    URI is the attempt's output prefix or its errors/ folder. If later documents change the answer, the new answer is
    printed too. The command ends when every node has reported, or at the timeout.

    \b
    Exit codes: those of show for the last answer; 0 also if the attempt recovered,
    4 no failure before the timeout.

    \b
    Examples:
      firstfault watch s3://bucket/metadata/propeller/f3a9/n0/data/0
      firstfault watch --timeout 3600 --json s3://bucket/metadata/f3a9/n0/data/0
    """  # noqa: D301 - click's mark of lines to keep
    from firstfault.output_reader import MultiErrorFileOutputReader  # noqa: PLC0415 - `--help` needs none of it

    reader = MultiErrorFileOutputReader(uri, strategy=strategy, expected_nodes=expected_nodes)
    progress = _Progress(reader, as_json=as_json)
    click.echo(f"firstfault: watching {reader.errors_uri}", err=True)
    try:
        asyncio.run(asyncio.wait_for(_follow(reader, progress, interval), timeout))
    except asyncio.TimeoutError:
        if progress.last is None:
            fail(f"no failure in {reader.errors_uri} within {timeout:g} s")
            return EXIT.TIMEOUT
    if progress.last is None:
        return EXIT.OK
    return EXIT.ROOT_CAUSE_RETRYABLE if progress.last.decision.retry else EXIT.ROOT_CAUSE


async def _follow(reader: MultiErrorFileOutputReader, progress: _Progress, interval: float) -> None:
    async for job in reader.follow(interval):
        progress.show(job)


class _Progress:
    """Prints what has changed since the previous listing."""

    def __init__(self, reader: MultiErrorFileOutputReader, *, as_json: bool) -> None:
        self.last: Conclusion | None = None
        self._reader = reader
        self._as_json = as_json
        self._nodes = ""

    def show(self, job: JobErrors) -> None:
        """Print what has changed."""
        conclusion = self._reader.conclude_from(job)
        if conclusion is None:
            if self.last is not None:
                self._note("the job recovered from the failed round; still watching")
            elif job.settled:
                self._note("every node has finished without a failure")
            elif job.roster:
                self._print_nodes(job)
            self.last = None
            return
        if self.last is None or _answer(self.last) != _answer(conclusion):
            if self.last is not None:
                self._note("corrected by later documents")
            self._print(conclusion)
        self.last = conclusion
        self._print_nodes(job)
        if job.settled:
            self._note("every node has reported")

    def _print(self, conclusion: Conclusion) -> None:
        from firstfault.render.json_report import json_report  # noqa: PLC0415 - as above

        report = self._reader.report(conclusion)
        if self._as_json:
            click.echo(json_report(report))
        else:
            show_report(report)

    def _print_nodes(self, job: JobErrors) -> None:
        from firstfault.report.words import counted  # noqa: PLC0415 - as above

        expected = job.coverage.expected
        nodes = counted(expected, "node") if expected else "? nodes"
        reported = f"{job.coverage.reported} of {expected if expected is not None else '?'} nodes have reported"
        line = reported if self.last is not None else f"round {job.round} runs on {nodes}"
        if line != self._nodes:
            self._note(line)
        self._nodes = line

    @staticmethod
    def _note(text: str) -> None:
        click.echo(f"firstfault: {time.strftime('%H:%M:%S')} {text}", err=True)


def _answer(conclusion: Conclusion) -> tuple[object, ...]:
    """Return the parts that make two answers differ; the coverage is none of them."""
    verdict, decision = conclusion.verdict, conclusion.decision
    return (verdict.scope, verdict.ranks, verdict.node, verdict.code, verdict.category, decision.retry, decision.origin)
