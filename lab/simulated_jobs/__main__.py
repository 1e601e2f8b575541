"""The command: ``python -m lab.simulated_jobs --help``."""

from __future__ import annotations

import argparse
import sys

from lab.simulated_jobs import campaign, ends, stalls
from lab.simulated_jobs.invariants import find_violations
from lab.simulated_jobs.job import FORMER, PLAIN_STORAGE, PRESENT, Rules, SimulatedJob

RULES = {"former": FORMER, "plain-storage": PLAIN_STORAGE, "present": PRESENT}


def main() -> int:
    """Play seeds, or one of them with its trace."""
    if "--stalls" in sys.argv:
        return stalls.main([each for each in sys.argv[1:] if each != "--stalls"])
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="with --stalls: jobs that stall, see --stalls --help"
    )
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 2000), metavar=("FIRST", "END"))
    parser.add_argument("--seed", type=int, help="play this one, and print its trace")
    parser.add_argument("--nodes", type=int, help="of each job; by default drawn from 2 to 16")
    parser.add_argument(
        "--job",
        choices=["failure", *ends.JOBS],
        default="failure",
        help="that fails and elects a leader, that ends, or that votes on a restart",
    )
    others = dict.fromkeys(name for names in ends.RULES.values() for name in names)
    parser.add_argument(
        "--rules", choices=[*dict.fromkeys([*RULES, *others]), "all"], default="all"
    )
    parser.add_argument("--shrink", action="store_true", help="drop faults that change nothing")
    arguments = parser.parse_args()
    if arguments.job != "failure":
        return _play_ends(arguments)
    if arguments.seed is not None:
        rules = RULES["present" if arguments.rules == "all" else arguments.rules]
        return _play_one(arguments.seed, rules, arguments.nodes, shrinks=arguments.shrink)
    names = list(RULES) if arguments.rules == "all" else [arguments.rules]
    for name in names:
        _print_result(name, campaign.play(range(*arguments.seeds), RULES[name], arguments.nodes))
    return 0


def _play_ends(arguments: argparse.Namespace) -> int:
    job, rules = arguments.job, arguments.rules
    if arguments.seed is not None:
        rules = "present" if rules == "all" else rules
        return ends.play_one(job, arguments.seed, rules, shrinks=arguments.shrink)
    for name in ends.RULES[job] if rules == "all" else [rules]:
        _print_result(name, ends.play(job, range(*arguments.seeds), name))
    return 0


def _print_result(name: str, result: campaign.Result) -> None:
    rate = result.played / max(result.seconds, 1e-9)
    print(f"{name} rules: {result.played} schedules, {rate:.0f} a second")
    for invariant, seeds in sorted(result.seeds.items()):
        print(f"  {len(seeds):6} violate {invariant}; seeds {seeds[:6]}")


def _play_one(seed: int, rules: Rules, nodes: int | None, *, shrinks: bool) -> int:
    job = SimulatedJob(seed, rules, nodes, trace=True).play()
    violations = dict(find_violations(job))
    if shrinks and violations:
        faults = campaign.shrink(seed, rules, next(iter(violations)), nodes)
        job = SimulatedJob(seed, rules, nodes, faults, trace=True).play()
        violations = dict(find_violations(job))
    print(f"{job.nodes} nodes, the store's host is {job.host}")
    print("\n".join(job.events.lines))
    for name, seen in violations.items():
        print(f"violated: {name}: {seen}")
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main())
