"""``firstfault watch`` and `MultiErrorFileOutputReader.follow`."""

import asyncio
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest

from firstfault.attempt_reader import AttemptReader
from firstfault.cli import EXIT
from firstfault.cli._following import Progress
from firstfault.cli._live import format_progress_line
from firstfault.errors import AccessDeniedError, StoreUnavailableError
from firstfault.layout import LIVE, RUN_MARK, find_watch_end_ms, restart_record_name
from firstfault.model import JobErrors, Kind, Phase, RestartKind, RestartRecord
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.retry import never
from firstfault.run_folder import RUNS_FOLDERS, begin_run
from firstfault.store.fsspec_store import FsspecStore
from firstfault.testing import make_error, make_presence
from firstfault.wire.json_schemas import restart_to_json
from tests.readers.commands import Ran
from tests.readers.conftest import Attempt
from tests.seals import encode_sealed_verdict
from tests.waiting import wait_until

Watch: TypeAlias = Callable[..., tuple[int, str, str]]


SHORT_INTERVAL = ("--interval", "0.005")


def node(number: int, phase: Phase = Phase.FAILED, **fields: object) -> object:
    """Return the roster entry of one of two nodes."""
    return make_presence(
        phase,
        node=f"w-{number}",
        group_rank=number,
        nodes=2,
        ranks=(number,),
        **fields,
    )


def victim() -> object:
    """Return the document of rank 0, a victim."""
    text = "Connection closed by peer"
    return make_error(0, node="w-0", group_rank=0, at_ms=20, exception="RuntimeError", message=text)


def later_fault() -> object:
    """Return a fault of rank 0 itself, 30 s after rank 1's."""
    return make_error(
        0,
        node="w-0",
        group_rank=0,
        at_ms=30_000,
        exception="KeyError",
        message="tokens",
    )


def root(**fields: object) -> object:
    """Return the document of rank 1, the root cause."""
    return make_error(1, node="w-1", group_rank=1, at_ms=5, message="bad batch", **fields)


