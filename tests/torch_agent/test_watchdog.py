"""The watchdog's deadlines, from `watchdog.expires` in a worker to the agent's server,
over a real FIFO.
"""

import json
import logging
import math
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.timer import FileTimerClient

from firstfault.errors import UsageError
from firstfault.recorder.folder import NodeFolder
from firstfault_torch import Watchdog, watchdog
from firstfault_torch.agent.timers import TimerServer, open_timers, resolve_watchdog
from firstfault_torch.watchdog.timers import Timer, build_line, parse_line
from tests.plugin.running import short_folder
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.forks]
SOON_S = 0.3
NEVER_S = 120.0
LIMIT_S = 30.0
BAD = (0, -1, math.inf, math.nan, True, "5")
"""Not numbers of seconds above 0."""


class Expired:
    """A server for this process's deadlines, and what has expired."""

    def __init__(self, server: TimerServer) -> None:
        self.server = server
        self.found: list[Timer] = []

    def start(self) -> None:
        self.server.start([os.getpid()], lambda timers: self.found.append(timers[os.getpid()]))

    def wait(self) -> Timer:
        wait_until(lambda: self.found, "nothing expires")
        return self.found[0]

    def becomes(self, *kinds: str) -> bool:
        """Wait until the server holds deadlines of these kinds; return whether none has expired."""

        def held() -> tuple[str, ...]:
            return tuple(
                "heartbeat" if one.heartbeat else "block"
                for one in list(self.server._timers.values())
            )

        wait_until(lambda: held() == kinds)
        return not self.found


@pytest.fixture
def expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Expired]:
    """Return a server that this process's `watchdog` reaches, with a heartbeat; `start` it."""
    server = TimerServer(tmp_path / "timers.fifo")
    for name, value in server.environment(
        Watchdog(heartbeat_timeout=getattr(request, "param", NEVER_S))
    ).items():
        monkeypatch.setenv(name, value)
    yield Expired(server)
    watchdog.release_all()
    server.stop()


# --- off ------------------------------------------------------------------------------------------


