"""A report on a terminal, and in a pipe: one screen, any width, any encoding;
test_golden has whole ones.
"""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from firstfault import model
from firstfault.model import (
    ExceptionInfo,
    FrameInfo,
    Kind,
    Phase,
    Scope,
    SentSignal,
    StackDump,
    Suspect,
)
from firstfault.render.html import page
from firstfault.render.terminal import print_report, terminal_text
from firstfault.report import Report, build_report, markdown
from firstfault.report.data import summarize_attempt, with_attempts
from firstfault.report.first_line import first_line
from firstfault.retry import decide
from firstfault.strategies import get_strategy, run_strategy
from firstfault.testing import make_error, make_job, make_presence
from tests.reports.every_field import KINDS_OF_ROOT, fill_report
from tests.reports.scenes import HARD_SCENES, cascade, process, report_conclusion

_FRAMES = (
    FrameInfo("/job/train.py", 90, "main", "train(7)"),
    FrameInfo("/venv/lib/python3.11/site-packages/torch/nn/module.py", 1, "_call", "return call()"),
    FrameInfo(
        "/venv/lib/python3.11/site-packages/torch/nn/linear.py",
        2,
        "forward",
        "return linear(x)",
    ),
    FrameInfo("/job/model.py", 41, "step", "raise KeyError('labels')"),
)


def build_usual_report(**root: Any) -> Report:
    """Return the report on two nodes of two ranks: rank 3 raises, one loses it, two are stopped."""
    root = {"exception": ExceptionInfo("KeyError", "'labels'", frames=_FRAMES), **root}
    return report_conclusion(cascade(process(3, 0, **root)))


def _printed(report: Report, width: int = 80, *, verbose: bool = False, **options: Any) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=width, **options), verbose=verbose)
    return out.getvalue()


def remove_blanks(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize(("text", "width"), [("word " * 200, 80), ("x" * 3_000, 200)])
def test_texts_of_any_length_are_one_screen(text: str, width: int) -> None:
    """If every text of every kind of report is long,
    the lines that a person misses least are left out.
    """
    for root, scope in (
        *((root, Scope.RANK) for root in KINDS_OF_ROOT),
        *(("raised", scope) for scope in Scope),
    ):
        lines = _printed(fill_report(text, root, scope), width).splitlines()
        assert len(lines) < 24
        assert {"Cause", "Where", "Retry", "Next", "Failed", "Pods"} <= {
            line.split(" ")[0] for line in lines
        }


def test_groups_beyond_the_room_are_counted() -> None:
    """Further groups are counted; the first reason and the changes of attempts are shown;
    -v has all groups.
    """
    failures = [
        make_error(rank, node="w-0", at_ms=rank, exception=f"{chr(65 + rank) * 5}Error")
        for rank in range(9)
    ]
    many = report_conclusion(make_job(*failures))
    one = build_usual_report()
    assert re.search(r"and (\d) more groups, \1 failures \(-v\)", _printed(many))
    assert "more groups" not in _printed(many, verbose=True)
    assert f"Why      {one.verdict.why[0]}\n" in _printed(one, 160)
    own = summarize_attempt(1, one.job, one.verdict, one.decision)
    again = with_attempts(one, (replace(own, number=0), own))
    assert "Attempts attempt 0 to 1: the same fault again" in _printed(again, 160)
    assert "Attempts" not in _printed(one)
    assert "firstfault show" not in _printed(replace(one, uri=""))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"frames": _FRAMES[:3]}, "    ... 2 frames of torch, the last is linear.py:2 in forward"),
        ({"frames": _FRAMES[1:2]}, "      return call()"),
        (
            {"causes": (ExceptionInfo("KeyError", "'a'", relation="cause"),)},
            (
                "  KeyError: 'a'\n\n  The above exception was the direct cause of the following"
                " exception:\n"
            ),
        ),
        (
            {"members": (ExceptionInfo("KeyError", "'a'"),)},
            "    ---- member 1 ----\n    KeyError: 'a'",
        ),
        ({"notes": ("of node 7",)}, "  OSError: full\n  of node 7"),
    ],
    ids=["innermost", "all of a library", "cause", "group", "notes"],
)
def test_a_traceback_says_what_was_left_out(changes: dict[str, Any], text: str) -> None:
    """Where a library raised, what was left out, causes, members and notes are said;
    if none is ours, all of it.
    """
    exception = ExceptionInfo("OSError", "full", **{"frames": _FRAMES, **changes})
    assert text in _printed(build_usual_report(exception=exception), verbose=True)


