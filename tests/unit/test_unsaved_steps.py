"""What a rank says of saves that fail."""

from __future__ import annotations

import pytest

from elasticgang.checkpoint.unsaved import UnsavedSteps


# UNSAVED-1
def test_saves_that_fail_for_one_reason_have_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    unsaved = UnsavedSteps()
    for step in range(1, 12):
        unsaved.failed(step, f"no room for {step}", "no room")
    unsaved.failed(12, "another reason")
    unsaved.succeeded(13)
    unsaved.succeeded(14)
    unsaved.failed(15, "no room for 15", "no room")
    unsaved.succeeded(16)
    assert caplog.messages == [
        "step 1 is not saved: no room for 1",
        "step 2 is not saved (2 so far): no room for 2",
        "step 4 is not saved (4 so far): no room for 4",
        "step 8 is not saved (8 so far): no room for 8",
        "step 12 is not saved: another reason",
        "step 13 is saved again; 12 were not before it",
        "step 15 is not saved: no room for 15",
    ]


# UNSAVED-1
def test_saves_that_are_left_out_on_a_slow_disk_have_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    unsaved = UnsavedSteps()
    for step in range(1, 9):
        unsaved.left_out(2 * step, f"that of step {2 * step - 1} has not ended")
        unsaved.succeeded(2 * step - 1)
    assert caplog.messages == [
        "step 2 is not saved: that of step 1 has not ended",
        "step 4 is not saved (2 so far): that of step 3 has not ended",
        "step 8 is not saved (4 so far): that of step 7 has not ended",
        "step 16 is not saved (8 so far): that of step 15 has not ended",
    ]
