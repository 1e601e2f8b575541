"""``firstfault watch``: follow an attempt while it runs."""

from __future__ import annotations

import asyncio
import json
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
@uri_argument
@click.option("--strategy", help="How to find the root cause; by default the one the job was run with.")
@click.option("--expected-nodes", type=click.IntRange(min=1), metavar="N", help="How many nodes should report.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Shortest pause between two looks; longer ones where listing takes long.",
)
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Stop after this long.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (firstfault.verdict/v1) for each verdict.")
@debug_option
def watch(  # noqa: PLR0913, PLR0917 - click's options
    uri: str, strategy: str | None, expected_nodes: int | None, interval: float, timeout: float | None, as_json: bool
) -> int:
    """Follow a running attempt and print its root cause as soon as it is known.

    URI is the attempt's output prefix or its errors/ folder. If documents that come later change the answer, the new
    one is printed and said to be one. It ends when every node has reported, or at the timeout.

    \b
    Exit codes: those of show for the last answer; 0 also if the attempt recovered,
    4 nothing failed until the timeout.

    \b
    Examples:
      firstfault watch s3://bucket/metadata/propeller/f3a9/n0/data/0
      firstfault watch --timeout 3600 --json s3://bucket/metadata/f3a9/n0/data/0
    """  # noqa: D301 - click's mark of lines to keep
    from firstfault.output_reader import MultiErrorFileOutputReader  # noqa: PLC0415 - `--help` needs none of it

    reader = MultiErrorFileOutputReader(uri, strategy=strategy, expected_nodes=expected_nodes)
    told = _Told(reader, as_json=as_json)
    click.echo(f"firstfault: watching {reader.errors_uri}", err=True)
    try:
        asyncio.run(asyncio.wait_for(_follow(reader, told, interval), timeout))
    except asyncio.TimeoutError:
        if told.last is None:
            fail(f"no failure in {reader.errors_uri} within {timeout:g} s")
            return EXIT.TIMEOUT
    if told.last is None:
        return EXIT.OK
    return EXIT.ROOT_CAUSE_RETRYABLE if told.last.decision.retry else EXIT.ROOT_CAUSE


async def _follow(reader: MultiErrorFileOutputReader, told: _Told, interval: float) -> None:
    async for job in reader.follow(interval):
        told.see(job)


class _Told:
    """What was said so far, and what is new about each look."""

    def __init__(self, reader: MultiErrorFileOutputReader, *, as_json: bool) -> None:
        self.last: Conclusion | None = None
        self._reader = reader
        self._as_json = as_json
        self._nodes = ""

    def see(self, job: JobErrors) -> None:
        """Say what has changed."""
        conclusion = self._reader.conclude_from(job)
        if conclusion is None:
            if self.last is not None:
                self._note("the round that had failed was recovered from; watching on")
            elif job.settled:
                self._note("every node has finished, and nothing failed")
            elif job.roster:
                self._say_nodes(job)
            self.last = None
            return
        if self.last is None or _answer(self.last) != _answer(conclusion):
            if self.last is not None:
                self._note("corrected by documents that came later")
            self._print(conclusion)
        self.last = conclusion
        self._say_nodes(job)
        if job.settled:
            self._note("every node has reported")

    def _print(self, conclusion: Conclusion) -> None:
        from firstfault.wire.verdict_json import to_json  # noqa: PLC0415 - as above

        report = self._reader.report(conclusion)
        if self._as_json:
            click.echo(json.dumps(json.loads(to_json(report.verdict, report.decision))))
        else:
            show_report(report)

    def _say_nodes(self, job: JobErrors) -> None:
        from firstfault.report.words import counted  # noqa: PLC0415 - as above

        expected = job.coverage.expected
        nodes = counted(expected, "node") if expected else "? nodes"
        heard = f"{job.coverage.reported} of {expected if expected is not None else '?'} nodes have reported"
        said = heard if self.last is not None else f"round {job.round} runs on {nodes}"
        if said != self._nodes:
            self._note(said)
        self._nodes = said

    @staticmethod
    def _note(text: str) -> None:
        click.echo(f"firstfault: {time.strftime('%H:%M:%S')} {text}", err=True)


def _answer(conclusion: Conclusion) -> tuple[object, ...]:
    """What makes an answer another one: not who else has reported meanwhile."""
    verdict, decision = conclusion.verdict, conclusion.decision
    return (verdict.scope, verdict.ranks, verdict.node, verdict.code, verdict.category, decision.retry, decision.origin)
