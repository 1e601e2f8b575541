"""Replaces the agent of torch's launcher by one that runs the node under firstfault, with an engine
and a folder; and prints a few lines after a failure.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import logging
import os
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)

from firstfault.evidence.completion import classify_outcome
from firstfault.layout import ERROR_FILE, ROSTER, bundle_name
from firstfault.model import Outcome
from firstfault.model.job import Action
from firstfault.run_folder import begin_run, find_fallback_folders, make_fallback_folder
from firstfault.slurm_pointer import leave_pointer
from firstfault.store import split_name
from firstfault.utils.text import counted
from firstfault_torch.agent.agent import PeerFailedError
from firstfault_torch.agent.launch import Job, Prepared, run_agent
from firstfault_torch.compat import warn_once
from firstfault_torch.compat.torch_agent import job_store
from firstfault_torch.engine import PlainEngine, Publication, SealedVerdict
from firstfault_torch.guard import (
    await_late_calls,
    call_with_timeout,
    suppress_internal_errors,
    try_call,
)
from firstfault_torch.options import DEFAULT_SIGNALS
from firstfault_torch.run import NodeFailedError, run_node
from firstfault_torch.time_limits import (
    HANDOVER_TIMEOUT_SECONDS,
    RUN_FOLDER_TIMEOUT_SECONDS,
    TORCHRUN_STOP_GRACE_SECONDS,
)
from firstfault_torch.torchrun.exit_codes import FAILED, choose_exit_code
from firstfault_torch.torchrun.job_folder import choose_folder, find_root_folder
from firstfault_torch.torchrun.job_names import read_job_names
from firstfault_torch.torchrun.settings import keeps_torch_box, read_options
from firstfault_torch.torchrun.variables import drop_invalid
from firstfault_torch.worker.worker_monitor import run_recorded

_LAUNCHER_API_MODULE = "torch.distributed.launcher.api"
_LAUNCHER_NAMES = ("torchrun", "firstfault torchrun")
_LAUNCHER_MODULE = "torch.distributed.run"
_SHOWN_ROWS = ("Where", "Retry", "Next")
"""The rows of the report that are printed at the end of a failed job's output."""
_LINE_LENGTH = 80
_WRAP_OPTIONS: Mapping[str, Any] = {
    "subsequent_indent": "    ",
    "break_long_words": False,
    "break_on_hyphens": False,
}
"""The headline continues deeper than the rows below it; paths stay whole, to be copied."""
_RUN_PATH_FUNCTION = "run_script_path"
"""torchrun's function that runs a program in a spawned process, for ``--run-path``."""
_ERROR_FILE_LOGGER = "torch.distributed.elastic.multiprocessing.errors.error_handler"
_NO_ERROR_FILE_MESSAGE = "no error file defined for parent"
"""In the line that torch's error handler logs when the launcher raises."""
_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_ENGINE_GROUP = "firstfault.engines"
"""Group of entry points: named after a program or a function's module;
each returns the factory of an engine.
"""


def replace_launcher_agent() -> None:
    """Let torch's launcher make our agent, and note how many nodes each of its jobs needs.

    Once per process. If this torch has no such agent, log a warning and leave torch's.
    """
    launcher: Any = importlib.import_module(_LAUNCHER_API_MODULE)
    if launcher.__dict__.get("LocalElasticAgent") is TorchrunAgent:
        return
    if "LocalElasticAgent" not in launcher.__dict__:
        warn_once(
            "the launcher's agent", "torch's own agent runs the workers, and nothing is recorded"
        )
        return
    registry: Any = rendezvous_handler_registry
    create = registry.create_handler

    # torch's WorkerSpec has no node counts. The launcher makes the rendezvous handler just before
    # the agent, so the counts noted here are those of the same job.
    def create_and_note_counts(parameters: RendezvousParameters) -> RendezvousHandler:
        TorchrunAgent.min_nodes, TorchrunAgent.max_nodes = (
            parameters.min_nodes,
            parameters.max_nodes,
        )
        handler: RendezvousHandler = create(parameters)
        return handler

    registry.create_handler = create_and_note_counts
    # The launcher looks the name up in its module when it makes the agent, so replacing it here is
    # enough.
    launcher.LocalElasticAgent = TorchrunAgent


