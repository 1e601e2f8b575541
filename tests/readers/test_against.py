"""``firstfault show --against``: what the log of a failed run has that the log
of another run doesn't.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from firstfault.cli import EXIT
from tests.readers.commands import Ran
from tests.readers.test_log_verdicts import RAISED, add_prefix

Compare: TypeAlias = Callable[[list[str], list[str]], dict[str, Any]]


def steps(count: int, *, wrong_from: int = 1 << 30, value: str = "9.5") -> list[str]:
    """Return lines with a loss that is the same in each run, and a time that isn't."""
    losses = [value if step >= wrong_from else f"{step / 8:.3f}" for step in range(count)]
    return [
        f"step {step} loss: {loss} time: {wrong_from % 97 + step / 7:.3f}"
        for step, loss in enumerate(losses)
    ]


@pytest.fixture
def compare(run: Callable[..., Ran], tmp_path: Path) -> Compare:
    """Return a function that compares lines with those of another run: the field ``against``."""

    def compared(bad: list[str], good: list[str]) -> dict[str, Any]:
        for name, lines in (("bad", bad), ("good", good)):
            (tmp_path / f"{name}.log").write_text("\n".join([*lines, ""]), encoding="utf-8")
        ran = run(
            "show",
            "--json",
            str(tmp_path / "bad.log"),
            "--against",
            str(tmp_path / "good.log"),
        )
        found: dict[str, Any] = json.loads(ran.out)["against"]
        return found

    return compared


def test_a_line_that_differs_only_in_numbers_is_not_new(compare: Compare) -> None:
    """A line about trouble is new if the other log has none that differs only in numbers."""
    common = ["WARNING: slow disk", "ERROR: could not import wandb in 3 s"]
    found = compare(
        [*common, *steps(9), *add_prefix("[rank1]: ", RAISED)],
        ["ERROR: could not import wandb in 7 s", *steps(20)],
    )
    assert [line["text"] for line in found["new"]] == ["ValueError: no labels in shard 9"]
    assert found["new"][0]["line"] == "bad.log:17"
    assert (found["last_step"], found["other_last_step"]) == (8, 19)


def test_only_values_equal_at_the_first_steps_are_compared(compare: Compare) -> None:
    """A value that was equal at the first steps is compared; a time, or the loss of another seed,
    isn't.
    """
    found = compare([*steps(20, wrong_from=11), *RAISED], steps(20))["first_difference"]
    assert (found["step"], found["name"], found["here"], found["there"]) == (
        11,
        "loss",
        "9.5",
        "1.375",
    )
    assert (found["line"], found["other_line"]) == ("bad.log:12", "good.log:12")
    assert compare([*steps(20, wrong_from=0), *RAISED], steps(20))["first_difference"] is None
    assert compare([*steps(20), *RAISED], steps(20))["first_difference"] is None


def test_nan_is_proven_if_the_other_run_had_a_number(compare: Compare) -> None:
    """NaN is proven if the other run had a number at the same step, also with other seeds."""
    bad = [f"step {step} loss: {'nan' if step > 5 else step}" for step in range(9)]
    found = compare([*bad, *RAISED], [f"step {step} loss: {step + 7}" for step in range(9)])
    assert (found["first_not_a_number"]["step"], found["first_not_a_number"]["there"]) == (6, "13")
    assert compare([*bad, *RAISED], bad)["first_not_a_number"] is None


def test_a_large_log_is_compared_completely(compare: Compare) -> None:
    """Lines in the middle of a large log, which a report skips, are compared, too."""
    filler = [f"sample {number} of shard {number % 13} was read" for number in range(30_000)]
    good = [*steps(9), *filler, "ERROR: retry of shard 3", *filler, *steps(3)]
    found = compare([*steps(9), *filler, "ERROR: retry of shard 5", *filler, *RAISED], good)
    assert [line["text"] for line in found["new"]] == ["ValueError: no labels in shard 9"]


