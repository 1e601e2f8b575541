"""The watch for stalls as pure code, phase by phase, and jobs that stall for days."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from firstfault_torch.protocol.stall_limits import StallLimits, build_stall_limits
from firstfault_torch.protocol.stall_messages import (
    AskWorkers,
    CloseComparison,
    Compare,
    ComparisonClosed,
    Conclude,
    ConfirmStall,
    CountStall,
    DeleteStalls,
    KillWorkers,
    LookUpPeers,
    MeasureUsage,
    NoReportElected,
    NotifyOfStall,
    NumberRead,
    ObservationsTaken,
    Observe,
    PeersLookedUp,
    PollDue,
    PollEnded,
    PrintLines,
    ProgressPolled,
    ReadNumber,
    ReplaceConnections,
    ReportElected,
    ReportsCollected,
    RoundEnded,
    ShareReport,
    SkipFrozenTime,
    StallConcluded,
    StallCounted,
    StallEvent,
    StallInstruction,
    StallReport,
    WriteRecord,
)
from firstfault_torch.protocol.stalls import StallPhase, StallProtocol
from lab.simulated_jobs import stalls
from lab.simulated_jobs.faults import Fault
from lab.simulated_jobs.stalls import StallingJob, find_violations

WARN = build_stall_limits(60)
END = build_stall_limits(60, 300)
REPORT = StallReport(("no progress for 60 s",), (5,), position="loader.py:88 in read_shard")
KILLS = StallReport(("no progress for 300 s",), (5,), position="", workers_to_kill=((1, 0), (2, 1)))
OBSERVED = ObservationsTaken(calls_collectives=True)


class Watch:
    """The watch of node 1 of three; polls at the times that the test gives."""

    def __init__(
        self,
        limits: StallLimits = WARN,
        nodes: int = 3,
        own: int | None = None,
        *,
        is_starting: bool = False,
    ) -> None:
        own = min(1, nodes - 1) if own is None else own
        self.protocol = StallProtocol(own, nodes, limits, 0.0, has_peers=nodes > 1)
        self.is_starting = is_starting
        self.since = 0.0

    @property
    def phase(self) -> StallPhase:
        return self.protocol.phase

    def take(self, event: StallEvent) -> list[StallInstruction]:
        return self.protocol.handle(event, self.protocol.times.polled)

    def poll(self, now: float, *, has_moved: bool = False) -> list[StallInstruction]:
        """Poll the workers, not frozen before; return what follows."""
        self.protocol.handle(PollEnded(), now)
        assert self.protocol.handle(PollDue(has_workers=True), now) == [AskWorkers()]
        self.since = now if has_moved else self.since
        polled = ProgressPolled(has_moved, self.since, self.is_starting)
        return self.protocol.handle(polled, now)

    def compare(self, seconds: float = 60.0, number: int = 0) -> Watch:
        """Come to the comparison of a stall that takes so many seconds."""
        ends = self.protocol.times.limits.end is not None and seconds >= 300
        assert self.poll(self.since + seconds) == [Observe(ends)]
        assert self.take(OBSERVED) == [ReadNumber()]
        assert self.take(NumberRead(number)) == [Compare(number)]
        return self

    def report(
        self,
        report: StallReport = REPORT,
        seconds: float = 60.0,
        number: int = 0,
        *,
        is_mine: bool = True,
    ) -> list[StallInstruction]:
        """Compare a stall, and return what follows from the report."""
        self.compare(seconds, number)
        assert self.take(ReportElected(report, is_mine)) == [CountStall(number)]
        return self.take(StallCounted(number + 1))

    def resume(self, seconds: float = 70.0) -> list[StallInstruction]:
        """The workers make progress after so many seconds."""
        return self.poll(self.since + seconds, has_moved=True)


# --- the rows of the table ------------------------------------------------------------------------


def test_advancing_asks_nothing_of_the_store() -> None:
    watch = Watch()
    assert watch.poll(5, has_moved=True) == []
    assert watch.phase is StallPhase.ADVANCING
    assert watch.poll(10) == []
    assert watch.phase is StallPhase.STALLED
    assert watch.poll(15, has_moved=True) == []
    assert watch.phase is StallPhase.ADVANCING


def test_stalled_looks_closer_at_the_limit() -> None:
    watch = Watch()
    assert watch.poll(29) == []
    assert watch.poll(31) == [MeasureUsage()]
    assert watch.poll(60) == [Observe(ends_attempt=False)]
    assert watch.phase is StallPhase.OBSERVING


def test_without_workers_nothing_is_asked() -> None:
    watch = Watch()
    assert watch.take(PollDue(has_workers=False)) == []


def test_after_the_first_limit_each_poll_asks_for_peers() -> None:
    watch = Watch()
    watch.report()
    assert watch.poll(65) == [ReadNumber()]
    assert watch.phase is StallPhase.ASKING
    assert watch.take(NumberRead(1)) == [LookUpPeers(1)]
    assert watch.take(PeersLookedUp(have_begun=False)) == [MeasureUsage()]
    assert watch.phase is StallPhase.REPORTED
    watch.poll(70)
    watch.take(NumberRead(1))
    assert watch.take(PeersLookedUp(have_begun=True)) == [Observe(ends_attempt=False)]


@pytest.mark.parametrize("number", [0, None], ids=["took part", "silent"])
def test_an_agent_joins_each_comparison_once(number: int | None) -> None:
    watch = Watch()
    watch.report()
    watch.poll(65)
    assert watch.take(NumberRead(number)) == [MeasureUsage()]
    assert watch.phase is StallPhase.REPORTED


def test_an_agent_joins_peers_if_it_may_end_the_attempt_later_than_at_the_next_poll() -> None:
    """The peers' wait would be over by then."""
    watch = Watch(END)
    watch.report(seconds=240)
    assert watch.poll(294.9) == [ReadNumber()]


