"""Where a step of a Slurm job recorded: small files that its agents leave and ``firstfault requeue`` reads.

A script around ``srun firstfault torchrun`` doesn't know the run's folder: it may come from ``--ff-folder``, from a
sanitized FIRSTFAULT_JOB, from the time of the start if the name was taken, or be a temporary folder because the other
one was full. What script and steps both know are Slurm's numbers. So each attempt leaves a pointer under these numbers
in two places:

- the user's home: of the places that all nodes and the script see, the only one that no option, working folder or
  other user can change. A helper job that was submitted elsewhere finds it, too.
- the folder of the runs, if it's local: in a container, the home may be another one, and on some clusters nodes can't
  write to it. The reader knows it if FIRSTFAULT_FOLDER is exported, or by its default.

One file is one attempt of one step: ``<place>/<cluster>/<job>/<restart>.<step>.<hash of the URI>.json``. The name
follows from the content, so any number of nodes can write it in any order.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from firstfault.store import is_remote
from firstfault.utils.safe_paths import check_owner, open_below, open_file, write_file

POINTER_FOLDER = ".slurm"
"""The folder of pointers in a local folder of runs."""
_HOME_FOLDER = ("firstfault", "slurm")
_BATCH = "batch"
"""The step of a program that the job's script starts without srun."""
_FOREIGN = re.compile(r"[^A-Za-z0-9_-]+")
_MAX_BYTES = 16_384
_MAX_AGE_SECONDS = 90 * 86_400
"""Of a job's pointers in the home: longer than a job may run, and short enough to bound their number."""
_CLOCK_TOLERANCE_SECONDS = 120


class SlurmStart(NamedTuple):
    """One start of a step of a job."""

    job: str
    """Slurm's number; each task of an array has one."""
    restart: str = "0"
    step: str = _BATCH
    cluster: str = "cluster"


class SlurmPointer(NamedTuple):
    """Where a step recorded."""

    uri: str
    """Of the attempt, such as ``/shared/runs/4711/0`` or ``s3://bucket/runs/4711/0``."""
    step: str
    """Slurm's number of the step, or "batch"."""
    node: str
    """Name of the node that wrote the pointer."""
    host: str
    """Its host: `uri` may be a folder on that host only."""
    time: float
    """When it was written first, in seconds since the Unix epoch."""


def find_start(environment: Mapping[str, str] = os.environ) -> SlurmStart | None:
    """Return the start of a job's step that this process belongs to; None: it belongs to no job of Slurm."""
    get = environment.get
    # A job that is submitted from inside of another one inherits the outer job's variables. sbatch replaces
    # SLURM_JOB_ID, but keeps those of an array. Each task of an array has a number of its own, so that one suffices.
    job = _FOREIGN.sub("-", get("SLURM_JOB_ID", ""))
    if not job:
        return None
    restart, step = get("SLURM_RESTART_COUNT", ""), get("SLURM_STEP_ID", "")
    return SlurmStart(
        job,
        restart if restart.isdecimal() else "0",
        step if step.isdecimal() else _BATCH,
        _FOREIGN.sub("-", get("SLURM_CLUSTER_NAME", "")) or "cluster",
    )


def leave_pointer(uri: str, root: str = "", environment: Mapping[str, str] = os.environ) -> bool:
    """Leave a pointer to an attempt's folder; False if this isn't a job of Slurm, or if no place could be written.

    It takes one look per place if the pointer is there already. Call it with a time limit: a home may hang.

    Args:
        uri: the attempt's folder.
        root: the folder of runs; empty or remote: none.
        environment: of the step.
    """
    start = find_start(environment)
    if start is None:
        return False
    name = f"{start.restart}.{start.step}.{hashlib.sha256(uri.encode()).hexdigest()[:12]}.json"
    fields = {
        "uri": uri,
        "step": start.step,
        "node": environment.get("SLURMD_NODENAME", ""),
        "host": socket.gethostname(),
        "time": time.time(),
    }
    data = json.dumps(fields).encode()
    left = False
    for base, names, mode in _places(root, environment):
        with contextlib.suppress(OSError):
            base.mkdir(parents=True, exist_ok=True, mode=mode)
            jobs = base.joinpath(*names, start.cluster)
            is_new = not (jobs / start.job).exists()
            folder = open_below(base, (*names, start.cluster, start.job), mode=mode)
            try:
                if not os.access(name, os.F_OK, dir_fd=folder):
                    write_file(name, data, folder, mode=0o600)
            finally:
                os.close(folder)
            left = True
            if is_new:
                _remove_old(jobs)
    return left


