"""A large cascade as objects: one rank raised, all others lost their connection to it."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from firstfault.exceptions.fingerprint import compute_fingerprint
from firstfault.layout import ERRORS, ROSTER, error_key_for, roster_key_for
from firstfault.model import ExceptionInfo, FrameInfo, Phase, Receipt, WorkerError
from firstfault.store import open_store
from firstfault.testing import make_error, make_presence
from firstfault.wire.documents import encode, encode_presence

_PER_NODE = 8
_PARALLEL = 64
_GLOO = (
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:{line}] Connection closed by peer"
    " [10.0.{high}.{low}]:{port}"
)


@dataclass(frozen=True)
class Cascade:
    """The documents of a job's workers after one of them raised."""

    workers: int

    @property
    def culprit(self) -> int:
        """The rank that raised."""
        return self.workers // 3

    def objects(self, *, roster: bool = True) -> Iterator[tuple[str, bytes]]:
        """Yield path, relative to the output prefix, and content of each object;
        documents first.
        """
        receipts: dict[int, list[Receipt]] = {}
        for rank in range(self.workers):
            error = self._error(rank)
            name = error_key_for(error)
            receipts.setdefault(rank // _PER_NODE, []).append(
                Receipt(name, durable=True, rank=rank)
            )
            yield f"{ERRORS}/{name}", encode(error)
        nodes = len(receipts)
        for node in receipts if roster else ():
            for phase in (Phase.JOINED, Phase.FAILED):
                entry = make_presence(
                    phase,
                    node=f"worker-{node}",
                    group_rank=node,
                    nodes=nodes,
                    host=f"host-{node}",
                    ip=f"10.0.{node // 250}.{node % 250}",
                    ranks=tuple(receipt.rank or 0 for receipt in receipts[node]),
                    receipts=tuple(receipts[node]) if phase is Phase.FAILED else (),
                )
                yield f"{ROSTER}/{roster_key_for(entry)}", encode_presence(entry)

    def _error(self, rank: int) -> WorkerError:
        node, culprit = rank // _PER_NODE, self.culprit // _PER_NODE
        place = {
            "group_rank": node,
            "local_rank": rank % _PER_NODE,
            "world_size": self.workers,
            "pid": 1000 + rank,
        }
        place["group_world_size"] = -(-self.workers // _PER_NODE)
        frames = tuple(
            FrameInfo(
                f"/job/lib/python3.11/site-packages/torch/distributed/layer_{number}.py",
                number,
                "step",
            )
            for number in range(12)
        )
        if rank == self.culprit:
            own = FrameInfo("/job/train.py", 41, "load_batch", "return table[index]")
            raised = ExceptionInfo(
                "KeyError",
                "'tokens'",
                bases=("LookupError", "Exception"),
                frames=(own,),
            )
            error = make_error(
                rank,
                node=f"worker-{node}",
                exception=raised,
                message="KeyError: 'tokens'",
                **place,
            )
            return _fingerprinted(error)
        text = _GLOO.format(
            line=547,
            high=culprit // 250,
            low=culprit % 250,
            port=20_000 + rank % 1000,
        )
        raised = ExceptionInfo("RuntimeError", text, bases=("Exception",), frames=frames)
        moment = 30 + rank / 100
        return _fingerprinted(
            make_error(
                rank,
                node=f"worker-{node}",
                at_ms=moment,
                exception=raised,
                message=text,
                **place,
            )
        )


def _fingerprinted(error: WorkerError) -> WorkerError:
    """Encode a document as a worker writes it, with the worker's name."""
    return replace(error, fingerprint=compute_fingerprint(error), documents=())


def put_all(uri: str, cascade: Cascade, *, roster: bool = True) -> None:
    async def put() -> None:
        left: Any = cascade.objects(roster=roster)

        async def work() -> None:
            for path, data in left:
                await store.put(path, data)

        async with open_store(uri) as store:
            await asyncio.gather(*(work() for _ in range(_PARALLEL)))

    asyncio.run(put())
