"""torchrun's options and the watchdog through `launch`, with real workers in a real agent."""

import contextlib
import gc
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig

from firstfault import MultiErrorFileOutputReader
from firstfault.conclude import Conclusion
from firstfault.layout import ROSTER
from firstfault.model import Phase
from firstfault.render.flyte_message import flyte_message
from firstfault.report.first_line import first_line
from firstfault.wire.documents import decode_presence, unpack
from firstfault_torch import NodeFailedError, Options, PlainEngine, Watchdog, launch, run, watchdog
from firstfault_torch.agent.agent import ReportingAgent
from firstfault_torch.node import stderr_relay
from tests.nodes import Job
from tests.processes import is_gone
from tests.torch_agent.trainings import prints_and_leaves, prints_and_raises
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.forks]
LONG_S = 60.0


def _run(
    folder: Path,
    function: Callable[..., Any],
    *args: Any,
    options: Options | None = None,
    **fields: Any,
) -> Any:
    """Run two forked workers on one node; return their results."""
    values: dict[str, Any] = {
        "nproc_per_node": 2,
        "start_method": "fork",
        "max_restarts": 0,
        "run_id": "job",
    }
    values |= {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", **fields}
    config = LaunchConfig(1, 1, **values)
    return launch(
        config,
        function,
        *args,
        engine=PlainEngine(str(folder), node="worker-0"),
        options=options,
    )


def _failed(folder: Path, function: Callable[..., Any], *args: Any, **fields: Any) -> Conclusion:
    """Run workers that fail; return what is concluded."""
    with pytest.raises(NodeFailedError):
        _run(folder, function, *args, **fields)
    conclusion = MultiErrorFileOutputReader(f"{folder}/0").conclude()
    assert conclusion is not None
    return conclusion


def _fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise LookupError(os.environ["LOCAL_RANK"])
    time.sleep(LONG_S)


def test_workers_with_virtual_local_ranks_have_their_own_documents(tmp_path: Path) -> None:
    """With LOCAL_RANK 0 in each worker, as torch's option sets it,
    each has its own documents and its own rank.
    """
    conclusion = _failed(tmp_path, _fail_on_rank_1, virtual_local_rank=True)
    root, victim = sorted(conclusion.job.failures, key=lambda failure: -(failure.rank or 0))
    assert conclusion.verdict.ranks == (1,)
    assert (root.exception is not None and root.exception.message, root.place.local_rank) == (
        "0",
        1,
    )
    assert (victim.stopped_by_agent, victim.place.local_rank, len(victim.stack_dumps)) == (
        True,
        0,
        1,
    )
    assert "in _fail_on_rank_1\n    time.sleep(LONG_S)\n" in victim.stack_dumps[0].text


def _batches(folder: Path) -> Iterator[int]:
    """Rank 1 takes long to close this: until rank 0's exception is recorded, and a while."""
    rank, closing = os.environ["RANK"], folder / "closing"
    while rank == "0" and not closing.exists():
        time.sleep(0.01)
    try:
        yield 1
    finally:
        closing.touch()
        while rank == "1" and not list(folder.glob("0/firstfault/errors/*.pb")):
            time.sleep(0.01)
        time.sleep(0.3 * int(rank))


def _raise_in_a_loop(folder: Path) -> None:
    for batch in _batches(folder):
        raise ValueError(f"bad batch {batch}")


def test_an_exception_still_in_flight_is_named_too(tmp_path: Path) -> None:
    """The rank whose exception is still on its way out when the first one's is
    recorded is named as well.
    """
    conclusion = _failed(tmp_path, _raise_in_a_loop, tmp_path)
    assert (conclusion.verdict.ranks, conclusion.verdict.rule) == ((0, 1), "own-fault")
    assert conclusion.verdict.victims.count == 0


def test_redirected_output_is_kept_and_goes_where_torch_sends_it(tmp_path: Path) -> None:
    """Output goes where torch sends it, and each failure keeps the end of
    its stderr all the same.
    """
    logs = DefaultLogsSpecs(
        f"{tmp_path}/logs",
        {0: Std.ALL},
        {1: Std.ALL},
        local_ranks_filter={0, 1, 2},
    )
    prefix = "[${node} ${group_rank} $$ ${role_name}${rank}] "
    fields = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": 4,
        "role": "trainer",
        "logs_specs": logs,
    }
    fields["log_line_prefix_template"] = prefix
    with Job(tmp_path, prints_and_leaves, config=fields).start() as job:
        ended = job.end()
    assert ended.codes == [1]
    tails = {failure.rank: failure.log_tail for failure in ended.job.failures}
    assert tails == {rank: f"stderr of rank {rank}\nits reason" for rank in range(4)}
    out, err = (f"\n{(tmp_path / f'node-0.{stream}.log').read_text()}" for stream in ("out", "err"))
    assert "[node-0 0 $ trainer1] stdout of rank 1\n" in out
    assert "[node-0 0 $ trainer1] stderr of rank 1\n" in err
    assert out.count("\nstdout of rank 2\n") == 1
    assert "\nstderr of rank 2\n" in err
    for rank in (0, 3):
        assert f"of rank {rank}\n" not in out
    (folder,) = (tmp_path / "logs").glob("job_*")
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.log")}
    assert files == {
        f"attempt_0/{rank}/{stream}.log": (
            f"{stream} of rank {rank}\nits reason\n" if stream == "stderr" else text
        )
        for rank in (0, 1)
        for stream, text in (("stderr", ""), ("stdout", f"stdout of rank {rank}\n"))
    }


