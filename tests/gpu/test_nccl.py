"""Static gangs over NCCL, one rank a device. What is asked of torch is seen without CUDA in `tests/integration`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RANKS = Path(__file__).with_name("ranks.py")
DEADLINE_S = 100


def begin(what: str, size: int) -> list[subprocess.Popen[str]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, str(RANKS), what],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def ended(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        outputs = [rank.communicate(timeout=DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


def test_gangs_over_nccl_keep_the_contract() -> None:
    """Of one rank, if there is one device: eager, on high-priority streams, split."""
    for rank, (code, out, err) in enumerate(ended(begin("contract", torch.cuda.device_count()))):
        assert code == 0, err
        assert f"rank {rank} kept the contract" in out


def test_a_survivor_outlives_its_peer() -> None:
    """With torch's own setting, or fairseq2's, the survivor's watchdog ends the process."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    (survivor, *_) = ended(begin("outlive", 2))
    code, out, err = survivor
    assert code == 0, err
    assert "rank 0 is alive" in out
