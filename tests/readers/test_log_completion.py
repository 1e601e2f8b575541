"""How the end of a job is proven by its log: kinds of completions, what speaks against them,
and the teardown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from firstfault.cli import EXIT
from firstfault_logs.completion.noise import drop_below_error, is_at_exit
from firstfault_logs.completion.words import CompletionKind, find_completion_kind
from firstfault_logs.framing.labels import Label, LogRecord
from tests.readers.commands import Ran

STEPS = [f"step {number} loss 2.{number}" for number in range(6)]
RAISED = [
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 12, in main',
    "    step(batch)",
    "ValueError: no labels in shard 9",
]
FINALIZED = [
    "Traceback (most recent call last):",
    '  File "/env/lib/python3.12/multiprocessing/util.py", line 303, in _run_finalizers',
    "    finalizer()",
    '  File "/env/lib/python3.12/shutil.py", line 700, in rmtree',
    "    os.unlink(name)",
    "OSError: [Errno 39] Directory not empty: 'pymp-x81'",
]
UNCAUGHT = [
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 40, in <module>',
    "    main()",
    *RAISED[1:],
]
ABORTED = "srun: error: cell-7: task 3: Aborted (core dumped)"
STATUS = '{"event": "run_end", "time": 1900000000, "status": "success"}'


@pytest.fixture
def shown(run: Callable[..., Ran], tmp_path: Path) -> Callable[..., Ran]:
    """Return a function that shows a log of these lines."""

    def show(lines: Sequence[str], *options: str) -> Ran:
        (tmp_path / "job.out").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return run("show", *options, str(tmp_path / "job.out"))

    return show


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("training finished", CompletionKind.WORD),
        ("INFO:trainer: Fine-tuning has completed in 3 h", CompletionKind.WORD),
        ("Finished pretraining after 3 epochs", CompletionKind.WORD),
        ("all epochs done, bye", CompletionKind.WORD),
        ("Done with the benchmark run", CompletionKind.WORD),
        ("[driver] job 77 finished", CompletionKind.WORD),
        ("训练完成", CompletionKind.WORD),
        (STATUS, CompletionKind.STATUS),
        ("ts=19 event=train_stop outcome=succeeded", CompletionKind.STATUS),
        ("Final dev score: 81.2", CompletionKind.RESULT),
        ("RESULT,ranker,8812,s", CompletionKind.RESULT),
        ("peak memory allocated: 39 GiB", CompletionKind.RESULT),
        ("total training time: 3:14:15", CompletionKind.RESULT),
    ],
)
def test_a_completion_is_found_by_its_form(line: str, kind: CompletionKind) -> None:
    """A sentence, a status and a result are found by their form, whichever program prints them."""
    assert find_completion_kind(line) is kind


@pytest.mark.parametrize(
    "line",
    [
        "evaluation finished",
        "dataset download job completed",
        "epoch 3: training done",
        "Finished training epoch 3",
        "training done for fold 2",
        "training is 37 % complete",
        "training of 12 of 40 models done",
        "waiting for the training to be finished",
        "once training has finished, weights are merged",
        "the job will be done in 3 h",
        "training has not finished",
        "preprocessing pipeline finished",
        "trainer initialization complete",
        "Epoch [4] total time: 0:12:01 (1.2 s / it)",
        "total validation time: 3 s",
        '{"event": "epoch_end", "status": "success"}',
        '{"event": "run_end", "status": "aborted"}',
        '{"event": "checkpoint_end", "status": "success"}',
        "final learning rate: 1e-5",
        "step 12 | loss 0.3 | total time: 0.4m",
        "job 71 failed after training was done",
        '    print("training finished")',
        '│   88 │   log.info("training is done")   │',
        "# training finished: write the weights",
        "+ echo 'job finished'",
        "Validation completed successfully for epoch 2",
        "Warmup completed successfully",
        "Successfully finished epoch 2",
        "All done with data loading",
        "rendezvous succeeded",
    ],
)
def test_the_end_of_a_part_proves_no_success(line: str) -> None:
    """The end of a stage, a part of a whole, a plan and a failure prove nothing."""
    assert find_completion_kind(line) is None


@pytest.mark.parametrize(
    "end",
    [
        ["training finished"],
        [STATUS],
        [STATUS, "lane:9:12 [0] NCCL INFO comm 0x1 rank 0 nranks 8 - Destroy COMPLETE"],
        ["Final dev score: 81.2"],
        [
            "pool.py:8: UserWarning: expects a non-zero size",
            "Early stopping triggered, no gain for 3 rounds",
        ],
        ["{'train_runtime': 71.2, 'train_loss': 0.2}"],
        ["step 6/6 loss 1.9"],
        ["Epoch 6/6", "391/391 [====] loss: 1.9", "Test loss: 1.8", "Test accuracy: 0.7"],
        [
            "[after training is done] date: 2031-05-06",
            "Evaluating on 8 samples",
            "loss on the test set: 1.8",
        ],
        ["Training: 100%|#####| 6/6 [00:09<00:00,  1.5s/it]"],
        ["training finished", "evaluating on the dev set", "dev accuracy: 0.71"],
        ["training finished", *FINALIZED],
        ["training finished", "terminate called without an active exception"],
        [
            "training finished",
            "[W506 07:08:09.1 TCPStore.cpp:9] [c10d] recvValue failed, got 0 bytes",
            "frame #0: x",
        ],
        [
            "(pid=9) training finished",
            "(raylet) A worker died or was killed. Worker IP address: 10.2.0.9 Worker PID: 8",
        ],
    ],
)
def test_each_kind_of_completion_proves_a_success(
    shown: Callable[..., Ran], end: list[str]
) -> None:
    """Each kind of completion proves a success, also above the noise of a teardown."""
    ran = shown([*STEPS, *end])
    assert (ran.code, ran.err) == (EXIT.OK, "")
    assert "reports its end: " in ran.out


@pytest.mark.parametrize(
    "lines",
    [
        ["calibration completed successfully"],
        ["calibration completed successfully", "step 0 loss 2.9"],
    ],
)
def test_a_success_above_all_steps_proves_nothing(
    shown: Callable[..., Ran], lines: list[str]
) -> None:
    """A success that names neither the training nor the job proves nothing above all steps."""
    assert shown(["loading the configuration", *lines]).code == EXIT.NOTHING_FOUND
    assert shown([*STEPS, "calibration completed successfully"]).code == EXIT.OK


def test_noise_below_a_completion_is_quoted_with_it(shown: Callable[..., Ran]) -> None:
    """What a success ignores below its completion is printed in the same line."""
    assert "ignored below it: \"OSError: [Errno 39] Directory not empty: 'pymp-x81'\"" in " ".join(
        shown([*STEPS, "training finished", *FINALIZED]).out.split()
    )


def test_only_last_words_of_all_ranks_prove_a_success(shown: Callable[..., Ran]) -> None:
    """Last words of all ranks prove a success; those of one rank,
    or of ranks in the middle of their work, don't.
    """
    ranks = [f"{rank}: {line}" for line in STEPS for rank in range(4)]
    assert (
        shown([*ranks, *(f"{rank}: worker {rank} says bye" for rank in range(4))]).code == EXIT.OK
    )
    assert shown([*ranks, "2: worker 2 says bye"]).code == EXIT.NOTHING_FOUND
    assert shown(ranks).code == EXIT.NOTHING_FOUND


@pytest.mark.parametrize(
    "end",
    [
        ["step 6/9 loss 1.9"],
        ["epoch 2/2"],
        ["epoch 0 step 6/6 loss 1.9"],
        ["Training: 71%|###  | 5/7 [00:09<00:02,  1.5s/it]"],
        ["Loading shards: 100%|#####| 6/6 [00:09<00:00,  1.5s/it]"],
        ["training finished", *STEPS],
        ["training finished", "evaluating on the dev set"],
        ["checkpoint saved successfully"],
        ["evaluation finished", "download completed"],
        ["ERROR: could not run the task", "RESULT,ranker,8812,s"],
        ["training finished", "epoch 7 it 0 loss 1.9", "epoch 7 it 50 loss 1.8"],
        ["training finished", "Epoch: [7][ 10/900] loss 1.9", "Epoch: [7][ 20/900] loss 1.8"],
        ["calibration completed successfully", "step 6 loss 1.9"],
    ],
)
def test_without_proof_no_success_is_claimed(shown: Callable[..., Ran], end: list[str]) -> None:
    """Without proof nothing is claimed: a part of the work, more work below,
    or a result that a wrapper prints.
    """
    assert shown([*STEPS, *end]).code not in {EXIT.OK, EXIT.TOOL_FAILED}


@pytest.mark.parametrize("proof", ["training finished", STATUS, "Final dev score: 81.2"])
def test_a_launchers_report_below_a_completion_blames_no_rank(
    shown: Callable[..., Ran], proof: str
) -> None:
    """A launcher's report below a completion blames no rank for the training,
    and takes nothing away.
    """
    ran = shown([*(f"0: {line}" for line in STEPS), f"0: {proof}", ABORTED], "--json")
    assert ran.code == EXIT.OK
    assert '"category":"teardown"' in ran.out
    assert "finished, then SIGABRT in the teardown of rank 3" in ran.out
    assert '"retry":false' in ran.out


@pytest.mark.parametrize(
    "lines",
    [
        [*STEPS, ABORTED],
        [*STEPS, ABORTED, "training finished"],
        [*STEPS, "evaluation finished", ABORTED],
        [*STEPS, "training finished", *STEPS, ABORTED],
        [
            *STEPS,
            "training finished",
            *RAISED,
            "srun: error: cell-7: task 0: Exited with exit code 1",
        ],
        [*STEPS, "step 6/6 loss 1.9", ABORTED],
        [
            "1: ERROR shard 9 is out of range",
            "0: training finished",
            "srun: error: c-7: task 1: Exited with exit code 1",
        ],
        [*STEPS, ABORTED, "RESULT,ranker,8812,s"],
    ],
)
def test_a_failure_above_the_completion_is_not_of_the_teardown(
    shown: Callable[..., Ran], lines: list[str]
) -> None:
    """A failure above the completion, in later work,
    or of the program itself isn't of the teardown.
    """
    ran = shown(lines, "--json")
    assert ran.code in {EXIT.ROOT_CAUSE, EXIT.ROOT_CAUSE_RETRYABLE}
    assert '"category":"teardown"' not in ran.out


@pytest.mark.parametrize(
    "echo",
    [
        "Job finished at Fri Mar  7 03:10:12 UTC 2031",
        "Training finished",
        "Training job finished successfully",
        "=== JOB COMPLETED ===",
        "Final dev score: none",
    ],
)
@pytest.mark.parametrize("prefix", ["", "0: "])
@pytest.mark.parametrize("above", [[], ["skipped iterations: 0", "Continuing from step 5"]])
def test_a_scripts_last_line_below_an_exception_proves_nothing(
    shown: Callable[..., Ran], echo: str, prefix: str, above: list[str]
) -> None:
    """A job's script prints its last line also if an exception has ended its program."""
    ran = shown([*(f"{prefix}{line}" for line in (*STEPS, *above, *UNCAUGHT)), f"{prefix}{echo}"])
    assert ran.code == EXIT.ROOT_CAUSE
    assert "no labels in shard 9" in ran.out