class TorchrunAgent(LocalElasticAgent):
    """Replaces the agent of torch's launcher, which creates it, calls `run` and records its events.

    A job fails as under torch's agent: the launcher raises the same exception. If firstfault's
    lines have reported it, nothing prints it again: torch's box would follow them.
    """

    min_nodes = max_nodes = 1
    _run_lock: int | None = None
    """Descriptor of the lock on the run's folder."""

    def __init__(self, spec: WorkerSpec, **arguments: Any) -> None:
        super().__init__(spec=spec, **arguments)
        self._arguments = {"spec": spec, **arguments}

    def run(self, role: str = "default") -> RunResult:
        """Run the workers of this node to their end."""
        spec: WorkerSpec = self._arguments["spec"]
        is_program = (
            isinstance(spec.entrypoint, str)
            or getattr(spec.entrypoint, "__name__", "") == _RUN_PATH_FUNCTION
        )
        engine: PlainEngine | None = None
        with suppress_internal_errors("preparing to record", through=(KeyboardInterrupt,)):
            drop_invalid()
            engine = self._build_engine(
                _find_engine_factory(spec, TorchrunEngine if is_program else PlainEngine),
                spec.rdzv_handler,
            )
        if engine is None:
            # firstfault's own preparation failed, for instance because no folder can be written:
            # the job must run anyway.
            return super().run(role)
        if callable(spec.entrypoint):
            function: Any = partial(run_recorded, engine, spec.entrypoint)
            # torch shows it under the name of the user's
            function.__name__ = function.__qualname__ = getattr(
                spec.entrypoint, "__qualname__", str(spec.entrypoint)
            )
            spec.entrypoint = function
        handler: Any = spec.rdzv_handler
        # Our agent closes the rendezvous itself, within a limit; torch's launcher calls `shutdown`
        # again in its `finally`.
        prepared = Prepared(self._arguments, run_agent, handler.shutdown)
        handler.shutdown = lambda: True  # torch's launcher closes it in any case, and may wait long
        signals = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", DEFAULT_SIGNALS)
        job = Job(self.min_nodes, spec.max_restarts, signals, lambda: prepared)
        grace_seconds = self._arguments.get("shutdown_timeout") or os.environ.get(_TIMEOUT_VARIABLE)
        seconds = grace_seconds or TORCHRUN_STOP_GRACE_SECONDS
        try:
            results = run_node(
                job, engine=engine, options=read_options(terminated_stop_seconds=float(seconds))
            )
        except NodeFailedError as failed:
            # In another thread, torchrun is a part of the caller's process: the caller gets torch's
            # exceptions, and its process continues.
            is_process = threading.current_thread() is threading.main_thread()
            publication = failed.publication
            has_reported = publication is not None or failed.is_left_to_others
            if is_program and is_process and has_reported:
                _end_program(
                    failed,
                    engine.choose_exit_code(publication),
                    is_durable=publication is not None and publication.durable,
                )
            if (
                failed.verdict is not None
                and (error := engine.to_exception(failed.verdict)) is not None
            ):
                raise error from failed.error
            # A failed result: the launcher makes a new ChildFailedError of the same failures (see
            # `is_reported`).
            if isinstance(failed.error, ChildFailedError):
                return RunResult(WorkerState.FAILED, failures=failed.error.failures)
            raise failed.error from None
        finally:
            # Last: until here the lock shows to cleanups that the run is active.
            if self._run_lock is not None:
                os.close(self._run_lock)
        return RunResult(WorkerState.SUCCEEDED, return_values=results)

    def _build_engine(
        self, factory: Callable[..., PlainEngine], handler: RendezvousHandler
    ) -> PlainEngine:
        """Return the engine of this node; its folder is chosen by now."""
        names = read_job_names(handler.get_run_id())
        chosen = choose_folder(names, partial(job_store, handler) if self.max_nodes > 1 else None)
        self._run_lock = chosen.mark
        # One node is enough, and the one that publishes a verdict does it again. Now, because all
        # agents may be killed.
        if os.environ.get("SLURM_NODEID", "0") == "0":
            _leave_slurm_pointer(chosen.folder, RUN_FOLDER_TIMEOUT_SECONDS)
        run, attempt = split_name(chosen.folder)
        description = names.describe(split_name(run)[1])
        is_shared = chosen.is_shared or self.max_nodes == 1
        return factory(
            run, int(attempt), names.node.value, is_shared, names.namespace.value, description
        )


