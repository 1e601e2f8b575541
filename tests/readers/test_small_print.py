"""Each line of a report on a log has a source in the log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from firstfault.model import JobSize
from firstfault.strategies.headlines import strip_log_prefixes
from firstfault_logs import snapshot_of
from firstfault_logs.framing.ranks import SizeMarks
from lab.consoles.small_print import Flag, check_cause, check_log
from tests.readers.commands import Ran
from tests.readers.test_log_verdicts import LOST, RAISED, STEPS, Show, add_prefix, show, torch_box

__all__ = ["show"]


@pytest.mark.parametrize(
    ("lines", "ranks", "size"),
    [
        (["WORLD_SIZE=16 NODE_RANK=1"], {3}, JobSize(16, 0)),
        (["exec torchrun --nnodes=2 --nproc_per_node=4 train.py"], {0}, JobSize(8, 2)),
        (["mpirun -np 12 -H a,b python train.py"], {0, 1}, JobSize(12, 0)),
        (
            ["tensor_parallel_world_size: 2", "data parallel world size: 4"],
            {0, 7},
            JobSize(8, 0, ("ranks",)),
        ),
        (["world_size=2"], {5}, JobSize(6, 0, ("ranks",))),
        (
            ["gpu-a:71:99 [0] NCCL INFO Bootstrap", "gpu-b:71:99 [0] NCCL INFO Bootstrap"],
            set(),
            JobSize(0, 2, ("nodes",)),
        ),
        (["rank 9 has joined"], {1}, JobSize(10, 0, ("ranks",))),
        (["Rank of current process: 9"], {1}, JobSize(10, 0, ("ranks",))),
        (["a plan failed on ranks:dict_keys([0, 4, 9])"], {1}, JobSize(10, 0, ("ranks",))),
        (["World size: 4"], {1}, JobSize(4, 0)),
        (["local rank 9, tensor rank 9"], {1}, JobSize(2, 0, ("ranks",))),
        (["cores, num_nodes=2 NUMA nodes"], set(), JobSize()),
        (["nothing"], {0}, JobSize()),
    ],
)
def test_a_size_needs_a_source(lines: list[str], ranks: set[int], size: JobSize) -> None:
    """Only a line that means the whole job states its size; what is only seen is a minimum,
    and one is no news.
    """
    marks = SizeMarks()
    for line in lines:
        marks.take(line)
    assert marks.build_size(ranks, ()) == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "2: slurmstepd: error: *** STEP 7.0 ON c1 CANCELLED AT 2031-05-06T07:08:09 ***",
            "STEP 7.0 ON c1 CANCELLED",
        ),
        ("[E506 07:08:09.123 Watch.cpp:9] [PG ID 0 Rank 4] CUDA error: bus", "CUDA error: bus"),
        ("c1:71:99 [0] socket.cc:7 NCCL WARN no route", "no route"),
        ("2031-05-06 07:08:09,123\tWARNING pool.py:12 -- a task is gone", "a task is gone"),
        ("\u256d\u2500\u2500\u2500\u256e\n\u2502 the disk is full \u2502", "the disk is full"),
        ("=======\ntrain.py FAILED", "train.py FAILED"),
        ("[Rank 4] timed out", "timed out"),
        ("[Rank 5] timed out", "[Rank 5] timed out"),
        ("Error: bad shard 3", "Error: bad shard 3"),
        ("7 of 9 shards are bad", "7 of 9 shards are bad"),
    ],
)
def test_a_headline_begins_with_the_message(text: str, message: str) -> None:
    """Times, levels, places in code, launchers' labels and the process's own rank are cut,
    and nothing else.
    """
    assert strip_log_prefixes(text, 4).startswith(message)
    assert strip_log_prefixes(message, 9) == message


def test_a_rank_with_lines_is_in_the_log(show: Show) -> None:
    """Only ranks that no line names are "not named";
    what isn't known to have been stopped isn't stopped.
    """
    _, found = show(["[rank2]: " + line for line in RAISED] + ["world_size=4", "rank 1: ready"])
    assert "what happened to rank 1: no exit status in the log" in found["unknown"]
    assert "what happened to ranks 0, 3: not named in the log" in found["unknown"]
    assert found["followers"] is None


_AGENT = (
    "W0506 07:08:{:02}.000000 {} torch/distributed/elastic/api.py:9] Sending process {} closing"
    " signal SIGTERM"
)
_FAILS = (
    "E0506 07:08:09.000000 71 torch/distributed/elastic/api.py:9] failed (exitcode: 1) local_rank:"
    " 1 (pid: 501)"
)


def _box_of_second_node() -> list[str]:
    return [
        line.replace("rank      : 5 (local_rank: 5)", "rank      : 5 (local_rank: 1)")
        for line in torch_box((5, 1))
    ]


@pytest.mark.parametrize(
    ("stopped", "states"),
    [
        ((500, 502, 503), {"unreported": [0, 1, 2, 3], "stopped": [4, 6, 7]}),
        ((500, 502), {"unreported": [0, 1, 2, 3, 4, 6, 7]}),
    ],
)
def test_an_agent_lists_its_workers_by_process_id(
    show: Show, stopped: tuple[int, ...], states: dict[str, list[int]]
) -> None:
    """If an agent lists all workers of its node, their ranks are known;
    a rank of another node wasn't stopped.
    """
    lines = ["+ srun torchrun --nnodes 2 --nproc-per-node 4 train.py", "[rank0]: step 4 of 900"]
    lines += [_AGENT.format(8, 71, pid) for pid in stopped]
    lines += [
        _FAILS.replace("501", "505"),
        *_box_of_second_node(),
        "srun: error: gpu-7: task 1: Exited with exit code 1",
    ]
    lines += ["srun: Terminating StepId=7.0", "srun: error: gpu-6: task 0: Terminated"]
    _, found = show(lines)
    assert found["verdict"]["ranks"] == [5]
    assert found["victims_by_state"] == states
    assert any(text.endswith(": no exit status in the log") for text in found["unknown"])


_QUOTED = [
    "(raylet) Traceback (most recent call last):",
    '  File "/env/lib/python3.11/site-packages/ray/_private/loader.py", line 9, in load',
    "    raise RuntimeError(",
    "RuntimeError: The actor Trainer could not be loaded, see below:",
    "",
    "Traceback (most recent call last):",
    '  File "/job/model.py", line 3, in <module>',
    "    import kernels",
    "ImportError: kernels.so: undefined symbol: launch",
]
_WORKER_DIED = (
    "(raylet) A worker died or was killed: x. Worker IP address: 10.2.0.9 Worker PID: 88 Detail: "
    + RAISED[0]
)
_DRIVER = [
    "Traceback (most recent call last):",
    '  File "/job/main.py", line 5, in main',
    "    assert actors",
    "AssertionError: no actors",
]


def test_ray_prints_one_failure_several_times(show: Show) -> None:
    """A traceback that another exception quotes, and that Ray prints again for a process that died,
    is one failure.
    """
    lines = [
        "setting up",
        *_QUOTED,
        "",
        "(raylet) 95% full",
        _WORKER_DIED,
        *_QUOTED[1:],
        "",
        "Error: see above",
        *_DRIVER,
    ]
    _, found = show(lines)
    assert (found["root"]["type"], found["root"]["pid"]) == ("ImportError", 88)
    assert found["sources"][0] == ["job.out:2-10", "job.out:13", "job.out:18-21"]
    assert (found["verdict"]["victims"]["count"], len(found["verdict"]["suspects"])) == (1, 1)


def test_all_were_at_one_place_only_if_all_are_known(show: Show) -> None:
    """A place in the advice is that of each failure, and "all" needs a log with all ranks."""
    for places, size, advice in (
        ((14, 14), 2, "all were at train.py:14"),
        ((14, 14), 8, "2 of them were at train.py:14"),
        ((14, 15), 8, ""),
    ):
        lines = [f"world_size={size}"]
        for rank, place in enumerate(places):
            lines += add_prefix(
                f"[rank{rank}]: ", [line.replace("line 14", f"line {place}") for line in LOST]
            )
        _, found = show(lines)
        assert found["verdict"]["scope"] == "undetermined"
        assert advice in str(found) if advice else "were at" not in str(found)


def test_citations_that_are_left_out_are_counted_only_if_all_are_known(
    run: Callable[..., Ran], tmp_path: Path
) -> None:
    """A reason keeps 8 documents, so of 12 failed ranks it counts none,
    and of 6 it counts those left out.
    """
    for ranks, words in ((12, " and more]"), (6, " and 3 more]")):
        lines = [line for rank in range(ranks) for line in add_prefix(f"[rank{rank}]: ", LOST)]
        (tmp_path / "job.out").write_text("\n".join(lines) + "\n", encoding="utf-8")
        report = " ".join(run("show", str(tmp_path / "job.out")).out.split())
        assert words in report
        assert " and 5 more]" not in report


@pytest.mark.parametrize(
    ("lines", "owner"),
    [
        ([*add_prefix("[rank1]: ", RAISED)], "your code"),
        ([*torch_box((1, 1))], "your code or infrastructure"),
        (["[rank1]: RuntimeError: a shape is wrong"], "your code or infrastructure"),
        (
            [
                *add_prefix("[rank1]: ", RAISED[:4]),
                "[rank1]: RuntimeError: CUDA error: bad address",
            ],
            "your code or infrastructure",
        ),
        (
            [
                *add_prefix("[rank1]: ", RAISED[:4]),
                "[rank1]: RuntimeError: CUDA error: device-side assert triggered",
            ],
            "your code",
        ),
    ],
)
def test_whose_fault_it_is_needs_a_frame(show: Show, lines: list[str], owner: str) -> None:
    """Only a frame outside of libraries shows that the program's own code failed."""
    _, found = show([*add_prefix("[rank0]: ", STEPS), *lines])
    assert (found["verdict"]["ranks"], found["fault"].partition(",")[0]) == ([1], owner)


