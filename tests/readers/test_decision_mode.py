"""FIRSTFAULT_DECISIONS, which every engine reads by one function."""

import pytest

from firstfault import decision_mode
from firstfault.decision_mode import ACT, OBSERVE, OFF, read_decision_mode


@pytest.mark.parametrize(
    ("text", "mode"),
    [(None, ACT), (" ", ACT), ("act", ACT), ("Observe", OBSERVE), (" off ", OFF), ("OFF", OFF)],
)
def test_valid_values_ignore_case_and_blanks(
    text: str | None, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a value firstfault acts; case and blanks around a value don't matter."""
    assert read_decision_mode({} if text is None else {"FIRSTFAULT_DECISIONS": text}) == mode
    assert not caplog.messages


@pytest.mark.parametrize("text", ["obsrve", "dry-run", "0", "no", "act,observe"])
def test_an_invalid_value_means_observe_with_one_warning(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A misspelled value means "observe", with one warning however often it is read."""
    monkeypatch.setattr(decision_mode, "_warned", set())
    assert [read_decision_mode({"FIRSTFAULT_DECISIONS": text}) for _ in range(3)] == [OBSERVE] * 3
    [warning] = caplog.messages
    assert f"FIRSTFAULT_DECISIONS must be off, observe or act, not '{text}'" in warning
