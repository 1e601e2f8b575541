"""Stacks of real processes that hang or crash."""

import ctypes
import itertools
import linecache
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from firstfault.recorder.folder import NodeFolder, WorkerFiles, get_stack_tail
from firstfault_torch.node.stacks import (
    ask_for_stacks,
    register_stacks,
    restore_stacks,
    write_unasked,
)

pytestmark = [pytest.mark.slow, pytest.mark.forks]

Start: TypeAlias = Callable[..., multiprocessing.process.BaseProcess]
LONG_S = 60.0
SHORT_S = 0.5
SOON_S = 30.0
"""The longest wait for what happens, on a busy machine;
what does not happen is waited for `LONG_S`.
"""
ROUND = 2
SIGNAL = signal.SIGRTMIN + 12

LIBC = ctypes.PyDLL(None)
"""Its functions hold the GIL while they run."""


def _files(folder: Path, local_rank: int = 0) -> WorkerFiles:
    return NodeFolder(folder).worker(ROUND, local_rank)


def in_python() -> None:
    for _ in itertools.count():
        os.getpid()


def in_c_without_the_lock() -> None:
    """Wait as a collective does."""
    time.sleep(LONG_S)


def in_c_with_the_lock() -> None:
    """Wait while holding the GIL."""
    while True:
        LIBC.sleep(int(LONG_S))  # a signal ends it


def in_two_threads() -> None:
    threading.Thread(target=in_c_without_the_lock, daemon=True).start()
    in_python()


def in_two_places() -> None:
    """Be busy in one place until SIGUSR1 arrives, then in another."""
    arrived: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: arrived.append(number))
    while not arrived:
        os.getpid()
    in_python()


def in_a_segfault() -> None:
    ctypes.string_at(0)


def in_an_abort() -> None:
    os.abort()


def in_a_kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _run(where: Callable[[], None], prepare: Callable[[], None], ready: Any) -> None:
    prepare()
    ready.set()
    where()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., multiprocessing.process.BaseProcess]]:
    """Start a process that hangs or crashes; none survives the test."""
    started: list[multiprocessing.process.BaseProcess] = []
    context = multiprocessing.get_context("fork")

    def begin(
        where: Callable[[], None],
        *,
        local_rank: int = 0,
        offers: bool = True,
        then: Callable[[], None] = bool,
    ) -> multiprocessing.process.BaseProcess:
        ready = context.Event()

        def prepare() -> None:
            if offers:
                register_stacks(_files(tmp_path, local_rank))
            then()

        started.append(context.Process(target=_run, args=(where, prepare, ready)))
        started[-1].start()
        assert ready.wait(LONG_S)
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.join()


def _ask_until(folder: Path, pids: dict[int, int | None], text: str) -> dict[int, str]:
    """Ask until all stacks contain the text; return the last stacks."""
    deadline = time.monotonic() + LONG_S
    while True:
        stacks = ask_for_stacks(NodeFolder(folder), ROUND, pids, LONG_S)  # type: ignore[arg-type]
        if all(text in stacks[rank] for rank in pids):
            return stacks
        assert time.monotonic() < deadline, stacks


@pytest.mark.parametrize(
    ("where", "lines"),
    [
        (in_python, ("for _ in itertools.count():", "os.getpid()")),
        (in_c_without_the_lock, ("time.sleep(LONG_S)",)),
        (in_c_with_the_lock, ("LIBC.sleep(int(LONG_S))  # a signal ends it",)),
    ],
)
def test_a_stack_names_file_line_and_function(
    where: Callable[[], None],
    lines: tuple[str, ...],
    start: Start,
    tmp_path: Path,
) -> None:
    """The stack names file, line and function, also where no Python code can run;
    the process continues.
    """
    process = start(where)
    began = time.monotonic()
    stacks = _ask_until(tmp_path, {0: process.pid}, where.__name__)
    found = re.search(rf'File "{re.escape(__file__)}", line (\d+) in {where.__name__}', stacks[0])
    assert time.monotonic() - began < SOON_S
    assert linecache.getline(__file__, int(found[1])).strip() in lines
    assert process.is_alive()