def test_restarts_that_were_recovered_from_are_counted() -> None:
    """Terminal, pipe and Markdown list 20 of them with -v, the page 50, and all count the rest."""
    recovered = make_error(1, node="w-0", exception="OSError", message="full", round=0)
    one = build_usual_report()
    report = build_report(replace(one.job, history=(recovered,) * 60), one.verdict, one.decision)
    title, line = (
        "Recovered by restarts within this attempt",
        "round 0: rank 1 on w-0: OSError: full",
    )
    for text, shown, more in (
        (_printed(report, verbose=True), 20, 40),
        (terminal_text(report, verbose=True), 20, 40),
        (markdown(report), 20, 40),
        (page(report), 50 + 20, 10),  # the page also contains the Markdown to copy
    ):
        assert (title in text, text.count(line)) == (True, shown)
        assert f"and {more} more" in text
    assert title not in terminal_text(report)
    assert title not in _printed(one, verbose=True) + markdown(one)


def test_verbose_shows_the_stacks_of_suspects() -> None:
    """If no rank is named, -v shows the stacks of the suspects."""
    find_stragglers = {
        "exception": None,
        "signal": "SIGTERM",
        "sent_signals": (SentSignal("SIGTERM", "timeout"),),
    }
    job = make_job(
        make_error(0, pid=7, stack_dumps=(StackDump(7, 0, "in recv"),), **find_stragglers)
    )
    verdict = replace(
        run_strategy(get_strategy("evidence"), job),
        scope=Scope.UNDETERMINED,
        root=None,
        suspects=(Suspect("so", 0),),
    )
    report = build_report(job, verdict, decide(verdict))
    assert "\nStack: rank 0\n  in recv\n" in _printed(report, verbose=True)
    assert "in recv" not in _printed(report)


def test_a_long_message_is_cut_on_a_terminal_but_not_in_a_pipe() -> None:
    """Of a message of very many lines, or of a very long line, it prints the head and the tail;
    a pipe gets all.
    """
    message = "\n".join(f"line {number}" for number in range(300_000))
    report = build_usual_report(exception=None, exit_code=1, message=message)
    text = _printed(report, verbose=True)
    assert len(text.splitlines()) < 600
    hint = "(redirect the output to a file to see all)"
    for line in ("line 0", "line 199", "... 299600 lines left out ...", "line 299999", hint):
        assert f"\n  {line}\n" in text
    assert "\n  line 150000\n" in terminal_text(report, verbose=True)
    text = _printed(
        build_usual_report(exception=None, exit_code=1, message="x" * 1_000_000), verbose=True
    )
    assert len(text.splitlines()) < 200
    assert "characters left out" in text
    assert f"\n  {hint}\n" in text
    assert "to see all" not in _printed(build_usual_report(), verbose=True)


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("width", [20, 40, 49, 50, 80, 200])
def test_no_row_is_wider_than_the_terminal(width: int, verbose: bool) -> None:
    """No row is longer than the terminal is wide, and what is folded is not lost."""
    report = build_usual_report(node="a-very-long-execution-name-n0-0-worker-1" * 2)
    text = _printed(report, width, verbose=verbose)
    assert max(map(len, text.splitlines())) <= width
    answers = report.answers
    for said in (answers.what, answers.where, answers.code, report.followers, report.coverage):
        assert remove_blanks(said) in remove_blanks(text)


def test_a_command_can_be_copied() -> None:
    """A command is one row, or begins in the first column and has a backslash at the end of
    each row but the last.
    """
    report = build_usual_report(node="a-very-long-execution-name-n0-0-worker-1")
    command = next(step.command for step in report.answers.steps if step.command)
    assert _printed(report, 40).count("\\\n") == 1
    for width in (40, *range(80, 96)):
        assert f"{command}\n" in _printed(report, width).replace("\\\n", "")


def test_colors_do_not_change_words() -> None:
    """With color the words are the same."""
    text = _printed(build_usual_report(), force_terminal=True, _environ={"TERM": "xterm-256color"})
    assert "\x1b[1;31mroot cause  rank 3\x1b[0m\n" in text
    assert re.sub(r"\x1b\[[0-9;]*m", "", text) == _printed(build_usual_report())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_letters_missing_in_the_encoding_are_escaped(encoding: str) -> None:
    """What the terminal's encoding does not have is shown by its escape, and nothing fails."""
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    report = build_usual_report(
        exception=ExceptionInfo("KeyError", "caf\u00e9 \U0001f525 \udc80", frames=_FRAMES)
    )
    print_report(report, Console(file=out, width=80), verbose=True)
    out.flush()
    text = raw.getvalue().decode(encoding)
    assert ("caf\u00e9" in text) is (encoding != "ascii")
    assert ("\U0001f525" if encoding == "utf-8" else "\\U0001f525") in text
    assert "\\udc80" in text


@pytest.mark.parametrize("verbose", [False, True])
def test_markup_is_text(verbose: bool) -> None:
    """What looks like rich's markup, an emoji's name or a link is shown as it is."""
    said = "[red]x[/red] :fire: [link=http://x]y[/link] [/]"
    report = build_usual_report(
        exception=ExceptionInfo("KeyError", said, frames=_FRAMES), node="[bold]w-1"
    )
    text = _printed(report, 200, verbose=verbose)
    assert said in text
    assert "[bold]w-1" in text
    assert said in terminal_text(report)


