"""A report on a terminal, and as plain lines: one screen, any width, any encoding; test_golden has whole ones."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from firstfault import model
from firstfault.model import ExceptionInfo, FrameInfo, Kind, Phase, Scope, SentSignal, StackDump, Suspect
from firstfault.render.html import page
from firstfault.render.terminal import print_report
from firstfault.render.text import terminal_text
from firstfault.report import Report, build_report, markdown
from firstfault.report.data import summarize_attempt, with_attempts
from firstfault.report.first_line import first_line
from firstfault.retry import decide
from firstfault.strategies import get_strategy, run_strategy
from firstfault.testing import make_error, make_job, make_presence
from tests.reports.every_field import KINDS_OF_ROOT, report_full_of
from tests.reports.scenes import HARD_SCENES, cascade, process, report_conclusion

_FRAMES = (
    FrameInfo("/job/train.py", 90, "main", "train(7)"),
    FrameInfo("/venv/lib/python3.11/site-packages/torch/nn/module.py", 1, "_call", "return call()"),
    FrameInfo("/venv/lib/python3.11/site-packages/torch/nn/linear.py", 2, "forward", "return linear(x)"),
    FrameInfo("/job/model.py", 41, "step", "raise KeyError('labels')"),
)


def _usual(**root: Any) -> Report:
    """Return the report on two nodes of two ranks: rank 3 raises, one loses it, two are stopped."""
    root = {"exception": ExceptionInfo("KeyError", "'labels'", frames=_FRAMES), **root}
    return report_conclusion(cascade(process(3, 0, **root)))


def _printed(report: Report, width: int = 80, *, verbose: bool = False, **options: Any) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=width, **options), verbose=verbose)
    return out.getvalue()


def _packed(text: str) -> str:
    """A text without its blanks, as folding leaves it."""
    return "".join(text.split())


@pytest.mark.parametrize(("text", "width"), [("word " * 200, 80), ("x" * 3_000, 200)])
def test_texts_of_any_length_are_one_screen(text: str, width: int) -> None:
    """If every text of every kind of report is long, the lines that a person misses least are left out."""
    for root, scope in (*((root, Scope.RANK) for root in KINDS_OF_ROOT), *(("raised", scope) for scope in Scope)):
        lines = _printed(report_full_of(text, root, scope), width).splitlines()
        assert len(lines) < 24
        assert {"What", "Where", "Retry", "Next", "Failed", "Reported"} <= {line.split(" ")[0] for line in lines}


def test_what_there_is_room_for() -> None:
    """Further groups are counted; the first reason and the changes of attempts are shown; -v has all groups."""
    failures = [make_error(rank, node="w-0", at_ms=rank, exception=f"{chr(65 + rank) * 5}Error") for rank in range(9)]
    many, one = report_conclusion(make_job(*failures)), _usual()
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
            "  KeyError: 'a'\n\n  The above exception was the direct cause of the following exception:\n",
        ),
        ({"members": (ExceptionInfo("KeyError", "'a'"),)}, "    ---- member 1 ----\n    KeyError: 'a'"),
        ({"notes": ("of node 7",)}, "  OSError: full\n  of node 7"),
    ],
    ids=["innermost", "all of a library", "cause", "group", "notes"],
)
def test_tracebacks(changes: dict[str, Any], text: str) -> None:
    """Where a library raised, what was left out, causes, members and notes are said; if none is ours, all of it."""
    exception = ExceptionInfo("OSError", "full", **{"frames": _FRAMES, **changes})
    assert text in _printed(_usual(exception=exception), verbose=True)


def test_restarts_that_were_recovered_from_are_counted() -> None:
    """Terminal, pipe and Markdown list 20 of them with -v, the page 50, and all count the others."""
    recovered = make_error(1, node="w-0", exception="OSError", message="full", round=0)
    one = _usual()
    report = build_report(replace(one.job, history=(recovered,) * 60), one.verdict, one.decision)
    title, line = "Recovered from, by restarts within this attempt", "round 0: rank 1 on w-0: OSError: full"
    for text, shown, more in (
        (_printed(report, verbose=True), 20, 40),
        (terminal_text(report, verbose=True), 20, 40),
        (markdown(report), 20, 40),
        (page(report), 50 + 20, 10),  # the page also contains the Markdown to copy
    ):
        assert text.count(line) == shown
        assert f"and {more} more" in text
    assert "recovered" not in terminal_text(report)
    assert title not in _printed(one, verbose=True) + markdown(one)


def test_stacks_of_suspects() -> None:
    """If no rank is named, -v shows the stacks of the suspects."""
    find_stragglers = {"exception": None, "signal": "SIGTERM", "sent_signals": (SentSignal("SIGTERM", "timeout"),)}
    job = make_job(make_error(0, pid=7, stack_dumps=(StackDump(7, 0, "in recv"),), **find_stragglers))
    verdict = replace(
        run_strategy(get_strategy("evidence"), job), scope=Scope.UNDETERMINED, root=None, suspects=(Suspect("so", 0),)
    )
    report = build_report(job, verdict, decide(verdict))
    assert "Where it stood: rank 0\n  in recv\n" in _printed(report, verbose=True)
    assert "in recv" not in _printed(report)


def test_a_terminal_has_room_for_so_much() -> None:
    """Of a message of very many lines, or of one without an end, it shows the head and the tail; a pipe shows all."""
    message = "\n".join(f"line {number}" for number in range(300_000))
    report = _usual(exception=None, exit_code=1, message=message)
    text = _printed(report, verbose=True)
    assert len(text.splitlines()) < 600
    for line in ("line 0", "line 199", "... 299600 lines left out ...", "line 299999", "(a pipe (| less) shows all)"):
        assert f"\n  {line}\n" in text
    assert "\n  line 150000\n" in terminal_text(report)
    text = _printed(_usual(exception=None, exit_code=1, message="x" * 1_000_000), verbose=True)
    assert len(text.splitlines()) < 200
    assert "characters left out" in text
    assert "\n  (a pipe (| less) shows all)\n" in text
    assert "(a pipe" not in _printed(_usual(), verbose=True)


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("width", [20, 40, 49, 50, 80, 200])
def test_any_width(width: int, verbose: bool) -> None:
    """No row is longer than the terminal is wide, and what is folded is not lost."""
    report = _usual(node="a-very-long-execution-name-n0-0-worker-1" * 2)
    text = _printed(report, width, verbose=verbose)
    assert max(map(len, text.splitlines())) <= width
    answers = report.answers
    for said in (answers.what, answers.where, answers.code, report.followers, report.coverage):
        assert _packed(said) in _packed(text)


def test_a_command_can_be_copied() -> None:
    """A command that does not fit stands from the first column, and a shell takes its rows for one line."""
    report = _usual(node="a-very-long-execution-name-n0-0-worker-1")
    text = _printed(report, 40)
    command = next(step.command for step in report.answers.steps if step.command)
    assert text.count("\\\n") == 1
    assert f"\n{command}\n" in text.replace("\\\n", "")


def test_colours() -> None:
    """With colours the words are the same."""
    text = _printed(_usual(), force_terminal=True, _environ={"TERM": "xterm-256color"})
    assert "\x1b[1;31mX 1 root cause" in text
    assert re.sub(r"\x1b\[[0-9;]*m", "", text) == _printed(_usual())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding(encoding: str) -> None:
    """What the terminal's encoding does not have is shown by its escape, and nothing fails."""
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    report = _usual(exception=ExceptionInfo("KeyError", "caf\u00e9 \U0001f525 \udc80", frames=_FRAMES))
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
    report = _usual(exception=ExceptionInfo("KeyError", said, frames=_FRAMES), node="[bold]w-1")
    text = _printed(report, 200, verbose=verbose)
    assert said in text
    assert "[bold]w-1" in text
    assert said in terminal_text(report)


