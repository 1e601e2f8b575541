"""``firstfault show``: reports the root cause of one attempt."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from firstfault.cli._output import check_file, echo, on_terminal, show_report, write_file
from firstfault.cli._support import EXIT, debug_option, fail, uri_argument

if TYPE_CHECKING:
    from firstfault.conclude import Conclusion
    from firstfault.model import JobErrors
    from firstfault.output_reader import MultiErrorFileOutputReader
    from firstfault.report import Report

__all__ = ["show"]

_STDOUT = "-"


def _html(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    del context, parameter
    if value is not None and value != _STDOUT:
        check_file(value)
    return value


@click.command()
@uri_argument
@click.option("--strategy", help="Strategy that finds the root cause; default: that of the job.")
@click.option(
    "--expected-nodes", type=click.IntRange(min=1), metavar="N", help="Number of nodes that should have reported."
)
@click.option("--fresh", is_flag=True, help="Open every document, not the copies that the pods left.")
@click.option("-v", "--verbose", is_flag=True, help="Show all that is known instead of one screen.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (firstfault.verdict/v1).")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown, for a bug report.")
@click.option("--html", metavar="FILE", callback=_html, help="Write a self-contained HTML file; - is stdout.")
@debug_option
def show(  # noqa: PLR0913, PLR0917 - click's options
    uri: str,
    strategy: str | None,
    expected_nodes: int | None,
    fresh: bool,
    verbose: bool,
    as_json: bool,
    as_markdown: bool,
    html: str | None,
) -> int:
    """Show the root cause of a failed attempt.

    URI is the attempt's output prefix, its errors/ folder or a single document: a path, or s3://, gs://, abfs://.

    \b
    Exit codes: 0 the attempt did not fail, 10 root cause, not to be retried,
    11 root cause, retryable, 3 nothing found, 2 usage, 1 the tool failed.

    \b
    Examples:
      firstfault show s3://bucket/metadata/propeller/f3a9/n0/data/0
      firstfault show -v .firstfault/runs/f3a9/0 | less
      firstfault show --html report.html s3://bucket/metadata/f3a9/n0/data/0
      firstfault show --markdown .firstfault/runs/f3a9/0 > issue.md
      firstfault show --json .firstfault/runs/f3a9/0 | jq .verdict.headline
    """  # noqa: D301 - click's mark of lines to keep
    wanted = {"--json": as_json, "--markdown": as_markdown, "--html -": html == _STDOUT}
    on_stdout = [name for name, is_wanted in wanted.items() if is_wanted]
    if len(on_stdout) > 1:
        raise click.UsageError(f"{' and '.join(on_stdout)} write to stdout; choose one")
    from firstfault.errors import ObjectNotFoundError  # noqa: PLC0415 - `--help` needs none of these
    from firstfault.output_reader import MultiErrorFileOutputReader  # noqa: PLC0415

    reader = MultiErrorFileOutputReader(uri, strategy=strategy, expected_nodes=expected_nodes, fresh=fresh)
    try:
        job = reader.job()
        conclusion = reader.conclude_from(job)
        succeeded = conclusion is None and not uri.rstrip("/").endswith((".pb", "/errors")) and reader.exists()
    except ObjectNotFoundError as error:
        fail(str(error))
        return EXIT.NOTHING_FOUND
    if conclusion is None:
        return _nothing(reader, uri, job, succeeded=succeeded, as_json=as_json, quiet=html == _STDOUT)
    with_attempts = bool(html) or as_markdown or verbose or (not as_json and on_terminal())
    report = _report(reader, uri, conclusion, strategy, with_attempts=with_attempts)
    if html:
        _write_page(report, html, quiet=bool(on_stdout))
    if as_json:
        from firstfault.render.json_report import json_report  # noqa: PLC0415 - as above

        click.echo(json_report(report))
    elif as_markdown:
        from firstfault.render.markdown import markdown  # noqa: PLC0415 - as above

        echo(markdown(report).rstrip("\n"))
    elif not html:
        show_report(report, verbose=verbose)
    return EXIT.ROOT_CAUSE_RETRYABLE if conclusion.decision.retry else EXIT.ROOT_CAUSE


def _report(
    reader: MultiErrorFileOutputReader, uri: str, conclusion: Conclusion, strategy: str | None, *, with_attempts: bool
) -> Report:
    """Return the report. `with_attempts` adds the task's other attempts, which costs requests for each."""
    from firstfault.attempts import logs_of_run, sibling_attempts  # noqa: PLC0415 - as above

    attempts = sibling_attempts(uri, conclusion, strategy=strategy) if with_attempts else ()
    return reader.report(conclusion, attempts=attempts, logs=logs_of_run(uri))


def _write_page(report: Report, file: str, *, quiet: bool) -> None:
    from firstfault.render.html import page  # noqa: PLC0415 - as above

    if file == _STDOUT:
        click.echo(page(report).encode("utf-8", "backslashreplace"))
        return
    write_file(file, page(report))
    click.echo(f"report: {file}", err=quiet)


def _first_attempt(uri: str) -> str:
    """Return a hint to the first attempt if `uri` is the folder of a whole run, else an empty text."""
    from firstfault.errors import FirstFaultError  # noqa: PLC0415 - as above
    from firstfault.output_reader import MultiErrorFileOutputReader  # noqa: PLC0415
    from firstfault.store import join  # noqa: PLC0415

    first = join(uri, "0")
    try:
        reader = MultiErrorFileOutputReader(first)
        is_attempt = reader.is_error() or reader.exists()
    except FirstFaultError:
        return ""
    return f"it is the folder of all attempts; the first is {first}" if is_attempt else ""


def _nothing(  # noqa: PLR0913 - what was found, and how to print it
    reader: MultiErrorFileOutputReader, uri: str, job: JobErrors, *, succeeded: bool, as_json: bool, quiet: bool
) -> int:
    """Print that there is no error; return the exit code."""
    from firstfault.report.words import counted  # noqa: PLC0415 - as above

    if as_json:
        click.echo(json.dumps({"schema": "firstfault.verdict/v1", "verdict": None, "decision": None}))
    if succeeded:
        if not as_json:
            click.echo("no error: the attempt has outputs", err=quiet)
        return EXIT.OK
    hints = [*job.coverage.notes]
    if job.history:
        hints.append(f"the job recovered from {counted(len(job.history), 'failure')} of earlier rounds")
    hint = "; ".join(hints) or _first_attempt(uri) or "is this the attempt's output prefix?"
    fail(f"no error document in {reader.errors_uri}, and no outputs beside it; {hint}")
    return EXIT.NOTHING_FOUND
