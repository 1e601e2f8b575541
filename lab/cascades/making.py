"""Makes large cascades with a known root cause from those that the lab has recorded."""

from __future__ import annotations

import functools
import json
import random
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from firstfault.exceptions.fingerprint import compute_fingerprint
from firstfault.layout import error_key_for
from firstfault.model import CausedBy, DocumentRef, NodePresence, Phase, Place, Receipt, WorkerError
from firstfault.reading.assemble import Snapshot, Unreadable
from firstfault.wire.documents import decode, decode_presence
from lab.cascades.replay import RECORDED

RANKS_PER_NODE = 8
_S = 1_000_000_000
_NO_NAME = "another worker of this node had failed"

LLAMA = {
    # interruptions of the pre-training of Llama 3 405B (table 5 of its report), and the faults of
    # the lab like them
    "faulty GPU": (148, ("cuda", "hang-c", "SIGABRT")),
    "GPU HBM3 memory": (72, ("cuda",)),
    "software bug": (
        54,
        (
            "raise",
            "chained",
            "backward",
            "future",
            "thread",
            "finally",
            "mismatch",
            "skip",
            "exit-1",
        ),
    ),
    "network switch or cable": (35, ("node-killed",)),
    "host maintenance": (32, ("agent-told",)),
    "GPU SRAM memory": (19, ("cuda",)),
    "GPU system processor": (17, ("SIGABRT", "hang-c")),
    "NIC": (7, ("node-killed",)),
    "NCCL watchdog timeouts": (7, ("hang", "hang-c")),
    "silent data corruption": (6, ("backward",)),
    "GPU thermal interface": (6, ("cuda",)),
    "other": (16, ("SIGKILL", "SIGSEGV", "sys.exit-3", "terminate", "agent-killed")),
}
BYTEROBUST = {
    # incidents in ByteRobust's table, percent; restarts by hand are no faults
    "CUDA error": (36.1, ("cuda",)),
    "CPU overload": (11.0, ("hang", "frozen")),
    "CPU out of memory": (10.1, ("SIGKILL", "memory")),
    "job hang": (9.9, ("hang", "hang-c", "skip")),
    "insufficient disk": (5.0, ("disk",)),
    "InfiniBand": (2.9, ("node-killed",)),
    "file system mount": (2.1, ("loader",)),
    "HDFS": (2.0, ("loader", "recoverable")),
    "container": (1.4, ("agent-killed", "node-killed")),
}
SPEAKING = ("raise", "cuda", "loader", "backward", "disk", "SIGKILL", "SIGSEGV")
"""Faults that two ranks can have at the same time, independently."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The sizes and shares by which a cascade is made."""

    workers: int = 1024
    clock_error_s: float = 5.0
    """Largest error of a node's clock in either direction; errors are uniform."""
    without_pointer: float = 0.20
    """Share of the victims that name no peer."""
    healthy_pointer: float = 0.02
    """Share of the victims that name a healthy peer."""
    late: float = 0.05
    """Share of the documents that arrive after the verdict."""
    unreadable: float = 0.01
    """Share of the documents that cannot be read."""
    root_missing: float = 0.10
    """Share of the cascades in which the root's own documents are missing."""
    two_roots: float = 0.03
    """Share of the cascades with two independent root causes."""


@dataclass(frozen=True, slots=True)
class NodeContext:
    """One cascade of the lab, with its documents by their writers."""

    fault: str
    scope: str
    culprit: int | None
    """Its rank."""
    node: str
    """The culprit's node."""
    began_ns: int
    root: tuple[WorkerError, ...]
    siblings: tuple[tuple[WorkerError, ...], ...]
    """Documents of each other rank of the culprit's node."""
    peers: tuple[tuple[tuple[WorkerError, ...], ...], ...]
    """For each other node, the documents of each of its ranks."""
    agents: tuple[tuple[WorkerError, ...], ...]
    """For each other node, its agent's documents about itself."""
    phases: tuple[Phase, ...]
    """Phases of the culprit's node in the roster."""


@dataclass(frozen=True, slots=True)
class Cascade:
    """A simulated cascade."""

    fault: str
    roots: tuple[Root, ...]
    """The root causes, by time."""
    snapshot: Snapshot
    workers: int


@dataclass(frozen=True, slots=True)
class Root:
    """A root cause, and whether any of its own documents can be read."""

    scope: str
    rank: int | None
    node: str
    left: bool