@pytest.mark.parametrize(
    ("last", "fault", "row"),
    [
        (
            "slurmstepd: error: *** JOB 7 ON c1 CANCELLED AT 2031-05-06T07:08:09 ***",
            "not a fault",
            "canceled",
        ),
        (
            (
                "slurmstepd: error: *** JOB 7 ON c1 CANCELLED AT 2031-05-06T07:08:09 DUE TO TIME"
                " LIMIT ***"
            ),
            "code or infrastructure: unknown",
            "time limit",
        ),
    ],
)
def test_a_job_that_was_ended_has_no_root_cause(
    run: Callable[..., Ran],
    tmp_path: Path,
    last: str,
    fault: str,
    row: str,
) -> None:
    """Nobody failed in a job that a person or a time limit ended,
    and only a scheduler's word proves a preemption.
    """
    (tmp_path / "job.out").write_text(
        "\n".join([*add_prefix("0: ", STEPS), *add_prefix("1: ", STEPS), last]), encoding="utf-8"
    )
    report = " ".join(run("show", str(tmp_path / "job.out")).out.split())
    assert f"{fault}, ended from outside, confidence" in report
    assert f"Failed {row} the whole job JOB 7 ON c1 CANCELLED" in report
    assert "root cause" not in report


def test_a_rank_that_finished_was_not_stopped(show: Show) -> None:
    """A rank whose last lines report success has finished, and isn't a victim."""
    done = ["step 9 loss 2.1", "Training finished successfully"]
    _, found = show(
        [*add_prefix("0: ", [*STEPS, *done]), *add_prefix("1: ", STEPS), *add_prefix("1: ", RAISED)]
    )
    assert found["verdict"]["ranks"] == [1]
    assert found["victims_by_state"] == {"finished": [0]}
    assert found["verdict"]["victims"]["count"] == 0


