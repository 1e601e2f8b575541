"""Writes the attempts of a task as its pods do, step by step: ``python writing.py FOLDER PLAN``; its own process.

With a third argument it waits after the first document until its stdin is closed.
"""

from __future__ import annotations

import asyncio
import sys
import time

from firstfault.conclude import conclude
from firstfault.layout import ERRORS, ROSTER, roster_key_for
from firstfault.model import Kind, Origin, Phase, Seal
from firstfault.retry import never
from firstfault.store import open_store
from firstfault.testing import make_error, make_job, make_presence
from firstfault.wire.documents import encode, encode_presence, encode_seal
from firstfault.wire.json_schemas import to_json

PAUSE_S = 0.7
AFTER_FIRST_DOCUMENT = 2


def entry(attempt: int, number: int, phase: Phase) -> tuple[str, bytes]:
    """Return one of two nodes' roster entry."""
    made = make_presence(phase, node=f"w-{number}", group_rank=number, nodes=2, ranks=(number,), attempt=attempt)
    return f"{ROSTER}/{roster_key_for(made)}", encode_presence(made)


def steps(attempt: int, plan: str) -> list[list[tuple[str, bytes]]]:
    """Return what an attempt writes, one list a step."""
    if plan == "vanishes":
        return []
    joined = [entry(attempt, number, Phase.JOINED) for number in range(2)]
    if plan == "succeeds":
        return [joined, [*(entry(attempt, number, Phase.SUCCEEDED) for number in range(2)), ("outputs.pb", b"")]]
    kind = Kind.NON_RECOVERABLE if plan == "fails" else Kind.RECOVERABLE
    place = {"group_world_size": 2, "world_size": 2, "attempt": attempt}
    late = make_error(0, node="w-0", group_rank=0, at_ms=30_000, exception="KeyError", message="tokens", **place)
    root = make_error(1, node="w-1", group_rank=1, at_ms=5, message="bad batch", kind=kind, **place)
    documents = [[(f"{ERRORS}/{error.documents[0].name}", encode(error))] for error in (late, root)]
    failed = [entry(attempt, number, Phase.FAILED) for number in range(2)]
    if plan == "is stuck":
        return [joined, *documents]
    if plan != "sealed":
        return [joined, *documents, failed]
    conclusion = conclude(make_job(late, root), policy=never())
    assert conclusion is not None
    verdict, decision = conclusion.verdict, conclusion.decision
    said = to_json(verdict, decision)
    fault = (verdict.code, verdict.message, decision.kind, Origin.USER, verdict.timestamp_ns, "w-1")
    seal = Seal("error.pb", verdict.digest, 2, verdict.strategy, said, time.time_ns(), "w-1", *fault)
    return [joined, *documents, failed, [("error.pb", encode_seal(seal))]]


async def main(folder: str, plans: list[str], *, waits: bool) -> None:
    """Write all attempts, with a pause between two steps."""
    for number, plan in enumerate(plans):
        async with open_store(f"{folder}/{number}") as store:
            for index, step in enumerate(steps(number, plan)):
                await asyncio.sleep(PAUSE_S)
                if waits and index == AFTER_FIRST_DOCUMENT:
                    sys.stdin.read()
                for path, data in step:
                    await store.put(path, data)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2].split(","), waits=len(sys.argv) > 3))
