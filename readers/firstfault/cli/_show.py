"""``firstfault show``: reports the root cause of one attempt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from firstfault.cli._output import check_file, echo, on_terminal, show_report, write_file
from firstfault.cli._schemes import resolved
from firstfault.cli._support import EXIT, complete_files, complete_strategies, debug_option, fail, uri_argument
from firstfault.errors import BadDocumentError

if TYPE_CHECKING:
    from firstfault.attempts import ReadAttempt
    from firstfault.conclude import Conclusion
    from firstfault.output_reader import MultiErrorFileOutputReader
    from firstfault.report import Report

_STDIN = _STDOUT = "-"
_RUNS = Path(".firstfault", "runs")
"""Where `firstfault run` leaves its runs, unless it is told otherwise."""


def _html(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    del context, parameter
    if value is not None and value != _STDOUT:
        check_file(value)
    return value


@click.command()
@uri_argument(required=False)
@click.option("--last", is_flag=True, help="Show the newest run below .firstfault/runs, instead of a URI.")
@click.option(
    "--strategy",
    shell_complete=complete_strategies,
    help="Strategy that finds the root cause; default: that of the job.",
)
@click.option(
    "--expected-nodes", type=click.IntRange(min=1), metavar="N", help="Number of nodes that should have reported."
)
@click.option("--fresh", is_flag=True, help="Open every document, not the copies that the pods left.")
@click.option(
    "--recovered", is_flag=True, help="Show the faults from which the attempt recovered; with --json as JSON."
)
@click.option("-v", "--verbose", is_flag=True, help="Show all that is known instead of one screen.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (firstfault.verdict/v1).")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown, for a bug report.")
@click.option(
    "--html",
    metavar="FILE",
    callback=_html,
    shell_complete=complete_files,
    help="Write a self-contained HTML file; - is stdout.",
)
@debug_option
def show(  # noqa: PLR0913, PLR0917 - click's options
    uri: str | None,
    last: bool,
    strategy: str | None,
    expected_nodes: int | None,
    fresh: bool,
    recovered: bool,
    verbose: bool,
    as_json: bool,
    as_markdown: bool,
    html: str | None,
) -> int:
    """Show the root cause of a failed attempt.

    URI is the attempt's output prefix, its errors/ folder or a single document: a path, or s3://, gs://, abfs://;
    - reads a document from stdin. For the folder of all attempts of a task, the last one that failed is shown.
    It may also be the log folder of a torchrun, or flyte://project/domain/execution (and /node, /attempt).

    \b
    Exit codes: 0 the attempt did not fail, 10 root cause, not to be retried,
    11 root cause, retryable, 3 nothing found, 5 no readable document,
    2 usage, 1 the tool failed.

    \b
    Examples:
      firstfault show s3://bucket/metadata/propeller/f3a9/n0/data/0
      firstfault show flyte://flytesnacks/development/f3a9
      firstfault show --last
      firstfault show --recovered s3://bucket/metadata/propeller/f3a9/n0/data/0
      aws s3 cp s3://bucket/metadata/f3a9/n0/data/0/error.pb - | firstfault show -
      firstfault show -v .firstfault/runs/f3a9 | less
      firstfault show --html report.html s3://bucket/metadata/f3a9/n0/data/0
      firstfault show --markdown .firstfault/runs/f3a9/0 > issue.md
      firstfault show --json .firstfault/runs/f3a9/0 | jq .verdict.headline
    """  # noqa: D301 - click's mark of lines to keep
    wanted = {"--json": as_json, "--markdown": as_markdown, "--html -": html == _STDOUT}
    on_stdout = [name for name, is_wanted in wanted.items() if is_wanted]
    if len(on_stdout) > 1:
        raise click.UsageError(f"{' and '.join(on_stdout)} write to stdout; choose one")
    if recovered and (as_markdown or html):
        raise click.UsageError("--recovered prints text, or JSON with --json")
    from firstfault.attempts import read_attempt, read_document  # noqa: PLC0415 - `--help` needs none of these
    from firstfault.errors import ObjectNotFoundError  # noqa: PLC0415
    from firstfault.output_reader import MultiErrorFileOutputReader  # noqa: PLC0415

    uri = _uri(uri, last=last)

    def reader_of(uri: str) -> MultiErrorFileOutputReader:
        return MultiErrorFileOutputReader(uri, strategy=strategy, expected_nodes=expected_nodes, fresh=fresh)

    try:
        if uri == _STDIN:
            read = read_document(_stdin(), "stdin", reader_of)
        else:
            uri = resolved(uri)
            read = read_attempt(uri, reader_of)
    except ObjectNotFoundError as error:
        fail(str(error))
        return EXIT.NOTHING_FOUND
    if recovered:
        return _print_recovered(read, as_json=as_json)
    return print_attempt(read, uri, strategy, verbose=verbose, as_json=as_json, as_markdown=as_markdown, html=html)


def print_attempt(  # noqa: PLR0913 - keywords
    read: ReadAttempt,
    uri: str,
    strategy: str | None,
    *,
    verbose: bool = False,
    as_json: bool = False,
    as_markdown: bool = False,
    html: str | None = None,
) -> int:
    """Print an attempt in the wanted forms; return the exit code.

    Args:
        read: the attempt.
        uri: as the caller named it.
        strategy: as the caller named it.
        verbose: everything, instead of one screen.
        as_json: one JSON object.
        as_markdown: Markdown.
        html: file of the page; None: none.
    """
    if read.conclusion is None:
        return _nothing(read, as_json=as_json, quiet=html == _STDOUT)
    with_attempts = bool(html) or as_markdown or verbose or (not as_json and on_terminal()) or read.uri != uri
    report = _report(read, read.conclusion, strategy, with_attempts=with_attempts)
    if html:
        _write_page(report, html, quiet=html == _STDOUT or as_json or as_markdown)
    if as_json:
        from firstfault.render.json_report import json_report  # noqa: PLC0415 - as above

        click.echo(json_report(report))
    elif as_markdown:
        from firstfault.render.plain import markdown  # noqa: PLC0415 - as above

        echo(markdown(report).rstrip("\n"))
    elif not html:
        show_report(report, verbose=verbose)
    if not read.conclusion.job.failures and not read.conclusion.job.seals:
        return _unread(read)
    return EXIT.ROOT_CAUSE_RETRYABLE if read.conclusion.decision.retry else EXIT.ROOT_CAUSE


def _print_recovered(read: ReadAttempt, *, as_json: bool) -> int:
    """Print the restarts within an attempt and the seconds that they cost, also if it succeeded."""
    from firstfault.report.sections import restart_line  # noqa: PLC0415 - as above
    from firstfault.report.words import counted  # noqa: PLC0415 - as above
    from firstfault.wire.json_schemas import restart_to_json  # noqa: PLC0415 - as above

    restarts = [record for record in read.job.restarts if record.restart]
    lost = sum(record.lost_seconds or 0 for record in restarts)
    if as_json:
        records = [json.loads(restart_to_json(record)) for record in restarts]
        click.echo(json.dumps({"uri": read.uri, "lost_seconds": round(lost, 3), "restarts": records}))
        return EXIT.OK
    for record in restarts:
        echo(restart_line(record))
    total = f"{counted(len(restarts), 'restart')}, {lost:.0f} s lost in all"
    echo(total if restarts else "no restart is on record")
    return EXIT.OK


def _stdin() -> bytes:
    """Return the bytes of the document on stdin."""
    from firstfault.wire.documents import MAX_DOCUMENT_BYTES  # noqa: PLC0415 - as above

    if sys.stdin is None or sys.stdin.isatty():
        raise click.UsageError("stdin is not a document; pipe one into it: firstfault show - < error.pb")
    data = sys.stdin.buffer.read(MAX_DOCUMENT_BYTES + 1)
    if not data:
        raise BadDocumentError("stdin is empty; did the command before the pipe fail?")
    if len(data) > MAX_DOCUMENT_BYTES:
        raise BadDocumentError(f"stdin has more than {MAX_DOCUMENT_BYTES} bytes; an error document has less")
    return data


def _uri(uri: str | None, *, last: bool) -> str:
    """Return the URI to show; with `last` that of the newest local run."""
    if uri is not None and last:
        raise click.UsageError("--last stands for the newest run; give it or a URI, not both")
    if uri is not None:
        return uri
    if not last:
        raise click.UsageError("Missing argument 'URI'; name the attempt's output prefix, or use --last")
    runs = [folder for folder in _RUNS.glob("*") if folder.is_dir()]
    if not runs:
        raise click.UsageError(f"there is no run below {_RUNS}; name the attempt's output prefix")
    return str(max(runs, key=lambda folder: folder.stat().st_mtime))


def _report(read: ReadAttempt, conclusion: Conclusion, strategy: str | None, *, with_attempts: bool) -> Report:
    """Return the report. `with_attempts` adds the task's other attempts, which costs requests for each."""
    from firstfault.attempts import logs_of_run, sibling_attempts  # noqa: PLC0415 - as above

    attempts = sibling_attempts(read.uri, conclusion, strategy=strategy) if with_attempts else ()
    return read.reader.report(conclusion, attempts=attempts, logs=logs_of_run(read.uri))


