"""The words that every report uses: states of ranks, whose fault, what a signal means, what to look at next."""

from __future__ import annotations

import enum
import itertools
from typing import TYPE_CHECKING

from firstfault.model import CATEGORIES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from firstfault.model import Resources

__all__ = [
    "CATEGORY_ADVICE",
    "SIGNALS",
    "UNDETERMINED_ADVICE",
    "FaultOwner",
    "State",
    "about_category",
    "counted",
    "duration",
    "explain_signal",
    "fault_owner_of",
    "ranks_text",
    "short_names",
    "size",
]


class State(str, enum.Enum):
    """What became of a rank, or of a node; the value is what is shown."""

    ROOT = "root cause"
    SUSPECT = "suspect"
    VICTIM = "victim"
    STOPPED = "stopped by its agent"
    UNCLEAR = "failed, cause or victim"
    SILENT = "sent no report"
    FINISHED = "finished"

    @property
    def mark(self) -> str:
        """One ASCII character, so that nothing is said by colour alone."""
        return _MARKS[self]

    @property
    def slug(self) -> str:
        """A name for style sheets and filters."""
        return self.name.lower()


_MARKS = {
    State.ROOT: "X",
    State.SUSPECT: "!",
    State.VICTIM: "v",
    State.STOPPED: "s",
    State.UNCLEAR: "~",
    State.SILENT: "?",
    State.FINISHED: "+",
}


class FaultOwner(str, enum.Enum):
    """Whose fault it is, in words: what a person fixes, and what a platform does."""

    CODE = "failed (your code)"
    INFRASTRUCTURE = "crashed (infrastructure)"
    EITHER = "your code or infrastructure"
    UNKNOWN = "not known whose fault"


_CODE = {
    "recoverable",
    "user_code",
    "input",
    "config",
    "data",
    "numerics",
    "checkpoint",
    "cuda_oom",
    "gpu_kernel",
    "auth",
    "exit",
}
_INFRASTRUCTURE = {
    "gpu_hardware",
    "storage",
    "network",
    "external_service",
    "rendezvous",
    "preemption",
    "node_lost",
    "platform",
    "infrastructure",
}
_EITHER = {"host_oom", "disk_full", "signal", "hang"}
"""Memory, disk, native code and waiting are both: what the code takes, and what it is given."""

CATEGORY_ADVICE: dict[str, str] = {
    "recoverable": "see what the code waited for; it asked for another attempt itself",
    "user_code": "open the code where it was raised",
    "input": "check the task's inputs and its configuration",
    "config": "check the configuration: no worker can run with it",
    "data": "look at the sample that was being read",
    "numerics": "look at the loss and the gradients of the last steps",
    "checkpoint": "check that the checkpoint is whole and fits the model",
    "cuda_oom": "use a smaller batch, or look at what else holds the GPU's memory",
    "gpu_kernel": "run again with CUDA_LAUNCH_BLOCKING=1 to see which kernel it was",
    "gpu_hardware": "look for Xid lines in the node's kernel log, and keep it out until its GPU was checked",
    "host_oom": "raise the memory limit, or load less: look at the data loader's workers",
    "disk_full": "see what fills the disk: checkpoints, caches, /dev/shm",
    "storage": "check whether the storage answered others at that time",
    "network": "check the network between the nodes, and the name service",
    "external_service": "check whether the service answered at that time",
    "auth": "renew or mount the credentials",
    "collective": "look at the peer it names: this is seldom the root cause",
    "rendezvous": "see whether all pods were scheduled in time and reach the first one",
    "hang": "read where it stood, in its stack",
    "signal": "read the last lines of its log; core dumps and the kernel's log say more",
    "exit": "read the last lines of its log: something called exit",
    "stopped": "look for the failure that made its agent stop it",
    "preemption": "see in its pod's events why it was told to go; go on from a checkpoint",
    "node_lost": "see in its pod's events what became of it: eviction, reboot, out of memory",
    "platform": "read the agent's log; the error is torch elastic's or firstfault's own",
    "infrastructure": "read the pod's events and its log",
    "unknown": "read the pod's log",
}
"""What to do first about a root cause, for each category; one line for the imperative."""

UNDETERMINED_ADVICE = "compare where all stood, and what they logged last"

