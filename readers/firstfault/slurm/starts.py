"""Where one start of a Slurm job recorded its failures,
and how many requeues of the job have counted.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path

from firstfault.errors import ObjectNotFoundError
from firstfault.run_folder import RUNS_FOLDERS
from firstfault.slurm.job import JobInfo
from firstfault.slurm_pointer import find_pointers
from firstfault.store import is_remote, join, open_store, split_name
from firstfault.utils.run_sync import run_sync

_MAX_COUNT_BYTES = 65_536


def find_attempts(job: JobInfo, start: int, run: str = "", since: float = 0.0) -> list[str]:
    """Return the folders in which the steps of one start recorded, in the order of the steps.

    Only the steps' own pointers are followed: a name that is guessed from the environment may be
    another job's. Without a common folder of its nodes a step has several folders, and only those
    of this node are visible here.

    Args:
        job: the job.
        start: how often Slurm had restarted it before.
        run: the run's folder, if the user named it.
        since: when it started, in seconds since the Unix epoch; 0 if unknown.
    """
    if run:
        return [join(run, str(start))]
    root = os.environ.get("FIRSTFAULT_FOLDER", "").strip() or RUNS_FOLDERS[0]
    return [
        pointer.uri for pointer in find_pointers(job.number, str(start), root=root, since=since)
    ]


def is_visible(attempt: str) -> bool:
    """Whether an attempt's folder is in a storage, or exists on this host."""
    return is_remote(attempt) or Path(attempt.removeprefix("file://")).is_dir()


def count_requeues(job: JobInfo, attempts: Iterable[str], run: str = "") -> int:
    """Return how many earlier starts of a job ended with a requeue that counts.

    A requeue counts even if its record isn't visible on this node: otherwise a job with folders on
    its nodes would be requeued without a limit. Requeues by Slurm itself, after a preemption, don't
    count.

    Args:
        job: the job.
        attempts: of its last start.
        run: the run's folder, if the user named it.
    """
    starts = range(job.restarts)
    earlier = {
        start: [attempt for attempt in find_attempts(job, start, run) if is_visible(attempt)]
        for start in starts
    }
    recorded = run_sync(
        _read_all(job, _list_runs((*attempts, *itertools.chain(*earlier.values()))))
    )
    lost = {start for start, visible in earlier.items() if not visible}
    # the record of this start is there if the command is repeated
    return len((recorded | lost) - {job.restarts})


def record_requeue(job: JobInfo, attempts: Iterable[str]) -> None:
    """Record that the last start of a job ends with a requeue that counts.

    Raises:
        StoreError: it can't be recorded.
    """
    run_sync(_add(job, _list_runs(attempts)))


def _list_runs(attempts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(split_name(attempt)[0] for attempt in attempts))


def _name_file(job: JobInfo) -> str:
    return f"requeues-{job.id}.json"  # jobs may share the folder of a run


async def _read_all(job: JobInfo, runs: Iterable[str]) -> set[int]:
    starts: set[int] = set()
    for run in runs:
        starts |= await _read(job, run)
    return starts


async def _read(job: JobInfo, run: str) -> set[int]:
    async with open_store(run) as store:
        try:
            record = json.loads(await store.get(_name_file(job), limit=_MAX_COUNT_BYTES))
            return {start for start in record["starts"] if isinstance(start, int)}
        except (ObjectNotFoundError, ValueError, KeyError, TypeError):
            return set()


async def _add(job: JobInfo, runs: Iterable[str]) -> None:
    for run in runs:
        starts = await _read(job, run) | {job.restarts}
        async with open_store(run) as store:
            await store.put(_name_file(job), json.dumps({"starts": sorted(starts)}).encode())