def _end_program(failed: NodeFailedError, code: int, *, is_durable: bool) -> None:
    """Exit with a code; return if torch's launcher exits with the same one by
    raising its exception.

    `is_durable`: whether the verdict is in the job's folder.
    """
    # Python's end would wait for a thread that waits for the folder, and might abort the process if
    # a thread is inside torch's store while the store's host is frozen or gone.
    if not is_durable or (_is_launcher() and not await_late_calls(0.0)):
        _print_torch_box(failed.error)
        _exit_at_once(code)
    if _is_launcher():
        # First at the exit, when torch's launcher has ended and no thread is left that Python waits
        # for. Then only the interpreter's own end would follow: it destroys torch's modules, which
        # takes a second, while the scheduler waits for this node to start the job again.
        atexit.register(_exit_at_once, code)
    # For a node without a failed worker torch has no exception, and for other codes neither.
    if isinstance(failed.error, PeerFailedError) or code != FAILED:
        _print_torch_box(failed.error)
        # a scheduler ends all nodes once the first one has left: its signal must not change the
        # code
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(code) from None
    if not keeps_torch_box():
        _mark_as_reported(failed.error)


def _is_launcher() -> bool:
    """Whether this process is torchrun's, and not a program that has called torch's launcher."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return (
        Path(sys.argv[0]).name in _LAUNCHER_NAMES or getattr(spec, "name", "") == _LAUNCHER_MODULE
    )


_BUFFERED_FILES = {io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom}


def _exit_at_once(code: int) -> NoReturn:
    """Exit without waiting for threads; but run what the program has registered for its end,
    and flush its output and its open files.
    """
    atexit.unregister(_exit_at_once)
    with suppress_internal_errors("running the functions for the program's end"):
        atexit._run_exitfuncs()  # noqa: SLF001 - there is no public name
    # Python's end would flush a file when it destroys the object. By the exact type: asking an
    # object for its class may run code of its own.
    files = (item for item in gc.get_objects() if type(item) in _BUFFERED_FILES)
    for stream in (sys.stdout, sys.stderr, *files):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()
    os._exit(code)


def _find_engine_factory(
    spec: WorkerSpec, default: Callable[..., PlainEngine]
) -> Callable[..., PlainEngine]:
    """Return the factory of the engine: the usual one,
    or a platform's if the workers run its program or function.
    """
    run: Any = spec.entrypoint
    name = Path(run).name if isinstance(run, str) else str(getattr(run, "__module__", ""))
    for entry in entry_points(group=_ENGINE_GROUP, name=name):
        default = entry.load()(spec)
    return default


def _print_torch_box(error: Exception) -> None:
    """Print torch's box if the user wants it, where torch's launcher won't come to print it."""
    if keeps_torch_box() and isinstance(error, ChildFailedError):
        sys.stderr.write("".join(traceback.format_exception_only(error)))
        sys.stderr.flush()


_reported_errors: list[Any] = []
"""Errors that firstfault has printed; for a ChildFailedError its failures,
because torch raises another instance.
"""


def is_reported(error: BaseException) -> bool:
    """Return whether firstfault has already printed an error that torch's launcher raises."""
    return getattr(error, "failures", error) in _reported_errors


def _mark_as_reported(error: Exception) -> None:
    """Keep Python and torch from printing an error again that firstfault has printed."""
    _reported_errors.append(getattr(error, "failures", error))
    # Once per process: it may run several jobs.
    if len(_reported_errors) == 1:
        logging.getLogger(_ERROR_FILE_LOGGER).addFilter(
            lambda record: _NO_ERROR_FILE_MESSAGE not in str(record.msg)
        )
        hook = sys.excepthook
        sys.excepthook = lambda *raised: None if is_reported(raised[1]) else hook(*raised)