@pytest.fixture
def watching(attempt: Attempt, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Watch during the given steps, each after the previous one was read; return code,
    stdout and stderr.
    """
    looks = threading.Semaphore(0)
    listed = FsspecStore.list

    async def look(self: FsspecStore, folder: str = "") -> object:
        if not folder:  # once for each look
            looks.release()
        return await listed(self, folder)

    monkeypatch.setattr(FsspecStore, "list", look)
    monkeypatch.setattr("firstfault.cli._following._SEALING_SECONDS", 0.05)

    def watch(
        *steps: Callable[[], object],
        options: tuple[str, ...] = SHORT_INTERVAL,
        uri: str = attempt.uri,
    ) -> tuple[int, str, str]:
        ended = threading.Event()

        def happen() -> None:
            for step in steps:
                while looks.acquire(blocking=False):
                    pass
                # the look after the next one begins when the next one has been told
                for _ in range(3):
                    if not looks.acquire(timeout=30) or ended.is_set():
                        return
                step()

        thread = threading.Thread(target=happen)
        thread.start()
        try:
            ran = run("watch", uri, *options)
        finally:
            ended.set()
            looks.release(3)
            thread.join()
        return ran.code, ran.out, ran.err

    return watch


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_an_answer_as_soon_as_it_is_known_and_corrected(
    attempt: Attempt, watching: Watch, options: tuple[str, ...]
) -> None:
    """The first document gives an answer at once, which is not decided; a later one corrects it."""
    code, out, err = watching(
        lambda: attempt.join(node(0, Phase.JOINED), node(1, Phase.JOINED)),
        lambda: attempt.write(later_fault()),
        lambda: attempt.write(root()),
        lambda: attempt.join(node(0), node(1)),
        options=(*SHORT_INTERVAL, *options),
    )
    assert code == EXIT.ROOT_CAUSE
    first, second, *rest = out.splitlines()
    if options:
        answers = [json.loads(line) for line in (first, second, *rest)]
        assert [answer["verdict"]["ranks"] for answer in answers] == [[0], [1], [1]]
        assert [answer.get("decided") for answer in answers] == [False, False, None]
    else:
        assert first.startswith("preliminary: KeyError rank 0")
        assert second.startswith("preliminary: ValueError rank 1")
        assert rest[0].startswith("ValueError rank 1")
        assert "Cause    ValueError: bad batch" in rest
    assert err.index("round 0 runs on 2 nodes") < err.index("corrected by later documents")
    assert err.index("corrected by") < err.index("every node has reported")


def build_live_state(
    number: int,
    begun: int,
    rate: float,
    waited: float,
    *,
    fewer: int = 0,
) -> dict[str, object]:
    rank = {"behind": 8 * number, "waits": 8 * number + 1}
    name = {
        "node": f"w-{number}",
        "collectives": begun,
        "per_second": rate,
        "waited_seconds": waited,
    }
    return {**rank, **name, "least": begun - fewer}


@pytest.mark.parametrize(
    ("nodes", "line"),
    [
        ([build_live_state(0, 4000, 12.5, 0.0, fewer=9)], "4,000 collectives; a second: w-0 12.5"),
        (
            [build_live_state(0, 41, 0.0, 9.0), build_live_state(1, 41, 0.0, 14.0, fewer=2)],
            (
                "41 collectives; a second: w-0 0, w-1 0; longest wait: rank 9 (w-1), 14 s; behind:"
                " rank 8 (w-1) by 2"
            ),
        ),
        (
            [build_live_state(n, 7, 12.0 - n, 0.0) for n in range(9)],
            "7 collectives; 4 (w-8) to 12 (w-0) a second",
        ),
    ],
)
def test_the_live_view_lists_few_nodes_or_slowest_and_fastest(
    nodes: list[dict[str, object]], line: str
) -> None:
    """Few nodes are listed, of many the slowest and the fastest;
    who is behind is told once all stand still.
    """
    assert format_progress_line(nodes) == line


def test_live_asks_agents_and_prints_their_answers(
    attempt: Attempt, watching: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--live` leaves a file that asks the agents, and prints what they write."""
    is_read = threading.Event()

    def line(nodes: list[dict[str, object]]) -> str:
        is_read.set()
        return format_progress_line(nodes)

    monkeypatch.setattr("firstfault.cli._live.format_progress_line", line)
    monkeypatch.setattr("firstfault.cli._live._POLL_SECONDS", 0.01)
    attempt.join(node(0, Phase.JOINED))
    attempt.put(LIVE, b"{}")
    ends = [node(number, Phase.SUCCEEDED) for number in range(2)]

    def answer() -> None:
        wait_until(lambda: list(attempt.folder.rglob("watched-*")), seconds=30)
        attempt.put(
            LIVE,
            json.dumps({"time": 5.0, "nodes": [build_live_state(0, 4000, 12.5, 0.0)]}).encode(),
        )

    code, _, err = watching(
        answer,
        lambda: is_read.wait(30),
        lambda: attempt.join(*ends),
        options=(*SHORT_INTERVAL, "--live"),
    )
    assert code == EXIT.OK
    assert "4,000 collectives; a second: w-0 12.5" in err
    assert (
        find_watch_end_ms(file.name for file in attempt.folder.rglob("watched-*"))
        > time.time() * 1000
    )


def test_an_unchanged_answer_is_printed_once(attempt: Attempt, watching: Watch) -> None:
    """Further reports are counted; an unchanged answer is not printed again."""
    code, out, err = watching(
        lambda: attempt.join(node(0, Phase.JOINED), node(1, Phase.JOINED)),
        lambda: attempt.write(root(kind=Kind.RECOVERABLE)),
        lambda: attempt.write(victim()),
        lambda: attempt.join(node(0), node(1)),
    )
    assert code == EXIT.ROOT_CAUSE_RETRYABLE
    assert (out.count("\nCause "), out.count("preliminary: ")) == (1, 1)
    assert err.index("1 of 2 nodes have reported") < err.index("2 of 2 nodes have reported")
    assert "corrected" not in err


def test_a_recovered_round_is_printed_in_order_and_exits_with_0(
    attempt: Attempt, watching: Watch
) -> None:
    """A failure, torch's restart and the final success are printed in this order;
    the exit code is 0.
    """
    code, out, err = watching(
        lambda: attempt.write(root()),
        lambda: attempt.join(node(0, Phase.JOINED, round=1), node(1, Phase.JOINED, round=1)),
        lambda: attempt.join(node(0, Phase.SUCCEEDED, round=1), node(1, Phase.SUCCEEDED, round=1)),
    )
    assert code == EXIT.OK
    assert "preliminary: ValueError" in out
    assert "\nCause " not in out
    assert err.index("recovered from") < err.index("without a failure")


def test_each_stall_is_printed_once(
    attempt: Attempt, watching: Watch, run: Callable[..., Ran]
) -> None:
    """Each recorded stall is printed once while the job runs;
    the report on a later failure counts them.
    """
    said = (
        "no progress for 61 s: 1 of 2 ranks wait in all_reduce #41 (default_pg); rank 1 (w-1) has"
        " begun 40"
    )

    def stall(number: int, lost: float | None) -> None:
        record = RestartRecord(
            *(RestartKind.STALL, number, "rank 1 at loader.py:88 in read_shard"),
            restart=False,
            reason=said,
            timestamp_ns=number,
            lost_seconds=lost,
            world_size_before=2,
        )
        name = restart_record_name("stall", number, 0)
        attempt.put(f"firstfault/roster/{name}", restart_to_json(record))

    code, _, err = watching(
        lambda: attempt.join(node(0, Phase.JOINED), node(1, Phase.JOINED)),
        lambda: stall(0, None),
        lambda: stall(0, 74.0),
        lambda: stall(1, 106.0),
        lambda: attempt.write(root()),
        lambda: attempt.join(node(0), node(1)),
    )
    assert (code, err.count(said)) == (EXIT.ROOT_CAUSE, 2)
    report = run("show", "-v", attempt.uri).out
    assert "Stalls: 2 stalls, 180 s in total, 0.10 rank hours, waiting for rank 1" in " ".join(
        report.split()
    )


def _lose_requests(monkeypatch: pytest.MonkeyPatch, folder: str, count: int) -> list[str]:
    """Let the first requests for the job of an attempt get no answer;
    return those that were lost.
    """
    lost: list[str] = []
    ask = AttemptReader.job_async

    async def lose(self: AttemptReader) -> JobErrors:
        if self.errors_uri.startswith(f"{folder}/") and len(lost) < count:
            lost.append(self.errors_uri)
            raise StoreUnavailableError("away")
        return await ask(self)

    monkeypatch.setattr(AttemptReader, "job_async", lose)
    return lost


def test_a_lost_request_for_the_seal_does_not_end_the_command(
    attempt: Attempt, watching: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is lost after every node has reported does not end the command."""
    lost = _lose_requests(monkeypatch, attempt.uri, 1)
    moments = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(moments) / 50, strftime=time.strftime)
    monkeypatch.setattr("firstfault.cli._following.time", clock)
    attempt.write(root())
    attempt.join(node(0), node(1))
    code, out, _ = watching()
    assert (code, len(lost)) == (EXIT.ROOT_CAUSE, 1)
    assert "\nCause    ValueError: bad batch\n" in out


def test_lost_requests_for_the_next_attempt_are_repeated(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Ran]
) -> None:
    """Requests for the next attempt that are lost are repeated,
    and are no sign that it has begun.
    """
    first, second = map(attempt.at, range(2))
    lost = _lose_requests(monkeypatch, second.uri, 2)
    first.join(node(0, Phase.JOINED), node(1, Phase.JOINED))
    second.join(node(0, Phase.SUCCEEDED, attempt=1), node(1, Phase.SUCCEEDED, attempt=1))
    ran = run("watch", "--follow", first.uri, *SHORT_INTERVAL, "--timeout", "30")
    assert (ran.code, len(lost)) == (EXIT.OK, 2)
    assert f"watching {second.uri}/" in ran.err


def test_a_timeout_without_a_failure_exits_with_4(watching: Watch) -> None:
    """Without a failure before the timeout the exit code is 4."""
    code, out, err = watching(options=(*SHORT_INTERVAL, "--timeout", "0.2"))
    assert (code, out) == (EXIT.TIMEOUT, "")
    assert "no failure in" in err
    assert "within 0.2 s" in err


def test_a_timeout_with_an_answer_exits_by_that_answer(
    attempt: Attempt, watching: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a node never reports, the last answer decides the exit code."""
    show = Progress.show

    def last(self: Progress, job: JobErrors) -> None:
        show(self, job)
        raise asyncio.TimeoutError

    monkeypatch.setattr(Progress, "show", last)
    attempt.write(root())
    attempt.join(node(0, Phase.JOINED), node(1, Phase.JOINED))
    code, out, _ = watching(options=(*SHORT_INTERVAL, "--timeout", "60"))
    assert code == EXIT.ROOT_CAUSE
    assert out.count("\nCause ") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("error.pb",), "follow an output prefix or an errors/ folder"),
        (("--follow", "run"), "ends in its number"),
    ],
    ids=["a document", "no attempt"],
)
def test_what_cannot_be_watched_is_a_usage_error(
    arguments: tuple[str, ...], said: str, run: Callable[..., Ran]
) -> None:
    """What cannot be followed is a usage error that says what to name instead."""
    ran = run("watch", *arguments)
    assert ran.code == EXIT.USAGE
    assert said in ran.err


