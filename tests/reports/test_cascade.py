"""The cascade in a report: states of ranks and nodes, groups, times with their bounds,
and changes of attempts.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from firstfault.evidence.clocks import Interval
from firstfault.evidence.diagnosis import diagnose
from firstfault.model import (
    JobErrors,
    Outcome,
    Phase,
    RestartKind,
    RestartRecord,
    SentSignal,
    Subject,
    Unopened,
    Verdict,
    Victims,
    WorkerError,
    Writer,
)
from firstfault.render.drawings import Timeline, build_timeline, node_map
from firstfault.report import Report, flyte_message
from firstfault.report.cascade import Cascade, Event, build_cascade
from firstfault.report.data import AttemptSummary, changes_between, summarize_attempt, with_attempts
from firstfault.report.formatting import format_range, format_ranks, shorten_names
from firstfault.report.states import State
from firstfault.retry import decide
from firstfault.strategies import get_strategy, run_strategy
from firstfault.testing import make_error, make_job, make_presence
from firstfault.utils.text import duration
from tests.all_forms import FORMS
from tests.reports.scenes import SCENES, report_conclusion

_MS = 1_000_000
_CHARACTER = 7.4
"""Width of a letter in the drawing."""
_SENT = (SentSignal("SIGTERM", "rank 3 failed"),)
_BOOT = {"boot_id": "b"}


def _verdict(job: JobErrors) -> Verdict:
    return run_strategy(get_strategy("evidence"), job)


def _cascade(job: JobErrors, **verdict: Any) -> Cascade:
    return build_cascade(job, replace(_verdict(job), **verdict), diagnose(job))


def lost_peer(
    rank: int,
    at_ms: float = 9,
    text: str = "Connection closed by peer",
    **fields: Any,
) -> WorkerError:
    """Return the failure of a rank that lost its peer."""
    return make_error(rank, at_ms=at_ms, exception="RuntimeError", message=text, **fields)


def _death(rank: int, at_ms: float = 0) -> WorkerError:
    """Return the document about a rank that was killed, which its agent noticed a little late."""
    at = {"at_ms": at_ms, "monotonic_ns": 10**12 + int(at_ms * _MS), **_BOOT}
    return make_error(
        rank,
        exception=None,
        signal="SIGKILL",
        exit_code=-9,
        writer=Writer.AGENT,
        **at,
    )


def draw_timeline(cascade: Cascade) -> Timeline:
    timeline = build_timeline(cascade)
    assert timeline is not None
    return timeline


# --- states ---------------------------------------------------------------------------------------


def test_every_rank_has_a_state() -> None:
    """Ranks are the root cause, victims, stopped by their agent, finished, or without a report."""
    job = make_job(
        make_error(3, node="w-1", world_size=8),
        lost_peer(2, node="w-1"),
        make_error(0, node="w-0", at_ms=12, exception=None, sent_signals=_SENT, signal="SIGTERM"),
        roster=(
            make_presence(node="w-0", nodes=3, ranks=(0, 1)),
            make_presence(node="w-1", group_rank=1, nodes=3, ranks=(2, 3)),
            make_presence(Phase.SUCCEEDED, node="w-2", group_rank=2, nodes=3, ranks=(4, 5)),
        ),
    )
    cascade = _cascade(job)
    assert [(item.rank, item.state, item.node, item.local_rank) for item in cascade.ranks] == [
        (0, State.STOPPED, "w-0", 0),
        (1, State.UNREPORTED, "w-0", 1),
        (2, State.VICTIM, "w-1", 0),
        (3, State.ROOT, "w-1", 1),
        (4, State.FINISHED, "w-2", 0),
        (5, State.FINISHED, "w-2", 1),
        (6, State.UNREPORTED, "", None),
        (7, State.UNREPORTED, "", None),
    ]
    nodes = [(node.name, node.state) for node in cascade.nodes]
    assert nodes == [("w-0", None), ("w-1", None), ("w-2", State.FINISHED)]


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("ranks", {State.ROOT: 4}),
        ("undetermined", {State.UNCLEAR: 4}),
        ("node", {State.VICTIM: 2, State.UNREPORTED: 2}),
        ("external", {State.STOPPED: 4}),
    ],
)
def test_all_ranks_with_the_fault_are_root_causes(name: str, states: dict[State, int]) -> None:
    """Ranks with the same failure are all root causes;
    ranks of a node that is the root cause keep their states.
    """
    cascade = SCENES[name]().cascade
    assert {state: cascade.count(state) for state in State if cascade.count(state)} == states


def test_a_node_can_be_the_root_cause() -> None:
    """Only the lost or terminated node is marked; its group is the first, also without a document,
    and has no code.
    """
    for name in ("node", "external"):
        report = SCENES[name]()
        nodes = [item.name for item in report.cascade.nodes if item.state is State.ROOT]
        assert nodes == ["a7xk2m9qp4vd8wz3hj6t-n0-0-worker-1"]
        first = report.cascade.groups[0]
        assert (first.state, list(first.nodes), first.ranks) == (State.ROOT, nodes, ())
        assert report.answers.code == ""


def test_a_verdict_without_its_documents_has_ranks_too() -> None:
    """If a sealed verdict's documents are gone,
    the report still has the ranks that the verdict names.
    """
    verdict = _verdict(make_job(make_error(3, node="w-1")))
    verdict = replace(
        verdict, root=None, victims=Victims(2, ((0, "lost its peer"), (1, "stopped")))
    )
    ranks = build_cascade(make_job(), verdict, diagnose(make_job())).ranks
    assert [(item.rank, item.state) for item in ranks] == [
        (0, State.VICTIM),
        (1, State.VICTIM),
        (3, State.ROOT),
    ]
    assert ranks[0].line == "lost its peer"


def test_conflicting_ranks_and_impossible_world_sizes_are_contained() -> None:
    """If two nodes claim a rank, it is on the root cause's node;
    an impossible world size adds no ranks.
    """
    job = make_job(
        make_error(3, node="w-1"), make_error(3, node="w-0", at_ms=5, exception="KeyError")
    )
    cascade = _cascade(job)
    assert [(item.rank, item.node, item.state) for item in cascade.ranks] == [
        (3, "w-1", State.ROOT)
    ]
    assert sum(group.count for group in cascade.groups) == 2
    assert [
        item.rank for item in _cascade(make_job(make_error(3, world_size=2**32 - 1))).ranks
    ] == [3]


# --- groups ---------------------------------------------------------------------------------------


def test_identical_errors_are_one_group() -> None:
    """Groups are the root cause's, then the largest;
    texts that differ only in numbers are one group.
    """
    peers = [
        lost_peer(rank, text=f"Connection closed by peer [10.0.0.{rank}]:29500")
        for rank in (5, 6, 7)
    ]
    broken = make_error(1, at_ms=4, exception="BrokenPipeError", message="Broken pipe")
    groups = _cascade(make_job(make_error(3), *peers, broken)).groups
    assert [(group.number, group.what, group.ranks) for group in groups] == [
        (1, "ValueError", (3,)),
        (2, "RuntimeError", (5, 6, 7)),
        (3, "BrokenPipeError", (1,)),
    ]


def test_ranks_that_were_not_opened_belong_to_their_group() -> None:
    """Ranks whose similar documents were not opened are in their group,
    which counts them as not read.
    """
    job = make_job(make_error(3), lost_peer(5), lost_peer(6))
    unopened = (
        Unopened(job.failures[1].fingerprint, 90, tuple(range(10, 100))),
        Unopened("?:abc", 4, (1, 2)),
    )
    cascade = _cascade(replace(job, unopened=unopened))
    found = {group.what: (group.count, group.opened, len(group.ranks)) for group in cascade.groups}
    assert found == {"ValueError": (1, 1, 1), "RuntimeError": (92, 2, 92), "not opened": (2, 0, 2)}
    assert (cascade.count(State.VICTIM), cascade.count(State.UNCLEAR)) == (92, 2)
    # those of the root cause are counted once, in its group
    job = make_job(*(make_error(rank, node="w-0", world_size=10) for rank in range(4)))
    unopened = (Unopened(job.failures[0].fingerprint, 6, tuple(range(4, 10))),)
    groups = _cascade(replace(job, unopened=unopened)).groups
    assert [(group.ranks, group.opened) for group in groups] == [(tuple(range(10)), 4)]


# --- times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at_ms", "bounds", "delay", "short_delay"),
    [
        (31, (31, 31), "31 ms later", "+31 ms"),
        (0, (0, 0), "at the same time", "0"),
        (-5, (-5, -5), "5.0 ms earlier", "-5.0 ms"),
        (1_500, (1_480, 1_520), "1.5 s later", "+1.5 s"),
        (600, (200, 1_200), "200 ms to 1.2 s later", "+200 ms to +1.2 s"),
        (-600, (-1_200, -200), "200 ms to 1.2 s earlier", "-1.2 s to -200 ms"),
        (100, (0, 250), "up to 250 ms later", "0 to +250 ms"),
        (10, (-200, 300), "between 200 ms earlier and 300 ms later", "-200 ms to +300 ms"),
        (42, None, "42 ms later by the clock of its node", "about +42 ms"),
        (None, None, "", ""),
    ],
)
def test_a_time_is_as_exact_as_the_clocks_allow(
    at_ms: float | None,
    bounds: tuple[float, float] | None,
    delay: str,
    short_delay: str,
) -> None:
    """A time is shown as exactly as the clocks allow."""
    interval = None if bounds is None else Interval(*(int(bound * _MS) for bound in bounds))
    event = Event(
        make_error(1),
        State.VICTIM,
        None if at_ms is None else int(at_ms * _MS),
        interval,
    )
    assert (event.delay, event.short_delay) == (delay, short_delay)


def compare_with_root(root: WorkerError, other: WorkerError) -> Event:
    """Return the event of a failure that is compared with a root cause."""
    job = make_job(root, other)
    first = next(failure for failure in job.failures if failure.rank == root.rank)
    (event,) = (
        event for event in _cascade(job, root=first).events if event.failure.rank == other.rank
    )
    return event


def test_processes_of_one_boot_need_no_wall_clock() -> None:
    """For processes of one boot the monotonic times are compared,
    and the wall clocks are ignored.
    """
    root = make_error(0, node="w-0", monotonic_ns=10_000 * _MS, **_BOOT)
    event = compare_with_root(
        root, make_error(1, node="w-1", at_ms=-9_000, monotonic_ns=10_031 * _MS, **_BOOT)
    )
    assert (event.at_ns, event.delay) == (31 * _MS, "31 ms later")


def test_a_death_may_have_been_before_it_was_noticed() -> None:
    """An agent notices a death a little late, and the bounds of other times allow for that."""
    event = compare_with_root(_death(3), lost_peer(1, -20, monotonic_ns=10**12 - 20 * _MS, **_BOOT))
    assert event.bounds == Interval(-20 * _MS, 230 * _MS)


def _killed(*victims: tuple[int, float]) -> Report:
    """Return the report on rank 3's SIGKILL, noticed late,
    and on victims that failed some milliseconds later.
    """
    peers = [
        lost_peer(rank, at_ms, monotonic_ns=10**12 + int(at_ms * _MS), **_BOOT)
        for rank, at_ms in victims
    ]
    return report_conclusion(make_job(_death(3), *peers))


def test_an_unknown_order_is_not_shown() -> None:
    """A victim that may have failed before or after a death is drawn on neither side of it,
    nor called earlier.
    """
    report = _killed((0, -40), (1, 60), (2, 400))
    delay = "within 650 ms of the cause (times too inexact for an order)"
    assert report.followers == f"3 lost a peer, {delay}, first rank 0 on worker-0"
    drawn = {
        lane.name: (lane.point is not None, lane.band is not None)
        for lane in draw_timeline(report.cascade).lanes
    }
    assert drawn == {f"worker-0 rank {rank}": (rank != 0, True) for rank in range(4)}
    late = _killed((0, 500), (1, 900)).followers
    assert late == "2 lost a peer, 500 ms to 1.1 s after the cause, first rank 0 on worker-0"


@pytest.mark.parametrize(
    ("headlines", "end"),
    [
        (("{same}",), "; the start before ended in the same way"),
        (("bad batch", "{same}", "{same}"), "; the 2 starts before ended in the same way"),
        (("{same}", "bad batch"), ""),
        ((), ""),
    ],
)
def test_a_start_that_ended_alike_is_named_beside_an_unclear_retry(
    headlines: tuple[str, ...], end: str
) -> None:
    """That the restarted workers died as in the start before is said next to a
    retry that is unclear.
    """
    alone = make_job(_death(3))
    same = report_conclusion(alone).verdict.headline
    records = [
        RestartRecord(RestartKind.ROUND, number, text.format(same=same), restart=True, reason="")
        for number, text in enumerate(headlines)
    ]
    report = report_conclusion(replace(alone, restarts=tuple(records)))
    assert report.answers.retry_reason == report.decision.reason + end


def test_equal_bounds_are_one_time() -> None:
    """Bounds that are the same when rounded are one time,
    and a range from nothing has only its end.
    """
    times = [
        (2_600, 2_640, "2.6 s"),
        (0, 250, "up to 250 ms"),
        (8, 260, "8.0 ms to 260 ms"),
        (0, 0, "0 us"),
    ]
    for low, high, text in times:
        assert format_range(low * _MS, high * _MS) == text


def test_without_a_useful_time_no_time_line_is_drawn() -> None:
    """One failure, or many without a time, have none. If all of many ranks hung,
    only their ends have times.
    """
    assert build_timeline(_cascade(make_job(make_error()))) is None
    assert build_timeline(SCENES["no-times"]().cascade) is None
    stuck = "[Rank 0] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress"
    abort = {
        "exception": None,
        "signal": "SIGABRT",
        "exit_code": -6,
        "writer": Writer.AGENT,
        "log_tail": stuck,
    }
    job = make_job(
        *(make_error(n, node=f"worker-{n}", world_size=40, at_ms=n, **abort) for n in range(40))
    )
    report = report_conclusion(job)
    assert (report.verdict.category, len(report.verdict.ranks)) == ("hang", 40)
    assert build_timeline(report.cascade) is None
    assert "worker-39" in FORMS["page"](report)


def test_timed_out_ranks_of_a_hang_are_victims_of_an_unknown_start() -> None:
    """Timed-out ranks are victims. The start of the hang is unknown,
    so times are counted from the first failure.
    """
    report = SCENES["hang"]()
    assert [item.state for item in report.cascade.ranks] == [
        State.VICTIM,
        State.VICTIM,
        State.STOPPED,
        State.ROOT,
    ]
    delays = [event.delay for event in report.cascade.events if event.state is State.VICTIM]
    assert delays[0] == ""
    assert delays[1].endswith(" later, counted from the first failure")
    assert not report.cascade.from_root
    assert "earlier" not in report.followers
    assert [lane.is_origin for lane in draw_timeline(report.cascade).lanes].count(True) == 1
    assert report.verdict.headline.endswith("...")
    assert report.answers.what.endswith(", its peers 120"), (
        "the headline is cut, the answer is whole"
    )


def test_the_time_line_is_within_its_drawing() -> None:
    """Every mark and band of every scene lies between the names and the times."""
    for scene in SCENES.values():
        timeline = build_timeline(scene().cascade)
        if timeline is None:
            continue
        places = [lane.point for lane in timeline.lanes if lane.point is not None]
        bands = [(bar.x, bar.width) for bar in timeline.bars]
        bands += [lane.band for lane in timeline.lanes if lane.band is not None]
        places += [end for x, width in bands for end in (x, x + width)]
        assert 222 <= min(places) <= max(places) <= timeline.times_x
        longest = max((len(lane.delay) for lane in timeline.lanes), default=0)
        assert longest * _CHARACTER <= timeline.width - timeline.times_x
        assert max((len(lane.label) for lane in timeline.lanes), default=0) * _CHARACTER <= min(
            places
        )
        heights = [lane.y for lane in timeline.lanes] + [
            bar.y + bar.height for bar in timeline.bars
        ]
        assert max(heights) < timeline.height
        assert min([lane.y for lane in timeline.lanes] + [bar.y for bar in timeline.bars]) > 0


def test_a_damaged_incarnation_is_no_start_of_the_job() -> None:
    """An incarnation that is no time, or of a clock that was not set,
    neither breaks a report nor begins the job.
    """
    for incarnation in (2**63, 31_000, 2**43):
        entry = make_presence(incarnation=incarnation)
        report = report_conclusion(
            make_job(make_error(3, incarnation=incarnation), roster=(entry,))
        )
        assert (report.identity.started_ns, report.identity.seconds) == (None, None)
        assert "started" not in flyte_message(report)


@pytest.mark.parametrize("size", [17, 1_400])
def test_the_map_has_the_worst_state_of_each_node(size: int) -> None:
    """A node whose agent failed, that is silent, or whose ranks are not known,
    is never drawn as finished.
    """
    failures = [
        make_error(None, node=f"w-{n}", group_rank=n, subject=Subject.AGENT, at_ms=n)
        for n in range(size - 1)
    ]
    roster = tuple(make_presence(node=f"w-{n}", group_rank=n, nodes=size) for n in range(size - 1))
    silent = make_presence(Phase.JOINED, node=f"w-{size - 1}", group_rank=size - 1, nodes=size)
    drawn = node_map(report_conclusion(make_job(*failures, roster=(*roster, silent))).cascade)
    assert drawn is not None
    assert State.FINISHED not in {cells.state for cells in drawn.cells}
    assert sum(cells.path.count("M") for cells in drawn.cells) == size


def test_a_histogram_counts_every_failure() -> None:
    """Of more than 32 failures each is in one bar; the few are seen beside the many,
    and one clock has one scale.
    """
    lines, bars = (
        draw_timeline(_killed(*((rank, rank) for rank in range(4, end))).cascade)
        for end in (35, 36)
    )
    assert (len(lines.lanes), len(lines.bars), len(bars.lanes)) == (32, 0, 0)
    cascade = SCENES["a-thousand-ranks"]().cascade
    timeline = draw_timeline(cascade)
    assert timeline.lanes == ()
    counts = dict.fromkeys(timeline.states, 0)
    for bar in timeline.bars:
        counts[bar.state] += int(bar.name.split()[0])
        assert bar.height >= 2
    assert counts == {
        state: cascade.count(state) for state in (State.ROOT, State.VICTIM, State.STOPPED)
    }
    root = next(bar for bar in timeline.bars if bar.state is State.ROOT)
    assert root.x <= timeline.origin_x <= root.x + root.width
    assert all(bar.x >= root.x for bar in timeline.bars), "no victim is before the root cause"
    # the only known time of a rank that hung is when it was stopped
    assert State.ROOT not in draw_timeline(replace(cascade, from_root=False)).states


def test_labels_of_a_time_line_stand_apart() -> None:
    """The marks of the scale leave room for their labels, however long the cascade took."""
    for last_ms in (100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000):
        others = [make_error(0, at_ms=-last_ms), make_error(1, at_ms=last_ms)]
        places = [
            tick.x for tick in draw_timeline(_cascade(make_job(make_error(3), *others))).ticks
        ]
        assert min(after - before for before, after in itertools.pairwise(places)) > 50


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "limit", "text"),
    [
        ((), 0, ""),
        ((5,), 0, "5"),
        ((0, 1, 2, 5, 8, 9), 0, "0-2, 5, 8-9"),
        (tuple(range(0, 200, 2)), 60, "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24 and 87 more"),
        (tuple(range(0, 2_000, 2)), 5, "1000 ranks"),
    ],
)
def test_consecutive_ranks_are_a_range_and_the_rest_is_counted(
    ranks: tuple[int, ...], limit: int, text: str
) -> None:
    """Consecutive ranks are a range, and ranks over the limit are counted."""
    assert format_ranks(ranks, limit) == text


_DURATIONS = "1 us, 143 us, 1.5 ms, 31 ms, 1.2 s, 42 s, 119 s, 10 min, 120 min, 2 h, 48 h, 2 d"
_SECONDS = (9e-7, 143e-6, 1.5e-3, 31e-3, 1.25, 42, 119, 600, 7199, 7200, 172_799, 172_800)


def test_a_duration_has_two_or_three_digits() -> None:
    """A time has two or three digits and one unit, a longer one from two of it."""
    for sign in (1, -1):
        assert (
            ", ".join(duration(sign * round(seconds * 10**9)) for seconds in _SECONDS) == _DURATIONS
        )


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["f3-n0-0-worker-0", "f3-n0-0-worker-10"], ["worker-0", "worker-10"]),
        (["f3-n0-0-master-0", "f3-n0-0-worker-0"], ["master-0", "worker-0"]),
        (["f3-n0-0-worker-0"], ["f3-n0-0-worker-0"]),
        (["a", "b"], ["a", "b"]),
        (["x-1", "x-1"], ["x-1"]),
        (["gpu-1.rack7.example.com", "gpu-2.rack7.example.com"], ["gpu-1", "gpu-2"]),
        (["gpu-1.rack7.example.com", "gpu-1.rack8.example.com"], None),
        ([], []),
    ],
)
def test_node_names_lose_their_common_prefix(names: list[str], short: list[str] | None) -> None:
    """The common prefix of all nodes is left out, except for the word before the number; None:
    nothing is.
    """
    assert list(shorten_names(names).values()) == (names if short is None else short)


# --- what is not known ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "unknown"),
    [
        (
            {"exception": None, "signal": "SIGKILL", "exit_code": -9},
            "which process sent SIGKILL: not its agent",
        ),
        (
            {"exception": None, "signal": "SIGTERM", "exit_code": -15},
            "which process sent SIGTERM: not its agent",
        ),
        ({"exception": None, "exit_code": 3}, "why it exited: it raised no exception"),
        ({"at_ms": None}, "when it happened"),
    ],
)
def test_unknowns_are_listed_although_the_root_cause_is_certain(
    fields: dict[str, Any], unknown: str
) -> None:
    """The answers list what is unknown even if the root cause is certain;
    a failed agent has no rank.
    """
    assert unknown in report_conclusion(make_job(make_error(**fields))).answers.unknown
    agent = make_error(
        None,
        node="w-1",
        subject=Subject.AGENT,
        writer=Writer.AGENT,
        category="platform",
    )
    assert report_conclusion(make_job(agent)).answers.where == "the agent on w-1"


# --- attempts -------------------------------------------------------------------------------------


def _attempt(number: int, **fields: Any) -> AttemptSummary:
    job = make_job(make_error(**{"rank": 3, "node": f"f-n0-{number}-worker-1", **fields}))
    verdict = _verdict(job)
    return summarize_attempt(number, job, verdict, decide(verdict))


_AGAIN, _OTHER = (
    "the same fault again, on the same rank",
    "a different fault of the same category (user_code)",
)
_X, _Y, _7 = {"boot_id": "x"}, {"boot_id": "y"}, {"machine": "gpu-7"}


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ({}, {}, _AGAIN),
        # the host name of a pod is the pod's, not the machine's
        (
            {"host": "a"},
            {"rank": 5, "host": "b", "exception": "KeyError"},
            f"{_OTHER}, on rank 5 after 3",
        ),
        (_X, _X, f"{_AGAIN}, on the same machine"),
        (
            {**_7, **_X, "gpu": "GPU-1"},
            {**_7, **_X, "gpu": "GPU-2"},
            f"{_AGAIN}, on the same machine (gpu-7)",
        ),
        (
            {**_7, **_X, "gpu": "GPU-1"},
            {**_7, **_Y, "gpu": "GPU-1"},
            f"{_AGAIN}, on the same GPU (GPU-1)",
        ),
        ({**_7, **_X}, {**_Y, "machine": "gpu-8"}, f"{_AGAIN}, on machine gpu-8 after gpu-7"),
        (_X, _Y, f"{_AGAIN}, on another machine, or after a reboot"),
        (_X, {}, _AGAIN),
        (
            {"versions": (("torch", "2.12"),)},
            {"exception": None, "signal": "SIGSEGV", "versions": (("torch", "2.13"),)},
            "a different fault: signal after user_code, on the same rank, torch 2.13 after 2.12",
        ),
    ],
)
def test_known_facts_of_two_attempts_are_compared(
    before: dict[str, Any], after: dict[str, Any], change: str
) -> None:
    """Fault, rank, machine, GPU and versions are compared, as far as they are known."""
    assert changes_between((_attempt(0, **before), _attempt(1, **after))) == (
        f"attempt 0 to 1: {change}",
    )


def test_an_unreadable_attempt_hides_no_change() -> None:
    """The attempt after an unreadable one is compared with the attempt before it."""
    unread = AttemptSummary(1, Outcome.UNKNOWN, note="could not be read: access denied")
    changes = changes_between((_attempt(0), unread, _attempt(2)))
    assert changes[0] == "attempt 0 to 1: attempt 1 could not be read: access denied"
    assert changes[1].startswith("attempt 0 to 2: the same fault again")
    (both,) = changes_between((replace(unread, number=0), AttemptSummary(1, Outcome.SUCCEEDED)))
    assert both == "attempt 0 to 1: attempt 0 could not be read: access denied, attempt 1 succeeded"


def test_attempts_are_sorted_and_the_last_outcome_is_named() -> None:
    """The report sorts attempts by number, and names the outcome of the last one."""
    report = report_conclusion(
        make_job(make_error()), attempts=(_attempt(2), _attempt(0), _attempt(1))
    )
    assert [attempt.number for attempt in report.attempts] == [0, 1, 2]
    assert report.answers.retry == "retried, attempt 2 failed too"
    saved = with_attempts(report, (_attempt(0), AttemptSummary(1, Outcome.SUCCEEDED)))
    assert saved.answers.retry == "retried, attempt 1 succeeded"
