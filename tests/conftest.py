"""Fixtures of all tests: a clean environment,
and a real S3 server that only this machine can reach.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib.util
import itertools
import os
import signal
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.s3_server import S3, ServerError, serving

# so that a failing assert shows its operands
pytest.register_assert_rewrite("tests.storage.store_suite")
_OUTER_VARIABLES = ("AWS_", "FLYTE_", "_F_", "COLUMNS", "LINES")
"""Prefixes of variables that change what is tested; xdist sets COLUMNS."""
# torch's stores look both ends of each connection up in the thread that serves all of them, which
# costs 5 s whenever a name service's answer is lost; the C library reads this once in each process,
# at the first look-up
os.environ["RES_OPTIONS"] = "attempts:0"
# a forked process must not collect what an earlier test left as garbage: the end of one of torch's
# stores crashes it
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)
_IS_OF_XDIST = "PYTEST_XDIST_WORKER" in os.environ
_PIPES = [
    int(file.name)
    for file in (Path("/proc/self/fd").glob("*") if _IS_OF_XDIST else ())
    if int(file.name) > 2 and file.is_fifo()
]
"""Those between pytest-xdist and this process of it."""


def _close_pipes() -> None:
    """Leave the pipes to pytest-xdist to the process that runs tests:
    it waits for ever if a child has them.
    """
    for pipe in _PIPES:
        with contextlib.suppress(OSError):
            os.close(pipe)


os.register_at_fork(after_in_child=_close_pipes)
_HANDLERS = {
    number: signal.getsignal(number)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
}
_FORK_BESIDE_THREADS = "ignore:This process .* is multi-threaded:DeprecationWarning"
"""What Python 3.12 and later warn of."""
_STACKS = signal.SIGRTMIN + 12
"""With it an agent asks for stacks; a test may have been a worker."""
_MASK = signal.pthread_sigmask(signal.SIG_BLOCK, ())
_ROOT = Path(__file__).resolve().parents[1]
_SOURCE_ROOTS = {
    "firstfault": "readers",
    "firstfault_proto": "proto",
    "firstfault_torch": "plugin",
}
"""The folder of each package in the repository; the wheel's tests run in a folder without them."""
_LAYERS = {"core": "firstfault", "torch": "torch", "flyte": "flytekit"}
"""Layers of tests, each with the package that it needs beside those of the layers before it."""
_FOLDERS = {
    "torch": (
        "flyte2",
        "inprocess",
        "lab/test_generated.py",
        "lab/test_harmless.py",
        "ray_train",
        "readers/test_torchrun_folder.py",
        "torch_agent",
        "torchrun",
    ),
    "flyte": (
        "examples",
        "lab/test_framework_launchers.py",
        "lab/test_framework_scripts.py",
        "lab/test_frameworks.py",
        "lab/test_chaos.py",
        "plugin",
        "storage/test_stock_files.py",
    ),
}
"""The layers of folders and files; all others belong to the core. A single test joins
Flyte's layer by its mark.
"""
_PRESENT = [*itertools.takewhile(lambda layer: importlib.util.find_spec(_LAYERS[layer]), _LAYERS)]
_ONLY = os.environ.get("TESTS_LAYER", "")
"""The layer whose tests run; empty: all."""


