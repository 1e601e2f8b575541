"""The recorder's process: answers requests, has documents uploaded,
and reports the agent's death.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from firstfault.layout import ROSTER
from firstfault.recorder import time_limits
from firstfault.recorder.agent_death import AgentDeathReport, load_document_writer
from firstfault.recorder.client import RECEIVED, Target
from firstfault.recorder.container_memory import MemoryWatch
from firstfault.recorder.folder import NodeFolder
from firstfault.recorder.folder_keeper import FolderKeeper, remove_stale_folders
from firstfault.recorder.orphans import kill_orphan_processes, relay_late_stderr
from firstfault.recorder.process import IGNORED_SIGNALS, Settings
from firstfault.recorder.spool import Spool
from firstfault.recorder.termination_message import (
    WARNING,
    describe_memory,
    find_file,
    write_termination_message,
)
from firstfault.recorder.uploads import Uploads, log_line
from firstfault.utils.run_sync import try_await
from firstfault.utils.text import parse_json

_SHORTAGE_BEGIN_SHARE, _SHORTAGE_END_SHARE = 0.95, 0.9
"""Shares of the memory's limit at which a shortage begins and ends."""
_MAX_DRAIN_SHARE = 0.8
"""Share of a client's timeout for uploads in progress; the rest is for the answer and the exit."""


def serve(folder: NodeFolder, settings: Settings) -> None:
    """Serve until the agent ends, then remove the folder and exit. Does not return."""
    # The agent started this process with these signals blocked. Ignore them first, then unblock:
    # the kernel discards a pending signal when its action becomes SIG_IGN, so a Ctrl-C during the
    # start is lost on purpose.
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    if not os.environ.get("FIRSTFAULT_DEBUG"):
        # the recorder logs lost documents, not retries
        logging.getLogger("stamina").setLevel(logging.ERROR)
    asyncio.run(_run(folder, settings))


async def _run(folder: NodeFolder, settings: Settings) -> None:
    _, error = await try_await(_Server(folder, settings).live())
    if error:
        log_line(f"ended by {error}")
    folder.remove()
    # Exit inside the loop: asyncio.run() would join executor threads, which may hang in a storage
    # request.
    os._exit(0)


