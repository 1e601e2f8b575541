"""What a restart after a fault takes, in several ways: ``make bench-restart``.

    python lab/benchmarks/restarting.py [--runs N] [--ranks 4 8] [--kinds raise] [--ways ours] [PART
    ...]

One machine, gloo, the same training function; rank 1 fails in a collective's loop. The ways run in
turn:

- ours: `firstfault_inprocess.Wrapper`
- nvrx: ``nvidia_resiliency_ext.inprocess.Wrapper``, with the same timeouts; its process groups get
  a store that the parent hosts, so that no port is needed for an iteration
- torch: torch elastic's own agent with ``max_restarts=1``
- attempt: new processes, as a new attempt has them, without a scheduler's or an image's time

"seconds" is from the fault until the last remaining rank calls the function again, median and
worst; "lost" counts healthy ranks that did not, over all runs. "steps" does training steps of three
lengths with and without a wrapper, in turn. "leak" is one run with many faults.
"""

import argparse
import contextlib
import datetime as dt
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # started as a script

import torch  # noqa: E402 - only now all is found
import torch.distributed as dist  # noqa: E402
from torch.distributed.elastic.utils.distributed import get_free_port  # noqa: E402

import firstfault_inprocess as inprocess  # noqa: E402
from lab.benchmarks.soak import Held, held  # noqa: E402
from tests.inprocess.training import FAULTY, Run, fail, run, train  # noqa: E402

SOFT_S, HARD_S = 4.0, 7.0
KINDS = ("raise", "kill", "hang", "blocked")
LEAVES = {"kill", "blocked"}
"""After these the faulty rank is gone."""
TIMEOUTS = {
    "soft_timeout": SOFT_S,
    "hard_timeout": HARD_S,
    "barrier_timeout": 60.0,
    "heartbeat_timeout": 30.0,
    "monitor_process_interval": 0.1,
    "termination_grace_time": 0.5,
    "monitor_thread_interval": 0.05,
    "progress_watchdog_interval": 0.5,
}
STEPS = 1000
STEP_SIZES = {256: 21, 512: 15, 768: 9}
"""Rows of a step's matrix, and how many pairs are measured."""


def _ours(kind: str, ranks: int) -> tuple[float, int]:
    return _of_run(run(kind, ranks, **TIMEOUTS), kind, ranks)


def _nvrx(kind: str, ranks: int) -> tuple[float, int]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # a rank that its wrapper cannot interrupt would wait for its peers
    return _of_run(
        run(kind, ranks, worker=_nvrx_worker, most_s=5 * HARD_S, groups_port=server.port),
        kind,
        ranks,
    )


def _of_run(ended: Run, kind: str, ranks: int) -> tuple[float, int]:
    fault = max(event.seconds for event in ended.of("fault").values())
    return _result(
        {rank: event.seconds for rank, event in ended.of("enter", 1).items()},
        fault,
        kind,
        ranks,
    )


def _result(entered: dict[int, float], fault: float, kind: str, ranks: int) -> tuple[float, int]:
    """Return the seconds until the last rank called again, and how many healthy ranks did not."""
    healthy = set(range(ranks)) - ({FAULTY} if kind in LEAVES else set())
    seconds = max(
        (entered[rank] - fault for rank in healthy & entered.keys()), default=float("nan")
    )
    return seconds, len(healthy - entered.keys())


def _nvrx_worker(
    rank: int,
    world: int,
    port: int,
    work: tuple[str, dict[str, Any]],
    events: Any,
) -> None:
    from nvidia_resiliency_ext import inprocess as nvrx  # noqa: PLC0415 - only this way needs it

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    kind, given = work

    def say(what: str, value: Any = None) -> None:
        events.put((rank, what, value, time.monotonic()))

    options: dict[str, Any] = {
        name: dt.timedelta(seconds=value) for name, value in TIMEOUTS.items()
    }
    options |= {
        "completion_timeout": dt.timedelta(seconds=60),
        "last_call_wait": dt.timedelta(seconds=0.2),
    }

    def store() -> Any:
        return dist.TCPStore("127.0.0.1", given["groups_port"], wait_for_workers=False)

    def function(call: Any = None) -> Any:
        return train(call, kind, say, store)

    function.__annotations__["call"] = nvrx.CallWrapper
    say("done", nvrx.Wrapper(store_kwargs={"port": port}, **options)(function)())


