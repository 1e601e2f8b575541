"""``firstfault run``."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstfault.cli import EXIT, debug_option
from firstfault.report.json import decision_to_dict, format_timestamp, verdict_to_dict
from firstfault.report.text import terminal_text
from flytekitplugins.firstfault.local.engine import Attempt, RunResult, RunSettings, run_task, shown
from flytekitplugins.firstfault.local.pods import STOP_SIGNALS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["run"]

SCHEMA = "firstfault.run/v1"


def _environment(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    del context, parameter
    pairs = {}
    for value in values:
        name, found, text = value.partition("=")
        if not found or not name:
            raise click.BadParameter(f"{value!r} is not NAME=VALUE")
        pairs[name] = text
    return pairs


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("task")
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Number of pods; overrides the task's nnodes.")
@click.option("--inputs", metavar="JSON", help="""The task's inputs as an object, '{"epochs": 3}'.""")
@click.option("--store", default=".firstfault/runs", show_default=True, metavar="URI", help="Where outputs go.")
@click.option("--env", "environment", multiple=True, callback=_environment, metavar="K=V", help="Set in every pod.")
@click.option("--retries", type=click.IntRange(min=0), metavar="R", help="Overrides the task's retries.")
@click.option("--system-retries", type=click.IntRange(min=0), default=3, show_default=True, metavar="R")
@click.option("--strategy", metavar="S", help="How the root cause is found; overrides the task's.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Of each attempt.")
@click.option("--json", "as_json", is_flag=True, help="Last line of stdout: one object (firstfault.run/v1).")
@debug_option
def run(as_json: bool, timeout: float | None, **options: Any) -> int:
    r"""Run TASK of FILE on this machine, each node as a process, and tell what killed it if it fails.

    \b
    Exit codes: 0 success, 10 root cause found and not to be retried,
    11 retryable but the attempts are used up, 3 failed without a word,
    4 timeout, 2 usage, 1 the tool failed, 130 interrupted.
    """
    settings = RunSettings(timeout_seconds=timeout, **options)
    with _interruptible(), _progress() as tell:
        result = run_task(settings, tell)
    for attempt in result.attempts:
        if not as_json:
            _print_attempt(attempt)
    if as_json:
        click.echo(json.dumps(_to_dict(result)))
    elif result.status == "succeeded":
        click.echo(f"succeeded: {json.dumps(result.outputs)}")
    return _exit_code(result)


def _exit_code(result: RunResult) -> EXIT:
    if result.status == "succeeded":
        return EXIT.OK
    if result.status == "timeout":
        return EXIT.TIMEOUT
    conclusion = result.attempts[-1].conclusion
    if conclusion is None:
        return EXIT.NOTHING_FOUND
    return EXIT.ROOT_CAUSE_RETRYABLE if conclusion.decision.retry else EXIT.ROOT_CAUSE


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM, and a closed terminal, end the pods as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # SIGINT too: flytekit has installed a handler of its own, which exits with 1
    before = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield what prints a line about each step; on a terminal the last one is kept alive below the others."""
    if not sys.stderr.isatty():
        yield lambda line: click.echo(line, err=True)
        return
    from rich.console import Console  # noqa: PLC0415 - only on a terminal

    console = Console(stderr=True, highlight=False)
    with console.status("starting") as status:

        def tell(line: str) -> None:
            console.print(line, markup=False)
            status.update(line.replace("[", r"\["))

        yield tell


def _print_attempt(attempt: Attempt) -> None:
    click.echo(f"attempt {attempt.number}: {attempt.status} after {attempt.total_seconds:.1f} s")
    if attempt.conclusion is not None:
        conclusion = attempt.conclusion
        click.echo()
        click.echo(terminal_text(conclusion.verdict, conclusion.decision, uri=shown(attempt.errors_uri)))
    elif attempt.status != "succeeded":
        click.echo("no error document was found; the pods' logs say more:")
    if attempt.status != "succeeded":
        for log in attempt.logs:
            click.echo(f"log: {shown(log)}")
        click.echo()


def _to_dict(result: RunResult) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "status": result.status,
        "outputs": result.outputs,
        "attempts": [_attempt_to_dict(attempt) for attempt in result.attempts],
    }


def _attempt_to_dict(attempt: Attempt) -> dict[str, Any]:
    conclusion, seen = attempt.conclusion, attempt.seen
    return {
        "attempt": attempt.number,
        "status": attempt.status,
        "errors": attempt.errors_uri,
        "verdict": verdict_to_dict(conclusion.verdict) if conclusion is not None else None,
        "decision": decision_to_dict(conclusion.decision) if conclusion is not None else None,
        "engine": {
            "job": attempt.job.value if attempt.job is not None else None,
            "error_seen": {
                "code": seen.code,
                "message": seen.message,
                "kind": seen.kind.value,
                "origin": seen.origin.value,
                "worker": seen.worker,
                "timestamp": format_timestamp(seen.timestamp_ns),
            }
            if seen is not None
            else None,
        },
        "seconds": {
            "total": attempt.total_seconds,
            "fault_to_durable": attempt.fault_to_durable_seconds,
            "fault_to_verdict": attempt.fault_to_verdict_seconds,
            "fault_to_ended": attempt.fault_to_ended_seconds,
        },
        "logs": [str(log) for log in attempt.logs],
    }
