"""Measures what a program pays for the watch for handled exceptions: ``python
lab/benchmarks/handling.py``.

It needs Python 3.12 and no torch: ``PYTHONPATH=plugin:readers:proto python3.12
lab/benchmarks/handling.py``. Each line is the median of pairs: CPU time of the same work with and
without the watch, in turn.
"""

import statistics
import sys
import time
from collections.abc import Callable

from firstfault_torch.worker.handled_exceptions import HandledExceptions

_PAIRS = 40
_WORK = 200_000
_A_SECOND = 100_000
"""Exceptions that a data pipeline handles in a second."""


def computes() -> int:
    """Handle no exception, as most steps do."""
    total = 0
    for number in range(_WORK):
        total += len(str(number))
    return total


def misses_a_cache() -> int:
    """Handle an exception of its own, a hundred thousand times."""
    cache: dict[int, int] = {}
    misses = 0
    for number in range(_A_SECOND):
        try:
            cache[number]
        except KeyError:
            misses += 1
    return misses


def main() -> None:
    """Print a table."""
    handled = HandledExceptions()
    if not handled._watch_all():
        sys.exit(
            "this version of Python has no event for handled exceptions, so there is no cost to"
            " measure"
        )

    def pair(work: Callable[[], int], units: int) -> tuple[float, float]:
        seconds = []
        for is_on in (True, False):
            handled._set_events(is_on=is_on)
            computes()  # Python looks at the code once after each turn
            handled._left = units
            began = time.thread_time()
            work()
            seconds.append(time.thread_time() - began)
        return seconds[0], seconds[1]

    print(f"Python {sys.version.split()[0]}; medians of {_PAIRS} pairs")
    rows = (
        ("no exception", computes, 10_000),
        ("100,000 exceptions, the first second", misses_a_cache, 100_000),
        ("100,000 exceptions, once a minute", misses_a_cache, 10_000),
        ("100,000 exceptions, any other second", misses_a_cache, 0),
    )
    for name, work, units in rows:
        pairs = [pair(work, units) for _ in range(_PAIRS)]
        extra = statistics.median(watched - alone for watched, alone in pairs)
        alone = statistics.median(alone for _, alone in pairs)
        print(f"{name:40} {alone * 1e3:8.2f} ms, {extra * 1e3:+7.2f} ms with the watch")
    handled.close()


if __name__ == "__main__":
    main()
