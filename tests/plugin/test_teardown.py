"""Tasks that fail in their teardown, in real pods:
Flyte gets the outputs of those that had finished.
"""

from pathlib import Path

import pytest

from firstfault import MultiErrorFileOutputReader
from tests.plugin.running import running

pytestmark = pytest.mark.jobs

TEARDOWN = Path(__file__).parent / "jobs" / "teardown.py"


@pytest.mark.parametrize("how", ["group", "destructor"])
def test_a_failure_after_all_ranks_returned_leaves_the_outputs(tmp_path: Path, how: str) -> None:
    """Flyte reads the outputs and no error, no worker is restarted, and the verdict can be read."""
    with running(TEARDOWN, "train", tmp_path, {"how": how}) as run:
        ended = run.end()
    assert run.find_leftovers() == []
    assert ended.status == 0, ended.verdict
    assert ended.result["outputs"] == {"o0": 2.0}
    assert ended.attempt["engine"] == {"job": "Succeeded", "error_seen": None}
    assert not list(ended.prefix.glob("error*"))
    assert ended.verdict["headline"] == "finished, then SIGABRT in the teardown of rank 1"
    assert (ended.verdict["category"], ended.attempt["decision"]["action"]) == ("teardown", "stop")
    reader = MultiErrorFileOutputReader(str(ended.prefix))
    assert not reader.is_error()
    assert reader.job().restarts == ()
    assert "Retry: no: the job had finished, so its results are there" in ended.logs


@pytest.mark.parametrize(("how", "mode"), [("early", "act"), ("atexit", "observe")])
def test_a_failure_before_rank_0_returned_leaves_the_error(
    tmp_path: Path, how: str, mode: str
) -> None:
    """Rank 0 hadn't returned, or decisions are only observed: Flyte reads the error."""
    options = ("--env", f"FIRSTFAULT_DECISIONS={mode}")
    with running(TEARDOWN, "once", tmp_path, {"how": how}, *options) as run:
        ended = run.end()
    assert ended.status == 10
    assert ended.attempt["engine"]["error_seen"]["kind"] == "NON_RECOVERABLE"
    assert (ended.verdict["category"] == "teardown") is (mode == "observe")
    observed = "observed: would have written the outputs: the job had finished"
    assert ended.logs.count(observed) == (mode == "observe")


def test_outputs_that_flyte_cannot_convert_are_a_failed_job(tmp_path: Path) -> None:
    """All ranks had returned, but there are no outputs: the job failed, and not in its teardown."""
    with running(TEARDOWN, "unconverted", tmp_path, {"how": "a text"}) as run:
        ended = run.end()
    assert ended.status == 10
    assert not (ended.prefix / "outputs.pb").exists()
    assert MultiErrorFileOutputReader(str(ended.prefix)).is_error()
    assert ended.verdict["category"] != "teardown"
    assert "finished" not in ended.verdict["headline"]
    assert "TypeTransformerFailedError" in ended.verdict["message"]
