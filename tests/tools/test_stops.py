"""The count of stops of a reader who follows a command through the code."""

from __future__ import annotations

from pathlib import Path

from tools import stops
from tools.stops import Function


def test_stops_are_runs_of_functions_of_one_module_in_the_order_of_their_first_call() -> None:
    """Neighbors in a module are one stop, and functions below the depth are left out."""
    functions = [
        Function("a", "read", 0),
        Function("a", "open", 1),
        Function("b", "deep", 3),
        Function("c", "parse", 1),
        Function("a", "close", 1),
        Function("b", "deep", 2),
    ]
    deep = [("a", ["read", "open"]), ("b", ["deep"]), ("c", ["parse"]), ("a", ["close"])]
    assert stops.list_stops(functions) == deep
    flat = [("a", ["read", "open"]), ("c", ["parse"]), ("a", ["close"])]
    assert stops.list_stops(functions, 1) == flat
    assert stops.describe(deep) == "4 stops in 3 modules, 1 returns"


def test_a_log_is_followed_from_its_path_to_its_verdict(tmp_path: Path) -> None:
    """The stops of `firstfault show LOG` begin where the path is read, and end with the verdict."""
    log = tmp_path / "slurm.out"
    log.write_text(
        "Traceback (most recent call last):\n"
        '  File "train.py", line 3, in <module>\n'
        "    main()\n"
        "ValueError: no labels\n"
    )
    functions = stops.follow(lambda: stops.run_command(["show", str(log)]))
    names = [f"{function.module}:{function.name}" for function in functions]
    assert functions[0] == Function("firstfault.attempt", "read", 0)
    assert "firstfault_logs:snapshot_of" in names
    assert "firstfault.retry:decide" in names
    assert "firstfault.cli._show:print_attempt" not in names
