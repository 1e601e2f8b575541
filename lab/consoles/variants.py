"""Scores how logs of unknown launchers and in unknown shapes are read,
made of the recorded console logs.

1. Leave one launcher out: each launcher's rows are removed from ``launchers.toml``, and its own
   logs are read.
2. Restyle: recorded logs get prefixes, wrappers, endings and additions that no table lists.
"""

import functools
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # started as a script

from firstfault_logs import collector, launchers
from firstfault_logs.framing import labels
from lab.consoles import score
from lab.consoles.score import Scored

ROWS = {
    "deepspeed": {"deepspeed"},
    "mpirun": {"mpi"},
    "ray": {"ray"},
    "spawn": {"spawn"},
    "srun": {"slurm"},
    "torchrun": {"torchrun"},
}
"""Launchers of the lab, by the begin of their names, and the names of their rows."""
COSTLY = ("wrong", "sure", "retry!")
VARIANTS = 500
_SEED = 47
_WORDS = tuple(
    "amber basalt cobalt delta ember fjord garnet harbor iris juniper krill lotus".split()  # noqa: SIM905 - as a list, each would be a line
)
_ENDINGS = (
    "ended abnormally, exit status {}|finished badly (code={})|crashed with exit code {}|died:"
    " exitcode {}"
)
_HANDLED = (
    "cache miss for shard 7, will retry",
    "Traceback (most recent call last):",
    '  File "/srv/app/cache.py", line 18, in read',
    "    return table[key]",
    "KeyError: 'shard-7'",
    "retrying with the slow path (attempt 2 of 5)",
)
_KERNEL = (
    "[ 8121.114] mlx5_core 0000:5e:00.0: Port module event: module 0, Cable plugged",
    "[ 8121.331] IPv6: ADDRCONF(NETDEV_CHANGE): eth2: link becomes ready",
    "[ 8122.004] nvidia-uvm: Loaded the UVM driver, major device number 510.",
    "[ 8130.250] systemd[1]: Started Daily apt download activities.",
)

Lines = list[str]
Change = Callable[[random.Random, Lines], Lines]


def get_outcome(row: Scored) -> str:
    """Return a log's outcome; "retry!" if it is right,
    but a retry is recommended that must not happen.
    """
    return (
        "retry!"
        if row.outcome == "right" and row.truth["retry"] is False and "retry" not in row.more
        else row.outcome
    )


# --- leave one launcher out -----------------------------------------------------------------------


def leave_out(launcher: str) -> list[Scored]:
    """Read a launcher's logs without its rows; without torchrun,
    its boxes aren't recognized either.
    """
    table, take = launchers.TABLE, collector.Boxes.take
    launchers.TABLE = launchers.LauncherTable(without=ROWS[launcher])
    if launcher == "torchrun":
        collector.Boxes.take = lambda *_: False
    labels.read_prefix.cache_clear()
    try:
        return score.all_scored([launcher])
    finally:
        launchers.TABLE, collector.Boxes.take = table, take
        labels.read_prefix.cache_clear()


# --- shapes that no table lists -------------------------------------------------------------------


def _put_prefix(chance: random.Random, lines: Lines) -> Lines:
    """Put one prefix before all lines: a word in brackets, with an equals sign or a time."""
    word, other = chance.sample(_WORDS, 2)
    form = chance.choice(
        [
            "<{word}/{other}> ",
            "{word}={other} | ",
            "[{word}] ",
            "{word}.{other}: ",
            "{time} {word} >> ",
        ]
    )
    return [
        form.format(
            word=word, other=other, time=f"2031-05-06 07:{number // 60 % 60:02}:{number % 60:02}"
        )
        + line
        for number, line in enumerate(lines)
    ]


def _wrap_in_json(chance: random.Random, lines: Lines) -> Lines:
    keys = chance.sample(_WORDS, 3)
    return [
        json.dumps({keys[0]: number, keys[1]: line, keys[2]: "stderr"})
        for number, line in enumerate(lines)
    ]


def _change_endings(chance: random.Random, lines: Lines) -> Lines:
    """Replace the words in which a launcher reports an exit code."""
    ending = chance.choice(_ENDINGS.split("|"))
    return [
        re.sub(r"[Ee]xited with exit code (\d+)", lambda code: ending.format(code[1]), line)
        for line in lines
    ]


