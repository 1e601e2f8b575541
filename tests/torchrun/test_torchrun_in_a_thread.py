"""torchrun as a part of another process, which starts it in a thread."""

import os
import threading
from pathlib import Path

import pytest
from torch.distributed.run import main

from firstfault_torch.torchrun.agent import replace_launcher_agent
from tests.nodes import forkserver

pytestmark = pytest.mark.jobs

LONG_S = 120


def _run_in_thread(folder: Path) -> None:
    """Run a job of one rank that raises; write down what the thread gets from torchrun."""
    os.chdir(folder)
    os.environ |= {
        "FIRSTFAULT_EXIT_CODES": "default",
        "FIRSTFAULT_FOLDER": str(folder),
        "TMPDIR": str(folder),
    }
    os.dup2(os.open("err", os.O_WRONLY | os.O_CREAT), 2)
    Path("program.py").write_text("raise TypeError('a bug')\n")

    def run() -> None:
        try:
            main(["--standalone", "--nproc-per-node=1", "program.py"])
        except BaseException as error:  # noqa: BLE001 - also SystemExit
            Path("raised").write_text(type(error).__name__)

    replace_launcher_agent()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_a_thread_gets_torchs_exception_and_its_process_continues(tmp_path: Path) -> None:
    """With exit codes the thread gets torch's exception, because the code is for a process;
    and that goes on.
    """
    process = forkserver().Process(target=_run_in_thread, args=(tmp_path,))
    process.start()
    process.join(LONG_S)
    assert process.exitcode == 0, (tmp_path / "err").read_text()
    assert (tmp_path / "raised").read_text() == "ChildFailedError", (tmp_path / "err").read_text()
    assert "firstfault: TypeError" in (tmp_path / "err").read_text()
