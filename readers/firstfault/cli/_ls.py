"""``firstfault ls``: lists failed attempts, and counts what they have in common."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import click

from firstfault.cli._support import EXIT, debug_option, echo, fail, on_terminal, uri_argument
from firstfault.utils.text import counted, one_line, printable

if TYPE_CHECKING:
    from firstfault.failure_listing import FailedAttempt, FaultGroup

_SCHEMA = "firstfault.ls/v1"
_SINCE = re.compile(r"(?P<number>\d{1,6})(?P<unit>[mhdw])")
_SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_NS_PER_SECOND = 1_000_000_000
_LINES_ON_TERMINAL = 20
_GROUPS = ("fingerprint", "category", "pod", "machine", "node")


def _parse_since(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> int | None:
    """Return the moment that a duration ago names, nanoseconds since the Unix epoch."""
    if value is None:
        return None
    match = _SINCE.fullmatch(value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a duration; write 30m, 12h, 7d or 2w")
    return time.time_ns() - int(match["number"]) * _SECONDS[match["unit"]] * _NS_PER_SECOND


@click.command()
@uri_argument(required=False)
@click.option(
    "--since",
    callback=_parse_since,
    metavar="DURATION",
    help="Only attempts that failed within this time: 30m, 12h, 7d.",
)
@click.option(
    "--group",
    "by",
    type=click.Choice(_GROUPS),
    help="Group attempts by this, and count them.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Only the newest attempts; {_LINES_ON_TERMINAL} by default on a terminal.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object (firstfault.ls/v1) on each line.",
)
@debug_option
def ls(
    uri: str | None, since: int | None, by: str | None, limit: int | None, *, as_json: bool
) -> int:
    """List the failed attempts below a folder, newest first.

    URI is a folder with many executions, such as a folder of runs or Flyte's metadata prefix.
    Without it, the runs that were started in this folder are listed, where `show --last` looks,
    too: those of torchrun and of `firstfault run` below .firstfault, and those among temporary
    files. Attempts that succeeded aren't listed. The failures are in the order of their times,
    while `show --last` shows the run that started last.

    With --group the group that cost the most rank-hours comes first. By node or machine, those that
    fail more often than chance explains are listed at the end, to be pasted after srun or sbatch.

    \b
    Exit codes: 0 listed, 3 no attempt found below the folder, 2 usage, 1 the tool failed.

    \b
    Examples:
      firstfault ls
      firstfault ls --since 7d s3://bucket/metadata/propeller
      firstfault ls --since 7d --group fingerprint s3://bucket/metadata/propeller
      firstfault ls --json .firstfault/runs | jq .first_line
    """  # noqa: D301 - click's mark of lines to keep
    from firstfault.failure_listing import grouped  # noqa: PLC0415 - `--help` needs none of it

    folders = [uri] if uri is not None else _find_own_folders()
    attempts, count = _list_folders(folders, since, with_machines=by in {"machine", "node"})
    below = " or ".join(folders)
    if not count:
        fail(f"no attempts below {below}; pass a folder of runs, or Flyte's metadata prefix")
        return EXIT.NOTHING_FOUND
    if not attempts:
        fail(
            f"none of the {count} attempts below {below}"
            f" failed{'' if since is None else ' in this time'}"
        )
    if limit is None and not as_json and on_terminal():
        limit = _LINES_ON_TERMINAL
    listed = attempts[:limit] if by is None else attempts
    for attempt in listed:
        if by is None:
            _print(_attempt_json(attempt) if as_json else _attempt_text(attempt))
        elif attempt.note:
            # an unreadable attempt is in none of the groups: report it on stderr, because the
            # counts lack it
            fail(_attempt_text(attempt))
    if left_out := len(attempts) - len(listed):
        fail(f"{counted(left_out, 'older attempt')} left out; --limit {len(attempts)} lists all")
    groups = grouped(attempts, by) if by is not None else []
    for group in groups:
        _print(_group_json(group, by) if as_json else _group_text(group))
    suspicious = ",".join(group.key for group in groups if group.is_suspicious)
    if suspicious and not as_json:
        echo(f"These fail more often than chance explains: --exclude={one_line(suspicious)}")
    return EXIT.OK


def _find_own_folders() -> list[str]:
    from firstfault.cli._own_runs import find_own_folders  # noqa: PLC0415 - as above

    return find_own_folders()


def _list_folders(
    folders: list[str], since: int | None, *, with_machines: bool
) -> tuple[list[FailedAttempt], int]:
    """Return the failed attempts below all folders, newest first,
    and the number of all attempts.
    """
    from firstfault.failure_listing import failed_attempts  # noqa: PLC0415 - as above

    listings = [
        failed_attempts(folder, since_ns=since, with_machines=with_machines) for folder in folders
    ]
    attempts = [attempt for failed, _ in listings for attempt in failed]
    if len(listings) > 1:
        attempts.sort(key=lambda attempt: attempt.time_ns or 0, reverse=True)
    return attempts, sum(count for _, count in listings)


def _print(line: str | dict[str, Any]) -> None:
    echo(line if isinstance(line, str) else json.dumps({"schema": _SCHEMA, **line}))


def _format_moment(time_ns: int | None) -> str:
    """Return a moment to the second, with the width of one."""
    from firstfault.wire.json_schemas import format_timestamp  # noqa: PLC0415 - as above

    text = format_timestamp(time_ns)
    return f"{text[:19]}Z" if text is not None else f"{'-':20}"


def _attempt_text(attempt: FailedAttempt) -> str:
    result = f"could not be read: {attempt.note}" if attempt.note else attempt.line
    uri = " ".join(printable(attempt.uri).splitlines())  # whole, to be copied
    return f"{_format_moment(attempt.time_ns)}  {uri}  {result}"


def _group_text(group: FaultGroup) -> str:
    hours = "?" if group.rank_hours is None else f"{group.rank_hours:.1f}"
    return (
        f"{hours} rank-hours  {counted(group.attempts, 'attempt')} "
        f" {counted(group.executions, 'execution')}  {one_line(group.key) or 'unknown'}  last"
        f" {_format_moment(group.last.time_ns)}: {group.last.line}"
    )


def _attempt_json(attempt: FailedAttempt) -> dict[str, Any]:
    from firstfault.wire.json_schemas import format_timestamp  # noqa: PLC0415 - as above

    names = ("fingerprint", "category", "pod", "machine", "ranks")
    return {
        "uri": attempt.uri,
        "execution": attempt.execution,
        "time": format_timestamp(attempt.time_ns),
        "outcome": attempt.outcome.value,
        "first_line": attempt.line or None,
        **{name: getattr(attempt, name) or None for name in names},
        "rank_hours": attempt.rank_hours,
        "retry": attempt.retry,
        "error": attempt.note or None,
    }


def _group_json(group: FaultGroup, by: str | None) -> dict[str, Any]:
    return {
        "group": by,
        "key": group.key or None,
        "attempts": group.attempts,
        "executions": group.executions,
        "rank_hours": group.rank_hours,
        "is_suspicious": group.is_suspicious,
        "last": _attempt_json(group.last),
    }
