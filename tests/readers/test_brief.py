"""``firstfault show --brief``: what it concludes and quotes, within a number of tokens."""

import io
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from firstfault.brief import MAX_TOKENS, estimate_tokens
from firstfault.brief.digest import QuotedLine
from firstfault.brief.folding import describe_differences, drop_library_frames, make_template
from firstfault.brief.quotes import cut, fold_similar, hide_secrets
from firstfault.brief.tokens import count_tokens, select_lines, share_tokens
from firstfault.cli import EXIT
from firstfault.testing import make_error
from tests.readers.commands import Ran
from tests.readers.conftest import Attempt
from tests.readers.test_log_verdicts import LOST, RAISED, STEPS, add_prefix

Brief = Callable[..., str]
STARTED = [
    "torchrun --nproc-per-node 2 train.py",
    *add_prefix("[rank0]: ", STEPS),
    *add_prefix("[rank1]: ", STEPS),
]
FAILED = [*STARTED, *add_prefix("[rank1]: ", RAISED), *add_prefix("[rank0]: ", LOST)]


@pytest.fixture
def brief(run: Callable[..., Ran], tmp_path: Path) -> Brief:
    """Return a function that writes lines to logs, and returns the brief on them."""

    def build(lines: list[str], *, code: int = EXIT.ROOT_CAUSE, **more: list[str]) -> str:
        paths = []
        for name, content in {"job": lines, **more}.items():
            paths.append(str(tmp_path / f"{name}.log"))
            Path(paths[-1]).write_text("\n".join(content) + "\n", encoding="utf-8")
        ran = run("show", "--brief", *paths)
        assert (ran.code, ran.err) == (code, "")
        assert count(ran.out) <= MAX_TOKENS
        return ran.out

    return build


def count(text: str) -> int:
    return count_tokens(text.split("\n"))


def test_a_brief_has_cause_confidence_and_last_lines(brief: Brief) -> None:
    """A brief has the cause, its confidence, the first failure's lines with numbers,
    and each rank's last lines.
    """
    text = brief(FAILED)
    assert text.startswith("# Failed: ValueError: no labels in shard 9\n")
    assert "- Confidence: high; rule own-fault\n" in text
    assert '15 [rank 1]:   File "/job/train.py", line 12, in main\n' in text
    assert "19 [rank 1]: ValueError: no labels in shard 9\n" in text
    assert "rank 1: root cause; 12 lines; last step line 13\n" in text
    assert "rank 0: victim; 10 lines; last step line 7\n" in text
    assert "2 [rank 0]: (first step) step 0 loss 2.0\n" in text


def test_a_brief_says_whether_a_success_is_proven(brief: Brief) -> None:
    """Without a failure, a brief says whether a success is proven,
    and quotes the end of the log.
    """
    text = brief([*STARTED, "Training completed"], code=EXIT.OK)
    assert text.startswith("# Succeeded\n")
    assert "14: Training completed\n" in text
    text = brief(STARTED, code=EXIT.NOTHING_FOUND)
    assert text.startswith("# Unknown: no failure found, and no proof of success\n")
    assert "the log ends with 'step 5 loss 2.5'" in text
    assert "13 [rank 1]: step 5 loss 2.5" in text


def test_several_logs_are_merged_by_time(brief: Brief) -> None:
    """The time line of several logs is in the order of their times, and names the files."""
    first = [f"2031-05-06T07:08:0{second}Z step {second} loss 1" for second in range(4)]
    other = [
        "2031-05-06T07:08:01Z WARNING low disk space",
        *add_prefix("2031-05-06T07:08:05Z ", RAISED),
    ]
    text = brief([*first, "2031-05-06T07:08:06Z srun: error: lost connection"], worker=other)
    line = text.partition("## Time line")[2].partition("## ")[0]
    found = [
        line.find(part)
        for part in (
            "step 0 loss 1",
            "low disk space",
            "(last step)",
            "ValueError",
            "lost connection",
        )
    ]
    assert found == sorted(found)
    assert found[0] > 0
    assert "07:08:01 worker.log:1" in line
    assert "- `job.log`: 5 lines, 2031-05-06 07:08:00 to 2031-05-06 07:08:06\n" in text


