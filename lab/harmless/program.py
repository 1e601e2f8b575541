"""A rank of a job that firstfault must leave alone; torchrun or another launcher starts it.

HARMLESS_PLAN is the plan, HARMLESS_OUT the folder for what must be the same with and without
firstfault.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLAN = json.loads(os.environ["HARMLESS_PLAN"])
OUT = Path(os.environ["HARMLESS_OUT"])
RANK = int(os.environ["RANK"])
STEPS = 25
STEP_SECONDS = 0.04
LONGEST_SECONDS = 90.0
"""How long a rank trains that waits for a signal."""
DAEMON_SECONDS = 2.0
NATIVE_WAIT_MS = 3000
DATA = b"weights " * 64
_AGAIN = "HARMLESS_AGAIN"
_checks: list[Callable[[], None]] = []
"""What each habit looks at before the rank ends."""


def claim_start() -> int:
    """Return how often this rank has started before, and leave a file about this start."""
    number = 0
    while True:
        try:
            (OUT / f"start-{RANK}-{number}").touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return number


def say(line: str) -> None:
    """Print a line in one write: other ranks print to the same file at the same time."""
    sys.stdout.flush()
    os.write(1, f"{line}\n".encode())


def main() -> None:
    """Train, with the plan's habits and fault."""
    habits = PLAN["habits"]
    if "wrapper" in habits and _AGAIN not in os.environ:
        # A program that starts the training: the rank's own process never trains.
        done = subprocess.run(
            [sys.executable, __file__], env={**os.environ, _AGAIN: "1"}, check=False
        )
        sys.exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)
    if "exec" in habits and os.environ.get(_AGAIN, "") not in {"2", "1"}:
        if PLAN["communicates"] and PLAN["seed"] % 2:
            # some programs load it before they call exec
            import torch.distributed  # noqa: PLC0415, F401
        # no shell
        os.execve(sys.executable, [sys.executable, __file__], {**os.environ, _AGAIN: "2"})  # noqa: S606
    start = claim_start()
    for name in habits:
        if name in _HABITS:
            _HABITS[name](start)
    if PLAN["signals"] or PLAN["joins"]:
        signal.signal(signal.SIGTERM, lambda number, _frame: save_and_end(start, number))
    say(f"rank {RANK} begins, start {start}")
    os.write(2, b"rank %d writes to stderr\n" % RANK)
    train(start)
    for check in _checks:
        check()
    (OUT / f"result-{RANK}").write_text(f"{STEPS} steps\n")
    say(f"rank {RANK} ends")


