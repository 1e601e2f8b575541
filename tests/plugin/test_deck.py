"""The deck of an attempt that failed: who writes it, what is in it, and that it is there before any pod leaves."""

from __future__ import annotations

import html
import re
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click
import pytest
from flyteidl.core.literals_pb2 import LiteralMap
from flytekit import Deck, task
from flytekit.bin import entrypoint
from flytekit.bin.entrypoint import setup_execution
from flytekit.core.mock_stats import MockStats
from flytekit.deck.deck import TimeLineDeck

from firstfault.errors import UsageError
from firstfault.layout.keys import error_key_for, roster_key_for
from firstfault.model import NodePresence, Phase, Subject, WorkerError, Writer
from firstfault.testing import make_error, make_job, make_presence
from firstfault.wire.documents import encode, encode_presence
from firstfault_torch.node.files import NodeFiles
from firstfault_torch.worker.recording import WorkerMonitor
from flytekitplugins.firstfault import Elastic, PyTorch, Worker, entrypoints
from flytekitplugins.firstfault.deck import keep as kept_decks
from flytekitplugins.firstfault.deck import write as deck
from flytekitplugins.firstfault.deck.keep import DeckKeeper
from flytekitplugins.firstfault.deck.write import elected, leave_deck
from flytekitplugins.firstfault.flyte_engine import FlyteEngine
from flytekitplugins.firstfault.outputs import await_deck
from tests.recordings import recording_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.prefix import Prefix

LONG_S = 30.0
SOON_S = 1.0


# --- configuration --------------------------------------------------------------------------------------------------

CONFIGURATIONS: dict[str, Callable[..., Any]] = {
    "Elastic": lambda **fields: Elastic(increase_shared_mem=False, **fields),
    "PyTorch": lambda **fields: PyTorch(worker=Worker(replicas=1), increase_shared_mem=False, **fields),
}


def _train() -> float:
    """Stand in for a training loop."""
    return 1.0


@pytest.mark.parametrize("kind", CONFIGURATIONS)
@pytest.mark.parametrize("options", [{}, {"enable_deck": False}], ids=["by default", "off"])
def test_a_deck_that_is_asked_for_and_off(kind: str, options: dict[str, bool]) -> None:
    """A task that insists on a deck and has none is refused when it is defined, with what to write."""
    with pytest.raises(UsageError) as caught:
        task(task_config=CONFIGURATIONS[kind](deck=True), **options)(_train)
    assert str(caught.value) == f"{kind}(deck=True) needs a task that has decks; write @task(..., enable_deck=True)"


