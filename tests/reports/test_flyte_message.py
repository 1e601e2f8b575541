"""The message that Flyte shows, the facts that it shares with the other forms,
and the words of each engine.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstfault import model
from firstfault.render.terminal import terminal_text
from firstfault.report import Report, build_report, flyte_message, markdown
from firstfault.report.engine_words import FLYTE, PLAIN, find_engine_words
from firstfault.report.fault_owner import FaultOwner, describe_fault_owner
from firstfault.report.first_line import first_line
from firstfault.report.parts.sections import build_sections
from firstfault.retry import decide
from firstfault.strategies import build_undetermined_verdict, get_strategy, run_strategy
from firstfault.testing import make_error, make_job, make_presence
from lab.cascades.replay import RECORDED, load
from tests.readers import scenes as readers
from tests.reports import scenes

_LIST_WIDTH = 51
_FIRST_LINE = 78
_URI = "s3://bucket/metadata/f00/n0/data/0"
_NO = model.Decision(
    retry=False,
    kind=model.Kind.NON_RECOVERABLE,
    origin=model.Origin.USER,
    enforced=True,
    reason="it is a bug",
)
_YES = model.Decision(
    retry=True,
    kind=model.Kind.RECOVERABLE,
    origin=model.Origin.SYSTEM,
    enforced=False,
    reason="the node went",
)
_SPENT = replace(_YES, origin=model.Origin.USER, retries_left=0)


def _verdict(
    *failures: model.WorkerError, strategy: str = "earliest", **snapshot: Any
) -> model.Verdict:
    return run_strategy(get_strategy(strategy), make_job(*failures, **snapshot))


def _message(verdict: model.Verdict, decision: model.Decision = _NO, uri: str = _URI) -> str:
    """Return the message on a verdict without other data."""
    return flyte_message(build_report(make_job(), verdict, decision, uri=uri))


# --- the first line -------------------------------------------------------------------------------

_LONG_POD = "a-very-long-execution-name-of-54-characters-n0-0-worker-12"


def _of_rank_3(**fields: Any) -> model.Verdict:
    return _verdict(make_error(3, **{"message": "bad", "node": "w-1", **fields}))


@pytest.mark.parametrize(
    ("decision", "verdict", "line"),
    [
        (_NO, _of_rank_3(node="f00-n0-0-worker-1"), "ValueError rank 3 worker-1 no retry: bad"),
        (_NO, _of_rank_3(node=_LONG_POD), "ValueError rank 3 worker-12 no retry: bad"),
        (
            _NO,
            _of_rank_3(node=_LONG_POD, exception="E" * 90, message="it is bad\nmore"),
            "EEEEEEEEEEEEEEEEEEEEEE... rank 3 worker-12 no retry: it is bad",
        ),
        (_YES, _of_rank_3(), "ValueError rank 3 w-1 retry: bad"),
        # a machine, not a pod of Flyte's
        (_YES, _of_rank_3(node="dgx-a-worker-1"), "ValueError rank 3 dgx-a-worker-1 retry: bad"),
        (_SPENT, _of_rank_3(), "ValueError rank 3 w-1 no retries left: bad"),
        (
            _SPENT,
            _of_rank_3(exception="FlyteRecoverableException", category="recoverable"),
            "recoverable rank 3 w-1 no retries left: bad",
        ),
        (
            _NO,
            _of_rank_3(exception="FlyteRecoverableException"),
            "FlyteRecoverableException rank 3 w-1 no retry: bad",
        ),
        (_NO, _of_rank_3(node=""), "ValueError rank 3 no retry: bad"),
        (
            _NO,
            _of_rank_3(exception=None, signal="SIGKILL", message=""),
            "SIGKILL rank 3 w-1 no retry: sender unknown, OOM kills could not be counted",
        ),
        # ranks with one fault are listed or counted
        (
            _NO,
            _verdict(*map(make_error, range(4)), strategy="evidence"),
            "ValueError 4 ranks worker-0 no retry: boom",
        ),
        (
            _NO,
            _verdict(*map(make_error, range(2)), strategy="evidence"),
            "ValueError ranks 0-1 worker-0 no retry: boom",
        ),
        (
            _NO,
            build_undetermined_verdict(make_job(), "earliest"),
            "undetermined no retry: a node reported a failure, but its error documents...",
        ),
        (
            _NO,
            _verdict(
                make_error(
                    None,
                    node="",
                    writer=model.Writer.STOCK,
                    exception=None,
                    code="red",
                    message="hi",
                )
            ),
            "red undetermined no retry: hi",
        ),
    ],
)
def test_the_first_line_has_error_rank_node_decision_and_message(
    decision: model.Decision, verdict: model.Verdict, line: str
) -> None:
    """The first line has the error, rank, node, retry decision and message;
    without rank and node it says so.
    """
    assert first_line(verdict, decision) == line


@given(
    st.text(max_size=80),
    st.text(max_size=80),
    st.text(max_size=80),
    st.integers(0, 10**7),
    st.booleans(),
)
def test_the_first_line_is_one_short_line_of_ascii(
    exception: str,
    node: str,
    message: str,
    rank: int,
    retry: bool,
) -> None:
    """With any input, the first line has at most 78 printable ASCII characters,
    with rank and retry decision.
    """
    decision = _YES if retry else _NO
    line = first_line(
        _verdict(make_error(rank, node=node, exception=exception, message=message)), decision
    )
    assert len(line) <= _FIRST_LINE
    assert line.isascii()
    assert line.isprintable()
    assert f"rank {rank}" in line[:_LIST_WIDTH]
    assert "retry" in line[:_LIST_WIDTH]


# --- the whole message ----------------------------------------------------------------------------

_LONG_TEXT = "\U0001f525 line\n" * 10_000
_LONG_NAMES = tuple(
    model.Suspect("it is silent", node=f"{number}{'n' * 3_000}") for number in range(4)
)


def _cascade() -> model.Verdict:
    return _verdict(
        make_error(
            3,
            node="w-1",
            message="bad sample",
            local_rank=1,
            host="node-7",
            pid=99,
            exception="KeyError",
        ),
        make_error(
            0,
            node="w-0",
            at_ms=31,
            exception="RuntimeError",
            message="Connection closed by peer",
        ),
        make_error(
            2,
            at_ms=40,
            node="w-1",
            exception=None,
            sent_signals=(model.SentSignal("SIGTERM", "rank 3 failed"),),
        ),
        roster=(
            make_presence(node="w-0", nodes=2),
            make_presence(node="w-1", group_rank=1, nodes=2),
        ),
    )


@pytest.mark.parametrize(
    ("verdict", "decision", "fact"),
    [
        (_cascade(), _YES, "Retry: yes (advice: Flyte may not retry): the node went"),
        (_cascade(), replace(_SPENT, enforced=True), "Retry: no retries left: the node went"),
        (
            replace(_cascade(), settled=False),
            _NO,
            "Unknown: failures on pods that didn't report within the timeout",
        ),
        (_verdict(make_error()), _NO, "Pods: 1 reported (total unknown), incomplete"),
        (
            replace(_cascade(), coverage=model.Coverage(None, 3)),
            _NO,
            "Pods: 3 reported (total unknown), incomplete",
        ),
        (
            replace(_cascade(), coverage=model.Coverage(1, 4, complete=True)),
            _NO,
            "Pods: 4 reported (1 expected)",
        ),
        (_verdict(make_error(at_ms=None)), _NO, "Unknown: when it happened"),
        (_verdict(make_error(), notes=("x was refused",)), _NO, "Unknown: x was refused"),
        (
            _verdict(make_error(), make_error(None, node="w-9", at_ms=1, message="x")),
            _NO,
            "Victims: 1",
        ),
    ],
)
def test_each_additional_fact_has_its_own_line(
    verdict: model.Verdict, decision: model.Decision, fact: str
) -> None:
    """Each additional fact has its own line."""
    assert fact in _message(verdict, decision).splitlines()


def test_eight_victims_and_unknowns_are_listed_and_the_rest_counted() -> None:
    """Eight victims and eight unknowns are listed, and the rest is counted."""
    verdict = _verdict(
        make_error(0, at_ms=-1), *(make_error(n, message="peer gone by") for n in range(1, 500))
    )
    lines = _message(verdict).splitlines()
    assert "Victims: 499" in lines
    assert sum(line.startswith("  rank ") for line in lines) == 8
    assert "  and 491 more" in lines
    lines = _message(_verdict(make_error(), notes=tuple(map(str, range(500))))).splitlines()
    found = [line for line in lines if line.startswith("Unknown: ")]
    # the confidence and the number of nodes are two more
    assert found[-2:] == [
        "Unknown: 6",
        "Unknown: and 494 more",
    ]


@pytest.mark.parametrize(
    "verdict",
    [
        _verdict(make_error(message="first " + "x" * 100_000 + " last")),
        _verdict(make_error(message="\U0001f525\n" * 50_000)),
        _verdict(make_error(), notes=tuple("note " * 500 for _ in range(1_000))),
        replace(_cascade(), why=tuple("because " * 500 for _ in range(1_000))),
        replace(_cascade(), headline="h" * 100_000, category="c" * 100_000, node="n" * 100_000),
        _verdict(make_error(node="n" * 100_000, host="h" * 100_000, exception="E" * 100_000)),
        _verdict(
            make_error(
                exception=None,
                log_tail=_LONG_TEXT,
                stack_dumps=(model.StackDump(7, 0, _LONG_TEXT),),
            )
        ),
        replace(
            _cascade(),
            scope=model.Scope.UNDETERMINED,
            node=None,
            category="node_lost",
            suspects=_LONG_NAMES,
        ),
    ],
    ids=["letters", "emoji", "notes", "why", "facts", "names", "stack and log", "commands"],
)
def test_the_message_is_bounded(verdict: model.Verdict) -> None:
    """A message on large documents is below 16 KB, and its first and last lines are the answer."""
    message = _message(verdict)
    assert len(message.encode()) < 16 * 1024
    lines = message.splitlines()
    assert lines[0] == lines[-1] == first_line(verdict, _NO)
    assert f"firstfault show {_URI}" in lines
    if verdict.message.startswith("first"):  # both ends, and how much is left out
        assert "\nMessage:\n  first xxx" in message
        assert "xxx last\n" in message
        assert "characters left out" in message


# --- facts and quoted texts, in all forms ---------------------------------------------------------

_GIB = 1024**3


def _shown(**fields: Any) -> Report:
    """Return the report on one failure of rank 3, pid 99."""
    failure = make_error(
        **{"rank": 3, "pid": 99, "exception": None, "exit_code": -9, "signal": "SIGKILL", **fields}
    )
    return build_report(make_job(), _verdict(failure), _NO, uri=_URI)


def _thread(kind: str, text: str) -> dict[str, Any]:
    return {
        "thread_failures": (model.ThreadFailure("loader", None, model.ExceptionInfo(kind, text)),)
    }


def _called(*progress: model.CollectiveProgress) -> dict[str, Any]:
    return {"collectives": progress}


def _memory(*figures: int | None, **named: int) -> dict[str, Any]:
    return {"resources": model.Resources(*figures, **named)}


def _after(rank: int | None, node: str) -> dict[str, Any]:
    return {"caused_by": model.CausedBy(rank, node, "e1.pb")}


_TP = model.CollectiveProgress("tp", "", 0, None)
_M, _K = 2**20, 2**10


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        (
            _memory(2, 16 * _GIB - 64 * _M, 16 * _GIB),
            "Memory: peak 15.9 GiB of 16.0 GiB, 2 OOM kills counted",
        ),
        (
            _memory(1, 3 * _M, 4 * _M, _M),
            "Memory: peak 3.0 MiB of 4.0 MiB, in use 1.0 MiB, 1 OOM kill counted",
        ),
        (_memory(oom_kill=0), "Memory: no OOM kill counted"),
        (_memory(memory_limit_bytes=900), "Memory: limit 900 B"),
        (
            _memory(memory_used_bytes=2 * _K, memory_limit_bytes=4 * _K),
            "Memory: in use 2.0 KiB of 4.0 KiB",
        ),
        (_memory(memory_peak_bytes=2**60), "Memory: peak 1048576.0 TiB"),
        (_memory(oom_kill=0), "Signal: SIGKILL: killed, sender unknown, no OOM kill counted"),
        (_memory(oom_kill=1), "Signal: SIGKILL: out of memory, killed by the kernel's OOM killer"),
        ({"signal": "SIGRTMIN+3"}, "Signal: SIGRTMIN+3"),
        (_thread("lib.DiskError", "full\nvery"), "Thread: loader ended by DiskError: full"),
        (_thread("KeyError", ""), "Thread: loader ended by KeyError"),
        (
            _called(model.CollectiveProgress("default_pg", "allreduce", 41, 40)),
            "Last collective: allreduce #41, 40 completed (group default_pg)",
        ),
        (_called(_TP), "Last collective: #0 (group tp)"),
        (_called(*[_TP] * 20), "Last collective: and 15 more"),
        (_after(3, "w-1"), "Stopped after: rank 3 on w-1"),
        (_after(3, ""), "Stopped after: rank 3"),
        (_after(None, "w-1"), "Stopped after: w-1"),
        (_after(None, ""), "Stopped after: another node"),
    ],
)
def test_facts_about_the_root_cause_have_one_line_each(fields: dict[str, Any], fact: str) -> None:
    """What was counted and recorded where the root cause was has one line each,
    in readable units.
    """
    assert fact in [found.line for found in _shown(**fields).facts]


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"stack_dumps": (model.StackDump(7, 3, "by rank"),)}, ["by rank"]),
        (
            {
                "stack_dumps": (
                    model.StackDump(7, 0, "another's"),
                    model.StackDump(99, None, "by\n\npid"),
                )
            },
            ["by", "pid"],
        ),
        ({"stack_dumps": (model.StackDump(99, 3, " \n"),)}, []),
        ({"stack_dumps": (model.StackDump(7, 2, "another's"),)}, []),
        (
            {
                "stack_dumps": (model.StackDump(99, 3, "x"),),
                "exception": model.ExceptionInfo("lib.Error", "boom"),
            },
            ["x"],
        ),
        ({"stack_dumps": (model.StackDump(99, 3, "x"),), "exception": "ValueError"}, []),
        ({"stack_dumps": (model.StackDump(0, None, "x"),), "rank": None, "pid": 0}, []),
    ],
)
def test_the_root_causes_stack_is_shown_if_it_has_no_traceback(
    fields: dict[str, Any], shown: list[str]
) -> None:
    """A stack is shown if it is the root's own and the root has no traceback."""
    assert list(build_sections(_shown(**fields)).stack.lines) == shown


