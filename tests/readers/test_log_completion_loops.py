"""Successes without words of an end: rounds of an outer loop, summaries, epilogues,
and two files of one job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from firstfault.cli import EXIT
from firstfault_logs.completion.rounds import get_shape
from firstfault_logs.framing.files import are_outputs_of_one_job
from tests.readers.commands import Ran

FINALIZED = [
    "Traceback (most recent call last):",
    '  File "/env/lib/python3.12/multiprocessing/util.py", line 303, in _run_finalizers',
    "    finalizer()",
    "OSError: [Errno 39] Directory not empty: 'pymp-x81'",
]
RAISED = [
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 12, in main',
    "    step(batch)",
    "ValueError: no labels in shard 9",
]
WANDB_END = ["wandb: Run summary:", "wandb: loss 0.3", "wandb: Find logs at: ./wandb/run-1/logs"]


def list_epochs(begin: int, end: int) -> list[str]:
    """Return what a program prints in some epochs."""
    lines: list[str] = []
    for epoch in range(begin, end):
        lines += [
            f"Epoch {epoch} lr 0.00{epoch % 9 + 1}",
            f"train loss 0.{epoch + 11}",
            f"val acc 0.{50 + epoch}",
        ]
    return lines


def list_keras_epochs(count: int) -> list[str]:
    """Return what Keras prints in some epochs."""
    lines: list[str] = []
    for epoch in range(1, count + 1):
        bars = "".join(
            f"\r{at}/50 [==>....] - ETA: {50 - at}s - loss: 0.{at}" for at in range(1, 50)
        )
        end = f"\r50/50 [======] - 9s 12ms/step - loss: 0.{epoch + 3} - val_loss: 0.{epoch + 5}"
        lines += [f"Epoch {epoch}/{count}", bars + end]
    return lines


def list_batches(heading: str, count: int) -> list[str]:
    """Return a line for each of 20 batches in some epochs."""
    return [
        f"{heading.format(epoch)} loss 0.{batch}" for epoch in range(count) for batch in range(20)
    ]


@pytest.fixture
def shown(run: Callable[..., Ran], tmp_path: Path) -> Callable[[Sequence[str]], Ran]:
    """Return a function that shows a log of these lines."""

    def show(lines: Sequence[str]) -> Ran:
        (tmp_path / "job.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return run("show", str(tmp_path / "job.log"))

    return show


@pytest.mark.parametrize(
    "lines",
    [
        ["Namespace(batch_size=8, epochs=30, lr=0.1)", *list_epochs(0, 30)],
        [
            "epochs: 30",
            "warmup_epochs: 3",
            *list_epochs(1, 31),
            "Saving model checkpoint to out/epoch-30",
        ],
        ["$ python train.py --epochs 30 --lr 3", *list_epochs(0, 30)],
        [
            "max_steps: 500",
            *(f"step {step} loss 0.{step}" for step in range(10, 501, 10)),
            "Saving checkpoint-500",
        ],
        ["epochs: 10", *list_batches("Epoch {}", 10)],
        [f"Epoch [{epoch}/100] loss 0.{epoch} val_acc 0.{epoch + 3}" for epoch in range(100)],
        [f"[{epoch}/100] loss 0.{epoch} val_acc 0.{epoch + 3}" for epoch in range(100)],
        list_keras_epochs(10),
        [*list_epochs(0, 100), "100%|##########| 100/100 [1:40:00<00:00, 60.0s/it]"],
        ["Start Epoch 0 End Epoch 30", *list_epochs(0, 30)],
    ],
)
def test_a_whole_last_round_proves_a_success(
    shown: Callable[[Sequence[str]], Ran], lines: list[str]
) -> None:
    """A loop that had its last round, as far as its total is printed,
    has finished if that round ends as all do.
    """
    ran = shown(lines)
    assert (ran.code, ran.err) == (EXIT.OK, "")
    assert "reports its end: " in ran.out


@pytest.mark.parametrize(
    "lines",
    [
        ["epochs: 30", *list_epochs(0, 30)[:-1]],
        ["epochs: 30", *list_epochs(0, 29)],
        ["epochs: 30", *list_epochs(1, 30)],
        ["==> Start Epoch 1 End Epoch 31", *list_epochs(1, 30)],
        ["==> Start Epoch 1 End Epoch 31", *list_epochs(1, 31), "-" * 30],
        ["==> Start Epoch 1 End Epoch 31", *list_epochs(1, 31)[:-1]],
        ["==> Start Epoch 1 End Epoch 33", *list_epochs(1, 33)],
        ["Start Epoch 0 End Epoch 30", *list_epochs(0, 29)],
        ["pretrain_epochs: 5", "epochs: 20", *list_epochs(0, 5)],
        ["epochs: 10", *list_batches("Epoch {}", 10)[:-8]],
        list_batches("Epoch {}/9", 10)[:-8],
        [f"Epoch [{epoch}/100] loss 0.{epoch} val_acc 0.{epoch + 3}" for epoch in range(97)],
        [
            f"[{epoch}/25][{batch}/50] loss 0.{batch}"
            for epoch in range(25)
            for batch in range(0, 50, 5)
        ],
        [*list_keras_epochs(10)[:-1], "10/50 [==>....] - ETA: 9s - loss: 0.3"],
        list_keras_epochs(10)[:-1],
        [*list_epochs(0, 12), "100%|##########| 57/57 [01:05<00:00, 9.1it/s]"],
        ["100%|##########| 57000/57000 [05:05<00:00, 9.1ex/s]"],
        [
            "max_steps: 900",
            *(f"step {step} loss 0.{step}" for step in range(10, 501, 10)),
            "Saving checkpoint-500",
        ],
    ],
)
def test_a_cut_last_round_proves_nothing(
    shown: Callable[[Sequence[str]], Ran], lines: list[str]
) -> None:
    """A log that ends in the middle of a round, one round early,
    or with an inner loop proves nothing.
    """
    assert shown(lines).code == EXIT.NOTHING_FOUND


@pytest.mark.parametrize(
    "end",
    [
        ["Best epoch: 7, best val acc: 0.61"],
        ["2031-01-01 10:00:00 INFO Best validation accuracy: 0.6123 (epoch 7)"],
        ["Done."],
        ["Results saved to runs/train3"],
        ["Time elapsed: 431.2 s"],
        ["Test loss: 0.31, test accuracy: 0.82"],
        ["Final validation metrics: None"],
        ["Final results: {'acc': 0.3, 'loss': 0.2}"],
        ["Saved final model to out/final.pt"],
        ["Early stopping!"],
        ["Epoch 12: Early stopping."],
        ["Early stop at epoch 12"],
        ["12 epochs completed in 0.512 hours.", "Optimizer stripped from a.pt"],
        ["wandb: Waiting for W&B process to finish... (success).", *WANDB_END],
        WANDB_END,
        ["JobId=77 JobName=x", "JobState=COMPLETED ExitCode=0:0"],
        ["Resource usage: cput=3", "Exit_status=0"],
        ["Job Exit Status:    0"],
        ["failed       0", "exit_status  0"],
        ["005 (77.000.000) Job terminated.", "\t(1) Normal termination (return value 0)"],
    ],
)
def test_new_lines_and_epilogues_prove_the_end_of_a_training(
    shown: Callable[[Sequence[str]], Ran], end: list[str]
) -> None:
    """What no epoch before had, and a scheduler's epilogue."""
    ran = shown([*list_epochs(0, 12), *end])
    assert (ran.code, ran.err) == (EXIT.OK, "")


