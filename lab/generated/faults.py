"""The faults that a generated training may have, each with what a verdict has to say about it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).with_name("pieces") / "faults"
_USER = ("user_code", "data", "numerics", "config", "checkpoint")
_ENDS = {"raises": False, "in_loader": False}
_KINDS: dict[str, dict[str, Any]] = {
    "raises": {},
    "dies": _ENDS,
    "hangs": {**_ENDS, "hangs": True, "together": False},
}
"""What is true of most faults of a kind; one that dies ends the process, or its agent,
without an exception.
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """What a faulty rank does.

    `body` is the source of the function ``fault()``; LONG_S is longer than any training.
    """

    body: str
    said: tuple[str, ...]
    """The headline has one of these; empty: anything will do."""
    categories: tuple[str, ...]
    raises: bool = True
    """Whether it raises an exception, which wrappers may turn into something else."""
    has_code: bool = True
    """Whether the exception comes from the function itself."""
    scope: str = "rank"
    """"rank", or "node": the whole node is at fault."""
    hangs: bool = False
    in_loader: bool = True
    """Whether it may be met in a data set, a collate function or a hook:
    it does not need the group.
    """
    together: bool = True
    """Whether several ranks may have it at once."""
    retry: bool | None = False
    """Whether another attempt makes sense; None: both are right."""


def _read_fault(
    name: str,
    *,
    kind: str = "raises",
    said: tuple[str, ...] = (),
    categories: tuple[str, ...] = ("user",),
    **fields: Any,
) -> tuple[str, Fault]:
    """Return a fault by its name, the file of its source in `pieces/faults/`.

    Its category "user" stands for all categories of a fault in the program; `kind` gives the
    defaults of the other fields.
    """
    body = (_FOLDER / f"{name}.py").read_text(encoding="utf-8").strip("\n")
    expanded = [
        category for listed in categories for category in (_USER if listed == "user" else (listed,))
    ]
    return name, Fault(body, said, tuple(expanded), **{**_KINDS[kind], **fields})


FAULTS = dict(
    (
        _read_fault("value", said=("batch 4 has no labels",)),
        _read_fault("key", said=("learning_rate",)),
        _read_fault("assert", said=("the loss is not finite",)),
        _read_fault("own-class", said=("shard 17 is truncated",)),
        _read_fault("chained", said=("seventeen",)),
        _read_fault("missing-file", said=("shard-17",), categories=("user", "storage")),
        _read_fault("permission", said=("step-3.pt",), categories=("user", "storage")),
        _read_fault("disk", said=("No space left on device",), categories=("disk_full",)),
        _read_fault(
            "save-on-full-disk",
            said=("write", "iostream error", "unexpected pos"),
            categories=("disk_full", "storage", "checkpoint"),
        ),
        _read_fault("cuda", said=("illegal memory",), categories=("gpu_kernel",)),
        _read_fault("cuda-memory", said=("out of memory",), categories=("cuda_oom",)),
        _read_fault(
            "memory-limit",
            said=("MemoryError",),
            categories=("user", "host_oom"),
            in_loader=False,
            together=False,
        ),
        _read_fault(
            "recoverable", said=("shard 7",), categories=("recoverable", "user"), retry=None
        ),
        _read_fault(
            "loader-killed",
            said=("DataLoader worker", "shard 3 is empty"),
            categories=("user", "signal", "host_oom"),
            has_code=False,
        ),
        _read_fault("recursion", said=("recursion",)),
        _read_fault("library", said=("size",)),
        _read_fault("SIGKILL", kind="dies", said=("SIGKILL",), categories=("signal",)),
        _read_fault("SIGSEGV", kind="dies", said=("SIGSEGV",), categories=("signal",)),
        _read_fault("abort", kind="dies", said=("SIGABRT", "abort"), categories=("signal",)),
        _read_fault(
            "device-assert", kind="dies", said=("device-side assert",), categories=("gpu_kernel",)
        ),
        _read_fault(
            "off-the-bus",
            kind="dies",
            said=("fallen off the bus",),
            categories=("gpu_hardware",),
            retry=None,
        ),
        _read_fault(
            "hook-and-abort",
            kind="dies",
            said=("gradient of the head",),
            categories=("user", "signal"),
        ),
        _read_fault(
            "exit-with-word",
            said=("license server", "exit code 7", "SystemExit: 7"),
            categories=("exit", "external_service", "user_code", "network"),
            in_loader=False,
        ),
        _read_fault("exit-silent", kind="dies", said=("exit code 3",), categories=("exit",)),
        _read_fault(
            "printed-and-gone", kind="dies", said=("optimizer",), categories=("user", "exit")
        ),
        _read_fault(
            "thread-ends-it",
            kind="dies",
            said=("no heartbeat from the data server",),
            categories=("user", "exit", "external_service", "storage", "network"),
        ),
        _read_fault("hang-asleep", kind="hangs", said=("in fault",), categories=("hang",)),
        _read_fault("hang-lock", kind="hangs", said=("in fault",), categories=("hang",)),
        _read_fault(
            "leaves",
            kind="hangs",
            categories=("exit", "user_code", "unknown"),
            raises=True,
            retry=None,
        ),
        _read_fault(
            "agent-killed",
            kind="dies",
            categories=("node_lost",),
            scope="node",
            together=False,
            retry=None,
        ),
        _read_fault(
            "agent-terminated",
            kind="dies",
            categories=("preemption",),
            scope="node",
            together=False,
            retry=None,
        ),
        _read_fault("skips", kind="hangs", categories=("hang",)),
        _read_fault(
            "mismatch",
            kind="hangs",
            categories=("collective", "user_code", "signal", "hang", "unknown"),
            retry=None,
        ),
    )
)