def _fail_once() -> str:
    print(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", file=sys.stderr, flush=True)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(3)
    return "well"


def test_each_restart_has_its_own_log_folder(tmp_path: Path) -> None:
    """Each restart has its own folder of log files."""
    logs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ERR)
    always = Options(restarts_follow_policy=False)
    ended = _run(
        tmp_path,
        _fail_once,
        options=always,
        max_restarts=1,
        nproc_per_node=1,
        logs_specs=logs,
    )
    assert ended == {0: "well"}
    files = {path.parts[-3]: path.read_text() for path in (tmp_path / "logs").rglob("stderr.log")}
    assert files == {"attempt_0": "restart 0\n", "attempt_1": "restart 1\n"}


def _hang_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        with watchdog.expires(after=0.5, scope="train step"):
            time.sleep(LONG_S)
    with watchdog.expires(after=LONG_S):
        time.sleep(LONG_S)


def test_a_missed_deadline_kills_the_worker_in_each_round(tmp_path: Path) -> None:
    """The worker that misses a deadline is killed and named, the agent lives;
    a restarted one has new deadlines.
    """
    options = Options(watchdog=Watchdog(), restarts_follow_policy=False)
    conclusion = _failed(tmp_path, _hang_on_rank_1, options=options, max_restarts=1)
    verdict, job = conclusion.verdict, conclusion.job
    assert (verdict.ranks, verdict.category, verdict.code, verdict.confidence) == (
        (1,),
        "hang",
        "USER:Hang",
        "high",
    )
    line = first_line(verdict, conclusion.decision)
    assert line.startswith('hang rank 1 worker-0 retry unclear: "train step" exceeded 0.5 s at')
    root = verdict.root
    assert root.expired is not None
    assert (root.signal, root.sent_signals, root.place.round) == ("SIGKILL", (), 1)
    assert "_hang_on_rank_1" in root.stack_dumps[0].text
    assert "its agent killed it" in root.message
    (victim,) = (failure for failure in job.failures if failure is not root)
    assert victim.rank == 0
    (before,) = (failure for failure in job.history if failure.rank == 1)
    assert (before.expired, before.place.round) == (root.expired, 0)


def _leave_a_word() -> None:
    os.write(2, b"its last words\n")


def test_stderr_is_complete_when_launch_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a worker has written is passed on before `launch` returns,
    also if the agent cannot write for long.
    """
    is_read = threading.Event()
    written = []
    monkeypatch.setattr(
        stderr_relay, "write_stderr", lambda data: is_read.wait() and written.append(data)
    )
    monkeypatch.setattr(stderr_relay, "RELAY_CLOSE_TIMEOUT_SECONDS", 0.0)
    wait = run.flush_relays
    monkeypatch.setattr(
        run, "flush_relays", lambda shutdown_requested: (is_read.set(), wait(shutdown_requested))
    )
    _run(tmp_path, _leave_a_word, nproc_per_node=1)
    assert b"".join(written) == b"its last words\n"


def test_events_go_to_the_users_handler(tmp_path: Path) -> None:
    """Torch's events of agent and workers go to the handler that the user names."""
    handler = Mock(level=logging.INFO)
    logger = logging.getLogger("torchelastic-events-console")
    logger.addHandler(handler)
    try:
        _run(tmp_path, os.getpid, event_log_handler="console", nproc_per_node=1)
    finally:
        logger.removeHandler(handler)
    events = [json.loads(call.args[0].getMessage()) for call in handler.handle.call_args_list]
    assert {(event["source"], event["metadata"]["state"]) for event in events} >= {
        ("AGENT", "SUCCEEDED"),
        ("WORKER", "SUCCEEDED"),
    }


