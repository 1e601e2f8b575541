"""Runs trainings that stall again and again, and scores what the agents say of each: ``lab.py [NODES] [KINDS] [end]``.

With ``end`` each kind is a training of its own, which is ended 5 s after its stall, and its last lines are printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # started as a script

from torch.distributed.elastic.utils.distributed import get_free_port

from tests.stalls import program

WARN_S = 3.0
STALL_S = 7.0
_SAID = re.compile(r"firstfault: no progress for (\d+) s: (.*)")
_RANK = re.compile(r"firstfault: +rank (\d+): (.*)")


class Scored(NamedTuple):
    """What became of one stall."""

    kind: str
    want: list[int]
    said: list[int]
    late: float
    """Seconds after the warning's time; -1: no warning."""
    is_line: bool
    text: str

    @property
    def is_right(self) -> bool:
        """Whether the ranks and the line of the first are right."""
        return self.said == self.want and self.is_line


def scored(log: str) -> list[Scored]:
    """Return what the first warning of each stall says."""
    found = []
    for part in log.split(program.MARK)[1:]:
        number, kind, listed = part.split("\n", 1)[0].split(maxsplit=2)
        want = [int(rank) for rank in listed.strip("[]").split(",")]
        lines = part.splitlines()
        first = next((index for index, line in enumerate(lines) if _SAID.search(line)), None)
        seconds = float(_SAID.search(lines[first])[1]) if first is not None else 0.0
        told = []
        for line in lines[first + 1 :] if first is not None else []:
            if not (rank := _RANK.search(line)):
                break
            told.append(rank)
        where = re.compile(program.AT.get(kind, kind if kind in program.ALONE else "asleep|late"))
        is_line = bool(told) and all(where.search(rank[2]) for rank in told)
        text = " | ".join([lines[first], *(rank[0] for rank in told)]) if first is not None else "no warning"
        found.append(
            Scored(f"{number} {kind}", want, sorted(int(rank[1]) for rank in told), seconds - WARN_S, is_line, text)
        )
    return found


def run(nodes: int, kinds: list[str], *more: str, stall_s: float = STALL_S) -> list[str]:
    """Return what each node of a job printed."""
    port = get_free_port()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for node in range(nodes):
            command = [sys.executable, "-m", "firstfault", "torchrun", f"--ff-hang=warn:{WARN_S:g}", *more]
            command += [f"--ff-folder={folder}/runs", f"--ff-node=node-{node}", "--ff-job=stalls", f"--nnodes={nodes}"]
            command += ["--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
            command += [program.__file__, ",".join(kinds), str(stall_s)]
            with Path(folder, f"{node}.log").open("wb") as stderr:
                processes.append(subprocess.Popen(command, stderr=stderr, env={**os.environ, "OMP_NUM_THREADS": "1"}))
            time.sleep(0.5)
        for process in processes:
            process.wait()
        return [Path(folder, f"{node}.log").read_text(errors="replace") for node in range(nodes)]


def main() -> int:
    """Run the stalls, and print a line each."""
    sizes = [int(sys.argv[1])] if len(sys.argv) > 1 else [2, 4]
    kinds = sys.argv[2].split(",") if len(sys.argv) > 2 else [*program.ALONE, *program.TOGETHER]
    wrong = 0
    if sys.argv[3:] == ["end"]:
        for kind in kinds:
            log = run(sizes[0], [kind], f"--ff-hang=warn:{WARN_S:g},end:5", stall_s=40.0)[0].splitlines()
            ends = [line for line in log if re.match("firstfault: (hang|undetermined|not ended)", line)]
            print(kind, program.culprits(kind, 0, 2 * sizes[0]), *ends[-1:])
        return 0
    for nodes in sizes:
        told = [scored(log) for log in run(nodes, kinds)]
        for each in told[0]:
            outcome = "right" if each.is_right else "WRONG"
            print(f"{outcome} {each.late:5.1f} s {each.kind:16} {each.want} {each.text[:300]}")
        right = sum(each.is_right for each in told[0])
        same = sum(all(others[index].text == each.text for others in told) for index, each in enumerate(told[0]))
        print(f"{nodes} nodes: {right} of {len(kinds)} right; {same} told alike by all nodes")
        wrong += len(kinds) - right
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
