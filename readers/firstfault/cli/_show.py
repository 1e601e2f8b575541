"""``firstfault show``: reports the root cause of one attempt."""

from __future__ import annotations

import io
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from firstfault.cli import _support as cli
from firstfault.errors import BadDocumentError, ObjectNotFoundError
from firstfault.store import is_remote
from firstfault.utils.text import counted

if TYPE_CHECKING:
    from firstfault.attempt import Attempt, ReadOptions
    from firstfault.brief.comparison import Comparison
    from firstfault.report import Report

_STDIN = _STDOUT = "-"
_DEFAULT_COLUMNS = 80
_LOG_MAGICS = (
    b"\x1f\x8b",
    b"BZh",
    b"\xfd7zXZ",
    b"\x28\xb5\x2f\xfd",
    b"PK\x03\x04",
    b"\xff\xfe",
    b"\xfe\xff",
)
"""First bytes of compressed logs, of archives (which the log reader refuses with advice on what to
do), and of texts in UTF-16.
"""
_FIRST_BYTES_OF_TEXTS = {bytes([byte]) for byte in (9, 13, 27, *range(32, 127), *range(0xC2, 0xF5))}
"""First bytes of texts; a document, which is a protobuf message, begins with a newline."""


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms in which an attempt is printed: folded or plain text, or these."""

    verbose: bool = False
    as_json: bool = False
    as_markdown: bool = False
    as_brief: bool = False
    html: str | None = None
    """File of the page, or None for no page."""
    against: Path | None = None
    """The log of another run."""
    last_run: str = ""
    """The attempt that `--last` found, or empty if the user named one."""


@click.command()
@cli.uri_argument(required=False)
@click.argument("more_logs", nargs=-1, type=click.Path(exists=True))
@click.option(
    "--last", is_flag=True, help="Show the newest run below .firstfault, instead of a URI."
)
@cli.reader_options
@click.option(
    "--with",
    "beside",
    metavar="PATH",
    multiple=True,
    type=click.Path(exists=True),
    help=(
        "More files of the same job: a log, a folder of logs, a node's dmesg, flight recorder"
        " dumps; repeatable."
    ),
)
@click.option(
    "--against",
    metavar="PATH",
    type=click.Path(exists=True, path_type=Path),
    help=(
        "Compare with the log of another run: lines that are new, and the first step that differs."
    ),
)
@click.option(
    "--fresh",
    is_flag=True,
    help="Read every document from storage, not the copies that the pods left.",
)
@click.option(
    "--recovered",
    is_flag=True,
    help="Show the failures that the attempt recovered from, and its stalls.",
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Show everything: traceback, stacks, all failures, all nodes.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object (firstfault.verdict/v1).",
)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown, for a bug report.")
@click.option(
    "--brief",
    "as_brief",
    is_flag=True,
    help="Print at most 6,000 tokens of Markdown, for a language model.",
)
@click.option(
    "--html",
    metavar="FILE",
    shell_complete=cli.complete_files,
    help="Write a self-contained HTML file; - is stdout.",
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

    URI is what a job left: a log with all ranks, a folder of logs, torchrun's log folder, dumps of
    torch's flight recorder; - reads a log from stdin. MORE_LOGS are of the same job.

    Of a job that ran with firstfault, URI is the attempt's output prefix, its errors/ folder or a
    single document: a path, or s3://, gs://, abfs://. For the folder of all attempts of a task, the
    last one that failed is shown. It may also be flyte://project/domain/execution (and /node,
    /attempt).

    \b
    Exit codes: 0 the attempt didn't fail, or had finished before its teardown
    failed, 10 root cause, not to be retried or unclear, 11 root cause, retryable,
    3 nothing found, 5 it failed and no error document is readable, 2 usage,
    1 the tool failed, or the input is an archive, no text or of several jobs.

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
      firstfault show --brief slurm-4711.out > brief.md
      firstfault show slurm-4711.out --against slurm-4702.out
    """  # noqa: D301 - click's mark of lines to keep
    beside = (*given.pop("more_logs"), *given.pop("beside"))
    forms = Forms(**given)
    _check_forms(forms, recovered=recovered)
    from firstfault.attempt import ReadOptions, read  # noqa: PLC0415 - `--help` needs none of it

    options = ReadOptions(strategy, expected_nodes, fresh)
    uri = find_uri(uri, last=last)
    try:
        paths = [Path(path) for path in beside]
        if uri == _STDIN:
            attempt = _read_stdin(options, paths, is_read_twice=forms.as_brief)
        else:
            uri = cli.resolve_uri(uri)
            attempt = read(uri, options, paths)
    except ObjectNotFoundError as error:
        cli.fail(str(error))
        return cli.EXIT.NOTHING_FOUND
    forms = replace(forms, last_run=attempt.uri) if last else forms
    if recovered:
        return _print_recovered(attempt, forms)
    return print_attempt(attempt, uri, strategy, forms)


