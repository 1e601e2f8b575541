"""How long from a raise until an error that names it is durable and until all pods have ended, and what success costs.

For firstfault and for stock kfpytorch, in turn: two nodes of two workers on this machine, gloo, a folder as the store,
the same task; rank 3 raises while its peers wait in a collective or, in the tasks named asleep, sleep in Python. Pods
and the operator's rules are those of ``firstfault run`` for both plugins. "durable" is the modification time of the
first error file (firstfault: the error document; kfpytorch: error.pb), from the time that rank 3 noted before its
raise; "right" is whether what stock Flyte reads when the job ends is rank 3's own exception. Pods that go on for
LONGEST_S after the raise are ended, and their seconds are printed as that limit. The tasks named good succeed: wall
clock and CPU seconds of all their processes.

    python tests/benchmarks/raise_to_durable.py [ROUNDS [TASK...]]
"""

from __future__ import annotations

import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import stock_training
from flyteidl.core.literals_pb2 import LiteralMap

from flytekitplugins.firstfault.local.loading import serialized_command
from flytekitplugins.firstfault.local.operator import JobState, elastic_environment, error_seen, free_port, job_state
from flytekitplugins.firstfault.local.pods import end_all, start_pod

TASKS = ("ours_default", "ours_slow", "stock_fast", "stock_default", "ours_asleep", "stock_asleep")
GOOD = ("ours_good", "stock_good")
LONGEST_S = 45.0
"""How long pods may go on after the raise."""
SENTENCE = "loss is nan at step 5"
NODES = 2


@dataclass(frozen=True)
class Sample:
    """One run, seconds after the raise; of a run that succeeds, its length and CPU time."""

    durable: float
    verdict: float
    ended: float
    all_ended: float
    right: bool
    cpu: float = 0.0


def run(name: str, folder: Path) -> Sample:
    """Run one task once."""
    task = getattr(stock_training, name)
    command = serialized_command(task)
    (folder / "inputs.pb").write_bytes(LiteralMap().SerializeToString())
    prefix, raised_at = folder / "out", folder / "raised-at"
    prefix.mkdir()
    values = {
        "{{.input}}": str(folder / "inputs.pb"),
        "{{.outputPrefix}}": str(prefix),
        "{{.rawOutputDataPrefix}}": str(folder / "raw"),
        "{{.checkpointOutputPrefix}}": str(folder / "checkpoints"),
        "{{.prevCheckpointPrefix}}": '""',
    }
    config = task.task_config
    operator = elastic_environment(
        nodes=str(NODES), processes=config.nproc_per_node, max_restarts=0, job=name, port=free_port()
    )
    pods = []
    began_ns, cpu_before = time.time_ns(), _cpu_seconds()
    try:
        for index in range(NODES):
            environment = {
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parent),
                "PYTHONWARNINGS": "ignore",
                "RAISED_AT": str(raised_at),
                "FLYTE_INTERNAL_EXECUTION_ID": name.replace("_", "-"),
                "_F_WN": f"worker-{index}",
                **operator,
                **command.environment,
            }
            pods.append(
                start_pod(
                    f"worker-{index}",
                    arguments=[values.get(argument, argument) for argument in command.arguments],
                    environment=environment,
                    folder=Path(__file__).parent,
                    log=folder / f"{index}.log",
                )
            )
        while (state := job_state(pods)) is None and not _is_late(raised_at):
            time.sleep(0.01)
        seen = error_seen(str(prefix), state, multi_file=False) if state is not None else None
        ended_ns = time.time_ns()
        while any(pod.exit_code is None for pod in pods) and not _is_late(raised_at):
            time.sleep(0.01)
        all_ended_ns = time.time_ns()
    finally:
        end_all(pods)
    if name in GOOD:
        cpu = _cpu_seconds() - cpu_before
        return Sample(0, 0, 0, (all_ended_ns - began_ns) / 1e9, state is JobState.SUCCEEDED and seen is None, cpu)
    raised_ns = int(raised_at.read_text())
    documents = list(prefix.glob("firstfault/errors/*.pb")) or list(prefix.glob("error*.pb"))
    verdicts = list(prefix.glob("error*.pb"))
    return Sample(
        durable=_seconds_until(documents, raised_ns),
        verdict=_seconds_until(verdicts, raised_ns),
        ended=(ended_ns - raised_ns) / 1e9,
        all_ended=(all_ended_ns - raised_ns) / 1e9,
        right=seen is not None and SENTENCE in seen.message,
    )


def _is_late(raised_at: Path) -> bool:
    """Whether the raise is longer ago than anybody should wait."""
    return raised_at.exists() and time.time() - raised_at.stat().st_mtime > LONGEST_S


def _seconds_until(files: list[Path], raised_ns: int) -> float:
    """Seconds from the raise to the first of some files; the limit if there is none."""
    return min(((path.stat().st_mtime_ns - raised_ns) / 1e9 for path in files), default=LONGEST_S)


def _cpu_seconds() -> float:
    """CPU time of all processes that have ended, with their children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Run every task in turn, several rounds, and print medians."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    names = [name for name in (*TASKS, *GOOD) if len(sys.argv) < 3 or name in sys.argv[2:]]
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                samples[name].append(run(name, Path(folder)))
            print(f"round {number} {name}: {samples[name][-1]}", file=sys.stderr)
    cores = os.cpu_count()
    machine = f"{platform.machine()}, {cores} cores, Python {platform.python_version()}"
    print(f"{machine}; medians of {rounds}, seconds after the raise")
    print(f"{'task':16} {'durable':>8} {'error.pb':>9} {'job ended':>10} {'pods ended':>11}  right")
    for name, taken in samples.items():
        if name in GOOD:
            continue
        durable = statistics.median(sample.durable for sample in taken)
        verdict = statistics.median(sample.verdict for sample in taken)
        ended = statistics.median(sample.ended for sample in taken)
        right = sum(sample.right for sample in taken)
        last = statistics.median(sample.all_ended for sample in taken)
        print(f"{name:16} {durable:8.3f} {verdict:9.2f} {ended:10.2f} {last:11.2f}  {right} of {len(taken)}")
    for name in [name for name in names if name in GOOD]:
        taken = samples[name]
        wall, cpu = (statistics.median(getattr(sample, what) for sample in taken) for what in ("all_ended", "cpu"))
        right = sum(sample.right for sample in taken)
        print(f"{name:16} {wall:8.2f} s, CPU {cpu:.2f} s  {right} of {len(taken)}")


if __name__ == "__main__":
    main()