def _elastic_worker(kind: str, file: str) -> None:
    rank = int(os.environ["RANK"])
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    _write(file, rank, "enter", restart)
    # processes start at different times
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60))
    dist.barrier()
    group = dist.new_group(timeout=dt.timedelta(seconds=SOFT_S))
    for step in range(30):
        ones = torch.ones(100)
        dist.all_reduce(ones, group=group)
        if not restart and step == 10 and rank == FAULTY:
            _write(file, rank, "fault", 0)
            fail(kind, None)
    dist.destroy_process_group()


def _write(file: str, rank: int, what: str, value: int) -> None:
    with Path(file).open("a") as opened:
        opened.write(f"{rank} {what} {value} {time.monotonic()}\n")


def _read(file: Path, ranks: int) -> tuple[float, int]:
    lines = [line.split() for line in file.read_text().splitlines()]
    fault = next((float(moment) for _, what, _, moment in lines if what == "fault"), 0.0)
    entered = {
        int(rank): float(moment)
        for rank, what, value, moment in lines
        if (what, value) == ("enter", "1")
    }
    return _result(entered, fault, "raise", ranks)


def _torch(kind: str, ranks: int) -> tuple[float, int]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "events"
        _launched(_elastic_worker, kind, file, ranks, max_restarts=1)
        return _read(file, ranks)


def _attempt(kind: str, ranks: int) -> tuple[float, int]:
    """Wait for the end of all processes, and start new ones."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "events"
        for work in (_elastic_worker, _second_attempt):
            _launched(work, kind, file, ranks, max_restarts=0)
        return _read(file, ranks)


def _launched(
    work: Callable[[str, str], None],
    kind: str,
    file: Path,
    ranks: int,
    *,
    max_restarts: int,
) -> None:
    """Run a function under torch's agent; ranks that have not called again are
    counted by their events.
    """
    from torch.distributed.elastic.multiprocessing.errors import (  # noqa: PLC0415 - only two ways need it
        ChildFailedError,
    )
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    rendezvous = {"run_id": work.__name__, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    config = LaunchConfig(
        1,
        1,
        ranks,
        max_restarts=max_restarts,
        monitor_interval=0.1,
        start_method="spawn",
        **rendezvous,
    )
    with contextlib.suppress(ChildFailedError):
        elastic_launch(config, work)(kind, str(file))


def _second_attempt(kind: str, file: str) -> None:
    del kind
    _write(file, int(os.environ["RANK"]), "enter", 1)


WAYS: dict[str, Callable[[str, int], tuple[float, int]]] = {
    "ours": _ours, "nvrx": _nvrx, "torch": _torch, "attempt": _attempt,
}  # fmt: skip


def restarts(runs: int, sizes: list[int], kinds: list[str], ways: list[str]) -> None:
    """Print a table of these ways."""
    print(
        f"\nrestarts: {runs} runs each, in turn; soft timeout {SOFT_S:g} s, hard timeout"
        f" {HARD_S:g} s"
    )
    print(f"{'ranks':>5} {'fault':8} {'way':8} {'median':>8} {'worst':>8} {'lost':>5}")
    for ranks in sizes:
        for kind in kinds:
            found: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
            for _ in range(runs):
                for way in ways:
                    if kind == "blocked" and way in {"torch", "attempt"}:
                        # torch's agent has no limit of its own, and its peers' timeout ends them as
                        # a hang
                        continue
                    found[way].append(WAYS[way](kind, ranks))
            for way, results in found.items():
                # not a number
                seconds = [value for value, _ in results if value == value]  # noqa: PLR0124
                if results:
                    middle = statistics.median(seconds) if seconds else float("nan")
                    worst = max(seconds, default=float("nan"))
                    lost = sum(count for _, count in results)
                    print(
                        f"{ranks:5} {kind:8} {way:8} {middle:8.2f} {worst:8.2f} {lost:5}",
                        flush=True,
                    )


def _step(state: list[torch.Tensor]) -> None:
    state[0] = torch.tanh(state[0] @ state[1])


def _steps(call: Any, size: int) -> tuple[float, float]:
    """Return the seconds, and the seconds of this process's CPU time, that the steps take."""
    torch.set_num_threads(1)
    state = [torch.rand(size, size), torch.rand(size, size) / 16]
    for _ in range(50):
        _step(state)
    began = time.perf_counter()
    cpu = time.process_time()
    for _ in range(STEPS):
        if call is not None:
            call.ping()
        _step(state)
    return time.perf_counter() - began, time.process_time() - cpu


