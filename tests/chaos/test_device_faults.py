"""`elasticgang run` when a rank's device fails. No rank here has a device: the scripts raise what torch raises on CUDA,
and the agent only passes on which device each rank shall use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.training_scripts import script, training
from tests.support import REPOSITORY, Job, kill, wait_until

ILLEGAL = "CUDA error: an illegal memory access was encountered"
SETUP = """
        device = os.environ["ELASTICGANG_DEVICE"]
        (here / "devices").open("a").write(f"{rank} on {device}\\n")
"""
# Rank 1 fails in each of its processes whose device is 1.
FAULT = """if rank == 1 and step.index >= 4:
                    if device == "1":
                        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\\n")
                    (here / "over").write_text(f"{device}\\n")"""


def faults(job: Job) -> list[tuple[int, int, int, bool, int | None]]:
    return [
        (fault["device"], fault["local_rank"], fault["number"], fault["is_quarantined"], fault["next_device"])
        for fault in job.events()
        if fault["event"] == "device_fault"
    ]


# DEVICE-1, DEVICE-2
def test_a_rank_moves_to_a_spare_device_after_too_many_faults(tmp_path: Path) -> None:
    path = training(tmp_path, steps=10**9, setup=SETUP, body=FAULT)
    options = ["--devices", "0,1,2,5", "--device-faults", "1", "--max-restarts", "0"]
    with Job(tmp_path, path, ranks=3, options=options) as job:
        assert job.expect_file(tmp_path / "over") == "5\n"
        job.expect("exited", status=83, count=2)  # threads of the agent write events and lines, maybe late
        job.expect("device_fault", count=2)
        assert faults(job) == [(1, 1, 1, False, 1), (1, 1, 2, True, 5)]
        job.expect_line(f"device 1 of rank 1 has failed ({ILLEGAL}): restart 1 of 1 on it within an hour")
        job.expect_line(f"({ILLEGAL}) and is quarantined: the rank continues on device 5")
    lines = (tmp_path / "devices").read_text().splitlines()
    assert sorted(lines[:3]) == ["0 on 0", "1 on 1", "2 on 2"]
    assert lines[3:] == ["1 on 1", "1 on 5"]
    statuses = [event["status"] for event in job.events() if event["event"] == "exited" and event["status"]]
    assert statuses[:2] == [83, 83]


# DEVICE-2
def test_without_a_spare_device_the_others_continue_without_the_rank(tmp_path: Path) -> None:
    body = f"""if rank == 1 and step.index == 4:
                    raise RuntimeError({ILLEGAL!r})
                while step.index == 8 and not (here / "seen").exists():
                    time.sleep(0.005)"""
    path = training(tmp_path, steps=10, setup=SETUP, body=body, after='print("finished", manager.committed_steps)')
    with Job(tmp_path, path, ranks=3, options=["--device-faults", "0"]) as job:
        job.expect("device_fault", device=1, is_quarantined=True, next_device=None)
        job.expect("generation", generation=2)
        (tmp_path / "seen").touch()
        assert job.wait() == 0, job.stderr
        assert job.stdout.count("finished 10") == 2
        assert "is quarantined: the rank is not restarted" in job.stderr
        assert [event["local_rank"] for event in job.events() if event["event"] == "spawned"].count(1) == 1


def test_a_rank_that_faults_in_every_step_leaves_when_it_has_no_device(tmp_path: Path) -> None:
    body = 'if rank == 1: raise eg.DeviceError("the memory test failed")'
    with Job(tmp_path, training(tmp_path, steps=10**9, body=body), ranks=2) as job:
        job.expect("device_fault", is_quarantined=True)
        assert faults(job) == [(1, 1, 1, False, 1), (1, 1, 2, False, 1), (1, 1, 3, True, None)]
        job.expect_line("(the memory test failed) and is quarantined: the rank is not restarted")
        assert [event["local_rank"] for event in job.events() if event["event"] == "spawned"] == [0, 1, 1, 1]


# CUDA-1
def test_a_fault_that_ends_a_rank_by_sigabrt_is_the_devices(tmp_path: Path) -> None:
    """As where a thread of torch, or a destructor, meets the error: C++ writes its text and aborts the process."""
    body = f"""if rank == 1 and step.index == 4:
                    print("terminate called after throwing an instance of 'c10::AcceleratorError'", file=sys.stderr)
                    print("  what():  {ILLEGAL}", file=sys.stderr, flush=True)
                    os.abort()
                while step.index == 8 and not (here / "seen").exists():
                    time.sleep(0.005)"""
    path = training(tmp_path, steps=10, body=body)
    with Job(tmp_path, path, ranks=3, options=["--device-faults", "0", "--max-restarts", "0"]) as job:
        job.expect("device_fault", device=1, is_quarantined=True, reason=ILLEGAL)
        (tmp_path / "seen").touch()
        assert job.wait() == 0, job.stderr


# DEVICE-4
def test_a_fault_counts_for_the_device_that_the_script_has_chosen(tmp_path: Path) -> None:
    """As if there were four devices. Rank 1 takes that of rank 0."""
    text = f"""\
    import os
    from types import SimpleNamespace
    import torch
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 4
    torch.cuda.set_device = torch.cuda.synchronize = lambda device: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"uuid-{{device.index}}")
    import elasticgang as eg
    rank = int(os.environ["LOCAL_RANK"])
    manager = eg.join(device="cuda:0" if rank == 1 else None, process_group="isolated-gloo")
    raise RuntimeError({ILLEGAL!r})
    """
    with Job(tmp_path, script(tmp_path, text), ranks=3, options=["--device-faults", "0"]) as job:
        assert job.wait() == 1, job.stderr
        found = {fault["local_rank"]: fault for fault in job.events() if fault["event"] == "device_fault"}
        assert {rank: found[rank]["uuid"] for rank in found} == {0: "GPU-uuid-0", 1: "GPU-uuid-0", 2: "GPU-uuid-2"}
        assert [found[rank]["is_chosen"] for rank in range(3)] == [False, True, False]
        assert "device GPU-uuid-0 of rank 1 has failed" in job.stderr
        assert "device 2 (GPU-uuid-2) of rank 2 has failed" in job.stderr


# DEVICE-3
def test_a_step_that_faults_on_one_device_after_the_other_fails_the_script(tmp_path: Path) -> None:
    """Rank 2 holds the state all the time. The process of rank 1 may be gone before that of rank 0 is."""
    body = f"""if step.index == 4 and rank == (0 if manager.generation == 1 else 1):
                    raise RuntimeError({ILLEGAL!r})"""
    path = training(tmp_path, steps=10**9, body=body)
    with Job(tmp_path, path, ranks=3, options=["--device-faults", "9", "--max-restarts", "0"]) as job:
        assert job.wait() == 83
        job.assert_nothing_left()
        [first] = faults(job)
        assert first in [(0, 0, 1, False, 0), (1, 1, 1, False, 1)]
        error = f"elasticgang: error: rank {1 - first[0]} exited with code 83; --max-restarts is 0"
        assert job.stderr.splitlines()[-1] == error


def test_a_fault_does_not_wait_for_threads_or_exit_functions_of_the_script(tmp_path: Path) -> None:
    """Both could wait for the device."""
    text = f"""\
    import atexit, threading, time
    atexit.register(time.sleep, 600)
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise RuntimeError({ILLEGAL!r})
    """
    with Job(tmp_path, script(tmp_path, text), ranks=1, options=["--device-faults", "0"]) as job:
        assert job.wait() == 1, job.stderr
        job.expect("exited", local_rank=0, status=83)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--devices", "0,1"], "--devices must name one device for each of the 3 ranks and spares, but names 2"),
        (["--devices", "0,1,1"], "must be different indices with commas between, but is '0,1,1' instead"),
        (["--devices", "0,-1,2"], "must be different indices with commas between"),
        (["--device-faults", "-1"], "--device-faults must be at least 0, but is -1 instead"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: list[str], reason: str, tmp_path: Path) -> None:
    with Job(tmp_path, script(tmp_path, ""), options=["--spares", "1", *options]) as job:
        assert job.wait() == 2
        assert reason in job.stderr


def test_status_and_events_name_the_quarantined_device(tmp_path: Path) -> None:
    from elasticgang.watch.summary import Summary
    from elasticgang.watch.terminal import lines_of

    body = f"""if rank == 1 and step.index == 2:
                    raise RuntimeError({ILLEGAL!r})"""
    with Job(tmp_path, training(tmp_path, body=body), ranks=2, options=["--device-faults", "0"]) as job:
        assert job.wait() == 0, job.stderr
        summary = Summary()
        for event in job.events():
            summary.add(event)
    report = summary.report({}, 1.0, is_alive=False)
    assert report["device_faults"] == [
        {"device": 1, "uuid": "", "num_faults": 1, "reason": ILLEGAL, "is_quarantined": True}
    ]
    assert f"  device 1 has failed 1 time, and is quarantined: {ILLEGAL}" in list(lines_of(report))


# MEMORY-1
def test_a_rank_waits_until_the_driver_has_freed_the_memory_of_the_former_one(tmp_path: Path) -> None:
    """The agent's pynvml is a stand-in, whose answers this test writes."""
    (tmp_path / "pynvml.py").write_text("from tests.integration.fake_nvml import *\n")
    env = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "FAKE_NVML": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0,1"}
    with Job(tmp_path, training(tmp_path, steps=10**9), ranks=2, options=["--devices", "0,1"], env=env) as job:
        job.expect("generation", generation=1)
        wait_until((tmp_path / "waits").exists, "the agent has found the devices")
        pid = job.rank_pid(1)
        (tmp_path / "users-1").write_text(str(pid))
        kill(pid)
        reads = tmp_path / "read-1"
        wait_until(
            lambda: reads.exists() and reads.stat().st_size >= 5, "the agent looks at the device again and again"
        )
        assert job.rank_pid(1) == pid, "not restarted yet"
        (tmp_path / "users-1").unlink()
        job.expect("spawned", count=2, local_rank=1)
        assert "has not freed its memory" not in job.stderr