def find_pointers(
    job: str,
    restart: str = "0",
    *,
    root: str = "",
    since: float = 0.0,
    environment: Mapping[str, str] = os.environ,
) -> list[SlurmPointer]:
    """Return where the steps of one start of a job recorded, in the order of the steps.

    Several nodes without a common folder leave several pointers of one step.

    Args:
        job: Slurm's number, also of one task of an array: "4711".
        restart: how often Slurm had restarted the job before this start.
        root: the folder of runs as this process knows it; empty or remote: none.
        since: start of the job, in seconds since the epoch. Pointers from before it are of an older job with this id.
        environment: names the user's home and, by SLURM_CLUSTER_NAME, the cluster. Without a cluster it's the only one
            with this job; if several have it, nothing is returned.
    """
    cluster = _FOREIGN.sub("-", environment.get("SLURM_CLUSTER_NAME", ""))
    found: dict[str, dict[str, SlurmPointer]] = {}
    for base, names, _ in _places(root, environment):
        place = base.joinpath(*names)
        for file in place.glob(f"*/{_FOREIGN.sub('-', job)}/{_FOREIGN.sub('-', restart)}.*.json"):
            pointer = _read(file)
            if pointer is not None and pointer.time >= since - _CLOCK_TOLERANCE_SECONDS:
                found.setdefault(file.parent.parent.name, {}).setdefault(pointer.uri, pointer)
    if cluster:
        pointers = {**found.get(cluster, {}), **found.get("cluster", {})}
    else:
        pointers = next(iter(found.values())) if len(found) == 1 else {}
    return _sort_by_start(pointers.values())


def _sort_by_start(pointers: Collection[SlurmPointer]) -> list[SlurmPointer]:
    """Sort by Slurm's numbers of the steps, which need no clock, and what the script ran by itself by its time."""
    ordered = sorted((one for one in pointers if one.step.isdecimal()), key=lambda one: (int(one.step), one.time))
    for one in sorted((one for one in pointers if not one.step.isdecimal()), key=lambda one: one.time):
        later = (place for place, other in enumerate(ordered) if other.time > one.time)
        ordered.insert(next(later, len(ordered)), one)
    return ordered


def _places(root: str, environment: Mapping[str, str]) -> Iterator[tuple[Path, tuple[str, ...], int]]:
    """Yield each place for pointers: a trusted folder, the names below it, and the mode of new folders."""
    home = environment.get("HOME", "")
    state = environment.get("XDG_STATE_HOME", "") or (f"{home}/.local/state" if home else "")
    if Path(state).is_absolute():
        yield Path(state), _HOME_FOLDER, 0o700
    if root and not is_remote(root):
        yield Path(root.removeprefix("file://")), (POINTER_FOLDER,), 0o777


def _read(file: Path) -> SlurmPointer | None:
    """Return a pointer that this user wrote; None if it isn't one."""
    try:
        folder = os.open(file.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            descriptor = open_file(file.name, os.O_RDONLY, folder)
            owners = {os.geteuid(), file.parents[3].stat().st_uid}
        finally:
            os.close(folder)
        with os.fdopen(descriptor, "rb") as opened:
            check_owner(descriptor, owners, file.name)  # another user must not choose which verdict counts
            fields = json.loads(opened.read(_MAX_BYTES))
        return SlurmPointer(
            uri=str(fields["uri"]),
            step=str(fields["step"]),
            node=str(fields["node"]),
            host=str(fields["host"]),
            time=float(fields["time"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove_old(cluster: Path) -> None:
    """Remove pointers of jobs that ended long ago."""
    oldest = time.time() - _MAX_AGE_SECONDS
    with contextlib.suppress(OSError), os.scandir(cluster) as jobs:
        for job in jobs:
            if job.is_dir(follow_symlinks=False) and job.stat(follow_symlinks=False).st_mtime < oldest:
                shutil.rmtree(job.path, ignore_errors=True)
