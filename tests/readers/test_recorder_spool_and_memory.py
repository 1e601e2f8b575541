"""The recorder's spool, with whole documents and their receipts,
and the container's memory from control groups.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from firstfault.model import Receipt, Resources
from firstfault.recorder.container_memory import MemoryWatch
from firstfault.recorder.folder import NodeFolder
from firstfault.recorder.spool import Spool
from firstfault.recorder.termination_message import (
    WARNING,
    describe_memory,
    write_termination_message,
)


def test_the_spool_has_whole_documents_with_their_receipts(tmp_path: Path) -> None:
    """The spool has whole documents under their names,
    each with its receipt once that is written whole.
    """
    spool = Spool(tmp_path / "there")
    assert spool.documents() == []
    spool.add("b.pb", b"0")
    spool.add("b.pb", b"2")  # replaces it
    path = spool.add("a.pb", b"1")
    receipt = Receipt("a.pb", durable=True, fault_to_durable_ns=12, rank=3)
    spool.add_receipt(receipt)
    (tmp_path / "there" / "c.pb.part").write_bytes(b"3")
    first, second = spool.documents()
    assert (first.name, first.path, first.path.read_bytes(), first.receipt) == (
        "a.pb",
        path,
        b"1",
        receipt,
    )
    assert (second.name, second.path.read_bytes(), second.receipt) == ("b.pb", b"2", None)
    assert (first.is_durable, second.is_durable) == (True, False)
    for text in ("", '{"durable": tr', "{}", "[]", "null", "[" * 5_000):  # no spool writes these
        (tmp_path / "there" / "a.pb.receipt.json").write_text(text)
        assert spool.documents()[0].receipt is None, text[:80]


def test_a_late_failure_does_not_replace_a_durable_receipt(tmp_path: Path) -> None:
    """A receipt keeps the reason of a loss; a late failure of a first try does not
    make a loss of a success.
    """
    spool = Spool(tmp_path)
    spool.add("a.pb", b"1")
    lost = Receipt("a.pb", durable=False, error="slow")
    durable = Receipt("a.pb", durable=True, fault_to_durable_ns=12)
    for receipt, kept in ((lost, lost), (durable, durable), (lost, durable)):
        spool.add_receipt(receipt)
        (document,) = spool.documents()
        assert (document.receipt, document.is_durable) == (kept, kept.durable)


def test_a_withdrawn_document_is_marked_and_stays(tmp_path: Path) -> None:
    """A withdrawn document, which may come later, is marked, and stays."""
    spool = Spool(tmp_path / "there")
    spool.withdraw("a.pb")
    spool.add("a.pb", b"1")
    spool.add("b.pb", b"2")
    assert [(document.name, document.withdrawn) for document in spool.documents()] == [
        ("a.pb", True),
        ("b.pb", False),
    ]


_UNCOMPILED = """
from firstfault.recorder.agent_death import load_document_writer
load_document_writer()
from firstfault import credentials
from firstfault.utils.lazy_pattern import find_patterns
patterns = find_patterns(credentials) | credentials.shapes.PATTERNS
assert len(patterns) > 70, patterns
print([name for name, pattern in patterns.items() if not pattern.is_compiled])
"""


def test_a_recorder_compiles_every_credential_pattern_early() -> None:
    """What a recorder loads early includes each pattern of a credential:
    later the memory may be short.
    """
    program = [sys.executable, "-c", _UNCOMPILED]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "[]\n"


def test_each_process_has_a_spool_in_the_nodes_folder(tmp_path: Path) -> None:
    """Each process has a spool of its own in the node's folder;
    `last_words` is none of the `spools`.
    """
    (tmp_path / "spool").mkdir()
    folder = NodeFolder(tmp_path)
    assert folder.spools() == []
    folder.spool("agent").add("a.pb", b"1")
    folder.spool("0-1").add("b.pb", b"2")
    folder.last_words.add("document.pb", b"3")
    assert [[document.name for document in spool.documents()] for spool in folder.spools()] == [
        ["b.pb"],
        ["a.pb"],
    ]
    assert {folder.socket.parent, folder.spool("0-1").folder.parent.parent} == {tmp_path}


def test_a_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    """A document that is added during or after the removal does not recreate the node's folder."""
    folder = NodeFolder(tmp_path / "firstfault-x")
    (folder.path / "spool").mkdir(parents=True)
    over = threading.Event()

    def add() -> None:
        number = 0
        while not over.is_set():
            number += 1
            with contextlib.suppress(OSError):
                folder.spool("agent").add(f"{number}.pb", b"1")

    writers = [threading.Thread(target=add) for _ in range(4)]
    for writer in writers:
        writer.start()
    while not folder.spools():
        pass
    folder.remove()
    over.set()
    for writer in writers:
        writer.join()
    with pytest.raises(FileNotFoundError):
        folder.spool("agent").withdraw("late.pb")
    assert list(tmp_path.iterdir()) == []
    folder.remove()