class TorchrunEngine(PlainEngine):
    """`PlainEngine` for a job of programs: a few lines at the end of the
    output describe what failed.
    """

    exit_codes: ClassVar[Mapping[Action, int]] = {}
    """The engine's own codes by action; they come before the user's."""

    def publish(self, publication: Publication, **how: Any) -> Publication:
        """Write the verdict into the attempt's folder, or, if that can't be written,
        into one for temporary files.
        """
        published = PlainEngine.publish(self, publication, **how)
        if published.is_refused:
            return published
        prefix = self.identity().output_prefix
        # The folder may hang: a copy for readers goes into the temporary folder of this node.
        if not published.durable:
            leave = partial(_store_on_node, publication, self._path_on_node)
            call_with_timeout(leave, HANDOVER_TIMEOUT_SECONDS, "leaving the verdict on this node")
            prefix = str(self._find_copy_on_node(publication.sealed) or prefix)
        if publication.own is not None:  # not on nodes that adopt another node's verdict
            _leave_slurm_pointer(prefix, HANDOVER_TIMEOUT_SECONDS)
        return published

    def choose_exit_code(self, publication: Publication | None) -> int:
        """Return the code of the decision: the engine's, else the user's, else torchrun's."""
        return choose_exit_code(publication, self.exit_codes)[0]

    def describe_observed(self, publication: Publication) -> str:
        """Return what the mode "act" would have done differently, or "" if nothing or in another
        mode than "observe".
        """
        return choose_exit_code(publication, self.exit_codes)[1]

    @property
    def _path_on_node(self) -> Path:
        """This attempt's path below the folder of runs among temporary files."""
        run, attempt = split_name(self.identity().output_prefix)
        return Path(split_name(run)[1], attempt)

    def _find_copy_on_node(self, sealed: SealedVerdict) -> Path | None:
        """Return where this verdict was left among temporary files, or None if it wasn't."""
        for runs in find_fallback_folders():
            # the bytes, because an older run may have had this name
            document, _ = try_call((runs / self._path_on_node / ERROR_FILE).read_bytes, OSError)
            if document == sealed.document:
                return runs / self._path_on_node
        return None

    def announce(self, publication: Publication) -> None:
        """Print what failed, where, whether to run the job again,
        and the command that shows the rest.
        """
        sealed = publication.sealed
        rows = dict(
            line.split(": ", 1) for line in sealed.seal.message.splitlines() if ": " in line
        )
        lines = textwrap.wrap(
            f"firstfault: {sealed.verdict.headline}", _LINE_LENGTH, **_WRAP_OPTIONS
        )
        is_interrupted = classify_outcome(sealed.verdict) is Outcome.INTERRUPTED  # a person did it
        shown = () if is_interrupted else _SHOWN_ROWS
        lines += [f"  {name}: {rows[name]}" for name in shown if name in rows]
        if restarts := publication.node_context.round:
            lines.append(f"  Before: {counted(restarts, 'restart')} of the workers in this attempt")
        prefix = self.identity().output_prefix
        on_node = self._find_copy_on_node(sealed)
        if on_node is not None and prefix != str(on_node):
            lines.append(
                f"  Stored: on this node; {prefix} isn't writable (`firstfault doctor` shows why)"
            )
            prefix = str(on_node)
        if observed := self.describe_observed(publication):
            lines.append(f"  Observed: {observed}")
        lines.append(f"  More: firstfault show {prefix}")
        sys.stderr.write("\n".join([*lines, ""]))
        sys.stderr.flush()


def _leave_slurm_pointer(prefix: str, seconds: float) -> None:
    """Let a script of Slurm around this agent find the attempt."""
    leave = partial(leave_pointer, prefix, try_call(find_root_folder, OSError)[0] or "")
    # With a limit: the user's home may hang.
    call_with_timeout(leave, seconds, "leaving a pointer for Slurm's script")


def _store_on_node(publication: Publication, path: Path) -> None:
    """Write a verdict and the documents that it rests on among this node's temporary files."""
    folder = make_fallback_folder() / path
    # The mark makes it a run for readers; without a lock, because nothing runs there.
    os.close(begin_run(folder.parent, folder.name))
    (folder / ROSTER).mkdir(parents=True, exist_ok=True)
    if bundle := publication.bundle:
        (folder / ROSTER / bundle_name(bundle, of_separate_nodes=True)).write_bytes(bundle)
    (folder / ERROR_FILE).write_bytes(publication.sealed.document)
