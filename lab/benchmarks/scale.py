"""What a failure costs a job of many nodes: ``make scale``.

    python lab/benchmarks/scale.py [--nodes 16 128] [--workers 8] [--delay 20] [--limits 5500 3500]
                                     [--cases plain leader host dead upstream] [--svg FILE]

Each node is an agent without a training: the real connections between agents, the real store of a
round (a process of its own), a recorder, the documents of its workers, and the settlement on a
verdict. A few processes hold all agents, each with one recorder for all of its agents. They share
this machine's cores, so the seconds of many nodes are those of this machine; the requests are those
of any. The storage refuses what S3 would: requests above its limits for a prefix.

`upstream` reads the same files in another way: each node lists and gets everything.
"""

import argparse
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # started as a script

import torch.distributed as dist  # noqa: E402 - only now all is found

from firstfault.model import Place, SentSignal, StackDump, WorkerError, Writer  # noqa: E402
from firstfault.recorder.process import start_recorder  # noqa: E402
from firstfault.testing import make_error  # noqa: E402
from firstfault_torch import run as run_module  # noqa: E402
from firstfault_torch.agent.launch import RoundEnd  # noqa: E402
from firstfault_torch.agent.reporter import Reporter  # noqa: E402
from firstfault_torch.engine import PlainEngine  # noqa: E402
from firstfault_torch.node_context import Identity, NodeContext  # noqa: E402
from firstfault_torch.options import Options  # noqa: E402
from firstfault_torch.protocol.notices import FailureNotice  # noqa: E402
from firstfault_torch.rounds.peers import Peers  # noqa: E402
from lab.benchmarks import reading  # noqa: E402
from lab.benchmarks.cascade import Cascade, put_all  # noqa: E402
from lab.benchmarks.growth import svg  # noqa: E402
from lab.benchmarks.latency_proxy import S3_LIMITS, LatencyProxy, latency_proxy  # noqa: E402
from tests.s3_server import S3, serving  # noqa: E402
from tests.torch_agent.stores import Counting, group_on  # noqa: E402

CASES = {
    "plain": "a worker raises",
    "leader": "and the node that concludes is killed when it begins",
    "host": "and the first node, which hosts the store, is killed with the fault",
    "dead": "and a tenth of the nodes is dead",
    "upstream": "a worker raises, and each node lists and gets everything",
}
_PROCESSES = 4
_LIMITS_S = 10.0
"""Limits of uploads and of the settlement, seconds;
longer for so many nodes that this machine needs longer.
"""
_NODES_A_SECOND = 10
_STACK = "\n".join(f'  File "/job/train.py", line {40 + line} in step_{line}' for line in range(30))
_DEADLINE_S = 240.0
_TURNS = threading.Semaphore(32)
"""So many nodes of a process write at a time;
more would only wait for each other and for their recorder.
"""


_OPERATIONS = {
    "add",
    "append",
    "check",
    "compare_set",
    "get",
    "multi_get",
    "multi_set",
    "set",
    "wait",
}
"""What a node asks of the store; its other attributes do not count."""


# --- one node -------------------------------------------------------------------------------------


