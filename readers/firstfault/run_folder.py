"""The folder of a run on this machine: firstfault's mark in it, and whether the run may still be active."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from firstfault.layout import ERROR_FILE, OUTPUTS, ROSTER, RosterKey
from firstfault.model import Phase

FOLDERS = (".firstfault/torchrun", ".firstfault/runs")
"""Where torchrun's jobs and ``firstfault run`` leave their runs by default."""
PRUNED = (*FOLDERS, ".firstfault/logs")
"""The same, and where ``firstfault run`` leaves its logs if its store is remote."""
MARK = "firstfault.run"
"""Has a line for each node that began the run: its host's name. The nodes hold locks on it while they run."""


def begin_run(folder: Path) -> int:
    """Make a run's folder and mark it; the mark is locked until the returned descriptor is closed.

    Raises:
        OSError: nothing can be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ignore = folder.parent.parent / ".gitignore"
    if ignore.parent.name == ".firstfault" and not ignore.exists():
        ignore.write_text("*\n", encoding="ascii")
    # Nodes on a shared file system each append a line to the same file.
    mark = os.open(folder / MARK, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(mark, f"{socket.gethostname()}\n".encode())
    except OSError:
        os.close(mark)
        raise
    # All nodes of the run hold a shared lock. The kernel releases it when the process ends, also after SIGKILL.
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return mark


def runs_in(folder: Path) -> list[Path]:
    """Return the runs directly in a folder, the last begun first."""
    runs = [mark.parent for mark in folder.glob(f"*/{MARK}") if not mark.parent.is_symlink()]
    return sorted(runs, key=began, reverse=True)


def began(run: Path) -> float:
    """Return when the last node began a run, seconds since the Unix epoch; 0 if the run has gone."""
    try:
        return (run / MARK).stat().st_mtime
    except OSError:
        return 0.0


def may_go_on(run: Path) -> bool:
    """Return whether the run may still be active, here or on another host with locks that aren't visible here."""
    with (run / MARK).open("rb") as mark:
        # An exclusive lock is refused while a node of the run holds its shared one. Another host's lock may be
        # invisible here, so the names of the hosts decide below.
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        hosts = {line.decode(errors="replace").strip() for line in mark}
    return hosts != {socket.gethostname()} and not all(map(_has_ended, list_attempts(run)))


def list_attempts(run: Path) -> list[Path]:
    """Return the folders of a run's attempts."""
    return [path for path in run.iterdir() if path.name.isdecimal() and path.is_dir()]


def _has_ended(attempt: Path) -> bool:
    """Whether an attempt has its error or its outputs, or all nodes of its last round have succeeded."""
    if (attempt / ERROR_FILE).exists() or (attempt / OUTPUTS).exists():
        return True
    keys = [key for path in (attempt / ROSTER).glob("r1-*") if (key := RosterKey.parse(path.name)) is not None]
    last = [key for key in keys if key.round == max(other.round for other in keys)]
    ended = {(key.group_rank, key.incarnation) for key in last if key.phase is Phase.SUCCEEDED}
    return bool(last) and {(key.group_rank, key.incarnation) for key in last} == ended