@pytest.mark.parametrize("seconds", [295.0, 299.9])
def test_an_agent_that_may_end_the_attempt_at_the_next_poll_joins_then(seconds: float) -> None:
    watch = Watch(END)
    watch.report(seconds=240)
    assert watch.poll(seconds) == [MeasureUsage()]
    assert watch.poll(300) == [Observe(ends_attempt=True)]


def test_observing_without_collectives_leads_back() -> None:
    watch = Watch()
    watch.poll(60)
    assert watch.take(ObservationsTaken(calls_collectives=False)) == [MeasureUsage()]
    assert watch.phase is StallPhase.STALLED


def test_a_single_node_concludes_by_itself() -> None:
    watch = Watch(nodes=1)
    assert watch.poll(60) == [Observe(ends_attempt=False)]
    (conclude,) = watch.take(OBSERVED)
    assert isinstance(conclude, Conclude)
    assert (conclude.missing, conclude.seconds) == ((), 60)
    printed, record, *_ = watch.take(StallConcluded(REPORT))
    assert printed == PrintLines(REPORT.lines)
    assert isinstance(record, WriteRecord)
    assert watch.phase is StallPhase.REPORTED
    assert watch.poll(65) == [MeasureUsage()], "there are no peers to ask"


def test_a_broken_connection_is_replaced_before_the_store_counts_as_silent() -> None:
    watch = Watch()
    watch.poll(60)
    watch.take(OBSERVED)
    assert watch.take(NumberRead(None)) == [ReadNumber()]
    assert watch.take(NumberRead(7)) == [Compare(7)]
    watch.take(NoReportElected())
    watch.take(ComparisonClosed(None))
    watch.take(StallCounted(8))
    watch.poll(120)
    watch.take(OBSERVED)
    assert watch.take(NumberRead(None)) == [ReadNumber()], "it had answered in between"


def test_a_silent_store_is_asked_at_each_poll_for_as_long_as_peers_are_waited_for() -> None:
    watch = Watch()
    for now in (60, 65, 70):
        assert watch.poll(now) == [Observe(ends_attempt=False)]
        watch.take(OBSERVED)
        if now == 60:
            assert watch.take(NumberRead(None)) == [ReadNumber()]
        assert watch.take(NumberRead(None)) == [MeasureUsage()]
        assert watch.phase is StallPhase.STALLED
    watch.poll(75)
    watch.take(OBSERVED)
    (conclude,) = watch.take(NumberRead(None))
    assert isinstance(conclude, Conclude)
    assert conclude.missing == (0, 2)
    assert watch.take(StallConcluded(REPORT))[0] == PrintLines(REPORT.lines)


