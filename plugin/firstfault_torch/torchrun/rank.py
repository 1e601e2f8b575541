"""Records the end of a rank that no agent has started. `firstfault_start` imports and calls it.

The rank counts as a separate node with one worker. Its recorder outlives it, and then uploads what
the rank has left in its folder. Its last words, a document and a roster entry, describe a killed
process until `record_exception` or `record_exit` replaces them.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from firstfault.model import NodePresence, Phase, Place, Subject, Writer
from firstfault.recorder.folder import DEATH_DOCUMENT, DEATH_ROSTER_ENTRY
from firstfault.recorder.process import start_recorder
from firstfault.run_folder import begin_run
from firstfault.slurm_pointer import leave_pointer
from firstfault.store import is_remote, join, split_name
from firstfault.strategies import DEFAULT_STRATEGY
from firstfault.wire.documents import encode, encode_presence
from firstfault_start import (
    BEGAN,
    LOADED_MARK,
    OWN_RANK,
    STARTED_BY_RANK,
    WORKER_VARIABLE,
    has_trained,
    mark_rank,
)
from firstfault_torch.compat.torch_worker import rank_in_group
from firstfault_torch.engine import PlainEngine
from firstfault_torch.failures.failure_records import ErrorClass, failure_record
from firstfault_torch.guard import (
    call_with_timeout,
    ignore_worker_signals,
    logger,
    start_in_thread,
    suppress_internal_errors,
)
from firstfault_torch.node.document_writer import as_entry, put_on_node
from firstfault_torch.node.stacks import write_at_sigterm
from firstfault_torch.node_context import NodeContext
from firstfault_torch.node_setup import read_node_setup
from firstfault_torch.places import get_worker_place, look_up_address
from firstfault_torch.time_limits import ANNOUNCE_TIMEOUT_SECONDS
from firstfault_torch.torchrun.job_folder import get_given_folder
from firstfault_torch.torchrun.job_names import Name, read_job_names
from firstfault_torch.worker.worker_monitor import WorkerMonitor, current_monitor, open_monitor

_KILLED_MESSAGE = "ended without an exception: SIGKILL ended it, or os._exit, which looks the same"


def begin() -> None:
    """Begin to watch this process, and announce it to readers."""
    with suppress_internal_errors("preparing to record"):
        if WORKER_VARIABLE in os.environ:  # not in Ray's workers
            mark_rank(LOADED_MARK)
        _start_monitor(BEGAN[-1] if _is_started_by_rank() else time.time_ns())


def record_exception(error: BaseException) -> None:
    """Make a document about the exception that ends this process durable."""
    with (
        suppress_internal_errors("recording an exception"),
        ignore_worker_signals(handled_only=True),
    ):
        # Nothing of torch was imported: a wrapper. The process that it has started, and that may
        # have failed before it, began later and counts.
        monitor = _start_monitor(BEGAN[-1] if BEGAN else time.time_ns())
        if monitor is not None and monitor.node_context is not None:
            # Only now: the program may have formed its process group with other numbers than the
            # launcher's.
            monitor.place = _find_last_place(monitor.place)
            monitor.fails(error)
            # The exception's document is durable, so the one about a SIGKILL is withdrawn.
            setup = read_node_setup(monitor.node_context.identity)
            _replace_last_words(
                monitor.node_context,
                replace(_build_presence(Phase.FAILED, monitor.place), setup=setup),
            )
            # By any rank that fails: the first one may have ended before it could, or never have
            # imported torch.
            leave = partial(leave_pointer, monitor.node_context.output_prefix, get_given_folder())
            call_with_timeout(
                leave, ANNOUNCE_TIMEOUT_SECONDS, "leaving a pointer for Slurm's script"
            )


def record_exit() -> None:
    """Note that this process is about to exit."""
    with suppress_internal_errors("recording an exit"):
        monitor = current_monitor()
        if monitor is not None and monitor.node_context is not None:
            # The program exits normally: exceptions that it has handled aren't failures.
            monitor.in_flight.withdraw_handled_except(None)
            _replace_last_words(
                monitor.node_context,
                _build_presence(Phase.SUCCEEDED, _find_last_place(monitor.place)),
            )


_run_locks: list[int] = []
"""Descriptors of the locked marks on the folders of runs: open as long as this process runs."""
_suspended_last_words: dict[str, bytes] = {}
"""The last words of this process when it was about to exec another program."""


def record_exec() -> None:
    """Note that this process is about to become another program by exec:
    how that one ends can't be known.

    If it is one of Python, it records itself, as a later start of this rank.
    """
    with suppress_internal_errors("recording an exec"):
        monitor = current_monitor()
        if (
            monitor is not None
            and monitor.node_context is not None
            and monitor.node_context.files is not None
        ):
            folder = monitor.node_context.files.last_words.folder
            for name in (DEATH_DOCUMENT, DEATH_ROSTER_ENTRY) if not _suspended_last_words else ():
                with contextlib.suppress(FileNotFoundError):
                    _suspended_last_words[name] = (folder / name).read_bytes()
            _replace_last_words(
                monitor.node_context,
                _build_presence(Phase.SUCCEEDED, _find_place_in_group(monitor.place)),
            )


def record_failed_exec() -> None:
    """Note that exec has failed, and this process continues."""
    with suppress_internal_errors("continuing after a failed exec"):
        monitor = current_monitor()
        if (
            monitor is not None
            and monitor.node_context is not None
            and monitor.node_context.files is not None
        ):
            for name, data in _suspended_last_words.items():
                monitor.node_context.files.last_words.add(name, data)
            _suspended_last_words.clear()


def _start_monitor(began_ns: int) -> WorkerMonitor | None:
    """Return the monitor of this process and start its recorder, or None without a folder.

    `began_ns`: of several starts of this rank, such as before and after an exec, readers judge the
    one that began last.
    """
    existing_monitor = current_monitor()
    engine = _build_engine()
    if existing_monitor is not None or engine is None:
        return existing_monitor
    identity = replace(engine.identity(), engine="alone")
    node_context = NodeContext(DEFAULT_STRATEGY, identity, incarnation=began_ns // 1_000_000)
    # Its own session: a launcher that kills the rank's process group must not kill the recorder,
    # which still has to upload.
    seconds = node_context.upload_deadline_seconds
    process = start_recorder(node_context.output_prefix, deadline_seconds=seconds, own_session=True)
    process.leave()
    node_context = replace(node_context, node_folder=str(process.folder.path))
    place = _build_place(node_context)
    monitor = open_monitor(engine, is_program=True, alone=(node_context, place))
    # No agent can ask this rank for its stacks: the launcher's SIGTERM is the last chance to write
    # them.
    write_at_sigterm(process.folder.worker(place.round, place.local_rank or 0))
    if _is_started_by_rank() and OWN_RANK[-1][2] <= 1:
        # The process above may be the training, and this one its helper: without peers, nobody can
        # know. Then the one above may end this one at any time, so a SIGKILL is no failure. Only
        # what this process itself records counts.
        return monitor
    # A process can't write after SIGKILL. So the document about it is written now, and uploaded by
    # the recorder if the process ends without replacing it.
    killed = failure_record(
        ErrorClass.WORKER_FAILURE,
        place,
        code="USER:SIGKILL",
        message=f"rank {place.rank} {_KILLED_MESSAGE}",
        writer=Writer.WORKER,
        subject=Subject.WORKER,
        signal="SIGKILL",
    )
    process.folder.last_words.add(DEATH_DOCUMENT, encode(killed))
    process.folder.last_words.add(
        DEATH_ROSTER_ENTRY, encode_presence(_build_presence(Phase.FAILED, place))
    )
    # In the background: the storage or the name service may be slow, and the program must start.
    start_in_thread(partial(_announce, node_context, place), "announcing this rank")
    return monitor


@cache
def _build_engine() -> PlainEngine | None:
    folder = get_given_folder()
    names = read_job_names("")
    if folder:
        job, name = names.job, names.run
        if names.step:  # each srun is a separate run
            job = Name(job.value, f"{job.source} and SLURM_STEP_ID")
            name = f"{name}.{names.step}"
        run = join(folder, name)
        description = names._replace(job=job).describe(split_name(run)[1])
        return PlainEngine(
            run,
            int(names.number),
            names.node.value,
            namespace=names.namespace.value,
            task=description,
        )
    if OWN_RANK[-1][0] == 0:
        logger.warning(
            "nothing is recorded; set FIRSTFAULT_FOLDER to a folder that all ranks can write to"
        )
    return None


def _build_place(node_context: NodeContext) -> Place:
    """Return this rank's place from the launcher's variables."""
    rank, local_rank, size = OWN_RANK[-1]
    variables = {
        "RANK": rank,
        "GROUP_RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": size,
    }
    return get_worker_place(node_context, {name: str(number) for name, number in variables.items()})


def _is_started_by_rank() -> bool:
    return os.getpid() in STARTED_BY_RANK  # a forked child inherits the list


def _find_last_place(place: Place) -> Place:
    """Return this rank's place for its end. Of several processes of a rank,
    one that has trained has the last word.
    """
    in_group = _find_place_in_group(place)
    return replace(in_group, incarnation=time.time_ns() // 1_000_000) if has_trained() else in_group


def _find_place_in_group(place: Place) -> Place:
    """Return this rank's place as torch knows it, if it has a group."""
    rank, size = rank_in_group() or (place.rank, place.world_size)
    return replace(place, rank=rank, group_rank=rank, world_size=size, group_world_size=size)


