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
SETTINGS = Settings("s3://bucket/attempt", 5.0, agent_pid=12, listener=3)


def _set_up(path: Path) -> NodeFolder:
    path.mkdir(exist_ok=True)
    folder = NodeFolder(path)
    folder.set_up(SETTINGS)
    return folder


def _names(spool: Spool, *, held: bool = False) -> list[str]:
    return [document.name for document in spool.documents(held=held)]


def test_spool(tmp_path: Path) -> None:
    """The spool has a document under its name, with its receipt once that is written."""
    spool = Spool(tmp_path / "there")
    assert spool.documents() == []
    spool.add("b.pb", b"2")
    path = spool.add("a.pb", b"1")
    receipt = Receipt("a.pb", durable=True, fault_to_durable_ns=12, rank=3)
    spool.add_receipt(receipt)
    first, second = spool.documents()
    assert (first.name, first.path, first.path.read_bytes(), first.receipt) == ("a.pb", path, b"1", receipt)
    assert (second.name, second.path.read_bytes(), second.receipt) == ("b.pb", b"2", None)
    assert (first.is_durable, second.is_durable) == (True, False)


def test_spool_shows_whole_files_only(tmp_path: Path) -> None:
    """The spool leaves out a half-written document and a half-written receipt."""
    spool = Spool(tmp_path)
    spool.add("a.pb", b"1")
    (tmp_path / "b.pb.part").write_bytes(b"2")
    (tmp_path / "c.pb.held.part").write_bytes(b"3")
    (tmp_path / "a.pb.receipt.json").write_text('{"durable": tr')
    (only,) = spool.documents(held=True)
    assert (only.name, only.receipt) == ("a.pb", None)


def test_a_document_is_replaced_whole(tmp_path: Path) -> None:
    """A second document of the same name replaces the first one."""
    spool = Spool(tmp_path)
    spool.add("a.pb", b"1")
    spool.add("a.pb", b"2")
    assert [document.path.read_bytes() for document in spool.documents()] == [b"2"]


def test_a_durable_receipt_stays(tmp_path: Path) -> None:
    """A first try that hung and failed after the second one had succeeded does not make a loss of it."""
    spool = Spool(tmp_path)
    spool.add("a.pb", b"1")
    durable = Receipt("a.pb", durable=True, fault_to_durable_ns=12)
    for receipt in (
        Receipt("a.pb", durable=False, error="slow"),
        durable,
        Receipt("a.pb", durable=False, error="late"),
    ):
        spool.add_receipt(receipt)
    (document,) = spool.documents()
    assert document.receipt == durable


def test_a_receipt_of_a_loss(tmp_path: Path) -> None:
    """A receipt keeps the reason for a failed upload."""
    spool = Spool(tmp_path)
    spool.add("a.pb", b"1")
    lost = Receipt("a.pb", durable=False, error="the storage is on fire")
    spool.add_receipt(lost)
    (document,) = spool.documents()
    assert document.receipt == lost
    assert not document.is_durable


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


def test_a_withdrawn_document(tmp_path: Path) -> None:
    """A withdrawn document stays in the spool and is marked."""
    spool = Spool(tmp_path / "there")
    spool.withdraw("a.pb")
    spool.add("a.pb", b"1")
    spool.add("b.pb", b"2")
    assert [(document.name, document.withdrawn) for document in spool.documents()] == [("a.pb", True), ("b.pb", False)]


@pytest.mark.parametrize("held", [True, False])
def test_a_held_document(tmp_path: Path, held: bool) -> None:
    """`documents` returns a held document only on request, under its own name and with its marks."""
    spool = Spool(tmp_path)
    spool.add("a.pb", b"1", held=True)
    spool.add("b.pb", b"2")
    spool.withdraw("a.pb")
    receipt = Receipt("a.pb", durable=True)
    spool.add_receipt(receipt)
    assert _names(spool, held=held) == (["a.pb", "b.pb"] if held else ["b.pb"])
    if held:
        document = spool.documents(held=True)[0]
        assert (document.path.name, document.withdrawn, document.receipt) == ("a.pb.held", True, receipt)


def test_a_held_document_that_is_released(tmp_path: Path) -> None:
    """A held document that is added again is one document, which is not held."""
    spool = Spool(tmp_path)
    spool.add("a.pb", b"held", held=True)
    spool.add("a.pb", b"released")
    (document,) = spool.documents(held=True)
    assert (document.path.name, document.path.read_bytes()) == ("a.pb", b"released")


def test_the_folder_of_a_node(tmp_path: Path) -> None:
    """Each process has a spool of its own in the node's folder; `spools` leaves out `last_words`."""
    folder = _set_up(tmp_path)
    assert folder.spools() == []
    folder.spool("agent").add("a.pb", b"1")
    folder.spool("0-1").add("b.pb", b"2")
    folder.last_words.add("document.pb", b"3")
    assert [_names(spool) for spool in folder.spools()] == [["b.pb"], ["a.pb"]]
    assert {folder.socket.parent, folder.spool("0-1").folder.parent.parent} == {tmp_path}


def test_settings_come_back_as_they_were(tmp_path: Path) -> None:
    """A recorder reads the settings that its agent wrote."""
    assert NodeFolder(_set_up(tmp_path).path).read_settings() == SETTINGS


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
