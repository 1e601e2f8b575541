"""Judges strategies on the recorded cascades: ``make replay``.

All pods of a recording ran on one machine with one clock; they are judged as if each node had its
own machine.
"""

import argparse
import json
import os
import sys
import tempfile
import zipfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from firstfault import MultiErrorFileOutputReader
from firstfault.model import JobErrors, Origin, Phase, Scope, Subject, Verdict
from firstfault.retry import decide
from firstfault.strategies import build_undetermined_verdict as nothing_said
from firstfault.strategies import build_verdict, find_root_candidates, get_strategy, run_strategy

sys.path.insert(0, str(Path(__file__).parents[2]))  # started as a script

from firstfault.model import WorkerError
from lab.cascades.cases import NCCL, NOT_KNOWN, PROGRAMS

RECORDED = Path(__file__).parent / "recorded"
OF_PROGRAMS = RECORDED / "torchrun"
"""Cascades of programs under torchrun."""
TORCH = "ChildFailedError"
LAST_WRITTEN = "last_written"
STRATEGIES = ("evidence", "earliest", LAST_WRITTEN, TORCH)
TARGETS = {"high": 0.995, "medium": 0.90}
"""Least share of right verdicts, by confidence; `low` promises nothing."""
_CONFIDENCES = ("high", "medium", "low")
Files: TypeAlias = "dict[str, tuple[bytes, int | None]]"
"""Content and time, nanoseconds, of files below an output prefix; None:
a copy that another node has handed over.
"""


@dataclass(frozen=True, slots=True)
class Cascade:
    """One recorded cascade."""

    name: str
    truth: dict[str, Any]
    job: JobErrors


def load(file: Path) -> Cascade:
    """Read a recorded cascade as a reader finds it, with each node on its own machine."""
    with zipfile.ZipFile(file) as archive:
        truth = json.loads(archive.read("truth.json"))
        files = {name: (archive.read(name), when) for name, when in truth["times"].items()}
    return Cascade(file.stem, truth, on_own_machines(build_job(files, truth["nodes_of_job"])))


def build_job(files: Files, nodes: int) -> JobErrors:
    """Return what a reader finds in files."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (data, when) in files.items():
            if when is not None:
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                os.utime(path, ns=(when, when))
        copies = {name: data for name, (data, when) in files.items() if when is None}
        return MultiErrorFileOutputReader(folder, expected_nodes=nodes, copies=copies).job()


def on_own_machines(job: JobErrors) -> JobErrors:
    """Return a job as if each node had its own machine and clock."""
    return replace(job, failures=tuple(map(_on_its_own_machine, job.failures)))


def _on_its_own_machine(failure: WorkerError) -> WorkerError:
    return (
        replace(failure, boot_id=f"{failure.boot_id}-{failure.node}")
        if failure.boot_id
        else failure
    )


def judge(truth: dict[str, Any], verdict: Verdict | None) -> str:
    """Return "right", "wrong" or "undetermined"."""
    if truth["scope"] == "none":
        return "right" if verdict is None else "wrong"
    if verdict is None:
        return "wrong"
    if verdict.scope is Scope.UNDETERMINED:
        return "right" if truth["scope"] == "undetermined" else "undetermined"
    ranks = set(truth["ranks"])
    named = set(verdict.ranks)
    right = {
        "rank": named == ranks,
        "one": bool(named) and named <= ranks,
        "ranks": verdict.scope is Scope.RANKS and bool(named) and named <= ranks,
        "node": verdict.scope is Scope.NODE and verdict.node in truth["nodes"],
        "external": verdict.scope is Scope.EXTERNAL and verdict.node in truth["nodes"],
        "somewhere": verdict.node in truth["nodes"],
        "undetermined": False,
    }
    return "right" if right[truth["scope"]] else "wrong"


def judged(truth: dict[str, Any], files: Files) -> tuple[str, Verdict | None]:
    """Judge the verdict of `evidence` on files."""
    cascade = Cascade("", truth, on_own_machines(build_job(files, truth["nodes_of_job"])))
    verdict = verdict_of(cascade, "evidence")
    return judge(truth, verdict), verdict


def right_decision(truth: dict[str, Any]) -> tuple[bool, Origin | None]:
    """Return whether the fault is to be retried, and on which budget."""
    if truth["fault"].startswith("recoverable"):
        return True, Origin.USER
    if truth["scope"] in {"node", "external"} or truth["fault"] == f"{NCCL}ecc":
        return True, Origin.SYSTEM
    return False, None


def is_decided_right(truth: dict[str, Any], verdict: Verdict | None) -> bool:
    """Whether firstfault's default policy decides right on this verdict."""
    if verdict is None:
        return bool(truth["scope"] == "none")
    decision = decide(verdict)
    return (decision.retry, decision.origin if decision.retry else None) == right_decision(truth)


def verdict_of(cascade: Cascade, strategy: str) -> Verdict | None:
    """Return a strategy's verdict, None if nothing failed in the last round."""
    if not cascade.job.failures and not any(
        entry.phase is Phase.FAILED for entry in cascade.job.roster
    ):
        return None
    return run_strategy(BENCHMARKS.get(strategy) or get_strategy(strategy), cascade.job)


