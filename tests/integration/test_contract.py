"""One contract for fake, static (real Gloo, real processes) and elastic gangs (under `elasticgang run`)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from elasticgang.errors import InvalidOperationError, LayoutError
from elasticgang.gang import FakeGang, GangGrid, ReduceOperation
from tests.integration import contract
from tests.support import reserved_port, run_preloaded

_SCRIPT = str(Path(__file__).with_name("contract_ranks.py"))
_DEADLINE_S = 120
pytestmark = pytest.mark.timeout(2 * _DEADLINE_S + 60)  # processes import torch, on whatever the machine has left


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 4), (3, 4)])
def test_a_fake_gang_keeps_the_contract(rank: int, size: int) -> None:
    gang = FakeGang(torch.device("cpu"), rank=rank, size=size)
    contract.same_on_every_rank(gang)
    contract.refusals(gang)
    contract.joined_parts(gang)
    contract.callbacks_that_wait(gang)
    contract.any_strides(gang)
    contract.any_strides_in_a_process_group(gang.as_process_group(), rank)
    if size > 1:
        contract.sub_gangs(gang)


def test_a_fake_gang_receives_what_it_sent() -> None:
    gang = FakeGang(torch.device("cpu"), rank=0, size=2)
    with pytest.raises(InvalidOperationError, match="wait forever"):
        gang.recv(torch.empty(1), 1)
    gang.send(torch.tensor([3.0]), 1)
    gang.recv(tensor := torch.empty(1), 1)
    assert tensor.item() == 3


def test_a_closed_fake_gang_refuses() -> None:
    gang = FakeGang(torch.device("cpu"))
    gang.close()
    with pytest.raises(InvalidOperationError):
        gang.all_reduce(torch.zeros(1), ReduceOperation.SUM)


def test_a_grid_of_a_fake_root() -> None:
    grid = GangGrid([2, 2, 2], ["a", "b", "c"], root=FakeGang(torch.device("cpu"), rank=3, size=8))
    assert grid.rank_groups(["b", "a"]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert grid.rank_groups(["a", "b"], ordered_as_given=True) == [[0, 2, 1, 3], [4, 6, 5, 7]]
    gang = grid.create_gang(["c", "a"])
    assert gang is not None
    assert (gang.rank, gang.size) == (1, 4), "rank 3 is second of [2, 3, 6, 7]"
    assert grid.get_gang(["a", "c"]) is gang
    with pytest.raises(KeyError, match="c-a"):
        grid.create_gang(["a", "c"])
    with pytest.raises(LayoutError, match="backend"):
        GangGrid([2], ["a"], backend="gloo", root=FakeGang(torch.device("cpu"), size=2))


def test_without_a_root_there_is_no_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)  # a job of one that ran before has set it
    with pytest.raises(InvalidOperationError, match="root"):
        GangGrid([1], ["a"])


# PGGANG-1
def test_static_gangs_keep_the_contract() -> None:
    with reserved_port() as port:
        done = run_preloaded([sys.executable, _SCRIPT, str(port)], timeout=_DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("contract kept") == 4


def test_elastic_gangs_keep_the_contract() -> None:
    command = [sys.executable, "-m", "elasticgang", "run", "--nproc-per-node", "3", _SCRIPT]
    done = run_preloaded(command, timeout=_DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("contract kept") == 3
