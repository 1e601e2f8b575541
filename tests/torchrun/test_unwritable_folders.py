"""Folders of documents that cannot be written: a job ends as it would, soon,
and one line tells what to do.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from firstfault import MultiErrorFileOutputReader
from lab.cascades.cases import Way
from tests.torchrun.nodes import JOB_TIMEOUT_S, run_job

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
CHOOSE = """
from firstfault_torch.torchrun.job_folder import choose_folder
from firstfault_torch.torchrun.job_names import read_job_names
print(choose_folder(read_job_names("job", {}), None).folder)
"""
SUCCEEDS = r"import os; os.write(1, b'trained\n')"  # in one piece: the ranks share the pipe
FILLS = """
import os
try:
    with open(os.environ['FIRSTFAULT_FOLDER'] + '/checkpoint', 'wb', 0) as file:
        while True:
            file.write(bytes(1024))
except OSError:
    raise ValueError('batch 7 has no labels') from None
"""


def run_on_bad_folder(
    kind: str,
    tmp_path: Path,
    *command: str,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python with a bad folder of documents, and return how it ended."""
    folder = tmp_path / "documents"
    folder.mkdir()
    (tmp_path / "tmp").mkdir()
    environment = {
        **os.environ,
        "FIRSTFAULT_FOLDER": str(folder),
        "TMPDIR": str(tmp_path / "tmp"),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **variables,
    }
    apart = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        sys.executable,
        str(HERE / "on_bad_folder.py"),
    ]
    whole = [*apart, kind, str(folder), sys.executable, *command]
    ended = subprocess.run(
        whole,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=JOB_TIMEOUT_S,
        check=False,
    )
    if ended.returncode == 77 or "unshare" in ended.stderr:
        pytest.skip(f"this machine forbids mounts: {ended.stderr}")
    return ended


def _torchrun(program: str) -> tuple[str, ...]:
    launcher = ("-m", "firstfault", "torchrun", "--standalone", "--nproc-per-node", "2")
    return (*launcher, "--no-python", sys.executable, "-c", program)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("read-only", r"cannot be written \(.*Read-only file system.*\)"),
        ("full", r"cannot be written \(.*No space left on device.*\)"),
    ],
)
def test_a_node_that_cannot_write_the_folder_records_in_another(
    kind: str, why: str, tmp_path: Path
) -> None:
    """A node that cannot write the folder records in one for temporary files,
    and one line says so.
    """
    ended = run_on_bad_folder(kind, tmp_path, "-c", CHOOSE)
    # its user is root in its own namespace
    other = tmp_path / "tmp" / ".firstfault-0" / "torchrun" / "job" / "0"
    assert ended.stdout == f"{other}\n"
    told = (
        rf"firstfault: {tmp_path}/documents {why}; this node's documents are in {other}\. Make it"
        r" writable, or set .*\n"
    )
    assert re.fullmatch(told, ended.stderr)


@pytest.mark.jobs
def test_a_job_succeeds_on_a_mount_that_never_answers(tmp_path: Path) -> None:
    """A job that succeeds does so on a mount that answers nothing."""
    ended = run_on_bad_folder("dead", tmp_path, *_torchrun(SUCCEEDS))
    assert (ended.returncode, ended.stdout) == (0, "trained\ntrained\n")
    assert re.fullmatch(
        r".* did not answer within 5 s; this node's documents are in .*\n", ended.stderr
    )


@pytest.mark.jobs
def test_a_job_that_fills_its_folder_still_has_a_verdict(tmp_path: Path) -> None:
    """A job that fills its folder fails with its verdict,
    and its documents are shown from another folder.
    """
    ended = run_on_bad_folder("small", tmp_path, *_torchrun(FILLS))
    assert ended.returncode == 1
    assert "firstfault: ValueError, rank" in ended.stderr
    stored, more = ended.stderr.splitlines()[-2:]
    assert stored.startswith(f"  Stored: on this node; {tmp_path}/documents/")
    folder = more.removeprefix("  More: firstfault show ")
    verdict = MultiErrorFileOutputReader(folder).verdict()
    assert (verdict.code, verdict.category) == ("USER:ValueError", "disk_full")


@pytest.mark.jobs
def test_a_job_records_although_no_other_folder_is_writable(tmp_path: Path) -> None:
    """A job records in its folder where nothing else can be written,
    as in a container with a read-only disk.
    """
    words = [
        "-m",
        "firstfault",
        "torchrun",
        "--standalone",
        "--nproc-per-node",
        "1",
        "--log-dir",
        "/mnt/logs",
    ]
    program = "raise ValueError('batch 7 has no labels')"
    given = {"FIRSTFAULT_FOLDER": "/mnt", "TMPDIR": ""}
    ended = run_on_bad_folder(
        "no-temporary",
        tmp_path,
        *words,
        "--no-python",
        sys.executable,
        "-c",
        program,
        **given,
    )
    assert ended.returncode == 1
    assert "firstfault: ValueError, rank 0" in ended.stderr
    (run,) = (
        run for run in (tmp_path / "documents").iterdir() if (run / "firstfault.run").exists()
    )
    assert MultiErrorFileOutputReader(str(run / "0")).verdict().code == "USER:ValueError"


OPENS_ALL = """
import resource
import torch.distributed as dist
dist.init_process_group("gloo")
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
files = []
while True:
    files.append(open("/dev/null"))
"""


@pytest.mark.jobs
def test_an_exception_is_recorded_without_free_descriptors(tmp_path: Path) -> None:
    """Its exception is recorded nevertheless, without a warning,
    and the number of files is told.
    """
    words = ["--nproc-per-node=1", "--no-python", sys.executable, "-c", OPENS_ALL]
    (node,) = run_job(tmp_path, words, Way("forked"), nodes=1).nodes
    assert "firstfault: failed" not in node.err
    assert node.headline.startswith("OSError, rank 0 on host-0")
    (failure,) = MultiErrorFileOutputReader(node.prefix).job().failures
    assert (failure.exception is not None, failure.system.open_files is not None) == (True, True)
