"""A job that makes no progress: its agents tell for which rank the others wait, keep a record,
and may end it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from firstfault.cli import main
from firstfault.errors import UsageError
from firstfault.layout import LIVE, ROSTER, build_watch_mark_name
from firstfault.model import (
    CollectiveProgress,
    ExpiredDeadline,
    Place,
    RestartKind,
    StackDump,
    WorkerError,
    Writer,
)
from firstfault.model.failure import Collective
from firstfault.strategies.reasons import describe_positions
from firstfault_torch import Hang, Options, watchdog
from firstfault_torch.failures.failure_records import ErrorClass, failure_record
from firstfault_torch.hang import StallWatch
from firstfault_torch.hang.procfs import (
    DESCRIPTOR_CALLS,
    describe_wait,
    measure_usage,
    read_kernel_state,
)
from firstfault_torch.hang.stall_report import WorkerObservation, build_stall_report, to_files
from firstfault_torch.options import parse_hang
from firstfault_torch.protocol.stall_limits import build_stall_limits
from firstfault_torch.protocol.stall_messages import StallReport
from firstfault_torch.protocol.stall_progress import ProgressTracker
from tests.http_receiver import serve_receiver
from tests.nodes import Job
from tests.plugin.running import DEADLINE_S
from tests.torch_agent.trainings import stalling
from tests.waiting import wait_until

SECONDS = 3.0


def test_a_stall_is_printed_recorded_and_not_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes tell the rank, its line, why it is not ended, and when it goes on;
    one keeps a record, and notifies.
    """
    options = Options(hang=Hang(warn_seconds=SECONDS, end_seconds=SECONDS))
    with serve_receiver() as webhook, Job(tmp_path, stalling, ("paused",), options=options) as job:
        monkeypatch.setenv("FIRSTFAULT_WEBHOOK", webhook.url)
        job.start(2)
        logs = partial(tmp_path.glob, "*.err.log")
        wait_until(
            lambda: ["read_shard" in log.read_text() for log in logs()] == [True, True],
            seconds=DEADLINE_S,
        )
        assert not (tmp_path / "0" / LIVE).exists()
        (tmp_path / "0" / ROSTER / build_watch_mark_name(int(time.time() * 1000) + 600_000)).touch()
        wait_until(lambda: _live(tmp_path) == [(41, 41, 0), (40, 40, 1)], seconds=DEADLINE_S)
        job.go(0)
        ended = job.end()
    assert ended.codes == [0, 0]
    events = [json.loads(request.body)["data"] for request in webhook.received]
    told = [event["first_line"][:14] for event in events if "in read_shard" in event["headline"]]
    assert told == ["no progress fo", "progress resum"]
    for log in logs():
        text = log.read_text()
        assert ": 1 of 2 ranks wait in all_reduce #41 (default_pg), rank 1 (node-" in text, text
        assert "in read_shard, for at least " in text
        assert "not ending the attempt: rank 1 is in watchdog.pause() since trainings.py:" in text
        assert "firstfault: progress resumed after " in text
    # a busy machine may stand still by itself
    (record,) = [each for each in ended.job.restarts if "in read_shard" in each.headline]
    assert (record.kind, record.restart, record.rank) == (RestartKind.STALL, False, 1)
    assert record.lost_seconds is not None
    assert record.lost_seconds >= SECONDS
    with pytest.raises(SystemExit, match=r"0|EXIT\.OK"):  # Python 3.10 prints the name
        main(["show", "--recovered", "--json", str(tmp_path / "0")])
    stalls = json.loads(capsys.readouterr().out)["stalls"]
    assert [stall["rank"] for stall in stalls if "in read_shard" in stall["headline"]] == [1]


def _live(folder: Path) -> list[tuple[int, int, int]]:
    """Return the most and the fewest collectives, and whose these are,
    of each node in the live view.
    """
    file = folder / "0" / LIVE
    nodes = json.loads(file.read_text())["nodes"] if file.exists() else []
    return sorted(
        ((node["collectives"], node["least"], node["behind"]) for node in nodes), reverse=True
    )


