"""Judges incidents from public threads by the strategy `evidence`: ``incidents.py FILE.jsonl``.

Each line holds what was seen and the root cause that the thread found. What was seen is either
prose ("observations": who, message), which this module turns into failures as a reader would have
found them, or "documents" of single ranks (kind, text, signal, exit code) in a world of known size.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from firstfault.evidence import Role, classify
from firstfault.model import (
    ExceptionInfo,
    JobErrors,
    Scope,
    SentSignal,
    Subject,
    Verdict,
    WorkerError,
    Writer,
)
from firstfault.strategies.rules import evidence
from firstfault.testing import make_error, make_job, make_presence

_RANKS = re.compile(r"\branks? (?P<list>\d[\d, \-]*)")
_NODE = re.compile(r"\bnode (?P<node>\w+)|\b(?P<agent>agent \d+)")
_DEATH = re.compile(r"exit ?code:? ?(?P<code>-?\d+)\)? local_rank: (?P<rank>\d+)")
_TASK = re.compile(r"error: (?P<node>\S+): task (?P<rank>\d+): (?P<what>.+)")
_TYPED = re.compile(
    r"^(?:\[rank\d+\]: )?(?P<type>(?:[\w]+(?:\.|::))*[A-Z]\w*(?:Error|Exception|Exit))(?::"
    r" ?|\b)(?P<text>.*)",
    re.DOTALL,
)
_TOLD = re.compile(r"Received \w+ death signal")
_EXIT = re.compile(r"sys\.exit\((?P<code>\d+)\)")
_SIGNALS = {-9: "SIGKILL", -11: "SIGSEGV", -7: "SIGBUS", -6: "SIGABRT", -15: "SIGTERM"}


def failures_of(incident: dict[str, Any]) -> list[WorkerError]:
    found: list[WorkerError] = []
    for at, seen in enumerate(incident["observations"]):
        found += _failures(seen["who"], seen["message"], at)
    # several lines of one process are one failure: the first line with an error of its own counts
    by_process: dict[tuple[Any, ...], WorkerError] = {}
    for failure in found:
        key = (failure.subject, failure.rank, failure.node)
        known = by_process.get(key)
        if known is None or _weight(failure) < _weight(known):
            by_process[key] = failure
    return list(by_process.values())


def _weight(failure: WorkerError) -> int:
    if failure.exception is None:
        return 1
    role = classify(failure.exception.message, failure.exception.type).role
    return {Role.PRIMARY: 0, Role.SECONDARY: 2, Role.AMBIGUOUS: 3}[role]


def _failures(who: str, message: str, at: int) -> list[WorkerError]:
    node = _NODE.search(who)
    name = (node["node"] or node["agent"]) if node is not None else "node"
    death = _DEATH.search(message)
    task = _TASK.search(message)
    if death is not None:
        return [_death(int(death["rank"]), name, int(death["code"]), at)]
    if task is not None:
        return [_death(int(task["rank"]), "node", -9, at, log_tail=message)]
    if "agent" in who and _TOLD.search(message):
        told = make_error(
            None,
            node=name,
            at_ms=at,
            exception=None,
            category="preemption",
            subject=Subject.AGENT,
        )
        return [told]
    ranks = _ranks_of(who)
    ended = _EXIT.search(message)
    if ended is not None and ranks:
        return [
            make_error(rank, node=name, at_ms=at, exception="SystemExit", message=ended["code"])
            for rank in ranks
        ]
    typed = _TYPED.match(message)
    kind, text = (typed["type"], typed["text"]) if typed is not None else ("log", message)
    if "Traceback" in message and typed is None:
        kind = "Exception"
    found = classify(text, kind)
    if kind == "log" and (not found.signature or found.category == "stopped"):
        return []  # a line that says nothing about a failure
    if not ranks and node is None:
        return []  # a launcher's summary is not a failure
    if not ranks and node is not None and node["agent"]:
        return [
            make_error(
                None,
                node=name,
                at_ms=at,
                exception=kind,
                message=text,
                subject=Subject.AGENT,
            )
        ]
    return [
        make_error(rank, node=name, at_ms=at, exception=kind, message=text)
        for rank in ranks or [None]
    ]


def _death(rank: int, node: str, code: int, at: int, **more: Any) -> WorkerError:
    signal = _SIGNALS.get(code, "")
    sent = (SentSignal("SIGTERM", "said by the launcher"),) if signal == "SIGTERM" else ()
    return make_error(
        rank,
        node=node,
        at_ms=at,
        exception=None,
        writer=Writer.AGENT,
        exit_code=code,
        signal=signal,
        sent_signals=sent,
        **more,
    )


def _ranks_of(who: str) -> list[int]:
    match = _RANKS.search(who)
    if match is None:
        return []
    ranks: list[int] = []
    for part in re.split(r"[, ]+", match["list"].strip(" ,-")):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


def job_of_documents(incident: dict[str, Any]) -> JobErrors:
    """Return the job whose ranks left an incident's documents; every node reported."""
    nodes, per_node = incident["world"]["nodes"], incident["world"]["per_node"]
    size = nodes * per_node
    failures = []
    for document in incident["documents"]:
        rank = document["rank"]
        place = {
            "node": f"node-{rank // per_node}",
            "host": f"node-{rank // per_node}",
            "local_rank": rank % per_node,
            "group_rank": rank // per_node,
            "world_size": size,
            "group_world_size": nodes,
        }
        raised = document["kind"] == "exception"
        failures.append(
            make_error(
                rank,
                at_ms=document["at_ms"],
                exception=(
                    ExceptionInfo(document["exception_type"] or "Exception", document["text"])
                    if raised
                    else None
                ),
                message=document["text"],
                writer=Writer.WORKER if raised else Writer.AGENT,
                exit_code=None if raised else document["exit_code"],
                signal="" if raised else document["signal"],
                sent_signals=(
                    (SentSignal("SIGTERM", "a peer failed"),)
                    if document["kind"] == "stopped"
                    else ()
                ),
                log_tail="" if raised else document["text"],
                **place,
            )
        )
    entries = [
        make_presence(
            node=f"node-{node}",
            group_rank=node,
            nodes=nodes,
            world_size=size,
            ranks=tuple(range(node * per_node, (node + 1) * per_node)),
        )
        for node in range(nodes)
    ]
    return make_job(*failures, roster=tuple(entries))