@pytest.mark.parametrize(
    "end",
    [
        ["New best model found at epoch 11: acc 0.61"],
        ["EarlyStopping counter: 3 out of 10"],
        [
            (
                "wandb: Waiting for W&B process to finish... (failed 1). Press Control-C to abort"
                " syncing."
            ),
            *WANDB_END,
        ],
        ["JobId=77 JobName=x", "JobState=RUNNING ExitCode=0:0"],
        ["Exit_status=271"],
        ["005 (77.000.000) Job terminated.", "\t(1) Normal termination (return value 3)"],
        ["", "real\t12m3.4s", "user\t1m0.0s", "sys\t0m1.0s"],
        ["Saving the final model"],
    ],
)
def test_progress_and_failures_prove_no_end_of_a_training(
    shown: Callable[[Sequence[str]], Ran], end: list[str]
) -> None:
    """Progress, a failure, and an end that a failed process has, too."""
    assert shown([*list_epochs(0, 12), *end]).code != EXIT.OK


@pytest.mark.parametrize(
    "lines",
    [
        [
            line
            for epoch in range(12)
            for line in (f"Epoch {epoch} loss 0.{epoch + 3}", "Saving checkpoint", "done")
        ],
        [
            *(f"Epoch {epoch}/40 loss 0.{epoch + 3}" for epoch in range(12)),
            "Saving checkpoint",
            "Done.",
        ],
        ["epochs: 40", *list_epochs(0, 12), "Best epoch: 7, best val acc: 0.61"],
        [
            line
            for fold in range(3)
            for line in (f"Fold {fold}", *list_epochs(0, 12), "Early stopping at epoch 11")
        ],
    ],
)
def test_a_summary_of_a_part_proves_nothing(
    shown: Callable[[Sequence[str]], Ran], lines: list[str]
) -> None:
    """What each round prints, an outer loop that isn't at its end, and one fold of several."""
    assert shown(lines).code == EXIT.NOTHING_FOUND


