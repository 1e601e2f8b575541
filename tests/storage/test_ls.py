"""``firstfault ls`` on a real S3 server and in a folder: what is listed, what it costs,
and what is grouped.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fsspec.implementations.local import LocalFileSystem

from firstfault.conclude import conclude
from firstfault.failure_listing import FailedAttempt, failed_attempts, grouped
from firstfault.layout import ERRORS, ROSTER, error_key_for, roster_key_for
from firstfault.model import DocumentRef, Phase, Seal, WorkerError
from firstfault.report.first_line import first_line
from firstfault.store import Store, open_store
from firstfault.testing import make_error, make_job, make_presence
from firstfault.wire.documents import decode, encode, encode_presence, encode_seal
from lab.benchmarks.latency_proxy import latency_proxy
from tests.readers.commands import Ran
from tests.s3_server import S3
from tests.seals import encode_sealed_verdict

pytestmark = pytest.mark.slow

_NOW_MS = 1_800_000_000_000
_HOUR_MS = 3_600_000
_LINE = "ValueError rank 1 worker-1 no retry: boom"


def _error(number: int = 0, **fields: Any) -> WorkerError:
    """Return the root cause of attempt `number`, an hour after its agents started."""
    kind = ("ValueError", "KeyError")[number % 2]
    place = {
        "node": f"f{number:03x}-n0-0-worker-1",
        "machine": f"host-{number % 3}",
        "incarnation": _NOW_MS,
    }
    error = make_error(1, **{"exception": kind, **place, **fields})
    return replace(error, timestamp_ns=(_NOW_MS + _HOUR_MS + number) * 1_000_000)


def _sealed(error: WorkerError) -> dict[str, bytes]:
    """Return the files of an attempt that ended as a task of firstfault does,
    by path below its output prefix.
    """
    text = "Connection closed by peer [10.0.0.7]:4242"
    victim = make_error(0, node=error.node, exception="RuntimeError", message=text)
    conclusion = conclude(make_job(error, victim))
    verdict, decision = conclusion.verdict, conclusion.decision
    fields = {
        "message": f"{first_line(verdict, decision)}\n\nmore",
        "timestamp_ns": error.timestamp_ns or 0,
    }
    seal = encode_sealed_verdict(verdict, decision, node=error.node, worker=error.node, **fields)
    entry = make_presence(Phase.FAILED, node=error.node, incarnation=_NOW_MS)
    return {
        "error.pb": seal,
        f"{ERRORS}/{error_key_for(error)}": encode(error),
        f"{ERRORS}/{error_key_for(victim)}": encode(victim),
        f"{ROSTER}/{roster_key_for(entry)}": encode_presence(entry),
    }


def change_seal(
    error: WorkerError, change: Callable[[dict[str, Any]], None], **fields: Any
) -> dict[str, bytes]:
    """Return the files of `_sealed` with a changed verdict, and with other fields of the seal."""
    files = _sealed(error)
    seal = decode(files["error.pb"], DocumentRef("error.pb", ""))
    assert isinstance(seal, Seal)
    document = json.loads(seal.json)
    change(document["verdict"])
    return {**files, "error.pb": encode_seal(replace(seal, json=json.dumps(document), **fields))}


def _put(uri: str, files: dict[str, bytes]) -> None:
    async def put_all() -> None:
        async with open_store(uri) as store:
            left = iter(files.items())

            async def work(store: Store) -> None:
                for path, data in left:
                    await store.put(path, data)

            await asyncio.gather(*(work(store) for _ in range(48)))

    asyncio.run(put_all())


@dataclass(frozen=True)
class Many:
    """A metadata prefix with executions that failed."""

    uri: str
    count: int


@pytest.fixture(scope="module")
def many(s3: S3, environment_of: Callable[..., Any]) -> Many:
    """Write 180 failed executions as Flyte lays them out,
    each of which failed once and then succeeded.
    """
    count = 180
    uri = s3.uri("many")
    template = [_sealed(_error(number)) for number in range(6)]
    files = {}
    for number in range(count):
        name = f"flytesnacks-development-f{number * 2654435761 % 2**32:08x}"
        for path, data in template[number % 6].items():
            files[f"propeller/{name}/n0/data/0/{path}"] = data
        files[f"propeller/{name}/n0/data/1/outputs.pb"] = b""
        files[f"propeller/{name}/n0/data/inputs.pb"] = b""
    with environment_of(s3):
        _put(uri, files)
    return Many(f"{uri}/propeller", count)


@pytest.mark.parametrize("client", ["fsspec", "obstore"])
def test_an_attempt_costs_one_get_and_listings_run_in_parallel(
    many: Many,
    s3_environ: S3,
    monkeypatch: pytest.MonkeyPatch,
    client: str,
) -> None:
    """Many failed attempts cost one GET each,
    and a listing whose pages are requested at the same time.
    """
    with latency_proxy(s3_environ.endpoint, 0) as proxy:
        monkeypatch.setenv("FLYTE_AWS_ENDPOINT", proxy.endpoint)
        monkeypatch.setenv("FIRSTFAULT_STORAGE_CLIENT", client)
        attempts, found = failed_attempts(many.uri)
        asked = proxy.requests()
    assert (len(attempts), found) == (many.count, 2 * many.count)
    assert asked.pop("GET") == many.count
    # 1,080 names are 2 pages, and each of the parts may end with one that is not full
    assert asked.pop("LIST") <= 2 + 19
    assert not sum(asked.values())


def test_machines_cost_one_more_get(
    many: Many, s3_environ: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is in the root cause's document, which costs a second GET."""
    with latency_proxy(s3_environ.endpoint, 0) as proxy:
        monkeypatch.setenv("FLYTE_AWS_ENDPOINT", proxy.endpoint)
        attempts, _ = failed_attempts(many.uri, with_machines=True)
        assert proxy.requests()["GET"] <= 2 * many.count
    groups = grouped(attempts, "machine")
    assert {group.key for group in groups} == {"host-0", "host-1", "host-2"}
    assert sum(group.executions for group in groups) == many.count