def test_the_time_of_a_failure_is_its_own(show: Show) -> None:
    """An earlier line's time isn't the failure's; an error above a traceback,
    and a scheduler's line, have its time.
    """
    early = "2031-05-06 06:00:00,000 INFO the data is loaded"
    _, found = show([early, *RAISED])
    assert found["root"]["time"] is None
    _, found = show([early, "2031-05-06 07:08:09,000 ERROR the step failed", *RAISED])
    assert found["root"]["time"].startswith("2031-05-06T07:08:09")
    _, found = show(
        [
            *STEPS,
            (
                "slurmstepd: error: *** JOB 7 ON c1 CANCELLED AT 2031-05-06T07:08:09 DUE TO TIME"
                " LIMIT ***"
            ),
        ]
    )
    assert found["root"]["time"].startswith("2031-05-06T07:08:09")


def test_one_cause_without_a_rank_is_not_undetermined(show: Show) -> None:
    """If the log names no process, the first line is the cause,
    and mentions no agent and no other process.
    """
    _, found = show([*STEPS, *RAISED])
    assert found["first_line"].startswith("ValueError retry unclear: no labels")
    _, found = show(
        [
            *add_prefix("0: ", STEPS),
            *add_prefix("1: ", STEPS),
            "srun: error: c1: task 1: Terminated",
        ]
    )
    assert "agent" not in str(found["unknown"]) + str(found["verdict"]["why"])


def test_the_size_in_json_says_what_it_is(show: Show) -> None:
    """A number that no line states is a minimum."""
    _, found = show(
        [*add_prefix("[rank0]: ", STEPS), *add_prefix("[rank3]: ", RAISED), *torch_box((3, 1))]
    )
    assert (found["job"]["ranks"], found["job"]["at_least"]) == (4, ["ranks"])


