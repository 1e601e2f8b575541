"""Write the brief of each large log in a folder, for readers who get the brief instead of the log.

``python lab/consoles/briefs.py LOGS OUT [--larger-than BYTES]`` writes OUT/NAME.md for each log
below LOGS, and prints a row for each: bytes of the log, tokens of the brief, seconds, exit code. A
reader then answers from the brief alone, another one from the whole log, and both answers are
compared with what is known.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from firstfault.brief import MAX_TOKENS, estimate_tokens

_LARGER_THAN = 100_000
_NO_LOGS = {".json", ".md", ".jsonl"}


def main() -> None:
    """Write the briefs; fail if one is longer than it may be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("logs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--larger-than", type=int, default=_LARGER_THAN, metavar="BYTES")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    logs = [
        path
        for path in sorted(given.logs.rglob("*"))
        if path.is_file() and path.suffix not in _NO_LOGS
    ]
    logs = [path for path in logs if path.stat().st_size > given.larger_than]
    too_long = []
    print(f"{'log':50}{'bytes':>12}{'tokens':>8}{'seconds':>9}{'code':>6}")
    for log in logs:
        began = time.monotonic()
        command = [sys.executable, "-m", "firstfault", "show", "--brief", str(log)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - began
        # the name of a log often has its answer
        target = given.out / f"{logs.index(log) + 1:03}.md"
        target.write_text(
            ran.stdout.replace(str(log), "job.log").replace(log.name, "job.log"), encoding="utf-8"
        )
        tokens = estimate_tokens(ran.stdout) + ran.stdout.count("\n")
        too_long += [log.name] if tokens > MAX_TOKENS or not ran.stdout else []
        size = log.stat().st_size
        print(
            f"{target.stem} {log.name[:45]:46}{size:12,}{tokens:8,}{seconds:9.1f}{ran.returncode:6}"
        )
    if too_long:
        sys.exit(f"no brief, or a longer one than {MAX_TOKENS} tokens: {', '.join(too_long)}")


if __name__ == "__main__":
    main()