def test_a_hang_ends_with_the_straggler_killed(tmp_path: Path) -> None:
    """The rank that the others wait for is killed by its agent, and the verdict names it,
    the time and the line.

    As long as it uses the CPU, it is killed later.
    """
    with Job(
        tmp_path,
        stalling,
        ("computes",),
        options=Options(hang=Hang(None, SECONDS, 2 * SECONDS)),
    ) as job:
        ended = job.start(2).end()
    assert ended.codes == [1, 1]
    assert "not ending the attempt: rank 1 " in ended.logs
    verdict = ended.verdict
    assert (verdict.category, verdict.ranks) == ("hang", (1,)), ended.logs
    assert verdict.headline.startswith("hang, rank 1 on node-")
    assert ": no progress for " in verdict.headline
    assert verdict.headline.endswith(" in read_shard")
    assert ended.job.progress.collectives >= 40
    assert 0 < ended.job.progress.seconds < DEADLINE_S


ONE_NODE = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2}


def test_a_hang_in_the_first_steps_is_reported_in_time(tmp_path: Path) -> None:
    """A rank that sleeps after a few steps is reported in time;
    Ctrl-C then says where each rank was.
    """
    options = Options(hang=Hang(warn_seconds=SECONDS))
    with Job(tmp_path, stalling, ("early",), options=options, config=ONE_NODE) as job:
        log = tmp_path / "node-0.err.log"
        job.start()
        wait_until(
            lambda: log.exists() and " since the first steps: " in log.read_text(),
            seconds=DEADLINE_S,
        )
        os.kill(cast("int", job.processes[0].pid), signal.SIGINT)
        ended = job.end()
    assert "may still be loading" not in ended.logs, "it sleeps"
    assert re.search(
        r"no progress for [345] s since the first steps: 1 of 2 ranks wait in all_reduce #\d",
        ended.logs,
    )
    assert re.fullmatch(
        r"interrupted \(SIGINT\), node-0: no progress for \d+ s: rank 1 was at trainings.py:\d+ in"
        r" read_shard, "
        r"rank 0 waited in all_reduce #\d \(default_pg\)",
        ended.verdict.headline,
    )


def test_a_job_that_compiles_is_not_reported(tmp_path: Path) -> None:
    """A rank that computes in its first steps for twice the warning's time isn't reported."""
    options = Options(hang=Hang(warn_seconds=SECONDS))
    with Job(
        tmp_path,
        stalling,
        ("compiles", 2 * SECONDS),
        options=options,
        config=ONE_NODE,
    ) as job:
        ended = job.start().end()
    assert ended.codes == [0]
    assert "no progress" not in ended.logs


# --- what is told ---------------------------------------------------------------------------------

WAITS = """Thread 0x1 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 3 in all_reduce
  File "/app/train.py", line 7 in step
"""
SYNCHRONIZES = """Thread 0x1 (most recent call first):
  File "/x/site-packages/torch/cuda/__init__.py", line 3 in synchronize
  File "/app/train.py", line 9 in step
"""
READS = """Thread 0x1 (most recent call first):
  File "/app/data/loader.py", line 88 in read_shard
    chunk = f.read(n)
  File "/app/train.py", line 5 in step
"""


def worker(
    rank: int,
    *,
    begun: int = 41,
    stack: str = WAITS,
    of: int = 8,
    backend: str = "nccl",
    call: str = "all_reduce",
) -> WorkerError:
    """Return what the agent of a rank hands in: it has begun so many collectives, and ended 40."""
    calls = f"{backend}:{call}"
    last = tuple(Collective(number, calls, state="scheduled") for number in range(41, begun + 1))
    return failure_record(
        ErrorClass.WORKER_FAILURE,
        Place(
            rank=rank,
            local_rank=rank % 2,
            node=f"node-{rank // 2}",
            group_rank=rank // 2,
            world_size=of,
        ),
        code="USER:Hang",
        category="hang",
        message="the job makes no progress",
        writer=Writer.AGENT,
        collectives=(CollectiveProgress("default_pg", calls, begun, 40, last, tuple(range(of))),),
        stack_dumps=(StackDump(100 + rank, rank, stack),),
        expired=ExpiredDeadline("", 61),
    )


