"""A dump of torch's flight recorder as data: how far a rank came in the collectives of each of its process groups.

The numbers in ``pg_status`` and ``pg_id`` count the groups of one rank in the order of their creation: two ranks may
give one number to different groups. A group is known by its name, by which ``pg_config`` lists its members.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any

from firstfault.model import Collective, CollectiveProgress
from firstfault.model.failure import DEFAULT_GROUP, name_of_group

_LAST = 8
"""Collectives of one group that are kept; the first one that has not completed is kept as well."""
_MAX_SHAPE = 200
"""Characters of a collective's sizes: an all_gather lists one for each rank."""
_MAX_NAMES = 64
_COMPLETED = "completed"


def progress_in(dumps: Iterable[Mapping[str, Any]]) -> tuple[CollectiveProgress, ...]:
    """Return how far one rank came in each group, by the group's name, from the dumps of all its recorders."""
    seen: list[Any] = []
    found: dict[str, CollectiveProgress] = {}
    for dump in dumps:
        if dump.get("entries") in seen:
            continue  # a torch whose two functions dump the same recorder
        seen.append(dump.get("entries"))
        for progress in _groups(dump):
            # one process group may have a backend for each device
            name, backend = progress.group, progress.last_operation.partition(":")[0] or "other backend"
            name = f"{name}, {backend}" if name in found else name
            found[name or f" {len(found)}"] = replace(progress, group=name)
    return tuple(found[name] for name in sorted(found))


def _groups(dump: Mapping[str, Any]) -> list[CollectiveProgress]:
    config, states = _mapping(dump.get("pg_config")), _mapping(dump.get("pg_status"))
    # a rank's first group is that of all ranks
    named: dict[str, str] = {} if config else {"0": "0"}
    config = config or {"0": {"desc": DEFAULT_GROUP}}
    entries: dict[str, list[Collective]] = defaultdict(list)
    retired: set[str] = set()
    for entry in dump.get("entries") or ():
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            number = str(entry["pg_id"])
            name, description = map(str, (*entry["process_group"], "")[:2])
            config.setdefault(name, {"desc": description})
            named[number] = name
            entries[number].append(_collective(entry))
            retired.update([number] if entry.get("retired") else ())
    used = [number for number, state in states.items() if _mapping(state).get("last_enqueued_collective") != -1]
    names = _paired(used, config, named) | _paired(states, config, named)
    found = []
    for number, state in sorted(states.items()):
        with suppress(KeyError, TypeError, ValueError):
            enqueued, completed = int(state["last_enqueued_collective"]), int(state["last_completed_collective"])
            called = [entry for entry in entries[number] if not entry.is_p2p]
            # the recorder that torch 2.15 hooks into other backends counts from 0
            behind = max(called[-1].sequence - enqueued, 0) if called else 0
            # and retires at once what a backend without completion hooks has called
            done = None if behind and completed < 0 and number in retired else max(completed + behind, 0)
            about = _mapping(config.get(names.get(number, "")))
            progress = CollectiveProgress(
                name_of_group(names.get(number, ""), str(about.get("desc") or "")),
                called[-1].operation if called else "",
                enqueued + behind,
                done,
                _kept(entries[number], done),
                _ranks(str(about.get("ranks"))),
            )
            found += [progress] if enqueued + behind > 0 else []
    return found


def _kept(entries: Sequence[Collective], completed: int | None) -> tuple[Collective, ...]:
    """Return the last collectives, and the first one that has not completed."""
    last = tuple(entries[-_LAST:])
    rest = entries[: -len(last)] if last and completed is not None else ()
    stuck = (entry for entry in rest if entry.state != _COMPLETED and entry.sequence > (completed or 0))
    return (*islice(stuck, 1), *last)


def _mapping(value: Any) -> dict[str, Any]:
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


# --- names and members of groups ------------------------------------------------------------------------------------


def _paired(numbers: Iterable[str], names: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Return the names of a rank's groups by the rank's own numbers of them, as far as they can be told.

    Both increase in the order in which the groups were created. Between two groups that entries name, as many numbers
    as names belong together. A number is a place in the list of names if that has every group, also those not in use.
    """
    named = sorted(filter(str.isdecimal, names), key=int)
    place = {name: index for index, name in enumerate(named)}
    order = sorted(filter(str.isdecimal, numbers), key=int)
    cuts = [(index, place[known[at]]) for index, at in enumerate(order) if known.get(at) in place]
    found = dict(known)
    for (number, name), (next_number, next_name) in pairwise([(-1, -1), *cuts, (len(order), len(named))]):
        if next_number - number == next_name - name:
            found.update(zip(order[number + 1 : next_number], named[name + 1 : next_name], strict=True))
    places = {number: named[int(number)] for number in order if int(number) < len(named)}
    has_all = len(order) < len(named) and all(places.get(number, "") in {"", name} for number, name in found.items())
    return places | found if has_all else found


@lru_cache(maxsize=4096)  # in a large job, thousands of ranks list the same thousands of members
def _ranks(text: str) -> tuple[int, ...]:
    """Return the global ranks that torch wrote as text."""
    try:
        return tuple(int(rank) for rank in json.loads(text))
    except (TypeError, ValueError, RecursionError):
        return ()


# --- entries --------------------------------------------------------------------------------------------------------


def _collective(entry: Mapping[str, Any]) -> Collective:
    is_p2p = bool(entry.get("is_p2p"))
    return Collective(
        sequence=int(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id") or 0),
        operation=str(entry["profiling_name"]),
        sizes=_both(_shapes(entry.get("input_sizes")), _shapes(entry.get("output_sizes"))),
        dtypes=_both(_joined(entry.get("input_dtypes")), _joined(entry.get("output_dtypes"))),
        state=str(entry.get("state") or ""),
        is_p2p=is_p2p,
    )


def _both(inputs: str, outputs: str) -> str:
    return f"{inputs} -> {outputs}"[:_MAX_SHAPE] if {inputs, outputs} - {"", "[]"} else ""


def _shapes(sizes: Any) -> str:
    """Return sizes as text. Each level is cut: a damaged dump may nest them without end."""
    rows = sizes[:_MAX_NAMES] if isinstance(sizes, list) else []
    shown = (", ".join(str(int(number)) for number in row[:_MAX_NAMES]) for row in rows)
    return f"[{', '.join(f'[{row}]' for row in shown)}]" if sizes is not None else ""


def _joined(names: Any) -> str:
    return ", ".join(map(str, names[:_MAX_NAMES])) if isinstance(names, list) else ""
