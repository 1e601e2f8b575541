"""Lets the agents of large jobs compare a stall, and prints requests to the store,
sizes and seconds.

Eight ranks a node; one rank does not wait. Each agent is a thread with two connections to a real
store; 16 processes hold them: ``scale.py [NODES ...]``.
"""

import collections
import datetime as dt
import itertools
import json
import multiprocessing
import os
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # started as a script

import torch.distributed as dist

from firstfault.model import (
    Collective,
    CollectiveProgress,
    ExpiredDeadline,
    Place,
    StackDump,
    Writer,
)
from firstfault_torch.failures.failure_records import ErrorClass, failure_record
from firstfault_torch.hang.stall_report import WorkerObservation, build_stall_report, to_files
from firstfault_torch.protocol.stalls import STALL_COUNT_KEY
from firstfault_torch.rounds.election import CollectedReports, VerdictElection
from tests.torch_agent.test_hangs import READS, WAITS

# a connection looks for names, maybe long
os.environ |= {
    "RES_OPTIONS": "attempts:0",
    "TORCH_CPP_LOG_LEVEL": "FATAL",
}
EACH = 8
GROUPS = 6
PROCESSES = 16


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
    workers = []
    for local in range(EACH):
        rank = node * EACH + local
        odd = rank == 17
        last = tuple(
            Collective(number, "nccl:all_reduce", "[[1024]] -> [[1024]]")
            for number in range(41, 42 - odd)
        )
        groups = tuple(
            CollectiveProgress(
                f"group ({number})",
                "nccl:all_reduce",
                41 - odd,
                40,
                last,
                tuple(range(64)),
            )
            for number in range(GROUPS)
        )
        place = Place(
            rank=rank,
            local_rank=local,
            node=f"node-{node}",
            group_rank=node,
            world_size=world,
        )
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
        workers.append((failure, WorkerObservation(node, local, 58.0)))
    return to_files(workers)


def connected(port: int) -> Any:
    limit = dt.timedelta(seconds=300)
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)


def agent(node: int, nodes: int, connections: tuple[Any, Any]) -> tuple[int, list[str], float]:
    """Compare a stall with the other nodes; return the requests, what is told,
    and seconds in which it judged.
    """
    counts: collections.Counter[int] = collections.Counter()
    store, waiting = (Counted(each, counts, node) for each in connections)
    settlement = VerdictElection(node, nodes, f"stall-{store.add(STALL_COUNT_KEY, 0)}")
    lines = []
    judged = 0.0
    for step in settlement.settle(
        (store, waiting),
        node_files(node, nodes * EACH),
        300.0,
        threading.Event(),
    ):
        document = step.document if not isinstance(step, CollectedReports) else b""
        if isinstance(step, CollectedReports) and settlement.announce_publishing():
            began = time.monotonic()
            own = json.dumps(asdict(build_stall_report(step.copies, 61.0))).encode()
            judged = time.monotonic() - began
            document = settlement.publish(own, durable=True).document
            store.add(STALL_COUNT_KEY, 1)
        if document:
            lines = json.loads(document)["lines"]
            break
    return counts[node], lines, judged


def part(port: int, nodes: int, numbers: list[int]) -> list[tuple[int, list[str], float]]:
    """Run some agents, each as a thread, in this process."""
    connections = [(connected(port), connected(port)) for _ in numbers]
    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(agent, numbers, [nodes] * len(numbers), connections))


def measured(nodes: int) -> str:
    """Return a line about a job of so many nodes."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parts = [list(range(nodes))[first::PROCESSES] for first in range(PROCESSES)]
    began = time.monotonic()
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([build_stall_report.__module__, "torch"])
    with ProcessPoolExecutor(PROCESSES, forks) as pool:
        shares = list(
            pool.map(part, *zip(*((server.port, nodes, numbers) for numbers in parts), strict=True))
        )
    requests, lines, judged = zip(*itertools.chain(*shares), strict=True)
    size = sum(map(len, node_files(0, nodes * EACH).values())) * nodes / 1e6
    told = set(map(tuple, lines))
    usual = (
        f"{min(requests)} to {max(requests)} requests a node, {sum(requests) / nodes:.1f} on"
        " average"
    )
    seconds = (
        f"{time.monotonic() - began:.1f} s with the start of {PROCESSES} processes,"
        f" {max(judged):.1f} s to judge"
    )
    return (
        f"{nodes} nodes: {usual}; {size:.1f} MB, {seconds}; {len(told)} answer:"
        f" {next(iter(told))[:1]}"
    )


if __name__ == "__main__":
    for number in map(int, sys.argv[1:] or (16, 128, 1024)):
        print(measured(number), flush=True)