def _build_presence(phase: Phase, place: Place) -> NodePresence:
    return NodePresence(
        phase,
        place,
        () if place.rank is None else (place.rank,),
        timestamp_ns=time.time_ns(),
    )


def _announce(node_context: NodeContext, place: Place) -> None:
    if place.rank == 0:  # one rank is enough: all record in the same folder
        leave_pointer(node_context.output_prefix, get_given_folder())
    _mark_run(split_name(node_context.output_prefix)[0])
    path, data = as_entry(_build_presence(Phase.JOINED, replace(place, ip=look_up_address())))
    put_on_node(path, data, node_context, ANNOUNCE_TIMEOUT_SECONDS)


def _mark_run(run: str) -> None:
    """Mark a local run's folder as firstfault's, for `firstfault prune` and `show`.

    Each rank does, and keeps the descriptor open: its lock shows that the run is active.
    """
    if not is_remote(run):
        # another user's folder, for example; the documents may still be written
        with contextlib.suppress(OSError):
            _run_locks.append(begin_run(Path(run)))


def _replace_last_words(node_context: NodeContext, presence: NodePresence) -> None:
    """Replace the last words: the recorder uploads this roster entry after the exit,
    but no document about a death.
    """
    if node_context.files is not None:
        last_words = node_context.files.last_words
        # If the process is killed between these steps, the document about a SIGKILL is still
        # uploaded.
        last_words.add(DEATH_ROSTER_ENTRY, encode_presence(presence))
        # Emptied, not removed: the recorder restores what a cleaner of /tmp has removed.
        last_words.add(DEATH_DOCUMENT, b"")
