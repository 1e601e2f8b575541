"""The recorder of an agent that is gone: it uploads what the node had, answers its workers,
and ends what they left.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from firstfault.layout import ERRORS, error_key_for
from firstfault.model import Phase, Receipt, Writer
from firstfault.recorder.client import RecorderClient, Target
from firstfault.recorder.folder import DEATH_DOCUMENT, DEATH_ROSTER_ENTRY, NodeFolder
from firstfault.recorder.orphans import find_orphans, kill_orphan_processes
from firstfault.recorder.spool import Spool
from firstfault.testing import make_error, make_presence
from firstfault.wire.documents import encode, encode_presence
from tests.prefix import Prefix
from tests.readers.recorders import HANG_S, SHORT_S, Gate, StartAgent, add_modules
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def write_last_words(folder: NodeFolder, round_number: int = 1) -> None:
    lost = make_error(
        None,
        at_ms=None,
        exception=None,
        message="the agent died",
        round=round_number,
    )
    folder.last_words.add(DEATH_DOCUMENT, encode(lost))
    folder.last_words.add(
        DEATH_ROSTER_ENTRY,
        encode_presence(make_presence(ranks=(0, 1), round=round_number, timestamp_ns=None)),
    )


def spool_failure(spool: Spool, rank: int, *, round_number: int = 1) -> str:
    failure = make_error(rank, round=round_number, monotonic_ns=time.monotonic_ns())
    name = error_key_for(failure)
    spool.add(name, encode(failure))
    return name


@pytest.mark.parametrize("kernel_tells", [True, False], ids=["pidfd", "polled"])
def test_the_recorder_uploads_the_death_of_a_killed_agent(
    agent: StartAgent,
    out: Prefix,
    kernel_tells: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The recorder uploads the agent's death, the spooled documents and the roster entry
    with receipts, and exits.
    """
    if not kernel_tells:
        (tmp_path / "sitecustomize.py").write_text("import os\ndel os.pidfd_open\n")
        add_modules(monkeypatch, tmp_path)
    dying = agent(out.uri)
    folder = dying.folder
    write_last_words(folder)
    open_name = spool_failure(folder.spool("1-0"), 0)
    other_name = spool_failure(folder.spool("1-1"), 1)
    done_name = spool_failure(folder.spool("1-2"), 2)
    done = Receipt(done_name, durable=True, fault_to_durable_ns=7, rank=2)
    folder.spool("1-2").add_receipt(done)
    withdrawn_name = spool_failure(folder.spool("1-3"), 3)
    folder.spool("1-3").withdraw(withdrawn_name)
    earlier_name = spool_failure(folder.spool("0-0"), 0, round_number=0)
    RecorderClient(folder).resources(HANG_S)

    before_ns = time.time_ns()
    before_monotonic_ns = time.monotonic_ns()
    dying.kill()
    dying.wait_for_recorder()
    after_ns = time.time_ns()

    (own,) = [failure for failure in out.failures() if failure.writer is Writer.RECORDER]
    assert before_ns <= (own.timestamp_ns or 0) <= after_ns
    assert (own.monotonic_ns or 0) >= before_monotonic_ns
    assert (own.message, own.place.round, own.rank) == ("the agent died", 1, None)
    assert own.resources.oom_kill in {None, 0}
    own_name = own.documents[0].name
    assert set(out.files()) == {own_name, open_name, other_name, earlier_name}

    (last,) = out.roster()
    assert (last.phase, last.ranks, last.place.round) == (Phase.FAILED, (0, 1), 1)
    assert before_ns <= (last.timestamp_ns or 0) <= after_ns
    receipts = {receipt.name: receipt for receipt in last.receipts}
    assert receipts.keys() == {own_name, open_name, other_name, done_name, withdrawn_name}
    assert receipts[done_name] == done
    assert (receipts[withdrawn_name].durable, receipts[withdrawn_name].withdrawn) == (False, True)
    for name, rank in ((own_name, None), (open_name, 0), (other_name, 1)):
        assert (receipts[name].durable, receipts[name].rank) == (True, rank)
        assert (receipts[name].fault_to_durable_ns or 0) > 0


