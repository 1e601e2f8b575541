"""Dumps of torch's flight recorder: the groups of each rank, who was behind in them,
and files that are no dumps.
"""

import json
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from firstfault.conclude import conclude
from firstfault.evidence.progress import group_progress
from firstfault.model import Scope, Verdict
from firstfault.reading.assemble import Snapshot, assemble
from firstfault.strategies.rules import evidence
from firstfault.testing import make_error
from firstfault.wire.flight_recorder import parse_flight_recorder
from firstfault_logs import flight
from firstfault_logs.flight import documents_of, dumps_at, is_dump
from tests.readers.commands import Ran
from tests.readers.conftest import Attempt
from tests.readers.scenes import died, reported_job

_WORLD = range(8)
_GROUPS = [
    ("default_pg", tuple(_WORLD)),
    *(("data", pair) for pair in ((0, 2), (1, 3), (4, 6), (5, 7))),
    *(("unused", pair) for pair in ((0, 2), (5, 7))),
    *(("tensor", pair) for pair in ((0, 1), (2, 3), (4, 5), (6, 7))),
    *(("pipeline", pair) for pair in ((0, 4), (1, 5), (2, 6), (3, 7))),
    *(("expert", members) for members in ((0, 1, 2, 3), (4, 5, 6, 7))),
    *(("single", (rank,)) for rank in _WORLD),
]
"""Of 8 ranks, in the order in which all of them create their groups;
torch names a group by its place in it.
"""


def dump(rank: int, came: dict[str, tuple[int, int]], *, entries: bool = True) -> dict[str, Any]:
    """Return a dump: by group how many collectives were called and had ended;
    in pipelines they are messages.
    """
    own = [
        (str(name), what, members)
        for name, (what, members) in enumerate(_GROUPS)
        if rank in members
    ]
    told = {what: came.get(what, (3, 3)) for _, what, _ in own if what != "unused"}
    works = [
        {
            "pg_id": number,
            "process_group": (name, what),
            "profiling_name": (
                "nccl:recv 0<-1" if what == "pipeline" and rank < 4 else f"nccl:{_CALLS[what]}"
            ),
            "collective_seq_id": 0 if what == "pipeline" else work,
            "p2p_seq_id": work if what == "pipeline" else 0,
            "is_p2p": what == "pipeline",
            "state": "scheduled",
            "retired": False,
            "input_sizes": [[2]],
            "output_sizes": [[2]],
        }
        for number, (name, what, _) in enumerate(own)
        for work in range(told.get(what, (0, 0))[1] + 1, told.get(what, (0, 0))[0] + 1)
    ]
    status = {
        str(number): {
            f"last_{end}_collective": count for end, count in zip(_ENDS, told[what], strict=True)
        }
        for number, (_, what, _) in enumerate(own)
        if what in told
    }
    config = {
        name: {"name": name, "desc": what, "ranks": str(list(members))}
        for name, what, members in own
    }
    kept = works if entries else []
    return {
        "version": "2.10",
        "nccl_version": "2.27",
        "pg_config": config,
        "pg_status": status,
        "entries": kept,
    }


_CALLS = {"pipeline": "send 1->0", "expert": "all_to_all"} | dict.fromkeys(
    ("default_pg", "data", "tensor", "single"), "all_reduce"
)
_ENDS = ("enqueued", "completed")
_WAITS = {"tensor": (8, 5), "pipeline": (9, 7)}
_BEHIND = {"tensor": (5, 5)}
_GPU_ERROR = {"tensor": (8, 3), "expert": (5, 3), "pipeline": (9, 4)}
_REDUCES = {"data": (6, 5)}
_RECEIVES = {"pipeline": (9, 7)}
_NOTHING = dict[str, tuple[int, int]]()
_PARTNER = {"tensor": (8, 5), "expert": (5, 5)}


def write(folder: Path, dumps: dict[int, Any], prefix: str = "_dump_") -> list[Path]:
    """Write each rank's dump as torch does."""
    files = [
        (folder / f"{prefix}{rank}", pickle.dumps(content, protocol=2))
        for rank, content in dumps.items()
    ]
    for path, data in files:
        path.write_bytes(data)
    return [path for path, _ in files]


