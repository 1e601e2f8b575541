"""The words that all forms of a report share: states of ranks, whose fault, what to do next, numbers and units."""

from __future__ import annotations

import enum
import itertools
from typing import TYPE_CHECKING

from firstfault.model import CATEGORIES
from firstfault.wire.verdict_json import format_timestamp

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from firstfault.model import Decision
    from firstfault.report.engine_words import EngineWords


class State(str, enum.Enum):
    """What happened to a rank or a node; reports show the value."""

    ROOT = "root cause"
    SUSPECT = "suspect"
    VICTIM = "victim"
    STOPPED = "stopped by its agent"
    UNCLEAR = "failed, cause or victim"
    UNREPORTED = "sent no report"
    FINISHED = "finished"

    @property
    def mark(self) -> str:
        """One ASCII character: reports never tell states apart by colour alone."""
        return _MARKS[self]

    @property
    def slug(self) -> str:
        """The name in style sheets and filters."""
        return self.name.lower()


_MARKS = {
    State.ROOT: "X",
    State.SUSPECT: "!",
    State.VICTIM: "v",
    State.STOPPED: "s",
    State.UNCLEAR: "~",
    State.UNREPORTED: "?",
    State.FINISHED: "+",
}


class FaultOwner(str, enum.Enum):
    """Whose fault it is: the code's, which its author fixes, or the platform's."""

    CODE = "failed (your code)"
    INFRASTRUCTURE = "crashed (infrastructure)"
    EITHER = "your code or infrastructure"
    TRANSIENT = "recoverable, as your code raised it"
    UNKNOWN = "not known whose fault"


_CODE = {
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
    "platform",
    "infrastructure",
}
_EITHER = {"host_oom", "disk_full", "signal", "hang", "node_lost"}
"""Memory, disk, native code and waiting depend on the code and on what the platform gives it. So does a lost pod."""

CATEGORY_ADVICE: dict[str, str] = {
    "recoverable": "see what the code waited for when it asked for another attempt",
    "user_code": "open the code that raised it",
    "input": "check the task's inputs and its configuration",
    "config": "check the configuration: no worker can run with it",
    "data": "look at the sample that was being read",
    "numerics": "look at the loss and the gradients of the last steps",
    "checkpoint": "check that the checkpoint is complete and fits the model",
    "cuda_oom": "use a smaller batch, or find what else uses the GPU's memory",
    "gpu_kernel": "run again with CUDA_LAUNCH_BLOCKING=1 to see which kernel it was",
    "gpu_hardware": "look for Xid lines in the node's kernel log, and drain the node until its GPU is checked",
    "host_oom": "lower the batch size or the number of data loader workers, or raise the memory limit",
    "disk_full": "see what fills the disk: checkpoints, caches, /dev/shm",
    "storage": "check whether the storage was available at that time",
    "network": "check the network between the nodes, and the name service",
    "external_service": "check whether the service was available at that time",
    "auth": "renew or mount the credentials",
    "collective": "look at the peer that it names, which is more often the root cause",
    "rendezvous": "check that all {nodes} started in time and can reach the first one",
    "hang": "read the stack, which shows where the rank hangs",
    "signal": "read the last lines of {log}; a core dump and the kernel's log say more",
    "exit": "read the last lines of {log}: something called exit",
    "stopped": "find the failure for which its agent stopped it",
    "preemption": "see in {events} why it was terminated; continue from a checkpoint",
    "node_lost": "see in {events} why it is gone: eviction, out of memory, a reboot of the machine",
    "platform": "read the agent's log; the error is torch elastic's or firstfault's own",
    "infrastructure": "read {events} and {log}",
    "unknown": "read {log}",
}
"""What to do first about a root cause, by category; `{log}`, `{events}` and `{nodes}` are the engine's words."""

UNDETERMINED_ADVICE = "compare the stacks and the last log lines of all ranks"

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_UNIT = 1024
_US, _MS, _S = 1_000, 1_000_000, 1_000_000_000
_MINUTE, _HOUR, _DAY = 60 * _S, 3600 * _S, 86_400 * _S


def fault_owner_of(category: str) -> FaultOwner:
    """Return whose fault a root cause of this category is."""
    if category == "recoverable":
        return FaultOwner.TRANSIENT
    whose = {FaultOwner.CODE: _CODE, FaultOwner.INFRASTRUCTURE: _INFRASTRUCTURE, FaultOwner.EITHER: _EITHER}
    return next((owner for owner, categories in whose.items() if category in categories), FaultOwner.UNKNOWN)


def about_category(category: str) -> str:
    """Return a category with its meaning: "user_code: an exception of ..."."""
    meaning = CATEGORIES.get(category)
    return f"{category}: {meaning}" if meaning else category


def advice_on(category: str, engine: EngineWords) -> str:
    """Return what to do first about a root cause of a category; an unknown one gets the advice for "unknown"."""
    advice = CATEGORY_ADVICE.get(category, CATEGORY_ADVICE["unknown"])
    return advice.format(log=engine.log, events=engine.events, nodes=engine.nodes)


def ranks_text(ranks: tuple[int, ...] | list[int], limit: int = 0) -> str:
    """Return ranks as ranges: "0-2, 5, 8-63".

    Args:
        ranks: ascending.
        limit: maximum length in characters, 0 for none; ranks that do not fit are counted.
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
    """Return short names without the parts that all share: "worker-2" for "job-worker-2.cluster.local"."""
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


def few(lines: Sequence[str], limit: int, more: str = "and {} more") -> list[str]:
    """Return the first `limit` lines, and a count of the others; if it is one other, the line itself."""
    left = len(lines) - limit
    return [*lines[:limit], more.format(left)] if left > 1 else list(lines)


def is_retried(decision: Decision) -> bool:
    """Whether the decision makes another attempt: it wants one, and the retry budget is not used up."""
    return decision.retry and not decision.is_spent


def counted(count: int, noun: str) -> str:
    """Return "1 document", "3 documents"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(nanoseconds: int) -> str:
    """Return "32 ms", "1.2 s", "4 min", "3 h", "5 d"."""
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


def shown_time(nanoseconds: int) -> str:
    """Return a moment since the Unix epoch as people write it, to the millisecond: "2026-11-14 22:13:20.000 UTC"."""
    text = format_timestamp(nanoseconds) or ""
    return f"{text[:10]} {text[11:23]} UTC"


def size(number: float) -> str:
    """Return bytes in binary units: "15.9 GiB"."""
    power = 0
    while number >= _UNIT and power < len(_UNITS) - 1:
        number /= _UNIT
        power += 1
    return f"{number:.{min(power, 1)}f} {_UNITS[power]}"