@dataclass
class Node:
    """An agent, and what its workers would write."""

    number: int
    nodes: int
    workers: int
    uri: str
    folder: str
    store_port: int
    case: str
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        identity = Identity(self.uri, "plain", 0, f"worker-{self.number}")
        started = time.time_ns() // 1_000_000
        node_context = NodeContext(
            "evidence",
            identity,
            self.limit_s,
            incarnation=started,
            node_folder=self.folder,
        )
        store = dist.TCPStore("127.0.0.1", self.store_port, is_master=False, wait_for_workers=False)
        counting = Counting(dist.PrefixStore("round", store), self.requests)
        self.reporter = Reporter(node_context, self.place)
        self.reporter.begin(0, self.nodes)
        self.reporter.started({}, {}, self.ranks)
        self.failed = threading.Event()
        self.shutdown_requested = threading.Event()
        group = group_on(counting, self.number, self.nodes)
        self.peers = Peers(
            group,
            self.node_context,
            patience_seconds=0.1,
            wake=self.failed.set,
            shutdown_requested=self.shutdown_requested,
        )
        self.peers.join(self.reporter.report.copies)

    @property
    def node_context(self) -> NodeContext:
        return self.reporter.node_context

    @property
    def limit_s(self) -> float:
        """The limit of an upload, and of the settlement."""
        return max(_LIMITS_S, self.nodes / _NODES_A_SECOND)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.number * self.workers, (self.number + 1) * self.workers))

    def place(self, local_rank: int | None = None) -> Place:
        return Place(
            node=f"worker-{self.number}",
            host=f"host-{self.number}",
            rank=None if local_rank is None else self.ranks[local_rank],
            local_rank=local_rank,
            group_rank=self.number,
            group_world_size=self.nodes,
            world_size=self.nodes * self.workers,
            incarnation=self.node_context.incarnation,
            pid=1000 + (local_rank or 0),
        )

    def fail(self) -> None:
        """Let the first worker raise, and tell the other agents."""
        self.reporter.write(self._failure(0, root=True))
        self.peers.notify(
            FailureNotice("ValueError", f"worker-{self.number}", self.number, self.ranks[0])
        )

    def run(self, fault: threading.Event) -> dict[str, Any]:
        """Wait for the fault, report, settle; return what happened and when."""
        is_first = self.number == self.nodes // 2
        if is_first:
            fault.wait()
            self.fail()
        self.failed.wait(_DEADLINE_S)
        with _TURNS:
            for local_rank in range(1 if is_first else 0, self.workers):
                self.reporter.write(self._failure(local_rank, root=False))
            self.reporter.finish(self.ranks, self.peers.broadcast.first_failure)
            self.peers.stop_listening()
            self.reporter.drain()
        reported = time.time()
        end = RoundEnd(
            self.node_context,
            self.reporter.report,
            group_rank=self.number,
            peers=self.peers,
        )
        engine = PlainEngine(self.uri.rpartition("/")[0], 0, f"worker-{self.number}")
        if self.case == "leader" and self.number == 0:
            engine = _Killed(self.uri.rpartition("/")[0], 0, "worker-0")
        exit_settings = run_module.ExitSettings(
            engine, Options(settle_seconds=self.limit_s), self.shutdown_requested
        )
        publication = run_module.reach_verdict(end, exit_settings)
        sealed = publication.sealed if publication is not None else None
        return {
            "node": self.number,
            "reported": reported,
            "left": time.time(),
            "verdict": sealed.document.hex() if sealed else "",
            "ranks": list(sealed.verdict.ranks) if sealed else [],
            "durable": bool(publication and publication.durable),
            "concluded": bool(publication and publication.own is not None),
            "store": sum(name in _OPERATIONS for name in self.requests),
        }

    def _failure(self, local_rank: int, *, root: bool) -> WorkerError:
        place = self.place(local_rank)
        fields: dict[str, Any] = {"message": "a batch without labels"}
        if not root:
            fields = {
                "message": "stopped by its agent",
                "exception": None,
                "writer": Writer.AGENT,
                "signal": "SIGTERM",
                "sent_signals": (SentSignal("SIGTERM", "another node had failed"),),
                "stack_dumps": (StackDump(place.pid, place.rank, _STACK),),
            }
        moment = {"timestamp_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
        return make_error(place.rank, node=place.node, place=place, **moment, **fields)


class _Killed(PlainEngine):
    """An engine whose process is killed when its node begins to conclude."""

    def enforces(self, job: Any) -> bool:
        del job
        os.kill(os.getpid(), signal.SIGKILL)
        return False


# --- a process with several nodes -----------------------------------------------------------------


def _agents(options: dict[str, Any]) -> None:
    """Run nodes in threads; commands come as lines on stdin, results go as lines to stdout."""
    logging.disable(logging.ERROR)
    recorder = start_recorder(options["uri"], deadline_seconds=60.0)
    shared = {name: options[name] for name in ("nodes", "workers", "uri", "store_port", "case")}
    nodes = [
        Node(number, folder=str(recorder.folder.path), **shared) for number in options["numbers"]
    ]
    fault = threading.Event()
    pool = ThreadPoolExecutor(len(nodes))
    results = [pool.submit(node.run, fault) for node in nodes]
    print(json.dumps({"ready": len(nodes)}), flush=True)
    sys.stdin.readline()
    fault.set()
    for result in as_completed(results):
        print(json.dumps(result.result()), flush=True)
    sys.stdin.readline()
    recorder.end()
    os._exit(0)


def _host() -> None:
    """Host the round's store, as the agent of the first node does."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(json.dumps({"port": store.port}), flush=True)
    sys.stdin.readline()


# --- the job --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What one failure of one job cost."""

    case: str
    nodes: int
    workers: int
    requests: dict[str, int]
    """To the storage by method, from the fault on."""
    store: int
    """Operations on the store, of the node with the most."""
    reported_s: float
    """From the fault until the last node had reported."""
    first_s: float
    """Until the first node left with the verdict."""
    last_s: float
    """Until the last one did."""
    verdicts: int
    """Different ones."""
    concluded: int
    """Nodes that concluded for themselves or for others."""
    right: bool
    refused: int = 0
    """Requests above the limits of the storage."""
    busiest: int = 0
    """The most requests in one second."""

    @property
    def total(self) -> int:
        return sum(self.requests.values())

    def line(self) -> str:
        total = self.total
        is_right = "yes" if self.right else "NO"
        reads = total - self.requests.get("PUT", 0)
        return (
            f"{self.nodes:6,} {self.nodes * self.workers:8,}  {self.case:8}{total:8,}"
            f" {total / self.nodes:8.1f} {reads:6,} {self.store:6,} {self.reported_s:9.2f}"
            f" {self.first_s:7.2f} {self.last_s:7.2f} {self.verdicts:9} {self.concluded:9} "
            f" {is_right:5} {self.busiest:7,} {self.refused:8,}"
        )


HEADER = (
    "                         requests             of     store  all have   first    last\n nodes "
    " workers  case       of all per node  reads  a node reported s  leaves  leaves  verdicts"
    " concluded  right  in 1 s  refused"
)


def rows(
    nodes: Sequence[int],
    workers: int,
    delay_ms: float,
    cases: Sequence[str],
    limits: tuple[int, int],
) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as s3:
        for number in nodes:
            for case in cases:
                with latency_proxy(s3.endpoint, delay_ms, limits) as proxy:
                    behind = replace(s3, endpoint=proxy.endpoint)
                    if case == "upstream":
                        yield _upstream(number, workers, behind, proxy)
                        continue
                    yield _one(
                        (number, workers, case),
                        s3.uri() + "/0",
                        {**os.environ, **behind.environment()},
                        proxy,
                    )


def _one(job: tuple[int, int, str], uri: str, environment: dict[str, str], proxy: Any) -> Row:
    nodes, workers, case = job
    command = [sys.executable, __file__]
    environment = {**environment, "TORCH_CPP_LOG_LEVEL": "FATAL", "RES_OPTIONS": "attempts:0"}
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
        "env": environment,
    }
    host = subprocess.Popen([*command, "--host"], **pipes)
    port = json.loads(host.stdout.readline())["port"]
    dead = (
        set(random.Random(0).sample(range(1, nodes), nodes // 10)) - {nodes // 2}
        if case == "dead"
        else set()
    )
    # node 0, which may be killed, has a process of its own
    living = [number for number in range(1, nodes) if number not in dead]
    parts = [[0], *[living[index::_PROCESSES] for index in range(_PROCESSES)]]
    processes = []
    for part in parts:
        given = {
            "nodes": nodes,
            "workers": workers,
            "uri": uri,
            "store_port": port,
            "case": case,
            "numbers": part,
        }
        processes.append(subprocess.Popen([*command, "--agents", json.dumps(given)], **pipes))
    for process in processes:
        json.loads(process.stdout.readline())
    time.sleep(1 + nodes / 50)  # the first entries are being uploaded
    proxy.requests()
    began = time.time()
    if case == "host":
        for process in (host, processes[0]):
            threading.Timer(0.2, process.kill).start()
    for process in processes:
        _tell(process)
    results = []
    for process, part in zip(processes, parts, strict=True):
        for _ in part:
            line = process.stdout.readline()
            if line:
                results.append(json.loads(line))
    requests = proxy.requests()
    for process in [*processes, host]:
        _tell(process)
        process.wait(10)
    return Row(
        case=case,
        nodes=nodes,
        workers=workers,
        requests=requests,
        store=max(result["store"] for result in results),
        reported_s=max(result["reported"] for result in results) - began,
        first_s=min(result["left"] for result in results) - began,
        last_s=max(result["left"] for result in results) - began,
        verdicts=len({result["verdict"] for result in results}),
        concluded=sum(result["concluded"] for result in results),
        refused=proxy.refused,
        busiest=proxy.busiest_second,
        right=all(
            result["durable"] and result["ranks"] == [nodes // 2 * workers] for result in results
        ),
    )


def _upstream(nodes: int, workers: int, s3: S3, proxy: LatencyProxy) -> Row:
    """Let one node list and get everything, 64 at a time, and count it for all of them."""
    uri = s3.uri()
    os.environ.update(s3.environment())
    put_all(uri, Cascade(nodes * workers))
    proxy.requests()
    began = time.time()
    reading.everything(s3, s3.endpoint, uri)
    took = time.time() - began
    # each worker wrote a document, each node an entry when it joined and when it failed, and its
    # error
    requests = {method: count * nodes for method, count in proxy.requests().items()}
    written = {"PUT": nodes * (workers + 2)}
    return Row(
        "upstream",
        nodes,
        workers,
        requests | written,
        0,
        0.0,
        took,
        took,
        1,
        nodes,
        right=True,
    )


def _tell(process: Any) -> None:
    try:
        process.stdin.write("go\n")
        process.stdin.flush()
    except OSError:
        pass  # it was killed


def drawing(rows: Sequence[Row]) -> str:
    """Return an SVG of the requests over the nodes, with a line for each case."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(CASES[row.case], []).append((row.nodes, row.total))
    return svg(
        f"Storage requests of a failed job, {rows[0].workers} workers a node", lines, "nodes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument(
        "--delay",
        type=float,
        default=20.0,
        help="milliseconds added to each request of the storage",
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--limits",
        type=int,
        nargs=2,
        default=S3_LIMITS,
        help="most reads and writes in one second; 0: no limit",
    )
    parser.add_argument(
        "--svg", type=Path, help="file for a drawing of the requests over the nodes"
    )
    parser.add_argument("--agents", help=argparse.SUPPRESS)
    parser.add_argument("--host", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.agents:
        _agents(json.loads(given.agents))
    elif given.host:
        _host()
    else:
        print(HEADER, flush=True)
        found = []
        for row in rows(given.nodes, given.workers, given.delay, given.cases, tuple(given.limits)):
            print(row.line(), flush=True)
            found.append(row)
        if given.svg:
            given.svg.write_text(drawing(found))


if __name__ == "__main__":
    main()
