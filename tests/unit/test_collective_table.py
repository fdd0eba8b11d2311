"""The table of collectives: what a row needs, and that a row is enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from elasticgang.collectives import table, torch_calls
from elasticgang.collectives.collective import Collective, ReduceOperation
from elasticgang.collectives.table import TABLE, Kind, compose
from elasticgang.errors import NotSupportedError
from elasticgang.gang import FakeGang
from elasticgang.gang.composed import perform

RANK, SIZE = 1, 3
NEITHER = {"monitored_barrier", "recv_anysource"}  # a group of torchft has nothing that they could be made of


def example(call: str) -> Collective:
    """The collective on rank 1 of 3."""
    kind, one, three = TABLE[call], torch.ones(2), tuple(torch.ones(2) for _ in range(SIZE))
    if kind.is_in_place:
        return Collective(call, (one,), (one,))
    whole = call.endswith("_single")
    sizes: dict[str, tuple[Any, Any]] = {
        "all_gather": (torch.ones(6) if whole else three, one),
        "reduce_scatter": (one, torch.ones(6) if whole else three),
        "gather": ((), one),
        "scatter": (one, ()),
        "all_to_all": (three, three),
        "exchange_sum": (one, one),
        "send": ((), one),
        "recv": (one, ()),
        "recv_anysource": ((one, torch.zeros(1, dtype=torch.int64)), ()),
        "messages": ((one,), (torch.ones(3, dtype=torch.int16),)),
        "monitored_barrier": ((), ()),
    }
    outputs, inputs = ((each,) if isinstance(each, Tensor) else each for each in sizes[call.removesuffix("_single")])
    return Collective(call, outputs, inputs, messages=((0, 5), (2, 6)) if call == "messages" else ())


@pytest.mark.parametrize("call", list(TABLE))
def test_every_collective_is_basic_or_made_of_a_basic_one(call: str) -> None:
    """TABLE-2."""
    basic, _ = compose(example(call), RANK, SIZE)
    assert TABLE[basic.call].is_basic != (call in NEITHER)
    assert all(tensor.is_contiguous() for tensor in (*basic.outputs, *basic.inputs))


class Recorder:
    """A process group that performs nothing, and records the collectives that it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def rank(self) -> int:
        return RANK

    def size(self) -> int:
        return SIZE

    def __getattr__(self, name: str) -> Any:
        if name == "_pg":
            raise AttributeError(name)  # it wraps no other group

        def call(*arguments: object, **options: object) -> Recorder:
            self.calls.append(name)
            return self

        return call


@pytest.mark.parametrize("call", sorted(set(TABLE) - {"monitored_barrier", "exchange_sum", "messages"}))
def test_issue_makes_one_call_and_waits_for_nothing(call: str) -> None:
    """TABLE-1."""
    pg = Recorder()
    work, _ = TABLE[call].issue(pg, example(call))
    assert work is pg
    assert len(pg.calls) == 1


def test_one_row_is_enough_for_gangs_that_have_the_basic_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_all_reduce(c: Collective, rank: int, size: int) -> table.Composed:
        total = c.inputs[0].clone()
        return Collective("all_reduce", (total,), (total,)), lambda: table.copy(total * rank, c.outputs[0])

    monkeypatch.setitem(TABLE, "scaled_sum", Kind(TABLE["all_reduce"].issue, by_all_reduce, reduces=True))
    gang = FakeGang("cpu", rank=2, size=3)
    output, source = torch.empty(2), torch.tensor([1.0, 5.0])
    assert gang.start(Collective("scaled_sum", (output,), (source,))).wait()
    assert output.tolist() == [6.0, 30.0]
    perform(gang, Collective("scaled_sum", (output.zero_(),), (source,)))
    assert output.tolist() == [6.0, 30.0]
    assert source.tolist() == [1.0, 5.0]
    with pytest.raises(ValueError, match="`scaled_sum` by sum needs a dtype"):
        table.check_reduction(Collective("scaled_sum", (torch.zeros(1).to(torch.float8_e4m3fn),)))


def test_a_collective_that_cannot_be_made_of_others_is_refused_by_name() -> None:
    with pytest.raises(NotSupportedError, match="FakeGang has no `recv`"):
        perform(FakeGang("cpu"), Collective("recv", (torch.ones(1),)))


def test_a_sum_of_flags_is_their_or() -> None:
    """Gloo adds up bytes."""

    class Reduces(Recorder):
        def allreduce(self, tensors: list[Tensor], options: Any) -> None:
            self.calls.append("MAX" if options.reduceOp == ReduceOp.MAX else "another")

    pg, flags, numbers = Reduces(), torch.tensor([True]), torch.ones(1)
    for tensor in (flags, numbers):
        TABLE["all_reduce"].issue(pg, Collective("all_reduce", (tensor,), (tensor,), ReduceOperation.SUM))
    assert pg.calls == ["MAX", "another"]


def in_groups(pg: Any) -> list[str]:
    """The calls of a group for several messages."""
    TABLE["messages"].issue(pg, example("messages"))
    return list(pg.calls)


# TABLE-4
def test_several_messages_are_one_group_of_a_backend_that_has_groups() -> None:
    class Coalescing(Recorder):
        supports_coalescing = True

        def _get_backend(self, device: torch.device) -> Coalescing:
            return self

    class Other(Recorder):
        def _get_backend(self, device: torch.device) -> Any:
            raise RuntimeError("No backend type associated with device type cuda")

    assert in_groups(Coalescing()) == ["_start_coalescing", "send", "recv", "_end_coalescing"]
    assert in_groups(Other()) == ["send", "recv"]


# TABLE-4
def test_a_group_of_messages_is_ended_when_one_is_refused() -> None:
    class Refusing(Recorder):
        supports_coalescing = True

        def _get_backend(self, device: torch.device) -> Refusing:
            return self

        def recv(self, *arguments: object) -> None:
            raise ValueError("no such rank")

    pg = Refusing()
    with pytest.raises(ValueError, match="no such rank"):
        TABLE["messages"].issue(pg, example("messages"))
    assert pg.calls == ["_start_coalescing", "send", "_end_coalescing"]


def test_a_scalar_is_exchanged_in_a_group_of_one() -> None:
    output, input = torch.tensor(0.0), torch.tensor(5.0)
    (part,) = torch_calls.all_to_all_single(1, output, input).parts
    assert (part.outputs, part.inputs) == ((output,), (input,))
