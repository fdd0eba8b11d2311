"""State that moves between pipelines of other stages, over the real servers of the ranks that keep it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from elasticgang.checkpoint.saved_objects import ModelMismatch
from elasticgang.layout import ParallelLayout
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import ACTIVE, FormerState, Holder, Seat
from elasticgang.reshape import kept_state, state_mover
from elasticgang.reshape.state_mover import StateMover
from elasticgang.state.snapshot_server import SnapshotServer

TIP = Attempt(7, 3)
NUM_LAYERS = 4


def weight(layer: int) -> Tensor:
    return torch.arange(6.0).view(3, 2) + 10 * layer


class Scaled(nn.Module):
    """A layer with extra state."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.scale = scale

    def get_extra_state(self) -> int:
        return self.scale

    def set_extra_state(self, state: int) -> None:
        self.scale = state


class Stage(nn.Module):
    """Layers by their numbers in the stage, with a scale for each, and an embedding that every stage has."""

    table: Tensor

    def __init__(self, layers: Sequence[int], *, zero: bool) -> None:
        super().__init__()
        values = {str(number): torch.zeros(3, 2) if zero else weight(layer) for number, layer in enumerate(layers)}
        self.layers = nn.ParameterDict(values)
        self.scales = nn.ModuleList([Scaled(0 if zero else 100 + layer) for layer in layers])
        self.embedding = nn.Parameter(torch.full((2,), 0.0 if zero else 4.0))
        self.register_buffer("table", torch.full((3,), 0.0 if zero else 5.0))


class Count:
    """A registered object."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Rank:
    """One stage. The optimizer keeps twice the values. `zero`: its state is to be fetched."""

    def __init__(self, pp: int, stage: int, *, zero: bool = False, count: int = 9) -> None:
        self.layout, self.stage = ParallelLayout(pp=pp), stage
        self.layers = range(NUM_LAYERS * stage // pp, NUM_LAYERS * (stage + 1) // pp)
        self.server = SnapshotServer("127.0.0.1")
        self.mover = StateMover(self.server)
        self.module = Stage(self.layers, zero=zero)
        self.count = Count(0 if zero else count)
        self.optim = torch.optim.SGD(self.module.parameters(), lr=0.0, momentum=0.9)
        for parameter in () if zero else self.module.parameters():
            parameter.grad = parameter.detach() * 2
        self.optim.step()
        self.server.register(self._name_of, module=self.module, optim=self.optim, count=self.count)

    def _name_of(self, name: str) -> str:
        head, *rest = name.split(".")
        if head not in ("layers", "scales"):
            return name
        return ".".join([head, str(int(rest[0]) + self.layers.start), *rest[1:]])

    def keep(self) -> None:
        self.mover.keep(FormerState(TIP, 0, (self.stage, 0, 0)), self.layout, is_dropped=False)

    def moves(self, holders: Sequence[Rank]) -> bool:
        named = [
            (Seat("", "", "", 0, each.server.address, ACTIVE), Holder("", 0, (each.stage, 0, 0))) for each in holders
        ]
        seat = self.layout, (self.stage, 0, 0)
        return self.mover.move(named, holders[0].layout, TIP, seat, 0, lambda: False)

    def check(self) -> None:
        wanted = [*map(weight, self.layers), torch.full((2,), 4.0)]
        found = [*self.module.layers.values(), self.module.embedding]
        assert all(torch.equal(parameter, value) for parameter, value in zip(found, wanted, strict=True))
        assert torch.equal(self.module.table, torch.full((3,), 5.0))
        assert self.count.number == 9
        assert [each.get_extra_state() for each in self.module.scales] == [100 + layer for layer in self.layers]
        for parameter, value in zip(found, wanted, strict=True):
            assert torch.equal(self.optim.state[parameter]["momentum_buffer"], 2 * value)


# MOVE-5, REGISTERED-1, REGISTERED-4
@pytest.mark.parametrize("piece_bytes", [8, 4 << 20])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2), (3, 2), (2, 3), (4, 1)])
def test_every_stage_takes_its_tensors_from_those_that_keep_them(
    before: int, after: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_state, "PIECE_BYTES", piece_bytes)
    holders = [Rank(before, stage) for stage in range(before)]
    for rank in holders:
        rank.keep()
    for stage in range(after):
        rank = Rank(after, stage, zero=True)
        assert rank.moves(holders)
        rank.check()


def test_a_rank_asks_the_holders_of_its_own_stage_alone_where_stages_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_mover, "MOVE_TIMEOUT_S", -1.0)
    holders = [Rank(2, stage) for stage in range(2)]
    for rank in holders:
        rank.keep()
    holders[0].server.close()
    rank = Rank(2, 1, zero=True)
    assert rank.moves(holders)
    rank.check()


# MERGE-1
def test_what_stages_have_differently_does_not_move() -> None:
    holders = [Rank(2, stage, count=9 + stage) for stage in range(2)]
    for rank in holders:
        rank.keep()
    with pytest.raises(ModelMismatch, match=r"the registered object 'count' differs between the seats 0-0-0 and 1-0-0"):
        Rank(1, 0, zero=True).moves(holders)
    holders = [Rank(2, stage) for stage in range(2)]
    with torch.no_grad():
        holders[1].module.embedding.add_(1.0)
    for rank in holders:
        rank.keep()
    with pytest.raises(ModelMismatch, match=r"two stages have different tensors of the name module\.embedding"):
        Rank(1, 0, zero=True).moves(holders)


# REGISTERED-1
def test_two_tensors_with_one_name_in_the_model_are_refused() -> None:
    server = SnapshotServer("127.0.0.1")
    with pytest.raises(
        ValueError, match="`names` must give each tensor of 'module' a name of its own, but two have 'x'"
    ):
        server.register(lambda name: "x", module=Stage([0], zero=True))


# REGISTERED-1
def test_a_name_is_asked_for_once() -> None:
    """It may depend on the layout, which is another one when the state of the former seat is kept."""
    holders = [Rank(2, stage) for stage in range(2)]
    for rank in holders:
        rank.layers = range(NUM_LAYERS)
        rank.server.begin(TIP)
        rank.keep()
    whole = Rank(1, 0, zero=True)
    assert whole.moves(holders)
    whole.check()
