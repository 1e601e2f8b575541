"""Judges strategies on large simulated cascades with a known root cause: ``make simulation``.

Each is made from a recorded cascade of the lab. The documents of the culprit, of its node and of
the other nodes are dealt out to the ranks of a large job, with other ranks, nodes, addresses and
times; each node has its own clock. Then some documents are removed. The simulation shows that the
rules hold with many, late, missing and contradictory documents. It does not show other texts, other
orders, backends other than gloo, or a storage that fails. Victims name the peers that the rules
below choose; the members of a real ring name their neighbours.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # started as a script

from firstfault.layout import roster_key_for  # noqa: E402
from firstfault.model import DocumentRef, JobErrors, Scope, Verdict, WorkerError  # noqa: E402
from firstfault.reading.assemble import Snapshot, assemble  # noqa: E402 - only now all is found
from firstfault.strategies import get_strategy, run_strategy  # noqa: E402
from firstfault.wire.documents import decode, decode_presence, encode, encode_presence  # noqa: E402
from lab.cascades.making import RANKS_PER_NODE, Cascade, Root, Rules, cascades  # noqa: E402
from lab.cascades.objects import Objects, looked_at  # noqa: E402
from lab.cascades.replay import BENCHMARKS, LAST_WRITTEN, TORCH  # noqa: E402

BY_GROUPS = "evidence by groups"
"""The strategy on only the documents that a reader opens in a large cascade."""
STRATEGIES = ("evidence", BY_GROUPS, "earliest", LAST_WRITTEN, TORCH)


def judge(cascade: Cascade, verdict: Verdict) -> str:
    """Return "right", "wrong", or "undetermined";
    "honest" if the root left no document and no rank is named.
    """
    if verdict.scope is Scope.UNDETERMINED:
        return "undetermined" if any(root.left for root in cascade.roots) else "honest"
    named = [root for root in cascade.roots if _names(verdict, root)]
    if not named:
        return "wrong"
    suspects = {(suspect.rank, suspect.node) for suspect in verdict.suspects}
    for other in cascade.roots:
        is_said = _names(verdict, other) or (other.rank, other.node) in suspects or not other.left
        if not is_said:
            return "wrong"
    return "right"


def _names(verdict: Verdict, root: Root) -> bool:
    if root.scope == "rank":
        return root.rank in verdict.ranks
    scope = {"node": Scope.NODE, "external": Scope.EXTERNAL}[root.scope]
    return verdict.scope is scope and verdict.node == root.node


@dataclass(slots=True)
class Tally:
    """The results of a strategy."""

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Outcomes, by fault."""
    sure_and_wrong: int = 0
    first_first: int = 0
    seconds: list[float] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    """Number of opened objects of each cascade, if not all were opened."""

    def total(self) -> Counter[str]:
        return sum(self.outcomes.values(), Counter())


def simulate(
    rules: Rules, seeds: Iterable[int], verbose: bool = False
) -> tuple[dict[str, Tally], list[float]]:
    """Make one cascade for each seed; return the results of each strategy,
    and the seconds of assembling.
    """
    tallies = {name: Tally() for name in STRATEGIES}
    assembling = []
    for cascade in cascades(rules, seeds):
        began = time.perf_counter()
        nodes = cascade.workers // RANKS_PER_NODE
        job = assemble(cascade.snapshot, expected_nodes=nodes)
        assembling.append(time.perf_counter() - began)
        for name, tally in tallies.items():
            strategy = BENCHMARKS.get(name) or get_strategy(name.partition(" ")[0])
            seen = job
            if name == BY_GROUPS:
                objects = Objects.of(cascade.snapshot)
                seen = looked_at(objects, "evidence", nodes)
                tally.opened.append(objects.gets)
            began = time.perf_counter()
            verdict = run_strategy(strategy, seen)
            tally.seconds.append(time.perf_counter() - began)
            outcome = judge(cascade, verdict)
            tally.outcomes[cascade.fault][outcome] += 1
            tally.sure_and_wrong += outcome == "wrong" and verdict.confidence == "high"
            tally.first_first += len(cascade.roots) > 1 and _names(verdict, cascade.roots[0])
            if verbose and name in {"evidence", BY_GROUPS} and outcome in {"wrong", "undetermined"}:
                _explain(cascade, seen, verdict, f"{name} {outcome}")
    return tallies, assembling


