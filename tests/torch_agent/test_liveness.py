"""Agents detect a killed agent by its closed connection, or in the roster: real store,
sockets and recorder.
"""

import contextlib
import errno
import gc
import json
import logging
import multiprocessing
import os
import queue
import resource
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firstfault.layout import roster_key_for
from firstfault.model import Phase
from firstfault.recorder import time_limits as of_recorder
from firstfault.recorder.client import RecorderClient
from firstfault.testing import make_presence
from firstfault_torch import time_limits
from firstfault_torch.node.document_writer import node_recorder
from firstfault_torch.rounds import roster_poller
from firstfault_torch.rounds.peer_connections import PeerConnections
from firstfault_torch.rounds.roster_poller import RosterPoller
from firstfault_torch.rounds.round_store import RoundStore
from tests.prefix import Prefix
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

LONG_S = 60.0
QUIET_S = 0.6
"""Longer than an agent may take to come back, where that is a moment."""


class Deaths:
    """Records the agents that were reported dead."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []
        self.news = threading.Event()

    def __call__(self, group_rank: int, node: str) -> None:
        self.seen.append((group_rank, node))
        self.news.set()


def _first(
    store: RoundStore, deaths: Callable[[int, str], None]
) -> tuple[PeerConnections, dict[str, Any]]:
    """Be the first agent; return also where it listens."""
    return PeerConnections(store, 0, "worker-0", "127.0.0.1", deaths), json.loads(
        store.get("firstfault/lifeline")
    )


def _greeted(where: dict[str, Any], group_rank: int = 7) -> socket.socket:
    """Return a connection to the first agent, which takes it for another agent's."""
    greeting = {"secret": where["secret"], "group_rank": group_rank, "node": f"worker-{group_rank}"}
    connection = socket.create_connection(("127.0.0.1", where["port"]), LONG_S)
    connection.sendall(json.dumps(greeting).encode() + b"\n")
    assert json.loads(connection.recv(4096)) == {"node": "worker-0"}
    return connection


