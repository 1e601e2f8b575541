"""A job's options: those for recording and concluding, and torchrun's for output, signals and NUMA.

`Options` has the fields of `Elastic` and `PyTorch` that don't depend on Flyte. torchrun's options
are checked before anything starts, in the forms that torchrun takes.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from string import Template
from typing import TYPE_CHECKING, Any

from firstfault.errors import UsageError
from firstfault.strategies import DEFAULT_STRATEGY
from firstfault_torch.guard import try_call
from firstfault_torch.time_limits import SETTLE_SECONDS, STOP_GRACE_SECONDS, UPLOAD_DEADLINE_SECONDS

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs

    from firstfault.retry import RetryPolicy
    from firstfault_inprocess import InProcessRestart
    from firstfault_torch.watchdog import Watchdog

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""The signals that terminate a pod; torch's default."""
_MAX_STREAMS = 3
"""stdout (1) and stderr (2)."""
_STREAMS_TEXT = re.compile(r"[0-3]")
_STREAMS_BY_RANK_TEXT = re.compile(r"\d{1,5}:[0-3](?:,\d{1,5}:[0-3])*")
DEFAULT_HANG = "warn:60"
PORT_VARIABLE = "FIRSTFAULT_PORT"
"""Port of the first agent, for networks that allow only listed ports; by default, any free port."""
_MAX_PORT = 65535
_UNCATCHABLE_SIGNALS = {"SIGKILL", "SIGSTOP"}
_NUMA_AFFINITIES = ("node", "socket", "exclusive", "core-complex")


def parse_port(text: str) -> int:
    """Return a port, or 0 (any free port) for an empty text.

    Raises:
        firstfault.errors.UsageError: it isn't a number from 1 to 65535.
    """
    if text and not (text.isdecimal() and 1 <= int(text) <= _MAX_PORT):
        raise UsageError(f"must be a port from 1 to {_MAX_PORT}, not {text!r}")
    return int(text or 0)


@dataclass(frozen=True, slots=True)
class Hang:
    """What the agents do if no rank makes progress in its collectives. None turns an action off.

    Raises:
        firstfault.errors.UsageError: a field isn't a number of seconds above 0.
    """

    warn_seconds: float | None = 60.0
    """Seconds after which, and after twice and four times as long, they print to stderr which rank
    the remaining ranks wait for.
    """
    end_seconds: float | None = None
    """Seconds after which they end the attempt with that verdict, unless the straggler is busy."""
    busy_seconds: float | None = None
    """Seconds after which they end it even if the straggler is busy. None means never."""

    def __post_init__(self) -> None:
        """Check the fields."""
        for name, seconds in asdict(self).items():
            is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if seconds is not None and not (is_number and 0 < seconds < math.inf):
                raise UsageError(
                    f"Hang.{name} must be a number of seconds above 0, or None, not {seconds!r}"
                )
        if self.busy_seconds is not None and self.end_seconds is None:
            raise UsageError("Hang.busy_seconds needs end_seconds, which must be set, too")


def parse_hang(text: str) -> Hang | None:
    """Return the option that a text like "warn:60,end:300" means; None for "off".

    Raises:
        firstfault.errors.UsageError: it isn't such a text.
    """
    if text == "off":
        return None
    parts = dict(part.strip().partition(":")[::2] for part in text.split(","))
    seconds, error = try_call(
        lambda: {name: float(value) for name, value in parts.items()}, ValueError
    )
    if error is not None or seconds is None or not seconds.keys() <= {"warn", "end", "busy"}:
        raise UsageError(
            'must be "off", or seconds like "warn:60", "end:300" or "warn:60,end:300,busy:900",'
            f" not {text!r}"
        )
    return Hang(seconds.get("warn"), seconds.get("end"), seconds.get("busy"))


@dataclass(frozen=True, slots=True)
class Options:
    """Time limits, strategy and retry policy."""

    strategy: str = DEFAULT_STRATEGY
    """Name of the strategy that finds the root cause."""
    settle_seconds: float = SETTLE_SECONDS
    """Longest wait for other nodes' reports after a failure on this node, in seconds."""
    upload_deadline_seconds: float = UPLOAD_DEADLINE_SECONDS
    """Longest time a failing process waits for its error document to be durable."""
    stop_seconds: float = STOP_GRACE_SECONDS
    """Time for workers to end after SIGTERM before they are killed."""
    terminated_stop_seconds: float | None = None
    """The same after a signal, under the scheduler's time limit; by default, `stop_seconds`."""
    retry_policy: RetryPolicy | None = None
    """If None, firstfault's default applies."""
    in_process_restart: InProcessRestart | None = None
    """How workers restart in their processes after a fault, or None if they don't. Its package is
    optional: only the user's option imports it.
    """
    retries: int | None = None
    """How often the engine may run the job again, or None if unknown."""
    restarts_follow_policy: bool = True
    """Whether the retry policy also decides on each of torch's `max_restarts`. If not, torch
    restarts the workers after any failure.
    """
    stops_repeats: bool = False
    """As `RetryContext.stops_repeats`; for schedulers that retry without limit."""
    watchdog: Watchdog | None = None
    """Deadlines for the workers; None if off."""
    hang: Hang | None = Hang()
    """What the agents do if no rank makes progress; None if they don't check."""


# --- torchrun's -----------------------------------------------------------------------------------


