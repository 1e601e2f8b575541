"""Runs pairs of jobs with and without firstfault, and prints what differs: ``make harmless``.

``ARGS="--pairs 100 --first 40"`` runs the plans of other seeds, ``ARGS="17 23"`` only these.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

# torch's stores ask the name service for each connection
os.environ.setdefault("RES_OPTIONS", "attempts:0")
sys.path.insert(0, str(Path(__file__).parents[2]))  # started as a script

from lab.harmless.pairs import InvalidPlanError, NotPossibleError, find_differences, run_pair
from lab.harmless.plans import draw_plan

_ROOT = Path(__file__).parents[2]


def main(arguments: list[str]) -> int:
    """Run the pairs, print a table; return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", type=int, help="seeds; default: --pairs of them")
    parser.add_argument("--pairs", type=int, default=50, help="how many pairs, from --first on")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--folder", type=Path, default=_ROOT / "build" / "harmless")
    options = parser.parse_args(arguments)
    counts: dict[str, Counter[str]] = {}
    for seed in options.only or range(options.first, options.first + options.pairs):
        plan = draw_plan(seed)
        row = counts.setdefault(plan.kind, Counter())
        try:
            plain, ours = run_pair(plan, options.folder / str(seed))
        except (NotPossibleError, InvalidPlanError) as error:
            row["not possible" if isinstance(error, NotPossibleError) else "invalid"] += 1
            print(f"{seed:>4} {plan.title}\n     {error}", flush=True)
            continue
        differences = find_differences(plain, ours)
        row["pairs"] += 1
        row["differ"] += bool(differences)
        print(f"{seed:>4} {plain.seconds:5.1f} s {ours.seconds:5.1f} s  {plan.title}", flush=True)
        for line in differences:
            print(f"     {line}", flush=True)
    print(_table(counts))
    return int(any(row["differ"] or row["invalid"] for row in counts.values()))


def _table(counts: dict[str, Counter[str]]) -> str:
    total = sum(counts.values(), Counter())
    columns = ("pairs", "differ", "not possible", "invalid")
    lines = [f"| {'kind':10} | {' | '.join(columns)} |", "|---|---|---|---|---|"]
    for kind, row in [*sorted(counts.items()), ("all", total)]:
        lines.append(f"| {kind:10} | {' | '.join(str(row[name]) for name in columns)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    began = time.monotonic()
    status = main(sys.argv[1:])
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(status)
