"""The deck of a failed attempt: which pod writes it, its content,
and that it exists before any pod exits.
"""

import html
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import pytest
from flyteidl.core.literals_pb2 import LiteralMap
from flytekit import Deck, task
from flytekit.bin import entrypoint
from flytekit.bin.entrypoint import setup_execution
from flytekit.core.mock_stats import MockStats
from flytekit.deck.deck import TimeLineDeck

from firstfault.errors import UsageError
from firstfault.layout import error_key_for, roster_key_for
from firstfault.model import NodePresence, Phase, Subject, WorkerError, Writer
from firstfault.recorder.folder import NodeFolder
from firstfault.testing import make_error, make_job, make_presence
from firstfault.wire.documents import encode, encode_presence
from firstfault_torch.worker.worker_monitor import WorkerMonitor
from flytekitplugins.firstfault import Elastic, PyTorch, Worker, deck, entrypoints, rank_decks
from flytekitplugins.firstfault.deck import elect_node, publish_deck
from flytekitplugins.firstfault.flyte_engine import FlyteEngine, await_deck
from flytekitplugins.firstfault.rank_decks import DeckKeeper
from tests.prefix import Prefix
from tests.recordings import make_node_context
from tests.waiting import wait_until

LONG_S = 60.0


# --- configuration --------------------------------------------------------------------------------

CONFIGURATIONS: dict[str, Callable[..., Any]] = {
    "Elastic": lambda **fields: Elastic(increase_shared_mem=False, **fields),
    "PyTorch": lambda **fields: PyTorch(
        worker=Worker(replicas=1), increase_shared_mem=False, **fields
    ),
}


def _train() -> float:
    """Stand in for a training loop."""
    return 1.0


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_deck_true_without_enable_deck_is_refused_at_definition(kind: str) -> None:
    """deck=True on a task without decks is refused when the task is defined;
    the message says what to write.
    """
    with pytest.raises(UsageError) as caught:
        task(task_config=CONFIGURATIONS[kind](deck=True))(_train)
    assert (
        str(caught.value)
        == f"{kind}(deck=True) needs a task that has decks; write @task(..., enable_deck=True)"
    )


