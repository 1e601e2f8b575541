"""``firstfault show`` on the logs of jobs that ran without firstfault: who printed what,
and the verdict on it.
"""

import bz2
import gzip
import io
import json
import lzma
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from firstfault.cli import EXIT
from firstfault_logs import snapshot_of
from firstfault_logs.framing.labels import Label, learn_prefixes
from firstfault_logs.framing.lines import lines_of
from tests.readers.commands import Ran

Show: TypeAlias = Callable[..., tuple[int, dict[str, Any]]]
RAISED = (
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 12, in main',
    "    step(batch)",
    '  File "/job/data.py", line 7, in step',
    "    raise ValueError(batch)",
    "ValueError: no labels in shard 9",
)
LOST = (
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 14, in main',
    "    work.wait()",
    "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.2.0.9]:41000",
)
DEEPSPEED = "[2031-05-06 07:08:09,1] [{}] [launch.py:9:{}] {}"
STEPS = tuple(f"step {number} loss 2.{number}" for number in range(6))
WAITS = (
    "[rank{0}]:[E506 07:08:09.1 P.cpp:1] [Rank {0}] Watchdog caught collective operation timeout:"
    " WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn={1}, NumelOut={1}, Timeout(ms)=1000) ran for"
    " 1001 milliseconds before timing out."
)
_STOP = (
    "W0506 07:08:{:02}.000000 {} torch/distributed/elastic/api.py:9] Sending process {} closing"
    " signal SIGTERM"
)
_FAIL = _STOP.replace(
    "Sending process {} closing signal SIGTERM", "failed (exitcode: 1) local_rank: {} (pid: {})"
)
LAUNCHER = (
    "Traceback (most recent call last):",
    (
        '  File "/env/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 383, in'
        " launch_agent"
    ),
    "    raise ChildFailedError(",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
)


def torch_box(*codes: tuple[int, int], host: str = "gpu-7") -> list[str]:
    """Return torch's box about workers of one node: (rank, exit code) of each,
    the first observed one first.
    """

    def entry(number: int, rank: int, code: int) -> list[str]:
        head = [f"[{number}]:", "  time      : 2031-05-06_07:08:09", f"  host      : {host}"]
        return [
            *head,
            f"  rank      : {rank} (local_rank: {rank})",
            f"  exitcode  : {code} (pid: {500 + rank})",
        ]

    (first, *others), rule = codes, "=" * 60
    more = [line for number, other in enumerate(others, 1) for line in entry(number, *other)]
    root = ["-" * 60, "Root Cause (first observed failure):", *entry(0, *first), rule]
    return [
        *LAUNCHER,
        rule,
        "train.py FAILED",
        "-" * 60,
        "Failures:",
        *(more or ["  <NO_OTHER_FAILURES>"]),
        *root,
    ]


def add_prefix(prefix: str, lines: tuple[str, ...] | list[str]) -> list[str]:
    """Return lines with a prefix before each."""
    return [prefix + line for line in lines]


@pytest.fixture
def show(run: Callable[..., Ran], tmp_path: Path) -> Show:
    """Return a function that shows lines as one log: the exit code and the JSON."""

    def shown(
        lines: list[str] | tuple[str, ...], name: str = "job.out"
    ) -> tuple[int, dict[str, Any]]:
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        ran = run("show", "--json", str(tmp_path / name))
        return ran.code, json.loads(ran.out) if ran.out else {"said": ran.err}

    return shown


