"""``firstfault watch --live``: asks a running job's first agent how fast the nodes advance,
and prints its answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from firstfault.errors import ObjectNotFoundError
from firstfault.layout import LIVE, Layout, build_watch_mark_name
from firstfault.report.formatting import shorten_list
from firstfault.store import ReadableStore, open_store
from firstfault.utils.text import duration, printable

_POLL_SECONDS = 5.0
_FIRST_REQUEST_SECONDS = 60.0
"""The agent is asked again after this time, then after twice as long:
a store keeps each of these files.
"""
_NO_ANSWER_SECONDS = 30.0
"""Print `_NO_ANSWER` after this long without a new answer."""
_NS_PER_SECOND = 10**9
_MAX_ANSWER_BYTES = 1 << 22
_MAX_RATES, _MAX_NODES_BEHIND = 8, 3
"""Nodes that are listed one by one; of more nodes only the slowest and the fastest."""
_NO_ANSWER = (
    "no agent reports progress: the job isn't running, has --ff-hang off, or doesn't use the folder"
    " that its first node uses; of a job on one node it has to be a local folder"
)


async def live(uri: str, note: Callable[[str], None]) -> None:
    """Print what the agents report, until it is cancelled.

    Args:
        uri: the attempt's output prefix or its errors/ folder.
        note: prints a line.

    Raises:
        StoreError: the request could not be written.
    """
    layout = Layout.of(uri)
    name = f"{layout.roster.rpartition('roster')[0]}{LIVE.rpartition('/')[2]}"
    seconds, previous_view = _FIRST_REQUEST_SECONDS, ""
    heard = asked_until = time.time()
    async with open_store(layout.root) as store:
        last, _ = await _read_view(store, name)  # left by an earlier command
        while True:
            if time.time() + _POLL_SECONDS > asked_until:
                # The name of the request contains its expiry, so renew the request shortly before
                # that.
                asked_until, seconds = time.time() + seconds, 2 * seconds
                await store.put(
                    f"{layout.roster}/{build_watch_mark_name(int(asked_until * 1000))}", b""
                )
            moment, view = await _read_view(store, name)
            # only equality counts: the agents' clock may differ from the clock here
            if moment != last:
                heard = time.time()
                last = moment
                if view != previous_view:
                    note(view)
                previous_view = view
            elif time.time() - heard > _NO_ANSWER_SECONDS:
                note(_NO_ANSWER)
                heard = time.time()
            await asyncio.sleep(_POLL_SECONDS)


async def _read_view(store: ReadableStore, name: str) -> tuple[float, str]:
    """Return the time of the agents' last report, by their clock, and a line about it. The time is
    0 if there is no report or its file is damaged.
    """
    try:
        view = json.loads(await store.get(name, limit=_MAX_ANSWER_BYTES))
        return float(view["time"]), format_progress_line(view["nodes"])
    except (ObjectNotFoundError, ValueError, KeyError, TypeError):
        return 0.0, ""


def format_progress_line(nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return a line with the nodes' progress and rates; if no node advances,
    also with the ranks that are behind.

    While nodes advance, their counts aren't compared: each node counted at a different moment.
    """
    # the file is untrusted: names may have control characters, and a number may be a string
    rates = {printable(str(node["node"])): float(node["per_second"]) for node in nodes}
    by_rate = sorted(rates, key=lambda name: rates[name])
    if len(rates) > _MAX_RATES:
        speed = (
            f"{rates[by_rate[0]]:g} ({by_rate[0]}) to {rates[by_rate[-1]]:g} ({by_rate[-1]}) a"
            " second"
        )
    else:
        speed = "a second: " + ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    max_collectives = max(int(node["collectives"]) for node in nodes)
    if not max_collectives:
        return "no collective has begun"
    parts = [f"{max_collectives:,} collectives; {speed}"]
    longest = max(nodes, key=lambda node: float(node["waited_seconds"]))
    if float(longest["waited_seconds"]) > 0:
        waited = duration(int(float(longest["waited_seconds"]) * _NS_PER_SECOND))
        parts.append(
            f"longest wait: rank {int(longest['waits'])} ({printable(str(longest['node']))}),"
            f" {waited}"
        )
    stand = not any(rates.values())
    ranks_behind = sorted(
        (max_collectives - int(node["least"]), str(node["node"]), node["behind"])
        for node in nodes
        if stand
    )
    nodes_behind = [
        f"rank {rank} ({printable(name)}) by {fewer:,}"
        for fewer, name, rank in reversed(ranks_behind)
        if fewer
    ]
    return "; ".join(
        [
            *parts,
            *(
                [f"behind: {', '.join(shorten_list(nodes_behind, _MAX_NODES_BEHIND))}"]
                if nodes_behind
                else []
            ),
        ]
    )
