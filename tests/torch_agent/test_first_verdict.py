"""The first verdict that is published on a failure counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from firstfault.layout import ERROR_FILE, VERDICT
from firstfault.testing import make_error
from firstfault.wire.documents import encode, encode_seal
from firstfault_torch import engine as engines
from firstfault_torch import run
from firstfault_torch.engine import PlainEngine, Publication
from firstfault_torch.options import Options
from tests.prefix import Prefix
from tests.recordings import conclude_node, seal_conclusion


def _publication(prefix: Prefix, message: str, rank: int = 0) -> Publication:
    node_context = prefix.node_context()
    return seal_conclusion(
        conclude_node(node_context, [make_error(rank, message=message)]), node_context
    )


def _publish(prefix: Prefix, publication: Publication) -> Publication:
    engine = PlainEngine(str(prefix.folder.parent), 0, "worker-0")
    context = replace(
        publication.node_context,
        identity=replace(publication.node_context.identity, handover_uri=prefix.uri),
    )
    settings = run.ExitSettings(engine, Options(), threading.Event())
    return run._publish(replace(publication, node_context=context), settings)


def _age(document: Publication, seconds: int) -> bytes:
    seal = replace(document.sealed.seal, timestamp_ns=time.time_ns() - seconds * 10**9)
    return encode_seal(seal)


@pytest.fixture
def at_attempt(prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> Prefix:
    """The engine's attempt lies at the prefix."""
    identity = PlainEngine.identity
    monkeypatch.setattr(
        PlainEngine, "identity", lambda self: replace(identity(self), output_prefix=prefix.uri)
    )
    prefix.folder.mkdir()
    return prefix


def test_another_nodes_verdict_stays_and_is_adopted(at_attempt: Prefix) -> None:
    """Also the next attempt gets that one."""
    other = _publication(at_attempt, "another", rank=1)
    own = _publication(at_attempt, "own")
    assert _publish(at_attempt, other).durable
    result = _publish(at_attempt, own)
    assert (result.durable, result.own) == (True, None)
    for name in (ERROR_FILE, VERDICT):
        assert (at_attempt.folder / name).read_bytes() == other.sealed.document


def test_concurrent_nodes_all_report_one_verdict(at_attempt: Prefix) -> None:
    own = [_publication(at_attempt, f"of node {rank}", rank) for rank in range(4)]
    results: list[Publication] = []
    threads = [
        threading.Thread(target=lambda each=each: results.append(_publish(at_attempt, each)))
        for each in own
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (document,) = {result.sealed.document for result in results}
    assert (at_attempt.folder / ERROR_FILE).read_bytes() == document


@pytest.mark.parametrize(
    ("write", "stays"),
    [
        (partial(_age, seconds=3600), False),
        (lambda _: encode(make_error(0, message="an error file of Flyte's own")), False),
        (lambda _: b"damaged", False),
        (
            lambda other: encode_seal(replace(other.sealed.seal, json='{"version": 99}')),
            True,
        ),
    ],
    ids=["on an older failure", "no verdict", "damaged", "of another version"],
)
def test_a_verdict_on_another_failure_is_replaced(
    write: Callable[[Publication], bytes], stays: bool, at_attempt: Prefix
) -> None:
    """One that can't be read stays: it may be on this failure."""
    found = write(_publication(at_attempt, "another", rank=1))
    (at_attempt.folder / ERROR_FILE).write_bytes(found)
    own = _publication(at_attempt, "own")
    result = _publish(at_attempt, own)
    assert result.durable is not stays
    left = (at_attempt.folder / ERROR_FILE).read_bytes()
    assert left == (found if stays else own.sealed.document)


@pytest.mark.parametrize("message", ["own", "another"])
def test_an_upload_without_an_answer_may_have_landed(
    message: str, at_attempt: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the storage then counts: this node's verdict, or another one's."""
    landed = _publication(at_attempt, message)
    own = landed if message == "own" else _publication(at_attempt, "own")

    def land(publication: Publication, *_: Any) -> Publication:
        (at_attempt.folder / ERROR_FILE).write_bytes(landed.sealed.document)
        return publication

    monkeypatch.setattr(engines, "upload_verdict", land)
    result = _publish(at_attempt, own)
    assert result.durable
    assert result.sealed.document == landed.sealed.document