@pytest.mark.parametrize("kind", CONFIGURATIONS)
@pytest.mark.parametrize(
    ("asked", "enabled", "expected"),
    [(None, True, True), (True, True, True), (False, True, False), (None, False, False), (False, False, False)],
)
def test_whether_there_is_a_report(
    kind: str, asked: bool | None, enabled: bool, *, expected: bool, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pod the report is a deck if the task has decks and does not say no; in a local call it never is."""
    own = task(task_config=CONFIGURATIONS[kind](deck=asked), enable_deck=enabled)(_train)
    assert not own.leaves_deck
    monkeypatch.setattr(entrypoint, "_get_stats", lambda **_: MockStats())
    with setup_execution(raw_output_data_prefix=prefix.uri):
        assert own.leaves_deck is expected


# --- election -------------------------------------------------------------------------------------------------------


def _entry(phase: Phase, group_rank: int, *ranks: int, **fields: Any) -> NodePresence:
    return make_presence(phase, node=f"worker-{group_rank}", group_rank=group_rank, nodes=3, ranks=ranks, **fields)


def _failed(group_rank: int, *ranks: int, **fields: Any) -> NodePresence:
    return _entry(Phase.FAILED, group_rank, *ranks, **fields)


def _agent(group_rank: int, writer: Writer) -> WorkerError:
    """Return what is said about an agent that failed: by itself, or in its stead."""
    node = f"worker-{group_rank}"
    return make_error(None, node=node, group_rank=group_rank, subject=Subject.AGENT, writer=writer, exception=None)


JOINED = tuple(_entry(Phase.JOINED, node, 2 * node, 2 * node + 1) for node in range(3))
ALL = (_failed(0, 0, 1), _failed(1, 2, 3), _failed(2, 4, 5))


@pytest.mark.parametrize(
    ("roster", "failures", "expected"),
    [
        ((*JOINED, *ALL), (), "worker-0"),
        ((_failed(0, 2, 3), _failed(1, 0, 1), _failed(2, 4, 5)), (), "worker-1"),
        ((_entry(Phase.SUCCEEDED, 0, 0, 1), *ALL[1:]), (), "worker-0"),
        ((JOINED[0], *ALL[1:]), (), "worker-1"),
        ((JOINED[0], _entry(Phase.SUCCEEDED, 1, 2, 3), ALL[2]), (), "worker-2"),
        ((_failed(0), _failed(1)), (), "worker-0"),
        (ALL, (_agent(0, Writer.RECORDER),), "worker-1"),
        (ALL, (_agent(0, Writer.WORKER), _agent(1, Writer.RECORDER)), "worker-2"),
        (ALL, (_agent(0, Writer.AGENT),), "worker-0"),
        (JOINED, (), None),
        ((), (), None),
    ],
    ids=[
        "rank 0's node",
        "rank 0's node, by its ranks",
        "rank 0's node had finished",
        "rank 0's node is silent",
        "of the others only who failed",
        "nobody knows the ranks",
        "the recorder spoke for rank 0's agent",
        "two agents were lost",
        "an agent that was told to go",
        "nobody is done",
        "nobody said anything",
    ],
)
def test_election(roster: tuple[NodePresence, ...], failures: tuple[WorkerError, ...], expected: str | None) -> None:
    """Rank 0's node writes the deck while its agent lives, else the first node that failed; the order is nothing."""
    chosen = [elected(make_job(*failures, roster=entries)) for entries in (roster, roster[::-1])]
    assert [place.node if place is not None else None for place in chosen] == [expected, expected]


def test_a_pod_that_has_succeeded_is_gone() -> None:
    """Where pods leave when they succeed, as with a master, only one that failed can write."""
    job = make_job(roster=(_entry(Phase.SUCCEEDED, 0, 0), _failed(1, 1)))
    place = elected(job, staying=(Phase.FAILED,))
    assert place is not None
    assert place.node == "worker-1"


# --- what rank 0's decks hold ---------------------------------------------------------------------------------------


@pytest.fixture
def decks() -> list[Deck]:
    """Stand in for flytekit's list, to which the task function adds."""
    return []


@pytest.fixture
def keeper(decks: list[Deck], tmp_path: Path) -> Iterator[DeckKeeper]:
    """Keep them in the folder of the test."""
    keeping = DeckKeeper(NodeFiles(tmp_path), 0, decks)
    yield keeping
    keeping.end()


def _deck(name: str, text: str) -> Deck:
    return Deck(name, text, auto_add_to_deck=False)


def _kept(folder: Path, round_: int = 0) -> list[tuple[str, str]]:
    return [(item.name, item.html) for item in kept_decks.kept_decks(NodeFiles(folder), round_)]


def test_decks_are_kept(decks: list[Deck], keeper: DeckKeeper, tmp_path: Path) -> None:
    """What was added when the process is about to be stopped, and what is there at its end, is kept whole."""
    assert _kept(tmp_path) == []
    decks.append(_deck("loss", "<b>1</b>"))
    keeper.look_now(LONG_S)
    assert _kept(tmp_path) == [("loss", "<b>1</b>")]
    decks[0].append("<b>½</b>")
    decks.append(_deck("samples", "a \udc80 b"))
    keeper.end()
    assert _kept(tmp_path) == [("loss", "<b>1</b>\n<b>½</b>"), ("samples", "a ? b")]
    assert _kept(tmp_path, 1) == []
    assert [path.name for path in tmp_path.iterdir()] == ["decks-0.json"]


def test_decks_are_kept_while_the_training_runs(decks: list[Deck], keeper: DeckKeeper, tmp_path: Path) -> None:
    """Nobody has to say that something was added: it is found within seconds."""
    decks.append(_deck("loss", "1"))
    deadline = time.monotonic() + LONG_S
    while not _kept(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _kept(tmp_path) == [("loss", "1")]


def test_nothing_to_keep(decks: list[Deck], keeper: DeckKeeper, tmp_path: Path) -> None:
    """The timeline, which has no text of its own, is not kept; without another deck nothing is written."""
    decks.append(TimeLineDeck("Timeline", auto_add_to_deck=False))
    keeper.end()
    assert list(tmp_path.iterdir()) == []


def test_too_large_decks(
    decks: list[Deck],
    keeper: DeckKeeper,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What does not fit is left out, which the log says once; the others are kept."""
    monkeypatch.setattr(kept_decks, "_MAX_BYTES", 100)
    decks += [_deck("small", "1"), _deck("large", "x" * 100), _deck("last", "2")]
    keeper.look_now(LONG_S)
    decks[2].append("3")
    keeper.end()
    assert _kept(tmp_path) == [("small", "1"), ("last", "2\n3")]
    (record,) = caplog.records
    assert record.getMessage().startswith("should this attempt fail, it goes without the decks 'large': ")


def test_a_deck_that_raises(
    decks: list[Deck], keeper: DeckKeeper, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A deck of the user's own class that cannot be read costs a warning, and nothing else."""

    class BrokenDeck(Deck):
        @property
        def html(self) -> str:
            raise ValueError("no data")

    decks.append(BrokenDeck("broken", auto_add_to_deck=False))
    keeper.end()
    assert "firstfault failed while keeping the decks (ValueError: no data)" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone(tmp_path: Path, decks: list[Deck], caplog: pytest.LogCaptureFixture) -> None:
    """A process that outlives its agent finds no folder, makes none and complains of nothing."""
    keeper = DeckKeeper(NodeFiles(tmp_path / "gone"), 0, decks)
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
def test_whose_decks_are_kept(
    change: dict[str, Any], rank: str, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0's decks are the task's."""
    recording = replace(recording_at(str(tmp_path), 1.0, node_folder=str(tmp_path)), **change)
    for name, value in {**recording.environment(), "RANK": rank}.items():
        monkeypatch.setenv(name, value)
    monitor = WorkerMonitor(FlyteEngine())
    entrypoints._keep([_deck("loss", "1")], monitor)
    monitor.close()
    assert _kept(tmp_path) == expected


# --- one pod writes, the others wait --------------------------------------------------------------------------------

MARK = b"<!-- ours -->"


@pytest.mark.parametrize("published", [False, True], ids=["no deck before", "a deck that the task published"])
def test_waiting_for_the_deck(published: bool, prefix: Prefix) -> None:
    """The wait ends with the deck in which the report is, not with one that the task published itself."""
    prefix.folder.mkdir()
    place = prefix.folder / "deck.html"
    if published:
        place.write_bytes(b"<p>of the task</p>")
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(await_deck(prefix.uri, MARK, None, LONG_S)))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    place.write_bytes(b"<p>" + MARK + b"</p>")
    waiting.join(LONG_S)
    assert found == [True]


def test_a_deck_that_never_comes(prefix: Prefix, caplog: pytest.LogCaptureFixture) -> None:
    """A pod does not wait for ever, and says so."""
    assert await_deck(prefix.uri, MARK, None, 0.2) is False
    assert "the pod that writes the deck has not within 0.2 s; this pod ends without it" in caplog.text


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
        """Let another pod have failed before."""
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
        """What it left."""
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


def _tabs(page: str) -> list[str]:
    return [html.unescape(name) for name in re.findall(r'<li onclick="handleLinkClick\(this\)">(.*?)</li>', page)]


# flytekit's entrypoint asks every task for what flytekit deprecates
@pytest.mark.filterwarnings("ignore:`disable_deck` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("with_peer", [False, True], ids=["alone", "beside the other pod"])
def test_a_pod_with_a_master(pod: Pod, with_peer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master's pod writes the deck if it failed, its own decks after the report; a worker's waits and leaves it."""
    waits = with_peer and pod.rank
    monkeypatch.setattr(deck, "_WRITING_S", 0.3 if waits else LONG_S)
    if with_peer:
        pod.another(1 - pod.rank)
    pod.run()
    assert (pod.prefix.folder / "error.pb").exists()
    if waits:
        assert not (pod.prefix.folder / "deck.html").exists(), "the master's pod would have written it"
        return
    assert _tabs(pod.deck) == ["firstfault", "Timeline", "progress"]
    assert "bad batch &lt;17&gt;" in pod.deck


@pytest.mark.parametrize("pod", [1], indirect=True)
def test_a_pod_that_leaves_the_deck_alone(pod: Pod) -> None:
    """The deck that another pod has written stays as it is, and flytekit's deprecated property is not even asked."""
    pod.another(0)
    theirs = f"<p>{deck._MARK}</p>"
    (pod.prefix.folder / "deck.html").write_text(theirs)
    pod.run()
    assert (pod.prefix.folder / "error.pb").exists()
    assert pod.deck == theirs


@pytest.mark.filterwarnings("ignore:`disable_deck` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("pod", [1], indirect=True)
def test_a_report_that_is_not_wanted(pod: Pod) -> None:
    """With deck=False flytekit's own deck is what it would be without us, whoever else has failed."""
    pod.another(0)
    pod.run(deck=False)
    assert _tabs(pod.deck) == ["Timeline", "progress"]


@pytest.mark.filterwarnings("ignore:`disable_deck` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("pod", [0], indirect=True)
def test_a_report_that_cannot_be_drawn(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the report cannot be drawn, the verdict and flytekit's own deck are there all the same."""

    def broken(_: object) -> str:
        raise ValueError("no template")

    monkeypatch.setattr("firstfault.render.html.deck_html", broken)
    pod.run()
    assert "firstfault failed while writing the deck (ValueError: no template)" in caplog.text
    assert (pod.prefix.folder / "error.pb").exists()
    assert _tabs(pod.deck) == ["Timeline", "progress"]


def test_names_that_meet() -> None:
    """Our tab is the first one whatever the task's are called, and no deck of rank 0's hides behind its agent's."""
    children = [_deck("loss", "of rank 0"), _deck("firstfault", "of the task")]
    others = [_deck("loss", "of the agent"), _deck("Timeline", "")]
    found = deck._tabs(_deck("firstfault", "ours"), children, others)
    assert [(item.name, item.html) for item in found] == [
        ("firstfault", "ours"),
        ("loss", "of rank 0"),
        ("firstfault (task)", "of the task"),
        ("Timeline", ""),
    ]


def test_a_pod_that_is_told_to_go(prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal ends the wait for another pod's deck."""
    monkeypatch.setattr(deck, "_WRITING_S", LONG_S)
    told = threading.Event()
    told.set()
    report: Any = type("Report", (), {"job": make_job(roster=ALL)})
    recording = recording_at(prefix.uri, 1.0, incarnation=1)
    verdict: Any = type("Verdict", (), {"report": report, "recording": recording})
    began = time.monotonic()
    assert leave_deck(verdict, "train", give_up=told) is False
    assert time.monotonic() - began < SOON_S