@pytest.mark.parametrize(
    ("nodes", "there", "missing"),
    [(3, {0, 1, 2}, ()), (3, {1, 2}, (0,)), (4, {0, 1}, (2, 3)), (3, {1}, None), (9, {1, 2}, None)],
)
def test_a_leader_concludes_unless_most_nodes_are_missing(
    nodes: int, there: set[int], missing: tuple[int, ...] | None
) -> None:
    watch = Watch(nodes=nodes).compare()
    (found,) = watch.take(ReportsCollected(frozenset(there)))
    if missing is None:
        assert found == ShareReport(StallReport(()))
    else:
        assert isinstance(found, Conclude)
        assert found.missing == missing
    assert watch.phase is StallPhase.COMPARING


def test_a_report_is_counted_then_printed_recorded_and_sent() -> None:
    watch = Watch()
    printed, record, notified, measured = watch.report()
    assert printed == PrintLines(REPORT.lines)
    assert isinstance(record, WriteRecord)
    assert (record.stall.number, record.stall.began, record.lost_seconds) == (0, 0.0, None)
    assert (notified, measured) == (NotifyOfStall(), MeasureUsage())
    assert watch.phase is StallPhase.REPORTED


def test_only_the_leader_records_notifies_and_deletes() -> None:
    watch = Watch()
    assert watch.report(number=3, is_mine=False) == [PrintLines(REPORT.lines), MeasureUsage()]


def test_a_report_without_lines_leads_back() -> None:
    watch = Watch()
    assert watch.report(StallReport(())) == [MeasureUsage()]
    assert watch.phase is StallPhase.STALLED


@pytest.mark.parametrize("report", [REPORT, None], ids=["published just now", "none"])
def test_a_comparison_without_a_leader_is_closed_and_counted(report: StallReport | None) -> None:
    watch = Watch().compare(number=2)
    assert watch.take(NoReportElected()) == [CloseComparison()]
    assert watch.take(ComparisonClosed(report)) == [CountStall(2)]
    found = watch.take(StallCounted(3))
    if report is None:
        assert found == [ReplaceConnections(), DeleteStalls((0, 1)), MeasureUsage()]
        assert watch.phase is StallPhase.STALLED
    else:
        assert found == [PrintLines(report.lines), MeasureUsage()]
        assert watch.phase is StallPhase.REPORTED


def test_of_many_nodes_only_a_few_delete_if_there_was_no_leader() -> None:
    deleting = []
    for own in range(9):
        watch = Watch(nodes=9, own=own).compare(number=1)
        watch.take(NoReportElected())
        watch.take(ComparisonClosed(None))
        deleting += [own] if DeleteStalls((0,)) in watch.take(StallCounted(2)) else []
    assert deleting == [0, 1, 2, 3]


@pytest.mark.parametrize(("number", "old"), [(1, (0,)), (2, (0, 1)), (9, (6, 7, 8))])
def test_a_leader_deletes_what_earlier_stalls_left(number: int, old: tuple[int, ...]) -> None:
    assert Watch().report(number=number)[0] == DeleteStalls(old)


def test_a_frozen_agent_prints_nothing_of_a_stall_that_is_long_over() -> None:
    """Its peers have counted further, and it deletes what it wrote late."""
    watch = Watch().compare(number=4)
    watch.take(ReportElected(REPORT, is_mine=True))
    found = watch.take(StallCounted(6))
    assert found == [DeleteStalls((4,)), ReplaceConnections(), MeasureUsage()]
    assert watch.phase is StallPhase.STALLED


def test_only_this_nodes_straggler_is_killed_after_another_poll() -> None:
    watch = Watch(END)
    found = watch.report(KILLS, 300)
    assert found[-1] == ConfirmStall()
    assert watch.phase is StallPhase.CONFIRMING
    found = watch.take(ProgressPolled(has_moved=False, since=0.0, is_starting=False))
    assert found == [KillWorkers((0,), 300), NotifyOfStall(), MeasureUsage()]


