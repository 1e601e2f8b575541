"""``firstfault watch``: follows a running attempt, or a running task through its attempts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from firstfault.cli import _support as cli
from firstfault.cli._show import Forms, find_uri, print_attempt
from firstfault.store import is_remote


@click.command()
@cli.uri_argument(required=False)
@click.option(
    "--last", is_flag=True, help="Watch the newest run below .firstfault, instead of a URI."
)
@cli.reader_options
@click.option(
    "--interval",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Minimum seconds between two listings; slow storage makes it longer.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Stop after this time.",
)
@click.option(
    "--follow", is_flag=True, help="Continue with the task's next attempts until the task ends."
)
@click.option(
    "--live",
    is_flag=True,
    help=(
        "Also print how fast the nodes make progress (requested from the agents through a file in"
        " the roster)."
    ),
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON objects (firstfault.verdict/v1), one a line.",
)
@cli.debug_option
def watch(  # noqa: PLR0913, PLR0917 - click's options
    uri: str | None,
    last: bool,
    strategy: str | None,
    expected_nodes: int | None,
    interval: float,
    timeout: float | None,
    follow: bool,
    live: bool,
    **given: Any,
) -> int:
    """Follow a running attempt and print its root cause as soon as it is known.

    URI is the attempt's output prefix or its errors/ folder. In a local folder of runs, the newest
    attempt of the newest run is watched. While documents may still arrive, each
    new answer is printed in one line, marked as not decided yet. When every node has reported, or
    at the timeout, the command prints the same report as show, and ends.

    \b
    Exit codes: those of show for the last answer; 0 also if the attempt recovered,
    4 no failure before the timeout.

    \b
    Examples:
      firstfault watch --last
      firstfault watch s3://bucket/metadata/propeller/f3a9/n0/data/0
      firstfault watch --follow s3://bucket/metadata/propeller/f3a9/n0/data/0
      firstfault watch --timeout 3600 --json s3://bucket/metadata/f3a9/n0/data/0
    """  # noqa: D301 - click's mark of lines to keep
    from firstfault.attempt import ReadOptions, read  # noqa: PLC0415 - `--help` needs none of it
    from firstfault.cli._following import Progress, follow_in_time  # noqa: PLC0415 - as above

    forms = Forms(**given)
    options = ReadOptions(strategy, expected_nodes)
    deadline = time.monotonic() + timeout if timeout is not None else None
    following: str | None = _find_attempt(cli.resolve_uri(find_uri(uri, last=last)))
    code: int = cli.EXIT.OK
    while following is not None:
        uri = following
        following = _find_next_attempt(following) if follow else None
        reader = options.reader(uri)
        progress = Progress(reader, as_json=forms.as_json)
        cli.fail(f"watching {reader.errors_uri}")
        successor = options.reader(following) if following else None
        remaining_seconds = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        in_time = follow_in_time(progress, interval, successor, remaining_seconds, is_live=live)
        if progress.last is None:
            if not in_time:
                cli.fail(f"no failure in {reader.errors_uri} within {timeout:g} s")
                return cli.EXIT.TIMEOUT
            # no failure, or only rounds that recovered: continue only if the next attempt has begun
            code = cli.EXIT.OK
            following = following if progress.is_superseded else None
            continue
        # read again: documents may have arrived since, and the last answer must be the answer of
        # show
        attempt = read(uri, options)
        progress.note_end(attempt)
        code = print_attempt(attempt, uri, strategy, forms)
        is_over = (
            attempt.conclusion is None
            or not attempt.conclusion.decision.retry
            or attempt.conclusion.decision.is_spent
        )
        if not in_time or (is_over and not progress.is_superseded):
            following = None
    return code


def _find_attempt(uri: str) -> str:
    """Return the newest attempt in a local folder of runs; of any other folder its URI."""
    from firstfault.run_folder import find_newest_attempt  # noqa: PLC0415 - as above

    path = None if is_remote(uri) else Path(uri.removeprefix("file://"))
    newest = find_newest_attempt(path) if path is not None and path.is_dir() else None
    return str(newest) if newest is not None else uri


def _find_next_attempt(uri: str) -> str:
    """Return the output prefix of the attempt after this one."""
    from firstfault.errors import UsageError  # noqa: PLC0415 - as above
    from firstfault.layout import parse_attempt_number  # noqa: PLC0415
    from firstfault.store import join  # noqa: PLC0415

    run_and_number = parse_attempt_number(uri)
    if run_and_number is None:
        raise UsageError(
            f"--follow needs the output prefix of an attempt, which ends in its number; {uri!r}"
            " does not"
        )
    return join(run_and_number[0], str(run_and_number[1] + 1))