def test_off_it_does_nothing_and_loads_no_torch() -> None:
    """Without a watchdog the functions do nothing, start no thread,
    and import neither torch nor flytekit.
    """
    program = """
import sys, threading
from firstfault_torch import watchdog
with watchdog.expires(after=0.001, scope="step"):
    watchdog.ping()
@watchdog.expires(5)
def step(): return 7
assert step() == 7
watchdog.pause()
assert threading.active_count() == 1
assert not {"torch", "flytekit"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (
                partial(watchdog.expires, bad),
                "expires(after=...) must be a number of seconds above 0",
            )
            for bad in BAD
        ),
        *(
            (
                partial(Watchdog, bad),
                "heartbeat_timeout must be a number of seconds above 0, or None",
            )
            for bad in BAD
        ),
        (partial(watchdog.expires, 1, scope=3), "must be a text, not 3"),
        (partial(watchdog.expires, None), "must be a number of seconds above 0, not None"),
    ],
)
def test_a_wrong_argument_is_refused(make: Callable[[], Any], message: str) -> None:
    """What is not a number of seconds above 0, or not a text, is refused,
    also where there is no watchdog.
    """
    with pytest.raises(UsageError, match=re.escape(message)):
        make()


def test_torchs_variable_turns_it_on() -> None:
    """TORCHELASTIC_ENABLE_FILE_TIMER=1 turns our watchdog on instead of torch's;
    what the user asked for counts.
    """
    assert resolve_watchdog(None, {}) is None
    assert resolve_watchdog(None, {"TORCHELASTIC_ENABLE_FILE_TIMER": "0"}) is None
    assert resolve_watchdog(None, {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}) == Watchdog()
    assert resolve_watchdog(Watchdog(5), {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}) == Watchdog(5)


# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["train step", ""])
def test_a_block_that_takes_too_long_is_named(scope: str, expired: Expired) -> None:
    """The server gets the block's name, else its line, its seconds and its line,
    not before the deadline.

    The end of an inner block of one name leaves the outer one's deadline; torch's client would
    release both.
    """
    expired.start()
    began = time.monotonic()
    with watchdog.expires(after=SOON_S, scope=scope):
        line = f"test_watchdog.py:{sys._getframe().f_lineno - 1}"
        with watchdog.expires(after=NEVER_S, scope=scope):
            pass
        timer = expired.wait()
    assert time.monotonic() - began >= SOON_S
    assert (timer.scope, timer.seconds, timer.heartbeat, timer.since) == (
        scope or line,
        SOON_S,
        False,
        line,
    )


def test_nested_blocks_end_one_by_one(expired: Expired) -> None:
    """Nested blocks, also of one name, end one by one; so do decorated ones,
    and those that an exception leaves.
    """
    expired.start()

    @watchdog.expires(after=NEVER_S, scope="step")
    def step(depth: int) -> None:
        if depth:
            step(depth - 1)

    step(2)
    with pytest.raises(LookupError), watchdog.expires(NEVER_S), watchdog.expires(NEVER_S):
        raise LookupError
    assert expired.becomes()


@pytest.mark.parametrize("scope", ["x" * 5000, "\U0001f525" * 5000, 'a "quoted"\n\x00 name'])
def test_any_name_fits_into_one_line(scope: str) -> None:
    """Any name fits into one write to a FIFO, and is one line."""
    line = build_line(Timer(1, "1", scope, 5.0, 3.0))
    assert len(line) <= 4096
    assert line.count(b"\n") == 1
    assert parse_line(line).seconds == 3.0


# --- the heartbeat --------------------------------------------------------------------------------


@pytest.mark.parametrize("expired", [SOON_S], indirect=True)
def test_a_heartbeats_deadline_counts_from_the_last_ping(expired: Expired) -> None:
    """The deadline counts from the last ping; the first one starts it."""
    expired.start()
    began = time.monotonic()
    watchdog.ping()
    timer = expired.wait()
    assert time.monotonic() - began >= SOON_S
    assert (timer.heartbeat, timer.seconds, timer.scope) == (True, SOON_S, "")
    assert timer.since.startswith("test_watchdog.py:")


def test_each_ping_moves_the_deadline(expired: Expired) -> None:
    """Each ping moves the deadline, but for one right after another.

    It rests after `pause`, and inside a block, whose own deadline counts; after the block it
    continues. All deadlines end with the task function, also that of a block which is never left.
    """
    expired.start()
    watchdog.ping()
    assert expired.becomes("heartbeat")
    (first,) = expired.server._timers.values()
    watchdog._current._pinged = 0.0  # type: ignore[union-attr]
    watchdog.ping()
    wait_until(lambda: first not in list(expired.server._timers.values()))
    (second,) = expired.server._timers.values()
    assert (second.deadline or 0.0) > (first.deadline or 0.0)
    watchdog.pause()
    assert expired.becomes()
    watchdog.ping()
    with watchdog.expires(after=NEVER_S):
        watchdog.ping()
        assert expired.becomes("block")
    assert expired.becomes("heartbeat")
    block = watchdog.expires(after=NEVER_S)
    block.__enter__()
    assert expired.becomes("block")
    watchdog.release_all()
    assert expired.becomes()
    block.__exit__(None, None, None)


# --- clocks and stalls ----------------------------------------------------------------------------


def test_the_wall_clock_does_not_count() -> None:
    """A deadline is one of the monotonic clock, whatever the wall clock was when it was sent."""
    fields = json.loads(build_line(Timer(1, "7", "step", 123.5, 3.0)))
    assert parse_line(json.dumps({**fields, "expiration_time": 5.0}).encode()).deadline == 123.5
    assert parse_line(json.dumps({**fields, "deadline": None}).encode()).deadline is None


def test_a_deadline_of_torchs_client_is_converted(
    expired: Expired, caplog: pytest.LogCaptureFixture
) -> None:
    """A deadline that torch's own client writes is converted when it is read,
    and its release ends it.
    """
    expired.start()
    client = FileTimerClient(str(expired.server.path))
    client.acquire("torch's", time.time() + NEVER_S)
    client.acquire("step", time.time() + NEVER_S)
    client.release("step")
    FileTimerClient(str(expired.server.path), signal=0).acquire(
        "only a log line", time.time() + 0.01
    )
    wait_until(lambda: "(not killed: kill=False)" in caplog.text)
    assert expired.becomes("block")
    client.acquire("soon", time.time() + SOON_S)
    assert expired.wait().scope == "soon"


def _watch_and_tell(path: Path, pid: int, told: Any) -> None:
    server = TimerServer(path)
    server.start([pid], lambda timers: told.put((time.monotonic(), timers[pid].scope)))
    told.put("ready")
    wait_until(lambda: server._timers)
    told.put("it looks often")
    time.sleep(NEVER_S)


def test_a_frozen_agent_moves_all_deadlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the agent does not run, its workers may not run either: deadlines move by that time."""
    monkeypatch.setattr("firstfault_torch.time_limits.WATCHDOG_POLL_SECONDS", 0.1)
    monkeypatch.setattr("firstfault_torch.time_limits.FROZEN_WATCHDOG_SECONDS", 0.3)
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    agent = context.Process(
        target=_watch_and_tell, args=(tmp_path / "timers.fifo", os.getpid(), told)
    )
    agent.start()
    try:
        assert told.get(timeout=LIMIT_S) == "ready"
        client = FileTimerClient(str(tmp_path / "timers.fifo"))
        client.acquire("another", time.time() + NEVER_S)
        assert told.get(timeout=LIMIT_S) == "it looks often"
        os.kill(agent.pid or 0, signal.SIGSTOP)
        client.acquire("step", time.time() + 1.0)
        frozen = time.monotonic()
        time.sleep(1.2)
        os.kill(agent.pid or 0, signal.SIGCONT)
        when, scope = told.get(timeout=LIMIT_S)
        assert (scope, when > frozen + 2.0) == ("step", True)
    finally:
        agent.kill()
        agent.join()