def test_a_job_that_resumed_during_the_comparison_is_not_ended() -> None:
    watch = Watch(END)
    watch.report(KILLS, 300)
    found = watch.take(ProgressPolled(has_moved=True, since=301.0, is_starting=False))
    assert not [each for each in found if isinstance(each, KillWorkers)]
    assert watch.phase is StallPhase.REPORTED


def test_progress_completes_the_record_of_a_report() -> None:
    watch = Watch()
    watch.report()
    record, printed, notified = watch.resume(74)
    assert isinstance(record, WriteRecord)
    assert (record.stall.number, record.lost_seconds) == (0, 74)
    assert printed == PrintLines(("progress resumed after 74 s",))
    assert notified == NotifyOfStall()
    assert watch.phase is StallPhase.ADVANCING
    assert watch.poll(133) == [MeasureUsage()]
    assert watch.poll(134) == [Observe(ends_attempt=False)], "the limits begin anew"


def test_a_stall_keeps_the_number_and_the_straggler_of_its_first_report() -> None:
    watch = Watch()
    watch.report()
    nobody = StallReport(("no progress for 120 s, no single rank is behind",))
    _, printed, record, _ = watch.report(nobody, 120, number=1)
    assert printed == PrintLines(nobody.lines)
    assert isinstance(record, WriteRecord)
    assert (record.stall.number, record.stall.report) == (0, REPORT)


def test_a_failed_instruction_leads_back_and_is_not_repeated_at_each_poll() -> None:
    watch = Watch()
    watch.poll(60)
    watch.take(PollEnded())
    assert watch.phase is StallPhase.STALLED
    assert watch.poll(65) == [ReadNumber()]


# --- when it looks, and what it prints ------------------------------------------------------------


def test_the_next_limit_is_twice_the_nominal_one() -> None:
    """The measured time is longer on each node by another part of a poll."""
    watches = [Watch() for _ in range(2)]
    for number, late in ((1, (0.1, 4.9)), (2, (4.9, 0.1)), (4, (2.0, 4.9))):
        for watch, more in zip(watches, late, strict=True):
            watch.report(seconds=60 * number + more, number=number)
            assert watch.poll(120 * number - 0.1) == [ReadNumber()]


def test_busy_ranks_at_the_start_are_looked_at_after_another_warning() -> None:
    watch = Watch(nodes=1, is_starting=True)
    watch.poll(63)
    (conclude,) = watch.take(OBSERVED)
    assert isinstance(conclude, Conclude)
    assert conclude.is_silent_if_busy
    watch.take(StallConcluded(StallReport(())))
    assert watch.poll(122) == [MeasureUsage()]
    assert watch.poll(123) == [Observe(ends_attempt=False)]


def test_the_first_steps_end_an_attempt_three_times_later() -> None:
    watch = Watch(build_stall_limits(None, 40), nodes=1, is_starting=True)
    assert watch.poll(119) == [MeasureUsage()]
    assert watch.poll(120) == [Observe(ends_attempt=True)]


def test_a_busy_straggler_is_spared_until_its_own_limit() -> None:
    watch = Watch(build_stall_limits(None, 100, 150), nodes=1)
    for now, spares in ((100, True), (150, False)):
        assert watch.poll(now) == [Observe(ends_attempt=True)]
        (conclude,) = watch.take(OBSERVED)
        assert isinstance(conclude, Conclude)
        assert conclude.continues_if_busy == spares
        watch.take(StallConcluded(REPORT))
    assert watch.poll(399) == [MeasureUsage()]
    assert watch.poll(400) == [Observe(ends_attempt=True)]


def test_time_in_which_the_agent_was_frozen_is_no_stall() -> None:
    watch = Watch()
    watch.poll(5, has_moved=True)
    watch.take(PollEnded())
    due = PollDue(has_workers=True)
    assert watch.protocol.handle(due, 5 + WARN.frozen) == [AskWorkers()]
    watch.protocol.handle(PollEnded(), 25)
    assert watch.protocol.handle(due, 200) == [SkipFrozenTime(175), AskWorkers()]


def test_an_investigation_is_no_frozen_time() -> None:
    watch = Watch()
    watch.poll(60)
    watch.protocol.handle(PollEnded(), 95)
    assert watch.protocol.handle(PollDue(has_workers=True), 100) == [AskWorkers()]


