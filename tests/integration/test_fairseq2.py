"""Parity with `fairseq2.gang`: signatures, error types, which gangs are current, and a script that runs unchanged."""

from __future__ import annotations

import inspect
import json
import operator
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import elasticgang as eg
from elasticgang.gang import gangs as gangs_module
from tests.support import run_preloaded

CPU, META = torch.device("cpu"), torch.device("meta")
EXAMPLE = Path(__file__).with_name("fairseq2_example.py")
DEADLINE_S = 180
pytestmark = pytest.mark.timeout(2 * DEADLINE_S + 60)  # processes import torch, on whatever the machine has left


# -- signatures


# What their callers may write. Ours may take more, if nobody must give it.
OF_GANGS = {
    "close": "",
    "create_gang": "ranks",
    "as_process_group": "",
    "barrier": "",
    "all_reduce": "tensor, op",
    "all_gather": "output_tensor, input_tensor",
    "all_gather_to_list": "output_tensors, input_tensor",
    "broadcast": "tensor, source_rank=0",
    "broadcast_objects": "objects, source_rank=0",
}
THEIRS = {
    "FakeGang": "device, *, rank=0, size=1",
    "ProcessGroupGang.create_default_process_group": "device, *, timeout=None, high_priority=False",
    "Gangs": "*, root, dp, rdp, sdp, tp, pp",
    "create_parallel_gangs": "root_gang, *, tp_size=1",
    "create_fsdp_gangs": "gangs, intra_node_size=None",
    "create_fake_gangs": "device",
    "maybe_get_current_gangs": "",
    "get_current_gangs": "device=None",
    "set_gangs": "gangs, *, meta=False",
    "get_default_gangs": "device=None",
    "set_default_gangs": "gangs, *, meta=False",
    "broadcast_flag": "gang, flag, source_rank=0",
    "all_sum": "gang, value",
    "raise_operational_gang_error": "cause",
    "get_default_device": "",
    "get_world_size": "",
} | {
    f"{kind}.{name}": f"self, {text}" for name, text in OF_GANGS.items() for kind in ("Gang", "FakeGang", "ElasticGang")
}


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [each.replace(annotation=each.empty) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("name", "text"), THEIRS.items())
def test_what_is_written_for_theirs_can_be_called_on_ours(name: str, text: str) -> None:
    theirs = parameters(eval(f"lambda {text}: None"))
    ours = parameters(operator.attrgetter(name)(eg))
    assert ours[: len(theirs)] == theirs
    assert all(each.default is not each.empty for each in ours[len(theirs) :])


@pytest.mark.parametrize("name", ["rank", "size", "device", "supports_process_group"])
def test_what_a_gang_is_are_properties(name: str) -> None:
    for kind in (eg.Gang, eg.FakeGang, eg.ProcessGroupGang, eg.ElasticGang):
        assert isinstance(inspect.getattr_static(kind, name), property)
    assert isinstance(inspect.getattr_static(eg.Gangs, "device"), property)


def test_operations_have_their_numbers() -> None:
    assert {op.name: op.value for op in eg.ReduceOperation} == {"SUM": 1, "MEAN": 2, "PRODUCT": 3, "MIN": 4, "MAX": 5}


def test_all_of_it_is_at_the_top() -> None:
    names = [name.partition(".")[0] for name in THEIRS]
    errors = ["GangError", "NotSupportedError", "InvalidOperationError", "OperationalError", "InternalError"]
    assert set(names) | set(errors) | {"ReduceOperation"} <= set(eg.__all__)
    assert {*names, "ReduceOperation", "GangError"} - {"get_default_device"} <= set(vars(eg.gang))
    for name in errors:
        assert issubclass(getattr(eg, name), Exception)


# -- errors, results and what is changed in place