def test_a_second_answer_has_the_current_stack_only(start: Start, tmp_path: Path) -> None:
    """The answer is where it is now, without the stack of the first answer,
    which is in the same file.
    """
    process = start(in_two_places)
    first = _ask_until(tmp_path, {0: process.pid}, "in_two_places")
    os.kill(process.pid or 0, signal.SIGUSR1)
    second = _ask_until(tmp_path, {0: process.pid}, "in_python")
    assert [text[0].count("most recent call first") for text in (first, second)] == [1, 1]


def test_each_process_shows_all_its_threads(start: Start, tmp_path: Path) -> None:
    """Several processes are asked at once, and each shows all its threads."""
    pids = {rank: start(in_two_threads, local_rank=rank).pid for rank in (0, 1)}
    stacks = _ask_until(tmp_path, pids, "in in_python")
    for stack in stacks.values():
        assert "in in_c_without_the_lock" in stack
        assert "in in_python" in stack
        assert stack.count("most recent call first") >= 2


def test_an_unregistered_process_gets_no_signal(start: Start, tmp_path: Path) -> None:
    """A process that has not registered, or of another round, gets no signal,
    which would kill it.
    """
    silent = start(in_python, offers=False)
    other = start(in_python, local_rank=1)
    began = time.monotonic()
    assert ask_for_stacks(NodeFolder(tmp_path), ROUND, {0: silent.pid}, LONG_S) == {}
    assert ask_for_stacks(NodeFolder(tmp_path), ROUND + 1, {1: other.pid}, LONG_S) == {}
    assert time.monotonic() - began < SOON_S, "no process is waited for"
    silent.join(0.2)
    assert silent.is_alive()
    os.kill(silent.pid or 0, signal.SIGRTMIN + 12)
    silent.join(LONG_S)
    assert silent.exitcode == -(signal.SIGRTMIN + 12), "what it would have done"


def reset_handlers() -> None:
    """Reset all signals, as Lightning's ``fit`` does at its end."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    # Python lists only the first and the last real-time signal
    for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
        signal.signal(number, signal.SIG_DFL)


def test_a_process_without_handler_gets_no_signal(start: Start, tmp_path: Path) -> None:
    """One whose handlers were reset is not sent the signal, which would kill it;
    one that is gone is left out.
    """
    process = start(in_python, then=reset_handlers)
    there = start(in_python, local_rank=1)
    gone = start(in_a_kill, local_rank=2)
    gone.join(LONG_S)
    pids = {0: process.pid or 0, 1: there.pid or 0, 2: gone.pid or 0}
    assert set(ask_for_stacks(NodeFolder(tmp_path), ROUND, pids, LONG_S)) == {1}
    process.join(0.2)
    assert process.is_alive()


def test_a_programs_own_handler_stays(tmp_path: Path) -> None:
    """A program that uses the signal itself keeps its handler,
    and the process writes its stacks unasked.
    """
    process = os.fork()
    if not process:
        calls: list[int] = []
        signal.signal(SIGNAL, lambda number, _: calls.append(number))
        register_stacks(_files(tmp_path))
        os.kill(os.getpid(), SIGNAL)
        write_unasked(_files(tmp_path))
        os._exit(len(calls))
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
    assert "test_a_programs_own_handler_stays" in get_stack_tail(_files(tmp_path).stacks)


def test_stacks_are_written_unasked_where_no_signal_can_ask(tmp_path: Path) -> None:
    """A process whose handler is gone writes its stacks itself;
    one that has a handler waits for the signal.
    """

    def answer(offers: bool) -> None:
        if offers:
            register_stacks(_files(tmp_path, int(offers)))
        write_unasked(_files(tmp_path, int(offers)))

    for offers in (False, True):
        process = multiprocessing.get_context("fork").Process(target=answer, args=(offers,))
        process.start()
        process.join(LONG_S)
        assert process.exitcode == 0
    assert "in answer" in get_stack_tail(_files(tmp_path).stacks)
    assert not get_stack_tail(_files(tmp_path, 1).stacks)


def test_a_suspended_process_is_given_up_at_the_limit(start: Start, tmp_path: Path) -> None:
    """A suspended process is given up at the time limit; the others' stacks are returned."""
    frozen = start(in_python)
    there = start(in_python, local_rank=1)
    os.kill(frozen.pid or 0, signal.SIGSTOP)
    _ask_until(tmp_path, {1: there.pid}, "in_python")
    began = time.monotonic()
    stacks = ask_for_stacks(NodeFolder(tmp_path), ROUND, {0: frozen.pid, 1: there.pid}, SHORT_S)
    assert SHORT_S <= time.monotonic() - began < SOON_S
    assert set(stacks) == {1}


