"""What a gang on CUDA asks of torch, seen without CUDA: torch's part is replaced by what keeps its arguments.

`tests/gpu` has what needs a device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elasticgang.errors import GangError, InvalidOperationError, NotSupportedError
from elasticgang.gang import Gang, GangGrid, ProcessGroupGang, create_fsdp_gangs, create_parallel_gangs, process_group

CUDA = torch.device("cuda", 1)
ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@dataclass(eq=False)
class Group:
    """Stands for a process group of the ranks 0 to `_size` - 1."""

    _rank: int = 0
    _size: int = 4
    bound_device_id: torch.device | None = None
    group_name: str = "0"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@dataclass
class Torch:
    """torch.distributed with NCCL, as far as a gang uses it."""

    world: Group = field(default_factory=Group)
    initialized: bool = False
    calls: list[dict[str, Any]] = field(default_factory=list)
    error: Exception | None = None
    pg_map: dict[Group, Any] = field(default_factory=dict)

    @property
    def group(self) -> Any:
        return SimpleNamespace(WORLD=self.world)

    @property
    def distributed_c10d(self) -> Any:
        return self

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.initialized

    def init_process_group(self, backend: str, **options: Any) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append({"backend": backend, **options})
        self.world.bound_device_id = options.get("device_id")
        self.pg_map[self.world] = backend
        self.initialized = True

    def get_backend(self, group: Group) -> str:
        return "nccl"

    def split_group(self, parent: Group, groups: list[list[int]], **options: Any) -> Group | None:
        if self.error is not None:
            raise self.error
        self.calls.append({"parent": parent, "groups": groups, **options})
        mine = next((group for group in groups if parent.rank() in group), None)
        if mine is None:
            return None
        self.pg_map[made := Group(mine.index(parent.rank()), len(mine))] = "nccl"
        return made


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    fake = Torch()
    monkeypatch.setattr(process_group, "dist", fake)
    monkeypatch.setattr(process_group, "world", fake)
    monkeypatch.delenv(ASYNC_ERROR_HANDLING, raising=False)
    yield fake
    os.environ.pop(ASYNC_ERROR_HANDLING, None)


def begun(nccl: Torch, rank: int = 0, size: int = 4, **options: Any) -> ProcessGroupGang:
    nccl.world = Group(rank, size)
    gang = ProcessGroupGang.create_default_process_group(CUDA, **options)
    nccl.calls.clear()
    return gang


# -- the default process group


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:3", 3)])
def test_nccl_is_initialized_at_once_on_the_ranks_device(nccl: Torch, device: str, index: int) -> None:
    gang = ProcessGroupGang.create_default_process_group(torch.device(device))
    assert nccl.calls == [
        {"backend": "nccl", "timeout": timedelta(minutes=15), "device_id": torch.device("cuda", index)}
    ]
    assert gang.device == torch.device("cuda", index)


def test_a_timeout_is_passed_on(nccl: Torch) -> None:
    ProcessGroupGang.create_default_process_group(CUDA, timeout=timedelta(seconds=7))
    assert nccl.calls[0]["timeout"] == timedelta(seconds=7)


def test_streams_are_of_high_priority_if_wanted(nccl: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SimpleNamespace(Options=lambda **given: given)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    ProcessGroupGang.create_default_process_group(CUDA, high_priority=True)
    assert nccl.calls[0]["pg_options"] == {"is_high_priority_stream": True}


def test_an_asynchronous_error_does_not_end_the_process(nccl: Torch) -> None:
    """2 is CleanUpOnly in ProcessGroupNCCL.hpp. fairseq2's 1 and torch's own 3 end the process, and an elastic survivor
    with it."""
    ProcessGroupGang.create_default_process_group(CUDA)
    assert os.environ[ASYNC_ERROR_HANDLING] == "2"


def test_who_has_chosen_otherwise_is_not_overruled(nccl: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASYNC_ERROR_HANDLING, "1")
    ProcessGroupGang.create_default_process_group(CUDA)
    assert os.environ[ASYNC_ERROR_HANDLING] == "1"


def test_nothing_of_cuda_is_asked_for_on_the_cpu(nccl: Torch) -> None:
    ProcessGroupGang.create_default_process_group(torch.device("cpu"), high_priority=True)
    assert nccl.calls == [{"backend": "gloo", "timeout": timedelta(minutes=15)}]
    assert ASYNC_ERROR_HANDLING not in os.environ


def test_what_cannot_be_initialized(nccl: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"`device` must be a torch.device of type `cpu` or `cuda`, but is .*meta"):
        ProcessGroupGang.create_default_process_group(torch.device("meta"))
    for error in (RuntimeError("no network"), ValueError("no RANK")):
        nccl.error = error
        with pytest.raises(GangError, match=f"could not be initialized: {error}") as caught:
            ProcessGroupGang.create_default_process_group(CUDA)
        assert caught.value.__cause__ is error
    nccl.initialized = True
    with pytest.raises(InvalidOperationError, match="is initialized already"):
        ProcessGroupGang.create_default_process_group(CUDA)
    monkeypatch.setattr(Torch, "is_available", lambda self: False)
    with pytest.raises(NotSupportedError, match="not available"):
        ProcessGroupGang.create_default_process_group(CUDA)


# -- gangs out of it


# GRID-1
def test_gangs_along_axes_are_split_in_one_call_each(nccl: Torch) -> None:
    root = begun(nccl, 5, 8, timeout=timedelta(seconds=9))
    gangs = create_parallel_gangs(root, tp_size=2, pp_size=2)
    assert [(call["group_desc"], call["groups"]) for call in nccl.calls] == [
        ("pp", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("dp", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("tp", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ]
    assert all(call["parent"] is nccl.world and call["timeout"] == timedelta(seconds=9) for call in nccl.calls)
    assert (gangs.pp.rank, gangs.dp.rank, gangs.tp.rank) == (1, 0, 1)


def test_a_gang_of_a_gang_is_split_from_it(nccl: Torch) -> None:
    gangs = create_parallel_gangs(begun(nccl, 5, 8), tp_size=2)
    nccl.calls.clear()
    hybrid = create_fsdp_gangs(gangs, 2)
    assert [(call["group_desc"], call["groups"]) for call in nccl.calls] == [
        ("rdp", [[0, 2], [1, 3]]),
        ("sdp", [[0, 1], [2, 3]]),
    ]
    assert all(call["parent"] is gangs.dp.as_process_group() for call in nccl.calls)
    assert (hybrid.rdp.rank, hybrid.sdp.rank) == (1, 0)


def test_a_gang_of_some_ranks_is_split_off(nccl: Torch) -> None:
    """`new_group` would wait for all ranks of the default group, once that was initialized eagerly."""
    root = begun(nccl, 2)
    gang = root.create_gang([2, 0])
    assert nccl.calls[0]["groups"] == [[0, 2]]
    assert gang is not None
    assert (gang.rank, gang.size, gang.device) == (1, 2, CUDA)
    assert root.create_gang([0, 1]) is None


def test_a_grid_splits_with_its_options(nccl: Torch) -> None:
    grid = GangGrid([2, 2], ["tp", "cp"], root=begun(nccl, 3))
    gang: Gang | None = grid.create_gang("cp", timeout=timedelta(seconds=5), pg_options="mine", group_desc="context")
    assert nccl.calls[0] == {
        "parent": nccl.world,
        "groups": [[0, 2], [1, 3]],
        "timeout": timedelta(seconds=5),
        "pg_options": "mine",
        "group_desc": "context",
    }
    assert gang is not None
    assert (gang.rank, gang.size) == (1, 2)


def test_a_split_that_fails_is_a_gang_error(nccl: Torch) -> None:
    root = begun(nccl)
    nccl.error = RuntimeError("no communicator")
    with pytest.raises(GangError, match=r"the dp gangs \[\[0, 2\], \[1, 3\]\] could not be made: no communicator"):
        create_parallel_gangs(root, tp_size=2)
