"""Rules that the sources keep: where secrets are removed, and where every exception is caught."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from firstfault.utils.loggers import get_logger

PACKAGES = (
    "firstfault",
    "firstfault_logs",
    "firstfault_torch",
    "firstfault_inprocess",
    "flytekitplugins.firstfault",
)
DOORS = {
    "firstfault.wire": (
        "each text of a document is cleaned when it is written, and of a stock file when it is read"
    ),
    "firstfault_logs": "logs of jobs without firstfault, when they are read",
    "firstfault.brief.quotes": "lines of these logs, when a brief quotes them",
}
"""Packages that remove secrets: when a document is written,
and when foreign text is read or quoted.
"""
GUARDS = {
    "firstfault_torch.guard": "firstfault's own errors must not hide the user's",
    "firstfault.utils.run_sync": "`try_await`: storage clients and strategies raise anything",
    "firstfault.utils.brief_threads": "an exception is handed to the caller, as by any executor",
    "firstfault.store.base": "raised again outside of the retries, whose state would keep it",
    "firstfault.store.fsspec_store": "the codes by which storages refuse a conditional write",
    "firstfault_torch.agent.launch": "every error of torch's agent becomes the end of a round",
    "firstfault_inprocess.monitor.thread": (
        "the call judges what the wrapped function raised, or was interrupted by"
    ),
    "firstfault.cli._main": "the exit code of an error of firstfault's own",
}
"""Where any exception is caught and does not leave."""
LOGGERS = {
    "firstfault.utils.loggers": "makes the loggers whose lines begin with the name",
    "firstfault.cli._main": "the lines of the storages' clients are switched off",
    "firstfault.recorder.server": "as above",
    "firstfault.store.fsspec_store": "as above",
    "firstfault_torch.compat.torch_agent": "lines that torch's own agent logs, in torch's words",
    "firstfault_torch.torchrun.agent": "leaves out a line of torch's",
    "flytekitplugins.firstfault.local.live": "moves the lines of others above a live view",
}
"""Who takes a logger that is not of `get_logger`."""
_EVERY = {"Exception", "BaseException"}


@cache
def _sources() -> list[tuple[str, ast.Module]]:
    """Return the modules of the installed packages with their names."""
    sources = []
    for package in PACKAGES:
        found = (
            find_spec(package)
            if package != "flytekitplugins.firstfault" or find_spec("flytekitplugins")
            else None
        )
        for folder in found.submodule_search_locations or () if found is not None else ():
            for file in sorted(Path(folder).rglob("*.py")):
                path = file.relative_to(folder).with_suffix("")
                parts = [package, *(part for part in path.parts if part != "__init__")]
                sources.append((".".join(parts), ast.parse(file.read_text(encoding="utf-8"))))
    return sources


def _redacts(module: ast.Module) -> bool:
    """Whether a module calls what removes secrets, or takes it for others."""
    imported = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    return any(
        node.module == "firstfault.credentials"
        or (
            node.module == "firstfault.utils.stored_text"
            and alias.name in {"redact", "clean", "clean_end"}
        )
        for node in imported
        for alias in node.names
    )


def _swallows(module: ast.Module) -> bool:
    """Whether a module catches every exception and raises none in its place."""
    handlers = [node for node in ast.walk(module) if isinstance(node, ast.ExceptHandler)]
    return any(
        _names(node.type) & _EVERY and not isinstance(node.body[-1], ast.Raise) for node in handlers
    )


def _names(kind: ast.expr | None) -> set[str]:
    if kind is None:
        return _EVERY
    return {node.id for node in ast.walk(kind) if isinstance(node, ast.Name)}


def _is_one_of(name: str, known: set[str]) -> bool:
    return any(name == item or name.startswith(f"{item}.") for item in known)


def test_only_listed_modules_remove_secrets() -> None:
    """Only what writes a document and what reads foreign text removes secrets;
    each door is in use.
    """
    found = {
        name
        for name, module in _sources()
        if _redacts(module) and not name.startswith("firstfault.credentials")
    }
    assert {
        name
        for name in found - {"firstfault.utils.stored_text"}
        if not _is_one_of(name, set(DOORS))
    } == set()
    assert {door for door in DOORS for name in found if _is_one_of(name, {door})} == DOORS.keys()


def test_only_the_wire_package_writes_documents() -> None:
    """Only `firstfault.wire` makes the bytes of a document, so every text of one passes `clean`."""
    makes = {
        name
        for name, module in _sources()
        if any(
            isinstance(node, ast.Attribute) and node.attr == "SerializeToString"
            for node in ast.walk(module)
        )
    }
    assert {name for name in makes if not name.startswith("firstfault.wire.")} <= {
        "flytekitplugins.firstfault.local.runner"  # a task's inputs
    }
    assert "firstfault.wire.documents" in makes


@pytest.mark.parametrize(
    ("code", "swallows"),
    [
        ("try: f()\nexcept Exception: pass", True),
        ("try: f()\nexcept (OSError, BaseException): pass", True),
        ("try: f()\nexcept: pass", True),
        ("try: f()\nexcept OSError: pass", False),
        ("try: f()\nexcept BaseException:\n g()\n raise", False),
    ],
)
def test_a_handler_of_every_exception_counts_unless_it_raises(code: str, swallows: bool) -> None:
    """A handler of every exception counts unless it raises at its end."""
    assert _swallows(ast.parse(code)) is swallows


def test_each_log_line_begins_with_the_name_once(caplog: pytest.LogCaptureFixture) -> None:
    """A line of firstfault's loggers begins with its name once,
    and no module has loggers of its own.
    """
    for _ in range(2):
        get_logger("firstfault.example").warning("%d of %s", 3, "4")
    assert caplog.messages == ["firstfault: 3 of 4"] * 2
    takes = {
        name
        for name, module in _sources()
        if any(
            isinstance(node, ast.Attribute) and node.attr == "getLogger"
            for node in ast.walk(module)
        )
    }
    assert takes - LOGGERS.keys() == set()


def test_only_listed_modules_catch_every_exception() -> None:
    """No module catches every exception but the guards."""
    found = {name for name, module in _sources() if _swallows(module)}
    assert found - GUARDS.keys() == set()
    present = {name for name, _ in _sources()}
    assert {name for name in GUARDS if name in present} <= found
