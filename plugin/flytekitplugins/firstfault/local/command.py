"""The command ``firstfault run``: its options, its output and its exit codes.

Its help must not wait for flytekit: what runs a task is imported when it runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstfault.cli import (
    EXIT,
    complete_files,
    complete_strategies,
    debug_option,
    show_report,
    write_file,
)
from firstfault_torch.guard import suppress_internal_errors
from flytekitplugins.firstfault.local import shown

if TYPE_CHECKING:
    from firstfault.report import Report
    from firstfault.report.data import AttemptSummary
    from flytekitplugins.firstfault.local.runner import LocalAttempt, Look, RunResult, Tell

for _package in ("flytekit", "torch", "cloudpickle"):
    # The CLI turns an ImportError of this module into an advice on what to install. find_spec looks
    # for the packages without importing them, which takes seconds.
    if importlib.util.find_spec(_package) is None:
        raise ModuleNotFoundError(f"No module named {_package!r}", name=_package)

SCHEMA = "firstfault.run/v1"


def _parse_environment(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    pairs = {}
    for value in values:
        name, equals_sign, text = value.partition("=")
        if not equals_sign or not name:
            raise click.BadParameter(f"{value!r} is not NAME=VALUE")
        pairs[name] = text
    return pairs


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("task")
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of pods; overrides the task's nnodes.",
)
@click.option(
    "--inputs", metavar="JSON", help="""The task's inputs as an object, '{"epochs": 3}'."""
)
@click.option(
    "--store",
    default=".firstfault/runs",
    show_default=True,
    metavar="URI",
    shell_complete=complete_files,
    help="Where outputs go.",
)
@click.option(
    "--env",
    "environment",
    multiple=True,
    callback=_parse_environment,
    metavar="K=V",
    help="An environment variable for every pod.",
)
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    metavar="R",
    help="Overrides the task's retries.",
)
@click.option(
    "--system-retries",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    metavar="R",
    help="Retries on the system's budget, for example after a lost node.",
)
@click.option(
    "--strategy",
    metavar="S",
    shell_complete=complete_strategies,
    help="How the root cause is found; overrides the task's.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Limit of an attempt.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="End stdout with one JSON line (firstfault.run/v1).",
)
@debug_option
def run(as_json: bool, timeout: float | None, **options: Any) -> int:
    """Run TASK of FILE on this machine, each node as a process, and report the root cause if it
    fails.

    A terminal shows the nodes and their ranks while they run. If an attempt fails, the command
    writes an HTML report on the last failed one, with all attempts side by side, and prints its
    path.

    \b
    Exit codes: 0 success, 10 root cause found and not to be retried,
    11 retryable but the retries are used up, 3 failed without an error document,
    4 timeout, 2 usage, 1 the tool failed, 130 interrupted.

    \b
    Examples:
      firstfault run examples/recoverable.py train --nodes 2
      firstfault run examples/ddp.py train --inputs '{"epochs": 60}' --retries 0
      firstfault run examples/ddp.py train --store s3://bucket/runs --timeout 600
      firstfault run examples/ddp.py train --env NCCL_DEBUG=INFO --json
    """  # noqa: D301 - click keeps the line breaks after it
    from flytekitplugins.firstfault.local.runner import (  # noqa: PLC0415 - as above
        RunSettings,
        run_task,
    )

    settings = RunSettings(timeout_seconds=timeout, **options)
    # Signal handlers outermost, so they are restored last: a second Ctrl-C must still find ours
    # while the pods are ended and the view is closed.
    with _handle_signals(), _show_progress() as (tell, look):
        result = run_task(settings, tell, look)
    if not as_json:
        for attempt in result.attempts:
            _print_attempt(result, attempt)
    report = _write_report(result)
    if as_json:
        parts = {"schema": SCHEMA, "status": result.status, "outputs": result.outputs}
        attempts = [_attempt_to_dict(attempt) for attempt in result.attempts]
        click.echo(
            json.dumps(
                {
                    **parts,
                    "report": str(report) if report is not None else None,
                    "attempts": attempts,
                }
            )
        )
    elif result.status == "succeeded":
        click.echo(f"succeeded: {json.dumps(result.outputs)}")
    if missing := ", ".join(result.missing_outputs):
        click.echo(
            f"firstfault: the task returned no value for {missing}, which it declares; Flyte accepts"
            " that, but what reads it fails",
            err=True,
        )
    if report is not None:
        click.echo(f"report: {shown(report)}", err=as_json)
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
def _handle_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the pods as Ctrl-C does."""
    from flytekitplugins.firstfault.local.pods import STOP_SIGNALS  # noqa: PLC0415 - as above

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # also SIGINT, because flytekit's handler exits with 1; what nohup or a shell ignores stays
    # ignored
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    ours = [number for number, handler in before.items() if handler not in {signal.SIG_IGN, None}]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


@contextlib.contextmanager
def _show_progress() -> Iterator[tuple[Tell, Look]]:
    """Yield a function that prints a line about a step,
    and one that shows an attempt's nodes on a terminal.
    """
    if sys.stderr.isatty():
        from rich.console import Console  # noqa: PLC0415 - only on a terminal

        from flytekitplugins.firstfault.local.live import AttemptView  # noqa: PLC0415 - as above

        console = Console(stderr=True, highlight=False)
        # On a terminal without cursor control (TERM=dumb) rich's live view draws nothing.
        if console.is_terminal and not console.is_dumb_terminal:
            with AttemptView(console) as view:
                yield view.tell, view.watching
            return
    yield lambda line: click.echo(line, err=True), lambda _: contextlib.nullcontext()


def _report(result: RunResult, attempt: LocalAttempt) -> Report | None:
    """Return the report on an attempt, with all attempts side by side;
    None if the attempt has no error document.
    """
    from firstfault.report.data import report_conclusion, with_attempts  # noqa: PLC0415 - as above

    conclusion = attempt.conclusion
    if conclusion is None:
        return None
    logs = {log.stem: shown(log) for log in attempt.logs}
    report = report_conclusion(conclusion, uri=shown(attempt.prefix), logs=logs)
    return with_attempts(report, [_summarize(other) for other in result.attempts])


def _summarize(attempt: LocalAttempt) -> AttemptSummary:
    from firstfault.model import Outcome  # noqa: PLC0415 - as above
    from firstfault.report.data import AttemptSummary, summarize_attempt  # noqa: PLC0415 - as above

    conclusion = attempt.conclusion
    if conclusion is None:
        has_succeeded = attempt.status == "succeeded"
        return AttemptSummary(
            attempt.number,
            Outcome.SUCCEEDED if has_succeeded else Outcome.UNKNOWN,
            note="" if has_succeeded else f"{attempt.status}, without an error document",
            seconds=attempt.total_seconds,
        )
    summary = summarize_attempt(
        attempt.number,
        conclusion.job,
        conclusion.verdict,
        conclusion.decision,
    )
    return replace(summary, seconds=attempt.total_seconds)


def _write_report(result: RunResult) -> Path | None:
    """Write the HTML report on the last failed attempt; return its path,
    or None if it wasn't written.
    """
    failed = [attempt for attempt in result.attempts if attempt.conclusion is not None]
    report = _report(result, failed[-1]) if failed else None
    if report is None:
        return None
    # a failure here must not hide the run's result
    with suppress_internal_errors("writing the report", through=(KeyboardInterrupt, SystemExit)):
        from firstfault.render.html import page  # noqa: PLC0415 - only a failed run needs it

        path = result.folder / "report.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, page(report))
        return path
    return None


def _print_attempt(result: RunResult, attempt: LocalAttempt) -> None:
    click.echo(f"attempt {attempt.number}: {attempt.status} after {attempt.total_seconds:.1f} s")
    report = _report(result, attempt)
    if report is not None:
        click.echo()
        show_report(report)
    elif attempt.status != "succeeded":
        click.echo("no error document was found; see the pods' logs:")
    if attempt.status != "succeeded":
        for log in attempt.logs:
            click.echo(f"log: {shown(log)}")
        click.echo()


def _attempt_to_dict(attempt: LocalAttempt) -> dict[str, Any]:
    from firstfault.wire import json_schemas  # noqa: PLC0415 - as above
    from flytekitplugins.firstfault.local.pods import fault_ns  # noqa: PLC0415 - as above

    conclusion, seen = attempt.conclusion, attempt.seen
    error: dict[str, Any] | None = None
    if seen is not None:
        error = {
            "code": seen.code,
            "message": seen.message,
            "kind": seen.kind.value,
            "origin": seen.origin.value,
        }
        error |= {"worker": seen.worker, "timestamp": json_schemas.format_timestamp(fault_ns(seen))}
    after_fault = {
        f"fault_to_{moment}": seconds for moment, seconds in attempt.seconds_after_fault.items()
    }
    return {
        "attempt": attempt.number,
        "status": attempt.status,
        "errors": attempt.errors_uri,
        "verdict": (
            json_schemas.verdict_to_dict(conclusion.verdict) if conclusion is not None else None
        ),
        "decision": (
            json_schemas.DECISION.write(conclusion.decision) if conclusion is not None else None
        ),
        "engine": {
            "job": attempt.job.value if attempt.job is not None else None,
            "error_seen": error,
        },
        "seconds": {"total": attempt.total_seconds, **after_fault},
        "logs": [str(log) for log in attempt.logs],
    }