def test_the_fourth_stall_at_a_place_is_only_recorded_unless_it_is_long() -> None:
    watch = Watch(nodes=1)
    printed = []
    for _ in range(4):
        watch.poll(watch.since + 61)
        watch.take(OBSERVED)
        printed += [type(each) for each in watch.take(StallConcluded(REPORT))]
        printed += [type(each) for each in watch.resume()]
    assert (printed.count(PrintLines), printed.count(WriteRecord)) == (6, 8)
    watch.poll(watch.since + 240)
    watch.take(OBSERVED)
    assert watch.take(StallConcluded(REPORT))[0] == PrintLines(REPORT.lines)


def test_records_of_unprinted_stalls_are_limited() -> None:
    watch = Watch()
    quiet = StallReport(("no progress",), (5,), position="save", is_shown=False)
    assert isinstance(watch.report(quiet, number=99)[1], WriteRecord)
    watch.resume()
    assert watch.report(quiet, number=100) == [DeleteStalls((97, 98, 99)), MeasureUsage()]
    assert watch.resume() == []


@pytest.mark.parametrize(("resumed", "is_shown"), [(2, True), (3, False)])
def test_the_leader_decides_for_all_nodes_what_is_printed(resumed: int, is_shown: bool) -> None:
    leader, other = Watch().compare(), Watch()
    leader.protocol.reports.resumed[REPORT.ranks, REPORT.place] = resumed
    leader.take(ReportsCollected(frozenset({0, 1, 2})))
    (shared,) = leader.take(StallConcluded(REPORT))
    assert isinstance(shared, ShareReport)
    other.protocol.reports.resumed[REPORT.ranks, REPORT.place] = 5 - resumed
    found = other.report(shared.report, is_mine=False)
    assert (PrintLines(REPORT.lines) in found) == is_shown


# --- each phase and each event --------------------------------------------------------------------

EVENTS: tuple[StallEvent, ...] = (
    PollDue(has_workers=True),
    ProgressPolled(has_moved=False, since=0.0, is_starting=False),
    ProgressPolled(has_moved=True, since=300.0, is_starting=False),
    PollEnded(),
    OBSERVED,
    NumberRead(7),
    NumberRead(None),
    PeersLookedUp(have_begun=True),
    ReportsCollected(frozenset({1})),
    StallConcluded(REPORT),
    ReportElected(REPORT, is_mine=True),
    NoReportElected(),
    ComparisonClosed(None),
    StallCounted(None),
    RoundEnded(),
)


def _reach(phase: StallPhase) -> Watch:  # noqa: C901 - one case for each phase
    """Return a watch in a phase."""
    watch = Watch(END)
    match phase:
        case StallPhase.ADVANCING:
            watch.poll(5, has_moved=True)
        case StallPhase.STALLED:
            watch.poll(5)
        case StallPhase.ASKING:
            watch.report()
            watch.poll(65)
        case StallPhase.OBSERVING:
            watch.poll(300)
        case StallPhase.NUMBERING:
            watch.poll(300)
            watch.take(OBSERVED)
        case StallPhase.CONCLUDING:
            watch = Watch(nodes=1)
            watch.poll(60)
            watch.take(OBSERVED)
        case StallPhase.CONFIRMING:
            watch.report(KILLS, 300)
        case StallPhase.REPORTED:
            watch.report()
        case StallPhase.ENDED:
            watch.poll(300)
            watch.take(RoundEnded())
        case _:
            watch.compare()
            if phase is StallPhase.CLOSING:
                watch.take(NoReportElected())
            if phase is StallPhase.COUNTING:
                watch.take(ReportElected(REPORT, is_mine=True))
    assert watch.phase is phase
    return watch


def _pairs() -> Iterator[tuple[StallPhase, StallEvent]]:
    for phase in StallPhase:
        for event in EVENTS:
            yield phase, event


@pytest.mark.parametrize(
    ("phase", "event"),
    list(_pairs()),
    ids=lambda item: item.value if isinstance(item, StallPhase) else type(item).__name__,
)
def test_each_phase_accepts_each_event_and_returns_to_a_poll(
    phase: StallPhase, event: StallEvent
) -> None:
    watch = _reach(phase)
    watch.take(event)
    watch.take(PollEnded())
    expected = {StallPhase.ADVANCING, StallPhase.STALLED, StallPhase.REPORTED}
    ended = {StallPhase.ENDED}
    assert watch.phase in (ended if phase is StallPhase.ENDED else expected | ended)


