"""A learner heals from peers: what it gets, which attempt it gets, and what comes of sources that fail."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import elasticgang as eg
from elasticgang import testing
from elasticgang.protocol.commit import Attempt
from elasticgang.state import serving, staging, striped_fetch, transport
from elasticgang.state import snapshot_server as keeper_module
from elasticgang.state.dtensor import local
from elasticgang.state.serialization import flatten
from elasticgang.state.snapshot_server import MAX_REQUEST_BYTES
from elasticgang.state.transport import Channel
from tests.integration.state_ranks import (
    AT,
    AUTHENTICATOR,
    DEADLINE_S,
    FIRST,
    Background,
    FakeSource,
    Rank,
    Ranks,
    Wire,
    num_chunk_bytes,
    same,
)

# -- healing


def test_the_whole_state_is_healed_to_the_bit(ranks: Ranks) -> None:
    source, healer = ranks(3), ranks(1)
    source.server.begin(AT)
    assert healer.server.heal([source.server.address], AT)
    assert same(healer.large(), source.large())
    assert same(healer.small(), source.small())
    assert same(healer.optim.state_dict(), source.optim.state_dict())
    for rank in (source, healer):
        torch.manual_seed(9)
        rank.train()
    assert same(healer.large(), source.large())


@pytest.mark.parametrize("attempt", [FIRST, AT])
def test_a_state_is_healed_whatever_the_default_device_is(attempt: Attempt, ranks: Ranks) -> None:
    """Otherwise it would be received into a copy of a tensor on that device, which keeps what it had before."""
    source, healer = ranks(3), ranks(1)
    source.server.begin(attempt)
    with torch.device("meta"):
        assert healer.server.heal([source.server.address], attempt)
    assert same(healer.large(), source.large())
    assert same(healer.small(), source.small())


# HEALER-3
def test_a_fault_of_the_device_is_not_taken_for_a_source_that_fails(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    source, healer = ranks(3), ranks(1)
    source.server.begin(AT)
    with monkeypatch.context() as patched:
        patched.setattr(healer.counter, "load_state_dict", fail)
        with pytest.raises(RuntimeError, match="an illegal memory access"):
            healer.server.heal([source.server.address], AT)
    healer.train()  # else it has all chunks
    with testing.fail_at("chunk_received", fail), pytest.raises(RuntimeError, match="an illegal memory access"):
        healer.server.heal([source.server.address], AT)
    assert healer.server.heal([source.server.address], AT)


# -- in place


def tensors_of(rank: Rank) -> dict[str, torch.Tensor]:
    moments = rank.optim.state_dict()["state"]
    kept = {f"{index}.{key}": value for index, of in moments.items() for key, value in of.items()}
    return {**dict(rank.model.named_parameters()), **kept}


# HEALER-1, RECEIVED-1
def test_a_state_is_received_in_the_memory_of_the_registered_tensors(ranks: Ranks) -> None:
    source, healer = ranks(3), ranks(1)
    before = {name: tensor.data_ptr() for name, tensor in tensors_of(healer).items()}
    source.server.begin(AT)
    assert healer.server.heal([source.server.address], AT)
    assert {name: tensor.data_ptr() for name, tensor in tensors_of(healer).items()} == before
    assert same(healer.large(), source.large())


# HEALER-1
@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_heal_takes_no_second_copy_of_the_state(num_steps: int, ranks: Ranks) -> None:
    """Of an optimizer that has state, and of one before its first step, whose state is new memory."""
    source, healer = ranks(1, size=500_000), ranks(num_steps, size=500_000)
    source.server.begin(AT)
    sizes = {name: tensor.nbytes for name, tensor in tensors_of(source).items()}
    own = tensors_of(healer)
    new = sum(size for name, size in sizes.items() if name not in own)
    before = reset_peak_bytes()
    assert healer.server.heal([source.server.address], AT)
    more = peak_bytes() - before - new
    assert same(healer.large(), source.large())
    assert more < sum(sizes.values()) / 4


def reset_peak_bytes() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


# HEALTARGETS-1
def test_tensors_that_share_memory_are_healed_each_by_itself(ranks: Ranks) -> None:
    """As the state of an optimizer may, which the source has in memory of its own since it has healed itself."""
    source, healer = ranks(3), ranks(3)
    state = healer.optim.state
    weights = [state[parameter] for parameter in healer.model.parameters()]
    weights[1]["exp_avg_sq"] = weights[1]["exp_avg"]
    weights[3]["exp_avg"] = weights[2]["exp_avg"]
    source.server.begin(AT)
    assert healer.server.heal([source.server.address], AT)
    assert same(healer.large(), source.large())


def test_a_buffer_that_is_expanded_is_healed(ranks: Ranks) -> None:
    source, healer = ranks(3), ranks(1)
    for rank, value in ((source, 5.0), (healer, 0.0)):
        rank.model.register_buffer("mask", torch.full((3, 1), value).expand(3, 4))
    source.server.begin(AT)
    assert healer.server.heal([source.server.address], AT)
    source.server.forward_done()
    load = healer.server.fetch_after([source.server.address], AT)
    assert load is not None
    load()
    assert healer.model.get_buffer("mask").tolist() == [[5.0] * 4] * 3


@pytest.mark.usefixtures("no_default_group")
def test_buffers_that_are_sharded_are_healed(ranks: Ranks) -> None:
    """Also with the small state after forward, and when a dropped step restores them."""
    mesh = eg.create_parallel_gangs(eg.FakeGang("cpu", size=2), tp_size=2).device_mesh("tp")
    source, healer = ranks(3), ranks(1)
    for rank, value in ((source, 5.0), (healer, 0.0)):
        for name, placement in (("sharded", Shard(0)), ("replicated", Replicate())):
            whole = torch.full((4,), value)
            buffer = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
            rank.model.register_buffer(name, buffer)
    source.server.begin(AT)
    assert healer.server.heal([source.server.address], AT)
    source.model.get_buffer("sharded").mul_(2)
    source.server.forward_done()
    load = healer.server.fetch_after([source.server.address], AT)
    assert same(local_buffers(healer), {"sharded": [5.0] * 2, "replicated": [5.0] * 4})
    assert load is not None
    load()
    assert same(local_buffers(healer), {"sharded": [10.0] * 2, "replicated": [5.0] * 4})
    healer.server.registered.restore()
    assert same(local_buffers(healer), {"sharded": [5.0] * 2, "replicated": [5.0] * 4})


class Average:
    """What a script averages of its parameters, as the tensors that these are."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def state_dict(self) -> dict[str, Any]:
        return {"weights": dict(self.weights), "pairs": [(1, tensor) for tensor in self.weights.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert [number for number, _ in state["pairs"]] == [1] * len(self.weights)
        for name, tensor in state["weights"].items():
            self.weights[name].copy_(tensor)


# SMALLSTATE-2
@pytest.mark.usefixtures("no_default_group")
def test_what_an_object_has_of_sharded_tensors_is_healed(ranks: Ranks) -> None:
    mesh = eg.create_parallel_gangs(eg.FakeGang("cpu", size=2), tp_size=2).device_mesh("tp")
    source, healer = ranks(3), ranks(1)
    averages = []
    for rank, value in ((source, 5.0), (healer, 0.0)):
        whole = torch.full((4, 2), value, dtype=torch.float64)
        sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        averages.append(Average({"sharded": sharded, "plain": torch.full((3,), value)}))
        rank.server.register(average=averages[-1])
    source.server.begin(AT)
    assert healer.server.heal([source.server.address], AT)
    healed = averages[1].weights
    assert (local(healed["sharded"]).tolist(), healed["plain"].tolist()) == ([[5.0] * 2] * 2, [5.0] * 3)
    averages[0].weights["sharded"].mul_(2)
    source.server.forward_done()
    load = healer.server.fetch_after([source.server.address], AT)
    assert load is not None
    load()
    assert local(healed["sharded"]).tolist() == [[10.0] * 2] * 2
    healer.server.registered.restore()
    assert local(healed["sharded"]).tolist() == [[5.0] * 2] * 2


# SMALLSTATE-2
@pytest.mark.usefixtures("no_default_group")
@pytest.mark.parametrize("is_at_source", [True, False])
def test_a_sharded_tensor_of_one_side_alone_is_refused(
    is_at_source: bool, ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = eg.create_parallel_gangs(eg.FakeGang("cpu", size=2), tp_size=2).device_mesh("tp")
    source, healer = ranks(3), ranks(1)
    for rank in (source, healer):
        is_sharded = (rank is source) == is_at_source
        sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
        rank.server.register(average=Average({"w": sharded if is_sharded else torch.ones(2)}))
    before = healer.large(), healer.small()
    source.server.begin(AT)
    assert not healer.server.heal([source.server.address], AT)
    told = "is a DTensor at the source, whose part is [2], and no DTensor here"
    assert f"the state of 'average'['weights']['w'] {told if is_at_source else 'is no DTensor'}" in caplog.text
    assert same((healer.large(), healer.small()), before)


def local_buffers(rank: Rank) -> dict[str, list[float]]:
    """Of buffers that are DTensors."""
    return {name: local(each).tolist() for name, each in rank.model.named_buffers() if isinstance(each, DTensor)}


# RECEIVED-1
def test_tensors_of_any_strides_are_healed(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", 1000)
    source, healer = ranks(3, size=700), ranks(1, size=700)
    for rank in (source, healer):
        weight = next(rank.model.parameters())
        weight.data = weight.data.t().contiguous().t()
    source.server.begin(AT)
    assert healer.server.heal([source.server.address], AT)
    assert not next(healer.model.parameters()).is_contiguous()
    assert same(healer.large(), source.large())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda model: model.register_parameter("more", nn.Parameter(torch.ones(1))), "only the source's 'model' has"),
        (lambda model: delattr(model[0], "bias"), "only this rank's 'model' has the parameter '0.bias'"),
        (
            lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(3, 4))),
            "the parameter '0.weight' of 'model' is [3, 4] of float32 at the source, and [4, 3] of float32 here",
        ),
        (lambda model: model.double(), "the parameter '0.weight' of 'model' is [4, 3] of float64 at the source"),
    ],
    ids=["more", "less", "shape", "dtype"],
)
def test_another_model_is_refused_before_anything_is_written(
    ranks: Ranks, change: Callable[[nn.Module], object], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    source, healer = ranks(0), ranks(1)
    change(source.model)
    source.server.unregister(["model"])
    source.server.register(model=source.model)
    before = healer.large(), healer.small()
    source.server.begin(AT)
    assert not healer.server.heal([source.server.address], AT)
    assert complaint in caplog.text
    assert same((healer.large(), healer.small()), before)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda optim: optim.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
            "the optimizer 'optim' has 2 parameter groups at the source, and 1 here",
        ),
        (
            lambda optim: optim.param_groups[0]["params"].append(nn.Parameter(torch.ones(2))),
            "group 0 of the optimizer 'optim' has 5 parameters at the source, and 4 here",
        ),
    ],
    ids=["groups", "parameters"],
)
@pytest.mark.parametrize("num_steps", [0, 1])
def test_other_parameter_groups_are_refused_before_anything_is_written(
    ranks: Ranks,
    num_steps: int,
    change: Callable[[torch.optim.Optimizer], object],
    complaint: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, healer = ranks(3), ranks(num_steps)
    change(source.optim)
    before = healer.large(), healer.small()
    source.server.begin(AT)
    assert not healer.server.heal([source.server.address], AT)
    assert complaint in caplog.text
    assert same((healer.large(), healer.small()), before)


# HEALTARGETS-2
@pytest.mark.parametrize("num_steps", [0, 1])
def test_parameters_in_another_order_are_refused_before_anything_is_written(
    ranks: Ranks, num_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The bias of the first layer has the shape of both parameters of the second one."""
    source, healer = ranks(3), ranks(num_steps)
    parameters = source.optim.param_groups[0]["params"]
    parameters[1], parameters[2] = parameters[2], parameters[1]
    before = healer.large(), healer.small()
    source.server.begin(AT)
    assert not healer.server.heal([source.server.address], AT)
    assert (
        "parameter 1 of the optimizer 'optim' is '1.weight' of 'model' at the source, and '0.bias' of 'model' here"
        in caplog.text
    )
    assert same((healer.large(), healer.small()), before)


# HEALTARGETS-2
def test_modules_in_another_order_are_refused_before_anything_is_written(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    def swap(model: nn.Module) -> None:
        weight, bias = model[1].weight, model[1].bias  # type: ignore[index]
        del model[1].weight, model[1].bias  # type: ignore[index]
        model[1].bias, model[1].weight = bias, weight  # type: ignore[index]

    source, healer = ranks(3), ranks(1)
    swap(source.model)
    source.server.unregister(["model"])
    source.server.register(model=source.model)
    before = healer.large(), healer.small()
    source.server.begin(AT)
    assert not healer.server.heal([source.server.address], AT)
    assert "of 'model' have another order at the source: '1.bias' is where this rank has '1.weight'" in caplog.text
    assert same((healer.large(), healer.small()), before)


class Bare(torch.optim.Optimizer):
    """What it keeps of a parameter is a tensor, or a number, and it has a count under a key of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            self.state[parameter] = parameter.grad * 2 if number else 0.5
        own: dict[Any, Any] = self.state
        own[-1] = 3
        own[10**6] = torch.ones(2)


def test_what_an_optimizer_keeps_of_a_parameter_may_be_a_bare_tensor(ranks: Ranks) -> None:
    source, healer = ranks(0), ranks(0)
    for rank in (source, healer):
        rank.optim = Bare(rank.model.parameters())  # type: ignore[assignment]
        rank.server.unregister(["optim"])
        rank.server.register(optim=rank.optim)
    for _ in range(2):  # the second heal finds the state of the first one
        source.train()
        source.server.begin(AT)
        assert healer.server.heal([source.server.address], AT)
        with source.server.exclusive():
            assert same(healer.large(), source.large())


def test_a_parameter_that_is_expanded_is_healed(ranks: Ranks) -> None:
    source, healer = ranks(0), ranks(0)
    for rank, value in ((source, 2.0), (healer, 1.0)):
        rank.model.table = nn.Parameter(torch.full((1, 3), value).expand(4, 3), requires_grad=False)
        rank.server.unregister(["model"])
        rank.server.register(model=rank.model)
    for attempt in (AT, FIRST):
        source.server.begin(attempt)
        assert healer.server.heal([source.server.address], attempt)
        table = healer.model.get_parameter("table")
        assert (table.tolist(), table.stride()) == ([[2.0] * 3] * 4, (0, 1))


def test_conjugated_tensors_are_healed(ranks: Ranks) -> None:
    """torch conjugates them when they are read: the bytes in their memory are others."""
    source, healer = ranks(0), ranks(0)
    values = torch.tensor([1 + 2j, 3 - 4j])
    for rank in (source, healer):
        own = values.clone() if rank is source else torch.zeros(2, dtype=torch.complex64)
        rank.model.weight = nn.Parameter(own.conj())
        rank.model.register_buffer("constants", own.conj())
        rank.server.unregister(["model"])
        rank.server.register(model=rank.model)
    source.server.begin(AT)
    assert healer.server.heal([source.server.address], AT)
    for tensor in (healer.model.get_parameter("weight"), healer.model.get_buffer("constants")):
        assert tensor.is_conj()
        assert tensor.tolist() == values.conj().tolist()


# SERIAL-2
def test_a_buffer_that_is_not_strided_is_refused_when_it_is_registered(ranks: Ranks) -> None:
    rank, model = ranks(0), nn.Linear(2, 2)
    model.register_buffer("graph", torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match=r"\['graph'\] is a tensor of the layout sparse_coo"):
        rank.server.register(graph_model=model)


# SERVING-3
@pytest.mark.parametrize("where", ["counter", "optim"])
def test_source_and_healer_say_which_value_cannot_be_sent(
    ranks: Ranks, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    source, healer = ranks(3), ranks(1)
    state = source.counter.state if where == "counter" else source.optim.param_groups[0]
    value = {1, 2}
    state[where] = value
    path = "state['others']['counter']" if where == "counter" else "state['settings']['optim'][0]"
    complaint = f"no rank can heal from this state: {path}['{where}'] is of set; state must be made of tensors"
    source.server.begin(AT)
    for _ in range(2):  # steps
        assert not healer.server.heal([source.server.address], AT)
    source.server.forward_done()
    assert healer.server.fetch_after([source.server.address], AT) is None
    at_source, *at_healer = sorted(caplog.messages, key=lambda line: "could not heal" in line)
    assert at_source.startswith(complaint)
    assert len(at_healer) == 1  # FETCH-11
    assert complaint in at_healer[0]


# SERIAL-3
def test_values_of_numpy_are_healed(ranks: Ranks) -> None:
    source, healer = ranks(3), ranks(1)
    source.optim.param_groups[0]["lr"] = np.float64(0.25)
    source.counter.state["count"] = np.int64(7)
    source.server.begin(AT)
    assert healer.server.heal([source.server.address], AT)
    assert settings(healer)["lr"] == 0.25
    assert healer.counter.state["count"] == 7


# -- after forward


def test_a_learner_gets_what_forward_changed_to_load_when_it_applies(ranks: Ranks) -> None:
    source, learner = ranks(3), ranks(1)
    source.server.begin(AT)
    source.model(torch.randn(5, 3))
    source.counter.state["count"] = 99
    before = learner.large(), learner.small()
    source.server.forward_done()
    load = learner.server.fetch_after([source.server.address], AT)
    assert load is not None
    assert same((learner.large(), learner.small()), before)
    expected = source.small()
    with source.server.exclusive():
        source.model(torch.randn(5, 3))
    load()
    assert same(learner.small(), expected)
    assert learner.counter.state["count"] == 99
    assert same(learner.large(), before[0])


# SMALLSTATE-1
def test_a_learner_gets_the_settings_of_the_beginning_and_those_of_the_apply(ranks: Ranks) -> None:
    source, learner = ranks(3), ranks(1)
    source.server.begin(AT)
    at_begin = settings(source)
    for rank in (learner, source):  # the script does so in every rank, and the learner has not healed
        (group,) = rank.optim.param_groups
        group["lr"], group["betas"] = 0.5, (0.5, 0.25)
        group["new"] = [rank.counter.state["count"]]
    assert learner.server.heal([source.server.address], AT)
    assert settings(learner) == at_begin
    source.server.forward_done()
    load = learner.server.fetch_after([source.server.address], AT)
    assert load is not None
    load()
    assert settings(learner) == settings(source)
    assert settings(learner)["lr"] == 0.5


# SMALLSTATE-1
def test_a_step_that_is_dropped_does_not_change_settings(ranks: Ranks) -> None:
    rank = ranks(1)
    (group,) = rank.optim.param_groups
    group["lr"] = lr = torch.tensor(0.25)
    at_begin = {**settings(rank), "lr": 0.25}
    rank.server.begin(AT)
    lr.mul_(2)
    group["weight_decay"], group["new"] = 0.75, 1
    rank.server.registered.restore()
    assert rank.optim.param_groups == [group]
    assert group["lr"] is lr
    assert settings(rank) == at_begin


# SMALLSTATE-1
def test_holders_whose_steps_have_changed_settings_do_not_differ_for_a_learner(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(striped_fetch, "STRIPE_BYTES", 1)
    sources, learner = [ranks(3), ranks(3)], ranks(1)
    for source in sources:
        source.optim.param_groups[0]["lr"] = torch.tensor(0.25)
        source.server.begin(AT)
    with torch.no_grad():
        sources[0].optim.param_groups[0]["lr"].mul_(2)
    sources[1].optim.param_groups[0]["weight_decay"] = 0.75
    assert learner.server.heal([source.server.address for source in sources], AT)
    assert settings(learner)["lr"] == 0.25
    assert caplog.messages == []


def settings(rank: Rank) -> dict[str, Any]:
    (group,) = rank.optim.param_groups
    return {key: value for key, value in group.items() if key != "params"}


def test_a_learner_waits_for_the_state_after_forward(ranks: Ranks) -> None:
    source, learner = ranks(3), ranks(1)
    source.server.begin(Attempt(2, 2))
    source.server.forward_done()  # of another step
    source.server.begin(AT)
    fetching = Background(lambda: learner.server.fetch_after([source.server.address], AT))
    source.counter.state["count"] = 99
    source.server.forward_done()
    fetching.result()()
    assert learner.counter.state["count"] == 99


def test_a_forward_that_takes_longer_than_a_step_takes_to_begin_is_waited_for(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "READY_TIMEOUT_S", 0.0)
    source, learner = ranks(3), ranks(1)
    awaited = threading.Event()
    source.server.begin(AT)
    with testing.fail_at("forward_awaited", awaited.set):
        fetching = Background(lambda: learner.server.fetch_after([source.server.address], AT))
        assert awaited.wait(DEADLINE_S)
    source.counter.state["count"] = 99
    source.server.forward_done()  # needs the lock: the wait has begun by then
    load = fetching.result()
    assert load is not None
    load()
    assert learner.counter.state["count"] == 99


def test_a_refusal_says_what_is_served_or_what_is_waited_for(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusal(call: Callable[[], object]) -> str:
        caplog.clear()
        assert not call()
        (line,) = (line for line in caplog.messages if source.server.address in line)
        return line.partition(": ")[2]

    monkeypatch.setattr(keeper_module, "READY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(transport, "FORWARD_TIMEOUT_S", 0.05)
    source, learner = ranks(3), ranks(1)
    address = [source.server.address]
    asked = "the state after step 3 of generation 2"
    assert refusal(lambda: learner.server.heal(address, AT)) == f"it serves no state, not {asked}"
    source.server.begin(Attempt(3, 1))
    its = "the state after step 3 of generation 1"
    assert refusal(lambda: learner.server.heal(address, AT)) == f"it serves {its}, not {asked}"
    source.server.begin(AT)
    waited = refusal(lambda: learner.server.fetch_after(address, AT))
    assert waited == f"the forward of its step on {asked} did not end within 0.05 s"


def test_a_wait_for_a_forward_ends_with_the_step(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    source, learner = ranks(3), ranks(1)
    awaited = threading.Event()
    source.server.begin(AT)
    with testing.fail_at("forward_awaited", awaited.set):
        fetching = Background(lambda: learner.server.fetch_after([source.server.address], AT))
        assert awaited.wait(DEADLINE_S)
    source.server.begin(Attempt(4, 2))
    assert fetching.result() is None
    assert "ended, and it serves the state after step 4 of generation 2 now" in caplog.text


def test_the_state_after_forward_is_not_fetched_from_a_dead_source(ranks: Ranks) -> None:
    source, learner = ranks(3), ranks(1)
    source.server.begin(AT)
    source.server.forward_done()
    source.server.close()
    assert learner.server.fetch_after([source.server.address], AT) is None


def test_a_healer_gets_copies(ranks: Ranks) -> None:
    source, healer = ranks(3), ranks(1)
    source.server.begin(AT)
    healer.server.heal([source.server.address], AT)
    expected = healer.large(), healer.small()
    source.train()
    source.counter.state["seen"].append(3)
    assert same((healer.large(), healer.small()), expected)


def test_the_served_small_state_is_from_the_beginning_of_the_step(ranks: Ranks) -> None:
    """SNAPSHOT-1: forward has changed the buffers and the object since."""
    source, healer = ranks(3), ranks(1)
    source.server.begin(AT)
    expected = source.small()
    source.model(torch.randn(5, 3))
    source.counter.state["count"] = 99
    source.counter.state["seen"].append(3)
    assert healer.server.heal([source.server.address], AT)
    assert healer.counter.state["count"] == 3
    assert healer.counter.state["seen"] == [1, 2]
    assert same(healer.small()[0], expected[0])


def test_large_states_come_in_many_chunks(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", 1000)
    source, healer = ranks(1, size=700), ranks(0, size=700)
    source.server.begin(AT)
    assert healer.server.heal([source.server.address], AT)
    assert same(healer.large(), source.large())


def test_many_heal_from_one_at_once(ranks: Ranks) -> None:
    source, healers = ranks(2), [ranks(0) for _ in range(serving.MAX_SERVED)]
    source.server.begin(AT)
    waiting = [
        Background(lambda healer=healer: healer.server.heal([source.server.address], AT))  # type: ignore[misc]
        for healer in healers
    ]
    assert all(each.result() for each in waiting)
    assert all(same(healer.large(), source.large()) for healer in healers)


# -- which attempt


@pytest.mark.parametrize("wrong", [Attempt(3, 1), Attempt(4, 2), Attempt(2, 2)])
def test_another_attempt_is_refused_and_nothing_changes(
    ranks: Ranks, wrong: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "READY_TIMEOUT_S", 0.05)
    source, healer = ranks(3), ranks(1)
    before = healer.large(), healer.small()
    source.server.begin(AT)
    assert not healer.server.heal([source.server.address], wrong)
    assert same((healer.large(), healer.small()), before)


def test_a_healer_waits_until_the_source_begins_the_step(ranks: Ranks) -> None:
    source, healer = ranks(3), ranks(1)
    healing = Background(lambda: healer.server.heal([source.server.address], AT))
    source.server.begin(Attempt(2, 2))
    source.server.begin(AT)
    assert healing.result()
    assert same(healer.large(), source.large())


def test_a_source_without_state_serves_nobody(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "READY_TIMEOUT_S", 0.05)
    source, healer = ranks(3), ranks(1)
    source.server.begin(None)
    assert not healer.server.heal([source.server.address], AT)


def test_a_wait_for_the_source_ends_with_the_generation(ranks: Ranks) -> None:
    """The source may have left the generation, and wait for this rank to leave it too."""
    source, healer = ranks(3), ranks(1)
    over = threading.Event()
    healing = Background(lambda: healer.server.heal([source.server.address], AT, over.is_set))
    over.set()
    assert healing.result() is False


def test_no_source_is_asked_after_a_cancel(ranks: Ranks) -> None:
    healer = ranks(1)
    with FakeSource(lambda channel: None) as source:
        assert not healer.server.heal([source.address], AT, lambda: True)
        assert source.request == {}


# -- sources that fail


def test_a_dead_source_is_skipped(ranks: Ranks) -> None:
    source, healer, dead = ranks(3), ranks(1), ranks(2)
    dead.server.close()
    source.server.begin(AT)
    assert healer.server.heal([dead.server.address, source.server.address], AT)
    assert same(healer.large(), source.large())


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_source_that_dies_in_the_middle_is_followed_by_the_next(ranks: Ranks, share: float) -> None:
    """FETCH-1: also where the first one had another state."""
    source, other, healer = ranks(3), ranks(2), ranks(1)
    for rank in (source, other):
        rank.server.begin(AT)
    with Wire(other, cut=int(num_chunk_bytes(other) * share)) as dying:
        assert healer.server.heal([dying.address, source.server.address], AT)
        assert dying.from_healer
    assert same(healer.large(), source.large())
    assert same(healer.small(), source.small())


# HEALER-4
def test_nothing_changes_if_no_source_answers(ranks: Ranks) -> None:
    source, healer = ranks(2), ranks(1)
    before = healer.large(), healer.small()
    source.server.begin(FIRST)
    with Wire(source, cut=num_chunk_bytes(source, FIRST) - 1) as dying:
        assert not healer.server.heal([dying.address], FIRST)
    assert same((healer.large(), healer.small()), before)
    assert max(healer.progress) > (0, 0) == healer.progress[-1], "a failed heal shows no progress"
    assert not healer.server.heal([], AT)


@pytest.mark.parametrize("attempt", [FIRST, AT])
@pytest.mark.parametrize("place", [0, 20, -1, -200, -20])
def test_a_corrupt_chunk_is_found_and_the_next_source_is_used(ranks: Ranks, place: int, attempt: Attempt) -> None:
    """HEALER-1: also in the last chunk, so that all others have arrived whole. The first 16 bytes are the digest of the
    small state's first chunk."""
    source, healer = ranks(3), ranks(1)
    before = healer.large(), healer.small()
    source.server.begin(attempt)
    flip = place % num_chunk_bytes(source, attempt)
    with Wire(source, flip=flip) as liar:
        assert not healer.server.heal([liar.address], attempt)
    assert same(healer.small(), before[1])
    assert attempt.step > 0 or same(healer.large(), before[0])  # HEALER-4
    with Wire(source, flip=flip) as liar:
        assert healer.server.heal([liar.address, source.server.address], attempt)
    assert same(healer.large(), source.large())
    assert same(healer.small(), source.small())


# SMALL-1, FETCH-2
@pytest.mark.parametrize("changed", [None, 1, 6], ids=["the same", "a chunk that was received", "one that was not"])
def test_a_small_state_goes_on_where_an_earlier_heal_ended(
    changed: int | None, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", 1000)
    first, other, healer = ranks(3), ranks(3), ranks(1)
    for rank in (first, other):
        rank.counter.state["table"] = torch.arange(2500.0)  # ten chunks, ahead of the large state
    if changed is not None:
        other.counter.state["table"][250 * changed] = -1
    for rank in (first, other):
        rank.server.begin(AT)
    before = healer.small()
    with Wire(first, cut=5000) as wire:
        assert not healer.server.heal([wire.address], AT)
    num_received = healer.server.num_received - 3  # without those of the buffers
    assert num_received >= 3
    assert same(healer.small(), before)
    whole = num_chunk_bytes(other)
    with Wire(other) as wire:
        assert healer.server.heal([wire.address], AT)
    assert same((healer.large(), healer.small()), (other.large(), other.small()))
    num_spared = num_received - (changed == 1)
    assert whole - 1000 * num_spared < wire.num_bytes < whole - 900 * num_spared


# MANAGER-21
def test_a_heal_gets_no_further_by_as_many_chunks_of_a_later_state(ranks: Ranks) -> None:
    source, healer, found = ranks(3), ranks(1), []
    for step in range(3, 6):
        attempt = Attempt(step, 2)
        source.server.begin(attempt)
        with Wire(source, cut=num_chunk_bytes(source, attempt) - 1) as wire:
            assert not healer.server.heal([wire.address], attempt)
        found.append(healer.server.num_received)
        with source.server.exclusive():
            source.train()
    assert 0 < found[0] == max(found)


# RECEIVED-2
def test_a_chunk_that_was_written_to_since_is_fetched_again(ranks: Ranks) -> None:
    source, healer = ranks(3), ranks(1)
    source.server.begin(AT)
    with Wire(source, flip=num_chunk_bytes(source) - 1) as liar:
        assert not healer.server.heal([liar.address], AT)
    assert healer.server.num_received > 0
    with torch.no_grad():
        for parameter in healer.model.parameters():
            parameter.add_(1)
    assert healer.server.heal([source.server.address], AT)
    assert same(healer.large(), source.large())


def answer(manifest: object) -> bytes:
    return json.dumps(manifest).encode()


def manifest(spec: object, shapes: object, digests: Sequence[str] = ()) -> bytes:
    return answer({"small": [{"dict": []}, [], []], "large": [spec, shapes, list(digests)]})


def empty_small(channel: Channel) -> None:
    """After what another rank says of the same large state."""
    other = Rank(3)
    spec, tensors = flatten(other.server.registered.large())
    channel.send_payload(manifest(spec, transport.shapes_of(tensors), ["0" * 32] * len(tensors)))
    assert channel.receive(MAX_REQUEST_BYTES) == {"small": []}
    other.server.close()


def raw(sent: bytes) -> Callable[[Channel], None]:
    return lambda channel: channel.sock.sendall(sent)


def framed(payload: bytes) -> Callable[[Channel], None]:
    """As a member of the job may send it."""
    return lambda channel: channel.send_payload(payload)


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize(
    "send",
    [
        pytest.param(raw(struct.pack("!I", (1 << 32) - 1)), id="a size over the limit"),
        pytest.param(framed(b"nope"), id="no json"),
        pytest.param(framed(pickle.dumps(Evil())), id="a pickle"),
        pytest.param(framed(answer({})), id="no tensors"),
        pytest.param(framed(answer([])), id="a list"),
        pytest.param(framed(manifest({"dict": []}, [])), id="no state"),
        pytest.param(framed(manifest({"tensor": 5}, [])), id="a tensor that was not sent"),
        pytest.param(framed(manifest(None, [[[-3], "float32"]])), id="a negative shape"),
        pytest.param(framed(manifest(None, [[[3], "load"]])), id="a dtype that is a function"),
        pytest.param(framed(manifest(None, [[[3], "no_such"]])), id="a dtype that is none"),
        pytest.param(framed(manifest(None, [[[1 << 62], "float32"]])), id="a tensor beyond all memory"),
        pytest.param(framed(manifest(None, [[[1.0], "float32"]])), id="a size that is no integer"),
        pytest.param(framed(answer({"refused": "it has another attempt"})), id="a refusal"),
        pytest.param(framed(manifest({"dict": [["parameters", {"dict": []}]]}, [])), id="a state without parts"),
        pytest.param(empty_small, id="a small state without parts"),
        pytest.param(raw(b"GET / HTTP/1.1\r\n\r\n"), id="another protocol"),
        pytest.param(raw(struct.pack("!I", 48) + b"x" * 48), id="a wrong MAC"),
        pytest.param(framed(b"[" * 200_000), id="deep nesting"),
    ],
)
def test_an_invalid_state_changes_nothing_and_the_next_source_is_used(
    ranks: Ranks, send: Callable[[Channel], None]
) -> None:
    source, healer = ranks(3), ranks(1)
    before = healer.large(), healer.small()
    with FakeSource(send) as liar:
        assert not healer.server.heal([liar.address], AT)
    assert same((healer.large(), healer.small()), before)
    with FakeSource(send) as liar:
        source.server.begin(AT)
        assert healer.server.heal([liar.address, source.server.address], AT)
    assert same(healer.large(), source.large())


MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
TOO_LARGE = [[[MEMORY_BYTES // 5], "float32"]] * 2  # of which the system would allocate each


# CHANNEL-3
@pytest.mark.parametrize(
    ("manifest", "complaint"),
    [
        ({"small": [None, [], []], "large": [None, TOO_LARGE, []]}, "does not fit into the"),
        ({"small": [None, TOO_LARGE, []], "large": None}, "does not fit into the"),
        ({"small": [None, [], []], "large": [None, [[[1 << 22], "float32"]], []]}, "0 digests do not match 4 chunks"),
        ({"small": [None, [], []], "large": [None, [[[1 << 70, 0], "float32"]], []]}, "is no shape"),
    ],
    ids=["large state", "small state", "digests", "sizes"],
)
def test_no_memory_is_allocated_for_shapes_that_cannot_be(
    ranks: Ranks,
    manifest: dict[str, Any],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    healer, empty, allocated = ranks(1), torch.empty, [0]
    if manifest["large"] is None:
        spec, tensors = flatten(healer.server.registered.large())
        manifest = {**manifest, "large": [spec, transport.shapes_of(tensors), [""] * len(tensors)]}

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        allocated.append(tensor.nbytes if tensor.device.type == "cpu" else 0)
        return tensor

    def send(channel: Channel) -> None:
        channel.send(manifest)
        with contextlib.suppress(OSError):
            while channel.sock.recv(1000):  # it may ask for the small state
                pass

    monkeypatch.setattr(torch, "empty", noted)
    with FakeSource(send) as liar:
        assert not healer.server.heal([liar.address], AT)
    assert complaint in caplog.text
    assert max(allocated) < 1 << 20


def test_a_model_of_another_shape_is_not_loaded_in_part(ranks: Ranks) -> None:
    source, healer = ranks(3, size=5), ranks(1, size=4)
    before = healer.large(), healer.small()
    source.server.begin(AT)
    assert not healer.server.heal([source.server.address], AT)
    assert same((healer.large(), healer.small()), before)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        answer({}),
        answer({"attempt": 3}),
        answer({"attempt": list(AT)}),
        b"[" * 60_000,
        b"x" * (MAX_REQUEST_BYTES + 1),
    ],
)
def test_a_source_outlives_any_request(ranks: Ranks, request_bytes: bytes) -> None:
    source, healer = ranks(3), ranks(1)
    source.server.begin(AT)
    with (
        AUTHENTICATOR.connect(source.server.address) as channel,
        contextlib.suppress(OSError),  # it may have closed before we have
    ):
        channel.send_payload(request_bytes)
        while channel.sock.recv(1 << 16):
            pass
    assert healer.server.heal([source.server.address], AT)
    with source.server.exclusive():
        pass
