"""Find the logs among the files of a job, who wrote each, by its name and its content, and which of
them are of one job.
"""

from __future__ import annotations

import lzma
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from firstfault.errors import BadDocumentError, FirstFaultError
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.framing.labels import LOG_SUFFIX, RANK_WORD, Label
from firstfault_logs.framing.lines import files_below, open_log

Log: TypeAlias = "tuple[Path, str, Label]"
"""A log, its name in references, and who wrote it."""
_BEGIN_CHARS = 200
"""Characters that show what a text is, if it isn't a log."""
_KERNEL_BYTES = 16 * 1024
"""At the begin of a file that may be a kernel's log."""
_KERNEL_SHARE = 0.9
"""Share of the lines with a kernel's prefix."""


# Begins the name of a log with the number of a job.
_JOB_IN_NAME = LazyPattern(r"^(?:slurm|job|jobid)[-_.](?P<job>\d{3,})")

# Names of logs that aren't a job's, with the node.
_SYSTEM_LOG = LazyPattern(
    r"(?i)^(?:dmesg|kern(?:el)?|k8s|events?|journal|syslog|messages|nvidia-smi)[-_.]?(?P<node>.*)$"
)

# The name of a log of one node, without its suffix.
_NODE_FILE = LazyPattern(r"(?i)(?:.*[^a-z])?(?:node|host|machine)[-_.]?(?P<index>\d{1,5})")


def find_logs(paths: Sequence[Path], dumps: Collection[Path]) -> list[Log]:
    """Return files, and those in folders that may be logs.

    The label of each is the rank in its name, its name if that is a node's, the only number in
    which the names differ, or its name. The outputs of one job have none, and a kernel's log, which
    its content shows, has the node in its name.
    """
    names = {path: path.name for path in paths if path.is_file() and path not in dumps}
    for folder in filter(Path.is_dir, paths):
        log_files = (
            path for path in files_below(folder) if path not in dumps and _may_be_log(path)
        )
        names |= {path: str(path.relative_to(folder)) for path in log_files}
    jobs = {match["job"]: path.name for path in names if (match := _JOB_IN_NAME.search(path.name))}
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
    first_name = next(iter(names.values()), "")
    is_of_several = not all(
        name == first_name or are_outputs_of_one_job(first_name, name) for name in names.values()
    )
    for (path, name), own in zip(names.items(), numbers, strict=True):
        stem = LOG_SUFFIX.sub("", name)
        label = Label(node=stem if is_of_several else "")
        if len(names) > 1 and (ranked := RANK_WORD.search(name)):
            label = Label(rank=int(ranked[1]))
        elif is_of_several and (of_node := _NODE_FILE.fullmatch(stem)):
            label = Label(node=stem, node_index=int(of_node["index"]))
        elif is_numbered:
            has_name = any(map(str.isalpha, stem))
            label = Label(node=stem if has_name else "", task=int(own[differ[0]]))
        logs.append((path, name, label))
    return logs


# Names of files in a folder that may be logs.
_LOG_NAME = LazyPattern(r"""(?i)
  \.(?:log|out|err|txt|stderr|stdout|jsonl?|gz|bz2|xz|zst|[oe]\d+|\d+)$
| (?:log|stderr|stdout|slurm|nohup)[^/]*$
| ^(?:[^.]*(?:rank|worker|node|task|pod|proc)[^.]*|\d+)$
""")

# Ends the name of documentation, source code or a configuration, which may be about logs and
# errors.
_NO_LOG_NAME = LazyPattern(r"""(?i)
  [.](?:md|mdx|markdown|rst|adoc|tex|html?|xml|svg|css|ipynb|pyi?|pyx|c|cc|cpp|cu|cuh|h|hpp|go|rs|java|js|mjs|ts|tsx|jsx
    |rb|pl|pm|lua|sh|bash|zsh|ps1|bat|ya?ml|toml|ini|cfg|conf|config|defs|rules|service|sql|proto|cmake|diff|patch
    |schema[.]json)
  (?:[.](?:gz|bz2|xz|zst|orig|bak))?$
| ^(?:change|cata|dia|ana|pro)log
| ^(?:login|logo|logging|logic|logrotate|logind)(?![a-z])
""")

# Begins a page of a manual, a document of a markup language, or a script.
_NO_LOG_BEGIN = LazyPattern(r"""
  \s{0,9}(?:[.]\\"|'\\"|[.](?:TH|Dd|SH|so)[ ]|<[?]xml|<!DOCTYPE|<html|[#]!/)
""")