def test_the_last_answer_is_what_show_prints(
    attempt: Attempt, watching: Watch, run: Callable[..., Ran]
) -> None:
    """What is decided is what show prints, with the decision that the pods sealed."""
    attempt.write(root(kind=Kind.RECOVERABLE))
    attempt.join(node(0), node(1))
    conclusion = attempt.reader(retry_policy=never()).conclude()
    attempt.put("error.pb", encode_sealed_verdict(conclusion.verdict, conclusion.decision))
    code, out, _ = watching()
    shown = run("show", attempt.uri)
    assert (code, out) == (shown.code, shown.out)
    assert code == EXIT.ROOT_CAUSE, "the policy never retries"


@pytest.mark.parametrize(
    ("plans", "code", "roots"),
    [
        ((Kind.RECOVERABLE, Kind.NON_RECOVERABLE), EXIT.ROOT_CAUSE, 2),
        ((None, Phase.SUCCEEDED), EXIT.OK, 0),
    ],
    ids=["retried", "vanished"],
)
def test_follow_continues_with_the_next_attempt(
    attempt: Attempt,
    watching: Watch,
    plans: tuple[Kind | Phase | None, ...],
    code: int,
    roots: int,
) -> None:
    """A retried attempt, or one whose pods all vanished without a report,
    is followed by the next one.
    """
    for number, plan in enumerate(plans):
        here = attempt.at(number)
        if isinstance(plan, Kind):
            here.write(root(kind=plan, attempt=number))
        if plan is not None:
            phase = plan if isinstance(plan, Phase) else Phase.FAILED
            here.join(*(node(at, phase, attempt=number) for at in range(2)))
    found, out, err = watching(
        uri=f"{attempt.uri}/0", options=("--follow", *SHORT_INTERVAL, "--timeout", "60")
    )
    assert (found, out.count("\nCause    ValueError: bad batch\n")) == (code, roots)
    assert [f"watching {attempt.uri}/{number}/" in err for number in range(3)] == [
        True,
        True,
        False,
    ]