FORMS = {
    "torch": ("[rank1]: ", "[rank0]: "),
    "srun": ("1: [rank1]: ", "0: [rank0]: "),
    "mpirun": ("[1,1]<stderr>:", "[1,0]<stderr>:"),
    "sagemaker": ("[1,mpirank:1,algo-2]<stderr>:", "[1,mpirank:0,algo-1]<stderr>:"),
    "kubectl": ("[pod/job-worker-1/main] [rank1]: ", "[pod/job-worker-0/main] [rank0]: "),
    "stern": ("job-worker-1 main [rank1]: ", "job-worker-0 main [rank0]: "),
    "compose": ("worker-2  | [rank1]: ", "worker-1  | [rank0]: "),
    "collector": (
        "2031-05-06T07:08:09.123456Z stderr F [rank1]: ",
        "2031-05-06T07:08:09.323456Z stderr F [rank0]: ",
    ),
    "colours": (
        "\x1b[36m(Train pid=71, ip=10.2.0.1)\x1b[0m [rank1]: ",
        "\x1b[36m(Train pid=72, ip=10.2.0.2)\x1b[0m [rank0]: ",
    ),
    "SkyPilot": (
        "(worker1, rank=1, pid=7, ip=10.2.0.2) [rank1]: ",
        "(head, rank=0, pid=8) [rank0]: ",
    ),
    "unknown launcher": ("<cell-a/rank_1> ", "<cell-a/rank_0> "),
    "another": ("#1@host7 >> [rank1]: ", "#0@host7 >> [rank0]: "),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_rank_that_raised_is_named_whatever_precedes_its_lines(show: Show, form: str) -> None:
    """The rank that raised is named, whatever stands before its lines, and the lines are cited."""
    own, others = FORMS[form]
    lines = [
        *add_prefix(others, STEPS[:2]),
        *add_prefix(own, STEPS[:2]),
        *add_prefix(own, RAISED),
        *add_prefix(others, LOST),
    ]
    code, found = show(lines)
    assert (code, found["verdict"]["ranks"], found["root"]["type"]) == (
        EXIT.ROOT_CAUSE,
        [1],
        "ValueError",
    )
    assert found["verdict"]["headline"].endswith("no labels in shard 9")
    assert found["sources"][0][0] == "job.out:5-10"
    assert (found["root"]["file"], found["root"]["line"]) == ("/job/data.py", 7)


def test_json_lines_name_rank_and_node(show: Show) -> None:
    """Objects name rank and node, and may hold a traceback or a line of another program."""
    about = {
        "level": "ERROR",
        "rank": 1,
        "pod": "job-1",
        "msg": "failed",
        "exc_info": "\n".join(RAISED),
    }
    lines = [json.dumps({"rank": 0, "msg": step}) for step in STEPS[:2]]
    lines += [
        json.dumps(about),
        *(json.dumps({"log": f"[rank0]: {line}\n", "pod_name": "job-0"}) for line in LOST),
    ]
    _, found = show(lines)
    assert (found["verdict"]["ranks"], found["verdict"]["node"], found["root"]["type"]) == (
        [1],
        "job-1",
        "ValueError",
    )


def test_a_traceback_behind_a_progress_bar_is_read() -> None:
    """What follows a bar in its line is read, and what a carriage return overwrites is not."""
    shown = "".join(f"\r {part}%|###  | {part}/9 [00:01<00:02, 3.1it/s]" for part in (1, 2))
    read = [line for _, line in lines_of(io.BytesIO(f"a\n{shown}{RAISED[0]}\n".encode()))]
    assert read == ["a", RAISED[0]]


@pytest.mark.parametrize(
    ("last", "ranks", "what"),
    [
        (["srun: error: n2: task 1: Out Of Memory"], [1], "SIGKILL"),
        (["srun: error: n2: task 1: Segmentation fault (core dumped)"], [1], "SIGSEGV"),
        (
            [
                "mpirun noticed that process rank 1 with PID 77 on node n2 exited on signal 7 (Bus error)."
            ],
            [1],
            "SIGBUS",
        ),
        (["  Process name: [[4711,1],1]", "  Exit code:    7"], [1], "exit code 7"),
        (
            [
                "[rank: 1] Child process with PID 77 terminated with code -9. Forcefully terminating all"
            ],
            [1],
            "SIGKILL",
        ),
        (
            [
                DEEPSPEED.format(
                    "ERROR", "sigkill_handler", "['python'] exits with return code = -9"
                )
            ],
            [],
            "SIGKILL",
        ),
        (
            ["(raylet) A worker died or was killed: x. Worker IP address: 10.2.0.9 Worker PID: 88"],
            [],
            "Died",
        ),
        (["launchpad: global_rank=1 on cell-b exited abnormally, exit_code=7"], [1], "exit code 7"),
        (["supervisor: child rank 1 died with signal SIGSEGV"], [1], "SIGSEGV"),
        ([*torch_box((1, -11))], [1], "SIGSEGV"),
    ],
)
def test_a_process_without_output_is_named_by_its_launcher(
    show: Show, last: list[str], ranks: list[int], what: str
) -> None:
    """A process that left no words is named if its launcher names it; DeepSpeed's names none."""
    _, found = show([*add_prefix("[rank0]: ", LOST), *last])
    assert found["verdict"]["ranks"] == ranks
    assert found["verdict"]["headline"].startswith((f"{what},", f"{what}:"))
    assert ("Out Of Memory" in last[0]) is (found["verdict"]["category"] == "host_oom")


def test_an_exceptions_line_without_its_traceback_counts_at_the_end(show: Show) -> None:
    """An exception's line without its traceback counts at the end, also before torch's advice;
    a wait is no success.
    """
    last = "RuntimeError: CUDA error: misaligned address"
    advice = [
        "CUDA kernel errors might be asynchronously reported.",
        "For debugging consider CUDA_LAUNCH_BLOCKING=1",
    ]
    _, found = show([*add_prefix("0: ", STEPS), f"1: {last}", *add_prefix("1: ", advice)])
    assert (found["verdict"]["ranks"], found["root"]["type"]) == ([1], "RuntimeError")
    code, _ = show([*add_prefix("0: ", STEPS), f"1: {WAITS.partition('] ')[2].format(1, 9)}"])
    assert code in {EXIT.ROOT_CAUSE, EXIT.ROOT_CAUSE_RETRYABLE}


def test_torchs_first_observed_failure_is_not_the_verdict(show: Show) -> None:
    """Torch's first observed failure is a victim here,
    and the launcher's own traceback is no fault.
    """
    _, found = show(
        [
            *add_prefix("[rank1]: ", LOST),
            *add_prefix("[rank3]: ", RAISED),
            *torch_box((1, 1), (3, 1), (2, -15)),
        ]
    )
    assert (found["verdict"]["ranks"], found["verdict"]["confidence"]) == ([3], "high")
    assert found["victims_by_state"]["stopped"] == [0, 2]
    stopped = [_STOP.format(3, 41, 500 + rank) for rank in (1, 2)]
    _, found = show(
        [*add_prefix("[rank3]: ", LOST), *stopped, *torch_box((0, -15), (1, -15), (2, -15))]
    )
    assert found["verdict"]["ranks"] == [0], "the agent signaled the rest"


def test_a_traceback_without_an_owner_belongs_to_the_only_failed_worker(show: Show) -> None:
    """It belongs to the only worker that failed;
    with two that failed differently no rank is named.
    """
    _, found = show([*RAISED, *torch_box((2, 1))])
    assert (found["verdict"]["ranks"], found["root"]["type"]) == ([2], "ValueError")
    _, found = show(
        [
            *RAISED,
            "",
            *(line.replace("ValueError", "KeyError") for line in RAISED),
            *torch_box((2, 1), (3, 1)),
        ]
    )
    assert found["verdict"]["ranks"] == []


def test_alternating_tracebacks_count_only_with_equal_last_lines(show: Show) -> None:
    """Without prefixes, alternating tracebacks make an exception only if both
    have the same last line.
    """
    alike, other = [*RAISED[:-1], RAISED[-1]], [*RAISED[:-1], "KeyError: 'shard-9'"]
    for second, is_alike in ((alike, True), (other, False)):
        _, found = show(
            [
                *(line for pair in zip(RAISED, second, strict=True) for line in pair),
                *torch_box((0, 1), (1, 1)),
            ]
        )
        assert (found["verdict"]["confidence"] == "high") is is_alike
        assert (
            any("mixed in lines 1 to 12" in sentence for sentence in found["unknown"])
            is not is_alike
        )


def test_kernel_and_agent_lines_about_a_gpu_are_of_the_same_rank(show: Show) -> None:
    """The kernel's line names a process by its id, torch's agent only by local rank;
    both are about the same rank.
    """
    xid = (
        "[ 81.1] NVRM: Xid (PCI:0000:4e:00): 79, pid=501, name=python, GPU has fallen off the bus."
    )
    failed = [
        *RAISED[:4],
        "    loss.item()",
        "RuntimeError: CUDA error: unspecified launch failure",
    ]
    lines = [
        *add_prefix("[rank1]: ", STEPS[:2]),
        xid,
        *add_prefix("[rank1]: ", failed),
        *add_prefix("[rank0]: ", LOST),
    ]
    code, found = show([*lines, _FAIL.format(1, 41, 1, 501)])
    assert (code, found["verdict"]["ranks"]) == (EXIT.ROOT_CAUSE_RETRYABLE, [1])
    assert found["verdict"]["category"] == "gpu_hardware"
    assert "Xid 79, GPU has fallen off the bus" in found["verdict"]["headline"]
    _, found = show([line.replace(": 79,", ": 13,") for line in lines])
    assert found["verdict"]["category"] != "gpu_hardware", "13 is an error of the application"


def test_a_number_that_each_node_has_is_a_local_rank(show: Show) -> None:
    """In a label such as "10.2.0.1 [0]", the number that each node has is a local one,
    and the node is known.
    """
    lines = [
        f"10.2.0.{node} [{task}] {line}" for line in STEPS for node in (1, 2) for task in (0, 1)
    ]
    _, found = show([*lines, *add_prefix("10.2.0.2 [1] ", RAISED)])
    assert (found["verdict"]["node"], found["root"]["type"]) == ("10.2.0.2", "ValueError")


def test_a_log_of_one_rank_has_no_silent_suspects(show: Show) -> None:
    """Ranks that its file can't contain are no suspects."""
    _, found = show(add_prefix("[rank3]: ", LOST))
    assert found["verdict"]["ranks"] in ([], [3])
    assert not {0, 1, 2} & {suspect["rank"] for suspect in found["verdict"]["suspects"]}


@pytest.mark.parametrize("limit", [" DUE TO TIME LIMIT", " DUE TO PREEMPTION"])
def test_a_schedulers_end_blames_no_rank_and_no_node(show: Show, limit: str) -> None:
    """A scheduler's words name no rank and no guilty node; a time limit is told as one."""
    said = f"slurmstepd: error: *** JOB 4711 ON n3 CANCELLED AT 2031-05-06T07:08:09{limit} ***"
    _, found = show([*add_prefix("0: ", STEPS), said])
    assert (found["verdict"]["scope"], found["verdict"]["node"]) == ("external", None)
    assert ("time limit" in found["verdict"]["headline"]) is ("TIME" in limit)


def test_the_only_silent_rank_is_named_without_high_confidence(show: Show) -> None:
    """The only silent rank is named, and never with high confidence."""
    lines = [WAITS.format(rank, 9) for rank in (1, 2, 3)]
    _, found = show([*lines, *torch_box((1, -6), (2, -6), (3, -6))])
    assert (found["verdict"]["ranks"], found["verdict"]["category"]) == ([0], "hang")
    assert found["verdict"]["confidence"] != "high"


def test_deepspeeds_kills_prove_nothing_about_a_silent_rank(show: Show) -> None:
    """Its launcher kills all processes, those that have ended too,
    which tells nothing about the silent one.
    """
    lines = [
        DEEPSPEED.format("INFO", "main", "dist_world_size=3"),
        *add_prefix("[rank0]: ", LOST),
        *add_prefix("[rank1]: ", LOST),
    ]
    lines += [
        DEEPSPEED.format("INFO", "sigkill_handler", f"Killing subprocess {pid}")
        for pid in (71, 72, 73)
    ]
    _, found = show(
        [
            *lines,
            DEEPSPEED.format("ERROR", "sigkill_handler", "['python'] exits with return code = 1"),
        ]
    )
    assert (found["verdict"]["ranks"], found["verdict"]["confidence"]) == ([2], "medium")


def test_two_ranks_in_different_collectives_are_named_together(show: Show) -> None:
    """Two ranks that wait in different collectives are named together,
    and the job is not run again.
    """
    code, found = show([WAITS.format(0, 8), WAITS.format(1, 16), *torch_box((0, -6), (1, -6))])
    assert (code, found["verdict"]["ranks"], found["verdict"]["confidence"]) == (
        EXIT.ROOT_CAUSE,
        [0, 1],
        "low",
    )
    assert "different collective" in found["verdict"]["headline"]


def test_markdown_cites_lines_without_secrets(run: Callable[..., Ran], tmp_path: Path) -> None:
    """Markdown cites the lines, and has neither secrets nor the names of home folders."""
    lines = [line.replace("/job/", "/home/ada/job/") for line in RAISED]
    lines[-1] += " of https://ada:hunter2hunter2@host/x"
    (tmp_path / "job.out").write_text(
        "\n".join(add_prefix("[rank1]: ", lines)) + "\n", encoding="utf-8"
    )
    text = run("show", "--markdown", str(tmp_path / "job.out")).out
    assert "job.out:1-6" in text
    assert "~/job/data.py" in text
    assert "/home/ada" not in text
    assert "hunter2" not in text


OPENING = ("loading weights of base", "world is ready")


@pytest.mark.parametrize("fails", [True, False], ids=["fails again", "succeeds"])
@pytest.mark.parametrize("merged", ["by time", "a, b", "b, a", "prefixed"])
def test_agents_of_two_nodes_count_one_restart_a_round(
    run: Callable[..., Ran],
    tmp_path: Path,
    show: Show,
    merged: str,
    fails: bool,
) -> None:
    """Each agent of torch ends its workers once in a round, however the nodes' lines are merged."""
    ended = [("a", [*OPENING, *add_prefix("[rank0]: ", RAISED), _FAIL.format(1, 41, 0, 81)])]
    ended += [
        ("b", [*add_prefix("[rank1]: ", LOST), _STOP.format(2, 42, 82)]),
        ("a", [*OPENING, *STEPS[:2], "training completed"]),
    ]
    if fails:
        ended.append(
            (
                "b",
                [*add_prefix("[rank1]: ", RAISED), _FAIL.format(9, 42, 1, 501), *torch_box((1, 1))],
            )
        )
        ended.append(("a", [*add_prefix("[rank0]: ", LOST), _STOP.format(10, 41, 91), *LAUNCHER]))
    order = sorted(ended, key=lambda part: merged.find(part[0])) if ", " in merged else ended
    code, found = show(
        [
            line
            for node, lines in order
            for line in add_prefix(f"{node}-0  | " * (merged == "prefixed"), lines)
        ]
    )
    if fails:
        assert (found["verdict"]["ranks"], found["root"]["type"]) == ([1], "ValueError")
    else:
        assert (code, found["verdict"]) == (EXIT.OK, None)
        assert "round 0: ValueError, rank 0" in run("show", str(tmp_path / "job.out")).out


def test_the_last_of_two_appended_jobs_is_judged(show: Show) -> None:
    """A log to which a second job was appended is judged by the second one."""
    first = [
        *add_prefix("1: ", [*OPENING, *STEPS[:4]]),
        *add_prefix("1: [rank1]: ", RAISED),
        "srun: error: n1: task 1: Exited with exit code 1",
    ]
    second = [
        *add_prefix("0: ", [*OPENING, *STEPS[:2]]),
        *add_prefix("0: [rank0]: ", LOST),
        "srun: error: n1: task 1: Killed",
    ]
    _, found = show([*first, *add_prefix("1: ", OPENING), *second])
    assert (found["verdict"]["ranks"], found["root"]["signal"]) == ([1], "SIGKILL")


@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        ([*STEPS[:2], *RAISED, "retrying", *STEPS, "Training completed"], EXIT.OK, None),
        (
            [
                *add_prefix("(T pid=7) ", STEPS),
                *add_prefix("(T pid=8) ", RAISED),
                "(T pid=7) step 6",
                "(T pid=7) done training",
            ],
            0,
            None,
        ),
        (
            [*RAISED, "shard 12: ConnectionResetError(104), attempt 1 of 5", "training is done"],
            EXIT.OK,
            None,
        ),
        (["INFO:x:`Trainer.fit` stopped: `max_epochs=2` reached."], EXIT.OK, None),
        ([*STEPS, "Slurm: State=COMPLETED ExitCode=0:0"], EXIT.OK, None),
        (
            [*STEPS, "training finished", "sync: pod is unhealthy"],
            EXIT.NOTHING_FOUND,
            "it reports 'sync: pod is un",
        ),
        (
            [*STEPS, "training was not completed"],
            EXIT.NOTHING_FOUND,
            "the log ends with 'training was not completed'",
        ),
        (
            [*STEPS, "saved the model"],
            EXIT.NOTHING_FOUND,
            "can't tell whether the job succeeded: the log ends with",
        ),
        (
            [*add_prefix("[rank0]: ", STEPS)],
            EXIT.NOTHING_FOUND,
            "the log ends with 'step 5 loss 2.5'",
        ),
        (
            ["dear diary", "nothing happened"],
            EXIT.NOTHING_FOUND,
            "the log ends with 'nothing happened'",
        ),
        ([""], EXIT.NOTHING_FOUND, "it has no text"),
        (["\0\1\2" * 40], EXIT.TOOL_FAILED, "neither an error document nor a text"),
    ],
)
def test_a_log_without_a_failure_gets_one_line(
    run: Callable[..., Ran],
    tmp_path: Path,
    lines: list[str],
    code: int,
    said: str | None,
) -> None:
    """A log in which nothing failed, or that is none, gets one line that says so."""
    (tmp_path / "x.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    ran = run("show", str(tmp_path / "x.log"))
    assert (ran.code, ran.err.count("\n")) == (code, 0 if said is None else 1)
    assert (said or "") in ran.err
    assert ran.out.startswith("no error: line ") is (said is None)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_or_cut_log_is_read(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    """A compressed log is read, and of half of one what is there."""
    data = "\n".join([*add_prefix("[rank1]: ", RAISED), *("x" * 90 for _ in range(9000))]).encode()
    whole = compress(data)
    # bzip2 has blocks of 900 kB, so that half of a small one is nothing
    for size in {len(whole), len(whole) - (0 if compress is bz2.compress else 20)}:
        (tmp_path / "a.log.z").write_bytes(whole[:size])
        snapshot = snapshot_of([tmp_path / "a.log.z"])
        assert snapshot is not None
        assert [document.rank for document in snapshot.documents if document.exception] == [1]


def test_a_large_log_takes_little_memory(tmp_path: Path) -> None:
    """Blocks that tell nothing are counted only, and of one endless line both ends are kept."""
    with (tmp_path / "big.log").open("w", encoding="utf-8") as stream:
        for number in range(200_000):
            stream.write(f"step {number} loss 2.5 lr 3e-4 tokens/s 9000\n")
        stream.write("y" * 8_000_000 + "\n" + "\n".join(add_prefix("[rank1]: ", RAISED)) + "\n")
    tracemalloc.start()
    snapshot = snapshot_of([tmp_path / "big.log"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert snapshot is not None
    (document,) = (item for item in snapshot.documents if item.exception)
    assert [ref.name for ref in document.documents] == ["big.log:200002-200007"]
    assert peak < 20_000_000


def test_files_with_numbers_that_differ_are_ranks(run: Callable[..., Ran], tmp_path: Path) -> None:
    """Files with a rank in their names are ranks; those with another number that differs are,
    too.
    """
    for name, lines in (
        ("out-0.log", add_prefix("", LOST)),
        ("out-1.log", add_prefix("", RAISED)),
        ("run.py", ["Traceback"]),
    ):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = json.loads(run("show", "--json", str(tmp_path)).out)
    assert (found["verdict"]["ranks"], found["sources"][0]) == ([1], ["out-1.log:1-6"])


def test_levels_times_and_words_are_no_labels() -> None:
    """Levels, times and words of the program are no labels; without a label a line has no owner."""
    for prefix in ("INFO: ", "[WARNING] ", "2031-05-06 07:08:09,123 ", "Epoch: "):
        prefixes = learn_prefixes(add_prefix(prefix, STEPS))
        assert [said.label for said in prefixes.parse(1, f"{prefix}step 7", Label())] == [Label()]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("logs.tgz", "tar xf"),
        ("logs.tar", "tar xf"),
        ("logs.tar.xz", "tar xf"),
        ("logs.zip", "unzip"),
    ],
)
def test_an_archive_names_the_command_that_unpacks_it(
    name: str, command: str, tmp_path: Path, run: Callable[..., Ran]
) -> None:
    """An archive isn't a log: the error has the command that unpacks it."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text("\n".join(RAISED))
    kind = {"logs.tgz": "gztar", "logs.tar": "tar", "logs.tar.xz": "xztar", "logs.zip": "zip"}[name]
    made = Path(shutil.make_archive(str(tmp_path / "made"), kind, tmp_path, "logs"))
    archive = made.rename(tmp_path / name)
    ran = run("show", str(archive))
    assert (ran.code, ran.out) == (EXIT.TOOL_FAILED, "")
    assert f"is an archive; unpack it first ({command} {archive}), then" in ran.err
