"""An agent's state machine when a rank's device has failed."""

from __future__ import annotations

import pytest

from elasticgang.protocol.agent_events import (
    Abort,
    CoordinatorConnected,
    Exited,
    Fail,
    Instruction,
    LeaseExpired,
    ReportDeviceFault,
    RequestRecord,
    Restart,
    Started,
    StartRank,
    Warn,
)
from elasticgang.protocol.agent_lifecycle import AgentLifecycle, AgentOptions
from elasticgang.protocol.device_errors import DEVICE_FAULT_STATUS
from elasticgang.protocol.devices import Devices, Taken
from tests.unit.agent_hosts import Host, rank_did, record_of, running

ECC = "CUDA error: uncorrectable ECC error encountered"


def faults(
    host: Host, member: str, step: int | None = 5, *, at_s: float = 0.0, status: int = DEVICE_FAULT_STATUS
) -> list[Instruction]:
    return host.state.handle(Exited(member, status, raised=True, step=step, at_s=at_s, device_fault=ECC))


def running_on(*devices: int, num_ranks: int, max_faults: int = 2) -> Host:
    host = running(num_ranks)
    host.state.devices = Devices(devices, num_ranks, max_faults)
    return host


# DEVICE-1
@pytest.mark.parametrize("status", [DEVICE_FAULT_STATUS, -9])
def test_a_rank_is_restarted_on_its_device_although_no_failure_of_the_script_is_allowed(status: int) -> None:
    host = running_on(0, 1, num_ranks=2)
    assert host.state.restarts.max_restarts == 0
    assert faults(host, "a1", status=status) == [
        Abort(("a0",), 1, rank_did("was killed by SIGKILL" if status < 0 else "exited with code 83", 1)),
        ReportDeviceFault(1, 1, ECC, 1, is_quarantined=False, next_device=1),
        Warn(f"device 1 of rank 1 has failed ({ECC}): restart 1 of 2 on it within an hour"),
        Restart(1, 0.0),
    ]


# DEVICE-2
def test_the_rank_of_a_quarantined_device_continues_on_a_spare_one() -> None:
    host = running_on(0, 1, 6, num_ranks=2, max_faults=0)
    assert faults(host, "a1")[1:] == [
        ReportDeviceFault(1, 1, ECC, 1, is_quarantined=True, next_device=6),
        Warn(f"device 1 of rank 1 has failed ({ECC}) and is quarantined: the rank continues on device 6"),
        Restart(1, 0.0),
    ]


# DEVICE-2
def test_without_a_spare_device_the_others_continue_without_the_rank() -> None:
    host = running_on(0, 1, 2, num_ranks=3, max_faults=0)
    assert faults(host, "a1")[1:] == [
        ReportDeviceFault(1, 1, ECC, 1, is_quarantined=True, next_device=None),
        Warn(f"device 1 of rank 1 has failed ({ECC}) and is quarantined: the rank is not restarted"),
    ]
    host.asks("a0", broken=True)
    assert host.asks("a2", broken=True) == [RequestRecord()]
    assert host.state.report().exited == ("a1",)
    host.is_answered(record_of(["a0", "a2"], 2))
    assert isinstance(faults(host, "a0", 6)[-1], Warn)
    assert faults(host, "a2", 7)[-1] == Fail(1, f"no rank of this host is left; the last one lost its device: {ECC}")


def test_the_last_rank_of_one_of_several_hosts_fails_its_agent() -> None:
    host = Host(1)
    host.state.devices = Devices((0,), 1, 0)
    host.start("a0")
    host.asks("a0")
    host.is_answered(record_of(["a0", "b0"]))
    assert isinstance(faults(host, "a0")[-1], Fail)


# DEVICE-4
def test_the_device_that_a_script_has_chosen_is_named_by_its_uuid() -> None:
    host = running_on(0, 1, 2, num_ranks=2, max_faults=0)
    taken = Taken("GPU-aa", is_chosen=True)
    done = host.state.handle(Exited("a1", DEVICE_FAULT_STATUS, raised=True, step=5, device_fault=ECC, taken=taken))
    assert done[1:] == [
        ReportDeviceFault(1, 1, ECC, 1, is_quarantined=True, next_device=None, uuid="GPU-aa", is_chosen=True),
        Warn(
            f"device GPU-aa of rank 1 has failed ({ECC}) and is quarantined: the rank is not restarted, because its "
            "script would choose the device again"
        ),
    ]


# DEVICE-3
def test_a_step_that_faults_on_another_device_too_fails_the_script() -> None:
    host = running_on(0, 1, 2, num_ranks=3, max_faults=5)
    host.commits("a0", "a1", "a2")
    assert Restart(1, 0.0) in faults(host, "a1", 5)
    host.asks("a0", broken=True)
    host.asks("a2", broken=True)
    host.is_answered(record_of(["a0", "a2"], 2))
    failed = Fail(DEVICE_FAULT_STATUS, "rank 0 exited with code 83; --max-restarts is 0")
    assert faults(host, "a0", 5) == [failed]


def test_a_fault_after_the_end_of_the_loop_fails_the_job_and_one_beside_the_end_does_not() -> None:
    host = running_on(0, 1, num_ranks=2)
    host.leaves("a0", finished=True)
    assert faults(host, "a1")[-1] == Warn(f"device 1 of rank 1 has failed ({ECC})")
    assert faults(host, "a0") == [Fail(DEVICE_FAULT_STATUS, "rank 0 exited with code 83")]


# DEVICE-2
def test_a_draining_rank_leaves_the_spare_device_to_the_others() -> None:
    host = running_on(0, 1, 6, num_ranks=2, max_faults=0)
    drained = host.state.handle(Exited("a1", DEVICE_FAULT_STATUS, raised=True, step=5, device_fault=ECC, draining=True))
    assert ReportDeviceFault(1, 1, ECC, 1, is_quarantined=True, next_device=None) in drained
    assert not any(isinstance(each, Restart) for each in drained)
    assert ReportDeviceFault(0, 0, ECC, 1, is_quarantined=True, next_device=6) in faults(host, "a0", 6)


# DEVICE-2
def test_a_rank_without_a_device_is_not_started_after_a_rejoin() -> None:
    agent = AgentLifecycle("a", AgentOptions("job", 3, devices=(0, 1, 2), max_device_faults=0))
    agent.handle(CoordinatorConnected("host", "127.0.0.1:7"), 0.0)
    for rank in range(3):
        agent.handle(Started(f"a{rank}", rank), 0.0)
    agent.handle(Exited("a1", DEVICE_FAULT_STATUS, raised=True, device_fault=ECC), 1.0)
    assert [agent.device_of(rank) for rank in range(3)] == [0, None, 2]
    agent.handle(LeaseExpired("no answer"), 2.0)
    for member in ("a0", "a2"):
        agent.handle(Exited(member, -9), 3.0)
    started = []
    instructions = agent.handle(CoordinatorConnected("host", "127.0.0.1:7"), 4.0)
    while instructions:
        (start,) = instructions
        assert isinstance(start, StartRank)
        started.append(start.local_rank)
        instructions = agent.handle(Started(f"b{start.local_rank}", start.local_rank), 4.0)
    assert started == [0, 2]
    for rank in (0, 2):
        agent.state.handle(Exited(f"b{rank}", 0))
    assert not agent.state.waits_for_start, "no further rank is awaited before the first generation"