def judged(count: int) -> Iterator[tuple[str, Verdict]]:
    """Yield the outcome and the verdict of `evidence` on each of the first simulated
    cascades that names a culprit.
    """
    for cascade in cascades(Rules(), range(1, count + 1)):
        job = assemble(cascade.snapshot, expected_nodes=cascade.workers // RANKS_PER_NODE)
        verdict = run_strategy(get_strategy("evidence"), job)
        if verdict.scope is not Scope.UNDETERMINED:
            yield judge(cascade, verdict), verdict


def _explain(cascade: Cascade, job: JobErrors, verdict: Verdict, outcome: str) -> None:
    print(f"\n{cascade.fault}: {outcome}; truth {cascade.roots}")
    print(f"  {verdict.confidence}: {verdict.headline}")
    for line in verdict.why:
        print(f"  - {line}")
    for suspect in verdict.suspects:
        print(f"  ? {suspect}")
    ranks = {root.rank for root in cascade.roots}
    for failure in job.failures:
        if failure.rank in ranks and failure.rank is not None:
            print(f"  root's: {failure.what} {failure.message[:200]!r} {failure.timestamp_ns}")


def report(rules: Rules, tallies: dict[str, Tally], assembling: list[float]) -> str:
    count = len(assembling)
    width = 42
    lines = [
        (
            f"{count} cascades of {rules.workers} workers, clocks wrong by up to"
            f" {rules.clock_error_s:g} s"
        ),
        f"{'':18}" + "".join(f"{name:>{width}}" for name in tallies),
        f"{'fault':18}" + f"{'right  wrong  honestly  undetermined':>{width}}" * len(tallies),
    ]
    faults = sorted({fault for tally in tallies.values() for fault in tally.outcomes})
    rows = [(fault, [tally.outcomes[fault] for tally in tallies.values()]) for fault in faults]
    rows.append(("all", [tally.total() for tally in tallies.values()]))
    for fault, cells in rows:
        numbers = "".join(
            f"{cell['right']:>12}{cell['wrong']:>7}{cell['honest']:>10}{cell['undetermined']:>13}"
            for cell in cells
        )
        lines.append(f"{fault:18}{numbers}")
    for name, tally in tallies.items():
        total = tally.total()
        good = total["right"] + total["honest"]
        lines.append(
            f"{name}: right, or undetermined where the root left nothing, {100 * good / count:.2f}"
            f" %; wrong with high confidence {100 * tally.sure_and_wrong / count:.2f} %; of"
            f" {sum(tally.outcomes['two roots'].values())} with two roots the first one first in"
            f" {tally.first_first}; {1000 * statistics.median(tally.seconds):.0f} ms a verdict (max"
            f" {1000 * max(tally.seconds):.0f})"
        )
    opened = tallies[BY_GROUPS].opened
    lines.append(f"{BY_GROUPS}: {statistics.median(opened):.0f} objects opened (max {max(opened)})")
    lines.append(f"assembling the documents: {1000 * statistics.median(assembling):.0f} ms")
    return "\n".join(lines)


def measure(workers: int) -> str:
    """Return the time and memory of a verdict on one large cascade, from the documents' bytes,
    in a new process.
    """
    rules = Rules(workers=workers, late=0, unreadable=0, root_missing=0, two_roots=0)
    cascade = next(cascades(rules, [1]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "documents.zip"
        with zipfile.ZipFile(file, "w") as archive:
            for item in cascade.snapshot.documents:
                archive.writestr(f"errors/{item.documents[0].name}", encode(item))
            for entry in cascade.snapshot.roster:
                archive.writestr(f"roster/{roster_key_for(entry)}", encode_presence(entry))
            times = {
                item.documents[0].name: item.documents[0].last_modified_ns
                for item in cascade.snapshot.documents
            }
            archive.writestr("times.json", json.dumps(times))
        command = [sys.executable, __file__, "--judge", str(file), "--workers", str(workers)]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def judge_file(file: str, workers: int) -> str:
    """Return the time and memory of the verdict on the documents in a file; see `measure`."""
    with zipfile.ZipFile(file) as archive:
        times = json.loads(archive.read("times.json"))
        names = [name for name in archive.namelist() if name.startswith("errors/")]
        size = sum(archive.getinfo(name).file_size for name in names)
        roster = [
            decode_presence(archive.read(name), name)
            for name in archive.namelist()
            if name.startswith("roster/")
        ]
        began = time.perf_counter()
        documents = []
        for name in names:
            short = name.removeprefix("errors/")
            found = decode(archive.read(name), DocumentRef(short, last_modified_ns=times[short]))
            assert isinstance(found, WorkerError)
            documents.append(found)
    decoded = time.perf_counter()
    job = assemble(
        Snapshot(tuple(documents), (), tuple(roster)), expected_nodes=workers // RANKS_PER_NODE
    )
    assembled = time.perf_counter()
    verdict = run_strategy(get_strategy("evidence"), job)
    ended = time.perf_counter()
    # not ru_maxrss, which a process inherits from its parent
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    return (
        f"{len(names)} documents of {workers} workers ({size / 1e6:.0f} MB):"
        f" {verdict.headline}\nverdict {ended - assembled:.2f} s, after {decoded - began:.2f} s of"
        f" reading and decoding and {assembled - decoded:.2f} s of assembling; {peak:.0f} MB at"
        " most in the whole process"
    )


def main(arguments: list[str]) -> int:
    """Print the table; return 1 if the targets are missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cascades", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=1024)
    parser.add_argument(
        "--clock",
        type=float,
        default=5.0,
        help="seconds by which clocks are wrong at most",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--large",
        type=int,
        default=16_384,
        help="workers of the cascade that is timed; 0: none",
    )
    parser.add_argument("--judge", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("-v", action="store_true", dest="verbose")
    options = parser.parse_args(arguments)
    if options.judge:
        print(judge_file(options.judge, options.workers))
        return 0
    rules = Rules(workers=options.workers, clock_error_s=options.clock)
    seeds = range(options.seed, options.seed + options.cascades)
    tallies, assembling = simulate(rules, seeds, options.verbose)
    print(report(rules, tallies, assembling))
    if options.large:
        print(measure(options.large))
    ours = tallies["evidence"]
    total = ours.total()
    good = total["right"] + total["honest"]
    return (
        0
        if good >= 0.99 * options.cascades and ours.sure_and_wrong <= 0.001 * options.cascades
        else 1
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
