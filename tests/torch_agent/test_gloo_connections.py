"""Shutting down gloo's connections ends a peer's wait, and touches no other connection."""

from __future__ import annotations

import datetime as dt
import os
import select
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from firstfault_torch.compat.torch_worker import shut_down_gloo_connections

PATIENCE = dt.timedelta(seconds=60)


def test_a_peer_that_waits_is_released(tmp_path: Path) -> None:
    """It fails at once, in each group, although the groups still exist; listening sockets and others' stay open."""
    context = mp.spawn(_rank_without_an_end, args=(str(tmp_path / "store"), tmp_path), nprocs=2, join=False)
    assert context.join(timeout=120) or context.join(timeout=120)
    assert "onnection" in (tmp_path / "first").read_text()
    assert "onnection" in (tmp_path / "second").read_text()


def test_without_gloo() -> None:
    """There is nothing to shut down."""
    assert shut_down_gloo_connections() == 0


def _rank_without_an_end(rank: int, store: str, marks: Path) -> None:
    _rank(rank, store, marks)
    os._exit(0)  # at Python's end, gloo may abort a process that still has its groups


def _rank(rank: int, store: str, marks: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=PATIENCE)
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4), group=group)
    if rank == 0:
        with _listening() as listener, socket.create_connection(listener.getsockname()) as other:
            epoll = select.epoll()
            epoll.register(listener)
            epoll.register(other)
            assert shut_down_gloo_connections() == 2
            assert shut_down_gloo_connections() == 0
            opened = len(list(Path("/proc/self/fd").iterdir()))
            assert [shut_down_gloo_connections() for _ in range(10)] == [0] * 10
            assert len(list(Path("/proc/self/fd").iterdir())) < opened + 10, "each call leaves a file open"
            accepted, _ = listener.accept()
            other.sendall(b"still here")
            assert accepted.recv(10) == b"still here"
            accepted.close()
        dist.FileStore(store, 2).wait(["released"], PATIENCE)
        return
    for name, where in {"first": None, "second": group}.items():
        with pytest.raises(RuntimeError) as raised:
            dist.all_reduce(torch.ones(4), group=where)
        (marks / name).write_text(str(raised.value))
    dist.FileStore(store, 2).set("released", "1")


def _listening() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener
