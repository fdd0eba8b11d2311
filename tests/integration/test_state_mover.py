"""State that moves to the seats of another layout, over the real servers of the ranks that keep it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from elasticgang import testing
from elasticgang.checkpoint.saved_objects import ModelMismatch
from elasticgang.layout import ParallelLayout
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import ACTIVE, FormerState, Holder, Model, Seat
from elasticgang.reshape import kept_state, state_mover
from elasticgang.reshape.state_mover import StateMover
from elasticgang.state import transport
from elasticgang.state.dtensor import local
from elasticgang.state.snapshot_server import SnapshotServer
from elasticgang.torch_private import forget_meshes

ONE, PAIR = ParallelLayout(), ParallelLayout(sdp=2)
TIP = Attempt(7, 3)
ROWS, COLUMNS = 7, 5  # neither divides by 2


class Divided(nn.Module):
    scale: Tensor

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix)
        self.register_buffer("scale", torch.zeros(3))


class Rank:
    """The state of one rank and its server: a matrix that the axes of `layout` divide, a buffer, what an optimizer
    keeps of the matrix, and a plain object."""

    def __init__(self, layout: ParallelLayout, model: Model, matrix: Tensor) -> None:
        """`matrix`: whole."""
        self.layout, self.model = layout, model
        self.server = SnapshotServer("127.0.0.1")
        self.progress: list[tuple[int, int]] = []
        self.mover = StateMover(self.server, lambda received, total: self.progress.append((received, total)))
        self.count = Count()
        with self.mesh() as place:
            self.module = Divided(place(matrix))
            self.optim = torch.optim.SGD([self.module.matrix], lr=0.0, momentum=0.9)
            self.module.matrix.grad = place(matrix * 2)
            self.optim.step()
            self.server.register(module=self.module, optim=self.optim, count=self.count)

    @contextlib.contextmanager
    def mesh(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """As this rank of a job that does not exist: makes a DTensor of its part of a whole tensor."""
        sizes = self.layout.sdp, self.layout.tp
        _, sdp, tp = self.model
        dist.init_process_group("fake", rank=sdp * sizes[1] + tp, world_size=sizes[0] * sizes[1], store=FakeStore())
        forget_meshes()
        try:
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("sdp", "tp"))

            def place(whole: Tensor) -> Tensor:
                part = whole.chunk(sizes[0], 0)[sdp].chunk(sizes[1], 1)[tp].clone()
                spec = [Shard(0), Shard(1)]
                return DTensor.from_local(part, mesh, spec, run_check=False, shape=whole.shape, stride=whole.stride())

            yield place
        finally:
            dist.destroy_process_group()

    @property
    def address(self) -> Seat:
        return Seat("", "", "", 0, self.server.address, ACTIVE)

    def keep(self) -> None:
        with self.mesh():
            self.mover.keep(self.former, self.layout, is_dropped=False)

    @property
    def former(self) -> FormerState:
        return FormerState(TIP, 0, self.model)

    def moves(self, holders: Sequence[Rank], *, attempt: Attempt = TIP, rank: int = 0, is_over: bool = False) -> bool:
        named = [(each.address, Holder("", 0, each.model)) for each in holders]
        seat = (self.layout, self.model)
        with self.mesh():
            return self.mover.move(named, holders[0].layout, attempt, seat, rank, lambda: is_over)

    def holds(self, matrix: Tensor) -> bool:
        """Its parts of `matrix`, and of what the optimizer keeps of it."""
        with self.mesh() as place:
            wanted = local(place(matrix))
            momentum = self.optim.state[self.module.matrix]["momentum_buffer"]
            return torch.equal(local(self.module.matrix), wanted) and torch.equal(local(momentum), 2 * wanted)


class Count:
    """A registered object."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def matrix(seed: int = 1) -> Tensor:
    return torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def ranks_of(layout: ParallelLayout, whole: Tensor) -> list[Rank]:
    models = itertools.product(range(1), range(layout.sdp), range(layout.tp))
    return [Rank(layout, model, whole) for model in models]


def keepers(layout: ParallelLayout, *, copies: int = 1) -> list[Rank]:
    found = [rank for _ in range(copies) for rank in ranks_of(layout, matrix())]
    for rank in found:
        rank.module.scale.fill_(5.0)
        rank.count.number = 9
        rank.keep()
    return found


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank tries once, and no holder is waited for."""
    monkeypatch.setattr(state_mover, "MOVE_TIMEOUT_S", -1.0)
    monkeypatch.setattr(state_mover, "READY_TIMEOUT_S", 0.0)


# MOVE-1, KEPT-1
@pytest.mark.parametrize("piece_bytes", [8, 4 << 20])
@pytest.mark.parametrize(
    ("former", "later"),
    [
        (PAIR, ONE),
        (ONE, PAIR),
        (PAIR, ParallelLayout(sdp=3)),
        (ParallelLayout(sdp=2, tp=2), ParallelLayout(tp=2)),
        (ParallelLayout(tp=2), ParallelLayout(sdp=2)),
        (ParallelLayout(sdp=2), ParallelLayout(sdp=2, tp=2)),
    ],
    ids=lambda layout: layout.sizes,
)
def test_every_part_of_another_layout_is_made_of_the_kept_ones(
    former: ParallelLayout, later: ParallelLayout, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_state, "PIECE_BYTES", piece_bytes)
    holders = keepers(former)
    for rank in ranks_of(later, matrix(2)):
        assert rank.moves(holders)
        assert rank.holds(matrix())
        assert rank.count.number == 9
        assert torch.equal(rank.module.scale, torch.full((3,), 5.0))


class Average:
    """Averaged weights, as DTensors; or, before the first step, none."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            self.weights[name].copy_(tensor)


def averaging(layout: ParallelLayout, whole: Tensor) -> list[tuple[Rank, Average]]:
    """Ranks that average their weights too."""
    found = []
    for rank in ranks_of(layout, matrix(2)):
        with rank.mesh() as place:
            average = Average({"matrix": place(whole)})
            rank.server.register(average=average)
        found.append((rank, average))
    return found


# LOADER-6
@pytest.mark.parametrize(
    ("former", "later"),
    [(PAIR, ONE), (ONE, PAIR), (ParallelLayout(sdp=2, tp=2), ParallelLayout(tp=2)), (PAIR, ParallelLayout(tp=2))],
    ids=lambda layout: layout.sizes,
)
def test_what_an_object_has_of_sharded_tensors_is_made_of_the_kept_parts(
    former: ParallelLayout, later: ParallelLayout, impatient: None
) -> None:
    holders = [rank for rank, _ in averaging(former, matrix(3))]
    for rank in holders:
        rank.keep()
    for rank, average in averaging(later, torch.zeros(ROWS, COLUMNS)):
        assert rank.moves(holders)
        with rank.mesh() as place:
            assert torch.equal(local(average.weights["matrix"]), local(place(matrix(3))))


# LOADER-6
@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ({}, "average.matrix is a DTensor in it, and no DTensor in this job's object"),
        ({"matrix": torch.zeros(4, COLUMNS)}, "average.matrix is a DTensor in it"),
    ],
    ids=["none", "plain"],
)
def test_an_object_that_has_no_dtensor_where_one_was_kept_is_refused(weights: dict[str, Tensor], told: str) -> None:
    holders = [rank for rank, _ in averaging(PAIR, matrix(3))]
    for rank in holders:
        rank.keep()
    later = Rank(ParallelLayout(tp=2), (0, 0, 0), matrix(2))
    later.server.register(average=Average(weights))
    with pytest.raises(ModelMismatch, match=told):
        later.moves(holders)


class Made(TorchFunctionMode):
    """The devices that `torch.empty` was called for; None: the default device."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[object] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.empty:
            self.devices.add(kwargs.get("device"))
        return function(*args, **(kwargs or {}))


def test_state_moves_through_the_host_whatever_the_default_device_is(impatient: None) -> None:
    """A list of what there is to fetch would otherwise take the memory of the whole state on the device."""
    holders = keepers(PAIR)
    (rank,) = ranks_of(ONE, matrix(2))
    with Made() as made:
        assert rank.moves(holders)
    assert rank.holds(matrix())
    assert made.devices == {"cpu"}


def test_a_rank_takes_what_it_keeps_itself(impatient: None) -> None:
    """Its objects are those of another seat by then, and no server need be asked."""
    whole = Rank(ONE, (0, 0, 0), matrix())
    whole.keep()
    whole.server.close()
    with whole.mesh() as place:
        whole.module.matrix = nn.Parameter(place(matrix(2)))
    with torch.no_grad():
        assert whole.moves([whole])


def test_a_rank_says_how_many_bytes_it_has_fetched_from_others(impatient: None) -> None:
    holders = keepers(PAIR)
    (rank,) = ranks_of(ONE, matrix(2))
    assert rank.moves(holders)
    num_bytes = 2 * ROWS * COLUMNS * 4 + 3 * 4  # the matrix, its momentum, and the buffer
    assert rank.progress[-1] == (num_bytes, num_bytes)
    assert len(rank.progress) > 2
    assert all(received <= most for received, most in rank.progress)
    rank.keep()
    assert rank.moves([rank])
    assert rank.progress[-1] == (0, 0), "it has all of it"


# MOVE-2
@pytest.mark.parametrize("num_requested", [1, 3, 64])
@pytest.mark.parametrize("num_sent", [1, 2, 5])
def test_another_holder_of_the_part_sends_the_rest_when_one_dies(
    num_requested: int, num_sent: int, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part has nine pieces or more; one of its holders ends the connection after so many."""
    monkeypatch.setattr(kept_state, "PIECE_BYTES", 8)
    monkeypatch.setattr(state_mover, "NUM_REQUESTED", num_requested)
    holders = keepers(PAIR, copies=2)
    sent: list[int] = []

    def drop_once() -> None:
        sent.append(threading.get_ident())
        if sent.count(sent[0]) == num_sent and sent[-1] == sent[0]:
            raise ConnectionResetError

    (rank,) = ranks_of(ONE, matrix(2))
    with testing.fail_at("piece_sent", drop_once):
        assert rank.moves(holders)
    assert rank.holds(matrix())
    assert rank.progress[-1] == (2 * ROWS * COLUMNS * 4 + 3 * 4,) * 2, "no piece counts twice"


# KEPT-1
def test_a_rank_that_needs_a_few_rows_fetches_little_more(impatient: None) -> None:
    """Its part is one half of a tensor that another rank keeps whole."""
    whole = torch.rand(1024, 256, generator=torch.Generator().manual_seed(1))
    holder = Rank(ONE, (0, 0, 0), whole)
    holder.keep()
    first, _ = ranks_of(PAIR, torch.zeros(1024, 256))
    assert first.moves([holder])
    assert first.holds(whole)
    assert first.progress[-1][0] == 2 * whole.numel() * 4 // 2 + 3 * 4