def test_misuse_has_their_error_types() -> None:
    refused: list[Callable[[], object]] = [
        lambda: eg.FakeGang(CPU, size=0),
        lambda: eg.FakeGang(CPU, rank=-1),
        lambda: eg.FakeGang(CPU, rank=2, size=2),
        lambda: eg.FakeGang(META),
        lambda: eg.ProcessGroupGang.create_default_process_group(META),
        lambda: eg.create_parallel_gangs(eg.FakeGang(CPU, size=4), tp_size=3),
        lambda: eg.create_fsdp_gangs(eg.create_fake_gangs(CPU), 1),
        lambda: eg.FakeGang(CPU, size=2).all_gather(torch.empty(3, 1), torch.empty(1)),
        lambda: eg.FakeGang(CPU, size=2).all_gather_to_list([torch.empty(1)], torch.empty(1)),
    ]
    for call in refused:
        with pytest.raises(ValueError, match="must"):
            call()
    cause = eg.GangError("a peer is gone")
    with pytest.raises(eg.OperationalError, match="collective communication") as caught:
        eg.raise_operational_gang_error(cause)
    assert caught.value.__cause__ is cause


def test_sums_and_flags() -> None:
    gang = eg.FakeGang(CPU, rank=1, size=3)
    assert (eg.all_sum(gang, 2).item(), eg.all_sum(gang, 2).dtype) == (6, torch.int64)
    assert (eg.all_sum(gang, 0.5).item(), eg.all_sum(gang, 0.5).dtype) == (1.5, torch.float32)
    assert eg.all_sum(gang, 1.0).shape == ()
    given = torch.ones(2)
    assert eg.all_sum(gang, given).tolist() == [3.0, 3.0]
    assert given.tolist() == [1.0, 1.0]
    assert eg.broadcast_flag(gang, True, 1) is True
    assert eg.broadcast_flag(gang, False, source_rank=2) is False


