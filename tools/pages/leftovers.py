"""Files of failed jobs under the names that the pages use, and a `kubectl` that prints a log."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
_RECORDED = ROOT / "lab" / "consoles" / "recorded"
_FAILED = "srun-label-loader-rank2-stamps.log.gz"
_SUCCEEDED = "srun-label-success-rank2-stamps.log.gz"
_LABEL = re.compile(r"^\S+ (\d): (.*)$", re.MULTILINE)
_RANKS = 4
_DUMPED = "/tmp/nccl_trace_rank_"  # noqa: S108 - torch's default, which the page on logs names
_OUT_OF_MEMORY = "[ 8123.4] Memory cgroup out of memory: Killed process 6431 (python)\n"


def write_leftovers(folder: Path) -> None:
    """Write the files that a job or its launcher would have left in the reader's working folder."""
    folder.mkdir(parents=True)
    failed = gzip.decompress((_RECORDED / _FAILED).read_bytes()).decode()
    succeeded = gzip.decompress((_RECORDED / _SUCCEEDED).read_bytes()).decode()
    (folder / "slurm-4711.out").write_text(failed, encoding="utf-8")
    (folder / "slurm-4702.out").write_text(succeeded, encoding="utf-8")
    (folder / "dmesg-gpu-7.txt").write_text(_OUT_OF_MEMORY, encoding="utf-8")
    (folder / "logs").mkdir()
    for rank, text in _split_by_rank(failed).items():
        (folder / "logs" / f"rank-{rank}.out").write_text(text, encoding="utf-8")
        of_torchrun = folder / "torchrun-logs" / "4711_k2x0b1" / "attempt_0" / rank
        of_torchrun.mkdir(parents=True)
        (of_torchrun / "stderr.log").write_text(text, encoding="utf-8")
    (folder / "dumps").mkdir()
    write_dumps(str(folder / "dumps" / "nccl_trace_rank_"))


def write_dumps(prefix: str = _DUMPED) -> list[Path]:
    """Write the dumps of a hang that rank 2 caused; return their paths. Existing files stay."""
    written = []
    for rank in range(_RANKS):
        path = Path(f"{prefix}{rank}")
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(_dump(called=4 if rank == 2 else 5), file)  # noqa: PLR2004
        except FileExistsError:
            continue
        written.append(path)
    return written


def write_kubectl(folder: Path, log: Path) -> None:
    """Write a program that prints this log as `kubectl logs --prefix` does."""
    folder.mkdir(parents=True)
    lines = [
        f"[pod/llama-{rank}/pytorch] {line}\n"
        for rank, text in _split_by_rank(log.read_text(encoding="utf-8")).items()
        for line in text.splitlines()
    ]
    printed = folder / "kubectl.log"
    printed.write_text("".join(lines), encoding="utf-8")
    program = folder / "kubectl"
    program.write_text(f"#!/bin/sh\nexec cat '{printed}'\n", encoding="utf-8")
    program.chmod(0o755)


def _split_by_rank(log: str) -> dict[str, str]:
    texts: dict[str, str] = defaultdict(str)
    for rank, line in _LABEL.findall(log):
        texts[rank] += f"{line}\n"
    return texts


def _dump(*, called: int) -> dict[str, object]:
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(_RANKS)))}},
        "pg_status": {"0": {"last_enqueued_collective": called, "last_completed_collective": 4}},
        "entries": [],
    }