def conclude_from_dumps(paths: Iterable[Path]) -> Verdict:
    """Return the verdict on dumps alone, without a retry."""
    documents, unreadable = documents_of(list(paths))
    conclusion = conclude(
        assemble(Snapshot(documents=tuple(documents), unreadable=tuple(unreadable)))
    )
    assert not conclusion.decision.retry
    return conclusion.verdict


@pytest.mark.parametrize("anchors", [True, False], ids=["with entries", "with pg_status alone"])
def test_each_rank_numbers_its_own_groups(anchors: bool) -> None:
    """The same number is another group on the next rank:
    names and members are paired in the order of creation.
    """
    dumps = {rank: dump(rank, {"tensor": (8, 5)}, entries=anchors) for rank in (0, 2, 4)}
    for rank, number in ((0, "2"), (2, "2")):
        dumps[rank]["pg_config"].pop("5")  # where torch lists a group only once it is used
        assert number not in dumps[rank]["pg_status"]
    came = {
        rank: {item.group: item for item in parse_flight_recorder([dumps[rank]])} for rank in dumps
    }
    assert [came[0][f"{what}"].members for what in ("tensor (7)", "data (1)")] == [(0, 1), (0, 2)]
    assert [came[2][f"{what}"].members for what in ("tensor (8)", "data (1)")] == [(2, 3), (0, 2)]
    assert came[4]["tensor (9)"].enqueued == 8
    assert came[0]["default_pg"].members == tuple(_WORLD)


def test_a_group_of_unknown_members_is_not_compared() -> None:
    """A number whose group is not known is compared with no other rank's,
    and no rank is missing in its groups.
    """
    unknown = dump(4, {"tensor": (8, 5)}, entries=False)
    unknown["pg_config"].clear()
    progress = parse_flight_recorder([unknown])
    assert progress[0].group == ""
    assert "default_pg" in {item.group for item in progress}
    known = make_error(5, collectives=parse_flight_recorder([dump(5, {"tensor": (9, 5)})]))
    recorded, _ = group_progress([make_error(4, collectives=progress), known])
    assert recorded["tensor (9)"].keys() == {5}


def test_two_groups_of_one_name_are_not_compared() -> None:
    """Ranks that create groups in different orders give one name to two groups,
    which are not compared.
    """
    early = dump(0, {"tensor": (8, 5)})
    late = dump(4, {"tensor": (2, 2)}, entries=False)
    late["pg_config"]["7"] = late["pg_config"].pop("9")
    workers = [
        make_error(rank, collectives=parse_flight_recorder([told]))
        for rank, told in ((0, early), (4, late))
    ]
    recorded, _ = group_progress(workers)
    assert {
        group: [*members] for group, members in recorded.items() if group.startswith("tensor")
    } == {
        "tensor (7) of ranks 0, 1": [0],
        "tensor (7) of ranks 4, 5": [4],
    }


_ONE = {**dict.fromkeys(_WORLD, _WAITS), 5: _BEHIND}
_TWO = {**dict.fromkeys(_WORLD, _WAITS), 2: _BEHIND, 7: {"tensor": (4, 4)}}
_GPUS = {
    **dict.fromkeys(_WORLD, _WAITS),
    4: _GPU_ERROR,
    5: _PARTNER,
    6: {**_GPU_ERROR, "tensor": (7, 3)},
    7: _PARTNER,
}
# ranks 0 and 4 are one pipeline: 0 waits for 4, and so both are behind in their data groups
_STAGES = {
    **dict.fromkeys(_WORLD, _REDUCES),
    0: {"data": (5, 5), "pipeline": (9, 7)},
    4: {"data": (5, 5)},
}
_MESSAGES = {**dict.fromkeys(_WORLD, _RECEIVES), 3: {}}
# rank 0 is behind rank 1 in their tensor group because it waits for rank 2
_AHEAD = {"tensor": (8, 7)}
_DATA = {
    **dict.fromkeys(_WORLD, _AHEAD),
    0: {"tensor": (7, 7), "data": (4, 3)},
    2: {"tensor": (7, 7)},
}


