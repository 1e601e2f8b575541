"""Reads dumps of torch's flight recorder: ``_dump_<rank>``, ``nccl_trace_rank_<rank>``,
or with another prefix.

torch writes one file for each rank when a collective times out: a pickle of plain types, or JSON.
"""

from __future__ import annotations

import json
import pickle
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from firstfault.model import (
    CollectiveProgress,
    DocumentRef,
    Kind,
    Origin,
    Place,
    WorkerError,
    Writer,
)
from firstfault.model.failure import RECORDED_ONLY
from firstfault.reading.assemble import Unreadable
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault.utils.text import one_line, size
from firstfault.wire.flight_recorder import parse_flight_recorder
from firstfault_logs.framing.lines import files_below

if TYPE_CHECKING:
    from pathlib import Path

_KEYS = re.compile(
    rb"pg_config|pg_status|nccl_comm_state|(?=.*\bversion)(?=.*\bentries)", re.DOTALL
)
_PICKLE, _JSON = b"\x80", b"{"
_HEAD_BYTES = 4096
_MAX_BYTES = 128 << 20
_MAX_REASON_CHARACTERS = 200

# Ends the name of a flight recorder's dump.
_DUMP_NAME = LazyPattern(r"(?P<digits>\d{1,12})(?:\.(?:json|pkl|pickle|pt|bin))?$")


class _PlainUnpickler(pickle.Unpickler):
    """Builds lists, dictionaries, texts and numbers only:
    a class or function in a pickle could run anything.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"it asks for {module}.{name}, and a dump holds plain types only"
        )


# Torch's default name for its dumps.
_TORCH_DUMP_NAME = LazyPattern(r"^_?dump_\d+$|(?:nccl|comm_lib|fr|flight)\w*trace\w*?_?\d+$")


def is_dump(path: Path) -> bool:
    """Whether a file is a dump of a flight recorder, by its name and its first bytes."""
    if _DUMP_NAME.search(path.name) is None:
        return False
    try:
        if not path.is_file():
            return False  # a FIFO would wait for a writer
        with path.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
    except OSError:
        return False
    starts = head.startswith(_PICKLE) or head.lstrip().startswith(_JSON)
    return starts and (
        _KEYS.search(head) is not None or _TORCH_DUMP_NAME.search(path.name) is not None
    )


def dumps_at(path: Path) -> list[Path]:
    """Return the dumps below a folder at any depth,
    or the files with a common start of their names.
    """
    is_folder = path.is_dir()
    files = files_below(path) if is_folder else path.parent.glob("*")
    return sorted(
        file for file in files if (is_folder or file.name.startswith(path.name)) and is_dump(file)
    )


def documents_of(paths: Sequence[Path]) -> tuple[list[WorkerError], list[Unreadable]]:
    """Return how far each rank came, and the dumps that could not be read.

    If dumps have the same name, for example in several attempts, the newest counts. Recorders of
    other backends have other names.
    """
    dumps: dict[int, dict[str, tuple[float, Path, dict[str, Any]]]] = defaultdict(dict)
    unreadable = []
    for path in paths:
        try:
            dump = _read(path)
            copies = dumps[_rank(path, dump)]
            when = path.stat().st_mtime
        except (OSError, ValueError) as error:
            unreadable.append(
                Unreadable(
                    path.name,
                    f"no dump of a flight recorder: {one_line(str(error), _MAX_REASON_CHARACTERS)}",
                )
            )
            continue
        if path.name not in copies or copies[path.name][0] <= when:
            copies[path.name] = (when, path, dump)
    progress = {
        rank: parse_flight_recorder(copies[name][2] for name in sorted(copies, reverse=True))
        for rank, copies in dumps.items()
    }
    world = len({member for every in progress.values() for one in every for member in one.members})
    documents = [
        WorkerError(
            RECORDED_ONLY,
            _waits_in(progress[rank]),
            Kind.NON_RECOVERABLE,
            Origin.UNKNOWN,
            place=Place(rank=rank, world_size=world, engine="torchrun"),
            writer=Writer.WORKER,
            collectives=progress[rank],
            documents=tuple(DocumentRef(path.name, str(path)) for _, path, _ in copies.values()),
        )
        for rank, copies in sorted(dumps.items())
    ]
    return documents, unreadable


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a dump.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a dump, it is damaged, or it is too large.
    """
    length = path.stat().st_size
    if length > _MAX_BYTES:
        raise ValueError(f"{size(length)}, more than the limit of {size(_MAX_BYTES)}")
    with path.open("rb") as stream:
        is_json = stream.read(_HEAD_BYTES).lstrip().startswith(_JSON)
        stream.seek(0)
        try:
            dump = json.load(stream) if is_json else _PlainUnpickler(stream).load()
        # what a damaged pickle raises depends on the place of the damage
        except Exception as error:
            raise ValueError(f"damaged or cut off ({error or type(error).__name__})") from error
    if not isinstance(dump, dict) or not {"entries", "pg_status"} & dump.keys():
        raise ValueError("it has neither entries nor pg_status")
    return dump


def _rank(path: Path, dump: dict[str, Any]) -> int:
    """Return the rank at the end of a file's name:
    the longest number that is a member of all of the rank's groups.

    The text before the rank may end with a digit, too.
    """
    match = _DUMP_NAME.search(path.name)
    digits = match["digits"] if match is not None else ""
    members = [
        set(progress.members) for progress in parse_flight_recorder([dump]) if progress.members
    ]
    numbers = [
        digits[start:]
        for start in range(len(digits))
        if digits[start] != "0" or start == len(digits) - 1
    ]
    ranks = [int(number) for number in numbers if all(int(number) in group for group in members)]
    if not ranks:
        raise ValueError("its name does not end with the rank of a member of its groups")
    return ranks[0]


def _waits_in(progress: Sequence[CollectiveProgress]) -> str:
    """Return the collective or message in which a rank waited. It is a collective if possible, and
    of the smallest group.
    """
    waits = [
        (
            entry.is_p2p,
            len(item.members),
            f"{entry.operation} number {entry.sequence} of {item.group}",
        )
        for item in progress
        for entry in item.last
        if item.is_outstanding
        and entry.state != "completed"
        and entry.sequence > (item.completed or 0)
    ]
    is_waiting = any(item.is_outstanding for item in progress)
    report = min(waits, key=lambda wait: wait[:2])[2] if waits else "a collective"
    return f"waited in {report}" if is_waiting else "had no collective outstanding"