def parse_streams(value: object, name: str, workers: int) -> int | dict[int, int]:
    """Return which streams an option means: for all workers, or by local rank.

    Args:
        value: 0 none, 1 stdout, 2 stderr, 3 both; or the same as a text, "3" or "0:1,1:2" (local
            rank 0's stdout and local rank 1's stderr); or a dictionary from local ranks; torch's
            `Std` is such a number.
        name: of the option, for the error.
        workers: of one node.

    Raises:
        firstfault.errors.UsageError: `value` is none of these, or names a local rank that no worker
        has.
    """
    found: int | dict[int, int] | None = None
    if isinstance(value, str) and _STREAMS_TEXT.fullmatch(value):
        found = int(value)
    elif isinstance(value, str) and _STREAMS_BY_RANK_TEXT.fullmatch(value):
        found = {
            int(rank): int(streams)
            for rank, streams in (item.split(":") for item in value.split(","))
        }
    elif _is_number(value) and 0 <= int(value) <= _MAX_STREAMS:  # type: ignore[call-overload]
        found = int(value)  # type: ignore[call-overload]
    elif isinstance(value, Mapping) and all(
        _is_number(item) for pair in value.items() for item in pair
    ):
        found = {int(rank): int(streams) for rank, streams in value.items()}
        found = found if all(0 <= streams <= _MAX_STREAMS for streams in found.values()) else None
    if found is None:
        raise UsageError(
            f"{name} must be 0 (none), 1 (stdout), 2 (stderr), 3 (both), or the same for each local"
            f' rank as "0:1,1:2", not {value!r}'
        )
    if isinstance(found, dict):
        _check_ranks(found, name, workers)
    return found


def parse_ranks(value: object, name: str, workers: int) -> frozenset[int] | None:
    """Return local ranks, or None for all. The arguments are those of `parse_streams`.

    `value` is "0,1" as torchrun takes it, a collection of numbers, or None or "" for all.

    Raises:
        firstfault.errors.UsageError: `value` is none of these, or names a local rank that no worker
        has.
    """
    if value is None or value == "":
        return None
    items: list[Any] = value.split(",") if isinstance(value, str) else []
    if isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping):
        items = list(value)
    if not items or not all(
        _is_number(item) or (isinstance(item, str) and item.strip().isdecimal()) for item in items
    ):
        raise UsageError(f'{name} must be local ranks like "0,1" or [0, 1], not {value!r}')
    ranks = frozenset(int(item) for item in items)
    _check_ranks(ranks, name, workers)
    return ranks


def parse_signals(value: object, name: str = "signals_to_handle") -> tuple[signal.Signals, ...]:
    """Return the signals of a list like "SIGTERM,SIGUSR1".

    Raises:
        firstfault.errors.UsageError: it isn't such a list, or has a signal that no process can
            handle.
    """
    names = [item.strip() for item in value.split(",")] if isinstance(value, str) else []
    if not names or not signal.Signals.__members__.keys() - _UNCATCHABLE_SIGNALS >= set(names):
        raise UsageError(
            f'{name} must be names of signals that can be handled, like "SIGTERM,SIGINT", not'
            f" {value!r}"
        )
    return tuple(dict.fromkeys(signal.Signals[item] for item in names))


def logs_specs(
    log_dir: str | None,
    redirects: object,
    tee: object,
    ranks: object,
    workers: int,
) -> LogsSpecs:
    """Return torch's logs_specs for options as `parse_streams` and `parse_ranks` take them."""
    from torch.distributed.elastic.multiprocessing import (  # noqa: PLC0415 - only where jobs run
        DefaultLogsSpecs,
        Std,
    )

    def streams(value: object, name: str) -> Any:
        found = parse_streams(value, name, workers)
        return (
            {rank: Std(item) for rank, item in found.items()}
            if isinstance(found, dict)
            else Std(found)
        )

    shown = parse_ranks(ranks, "local_ranks_filter", workers)
    return DefaultLogsSpecs(
        log_dir=log_dir,
        redirects=streams(redirects, "redirects"),
        tee=streams(tee, "tee"),
        local_ranks_filter=set(shown) if shown is not None else None,
    )


def check_numa(value: object, name: str) -> None:
    """Check an option for NUMA binding: None, a mode like "node", or torch's NumaOptions.

    Raises:
        firstfault.errors.UsageError: it is none of these.
    """
    if value is not None and value not in _NUMA_AFFINITIES and not hasattr(value, "affinity_mode"):
        raise UsageError(
            f"{name} must be None, one of {', '.join(_NUMA_AFFINITIES)}, or torch's NumaOptions, not"
            f" {value!r}"
        )


def numa_options(value: object) -> Any:
    """Return torch's NumaOptions for an option that `check_numa` accepts.

    Raises:
        firstfault.errors.UsageError: this torch can't bind workers to CPUs.
    """
    if not isinstance(value, str):
        return value
    try:
        from torch.numa.binding import (  # noqa: PLC0415 - torch 2.9 and later have it
            AffinityMode,
            NumaOptions,
        )
    except ImportError as error:
        import torch  # noqa: PLC0415 - only where jobs run

        raise UsageError(
            f"numa_options={value!r} needs torch 2.9 or later, this is {torch.__version__}"
        ) from error
    return NumaOptions(affinity_mode=AffinityMode(value))


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_ranks(ranks: Collection[int], name: str, workers: int) -> None:
    wrong = sorted(rank for rank in ranks if not 0 <= rank < workers)
    if wrong:
        raise UsageError(
            f"{name} names local rank {wrong[0]}, but a node has only {workers} workers (from"
            " rank 0)"
        )


def with_node(template: str, values: Mapping[str, object]) -> str:
    """Return a ``string.Template`` for log lines with ``${group_rank}``, ``${node}`` replaced.

    torch fills in ``${role_name}``, ``${rank}`` and ``${local_rank}`` later; it doesn't know a
    node's rank and name.
    """
    # torch's own substitution still follows: what is escaped stays so
    escaped = {name: str(value).replace("$", "$$") for name, value in values.items()}
    return Template(template.replace("$$", "$$$$")).safe_substitute(escaped)
