"""A stall is told to notifiers, and NCCL's RAS is asked as a second witness.

The RAS here is a server of this file that speaks the protocol of NCCL's
``src/ras/client_support.cc``.
"""

import json
import os
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from firstfault_torch import time_limits
from firstfault_torch.conclusion import notifications
from firstfault_torch.hang.ras import add_ras_line
from firstfault_torch.protocol.stall_messages import StallReport
from tests.http_receiver import serve_receiver
from tests.torch_agent.test_hangs import resume, stall, watching

OTHERS = {"AllReduce": 3041, "Broadcast": 2}


class Ras(socketserver.ThreadingTCPServer):
    """Answers the commands of ``ncclras`` one by one, as NCCL's RAS thread does,
    and closes after the status.
    """

    daemon_threads = True
    knows_json = True
    answer: bytes | Callable[[Any], None] = b""
    asked: list[str]

    def finish_request(self, request: Any, _: object) -> None:
        self.asked.append("")
        if not isinstance(self.answer, bytes):
            return self.answer(request)
        for line in request.makefile("rb"):
            command = line.decode().strip()
            self.asked.append(command)
            if command == "STATUS":
                return request.sendall(self.answer)
            if command.startswith("CLIENT PROTOCOL "):
                request.sendall(b"SERVER PROTOCOL 2\n")
            elif command.startswith("TIMEOUT ") or self.knows_json:
                request.sendall(b"OK\n")
            else:
                request.sendall(f"ERROR: Unknown command {command}\n".encode())
        return None


@pytest.fixture
def ras(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ras]:
    with Ras(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        server.asked = []
        monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def _rank(rank: int, counts: dict[str, int] = OTHERS, **status: int) -> dict[str, Any]:
    found = {
        "rank": rank,
        "host": "10.0.0.5",
        "pid": 4000 + rank,
        "cuda_dev": rank,
        "nvml_dev": rank,
    }
    return {
        **found,
        "status": {"init_state": 0, "async_error": 0, **status},
        "collective_counts": counts,
    }


def _missing(rank: int, *, unresponsive: bool) -> dict[str, Any]:
    return {**_rank(rank), "status": {"unresponsive": unresponsive, "considered_dead": False}}


def _group(
    size: int, *ranks: dict[str, Any], missing: tuple[dict[str, Any], ...] = ()
) -> dict[str, Any]:
    known = {rank: _rank(rank) for rank in range(size)} | {rank["rank"]: rank for rank in ranks}
    there = [known[rank] for rank in known if rank not in {each["rank"] for each in missing}]
    return {"size": size, "ranks": there, "missing_ranks": list(missing)}


def _document(*groups: dict[str, Any]) -> bytes:
    return json.dumps({"nccl_version": "2.30.7", "communicators": groups}, indent=2).encode()


TEXT = b"""NCCL version 2.27.5 compiled with CUDA 12.9

Communicators... (2.05s)
=============

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

Warnings
========

"""
SILENT = (_missing(17, unresponsive=True),)
DEAD = _document(_group(8, missing=SILENT), _group(64, missing=SILENT))
LEFT = _document(_group(4, missing=(_missing(1, unresponsive=False),)))
BEHIND = _document(_group(8, _rank(5, {"AllReduce": 3040})))
FAILED = _document(_group(4, _rank(2, async_error=6), _rank(3, init_state=7)))


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (_document(_group(64)), "NCCL RAS sees no fault"),
        (DEAD, "NCCL RAS: no answer from 1 of 64 ranks: rank 17 (pid 4017 on 10.0.0.5)"),
        # as NCCL 2.28.9 writes it
        (
            DEAD.replace(b'"nvml_dev": 17,', b'"nvml_dev": 17'),
            "NCCL RAS: no answer from 1 of 64 ranks: rank 17 ",
        ),
        (LEFT, "NCCL RAS: no communicator on 1 of 4 ranks: rank 1 "),
        (BEHIND, "NCCL RAS: 3,040 AllReduce, others 3,041, on 1 of 8 ranks: rank 5 (pid 4005 "),
        (FAILED, "NCCL RAS: NCCL error 6 on 1 of 4 ranks: rank 2 (pid 4002 on 10.0.0.5)"),
        (
            TEXT,
            (
                "NCCL RAS: INCOMPLETE; Missing communicator data from 1 job process; Process"
                " 3487984 on node 172.16"
            ),
        ),
    ],
)
def test_findings_of_ras_become_one_line(ras: Ras, answer: bytes, line: str) -> None:
    """Its findings are one line, each process once; JSON of the versions that have it,
    else their text.
    """
    ras.answer = answer
    ras.knows_json = answer != TEXT
    report = add_ras_line(lambda: StallReport(("no progress",), (3,)), {1, os.getpid()})
    assert (report.lines[0], report.ranks) == ("no progress", (3,))
    assert report.lines[1].startswith(line)
    assert ras.asked == ["", "CLIENT PROTOCOL 2", "TIMEOUT 1", "SET FORMAT json", "STATUS"]


