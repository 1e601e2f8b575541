"""``firstfault show`` on logs in shapes and of launchers that have no table row of their own,
or a rare one.
"""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from firstfault.cli import EXIT
from firstfault.utils.toml import parse_toml
from tests.readers.commands import Ran
from tests.readers.test_log_verdicts import LOST, RAISED, STEPS, add_prefix, torch_box

Show: TypeAlias = Callable[..., dict[str, Any]]
OWN = add_prefix("[rank1]: ", RAISED)
OTHERS = add_prefix("[rank0]: ", LOST)
FAILED = [*add_prefix("[rank0]: ", STEPS[:2]), *OWN, *OTHERS]
BARE = [line.strip() for line in RAISED]
LOGS = parse_toml((Path(__file__).parent / "unknown_logs.toml").read_text(encoding="utf-8"))
RANKS = ("rank 0 of 2, pid 410", "rank 1 of 2, pid 411")


@pytest.fixture
def show(run: Callable[..., Ran], tmp_path: Path) -> Show:
    """Return a function that shows lines as one log, with further files:
    the exit code is the key "code".
    """

    def shown(lines: list[str], **more: list[str]) -> dict[str, Any]:
        paths = []
        for name, content in {"job": lines, **more}.items():
            paths.append(str(tmp_path / f"{name}.txt"))
            Path(paths[-1]).write_text("\n".join(content) + "\n", encoding="utf-8")
        ran = run("show", "--json", *paths)
        return {"code": ran.code, **(json.loads(ran.out) if ran.out else {"said": ran.err})}

    return shown


def as_csv(lines: list[str]) -> list[str]:
    """Return a table with a column for the time and one for the line."""
    out = io.StringIO()
    csv.writer(out).writerows(
        [("timestamp", "message"), *((1733727000000 + at, line) for at, line in enumerate(lines))]
    )
    return out.getvalue().splitlines()


def as_newest_first(lines: list[str]) -> list[str]:
    """Return objects with a time, the last line first."""
    objects = [
        {"line": line, "timestamp": f"2031-05-06T07:08:{at:02}Z"} for at, line in enumerate(lines)
    ]
    return [json.dumps(item) for item in reversed(objects)]


EXPORTS = {
    "a table": as_csv(FAILED),
    "objects with unknown keys": [
        json.dumps({"n": at, "what": line, "to": "err"}) for at, line in enumerate(FAILED)
    ],
    "an array": ["[", *(json.dumps({"textPayload": line}, indent=1) + "," for line in FAILED), "]"],
    "the newest line first": as_newest_first(FAILED),
    "a prefix in front of others": add_prefix(
        "<east/blue> ", add_prefix("2031-05-06T07:08:09.1Z ", [*FAILED, *STEPS, *STEPS])
    ),
    "no indentation": [*add_prefix("[rank1]: ", BARE), *OTHERS],
    "Windows paths": [line.replace("/job/", "C:\\\\job\\\\") for line in FAILED],
    "one line": [
        *add_prefix("[rank0]: ", STEPS[:2]),
        "[rank1]: " + " ".join(line.strip() for line in RAISED),
        *OTHERS,
    ],
    "lines of pytest": [*add_prefix("E   ", RAISED), "1 failed in 3s"],
    "one escaped string": [f'"error": "{chr(92)}n'.join(["", *OWN]), *OTHERS],
}


@pytest.mark.parametrize("form", EXPORTS)
def test_program_lines_are_found_in_exports_of_collectors(show: Show, form: str) -> None:
    """The lines that the program printed are found in what a collector,
    a chat or an editor made of them.
    """
    found = show(EXPORTS[form])
    assert (found["root"]["type"], found["root"]["message"]) == (
        "ValueError",
        "no labels in shard 9",
    )
    expected: list[list[int]] = (
        [[]] if form == "lines of pytest" else [[1], []] if form == "one escaped string" else [[1]]
    )
    assert found["verdict"]["ranks"] in expected


@pytest.mark.parametrize("case", LOGS["failures"])
def test_rank_and_category_are_found_whichever_program_reports(show: Show, case: str) -> None:
    """Rank and category are found, whichever program reports the end."""
    failure = LOGS["failures"][case]
    found = show(failure["log"].splitlines())["verdict"]
    assert (found["ranks"], found["category"]) == (failure["ranks"], failure["category"])


@pytest.mark.parametrize("case", LOGS["successes"])
def test_handled_exceptions_and_noise_make_no_failure_of_a_success(show: Show, case: str) -> None:
    """Handled exceptions, noise at the end and an earlier job's failure make
    no failure of a success.
    """
    assert show(LOGS["successes"][case].splitlines())["code"] == EXIT.OK


def test_the_last_job_of_a_file_counts(show: Show) -> None:
    """A second report of torchrun about the same node is another job's,
    and so is what follows a shell's command.
    """
    other = [line.replace("ValueError: no labels", "KeyError: no key") for line in RAISED]
    for between in ([], ["(base) me@host:~/job$ CUDA_VISIBLE_DEVICES=0,1 python train.py"]):
        found = show(
            [
                *OWN,
                *torch_box((1, 1)),
                *between,
                *STEPS,
                *add_prefix("[rank0]: ", other),
                *torch_box((0, 1)),
            ]
        )
        assert (found["verdict"]["ranks"], found["root"]["type"]) == ([0], "KeyError")