@pytest.mark.parametrize(
    "lines",
    [
        ["ERROR training failed", *UNCAUGHT],
        RAISED,
    ],
)
def test_a_printed_exception_just_above_the_end_proves_no_success(
    shown: Callable[..., Ran], lines: list[str]
) -> None:
    """A program that logs an exception and exits prints the same as one that goes on."""
    assert shown([*STEPS, *lines, "Job finished"]).code == EXIT.NOTHING_FOUND
    resumed = [f"step {step} loss 1.{step}" for step in range(6, 12)]
    assert shown([*STEPS, *lines, *resumed, "Job finished"]).code == EXIT.OK
    chatter = [f"shard {'x' * at} is written" for at in range(20)]
    assert shown([*STEPS, *lines, *chatter, "Job finished"]).code == EXIT.OK


def test_an_exception_far_above_the_end_was_handled(shown: Callable[..., Ran]) -> None:
    """A program that printed more than is kept below its exception had handled it."""
    lines = ["ERROR no tracker", *UNCAUGHT, f"metrics: {'x' * 40_000}", "score: 3", "Job finished"]
    assert shown(lines).code == EXIT.OK


def test_a_status_of_success_outweighs_an_earlier_failed_command(shown: Callable[..., Ran]) -> None:
    """A status of success outweighs the failure of a command long above it."""
    work = [f"sample {number} of shard {'x' * (number % 50)}" for number in range(90)]
    assert (
        shown(["srun: error: cell-7: task 0: Exited with exit code 1", *work, STATUS]).code
        == EXIT.OK
    )