def child_failed_error(job: JobErrors) -> Verdict:
    """Return torch's "Root Cause (first observed failure)" of the node whose box
    has the earliest second.

    Torch prints one box per node and does not compare them, so this is more than a person sees. Its
    times are whole seconds; of equal times it takes the first rank.
    """
    spoken = [
        item for item in job.failures if item.subject is Subject.WORKER and not item.sent_signals
    ]
    if not spoken:
        return nothing_said(job, TORCH)
    first = min(
        spoken,
        key=lambda item: (
            (item.timestamp_ns or 0) // 10**9,
            item.place.group_rank or 0,
            item.rank or 0,
        ),
    )
    return build_verdict(
        job,
        first,
        strategy=TORCH,
        why=["the first that was observed"],
        confidence="low",
    )


def last_written(job: JobErrors) -> Verdict:
    """Return the document written last by the storage's clock,
    which is in a single error.pb that all pods write.
    """
    root = max(find_root_candidates(job), key=_written)
    return build_verdict(
        job,
        root,
        strategy=LAST_WRITTEN,
        why=["its document was written last"],
        confidence="low",
    )


def _written(failure: WorkerError) -> tuple[object, ...]:
    modified = max((document.last_modified_ns or 0 for document in failure.documents), default=0)
    rank = failure.rank if failure.rank is not None else -1
    return (modified, failure.timestamp_ns or 0, rank, failure.node, failure.message, failure.code)


BENCHMARKS = {TORCH: child_failed_error, LAST_WRITTEN: last_written}
"""What jobs without firstfault report, by name."""


def main(arguments: list[str]) -> int:
    """Print the tables; return 1 if a verdict of `evidence` is not as expected,
    or a confidence promises too much.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", help="how the names of the recordings begin; default: all"
    )
    parser.add_argument(
        "-v",
        action="store_true",
        dest="verbose",
        help="explain wrong verdicts; with names: all",
    )
    parser.add_argument(
        "--incidents",
        nargs="*",
        default=[],
        metavar="FILE",
        help="incidents to calibrate on as well",
    )
    parser.add_argument(
        "--simulated",
        type=int,
        default=0,
        metavar="N",
        help="simulated cascades to calibrate on",
    )
    parser.add_argument(
        "--generated",
        nargs="*",
        type=Path,
        default=[],
        metavar="FOLDER",
        help="campaigns, likewise",
    )
    options = parser.parse_args(arguments)
    calibration = Calibration()
    bad = 0
    for folder in (RECORDED, OF_PROGRAMS):
        tally = Tally()
        for file in sorted(folder.glob("*.zip")):
            if not options.names or file.stem.startswith(tuple(options.names)):
                cascade = load(file)
                for strategy in STRATEGIES:
                    verdict = verdict_of(cascade, strategy)
                    is_good = tally.add(cascade, strategy, verdict)
                    if strategy == "evidence":
                        bad += not is_good
                        _count(calibration, cascade, verdict)
                        if options.verbose and (not is_good or options.names):
                            _explain(cascade, verdict)
        _print(tally)
    _calibrate_on_others(calibration, options.incidents, options.simulated)
    _calibrate_on_generated(calibration, options.generated)
    print(f"\n{calibration.table()}")
    return 1 if bad or calibration.missed() else 0


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of the verdicts on cascades."""

    table: dict[str, dict[str, Counter[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Counter))
    )
    """Outcomes, by row and strategy."""
    decisions: Counter[str] = field(default_factory=Counter)
    """Right decisions, by strategy."""

    def add(self, cascade: Cascade, strategy: str, verdict: Verdict | None) -> bool:
        """Count a strategy's verdict; return whether it and the decision are as expected."""
        outcome = judge(cascade.truth, verdict)
        decided = is_decided_right(cascade.truth, verdict)
        counts = self.table[_row(cascade)][strategy]
        counts[outcome] += 1
        counts["sure"] += (
            outcome == "wrong" and verdict is not None and verdict.confidence == "high"
        )
        self.decisions[strategy] += decided
        return decided and outcome == ("undetermined" if cascade.name in NOT_KNOWN else "right")


