"""Lets the agents of large jobs compare a stall, and prints requests to the store, sizes and seconds.

Eight ranks a node; one rank does not wait. Each agent is a thread with two connections to a real store.
"""

from __future__ import annotations

import collections
import datetime as dt
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # started as a script

import torch.distributed as dist

from firstfault.model import Collective, CollectiveProgress, ExpiredDeadline, Place, StackDump, Writer
from firstfault_torch.capture import ErrorClass, failure_record
from firstfault_torch.hang.told import Facts, to_files, told_of
from firstfault_torch.hang.watch import _COUNT
from firstfault_torch.rounds.settlement import Reports, Settlement
from tests.torch_agent.test_hangs import READS, WAITS

EACH = 8
GROUPS = 6


class Counted:
    """A connection to a store that counts requests by node."""

    def __init__(self, store: Any, counts: collections.Counter[int], node: int) -> None:
        self._store, self._counts, self._node = store, counts, node

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self._counts[self._node] += 1
            return getattr(self._store, name)(*arguments)

        return call


def node_files(node: int, world: int) -> dict[str, bytes]:
    """Return what a node hands in."""
    workers = []
    for local in range(EACH):
        rank = node * EACH + local
        odd = rank == 17
        last = tuple(Collective(number, "nccl:all_reduce", "[[1024]] -> [[1024]]") for number in range(41, 42 - odd))
        groups = tuple(
            CollectiveProgress(f"group ({number})", "nccl:all_reduce", 41 - odd, 40, last, tuple(range(64)))
            for number in range(GROUPS)
        )
        place = Place(rank=rank, local_rank=local, node=f"node-{node}", group_rank=node, world_size=world)
        failure = failure_record(
            ErrorClass.WORKER_FAILURE,
            place,
            code="USER:Hang",
            category="hang",
            writer=Writer.AGENT,
            message="the job makes no progress",
            collectives=groups,
            stack_dumps=(StackDump(1, rank, (READS if odd else WAITS) * 4),),
            expired=ExpiredDeadline("", 61),
        )
        workers.append((failure, Facts(node, local, 58.0)))
    return to_files(workers)


def measured(nodes: int) -> str:
    """Return a line about a job of so many nodes."""
    limit = dt.timedelta(seconds=120)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    counts: collections.Counter[int] = collections.Counter()

    def connect(node: int) -> Any:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=limit)
        return Counted(store, counts, node)

    made = node_files(0, nodes * EACH)
    handed = {node: node_files(node, nodes * EACH) for node in range(nodes)}
    connections = {node: (connect(node), connect(node)) for node in range(nodes)}
    told: dict[int, tuple[str, ...]] = {}
    judging: list[float] = []

    def agent(node: int) -> None:
        settlement = Settlement(node, nodes, f"stall-{connections[node][0].add(_COUNT, 0)}")
        for step in settlement.settle(connections[node], handed[node], 60.0, threading.Event()):
            if isinstance(step, Reports):
                if settlement.claim():
                    judging.append(time.monotonic())
                    own = json.dumps(asdict(told_of(step.copies, 61.0))).encode()
                    judging.append(time.monotonic())
                    told[node] = json.loads(settlement.hand_over(own, durable=True).document)["lines"]
                    connections[node][0].add(_COUNT, 1)
                    return
            else:
                told[node] = json.loads(step.document)["lines"]

    began = time.monotonic()
    with ThreadPoolExecutor(nodes) as pool:
        list(pool.map(agent, range(nodes)))
    seconds = time.monotonic() - began
    alike = len(set(map(tuple, told.values())))
    usual, most = counts.most_common()[-1][1], counts.most_common(1)[0][1]
    size = sum(map(len, made.values())) * nodes / 1e6
    line = told[0][0] if told else ""
    shown = f"{nodes} nodes: {usual} to {most} requests a node, {size:.1f} MB, {seconds:.1f} s, of which "
    rest = f"{sum(judging[1::2]) - sum(judging[::2]):.1f} s to judge; {alike} answer: {line}"
    return shown + rest


def judged(nodes: int) -> str:
    """Return a line about what the agent that concludes does for so many nodes."""
    files = {name: data for node in range(nodes) for name, data in node_files(node, nodes * EACH).items()}
    began = time.monotonic()
    line = told_of(files, 61.0).lines[0]
    seconds, size = time.monotonic() - began, sum(map(len, files.values())) / 1e6
    return f"{nodes} nodes: {size:.1f} MB, {seconds:.1f} s to judge: {line}"


if __name__ == "__main__":
    for number in (16, 128):
        print(measured(number))
    print(judged(1024))
