"""What watching costs a training: ``cost.py`` prints the CPU time of one look in a worker, and of pairs of trainings.

In each pair one is not watched, and the other 50 times as often as by default: every 0.1 s.
"""

from __future__ import annotations

import subprocess
import sys
import time

PAIRS = 3
LOOKS = 500
TRAININGS = ((1.0, 6000), (10.0, 700))
"""Milliseconds and number of the steps."""


def train(milliseconds: float, steps: int) -> None:
    """Compute and reduce; rank 0 prints its seconds and those of its CPU, and what one look takes."""
    import torch  # noqa: PLC0415 - in the ranks only
    import torch.distributed as dist  # noqa: PLC0415

    from firstfault_torch.worker.pulse import pulse  # noqa: PLC0415

    dist.init_process_group("gloo")
    value = torch.ones(8)
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        end = time.perf_counter() + milliseconds / 1000
        while time.perf_counter() < end:
            pass
        dist.all_reduce(value)
    told = f"{time.perf_counter() - began:.1f} s, {time.process_time() - cpu:.2f} s of CPU"
    cpu = time.process_time()
    for _ in range(LOOKS):
        pulse()
    if dist.get_rank() == 0:
        print(f"{told}; a look {(time.process_time() - cpu) / LOOKS * 1e3:.2f} ms", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__" and len(sys.argv) > 1:
    train(float(sys.argv[1]), int(sys.argv[2]))
elif __name__ == "__main__":
    for _pair in range(PAIRS):
        for step in TRAININGS:
            for option in ("off", "warn:0.6"):
                command = [sys.executable, "-m", "firstfault", "torchrun", "--ff-hang", option, "--standalone"]
                command += ["--nproc-per-node=2", __file__, *map(str, step)]
                ran = subprocess.run(command, capture_output=True, text=True, check=True)
                print(f"{step[0]:g} ms, {option}: {ran.stdout.strip()}")