SIGNALS: dict[str, str] = {
    "SIGABRT": "it aborted itself: a failed check in native code, or a watchdog's",
    "SIGBUS": "it touched memory that is not there; often /dev/shm is full",
    "SIGFPE": "native code divided by zero, or the like",
    "SIGHUP": "its terminal or session was closed",
    "SIGILL": "native code was built for another processor",
    "SIGINT": "it was interrupted, as by Ctrl-C",
    "SIGKILL": "killed from outside",
    "SIGPIPE": "it wrote to somebody who had gone",
    "SIGQUIT": "it was told to quit",
    "SIGSEGV": "native code touched memory that is not its own",
    "SIGSYS": "it made a system call that its sandbox forbids",
    "SIGTERM": "it was told to end",
    "SIGTRAP": "native code hit a trap: a failed check, or a debugger's",
    "SIGUSR1": "somebody sent it a signal that schedulers use before a time limit",
    "SIGUSR2": "somebody sent it a signal of its own meaning",
    "SIGXCPU": "its CPU time was used up",
    "SIGXFSZ": "it wrote a file larger than it may",
}
"""What a signal that ended a process says, half a sentence."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_UNIT = 1024
_US, _MS, _S = 1_000, 1_000_000, 1_000_000_000
_MINUTE, _HOUR, _DAY = 60 * _S, 3600 * _S, 86_400 * _S


def fault_owner_of(category: str) -> FaultOwner:
    """Return whose fault a root cause of a category is."""
    whose = {FaultOwner.CODE: _CODE, FaultOwner.INFRASTRUCTURE: _INFRASTRUCTURE, FaultOwner.EITHER: _EITHER}
    return next((owner for owner, categories in whose.items() if category in categories), FaultOwner.UNKNOWN)


def about_category(category: str) -> str:
    """Return a category with its meaning: "user_code: an exception of ..."; alone if it has none."""
    meaning = CATEGORIES.get(category)
    return f"{category}: {meaning}" if meaning else category


def explain_signal(signal: str, resources: Resources) -> str:
    """Return what a signal says, with what the node's memory says about a SIGKILL; empty for one nobody knows."""
    said = SIGNALS.get(signal, "")
    if signal == "SIGKILL" and resources.oom_kill:
        return f"{said}; the kernel's OOM killer did it: oom_kill rose by {resources.oom_kill}"
    if signal == "SIGKILL" and resources.oom_kill == 0:
        return f"{said}; no OOM kill was counted"
    return said


def ranks_text(ranks: tuple[int, ...] | list[int], limit: int = 0) -> str:
    """Return ranks as people write them: "0-2, 5, 8-63".

    Args:
        ranks: ascending.
        limit: longest text, in characters; what does not fit is counted. 0: no limit.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    text = ", ".join(parts)
    if not limit or len(text) <= limit:
        return text
    shown = 0
    while shown < len(parts) and len(", ".join(parts[: shown + 1])) <= limit - len(" and 99999 more"):
        shown += 1
    left = len(ranks) - sum(high - low + 1 for low, high in runs[:shown])
    return f"{', '.join(parts[:shown])} and {left} more" if shown else f"{len(ranks)} ranks"


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return names without what all begin and end with, in whole parts: "worker-2" of "job-worker-2.cluster.local"."""
    known = [name for name in dict.fromkeys(names) if name]
    domains = [name.split(".")[1:] for name in known]
    if len(known) > 1 and all(domain == domains[0] for domain in domains):  # a domain that all hosts share
        parts = [name.split(".", 1)[0].split("-") for name in known]
    else:
        parts = [name.split("-") for name in known]
    shared = 0
    if len(known) > 1:
        alike = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
        shared = sum(1 for _ in alike)
        # the part that tells them apart is often a number, which says nothing alone
        shared = max(min(shared, *(len(part) - 2 for part in parts)), 0)
    return {name: "-".join(part[shared:]) for name, part in zip(known, parts, strict=True)}


def counted(count: int, noun: str) -> str:
    """Return how many there are: "1 document", "3 documents"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(nanoseconds: int) -> str:
    """Return a time for a person: "32 ms", "1.2 s", "4 min", "3 h", "5 d"."""
    size_ns = abs(nanoseconds)
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if size_ns >= 2 * unit:
            return f"{size_ns / unit:.0f} {name}"
    if size_ns >= 10 * _S:
        return f"{size_ns / _S:.0f} s"
    if size_ns >= _S:
        return f"{size_ns / _S:.1f} s"
    if size_ns >= 10 * _MS:
        return f"{size_ns / _MS:.0f} ms"
    if size_ns >= _MS:
        return f"{size_ns / _MS:.1f} ms"
    return f"{size_ns / _US:.0f} us"


def size(number: float) -> str:
    """Return bytes for a person: "15.9 GiB"."""
    power = 0
    while number >= _UNIT and power < len(_UNITS) - 1:
        number /= _UNIT
        power += 1
    return f"{number:.{min(power, 1)}f} {_UNITS[power]}"