@pytest.mark.parametrize("end", ["Training time 8:03:31", "Total training time: 0:41:07"])
def test_a_metric_named_error_is_no_failure(
    shown: Callable[[Sequence[str]], Ran], end: str
) -> None:
    """An error with a decimal is a metric, and no failure below the last epoch."""
    tested = [f"Test: [{at}/9] class_error: {at}1.50 mean error = 0.{at}" for at in range(9)]
    lines = [*list_epochs(0, 12), *tested, "Averaged: class_error: 41.50"]
    assert shown([*lines, end]).code == EXIT.OK
    for failure in ("error: 104", "error 10.0.0.7 is gone", "RPC error: 3.5", "write error"):
        assert shown([*lines, f"worker 3: {failure} failed", end]).code != EXIT.OK


def test_a_summary_below_a_traceback_is_no_success(shown: Callable[[Sequence[str]], Ran]) -> None:
    """A summary below a traceback is no success."""
    assert shown([*list_epochs(0, 12), *RAISED, *WANDB_END]).code == EXIT.ROOT_CAUSE


@pytest.mark.parametrize(
    ("out", "err"),
    [
        (["Training finished"], ["srun: error: c-7: task 3: Aborted (core dumped)"]),
        (["Training finished"], ["srun: error: c-7: task 2: Exited with exit code 1"]),
        (["Training finished"], FINALIZED),
        (["Training finished"], RAISED),
        ([], ["srun: error: c-7: task 3: Aborted (core dumped)"]),
        (["Final dev score: 81.2"], ["/job/a.py:3: UserWarning: x is deprecated"]),
    ],
)
def test_two_files_of_one_job_are_read_as_one_log(
    run: Callable[..., Ran],
    tmp_path: Path,
    out: list[str],
    err: list[str],
) -> None:
    """An end in one file and a failure of the teardown in the other are read as in one log."""
    lines = {"job.out": [*list_epochs(0, 9), *out], "job.err": err}
    folder, merged = tmp_path / "job", tmp_path / "merged.log"
    folder.mkdir()
    for name, texts in lines.items():
        (folder / name).write_text("\n".join(texts) + "\n", encoding="utf-8")
    merged.write_text("\n".join([*lines["job.out"], *err]) + "\n", encoding="utf-8")
    assert run("show", str(folder)).code == run("show", str(merged)).code


def test_an_error_in_the_other_file_is_no_failed_teardown(
    run: Callable[..., Ran], tmp_path: Path
) -> None:
    """A rank that reported an error before it left hasn't failed in its teardown."""
    (tmp_path / "job.out").write_text(
        "\n".join([*list_epochs(0, 9), "Training finished"]), encoding="utf-8"
    )
    err = [
        "ERROR: rank 2 could not write its shard",
        "srun: error: c-7: task 2: Exited with exit code 1",
    ]
    (tmp_path / "job.err").write_text("\n".join(err), encoding="utf-8")
    assert run("show", str(tmp_path)).code == EXIT.ROOT_CAUSE


@pytest.mark.parametrize(
    ("file", "other", "is_pair"),
    [
        ("job.out", "job.err", True),
        ("a/train-77.out", "a/train-77.err", True),
        ("stdout.log", "stderr.log", True),
        ("train.o77", "train.e77", True),
        ("train.o77", "train.e78", False),
        ("a/job.out", "b/job.err", False),
        ("job-1.out", "job-2.err", False),
        ("train.log", "eval.log", False),
    ],
)
def test_names_that_differ_in_the_output_are_of_one_job(
    file: str, other: str, *, is_pair: bool
) -> None:
    """Names that differ only in the word for the output are of one job."""
    assert are_outputs_of_one_job(file, other) == is_pair


def test_lines_that_differ_in_numbers_have_one_shape() -> None:
    """Lines that differ only in their numbers have one shape."""
    assert get_shape("loss 1e-05  acc 0.9 at 10:11") == get_shape("loss nan acc -12 at 9:01:02")
    assert get_shape("loss 0.1") != get_shape("acc 0.1")