def test_the_checker_finds_untrue_lines(tmp_path: Path) -> None:
    """A report on a log that the checker reads itself has no flag, and a wrong one has."""
    log = tmp_path / "job.log"
    log.write_text(
        "\n".join([*add_prefix("0: ", STEPS), *add_prefix("1: ", RAISED), "WORLD_SIZE=2"]) + "\n",
        encoding="utf-8",
    )
    assert check_log(log) == []
    assert snapshot_of([log]) is not None


def test_the_checker_flags_words_without_a_source() -> None:
    """Sizes, missing ranks, stops, times and words without a source are flagged."""
    from lab.consoles.small_print import check_report  # noqa: PLC0415 - only here

    report = {
        "verdict": {
            "headline": "Error: srun: error: gone",
            "suspects": [],
            "ranks": [1],
            "timestamp": None,
            "code": "USER:Cancelled",
        },
        "first_line": "Error undetermined: slurmstepd: error: " + "x" * 60,
        "what": "\u2502 Error",
        "where": "an unnamed process or an unnamed process",
        "unknown": [
            "what happened to rank 0: not named in the log",
            "the order of failures on 1 node: their clocks",
        ],
        "victims_by_state": {"stopped": [0]},
        "followers": "1 stopped by its launcher",
        "root": {"time": "2031-05-06T07:08:09.000Z"},
        "fault": "your code",
        "next": [{"text": "all were at a.py:3"}],
        "sources": [["job.log:2"] * 8],
        "job": {"ranks": 2, "nodes": 3, "at_least": ["gpus"]},
    }
    found = list(
        check_report(
            report,
            "probably " * 12 + "root cause [a, b, c, and 5 more]",
            "rank 0 is ready\nrank 1: 06:00:00 begins\n",
        )
    )
    kinds = {flag.kind for flag in found if isinstance(flag, Flag)}
    assert kinds >= {
        "ranks",
        "nodes",
        "not in the log",
        "stopped",
        "time",
        "order",
        "prefix",
        "drawing",
        "repeated",
    }
    assert {
        "undetermined",
        "unproven",
        "columns",
        "citations",
        "your code",
        "all were at",
        "root cause",
    } <= kinds


@pytest.mark.parametrize(
    "frame",
    [
        '  File "/a/train.py", line 8, in step',
        '{"exc_info": "Traceback:\\n  File \\"/a/train.py\\", line 8, in step"}',
        '{"log": "{\\"exc_info\\": \\"\\\\n  File \\\\\\"/a/train.py\\\\\\", line 8, in step"}',
        "worker-1  | [rank0]: │ /a/train.py:8 in step   │",
        '{"log": "[rank0]: \\u2502 /a/train.py:8 in step   \\u2502"}',
    ],
)
def test_the_checker_reads_frames_in_json_and_boxes(frame: str) -> None:
    """A frame in a string of JSON, or in rich's box behind a prefix, shows whose code failed."""
    report = {"verdict": {}, "fault": "your code"}
    assert list(check_cause(report, "", frame)) == []
    flags = list(check_cause(report, "", frame.replace("/a/", "/env/site-packages/")))
    assert [flag.kind for flag in flags] == ["your code"]


_COMMAND = "$ python -m torch.distributed.launch --nproc_per_node 2 train.py"
_BANNER = [
    "*" * 41,
    "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default.",
    "*" * 41,
]
_LAUNCH_PY = "/env/lib/python3.8/site-packages/torch/distributed/launch.py"
_KILLED = [
    "Killing subprocess 501",
    "Traceback (most recent call last):",
    f'  File "{_LAUNCH_PY}", line 301, in sigkill_handler',
    "    raise subprocess.CalledProcessError(returncode=last_return_code, cmd=cmd)",
    (
        "subprocess.CalledProcessError: Command '['python', '--local_rank=1']' returned non-zero"
        " exit status 1."
    ),
]