@pytest.mark.parametrize(
    ("failures", "suspicious"),
    [
        ({"a": 8, "b": 1, "c": 1}, ["a"]),
        ({"a": 3, "b": 2, "c": 2}, []),
        ({"a": 9}, []),
        ({f"m{number}": 1 for number in range(99)} | {"a": 3}, []),
        ({f"m{number}": 1 for number in range(99)} | {"a": 7}, ["a"]),
        ({f"m{number}": 40 for number in range(200)} | {"a": 90}, ["a"]),
    ],
)
def test_only_machines_that_chance_hardly_explains_are_suspicious(
    failures: dict[str, int], suspicious: list[str]
) -> None:
    """One machine always has the most failures: only what chance hardly explains is suspicious."""
    attempts = [
        FailedAttempt(f"s3://b/{name}{number}/n0/data/0", None, machine=name)
        for name, count in failures.items()
        for number in range(count)
    ]
    assert [group.key for group in grouped(attempts, "node") if group.is_suspicious] == suspicious
    assert not any(group.is_suspicious for group in grouped(attempts, "category"))


def test_failed_attempts_are_listed_newest_first(store_uri: str) -> None:
    """Newest first, with the first line of each report; an attempt that succeeded is left out."""
    _put(
        store_uri,
        {
            f"f3a{number}/n0/data/0/{path}": data
            for number in range(3)
            for path, data in _sealed(_error(number)).items()
        }
        | {"f3a9/n0/data/0/outputs.pb": b"", "f3a9/n0/data/0/firstfault/roster/r.pb": b""},
    )
    attempts, found = failed_attempts(store_uri)
    assert found == 4
    assert [attempt.execution for attempt in attempts] == ["f3a2", "f3a1", "f3a0"]
    assert attempts[0].uri == f"{store_uri}/f3a2/n0/data/0"
    assert attempts[0].line == _LINE
    assert (attempts[0].pod, attempts[0].ranks, attempts[0].retry) == ("worker-1", 2, False)
    assert attempts[0].rank_hours == pytest.approx(2, abs=0.01)


def test_attempts_without_a_seal_are_judged_as_show_does(store_uri: str) -> None:
    """Documents without a seal, and Flyte's own error files, are judged as show does."""
    stock = make_error(None, exception=None, message="Trace: the loss is NaN", code="USER:Unknown")
    error = _error(4)
    _put(
        store_uri,
        {"a/0/error.pb": encode(stock), f"b/0/{ERRORS}/{error_key_for(error)}": encode(error)},
    )
    attempts, _ = failed_attempts(store_uri)
    lines = {attempt.execution: attempt.line for attempt in attempts}
    assert lines["b"].startswith("ValueError rank 1 worker-1 no retry")
    assert "the loss is NaN" in lines["a"]