@pytest.mark.parametrize("phase", list(StallPhase), ids=lambda phase: phase.value)
def test_nothing_is_printed_or_killed_after_the_end_of_a_round(phase: StallPhase) -> None:
    watch = _reach(phase)
    watch.take(RoundEnded())
    answers = (ReportElected(KILLS, is_mine=False), ComparisonClosed(KILLS), StallCounted(1))
    still = ProgressPolled(has_moved=False, since=0.0, is_starting=False)
    found = [each for event in (*answers, still) for each in watch.take(event)]
    assert not [each for each in found if isinstance(each, PrintLines | KillWorkers)]
    watch.take(PollEnded())
    assert watch.phase is StallPhase.ENDED


# --- jobs that stall ------------------------------------------------------------------------------

ENDS = "I2 every watch returns to ADVANCING or ends"
NOT_ACCUSED = "I9 no live node that hangs is said not to respond"
FEW_BYTES = "I10 the store stays small"
FEW_COMPARISONS = "I10 at most two comparisons have keys"
ALL_PRINT = "all nodes print a report or none does"


def test_present_rules_violate_nothing() -> None:
    assert stalls.play(range(200), "present", days=0.05).seeds == {}


@pytest.mark.parametrize(
    ("rules", "seeds", "violated"),
    [
        ("drifting looks", range(8), {NOT_ACCUSED}),
        ("no deletions", range(34, 38), {FEW_BYTES, FEW_COMPARISONS}),
        ("former", range(56, 65), {NOT_ACCUSED, FEW_COMPARISONS}),
    ],
)
def test_the_simulator_sees_what_former_rules_did(
    rules: str, seeds: range, violated: set[str]
) -> None:
    assert stalls.play(seeds, rules, days=0.1).seeds.keys() == violated


def test_a_stalling_job_is_played_again_in_the_same_way() -> None:
    traces = [StallingJob(3, days=0.1, trace=True).play().events.lines for _ in range(2)]
    assert traces[0]
    assert traces[0] == traces[1]


@pytest.mark.parametrize(
    ("rules", "seed", "faults", "violated"),
    [
        # each node doubled what it had measured: their looks were apart by more than they wait
        ("drifting looks", 0, [Fault(1512.4, "stall", 1, 5742.8)], NOT_ACCUSED),
        # what each comparison left in the store stayed there
        ("no deletions", 37, [Fault(2698.4, "stall", 7, 1500.0)], FEW_BYTES),
        # a connection broke between two stalls: no peer could be asked, and all were accused
        (
            "former",
            0,
            [
                Fault(300.0, "stall", 0, 100.0),
                Fault(500.0, "reset", 1, 1.0),
                Fault(4000.0, "stall", 0, 100.0),
            ],
            NOT_ACCUSED,
        ),
        # a node waited for its end, and came after the peers' wait
        ("former", 6, [Fault(300.0, "stall", 0, 400.0)], NOT_ACCUSED),
        # a node that took no part in a comparison counted one repeated stall less
        (
            "former",
            49,
            [
                Fault(300.0, "stall", 0, 100.0),
                Fault(3900.0, "stall", 0, 100.0),
                Fault(3940.0, "freeze agent", 1, 50.0),
                Fault(7500.0, "stall", 0, 100.0),
                Fault(11100.0, "stall", 0, 100.0),
            ],
            ALL_PRINT,
        ),
    ],
    ids=["drift", "leak", "broken connection", "late for an end", "repeated stalls"],
)
def test_past_faults(rules: str, seed: int, faults: list[Fault], violated: str) -> None:
    former, present = (
        dict(find_violations(StallingJob(seed, name, faults=faults).play()))
        for name in (rules, "present")
    )
    assert violated in former
    assert present == {}


def test_shrinking_keeps_the_violation_with_fewer_faults() -> None:
    seed = 13
    whole = StallingJob(seed, "drifting looks", 0.1).faults
    faults = stalls.shrink(seed, "drifting looks", 0.1, NOT_ACCUSED)
    assert 0 < len(faults) <= len(whole)
