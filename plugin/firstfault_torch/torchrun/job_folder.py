"""The folder of a torchrun job's documents: the same on all nodes, of no other run,
and one that can be written.
"""

from __future__ import annotations

import datetime as dt
import itertools
import os
import re
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from firstfault.layout import RUN_MARK
from firstfault.run_folder import (
    RUNS_FOLDERS,
    begin_run,
    get_begin_time,
    make_attempt,
    make_fallback_folder,
)
from firstfault.store import is_remote, join
from firstfault.utils.safe_paths import ForeignPathError
from firstfault_torch.guard import call_with_timeout, logger, try_call
from firstfault_torch.time_limits import RUN_FOLDER_TIMEOUT_SECONDS, RUN_NAME_TIMEOUT_SECONDS
from firstfault_torch.torchrun.job_names import SLURM_PREFIX, JobNames
from firstfault_torch.torchrun.settings import FOLDER_VARIABLE

_NO_COMMON_NAME_MESSAGE = (
    "the nodes of this job have no common name, so each writes its documents to a separate folder"
    " below %s; set FIRSTFAULT_JOB to a new name for each run"
)
_FALLBACK_MESSAGE = (
    "%s %s; this node's documents are in %s. Make it writable, or set FIRSTFAULT_FOLDER to another"
    " one."
)
_START_SUFFIX = re.compile(r"-\d{8}-\d{6}-.+-\d+")
"""What `_make_new_name` adds to a name."""
_run_numbers = itertools.count()
"""One process may run several jobs of functions in a second."""


class ChosenFolder(NamedTuple):
    """Where this node records."""

    folder: str
    """Of the attempt."""
    mark: int | None
    """Descriptor of the mark on the run's folder, locked until it is closed;
    a remote folder has none.
    """
    is_shared: bool
    """Whether all nodes record there."""


def get_given_folder() -> str:
    """Return the folder that the user set for all nodes, or "" if none."""
    given = os.environ.get(FOLDER_VARIABLE, "").strip().removeprefix("file://")
    if not given or is_remote(given):
        return given
    # Path's raises without a home
    return str(Path(os.path.expanduser(given)).absolute())  # noqa: PTH111


def find_root_folder() -> str:
    """Return the folder that contains the runs: the user's, or a folder in the working folder.

    Raises:
        OSError: there is no working folder, and no folder for temporary files.
    """
    working, _ = try_call(Path.cwd, OSError)  # it may have been removed
    return get_given_folder() or str(
        working / RUNS_FOLDERS[0] if working is not None else make_fallback_folder()
    )


def name_run(names: JobNames) -> str:
    """Return the name of an agent's run, or "" if the job has no name."""
    # The steps of one job are separate runs. The first one's is named after the job alone.
    return f"{names.run}.{names.step}" if names.run and names.step.strip("0") else names.run


def is_named_by_start(root: str, names: JobNames) -> bool:
    """Whether the run's name contains the time, host and process of its start.

    Without a number of the attempt, a job of this name may have run before, and a storage isn't
    asked.
    """
    return not names.run or (is_remote(root) and not names.attempt.value)