def pytest_sessionstart() -> None:
    """Check that the tested packages are those beside the tests,
    or the installed ones if there are none.
    """
    for package, source_root in _SOURCE_ROOTS.items():
        sources = _ROOT / source_root
        expected = sources if sources.is_dir() else Path(sysconfig.get_path("purelib"))
        spec = importlib.util.find_spec(package)
        found = spec.origin if spec is not None else None
        if found is None or not Path(found).resolve().is_relative_to(expected.resolve()):
            pytest.exit(
                f"{package} is loaded from {found}, not from {expected}",
                returncode=pytest.ExitCode.USAGE_ERROR,
            )


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files that cannot be imported, and those without a test of the layer that runs."""
    layer = _layer_of(collection_path)
    if not _ONLY or layer == _ONLY:
        return layer not in _PRESENT or None
    if collection_path.is_dir():
        return [*_LAYERS].index(layer) > [*_LAYERS].index(_ONLY) or None
    may_be_marked = _ONLY == "flyte" and collection_path.suffix == ".py"
    return (
        not (may_be_marked and "mark.flyte" in collection_path.read_text(encoding="utf-8")) or None
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add marks, leave out other layers and tests of speed, and put the longest files first."""
    chosen = [item for item in items if _is_chosen(item, config)]
    config.hook.pytest_deselected(items=list({*items} - {*chosen}))
    jobs = Counter(item.path for item in chosen if item.get_closest_marker("jobs"))
    slow_files = {item.path for item in chosen if item.get_closest_marker("slow")}
    # a long file that is the last to start keeps one process of xdist busy while the remaining ones
    # are idle
    items[:] = sorted(chosen, key=lambda item: (-jobs[item.path], item.path not in slow_files))
    for item in items:
        fixtures = {*getattr(item, "fixturenames", ())}
        if "s3" in fixtures:
            item.add_marker("s3")
        is_marked = any(item.get_closest_marker(name) for name in ("jobs", "s3"))
        if is_marked or "browser" in fixtures:
            item.add_marker("slow")
        if item.get_closest_marker("forks"):
            item.add_marker(pytest.mark.filterwarnings(_FORK_BESIDE_THREADS))
        if item.get_closest_marker("flyte") and "flyte" not in _PRESENT:
            item.add_marker(pytest.mark.skip(reason="flytekit is not installed"))


def _is_chosen(item: pytest.Item, config: pytest.Config) -> bool:
    layer = "flyte" if item.get_closest_marker("flyte") else _layer_of(item.path)
    is_timed = item.get_closest_marker("timing") and "timing" not in config.option.markexpr
    return _ONLY in {"", layer} and not is_timed


@functools.cache
def _layer_of(path: Path) -> str:
    for layer, places in _FOLDERS.items():
        if _is_in(path, places):
            return layer
    return "core"


@functools.cache
def _is_in(path: Path, places: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(_ROOT / "tests" / place) for place in places)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write down which test this process runs: if it never ends, nothing else tells."""
    if folder := os.environ.get("TESTS_RUNNING"):
        Path(folder, os.environ.get("PYTEST_XDIST_WORKER", "main")).write_text(
            f"{nodeid}\n", encoding="utf-8"
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which tests were left out because a package is not installed."""
    absent = [layer for layer in _LAYERS if layer not in _PRESENT]
    if absent and not _ONLY:
        files = ", ".join(f"tests/{place}" for layer in absent for place in _FOLDERS[layer])
        terminalreporter.write_line(
            f"left out, because {_LAYERS[absent[0]]} is not installed: {files}", yellow=True
        )


@pytest.fixture(autouse=True, scope="session")
def _no_outer_settings() -> Iterator[None]:
    """Hide the caller's storage and Flyte settings, AWS profile and window size."""
    outer = dict(os.environ)
    for name in outer:
        if name.startswith(_OUTER_VARIABLES):
            del os.environ[name]
    os.environ.update(
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
        AWS_EC2_METADATA_DISABLED="true",
    )
    yield
    _restore(outer)


@pytest.fixture(autouse=True)
def _environment_restored(_no_outer_settings: None) -> Iterator[None]:
    """Undo a test's changes to the environment."""
    before = dict(os.environ)
    yield
    _restore(before)


@pytest.fixture(autouse=True)
def _signal_handlers_restored() -> Iterator[None]:
    """Undo what tests, fixtures and torch's agent do to signals:
    children inherit what is ignored or blocked.
    """
    yield
    faulthandler.unregister(_STACKS)
    for number, handler in _HANDLERS.items():
        if handler is not None:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, _MASK)


def _restore(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """Start an S3 server with an account that may do everything; it ends with the session."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(serving(tmp_path_factory.mktemp("s3")))
        except ServerError as error:
            pytest.fail(str(error), pytrace=False)
        yield server


@pytest.fixture(scope="session")
def s3_no_list(s3: S3) -> S3:
    """Return an account of the same server that may read and write objects, but not list them."""
    return s3.without_list()


@pytest.fixture
def s3_environ(s3: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """Point this process at the S3 server."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
def store_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a fresh output prefix, once in a local folder and once on S3."""
    if request.param == "folder":
        return str(tmp_path / "run")
    server: S3 = request.getfixturevalue("s3_environ")
    return server.uri()
