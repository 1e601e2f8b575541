"""``firstfault requeue``: runs a failed job of Slurm again, if the verdict allows a retry."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from firstfault.cli import EXIT, debug_option
from firstfault.decision_mode import (
    ACT,
    DECISION_MODES,
    DECISIONS_VARIABLE,
    OFF,
    read_decision_mode,
)
from firstfault_start import is_off

if TYPE_CHECKING:
    from firstfault.conclude import Judgment
    from firstfault.slurm.job import JobInfo

_UNDECIDED_EXIT_CODE = EXIT.NOTHING_FOUND
"""For scripts: do what you do without firstfault."""


@click.command()
@click.argument("uri", required=False, default="")
@click.option(
    "--job",
    "job_id",
    default="",
    metavar="ID",
    help="Id of the job. Default: the one around.",
)
@click.option(
    "--max",
    "max_requeues",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Requeues that count.",
)
@click.option(
    "--exclude-bad-node",
    is_flag=True,
    help="Don't use a machine again that is proven to be faulty.",
)
@click.option(
    "--decisions",
    type=click.Choice(DECISION_MODES),
    help=(
        "observe: only print what would be done. off: do nothing (exit code 3). Default: act, or the variable "
        f"{DECISIONS_VARIABLE}."
    ),
)
@debug_option
def requeue(
    uri: str,
    job_id: str,
    max_requeues: int,
    exclude_bad_node: bool,
    decisions: str | None,
) -> int:
    """Run a failed job of Slurm again, unless its failure would only repeat.

    The verdict is that of the job's last start, wherever its steps recorded. If several steps
    failed, the last one decides, because the script tolerated the earlier ones. A failure of
    unknown cause counts as one that may be temporary; the same fault twice without progress ends
    the requeues. Requeues after proven hardware faults, or after a preemption by Slurm, don't
    count.

    URI is the run's folder. Pass it for jobs with steps that left no pointers to it.

    \b
    Exit codes: 0 requeued; 1 not requeued; 2 usage; 3 firstfault decides nothing: no verdict on
    this start of the job, or the mode observe or off, or FIRSTFAULT=0.

    \b
    Examples, in the job's script and as a helper that Slurm starts after a failure:
      srun firstfault torchrun ... train.py ||
        { trap '' TERM; firstfault requeue --exclude-bad-node; }
      sbatch --dependency=afternotok:42 --wrap 'firstfault requeue --job 42'
    """  # noqa: D301 - click's mark of lines to keep
    from firstfault.model.job import Action  # noqa: PLC0415 - as below
    from firstfault.slurm import starts  # noqa: PLC0415 - `--help` needs none of it
    from firstfault.slurm.job import SlurmJob, find_job_id, read_job  # noqa: PLC0415 - as above
    from firstfault.slurm.plan import make_plan  # noqa: PLC0415 - as above

    mode = OFF if is_off() else decisions or read_decision_mode()
    if mode == OFF:
        return _UNDECIDED_EXIT_CODE
    own_id = find_job_id()
    if not (job_id or own_id):
        raise click.UsageError("this isn't a job of Slurm; name one with --job")
    job = read_job(job_id or own_id, is_own=not job_id)
    if job.number == own_id and _is_requeued_already(job):
        click.echo(f"firstfault: Slurm has already requeued job {job.id}", err=True)
        return EXIT.OK
    attempts = starts.find_attempts(job, job.restarts, uri, job.start_time)
    # Nodes without a common folder each have all documents.
    attempts = [attempt for attempt in attempts if starts.is_visible(attempt)] or attempts
    judgments = _read_judgments(attempts)
    if not judgments:
        where = f" in {', '.join(attempts)}" if attempts else ""
        click.echo(
            f"firstfault: job {job.id} isn't requeued: no verdict on its start"
            f" {job.restarts}{where}",
            err=True,
        )
        return _UNDECIDED_EXIT_CODE
    # a job that stops needs no count, and its storage no further requests
    is_stopped = judgments[-1].decision.action is Action.STOP
    count = 0 if is_stopped else starts.count_requeues(job, attempts, uri)
    plan = make_plan(job, judgments, count, max_requeues)
    slurm_job = SlurmJob(job.id)
    exclude, problem = "", ""
    if exclude_bad_node and plan.bad_node and not plan.stop_reason:
        problem = slurm_job.find_exclusion_problem(job, plan.bad_node)
        exclude = "" if problem else plan.bad_node
    click.echo(f"firstfault: {plan.describe(job.id, exclude, is_observed=mode != ACT)}", err=True)
    if problem:
        click.echo(
            f"firstfault: {plan.bad_node} is faulty, but can't be excluded: {problem}", err=True
        )
    if plan.stop_reason or mode != ACT:
        return EXIT.TOOL_FAILED if mode == ACT else _UNDECIDED_EXIT_CODE
    if plan.is_counted:
        starts.record_requeue(job, attempts)
    for line in slurm_job.requeue(job, exclude=exclude, headline=plan.judgment.verdict.headline):
        click.echo(f"firstfault: Slurm didn't do this: {line}", err=True)
    return EXIT.OK


def _is_requeued_already(job: JobInfo) -> bool:
    """Whether Slurm ends this process because it has requeued the job around it."""
    from firstfault.slurm_pointer import find_start  # noqa: PLC0415 - as above

    start = find_start(os.environ)
    return start is not None and int(start.restart) < job.restarts


def _read_judgments(attempts: Sequence[str]) -> list[Judgment]:
    """Return the judgments of the attempts that failed."""
    from firstfault.attempt_reader import (  # noqa: PLC0415 - as above
        AttemptReader,
        read_sealed_judgment,
    )
    from firstfault.conclude import find_judgment  # noqa: PLC0415 - as above
    from firstfault.retry import HOST_CATEGORIES  # noqa: PLC0415 - as above
    from firstfault.utils.run_sync import run_sync  # noqa: PLC0415 - as above

    # Exactly these folders, unlike the command `show`, which also accepts a folder of attempts or
    # of logs.
    judgments: list[Judgment] = []
    for attempt in attempts:
        judgment = run_sync(read_sealed_judgment(attempt))
        # only the root cause's document proves that a machine is faulty
        if judgment is None or judgment.verdict.category in HOST_CATEGORIES:
            conclusion = AttemptReader(attempt).conclude()
            judgment = find_judgment(conclusion) if conclusion is not None else None
        if judgment is not None:
            judgments.append(judgment)
    return judgments
