"""The memory of the recorder's container, from its control group: limit, use,
peak and OOM kills.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from firstfault import model

_INACTIVE = re.compile(r"^((?:total_)?inactive_file) (\d+)$", re.MULTILINE)
"""Inactive page cache; version 1 also has the total of this group and those below."""
_NO_LIMIT_BYTES = 2**60
"""A larger limit means no limit: version 1 writes the largest number of whole pages for that."""


# file names of each version of control groups; each file has one number, "oom" has lines of a name
# and a number
_V1 = {
    "used": "memory.usage_in_bytes",
    "peak": "memory.max_usage_in_bytes",
    "limit": "memory.limit_in_bytes",
    "oom": "memory.oom_control",
}
_V2 = {
    "used": "memory.current",
    "peak": "memory.peak",
    "limit": "memory.max",
    "oom": "memory.events",
}


@dataclass(frozen=True, slots=True)
class _ContainerGroup:
    """The control group of this process."""

    folder: Path
    mount: Path
    files: dict[str, str]

    def limited(self) -> Path:
        """Return the folder of the nearest group upwards that has a limit;
        of this group if none has.
        """
        folder = self.folder
        while _read_number(folder / self.files["limit"]) is None:
            if folder == self.mount:
                return self.folder
            folder = folder.parent
        return folder


class MemoryWatch:
    """Watches the memory of the control group that this process is in,
    version 1 or 2. Never raises.

    Usage, peak and limit are those of the nearest group that has a limit; kills are those of this
    process's group. Usage includes page cache, which the kernel frees before it kills, so usage
    near the limit proves nothing. Tests set `root`, the folder of ``/proc`` and the mounts.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._group = _own_group(root)
        self._limited = self._group.limited() if self._group is not None else None
        self._kills_before = self._kills()
        self._used: int | None = None
        self._watermark: int | None = None
        self._watermark_ns: int | None = None
        self.sample()

    def sample(self) -> None:
        """Read the memory in use, and keep the highest value with its time."""
        used = self._number("used")
        self._used = used
        if used is not None and (self._watermark is None or used > self._watermark):
            self._watermark = used
            self._watermark_ns = time.time_ns()

    def find_shortage(self, share: float) -> tuple[int, int] | None:
        """Return the memory in use and the limit if this share of it is used,
        without inactive page cache.

        That is what Kubernetes calls the working set.
        """
        used = self._used
        limit = self._number("limit")
        if used is None or not limit or used < share * limit or self._limited is None:
            return None
        statistics = dict(_INACTIVE.findall(_read_text(self._limited / "memory.stat")))
        used -= int(statistics.get("total_inactive_file") or statistics.get("inactive_file") or 0)
        return (used, limit) if used >= share * limit else None

    def report(self) -> model.Resources:
        """Return the current figures; None for one that could not be read.

        ``oom_kill``: processes of this group that the kernel's OOM killer has killed since this
        watch began. ``memory_used_bytes``, ``memory_limit_bytes``: now; a limit of None means no
        limit. ``memory_peak_bytes``: the kernel's peak, else the highest sample. ``watermark_ns``:
        time of the highest sample, nanoseconds since the Unix epoch.
        """
        self.sample()
        kills = self._kills()
        peak = self._number("peak")
        return model.Resources(
            oom_kill=max(kills - (self._kills_before or 0), 0) if kills is not None else None,
            memory_used_bytes=self._used,
            memory_peak_bytes=peak if peak is not None else self._watermark,
            memory_limit_bytes=self._number("limit"),
            watermark_ns=self._watermark_ns,
        )

    def _number(self, which: str) -> int | None:
        if self._group is None or self._limited is None:
            return None
        return _read_number(self._limited / self._group.files[which])

    def _kills(self) -> int | None:
        if self._group is None:
            return None
        for line in _read_text(self._group.folder / self._group.files["oom"]).splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.isdigit():
                return int(number)
        return None


def _own_group(root: Path) -> _ContainerGroup | None:
    """Return this process's group: of version 1 if that has a memory controller,
    else of version 2.
    """
    groups = [line.split(":", 2)[1:] for line in _read_text(root / "proc/self/cgroup").splitlines()]
    paths = {name: group[1] for group in groups if len(group) > 1 for name in group[0].split(",")}
    path = paths.get("memory", paths.get(""))
    version_1 = "memory" in paths
    for mount_root, mount in _list_mounts(root, version_1=version_1):
        if path is not None:
            return _ContainerGroup(
                _find_group_folder(mount_root, mount, path), mount, _V1 if version_1 else _V2
            )
    return None


def _list_mounts(root: Path, *, version_1: bool) -> list[tuple[str, Path]]:
    """Return the root and the mount point of each mount of the hierarchy;
    see mountinfo in proc(5).
    """
    mounts = []
    for line in _read_text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        mount = left.split()
        kind = right.split()
        if kind[:1] == ["cgroup" if version_1 else "cgroup2"] and (
            not version_1 or "memory" in kind[-1].split(",")
        ):
            mounts.append((mount[3], root / mount[4].lstrip("/")))
    return mounts


def _find_group_folder(mount_root: str, mount: Path, path: str) -> Path:
    """Return the group's folder. In a container it is the mount point itself,
    also if `path` is a path of the host.
    """
    prefix = mount_root.rstrip("/")
    inside = path[len(prefix) :].strip("/") if f"{path}/".startswith(f"{prefix}/") else ""
    folder = mount / inside
    return folder if ".." not in folder.parts and folder.is_dir() else mount


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None if there is none, or if it means no limit."""
    text = _read_text(path).strip()
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT_BYTES else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
