"""Runs Slurm's commands. Only columns without free text are parsed."""

from __future__ import annotations

import os
import subprocess

from firstfault.errors import FirstFaultError

_TIMEOUT_SECONDS = 30.0
"""For one command: a busy controller answers late."""
SEPARATOR = "\x1f"
"""Between columns: names of features, jobs and reservations may have any printable character."""
_FORMAT_VARIABLES = ("SQUEUE_", "SINFO_", "SLURM_TIME_FORMAT")
"""Variables by which a user changes the columns and rows that these commands print."""


class SlurmError(FirstFaultError):
    """Slurm refused a command, or didn't answer."""


def run_slurm(*command: str) -> str:
    """Return what a command of Slurm prints.

    Raises:
        SlurmError: it isn't installed, failed, or didn't answer in time.
    """
    try:
        done = subprocess.run(  # noqa: S603 - no shell
            command,
            capture_output=True,
            env={
                name: value
                for name, value in os.environ.items()
                if not name.startswith(_FORMAT_VARIABLES)
            },
            # Slurm passes texts on as it got them, in whatever encoding the user had.
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
            timeout=_TIMEOUT_SECONDS,
        )
    except OSError as error:
        reason = f"{command[0]} isn't available here ({error.strerror})"
        raise SlurmError(f"{reason}; run this in a job of Slurm or on a login node") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{command[0]} didn't answer within {_TIMEOUT_SECONDS:g} s") from error
    if done.returncode:
        message = " ".join((done.stderr or done.stdout).split()).encode(errors="replace").decode()
        called = " ".join(command[:2]) if command[0] == "scontrol" else command[0]
        raise SlurmError(f"{called}: {message}")
    return done.stdout


def expand_nodes(names: str) -> list[str]:
    """Return the nodes of a list such as ``gpu-[1-3],login``. Doesn't ask the controller."""
    is_empty = names.strip() in {"", "(null)", "N/A", "n/a"}
    return [] if is_empty else run_slurm("scontrol", "show", "hostnames", names).split()