def _may_be_log(path: Path) -> bool:
    """Whether a file in a folder may be a log: neither its name nor its begin is that of
    documentation or code.
    """
    if not _LOG_NAME.search(path.name) or _NO_LOG_NAME.search(path.name):
        return False
    try:
        with open_log(path) as stream:
            begin = stream.read(_BEGIN_CHARS)
    except (FirstFaultError, OSError, EOFError, zlib.error, lzma.LZMAError):
        return True  # reading it reports why it can't be read
    return _NO_LOG_BEGIN.match(begin.decode("utf-8", "replace")) is None


# In the name of a kernel's log, beside the name of its node.
_KERNEL_IN_NAME = re.compile(
    r"(?i)(?:^|[-_.])(?:dmesg|kern(?:el)?|syslog|messages|journal\w*)(?=[-_.]|$)"
)

# A line of a kernel's log: of dmesg, with seconds since the start or a date, or behind syslog's
# prefix.
_KERNEL_LINE = LazyPattern(r"""
  (?:<\d{1,3}>)?\[[ ]{0,8}\d{1,9}\.\d{6}\][ ]
| \[\w{3}[ ]\w{3}[ ][ \d]\d[ ]\d\d:\d\d:\d\d[ ]\d{4}\][ ]
| (?:\w{3}[ ]+\d{1,2}[ ][\d:]{8}|\d{4}-\d\d-\d\dT[\d:]{8}\S*)[ ](?:[\w.-]{1,120}[ ])?kernel:[ ]
| \d{4}-\d\d-\d\dT[\d:]{8},\d{6}[+-]\d\d:\d\d[ ]
""")

# What only kernels print.
_KERNEL_WORDS = LazyPattern(r"""
  \bNVRM\b | \boom[-_] | Out[ ]of[ ]memory | Killed[ ]process | ^\S+[ ]+\S+[ ]kernel: | \bkernel:[ ]
| Linux[ ]version | Call[ ]Trace | \bblocked[ ]for[ ]more[ ]than | \bsegfault[ ]at | \bmlx5_core
| \bnvme\d | \bEXT4-fs | \bXFS[ ] | \bpcieport | \bpci[ ]0000: | \busb[ ]\d
| \baudit: | \bsystemd\[1\]: | \bmce: | \bEDAC | \bIPv6: | \bnvidia[ -]
""")


def _find_node_of_system_log(path: Path) -> str | None:
    """Return the node in the name of a system log, an empty string if the name has none, or None if
    the file is a log of a job.
    """
    if match := _SYSTEM_LOG.match(path.stem):
        return match["node"]
    if not _is_of_kernel(path):
        return None
    parts = _KERNEL_IN_NAME.split(path.stem, 1)
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
    stamped = [line for line in lines if _KERNEL_LINE.match(line)]
    is_stamped = len(stamped) > _KERNEL_SHARE * len(lines)
    return is_stamped and any(map(_KERNEL_WORDS.search, stamped))


# "job-77.out" and "job-77.err", "stdout.log" and "stderr.log", "train.o77" and "train.e77"
_OUTPUT_FILE = LazyPattern(
    r"""
            (?P<before>(?:[^\n]*(?:/|[-_.]))?)
            (?:std)?(?:out|err|o(?=\d)|e(?=\d))
            (?P<after>\d*(?:[-_.][^/\n]*)?)
        """
)


def are_outputs_of_one_job(file: str, other: str) -> bool:
    """Whether two files are the standard output and the standard error of one job,
    by their names.
    """
    names = [_OUTPUT_FILE.fullmatch(name) for name in (file, other)]
    if file == other or names[0] is None or names[1] is None:
        return False
    return all(names[0][part] == names[1][part] for part in ("before", "after"))


_MIN_GAP_NS = 600 * 1_000_000_000
"""Files of one job are written at the same time;
this much time without a line in any of them separates jobs.
"""
_MAX_LISTED_JOBS = 10


class TimeSpan(NamedTuple):
    """The times of the first and the last line of a file that have one,
    nanoseconds since the Unix epoch.
    """

    first_ns: int
    last_ns: int


def find_separate_jobs(spans: Mapping[str, TimeSpan]) -> list[list[str]]:
    """Return names of files that were written at the same time, the earliest first.

    Args:
        spans: of files with steps of a training. A file with errors alone may begin long after the
            rest of its job.
    """
    jobs: list[list[str]] = []
    end_ns = 0
    for name, span in sorted(spans.items(), key=lambda item: item[1]):
        if not jobs or span.first_ns - end_ns > _MIN_GAP_NS:
            jobs.append([])
        jobs[-1].append(name)
        end_ns = max(end_ns, span.last_ns)
    return jobs


def ask_for_one(names: Collection[str]) -> str:
    """Return an error message that lists a file of each job."""
    listed = ", ".join(list(names)[:_MAX_LISTED_JOBS])
    more = " ..." if len(names) > _MAX_LISTED_JOBS else ""
    return f"the logs are of at least {len(names)} jobs ({listed}{more}); give those of one"