@pytest.mark.parametrize("count", [-100, 10**400], ids=["negative", "401 digits"])
def test_a_seal_with_an_impossible_count_is_not_used(tmp_path: Path, count: int) -> None:
    """A sealed verdict with an impossible count is not used,
    and the attempt's documents are read instead.
    """

    def change(verdict: dict[str, Any]) -> None:
        verdict["victims"]["count"] = count

    _put(str(tmp_path / "a" / "0"), change_seal(_error(), change))
    _put(str(tmp_path / "b" / "0"), _sealed(_error()))
    attempts, _ = failed_attempts(str(tmp_path))
    assert [(attempt.line, attempt.ranks) for attempt in attempts] == [(_LINE, 2)] * 2


def test_an_unexpected_error_becomes_the_attempts_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is none of firstfault's also becomes the attempt's note,
    and the other attempts are listed.
    """
    broken = Mock(side_effect=UnicodeEncodeError("utf-8", "\udcff", 0, 1, "no text"))
    # of a sealed attempt the line is read, not made
    monkeypatch.setattr("firstfault.failure_listing.first_line", broken)
    _put(str(tmp_path / "b" / "0"), _sealed(_error()))
    bad = tmp_path / "a" / "0" / ERRORS
    bad.mkdir(parents=True)
    (bad / "1.pb").write_bytes(encode(_error()))
    notes = {attempt.execution: attempt.note for attempt in failed_attempts(str(tmp_path))[0]}
    assert notes["a"].startswith("UnicodeEncodeError: ")
    assert notes["b"] == ""


def test_a_verdict_in_two_folders_is_listed_once(tmp_path: Path) -> None:
    """Flyte 2's error above the folders of its attempts is listed once, with the documents;
    an earlier error stays.
    """
    files = _sealed(_error(0))
    earlier = _sealed(_error(1))
    below = {f"0/firstfault-runs/job/1/{path}": data for path, data in files.items()}
    first = {f"0/firstfault-runs/job/0/{path}": data for path, data in earlier.items()}
    _put(str(tmp_path), {"0/error.pb": files["error.pb"], **below, **first})
    found, number = failed_attempts(str(tmp_path))
    names = sorted(attempt.uri.removeprefix(f"{tmp_path}/") for attempt in found)
    assert names == ["0/firstfault-runs/job/0", "0/firstfault-runs/job/1"]
    assert number == 3


def test_errors_beat_outputs(tmp_path: Path) -> None:
    """An attempt with documents and outputs failed, as in show, unless a later round recovered."""
    error = _error()
    files = {f"{ERRORS}/{error_key_for(error)}": encode(error), "outputs.pb": b""}
    later = make_presence(Phase.SUCCEEDED, node=error.node, round=1, incarnation=_NOW_MS)
    _put(str(tmp_path / "failed" / "0"), files)
    recovered = {**files, f"{ROSTER}/{roster_key_for(later)}": encode_presence(later)}
    _put(str(tmp_path / "recovered" / "0"), recovered)
    attempts, found = failed_attempts(str(tmp_path))
    assert found == 2
    assert [(attempt.execution, attempt.line) for attempt in attempts] == [("failed", _LINE)]


def test_a_folder_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose every listing is complete is asked for one, however many files there are."""
    for number in range(1_100):
        folder = tmp_path / f"f{number:04d}" / "n0" / "data" / "0"
        folder.mkdir(parents=True)
        (folder / "inputs.pb").touch()
        (folder / "outputs.pb").touch()
    listings: list[str] = []
    find = LocalFileSystem.find

    def counted(self: LocalFileSystem, path: str, **options: Any) -> Any:
        listings.append(path)
        return find(self, path, **options)

    monkeypatch.setattr(LocalFileSystem, "find", counted)
    assert failed_attempts(str(tmp_path)) == ([], 1_100)
    assert len(listings) == 1


def test_groups_are_sorted_by_rank_hours_then_attempts() -> None:
    """The group with the most rank-hours is first, then the one with the most attempts;
    unknown hours are no hours.
    """

    def attempt(execution: str, category: str, hours: float | None) -> FailedAttempt:
        return FailedAttempt(
            f"s3://b/{execution}/n0/data/0",
            1,
            "line",
            category=category,
            rank_hours=hours,
        )

    several = (
        ("one", "data", None),
        ("one", "data", None),
        ("two", "hang", 40.0),
        ("three", "auth", 1.5),
    )
    attempts = [attempt(*fields) for fields in (*several, ("four", "auth", None))]
    found = [(g.key, g.attempts, g.executions, g.rank_hours) for g in grouped(attempts, "category")]
    assert found == [("hang", 1, 1, 40.0), ("auth", 2, 2, 1.5), ("data", 2, 1, None)]


