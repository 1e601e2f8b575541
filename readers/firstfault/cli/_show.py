"""``firstfault show``: reports the root cause of one attempt."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from firstfault.cli import _support as cli
from firstfault.errors import BadDocumentError, ObjectNotFoundError
from firstfault.model.failure import TEARDOWN
from firstfault.utils.text import counted

if TYPE_CHECKING:
    from firstfault.attempt_data import ReadAttempt
    from firstfault.report import Report

_STDIN = _STDOUT = "-"
_OF_TEXTS = {bytes([byte]) for byte in (9, 13, 27, *range(32, 127), *range(0xC2, 0xF5))}
"""First bytes of texts; a document, which is a protobuf message, begins with a newline."""


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms in which an attempt is printed: folded or plain text, or these."""

    verbose: bool = False
    as_json: bool = False
    as_markdown: bool = False
    html: str | None = None
    """File of the page; None: none."""


@click.command()
@cli.uri_argument(required=False)
@click.argument("more_logs", nargs=-1, type=click.Path(exists=True))
@click.option("--last", is_flag=True, help="Show the newest run below .firstfault, instead of a URI.")
@cli.reader_options
@click.option(
    "--with",
    "beside",
    metavar="PATH",
    multiple=True,
    type=click.Path(exists=True),
    help="More files of the same job: a log, a folder of logs, a node's dmesg, flight recorder dumps; repeatable.",
)
@click.option("--fresh", is_flag=True, help="Read every document from storage, not the copies that the pods left.")
@click.option("--recovered", is_flag=True, help="Show the failures that the attempt recovered from, and its stalls.")
@click.option("-v", "--verbose", is_flag=True, help="Show everything: traceback, stacks, all failures, all nodes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (firstfault.verdict/v1).")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown, for a bug report.")
@click.option(
    "--html", metavar="FILE", shell_complete=cli.complete_files, help="Write a self-contained HTML file; - is stdout."
)
@cli.debug_option
def show(  # noqa: PLR0913, PLR0917 - click's options
    uri: str | None,
    last: bool,
    strategy: str | None,
    expected_nodes: int | None,
    fresh: bool,
    recovered: bool,
    **given: Any,
) -> int:
    """Show the root cause of a failed attempt.

    URI is the attempt's output prefix, its errors/ folder or a single document: a path, or s3://, gs://, abfs://;
    - reads stdin. For the folder of all attempts of a task, the last one that failed is shown. It may also be
    flyte://project/domain/execution (and /node, /attempt), or what any job left that ran without firstfault: a log
    with all ranks, a folder of logs, torchrun's log folder, dumps of torch's flight recorder. MORE_LOGS are of the
    same job.

    \b
    Exit codes: 0 the attempt didn't fail, or had finished before its teardown
    failed, 10 root cause, not to be retried, 11 root cause, retryable,
    3 nothing found, 5 no readable document, 2 usage, 1 the tool failed.

    \b
    Examples:
      firstfault show slurm-4711.out
      firstfault show logs/rank-*.out
      kubectl logs -l job=llama --prefix --tail=-1 | firstfault show -
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
    beside = (*given.pop("more_logs"), *given.pop("beside"))
    forms, options = Forms(**given), cli.ReaderOptions(strategy, expected_nodes, fresh)
    wanted = {"--json": forms.as_json, "--markdown": forms.as_markdown, "--html -": forms.html == _STDOUT}
    on_stdout = [name for name, is_wanted in wanted.items() if is_wanted]
    if len(on_stdout) > 1:
        raise click.UsageError(f"{' and '.join(on_stdout)} write to stdout; choose one")
    if recovered and (forms.as_markdown or forms.html):
        raise click.UsageError("--recovered prints text, or JSON with --json")
    from firstfault.attempt_data import read_attempt  # noqa: PLC0415 - `--help` needs none of it

    uri = _find_uri(uri, last=last)
    try:
        paths = [Path(path) for path in beside]
        if uri == _STDIN:
            read = _read_stdin(options, paths)
        else:
            uri = cli.resolved(uri)
            read = read_attempt(uri, options.reader, paths)
    except ObjectNotFoundError as error:
        cli.fail(str(error))
        return cli.EXIT.NOTHING_FOUND
    return _print_recovered(read, forms) if recovered else print_attempt(read, uri, strategy, forms)


def _find_uri(uri: str | None, *, last: bool) -> str:
    """Return the URI to show; with `last` that of the newest local run."""
    if uri is not None and last:
        raise click.UsageError("pass a URI or --last, not both")
    if uri is not None:
        return uri
    if not last:
        raise click.UsageError("Missing argument 'URI': pass a log file or the attempt's output prefix, or use --last")
    from firstfault.run_folder import FOLDERS, began, find_fallback_folders, runs_in  # noqa: PLC0415 - as above

    runs = [run for folder in (*map(Path, FOLDERS), *find_fallback_folders()) for run in runs_in(folder)]
    if not runs:
        raise click.UsageError(f"no runs below {' or '.join(FOLDERS)}; pass a log file or the attempt's output prefix")
    return str(max(runs, key=began))


def _read_stdin(options: cli.ReaderOptions, beside: Sequence[Path]) -> ReadAttempt:
    """Return what is on stdin: an error document, or a log of any size."""
    from firstfault.attempt_data import read_document, read_logs  # noqa: PLC0415 - as above
    from firstfault.wire.documents import MAX_DOCUMENT_BYTES  # noqa: PLC0415 - as above

    if sys.stdin is None or sys.stdin.isatty():
        raise click.UsageError(
            "nothing on stdin; pipe a log or an error document into it: firstfault show - < train.log"
        )
    buffer = sys.stdin.buffer
    # stdin may be a stream without `peek`, for example in a program that replaces it
    stdin = buffer if isinstance(buffer, io.BufferedReader) else io.BufferedReader(cast("io.RawIOBase", buffer))
    # peek() keeps the bytes: the reader that is chosen by them reads from the beginning.
    begin = stdin.peek(1)
    if not begin:
        raise BadDocumentError("stdin is empty; check whether the command before the pipe failed")
    if begin[:1] in _OF_TEXTS:
        return read_logs([stdin, *beside], "stdin", options.reader)
    # one byte more than the limit shows that the input is too large without reading all of it
    data = stdin.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise BadDocumentError(f"stdin has more than {MAX_DOCUMENT_BYTES} bytes; an error document has less")
    return read_document(data, "stdin", options.reader)


def print_attempt(read: ReadAttempt, uri: str, strategy: str | None, forms: Forms) -> int:
    """Print an attempt in the wanted forms; `uri` and `strategy` are as the caller named them. Return the exit code."""
    from firstfault.attempt_data import find_run_logs, sibling_attempts  # noqa: PLC0415 - as above

    conclusion = read.conclusion
    if conclusion is None:
        return _print_no_error(read, forms)
    # reading any further attempt costs requests
    for_a_person = forms.html or forms.as_markdown or forms.verbose or (not forms.as_json and cli.on_terminal())
    # a URI of several attempts resolves to one of them: the report compares it with the rest
    has_others = for_a_person or read.uri != uri
    attempts = sibling_attempts(read.uri, conclusion, strategy=strategy) if has_others else ()
    _print(read.reader.report(conclusion, attempts=attempts, logs=find_run_logs(read.uri)), forms)
    # a node failed, but nothing readable shows why: scripts must not see a root cause here
    if not conclusion.job.failures and not conclusion.job.seals:
        coverage = read.job.coverage
        found = "; ".join(coverage.notes) or "a node reported a failure, but its error documents are missing"
        other = "another program wrote what is there, or its upload was cut off: " if coverage.unreadable else ""
        place = read.reader.errors_uri if read.uri else uri
        cli.fail(f"no root cause in {place}: {found}; {other}read the nodes' logs")
        return cli.EXIT.UNREADABLE
    if conclusion.verdict.category == TEARDOWN:
        return cli.EXIT.OK  # the work is done: nothing has to run again, and what depends on it may start
    return cli.EXIT.ROOT_CAUSE_RETRYABLE if conclusion.decision.retry else cli.EXIT.ROOT_CAUSE


def _print(report: Report, forms: Forms) -> None:
    if forms.html is not None:
        from firstfault.render.html import page  # noqa: PLC0415 - as above

        if forms.html == _STDOUT:
            # bytes: the page is UTF-8, whatever the encoding of stdout
            click.echo(page(report).encode("utf-8", "backslashreplace"))
        else:
            cli.write_file(forms.html, page(report))
            # stdout belongs to the JSON or the Markdown if one of them was requested, too
            click.echo(f"report: {forms.html}", err=forms.as_json or forms.as_markdown)
    if forms.as_json:
        from firstfault.render.json_report import json_report  # noqa: PLC0415 - as above

        click.echo(json_report(report))
    elif forms.as_markdown:
        from firstfault.render.markdown import markdown  # noqa: PLC0415 - as above

        cli.echo(markdown(report).rstrip("\n"))
    elif forms.html is None:
        cli.show_report(report, verbose=forms.verbose)


def _print_recovered(read: ReadAttempt, forms: Forms) -> int:
    """Print the restarts and stalls within an attempt and the seconds that they cost, also if it succeeded."""
    from firstfault.report.data import list_stalls, restart_line, stalls_line  # noqa: PLC0415 - as above
    from firstfault.wire.json_schemas import restart_to_json  # noqa: PLC0415 - as above

    restarts, stalls = [record for record in read.job.restarts if record.restart], list_stalls(read.job)
    lost = sum(record.lost_seconds or 0 for record in restarts)
    if forms.as_json:
        records, stalled = ([json.loads(restart_to_json(record)) for record in of] for of in (restarts, stalls))
        found = {"uri": read.uri, "lost_seconds": round(lost, 3), "restarts": records, "stalls": stalled}
        click.echo(json.dumps(found))
        return cli.EXIT.OK
    for record in restarts:
        cli.echo(restart_line(record))
    total = f"{counted(len(restarts), 'restart')}, {lost:.0f} s lost in all"
    cli.echo(total if restarts else "no restarts recorded")
    for record in stalls:
        lasted = "until the end" if record.lost_seconds is None else f"for {record.lost_seconds:.0f} s"
        cli.echo(f"stalled {lasted}: {record.reason}")
    if stalls:
        cli.echo(stalls_line(stalls))
    return cli.EXIT.OK


def _print_no_error(read: ReadAttempt, forms: Forms) -> int:
    """Print that the log has no error, and the restarts in it; return the exit code."""
    from firstfault.report.data import restart_line  # noqa: PLC0415 - as above

    # stdout is one JSON object in any case; the sentences below are for people
    if forms.as_json:
        click.echo(json.dumps({"schema": "firstfault.verdict/v1", "verdict": None, "decision": None}))
    if read.succeeded or read.job.all_succeeded:
        why = "the attempt has outputs" if read.succeeded else "all nodes report success"
        if read.is_of_logs:
            why = "; ".join(filter(None, ("no line reports a failure", read.job.completion)))
        if not forms.as_json:
            click.echo(f"no error: {why}", err=forms.html == _STDOUT)
            for record in read.job.restarts if read.is_of_logs else ():
                click.echo(restart_line(record), err=forms.html == _STDOUT)
        return cli.EXIT.OK
    hints = [*read.job.coverage.notes]
    if restarts := [record for record in read.job.restarts if record.restart]:
        hints.append(f"the job was restarted {counted(len(restarts), 'time')}, last after {restarts[-1].headline}")
    elif (stall := read.job.last_stall) is not None:
        hints.append(f"{stall.reason}: {stall.headline}")
    elif read.job.history:
        hints.append(f"the job recovered from {counted(len(read.job.history), 'failure')} of earlier rounds")
    if read.is_of_logs:
        cli.fail(f"no failure found in {read.uri}: {'; '.join(hints) or 'it has no lines; give the log of a training'}")
        return cli.EXIT.NOTHING_FOUND
    hint = "; ".join(hints) or "is this the attempt's output prefix?"
    cli.fail(f"no error document in {read.reader.errors_uri}, and no outputs next to it; {hint}")
    return cli.EXIT.NOTHING_FOUND