def _check_forms(forms: Forms, *, recovered: bool) -> None:
    """Refuse forms that can't be printed together."""
    wanted = {"--json": forms.as_json, "--markdown": forms.as_markdown, "--brief": forms.as_brief}
    wanted["--html -"] = forms.html == _STDOUT
    on_stdout = [name for name, is_wanted in wanted.items() if is_wanted]
    if len(on_stdout) > 1:
        raise click.UsageError(f"{' and '.join(on_stdout)} write to stdout; choose one")
    if recovered and (forms.as_markdown or forms.as_brief or forms.html):
        raise click.UsageError("--recovered prints text, or JSON with --json")
    if forms.against is not None and (
        recovered or forms.as_markdown or forms.as_brief or forms.html
    ):
        raise click.UsageError("--against prints text, or JSON with --json")


def find_uri(uri: str | None, *, last: bool) -> str:
    """Return the URI that a command is given; with `last` that of the newest local run."""
    if uri is not None and last:
        raise click.UsageError("pass a URI or --last, not both")
    if uri is not None:
        return uri
    if not last:
        raise click.UsageError(
            "Missing argument 'URI': pass a log file or the attempt's output prefix, or use --last"
        )
    from firstfault.cli._own_runs import find_last_run  # noqa: PLC0415 - as above

    return find_last_run()


def _read_stdin(options: ReadOptions, beside: Sequence[Path], *, is_read_twice: bool) -> Attempt:
    """Return what is on stdin: an error document, or a log of any size."""
    from firstfault.attempt import read_document, read_logs  # noqa: PLC0415 - as above
    from firstfault.wire.documents import MAX_DOCUMENT_BYTES  # noqa: PLC0415 - as above

    if sys.stdin is None or sys.stdin.isatty():
        raise click.UsageError(
            "nothing on stdin; pipe a log or an error document into it: firstfault show - <"
            " train.log"
        )
    buffer = sys.stdin.buffer
    # stdin may be a stream without `peek`, for example in a program that replaces it
    stdin = (
        buffer
        if isinstance(buffer, io.BufferedReader)
        else io.BufferedReader(cast("io.RawIOBase", buffer))
    )
    # peek() keeps the bytes: the reader that is chosen by them reads from the beginning.
    begin = stdin.peek(1)
    if not begin:
        raise BadDocumentError("stdin is empty; check whether the command before the pipe failed")
    is_log = begin[:1] in _FIRST_BYTES_OF_TEXTS or begin.startswith(_LOG_MAGICS)
    if is_log and is_read_twice:
        from firstfault.cli._brief import copy_stream  # noqa: PLC0415 - as above

        return read_logs([copy_stream(stdin), *beside], "stdin", options)
    if is_log:
        return read_logs([stdin, *beside], "stdin", options)
    # one byte more than the limit shows that the input is too large without reading all of it
    data = stdin.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise BadDocumentError(
            f"stdin has more than {MAX_DOCUMENT_BYTES} bytes; an error document has less"
        )
    try:
        return read_document(data, "stdin", options)
    except BadDocumentError as error:
        if b"\0" in data:
            raise BadDocumentError(
                "stdin is neither an error document nor a text; give the job's log"
            ) from error
        raise