@pytest.mark.parametrize(
    ("where", "number", "title"),
    [
        (in_a_segfault, signal.SIGSEGV, "Fatal Python error: Segmentation fault"),
        (in_an_abort, signal.SIGABRT, "Fatal Python error: Aborted"),
        (in_a_kill, signal.SIGKILL, ""),
    ],
)
def test_a_crash_leaves_its_stacks_and_still_kills(
    where: Callable[[], None],
    number: signal.Signals,
    title: str,
    start: Start,
    tmp_path: Path,
) -> None:
    """A crash leaves its stacks and still kills the process; a SIGKILL leaves none."""
    process = start(where)
    process.join(LONG_S)
    assert process.exitcode == -number
    stack = get_stack_tail(_files(tmp_path).fatal_stacks)
    assert stack.partition("\n")[0] == title
    assert (f"in {where.__name__}" in stack) is bool(title)


def test_without_the_nodes_folder_nothing_is_registered(tmp_path: Path) -> None:
    """Without the node's folder nothing is registered, and the error names that."""
    with pytest.raises(FileNotFoundError):
        register_stacks(_files(tmp_path / "gone"))
    assert ask_for_stacks(NodeFolder(tmp_path / "gone"), ROUND, {0: os.getpid()}, LONG_S) == {}


# --- a program that closes descriptors ------------------------------------------------------------


def find_descriptor(file: Path) -> int:
    """Return the descriptor of this process that is a file."""
    (found,) = [
        fd for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd) == str(file.resolve())
    ]
    return int(found.name)


def _open_data(folder: Path, number: int = 100) -> None:
    """Close all descriptors, as a daemon does, and open files of the program's own."""
    os.closerange(3, min(1 << 20, os.sysconf("SC_OPEN_MAX")))
    for name in range(number):
        os.open(folder / f"{name}.data", os.O_WRONLY | os.O_CREAT)


def _written(folder: Path) -> list[str]:
    return [file.name for file in folder.glob("*.data") if file.stat().st_size]


def test_a_fatal_signal_writes_to_no_file_of_the_program(start: Start, tmp_path: Path) -> None:
    """The program's own files stay as they are: it isn't asked,
    and a fatal signal writes nothing to them.
    """
    running = start(in_python, then=lambda: _open_data(tmp_path))
    assert ask_for_stacks(NodeFolder(tmp_path), ROUND, {0: running.pid or 0}, SHORT_S) == {}
    crashed = start(in_a_segfault, local_rank=1, then=lambda: _open_data(tmp_path))
    crashed.join(LONG_S)
    assert crashed.exitcode == -signal.SIGSEGV
    assert _written(tmp_path) == []


def test_a_reused_descriptor_is_not_written_to(start: Start, tmp_path: Path) -> None:
    """A file of the program under the very number isn't written to;
    the stacks get another one when the agent asks.
    """
    files = _files(tmp_path)

    def take_numbers() -> None:
        for file in (files.stacks, files.fatal_stacks):
            os.dup2(
                os.open(tmp_path / f"{file.stem}.data", os.O_WRONLY | os.O_CREAT),
                find_descriptor(file),
            )

    taken = start(in_python, then=take_numbers)
    assert ask_for_stacks(NodeFolder(tmp_path), ROUND, {0: taken.pid or 0}, SHORT_S) == {}
    taken.kill()

    def take_and_restore() -> None:
        take_numbers()
        restore_stacks(files)

    restored = start(in_python, then=take_and_restore)
    _ask_until(tmp_path, {0: restored.pid}, "in_python")
    crashed = start(in_a_segfault, then=take_and_restore)
    crashed.join(LONG_S)
    assert "in in_a_segfault" in get_stack_tail(files.fatal_stacks)
    assert _written(tmp_path) == []


def test_descriptors_that_are_closed_are_opened_again(start: Start, tmp_path: Path) -> None:
    """A program that closes all descriptors can be asked again after the agent's next question."""

    def close_and_restore() -> None:
        _open_data(tmp_path)
        restore_stacks(_files(tmp_path))

    process = start(in_python, then=close_and_restore)
    _ask_until(tmp_path, {0: process.pid}, "in_python")
    assert _written(tmp_path) == []
