"""Judges strategies on the recorded cascades: ``make replay``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import zipfile
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstfault import MultiErrorFileOutputReader
from firstfault.model import JobErrors, Scope, Verdict
from firstfault.strategies import get_strategy, run_strategy

RECORDED = Path(__file__).parent / "recorded"
STRATEGIES = ("evidence", "earliest", "last_written")


@dataclass(frozen=True, slots=True)
class Cascade:
    """One recorded cascade."""

    name: str
    truth: dict[str, Any]
    job: JobErrors


def load(file: Path) -> Cascade:
    """Read a recorded cascade as a reader would have found it."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(file) as archive:
        truth = json.loads(archive.read("truth.json"))
        for name, when in truth["times"].items():
            path = Path(archive.extract(name, folder))
            os.utime(path, ns=(when, when))
        return Cascade(file.stem, truth, MultiErrorFileOutputReader(folder, expected_nodes=truth["nodes_of_job"]).job())


def judge(truth: dict[str, Any], verdict: Verdict | None) -> str:
    """Return "right", "wrong" or "undetermined"."""
    if truth["scope"] == "none":
        return "right" if verdict is None else "wrong"
    if verdict is None:
        return "wrong"
    if verdict.scope is Scope.UNDETERMINED:
        return "undetermined"
    ranks, named = set(truth["ranks"]), set(verdict.ranks)
    right = {
        "rank": named == ranks,
        "one": bool(named) and named <= ranks,
        "ranks": verdict.scope is Scope.RANKS and bool(named) and named <= ranks,
        "node": verdict.scope is Scope.NODE and verdict.node in truth["nodes"],
        "external": verdict.scope is Scope.EXTERNAL and verdict.node in truth["nodes"],
    }
    return "right" if right[truth["scope"]] else "wrong"


def verdict_of(cascade: Cascade, strategy: str) -> Verdict | None:
    """Return a strategy's verdict, None if nothing failed in the last round."""
    if not cascade.job.failures:
        return None
    return run_strategy(get_strategy(strategy), cascade.job)


def main(arguments: list[str]) -> int:
    """Print the table, and with -v what went wrong; return the number of verdicts of `evidence` that are not right."""
    wanted = [argument for argument in arguments if argument != "-v"]
    table: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    bad = 0
    for file in sorted(RECORDED.glob("*.zip")):
        if wanted and not any(file.stem.startswith(name) for name in wanted):
            continue
        cascade = load(file)
        for strategy in STRATEGIES:
            verdict = verdict_of(cascade, strategy)
            outcome = judge(cascade.truth, verdict)
            table[cascade.truth["fault"]][strategy][outcome] += 1
            if strategy == "evidence" and outcome != "right":
                bad += 1
            if "-v" in arguments and strategy == "evidence" and (outcome != "right" or wanted):
                _explain(cascade, verdict, outcome)
    _print(table)
    return bad


def _explain(cascade: Cascade, verdict: Verdict | None, outcome: str) -> None:
    print(
        f"\n{cascade.name}: {outcome}; truth {cascade.truth['scope']} {cascade.truth['ranks']} {cascade.truth['nodes']}"
    )
    if verdict is not None:
        print(f"  {verdict.confidence}: {verdict.headline}")
        for line in verdict.why:
            print(f"  - {line}")
    for failure in cascade.job.failures:
        what = failure.exception.message.splitlines()[:1] if failure.exception else failure.message[:90]
        counts = [(item.group, item.enqueued, item.completed) for item in failure.collectives]
        print(f"    {failure.rank} {failure.node[-9:]} {failure.what} {what} {counts} {failure.in_flight or ''}")


def _print(table: dict[str, dict[str, Counter[str]]]) -> None:
    total: dict[str, Counter[str]] = defaultdict(Counter)
    print(f"\n{'':24}" + "".join(f"{name:>26}" for name in STRATEGIES))
    print(f"{'fault':24}" + f"{'right  wrong  undeterm.':>26}" * len(STRATEGIES))
    for fault, row in sorted(table.items()):
        print(f"{fault:24}" + "".join(_cell(row[name]) for name in STRATEGIES))
        for name in STRATEGIES:
            total[name] += row[name]
    print(f"{'all':24}" + "".join(_cell(total[name]) for name in STRATEGIES))


def _cell(counts: Counter[str]) -> str:
    return f"{counts['right']:>9}{counts['wrong']:>7}{counts['undetermined']:>10}"


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
