"""The conformance suites on the built-in stores and strategies, and on broken ones."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from firstfault.store import FsspecStore, open_store
from firstfault.strategies import get_strategy
from firstfault.testing import StoreTests, StrategyTests, make_error, make_job

if TYPE_CHECKING:
    from pathlib import Path

    from firstfault.model import JobErrors, Verdict


class TestEvidence(StrategyTests):
    strategy = "evidence"


class TestEarliest(StrategyTests):
    strategy = "earliest"


class TestLocalFolder(StoreTests):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "out"

    def open_store(self) -> FsspecStore:
        """Return the store for a path."""
        return open_store(str(self.folder))


class TestMemory(StoreTests):
    @pytest.fixture(autouse=True)
    def _folder(self) -> None:
        self.folder = uuid.uuid4().hex

    def open_store(self) -> FsspecStore:
        """Return the store for a folder in memory."""
        return open_store(f"memory://{self.folder}")


# --- the suites notice ----------------------------------------------------------------------------------------------


def _first_listed(job: JobErrors) -> Verdict:
    return replace(get_strategy("earliest")(job), ranks=tuple(f.rank for f in job.failures[:1] if f.rank is not None))


def _invents_a_rank(job: JobErrors) -> Verdict:
    return replace(get_strategy("earliest")(job), ranks=(77,))


def _invents_a_failure(job: JobErrors) -> Verdict:
    return replace(get_strategy("earliest")(job), root=make_error(77))


def _without_evidence(job: JobErrors) -> Verdict:
    return replace(get_strategy("earliest")(job), why=())


def _loose_numbers(job: JobErrors) -> Verdict:
    return replace(get_strategy("earliest")(job), ranks=[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "check"),
    [
        (_first_listed, "test_does_not_depend_on_the_order_of_failures"),
        (_invents_a_rank, "test_names_only_what_is_in_the_job"),
        (_invents_a_failure, "test_names_only_what_is_in_the_job"),
        (_without_evidence, "test_returns_a_verdict_with_evidence"),
        (_loose_numbers, "test_survives_the_round_trip_through_json"),
    ],
)
def test_the_suite_refuses_a_broken_strategy(strategy: object, check: str) -> None:
    """A strategy that breaks one promise fails the check of that promise."""
    suite = type("Suite", (StrategyTests,), {"strategy": staticmethod(strategy)})()
    job = make_job(make_error(0, at_ms=2), make_error(1, at_ms=1), make_error(2, at_ms=0))
    with pytest.raises(AssertionError):
        getattr(suite, check)(job)


class _Caching(FsspecStore):
    """A store that caches listings."""

    async def list(self, folder: str = "") -> list:
        if not hasattr(self, "_seen"):
            self._seen = await super().list(folder)
        return self._seen


class _Appending(FsspecStore):
    """A store that appends on put."""

    async def put(self, path: str, data: bytes) -> None:
        before = await self.get(path) if await self.exists(path) else b""
        await super().put(path, before + data)


class _Unlimited(FsspecStore):
    """A store that ignores the limit."""

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        del limit
        return await super().get(path)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (_Caching, "test_every_listing_is_fresh"),
        (_Caching, "test_two_stores_see_each_others_writes_at_once"),
        (_Appending, "test_overwriting_replaces_the_whole_object"),
        (_Unlimited, "test_the_limit_is_the_largest_size_allowed"),
    ],
)
def test_the_suite_refuses_a_broken_store(kind: type[FsspecStore], check: str, tmp_path: Path) -> None:
    """A store that breaks one promise fails the check of that promise."""
    suite = type("Suite", (StoreTests,), {"open_store": lambda _self: kind(str(tmp_path))})()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(suite, check)()