@pytest.mark.parametrize("expired", [SOON_S], indirect=True)
def test_a_signal_handler_may_ping_while_a_ping_waits(
    expired: Expired, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are sent, and neither raises."""
    watchdog.ping()
    client = watchdog._current
    write = client._write
    waits = iter([True])

    def slow(line: bytes) -> None:
        if next(waits, False):
            client._pinged = 0.0
            watchdog.ping()  # as a handler does in the middle of a wait
        write(line)

    monkeypatch.setattr(client, "_write", slow)
    client._pinged = 0.0
    watchdog.ping()
    assert not client._unsent
    expired.start()
    assert expired.wait().heartbeat


def test_a_full_fifo_delays_the_training_once(expired: Expired) -> None:
    """A full FIFO delays the training once, by about a second;
    what is not sent goes with a later call.
    """
    began = time.monotonic()
    for _ in range(3000):
        with watchdog.expires(after=NEVER_S, scope="step"):
            pass
    assert time.monotonic() - began < LIMIT_S
    expired.start()
    end = time.monotonic() + LIMIT_S
    while expired.server._timers or watchdog._current._unsent:  # type: ignore[union-attr]
        assert time.monotonic() < end
        with watchdog.expires(after=NEVER_S, scope="step"):
            time.sleep(0.01)
    assert expired.becomes()


def test_the_training_continues_without_its_agent(
    expired: Expired, caplog: pytest.LogCaptureFixture
) -> None:
    """The training continues, with one warning."""
    with watchdog.expires(after=NEVER_S):
        expired.start()
        expired.server.stop()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with watchdog.expires(after=NEVER_S):
                watchdog.ping()
    assert [
        record.message
        for record in caplog.records
        if "the watchdog of this process is off" in record.message
    ]
    assert len(caplog.records) <= 1


# --- processes ------------------------------------------------------------------------------------


def _too_slow() -> None:
    with watchdog.expires(after=SOON_S, scope="in a child"):
        time.sleep(NEVER_S)


@pytest.mark.parametrize("takes_number", [True, False], ids=["opens a file", "only closes"])
def test_a_deadline_lands_in_no_file_of_the_program(
    takes_number: bool, expired: Expired, tmp_path: Path
) -> None:
    """No line lands in a file that the program opens then,
    and the end of its block still reaches the agent.
    """
    expired.start()
    with watchdog.expires(NEVER_S, "of the program"):
        assert expired.becomes("block")
        client = watchdog._client()
        assert client is not None
        assert client._fifo is not None
        number = client._fifo.number
        os.close(number)
        if takes_number:
            own = os.open(tmp_path / "checkpoint", os.O_WRONLY | os.O_CREAT)
            assert os.dup2(own, number) == number
    assert expired.becomes()
    assert not takes_number or (tmp_path / "checkpoint").read_bytes() == b""


def test_deadlines_wait_for_a_free_descriptor(
    expired: Expired, caplog: pytest.LogCaptureFixture
) -> None:
    """Its deadlines are sent with a later call, and the watchdog stays on."""
    expired.start()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        watchdog.ping()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with watchdog.expires(NEVER_S):
        assert expired.becomes("block")
    assert not caplog.records


def test_a_forked_childs_deadline_counts_for_the_worker(expired: Expired) -> None:
    """A deadline of a process that a worker forked, like a data loader's, counts for the worker."""
    with watchdog.expires(after=NEVER_S):
        child = multiprocessing.get_context("fork").Process(target=_too_slow)
        child.start()
        expired.start()
        try:
            assert expired.wait().scope == "in a child"
        finally:
            child.kill()
            child.join()


def test_a_deadline_of_another_process_ends_nothing(
    expired: Expired, caplog: pytest.LogCaptureFixture
) -> None:
    """A deadline of a process that is not a worker of this node ends nothing;
    an invalid line is skipped.
    """
    expired.start()
    with expired.server.path.open("wb") as fifo, caplog.at_level(logging.WARNING):
        fifo.write(b'{"pid": 1}\n[]\nnonsense\n' + b"[" * 4_000 + b"\n")
        fifo.write(build_line(Timer(1, "1", "step", time.monotonic(), 0.1)))
        fifo.flush()
        wait_until(lambda: "(not killed: not a worker of this node)" in caplog.text)
    assert caplog.text.count("invalid line") == 4
    assert not expired.found


# --- the FIFO -------------------------------------------------------------------------------------


def test_the_fifo_is_where_the_user_told_torch(tmp_path: Path) -> None:
    """It is where the user told torch, else in the node's folder; `stop` removes it."""
    files = NodeFolder(tmp_path)
    mine = {"TORCHELASTIC_TIMER_FILE": str(tmp_path / "mine")}
    for found, path in [
        (open_timers(files, 2, {}), tmp_path / "timers-2.fifo"),
        (open_timers(files, 2, mine), tmp_path / "mine"),
    ]:
        assert found.path == path
        assert path.is_fifo()
        found.stop()
        assert not path.exists()


def test_an_unusable_path_falls_back_to_the_nodes_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a path too long, or one of another file, the node's folder is taken;
    without any room it is off.
    """
    other = tmp_path / "data"
    other.write_text("precious")
    for path in (str(tmp_path / ("x" * 300)), str(other)):
        server = open_timers(NodeFolder(tmp_path), 1, {"TORCHELASTIC_TIMER_FILE": path})
        assert server.path == tmp_path / "timers-1.fifo"
        server.stop()
    assert other.read_text() == "precious"
    assert open_timers(NodeFolder(other), 1, {}) is None, "no file can be made below a file"
    assert open_timers(None, 1, {}) is None
    assert caplog.text.count("the watchdog is off on this node: can't create a FIFO") == 2


def test_a_forked_child_keeps_no_fifo_open() -> None:
    """When the agent is gone no forked worker keeps its FIFO readable."""
    path = short_folder() / "timers.fifo"
    server = TimerServer(path)
    ready = multiprocessing.get_context("fork").Event()
    child = multiprocessing.get_context("fork").Process(target=ready.wait, args=(NEVER_S,))
    child.start()
    try:
        server.start([], lambda _: None)
        path.rename(f"{path}.kept")
        server.stop()
        with pytest.raises(OSError, match="No such device or address"):
            os.open(f"{path}.kept", os.O_WRONLY | os.O_NONBLOCK)
    finally:
        ready.set()
        child.join()


def test_a_file_under_the_fifos_number_gets_no_deadline(expired: Expired, tmp_path: Path) -> None:
    """A file that the program opens under the FIFO's number gets no deadline; the agent gets it."""
    expired.start()
    with watchdog.expires(NEVER_S):
        fifo = str(expired.server.path.resolve())
        numbers = [
            int(fd.name) for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd) == fifo
        ]
        (number,) = [number for number in numbers if number != expired.server._fifo]
        with (tmp_path / "data").open("wb") as data:
            os.dup2(data.fileno(), number)
            with watchdog.expires(NEVER_S):
                assert expired.becomes("block", "block")
        os.fstat(number)  # it's the program's, so it stays open
        os.close(number)
    assert expired.becomes()
    assert not (tmp_path / "data").read_bytes()
