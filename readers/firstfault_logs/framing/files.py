"""Find the logs among the files of a job, and who wrote each, by its name and its content."""

from __future__ import annotations

import lzma
import re
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeAlias

from firstfault.errors import BadDocumentError, FirstFaultError
from firstfault_logs.framing.labels import Label
from firstfault_logs.framing.lines import files_below, open_log
from firstfault_logs.framing.outputs import are_outputs_of_one_job
from firstfault_logs.framing.separate_jobs import ask_for_one
from firstfault_logs.vocabulary import PATTERNS

Log: TypeAlias = "tuple[Path, str, Label]"
"""A log, its name in references, and who wrote it."""
_BEGIN_CHARS = 200
"""Characters that show what a text is, if it isn't a log."""
_KERNEL_BYTES = 16 * 1024
"""At the begin of a file that may be a kernel's log."""
_KERNEL_SHARE = 0.9
"""Of the lines that have a kernel's prefix."""


def find_logs(paths: Sequence[Path], dumps: Collection[Path]) -> list[Log]:
    """Return files, and those in folders that may be logs.

    The label of each is the rank in its name, its name if that is a node's, the only number in
    which the names differ, or its name. The outputs of one job have none, and a kernel's log, which
    its content shows, has the node in its name.
    """
    names = {path: path.name for path in paths if path.is_file() and path not in dumps}
    for folder in filter(Path.is_dir, paths):
        found = (path for path in files_below(folder) if path not in dumps and _may_be_log(path))
        names |= {path: str(path.relative_to(folder)) for path in found}
    jobs = {
        match["job"]: path.name
        for path in names
        if (match := PATTERNS["job_in_name"].search(path.name))
    }
    if len(jobs) > 1:
        raise BadDocumentError(ask_for_one(sorted(jobs.values())))
    system = {
        path: Label(node=node)
        for path in names
        if (node := _find_node_of_system_log(path)) is not None
    }
    logs = [(path, names.pop(path), label) for path, label in system.items()]
    numbers = [re.findall(r"\d+", name) for name in names.values()]
    columns = list(zip(*numbers, strict=True)) if len({*map(len, numbers)}) == 1 else []
    differ = [at for at, column in enumerate(columns) if len(set(column)) > 1]
    labels = sorted(int(number) for number in columns[differ[0]]) if len(differ) == 1 else []
    # of "master-0", "worker-0" and "worker-1" the number isn't the only difference
    is_numbered = bool(labels) and labels == list(range(len(labels)))
    is_of_several = not _are_of_one_job([*names.values()])
    for (path, name), own in zip(names.items(), numbers, strict=True):
        stem = PATTERNS["log_suffix"].sub("", name)
        label = Label(node=stem if is_of_several else "")
        if len(names) > 1 and (ranked := PATTERNS["rank_word"].search(name)):
            label = Label(rank=int(ranked[1]))
        elif is_of_several and (of_node := PATTERNS["node_file"].fullmatch(stem)):
            label = Label(node=stem, node_index=int(of_node["index"]))
        elif is_numbered:
            has_name = any(map(str.isalpha, stem))
            label = Label(node=stem if has_name else "", task=int(own[differ[0]]))
        logs.append((path, name, label))
    return logs


def _may_be_log(path: Path) -> bool:
    """Whether a file in a folder may be a log: neither its name nor its begin is that of
    documentation or code.
    """
    if not PATTERNS["log_name"].search(path.name) or PATTERNS["no_log_name"].search(path.name):
        return False
    try:
        with open_log(path) as stream:
            begin = stream.read(_BEGIN_CHARS)
    except (FirstFaultError, OSError, EOFError, zlib.error, lzma.LZMAError):
        return True  # whoever reads it, says why it can't be read
    return PATTERNS["no_log_begin"].match(begin.decode("utf-8", "replace")) is None


def _are_of_one_job(names: Sequence[str]) -> bool:
    """Whether files are one log, or the standard output and the standard error of one job."""
    first = names[0] if names else ""
    return all(name == first or are_outputs_of_one_job(first, name) for name in names)


def _find_node_of_system_log(path: Path) -> str | None:
    """Return the node in the name of a log that isn't a job's; empty: none; None: it's a job's."""
    if found := PATTERNS["system_log"].match(path.stem):
        return found["node"]
    if not _is_of_kernel(path):
        return None
    parts = PATTERNS["kernel_in_name"].split(path.stem, 1)
    names = [] if len(parts) == 1 else [part.strip("-_.") for part in reversed(parts)]
    return next((name for name in names if any(map(str.isalpha, name))), "")


def _is_of_kernel(path: Path) -> bool:
    """Whether most of the first lines of a file have a prefix of dmesg or syslog,
    and some of them words of the kernel.
    """
    try:
        with open_log(path) as stream:
            begin = stream.read(_KERNEL_BYTES)
    except (FirstFaultError, OSError, EOFError, zlib.error, lzma.LZMAError):
        return False
    lines = [line for line in begin.decode("utf-8", "replace").splitlines() if line.strip()]
    stamped = [line for line in lines if PATTERNS["kernel_line"].match(line)]
    is_stamped = len(stamped) > _KERNEL_SHARE * len(lines)
    return is_stamped and any(map(PATTERNS["kernel_words"].search, stamped))
