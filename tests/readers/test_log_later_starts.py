"""Several starts of a program in one log: only the last start's end counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from firstfault.cli import EXIT
from firstfault_logs.completion.loops import Loops
from tests.readers.commands import Ran

OPENING = [
    "Card 5 is reserved for this job",
    "Reading windows of prices from prices.parquet",
    "Building a model with 12 layers",
    "Optimizer has 3 groups of parameters",
]
EPILOGUE = "Card 5 is released"
RAISED = [
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 12, in main',
    "    step(batch)",
    "ValueError: no labels in shard 9",
]


def list_epochs(count: int, begin: int = 0) -> list[str]:
    """Return the lines of some epochs."""
    return [f"Epoch {epoch}: loss 0.{epoch + 3}" for epoch in range(begin, begin + count)]


def list_iterations(begin: int, end: int, per_epoch: int, total: int = 200) -> list[str]:
    """Return lines with an iteration of the whole training, and its epoch."""
    return [
        f"[TRAIN] epoch: {step // per_epoch + 1}, iter: {step}/{total}, loss: 0.{step}"
        for step in range(begin, end + 1, 10)
    ]


@pytest.fixture
def show(run: Callable[..., Ran], tmp_path: Path) -> Callable[[Sequence[str]], Ran]:
    """Return a function that shows a log of these lines."""

    def show_lines(lines: Sequence[str]) -> Ran:
        (tmp_path / "job.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return run("show", str(tmp_path / "job.log"))

    return show_lines


@pytest.mark.parametrize(
    "later",
    [
        OPENING,
        [*OPENING[:2], *OPENING[3:], "Epoch 0: loss 0.9"],
        [*OPENING, "Epoch 0: loss 0.9"],
        ["Epoch 0: loss 0.9"],
        ["srun: job 78 queued and waiting for resources", "Epoch 1: loss 0.9"],
    ],
)
@pytest.mark.parametrize(
    "end", ["Training finished", "Job 77 State=COMPLETED", "Total training time: 3:02:11"]
)
def test_an_earlier_starts_end_is_no_success_of_a_later_one(
    show: Callable[[Sequence[str]], Ran], end: str, later: list[str]
) -> None:
    """The end of an earlier start is no success of a later one."""
    assert show([*OPENING, *list_epochs(5), end]).code == EXIT.OK
    assert show([*OPENING, *list_epochs(5), end, *later]).code == EXIT.NOTHING_FOUND


def test_starts_before_the_last_do_not_matter(show: Callable[[Sequence[str]], Ran]) -> None:
    """Starts before the last one don't matter: unfinished, finished or failed."""
    start = [*OPENING, *list_epochs(5)]
    for earlier in (start, [*start, "Training finished"], [*start, *RAISED]):
        assert show([*earlier, *start, "Training finished"]).code == EXIT.OK


def test_a_success_in_the_middle_proves_nothing_about_the_last_start(
    show: Callable[[Sequence[str]], Ran],
) -> None:
    """A success in the middle proves nothing about the last start."""
    start = [*OPENING, *list_epochs(5)]
    assert show([*start, *RAISED, *start, "Training finished", *OPENING]).code == EXIT.NOTHING_FOUND


@pytest.mark.parametrize(
    "below",
    [
        ["Best model is of epoch 2: loss 0.5"],
        ["Epoch 4: loss 0.7"],
        ["Epoch 3: loss 0.6"],
        ["Optimizer has 3 groups of parameters", "Test loss 0.3"],
    ],
)
def test_a_best_epoch_or_slow_rank_is_no_later_start(
    show: Callable[[Sequence[str]], Ran], below: list[str]
) -> None:
    """A best epoch, the last line of a slower rank, and one line of the opening aren't a start."""
    assert show([*OPENING, *list_epochs(5), "Training finished", *below]).code == EXIT.OK


FORMS_OF_RANKS = [
    '{{"level": "INFO", "rank": {}, "message": "{}"}}',
    "[default0]:2031-05-06 07:08:09,123 INFO [rank {}] train: {}",
    "{}: {}",
]


@pytest.mark.parametrize("form", FORMS_OF_RANKS)
def test_steps_below_an_end_are_no_work_if_all_ranks_stop_alike(
    show: Callable[[Sequence[str]], Ran], form: str
) -> None:
    """Each rank's steps are in one piece and stop alike: those below an end are no further work."""
    steps = [f"step {step} loss 0.7" for step in range(6)]
    blocks = [[form.format(rank, step) for step in steps] for rank in range(4)]
    for end in ("Training finished", form.format(0, "Training finished")):
        assert show([*blocks[0], end, *blocks[3], *blocks[1], *blocks[2]]).code == EXIT.OK
        assert show([*blocks[2], *blocks[0], end, *blocks[3], *blocks[1]]).code == EXIT.OK


@pytest.mark.parametrize("form", FORMS_OF_RANKS)
@pytest.mark.parametrize(
    "later",
    [
        [(3, range(6)), (1, range(4))],
        [(3, range(8)), (1, range(8))],
        [(3, range(6)), (0, range(6))],
        [(3, range(6)), (3, range(6))],
        [(3, range(3)), (2, range(4))],
    ],
)
def test_nothing_is_proven_if_a_rank_goes_on_below_an_end(
    show: Callable[[Sequence[str]], Ran], form: str, later: Sequence[tuple[int, Sequence[int]]]
) -> None:
    """Nothing is proven if a rank below an end stops earlier, goes further or starts again."""
    first = [form.format(0, f"step {step} loss 0.7") for step in range(6)]
    below = [form.format(rank, f"step {step} loss 0.7") for rank, steps in later for step in steps]
    assert show([*first, "Training finished", *below]).code == EXIT.NOTHING_FOUND