def test_log_lines_are_cut_and_progress_bars_show_their_last_state() -> None:
    """They are not empty; a progress bar has its last state, and long lines are cut."""
    log = "step 1\n\n" + "10%\r20%\r\x1b[1m30%\x1b[0m\r\n" + "x" * 500 + "\n"
    assert build_sections(_shown(log_tail=log)).log.lines == ("step 1", "30%", f"{'x' * 197}...")


def test_a_short_message_leaves_room_for_stack_and_log() -> None:
    """The first 30 lines of the stack, the last 20 of the log,
    and the message are all in Flyte's text.
    """
    text = "\n".join(f"{number} {'x' * 100}" for number in range(50))
    message = flyte_message(
        _shown(stack_dumps=(model.StackDump(99, 3, text),), log_tail=text, message="the message")
    )
    blocks = {block.split("\n")[0]: block.split("\n")[1:] for block in message.split("\n\n")}
    stack, log = blocks["Stack:"], blocks["Last lines of its log:"]
    assert (len(stack), stack[-1], len(log), log[-1][:4]) == (31, "  ... 20 more lines", 20, "  49")
    assert blocks["Message:"] == ["  the message"]


# --- victims, suspects and other failures ---------------------------------------------------------


def _recorded(name: str) -> Report:
    return scenes.report_conclusion(load(RECORDED / f"{name}.zip").job)


