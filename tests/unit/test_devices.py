"""Which device of its host each rank uses, after faults: the rules of `protocol/devices.py`."""

from __future__ import annotations

import pytest

from elasticgang.protocol.devices import NOT_JOINED, Devices, Fault, FaultOutcome, Taken
from elasticgang.protocol.restarts import WINDOW_S


def fault(
    rank: int, step: int | None = None, generation: int = 1, at_s: float = 0.0, taken: Taken = NOT_JOINED
) -> Fault:
    return Fault(rank, step, generation, "ECC", at_s, taken=taken)


def test_ranks_take_the_devices_in_order_and_the_rest_is_spare() -> None:
    devices = Devices((4, 2, 7), 2)
    assert [devices.of(rank) for rank in range(2)] == [4, 2]
    assert devices.num_without == 0


def test_without_known_devices_each_rank_has_that_of_its_number() -> None:
    devices = Devices()
    assert [devices.of(rank) for rank in (0, 5)] == [0, 5]
    assert devices.num_without == 0


# DEVICE-1
@pytest.mark.parametrize("max_faults", [0, 1, 3])
def test_device_1_a_rank_starts_on_its_device_again_so_often(max_faults: int) -> None:
    devices = Devices((0, 1, 2), 2, max_faults)
    for number in range(1, max_faults + 1):
        assert devices.faulted(fault(1)) == FaultOutcome(1, number, False, 1)
    assert devices.faulted(fault(1)) == FaultOutcome(1, max_faults + 1, True, 2)


# DEVICE-1
def test_device_1_faults_of_more_than_an_hour_ago_do_not_count() -> None:
    devices = Devices((0, 1), 1, 1)
    for hour in range(5):
        assert devices.faulted(fault(0, at_s=hour * WINDOW_S)) == FaultOutcome(0, 1, False, 0)
    assert devices.faulted(fault(0, at_s=5 * WINDOW_S - 1)) == FaultOutcome(0, 2, True, 1)


# DEVICE-1
def test_device_1_each_device_has_faults_of_its_own() -> None:
    devices = Devices((0, 1), 2, 1)
    assert devices.faulted(fault(0)) == FaultOutcome(0, 1, False, 0)
    assert devices.faulted(fault(1)) == FaultOutcome(1, 1, False, 1)


# DEVICE-2
def test_device_2_a_quarantined_device_is_never_used_again() -> None:
    devices = Devices((0, 1, 2, 3), 2, 0)
    assert devices.faulted(fault(0)) == FaultOutcome(0, 1, True, 2)
    assert [devices.of(rank) for rank in range(2)] == [2, 1]
    assert devices.faulted(fault(1)) == FaultOutcome(1, 1, True, 3)
    assert devices.faulted(fault(0, at_s=10 * WINDOW_S)) == FaultOutcome(2, 1, True, None)
    assert [devices.of(rank) for rank in range(2)] == [None, 3]
    assert devices.num_without == 1


# DEVICE-2
@pytest.mark.parametrize("devices", [(), (0, 1)])
def test_device_2_without_a_spare_device_the_rank_has_none(devices: tuple[int, ...]) -> None:
    known = Devices(devices, 2, 0)
    assert known.faulted(fault(1)) == FaultOutcome(1, 1, True, None)
    assert [known.of(rank) for rank in range(2)] == [0, None]
    assert known.num_without == 1


# DEVICE-2
def test_device_2_a_rank_that_does_not_start_again_takes_no_spare_device() -> None:
    devices = Devices((0, 1, 2), 2, 0)
    assert devices.faulted(Fault(0, 5, 1, "ECC", 0.0, restarts=False)) == FaultOutcome(0, 1, True, None)
    assert devices.faulted(fault(1)) == FaultOutcome(1, 1, True, 2)