def choose_folder(names: JobNames, find_shared_store: Callable[[], Any] | None) -> ChosenFolder:
    """Return the folder of this run's attempt, made and marked; a remote folder is only named.

    `find_shared_store` returns the store that all nodes of the job share, or None; with one node,
    `find_shared_store` itself is None.
    """
    root = find_root_folder()
    name = None
    claim = partial(_claim_name, root, names)
    store = find_shared_store() if find_shared_store is not None else None
    # Nodes can't choose the name independently: they start in different seconds, and may see an
    # older run's folder at different times. So one node claims a name, and its peers read it from
    # the store.
    if store is not None:
        agree = partial(_agree_on_name, store, names, claim)
        name = call_with_timeout(agree, RUN_NAME_TIMEOUT_SECONDS, "agreeing on the run's name")
    # No common store: only names that are complete without the clock or a look at the folder are
    # equal on all nodes.
    elif find_shared_store is not None:  # the variables alone may be the same on all nodes
        name = (
            f"{name_run(names)}/{names.number}" if names.job.value and names.attempt.value else None
        )
    if name is None and find_shared_store is not None and get_given_folder():
        logger.warning(_NO_COMMON_NAME_MESSAGE, root)
    is_common = bool(get_given_folder()) and (name is not None or find_shared_store is None)
    # Remote folders have no locks, so no mark either.
    if is_remote(root):
        return ChosenFolder(join(root, name or claim()), None, is_common)
    why = ""
    # The second is looked for only if the first can't be written: a node may have no folder for
    # temporary files. A folder may hang (NFS) instead of failing, so each has a limit; the thread
    # of a hanging one stays behind.
    for find_parent in (lambda: root, lambda: str(make_fallback_folder())):
        make = partial(try_call, partial(_make_folder, find_parent, names, name), OSError)
        answer = call_with_timeout(make, RUN_FOLDER_TIMEOUT_SECONDS, "making the run's folder")
        made, error = answer or (None, None)
        if made is not None:
            if why and get_given_folder():
                logger.warning(_FALLBACK_MESSAGE, root, why, made[0])
            # In the fallback this node records alone, even if its peers can write to `root`.
            return ChosenFolder(*made, is_common and not why)
        late = f"did not answer within {RUN_FOLDER_TIMEOUT_SECONDS:g} s"
        why = why or (f"cannot be written ({error})" if error else late)
    raise OSError(f"{root} {why}")


def _make_folder(
    find_parent: Callable[[], str], names: JobNames, name: str | None
) -> tuple[str, int]:
    parent = find_parent()
    folder = Path(parent, name or _claim_name(parent, names))
    # Without the mark, readers and cleanups ignore the folder (`run_folder.list_runs`). The
    # attempt's folder exists if `_claim_name` took the name, or if another node on a shared file
    # system was faster.
    return str(folder), begin_run(folder.parent, folder.name)


def _make_new_name(names: JobNames) -> str:
    number = next(_run_numbers)
    process = f"{os.getpid()}-{number}" if number else str(os.getpid())
    start = f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{process}"
    return f"{name_run(names)}-{start}/{names.number}" if names.run else f"{start}/{names.number}"


def _claim_name(root: str, names: JobNames) -> str:
    """Return "<run>/<attempt>", by a name that no run before has taken below `root`.

    A storage is too slow to be asked here: a folder on this node decides, and if it may be another
    node's turn, the time of the start makes a new name.
    """
    if is_named_by_start(root, names):
        return _make_new_name(names)
    run = name_run(names)
    try:
        if is_remote(root):
            root = str(make_fallback_folder())
        elif names.number != "0" and not names.attempt.source.startswith(SLURM_PREFIX):
            run = _find_last_run(Path(root), run)
        # mkdir() is the test and the claim in one step: of two jobs with this name, only one makes
        # the folder.
        make_attempt(Path(root, run), names.number)
    except (FileExistsError, ForeignPathError):
        return _make_new_name(names)
    except OSError:  # not writable here; each node finds out when it makes its own folder
        pass
    return f"{run}/{names.number}"


def _find_last_run(root: Path, name: str) -> str:
    """Return the run of a job that was begun last: "job",
    or "job-<time>-<host>-<process>" if that name was taken.

    A scheduler that names its jobs only by what a user wrote counts each job's attempts from 0. A
    later attempt belongs to the job that was begun last, even if its number is free in the folder
    of an older job.
    """
    later_runs = (
        mark.parent
        for mark in root.glob(f"*/{RUN_MARK}")
        if _START_SUFFIX.fullmatch(mark.parent.name.removeprefix(name))
    )
    return max((root / name, *later_runs), key=get_begin_time).name


def _agree_on_name(store: Any, names: JobNames, claim: Callable[[], str]) -> str:
    """Return the name that the first node to ask claims."""
    key = f"firstfault/run/{names.run_id}"
    # The counter elects one node. If that node dies before set(), its peers time out in wait(), and
    # each of them records in a separate folder.
    if store.add(f"{key}/asked", 1) == 1:
        # With a limit: a folder that hangs must not keep the peers waiting for the name.
        store.set(
            key,
            call_with_timeout(claim, RUN_FOLDER_TIMEOUT_SECONDS, "naming the run")
            or _make_new_name(names),
        )
    store.wait([key], dt.timedelta(seconds=RUN_NAME_TIMEOUT_SECONDS))
    return bytes(store.get(key)).decode()
