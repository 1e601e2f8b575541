"""An exception of any kind on any rank, in both of Flyte's modes: the verdict has rank,
node and traceback.

CI runs two of the 24 combinations; ``make matrix`` runs all and prints their times.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.plugin.running import running

TRAINING = Path(__file__).parent / "jobs" / "raises.py"
KINDS = ("plain", "recoverable", "subclass", "hostile")
CODES = {"plain": "USER:RuntimeError", "hostile": "USER:RuntimeError"}
TYPES = {
    "plain": "ValueError",
    "recoverable": "FlyteRecoverableException",
    "subclass": "ShardMissingError",
    "hostile": "HostileError",
}


@dataclass(frozen=True)
class Case:
    kind: str
    rank: int
    store: str
    start_method: str
    monitor_interval: str
    multi_file: bool

    def __str__(self) -> str:
        mode = "multi" if self.multi_file else "single"
        return f"{self.kind}-rank{self.rank}-{self.store}-{self.start_method}-{self.monitor_interval}s-{mode}"


_DESIGNS = (
    ("folder", "spawn", "0.1", False),
    ("s3", "fork", "5", True),
    ("folder", "spawn", "5", True),
    ("s3", "spawn", "0.1", True),
    ("folder", "fork", "0.1", True),
    ("s3", "fork", "5", False),
)
ALL = [
    Case(kind, (index + number) % 4, *design)
    for index, kind in enumerate(KINDS)
    for number, design in enumerate(_DESIGNS)
]
IN_CI = [ALL[6 + 1]]
CHOSEN = ALL if os.environ.get("FIRSTFAULT_MATRIX") == "all" else IN_CI


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Collect one line for each run and print all at the end."""
    lines: list[str] = []
    yield lines
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\nfault_to_durable fault_to_verdict total (s)  case", *lines, sep="\n")


@pytest.mark.jobs
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.s3] * (case.store == "s3")) for case in CHOSEN],
    ids=str,
)
def test_a_raise_is_named(
    case: Case,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    table: list[str],
) -> None:
    """The verdict, and the error that stock Flyte reads, name the rank that raised;
    its type decides the retry.
    """
    environment: dict[str, str] = {}
    options = [
        f"MATRIX_START_METHOD={case.start_method}",
        f"MATRIX_MONITOR_INTERVAL={case.monitor_interval}",
    ]
    options += ["_F_DES=Earliest"] * case.multi_file
    options = [option for variable in options for option in ("--env", variable)]
    if case.store == "s3":
        server = request.getfixturevalue("s3")
        environment = server.environment()
        options += ["--store", server.uri("matrix")]
    inputs = {"kind": case.kind, "rank": case.rank}
    with running(
        TRAINING,
        "train",
        tmp_path,
        inputs,
        *options,
        environment=environment,
        cwd=tmp_path,
    ) as run:
        ended = run.end()
    verdict, decision, seen = (
        ended.verdict,
        ended.attempt["decision"],
        ended.attempt["engine"]["error_seen"],
    )
    seconds = ended.attempt["seconds"]
    recoverable = case.kind in {"recoverable", "subclass"}
    assert len(ended.result["attempts"]) == 1
    assert verdict["scope"] == "rank"
    assert verdict["ranks"] == [case.rank]
    # the rendezvous assigns group ranks: the pod's name and the rank may have different numbers
    assert "-worker-" in verdict["node"]
    assert f"{TYPES[case.kind]}, rank {case.rank} on {verdict['node']}" in verdict["headline"]
    assert "in raise_fault" in verdict["message"]
    assert "in train" in verdict["message"]
    assert verdict["code"] == CODES.get(case.kind, "USER:Recoverable")
    assert verdict["victims"]["count"] == 3
    assert verdict["coverage"]["complete"]
    assert decision["retry"] is recoverable
    assert decision["kind"] == ("RECOVERABLE" if recoverable else "NON_RECOVERABLE")
    assert decision["origin"] == "USER"
    assert decision["enforced"]
    assert ended.status == (11 if recoverable else 10)
    assert (ended.attempt["engine"]["job"], seen["code"], seen["worker"], seen["timestamp"]) == (
        "Succeeded",
        verdict["code"],
        verdict["node"],
        verdict["timestamp"],
    ), "stock Flyte reads the same when the job ends"
    assert (seen["kind"], seen["origin"]) == (decision["kind"], decision["origin"])
    first_line = seen["message"].splitlines()[0]
    what = "recoverable" if case.kind == "recoverable" else TYPES[case.kind]
    assert first_line.startswith(f"{what} rank {case.rank} worker-")
    assert ("no retry" in first_line) is not recoverable
    assert "in raise_fault" in seen["message"]
    assert 0 < seconds["fault_to_durable"] < seconds["fault_to_verdict"] < seconds["total"]
    table.append(
        f"{seconds['fault_to_durable']:16.3f} {seconds['fault_to_verdict']:16.3f}"
        f" {seconds['total']:9.1f}  {case}"
    )