def judge_documents(truth: dict[str, Any], verdict: Verdict) -> str:
    """Return "right", "wrong" or "undetermined";
    naming the node of a rank that is the root cause is right.
    """
    is_undetermined = verdict.scope is Scope.UNDETERMINED
    if truth.get("undetermined"):
        return "right" if is_undetermined else "wrong"
    if is_undetermined:
        return "undetermined"
    if truth.get("ranks"):
        return "right" if verdict.ranks and set(verdict.ranks) <= set(truth["ranks"]) else "wrong"
    return "right" if verdict.node else "wrong"


def judge(root: dict[str, Any], verdict: Verdict) -> str:
    """Return "right", "wrong" or "undetermined" against the root cause that the thread found."""
    named = root.get("rank")
    is_undetermined = verdict.scope is Scope.UNDETERMINED
    if named is None and "node" not in root:
        return "right" if is_undetermined else "wrong"
    if is_undetermined:
        return "undetermined"
    if root.get("external"):
        return (
            "right" if verdict.scope is not Scope.RANK and verdict.node == root["node"] else "wrong"
        )
    if named is None:
        return "right" if verdict.node == root["node"] else "wrong"
    wanted = set(named) if isinstance(named, list) else {named}
    return "right" if verdict.ranks and set(verdict.ranks) <= wanted else "wrong"


def judged(file: str) -> Iterator[tuple[dict[str, Any], str, Verdict | None]]:
    """Yield each incident of a file with the outcome and the verdict; None:
    it left nothing that can be read.
    """
    with open(file, encoding="utf-8") as lines:  # noqa: PTH123 - a path as it was given
        incidents = [json.loads(line) for line in lines]
    for incident in incidents:
        if "documents" in incident:
            verdict = evidence(job_of_documents(incident))
            yield incident, judge_documents(incident["truth"], verdict), verdict
        elif failures := failures_of(incident):
            verdict = evidence(make_job(*failures))
            yield incident, judge(incident["root_cause"], verdict), verdict
        else:
            yield (
                incident,
                "undetermined" if incident["root_cause"].get("rank") is not None else "right",
                None,
            )


def main(files: list[str]) -> int:
    counts: Counter[str] = Counter()
    for file in files:
        for incident, outcome, verdict in judged(file):
            counts[outcome] += 1
            said = (
                f"{verdict.confidence}: {verdict.headline}"
                if verdict is not None
                else "nothing that can be read"
            )
            print(f"{incident['id']:5} {outcome:13} {said[:130]}")
    print(dict(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
