"""The place of this process in the job, and what can be read about the process."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from firstfault.model import Place
from firstfault_torch.node_context import LOCAL_RANK_VARIABLE, NodeContext

TIME_LIMIT_VARIABLE = "FIRSTFAULT_TIME_LIMIT_FILE"
_MACHINE = "NODE_NAME"
"""Set by a pod's template from Kubernetes' downward API."""


def get_node_place(node_context: NodeContext) -> Place:
    """Return the place of this process without ranks: attempt, node, host, address and pid."""
    identity = node_context.identity
    return Place(
        attempt=identity.attempt,
        node=identity.node,
        host=socket.gethostname(),
        ip=node_context.ip,
        pid=os.getpid(),
        namespace=identity.namespace,
        engine=identity.engine,
        machine=os.environ.get(_MACHINE, ""),
    )


def get_worker_place(
    node_context: NodeContext, environment: Mapping[str, str] = os.environ
) -> Place:
    """Return the place of this worker process: ranks from torch elastic's variables,
    the rest from its agent.
    """
    return replace(
        get_node_place(node_context),
        round=node_context.round,
        incarnation=node_context.incarnation,
        restart_count=_parse_number(environment, "TORCHELASTIC_RESTART_COUNT") or 0,
        rank=_parse_number(environment, "RANK"),
        local_rank=_parse_number(
            environment, LOCAL_RANK_VARIABLE if LOCAL_RANK_VARIABLE in environment else "LOCAL_RANK"
        ),
        group_rank=_parse_number(environment, "GROUP_RANK"),
        world_size=_parse_number(environment, "WORLD_SIZE") or 0,
        group_world_size=_parse_number(environment, "GROUP_WORLD_SIZE")
        or node_context.group_world_size,
        role=environment.get("ROLE_NAME", ""),
    )


def read_boot_id() -> str:
    """Identify the boot that this process's CLOCK_MONOTONIC counts from;
    empty if Linux doesn't provide it.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def find_versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of Python, torch and flytekit if this process has loaded them."""
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "flytekit"):
        module = sys.modules.get(name)
        version = getattr(module, "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return tuple(sorted(found.items()))


def read_time_limit() -> str:
    """Return after how many seconds this pod's supervisor ended the attempt, or "" if it didn't.

    Before it sends SIGTERM, it writes them into the file that `TIME_LIMIT_VARIABLE` names.
    """
    try:
        return f"{float(Path(os.environ[TIME_LIMIT_VARIABLE]).read_text(encoding='ascii')):g}"
    except (KeyError, OSError, ValueError):
        return ""


def is_in_foreground() -> bool:
    """Whether this process is in the foreground of its terminal: there Ctrl-C sends SIGINT."""
    with contextlib.suppress(OSError), Path("/dev/tty").open("rb", buffering=0) as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


def look_up_address() -> str:
    """Look up the node's own address; empty if there is none. The name service may take long."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except (OSError, UnicodeError):  # Linux allows 64 characters, a name service 63
        return ""


def _parse_number(environment: Mapping[str, str], name: str) -> int | None:
    try:
        return int(environment[name])
    except (KeyError, ValueError):
        return None
