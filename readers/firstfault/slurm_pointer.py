"""Where a step of a Slurm job recorded: small files that its agents leave and
``firstfault requeue`` reads.

A script around ``srun firstfault torchrun`` doesn't know the run's folder: it may come from
``--ff-folder``, from a sanitized FIRSTFAULT_JOB, from the time of the start if the name was taken,
or be a temporary folder because the usual one was full. Script and steps both know Slurm's numbers.
So each attempt leaves a pointer under these numbers in two places:

- the user's home: of the places that all nodes and the script see, the only one that no option,
  working folder or other user can change. A helper job that was submitted elsewhere finds it, too.
- the folder of the runs, if it's local: in a container, the home may be another one, and on some
  clusters nodes can't write to it. The reader knows it if FIRSTFAULT_FOLDER is exported, or by its
  default.

One file is one attempt of one step: ``<place>/<cluster>/<job>/<restart>.<step>.<hash of the
URI>.json``. The name follows from the content, so any number of nodes can write it in any order.
The content has all parts of the name: if others can write to the folder of the runs, they may
rename a file, or the folder that it's in.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from firstfault.store import is_remote
from firstfault.utils.safe_paths import check_owner, enter, open_below, open_file, write_file

_FOLDER = ".slurm-"
"""The beginning of the name of a user's folder of pointers in a local folder of runs;
the user's id follows.
"""
_ENTER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_BATCH_STEP = "batch"
"""The step of a program that the job's script starts without srun."""
_FOREIGN_CHARACTERS = re.compile(r"[^A-Za-z0-9_-]+")
_MAX_BYTES = 16_384
_MAX_AGE_SECONDS = 90 * 86_400
"""Maximum age of a job's pointers in the home folder: longer than a job may run, and short enough
to bound their number.
"""
_CLOCK_TOLERANCE_SECONDS = 120


class SlurmStart(NamedTuple):
    """One start of a step of a job."""

    job: str
    """Slurm's number; each task of an array has one."""
    restart: str = "0"
    step: str = _BATCH_STEP
    cluster: str = "cluster"


class SlurmPointer(NamedTuple):
    """Where a step recorded."""

    uri: str
    """URI of the attempt, such as ``/shared/runs/4711/0`` or ``s3://bucket/runs/4711/0``."""
    step: str
    """Slurm's number of the step, or "batch"."""
    node: str
    """Name of the node that wrote the pointer."""
    host: str
    """Its host: `uri` may be a folder on that host only."""
    time: float
    """When it was written first, in seconds since the Unix epoch."""


def find_start(environment: Mapping[str, str] = os.environ) -> SlurmStart | None:
    """Return the start of the job step that this process belongs to, or None outside Slurm."""
    get = environment.get
    # A job that is submitted from inside of another one inherits the outer job's variables. sbatch
    # replaces SLURM_JOB_ID, but keeps those of an array. Each task of an array has a number of its
    # own, so that one suffices.
    job = _FOREIGN_CHARACTERS.sub("-", get("SLURM_JOB_ID", ""))
    if not job:
        return None
    restart = get("SLURM_RESTART_COUNT", "")
    step = get("SLURM_STEP_ID", "")
    return SlurmStart(
        job,
        restart if restart.isdecimal() else "0",
        step if step.isdecimal() else _BATCH_STEP,
        _FOREIGN_CHARACTERS.sub("-", get("SLURM_CLUSTER_NAME", "")) or "cluster",
    )


