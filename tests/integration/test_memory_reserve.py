"""A heal into memory that was reserved for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elasticgang.protocol.commit import Attempt
from elasticgang.state.memory_reserve import MIN_BYTES
from elasticgang.state.snapshot_server import SnapshotServer

AT = Attempt(3, 2)
WIDTH = 2000  # Adam's averages are larger than MIN_BYTES, also six tenths of them


def trained(seed: int, *, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(WIDTH, WIDTH)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(2, WIDTH)).square().sum().backward()
        optim.step()
        optim.zero_grad()
    return model, optim


# RESERVE-1, RESERVE-2, RESERVE-3
@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
def test_a_heal_takes_what_is_reserved_and_allocates_the_rest(share: float) -> None:
    holder, learner = trained(1, steps=2), trained(2, steps=0)
    source = SnapshotServer("127.0.0.1")
    source.register(model=holder[0], optim=holder[1])
    size = source.registered.objects.optimizer_bytes
    assert size > MIN_BYTES / 0.6
    healer = SnapshotServer("127.0.0.1", reserved_bytes=int(size * share))
    healer.register(model=learner[0], optim=learner[1])
    reserve = healer.registered.reserve
    assert reserve is not None
    healer.wait_for_memory()
    assert reserve.is_populated
    assert healer.registered.objects.optimizer_bytes == 0
    try:
        source.begin(AT)
        healer.begin(None)
        assert healer.heal([source.address], AT)
        taken = reserve.num_taken
        healer.begin(AT)
        assert healer.registered.reserve is None
    finally:
        source.close()
        healer.close()
    assert healer.registered.objects.optimizer_bytes == size
    assert (taken > size - 64) is (share == 1.0)  # bytes, of the last tensor's room
    assert (taken > 0) is (share > 0.0)
    for mine, theirs in zip(learner[0].parameters(), holder[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for key, value in holder[1].state[theirs].items():
            assert torch.equal(learner[1].state[mine][key], value)
    learner[0](torch.randn(2, WIDTH)).square().sum().backward()
    learner[1].step()  # the tensors are the optimizer's own


# RESERVE-3
def test_the_hint_does_not_depend_on_what_else_an_optimizer_s_state_has() -> None:
    server = SnapshotServer()
    model, optim = trained(1, steps=1)
    optim.param_groups[0]["of a schedule"] = object()
    server.register(model=model, optim=optim)
    assert server.registered.objects.optimizer_bytes > 2 * 4 * WIDTH * WIDTH


# RESERVE-3
def test_an_optimizer_whose_state_cannot_be_listed_gives_no_hint() -> None:
    server = SnapshotServer()
    model, optim = trained(1, steps=1)

    def fails() -> None:
        raise RuntimeError("not now")

    optim.register_state_dict_pre_hook(lambda optimizer: fails())
    server.register(model=model, optim=optim)
    assert server.registered.objects.optimizer_bytes == 0
