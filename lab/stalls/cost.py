"""What watching costs a training: ``cost.py`` prints the CPU time of one look in a worker,
and of pairs of trainings.

In each pair one is not watched, and the other 50 times as often as by default: every 0.1 s. Printed
are the medians of rank 0 with the least and the most, seconds and those of its CPU, and the median
of the pairs' differences.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

PAIRS = 5
LOOKS = 500
TRAININGS = ((1.0, 1000), (10.0, 1000))
"""Milliseconds and number of the steps."""


def train(milliseconds: float, steps: int) -> None:
    """Compute and reduce; rank 0 prints its seconds and those of its CPU,
    and what one look takes.
    """
    import torch  # noqa: PLC0415 - in the ranks only
    import torch.distributed as dist  # noqa: PLC0415

    from firstfault_torch.worker.pulse import pulse  # noqa: PLC0415

    dist.init_process_group("gloo")
    value = torch.ones(8)
    began = time.perf_counter()
    cpu = time.process_time()
    for _ in range(steps):
        end = time.perf_counter() + milliseconds / 1000
        while time.perf_counter() < end:
            pass
        dist.all_reduce(value)
    told = [time.perf_counter() - began, time.process_time() - cpu]
    cpu = time.process_time()
    for _ in range(LOOKS):
        pulse()
    if dist.get_rank() == 0:
        print(json.dumps([*told, (time.process_time() - cpu) / LOOKS * 1e3]), flush=True)
    dist.destroy_process_group()


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def pairs(step: tuple[float, int]) -> None:
    """Run pairs of trainings, in turn one or the other first, and print what they took."""
    found: dict[str, list[list[float]]] = {"off": [], "warn:0.6": []}
    for number in range(PAIRS):
        for option in list(found)[:: 1 if number % 2 else -1]:
            command = [
                sys.executable,
                "-m",
                "firstfault",
                "torchrun",
                "--ff-hang",
                option,
                "--standalone",
            ]
            command += ["--nproc-per-node=2", __file__, *map(str, step)]
            ran = subprocess.run(command, capture_output=True, text=True, check=True)
            found[option].append(json.loads(ran.stdout))
    print(f"{step[1]} steps of {step[0]:g} ms, {PAIRS} pairs")
    for option, runs in found.items():
        seconds, cpu, look = (spread(column) for column in zip(*runs, strict=True))
        print(f"  {option:8} {seconds} s, {cpu} s of CPU; a look {look} ms")
    for index, what in enumerate(("s", "s of CPU")):
        more = [
            (with_it[index] / alone[index] - 1) * 100
            for alone, with_it in zip(*found.values(), strict=True)
        ]
        print(f"  watched: {spread(more)} % more {what}")


if __name__ == "__main__" and len(sys.argv) > 1:
    train(float(sys.argv[1]), int(sys.argv[2]))
elif __name__ == "__main__":
    for each in TRAININGS:
        pairs(each)