_LONG_LINE, _DEEP = FrameInfo("t.py", 1, "f", "x" * 1_000_000), " " * 500
_BAD = {
    **HARD_SCENES,
    "nothing at all": lambda: report_conclusion(
        model.JobErrors(), verdict=model.Verdict(Scope.UNDETERMINED, *[""] * 5)
    ),
    "code of 1 MB": lambda: _usual(exception=ExceptionInfo("KeyError", "", frames=(_LONG_LINE,))),
    "deep code": lambda: _usual(
        exception=ExceptionInfo("KeyError", f"{_DEEP}x", frames=_FRAMES, notes=(f"{_DEEP}y", "\t" * 99 + "z")),
        log_tail=f"{_DEEP}step",
    ),
    "no frames": lambda: _usual(exception=ExceptionInfo("KeyError", "")),
    "an agent": lambda: report_conclusion(make_job(make_error(None, node="", exception=None))),
    "a node without a report": lambda: report_conclusion(
        make_job(
            roster=(make_presence(Phase.JOINED, node="w-0", nodes=2), make_presence(node="w-1", group_rank=1, nodes=2))
        )
    ),
    "another's retryable": lambda: _usual(kind=Kind.RECOVERABLE, category="a category that is not ours"),
}


@pytest.mark.parametrize("name", _BAD)
def test_bad_input_is_a_useful_screen(name: str) -> None:
    """Whatever is missing or too much, each form begins with the answer, and one screen is about one screen."""
    report = _BAD[name]()
    line = first_line(report.verdict, report.decision)
    for width, rows in ((80, 30), (40, 60)):
        text = _printed(report, width)
        assert _packed(text).startswith(_packed(line))
        assert max(map(len, text.splitlines())) <= width
        assert len(text.splitlines()) <= rows
        assert _packed("Retry") in text
    assert terminal_text(report).splitlines()[0] == line
    text = _printed(report, verbose=True)
    assert max(map(len, text.splitlines())) <= 80
    assert "Facts" in text


