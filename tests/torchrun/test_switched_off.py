"""``FIRSTFAULT=0`` turns each entry point off: programs run as without firstfault."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from firstfault_start import OFF, is_off, is_on
from firstfault_torch.torchrun.command import drop_own_options

SEES = """
import os, sys
import torch.distributed.distributed_c10d
print(sorted(name for name in os.environ if name.startswith("FIRSTFAULT")))
print(sys.argv[1:])
if os.getppid() != int(os.environ["LAUNCHER"]):
    print("started by another process than the launcher")
raise ValueError("batch 7 has no labels")
"""
"""A worker: what it sees of firstfault and of its launcher, before it fails."""
BECOMES = """
import os, sys
os.environ["LAUNCHER"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Become a launcher whose process id the worker knows."""
LONGEST_S = 120


def run(
    folder: Path, *words: str, switch: str = "0", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a launcher; return its end."""
    folder.mkdir(exist_ok=True)
    (folder / "sees.py").write_text(SEES)
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "FIRSTFAULT_WORKER", "FIRSTFAULT_FOLDER")
    inherited = {name: value for name, value in os.environ.items() if name not in ranks}
    return subprocess.run(
        [sys.executable, "-c", BECOMES, *words],
        cwd=folder,
        env={**inherited, "FIRSTFAULT": switch, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )


@pytest.mark.parametrize("value", [*OFF, "False", " OFF "])
def test_values_that_mean_off_mirror_those_that_mean_on(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the counterparts of those that mean on; without a value an entry point decides."""
    monkeypatch.setenv("FIRSTFAULT", value)
    assert (is_off(), is_on()) == (True, False)
    for undecided in ("", "maybe"):
        monkeypatch.setenv("FIRSTFAULT", undecided)
        assert (is_off(), is_on()) == (False, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--standalone train.py --ff-job its-own", "--standalone train.py --ff-job its-own"),
        ("--ff-job a --standalone --ff-hang=off -m mod --x", "--standalone -m mod --x"),
        ("--ff-keep-torch-box train.py --ff-keep-torch-box", "train.py --ff-keep-torch-box"),
        (
            "--ff-keep --ff-hang sometimes --nnodes 1 -- t.py -- --ff-job",
            "--nnodes 1 -- t.py -- --ff-job",
        ),
    ],
)
def test_firstfaults_own_options_are_dropped(given: str, expected: str) -> None:
    """Options before the script are firstfault's, also with a bad value; later ones stay."""
    assert drop_own_options(given.split()) == expected.split()


@pytest.mark.jobs
def test_firstfault_torchrun_becomes_torchrun(tmp_path: Path) -> None:
    """Its process becomes torch's launcher; output and exit code are as without firstfault."""
    options = ("--nproc-per-node", "1", "--master-port", "0", "sees.py", "--ff-job", "mine")
    plain = run(tmp_path / "plain", "-m", "torch.distributed.run", *options)
    own = ("-m", "firstfault", "torchrun", "--ff-job", "j", "--ff-folder=f", "--ff-hang", "bad")
    ended = run(tmp_path / "off", *own, *options)
    assert plain.returncode == ended.returncode == 1
    assert ended.stdout == plain.stdout == "['FIRSTFAULT']\n['--ff-job', 'mine']\n"
    assert "ChildFailedError" in ended.stderr
    assert "firstfault: " not in ended.stderr
    assert [path.name for path in (tmp_path / "off").iterdir()] == ["sees.py"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["module", "import"])
def test_a_rank_is_not_recorded_by_module_or_import(way: str, tmp_path: Path) -> None:
    """Neither by `python -m firstfault_torch.record` nor by the import."""
    if way == "module":
        words = ["-m", "firstfault_torch.record", "sees.py"]
    else:
        words = ["-c", f"import firstfault_torch.record\n{SEES}"]
    common = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    ended = run(tmp_path / "off", *words, FIRSTFAULT_FOLDER=str(tmp_path / "runs"), **common)
    assert ended.returncode == 1
    assert ended.stdout.startswith("['FIRSTFAULT', 'FIRSTFAULT_FOLDER']\n")
    assert not (tmp_path / "runs").exists()


def test_requeue_does_nothing_when_switched_off(tmp_path: Path) -> None:
    """Nothing is requeued, and the exit code is that of a job without a verdict."""
    ended = run(tmp_path, "-m", "firstfault", "requeue", SLURM_JOB_ID="1")
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "", "")