@functools.cache
def recordings() -> dict[str, list[NodeContext]]:
    """Return the lab's plain recordings of each fault."""
    found: dict[str, list[NodeContext]] = defaultdict(list)
    for file in sorted(RECORDED.glob("*.zip")):
        with zipfile.ZipFile(file) as archive:
            truth = json.loads(archive.read("truth.json"))
            # names of recordings with clocks, restarts and the like have more parts
            if file.stem.startswith(f"{truth['fault']}-rank") and len(truth["nodes"]) == 1:
                found[truth["fault"]].append(_node_context(archive, truth))
    return found


def _node_context(archive: zipfile.ZipFile, truth: dict[str, Any]) -> NodeContext:
    documents, entries = [], []
    for name in archive.namelist():
        if "/errors/" in name:
            short = name.rpartition("/")[2]
            found = decode(
                archive.read(name), DocumentRef(short, last_modified_ns=truth["times"][name])
            )
            assert isinstance(found, WorkerError)
            documents.append(found)
        elif "/roster/" in name:
            entries.append(decode_presence(archive.read(name), name.rpartition("/")[2]))
    culprit = truth["ranks"][0] if truth["scope"] == "rank" else None
    node = truth["nodes"][0]
    by_node: dict[str, dict[int | None, list[WorkerError]]] = defaultdict(lambda: defaultdict(list))
    for document in documents:
        by_node[document.node][document.rank].append(document)
    # a killed agent is reported by its own workers, and by other agents
    root = [item for item in documents if item.node == node and item.rank == culprit]
    others = [
        entry.place.node
        for entry in entries
        if entry.phase is Phase.JOINED and entry.place.node != node
    ]
    return NodeContext(
        truth["fault"],
        truth["scope"],
        culprit,
        node,
        min(document.timestamp_ns or 1 << 62 for document in documents),
        tuple(root),
        tuple(tuple(item) for rank, item in by_node[node].items() if rank not in {culprit, None}),
        tuple(
            tuple(tuple(item) for rank, item in by_node[name].items() if rank is not None)
            for name in others
        ),
        tuple(tuple(by_node[name][None]) for name in others),
        tuple(entry.phase for entry in entries if entry.place.node == node),
    )


@dataclass(slots=True)
class _Node:
    name: str
    ip: str
    group_rank: int
    ranks: list[int]
    clock_ns: int
    entries: list[NodePresence] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)

    def place(self, template: Place, rank: int | None, workers: int) -> Place:
        return replace(
            template,
            round=0,
            rank=rank,
            local_rank=None if rank is None else self.ranks.index(rank),
            group_rank=self.group_rank,
            world_size=workers,
            group_world_size=workers // RANKS_PER_NODE,
            node=self.name,
            host=self.name,
            ip=self.ip,
            pid=1000 + (rank or 0),
            incarnation=1_790_000_000_000,
        )


@dataclass(frozen=True, slots=True)
class _Cause:
    """A fault in a simulated cascade."""

    node_context: NodeContext
    at: int
    """True time of the fault, nanoseconds since the Unix epoch."""
    node: _Node
    rank: int | None
    """The culprit's rank; None: the whole node."""


@dataclass(frozen=True, slots=True)
class _Named:
    """The rank or node that wrote a document, or that a document names."""

    node: _Node
    rank: int | None


