"""``firstfault requeue``: runs a failed job of Slurm again, if the verdict allows a retry."""

from __future__ import annotations

import json
import os

import click

from firstfault.cli import EXIT, debug_option
from firstfault.errors import ObjectNotFoundError
from firstfault.model.job import DECISION_MODES, DECISIONS_VARIABLE, Action
from firstfault.run_folder import FOLDERS
from firstfault.slurm.job import SlurmJob, find_job_id
from firstfault.store import join, open_store
from firstfault.utils.run_sync import run_sync

_COUNT_FILE = "requeues.json"
"""In the run's folder. SLURM_RESTART_COUNT also counts preemptions and what an administrator did."""
_CANCELED = {"CANCELLED", "COMPLETING"}
"""States of a job that somebody canceled; inside of it, Slurm shows the second one."""


@click.command()
@click.argument("uri", required=False, default="")
@click.option("--job", "job_id", default=find_job_id, metavar="ID", help="Id of the job. Default: the one around.")
@click.option(
    "--max", "max_requeues", type=click.IntRange(min=0), default=3, show_default=True, help="Requeues that count."
)
@click.option("--exclude-bad-node", is_flag=True, help="Don't use a machine again that is proven to be faulty.")
@click.option(
    "--decisions",
    type=click.Choice(DECISION_MODES),
    envvar=DECISIONS_VARIABLE,
    default="act",
    show_default=True,
    help="observe: only print what would be done. off: do nothing.",
)
@debug_option
def requeue(uri: str, job_id: str, max_requeues: int, exclude_bad_node: bool, decisions: str) -> int:
    """Run a failed job of Slurm again, unless its failure would only repeat.

    URI is the folder of the run; by default it's FIRSTFAULT_JOB or the job's id, below FIRSTFAULT_FOLDER or
    .firstfault/torchrun. A failure of unknown cause counts as one that may be temporary; the same fault twice without
    progress ends the requeues, and requeues after failures of the platform don't count.

    \b
    Exit codes: 0 requeued; 1 not requeued; 2 usage; 3 no verdict on this start of the job.

    \b
    Examples, in the job's script and as a helper that Slurm starts after a failure:
      srun firstfault torchrun ... train.py || { trap '' TERM; firstfault requeue --exclude-bad-node; }
      sbatch --dependency=afternotok:42 --wrap 'firstfault requeue --job 42'
    """  # noqa: D301 - click's mark of lines to keep
    from firstfault.attempt_data import read_attempt  # noqa: PLC0415 - `--help` needs none of it
    from firstfault.output_reader import MultiErrorFileOutputReader  # noqa: PLC0415 - as above
    from firstfault.retry import RetryContext, host_evidence  # noqa: PLC0415 - as above
    from firstfault.wire.json_schemas import from_json  # noqa: PLC0415 - as above

    if not job_id:
        raise click.UsageError("this isn't a job of Slurm; name one with --job")
    job = SlurmJob(job_id)
    fields = job.read_fields()
    start, state = fields.get("Restarts", "0"), fields.get("JobState", "")
    root = os.environ.get("FIRSTFAULT_FOLDER", "").strip() or FOLDERS[0]
    run = uri or join(root, os.environ.get("FIRSTFAULT_JOB") or job_id)
    read = read_attempt(join(run, start), MultiErrorFileOutputReader)
    if read.conclusion is None:
        click.echo(f"firstfault: job {job_id} isn't requeued: no verdict on its start {start} in {run}", err=True)
        return EXIT.NOTHING_FOUND
    verdict, decision = read.conclusion.verdict, read.conclusion.decision
    # the nodes decided with what only they knew, such as the previous verdict
    if read.job.seals and (sealed := from_json(min(read.job.seals, key=lambda seal: seal.order).json)):
        decision = sealed[1]
    count, is_counted = run_sync(_read_count(run)), decision.action is not Action.SYSTEM
    stop_reason = decision.reason if decision.action is Action.STOP else ""
    if state in _CANCELED:
        stop_reason = f"Slurm shows it as {state}"  # to its agents, a user's scancel looks like a preemption
    elif not stop_reason and is_counted and count >= max_requeues:
        stop_reason = f"all {max_requeues} requeues are used up"
    exclude = verdict.node or "" if exclude_bad_node and host_evidence()(verdict, RetryContext()) else ""
    plan = f"is requeued{f', without {exclude}' if exclude else ''}: {decision.reason}"
    plan = f"stops: {stop_reason}" if stop_reason else plan
    if decisions == "off":
        return EXIT.TOOL_FAILED
    before = "" if decisions == "act" else "would have done this: "
    click.echo(f"firstfault: {before}job {job_id} {plan}", err=True)
    if stop_reason or before:
        return EXIT.TOOL_FAILED
    run_sync(_write_count(run, count + is_counted))
    refused = job.requeue(exclude=exclude, headline=verdict.headline)
    for line in refused:
        click.echo(f"firstfault: Slurm didn't do this: {line}", err=True)
    return EXIT.TOOL_FAILED if refused else EXIT.OK


async def _read_count(run: str) -> int:
    async with open_store(run) as store:
        try:
            return int(json.loads(await store.get(_COUNT_FILE))["count"])
        except (ObjectNotFoundError, ValueError, KeyError, TypeError):
            return 0


async def _write_count(run: str, count: int) -> None:
    async with open_store(run) as store:
        await store.put(_COUNT_FILE, json.dumps({"count": count}).encode())