@pytest.mark.parametrize(
    "line",
    [
        "[W506 07:08:09.1 socket.cpp:9] [c10d] The client socket has failed to connect to cell-7",
        (
            "cell-7:9:12 [3] proxy.cc:9 NCCL WARN [Proxy Service 3] Failed to execute operation"
            " Close from rank 3"
        ),
        "WARNING:root:connection lost, error 104",
        "2031-05-06 07:08:09 INFO error handler installed",
    ],
)
def test_warnings_make_no_failure(shown: Callable[..., Ran], line: str) -> None:
    """A warning makes no failure of a job that goes on, and neither do the frames below it."""
    frames = [
        "frame #0: c10::Error::Error(x) + 0x9 (0x7 in /env/libc10.so)",
        "frame #1: clone + 0x3",
    ]
    records = [
        LogRecord(at, text, Label(), None)
        for at, text in enumerate([line, *frames, "fatal: disk on fire"])
    ]
    assert [record.text for record in drop_below_error(records)] == ["fatal: disk on fire"]
    assert shown([*(f"3: {text}" for text in (*STEPS, line, *frames))]).code == EXIT.NOTHING_FOUND


def test_names_of_functions_that_release_resources_are_known() -> None:
    """Names of functions that give resources back, and others."""
    names = (
        "_run_finalizers",
        "__del__",
        "destroy_process_group",
        "_shutdown_workers",
        "close",
        "main",
        "closest",
    )
    assert [name for name in names if not is_at_exit([name])] == ["main", "closest"]
    # a file that is closed while results are written, and one that an object's finalizer closes
    assert not is_at_exit(["main", "save_checkpoint", "__exit__"])
    assert is_at_exit(["main", "__exit__"])
    assert is_at_exit(["__del__", "save_index", "close"])