def _write_page(report: Report, file: str, *, quiet: bool) -> None:
    from firstfault.render.html import page  # noqa: PLC0415 - as above

    if file == _STDOUT:
        click.echo(page(report).encode("utf-8", "backslashreplace"))
        return
    write_file(file, page(report))
    click.echo(f"report: {file}", err=quiet)


def _unread(read: ReadAttempt) -> int:
    """Print that the attempt failed and no document tells why; return the exit code."""
    coverage = read.job.coverage
    found = "; ".join(coverage.notes) or "a node reported a failure, but its error documents are missing"
    other = "another program wrote what is there, or its upload was cut off: " if coverage.unreadable else ""
    fail(f"no root cause in {read.reader.errors_uri}: {found}; {other}read the nodes' logs")
    return EXIT.UNREADABLE


def _nothing(read: ReadAttempt, *, as_json: bool, quiet: bool) -> int:
    """Print that there is no error; return the exit code."""
    from firstfault.report.words import counted  # noqa: PLC0415 - as above

    if as_json:
        click.echo(json.dumps({"schema": "firstfault.verdict/v1", "verdict": None, "decision": None}))
    if read.succeeded:
        if not as_json:
            click.echo("no error: the attempt has outputs", err=quiet)
        return EXIT.OK
    hints = [*read.job.coverage.notes]
    if restarts := [record for record in read.job.restarts if record.restart]:
        hints.append(f"the job was restarted {counted(len(restarts), 'time')}, last after {restarts[-1].headline}")
    elif read.job.history:
        hints.append(f"the job recovered from {counted(len(read.job.history), 'failure')} of earlier rounds")
    hint = "; ".join(hints) or "is this the attempt's output prefix?"
    fail(f"no error document in {read.reader.errors_uri}, and no outputs beside it; {hint}")
    return EXIT.NOTHING_FOUND
