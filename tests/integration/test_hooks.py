"""Every communication hook of torch's DDP, with the parameters that it trains over Gloo."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from tests.integration.hook_ranks import HOOKS
from tests.support import run_preloaded

SIZE = 2
DEADLINE_S = 120
pytestmark = pytest.mark.timeout(2 * DEADLINE_S + 60)  # processes import torch, on whatever the machine has left

REFUSED_BY_TORCH = {
    "BF16_COMPRESS": "required CUDA",  # by its name, and by builds without CUDA alone; the hook itself works
    "QUANTIZE_PER_CHANNEL": "callback",  # takes NCCL's form of an all-gather's future, one stacked tensor
    "batched power SGD from the start": "AssertionError",  # torch 2.13 hands a matrix to what takes batches of them
    "optimizer in backward": "accelerator",  # makes a `torch.Stream`, which the CPU has none of
}
REFUSED_BY_GLOO = {"QUANTIZE_PER_TENSOR"}  # its future of an all-gather has no list for each input
NEAR = 0.01  # 8 bits a gradient
if torch.__version__ >= "2.15":  # these hooks work over Gloo too
    del REFUSED_BY_TORCH["BF16_COMPRESS"], REFUSED_BY_TORCH["QUANTIZE_PER_CHANNEL"]
    REFUSED_BY_GLOO.clear()

Found = list[dict[str, dict[str, Any]]]


def results(*arguments: str) -> Found:
    """Of each rank, by kind of group and hook."""
    launcher = [sys.executable, "-m", "tests.integration.forked_ranks", "--train", str(SIZE)]
    done = run_preloaded([*launcher, "tests/integration/hook_ranks.py", *arguments], timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found: Found = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.fixture(scope="module")
def found() -> Found:
    """Of Gloo as "gloo"; of the backend, an isolated and a swallowing group."""
    over_gloo, over_ours = results("gloo", "default", "isolated", "swallowing"), results("elasticgang", "default")
    return [
        {"gloo": gloo.pop("default"), **gloo, "backend": ours["default"]}
        for gloo, ours in zip(over_gloo, over_ours, strict=True)
    ]


@pytest.mark.parametrize("kind", ["isolated", "swallowing", "backend"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_trains_as_over_gloo(hook: str, kind: str, found: Found) -> None:
    for rank in found:
        gloo, ours = rank["gloo"][hook], rank[kind][hook]
        if hook in REFUSED_BY_TORCH and (hook != "BF16_COMPRESS" or isinstance(gloo, str)):
            assert REFUSED_BY_TORCH[hook] in gloo
            assert REFUSED_BY_TORCH[hook] in ours
        elif hook in REFUSED_BY_GLOO:
            assert "refused" in gloo
            assert ours == pytest.approx(rank["gloo"]["no hook"], abs=NEAR)
            assert ours != rank["gloo"]["no hook"]
        else:
            assert isinstance(gloo, list), gloo
            assert ours == gloo
