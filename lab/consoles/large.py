"""Measures ``firstfault show`` on large logs, recorded ones padded with steps: seconds,
and the process's memory.
"""

import gzip
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECORDED = Path(__file__).parent / "recorded" / "torchrun-2-raise-rank1-time.log.gz"
PADDING = {
    "steps": "step {0} loss 2.{0} lr 3.0e-4 tokens/s 9000 grad_norm 1.2\n",
    "steps, and a word of errors in each": (
        "[rank{1}]: 2031-05-06 07:08:09,123 INFO step {0} error 0.{0} failures 0\n"
    ),
}
SIZES = {"10 MB": 10_000_000, "1 GB": 1_000_000_000}


def main() -> None:
    """Print a table in Markdown; the last lines of each log are those of a failed job."""
    print("| padded with | 10 MB | 1 GB |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "job.out"
        for what, form in PADDING.items():
            print(
                f"| {what} | {' | '.join(_measured(log, form, size) for size in SIZES.values())} |",
                flush=True,
            )


def _measured(log: Path, form: str, size: int) -> str:
    block = "".join(form.format(number, number % 8) for number in range(100_000)).encode()
    with log.open("wb") as stream:
        for _ in range(size // len(block) + 1):
            stream.write(block[: size - stream.tell()])
        stream.write(b"\n" + gzip.decompress(RECORDED.read_bytes()))
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "firstfault", "show", str(log)], stdout=subprocess.PIPE
    ) as process:
        said = process.stdout.read() if process.stdout is not None else b""
        _, _, used = os.wait4(process.pid, 0)
    if b"no labels" not in said:
        raise SystemExit(f"the root cause was not found in {log}")
    return f"{time.monotonic() - began:.1f} s, {used.ru_maxrss / 1024:.0f} MB"


if __name__ == "__main__":
    main()