def test_a_kernels_log_decides_category_and_machine(show: Show) -> None:
    """The kernel's log decides the category and names the machine."""
    cuda = [
        *add_prefix(
            "[rank1]: ", [*RAISED[:4], "RuntimeError: CUDA error: unspecified launch failure"]
        ),
        *OTHERS,
    ]
    xid = (
        "May  6 07:08:09 gpu-17 kernel: NVRM: Xid (PCI:0000:4e:00): 79, pid=411, GPU has fallen off"
        " the bus."
    )
    found = show([*RANKS, *cuda], dmesg=[xid])
    assert (found["verdict"]["ranks"], found["verdict"]["category"]) == ([1], "gpu_hardware")
    assert found["verdict"]["node"] == "gpu-17"
    assert found["code"] == EXIT.ROOT_CAUSE_RETRYABLE


def test_logs_of_different_jobs_are_not_merged(run: Callable[..., Ran], tmp_path: Path) -> None:
    """Logs with different job numbers aren't merged."""
    for job in (4711, 4712):
        (tmp_path / f"slurm-{job}.out").write_text("\n".join(FAILED), encoding="utf-8")
    assert (
        "2 jobs (slurm-4711.out, slurm-4712.out); give those of one"
        in run("show", str(tmp_path)).err
    )


def test_error_in_every_line_costs_nothing_and_hides_nothing(show: Show, tmp_path: Path) -> None:
    """Lines with "error" in each of them cost no more than lines without,
    and the failure is still found.
    """
    noisy = [f"step {number} error rate {number % 7}" for number in range(60_000)]
    found = show([*noisy, *FAILED, *noisy])
    assert found["verdict"]["ranks"] == [1]


def test_unrelated_logs_are_listed_and_one_is_asked_for(
    run: Callable[..., Ran], tmp_path: Path
) -> None:
    """Logs of trainings that ran one after another are listed, and one is asked for;
    logs of one time are one job.
    """

    def write(name: str, hour: int, lines: list[str]) -> None:
        stamped = [
            f"2031-05-06T{hour:02}:08:{second:02}Z {line}" for second, line in enumerate(lines)
        ]
        (tmp_path / f"{name}.log").write_text("\n".join([*stamped, ""]), encoding="utf-8")

    write("small", 7, [*STEPS, "Training completed"])
    write("large", 9, [*STEPS, *RAISED])
    ran = run("show", str(tmp_path))
    assert (ran.code, ran.out) == (EXIT.TOOL_FAILED, "")
    assert (
        ran.err
        == "firstfault: the logs are of at least 2 jobs (small.log, large.log); give those of one\n"
    )
    assert run("show", str(tmp_path / "large.log")).code == EXIT.ROOT_CAUSE
    write("small", 9, list(STEPS))
    assert run("show", str(tmp_path)).code == EXIT.ROOT_CAUSE
    # a log without steps may begin when the job fails
    write("small", 3, ["loading"])
    assert run("show", str(tmp_path)).code == EXIT.ROOT_CAUSE


@pytest.mark.parametrize(
    ("begin", "end", "said"),
    [
        (
            '  File "/job/train.py", line 3, in main',
            '  File "/job/data.py", line 9, in get',
            "the log is cut at both ends",
        ),
        ("... 400 lines omitted", "step 7", "the log is cut at its beginning"),
        ("step 6", "[...]", "the log is cut at its end"),
    ],
)
def test_a_cut_log_is_named_as_cut(
    run: Callable[..., Ran],
    tmp_path: Path,
    begin: str,
    end: str,
    said: str,
) -> None:
    """A log that begins or ends inside of a traceback, or with a mark of left out lines,
    is named as cut.
    """
    log = tmp_path / "job.log"
    log.write_text("\n".join([begin, *STEPS, end]), encoding="utf-8")
    ran = run("show", str(log))
    assert (ran.code, ran.out) == (EXIT.NOTHING_FOUND, "")
    assert f": {said}; can't tell whether the job succeeded: " in ran.err
    log.write_text("\n".join(STEPS), encoding="utf-8")
    assert "is cut" not in run("show", str(log)).err


def test_lines_below_error_are_no_reported_failure(run: Callable[..., Ran], tmp_path: Path) -> None:
    """Lines of a level below error are the last lines of a rank that reported no failure."""
    lines = [
        f"{rank}: 2031-03-07 08:00:0{step},000 | INFO | [step {step}] loss=2.{step}"
        for step in range(6)
        for rank in range(2)
    ]
    raised = [
        "1: Traceback (most recent call last):",
        '1:   File "/job/train.py", line 12, in main',
        "1:     step(batch)",
        "1: ValueError: no labels in shard 9",
    ]
    (tmp_path / "job.out").write_text("\n".join((*lines, *raised)) + "\n")
    run("show", "--html", str(tmp_path / "page.html"), str(tmp_path / "job.out"))
    page = (tmp_path / "page.html").read_text()
    assert "[step 5] loss=2.5" in page.partition("Last lines of the logs")[2]
