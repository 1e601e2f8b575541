"""Who may import whom: proto knows nobody, the readers know proto, and only few of them know protobuf."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import firstfault
import firstfault_proto

_READERS = Path(firstfault.__file__).parent
_PROTO = Path(firstfault_proto.__file__).parent


def _modules(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def _imported(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, with the names taken from it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where an arrow points"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _importing(folder: Path, *roots: str, but: tuple[str, ...] = ()) -> set[str]:
    """Those of a folder's modules that import one of `roots` or what is below them, except `but`."""
    return {
        str(path.relative_to(folder))
        for path in _modules(folder)
        for name in _imported(path)
        if any(f"{name}.".startswith(f"{root}.") for root in roots) and name not in but
    }


def test_there_is_something_to_look_at() -> None:
    """The folders are those of the sources, and an import is seen where one is known to be."""
    assert len(_modules(_READERS)) > 20
    assert len(_modules(_PROTO)) >= 3
    assert "store/_fsspec.py" in _importing(_READERS, "fsspec")
    assert "reader.py" in _importing(_READERS, "flyteidl")


def test_proto_knows_nobody() -> None:
    """The wire format imports neither the library nor the plugin."""
    assert _importing(_PROTO, "firstfault", "flytekitplugins", "flytekit") == set()


def test_readers_know_neither_the_plugin_nor_its_world() -> None:
    """The library imports neither the plugin, nor flytekit, nor torch."""
    assert _importing(_READERS, "flytekitplugins", "flytekit", "torch") == set()


def test_only_the_wire_knows_protobuf() -> None:
    """Only wire.py knows protobuf and flyteidl; the reader knows them to return Flyte's own outputs."""
    assert _importing(_READERS, "google", "flyteidl", "firstfault_proto") == {"wire.py", "reader.py"}
    allowed = ("flyteidl.core.literals_pb2", "google.protobuf.message")
    allowed += ("flyteidl.core.literals_pb2.LiteralMap", "google.protobuf.message.DecodeError")
    assert _importing(_READERS, "google", "flyteidl", "firstfault_proto", but=allowed) == {"wire.py"}


@pytest.mark.parametrize("library", ["fsspec", "stamina", "botocore", "s3fs", "aiohttp"])
def test_only_the_store_knows_storage(library: str) -> None:
    """No client of a storage is imported outside of store/."""
    assert {name for name in _importing(_READERS, library) if not name.startswith("store/")} == set()


def test_what_decides_knows_no_storage() -> None:
    """Model, strategies, retry policies, fingerprints, keys and reports know neither storage nor documents nor I/O."""
    deciding = ("strategies/", "report/", "retry.py", "model.py", "fingerprint.py", "keys.py", "assemble.py", "text.py")
    for room in ("firstfault.store", "firstfault.wire", "firstfault.reader", "firstfault.aio", "asyncio"):
        knowing = _importing(_READERS, room)
        assert {name for name in knowing if name.startswith(deciding)} == set(), room


def test_storage_does_not_know_what_it_stores() -> None:
    """The store imports of the library only its errors."""
    ours = {
        name
        for path in _modules(_READERS / "store")
        for name in _imported(path)
        if name.startswith("firstfault.") and not name.startswith(("firstfault.store", "firstfault.errors"))
    }
    assert ours == set()


def test_only_the_suites_know_pytest() -> None:
    """The library itself runs without pytest; only its conformance suites import it."""
    assert {name for name in _importing(_READERS, "pytest") if not name.startswith("testing/")} == set()
    assert {name for name in _importing(_READERS, "firstfault.testing") if not name.startswith("testing/")} == set()


@pytest.mark.parametrize(
    ("library", "report"),
    [("click", set()), ("rich_click", set()), ("rich", {"report/terminal.py"}), ("jinja2", {"report/html.py"})],
)
def test_who_knows_the_terminal_and_the_page(library: str, report: set[str]) -> None:
    """What parses arguments is imported by the command line alone; what draws, by the one module that draws with it."""
    assert {name for name in _importing(_READERS, library) if not name.startswith("cli/")} == report
