"""The spool: whole documents with their receipts."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import TYPE_CHECKING

import pytest

from firstfault.model import Receipt
from firstfault.recorder import NodeFolder, Spool
from firstfault.recorder.folder import Settings

if TYPE_CHECKING:
    from pathlib import Path

_RECEIPT = {"durable": True, "fault_to_durable_ns": 1, "error": "", "rank": 0}
SETTINGS = Settings("s3://bucket/attempt", 5.0, agent_pid=12, listener=3, left_seconds=2.0)


def _set_up(path: Path) -> NodeFolder:
    path.mkdir(exist_ok=True)
    folder = NodeFolder(path)
    folder.set_up(SETTINGS)
    return folder


def test_spool(tmp_path: Path) -> None:
    """The spool has whole documents under their names, each with its receipt once that is written whole."""
    spool = Spool(tmp_path / "there")
    assert spool.documents() == []
    spool.add("b.pb", b"0")
    spool.add("b.pb", b"2")  # replaces it
    path = spool.add("a.pb", b"1")
    receipt = Receipt("a.pb", durable=True, fault_to_durable_ns=12, rank=3)
    spool.add_receipt(receipt)
    for name in ("c.pb.part", "d.pb.held.part"):
        (tmp_path / "there" / name).write_bytes(b"3")
    (tmp_path / "there" / "b.pb.receipt.json").write_text('{"durable": tr')
    first, second = spool.documents(held=True)
    assert (first.name, first.path, first.path.read_bytes(), first.receipt) == ("a.pb", path, b"1", receipt)
    assert (second.name, second.path.read_bytes(), second.receipt) == ("b.pb", b"2", None)
    assert (first.is_durable, second.is_durable) == (True, False)


def test_a_durable_receipt_stays(tmp_path: Path) -> None:
    """A receipt keeps the reason of a loss; a late failure of a first try does not make a loss of a success."""
    spool = Spool(tmp_path)
    spool.add("a.pb", b"1")
    lost = Receipt("a.pb", durable=False, error="slow")
    durable = Receipt("a.pb", durable=True, fault_to_durable_ns=12)
    for receipt, kept in ((lost, lost), (durable, durable), (lost, durable)):
        spool.add_receipt(receipt)
        (document,) = spool.documents()
        assert (document.receipt, document.is_durable) == (kept, kept.durable)


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        None,
        "durable",
        {"durable": True},
        {**_RECEIPT, "durable": "yes"},
        {**_RECEIPT, "error": 7},
        {**_RECEIPT, "rank": -1},
        {**_RECEIPT, "rank": True},
        {**_RECEIPT, "rank": 2**32},
        {**_RECEIPT, "fault_to_durable_ns": 1.5},
        {**_RECEIPT, "fault_to_durable_ns": 2**63},
    ],
    ids=repr,
)
def test_a_receipt_that_no_spool_wrote(content: object, tmp_path: Path) -> None:
    """A receipt with missing or wrong fields is none, and the document stays."""
    spool = Spool(tmp_path)
    spool.add("a.pb", b"1")
    (tmp_path / "a.pb.receipt.json").write_text(json.dumps(content))
    assert [(document.name, document.receipt) for document in spool.documents()] == [("a.pb", None)]
    (tmp_path / "a.pb.receipt.json").write_text("[" * 5_000)
    assert spool.documents()[0].receipt is None


def test_held_and_withdrawn_documents(tmp_path: Path) -> None:
    """A held document is returned only on request, under its own name; a withdrawn one is marked, and stays."""
    spool = Spool(tmp_path / "there")
    spool.withdraw("a.pb")
    spool.add("a.pb", b"1", held=True)
    spool.add("b.pb", b"2")
    receipt = Receipt("a.pb", durable=True)
    spool.add_receipt(receipt)
    assert [(document.name, document.withdrawn) for document in spool.documents()] == [("b.pb", False)]
    first, second = spool.documents(held=True)
    assert (first.name, first.path.name, first.withdrawn, first.receipt) == ("a.pb", "a.pb.held", True, receipt)
    assert second.name == "b.pb"
    spool.add("a.pb", b"released")
    first, _ = spool.documents(held=True)
    assert (first.path.name, first.path.read_bytes()) == ("a.pb", b"released")


def test_the_folder_of_a_node(tmp_path: Path) -> None:
    """Each process has a spool of its own in the node's folder; `spools` leaves out `last_words`."""
    folder = _set_up(tmp_path)
    assert NodeFolder(folder.path).read_settings() == SETTINGS
    assert folder.spools() == []
    folder.spool("agent").add("a.pb", b"1")
    folder.spool("0-1").add("b.pb", b"2")
    folder.last_words.add("document.pb", b"3")
    assert [[document.name for document in spool.documents()] for spool in folder.spools()] == [["b.pb"], ["a.pb"]]
    assert {folder.socket.parent, folder.spool("0-1").folder.parent.parent} == {tmp_path}


def test_a_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    """A document that is added during or after the removal does not recreate the node's folder."""
    folder = _set_up(tmp_path / "firstfault-x")
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