def test_the_helpers_of_their_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "3", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    assert eg.get_world_size() == 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert eg.get_default_device() == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert eg.get_default_device() == torch.device("cuda", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(eg.OperationalError, match=r"LOCAL_RANK must be less than .* devices .*2.*, but is 2"):
        eg.get_default_device()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert eg.get_default_device() == torch.device("cuda", 0), "a launcher that shows each rank its own device only"
    monkeypatch.delenv("WORLD_SIZE")
    assert eg.get_world_size() == 1
    for value in ("0", "-1", "two", ""):
        monkeypatch.setenv("WORLD_SIZE", value)
        with pytest.raises(eg.OperationalError, match=f"WORLD_SIZE must be a number above 0, but is '{value}'"):
            eg.get_world_size()


# -- which gangs are current


@pytest.fixture
def _no_defaults() -> Iterator[None]:
    with gangs_module.without_default_gangs():
        yield


def on(device: str) -> eg.Gangs:
    return eg.create_fake_gangs(torch.device(device))


@pytest.mark.usefixtures("_no_defaults")
def test_without_any_they_are_the_same_fake_ones() -> None:
    fake = eg.get_current_gangs()
    assert fake is eg.get_default_gangs() is eg.get_default_gangs(CPU) is eg.get_current_gangs(META)
    assert (fake.root.rank, fake.root.size, fake.device) == (0, 1, CPU)
    assert isinstance(fake.root, eg.FakeGang)
    assert eg.maybe_get_current_gangs() is None


@pytest.mark.usefixtures("_no_defaults")
def test_defaults_are_what_is_seen_outside() -> None:
    default, outer, inner = on("cpu"), on("cpu"), on("cpu")
    eg.set_default_gangs(default)
    with CPU, outer:
        assert eg.get_current_gangs() is outer
        assert eg.get_default_gangs() is default
        with eg.set_gangs(inner):
            assert eg.get_current_gangs() is eg.maybe_get_current_gangs() is inner
        assert eg.get_current_gangs(CPU) is outer
    assert eg.get_current_gangs() is eg.get_current_gangs(CPU) is default
    assert eg.maybe_get_current_gangs() is None


@pytest.mark.usefixtures("_no_defaults")
def test_gangs_are_current_for_their_device() -> None:
    cpu, cuda = on("cpu"), on("cuda:0")
    with cuda, cpu:
        assert eg.get_current_gangs(torch.device("cuda:0")) is cuda
        assert eg.get_current_gangs(torch.device("cuda:1")).device == torch.device("cuda:1")
        assert eg.get_current_gangs() is cpu
    with cpu, cuda:
        assert eg.get_current_gangs() is cpu, "torch's current device"
        assert eg.maybe_get_current_gangs() is cuda


@pytest.mark.usefixtures("_no_defaults")
def test_models_on_meta_see_fake_gangs_unless_it_is_asked_for() -> None:
    gangs, default = on("cpu"), on("cpu")
    fake = eg.get_current_gangs()
    with gangs, META:
        assert eg.get_current_gangs() is fake
        with eg.set_gangs(gangs, meta=True):
            assert eg.get_current_gangs() is gangs
        assert eg.get_current_gangs() is fake
    eg.set_default_gangs(default)
    assert eg.get_default_gangs(META) is fake
    eg.set_default_gangs(default, meta=True)
    assert eg.get_default_gangs(META) is default


@pytest.mark.usefixtures("_no_defaults")
def test_who_has_set_no_device_sees_the_gangs_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fairseq2 they are fake gangs of one: each rank would train for itself, and say nothing."""
    gangs = on("cuda:0")
    with gangs:
        assert eg.get_current_gangs() is gangs
        with CPU:
            assert eg.get_current_gangs() is gangs
    monkeypatch.setattr(gangs_module, "get_default_device", lambda: torch.device("cuda:0"))
    eg.set_default_gangs(gangs)
    assert eg.get_current_gangs() is eg.get_default_gangs() is gangs
    assert eg.get_default_gangs(CPU) is not gangs


# -- a script of theirs


def run(*command: str) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        done = run_preloaded(command, env={"OMP_NUM_THREADS": "1"}, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.replace("}{", "}\n{").split("\n")  # a rank writes its line and the end of it one by one
    return sorted((json.loads(line) for line in lines if line), key=lambda seen: int(seen["root"][0]))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What their script sees in one process."""
    (seen,) = run(sys.executable, str(EXAMPLE))
    return seen


def test_their_script_runs_alone(alone: dict[str, Any]) -> None:
    seen = alone
    assert seen == {
        "root": [0, 1, True],
        "sum of ones": 1,
        "largest rank": 0,
        "gathered": [0],
        "in a list": [0],
        "of rank 0": [1, 1, 1],
        "settings": [{"lr": 0.5}, "adamw"],
        "among the even": [0, 1, 1],
        "dp": [0, 1],
        "tp": [0, 1],
        "pp": [0, 1],
        "sum over tp": 0,
        "fitted": [3.0, seen["fitted"][1]],
        "nested": ["tp 0/1 dp 0/1"] * 2,
        "translated": "a peer is gone",
    }


def test_their_script_runs_on_four_ranks(alone: dict[str, Any]) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    ranks = run(sys.executable, *torchrun, str(EXAMPLE))
    assert len(ranks) == 4
    for rank, seen in enumerate(ranks):
        dp, tp = rank // 2, rank % 2
        assert seen == {
            "root": [rank, 4, True],
            "sum of ones": 4,
            "largest rank": 3,
            "gathered": [0, 10, 20, 30],
            "in a list": [0, 10, 20, 30],
            "of rank 0": [1, 1, 1],
            "settings": [{"lr": 0.5}, "adamw"],
            "among the even": None if rank % 2 else [rank // 2, 2, 2],
            "dp": [dp, 2],
            "tp": [tp, 2],
            "pp": [0, 1],
            "sum over tp": 4 * dp + 1,
            "fitted": alone["fitted"],
            "hybrid": [rank // 2, 2, rank % 2, 2],
            "nested": ["tp 0/1 dp 0/1", f"tp {tp}/2 dp {dp}/2"],
            "a second root": "refused",
            "translated": "a peer is gone",
        }