# DEVICE-3
def test_device_3_a_step_that_faults_on_another_device_in_a_later_generation_is_the_scripts_fault() -> None:
    devices = Devices((0, 1, 2), 3, 9)
    assert devices.faulted(fault(0, 5, 1)) is not None
    assert devices.faulted(fault(0, 5, 2)) is not None, "the same device"
    assert devices.faulted(fault(1, 6, 2)) is not None, "another step"
    assert devices.faulted(fault(1, 5, 3)) is None
    assert devices.faulted(fault(2, 5, 3)) is None
    assert devices.faulted(fault(0, 5, 4)) is None, "the step has faulted on others"
    assert devices.faulted(fault(1, 7, 5)) == FaultOutcome(1, 2, False, 1), "the script's faults do not count"


# DEVICE-3
def test_device_3_a_fault_that_is_told_after_one_of_a_later_generation_is_the_scripts() -> None:
    """Its process took longer to end."""
    devices = Devices((0, 1, 2), 3, 9)
    assert devices.faulted(fault(1, 5, 2)) is not None
    assert devices.faulted(fault(0, 5, 1)) is None


# DEVICE-3
def test_device_3_devices_that_fault_at_once_or_before_a_step_are_at_fault() -> None:
    devices = Devices((0, 1, 2), 3, 9)
    assert all(devices.faulted(fault(rank, 5, 4)) is not None for rank in range(3))
    assert all(devices.faulted(fault(rank, None, rank)) is not None for rank in range(3))


# DEVICE-4
def test_device_4_faults_count_for_the_uuid_whatever_rank_or_index_has_it() -> None:
    """The script of rank 1 takes the device of rank 0."""
    devices = Devices((0, 1, 2, 3), 2, 2)
    mine, chosen = Taken("GPU-aa"), Taken("GPU-aa", is_chosen=True)
    assert devices.faulted(fault(0, taken=mine)) == FaultOutcome(0, 1, False, 0, "GPU-aa")
    assert devices.faulted(fault(1, taken=chosen)) == FaultOutcome(1, 2, False, 1, "GPU-aa")
    assert devices.faulted(fault(0)) == FaultOutcome(0, 3, True, 2, "GPU-aa"), "it has not joined: its last device"
    assert devices.faulted(fault(1, taken=Taken("GPU-bb"))) == FaultOutcome(1, 1, False, 1, "GPU-bb")


# DEVICE-1, DEVICE-4
def test_device_4_a_fault_before_the_rank_has_joined_counts_for_the_uuid_that_it_tells_later() -> None:
    devices = Devices((0, 1), 1, 2)
    taken = Taken("GPU-aa")
    assert devices.faulted(fault(0)) == FaultOutcome(0, 1, False, 0)
    assert devices.faulted(fault(0, taken=taken)) == FaultOutcome(0, 2, False, 0, "GPU-aa")
    assert devices.faulted(fault(0, taken=taken)) == FaultOutcome(0, 3, True, 1, "GPU-aa")


# DEVICE-4
def test_device_4_a_rank_that_chooses_its_device_is_not_moved() -> None:
    devices = Devices((0, 1, 2), 2, 0)
    outcome = devices.faulted(fault(1, taken=Taken("GPU-aa", is_chosen=True)))
    assert outcome == FaultOutcome(1, 1, True, None, "GPU-aa")
    assert devices.faulted(fault(0, taken=Taken("GPU-cc"))) == FaultOutcome(0, 1, True, 2, "GPU-cc")


# DEVICE-3, DEVICE-4
def test_device_4_one_device_under_two_indices_is_one_device() -> None:
    devices = Devices((0, 1, 2), 2, 9)
    assert devices.faulted(fault(0, 5, 1, taken=Taken("GPU-aa"))) is not None
    assert devices.faulted(fault(1, 5, 2, taken=Taken("GPU-aa", is_chosen=True))) is not None
    assert devices.faulted(fault(1, 5, 3, taken=Taken("GPU-bb"))) is None