def test_what_the_driver_reports_is_part_of_the_reason(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("from tests.integration.fake_nvml import *\n")
    env = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "FAKE_NVML": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0,1"}
    body = f"""if rank == 1 and step.index == 2:
                    (here / "asks").touch()
                    while not (here / "answered").exists():
                        time.sleep(0.005)
                    raise RuntimeError({ILLEGAL!r})"""
    options = ["--devices", "0,1", "--device-faults", "0"]
    with Job(tmp_path, training(tmp_path, body=body), ranks=2, options=options, env=env) as job:
        wait_until((tmp_path / "asks").exists, "rank 1 is in the step")
        wait_until((tmp_path / "waits").exists, "the agent has found the devices")
        (tmp_path / "xid").write_text("79")
        os.replace(tmp_path / "xid", tmp_path / "xid-1")
        wait_until(lambda: not (tmp_path / "xid-1").exists(), "the driver has passed on the error")
        (tmp_path / "waits").unlink()  # the agent touches it when it waits for the next error
        wait_until((tmp_path / "waits").exists, "the agent has read the error")
        (tmp_path / "answered").touch()
        assert job.wait() == 0, job.stderr
        (fault,) = [event for event in job.events() if event["event"] == "device_fault"]
        assert fault["reason"] == f"{ILLEGAL}; the driver reports Xid 79"