@pytest.mark.parametrize(
    ("name", "followers"),
    [
        ("SIGKILL-earlyTrue-rank0-of4", "3 stopped by their agents, 2.0 s to "),
        ("SIGKILL-clock-600-rank0-of4", "1 lost a peer, 1 agent failed, 1.5 ms to "),
        ("terminate-rank3-of4", "3 lost a peer, within 359 ms of the cause ("),
        (
            "two-ranks-rank0-of4",
            "1 lost a peer, 1 stopped by its agent, within 60 s of the cause (",
        ),
    ],
    ids=[
        "stopped by the root's own signal",
        "agents apart",
        "ambiguous, if the verdict is certain",
        "no suspect",
    ],
)
def test_victims_are_counted_by_what_happened_to_them(name: str, followers: str) -> None:
    """The victims are counted by what happened to them;
    of a killed agent the first line says that it was lost.
    """
    assert _recorded(name).followers.startswith(followers)
    assert _recorded("agent-killed-rank0-of4").first_line.startswith("agent lost ")


def test_a_suspect_is_no_victim() -> None:
    """A second rank that failed by itself is listed under "Failed too", not under the victims."""
    rows = {fact.name: fact for fact in build_sections(_recorded("two-ranks-rank0-of4")).details}
    assert [line[:7] for line in rows["Victims"].lines] == ["rank 3:"], (
        "rank 2 was stopped, and is only counted"
    )
    assert (rows["Failed too"].value, rows["Failed too"].lines) == (
        "1",
        ("rank 1: ValueError: the batch of rank 1 has no labels",),
    )


