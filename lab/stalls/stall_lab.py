"""Runs trainings that stall again and again, and scores what the agents say of each: ``lab.py
[NODES] [KINDS] [MODE]``.

With ``compare`` each kind is a training of its own, with torchrun alone and with firstfault's end;
its last lines are printed. Collectives time out after 60 s. ``lab.py healthy`` runs trainings that
do not stall, and counts what is told.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # started as a script

from torch.distributed.elastic.utils.distributed import get_free_port

from lab.generated.program import plan_of, source_of
from lab.stalls import program

_ROOT = Path(__file__).parents[2]
WARN_S = 3.0
STALL_S = 7.0
_FRAMEWORKS = (
    "lightning",
    "transformers",
    "accelerate",
    "fsdp",
    "tensor_parallel",
    "ddp",
    "compiled",
    "checkpoint",
)
_RANK = re.compile(r"firstfault: +rank (\d+): (.*)")
_SAID = re.compile(r"firstfault: no progress for (\d+) s: .*(?:\nfirstfault: +rank \d+: .*)*")
_ROOTS = re.compile(r"Root Cause.*?rank +: (\d+)")


def scored(log: str) -> list[tuple[bool, str]]:
    """Return whether the first warning of each stall is right, and a line about it."""
    found = []
    for part in log.split(program.MARK)[1:]:
        number, kind, _, listed = part.split("\n", 1)[0].split(maxsplit=3)
        said = _SAID.search(part)
        text = said[0] if said else ""
        told = _RANK.findall(text)
        where = re.compile(program.AT.get(kind, kind if kind in program.ALONE else "asleep|late"))
        is_line = all(
            where.search(each) for each in [line for _, line in told] or filter(None, [text])
        )
        is_right = sorted(int(rank) for rank, _ in told) == json.loads(listed) and is_line
        is_right = is_right and bool(text) != (kind in program.HEALTHY)
        late = f"{int(said[1]) - WARN_S:5.1f} s late" if said else "no warning "
        found.append(
            (
                is_right,
                f"{late} {number:>2} {kind:18} {listed} {' | '.join(text.splitlines())[:300]}",
            )
        )
    return found


def run(
    nodes: int,
    program: Sequence[str],
    *options: str,
    python: str = sys.executable,
) -> list[str]:
    """Return what each node of a job printed to stderr;
    without options the job is one of torchrun alone.
    """
    port = get_free_port()
    # looks for no names of hosts
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "attempts:0",
    }
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for node in range(nodes):
            own = [
                *options,
                f"--ff-folder={folder}/runs",
                f"--ff-node=node-{node}",
                "--ff-job=stalls",
            ]
            command = [
                python,
                "-m",
                *(["firstfault", "torchrun", *own] if options else ["torch.distributed.run"]),
            ]
            command += [f"--nnodes={nodes}", "--nproc-per-node=2", "--rdzv-backend=c10d"]
            command += [
                f"--rdzv-endpoint=127.0.0.1:{port}",
                f"--rdzv-conf=is_host={node == 0:d}",
                *program,
            ]
            with Path(folder, f"{node}.log").open("wb") as stderr:
                marks = {"MARKS": folder}  # where programs of the frameworks write
                processes.append(subprocess.Popen(command, stderr=stderr, env=environment | marks))
            time.sleep(0.5)
        for process in processes:
            process.wait()
        return [Path(folder, f"{node}.log").read_text(errors="replace") for node in range(nodes)]


def compare(kind: str) -> None:
    """Print how a training ends that a kind of stall stops: with a timeout of 60 s,
    and with firstfault's end.
    """
    for options in ((), ("--ff-hang=warn:10,end:20",)):
        logs = run(2, [program.__file__, kind, "120", "60"], *options)
        ended = time.time() - float(logs[0].split(program.MARK)[1].split()[2])
        said = (
            re.findall("firstfault: (hang.*)", logs[0])
            if options
            else [f"root causes {_ROOTS.findall(str(logs))}"]
        )
        print(
            kind,
            program.culprits(kind, 0, 4),
            *options or ["torchrun"],
            f"{ended:.0f} s",
            *said,
            flush=True,
        )


def healthy() -> None:
    """Print how often something is told of trainings without a stall: generated ones,
    and those of frameworks.
    """
    others = _ROOT / "build/frameworks-venv/bin/python"
    plans = [plan_of(number) for number in range(100)]
    sources = {f"seed {plan.seed}": source_of(plan, 60) for plan in plans if not plan.fault}
    sources = {name: source.replace("STEPS = 8", "STEPS = 500") for name, source in sources.items()}
    for name in _FRAMEWORKS if others.exists() else ():
        sources[name] = (
            f"import sys; sys.path.insert(0, '{_ROOT}/lab/frameworks'); import failing; "
        )
        sources[name] += f"failing.STEPS = 200; from training import run; run('{name}', 'none', 0)"
    for name, source in sources.items():
        with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
            file.write(source)
            file.flush()
            began = time.monotonic()
            python = str(others) if name in _FRAMEWORKS else sys.executable
            log = run(2, [file.name], f"--ff-hang=warn:{WARN_S:g},end:{WARN_S:g}", python=python)[0]
            said = [line for line in log.splitlines() if line.startswith("firstfault: ")]
            print(
                f"{name}: {time.monotonic() - began:.0f} s, {len(_SAID.findall(log))} warnings",
                *said,
                sep="\n    ",
            )


def main() -> int:
    mode = sys.argv[-1] if sys.argv[-1] in {"compare", "healthy"} else ""
    if mode == "healthy":
        healthy()
        return 0
    sizes = [int(sys.argv[1])] if len(sys.argv) > 1 else [2, 4]
    kinds = (
        sys.argv[2].split(",") if len(sys.argv) > 2 else list(itertools.chain(*program.TRAININGS))
    )
    wrong = 0
    for kind in kinds if mode else ():
        compare(kind)
    for nodes in sizes if not mode else ():
        right = same = 0
        for training in program.TRAININGS:
            chosen = [kind for kind in training if kind in kinds]
            given = [program.__file__, ",".join(chosen), str(STALL_S)]
            logs = run(nodes, given, f"--ff-hang=warn:{WARN_S:g}") if chosen else [""]
            told, *others = map(scored, logs)
            for index, (is_right, line) in enumerate(told):
                print("right" if is_right else "WRONG", line, flush=True)
                same += all(
                    index < len(other) and other[index] == (is_right, line) for other in others
                )
            right += sum(is_right for is_right, _ in told)
            if len(told) < len(chosen):
                print(f"the training ended early: {logs[0][-1000:]}")
        print(f"{nodes} nodes: {right} of {len(kinds)} right; {same} told alike by all nodes")
        wrong += len(kinds) - right
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