def _followed(reader: MultiErrorFileOutputReader) -> list[JobErrors]:
    async def follow() -> list[JobErrors]:
        return [job async for job in reader.follow(0.001)]

    return asyncio.run(follow())


def test_nothing_is_opened_while_nothing_changes(
    attempt: Attempt, requested_paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each object is read once; a listing without changes reads none."""
    listed: list[str] = []
    listing = FsspecStore.list

    def count(self: FsspecStore, folder: str = "") -> object:
        listed.append(folder)
        if len(listed) == 40:
            attempt.join(node(0), node(1))
        return listing(self, folder)

    attempt.write(root())
    attempt.join(node(0, Phase.JOINED), node(1, Phase.JOINED))
    monkeypatch.setattr(FsspecStore, "list", count)
    assert [job.settled for job in _followed(attempt.reader())] == [False, True]
    assert len([path for path in requested_paths if "/roster/" in path]) == 4
    assert len([path for path in requested_paths if "/errors/" in path]) == 2, (
        "the document, once for each look that was new"
    )


def test_a_failed_listing_is_repeated_and_a_refused_one_raises(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed listing is logged and repeated; a refused one raises."""
    errors = [StoreUnavailableError("away"), StoreUnavailableError("away")]
    listed = FsspecStore.list

    async def fail(self: FsspecStore, folder: str = "") -> object:
        if errors and not folder:
            raise errors.pop()
        return await listed(self, folder)

    monkeypatch.setattr(FsspecStore, "list", fail)
    attempt.write(root())
    attempt.join(node(0), node(1))
    assert len(_followed(attempt.reader())) == 1
    assert caplog.text.count("retrying: away") == 2

    errors.append(AccessDeniedError("refused"))
    with pytest.raises(AccessDeniedError):
        _followed(attempt.reader())


def test_the_newest_attempt_of_the_newest_run_is_watched(
    tmp_path: Path, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest attempt of the newest run is watched; with `--last`, of the working folder."""
    monkeypatch.chdir(tmp_path)
    runs = Path(RUNS_FOLDERS[0])
    for number, name in enumerate(("old", "new")):
        for attempt in ("0", "9", "10"):
            os.close(begin_run(runs / name, attempt))
        os.utime(runs / name / RUN_MARK, (number, number))
    newest = runs / "new" / "10"
    for given in ([str(runs)], [str(runs / "new")], ["--last"], [str(newest)]):
        ran = run("watch", *given, "--timeout", "0.01")
        assert ran.code == EXIT.TIMEOUT, given
        assert f"{newest}/firstfault/errors" in ran.err.splitlines()[0], given
    assert run("watch").code == run("watch", str(runs), "--last").code == EXIT.USAGE
    empty = tmp_path / "empty"
    empty.mkdir()
    ran = run("watch", str(empty), "--timeout", "0.01")
    assert f"watching {empty}/firstfault/errors" in ran.err