def print_attempt(read: Attempt, uri: str, strategy: str | None, forms: Forms) -> int:
    """Print an attempt in the wanted forms; `uri` and `strategy` are as the caller named them.
    Return the exit code.
    """
    from firstfault.attempt import find_run_logs, sibling_attempts  # noqa: PLC0415 - as above

    conclusion = read.conclusion
    if conclusion is None:
        return _print_no_error(read, forms)
    # reading any further attempt costs requests
    for_a_person = (
        forms.html
        or forms.as_markdown
        or forms.verbose
        or (not forms.as_json and cli.on_terminal())
    )
    # a URI of several attempts resolves to one of them: the report compares it with the rest
    has_others = for_a_person or read.uri != uri
    attempts = sibling_attempts(read.uri, conclusion, strategy=strategy) if has_others else ()
    report = read.report(conclusion, attempts=attempts, logs=find_run_logs(read.uri))
    if forms.as_brief:
        from firstfault.cli._brief import print_brief  # noqa: PLC0415 - as above

        print_brief(read, report)
    _print(report, forms, _compare(read, forms))
    # a node failed, but nothing readable shows why: scripts must not see a root cause here
    if not conclusion.job.failures and not conclusion.job.seals:
        coverage = read.job.coverage
        reason = (
            "; ".join(coverage.notes)
            or "a node reported a failure, but its error documents are missing"
        )
        other = (
            "another program wrote what is there, or its upload was cut off: "
            if coverage.unreadable
            else ""
        )
        place = read.errors_uri if read.uri else uri
        cli.fail(f"no root cause in {place}: {reason}; {other}read the nodes' logs")
        return cli.EXIT.UNREADABLE
    if read.outcome.has_finished:
        # the work is done: nothing has to run again, and what depends on it may start
        return cli.EXIT.OK
    return cli.EXIT.ROOT_CAUSE_RETRYABLE if conclusion.decision.retry else cli.EXIT.ROOT_CAUSE


def _compare(read: Attempt, forms: Forms) -> Comparison | None:
    """Compare the log with that of another run, if there is one."""
    if forms.against is None:
        return None
    from firstfault.cli._against import compare_logs  # noqa: PLC0415 - as above

    return compare_logs(read, forms.against)


def _print(report: Report, forms: Forms, comparison: Comparison | None) -> None:
    if forms.html is not None:
        from firstfault.render.html import page  # noqa: PLC0415 - as above

        _write_page(page(report), forms)
    if forms.as_json:
        from firstfault.render.json_report import json_report  # noqa: PLC0415 - as above

        text = json_report(report)
        if comparison is not None:
            text = json.dumps(
                {**json.loads(text), "against": comparison.to_json()}, separators=(",", ":")
            )
        click.echo(text)
    elif forms.as_markdown:
        from firstfault.render.markdown import markdown  # noqa: PLC0415 - as above

        cli.echo(markdown(report).rstrip("\n"))
    elif forms.html is None and not forms.as_brief:
        cli.show_report(report, verbose=forms.verbose)
    if comparison is not None and not forms.as_json:
        cli.echo("\n" + "\n".join(comparison.lines()))


def _write_page(text: str, forms: Forms) -> None:
    """Write an HTML page to the file that was named, or to stdout."""
    if forms.html is None or forms.html == _STDOUT:
        # bytes: the page is UTF-8, whatever the encoding of stdout
        click.echo(text.encode("utf-8", "backslashreplace"))
        return
    cli.write_file(forms.html, text)
    # stdout belongs to the JSON or the Markdown if one of them was requested, too
    of = f" of {forms.last_run}" if forms.last_run else ""
    click.echo(
        f"report{of}: {forms.html}", err=forms.as_json or forms.as_markdown or forms.as_brief
    )


def _print_recovered(read: Attempt, forms: Forms) -> int:
    """Print the restarts and stalls within an attempt and the seconds that they cost,
    also if it succeeded.
    """
    from firstfault.report.parts.restart_lines import (  # noqa: PLC0415 - as above
        list_stalls,
        restart_line,
        stalls_line,
    )
    from firstfault.wire.json_schemas import restart_to_json  # noqa: PLC0415 - as above

    restarts = [record for record in read.job.restarts if record.restart]
    stalls = list_stalls(read.job)
    lost = sum(record.lost_seconds or 0 for record in restarts)
    if forms.as_json:
        records, stalled = (
            [json.loads(restart_to_json(record)) for record in of] for of in (restarts, stalls)
        )
        document = {
            "uri": read.uri,
            "lost_seconds": round(lost, 3),
            "restarts": records,
            "stalls": stalled,
        }
        click.echo(json.dumps(document))
        return cli.EXIT.OK
    for record in restarts:
        cli.echo(restart_line(record))
    total = f"{counted(len(restarts), 'restart')}, {lost:.0f} s lost in all"
    cli.echo(total if restarts else "no restarts recorded")
    for record in stalls:
        lasted = (
            "until the end" if record.lost_seconds is None else f"for {record.lost_seconds:.0f} s"
        )
        cli.echo(f"stalled {lasted}: {record.reason}")
    if stalls:
        cli.echo(stalls_line(stalls))
    return cli.EXIT.OK