def test_steps_without_a_rank_below_an_end_prove_nothing(
    show: Callable[[Sequence[str]], Ran],
) -> None:
    """Steps that name no rank may be those of another training."""
    steps = [f"step {step} loss 0.7" for step in range(6)]
    named = [f"[rank 1] {step}" for step in steps]
    for first, later in ((steps, steps), (named, steps), (steps, named)):
        assert show([*first, "Training finished", *later]).code == EXIT.NOTHING_FOUND


@pytest.mark.parametrize(
    "line",
    [
        "[2031-01-01 10:00:00,748][main][INFO] - finish one epoch",
        "[2031-01-01 10:00:00,748][train][INFO] - finished loading 3 shards",
        "2031-01-01 10:00:00 - trainer - INFO - done with shard 7",
        "Trainer finished one epoch",
    ],
)
def test_a_loggers_name_or_one_epoch_is_no_sentence_about_the_job(
    show: Callable[[Sequence[str]], Ran], line: str
) -> None:
    """The name of a logger is no subject of a sentence, and one epoch is a part of a training."""
    assert show([*OPENING, *list_epochs(5), line]).code == EXIT.NOTHING_FOUND


@pytest.mark.parametrize(
    "line",
    [
        "[2031-01-01 10:00:00,748][main][INFO] - training finished",
        "2031-01-01 10:00:00 - trainer - INFO - done with the benchmark",
    ],
)
def test_a_sentence_behind_a_level_counts(show: Callable[[Sequence[str]], Ran], line: str) -> None:
    """Behind the level of a line is its message."""
    assert show([*OPENING, *list_epochs(5), line]).code == EXIT.OK


@pytest.mark.parametrize(
    "lines",
    [
        list_iterations(10, 200, per_epoch=60),
        [*list_iterations(10, 50, per_epoch=60), *list_iterations(10, 200, per_epoch=60)],
        [
            *list_iterations(10, 130, per_epoch=60),
            *list_iterations(10, 200, per_epoch=60),
            "Parameters: 52",
        ],
    ],
)
def test_a_counter_across_epochs_is_the_trainings(
    show: Callable[[Sequence[str]], Ran], lines: list[str]
) -> None:
    """A counter that goes on from epoch to epoch is the training's, also after a restart."""
    assert show([*OPENING, *lines]).code == EXIT.OK


@pytest.mark.parametrize(
    "lines",
    [
        list_iterations(10, 190, per_epoch=60),
        [*list_iterations(10, 200, per_epoch=60), *list_iterations(10, 130, per_epoch=60)],
        list_iterations(10, 200, per_epoch=900),
        [
            f"epoch: {epoch}, iter: {step}/20, loss: 0.{step}"
            for epoch in range(1, 6)
            for step in range(1, 21)
        ],
        [
            f"epoch: {epoch}, iter: {step}/20, loss: 0.{step}"
            for epoch in (1, 1, 2)
            for step in range(1, 21)
        ],
    ],
)
def test_a_counter_of_a_part_proves_nothing(
    show: Callable[[Sequence[str]], Ran], lines: list[str]
) -> None:
    """A counter below its end, after a restart too, and one that may be of a single epoch."""
    assert show([*OPENING, *lines]).code == EXIT.NOTHING_FOUND


def test_first_values_of_all_counters_are_a_restart() -> None:
    """The first values of all counters in a line are a restart;
    those of a later epoch are an inner loop.
    """
    restarted = Loops()
    inner = Loops()
    for number, line in enumerate(list_iterations(10, 130, 60) + list_iterations(10, 200, 60)):
        restarted.take(line, number)
    for number, line in enumerate(
        f"epoch: {epoch}, iter: {step}/9" for epoch in (1, 2) for step in range(1, 10)
    ):
        inner.take(line, number)
    assert restarted.find_finished() is not None
    assert inner.find_finished() is None


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ([], [*OPENING, *list_epochs(40), EPILOGUE]),
        ([*OPENING, *list_epochs(40), EPILOGUE], [*OPENING, *list_epochs(30), EPILOGUE]),
        ([*OPENING, *list_epochs(40), EPILOGUE], [*OPENING, *list_epochs(40)]),
        ([*OPENING, *list_epochs(40), EPILOGUE], [*OPENING, *list_epochs(40), EPILOGUE]),
        ([*OPENING, *list_epochs(40)], [*OPENING, *list_epochs(40)]),
        ([*OPENING, *list_epochs(37), EPILOGUE], [*OPENING, *list_epochs(37), EPILOGUE]),
        ([*OPENING, *list_epochs(40), "Fold is done"], [*list_epochs(40), "Fold is done"]),
        ([*OPENING, *list_epochs(40), EPILOGUE], [*OPENING, *list_epochs(20, begin=20), EPILOGUE]),
    ],
)
def test_starts_of_unknown_length_prove_nothing(
    show: Callable[[Sequence[str]], Ran], earlier: list[str], later: list[str]
) -> None:
    """Starts without a stated length prove nothing, however alike they are."""
    assert show([*earlier, *later]).code == EXIT.NOTHING_FOUND