def _told(
    odd: dict[int, WorkerError], facts: dict[int, WorkerObservation] | None = None, **how: Any
) -> StallReport:
    """Return what is told of eight ranks without those of missing nodes;
    ranks in `odd` do not wait as others do.
    """
    known = {rank: WorkerObservation(rank // 2, rank % 2, 58.0) for rank in range(8)} | (
        facts or {}
    )
    ranks = [rank for rank in range(8) if rank // 2 not in how.get("missing", ())]
    return build_stall_report(
        to_files((odd.get(rank, worker(rank)), known[rank]) for rank in ranks), 61.0, **how
    )


def test_a_stall_line_names_the_straggler_and_its_line() -> None:
    """The line tells who waits in what, for whom, and how far that one came;
    the next one where it is.
    """
    told = _told({5: worker(5, begun=40, stack=READS)})
    assert told.lines == (
        (
            "no progress for 61 s: 7 of 8 ranks wait in all_reduce #41 (default_pg), rank 5"
            " (node-2) has called 40"
        ),
        "rank 5: loader.py:88 in read_shard, for at least 58 s (chunk = f.read(n))",
    )
    assert (told.ranks, told.node, told.workers_to_kill) == ((5,), "node-2", ())
    told = _told({5: worker(5, call="broadcast")})
    assert told.lines[0].endswith(
        "in all_reduce #41 (default_pg), rank 5 (node-2) has called broadcast instead"
    )


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (
            dict.fromkeys(range(4, 8), "broadcast"),
            (
                "ranks 0, 1, 2, 3 in all_reduce at distributed_c10d.py:3 in all_reduce, ranks 4, 5, 6, 7 in"
                " broadcast at distributed_c10d.py:3 in all_reduce"
            ),
        ),
        (
            dict.fromkeys(range(3, 8), "broadcast") | {7: "barrier"},
            (
                "ranks 0, 1, 2 in all_reduce at distributed_c10d.py:3 in all_reduce, ranks 3, 4, 5, 6 in broadcast"
                " at distributed_c10d.py:3 in all_reduce, rank 7 in barrier at distributed_c10d.py:3 in all_reduce"
            ),
        ),
    ],
)
def test_no_rank_is_blamed_for_different_collectives(odd: dict[int, str], text: str) -> None:
    """Without a majority all calls are listed, with their places, and no rank is blamed."""
    told = _told({rank: worker(rank, call=call) for rank, call in odd.items()})
    assert told.lines == (
        (
            "no progress for 61 s: 8 of 8 ranks wait in different collectives as #41 (default_pg):"
            f" {text}"
        ),
    )
    assert told.ranks == ()


RETURNED = """Thread 0x00007f13c9ffb740 (most recent call first):
  File "/usr/lib/python3.11/multiprocessing/synchronize.py", line 349 in wait
  File "/x/site-packages/torch/distributed/elastic/multiprocessing/api.py", line 708 in _wrap
  File "<string>", line 1 in <module>
"""


def test_a_rank_whose_function_had_returned_has_no_line() -> None:
    """It's at no line, it isn't loading, and the record of the stall has the reason."""
    told = _told({5: worker(5, begun=40, stack=RETURNED)}, is_starting=True)
    assert told.lines[1] == "rank 5: its function had returned, for at least 58 s"
    assert told.straggler == "rank 5: its function had returned while its peers waited for it"
    told = _told({5: worker(5, begun=40, stack=READS)}, COMPUTES, is_starting=True)
    assert "may still be loading or compiling" in told.lines[1]
    assert told.straggler == "rank 5 at loader.py:88 in read_shard"


def test_an_early_report_says_when_the_attempt_ends() -> None:
    """A report that comes before the end has when that is,
    and why it's later in the first steps.
    """
    odd = {5: worker(5, begun=40, stack=READS)}
    assert _told(odd, end_seconds=300).lines[-1] == "the attempt ends after 300 s without progress"
    told = _told(odd, end_seconds=40, is_starting=True)
    assert (
        told.lines[-1]
        == "the attempt ends after 120 s without progress (3 x 40 s in the first steps)"
    )
    assert told.lines[:-1] == _told(odd, is_starting=True).lines
    for is_busy in (True, False):
        facts = {5: WorkerObservation(2, 1, 58.0, is_busy=is_busy)}
        line = _told(odd, facts, is_starting=True).lines[1]
        assert line.endswith(", may still be loading or compiling") == is_busy, line
    assert (
        _told(odd, end_seconds=40, ends_attempt=True).lines[-1]
        == "ending the attempt because of this stall"
    )
    assert _told(odd, end_seconds=300, missing=(1,)).lines == _told(odd, missing=(1,)).lines, (
        "it isn't ended"
    )