def test_a_folder_and_stdin_have_the_same_brief_as_files(
    brief: Brief,
    tmp_path: Path,
    run: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder of logs, and a log on stdin, have the same brief as the files."""
    whole = brief(FAILED)
    folder = tmp_path / "logs"
    folder.mkdir()
    (tmp_path / "job.log").rename(folder / "job.log")
    assert run("show", "--brief", str(folder)).out == whole
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join([*FAILED, ""]).encode()))
    )
    assert run("show", "--brief", "-").out == whole.replace("job.log", "stdin")


def test_a_recorded_jobs_brief_has_its_failures_in_order(
    attempt: Attempt, run: Callable[..., Ran]
) -> None:
    """The brief on a recorded job has its failures, in the order of time,
    and the last lines of their logs.
    """
    attempt.write(
        make_error(3, node="w-1", message="bad shard", log_tail="step 7\nopening shard 3")
    )
    ran = run("show", "--brief", attempt.uri)
    assert (ran.code, ran.err) == (EXIT.ROOT_CAUSE, "")
    assert ran.out.startswith("# Failed: ValueError: bad shard\n")
    assert "root cause: rank 3 on w-1: ValueError: bad shard\n" in ran.out
    assert "\n  opening shard 3\n" in ran.out


def test_a_brief_is_not_combined_with_other_forms(run: Callable[..., Ran], tmp_path: Path) -> None:
    """A brief goes to stdout alone, so it isn't combined with --json, --markdown or --recovered."""
    log = tmp_path / "job.log"
    log.write_text("\n".join(FAILED), encoding="utf-8")
    for option in ("--json", "--markdown", "--recovered"):
        assert run("show", "--brief", option, str(log)).code == EXIT.USAGE


# --- credentials ----------------------------------------------------------------------------------


def test_a_brief_has_no_credentials(brief: Brief) -> None:
    """No part of a brief has a password, a token, or the name of a home folder."""
    secrets = [
        "export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567",
        "url https://ana:hunter22@host/x",
        "/home/ana/x",
    ]
    text = brief(
        [
            *secrets,
            *STARTED,
            *add_prefix("[rank1]: ", [*secrets, *RAISED]),
            *add_prefix("[rank1]: ERROR: failed ", secrets),
        ]
    )
    assert "0123456789abcdef" not in text
    assert "hunter22" not in text
    assert "/home/ana" not in text
    assert "***" in text


def test_a_key_of_several_lines_is_removed() -> None:
    """Nothing of a private key stays, although the key has several lines;
    the other lines keep their numbers.
    """
    key = [
        "-----BEGIN PRIVATE KEY-----",
        "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC",
        "cXdlcnR5dWlvcA==",
        "-----END PRIVATE KEY-----",
    ]
    lines = [QuotedLine("a", at, text) for at, text in enumerate(["before", *key, "after"], 1)]
    found = {line.number: line.text for line in hide_secrets(lines)}
    assert (found[1], found[6]) == ("before", "after")
    assert not any(part in " ".join(found.values()) for part in ("MIIE", "cXdl"))


# --- the limit ------------------------------------------------------------------------------------

_RANDOM = random.Random(7)
_WORDS = [
    "loss",
    "grad_norm",
    "\u00fcber",
    "\u6a21\u578b",
    "0x7f3a90b2c1d0",
    "1e-05",
    "tensor([[1,",
    "/data/shards/00017.tar",
    "==>",
    "\U0001f525",
]


def _noise(count: int) -> list[str]:
    return [" ".join(_RANDOM.choices(_WORDS, k=_RANDOM.randint(1, 40))) for _ in range(count)]


@pytest.mark.parametrize(
    "kind", ["many errors", "many ranks", "long lines", "no words", "many tracebacks", "no end"]
)
def test_a_brief_of_a_large_log_has_at_most_6000_tokens(brief: Brief, kind: str) -> None:
    """Whatever a log of megabytes is full of, its brief has at most 6,000 tokens and the
    first failure's last line.
    """
    noise = {
        "many errors": [
            f"ERROR {'x' * (at % 90)} failed {line}" for at, line in enumerate(_noise(20_000))
        ],
        "many ranks": [
            f"[rank{at % 2000}]: step {at} {line}" for at, line in enumerate(_noise(30_000))
        ],
        "long lines": ["error " + "a9 \u00e9" * 5_000 for _ in range(100)],
        "no words": ["#@!%^&*()[]{}<>?/\\|~`" * 10 for _ in range(10_000)],
        "many tracebacks": [
            line
            for at in range(2_000)
            for line in [
                "Traceback (most recent call last):",
                f'  File "/job/a{at}.py", line {at}, in f',
                f"KeyError: {'k' * (at % 50)}",
            ]
        ],
        "no end": _noise(20_000),
    }[kind]
    lines = [*STARTED, *noise, *add_prefix("[rank1]: ", RAISED), *add_prefix("[rank0]: ", LOST)]
    if kind == "no end":
        brief(noise, code=EXIT.NOTHING_FOUND)
    elif kind == "many ranks":
        brief(lines)
    else:
        assert "ValueError: no labels in shard 9" in brief(lines)


def test_tokens_are_estimated_high() -> None:
    """Four letters, two digits, or one sign are a token; a space is free;
    other scripts count as bytes.
    """
    assert estimate_tokens("step") == 1
    assert estimate_tokens("steps 12345") == 2 + 3
    assert estimate_tokens("a, b") == 3
    assert estimate_tokens("=" * 60) == 15
    assert estimate_tokens("\u6a21") == 3
    assert estimate_tokens("") == 0


def test_the_weightiest_lines_that_fit_are_kept_in_order() -> None:
    """The lines that matter most are kept, in their order; parts get their share,
    and what others leave over.
    """
    lines = [(2, "aaaa bbbb"), (0, "cccc"), (1, "dddd eeee ffff")]
    assert select_lines(lines, 6) == ["cccc", "dddd eeee ffff"]
    assert select_lines(lines, 100) == [text for _, text in lines]
    assert share_tokens([10, 500, 40], [100, 100, 100], 300) == [10, 250, 40]


# --- folding --------------------------------------------------------------------------------------


def test_similar_lines_are_folded(brief: Brief) -> None:
    """Lines that differ in numbers alone appear once,
    with how often they came and up to which line.
    """
    lines = [
        line
        for at in range(50)
        for line in (f"step {at} loss 1.{at}", f"WARNING: rank {at} retries request {at * 7}")
    ]
    text = brief([*lines, *add_prefix("[rank1]: ", RAISED)])
    assert "2: (x50 up to line 100) WARNING: rank 0 retries request 0\n" in text
    assert "rank 31 retries" not in text
    assert make_template("loss 2.31 at 07:08:09 on gpu-7") == make_template(
        "loss 0.5 at 11:00:01 on gpu-12"
    )
    assert make_template("disk full") != make_template("disk lost")
    folded = fold_similar([QuotedLine("a", at, f"step {at}") for at in range(5)])
    assert [line.text for line in folded] == ["step 0", "step 4  (+3 similar lines)"]


def test_few_differing_values_of_folded_lines_are_shown(brief: Brief) -> None:
    """Values in which similar lines differ are shown if they are few, as the sizes of a mismatch;
    ranks aren't.
    """
    sizes = [1, 512, 1, 1]
    texts = [
        f"Rank {rank} at 07:08:1{rank}.{rank}7 timed out in ALLREDUCE, size={size}"
        for rank, size in enumerate(sizes)
    ]
    assert describe_differences(texts) == "size 1 (x3), 512"
    assert (
        describe_differences([f"failed on device {device}" for device in (7, 5)]) == "device 7, 5"
    )
    assert describe_differences([f"failed after {seconds} s" for seconds in range(20)]) == ""
    text = brief(
        [
            *add_prefix("[rank0]: ", STEPS),
            *(f"ERROR: {line}" for line in texts),
            *add_prefix("[rank1]: ", RAISED),
        ]
    )
    assert "(x4 up to line 10, with size 1 (x3), 512) ERROR: Rank 0 at" in text


def test_tracebacks_are_shortened() -> None:
    """A long traceback keeps the program's frames, the innermost frame and the exception;
    a short one all of it.
    """
    library = [
        '  File "/env/lib/python3.12/site-packages/torch/nn.py", line 3, in call',
        "    return inner()",
        "    ^^^^^^^",
    ]
    lines = [RAISED[0], *RAISED[1:3], *library * 9, RAISED[-1]]
    kept = [lines[at] for at in drop_library_frames(lines, 10)]
    assert kept == [RAISED[0], *RAISED[1:3], *library[:2], RAISED[-1]]
    assert len(drop_library_frames(RAISED, 10)) == len(RAISED)


def test_a_long_line_keeps_both_ends() -> None:
    """The end of a long line may name the cause, so a part of it stays."""
    assert cut("x" * 1000 + "end", 40).endswith("end")
    assert len(cut("x" * 1000, 40)) == 40


@pytest.mark.slow
def test_other_forms_load_no_brief(tmp_path: Path) -> None:
    """`show` and `--help` don't import what only briefs need."""
    log = tmp_path / "job.log"
    log.write_text("\n".join(FAILED), encoding="utf-8")
    code = (
        "import sys\nfrom firstfault.cli import main\nfor form in (['--help'], ['show',"
        " sys.argv[1]]):\n    try: main(form)\n    except SystemExit: pass\nprint([name for name in"
        " sys.modules if 'brief' in name or 'logs.digest' in name], file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(log)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stderr == "[]\n"
