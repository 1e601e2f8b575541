"""``firstfault doctor`` tells what is wrong with an environment, and as what a job in it would be recorded."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firstfault_torch.torchrun import doctor

pytestmark = pytest.mark.slow

NOT_HERE = "import sys; sys.modules['torch'] = None; from firstfault.cli import main; main(['doctor', '--json'])"
DOCTOR = ("-m", "firstfault", "doctor", "--json")


def _doctor(folder: Path, *command: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and the checks that a job would not pass, by name; under "all" every text."""
    ended = subprocess.run(
        [sys.executable, *(command or DOCTOR)],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    checks = json.loads(ended.stdout)["checks"]
    refused = {check["name"]: check["text"] for check in checks if check["ok"] is False}
    return ended.returncode, {**refused, "all": {check["name"]: check["text"] for check in checks}}


def test_a_good_environment(tmp_path: Path) -> None:
    """All is well, the folder is as before, and each part of the identity has its source."""
    code, told = _doctor(tmp_path, FIRSTFAULT="true", SLURM_JOB_ID="4711", SLURM_RESTART_COUNT="2", POD_NAMESPACE="ml")
    assert (code, set(told), list(tmp_path.iterdir())) == (0, {"all"}, [])
    assert told["all"]["versions"] == "firstfault was tested with these releases"
    assert told["all"]["recorder"] == "collectives of gloo are found in torch's flight recorder (gloo:all_reduce)"
    assert told["all"]["job"] == "4711 (SLURM_JOB_ID)"
    assert told["all"]["attempt"] == "2 (SLURM_RESTART_COUNT)"
    assert told["all"]["node"] == f"{socket.gethostname()} (the host's name); namespace: ml (POD_NAMESPACE)"
    assert told["all"]["documents"].startswith(f"{tmp_path}/.firstfault/torchrun/4711/2")


def test_without_the_variable(tmp_path: Path) -> None:
    """`firstfault torchrun` works now, and plain torchrun would with the variable: that's no failure of a check."""
    code, told = _doctor(tmp_path, FIRSTFAULT="", PET_RDZV_ID="")
    assert (code, set(told)) == (0, {"all"})
    assert told["all"]["switch"] == "FIRSTFAULT is not set: only `firstfault torchrun` records"
    assert told["all"]["job"].startswith("no variable names it: torchrun's --rdzv-id, else the start's time")
    assert told["all"]["attempt"] == "0: no variable counts attempts"
    assert doctor._conclude([], is_plain_recorded=False) == [
        "works now: `firstfault torchrun`",
        "would also work with FIRSTFAULT=1: torchrun, and other launchers with torch's agent",
    ]
    assert doctor._conclude([], is_plain_recorded=True)[0].startswith("works now: torchrun, ")
    assert doctor._conclude(["torch"], is_plain_recorded=False)[0].startswith("doesn't record yet")


def test_a_storage_without_its_package(tmp_path: Path) -> None:
    """One row names the missing package and the folder that is used instead; no other row names a place."""
    code = f"import sys; sys.modules.update(s3fs=None, obstore=None); {NOT_HERE}"
    given = {"FIRSTFAULT": "1", "FIRSTFAULT_FOLDER": "s3://bucket/runs", "TMPDIR": str(tmp_path)}
    _, told = _doctor(tmp_path, "-c", code, **given)
    assert "install the extra s3" in told["storage"]
    assert told["storage"].endswith(f"documents go to {tmp_path}/.firstfault-{os.geteuid()}/torchrun instead")
    assert {"documents", "fallback"} & told["all"].keys() == set()


def test_other_launchers(tmp_path: Path) -> None:
    """JAX's workers, a callback that Ray Train can't load, and a taken place for temporary files are named."""
    callbacks = "firstfault_torch.no_such.Callback"
    taken = tmp_path / f".firstfault-{os.geteuid()}"
    taken.symlink_to(tmp_path)
    others = {"RAY_TRAIN_CALLBACKS": callbacks, "TMPDIR": str(tmp_path)}
    code, told = _doctor(tmp_path, FIRSTFAULT="1", JAX_COORDINATOR_ADDRESS="a:1", **others)
    assert (code, set(told)) == (1, {"all", "switch"})
    assert "JaxRun starts no torchrun" in told["switch"]
    assert f"{taken}-<random>/torchrun ({taken} isn't this user's alone)" in told["all"]["fallback"]
    assert "no_such.Callback fails each training of Ray Train: AttributeError" in told["all"]["callback"]


def test_a_bad_environment(tmp_path: Path) -> None:
    """Another Python for the workers, a folder that is a file and a misspelled mode are all named."""
    (tmp_path / "file").touch()
    given = {"FIRSTFAULT_FOLDER": "file", "PYTHON_EXEC": "/bin/false", "FIRSTFAULT_DECISIONS": "obsrve"}
    code, told = _doctor(tmp_path, FIRSTFAULT="", **given)
    assert (code, set(told)) == (1, {"all", "workers", "storage"})
    assert told["workers"].startswith("/bin/false doesn't read firstfault.pth")
    assert "Not a directory" in told["storage"]
    assert told["all"]["decisions"].startswith("FIRSTFAULT_DECISIONS must be off, observe or act, not 'obsrve': ")


def test_a_version_that_was_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer or older release than those of docs/reference/versions.md is named with the ones that were tried."""
    versions = {"torch": "2.16.0+cpu", "flytekit": "1.9.1", "nvidia-resiliency-ext": "0.4.1"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    _, _, told = doctor._check_versions()
    page = (Path(__file__).parents[2] / "docs/reference/versions.md").read_text(encoding="utf-8")
    named = {f"{major}.{minor}" for tried in doctor.TRIED.values() for major, minor in tried}
    assert named - set(re.findall(r"\b\d+\.\d+\b", page)) == set()
    assert told == (
        "firstfault was not tested with torch 2.16.0+cpu (tested: 2.3 to 2.15), flytekit 1.9.1 (tested: 1.15 to 1.16)"
    )


def test_without_torch(tmp_path: Path) -> None:
    """Where torch is not installed, it says so."""
    code, told = _doctor(tmp_path, "-c", NOT_HERE, FIRSTFAULT="1")
    assert (code, set(told)) == (1, {"all", "torch"})
    assert told["torch"] == "not installed in this Python: in a clone, pip install '.[torch]'"
    assert "versions" not in told["all"], "only a torch that is there can be tested"


@pytest.mark.s3
def test_a_storage(s3: Any, tmp_path: Path) -> None:
    """A storage is written, listed and read; a bucket that does not exist is named."""
    environment, without_torch = {"FIRSTFAULT": "1", **s3.environment()}, ("-c", NOT_HERE)  # importing it takes seconds
    folder = s3.uri("runs")
    _, told = _doctor(tmp_path, *without_torch, **environment, FIRSTFAULT_FOLDER=folder)
    assert (set(told), told["all"]["storage"].partition(" in ")[0]) == (
        {"all", "torch"},
        f"wrote, listed and read {folder}",
    )
    _, told = _doctor(tmp_path, *without_torch, **environment, FIRSTFAULT_FOLDER="s3://no-such-bucket/runs")
    assert set(told) == {"all", "torch", "storage"}