def test_a_clock_an_hour_off_is_corrected() -> None:
    """A wrong clock with a known error does not make the times unknown,
    because they are corrected.
    """
    report = _recorded("raise-clock+3600-rank3-of4")
    assert "60 min" not in report.followers
    assert report.clocks == ""
    assert not any("clocks" in sentence for sentence in report.answers.unknown)


def test_an_exception_group_names_its_members() -> None:
    """A task group's own text does not say what failed."""
    leaf = model.ExceptionInfo(
        "ValueError",
        "shard 3 is empty",
        frames=(model.FrameInfo("/root/data.py", 12, "load", "raise"),),
    )
    text = "unhandled errors in a TaskGroup (1 sub-exception)"
    group = replace(scenes.raised("ExceptionGroup", text), members=(leaf,))
    report = scenes.report_conclusion(scenes.build_job(scenes.process(3, 0, group)))
    assert report.first_line.startswith("ValueError rank 3 worker-1 no retry: shard 3 is empty")
    assert report.answers.what == f"ValueError: shard 3 is empty; raised as ExceptionGroup: {text}"
    assert report.answers.code == "data.py:12 in load"


_IN_DECODER = (
    'File "/root/data.py", line 12 in decode\n    lib.decode(sample)\n  File "/root/data.py", line'
    " 5 in run\n"
)
_IN_MAIN = 'Thread 0x1 (most recent call first):\n  File "/root/train.py", line 41 in train\n'
_CRASHED = (
    "Fatal Python error: Segmentation fault\n\nCurrent thread 0x2 (most recent call first):\n "
    f" {_IN_DECODER}\n"
)
_RAISED = model.FrameInfo("/root/data.py", 12, "decode", "lib.decode(sample)")
_ENDED = model.ThreadFailure(
    "decoder", None, model.ExceptionInfo("LookupError", "no codec", frames=(_RAISED,))
)