def _is_silent(_: Any) -> None:
    time.sleep(10)


def _drips(request: Any) -> None:
    for _ in range(100):
        request.sendall(b"x")
        time.sleep(0.1)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"not RAS\n\n\n\n\n",
        b"{" + b'"communicators":[' * 100_000,
        _document({"size": 2, "ranks": 7, "missing_ranks": None}),
        _drips,
        lambda request: request.sendall(b"x" * (17 << 20)),
        _is_silent,
    ],
)
def test_an_unusable_answer_of_ras_is_ignored(ras: Ras, answer: Any) -> None:
    """Nothing is told, and the agent waits no longer than its limit;
    a process that is silent is asked again.
    """
    ras.answer = answer
    began = time.monotonic()
    assert add_ras_line(lambda: StallReport(("no progress",)), {os.getpid()}).lines == (
        "no progress",
    )
    assert time.monotonic() - began < 4
    assert len(ras.asked) > 1 or answer is not _is_silent


def test_an_answer_of_another_jobs_ras_is_ignored(ras: Ras) -> None:
    """An answer from a process that isn't this node's worker is left out,
    whatever pids it names.
    """
    ras.answer = _document(_group(8, missing=(_missing(2, unresponsive=True),)))
    assert add_ras_line(
        lambda: StallReport(("no progress",)), {os.getppid(), 4000, 4002}
    ).lines == ("no progress",)
    assert "CLIENT PROTOCOL 2" in ras.asked
    assert "STATUS" not in ras.asked


def test_only_a_job_on_nccl_asks_ras(ras: Ras, caplog: pytest.LogCaptureFixture) -> None:
    """What RAS says changes no rank; if none is called, or nothing is told,
    no connection is made.
    """
    ras.answer = _document(_group(8, missing=(_missing(2, unresponsive=True),)))
    stall(watching(backend="gloo"), 61)
    assert add_ras_line(lambda: StallReport(()), {os.getpid()}).lines == ()
    assert ras.asked == []
    watch = watching()
    stall(watch, 61)
    assert watch._protocol.reports.stall.report.ranks == (5,)  # type: ignore[union-attr]
    assert (
        caplog.messages[-1]
        == "firstfault: NCCL RAS: no answer from 1 of 8 ranks: rank 2 (pid 4002 on 10.0.0.5)"
    )


def test_a_stall_is_one_event_and_its_end_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user does not want it, a stall is one event when it is told first,
    and one when it is over.
    """
    with serve_receiver() as webhook:
        monkeypatch.setenv("FIRSTFAULT_WEBHOOK", webhook.url)
        for wanted in ("0", ""):
            monkeypatch.setenv("FIRSTFAULT_NOTIFY_STALLS", wanted)
            watch = watching(backend="gloo")
            watch._protocol.reports.resumed[(5,), "loader.py:88 in read_shard"] = 2
            # the second is the fourth at its place: it is not told
            for began, ended in (
                (61.0, 130.0),
                (61.0, 74.0),
            ):
                stall(watch, began)
                stall(watch, 2 * began)
                resume(watch, ended)
    began, over = (json.loads(request.body) for request in webhook.received)
    assert (began["type"], began["source"], began["subject"]) == (
        "firstfault.stall.v1",
        "/jobs/7",
        "node-2",
    )
    assert began["data"]["first_line"].startswith(
        "no progress for 61 s: 7 of 8 ranks wait in all_reduce #41"
    )
    assert (began["data"]["rank"], began["data"]["lost_seconds"]) == (5, None)
    assert (
        over["data"]["first_line"]
        == "progress resumed after 130 s: rank 5 at loader.py:88 in read_shard"
    )
    assert began["id"] != over["id"]


def test_a_hanging_notifier_is_waited_for_within_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The watch waits for it no longer than for a verdict's;
    one that wants no stalls is not called.
    """
    monkeypatch.setattr(time_limits, "NOTIFIERS_TIMEOUT_SECONDS", 0.5)
    goes_on = threading.Event()
    hangs = SimpleNamespace(on_stall=lambda _: goes_on.wait(60))
    called = list[object]()
    points = [
        SimpleNamespace(name=name, load=lambda it=it: it)
        for name, it in (("a", hangs), ("b", called.append))
    ]
    monkeypatch.setattr(notifications, "entry_points", lambda **_: points)
    began = time.monotonic()
    stall(watching(backend="gloo"), 61)
    assert time.monotonic() - began < 5
    assert "the notifier a didn't return within 0.5 s" in caplog.text
    assert not called
    goes_on.set()