_LONG_LINE = FrameInfo("t.py", 1, "f", "x" * 1_000_000)
_DEEP = " " * 500
_BAD = {
    **HARD_SCENES,
    "nothing at all": lambda: report_conclusion(
        model.JobErrors(), verdict=model.Verdict(Scope.UNDETERMINED, *[""] * 5)
    ),
    "code of 1 MB": lambda: build_usual_report(
        exception=ExceptionInfo("KeyError", "", frames=(_LONG_LINE,))
    ),
    "deep code": lambda: build_usual_report(
        exception=ExceptionInfo(
            "KeyError",
            f"{_DEEP}x",
            frames=_FRAMES,
            notes=(f"{_DEEP}y", "\t" * 99 + "z"),
        ),
        log_tail=f"{_DEEP}step",
    ),
    "no frames": lambda: build_usual_report(exception=ExceptionInfo("KeyError", "")),
    "an agent": lambda: report_conclusion(make_job(make_error(None, node="", exception=None))),
    "a node without a report": lambda: report_conclusion(
        make_job(
            roster=(
                make_presence(Phase.JOINED, node="w-0", nodes=2),
                make_presence(node="w-1", group_rank=1, nodes=2),
            )
        )
    ),
    "another's retryable": lambda: build_usual_report(
        kind=Kind.RECOVERABLE, category="a category that is not ours"
    ),
}


@pytest.mark.parametrize("name", _BAD)
def test_bad_input_is_a_useful_screen(name: str) -> None:
    """Whatever is missing or too much, each form begins with the answer,
    and one screen is about one screen.
    """
    report = _BAD[name]()
    line = first_line(report.verdict, report.decision)
    for width, rows in ((80, 30), (40, 60)):
        text = _printed(report, width)
        assert remove_blanks(text).startswith(remove_blanks(line))
        assert max(map(len, text.splitlines())) <= width
        assert len(text.splitlines()) <= rows
        assert remove_blanks("Retry") in text
    assert terminal_text(report).splitlines()[0] == line
    text = _printed(report, verbose=True)
    assert max(map(len, text.splitlines())) <= 80
    assert "Facts" in text


def test_every_reason_and_suspect_is_a_line() -> None:
    """With -v no sentence is left out, and the message is there from its first to its last line,
    in its own letters.
    """
    report = build_usual_report(exception=None, exit_code=1)
    verdict = replace(
        report.verdict,
        message="caf\u00e9\n" * 5_000,
        why=tuple(f"reason {number}" for number in range(20)),
        sources=(("e1.pb",),),
        suspects=(Suspect("it is near", rank=4), Suspect("it sent no report", node="w-2")),
    )
    text = terminal_text(replace(report, verdict=verdict), verbose=True)
    reasons = "".join(f"  reason {number}\n" for number in range(1, 20))
    assert (
        f"\n\nWhy\n  reason 0 [1]\n{reasons}\nSuspects\n  rank 4: it is near\n  w-2: it sent no"
        " report\n\n" in text
    )
    assert text.endswith("\n  [1] e1.pb")
    assert text.splitlines().count("  caf\u00e9") == 5_000
    assert "\nWhy      reason 0\n         reason 1\n" in terminal_text(
        replace(report, verdict=verdict)
    )


def test_a_pipe_gets_the_labels_without_color() -> None:
    """It has the labels of a terminal and no color; one screen has the end of a log,
    -v whole and unfolded texts.
    """
    own, log = (
        "\n".join(f"{name} {at}{' long' * (35 - at)}" for at in range(50))
        for name in ("frame", "step")
    )
    report = build_usual_report(
        exception=None,
        exit_code=1,
        stack_dumps=(StackDump(4203, 3, own),),
        log_tail=log,
    )
    text = terminal_text(report)
    more = terminal_text(report, verbose=True)
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) < 24
    assert (
        "\nLog      step 47\n         step 48\n         step 49\nFailed   root cause  rank 3\n"
        in text
    )
    assert "frame 0" not in text
    for title, quoted in (("Stack", own), ("Last lines of its log", log)):
        assert "\n  ".join([f"\n{title}: rank 3", *quoted.split("\n")]) + "\n\n" in more
    assert "\x1b" not in text + more


def test_groups_in_a_pipe_are_counted_unless_verbose() -> None:
    """The first groups are rows of their own and the rest is counted;
    with -v every group is a row.
    """
    kinds = [f"{chr(65 + at // 26)}{chr(65 + at % 26)}Error" for at in range(60)]
    failures = (make_error(rank, at_ms=rank, exception=kind) for rank, kind in enumerate(kinds))
    report = report_conclusion(make_job(*failures))
    row = re.compile(r"^(?:Failed)? +(?:root cause|suspect|unclear|victim) +rank \d+", re.MULTILINE)
    shown = len(row.findall(terminal_text(report)))
    assert shown > 1
    assert (
        f"\n         and {60 - shown} more groups, {60 - shown} failures (-v)\n"
        in terminal_text(report)
    )
    assert len(report.cascade.groups) == len(row.findall(terminal_text(report, verbose=True))) == 60