def test_stderr_of_a_surviving_process_is_read_after_the_recorders_end(
    agent: StartAgent, out: Prefix, tmp_path: Path
) -> None:
    """Its stderr is read after the recorder's end, too, so it gets no EPIPE;
    a FIFO without a writer keeps nothing.
    """
    log = tmp_path / "stderr"  # capfd loses what comes while it is read
    with log.open("ab") as stderr:
        dying = agent(out.uri, stderr=stderr)
    written, unused = dying.folder.path / "stderr-0-0.fifo", dying.folder.path / "stderr-0-1.fifo"
    os.mkfifo(written)
    os.mkfifo(unused)
    reader = os.open(written, os.O_RDONLY | os.O_NONBLOCK)  # the agent's
    code = (
        "import sys; print(flush=True); input(); print('x' * 200_000, 'the end', file=sys.stderr)"
    )
    with (
        written.open("wb") as stderr,
        subprocess.Popen(  # a daemon, which the recorder does not end
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        ) as daemon,
    ):
        stderr.close()
        daemon.stdout.readline()
        dying.kill()
        dying.wait_for_recorder()
        os.close(reader)
        daemon.communicate(b"\n", HANG_S)  # it writes more than a FIFO holds
    assert daemon.returncode == 0
    wait_until(lambda: log.read_bytes().endswith(b"the end\n"), "its last words")
    assert log.read_bytes().count(b"x") == 200_000


def test_an_agent_that_exits_without_ending_its_recorder_is_dead(
    agent: StartAgent, out: Prefix
) -> None:
    """It counts as dead, also if it ended before its recorder began to watch."""
    dying = agent(out.uri)
    os.kill(dying.recorder_pid, signal.SIGSTOP)
    write_last_words(dying.folder)
    dying.process.stdin.close()
    dying.process.wait(HANG_S)
    os.kill(dying.recorder_pid, signal.SIGCONT)
    dying.wait_for_recorder()
    assert [failure.writer for failure in out.failures()] == [Writer.RECORDER]
    assert len(out.roster()) == 1


def test_unreadable_documents_are_uploaded_as_they_are(
    agent: StartAgent, out: Prefix, capfd: pytest.CaptureFixture[str]
) -> None:
    """Unreadable documents are uploaded as they are;
    an unreadable document about the agent affects no other.
    """
    dying = agent(out.uri)
    write_last_words(dying.folder)
    dying.folder.last_words.add(DEATH_DOCUMENT, b"\xff\xff\xff")
    dying.folder.spool("0-0").add("strange.pb", b"\xff\xff\xff")
    dying.kill()
    dying.wait_for_recorder()
    assert list(out.files()) == ["strange.pb"]
    assert [receipt.name for receipt in out.roster()[0].receipts] == ["strange.pb"]
    assert f"{DEATH_DOCUMENT} is not an error document" in capfd.readouterr().err
    early = agent(f"{out.uri}/early")
    early.folder.agent_spool.add("own.pb", b"\xff")
    early.kill()
    early.wait_for_recorder()
    other = Prefix(out.folder / "early")
    assert (list(other.files()), other.roster()) == (["own.pb"], [])


@pytest.mark.parametrize(
    "reason", ["cannot write", "the storage did not answer within 0.5 s"], ids=["fails", "hangs"]
)
def test_a_bad_storage_is_waited_for_until_the_deadline(
    agent: StartAgent,
    out: Prefix,
    gate: Gate,
    capfd: pytest.CaptureFixture[str],
    reason: str,
) -> None:
    """The recorder of a dead agent waits until its deadline;
    log and roster entry tell what was lost, and why.
    """
    hangs = "did not answer" in reason
    if not hangs:
        gate.open()
        (out.folder / "firstfault").mkdir(parents=True)
        (out.folder / ERRORS).touch()
    dying = agent(gate.uri(out), SHORT_S if hangs else HANG_S)
    write_last_words(dying.folder)
    name = spool_failure(dying.folder.spool("1-0"), 0)
    dying.kill()
    dying.wait_for_recorder()
    assert f"firstfault: recorder: {name} was not uploaded: {reason}" in capfd.readouterr().err
    lost = [receipt for entry in out.roster() for receipt in entry.receipts]
    assert ["cannot write" in receipt.error for receipt in lost if not receipt.durable] == (
        [] if hangs else [True] * 2
    )


def test_a_dead_agents_recorder_still_answers_its_workers(
    agent: StartAgent, out: Prefix, gate: Gate
) -> None:
    """The recorder of a dead agent still answers its workers."""
    dying = agent(gate.uri(out))
    write_last_words(dying.folder)
    dying.kill()
    wait_until(lambda: gate.waiting() == 1, "the last words at the gate")
    name = spool_failure(dying.folder.spool("1-0"), 0)
    file = dying.folder.spool("1-0").folder / name
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            RecorderClient(dying.folder).put,
            Target(f"{ERRORS}/{name}"),
            file,
            HANG_S,
        )
        wait_until(lambda: gate.waiting() == 2, "the worker's document at the gate")
        gate.open()
        assert asked.result().durable
    dying.wait_for_recorder()
    assert name in out.files()
    assert len(out.failures()) == 2