@pytest.mark.parametrize(
    "failure",
    [
        readers.died(3, "SIGSEGV", -11, stack_dumps=(model.StackDump(1, 3, _CRASHED + _IN_MAIN),)),
        readers.stopped(3, _IN_MAIN, thread_failures=(_ENDED,)),
    ],
    ids=["crashed", "ended"],
)
def test_the_place_is_the_line_of_the_failed_thread(failure: model.WorkerError) -> None:
    """If a thread is why its process crashed, or stands still, the report leads to its line,
    not the main one's.
    """
    job = readers.reported_job(readers.timed_out_waiting(0), failure, readers.stopped(1))
    verdict = run_strategy(get_strategy("evidence"), job)
    answers = build_report(job, verdict, decide(verdict)).answers
    assert (verdict.ranks, answers.code, answers.source) == (
        (3,),
        "data.py:12 in decode",
        "lib.decode(sample)",
    )
    assert answers.steps[0].text.endswith("data.py:12 in decode")


def test_a_job_without_firstfault_has_error_and_advice_but_no_place() -> None:
    """A job without firstfault has one document: it gives the error and the advice,
    but not the place.
    """
    stock = make_error(
        None,
        node="",
        writer=model.Writer.STOCK,
        exception=None,
        message="Trace:\n\nMessage:\n\nValueError: bad",
    )
    report = scenes.report_conclusion(make_job(stock))
    assert report.verdict.scope is model.Scope.UNDETERMINED
    assert report.answers.where == "unknown: the error document names no rank and no node"
    assert report.answers.fault_owner is FaultOwner.UNKNOWN
    assert report.answers.steps[0].text.startswith("read the text below: ")


