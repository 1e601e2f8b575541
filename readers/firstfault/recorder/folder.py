"""The folder that the agent, the workers and the recorder of one node share."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from firstfault.recorder.spool import Spool

DEATH_DOCUMENT = "document.pb"
"""In `NodeFolder.last_words`: the error document about the agent's death, without a time, or empty
if the agent ends normally.
"""
DEATH_ROSTER_ENTRY = "presence.pb"
"""In `NodeFolder.last_words`: the agent's last roster entry (phase failed),
without receipts and time.
"""
INHERITED_FILE_PREFIXES = ("stderr-", "stacks-", "fatal-")
"""Beginnings of the names of files that a worker holds open for writing; a fork inherits them."""
SESSIONS_FILE = "sessions.json"
"""In the node's folder: what `NodeFolder.note_sessions` keeps."""
_MAX_REMOVAL_ATTEMPTS = 5
"""Most attempts to remove the folder."""
_MAX_STACKS_BYTES = 64 * 1024


def get_stack_size(stacks: Path) -> int:
    """Return the size of a file of stacks; 0 if it doesn't exist."""
    try:
        return stacks.stat().st_size
    except OSError:
        return 0


def get_stack_tail(stacks: Path, start: int = 0) -> str:
    """Return the end of a file of stacks, without its first `start` bytes;
    empty if it can't be read.
    """
    try:
        return stacks.read_bytes()[start:][-_MAX_STACKS_BYTES:].decode(errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class NodeFolder:
    """The node's folder; no other class makes names in it."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether the folder is there. The recorder removes it when it ends,
        and late writers must not recreate it.

        If a cleaner of /tmp has removed the folder, and another user has created something with the
        same name, the result is False.
        """
        with contextlib.suppress(OSError):
            status = self.path.lstat()
            return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        return False

    # --- the recorder's files ---------------------------------------------------------------------

    @property
    def socket(self) -> Path:
        """The socket on which the recorder listens."""
        return self.path / "recorder.sock"

    def note_sessions(self, sessions: Iterable[int]) -> None:
        """Keep the sessions of the workers that lead one:
        the recorder ends what a dead agent leaves in them.

        Raises:
            OSError: the file could not be written.
        """
        # Written whole or not at all: a full disk must not cost the list of before.
        part = self.path / f"{SESSIONS_FILE}.part"
        part.write_text(json.dumps(sorted(sessions)), encoding="ascii")
        part.replace(self.path / SESSIONS_FILE)

    @property
    def sessions(self) -> frozenset[int]:
        """The sessions of workers that lead one."""
        try:
            return frozenset(json.loads((self.path / SESSIONS_FILE).read_text(encoding="ascii")))
        except (OSError, ValueError):
            return frozenset()

    def open_stderr(self) -> list[int]:
        """Return descriptors of the FIFOs that take stderr from the workers, to read from."""
        descriptors = []
        for path in self.path.glob("stderr-*.fifo"):
            with contextlib.suppress(OSError):
                # Without O_NONBLOCK, open() waits for a writer; the worker may be dead.
                descriptors.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        return descriptors

    def remove(self) -> None:
        """Remove the folder and its contents. Late writers find no folder,
        and don't recreate it.
        """
        # Rename first: late writers use the old path, so they can't add files to the folder that is
        # being removed.
        renamed_folder = self.path.with_name(f"{self.path.name}.gone")
        with contextlib.suppress(OSError):
            self.path.rename(renamed_folder)
        for path in (renamed_folder, self.path):
            # A writer that looked up the folder just before the rename may add a file during the
            # removal.
            for _ in range(_MAX_REMOVAL_ATTEMPTS):
                shutil.rmtree(path, ignore_errors=True)
                if not path.exists():
                    break

    # --- spools -----------------------------------------------------------------------------------

    @property
    def last_words(self) -> Spool:
        """`DEATH_DOCUMENT` and `DEATH_ROSTER_ENTRY`: written at the start of each round,
        uploaded if the agent dies.
        """
        return Spool(self.path / "last-words")

    @property
    def agent_spool(self) -> Spool:
        """Documents of the agent itself."""
        return self.spool("agent")

    @property
    def roster_and_verdict_spool(self) -> Spool:
        """Roster entries and the verdict. It isn't one of the `spools`:
        those hold only error documents.
        """
        return Spool(self.path / "outgoing")

    def spool(self, name: str) -> Spool:
        """Return a process's spool: ``0-1`` for round 0 and local rank 1, or ``agent``."""
        return Spool(self.path / "spool" / name)

    def spools(self) -> list[Spool]:
        """Return the spools of all processes, by name."""
        return [Spool(path) for path in sorted((self.path / "spool").glob("*"))]

    # --- files of the agent and its workers -------------------------------------------------------

    @property
    def agent_socket(self) -> Path:
        """The agent's socket."""
        return self.path / "agent.line"

    @property
    def forking_mark(self) -> Path:
        """The file that exists while the agent forks workers."""
        return self.path / "starting"

    def worker(self, round_: int, local_rank: int) -> WorkerFiles:
        """Return the files of a worker."""
        name = f"{round_}-{local_rank}"
        return WorkerFiles(
            spool=self.spool(name),
            socket=self.path / f"worker-{name}.line",
            stderr=self.path / f"stderr-{name}.fifo",
            stacks=self.path / f"stacks-{name}.txt",
            stacks_ready=self.path / f"stacks-{name}.ready",
            fatal_stacks=self.path / f"fatal-{name}.txt",
        )

    def deadlines_fifo(self, round_: int) -> Path:
        """Return the FIFO of the watchdog's deadlines."""
        return self.path / f"timers-{round_}.fifo"

    def rank_0_decks_file(self, round_: int) -> Path:
        """Return the file that keeps rank 0's decks."""
        return self.path / f"decks-{round_}.json"


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """The files of one worker of a round."""

    spool: Spool
    """Its documents."""
    socket: Path
    """The socket on which its agent asks it."""
    stderr: Path
    """The FIFO that takes its stderr to its agent."""
    stacks: Path
    """The stacks that it writes when it is asked."""
    stacks_ready: Path
    """The file that exists once it may be asked for its stacks."""
    fatal_stacks: Path
    """The stacks that a fatal signal leaves."""


# --- the client of the recorder -------------------------------------------------------------------

# Protocol: one connection for each request. The client sends a line of JSON, the recorder answers
# with two lines. The first one, `RECEIVED`, comes at once; without it the recorder is frozen, and
# the caller uploads the file itself. If only the second line is missing, the storage is slow, and
# the recorder continues the upload.