def steps(size: int, rounds: int) -> None:
    """Print what a wrapper costs a thousand steps without a fault;
    a step multiplies two matrices of this size.
    """
    os.environ.update(
        RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(get_free_port()),
    )

    def wrapped(call: inprocess.CallWrapper | None = None) -> tuple[float, float]:
        return _steps(call, size)

    with_restarts = inprocess.Wrapper()(wrapped)
    plain, ours = [], []
    for number in range(rounds):
        if number % 2:
            ours.append(with_restarts())
        plain.append(_steps(None, size))
        if not number % 2:
            ours.append(with_restarts())
    wall, cpu = (
        statistics.median(one[index] / other[index] for one, other in zip(ours, plain, strict=True))
        for index in (0, 1)
    )
    each = statistics.median(seconds for seconds, _ in plain) / STEPS * 1e6
    more = (
        statistics.median(one[1] - other[1] for one, other in zip(ours, plain, strict=True)) * 1e3
    )
    print(
        f"steps: {STEPS} steps of {each:.0f} µs, {rounds} pairs; with a wrapper {wall:.4f} times"
        " the time, ",
        end="",
    )
    print(f"{cpu:.4f} times the CPU time ({more:+.1f} ms)", flush=True)


def _leaking(rank: int, port: int, faults: int, answers: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    seen: list[Held | None] = []

    def function(call: inprocess.CallWrapper | None = None) -> None:
        assert call is not None
        seen.append(held(os.getpid()))
        dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60))
        dist.all_reduce(torch.ones(10))
        if call.iteration < faults and rank == call.iteration % 2:
            raise ValueError("the fault")
        dist.all_reduce(torch.ones(10))
        dist.destroy_process_group()

    inprocess.Wrapper(last_call_wait=0.01)(function)()
    answers.put((rank, seen))


def leak(faults: int) -> None:
    """Print what two ranks hold after few and after many faults."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    port = get_free_port()
    began = time.monotonic()
    workers = [
        context.Process(target=_leaking, args=(rank, port, faults, answers)) for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"\nleak: {faults} faults in one run of two ranks, {time.monotonic() - began:.0f} s")
    while not answers.empty():
        rank, seen = answers.get()
        print(
            f"rank {rank} after 10 faults {seen[min(10, faults)]}, after {len(seen) - 1} {seen[-1]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="restarts, steps or leak; default: all",
    )
    given = parser.parse_args()
    parts = given.parts or ["restarts", "steps", "leak"]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch"
        f" {torch.__version__}"
    )
    if "steps" in parts:
        print()
        for size, rounds in STEP_SIZES.items():
            steps(size, rounds)
    if "leak" in parts:
        leak(given.faults)
    if "restarts" in parts:
        restarts(given.runs, given.ranks, given.kinds, given.ways)


if __name__ == "__main__":
    main()