def _leave_processes(folder: Path) -> None:
    if os.environ["RANK"] == "0":
        time.sleep(LONG_S)
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(LONG_S,))
    fork.start()
    program = subprocess.Popen(["sleep", str(LONG_S)])
    daemon = subprocess.Popen(["sleep", str(LONG_S)], start_new_session=True)
    (folder / "pids").write_text(f"{fork.pid} {program.pid} {daemon.pid}")
    os._exit(3)


def test_an_agent_ends_the_children_of_a_worker(tmp_path: Path) -> None:
    """A worker that ends at once cannot end its children: its agent does,
    but not a process in a session of its own.
    """
    assert _failed(tmp_path, _leave_processes, tmp_path).verdict.ranks == (1,)
    fork, program, daemon = map(int, (tmp_path / "pids").read_text().split())
    os.kill(daemon, signal.SIGKILL)
    # Python needs a moment for torch's handler of SIGTERM
    wait_until(lambda: is_gone(fork) and is_gone(program))


def _return_what_cannot_be_pickled() -> Any:
    return lambda: None


@pytest.mark.parametrize(
    ("function", "logs"),
    [(os.getpid, Std.ERR), (_fail_on_rank_1, Std.NONE), (_return_what_cannot_be_pickled, Std.NONE)],
)
def test_no_temporary_file_stays(
    function: Callable[[], Any],
    logs: Std,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run leaves none of torch's temporary files, but log files that were asked for,
    and touches no other run's.

    Nothing holds its agent and its store, which a later fork would inherit: their end aborts it.
    """
    gc.collect()
    gc.disable()  # objects end only when no reference is left
    temporary = Path(tempfile.mkdtemp(prefix="ff-"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    others = [
        temporary / "torchelastic_12345678/job_1/attempt_0/0/error.json",
        temporary / "pytorch-errorfile-1.pickle",
    ]
    others[0].parent.mkdir(parents=True)
    for other in others:
        other.touch()
    specs = DefaultLogsSpecs(redirects=logs)
    try:
        with contextlib.suppress(NodeFailedError):
            _run(tmp_path, function, logs_specs=specs)
        assert not [item for item in gc.get_objects() if type(item) in {ReportingAgent, TCPStore}]
    finally:
        gc.enable()
    kept = sorted(Path(specs.root_log_dir).rglob("stderr.log"))
    assert len(kept) == (2 if logs else 0)
    assert sorted(path for path in temporary.rglob("*") if path.is_file()) == sorted(
        [*others, *kept]
    )
    assert len(list(temporary.iterdir())) == 2 + len(kept[:1])
    shutil.rmtree(temporary)


MOST = 2 * 1024


@pytest.mark.jobs
def test_a_failure_has_the_last_lines_of_its_worker(tmp_path: Path) -> None:
    """The failure has the last lines before the traceback, redacted and bounded,
    and the report quotes them once.
    """
    fields = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2}
    with Job(tmp_path, prints_and_raises, config=fields).start() as job:
        ended = job.end()
    assert "step 399" in ended.logs, "stderr still reaches the agent's own"
    assert ended.verdict.ranks == (1,)
    root = ended.verdict.root
    assert root.exception is not None
    lines = root.log_tail.splitlines()
    assert lines[-2:] == ["step 399 of shard-399", "password=***"]
    assert all(line.startswith("step ") for line in lines[:-1]), "whole lines, and no traceback"
    assert MOST * 0.9 < len(root.log_tail) <= MOST
    message = flyte_message(MultiErrorFileOutputReader(f"{tmp_path}/0").report(ended.conclusion))
    assert message.count("step 399 of shard-399") == 1
    assert message.count("Traceback (most recent call last)") == 1
    (victim,) = (failure for failure in ended.job.failures if failure is not root)
    assert "step" not in victim.log_tail
    roster = tmp_path / "0" / ROSTER
    entries = {
        path.name: decode_presence(path.read_bytes(), path.name) for path in roster.glob("*.pb")
    }
    assert sorted(entry.phase.value for entry in entries.values()) == ["failed", "joined"]
    (bundle,) = roster.glob("*.bundle")
    (failed,) = (name for name, entry in entries.items() if entry.phase is Phase.FAILED)
    copied = decode_presence(unpack(bundle.read_bytes())[f"roster/{failed}"], failed)
    assert [(tail.rank, tail.text) for tail in copied.log_tails] == [(1, root.log_tail)]
