"""Which device a rank takes, and which process groups follow from it. A machine without CUDA pretends to have it: the
answers of torch are replaced before `join`. `tests/gpu` has what needs a device."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import elasticgang as eg
from elasticgang import testing
from elasticgang.comm.kinds import default_process_group
from elasticgang.launch.run import PRELOAD, REHEARSAL
from tests.chaos.training_scripts import script, training
from tests.support import Job

NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
PRETENDS = """\
import os, sys
import torch
import torch.distributed as dist
import elasticgang as eg
current = []
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 4
torch.cuda.set_device = current.append
"""


def unset_nccl_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """`join` on CUDA sets them; the end of the test takes them back."""
    for name in NCCL_SETTINGS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """As if there were four devices. Returns what `torch.cuda.set_device` gets."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "2")
    unset_nccl_settings(monkeypatch)
    return chosen


@pytest.mark.parametrize(
    ("given", "device"), [(None, "cuda:2"), ("cuda", "cuda:2"), ("cuda:1", "cuda:1"), (torch.device("cpu"), "cpu")]
)
def test_a_process_takes_its_own_device_unless_it_names_another(
    current: list[torch.device], given: torch.device | str | None, device: str
) -> None:
    manager = eg.join(device=given)
    expected = torch.device(device)
    assert manager.device == manager.gangs.root.device == expected
    assert current == ([expected] if expected.type == "cuda" else [])


# DRIVER-1
def test_a_rank_votes_after_its_device_has_reduced_the_gradients(
    current: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []

    class Mark:
        """An event."""

        def record(self, stream: object) -> None:
            self._stream = stream

        def synchronize(self) -> None:
            done.append(self._stream)

    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    manager = eg.join(device="cuda:1")
    model = torch.nn.Linear(2, 1)
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.register_state(model=model, optim=optim)
    before_vote: list[object] = []
    for step in manager.steps(1):
        with step, testing.fail_at("totals_received", lambda: before_vote.extend(done)):
            model(torch.ones(1, 2)).sum().backward()
            assert optim.step(weight=1.0)
    assert before_vote == ["stream of cuda:1"]


def test_a_rank_beyond_the_devices_is_refused(current: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(eg.OperationalError, match="LOCAL_RANK must be less than the number of CUDA devices"):
        eg.join()
    assert eg.join(device="cuda:0").device == torch.device("cuda", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_without_cuda_the_device_is_the_cpu_and_cuda_is_refused() -> None:
    assert eg.join().device == torch.device("cpu")
    with pytest.raises(eg.NotSupportedError, match="`device` is cuda:1, but CUDA is not available"):
        eg.join(device="cuda:1")


def test_the_default_process_group_follows_the_device() -> None:
    assert [default_process_group(kind) for kind in ("cuda", "cpu")] == ["nccl", "isolated-gloo"]


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="torch has NCCL")
def test_a_job_on_cuda_uses_nccl_unless_another_group_is_named(tmp_path: Path) -> None:
    text = textwrap.dedent(PRETENDS) + "eg.join()\n"
    with Job(tmp_path, script(tmp_path, text), ranks=2) as job:
        assert job.wait() == 1
        assert "NotSupportedError: nccl is not available: torch was built without nccl" in job.stderr
    other = tmp_path / "other"
    other.mkdir()
    with Job(other, script(other, text), ranks=2, options=["--process-group", "gloo"]) as job:
        assert job.wait() == 1
        assert "ValueError: `process_group` 'gloo' is for tensors on cpu, but `device` is cuda:" in job.stderr


def test_the_ranks_of_a_job_take_one_device_each(tmp_path: Path) -> None:
    text = PRETENDS + textwrap.dedent(
        """\
        dist.is_nccl_available = lambda: True
        manager = eg.join()
        print("device", manager.device, "current", *current)
        """
    )
    with Job(tmp_path, script(tmp_path, text), ranks=3) as job:
        assert job.wait() == 0, job.stderr
        assert sorted(job.stdout.splitlines()) == [
            f"[rank {rank} step 0] device cuda:{rank} current cuda:{rank}" for rank in range(3)
        ]


# RENDEZVOUS-2
def test_a_rank_leaves_a_generation_once_its_streams_have_drained(tmp_path: Path) -> None:
    """After the end of the groups, which lets the streams go on that wait for a collective."""
    text = PRETENDS + textwrap.dedent(
        """\
        from elasticgang.comm import ProcessGroupGloo

        done = []
        torch.cuda.synchronize = lambda device: done.append(f"drained {device}")
        torch.cuda.current_stream = lambda device: None

        class Mark:
            def record(self, stream):
                pass

            def synchronize(self):
                pass

        torch.cuda.Event = Mark

        class Group(ProcessGroupGloo):
            _kind = "cpu"

            def abort(self, errored=True):
                done.append("aborted")
                super().abort(errored)

        manager = eg.join(process_group=Group)
        model = torch.nn.Linear(2, 1)
        optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
        manager.register_state(model=model, optim=optim)
        for step in manager.steps(2):
            with step:
                done.clear()
                model(torch.ones(1, 2)).sum().backward()
                optim.step(weight=1.0)
        print(done[0], done[-1], done.index(done[-1]) > max(i for i, what in enumerate(done) if what == "aborted"))
        """
    )
    with Job(tmp_path, script(tmp_path, text), ranks=2) as job:
        assert job.wait() == 0, job.stderr
        assert sorted(line.split("] ")[1] for line in job.stdout.splitlines()) == [
            f"aborted drained cuda:{rank} True" for rank in range(2)
        ]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("reduction", ["sum", "reproducible"])
def test_a_job_trains_whatever_the_default_device_is(reduction: str, ranks: int, tmp_path: Path) -> None:
    """As scripts that set CUDA as the default. What the runtime makes on the host stays there."""
    path = training(
        tmp_path, setup='torch.set_default_device("meta")', after='print("finished", manager.committed_steps)'
    )
    path.write_text(path.read_text().replace("nn.Linear(2, 1)", f"nn.Linear(2, 1), reduction={reduction!r}"))
    with Job(tmp_path, path, ranks=ranks) as job:
        assert job.wait() == 0, job.stderr
        assert job.stdout.count("finished 5") == ranks


# FORK-1
def test_no_module_that_the_fork_server_imports_asks_for_cuda() -> None:
    """`torch.cuda.is_available` starts CUDA's driver, although `torch.cuda.is_initialized` remains false: a process
    that is forked later cannot use CUDA."""
    program = f"""\
    import importlib, torch
    def refusal(name):  # one function for each: torch._dynamo has tables of them
        def refuse(*args, **options):
            raise AssertionError("an import has called torch.cuda." + name)
        return refuse
    for name in ("is_available", "device_count", "init", "set_device", "current_device"):
        setattr(torch.cuda, name, refusal(name))
    for module in {(*PRELOAD, REHEARSAL)!r}:
        module, _, function = module.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], stdin=subprocess.DEVNULL, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()
