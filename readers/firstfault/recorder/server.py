"""The recorder itself: listens, uploads, watches memory and its agent, and cleans up behind both."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstfault.layout.paths import ROSTER
from firstfault.recorder.last_words import LastWords, speak_for_agent
from firstfault.recorder.memory import MemoryWatch
from firstfault.recorder.spool import Spool
from firstfault.recorder.uploads import Uploads, say
from firstfault.recorder.watch import agent_gone

if TYPE_CHECKING:
    from firstfault.recorder.folder import NodeFolder, Settings

__all__ = ["serve"]

_SAMPLE_S = 0.5
"""Between two looks at the memory, and at whether the folder is still there, seconds."""
_IDLE_S = 30.0
"""How long after its start the recorder loads what it needs for an agent's death, seconds: not while a job starts, and
not at all for one that is over by then. An agent that dies earlier is spoken for a third of a second later."""
_END_S = 2.0
"""The longest wait for uploads in hand when the job ends, seconds."""
_END_SHARE = 0.8
"""Of the time that whoever ends the recorder allows: the rest is for the answer and for going."""
_LAST_CALL_S = 0.3
"""How long nobody must have asked before the recorder of a dead agent goes, seconds: its workers may be dying too."""
_TICK_S = 0.02


def serve(folder: NodeFolder) -> None:
    """Record until the agent ends, then leave neither folder nor process. Does not return.

    Raises:
        OSError: there are no settings in `folder`.
    """
    settings = folder.read_settings()
    if not os.environ.get("FIRSTFAULT_DEBUG"):
        logging.getLogger("stamina").setLevel(logging.ERROR)  # a loss is told, a second try is not
    asyncio.run(_live(folder, settings))


async def _live(folder: NodeFolder, settings: Settings) -> None:
    try:
        await _Server(folder, settings).live()
    except Exception as error:  # noqa: BLE001 - whatever it is, the clean-up must come
        say(f"ended by {type(error).__name__}: {error}")
    folder.remove()
    # from inside of the loop, whose end would wait for threads that wait for a storage
    os._exit(0)


class _Server:
    """One recorder's life."""

    def __init__(self, folder: NodeFolder, settings: Settings) -> None:
        self._folder = folder
        self._settings = settings
        self._memory = MemoryWatch()
        self._uploads = Uploads(settings.output_prefix)
        self._over = asyncio.Event()
        self._connections = 0
        self._last_request = time.monotonic()

    async def live(self) -> None:
        """Serve until the agent says that it is over, or has died, or the folder is gone."""
        listener = socket.socket(fileno=self._settings.listener)
        await asyncio.start_unix_server(self._serve, sock=listener, backlog=socket.SOMAXCONN)
        agent = asyncio.create_task(agent_gone(self._settings.agent_pid))
        ends = (agent, asyncio.create_task(self._over.wait()), asyncio.create_task(self._look_around()))
        warming = asyncio.create_task(self._warm())  # noqa: F841, RUF006 - kept, so that it is not collected
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._over.is_set():
            return
        if agent.done():
            await self._outlive_agent()
        else:
            await self._uploads.drain(_END_S)

    async def _warm(self) -> None:
        await self._uploads.warm()
        await asyncio.sleep(_IDLE_S)
        while self._uploads.in_hand:  # noqa: ASYNC110 - nothing waits for this
            await asyncio.sleep(_SAMPLE_S)
        await asyncio.to_thread(_load_wire)

    async def _look_around(self) -> None:
        """Watch the memory; return when the folder is gone."""
        while os.path.isdir(self._folder.path):  # noqa: PTH112, ASYNC240 - twice a second, for days; a local file
            self._memory.sample()
            await asyncio.sleep(_SAMPLE_S)

    async def _outlive_agent(self) -> None:
        words = LastWords(self._folder, self._uploads, self._settings.deadline_seconds)
        try:
            await speak_for_agent(words, self._memory)
        except Exception as error:  # noqa: BLE001 - nobody else is left to tell; the clean-up must come
            say(f"the death of the agent was not recorded: {type(error).__name__}: {error}")
        deadline = time.monotonic() + self._settings.deadline_seconds
        while time.monotonic() < deadline and not self._quiet():  # noqa: ASYNC110 - quiet is what nobody tells
            await asyncio.sleep(_TICK_S)

    def _quiet(self) -> bool:
        return not self._connections and time.monotonic() - self._last_request > _LAST_CALL_S

    # --- requests -----------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request; one that makes no sense gets no answer."""
        self._connections += 1
        self._last_request = time.monotonic()
        request: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            request = dict(json.loads(await reader.readline()))
            answer = await self._answer(request)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()
        self._connections -= 1
        if request.get("op") == "end":
            self._over.set()

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "put":
            return await self._put(request)
        if request["op"] == "end":
            await self._uploads.drain(min(_END_S, _END_SHARE * request["seconds"]))
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
        receipt = await self._uploads.put_file(
            request["path"],
            file,
            Spool(file.parent) if spooled else None,
            fault_monotonic_ns=request["fault_monotonic_ns"],
            rank=request["rank"],
        )
        return {
            "durable": receipt.durable,
            "fault_to_durable_ns": receipt.fault_to_durable_ns,
            "error": receipt.error,
        }


def _load_wire() -> None:
    import firstfault.wire.documents  # noqa: F401, PLC0415 - so that it is there when the agent dies
