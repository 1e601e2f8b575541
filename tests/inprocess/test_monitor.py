"""The monitor process of a healthy rank: it ends with the call alone,
and a moment without resources costs no rank.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest

import firstfault_inprocess as inprocess
from firstfault_inprocess.detached import DetachedProcess, read_start_time
from tests.inprocess.training import FAST
from tests.nodes import forkserver
from tests.ports import get_free_port
from tests.processes import is_gone
from tests.waiting import SOON_S, wait_until

pytestmark = pytest.mark.jobs

ONCE = inprocess.initialize.RetryController(max_iterations=1)
OPTIONS = {**FAST, "heartbeat_interval": 0.1, "initialize": ONCE}
NOBODY = 65534


def _harm_monitor(found: Any) -> None:
    """In a call, kill the monitor process and the one that takes over,
    then let the next one start no thread.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    os.environ.update(RANK="0", WORLD_SIZE="1", **address)
    if os.geteuid() == 0:
        os.setuid(NOBODY)  # root may start threads beyond a limit

    @inprocess.Wrapper(**OPTIONS)
    def train(call: inprocess.CallWrapper | None = None) -> int:
        assert call is not None
        iteration = call._session.iteration
        assert iteration is not None

        def await_heartbeats() -> None:
            before = iteration.beats(0)
            wait_until(lambda: iteration.beats(0) > before + 2, "no heartbeat")

        for _ in range(2):
            await_heartbeats()
            killed = call._session.monitor.pid
            os.kill(killed, signal.SIGKILL)
            wait_until(
                lambda killed=killed: call._session.monitor.pid != killed, "no other takes over"
            )
        await_heartbeats()
        limited = call._session.monitor.pid
        resource.prlimit(limited, resource.RLIMIT_NPROC, (0, 0))
        await_heartbeats()
        assert call._session.monitor.pid == limited
        return limited

    monitor = train()
    wait_until(lambda: is_gone(monitor), "the monitor process lives on")
    found.put("all went well")


def test_heartbeats_continue_without_the_monitor_or_a_new_thread() -> None:
    """Heartbeats go on, from its standby or without a new thread,
    so that no peer takes the healthy rank for lost.
    """
    context = forkserver()
    found = context.SimpleQueue()
    rank = context.Process(target=_harm_monitor, args=(found,))
    rank.start()
    rank.join()
    assert rank.exitcode == 0
    assert found.get() == "all went well"


_REUSE = """
import os, signal, subprocess, sys, time
import firstfault_inprocess as inprocess
from firstfault_inprocess.wrap import CallWrapper

call = CallWrapper(inprocess.InProcessRestart())
monitor = call._session.monitor.pid
with open(f"/proc/{monitor}/task/{monitor}/children") as children:
    standby = [int(pid) for pid in children.read().split()]
for pid in (*standby, monitor):
    os.kill(pid, signal.SIGKILL)
os.waitid(os.P_PID, monitor, os.WEXITED)  # this is the first process of its namespace, and has adopted it
with open("/proc/sys/kernel/ns_last_pid", "w") as last:
    last.write(str(monitor - 1))
other = subprocess.Popen(["sleep", "100"])
assert other.pid == monitor, (other.pid, monitor)
call._session.monitor.close()
time.sleep(0.2)
assert other.poll() is None, "the end of a call has killed another process"
if standby:
    from firstfault_inprocess.detached import reap_adopted_helpers

    os.waitid(os.P_PID, standby[0], os.WEXITED | os.WNOWAIT)
    reap_adopted_helpers()
    assert not os.path.exists(f"/proc/{standby[0]}"), "a zombie stays"
    assert other.poll() is None
os._exit(7)
"""
_NAMESPACE = [
    "unshare",
    "--user",
    "--map-root-user",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
]


@pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run([*_NAMESPACE, "true"], capture_output=True, check=False).returncode,
    reason="no process namespace may be made here",
)
def test_the_end_of_a_call_kills_no_process_with_a_reused_pid() -> None:
    """If the monitor process has died, the end of the call kills no process that has
    its number since then.
    """
    address = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(get_free_port()),
    }
    command = [*_NAMESPACE, sys.executable, "-c", _REUSE]
    ended = subprocess.run(
        command,
        env={**os.environ, **address},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 7, ended.stderr


def test_a_process_with_another_start_time_gets_no_signal() -> None:
    """A process with another start time isn't the one that was meant: that one has died,
    and no signal is sent.
    """
    with subprocess.Popen(["sleep", "100"]) as other:
        started = read_start_time(other.pid)
        meant = DetachedProcess(other.pid, started - 1)
        assert meant.await_death(0)
        meant.send(signal.SIGKILL)
        assert other.poll() is None
        DetachedProcess(other.pid, started).send(signal.SIGKILL)
        assert other.wait() == -signal.SIGKILL


def test_a_living_process_is_not_dead_for_want_of_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without pidfds and for want of a descriptor, a living process isn't taken for dead."""
    monkeypatch.delattr(os, "pidfd_open")
    with subprocess.Popen(["sleep", "100"]) as other:
        process = DetachedProcess(other.pid)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            assert not process.await_death(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        process.send(signal.SIGKILL)
        assert process.await_death(SOON_S)