def _print_no_error(read: Attempt, forms: Forms) -> int:
    """Print that the log has no error, and the restarts in it; return the exit code."""
    from firstfault.report.parts.restart_lines import restart_line  # noqa: PLC0415 - as above

    why = _explain_no_error(read)
    has_succeeded = read.outcome.has_finished
    restarts = [restart_line(record) for record in read.job.restarts] if read.is_of_logs else []
    if forms.as_brief:
        _print_brief_without_error(read, why, restarts)
    if forms.html is not None:
        _write_page_without_error(read, why, restarts, forms)
    comparison = _compare(read, forms)
    # stdout is one JSON object in any case; the sentences below are for people
    if forms.as_json:
        against = {"against": comparison.to_json()} if comparison is not None else {}
        click.echo(json.dumps({**_build_json(read, why), **against}))
    elif has_succeeded and not forms.as_brief:
        for line in (f"no error: {why}", *restarts):
            click.echo(
                textwrap.fill(line, _DEFAULT_COLUMNS, subsequent_indent="  "),
                err=forms.html == _STDOUT,
            )
    if comparison is not None and not forms.as_json:
        cli.echo("\n".join(comparison.lines()))
    if not has_succeeded and not forms.as_brief:
        cli.fail(why)
    return cli.EXIT.OK if has_succeeded else cli.EXIT.NOTHING_FOUND


def _build_json(read: Attempt, why: str) -> dict[str, Any]:
    """Return the JSON of an attempt without a failure."""
    from firstfault.render.json_report import json_without_failure  # noqa: PLC0415 - as above

    return json_without_failure(None if _is_missing(read) else read.outcome, why)


def _is_missing(read: Attempt) -> bool:
    """Whether the URI is a path without a file or folder."""
    return not read.is_of_logs and not is_remote(read.uri) and not _find_path(read).exists()


def _describe_empty_place(read: Attempt) -> str:
    """Return why a path has nothing to show, or "" if it may have something or is remote."""
    if _is_missing(read):
        return f"{read.uri}: no such file or folder"
    folder = None if is_remote(read.uri) else _find_path(read)
    if folder is None or not folder.is_dir():
        return ""
    if not any(folder.iterdir()):
        return f"{read.uri}: the folder is empty; give the folder of a job's logs"
    is_of_attempt = (folder / "firstfault").exists()
    return (
        ""
        if is_of_attempt
        else f"{read.uri}: the folder has neither error documents nor a file that may be a log"
    )


def _find_path(read: Attempt) -> Path:
    return Path(read.uri.removeprefix("file://"))


def _explain_no_error(read: Attempt) -> str:
    """Return what proves that an attempt without an error has succeeded, or why that's unknown."""
    if read.outcome.has_finished:
        if read.is_of_logs:
            return read.job.completion or "no line reports a failure"
        return "the attempt has outputs" if read.has_outputs else "all nodes report success"
    hints = [*read.job.coverage.notes]
    if restarts := [record for record in read.job.restarts if record.restart]:
        hints.append(
            f"the job was restarted {counted(len(restarts), 'time')}, last after"
            f" {restarts[-1].headline}"
        )
    elif (stall := read.job.last_stall) is not None:
        hints.append(f"{stall.reason}: {stall.headline}")
    elif read.job.history:
        hints.append(
            f"the job recovered from {counted(len(read.job.history), 'failure')} of earlier rounds"
        )
    if read.is_of_logs:
        why = "; ".join(hints) or "it has no lines; give the log of a training"
        return f"no failure found in {read.uri}: {why}"
    if not hints and (problem := _describe_empty_place(read)):
        return problem
    hint = "; ".join(hints) or "is this the attempt's output prefix?"
    return f"no error document in {read.errors_uri}, and no outputs next to it; {hint}"


def _print_brief_without_error(read: Attempt, why: str, restarts: Sequence[str]) -> None:
    from firstfault.brief import NoFailure  # noqa: PLC0415 - as above
    from firstfault.cli._brief import print_brief  # noqa: PLC0415 - as above

    print_brief(read, NoFailure(read.uri, read.outcome, why, tuple(restarts)))


def _write_page_without_error(
    read: Attempt,
    why: str,
    restarts: Sequence[str],
    forms: Forms,
) -> None:
    from firstfault.render.html import outcome_page  # noqa: PLC0415 - as above

    title = "No error" if read.outcome.has_finished else "No failure found"
    _write_page(outcome_page(title, [why, *restarts], read.uri), forms)