def leave_pointer(uri: str, root: str = "", environment: Mapping[str, str] = os.environ) -> bool:
    """Leave a pointer to an attempt's folder. Return False if this isn't a job of Slurm or no place
    could be written.

    If the pointer exists already, each place is only checked once. Call this with a time limit,
    because access to a home folder may hang.

    Args:
        uri: the attempt's folder.
        root: the folder of runs. An empty or remote one is ignored.
        environment: of the step.
    """
    start = find_start(environment)
    if start is None:
        return False
    name = f"{start.restart}.{start.step}.{hashlib.sha256(uri.encode()).hexdigest()[:12]}.json"
    fields = {
        "uri": uri,
        **start._asdict(),
        "node": environment.get("SLURMD_NODENAME", ""),
        "host": socket.gethostname(),
        "time": time.time(),
    }
    data = json.dumps(fields).encode()
    left = False
    for place in _list_places(root, environment):
        with contextlib.suppress(OSError):
            place.base.mkdir(parents=True, exist_ok=True, mode=place.base_mode)
            jobs = open_below(place.base, (*place.names, start.cluster), mode=0o700)
            try:
                is_new = not os.access(start.job, os.F_OK, dir_fd=jobs)
                folder = enter(start.job, jobs, mode=0o700)
                try:
                    if not os.access(name, os.F_OK, dir_fd=folder):
                        write_file(name, data, folder, mode=0o600)
                finally:
                    os.close(folder)
                left = True
                if is_new:
                    _remove_old(jobs)
            finally:
                os.close(jobs)
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
        root: the folder of runs in this process. An empty or remote one is ignored.
        since: start of the job, in seconds since the epoch. Pointers from before it are of an older
            job with this id.
        environment: names the user's home and, by SLURM_CLUSTER_NAME, the cluster. Without a
            cluster it's the only one with this job; if several have it, nothing is returned.
    """
    cluster = _FOREIGN_CHARACTERS.sub("-", environment.get("SLURM_CLUSTER_NAME", ""))
    job = _FOREIGN_CHARACTERS.sub("-", job)
    restart = _FOREIGN_CHARACTERS.sub("-", restart)
    by_cluster: dict[str, dict[str, SlurmPointer]] = {}
    for place in _list_places(root, environment):
        for file in place.base.glob(f"{place.pattern}/*/{job}/{restart}.*.json"):
            start = SlurmStart(job, restart, file.name.split(".")[1], file.parent.parent.name)
            pointer = _read(place.base, file, start)
            if pointer is not None and pointer.time >= since - _CLOCK_TOLERANCE_SECONDS:
                by_cluster.setdefault(start.cluster, {}).setdefault(pointer.uri, pointer)
    if cluster:
        pointers = {**by_cluster.get(cluster, {}), **by_cluster.get("cluster", {})}
    else:
        pointers = next(iter(by_cluster.values())) if len(by_cluster) == 1 else {}
    return _sort_by_start(pointers.values())


def _sort_by_start(pointers: Collection[SlurmPointer]) -> list[SlurmPointer]:
    """Sort steps by Slurm's numbers, which need no clock, and what the script ran without a step
    by its time.
    """
    ordered = sorted(
        (one for one in pointers if one.step.isdecimal()), key=lambda one: (int(one.step), one.time)
    )
    for one in sorted(
        (one for one in pointers if not one.step.isdecimal()), key=lambda one: one.time
    ):
        later = (place for place, other in enumerate(ordered) if other.time > one.time)
        ordered.insert(next(later, len(ordered)), one)
    return ordered


class _Place(NamedTuple):
    """A place for pointers."""

    base: Path
    """A folder that the user or their administrator chose."""
    base_mode: int
    """Mode of `base` if it has to be created."""
    names: tuple[str, ...]
    """Names of the folder below `base` that this user writes."""
    pattern: str
    """Pattern of the folders below `base` that may be this user's."""


def _list_places(root: str, environment: Mapping[str, str]) -> Iterator[_Place]:
    home = environment.get("HOME", "")
    state = environment.get("XDG_STATE_HOME", "") or (f"{home}/.local/state" if home else "")
    if Path(state).is_absolute():
        yield _Place(Path(state), 0o700, ("firstfault", "slurm"), "firstfault/slurm")
    if root and not is_remote(root):
        # A folder for each user: one for all would belong to whoever came first. The same user may
        # have another id in a container, so the reader checks who owns the files.
        yield _Place(
            Path(root.removeprefix("file://")),
            0o777,
            (f"{_FOLDER}{os.geteuid()}",),
            f"{_FOLDER}*",
        )


def _read(base: Path, file: Path, start: SlurmStart) -> SlurmPointer | None:
    """Return a pointer below a folder that this user wrote for a start; None if it isn't one."""
    try:
        owners = {os.geteuid(), base.stat().st_uid}
        folder = os.open(base, _ENTER_FLAGS)
        try:
            for name in file.parent.relative_to(base).parts:
                below = os.open(name, _ENTER_FLAGS | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = below
            descriptor = open_file(file.name, os.O_RDONLY, folder)
        finally:
            os.close(folder)
        with os.fdopen(descriptor, "rb") as opened:
            # another user must not choose which verdict counts
            check_owner(descriptor, owners, file.name)
            fields = json.loads(opened.read(_MAX_BYTES))
        if any(fields[name] != value for name, value in start._asdict().items()):
            return None  # its name is that of another start: somebody has moved it, or its folder
        return SlurmPointer(
            uri=str(fields["uri"]),
            step=str(fields["step"]),
            node=str(fields["node"]),
            host=str(fields["host"]),
            time=float(fields["time"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove_old(cluster: int) -> None:
    """Remove this user's pointers of jobs that ended long ago from the folder of a descriptor."""
    oldest = time.time() - _MAX_AGE_SECONDS
    with contextlib.suppress(OSError):
        for job in Path(f"/proc/self/fd/{cluster}").iterdir():
            status = job.lstat()
            if (
                stat.S_ISDIR(status.st_mode)
                and status.st_uid == os.geteuid()
                and status.st_mtime < oldest
            ):
                shutil.rmtree(job, ignore_errors=True)
