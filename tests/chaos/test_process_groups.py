"""Whatever process group of torchft carries a job's data, a job goes on as over isolated Gloo, with the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import elasticgang as eg
from elasticgang.comm.kinds import PROCESS_GROUPS
from elasticgang.errors import NotSupportedError
from elasticgang.launch.cli import main
from tests.chaos.test_hangs import LIMIT_S, hung
from tests.chaos.test_kills import JOB, RECOVERY_S, Fault, alone, at, check, histories
from tests.chaos.training_scripts import training
from tests.exhaustive import exhaustive
from tests.support import Job

__all__ = ["alone"]  # the fixture

JOB_S = 400.0  # a guard
BABY_S = 120.0  # each generation starts two interpreters a rank, which import torch

pytestmark = pytest.mark.timeout(JOB_S + 20)


def run(directory: Path, faults: list[Fault], *script: str, ranks: int = 3, options: list[str]) -> Job:
    """The job, ended."""
    arguments = ["--output-dir", str(directory), "--faults", json.dumps(faults), *script]
    with Job(directory, JOB, *arguments, ranks=ranks, options=options) as job:
        job.wait(JOB_S)
    return job


def group_kinds(directory: Path) -> set[str]:
    return {line["group"] for history in histories(directory) for line in history if line["kind"] == "prepared"}


KILLS = [at("body", 1, step=4), at("votes_received", 0, step=9), at("applied", 2, step=14)]


def test_a_rank_is_killed_while_gloo_in_process_carries_the_data(tmp_path: Path, alone: str) -> None:
    job = run(tmp_path, KILLS, ranks=4, options=["--process-group", "gloo"])
    check(job, KILLS, alone)
    assert group_kinds(tmp_path) == {"torchft-gloo"}


@pytest.mark.parametrize(
    ("factory", "kind", "faults", "ranks", "recovery_s"),
    [
        ("ProcessGroupGloo", "torchft-gloo", KILLS, 3, RECOVERY_S),
        pytest.param("ProcessGroupBabyGloo", "torchft-baby-gloo", KILLS[:1], 3, BABY_S, marks=exhaustive),
        ("ProcessGroupBabyGloo", "torchft-baby-gloo", KILLS[:1], 2, BABY_S),
    ],
)
def test_a_rank_is_killed_while_a_group_of_torchft_carries_the_data(
    factory: str, kind: str, faults: list[Fault], ranks: int, recovery_s: float, tmp_path: Path, alone: str
) -> None:
    """With two ranks the one that is left trains alone, until its group is made anew with one that comes back."""
    job = run(tmp_path, faults, "--factory", factory, ranks=ranks, options=[])
    check(job, faults, alone, recovery_s=recovery_s)
    assert group_kinds(tmp_path) == ({kind} if ranks > 2 else {kind, ""})


SILENT = """\
from datetime import timedelta
from elasticgang.comm import ProcessGroupGloo

class Silent(ProcessGroupGloo):
    # As NCCL in process whose watchdog has aborted a communicator: the wait returns, and the result is not there.
    failed, num_failed = None, 0

    def configure(self, *args, **options):
        super().configure(*args, **options)
        self.failed = None

    def allreduce(self, tensors, opts):
        fails = rank == 1 and manager.step.index == 3 and not Silent.num_failed
        if not fails:
            return super().allreduce(tensors, opts)
        Silent.num_failed += 1
        self.failed = RuntimeError("the watchdog has aborted the communicator")
        return super().allreduce([tensor.clone() for tensor in tensors], opts)

    def errored(self):
        return self.failed
"""


# DRIVER-2
def test_a_step_whose_reduction_has_failed_in_silence_is_repeated(tmp_path: Path) -> None:
    """Rank 1 has its own gradient then and rank 0 the sum: they must not apply both."""
    text = training(
        tmp_path,
        body="",
        after="""
        (here / f"final-{rank}.json").write_text(repr([model.module.weight.tolist(), Silent.num_failed]))
        """,
    ).read_text()
    joined = "manager = eg.join()"
    assert joined in text
    path = tmp_path / "silent.py"
    making = f"{SILENT}\nmanager = eg.join(process_group=lambda: Silent(timedelta(seconds=60)))"
    path.write_text(text.replace(joined, making))
    with Job(tmp_path, path, ranks=2) as job:
        assert job.wait(JOB_S) == 0, job.stderr
    (first, none), (second, one) = (eval((tmp_path / f"final-{rank}.json").read_text()) for rank in range(2))
    assert (none, one) == (0, 1)
    assert first == second


def test_a_stopped_peer_of_a_collective_in_process_is_killed_and_the_others_go_on(tmp_path: Path, alone: str) -> None:
    """Its connections end with it, so that the collective of the others fails, and can be aborted."""
    faults = [at("body", 1, "stop", step=4)]
    job = run(tmp_path, faults, options=["--process-group", "gloo", f"--hang-timeout={LIMIT_S:g}"])
    check(job, faults, alone, recovery_s=20.0)
    assert hung(job) == [(1, False)]


def test_a_name_that_is_none_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--process-group", "mpi", str(JOB)])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "argument --process-group: invalid choice: 'mpi'" in told
    assert all(name in told for name in PROCESS_GROUPS)
    with pytest.raises(ValueError, match="`process_group` must be one of isolated-gloo, gloo, nccl, isolated-nccl,"):
        eg.join(process_group="mpi")


def test_the_help_teaches_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    told = " ".join(capsys.readouterr().out.split()).replace("- ", "-")  # where a line is broken
    assert "--process-group NAME the process groups of the gangs: isolated-gloo" in told
    assert "(default: nccl for ranks on CUDA, isolated-gloo otherwise)" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["nccl", "isolated-nccl"])
def test_nccl_without_cuda_is_refused_before_a_rank_starts(name: str, tmp_path: Path) -> None:
    with Job(tmp_path, JOB, "--output-dir", str(tmp_path), ranks=2, options=["--process-group", name]) as job:
        assert job.wait() == 2
    reason = "there is no CUDA device" if torch.distributed.is_nccl_available() else "torch was built without nccl"
    assert job.stderr == f"elasticgang: error: --process-group {name}: {name} is not available: {reason}.\n"
    assert job.events() == []
    with pytest.raises(NotSupportedError, match=f"{name} is not available: {reason}"):
        eg.join(process_group=name)