@pytest.mark.parametrize(
    ("last", "is_started_again"),
    [
        ([_COMMAND, *_KILLED], False),
        ([*_KILLED, f"+ {_COMMAND[2:]}", *_BANNER], False),
        ([*_KILLED, _COMMAND, *_BANNER, *STEPS], True),
        ([*_KILLED, _COMMAND, *_BANNER, "2031-05-06 09:00:00,000 INFO loading the data"], True),
        ([*_KILLED, _COMMAND, *_BANNER, "Job ID: 4712"], True),
        ([*_KILLED, _COMMAND, *_BANNER, *RAISED], True),
    ],
)
def test_a_start_needs_something_below_it(
    run: Callable[..., Ran],
    tmp_path: Path,
    last: list[str],
    is_started_again: bool,
) -> None:
    """What a launcher prints again at its end starts nothing, unless steps, a failure,
    a date or a job follow.
    """
    first = [
        _COMMAND,
        f"+ {_COMMAND[2:]}",
        *_BANNER,
        "Job ID: 4711",
        "2031-05-06 07:00:00,000 INFO loading the data",
    ]
    lines = [*first, *(f"batch {number} of 90" for number in range(40)), *RAISED]
    (tmp_path / "job.out").write_text("\n".join([*lines, *last]) + "\n", encoding="utf-8")
    ran = run("show", str(tmp_path / "job.out"))
    said = " ".join(f"{ran.out} {ran.err}".split())
    assert ("2nd start in the log" in said or "restarted 1 time" in said) is is_started_again
    assert is_started_again or "ValueError: no labels in shard 9" in said


def test_an_exception_printed_with_and_without_its_rank_is_one(show: Show) -> None:
    """It's the exception of that rank only: a rank that exited without a word didn't raise it."""
    _, found = show([*STEPS, *RAISED, *add_prefix("[rank0]: ", RAISED), *torch_box((1, 1), (0, 1))])
    alike = [
        rank for rank, text in found["verdict"]["victims"]["ranks"].items() if "ValueError" in text
    ]
    assert (found["verdict"]["ranks"], alike) == ([0], [])


@pytest.mark.parametrize(
    "of_record",
    ["E0731 12:00:00.123 4242 loop.py:258] ", "E0731 12:00:00.123456 140211 a/b.cc:9] "],
)
def test_a_loggers_prefix_of_a_traceback_is_cut(show: Show, of_record: str) -> None:
    """The prefix of a logged traceback is cut if each line has it,
    and if only the first line has it.
    """
    before = [f"I0731 11:59:00.000001 4242 loop.py:25] {step}" for step in STEPS]
    for lines in (add_prefix(of_record, RAISED), [of_record + RAISED[0], *RAISED[1:]]):
        _, found = show([*before, *lines])
        assert found["verdict"]["headline"] == "ValueError: no labels in shard 9"
        assert (found["root"]["file"], found["root"]["line"]) == ("/job/data.py", 7)


@pytest.mark.parametrize(
    ("line", "pieces"),
    [
        (0, ["1: Traceback (most recent", "1:  call last):"]),
        (3, ['1:   File "/job/da', '1: ta.py", line 7, in step']),
        (3, ['1:   File "', "1: /job/data.py", '1: ", line ', "1: 7", "1: , in ", "1: step"]),
        (3, ['1:   File "/job/da0: step 7 loss 2.7', '1: ta.py", line 7, in step']),
        (5, ["1: Value", "1: Error: no labels in shard 9"]),
        (5, ["1: ValueError", "1: : no labels in shard 9"]),
    ],
)
def test_labels_do_not_break_a_line_of_a_traceback(
    show: Show, line: int, pieces: list[str]
) -> None:
    """Pieces of a line of a traceback that srun labels are one line."""
    lines = [
        *add_prefix("0: ", STEPS),
        *add_prefix("1: ", STEPS),
        *add_prefix("1: ", RAISED[:line]),
        *pieces,
        *add_prefix("1: ", RAISED[line + 1 :]),
    ]
    _, found = show(lines)
    assert (found["verdict"]["ranks"], found["verdict"]["headline"]) == (
        [1],
        "ValueError, rank 1: no labels in shard 9",
    )
    assert (found["root"]["file"], found["root"]["line"]) == ("/job/data.py", 7)


def test_a_launchers_number_does_not_hide_a_native_lines_rank(show: Show) -> None:
    """A launcher's number before a native line doesn't hide the rank that the line names."""
    line = "2031-05-06T07:08:0{0}.000-07:00 | [{0}]:[E ProcessGroupNCCL.cpp:8] [Rank {1}] "
    waits = (
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE) ran for"
        " 9 ms before"
    )
    _, found = show([line.format(local, 8 + local) + waits for local in range(4)])
    assert sorted(map(int, found["verdict"]["victims"]["ranks"])) == [8, 9, 10, 11]


def test_a_logger_is_no_node(show: Show) -> None:
    """What stands before a level is the name of a logger,
    although each line of a traceback has it.
    """
    prefix = "2031-05-06 07:08:09,123 - FineTuner - INFO - [rank1]: "
    _, found = show(add_prefix(prefix, RAISED))
    assert (found["verdict"]["ranks"], found["verdict"]["node"]) == ([1], None)