# KEPT-1
@pytest.mark.parametrize("num_rows", [8, 9, 17])
def test_a_large_tensor_is_kept_in_eight_pieces_at_least(num_rows: int) -> None:
    holder = Rank(ONE, (0, 0, 0), torch.rand(num_rows, (64 << 10) // 4))
    with holder.mesh():
        kept = kept_state.KeptState(holder.former, ONE, holder.server.registered.tree())
    assert all(len(tensor.pieces) >= 8 for tensor in kept.entries() if len(tensor.shape) == 2)


# MOVE-1
def test_a_piece_with_another_digest_changes_nothing(impatient: None) -> None:
    holders = keepers(PAIR)
    (first,) = ranks_of(ONE, matrix(2))
    assert first.moves(holders)  # the digests are made
    with torch.no_grad():
        local(holders[1].module.matrix).add_(1.0)
    (second,) = ranks_of(ONE, matrix(2))
    assert not second.moves(holders)
    assert second.holds(matrix(2))
    assert second.count.number == 0
    assert second.progress[-1] == (0, 0), "the status shows no heal that is under way"


# MOVE-3
def test_a_holder_serves_what_it_keeps_and_nothing_else(impatient: None) -> None:
    holders = keepers(PAIR)
    (rank,) = ranks_of(ONE, matrix(2))
    assert not rank.moves(holders, attempt=Attempt(8, 3))
    holders[0].mover.drop()
    assert not rank.moves(holders)
    assert not rank.moves(holders, is_over=True)
    assert rank.holds(matrix(2))


# KEPT-2
def test_state_that_is_dropped_while_it_is_described_is_not_served(
    impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders = keepers(PAIR)
    digest = transport.digest

    def digest_late(data: memoryview) -> bytes:
        holders[0].mover.drop()
        return digest(data)

    monkeypatch.setattr(transport, "digest", digest_late)
    (rank,) = ranks_of(ONE, matrix(2))
    assert not rank.moves(holders)
    assert rank.holds(matrix(2))


# KEPT-2
def test_what_forward_changes_is_kept_as_it_was(impatient: None) -> None:
    holders = keepers(PAIR)
    for holder in holders:
        holder.module.scale.fill_(6.0)
        holder.count.number = 10
    (rank,) = ranks_of(ONE, matrix(2))
    assert rank.moves(holders)
    assert torch.equal(rank.module.scale, torch.full((3,), 5.0))
    assert rank.count.number == 9


# MOVE-4
@pytest.mark.parametrize(
    "changed",
    [
        {"start": [0, 1]},
        {"shape": [1 << 40, 1]},
        {"shape": [-1, 1]},
        {"digest": "x"},
        {"file": "../kept-0-0-0.safetensors"},
        {"file": "kept-0-1-0.safetensors"},
    ],
    ids=str,
)
def test_a_piece_that_is_none_is_refused_before_anything_is_read(
    changed: dict[str, object], impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (holder,) = keepers(ONE)
    describe = kept_state.KeptState.describe

    def describe_wrongly(self: kept_state.KeptState) -> object:
        described = describe(self)
        found = next(tensor for tensor in described["tensors"] if tensor["name"] == "module.matrix")
        found["pieces"] = [{**piece, **changed} for piece in found["pieces"]]
        return described

    monkeypatch.setattr(kept_state.KeptState, "describe", describe_wrongly)
    (rank,) = ranks_of(ONE, matrix(2))
    with testing.fail_at("piece_sent", lambda: pytest.fail("a piece was read")):
        assert not rank.moves([holder])
    assert rank.holds(matrix(2))


def test_a_model_with_other_tensors_is_refused() -> None:
    (holder,) = keepers(ONE)
    rank = Rank(ONE, (0, 0, 0), torch.zeros(ROWS + 1, COLUMNS))
    with pytest.raises(ModelMismatch, match=r"module.matrix is \[7, 5\] in it, but \[8, 5\] in this job"):
        rank.moves([holder])


# MOVE-6
@pytest.mark.parametrize(
    ("layout", "layouts", "warns"),
    [
        (PAIR, (PAIR, ONE), True),
        (PAIR, (PAIR, ParallelLayout(sdp=2, tp=2)), True),
        (PAIR, (PAIR, ParallelLayout(pp=2, sdp=2)), False),
        (ONE, (PAIR, ONE), False),
    ],
)
def test_a_buffer_that_cannot_move_is_warned_of_once(
    layout: ParallelLayout, layouts: tuple[ParallelLayout, ...], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(layout, (0, 0, 0), matrix())
    rank.server.begin(Attempt(0, 1))
    rank.module.scale += 1
    for step in range(1, 4):
        rank.mover.check_buffers(layout, layouts)
        rank.server.begin(Attempt(step, 1))
        rank.module.scale += 1
    assert [record.getMessage().count("has changed module.scale") for record in caplog.records] == [1] * warns


# MOVE-6
def test_buffers_that_stay_as_they_are_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(PAIR, (0, 0, 0), matrix())
    rank.module.register_buffer("count", torch.tensor(0))
    rank.server.begin(Attempt(0, 1))
    rank.module.get_buffer("count").add_(1)  # which all ranks do
    rank.mover.check_buffers(PAIR, (PAIR, ONE))
    assert not caplog.records