@pytest.mark.parametrize("kind", CONFIGURATIONS)
@pytest.mark.parametrize(
    ("asked", "enabled", "expected"),
    [(None, True, True), (True, True, True), (False, True, False), (None, False, False)],
)
def test_a_pod_writes_the_deck_if_enabled_but_a_local_call_never(
    kind: str,
    asked: bool | None,
    enabled: bool,
    *,
    expected: bool,
    prefix: Prefix,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pod writes the report into the deck if decks are enabled and `deck` is not False;
    a local call never does.
    """
    own = task(task_config=CONFIGURATIONS[kind](deck=asked), enable_deck=enabled)(_train)
    assert not own.publishes_deck
    monkeypatch.setattr(entrypoint, "_get_stats", lambda **_: MockStats())
    with setup_execution(raw_output_data_prefix=prefix.uri):
        assert own.publishes_deck is expected


# --- election -------------------------------------------------------------------------------------


def _entry(phase: Phase, group_rank: int, *ranks: int, **fields: Any) -> NodePresence:
    return make_presence(
        phase,
        node=f"worker-{group_rank}",
        group_rank=group_rank,
        nodes=3,
        ranks=ranks,
        **fields,
    )


def _failed(group_rank: int, *ranks: int, **fields: Any) -> NodePresence:
    return _entry(Phase.FAILED, group_rank, *ranks, **fields)


def _agent(group_rank: int, writer: Writer) -> WorkerError:
    node = f"worker-{group_rank}"
    return make_error(
        None,
        node=node,
        group_rank=group_rank,
        subject=Subject.AGENT,
        writer=writer,
        exception=None,
    )


JOINED = tuple(_entry(Phase.JOINED, node, 2 * node, 2 * node + 1) for node in range(3))
ALL = (_failed(0, 0, 1), _failed(1, 2, 3), _failed(2, 4, 5))
ELECTIONS: dict[str, tuple[tuple[NodePresence, ...], tuple[WorkerError, ...], str | None]] = {
    "rank 0's node": ((*JOINED, *ALL), (), "worker-0"),
    "rank 0 is not on group rank 0": (
        (_failed(0, 2, 3), _failed(1, 0, 1), _failed(2, 4, 5)),
        (),
        "worker-1",
    ),
    "rank 0's node had finished": ((_entry(Phase.SUCCEEDED, 0, 0, 1), *ALL[1:]), (), "worker-0"),
    "rank 0's node is silent": ((JOINED[0], *ALL[1:]), (), "worker-1"),
    "only failed nodes besides its own": (
        (JOINED[0], _entry(Phase.SUCCEEDED, 1, 2, 3), ALL[2]),
        (),
        "worker-2",
    ),
    "no node knows its ranks": ((_failed(0), _failed(1)), (), "worker-0"),
    "the recorder reported rank 0's agent": (ALL, (_agent(0, Writer.RECORDER),), "worker-1"),
    "two agents were lost": (
        ALL,
        (_agent(0, Writer.WORKER), _agent(1, Writer.RECORDER)),
        "worker-2",
    ),
    "a terminated agent": (ALL, (_agent(0, Writer.AGENT),), "worker-0"),
    "no node has ended": (JOINED, (), None),
    "an empty roster": ((), (), None),
}


@pytest.mark.parametrize(("roster", "failures", "expected"), ELECTIONS.values(), ids=ELECTIONS)
def test_rank_0s_node_writes_the_deck_else_the_first_failed_node(
    roster: tuple[NodePresence, ...], failures: tuple[WorkerError, ...], expected: str | None
) -> None:
    """Rank 0's node writes the deck if its agent lives, else the first failed node,
    in any order of the roster.
    """
    chosen = [elect_node(make_job(*failures, roster=entries)) for entries in (roster, roster[::-1])]
    assert [place.node if place is not None else None for place in chosen] == [expected, expected]


def test_a_pod_that_succeeded_and_exited_does_not_write_the_deck() -> None:
    """If pods exit when they succeed, as with a master, only a failed pod is elected."""
    job = make_job(roster=(_entry(Phase.SUCCEEDED, 0, 0), _failed(1, 1)))
    place = elect_node(job, live_phases=(Phase.FAILED,))
    assert getattr(place, "node", None) == "worker-1"


# --- keeping rank 0's decks -----------------------------------------------------------------------


@pytest.fixture
def decks() -> list[Deck]:
    """Return a list that stands in for flytekit's, to which the task function adds."""
    return []


@pytest.fixture
def keeper(decks: list[Deck], tmp_path: Path) -> Iterator[DeckKeeper]:
    """Keep the decks in the test's folder."""
    keeping = DeckKeeper(NodeFolder(tmp_path), 0, decks)
    yield keeping
    keeping.end()
    for thread in threading.enumerate():
        if thread.name == "firstfault-decks":
            thread.join(LONG_S)  # it may still log


def _deck(name: str, text: str) -> Deck:
    return Deck(name, text, auto_add_to_deck=False)


def read_saved_decks(folder: Path, round_: int = 0) -> list[tuple[str, str]]:
    return [
        (item.name, item.html) for item in rank_decks.read_kept_decks(NodeFolder(folder), round_)
    ]


def test_the_keeper_saves_decks_soon_and_at_the_end(
    decks: list[Deck], keeper: DeckKeeper, tmp_path: Path
) -> None:
    """The file has a deck seconds after it was added,
    and all decks after `check_now` and after `end`.
    """
    assert read_saved_decks(tmp_path) == []
    decks.append(_deck("loss", "<b>1</b>"))
    wait_until(lambda: read_saved_decks(tmp_path), seconds=LONG_S)
    assert read_saved_decks(tmp_path) == [("loss", "<b>1</b>")]
    decks[0].append("<b>½</b>")
    keeper.check_now(LONG_S)
    assert read_saved_decks(tmp_path) == [("loss", "<b>1</b>\n<b>½</b>")]
    decks.append(_deck("samples", "a \udc80 b"))
    keeper.end()
    assert read_saved_decks(tmp_path) == [("loss", "<b>1</b>\n<b>½</b>"), ("samples", "a ? b")]
    assert read_saved_decks(tmp_path, 1) == []
    assert [path.name for path in tmp_path.iterdir()] == ["decks-0.json"]


def test_the_timeline_alone_is_not_saved(
    decks: list[Deck], keeper: DeckKeeper, tmp_path: Path
) -> None:
    """The timeline is not kept; without another deck no file is written."""
    decks.append(TimeLineDeck("Timeline", auto_add_to_deck=False))
    keeper.end()
    assert list(tmp_path.iterdir()) == []


def test_too_large_decks_are_left_out_with_one_log_line(
    decks: list[Deck],
    keeper: DeckKeeper,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Decks over the limit are left out with one log line; the others are kept."""
    monkeypatch.setattr(rank_decks, "_MAX_DECK_BYTES", 100)
    decks += [_deck("small", "1"), _deck("large", "x" * 100), _deck("last", "2")]
    keeper.check_now(LONG_S)
    decks[2].append("3")
    keeper.end()
    assert read_saved_decks(tmp_path) == [("small", "1"), ("last", "2\n3")]
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "firstfault: if this attempt fails, its deck will lack 'large', "
    )


def test_a_deck_that_raises_causes_one_warning_and_no_file(
    decks: list[Deck],
    keeper: DeckKeeper,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A deck whose text cannot be read causes one warning; no file is written."""

    class BrokenDeck(Deck):
        @property
        def html(self) -> str:
            raise ValueError("no data")

    decks.append(BrokenDeck("broken", auto_add_to_deck=False))
    keeper.end()
    assert "firstfault: failed while keeping the decks (ValueError: no data)" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_keeper_without_its_folder_writes_and_logs_nothing(
    tmp_path: Path, decks: list[Deck], caplog: pytest.LogCaptureFixture
) -> None:
    """If the node's folder is gone, the keeper does not make it again and logs nothing."""
    keeper = DeckKeeper(NodeFolder(tmp_path / "gone"), 0, decks)
    decks.append(_deck("loss", "1"))
    keeper.end()
    assert not (tmp_path / "gone").exists()
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("change", "rank", "expected"),
    [
        ({}, "0", [("loss", "1")]),
        ({}, "1", []),
        ({}, "no number", []),
        ({"node_folder": ""}, "0", []),
    ],
    ids=["rank 0", "another rank", "no rank", "no recorder"],
)
def test_only_rank_0s_decks_are_saved(
    change: dict[str, Any],
    rank: str,
    expected: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only rank 0's decks are kept."""
    node_context = replace(
        make_node_context(str(tmp_path), 1.0, node_folder=str(tmp_path)), **change
    )
    for name, value in {**node_context.to_environment(), "RANK": rank}.items():
        monkeypatch.setenv(name, value)
    monitor = WorkerMonitor(FlyteEngine())
    entrypoints._store_decks([_deck("loss", "1")], monitor)
    monitor.close()
    assert read_saved_decks(tmp_path) == expected


# --- one pod writes, the others wait --------------------------------------------------------------

MARK = b"<!-- ours -->"


@pytest.mark.parametrize(
    "published", [False, True], ids=["no deck before", "a deck that the task published"]
)
def test_the_wait_ends_with_the_deck_that_has_the_report(published: bool, prefix: Prefix) -> None:
    """The wait ends with the deck that has the report, not with one that the task published."""
    prefix.folder.mkdir()
    place = prefix.folder / "deck.html"
    if published:
        place.write_bytes(b"<p>of the task</p>")
    found: list[bool] = []
    waiting = threading.Thread(
        target=lambda: found.append(await_deck(prefix.uri, MARK, None, LONG_S))
    )
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    place.write_bytes(b"<p>" + MARK + b"</p>")
    waiting.join(LONG_S)
    assert found == [True]


def test_a_pod_stops_waiting_for_the_deck_after_the_limit(
    prefix: Prefix, caplog: pytest.LogCaptureFixture
) -> None:
    """A pod stops waiting after the limit, and logs it."""
    assert await_deck(prefix.uri, MARK, None, 0.2) is False
    assert (
        "the elected pod has not written the deck within 0.2 s; not waiting any longer"
        in caplog.text
    )


@dataclass
class Pod:
    """A `PyTorch` pod that Flyte's own entrypoint runs in this process."""

    prefix: Prefix
    rank: int

    def run(self, **fields: Any) -> None:
        """Run a task that makes a deck and fails."""

        @task(task_config=CONFIGURATIONS["PyTorch"](settle_seconds=0.2, **fields), enable_deck=True)
        def train() -> None:
            Deck("progress", "<p>loss 0.25</p>")
            raise ValueError("bad batch <17>")

        inputs = self.prefix.folder.with_name("inputs.pb")
        inputs.write_bytes(LiteralMap().SerializeToString())
        with (
            click.Context(click.Command("pyflyte-execute")) as command,
            setup_execution(str(self.prefix.folder.with_name("raw")), self.prefix.uri) as context,
        ):
            command.params["output_prefix"] = self.prefix.uri
            entrypoint._dispatch_execute(context, lambda: train, str(inputs), self.prefix.uri)

    def another(self, rank: int) -> None:
        """Write the documents of another pod that failed earlier."""
        node = "job-master-0" if rank == 0 else f"job-worker-{rank - 1}"
        error = make_error(rank, node=node, group_rank=rank, group_world_size=2, message="the root")
        done = make_presence(Phase.FAILED, node=node, group_rank=rank, nodes=2, ranks=(rank,))
        for folder, name, data in (
            ("errors", error_key_for(error), encode(error)),
            ("roster", roster_key_for(done), encode_presence(done)),
        ):
            path = self.prefix.folder / "firstfault" / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    @property
    def deck(self) -> str:
        return (self.prefix.folder / "deck.html").read_text()


@pytest.fixture(params=[0, 1], ids=["the master", "a worker"])
def pod(request: pytest.FixtureRequest, prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> Pod:
    """Make this process look like a pod of a job with a master and a worker."""
    rank: int = request.param
    name = "job-worker-0" if rank else "job-master-0"
    for variable, value in {"RANK": str(rank), "WORLD_SIZE": "2", "HOSTNAME": name}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(entrypoint, "_get_stats", lambda **_: MockStats())
    return Pod(prefix, rank)


def _build_tabs(page: str) -> list[str]:
    return [
        html.unescape(name)
        for name in re.findall(r'<li onclick="handleLinkClick\(this\)">(.*?)</li>', page)
    ]


# flytekit's entrypoint reads a deprecated property of every task
@pytest.mark.filterwarnings("ignore:`disable_deck` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("with_peer", [False, True], ids=["alone", "beside the other pod"])
def test_a_failed_masters_pod_writes_the_deck_and_workers_wait_for_it(
    pod: Pod, with_peer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master's pod, if it failed, writes the deck: the report, then its own decks;
    a worker's pod waits for it.
    """
    waits = with_peer and pod.rank
    monkeypatch.setattr(deck, "DECK_TIMEOUT_SECONDS", 0.3 if waits else LONG_S)
    if with_peer:
        pod.another(1 - pod.rank)
    pod.run()
    assert (pod.prefix.folder / "error.pb").exists()
    if waits:
        assert not (pod.prefix.folder / "deck.html").exists(), "the master's pod writes it"
        return
    assert _build_tabs(pod.deck) == ["firstfault", "Timeline", "progress"]
    assert "bad batch &lt;17&gt;" in pod.deck


@pytest.mark.parametrize("pod", [1], indirect=True)
def test_a_pod_does_not_change_the_deck_of_another_pod(pod: Pod) -> None:
    """A pod does not change the deck of another pod,
    and flytekit's deprecated property is not read.
    """
    pod.another(0)
    theirs = f"<p>{deck._REPORT_MARK}</p>"
    (pod.prefix.folder / "deck.html").write_text(theirs)
    pod.run()
    assert (pod.prefix.folder / "error.pb").exists()
    assert pod.deck == theirs


@pytest.mark.filterwarnings("ignore:`disable_deck` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("pod", [1], indirect=True)
def test_deck_false_leaves_each_pod_flytekits_deck(pod: Pod) -> None:
    """With deck=False each pod writes flytekit's usual deck, also if another pod has failed."""
    pod.another(0)
    pod.run(deck=False)
    assert _build_tabs(pod.deck) == ["Timeline", "progress"]


@pytest.mark.filterwarnings("ignore:`disable_deck` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("pod", [0], indirect=True)
def test_the_verdict_is_written_although_the_report_cannot_be_drawn(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the report cannot be drawn, the verdict and flytekit's deck are still written."""
    monkeypatch.setattr(
        "firstfault.render.html.deck_html", Mock(side_effect=ValueError("no template"))
    )
    pod.run()
    assert "firstfault: failed while writing the deck (ValueError: no template)" in caplog.text
    assert (pod.prefix.folder / "error.pb").exists()
    assert _build_tabs(pod.deck) == ["Timeline", "progress"]


def test_the_report_comes_first_and_decks_of_its_name_are_renamed() -> None:
    """The report's tab is first; a task's deck of that name is renamed;
    rank 0's deck replaces the agent's namesake.
    """
    children = [_deck("loss", "of rank 0"), _deck("firstfault", "of the task")]
    others = [_deck("loss", "of the agent"), _deck("Timeline", "")]
    found = deck._build_tabs(_deck("firstfault", "ours"), children, others)
    assert [(item.name, item.html) for item in found] == [
        ("firstfault", "ours"),
        ("loss", "of rank 0"),
        ("firstfault (task)", "of the task"),
        ("Timeline", ""),
    ]


def test_sigterm_ends_the_wait_for_another_pods_deck(
    prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM ends the wait for another pod's deck."""
    monkeypatch.setattr(deck, "DECK_TIMEOUT_SECONDS", LONG_S)
    shutdown_requested = threading.Event()
    shutdown_requested.set()
    report: Any = type("Report", (), {"job": make_job(roster=ALL)})
    node_context = make_node_context(prefix.uri, 1.0, incarnation=1)
    own: Any = type("OwnConclusion", (), {"report": report})
    publication: Any = type(
        "Publication", (), {"own": own, "node_context": node_context, "for_all": False}
    )
    began = time.monotonic()
    assert publish_deck(publication, "train", shutdown_requested=shutdown_requested) is False
    assert time.monotonic() - began < LONG_S / 2