class _Server:
    """The recorder of one node."""

    def __init__(self, folder: NodeFolder, settings: Settings) -> None:
        self._folder = folder
        self._settings = settings
        self._keeper = FolderKeeper(folder)
        self._memory = MemoryWatch()
        self._warning = ""
        """A warning about a shortage of memory, in the container's termination message."""
        self._uploads = Uploads(settings.output_prefix)
        self._ended = asyncio.Event()
        self._connections = 0
        self._last_request = time.monotonic()

    async def live(self) -> None:
        """Serve until the agent sends "end" or dies."""
        # The agent has already bound this socket: clients may have connected before this process
        # could run.
        listener = socket.socket(fileno=self._settings.listener)
        self._listening = await asyncio.start_unix_server(
            self._serve, sock=listener, backlog=socket.SOMAXCONN
        )
        agent = asyncio.create_task(_wait_for_agent_end(self._settings.agent_pid))
        ends = (agent, asyncio.create_task(self._ended.wait()))
        # references, so that they aren't garbage-collected
        others = [
            asyncio.create_task(self._prepare()),
            asyncio.create_task(self._watch_memory_and_folder()),
        ]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        others[1].cancel()  # the folder is about to be removed
        # The request may arrive and the agent exit in the same turn of the loop; then there is
        # nothing left to upload.
        if self._ended.is_set():
            return  # the request "end" has already waited for the uploads
        await self._outlive_agent()

    async def _prepare(self) -> None:
        await self._uploads.warm()
        await try_await(asyncio.to_thread(remove_stale_folders, self._folder))
        await asyncio.sleep(time_limits.IMPORT_DELAY_SECONDS)
        await asyncio.to_thread(load_document_writer)  # before the agent dies

    async def _watch_memory_and_folder(self) -> None:
        """Sample the memory, and restore what a cleaner of /tmp has removed,
        until the agent's end.
        """
        # A loop for weeks: a full disk, or a moment without memory or threads, costs one turn.
        while True:
            self._memory.sample()
            await try_await(self._warn_of_shortage())
            await try_await(self._keep_folder())
            await asyncio.sleep(time_limits.MEMORY_SAMPLE_INTERVAL_SECONDS)

    async def _keep_folder(self) -> None:
        if not self._keeper.restore_removed_files():
            return
        # The old socket still listens, but nobody can reach it without its file.
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._folder.socket))
        except OSError:
            listener.close()
            raise
        self._listening.close()
        self._listening = await asyncio.start_unix_server(
            self._serve, sock=listener, backlog=socket.SOMAXCONN
        )

    async def _warn_of_shortage(self) -> None:
        """Write a message before memory runs out. If the kernel kills the container, only this
        message gives the reason.
        """
        shortage = (
            self._memory.find_shortage(
                _SHORTAGE_END_SHARE if self._warning else _SHORTAGE_BEGIN_SHARE
            )
            if find_file()
            else None
        )
        if shortage is not None and not self._warning:
            self._warning = await asyncio.to_thread(
                describe_memory,
                *shortage,
                self._folder,
                self._settings.agent_pid,
            )
            await asyncio.to_thread(write_termination_message, self._warning, replaces=WARNING)
        elif shortage is None and self._warning:
            await asyncio.to_thread(write_termination_message, "", replaces=self._warning)
            self._warning = ""

    # --- requests ---------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request in two lines, at once and with the result;
        close the connection if it is invalid.
        """
        self._connections += 1
        self._last_request = time.monotonic()
        request: dict[str, Any] = {}
        try:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                request = dict(parse_json(await reader.readline()))
                # The client may be killed, or time out, before it reads an answer: its document is
                # uploaded anyway.
                writer.write(RECEIVED)
                answer = await self._answer(request)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        finally:
            # Also after an error: once the agent is dead, the recorder stays until no connection is
            # left.
            writer.close()
            self._connections -= 1
        if request.get("op") == "end":
            self._ended.set()

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "put":
            file = Path(request["file"])
            target = Target(**request["target"])
            spool = Spool(file.parent) if file.is_relative_to(self._folder.path) else None
            return asdict(await self._uploads.put(target, file, spool))
        if request["op"] == "end":
            limit = _MAX_DRAIN_SHARE * request["seconds"]
            await self._uploads.drain(min(time_limits.UPLOADS_DRAIN_TIMEOUT_SECONDS, limit))
            return {}
        if request["op"] == "resources":
            return asdict(self._memory.report())
        if request["op"] == "roster":
            names, error = await self._uploads.names(ROSTER)
            return {"names": names, "error": error}
        raise ValueError(request["op"])

    # --- the agent's death ------------------------------------------------------------------------

    async def _outlive_agent(self) -> None:
        # The dead agent was the only reader of the workers' stderr: open the FIFOs before anything
        # slow, because a worker that writes without a reader gets SIGPIPE.
        stderr = self._folder.open_stderr()
        reading = asyncio.create_task(asyncio.to_thread(_read_on, stderr)) if stderr else None
        report = AgentDeathReport(
            self._folder,
            self._keeper,
            self._memory,
            self._uploads,
            self._settings.deadline_seconds,
        )
        _, error = await try_await(report.upload())
        if error:
            log_line(f"the agent's death was not recorded: {error}")
        # Surviving workers may still send documents: stay until no request is open and none has
        # come for a while.
        deadline = time.monotonic() + self._settings.deadline_seconds
        while time.monotonic() < deadline:
            if (
                not self._connections
                and time.monotonic() - self._last_request > time_limits.QUIET_PERIOD_SECONDS
            ):
                break
            await asyncio.sleep(time_limits.OPEN_REQUESTS_POLL_SECONDS)
        if reading is not None:
            await reading
        # Last: until here a surviving worker may still be sending its document.
        folder = self._folder
        await asyncio.to_thread(
            kill_orphan_processes,
            folder.path,
            self._settings.left_seconds,
            folder.sessions,
        )


async def _wait_for_agent_end(pid: int) -> None:
    """Return when the parent process `pid` has ended; at once if it already has.

    Uses pidfd_open(2), and polls ten times a second where that is missing or forbidden.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        while os.getppid() == pid:  # noqa: ASYNC110 - no event exists to wait for
            await asyncio.sleep(time_limits.AGENT_POLL_SECONDS)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        # checked after opening: if `pid` is still our parent, the number wasn't reused for another
        # process
        if os.getppid() == pid:
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _read_on(stderr: list[int]) -> None:
    """Let a separate process read the stderr of orphans,
    which would get SIGPIPE without a reader.
    """
    try:
        relay_late_stderr(dict.fromkeys(stderr, True))
    except (OSError, subprocess.SubprocessError) as error:
        log_line(f"the stderr of processes that outlive the agent is lost: {error}")
