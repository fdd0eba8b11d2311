"""The doctor's verdicts, over facts that no machine here has to have."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from elasticgang.doctor.verdicts import (
    GIB,
    MIB,
    Coordinator,
    Cuda,
    Disk,
    Facts,
    Finding,
    Job,
    Level,
    Limits,
    Torch,
    as_json,
    exit_code,
    judge,
    lines_of,
    version_of,
)

OK, WARNING, ERROR, NOT_APPLICABLE = Level.OK, Level.WARNING, Level.ERROR, Level.NOT_APPLICABLE
JOB = Job(num_local_ranks=8, num_ranks=16)
DISK = Disk("/somewhere", 100 * GIB)
CUDA = Cuda(2, (13, 0), (13, 0), (2, 29, 3), (2, 29, 3), (0, 0), ())
TORCH = Torch("2.13.0+cpu", True, None)
FACTS = Facts(
    python=(3, 11),
    torch=TORCH,
    torchft="0.2.0",
    has_nvidia=False,
    pidfd_error="",
    memfd_error="",
    shm=DISK,
    files=Limits(1 << 16, 1 << 20),
    processes=Limits(None, None),
    container_processes=Limits(None, None),
    loopback_error="",
    port=29400,
    port_error="",
    num_ports=28232,
    host_name="host7",
    lookup_s=0.001,
    resolution_s=1e-9,
    clock="tsc",
    py_spy=None,
    temporary=DISK,
    run_dir=DISK,
    checkpoints=DISK,
    coordinator=Coordinator("host1:29400", 0.001),
)
ON_GPUS = replace(FACTS, torch=replace(TORCH, cuda=CUDA), has_nvidia=True)
DEVICE_CHECKS = ("CUDA driver", "NCCL", "compute mode", "peer access")


def found(facts: Facts, check: str, job: Job = JOB) -> Finding:
    (finding,) = (finding for finding in judge(facts, job) if finding.check == check)
    return finding


def of_cuda(**changes: object) -> Facts:
    return replace(ON_GPUS, torch=replace(TORCH, cuda=replace(CUDA, **changes)))  # type: ignore[arg-type]


def of_torch(**changes: object) -> Facts:
    return replace(FACTS, torch=replace(TORCH, **changes))  # type: ignore[arg-type]


def test_a_host_that_fits_is_all_right() -> None:
    findings = judge(FACTS, JOB)
    assert {finding.level for finding in findings if finding.check not in DEVICE_CHECKS} == {OK}
    assert [found(FACTS, check).level for check in DEVICE_CHECKS] == [NOT_APPLICABLE] * 4
    assert {finding.level for finding in judge(ON_GPUS, JOB)} == {OK}
    assert exit_code(findings) == 0
    assert not any(finding.mend for finding in findings)


BAD: list[tuple[str, Level, Facts, str]] = [
    ("Python", ERROR, replace(FACTS, python=(3, 9)), "3.9 is not supported"),
    ("Python", ERROR, replace(FACTS, python=(3, 14)), "3.14 is not supported"),
    ("torch", ERROR, of_torch(error="No module named 'torch'"), "No module named 'torch'"),
    ("torch", ERROR, of_torch(version="2.12.1"), "2.12.1 is too old"),
    ("torch", ERROR, of_torch(has_gloo=False), "without Gloo"),
    ("torch", WARNING, of_torch(version="2.15.0"), "2.15.0.* run with 2.13"),
    ("torchft", ERROR, replace(FACTS, torchft=None), "not installed"),
    ("torchft", ERROR, replace(FACTS, torchft="0.1.1"), "0.1.1 is too old"),
    ("torchft", WARNING, replace(FACTS, torchft="0.10.0"), "0.10.0.* run with 0.2"),
    ("CUDA driver", WARNING, replace(FACTS, has_nvidia=True), "torch was built without CUDA"),
    ("CUDA driver", ERROR, of_cuda(driver=None, num_devices=0), "libcuda.so.1"),
    ("CUDA driver", ERROR, of_cuda(driver=(12, 8), num_devices=0), "supports CUDA 12.8, torch was built with 13.0"),
    ("CUDA driver", ERROR, of_cuda(num_devices=0), "sees no device"),
    ("NCCL", WARNING, of_cuda(nccl=None), "built without it"),
    ("NCCL", WARNING, of_cuda(nccl=(2, 18, 1)), r"2\.18\.1 is loaded, but torch requires 2\.29\.3"),
    ("compute mode", ERROR, of_cuda(compute_modes=(0, 2)), "device 1: prohibited"),
    ("compute mode", WARNING, of_cuda(compute_modes=(3, 0)), "device 0: exclusive process"),
    ("compute mode", WARNING, of_cuda(compute_modes=None), "cannot be read"),
    ("peer access", WARNING, of_cuda(num_devices=3, no_peers=((0, 2), (1, 2))), "devices 0-2, 1-2"),
    ("pidfd", ERROR, replace(FACTS, pidfd_error="Function not implemented"), "Function not implemented"),
    ("memfd", ERROR, replace(FACTS, memfd_error="Operation not permitted"), "16 MiB.*Operation not permitted"),
    ("/dev/shm", WARNING, replace(FACTS, shm=Disk("/dev/shm", 64 * MIB)), "64 MiB free.* may need 512 MiB"),
    ("/dev/shm", WARNING, replace(FACTS, shm=Disk("/dev/shm", 0, "No such file")), "No such file"),
    ("open files", ERROR, replace(FACTS, files=Limits(103, 4096)), "^103; 8 ranks here of 16 need 360"),
    ("open files", WARNING, replace(FACTS, files=Limits(104, 4096)), "^104; .* need 360 .* with 256 for the script"),
    ("processes", ERROR, replace(FACTS, processes=Limits(1000, 1000, 900)), "^100 more threads.* need 288"),
    ("processes", ERROR, replace(FACTS, container_processes=Limits(512, 512, 300)), "^212 more threads"),
    ("loopback", ERROR, replace(FACTS, loopback_error="Network is unreachable"), "Network is unreachable"),
    ("default port", WARNING, replace(FACTS, port_error="Address already in use"), "29400.*already in use"),
    ("ports", WARNING, replace(FACTS, num_ports=100), "^100 "),
    ("ports", WARNING, replace(FACTS, num_ports=None), "cannot be read"),
    ("host name", WARNING, replace(FACTS, lookup_s=None), "host7 cannot be resolved"),
    ("host name", WARNING, replace(FACTS, lookup_s=5.0), "5.0 s"),
    ("clock", ERROR, replace(FACTS, resolution_s=0.01), "resolution 1e"),
    ("clock", WARNING, replace(FACTS, clock="hpet"), "source hpet, which is slow"),
    ("TMPDIR", WARNING, replace(FACTS, temporary=Disk("/t", 0, "No space left on device")), "/t: No space left"),
    ("run directory", WARNING, replace(FACTS, run_dir=Disk("/r", 0, "Read-only file system")), "/r: Read-only"),
    ("checkpoints", ERROR, replace(FACTS, checkpoints=Disk("/c", 0, "Permission denied")), "/c: Permission denied"),
    ("checkpoints", WARNING, replace(FACTS, checkpoints=Disk("/c", GIB)), "/c, 1.0 GiB free"),
    ("coordinator", ERROR, replace(FACTS, coordinator=Coordinator("h:1", 0.0, "Connection refused")), "h:1: Conn"),
    ("coordinator", WARNING, replace(FACTS, coordinator=Coordinator("h:1", 0.5)), "500.0 ms"),
]


@pytest.mark.parametrize(
    ("check", "level", "facts", "text"), BAD, ids=[f"{check}: {text}" for check, _, _, text in BAD]
)
def test_a_bad_fact_has_a_verdict_with_a_mend(check: str, level: Level, facts: Facts, text: str) -> None:
    finding = found(facts, check)
    assert finding.level is level
    assert re.search(text, finding.text)
    assert finding.mend
    assert exit_code(judge(facts, JOB)) == (level is ERROR)
    assert {each.check for each in judge(facts, JOB)} == {each.check for each in judge(FACTS, JOB)}


@pytest.mark.parametrize(
    ("check", "facts"),
    [
        ("checkpoints", replace(FACTS, checkpoints=None)),
        ("checkpoints", replace(FACTS, checkpoints="s3://bucket/x")),
        ("coordinator", replace(FACTS, coordinator=None)),
        ("peer access", of_cuda(num_devices=1, compute_modes=(0,))),
        ("CUDA driver", replace(of_cuda(driver=None, num_devices=0), has_nvidia=False)),
        ("NCCL", of_cuda(num_devices=0)),
        ("NCCL", of_torch(error="broken")),
    ],
)
def test_a_check_that_does_not_apply_is_neither(check: str, facts: Facts) -> None:
    finding = found(facts, check)
    assert finding.level is NOT_APPLICABLE
    assert not finding.mend


def test_a_newer_driver_and_another_patch_of_nccl_fit() -> None:
    assert found(of_cuda(driver=(13, 2)), "CUDA driver").level is OK
    assert found(of_cuda(driver=(13, 0), built=(13, 1)), "CUDA driver").level is OK  # within one major version
    assert found(of_cuda(nccl=(2, 29, 7)), "NCCL").level is OK
    assert found(of_cuda(nccl_pin=None), "NCCL").level is OK


def test_open_files_count_the_larger_of_agent_and_comm_process() -> None:
    assert Job(1, 1).num_files == 32 + 9 + 256
    assert Job(64, 64).num_files == 32 + 9 * 64 + 256  # the agent of a large host
    assert Job(8, 1024).num_files == 32 + 4 * 1024 + 256  # a comm process of a large job
    needed = Job(8, 1024).num_files
    assert found(replace(FACTS, files=Limits(needed, needed)), "open files", Job(8, 1024)).level is OK
    assert found(replace(FACTS, files=Limits(None, None)), "open files", Job(8, 1024)).level is OK


def test_the_mend_of_open_files_depends_on_the_hard_limit() -> None:
    assert found(replace(FACTS, files=Limits(64, 4096)), "open files").mend == "ulimit -n 360"
    assert "hard limit is 128" in found(replace(FACTS, files=Limits(64, 128)), "open files").mend


def test_the_mend_of_processes_names_the_limit_that_is_too_low() -> None:
    assert "ulimit -u" in found(replace(FACTS, processes=Limits(100, 100)), "processes").mend
    assert "--pids-limit" in found(replace(FACTS, container_processes=Limits(100, 100)), "processes").mend


def test_the_report_has_the_mend_below_its_line() -> None:
    facts = replace(FACTS, files=Limits(64, 4096), py_spy="/usr/bin/py-spy")
    lines = list(lines_of(judge(facts, JOB)))
    (place,) = (number for number, line in enumerate(lines) if line.startswith("error "))
    assert re.fullmatch(r"error +open files +64; 8 ranks .*", lines[place])
    assert lines[place + 1].strip() == "mend: ulimit -n 360"
    assert any(line.endswith("/usr/bin/py-spy") for line in lines)
    assert as_json(judge(facts, JOB))["exit_code"] == 1


@pytest.mark.parametrize(
    ("text", "version"), [("2.13.0+cpu", (2, 13, 0)), ("2.14.0a0+git1", (2, 14, 0)), ("2.15.0.dev1", (2, 15, 0))]
)
def test_a_version_is_its_leading_numbers(text: str, version: tuple[int, ...]) -> None:
    assert version_of(text) == version
