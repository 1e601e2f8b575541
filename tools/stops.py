"""Count the stops of a reader who follows a command through the code:
``python tools/stops.py show slurm.out``.

The command runs in this process with a profile function. From the call of one function until it, or
another one, returns, the functions of the packages are listed in the order of their first call.
Neighbors in the same module are one stop. A stop in a module that was left before is a return, so
there are as many stops as modules and returns together.

Printed are two counts: of all functions, and of those at most `--depth` calls below the first one,
because a reader looks up what is deeper. Not counted are module bodies and what runs during an
import, comprehensions, lambdas, methods that `dataclass` generates, and other threads.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import groupby
from types import CodeType, FrameType
from typing import Any, NamedTuple

PACKAGES = (
    "firstfault",
    "firstfault_inprocess",
    "firstfault_logs",
    "firstfault_torch",
    "flytekitplugins",
    "flyteplugins",
)
START = "firstfault.attempt:read"
END = "firstfault.conclude:conclude"
DEPTH = 5


class Function(NamedTuple):
    """A function that was entered."""

    module: str
    name: str
    depth: int
    """Number of calls between it and the first function."""


class Walk:
    """Lists the functions that are entered between the call of one function and the return of
    another one.
    """

    def __init__(self, start: CodeType, end: CodeType) -> None:
        self.functions: list[Function] = []
        """Each at its first call, and again at a call of less depth."""
        self._ends = {start, end}
        self._start = start
        self._depths: dict[CodeType, int] = {}
        self._depth = -1
        """Calls in progress below `start`; -1 outside of it."""
        self._imports = 0
        """Modules being imported."""

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call or a return; a profile function."""
        if event not in {"call", "return"}:
            return
        code = frame.f_code
        if code.co_name == "<module>":
            self._imports += 1 if event == "call" else -1
        module = str(frame.f_globals.get("__name__"))
        is_listed = not (code.co_name.startswith("<") or code.co_filename.startswith("<"))
        is_inside = self._depth >= 0 or code is self._start
        if self._imports or not is_listed or not is_inside or _package(module) not in PACKAGES:
            return
        if event == "return":
            self._depth = -1 if code in self._ends else self._depth - 1
            return
        self._depth += 1
        if self._depth < self._depths.get(code, sys.maxsize):
            self._depths[code] = self._depth
            name = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
            self.functions.append(Function(module, name, self._depth))


def _package(module: str) -> str:
    return module.partition(".")[0]


def find_code(name: str) -> CodeType:
    """Return the code of a function by ``module:function`` or ``module:Class.method``."""
    module, _, attributes = name.partition(":")
    found: Any = import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    code: CodeType = found.__code__
    return code


def follow(run: Callable[[], object], start: str = START, end: str = END) -> list[Function]:
    """Call `run`; return the functions that were entered."""
    walk = Walk(find_code(start), find_code(end))
    sys.setprofile(walk.note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return walk.functions


def list_stops(
    functions: Sequence[Function], depth: int = sys.maxsize
) -> list[tuple[str, list[str]]]:
    """Return the stops in functions of at most this depth: a module, and the functions there."""
    names = dict.fromkeys((one.module, one.name) for one in functions if one.depth <= depth)
    grouped = groupby(names, key=lambda name: name[0])
    return [(module, [name for _, name in stop]) for module, stop in grouped]


def describe(stops: Sequence[tuple[str, list[str]]]) -> str:
    """Return the number of stops, and of modules and returns among them."""
    modules = len({module for module, _ in stops})
    return f"{len(stops)} stops in {modules} modules, {len(stops) - modules} returns"


def run_command(arguments: Sequence[str]) -> None:
    """Run a command of `firstfault` without its output."""
    from firstfault.cli import main  # noqa: PLC0415 - after the options were read

    given_arguments = sys.argv
    sys.argv = ["firstfault", *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            main()
    finally:
        sys.argv = given_arguments


def main() -> int:
    """Print the number of stops, with -v each of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--start", default=START, metavar="MODULE:FUNCTION")
    parser.add_argument("--end", default=END, metavar="MODULE:FUNCTION")
    parser.add_argument("--depth", type=int, default=DEPTH)
    parser.add_argument("-v", "--verbose", action="store_true", help="print the stops to --depth")
    parser.add_argument("-vv", "--all", action="store_true", help="print all stops")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="arguments of firstfault")
    given = parser.parse_args()
    functions = follow(lambda: run_command(given.command), given.start, given.end)
    if not functions:
        print(f"{given.start} was not called")
        return 1
    for depth, is_printed in ((given.depth, given.verbose), (sys.maxsize, given.all)):
        stops = list_stops(functions, depth)
        for module, names in stops if is_printed else ():
            print(f"{module}: {', '.join(names)}")
        print(describe(stops), "in all" if depth == sys.maxsize else f"down to depth {depth}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