@pytest.mark.parametrize(
    ("waiting", "text"),
    [
        ((0,), "rank 0 waited"),
        ((0, 2), "ranks 0 and 2 waited"),
        ((0, 2, 3, 4), "ranks 0, 2, 3 and 4 waited"),
        ((0, 2, 3, 4, 6, 7), "rank 0 and 5 more ranks waited"),
    ],
)
def test_an_interrupted_jobs_positions_are_listed(waiting: tuple[int, ...], text: str) -> None:
    """A few waiting ranks are listed by their numbers, and of many the first,
    with the number of the rest.
    """
    failures = [*map(worker, waiting), worker(5, begun=40, stack=READS)]
    assert (
        describe_positions(failures)
        == f"rank 5 was at loader.py:88 in read_shard, {text} in all_reduce #41 (default_pg)"
    )


def test_no_rank_stands_out() -> None:
    """If all ranks wait in the same collective, none is named;
    with an end one of this node's is ended all the same.
    """
    told = _told({}, ends_attempt=True, own=3)
    assert told.lines[0].endswith(
        "8 of 8 ranks wait in all_reduce #41 (default_pg), no single rank is behind"
    )
    assert (told.ranks, told.workers_to_kill, told.place) == (
        (),
        ((3, 0),),
        "no single rank is behind",
    )
    told = _told({}, {3: WorkerObservation(1, 1, 7.0)}, ends_attempt=True, own=3)
    assert (told.lines[-1], told.workers_to_kill) == (
        "not ending the attempt: rank 3 was elsewhere 7 s ago",
        (),
    )


def test_nothing_is_printed_while_a_rank_works_alone() -> None:
    """Nothing is told if no rank waits in a collective and one works; if none works,
    that is told.
    """
    odd = {rank: worker(rank, begun=40, stack=READS) for rank in range(8)}
    assert _told(
        odd, {3: WorkerObservation(1, 1, 58.0, is_busy=True)}, ends_attempt=True
    ) == StallReport(())
    assert "8 ranks are outside of collectives" in _told(odd).lines[0]
    told = (
        ", no response from 3 nodes, starting with node 1 (ranks 2, 3, 4, 5, 6, 7): its ranks are"
        " making progress, or "
    )
    assert told in _told({}, missing=(1, 2, 3)).lines[0], "the store does not answer"
    assert (
        build_stall_report(to_files([(worker(0, of=2), WorkerObservation(0, 0))]), 61.0)
        .lines[0]
        .endswith(", rank 1 exited")
    )


CALLS = WAITS.replace("all_reduce", "barrier").replace("line 7", "line 90")
RECEIVES = WAITS.replace("all_reduce", "recv").replace("line 7", "line 17")
OWN_WAIT = READS.replace("data/loader.py", "comm.py").replace("read_shard", "wait")
TENSOR_GROUP = dict.fromkeys(range(56, 63), WAITS)