class Maker:
    """Makes cascades; the same seed makes the same ones."""

    def __init__(self, rules: Rules, seed: int) -> None:
        self._rules = rules
        self._random = random.Random(seed)
        self._recordings = recordings()
        self._faults, self._weights = _mix(self._recordings)

    def make(self) -> Cascade:
        chance, rules = self._random, self._rules
        nodes = self._nodes()
        fault = chance.choices(self._faults, self._weights)[0]
        culprits = [(fault, chance.choice(nodes))]
        if chance.random() < rules.two_roots:
            culprits = [(chance.choice(SPEAKING), node) for node in chance.sample(nodes, 2)]
        began = 1_790_000_000 * _S + chance.randrange(86_400 * _S)
        began_at = [began, began + int(chance.random() * 0.5 * _S)]
        documents: list[WorkerError] = []
        roots = []
        taken = {node.name for _, node in culprits}
        causes = []
        for (kind, node), at in zip(culprits, began_at, strict=False):
            node_context = chance.choice(self._recordings[kind])
            cause = _Cause(
                node_context,
                at,
                node,
                chance.choice(node.ranks) if node_context.culprit is not None else None,
            )
            written = self._culprits_node(cause)
            if chance.random() < rules.root_missing:
                self._lose(cause, written)
                written = [item for item in written if item.rank != cause.rank]
            documents += written
            causes.append(cause)
            roots.append(Root(node_context.scope, cause.rank, node.name, left=True))
        for node in nodes:
            if node.name not in taken:
                # of two roots, the one whose failure reaches this node first
                heard = min(causes, key=lambda cause: cause.at + chance.random() * 0.1 * _S)
                documents += self._victims_node(heard, node, nodes)
        kept, unreadable = self._lost(documents)
        entries = [entry for node in nodes for entry in node.entries]
        chance.shuffle(kept)
        chance.shuffle(entries)
        seen = {(item.node, item.rank) for item in kept}
        # a lost node has no documents of its own; its workers' documents stand for it
        roots = [
            replace(root, left=(root.node, root.rank) in seen or root.scope == "node")
            for root in roots
        ]
        name = "two roots" if len(roots) > 1 else fault
        return Cascade(
            name,
            tuple(roots),
            Snapshot(tuple(kept), (), tuple(entries), tuple(unreadable)),
            rules.workers,
        )

    def _nodes(self) -> list[_Node]:
        count, rules = self._rules.workers // RANKS_PER_NODE, self._rules
        ranks = list(range(rules.workers))
        self._random.shuffle(ranks)
        return [
            _Node(
                f"job-worker-{index}",
                f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}",
                index,
                sorted(ranks[index * RANKS_PER_NODE : (index + 1) * RANKS_PER_NODE]),
                int(self._random.uniform(-rules.clock_error_s, rules.clock_error_s) * _S),
            )
            for index in range(count)
        ]

    def _culprits_node(self, cause: _Cause) -> list[WorkerError]:
        chance, node, siblings = self._random, cause.node, cause.node_context.siblings
        written = [self._written(item, cause, node, cause.rank) for item in cause.node_context.root]
        for other in node.ranks if siblings else []:
            if other != cause.rank:
                delay = int(chance.random() * 0.3 * _S)
                named = _Named(node, cause.rank)
                written += [
                    self._written(item, cause, node, other, delay=delay, named=named)
                    for item in chance.choice(siblings)
                ]
        self._enter(node, cause.node_context.phases)
        return written

    def _victims_node(self, cause: _Cause, node: _Node, nodes: list[_Node]) -> list[WorkerError]:
        chance, rules, node_context = self._random, self._rules, cause.node_context
        index = chance.randrange(len(node_context.peers))
        delay = int(chance.random() * 0.5 * _S)
        culprit = _Named(cause.node, cause.rank)
        written = [
            self._written(item, cause, node, None, delay=delay, named=culprit)
            for item in node_context.agents[index]
        ]
        for other in node.ranks if node_context.peers[index] else []:
            named: _Named | None = culprit
            drawn = chance.random()
            if drawn < rules.without_pointer:
                named = None
            elif drawn < rules.without_pointer + rules.healthy_pointer:
                healthy = chance.choice(nodes)
                named = _Named(healthy, chance.choice(healthy.ranks))
            late = delay + int(chance.random() * 0.2 * _S)
            written += [
                self._written(item, cause, node, other, delay=late, named=named)
                for item in chance.choice(node_context.peers[index])
            ]
        self._enter(node, (Phase.JOINED, Phase.FAILED))
        return written

    def _written(
        self,
        item: WorkerError,
        cause: _Cause,
        node: _Node,
        rank: int | None,
        *,
        delay: int = 0,
        named: _Named | None = None,
    ) -> WorkerError:
        """Return a recorded document with another rank, node, address and time."""
        began = cause.node_context.began_ns
        moment = cause.at + delay + (item.timestamp_ns or began) - began

        def text(value: str) -> str:
            return _renamed(value, item, cause, _Named(node, rank), named) if value else value

        exception = item.exception
        if exception is not None:
            exception = replace(exception, message=text(exception.message))
        stopped_for = CausedBy(named.rank, named.node.name, "") if named is not None else None
        written = replace(
            item,
            message=text(item.message),
            exception=exception,
            log_tail=text(item.log_tail),
            timestamp_ns=moment + node.clock_ns,
            worker=node.name,
            place=node.place(item.place, rank, self._rules.workers),
            monotonic_ns=(
                moment - cause.at + (node.group_rank + 1) * 1000 * _S if item.monotonic_ns else None
            ),
            boot_id=f"boot-{node.name}" if item.boot_id else "",
            caused_by=stopped_for if item.caused_by is not None else None,
            sent_signals=tuple(
                replace(sent, reason=text(sent.reason)) for sent in item.sent_signals
            ),
            stack_dumps=tuple(
                replace(dump, rank=rank) for dump in item.stack_dumps if dump.rank == item.rank
            ),
        )
        # as firstfault writes it today, not as it was recorded
        written = replace(written, fingerprint=compute_fingerprint(written))
        durable = moment + (item.upload_delay_ns or 0) + int(self._random.uniform(0.02, 0.3) * _S)
        name = error_key_for(written)
        node.receipts.append(
            Receipt(name, durable=True, fault_to_durable_ns=durable - moment, rank=rank)
        )
        ref = DocumentRef(name, last_modified_ns=durable // _S * _S, size=4000)
        return replace(written, documents=(ref,))

    def _lose(self, cause: _Cause, written: Iterable[WorkerError]) -> None:
        """Remove a root's documents; half of them keep a receipt that says that
        they were not uploaded.
        """
        names = {ref.name for item in written if item.rank == cause.rank for ref in item.documents}
        with_word = self._random.random() < 0.5
        kept = [
            (
                replace(receipt, durable=False, error="the storage did not answer")
                if receipt.name in names
                else receipt
            )
            for receipt in cause.node.receipts
            if receipt.name not in names or with_word
        ]
        self._replace_receipts(cause.node, kept)

    @staticmethod
    def _replace_receipts(node: _Node, receipts: list[Receipt]) -> None:
        node.receipts[:] = receipts
        node.entries[:] = [
            replace(entry, receipts=tuple(receipts)) if entry.phase is not Phase.JOINED else entry
            for entry in node.entries
        ]

    def _enter(self, node: _Node, phases: Iterable[Phase]) -> None:
        place = replace(node.place(Place(), None, self._rules.workers), local_rank=None)
        node.entries += [
            NodePresence(
                phase,
                place,
                tuple(node.ranks),
                tuple(node.receipts) if phase is not Phase.JOINED else (),
            )
            for phase in phases
        ]

    def _lost(self, documents: list[WorkerError]) -> tuple[list[WorkerError], list[Unreadable]]:
        kept, unreadable = [], []
        for document in documents:
            drawn = self._random.random()
            if drawn < self._rules.late:
                continue
            if drawn < self._rules.late + self._rules.unreadable:
                unreadable.append(Unreadable(document.documents[0].name, "not a protobuf message"))
            else:
                kept.append(document)
        return kept, unreadable


def _mix(known: dict[str, list[NodeContext]]) -> tuple[list[str], list[float]]:
    """Return the faults and their weights; the two published tables count equally."""
    weights: Counter[str] = Counter()
    for table in (LLAMA, BYTEROBUST):
        total = sum(share for share, _ in table.values())
        for share, faults in table.values():
            for fault in faults:
                weights[fault] += share / total / len(faults)  # type: ignore[assignment]
    missing = sorted(set(weights) - set(known))
    if missing:
        raise LookupError(f"not recorded: {', '.join(missing)}; run make cascades first")
    return list(weights), list(weights.values())


def _renamed(
    value: str,
    item: WorkerError,
    cause: _Cause,
    writer: _Named,
    named: _Named | None,
) -> str:
    """Return a text with the ranks, nodes and addresses of another job;
    without `named` it names no rank.
    """
    node_context = cause.node_context
    if "[127.0.0.1]:" in value:
        before, _, after = value.partition("[127.0.0.1]:")
        port = after[: len(after) - len(after.lstrip("0123456789"))]
        value = (
            before + (f"[{named.node.ip}]:{port}" if named is not None else "") + after[len(port) :]
        )
    if node_context.node in value or item.node in value:
        if named is None:
            # the agents' words for a worker of their own node
            value = (
                value.partition(": rank ")[0] if "was stopped by its agent" in value else _NO_NAME
            )
        else:
            value = value.replace(
                f"rank {node_context.culprit} on {node_context.node}",
                f"rank {named.rank} on {named.node.name}",
            )
            value = value.replace(node_context.node, named.node.name).replace(
                item.node, writer.node.name
            )
    return value.replace(f"rank {item.rank} (", f"rank {writer.rank} (")


def cascades(rules: Rules, seeds: Iterable[int]) -> Iterator[Cascade]:
    """Return one cascade for each seed."""
    maker = Maker(rules, 0)
    for seed in seeds:
        maker._random.seed(seed)
        yield maker.make()