@pytest.fixture
def runs(tmp_path: Path) -> str:
    """Write three failed local runs, of which the first is two days old,
    and one that cannot be read.
    """
    folder = tmp_path / "runs"
    for number in range(3):
        _put(str(folder / f"run{number}" / "0"), _sealed(_error(number)))
    _put(str(folder / "bad" / "0"), {"error.pb": b""})
    old = time.time() - 2 * 86_400
    for path in (folder / "run0").rglob("*"):
        os.utime(path, (old, old))
    return str(folder)


def test_each_attempt_is_one_line_and_since_leaves_out_older_ones(
    runs: str, run: Callable[..., Ran]
) -> None:
    """Each attempt is one line: time, URI, first line; --since leaves out older ones."""
    ran = run("ls", runs)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert len(lines) == 4
    assert f"2027-01-15T09:00:00Z  {runs}/run1/0  KeyError rank 1 worker-1 no retry: boom" in lines
    assert any("bad/0  could not be read: " in line for line in lines)
    assert len(run("ls", runs, "--since", "1d").out.splitlines()) == 3


def test_a_limit_lists_the_newest_and_counts_the_others(
    runs: str, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest attempts are listed, and the number of the others is told;
    on a terminal a limit is the default.
    """
    lines = run("ls", runs).out.splitlines()
    ran = run("ls", runs, "--limit", "1")
    assert ran.out.splitlines() == lines[:1]
    left = len(lines) - 1
    assert ran.err.strip() == (
        f"firstfault: {left} older attempt{'s' if left > 1 else ''} left out;"
        f" --limit {len(lines)} lists all"
    )
    monkeypatch.setattr("firstfault.cli._ls._LINES_ON_TERMINAL", 1)
    monkeypatch.setattr("firstfault.cli._ls.on_terminal", lambda: True)
    assert run("ls", runs).out.splitlines() == lines[:1]
    assert len(run("ls", runs, "--json").out.splitlines()) == len(lines)


def test_json_lines_have_the_documented_fields(runs: str, run: Callable[..., Ran]) -> None:
    """With --json each line is an object with the documented fields."""
    found = [json.loads(line) for line in run("ls", runs, "--json").out.splitlines()]
    assert {row["schema"] for row in found} == {"firstfault.ls/v1"}
    assert [row["execution"] for row in found if row["error"] is None] == ["run2", "run1", "run0"]
    (bad,) = [row for row in found if row["error"]]
    assert bad["first_line"] is None
    hot, *_ = [
        json.loads(line)
        for line in run("ls", runs, "--json", "--group", "category").out.splitlines()
    ]
    assert (hot["group"], hot["key"], hot["attempts"], hot["executions"]) == (
        "category",
        "user_code",
        3,
        3,
    )
    assert hot["last"]["execution"] == "run2"


def test_a_group_is_one_line_with_its_cost(runs: str, run: Callable[..., Ran]) -> None:
    """A group is one line with what it cost; attempts that cannot be read are named on stderr."""
    ran = run("ls", runs, "--group", "machine")
    assert sorted(line.split("  ")[:4] for line in ran.out.splitlines()) == [
        ["2.0 rank-hours", "1 attempt", "1 execution", f"host-{number}"] for number in range(3)
    ]
    assert "bad/0 could not be read: " in ran.err


def test_hostile_names_stay_within_their_line(tmp_path: Path, run: Callable[..., Ran]) -> None:
    """A category and a folder's name with newlines and escape sequences stay within their line."""

    def change(verdict: dict[str, Any]) -> None:
        verdict["category"] = "\x1b[31mnetwork\n2026 no attempt"

    _put(str(tmp_path / "a\nb" / "0"), change_seal(_error(), change))
    (line,) = run("ls", str(tmp_path), "--group", "category").out.splitlines()
    assert "  network  last " in line
    (line,) = run("ls", str(tmp_path)).out.splitlines()
    assert f"  {tmp_path}/a b/0  ValueError rank 1" in line


def test_an_empty_list_has_a_documented_exit_code_and_one_line(
    tmp_path: Path, run: Callable[..., Ran]
) -> None:
    """No attempt has exit code 3, no failed one has 0, a wrong duration has 2;
    each prints one line.
    """
    _put(str(tmp_path / "good" / "run" / "0"), {"outputs.pb": b""})
    for arguments, code, message in (
        ((str(tmp_path / "empty"),), 3, "no attempts below"),
        ((str(tmp_path / "good"),), 0, "none of the 1 attempts below"),
        (
            (str(tmp_path), "--since", "soon"),
            2,
            "'soon' is not a duration; write 30m, 12h, 7d or 2w",
        ),
    ):
        ran = run("ls", *arguments)
        (line,) = ran.err.splitlines()
        assert (ran.code, ran.out) == (code, "")
        assert message in line
