"""What the lab's faulty ranks use: where they are, the truth that they write down,
and ends of processes.
"""

import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

RENDEZVOUS_S = 15.0
"""The rendezvous drops a node whose clock is further off,
so such a clock is set after the rendezvous.
"""


def marks() -> Path:
    """Return the folder for the truth and for signals between processes."""
    return Path(os.environ["MARKS"])


def rank() -> int:
    return int(os.environ["RANK"])


def truth(**content: Any) -> None:
    """Write down the fault that is about to happen, atomically."""
    node = os.environ.get("_F_WN") or os.environ["HOSTNAME"]
    told = {
        "rank": rank(),
        "node": node,
        "monotonic_ns": time.monotonic_ns(),
        "time_ns": time.time_ns(),
        **content,
    }
    part = marks() / f"truth-{rank()}.part"
    part.write_text(json.dumps(told))
    part.rename(marks() / f"truth-{rank()}.json")


def hang_in_c() -> None:
    """Wait in one C call that holds the GIL; it continues after a signal,
    as a driver's call does.
    """
    reader, _ = os.pipe()
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)


def end_node() -> None:
    agent = os.getppid()
    others = descendants(agent) - {os.getpid()}
    for pid in (agent, *others, os.getpid()):
        os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    new = {pid}
    while new:
        below = set()
        for parent in new:
            for table in Path(f"/proc/{parent}/task").glob("*/children"):
                below |= {int(child) for child in table.read_text().split()}
        new = below - found
        found |= new
    return found


def clock_variables(seconds: float, library: str, file: Path) -> dict[str, str]:
    """Return the variables with which programs see a wall clock that is off.

    `library` is libfaketime. A fault may set the clock in `file` while the job runs.
    """
    file.write_text(f"{seconds:+g}\n" if abs(seconds) < RENDEZVOUS_S else "+0\n")
    return {
        "LD_PRELOAD": library,
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent / "clock"), os.environ.get("PYTHONPATH", "")]
        ),
    }
