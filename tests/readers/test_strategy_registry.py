"""Where a strategy is found, what is refused, and the conformance suites on stores and strategies,
also broken ones.
"""

import functools
import importlib.metadata
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firstfault import strategies as registry
from firstfault.errors import StrategyError, UnknownStrategyError, UsageError
from firstfault.model import JobErrors, Verdict
from firstfault.store import Store, open_store
from firstfault.testing import StrategyTests, make_error, make_job
from tests.storage.store_suite import StoreTests

_BUILT_IN = ("evidence", "earliest")


def users_strategy(job: JobErrors) -> Verdict:
    """A strategy of a user's own."""
    return registry.build_undetermined_verdict(job, "mine")


@pytest.fixture
def registered() -> Iterator[None]:
    """A strategy of the user's own is registered for the length of a test."""
    registry.register_strategy("mine", users_strategy)
    yield
    registry.unregister_strategy("mine")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that distributions with these entry points are installed."""

    def install(**points: str) -> None:
        found = [
            importlib.metadata.EntryPoint(name.rstrip("_"), value, registry.ENTRY_POINT_GROUP)
            for name, value in points.items()
        ]
        monkeypatch.setattr(
            "firstfault.strategies.registry._find_entry_points", lambda: tuple(found)
        )

    return install


@pytest.mark.usefixtures("registered")
def test_names_are_built_in_then_registered_then_installed(installed: Callable[..., None]) -> None:
    """The names are the built-in ones, then the registered, then the installed, each once.

    Registering gives back the strategy, which is found by its name until it is unregistered. An
    unknown name is a usage error, whose text is plain and names the alternatives.
    """
    installed(theirs="a:b", mine="c:d")
    assert registry.list_strategy_names() == (*_BUILT_IN, "mine", "theirs")
    installed()
    assert registry.get_strategy("mine") is users_strategy
    with pytest.raises(UnknownStrategyError) as caught:
        registry.get_strategy("earlyest")
    assert str(caught.value) == "unknown strategy 'earlyest'; available: evidence, earliest, mine"
    assert isinstance(caught.value, UsageError)
    assert isinstance(caught.value, KeyError)
    registry.unregister_strategy("mine")
    with pytest.raises(UnknownStrategyError):
        registry.get_strategy("mine")
    assert registry.register_strategy("mine", users_strategy) is users_strategy


@pytest.mark.usefixtures("registered")
def test_a_name_is_registered_once() -> None:
    """Neither a registered nor a built-in strategy can be replaced, and a name is a word,
    to be typed in a setting.
    """
    for name in ("mine", "earliest"):
        with pytest.raises(StrategyError, match=f"'{name}' already"):
            registry.register_strategy(name, users_strategy)
    for name in ("", "two words", "a-b", "1st", "../x"):
        with pytest.raises(StrategyError, match="must be a word"):
            registry.register_strategy(name, users_strategy)


async def _coroutine(job: JobErrors) -> Verdict:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (17, "must be callable"),
        (type("Object", (), {"__call__": lambda _, job: users_strategy(job)}), "must be callable"),
        (lambda: None, "must take one argument"),
        (lambda _job, _context: None, "must take one argument"),
        (_coroutine, "must be a plain function"),
    ],
    ids=["number", "class", "no argument", "two arguments", "coroutine"],
)
def test_what_is_no_strategy_is_refused(strategy: Any, reason: str) -> None:
    """What cannot be called with one argument is refused when it is registered
    and when it is passed.
    """
    with pytest.raises(StrategyError, match=rf"'broken' of register_strategy {reason}"):
        registry.register_strategy("broken", strategy)
    assert "broken" not in registry.list_strategy_names()
    with pytest.raises(StrategyError, match=reason):
        registry.get_strategy(strategy)


@pytest.mark.parametrize(
    "strategy", [functools.partial(users_strategy), lambda job, _depth=3: users_strategy(job)]
)
def test_any_callable_of_one_argument_is_a_strategy(strategy: Any) -> None:
    """A partial, or a lambda with defaults, is a strategy as it is."""
    assert (
        registry.run_strategy(registry.get_strategy(strategy), make_job(make_error())).strategy
        == "mine"
    )


def test_an_installed_strategy_is_found(installed: Callable[..., None]) -> None:
    """A strategy of an entry point is loaded by its name; it cannot replace a built-in one."""
    installed(
        theirs="firstfault.strategies.earliest:earliest",
        earliest="firstfault.strategies.rules:evidence",
    )
    assert registry.get_strategy("theirs") is registry.get_strategy("earliest")
    assert registry.get_strategy("earliest") is not registry.get_strategy("evidence")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_module:x", "cannot be loaded: No module named 'no_such_module'"),
        ("firstfault.model:no_such_name", "cannot be loaded: .*no_such_name"),
        ("firstfault.model:CATEGORIES", "must be callable"),
        ("firstfault.strategies:build_verdict", "must take one argument"),
    ],
)
def test_a_broken_plug_in_is_named(installed: Callable[..., None], value: str, reason: str) -> None:
    """An installed strategy that cannot be loaded, or is none, is refused with its name and origin;
    others work.
    """
    installed(theirs=value)
    with pytest.raises(StrategyError, match=f"'theirs' of {value} {reason}"):
        registry.get_strategy("theirs")
    assert registry.get_strategy("earliest") is not None
    assert "theirs" in registry.list_strategy_names()
    installed(theirs="a:x", theirs_=value)
    with pytest.raises(StrategyError, match=rf"several distributions \(a:x, {value}\)"):
        registry.get_strategy("theirs")


@pytest.mark.parametrize("answer", [None, "a verdict", make_job()])
def test_a_strategy_that_returns_no_verdict_is_a_named_error(answer: Any) -> None:
    """What a strategy returns or raises is checked: its caller gets one type of error,
    which names the strategy.
    """

    def careless(job: JobErrors) -> Any:
        return answer

    def broken(job: JobErrors) -> Verdict:
        raise KeyError(job.round)

    with pytest.raises(
        StrategyError, match=f"the strategy careless returned {type(answer).__name__}"
    ):
        registry.run_strategy(careless, make_job(make_error()))
    with pytest.raises(StrategyError, match="the strategy broken raised KeyError: 0"):
        registry.run_strategy(broken, make_job(make_error()))


class TestEvidence(StrategyTests):
    strategy = "evidence"


class TestEarliest(StrategyTests):
    strategy = "earliest"


class TestFsspec(StoreTests):
    @pytest.fixture(autouse=True, params=["folder", "memory"])
    def _folder(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        self.uri = (
            str(tmp_path / "out") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"
        )

    def open_store(self) -> Store:
        """Return the store for a path, or for a folder in memory."""
        return open_store(self.uri)


@pytest.mark.parametrize(
    ("lie", "check"),
    [
        (
            lambda job: {"ranks": tuple(one.rank for one in job.failures[:1])},
            "does_not_depend_on_the_order_of_failures",
        ),
        (lambda _: {"ranks": (77,)}, "names_only_what_is_in_the_job"),
        (lambda _: {"root": make_error(77)}, "names_only_what_is_in_the_job"),
        (lambda _: {"why": ()}, "returns_a_verdict_with_evidence"),
        (lambda _: {"ranks": [0]}, "survives_the_round_trip_through_json"),
    ],
)
def test_the_suite_refuses_a_broken_strategy(
    lie: Callable[[JobErrors], dict[str, Any]], check: str
) -> None:
    """A strategy that breaks one promise fails the check of that promise."""

    def broken(job: JobErrors) -> Verdict:
        return replace(registry.get_strategy("earliest")(job), **lie(job))

    suite = type("Suite", (StrategyTests,), {"strategy": staticmethod(broken)})()
    job = make_job(make_error(0, at_ms=2), make_error(1, at_ms=1), make_error(2, at_ms=0))
    with pytest.raises(AssertionError):
        getattr(suite, f"test_{check}")(job)