@pytest.mark.parametrize(
    ("came", "ranks", "words"),
    [
        (
            _ONE,
            (5,),
            "hang, rank 5: it called 5 collectives of group tensor (9) of ranks 4, 5, its peers 8",
        ),
        (
            _TWO,
            (2, 7),
            (
                "rank 2 called 5 collectives of group tensor (8) of ranks 2, 3, its peers 8; rank 7"
                " called 4"
            ),
        ),
        (
            _GPUS,
            (4, 6),
            (
                "rank 4 saw the end of 3 collectives of group tensor (9) of ranks 4, 5, its peers"
                " 5; rank 6"
            ),
        ),
        (_STAGES, (4,), "it called 5 collectives of group data (3) of ranks 4, 6, its peers 6"),
        (_MESSAGES, (3,), "it had no collective outstanding, and 7 peers waited"),
        (_DATA, (2,), "it called 7 collectives of group tensor (8) of ranks 2, 3, its peers 8"),
        (dict.fromkeys(_WORLD, _WAITS), (), "undetermined"),
        (dict.fromkeys(_WORLD, _NOTHING), (), "undetermined"),
    ],
    ids=[
        "one",
        "two",
        "stuck GPUs",
        "a pipeline",
        "messages alone",
        "a victim",
        "all wait",
        "none waits",
    ],
)
def test_all_ranks_behind_and_no_others_are_named(
    came: dict[int, dict[str, tuple[int, int]]],
    ranks: tuple[int, ...],
    words: str,
    tmp_path: Path,
) -> None:
    """All guilty ranks and no others are named, by the smallest groups,
    in which each rank has other numbers.
    """
    dumps = {rank: dump(rank, told, entries=told is not _BEHIND) for rank, told in came.items()}
    verdict = conclude_from_dumps(write(tmp_path, dumps))
    assert verdict.ranks == ranks
    assert words in verdict.message if ranks else verdict.scope is Scope.UNDETERMINED
    assert verdict.confidence == ("medium" if ranks else "low")


def test_an_unnamed_group_does_not_contradict_the_flight_recorders() -> None:
    """What a watchdog printed of a group that it does not name says nothing
    against the flight recorders.
    """
    log = (
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE) ran for"
        " 600021 milliseconds"
    )
    failures = [
        died(
            rank,
            "SIGABRT",
            -6,
            log_tail=f"{log} before timing out\n",
            collectives=parse_flight_recorder([dump(rank, came)]),
        )
        for rank, came in _GPUS.items()
    ]
    assert evidence(reported_job(*failures, nodes=4)).ranks == (4, 6)


def test_two_root_causes_in_different_groups_are_no_victims(
    run: Callable[..., Ran], tmp_path: Path
) -> None:
    """Two ranks that are the root cause together may have waited in different groups."""
    write(tmp_path, {rank: dump(rank, came) for rank, came in _GPUS.items()})
    assert json.loads(run("show", "--json", str(tmp_path)).out)["victims_by_state"]["victim"] == [
        0,
        1,
        2,
        3,
        5,
        7,
    ]


@pytest.mark.parametrize("lost", [[6], [4, 5, 6, 7]], ids=["one", "a node's"])
def test_a_single_rank_without_a_dump_is_a_suspect(lost: list[int], tmp_path: Path) -> None:
    """One of 8 is a suspect. Beside a rank that is behind neither is the root cause;
    half of the job proves little.
    """
    paths = write(tmp_path, {rank: dump(rank, _WAITS) for rank in _WORLD if rank not in lost})
    verdict = conclude_from_dumps(paths)
    assert (verdict.ranks, verdict.confidence) == ((6,) if lost == [6] else (), "low")
    (tmp_path / "_dump_6").write_bytes(b"\x80\x02}q\x00(X\x07\x00")
    write(tmp_path, {0: dump(0, _BEHIND)})
    verdict = conclude_from_dumps(dumps_at(tmp_path))
    assert verdict.ranks == (() if lost == [6] else (0,))
    assert verdict.confidence == "low"
    assert {suspect.rank for suspect in verdict.suspects} == ({0, 6} if lost == [6] else set())


