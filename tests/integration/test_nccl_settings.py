"""The settings of torch's NCCL groups that a rank needs to outlive a lost peer (SURVIVE-1)."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from elasticgang.comm.availability import check_available
from elasticgang.comm.cuda import Cuda
from elasticgang.comm.in_process import ProcessGroupNCCL
from elasticgang.comm.nccl_settings import apply_nccl_settings, check_nccl_settings
from elasticgang.errors import NotSupportedError
from tests.chaos.training_scripts import script
from tests.integration.test_placement import NCCL_SETTINGS, PRETENDS, unset_nccl_settings
from tests.support import Job


# SURVIVE-1
def test_variables_that_are_not_set_are_set_and_others_stay() -> None:
    environ = {"TORCH_NCCL_ENABLE_MONITORING": "False", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    apply_nccl_settings(environ)
    assert environ == NCCL_SETTINGS | {"TORCH_NCCL_ENABLE_MONITORING": "False", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    apply_nccl_settings(environ)


# SURVIVE-1
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "a rank ends when a peer is lost"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "a rank ends when a peer is lost"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "no collective times out"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "a rank ends when a peer is lost"),
        ("TORCH_NCCL_ENABLE_MONITORING", "1", "whose watchdog stands still"),
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "true", "before the rank has reported"),
        ("TORCH_NCCL_PROPAGATE_ERROR", "Y", "past the coordinator"),
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000", "hold up the abort of its group"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "hold up the abort of the process"),
    ],
)
def test_a_value_that_ends_healthy_ranks_is_refused_and_nothing_is_set(name: str, value: str, reason: str) -> None:
    environ = {name: value}
    with pytest.raises(NotSupportedError, match=f"{name} must be . or not set, but is '{value}' instead: .*{reason}"):
        check_nccl_settings(environ)
    with pytest.raises(NotSupportedError, match=reason):
        apply_nccl_settings(environ)
    assert environ == {name: value}


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    unset_nccl_settings(monkeypatch)


# SURVIVE-1
@pytest.mark.usefixtures("unset")
def test_they_are_set_before_a_comm_process_makes_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def set_device(device: int) -> None:
        seen.append({name: os.environ[name] for name in NCCL_SETTINGS})
        raise RuntimeError("there is no device")

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    with pytest.raises(RuntimeError, match="there is no device"):
        Cuda().new_group(None, 0, 1, 0, timedelta(seconds=1))
    assert seen == [NCCL_SETTINGS]


# SURVIVE-1
@pytest.mark.usefixtures("unset")
def test_they_are_set_before_a_group_within_the_process_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "")  # so that it is put back
    monkeypatch.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT")
    group = ProcessGroupNCCL(timedelta(seconds=1.5))
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "2", "without a warning of torchft"
    with contextlib.suppress(Exception):  # torch has no NCCL, or there is no device
        group.configure("127.0.0.1:1/x", "replica", 0, 1)
    assert {name: os.environ.get(name) for name in NCCL_SETTINGS} == NCCL_SETTINGS


# SURVIVE-1
@pytest.mark.usefixtures("unset")
def test_the_command_line_and_join_refuse_a_value_before_they_look_for_a_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    for name in ("nccl", "isolated-nccl"):
        with pytest.raises(NotSupportedError, match="TORCH_NCCL_ENABLE_MONITORING must be 0 or not set"):
            check_available(name)
    text = PRETENDS + 'dist.is_nccl_available = lambda: True\neg.join()\nprint("has joined")\n'
    with Job(tmp_path, script(tmp_path, text), env={"TORCH_NCCL_ENABLE_MONITORING": "1"}) as job:
        assert job.wait() == 1
        assert "NotSupportedError: the environment variable TORCH_NCCL_ENABLE_MONITORING must be 0" in job.stderr
        assert "has joined" not in job.stdout


# SURVIVE-1
@pytest.mark.usefixtures("unset")
def test_a_rank_on_cuda_has_the_settings_once_it_has_joined(tmp_path: Path) -> None:
    text = PRETENDS + (
        "dist.is_nccl_available = lambda: True\neg.join()\n"
        'print(sorted(item for item in os.environ.items() if item[0].startswith("TORCH_NCCL_")))\n'
    )
    with Job(tmp_path, script(tmp_path, text), ranks=1) as job:
        assert job.wait() == 0, job.stderr
        assert job.stdout == f"[rank 0 step 0] {sorted(NCCL_SETTINGS.items())}\n"