def _cut(chance: random.Random, lines: Lines) -> Lines:
    """Leave out some of the lines above the first one about a failure."""
    failures = (
        number
        for number, line in enumerate(lines)
        if re.search(r"(?i)error|traceback|signal|watchdog", line)
    )
    first = next(failures, 0)
    return lines[chance.randint(0, first // 2) :]


def _add_handled(chance: random.Random, lines: Lines) -> Lines:
    """Add a traceback that the program handled, before anything else has failed."""
    steps = [number for number, line in enumerate(lines) if re.search(r"step \d", line)]
    at = chance.choice(steps[: len(steps) // 2 + 1]) if steps else 0
    return [*lines[:at], *_HANDLED, *lines[at:]]


def _add_kernel_lines(chance: random.Random, lines: Lines) -> Lines:
    for line in _KERNEL:
        at = chance.randint(0, len(lines))
        lines = [*lines[:at], line, *lines[at:]]
    return lines


def _append_to_another(before: Lines, chance: random.Random, lines: Lines) -> Lines:
    """Put the log of another job before, and a shell's prompt between them."""
    return [*before, f"me@{chance.choice(_WORDS)}:~$ ./submit.sh", *lines]


CHANGES: dict[str, Change] = {
    "prefix": _put_prefix,
    "JSON": _wrap_in_json,
    "endings": _change_endings,
    "cut": _cut,
    "handled traceback": _add_handled,
    "kernel lines": _add_kernel_lines,
}
_ORDER = ("cut", "endings", "handled traceback", "another job", "kernel lines", "prefix", "JSON")
"""What a launcher prints, then what is added, then what a collector does with all of it."""


def restyle(number: int) -> tuple[list[str], Scored]:
    """Read one changed log; return the names of the changes."""
    chance = random.Random(f"{_SEED}-{number}")
    rows = sorted(score.index().items())
    name, truth = chance.choice(rows)
    chosen = chance.sample(_ORDER[:-1], chance.randint(1, 2)) + ["JSON"] * (chance.random() < 0.2)
    chosen = sorted(set(chosen) - ({"prefix"} if "JSON" in chosen else set()), key=_ORDER.index)
    lines = score.read_recorded(name).decode(errors="replace").split("\n")
    another = score.read_recorded(chance.choice(rows)[0]).decode(errors="replace").split("\n")
    changes = CHANGES | {"another job": functools.partial(_append_to_another, another)}
    for change in chosen:
        lines = changes[change](chance, lines)
    return chosen, score.score_log({**truth, "name": f"{name}-{number}"}, "\n".join(lines).encode())


# --- tables ---------------------------------------------------------------------------------------


def _row(name: str, rows: Iterable[Scored]) -> str:
    counts = Counter(map(get_outcome, rows))
    costly = sum(counts[outcome] for outcome in COSTLY)
    return f"| {name} | {counts.total()} | {counts['right']} | {costly} |"


def main(arguments: list[str]) -> int:
    """Print both tables; -v lists what is costly. Return 1 if a changed log is called
    failed though it succeeded.
    """
    left_out = {launcher: leave_out(launcher) for launcher in ROWS}
    print("| left out | logs | right | costly |", "|---|---|---|---|", sep="\n")
    for launcher, rows in left_out.items():
        print(_row(launcher, rows))
    print(_row("all", (row for rows in left_out.values() for row in rows)), end="\n\n")
    restyled = [restyle(number) for number in range(VARIANTS)]
    print("| change | logs | right | costly |", "|---|---|---|---|", sep="\n")
    for change in _ORDER:
        print(_row(change, (row for changes, row in restyled if change in changes)))
    print(_row("all", (row for _, row in restyled)))
    for changes, row in [
        *(([launcher], row) for launcher, rows in left_out.items() for row in rows),
        *restyled,
    ]:
        if "-v" in arguments and get_outcome(row) in COSTLY:
            print(
                get_outcome(row),
                "+".join(changes),
                row.truth["name"],
                row.truth["ranks"],
                row.answer[:100],
            )
    return int(any(row.truth["ranks"] is None and row.outcome in COSTLY for _, row in restyled))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
