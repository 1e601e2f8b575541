"""Stores that agents share in tests: one in a process that can be killed,
and one that counts its requests.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from torch.distributed import TCPStore

from firstfault_torch.protocol.election import build_key
from firstfault_torch.rounds.round_store import RoundStore

Host = tuple[multiprocessing.process.BaseProcess, RoundStore]
"""The process that hosts a store, and the store as another one sees it."""


class Counting:
    """Passes all requests on, and keeps their names."""

    def __init__(self, store: Any, requests: list[str]) -> None:
        self._store = store
        self._requests = requests

    def clone(self) -> Counting:
        return Counting(self._store.clone(), self._requests)

    def __getattr__(self, name: str) -> Any:
        self._requests.append(name)
        return getattr(self._store, name)


def acknowledge(store: Any, group_rank: int) -> None:
    """Confirm that an agent knows of a failure, as its notices do."""
    store.append(build_key("heard"), f"{group_rank} ")


def group_on(
    store: Any,
    group_rank: int,
    nodes: int,
    set_closed: Callable[[], None] = lambda: None,
) -> Any:
    """Return torch's worker group of a node, as far as the agents' connections need it."""
    return SimpleNamespace(
        store=store,
        group_rank=group_rank,
        group_world_size=nodes,
        master_addr="127.0.0.1",
        master_port=0,
        spec=SimpleNamespace(rdzv_handler=SimpleNamespace(set_closed=set_closed)),
    )


@contextlib.contextmanager
def hosted() -> Iterator[Host]:
    """Host a store in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_host, args=(theirs,))
    process.start()
    client = TCPStore("127.0.0.1", ours.recv(), is_master=False, wait_for_workers=False)
    yield process, RoundStore(client, 0)
    process.kill()
    process.join()


def _host(port: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    time.sleep(300)
