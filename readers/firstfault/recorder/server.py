"""The recorder's process: answers requests, uploads, samples the memory, and reports the agent's death."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstfault.layout import ROSTER
from firstfault.recorder.agent_death import DeadAgent, agent_gone, report_agent_death
from firstfault.recorder.budgets import DRAIN_S, IDLE_S, QUIET_S, SAMPLE_S, TICK_S
from firstfault.recorder.client import RECEIVED, Target
from firstfault.recorder.late_stderr import pass_on_late
from firstfault.recorder.memory import MemoryWatch
from firstfault.recorder.spool import Spool
from firstfault.recorder.uploads import Uploads, log_line
from firstfault.sync import attempted
from firstfault.untrusted_json import parse_json

if TYPE_CHECKING:
    from firstfault.recorder.folder import NodeFolder, Settings

_END_SHARE = 0.8
"""Share of a client's timeout for uploads in progress; the rest is for the answer and the exit."""


def serve(folder: NodeFolder) -> None:
    """Serve until the agent ends, then remove the folder and exit. Does not return.

    Raises:
        OSError: `folder` has no settings.
    """
    settings = folder.read_settings()
    if not os.environ.get("FIRSTFAULT_DEBUG"):
        logging.getLogger("stamina").setLevel(logging.ERROR)  # the recorder logs lost documents, not retries
    asyncio.run(_live(folder, settings))


async def _live(folder: NodeFolder, settings: Settings) -> None:
    _, error = await attempted(_Server(folder, settings).live())
    if error:
        log_line(f"ended by {error}")
    folder.remove()
    # inside the loop, whose end would wait for threads that wait for the storage
    os._exit(0)


class _Server:
    """The recorder of one node."""

    def __init__(self, folder: NodeFolder, settings: Settings) -> None:
        self._folder = folder
        self._settings = settings
        self._memory = MemoryWatch()
        self._uploads = Uploads(settings.output_prefix)
        self._ended = asyncio.Event()
        self._connections = 0
        self._last_request = time.monotonic()

    async def live(self) -> None:
        """Serve until the agent sends "end" or dies, or the folder is gone."""
        listener = socket.socket(fileno=self._settings.listener)
        await asyncio.start_unix_server(self._serve, sock=listener, backlog=socket.SOMAXCONN)
        agent = asyncio.create_task(agent_gone(self._settings.agent_pid))
        ends = (agent, asyncio.create_task(self._ended.wait()), asyncio.create_task(self._watch_memory_and_folder()))
        preparing = asyncio.create_task(self._prepare())  # noqa: F841, RUF006 - a reference, so that it is not garbage-collected
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._ended.is_set():
            return
        if agent.done():
            await self._outlive_agent()
        else:
            await self._uploads.drain(DRAIN_S)

    async def _prepare(self) -> None:
        await self._uploads.warm()
        await asyncio.sleep(IDLE_S)
        while self._uploads.in_progress:  # noqa: ASYNC110 - not urgent
            await asyncio.sleep(SAMPLE_S)
        await asyncio.to_thread(_load_wire)

    async def _watch_memory_and_folder(self) -> None:
        """Sample the memory; return when the folder is gone."""
        while os.path.isdir(self._folder.path):  # noqa: PTH112, ASYNC240 - often, and cheap on a local file
            self._memory.sample()
            await asyncio.sleep(SAMPLE_S)

    async def _outlive_agent(self) -> None:
        stderr = self._folder.open_stderr()
        reading = asyncio.create_task(asyncio.to_thread(_read_on, stderr)) if stderr else None
        agent = DeadAgent(self._folder, self._uploads, self._settings.deadline_seconds)
        _, error = await attempted(report_agent_death(agent, self._memory))
        if error:
            log_line(f"the agent's death was not recorded: {error}")
        deadline = time.monotonic() + self._settings.deadline_seconds
        while time.monotonic() < deadline and not self._quiet():  # noqa: ASYNC110 - no event marks the absence of requests
            await asyncio.sleep(TICK_S)
        if reading is not None:
            await reading

    def _quiet(self) -> bool:
        return not self._connections and time.monotonic() - self._last_request > QUIET_S

    # --- requests -----------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request in two lines, at once and with the result; close the connection if it is invalid."""
        self._connections += 1
        self._last_request = time.monotonic()
        request: dict[str, Any] = {}
        try:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                request = dict(parse_json(await reader.readline()))
                writer.write(RECEIVED)  # a client that has gone still wants its upload
                answer = await self._answer(request)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        finally:
            # after any error: a dead agent's recorder waits for the connections that are left
            writer.close()
            self._connections -= 1
        if request.get("op") == "end":
            self._ended.set()

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "put":
            return await self._put(request)
        if request["op"] == "end":
            await self._uploads.drain(min(DRAIN_S, _END_SHARE * request["seconds"]))
            return {}
        if request["op"] == "resources":
            return self._memory.report()
        if request["op"] == "roster":
            names, error = await self._uploads.names(ROSTER)
            return {"names": names, "error": error}
        raise ValueError(request["op"])

    async def _put(self, request: dict[str, Any]) -> dict[str, Any]:
        file = Path(request["file"])
        spooled = file.is_relative_to(self._folder.path)
        target, spool = Target(**request["target"]), Spool(file.parent) if spooled else None
        return asdict(await self._uploads.put_file(target, file, spool))


def _read_on(stderr: list[int]) -> None:
    """Let another process read what processes that outlive the agent write; SIGPIPE would end them."""
    try:
        pass_on_late(dict.fromkeys(stderr, True))
    except (OSError, subprocess.SubprocessError) as error:
        log_line(f"the stderr of processes that outlive the agent is lost: {error}")


def _load_wire() -> None:
    import firstfault.wire.documents  # noqa: F401, PLC0415 - import it before the agent dies