@pytest.mark.parametrize(
    ("usual", "odd", "named", "line"),
    [
        (
            OWN_WAIT,
            {5: READS, 20: READS, 40: READS},
            (5, 20, 40),
            "61 of them at comm.py:88 in wait, rank 5 ",
        ),
        (OWN_WAIT, {5: READS, 20: ""}, (5, 20), "62 of them at comm.py:88 in wait, rank 5 "),
        (OWN_WAIT, {}, (), "64 of them at comm.py:88 in wait, no single rank is behind"),
        (OWN_WAIT, dict.fromkeys(range(32), READS), (), "no single rank is behind"),
        (SYNCHRONIZES, {5: READS}, (5,), ": 63 of 64 ranks wait in a collective, rank 5 "),
        (
            SYNCHRONIZES,
            {**TENSOR_GROUP, 63: READS},
            (63,),
            ": 63 of 64 ranks wait in a collective, rank 63 ",
        ),
        (
            RECEIVES,
            {**TENSOR_GROUP, 63: READS},
            (63,),
            ": 63 of 64 ranks wait in a collective, rank 63 ",
        ),
        (
            RECEIVES,
            TENSOR_GROUP,
            (),
            ": 64 of 64 ranks wait in a collective, no single rank is behind",
        ),
        (
            WAITS,
            dict.fromkeys(range(8, 16), READS),
            (8, 9, 10),
            ", rank 10 (node-5) is the straggler, and 5 more",
        ),
        (WAITS, {5: CALLS}, (), ": 64 of 64 ranks wait in a collective, no single rank is behind"),
        (
            READS,
            {5: WAITS, 6: OWN_WAIT},
            (0, 1, 2),
            ": 1 of 64 ranks wait in a collective, rank 0 ",
        ),
    ],
)
def test_ranks_apart_from_the_majority_are_named(
    usual: str,
    odd: dict[int, str],
    named: tuple[int, ...],
    line: str,
) -> None:
    """Without a recorder the ranks that stand apart are named, wherever most wait;
    none if all stand alike.
    """
    stacks = {rank: odd.get(rank, usual) for rank in range(64)}
    workers = [
        replace(worker(rank, stack=stack, of=64), collectives=()) for rank, stack in stacks.items()
    ]
    told = build_stall_report(
        to_files(
            (worker, WorkerObservation(rank // 2, rank % 2)) for rank, worker in enumerate(workers)
        ),
        61.0,
    )
    assert told.ranks == named
    assert line in told.lines[0]


COMPUTES = {5: WorkerObservation(2, 1, 58.0, ("it uses the CPU",), is_busy=True)}


@pytest.mark.parametrize(
    ("stack", "facts", "missing", "why"),
    [
        (READS, {}, (), None),
        (READS, COMPUTES, (), "not ending the attempt: rank 5 it uses the CPU"),
        (
            READS,
            {5: WorkerObservation(2, 1, 7.0)},
            (),
            "not ending the attempt: rank 5 was elsewhere 7 s ago",
        ),
        (SYNCHRONIZES, COMPUTES, (), None),
        (
            READS,
            {0: WorkerObservation(0, 0, 58.0, ("is held",), is_paused_on_purpose=True)},
            (),
            "not ending the attempt: rank 0 is held",
        ),
        (READS, {}, (3,), ""),
    ],
)
def test_the_straggler_is_ended_unless_it_works(
    stack: str,
    facts: dict[int, WorkerObservation],
    missing: tuple[int, ...],
    why: str | None,
) -> None:
    """The rank that is waited for is ended, unless it works, a person holds one,
    or a node told nothing.
    """
    told = _told({5: worker(5, begun=40, stack=stack)}, facts, ends_attempt=True, missing=missing)
    assert told.workers_to_kill == (((2, 1),) if why is None else ())
    assert told.lines[-1] == (why or told.lines[-1])
    assert (", no response from node 3 (ranks 6, 7): " in told.lines[0]) == bool(missing)
    told = _told(
        {5: worker(5, begun=40, stack=stack)},
        facts,
        ends_attempt=True,
        continues_if_busy=False,
        missing=missing,
    )
    assert told.workers_to_kill == (((2, 1),) if why is None or 5 in facts else ())


def watching(put: Callable[[str, bytes], None] = lambda *_: None, **how: str) -> StallWatch:
    """Return the watch of a job of one node whose rank 5 stands in a loader."""
    reporter = SimpleNamespace(
        node_context=SimpleNamespace(round=0, output_prefix="/jobs/7", files=None), put=put
    )
    places = SimpleNamespace(
        nodes=1, of=lambda *_: Place(group_rank=0, world_size=8), rank_of=lambda local: local
    )
    answers: dict[int, Any] = {}
    its = SimpleNamespace(alive={0: os.getpid()}, ask=lambda *_: answers, answers=answers)
    watch = StallWatch(Hang(None, None), *cast("Any", (its, reporter, places)), peers=None)
    watch._limits = watch._protocol.times.limits = build_stall_limits(60)
    watch._protocol.times.reset()
    workers = [worker(rank, **how) for rank in range(8)]  # type: ignore[arg-type]
    workers[5] = worker(5, begun=40, stack=READS)
    watch._observer._observe_workers = lambda *_, **__: [  # type: ignore[method-assign]
        (each, WorkerObservation(rank // 2, rank % 2)) for rank, each in enumerate(workers)
    ]
    watch._tracker.looks = 3
    return watch


def stall(watch: StallWatch, seconds: float) -> None:
    """Poll the workers after so many seconds without progress."""
    watch._tracker.since = time.monotonic() - seconds
    watch._poll()


def resume(watch: StallWatch, seconds: float) -> None:
    """Poll the workers when they make progress again."""
    if watch._protocol.reports.stall is not None:
        began = time.monotonic() - seconds
        watch._protocol.reports.stall = replace(watch._protocol.reports.stall, began=began)
    begun = watch._tracker.enqueued.get(0, 0) + 1
    cast("Any", watch._workers).answers[0] = {"begun": begun, "ended": begun, "at": begun}
    watch._poll()


def test_a_place_of_frequent_stalls_is_printed_only_if_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After three stalls there a fourth is only kept on record,
    and told once it takes four times as long.
    """
    kept: list[str] = []
    watch = watching(lambda path, _: kept.append(path))
    for _ in range(4):
        stall(watch, 61)
        resume(watch, 74)
    assert (
        caplog.text.count("no progress for 61 s"),
        caplog.text.count("progress resumed after 74 s"),
    ) == (3, 3)
    stall(watch, 241)
    assert "no progress for 241 s" in caplog.text
    assert len(set(kept)) == 5


# --- looks ----------------------------------------------------------------------------------------


def _looked(*moments: tuple[float, int]) -> ProgressTracker:
    """Return what looks at these seconds tell, at which a rank had begun so many collectives."""
    still = ProgressTracker(0.0)
    for now, begun in moments:
        still.look(now, {0: {"begun": begun, "ended": begun, "at": begun}})
    return still


def test_a_stall_counts_from_the_last_progress_of_any_worker() -> None:
    """Time counts from the last progress of any worker,
    without the time in which the agent was frozen.
    """
    assert not any(_looked((5, 0), (10, 0)).enqueued.values()), "no collective yet"
    assert _looked((5, 1), (10, 2)).is_starting
    assert _looked((50, 1)).seconds(56) == 6, "the first collective that is seen is progress"
    still = _looked((5, 1), (10, 2), (15, 3), (20, 4))
    assert (still.seconds(80), still.is_starting) == (60, False)
    assert still.seconds_at_position(0, 80) == 60
    still.look(75, {0: {"begun": -1, "ended": -1, "at": 4}})
    still.look(76, {0: {"begun": 4, "ended": 4, "at": 4}})
    assert still.seconds(80) == 60, "a recorder that did not answer once is no progress"
    still.look(80, {})
    assert (still.seconds_without_answer(0, 80), still.seconds_at_position(1, 80)) == (4, None)
    still.skip_frozen_time(40)
    assert still.seconds(80) == 20


def test_a_stopped_process_is_reported() -> None:
    """A stopped process is told, and one that a worker has started;
    a process that runs on its own is not.
    """
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as worker:
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")
        wait_until(lambda: bool(children.read_text().split()))
        child = int(children.read_text())
        wait_until(lambda: read_kernel_state(worker.pid) == [])
        subprocess.run(["kill", "-STOP", str(child)], check=True)
        wait_until(lambda: bool(read_kernel_state(worker.pid)))
        name = Path(f"/proc/{child}/comm").read_text().strip()
        assert read_kernel_state(worker.pid) == [
            f"its process {child} ({name}) is stopped by a signal (SIGSTOP)"
        ]
        subprocess.run(["kill", "-CONT", str(child)], check=True)
        worker.communicate(b"\n")
    before = measure_usage(1)
    assert before.cpu_seconds >= 0
    assert measure_usage(worker.pid).io_bytes == 0, "it has ended"


def test_a_report_names_the_system_call_and_its_file() -> None:
    """A report names the system call of the main thread and the file it's for,
    without a signal to the process.
    """
    if os.uname().machine not in DESCRIPTOR_CALLS:
        pytest.skip("the numbers of system calls aren't known on this machine")
    for command, call in (
        (["cat"], "waits in read of a pipe"),
        (["sleep", "60"], "waits in clock_nanosleep"),
        ([sys.executable, "-c", "while True: pass"], ""),
    ):
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
            try:
                wait_until(lambda: describe_wait(process.pid) == call)  # noqa: B023 - called at once
            finally:
                os.killpg(process.pid, signal.SIGKILL)


def test_the_hang_option_takes_texts_and_values() -> None:
    """Texts and values of the option, and a clear line for others."""
    assert parse_hang("warn:60,end:300") == Hang(60, 300)
    assert parse_hang("end:5,busy:9") == Hang(None, 5, 9)
    assert parse_hang("off") is None
    for text in ("", "on", "warn", "warn:x", "stop:5", "warn:-1", "warn:nan", "busy:9"):
        with pytest.raises(UsageError, match="seconds"):
            parse_hang(text)


def test_a_process_reports_its_innermost_pause() -> None:
    """A process tells the innermost pause in which it is, and nothing outside of one."""
    assert watchdog.current_block() == ""
    with watchdog.pause():
        assert watchdog.current_block().startswith("watchdog.pause() since test_hangs.py:")
    assert watchdog.current_block() == ""