@dataclass(slots=True)
class Calibration:
    """Counts of verdicts that name a rank, ranks or a node:
    a confidence means something only if it is counted.
    """

    counts: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    """By source, confidence, and whether the verdict was right."""

    def add(self, source: str, confidence: str, outcome: str) -> None:
        """Count a verdict by where its cascade comes from;
        one that names nothing claims nothing.
        """
        if outcome in {"right", "wrong"}:
            self.counts[source, confidence, outcome == "right"] += 1

    def of(self, confidence: str, source: str = "") -> tuple[int, int]:
        """Return how many verdicts were right, and how many there were;
        of all sources unless one is given.
        """
        chosen = {
            key: count
            for key, count in self.counts.items()
            if key[1] == confidence and source in {"", key[0]}
        }
        return sum(count for key, count in chosen.items() if key[2]), sum(chosen.values())

    def missed(self) -> list[str]:
        """Return the confidences whose verdicts are right less often than they have to be."""
        shares = {level: self.of(level) for level in TARGETS}
        return [
            level
            for level, (right, count) in shares.items()
            if count and right < TARGETS[level] * count
        ]

    def table(self) -> str:
        rows = [*dict.fromkeys(source for source, _, _ in self.counts), ""]
        lines = [
            f"{'right of those with a confidence of':36}"
            + "".join(f"{level:>24}" for level in _CONFIDENCES)
        ]
        lines += [
            f"{source or 'all':36}"
            + "".join(_share(*self.of(level, source)) for level in _CONFIDENCES)
            for source in rows
        ]
        targets = "".join(
            f"{f'{100 * TARGETS[level]:g} %' if level in TARGETS else '':>24}"
            for level in _CONFIDENCES
        )
        return "\n".join([*lines, f"{'at least':36}{targets}"])


def _share(right: int, count: int) -> str:
    text = f"{right} of {count}, {100 * right / count:.1f} %" if count else "-"
    return f"{text:>24}"


def _count(calibration: Calibration, cascade: Cascade, verdict: Verdict | None) -> None:
    if verdict is not None and verdict.scope is not Scope.UNDETERMINED:
        calibration.add(_source(cascade), verdict.confidence, judge(cascade.truth, verdict))


def _source(cascade: Cascade) -> str:
    if cascade.name in PROGRAMS:
        return "recorded, programs under torchrun"
    if "-version2.15-" in cascade.name:
        return "recorded, torch 2.15's NCCL"
    return (
        "recorded, NCCL's behaviour"
        if cascade.truth["fault"].startswith(NCCL)
        else "recorded, gloo"
    )


def _calibrate_on_others(calibration: Calibration, files: list[str], simulated: int) -> None:
    from lab.cascades import incidents, simulation  # noqa: PLC0415 - they import this module

    for file in files:
        for _, outcome, verdict in incidents.judged(file):
            if verdict is not None:
                calibration.add(Path(file).name, verdict.confidence, outcome)
    for outcome, verdict in simulation.judged(simulated):
        calibration.add("simulated, 1,024 workers", verdict.confidence, outcome)


def _calibrate_on_generated(calibration: Calibration, folders: list[Path]) -> None:
    """Count the outcomes of campaigns of `make generated`;
    a verdict that tells another story is wrong.
    """
    for folder in folders:
        for file in folder.glob("*/outcome.json"):
            found = json.loads(file.read_text())
            result = {"partial": "right", "story": "wrong"}.get(found["result"], found["result"])
            if found["confidence"]:  # of a training without a fault there is no verdict
                calibration.add(folder.name, found["confidence"], result)


def _row(cascade: Cascade) -> str:
    """Return a cascade's row: its fault, its options and how torchrun started it,
    without rank and number of nodes.
    """
    if cascade.name in PROGRAMS:
        return f"torchrun: {PROGRAMS[cascade.name].way}"
    fault: str = cascade.truth["fault"]
    special = cascade.name.removeprefix(fault).partition("-rank")[0]
    return fault + special


def _explain(cascade: Cascade, verdict: Verdict | None) -> None:
    outcome = (
        f"{judge(cascade.truth, verdict)}, decision"
        f" {'right' if is_decided_right(cascade.truth, verdict) else 'WRONG'}"
    )
    print(
        f"\n{cascade.name}: {outcome}; truth {cascade.truth['scope']} {cascade.truth['ranks']}"
        f" {cascade.truth['nodes']}"
    )
    if verdict is not None:
        print(f"  {verdict.confidence}: {verdict.headline}")
        for line in verdict.why:
            print(f"  - {line}")
    for failure in cascade.job.failures:
        what = (
            failure.exception.message.splitlines()[:1]
            if failure.exception
            else failure.message[:90]
        )
        counts = [(item.group, item.enqueued, item.completed) for item in failure.collectives]
        print(
            f"    {failure.rank} {failure.node[-9:]} {failure.what} {what} {counts}"
            f" {failure.in_flight or ''}"
        )


_WIDTH = 31


def _print(tally: Tally) -> None:
    total: dict[str, Counter[str]] = defaultdict(Counter)
    print(f"\n{'':34}" + "".join(f"{name:>{_WIDTH}}" for name in STRATEGIES))
    print(f"{'fault':34}" + f"{'right  wrong (sure)  undeterm.':>{_WIDTH}}" * len(STRATEGIES))
    for fault, row in sorted(tally.table.items()):
        print(f"{fault:34}" + "".join(_cell(row[name]) for name in STRATEGIES))
        for name in STRATEGIES:
            total[name] += row[name]
    print(f"{'all':34}" + "".join(_cell(total[name]) for name in STRATEGIES))
    print(
        f"{'decided right':34}"
        + "".join(f"{tally.decisions[name]:>{_WIDTH - 23}}{'':23}" for name in STRATEGIES)
    )


def _cell(counts: Counter[str]) -> str:
    return f"{counts['right']:>8}{counts['wrong']:>7}{counts['sure']:>7}{counts['undetermined']:>9}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
