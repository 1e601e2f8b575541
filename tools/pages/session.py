"""A reader's shell: one bash for all commands, which keeps its folder and its variables."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ran:
    """A command's output, exit code (None: too slow, or the shell ended) and seconds."""

    output: str
    code: int | None
    seconds: float


class Session:
    """One bash process, with its files in `folder`; `close` ends all that its commands started."""

    def __init__(self, folder: Path, work: Path, environment: dict[str, str]) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._count = 0
        self._codes, theirs = os.pipe()
        self._shell = subprocess.Popen(
            ["/bin/bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=work,
            env=environment | {"CODES": str(theirs)},
            pass_fds=[theirs],
            start_new_session=True,
            text=True,
        )
        os.close(theirs)
        assert self._shell.stdin is not None
        self._input = self._shell.stdin

    def close(self) -> None:
        """End the shell and its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._shell.wait()
        os.close(self._codes)

    def run(self, command: str, timeout_seconds: float) -> Ran:
        """Run a command as if it was pasted, without input; a timeout also ends the shell."""
        self._count += 1
        script = self._folder / f"{self._count}.sh"
        output = self._folder / f"{self._count}.out"
        script.write_text(f"{command}\n", encoding="utf-8")
        line = f"source {shlex.quote(str(script))} </dev/null >{shlex.quote(str(output))} 2>&1"
        began = time.monotonic()
        try:
            self._input.write(f'{line}; echo "$?" >&"$CODES"\n')
            self._input.flush()
        except BrokenPipeError:
            return Ran("", None, 0)
        code = self._read_code(began + timeout_seconds)
        if code is None:
            os.killpg(self._shell.pid, signal.SIGKILL)
        text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
        return Ran(text, code, time.monotonic() - began)

    def _read_code(self, deadline: float) -> int | None:
        """Return the exit code that the shell writes; None: it ended, or the time is over."""
        read = b""
        while not read.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._codes], [], [], min(left, 0.2))[0]:
                if left <= 0 or self._shell.poll() is not None:
                    return None
                continue
            piece = os.read(self._codes, 16)
            if not piece:
                return None
            read += piece
        return int(read)
