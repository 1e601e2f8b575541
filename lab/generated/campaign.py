"""Runs generated trainings and counts how often the verdict is right: ``make generated``.

``ARGS="--seeds 400"`` runs the first 400, ``ARGS="17 203"`` these two and explains them,
``ARGS="--again"`` judges the documents of the last campaign with today's rules, without running
anything.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

# torch's stores ask the name service for each connection
os.environ.setdefault("RES_OPTIONS", "attempts:0")
sys.path.insert(0, str(Path(__file__).parents[2]))  # started as a script

from collections.abc import Iterable, Iterator

from lab.generated.program import TIMEOUT_S, Plan, plan_of
from lab.generated.running import Outcome, judged, run

_ROOT = Path(__file__).parents[2]
_RESULTS = ("right", "partial", "story", "undetermined", "wrong", "stuck")
_SURE = "high"


def main(arguments: list[str]) -> int:
    """Run the campaign; return 1 if a rank was wrong with high confidence, or a run was stuck."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", type=int, help="seeds; default: as many as --seeds says")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds, from --first on")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument(
        "--timeout",
        type=int,
        default=TIMEOUT_S,
        help="of the collectives, seconds",
    )
    parser.add_argument("--folder", type=Path, default=_ROOT / "build" / "generated")
    parser.add_argument(
        "--again", action="store_true", help="judge the documents of the last campaign again"
    )
    options = parser.parse_args(arguments)
    seeds = options.only or list(range(options.first, options.first + options.seeds))
    outcomes: dict[int, Outcome] = {}
    for seed, outcome in (
        _again(options.folder, options.only) if options.again else _run(seeds, options)
    ):
        outcomes[seed] = outcome
        if outcome.result != "right" or outcome.left or not outcome.agree or options.only:
            print(_line(plan_of(seed), outcome), flush=True)
    print(table(outcomes))
    return int(
        any(
            item.result == "stuck" or (item.result == "wrong" and item.confidence == _SURE)
            for item in outcomes.values()
        )
    )


def _run(seeds: list[int], options: argparse.Namespace) -> Iterator[tuple[int, Outcome]]:
    """Run seeds in forks of this process, which has imported torch;
    yield the outcomes as they come.
    """
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool:
        running = {
            pool.submit(run, seed, options.folder / str(seed), options.timeout): seed
            for seed in seeds
        }
        for ended in as_completed(running):
            yield running[ended], ended.result()


def _again(folder: Path, only: Iterable[int]) -> Iterator[tuple[int, Outcome]]:
    for path in sorted(folder.glob("*/outcome.json"), key=lambda path: int(path.parent.name)):
        seed = int(path.parent.name)
        if only and seed not in only:
            continue
        before = Outcome(**json.loads(path.read_text()))
        now = judged(plan_of(seed), path.parent, is_stuck=before.result == "stuck")
        yield seed, replace(now, seconds=before.seconds, left=before.left)


def _line(plan: Plan, outcome: Outcome) -> str:
    drawn = (
        f"{plan.loop}/{plan.wrapper}/{plan.communication}/{plan.place}/{plan.handler}, loaders"
        f" {plan.loaders}"
    )
    odd = f"skew {list(plan.skew)}, decoys {list(plan.decoys)}, clocks {list(plan.clocks)}"
    lines = [
        f"{plan.seed:>5} {outcome.result:12} {outcome.confidence:6} {outcome.rule} {drawn}, {odd}",
        f"      expected {outcome.expected}",
        f"      said     {outcome.said}",
        *(f"      - {why}" for why in outcome.why[:5]),
    ]
    lines += [f"      left: {list(outcome.left)}"] if outcome.left else []
    lines += ["      the nodes did not agree"] if not outcome.agree else []
    return "\n".join(lines)


def table(outcomes: dict[int, Outcome]) -> str:
    """Return the campaign's table, a row for each fault and each loop and wrapper."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    sure: dict[str, Counter[str]] = defaultdict(Counter)
    for seed, outcome in outcomes.items():
        plan = plan_of(seed)
        for name in (
            "all",
            f"fault {plan.fault or 'none'}",
            f"loop {plan.loop}",
            f"around it {plan.wrapper}",
        ):
            rows[name][outcome.result] += 1
            sure[name][outcome.result] += outcome.confidence == _SURE
    lines = [f"{'':28}" + "".join(f"{result:>14}" for result in _RESULTS) + f"{'wrong, high':>14}"]
    for name in sorted(rows, key=lambda name: (name != "all", name)):
        counts = "".join(f"{rows[name][result] or '-':>14}" for result in _RESULTS)
        lines.append(f"{name:28}{counts}{sure[name]['wrong'] or '-':>14}")
    by_confidence = Counter(
        (outcome.confidence, outcome.result in {"wrong", "story"}) for outcome in outcomes.values()
    )
    for level in ("high", "medium", "low"):
        good, bad = by_confidence[level, False], by_confidence[level, True]
        lines.append(f"{level}: {good} of {good + bad} with right ranks and story")
    left = sum(bool(outcome.left) for outcome in outcomes.values())
    seconds = [outcome.seconds for outcome in outcomes.values()]
    lines.append(
        f"{len(outcomes)} trainings, median {statistics.median(seconds):.1f} s each; {left} left"
        f" processes; {sum(not outcome.agree for outcome in outcomes.values())} in which the nodes"
        " did not agree"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    began = time.monotonic()
    status = main(sys.argv[1:])
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(status)
