"""Lists the modules that a failure passes on its way from `raise` to the error that Flyte shows:
``make walk``.

It runs examples/user_error.py on two nodes. Each process of the pods notes which functions of
firstfault it enters. Those that are entered after the last call of the user's function count, until
the pods end; periodic work, such as heartbeats, is among them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "user_error.py"
LAST_CALL = "load_shard"
"""The user's function that the failing worker calls last."""
FOLDER_VARIABLE = "FIRSTFAULT_WALK"
PODS = ("pyflyte-execute", "firstfault-")
"""What stands in the command line of a pod's process, and of its recorder's."""
_AGAIN_S = 0.02
"""So much later, another call of the same function is noted again."""


def note_calls() -> None:
    """Write each call of a function of firstfault, or of the example, to a file of this process."""
    folder, noted, file = os.environ[FOLDER_VARIABLE], {}, {}

    def note(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or ("firstfault" not in code.co_filename and code.co_name != LAST_CALL):
            return
        pid = os.getpid()
        now = time.time()
        if pid not in file:  # also in a fork
            file[pid] = os.open(f"{folder}/{pid}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.write(file[pid], f"{' '.join(sys.argv)}\n".encode())
        if now - noted.get((pid, code), 0) > _AGAIN_S:
            noted[pid, code] = now
            os.write(file[pid], f"{now} {code.co_filename} {code.co_name}\n".encode())

    threading.setprofile(note)
    sys.setprofile(note)


def walked(folder: Path) -> dict[str, set[str]]:
    """Return the modules that were entered after the failure, by the kind of process."""
    calls = []
    for file in folder.iterdir():
        command, *lines = file.read_text(encoding="utf-8").splitlines()
        kind = "recorder" if PODS[1] in command else "agent"
        entered = [(float(seconds), path, name) for seconds, path, name in map(str.split, lines)]
        if any(name == LAST_CALL for _, _, name in entered):
            kind = "worker"
        if any(pod in command for pod in PODS):
            calls += [(kind, *call) for call in entered]
    failed = max(seconds for _, seconds, _, name in calls if name == LAST_CALL)
    found = defaultdict(set)
    for kind, seconds, path, name in calls:
        if seconds > failed and name not in {LAST_CALL, "<module>"}:
            found[kind].add(path.rpartition("/plugin/")[2].rpartition("/readers/")[2])
    return found


def main() -> int:
    """Run the example with a profile function in each process; print what was entered."""
    with tempfile.TemporaryDirectory() as name:
        calls = Path(name, "calls")
        hook = Path(name, "hook")
        calls.mkdir()
        hook.mkdir()
        Path(hook, "sitecustomize.py").write_text(
            f"import sys\nsys.path.append({str(ROOT / 'tools')!r})\nimport"
            " walk\nwalk.note_calls()\n",
            encoding="utf-8",
        )
        command = [
            Path(sys.executable).with_name("firstfault"),
            "run",
            EXAMPLE,
            "train",
            "--nodes",
            "2",
        ]
        subprocess.run(
            [*command, "--store", f"{name}/store"],
            env={**os.environ, "PYTHONPATH": str(hook), FOLDER_VARIABLE: str(calls)},
            capture_output=True,
            check=False,
        )
        found = walked(calls)
    for kind, modules in sorted(found.items()):
        print(f"{kind}: {len(modules)} modules\n  " + "\n  ".join(sorted(modules)))
    print(f"in all: {len(set().union(*found.values()))} modules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
