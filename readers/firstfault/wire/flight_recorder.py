"""Parses dumps of torch's flight recorder:
a rank's collective counters in each of its process groups.

The numbers in ``pg_status`` and ``pg_id`` count one rank's groups in order of creation, so two
ranks may number different groups alike. A group's identity is its name; ``pg_config`` lists its
members under that name.
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
from firstfault.model.failure import DEFAULT_GROUP, format_group_name

MAX_COLLECTIVES_KEPT = 8
"""Latest collectives kept per group, in addition to the first incomplete one."""
MAX_SIZES_CHARACTERS = 200
"""Limit for a collective's sizes: an all_gather lists one per rank."""
MAX_LIST_ITEMS = 64
COMPLETED_STATE = "completed"


def parse_flight_recorder(dumps: Iterable[Mapping[str, Any]]) -> tuple[CollectiveProgress, ...]:
    """Return one rank's progress in each group, sorted by group,
    from the dumps of all its recorders.
    """
    seen_entries: list[Any] = []
    progress_by_group: dict[str, CollectiveProgress] = {}
    for dump in dumps:
        if dump.get("entries") in seen_entries:
            # some versions of torch dump the same recorder through both of their functions
            continue
        seen_entries.append(dump.get("entries"))
        for progress in _read_groups(dump):
            # one process group may have a backend per device
            name = progress.group
            backend = progress.last_operation.partition(":")[0] or "other backend"
            name = f"{name}, {backend}" if name in progress_by_group else name
            progress_by_group[name or f" {len(progress_by_group)}"] = replace(progress, group=name)
    return tuple(progress_by_group[name] for name in sorted(progress_by_group))


def _read_groups(dump: Mapping[str, Any]) -> list[CollectiveProgress]:
    config = _to_mapping(dump.get("pg_config"))
    states = _to_mapping(dump.get("pg_status"))
    # a rank's first group contains all ranks
    name_by_number: dict[str, str] = {} if config else {"0": "0"}
    config = config or {"0": {"desc": DEFAULT_GROUP}}
    entries: dict[str, list[Collective]] = defaultdict(list)
    retired: set[str] = set()
    for entry in dump.get("entries") or ():
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            number = str(entry["pg_id"])
            name, description = map(str, (*entry["process_group"], "")[:2])
            config.setdefault(name, {"desc": description})
            name_by_number[number] = name
            entries[number].append(_to_collective(entry))
            retired.update([number] if entry.get("retired") else ())
    used = [
        number
        for number, state in states.items()
        if _to_mapping(state).get("last_enqueued_collective") != -1
    ]
    names = _match_group_names(used, config, name_by_number) | _match_group_names(
        states, config, name_by_number
    )
    groups = []
    for number, state in sorted(states.items()):
        with suppress(KeyError, TypeError, ValueError):
            enqueued = int(state["last_enqueued_collective"])
            completed = int(state["last_completed_collective"])
            collectives = [entry for entry in entries[number] if not entry.is_p2p]
            # torch 2.15 hooks its recorder into backends other than NCCL; that one counts from 0
            # ...
            uncounted = max(collectives[-1].sequence - enqueued, 0) if collectives else 0
            # ... and retires a collective immediately if the backend has no completion hooks
            has_no_hooks = uncounted and completed < 0 and number in retired
            completed_count = None if has_no_hooks else max(completed + uncounted, 0)
            group_config = _to_mapping(config.get(names.get(number, "")))
            progress = CollectiveProgress(
                format_group_name(names.get(number, ""), str(group_config.get("desc") or "")),
                collectives[-1].operation if collectives else "",
                enqueued + uncounted,
                completed_count,
                _keep_recent(entries[number], completed_count),
                _parse_ranks(str(group_config.get("ranks"))),
            )
            groups += [progress] if enqueued + uncounted > 0 else []
    return groups


