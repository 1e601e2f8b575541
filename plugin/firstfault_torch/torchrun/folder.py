"""Chooses the folder of a job's documents: the same on all nodes, of no other run, and one that can be written."""

from __future__ import annotations

import datetime as dt
import hashlib
import itertools
import os
import socket
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from firstfault.runs import FOLDERS, begin_run
from firstfault.store import is_remote, join
from firstfault_torch.budgets import FOLDER_S, FOLDER_TAKEN_S
from firstfault_torch.guard import bounded, caught, logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from firstfault_torch.torchrun.identity import Who

VARIABLE = "FIRSTFAULT_FOLDER"
_DEFAULT = FOLDERS[0]
_ADVICE = f"Make it writable, or set {VARIABLE} to another one."
_runs = itertools.count()
"""One process may run several jobs of functions in a second."""
_NO_COMMON_NAME = (
    "the nodes of this job have no common name: each one's documents are in a folder of its own below %s; "
    "set FIRSTFAULT_JOB to a new name for each run"
)


def given_folder() -> str:
    """Return the folder that the user names for all nodes; empty: none."""
    given = os.environ.get(VARIABLE, "").removeprefix("file://")
    return given if not given or is_remote(given) else str(Path(given).absolute())


def root_folder() -> str:
    """Return the folder below which runs lie, as the user gave it or in the working folder."""
    return given_folder() or str(Path.cwd() / _DEFAULT)


def fallback_folder() -> str:
    """Return the folder of runs for a node that cannot write the one above."""
    return str(Path(tempfile.gettempdir()) / _DEFAULT)


class Chosen(NamedTuple):
    """Where this node records."""

    folder: str
    """Of the attempt."""
    mark: int | None
    """Descriptor of the mark on the run's folder, locked until it is closed; a remote folder has none."""
    is_shared: bool
    """Whether all nodes record there."""


def chosen_folder(who: Who, meet: Callable[[], Any] | None) -> Chosen:
    """Return the folder of this run's attempt, made and marked; a remote folder is only named.

    Args:
        who: this node.
        meet: returns the store that all nodes of the job share, or None; None: there is one node.
    """
    root, _ = caught(root_folder, OSError)  # the working folder may have been removed
    root = root or fallback_folder()
    name = _name(who, partial(_claimed, root, who), meet)
    is_common = name is not None and bool(given_folder())
    if name is None:
        name = _fresh(who)
        if meet is not None and given_folder():
            logger.warning(_NO_COMMON_NAME, root)
    if is_remote(root):
        return Chosen(join(root, name), None, is_common)
    folder, mark = _made(root, name)
    return Chosen(str(folder), mark, is_common and folder == Path(root) / name)


def _name(who: Who, claim: Callable[[], str], meet: Callable[[], Any] | None) -> str | None:
    """Return "<run>/<attempt>", the same on all nodes; None if they cannot agree on it."""
    if meet is None:
        return bounded(claim, FOLDER_S, "naming the run")
    store = meet()
    if store is not None:
        return bounded(partial(_agreed, store, who, claim), FOLDER_TAKEN_S, "agreeing on the run's name")
    # no store before the first round: the variables alone may be the same on all nodes
    return f"{who.job.value}/{who.number}" if who.job.value and who.attempt.source else None


def _fresh(who: Who) -> str:
    number = next(_runs)
    began = f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{os.getpid()}{f'-{number}' if number else ''}"
    return f"{who.job.value}-{began}/{who.number}" if who.job.value else f"{began}/{who.number}"


def _claimed(root: str, who: Who) -> str:
    """Return "<run>/<attempt>", by a name that no run before has taken below `root`."""
    remote = is_remote(root)
    if not who.job.value or (remote and not who.attempt.source):
        return _fresh(who)
    name = f"{who.job.value}/{who.number}"
    # a storage cannot be asked in no time: there a run before of this allocation is known by what it left on the node
    mine = Path(tempfile.gettempdir()) / f".firstfault-claims-{os.getuid()}"
    folder = mine / hashlib.sha256(join(root, name).encode()).hexdigest()[:32] if remote else Path(root) / name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return _fresh(who)
    except OSError:
        pass  # each node finds that for itself
    return name


def _agreed(store: Any, who: Who, claim: Callable[[], str]) -> str:
    """Return the name that the first node to ask claims."""
    key = f"firstfault/run/{who.run_id}"
    if store.add(f"{key}/asked", 1) == 1:
        store.set(key, bounded(claim, FOLDER_S, "naming the run") or _fresh(who))
    store.wait([key], dt.timedelta(seconds=FOLDER_TAKEN_S))
    return bytes(store.get(key)).decode()


def _made(root: str, name: str) -> tuple[Path, int]:
    """Make a run's folder below `root`, or where this node can write; return it and its mark.

    A folder that does not answer is not used again: the job must not wait for it.

    Raises:
        OSError: neither can be written.
    """
    why = ""
    for parent in dict.fromkeys((root, fallback_folder())):
        folder = Path(parent) / name
        made = bounded(partial(caught, partial(_make, folder), OSError), FOLDER_S, "making the run's folder")
        if made is not None and made[0] is not None:
            if why and given_folder():
                logger.warning("%s %s; this node's documents are in %s. %s", root, why, folder, _ADVICE)
            return folder, made[0]
        why = why or (f"did not answer within {FOLDER_S:g} s" if made is None else f"cannot be written ({made[1]})")
    raise OSError(f"{root} {why}")


def _make(folder: Path) -> int:
    mark = begin_run(folder.parent)
    folder.mkdir(exist_ok=True)
    return mark