def train(start: int) -> None:
    """Take the plan's steps; fail in the first start if the plan has a fault."""
    if PLAN["communicates"]:
        import torch  # noqa: PLC0415 - a rank without collectives needs no torch
        import torch.distributed as dist  # noqa: PLC0415 - as above

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(4))
    if "close_descriptors" in PLAN["habits"]:
        close_descriptors(start)
    (OUT / f"ready-{RANK}-{start}").touch()
    # Until a signal ends this rank: the plan's, or the agent's if another rank fails in this start.
    # Otherwise it would be chance whether this rank ends first.
    is_faulty = PLAN["faulty_rank"] == RANK
    waits = bool(PLAN["signals"])
    waits |= PLAN["joins"] and os.environ["WORLD_SIZE"] == "1"
    waits |= bool(PLAN["fault"]) and start == 0 and not is_faulty
    deadline = time.monotonic() + LONGEST_SECONDS
    step = 0
    while step < STEPS or waits:
        assert time.monotonic() < deadline, "no signal came"
        time.sleep(STEP_SECONDS)
        if PLAN["communicates"] and (step <= STEPS // 2 or not waits):
            dist.all_reduce(torch.ones(4))
        if step == STEPS // 2:
            if PLAN["native_wait"] and RANK == 0:
                wait_in_native_call()
            if PLAN["fault"] and start == 0 and is_faulty:
                fail(PLAN["fault"])
        step += 1
    if PLAN["communicates"]:
        dist.destroy_process_group()


def save_and_end(start: int, number: int) -> None:
    """Save a checkpoint for seconds, as a handler of SIGTERM does, and end."""
    deadline = time.monotonic() + PLAN["save_seconds"]
    while time.monotonic() < deadline:
        time.sleep(0.05)
    (OUT / f"checkpoint-{RANK}-{start}").write_bytes(DATA)
    if PLAN["handler"] == "die":
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if PLAN["handler"] == "_exit":
        os._exit(0)
    sys.exit(0)


class TrainingError(Exception):
    """An exception of this program."""


def fail(fault: str) -> None:
    """Fail in one of the ways of `lab.harmless.plans.FAULTS`."""
    (OUT / f"failed-{RANK}").touch()
    if fault == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "SIGABRT":
        os.abort()
    if fault == "exit 3":
        sys.exit(3)
    if fault == "_exit 7":
        os._exit(7)
    if fault == "subprocess":
        subprocess.run([sys.executable, "-c", "import sys; sys.exit(5)"], check=True)
    if fault == "assert":
        assert RANK < 0, "a check of the data"
    if fault == "custom":
        raise TrainingError("the shard was not complete")
    if fault == "chained":
        try:
            socket.create_connection(("127.0.0.1", 1), timeout=5)
        except OSError:
            # raises while another error is handled
            {}.no_such_name  # type: ignore[attr-defined]  # noqa: B018
    raise {
        "OSError": OSError(5, "Input/output error"),
        "RuntimeError": RuntimeError("the storage did not answer"),
        "TimeoutError": TimeoutError("no answer within 3 s"),
        "TypeError": TypeError("unsupported operand type(s) for +: 'int' and 'str'"),
        "ValueError": ValueError("a sample had no label"),
    }[fault]


def wait_in_native_call() -> None:
    """Hold Python's lock in a native call that a signal would interrupt."""
    library = ctypes.PyDLL(None, use_errno=True)
    result = library.poll(None, 0, NATIVE_WAIT_MS)
    (OUT / f"native-{RANK}").write_text(f"{result}\n")


# --- habits ---------------------------------------------------------------------------------------


def _atexit(start: int) -> None:
    atexit.register((OUT / f"atexit-{RANK}-{start}").touch)


def _children(start: int) -> None:
    """Fork, start a program and use a pool of processes."""
    child = os.fork()
    if not child:
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    done = subprocess.run(
        [sys.executable, "-c", "print(6 * 7)"],
        capture_output=True,
        text=True,
        check=True,
    )
    (OUT / f"children-{RANK}-{start}").write_text(f"{status} {done.stdout}")


def _clear_environment(_start: int) -> None:
    if not PLAN["communicates"]:
        os.environ.clear()


def close_descriptors(start: int) -> None:
    """Close what this program didn't open, and open data files under the same numbers."""
    if PLAN["communicates"]:
        return  # the sockets of torch would be closed, too
    os.closerange(3, 1024)
    files = [
        os.open(OUT / f"data-{RANK}-{start}-{number}", os.O_RDWR | os.O_CREAT)
        for number in range(40)
    ]
    for descriptor in files:
        os.write(descriptor, DATA)


def _custom_excepthook(_start: int) -> None:
    def hook(kind: type[BaseException], error: BaseException, _traceback: Any) -> None:
        (OUT / f"hook-{RANK}").write_text(f"{kind.__name__}: {error}\n")

    sys.excepthook = hook


def _daemon(start: int) -> None:
    """Start a daemon that outlives this rank."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    time.sleep(DAEMON_SECONDS)
    (OUT / f"daemon-{RANK}-{start}").touch()
    os._exit(0)


def _few_descriptors(_start: int) -> None:
    used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (used + 64, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


def _handle_errors(_start: int) -> None:
    """Raise and handle many errors, also one that would end the program."""
    for number in range(500):
        with contextlib.suppress(ZeroDivisionError, SystemExit):
            if number == 250:
                sys.exit(9)
            _ = 1 / 0


def _many_threads(start: int) -> None:
    """Start threads until the system refuses one, keep them for a while, and end them."""
    ending = threading.Event()
    threads = []
    with contextlib.suppress(RuntimeError):
        for _ in range(200):
            thread = threading.Thread(target=ending.wait)
            thread.start()
            threads.append(thread)
    time.sleep(1.0)
    ending.set()
    for thread in threads:
        thread.join()
    (OUT / f"threads-{RANK}-{start}").touch()


def _much_output(_start: int) -> None:
    for number in range(2000):
        sys.stdout.write(f"rank {RANK} line {number} {'x' * 200}\n")
    sys.stdout.flush()
    for _ in range(200):
        os.write(2, b"y" * 999 + b"\n")


def _own_handlers(start: int) -> None:
    """Count all signals that reach this rank, but those of its end and of its children."""
    counts: dict[str, int] = {}
    ends = {signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}

    def count(number: int, _frame: object) -> None:
        counts[str(number)] = counts.get(str(number), 0) + 1

    for number in signal.valid_signals() - ends:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, count)

    def check() -> None:
        (OUT / f"signals-{RANK}-{start}").write_text(json.dumps(counts))

    _checks.append(check)


def _replace_stderr(_start: int) -> None:
    log = os.open(OUT / f"stderr-{RANK}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 2)
    os.close(log)


def _thread_at_exit(start: int) -> None:
    """Let a thread work until after the main thread's end."""

    def work() -> None:
        threading.main_thread().join()
        time.sleep(0.5)
        (OUT / f"thread-{RANK}-{start}").touch()

    threading.Thread(target=work).start()


_HABITS: dict[str, Callable[[int], None]] = {
    "atexit": _atexit,
    "children": _children,
    "clear_environment": _clear_environment,
    "custom_excepthook": _custom_excepthook,
    "daemon": _daemon,
    "few_descriptors": _few_descriptors,
    "handle_errors": _handle_errors,
    "many_threads": _many_threads,
    "much_output": _much_output,
    "own_handlers": _own_handlers,
    "replace_stderr": _replace_stderr,
    "thread_at_exit": _thread_at_exit,
}


if __name__ == "__main__":
    main()