def test_unsaved_results_are_a_failed_job_not_a_failed_teardown(shown: Callable[..., Ran]) -> None:
    """The training is done, but its checkpoint isn't there: the job failed,
    and not in its teardown.
    """
    failure = [
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/job/train.py", line 31, in main',
        "[rank0]:     save_checkpoint(model)",
        '[rank0]:   File "/job/train.py", line 12, in save_checkpoint',
        "[rank0]:     with open_writer(path) as writer:",
        '[rank0]:   File "/job/writer.py", line 8, in __exit__',
        "[rank0]:     self.file.finish()",
        "[rank0]: OSError: [Errno 28] No space left on device",
    ]
    ran = shown([*STEPS, "[after training is done] 18:39:14", *failure])
    assert ran.code == EXIT.ROOT_CAUSE
    assert "No space left on device" in ran.out


def test_a_failure_above_many_steps_and_a_result_is_not_the_end(shown: Callable[..., Ran]) -> None:
    """A failure isn't the job's end if many steps and a result of the whole
    follow in the same file.
    """
    failure = [
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/job/a.py", line 3, in go',
        "[rank1]: OSError: [Errno 5] lost",
    ]
    later = [f"step {step} loss 1.{step}" for step in range(3, 12)]
    ran = shown([*STEPS, *failure, *later, "Total training time 1:02:03"])
    assert (ran.code, ran.err) == (EXIT.OK, "")


