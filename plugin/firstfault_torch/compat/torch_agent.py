"""torch elastic's agent and its process contexts: whether this torch has the hooks,
and private attributes.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

from firstfault_torch.compat import warn_once
from firstfault_torch.failures.torch_error_file import is_readable, read_traceback
from firstfault_torch.guard import start_in_thread, try_call

_HOOKS = (
    "_rendezvous",
    "_start_workers",
    "_monitor_workers",
    "_stop_workers",
    "_restart_workers",
    "_shutdown",
    "_exit_barrier",
)
_ATTRIBUTES = ("_worker_group", "_remaining_restarts", "_pcontext")
BARRIER_MEMBERS_KEY = "torchelastic/agent/terminal_state/num_members"
"""How many agents have entered torch's exit barrier; an agent without firstfault counts there too.
"""
BARRIER_COMPLETE_KEY = "torchelastic/agent/terminal_state/last_member"
"""Set by the last one."""
_LOGGERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.multiprocessing.api",
)
_failure_logger = logging.getLogger(_LOGGERS[-1])
"""Where torch logs which worker failed."""
_formatter = logging.Formatter()
_BUFFER_SIZE_VARIABLE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""Entries of torch's flight recorder. torch 2.9 and later read TORCH_FR_BUFFER_SIZE
and warn of this name.
"""
_DEFAULT_ENTRIES = "2000"
"""torch's own default since 2.9."""


def flight_recorder_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that turn NCCL's flight recorder on for the workers;
    empty if the user has set them.

    torch 2.2 to 2.8 keep no entries without them; since 2.9 torch keeps 2,000 by default.
    """
    is_on = torch.__version__ >= "2.9" or _BUFFER_SIZE_VARIABLE in environment
    return {} if is_on else {_BUFFER_SIZE_VARIABLE: _DEFAULT_ENTRIES}


class _Subprocess:
    """A worker that torch started as a program, with the names of multiprocessing's processes."""

    sentinel = None
    """No descriptor becomes readable when the process ends."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    @property
    def exitcode(self) -> int | None:
        code: int | None = self._process.poll()
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the program and what it has started, as torch does:
        torch gives it its own session.
        """
        os.killpg(self.pid, number)


def close_program_files(context: Any) -> None:
    """Close this process's ends of the files to which programs write:
    torch keeps them open until it stops them.
    """
    for handler in getattr(context, "subprocess_handlers", {}).values():
        file = getattr(handler, "_stderr", None)
        if file is not None:
            file.close()


def master_address(group: WorkerGroup) -> tuple[str, int]:
    """Return host and port of the workers' own store;
    before torch 2.4 only the round's store knows them.
    """
    if hasattr(group, "master_addr"):
        return group.master_addr or "", group.master_port or 0
    store: Any = group.store
    return store.get("MASTER_ADDR").decode(), int(store.get("MASTER_PORT"))


def find_missing_names(agent: LocalElasticAgent | None = None) -> tuple[str, ...]:
    """Return the hooks that this torch's agent lacks, and the attributes that `agent` lacks.

    Without one of them our agent can't replace torch's.
    """
    hooks = [name for name in _HOOKS if not callable(getattr(LocalElasticAgent, name, None))]
    attributes = [name for name in _ATTRIBUTES if agent is not None and not hasattr(agent, name)]
    return (*hooks, *attributes)


def shutdown_timeout(seconds: int) -> dict[str, int]:
    """Return the argument that lets torch's agent kill its workers after `seconds`;
    torch before 2.13 takes none.
    """
    # see __init__
    parameters = inspect.signature(LocalElasticAgent._shutdown).parameters  # noqa: SLF001
    return {"timeout": seconds} if "timeout" in parameters else {}


def has_handler(name: str) -> bool:
    """Whether torch has loaded a rendezvous handler of this name."""
    return name in getattr(rendezvous_handler_registry, "_registry", {})


def discard_shared_store(handler: Any) -> None:
    """Let the next rendezvous make a new store for the workers. A torch that makes one
    anyway has no such names.
    """
    for name in ("_bootstrap_store_info", "_shared_tcp_store_server"):
        if name in vars(handler):
            setattr(handler, name, None)


def job_store(handler: Any) -> Any:
    """Return the store that the nodes of a job share before their first round;
    None if this rendezvous has none.

    A static rendezvous has a store only after all nodes have met, so they meet here. If that fails,
    the first round raises the same error.
    """
    backend = handler.get_backend()
    if backend == "static":
        errors: list[BaseException | None] = []
        # In a thread: torch waits in C++, where Python runs no signal handlers, and SIGTERM must
        # end the wait.
        doing = "waiting for all nodes at torch's rendezvous"
        start_in_thread(
            lambda: errors.append(try_call(handler.next_rendezvous)[1]), doing, local=True
        ).wait()
        if errors and errors[0] is not None:
            failed: Future[Any] = Future()
            failed.set_exception(errors[0])
            handler.next_rendezvous = failed.result
    return getattr(handler, "_store", None) if backend in {"c10d", "static"} else None


