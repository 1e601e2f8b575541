"""Queries NCCL's RAS as a second witness of a stall:
adds a line to the report and never changes the verdict.

The protocol is that of ``ncclras`` in NCCL's source, ``src/ras/client_support.cc``.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstfault.utils.text import one_line
from firstfault_torch.guard import call_with_timeout, try_call
from firstfault_torch.time_limits import (
    RAS_PEER_TIMEOUT_SECONDS,
    RAS_RETRY_SECONDS,
    RAS_TIMEOUT_SECONDS,
)

if TYPE_CHECKING:
    from firstfault_torch.protocol.stall_messages import StallReport

GREETING = b"CLIENT PROTOCOL 2\n"
STATUS_REQUEST = b"TIMEOUT 1\nSET FORMAT json\nSTATUS\n"
"""NCCL before 2.28.7 rejects the second line and answers in plain text."""
MAX_ANSWER_BYTES = 1 << 24
MAX_LISTED_RANKS = 3
"""Ranks listed per finding."""
MAX_LINE_CHARACTERS = 400
HEALTHY_RESULTS = {0, 7}
"""ncclSuccess and ncclInProgress."""
MISSING_COMMA = re.compile(r'("nvml_dev": -?\d+)\s+("status")')
"""NCCL 2.28.7 and 2.28.9 write this between missing ranks."""


def add_ras_line(
    conclude: Callable[..., StallReport],
    pids: Collection[int],
    *args: Any,
    **more: Any,
) -> StallReport:
    """Return a stall's report, with a line from RAS if one of these processes answers in time."""
    report = conclude(*args, **more)
    ask = partial(_request_status, time.monotonic() + RAS_TIMEOUT_SECONDS, pids)
    if not report.lines:
        return report
    line = call_with_timeout(
        lambda: try_call(ask, Exception)[0], RAS_TIMEOUT_SECONDS, "asking NCCL"
    )
    return replace(report, lines=(*report.lines, line)) if line else report


def _request_status(deadline: float, pids: Collection[int]) -> str:
    host, _, port = os.environ.get("NCCL_RAS_ADDR", "localhost:28028").rpartition(":")
    while (left := deadline - time.monotonic()) > 0:
        # The processes of a node share the port. The one that accepts may be stopped; on timeout,
        # the next connection reaches a different process.
        with (
            suppress(TimeoutError),
            socket.create_connection(
                (host.strip("[]"), int(port)), RAS_PEER_TIMEOUT_SECONDS
            ) as server,
        ):
            server.sendall(GREETING)
            found = server.recv(1 << 20)
            # Jobs may share a node and the port. A pid in an answer proves nothing: each machine
            # and each container counts its own. Checked while the connection is open: a closed one
            # belongs to no process.
            if not _is_served_by(server, pids):
                time.sleep(RAS_RETRY_SECONDS)
                continue
            server.sendall(STATUS_REQUEST)
            while left > 0 and len(found) < MAX_ANSWER_BYTES and (part := server.recv(1 << 20)):
                found += part
                left = deadline - time.monotonic()
                server.settimeout(max(left, RAS_PEER_TIMEOUT_SECONDS))
            return _describe_answer(found.decode(errors="replace"))
    return ""


def _is_served_by(connection: socket.socket, pids: Collection[int]) -> bool:
    """Whether one of these processes serves a connection on this machine."""
    own_port = connection.getsockname()[1]
    its_port = connection.getpeername()[1]
    # proc_pid_net(5): addresses as hexadecimal "ADDRESS:PORT" in columns 2 and 3, the socket's
    # inode in column 10. A server that listens on IPv6 is in tcp6, also for a client on IPv4.
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in _read_text(f"/proc/net/{name}").splitlines()[1:]
    ]
    ends = f":{its_port:04X}", f":{own_port:04X}"
    sockets = {
        f"socket:[{row[9]}]"
        for row in rows
        if row[1].endswith(ends[0]) and row[2].endswith(ends[1])
    }
    return any(link in sockets for pid in pids for link in _list_links(pid))


def _list_links(pid: int) -> Iterator[str]:
    """Yield the names of the files that a process has open."""
    folder = f"/proc/{pid}/fd"
    numbers, _ = try_call(partial(os.listdir, folder), OSError)
    for number in numbers or ():
        with suppress(OSError):  # closed since
            yield os.readlink(f"{folder}/{number}")  # noqa: PTH115 - a text


def _read_text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text(encoding="ascii")
    return ""  # without IPv6 there is no tcp6


def _describe_answer(answer: str) -> str:
    body = answer.split("\n", 3)[3]
    if body.startswith("{"):
        found = list(_list_findings(json.loads(MISSING_COMMA.sub(r"\1,\2", body))["communicators"]))
    else:
        errors, warnings = body.split("\nErrors\n")[1].split("\nWarnings\n")
        lines = (line.strip(" =") for line in f"{errors}\n{warnings}".splitlines())
        found = [line for line in lines if line]
    return (
        one_line(f"NCCL RAS: {'; '.join(found)}", MAX_LINE_CHARACTERS)
        if found
        else "NCCL RAS sees no fault"
    )


def _list_findings(communicators: list[dict[str, Any]]) -> Iterator[str]:
    known: set[tuple[str, str]] = set()
    # The largest communicator first: a process that stands out there isn't repeated for the smaller
    # ones.
    for group in sorted(communicators, key=lambda each: -each["size"]):
        found: dict[str, list[str]] = {}
        for what, rank in _find_outliers(group):
            process = f"pid {rank['pid']} on {rank['host']}"
            if (what, process) not in known:  # in a larger communicator
                found.setdefault(what, []).append(f"rank {rank['rank']} ({process})")
                known.add((what, process))
        for what, ranks in found.items():
            yield (
                f"{what} {len(ranks)} of {group['size']} ranks:"
                f" {', '.join(ranks[:MAX_LISTED_RANKS])}"
            )


def _find_outliers(group: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is worth a line, and the rank of the communicator to which it applies."""
    for rank in group["missing_ranks"]:
        yield "no answer from" if rank["status"]["unresponsive"] else "no communicator on", rank
    for rank in group["ranks"]:
        for code in {rank["status"]["init_state"], rank["status"]["async_error"]} - HEALTHY_RESULTS:
            yield f"NCCL error {code} on", rank
    calls = [
        (call, count, rank)
        for rank in group["ranks"]
        for call, count in rank["collective_counts"].items()
    ]
    by_number = Counter((call, count) for call, count, _ in calls).most_common()
    # The most frequent count of a call is the usual one: reversed, so that it is written last and
    # stays.
    usual = {call: count for (call, count), _ in reversed(by_number)}
    for call, count, rank in calls:
        if count != usual[call]:
            yield f"{count:,} {call}, others {usual[call]:,}, on", rank
