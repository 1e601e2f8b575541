"""The patterns of logs of jobs without firstfault."""

import pytest

import firstfault_logs
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs import (
    assignment,
    attempt_logs,
    attempts,
    collector,
    flight,
    launchers,
    own_reports,
    processes,
    stops,
    torchrun_folder,
    tracebacks,
)
from firstfault_logs.causes import cluster_reports, unnamed_ranks
from firstfault_logs.completion import loops, noise, proof, rounds, words
from firstfault_logs.framing import (
    exports,
    files,
    labels,
    lines,
    ranks,
    records,
)
from tests.readers.any_pattern import find_all

_EXAMPLES: list[tuple[LazyPattern, str, dict[str, str]]] = [
    (labels.LOG_SUFFIX, "train-rank1.log", {}),
    (labels.RANK_WORD, "cell-a/rank_0", {}),
    (
        labels._STAMP,
        "2026-11-26T18:47:48.788393+00:00 [rank3]:     work.wait()",
        {"date": "2026-11-26", "time": "18:47:48", "part": "788393", "zone": "+00:00"},
    ),
    (labels._OTHER_STAMP, "May  6 07:08:09 host job[410]: ", {}),
    (
        labels.GLOG_STAMP,
        "E0506 07:08:09.1 140 train.py:50] evaluation failed",
        {"month": "05", "day": "06", "time": "07:08:09", "part": "1"},
    ),
    (labels._NO_LABEL, "ray.train.v2.api.exceptions.WorkerGroupError", {}),
    (labels._CRI_PREFIX, "stderr F [rank1]:     raise ValueError(batch)", {}),
    (labels._NUMBERED_NODE, "10.2.0.1 [0]", {"node": "10.2.0.1", "number": "0"}),
    (labels._LEVEL_IN_LABEL, "FineTuner - INFO -", {}),
    (labels._LEVEL_BEFORE_DATE, "WARNING 03-18 13:21:50 [worker.py:12] slow", {}),
    (labels._NO_PREFIX, "Original ", {}),
    (
        labels._BEFORE_FRAME,
        '[rank1]:   File "/job/data.py", line 7, in step',
        {"before": "[rank1]: "},
    ),
    (
        labels._TORCH_PREFIX,
        "3: [rank3]: OSError: [Errno 28] No space left on device",
        {"rank": "3"},
    ),
    (labels._ACTOR_RANK, "Trainer(rank=3)", {"rank": "3"}),
    (labels._FAILURE_LEVEL, "error", {}),
    (labels._TRACEBACK_LINE, "ValueError: no labels", {}),
    (files._JOB_IN_NAME, "slurm-4711.out", {"job": "4711"}),
    (files._SYSTEM_LOG, "dmesg-gpu-7", {"node": "gpu-7"}),
    (files._NODE_FILE, "node0", {"index": "0"}),
    (files._LOG_NAME, "job-master-0.log", {}),
    (files._NO_LOG_NAME, "changelog.md", {}),
    (files._NO_LOG_BEGIN, "<!DOCTYPE html>", {}),
    (processes.POD_NUMBER, "train-worker-0", {}),
    (processes._POD_SUFFIX, "train-worker-0-x7k2p", {}),
    (tracebacks.LAUNCHER_FILE, "/x/site-packages/torch/distributed/elastic/rendezvous/api.py", {}),
    (tracebacks.ERROR_LEVEL, "2031-05-06 07:08:09,000 ERROR the step failed", {}),
    (tracebacks._COMMAND_FAILED, "Training has failed even after 3 attempts.", {}),
    (
        cluster_reports._RAY_TASK_ERROR,
        "ray::_Inner.train() (pid=70, ip=9.8.7.6, repr=Train)",
        {"pid": "70", "ip": "9.8.7.6"},
    ),
    (
        cluster_reports._RAY_ACTOR_DIED,
        (
            "ActorDiedError: The actor died unexpectedly before finishing this task.\n"
            "\tclass_name: Worker\n\tpid: 4711\n\tnamespace: default\n\tip: 10.0.0.7"
        ),
        {"pid": "4711", "ip": "10.0.0.7"},
    ),
    (
        assignment._SPAWN_PROCESS_ERROR,
        "-- Process 2 terminated with the following error:",
        {"rank": "2"},
    ),
    (assignment._RANK_HEADING, "[Rank 2 Error Snippet]:", {"rank": "2"}),
    (unnamed_ranks._POD_DESCRIPTION, "Name:         train-worker-1", {}),
    (
        unnamed_ranks._ERROR_ON_RANK,
        "CRITICAL [train:9, rank=6] Uncaught ValueError",
        {"rank": "6"},
    ),
    (
        lines.EXCEPTION_LINE,
        "ValueError: the batch of rank 1 has no labels",
        {"type": "ValueError", "message": "the batch of rank 1 has no labels"},
    ),
    (
        lines.FRAME_LINE,
        '  File "<frozen runpy>", line 88, in _run_code',
        {"file": "<frozen runpy>", "line": "88", "function": "_run_code"},
    ),
    (
        lines.FINISHED_BAR,
        "Training: 100%|#####| 6/6 [00:09<00:00,  1.5s/it]",
        {"name": "Training:", "step": "6", "total": "6"},
    ),
    (
        lines.UNNAMED_BAR,
        "100%|##########| 57/57 [01:05<00:00, 9.1it/s]",
        {"step": "57", "total": "57"},
    ),
    (lines._ESCAPE_SEQUENCE, '\x1b[36m(Trainer pid=12734)\x1b[0m     {}["index-v2"]', {}),
    (
        lines._PROGRESS_BAR,
        "gpu-a: [default0]:Epoch 0:   0%|       | 0/6 [00:00<00:04, 0.21it/s]",
        {},
    ),
    (
        attempts.AGENT_LOG_LINE,
        "E0506 07:08:09.1 140 train.py:50] evaluation failed",
        {"hour": "07", "minute": "08", "second": "09.1", "pid": "140"},
    ),
    (attempts.TRAINING_STEP, "step 6/6 loss 1.9", {"what": "step", "step": "6", "total": "6"}),
    (attempts.VARYING_PART, "loaded 26 shards in 0x7f3a", {}),
    (launchers._BOX_BEGIN, "/app/tests/consoles/program.py FAILED", {}),
    (launchers._BOX_ENTRY, "[1]:", {}),
    (
        launchers._BOX_FIELD,
        "  exitcode  : -15 (pid: 27273)  (SIGTERM)",
        {"name": "exitcode", "value": "-15 (pid: 27273)  (SIGTERM)"},
    ),
    (launchers._BOX_RULE, "-----------------------------------------------------", {}),
    (launchers._BOX_RANK, "1 (local_rank: 1)", {"rank": "1", "local": "1"}),
    (launchers._BOX_CODE, "-15 (pid: 27273)  (SIGTERM)", {"code": "-15", "pid": "27273"}),
    (launchers._BOX_SIGNAL, "Signal 15 (SIGTERM) received by PID 27273", {"signal": "SIGTERM"}),
    (
        tracebacks.SPARK_TASK_ERROR,
        "Lost task 3.0 in stage 1.0 (TID 7) (gpu-2 executor 2):",
        {"task": "3", "stage": "1.0", "node": "gpu-2", "executor": "2"},
    ),
    (own_reports.COLLECTIVE_TIMEOUT, "Watchdog caught collective operation timeout: WorkNCCL", {}),
    (own_reports._ABORT_MESSAGE, "terminate called after throwing an instance of 'c10::Error'", {}),
    (own_reports._STALL_REPORT, "waiting for remainder of ranks for more than 60 seconds.", {}),
    (launchers.MAYBE_CODE_BELOW, "=   KILLED BY SIGNAL: 4 (Illegal instruction)", {}),
    (launchers._CODE_BELOW, "=   KILLED BY SIGNAL: 4 (Illegal instruction)", {"signal": "4"}),
    (ranks.DECLARED_RANK, "Rank 3: step 0 loss 2.5904", {"rank": "3"}),
    (attempt_logs._CHAINED_TRACEBACK, "Original Traceback (most recent call last):", {}),
    (records._FILE_HEADER, "==> w-0.log <==", {"path": "w-0.log"}),
    (records.SHELL_COMMAND, "$ python train.py --epochs 30 --lr 3", {}),
    (collector._TORCHRUN_OUTPUT, "torchrun --standalone --nproc_per_node=4 train.py", {}),
    (collector._WORLD_SIZE, "[INFO] [launch.py:170:main] dist_world_size=4", {"world": "4"}),
    (collector._MAYBE_WORLD_SIZE, "[INFO] [launch.py:170:main] dist_world_size=4", {}),
    (
        collector._DEFAULT_WORLD_SIZE,
        "Namespace(epochs=90, lr=0.1, multiprocessing_distributed=True, world_size=1)",
        {},
    ),
    (
        collector._POD_ROW,
        "other-app-7      0/1     Error       0          10m",
        {"pod": "other-app-7", "status": "Error"},
    ),
    (collector._INSIDE_OF_OUTPUT, '  File "/job/train.py", line 7, in main', {}),
    (collector._INSIDE_OF_OUTPUT, '  File "/job/train.py", line 7, in main', {}),
    (collector._DESCRIBED_POD, "Name:         train-worker-1", {"pod": "train-worker-1"}),
    (
        collector._RANK_AND_PID,
        "- (ip=9.8.7.6, pid=71) world_rank=0, local_rank=0",
        {"pid2": "71", "rank2": "0"},
    ),
    (
        collector._REPORT_TIME,
        "slurmstepd: error: *** JOB 7 ON c1 CANCELLED AT 2031-05-06T07:08:09 ***",
        {"time": "2031-05-06T07:08:09"},
    ),
    (
        ranks._INLINE_RANK,
        "[Rank 3] Watchdog caught collective operation timeout",
        {"rank": "3"},
    ),
    (ranks.LOGGED_RANK, "06-May-31 07:08:09 [Worker:0] [INFO] step 1", {"rank": "0"}),
    (ranks._INLINE_PID, "[ERROR] RUNTIME(PID: 4711, Device: 3) failed", {"pid": "4711"}),
    (
        ranks._NCCL_LINE_START,
        "lane:9:12 [0] NCCL INFO comm 0x1 rank 0 nranks 8 - Destroy COMPLETE",
        {"host": "lane", "pid": "9"},
    ),
    (
        loops._CONFIGURED_COUNT,
        "Namespace(batch_size=8, epochs=30, lr=0.1)",
        {"epochs": "epochs", "total": "30,"},
    ),
    (loops._STEP_RANGE, "==> Start Epoch 1 End Epoch 31", {"begin": "1", "end": "31"}),
    (loops._BRACKETED_STEP, "[97/100] loss 0.97 val_acc 0.100", {"step": "97", "total": "100"}),
    (loops._MENTIONED_STEP, "Best model is of epoch 2: loss 0.5", {}),
    (words.FAILURE_REPORT, "job 71 failed", {}),
    (words.NEGATION, "training was not completed", {}),
    (words.JOB_FAILED, "job 71 failed after training was done", {}),
    (words.JOB_SUCCEEDED, "Slurm: State=COMPLETED ExitCode=0:0", {}),
    (
        words._END_SENTENCE,
        "The training of the model has finished",
        {"subject": "training", "between": " of the model has "},
    ),
    (
        words._INVERTED_END_SENTENCE,
        "Finished the training",
        {"between": " the ", "subject": "training"},
    ),
    (words._ONE_OF_MANY, " for fold 2", {}),
    (words._LOW_LEVEL, "INFO:trainer: Fine-tuning has completed in 3 h", {}),
    (words._COUNTED_STAGE, "step 12 | loss 0.3 | ", {}),
    (words._STAGE_WORD, "total validation time: 3 s", {}),
    (words._FRACTION, "training of 12 of 40 models done", {"part": "12", "whole": "40"}),
    (words._PERCENTAGE, "training is 37 % complete", {"percent": "37"}),
    (words._SOURCE_CODE, '  File "/job/train.py", line 12, in <module>', {}),
    (words._PENDING_WORD, "waiting for the training to be finished", {}),
    (words._SUCCESS_STATUS, '{"event": "epoch_end", "status": "success"}', {}),
    (words._END_EVENT, "ts=19 event=train_stop outcome=succeeded", {}),
    (words._STATUS_EVENT, '{"key": "status", "value": "success"}', {}),
    (words._FINAL_RESULT, "Early stopping triggered, no gain for 3 rounds", {}),
    (words._STOPPED_EARLY, "Early stopping triggered, no gain for 3 rounds", {}),
    (words._PROCESS_SUCCEEDED, "wandb: Waiting for W&B process to finish... (success).", {}),
    (words._TRAINING_TIME, "Total training time: 0:41:07", {}),
    (words._DURATION, "total validation time: 3", {}),
    (words._PER_ITEM, "total time 0:01:10 (0.7 s / it)", {}),
    (words._NOISE_LINE, "WARNING: the loader is slow", {}),
    (tracebacks._CRASH_REPORT, "Fatal Python error: Segmentation fault", {}),
    (words._MORE_WORK, "Starting evaluation of the best epoch", {}),
    (words._SUCCESS_REPORT, "\t(1) Normal termination (return value 0)", {}),
    (noise._EXIT_FUNCTION_NAME, "destroy_process_group", {}),
    (noise._INTERPRETER_EXIT_NAME, "_run_finalizers", {}),
    (noise._SAVING_FUNCTION, "save_checkpoint", {}),
    (noise._LAST_FRAME, '  File "/job/writer.py", line 8, in __exit__', {"function": "__exit__"}),
    (noise._TEARDOWN_NOISE, "[W] TCPStore: broken pipe", {}),
    (noise._MEASURED_ERROR, "Test: [0/9] class_error: 01.50 mean error = 0.0", {}),
    (noise.HANDLED_ERROR, "upload of metrics failed: HTTP 503, retrying (2/5)", {}),
    (noise.SHUTDOWN_NOISE, "could not close the cache: [Errno 9] Bad file descriptor", {}),
    (proof._MEASURE, "step 20, loss: 0.2", {}),
    (proof._OPEN_COUNTER, "epoch: 4, loss: 0.2", {"what": "epoch"}),
    (proof._LAST_WORDS, "rank 3 done", {}),
    (proof._NOT_OF_TRAINING, "New best model found at epoch 11: acc 0.61", {}),
    (proof._TEST_METRIC, "Test loss: 0.31, test accuracy: 0.82", {}),
    (proof._ONE_OF_SEVERAL, "fold 3 of the cross-validation", {}),
    (proof._METRIC, "loss on the test set: 1.8", {}),
    (rounds._STEP_OF_TOTAL, "iter: 120/200, loss: 0.2", {"step": "120", "total": "200"}),
    (rounds._BATCH_IN_BRACKETS, "Epoch: [3][120/500] loss 0.3", {}),
    (rounds._LETTER, "--- epoch", {}),
    (rounds._TIME_LEFT, "step 20 eta: 12:07", {}),
    (rounds._SUMMARY_LINE, "Best model is of epoch 2: loss 0.5", {}),
    (rounds._PASSING_RESULT, "New best model found at epoch 11: acc 0.61", {}),
    (rounds._TEST_RESULT, "Test loss: 0.31, test accuracy: 0.82", {}),
    (rounds._MENTIONED_STEP, "New best model found at epoch 11: acc 0.61", {}),
    (files._OUTPUT_FILE, "train.o77", {"before": "train.", "after": "77"}),
    (attempts._COUNTER_IN_EPOCH, "][ 100/5005]\tLoss 2.100", {"bracket": "100"}),
    (attempts._FRACTION_OF_EPOCH, ".95, 'loss': 2.1", {}),
    (
        files._KERNEL_LINE,
        "[  811.123456] Out of memory: Killed process 413 (python)",
        {},
    ),
    (files._KERNEL_WORDS, "[  811.123456] Out of memory: Killed process 413 (python)", {}),
    (words._SUCCESS_OF_ANY, "Warmup completed successfully", {}),
    (tracebacks.LOGGED_ERROR, "2026-11-30 05:00:00 - trainer - ERROR - step failed", {}),
    (flight._DUMP_NAME, "nccl_trace_rank_3.pkl", {"digits": "3"}),
    (flight._TORCH_DUMP_NAME, "_dump_6", {}),
    (exports.FRAME_START, 'File "<frozen runpy>", line 88, in _run_code', {}),
    (
        exports._LINE_TIME,
        "2031-05-06T07:08:05Z     raise ValueError(batch)",
        {"begin": "2031-05-06T07:08:05"},
    ),
    (exports._COLUMN_NAME, "textPayload", {}),
    (exports._ISO_TIME, "2031-05-06T07:08:11Z", {}),
    (exports._ESCAPED_NEWLINE, "first\\nsecond", {}),
    (exports._ESCAPED_TAB, "a\\tb", {}),
    (
        exports._ESCAPED_QUOTE,
        '  File \\"/app/lab/consoles/program.py\\", line 180, in <module>',
        {},
    ),
    (
        exports._JOINED_LINE,
        (
            'File "/job/train.py", line 12, in main step(batch) '
            'File "/job/data.py", line 7, in step raise ValueError(batch) ValueError: no labels in shard 9'
        ),
        {},
    ),
    (exports._JOINED_SOURCE, 'File "/job/train.py", line 12, in main ', {}),
    (exports._PYTEST_PREFIX, 'E     File "/job/train.py", line 12, in main', {}),
    (records._UNINDENTED_LINE, "Traceback (most recent call last):", {}),
    (stops._GPU_ERROR, "RuntimeError: CUDA error: unspecified launch failure", {}),
    (torchrun_folder._ATTEMPT_FOLDER, "attempt_0", {}),
]
"""Each pattern, a text that it matches, and the groups that it finds there."""


@pytest.mark.parametrize(("pattern", "example", "groups"), _EXAMPLES)
def test_each_pattern_finds_its_example(
    pattern: LazyPattern, example: str, groups: dict[str, str]
) -> None:
    """Each pattern finds its example, with these groups."""
    found = pattern.search(example)
    assert found is not None
    assert {name: text for name, text in found.groupdict().items() if text} == groups


def test_each_pattern_has_an_example() -> None:
    """A pattern without an example may be wrong, or not needed."""
    patterns = find_all(firstfault_logs)
    shown = {id(pattern) for pattern, _, _ in _EXAMPLES}
    assert [name for name, pattern in patterns.items() if id(pattern) not in shown] == []


def test_no_pattern_matches_an_empty_text() -> None:
    """No pattern is so loose that it matches an empty text; only an empty line is noise."""
    patterns = find_all(firstfault_logs)
    loose = {name for name, pattern in patterns.items() if pattern.search("") is not None}
    assert loose == {"firstfault_logs.completion.words._NOISE_LINE"}