def test_the_port_is_the_users(
    store: RoundStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first agent listens on FIRSTFAULT_PORT; if that is in use, on a free one,
    with a warning.
    """
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
        monkeypatch.setenv("FIRSTFAULT_PORT", str(port))
        lines, where = _first(store, Deaths())
        lines.end()
        assert where["port"] not in {0, port}
        assert f"FIRSTFAULT_PORT isn't used ([Errno {errno.EADDRINUSE}]" in caplog.text
    store.delete_key("firstfault/lifeline")
    lines, where = _first(store, Deaths())
    try:
        assert where["port"] == port
        _greeted(where).close()
    finally:
        lines.end()


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that gives an agent only a moment to connect again,
    once the agents are connected.
    """
    return lambda: monkeypatch.setattr(time_limits, "RECONNECT_TIMEOUT_SECONDS", QUIET_S / 3)


def test_a_greeting_while_the_round_ends(store: RoundStore, hurry: Callable[[], None]) -> None:
    """The thread ends also if the end of the round and an agent's greeting are
    read at the same moment.
    """
    began = threading.Event()
    goes_on = threading.Event()

    def slow(*_: Any) -> None:
        began.set()
        goes_on.wait(LONG_S)

    lines, where = _first(store, slow)
    late = socket.create_connection(("127.0.0.1", where["port"]), LONG_S)
    agent = _greeted(where)
    hurry()
    agent.close()
    assert began.wait(LONG_S)
    greeting = {"secret": where["secret"], "group_rank": 2, "node": "worker-2"}
    late.sendall(json.dumps(greeting).encode() + b"\n")
    ending = threading.Thread(target=lines.end)
    ending.start()
    wait_until(lines._ended.done)
    goes_on.set()
    ending.join(LONG_S)
    wait_until(lambda: not lines.thread.is_alive())
    late.close()


def test_a_machine_that_vanishes(store: RoundStore) -> None:
    """At both ends the kernel gives up a silent machine after the same time,
    also while sent data is in flight.
    """
    agents = [
        PeerConnections(store, rank, f"worker-{rank}", "127.0.0.1", Deaths()) for rank in (0, 1)
    ]
    wait_until(lambda: agents[0]._latest)
    port = json.loads(store.get("firstfault/lifeline"))["port"]
    wait_until(lambda: _limits_ms(port) == [(60_000, 60_000)] * 2)
    for agent in agents:
        agent.end()


def _limits_ms(port: int) -> list[tuple[int, int]]:
    """Return for each of this process's connections with the port:
    the limits without and with data in flight.
    """
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(path.stat().st_mode):
                with socket.socket(fileno=os.dup(int(path.name))) as item:
                    inet = item.family in {socket.AF_INET, socket.AF_INET6}
                    if inet and port in {item.getsockname()[1], item.getpeername()[1]}:
                        tcp = partial(item.getsockopt, socket.IPPROTO_TCP)
                        idle = tcp(socket.TCP_KEEPIDLE) + tcp(socket.TCP_KEEPINTVL) * tcp(
                            socket.TCP_KEEPCNT
                        )
                        found.append((1000 * idle, tcp(socket.TCP_USER_TIMEOUT)))
    return found


@pytest.mark.parametrize("leaves", [0, 1])
def test_an_agent_that_leaves(leaves: int, store: RoundStore, hurry: Callable[[], None]) -> None:
    """An agent that sends a farewell is not reported dead, whichever of two it is."""
    deaths = Deaths()
    agents = [
        PeerConnections(store, rank, f"worker-{rank}", "127.0.0.1", deaths) for rank in (0, 1)
    ]
    wait_until(lambda: agents[0]._latest)
    hurry()
    agents[leaves].end()
    assert not deaths.news.wait(QUIET_S)
    agents[1 - leaves].end()


def test_a_first_agent_that_is_frozen_in_the_beginning(
    store: RoundStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no agent for dead that meanwhile gave up to connect; those try again,
    and detect its death later.
    """
    monkeypatch.setattr(time_limits, "PEER_CONNECT_TIMEOUT_SECONDS", QUIET_S)
    context = multiprocessing.get_context("fork")
    dead = context.Event()

    def be_first() -> None:
        PeerConnections(store, 0, "worker-0", "127.0.0.1", lambda *_: dead.set())
        time.sleep(LONG_S)

    first = context.Process(target=be_first)
    first.start()
    try:
        store.wait(["firstfault/lifeline"])
        os.kill(first.pid or 0, signal.SIGSTOP)
        deaths = Deaths()
        lines = PeerConnections(store, 1, "worker-1", "127.0.0.1", deaths)
        time.sleep(3 * QUIET_S)
        os.kill(first.pid or 0, signal.SIGCONT)
        assert not dead.wait(time_limits.RECONNECT_TIMEOUT_SECONDS + 3 * QUIET_S)
    finally:
        first.kill()
        first.join()
    assert deaths.news.wait(LONG_S)
    lines.end()
    assert deaths.seen == [(0, "worker-0")]


def test_an_agent_that_leaves_before_it_is_answered(store: RoundStore) -> None:
    """It sends a farewell too: the first agent may have taken its greeting."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store.set(
            "firstfault/lifeline",
            json.dumps({"port": listener.getsockname()[1], "secret": "of this test"}),
        )
        lines = PeerConnections(store, 1, "worker-1", "127.0.0.1", Deaths())
        connection, _ = listener.accept()
    with connection, connection.makefile("rb") as received:
        assert json.loads(received.readline())["node"] == "worker-1"
        lines.end()
        assert received.read() == b"bye\n"


def test_the_first_agent_leaves_before_it_is_greeted(store: RoundStore) -> None:
    """It sends its answer and a farewell too:
    an agent that connects again must not take it for dead.
    """
    lines, where = _first(store, Deaths())
    with (
        socket.create_connection(("127.0.0.1", where["port"]), LONG_S) as late,
        late.makefile("rb") as received,
    ):
        _greeted(where).close()  # taken after the other connection
        lines.end()
        assert received.read() == b'{"node": "worker-0"}\nbye\n'


def test_a_stranger_is_not_missed(store: RoundStore, hurry: Callable[[], None]) -> None:
    """A connection without the secret from the store cannot report a death."""
    deaths = Deaths()
    lines, where = _first(store, deaths)
    strangers = [{"secret": said, "group_rank": 1, "node": "a"} for said in ("x", "\u00e9", 7, [])]
    for said in (
        b"\n",
        b"no json\n",
        b"[" * 4_095 + b"\n",
        *(json.dumps(one).encode() + b"\n" for one in strangers),
    ):
        with socket.create_connection(("127.0.0.1", where["port"]), LONG_S) as stranger:
            stranger.sendall(said)
            assert stranger.recv(4096) == b""
    agent = _greeted(where)
    hurry()
    assert not deaths.news.wait(QUIET_S)
    lines.end()
    assert agent.recv(4096) == b"bye\n"
    agent.close()


def test_slow_strangers(store: RoundStore, hurry: Callable[[], None]) -> None:
    """Strangers that say nothing, or a byte at a time, keep no agent from learning of a death,
    and are dropped.
    """
    deaths = Deaths()
    lines, where = _first(store, deaths)
    address = ("127.0.0.1", where["port"])
    agent = _greeted(where, 1)
    hurry()
    strangers = [socket.create_connection(address, LONG_S) for _ in range(3)]
    stop = threading.Event()

    def whisper() -> None:
        while not stop.wait(0.2):
            with socket.create_connection(address, LONG_S) as slow:
                while not stop.wait(0.2):
                    try:
                        slow.sendall(b"x")
                    except OSError:
                        break

    whispering = [threading.Thread(target=whisper) for _ in range(3)]
    for thread in whispering:
        thread.start()
    try:
        agent.close()
        assert deaths.news.wait(LONG_S / 2)
        for stranger in strangers:
            stranger.settimeout(LONG_S)
            assert stranger.recv(1) == b""
    finally:
        stop.set()
        for thread in whispering:
            thread.join()
        for stranger in strangers:
            stranger.close()
    lines.end()
    assert deaths.seen == [(1, "worker-1")]


def test_a_connection_that_breaks_and_comes_back(
    store: RoundStore, hurry: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that reconnects within the limit is not reported dead."""
    monkeypatch.setattr(time_limits, "RECONNECT_TIMEOUT_SECONDS", LONG_S)
    deaths = Deaths()
    lines, where = _first(store, deaths)
    _greeted(where, 1).close()
    again = _greeted(where, 1)
    hurry()
    assert not deaths.news.wait(QUIET_S)
    again.close()
    assert deaths.news.wait(LONG_S), "gone for good now"
    lines.end()
    assert deaths.seen == [(1, "worker-1")]


def test_no_descriptors_are_left(
    store: RoundStore, hurry: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """An agent that may open no further file says so once, rests meanwhile, serves the others,
    and continues later.
    """
    deaths = Deaths()
    lines, where = _first(store, deaths)
    early = _greeted(where, 1)
    late = socket.socket()
    late.settimeout(LONG_S)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()
    held = [os.dup(0)]
    with caplog.at_level(logging.WARNING):
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[0], limits[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(0))
            late.connect(("127.0.0.1", where["port"]))
            late.sendall(
                json.dumps({"secret": where["secret"], "group_rank": 2, "node": "late"}).encode()
                + b"\n"
            )
            began = time.process_time()
            assert not deaths.news.wait(3 * QUIET_S), "meanwhile it tries twice"
            assert time.process_time() - began < QUIET_S
            hurry()
            early.shutdown(socket.SHUT_RDWR)
            assert deaths.news.wait(LONG_S / 2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for descriptor in held:
                os.close(descriptor)
    assert late.recv(4096), "it is accepted after all"
    late.close()
    early.close()
    lines.end()
    assert deaths.seen == [(1, "worker-1")]
    assert caplog.text.count("Too many open files") == 1
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("group_rank", [0, 1])
def test_the_end_leaves_no_thread(store: RoundStore, group_rank: int) -> None:
    """The next round may fork: no thread is left,
    also where the first agent never opened its end.
    """
    lines = PeerConnections(store, group_rank, "worker", "127.0.0.1", lambda *_: None)
    lines.end()
    lines.thread.join(LONG_S)  # a busy machine may need longer than the agent waits for it
    assert not lines.thread.is_alive()


OWN = 1
ROUND = 2
OLD, NEW = 1_700_000_000_000, 1_800_000_000_000
"""Incarnations."""
SOON_S = 30.0
NEVER_S = 0.5


@pytest.fixture
def look(
    prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., queue.Queue[int]]]:
    """Begin to poll as node 1, round 2; return the queue of reported failures."""
    monkeypatch.setattr(time_limits, "ROSTER_POLL_SECONDS", 0.1)
    monkeypatch.setattr(roster_poller, "_POLLS_PER_SECOND", 100.0)
    # on a busy machine a recorder takes seconds to start
    monkeypatch.setattr(of_recorder, "REQUEST_RECEIPT_TIMEOUT_SECONDS", SOON_S)
    looks: list[RosterPoller] = []
    with node_recorder(replace(prefix.node_context(), round=ROUND)) as node_context:
        assert node_context.files is not None
        recorder = RecorderClient(node_context.files)
        recorder.roster(SOON_S)  # so that the first poll is answered at once

        def begin(patience: float = 0.0, incarnation: int = OLD) -> queue.Queue[int]:
            heard: queue.Queue[int] = queue.Queue()
            own = replace(node_context, incarnation=incarnation)
            looks.append(RosterPoller(recorder, own, OWN, patience, heard.put))
            return heard

        yield begin
        for one in looks:
            one.end()
    assert not [thread for thread in threading.enumerate() if thread.name == "firstfault-roster"]


def enter(
    prefix: Prefix,
    phase: Phase,
    group_rank: int,
    round_number: int = ROUND,
    incarnation: int = OLD,
) -> None:
    """Write a roster entry as a node does."""
    entry = make_presence(phase, incarnation=incarnation)
    entry = replace(entry, place=replace(entry.place, group_rank=group_rank, round=round_number))
    folder: Path = prefix.folder / "firstfault" / "roster"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / roster_key_for(entry)).write_bytes(b"")


def _silent(heard: queue.Queue[int]) -> bool:
    """Whether nothing is reported for a while."""
    with contextlib.suppress(queue.Empty):
        heard.get(timeout=NEVER_S)
        return False
    return True


def test_a_failure_that_was_not_broadcast(
    look: Callable[..., queue.Queue[int]], prefix: Prefix
) -> None:
    """Another node's failure in this round is reported once; its own, joining,
    success and other rounds are not.
    """
    heard = look()
    enter(prefix, Phase.JOINED, 0)
    enter(prefix, Phase.SUCCEEDED, 3)
    enter(prefix, Phase.FAILED, OWN)
    enter(prefix, Phase.FAILED, 4, ROUND - 1)
    assert _silent(heard)
    enter(prefix, Phase.FAILED, 5)
    assert heard.get(timeout=SOON_S) == 5
    enter(prefix, Phase.FAILED, 6)
    assert _silent(heard)


def test_patience(look: Callable[..., queue.Queue[int]], prefix: Prefix) -> None:
    """A failure after which the workers may restart is not reported at once."""
    enter(prefix, Phase.FAILED, 0)
    began = time.monotonic()
    heard = look(patience=0.5)
    assert heard.get(timeout=SOON_S) == 0
    assert time.monotonic() - began >= 0.5


@pytest.mark.parametrize(
    "joined",
    [[(0, NEW)], [(OWN, NEW)], [], [(0, OLD - 1)]],
    ids=["the other", "this node", "neither", "a clock that is behind"],
)
def test_an_earlier_run_in_the_same_prefix(
    joined: list[tuple[int, int]], look: Callable[..., queue.Queue[int]], prefix: Prefix
) -> None:
    """A failure of an earlier run, in a round of the same number, is not reported; a new one is."""
    for group_rank in (0, OWN):
        enter(prefix, Phase.JOINED, group_rank)
        enter(prefix, Phase.FAILED, group_rank)
    for group_rank, incarnation in joined:
        enter(prefix, Phase.JOINED, group_rank, incarnation=incarnation)
    heard = look(incarnation=NEW)
    assert _silent(heard)
    enter(prefix, Phase.FAILED, 0, incarnation=NEW)
    assert heard.get(timeout=SOON_S) == 0


def test_an_entry_of_an_earlier_run_that_arrives_late(
    look: Callable[..., queue.Queue[int]], prefix: Prefix
) -> None:
    """A failure that is older than the same group rank's newest entry is not reported,
    whenever it is uploaded.
    """
    enter(prefix, Phase.JOINED, 0, incarnation=NEW)
    heard = look(incarnation=NEW)
    enter(prefix, Phase.FAILED, 0)
    assert _silent(heard)


def test_a_storage_that_cannot_be_listed(
    look: Callable[..., queue.Queue[int]], prefix: Prefix
) -> None:
    """A roster that cannot be listed is not a failure, and the polling continues."""
    roster = prefix.folder / "firstfault" / "roster"
    roster.parent.mkdir(parents=True, exist_ok=True)
    roster.write_text("a file in the folder's place")
    heard = look()
    assert _silent(heard)
    roster.unlink()
    enter(prefix, Phase.FAILED, 0)
    assert heard.get(timeout=SOON_S) == 0