class _Runs:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pickle.dumps(_Runs()), "asks for posix.system, and a dump holds plain types only"),
        (pickle.dumps(dump(0, _WAITS))[:300], "damaged or cut off"),
        (b"", "damaged or cut off"),
        (b'{"entries": [', "damaged or cut off"),
        (b"[" * 100_000, "damaged or cut off"),
        (pickle.dumps([1]), "neither entries nor pg_status"),
        (json.dumps(dump(5, {})).encode(), "does not end with the rank of a member of its groups"),
        (b"{" + b" " * 4096, "more than the limit of 4.0 KiB"),
    ],
    ids=[
        "runs code",
        "cut off",
        "empty",
        "JSON cut off",
        "no dump",
        "other data",
        "another rank's",
        "too large",
    ],
)
def test_a_file_that_is_no_dump_is_unreadable_and_never_run(
    data: bytes,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is unreadable, with the reason in one line, and nothing in it runs."""
    if "limit" in reason:
        monkeypatch.setattr(flight, "_MAX_BYTES", 4096)
    path = tmp_path / "_dump_0"
    path.write_bytes(data)
    documents, (unreadable,) = documents_of([path])
    assert not documents
    assert reason in unreadable.reason
    assert "\n" not in unreadable.reason


@pytest.mark.parametrize(
    "name", ["_dump_5", "nccl_trace_rank_5", "nccl_trace_rank_5.json", "job45", "run-2026_5"]
)
@pytest.mark.parametrize(
    "written", [pickle.dumps, lambda told: json.dumps(told).encode()], ids=["pickle", "JSON"]
)
def test_a_dump_may_have_any_prefix_in_any_folder(
    name: str, written: Callable[[Any], bytes], tmp_path: Path
) -> None:
    """A dump may have any prefix, also one that ends with a digit, in a folder of any depth."""
    path = tmp_path / "node-1" / name
    path.parent.mkdir()
    path.write_bytes(written(dump(5, _WAITS)))
    (tmp_path / "step_5").write_text('{"loss": 1}')
    assert dumps_at(tmp_path) == dumps_at(tmp_path / "node-1" / name[:3]) == [path]
    (document,), _ = documents_of([path])
    assert (document.rank, document.place.world_size, document.documents[0].uri) == (
        5,
        8,
        str(path),
    )
    assert document.message == "waited in nccl:all_reduce number 6 of tensor (9)"
    assert not is_dump(tmp_path / "absent_5")


def test_the_newest_dump_of_a_rank_counts(tmp_path: Path) -> None:
    """Of one name the newest counts; gloo's recorder, which has groups of its own,
    counts beside NCCL's.
    """
    (tmp_path / "first").mkdir()
    (first,) = write(tmp_path / "first", {5: dump(5, _BEHIND)})
    (second,) = write(tmp_path, {5: dump(5, _WAITS)})
    os.utime(first, (1, 1))
    of_gloo = {"pg_id": 0, "process_group": ("0", "default_pg"), "profiling_name": "gloo:barrier"}
    status = {"0": {"last_enqueued_collective": 2, "last_completed_collective": 2}}
    told = {
        "entries": [{**of_gloo, "collective_seq_id": 2}],
        "pg_status": status,
        "version": "2.10",
    }
    (gloo,) = write(tmp_path, {5: told}, "Gloo_")
    (document,), _ = documents_of([second, first, gloo])
    counts = {item.group: item.enqueued for item in document.collectives}
    assert (counts["tensor (9)"], counts["default_pg"], counts["default_pg, gloo"]) == (8, 3, 2)


def test_dumps_and_logs_add_to_documents_only_what_they_lack(
    run: Callable[..., Ran], attempt: Attempt, tmp_path: Path
) -> None:
    """A job's own documents get the collectives of dumps; a log adds a rank without a document,
    and no more.
    """
    log = (
        "watchdog caught collective operation timeout: WorkNCCL(SeqNum=6, OpType=ALLREDUCE) ran for"
        " 9 milliseconds"
    )
    attempt.write(
        *(
            died(rank, "SIGABRT", -6, log_tail=f"{log} before timing out\n")
            for rank in _ONE
            if rank != 5
        )
    )
    (tmp_path / "dumps").mkdir()
    write(tmp_path / "dumps", {rank: dump(rank, came) for rank, came in _ONE.items()})
    raised = ("Traceback (most recent call last):", '  File "t.py", line 1, in f', "OSError: gone")
    (tmp_path / "job.out").write_text(
        "".join(f"[rank5]: {line}\n" for line in raised) + "[rank2]: ValueError: no\n"
    )
    alone, dumped, logged = (
        json.loads(run("show", "--json", *more, attempt.uri).out)["verdict"]
        for more in ((), ("--with", str(tmp_path / "dumps")), ("--with", str(tmp_path / "job.out")))
    )
    assert (alone["ranks"], dumped["ranks"], dumped["category"]) == ([], [5], "hang")
    assert (logged["ranks"], logged["victims"]["count"], "OSError" in logged["headline"]) == (
        [5],
        7,
        True,
    )
