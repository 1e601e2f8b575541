"""What firstfault does to a training's process (docs/guides/footprint.md),
compared with torch's own agent.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.jobs
PROGRAM = Path(__file__).parent / "own_process.py"
IS_ALL = os.environ.get("FIRSTFAULT_PROCESS") == "all"
STACKS = 1 << (signal.SIGRTMIN + 12 - 1)
DIFFERS_ANYWAY = {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE"}
VARIABLES = ("FIRSTFAULT_RECORDING", "FIRSTFAULT_AGENT", "FIRSTFAULT_LOCAL_RANK")


def _states(folder: Path, method: str, *whose: str) -> list[dict[str, Any]]:
    """Return the worker's state under each agent; all run at the same time."""
    running = []
    for name in whose:
        (folder / name).mkdir()
        command = [sys.executable, "-W", "ignore", str(PROGRAM), str(folder / name), name, method]
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    said = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0] * len(whose), said
    return [json.loads((folder / name / "0.json").read_text()) for name in whose]


def _differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what differs: the kind, and "+" or "-" and the item,
    or the name of what has another value.
    """
    for kind, one in before.items():
        other = after[kind]
        if kind == "loaded":
            continue  # modules that are imported do nothing by themselves
        if isinstance(one, dict):
            names = one.keys() & other.keys() if kind == "functions" else one.keys() | other.keys()
            for name in names - DIFFERS_ANYWAY:
                if one.get(name) != other.get(name):
                    yield kind, name
        elif kind in {"threads", "files"}:
            counts = Counter(map(_without_folder, other))
            counts.subtract(map(_without_folder, one))
            yield from ((kind, f"{count:+} {item}") for item, count in counts.items() if count)
        elif one != other:
            yield kind, f"{one} {other}"


def _without_folder(item: str) -> str:
    return Path(item).name if "/firstfault-" in item else item


@pytest.mark.parametrize("method", ["spawn", "fork"] if IS_ALL else ["spawn"])
def test_a_worker_differs_from_torchs_only_as_documented(method: str, tmp_path: Path) -> None:
    """A worker has a signal, a hook, a thread, files and the variables more,
    and a few functions replaced.
    """
    torchs, ours = _states(tmp_path, method, "torch", "ours")
    inherited = 3 if method == "fork" else 0
    files = [
        "+1 stderr-0-0.fifo",
        "+1 fatal-0-0.txt",
        "+1 stacks-0-0.txt",
        f"{1 + inherited:+} socket",
    ]
    files.append("+15 pipe")  # 16 are held back; stderr is none
    assert set(_differences(torchs, ours)) == {
        ("masks", "SigCgt"),
        ("hooks", "threading.excepthook"),
        ("functions", "threading"),
        ("functions", "torch.distributed"),
        ("functions", "torch.distributed.distributed_c10d"),
        ("threads", "+1 firstfault-channel"),
        # from Python 3.12 on, `sys.monitoring` tells of handled exceptions instead
        *(
            [("functions", "traceback")]
            if sys.version_info < (3, 12)
            else [("tools", "None firstfault")]
        ),
        *(("files", item) for item in files),
        *(("environ", name) for name in VARIABLES),
    }
    assert int(torchs["masks"]["SigCgt"], 16) ^ int(ours["masks"]["SigCgt"], 16) == STACKS


@pytest.mark.flyte
@pytest.mark.parametrize("method", ["spawn", "fork"] if IS_ALL else ["fork"])
def test_switched_off_nothing_differs(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty variable a worker is like one of flytekit's own plugin,
    which never had firstfault.
    """
    monkeypatch.setenv("FLYTE_INTERNAL_ERROR_PROPAGATION", "")
    stock, ours = _states(
        tmp_path,
        method,
        "flytekitplugins.kfpytorch",
        "flytekitplugins.firstfault",
    )
    assert set(_differences(stock, ours)) == set()
    assert not [name for name in ours["environ"] if name.startswith("FIRSTFAULT_")]
    assert (
        os.environ["FLYTE_INTERNAL_ERROR_PROPAGATION"]
        == ours["environ"]["FLYTE_INTERNAL_ERROR_PROPAGATION"]
        == ""
    )