def test_a_dead_agents_recorder_waits_for_late_requests(agent: StartAgent, out: Prefix) -> None:
    """The recorder of a dead agent waits a moment for late requests of workers."""
    dying = agent(out.uri)
    write_last_words(dying.folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(HANG_S)
        connection.connect(str(dying.folder.socket))
        RecorderClient(dying.folder).resources(HANG_S)  # accepted after ours
        dying.kill()
        wait_until(lambda: bool(out.roster()), "the roster entry")
        connection.sendall(b'{"op": "resources"}\n')
        with connection.makefile("rb") as answer:
            assert b"oom_kill" in answer.read()
    dying.wait_for_recorder()


SLEEPS = "import signal, sys, time\nprint('ready', flush=True)\ntime.sleep(60)"
STUBBORN = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SLEEPS}"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Collect processes; end them after the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def _start(
    started: list[subprocess.Popen[str]], code: str = SLEEPS, **more: object
) -> subprocess.Popen[str]:
    process: subprocess.Popen[str] = subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        **more,
    )
    started.append(process)
    assert process.stdout.readline() == "ready\n"
    return process


def _node_context(folder: Path) -> str:
    return json.dumps({"node_folder": str(folder), "round": 0})


def _of_worker(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "FIRSTFAULT_LOCAL_RANK": "1",
        "FIRSTFAULT_RECORDING": _node_context(folder),
    }


def test_orphans_are_killed_but_daemons_live_on(
    agent: StartAgent, out: Prefix, started: list[subprocess.Popen[str]]
) -> None:
    """What ignores SIGTERM gets SIGKILL; a daemon, which began a session of its own, lives on."""
    dying = agent(out.uri)
    variables = _of_worker(dying.folder.path)
    worker, daemon = (
        _start(started, STUBBORN, env=variables, start_new_session=True) for _ in range(2)
    )
    dying.folder.note_sessions([worker.pid])
    dying.kill()
    dying.wait_for_recorder()
    assert worker.wait(HANG_S) == -signal.SIGKILL
    assert daemon.poll() is None


def test_a_workers_processes_are_known_by_variables_or_files(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    """A program has its worker's variables, and a fork its worker's files,
    wherever its stderr goes.
    """
    program = _start(started, env=_of_worker(tmp_path))
    with (tmp_path / "stacks-0-1.txt").open("a", encoding="utf-8") as file:
        fork = _start(started, pass_fds=(file.fileno(),))
    with (tmp_path / "stderr-0-1.fifo").open("w", encoding="utf-8") as file:
        talks = _start(started, stderr=file)
    assert find_orphans(tmp_path) == {program.pid, fork.pid, talks.pid}


def test_processes_that_others_started_are_left_alone(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    """A daemon, the agent's own children, and the workers of another node are left alone."""
    node, other = tmp_path / "node", tmp_path / "other"
    for folder in (node, other):
        folder.mkdir()
    _start(started, env=_of_worker(node), start_new_session=True)
    _start(started, env=_of_worker(other))
    _start(started, env={**os.environ, "FIRSTFAULT_RECORDING": _node_context(node)})
    (node / "stderr-0-1.fifo").touch()
    with (node / "stderr-0-1.fifo").open(encoding="utf-8") as file:
        _start(started, pass_fds=(file.fileno(),))
    with (node / "recorder.log").open("w", encoding="utf-8") as file:
        _start(started, pass_fds=(file.fileno(),))
    assert find_orphans(node) == set()
    kill_orphan_processes(node, 0.1)
    assert [process.poll() for process in started] == [None] * 5


def test_orphans_get_sigterm_then_sigkill(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    """They end by SIGTERM, and by SIGKILL if they ignore that for too long."""
    _start(started, env=_of_worker(tmp_path))
    kill_orphan_processes(tmp_path, HANG_S)
    assert find_orphans(tmp_path) == set()
    _start(started, STUBBORN, env=_of_worker(tmp_path))
    stopped = _start(started, env=_of_worker(tmp_path))
    stopped.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    kill_orphan_processes(tmp_path, 0.5)
    assert time.monotonic() - began < HANG_S
    assert find_orphans(tmp_path) == set()