def test_a_progress_bar_of_backspaces_is_text(shown: Callable[..., Ran]) -> None:
    """A log in which a progress bar moves the cursor back is a text."""
    bars = "".join("\b" * 30 + f"{at}/9 [=====>....] loss: 0.{at}" for at in range(9))
    assert shown([*STEPS, bars, "training finished"]).code == EXIT.OK


def test_the_last_of_several_starts_answers(run: Callable[..., Ran], tmp_path: Path) -> None:
    """The last start answers; the report counts the starts, and tells how the others ended."""
    begin = ["$ python train.py --epochs 3", "loading the configuration", "the model has 12 layers"]
    frame = [
        "Traceback (most recent call last):",
        '  File "/job/train.py", line 5, in main',
        "    go()",
    ]
    ends = ["ValueError: no labels", "OSError: [Errno 5] lost", "KeyError: 'x'"]
    lines = [line for end in ends for line in (*begin, *STEPS, *frame, end)]
    (tmp_path / "job.out").write_text("\n".join(lines) + "\n", encoding="utf-8")
    told = " ".join(run("show", str(tmp_path / "job.out")).out.split())
    assert told.startswith("KeyError")
    assert "3rd start in the log, after ValueError: no labels; OSError: [Errno 5] lost" in told


_TIMED_STEPS = [f"2031-05-06 07:08:0{step} INFO step {step} loss 2.{step}" for step in range(6)]
_SUCCESS = "2031-05-06 07:09:00 INFO Training completed successfully"
_LOGGED_BEFORE = "2031-05-06 07:08:03 ERROR upload of the metrics failed"
_LOGGED_AFTER = "2031-05-06 07:10:00 ERROR upload of the model failed"


@pytest.mark.parametrize(
    ("out", "err", "is_failure"),
    [
        ([*_TIMED_STEPS, _SUCCESS], [_LOGGED_BEFORE, *RAISED], False),
        ([*_TIMED_STEPS, _SUCCESS], [_LOGGED_AFTER, *RAISED], True),
        ([*_TIMED_STEPS, _SUCCESS], [_LOGGED_BEFORE, *UNCAUGHT], True),
        ([*_TIMED_STEPS, _SUCCESS], RAISED, True),
        (_TIMED_STEPS, [_LOGGED_BEFORE, *RAISED], True),
        ([*_TIMED_STEPS, _SUCCESS], [_LOGGED_BEFORE, *RAISED, "ERROR: out of disk space"], True),
        ([*_TIMED_STEPS, _SUCCESS], [_LOGGED_BEFORE, *RAISED, ABORTED], True),
        ([*STEPS, "Training completed successfully"], [_LOGGED_BEFORE, *RAISED], True),
    ],
    ids=[
        "before the success",
        "after the success",
        "an exception of the whole program",
        "without a time",
        "without a success",
        "with a later error",
        "with the end of a task",
        "a success without a time",
    ],
)
def test_an_exception_in_the_other_output_is_survived_if_times_prove_it(
    run: Callable[..., Ran],
    tmp_path: Path,
    out: Sequence[str],
    err: Sequence[str],
    is_failure: bool,
) -> None:
    """Two files have no common order of lines, but their times show what came first."""
    (tmp_path / "job.out").write_text("\n".join([*out, ""]), encoding="utf-8")
    (tmp_path / "job.err").write_text("\n".join([*err, ""]), encoding="utf-8")
    assert (run("show", str(tmp_path)).code != EXIT.OK) == is_failure