# --- words of Flyte on Kubernetes, or of no engine at all -----------------------------------------


_AGAIN = replace(_NO, retry=True, kind=model.Kind.RECOVERABLE)


def _report(
    engine: str,
    *,
    category: str = "",
    logs: dict[str, str] | None = None,
    **place: str,
) -> Report:
    fields = (
        {"exception": None, "subject": model.Subject.AGENT, "writer": model.Writer.AGENT}
        if category
        else {}
    )
    place = {"node": "w-1", "namespace": "team", **place}
    job = make_job(make_error(3, engine=engine, category=category, **place, **fields))
    verdict = run_strategy(get_strategy("earliest"), job)
    return build_report(job, verdict, decide(verdict), logs=logs)


_EVENTS = "--field-selector involvedObject.name=w-1"


def _commands(report: Report) -> list[str]:
    return [step.command for step in report.answers.steps if step.command]


@pytest.mark.parametrize(
    ("name", "engine"), [("", FLYTE), ("flyte", FLYTE), ("plain", PLAIN), ("another", PLAIN)]
)
def test_the_engines_words_are_chosen_by_the_documents(name: str, engine: object) -> None:
    """Documents without an engine's name are Flyte's;
    an unknown name gives the words of no engine.
    """
    assert _report(name).engine is engine
    job = make_job(roster=(make_presence(node="w-0", engine=name),))
    assert find_engine_words(job, run_strategy(get_strategy("earliest"), job)) is engine


@pytest.mark.parametrize(
    ("engine", "category", "commands"),
    [
        ("flyte", "", ["kubectl logs w-1 -n team"]),
        (
            "flyte",
            "node_lost",
            [f"kubectl get events {_EVENTS} -n team", "kubectl logs w-1 -n team"],
        ),
        ("plain", "", []),
        ("plain", "node_lost", []),
    ],
)
def test_kubectl_commands_are_only_in_reports_on_kubernetes(
    engine: str, category: str, commands: list[str]
) -> None:
    """Only reports on Kubernetes have kubectl commands;
    a log that is a file on this machine needs no engine.
    """
    assert _commands(_report(engine, category=category)) == commands
    assert _commands(_report(engine, logs={"w-1": "logs/w-1.log"})) == ["less logs/w-1.log"]