def _keep_recent(entries: Sequence[Collective], completed: int | None) -> tuple[Collective, ...]:
    """Return the latest collectives and the first incomplete one."""
    last = tuple(entries[-MAX_COLLECTIVES_KEPT:])
    rest = entries[: -len(last)] if last and completed is not None else ()
    incomplete = (
        entry
        for entry in rest
        if entry.state != COMPLETED_STATE and entry.sequence > (completed or 0)
    )
    return (*islice(incomplete, 1), *last)


def _to_mapping(value: Any) -> dict[str, Any]:
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


# --- names and members of groups ------------------------------------------------------------------


def _match_group_names(
    numbers: Iterable[str], names: Iterable[str], known: Mapping[str, str]
) -> dict[str, str]:
    """Return the names of a rank's groups by the rank's own group numbers,
    for the groups that can be matched.
    """
    # Numbers and names both increase in the order of creation. `known` pairs, from entries, are
    # anchors: between two of them, equally many numbers and names match one to one. If the names
    # include groups that the rank doesn't use, a number is an index into the sorted names.
    sorted_names = sorted(filter(str.isdecimal, names), key=int)
    index_by_name = {name: index for index, name in enumerate(sorted_names)}
    order = sorted(filter(str.isdecimal, numbers), key=int)
    anchors = [
        (index, index_by_name[known[at]])
        for index, at in enumerate(order)
        if known.get(at) in index_by_name
    ]
    names_by_number = dict(known)
    for (number, name), (next_number, next_name) in pairwise(
        [(-1, -1), *anchors, (len(order), len(sorted_names))]
    ):
        if next_number - number == next_name - name:
            names_by_number.update(
                zip(
                    order[number + 1 : next_number], sorted_names[name + 1 : next_name], strict=True
                )
            )
    by_index = {
        number: sorted_names[int(number)] for number in order if int(number) < len(sorted_names)
    }
    agrees = all(by_index.get(number, "") in {"", name} for number, name in names_by_number.items())
    return (
        by_index | names_by_number if len(order) < len(sorted_names) and agrees else names_by_number
    )


@lru_cache(maxsize=4096)  # in a large job, thousands of ranks list the same thousands of members
def _parse_ranks(text: str) -> tuple[int, ...]:
    """Parse the JSON list of global ranks; empty if it is something else."""
    try:
        return tuple(int(rank) for rank in json.loads(text))
    except (TypeError, ValueError, RecursionError):
        return ()


# --- entries --------------------------------------------------------------------------------------


def _to_collective(entry: Mapping[str, Any]) -> Collective:
    is_p2p = bool(entry.get("is_p2p"))
    return Collective(
        sequence=int(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id") or 0),
        operation=str(entry["profiling_name"]),
        sizes=_format_arrow(
            _format_sizes(entry.get("input_sizes")), _format_sizes(entry.get("output_sizes"))
        ),
        dtypes=_format_arrow(
            _join_names(entry.get("input_dtypes")), _join_names(entry.get("output_dtypes"))
        ),
        state=str(entry.get("state") or ""),
        is_p2p=is_p2p,
    )


def _format_arrow(inputs: str, outputs: str) -> str:
    return f"{inputs} -> {outputs}"[:MAX_SIZES_CHARACTERS] if {inputs, outputs} - {"", "[]"} else ""


def _format_sizes(sizes: Any) -> str:
    """Format sizes, each level cut to `MAX_LIST_ITEMS`: a damaged dump may contain anything."""
    rows = sizes[:MAX_LIST_ITEMS] if isinstance(sizes, list) else []
    shown = (", ".join(str(int(number)) for number in row[:MAX_LIST_ITEMS]) for row in rows)
    return f"[{', '.join(f'[{row}]' for row in shown)}]" if sizes is not None else ""


def _join_names(names: Any) -> str:
    return ", ".join(map(str, names[:MAX_LIST_ITEMS])) if isinstance(names, list) else ""