def test_the_comparison_follows_the_report(run: Callable[..., Ran], tmp_path: Path) -> None:
    """As text, the comparison follows the report, also on a success;
    it isn't combined with other forms.
    """
    bad, good = tmp_path / "bad.log", tmp_path / "good.log"
    bad.write_text(
        "\n".join([*steps(20, wrong_from=11), *add_prefix("[rank1]: ", RAISED)]), encoding="utf-8"
    )
    good.write_text("\n".join([*steps(20), "Training completed"]), encoding="utf-8")
    ran = run("show", str(bad), "--against", str(good))
    assert ran.code == EXIT.ROOT_CAUSE
    rows = ran.out.partition("\nAgainst good.log\n")[2].splitlines()
    assert rows == [
        "  last step: 19, there 19",
        "  first step that differs: 11: loss 9.5, there 1.375 [bad.log:12]",
        "  new:",
        "    26 [rank 1]: ValueError: no labels in shard 9",
    ]
    ran = run("show", str(good), "--against", str(good))
    assert (ran.code, ran.out.splitlines()[-1]) == (
        EXIT.OK,
        "  no line about trouble that isn't there, too",
    )
    for option in ("--brief", "--markdown", "--recovered"):
        assert run("show", str(bad), "--against", str(good), option).code == EXIT.USAGE


@pytest.mark.parametrize(
    "form",
    [
        "step {:6d} | loss {}",
        " iteration {:8d}/  500000 | consumed samples: 5120 | lm loss: {} | grad norm: 1.0 |",
        "iter {:10d}/100000 | loss {}",
        "Step: {:9d}  loss={}",
        "Epoch: [0][{:4d}/5005]\tLoss {}",
        "Epoch 0/90, batch {:5d}/5005, loss {}",
    ],
)
def test_padded_steps_below_an_epoch_are_read(compare: Compare, form: str) -> None:
    """A step is read whatever its padding, and below an epoch it's the step that counts."""
    good = [form.format(step, f"2.{step}") for step in range(0, 200, 10)]
    bad = [line if at < 5 else form.format(10 * at, "3.5") for at, line in enumerate(good)]
    found = compare([*bad, *RAISED], good)
    assert (found["first_difference"]["step"], found["first_difference"]["line"]) == (
        50,
        "bad.log:6",
    )
    assert (found["last_step"], found["other_last_step"]) == (190, 190)
    assert found["last_epoch"] == (0 if form.startswith("Epoch") else None)


def test_steps_are_ordered_by_their_epoch(run: Callable[..., Ran], tmp_path: Path) -> None:
    """Steps that are counted anew in each epoch are ordered by the epoch;
    a folder's lines have their file's name.
    """
    lines = [
        f"Epoch: [{epoch}][{step:4d}/200]\tLoss 2.5"
        for epoch in range(3)
        for step in range(0, 200, 50)
    ]
    for name, count in (("bad", 10), ("good", 12)):
        (tmp_path / name).mkdir()
        text = "\n".join([*lines[:count], *(RAISED if name == "bad" else [])])
        (tmp_path / name / "a.log").write_text(text, encoding="utf-8")
        (tmp_path / name / "b.log").write_text("starting\n", encoding="utf-8")
    out = run("show", str(tmp_path / "bad"), "--against", str(tmp_path / "good")).out
    assert "  last step: epoch 2, step 50, there epoch 2, step 150" in out
    assert "    a.log:" in out.partition("  new:\n")[2]


def test_fractional_epochs_are_compared(compare: Compare) -> None:
    """Trainers that print parts of an epoch are compared by them."""

    def train(count: int, *, wrong_from: int) -> list[str]:
        losses = ["nan" if step >= wrong_from else f"{step / 8:.3f}" for step in range(count)]
        return [
            f"{{'loss': {loss}, 'learning_rate': 3e-05, 'epoch': {step / 20:.2f}}}"
            for step, loss in enumerate(losses)
        ]

    found = compare(train(30, wrong_from=19), train(40, wrong_from=99))
    assert (found["last_step"], found["last_epoch"], found["other_last_epoch"]) == (
        None,
        1.45,
        1.95,
    )
    wrong = found["first_not_a_number"]
    assert (wrong["epoch"], wrong["step"], wrong["here"]) == (0.95, None, "nan")


@pytest.mark.parametrize(
    "form", ["Epoch: [2] [ {step:3}/900] loss: {loss}", "Epoch 2 it {step} loss: {loss}"]
)
def test_a_counter_behind_the_epoch_is_the_step(compare: Compare, form: str) -> None:
    """A counter behind the epoch is the step, whatever its name."""

    def train(wrong_from: int) -> list[str]:
        return [
            form.format(step=step, loss="nan" if step >= wrong_from else step / 8)
            for step in range(0, 300, 20)
        ]

    found = compare(train(240), train(999))
    assert (found["last_epoch"], found["last_step"]) == (2, 280)
    assert found["first_not_a_number"]["step"] == 240
