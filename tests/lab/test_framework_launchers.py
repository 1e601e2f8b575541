"""``FIRSTFAULT=1`` under launchers that end in torch's elastic agent,
and ranks that Lightning starts without one.

``make frameworks`` runs them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from firstfault import MultiErrorFileOutputReader
from lab.frameworks.pods import run
from tests.ports import get_free_port
from tests.prefix import Prefix
from tests.torchrun.test_rank import await_last_roster_entries

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(
        os.environ.get("FIRSTFAULT_FRAMEWORKS") != "all", reason="make frameworks runs it"
    ),
]

HERE = Path(__file__).parents[2] / "lab" / "frameworks"
SCRIPT = str(HERE / "launched.py")
LONGEST_S = 300
BOX = "Root Cause (first observed failure):"
"""In torch's box."""
LAUNCHERS = {
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node=2", SCRIPT],
    "accelerate": [
        *[
            "accelerate",
            "launch",
            "--multi_gpu",
            "--num_processes=2",
            "--num_machines=1",
            "--mixed_precision=no",
        ],
        *["--dynamo_backend=no", "--main_process_port={port}", SCRIPT],
    ],
    "fabric": [
        *[
            "fabric",
            "run",
            "--accelerator=cpu",
            "--strategy=ddp",
            "--devices=2",
            "--main-port={port}",
        ],
        SCRIPT,
    ],
    "torchx": [
        "torchx",
        "run",
        "-s",
        "local_cwd",
        "dist.ddp",
        "-j",
        "1x2",
        "--script",
        SCRIPT,
        "--",
    ],
    "kfpytorch": ["python", str(HERE / "stock_local.py")],
}
"""Their commands, without the fault."""


def _launched(launcher: str, fault: str, folder: Path) -> tuple[int, str]:
    """Run a launcher with the variable; return its exit code, and all that it printed."""
    command = [item.format(port=get_free_port()) for item in LAUNCHERS[launcher]]
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {"FIRSTFAULT": "1", "OMP_NUM_THREADS": "1", "PATH": os.pathsep.join(folders)}
    ended = subprocess.run(
        [*command, fault],
        cwd=folder,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_ends_with_firstfaults_lines_and_its_own_exit_code(
    launcher: str, tmp_path: Path
) -> None:
    """The launcher ends with firstfault's lines about the rank that raised,
    and its own exit code.
    """
    code, text = _launched(launcher, "raise", tmp_path)
    assert code == 1, text
    assert "ValueError, rank 1 on " in text, text
    assert "batch 7 has no labels" in text
    assert "retry: no, " in text
    assert "code: launched.py:" in text
    if launcher == "kfpytorch":
        # the exception of the job is torch's: kfpytorch makes Flyte's from it
        assert "spawn_helper FAILED" in text
    else:
        assert BOX not in text
    (attempt,) = tmp_path.glob(".firstfault/torchrun/*/0")
    assert MultiErrorFileOutputReader(str(attempt)).verdict().ranks == (1,)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_success_prints_nothing_about_firstfault(launcher: str, tmp_path: Path) -> None:
    """A job that succeeds ends with 0, and nothing is said about firstfault."""
    code, text = _launched(launcher, "none", tmp_path)
    assert code == 0, text
    said = ["returned 2"] if launcher == "kfpytorch" else ["rank 0: 2", "rank 1: 2"]
    assert all(line in text for line in said), text
    assert "firstfault" not in text.lower()


def test_each_node_of_a_stock_task_reports_the_same_root_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pods that Flyte's own command runs,
    each node of a stock task reports the same root cause.
    """
    monkeypatch.setenv("FIRSTFAULT", "1")
    ended = run("stock", tmp_path, {"framework": "plain", "fault": "raise", "rank": 1})
    assert ended.exit_codes == [0, 0]  # Flyte's command has written the error
    assert ended.outputs == {}
    assert ended.logs.count("root cause: KeyError, rank 1 on ") == 2, ended.logs


@pytest.mark.parametrize(("way", "fault"), [("module", "raise"), ("import", "none")])
def test_both_ranks_of_lightnings_launcher_are_recorded(
    way: str, fault: str, tmp_path: Path
) -> None:
    """Both ranks are recorded: the one that a person starts,
    and the one that Lightning starts from it.
    """
    script = tmp_path / "training.py"
    text = (HERE / "lightning_alone.py").read_text()
    script.write_text(
        text
        if way == "module"
        else text.replace("import sys", "import firstfault_torch.record, sys", 1)
    )
    ended = subprocess.run(
        [
            sys.executable,
            *(["-m", "firstfault_torch.record"] if way == "module" else []),
            str(script),
            fault,
        ],
        env=os.environ
        | {
            "FIRSTFAULT_FOLDER": str(tmp_path),
            "FIRSTFAULT_NODE": "host",
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    prefix = Prefix(tmp_path / "0")
    await_last_roster_entries(prefix, 2)
    assert ended.stdout.count("trained") == (2 if fault == "none" else 0), ended.stderr
    assert "firstfault" not in ended.stderr
    if fault == "none":
        assert (ended.returncode, prefix.failures()) == (0, [])
        return
    assert ended.returncode != 0
    verdict = MultiErrorFileOutputReader(prefix.uri).verdict()
    assert verdict.headline == "ValueError, rank 1 on host: batch 7 has no labels"
    assert verdict.coverage.expected == 2
