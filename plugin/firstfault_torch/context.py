"""Environment variables: what the pod is told, and what an agent tells its workers."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from firstfault.model import Place

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "STRATEGY_VARIABLE",
    "Recording",
    "attempt_number",
    "boot_id",
    "multi_error_files",
    "namespace",
    "new_incarnation",
    "node_address",
    "node_name",
    "node_place",
    "versions",
    "worker_place",
]

STRATEGY_VARIABLE = "FLYTE_INTERNAL_ERROR_PROPAGATION"
"""Turns recording on and names the strategy; set but empty turns it off."""

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PREFIX = "FIRSTFAULT_OUTPUT_PREFIX"
_DEADLINE = "FIRSTFAULT_UPLOAD_DEADLINE"
_ROUND = "FIRSTFAULT_ROUND"
_INCARNATION = "FIRSTFAULT_INCARNATION"
_NODES = "FIRSTFAULT_GROUP_WORLD_SIZE"
_IP = "FIRSTFAULT_NODE_IP"
_FOLDER = "FIRSTFAULT_NODE_FOLDER"
_DECKS = "FIRSTFAULT_DECKS"


@dataclass(frozen=True, slots=True)
class Recording:
    """Where and how this process records."""

    strategy: str
    output_prefix: str
    upload_deadline_seconds: float
    round: int = 0
    incarnation: int = 0
    group_world_size: int = 0
    ip: str = ""
    """The node's address, looked up once: a name service may take seconds, which a failing worker does not have."""
    node_folder: str = ""
    """Where the node's recorder listens and its spool lies; empty: there is no recorder."""
    decks: bool = False
    """Whether the report becomes a deck, beside those of rank 0."""
    raw_prefix: str = ""
    """This attempt's raw output prefix; empty: not known. Workers need not know it, nor the next one."""
    previous_raw_prefix: str = ""
    """The raw output prefix of the attempt before; empty: there was none, or it is not known."""

    def environment(self) -> dict[str, str]:
        """Return the variables by which a worker process learns all this."""
        return {
            STRATEGY_VARIABLE: self.strategy,
            _PREFIX: self.output_prefix,
            _DEADLINE: str(self.upload_deadline_seconds),
            _ROUND: str(self.round),
            _INCARNATION: str(self.incarnation),
            _NODES: str(self.group_world_size),
            _IP: self.ip,
            _FOLDER: self.node_folder,
            _DECKS: "1" if self.decks else "",
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Recording | None:
        """Return what the agent said, None if recording is off."""
        strategy, prefix = environment.get(STRATEGY_VARIABLE), environment.get(_PREFIX)
        if not strategy or not prefix:
            return None
        return cls(
            strategy=strategy,
            output_prefix=prefix,
            upload_deadline_seconds=float(environment.get(_DEADLINE, "5")),
            round=_number(environment, _ROUND) or 0,
            incarnation=_number(environment, _INCARNATION) or 0,
            group_world_size=_number(environment, _NODES) or 0,
            ip=environment.get(_IP, ""),
            node_folder=environment.get(_FOLDER, ""),
            decks=bool(environment.get(_DECKS)),
        )


def multi_error_files(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the backend asked every pod for a file of its own (flytekit's own rule)."""
    return bool(_first(environment, "FLYTE_INTERNAL_DIST_ERROR_STRATEGY", "_F_DES"))


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """The pod's name as the backend gives it, else the host's."""
    return _first(environment, "FLYTE_INTERNAL_WORKER_NAME", "_F_WN") or environment.get("HOSTNAME") or _host()


def namespace(environment: Mapping[str, str] = os.environ) -> str:
    """The Kubernetes namespace of this pod: what Kubernetes mounts, else Flyte's own template; empty if neither says.

    Flyte's ``namespace_mapping`` is ``{{ project }}-{{ domain }}`` unless the installation has another.
    """
    with contextlib.suppress(OSError, ValueError):
        return _NAMESPACE_FILE.read_text(encoding="ascii").strip()
    parts = [environment.get(f"FLYTE_INTERNAL_EXECUTION_{name}", "") for name in ("PROJECT", "DOMAIN")]
    return "-".join(parts) if all(parts) else ""


def node_place(recording: Recording, environment: Mapping[str, str] = os.environ) -> Place:
    """Return what any process of the node knows of its place: attempt, node, host, ip and its own pid."""
    return Place(
        attempt=attempt_number(environment),
        node=node_name(environment),
        host=_host(),
        ip=recording.ip,
        pid=os.getpid(),
        namespace=namespace(environment),
    )


def worker_place(recording: Recording, environment: Mapping[str, str] = os.environ) -> Place:
    """Return the place of this worker process, from torch elastic's variables and the agent's."""
    return replace(
        node_place(recording, environment),
        round=recording.round,
        incarnation=recording.incarnation,
        restart_count=_number(environment, "TORCHELASTIC_RESTART_COUNT") or 0,
        rank=_number(environment, "RANK"),
        local_rank=_number(environment, "LOCAL_RANK"),
        group_rank=_number(environment, "GROUP_RANK"),
        world_size=_number(environment, "WORLD_SIZE") or 0,
        group_world_size=_number(environment, "GROUP_WORLD_SIZE") or recording.group_world_size,
        role=environment.get("ROLE_NAME", ""),
    )


def boot_id() -> str:
    """Identify the boot whose CLOCK_MONOTONIC this process reads; empty where Linux does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def versions() -> tuple[tuple[str, str], ...]:
    """Versions of what is loaded in this process; nothing is imported to find out."""
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "flytekit"):
        module = sys.modules.get(name)
        version = getattr(module, "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return tuple(sorted(found.items()))


def attempt_number(environment: Mapping[str, str] = os.environ) -> int:
    """Return the attempt's number as the backend counts, from 0."""
    return _number(environment, "FLYTE_ATTEMPT_NUMBER") or 0


def node_address() -> str:
    """Look the node's own address up, for as long as the name service takes; empty if there is none."""
    try:
        return socket.gethostbyname(_host())
    except OSError:
        return ""


def new_incarnation() -> int:
    """Milliseconds since the Unix epoch: this life of the node's container."""
    return time.time_ns() // 1_000_000


def _first(environment: Mapping[str, str], *names: str) -> str:
    return next((environment[name] for name in names if name in environment), "")


def _number(environment: Mapping[str, str], name: str) -> int | None:
    try:
        return int(environment[name])
    except (KeyError, ValueError):
        return None


def _host() -> str:
    return socket.gethostname()