_V1_NO_LIMIT = 9223372036854771712
_FIGURES = ("oom_kill", "memory_used_bytes", "memory_peak_bytes", "memory_limit_bytes")


class Tree:
    """A machine's /proc and control groups in a temporary folder."""

    def __init__(self, root: Path, cgroup: str, mountinfo: str) -> None:
        self.root = root
        self.write("proc/self", cgroup=cgroup, mountinfo=mountinfo)

    def write(self, folder: str, **files: object) -> None:
        """Write files; a dot in a name is written as two underscores."""
        target = self.root / folder
        target.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (target / name.replace("__", ".")).write_text(f"{content}\n")

    def watch(self) -> MemoryWatch:
        return MemoryWatch(self.root)


def machine(root: Path, version: int, path: str = "/", mount_root: str = "/") -> Tree:
    """Return a machine with version 2 only, or with version 1,
    and version 2 beside it without a memory controller.
    """
    if version == 2:
        mount = (
            f"31 23 0:28 {mount_root} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2"
            " rw,nsdelegate"
        )
        return Tree(root, f"0::{path}", f"22 1 0:21 / /proc rw - proc proc rw\n{mount}")
    mounts = (
        f"32 31 0:29 {mount_root} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        f"35 31 0:32 {mount_root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    )
    return Tree(root, f"9:cpu,cpuacct:/\n4:memory:{path}\n1:name=systemd:/init\n0::/", mounts)


MOUNTS = {1: "sys/fs/cgroup/memory", 2: "sys/fs/cgroup"}
FILES: dict[int, dict[str, object]] = {
    1: {
        "memory__usage_in_bytes": 700,
        "memory__max_usage_in_bytes": 900,
        "memory__limit_in_bytes": 1000,
        "memory__oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2",
    },
    2: {
        "memory__current": 700,
        "memory__peak": 900,
        "memory__max": 1000,
        "memory__events": "low 0\noom 3\noom_kill 2\noom_group_kill 0",
    },
}
"""The files of a group."""


@pytest.mark.parametrize(
    ("version", "path", "later"),
    [
        (2, "/", {"memory__current": 800, "memory__events": "oom 4\noom_kill 5\noom_group_kill 1"}),
        (
            1,
            "/pods/box",
            {"memory__usage_in_bytes": 800, "memory__oom_control": "under_oom 0\noom_kill 5"},
        ),
    ],
)
def test_both_versions_of_control_groups_have_the_same_figures(
    version: int, path: str, later: dict[str, object], tmp_path: Path
) -> None:
    """Both versions have the same figures, in other files; kills count from the watch's start."""
    tree = machine(tmp_path, version, path)
    folder = f"{MOUNTS[version]}{path}"
    tree.write(folder, **FILES[version])
    before_ns = time.time_ns()
    watch = tree.watch()
    tree.write(folder, **later)
    report = asdict(watch.report())
    assert before_ns <= (report.pop("watermark_ns") or 0) <= time.time_ns()
    assert report == dict(zip(_FIGURES, (3, 800, 900, 1000), strict=True))


@pytest.mark.parametrize(
    ("path", "mount_root", "folder"),
    [
        ("/", "/", ""),
        ("/kubepods/box", "/", "kubepods/box"),
        ("/docker/12ab", "/docker/12ab", ""),
        ("/docker/12ab/inner", "/docker/12ab", "inner"),
        ("/docker/12ab", "/docker/12", ""),
        ("/kubepods/not/visible/here", "/", ""),
        ("/../../elsewhere", "/", ""),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_the_group_is_found_on_hosts_and_in_containers(
    version: int,
    path: str,
    mount_root: str,
    folder: str,
    tmp_path: Path,
) -> None:
    """The group is found on a host, in a container that sees its own path,
    and in one that sees the host's path.
    """
    tree = machine(tmp_path, version, path, mount_root)
    tree.write(f"{MOUNTS[version]}/{folder}", **FILES[version])
    report = asdict(tree.watch().report())
    assert (report["memory_used_bytes"], report["memory_limit_bytes"]) == (700, 1000)


@pytest.mark.parametrize("version", [1, 2])
def test_without_a_limit_the_limit_is_none(version: int, tmp_path: Path) -> None:
    """Without any limit the limit is None, and the figures are those of the process's own group."""
    tree = machine(tmp_path, version, "/job/step")
    mount = MOUNTS[version]
    none = {"memory__limit_in_bytes": _V1_NO_LIMIT} if version == 1 else {"memory__max": "max"}
    unlimited = {**FILES[version], **none}
    outer = {name: 5000 if content == 700 else content for name, content in unlimited.items()}
    tree.write(f"{mount}/job/step", **unlimited)
    tree.write(f"{mount}/job", **outer)
    report = asdict(tree.watch().report())
    assert (report["memory_limit_bytes"], report["memory_used_bytes"], report["oom_kill"]) == (
        None,
        700,
        0,
    )


def test_limit_and_usage_are_those_of_the_nearest_limited_group(tmp_path: Path) -> None:
    """The limit and the usage are those of the nearest group with a limit;
    kills are those of the process's group.
    """
    tree = machine(tmp_path, 2, "/job/step/task")
    tree.write(
        "sys/fs/cgroup/job",
        **{**FILES[2], "memory__max": 4000, "memory__current": 3000, "memory__peak": 3500},
    )
    tree.write("sys/fs/cgroup/job/step", **{**FILES[2], "memory__max": "max"})
    tree.write("sys/fs/cgroup/job/step/task", **{**FILES[2], "memory__max": "max"})
    watch = tree.watch()
    tree.write("sys/fs/cgroup/job/step/task", memory__events="oom_kill 3")
    report = asdict(watch.report())
    assert [report[name] for name in _FIGURES] == [1, 3000, 3500, 4000]


def test_the_watermark_is_the_highest_sample(tmp_path: Path) -> None:
    """Without a peak of the kernel's, the peak is the highest sample, with its time."""
    tree = machine(tmp_path, 2)
    tree.write(
        "sys/fs/cgroup",
        **{name: content for name, content in FILES[2].items() if name != "memory__peak"},
    )
    watch = tree.watch()
    tree.write("sys/fs/cgroup", memory__current=950)
    before_ns = time.time_ns()
    watch.sample()
    after_ns = time.time_ns()
    tree.write("sys/fs/cgroup", memory__current=100)
    watch.sample()
    report = asdict(watch.report())
    assert (report["memory_used_bytes"], report["memory_peak_bytes"]) == (100, 950)
    assert before_ns <= (report["watermark_ns"] or 0) <= after_ns
    for file in (tmp_path / "sys/fs/cgroup").iterdir():
        file.unlink()  # what can no longer be read is not told
    assert [asdict(watch.report())[name] for name in _FIGURES] == [None, None, 950, None]


@pytest.mark.parametrize("version", [1, 2])
def test_a_shortage_is_without_the_page_cache(version: int, tmp_path: Path) -> None:
    """A shortage is what programs use, without the page cache that the kernel would free."""
    tree = machine(tmp_path, version)
    used = {1: "memory__usage_in_bytes", 2: "memory__current"}[version]
    name = {1: "total_inactive_file", 2: "inactive_file"}[version]
    tree.write(
        MOUNTS[version],
        **{**FILES[version], used: 980, "memory__stat": f"anon 7\ninactive_file 40\n{name} 40"},
    )
    watch = tree.watch()
    assert watch.find_shortage(0.95) is None
    tree.write(MOUNTS[version], memory__stat=f"{name} 20")
    assert watch.find_shortage(0.95) == (960, 1000)


def test_a_termination_message_fits_and_replaces_only_firstfaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fits into the limit of Kubernetes and replaces only our own;
    clearing a warning leaves other messages.
    """
    file = tmp_path / "termination-log"
    monkeypatch.setenv("FIRSTFAULT_TERMINATION_LOG", str(file))
    warning = describe_memory(96, 100, NodeFolder(tmp_path), os.getpid())
    assert warning == "memory at 96 % of 0.0 GiB"
    write_termination_message(warning, replaces=WARNING)
    assert file.read_text() == f"firstfault: {warning}"
    write_termination_message("", replaces=warning)
    assert file.read_text() == ""
    write_termination_message("é" * 5000)
    assert 4090 <= len(file.read_bytes()) <= 4096
    assert file.read_text().startswith("firstfault: é")
    write_termination_message("", replaces=warning)
    write_termination_message(warning, replaces=WARNING)
    assert file.read_text().startswith("firstfault: é")
    file.write_text("the program's own")
    write_termination_message("ours")
    assert file.read_text() == "the program's own"


@pytest.mark.parametrize(
    "cgroup", ["", "nonsense", "0:\n::\n", "4:memory:/somewhere", "0::/somewhere"]
)
def test_without_control_groups_every_figure_is_none(cgroup: str, tmp_path: Path) -> None:
    """Without control groups every figure is None."""
    assert (
        Tree(tmp_path, cgroup, "nonsense\n22 1 0:21 / /proc rw - proc proc rw").watch().report()
        == Resources()
    )
    assert MemoryWatch(tmp_path / "empty").report() == Resources()
