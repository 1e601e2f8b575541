"""``firstfault show``: what is known about one attempt."""

from __future__ import annotations

import json

import click

from firstfault.cli._support import EXIT, debug_option, fail

__all__ = ["show"]


@click.command()
@click.argument("uri")
@click.option("--strategy", help="How to find the root cause; by default the one the job was run with.")
@click.option("--expected-nodes", type=click.IntRange(min=1), metavar="N", help="How many nodes should have reported.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (firstfault.verdict/v1).")
@debug_option
def show(uri: str, strategy: str | None, expected_nodes: int | None, as_json: bool) -> int:
    r"""Show the root cause of a failed attempt.

    URI is the attempt's output prefix, its errors/ folder or a single document: a path, or s3://, gs://, abfs://.

    \b
    Exit codes: 0 the attempt did not fail, 10 root cause, not to be retried,
    11 root cause, retryable, 3 nothing found, 2 usage, 1 the tool failed.
    """
    from firstfault.errors import ObjectNotFoundError  # noqa: PLC0415 - `--help` needs none of these
    from firstfault.reader import MultiErrorFileOutputReader  # noqa: PLC0415
    from firstfault.report import terminal_text, to_json  # noqa: PLC0415

    reader = MultiErrorFileOutputReader(uri, strategy=strategy, expected_nodes=expected_nodes)
    try:
        job = reader.job()
        conclusion = reader.conclude_from(job)
        succeeded = conclusion is None and not uri.rstrip("/").endswith((".pb", "/errors")) and reader.exists()
    except ObjectNotFoundError as error:
        fail(str(error))
        return EXIT.NOTHING_FOUND
    if conclusion is not None:
        if as_json:
            click.echo(to_json(conclusion.verdict, conclusion.decision))
        else:
            click.echo(terminal_text(conclusion.verdict, conclusion.decision, uri=reader.errors_uri))
        return EXIT.ROOT_CAUSE_RETRYABLE if conclusion.decision.retry else EXIT.ROOT_CAUSE
    if as_json:
        click.echo(json.dumps({"schema": "firstfault.verdict/v1", "verdict": None, "decision": None}))
    if succeeded:
        if not as_json:
            click.echo("no error: the attempt left outputs")
        return EXIT.OK
    hints = [*job.coverage.notes]
    if job.history:
        hints.append(f"{len(job.history)} failures of earlier rounds were recovered from")
    known = "; ".join(hints) or "is this the attempt's output prefix?"
    fail(f"no error document in {reader.errors_uri}, and no outputs beside it; {known}")
    return EXIT.NOTHING_FOUND