def test_every_reason_and_suspect_is_a_line() -> None:
    """No sentence is left out, and the message is there from its first to its last line, in its own letters."""
    report = _usual()
    verdict = replace(
        report.verdict,
        message="caf\u00e9\n" * 5_000,
        why=tuple(f"reason {number}" for number in range(20)),
        sources=(("e1.pb",),),
        suspects=(Suspect("it is near", rank=4), Suspect("it sent no report", node="w-2")),
    )
    lines = terminal_text(replace(report, verdict=verdict)).splitlines()
    found = [line for line in lines if line.startswith(("why: ", "suspect: ", "source: "))]
    assert found[:20] == [f"why: reason {number}" for number in range(20)]
    assert found[20:] == ["suspect: rank 4, it is near", "suspect: w-2, it sent no report"]
    assert lines.count("  caf\u00e9") == 5_000
    verbose = terminal_text(replace(report, verdict=verdict), verbose=True)
    assert "why: reason 0\nsource: e1.pb\nwhy: reason 1\n" in verbose


def test_the_blocks_of_plain_lines() -> None:
    """The stack of a root without a traceback, and the end of its log, are blocks; longer ones with -v."""
    own = "\n".join(f"frame {number}" for number in range(50))
    log = "\n".join(f"step {number}" for number in range(50))
    report = _usual(exception=None, exit_code=1, stack_dumps=(StackDump(4203, 3, own),), log_tail=log)
    text = terminal_text(report)
    assert "\nwhere it stood:\n  frame 0\n" in text
    assert "\n  frame 29\n  ... 20 more lines\n" in text
    assert "\nlast lines of its log:\n  step 30\n" in text
    more = terminal_text(report, verbose=True)
    assert "\n  frame 49\n" in more
    assert "\nlast lines of its log:\n  step 0\n" in more


def test_many_groups_in_plain_lines() -> None:
    """Twenty groups are lines of their own and the others are counted; with -v all of them are."""
    kinds = [f"{chr(65 + at // 26)}{chr(65 + at % 26)}Error" for at in range(60)]
    failures = (make_error(rank, at_ms=rank, exception=kind) for rank, kind in enumerate(kinds))
    report = report_conclusion(make_job(*failures))
    groups = [line for line in terminal_text(report).splitlines() if line.startswith("group: ")]
    assert len(groups) == 21
    assert re.fullmatch(r"group: and \d+ more", groups[-1])
    assert len(report.cascade.groups) == 60
    assert terminal_text(report, verbose=True).count("\ngroup: ") == len(report.cascade.groups)