def test_an_unknown_cause_lists_the_logs_of_the_first_nodes() -> None:
    """If the cause is unknown, the logs of the first nodes are listed,
    in the order of their numbers.
    """
    errors = [
        make_error(
            number,
            node=f"w-{number}",
            at_ms=-number,
            exception=None,
            message="",
            engine="flyte",
            exit_code=1,
        )
        for number in range(12)
    ]
    job = make_job(*errors)
    verdict = replace(
        run_strategy(get_strategy("evidence"), job),
        node=None,
        root=None,
        suspects=(),
        scope=model.Scope.UNDETERMINED,
    )
    report = build_report(job, verdict, decide(verdict))
    assert _commands(report) == [f"kubectl logs w-{number}" for number in range(4)]


def test_a_node_named_as_its_host_is_a_machine_without_kubectl() -> None:
    """A node that has its host's name and no namespace is a machine: kubectl doesn't know it."""
    for host, namespace, commands in (("w-1", "", 0), ("w-1", "team", 1), ("laptop", "", 1)):
        report = _report("flyte2", host=host, namespace=namespace)
        assert len(_commands(report)) == commands


@pytest.mark.parametrize(
    "text", ["x; touch owned", "$(touch owned)", "-n", "a b", "a\nb", "`x`", "a'b", "\u00e9"]
)
def test_a_command_has_no_text_of_a_document(text: str) -> None:
    """What cannot be a name in Kubernetes is left out of the commands to copy:
    a document may hold anything.
    """
    for category in ("", "node_lost"):
        bare = [
            command.removesuffix(" -n team")
            for command in _commands(_report("flyte", category=category))
        ]
        assert _commands(_report("flyte", category=category, namespace=text)) == bare
    assert _commands(_report("flyte", node=text)) == []
    assert _commands(_report("flyte", category="gpu_hardware", node=text, machine=text)) == []


@pytest.mark.parametrize("category", model.CATEGORIES)
def test_advice_without_kubernetes_names_no_pod(category: str) -> None:
    """Advice without Kubernetes names no pod."""
    (_, plain), (_, flyte) = (
        describe_fault_owner(category, PLAIN),
        describe_fault_owner(category, FLYTE),
    )
    assert "pod" not in plain
    assert not {"{", "}"} & set(plain + flyte)


@pytest.mark.parametrize(
    ("decision", "flyte", "plain"),
    [
        (_AGAIN, "yes", "yes"),
        (_NO, "no", "no"),
        (replace(_AGAIN, enforced=False), "yes (advice: Flyte may not retry)", "yes"),
        (replace(_NO, enforced=False), "no (advice: Flyte may retry anyway)", "no"),
        (replace(_AGAIN, retries_left=0), "no retries left", "yes"),
    ],
)
def test_the_retry_answer_has_spent_retries_and_who_follows_it(
    decision: model.Decision, flyte: str, plain: str
) -> None:
    """With Flyte, it includes spent retries and whether Flyte follows the decision;
    without an engine it is plain.
    """
    assert (FLYTE.describe_retry(decision), PLAIN.describe_retry(decision)) == (flyte, plain)


def test_without_an_engine_no_form_mentions_flyte_or_kubernetes() -> None:
    """No form of a report on a job without an engine mentions Flyte's decisions or Kubernetes."""
    report = _report("plain", category="node_lost")
    for text in (flyte_message(report), markdown(report), terminal_text(report)):
        assert re.search(r"Retry\W+yes: ", text)
        assert "kubectl" not in text
        assert "Flyte" not in text
    assert "advice" not in flyte_message(_report("flyte")), "an enforced decision needs no remark"