def worker_processes(context: Any) -> Sequence[Any]:
    """Return the worker processes of torch's process context in the order of local ranks;
    empty if they aren't found.

    Each has multiprocessing's `pid`, `exitcode` and `sentinel`.
    """
    handlers = getattr(context, "subprocess_handlers", None)
    if handlers is not None:
        return [_Subprocess(handlers[rank].proc) for rank in sorted(handlers)]
    processes = getattr(getattr(context, "_pc", None), "processes", None)
    if processes is None:
        warn_once("the worker processes", "a worker's death is noticed only when torch polls")
        return []
    return list(processes)


def traceback_files(context: Any) -> dict[int, str]:
    """Map local ranks to the files in which torch.multiprocessing keeps tracebacks;
    a binary has none.
    """
    if hasattr(context, "subprocess_handlers"):
        return {}
    files = getattr(getattr(context, "_pc", None), "error_files", None)
    if files is None:
        warn_once(
            "torch.multiprocessing's traceback files",
            "exceptions outside of the task function have no text",
        )
    return {rank: str(file) for rank, file in enumerate(files or ())}


def find_ranks_without_result(context: Any) -> frozenset[int]:
    """Return the local ranks that haven't handed over a result yet.

    A worker hands over its result before it may exit, so a worker that exited without a result
    never delivers one. A worker that runs a binary has no result; its exit code decides.
    """
    if hasattr(context, "subprocess_handlers"):
        return frozenset()
    taken, queues = _get_results_and_queues(
        context, "a worker that exits with 0 in the middle is not noticed"
    )
    return frozenset(rank for rank, queue in queues.items() if rank not in taken and queue.empty())


def collect_results(context: Any, local_ranks: Collection[int]) -> dict[int, Any]:
    """Return the results that these workers have handed over so far, by local rank.

    Leave out workers that may have died while they wrote: reading half a result blocks forever.
    """
    taken, queues = _get_results_and_queues(
        context, "the workers of a node cannot continue after one of them has ended"
    )
    for rank, queue in queues.items():
        if rank in local_ranks and rank not in taken and not queue.empty():
            taken[rank] = queue.get()
    return dict(taken)


def _get_results_and_queues(
    context: Any, consequence: str
) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the results that were taken so far, and the queues of all workers;
    empty if torch has no such names.
    """
    taken = getattr(context, "_return_values", None)
    queues = getattr(context, "_ret_vals", None)
    if taken is None or queues is None:
        warn_once("the workers' results", consequence)
        return {}, {}
    return taken, queues


def let_workers_exit(context: Any) -> None:
    """Let workers exit that have handed over their results."""
    finished = getattr(context, "_worker_finished_event", None)
    if finished is not None:
        finished.set()


def build_process_failure(
    local_rank: int, pid: int, exit_code: int, error_file: str
) -> ProcessFailure:
    """Return torch's record of a failed worker; without the content of a file that torch
    could not read or print.

    A process that ends while it writes its error.json leaves half of it.
    """
    return ProcessFailure(local_rank, pid, exit_code, error_file if is_readable(error_file) else "")


def describe_failure(context: Any, local_rank: int, pid: int, exit_code: int) -> str:
    """Return that a worker failed in torch's words, with the traceback that torch kept."""
    entrypoint = getattr(context, "entrypoint", "")
    what = (
        f"fn: {entrypoint.__qualname__}"
        if hasattr(entrypoint, "__qualname__")
        else f"binary: {entrypoint}"
    )
    text = read_traceback(traceback_files(context).get(local_rank, ""))
    more = f"\n{text}" if text else ""
    return f"failed (exitcode: {exit_code}) local_rank: {local_rank} (pid: {pid}) of {what}{more}"


def log_root_or_first_failure(lines: dict[int, str], root_ranks: Sequence[int] = ()) -> None:
    """Log one line of `describe_failure` through torch's logger, and drop all lines. The line is
    about the root cause if it is known, otherwise about the first failure.

    torch names the failure that it sees first. A worker may see a peer's broken connection, and
    exit, while the peer still runs its exit handlers.

    Args:
        lines: by global rank, in the order of the failures.
        root_ranks: global ranks of the root cause, on any node; empty if unknown.
    """
    named = next((rank for rank in (*root_ranks, *lines) if rank in lines), None)
    line = lines[named] if named is not None else ""
    lines.clear()
    if line:
        _failure_logger.error("%s", line)


def format_exceptions_early() -> None:
    """Let torch elastic's own loggers format tracebacks as the standard library does;
    the text is the same.

    torch's formatter imports ``torch._dynamo`` for it: one second and more, in an agent that has
    just lost a worker.
    """
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_format_now)


def _format_now(record: logging.LogRecord) -> bool:
    if record.exc_info and not record.exc_text:
        record.exc_text = _formatter.formatException(record.exc_info)
        record.exc_info = None
    return True
