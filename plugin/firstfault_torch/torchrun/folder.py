"""Chooses the folder of a job's documents: the same on all nodes, of no other run, and one that can be written."""

from __future__ import annotations

import datetime as dt
import itertools
import os
import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from firstfault.runs import FOLDERS, begin_run
from firstfault.store import is_remote, join
from firstfault_torch.budgets import FOLDER_S, FOLDER_TAKEN_S
from firstfault_torch.guard import bounded, caught, logger

if TYPE_CHECKING:
    from firstfault_torch.torchrun.settings import Who

VARIABLE = "FIRSTFAULT_FOLDER"
_NO_COMMON_NAME = (
    "the nodes of this job have no common name: each one's documents are in a folder of its own below %s; "
    "set FIRSTFAULT_JOB to a new name for each run"
)
_ELSEWHERE = "%s %s; this node's documents are in %s. Make it writable, or set FIRSTFAULT_FOLDER to another one."
_runs = itertools.count()
"""One process may run several jobs of functions in a second."""


class Chosen(NamedTuple):
    """Where this node records."""

    folder: str
    """Of the attempt."""
    mark: int | None
    """Descriptor of the mark on the run's folder, locked until it is closed; a remote folder has none."""
    is_shared: bool
    """Whether all nodes record there."""


def given_folder() -> str:
    """Return the folder that the user names for all nodes; empty: none."""
    given = os.environ.get(VARIABLE, "").removeprefix("file://")
    return given if not given or is_remote(given) else str(Path(given).absolute())


def root_folder() -> str:
    """Return the folder below which runs lie: the user's, else one in the working folder."""
    working, _ = caught(Path.cwd, OSError)  # it may have been removed
    return given_folder() or (str(working / FOLDERS[0]) if working is not None else fallback_folder())


def fallback_folder() -> str:
    """Return the folder of runs for a node that cannot write the one above."""
    return str(Path(tempfile.gettempdir()) / FOLDERS[0])


def chosen_folder(who: Who, meet: Callable[[], Any] | None) -> Chosen:
    """Return the folder of this run's attempt, made and marked; a remote folder is only named.

    Args:
        who: this node.
        meet: returns the store that all nodes of the job share, or None; None: there is one node.
    """
    root, name = root_folder(), None
    claim, store = partial(_claimed, root, who), meet() if meet is not None else None
    if store is not None:
        name = bounded(partial(_agreed, store, who, claim), FOLDER_TAKEN_S, "agreeing on the run's name")
    elif meet is not None:  # the variables alone may be the same on all nodes
        name = f"{who.job.value}/{who.number}" if who.job.value and who.attempt.value else None
    if name is None and meet is not None and given_folder():
        logger.warning(_NO_COMMON_NAME, root)
    is_common = bool(given_folder()) and (name is not None or meet is None)
    if is_remote(root):
        return Chosen(join(root, name or claim()), None, is_common)
    why = ""
    for parent in dict.fromkeys((root, fallback_folder())):
        make = partial(_made, parent, name or partial(_claimed, parent, who))
        made, error = bounded(partial(caught, make, OSError), FOLDER_S, "making the run's folder") or (None, None)
        if made is not None:
            if why and given_folder():
                logger.warning(_ELSEWHERE, root, why, made[0])
            return Chosen(*made, is_common and not why)
        why = why or (f"cannot be written ({error})" if error else f"did not answer within {FOLDER_S:g} s")
    raise OSError(f"{root} {why}")


def _made(parent: str, name: str | Callable[[], str]) -> tuple[str, int]:
    folder = Path(parent) / (name if isinstance(name, str) else name())
    mark = begin_run(folder.parent)
    folder.mkdir(exist_ok=True)
    return str(folder), mark


def _fresh(who: Who) -> str:
    number = next(_runs)
    began = f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{os.getpid()}{f'-{number}' if number else ''}"
    return f"{who.job.value}-{began}/{who.number}" if who.job.value else f"{began}/{who.number}"


def _claimed(root: str, who: Who) -> str:
    """Return "<run>/<attempt>", by a name that no run before has taken below `root`.

    A storage cannot be asked in no time: there a folder on this node tells, and if it may be another node's turn, the
    time of the start makes a new name.
    """
    name = f"{who.job.value}/{who.number}"
    if not who.job.value or (is_remote(root) and not who.attempt.value):
        return _fresh(who)
    try:
        Path(fallback_folder() if is_remote(root) else root, name).mkdir(parents=True)
    except FileExistsError:
        return _fresh(who)
    except OSError:  # each node finds that for itself
        pass
    return name


def _agreed(store: Any, who: Who, claim: Callable[[], str]) -> str:
    """Return the name that the first node to ask claims."""
    key = f"firstfault/run/{who.run_id}"
    if store.add(f"{key}/asked", 1) == 1:
        store.set(key, bounded(claim, FOLDER_S, "naming the run") or _fresh(who))
    store.wait([key], dt.timedelta(seconds=FOLDER_TAKEN_S))
    return bytes(store.get(key)).decode()
